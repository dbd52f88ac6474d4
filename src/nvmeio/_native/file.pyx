"""Open files: modes, alignment, size.

A File owns one reference of the library's file; requests take their own, so closing it
never disturbs what is in flight.  Sharing files between requests is open_files.pyx's.
"""

import errno
import fcntl
import logging
import os
import stat

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from libc.errno cimport EINTR
from libc.errno cimport errno as c_errno
from libc.limits cimport INT_MAX
from libc.stdint cimport int64_t
from posix.fcntl cimport O_CREAT, O_EXCL, O_RDONLY, O_RDWR, O_TRUNC, O_WRONLY

from nvmeio cimport libnvmeio
from nvmeio.libnvmeio cimport DIRECT_ALWAYS, DIRECT_AUTO, DIRECT_NEVER, nvmeio_direct
from nvmeio.libnvmeio cimport OP_WRITE, nvmeio_file, nvmeio_file_info, nvmeio_op
from nvmeio._native.arguments cimport file_position
from nvmeio._native.errors cimport check, error_in_words, raise_because, verb_of
from nvmeio._arguments.checks import MISSING, direct_choice, path_of, word
from nvmeio._arguments.keywords import refuse_unknown

cdef extern from "<fcntl.h>" nogil:
    int fallocate(int descriptor, int mode, int64_t offset, int64_t size)

_log = logging.getLogger("nvmeio")

# Devices whose files turned out to have no O_DIRECT: told once each.
_buffered = set()

_FLAGS = {
    "r": O_RDONLY,
    "r+": O_RDWR,
    "w": O_RDWR | O_CREAT | O_TRUNC,
    "x": O_RDWR | O_CREAT | O_EXCL,
}


