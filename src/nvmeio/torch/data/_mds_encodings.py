"""What the encodings of MDS columns stand for: bytes become the objects streaming returns.

Names and layouts are those of streaming/base/format/mds/encodings.py, 0.13.  The bytes come
from strangers, so that every length is checked before memory is spent on it.
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

__all__ = ["Encoding", "encoding_of"]

Decoder = Callable[[memoryview], Any]


class Encoding(NamedTuple):
    """How a column is stored."""

    name: str
    size: int | None  # of each value, in bytes; None where a sample says it
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
        # Without it that is an error now, not in the middle of an epoch.
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


def _str(value: memoryview) -> str:
    return str(value, "utf-8")


# Arrays.

# A byte stands for the dtype: the bits, and 0 unsigned, 1 signed, 2 floating point.
_DTYPES = {
    8 * np.dtype(name).itemsize + "uif".index(name[0]): name for name in _INTEGERS + _FLOATS
}


def _array(settings: str) -> tuple[int | None, Decoder]:
    """Return size and decoder of arrays; the column may have their dtype and shape."""
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

    def decode(value: memoryview) -> Any:
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
        # The caller's own, with elements in the order that this machine has them in.
        return np.frombuffer(value, kind).astype(kind.newbyteorder("=")).reshape(extents)

    return size, decode


# Images.


def _pil(value: memoryview) -> Any:
    """Return an image that was stored raw, behind its width, height and mode."""
    from PIL import Image

    width, height, letters = struct.unpack_from("<3I", value)
    mode, pixels = _str(value[12 : 12 + letters]), value[12 + letters :]
    # A pixel has a bit or more.
    if width * height > 8 * len(pixels):
        raise ValueError(f"{len(pixels)} bytes for an image of {width} x {height}")
    return Image.frombytes(mode, (width, height), bytes(pixels))


def _file(value: memoryview) -> Any:
    """Return an image of which the value is the file; Pillow decodes it when it is used."""
    from PIL import Image

    return Image.open(BytesIO(value))


def _list_of(decode: Decoder, begin: int) -> Decoder:
    """Return what decodes a list: its length from `begin` on, all sizes, all values."""

    def decode_list(value: memoryview) -> list[Any]:
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
# Those that take Pillow.
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
