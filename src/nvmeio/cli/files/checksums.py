"""SHA-256 of files with holes, and the lists that sha256sum writes and checks."""

import hashlib
import os
import re
from collections.abc import Iterator
from typing import Any

from nvmeio.cli.arguments import CommandError

__all__ = ["Checksum", "escaped", "listed", "named"]

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

    def update(self, offset: int, memory: Any) -> None:
        """Add bytes.

        Parameters
        ----------
        offset : int
            Where in the file they are; before them is what was added last, and then zeros.
        memory : bytes-like
            The bytes.

        Notes
        -----
        Releases the GIL.
        """
        self._skip(offset)
        self._digest.update(memory)
        self._position += len(memory)

    def finish(self, size: int) -> str:
        """Return the checksum.

        Parameters
        ----------
        size : int
            Of the file, whose end may be a hole.

        Returns
        -------
        str
            64 hexadecimal digits.
        """
        self._skip(size)
        return self._digest.hexdigest()

    def _skip(self, offset: int) -> None:
        while self._position < offset:
            zeros = memoryview(ZEROS)[: offset - self._position]
            self._digest.update(zeros)
            self._position += len(zeros)


def escaped(name: str) -> tuple[str, str]:
    """Write a file's name in one line, as sha256sum does.

    Parameters
    ----------
    name : str
        As it is.

    Returns
    -------
    tuple of (str, str)
        What the line begins with, a backslash or nothing, and the name.
    """
    written = re.sub(r"[\\\n\r]", lambda found: ESCAPES[found[0]], name)
    return "" if written == name else "\\", written


def named(checksum: str, name: str) -> str:
    """Return a line of a list that ``sha256sum -c`` checks.

    Parameters
    ----------
    checksum : str
        64 hexadecimal digits.
    name : str
        Of the file.

    Returns
    -------
    str
        Without its newline.
    """
    mark, written = escaped(name)
    return f"{mark}{checksum}  {written}"


def listed(content: bytes, name: str) -> Iterator[tuple[str, str]]:
    """Read a list that sha256sum has written.

    Parameters
    ----------
    content : bytes
        Of the list.
    name : str
        Of the list.

    Yields
    ------
    tuple of (str, str)
        A file's name and its checksum, in lower case.

    Raises
    ------
    CommandError
        There is none in it, or something else.
    """
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