@cython.final
cdef class File:
    """File(path, mode="r", *, direct="auto")
--

    A file that is opened once and used by many requests.

    Parameters
    ----------
    path : str, bytes or os.PathLike
        A regular file or a block device.
    mode : {"r", "r+", "w", "x"}, default "r"
        Read; read and write; create or truncate; create, and fail where it exists.
        "w" and "x" can be read from too.
    direct : {"auto", True, False}, default "auto"
        Whether to bypass the page cache by O_DIRECT: where the file system can, always,
        or never.

    Attributes
    ----------
    path : str or bytes
        As it was given; read-only.
    mode : str
        As it was given; read-only.

    Raises
    ------
    OSError
        The file cannot be opened; EINVAL where it is neither a regular file nor a block
        device, or where ``direct=True`` and the file system has no O_DIRECT.
    TypeError
        ``path`` is no path.
    ValueError
        An unknown mode or value of ``direct``.

    Notes
    -----
    Thread-safe.  Requests in flight keep the file open after ``close()``.  Whatever needs
    an open file raises ValueError once it is closed.

    The kernel drops the POSIX record locks (``fcntl.lockf``) that a process has on a file
    whenever the process closes a descriptor of it, this one included.

    See Also
    --------
    open : Python's own, whose modes are meant.

    Examples
    --------
    >>> with nvmeio.File("data.bin", "w") as file, nvmeio.Handle() as handle:
    ...     handle.write_many((np.full(1000, i), file, i * 8000) for i in range(8))
    ...     file.size
    64000
    64000
    """

    def __init__(self, path=MISSING, mode="r", *, direct="auto", **unknown):
        if unknown:
            refuse_unknown(File, unknown)
        flags = _FLAGS[word("mode", mode, _FLAGS)]
        c_direct = direct_option(direct)
        path = path_of(path)
        if self.c != NULL:
            raise ValueError("the file is open already; make another File")
        self.path = path
        self.mode = mode
        fill(self, flags, c_direct)

    def __dealloc__(self):
        with nogil:
            libnvmeio.file_release(self.c)

    cdef nvmeio_file *retain(self) except NULL:
        cdef nvmeio_file *c
        with cython.critical_section(self):
            c = self.c
            if c != NULL:
                libnvmeio.file_retain(c)
        if c == NULL:
            raise ValueError(f"the file {self.path!r} is closed")
        return c

    @property
    def size(self) -> int:
        """The size in bytes now; raises ValueError once the file is closed."""
        cdef nvmeio_file *c = self.retain()
        cdef int64_t size
        with nogil:
            size = libnvmeio.file_size(c)
            libnvmeio.file_release(c)
        return check(size, self.path)

    @property
    def alignment(self) -> int:
        """What offsets, sizes and addresses are multiples of to go straight to the device.

        1 where the file goes through the page cache, which takes anything.  Nothing needs
        to be aligned for a transfer to be right; this is for those who want it fast.
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
        return self.c == NULL

    def preallocate(self, size) -> None:
        """Reserve room, so that the file can become ``size`` bytes long.

        Parameters
        ----------
        size : int
            In bytes, 1 to 2**63 - 1.  A shorter file is made as long, with zeros.

        Raises
        ------
        OSError
            ENOSPC where there is not so much room, some of which the file may have then;
            EOPNOTSUPP where the file system cannot reserve any.
        TypeError, ValueError
            ``size`` is not an integer or out of its limits, or the file is closed.

        Notes
        -----
        Releases the GIL.
        """
        cdef int64_t c_size = file_position("size", size)
        cdef int descriptor = self.fileno(), error = EINTR
        while error == EINTR:
            PyErr_CheckSignals()
            with nogil:
                error = c_errno if fallocate(descriptor, 0, 0, c_size) else 0
        check(-error, self.path)

    def truncate(self, size) -> None:
        """Make the file ``size`` bytes long.

        Parameters
        ----------
        size : int
            In bytes, 0 to 2**63 - 1; what lies beyond is lost, what is new reads as zeros.

        Raises
        ------
        OSError
            EINVAL where the file is not open for writing, EFBIG where its file system has
            no files of that size.
        TypeError
            ``size`` is not an integer.
        ValueError
            ``size`` is out of its limits, or the file is closed.

        Notes
        -----
        Releases the GIL.  Writes in flight may make the file longer again.
        """
        cdef int64_t c_size = file_position("size", size)
        cdef nvmeio_file *c = self.retain()
        cdef int result
        with nogil:
            result = libnvmeio.file_truncate(c, c_size)
            libnvmeio.file_release(c)
        if result == -errno.EINVAL and not describe(self).writable:
            raise_because(errno.EINVAL, "the file is not open for writing", self.path)
        check(result, self.path)

    def fileno(self) -> int:
        """Return the descriptor that goes through the page cache.

        Returns
        -------
        int
            Lent: it is closed with the file.

        Raises
        ------
        OSError
            Nothing has needed the descriptor before, and it cannot be opened now: EMFILE
            where there are too many, EACCES where ``direct=True`` and the rights to the
            file are gone.
        ValueError
            The file is closed.
        """
        return open_page_cache(self)

    def close(self) -> None:
        """Close the file; a second call does nothing.

        Notes
        -----
        Does not wait.  Requests in flight keep the descriptors until they are done.
        """
        cdef nvmeio_file *c
        with cython.critical_section(self):
            c = self.c
            self.c = NULL
        with nogil:
            libnvmeio.file_release(c)

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()

    def __reduce__(self):
        state = "a closed" if self.closed else "an open"
        raise TypeError(f"{state} File cannot be pickled; pass its path")

    def __repr__(self):
        state = " closed" if self.closed else ""
        return f"<nvmeio.File {self.path!r} mode={self.mode!r}{state}>"


def open_for_writing(path, direct="auto"):
    """Open a file as writes of a handle do: made where it is missing, never truncated."""
    return open_path(path_of(path), O_WRONLY | O_CREAT, "w", direct_option(direct))


def open_unnamed(folder):
    """Make a file without a name, to be given one; it goes with its last descriptor."""
    return open_path(folder, O_RDWR | os.O_TMPFILE, "w", DIRECT_AUTO)


cdef nvmeio_file_info describe(File file) except *:
    """Return what the library knows of an open file."""
    cdef nvmeio_file *c = file.retain()
    cdef nvmeio_file_info info
    libnvmeio.file_get_info(c, &info)
    libnvmeio.file_release(c)
    return info


cdef tuple identity_of(File file):
    cdef nvmeio_file_info info = describe(file)
    return info.device, info.inode


cdef int open_page_cache(File file) except -1:
    """Return the descriptor of the page cache, which may only now be opened."""
    cdef nvmeio_file *c = file.retain()
    cdef int descriptor
    with nogil:
        descriptor = libnvmeio.file_fd(c)
        libnvmeio.file_release(c)
    check(descriptor, file.path)
    file.page_cache_open = True
    return descriptor


cdef nvmeio_direct direct_option(object direct) except *:
    """Return the library's word for ``direct``, or raise TypeError or ValueError."""
    choice = direct_choice("direct", direct)
    if choice == "auto":
        return DIRECT_AUTO
    return DIRECT_ALWAYS if choice else DIRECT_NEVER


