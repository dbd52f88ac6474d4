from nvmeio.gather cimport Gatherer


cdef class Transfers(Gatherer):
    """A Gatherer with the transfers of DeepSpeed's op: their names and their statuses."""

    cdef bint status            # errors="status": -1 where the contract says so
    cdef readonly object last_error
