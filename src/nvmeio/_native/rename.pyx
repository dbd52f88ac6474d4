"""Renames that replace nothing, or that exchange two names: renameat2(2)."""

import errno
import os

from libc.errno cimport errno as c_errno

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
