"""Compares nvmeio.memcpy with what else copies arrays and tensors.

Neighbours in time at the same copy: with numpy.copyto and memmove on arrays, with
Tensor.copy_ on tensors, with DeepSpeed's op where it is installed.  bench/README.md says
how to read the tables and what they showed.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import json
import mmap
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from duels import Duel, Goal, Sample, measured, spread, surroundings, table

import nvmeio
from nvmeio import settings

KIB, MIB = 1 << 10, 1 << 20
SIZES = [4 * KIB << 2 * step for step in range(10)]
QUICK_SIZES = [4 * KIB, MIB, 64 * MIB]
# A turn is as many copies as come to this, or one.
TURN_BYTES = 32 * MIB

# What has to be reached: at any size, and from here on beside torch on one thread.
FLOOR = 0.95
LARGE_BYTES = 64 * MIB
LARGE_SPEED = 1.3
# With another process on one of the processors.
BUSY_FLOOR = 0.8

Copy = Callable[[Any, Any], object]

LIBC = ctypes.CDLL(None, use_errno=True)
_memmove = LIBC.memmove
_memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def memmove(dest: Any, src: Any) -> None:
    """Copy an array by the C library."""
    _memmove(dest.ctypes.data, src.ctypes.data, dest.nbytes)


def copy_tensor(dest: torch.Tensor, src: torch.Tensor) -> None:
    """Copy a tensor by torch."""
    dest.copy_(src)


def deepspeed_copy() -> Copy | None:
    """Return DeepSpeed's op, None where it is not installed or cannot be compiled."""
    try:
        # Who has nvmeio in DeepSpeed's place would see it beside itself.
        os.environ.pop("NVMEIO_DEEPSPEED", None)
        from deepspeed.ops.op_builder import AsyncIOBuilder

        return AsyncIOBuilder().load(verbose=False).deepspeed_memcpy
    except (ImportError, RuntimeError, AttributeError):
        return None


