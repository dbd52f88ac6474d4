"""Replace a model file by file, so that nobody takes files of two saves for one model."""

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator

from nvmeio._files.descriptors import FOLDER, best_effort, open_regular, opened
from nvmeio._files.kinds import INDEX_END
from nvmeio._files.locks import is_locked
from nvmeio._publish.files import replace_file
from nvmeio._publish.names import final_name
from nvmeio._safetensors.places import (
    INDEX_BYTES_MAX,
    INDEX_NAME,
    REPLACING,
    read_index,
    replaced,
)
from nvmeio._tensors.errors import SafetensorError

__all__ = ["alone_in", "of_one_save", "replacing_model"]

# How long a save waits until another one has renamed its files.
PATIENCE_S = 60


@contextlib.contextmanager
def alone_in(folder: str, *, goes_on: bool) -> Iterator[None]:
    """Wait until no other save renames its files in a folder.

    Users who may only read the folder can lock it too, and must not stop a save.  So a save
    that `goes_on` does so after the limit.  A folder with a temporary name is one that
    atomic_directory() has locked, and nobody else knows.
    """
    if final_name(os.path.basename(os.path.realpath(folder))) is not None:
        yield
        return
    with opened(folder, FOLDER) as descriptor:
        end = time.monotonic() + PATIENCE_S
        while is_locked(descriptor):
            if time.monotonic() > end:
                if goes_on:
                    break
                raise FileExistsError(
                    errno.EEXIST,
                    f"another save renames its files for more than {PATIENCE_S} s, or "
                    "another program has locked the folder; make one save at a time",
                    folder,
                )
            time.sleep(0.01)
        try:
            yield
        finally:
            # At once, also if a child that was forked meanwhile has the descriptor too.
            with best_effort():
                fcntl.flock(descriptor, fcntl.LOCK_UN)


@contextlib.contextmanager
def replacing_model(
    folder: str, names: list[str], *, sync: bool
) -> Iterator[Callable[[], None]]:
    """Let nobody take a mixture of files of two models for one; yield what begins that.

    Call it before the first of several files gets its name.  If one of them replaces a file
    of the index, the index then says so, until the caller writes it anew, or the block
    raises before a file was replaced.
    """
    paths = [os.path.join(folder, name) for name in names]
    index, old = os.path.join(folder, INDEX_NAME), None
    before: list[tuple[int, ...] | None] | None = None

    def begin() -> None:
        nonlocal before, old
        now = _identities(paths)
        if len(paths) > 1 and any(now) and _leads_to(index, names):
            before, old = now, _contents(index)
            replace_file(REPLACING, index, sync=sync, read_only=True)

    try:
        yield begin
    except BaseException:
        if before is not None and _identities(paths) == before:
            with best_effort():
                if old is not None:
                    replace_file(old, index, sync=sync, read_only=True)
                elif _contents(index) == REPLACING:
                    os.unlink(index)
        raise


def _leads_to(index: str, names: list[str]) -> bool:
    """Return whether an index may have one of the files; else it stays whole."""
    try:
        return not {*names}.isdisjoint(read_index(index)[0].values())
    except (OSError, SafetensorError):
        return True


def of_one_save(path: str) -> Callable[[], None]:
    """Return what raises SafetensorError if the files opened since may be of two saves.

    Call this before the index is read, and what it returns when all files are open: a save
    changes the index before the first of several files gets its name.
    """
    index = path if path.endswith(INDEX_END) else os.path.join(path, INDEX_NAME)
    before = _version(index)

    def check() -> None:
        if _version(index) != before:
            raise SafetensorError(
                f"{index} was replaced while the files of its model were opened, which may "
                "be of two models: load it again"
            )
        is_small = before is not None and before[0] == len(REPLACING)
        if is_small and _contents(index) == REPLACING:
            raise replaced(index)

    return check


def _version(path: str) -> tuple[int, ...] | None:
    """Return what tells a file from others; some mounts change its number."""
    (found,) = _identities([path])
    return None if found is None else found[2:]


def _identities(paths: list[str]) -> list[tuple[int, ...] | None]:
    """Return what tells each file from another one that gets its name.

    A link leads to a file that is replaced, and stays.
    """
    found: list[tuple[int, ...] | None] = []
    for path in paths:
        try:
            now = os.stat(path)
        except OSError:
            found.append(None)
        else:
            found.append((now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns))
    return found


def _contents(path: str) -> bytes | None:
    """Return the contents of an index, if it is there and can be read."""
    try:
        with open_regular(path) as file:
            found: bytes = file.read(INDEX_BYTES_MAX + 1)
    except OSError:
        return None
    return found if len(found) <= INDEX_BYTES_MAX else None
