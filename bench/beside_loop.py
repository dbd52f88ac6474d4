"""Rows beside the plain loop, a program on liburing that fills as much memory as nvmeio.

fio uses the same few MiB of memory over and over, which stay in the host's caches.  The
loop fills as much memory as nvmeio, of the same kind, with every page touched before, and
keeps as many blocks of the same size in flight.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from comparisons import Comparison, Goal, Sample, measured
from loop_child import LoopChild
from scratch import Move, Scratch, scattered, whole

import nvmeio

__all__ = ["GROUPS", "LOOP_DEVICE_BYTES", "ON_LOOP_DEVICE", "comparisons"]

LOOP = "plain loop"
OPS = ("read", "write")
BLOCK = 1 << 20
# The queue depth of a default handle.
DEPTH = 128
SHALLOW_DEPTH = 16

FILES = 1000
FILE_BYTES = 64 << 10
SMALL_BYTES = 64 << 10
# The sizes of pieces, and the largest number of each.
PIECES = {SMALL_BYTES: 4096, BLOCK: 1024}
# Goals for pieces: the speed, and the CPU time, each divided by the loop's.
SPEEDS = {
    "disk": {"one by one": 0.95, "in one call": 0.95},
    "loop over tmpfs": {"one by one": 0.85, "in one call": 0.95},
}
CPU_TIMES = {
    (SMALL_BYTES, "one by one"): 3.0,
    (SMALL_BYTES, "in one call"): 1.3,
    (BLOCK, "one by one"): 1.7,
    (BLOCK, "in one call"): 1.7,
}
OWN_FILES = "open Files of their own"
SUBMISSIONS = 100
PAGE_BYTES = 4096
READS = 50
OPENS = 20_000
THREADS = 64
READS_EACH = 100
# The goal is three times the speed of the time when each completion woke all threads.
THREAD_SPEED = 0.5
# The interval at which Python's waits check for signals.
PATIENCE_NS = 100_000_000
NEW_FILES = 16

# The size of the loop device, which is enough for its rows.
LOOP_DEVICE_BYTES = 128 << 20

# The goals beside the loop and beside fio, for rows that do not set their own.
READ_SPEED, WRITE_SPEED = 0.97, 0.95


def speed(op: str) -> Goal:
    """Return the goal of a large transfer."""
    return Goal("speed", READ_SPEED if op == "read" else WRITE_SPEED)


def blocks(
    child: LoopChild, scratch: Scratch, op: str, depth: int, kind: str, block: int = BLOCK
) -> Move:
    """Return a turn in which the loop goes through the whole file."""
    size = scratch.pool.nbytes
    return child.turn("plain blocks", op, scratch.path, block, depth, size, kind)


def whole_comparisons(scratch: Scratch, child: LoopChild) -> Iterator[Comparison]:
    """Compare one request for the whole file with the loop."""
    handles = {
        SHALLOW_DEPTH: ("1 MiB x 16", nvmeio.Handle(queue_depth=SHALLOW_DEPTH)),
        DEPTH: ("default handle", nvmeio.Handle()),
    }
    for (depth, (name, handle)), op in itertools.product(handles.items(), OPS):
        turns = (
            whole(handle, scratch, op, scratch.pool),
            blocks(child, scratch, op, depth, "huge"),
        )
        work = f"{op}, one request, {name}"
        yield Comparison(work, ("nvmeio", LOOP), turns, op == "read", (speed(op),))


def own_folder(scratch: Scratch, block: int) -> Path:
    """Return the folder of files that have one piece each."""
    return scratch.path.parent / f"own-{block >> 10}"


def targets(
    scratch: Scratch, place: str, stack: contextlib.ExitStack, block: int, count: int
) -> dict[str, list[tuple[Any, int]]]:
    """Return the file and offset of each piece, by the way to name a file."""
    offsets = range(0, count * block, block)
    found: dict[str, list[tuple[Any, int]]] = {
        "a path": [(str(scratch.path), offset) for offset in offsets],
        "a File": [(scratch.file, offset) for offset in offsets],
    }
    # A loop device only has room for small pieces.
    if block == SMALL_BYTES or place == "disk":
        folder = own_folder(scratch, block)
        folder.mkdir()
        own = []
        for index in range(min(count, FILES)):
            nvmeio.write_file(scratch.pool[:block], folder / str(index), atomic=False)
            own.append(stack.enter_context(nvmeio.File(folder / str(index), "r+")))
        os.sync()
        found[OWN_FILES] = [(file, 0) for file in own]
    return found


def python_comparisons(
    scratch: Scratch, place: str, child: LoopChild, stack: contextlib.ExitStack
) -> Iterator[Comparison]:
    """Compare many requests of Python, one by one and in one call, with the loop."""
    handle = nvmeio.Handle()
    for block, most in PIECES.items():
        count = min(most, scratch.pool.nbytes // block)
        kinds = targets(scratch, place, stack, block, count)
        for (kind, files), op, way in itertools.product(kinds.items(), OPS, SPEEDS[place]):
            views = scratch.pool[: len(files) * block].split(block)
            items = [(view.numpy(), *at) for view, at in zip(views, files, strict=True)]
            goals = [Goal("speed", SPEEDS[place][way])]
            if place == "disk":
                goals.append(Goal("CPU time", CPU_TIMES[block, way]))
            plain = ("plain blocks", op, scratch.path, block, DEPTH, len(files) * block)
            if kind == OWN_FILES:
                plain = ("plain open files", op, own_folder(scratch, block), len(files))
                plain += (block, DEPTH)
            loop = child.turn(*plain, "huge")
            yield Comparison(
                f"{op}, {len(files)} x {block >> 10} KiB {way}, {kind}, {place}",
                ("nvmeio", LOOP),
                (moved(handle, op, items, way), loop),
                op == "read",
                tuple(goals),
                block,
            )


def moved(handle: nvmeio.Handle, op: str, items: Sequence[Any], way: str) -> Move:
    """Return a turn that moves items, one by one or in one call."""
    submit = handle.submit_read if op == "read" else handle.submit_write
    all_ = handle.read_many if op == "read" else handle.write_many

    def one_by_one() -> int:
        requests = [submit(*item) for item in items]
        return sum(request.wait() for request in requests)

    work = one_by_one if way == "one by one" else lambda: all_(items)
    return lambda: measured(work)


def submit_comparisons(scratch: Scratch) -> Iterator[Comparison]:
    """Compare the submission of numpy views with that of tensors, without the waiting."""
    handle = nvmeio.Handle()
    pieces = scratch.pool[: SUBMISSIONS * PAGE_BYTES].split(PAGE_BYTES)
    turns = {
        "numpy views": submitted(handle, scratch, [piece.numpy() for piece in pieces]),
        "tensors": submitted(handle, scratch, pieces),
    }
    both = ("numpy views", "tensors")
    for names, limit in ((both, 1.5), (both[::-1], 2.0)):
        yield Comparison(
            "submit reads of an open File",
            names,
            tuple(turns[name] for name in names),
            False,
            (Goal("CPU us", limit),),
            PAGE_BYTES,
            alternations=50,
        )


def submitted(handle: nvmeio.Handle, scratch: Scratch, views: Sequence[Any]) -> Move:
    """Return a turn that measures this thread's time until everything is submitted."""

    def turn() -> Sample:
        submit, file = handle.submit_read, scratch.file
        cpu, begin = time.thread_time(), time.perf_counter()
        requests = [submit(view, file, 0) for view in views]
        taken = time.perf_counter() - begin, time.thread_time() - cpu
        nbytes = sum(request.wait() for request in requests)
        return Sample(nbytes, *taken, device_bytes=0)

    return turn


