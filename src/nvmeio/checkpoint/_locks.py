"""Who writes to a root, and who reads a step: locks that fall with their process."""

import errno
import fcntl
import os
import socket
import time
import weakref
from typing import ClassVar

from nvmeio._events.forks import call_in_child
from nvmeio._files.descriptors import close_quietly, opened
from nvmeio._files.paths import naming

__all__ = ["WriterLock", "try_exclusive"]

_NAME = ".nvmeio-lock"
_HOLDER_BYTES_MAX = 300


class WriterLock:
    """The lock of the one writer to a root; the file stays, and names its last holder."""

    _taken: ClassVar["weakref.WeakSet[WriterLock]"] = weakref.WeakSet()

    def __init__(self, root: str) -> None:
        self.path = os.path.join(root, _NAME)
        self.descriptor = -1

    def take(self) -> None:
        """Take it, or raise BlockingIOError, which names the holder."""
        if self.descriptor >= 0:
            return
        with naming(self.path):
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                _lock(descriptor)
            except BaseException:
                close_quietly(descriptor)
                raise
        self.descriptor = descriptor
        WriterLock._taken.add(self)

    def release(self) -> None:
        """Let others write."""
        descriptor, self.descriptor = self.descriptor, -1
        WriterLock._taken.discard(self)
        if descriptor >= 0:
            close_quietly(descriptor)

    def __del__(self) -> None:
        self.release()


def _lock(descriptor: int) -> None:
    """Lock a file and write down for whom; raises BlockingIOError, which names another."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, _HOLDER_BYTES_MAX, 0).decode(errors="replace")
        words = f"another writes checkpoints here: {holder.strip() or 'unknown'}"
        raise BlockingIOError(errno.EAGAIN, words) from None
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    text = f"process {os.getpid()} on {socket.gethostname()}, since {since}\n"
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, text.encode(), 0)


def _release_in_child() -> None:
    """A forked child would keep its parent's locks when that has died."""
    for lock in list(WriterLock._taken):
        lock.release()


call_in_child(_release_in_child)


def try_exclusive(path: str) -> bool:
    """Tell whether nobody reads what a file belongs to."""
    try:
        with opened(path, os.O_RDONLY | os.O_NOFOLLOW) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # The file system has no locks, or what is left of the step no file.
        return True
    return True
