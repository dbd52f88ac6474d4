"""The base class of all datasets: samples by position, one gather per batch.

A gather fills the tensors of a batch, and the samples are views of them.
"""

import contextlib
import errno
import os
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, default_collate

from nvmeio._arguments.checks import integer, path_of
from nvmeio._arguments.types import Path
from nvmeio._arrays.indexing import Positions, positions
from nvmeio._files.paths import absolute
from nvmeio._native.file import File
from nvmeio._native.request import Request
from nvmeio.arrays import ArrayFile
from nvmeio.torch.data._identity import CHANGED, Identity, identity_of, require_same
from nvmeio.torch.data._mapping import Mapping, Reopening, mapping_of

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["COMPARED_BYTES", "Flight", "StoredDataset", "beginnings_of", "literal"]

# How many files the repr of a dataset names.
_NAMED_MAX = 3

# How many samples identify the data, and how many bytes of each.
_COMPARED = 64
COMPARED_BYTES = 4096


class Flight:
    """A batch that is being read: its requests, and the parts that are in memory."""

    def __init__(
        self, parts: Iterable[Any], finish: Callable[[list[Any]], list[torch.Tensor]]
    ) -> None:
        self._parts: list[Any] = []
        self._finish = finish
        try:
            for part in parts:
                self._parts.append(part)
        except BaseException:
            part = None
            self.abandon()
            raise

    # A request holds its error, and the error's traceback these frames.  If they held the
    # request, dropped files would stay open until the garbage collector runs.

    def land(self) -> list[torch.Tensor]:
        """Wait, and return the tensors of the batch."""
        try:
            for place in range(len(self._parts)):
                if isinstance(self._parts[place], Request):
                    self._parts[place] = self._parts[place].result()
        except BaseException:
            self.abandon()
            raise
        return self._finish(self._parts)

    def abandon(self) -> None:
        """Cancel the requests, and wait until none is in flight."""
        requests = [part for part in self._parts if isinstance(part, Request)]
        self._parts.clear()
        request: Request | None = None
        for request in requests:
            request.cancel()
        for request in requests:
            # A request of the parent process raises OSError in a forked child.
            with contextlib.suppress(CancelledError, OSError):
                request.exception()
        request = None
        requests.clear()


