"""Whether a file is the one that was opened before, by its status or by some blocks."""

import errno
import os
import time
import zlib
from collections.abc import Callable
from typing import NamedTuple

from nvmeio._files.paths import naming
from nvmeio._native.file import File

__all__ = [
    "CHANGED",
    "Identity",
    "Stamp",
    "checksum_of",
    "identity_of",
    "require_same",
    "stamp_of",
]

# How many blocks are compared, and the size of each.
_BLOCKS = 3
_BLOCK_BYTES = 4096

# The coarsest times are those of FAT: a change within 2 s may leave the time as it is.
_COARSE_NS = 2_000_000_000


# How an error begins of a file that is not the one it was.
CHANGED = "the file was replaced or changed since the dataset was made"


class Stamp(NamedTuple):
    """The status of a file."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    def settled(self, now_ns: int) -> bool:
        """Return whether any change after this moment must change the stamp."""
        return max(self.mtime_ns, self.ctime_ns) + _COARSE_NS < now_ns


class Identity(NamedTuple):
    """What is known of a file: of its bytes from `begin` to `end`, and of the whole."""

    begin: int
    end: int
    stamp: Stamp
    # Whether the stamp alone can decide.
    settled: bool
    checksum: int


def identity_of(file: File, begin: int = 0, end: int | None = None) -> Identity:
    """Return the identity of an open file."""
    now_ns = time.time_ns()
    stamp = stamp_of(file)
    end = stamp.size if end is None else end
    settled = stamp.settled(now_ns)
    return Identity(begin, end, stamp, settled, _checksum_in(file, begin, end))


def require_same(file: File, known: Identity, *, may_grow: bool) -> None:
    """Raise OSError (ESTALE) if a file has not the bytes of the known one.

    Where the stamp differs, as after a touch, on another machine, or where the file system
    numbers files anew, some blocks decide; and also where the file was so new that a change
    may not have changed its stamp.
    """
    stamp = stamp_of(file)
    if stamp == known.stamp and known.settled:
        return
    size, then = stamp.size, known.stamp.size
    if size != then and not (may_grow and size > then):
        words = f"it has {size} bytes, and had {then}"
    elif _checksum_in(file, known.begin, known.end) != known.checksum:
        words = "it has other contents"
    else:
        return
    words = f"{CHANGED}: {words}"
    raise OSError(errno.ESTALE, words, file.path)


def stamp_of(file: File) -> Stamp:
    """Return the status of an open file."""
    found = os.fstat(file.fileno())
    times = found.st_mtime_ns, found.st_ctime_ns
    return Stamp(found.st_dev, found.st_ino, found.st_size, *times)


def checksum_of(read: Callable[[int, int], bytes], begin: int, end: int) -> int:
    """Return a checksum of some blocks, from the first to the last.

    ``read(size, offset)`` returns bytes.
    """
    last = max(begin, end - _BLOCK_BYTES)
    checksum = 0
    for at in sorted({begin + (last - begin) * i // (_BLOCKS - 1) for i in range(_BLOCKS)}):
        checksum = zlib.crc32(read(min(_BLOCK_BYTES, end - at), at), checksum)
    return checksum


def _checksum_in(file: File, begin: int, end: int) -> int:
    descriptor = file.fileno()
    with naming(file.path):
        return checksum_of(lambda size, at: os.pread(descriptor, size, at), begin, end)
