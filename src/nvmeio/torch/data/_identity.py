"""Whether a file is the one that was opened before, by its status or by some blocks."""

import errno
import os
import zlib
from typing import NamedTuple

from nvmeio._native.file import File

__all__ = ["Identity", "identity_of", "require_same"]

# How many blocks are compared, and the size of each.
_BLOCKS = 3
_BLOCK_BYTES = 4096


class Identity(NamedTuple):
    """What is known of a file: of its bytes from `begin` to `end`, and of the whole."""

    begin: int
    end: int
    # Device, number, size, and times of the last changes of its bytes and of its status.
    stamp: tuple[int, int, int, int, int]
    checksum: int


def identity_of(file: File, begin: int = 0, end: int | None = None) -> Identity:
    """Return the identity of an open file."""
    stamp = _stamp_of(file)
    end = stamp[2] if end is None else end
    return Identity(begin, end, stamp, _checksum_of(file, begin, end))


def require_same(file: File, known: Identity, *, may_grow: bool) -> None:
    """Raise OSError (ESTALE) if a file has not the bytes of the known one.

    Where the stamp differs, as after a touch, on another machine, or where the file system
    numbers files anew, some blocks decide.
    """
    stamp = _stamp_of(file)
    if stamp == known.stamp:
        return
    size, then = stamp[2], known.stamp[2]
    if size != then and not (may_grow and size > then):
        words = f"it has {size} bytes, and had {then}"
    elif _checksum_of(file, known.begin, known.end) != known.checksum:
        words = "it has other contents"
    else:
        return
    words = f"the file was replaced or changed since the dataset was made: {words}"
    raise OSError(errno.ESTALE, words, file.path)


def _stamp_of(file: File) -> tuple[int, int, int, int, int]:
    found = os.fstat(file.fileno())
    times = found.st_mtime_ns, found.st_ctime_ns
    return (found.st_dev, found.st_ino, found.st_size, *times)


def _checksum_of(file: File, begin: int, end: int) -> int:
    """Return a checksum of some blocks, from the first to the last."""
    last = max(begin, end - _BLOCK_BYTES)
    checksum, place = 0, file.tell()
    for at in sorted({begin + (last - begin) * i // (_BLOCKS - 1) for i in range(_BLOCKS)}):
        file.seek(at)
        checksum = zlib.crc32(file.read(min(_BLOCK_BYTES, end - at)), checksum)
    file.seek(place)
    return checksum
