from nvmeio.transfers cimport Transfers


cdef class aio_handle(Transfers):
    """A handle with the methods of DeepSpeed's op."""

    cdef dict options           # as they were passed, for pickling and the getters
