from libc.stdint cimport int64_t

from nvmeio._libnvmeio.c_base cimport nvmeio_op
from nvmeio._native.buffer cimport Buffer
from nvmeio._native.file cimport File
from nvmeio._native.request cimport Request


# Make the request for a tensor on a device.
cdef Request new_staged(
    nvmeio_op op, Buffer buffer, File file, int64_t offset
)
