"""Descriptors that Python opens: of folders and locks, closed whatever happens."""

import contextlib
import os
from collections.abc import Iterator

__all__ = ["FOLDER", "close_quietly", "opened"]

FOLDER = os.O_RDONLY | os.O_DIRECTORY


@contextlib.contextmanager
def opened(path: str | bytes, flags: int) -> Iterator[int]:
    """Open a file or a folder for a while."""
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        close_quietly(descriptor)


def close_quietly(descriptor: int) -> None:
    """Close what was read, or synced before: an error would say nothing of it."""
    with contextlib.suppress(OSError):
        os.close(descriptor)
