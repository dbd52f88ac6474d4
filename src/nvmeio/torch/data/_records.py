"""``RecordDataset``: records of any sizes, in one file or many, as a dataset."""

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from multiprocessing.context import get_spawning_popen
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import default_collate

from nvmeio._arguments.checks import has_integers, shown
from nvmeio._arguments.types import Path
from nvmeio._arrays.indexing import Positions, array_of
from nvmeio._native.file import File, owned
from nvmeio._native.gather import NewBytes
from nvmeio._native.request import Request
from nvmeio.default import default_handle
from nvmeio.torch.data._dataset import COMPARED_BYTES, Flight, StoredDataset, literal
from nvmeio.torch.data._identity import Identity, identity_of
from nvmeio.torch.data._mapping import Mapping, mapping_of

__all__ = [
    "CHECKED_AT_ONCE",
    "OpenFiles",
    "RecordDataset",
    "SharedArray",
    "known_file",
    "paths_of",
]

Integers = npt.NDArray[np.integer[Any]]

# How many files a dataset keeps open.  Each needs up to two descriptors, and the usual
# limit of a process is 1024.
_OPEN_MAX = 128

# How many records are checked at once, which limits the memory for the checks.
CHECKED_AT_ONCE = 1 << 20

# Indices of this size or more are shared between processes, which costs each a descriptor.
_SHARED_MIN = 1 << 20


class SharedArray:
    """An array of integers that is shared with worker processes instead of copied."""

    def __init__(self, array: Any, mapping: Mapping | None = None) -> None:
        self._mapping = mapping
        self._array: Integers | None = None
        if mapping is None:
            self._array = np.asarray(array)
            self._mapping = mapping_of(self._array)
        self._shared: torch.Tensor | None = None
        # The process that has mapped the array.
        self._process = os.getpid()

    @property
    def array(self) -> Integers:
        """The array; raise OSError (ESTALE) if it cannot be mapped in this process."""
        array = self._array
        if self._mapping is not None and self._process != os.getpid():
            array = None
        if array is None:
            assert self._mapping is not None
            self._array = array = self._mapping.array()
            self._process = os.getpid()
        return array

    def __len__(self) -> int:
        # Also where the array cannot be mapped.
        return len(self.array) if self._mapping is None else self._mapping.shape[0]

    def __getitem__(self, rows: Any) -> Any:
        return self.array[rows].astype(np.int64, copy=False)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._mapping is not None:
            return SharedArray, (None, self._mapping)
        # Only while a process is being started can torch pass shared memory.
        if get_spawning_popen() is not None and self.array.nbytes >= _SHARED_MIN:
            # /dev/shm may be too small; then the array is copied.
            with contextlib.suppress(RuntimeError):
                if self._shared is None:
                    native = self.array.astype(self.array.dtype.newbyteorder("="))
                    self._shared = torch.from_numpy(native).share_memory_()
                    self._array = self._shared.numpy()
                return SharedArray, (self._shared,)
        return SharedArray, (self.array,)


