"""An open safetensors file, its header, and its map if it is mapped."""

import os
import re
from typing import Any, Literal, cast

from nvmeio._arguments.checks import direct_choice, path_of
from nvmeio._files.kinds import HEAD_BYTES, what_begins
from nvmeio._files.paths import exists_now, naming
from nvmeio._native.file import File, owned
from nvmeio._native.region import FileMap
from nvmeio._native.system_calls import cached_fraction
from nvmeio._safetensors.header import (
    HEADER_BYTES_MAX,
    LENGTH_BYTES,
    FileLayout,
    header_bytes,
    parse,
)
from nvmeio._tensors.errors import SafetensorError, note

__all__ = ["Direct", "Mapped", "ModelFile", "mapped_choice"]

Direct = bool | Literal["auto"]
Mapped = bool | Literal["auto"]

# How much the first read takes, which includes the whole of most headers.
FIRST_BYTES = 64 << 10

# Where a tensor ends, in the text of a header.
_OFFSETS = re.compile(rb'"data_offsets"\s*:\s*\[\s*\d{1,19}\s*,\s*(\d{1,19})\s*\]')


def mapped_choice(mapped: Any, direct: Direct, out: Any = None) -> Mapped:
    """Return whether to map, or raise TypeError or ValueError."""
    mapped = cast("Mapped", direct_choice("mapped", mapped))
    past = direct_choice("direct", direct) is True
    if mapped is True and (past or out is not None):
        other = "direct is True" if past else "out has tensors to read into"
        raise ValueError(f"mapped is True, but {other}; pass only one of the two")
    return False if past or out is not None else mapped


def _what(first: bytes, size: int) -> str:
    """Say what a file is whose header is invalid."""
    length = int.from_bytes(first[:LENGTH_BYTES], "little")
    # The bracket that begins a header is also that of other texts of JSON.
    if first[LENGTH_BYTES : LENGTH_BYTES + 1] == b"{" and length <= HEADER_BYTES_MAX:
        end = LENGTH_BYTES + length
        text = first[LENGTH_BYTES:end]
        if end > size:
            return (
                f"it was truncated: it has {size} bytes, and its header alone ends at {end}"
            )
        ends = [int(found[1]) for found in _OFFSETS.finditer(text)]
        if len(text) == length and ends and end + max(ends) > size:
            return (
                f"it was truncated: it has {size} bytes, and its last tensor ends at "
                f"{end + max(ends)}"
            )
        return f"it begins like a safetensors file, and has {size} bytes"
    found = what_begins(first[:HEAD_BYTES], size)
    return found or f"it is no safetensors file, and has {size} bytes"


def _version_of(found: os.stat_result) -> tuple[int, int]:
    return found.st_size, found.st_mtime_ns


class ModelFile:
    """An open safetensors file and its parsed header.

    With ``mapped=True`` the file is mapped; with "auto", if the page cache has all of it.
    """

    map: FileMap | None = None
    # Tensors in new memory begin at a multiple of this, besides that of their elements.
    align = 1

    def __init__(
        self,
        filename: str | os.PathLike[str],
        direct: Direct = "auto",
        mapped: Mapped = False,
    ) -> None:
        self.path = cast("str", path_of(filename))
        try:
            self.file = owned(File(self.path, direct=direct))
        except FileNotFoundError:
            # This host may remember that another one had not saved it yet.
            if not exists_now(os.fsdecode(self.path)):
                raise
            self.file = owned(File(self.path, direct=direct))
        try:
            self.before = os.fstat(self.file.fileno())
            size = self.before.st_size
            if mapped == "auto":
                # Before the header is read, which brings small files to the page cache.
                mapped = cached_fraction(self.file.fileno(), 0, size) == 1
            self.layout = self._layout()
            if mapped and self.layout.data_bytes:
                self.map = FileMap(self.file.fileno(), size, self.path)
        except BaseException:
            self.close()
            raise

    def _layout(self) -> FileLayout:
        """Read the header.

        An error keeps safetensors' message; its note says which file it is, of what kind.
        """
        size = self.before.st_size
        first = self._read(0, FIRST_BYTES)
        try:
            length = header_bytes(first, size)
            text = first[LENGTH_BYTES : LENGTH_BYTES + length]
            if len(text) < length:
                text += self._read(FIRST_BYTES, length - len(text))
            return parse(text, size)
        except SafetensorError as error:
            note(error, f"{self.path}: {_what(first, size)}")
            raise

    def _read(self, offset: int, nbytes: int) -> bytes:
        """Read `nbytes` bytes, or fewer at the end of the file."""
        found = b""
        while len(found) < nbytes:
            with naming(self.path):
                descriptor, at = self.file.fileno(), offset + len(found)
                part = os.pread(descriptor, nbytes - len(found), at)
            if not part:
                break
            found += part
        return found

    def offset(self, begin: int) -> int:
        """Return the offset in the file of a byte of the data."""
        return self.layout.data_start + begin

    def check_unchanged(self) -> None:
        """Raise SafetensorError if the file was changed since it was opened."""
        if _version_of(os.fstat(self.file.fileno())) != self.version:
            raise self.changed()

    @property
    def version(self) -> tuple[int, int]:
        """What tells the file from another one that gets its name."""
        return _version_of(self.before)

    def changed(self) -> SafetensorError:
        """Return the error for a file that was changed while it was read."""
        return SafetensorError(
            f"{self.path} has changed while it was read: it had {self.before.st_size} bytes"
        )

    def close(self) -> None:
        """Close the file; reads in flight continue."""
        self.file.close()
