"""``TarDataset``: the samples of tar archives as a dataset."""

import hashlib
import os
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import numpy as np

from nvmeio._arguments.types import Path
from nvmeio._arrays.indexing import Positions
from nvmeio._files.paths import absolute_folder
from nvmeio._files.tar import decoded
from nvmeio._native.file import File
from nvmeio.torch.data._identity import identity_of
from nvmeio.torch.data._records import RecordDataset, SharedArray, paths_of
from nvmeio.torch.data._tar_index import BLOCK_BYTES, SUFFIX, TarIndex, index_of

__all__ = ["TarDataset"]


class TarDataset(RecordDataset):
    """The samples of WebDataset's tar archives, as a map-style dataset.

    Parameters
    ----------
    path : path, or sequence of paths
        The archive or archives, not compressed.
    index : bool or path, default True
        Whether to save the index of each archive, and use it the next time.  With True it
        is saved beside the archive, as ``NAME.tar.nvmeio-index``; with a path, in that
        folder, as ``NAME.tar.HASH.nvmeio-index``, with a hash of the archive's path.
    transform : callable, optional
        A function that is applied to each sample, in the process that reads it.

    Raises
    ------
    OSError
        An archive cannot be opened or read; has errno and path.
    TypeError
        An argument is of the wrong type.
    ValueError
        An archive is compressed, damaged or truncated; has a sparse file; or has two files
        of the same name in a sample, or a sample at two places.

    Warns
    -----
    UserWarning
        An archive may be incomplete: it lacks the end-of-archive blocks, or other bytes,
        or more than 1 MiB of zeros, follow them.

    Notes
    -----
    Sample ``i`` is what WebDataset yields for it without a decoder: a dict with
    ``__key__``, ``__url__`` and the ``bytes`` of each file, by its extension.  ``__url__``
    is the absolute path; WebDataset has the path as it was given.  The samples are in the
    order of the archives.  As in WebDataset, files that follow each other and have the same
    name up to the first dot are one sample; links, files without an extension and ``__*__``
    are left out.  Where other samples are between the files of one, WebDataset yields parts
    of it; this refuses the archive.

    To make an index, all headers of an archive are read; large files are skipped.  A saved
    index is used as long as the archive has the same size and modification time; else it is
    replaced.  If the archive was moved, copied or given another mode since, or was changed
    less than 2 s before it was indexed, all headers are compared first, which is faster
    than to index it.  Not found is a rewrite in place that leaves all times as they were.
    If the index cannot be saved, a warning is logged.  In memory, it takes at most 24 bytes
    a file plus the text of the keys, unless an archive has more than 2 TiB or the keys have
    more than 4 GiB.  The archives must not change while the dataset is used.

    A sampler shuffles the samples of all archives.  A batch of a DataLoader is one gather
    for each archive that has samples of it.

    Examples
    --------
    >>> import tarfile
    >>> from pathlib import Path
    >>> with tarfile.open("samples.tar", "w") as archive:
    ...     for name in ("0.txt", "0.cls"):
    ...         written = Path(name).write_text(f"contents of {name}")
    ...         archive.add(name)
    >>> nvmeio.torch.TarDataset("samples.tar")[0]["cls"]
    b'contents of 0.cls'
    """

    _may_grow = False
    _as_bytes = True

    def __init__(
        self,
        path: Path | Sequence[Path],
        *,
        index: bool | Path = True,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        paths = paths_of(path)
        indices, known = [], []
        for one, saved in zip(paths, _saved_at(paths, index), strict=True):
            # From before the archive is read, so that nothing else is read later.
            with File(one) as archive:
                known.append(identity_of(archive))
                indices.append(index_of(archive, saved))
        # How many samples there are up to the end of each archive.
        self._ends = np.cumsum([len(one.firsts) - 1 for one in indices])
        found = TarIndex.joined(indices)
        self._field_names = found.names
        self._urls = [os.fsdecode(one) for one in paths]
        self._firsts, self._blocks = SharedArray(found.firsts), SharedArray(found.blocks)
        self._sizes, self._fields = SharedArray(found.sizes), SharedArray(found.fields)
        self._keys, self._letters = SharedArray(found.keys), SharedArray(found.letters)
        self._take(paths, transform, known)

    def __len__(self) -> int:
        return len(self._firsts) - 1

    @property
    def dtype(self) -> Any:
        """The dtype of samples: Python objects."""
        return np.dtype(object)

    def _places(self, rows: Positions) -> tuple[Any, Positions, Positions]:
        """Return where samples are, with the headers that are between their files."""
        last = self._firsts[rows + 1] - 1
        begins = self._blocks[self._firsts[rows]] * BLOCK_BYTES
        ends = self._blocks[last] * BLOCK_BYTES + self._sizes[last]
        return self._archives(rows), begins, ends - begins

    def _parts(self, rows: Positions) -> tuple[Any, Positions, Positions]:
        """Return archive, offset and size of each file of samples."""
        counts, members = self._members_of(rows)
        several = len(self._sources) > 1
        archives = np.repeat(self._archives(rows), counts) if several else None
        return archives, self._blocks[members] * BLOCK_BYTES, self._sizes[members]

    def _decode(self, rows: Positions, parts: list[Any]) -> list[Any]:
        """Sort the contents of files into samples."""
        counts, members = self._members_of(rows)
        fields = self._fields.array[members].tolist()
        found = zip(fields, parts, strict=True)
        samples = []
        archives = self._archives(rows).tolist()
        for key, number, count in zip(
            self._keys_of(rows), archives, counts.tolist(), strict=True
        ):
            sample: dict[str, Any] = {"__key__": key, "__url__": self._urls[number]}
            for field, contents in islice(found, count):
                sample[self._field_names[field]] = contents
            samples.append(sample)
        return samples

    def _archives(self, rows: Positions) -> Positions:
        """Return the number of the archive of each sample."""
        return np.searchsorted(self._ends, rows, side="right")

    def _members_of(self, rows: Positions) -> tuple[Positions, Positions]:
        """Return how many files samples have, and their positions in the index."""
        begins = self._firsts[rows]
        counts = self._firsts[rows + 1] - begins
        before = np.cumsum(counts) - counts
        return counts, np.repeat(begins - before, counts) + np.arange(counts.sum())

    def _keys_of(self, rows: Positions) -> list[str]:
        """Return the keys of samples."""
        begins, ends = self._letters[rows].tolist(), self._letters[rows + 1].tolist()
        keys = self._keys.array.data
        return [
            decoded(keys[begin:end].tobytes())
            for begin, end in zip(begins, ends, strict=True)
        ]


def _saved_at(paths: list[str | bytes], index: bool | Path) -> list[str | None]:
    """Return the path of each archive's saved index; None if it is not saved."""
    if index is False:
        return [None] * len(paths)
    beside = [os.fsdecode(path) + SUFFIX for path in paths]
    if index is True:
        return list(beside)
    folder = absolute_folder("index", index)
    return [os.path.join(folder, _name_of(path)) for path in paths]


def _name_of(path: str | bytes) -> str:
    """Return the name of an index among those of archives of other folders."""
    whole = os.path.realpath(os.fsencode(path))
    digest = hashlib.blake2b(whole, digest_size=8).hexdigest()
    return f"{os.path.basename(os.fsdecode(path))}.{digest}{SUFFIX}"
