"""Find the bytes of a tensor in a file that torch.save has written."""

import io
import math
import zipfile
from typing import IO, Any, NamedTuple

import torch

from nvmeio._memory.strides import c_strides
from nvmeio._tensors.torch_files import SavedTensor, content_of, entries_of, unpickled

__all__ = [
    "HEAD_BYTES",
    "LARGE_BYTES",
    "PAGE",
    "TAIL_BYTES",
    "Ends",
    "Located",
    "load_allowed",
    "stored_in",
]

PAGE = 4096
# A tensor of this size or more begins at a page of the file, and parts of it can be read.
# Smaller ones are read whole.
LARGE_BYTES = 64 << 10
# The most that torch.save writes before a tensor's bytes (four entries, each at its own
# page) and after them.
HEAD_BYTES, TAIL_BYTES = 32 << 10, 4 << 10


def load_allowed(text: IO[bytes], *, weights_only: bool = True) -> Any:
    """Load what torch.save has written; raise if it needs more than is allowed."""
    # Else torch's option config.load.mmap would count, which needs a path.
    return torch.load(text, weights_only=weights_only, map_location="cpu", mmap=False)


class Located(NamedTuple):
    """A tensor in a file, whose bytes are in C order once its axes are permuted."""

    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    axes: tuple[int, ...] = ()  # in the order of the bytes; () for C order


class Ends(io.RawIOBase):
    """A file object with only the beginning and the end of a torch.save archive."""

    def __init__(self, head: bytes, tail: bytes, length: int) -> None:
        self.head, self.tail, self.length = head, tail, length
        self.position = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_CUR: self.position, io.SEEK_END: self.length}.get(whence, 0)
        self.position = base + offset
        return self.position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self.length - self.position))
        low = self.position - (self.length - len(self.tail))
        if low >= 0:
            view[:count] = self.tail[low : low + count]
        elif self.position + count <= len(self.head):
            view[:count] = self.head[self.position : self.position + count]
        else:
            raise OSError("these bytes were not read")
        self.position += count
        return count


def stored_in(ends: Ends) -> Located | None:
    """Find the bytes of a tensor in a torch.save archive; return None if that fails."""
    try:
        entries = entries_of(ends)
        order = entries.get("byteorder")
        if order is not None and content_of(ends, order) != b"little":
            return None
        tensor = unpickled(content_of(ends, entries["data.pkl"]))
        if not isinstance(tensor, SavedTensor) or tensor.is_lazy:
            return None
        begin, entry = tensor.place(ends, entries), entries[f"data/{tensor.key}"]
    # What the file has may raise anything.
    except Exception:
        return None
    dtype = getattr(torch, tensor.dtype, None)
    if not isinstance(dtype, torch.dtype) or entry.compress_type != zipfile.ZIP_STORED:
        return None
    end = (tensor.begin + math.prod(tensor.shape)) * dtype.itemsize
    shape, strides = tensor.shape, tensor.strides
    # Of extents of 1 the strides say nothing.
    axes = sorted(range(len(shape)), key=lambda axis: (-strides[axis], shape[axis] != 1))
    dense = c_strides([shape[axis] for axis in axes])
    pairs = zip(axes, dense, strict=True)
    if end > entry.file_size or any(
        shape[axis] != 1 and strides[axis] != stride for axis, stride in pairs
    ):
        return None
    return Located(begin, dtype, shape, tuple(axes))
