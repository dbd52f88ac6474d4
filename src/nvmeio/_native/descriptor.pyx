"""File descriptors and temporary names that end with their objects.

Python runs signal handlers between its instructions, so one may raise after os.open() and
before the number is in a variable, or in a ``finally`` that cleans up after another.  A
Descriptor has its number before Python code goes on.
"""

import os

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from libc.errno cimport EBUSY, EINTR, EINVAL, EISDIR, ELOOP, ENOENT, ENOSYS, EOPNOTSUPP
from libc.errno cimport errno as c_errno
from libc.string cimport strcmp
from posix.fcntl cimport O_ACCMODE, O_CLOEXEC, O_DIRECTORY, O_NONBLOCK, O_RDONLY, O_RDWR
from posix.unistd cimport close as c_close
from posix.unistd cimport ftruncate, getpid, unlink

from nvmeio._arguments.checks import encoded

cdef extern from "<fcntl.h>" nogil:
    int c_open "open"(const char *path, int flags, int mode)
    int F_DUPFD_CLOEXEC
    int c_fcntl "fcntl"(int fd, int command, int argument)
    int openat(int folder, const char *name, int flags)
    int AT_FDCWD, AT_REMOVEDIR, O_NOFOLLOW

cdef extern from "<unistd.h>" nogil:
    int unlinkat(int folder, const char *name, int flags)

cdef extern from "<sys/stat.h>" nogil:
    """
    #ifndef AT_STATX_FORCE_SYNC
    #define AT_STATX_FORCE_SYNC 0x2000
    #endif
    """
    cdef struct statx_t "statx":
        pass
    int c_statx "statx"(int folder, const char *path, int flags, unsigned int mask,
                        statx_t *found)
    int AT_STATX_FORCE_SYNC
    unsigned int STATX_BASIC_STATS

cdef extern from "<dirent.h>" nogil:
    ctypedef struct DIR
    cdef struct dirent:
        char d_name[256]
    DIR *fdopendir(int fd)
    dirent *readdir(DIR *listing)
    int closedir(DIR *listing)


def words_for_opening(int error, path, int flags):
    """Return the words for an error of open(2), with the reason if it is a known one."""
    words = os.strerror(error)
    if error == ENOENT and encoded(path).startswith(b"/proc/self/"):
        if not os.path.exists("/proc/self"):
            words += ": a file must be opened again, which needs /proc: mount it"
    if flags & O_ACCMODE == O_RDWR and error in (EINVAL, ENOSYS, EOPNOTSUPP):
        words += ": this file system may not open files for reading and writing at once"
    return words


cdef class Descriptor:
    """A file descriptor, or none, which is closed with its object."""

    def __cinit__(self):
        self.number = -1

    def __dealloc__(self):
        self.close_number()

    def open(self, path, int flags, int mode=0o666):
        """Open a file or directory."""
        cdef bytes name = encoded(path)
        cdef const char *c_name = name
        cdef int result = -1, error = EINTR
        self.close_number()
        while error == EINTR:
            PyErr_CheckSignals()
            with nogil:
                result = c_open(c_name, flags | O_CLOEXEC, mode)
                error = c_errno if result < 0 else 0
        if error:
            raise OSError(error, words_for_opening(error, path, flags), path)
        self.number = result

    def check_written(self):
        """Raise the error of earlier writes that close(2) reports, on NFS or FUSE."""
        cdef int number = self.number, error = 0
        # Another descriptor of the same open file, so that this one stays usable.
        with nogil:
            number = c_fcntl(number, F_DUPFD_CLOEXEC, 0)
            if number < 0 or c_close(number) != 0:
                error = c_errno
        if error and error != EINTR:
            raise OSError(error, os.strerror(error))

    def clear(self, Py_ssize_t kept, Py_ssize_t size):
        """Fill a file with zeros up to `size`, except for its first `kept` bytes.

        It is shorter meanwhile, so no signal handler may run in between.
        """
        cdef Py_ssize_t sizes[2]
        cdef int number = self.number, step = 0, error = 0
        sizes[:] = [kept, size]
        with nogil:
            while step < 2 and error in (0, EINTR):
                error = c_errno if ftruncate(number, sizes[step]) else 0
                step += not error
        if error:
            raise OSError(error, os.strerror(error))

    def close(self):
        """Close it; ignore errors, which mean nothing after reading or a sync."""
        self.close_number()

    cdef int close_number(self) noexcept:
        cdef int number
        with cython.critical_section(self):
            number, self.number = self.number, -1
        if number >= 0:
            with nogil:
                c_close(number)
        return 0

    def __enter__(self):
        return self.number

    def __exit__(self, *exc_info):
        self.close_number()


