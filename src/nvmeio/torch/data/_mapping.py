"""Arrays in memory-mapped files, which another process maps again by their path."""

import mmap
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nvmeio._native.file import File
from nvmeio.torch.data._identity import Identity, identity_of, require_same

__all__ = ["Mapping", "mapping_of"]


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


def mapping_of(array: npt.NDArray[Any]) -> Mapping | None:
    """Return where an array is in a mapped file; None if it is in memory."""
    owner: Any = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    # Changes in a copy-on-write mapping are not in the file.
    mapped = isinstance(owner, np.memmap) and isinstance(owner.base, mmap.mmap)
    if not mapped or owner.filename is None or owner.mode == "c":
        return None
    try:
        with File(owner.filename) as file:
            identity = identity_of(file)
    except OSError:
        # It has lost its name, so nobody can map it again.
        return None
    start = array.ctypes.data - owner.ctypes.data + owner.offset
    path, shape = str(owner.filename), array.shape
    return Mapping(path, array.dtype, shape, array.strides, start, identity)
