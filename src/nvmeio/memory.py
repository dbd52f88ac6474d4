"""Arrays in memory of the pool."""

import math
import sys
from collections.abc import Sequence
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from nvmeio import pool
from nvmeio._registry import libraries
from nvmeio.arguments import flag, integer

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
        A dtype of Python objects; an extent that is no integer, negative or beyond all
        memory; a node that there is not.
    OSError
        The system refuses to bind memory to a node, as containers may.

    Notes
    -----
    Releases the GIL while the kernel provides the memory.  In a forked child the memory is
    a copy, neither locked nor known to a driver.
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
    TypeError, ValueError
        An extent is no integer, or out of range.
    """
    if isinstance(shape, str | bytes):
        raise TypeError(f"the shape is {shape!r}; it must be an integer or several")
    axes = shape if isinstance(shape, Sequence | np.ndarray) else (shape,)
    extents = tuple(integer("an extent", extent) for extent in axes)
    for extent in extents:
        if extent < 0:
            raise ValueError(f"the shape is {extents}; no extent may be negative")
        if extent > sys.maxsize:
            raise ValueError(f"the shape is {extents}; extents end at {sys.maxsize}")
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
    MemoryError, TypeError, ValueError, OSError
        As ``empty``.
    """
    if nbytes > sys.maxsize:
        raise MemoryError(f"{nbytes} bytes were asked for; addresses end at {sys.maxsize}")
    if not flag("pinned", pinned):
        return pool.PoolMemory(nbytes, numa_node=numa_node)
    memory = pool.new_pinned(nbytes, numa_node=numa_node)
    for _, library in libraries:
        library.announce(memory)
    return memory
