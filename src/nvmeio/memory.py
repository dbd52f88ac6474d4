"""Arrays in memory of the pool."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from nvmeio._arguments.checks import Shape, extents_of
from nvmeio._arguments.keywords import suggesting
from nvmeio._native.locked import pool_memory

__all__ = ["empty"]


@suggesting
def empty(
    shape: Shape,
    dtype: npt.DTypeLike = float,
    *,
    pin_memory: bool = False,
    numa_node: int | None = None,
) -> npt.NDArray[Any]:
    """Make an array in memory of the pool, without initializing it.

    Parameters
    ----------
    shape : int or sequence of int
        The extent of each axis, 0 or more.
    dtype : dtype, default float64
        Of plain bytes.
    pin_memory : bool, default False
        Lock the memory where RLIMIT_MEMLOCK allows, and have ``is_pinned`` know it; where
        CUDA is in use, register it with the driver.
    numa_node : int, optional
        The node whose memory it shall be; by default where the system likes.

    Returns
    -------
    numpy.ndarray
        In C order; page-aligned, populated, in huge pages where the system has them.  The
        memory goes back to the pool when the last reference to it dies.

    Raises
    ------
    MemoryError
        The pool may not hold so much (NVMEIO_POOL_BYTES), or the system has not so much.
    TypeError, ValueError
        A dtype of Python objects; an extent that is no integer, negative or beyond all
        memory; a node that there is not.
    OSError
        The system refuses to bind memory to a node, as containers may.

    Notes
    -----
    Releases the GIL while the kernel provides the memory.  In a forked child the memory is
    a copy, neither locked nor known to a driver.

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
        raise TypeError(f"the pool has no memory for the Python objects of dtype {dtype}")
    extents = extents_of(shape)
    nbytes = math.prod(extents) * dtype.itemsize
    if nbytes == 0:
        return np.empty(extents, dtype)
    memory = pool_memory(nbytes, pin_memory, numa_node)
    array: npt.NDArray[Any] = np.ndarray(extents, dtype, memoryview(memory))
    return array
