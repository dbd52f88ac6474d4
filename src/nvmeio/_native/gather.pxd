from libc.stdint cimport int64_t

from nvmeio.libnvmeio cimport nvmeio_gather, nvmeio_op, nvmeio_request
from nvmeio._native.buffer cimport Buffer
from nvmeio._native.file cimport File
from nvmeio._native.request cimport Request


cdef class GatherRequest(Request):
    """A request of many records of one file."""

    cdef object offsets         # int64 arrays of the records, until it is submitted
    cdef object sizes           # one number for all, or an array
    cdef object places          # or None: one behind another
    cdef Py_ssize_t gap_max
    cdef Py_ssize_t count       # of records
    cdef int64_t one_size       # `sizes`, where that is a number

    cdef object take_memory(self, object memory)
    # Tell the library of the records, which this request keeps.
    cdef int describe(self, nvmeio_gather *gather) except -1

    # Refuse records that no file could serve.
    cdef int check_records(self) except -1

    # Name the file.
    cdef int aim(self, File file) except -1


# What of a request has failed: the first in words, and index and errno of each.
cdef tuple failures_of(nvmeio_request *request)

# A gather or scatter without a file as yet.  `value`: its result, in place of bytes.
cdef GatherRequest new_gather(
    nvmeio_op op, object offsets, object sizes, object memory, object places,
    object max_gap, object value
)
