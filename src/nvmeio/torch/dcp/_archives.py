"""Find the bytes of a tensor in a file that torch.save has written."""

import io
import math
import pickle
import zipfile
from collections import OrderedDict
from typing import Any, NamedTuple

import torch

from nvmeio._files.archives import begin_of, content_of

__all__ = [
    "HEAD_BYTES",
    "LARGE_BYTES",
    "PAGE",
    "TAIL_BYTES",
    "Ends",
    "Located",
    "stored_in",
]

PAGE = 4096
# A tensor of this size or more begins at a page of the file, and parts of it can be read.
# Smaller ones are read whole.
LARGE_BYTES = 64 << 10
# The most that torch.save writes before a tensor's bytes (four entries, each at its own
# page) and after them.
HEAD_BYTES, TAIL_BYTES = 32 << 10, 4 << 10


class Located(NamedTuple):
    """A tensor in a file, whose bytes are in C order."""

    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]


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


# The names of storages in files, which imply the dtype.
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}


class _Said(NamedTuple):
    dtype: torch.dtype
    begin: int  # in elements of the storage
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    key: str


class _TensorUnpickler(pickle.Unpickler):
    """Reads the description of a single tensor by torch.save, and refuses anything else."""

    def persistent_load(self, pid: Any) -> Any:
        """Return the kind and the key of a storage."""
        _, kind, key, *_ = pid
        return kind, str(key)

    def find_class(self, module: str, name: str) -> Any:
        """Return a stand-in for an allowed function or class."""
        if module == "torch":
            found = getattr(torch, name, None)
            if isinstance(found, torch.dtype):
                return found
            if name in _STORAGES:
                return _STORAGES[name]
        if module == "torch.storage" and name == "UntypedStorage":
            return None
        if module == "torch._utils" and name == "_rebuild_tensor_v2":
            return lambda storage, *said: self._said(
                storage[0], storage[1], *said[:3], *said[5:]
            )
        if module == "torch._utils" and name == "_rebuild_tensor_v3":
            return lambda storage, *said: self._said(
                said[5], storage[1], *said[:3], *said[6:]
            )
        if module == "torch._utils" and name == "_rebuild_parameter":
            return lambda data, *said: data
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        raise pickle.UnpicklingError(f"{module}.{name}")

    @staticmethod
    def _said(
        dtype: Any, key: str, begin: int, shape: Any, strides: Any, lazily: Any = None
    ) -> _Said:
        if lazily:
            raise pickle.UnpicklingError(f"it is a lazy view: {lazily}")
        return _Said(dtype, begin, tuple(shape), tuple(strides), key)


def stored_in(ends: Ends) -> Located | None:
    """Find the bytes of a tensor in a torch.save archive; return None if that fails."""
    try:
        with zipfile.ZipFile(ends) as archive:
            entries = {each.filename.partition("/")[2]: each for each in archive.infolist()}
        said = _TensorUnpickler(io.BytesIO(content_of(ends, entries["data.pkl"]))).load()
        if "byteorder" in entries and content_of(ends, entries["byteorder"]) != b"little":
            return None
        entry = entries[f"data/{said.key}"]
        begin = begin_of(ends, entry)
    except (OSError, KeyError, ValueError, TypeError, AttributeError):
        return None
    except (EOFError, IndexError, pickle.UnpicklingError, zipfile.BadZipFile):
        return None
    known = isinstance(said, _Said) and isinstance(said.dtype, torch.dtype)
    if not known or entry.compress_type != zipfile.ZIP_STORED:
        return None
    size = said.dtype.itemsize
    nbytes = math.prod(said.shape) * size
    contiguous, expected = [], 1
    for extent in reversed(said.shape):
        contiguous.append(expected)
        expected *= max(extent, 1)
    if said.strides != tuple(reversed(contiguous)):
        return None
    if min(said.begin, *said.shape, 0) < 0 or said.begin * size + nbytes > entry.file_size:
        return None
    return Located(begin + said.begin * size, said.dtype, said.shape)
