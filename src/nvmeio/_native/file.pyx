"""Open files: modes, alignment and size, and a file object like io's, with a position.

A File owns one reference to the library's file.  Requests take their own, so closing a File
does not disturb requests in flight.  open_files.pyx shares files between requests.

The position is the kernel's, of the descriptor that fileno() returns.  So code that uses
that descriptor, and forked children, see the same position as the File.
"""

import _thread
import errno
import fcntl
import io
import itertools
import os
import stat
import sys

import numpy

cimport cython
from cpython.buffer cimport (
    PyBUF_SIMPLE,
    PyBUF_WRITABLE,
    PyBuffer_FillInfo,
    PyBuffer_Release,
    PyObject_GetBuffer,
)
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.exc cimport PyErr_CheckSignals
from cpython.pythread cimport PyThread_get_thread_ident
from libc.errno cimport EINTR, ENOSPC
from libc.errno cimport errno as c_errno
from libc.limits cimport INT_MAX
from libc.stdint cimport int64_t, uint32_t
from libc.stdio cimport SEEK_CUR, SEEK_SET
from posix.fcntl cimport O_CREAT, O_EXCL, O_RDONLY, O_RDWR, O_TRUNC, O_WRONLY
from posix.unistd cimport lseek
from posix.unistd cimport read as c_read
from posix.unistd cimport write as c_write

from nvmeio._libnvmeio cimport c_base, c_file
from nvmeio._libnvmeio.c_base cimport (
    DIRECT_ALWAYS,
    DIRECT_AUTO,
    DIRECT_NEVER,
    OP_FSYNC,
    OP_READ,
    OP_WRITE,
    nvmeio_direct,
    nvmeio_op,
)
from nvmeio._libnvmeio.c_file cimport nvmeio_file, nvmeio_file_info
from nvmeio._native.arguments cimport file_position
from nvmeio._native.errors cimport (
    check,
    raise_because,
    raise_saying,
    raise_unclosed,
    warn_open,
    warn_unclosed,
)
from nvmeio._events.log import log
from nvmeio._arguments.checks import direct_choice, encoded, integer, path_of, shown, whole
from nvmeio._files.paths import absolute
from nvmeio._native.descriptor import words_for_opening

cdef extern from "<fcntl.h>" nogil:
    int fallocate(int descriptor, int mode, int64_t offset, int64_t size)

# Devices that were logged as having no O_DIRECT: once each.
_buffered = set()

_FLAGS = {
    "r": O_RDONLY,
    "r+": O_RDWR,
    "w": O_RDWR | O_CREAT | O_TRUNC,
    "w+": O_RDWR | O_CREAT | O_TRUNC,
    "x": O_RDWR | O_CREAT | O_EXCL,
    "x+": O_RDWR | O_CREAT | O_EXCL,
}
# A mode, its letters in any order as open() accepts them -> io.FileIO's mode, the flags.
_MODES = {
    "".join(letters): ("rb+" if mode == "w+" else mode[0] + "b" + mode[1:], flags)
    for mode, flags in _FLAGS.items()
    for letters in (*itertools.permutations(mode), *itertools.permutations(mode + "b"))
}

# Transfers at the position bypass the page cache from this size on.  Smaller ones are
# faster by read(2) and write(2), because the kernel reads ahead and writes behind.
cdef Py_ssize_t LARGE_BYTES = 1 << 20
# How much readline() reads at a time, and readall() where a file's size is not known.
cdef Py_ssize_t PIECE_BYTES = 8192

# At interpreter exit the last file objects still flush their buffers, when the names of
# modules are already gone.
cdef object allocate_lock = _thread.allocate_lock
cdef object is_finalizing = sys.is_finalizing

# A function that returns the handle for large transfers at the position.
_handle = None


def use_handle(function):
    """Set the function that returns the handle for large transfers at the position."""
    global _handle
    _handle = function


# One operation at the position of a file.
cdef struct Turn:
    nvmeio_file *c       # a reference: the descriptor stays open
    nvmeio_op op         # OP_FSYNC if it neither reads nor writes
    int descriptor
    int64_t begin        # the position before


