"""Elements of arrays on disk: which there can be, and arrays as their plain bytes."""

from typing import Any

import numpy as np
import numpy.typing as npt

from nvmeio._arrays.npy_header import check_element
from nvmeio._memory.registry import library_of_dtype

__all__ = ["bytes_of", "element_of", "storable"]


def storable(dtype: Any) -> np.dtype[Any]:
    """Return numpy's dtype for elements that a .npy file can hold."""
    library, element = library_of_dtype(dtype), element_of(dtype)
    if library is not None and element.kind == "V":
        raise TypeError(
            f"the dtype is {dtype}, which numpy and so .npy files do not have; write the "
            "raw bytes, or another dtype of the same width"
        )
    return element


def element_of(dtype: Any) -> np.dtype[Any]:
    """Return numpy's dtype for a dtype of numpy or torch, of plain bytes."""
    library = library_of_dtype(dtype)
    carrier = None if library is None else library.carrier(dtype)
    element = np.dtype(dtype) if carrier is None else carrier
    if element.hasobject:
        raise TypeError(f"elements of dtype {element} are Python objects, not bytes")
    check_element(element)
    return element


def bytes_of(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """View an array as bytes that can be lent: of dates, say, numpy lends none."""
    if array.nbytes == 0:
        return np.empty(0, np.uint8)
    return array.view(np.dtype((np.void, array.dtype.itemsize)))
