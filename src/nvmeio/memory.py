"""Allocate arrays in the pool's memory."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from nvmeio._arguments.checks import Shape, extents_of
from nvmeio._native.pool import pool_memory

__all__ = ["empty"]


def empty(
    shape: Shape,
    dtype: npt.DTypeLike = float,
    *,
    pin_memory: bool = False,
    numa_node: int | None = None,
) -> npt.NDArray[Any]:
    """Allocate an array in the pool's memory, without initializing it.

    Parameters
    ----------
    shape : int or sequence of int
        The extent of each axis, 0 or more.
    dtype : dtype, default float64
        The dtype of the elements, not of Python objects.
    pin_memory : bool, default False
        Lock the memory, all of it or none: if it exceeds RLIMIT_MEMLOCK, nothing is locked,
        without an error.  ``pool_stats()["bytes_locked"]`` counts what is locked.  Also
        register the memory with the CUDA driver if CUDA is in use.
        ``aio_handle.is_pinned`` is True in any case.
    numa_node : int, optional
        The NUMA node of the memory; default: not bound to a node.

    Returns
    -------
    numpy.ndarray
        C-ordered, page-aligned, populated, and in huge pages if the system has them.  The
        memory returns to the pool when the last reference to it dies.

    Raises
    ------
    MemoryError
        Not enough memory, or over the limit that ``NVMEIO_POOL_BYTES`` sets.
    TypeError, ValueError
        The dtype is of Python objects; an extent is not an integer, negative or too large;
        or the machine has no such NUMA node.
    OSError
        The system refuses to bind memory to a node, as it may in a container.

    Notes
    -----
    Releases the GIL while the kernel provides the memory.  In a forked child the memory is
    a copy, which is neither locked nor registered with a driver.

    Examples
    --------
    >>> array = nvmeio.empty((1000, 1000), np.float32)
    >>> array.shape, array.dtype, array.ctypes.data % 4096
    ((1000, 1000), dtype('float32'), 0)
    """
    if type(dtype).__module__ == "torch":
        raise TypeError(f"dtype is {dtype}; nvmeio.torch.empty() makes tensors")
    dtype = np.dtype(dtype)
    if dtype.hasobject:
        raise TypeError(f"dtype is {dtype}, of Python objects; it must be of plain bytes")
    extents = extents_of(shape)
    nbytes = math.prod(extents) * dtype.itemsize
    if nbytes == 0:
        return np.empty(extents, dtype)
    memory = pool_memory(nbytes, pin_memory, numa_node)
    array: npt.NDArray[Any] = np.ndarray(extents, dtype, memoryview(memory))
    return array
