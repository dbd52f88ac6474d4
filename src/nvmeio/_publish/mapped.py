"""Find memory that is mapped from a file, which writing to that file would change."""

import contextlib
import ctypes
import os
import stat
from typing import Any, NamedTuple

import numpy as np

from nvmeio._arguments.types import HasFileno
from nvmeio._files.descriptors import contents_of
from nvmeio._native.pool import require_available

__all__ = ["Map", "apart", "is_mapped", "maps_of", "require_copy"]


class Map(NamedTuple):
    """The addresses at which a part of a file is mapped."""

    begin: int
    end: int
    offset: int


def maps_of(file: HasFileno) -> list[Map]:
    """Return where this process has mapped a file, from /proc/self/maps."""
    # Not by the device too: /proc/self/maps has another one on btrfs and overlayfs.
    inode = os.fstat(file.fileno()).st_ino
    # By the path too: FUSE file systems may give a file another inode number each time.
    path = os.readlink(b"/proc/self/fd/%d" % file.fileno())
    maps = []
    for line in contents_of("/proc/self/maps").rstrip(b"\n").split(b"\n"):
        span, _, offset, _, found, *name = line.split(maxsplit=5)
        if int(found) == inode or name == [path]:
            begin, end = (int(each, 16) for each in span.split(b"-"))
            maps.append(Map(begin, end, int(offset, 16)))
    return maps


def is_mapped(file: HasFileno) -> bool:
    """Return whether this process has mapped a file that has contents."""
    found = os.fstat(file.fileno())
    if stat.S_ISREG(found.st_mode) and not found.st_size:
        return False
    with contextlib.suppress(FileNotFoundError):
        return bool(maps_of(file))
    # There is no /proc.
    return False


def apart(buffer: Any, file: HasFileno) -> Any:
    """Return a Buffer to write to a file, or a copy if it is mapped from that file."""
    begin, end = buffer.address, buffer.address + buffer.nbytes
    if begin == end or not is_mapped(file):
        return buffer
    if not any(begin < each.end and each.begin < end for each in maps_of(file)):
        return buffer
    require_copy(buffer.nbytes, file)
    memory: Any = (ctypes.c_ubyte * buffer.nbytes).from_address(begin)
    return np.frombuffer(memory, np.uint8).copy()


def require_copy(nbytes: int, file: HasFileno) -> None:
    """Raise MemoryError if there is no memory to copy what may be mapped from a file."""
    path = os.readlink(f"/proc/self/fd/{file.fileno()}")
    require_available(
        nbytes,
        f"{path!r} is to be written in place from memory that is mapped from it; a copy",
    )
