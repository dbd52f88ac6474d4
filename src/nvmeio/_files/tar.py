"""Walk through the headers of a tar archive, as POSIX and GNU tar define them.

Python's tarfile ends quietly at a damaged header, and calls itself for each long name.
"""

import struct
import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple, NoReturn

from nvmeio._files.kinds import what_begins

__all__ = ["Archive", "Member", "decoded", "is_tar"]

_BLOCK = 512
_ZEROS = bytes(_BLOCK)
# The limit of a long name or a pax header, which may have a few file attributes of 64 KiB
# each.
_EXTENDED_BYTES_MAX = 16 << 20
# How many bytes after the end of an archive are searched for another archive.  More are
# in no record: tar makes those of 10 KiB, and for tapes of 1 MiB at most.
_BEHIND_BYTES = 1 << 20

# Types of headers.  Links, devices, folders and FIFOs have no data, whatever size they
# state.  Extended headers, except global ones, describe the next header.
_REGULAR = b"0\x007"
_SPARSE = b"S"
_WITHOUT_DATA = b"123456"
_LONG_NAME, _LONG_LINK, _PAX_GLOBAL = b"L", b"K", b"g"
_EXTENDED = b"LKxXg"

# What pax headers say of a sparse file begins so.  The size of the file has one of two
# names, by the version of GNU's format.
_PAX_SPARSE = "GNU.sparse."
_SPARSE_NAME = "GNU.sparse.name"
_SPARSE_SIZES = ("GNU.sparse.realsize", "GNU.sparse.size")
_PAX_KEYS = {"path", "size"}


class Member(NamedTuple):
    """A regular file of an archive."""

    name: str
    begin: int  # the offset of its bytes in the archive
    stored: int  # how many bytes the archive has of it: of a sparse file not the holes
    size: int
    header: int  # the offset of its header
    is_sparse: bool


def decoded(encoded: bytes | bytearray) -> str:
    """Decode a name as tarfile does."""
    return encoded.decode("utf-8", "surrogateescape")


def is_tar(head: bytes, path: str) -> bool:
    """Return whether a file that begins with `head` is a tar archive, perhaps damaged."""
    if head[257:262] == b"ustar" or _size_in(head[:_BLOCK]) is not None:
        return True
    # An archive without members has only zeros, as others have after a crash.
    return head[:_BLOCK] == _ZEROS and path.endswith(".tar")


