"""Who writes to a root, and who reads a step: locks that fall with their process."""

import contextlib
import errno
import fcntl
import os
import socket
import time
import weakref
from typing import ClassVar

from nvmeio._events.forks import call_in_child
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
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = os.pread(descriptor, _HOLDER_BYTES_MAX, 0).decode(errors="replace")
                os.close(descriptor)
                if not isinstance(error, BlockingIOError):
                    raise
                words = f"another writes checkpoints here: {holder.strip() or 'unknown'}"
                raise BlockingIOError(errno.EAGAIN, words) from None
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            text = f"process {os.getpid()} on {socket.gethostname()}, since {since}\n"
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, text.encode(), 0)
        self.descriptor = descriptor
        WriterLock._taken.add(self)

    def release(self) -> None:
        """Let others write."""
        descriptor, self.descriptor = self.descriptor, -1
        WriterLock._taken.discard(self)
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.release()


def _release_in_child() -> None:
    """A forked child would keep its parent's locks when that has died."""
    for lock in list(WriterLock._taken):
        lock.release()


call_in_child(_release_in_child)


def try_exclusive(path: str) -> bool:
    """Tell whether nobody reads what a file belongs to."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(descriptor)
    return True
