"""The part of the DLPack 1.x ABI that buffer.pyx reads: a tensor's address and shape.

Declared here because the build must not need the headers of torch or DLPack.  The layouts
are those of dlpack.h, version 1.3 (github.com/dmlc/dlpack).  Minor versions only add values
to enumerations, so buffer.pyx checks the major version alone.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t


cdef enum:
    MAJOR_VERSION = 1

# Values of Device.device_type for memory that the CPU addresses.
cdef enum:
    DEVICE_CPU = 1
    DEVICE_CUDA_HOST = 3
    DEVICE_ROCM_HOST = 11

# A value of DataType.code; the others do not change how bytes are transferred.
cdef enum:
    CODE_COMPLEX = 5

cdef struct Version:
    uint32_t major
    uint32_t minor

cdef struct Device:
    int32_t device_type
    int32_t device_id

cdef struct DataType:
    uint8_t code
    uint8_t bits
    uint16_t lanes

cdef struct Tensor:
    void *data
    Device device
    int32_t ndim
    DataType dtype
    int64_t *shape
    int64_t *strides            # in elements; NULL means contiguous (before DLPack 1.2)
    uint64_t byte_offset

# Fills in a tensor that borrows from the object: shape and strides belong to the object,
# and are valid until Python code runs again.
ctypedef int (*tensor_from_object)(void *source, Tensor *tensor) except -1

cdef struct ExchangeHeader:
    Version version
    ExchangeHeader *older       # a table of an earlier major version, or NULL

# What the capsule `__dlpack_c_exchange_api__` of a tensor type points to.  The entries
# that nvmeio does not call keep their place as plain pointers.
cdef struct ExchangeTable:
    ExchangeHeader header
    void *managed_tensor_allocator
    void *managed_tensor_from_object
    void *managed_tensor_to_object
    tensor_from_object borrow   # may be NULL
    void *current_work_stream
