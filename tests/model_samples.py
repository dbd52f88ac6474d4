"""Shared by tests of model files: tensors, and the routes of their bytes."""

import numpy as np
import pytest

import nvmeio

torch = pytest.importorskip("torch")

# Every dtype of torch that the format has.
TORCH_DTYPES = (
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "float8_e4m3fn"),
    *("float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    "float4_e2m1fn_x2",
)
NUMPY_DTYPES = (
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64", "complex64"),
)


def filled(dtype, shape, seed=0):
    """Return a tensor of torch of random bits."""
    dtype = getattr(torch, dtype)
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    numbers = np.random.default_rng([seed, *shape])
    nbytes = int(np.prod(shape)) * dtype.itemsize
    bits = numbers.integers(0, 2 if dtype == torch.bool else 256, nbytes, np.uint8)
    return torch.from_numpy(bits).view(dtype).reshape(shape)


def bits_of(tensor):
    """Return dtype, shape and exact bits of a tensor or an array."""
    if isinstance(tensor, np.ndarray):
        return tensor.dtype, tensor.shape, tensor.tobytes()
    flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))
    return tensor.dtype, tuple(tensor.shape), flat.view(torch.uint8).numpy().tobytes()


def bits_of_all(tensors):
    """Return the same for a dict, in its order."""
    return [(name, *bits_of(tensor)) for name, tensor in tensors.items()]


def outcome(function, *arguments, **options):
    """Return a function's result, or its error."""
    try:
        return function(*arguments, **options)
    except Exception as error:
        return type(error).__name__, str(error)


class Moved:
    """Counts the bytes of each route since it was made."""

    def __init__(self):
        self.before = self.now()

    def now(self):
        return nvmeio.default_handle().stats()

    def __getattr__(self, way):
        """Return the bytes of a route, such as direct."""
        return self.now()[f"bytes_{way}"] - self.before[f"bytes_{way}"]


def in_flight():
    """Return how many requests are in flight."""
    return nvmeio.default_handle().pending
