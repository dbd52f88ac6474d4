from nvmeio.submitter cimport Submitter


cdef class Transfers(Submitter):
    """A Submitter with the transfers of DeepSpeed's op: their names and their statuses."""

    cdef bint status            # errors="status": -1 where the contract says so
    cdef readonly object last_error
