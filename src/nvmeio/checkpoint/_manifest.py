"""The manifest of a checkpoint: its files, their sizes, and a checksum of each block.

It is written last.  It is untrusted when it is read: its names must be plain file names in
the folder, of regular files with these sizes, before anything else is used.
"""

import functools
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any, NamedTuple

import crc32c

from nvmeio._files.kinds import MANIFEST, TENSORS, json_of
from nvmeio._native.pool import require_available
from nvmeio.checkpoint._errors import CheckpointError, NotDamagedError
from nvmeio.checkpoint._tree import DEPTH_MAX

__all__ = [
    "BLOCK_BYTES",
    "FORMAT",
    "FORMATS",
    "TREE",
    "TREE_BYTES_MAX",
    "Checksums",
    "Manifest",
    "Record",
    "read_json",
    "read_manifest",
    "require_readable",
    "require_same",
]

FORMAT = "nvmeio-checkpoint-2"
# The first one, of version 0.2, has no strides, and no metadata of modules.
FORMATS = ("nvmeio-checkpoint-1", FORMAT)
# The formats of other versions.
_FORMAT = re.compile(r"nvmeio-checkpoint-[1-9][0-9]{0,3}")
TREE = "tree.json"
FILES = (MANIFEST, TREE, TENSORS)

# Enough for the checksums of 4 million blocks, 32 TiB.
MANIFEST_BYTES_MAX = 64 << 20
TREE_BYTES_MAX = 1 << 30
# Memory for less is not looked for first.
_UNCHECKED_BYTES = 1 << 20
# About the most memory that Python needs for a byte of JSON, and for a value.
_MEMORY_PER_BYTE = 32
_MEMORY_PER_VALUE = 200
BLOCK_BYTES = 8 << 20

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_SUM = re.compile(r"[0-9a-f]{8}")
_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]')
# An OrderedDict with _metadata and with keys of type int takes six levels of JSON.
_DEPTH_MAX = 6 * DEPTH_MAX + 10


class Record(NamedTuple):
    """The size and checksums of a file."""

    nbytes: int
    checksums: list[str] | None  # one of each block


class Manifest(NamedTuple):
    """The contents of manifest.json."""

    step: int
    saved: str  # when, in ISO 8601
    checksum: str | None
    block_bytes: int
    files: dict[str, Record]

    def text(self) -> bytes:
        """Return the manifest as JSON."""
        said = {
            "format": FORMAT,
            "step": self.step,
            "saved": self.saved,
            "checksum": self.checksum,
            "block_bytes": self.block_bytes,
            "files": {
                name: {"nbytes": record.nbytes}
                | ({} if record.checksums is None else {"checksums": record.checksums})
                for name, record in self.files.items()
            },
        }
        return json.dumps(said, indent=1).encode() + b"\n"

    @property
    def identity(self) -> str:
        """What is the same in all copies of one save, and differs between two saves."""
        digest = hashlib.sha256(self.text()).hexdigest()
        try:
            # In one time zone, because the later save is the greater text.
            saved = datetime.fromisoformat(self.saved).astimezone(timezone.utc)
            when = saved.isoformat(timespec="microseconds")
        except (ValueError, OverflowError):
            when = self.saved
        return f"{when} {digest[:32]}"

    @property
    def nbytes(self) -> int:
        """The size of all files, in bytes."""
        return sum(record.nbytes for record in self.files.values())


class Checksums:
    """Computes a checksum of each block of a file, whose bytes are passed in order."""

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self.block_bytes = block_bytes
        self._done: list[str] = []
        self._value = self._filled = 0

    def __call__(self, piece: Any) -> None:
        view = memoryview(piece)
        while len(view):
            part = view[: self.block_bytes - self._filled]
            # crc32c releases the GIL for long pieces.
            self._value = crc32c.crc32c(part, self._value)
            self._filled += len(part)
            view = view[len(part) :]
            if self._filled == self.block_bytes:
                self._end()

    def _end(self) -> None:
        self._done.append(f"{self._value:08x}")
        self._value = self._filled = 0

    def sums(self) -> list[str]:
        """Return the checksums; the last block may be shorter."""
        if self._filled:
            self._end()
        return self._done


def require_same(path: str, seen: Checksums, record: Record) -> None:
    """Raise CheckpointError, with the range of bytes, if a checksum differs."""
    sums = zip(seen.sums(), record.checksums or [], strict=True)
    for index, (one, other) in enumerate(sums):
        if one != other:
            low = index * seen.block_bytes
            high = min(low + seen.block_bytes, record.nbytes)
            raise CheckpointError(
                f"{path} is damaged: bytes {low} to {high} have the checksum {one}, but "
                f"{other} was saved"
            )


def require_readable(path: str, nbytes: int) -> None:
    """Raise CheckpointError for a JSON file that is too large, MemoryError for memory."""
    limit = MANIFEST_BYTES_MAX if os.path.basename(path) == MANIFEST else TREE_BYTES_MAX
    if nbytes > limit:
        raise CheckpointError(f"{path} has {nbytes} bytes; {limit} is the limit")
    if nbytes > _UNCHECKED_BYTES:
        require_available(nbytes, f"reading {path}")


