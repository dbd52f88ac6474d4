"""Index a tar archive: where the bytes of its members are, and which members form a sample.

Members are grouped as in WebDataset 1.0.  Archives that it or tar would silently read
wrongly or partly are refused.
"""

import json
import logging
import re
import time
import warnings
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nvmeio._arguments.callers import level_outside
from nvmeio._arguments.json_texts import parse_json
from nvmeio._arrays.indexing import Positions
from nvmeio._events.log import log
from nvmeio._files.tar import Archive, Member, decoded
from nvmeio._native.file import File
from nvmeio._safetensors.writing import replacing_links
from nvmeio.default import default_handle
from nvmeio.memory import empty
from nvmeio.safetensors import SafetensorError
from nvmeio.safetensors.numpy import safe_open, save_file
from nvmeio.torch.data._identity import Stamp, stamp_of

__all__ = ["BLOCK_BYTES", "SUFFIX", "TarIndex", "index_of"]

Unsigned = npt.NDArray[np.unsignedinteger[Any]]

# The suffix that is added to an archive's name for its saved index.
SUFFIX = ".nvmeio-index"
_FORMAT = "nvmeio tar index 4"

# Headers and the bytes of members begin at multiples of it.
BLOCK_BYTES = 512
# Headers closer than FAR are read together with the bytes between them, in large reads;
# others one by one.  A drive reads about FAR bytes in the latency of one small read.
_LARGE_BYTES = 4 << 20
_SMALL_BYTES = 16 << 10
_FAR_BYTES = 256 << 10
# How much between two files is compared with what was indexed without walking through it,
# and between how many at once.  An extended header rarely has more.
_GAP_BYTES = 4096
_GAPS = 1024

# From WebDataset's tariterators.py: the default of skip_meta.
_META = re.compile(r"__[^/]*__($|/)")


class TarIndex(NamedTuple):
    """The samples of an archive; sample i has the members firsts[i] to firsts[i + 1].

    Each array has the smallest dtype that holds its numbers.
    """

    firsts: Unsigned
    blocks: Unsigned  # of a member: in which block of the archive its bytes begin
    sizes: Unsigned
    fields: Unsigned  # of a member: which of the names below is its own
    keys: Unsigned  # of all samples, in UTF-8
    letters: Unsigned  # sample i has the bytes letters[i] to letters[i + 1] of the keys
    names: list[str]

    @classmethod
    def joined(cls, parts: Sequence["TarIndex"]) -> "TarIndex":
        """Return the index of several archives, one after the other."""
        if len(parts) == 1:
            return parts[0]
        names: dict[str, int] = {}
        fields = []
        for part in parts:
            numbers = [names.setdefault(name, len(names)) for name in part.names]
            fields.append(_smallest(numbers)[part.fields])
        return cls(
            _chained([part.firsts for part in parts]),
            np.concatenate([part.blocks for part in parts]),
            np.concatenate([part.sizes for part in parts]),
            np.concatenate(fields),
            np.concatenate([part.keys for part in parts]),
            _chained([part.letters for part in parts]),
            list(names),
        )

    def extents(self) -> tuple[Positions, Positions]:
        """Return where the bytes of each member begin and end in the archive."""
        begins = self.blocks.astype(np.int64) * BLOCK_BYTES
        return begins, begins + self.sizes.astype(np.int64)


def _smallest(numbers: Any) -> Unsigned:
    """Convert numbers to the smallest dtype that holds them."""
    found = np.asarray(numbers, np.int64)
    return found.astype(np.min_scalar_type(found.max(initial=0)))


def _chained(parts: list[Unsigned]) -> Unsigned:
    """Return the borders of all parts, whose last ones are the lengths of the parts."""
    begins = np.cumsum([0, *(int(part[-1]) for part in parts)])
    found = [
        part[:-1].astype(np.int64) + at for part, at in zip(parts, begins, strict=False)
    ]
    return _smallest(np.concatenate([*found, begins[-1:]]))


def index_of(file: File, saved: str | None) -> TarIndex:
    """Return the saved index of an archive, or make and save a new one.

    Raise ValueError for an archive that is damaged, or has files that cannot be read in
    place.
    """
    now_ns, stamp = time.time_ns(), stamp_of(file)
    status = _Status(stamp, stamp.settled(now_ns))
    found = None if saved is None else _load(saved, file, status)
    if found is not None:
        return found
    archive = _Archive(file)
    index = _grouped(archive)
    for remark in archive.remarks:
        warnings.warn(f"the archive {file.path!r} {remark}", stacklevel=level_outside())
    # Not saved after a warning, so that the warning is repeated every time.
    is_saved = saved is not None and not archive.remarks
    headers = _headers_at(file, index) if is_saved else ""
    if stamp_of(file) != stamp:
        raise ValueError(f"the archive {file.path!r} was changed while it was indexed")
    if saved is not None and is_saved:
        _save(saved, index, status, headers, logging.WARNING)
    return index


