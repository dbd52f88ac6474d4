"""Read megatron-core's datasets with nvmeio: ``install()``, or ``BinReader`` for one."""

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
    """Reads the .bin file of an ``IndexedDataset``, from the page cache if that has it.

    Parameters
    ----------
    bin_path : str, bytes or os.PathLike
        The .bin file.

    Raises
    ------
    OSError
        The file cannot be opened; has errno and path.

    Notes
    -----
    ``dataset.bin_reader = BinReader(path)`` works until the dataset is pickled.  After
    ``install()``, every new dataset has such a reader.

    Examples
    --------
    >>> import torch
    >>> from megatron.core.datasets import indexed_dataset
    >>> import nvmeio.torch.megatron
    >>> builder = indexed_dataset.IndexedDatasetBuilder("tokens.bin", np.int32)
    >>> builder.add_document(torch.arange(4), [4])
    >>> builder.finalize("tokens.idx")
    >>> dataset = indexed_dataset.IndexedDataset("tokens")
    >>> dataset.bin_reader = nvmeio.torch.megatron.BinReader("tokens.bin")
    >>> dataset[0]
    array([0, 1, 2, 3], dtype=int32)
    """

    def __init__(self, bin_path: Path) -> None:
        self._file = File(bin_path)

    def read(self, dtype: npt.DTypeLike, count: int, offset: int) -> npt.NDArray[Any]:
        """Read elements.

        Parameters
        ----------
        dtype : dtype
            The dtype of the elements.
        count : int
            The number of elements.
        offset : int
            The offset of the first element in the file, in bytes.

        Returns
        -------
        numpy.ndarray, shape (count,)
            The elements, in new memory.

        Raises
        ------
        OSError
            The file cannot be read, or ends before the last element (ENODATA).
        """
        array: npt.NDArray[Any] = np.empty(count, dtype)
        if not read_cached(self._file.fileno(), array, offset):
            default_handle().gather(self._file, [int(offset)], array.nbytes, array)
        return array


def install() -> None:
    """Make every new ``IndexedDataset`` read its local file with nvmeio.

    Raises
    ------
    RuntimeError
        This version of megatron-core lacks the readers to replace; nothing was changed.

    Notes
    -----
    Applies with and without ``mmap``.  A second call changes nothing.

    Examples
    --------
    >>> import torch
    >>> from megatron.core.datasets import indexed_dataset
    >>> import nvmeio.torch.megatron
    >>> builder = indexed_dataset.IndexedDatasetBuilder("tokens.bin", np.int32)
    >>> builder.add_document(torch.arange(4), [4])
    >>> builder.finalize("tokens.idx")
    >>> nvmeio.torch.megatron.install()
    >>> indexed_dataset.IndexedDataset("tokens").get(0, offset=2)
    array([2, 3], dtype=int32)
    >>> nvmeio.torch.megatron.uninstall()
    """
    for name in _NAMES:
        if not hasattr(indexed_dataset, name):
            raise RuntimeError(
                f"megatron.core.datasets.indexed_dataset has no {name}, so this version of "
                "megatron-core is not supported; nothing was changed"
            )
    for name in _NAMES:
        if getattr(indexed_dataset, name) is not BinReader:
            _megatrons[name] = getattr(indexed_dataset, name)
            setattr(indexed_dataset, name, BinReader)


def uninstall() -> None:
    """Make new datasets use megatron-core's own readers again; do nothing if they do.

    Examples
    --------
    >>> from megatron.core.datasets import indexed_dataset
    >>> import nvmeio.torch.megatron
    >>> nvmeio.torch.megatron.install()
    >>> nvmeio.torch.megatron.uninstall()
    """
    for name, kind in _megatrons.items():
        setattr(indexed_dataset, name, kind)
    _megatrons.clear()
