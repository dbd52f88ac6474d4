"""A safetensors file that is open: what its header says, and how its bytes come."""

import errno
import os
from typing import Literal, cast

from nvmeio._arguments.checks import direct_choice
from nvmeio._files.paths import naming
from nvmeio._native.file import File
from nvmeio.safetensors._errors import SafetensorError
from nvmeio.safetensors._header import LENGTH_BYTES, Layout, header_bytes, parse
from nvmeio.safetensors._reading import is_cached

__all__ = ["Direct", "ModelFile"]

Direct = bool | Literal["auto"]

# Most headers are shorter, and come with their length.
FIRST_BYTES = 64 << 10


class ModelFile:
    """An open file, whose header was read.

    It is read by the page cache where that has most of it, else past it; by `direct` where
    that is not "auto".
    """

    def __init__(self, filename: str | os.PathLike[str], direct: Direct = "auto") -> None:
        direct = cast("Direct", direct_choice("direct", direct))
        self.path = os.fspath(filename)
        self.file = File(self.path, direct=False)
        try:
            self.before = os.fstat(self.file.fileno())
            self.layout = self._read_header()
            if direct is True or (direct == "auto" and not self._is_cached()):
                self._bypass(direct)
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
        """Read until there is no more."""
        found = b""
        while len(found) < nbytes:
            with naming(self.path):
                descriptor, at = self.file.fileno(), offset + len(found)
                part = os.pread(descriptor, nbytes - len(found), at)
            if not part:
                break
            found += part
        return found

    def _is_cached(self) -> bool:
        return is_cached(self.file, self.layout.data_start, self.layout.data_bytes)

    def _bypass(self, direct: Direct) -> None:
        """Open the file once more, with O_DIRECT where that can be."""
        try:
            other = File(self.path, direct=direct)
        except OSError:
            if direct is True:
                raise
            # It has lost its name, or its rights, meanwhile: this one is read to its end.
            return
        if not os.path.samestat(os.fstat(other.fileno()), self.before):
            # Another file has taken its name meanwhile: this one is read to its end.
            other.close()
            return
        self.file.close()
        self.file = other

    def offset(self, begin: int) -> int:
        """Return where in the file a byte of the data lies."""
        return self.layout.data_start + begin

    def check_unchanged(self) -> None:
        """Refuse bytes some of which may be newer than others."""
        now = os.fstat(self.file.fileno())
        if (now.st_size, now.st_mtime_ns) != (self.before.st_size, self.before.st_mtime_ns):
            raise self.changed()

    def changed(self) -> SafetensorError:
        """Return the error of a file that somebody has written to."""
        return SafetensorError(
            f"{self.path} has changed while it was read: it had {self.before.st_size} bytes"
        )

    def explained(self, error: OSError) -> Exception:
        """Return what a failed read means: past the end, the file has become shorter."""
        return self.changed() if error.errno == errno.ENODATA else error

    def close(self) -> None:
        """Close the file; what is in flight goes on."""
        self.file.close()