class _Status(NamedTuple):
    """The status of an archive when its index was made."""

    stamp: Stamp
    # Whether the stamp alone can decide.
    settled: bool

    def text(self) -> str:
        return " ".join(str(int(one)) for one in (*self.stamp, self.settled))

    @classmethod
    def of(cls, text: str) -> "_Status":
        *numbers, settled = map(int, text.split())
        return cls(Stamp(*numbers), bool(settled))

    def is_that_of(self, now: Stamp) -> bool:
        """Return whether an archive that has this status now is unchanged for certain."""
        then = self.stamp
        # Each machine numbers network file systems for itself.  A fraction of a second,
        # which nobody can set, then shows that it is the same file.
        if then.ctime_ns % 1_000_000_000:
            then = then._replace(device=now.device)
        return self.settled and then == now


def _headers_at(file: File, index: TarIndex) -> str:
    """Return a checksum of all headers, which are between the files of samples."""
    offsets, ends = index.extents()
    begins = np.append(0, -(-ends // BLOCK_BYTES) * BLOCK_BYTES)
    until = np.append(offsets, file.size)
    # Files that belong to no sample may be there too.
    is_large = until - begins > _GAP_BYTES
    sizes = np.where(is_large, 0, until - begins)
    checksum, memory = 0, np.empty(_GAP_BYTES * _GAPS, np.uint8)
    for first in range(0, len(begins), _GAPS):
        part = slice(first, first + _GAPS)
        filled = memory[: sizes[part].sum()]
        default_handle().gather(file, begins[part], sizes[part], filled)
        checksum = zlib.crc32(filled.data, checksum)
    read = _Window(file).read
    for number in np.flatnonzero(is_large).tolist():
        checksum = _walked(file, read, begins[number], until[number], checksum)
    return f"{checksum:08x}"


def _walked(
    file: File, read: Callable[[int, int], bytes], begin: int, until: int, checksum: int
) -> int:
    """Add the headers of a part of an archive to a checksum."""

    def seen(at: int, size: int) -> bytes:
        nonlocal checksum
        found = read(begin + at, size)
        checksum = zlib.crc32(found, checksum)
        return found

    for member in Archive(file.path, file.size - begin, seen).members():
        if begin + member.begin >= until:
            break
    return checksum


# Bytes.


def _memory(size: int) -> memoryview:
    memory: Any = empty(size, np.uint8)
    return memoryview(memory)


class _Window:
    """A part of a file in memory, which moves along the file."""

    def __init__(self, file: File) -> None:
        self._file, self._size = file, file.size
        self._begin = self._end = 0
        self._memory = _memory(_LARGE_BYTES)

    def read(self, at: int, size: int) -> bytes:
        """Return bytes of the file, fewer at its end."""
        if not self._begin <= at <= at + size <= self._end:
            self._move(at, size)
        end = min(at + size, self._end) - self._begin
        return self._memory[at - self._begin : end].tobytes()

    def _move(self, at: int, size: int) -> None:
        begin = at & -4096
        most = _LARGE_BYTES if at - self._end < _FAR_BYTES else _SMALL_BYTES
        count = max(0, min(max(most, at + size - begin), self._size - begin))
        if count > len(self._memory):
            self._memory = _memory(count)
        if count:
            default_handle().read(self._memory[:count], self._file, begin)
        self._begin, self._end = begin, begin + count


class _Archive(Archive):
    """Walks through the headers of an archive whose members can be read in place."""

    def __init__(self, file: File) -> None:
        super().__init__(file.path, file.size, _Window(file).read)

    def members(self) -> Iterator[Member]:
        """Yield the regular files; raise ValueError for one that is sparse."""
        for each in super().members():
            if each.is_sparse:
                self.refuse(
                    each.header,
                    f"has a sparse file, {each.name!r}, which cannot be read in place",
                )
            yield each


# Samples.


def _key_and_suffix(path: str) -> tuple[str, str] | None:
    """Split a path at the first dot of its name, as base_plus_ext() of WebDataset does.

    Its pattern, ^((?:.*/|)[^.]+)[.]([^/]*)$, takes a time that is quadratic.
    """
    slash = path.rfind("/")
    dot = path.find(".", slash + 1)
    if dot == slash + 1:
        # The key of .name in a folder ends with the folder, unless that has a dot too.
        folder = path[path.rfind("/", 0, max(slash, 0)) + 1 : slash + 1]
        if not folder or "." in folder:
            return None
    return None if dot < 0 else (path[:dot], path[dot + 1 :])


def _grouped(archive: _Archive) -> TarIndex:
    """Walk through an archive, and group its members."""
    firsts, blocks, sizes, fields = array("q"), array("q"), array("q"), array("q")
    keys, letters = bytearray(), array("q", [0])
    names: dict[str, int] = {}
    last: str | None = None
    seen: set[str] = set()
    hashes = array("q")
    for member in archive.members():
        path, offset, size = member.name, member.begin, member.size
        found = _key_and_suffix(path)
        if found is None or (path.startswith("__") and _META.match(path)):
            continue
        key, name = found[0], found[1].lower()
        if key != last:
            last = key
            hashes.append(hash(key))
            seen = {"__key__", "__url__"}
            firsts.append(len(blocks))
            keys += key.encode("utf-8", "surrogateescape")
            letters.append(len(keys))
        if name in seen:
            raise ValueError(
                f"the archive {archive.path!r} has two files {name!r} of the sample "
                f"{key!r}: the second is {path!r}"
            )
        seen.add(name)
        blocks.append(offset // BLOCK_BYTES)
        sizes.append(size)
        fields.append(names.setdefault(name, len(names)))
    firsts.append(len(blocks))
    _refuse_split(archive.path, keys, letters, np.array(hashes, np.int64))
    return TarIndex(
        _smallest(firsts),
        _smallest(blocks),
        _smallest(sizes),
        _smallest(fields),
        np.frombuffer(bytes(keys), np.uint8),
        _smallest(letters),
        list(names),
    )


def _refuse_split(
    path: str | bytes, keys: bytearray, letters: "array[int]", hashes: Positions
) -> None:
    """Raise ValueError for a key that comes again after another one."""
    order = np.argsort(hashes, kind="stable")
    again = np.flatnonzero(hashes[order][1:] == hashes[order][:-1]) + 1
    seen: dict[bytes, int] = {}
    for number in sorted({*order[again - 1].tolist(), *order[again].tolist()}):
        key = bytes(keys[letters[number] : letters[number + 1]])
        first = seen.setdefault(key, number)
        if first != number:
            raise ValueError(
                f"the archive {path!r} has files of the sample {decoded(key)!r} at two "
                f"places, as samples {first} and {number}: make it with the files of a "
                "sample next to each other, as tar --sort=name does"
            )


# A saved index is a safetensors file, because its reader is made for untrusted files.


def _save(saved: str, index: TarIndex, status: _Status, headers: str, level: int) -> None:
    """Save an index; if that fails, log it at this level."""
    arrays = {name: getattr(index, name) for name in _ARRAYS}
    metadata = {
        "format": _FORMAT,
        "archive": status.text(),
        "headers": headers,
        "names": json.dumps(index.names),
    }
    try:
        # A symbolic link in the folder must not redirect the write to another file.
        with replacing_links():
            save_file(arrays, saved, metadata, sync=False)
    except (OSError, SafetensorError) as error:
        log.log(level, "the index of an archive is not saved: %s", error)


_ARRAYS = TarIndex._fields[:-1]


def _load(saved: str, archive: File, status: _Status) -> TarIndex | None:
    """Return the saved index of an archive, or None if there is no valid one."""
    try:
        with safe_open(saved, "np") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT:
                return None
            then, now = _Status.of(metadata["archive"]), status.stamp
            if (then.stamp.size, then.stamp.mtime_ns) != (now.size, now.mtime_ns):
                return None
            arrays = {name: file.get_tensor(name) for name in _ARRAYS}
            index = TarIndex(**arrays, names=parse_json(metadata["names"]))
        _check_index(index, now.size)
        if not then.is_that_of(now):
            # It may have been moved here or copied, or changed without another time.
            headers = metadata["headers"]
            if _headers_at(archive, index) != headers:
                return None
            if status.settled:
                # So that they need not be compared the next time.
                _save(saved, index, status, headers, logging.DEBUG)
    except FileNotFoundError:
        return None
    except Exception as error:
        log.warning("the index %r is not used: %s", saved, error)
        return None
    return index


def _check_index(index: TarIndex, size: int) -> None:
    """Raise ValueError if an index does not fit an archive of this size."""
    for name in _ARRAYS:
        one = getattr(index, name)
        if one.dtype.kind != "u" or one.ndim != 1:
            raise ValueError(f"{name} is of dtype {one.dtype} and shape {one.shape}")
    firsts, blocks, sizes, fields, keys, letters, names = index
    if keys.dtype != np.uint8:
        raise ValueError(f"keys is of dtype {keys.dtype}")
    holds = (
        isinstance(names, list)
        and all(isinstance(name, str) for name in names)
        and len(blocks) == len(sizes) == len(fields)
        and len(firsts) == len(letters)
        and _are_borders(firsts, len(blocks))
        and _are_borders(letters, len(keys))
        and bool(((blocks >= 1) & (blocks <= size // BLOCK_BYTES)).all())
        and bool((sizes <= size).all())
        and bool((fields < len(names)).all())
    )
    if holds:
        begins, ends = index.extents()
        holds = bool((ends <= size).all() and (begins[1:] >= ends[:-1]).all())
    if not holds:
        raise ValueError("its numbers do not fit the archive")


def _are_borders(found: Unsigned, count: int) -> bool:
    """Return whether numbers cut so many others into parts, none of them empty."""
    return (
        len(found) > 0
        and (found[0], found[-1]) == (0, count)
        # Not of their differences, which may be too large for the dtype.
        and bool((found[1:] > found[:-1]).all())
    )
