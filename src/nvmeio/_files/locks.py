"""Locks that end with their process: one writer per directory or per file."""

import contextlib
import errno
import fcntl
import os
import re
import stat
import struct
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Protocol

from nvmeio._arguments.types import HasFileno
from nvmeio._events.forks import call_in_child
from nvmeio._events.listener import Pauses
from nvmeio._files.descriptors import Descriptor, best_effort, opened
from nvmeio._files.paths import leads_to, naming, stat_of

__all__ = [
    "LOCK_FLAGS",
    "FileLock",
    "WriterLock",
    "header_for_reading",
    "in_child_close",
    "is_locked",
    "is_of_a_lock",
    "locked_for_reading",
    "locked_header",
    "maker_text",
    "mode_for_writers",
    "unlock",
]

# How the file of a lock begins.
_HOLDER = "process"
_BEGIN = re.compile(rb"process \d+ on .")
_HOLDER_BYTES_MAX = 300
_SINCE = b", since "
# struct flock: type, whence, start, length, process.
_FLOCK = "hhqqi4x"
# Pauses between attempts to lock a header: the first, and when no more are made.
_PAUSE_S, _PATIENCE_S = 20e-6, 1.0
LOCK_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK


def unlock(file: Descriptor, process: int) -> None:
    """Release a file's flock at once; do nothing in forked children of `process`.

    On FUSE, close(2) returns before the lock is released.  A child shares its parent's.
    """
    if file.number >= 0 and os.getpid() == process:
        with best_effort():
            fcntl.flock(file.number, fcntl.LOCK_UN)


class _Lock:
    """A lock on a file that this opened: it ends at the latest with its object."""

    def __init__(self) -> None:
        self._opened = Descriptor()
        self._process = os.getpid()

    @property
    def descriptor(self) -> int:
        """The descriptor that has the lock, or -1."""
        return self._opened.number

    def close(self) -> None:
        """Release the lock, if it is held; a forked child closes only its descriptor."""
        unlock(self._opened, self._process)
        self._opened.close()


