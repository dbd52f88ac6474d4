"""Replace a model file by file, so that nobody takes files of two saves for one model."""

import contextlib
import errno
import json
import os
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from nvmeio._files.descriptors import ask_anew, best_effort, open_regular
from nvmeio._files.folders import sync_folder
from nvmeio._files.paths import exists_now, synced_folder
from nvmeio._files.times import ambiguous_s
from nvmeio._publish.claims import remove_if
from nvmeio._publish.files import replace_file
from nvmeio._safetensors.parts import SAVE_KEY, VERSION_KEY
from nvmeio._safetensors.places import (
    INDEX_BYTES_MAX,
    INDEX_NAME,
    NUMBERED,
    REPLACING,
    SINGLE_NAME,
    file_at,
    read_index,
    replaced,
)
from nvmeio._tensors.errors import SafetensorError

__all__ = [
    "of_one_save",
    "old_files",
    "parts_of_ranks",
    "replacing_model",
    "require_replaceable",
    "require_whole",
]


@contextlib.contextmanager
def replacing_model(
    folder: str,
    names: Collection[str],
    places: Mapping[str, str] | None,
    *,
    total: int,
    sync: bool,
    old_names: Callable[[Collection[str]], Collection[str]],
    check: Callable[[], None] = lambda: None,
) -> Iterator[Callable[[], None]]:
    """Let the block name the files of a model; then write the index, and remove old files.

    Nobody takes a mixture of files of two models for one.  Call what is yielded before the
    first of the files gets its name: if the old index leads to it, the index then says so,
    until it is written anew, or the block raises before a file was replaced.

    Parameters
    ----------
    folder, names
        Where the files get which names.
    places : mapping of str to str, or None
        The file of each tensor; None for files without an index.
    total : int
        The bytes of all tensors.
    sync : bool
        Whether index and removal are durable.
    old_names : callable
        Returns the names of the files to remove, besides `names`.
    check : callable
        Raises if another save has begun, or goes on, which is to do so alone.  It is called
        before each file is replaced or removed.
    """
    paths = [os.path.join(folder, name) for name in names]
    index, old = os.path.join(folder, INDEX_NAME), None
    contents = b"" if places is None else _text_of(places, total)
    if len(contents) > INDEX_BYTES_MAX:
        raise ValueError(
            f"{index} would have {len(contents)} bytes, and {INDEX_BYTES_MAX} is the "
            "limit: save fewer tensors, or with shorter names, to this folder"
        )
    before: list[tuple[int, ...] | None] | None = None
    options: Any = {"sync": sync, "read_only": True, "check": check}

    def begin() -> None:
        nonlocal before, old
        # This host may remember as missing what another one has saved.
        for path in (index, *paths):
            exists_now(path)
        now = _identities(paths)
        if places is not None and _may_mix(index, {*names}, places, any(now)):
            before, old = now, _contents(index)
            replace_file(REPLACING, index, **options)

    try:
        yield begin
    except BaseException:
        if before is not None and _identities(paths) == before:
            with best_effort():
                if old is not None:
                    replace_file(old, index, **options)
                elif _contents(index) == REPLACING:
                    remove_if(check, [index])
        raise
    check()
    if places is not None:
        replace_file(contents, index, **options)
    others = {*old_names(names)} - {*names}
    if places is None and exists_now(index) and _leads_to(index, {*names} | others):
        # Durably: as long as it exists, loading needs the files that it names.
        with synced_folder(index):
            remove_if(check, [index])
    _remove(check, folder, others, sync=sync)


def _text_of(places: Mapping[str, str], total: int) -> bytes:
    text = {"metadata": {"total_size": total}, "weight_map": {**places}}
    return (json.dumps(text, indent=2, sort_keys=True) + "\n").encode()


def _remove(
    check: Callable[[], None], folder: str, names: Collection[str], *, sync: bool
) -> None:
    """Remove files of an old model, which would be in the way of loading a new one.

    With `sync`, none comes back after a power failure.
    """
    paths = [os.path.join(folder, name) for name in sorted(names)]
    try:
        remove_if(check, paths)
    except OSError as error:
        if error.filename not in paths:
            # Of the check, or a signal handler raised it.
            raise
        words = f"{error.strerror} (the new model is complete, but this file of an old "
        words += "one cannot be removed, beside which some readers refuse it)"
        raise OSError(error.errno, words, error.filename) from None
    if names and sync:
        sync_folder(folder)


