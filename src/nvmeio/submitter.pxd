from nvmeio._core cimport nvmeio_direct, nvmeio_op
from nvmeio.lanes cimport Lanes
from nvmeio.openfiles cimport OpenFiles
from nvmeio.request cimport Request


cdef class Submitter:
    """Lanes, the files and requests that are in flight, and what starts and ends them."""

    cdef object __weakref__
    cdef Lanes lanes            # None before start()
    cdef OpenFiles files
    cdef bint open
    cdef Py_ssize_t block_bytes
    cdef list tracked           # requests that a subclass waits for together
    cdef unsigned generation    # of the process that `tracked` belongs to

    # Called once, by __init__() of a subclass, with checked options.
    cdef int start(self, dict options, nvmeio_direct direct) except -1

    # Start a transfer; `caller`: it is waited for at once.
    cdef Request begin(
        self, nvmeio_op op, object buffer, object file, object file_offset, bint validate,
        bint caller
    )
    cdef int own(self) except -1
    cdef int collect(self) except -1
    cdef int drain(self) except -1
