"""``MegatronDataset``: Megatron's files of tokens as a dataset."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nvmeio._arguments.checks import flag, integer, whole
from nvmeio._arguments.types import Path
from nvmeio._arrays.indexing import Positions
from nvmeio._files.kinds import because_of_kind
from nvmeio._files.megatron import MegatronIndex
from nvmeio._files.paths import absolute
from nvmeio.default import default_handle
from nvmeio.torch.data._records import RecordDataset, SharedArray, known_file

__all__ = ["MegatronDataset"]


class MegatronDataset(RecordDataset):
    """The sequences of a Megatron dataset, a .bin file with its .idx file.

    Parameters
    ----------
    path : str, bytes or os.PathLike
        The path of both files, without ``.bin`` and ``.idx``.
    multimodal : bool, default False
        Whether a sample is a tuple of a sequence and its mode.
    transform : callable, optional
        A function that is applied to each sample, in the process that reads it.

    Raises
    ------
    OSError
        A file cannot be opened; has errno and path.
    TypeError
        An argument is of the wrong type.
    ValueError
        The .idx file is not one of Megatron's, contradicts itself or has no modes; the .bin
        file is shorter or longer than its sequences.

    Notes
    -----
    Sample ``i`` is sequence ``i``: a tensor of the file's dtype, or ``(sequence, mode)``.
    ``dataset[2:5]`` is a list of samples.  A batch is one gather, see ``RecordDataset``.

    All of the .idx file is checked when the dataset is made.  It is memory-mapped, so that
    the processes of a machine share one copy of it; do not truncate it meanwhile.

    Examples
    --------
    >>> import struct
    >>> nvmeio.write_file(np.arange(6, dtype=np.uint16), "tokens.bin")
    12
    >>> head = struct.pack("<9sQBQQ", b"MMIDIDX", 1, 8, 2, 3)
    >>> index = head + struct.pack("<2i2q3q", 4, 2, 0, 8, 0, 1, 2)
    >>> nvmeio.write_file(index, "tokens.idx")
    82
    >>> nvmeio.torch.MegatronDataset("tokens")[1]
    tensor([4, 5], dtype=torch.uint16)
    """

    _may_grow = False

    def __init__(
        self,
        path: Path,
        *,
        multimodal: bool = False,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        prefix = absolute(path)
        bin_path, index_path = (_with_suffix(prefix, suffix) for suffix in (".bin", ".idx"))
        index = MegatronIndex(index_path, modes=flag("multimodal", multimodal))
        known = known_file(bin_path)
        if known.end != index.end:
            raise ValueError(
                f"{bin_path!r} has {known.end} bytes; the sequences of {index_path!r} take "
                f"{index.end}{because_of_kind(bin_path)}"
            )
        self._dtype = getattr(torch, index.dtype.name)
        self._make([bin_path], index.pointers, index.lengths, None, transform, [known])
        self._documents = SharedArray(index.documents)
        self._modes = None if index.modes is None else SharedArray(index.modes)

    @property
    def sequence_lengths(self) -> npt.NDArray[Any]:
        """How many elements each sequence has."""
        return self._sizes.array

    @property
    def sequence_modes(self) -> npt.NDArray[Any] | None:
        """The mode of each sequence; None unless ``multimodal``."""
        return None if self._modes is None else self._modes.array

    @property
    def document_indices(self) -> npt.NDArray[Any]:
        """The sequences at which documents begin, and the end of the last document."""
        return self._documents.array

    def get(self, index: int, offset: int = 0, length: int | None = None) -> Any:
        """Read a part of a sequence.

        Parameters
        ----------
        index : int
            The sequence; -1 is the last one.
        offset : int, default 0
            The first element to read.
        length : int, optional
            How many elements to read.  Default: all from ``offset`` on.

        Returns
        -------
        tensor, or tuple of two tensors
            The elements, or these and the mode.  Not transformed.

        Raises
        ------
        IndexError
            There is no such sequence.
        OSError
            As for ``Handle.gather``.
        TypeError
            An argument is not an integer.
        ValueError
            The sequence is shorter than ``offset`` or ``offset + length``.

        Examples
        --------
        >>> import struct
        >>> nvmeio.write_file(np.arange(6, dtype=np.uint16), "tokens.bin")
        12
        >>> head = struct.pack("<9sQBQQ", b"MMIDIDX", 1, 8, 1, 2)
        >>> index = head + struct.pack("<iq2q", 6, 0, 0, 1)
        >>> nvmeio.write_file(index, "tokens.idx")
        62
        >>> nvmeio.torch.MegatronDataset("tokens").get(0, offset=2, length=3)
        tensor([2, 3, 4], dtype=torch.uint16)
        """
        rows = np.atleast_1d(self._rows(integer("index", index)))
        count = int(self._sizes[rows][0])
        offset = whole("offset", offset, 0, count)
        if length is None:
            length = count - offset
        length = whole("length", length, 0, count - offset)
        part = torch.empty(length, dtype=self._dtype)
        if length:
            file, starts = self._arrays()[0].file(0), self._offsets[rows]
            starts += offset * self._dtype.itemsize
            default_handle().gather(file, starts, part.nbytes, part)
        return self._decode(rows, [part])[0]

    def _decode(self, rows: Positions, records: list[torch.Tensor]) -> list[Any]:
        """Add the modes."""
        if self._modes is None:
            return records
        modes = torch.from_numpy(self._modes.array[rows])
        return list(zip(records, modes.unbind(), strict=True))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.__getitems__(range(*index.indices(len(self))))
        return super().__getitem__(index)

    __getitems__ = RecordDataset.__getitems__


def _with_suffix(prefix: str | bytes, suffix: str) -> str | bytes:
    """Return the path of one of the two files."""
    return prefix + suffix.encode() if isinstance(prefix, bytes) else prefix + suffix
