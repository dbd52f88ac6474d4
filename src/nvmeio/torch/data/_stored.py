"""What all datasets have in common: samples by their positions, one gather a batch.

A batch is a gather: its tensors are filled as a whole, and samples are views of them.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from typing import Any, TypeAlias

import numpy.typing as npt
import torch
from torch.utils.data import Dataset, default_collate

from nvmeio._arguments.checks import integer
from nvmeio._arrays.indexing import Positions, positions
from nvmeio._native.request import Request
from nvmeio.arrays import ArrayFile

__all__ = ["Array", "Flight", "Stored"]

# Where rows come from once it is open: the disk, or memory.
Array: TypeAlias = ArrayFile | npt.NDArray[Any] | torch.Tensor


class Flight:
    """A batch on its way."""

    def __init__(
        self,
        parts: Sequence[Any],
        finish: Callable[[list[Any]], list[torch.Tensor]],
    ) -> None:
        self._parts = parts
        self._finish = finish

    def land(self) -> list[torch.Tensor]:
        """Wait, and return the tensors of the batch."""
        return self._finish(
            [part.result() if isinstance(part, Request) else part for part in self._parts]
        )

    def abandon(self) -> None:
        """Drop what can be dropped, and wait until nothing is in flight."""
        requests = [part for part in self._parts if isinstance(part, Request)]
        for request in requests:
            request.cancel()
        for request in requests:
            with contextlib.suppress(CancelledError):
                request.exception()


class Stored(Dataset, ABC):  # type: ignore[misc]  # mypy sees no types of torch
    """What the datasets of this module have in common."""

    def __init__(self, transform: Callable[[Any], Any] | None = None) -> None:
        self.transform = transform
        self._opened: list[Any] | None = None

    @abstractmethod
    def __len__(self) -> int:
        """Return how many samples there are."""

    @abstractmethod
    def begin(self, rows: Positions) -> Flight:
        """Start reading samples, whose positions were checked."""

    @abstractmethod
    def read(self, rows: Positions) -> list[torch.Tensor]:
        """Read samples, whose positions were checked; return a tensor for each part."""

    @abstractmethod
    def _open(self) -> list[Any]:
        """Open what has a path."""

    def _arrays(self) -> list[Any]:
        """Return what is read from, open in this process."""
        # Two threads may do so at once; what the first one has opened is then dropped.
        if self._opened is None:
            self._opened = self._open()
        return self._opened

    def _rows(self, indices: Any) -> Positions:
        """Check the positions of samples."""
        return positions(indices, len(self), "index")

    def _sample(self, parts: Sequence[torch.Tensor]) -> Any:
        """Return one sample, as the program wants it."""
        found = parts[0] if self._is_plain() else tuple(parts)
        return found if self.transform is None else self.transform(found)

    def _is_plain(self) -> bool:
        """Tell whether a sample is a tensor, not a tuple of several."""
        return len(self._arrays()) == 1

    def _samples(self, columns: list[torch.Tensor]) -> list[Any]:
        """Cut the tensors of a batch into samples, which are views of them."""
        rows = [column.unbind(0) for column in columns]
        found: list[Any] = list(rows[0] if self._is_plain() else zip(*rows, strict=True))
        return found if self.transform is None else [self.transform(one) for one in found]

    def batch(self, flight: Flight) -> Any:
        """Wait for samples, and return what torch's default collate makes of them."""
        columns = flight.land()
        if self.transform is not None:
            return default_collate(self._samples(columns))
        return columns[0] if self._is_plain() else columns

    def __getitem__(self, index: Any) -> Any:
        return self._sample(self.read(self._rows(integer("index", index))))

    def __getitems__(self, indices: Any) -> list[Any]:
        """Read the samples of a batch at once; torch's DataLoader asks for them so."""
        return self._samples(self.read(self._rows(indices)))

    def __getstate__(self) -> dict[str, Any]:
        # Each process opens its own files.
        return {**self.__dict__, "_opened": None}
