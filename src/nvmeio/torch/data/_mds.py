"""``MDSDataset``: the samples of MosaicML's MDS shards as a dataset."""

import contextlib
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nvmeio._arguments.checks import flag, path_of
from nvmeio._arguments.types import Path
from nvmeio._arrays.indexing import Positions
from nvmeio._files.kinds import because_of_kind, json_of
from nvmeio._files.paths import absolute
from nvmeio._native.file import File
from nvmeio.default import default_handle
from nvmeio.files import read_file
from nvmeio.torch.data._identity import Identity, identity_of
from nvmeio.torch.data._mds_encodings import Encoding, Value, encoding_of
from nvmeio.torch.data._records import RecordDataset

__all__ = ["MDSDataset"]

Places = npt.NDArray[np.uint32]

# How many shards are open at once while their tables are read.
_OPEN_MAX = 128


class MDSDataset(RecordDataset):
    """The samples of MDS shards, MosaicML's format, as a map-style dataset.

    Parameters
    ----------
    path : str, bytes or os.PathLike
        The folder of ``index.json`` and the shards.
    split : str, optional
        The subfolder of the split.
    allow_pickle : bool, default False
        Whether to decode columns of the encoding ``pkl``.  A pickle can run any code.
    transform : callable, optional
        A function that is applied to each sample, in the process that reads it.

    Raises
    ------
    ModuleNotFoundError
        A column has images, and Pillow is not installed.
    OSError
        A file cannot be opened or read; has errno and path.
    TypeError
        An argument is of the wrong type.
    ValueError
        The index or a shard is damaged, of another format or version, or compressed; a
        column is pickled, and that is not allowed.

    Notes
    -----
    Sample ``i`` is what ``streaming.LocalDataset(path, split)[i]`` returns: a dict with
    the value of each column.  Arrays are writable.  The samples are in the order of the
    index.

    Compressed shards can be read only after streaming, or another program, has decompressed
    them.  Hashes are not compared.  Nothing is downloaded, deleted or written.

    The tables of all shards are read and checked at construction, and take 12 bytes of
    memory per sample.  A batch of a DataLoader is one gather for each shard that has
    samples of it.

    Examples
    --------
    >>> import json
    >>> from pathlib import Path
    >>> shard = np.array([2, 16, 24, 32], np.uint32).tobytes()
    >>> nvmeio.write_file(shard + np.array([5, 7]).tobytes(), "shard.mds")
    32
    >>> columns = {"column_names": ["x"], "column_encodings": ["int"], "column_sizes": [8]}
    >>> entry = {"version": 2, "format": "mds", "samples": 2, "compression": None}
    >>> entry |= columns
    >>> entry["raw_data"] = {"basename": "shard.mds", "bytes": 32, "hashes": {}}
    >>> index = json.dumps({"version": 2, "shards": [entry]})
    >>> written = Path("index.json").write_text(index)
    >>> nvmeio.torch.MDSDataset(".")[1]
    {'x': 7}
    """

    _may_grow = False
    _as_bytes = True

    def __init__(
        self,
        path: Path,
        split: str | None = None,
        *,
        allow_pickle: bool = False,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        folder = os.path.join(os.fsdecode(absolute(path_of(path))), split or "")
        index = os.path.join(folder, "index.json")
        shards = list(_shards(index, flag("allow_pickle", allow_pickle)))
        counts = [shard.samples for shard in shards]
        offsets, sizes = np.empty((2, sum(counts)), np.uint32)
        begin, known = 0, []
        for places, one in _tables(shards):
            known.append(one)
            end = begin + len(places) - 1
            offsets[begin:end] = places[:-1]
            np.subtract(places[1:], places[:-1], sizes[begin:end])
            begin = end
        # Most shards are alike, and a pickle has one copy of the same object.
        self._columns: list[_Columns] = []
        for shard in shards:
            is_alike = self._columns and self._columns[-1] == shard.columns
            self._columns.append(self._columns[-1] if is_alike else shard.columns)
        borders = [columns.borders() for columns in self._columns]
        self._heads, self._tails = np.array(borders, np.int64).reshape(-1, 2).T
        files = np.repeat(np.arange(len(shards), dtype=np.int32), counts)
        paths: list[str | bytes] = [shard.path for shard in shards]
        self._make(paths or [index], offsets, sizes, files, transform, known)

    @property
    def dtype(self) -> Any:
        """The dtype of samples: Python objects."""
        return np.dtype(object)

    def _parts(self, rows: Positions) -> tuple[Any, Positions, Positions]:
        """Return three parts of each sample: the second is the value of varying size."""
        numbers, offsets, sizes = super()._parts(rows)
        heads = np.minimum(self._heads[numbers], sizes)
        tails = np.minimum(self._tails[numbers], sizes - heads)
        begins = offsets, offsets + heads, offsets + sizes - tails
        lengths = heads, sizes - heads - tails, tails
        return (
            np.repeat(numbers, 3),
            np.stack(begins, 1).ravel(),
            np.stack(lengths, 1).ravel(),
        )

    def _decode(self, rows: Positions, parts: list[Any]) -> list[Any]:
        """Decode samples from their parts."""
        files: Any = self._files
        numbers = files[rows].tolist()
        found = []
        for row, number, *sample in zip(
            rows.tolist(), numbers, parts[::3], parts[1::3], parts[2::3], strict=True
        ):
            try:
                found.append(self._columns[number].decode(*sample))
            except _BadValueError as error:
                raise ValueError(
                    f"sample {row}, in {self._sources[number]!r}, is damaged: {error}"
                ) from error.__cause__
        return found


# More bytes than a sample has.
_ALL = 2**62


class _BadValueError(Exception):
    """A sample is damaged."""


class _Columns(NamedTuple):
    """The columns of a shard."""

    names: list[str]
    encodings: list[Encoding]
    sizes: list[int | None]

    def borders(self) -> tuple[int, int]:
        """Return how many bytes of a sample are before the value that varies, and behind.

        If several vary, the sample has their sizes, and all of it counts as before.
        """
        if self.sizes.count(None) != 1:
            return _ALL, 0
        place = self.sizes.index(None)
        before = 4 + sum(size or 0 for size in self.sizes[:place])
        behind = sum(size or 0 for size in self.sizes[place:])
        return min(before, _ALL), min(behind, _ALL)

    def decode(self, head: bytes, body: bytes, tail: bytes) -> dict[str, Any]:
        """Return the values of a sample, cut at its borders: sizes come first."""
        varying = self.sizes.count(None)
        begin, length = 4 * varying, len(head) + len(body) + len(tail)
        if length < begin:
            raise _BadValueError(f"{length} bytes are less than its sizes take")
        given = iter(struct.unpack_from(f"<{varying}I", head))
        found = [next(given) if size is None else size for size in self.sizes]
        if begin + sum(found) != length:
            raise _BadValueError(f"{length} bytes for sizes that take {begin + sum(found)}")
        values: dict[str, Any] = {}
        part = memoryview(head)
        value: Value
        for name, encoding, size in zip(self.names, self.encodings, found, strict=True):
            if varying == 1 and encoding.size is None:
                value, part, begin = body, memoryview(tail), 0
            else:
                value = part[begin : begin + size]
                begin += size
            try:
                values[name] = encoding.decode(value)
            except Exception as error:
                raise _BadValueError(f"column {name!r}: {error!r}") from error
        return values


class _Shard(NamedTuple):
    """A shard, as the index describes it."""

    path: str
    samples: int
    size: int
    columns: _Columns


def _shards(index: str, allow_pickle: bool) -> Iterator[_Shard]:
    """Yield the shards of an index; raise ValueError if it is invalid."""
    folder = os.path.dirname(index)
    content = read_file(index).tobytes()
    try:
        contents = json_of(content)
        if contents["version"] != 2:
            raise ValueError(f"its version is {contents['version']!r}, not 2")
        shards = _of(contents, "shards", list)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{index!r} is not an index of MDS shards: {error}") from error
    for number, shard in enumerate(shards):
        try:
            yield _shard(folder, shard, allow_pickle)
        except (ValueError, KeyError, TypeError) as error:
            what = f"has no {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"shard {number} of {index!r} {what}") from error


def _of(fields: Any, name: str, kind: type) -> Any:
    """Return a field, and check its type."""
    value = fields[name]
    if type(value) is not kind:
        raise ValueError(f"has {name} {value!r:.100}, not of type {kind.__name__}")
    return value


def _shard(folder: str, shard: Any, allow_pickle: bool) -> _Shard:
    """Check the description of a shard in an index."""
    form, version = _of(shard, "format", str), _of(shard, "version", int)
    if (form, version) != ("mds", 2):
        raise ValueError(f"is of format {form!r}, version {version}; only 'mds', 2 is read")
    raw = _of(shard, "raw_data", dict)
    name = _of(raw, "basename", str)
    if not name or "\0" in name or os.path.isabs(name) or ".." in name.split("/"):
        raise ValueError(f"has the basename {name!r}, which is not in the folder")
    path = os.path.join(folder, name)
    _check_there(path, folder, shard)
    samples, size = _of(shard, "samples", int), _of(raw, "bytes", int)
    found = os.stat(path).st_size
    if size != found:
        why = because_of_kind(path) or ": it is incomplete"
        raise ValueError(f"has {size} bytes, and {path!r} has {found}{why}")
    if samples < 0:
        raise ValueError(f"has {samples} samples; it must be 0 or more")
    if 4 * (samples + 2) > size:
        raise ValueError(f"has {samples} samples, too many for {size} bytes")
    return _Shard(path, samples, size, _columns(shard, allow_pickle))


def _check_there(path: str, folder: str, shard: Any) -> None:
    """Raise ValueError, with what to do, for a shard that exists only compressed."""
    packed = shard.get("zip_data")
    if os.path.exists(path) or not shard.get("compression") or not packed:
        return
    name = _of(packed, "basename", str)
    raise ValueError(
        f"is compressed, {os.path.join(folder, name)!r}: decompress it to {path!r}, as "
        "streaming does when it first reads it"
    )


def _columns(shard: Any, allow_pickle: bool) -> _Columns:
    """Check the description of a shard's columns in an index."""
    names, kinds, sizes = (
        _of(shard, f"column_{field}", list) for field in ("names", "encodings", "sizes")
    )
    if not len(names) == len(kinds) == len(sizes) or len({*names}) < len(names):
        raise ValueError(f"has the columns {names!r:.200}, with {len(kinds)} encodings")
    encodings = []
    for name, kind, size in zip(names, kinds, sizes, strict=True):
        if not isinstance(name, str) or not isinstance(kind, str):
            raise ValueError(f"has the column {name!r:.100} of encoding {kind!r:.100}")
        try:
            encoding = encoding_of(kind, allow_pickle)
        except ValueError as error:
            raise ValueError(
                f"has the column {name!r} of encoding {kind!r}, {error}"
            ) from None
        if encoding.size != size:
            raise ValueError(
                f"has the column {name!r} of size {size!r:.100}, and {kind!r} has "
                f"{encoding.size}"
            )
        encodings.append(encoding)
    return _Columns(names, encodings, sizes)


def _tables(shards: Sequence[_Shard]) -> Iterator[tuple[Places, Identity]]:
    """Yield where the samples of each shard begin and the last one ends; and its file."""
    for start in range(0, len(shards), _OPEN_MAX):
        part = shards[start : start + _OPEN_MAX]
        tables = [np.empty(shard.samples + 2, "<u4") for shard in part]
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(File(shard.path)) for shard in part]
            # From before the tables are read, so that they belong to these files.
            known = [identity_of(file) for file in files]
            default_handle().read_many(
                (table, file, 0) for table, file in zip(tables, files, strict=True)
            )
        for shard, table, one in zip(part, tables, known, strict=True):
            places = table[1:].astype(np.uint32, copy=False)
            if table[0] != shard.samples:
                raise ValueError(
                    f"{shard.path!r} has {table[0]} samples; its index says {shard.samples}"
                )
            if places[0] < table.nbytes or places[-1] > shard.size:
                raise ValueError(
                    f"{shard.path!r} has samples from byte {places[0]} to {places[-1]}; "
                    f"they must be from {table.nbytes} to {shard.size}"
                )
            if (places[1:] < places[:-1]).any():
                raise ValueError(f"{shard.path!r} has a sample that ends before it begins")
            yield places, one
