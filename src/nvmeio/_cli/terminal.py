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
        # Without notes and progress.
        self.quiet = False
        # The length of the line of progress that is shown.
        self._shown = 0

    def say(self, text: str = "") -> None:
        self.clear()
        print(text)

    def note(self, text: str) -> None:
        """Write a line that is not part of the answer."""
        if not self.quiet:
            self.error(text)

    def error(self, text: str) -> None:
        """Write a line to standard error, even if quiet."""
        self.clear()
        print(text, file=sys.stderr)

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Write a table, with columns of numbers right-aligned."""
        columns = []
        for column in zip(head, *rows, strict=True):
            cells = [harmless(cell) for cell in column]
            width = max(map(len, cells))
            numeric = all(cell[:1].isdigit() or cell in ("", "-") for cell in cells[1:])
            columns.append(
                [cell.rjust(width) if numeric else cell.ljust(width) for cell in cells]
            )
        for line in zip(*columns, strict=True):
            self.say("  ".join(line).rstrip())
        self.say()

    def progress(self, label: str, total: float, *, speed: bool = False) -> Advance:
        """Show progress until something else is written; return a function to advance it.

        With `speed`, the amounts are bytes, and bytes per second are shown too.
        """
        if self.quiet or not sys.stderr.isatty():
            return lambda amount: None
        done, begin = 0.0, time.monotonic()
        refreshed = begin - 1

        def advance(amount: float) -> None:
            nonlocal done, refreshed
            done += amount
            now = time.monotonic()
            if now - refreshed < 1 / REFRESHES_PER_SECOND:
                return
            refreshed = now
            text = f"{label}: {100 * min(1.0, done / (total or 1)):.0f} %"
            if speed and done:
                text += f", {in_speed(done, now - begin)}"
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


def in_speed(nbytes: float, seconds: float) -> str:
    """Format a throughput, such as 3.91 GB/s or 25.3 MB/s."""
    # Avoid a division by 0.
    speed = nbytes / max(seconds, 1e-9)
    # Use the next unit for values that would round to 1000.
    if speed >= 999.5e6:
        return f"{speed / 1e9:.2f} GB/s"
    if speed >= 0.995e6:
        return f"{speed / 1e6:.3g} MB/s"
    return f"{speed / 1e6:.2f} MB/s" if speed >= 1e4 else "under 0.01 MB/s"


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
