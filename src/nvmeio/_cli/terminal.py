"""Output for people: tables, progress, and numbers with units.

Sizes use powers of 1024 (``in_binary``), speeds powers of 1000.  Progress is written to
standard error, and only if that is a terminal.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence

from nvmeio._arguments.units import in_binary

# Enough for the eye; more would take CPU time from the measurement.
REFRESHES_PER_SECOND = 4
# The most characters to which the cells of a column are padded.
WIDTH_MAX = 200

# A function that is called with the amount of progress.
Advance = Callable[[float], None]


def harmless(text: str) -> str:
    """Escape control characters: names from files may contain terminal commands."""
    encoding = sys.stdout.encoding or "ascii"
    text = text.encode(encoding, "backslashreplace").decode(encoding)
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


class Terminal:
    """Standard output for answers, and standard error for notes and progress."""

    def __init__(self) -> None:
        # The length of the line of progress that is shown.
        self._shown = 0

    def say(self, text: str = "") -> None:
        self.clear()
        print(text)

    def note(self, text: str) -> None:
        """Write a line that is not part of the answer."""
        self.clear()
        print(text, file=sys.stderr)

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Write a table, with columns of numbers right-aligned."""
        columns = []
        for column in zip(head, *rows, strict=True):
            cells = [harmless(cell) for cell in column]
            # One long name, padded in all rows, would take quadratic space.
            width = max(len(cell) for cell in cells if len(cell) <= WIDTH_MAX)
            numeric = all(cell[:1].isdigit() or cell in ("", "-") for cell in cells[1:])
            columns.append(
                [cell.rjust(width) if numeric else cell.ljust(width) for cell in cells]
            )
        for line in zip(*columns, strict=True):
            self.say("  ".join(line).rstrip())
        self.say()

    def progress(self, label: str, total: float) -> Advance:
        """Show progress until other output; return a function to advance it."""
        if not sys.stderr.isatty():
            return lambda amount: None
        done, refreshed = 0.0, time.monotonic() - 1

        def advance(amount: float) -> None:
            nonlocal done, refreshed
            done += amount
            now = time.monotonic()
            if now - refreshed < 1 / REFRESHES_PER_SECOND:
                return
            refreshed = now
            text = f"{label}: {100 * min(1.0, done / (total or 1)):.0f} %"
            self.clear()
            # Set before writing, because Ctrl-C may come in between.
            self._shown = len(text)
            sys.stderr.write(text)
            sys.stderr.flush()

        advance(0)
        return advance

    def clear(self) -> None:
        """Erase the line of progress."""
        if self._shown:
            sys.stderr.write("\r" + " " * self._shown + "\r")
            sys.stderr.flush()
            self._shown = 0


def in_time(microseconds: float) -> str:
    """Format a latency, such as 85 us or 1.2 ms."""
    if microseconds < 1000:
        return f"{microseconds:.3g} us"
    if microseconds < 1e6:
        return f"{microseconds / 1e3:.3g} ms"
    return f"{microseconds / 1e6:.3g} s"


def sizes(*several: int) -> list[str]:
    """Format sizes for a comparison; add the bytes if they would look equal."""
    words = [in_binary(nbytes) for nbytes in several]
    if len(set(words)) == len(several):
        return words
    return [f"{word} ({nbytes} bytes)" for word, nbytes in zip(words, several, strict=True)]


def spread(values: Sequence[float], digits: int) -> str:
    """Format a median, with minimum and maximum of several values: 3.91 [3.31-3.93]."""
    middle = f"{statistics.median(values):.{digits}f}"
    if len(values) == 1:
        return middle
    return f"{middle} [{min(values):.{digits}f}-{max(values):.{digits}f}]"
