"""Convert between torch tensors and numpy arrays, also for dtypes that numpy lacks.

Such elements are in the array as opaque bytes of the same size, its carrier dtype.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nvmeio.torch._bits import OPAQUE_DTYPES, opaque

__all__ = ["carrier", "is_common", "to_carrier", "to_tensor"]

# The dtypes that torch.from_numpy() and Tensor.numpy() support.
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
    """Return the carrier dtype for a dtype of torch; None for others and quantized ones."""
    if not isinstance(dtype, torch.dtype) or str(dtype).startswith("torch.q"):
        return None
    common = _COMMON.get(dtype)
    return np.dtype(f"V{dtype.itemsize}") if common is None else np.dtype(common)


def is_common(dtype: np.dtype[Any]) -> bool:
    """Return whether torch supports a dtype of numpy."""
    return any(dtype == common for common in _COMMON.values())


def to_tensor(array: npt.NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
    """Convert an array of the carrier dtype to a tensor."""
    if dtype not in _COMMON:
        array = array.view(_COMMON[OPAQUE_DTYPES[dtype.itemsize]])
    return torch.from_numpy(array).view(dtype)


def to_carrier(values: Any, dtype: torch.dtype) -> npt.NDArray[Any]:
    """Convert values to an array of the carrier dtype."""
    if isinstance(values, np.ndarray):
        # torch refuses other byte orders, negative strides and read-only memory.
        reverse = min(values.strides, default=0) < 0
        if reverse or not (values.dtype.isnative and values.flags.writeable):
            values = values.astype(values.dtype.newbyteorder("="), order="C")
    with torch._C.DisableTorchFunctionSubclass():
        tensor = torch.as_tensor(values).detach().to("cpu", dtype)
        tensor = tensor.resolve_conj().resolve_neg()
    array: npt.NDArray[Any]
    if dtype in _COMMON:
        array = tensor.numpy()
    else:
        array = opaque(tensor).contiguous().numpy().view(carrier(dtype))
    return array
