"""Saves to one folder name their files one after the other."""

import contextlib
import errno
import functools
import os
import time
from collections.abc import Callable, Collection, Iterator

from nvmeio._files.descriptors import ask_anew, best_effort, opened
from nvmeio._files.locks import WriterLock, is_of_a_lock
from nvmeio._files.paths import counts_links
from nvmeio._publish.claims import log_left
from nvmeio._publish.locks import SharedLock
from nvmeio._publish.names import OwnerOf, final_name, remove_left
from nvmeio._safetensors.places import INDEX_NAME, NUMBERED

__all__ = ["LOCK", "alone_in", "remove_parts"]

# How long a save waits until another one has named its files.
PATIENCE_S = 60
# A file, because no server of files knows who has locked a folder.
LOCK, _LOCK_OF = ".nvmeio-save", ("a save of a model", "save of a model names its files")
# What is said where there are no locks, or no files open for reading and writing.
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)


@contextlib.contextmanager
def alone_in(
    folder: str,
    prefix: str = "",
    keep: Collection[str] = (),
    pause: Callable[[float], object] | None = None,
) -> Iterator[Callable[[], None]]:
    """Wait until no other save names its files in a folder; keep others away meanwhile.

    Where the file system has no locks, do not.  A folder with a temporary name is one that
    atomic_directory() has made, and nobody else knows.  `pause` waits for some seconds;
    what it raises ends the waiting.

    Yield what raises BlockingIOError if the server has given the turn to another, after a
    partition.  Ask it when a new file has its temporary name, before it gets its own: who
    takes over the turn of another removes what that has not named yet, of the files whose
    names begin with `prefix`, but none of those to `keep`.
    """
    if final_name(os.path.basename(os.path.realpath(folder))) is not None:
        yield lambda: None
        return
    lock = SharedLock(folder, LOCK, *_LOCK_OF)
    end = time.monotonic() + PATIENCE_S
    try:
        while not _took(lock, end):
            (pause or time.sleep)(0.01)
        if lock.was_held:
            remove_parts(folder, prefix, keep)
        yield functools.partial(_require, lock)
    finally:
        try:
            with best_effort():
                # Unless the server has given it to another, who is in there now.
                lock.require()
                os.unlink(lock.path)
        finally:
            lock.release()


def _took(lock: WriterLock, end: float) -> bool:
    """Try to take the lock; raise FileExistsError after the end."""
    try:
        lock.take()
        if _has_lost_name(lock):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), lock.path)
    except BlockingIOError as error:
        if error.errno is None:
            # A signal handler raised it.
            raise
        if time.monotonic() > end:
            words = (
                f"{error.strerror}, for more than {PATIENCE_S} s; make one save at a time"
            )
            raise FileExistsError(errno.EEXIST, words, lock.path) from None
        return False
    except OSError as error:
        if error.errno == errno.ESTALE and time.monotonic() < end:
            # Who had it has removed it.
            lock.release()
            return False
        if error.errno not in _NO_LOCKS or not _is_of_a_lock(lock.path):
            raise
        with best_effort():
            os.unlink(lock.path)
        return True
    return True


def _require(lock: WriterLock) -> None:
    """Raise BlockingIOError if a lock, where there are any, was lost."""
    if lock.descriptor >= 0:
        if _has_lost_name(lock):
            raise lock.lost()
        lock.require()


def remove_parts(folder: str, prefix: str, keep: Collection[str]) -> None:
    """Remove files of models with temporary names that no save has locked.

    Those that were set aside get their names back.  An index is of all files.
    """

    def is_part(found: OwnerOf) -> bool:
        name = found["name"]
        if found.string in keep or not name.startswith(prefix):
            return False
        numbered = NUMBERED.fullmatch(name)
        return name == INDEX_NAME or (numbered is not None and numbered["stem"] == "model")

    _, error = remove_left(folder, is_part)
    if error is not None:
        log_left(error)


def _has_lost_name(lock: WriterLock) -> bool:
    """Return whether the file that was just locked has been removed.

    This host may remember its name, under which there may be another file by now.  (NFS
    renames what is removed and still open in another process of that host.)
    """
    folder = os.path.dirname(lock.path)
    for path in (folder, f"/proc/self/fd/{lock.descriptor}"):
        ask_anew(path)
    if not lock.has_name:
        return True
    return os.fstat(lock.descriptor).st_nlink == 0 and counts_links(folder)


def _is_of_a_lock(path: str) -> bool:
    """Return whether there is no file, or nothing but that of a lock."""
    try:
        with opened(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as number:
            return is_of_a_lock(number)
    except OSError as error:
        if error.errno is None:
            # A signal handler raised it.
            raise
        return isinstance(error, FileNotFoundError)