class WriterLock(_Lock):
    """The lock of a directory's only writer.  Its file stays and names the last holder.

    `owner` describes the holder, such as "a Checkpointer"; `doing` describes its work.
    """

    def __init__(self, folder: str, name: str, owner: str, doing: str) -> None:
        super().__init__()
        self.path = os.path.join(folder, name)
        self.owner, self.doing = owner, doing
        # Whether another had it, who died or whose lock the server of NFS has given away.
        self.was_held = False
        # What the file says as long as nobody else has had the lock.
        self._text = ""
        # Of two threads, the second would find the lock of the first.
        self._taking, self._taker = threading.Lock(), os.getpid()

    def take(self) -> bool:
        """Take the lock; return False if it was held already.

        Raises BlockingIOError, with the holder's name, if another has it.
        """
        if self._taker != os.getpid():
            # Another thread may have held it when this child was forked.
            self._taking, self._taker = threading.Lock(), os.getpid()
        with self._taking:
            return self._take()

    def _take(self) -> bool:
        if self.has_name:
            if self._hold():
                return False
            self.close()
        # If it was held, its directory was removed, and may have been created anew.
        with _naming_with_owner(self.path):
            made = self._open()
            try:
                # Another user may have linked this name to a file that must not be changed.
                if not is_of_a_lock(made.number):
                    words = f"it is not a file of {self.owner}"
                    raise FileExistsError(errno.EEXIST, words)
                _hide_from_readers(made.number)
                self.was_held = _lock(made.number, self.doing)
                self._text = _holder_in(made.number)
            except BaseException:
                made.close()
                raise
        self.close()
        self._opened, self._process = made, os.getpid()
        in_child_close(self)
        return True

    def _open(self) -> Descriptor:
        # With O_CREAT, Linux may refuse another user's file in a sticky folder.
        for _ in range(2):
            with contextlib.suppress(FileNotFoundError):
                return opened(self.path, LOCK_FLAGS)
            if (made := self._create()) is not None:
                return made
        # Who had it has removed it.
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), self.path)

    def _create(self) -> Descriptor | None:
        """Create and open the file; return None if it is there."""
        with contextlib.suppress(FileExistsError):
            return opened(self.path, LOCK_FLAGS | os.O_CREAT | os.O_EXCL)
        return None

    @property
    def has_name(self) -> bool:
        """Whether the lock is held, and its file still exists under its name."""
        return self.descriptor >= 0 and leads_to(self.path, self.descriptor, follow=False)

    @property
    def is_elsewhere(self) -> bool:
        """Whether the lock is held, but its directory has been moved or mounted over."""
        if self.descriptor < 0 or self.has_name:
            return False
        found = stat_of(self.descriptor)
        return found is not None and found.st_nlink > 0

    def require(self) -> None:
        """Raise BlockingIOError if another may have had the lock since it was taken."""
        if not self.has_name:
            raise self.lost()
        if not self._hold():
            unlock(self._opened, self._process)
            holder = _holder_in(self.descriptor) or "unknown"
            words = f"another has had this lock meanwhile: {holder}"
            raise BlockingIOError(errno.EAGAIN, words, self.path)

    def lost(self) -> BlockingIOError:
        """Return the error of a lock whose file was removed."""
        words = "this file of the lock was removed, so another may write here"
        return BlockingIOError(errno.EAGAIN, words, self.path)

    def _hold(self) -> bool:
        """Lock the file again, or raise BlockingIOError if another has it now.

        The server of NFS forgets the locks of a host that it has not heard of for a while.
        Return whether nobody else has had it since then.
        """
        # A mount of SMB refuses a second lock also to the file that has the first.
        with contextlib.suppress(PermissionError), _naming_with_owner(self.path):
            _flock(self.descriptor, self.doing)
        return _holder_in(self.descriptor) == self._text

    def release(self) -> None:
        """Release the lock."""
        self.close()


@contextlib.contextmanager
def _naming_with_owner(path: str) -> Iterator[None]:
    """Name a lock's file in errors, and its owner if that is another user."""
    try:
        with naming(path):
            yield
    except OSError as error:
        with contextlib.suppress(FileNotFoundError):
            owner = os.lstat(path).st_uid
            if error.errno is not None and owner != os.geteuid():
                words = f"{error.strerror} (the file belongs to user {owner}: if nobody "
                words += "writes here, have it removed, or choose another folder)"
                raise OSError(error.errno, words, path) from error
        raise


def _flock(descriptor: int, doing: str) -> None:
    """Lock a file; BlockingIOError names another holder."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        words = f"another {doing} here: {_holder_in(descriptor) or 'unknown'}"
        if _is_held_here(descriptor):
            words += "; that is this process: close the other one first"
        if os.fstat(descriptor).st_nlink > 1:
            words += "; or in a copy by hard links, as of cp -al: remove this file there"
        raise BlockingIOError(errno.EAGAIN, words) from None
    except OSError as error:
        _refuse_without_locks(error)
        raise


def _holder_in(descriptor: int) -> str:
    """Return what a lock's file says of its holder, if it can be read."""
    text = b""
    # Opened anew: what another host has written is seen then, and Linux fails reads of an
    # open file whose lock NFS has given to another.
    with best_effort(), opened(f"/proc/self/fd/{descriptor}", os.O_RDONLY) as anew:
        text = os.pread(anew, _HOLDER_BYTES_MAX, 0)
    if not text:
        # Without /proc; and a mount of SMB refuses others what is locked.
        with best_effort():
            text = os.pread(descriptor, _HOLDER_BYTES_MAX, 0)
    return text.decode(errors="replace").strip()


