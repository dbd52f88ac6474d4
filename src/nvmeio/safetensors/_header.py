"""Read and write the header of a safetensors file, as safetensors 0.8.0 does.

A header is JSON: a name, a dtype, a shape and two offsets for each tensor.  It is
untrusted, so every limit is checked before memory is allocated for what it claims.  The
functions here accept exactly the headers that the safetensors package accepts.  It reads
JSON with Rust's serde_json, which is stricter than Python's json about numbers, strings and
objects; hence the extra checks.  tests/hostile_headers.py compares the two.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring
from operator import index, itemgetter, le
from typing import Any, NamedTuple, NoReturn

import numpy as np

from nvmeio.safetensors._dtypes import BITS, RANKS
from nvmeio.safetensors._errors import SafetensorError

__all__ = [
    "ALIGNMENTS",
    "HEADER_BYTES_MAX",
    "LENGTH_BYTES",
    "Layout",
    "RefusedError",
    "SafetensorError",
    "Tensor",
    "build",
    "header_bytes",
    "parse",
]

# safetensors' MAX_HEADER_SIZE and N_LEN (tensor.rs, 0.8.0).
HEADER_BYTES_MAX = 100_000_000
LENGTH_BYTES = 8

# The alignments of a file's data: that of safetensors, and a page, which allows whole
# pages to be read directly.
ALIGNMENTS = (8, 4096)

_METADATA = "__metadata__"
_READING = "Error while deserializing header"
_FIELDS = ("dtype", "shape", "data_offsets")
_U64_MAX = (1 << 64) - 1
_I64_MIN = -(1 << 63)
_I32_MAX = (1 << 31) - 1

# serde_json refuses the 128th open bracket.
_NESTING_MAX = 127
_BRACKETS = b"[]{}"
_NOT_BRACKETS = bytes(set(range(256)).difference(_BRACKETS))
# By how much each byte changes the nesting depth.
_STEPS = np.zeros(256, np.int8)
_STEPS[list(b"[{")] = 1
_STEPS[list(b"]}")] = -1
_CHUNK_BYTES = 1 << 20

# Python's json would read -0 as an integer, and would accept integers of any length.
_ODD_INTEGER = re.compile(r"-0|[0-9]{19}")
_NUMBER = re.compile(r"-?([0-9]+)(?:\.([0-9]+))?(?:[eE]([+-]?)([0-9]+))?")


def _entry_pattern(gap: str) -> re.Pattern[str]:
    """Return a pattern for an entry of a header and the comma after it."""
    # 18 digits always fit 64 bits.
    number = "(0|[1-9][0-9]{0,17})"
    return re.compile(
        rf'"([^"\\\x00-\x1f]*)":{gap}\{{"dtype":{gap}"([0-9A-Z_]+)",{gap}'
        rf'"shape":{gap}\[([0-9,{gap}]*)\],{gap}'
        rf'"data_offsets":{gap}\[{number},{gap}{number}\]\}},{gap}'
    )


# The keys are the text after commas and colons: none as safetensors writes headers, a space
# as Python's json does.
_ENTRIES = {gap: _entry_pattern(gap) for gap in ("", " ")}
_ENTRY_CHARS = {
    "": len('"":{"dtype":"","shape":[],"data_offsets":[,]},'),
    " ": len('"": {"dtype": "", "shape": [], "data_offsets": [, ]}, '),
}
_SHORT_INTEGER = re.compile(r"0|[1-9][0-9]{0,17}")
_SHOWN_CHARS_MAX = 1000
_METADATA_FIRST = '{"__metadata__":'
_WHITESPACE = " \t\r\n"

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_SURROGATE_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")


class Tensor(NamedTuple):
    """One tensor of a file."""

    name: str
    dtype: str  # as the header has it, a key of `_dtypes.BITS`
    shape: tuple[int, ...]  # as the header has it
    # The range of its bytes, relative to `Layout.data_start`.
    begin: int
    end: int


@dataclass(frozen=True)
class Layout:
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


_Contents = tuple[dict[str, str] | None, list[Tensor]]


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
) -> Layout:
    """Return the layout that a header describes; raise SafetensorError if it is invalid.

    In a layout, every byte after the header belongs to exactly one tensor, and every tensor
    has the size that its dtype and shape need.
    """
    header = bytes(header)
    try:
        text = _text_of(header)
        metadata, tensors = _ordinary(text) or _unusual(header, text)
        data_bytes = _check_places(tensors)
        data_start = LENGTH_BYTES + len(header)
        if data_start + data_bytes != file_bytes:
            raise RefusedError("incomplete metadata, file not fully covered")
    except RefusedError as error:
        raise SafetensorError(f"{context}: {error}") from None
    by_name = {tensor[0]: tensor for tensor in tensors}
    return Layout(tuple(tensors), by_name, metadata, data_start, data_bytes)


def _malformed(detail: str) -> RefusedError:
    """Return the error for a header that is not valid JSON, or not of this structure."""
    return RefusedError(f"invalid JSON in header: {detail}")


def _integer(text: str) -> int | float:
    """Return an integer as serde_json does: -0, and those beyond 64 bits, as floats."""
    if text == "-0":
        return -0.0
    # 20 digits and a sign at most, because int() takes quadratic time.
    value = int(text) if len(text) < 22 else _U64_MAX + 1
    return value if _I64_MIN <= value <= _U64_MAX else _float(text)


def _float(text: str) -> float:
    """Return a stand-in for a number that is no integer; refuse it if serde_json does.

    Only unknown fields, which are ignored, may have such a number, so its value does not
    matter.  serde_json multiplies a truncated significand, so it refuses some numbers that
    float() rounds to the largest float.
    """
    if len(text) < 18 and text.isascii() and not {"e", "E"} & set(text):
        return 0.5
    found = _NUMBER.fullmatch(text)
    assert found is not None
    whole, fraction, sign, digits = found.groups(default="")
    significand, exponent = _significand(whole, fraction)
    if digits:
        stripped = digits.lstrip("0")
        # 11 digits or more are beyond 32 bits, so do not convert them.
        power = int(stripped or "0") if len(stripped) < 11 else _I32_MAX + 1
        if power > _I32_MAX:
            if significand and sign != "-":
                raise _malformed("number out of range")
            return 0.0
        exponent += -power if sign == "-" else power
    _check_range(float(significand), exponent)
    return 0.5


def _significand(whole: str, fraction: str) -> tuple[int, int]:
    """Return the leading digits that fit 64 bits, and the power of ten to multiply by."""
    # 19 digits always fit.
    significand = int(whole[:19])
    exponent = 0
    for place in range(19, len(whole)):
        if significand * 10 + int(whole[place]) > _U64_MAX:
            exponent = len(whole) - place
            break
        significand = significand * 10 + int(whole[place])
    if significand == 0:
        exponent -= len(fraction)
        fraction = fraction.lstrip("0")
        exponent += len(fraction)
    for digit in fraction:
        if significand * 10 + int(digit) > _U64_MAX:
            break
        significand = significand * 10 + int(digit)
        exponent -= 1
    return significand, exponent


def _check_range(value: float, exponent: int) -> None:
    """Refuse a number that becomes infinite in serde_json's arithmetic."""
    if value == 0 or exponent < 0:
        return
    if math.isinf(value * float(f"1e{exponent}")):
        raise _malformed("number out of range")


