"""Tensors that are loaded when it is their turn, and states that have such tensors."""

from collections.abc import Callable
from typing import Any

__all__ = ["Deferred", "DeferredState"]


class Deferred:
    """A tensor that is on a drive; `load` returns it, in memory of its own."""

    def __init__(
        self, dtype: Any, shape: tuple[int, ...], nbytes: int, load: Callable[[], Any]
    ) -> None:
        self.dtype, self.shape, self.nbytes, self.load = dtype, shape, nbytes, load


class DeferredState:
    """What nests Deferred tensors."""

    def _tree(self) -> Any:
        """Return dicts and lists of numbers, words, tensors and Deferred ones."""
        raise NotImplementedError