class StoredDataset(Dataset[Any], ABC):  # type: ignore[misc]  # mypy sees no types of torch
    """The base class of the datasets.

    ``sources`` are paths, which each process opens for itself, or open files and arrays of
    the caller, which are never closed.
    """

    def __init__(
        self, sources: Iterable[Any], transform: Callable[[Any], Any] | None = None
    ) -> None:
        self.transform = transform
        self._sources = [
            absolute(source) if isinstance(source, str | bytes | os.PathLike) else source
            for source in sources
        ]
        self._opened: list[Any] | None = None
        self._mappings = {
            number: mapping
            for number, one in enumerate(self._sources)
            if isinstance(one, np.ndarray) and (mapping := mapping_of(one)) is not None
        }
        # Of each file, by its position: its layout, and which file it is.
        self._seen: dict[int, tuple[Any, Identity]] = {}
        self._closed = False
        # The process that has opened and mapped the sources.
        self._process = os.getpid()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__getitem__" in vars(cls) and "__getitems__" not in vars(cls):
            raise TypeError(
                f"{cls.__qualname__} has a __getitem__ of its own, which batches would not "
                "come through; define __getitems__ too, or pass a transform"
            )

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @property
    @abstractmethod
    def shape(self) -> tuple[Any, ...]:
        """The shape of all samples together; see each dataset."""

    @property
    @abstractmethod
    def dtype(self) -> Any:
        """The dtype of samples; see each dataset."""

    @abstractmethod
    def _begin(self, rows: Positions) -> Flight:
        """Start reading samples, whose positions were checked."""

    @abstractmethod
    def _read(self, rows: Positions) -> list[torch.Tensor]:
        """Read samples, whose positions were checked; return a tensor for each part."""

    @abstractmethod
    def _beginnings(self, rows: Positions) -> Iterator[Any]:
        """Read the first bytes of samples, and yield them in parts."""

    def _contents(self) -> dict[str, Any]:
        """Return a description of the samples, independent of their files' location."""
        rows = np.unique(np.arange(_COMPARED) * (len(self) - 1) // (_COMPARED - 1))
        checksum = 0
        for part in self._beginnings(rows[: len(self)]):
            checksum = zlib.crc32(part, checksum)
        return {"shape": str(self.shape), "dtype": str(self.dtype), "checksum": checksum}

    def _open(self, path: str | bytes) -> Any:
        """Open a path; return an object with ``close()``."""
        return ArrayFile(path)

    def _open_all(self) -> list[Any]:
        """Open all sources."""
        return [self._open_one(number) for number in range(len(self._sources))]

    def _open_one(self, number: int) -> Any:
        """Open a source."""
        source = self._sources[number]
        try:
            one = self._open(source) if isinstance(source, str | bytes) else source
            if isinstance(source, Mapping | Reopening):
                one = source.array()
        except ValueError as error:
            if number not in self._seen:
                raise
            path = source if isinstance(source, str | bytes) else source.path
            words = f"{CHANGED}: {error}"
            raise OSError(errno.ESTALE, words, path) from error
        if isinstance(one, ArrayFile):
            rows = one.shape[0] if one.shape else 1
            end = one.offset + rows * one._row_bytes
            self._check_same(number, one._file, (one.dtype, one.shape[1:]), one.offset, end)
        return one

    def _check_same(
        self,
        number: int,
        file: File,
        layout: Any = None,
        begin: int = 0,
        end: int | None = None,
        *,
        may_grow: bool = True,
    ) -> None:
        """Raise OSError (ESTALE) if a file is not the one the dataset was made from.

        Its samples are in its bytes from `begin` to `end`.
        """
        if number not in self._seen:
            self._seen[number] = layout, identity_of(file, begin, end)
            return
        then, known = self._seen[number]
        if then != layout:
            words = f"{CHANGED}: it is {layout}, and was {then}"
            raise OSError(errno.ESTALE, words, file.path)
        require_same(file, known, may_grow=may_grow)

    def _why_empty(self) -> str:
        """Return why there are no samples, for a message."""
        return f"no samples in {self._names()}"

    @property
    def paths(self) -> tuple[str | bytes, ...]:
        """The absolute paths of the files; sources in memory are left out."""
        found = (
            absolute(source.path) if isinstance(source, ArrayFile | Reopening) else source
            for source in self._sources
        )
        return tuple(path for path in found if isinstance(path, str | bytes))

    @property
    def closed(self) -> bool:
        """Whether the dataset is closed."""
        return self._closed

    def close(self) -> None:
        """Close the files that the dataset has opened; a second call does nothing."""
        self._closed = True
        opened, self._opened = self._opened, None
        if opened is not None:
            self._close_all(opened)

    def _close_all(self, opened: list[Any]) -> None:
        """Close the files that the dataset has opened."""
        for source, one in zip(self._sources, opened, strict=False):
            if isinstance(source, str | bytes | Reopening):
                one.close()

    def __enter__(self) -> "Self":
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
        /,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        name, state = type(self).__name__, " closed" if self._closed else ""
        return (
            f"<nvmeio.torch.{name} {self._names()} shape={self.shape} "
            f"dtype={self.dtype}{state}>"
        )

    def _names(self) -> str:
        """Return the names of the sources for a message; of many, only the first."""
        names = ", ".join(_name_of(source) for source in self._sources[:_NAMED_MAX])
        more = len(self._sources) - _NAMED_MAX
        return f"{names} and {more} more" if more > 0 else names

    def _arrays(self) -> list[Any]:
        """Return the sources, opened in this process."""
        # If two threads do this at once, the files of the first one are dropped.
        if self._closed:
            raise ValueError(f"the dataset of {self._names()} is closed")
        if self._process != os.getpid():
            # A forked child has what its parent opened, and must check it as others do.
            self._sources, self._opened = self._moved(), None
            self._process = os.getpid()
        opened = self._opened
        if opened is None:
            self._opened = opened = self._open_all()
        return opened

    def _rows(self, indices: Any) -> Positions:
        """Check the positions of samples."""
        if self._closed:
            raise ValueError(f"the dataset of {self._names()} is closed")
        count = len(self)
        if count == 0 and np.size(indices):
            raise IndexError(f"the dataset is empty: {self._why_empty()}")
        return positions(indices, count, "index")

    def _batch_rows(self, indices: Any) -> Positions:
        """Check the positions of the samples of a batch."""
        rows = self._rows(indices)
        if rows.ndim != 1:
            raise ValueError(
                f"index is of shape {rows.shape}; that of a batch must be of one axis"
            )
        return rows

    def _sample(self, parts: Sequence[torch.Tensor]) -> Any:
        """Return one sample, with the transform applied."""
        found = parts[0] if self._is_plain() else tuple(parts)
        return found if self.transform is None else self.transform(found)

    def _is_plain(self) -> bool:
        """Return whether a sample is a single tensor, not a tuple."""
        return len(self._sources) == 1

    def _samples(self, columns: list[torch.Tensor]) -> list[Any]:
        """Cut the tensors of a batch into samples, which are views of them."""
        rows = [column.unbind(0) for column in columns]
        found: list[Any] = list(rows[0] if self._is_plain() else zip(*rows, strict=True))
        return found if self.transform is None else [self.transform(one) for one in found]

    def _batch(self, flight: Flight) -> Any:
        """Wait for the samples, and collate them as torch does by default."""
        columns = flight.land()
        if self.transform is not None:
            return default_collate(self._samples(columns))
        return columns[0] if self._is_plain() else columns

    def _samples_of(self, flight: Flight) -> list[Any]:
        """Wait for the samples, and return them as a list."""
        return self._samples(flight.land())

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, list) or (
            isinstance(index, np.ndarray | torch.Tensor) and index.ndim
        ):
            # From a DataLoader(sampler=BatchSampler(...), batch_size=None).
            return self._batch(self._begin(self._batch_rows(index)))
        try:
            row = integer("index", index)
        except TypeError as error:
            raise TypeError(
                f"{error}; torch.utils.data.Subset(dataset, indices) is a part of a dataset"
            ) from None
        return self._sample(self._read(self._rows(row)))

    def __getitems__(self, indices: Any) -> list[Any]:
        """Read the samples of a batch at once; torch's DataLoader calls this."""
        return self._samples(self._read(self._batch_rows(indices)))

    def __iter__(self) -> Iterator[Any]:
        # Python would find __getitem__ by itself, but mypy does not.
        return (self[index] for index in range(len(self)))

    def _moved(self) -> list[Any]:
        """Return the sources for another process, which opens and maps them on demand.

        So an error is raised where samples are read, and not where a worker starts.
        """
        return [
            Reopening.of(one) if isinstance(one, ArrayFile) else self._mappings.get(n, one)
            for n, one in enumerate(self._sources)
        ]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None, "_sources": self._moved()}


