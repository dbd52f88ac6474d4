"""An open safetensors file, its header, and its map if it is mapped."""

import os
from typing import Any, Literal, cast

from nvmeio._arguments.checks import direct_choice, path_of
from nvmeio._files.paths import naming
from nvmeio._native.file import File
from nvmeio._native.region import FileMap
from nvmeio._native.system_calls import cached_fraction
from nvmeio._safetensors.header import LENGTH_BYTES, FileLayout, header_bytes, parse
from nvmeio._tensors.errors import SafetensorError

__all__ = ["Direct", "Mapped", "ModelFile", "mapped_choice"]

Direct = bool | Literal["auto"]
Mapped = bool | Literal["auto"]

# How much the first read takes, which includes the whole of most headers.
FIRST_BYTES = 64 << 10


def mapped_choice(mapped: Any, direct: Direct, out: Any = None) -> Mapped:
    """Return whether to map, or raise TypeError or ValueError."""
    mapped = cast("Mapped", direct_choice("mapped", mapped))
    past = direct_choice("direct", direct) is True
    if mapped is True and (past or out is not None):
        other = "direct is True" if past else "out has tensors to read into"
        raise ValueError(f"mapped is True, but {other}; pass only one of the two")
    return False if past or out is not None else mapped


class ModelFile:
    """An open safetensors file and its parsed header.

    With ``mapped=True`` the file is mapped; with "auto", if the page cache has all of it.
    """

    map: FileMap | None = None

    def __init__(
        self,
        filename: str | os.PathLike[str],
        direct: Direct = "auto",
        mapped: Mapped = False,
    ) -> None:
        self.path = cast("str", path_of(filename))
        self.file = File(self.path, direct=direct)
        try:
            self.before = os.fstat(self.file.fileno())
            size = self.before.st_size
            if mapped == "auto":
                # Before the header is read, which brings small files to the page cache.
                mapped = cached_fraction(self.file.fileno(), 0, size) == 1
            self.layout = self._read_header()
            if mapped and self.layout.data_bytes:
                self.map = FileMap(self.file.fileno(), size, self.path)
        except BaseException:
            self.close()
            raise

    def _read_header(self) -> FileLayout:
        size = self.before.st_size
        first = self._read(0, FIRST_BYTES)
        length = header_bytes(first, size)
        text = first[LENGTH_BYTES : LENGTH_BYTES + length]
        if len(text) < length:
            text += self._read(FIRST_BYTES, length - len(text))
        return parse(text, size)

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
        now = os.fstat(self.file.fileno())
        if (now.st_size, now.st_mtime_ns) != (self.before.st_size, self.before.st_mtime_ns):
            raise self.changed()

    def changed(self) -> SafetensorError:
        """Return the error for a file that was changed while it was read."""
        return SafetensorError(
            f"{self.path} has changed while it was read: it had {self.before.st_size} bytes"
        )

    def close(self) -> None:
        """Close the file; reads in flight continue."""
        self.file.close()
