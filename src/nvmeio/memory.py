"""Arrays in memory of the pool."""

import math
import operator
from collections.abc import Sequence
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from nvmeio import pool

__all__ = ["empty", "pool_memory"]

Shape = SupportsIndex | Sequence[SupportsIndex]


def empty(
    shape: Shape,
    dtype: npt.DTypeLike = float,
    *,
    pinned: bool = False,
    numa_node: int | None = None,
) -> npt.NDArray[Any]:
    """Make an array in memory of the pool, without initializing it.

    Parameters
    ----------
    shape : int or sequence of int
        The extent of each axis, 0 or more.
    dtype : dtype, default float64
        Of plain bytes.
    pinned : bool, default False
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
        A dtype of Python objects; a negative extent; a node that there is not.
    """
    dtype = np.dtype(dtype)
    if dtype.hasobject:
        raise TypeError(f"the pool has no memory for the Python objects of dtype {dtype}")
    extents = extents_of(shape)
    nbytes = math.prod(extents) * dtype.itemsize
    if nbytes == 0:
        return np.empty(extents, dtype)
    memory = pool_memory(nbytes, pinned, numa_node)
    array: npt.NDArray[Any] = np.ndarray(extents, dtype, memoryview(memory))
    return array


def extents_of(shape: Shape) -> tuple[int, ...]:
    """Return a shape as a tuple.

    Parameters
    ----------
    shape : int or sequence of int
        The extent of each axis.

    Returns
    -------
    tuple of int
        All 0 or more.

    Raises
    ------
    ValueError
        An extent is negative.
    """
    axes = shape if isinstance(shape, Sequence) else (shape,)
    extents = tuple(operator.index(extent) for extent in axes)
    for extent in extents:
        if extent < 0:
            raise ValueError(f"the shape is {extents}; no extent may be negative")
    return extents


def pool_memory(nbytes: int, pinned: bool, numa_node: int | None) -> pool.PoolMemory:
    """Take memory from the pool.

    Parameters
    ----------
    nbytes : int
        Size in bytes, 0 or more.
    pinned : bool
        Lock and mark it.
    numa_node : int or None
        The node whose memory it shall be.

    Returns
    -------
    PoolMemory
        Not initialized.

    Raises
    ------
    MemoryError, ValueError
        As ``empty``.
    """
    if pinned:
        return pool.new_pinned(nbytes, numa_node=numa_node)
    return pool.PoolMemory(nbytes, numa_node=numa_node)