class Archive:
    """Walks through the headers of an archive of `size` bytes.

    ``read(offset, nbytes)`` returns bytes of it, fewer at its end.
    """

    def __init__(
        self, path: str | bytes, size: int, read: Callable[[int, int], bytes]
    ) -> None:
        self.path = path
        # Reasons to doubt that the archive is complete.
        self.remarks: list[str] = []
        self._size, self._read = size, read

    def refuse(self, at: int, words: str) -> NoReturn:
        """Raise ValueError for what is at an offset."""
        raise ValueError(f"the archive {self.path!r} {words} (at byte {at})")

    def members(self) -> Iterator[Member]:
        """Yield the regular files; raise ValueError where the archive is damaged."""
        extended: dict[str, bytes] = {}
        at = 0
        while at < self._size:
            header = self._read(at, _BLOCK)
            if header == _ZEROS:
                self._check_end(at)
                return
            size = self._check(header, at)
            kind = header[156:157]
            begin, is_regular = at + _BLOCK, kind in _REGULAR
            if kind in _EXTENDED:
                at = self._take_extended(kind, begin, size, extended)
                continue
            name = header[:100].partition(b"\0")[0]
            # In archives before POSIX, this is a folder.
            if kind == b"\0" and name.endswith(b"/"):
                is_regular, kind = False, b"5"
            if extended:
                size = self._number_of(extended, "size", at, size)
            if kind in _WITHOUT_DATA:
                size = 0
            real, is_sparse = size, False
            if kind == _SPARSE:
                begin, real, is_sparse = self._old_sparse(header, at)
            elif extended and is_regular:
                real, is_sparse = self._pax_sparse(extended, at, size)
            self._check_data(begin, size)
            if is_regular or is_sparse:
                path = extended.get("path") if extended else None
                if is_sparse:
                    path = extended.get(_SPARSE_NAME, path)
                if path is not None:
                    name = path
                elif header[345] and header.startswith(b"ustar\0", 257):
                    # In GNU's headers ("ustar  "), these bytes are the atime.
                    name = header[345:500].partition(b"\0")[0] + b"/" + name
                yield Member(decoded(name), begin, size, real, at, is_sparse)
            extended.clear()
            at = begin + -(-size // _BLOCK) * _BLOCK
        if not self._size:
            self.refuse(0, f"is not a tar archive: {what_begins(b'', 0)}")
        if extended:
            self.refuse(at, "ends behind the header of a member that is missing")
        self.remarks.append("has no end-of-archive blocks: it may be cut short")

    def _check(self, header: bytes, at: int) -> int:
        """Raise ValueError if a header is damaged; return the size in it."""
        size = _size_in(header)
        if size is not None:
            return size
        words = "has an invalid header: it is damaged"
        if len(header) < _BLOCK:
            words = "is cut short: it ends within a header"
        elif not at:
            words = "is not a tar archive: the first header is invalid"
        known = None
        if not at and header[257:262] != b"ustar":
            known = what_begins(header, self._size)
        if known is not None:
            words = f"is not a tar archive: {known}"
        return self.refuse(at, words)

    def _check_data(self, begin: int, size: int) -> None:
        if size > self._size - begin:
            self.refuse(
                begin,
                f"is cut short: a member has {size} bytes, {self._size - begin} are left",
            )

    def _check_end(self, at: int) -> None:
        """Note what follows the end and should not, and is not read.

        Behind the end, tar fills the last record with zeros.
        """
        left = self._size - at
        if self._read(at, min(left, _BEHIND_BYTES)).strip(b"\0"):
            self.remarks.append(
                f"ends at byte {at}, and other bytes follow, which are not read: archives "
                "that were joined must be read one by one"
            )
        elif left > _BEHIND_BYTES:
            self.remarks.append(
                f"ends at byte {at}, and {left} bytes follow, the first of them zeros: it "
                "may be an interrupted download"
            )

    def _take_extended(
        self, kind: bytes, begin: int, size: int, extended: dict[str, bytes]
    ) -> int:
        """Record what a header says about the next one; return the offset of that."""
        if size > _EXTENDED_BYTES_MAX:
            self.refuse(begin, f"has an extended header of {size} bytes, too many")
        self._check_data(begin, size)
        contents = self._read(begin, size)
        found = {}
        if kind == _LONG_NAME:
            found["path"] = contents.partition(b"\0")[0]
        elif kind != _LONG_LINK:
            try:
                found = _pax_records(contents)
            except ValueError:
                self.refuse(begin, "has an invalid pax header: it is damaged")
            if "path" in found:
                found["path"] = found["path"].rstrip(b"/")
        kept = [name for name in found if name in _PAX_KEYS or name.startswith(_PAX_SPARSE)]
        if kind == _PAX_GLOBAL:
            if kept:
                self.refuse(begin, "gives all its members one name or size")
        else:
            # Of several headers the first counts, as in tarfile.
            for name in kept:
                extended.setdefault(name, found[name])
        return begin + -(-size // _BLOCK) * _BLOCK

    def _number_of(
        self, extended: dict[str, bytes], name: str, at: int, default: int
    ) -> int:
        """Return a size of a member, which may be in a pax header."""
        text = extended.get(name)
        if text is None:
            return default
        if not text.isdigit() or len(text) > 18:
            self.refuse(at, f"has a member of {decoded(text[:30])!r} bytes: it is damaged")
        return int(text)

    def _old_sparse(self, header: bytes, at: int) -> tuple[int, int, bool]:
        """Return where a sparse file of GNU's old format begins, and its size."""
        begin = at + _BLOCK
        more = header[482]
        while more:
            part = self._read(begin, _BLOCK)
            if len(part) < _BLOCK:
                self.refuse(begin, "is cut short: it ends within a header")
            more, begin = part[504], begin + _BLOCK
        try:
            size = _number(header[483:495])
        except ValueError:
            size = -1
        if size < 0:
            self.refuse(at, "has an invalid header: it is damaged")
        return begin, size, True

    def _pax_sparse(
        self, extended: dict[str, bytes], at: int, size: int
    ) -> tuple[int, bool]:
        """Return the size of a file, and whether it is sparse."""
        if not any(name.startswith(_PAX_SPARSE) for name in extended):
            return size, False
        for name in _SPARSE_SIZES:
            if name in extended:
                return self._number_of(extended, name, at, 0), True
        return self.refuse(at, "has a sparse file without its size: it is damaged")


def _size_in(header: bytes) -> int | None:
    """Return the size in a header; None if it is damaged or no header of a tar archive."""
    if len(header) < _BLOCK:
        return None
    try:
        size = _number(header[124:136])
        if size >= 0 and _has_sum(header, _number(header[148:156])):
            return size
    except ValueError:
        pass
    return None


def _number(field: bytes) -> int:
    """Return a number of a header: octal digits, or GNU's binary form of large numbers."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.partition(b"\0")[0].strip()
    return int(digits, 8) if digits else 0


def _has_sum(header: bytes, claimed: int) -> bool:
    """Compare a header with its checksum, in which its own field counts as spaces."""
    field = sum(header[148:156]) - 8 * 32
    # Adler-32 modulo 65536 is the sum of the bytes plus 1, below 65521: 20 times as fast.
    if (zlib.adler32(header) & 0xFFFF) - 1 - field == claimed:
        return True
    if sum(header) - field == claimed:
        return True
    # Some old programs added up signed bytes.
    signed: int = sum(struct.unpack("148b8x356b", header))
    return signed + 8 * 32 == claimed


def _pax_records(contents: bytes) -> dict[str, bytes]:
    """Return the records of a pax header, or raise ValueError."""
    found, at = {}, 0
    while at < len(contents) and contents[at]:
        digits, _, _ = contents[at : at + 10].partition(b" ")
        size = int(digits)
        record = contents[at : at + size]
        name, equals, value = record[len(digits) + 1 : -1].partition(b"=")
        if size < 0 or len(record) < size or record[-1:] != b"\n" or not equals:
            raise ValueError(record)
        found[decoded(name)] = value
        at += size
    return found
