"""The operations on tensors that need torch.

buffer.pyx acquires ordinary CPU tensors by itself.  This module exports all others
(strided, lazy, on a device, or of a torch without DLPack's C table), raises the errors for
those that cannot be exported, and makes tensors in memory of the pool.
"""

import contextlib
import operator

import torch

from nvmeio._memory.registry import Export
from nvmeio._memory.strides import check_sizes, may_overlap
from nvmeio._native import pool
from nvmeio._native.pool import pool_memory
from nvmeio._tensors.memory import content_problem, freed_problem
from nvmeio._tensors.sharing import is_in_c_order
from nvmeio.torch._bits import copy_bits, opaque, plain_mode, touch
from nvmeio.torch._dtypes import carrier, to_carrier, to_tensor
from nvmeio.torch._pool import announce, tensor_in
from nvmeio.torch._staging import DeviceStaging

__all__ = [
    "PLAIN_TYPES",
    "announce",
    "byte_view",
    "carrier",
    "copy",
    "export",
    "first_address",
    "host_like",
    "is_pinned",
    "locked_tensor",
    "storage_address",
    "thread_limit",
    "to_carrier",
    "to_tensor",
    "touch",
]


# torch calls no __torch_function__() for these.
PLAIN_TYPES: tuple[type, ...] = (torch.Tensor, torch.nn.Parameter)


def export(tensor: torch.Tensor, writable: bool) -> Export:
    """Export the memory of a tensor; raise TypeError if it has none."""
    with plain_mode(tensor):
        _check_kind(tensor)
        if writable:
            _check_destination(tensor)
        if tensor.device.type != "cpu":
            stage = DeviceStaging(tensor, writable)
            return Export(
                0, tensor.nbytes, 0, stage, lambda _: stage.finish(), stage, stage.storage
            )
        origin = _address(tensor)
        if is_in_c_order(tensor):
            storage = tensor.untyped_storage()
            return Export(origin, tensor.nbytes, origin, None, touch, storage=storage)
        return _staged(tensor, writable, origin)


def _staged(tensor: torch.Tensor, writable: bool, origin: int) -> Export:
    """Export a contiguous copy of a strided or lazy tensor; after a read, copy it back."""
    dense = tensor.detach()
    if not writable:
        staging = opaque(dense.resolve_conj().resolve_neg()).contiguous()
        return Export(staging.data_ptr(), tensor.nbytes, origin, staging)
    staging = torch.empty(dense.shape, dtype=dense.dtype, device="cpu")

    def landing(_: torch.Tensor) -> None:
        # Into the memory at submission: the tensor may have another storage by now.
        copy_bits(dense, staging)

    storage = tensor.untyped_storage()
    return Export(
        staging.data_ptr(), tensor.nbytes, origin, staging, landing, storage=storage
    )


def _check_kind(tensor: torch.Tensor) -> None:
    """Raise TypeError for tensors whose contents are not a plain array."""
    problem = content_problem(tensor)
    if not problem:
        # Sparse and wrapped tensors have no storage.
        with contextlib.suppress(RuntimeError):
            problem = freed_problem(tensor)
    if problem:
        raise TypeError(f"cannot transfer the tensor: {problem}")


def _check_destination(tensor: torch.Tensor) -> None:
    """Raise ValueError for a view that a file's bytes cannot be read into."""
    if tensor.is_conj() or tensor.is_neg():
        lazy = "conj" if tensor.is_conj() else "neg"
        raise ValueError(
            f"cannot read a file into a lazy {lazy} view; pass the tensor that it views, "
            f"or its resolve_{lazy}()"
        )
    _check_overlap(tensor)


def _check_overlap(tensor: torch.Tensor) -> None:
    """Raise ValueError if elements of a destination share memory."""
    if tensor.numel() > 0 and may_overlap(tensor.shape, tensor.stride(), 1):
        raise ValueError(
            f"cannot write to a tensor of shape {tuple(tensor.shape)} and strides "
            f"{tensor.stride()}: its elements overlap; pass its clone()"
        )


