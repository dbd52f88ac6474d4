from libc.stdint cimport uint32_t


cdef class PoolMemory:
    """Memory of the pool, which goes back when the last view has died."""

    cdef void *memory
    cdef readonly Py_ssize_t nbytes
    cdef object on_free      # called with the address before it goes back, or None
    cdef bint was_locked      # in the process that allocated it
    cdef uint32_t generation  # of that process; its forks inherit no locks


cpdef PoolMemory new_pinned(Py_ssize_t nbytes, object numa_node=*)

# Whether this call took the mark away.
cpdef bint free_pinned(size_t address) except -1

cpdef bint is_pinned(size_t address, size_t nbytes) noexcept
