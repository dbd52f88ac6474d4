"""Read and write the header of a safetensors file.

A header is JSON: a name, a dtype, a shape and two offsets for each tensor.  It is
untrusted, so every limit is checked before memory is allocated for what it claims.  The
functions accept what the README of safetensors describes.  The package itself accepts a
little more, such as a name that comes twice.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import index, itemgetter
from typing import Any, NamedTuple

from nvmeio._arguments.json_texts import refuse_constant, shortened, unique
from nvmeio._tensors.dtypes import BITS, RANKS
from nvmeio._tensors.errors import SafetensorError

__all__ = [
    "ALIGNMENTS",
    "HEADER_BYTES_MAX",
    "LENGTH_BYTES",
    "FileLayout",
    "RefusedError",
    "SafetensorError",
    "Tensor",
    "build",
    "check_size",
    "header_bytes",
    "parse",
]

HEADER_BYTES_MAX = 100_000_000
LENGTH_BYTES = 8

# The alignments of a file's data: that of safetensors, and a page, which allows whole
# pages to be read directly.
ALIGNMENTS = (8, 4096)

_DTYPES = "one of " + ", ".join(BITS)
_METADATA = "__metadata__"
_READING = "Error while deserializing header"
_U64_MAX = (1 << 64) - 1
_DIGITS_MAX = len(str(_U64_MAX))
# A header needs 3: tensors, the fields of one, its shape.
_NESTING_MAX = 32
_TOO_DEEP = f"invalid JSON in header: nested deeper than {_NESTING_MAX}"
_NOT_BRACKETS = bytes(set(range(256)).difference(b"[]{}"))
# So many levels take 1.3 MB of a stack in Python 3.11.
_BRACKETS_SAFE = 10_000


class Tensor(NamedTuple):
    """One tensor of a file."""

    name: str
    dtype: str  # as the header has it, a key of `_dtypes.BITS`
    shape: tuple[int, ...]  # as the header has it
    # The range of its bytes, relative to `FileLayout.data_start`.
    begin: int
    end: int


@dataclass(frozen=True)
class FileLayout:
    """The contents of a header."""

    # In the order of the file.  Empty tensors at the same offset keep the order of the
    # header; safetensors returns them in random order.
    tensors: tuple[Tensor, ...]
    by_name: dict[str, Tensor]  # in the same order
    metadata: dict[str, str] | None  # None if the header has none
    data_start: int  # the offset of the data in the file: 8 + the header's length
    data_bytes: int  # the size of the data, which extend to the end of the file

    @property
    def names(self) -> list[str]:
        """The names of the tensors, sorted."""
        return sorted(self.by_name)


class RefusedError(Exception):
    """A header is invalid; parse() and build() turn this into a SafetensorError."""


def header_bytes(first: bytes, file_bytes: int, *, context: str = _READING) -> int:
    """Return the length of the header of a file with `file_bytes` that begins with `first`.

    The length excludes the 8 bytes that store it.  It is checked against the file's size.
    """
    if min(len(first), file_bytes) < LENGTH_BYTES:
        raise SafetensorError(f"{context}: header too small")
    length = int.from_bytes(first[:LENGTH_BYTES], "little")
    if length > HEADER_BYTES_MAX:
        raise SafetensorError(f"{context}: header too large")
    if length + LENGTH_BYTES > file_bytes:
        raise SafetensorError(f"{context}: invalid header length")
    return length


def parse(
    header: bytes | bytearray | memoryview, file_bytes: int, *, context: str = _READING
) -> FileLayout:
    """Return the layout that a header describes; raise SafetensorError if it is invalid.

    In a layout, every byte after the header belongs to exactly one tensor, and every tensor
    has the size that its dtype and shape need.
    """
    header = bytes(header)
    try:
        entries = _decoded(header)
        metadata = _checked_metadata(entries.pop(_METADATA, None))
        # JSON can escape half of a surrogate pair, which no text may have.
        "".join((*entries, *(metadata or {}), *(metadata or {}).values())).encode()
        tensors = [_tensor(name, entry) for name, entry in entries.items()]
        tensors.sort(key=itemgetter(3, 4))
        data_bytes = _checked_bytes(tensors)
        data_start = LENGTH_BYTES + len(header)
        if data_start + data_bytes != file_bytes:
            raise RefusedError("incomplete metadata, file not fully covered")
    except UnicodeError as error:
        raise SafetensorError(f"{context}: invalid UTF-8 in header: {error}") from None
    except RefusedError as error:
        raise SafetensorError(f"{context}: {error}") from None
    by_name = {tensor[0]: tensor for tensor in tensors}
    return FileLayout(tuple(tensors), by_name, metadata, data_start, data_bytes)


def _decoded(header: bytes) -> dict[str, Any]:
    """Decode a header's JSON."""
    text = header.decode()
    if text[:1] != "{":
        raise RefusedError("invalid start character in header, must start with `{`")
    brackets = header.count(b"[") + header.count(b"{")
    if brackets > _BRACKETS_SAFE and _is_too_deep(header):
        raise RefusedError(_TOO_DEEP)
    try:
        found: dict[str, Any] = _DECODER.decode(text)
    except ValueError as error:
        words = _TOO_DEEP if _is_too_deep(header) else f"invalid JSON in header: {error}"
        raise RefusedError(words) from None
    except RecursionError:
        # Too few brackets to overflow the stack, but more levels than Python allows.
        raise RefusedError(_TOO_DEEP) from None
    # More than those of each tensor, the metadata and the whole.
    if brackets > 3 * len(found) + 2 and _is_too_deep(header):
        raise RefusedError(_TOO_DEEP)
    return found


