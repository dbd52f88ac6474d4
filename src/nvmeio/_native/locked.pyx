"""Locked arrays and tensors in the pool's memory, for numpy and each registered library."""

import sys

import numpy as np

from nvmeio._arguments.checks import flag, integer
from nvmeio._memory.registry import libraries as _libraries
from nvmeio._memory.registry import library_of
from nvmeio._native import pool


def new_locked(num_elem, example):
    """Allocate a locked array or tensor; see ``aio_handle.new_cpu_locked_tensor``."""
    count = integer("num_elem", num_elem)
    if count < 0:
        raise ValueError(f"num_elem is {count}; it must be 0 or more")
    if not isinstance(example, np.ndarray):
        library = library_of(example)
        if library is None:
            raise TypeError(
                "example_tensor must be a tensor or a numpy array, not "
                f"{type(example).__qualname__}"
            )
        return library.locked_tensor(count, example)
    if example.dtype.hasobject:
        raise TypeError(f"an array of dtype {example.dtype} holds Python objects")
    # An empty array gets an allocation too, so that it can be freed once like any other.
    memory = pool_memory(max(count, 1) * example.dtype.itemsize, True, None)
    return np.frombuffer(memoryview(memory), dtype=example.dtype)[:count]


def free_locked(tensor):
    """Free a locked array or tensor; see ``aio_handle.free_cpu_locked_tensor``."""
    library = library_of(tensor)
    address = pool.address_of(tensor) if library is None else library.first_address(tensor)
    return pool.free_pinned(address)


def is_locked(buffer):
    """Return whether memory is pinned; see ``aio_handle.is_pinned``."""
    library = library_of(buffer)
    # A view never extends beyond its allocation, so checking its first byte is enough.
    return (
        pool.is_pinned(pool.address_of(buffer), 1)
        if library is None
        else library.is_pinned(buffer)
    )


def pool_memory(nbytes, pin_memory, numa_node):
    """Allocate memory from the pool."""
    if nbytes > sys.maxsize:
        raise MemoryError(f"cannot allocate {nbytes} bytes; the limit is {sys.maxsize}")
    if not flag("pin_memory", pin_memory):
        return pool.PoolMemory(nbytes, numa_node=numa_node)
    memory = pool.new_pinned(nbytes, numa_node=numa_node)
    for _, library in _libraries:
        library.announce(memory)
    return memory
