"""Tensors that are loaded only when they are needed, and states that contain them."""

import math
from collections.abc import Callable
from typing import Any

__all__ = ["Deferred", "DeferredState"]


class Deferred:
    """A tensor on a drive; `load` returns it in new memory, with `strides` in elements."""

    def __init__(
        self,
        dtype: Any,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        load: Callable[[], Any],
    ) -> None:
        self.dtype, self.shape, self.strides, self.load = dtype, shape, strides, load
        self.nbytes: int = dtype.itemsize * math.prod(shape)

    def stride(self) -> tuple[int, ...]:
        """Return the strides, as of a tensor."""
        return self.strides

    def element_size(self) -> int:
        """Return the size of an element in bytes, as of a tensor."""
        size: int = self.dtype.itemsize
        return size


class DeferredState:
    """A state that contains Deferred tensors."""

    def _tree(self) -> Any:
        """Return nested dicts and lists of numbers, text, tensors and Deferred tensors."""
        raise NotImplementedError

    def _require_same(self) -> None:
        """Raise RuntimeError if the state has changed since this object was made."""
        raise NotImplementedError
