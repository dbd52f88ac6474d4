"""Sizes, shapes and strides of arrays: checks, and parts in C order."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

__all__ = ["c_strides", "check_sizes", "copy_to", "is_dense", "may_overlap", "parts_of"]
__all__ += ["in_bytes", "without_fields"]

# How many columns of a transposed array are copied at a time, and how many bytes, at least.
# Its rows are often a power of two apart, so that few of them fit into the CPU's cache.
_COLUMNS, _BYTES = 64, 256 << 10


def c_strides(shape: Sequence[int], itemsize: int = 1) -> tuple[int, ...]:
    """Return the strides of an array in C order without gaps, in elements or bytes."""
    strides, step = [], itemsize
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def in_bytes(strides: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return strides of elements in bytes."""
    # Where the extent is 1 a stride may be any, and more bytes than 64 bits hold.
    found = (stride * itemsize for stride in strides)
    return tuple(each if each < 1 << 63 else itemsize for each in found)


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether elements fill their memory without gaps or overlap.

    The strides are in elements; where the extent is 1 they may be any.
    """
    pairs = sorted(pair for pair in zip(strides, shape, strict=True) if pair[1] > 1)
    expected = 1
    for stride, extent in pairs:
        if stride != expected:
            return False
        expected *= extent
    return True


def may_overlap(shape: Sequence[int], strides: Sequence[int], item: int) -> bool:
    """Return whether elements of a strided array may share memory; no extent may be 0.

    Also True for rare layouts whose axes interleave without sharing memory, because an
    exact answer would mean solving a Diophantine equation.
    """
    reach = item - 1
    for stride, extent in sorted(
        (abs(stride), extent)
        for extent, stride in zip(shape, strides, strict=True)
        if extent > 1
    ):
        if stride <= reach:
            return True
        reach += stride * (extent - 1)
    return False


def check_sizes(dest_bytes: int, src_bytes: int) -> None:
    """Raise ValueError if the sizes differ."""
    if dest_bytes != src_bytes:
        raise ValueError(
            f"dest has {dest_bytes} bytes and src {src_bytes}; they must be equal"
        )


def parts_of(
    array: Any, begin: int, end: int, origin: int = 0
) -> Iterator[tuple[Any, int]]:
    """Yield views that are together the elements from begin to end, in C order.

    Each comes with the index of its first element, counted from ``origin``.
    """
    if array.ndim <= 1:
        yield array[begin:end] if array.ndim else array, origin + begin
        return
    row = math.prod(array.shape[1:])
    first, last = -(-begin // row), end // row
    if first > last:
        # The elements are inside of one row.
        at = last * row
        yield from parts_of(array[last], begin - at, end - at, origin + at)
        return
    if begin < first * row:
        at = (first - 1) * row
        yield from parts_of(array[first - 1], begin - at, row, origin + at)
    if first < last:
        yield array[first:last], origin + first * row
    if last * row < end:
        at = last * row
        yield from parts_of(array[last], 0, end - at, origin + at)


def without_fields(array: Any) -> Any:
    """Return a view whose elements numpy copies with the gaps between their fields."""
    if array.dtype.names is None or not array.dtype.itemsize:
        return array
    return array.view(f"V{array.dtype.itemsize}")


def copy_to(target: Any, source: Any) -> None:
    """Copy an array to one of its shape in C order; numpy alone copies columns slowly."""
    strides = [abs(stride) for stride in source.strides if stride]
    if not strides or abs(source.strides[-1]) == min(strides):
        np.copyto(target, source)
        return
    width = source.shape[-1]
    columns = max(_COLUMNS, _BYTES * width // max(1, source.nbytes))
    for begin in range(0, width, columns):
        some = np.s_[..., begin : begin + columns]
        np.copyto(target[some], source[some])
