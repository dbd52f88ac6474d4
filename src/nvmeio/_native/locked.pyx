"""Locked tensors of the pool, for numpy and for every library of tensors that is known."""

import sys

import numpy as np

from nvmeio._arguments.checks import flag, integer
from nvmeio._memory.registry import libraries as _libraries
from nvmeio._memory.registry import library_of
from nvmeio._native import pool


def new_locked(num_elem, example):
    """Make a locked array or tensor; see ``aio_handle.new_cpu_locked_tensor``."""
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
    # An array of no elements has an allocation too: it can be freed once, as any other.
    memory = pool_memory(max(count, 1) * example.dtype.itemsize, True, None)
    return np.frombuffer(memoryview(memory), dtype=example.dtype)[:count]


def free_locked(tensor):
    """Free what new_locked made; see ``aio_handle.free_cpu_locked_tensor``."""
    library = library_of(tensor)
    address = pool.address_of(tensor) if library is None else library.first_address(tensor)
    return pool.free_pinned(address)


def is_locked(buffer):
    """Tell whether memory is pinned; see ``aio_handle.is_pinned``."""
    library = library_of(buffer)
    # A view never leaves the allocation that it views: its first byte tells.
    return (
        pool.is_pinned(pool.address_of(buffer), 1)
        if library is None
        else library.is_pinned(buffer)
    )


def pool_memory(nbytes, pin_memory, numa_node):
    """Take memory from the pool."""
    if nbytes > sys.maxsize:
        raise MemoryError(f"{nbytes} bytes were asked for; addresses end at {sys.maxsize}")
    if not flag("pin_memory", pin_memory):
        return pool.PoolMemory(nbytes, numa_node=numa_node)
    memory = pool.new_pinned(nbytes, numa_node=numa_node)
    for _, library in _libraries:
        library.announce(memory)
    return memory
