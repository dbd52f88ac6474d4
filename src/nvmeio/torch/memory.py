"""Tensors in memory of the pool."""

import logging
import math

import torch

from nvmeio import pool
from nvmeio.memory import extents_of, pool_memory

__all__ = ["announce", "empty", "empty_like", "tensor_in"]

_log = logging.getLogger("nvmeio")


def empty(
    *size: int | torch.Size | tuple[int, ...] | list[int],
    dtype: torch.dtype | None = None,
    pinned: bool = False,
    numa_node: int | None = None,
) -> torch.Tensor:
    """Make a tensor in memory of the pool, without initializing it.

    Parameters
    ----------
    *size : int, or one sequence of int
        The extent of each axis, 0 or more, as for ``torch.empty``.
    dtype : torch.dtype, optional
        By default torch's default dtype.
    pinned : bool, default False
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
    """
    one = len(size) == 1 and not isinstance(size[0], int)
    extents = extents_of(size[0] if one else size)  # type: ignore[arg-type]
    kind = _checked_dtype(torch.get_default_dtype() if dtype is None else dtype)
    # A tensor of no elements has an allocation too: its views find their place.
    nbytes = max(math.prod(extents), 1) * kind.itemsize
    memory = pool_memory(nbytes, pinned, numa_node)
    return tensor_in(memory, kind)[: math.prod(extents)].view(extents)


def _checked_dtype(dtype: object) -> torch.dtype:
    """Refuse what is no dtype, or whose elements mean nothing without a scale."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype is {dtype!r}; it must be one of torch's, as torch.float32")
    if str(dtype).startswith("torch.q"):
        raise TypeError(f"dtype is {dtype}; quantized tensors cannot be made here")
    return dtype


def empty_like(
    tensor: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    pinned: bool = False,
    numa_node: int | None = None,
) -> torch.Tensor:
    """Make a tensor of the size and dtype of another in memory of the pool.

    Parameters
    ----------
    tensor : torch.Tensor
        Gives the size and the dtype; on any device, of any strides.
    dtype : torch.dtype, optional
        In place of the tensor's.
    pinned, numa_node
        As for ``empty``.

    Returns
    -------
    torch.Tensor
        On the CPU, contiguous, not initialized.

    Raises
    ------
    MemoryError, TypeError, ValueError, OSError
        As ``empty``; or ``tensor`` is none.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"expected a tensor, not {type(tensor).__qualname__}")
    kind = tensor.dtype if dtype is None else dtype
    return empty(tensor.shape, dtype=kind, pinned=pinned, numa_node=numa_node)


def tensor_in(memory: pool.PoolMemory, dtype: torch.dtype) -> torch.Tensor:
    """Make a tensor of all of some memory.

    Parameters
    ----------
    memory : PoolMemory
        Of a whole number of elements, at least one.
    dtype : torch.dtype
        Of the elements.

    Returns
    -------
    torch.Tensor
        One-dimensional; it and its views hold the memory.
    """
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype)


def announce(memory: pool.PoolMemory) -> None:
    """Tell CUDA's driver, where there is one, of memory that stays where it is.

    Parameters
    ----------
    memory : PoolMemory
        Pinned; the driver forgets it when it is given back.

    Notes
    -----
    Where the driver refuses, or cannot be asked, as in a child of a process that used it,
    copies are right, but synchronous; it is logged.
    """
    if not torch.cuda.is_available():
        return
    try:
        runtime = torch.cuda.cudart()
        code = int(runtime.cudaHostRegister(memory.address, memory.nbytes, 0))
    except RuntimeError as error:
        _log.warning("CUDA cannot be told of pinned memory: %s", error)
        return
    if code:
        _log.warning("cudaHostRegister refused %d bytes: error %d", memory.nbytes, code)
        return
    memory.call_before_free(runtime.cudaHostUnregister)
