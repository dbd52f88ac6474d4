"""Descriptors: open and close those of directories and lock files, truncate files."""

import contextlib
import os
import stat
from collections.abc import Iterator
from typing import Any

__all__ = ["FOLDER", "close_quietly", "cut", "opened"]

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


def cut(file: Any, size: int) -> None:
    """Truncate an open file to its new contents; do nothing for a device."""
    found = os.fstat(file.fileno())
    if found.st_size != size and stat.S_ISREG(found.st_mode):
        file.truncate(size)