@cython.final
cdef class File:
    """File(path, mode="r", *, direct="auto")
--

    Open a file, for requests at any offset and as a Python file object with a position.

    Parameters
    ----------
    path : str, bytes or os.PathLike
        A regular file or a block device.
    mode : {"r", "r+", "w", "w+", "x", "x+"}, default "r"
        As for ``open()``: "r" reads; "r+" reads and writes; "w" creates or truncates; "x"
        creates, and fails if the file exists.  A "b" is allowed, as in "rb+".  "w" and "x"
        also permit reading, like "w+" and "x+".
    direct : {"auto", True, False}, default "auto"
        Whether to bypass the page cache with O_DIRECT: "auto" where the file system
        supports it, True always, False never.  With "auto", every read on a local file
        system takes from the page cache what is there.

    Attributes
    ----------
    path, name : str or bytes
        As given; read-only.
    mode : str
        With a "b", as in ``io.FileIO``: "rb", "rb+", "wb", ...; read-only.

    Raises
    ------
    OSError
        The file cannot be opened: EISDIR for a directory, EINVAL if it is neither a regular
        file nor a block device, or if ``direct=True`` and the file system has no O_DIRECT.
    TypeError
        ``path`` is not a path.
    ValueError
        The mode or the value of ``direct`` is unknown.

    Notes
    -----
    Thread-safe; all methods release the GIL while they wait.  Requests in flight keep the
    file open after ``close()``.  Methods that need an open file raise ValueError once it is
    closed, and ``io.UnsupportedOperation`` if the mode does not permit what they do.

    ``isinstance(file, io.RawIOBase)`` is true, so ``numpy.load``, ``torch.save``,
    ``zipfile``, ``io.TextIOWrapper`` and the like accept a File.  There is no buffer: each
    ``read`` and ``write`` is at least one system call.  For many small ones, wrap the file
    in ``io.BufferedReader`` or ``io.BufferedWriter``.  Transfers of 1 MiB or more use
    ``nvmeio.default_handle()`` and bypass the page cache, except reads of what it has.
    Unlike with ``io.FileIO``, ``write`` writes all bytes, and ``readinto`` reads fewer only
    at the end of the file.  An operation that raises leaves the position unchanged.
    Requests of a handle have offsets of their own, and neither use nor move the position.

    Pickling or copying a File stores the absolute path that it had when opened.  The copy
    opens that path again, at position 0; "w" and "x" become "r+", so that nothing is
    truncated.  A closed File stays closed.

    When a process closes any descriptor of a file, this one included, the kernel drops all
    POSIX record locks (``fcntl.lockf``) that the process holds on that file.

    See Also
    --------
    open : The built-in function, which has the same modes.
    io.RawIOBase : The interface that File implements.

    Examples
    --------
    >>> import io
    >>> import json
    >>> with nvmeio.File("settings.json", "w") as file:
    ...     with io.TextIOWrapper(file) as text:
    ...         json.dump({"rows": 3}, text)
    >>> with nvmeio.File("settings.json") as file:
    ...     json.load(file)
    {'rows': 3}
    >>> with nvmeio.File("lines.txt", "w+") as file:
    ...     file.writelines([b"first\\n", b"second\\n"])
    ...     file.tell(), file.seek(0), file.readline(), file.readall()
    (13, 0, b'first\\n', b'second\\n')
    """

    def __init__(self, path, mode="r", *, direct="auto"):
        if not isinstance(mode, str) or mode not in _MODES:
            refuse_mode(mode)
        full_mode, flags = _MODES[mode]
        c_direct = direct_option(direct)
        path = path_of(path)
        if self.c != NULL:
            raise ValueError("the file is open already; make another File")
        self.path = path
        self.mode = full_mode
        self.wanted_direct = direct
        self.absolute = where(path)
        fill(self, flags, c_direct)
        self.is_users = True

    def __dealloc__(self):
        cdef int result
        cdef bint is_open = self.c != NULL
        with nogil:
            result = c_file.file_release(self.c)
        # Last, because a filter may make an error of a warning.
        if result < 0:
            warn_unclosed(result, self.path)
        elif is_open and self.is_users:
            warn_open(f"<nvmeio.File {self.path!r}, mode {self.mode!r}>", None)

    cdef nvmeio_file *retain(self) except NULL:
        cdef nvmeio_file *c
        with cython.critical_section(self):
            c = self.c
            if c != NULL:
                c_file.file_retain(c)
        if c == NULL:
            raise ValueError(f"the file {self.path!r} is closed")
        return c

    cdef int let_go(self, nvmeio_file *c) except -1:
        cdef int result
        cdef bint is_open
        with cython.critical_section(self):
            is_open = self.c == c
        if is_open:
            result = c_file.file_release(c)
        else:
            # This may be the last reference, and closing a file may take long.
            with nogil:
                result = c_file.file_release(c)
        return 0 if result >= 0 else raise_unclosed(result, self.path)

    cdef nvmeio_file *lend(self) except NULL:
        cdef nvmeio_file *c
        if not self.passing:
            return self.retain()
        # Nobody else has a file that was opened for one request.
        c = self.c
        if c == NULL:
            return self.retain()
        self.c = NULL
        return c

    cdef int take_back(self, nvmeio_file *c) except -1:
        if not self.passing:
            return self.let_go(c)
        self.c = c
        return 0

    @property
    def size(self) -> int:
        """The size in bytes now; raises ValueError once the file is closed."""
        cdef nvmeio_file *c = self.retain()
        cdef int64_t size
        with nogil:
            size = c_file.file_size(c)
        self.let_go(c)
        return check(size, self.path)

    @property
    def alignment(self) -> int:
        """The alignment in bytes that offsets, sizes and addresses need for zero-copy.

        1 where the file goes through the page cache, which takes any.  Unaligned transfers
        are correct too, but slower.
        """
        cdef nvmeio_file_info info = describe(self)
        return max(info.memory_align, info.offset_align) if info.direct else 1

    @property
    def direct(self) -> bool:
        """Whether aligned transfers bypass the page cache."""
        return bool(describe(self).direct)

    @property
    def closed(self) -> bool:
        """Whether the file is closed."""
        with cython.critical_section(self):
            return self.c == NULL

    @property
    def name(self) -> str | bytes:
        """The path, as given."""
        return self.path

    def readable(self) -> bool:
        """Return whether the file is open for reading; False only for some descriptors."""
        return bool(describe(self).readable)

    def writable(self) -> bool:
        """Return whether the file is open for writing."""
        return bool(describe(self).writable)

    def seekable(self) -> bool:
        """Return True."""
        describe(self)
        return True

    def isatty(self) -> bool:
        """Return False."""
        describe(self)
        return False

    def flush(self) -> None:
        """Do nothing: a File has no buffer.  Use ``fsync`` to make writes durable."""
        describe(self)

    def read(self, size=-1, /) -> bytes:
        """Read at the position, and advance it.

        Parameters
        ----------
        size : int, default -1
            How many bytes to read; negative or None: all up to the end of the file.

        Returns
        -------
        bytes
            Fewer than ``size`` only at the end of the file.

        Examples
        --------
        >>> nvmeio.write_file(b"two words", "text")
        9
        >>> with nvmeio.File("text") as file:
        ...     file.read(3), file.read()
        (b'two', b' words')
        """
        return in_turn(self, OP_READ, read_bytes, limit_of("size", size))

    def readall(self) -> bytes:
        """Read from the position to the end of the file, like ``read()``."""
        return self.read()

    def readinto(self, buffer, /) -> int:
        """Read at the position into a buffer, and advance the position.

        Parameters
        ----------
        buffer : writable object with the buffer protocol
            The memory to fill; contiguous, with elements of any type.

        Returns
        -------
        int
            The number of bytes read; less than the buffer's size only at the end of the
            file.

        Examples
        --------
        >>> nvmeio.write_file(np.arange(4), "data.bin")
        32
        >>> array = np.empty(2, np.int64)
        >>> with nvmeio.File("data.bin") as file:
        ...     file.readinto(array)
        16
        >>> array
        array([0, 1])
        """
        return in_turn(self, OP_READ, use_buffer, buffer)

    def readline(self, size=-1, /) -> bytes:
        """Read a line with its newline, but at most ``size`` bytes unless negative."""
        return in_turn(self, OP_READ, read_line, limit_of("size", size))

    def readlines(self, hint=-1, /) -> list[bytes]:
        """Read lines; if ``hint`` is positive, until they have that many bytes."""
        cdef list lines = []
        hint = limit_of("hint", hint)
        total = 0
        for line in self:
            lines.append(line)
            total += len(line)
            if 0 < hint <= total:
                break
        return lines

    def __iter__(self):
        return self.__enter__()

    def __next__(self) -> bytes:
        line = self.readline()
        if not line:
            raise StopIteration
        return line

    def write(self, buffer, /) -> int:
        """Write all of a buffer at the position, and advance the position.

        Parameters
        ----------
        buffer : object with the buffer protocol
            The bytes to write; contiguous, with elements of any type.

        Returns
        -------
        int
            The number of bytes written, which is the size of the buffer.

        Raises
        ------
        OSError
            The write failed.  The position is unchanged, but some of the bytes may have
            been written.

        Examples
        --------
        >>> with nvmeio.File("text", "w") as file:
        ...     file.write(b"two "), file.write(b"words")
        (4, 5)
        """
        return in_turn(self, OP_WRITE, use_buffer, buffer)

    def writelines(self, lines, /) -> None:
        """Write each buffer of an iterable, without adding newlines."""
        describe(self)
        for line in lines:
            self.write(line)

    def seek(self, offset, whence=0, /) -> int:
        """Move the position.

        Parameters
        ----------
        offset : int
            In bytes.
        whence : int, default io.SEEK_SET
            What ``offset`` is relative to: the beginning, the position (``io.SEEK_CUR``) or
            the end (``io.SEEK_END``).  ``os.SEEK_DATA`` and ``os.SEEK_HOLE`` are as in
            lseek(2).

        Returns
        -------
        int
            The new position, which may be beyond the end of the file.

        Examples
        --------
        >>> nvmeio.write_file(b"two words", "text")
        9
        >>> with nvmeio.File("text") as file:
        ...     file.seek(4), file.read()
        (4, b'words')
        """
        # The checks of whole() take 1 us.
        if type(offset) is not int or offset.bit_length() > 63:
            offset = whole("offset", offset, -(2**63), 2**63 - 1)
        if type(whence) is not int or not 0 <= whence <= 4:
            whence = whole("whence", whence, 0, 4)
        return in_turn(self, OP_FSYNC, move, (offset, whence))

    def tell(self) -> int:
        """Return the position, in bytes."""
        return in_turn(self, OP_FSYNC, move, (0, SEEK_CUR))

    def fsync(self, *, data_only=False) -> None:
        """Make earlier writes durable, by fsync(2).

        Parameters
        ----------
        data_only : bool, default False
            Use fdatasync(2), which leaves out metadata that reading the data does not need.

        Notes
        -----
        Waits for earlier writes to the file through ``nvmeio.default_handle()``, and covers
        them.  The name of a new file is durable only after an fsync of its folder.

        Examples
        --------
        >>> with nvmeio.File("text", "w") as file:
        ...     file.write(b"two words")
        ...     file.fsync()
        9
        """
        describe(self)
        _handle().fsync(self, data_only=data_only)

    def preallocate(self, size) -> None:
        """Reserve space on the device for the first ``size`` bytes of the file.

        Parameters
        ----------
        size : int
            In bytes, 0 to 2**63 - 1.  A shorter file is extended to this size; the new
            bytes are zeros.

        Raises
        ------
        OSError
            ENOSPC if the device has too little space: then nothing is reserved, or a part
            if others took the space meanwhile;
            EOPNOTSUPP if the file system cannot reserve space.

        Examples
        --------
        >>> with nvmeio.File("data.bin", "w") as file:
        ...     file.preallocate(1 << 20)
        ...     file.size
        1048576
        """
        in_turn(self, OP_WRITE, reserve, file_position("size", size))

    def truncate(self, size=None) -> int:
        """Make the file ``size`` bytes long.

        Parameters
        ----------
        size : int, optional
            In bytes, 0 to 2**63 - 1; default: the position.  Bytes beyond it are lost; new
            bytes read as zeros.

        Returns
        -------
        int
            The new size.  The position does not move.

        Notes
        -----
        Writes in flight may make the file longer again.

        Examples
        --------
        >>> with nvmeio.File("data.bin", "w") as file:
        ...     file.truncate(1000), file.size
        (1000, 1000)
        """
        if size is not None:
            size = file_position("size", size)
        return in_turn(self, OP_WRITE, cut, size)

    def fileno(self) -> int:
        """Return the descriptor that goes through the page cache.

        Returns
        -------
        int
            The File owns it, and closes it with itself.  Its position is that of
            ``tell()``.

        Raises
        ------
        OSError
            The descriptor, which is opened on first need, cannot be opened: EMFILE if the
            process has too many, EACCES if ``direct=True`` and the permissions of the file
            have changed.
        ValueError
            The file is closed.
        """
        return open_page_cache(self)

    def close(self) -> None:
        """Close the file without waiting for requests; a second call does nothing.

        Raises
        ------
        OSError
            The file was open for writing, and its file system reports only now that bytes
            were not written: ENOSPC, EDQUOT or EIO, as NFS and FUSE may.  The file is
            closed nevertheless.

        Notes
        -----
        Requests in flight keep the file open until they are done.  Then the last of them
        closes it, and its ``wait`` raises that error.
        """
        cdef nvmeio_file *c
        with cython.critical_section(self):
            c = self.c
            self.c = NULL
        if c != NULL:
            self.let_go(c)

    def __enter__(self):
        describe(self)
        return self

    def __exit__(self, *exc_info):
        self.close()

    def _dealloc_warn(self, source):
        # io.BufferedReader and its like call this, also of io.FileIO, when they are freed.
        if self.c != NULL and self.is_users:
            warn_open(repr(source), source)

    def __reduce__(self):
        if self.absolute is None:
            raise TypeError(f"{self!r} cannot be pickled: it was opened without a path")
        mode = "r" if self.mode == "rb" else "r+"
        return _restore, (self.absolute, mode, self.wanted_direct, self.closed)

    def __repr__(self):
        state = " closed" if self.closed else ""
        return f"<nvmeio.File {self.path!r} mode={self.mode!r}{state}>"


