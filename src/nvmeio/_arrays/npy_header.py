"""Headers of .npy files: parsed by numpy, written with padding that aligns the data.

numpy.lib.format describes the format.  Its versions differ in the width of the header's
length and in its encoding.
"""

import ast
import contextlib
import functools
import io
import math
import os
import re
import sys
import tokenize
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.lib import format as npy

from nvmeio._arguments.callers import level_outside
from nvmeio._arguments.checks import extents_of
from nvmeio._files.kinds import HEAD_BYTES, what_begins
from nvmeio._files.locks import header_for_reading
from nvmeio._files.paths import naming
from nvmeio._native.file import File

__all__ = [
    "MALFORMED",
    "Layout",
    "check_element",
    "check_extents",
    "check_size",
    "has_magic",
    "header_in",
    "header_of",
    "layout_in",
    "read_layout",
    "replace_shape",
]

# The first is the largest alignment of any drive, for zero-copy transfers; the second is
# the alignment that numpy promises.
_DATA_ALIGN = 4096
_NUMPY_ALIGN = 64

# The longest header that numpy.load() accepts by default.
_HEADER_BYTES_MAX = 10_000

# For each version of the format: the width of the header's length in bytes, the header's
# encoding, and the most bytes that this uses for a character.
_VERSIONS = {(1, 0): (2, "latin1", 1), (2, 0): (4, "latin1", 1), (3, 0): (4, "utf-8", 4)}

# How much of a file is read first, and the most bytes from its beginning to the end of its
# header.
_HEAD_BYTES = 4096
_HEAD_BYTES_MAX = 12 + 4 * _HEADER_BYTES_MAX

# In CPython up to 3.11 all threads share the counter of ast's recursion depth
# (python/cpython#106905).  So ast.literal_eval() may raise SystemError if two threads call
# it at once, and then works the next time.
_PARSES_MAX = 100

# Errors that numpy and ast.literal_eval() raise for malformed headers.
MALFORMED = (
    ValueError,
    TypeError,
    IndexError,
    SyntaxError,
    MemoryError,
    RecursionError,
    tokenize.TokenError,
)