def _constant(name: str) -> NoReturn:
    """Refuse NaN and Infinity, which Python's json accepts."""
    raise _malformed(f"expected value, not {name}")


# An object becomes a tuple of its pairs, so that duplicate names can be detected.
_DECODER = json.JSONDecoder(
    object_pairs_hook=tuple, parse_float=_float, parse_constant=_constant
)
_CAREFUL_DECODER = json.JSONDecoder(
    object_pairs_hook=tuple,
    parse_float=_float,
    parse_int=_integer,
    parse_constant=_constant,
)


def _text_of(header: bytes) -> str:
    """Decode a header, and refuse what Python's json must not be given."""
    try:
        text = header.decode()
    except UnicodeDecodeError as error:
        if error.reason == "unexpected end of data":
            problem = f"incomplete utf-8 byte sequence from index {error.start}"
        else:
            length = error.end - error.start
            problem = f"invalid utf-8 sequence of {length} bytes from index {error.start}"
        raise RefusedError(f"invalid UTF-8 in header: {problem}") from None
    if _is_too_deep(header):
        raise _malformed("recursion limit exceeded")
    if _has_lone_surrogate(header):
        raise _malformed("lone surrogate in hex escape")
    return text


def _is_too_deep(header: bytes) -> bool:
    """Return whether brackets nest deeper than serde_json allows.

    Python's json would recurse up to sys.setrecursionlimit(), which may overflow the stack.
    """
    # Leave out the brackets of ordinary entries, which do not nest.  In most headers few
    # brackets remain.
    brackets = header.translate(None, _NOT_BRACKETS).replace(b"{[][]}", b"")
    if len(brackets) <= _NESTING_MAX:
        return False
    # Without escaped quotes, each quote begins or ends a string.
    plain = header.replace(rb"\\", b"").replace(rb"\"", b"")
    depth = quotes = 0
    for start in range(0, len(plain), _CHUNK_BYTES):
        count = min(_CHUNK_BYTES, len(plain) - start)
        codes = np.frombuffer(plain, np.uint8, count, start)
        inside = np.cumsum(codes == ord('"')) + quotes
        steps = _STEPS[codes]
        steps[inside % 2 == 1] = 0
        depths = np.cumsum(steps, dtype=np.int64) + depth
        if depths.max() > _NESTING_MAX:
            return True
        depth, quotes = int(depths[-1]), int(inside[-1])
    return False