def ordinary_comparisons(scratch: Scratch, child: LoopChild) -> Iterator[Comparison]:
    """Compare ordinary tensors with the loop in pages of 4 KiB."""
    handle = nvmeio.Handle()
    for op in OPS:
        turns = (
            whole(handle, scratch, op, scratch.ordinary),
            blocks(child, scratch, op, DEPTH, "small"),
        )
        work = f"{op}, ordinary tensor in 4 KiB pages"
        yield Comparison(
            work, ("nvmeio", LOOP), turns, op == "read", (Goal("speed", 0.95),)
        )


def cpu_comparisons(scratch: Scratch, child: LoopChild) -> Iterator[Comparison]:
    """Compare requests of 1 MiB from C with the loop."""
    size = scratch.pool.nbytes
    for op in OPS:
        turns = (
            child.turn("engine blocks", op, scratch.path, BLOCK, DEPTH, size),
            blocks(child, scratch, op, DEPTH, "huge"),
        )
        work = f"{op}, requests of 1 MiB from C"
        goals = (Goal("CPU time", 1.35),)
        yield Comparison(work, ("nvmeio", LOOP), turns, op == "read", goals, BLOCK)


def file_comparisons(
    scratch: Scratch, place: str, child: LoopChild
) -> Iterator[Comparison]:
    """Compare small files, each opened by its path, with the loop on one file."""
    folder = scratch.path.parent / "small"
    count = min(FILES, scratch.pool.nbytes // FILE_BYTES)
    views = scratch.pool[: count * FILE_BYTES].split(FILE_BYTES)
    files = [(view, str(folder / str(index))) for index, view in enumerate(views)]
    folder.mkdir()
    for view, path in files:
        nvmeio.write_file(view, path)
    os.sync()
    handle = nvmeio.Handle()
    goals = {"disk": {"read": 0.95, "write": 0.88}}.get(place, dict.fromkeys(OPS, 0.75))

    def work(op: str) -> int:
        submit = handle.submit_read if op == "read" else handle.submit_write
        requests = [submit(view, path) for view, path in files]
        return sum(request.wait() for request in requests)

    for op in OPS:
        one = ("plain blocks", op, scratch.path, FILE_BYTES, DEPTH, count * FILE_BYTES)
        all_ = ("plain files", op, folder, count, FILE_BYTES, DEPTH)
        for plain, what, aims in (
            (one, "on one file", (Goal("speed", goals[op]),)),
            (all_, "that opens them", ()),
        ):
            yield Comparison(
                f"{op}, {count} files of 64 KiB, {place}",
                ("by path", f"{LOOP} {what}"),
                (lambda op=op: measured(lambda: work(op)), child.turn(*plain, "huge")),
                op == "read",
                aims,
                FILE_BYTES,
                alternations=4,
            )


def open_comparisons(scratch: Scratch, child: LoopChild) -> Iterator[Comparison]:
    """Compare opening and closing a file from C with open(2) and close(2)."""
    turns = (
        child.turn("engine opens", scratch.path, OPENS),
        child.turn("plain opens", scratch.path, OPENS),
    )
    names = ("nvmeio_file_open, _release", "open, close")
    # Nothing waits, so CPU time equals run time, and does not depend on other load.
    goals = (Goal("CPU us", 3.5),)
    yield Comparison("open and close", names, turns, False, goals, record_bytes=1)


def thread_comparisons(scratch: Scratch, child: LoopChild) -> Iterator[Comparison]:
    """Compare threads that each wait for their own request with threads that pread(2)."""
    for patience_ns, words in ((-1, "as long as it takes"), (PATIENCE_NS, "0.1 s a time")):
        counts = (scratch.path, THREADS, READS_EACH)
        turns = (
            child.turn("engine threads", *counts, patience_ns),
            child.turn("plain threads", *counts),
        )
        work = f"read, 4 KiB, {THREADS} threads that wait {words}"
        goals = (Goal("switches", 3.0), Goal("speed", THREAD_SPEED))
        yield Comparison(work, ("nvmeio", "pread"), turns, True, goals, PAGE_BYTES)


def latency_comparisons(scratch: Scratch, place: str) -> Iterator[Comparison]:
    """Compare synchronous reads of 4 KiB with os.preadv into the same memory."""
    handle = nvmeio.Handle()
    buffer: np.ndarray = scratch.pool[:PAGE_BYTES].numpy()
    yield Comparison(
        f"read, 4 KiB synchronous, {place}",
        ("handle.read", "os.preadv"),
        tuple(
            scattered(read, scratch, READS, PAGE_BYTES)
            for read in (
                lambda at: handle.read(buffer, scratch.file, at),
                lambda at: os.preadv(scratch.descriptor, [buffer], at),
            )
        ),
        True,
        (Goal("time", 1.25),),
        PAGE_BYTES,
        alternations=20,
    )


def new_files(turn: Callable[[], Sample], paths: Sequence[Path]) -> Move:
    """Return a turn that makes files. They are removed after it."""

    def take() -> Sample:
        try:
            return turn()
        finally:
            for path in paths:
                path.unlink(missing_ok=True)
            # Without this, the next turn would wait until their space is freed.
            folder = os.open(paths[0].parent, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)

    return take


def written(handle: nvmeio.Handle, parts: Sequence[tuple[torch.Tensor, str]]) -> Move:
    """Return a turn that writes each part to its path."""

    def work() -> int:
        requests = [handle.submit_write(part, path) for part, path in parts]
        return sum(request.wait() for request in requests)

    return lambda: measured(work)


def new_comparisons(scratch: Scratch, child: LoopChild) -> Iterator[Comparison]:
    """Compare writes of new files with the loop after fallocate(2)."""
    handle = nvmeio.Handle()
    size = scratch.pool.nbytes
    kinds = {
        "pool memory": (scratch.pool, "huge", 1),
        "ordinary tensor": (scratch.ordinary, "small", 1),
        f"pool memory, {NEW_FILES} files": (scratch.pool, "huge", NEW_FILES),
    }
    for name, (buffer, kind, count) in kinds.items():
        prefix = scratch.path.with_name("new")
        paths = [Path(f"{prefix}.{index}") for index in range(count)]
        parts = list(zip(buffer.split(size // count), map(str, paths), strict=True))

        ours = written(handle, parts)
        loop = child.turn("plain fresh", prefix, count, BLOCK, DEPTH, size, kind)
        turns = (new_files(ours, paths), new_files(loop, paths))
        names = ("nvmeio", f"{LOOP} after fallocate")
        yield Comparison(f"write, new, {name}", names, turns, False)


Make = Callable[[Scratch, LoopChild], Iterator[Comparison]]
ON_DISK: dict[str, Make] = {
    "whole": whole_comparisons,
    "ordinary": ordinary_comparisons,
    "cpu": cpu_comparisons,
    "submit": lambda scratch, child: submit_comparisons(scratch),
    "opens": open_comparisons,
    "threads": thread_comparisons,
    "new": new_comparisons,
}
ON_LOOP_DEVICE = {"files", "latency", "python"}
# The names of --only.
GROUPS = (*ON_DISK, *sorted(ON_LOOP_DEVICE))


def comparisons(
    names: Sequence[str],
    places: dict[str, Scratch],
    child: LoopChild | None,
    stack: contextlib.ExitStack,
) -> Iterator[Comparison]:
    """Yield the rows of some groups."""
    for name in names:
        if name in ON_DISK and child is not None:
            yield from ON_DISK[name](places["disk"], child)
        for place, scratch in places.items():
            if name == "files" and child is not None:
                yield from file_comparisons(scratch, place, child)
            if name == "python" and child is not None:
                yield from python_comparisons(scratch, place, child, stack)
            if name == "latency":
                yield from latency_comparisons(scratch, place)
