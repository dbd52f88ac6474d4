from libc.stdint cimport int64_t, uint32_t

from nvmeio._libnvmeio.c_base cimport nvmeio_direct, nvmeio_op
from nvmeio._libnvmeio.c_file cimport nvmeio_file
from nvmeio._native.atomics cimport atomic_flag, atomic_thread
from nvmeio._native.atomics cimport atomic_unsigned


cdef class File:
    """An open file, with and without O_DIRECT."""

    cdef nvmeio_file *c        # NULL once closed
    cdef object __weakref__
    cdef readonly object path  # str or bytes as given; for a descriptor, where it leads
    cdef readonly str mode
    cdef atomic_flag page_cache_open  # the page cache's descriptor is known to be open
    cdef object absolute       # the path to pickle, or None
    cdef object wanted_direct  # `direct` as given
    cdef object lock           # guards the position; made on first need
    cdef atomic_thread holder  # the thread that holds the lock, or 0
    # fork_generation() of the process that made the lock.
    cdef atomic_unsigned generation
    cdef bint is_users         # the user opened it, and is told if nobody closes it
    cdef bint passing          # a handle opened it for a request, which takes over `c`

    # Return a new reference, for let_go(); raise ValueError once closed.
    cdef nvmeio_file *retain(self) except NULL

    # Release a reference; raise OSError if that closes the file and close(2) fails.
    cdef int let_go(self, nvmeio_file *c) except -1

    # Return a reference for a request to take over, which take_back() undoes.
    cdef nvmeio_file *lend(self) except NULL
    cdef int take_back(self, nvmeio_file *c) except -1


# Return the descriptor that goes through the page cache; open it on first need.
cdef int open_page_cache(File file) except -1

# Return device and inode, which identify a file whatever its path.
cdef tuple identity_of(File file)

cdef nvmeio_direct direct_option(object direct) except *

# Open with the `flags` of open(2).
cdef File open_path(object path, int flags, str mode, nvmeio_direct direct)
cdef File open_descriptor(object descriptor, nvmeio_direct direct)
