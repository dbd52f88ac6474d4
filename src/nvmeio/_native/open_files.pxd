from nvmeio._libnvmeio.c_base cimport nvmeio_direct
from nvmeio._libnvmeio.c_file cimport nvmeio_file
from nvmeio._native.atomics cimport atomic_unsigned
from nvmeio._native.file cimport File
from nvmeio._native.workers cimport Workers


cdef class Known:
    """A file that was opened for a request, and may be closed by now."""

    cdef nvmeio_file *c  # remembered: no reference
    cdef object path
    cdef str mode

    cdef bint is_open(self) noexcept
    cdef File again(self)


cdef class OpenFiles:
    """The files that a handle has opened for requests that name a path or descriptor."""

    cdef Workers workers
    cdef nvmeio_direct direct
    # (path, writing), or a new object for each descriptor -> a Known.
    cdef dict shared
    # fork_generation() of the process that opened them.
    cdef atomic_unsigned generation
    cdef Py_ssize_t forget_at   # at this many entries, dead references are removed

    # Return an open file for a path, a descriptor or a File.  `ragged` transfers partly use
    # the page cache, which needs a second descriptor.
    cdef File find(self, object file, bint writing, bint ragged)
    cdef File find_open(self, object file, bint writing)
    cdef int keep(self, object key, Known known) except -1


cdef OpenFiles new_open_files(Workers workers, nvmeio_direct direct)
