"""Saves to one folder name their files one after the other."""

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator

from nvmeio._files.descriptors import ask_anew, best_effort, opened
from nvmeio._files.locks import WriterLock, is_of_a_lock
from nvmeio._files.paths import counts_links
from nvmeio._publish.locks import SharedLock
from nvmeio._publish.names import final_name

__all__ = ["LOCK", "alone_in"]

# How long a save waits until another one has named its files.
PATIENCE_S = 60
# A file, because no server of files knows who has locked a folder.
LOCK, _LOCK_OF = ".nvmeio-save", ("a save of a model", "save of a model names its files")
# What is said where there are no locks, or no files open for reading and writing.
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)


@contextlib.contextmanager
def alone_in(folder: str, pause: Callable[[float], object] | None = None) -> Iterator[None]:
    """Wait until no other save names its files in a folder; keep others away meanwhile.

    Where the file system has no locks, do not.  A folder with a temporary name is one that
    atomic_directory() has made, and nobody else knows.  `pause` waits for some seconds;
    what it raises ends the waiting.
    """
    if final_name(os.path.basename(os.path.realpath(folder))) is not None:
        yield
        return
    lock = SharedLock(folder, LOCK, *_LOCK_OF)
    end = time.monotonic() + PATIENCE_S
    try:
        while not _took(lock, end):
            (pause or time.sleep)(0.01)
        yield
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
