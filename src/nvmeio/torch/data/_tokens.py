"""``TokenDataset``: windows of tokens as a dataset."""

import errno
import os
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from nvmeio._arguments.checks import whole
from nvmeio._arguments.types import Path
from nvmeio._arrays.indexing import Positions
from nvmeio._files.paths import naming
from nvmeio._native.file import File
from nvmeio.arrays import ArrayFile
from nvmeio.torch._dtypes import carrier
from nvmeio.torch.data._dataset import Flight, StoredDataset, beginnings_of, literal
from nvmeio.torch.data._records import OpenFiles

__all__ = ["TokenDataset"]

# The header of llm.c's shards, which modded-nanogpt uses too: 256 int32, beginning with the
# magic number, the version and the number of tokens (llm.c, dev/data/data_common.py).
_HEADER_BYTES = 1024
_HEADERS: dict[int, tuple[int, type[np.generic]]] = {
    20240520: (1, np.uint16),
    20240801: (7, np.uint32),
}

# The windows of one shard: its number, their places in the batch, where they start.
_Share: TypeAlias = tuple[int, Any, Positions]


class TokenDataset(StoredDataset):
    """Windows of files of tokens, for training language models.

    Parameters
    ----------
    paths : path, ArrayFile, or sequence of them
        The file, or the shards in order: .npy files with one axis, shards of llm.c with
        their header, or raw bytes of the given ``dtype``.
    block_size : int
        The number of tokens in a window; at least 1.
    dtype : dtype of numpy or torch, optional
        The dtype of raw bytes, an integer type.
    stride : int, optional
        The number of tokens between the starts of two windows; at least 1.  By default
        ``block_size``, so that windows do not overlap.  With 1, a window starts at every
        token.
    offset : int, default 0
        The offset of the tokens in a file of raw bytes, in bytes; the size of a header to
        skip.

    Raises
    ------
    OSError
        A file cannot be opened; has errno and path.
    TypeError
        The tokens are not integers, or an argument is of the wrong type.
    ValueError
        A file is not an array with one axis, see ``ArrayFile``; ``dtype`` or the size of a
        file contradicts its header; ``block_size`` or ``stride`` is out of range; ``paths``
        is empty; or ``dtype`` or ``offset`` is given for an ArrayFile, which has its own.

    Notes
    -----
    Sample ``i`` of a file is a pair of int64 tensors, inputs and targets:
    ``tokens[at : at + block_size]`` and ``tokens[at + 1 : at + block_size + 1]``, with
    ``at = i * stride``.  Only complete windows are samples.  With ``stride=1``, a random
    sampler draws windows that begin anywhere.

    With several files, the samples of the second follow those of the first.  A window never
    crosses from one shard to the next, because shards are different documents.  A shard of
    ``n`` tokens has ``(n - block_size - 1) // stride + 1`` samples, or none if it is too
    short.  A batch is one gather per shard that it needs, all in flight at once.

    The header of a shard of llm.c or modded-nanogpt is recognized and skipped; it has the
    dtype and the number of tokens, which must match the file's size.  With an ``offset``
    other than 0 and the header's 1024 bytes, the file is read as raw bytes from there on,
    without a check.  At most 128 files stay open, those that were used last.  All else is
    as in ``ArrayDataset``.

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

    def __init__(
        self,
        paths: Path | ArrayFile | Iterable[Path | ArrayFile],
        block_size: int,
        dtype: Any = None,
        *,
        stride: int | None = None,
        offset: int = 0,
    ) -> None:
        if isinstance(paths, str | bytes | os.PathLike | ArrayFile):
            paths = [paths]
        elif not isinstance(paths, Iterable):
            raise TypeError(
                f"paths is {paths!r}; it must be a path, an ArrayFile or a sequence of them"
            )
        sources = list(paths)
        if not sources:
            raise ValueError("paths is empty; it must name at least one file")
        for source in sources:
            if not isinstance(source, ArrayFile):
                literal(source)
            elif dtype is not None or offset:
                raise ValueError(
                    f"dtype is {dtype} and offset {offset}; they are for paths, and "
                    f"{source!r} is open already"
                )
        super().__init__(sources)
        self._file_dtype = carrier(dtype) or dtype
        self._offset = whole("offset", offset, 0, 2**63 - 1)
        self.block_size = whole("block_size", block_size, 1, 2**63 - 1)
        if stride is None:
            stride = self.block_size
        self.stride = whole("stride", stride, 1, 2**63 - 1)
        (files,) = self._arrays()
        self._lengths = [_checked(files.file(n)) for n in range(len(sources))]
        last_starts = (length - self.block_size - 1 for length in self._lengths)
        counts = [max(0, start // self.stride + 1) for start in last_starts]
        # Where the samples of each shard end.
        self._ends = np.cumsum(counts, dtype=np.int64)

    def _open_all(self) -> list[Any]:
        return [OpenFiles(self._open_one)]

    def _close_all(self, opened: list[Any]) -> None:
        for number, tokens in opened[0].drop_all():
            if tokens is not self._sources[number]:
                tokens.close()

    def _open(self, path: str | bytes) -> ArrayFile:
        dtype, offset = self._file_dtype, self._offset
        header = None
        if offset in (0, _HEADER_BYTES):
            with File(path) as file:
                header = _header_in(file)
        if header is None:
            return ArrayFile(path, dtype=dtype, offset=offset)
        kind, count, size = header
        if dtype is not None and np.dtype(dtype) != kind:
            raise ValueError(
                f"dtype is {np.dtype(dtype)}; the header of {path!r} says {kind}"
            )
        expected = _HEADER_BYTES + count * kind.itemsize
        if count < 0 or size != expected:
            raise ValueError(
                f"{path!r} has {size} bytes; its header says {count} tokens, which are "
                f"{expected} bytes"
            )
        tokens = ArrayFile(path, dtype=kind, offset=_HEADER_BYTES)
        if _header_in(tokens._file) != header:
            raise OSError(errno.ESTALE, "the file was replaced while it was opened", path)
        return tokens

    def _is_plain(self) -> bool:
        return False

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def shape(self) -> tuple[int, int]:
        """The number of samples, and the number of tokens in each half of a sample."""
        return len(self), self.block_size

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of both halves of a sample, ``torch.int64``."""
        return torch.int64

    def _why_empty(self) -> str:
        longest = f"has {self._lengths[0]}"
        if len(self._lengths) > 1:
            longest = f"have {max(self._lengths)} at most"
        return (
            f"block_size {self.block_size} needs {self.block_size + 1} tokens, and "
            f"{self._names()} {longest}"
        )

    def _shares(self, rows: Positions) -> Iterator[_Share]:
        """Group windows by the shard that has them."""
        starts = rows.ravel()
        if len(self._sources) == 1 and starts.size:
            yield 0, slice(None), starts * self.stride
            return
        owners = np.searchsorted(self._ends, starts, side="right")
        for owner in np.unique(owners):
            where = np.flatnonzero(owners == owner)
            begin = self._ends[owner - 1] if owner else 0
            yield int(owner), where, (starts[where] - begin) * self.stride

    def _beginnings(self, rows: Positions) -> Iterator[Any]:
        for number, _, starts in self._shares(rows):
            tokens: ArrayFile = self._arrays()[0].file(number)
            yield beginnings_of(tokens, starts, (self.block_size + 1) * tokens.itemsize)

    def _begin(self, rows: Positions) -> Flight:
        """Start reading windows, whose positions were checked."""
        shares, length = list(self._shares(rows)), self.block_size + 1
        (files,) = self._arrays()
        return Flight(
            (
                files.begin(number, ArrayFile.prefetch_windows, starts, length)
                for number, _, starts in shares
            ),
            lambda windows: self._pairs(rows, shares, windows),
        )

    def _read(self, rows: Positions) -> list[torch.Tensor]:
        """Read windows, whose positions were checked."""
        shares = list(self._shares(rows))
        if len(shares) != 1:
            return self._begin(rows).land()
        ((number, _, starts),) = shares
        tokens = self._arrays()[0].file(number)
        return self._pairs(rows, shares, [tokens.windows(starts, self.block_size + 1)])

    def _pairs(
        self, rows: Positions, shares: list[_Share], windows: list[Any]
    ) -> list[torch.Tensor]:
        """Return the inputs and the targets of windows, in new memory."""
        shape = (rows.size, self.block_size)
        halves: list[npt.NDArray[np.int64]] = [np.empty(shape, np.int64) for _ in range(2)]
        for (_, where, _), found in zip(shares, windows, strict=True):
            tokens = np.asarray(found)
            halves[0][where], halves[1][where] = tokens[:, :-1], tokens[:, 1:]
        return [
            torch.from_numpy(half.reshape(*rows.shape, self.block_size)) for half in halves
        ]


def _checked(tokens: ArrayFile) -> int:
    """Return the number of tokens in an array; raise if it does not have tokens."""
    if tokens.ndim != 1:
        raise ValueError(
            f"the tokens in {tokens.path!r} are of shape {tokens.shape}; they need one axis"
        )
    kind = carrier(tokens.dtype) or tokens.dtype
    if kind.kind not in "iu":
        raise TypeError(
            f"the tokens in {tokens.path!r} are of dtype {tokens.dtype}, not of integers"
        )
    return len(tokens)


def _header_in(file: File) -> tuple[np.dtype[Any], int, int] | None:
    """Return the dtype, number of tokens and file size if a file has llm.c's header."""
    path, size = file.path, file.size
    with naming(path):
        begin = os.pread(file.fileno(), 12, 0)
    magic, version, count = np.frombuffer(begin.ljust(12, b"\0"), "<i4").tolist()
    if len(begin) < 12 or magic not in _HEADERS:
        return None
    known, kind = _HEADERS[magic]
    if version != known:
        raise ValueError(
            f"{path!r} has a header of llm.c of version {version}; it must be {known}.  An "
            "nvmeio.ArrayFile(path, dtype=..., offset=...) skips any header"
        )
    return np.dtype(kind), count, size