io.RawIOBase.register(File)


def _restore(path, mode, direct, closed):
    """Make a File from its pickled state."""
    cdef File file
    if not closed:
        return File(path, mode, direct=direct)
    file = File.__new__(File)
    file.path = file.absolute = path
    file.mode = "rb" if mode == "r" else "rb+"
    file.wanted_direct = direct
    return file


def open_for_writing(path, direct="auto", *, new=False):
    """Open a file as a handle's writes do: create it if missing, never truncate it.

    With `new`, it must be missing.
    """
    flags = O_WRONLY | O_CREAT | (O_EXCL if new else 0)
    return open_path(path_of(path), flags, "wb", direct_option(direct))


def owned(File file not None):
    """Return a file that an object closes when it is freed, so that nobody is warned."""
    file.is_users = False
    return file


def written_last(File file not None):
    """Return a file whose writes come last in a handle, until a thread waits for them."""
    c_file.file_write_last(file.c)
    return file


def open_unnamed(folder):
    """Create a file without a name; unless linked, it is gone with its last descriptor."""
    return open_path(folder, O_RDWR | os.O_TMPFILE, "wb", DIRECT_AUTO)


cdef int refuse_mode(object mode) except -1:
    """Raise ValueError for an unknown mode."""
    hint = ""
    if isinstance(mode, str) and "a" in mode:
        hint = "; to append, open it with 'r+' and seek to the end"
    elif isinstance(mode, str) and "t" in mode:
        hint = "; for text wrap the File in io.TextIOWrapper"
    raise ValueError(
        f"mode is {shown(mode)}; it must be one of {', '.join(_FLAGS)}, each with or "
        f"without b{hint}"
    )


