"""Find the tensors of files that torch.save has written, without torch.

An unpickler that knows tensors reads the pickle, and replaces every other object by one
that does nothing, so that no code of the file runs.
"""

import collections
import io
import math
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from nvmeio._native.pickles import require_linear

__all__ = [
    "SIZES",
    "Nothing",
    "Readable",
    "Reader",
    "SavedTensor",
    "Storage",
    "begin_of",
    "by_name_in_folder",
    "content_of",
    "cut_entries",
    "entries_of",
    "shape_of",
    "storage_itemsize",
    "tensor_of",
    "unpickled",
    "wrapped",
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
# Of these the shape counts parts of a byte: so many are in one.
_PACKED = {"quint4x2": 2, "quint2x4": 4}
SIZES = dict(_KINDS.values())
SIZES |= {"uint16": 2, "uint32": 4, "uint64": 8, "complex32": 4, "bits16": 2}
# How the names of other dtypes begin, whose elements have one byte.
_BYTE_DTYPES = re.compile(r"bits\d|float[48]_|u?int\d")


# torch keeps sizes in 64 bits with a sign.  Its sums over some dimensions, and numpy's
# arrays, have at most 64 dimensions.
_COUNT_END = 1 << 63
_DIMS_MAX = 64


def storage_itemsize(kind: Any) -> int:
    """Return the size of an element of a storage in bytes, by the name of its class."""
    return _KINDS.get(kind, ("", 1))[1]


def shape_of(shape: Any, itemsize: int) -> tuple[int, ...]:
    """Return the shape of a tensor; raise ValueError if torch can have no such tensor."""
    if len(shape) > _DIMS_MAX:
        raise ValueError(f"a tensor has {len(shape)} dimensions; the limit is {_DIMS_MAX}")
    extents = tuple(map(int, shape))
    # Before they are multiplied, because products of huge numbers take long.
    if any(not 0 <= extent < _COUNT_END for extent in extents):
        raise ValueError(f"a tensor has the shape {extents}")
    if math.prod(extents) * itemsize >= _COUNT_END:
        raise ValueError(f"a tensor of shape {extents} has 2**63 bytes or more")
    return extents


class Readable(Protocol):
    """A file object that can seek and read."""

    def seek(self, offset: int, /) -> int:
        """Move to a position."""

    def read(self, nbytes: int, /) -> bytes | None:
        """Return up to `nbytes` bytes; fewer only at the end."""


def entries_of(file: Any) -> dict[str, zipfile.ZipInfo]:
    """Return the entries of an archive, by their names in its folder."""
    with zipfile.ZipFile(file) as archive:
        return by_name_in_folder(archive)


def by_name_in_folder(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """Return the entries of an open archive, by their names in its folder."""
    return {each.filename.partition("/")[2]: each for each in archive.infolist()}


def cut_entries(file: Readable, archive: zipfile.ZipFile) -> Iterator[str]:
    """Yield what is wrong with an archive, and each entry, that lacks bytes."""
    first = min((each.header_offset for each in archive.infolist()), default=0)
    if first < 0:
        yield f"it lacks {-first} bytes"
        # zipfile has moved all offsets; those before the missing bytes were right.
        for each in archive.infolist():
            each.header_offset -= first
    entries = sorted(archive.infolist(), key=lambda each: each.header_offset)
    ends = [*(each.header_offset for each in entries), archive.start_dir][1:]
    for entry, end in zip(entries, ends, strict=True):
        try:
            begin = begin_of(file, entry)
        except ValueError as error:
            yield str(error)
            continue
        if begin + entry.compress_size > end:
            yield (
                f"{entry.filename!r} was truncated: {max(end - begin, 0)} of its "
                f"{entry.compress_size} bytes are there"
            )


def begin_of(file: Readable, entry: zipfile.ZipInfo) -> int:
    """Return the offset of an entry's bytes; raise ValueError if it has no header."""
    # So zipfile makes the offsets in an archive that lacks bytes.
    header = b""
    if entry.header_offset >= 0:
        file.seek(entry.header_offset)
        header = file.read(_HEADER_BYTES) or b""
    if len(header) < _HEADER_BYTES or header[:4] != b"PK\x03\x04":
        raise ValueError(f"{entry.filename!r} has no header where the directory says")
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


class Storage(NamedTuple):
    """The bytes of one or several tensors."""

    key: str
    kind: Any  # the name of its class, if that is known
    elements: int | None

    @property
    def nbytes(self) -> int:
        """The size in bytes, 0 if the pickle does not say it."""
        return (self.elements or 0) * storage_itemsize(self.kind)


class SavedTensor(NamedTuple):
    """A tensor of a file."""

    key: str  # of its storage
    dtype: str
    itemsize: int
    begin: int  # in the storage, in elements
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    is_lazy: bool  # a conjugate or negative view

    @property
    def nbytes(self) -> int:
        """The size in bytes, as if it were not part of a storage."""
        return -(-math.prod(self.shape) * self.itemsize // _PACKED.get(self.dtype, 1))

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


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of a pickle's own, which could change its defaults."""
    return lambda *said: function(*said)


class Reader(pickle.Unpickler):
    """Finds the tensors of a pickle."""

    def persistent_load(self, pid: Any) -> Any:
        """Return the description of a storage."""
        _, kind, key, _, *counts = pid
        count = counts[0] if counts else None
        if count is not None and not (type(count) is int and 0 <= count < _COUNT_END):
            raise ValueError(f"a storage has {count!r:.100} elements")
        return Storage(str(key), kind, count)

    def find_class(self, module: str, name: str) -> Any:
        """Return a harmless replacement for a function or class of the pickle."""
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if module == "torch._utils":
            if name == "_rebuild_tensor_v2":
                return wrapped(tensor_of)
            if name == "_rebuild_tensor_v3":
                return wrapped(_tensor_of_dtype)
            if name.startswith("_rebuild_parameter"):
                return wrapped(_parameter)
        if (module, name) == ("torch", "Size"):
            # Not tuple: a few bytes could make large ones of the same text again and again.
            return wrapped(_parameter)
        if module == "torch" and (
            name in _KINDS or name in SIZES or _BYTE_DTYPES.match(name)
        ):
            return name
        return Nothing


def tensor_of(
    storage: Any, begin: int, shape: Any, strides: Any, *rest: Any, dtype: Any = None
) -> SavedTensor:
    """Return the description of a tensor from the arguments of _rebuild_tensor_v2."""
    key, kind, count = storage
    name = dtype or kind
    name, size = _KINDS.get(name, (name, SIZES.get(name, 1)))
    shape, begin = shape_of(shape, size), int(begin)
    steps = tuple(map(int, strides))
    if len(steps) != len(shape) or any(each < 0 for each in (begin, *steps)):
        raise ValueError(
            f"a tensor of shape {shape} begins at {begin!r:.100}, with strides "
            f"{steps!r:.200}"
        )
    name = name if isinstance(name, str) else "?"
    if count is not None and 0 not in shape and name not in _PACKED:
        last = begin + sum((n - 1) * step for n, step in zip(shape, steps, strict=True))
        if (last + 1) * size > storage.nbytes:
            raise ValueError(
                f"a tensor of shape {shape} has bytes up to {(last + 1) * size} of "
                f"its storage {key!r:.100}, which has {storage.nbytes}"
            )
    # After whether it requires gradients, and its hooks.
    return SavedTensor(key, name, size, begin, shape, steps, any(rest[2:]))


def _tensor_of_dtype(storage: Any, *rest: Any) -> SavedTensor:
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
