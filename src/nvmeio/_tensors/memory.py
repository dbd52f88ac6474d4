"""The memory of arrays and tensors, without importing torch."""

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from nvmeio._memory.deferred import Deferred
from nvmeio._memory.strides import copy_to, parts_of, without_fields
from nvmeio._tensors.overlapping import MemoryAt
from nvmeio._tensors.sharing import Place, is_in_c_order, itemsize_of, place_of, start_of

__all__ = ["SLICE_BYTES", "bytes_of", "content_problem", "flat_bytes", "freed_problem"]
__all__ += ["in_slices", "moved_problem", "pieces_of", "storage_problem"]

# How much of a tensor or an array that is not in C order is copied at a time.
SLICE_BYTES = 4 << 20


def bytes_of(value: Any) -> npt.NDArray[np.uint8]:
    """Return the bytes of an array or a dense tensor, in C order.

    One on a device, or that a store has, is copied to host memory.
    """
    if isinstance(value, Deferred):
        value = value.load()
    if isinstance(value, np.ndarray):
        # Of a subclass, such as numpy.matrix, reshape() means something else.
        value = without_fields(np.asarray(value))
        if not value.flags.c_contiguous:
            source, value = value, np.empty(value.shape, value.dtype)
            copy_to(value, source)
        flat = value.reshape(-1)
        return flat.view(np.uint8) if flat.nbytes else np.empty(0, np.uint8)
    value = value.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    if value.numel() == 0:
        return np.empty(0, np.uint8)
    flat = flat_bytes(value)
    # By numpy() its storage could not be resized any more, for ever, as FSDP does.
    return np.asarray(MemoryAt(flat.data_ptr(), (flat.numel(),), "|u1", flat))


def flat_bytes(tensor: Any) -> Any:
    """Return the memory of a tensor that is dense, in C order, as a tensor of bytes."""
    # As view() would refuse a dimension of size 1 with an unusual stride.
    return tensor.as_strided((tensor.numel(),), (1,)).view(sys.modules["torch"].uint8)


def pieces_of(value: Any) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield the bytes of an array or a dense tensor, in C order, without a copy of all.

    One that has C order, or is on a device, is yielded whole; of others each piece is a
    copy of some elements.
    """
    if isinstance(value, Deferred):
        value = value.load()
    if is_in_c_order(value) or not (isinstance(value, np.ndarray) or value.is_cpu):
        yield bytes_of(value)
        return
    for piece, _ in in_slices(value):
        # Made dense first, because torch transposes only dense matrices in blocks.
        yield bytes_of(piece if isinstance(piece, np.ndarray) else piece.clone())


def in_slices(value: Any) -> Iterator[tuple[Any, int]]:
    """Yield views of a tensor or an array in C order, each with its place in the bytes."""
    value = without_fields(value) if isinstance(value, np.ndarray) else value.detach()
    item = max(1, itemsize_of(value))
    count, step = value.nbytes // item, max(1, SLICE_BYTES // item)
    for begin in range(0, count, step):
        for piece, first in parts_of(value, begin, min(begin + step, count)):
            yield piece, first * item


def content_problem(tensor: Any) -> str:
    """Return why a tensor's contents are not a plain array in memory; "" if they are."""
    torch = sys.modules["torch"]
    if torch.nn.parameter.is_lazy(tensor):
        return "it is not initialized yet; run the module once or materialize() it"
    if tensor.is_nested:
        return "it is nested; pass its values() and offsets()"
    if tensor.layout != torch.strided:
        return f"its layout is {tensor.layout}; pass its to_dense(), or its components"
    if isinstance(tensor, torch.masked.MaskedTensor):
        return "it is masked, and its mask would be lost; pass its get_data()"
    if tensor.is_quantized:
        return f"it is quantized ({tensor.dtype}); pass its int_repr()"
    if type(tensor).__name__ == "FakeTensor":
        return "it is a FakeTensor and has no data"
    if tensor._is_zerotensor():
        return "it is a ZeroTensor of forward AD and has no memory; pass its clone()"
    if tensor.device.type == "meta":
        return "it is on the meta device and has no data; pass its to_empty()"
    return ""


def storage_problem(tensor: Any) -> str:
    """Return why a strided tensor's elements are not in memory; "" if they are."""
    try:
        problem = freed_problem(tensor)
        address = tensor.data_ptr()
    except RuntimeError as error:
        return f"torch has no address for it: {error}"
    if not problem and tensor.numel() and not address:
        return (
            f"it is a {type(tensor).__qualname__}, which has no memory of its own; pass "
            "the tensor that it wraps, such as to_local() of a DTensor"
        )
    return problem


def freed_problem(tensor: Any) -> str:
    """Return why a tensor's storage is too small for it; "" if it is not."""
    nbytes = tensor.untyped_storage().nbytes()
    last = tensor.storage_offset()
    for extent, stride in zip(tensor.shape, tensor.stride(), strict=True):
        last += (extent - 1) * stride
    if tensor.numel() and (last + 1) * tensor.element_size() > nbytes:
        return f"its storage was freed: it has {nbytes} bytes, too few for its elements"
    return ""


def moved_problem(place: Place) -> str:
    """Return why a leaf's memory is no longer where it was; "" if it is."""
    moved = "its memory was moved or resized"
    if not isinstance(place.value, np.ndarray):
        # It is detached from the leaf, so only its storage can change.
        if start_of(place.value) != place.low:
            return moved
        return freed_problem(place.value)
    now = place_of(place.value)
    if (now.low, now.high) != (place.low, place.high):
        return moved
    owner = place.value
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    whole = place_of(owner)
    if owner.flags.owndata and not whole.low <= place.low <= place.high <= whole.high:
        return "the array that it is a view of was resized"
    return ""
