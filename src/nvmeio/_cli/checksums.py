"""SHA-256 of files with holes, and the lists that sha256sum writes and checks."""

import hashlib
import os
import re
from collections.abc import Iterator
from typing import Any

from nvmeio._cli.arguments import CommandError
from nvmeio._cli.streams import Piece

ZEROS = bytes(1 << 20)

# The backslash says that the name has some too; the star that it was read as binary.
LINE = re.compile(rb"(\\?)([0-9a-fA-F]{64}) [ *](.+)", re.DOTALL)
ESCAPES = {"\\": "\\\\", "\n": "\\n", "\r": "\\r"}
ESCAPED = {escape: character for character, escape in ESCAPES.items()}


class Checksum:
    """The SHA-256 of a file that is handed over from its beginning to its end."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._position = 0

    def update(self, piece: Piece) -> None:
        """Add a piece, and zeros for the hole before it; releases the GIL."""
        self._skip(piece.offset)
        memory: Any = piece.memory
        self._digest.update(memory)
        self._position += len(piece.memory)

    def finish(self, size: int) -> str:
        """Return the digits for a file of a size, whose end may be a hole."""
        self._skip(size)
        return self._digest.hexdigest()

    def _skip(self, offset: int) -> None:
        while self._position < offset:
            zeros = memoryview(ZEROS)[: offset - self._position]
            self._digest.update(zeros)
            self._position += len(zeros)


def escaped(name: str) -> tuple[str, str]:
    """Return what a line of sha256sum begins with, and a file's name in that line."""
    written = re.sub(r"[\\\n\r]", lambda found: ESCAPES[found[0]], name)
    return "" if written == name else "\\", written


def named(checksum: str, name: str) -> str:
    """Return a line of a list that ``sha256sum -c`` checks."""
    mark, written = escaped(name)
    return f"{mark}{checksum}  {written}"


def listed(content: bytes, name: str) -> Iterator[tuple[str, str]]:
    """Read a list of sha256sum's: yield each file's name and checksum in lower case."""
    lines = content.removesuffix(b"\n").split(b"\n") if content else []
    for number, line in enumerate(lines, 1):
        # An editor may have given it the line ends of Windows; of a name it is escaped.
        found = LINE.fullmatch(line.removesuffix(b"\r"))
        if found is None:
            raise CommandError(f"{name}: line {number} is no checksum with a name")
        file = os.fsdecode(found[3])
        if found[1]:
            file = re.sub(r"\\[\\nr]", lambda escape: ESCAPED[escape[0]], file)
        yield file, found[2].decode().lower()
    if not lines:
        raise CommandError(f"{name}: there is no checksum in it")
