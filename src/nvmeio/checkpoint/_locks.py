"""The lock that keeps a step from being removed while it is read."""

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator

from nvmeio._files.descriptors import opened
from nvmeio._files.paths import naming

__all__ = ["exclusive"]


# What a file says that no reader can have locked.
_NOT_LOCKED = {
    errno.EACCES,
    errno.EBADF,
    errno.EINVAL,
    errno.ELOOP,
    errno.ENOENT,
    errno.ENOLCK,
    errno.ENOSYS,
    errno.ENOTDIR,
    errno.EOPNOTSUPP,
    errno.EPERM,
    errno.ESTALE,
}


@contextlib.contextmanager
def exclusive(path: str) -> Iterator[bool]:
    """Lock a file of a step against readers; yield False if there are any.

    Raise OSError if that cannot be known.
    """
    with contextlib.ExitStack() as stack:
        try:
            # NFS grants an exclusive lock only on a descriptor open for writing.
            flags = os.O_RDWR if os.access(path, os.W_OK) else os.O_RDONLY
            # Nobody else opens the other end of a pipe that is planted there.
            flags |= os.O_NOFOLLOW | os.O_NONBLOCK
            with naming(path):
                descriptor = stack.enter_context(opened(path, flags))
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            free = False
        except OSError as error:
            # The file system has no locks, or the step has no such file any more.
            if error.errno not in _NOT_LOCKED:
                raise
            free = True
        else:
            free = True
        yield free
