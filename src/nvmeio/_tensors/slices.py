"""Find the bytes of a tensor that an index selects.

``safe_open(...).get_slice(name)[index]`` of safetensors 0.8.0 has two sets of rules.  With
numpy, and with torch and ``backend="pread"``, safetensors interprets the index itself.  It
accepts integers of 32 bits, slices within bounds, one Ellipsis, and the empty list.  With
torch and ``"mmap"``, the default, torch indexes a tensor over the mapped file, so any index
of torch is valid.
"""

import math
from collections.abc import Sequence
from operator import index as index_of
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nvmeio._arrays.indexing import Axis, in_runs
from nvmeio._tensors.dtypes import torch_module
from nvmeio._tensors.errors import SafetensorError

__all__ = ["Plan", "plan"]

_U64_MAX = (1 << 64) - 1
_I64_MAX = (1 << 63) - 1
_I32_MAX = (1 << 31) - 1

_MISALIGNED = (
    "The slice is slicing for subbytes dtypes, and the slice does not end up at a byte "
    "boundary, this is invalid."
)


class Plan(NamedTuple):
    """The bytes that an index selects."""

    shape: tuple[int, ...]  # of the result, in the elements of the header
    # Where each run of bytes begins, relative to the tensor.  The runs, concatenated, are
    # the result in C order.
    offsets: NDArray[np.int64]
    run_bytes: int  # the length of every run; 0 if there are none


class _Axis(NamedTuple):
    """The selection along one dimension; `text` is for messages, as in safetensors."""

    start: int
    stop: int
    step: int
    keeps: bool
    text: str


def plan(
    index: Any,
    shape: Sequence[int],
    itemsize_bits: int,
    *,
    rules: Literal["safetensors", "torch"] = "safetensors",
) -> Plan:
    """Return the bytes of a tensor that an index selects.

    With `rules` "safetensors", raise SafetensorError as safetensors does.  A slice that
    starts after its end is an error too; safetensors 0.8.0 panics on it or returns a wrong
    shape.  With `rules` "torch", torch must be installed, and raises its own errors.
    """
    extents = tuple(shape)
    if rules == "torch":
        return _plan_by_torch(index, extents, itemsize_bits)
    axes = _axes_of(index, extents)
    try:
        return _plan_of(axes, extents, itemsize_bits)
    except SafetensorError as error:
        shown = ", ".join(axis.text for axis in axes)
        where = f"Error during slicing [{shown}] with shape {list(extents)}"
        raise SafetensorError(f"{where}: {error}") from None


def _axes_of(index: Any, shape: tuple[int, ...]) -> list[_Axis]:
    """Return the selection along each dimension that an index names."""
    if isinstance(index, list):
        if index:
            raise SafetensorError("Non empty lists are not implemented")
        items: list[Any] = [slice(0, 0)]
    else:
        items = list(index) if isinstance(index, tuple) else [index]
    ellipses = [place for place, item in enumerate(items) if item is ...]
    if len(ellipses) > 1:
        raise SafetensorError("Only one ellipsis (...) is allowed in slice index")
    for place in ellipses:
        missing = max(len(shape) - (len(items) - 1), 0)
        items[place : place + 1] = [slice(None)] * missing
    # Items beyond the last dimension get the size 0; _plan_of() refuses them.
    extents = (*shape, *[0] * (len(items) - len(shape)))
    return [
        _axis_of(dim, item, extent)
        for dim, (item, extent) in enumerate(zip(items, extents, strict=False))
    ]


def _axis_of(dim: int, item: Any, extent: int) -> _Axis:
    """Return the selection of an item along a dimension, without checking its bounds."""
    if not isinstance(item, slice):
        number = given = _integer(dim, item)
        if number < 0:
            number += extent
        if number < 0:
            raise SafetensorError(
                f"Invalid index {given} for dimension {dim} of size {extent}"
            )
        return _Axis(number, number + 1, 1, False, str(number))
    start, stop = _unsigned(item.start), _unsigned(item.stop)
    step = 1 if item.step is None else index_of(item.step)
    if not -_I64_MAX - 1 <= step <= _I64_MAX:
        raise OverflowError("Python int too large to convert to C long")
    if step < 1:
        raise SafetensorError(f"Slice step must be a positive integer, got {step}")
    text = ":".join("" if bound is None else str(bound) for bound in (start, stop))
    if step > 1:
        text += f":{step}"
    return _Axis(start or 0, extent if stop is None else stop, step, True, text)