cdef int fill(File file, int flags, nvmeio_direct direct) except -1:
    """Open ``file.path``."""
    name = os.fsencode(file.path)
    # open(2) would see only what stands before it.
    if b"\0" in name:
        raise ValueError(f"the path {file.path!r} has a null character")
    cdef const char *c_name = name
    cdef nvmeio_file *c = NULL
    cdef int result = -EINTR
    # Signals are handled and the call goes again, as Python's own do (PEP 475).
    while result == -EINTR:
        PyErr_CheckSignals()
        with nogil:
            result = libnvmeio.file_open(c_name, flags, direct, &c)
    if result < 0:
        raise_unsuitable(-result, file.path, direct)
    file.c = c
    if direct == DIRECT_AUTO:
        note_fallback(file)
    return 0


cdef int note_fallback(File file) except -1:
    """Say once for each device that its files go through the page cache."""
    cdef nvmeio_file_info info
    libnvmeio.file_get_info(file.c, &info)
    if not info.direct and info.device not in _buffered:
        _buffered.add(info.device)
        _log.info(
            "%r and its file system have no O_DIRECT: the page cache serves", file.path
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
    file.path = descriptor
    file.mode = "fd"
    while result == -EINTR:
        PyErr_CheckSignals()
        with nogil:
            result = libnvmeio.file_dup(c_descriptor, direct, &c)
    if result < 0:
        raise_unsuitable(-result, descriptor, direct)
    file.c = c
    return file


cdef int raise_unsuitable(int error, object file, nvmeio_direct direct) except -1:
    """Raise why a path or descriptor could not be opened.

    Where it was nvmeio that refused, the words of errno alone would be a riddle.
    """
    reason = None
    if error in (errno.EINVAL, errno.EBADF):
        reason = why_unsuitable(file)
    if reason is None and error == errno.EINVAL and direct == DIRECT_ALWAYS:
        reason = "direct=True, and the file or its file system has no O_DIRECT"
    if reason is not None:
        raise_because(error, reason, file)
    return check(-error, file)


cdef object why_unsuitable(object file):
    """Say why what a path or descriptor leads to cannot be transferred, or None."""
    try:
        mode = os.stat(file).st_mode
        flags = fcntl.fcntl(file, fcntl.F_GETFL) if isinstance(file, int) else 0
    except OSError:
        # It is not, or no more.
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


cdef object check_against_file(
    nvmeio_op op, File file, const void *address, size_t nbytes, int64_t offset,
    object path
):
    cdef nvmeio_file *c
    cdef size_t position = 0
    cdef int result
    if op == OP_WRITE:
        # It may not be open for reading, nor still have its name.
        try:
            own = f"/proc/self/fd/{file.fileno()}"
            file = open_path(own, O_RDONLY, "r", DIRECT_NEVER)
        except OSError as error:
            return OSError(error.errno, f"cannot validate: {error.strerror}", path)
    c = file.retain()
    with nogil:
        result = libnvmeio.file_compare(c, offset, address, nbytes, &position)
        libnvmeio.file_release(c)
    if result < 0:
        return error_in_words(-result, "(while the file was read to validate it)", path)
    if result == 1:
        return OSError(
            errno.EIO,
            f"validation failed: {verb_of(op)} of {nbytes} bytes at offset "
            f"{offset} differs from the file at byte {position}",
            path,
        )
    return None
