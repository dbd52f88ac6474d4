"""The arguments of benchmarks on a disk, and the description of the machine."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from comparisons import surroundings

from nvmeio._cli.arguments import size
from nvmeio._cli.fio import fio_version

__all__ = [
    "argument_parser",
    "arguments",
    "machine",
    "output",
    "size_of",
]


def output(*command: str) -> str:
    """Return the output of a command."""
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def machine(folder: Path) -> dict[str, Any]:
    """Describe the machine, the software and the file system of a folder."""
    file_system, device = output("df", "--output=fstype,source", str(folder)).split()[-2:]
    about = {**surroundings(), "file system": f"{file_system} on {Path(device).name}"}
    if version := fio_version():
        about["fio"] = version
    return about


def size_of(text: str) -> int:
    """Parse a size such as 64M or 1G."""
    nbytes = size(text)
    if nbytes % (1 << 20):
        raise argparse.ArgumentTypeError("must be whole MiB, at least one")
    return nbytes


def chooser(groups: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    """Return a function that parses comma-separated names of groups."""

    def choose(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        if unknown := [name for name in names if name not in groups]:
            raise argparse.ArgumentTypeError(f"no such rows: {', '.join(unknown)}")
        return names

    return choose


def argument_parser(about: str | None, rounds: tuple[int, int]) -> argparse.ArgumentParser:
    """Return a parser for the options that all scripts have."""
    # SystemExit lets every script remove its files, devices and huge pages.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parser = argparse.ArgumentParser(description=about)
    words = f"number of rounds ({rounds[0]}; with --quick {rounds[1]})"
    parser.add_argument("--rounds", type=int, help=words)
    words = "write the raw numbers to FILE"
    parser.add_argument("--json", type=Path, metavar="FILE", help=words)
    words = "a short run, to see whether everything works"
    parser.add_argument("--quick", action="store_true", help=words)
    return parser


def arguments(
    about: str | None,
    sizes: tuple[str, str],
    rounds: tuple[int, int],
    processes: tuple[int, int] | None = None,
    *,
    groups: tuple[str, ...] = (),
    loop_rounds: bool = False,
) -> argparse.Namespace:
    """Parse the command line of a script that works on a disk."""
    parser = argument_parser(about, rounds)
    words = f"size of the file ({sizes[0]}; with --quick {sizes[1]})"
    parser.add_argument("--size", type=size_of, help=words)
    parser.add_argument("--dir", type=Path, default=Path(), help="folder for the file (.)")
    if processes is not None:
        words = f"number of processes ({processes[0]}; with --quick {processes[1]})"
        parser.add_argument("--processes", type=int, help=words)
    if groups:
        words = f"run only these rows, separated by commas: {', '.join(groups)}"
        parser.add_argument("--only", type=chooser(groups), default=groups, help=words)
    if loop_rounds:
        words = "number of rounds beside the plain loop (as --rounds)"
        parser.add_argument("--loop-rounds", type=int, metavar="ROUNDS", help=words)
    options = parser.parse_args()
    options.size = options.size or size_of(sizes[options.quick])
    options.rounds = options.rounds or rounds[options.quick]
    if processes is not None:
        options.processes = options.processes or processes[options.quick]
    if loop_rounds:
        options.loop_rounds = options.loop_rounds or options.rounds
    return options
