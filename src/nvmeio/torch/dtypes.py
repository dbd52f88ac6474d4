"""Elements of tensors as elements of numpy arrays: of torch's dtypes, numpy lacks some."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nvmeio.torch.bits import OPAQUE_DTYPES, opaque

__all__ = ["carrier", "dress", "is_common", "undress"]

# What torch.from_numpy() takes and Tensor.numpy() gives.
_COMMON: dict[torch.dtype, type[np.generic]] = {
    torch.bool: np.bool_,
    torch.uint8: np.uint8,
    torch.uint16: np.uint16,
    torch.uint32: np.uint32,
    torch.uint64: np.uint64,
    torch.int8: np.int8,
    torch.int16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.float16: np.float16,
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.complex64: np.complex64,
    torch.complex128: np.complex128,
}


def carrier(dtype: object) -> np.dtype[Any] | None:
    """Return numpy's dtype for the elements of a tensor.

    Parameters
    ----------
    dtype : object
        A dtype of torch, or anything else.

    Returns
    -------
    numpy.dtype or None
        The same one where numpy has it; else, as for bfloat16, bytes that mean nothing to
        numpy.  None for what is no dtype of torch, or one of quantized elements.
    """
    if not isinstance(dtype, torch.dtype) or str(dtype).startswith("torch.q"):
        return None
    common = _COMMON.get(dtype)
    return np.dtype(f"V{dtype.itemsize}") if common is None else np.dtype(common)


def is_common(dtype: np.dtype[Any]) -> bool:
    """Tell whether torch has the elements of a dtype of numpy.

    Parameters
    ----------
    dtype : numpy.dtype
        Any.

    Returns
    -------
    bool
        False for records, dates and text, and for the other byte order.
    """
    return any(dtype == common for common in _COMMON.values())


def dress(array: npt.NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
    """Make a tensor of an array of carriers.

    Parameters
    ----------
    array : numpy.ndarray
        In C order, writable, of the dtype that ``carrier`` gives.
    dtype : torch.dtype
        What its elements are.

    Returns
    -------
    torch.Tensor
        Of the same shape and memory.
    """
    if dtype not in _COMMON:
        array = array.view(_COMMON[OPAQUE_DTYPES[dtype.itemsize]])
    return torch.from_numpy(array).view(dtype)


def undress(values: Any, dtype: torch.dtype) -> npt.NDArray[Any]:
    """Make an array of carriers.

    Parameters
    ----------
    values : tensor, array_like or number
        What can be made a tensor of ``dtype``.
    dtype : torch.dtype
        What its elements shall be.

    Returns
    -------
    numpy.ndarray
        Of the dtype that ``carrier`` gives; it may share the memory of ``values``.
    """
    tensor = torch.as_tensor(values).detach().to("cpu", dtype)
    tensor = tensor.resolve_conj().resolve_neg()
    array: npt.NDArray[Any]
    if dtype in _COMMON:
        array = tensor.numpy()
    else:
        array = opaque(tensor).contiguous().numpy().view(carrier(dtype))
    return array