def read_json(
    folder: str, name: str, read: Callable[[str], bytes], manifest: Manifest | None = None
) -> Any:
    """Read a JSON file of a checkpoint; raise CheckpointError, with the path, if invalid.

    `read` returns the bytes of a path, which are ``require_readable``.  With a manifest,
    compare them with their checksums.
    """
    path = os.path.join(folder, name)
    text = read(path)
    if len(text) > _UNCHECKED_BYTES:
        require_available(_memory_for(text), f"parsing {path}")
    if manifest is not None and manifest.checksum is not None:
        seen, record = Checksums(manifest.block_bytes), manifest.files[name]
        seen(text)
        if len(text) != record.nbytes:
            raise CheckpointError(f"{path} has changed while it was read")
        require_same(path, seen, record)
    try:
        return json_of(text)
    except ValueError as error:
        raise CheckpointError(f"{path} is not the JSON of a checkpoint: {error}") from None
    except RecursionError:
        if _depth_of(text) > _DEPTH_MAX:
            words = f"is nested deeper than {_DEPTH_MAX} levels"
            raise CheckpointError(f"{path} {words}") from None
        # The nesting is allowed, so the caller has used up the stack.
        raise


def _memory_for(text: bytes) -> int:
    """Return about how much memory Python needs for the values of JSON.

    Long strings, such as those of bytes, need less than as many numbers.
    """
    values = sum(map(text.count, (b",", b"[", b"{")))
    width = 1 if text.isascii() and b"\\u" not in text else 4
    needed = (2 + 2 * width) * len(text) + _MEMORY_PER_VALUE * values
    return min(needed, _MEMORY_PER_BYTE * len(text))


def _depth_of(text: bytes) -> int:
    """Return the nesting depth of JSON, without recursion."""
    depth = deepest = 0
    for found in _BRACKETS.finditer(text):
        step = {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(found[0], 0)
        depth += step
        deepest = max(deepest, depth)
    return deepest


def check_size(path: str, nbytes: int) -> None:
    """Raise CheckpointError if a file is missing, not regular, or of another size."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path} is not a regular file")
    if found.st_size != nbytes:
        raise CheckpointError(f"{path} has {found.st_size} bytes, but {nbytes} were saved")


def read_manifest(
    folder: str,
    step: int,
    read: Callable[[str], bytes],
    check: Callable[[str, int], None] = check_size,
) -> Manifest:
    """Read and check the manifest of a step's folder, and by `check` the files' sizes."""
    path = os.path.join(folder, MANIFEST)
    wrong = functools.partial(_wrong, path)
    said = read_json(folder, MANIFEST, read)
    form = said.get("format") if isinstance(said, dict) else None
    if isinstance(form, str) and form not in FORMATS and _FORMAT.fullmatch(form):
        raise NotDamagedError(
            f"{path} is of the format {form}; this version of nvmeio reads "
            f"{' and '.join(FORMATS)}, so use a version that knows the other"
        )
    if form not in FORMATS:
        raise wrong(f"its format is not {FORMAT}")
    if said.get("step") != step or type(said["step"]) is not int:
        raise wrong(f"it is of step {said.get('step')!r:.50}, not {step}")
    checksum, block_bytes = said.get("checksum"), said.get("block_bytes")
    if checksum not in (None, "crc32c"):
        raise wrong(f"its checksum is {checksum!r:.50}, not 'crc32c' or None")
    if type(block_bytes) is not int or not 4096 <= block_bytes <= 1 << 30:
        raise wrong(f"its block_bytes is {block_bytes!r:.50}, not 4096 to {1 << 30}")
    files = said.get("files")
    if not isinstance(files, dict) or not {TENSORS, TREE} <= files.keys():
        raise wrong(f"its files lack {TENSORS} or {TREE}")
    found = {}
    for name, record in files.items():
        if not _NAME.fullmatch(name) or name == MANIFEST:
            raise wrong(f"{name!r:.110} is not a valid name of a file")
        found[name] = _record_of(record, checksum, block_bytes, wrong)
        check(os.path.join(folder, name), found[name].nbytes)
    return Manifest(step, str(said.get("saved"))[:40], checksum, block_bytes, found)


def _wrong(path: str, words: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: {words}")


def _record_of(
    record: Any,
    checksum: str | None,
    block_bytes: int,
    wrong: Callable[[str], CheckpointError],
) -> Record:
    nbytes = record.get("nbytes") if isinstance(record, dict) else None
    if type(nbytes) is not int or not 0 <= nbytes < 1 << 63:
        raise wrong(f"a file has {nbytes!r:.50} bytes")
    if checksum is None:
        return Record(nbytes, None)
    sums = record.get("checksums")
    count = -(-nbytes // block_bytes)
    if not (
        isinstance(sums, list)
        and len(sums) == count
        and all(isinstance(each, str) and _SUM.fullmatch(each) for each in sums)
    ):
        raise wrong(f"a file lacks the checksums of its {count} blocks")
    return Record(nbytes, sums)
