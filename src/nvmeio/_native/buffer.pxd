from libc.stdint cimport uintptr_t

from nvmeio._native cimport dlpack


cdef class Buffer:
    """Bytes that the engine borrows: a caller's memory, or a staging copy of it."""

    cdef void *address          # contiguous; what the engine reads or writes
    cdef readonly Py_ssize_t nbytes
    cdef readonly bint writable  # for a read of the file
    cdef readonly object stage  # for a tensor on a device, with address NULL; else None
    cdef Py_buffer view         # the export, if the source has the buffer protocol
    cdef void *pooled           # the address that pool_use() counts, or NULL
    cdef object source          # the caller's object, for landing; None once released
    cdef object owner           # keeps alive our staging copy, or memory of a library
    cdef object storage         # of a tensor whose memory is in use until the end, or None
    cdef uintptr_t storage_address  # when it was acquired
    cdef object landing         # called with the source after a read, or None

    # Return whether the engine uses the caller's own memory, not a staging copy.
    cdef bint is_in_place(self) noexcept
    # Return addresses and sizes of the caller's memory that a request uses, as numbers or
    # arrays; empty if the memory was copied at submission.
    cdef tuple memory_in_use(self)
    # After a read: copy the staging into the source, or bump a tensor's version.
    cdef int land(self) except -1
    # Hold a tensor's storage, and raise later if its memory was freed or moved meanwhile.
    cdef int watch(self, object storage) except -1
    cdef int check_storage(self, object error) except -1
    # Tell the pool that no request uses the memory any more.  The memory is still held.
    cdef int disuse(self) noexcept
    # Release the memory.  May be called more than once.
    cdef int release(self) except -1


# Hold the memory of `source`; `writable` for a read of the file.
cdef Buffer acquire(object source, bint writable)

# Make a Buffer that only holds `source`, without its memory.
cdef Buffer new_buffer(object source, bint writable)

# Describe an ordinary tensor (dense, contiguous, in host memory) without holding it; return
# False for any other object.
cdef bint borrow_tensor(object source, dlpack.Tensor *tensor) except -1
cdef Py_ssize_t count_bytes(const dlpack.Tensor *tensor) noexcept
cdef bint has_bytes(object storage, const char *address, Py_ssize_t nbytes) except -1

# Return the library that a tensor belongs to; raise TypeError for other objects.
cdef object library_for(object source)

# As `acquire`, but never copy: return None if the bytes are not in C order in memory.
cdef Buffer acquire_in_place(object source, bint writable)

# Return an array of opaque items over a view's memory, without holding the view.
cdef object strided_array(const Py_buffer *view, bint writable)