def _integer(dim: int, item: Any) -> int:
    """Return an item of an index as an integer of 32 bits."""
    try:
        number = index_of(item)
    except Exception:  # of any type: safetensors drops it too
        number = None
    if number is None or not -_I32_MAX - 1 <= number <= _I32_MAX:
        raise SafetensorError(
            f"Unsupported slice index at position {dim}: expected slice, int, or ellipsis"
        )
    return number


def _unsigned(bound: Any) -> int | None:
    """Return a bound of a slice, which must fit Rust's usize."""
    if bound is None:
        return None
    number = index_of(bound)
    if number < 0:
        raise OverflowError("can't convert negative int to unsigned")
    if number > _U64_MAX:
        raise OverflowError("int too big to convert")
    return number


def _plan_of(axes: list[_Axis], shape: tuple[int, ...], bits: int) -> Plan:
    """Return the bytes that axes select, or raise an error in safetensors' words."""
    if len(axes) > len(shape):
        raise SafetensorError("more slicing indexes than dimensions in tensor")
    _check(axes, shape, bits)
    backward = next((axis for axis in axes if axis.start > axis.stop), None)
    if backward is not None:
        raise SafetensorError(f"slice {backward.text} starts after its end")
    base = 0
    stride = 1
    result: list[int] = []
    taken: list[tuple[int, int]] = []
    for dim in reversed(range(len(shape))):
        start, stop, step, keeps, _ = (
            axes[dim] if dim < len(axes) else _Axis(0, shape[dim], 1, True, ":")
        )
        count = -(-(stop - start) // step)
        if keeps:
            result.append(count)
        base += start * stride
        taken.append((count, step * stride))
        stride *= shape[dim]
    return Plan(tuple(reversed(result)), *_runs_of(base, taken, bits))


def _check(axes: list[_Axis], shape: tuple[int, ...], bits: int) -> None:
    """Raise SafetensorError if axes are out of bounds or split a byte.

    As in safetensors 0.8.0, the last dimension comes first.  Once a dimension selects
    nothing, safetensors forgets the slices of the dimensions after it; hence `cut`.
    """
    span = bits * math.prod(shape[len(axes) :])
    cut = False
    for dim in reversed(range(len(axes))):
        start, stop, step, _, _ = axes[dim]
        extent = shape[dim]
        if start >= extent or stop > extent:
            asked = start if start >= extent else stop - 1
            raise SafetensorError(
                f"index {asked} out of bounds for tensor dimension #{dim} of size {extent}"
            )
        whole = step == 1 and start == 0 and stop == extent
        if cut or not whole:
            if bits % 8 and any(n * span % 8 for n in _places(start, stop, step, cut)):
                raise SafetensorError(_MISALIGNED)
            cut = start < stop or (step == 1 and not cut)
        span *= extent


def _places(start: int, stop: int, step: int, cut: bool) -> list[int]:
    """Return elements that must begin at a byte; the first 8 stand for all."""
    places = [*range(start, stop, step)[:8]]
    if cut:
        return places
    return [start, stop] if step == 1 else places + [place + 1 for place in places]


def _runs_of(
    base: int, taken: list[tuple[int, int]], bits: int
) -> tuple[NDArray[np.int64], int]:
    """Return the runs of a strided block, given in elements, the last dimension first."""
    found = in_runs([Axis(count, stride) for count, stride in reversed(taken)], base)
    if found.run == 0:
        return np.empty(0, np.int64), 0
    starts = found.starts()
    return starts * bits // 8, found.run * bits // 8 if starts.size else 0


def _merged(offsets: NDArray[np.int64], run: int) -> tuple[NDArray[np.int64], int]:
    """Merge runs into fewer, longer ones of equal length."""
    breaks = np.flatnonzero(np.diff(offsets) != run) + 1
    # Between two breaks the runs are contiguous.  All can be cut into pieces of the
    # greatest common divisor of their lengths.
    lengths = np.diff(breaks, prepend=0, append=offsets.size)
    together = int(np.gcd.reduce(lengths))
    return offsets[::together], run * together


def _plan_by_torch(index: Any, shape: tuple[int, ...], bits: int) -> Plan:
    """Return the bytes that an index selects in torch, by indexing a meta tensor."""
    torch = torch_module()
    count = math.prod(shape)
    if bits % 8 and count:
        # safetensors 0.8.0 fails too: it uses the header's shape for a tensor of pairs.
        size = count * bits // 8
        raise RuntimeError(f"shape '{list(shape)}' is invalid for input of size {size}")
    whole = torch.empty(shape, dtype=torch.uint8, device="meta")
    try:
        part = whole[index]
    except Exception:  # of any type: _plan_by_copy() raises torch's error
        part = None
    if part is None or not _share_memory(part, whole):
        return _plan_by_copy(torch, index, shape, bits)
    taken = list(zip(part.shape, part.stride(), strict=True))
    return Plan(tuple(part.shape), *_runs_of(part.storage_offset(), taken[::-1], bits))


def _share_memory(one: Any, other: Any) -> bool:
    """Return whether two tensors are views of one storage."""
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def _plan_by_copy(torch: Any, index: Any, shape: tuple[int, ...], bits: int) -> Plan:
    """Return the bytes that an index selects, where torch makes a copy, not a view."""
    named = _dimensions_of(torch, index, len(shape))
    # The dimensions after those that the index names are read whole.
    head, tail = shape[:named], shape[named:]
    run = math.prod(tail) * bits // 8
    try:
        offsets = _offsets_of(torch, index, head, run)
    except Exception:  # of any type: indexing the whole shape raises torch's error
        byte = torch.zeros((), dtype=torch.uint8, device="cpu")
        result = tuple(byte.expand(shape)[index].shape)
        if 0 not in result:
            raise
        # torch does not check the range of indices if the result is empty.
        return Plan(result, np.empty(0, np.int64), 0)
    result = (*offsets.shape, *tail)
    if 0 in result:
        return Plan(result, np.empty(0, np.int64), 0)
    return Plan(result, *_merged(offsets.reshape(-1).numpy(), run))


def _offsets_of(torch: Any, index: Any, shape: tuple[int, ...], size: int) -> Any:
    """Return the offset of each element of `size` bytes that an index selects.

    The offsets along each dimension are a tensor with strides of 0 along the others, so
    only the result takes memory.
    """
    offsets = torch.zeros((), dtype=torch.int64, device="cpu").expand(shape)[index]
    for dim in reversed(range(len(shape))):
        places = torch.arange(shape[dim], device="cpu") * size
        view = [1] * len(shape)
        view[dim] = shape[dim]
        offsets = offsets + places.view(view).expand(shape)[index]
        size *= shape[dim]
    return offsets


def _dimensions_of(torch: Any, index: Any, dimensions: int) -> int:
    """Return how many of the first dimensions an index may name."""
    items = index if isinstance(index, tuple) else (index,)
    named = 0
    for item in items:
        if isinstance(item, (bool, np.bool_)) or item is None:
            continue
        indices = isinstance(item, list) and all(type(each) is int for each in item)
        if indices or isinstance(item, (int, slice)):
            named += 1
        elif isinstance(item, (torch.Tensor, np.ndarray)):
            is_mask = str(item.dtype).removeprefix("torch.") in ("bool", "uint8")
            named += item.ndim if is_mask else 1
        else:
            # An Ellipsis may name all; a sequence may be several indices or a mask.
            return dimensions
    # A single boolean names no dimension, but torch requires one.
    return min(max(named, 1), dimensions)
