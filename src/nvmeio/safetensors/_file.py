"""An open safetensors file and its header."""

import errno
import os
from typing import Literal, cast

from nvmeio._arguments.checks import path_of
from nvmeio._files.paths import naming
from nvmeio._native.file import File
from nvmeio.safetensors._errors import SafetensorError
from nvmeio.safetensors._header import LENGTH_BYTES, Layout, header_bytes, parse

__all__ = ["Direct", "ModelFile"]

Direct = bool | Literal["auto"]

# How much the first read takes, which includes the whole of most headers.
FIRST_BYTES = 64 << 10


class ModelFile:
    """An open safetensors file and its parsed header."""

    def __init__(self, filename: str | os.PathLike[str], direct: Direct = "auto") -> None:
        self.path = cast("str", path_of(filename))
        self.file = File(self.path, direct=direct)
        try:
            self.before = os.fstat(self.file.fileno())
            self.layout = self._read_header()
        except BaseException:
            self.close()
            raise

    def _read_header(self) -> Layout:
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

    def explained(self, error: OSError) -> Exception:
        """Return the error to raise: a read past the end means a truncated file."""
        return self.changed() if error.errno == errno.ENODATA else error

    def close(self) -> None:
        """Close the file; reads in flight continue."""
        self.file.close()
