from libc.stdint cimport int64_t

from nvmeio._libnvmeio.c_base cimport nvmeio_op
from nvmeio._libnvmeio.c_request cimport nvmeio_request
from nvmeio._libnvmeio.c_gather cimport nvmeio_gather
from nvmeio._native.buffer cimport Buffer
from nvmeio._native.file cimport File
from nvmeio._native.request cimport Request


cdef class GatherRequest(Request):
    """A request of many records of one file."""

    cdef object offsets         # int64 array; None, like the next two, once submitted
    cdef object sizes           # a number for all records, or an int64 array
    cdef object places          # offsets in the buffer; None: one record after another
    cdef bint by_address        # `places` are addresses instead
    cdef Py_ssize_t gap_max
    cdef Py_ssize_t count       # of records
    cdef size_t done_count      # of them, from the first on: read by perform()
    cdef int64_t one_size       # `sizes`, if that is a number
    cdef bint makes_value       # Python code makes the result once all records have landed

    cdef object take_memory(self, object memory)
    # Fill in the library's description, which points into this request.
    cdef int describe(self, nvmeio_gather *gather) except -1

    # Refuse records that are invalid whatever the file.
    cdef int check_records(self) except -1

    # Set the file.
    cdef int aim(self, File file) except -1


cdef class NewBytes:
    """Bytes objects whose contents are still to be read."""

    cdef readonly list values
    cdef object sizes           # int64 array
    cdef object addresses       # of the contents; an int64 array

    # Return where records belong that fill the objects at these positions; None: all.
    cdef object places(self, object positions, object sizes)


# Return the failures of a request: a description of the first, and index and errno of each.
cdef tuple failures_of(nvmeio_request *request)

# Make a gather or scatter that has no file yet.  `value`: its result, or None for bytes.
cdef GatherRequest new_gather(
    nvmeio_op op, object offsets, object sizes, object memory, object places,
    object max_gap, object value
)
