"""What benchmarks on a disk share: arguments, the machine, huge pages for fio."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from duels import surroundings

__all__ = ["arguments", "huge_pages", "machine", "output"]

HUGE_PAGES = Path("/proc/sys/vm/nr_hugepages")


@contextlib.contextmanager
def huge_pages(wanted: int) -> Iterator[bool]:
    """Reserve huge pages for fio while inside; gives whether that was possible."""

    def change(pages: int) -> int:
        before = int(HUGE_PAGES.read_text(encoding="ascii"))
        HUGE_PAGES.write_text(str(max(0, before + pages)), encoding="ascii")
        return int(HUGE_PAGES.read_text(encoding="ascii")) - before

    try:
        reserved = change(wanted)
    except OSError:
        yield False
        return
    try:
        yield reserved == wanted
    finally:
        # Not back to what it was: another benchmark may have come or gone meanwhile.
        change(-reserved)


def output(*command: str) -> str:
    """Return what a command prints."""
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def machine(folder: Path) -> dict[str, Any]:
    """Describe where and with what it was measured."""
    file_system, device = output("df", "--output=fstype,source", str(folder)).split()[-2:]
    about = {**surroundings(), "file system": f"{file_system} on {Path(device).name}"}
    if shutil.which("fio"):
        about["fio"] = output("fio", "--version").strip()
    return about


def size_of(text: str) -> int:
    """Read a size such as 64M or 1G."""
    factors = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    digits = text.rstrip("KMGkmg")
    size = int(digits) * factors.get(text[len(digits) :].upper(), 1)
    if size < 1 << 20 or size % (1 << 20):
        raise argparse.ArgumentTypeError("must be whole MiB, at least one")
    return size


def arguments(
    about: str | None, sizes: tuple[str, str], rounds: tuple[int, int]
) -> argparse.Namespace:
    """Parse the command line.

    Parameters
    ----------
    about : str or None
        What the benchmark is, for ``--help``.
    sizes : tuple of str
        Of the file, such as 4G; and if ``--quick``.
    rounds : tuple of int
        How many; and if ``--quick``.

    Returns
    -------
    argparse.Namespace
        With size in bytes, rounds, dir, json and quick.
    """
    parser = argparse.ArgumentParser(description=about)
    words = f"of the file ({sizes[0]}; {sizes[1]} if quick)"
    parser.add_argument("--size", type=size_of, help=words)
    words = f"how many ({rounds[0]}; {rounds[1]} if quick)"
    parser.add_argument("--rounds", type=int, help=words)
    parser.add_argument("--dir", type=Path, default=Path(), help="for the file (.)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep raw numbers")
    parser.add_argument("--quick", action="store_true", help="a look whether all works")
    options = parser.parse_args()
    options.size = options.size or size_of(sizes[options.quick])
    options.rounds = options.rounds or rounds[options.quick]
    return options
