"""Datasets of arrays on disk, for torch's DataLoader and for a stream without workers.

A batch is a gather: its tensors are filled as a whole, and samples are views of them.
"""

import contextlib
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from concurrent.futures import CancelledError
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, Subset, default_collate

from nvmeio._arguments.checks import integer, whole
from nvmeio._arguments.keywords import suggesting
from nvmeio._arguments.types import Path
from nvmeio._arrays.indexing import Positions, positions
from nvmeio._files.paths import absolute
from nvmeio._native.request import Request
from nvmeio.arrays import ArrayFile
from nvmeio.torch._dtypes import carrier, is_common

__all__ = ["ArrayDataset", "BatchStream", "TokenDataset"]

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
        self._opened: list[Array] | None = None

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
    def _open(self) -> list[Array]:
        """Open what has a path."""

    def _arrays(self) -> list[Array]:
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


class ArrayDataset(Stored):
    """The rows of arrays, as a map-style dataset.

    Parameters
    ----------
    *arrays : path, ArrayFile, numpy.ndarray or torch.Tensor
        At least one, all of the same length.  A path is that of a .npy file; raw bytes, or
        a handle of the caller's, come as an ArrayFile.  What is in memory stays there, as
        labels may.
    transform : callable, optional
        Is applied to each sample, in the process that reads it.

    Raises
    ------
    OSError
        A file cannot be opened; with errno and path.
    TypeError
        There is no array, or tensors have no such elements: records, dates, text, the other
        byte order, masked ones.
    ValueError
        A file is no array, see ``ArrayFile``; the lengths differ.

    Notes
    -----
    Sample ``i`` is row ``i`` as a tensor, or a tuple with the row of each array; -1 is the
    last one.  ``IndexError`` names an index that there is not.

    A batch of a DataLoader is one gather for each array, and its samples are views of one
    tensor.  The files are opened at once, and again by each process that the dataset is
    sent to, and closed when it is dropped; it can be pickled and forked, so any number of
    workers may be started in any way.

    A ``torch.utils.data.ConcatDataset`` asks for its samples one by one, and so reads them
    one by one.
    """

    @suggesting
    def __init__(
        self,
        *arrays: Path | Array,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(transform)
        if not arrays:
            raise TypeError("a dataset needs at least one array")
        kinds = (ArrayFile, np.ndarray, torch.Tensor)
        for place, array in enumerate(arrays):
            if not isinstance(array, (*kinds, str, bytes, os.PathLike)):
                raise TypeError(
                    f"array {place} is of type {type(array).__qualname__}; it must be a "
                    "path, an ArrayFile, an array or a tensor"
                )
        self._sources = [
            array if isinstance(array, kinds) else absolute(array) for array in arrays
        ]
        opened = self._arrays()
        for place, array in enumerate(opened):
            _check_elements(array, f"array {place}")
        lengths = [len(array) for array in opened]
        if len(set(lengths)) > 1:
            raise ValueError(
                f"the arrays have {lengths} rows; all must have the same number"
            )

    def _open(self) -> list[Array]:
        if not any(isinstance(source, str | bytes) for source in self._sources):
            return list(self._sources)
        return [
            ArrayFile(source) if isinstance(source, str | bytes) else source
            for source in self._sources
        ]

    def __len__(self) -> int:
        return len(self._arrays()[0])

    def begin(self, rows: Positions) -> Flight:
        """Start reading rows, whose positions were checked."""
        parts: list[Any] = []
        try:
            for array in self._arrays():
                if isinstance(array, ArrayFile):
                    parts.append(array.prefetch(rows))
                else:
                    parts.append(_taken(array, rows))
        except BaseException:
            Flight(parts, _tensors).abandon()
            raise
        return Flight(parts, _tensors)

    def read(self, rows: Positions) -> list[torch.Tensor]:
        """Read rows, whose positions were checked: in the calling thread where it can."""
        arrays = self._arrays()
        if len(arrays) > 1:
            return self.begin(rows).land()
        return _tensors([_taken(arrays[0], rows)])


class TokenDataset(Stored):
    """Windows of a file of tokens, for the training of language models.

    Parameters
    ----------
    path : str, bytes or os.PathLike
        A .npy file of one axis; or, where ``dtype`` is given, raw bytes.
    block_size : int
        How many tokens a window has, 1 or more.
    dtype : dtype of numpy or torch, optional
        Of raw bytes: integers.

    Raises
    ------
    OSError
        The file cannot be opened; with errno and path.
    TypeError
        The tokens are no integers, or an argument is of the wrong type.
    ValueError
        The file is no array of one axis, see ``ArrayFile``; ``block_size`` is out of range.

    Notes
    -----
    Sample ``i`` is the pair of the tokens from ``i`` on and of those that follow each of
    them, ``tokens[i : i + block_size]`` and ``tokens[i + 1 : i + block_size + 1]``: int64
    tensors.  There are as many samples as windows that have a next token, none where the
    file is too short; a random sampler makes random windows of them, and a ``Subset`` of
    ``range(0, len(dataset), block_size)`` those that do not overlap.  Otherwise as
    ``ArrayDataset``: one gather a batch.
    """

    @suggesting
    def __init__(self, path: Path, block_size: int, dtype: Any = None) -> None:
        super().__init__()
        self._path = absolute(path)
        self._dtype = carrier(dtype) or dtype
        self.block_size = whole("block_size", block_size, 1, 2**63 - 1)
        tokens = self._tokens()
        if tokens.ndim != 1:
            raise ValueError(f"the tokens are of shape {tokens.shape}; they need one axis")
        if tokens.dtype.kind not in "iu":
            raise TypeError(f"the tokens are of dtype {tokens.dtype}, not of integers")

    def _open(self) -> list[Array]:
        return [ArrayFile(self._path, dtype=self._dtype)]

    def _tokens(self) -> ArrayFile:
        """Return the open file."""
        return cast(ArrayFile, self._arrays()[0])

    def _is_plain(self) -> bool:
        return False

    def __len__(self) -> int:
        return max(0, len(self._tokens()) - self.block_size)

    def begin(self, rows: Positions) -> Flight:
        """Start reading windows, whose positions were checked."""
        request = self._tokens().prefetch_windows(rows, self.block_size + 1)
        return Flight([request], self._pairs)

    def read(self, rows: Positions) -> list[torch.Tensor]:
        """Read windows, whose positions were checked."""
        return self._pairs([self._tokens().windows(rows, self.block_size + 1)])

    @staticmethod
    def _pairs(results: list[npt.NDArray[Any]]) -> list[torch.Tensor]:
        """Return the windows and their continuations, in memory of their own."""
        (windows,) = results
        halves = (windows[..., :-1], windows[..., 1:])
        return [torch.from_numpy(half.astype(np.int64, order="C")) for half in halves]


class BatchStream:
    """Batches of a dataset, of which the next are on their way: no worker processes.

    Parameters
    ----------
    dataset : ArrayDataset or TokenDataset
        Or a ``torch.utils.data.Subset`` of one.
    sampler : iterable of sequences of int
        The indices of each batch, as ``torch.utils.data.BatchSampler`` gives them.  A
        generator gives them to one iteration only.
    depth : int, default 2
        How many batches are being read while the program has one, 1 or more.

    Raises
    ------
    TypeError
        The dataset is of another kind; the batch sampler is not iterable; ``depth`` is no
        integer.
    ValueError
        ``depth`` is less than 1.

    Notes
    -----
    Each iteration goes through the sampler once and yields, for each batch, what a
    DataLoader with the default collate would.  Without a transform, the tensors of an
    ArrayDataset are those that were read into; tokens are converted once.  Transforms run
    in the thread that iterates.  What goes wrong with a batch, or in the sampler, is raised
    where that batch would come, and ends the iteration.
    An iteration that is abandoned or closed waits until nothing of it is in flight.

    For distributed training, a ``DistributedSampler`` inside of the ``BatchSampler`` gives
    each rank its part; its ``set_epoch`` is still the program's to call.
    """

    @suggesting
    def __init__(
        self,
        dataset: Stored | Subset[Any],
        sampler: Iterable[Sequence[int]],
        depth: int = 2,
    ) -> None:
        if not isinstance(sampler, Iterable):
            raise TypeError(
                f"the batch sampler is {sampler!r}; it must be iterable, such as a "
                "torch.utils.data.BatchSampler"
            )
        self.dataset = dataset
        self.sampler = sampler
        self.depth = whole("depth", depth, 1, 2**63 - 1)
        self._stored = _stored_below(dataset)

    def __len__(self) -> int:
        if not isinstance(self.sampler, Sized):
            raise TypeError("the batch sampler has no length")
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.sampler)
        ahead: deque[Flight | Exception] = deque()
        more = True
        try:
            while True:
                # The first is the one that comes next.
                while more and len(ahead) <= self.depth:
                    try:
                        ahead.append(self._begin(next(batches)))
                    except StopIteration:
                        more = False
                    except Exception as error:
                        ahead.append(error)
                        more = False
                if not ahead:
                    return
                if isinstance(ahead[0], Exception):
                    raise ahead[0]
                batch = self._stored.batch(ahead[0])
                ahead.popleft()
                yield batch
        finally:
            for flight in ahead:
                if isinstance(flight, Flight):
                    flight.abandon()

    def _begin(self, indices: Any) -> Flight:
        """Start reading a batch."""
        if not isinstance(indices, Sequence | np.ndarray | torch.Tensor):
            raise TypeError(
                f"the batch sampler gave {indices!r}, not the indices of a batch; a "
                "sampler of single indices goes into a torch.utils.data.BatchSampler"
            )
        dataset = self.dataset
        while isinstance(dataset, Subset):
            indices = [dataset.indices[index] for index in indices]
            dataset = dataset.dataset
        return self._stored.begin(self._stored._rows(indices))


