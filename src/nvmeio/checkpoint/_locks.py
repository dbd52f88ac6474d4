"""Who reads a step, as those see it who want to remove it."""

import contextlib
import fcntl
import os
from collections.abc import Iterator

from nvmeio._files.descriptors import opened

__all__ = ["exclusive"]


@contextlib.contextmanager
def exclusive(path: str) -> Iterator[bool]:
    """Tell whether nobody reads what a file belongs to; meanwhile nobody begins to."""
    with contextlib.ExitStack() as stack:
        try:
            # NFS gives this lock only to who may write.
            flags = os.O_RDWR if os.access(path, os.W_OK) else os.O_RDONLY
            descriptor = stack.enter_context(opened(path, flags | os.O_NOFOLLOW))
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            free = False
        except OSError:
            # The file system has no locks, or what is left of the step no file.
            free = True
        else:
            free = True
        yield free
