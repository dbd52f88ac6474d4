"""The dtypes of the safetensors format, and their names in numpy and torch.

safetensors 0.8.0 looks up these names in numpy and torch, and passes on their errors for
those that they lack.  This module does the same.  numpy has bfloat16 only once ml_dtypes is
imported, and no float8.
"""

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from nvmeio._tensors.errors import SafetensorError

__all__ = [
    "BITS",
    "FORMAT_NAMES",
    "FRAMEWORK_NAMES",
    "RANKS",
    "framework_shape",
    "header_dtype",
    "header_shape",
    "numpy_dtype",
    "torch_dtype",
    "torch_module",
]

# The size of one element, in bits.  The order is that of the enum in safetensors' tensor.rs
# (0.8.0): its messages list the dtypes so, and its writer puts the last dtype first.
BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
RANKS = {dtype: rank for rank, dtype in enumerate(BITS)}

# The names in numpy and torch, in the order of safetensors' message for an unknown dtype.
# No framework has the two F6 dtypes.
FORMAT_NAMES = {
    "bool": "BOOL",
    "int8": "I8",
    "uint8": "U8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float4_e2m1fn_x2": "F4",
    "complex64": "C64",
}
FRAMEWORK_NAMES = {dtype: name for name, dtype in FORMAT_NAMES.items()}


def torch_module(otherwise: str = "") -> Any:
    """Import torch, when it is first needed; `otherwise` is for the error's message."""
    try:
        return importlib.import_module("torch")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        words = f"torch is not installed; install it{otherwise}"
        raise ModuleNotFoundError(words, name="torch") from None


def _framework_name(dtype: str) -> str:
    """Return a dtype's name in numpy and torch; raise SafetensorError for the F6 dtypes."""
    name = FRAMEWORK_NAMES.get(dtype)
    if name is None:
        raise SafetensorError(f"Dtype not understood: {dtype}")
    return name


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """Return numpy's dtype, in native byte order, for a dtype of the format.

    Raise TypeError for bfloat16 without ml_dtypes, AttributeError for the dtypes that numpy
    lacks (F4, F8), and SafetensorError for those that no framework has (F6).
    """
    name = _framework_name(dtype)
    # ml_dtypes registers bfloat16 only by name, and numpy 1.24 to 1.26 has no numpy.bool.
    known = name if name in ("bool", "bfloat16") else getattr(np, name)
    found: np.dtype[Any] = np.dtype(known)
    return found


def torch_dtype(dtype: str) -> Any:
    """Return torch's dtype for a dtype of the format.

    Raise AttributeError for dtypes that this version of torch lacks, and SafetensorError
    for those that no framework has (F6).
    """
    return getattr(torch_module(), _framework_name(dtype))


def header_dtype(name: str) -> str:
    """Return the format's dtype for a name in numpy or torch, such as ``float32``."""
    dtype = FORMAT_NAMES.get(name)
    if dtype is None:
        known = ", ".join(FORMAT_NAMES)
        raise SafetensorError(f'Unknown dtype "{name}". Supported dtypes: {known}')
    return dtype


def header_shape(dtype: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape in the header for a shape in numpy or torch.

    They differ for F4: along the last dimension, torch counts pairs of elements.
    """
    if dtype == "F4" and shape:
        return (*shape[:-1], shape[-1] * 2)
    return tuple(shape)


def framework_shape(dtype: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape in numpy or torch for a shape in the header."""
    if dtype != "F4" or not shape:
        return tuple(shape)
    if shape[-1] % 2:
        raise SafetensorError(
            "f4_x2 dtype requires that the last dim be divisible by 2 in torch: "
            f"got {list(shape)}"
        )
    return (*shape[:-1], shape[-1] // 2)
