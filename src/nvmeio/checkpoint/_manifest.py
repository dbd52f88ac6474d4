"""The manifest of a checkpoint: its files, their sizes, and a checksum of each block.

It is written last.  It comes from strangers: names are names of files in the folder, which
are no links, and sizes are those of the files, before anything else is believed.
"""

import functools
import json
import os
import re
import stat
from collections.abc import Callable
from typing import Any, NamedTuple

import crc32c

from nvmeio.checkpoint._errors import CheckpointError

__all__ = [
    "BLOCK_BYTES",
    "FORMAT",
    "MANIFEST",
    "TENSORS",
    "TREE",
    "Checksums",
    "Manifest",
    "Record",
    "read_json",
    "read_manifest",
]

FORMAT = "nvmeio-checkpoint-1"
MANIFEST = "manifest.json"
TENSORS = "tensors.safetensors"
TREE = "tree.json"

# A file is as large as memory, the others describe it.
JSON_BYTES_MAX = 1 << 30
BLOCK_BYTES = 8 << 20

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_SUM = re.compile(r"[0-9a-f]{8}")


class Record(NamedTuple):
    """What is known of a file."""

    nbytes: int
    checksums: list[str] | None  # one of each block


class Manifest(NamedTuple):
    """What a checkpoint consists of."""

    step: int
    saved: str  # when, in ISO 8601
    checksum: str | None
    block_bytes: int
    files: dict[str, Record]

    def text(self) -> bytes:
        """Return the manifest's file."""
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
    def nbytes(self) -> int:
        """How many bytes the files have."""
        return sum(record.nbytes for record in self.files.values())


class Checksums:
    """Takes the bytes of a file in their order, and has a checksum of each block."""

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self.block_bytes = block_bytes
        self._done: list[str] = []
        self._value = self._filled = 0

    def __call__(self, piece: Any) -> None:
        view = memoryview(piece)
        while len(view):
            part = view[: self.block_bytes - self._filled]
            # Without the GIL, if it is long.
            self._value = crc32c.crc32c(part, self._value)
            self._filled += len(part)
            view = view[len(part) :]
            if self._filled == self.block_bytes:
                self._end()

    def _end(self) -> None:
        self._done.append(f"{self._value:08x}")
        self._value = self._filled = 0

    def sums(self) -> list[str]:
        """Return them, the last block being what it is."""
        if self._filled:
            self._end()
        return self._done


def read_json(folder: str, name: str, opener: Callable[[str], int]) -> Any:
    """Read a small file of a checkpoint; raises CheckpointError, with the path."""
    path = os.path.join(folder, name)
    # It is closed whatever happens, as a descriptor that is given would not be.
    with open(path, "rb", opener=lambda path, flags: opener(path)) as file:
        size = os.fstat(file.fileno()).st_size
        if size > JSON_BYTES_MAX:
            raise CheckpointError(f"{path} has {size} bytes; {JSON_BYTES_MAX} is the limit")
        text = file.read()
    try:
        return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no JSON of a checkpoint: {error}") from None


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is no number of JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a key twice")
    return found


def read_manifest(folder: str, step: int, opener: Callable[[str], int]) -> Manifest:
    """Read and check the manifest of a step's folder, and look at its files' sizes."""
    path = os.path.join(folder, MANIFEST)
    wrong = functools.partial(_wrong, path)
    said = read_json(folder, MANIFEST, opener)
    if not isinstance(said, dict) or said.get("format") != FORMAT:
        raise wrong(f"its format is not {FORMAT}")
    if said.get("step") != step or type(said["step"]) is not int:
        raise wrong(f"it is of step {said.get('step')!r:.50}, not {step}")
    checksum, block_bytes = said.get("checksum"), said.get("block_bytes")
    if checksum not in (None, "crc32c"):
        raise wrong(f"its checksum is {checksum!r:.50}, which is not known here")
    if type(block_bytes) is not int or not 4096 <= block_bytes <= 1 << 30:
        raise wrong(f"its block_bytes is {block_bytes!r:.50}")
    files = said.get("files")
    if not isinstance(files, dict) or not {TENSORS, TREE} <= files.keys():
        raise wrong("it lacks files")
    found = {}
    for name, record in files.items():
        if not _NAME.fullmatch(name) or name == MANIFEST:
            raise wrong(f"{name!r:.110} is no name of a file of it")
        found[name] = _record_of(record, checksum, block_bytes, wrong)
        check_size(os.path.join(folder, name), found[name].nbytes)
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
        raise wrong(f"it has no checksums of {count} blocks of a file")
    return Record(nbytes, sums)


def check_size(path: str, nbytes: int) -> None:
    """Refuse a file that is missing, no file, or of another size."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path} is no regular file")
    if found.st_size != nbytes:
        raise CheckpointError(f"{path} has {found.st_size} bytes; {nbytes} were saved")