def _has_lone_surrogate(header: bytes) -> bool:
    """Return whether a header has an unpaired surrogate, which Python's json accepts."""
    if not _SURROGATE.search(header):
        return False
    # An escaped backslash does not begin an escape.
    escapes = header.replace(rb"\\", b".")
    return _SURROGATE.search(_SURROGATE_PAIR.sub(b".", escapes)) is not None


def _ordinary(text: str) -> _Contents | None:
    """Parse a header that is formatted as safetensors or Python's json writes it.

    Return None for any other header, valid or not.  One regular expression takes a quarter
    of the time that json and the checks of its result take.
    """
    text = text.rstrip(_WHITESPACE)
    if text[:1] != "{" or text[-1:] != "}":
        return None
    gap = " " if text.startswith('": ', text.find('":')) else ""
    first = _METADATA_FIRST + gap
    start = len("{")
    metadata = None
    if text.startswith(first):
        try:
            value, start = _CAREFUL_DECODER.raw_decode(text, len(first))
            metadata = _metadata_of(value)
        except (json.JSONDecodeError, RefusedError):
            return None
        if not text.startswith("," + gap, start):
            return None
        start += len("," + gap)
    rest = text[start:-1] + "," + gap
    found = _ENTRIES[gap].findall(rest)
    # The entries must account for every character.
    chars = len(found) * _ENTRY_CHARS[gap] + sum(map(len, map("".join, found)))
    if chars != len(rest):
        return None
    extents: dict[str, tuple[int, ...]] = {}
    entries = {}
    new = tuple.__new__
    for name, dtype, shape_text, begin, end in found:
        if dtype not in BITS:
            return None
        shape = extents.get(shape_text)
        if shape is None:
            numbers = shape_text.split("," + gap) if shape_text else []
            if not all(map(_SHORT_INTEGER.fullmatch, numbers)):
                return None
            shape = extents[shape_text] = tuple(map(int, numbers))
        # The last entry of a name wins.
        entries[name] = new(Tensor, (name, dtype, shape, int(begin), int(end)))
    if _METADATA in entries:
        return None
    return metadata, list(entries.values())


