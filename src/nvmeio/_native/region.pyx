"""Mappings that many tensors share: a Region of new memory, and a FileMap of a file.

They are separate from the pool, because a model may be larger than the pool's limit.
"""

import errno

cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from libc.errno cimport EAGAIN, EINTR, ENOMEM
from libc.errno cimport errno as c_errno
from libc.stdint cimport uint32_t, uintptr_t
from libc.stdlib cimport calloc, free
from posix.unistd cimport _SC_PAGESIZE, sysconf

from nvmeio._libnvmeio cimport c_pool
from nvmeio._native.errors cimport check, reason_of

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

cdef enum:
    HUGE = 2 << 20

# The kernel's, such as 4, 16 or 64 KiB.  madvise(2) rounds a length up to whole pages.
cdef size_t PAGE = sysconf(_SC_PAGESIZE)


cdef int map_pages(size_t size, int flags, int descriptor, char **result) noexcept nogil:
    """Map pages; return -errno.  The pool's free memory is returned if that is needed."""
    cdef void *found = mmap(NULL, size, PROT_READ | PROT_WRITE, flags, descriptor, 0)
    cdef int error = c_errno
    if found == MAP_FAILED and error == ENOMEM and c_pool.pool_trim():
        found = mmap(NULL, size, PROT_READ | PROT_WRITE, flags, descriptor, 0)
        error = c_errno
    if found == MAP_FAILED:
        return -error
    result[0] = <char *> found
    return 0


# A FileMap is part of no cycle.
@cython.no_gc
@cython.final
cdef class FileMap:
    """A private, writable map of the first bytes of a file.

    Exports them as a buffer.  What is written there stays in this process.  The map lives
    until its last view dies, and needs no descriptor.
    """

    cdef char *mapped
    cdef readonly Py_ssize_t nbytes

    def __cinit__(self, int descriptor, Py_ssize_t nbytes, path=None):
        if nbytes < 1:
            raise ValueError(f"nbytes is {nbytes}; it must be at least 1")
        cdef int error
        cdef char *found = NULL
        with nogil:
            # Without MAP_NORESERVE, Linux refuses a file that is larger than the memory.
            error = map_pages(nbytes, MAP_PRIVATE | MAP_NORESERVE, descriptor, &found)
        if error == -ENOMEM:
            raise MemoryError(f"out of memory: the system cannot map {nbytes} bytes")
        check(error, path)
        self.mapped, self.nbytes = found, nbytes

    def __dealloc__(self):
        if self.mapped != NULL:
            munmap(self.mapped, self.nbytes)

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.mapped, self.nbytes, 0, flags)

    def span(self, Py_ssize_t begin, Py_ssize_t end):
        """Return a part; parts may overlap."""
        return memoryview(self)[begin:end]


