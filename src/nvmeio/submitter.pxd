from nvmeio._core cimport nvmeio_direct, nvmeio_op
from nvmeio.workers cimport Workers
from nvmeio.openfiles cimport OpenFiles
from nvmeio.request cimport Request


cdef class Submitter:
    """Workers, the files and requests that are in flight, and what starts and ends them."""

    cdef object __weakref__
    cdef Workers workers            # None before start()
    cdef OpenFiles files
    cdef bint open
    cdef list tracked           # requests that a subclass waits for together
    cdef unsigned generation    # of the process that `tracked` belongs to

    # Called once, by __init__() of a subclass, with checked options.
    cdef int start(self, dict options, nvmeio_direct direct) except -1

    # Start a transfer; `waited_for`: at once, so that it may be done already.
    cdef Request begin(
        self, nvmeio_op op, object buffer, object file, object file_offset, bint validate,
        bint waited_for, object after
    )
    # The same, but for what hands it over.
    cdef Request prepare(
        self, nvmeio_op op, object buffer, object file, object file_offset, bint validate,
        object after
    )
    # Start many of them as one request.
    cdef Request begin_many(self, nvmeio_op op, object items, object after)
    cdef int own(self) except -1
    cdef int collect(self) except -1