def _unusual(header: bytes, text: str) -> _Contents:
    """Parse any header, or refuse it."""
    decoder = _CAREFUL_DECODER if _ODD_INTEGER.search(text) else _DECODER
    try:
        pairs = decoder.decode(text)
    except json.JSONDecodeError as error:
        if error.pos >= len(text):
            problem = f"EOF while parsing a value at {_end_of(header)}"
        else:
            what = error.msg.removesuffix(" at")
            problem = f"{what} at line {error.lineno} column {error.colno}"
        raise _malformed(problem) from None
    if type(pairs) is not tuple:
        raise _malformed(f"invalid {_value(pairs)}, expected struct HashMetadata")
    metadata = None
    entries: dict[str, Tensor] = {}
    names = [name for name, _ in pairs]
    if names.count(_METADATA) > 1:
        raise _malformed("duplicate field `__metadata__`")
    for name, value in pairs:
        if name == _METADATA:
            metadata = _metadata_of(value)
            continue
        try:
            dtype, shape, (begin, end) = _entry_of(value)
            for number in (*shape, begin, end):
                if type(number) is not int or number < 0:
                    raise RefusedError(f"invalid {_value(number)}, expected usize")
        except RefusedError as error:
            raise _malformed(f"{error} at {_end_of(header)}") from None
        entries[name] = Tensor(name, dtype, tuple(shape), begin, end)
    return metadata, list(entries.values())


def _metadata_of(value: Any) -> dict[str, str] | None:
    """Return the metadata as a dict, or refuse them."""
    if value is None:
        return None
    if type(value) is not tuple:
        raise _malformed(f"invalid {_value(value)}, expected a map")
    for _, text in value:
        if type(text) is not str:
            raise _malformed(f"invalid {_value(text)}, expected a string")
    return dict(value)


def _entry_of(value: Any) -> tuple[str, list[Any], list[Any]]:
    """Return the fields of an entry, or refuse it as serde does."""
    if type(value) is list:
        # serde also accepts a struct as the sequence of its fields.
        if len(value) < len(_FIELDS):
            wanted = "struct TensorInfo with 3 elements"
            raise RefusedError(f"invalid length {len(value)}, expected {wanted}")
        fields = dict(zip(_FIELDS, value, strict=False))
        extra = len(value) > len(_FIELDS)
    elif type(value) is tuple:
        fields, extra = {}, False
        for key, field in value:
            if key in _FIELDS:
                if key in fields:
                    raise RefusedError(f"duplicate field `{key}`")
                fields[key] = field
        for key in _FIELDS:
            if key not in fields:
                raise RefusedError(f"missing field `{key}`")
    else:
        raise RefusedError(f"invalid {_value(value)}, expected struct TensorInfo")
    dtype = _dtype_of(fields["dtype"])
    shape, offsets = fields["shape"], fields["data_offsets"]
    if type(shape) is not list:
        raise RefusedError(f"invalid {_value(shape)}, expected a sequence")
    if type(offsets) is not list:
        raise RefusedError(f"invalid {_value(offsets)}, expected a tuple of size 2")
    if len(offsets) < 2:
        raise RefusedError(f"invalid length {len(offsets)}, expected a tuple of size 2")
    if len(offsets) > 2:
        raise RefusedError(
            f"invalid length {len(offsets)}, expected 2 elements in sequence"
        )
    if extra:
        raise RefusedError(f"invalid length {len(value)}, expected 3 elements in sequence")
    return dtype, shape, offsets


def _dtype_of(value: Any) -> str:
    """Return a dtype; serde also accepts an enum as an object: {"F32": null}."""
    if type(value) is tuple:
        if len(value) != 1:
            raise RefusedError("invalid value: map, expected map with a single key")
        ((value, content),) = value
    elif type(value) is str:
        content = None
    else:
        raise RefusedError(f"invalid {_value(value)}, expected string or map")
    if value not in BITS:
        known = ", ".join(f"`{dtype}`" for dtype in BITS)
        raise RefusedError(
            f"unknown variant `{_shortened(value)}`, expected one of {known}"
        )
    if content is not None:
        raise RefusedError(f"invalid {_value(content)}, expected unit")
    return str(value)


def _kind(value: Any) -> str:
    """Return serde's word for the type of a JSON value."""
    kinds = {
        dict: "map",
        tuple: "map",
        list: "sequence",
        str: "string",
        bool: "boolean",
        int: "integer",
        float: "floating point",
        type(None): "null",
    }
    return kinds[type(value)]