def _address(tensor: torch.Tensor) -> int:
    """Return the address of a host tensor's elements; 0 if it has no elements."""
    try:
        address: int = tensor.data_ptr()
    except RuntimeError:
        # Tensors that functorch wraps have no pointer.
        address = 0
    if address == 0 and tensor.numel() > 0:
        raise TypeError(
            f"cannot transfer the tensor: {type(tensor).__qualname__} has no memory of its "
            "own here (a fake tensor, a tensor inside a transform such as vmap, or a "
            "wrapper); pass the tensor that it wraps, such as to_local() of a DTensor"
        )
    return address


def locked_tensor(num_elem: int, example: torch.Tensor) -> torch.Tensor:
    """Make a tensor in locked memory of the pool."""
    count = operator.index(num_elem)
    if count < 0:
        raise ValueError(f"num_elem is {count}; it must be 0 or more")
    if not isinstance(example, torch.Tensor):
        raise TypeError(f"expected a tensor as example, not {type(example).__qualname__}")
    # An empty tensor has an allocation too, so that it can be freed once, like any other.
    nbytes = max(count, 1) * example.element_size()
    tensor = tensor_in(pool_memory(nbytes, True, None), example.dtype)[:count]
    # detach() makes it the base of its views.  DeepSpeed frees the memory when the tensor
    # dies, and torch keeps a base alive as long as a view lives.
    return tensor.detach()


def first_address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's first element, also of an empty view."""
    address = storage_address(tensor)
    offset: int = tensor.storage_offset() * tensor.element_size() if address else 0
    return address + offset


def storage_address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage; 0 if it has none."""
    try:
        address: int = tensor.untyped_storage().data_ptr()
    except RuntimeError:
        # Sparse and wrapped tensors have no storage.
        return 0
    return address


def is_pinned(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is in pinned memory, of torch or of the pool."""
    if tensor.device.type != "cpu":
        return False
    address = storage_address(tensor)
    if address == 0:
        return False
    # Do not ask the driver about memory of the pool, which stays registered even when it is
    # freed.
    if pool.holds(address):
        return pool.is_pinned(address, 1)
    return bool(tensor.is_pinned())


def copy(dest: torch.Tensor, src: torch.Tensor) -> None:
    """Copy the elements of a tensor in C order, with torch."""
    with torch.no_grad(), plain_mode(dest):
        for tensor in (dest, src):
            _check_kind(tensor)
        check_sizes(dest.nbytes, src.nbytes)
        _check_overlap(dest)
        # reshape() may copy; memory that both share needs a copy, too.
        source = src.reshape(dest.shape)
        if _share_memory(dest, source):
            source = source.clone()
        if any(t.is_conj() or t.is_neg() for t in (dest, source)):
            dest.detach().copy_(source)
        else:
            copy_bits(dest, source)


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether the storages of two tensors share memory.

    They may be different storages, as ``torch.from_numpy`` makes them from one array.
    """
    address, other_address = storage_address(one), storage_address(other)
    if one.device != other.device or address == 0 or other_address == 0:
        return False
    if address <= other_address:
        return bool(other_address < address + one.untyped_storage().nbytes())
    return bool(address < other_address + other.untyped_storage().nbytes())


def host_like(tensor: torch.Tensor) -> torch.Tensor:
    """Make a tensor of the same shape and dtype in host memory."""
    with plain_mode(tensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """View the bytes of a tensor, flat if it is contiguous.

    Otherwise it has another axis, for the bytes of each element.
    """
    with plain_mode(tensor):
        size, offset = tensor.element_size(), tensor.storage_offset()
        strides = [stride * size for stride in tensor.stride()]
        view = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
            tensor.untyped_storage(), offset * size, (*tensor.shape, size), (*strides, 1)
        )
        return view.view(-1) if view.is_contiguous() else view


def thread_limit() -> int:
    """Return how many threads torch would use for an operation on the CPU."""
    count: int = torch.get_num_threads()
    return count