def _stored_below(dataset: Any) -> Stored:
    """Return the dataset that subsets are of."""
    found = dataset
    while isinstance(found, Subset):
        found = found.dataset
    if not isinstance(found, Stored):
        raise TypeError(
            f"the dataset is of type {type(dataset).__qualname__}; a stream reads an "
            "ArrayDataset or a TokenDataset, or a Subset of one"
        )
    return found


def _check_elements(array: Array, name: str) -> None:
    """Refuse elements that tensors do not have."""
    dtype: Any = array.dtype
    if not isinstance(dtype, torch.dtype) and not is_common(dtype):
        path = f" {array.path!r}" if isinstance(array, ArrayFile) else ""
        raise TypeError(f"{name}{path} is of dtype {dtype}, which tensors do not have")
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(
            f"{name} is masked, and its mask would be lost; pass array.data, or "
            "array.filled()"
        )


def _taken(array: Array, rows: Positions) -> Any:
    """Read, or copy, rows whose positions were checked."""
    if isinstance(array, ArrayFile):
        return array.gather(rows)
    if isinstance(array, torch.Tensor):
        return array[torch.from_numpy(rows)]
    return np.asarray(np.take(array, rows, axis=0))


def _tensors(results: list[Any]) -> list[torch.Tensor]:
    """Return arrays as tensors of the same memory."""
    return [
        one if isinstance(one, torch.Tensor) else torch.from_numpy(one) for one in results
    ]
