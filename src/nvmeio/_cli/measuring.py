"""Shared by bench and tune: a scratch directory with enough space, output of figures."""

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nvmeio._arguments.units import in_binary
from nvmeio._cli.arguments import CommandError, Parser, new_file, option, size
from nvmeio._cli.terminal import Terminal, sizes
from nvmeio._files.paths import naming

# By default a tenth of the file system stays free, but at most this much.
RESERVE_BYTES_MAX = 1 << 30


@contextlib.contextmanager
def scratch_folder(folder: str, needed: int, reserve: int | None) -> Iterator[Path]:
    """Create a scratch directory for `needed` bytes, for the duration of the block.

    It is removed with its contents, also after an error, Ctrl-C or SIGTERM.
    """
    space = os.statvfs(folder)
    free = space.f_bavail * space.f_frsize
    if reserve is None:
        reserve = min(RESERVE_BYTES_MAX, space.f_blocks * space.f_frsize // 10)
    # A FUSE file system may not report its size.
    if space.f_blocks and free - needed < reserve:
        takes, has = sizes(needed, free)
        raise CommandError(
            f"{folder}: {takes} are needed and {has} are free, of which "
            f"{in_binary(reserve)} are kept (--reserve); a smaller --size needs less"
        )
    with contextlib.ExitStack() as stack:
        with undisturbed():
            try:
                own = tempfile.TemporaryDirectory(prefix="nvmeio-bench-", dir=folder)
            except OSError as error:
                # Name the user's directory, not the random name of the scratch directory.
                raise CommandError(
                    f"{folder}: cannot create a folder there: {error.strerror}"
                ) from None
            stack.callback(_remove, own)
        yield Path(own.name)


def _remove(own: tempfile.TemporaryDirectory[str]) -> None:
    try:
        with undisturbed():
            own.cleanup()
    except OSError as error:
        # The error names a file inside without its directory.
        raise CommandError(f"{own.name} cannot be removed: {error.strerror}") from error


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Delay signals that end the program until the end of the block."""
    waiting: list[int] = []
    before = {
        number: signal.signal(number, lambda came, _: waiting.append(came))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for came in waiting:
        signal.raise_signal(came)


def forget_cached(path: Path) -> None:
    """Sync a file and drop it from the page cache, so that the next read is cold."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


SUFFIXES = (".png", ".svg")


def add_figure_options(parser: Parser, figures: str, chart: str) -> None:
    """Add the options for space that must stay free, and for output of figures."""
    about = "space that must stay free (default: a tenth of the file system, at most 1G)"
    option(parser, "--reserve SIZE", about, size)
    about = f"write the figures of {figures}; - is standard output"
    option(parser, "--json FILE", about, new_file)
    option(parser, "--plot FILE.png|.svg", f"draw {chart}", _picture)


def _picture(text: str) -> str:
    if Path(text).suffix.lower() not in SUFFIXES:
        raise argparse.ArgumentTypeError(f"{text!r} must end in {' or '.join(SUFFIXES)}")
    return new_file(text)


def check_plotting(options: argparse.Namespace) -> None:
    """Check before measuring that charts can be drawn."""
    if options.plot and find_spec("matplotlib") is None:
        raise CommandError(
            "--plot needs matplotlib, which is not installed: pip install 'nvmeio[cli]'"
        )


def keep_figures(
    report: Mapping[str, Any],
    draw: Callable[[], Any],
    options: argparse.Namespace,
    terminal: Terminal,
) -> None:
    """Write a report and draw its chart, if requested."""
    text = json.dumps(report, indent=1) + "\n"
    if options.json == "-":
        sys.stdout.write(text)
    elif options.json is not None:
        with naming(options.json):
            Path(options.json).write_text(text, encoding="utf-8")
    if options.plot:
        draw().savefig(options.plot, dpi=120)
        terminal.note(f"drawn: {options.plot}")
