"""Memory for streams: of the pool, or a region of its own."""

from typing import Any

import numpy as np
import numpy.typing as npt

from nvmeio._native.region import Region
from nvmeio.memory import empty

__all__ = ["Bytes", "memory"]

Bytes = npt.NDArray[np.uint8]


def memory(nbytes: int) -> Bytes:
    """Return memory of the pool, or new memory if the pool is exhausted."""
    try:
        return empty(nbytes, np.uint8)
    except MemoryError:
        region: Any = Region(nbytes)
        region.populate(0, nbytes)
        return np.frombuffer(region, np.uint8)
