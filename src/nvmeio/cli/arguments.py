"""What command lines are made of: sizes, times, names with hyphens, errors of one line."""

import argparse
import os
import re
from collections.abc import Callable, Iterable
from fractions import Fraction
from importlib.metadata import version
from typing import Any, NoReturn

__all__ = [
    "CommandError",
    "Parser",
    "UsageError",
    "hyphenated",
    "number",
    "seconds",
    "sentence",
    "size",
]

# More digits than anything has bytes or seconds would overflow.
NUMBER = r"\d{1,18}(?:\.\d{1,18})?"
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
TIMES = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


class CommandError(Exception):
    """A command cannot do what it was asked for: one line, and exit status 1."""


class UsageError(Exception):
    """The arguments do not go together: one line, and exit status 2."""


def sentence(error: BaseException) -> str:
    """Say in one line what an exception says.

    Parameters
    ----------
    error : exception
        An OSError is said as the file's name and what is wrong with it.

    Returns
    -------
    str
        Without a newline.
    """
    words = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.strerror:
        words = error.strerror
        file = error.filename
        if file is not None:
            # What was called with a descriptor has that in place of a name.
            name = f"descriptor {file}" if isinstance(file, int) else os.fsdecode(file)
            words = f"{name}: {words}"
    return " ".join(words.split())


class Parser(argparse.ArgumentParser):
    """A parser of the command line whose errors are one line."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **options)
        self._commands: Any = None

    def add_command(self, name: str, about: str) -> "Parser":
        """Add a command, whose parser is returned.

        Parameters
        ----------
        name : str
            What it is called by.
        about : str
            What it does, as a clause that begins with a verb.

        Returns
        -------
        Parser
            To add its arguments to.
        """
        if self._commands is None:
            released = f"nvmeio {version('nvmeio')}"
            self.add_argument("--version", action="version", version=released)
            self._commands = self.add_subparsers(
                dest="command", required=True, metavar="COMMAND", title="commands"
            )
        description = f"{about[0].upper()}{about[1:]}."
        command: Parser = self._commands.add_parser(
            name, help=about, description=description
        )
        return command

    def command(self, name: str) -> "Parser":
        """Return the parser of a command.

        Parameters
        ----------
        name : str
            Of a command that was added.

        Returns
        -------
        Parser
            Its own.
        """
        found: Parser = self._commands.choices[name]
        return found

    def error(self, message: str) -> NoReturn:
        """End the program with exit status 2.

        Parameters
        ----------
        message : str
            What is wrong, as a clause.
        """
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def hyphenated(words: Iterable[str]) -> list[str]:
    """Give flags that were written with underscores their hyphens.

    Parameters
    ----------
    words : iterable of str
        A command line.

    Returns
    -------
    list of str
        The same, with ``--block_size=1M`` as ``--block-size=1M``; what follows ``--`` is
        left alone.
    """
    changed: list[str] = []
    for word in words:
        flag, equals, value = word.partition("=")
        if word.startswith("--") and "--" not in changed:
            flag = flag.replace("_", "-")
        changed.append(flag + equals + value)
    return changed


def size(text: str) -> int:
    """Read a size.

    Parameters
    ----------
    text : str
        A number, of bytes or with K, M, G or T for powers of 1024; "1.5G" and "64KiB" too.

    Returns
    -------
    int
        Bytes, from 1 to what an offset in a file can be.

    Raises
    ------
    argparse.ArgumentTypeError
        It is no size.
    """
    found = re.fullmatch(
        rf"({NUMBER}) ?([KMGT]?)(?:i?B)?", text.strip(), re.ASCII | re.IGNORECASE
    )
    nbytes = Fraction(found[1]) * UNITS[found[2].upper()] if found else Fraction(0)
    if not 1 <= nbytes < 1 << 63 or nbytes.denominator > 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size; it must be a whole number of bytes, such as 4096, 64K, "
            "1.5M or 4G"
        )
    return int(nbytes)


def seconds(text: str) -> float:
    """Read a time.

    Parameters
    ----------
    text : str
        A number, of seconds or with s, m or h.

    Returns
    -------
    float
        Seconds, more than 0.

    Raises
    ------
    argparse.ArgumentTypeError
        It is no time.
    """
    found = re.fullmatch(rf"({NUMBER}) ?([smh]?)", text.strip(), re.ASCII)
    duration = float(found[1]) * TIMES[found[2]] if found else 0.0
    if duration <= 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no time; it must be more than 0, such as 30, 90s, 2m or 1h"
        )
    return duration


def number(least: int, most: int) -> Callable[[str], int]:
    """Make a reader of whole numbers within limits.

    Parameters
    ----------
    least, most : int
        What is allowed, both included.

    Returns
    -------
    callable
        From a text to the number; raises argparse.ArgumentTypeError.
    """

    def read(text: str) -> int:
        found = re.fullmatch(r"\d{1,18}", text.strip(), re.ASCII)
        if found is None or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(
                f"{text!r} must be a whole number from {least} to {most}"
            )
        return int(text)

    return read
