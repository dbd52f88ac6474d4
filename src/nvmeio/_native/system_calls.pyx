"""System calls that Python lacks: renameat2(2), and cachestat(2) with its substitute."""

import errno
import os
import random

from libc.errno cimport errno as c_errno
from libc.stdint cimport int64_t
from posix.unistd cimport _SC_PAGESIZE, sysconf

from nvmeio._libnvmeio cimport c_file
from nvmeio._native.errors cimport raise_because, raise_saying

cdef extern from "<unistd.h>" nogil:
    """
    #include <fcntl.h>
    #include <sys/syscall.h>
    """
    long syscall(long number, ...)
    long SYS_renameat2
    int AT_FDCWD

# <linux/fs.h>, which some libc headers contradict.
cdef enum:
    RENAME_NOREPLACE = 1
    RENAME_EXCHANGE = 2


def rename_to_new(source: str, target: str) -> None:
    """Rename a file or folder; raise FileExistsError if the new name exists.

    Where the file system lacks RENAME_NOREPLACE (NFS), the check and the rename are two
    steps: an empty folder that another process makes between them is replaced.
    """
    error = rename(os.fsencode(source), os.fsencode(target), RENAME_NOREPLACE)
    if error in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        error = errno.EEXIST if os.path.lexists(target) else 0
        if not error:
            os.rename(source, target)
    if error:
        raise_because(error, None, target)


def exchange(one: str, other: str) -> None:
    """Swap the names of two files or folders in one step."""
    error = rename(os.fsencode(one), os.fsencode(other), RENAME_EXCHANGE)
    if error in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        words = "this file system cannot exchange two folders in one step"
        raise_saying(errno.EOPNOTSUPP, words, other)
    if error:
        raise_because(error, None, other)


cdef int rename(bytes source, bytes target, unsigned int flags):
    cdef const char *old = source
    cdef const char *new = target
    cdef long failed
    with nogil:
        failed = syscall(SYS_renameat2, AT_FDCWD, old, AT_FDCWD, new, flags)
    return c_errno if failed else 0


# How many pages to try if the kernel has no cachestat(2).
cdef enum:
    SAMPLES = 64

cdef Py_ssize_t PAGE = sysconf(_SC_PAGESIZE)


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
        cached = c_file.cached_pages(descriptor, offset, nbytes)
    if cached >= 0:
        pages = (offset + nbytes - 1) // PAGE - offset // PAGE + 1
        return min(1.0, cached / pages)
    return sampled_fraction(descriptor, offset, nbytes)


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
    cdef int64_t place
    cdef int found
    hits = 0
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    except OSError as error:
        if error.errno is None:
            # A signal handler raised it.
            raise
        return 0.0
    try:
        for index in range(count):
            low, high = index * pages // count, (index + 1) * pages // count
            place = max(offset, (first + random.randrange(low, high)) * PAGE)
            with nogil:
                found = c_file.try_cached(descriptor, place)
            if found < 0:
                return 0.0
            hits += found
    finally:
        # Later reads through this descriptor need their readahead back.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_NORMAL)
    return hits / count