cdef object where(object path):
    """Return the absolute path, or None if the working directory was removed."""
    if isinstance(path, str) and path.startswith("/"):
        return path
    try:
        return absolute(path)
    except OSError as error:
        if error.errno is None:
            # A signal handler raised it.
            raise
        return None


ctypedef object (*Operation)(File file, Turn *turn, object argument)


cdef object in_turn(File file, nvmeio_op op, Operation operate, object argument):
    """Call `operate` while this thread alone uses the position.

    If it raises, the position is restored.  `op` says what the file must be open for.
    """
    cdef Turn turn
    cdef nvmeio_file_info info
    turn.op = op
    turn.c = file.retain()
    try:
        c_file.file_get_info(turn.c, &info)
        if op == OP_READ and not info.readable:
            refuse_operation(errno.EBADF, "the file is not open for reading", file.path)
        if op == OP_WRITE and not info.writable:
            refuse_operation(errno.EBADF, "the file is not open for writing", file.path)
        if not file.page_cache_open:
            open_page_cache(file)
        turn.descriptor = c_file.file_fd(turn.c)
        lock = lock_of(file)
        lock.acquire()
        file.holder = PyThread_get_thread_ident()
        try:
            turn.begin = seek_to(file, &turn, 0, SEEK_CUR)
            try:
                return operate(file, &turn, argument)
            except BaseException:
                lseek(turn.descriptor, turn.begin, SEEK_SET)
                raise
        finally:
            file.holder = 0
            lock.release()
    finally:
        file.let_go(turn.c)


