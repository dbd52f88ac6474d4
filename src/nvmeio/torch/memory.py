"""Make tensors in memory of the pool."""

import math

import torch

from nvmeio._arguments.checks import extents_of
from nvmeio._native.pool import pool_memory
from nvmeio.torch._pool import tensor_in

__all__ = ["empty", "empty_like"]


def empty(
    *size: int | torch.Size | tuple[int, ...] | list[int],
    dtype: torch.dtype | None = None,
    pin_memory: bool = False,
    numa_node: int | None = None,
) -> torch.Tensor:
    """Make an uninitialized tensor in memory of the pool.

    Parameters
    ----------
    *size : int, or one sequence of int
        The shape, as for ``torch.empty``; each extent is 0 or more.
    dtype : torch.dtype, optional
        The dtype; by default torch's default dtype.
    pin_memory : bool, default False
        Lock the memory, all of it or none: if it exceeds RLIMIT_MEMLOCK, nothing is locked,
        without an error.  ``pool_stats()["bytes_locked"]`` counts what is locked.  If CUDA
        is present, also register the memory with its driver, so that ``non_blocking``
        copies are asynchronous.  ``aio_handle.is_pinned`` is True in any case.
    numa_node : int, optional
        The NUMA node to allocate on; by default unbound.

    Returns
    -------
    torch.Tensor
        A contiguous tensor on the CPU: page-aligned, populated, and in huge pages if the
        system has them.  The memory returns to the pool when the last view of it dies.

    Raises
    ------
    MemoryError
        Not enough memory, or over the pool's limit (NVMEIO_POOL_BYTES).
    TypeError, ValueError
        An extent is not an integer, negative, or too large; `dtype` is not a dtype of
        torch, or is quantized; or `numa_node` does not exist.
    OSError
        The system refuses to bind memory to a node, as some containers do.

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
    # An empty tensor has an allocation too, so that its views have an address.
    nbytes = max(math.prod(extents), 1) * kind.itemsize
    memory = pool_memory(nbytes, pin_memory, numa_node)
    return tensor_in(memory, kind)[: math.prod(extents)].view(extents)


def _checked_dtype(dtype: object) -> torch.dtype:
    """Raise TypeError for values that are not dtypes, and for quantized dtypes."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(
            f"dtype is {dtype!r}; it must be a dtype of torch, such as torch.float32"
        )
    if str(dtype).startswith("torch.q"):
        raise TypeError(
            f"dtype is {dtype}; it must not be quantized: pass the integer dtype"
        )
    return dtype


def empty_like(
    tensor: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    pin_memory: bool = False,
    numa_node: int | None = None,
) -> torch.Tensor:
    """Make an uninitialized tensor like another one, in memory of the pool.

    Parameters
    ----------
    tensor : torch.Tensor
        The tensor whose shape and dtype to use; on any device, with any strides.
    dtype : torch.dtype, optional
        The dtype; by default that of `tensor`.
    pin_memory, numa_node
        As for ``empty``.

    Returns
    -------
    torch.Tensor
        A contiguous tensor on the CPU.

    Raises
    ------
    MemoryError, TypeError, ValueError, OSError
        As ``empty``; or TypeError if `tensor` is not a tensor.

    Examples
    --------
    >>> import torch
    >>> tensor = nvmeio.torch.empty_like(torch.ones(1000, 1000))
    >>> tensor.dtype, tensor.data_ptr() % 4096
    (torch.float32, 0)
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"tensor is of type {type(tensor).__qualname__}; it must be a torch.Tensor"
        )
    kind = tensor.dtype if dtype is None else dtype
    return empty(tensor.shape, dtype=kind, pin_memory=pin_memory, numa_node=numa_node)
