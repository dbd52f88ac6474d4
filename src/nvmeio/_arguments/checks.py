"""Check callers' arguments: numbers, booleans, words and paths.

Each error names the argument, its value and the values that are allowed.  The arguments of
every transfer are checked in Cython, in _native/arguments.pyx.
"""

import operator
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from nvmeio._arguments.types import Path

__all__ = [
    "Shape",
    "direct_choice",
    "encoded",
    "exact_array",
    "extents_of",
    "flag",
    "has_integers",
    "integer",
    "path_of",
    "refuse_masked",
    "shown",
    "whole",
    "word",
]

Shape = SupportsIndex | Sequence[SupportsIndex]

# Types whose values a message shows.  Others may be large, so it shows their type.
_SHOWN = (bool, int, float, str, bytes, np.bool_, np.number)

_DIRECT_CHOICES = "'auto', True or False"


def shown(value: Any) -> str:
    """Return the text that a message shows for a value."""
    if value is None or isinstance(value, _SHOWN):
        return repr(value)
    return f"of type {type(value).__qualname__}"


def integer(name: str, value: Any) -> int:
    """Convert any integer except a bool to int, or raise TypeError."""
    if not isinstance(value, (bool, np.bool_)):
        try:
            index: int = operator.index(value)
            return index
        except TypeError:
            pass
    raise TypeError(f"{name} is {shown(value)}; it must be an integer")


def whole(name: str, value: Any, least: int, most: int) -> int:
    """Return an integer from ``least`` to ``most``, or raise TypeError or ValueError."""
    number = integer(name, value)
    if not least <= number <= most:
        raise ValueError(f"{name} is {number}; it must be from {least} to {most}")
    return number


def refuse_masked(name: str, values: Any) -> None:
    """Raise TypeError for a masked array, and for lists that contain one."""
    # Nobody has masked arrays before numpy.ma is imported, which takes 10 ms.
    if type(values) is np.ndarray or "numpy.ma" not in sys.modules:
        return
    if isinstance(values, list | tuple):
        kinds = set(map(type, values))
        if any(issubclass(kind, list | tuple | np.ma.MaskedArray) for kind in kinds):
            for each in values:
                refuse_masked(name, each)
    elif isinstance(values, np.ma.MaskedArray):
        raise TypeError(
            f"{name} is masked, and its mask would be lost; pass its data, or its filled() "
            "for a write"
        )


def exact_array(values: Any) -> npt.NDArray[Any]:
    """Convert values to an array; integers of more than 64 bits become objects.

    numpy may convert a list that has such integers and smaller ones to floats.
    """
    refuse_masked("an array of integers", values)
    found: npt.NDArray[Any] = np.asarray(values)
    if found.dtype.kind == "f" and not hasattr(values, "dtype"):
        exact: npt.NDArray[Any] = np.asarray(values, object)
        if has_integers(exact):
            return exact
    return found


def has_integers(array: npt.NDArray[Any]) -> bool:
    """Return whether an array has integers, perhaps as objects because one is too large."""
    if array.dtype.kind != "O":
        return array.dtype.kind in "iu"
    values = list(array.flat)
    if not all(type(each) is int or isinstance(each, np.integer) for each in values):
        return False
    return not all(-(2**63) <= each < 2**63 for each in values)


def flag(name: str, value: Any, choices: str = "True or False") -> bool:
    """Return a boolean, or raise: text such as "no" must not count as true."""
    if value is True or value is False:
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {shown(value)}; it must be {choices}") from None
    if number not in (0, 1):
        raise ValueError(f"{name} is {number}; it must be {choices}")
    return bool(number)


def direct_choice(name: str, value: Any) -> bool | str:
    """Return "auto", True or False, or raise TypeError or ValueError."""
    if not isinstance(value, str):
        return flag(name, value, _DIRECT_CHOICES)
    if value == "auto":
        return value
    raise ValueError(f"{name} is {shown(value)}; it must be {_DIRECT_CHOICES}")


def word(name: str, value: Any, choices: Iterable[str]) -> str:
    """Return a word if it is one of ``choices``, or raise ValueError."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(
            f"{name} is {shown(value)}; it must be one of {', '.join(choices)}"
        )
    return value


def path_of(path: Path) -> str | bytes:
    """Return a path as str or bytes, or raise TypeError or ValueError."""
    try:
        found = os.fspath(path)
    except TypeError:
        arrays = ("__array_interface__", "__dlpack__")
        swapped = isinstance(path, bytearray | memoryview) or any(
            hasattr(path, name) for name in arrays
        )
        raise TypeError(
            f"path is {shown(path)}; it must be a str, bytes or os.PathLike"
            + (": are the two arguments swapped?" if swapped else "")
        ) from None
    encoded(found)
    return found


def encoded(path: str | bytes) -> bytes:
    """Return the bytes of a path that the system gets, or raise ValueError."""
    try:
        name = os.fsencode(path)
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the path {path!r} has the character {path[error.start]!r}, which the "
            f"encoding of file names, {error.encoding}, lacks"
        ) from None
    # The system would ignore the rest of the path.
    if b"\0" in name:
        raise ValueError(f"the path {path!r} has a null character")
    return name


def extents_of(shape: Shape) -> tuple[int, ...]:
    """Return a shape as a tuple of int, or raise TypeError or ValueError."""
    if isinstance(shape, str | bytes):
        raise TypeError(f"the shape is {shape!r}; it must be an integer or a sequence")
    axes = shape if isinstance(shape, Sequence | np.ndarray) else (shape,)
    extents = tuple(integer("an extent", extent) for extent in axes)
    for extent in extents:
        if extent < 0:
            raise ValueError(f"the shape is {extents}; no extent may be negative")
        if extent > sys.maxsize:
            raise ValueError(f"the shape is {extents}; no extent may exceed {sys.maxsize}")
    return extents