def old_files(folder: str, besides: Collection[str] = (), *, single: bool) -> set[str]:
    """Return the files of any model that a model with an index, or one file, replaces."""
    found = parts_of_ranks(folder, "shard-", besides)
    for entry in os.scandir(folder):
        is_whole = entry.name.startswith("model-") and _is_numbered(entry.name)
        is_old = is_whole or (single and entry.name == SINGLE_NAME)
        if is_old and not entry.is_dir(follow_symlinks=False):
            found.add(entry.name)
    return found


def parts_of_ranks(
    folder: str, prefix: str = "", besides: Collection[str] = ()
) -> set[str]:
    """Return the files that torch's or nvmeio's writer of model files has written."""
    found = set()
    for name in {*os.listdir(folder)}.difference(besides):
        if not (name.startswith(prefix) and _is_numbered(name)):
            continue
        try:
            with file_at(os.path.join(folder, name), False) as file:
                said = file.layout.metadata or {}
        except (OSError, SafetensorError):
            continue
        if SAVE_KEY in said or VERSION_KEY in said:
            found.add(name)
    return found


def _is_numbered(name: str) -> bool:
    numbered = NUMBERED.fullmatch(name)
    return numbered is not None and numbered["stem"] == "model"


def require_replaceable(folder: str, names: Iterable[str], *, index: bool) -> None:
    """Raise PermissionError for a file that only another user may replace or remove.

    That is so in a folder with the sticky bit, such as /tmp.
    """
    if index:
        names = {*names, INDEX_NAME}
    about, user = os.stat(folder), os.geteuid()
    if not about.st_mode & stat.S_ISVTX or user in (0, about.st_uid):
        return
    for name in names:
        path = os.path.join(folder, name)
        with contextlib.suppress(FileNotFoundError):
            if os.lstat(path).st_uid != user:
                raise PermissionError(
                    errno.EPERM,
                    "it belongs to another user, and its folder has the sticky bit, so it "
                    "can be neither replaced nor removed; save to another folder",
                    path,
                )


def _may_mix(
    index: str, names: set[str], places: Mapping[str, str], is_there: bool
) -> bool:
    """Return whether an index could lead to files of two models while these are replaced.

    A single file is whole, and so is what an index says of it, if its tensors stay.
    """
    try:
        old, _ = read_index(index)
    except FileNotFoundError:
        return is_there and len(names) > 1
    except (OSError, SafetensorError):
        return True
    return not names.isdisjoint(old.values()) and (len(names) > 1 or old != places)


def _leads_to(index: str, names: set[str]) -> bool:
    """Return whether an index is of an old model, if these files replace or remove some."""
    if SINGLE_NAME in names:
        # It is the model from now on, whatever another index says.
        return True
    try:
        return not names.isdisjoint(read_index(index)[0].values())
    except (OSError, SafetensorError):
        if _contents(index) != REPLACING:
            return False
    # A save did not finish, of whose files there may be none any more.
    there = {*os.listdir(os.path.dirname(index))}
    return not any(name.endswith(".safetensors") for name in there - names)


def of_one_save(path: str) -> Callable[[], None]:
    """Return what raises SafetensorError if the files opened since may be of two saves.

    Call this before the index is read, and what it returns when all files are open: a save
    changes the index before the first of several files gets its name.  `path` is that of
    the index, of a model in one file, or of a folder with an index.
    """
    index = os.path.join(path, INDEX_NAME) if os.path.isdir(path) else path
    before = _version(index)
    if before is not None:
        time.sleep(ambiguous_s(before[1]))

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


def require_whole(folder: str) -> None:
    """Raise SafetensorError if an index says that its files may be of two saves."""
    if _contents(index := os.path.join(folder, INDEX_NAME)) == REPLACING:
        raise replaced(index)


def _version(path: str) -> tuple[int, int] | None:
    """Return what tells a file from others; some mounts change its number."""
    # FUSE remembers that there was none.
    exists_now(path)
    (found,) = _identities([path])
    return None if found is None else (found[2], found[3])


def _identities(paths: list[str]) -> list[tuple[int, ...] | None]:
    """Return what tells each file from another one that gets its name.

    A link leads to a file that is replaced, and stays.
    """
    found: list[tuple[int, ...] | None] = []
    # NFS remembers for seconds which file has a name, and what it is like.
    for folder in {os.path.dirname(path) or "." for path in paths}:
        ask_anew(folder)
    for path in paths:
        ask_anew(path)
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