cdef object lock_of(File file):
    """Return the lock of the position; in a forked child a new one, not the parent's."""
    cdef uint32_t generation = c_base.fork_generation()
    if file.lock is None or file.generation != generation:
        lock = allocate_lock()
        with cython.critical_section(file):
            if file.lock is None or file.generation != generation:
                file.lock = lock
                file.holder = 0
                file.generation = generation
    if file.holder == PyThread_get_thread_ident():
        # A signal handler or finalizer in the thread that holds the lock would deadlock.
        raise RuntimeError(f"reentrant call inside {file!r}")
    return file.lock


cdef int refuse_operation(int error, str words, object path) except -1:
    raise io.UnsupportedOperation(error, words, path)


cdef int64_t seek_to(File file, Turn *turn, int64_t offset, int whence) except -1:
    cdef int64_t position = lseek(turn.descriptor, offset, whence)
    return check(-c_errno if position < 0 else position, file.path)


cdef object move(File file, Turn *turn, object target):
    """Move the position, and return it; `target` is lseek(2)'s offset and whence."""
    return seek_to(file, turn, target[0], target[1])


cdef object cut(File file, Turn *turn, object size):
    """Truncate or extend the file to `size`, or to the position if `size` is None."""
    cdef int64_t c_size = turn.begin if size is None else size
    cdef int result
    with nogil:
        result = c_file.file_truncate(turn.c, c_size)
    check(result, file.path)
    return c_size