# The temporary names that objects of this process have.
cdef set _in_use = set()


def is_in_use(str name):
    """Return whether a temporary name, without its folder, is that of an object."""
    return name in _in_use


@cython.final
cdef class TemporaryName:
    """The name of a temporary file or folder, removed with its object unless kept."""

    cdef object path
    cdef bytes name      # None once it is removed or kept
    cdef str last        # its last part, which is in use as long
    cdef int process     # a forked child must not remove it

    def __init__(self, path):
        self.name = encoded(path)
        self.path = path
        self.last = os.path.basename(path)
        self.process = getpid()
        _in_use.add(self.last)

    def __dealloc__(self):
        self.remove()

    cpdef void remove(self) noexcept:
        """Remove what has the name, as far as possible."""
        cdef const char *c_name
        with cython.critical_section(self):
            name, self.name = self.name, None
        if name is not None and self.process == getpid():
            c_name = name
            with nogil:
                if unlink(c_name) and c_errno == EISDIR:
                    remove_folder(AT_FDCWD, c_name, 0)
        _in_use.discard(self.last)

    def keep(self):
        """Leave the name: what has it is complete, or has another."""
        with cython.critical_section(self):
            self.name = None
        _in_use.discard(self.last)

    def __enter__(self):
        return self.path

    def __exit__(self, *exc_info):
        self.remove()


# How deep a folder is removed: each level takes a descriptor and some of the stack, and
# who may write to the folder decides how deep it is.
cdef int DEPTH_MAX = 500


cdef int remove_folder(int parent, const char *name, int depth) noexcept nogil:
    """Remove a folder and what is in it, as far as possible; return the first errno.

    What is mounted in it stays, with its contents, which are somebody else's.
    """
    cdef DIR *listing = NULL
    cdef dirent *entry
    cdef int flags = O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC
    cdef int error = 0, failed, folder
    if depth > DEPTH_MAX:
        return ELOOP
    # Of a mount point rmdir(2) says so before it looks whether the folder is empty.
    if unlinkat(parent, name, AT_REMOVEDIR) == 0:
        return 0
    if c_errno == EBUSY:
        return EBUSY
    folder = openat(parent, name, flags)
    while folder < 0 and c_errno == EINTR:
        folder = openat(parent, name, flags)
    if folder < 0:
        return c_errno
    listing = fdopendir(folder)
    if listing == NULL:
        error = c_errno
        c_close(folder)
    while listing != NULL:
        entry = readdir(listing)
        if entry == NULL:
            closedir(listing)
            break
        if strcmp(entry.d_name, b".") and strcmp(entry.d_name, b".."):
            failed = c_errno if unlinkat(folder, entry.d_name, 0) else 0
            if failed == EISDIR:
                failed = remove_folder(folder, entry.d_name, depth + 1)
            error = error or failed
    if unlinkat(parent, name, AT_REMOVEDIR) and not error:
        error = c_errno
    return error


def remove_tree(path):
    """Remove a folder and what is in it; follow no links.

    Ctrl-C in shutil.rmtree() may close a descriptor twice, and is lost in the error.
    """
    cdef bytes name = encoded(path)
    cdef const char *c_name = name
    cdef int error
    with nogil:
        error = remove_folder(AT_FDCWD, c_name, 0)
    if error:
        raise OSError(error, os.strerror(error), path)


def ask_anew(path):
    """Ask the file system about a folder, not what this host remembers.

    If the folder has changed, NFS forgets its list, and which names were missing.  Errors
    are ignored; the next use of the folder raises them.
    """
    cdef bytes name = encoded(path)
    cdef const char *c_name = name
    cdef statx_t found
    with nogil:
        c_statx(AT_FDCWD, c_name, AT_STATX_FORCE_SYNC, STATX_BASIC_STATS, &found)


def opened(path, flags, mode=0o666):
    """Open a file or directory; as a context manager, return its number."""
    cdef Descriptor descriptor = Descriptor.__new__(Descriptor)
    descriptor.open(path, flags, mode)
    return descriptor


def open_at_once(path, int flags):
    """Open a file without waiting, as an opener of open().

    After os.open(), Ctrl-C could come before anything owns the descriptor.
    """
    cdef Descriptor made = opened(path, flags | O_NONBLOCK)
    number, made.number = made.number, -1
    return number


def contents_of(path):
    """Return the bytes of a small file, such as those in /proc, /sys and control groups.

    Errors of close(2), which mean nothing after reading, are ignored.
    """
    with opened(path, O_RDONLY) as number, open(number, "rb", closefd=False) as file:
        return file.read()
