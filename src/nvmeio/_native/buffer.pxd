from nvmeio._native cimport dlpack


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
    # Where the bytes are in the caller's memory that a request uses, and how many: numbers
    # or arrays; none where it was copied at submission.
    cdef tuple memory_in_use(self)
    # After a read: copy the staging into the source, bump a tensor's version.
    cdef int land(self) except -1
    # No request uses the memory any more, which is still held.
    cdef int disuse(self) noexcept
    # Let go of the memory.  May be called more than once.
    cdef int release(self) except -1


# Take hold of the memory of `source`; `writable` for a read of the file.
cdef Buffer lend(object source, bint writable)

# Look at an ordinary tensor without holding it: dense, contiguous, in host memory.  False
# for any other, and for what is no tensor.
cdef bint borrow_tensor(object source, dlpack.Tensor *tensor) except -1
cdef Py_ssize_t count_bytes(const dlpack.Tensor *tensor) noexcept

# The library that a tensor belongs to; raises TypeError for what is none.
cdef object library_for(object source)

# The same as `lend` without any copy; None where the bytes do not lie there in C order.
cdef Buffer lend_in_place(object source, bint writable)
