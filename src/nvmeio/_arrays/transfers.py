"""Transfers of an array's elements: records of its file, and memory for them.

indexing.py finds the elements that an index selects.  This module allocates the memory or
takes the caller's, and ArrayFile starts the transfers.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nvmeio._arguments.checks import refuse_masked
from nvmeio._arrays.elements import Elements
from nvmeio._arrays.indexing import Selection, last_of_each, select
from nvmeio._arrays.stored import StoredArray
from nvmeio._memory.registry import library_of
from nvmeio._native.buffer import borrow
from nvmeio._native.copy import memcpy

__all__ = ["Transfer", "gathering", "names_fields", "reading", "storing"]

Array = npt.NDArray[Any]

# Runs whose average distance is at most this are read together with the gaps between them.
# It is about the memory that a gather needs for each run, in arrays and in the engine.
_SPACING_BYTES = 64

# How much is read at once with its gaps: what is read is larger than the result.
_PART_BYTES = 64 << 20


class Transfer(NamedTuple):
    """Records of a file, and the memory to read them into or write them from."""

    offsets: Any  # of the records, in bytes
    nbytes: int  # of each
    memory: Any
    result: Any = None
    # Makes the result once the memory is filled; None if it exists before.
    make: Callable[[], Any] | None = None
    # Transfers that together fill the result, in order, in place of this one.
    parts: Iterable["Transfer"] = ()

    def finished(self) -> Any:
        """Return the result, once the memory is filled."""
        return self.result if self.make is None else self.make()


def names_fields(array: StoredArray, index: Any) -> bool:
    """Return whether an index names fields of a structured dtype."""
    if array.elements.dtype.names is None:
        return False
    names = index if isinstance(index, list) else [index]
    return bool(names) and all(isinstance(name, str) for name in names)


def reading(
    array: StoredArray, index: Any, out: Any, *, in_parts: bool = False
) -> Transfer:
    """Return the transfer that reads the elements of an index.

    With ``in_parts`` it may have parts, which need less memory than one transfer.
    """
    layout = array.layout
    if names_fields(array, index):
        if in_parts and layout.shape and layout.nbytes > _PART_BYTES:
            return _fields_in_parts(array, index)
        records: Array = np.empty(layout.shape, layout.dtype)
        part = records[index]
        take = partial(np.ascontiguousarray, part)
        return _staged(array, records, layout.offset, take, part.shape, part.dtype, out)
    selection = select(index, layout.shape)
    item, count = layout.dtype.itemsize, selection.runs
    if count < 2 or selection.run == 0 or selection.run * item > _SPACING_BYTES * count:
        return gathering(array, selection, out)
    low, high = selection.hull()
    if (high - low) * item > _SPACING_BYTES * count:
        return gathering(array, selection, out)
    if in_parts and not selection.repeats and (high - low) * item > _PART_BYTES:
        target, result = _target(array.elements, selection.shape, layout.dtype, out)
        parts = _parts(array, selection, target.reshape(-1))
        return Transfer([], 0, target, result, parts=parts)
    hull: Array = np.empty(high - low, layout.dtype)
    take = partial(selection.taken_of, hull, low)
    offset = layout.offset + low * item
    return _staged(array, hull, offset, take, selection.shape, layout.dtype, out)


def _fields_in_parts(array: StoredArray, index: Any) -> Transfer:
    """Return the transfer that reads fields, some rows at a time."""
    layout, row_bytes = array.layout, array.row_bytes
    rows, inner = layout.shape[0], layout.shape[1:]
    step = max(1, _PART_BYTES // row_bytes)
    model: Array = np.empty((0, *inner), layout.dtype)[index]
    shape = (rows, *model.shape[1:])
    target, result = _target(array.elements, shape, model.dtype, None)

    def parts() -> Iterator[Transfer]:
        for begin in range(0, rows, step):
            records: Array = np.empty((min(step, rows - begin), *inner), layout.dtype)
            make = partial(memcpy, target[begin : begin + step], records[index])
            offset = layout.offset + begin * row_bytes
            yield Transfer([offset], records.nbytes, records, make=make)

    return Transfer([], 0, target, result, parts=parts())


def _parts(array: StoredArray, selection: Selection, target: Array) -> Iterator[Transfer]:
    """Yield transfers that fill a result; each is for the memory of the last one."""
    layout, end = array.layout, 0
    item = layout.dtype.itemsize
    memory: Array = np.empty(0, layout.dtype)
    for piece in selection.pieces(_PART_BYTES // item):
        low, high = piece.hull()
        if len(memory) < high - low:
            memory = np.empty(high - low, layout.dtype)
        hull = memory[: high - low]
        begin, end = end, end + math.prod(piece.shape)
        make = partial(_take, target[begin:end], piece, hull, low)
        yield Transfer([layout.offset + low * item], hull.nbytes, hull, make=make)


def _take(target: Array, piece: Selection, hull: Array, low: int) -> None:
    memcpy(target, piece.taken_of(hull, low))


def _staged(
    array: StoredArray,
    staging: Array,
    offset: int,
    take: Callable[[], Array],
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    out: Any,
) -> Transfer:
    """Return the transfer that fills a staging array, from which the result is taken."""
    target, result = _target(array.elements, shape, dtype, out)

    def make() -> Any:
        library, taken = library_of(target), take()
        if library is None:
            memcpy(target, taken)
        else:
            memcpy(target, library.to_tensor(taken, target.dtype))
        return result

    offsets = [offset] if staging.nbytes else []
    return Transfer(offsets, staging.nbytes, staging, make=make)


def gathering(array: StoredArray, selection: Selection, out: Any) -> Transfer:
    """Return the transfer that reads the selected elements without gaps."""
    elements = array.elements
    target, result = _target(elements, selection.shape, elements.dtype, out)
    offsets, nbytes = _records(array, selection)
    if selection.scalar and out is None and elements.library is None:
        return Transfer(offsets, nbytes, target, make=partial(result.__getitem__, ()))
    return Transfer(offsets, nbytes, target, result)


def storing(array: StoredArray, selection: Selection, value: Any) -> Transfer:
    """Return the transfer that writes the selected elements."""
    values = array.elements.spread(value, selection.shape)
    offsets, nbytes = _records(array, selection)
    if selection.repeats and len(offsets):
        last = last_of_each(offsets)
        if len(last) < len(offsets):
            values = values.reshape(len(offsets), -1)[last]
            offsets = offsets[last]
    return Transfer(offsets, nbytes, values)


def _records(array: StoredArray, selection: Selection) -> tuple[Any, int]:
    """Return the offsets in the file of a selection's runs, and their size."""
    if selection.run == 0:
        return [], 0
    item = array.elements.dtype.itemsize
    return selection.starts(array.layout.offset, item), selection.run * item


def _target(
    elements: Elements, shape: tuple[int, ...], dtype: np.dtype[Any], out: Any
) -> tuple[Any, Any]:
    """Return the memory to fill, and the result that shares it."""
    if out is None:
        array: Array = np.empty(shape, dtype)
        return array, elements.to_result(array)
    refuse_masked("out", out)
    library = library_of(out)
    if library is not None:
        same = out.dtype == elements.tensor_dtype
        if elements.library is None:
            same = library.carrier(out.dtype) == dtype
    elif isinstance(out, np.ndarray):
        same = out.dtype == dtype
    else:
        raise TypeError(
            f"out is of type {type(out).__qualname__}; it must be an array or a tensor"
        )
    if not same:
        wanted = dtype if elements.library is None else elements.shown
        raise TypeError(f"out is of dtype {out.dtype}; it must be of {wanted}")
    nbytes = math.prod(shape) * dtype.itemsize
    try:
        found = out.nbytes
    except RuntimeError:
        # Raises a precise error, for example for a sparse tensor.
        borrow(out, writable=True)
        raise
    if found != nbytes:
        raise ValueError(
            f"out has {found} bytes; the result, of shape {shape}, has {nbytes}"
        )
    return out, out
