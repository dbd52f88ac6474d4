"""What another project does: it cimports nvmeio and takes memory from its pool."""

from nvmeio cimport _core


cdef class Block:
    """Memory of the pool, given back with the object."""

    cdef void *address
    cdef readonly size_t size

    def __cinit__(self, size_t size):
        self.address = NULL
        cdef int result
        with nogil:
            result = _core.pool_alloc(size, False, &self.address, NULL)
        _core.check(result)
        self.size = size

    def __dealloc__(self):
        _core.pool_free(self.address)

    @property
    def location(self) -> int:
        """Give the address, which is a multiple of the pool's alignment."""
        return <size_t>self.address


def bytes_used() -> int:
    """Return the bytes that the pool has handed out, as this module sees it."""
    cdef _core.nvmeio_pool_stats stats
    _core.pool_get_stats(&stats)
    return stats.bytes_used
