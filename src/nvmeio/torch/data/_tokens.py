"""Windows of tokens as a dataset."""

from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from nvmeio._arguments.checks import whole
from nvmeio._arguments.keywords import suggesting
from nvmeio._arguments.types import Path
from nvmeio._arrays.indexing import Positions
from nvmeio._files.paths import absolute
from nvmeio.arrays import ArrayFile
from nvmeio.torch._dtypes import carrier
from nvmeio.torch.data._stored import Array, Flight, Stored

__all__ = ["TokenDataset"]


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

    Examples
    --------
    >>> import torch
    >>> nvmeio.write_file(np.arange(100, dtype=np.uint16), "tokens.bin")
    200
    >>> dataset = nvmeio.torch.TokenDataset("tokens.bin", 8, dtype=np.uint16)
    >>> inputs, targets = dataset[0]
    >>> targets
    tensor([1, 2, 3, 4, 5, 6, 7, 8])
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
