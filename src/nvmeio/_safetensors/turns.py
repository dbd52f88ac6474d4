"""Saves to one folder name their files one after the other."""

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator

from nvmeio._files.descriptors import FOLDER, best_effort, opened
from nvmeio._files.locks import is_locked
from nvmeio._files.paths import is_strangers
from nvmeio._native.descriptor import TemporaryName
from nvmeio._publish.files import new_file
from nvmeio._publish.names import final_name, temporary_name

__all__ = ["alone_in", "wait_for_others"]

# How long a save waits until another one has renamed its files.
PATIENCE_S = 60
# What a save's file is called, with a temporary name, as long as it renames the others.
_MARK = "nvmeio-save"


@contextlib.contextmanager
def alone_in(folder: str, *, goes_on: bool) -> Iterator[None]:
    """Wait until no other save renames its files in a folder.

    Users who may only read the folder can lock it too, and must not stop a save.  So a save
    that `goes_on` does so after the limit, unless a save has the lock, which a file says
    that only a writer can make.  A folder with a temporary name is one that
    atomic_directory() has locked, and nobody else knows.
    """
    if final_name(os.path.basename(os.path.realpath(folder))) is not None:
        yield
        return
    with opened(folder, FOLDER) as descriptor:
        end = time.monotonic() + PATIENCE_S
        while is_locked(descriptor):
            if time.monotonic() > end:
                if goes_on and not _marks_in(folder):
                    break
                raise _busy(folder, "or another program has locked the folder; ")
            time.sleep(0.01)
        else:
            # They are of saves that were killed.
            for left in _marks_in(folder):
                with best_effort():
                    os.unlink(left)
        mark = temporary_name(os.path.join(folder, _MARK))
        try:
            with TemporaryName(mark), new_file(mark, 0o600):
                yield
        finally:
            # At once, also if a child that was forked meanwhile has the descriptor too.
            with best_effort():
                fcntl.flock(descriptor, fcntl.LOCK_UN)


def wait_for_others(folder: str) -> None:
    """Wait until no save renames its files in a folder, before a new one gets the right."""
    end = time.monotonic() + PATIENCE_S
    with opened(folder, FOLDER) as descriptor:
        # Of a save that was killed only the file is left, not the lock.
        while _marks_in(folder) and is_locked(descriptor):
            if time.monotonic() > end:
                raise _busy(folder)
            time.sleep(0.01)
        with best_effort():
            fcntl.flock(descriptor, fcntl.LOCK_UN)


def _marks_in(folder: str) -> list[str]:
    """Return the files of saves that rename others in a folder, or were killed at that."""
    names = [name for name in os.listdir(folder) if final_name(name) == _MARK]
    paths = [os.path.join(folder, name) for name in names]
    return [path for path in paths if not is_strangers(path, folder)]


def _busy(folder: str, or_else: str = "") -> FileExistsError:
    words = f"another save renames its files for more than {PATIENCE_S} s, {or_else}"
    return FileExistsError(errno.EEXIST, f"{words}make one save at a time", folder)