def _is_too_deep(header: bytes) -> bool:
    """Return whether brackets nest deeper than allowed.

    Python's json has its own limits, which depend on its version and on the program
    (sys.setrecursionlimit), and may overflow the stack.
    """
    # Without escaped quotes, each quote begins or ends a string.
    plain = header.replace(rb"\\", b"").replace(rb"\"", b"")
    brackets = b"".join(plain.split(b'"')[::2]).translate(None, _NOT_BRACKETS)
    for _ in range(_NESTING_MAX):
        brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")
    return bool(brackets)


def _integer(text: str) -> int:
    """Return an integer; refuse a long one, because int() takes quadratic time."""
    if text[0] == "-" or len(text) > _DIGITS_MAX:
        shown = shortened(text)
        raise ValueError(f"{shown} is not from 0 to {_U64_MAX}")
    return int(text)


_DECODER = json.JSONDecoder(
    object_pairs_hook=unique, parse_int=_integer, parse_constant=refuse_constant
)


def _checked_metadata(value: Any) -> dict[str, str] | None:
    """Return the metadata, or refuse them."""
    if value is None:
        return None
    if type(value) is not dict or not all(type(each) is str for each in value.values()):
        raise RefusedError(f"invalid JSON in header: {_METADATA} must map names to strings")
    return value


def _tensor(name: str, entry: Any) -> Tensor:
    """Return the tensor of an entry, or refuse it."""
    try:
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        begin, end = offsets
        # In Python, true is an integer too.
        numbers = {type(begin), type(end), *map(type, shape)} == {int}
        if dtype in BITS and type(shape) is list and numbers:
            return Tensor(name, dtype, tuple(shape), begin, end)
    except (KeyError, TypeError, ValueError):
        pass
    raise RefusedError(
        f"invalid JSON in header: tensor {shortened(name)} must have a known dtype, "
        "a shape and two data_offsets"
    )


def _checked_bytes(tensors: list[Tensor]) -> int:
    """Check the offsets and sizes of sorted tensors, and return the size of the data."""
    start = 0
    # Cached, because many tensors of a model have the same shape.
    sizes: dict[tuple[str, tuple[int, ...]], int] = {}
    for name, dtype, shape, begin, end in tensors:
        if begin != start or end < begin:
            raise RefusedError(f"invalid offset for tensor {shortened(name)}")
        start = end
        size = sizes.get((dtype, shape))
        if size is None:
            size = sizes[dtype, shape] = check_size(dtype, shape)
        if size != end - begin:
            raise RefusedError("invalid shape, data type, or offset for tensor")
    return start


