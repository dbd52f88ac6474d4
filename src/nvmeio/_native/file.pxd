from libc.stdint cimport int64_t, uint32_t

from nvmeio.libnvmeio cimport nvmeio_direct, nvmeio_file, nvmeio_op


cdef class File:
    """An open file, with and without O_DIRECT."""

    cdef nvmeio_file *c        # NULL once closed
    cdef object __weakref__
    cdef readonly object path  # as given: str, bytes or the number of a descriptor
    cdef readonly str mode
    cdef bint page_cache_open  # whether the page cache's descriptor is known to be open
    cdef object absolute       # the path to pickle, or None
    cdef object wanted_direct  # `direct` as given
    cdef object lock           # guards the position; made on first need
    cdef unsigned long holder  # the thread that holds the lock, or 0
    cdef uint32_t generation   # fork_generation() of the process that made the lock

    # Return a new reference, which the caller releases; raise ValueError once closed.
    cdef nvmeio_file *retain(self) except NULL


# Return the descriptor that goes through the page cache; open it on first need.
cdef int open_page_cache(File file) except -1

# Return device and inode, which identify a file whatever its path.
cdef tuple identity_of(File file)

cdef nvmeio_direct direct_option(object direct) except *

# Open with the `flags` of open(2).
cdef File open_path(object path, int flags, str mode, nvmeio_direct direct)
cdef File open_descriptor(object descriptor, nvmeio_direct direct)

# Compare memory with what the page cache has of the file; return an exception, or None.
cdef object check_against_file(
    nvmeio_op op, File file, const void *address, size_t nbytes, int64_t offset,
    object path
)
