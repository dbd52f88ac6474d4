from nvmeio._core cimport nvmeio_op
from nvmeio.buffer cimport Buffer
from nvmeio.file cimport File
from nvmeio.request cimport Request


cdef class GatherRequest(Request):
    """A request of many records of one file."""

    cdef object offsets         # int64 arrays of the records, until it is submitted
    cdef object sizes           # one number for all, or an array
    cdef object places          # or None: one behind another
    cdef Py_ssize_t gap_max
    cdef Py_ssize_t count       # of records


# A gather or scatter, not yet started.  `value`: what its result is in place of bytes.
cdef GatherRequest new_gather(
    nvmeio_op op, Buffer buffer, File file, object offsets, object sizes, object places,
    object max_gap, object value
)
