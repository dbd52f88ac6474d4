"""Arrays in files, which another process maps or opens again by their path."""

import errno
import mmap
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nvmeio._native.file import File
from nvmeio.arrays import ArrayFile
from nvmeio.torch.data._identity import Identity, checksum_of, identity_of, require_same

__all__ = ["Mapping", "Reopening", "mapping_of"]


class Mapping(NamedTuple):
    """Where an array is in a file."""

    path: str
    dtype: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int
    identity: Identity

    def array(self) -> npt.NDArray[Any]:
        """Map the array again; raise OSError (ESTALE) if the file is another one now."""
        with File(self.path) as file:
            require_same(file, self.identity, may_grow=False)
            # Of the open file, because the path may lead to another one by now.
            whole = np.memmap(file, np.uint8, "r")
        found: npt.NDArray[Any]
        found = np.ndarray(self.shape, self.dtype, whole, self.start, self.strides)
        return found


class Reopening(NamedTuple):
    """How to open an ArrayFile again."""

    path: str | bytes
    make: Callable[..., ArrayFile]
    arguments: tuple[Any, ...]

    @classmethod
    def of(cls, array: ArrayFile) -> "Reopening":
        """Return how to open this one."""
        make, arguments = array.__reduce__()
        return cls(array.path, make, arguments)

    def array(self) -> ArrayFile:
        """Open it."""
        return self.make(*self.arguments)


def mapping_of(array: npt.NDArray[Any]) -> Mapping | None:
    """Return where an array is in a mapped file; None if it is in memory.

    Also None if the path does not lead to the mapped file any more, so that nobody can map
    it again.  Raise OSError (ESTALE) if the file ends before the mapping does.
    """
    owner: Any = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    # Changes in a copy-on-write mapping are not in the file.
    mapped = isinstance(owner, np.memmap) and isinstance(owner.base, mmap.mmap)
    if not mapped or owner.filename is None or owner.mode == "c":
        return None
    begin, end = owner.offset, owner.offset + owner.nbytes
    path, memory = str(owner.filename), owner.base
    # The size of the file that is mapped, wherever the path leads.
    size = memory.size()
    if size < end:
        # Reading the memory would kill the process.
        words = f"the file was truncated since it was mapped: it has {size} bytes"
        raise OSError(errno.ESTALE, f"{words}, and had {end} at least", path)
    try:
        with File(path) as file:
            identity = identity_of(file, begin, end)
    except OSError:
        return None
    # A mapping begins at a multiple of the granularity.
    before = begin - begin % mmap.ALLOCATIONGRANULARITY
    held = checksum_of(lambda n, at: memory[at - before : at - before + n], begin, end)
    if (size, held) != (identity.stamp.size, identity.checksum):
        return None
    start = array.ctypes.data - owner.ctypes.data + begin
    return Mapping(path, array.dtype, array.shape, array.strides, start, identity)
