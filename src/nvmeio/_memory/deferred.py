"""Tensors that are loaded only when they are needed, and states that contain them."""

from collections.abc import Callable
from typing import Any

__all__ = ["Deferred", "DeferredState"]


class Deferred:
    """A tensor on a drive; `load` returns it in new memory."""

    def __init__(
        self, dtype: Any, shape: tuple[int, ...], nbytes: int, load: Callable[[], Any]
    ) -> None:
        self.dtype, self.shape, self.nbytes, self.load = dtype, shape, nbytes, load


class DeferredState:
    """A state that contains Deferred tensors."""

    def _tree(self) -> Any:
        """Return nested dicts and lists of numbers, text, tensors and Deferred tensors."""
        raise NotImplementedError
