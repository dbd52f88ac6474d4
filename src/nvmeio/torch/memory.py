"""Tensors in memory of the pool."""

import math

import torch

from nvmeio._arguments.checks import extents_of
from nvmeio._arguments.keywords import suggesting
from nvmeio._native.locked import pool_memory
from nvmeio.torch._pool import tensor_in

__all__ = ["empty", "empty_like"]


@suggesting
def empty(
    *size: int | torch.Size | tuple[int, ...] | list[int],
    dtype: torch.dtype | None = None,
    pin_memory: bool = False,
    numa_node: int | None = None,
) -> torch.Tensor:
    """Make a tensor in memory of the pool, without initializing it.

    Parameters
    ----------
    *size : int, or one sequence of int
        The extent of each axis, 0 or more, as for ``torch.empty``.
    dtype : torch.dtype, optional
        By default torch's default dtype.
    pin_memory : bool, default False
        Lock the memory where RLIMIT_MEMLOCK allows, which ``aio_handle.is_pinned`` tells;
        where CUDA is present, register it with the driver, so that ``non_blocking`` copies
        are.
    numa_node : int, optional
        The node whose memory it shall be; by default where the system likes.

    Returns
    -------
    torch.Tensor
        On the CPU, contiguous; page-aligned, populated, in huge pages where the system has
        them.  The memory goes back to the pool when the last view of it dies.

    Raises
    ------
    MemoryError
        The pool may not hold so much (NVMEIO_POOL_BYTES), or the system has not so much.
    TypeError, ValueError
        An extent is no integer, negative or beyond all memory; a dtype that is none of
        torch's, or quantized; a node that there is not.
    OSError
        The system refuses to bind memory to a node, as containers may.

    Examples
    --------
    >>> import torch
    >>> tensor = nvmeio.torch.empty(1000, 1000, dtype=torch.bfloat16)
    >>> tensor.shape, tensor.data_ptr() % 4096
    (torch.Size([1000, 1000]), 0)
    """
    one = len(size) == 1 and not isinstance(size[0], int)
    extents = extents_of(size[0] if one else size)  # type: ignore[arg-type]
    kind = _checked_dtype(torch.get_default_dtype() if dtype is None else dtype)
    # A tensor of no elements has an allocation too: its views find their place.
    nbytes = max(math.prod(extents), 1) * kind.itemsize
    memory = pool_memory(nbytes, pin_memory, numa_node)
    return tensor_in(memory, kind)[: math.prod(extents)].view(extents)


def _checked_dtype(dtype: object) -> torch.dtype:
    """Refuse what is no dtype, or whose elements mean nothing without a scale."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype is {dtype!r}; it must be one of torch's, as torch.float32")
    if str(dtype).startswith("torch.q"):
        raise TypeError(f"dtype is {dtype}; quantized tensors cannot be made here")
    return dtype


@suggesting
def empty_like(
    tensor: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    pin_memory: bool = False,
    numa_node: int | None = None,
) -> torch.Tensor:
    """Make a tensor of the size and dtype of another in memory of the pool.

    Parameters
    ----------
    tensor : torch.Tensor
        Gives the size and the dtype; on any device, of any strides.
    dtype : torch.dtype, optional
        In place of the tensor's.
    pin_memory, numa_node
        As for ``empty``.

    Returns
    -------
    torch.Tensor
        On the CPU, contiguous, not initialized.

    Raises
    ------
    MemoryError, TypeError, ValueError, OSError
        As ``empty``; or ``tensor`` is none.

    Examples
    --------
    >>> import torch
    >>> tensor = nvmeio.torch.empty_like(torch.ones(1000, 1000))
    >>> tensor.dtype, tensor.data_ptr() % 4096
    (torch.float32, 0)
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"expected a tensor, not {type(tensor).__qualname__}")
    kind = tensor.dtype if dtype is None else dtype
    return empty(tensor.shape, dtype=kind, pin_memory=pin_memory, numa_node=numa_node)