def _value(value: Any) -> str:
    """Describe a value of the wrong type or out of range, in serde's words."""
    kind = _kind(value)
    if type(value) is str:
        return f'type: {kind} "{_shortened(value)}"'
    if type(value) is bool:
        return f"type: {kind} `{str(value).lower()}`"
    if type(value) is int:
        return f"{'value' if value < 0 else 'type'}: {kind} `{value}`"
    return f"type: {kind}"


def _shortened(text: str) -> str:
    """Shorten a text for a message, because a hostile one may have 100 MB."""
    return text if len(text) <= _SHOWN_CHARS_MAX else text[:_SHOWN_CHARS_MAX] + "..."


def _end_of(header: bytes) -> str:
    """Return the position that serde reports for an error found at the end."""
    text = header.rstrip(b" \t\r\n")
    line = text.count(b"\n") + 1
    column = len(text) - text.rfind(b"\n") - 1
    return f"line {line} column {column}"


def _check_places(tensors: list[Tensor]) -> int:
    """Sort tensors by offset, check offsets and sizes, and return the size of the data."""
    begins, ends = [tensor[3] for tensor in tensors], [tensor[4] for tensor in tensors]
    if begins[1:] != ends[:-1] or not all(map(le, begins, ends)):
        tensors.sort(key=itemgetter(3, 4))
    start = 0
    checked: dict[tuple[str, tuple[int, ...]], int] = {}
    for name, dtype, shape, begin, end in tensors:
        if begin != start or end < begin:
            raise RefusedError(f"invalid offset for tensor `{_shortened(name)}`")
        start = end
        # Cached, because many tensors of a model have the same shape.
        if checked.get((dtype, shape)) != end - begin:
            checked[dtype, shape] = check_size(dtype, shape, end - begin)
    return start


def check_size(dtype: str, shape: Sequence[int], size: int | None = None) -> int:
    """Return the size of a tensor in bytes; refuse one beyond 64 bits, or not of `size`."""
    count = 1
    for extent in shape:
        count *= extent
        if count > _U64_MAX:
            break
    bits = count * BITS[dtype]
    if bits > _U64_MAX:
        raise RefusedError("overflow computing buffer size from shape and/or element type")
    if bits % 8:
        raise RefusedError(
            "The slice is slicing for subbytes dtypes, and the slice does not end up at a "
            "byte boundary, this is invalid."
        )
    if size is not None and bits != size * 8:
        raise RefusedError("invalid shape, data type, or offset for tensor")
    return bits // 8


def build(
    tensors: Iterable[tuple[str, str, Sequence[int]]],
    metadata: Mapping[str, str] | None = None,
    *,
    align: int = 8,
) -> tuple[bytes, Layout]:
    """Return the header of a file, with its length, and the layout of its tensors.

    `tensors` are tuples of name, dtype and shape.  With `align` 8 the header has the bytes
    that safetensors 0.8.0 writes, except that safetensors writes several metadata keys in
    random order.  With 4096 the data begin at a multiple of 4096, and the tensors whose
    size is a multiple of 4096 come first, so that each begins at a page.  Every reader
    accepts both.
    """
    if not isinstance(align, int) or align not in ALIGNMENTS:
        raise ValueError(f"align is {align!r}; it must be 8 or 4096")
    try:
        sized = _sized(tensors)
        if align == 4096:
            sized.sort(key=lambda tensor: (tensor[3] % 4096 > 0, *_order(tensor)))
        else:
            sized.sort(key=_order)
        return _written(sized, metadata, align)
    except RefusedError as error:
        raise SafetensorError(f"Error while serializing: {error}") from None


class _Sized(NamedTuple):
    """A tensor to write: its size, and the text of its header entry before the offsets."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    text: str


def _order(tensor: _Sized) -> tuple[int, str]:
    """Return the key by which safetensors' writer sorts tensors."""
    return -RANKS[tensor[1]], tensor[0]


