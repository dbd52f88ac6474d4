"""Find the tensors of files that torch.save has written, without torch.

An unpickler that knows tensors reads the pickle, and replaces every other object by one
that does nothing, so that no code of the file runs.
"""

import collections
import io
import pickle
import zipfile
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from nvmeio._native.pickles import require_linear

__all__ = [
    "SIZES",
    "Nothing",
    "Readable",
    "Reader",
    "Stored",
    "begin_of",
    "content_of",
    "entries_of",
    "storage_itemsize",
    "tensor_of",
    "unpickled",
]

_HEADER_BYTES = 30

# The name of each storage's dtype, and the size of an element.
_KINDS = {
    "DoubleStorage": ("float64", 8),
    "FloatStorage": ("float32", 4),
    "HalfStorage": ("float16", 2),
    "BFloat16Storage": ("bfloat16", 2),
    "LongStorage": ("int64", 8),
    "IntStorage": ("int32", 4),
    "BoolStorage": ("bool", 1),
    "ShortStorage": ("int16", 2),
    "CharStorage": ("int8", 1),
    "ByteStorage": ("uint8", 1),
    "ComplexFloatStorage": ("complex64", 8),
    "ComplexDoubleStorage": ("complex128", 16),
    "QInt8Storage": ("qint8", 1),
    "QUInt8Storage": ("quint8", 1),
    "QInt32Storage": ("qint32", 4),
    # Elements of less than a byte: an element of the storage is a byte.
    "QUInt4x2Storage": ("quint4x2", 1),
    "QUInt2x4Storage": ("quint2x4", 1),
}
SIZES = dict(_KINDS.values())
SIZES |= {"uint16": 2, "uint32": 4, "uint64": 8, "complex32": 4}


def storage_itemsize(kind: str) -> int:
    """Return the size of an element of a storage in bytes, by the name of its class."""
    return _KINDS.get(kind, ("", 1))[1]


class Readable(Protocol):
    """A file object that can seek and read."""

    def seek(self, offset: int, /) -> int:
        """Move to a position."""

    def read(self, nbytes: int, /) -> bytes | None:
        """Return up to `nbytes` bytes; fewer only at the end."""


def entries_of(file: Any) -> dict[str, zipfile.ZipInfo]:
    """Return the entries of an archive, by their names in its folder."""
    with zipfile.ZipFile(file) as archive:
        return {each.filename.partition("/")[2]: each for each in archive.infolist()}


def begin_of(file: Readable, entry: zipfile.ZipInfo) -> int:
    """Return the offset of an entry's bytes; raise ValueError if it has no header."""
    file.seek(entry.header_offset)
    header = file.read(_HEADER_BYTES) or b""
    if len(header) < _HEADER_BYTES or header[:4] != b"PK\x03\x04":
        raise ValueError(f"{entry.filename!r} has no header")
    lengths = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    return entry.header_offset + _HEADER_BYTES + sum(lengths)


def content_of(file: Readable, entry: zipfile.ZipInfo) -> bytes:
    """Return the bytes of an uncompressed entry, or raise ValueError.

    zipfile cannot read entries whose checksum torch left out: it reports a wrong checksum.
    """
    if entry.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{entry.filename!r} is compressed")
    file.seek(begin_of(file, entry))
    found = file.read(entry.file_size) or b""
    if len(found) < entry.file_size:
        raise ValueError(f"{entry.filename!r} ends after {len(found)} bytes")
    return found


class Stored(NamedTuple):
    """A tensor of a file."""

    key: str  # of its storage
    dtype: str
    itemsize: int
    begin: int  # in the storage, in elements
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    is_lazy: bool  # a conjugate or negative view

    def place(self, file: Readable, entries: dict[str, zipfile.ZipInfo]) -> int:
        """Return where the first element is in the file, or raise KeyError, ValueError."""
        entry = entries[f"data/{self.key}"]
        return begin_of(file, entry) + self.begin * self.itemsize


class Nothing:
    """Replaces an object of any other class, and does nothing."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass

    def _take(self, *args: object) -> None:
        pass

    append = extend = add = __setitem__ = _take


class Reader(pickle.Unpickler):
    """Finds the tensors of a pickle."""

    def persistent_load(self, pid: Any) -> Any:
        """Return the description of a storage."""
        _, kind, key, *_ = pid
        return str(key), kind

    def find_class(self, module: str, name: str) -> Any:
        """Return a harmless replacement for a function or class of the pickle."""
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if module == "torch._utils":
            if name == "_rebuild_tensor_v2":
                return tensor_of
            if name == "_rebuild_tensor_v3":
                return _tensor_of_dtype
            if name.startswith("_rebuild_parameter"):
                return _parameter
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and (
            name in _KINDS or name in SIZES or name.startswith("float8")
        ):
            return name
        return Nothing


def tensor_of(
    storage: Any, begin: int, shape: Any, strides: Any, *rest: Any, dtype: Any = None
) -> Stored:
    """Return the description of a tensor from the arguments of _rebuild_tensor_v2."""
    key, kind = storage
    name = dtype or kind
    name, size = _KINDS.get(name, (name, SIZES.get(name, 1)))
    if any(each < 0 for each in (begin, *shape)):
        raise ValueError(f"a tensor has the shape {tuple(shape)} and begins at {begin}")
    shape, strides = tuple(map(int, shape)), tuple(map(int, strides))
    name = name if isinstance(name, str) else "?"
    # After whether it requires gradients, and its hooks.
    return Stored(key, name, size, int(begin), shape, strides, any(rest[2:]))


def _tensor_of_dtype(storage: Any, *rest: Any) -> Stored:
    """Read a tensor whose storage has no dtype, which follows the hooks."""
    return tensor_of(storage, *rest[:5], *rest[6:], dtype=rest[5])


def _parameter(data: Any, *rest: Any) -> Any:
    return data


def unpickled(text: bytes, reader: Callable[..., Reader] = Reader) -> Any:
    """Return what a reader makes of a pickle; may raise any exception.

    Memo indices beyond the pickle's size, which allocate memory, and keys that take long to
    hash are refused.
    """
    require_linear(text, by_fields=False)
    # As torch does for files of Python 2.
    return reader(io.BytesIO(text), encoding="utf-8").load()
