"""``ArrayDataset``: the rows of arrays as a dataset."""

import os
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from nvmeio._arguments.checks import refuse_masked
from nvmeio._arguments.types import Path
from nvmeio._arrays.indexing import Positions
from nvmeio._tensors.memory import flat_bytes
from nvmeio.arrays import ArrayFile
from nvmeio.torch._dtypes import is_common
from nvmeio.torch.data._dataset import Flight, StoredDataset, beginnings_of

__all__ = ["ArrayDataset"]

# What an open dataset reads rows from: a file, or memory.
Array: TypeAlias = ArrayFile | npt.NDArray[Any] | torch.Tensor


class ArrayDataset(StoredDataset):
    """The rows of arrays, as a map-style dataset.

    Parameters
    ----------
    *arrays : path, ArrayFile, numpy.ndarray or torch.Tensor
        One or more arrays of the same length.  A path must be that of a .npy file; pass an
        ArrayFile for raw bytes, or to use your own handle.  Arrays and tensors in memory,
        such as labels, stay in memory.
    transform : callable, optional
        A function that is applied to each sample, in the process that reads it.

    Raises
    ------
    OSError
        A file cannot be opened; has errno and path.  ESTALE: the file of a memory map ends
        before the map does.
    TypeError
        No array is passed; or torch lacks the dtype (records, dates, text, the other byte
        order); or an array is masked.
    ValueError
        A file is not an array, see ``ArrayFile``; or the lengths differ.

    Notes
    -----
    Sample ``i`` is row ``i`` as a tensor; with several arrays, a tuple with a row of each.
    Index -1 is the last row.  ``IndexError`` names the out-of-range index.  A list of
    indices gives a batch, for a DataLoader with ``sampler=BatchSampler(...)`` and
    ``batch_size=None``.

    A batch of a DataLoader is one gather per array, and its samples are views of one
    tensor.  The dataset can be pickled and forked, so workers may be started in any way.

    The files are opened immediately, and again in each process that gets the dataset.
    ``close()``, the end of ``with``, or dropping the dataset closes them, without waiting
    for reads in flight.  Copies of the dataset, as in workers, stay open, and so does an
    ``ArrayFile`` that was passed.

    A ``torch.utils.data.ConcatDataset`` requests its samples one by one, so they are read
    one by one.  The number of samples does not change after construction.  Where a file is
    opened or mapped again, as in workers, OSError (ESTALE) is raised if it was replaced or
    changed since then: if it is shorter; or if the first, the middle or the last 4 KiB of
    the samples differ, which are compared if its number or times differ, or if it was
    changed less than 2 s before the dataset was made.  A ``numpy.memmap`` is mapped again;
    if its file was replaced before the dataset was made, it is copied to workers.

    Examples
    --------
    >>> import torch
    >>> nvmeio.save("rows.npy", np.arange(12.0).reshape(4, 3))
    >>> dataset = nvmeio.torch.ArrayDataset("rows.npy")
    >>> loader = torch.utils.data.DataLoader(dataset, batch_size=2, shuffle=True)
    >>> [batch.shape for batch in loader]
    [torch.Size([2, 3]), torch.Size([2, 3])]
    """

    def __init__(
        self,
        *arrays: Path | Array,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        if not arrays:
            raise TypeError("a dataset needs at least one array")
        kinds = (ArrayFile, np.ndarray, torch.Tensor, str, bytes, os.PathLike)
        for place, array in enumerate(arrays):
            if not isinstance(array, kinds):
                raise TypeError(
                    f"array {place} is of type {type(array).__qualname__}; it must be a "
                    "path, an ArrayFile, an array or a tensor"
                )
        super().__init__(arrays, transform)
        opened = self._arrays()
        for place, array in enumerate(opened):
            _check_elements(array, f"array {place}")
        lengths = [len(array) for array in opened]
        if len(set(lengths)) > 1:
            raise ValueError(
                f"the arrays have {lengths} rows; all must have the same number"
            )
        self._length = lengths[0]
        self._shapes = tuple(tuple(array.shape) for array in opened)
        self._dtypes = tuple(_dtype_of(array) for array in opened)

    def __len__(self) -> int:
        return self._length

    @property
    def shape(self) -> tuple[Any, ...]:
        """The shape of the array; with several arrays, a tuple of their shapes."""
        return self._shapes[0] if self._is_plain() else self._shapes

    @property
    def dtype(self) -> Any:
        """The torch dtype of samples; with several arrays, a tuple of dtypes."""
        return self._dtypes[0] if self._is_plain() else self._dtypes

    def _beginnings(self, rows: Positions) -> Iterator[Any]:
        for array in self._arrays():
            if isinstance(array, ArrayFile):
                yield beginnings_of(array, rows, array._row_bytes)
            else:
                (taken,) = _tensors([_taken(array, rows)])
                plain = taken.cpu().resolve_conj().resolve_neg().contiguous()
                yield flat_bytes(plain).numpy()

    def _begin(self, rows: Positions) -> Flight:
        """Start reading rows, whose positions were checked."""
        return Flight((_begun(array, rows) for array in self._arrays()), _tensors)

    def _read(self, rows: Positions) -> list[torch.Tensor]:
        """Read rows, whose positions were checked; a single array in the calling thread."""
        arrays = self._arrays()
        if len(arrays) > 1:
            return self._begin(rows).land()
        return _tensors([_taken(arrays[0], rows)])


def _check_elements(array: Array, name: str) -> None:
    """Raise TypeError or ValueError for arrays whose rows cannot be tensors."""
    dtype: Any = array.dtype
    if not isinstance(dtype, torch.dtype) and not is_common(dtype):
        path = f" {array.path!r}" if isinstance(array, ArrayFile) else ""
        raise TypeError(f"{name}{path} is of dtype {dtype}, which tensors do not have")
    if not array.shape:
        raise ValueError(f"{name} has no axes; its rows are to be samples")
    refuse_masked(name, array)


def _dtype_of(array: Array) -> torch.dtype:
    """Return the torch dtype of an array's samples."""
    if isinstance(array.dtype, torch.dtype):
        return array.dtype
    return torch.from_numpy(np.empty(0, array.dtype)).dtype


def _begun(array: Array, rows: Positions) -> Any:
    """Start reading rows of a file, or copy rows in memory; positions were checked."""
    return array.prefetch(rows) if isinstance(array, ArrayFile) else _taken(array, rows)


def _taken(array: Array, rows: Positions) -> Any:
    """Read rows of a file, or copy rows in memory; positions were checked."""
    if isinstance(array, ArrayFile):
        return array.gather(rows)
    if isinstance(array, torch.Tensor):
        return array[torch.from_numpy(rows)]
    return np.asarray(np.take(array, rows, axis=0))


def _tensors(results: list[Any]) -> list[torch.Tensor]:
    """Convert arrays to tensors that share their memory."""
    return [
        one if isinstance(one, torch.Tensor) else torch.from_numpy(np.asarray(one))
        for one in results
    ]
