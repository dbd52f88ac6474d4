"""File descriptors that are closed with their objects.

Python runs signal handlers between its instructions, so one may raise after os.open() and
before the number is in a variable.  A Descriptor has its number before Python code goes on.
"""

import os

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from libc.errno cimport EINTR
from libc.errno cimport errno as c_errno
from posix.fcntl cimport O_CLOEXEC
from posix.unistd cimport close as c_close

from nvmeio._arguments.checks import encoded

cdef extern from "<fcntl.h>" nogil:
    int c_open "open"(const char *path, int flags, int mode)


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
            raise OSError(error, os.strerror(error), path)
        self.number = result

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


def opened(path, flags, mode=0o666):
    """Open a file or directory; as a context manager, return its number."""
    cdef Descriptor descriptor = Descriptor.__new__(Descriptor)
    descriptor.open(path, flags, mode)
    return descriptor