# A Region is part of no cycle, and must still be intact when its last Span dies.
@cython.no_gc
@cython.final
cdef class Region:
    """A mapping of its own, in huge pages where the system has them.

    The address of the first byte is `phase` modulo 2 MiB.  Exports all bytes as a writable
    buffer.  Pages are populated by populate(), or when they are touched.
    """

    cdef char *mapped
    cdef size_t mapped_bytes
    cdef size_t phase
    cdef readonly Py_ssize_t nbytes
    # For each page, the number of live spans that begin or end in it.
    cdef uint32_t *users
    cdef bint shrinks  # pages were returned to the system

    def __cinit__(self, Py_ssize_t nbytes, size_t phase=0):
        if nbytes < 1 or phase >= HUGE:
            raise ValueError(
                f"nbytes is {nbytes} and phase {phase}; they must be at least 1 and less "
                f"than {HUGE}"
            )
        self.nbytes, self.phase = nbytes, phase
        cdef size_t size = (phase + nbytes + PAGE - 1) & ~(PAGE - 1)
        # No huge page unless a whole one fits: it would take 2 MiB for a few bytes.
        cdef size_t huge = size & ~<size_t> (HUGE - 1)
        cdef size_t more = HUGE if huge else 0
        self.users = <uint32_t *> calloc(size // PAGE, sizeof(uint32_t))
        cdef int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE
        cdef char *found = NULL
        if self.users == NULL or map_pages(size + more, flags, -1, &found):
            raise MemoryError(f"out of memory: the system cannot map {nbytes} bytes")
        cdef size_t before = 0
        if huge:
            # Unmap what was mapped for alignment only.
            before = <size_t> (-<uintptr_t> found) & (HUGE - 1)
            if before:
                munmap(found, before)
            munmap(found + before + size, HUGE - before)
            # Kernels without huge pages refuse; that is fine.
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
        """The address of the first byte."""
        return <uintptr_t> (self.mapped + self.phase)

    def populate(self, Py_ssize_t begin, Py_ssize_t end) -> None:
        """Populate the pages of a part, with the GIL released."""
        require_within(self, begin, end)
        cdef char *first = self.mapped + ((self.phase + begin) & ~(PAGE - 1))
        cdef size_t size = self.mapped + self.phase + end - first
        cdef int error
        with nogil:
            size = (size + PAGE - 1) & ~(PAGE - 1)
            error = populate_pages(first, size)
            if error == ENOMEM and c_pool.pool_trim():
                error = populate_pages(first, size)
        # EINVAL: the kernel is older than 5.14.  Pages are then populated when touched.
        if error and error != errno.EINVAL:
            raise MemoryError(f"no memory for {end - begin} bytes: {reason_of(error)}")

    def span(self, Py_ssize_t begin, Py_ssize_t end):
        """Return a part, which frees its pages when it dies; parts must not overlap."""
        require_within(self, begin, end)
        cdef Span span = Span.__new__(Span)
        span.region, span.begin, span.end = self, self.phase + begin, self.phase + end
        with cython.critical_section(self):
            self.users[span.begin // PAGE] += 1
            self.users[(span.end - 1) // PAGE] += 1
        return span


# A Span is part of no cycle: views refer to it, and it only to its Region.
@cython.no_gc
@cython.final
cdef class Span:
    """Part of a Region."""

    cdef Region region
    cdef size_t begin, end  # in bytes from the Region's first page

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        cdef char *address = self.region.mapped + self.begin
        PyBuffer_FillInfo(buffer, self, address, self.end - self.begin, 0, flags)

    def __dealloc__(self):
        if self.region is None:
            return
        cdef size_t first = self.begin // PAGE
        cdef size_t last = (self.end - 1) // PAGE
        cdef uint32_t *users = self.region.users
        # Exactly one Span, the last user, may free a page.
        with cython.critical_section(self.region):
            users[first] -= 1
            users[last] -= 1
            # Keep the pages at the ends if other live spans use them.
            if users[first] > 0:
                first += 1
            if users[last] == 0:
                last += 1
            if first >= last:
                return
            if not self.region.shrinks:
                # Otherwise khugepaged would collapse what is left into huge pages again.
                self.region.shrinks = True
                madvise(self.region.mapped, self.region.mapped_bytes, MADV_NOHUGEPAGE)
            # With the lock, so that no new Span of the same page has been filled meanwhile.
            madvise(self.region.mapped + first * PAGE, (last - first) * PAGE, MADV_DONTNEED)


cdef int populate_pages(char *first, size_t size) noexcept nogil:
    while madvise(first, size, MADV_POPULATE_WRITE):
        # EAGAIN: the kernel is short of memory for a moment; retry.
        if c_errno != EINTR and c_errno != EAGAIN:
            return c_errno
    return 0


cdef int require_within(Region region, Py_ssize_t begin, Py_ssize_t end) except -1:
    if not 0 <= begin < end <= region.nbytes:
        raise ValueError(
            f"the part from {begin} to {end} is empty or outside of {region.nbytes} bytes"
        )
    return 0
