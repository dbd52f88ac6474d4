from libc.stdint cimport int64_t

from nvmeio._core cimport nvmeio_op
from nvmeio.buffer cimport Buffer
from nvmeio.file cimport File
from nvmeio.workers cimport Workers
from nvmeio.request cimport Request


# A transfer of a tensor on a device through `workers`, begun.
cdef Request new_staged(
    nvmeio_op op, Buffer buffer, File file, int64_t offset, bint validate, Workers workers
)
