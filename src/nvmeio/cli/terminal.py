"""What a person sees: tables, and progress while they wait.

Tables are drawn by rich where standard output is a terminal and rich is installed, else as
plain text, which is what one pastes into a report.  Progress goes to standard error, and
only where that is a terminal.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from nvmeio.cli.units import in_speed

__all__ = ["Terminal", "terminal"]

# As often as the eye wants; more would take the processor from what is measured.
REFRESHES_PER_SECOND = 4

Advance = Callable[[float], None]
Row = Sequence[str]


class Terminal:
    """A terminal of plain text.

    Attributes
    ----------
    quiet : bool, default False
        Whether notes and progress are left out.
    """

    quiet = False

    def say(self, text: str = "") -> None:
        """Write a line of the answer.

        Parameters
        ----------
        text : str
            Goes to standard output.
        """
        print(text)

    def note(self, text: str) -> None:
        """Write a line that is not part of the answer.

        Parameters
        ----------
        text : str
            Goes to standard error.
        """
        if not self.quiet:
            print(text, file=sys.stderr)

    def table(self, title: str, head: Row, rows: Sequence[Row]) -> None:
        """Write a table.

        Parameters
        ----------
        title : str
            Stands above; "" for none.
        head : sequence of str
            Of the columns.
        rows : sequence of sequences of str
            As many cells each.  Cells that begin with a digit are set to the right.
        """
        lines = [list(head), *map(list, rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        numeric = _numeric(rows)
        if title:
            self.say(title)
        for line in lines:
            cells = [
                cell.rjust(width) if right else cell.ljust(width)
                for cell, width, right in zip(line, widths, numeric, strict=True)
            ]
            self.say("  ".join(cells).rstrip())
        self.say()

    @contextlib.contextmanager
    def progress(self, label: str, total: float, *, unit: str = "B") -> Iterator[Advance]:
        """Show how far something is, while inside.

        Parameters
        ----------
        label : str
            What is being done.
        total : float
            How much there is to do.
        unit : {"B", "s"}
            Whether that is bytes, shown with their speed, or seconds.

        Yields
        ------
        callable
            Is told how much more has been done.
        """
        if self.quiet or not sys.stderr.isatty():
            yield lambda amount: None
            return
        line = _Line(label, total, unit)
        try:
            yield line.advance
        finally:
            line.clear()


class _Line:
    """One line of a terminal that is written over and over."""

    def __init__(self, label: str, total: float, unit: str) -> None:
        self.label, self.total, self.unit = label, total, unit
        self.done = 0.0
        self.begin = time.monotonic()
        self.shown = self.begin - 1
        self.width = 0
        self.advance(0)

    def advance(self, amount: float) -> None:
        self.done += amount
        now = time.monotonic()
        if now - self.shown < 1 / REFRESHES_PER_SECOND:
            return
        self.shown = now
        text = f"{self.label}: {100 * min(1.0, self.done / (self.total or 1)):.0f} %"
        if self.unit == "B":
            text += f", {in_speed(self.done, now - self.begin)}"
        self.clear()
        sys.stderr.write(text)
        sys.stderr.flush()
        self.width = len(text)

    def clear(self) -> None:
        sys.stderr.write("\r" + " " * self.width + "\r")
        sys.stderr.flush()
        self.width = 0


class RichTerminal(Terminal):
    """A terminal with colours and bars, by rich."""

    def table(self, title: str, head: Row, rows: Sequence[Row]) -> None:
        """Draw a table; see ``Terminal.table``.

        Parameters
        ----------
        title, head, rows
            As there.
        """
        if not sys.stdout.isatty():
            super().table(title, head, rows)
            return
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        # Two columns of space between cells, so that as much as can be fits into 80.
        drawn = Table(
            box=box.SIMPLE_HEAD,
            title=Text(title) if title else None,
            title_justify="left",
            collapse_padding=True,
            pad_edge=False,
            show_edge=False,
        )
        for name, right in zip(head, _numeric(rows), strict=True):
            # Words go on in the next line; a figure in two lines would be another one.
            drawn.add_column(
                name,
                justify="right" if right else "left",
                overflow="ellipsis" if right else "fold",
                no_wrap=right,
            )
        for row in rows:
            # Text, for square brackets would be markup.
            drawn.add_row(*map(Text, row))
        console = Console(file=sys.stdout)
        whole = console.measure(drawn, options=console.options.update(width=sys.maxsize))
        # What is cut off nobody can read; the terminal itself breaks plain lines.
        if whole.minimum > console.width:
            super().table(title, head, rows)
        else:
            console.print(drawn)
            console.print()

    @contextlib.contextmanager
    def progress(self, label: str, total: float, *, unit: str = "B") -> Iterator[Advance]:
        """Show a bar; see ``Terminal.progress``.

        Parameters
        ----------
        label, total, unit
            As there.

        Yields
        ------
        callable
            As there.
        """
        if self.quiet or not sys.stderr.isatty():
            yield lambda amount: None
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

        columns: list[Any] = [TextColumn("{task.description}"), BarColumn()]
        columns.append(TaskProgressColumn())
        if unit == "B":
            columns.append(TextColumn("{task.fields[speed]}"))
        shown = Progress(
            *columns,
            console=Console(file=sys.stderr),
            refresh_per_second=REFRESHES_PER_SECOND,
            # It would take the answer, which may go to a file, to standard error.
            redirect_stdout=False,
            transient=True,
        )
        with shown:
            task = shown.add_task(label, total=total, speed="")
            begin, done = time.monotonic(), 0.0

            def advance(amount: float) -> None:
                nonlocal done
                done += amount
                speed = in_speed(done, time.monotonic() - begin)
                shown.update(task, advance=amount, speed=speed)

            yield advance


def terminal() -> Terminal:
    """Return the terminal that this process has.

    Returns
    -------
    Terminal
        Of plain text where rich is not installed, or the terminal can do no more.
    """
    try:
        import rich  # noqa: F401
    except ImportError:
        return Terminal()
    return Terminal() if os.environ.get("TERM") == "dumb" else RichTerminal()


def _numeric(rows: Sequence[Row]) -> list[bool]:
    """Tell for each column whether all of its cells that have any text are figures."""
    return [
        all(cell[:1].isdigit() or cell in ("", "-") for cell in column)
        for column in zip(*rows, strict=True)
    ]