def check_size(dtype: str, shape: Sequence[int]) -> int:
    """Return the size of a tensor in bytes; refuse one that does not fit 64 bits."""
    overflow = "overflow computing buffer size from shape and/or element type"
    count = 1
    for extent in shape:
        if extent < 0:
            raise RefusedError(f"the extent {extent} of a shape is negative")
        count *= extent
        # At once, because the product of a hostile shape may take forever.
        if max(extent, count) > _U64_MAX:
            raise RefusedError(overflow)
    bits = count * BITS[dtype]
    if bits > _U64_MAX:
        raise RefusedError(overflow)
    if bits % 8:
        raise RefusedError(f"{count} elements of {dtype} do not end at a byte boundary")
    return bits // 8


def build(
    tensors: Iterable[tuple[str, str, Sequence[int]]],
    metadata: Mapping[str, str] | None = None,
    *,
    align: int = 8,
) -> tuple[bytes, FileLayout]:
    """Return the header of a file, with its length, and the layout of its tensors.

    `tensors` are tuples of name, dtype and shape.  With `align` 8 the header has the bytes
    that safetensors 0.8.0 writes, except that safetensors writes several metadata keys in
    random order.  With 4096 the data begin at a multiple of 4096, and the tensors whose
    size is a multiple of 4096 come first, so that each begins at a page; those of a
    multiple of 64 follow.  Every reader accepts both.
    """
    if not isinstance(align, int) or align not in ALIGNMENTS:
        raise ValueError(f"align is {align!r}; it must be 8 or 4096")
    try:
        placed = _placed(tensors, align)
        by_name = {tensor.name: tensor for tensor in placed}
        if len(by_name) < len(placed):
            # By identity, because empty tensors of one name may be equal.
            twice = next(each.name for each in placed if by_name[each.name] is not each)
            raise ValueError(f"two tensors have the name {twice!r}")
        if _METADATA in by_name:
            raise RefusedError(
                f"a tensor is named {_METADATA}, which the format reserves for metadata; "
                "rename it"
            )
        kept = None if metadata is None else _strings(metadata)
        entries: dict[str, Any] = {} if kept is None else {_METADATA: kept}
        for name, dtype, shape, begin, end in placed:
            entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
        content = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
        start = -(-(LENGTH_BYTES + len(content)) // align) * align
        length = start - LENGTH_BYTES
        if length > HEADER_BYTES_MAX:
            words = f"{length} bytes; {HEADER_BYTES_MAX} is the limit of the format"
            raise RefusedError(f"header too large ({words})")
    except RefusedError as error:
        raise SafetensorError(f"Error while serializing: {error}") from None
    header = length.to_bytes(LENGTH_BYTES, "little") + content.ljust(length)
    data_bytes = placed[-1].end if placed else 0
    return header, FileLayout(tuple(placed), by_name, kept, start, data_bytes)


def _placed(tensors: Iterable[tuple[str, str, Sequence[int]]], align: int) -> list[Tensor]:
    """Return the tensors to write in the order of the file, checked."""
    sized = []
    for name, dtype, shape in tensors:
        if not isinstance(name, str):
            raise TypeError(f"{name!r} is the name of a tensor; it must be a str")
        if dtype not in BITS:
            raise RefusedError(f"tensor {name!r} has the dtype {dtype!r}, not {_DTYPES}")
        extents = tuple(map(index, shape))
        size = check_size(dtype, extents)
        after = align == 4096 and (size % 4096 > 0) + (size % 64 > 0)
        sized.append((after, -RANKS[dtype], name, dtype, extents, size))
    # As safetensors sorts them: the last dtype first, then by name.
    sized.sort(key=itemgetter(0, 1, 2))
    placed, begin = [], 0
    for _, _, name, dtype, extents, size in sized:
        placed.append(Tensor(name, dtype, extents, begin, begin + size))
        begin += size
    return placed


def _strings(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata, checked."""
    if not isinstance(metadata, Mapping):
        raise TypeError(f"metadata is of type {type(metadata).__name__}; it must be a dict")
    for each in (*metadata.keys(), *metadata.values()):
        if not isinstance(each, str):
            raise TypeError(f"metadata has {each!r}; its keys and values must be strings")
    return dict(metadata)
