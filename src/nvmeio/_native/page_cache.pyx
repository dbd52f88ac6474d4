"""Measure how much of a file is in the page cache."""

import os
import random

from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int64_t

from nvmeio cimport libnvmeio

cdef extern from "<unistd.h>" nogil:
    ssize_t pread(int descriptor, void *buffer, size_t size, int64_t offset)

# SAMPLES: how many pages to try if the kernel has no cachestat(2).
cdef enum:
    SAMPLES = 64
    PAGE = 4096


def cached_fraction(int descriptor, Py_ssize_t offset, Py_ssize_t nbytes) -> float:
    """Return the fraction, from 0 to 1, of a file's range that is in the page cache.

    Counted by cachestat(2), which needs Linux 6.5, and a file that this user owns or may
    write to.  Otherwise estimated by reading a sample of pages with RWF_NOWAIT, because
    mincore(2) reports every page of another user's file as cached.  0 where the file system
    supports neither.
    """
    cdef int64_t cached
    if nbytes < 1:
        return 0.0
    with nogil:
        cached = libnvmeio.cached_pages(descriptor, offset, nbytes)
    if cached >= 0:
        pages = (offset + nbytes - 1) // PAGE - offset // PAGE + 1
        return min(1.0, cached / pages)
    return sampled_fraction(descriptor, offset, nbytes)


def read_cached(int descriptor, buffer, int64_t offset) -> bool:
    """Fill a buffer, if the page cache has all of it; False if not, or if that is unknown.

    The descriptor is one without O_DIRECT.  For one record this takes a fifth of the time
    of a gather, which would read it from the page cache too.
    """
    cdef Py_buffer view
    cdef Py_ssize_t done = 0, got
    cdef int64_t pages
    PyObject_GetBuffer(buffer, &view, PyBUF_WRITABLE)
    try:
        if view.len == 0:
            return True
        pages = (offset + view.len - 1) // PAGE - offset // PAGE + 1
        with nogil:
            if libnvmeio.cached_pages(descriptor, offset, view.len) == pages:
                while done < view.len:
                    got = pread(
                        descriptor, <char *> view.buf + done, view.len - done, offset + done
                    )
                    if got <= 0:
                        break
                    done += got
        # The caller repeats a failed read, and reports its error.
        return done == view.len
    finally:
        PyBuffer_Release(&view)


def sampled_fraction(int descriptor, Py_ssize_t offset, Py_ssize_t nbytes) -> float:
    """Estimate the same fraction from a random sample of pages.

    A read with RWF_NOWAIT that fails makes Linux fetch the page, so a second call with the
    same pages would find them all: hence random ones.  Readahead is off meanwhile, so that
    no other pages are fetched.
    """
    if nbytes < 1:
        return 0.0
    first, last = offset // PAGE, (offset + nbytes - 1) // PAGE
    pages = last - first + 1
    count = min(SAMPLES, pages)
    byte, hits = bytearray(1), 0
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    except OSError:
        return 0.0
    try:
        for index in range(count):
            low, high = index * pages // count, (index + 1) * pages // count
            place = max(offset, (first + random.randrange(low, high)) * PAGE)
            try:
                hits += os.preadv(descriptor, [byte], place, os.RWF_NOWAIT)
            except BlockingIOError:
                pass
    except OSError:
        return 0.0
    finally:
        # Later reads through this descriptor need their readahead back.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_NORMAL)
    return hits / count
