from nvmeio.libnvmeio cimport nvmeio_direct
from nvmeio._native.file cimport File
from nvmeio._native.workers cimport Workers


cdef class OpenFiles:
    """The files that a handle has opened for requests which name a path."""

    cdef Workers workers
    cdef nvmeio_direct direct
    # (path, writing), or an object for each request of a descriptor -> a weak reference to
    # the File that requests have.  Without the callback of a WeakValueDictionary: an
    # exception of a signal's handler would be lost in it, and with it Ctrl-C.
    cdef dict shared
    cdef unsigned generation    # of the process that they belong to
    cdef Py_ssize_t forget_at   # so many, and dead references are looked for

    # An open file for a path, a descriptor or a File.  Ragged transfers go through the page
    # cache in part, which takes a second descriptor.
    cdef File find(self, object file, bint writing, bint ragged)
    cdef File find_open(self, object file, bint writing)
    cdef int keep(self, object key, File file) except -1


cdef OpenFiles new_open_files(Workers workers, nvmeio_direct direct)
