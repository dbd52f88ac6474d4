from nvmeio.libnvmeio cimport nvmeio_direct
from nvmeio._native.file cimport File
from nvmeio._native.workers cimport Workers


cdef class OpenFiles:
    """The files that a handle has opened for requests that name a path or descriptor."""

    cdef Workers workers
    cdef nvmeio_direct direct
    # (path, writing), or a new object for each descriptor -> a weak reference to the File
    # that requests hold.  Not a WeakValueDictionary: an exception that a signal handler
    # raises inside its callback would be lost, and Ctrl-C with it.
    cdef dict shared
    cdef unsigned generation    # fork_generation() of the process that opened them
    cdef Py_ssize_t forget_at   # at this many entries, dead references are removed

    # Return an open file for a path, a descriptor or a File.  `ragged` transfers partly use
    # the page cache, which needs a second descriptor.
    cdef File find(self, object file, bint writing, bint ragged)
    cdef File find_open(self, object file, bint writing)
    cdef int keep(self, object key, File file) except -1


cdef OpenFiles new_open_files(Workers workers, nvmeio_direct direct)
