from nvmeio._core cimport nvmeio_op
from nvmeio.request cimport Request
from nvmeio.submitter cimport Submitter


cdef class Gatherer(Submitter):
    """A Submitter that also transfers many records of a file in one request."""

    # Start one.
    cdef Request begin_gather(
        self, nvmeio_op op, object file, object offsets, object sizes, object memory,
        object places, object max_gap, object result, object after
    )
