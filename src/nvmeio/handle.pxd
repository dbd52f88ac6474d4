from nvmeio.submitter cimport Submitter


cdef class aio_handle(Submitter):
    """A handle with the methods of DeepSpeed's op."""

    cdef dict options           # as they were passed, for pickling and the getters
    cdef bint status            # errors="status": -1 where the contract says so
    cdef readonly object last_error
