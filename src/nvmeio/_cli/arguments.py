"""Parse command lines: sizes, times, options with underscores, errors of one line."""

import argparse
import contextlib
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

from nvmeio._arguments.units import parse_size
from nvmeio._config.constants import ENGINES, LIMITS

# Limit the digits, because more would overflow.
NUMBER = r"\d{1,18}(?:\.\d{1,18})?"
TIMES = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


class CommandError(Exception):
    """A command cannot do what was asked: one line, and exit status 1."""


class UsageError(Exception):
    """The arguments contradict each other: one line, and exit status 2."""


def sentence(error: BaseException) -> str:
    words = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.strerror:
        words = error.strerror
        file = error.filename
        if file is not None:
            # Calls with a descriptor report that instead of a name.
            name = f"descriptor {file}" if isinstance(file, int) else os.fsdecode(file)
            words = f"{name}: {words}"
    return " ".join(words.split())


class Parser(argparse.ArgumentParser):
    """A parser of command lines whose errors are one line."""

    def __init__(self, **options: Any) -> None:
        style = argparse.RawDescriptionHelpFormatter
        super().__init__(allow_abbrev=False, formatter_class=style, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        # The reader may be gone; since Python 3.11 argparse does the same.
        with contextlib.suppress(OSError):
            super()._print_message(message, file)


def hyphenated(words: Iterable[str]) -> list[str]:
    """Replace underscores by hyphens in the names of options before ``--``."""
    changed: list[str] = []
    for word in words:
        flag, equals, value = word.partition("=")
        if word.startswith("--") and "--" not in changed:
            flag = flag.replace("_", "-")
        changed.append(flag + equals + value)
    return changed


def size(text: str) -> int:
    """Parse a number of bytes, with K, M, G or T for powers of 1024: 1.5G, 64KiB."""
    nbytes, whole = parse_size(text) or (0, False)
    if not (whole and 1 <= nbytes < 1 << 63):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size; it must be a whole number of bytes, such as 4096, "
            "64K, 1.5M or 4G"
        )
    return nbytes


def seconds(text: str) -> float:
    """Parse a time in seconds, or with the unit s, m or h: 30, 90s, 1.5m."""
    found = re.fullmatch(rf"({NUMBER}) ?([smh]?)", text.strip(), re.ASCII)
    duration = float(found[1]) * TIMES[found[2]] if found else 0.0
    if duration <= 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a time; it must be more than 0, such as 30, 90s, 2m or 1h"
        )
    return duration


def number(least: int, most: int) -> Callable[[str], int]:
    """Return a parser of whole numbers from ``least`` to ``most``."""

    def read(text: str) -> int:
        found = re.fullmatch(r"\d{1,18}", text.strip(), re.ASCII)
        if found is None or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(
                f"{text!r} must be a whole number from {least} to {most}"
            )
        return int(text)

    return read


def option(
    to: Any, flag: str, about: str, kind: Callable[[str], Any] = str, default: Any = None
) -> None:
    """Add an option to a parser or group: "--quiet"; with a value, "--size SIZE"."""
    flag, _, metavar = flag.partition(" ")
    if metavar:
        to.add_argument(flag, type=kind, default=default, metavar=metavar, help=about)
    else:
        to.add_argument(flag, action="store_true", help=about)


def add_transfer_options(
    parser: Parser, block_size: int | None = None, queue_depth: int | None = None
) -> None:
    """Add the options for how files are read and written.

    If `block_size` or `queue_depth` is None, the handle's default applies, which the
    environment can change.
    """
    group = parser.add_argument_group("how files are read and written")
    group.add_argument("--engine", choices=ENGINES, help="default: the fastest that works")
    option(group, "--block-size SIZE", "of one I/O (default: 1M)", size, block_size)
    about = "maximum number of blocks in flight (default: 128)"
    depth = number(1, LIMITS["queue_depth"])
    option(group, "--queue-depth N", about, depth, queue_depth)
    way = group.add_mutually_exclusive_group()
    about = "require O_DIRECT (default: use it if the file system has it)"
    option(way, "--direct", about)
    about = "through the page cache"
    way.add_argument("--buffered", action="store_false", dest="direct", help=about)
    parser.set_defaults(direct="auto")


def new_file(text: str) -> str:
    """Check that a file of this name can be created, and return the name."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {str(path.parent)!r}")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder")
    return text
