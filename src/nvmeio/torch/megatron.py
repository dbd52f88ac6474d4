"""megatron-core's datasets on nvmeio: ``install()``, or ``BinReader`` for one of them."""

from typing import Any

import numpy as np
import numpy.typing as npt
from megatron.core.datasets import indexed_dataset

from nvmeio._arguments.types import Path
from nvmeio._native.file import File
from nvmeio._native.page_cache import read_cached
from nvmeio.default import default_handle

__all__ = ["BinReader", "install", "uninstall"]

_NAMES = ("_FileBinReader", "_MMapBinReader")
_megatrons: dict[str, Any] = {}


class BinReader(indexed_dataset._BinReader):  # type: ignore[misc]
    """Reads the .bin file of an ``IndexedDataset``: from the page cache what that has.

    Parameters
    ----------
    bin_path : str, bytes or os.PathLike
        The .bin file.

    Raises
    ------
    OSError
        The file cannot be opened; with errno and path.

    Notes
    -----
    ``dataset.bin_reader = BinReader(path)`` lasts until the dataset is pickled; after
    ``install()`` every dataset has one.
    """

    def __init__(self, bin_path: Path) -> None:
        self._file = File(bin_path)

    def read(self, dtype: npt.DTypeLike, count: int, offset: int) -> npt.NDArray[Any]:
        """Read elements.

        Parameters
        ----------
        dtype : dtype
            Of the elements.
        count : int
            How many there are.
        offset : int
            Where the first is, in bytes.

        Returns
        -------
        numpy.ndarray, shape (count,)
            In memory of its own.

        Raises
        ------
        OSError
            The file ends before that, ENODATA; or it cannot be read.
        """
        array: npt.NDArray[Any] = np.empty(count, dtype)
        if not read_cached(self._file.fileno(), array, offset):
            default_handle().gather(self._file, [int(offset)], array.nbytes, array)
        return array


def install() -> None:
    """Have nvmeio read for each ``IndexedDataset`` that is made from now on.

    Raises
    ------
    RuntimeError
        This version of megatron-core has its readers elsewhere; nothing is changed.

    Notes
    -----
    That is for local files, with and without ``mmap``.  Another call changes nothing.
    """
    for name in _NAMES:
        if not hasattr(indexed_dataset, name):
            raise RuntimeError(f"megatron.core.datasets.indexed_dataset has no {name}")
    for name in _NAMES:
        if getattr(indexed_dataset, name) is not BinReader:
            _megatrons[name] = getattr(indexed_dataset, name)
            setattr(indexed_dataset, name, BinReader)


def uninstall() -> None:
    """Have new datasets use megatron-core's readers again."""
    for name, kind in _megatrons.items():
        setattr(indexed_dataset, name, kind)
    _megatrons.clear()