def _sized(tensors: Iterable[tuple[str, str, Sequence[int]]]) -> list[_Sized]:
    """Return the tensors to write, checked."""
    # Cached, because many tensors of a model have the same shape.
    known: dict[tuple[str, tuple[int, ...]], tuple[int, str]] = {}
    sized = []
    for name, dtype, shape in tensors:
        if type(name) is not str or type(dtype) is not str or name == _METADATA:
            _check_strings(name, dtype)
        extents = tuple(map(index, shape))
        if (dtype, extents) not in known:
            size = _size_of(name, dtype, extents)
            numbers = ",".join(map(str, extents))
            known[dtype, extents] = (
                size,
                f':{{"dtype":"{dtype}","shape":[{numbers}],"data_offsets":[',
            )
        size, text = known[dtype, extents]
        sized.append(_Sized(name, dtype, extents, size, text))
    return sized


def _check_strings(name: Any, dtype: Any) -> None:
    """Refuse names and dtypes that are not strings, and the reserved name."""
    for argument, value in (("tensor_dict", name), ("dtype", dtype)):
        if not isinstance(value, str):
            raise _not_a_string(argument, value)
    if name == _METADATA:
        raise RefusedError(
            f"a tensor is named {_METADATA}, which the format reserves for metadata; "
            "rename it"
        )


def _size_of(name: str, dtype: str, extents: tuple[int, ...]) -> int:
    """Return the size of a tensor to write, in bytes."""
    if dtype not in BITS:
        known = ", ".join(BITS)
        raise SafetensorError(
            f'Unknown dtype "{dtype}" of tensor `{name}`. Supported dtypes: {known}'
        )
    if extents and min(extents) < 0:
        raise OverflowError("can't convert negative int to unsigned")
    if extents and max(extents) > _U64_MAX:
        raise OverflowError("int too big to convert")
    return check_size(dtype, extents, None)


def _not_a_string(argument: str, value: Any) -> TypeError:
    """Return the error for a value that is not a string, in safetensors' words."""
    kind = "'None'" if value is None else f"'{type(value).__name__}' object"
    return TypeError(f"argument '{argument}': {kind} is not an instance of 'str'")


def _written(
    sized: list[_Sized], metadata: Mapping[str, str] | None, align: int
) -> tuple[bytes, Layout]:
    """Return the header of sorted tensors, and its layout."""
    parts = [] if metadata is None else [f'"{_METADATA}":{_metadata_text(metadata)}']
    placed = []
    begin = 0
    quoted = encode_basestring
    for name, dtype, shape, size, text in sized:
        end = begin + size
        parts.append(f"{quoted(name)}{text}{begin},{end}]}}")
        placed.append(Tensor(name, dtype, shape, begin, end))
        begin = end
    by_name = {tensor.name: tensor for tensor in placed}
    if len(by_name) < len(placed):
        twice = next(tensor.name for tensor in placed if by_name[tensor.name] != tensor)
        raise ValueError(f"two tensors have the name {twice!r}")
    if begin > _U64_MAX:
        raise RefusedError("overflow computing buffer size from shape and/or element type")
    try:
        content = ("{" + ",".join(parts) + "}").encode()
    except UnicodeEncodeError:
        # Raise an error about the caller's name or text, not about the whole header.
        for known in (*by_name, *(metadata or {}).keys(), *(metadata or {}).values()):
            known.encode()
        raise
    start = -(-(LENGTH_BYTES + len(content)) // align) * align
    length = start - LENGTH_BYTES
    if length > HEADER_BYTES_MAX:
        raise RefusedError("header too large")
    header = length.to_bytes(LENGTH_BYTES, "little") + content.ljust(length)
    kept = None if metadata is None else dict(metadata)
    return header, Layout(tuple(placed), by_name, kept, start, begin)


def _metadata_text(metadata: Mapping[str, str]) -> str:
    """Return the metadata as JSON."""
    if not isinstance(metadata, Mapping):
        kind = type(metadata).__name__
        raise TypeError(
            f"argument 'metadata': '{kind}' object is not an instance of 'dict'"
        )
    for text in (*metadata.keys(), *metadata.values()):
        if not isinstance(text, str):
            raise _not_a_string("metadata", text)
    quoted = encode_basestring
    items = (f"{quoted(key)}:{quoted(value)}" for key, value in metadata.items())
    return "{" + ",".join(items) + "}"
