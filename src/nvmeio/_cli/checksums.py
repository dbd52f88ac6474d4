"""SHA-256 of files with holes, and lists in the format of sha256sum."""

import hashlib
import os
import re
from collections.abc import Iterator
from typing import Any

from nvmeio._cli.arguments import CommandError
from nvmeio._cli.streams import Piece

ZEROS = bytes(1 << 20)

# A leading backslash means that the name is escaped; a star, that the file was read in
# binary mode.
LINE = re.compile(rb"(\\?)([0-9a-fA-F]{64}) [ *](.+)", re.DOTALL)
ESCAPES = {"\\": "\\\\", "\n": "\\n", "\r": "\\r"}
ESCAPED = {escape: character for character, escape in ESCAPES.items()}


class Checksum:
    """The SHA-256 of a file whose pieces are added in order."""

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
    """Return the first character of a line of sha256sum, if any, and the escaped name."""
    written = re.sub(r"[\\\n\r]", lambda found: ESCAPES[found[0]], name)
    return "" if written == name else "\\", written


def named(checksum: str, name: str) -> str:
    """Return a line for ``sha256sum -c``."""
    mark, written = escaped(name)
    return f"{mark}{checksum}  {written}"


def listed(content: bytes, name: str) -> Iterator[tuple[str, str]]:
    """Parse a list of sha256sum; yield each file's name, and its checksum in lower case."""
    lines = content.removesuffix(b"\n").split(b"\n") if content else []
    for number, line in enumerate(lines, 1):
        # Editors may add a carriage return; in a name it would be escaped.
        found = LINE.fullmatch(line.removesuffix(b"\r"))
        if found is None:
            raise CommandError(f"{name}: line {number} is not a checksum with a name")
        file = os.fsdecode(found[3])
        if found[1]:
            file = re.sub(r"\\[\\nr]", lambda escape: ESCAPED[escape[0]], file)
        yield file, found[2].decode().lower()
    if not lines:
        raise CommandError(f"{name}: there is no checksum in it")
