cdef class Buffer:
    """Bytes lent to the engine: a caller's memory, or a staging copy of it."""

    cdef void *address          # contiguous; what the engine reads or writes
    cdef readonly Py_ssize_t nbytes
    cdef readonly bint writable  # lent for a read of the file
    cdef readonly object stage  # of a tensor on a device, whose address is NULL; else None
    cdef Py_buffer view         # the export, where the source has the buffer protocol
    cdef void *pooled           # what pool_use() was told of, or NULL
    cdef object source          # the caller's object, for landing; None once released
    cdef object owner           # keeps alive the storage of a tensor, or our staging copy
    cdef object landing         # called with the source after a read, or None

    # Whether the engine has the caller's own memory, not a staging copy.
    cdef bint is_in_place(self) noexcept
    # After a read: copy the staging into the source, bump a tensor's version.
    cdef int land(self) except -1
    # Let go of the memory.  May be called more than once.
    cdef int release(self) except -1


# Take hold of the memory of `source`; `writable` for a read of the file.
cdef Buffer lend(object source, bint writable)