def beginnings_of(array: ArrayFile, rows: Positions, nbytes: int) -> npt.NDArray[Any]:
    """Read the first bytes of rows, at most `nbytes` of each."""
    nbytes = min(nbytes, COMPARED_BYTES)
    memory = np.empty((len(rows), nbytes), np.uint8)
    if memory.size:
        offsets = array.offset + rows * array._row_bytes
        array._handle().gather(array._file, offsets, nbytes, memory)
    return memory


def literal(path: Path) -> str | bytes:
    """Return the absolute path of a file; raise FileNotFoundError for a pattern."""
    found = absolute(path)
    name = os.fsdecode(path_of(path))
    if any(mark in name for mark in "*?[{") and not os.path.lexists(found):
        pattern = re.sub(r"\{.*\}", "*", name)
        raise FileNotFoundError(
            errno.ENOENT,
            "No such file; patterns are not expanded: pass a list of paths, such as "
            f"sorted(glob.glob({pattern!r}))",
            os.fspath(path),
        )
    return found


def _name_of(source: Any) -> str:
    """Return the name of a source: its path, or its type if it is in memory."""
    if isinstance(source, ArrayFile | Reopening):
        return repr(source.path)
    if isinstance(source, str | bytes):
        return repr(source)
    if isinstance(source, Mapping):
        return "numpy.ndarray"
    return f"{type(source).__module__}.{type(source).__qualname__}"
