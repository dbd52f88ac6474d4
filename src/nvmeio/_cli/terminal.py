"""What a person sees: tables, progress, and numbers with their units.

Sizes are in powers of 1024 (``in_binary``), speeds in powers of 1000.  Progress goes to
standard error, and only where that is a terminal.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence

from nvmeio._arguments.units import in_binary

# As often as the eye wants; more would take the processor from what is measured.
REFRESHES_PER_SECOND = 4

# Is told how much more has been done.
Advance = Callable[[float], None]


def harmless(text: str) -> str:
    """Show what would move the cursor, or worse: names in files are others' words."""
    encoding = sys.stdout.encoding or "ascii"
    text = text.encode(encoding, "backslashreplace").decode(encoding)
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


class Terminal:
    """Standard output for answers, and standard error for notes and progress."""

    def __init__(self) -> None:
        # Without notes and progress.
        self.quiet = False
        # How many characters of a line of progress are shown.
        self._shown = 0

    def say(self, text: str = "") -> None:
        self.clear()
        print(text)

    def note(self, text: str) -> None:
        """Write a line that is not part of the answer."""
        if not self.quiet:
            self.error(text)

    def error(self, text: str) -> None:
        """Write a line to standard error, quiet or not."""
        self.clear()
        print(text, file=sys.stderr)

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Write a table, with columns of figures set to the right."""
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
        """Show how much of something is done, until something else is written.

        With `speed`, what is done are bytes, and their number in a second is shown too.
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
            # Before it is shown, for Ctrl-C may come in between.
            self._shown = len(text)
            sys.stderr.write(text)
            sys.stderr.flush()

        advance(0)
        return advance

    def clear(self) -> None:
        """Take the line of progress away."""
        if self._shown:
            sys.stderr.write("\r" + " " * self._shown + "\r")
            sys.stderr.flush()
            self._shown = 0


def in_speed(nbytes: float, seconds: float) -> str:
    """Write a throughput, such as 3.91 GB/s or 25.3 MB/s."""
    # What takes no time at all counts as a nanosecond.
    speed = nbytes / max(seconds, 1e-9)
    # What rounds to 1000 of a unit is 1 of the next.
    if speed >= 999.5e6:
        return f"{speed / 1e9:.2f} GB/s"
    if speed >= 0.995e6:
        return f"{speed / 1e6:.3g} MB/s"
    return f"{speed / 1e6:.2f} MB/s" if speed >= 1e4 else "under 0.01 MB/s"


def in_time(microseconds: float) -> str:
    """Write a latency, such as 85 us or 1.2 ms."""
    if microseconds < 1000:
        return f"{microseconds:.3g} us"
    if microseconds < 1e6:
        return f"{microseconds / 1e3:.3g} ms"
    return f"{microseconds / 1e6:.3g} s"


def sizes(*several: int) -> list[str]:
    """Write sizes that are compared, with their bytes where they would look alike."""
    words = [in_binary(nbytes) for nbytes in several]
    if len(set(words)) == len(several):
        return words
    return [f"{word} ({nbytes} bytes)" for word, nbytes in zip(words, several, strict=True)]


def spread(values: Sequence[float], digits: int) -> str:
    """Write a median, with the least and the greatest of several: 3.91 [3.31-3.93]."""
    middle = f"{statistics.median(values):.{digits}f}"
    if len(values) == 1:
        return middle
    return f"{middle} [{min(values):.{digits}f}-{max(values):.{digits}f}]"
