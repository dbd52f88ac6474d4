"""Locks that end with their process: one writer per directory or per file."""

import contextlib
import errno
import fcntl
import os
import socket
import stat
import time
import weakref
from collections.abc import Iterator
from typing import Protocol

from nvmeio._events.forks import call_in_child
from nvmeio._files.descriptors import close_quietly
from nvmeio._files.paths import naming

__all__ = ["WriterLock", "in_child_close", "locked", "locked_for_reading"]

_HOLDER_BYTES_MAX = 300
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class WriterLock:
    """The lock of a directory's only writer.  Its file stays and names the last holder.

    `owner` describes the holder, such as "a Checkpointer"; `doing` describes its work.
    """

    def __init__(self, folder: str, name: str, owner: str, doing: str) -> None:
        self.path = os.path.join(folder, name)
        self.owner, self.doing = owner, doing
        self.descriptor = -1

    def take(self) -> bool:
        """Take the lock; return False if it was held already.

        Raises BlockingIOError, with the holder's name, if another has it.
        """
        if self.has_name:
            return False
        # If it was held, its directory was removed, and may have been created anew.
        with naming(self.path):
            descriptor = os.open(self.path, _FLAGS, 0o666)
            try:
                # Another user may have linked this name to a file that must not be changed.
                found = os.fstat(descriptor)
                if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
                    words = f"it is not a file of {self.owner}, or has other links"
                    raise OSError(errno.EINVAL, words)
                _lock(descriptor, self.doing)
            except BaseException:
                close_quietly(descriptor)
                raise
        self.release()
        self.descriptor = descriptor
        in_child_close(self)
        return True

    @property
    def has_name(self) -> bool:
        """Whether the lock is held, and its file still exists under its name."""
        return self.descriptor >= 0 and _has_name(self.descriptor, self.path)

    def release(self) -> None:
        """Release the lock."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            close_quietly(descriptor)

    close = release

    def __del__(self) -> None:
        self.release()


def _lock(descriptor: int, doing: str) -> None:
    """Lock a file and write its holder into it; BlockingIOError names another holder."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, _HOLDER_BYTES_MAX, 0).decode(errors="replace")
        words = f"another {doing} here: {holder.strip() or 'unknown'}"
        raise BlockingIOError(errno.EAGAIN, words) from None
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    text = f"process {os.getpid()} on {socket.gethostname()}, since {since}\n"
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, text.encode(), 0)


def _has_name(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def locked(descriptor: int) -> Iterator[int]:
    """Wait for a file's lock and hold it; yield a new descriptor of the file.

    Excludes other threads too, not only processes, because each call opens the file anew.
    """
    with _held(descriptor, os.O_RDWR) as mine:
        fcntl.flock(mine, fcntl.LOCK_EX)
        yield mine


@contextlib.contextmanager
def locked_for_reading(descriptor: int) -> Iterator[int]:
    """Wait until nobody has ``locked`` a file, and keep it so; yield a new descriptor."""
    with _held(descriptor, os.O_RDONLY) as mine:
        # Where a file cannot be locked, nobody has locked it.
        with contextlib.suppress(OSError):
            fcntl.flock(mine, fcntl.LOCK_SH)
        yield mine


@contextlib.contextmanager
def _held(descriptor: int, flags: int) -> Iterator[int]:
    """Open a file anew, to lock it; forked children do not keep the lock."""
    held = _Held(os.open(f"/proc/self/fd/{descriptor}", flags | os.O_CLOEXEC))
    in_child_close(held)
    try:
        yield held.descriptor
    finally:
        held.close()


class _Held:
    """A descriptor that holds a lock."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def close(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            close_quietly(descriptor)


class _Closes(Protocol):
    def close(self) -> None: ...


_of_parent: "weakref.WeakSet[_Closes]" = weakref.WeakSet()


def in_child_close(lock: _Closes) -> None:
    """Close a lock in forked children, which would hold it after the parent has died."""
    _of_parent.add(lock)


def _close_in_child() -> None:
    for lock in list(_of_parent):
        lock.close()


call_in_child(_close_in_child)
