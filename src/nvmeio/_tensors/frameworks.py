"""Make numpy arrays or torch tensors from memory, behind one interface."""

from typing import Any, Protocol

import numpy as np

from nvmeio._native.region import FileMap, Region
from nvmeio._tensors.dtypes import (
    framework_shape,
    numpy_dtype,
    torch_dtype,
    torch_module,
)
from nvmeio._tensors.errors import SafetensorError

__all__ = ["Framework", "NumPy", "Torch", "framework_of"]


class Framework(Protocol):
    """What numpy and torch must provide to make tensors."""

    # Whether the tensors are in host memory, which files can be read into directly.
    on_host: bool
    # Whether the tensors are torch's.
    by_torch: bool

    def dtype(self, dtype: str) -> Any:
        """Return the framework's dtype for one of a header; raise as safetensors does."""

    def shape(self, dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the framework's shape for one of a header."""

    def over(
        self,
        region: Region | FileMap,
        begin: int,
        nbytes: int,
        dtype: Any,
        shape: tuple[int, ...],
    ) -> Any:
        """Make a tensor over part of a region, which it keeps alive; a copy on a device."""

    def empty(self, dtype: Any, shape: tuple[int, ...]) -> Any:
        """Make a new tensor."""

    def copy(self, tensor: Any) -> Any:
        """Return a copy of a tensor, in new memory."""


class NumPy:
    """Arrays of numpy."""

    on_host = True
    by_torch = False

    def dtype(self, dtype: str) -> Any:
        return numpy_dtype(dtype)

    def shape(self, dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def over(
        self,
        region: Region | FileMap,
        begin: int,
        nbytes: int,
        dtype: Any,
        shape: tuple[int, ...],
    ) -> Any:
        span: Any = region.span(begin, begin + nbytes)
        return np.frombuffer(span, dtype).reshape(shape)

    def empty(self, dtype: Any, shape: tuple[int, ...]) -> Any:
        return np.empty(shape, dtype)

    def copy(self, tensor: Any) -> Any:
        return tensor.copy()


class Torch:
    """Tensors of torch, on the CPU or elsewhere."""

    by_torch = True

    def __init__(self, device: Any = "cpu") -> None:
        self.torch = torch_module(', or pass framework="np" for arrays')
        self.device = _device(self.torch, device)
        self.on_host = self.device.type == "cpu"

    def dtype(self, dtype: str) -> Any:
        return torch_dtype(dtype)

    def shape(self, dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return framework_shape(dtype, shape)

    def over(
        self,
        region: Region | FileMap,
        begin: int,
        nbytes: int,
        dtype: Any,
        shape: tuple[int, ...],
    ) -> Any:
        span = region.span(begin, begin + nbytes)
        made = self.torch.frombuffer(span, dtype=dtype).view(shape)
        return made if self.on_host else made.to(self.device)

    def empty(self, dtype: Any, shape: tuple[int, ...]) -> Any:
        return self.torch.empty(shape, dtype=dtype, device=self.device)

    def copy(self, tensor: Any) -> Any:
        return tensor.clone()


def _device(torch: Any, device: Any) -> Any:
    """Return a torch device; raise the error of safetensors for an invalid one."""
    try:
        found = torch.device("cpu" if device is None else device)
    except RuntimeError:
        raise SafetensorError(f"device {device} is invalid") from None
    if found.type == "meta":
        raise SafetensorError(f"device {device} is invalid")
    return found


_NAMES: dict[str, Any] = dict.fromkeys(("np", "numpy"), NumPy)
_NAMES |= dict.fromkeys(("pt", "torch", "pytorch"), Torch)


def framework_of(name: str, device: Any) -> Framework:
    """Return the framework for a name, as in ``safe_open``'s parameter `framework`."""
    kind = _NAMES.get(name)
    if kind is None:
        raise SafetensorError(f"framework {name} is invalid")
    if kind is Torch:
        return Torch(device)
    if str(device) not in ("cpu", "None"):
        raise SafetensorError(f"Device {device} is not supported for framework numpy")
    return NumPy()
