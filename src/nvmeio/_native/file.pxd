from libc.stdint cimport int64_t, uint32_t

from nvmeio.libnvmeio cimport nvmeio_direct, nvmeio_file, nvmeio_op


cdef class File:
    """An open file, with and without O_DIRECT."""

    cdef nvmeio_file *c        # NULL once closed
    cdef object __weakref__
    cdef readonly object path  # as it was given: str or bytes; of a descriptor what it leads to
    cdef readonly str mode
    cdef bint page_cache_open  # known to have the descriptor of the page cache
    cdef object absolute       # the path for a copy by pickle, or None
    cdef object wanted_direct  # as it was given
    cdef object lock           # of the position; made when it is first needed
    cdef unsigned long holder  # the thread that holds the lock, or 0
    cdef uint32_t generation   # of the process that the lock is of

    # A reference of the caller's own, to be released; raises ValueError once closed.
    cdef nvmeio_file *retain(self) except NULL


# The descriptor of the page cache, which may only now be opened.
cdef int open_page_cache(File file) except -1

# What the file is known by, whatever its path: device and inode.
cdef tuple identity_of(File file)

cdef nvmeio_direct direct_option(object direct) except *

# Open for one kind of access: `flags` of open(2).
cdef File open_path(object path, int flags, str mode, nvmeio_direct direct)
cdef File open_descriptor(object descriptor, nvmeio_direct direct)

# Compare memory with an ordinary read of the file; return the error, or None.
cdef object check_against_file(
    nvmeio_op op, File file, const void *address, size_t nbytes, int64_t offset,
    object path
)
