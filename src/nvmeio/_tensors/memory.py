"""The memory of arrays and tensors, without importing torch."""

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from nvmeio._memory.deferred import Deferred

__all__ = ["bytes_of"]


def bytes_of(value: Any) -> npt.NDArray[np.uint8]:
    """Return the bytes of an array or a dense tensor, in C order.

    One on a device, or that a store has, is copied to host memory.
    """
    if isinstance(value, Deferred):
        value = value.load()
    if isinstance(value, np.ndarray):
        flat = np.ascontiguousarray(value).reshape(-1)
        return flat.view(np.uint8) if flat.nbytes else np.empty(0, np.uint8)
    value = value.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    if value.numel() == 0:
        return np.empty(0, np.uint8)
    # As view() would refuse a dimension of size 1 with an unusual stride.
    flat = value.as_strided((value.numel(),), (1,))
    found: npt.NDArray[np.uint8] = flat.view(sys.modules["torch"].uint8).numpy()
    return found