# A string, such as the name of a field; or the end of an integer like 3L.
_LONG = re.compile(r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|(?<=[0-9])L\b""", re.DOTALL)


# The longest header of version 1.0.
_SHORT_BYTES_MAX = 0xFFFF


class _TooLongError(ValueError):
    """A header is longer than numpy reads by default."""


class Layout(NamedTuple):
    """The layout of an array in a file."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int  # where the array begins, in bytes
    # Whether the array is in Fortran order: neighbours along the first axis are adjacent.
    fortran: bool = False

    @property
    def nbytes(self) -> int:
        """The size of the array in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def has_magic(file: File, offset: int = 0) -> bool:
    """Return whether the bytes at an offset begin like a .npy file."""
    magic: bytes = npy.MAGIC_PREFIX
    return os.pread(file.fileno(), len(magic), offset) == magic


def read_layout(file: File, *, shared: bool) -> Layout:
    """Read the header of a .npy file, while no append changes it.

    With `shared`, other threads may be reading the header of the same open file.
    """
    with naming(file.path), header_for_reading(file, shared=shared) as descriptor:
        head, size = io.BytesIO(_read_head(descriptor)), file.size
    try:
        header = _text_in(head)
        layout = _layout_of(header, head.tell())
    except _TooLongError as error:
        words = "numpy.load(max_header_size=...) reads longer ones, if you trust the file"
        raise ValueError(f"{file.path!r} {error}; {words}") from None
    except MALFORMED as error:
        first = head.getvalue()[:HEAD_BYTES]
        known = None if first.startswith(npy.MAGIC_PREFIX) else what_begins(first, size)
        raise ValueError(f"{file.path!r} is not a .npy file: {known or error}") from error
    if layout.dtype.hasobject:
        raise ValueError(
            f"{file.path!r} has Python objects (dtype {layout.dtype}); unpickling them "
            "could run any code, so it is left to numpy.load(allow_pickle=True)"
        )
    check_size(file.path, size, layout)
    if _without_long(header) != header:
        words = "has a header of Python 2; save the array again to avoid this warning"
        warnings.warn(f"{file.path!r} {words}", stacklevel=level_outside())
    return layout


def _read_head(descriptor: int) -> bytes:
    """Read the bytes before the data, and some more."""
    head = os.pread(descriptor, _HEAD_BYTES, 0)
    # Nearly all headers are short.
    version = (head[6], head[7]) if len(head) > 7 else (0, 0)
    width = _VERSIONS[version][0] if version in _VERSIONS else 0
    end = 8 + width + int.from_bytes(head[8 : 8 + width], "little")
    if end <= _HEAD_BYTES:
        return head
    return os.pread(descriptor, min(end, _HEAD_BYTES_MAX), 0)


def layout_in(stream: io.BytesIO) -> Layout:
    """Return the layout that a header describes; the dtype may be of Python objects.

    Raise one of the errors of `MALFORMED` if numpy cannot have such an array.
    """
    header = _text_in(stream)
    return _layout_of(header, stream.tell())


def _layout_of(header: str, begin: int) -> Layout:
    shape, fortran, dtype = _parsed_again(header)
    extents = extents_of(shape)
    check_element(dtype)
    check_extents(extents, dtype)
    return Layout(dtype, extents, begin, fortran)


def header_in(stream: io.BytesIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return shape, Fortran order and dtype; the stream is then where the data begin."""
    return _parsed_again(_text_in(stream))


def _text_in(stream: io.BytesIO) -> str:
    """Read the text of a header."""
    version = npy.read_magic(stream)
    if version not in _VERSIONS:
        raise ValueError(f"its version is {version}; it must be 1.0, 2.0 or 3.0")
    width, encoding, character_bytes_max = _VERSIONS[version]
    length = int.from_bytes(stream.read(width), "little")
    # A malformed length must not make us allocate gigabytes.
    most = _HEADER_BYTES_MAX * character_bytes_max
    if length > most:
        raise _TooLongError(f"has a header of {length} bytes; the limit is {most}")
    encoded = stream.read(length)
    if len(encoded) != length:
        raise ValueError(f"it ends within its header, of {length} bytes")
    header = encoded.decode(encoding)
    if len(header) > _HEADER_BYTES_MAX:
        raise _TooLongError(
            f"has a header of {len(header)} characters; the limit is {_HEADER_BYTES_MAX}"
        )
    return header


def _parsed_again(header: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    for _ in range(_PARSES_MAX - 1):
        with contextlib.suppress(SystemError):
            return _parsed(header)
    return _parsed(header)


def _without_long(header: str) -> str:
    """Return a header without the suffix of Python 2's long integers: 3 instead of 3L."""
    return _LONG.sub(lambda found: found[1] or "", header) if "L" in header else header


def _parse(header: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Have numpy parse a header."""
    # Here, because numpy would warn of it, and name this line.
    header = _without_long(header)
    _check_units(header)
    # numpy has no function for version 3.0, but its 2.0 reads escapes.  They make the text
    # longer; the limit is for the text in the file.
    text = header.encode("latin1", "backslashreplace")
    return npy.read_array_header_2_0(
        io.BytesIO(len(text).to_bytes(4, "little") + text), max_header_size=len(text)
    )


# numpy takes 60 us, several times as long as to read a small file; and the files of a data
# set have the same header, which is at most a few hundred bytes long.
_parsed = functools.lru_cache(maxsize=64)(_parse)


def _check_units(header: str) -> None:
    """Refuse a unit of time divided by 0: numpy (2.4) divides by it and crashes.

    Also refuse other divisors that numpy converts to 0.
    """
    # Skip the slow scan: numpy writes these characters only in the names of fields.
    if "/" not in header and "\\" not in header:
        return
    tokens = tokenize.generate_tokens(io.StringIO(header).readline)
    literals = [token.string for token in tokens if token.type == tokenize.STRING]
    text = "".join(str(ast.literal_eval(literal)) for literal in literals)
    for divisor in re.findall(r"/\s*([+-]?\d+)\s*\]", text):
        # A number that does not fit into a C int may become 0 there.
        if not 0 < int(divisor) < 1 << 31:
            raise ValueError(f"a unit of time is divided by {divisor}")


def check_extents(extents: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Refuse an array that numpy cannot represent, even if it has no bytes."""
    # Raises ValueError if there are more axes than numpy supports.
    np.empty((1,) * len(extents), "u1")
    if math.prod(filter(None, extents)) * dtype.itemsize > sys.maxsize:
        raise ValueError(f"an array of shape {extents} is too large for numpy")


def check_element(dtype: np.dtype[Any]) -> None:
    """Refuse dtypes that numpy arrays cannot have, or change on creation."""
    if dtype.subdtype is not None:
        raise TypeError(f"the dtype {dtype} has a shape; give it to the array")
    if dtype.kind in "SU" and not dtype.itemsize:
        raise TypeError(f"the dtype {dtype} has text of length 0; give it a length")
    if any(part.kind in "mM" and np.datetime_data(part)[1] < 1 for part in _parts(dtype)):
        raise TypeError(f"the dtype {dtype} has a time unit of length 0")


def _check_restored(dtype: np.dtype[Any]) -> None:
    """Raise TypeError for dtypes that numpy cannot restore, such as those of ml_dtypes."""
    for part in _parts(dtype):
        try:
            restored = str(np.dtype(part.str))
        except TypeError:
            restored = "nothing"
        if restored != str(part):
            raise TypeError(
                f"the dtype is {dtype}, and a .npy file cannot name {part}: numpy.load() "
                f"would make {restored} of {part.str}; save a view of unsigned integers, "
                "or use nvmeio.ArrayFile.create(raw=True)"
            )


def _parts(dtype: np.dtype[Any]) -> Iterator[np.dtype[Any]]:
    """Yield the dtypes that a dtype consists of."""
    if dtype.names is None:
        yield dtype.base
    else:
        for name in dtype.names:
            yield from _parts(dtype[name].base)


def _has_metadata(dtype: np.dtype[Any]) -> bool:
    """Return whether a dtype, or one that it consists of, has metadata."""
    inner = [dtype[name] for name in dtype.names or ()]
    if dtype.subdtype is not None:
        inner.append(dtype.base)
    return bool(dtype.metadata) or any(map(_has_metadata, inner))


def check_size(path: str | bytes, size: int, layout: Layout) -> None:
    """Raise ValueError if a file ends before its array does."""
    needed = layout.offset + layout.nbytes
    if needed > size:
        raise ValueError(
            f"{path!r} has {size} bytes; an array of shape {layout.shape} and dtype "
            f"{layout.dtype} at offset {layout.offset} ends at {needed}"
        )


def header_of(shape: tuple[int, ...], dtype: np.dtype[Any], *, long: bool = False) -> bytes:
    """Return the header of a .npy file for an array in C order.

    With `long`, it may be longer than numpy reads by default, as numpy.save writes it.
    """
    _check_restored(dtype)
    if _has_metadata(dtype):
        words = f"the metadata of the dtype {dtype} are not saved, as by numpy.save()"
        warnings.warn(words, stacklevel=level_outside())
    text = _described(shape, dtype)
    try:
        encoded, version, width = text.encode("latin1"), (1, 0), 2
    except UnicodeEncodeError:
        encoded, version, width = text.encode("utf-8"), (3, 0), 4
    magic = npy.magic(*version)
    for align in (_DATA_ALIGN, _NUMPY_ALIGN):
        length = len(encoded) + -(len(magic) + width + len(encoded)) % align
        if length <= _HEADER_BYTES_MAX:
            return magic + length.to_bytes(width, "little") + _padded(encoded, length)
    if long:
        if version == (1, 0) and length > _SHORT_BYTES_MAX:
            version, width = (2, 0), 4
        magic = npy.magic(*version)
        length = len(encoded) + -(len(magic) + width + len(encoded)) % _NUMPY_ALIGN
        return magic + length.to_bytes(width, "little") + _padded(encoded, length)
    raise ValueError(
        f"the header of an array of {len(dtype.names or ())} fields has {length} bytes; "
        f"numpy reads at most {_HEADER_BYTES_MAX}"
    )


def replace_shape(
    path: str | bytes, header: bytes, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> bytes:
    """Return the header of a .npy file for another shape, with its length unchanged."""
    width, encoding, _ = _VERSIONS[header[6], header[7]]
    begin = len(npy.MAGIC_PREFIX) + 2 + width
    encoded, length = _described(shape, dtype).encode(encoding), len(header) - begin
    if len(encoded) > length:
        raise ValueError(
            f"the header of {path!r} has room for {length} bytes, and the shape {shape} "
            f"needs {len(encoded)}; save it anew with nvmeio.save(), which leaves more"
        )
    return header[:begin] + _padded(encoded, length)


def _described(shape: tuple[int, ...], dtype: np.dtype[Any]) -> str:
    """Return the text of a header."""
    description = {
        # As dtype_to_descr() of numpy, which would warn of metadata, and name this line.
        "descr": dtype.str if dtype.names is None else _without_metadata(dtype.descr),
        "fortran_order": False,
        "shape": shape,
    }
    return f"{description!r}\n"


def _without_metadata(descr: Any) -> Any:
    """Return a dtype's description without metadata, which are in a tuple with a kind."""
    if isinstance(descr, list):
        return [(name, _without_metadata(kind), *shape) for name, kind, *shape in descr]
    return _without_metadata(descr[0]) if isinstance(descr, tuple) else descr


def _padded(encoded: bytes, length: int) -> bytes:
    """Pad with spaces before the newline, as numpy does."""
    return encoded[:-1].ljust(length - 1) + b"\n"
