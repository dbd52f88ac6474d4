"""Decode the columns of MDS shards to the objects that streaming returns.

Names and layouts are those of streaming/base/format/mds/encodings.py, 0.13.  The bytes are
untrusted, so every length is checked before memory is allocated for it.
"""

import json
import math
import pickle
import struct
from collections.abc import Callable
from decimal import Decimal
from functools import lru_cache
from io import BytesIO
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Encoding", "Value", "encoding_of"]

Value = bytes | memoryview
Decoder = Callable[[Value], Any]


class Encoding(NamedTuple):
    """How a column is stored."""

    name: str
    size: int | None  # of each value, in bytes; None if it varies by sample
    decode: Decoder

    def __reduce__(self) -> tuple[Any, ...]:
        return encoding_of, (self.name, True)


@lru_cache
def encoding_of(name: str, allow_pickle: bool) -> Encoding:
    """Return the encoding of a name, or raise ValueError or ModuleNotFoundError."""
    kind, _, settings = name.partition(":")
    size: int | None
    if name in _SCALARS:
        size, decode = _scalar(name)
    elif kind == "ndarray":
        size, decode = _array(settings)
    elif name in _VARIABLE:
        size, decode = None, _VARIABLE[name]
    else:
        raise ValueError("which is unknown")
    if name == "pkl" and not allow_pickle:
        raise ValueError("which can run any code; pass allow_pickle=True if you trust it")
    if decode in _IMAGES:
        # Imported now, so that a missing Pillow raises before an epoch begins.
        import PIL.Image  # noqa: F401
    return Encoding(name, size, decode)


# Numbers and text.

_INTEGERS = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
_FLOATS = ("float16", "float32", "float64")
_SCALARS = ("int", *_INTEGERS, *_FLOATS)


def _scalar(name: str) -> tuple[int, Decoder]:
    if name == "int":
        return 8, lambda value: int.from_bytes(value, "little", signed=True)
    dtype = np.dtype(name).newbyteorder("<")
    return dtype.itemsize, lambda value: np.frombuffer(value, dtype)[0]


def _str(value: Value) -> str:
    return str(value, "utf-8")


# Arrays.

# The byte of a dtype: its bits, plus 0 for unsigned, 1 for signed, 2 for floating point.
_DTYPES = {
    8 * np.dtype(name).itemsize + "uif".index(name[0]): name for name in _INTEGERS + _FLOATS
}


def _array(settings: str) -> tuple[int | None, Decoder]:
    """Return the size and decoder of arrays; `settings` may fix their dtype and shape."""
    parts = settings.split(":") if settings else []
    if len(parts) > 2 or (parts and parts[0] not in _DTYPES.values()):
        raise ValueError("which is unknown")
    dtype = np.dtype(parts[0]).newbyteorder("<") if parts else None
    shape: tuple[int, ...] | None = None
    size = None
    if dtype is not None and len(parts) == 2:
        shape = tuple(int(extent) for extent in parts[1].split(","))
        if min(shape) < 1:
            raise ValueError(f"of the shape {shape}, which has no elements")
        size = math.prod(shape) * dtype.itemsize

    def decode(value: Value) -> Any:
        value = memoryview(value)
        kind, extents = dtype, shape
        if kind is None:
            kind = np.dtype(_DTYPES[value[0]]).newbyteorder("<")
            value = value[1:]
        if extents is None:
            axes, width = value[0] >> 2, 1 << value[0] % 4
            end = 1 + axes * width
            extents = tuple(np.frombuffer(value[1:end], f"<u{width}", axes).tolist())
            value = value[end:]
        if math.prod(extents) * kind.itemsize != len(value):
            raise ValueError(f"{len(value)} bytes for an array of {kind} of {extents}")
        # A copy in native byte order, because the bytes are used again.
        return np.frombuffer(value, kind).astype(kind.newbyteorder("=")).reshape(extents)

    return size, decode


# Images.


def _pil(value: Value) -> Any:
    """Return an image that was stored raw, after its width, height and mode."""
    from PIL import Image

    value = memoryview(value)
    width, height, letters = struct.unpack_from("<3I", value)
    mode, pixels = _str(value[12 : 12 + letters]), value[12 + letters :]
    # A pixel has at least one bit.
    if width * height > 8 * len(pixels):
        raise ValueError(f"{len(pixels)} bytes for an image of {width} x {height}")
    return Image.frombytes(mode, (width, height), bytes(pixels))


def _file(value: Value) -> Any:
    """Return an image from the bytes of its file; Pillow decodes it when it is used."""
    from PIL import Image

    return Image.open(BytesIO(value))


def _list_of(decode: Decoder, begin: int) -> Decoder:
    """Return a decoder of lists: from `begin` on, the length, all sizes, all values."""

    def decode_list(value: Value) -> list[Any]:
        value = memoryview(value)
        (count,) = struct.unpack_from("<I", value, begin)
        at = begin + 4 + 4 * count
        if at > len(value):
            raise ValueError(f"{len(value)} bytes for a list of {count}")
        ends = at + np.cumsum(np.frombuffer(value[begin + 4 : at], "<u4"), dtype=np.int64)
        if count and ends[-1] > len(value):
            raise ValueError(f"{len(value)} bytes for a list of {ends[-1]} bytes")
        borders = [at, *ends.tolist()]
        return [decode(value[a:b]) for a, b in pairwise(borders)]

    return decode_list


_PIL_LIST, _FILE_LIST, _FILE_ARRAY = (
    _list_of(_pil, 4),
    _list_of(_file, 4),
    _list_of(_file, 0),
)
# The decoders that need Pillow.
_IMAGES = (_pil, _file, _PIL_LIST, _FILE_LIST, _FILE_ARRAY)

_VARIABLE: dict[str, Decoder] = {
    "bytes": bytes,
    "str": _str,
    "str_int": lambda value: int(_str(value)),
    "str_float": lambda value: float(_str(value)),
    "str_decimal": lambda value: Decimal(_str(value)),
    "json": lambda value: json.loads(_str(value)),
    "pkl": pickle.loads,
    "pil": _pil,
    "jpeg": _file,
    "png": _file,
    "jpeg_array": _FILE_ARRAY,
    "jpegarray": _FILE_ARRAY,
    "list[pil]": _PIL_LIST,
    "list[jpeg]": _FILE_LIST,
    "list[png]": _FILE_LIST,
}
