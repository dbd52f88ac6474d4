"""Rebuild the tensors and arrays of a state from those of a safetensors file.

The tree is untrusted; it is checked against the header before anything is read.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from nvmeio._memory.strides import is_dense
from nvmeio._safetensors.header import Tensor
from nvmeio._tensors.dtypes import (
    FORMAT_NAMES,
    FRAMEWORK_NAMES,
    framework_shape,
    numpy_dtype,
    torch_dtype,
    torch_module,
)
from nvmeio._tensors.memory import flat_bytes
from nvmeio.checkpoint._errors import CheckpointError
from nvmeio.checkpoint._stored import PAIRS, structured
from nvmeio.checkpoint._tree import path_of

__all__ = ["Part", "flagged", "in_order", "is_reordered", "part_of", "rebuild"]
__all__ += ["same_memory"]

_FLAGS = ("parameter", "buffer", "transient", "requires_grad")
_WORDS = {"tensor", "array", "dtype", "shape", "strides", "view", "device", *_FLAGS}
_EXTENT_MAX = (1 << 63) - 1
# The limit of numpy; torch has none.
_DIMENSIONS_MAX = 64


class View(NamedTuple):
    """The place of a tensor or an array in the bytes of a stored tensor."""

    offset: int
    strides: tuple[int, ...]  # in bytes
    conj: bool
    neg: bool


class Part(NamedTuple):
    """A tensor or an array of a state, and the stored tensor that has its bytes."""

    path: tuple[Any, ...]
    stored: Tensor
    by_torch: bool
    dtype: Any  # of torch or of numpy
    shape: tuple[int, ...]
    how: str  # whole, pairs, bytes or view
    view: View | None
    flags: tuple[str, ...]
    strides: tuple[int, ...] = ()  # in bytes; () for C order


def part_of(node: dict[str, Any], path: tuple[Any, ...], stored: dict[str, Tensor]) -> Part:
    """Return the part that a node describes; raise CheckpointError if it is invalid."""
    try:
        return _part_of(node, path, stored)
    except CheckpointError as error:
        # It may show much of what is in the file.
        raise CheckpointError(f"{path_of(path):.1000} {error!s:.500}") from None


def _part_of(
    node: dict[str, Any], path: tuple[Any, ...], stored: dict[str, Tensor]
) -> Part:
    by_torch = "tensor" in node
    if not node.keys() <= _WORDS or by_torch == ("array" in node):
        raise CheckpointError("is neither a tensor nor an array")
    name = node["tensor" if by_torch else "array"]
    tensor = stored.get(name) if isinstance(name, str) else None
    if tensor is None:
        raise CheckpointError(f"needs the tensor {name!r:.100}, which the file lacks")
    if not by_torch and len(tensor.shape) > _DIMENSIONS_MAX:
        words = f"is stored with {len(tensor.shape)} dimensions; an array has at most"
        raise CheckpointError(f"{words} {_DIMENSIONS_MAX}")
    flags = tuple(word for word in _FLAGS if node.get(word) is True)
    if flags and not by_torch:
        raise CheckpointError(f"is an array, and cannot have {', '.join(flags)}")
    part = _sized_part_of(node, path, tensor, by_torch, flags)
    if "requires_grad" in flags and not (
        part.dtype.is_floating_point or part.dtype.is_complex
    ):
        raise CheckpointError(f"has the dtype {part.dtype}, which has no gradients")
    if "strides" in node:
        return part._replace(strides=_strides_of(node["strides"], part))
    return part


def _strides_of(said: Any, part: Part) -> tuple[int, ...]:
    """Return strides; raise CheckpointError unless they only change the order."""
    strides = _integers(said, "stride", 0)
    itemsize = part.dtype.itemsize
    if (
        part.view is not None
        or not itemsize
        or len(strides) != len(part.shape)
        or any(stride % itemsize for stride in strides)
        or not is_dense(part.shape, [stride // itemsize for stride in strides])
    ):
        raise CheckpointError(
            f"has the shape {list(part.shape)} and invalid strides: {list(strides)!r:.100}"
        )
    return strides


def _sized_part_of(
    node: dict[str, Any],
    path: tuple[Any, ...],
    tensor: Tensor,
    by_torch: bool,
    flags: tuple[str, ...],
) -> Part:
    if "dtype" not in node:
        if "view" in node or "shape" in node:
            raise CheckpointError("has no dtype")
        known = FRAMEWORK_NAMES.get(tensor.dtype)
        if known is None:
            raise CheckpointError(f"has the unknown dtype {tensor.dtype}")
        dtype = torch_dtype(tensor.dtype) if by_torch else numpy_dtype(tensor.dtype)
        shape = tensor.shape
        if by_torch:
            shape = framework_shape(tensor.dtype, shape)
        return Part(path, tensor, by_torch, dtype, shape, "whole", None, flags)
    dtype = _dtype_of(node["dtype"], by_torch)
    if "shape" not in node:
        if PAIRS.get(_name(dtype)) != tensor.dtype or tensor.shape[-1:] != (2,):
            raise CheckpointError(
                f"has the dtype {dtype}, but is stored as {tensor.dtype} of shape "
                f"{list(tensor.shape)}"
            )
        shape = tensor.shape[:-1]
        return Part(path, tensor, by_torch, dtype, shape, "pairs", None, flags)
    shape = _integers(node["shape"], "shape", 0)
    too_many = not by_torch and len(shape) > _DIMENSIONS_MAX
    if too_many or math.prod(shape) * dtype.itemsize > _EXTENT_MAX:
        raise CheckpointError(f"has an invalid shape: {shape!r:.100}")
    nbytes = tensor.end - tensor.begin
    if "view" not in node:
        if math.prod(shape) * dtype.itemsize != nbytes or tensor.dtype != "U8":
            raise CheckpointError(
                f"has the dtype {dtype} and shape {list(shape)}, but {nbytes} bytes of "
                f"{tensor.dtype}"
            )
        return Part(path, tensor, by_torch, dtype, shape, "bytes", None, flags)
    view = _view_of(node["view"], shape, dtype.itemsize, nbytes, by_torch)
    return Part(path, tensor, by_torch, dtype, shape, "view", view, flags)


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype_of(said: Any, by_torch: bool) -> Any:
    if by_torch:
        if not isinstance(said, str) or not (said in FORMAT_NAMES or said in PAIRS):
            raise CheckpointError(f"has the unknown dtype {said!r:.50}")
        return getattr(torch_module(), said)
    try:
        # Text with commas is of several fields, which no save writes so.
        is_text = isinstance(said, str) and "," not in said
        dtype = np.dtype(said) if is_text else structured(said)
    except (ValueError, TypeError, LookupError, RecursionError, SyntaxError):
        raise CheckpointError(f"has the unknown dtype {said!r:.50}") from None
    if dtype.hasobject:
        raise CheckpointError(f"has the dtype {dtype}, which has Python objects")
    if dtype.subdtype is not None:
        raise CheckpointError(f"has the unknown dtype {said!r:.50}")
    return dtype


def _integers(said: Any, what: str, least: int) -> tuple[int, ...]:
    if not isinstance(said, list) or not all(
        type(each) is int and least <= each <= _EXTENT_MAX for each in said
    ):
        raise CheckpointError(f"has an invalid {what}: {said!r:.100}")
    return tuple(said)


def _view_of(
    said: Any, shape: tuple[int, ...], itemsize: int, nbytes: int, by_torch: bool
) -> View:
    if (
        not isinstance(said, dict)
        or not {"offset", "strides", "conj", "neg"} >= said.keys()
    ):
        raise CheckpointError(f"has an invalid view: {said!r:.100}")
    least = 0 if by_torch else -_EXTENT_MAX
    strides = _integers(said.get("strides"), "stride", least)
    (offset,) = _integers([said.get("offset")], "offset", 0)
    if offset > nbytes:
        raise CheckpointError(f"begins at byte {offset} of {nbytes}")
    if len(strides) != len(shape):
        raise CheckpointError(f"has {len(shape)} dimensions but {len(strides)} strides")
    if 0 not in shape:
        reach = [(size - 1) * stride for size, stride in zip(shape, strides, strict=True)]
        low = offset + sum(each for each in reach if each < 0)
        high = offset + sum(each for each in reach if each > 0) + itemsize
        if low < 0 or high > nbytes:
            raise CheckpointError(f"has bytes {low} to {high} of {nbytes}")
    if by_torch and any(each % itemsize for each in (offset, *strides)):
        raise CheckpointError(f"has an offset or stride that {itemsize} does not divide")
    return View(offset, strides, said.get("conj") is True, said.get("neg") is True)


def rebuild(part: Part, base: Any) -> Any:
    """Make a tensor or an array over the memory of a stored tensor, in C order."""
    try:
        made = _tensor(part, base) if part.by_torch else _array(part, base)
        if part.strides and part.how != "whole":
            # Only those of extents of 1 differ; what shares the memory still does.
            made = made.as_strided(part.shape, _element_strides(part))
        return flagged(part, made)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise CheckpointError(f"{path_of(part.path)} cannot be rebuilt: {error}") from None


def is_reordered(part: Part) -> bool:
    """Return whether the elements had another order in memory than in the file."""
    if not part.strides:
        return False
    reached = part.dtype.itemsize
    for extent, stride in reversed(list(zip(part.shape, part.strides, strict=True))):
        if extent != 1 and stride != reached:
            return True
        reached *= extent
    return not part.by_torch


def in_order(part: Part) -> Any:
    """Return memory for a part, with its strides."""
    if not part.by_torch:
        return np.ndarray(part.shape, part.dtype, strides=part.strides)
    strides = _element_strides(part)
    # The default device may be another one.
    return torch_module().empty_strided(part.shape, strides, dtype=part.dtype, device="cpu")


def _element_strides(part: Part) -> list[int]:
    return [stride // part.dtype.itemsize for stride in part.strides]


def _array(part: Part, base: Any) -> Any:
    if isinstance(base, np.ndarray):
        if part.how == "whole":
            return base
        flat = base.reshape(-1).view(np.uint8)
    else:
        # As bytes, because numpy lacks some dtypes of torch.
        flat = flat_bytes(base.reshape(-1)).numpy()
    if part.view is None:
        if not flat.size:
            return np.empty(part.shape, part.dtype)
        return flat.view(part.dtype).reshape(part.shape)
    return np.ndarray(
        part.shape, part.dtype, flat.data, part.view.offset, part.view.strides
    )


def _tensor(part: Part, base: Any) -> Any:
    torch = torch_module()
    base = base.detach()
    if part.how == "whole":
        return base
    if part.how == "pairs":
        return torch.view_as_complex(base)
    view = part.view
    if view is None:
        return base.view(part.dtype).reshape(part.shape)
    itemsize = part.dtype.itemsize
    start = base.storage_offset() * base.element_size() + view.offset
    strides = [stride // itemsize for stride in view.strides]
    made = torch.empty(0, dtype=part.dtype, device=base.device)
    made = made.set_(base.untyped_storage(), start // itemsize, part.shape, strides)
    if view.conj:
        made = made.conj()
    return torch._neg_view(made) if view.neg else made


def flagged(part: Part, tensor: Any) -> Any:
    """Make a tensor the parameter or buffer that it was; return an array as it is."""
    if not part.by_torch:
        return tensor
    wants = "requires_grad" in part.flags
    if "parameter" in part.flags:
        return torch_module().nn.Parameter(tensor, requires_grad=wants)
    if "buffer" in part.flags:
        persistent = "transient" not in part.flags
        tensor = torch_module().nn.Buffer(tensor, persistent=persistent)
    return tensor.requires_grad_() if wants else tensor


def same_memory(one: Any, other: Any) -> bool:
    """Return whether two tensors, or two arrays, are the same elements of memory."""
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return (
            isinstance(one, np.ndarray)
            and isinstance(other, np.ndarray)
            and one.__array_interface__ == other.__array_interface__
        )
    return bool(
        one.device == other.device
        and one.data_ptr() == other.data_ptr()
        and tuple(one.shape) == tuple(other.shape)
        and one.stride() == other.stride()
    )