def _lock(descriptor: int, doing: str) -> bool:
    """Lock a file, and write its holder into it; return whether it has had one."""
    _flock(descriptor, doing)
    was_held = _SINCE in os.pread(descriptor, _HOLDER_BYTES_MAX, 0)
    try:
        # Not truncated first: others look whether it is the file of a lock.
        os.ftruncate(descriptor, os.pwrite(descriptor, holder_text(), 0))
    except OSError as error:
        # Without space on btrfs.  The lock is held, and what it is for may make room.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
    return was_held


def holder_text() -> bytes:
    """Return what the file of a lock says of this process, which holds it."""
    now = time.time_ns() // 1000
    words = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now // 10**6))
    # So precise that this process does not write the same again.
    return f"{_process_text()}{_SINCE.decode()}{words}.{now % 10**6:06}\n".encode()


def maker_text() -> bytes:
    """Return what the new file of a lock says of this process, until somebody holds it."""
    return f"{_process_text()}\n".encode()


def _process_text() -> str:
    return f"{_HOLDER} {os.getpid()} on {os.uname().nodename}"


def _is_held_here(descriptor: int) -> bool:
    """Return whether another lock of this process is on the same file."""
    locks = [each.descriptor for each in _listed() if isinstance(each, WriterLock)]
    others = [each for each in locks if each not in (-1, descriptor)]
    # Another thread may release it meanwhile.
    with best_effort():
        return any(os.path.sameopenfile(descriptor, each) for each in others)
    return False


def _hide_from_readers(descriptor: int) -> None:
    """Let only those read a lock's file who may write it.

    A user who can read a file can also lock it, and would keep the writer away.
    """
    found = os.fstat(descriptor)
    mode = mode_for_writers(found.st_mode)
    if (
        found.st_nlink < 2
        and found.st_uid == os.geteuid()
        and (found.st_mode ^ mode) & 0o444
    ):
        with best_effort():
            os.fchmod(descriptor, mode)


def mode_for_writers(mode: int) -> int:
    """Return the mode with which only those read a file who may write it."""
    may_write = mode & 0o222
    return may_write | may_write << 1


def _refuse_without_locks(error: OSError) -> None:
    """Raise an error of flock(2) with the reason if the file system has no locks."""
    if error.errno in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
        words = f"{error.strerror} (flock: this file system has no locks as it is mounted; "
        words += "mount it with locks, such as -o flock for Lustre, or write elsewhere)"
        raise OSError(error.errno, words) from error


def is_of_a_lock(descriptor: int) -> bool:
    """Return whether a file has what a lock writes.

    After a power failure it has only zeros, and without space maybe only a part.  With
    another name, as in a copy by hard links, it has more: somebody else's file could have
    been linked there to be written to.
    """
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        return False
    text = os.pread(descriptor, _HOLDER_BYTES_MAX, 0).strip(b"\0")
    if found.st_nlink > 1:
        return _BEGIN.match(text) is not None
    return text[: len(_HOLDER)] == _HOLDER.encode()[: len(text)]


def is_locked(descriptor: int) -> bool:
    """Lock a file or folder; return whether another has locked it."""
    # NFS grants an exclusive lock only on a descriptor open for writing.
    for kind in (fcntl.LOCK_EX, fcntl.LOCK_SH):
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            break
        except OSError as error:
            if error.errno is None:
                # A signal handler raised it.
                raise
            if isinstance(error, BlockingIOError):
                return True
            if error.errno != errno.EBADF:
                # The file system cannot lock it.
                break
    return False


class FileLock(_Lock):
    """The lock of an open file, which one thread of one process holds at a time.

    Entering the context opens the file anew, because threads that share an open file share
    its lock.  Leaving it releases the lock.
    """

    def __init__(self, file: HasFileno, flags: int = os.O_RDWR) -> None:
        super().__init__()
        self._file, self._flags = file, flags

    def __enter__(self) -> "FileLock":
        self._opened.open(f"/proc/self/fd/{self._file.fileno()}", self._flags)
        in_child_close(self)
        return self

    def take(self, *, waits: bool) -> bool:
        """Take the lock; return False if another has it, and this does not wait."""
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError as error:
            if error.errno is None:
                # A signal handler raised it.
                raise
            return False
        except OSError as error:
            _refuse_without_locks(error)
            raise
        return True

    def check_written(self) -> None:
        """Raise the error of earlier writes to its descriptor that close(2) reports."""
        self._opened.check_written()

    def __exit__(self, *_: object) -> None:
        # Not only by closing: a child may have been forked before in_child_close().
        self.close()


