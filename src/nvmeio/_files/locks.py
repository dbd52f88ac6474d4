"""Locks that end with their process: one writer per directory or per file."""

import contextlib
import errno
import fcntl
import os
import socket
import stat
import struct
import time
import weakref
from collections.abc import Iterator
from typing import IO, Protocol

from nvmeio._arguments.types import HasFileno
from nvmeio._events.forks import call_in_child
from nvmeio._files.descriptors import close_quietly
from nvmeio._files.paths import naming

__all__ = [
    "FileLock",
    "WriterLock",
    "header_for_reading",
    "in_child_close",
    "locked_for_reading",
    "locked_header",
]

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


class FileLock:
    """The lock of an open file, which one thread of one process holds at a time.

    Entering the context opens the file anew, because threads that share an open file share
    its lock.  Leaving it releases the lock.
    """

    def __init__(self, file: HasFileno, flags: int = os.O_RDWR) -> None:
        self._file, self._flags = file, flags
        self.descriptor = -1

    def __enter__(self) -> "FileLock":
        path = f"/proc/self/fd/{self._file.fileno()}"
        self.descriptor = os.open(path, self._flags | os.O_CLOEXEC)
        in_child_close(self)
        return self

    def take(self, *, waits: bool) -> bool:
        """Take the lock; return False if another has it, and this does not wait."""
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        """Release the lock, if it is held."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            close_quietly(descriptor)

    def __exit__(self, *_: object) -> None:
        # Not only by closing: a child may have been forked before in_child_close().
        with contextlib.suppress(OSError):
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)
        self.close()


@contextlib.contextmanager
def locked_for_reading(file: HasFileno) -> Iterator[int]:
    """Take a shared lock on a file, waiting for its holder; yield a new descriptor."""
    with FileLock(file, os.O_RDONLY) as lock:
        # Where a file cannot be locked, nobody has locked it.
        with contextlib.suppress(OSError):
            fcntl.flock(lock.descriptor, fcntl.LOCK_SH)
        yield lock.descriptor


@contextlib.contextmanager
def locked_header(descriptor: int, kind: int) -> Iterator[None]:
    """Lock a file's header as F_RDLCK or F_WRLCK, waiting for its holder.

    Not by flock(2), which an append holds while it writes and syncs its rows, and which a
    program may hold that opens the file itself: this lock is held for microseconds.  It
    belongs to the open file, so each thread must have opened the file itself.
    """
    # Where a file cannot be locked, nobody has locked it.
    with contextlib.suppress(OSError):
        _lock_first_byte(descriptor, kind)
    try:
        yield
    finally:
        # Not only by closing: a child may have been forked meanwhile.
        with contextlib.suppress(OSError):
            _lock_first_byte(descriptor, fcntl.F_UNLCK)


@contextlib.contextmanager
def header_for_reading(file: HasFileno) -> Iterator[IO[bytes]]:
    """Lock a file's header for reading; yield the file, opened anew."""
    with (
        open(f"/proc/self/fd/{file.fileno()}", "rb") as stream,
        locked_header(stream.fileno(), fcntl.F_RDLCK),
    ):
        yield stream


def _lock_first_byte(descriptor: int, kind: int) -> None:
    """Lock or unlock the first byte of a file for this open file (F_OFD_SETLKW(2const))."""
    # struct flock: type, whence, start, length, process.
    lock = struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 1, 0)
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLKW, lock)


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
