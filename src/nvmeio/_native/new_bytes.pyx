"""Bytes objects that a gather fills; gather.pyx passes their addresses to the library."""

import numpy

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc
from libc.stdint cimport SIZE_MAX, uintptr_t


# Not a buffer, because what is between the objects belongs to others.
@cython.no_gc
@cython.final
cdef class NewBytes:
    """Bytes objects whose contents are still to be read.

    As ``out`` of a gather, ``out_offsets`` are positions in ``values``, and each record
    fills its object.  Nothing else may use ``values`` before that.
    """

    def __init__(self, sizes):
        cdef Py_ssize_t size
        cdef list each = sizes.tolist()
        self.sizes = sizes
        check_memory(len(each), sum(each))
        self.values = [PyBytes_FromStringAndSize(NULL, size) for size in each]
        addresses = [<uintptr_t> PyBytes_AS_STRING(value) for value in self.values]
        self.addresses = numpy.array(addresses, numpy.int64)

    cdef object places(self, object positions, object sizes):
        if positions is None:
            positions = numpy.arange(len(self.sizes))
        if (self.sizes[positions] != sizes).any():
            raise ValueError("records that fill bytes objects must have their sizes")
        return self.addresses[positions]


cdef int check_memory(Py_ssize_t count, object total) except -1:
    """Raise MemoryError for more than the system can give, before anything is filled."""
    cdef void *memory = PyMem_RawMalloc(min(total, SIZE_MAX))
    if memory == NULL:
        raise MemoryError(f"out of memory: {count} records have {total} bytes")
    PyMem_RawFree(memory)
    return 0