@contextlib.contextmanager
def locked_for_reading(file: HasFileno) -> Iterator[int]:
    """Take a shared lock on a file, waiting for its holder; yield a new descriptor."""
    with FileLock(file, os.O_RDONLY) as lock:
        # Where a file cannot be locked, nobody has locked it.
        with best_effort():
            fcntl.flock(lock.descriptor, fcntl.LOCK_SH)
        yield lock.descriptor


@contextlib.contextmanager
def locked_header(descriptor: int, kind: int) -> Iterator[None]:
    """Lock a file's header as F_RDLCK or F_WRLCK, waiting for its holder.

    Not by flock(2), which an append holds while it writes and syncs its rows, and which a
    program may hold that opens the file itself: this lock is held for microseconds.  It
    belongs to the open file, so each thread must have opened the file itself.

    A lock that a program holds by lockf(3) is in the way of this one, even in the same
    process, and may be held for ever.  Such a lock is not waited for.
    """
    pauses, end = Pauses(_PAUSE_S), time.monotonic() + _PATIENCE_S
    # Where a file cannot be locked, nobody has locked it.
    with best_effort():
        while not _lock_first_byte(descriptor, kind):
            if _is_record_lock(descriptor, kind) or time.monotonic() > end:
                break
            time.sleep(next(pauses))
    try:
        yield
    finally:
        # Not only by closing: a child may have been forked meanwhile.
        with best_effort():
            _lock_first_byte(descriptor, fcntl.F_UNLCK)


@contextlib.contextmanager
def header_for_reading(file: HasFileno, *, shared: bool) -> Iterator[int]:
    """Lock a file's header for reading; yield a descriptor of the file.

    With `shared`, the file is opened anew, because other threads use this open file.
    """
    if not shared:
        with locked_header(file.fileno(), fcntl.F_RDLCK):
            yield file.fileno()
        return
    with (
        opened(f"/proc/self/fd/{file.fileno()}", os.O_RDONLY) as descriptor,
        locked_header(descriptor, fcntl.F_RDLCK),
    ):
        yield descriptor


def _lock_first_byte(descriptor: int, kind: int) -> bool:
    """Lock or unlock the first byte of a file for this open file (F_OFD_SETLK(2const)).

    Return False if another's lock is in the way.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, kind, 0, 0, 1, 0))
    except BlockingIOError as error:
        if error.errno is None:
            # A signal handler raised it.
            raise
        return False
    return True


def _is_record_lock(descriptor: int, kind: int) -> bool:
    """Return whether a process, not an open file, has the lock that is in the way."""
    lock = struct.pack(_FLOCK, kind, 0, 0, 1, 0)
    lock = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, lock)
    kind, _, _, _, process = struct.unpack(_FLOCK, lock)
    # The kernel reports process -1 for an open file; 0 for a process of another container.
    return kind != fcntl.F_UNLCK and process >= 0


class _Closes(Protocol):
    def close(self) -> None: ...


# By id(): a WeakSet cannot be listed while other threads add to it.
_of_parent: "weakref.WeakValueDictionary[int, _Closes]" = weakref.WeakValueDictionary()


def in_child_close(lock: _Closes) -> None:
    """Close a lock in forked children, which would hold it after the parent has died."""
    _of_parent[id(lock)] = lock


def _listed() -> list[_Closes]:
    return [lock for each in _of_parent.valuerefs() if (lock := each()) is not None]


def _close_in_child() -> None:
    for lock in _listed():
        lock.close()


call_in_child(_close_in_child)