class RecordDataset(StoredDataset):
    """Records of any sizes, as a map-style dataset.

    Parameters
    ----------
    path : path, or sequence of paths
        The file or files with the records.
    offsets : array_like of int, shape (n,)
        The offset of each record in its file, in bytes.
    sizes : array_like of int, shape (n,)
        The size of each record in bytes; 0 is allowed.
    files : array_like of int, shape (n,), optional
        The index in ``path`` of each record's file.  Required with several files.
    transform : callable, optional
        A function that is applied to each record, in the process that reads it.

    Raises
    ------
    OSError
        A file cannot be opened; has errno and path.  ESTALE: the file of a memory map ends
        before the map does.
    TypeError
        An argument is of the wrong type; the arrays are not of integers.
    ValueError
        The arrays have different lengths; an element is negative or out of range; a record
        ends after its file does.  The message names the first of them.

    Notes
    -----
    Sample ``i`` is record ``i``: a uint8 tensor of its bytes, or what ``transform`` returns
    for it.  -1 is the last one.

    A batch of a DataLoader is one gather for each file, all of them in flight at once.  Its
    records are views of one tensor.  Records of different sizes cannot be stacked: pass a
    ``collate_fn``, or a ``transform`` that makes them equal.

    Arrays, also of ``numpy.memmap``, of small integers or of views, are not copied and must
    not change afterwards.  Files are opened when they are first needed, in each process;
    at most 128 stay open.  A file that was truncated while it was open raises an OSError,
    ENODATA, with its path.  One that is opened again, also in a worker, raises ESTALE if it
    is shorter, or if its first, middle or last 4 KiB differ.  These are compared if its
    number or times differ, or if it was changed less than 2 s before the dataset was made.
    So a touch or a copy disturbs nobody, and a change between these blocks is not found.

    Examples
    --------
    >>> import torch
    >>> nvmeio.write_file(bytes(range(10)), "records.bin")
    10
    >>> dataset = nvmeio.torch.RecordDataset("records.bin", [0, 4], [4, 6])
    >>> dataset[0]
    tensor([0, 1, 2, 3], dtype=torch.uint8)
    """

    # The dtype of records, and the unit of `sizes`.
    _dtype = torch.uint8

    # Whether a file may have grown since the dataset was made.
    _may_grow = True
    # Whether records are read as bytes objects instead of tensors.
    _as_bytes = False

    def __init__(
        self,
        path: Path | Sequence[Path],
        offsets: npt.ArrayLike,
        sizes: npt.ArrayLike,
        *,
        files: npt.ArrayLike | None = None,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        self._make(paths_of(path), offsets, sizes, files, transform)

    def _make(
        self,
        paths: list[str | bytes],
        offsets: npt.ArrayLike,
        sizes: npt.ArrayLike,
        files: npt.ArrayLike | None,
        transform: Callable[[Any], Any] | None,
        known: Sequence[Identity] = (),
    ) -> None:
        """Make the dataset, of files that must still be the known ones."""
        self._offsets = SharedArray(_integers("offsets", offsets))
        self._sizes = SharedArray(_integers("sizes", sizes))
        self._files = None if files is None else SharedArray(_integers("files", files))
        for name, array in (("sizes", self._sizes), ("files", self._files)):
            if array is not None and len(array) != len(self._offsets):
                raise ValueError(
                    f"there are {len(self._offsets)} offsets and {len(array)} {name}; "
                    "the numbers must be equal"
                )
        if self._files is None and len(paths) != 1:
            raise TypeError(
                f"there are {len(paths)} paths and no files; pass files, the index in path "
                "of each record's file"
            )
        ends = self._take(paths, transform, known)
        itemsize = self._dtype.itemsize
        _check(self._sources, ends, self._offsets, self._sizes, self._files, itemsize)

    def _take(
        self,
        paths: list[str | bytes],
        transform: Callable[[Any], Any] | None,
        known: Sequence[Identity],
    ) -> list[int]:
        """Take files, which must still be the known ones; return the size of each."""
        super().__init__(paths, transform)
        self._seen.update((number, (None, one)) for number, one in enumerate(known))
        return [self._size_of(number) for number in range(len(self._sources))]

    def _size_of(self, number: int) -> int:
        """Return the size of a file, and remember which one it is."""
        with self._file_of(number) as file:
            return file.size

    def _check_file(self, number: int, file: File) -> None:
        """Raise OSError if a file is not the one that the index describes."""
        self._check_same(number, file, may_grow=self._may_grow)

    def _open_all(self) -> list[Any]:
        return [OpenFiles(self._file_of)]

    def _file_of(self, number: int) -> File:
        """Open a file."""
        file = owned(File(self._sources[number]))
        self._check_file(number, file)
        return file

    def __len__(self) -> int:
        return len(self._offsets)

    @property
    def shape(self) -> tuple[int]:
        """The number of records, as a tuple."""
        return (len(self),)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of records."""
        return self._dtype

    def _is_plain(self) -> bool:
        return True

    def _beginnings(self, rows: Positions) -> Iterator[Any]:
        numbers, offsets, sizes = self._places(rows)
        sizes = sizes * self._dtype.itemsize
        if numbers is None:
            numbers = np.zeros_like(rows)
        yield sizes
        for number in np.unique(numbers):
            own = numbers == number
            counts = np.minimum(sizes[own], COMPARED_BYTES)
            memory = np.empty(counts.sum(), np.uint8)
            if memory.size:
                file = self._arrays()[0].file(int(number))
                default_handle().gather(file, offsets[own], counts, memory)
            yield memory

    def _begin(self, rows: Positions) -> Flight:
        """Start reading records, whose positions were checked."""
        batch = _Batch(self, rows)
        files: OpenFiles = self._arrays()[0]
        requests = (
            files.begin(
                number,
                default_handle().submit_gather,
                offsets,
                sizes,
                batch.memory,
                out_offsets=places,
            )
            for number, offsets, sizes, places in batch.gathers()
        )
        return Flight(requests, batch.samples)

    def _read(self, rows: Positions) -> list[Any]:
        """Read records, whose positions were checked; one file in the calling thread."""
        batch = _Batch(self, rows)
        gathers = batch.gathers()
        if len(gathers) > 1:
            return self._begin(rows).land()
        for number, offsets, sizes, places in gathers:
            file = self._arrays()[0].file(number)
            default_handle().gather(file, offsets, sizes, batch.memory, out_offsets=places)
        return batch.samples([])

    def _places(self, rows: Positions) -> tuple[Any, Positions, Positions]:
        """Return where whole records are: files (or None), offsets and sizes."""
        files = None if self._files is None else self._files[rows]
        return files, self._offsets[rows], self._sizes[rows]

    def _parts(self, rows: Positions) -> tuple[Any, Positions, Positions]:
        """Return the parts of records to read: files (or None), offsets and sizes."""
        return self._places(rows)

    def _decode(self, rows: Positions, parts: list[Any]) -> list[Any]:
        """Convert the parts of these records to samples."""
        return parts

    def _samples(self, columns: list[Any]) -> list[Any]:
        """Apply the transform to the samples of a batch."""
        if self.transform is None:
            return columns
        return [self.transform(sample) for sample in columns]

    def _batch(self, flight: Flight) -> Any:
        """Wait for the samples, and collate them as torch does by default."""
        return default_collate(self._samples_of(flight))


class _Batch:
    """Parts of records that are read together, and their memory, in order of the rows."""

    def __init__(self, dataset: RecordDataset, rows: Positions) -> None:
        self._dataset, self._rows = dataset, rows.ravel()
        self._files, self._offsets, self._lengths = dataset._parts(self._rows)
        self._sizes = self._lengths * dataset._dtype.itemsize
        self.memory: Any
        if dataset._as_bytes:
            self.memory = NewBytes(self._sizes)
            self._places = np.arange(len(self._sizes))
        else:
            self.memory = torch.empty(int(self._lengths.sum()), dtype=dataset._dtype)
            self._places = np.cumsum(self._sizes) - self._sizes

    def gathers(self) -> list[tuple[int, Positions, Positions, Positions]]:
        """Return the number of each file, with offsets, sizes and places of its parts."""
        offsets, sizes, places = self._offsets, self._sizes, self._places
        if not sizes.any():
            return []
        if self._files is None:
            return [(0, offsets, sizes, places)]
        order = np.argsort(self._files, kind="stable")
        borders = np.flatnonzero(np.diff(self._files[order])) + 1
        return [
            (int(self._files[part[0]]), offsets[part], sizes[part], places[part])
            for part in np.split(order, borders)
        ]

    def samples(self, results: list[Any]) -> list[Any]:
        """Convert the memory, which has been filled, to samples."""
        if isinstance(self.memory, NewBytes):
            parts = self.memory.values
        else:
            parts = list(self.memory.split(self._lengths.tolist()))
        return self._dataset._decode(self._rows, parts)


class OpenFiles:
    """A cache of open files; of many files, those that were used last."""

    def __init__(self, opened: Callable[[int], Any]) -> None:
        # The dataset's own method.  The dataset holds this cache, so a reference back would
        # keep dropped files open until the garbage collector runs.
        self._opened = weakref.WeakMethod(opened)
        # In the order of use, each with the request that may still be reading it.  Weakly,
        # because the traceback of a failed or cancelled request holds the dataset.  Until
        # it is done, its Flight holds the request.
        self._held: dict[int, tuple[Any, weakref.ref[Request] | None]] = {}

    def file(self, number: int) -> Any:
        """Return a file, open."""
        # If two threads do this at once, the file of the first one is dropped.
        file, request = self._held.pop(number, (None, None))
        if file is None:
            while len(self._held) >= _OPEN_MAX:
                self._drop_one()
            opened = self._opened()
            assert opened is not None
            file = opened(number)
        self._held[number] = file, request
        return file

    def begin(
        self, number: int, submit: Callable[..., Request], *args: Any, **options: Any
    ) -> Request:
        """Start reading a file, which stays open until the request is done."""
        file = self.file(number)
        request = submit(file, *args, **options)
        self._held[number] = file, weakref.ref(request)
        return request

    def _drop_one(self) -> None:
        """Drop the least recently used file, after its last request is done."""
        for number in list(self._held)[:1]:
            _, last = self._held.pop(number, (None, None))
            request = None if last is None else last()
            if request is not None:
                # A request of the parent process raises OSError in a forked child.
                with contextlib.suppress(CancelledError, OSError):
                    request.exception()

    def drop_all(self) -> Iterator[tuple[int, Any]]:
        """Drop all files, and yield those that are open."""
        for number in list(self._held):
            file, _ = self._held.pop(number, (None, None))
            if file is not None:
                yield number, file

    def close(self) -> None:
        """Close all files; a second call does nothing."""
        for _, file in self.drop_all():
            file.close()


def paths_of(path: Any) -> list[str | bytes]:
    """Return the absolute paths of files."""
    if isinstance(path, str | bytes | os.PathLike):
        return [literal(path)]
    if not isinstance(path, Sequence):
        raise TypeError(f"path is {shown(path)}; it must be a path, or a sequence of paths")
    if not path:
        raise ValueError("path is empty; it must name at least one file")
    return [literal(one) for one in path]


def _integers(name: str, values: Any) -> Integers:
    """Convert values to an array of integers with one axis, if possible without a copy."""
    array = array_of(values)
    if not has_integers(array):
        raise TypeError(f"{name} is of dtype {array.dtype}; it must be of integers")
    if array.ndim != 1:
        raise ValueError(f"{name} is of shape {array.shape}; it must be of one axis")
    return array


def _check(
    paths: list[str | bytes],
    sizes_of_files: list[int],
    offsets: SharedArray,
    sizes: SharedArray,
    files: SharedArray | None,
    itemsize: int,
) -> None:
    """Raise ValueError for records that are not within their files."""
    ends = np.array(sizes_of_files, np.int64)
    for start in range(0, len(offsets), CHECKED_AT_ONCE):
        part = slice(start, start + CHECKED_AT_ONCE)
        numbers = np.zeros(1, np.int64)
        if files is not None:
            numbers = _within("files", files.array[part], start, len(paths) - 1)
        begins = _within("offsets", offsets.array[part], start, 2**63 - 1)
        lengths = _within("sizes", sizes.array[part], start, (2**63 - 1) // itemsize)
        counts = lengths * itemsize
        wrong = counts > ends[numbers] - begins
        if wrong.any():
            place = int(wrong.argmax())
            number = int(np.broadcast_to(numbers, wrong.shape)[place])
            raise ValueError(
                f"record {start + place} of {counts[place]} bytes at offset "
                f"{begins[place]} reaches past the end of {paths[number]!r}, which has "
                f"{ends[number]} bytes"
            )


def _within(name: str, part: Integers, start: int, most: int) -> Positions:
    """Convert part of an array to int64; raise ValueError for numbers out of range."""
    # Numbers beyond int64 become negative.
    found = part if part.dtype == object else part.astype(np.int64, copy=False)
    wrong = (found < 0) | (found > most)
    if wrong.any():
        place = int(wrong.argmax())
        limit = "2**63 - 1" if most == 2**63 - 1 else most
        raise ValueError(
            f"{name}[{start + place}] is {part[place]}; it must be from 0 to {limit}"
        )
    return found.astype(np.int64, copy=False)


def known_file(path: str | bytes) -> Identity:
    """Return which file a path leads to."""
    with File(path) as file:
        return identity_of(file)