def turn(
    copy: Copy, dest: Any, src: Any, nbytes: int, threads: int
) -> Callable[[], Sample]:
    """Return a turn of copies into memory that was written before."""
    repeats = max(1, TURN_BYTES // nbytes)

    def work() -> int:
        for _ in range(repeats):
            copy(dest, src)
        return repeats * nbytes

    def take() -> Sample:
        # Of torch, and so of nvmeio, which takes no more threads than torch would.
        torch.set_num_threads(threads)
        return measured(work)

    return take


def forget(memory: Any) -> None:
    """Give the pages of memory back: an allocator may have lent them before."""
    array = memory.numpy() if isinstance(memory, torch.Tensor) else memory
    first = -(-array.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (array.ctypes.data + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    size = ctypes.c_size_t(end - first)
    if LIBC.madvise(ctypes.c_void_p(first), size, mmap.MADV_DONTNEED):
        raise OSError("madvise() has not given the pages back")


def fresh_turn(copy: Copy, src: Any, nbytes: int, threads: int) -> Callable[[], Sample]:
    """Return a turn of one copy into memory that was never touched."""

    def take() -> Sample:
        torch.set_num_threads(threads)
        if isinstance(src, torch.Tensor):
            dest = torch.empty_like(src)
        else:
            dest = np.empty_like(src)
        forget(dest)

        def work() -> int:
            copy(dest, src)
            return nbytes

        return measured(work)

    return take


@dataclasses.dataclass(frozen=True)
class Match:
    """A duel and what it is about.

    Attributes
    ----------
    nbytes : int
        The size of a copy.
    what : str
        What is copied where, and by how many threads.
    duel : Duel
        memcpy and what it is compared with.
    goal : Goal or None
        What has to be reached.
    """

    nbytes: int
    what: str
    duel: Duel
    goal: Goal | None


def size_name(nbytes: int) -> str:
    """Write a size."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", MIB), ("KiB", KIB)):
        if nbytes >= factor:
            return f"{nbytes // factor} {unit}"
    return f"{nbytes} B"


def match(nbytes: int, what: str, beside: str, turns: Any, limit: float | None) -> Match:
    """Return a match of memcpy beside another copy."""
    work = f"{size_name(nbytes)}, {what}"
    goal = None if limit is None else Goal("speed", limit)
    return Match(nbytes, what, Duel(work, ("memcpy", beside), turns, reads=False), goal)


def matches_at(
    nbytes: int, arrays: Any, native: Copy | None, busy: bool
) -> Iterator[Match]:
    """Make the matches of one size."""
    tensors = tuple(torch.from_numpy(array).view(torch.float32) for array in arrays)
    floor = BUSY_FLOOR if busy else FLOOR

    def pair(copy: Copy, memory: Any, threads: int) -> Any:
        return tuple(turn(way, *memory, nbytes, threads) for way in (nvmeio.memcpy, copy))

    if not busy:
        what = "arrays, 1 thread"
        yield match(nbytes, what, "copyto", pair(np.copyto, arrays, 1), floor)
        yield match(nbytes, what, "memmove", pair(memmove, arrays, 1), None)
        large = LARGE_SPEED if nbytes >= LARGE_BYTES else floor
        what = "tensors, 1 thread"
        yield match(nbytes, what, "copy_", pair(copy_tensor, tensors, 1), large)
    yield match(nbytes, "tensors, 2 threads", "copy_", pair(copy_tensor, tensors, 2), floor)
    if native and not busy:
        what = "tensors, 2 threads"
        yield match(nbytes, what, "DeepSpeed", pair(native, tensors, 2), None)
    if nbytes >= MIB and not busy:
        what = "never-touched destination, 1 thread"
        for beside, copy, src in (
            ("copyto", np.copyto, arrays[1]),
            ("copy_", copy_tensor, tensors[1]),
        ):
            turns = tuple(fresh_turn(w, src, nbytes, 1) for w in (nvmeio.memcpy, copy))
            yield match(nbytes, what, beside, turns, floor)


def all_matches(sizes: list[int], busy: bool) -> list[Match]:
    """Make every match, on one pair of arrays."""
    source = np.random.default_rng(1).integers(0, 255, max(sizes), np.uint8)
    target = np.ones_like(source)
    native = deepspeed_copy()
    return [
        found
        for nbytes in sizes
        for found in matches_at(nbytes, (target[:nbytes], source[:nbytes]), native, busy)
    ]


@contextlib.contextmanager
def busy_processor(wanted: bool) -> Iterator[None]:
    """Keep one processor busy with another process."""
    if not wanted:
        yield
        return
    loop = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        loop.kill()
        loop.wait()


def fight(matches: list[Match], rounds: int) -> None:
    """Go through all duels once a round; the first one warms up."""
    for number in range(rounds + 1):
        if sys.stderr.isatty():
            print(f"round {number} of {rounds}", end="\r", file=sys.stderr)
        for found in matches:
            found.duel.fight()
    for found in matches:
        del found.duel.rounds[0]


def speeds(found: Match, index: int) -> list[float]:
    """Return the speed of a contestant in each round, in GB/s."""
    return [pair[index].nbytes / pair[index].seconds / 1e9 for pair in found.duel.rounds]


def rows(matches: list[Match]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table."""
    for found in matches:
        ratios = Goal("speed", 0).ratios(found.duel)
        yield (
            size_name(found.nbytes),
            found.what,
            found.duel.names[1],
            spread(speeds(found, 0), 1),
            spread(speeds(found, 1), 1),
            spread(ratios, 3),
            "" if found.goal is None else f">= {found.goal.limit}",
            "" if found.goal is None else found.goal.verdict(found.duel),
        )


def draw(matches: list[Match], path: Path, about: dict[str, Any]) -> None:
    """Draw the ratios over the sizes, one line for each way and rival."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 5))
    lines: dict[str, list[tuple[int, float]]] = {}
    for found in matches:
        ratio = statistics.median(Goal("speed", 0).ratios(found.duel))
        name = f"beside {found.duel.names[1]}: {found.what}"
        lines.setdefault(name, []).append((found.nbytes, ratio))
    for name, points in lines.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set_xscale("log", base=2)
    sizes = sorted({found.nbytes for found in matches})
    axes.set_xticks(sizes, [size_name(nbytes) for nbytes in sizes], rotation=45)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("size of a copy")
    axes.set_ylabel("speed of nvmeio.memcpy / speed of the other")
    axes.set_title(f"{about['cpu']}, torch {about['torch']}, {about['date']}")
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, help="how many (9; 3 if quick)")
    parser.add_argument("--busy", action="store_true", help="with one processor busy")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a PNG or SVG")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep raw numbers")
    parser.add_argument("--quick", action="store_true", help="a look whether all works")
    options = parser.parse_args()
    options.rounds = options.rounds or (3 if options.quick else 9)
    return options


def main() -> None:
    """Measure and report; what was measured never changes the exit status."""
    options = arguments()
    matches = all_matches(QUICK_SIZES if options.quick else SIZES, options.busy)
    with busy_processor(options.busy):
        fight(matches, options.rounds)
    about = {**surroundings(), "rounds": options.rounds, "one processor busy": options.busy}
    about["kernels, small and large"] = ", ".join(settings.selected_kernels())
    print("\n".join(f"{key}: {value}" for key, value in about.items()) + "\n")
    head = ("size", "what", "beside", "memcpy GB/s", "other GB/s", "ratio", "goal", "")
    print(table(head, rows(matches)))
    if options.plot:
        draw(matches, options.plot, about)
    if options.json:
        raw = {"machine": about, "duels": [found.duel.as_dict() for found in matches]}
        options.json.write_text(json.dumps(raw) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
