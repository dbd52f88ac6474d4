"""Sizes, shapes and strides of arrays: checks, and parts in C order."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

__all__ = ["check_sizes", "copy_to", "dense_strides", "may_overlap", "parts_of"]
__all__ += ["without_fields"]

# How many columns of a transposed array are copied at a time, and how many bytes, at least.
# Its rows are often a power of two apart, so that few of them fit into the CPU's cache.
_COLUMNS, _BYTES = 64, 256 << 10


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides in elements of an array in C order without gaps."""
    return tuple(
        math.prod(max(extent, 1) for extent in shape[axis + 1 :])
        for axis in range(len(shape))
    )


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