cdef bint has_room(int descriptor, object size) except -1:
    """Return whether the file system may have room for the first `size` bytes of a file."""
    try:
        space, status = os.fstatvfs(descriptor), os.fstat(descriptor)
    except OSError as error:
        if error.errno is None:
            # A signal handler raised it.
            raise
        return True
    free = space.f_bfree if os.geteuid() == 0 else space.f_bavail
    # Some servers report no sizes, and a device is not on the file system of its node.
    if not space.f_blocks or not stat.S_ISREG(status.st_mode):
        return True
    return size - status.st_blocks * 512 <= free * space.f_frsize


# The least that is reserved at a time, in well below a millisecond.
cdef enum:
    RESERVED_MIN = 1 << 20


cdef object reserve(File file, Turn *turn, object size):
    """Reserve space for the first `size` bytes of the file."""
    cdef int64_t c_size = size
    # fallocate(2) would take all that there is, which other programs miss meanwhile.
    if c_size and not has_room(turn.descriptor, size):
        check(-ENOSPC, file.path)
    cdef int64_t done = 0, piece = c_size
    cdef int error = 0
    while done < c_size and error in (0, EINTR):
        PyErr_CheckSignals()
        with nogil:
            error = c_errno if fallocate(turn.descriptor, 0, done, piece) else 0
        if error == EINTR:
            # Before Linux 6.18, tmpfs gives back all that a call has reserved when a signal
            # comes.  Signals that keep coming must not keep this from ending.
            piece = max(piece // 2, min(piece, RESERVED_MIN))
        elif not error:
            done += piece
            piece = min(piece, c_size - done)
    check(-error, file.path)


cdef object use_buffer(File file, Turn *turn, object buffer):
    """Fill a buffer up to the end of the file, or write all of it; return the count."""
    cdef Py_buffer view
    cdef int flags = PyBUF_WRITABLE if turn.op == OP_READ else PyBUF_SIMPLE
    try:
        PyObject_GetBuffer(buffer, &view, flags)
    except BufferError as error:
        if turn.op == OP_WRITE:
            raise
        raise TypeError(f"the buffer is {shown(buffer)}: {error}") from None
    try:
        return transfer(file, turn, buffer, <char *> view.buf, view.len)
    finally:
        PyBuffer_Release(&view)


# A bytes object that no other code has yet, as a writable buffer.
@cython.final
cdef class _WritableBytes:
    cdef bytes value

    def __getbuffer__(self, Py_buffer *view, int flags):
        cdef char *memory = PyBytes_AS_STRING(self.value)
        PyBuffer_FillInfo(view, self, memory, len(self.value), False, flags)


cdef object limit_of(str name, object size):
    """Return a number of bytes, or -1 for None."""
    if type(size) is int:
        return size
    return -1 if size is None else integer(name, size)


cdef object read_bytes(File file, Turn *turn, object size):
    cdef Py_ssize_t first_bytes = size
    if not 0 <= first_bytes <= LARGE_BYTES:
        # The file may grow, and files of /proc report a size of 0.
        first_bytes = max(PIECE_BYTES, left_of(file, turn))
    return read_parts(file, turn, size, first_bytes, False)


cdef object read_line(File file, Turn *turn, object size):
    return read_parts(file, turn, size, PIECE_BYTES, True)


cdef bytes read_parts(
    File file, Turn *turn, Py_ssize_t size, Py_ssize_t first_bytes, bint line
):
    """Read up to `size` bytes; negative: up to the end of the file.

    With `line`, stop after a newline.  The first part has `first_bytes`.
    """
    cdef Py_ssize_t wanted, end = 0
    cdef list parts = []
    cdef bytes part
    while size:
        wanted = PIECE_BYTES if parts else first_bytes
        if 0 < size < wanted:
            wanted = size
        part = next_bytes(file, turn, wanted)
        if line:
            end = part.find(b"\n") + 1
        if end:
            seek_to(file, turn, end - len(part), SEEK_CUR)
            part = part[:end]
        if part:
            parts.append(part)
        # Files of /proc return a page or so at a time.
        if end or not part or (len(part) < wanted and (line or size < 0)):
            break
        if size > 0:
            size -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


cdef int64_t left_of(File file, Turn *turn) except -1:
    """Return the number of bytes between the turn's start and the end of the file."""
    cdef int64_t size
    with nogil:
        size = c_file.file_size(turn.c)
    return max(0, check(size, file.path) - turn.begin)


cdef bytes next_bytes(File file, Turn *turn, Py_ssize_t nbytes):
    """Read up to `nbytes` bytes at the position."""
    cdef _WritableBytes fresh = _WritableBytes.__new__(_WritableBytes)
    cdef Py_ssize_t count
    fresh.value = PyBytes_FromStringAndSize(NULL, nbytes)
    count = transfer(file, turn, fresh, PyBytes_AS_STRING(fresh.value), nbytes)
    return fresh.value if count == nbytes else fresh.value[:count]


cdef Py_ssize_t transfer(
    File file, Turn *turn, object owner, char *memory, Py_ssize_t nbytes
) except -1:
    """Read into or write `owner`'s memory at the position; return the number of bytes."""
    cdef Py_ssize_t done = 0, got, left
    cdef int error
    if nbytes >= LARGE_BYTES and not is_finalizing():
        done = pass_cache(file, turn, owner, nbytes)
    while done < nbytes:
        left = nbytes - done
        with nogil:
            if turn.op == OP_READ:
                got = c_read(turn.descriptor, memory + done, left)
            else:
                got = c_write(turn.descriptor, memory + done, left)
            error = c_errno
        if got > 0:
            done += got
        elif got < 0 and error == EINTR:
            PyErr_CheckSignals()
        elif got < 0 or turn.op == OP_WRITE:
            check(-(error if got else errno.EIO), file.path)
        else:
            break
    return done


cdef Py_ssize_t pass_cache(
    File file, Turn *turn, object owner, Py_ssize_t nbytes
) except -1:
    """Move large memory past the page cache; return 0 where read(2) has to do it."""
    if turn.op == OP_READ:
        nbytes = min(nbytes, left_of(file, turn))
        if nbytes < LARGE_BYTES:
            return 0
    array = numpy.frombuffer(owner, numpy.uint8, nbytes)
    try:
        if turn.op == OP_READ:
            _handle().read(array, file, turn.begin)
        else:
            _handle().write(array, file, turn.begin)
    except OSError as error:
        # Another process has truncated the file meanwhile.
        if turn.op == OP_READ and error.errno == errno.ENODATA:
            return 0
        raise
    seek_to(file, turn, turn.begin + nbytes, SEEK_SET)
    return nbytes


cdef nvmeio_file_info describe(File file) except *:
    """Return the library's information on an open file."""
    cdef nvmeio_file *c = file.retain()
    cdef nvmeio_file_info info
    c_file.file_get_info(c, &info)
    file.let_go(c)
    return info


cdef tuple identity_of(File file):
    cdef nvmeio_file_info info = describe(file)
    return info.device, info.inode


cdef int open_page_cache(File file) except -1:
    """Return the descriptor that goes through the page cache; open it on first need."""
    cdef nvmeio_file *c = file.retain()
    cdef int descriptor
    with nogil:
        descriptor = c_file.file_fd(c)
    file.let_go(c)
    check(descriptor, file.path)
    file.page_cache_open = True
    return descriptor


cdef nvmeio_direct direct_option(object direct) except *:
    """Return the library's constant for ``direct``; raise TypeError or ValueError."""
    choice = direct_choice("direct", direct)
    if choice == "auto":
        return DIRECT_AUTO
    return DIRECT_ALWAYS if choice else DIRECT_NEVER


cdef int fill(File file, int flags, nvmeio_direct direct) except -1:
    """Open ``file.path``."""
    name = encoded(file.path)
    cdef const char *c_name = name
    cdef nvmeio_file *c = NULL
    cdef int result = -EINTR
    # Run signal handlers and retry, as Python's own system calls do (PEP 475).
    while result == -EINTR:
        PyErr_CheckSignals()
        with nogil:
            result = c_file.file_open(c_name, flags, direct, &c)
    if result < 0:
        raise_unsuitable(-result, file.path, direct, flags)
    file.c = c
    if direct == DIRECT_AUTO:
        note_fallback(file)
    return 0


cdef int note_fallback(File file) except -1:
    """Log, once for each device, that its files go through the page cache."""
    cdef nvmeio_file_info info
    c_file.file_get_info(file.c, &info)
    if not info.direct and info.device not in _buffered:
        _buffered.add(info.device)
        log.info(
            "%r is on a file system without O_DIRECT: it goes through the page cache",
            file.path,
        )
    return 0


cdef File open_path(object path, int flags, str mode, nvmeio_direct direct):
    cdef File file = File.__new__(File)
    file.path = path
    file.mode = mode
    fill(file, flags, direct)
    return file


cdef File open_descriptor(object descriptor, nvmeio_direct direct):
    cdef File file = File.__new__(File)
    cdef nvmeio_file *c = NULL
    cdef int c_descriptor, result = -EINTR
    if not 0 <= descriptor <= INT_MAX:
        check(-errno.EBADF, descriptor)
    c_descriptor = descriptor
    file.path = name_of(descriptor)
    file.mode = "fd"
    while result == -EINTR:
        PyErr_CheckSignals()
        with nogil:
            result = c_file.file_dup(c_descriptor, direct, &c)
    if result < 0:
        raise_unsuitable(-result, descriptor, direct, 0)
    file.c = c
    return file


cdef object name_of(object descriptor):
    """Return the path that a descriptor leads to, or else its number.

    Sockets and pipes have no path: their links read "pipe:[4711]".
    """
    try:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError as error:
        if error.errno is None:
            raise
        return descriptor
    return path if path.startswith("/") else descriptor


cdef int raise_unsuitable(
    int error, object file, nvmeio_direct direct, int flags
) except -1:
    """Raise OSError for a path or descriptor that could not be opened.

    If nvmeio itself refused it, add the reason: errno alone would not explain it.
    """
    reason = None
    if error in (errno.EINVAL, errno.EBADF):
        reason = why_unsuitable(file)
    if reason is None and error == errno.EINVAL and direct == DIRECT_ALWAYS:
        reason = "direct=True, and the file or its file system has no O_DIRECT"
    path = name_of(file) if isinstance(file, int) else file
    if reason is not None:
        raise_because(error, reason, path)
    raise_saying(error, words_for_opening(error, path, flags), path)


cdef object why_unsuitable(object file):
    """Return why nvmeio refuses a path or descriptor; None if it would not."""
    try:
        mode = os.stat(file).st_mode
        flags = fcntl.fcntl(file, fcntl.F_GETFL) if isinstance(file, int) else 0
    except OSError as error:
        if error.errno is None:
            raise
        # The path does not exist, or the descriptor is closed.
        return None
    if flags & os.O_PATH:
        return "it was opened with O_PATH, neither for reading nor for writing"
    if flags & os.O_APPEND:
        return "it was opened for appending, and every write would go to the end"
    for is_kind, kind in (
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISCHR, "a character device, such as a terminal"),
    ):
        if is_kind(mode):
            return f"it is {kind}; only regular files and block devices have offsets"
    return None
