"""Memory of many tensors in one piece, which gives back pages as tensors die.

It is mapped for itself, not the pool's: a model may be larger than the pool may be.
"""

import errno

cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from libc.errno cimport EAGAIN, EINTR
from libc.errno cimport errno as c_errno
from libc.stdint cimport uint32_t, uintptr_t
from libc.stdlib cimport calloc, free

from nvmeio._native.errors cimport reason_of

cdef extern from "<sys/mman.h>" nogil:
    """
    #ifndef MADV_POPULATE_WRITE
    #define MADV_POPULATE_WRITE 23 /* Linux 5.14; libc headers may be older */
    #endif
    """
    void *mmap(void *address, size_t size, int protection, int flags, int fd, long offset)
    int munmap(void *address, size_t size)
    int madvise(void *address, size_t size, int advice)
    void *MAP_FAILED
    int PROT_READ, PROT_WRITE, MAP_PRIVATE, MAP_ANONYMOUS, MAP_NORESERVE
    int MADV_HUGEPAGE, MADV_NOHUGEPAGE, MADV_DONTNEED, MADV_POPULATE_WRITE

# Of the kernels that nvmeio is built for; a larger page would only be given back later.
cdef enum:
    PAGE = 4096
    HUGE = 2 << 20


# No cycle goes through it, and what its spans need of it must be there when they die.
@cython.no_gc
@cython.final
cdef class Region:
    """Bytes in pages of their own: huge ones, where the system has them.

    The address of the first byte is `phase` modulo 2 MiB.  A buffer of all bytes, which may
    be written.  Nothing is populated before it is asked for, or touched.
    """

    cdef char *mapped
    cdef size_t mapped_bytes
    cdef size_t phase
    cdef readonly Py_ssize_t nbytes
    # For each page how many spans that live begin or end in it.
    cdef uint32_t *users
    cdef bint shrinks  # pages have been given back

    def __cinit__(self, Py_ssize_t nbytes, size_t phase=0):
        if nbytes < 1 or phase >= HUGE:
            raise ValueError(f"no memory has {nbytes} bytes from {phase} on")
        self.nbytes, self.phase = nbytes, phase
        cdef size_t size = (phase + nbytes + PAGE - 1) & ~<size_t> (PAGE - 1)
        # Where no huge page fits, none is wanted: it would be 2 MiB for a few bytes.
        cdef size_t huge = size & ~<size_t> (HUGE - 1)
        cdef size_t more = HUGE if huge else 0
        self.users = <uint32_t *> calloc(size // PAGE, sizeof(uint32_t))
        cdef char *found = <char *> mmap(
            NULL, size + more, PROT_READ | PROT_WRITE,
            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0,
        )
        if found == <char *> MAP_FAILED or self.users == NULL:
            if found != <char *> MAP_FAILED:
                munmap(found, size + more)
            raise MemoryError(f"the system has no room for {nbytes} bytes")
        cdef size_t before = 0
        if huge:
            # What is mapped too much goes again.
            before = <size_t> (-<uintptr_t> found) & (HUGE - 1)
            if before:
                munmap(found, before)
            munmap(found + before + size, HUGE - before)
            # Refused where the kernel has none.
            madvise(found + before, huge, MADV_HUGEPAGE)
        self.mapped, self.mapped_bytes = found + before, size

    def __dealloc__(self):
        if self.mapped != NULL:
            munmap(self.mapped, self.mapped_bytes)
        free(self.users)

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.mapped + self.phase, self.nbytes, 0, flags)

    @property
    def address(self) -> int:
        """Where the first byte lies."""
        return <uintptr_t> (self.mapped + self.phase)

    def populate(self, Py_ssize_t begin, Py_ssize_t end) -> None:
        """Have the system provide the pages of a part, without the GIL."""
        require_within(self, begin, end)
        cdef char *first = self.mapped + ((self.phase + begin) & ~<size_t> (PAGE - 1))
        cdef size_t size = self.mapped + self.phase + end - first
        cdef int error = 0
        with nogil:
            size = (size + PAGE - 1) & ~<size_t> (PAGE - 1)
            # EAGAIN: the kernel was short of memory for a moment.
            while madvise(first, size, MADV_POPULATE_WRITE):
                error = c_errno
                if error != EINTR and error != EAGAIN:
                    break
                error = 0
        # An old kernel: the pages come when they are touched.
        if error and error != errno.EINVAL:
            raise MemoryError(f"no memory for {end - begin} bytes: {reason_of(error)}")

    def span(self, Py_ssize_t begin, Py_ssize_t end):
        """Return a part that gives back its pages when it dies; parts must not overlap."""
        require_within(self, begin, end)
        cdef Span span = Span.__new__(Span)
        span.region, span.begin, span.end = self, self.phase + begin, self.phase + end
        with cython.critical_section(self):
            self.users[span.begin // PAGE] += 1
            self.users[(span.end - 1) // PAGE] += 1
        return span


# No cycle goes through it: what views it holds it.
@cython.no_gc
@cython.final
cdef class Span:
    """Part of a Region."""

    cdef Region region
    cdef size_t begin, end  # from the first page on

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        cdef char *address = self.region.mapped + self.begin
        PyBuffer_FillInfo(buffer, self, address, self.end - self.begin, 0, flags)

    def __dealloc__(self):
        if self.region is None:
            return
        cdef size_t first = self.begin // PAGE
        cdef size_t last = (self.end - 1) // PAGE
        cdef uint32_t *users = self.region.users
        # What frees a page must be its last user, and no two may both think so.
        with cython.critical_section(self.region):
            users[first] -= 1
            users[last] -= 1
            # Pages at the ends may have others, which live.
            if users[first] > 0:
                first += 1
            if users[last] == 0:
                last += 1
        if first >= last:
            return
        if not self.region.shrinks:
            # The kernel would make huge pages of what is left, filled up with new ones.
            self.region.shrinks = True
            madvise(self.region.mapped, self.region.mapped_bytes, MADV_NOHUGEPAGE)
        madvise(self.region.mapped + first * PAGE, (last - first) * PAGE, MADV_DONTNEED)


cdef int require_within(Region region, Py_ssize_t begin, Py_ssize_t end) except -1:
    if not 0 <= begin < end <= region.nbytes:
        raise ValueError(f"{begin} to {end} is no part of {region.nbytes} bytes")
    return 0
