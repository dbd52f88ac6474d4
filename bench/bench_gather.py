"""Compare gathers with a plain loop, with fio, and with other ways to read rows in Python.

Records of one size are read from random places of a large file that is in no cache.  Each
round goes through all comparisons once.  bench/README.md explains the tables.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import mmap
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from comparisons import Comparison, Goal, Sample, compare, measured
from loop_child import LoopChild, Turn, loop_child
from loop_mount import try_loop_mount
from machine import arguments, machine
from peers import Peers, fio, huge_pages
from report import finish, size_name

import nvmeio
from nvmeio._cli.measuring import forget_cached

DEPTH = 128
ROW_BYTES = 4096
ROW_SIZES = (64, 512, 4096, 65536)
# Rows per turn. fio's clock counts milliseconds, and is exact to 1 % with this many.
ROWS = 20_000
# Rows per turn for peers that read one row after another, at 0.1 ms each.
SLOW_ROWS = 1_000
# The memory of the largest turn.
TURN_BYTES = 256 << 20
# The huge pages that fio's buffers need.
HUGE_PAGES_WANTED = 48
# fio with separate memory for each block in flight.
BATCH = {
    "iodepth_batch_submit": 32,
    "iodepth_batch_complete_min": 32,
    "iodepth_batch_complete_max": DEPTH,
}
FIXED = {**BATCH, "fixedbufs": 1, "registerfiles": 1}
# The names of --only.
GROUPS = ("loop", "fio", "peers", "merge", "cached")
# The exponent of the skew: a few rows are read again and again.
ZIPF = 1.2


@dataclasses.dataclass(frozen=True)
class Scratch:
    """A file of random bytes, and memory to read into.

    Attributes
    ----------
    path : Path
        The file.
    size : int
        Its size in bytes.
    handle : nvmeio.Handle
        With the depth that fio is given.
    file : nvmeio.File
        The same file, open.
    memory : ndarray
        In the pool, touched.
    """

    path: Path
    size: int
    handle: nvmeio.Handle
    file: nvmeio.File
    memory: np.ndarray


@contextlib.contextmanager
def make_scratch(folder: Path, size: int) -> Iterator[Scratch]:
    """Make the file and the memory, and remove the file on exit."""
    with contextlib.ExitStack() as stack:
        inside = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="nvmeio-bench-", dir=folder)
        )
        path = Path(inside, "file")
        memory = nvmeio.empty(TURN_BYTES, np.uint8)
        memory[:] = np.frombuffer(np.random.default_rng(0).bytes(TURN_BYTES), np.uint8)
        handle = stack.enter_context(nvmeio.Handle(queue_depth=DEPTH))
        file = stack.enter_context(nvmeio.File(path, "w"))
        for offset in range(0, size, TURN_BYTES):
            handle.submit_write(memory[: size - offset], file, offset).wait()
        handle.fsync(file)
        yield Scratch(path, size, handle, file, memory)


def by_fio(scratch: Scratch, options: dict[str, int]) -> Callable[[], Sample]:
    """Return a turn in which fio reads as many random blocks as a gather reads rows."""
    options = {"norandommap": 1, "number_ios": ROWS, **options}
    path, size = scratch.path, scratch.size
    return lambda: fio(path, size, "randread", ROW_BYTES, DEPTH, **options)


Choose = Callable[[np.random.Generator, int, int], np.ndarray]

# How rows are chosen: a function of a random generator, how many, and from how many.
ORDERS: dict[str, Choose] = {
    "random": lambda rng, count, rows: rng.integers(0, rows, count),
    "sorted": lambda rng, count, rows: np.sort(rng.integers(0, rows, count)),
    "Zipf": lambda rng, count, rows: rng.zipf(ZIPF, count) % rows,
    # Rows of one 32nd of the file, as when a shard of it is read.
    "near": lambda rng, count, rows: rng.integers(0, rows // 32, count),
}


def distinct(rng: np.random.Generator, count: int, rows: int) -> np.ndarray:
    """Choose no row twice: a gather would read it once, and the plain loop twice."""
    return rng.choice(rows, count, replace=False)


def gather(
    scratch: Scratch,
    rows: int,
    row_bytes: int,
    choose: Choose = ORDERS["random"],
    **options: int,
) -> Callable[[], Sample]:
    """Return a turn of one gather."""
    rng = np.random.default_rng()
    out = scratch.memory[: rows * row_bytes]

    def turn() -> Sample:
        offsets = choose(rng, rows, scratch.size // row_bytes) * row_bytes
        forget_cached(scratch.path)
        return measured(
            lambda: scratch.handle.gather(scratch.file, offsets, row_bytes, out, **options)
        )

    return turn


def peer(
    scratch: Scratch, read: Callable[[np.ndarray], int], rows: int, row_bytes: int
) -> Callable[[], Sample]:
    """Return a turn of a peer, which gets the numbers of the rows."""
    rng = np.random.default_rng()

    def turn() -> Sample:
        chosen = rng.integers(0, scratch.size // row_bytes, rows)
        forget_cached(scratch.path)
        return measured(lambda: read(chosen))

    return turn


def memmap(scratch: Scratch, advice: int) -> Callable[[np.ndarray], int]:
    """Return a function that reads rows by numpy.memmap."""

    def read(rows: np.ndarray) -> int:
        whole = np.memmap(scratch.path, np.uint8, "r")
        whole._mmap.madvise(advice)
        return int(whole.reshape(-1, ROW_BYTES)[rows].nbytes)

    return read


def preadv(scratch: Scratch) -> Callable[[np.ndarray], int]:
    """Return a function that reads rows by os.preadv with O_DIRECT."""
    views = [
        scratch.memory[i * ROW_BYTES : (i + 1) * ROW_BYTES].data for i in range(SLOW_ROWS)
    ]

    def read(rows: np.ndarray) -> int:
        descriptor = os.open(scratch.path, os.O_RDONLY | os.O_DIRECT)
        try:
            return sum(
                os.preadv(descriptor, [view], row * ROW_BYTES)
                for view, row in zip(views, rows.tolist(), strict=True)
            )
        finally:
            os.close(descriptor)

    return read


def by_caio(scratch: Scratch, caio: Any) -> Callable[[np.ndarray], int]:
    """Return a function that reads rows by caio, one coroutine per row."""

    async def read_all(rows: list[int]) -> int:
        descriptor = os.open(scratch.path, os.O_RDONLY)
        try:
            async with caio.AsyncioContext(max_requests=DEPTH) as context:
                found = await asyncio.gather(
                    *(context.read(ROW_BYTES, descriptor, row * ROW_BYTES) for row in rows)
                )
        finally:
            os.close(descriptor)
        return sum(map(len, found))

    return lambda rows: asyncio.run(read_all(rows.tolist()))


def fio_comparisons(scratch: Scratch, place: str) -> Iterator[Comparison]:
    """Compare gathers of 4 KiB with fio."""
    for name, options in {"batch": BATCH, "batch, fixed": FIXED}.items():
        turns = (
            gather(scratch, ROWS, ROW_BYTES, max_gap=0),
            by_fio(scratch, options),
        )
        work, names = f"4 KiB x {DEPTH}, {place}", ("gather", f"fio, {name}")
        yield Comparison(work, names, turns, False, record_bytes=ROW_BYTES)


def peer_comparisons(scratch: Scratch, caio: Any) -> Iterator[Comparison]:
    """Compare gathers of 4 KiB with other ways to read them in Python."""
    peers = {
        "numpy.memmap": memmap(scratch, mmap.MADV_NORMAL),
        "numpy.memmap, MADV_RANDOM": memmap(scratch, mmap.MADV_RANDOM),
        "os.preadv": preadv(scratch),
    }
    if caio is not None:
        peers["caio"] = by_caio(scratch, caio)
    for name, read in peers.items():
        turns = (
            gather(scratch, SLOW_ROWS, ROW_BYTES),
            peer(scratch, read, SLOW_ROWS, ROW_BYTES),
        )
        work = f"{SLOW_ROWS} rows of 4 KiB"
        yield Comparison(work, ("gather", name), turns, False, record_bytes=ROW_BYTES)


def merge_comparisons(scratch: Scratch) -> Iterator[Comparison]:
    """Compare gathers that merge neighbours with gathers that do not."""
    for row_bytes, order in itertools.product(ROW_SIZES, ORDERS):
        rows = min(ROWS, TURN_BYTES // row_bytes // 4)
        turns = (
            gather(scratch, rows, row_bytes, ORDERS[order]),
            gather(scratch, rows, row_bytes, ORDERS[order], max_gap=0),
        )
        work, names = f"{order} rows of {row_bytes} B", ("max_gap=4096", "max_gap=0")
        yield Comparison(work, names, turns, False, record_bytes=row_bytes)


def cached_comparisons(scratch: Scratch) -> Iterator[Comparison]:
    """Compare calls for few cached rows of 4 KiB with numpy.memmap, call by call."""
    shape = (SLOW_ROWS, ROW_BYTES)
    mapped = np.memmap(scratch.path, np.uint8, "r", shape=shape)
    array = nvmeio.ArrayFile(scratch.path, dtype=np.uint8, shape=shape)
    rows = np.random.default_rng(0).permutation(SLOW_ROWS)
    offsets, out = rows[:, None] * ROW_BYTES, np.empty(ROW_BYTES, np.uint8)
    some = np.resize(rows, (SLOW_ROWS, 16))

    def turn(read: Callable[[int], int]) -> Callable[[], Sample]:
        def take() -> Sample:
            # Cache and map the rows.
            mapped.max()
            return measured(lambda: sum(map(read, range(SLOW_ROWS))))

        return take

    ways: dict[str, tuple[float, Callable[[int], int], Callable[[int], int]]] = {
        "gather of one row": (
            8,
            lambda i: scratch.handle.gather(scratch.file, offsets[i], ROW_BYTES, out),
            lambda i: mapped[rows[i]].copy().nbytes,
        ),
        "ArrayFile[i]": (
            12,
            lambda i: array[i].nbytes,
            lambda i: mapped[i].copy().nbytes,
        ),
        "ArrayFile[16 rows]": (
            30 / 16,
            lambda i: array[some[i]].nbytes,
            lambda i: mapped[some[i]].nbytes,
        ),
    }
    for name, (goal, ours, theirs) in ways.items():
        work, names = f"cached rows of 4 KiB, {name}", (name, "numpy.memmap")
        goals = (Goal("CPU us", goal),)
        turns = turn(ours), turn(theirs)
        yield Comparison(work, names, turns, False, goals, ROW_BYTES)


def on_one_processor(turn: Turn, *pids: int) -> Turn:
    """Return the same turn, with all threads of some processes on one processor."""

    def allow(processors: set[int]) -> None:
        for pid in pids:
            for task in Path(f"/proc/{pid}/task").iterdir():
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(int(task.name), processors)

    def take() -> Sample:
        allowed = os.sched_getaffinity(0)
        try:
            allow({max(allowed)})
            return turn()
        finally:
            # Move threads that started meanwhile too.
            allow(allowed)

    return take


def loop_comparisons(
    scratch: Scratch, place: str, child: LoopChild
) -> Iterator[Comparison]:
    """Compare gathers of 4 KiB with the plain loop."""
    turns = (
        gather(scratch, ROWS, ROW_BYTES, distinct, max_gap=0),
        child.turn("plain gather", scratch.path, ROW_BYTES, DEPTH, ROWS, "huge"),
    )
    work, names = f"4 KiB x {DEPTH}, {place}", ("gather", "plain loop")
    goals = (Goal("speed", 0.95), *((Goal("CPU us", 2.5),) if place == "disk" else ()))
    yield Comparison(work, names, turns, False, goals, ROW_BYTES)
    turns = tuple(on_one_processor(turn, os.getpid(), child.pid) for turn in turns)
    work, goals = f"{work}, on one processor", (Goal("CPU time", 1.15),)
    yield Comparison(work, names, turns, False, goals, ROW_BYTES)


def all_comparisons(
    places: dict[str, Scratch], names: Sequence[str], child: LoopChild | None, peers: Peers
) -> tuple[list[Comparison], list[Comparison]]:
    """Return the comparisons of the chosen groups: with the plain loop, and all others."""
    loop: list[Comparison] = []
    others: list[Comparison] = []
    has_fio = "fio" in names and peers.has_fio()
    for place, scratch in places.items():
        if "loop" in names and child is not None:
            loop += loop_comparisons(scratch, place, child)
        if has_fio:
            others += fio_comparisons(scratch, place)
    if "peers" in names:
        others += peer_comparisons(places["disk"], peers.module("caio"))
    if "merge" in names:
        others += merge_comparisons(places["disk"])
    if "cached" in names:
        others += cached_comparisons(places["disk"])
    return loop, others


def main() -> None:
    """Measure and report. The results never change the exit status."""
    options = arguments(__doc__, ("4G", "256M"), (10, 2), groups=GROUPS, loop_rounds=True)
    if options.size < ROWS * ROW_BYTES:
        least = size_name(ROWS * ROW_BYTES)
        sys.exit(f"--size is {options.size} bytes; it must be at least {least}")
    peers = Peers()
    with contextlib.ExitStack() as stack:
        has_huge_pages = stack.enter_context(huge_pages(HUGE_PAGES_WANTED))
        places = {"disk": stack.enter_context(make_scratch(options.dir, options.size))}
        if {"loop", "fio"}.intersection(options.only):
            size = min(options.size, 1 << 30)
            if mount := try_loop_mount(stack, size + (256 << 20), peers):
                places["loop over tmpfs"] = stack.enter_context(make_scratch(mount, size))
        child = stack.enter_context(loop_child(peers))
        loop, others = all_comparisons(places, options.only, child, peers)
        about = machine(options.dir) | {"huge pages for fio": has_huge_pages}
        about |= {"size": options.size, "rounds": options.rounds}
        about["rounds beside the loop"] = options.loop_rounds
        compare(loop, options.loop_rounds)
        compare(others, options.rounds)
    finish("gather", about, loop + others, peers.left_out, options.json)


if __name__ == "__main__":
    main()
