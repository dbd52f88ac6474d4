"""Memory for streams: of the pool, or a region of its own."""

from typing import Any

import numpy as np
import numpy.typing as npt

from nvmeio._arguments.units import in_binary
from nvmeio._memory import available
from nvmeio._native.pool import pool_trim
from nvmeio._native.region import Region
from nvmeio.memory import empty

__all__ = ["Bytes", "memory", "require_available"]

Bytes = npt.NDArray[np.uint8]


def memory(nbytes: int) -> Bytes:
    """Return memory of the pool, or new memory if the pool is exhausted."""
    try:
        return empty(nbytes, np.uint8)
    except MemoryError:
        region: Any = Region(nbytes)
        region.populate(0, nbytes)
        return np.frombuffer(region, np.uint8)


def require_available(nbytes: int, what: str) -> None:
    """Raise MemoryError if fewer bytes are available, before allocating any.

    The pool's free memory is returned to the system if that is needed.
    """
    free = available.available_bytes()
    if nbytes > free and pool_trim():
        free = available.available_bytes()
    if nbytes > free:
        raise MemoryError(
            f"{what} needs {in_binary(nbytes)} of memory, and {in_binary(free)} are free"
        )
