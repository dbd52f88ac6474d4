"""Descriptors of directories and lock files, which are closed whatever happens."""

import contextlib
import os
from collections.abc import Iterator

__all__ = ["FOLDER", "close_quietly", "opened"]

FOLDER = os.O_RDONLY | os.O_DIRECTORY


@contextlib.contextmanager
def opened(path: str | bytes, flags: int) -> Iterator[int]:
    """Open a file or directory for the duration of a ``with`` block."""
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        close_quietly(descriptor)


def close_quietly(descriptor: int) -> None:
    """Close a descriptor; ignore errors, which mean nothing after reading or a sync."""
    with contextlib.suppress(OSError):
        os.close(descriptor)
