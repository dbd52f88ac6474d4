"""Read entries of the zip archives that torch.save writes, with or without checksums."""

import zipfile
from typing import Protocol

__all__ = ["begin_of", "content_of"]

_HEADER_BYTES = 30


class Readable(Protocol):
    """A file object that can seek and read."""

    def seek(self, offset: int, /) -> int:
        """Move to a position."""

    def read(self, nbytes: int, /) -> bytes | None:
        """Return up to `nbytes` bytes; fewer only at the end."""


def begin_of(file: Readable, entry: zipfile.ZipInfo) -> int:
    """Return the offset of an entry's bytes; raise ValueError if it has no header."""
    file.seek(entry.header_offset)
    header = file.read(_HEADER_BYTES) or b""
    if len(header) < _HEADER_BYTES or header[:4] != b"PK\x03\x04":
        raise ValueError(f"{entry.filename!r} has no header")
    lengths = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    return entry.header_offset + _HEADER_BYTES + sum(lengths)


def content_of(file: Readable, entry: zipfile.ZipInfo) -> bytes:
    """Return the bytes of an uncompressed entry, or raise ValueError.

    zipfile cannot read entries whose checksum torch left out: it reports a wrong checksum.
    """
    if entry.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{entry.filename!r} is compressed")
    file.seek(begin_of(file, entry))
    found = file.read(entry.file_size) or b""
    if len(found) < entry.file_size:
        raise ValueError(f"{entry.filename!r} ends after {len(found)} bytes")
    return found
