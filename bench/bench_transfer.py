"""Compare the transfers of nvmeio with fio, with os.preadv and with each other.

Each round goes through all comparisons once, on one file, so that changes in the disk's
speed affect all alike.  bench/README.md explains the tables and their results.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import beside_loop
import numpy as np
import torch
from comparisons import SPEED, Comparison, Goal, Sample, compare, measured, progress
from loop_child import loop_child
from loop_mount import try_loop_mount
from machine import arguments, machine
from peers import Peers, fio, huge_pages
from report import finish, size_name
from scratch import Move, Scratch, make_scratch, pieces, scattered, whole

import nvmeio

# Depths beside fio, with blocks of 1 MiB. fio reuses as many blocks of memory as its depth.
# A few stay in the host's caches; at the largest depth they take nearly as much memory as a
# large tensor.
FIO_DEPTHS = (16, 128, 512)
# Passes over the file per turn beside fio, because its clock counts milliseconds, and its
# CPU time includes a part of its start.
FIO_PASSES = 2
SMALL_COUNT = 1000
SMALL_BYTES = 64 << 10
PAGE_BYTES = 4096
# Reads of a page: in flight together, and one after another.
PAGES_COUNT = 16384
READS = 200
# Files that the page cache has, and how many bytes of one a turn reads.
CACHED_BYTES = (64 << 10, 1 << 20, 256 << 20, 2 << 30)
CACHED_TURN_BYTES = 64 << 20
# What a new file gets beside readers.
GROWN_BYTES = 64 << 20
# The name of memory that was never touched, and how many turns replace one.
FRESH = "never touched"
FRESH_TURNS = 8
HUGE_BYTES = 2 << 20

# The configurations that the default one is compared with.
GRID = {
    "block_size": (512 << 10, 1 << 20, 4 << 20),
    "queue_depth": (16, 128),
    "workers": (1, 2),
}
# The best of many noisy figures is partly luck, so measure those that look best again.
SCREENINGS = 2
FINALISTS = 3

# The 2 MiB pages that fio needs for its deepest queue of 1 MiB blocks, and a few more.
HUGE_PAGES_WANTED = max(FIO_DEPTHS) // 2 + 48


def by_fio(scratch: Scratch, op: str, depth: int) -> Move:
    """Return a turn of fio with blocks of 1 MiB."""
    size = scratch.pool.nbytes
    return lambda: fio(scratch.path, size, op, 1 << 20, depth, loops=FIO_PASSES)


def recycled(
    handle: nvmeio.Handle, scratch: Scratch, op: str, blocks: int, passes: int
) -> Move:
    """Return a turn that moves the file through a few MiB of reused memory, as fio does."""
    submit = handle.submit_read if op == "read" else handle.submit_write
    slots = scratch.pool[: blocks << 20].split(1 << 20)
    offsets = range(0, scratch.pool.nbytes, 1 << 20)

    def work() -> int:
        moved = 0
        requests: deque[nvmeio.Request] = deque()
        for index, offset in enumerate(itertools.chain(*[offsets] * passes)):
            if len(requests) == len(slots):
                moved += requests.popleft().wait()
            requests.append(submit(slots[index % len(slots)], scratch.file, offset))
        return moved + sum(request.wait() for request in requests)

    return lambda: measured(work)


def fio_comparisons(scratch: Scratch) -> Iterator[Comparison]:
    """Compare pool memory with fio at the same block size and depth."""
    for op, depth in itertools.product(("read", "write"), FIO_DEPTHS):
        handle = nvmeio.Handle(block_size=1 << 20, queue_depth=depth)
        if depth == min(FIO_DEPTHS):
            yield Comparison(
                f"{op}, 1 MiB x {depth}",
                ("requests of 1 MiB, memory as fio's", "fio"),
                (
                    recycled(handle, scratch, op, depth, FIO_PASSES),
                    by_fio(scratch, op, depth),
                ),
                op == "read",
            )
        yield Comparison(
            f"{op}, 1 MiB x {depth}",
            ("one request", "fio"),
            (
                whole(handle, scratch, op, scratch.pool, FIO_PASSES),
                by_fio(scratch, op, depth),
            ),
            op == "read",
        )


def memory_comparisons(scratch: Scratch) -> Iterator[Comparison]:
    """Compare ordinary tensors with pool memory."""
    handle = nvmeio.Handle()
    for op in ("read", "write"):
        yield Comparison(
            f"{op}, one request",
            ("ordinary tensor", "pool memory"),
            (
                whole(handle, scratch, op, scratch.ordinary),
                whole(handle, scratch, op, scratch.pool),
            ),
            op == "read",
        )


def aligned(buffer: Any, nbytes: int) -> Any:
    """Return `nbytes` of an array or tensor, from its first page boundary on."""
    address = buffer.ctypes.data if isinstance(buffer, np.ndarray) else buffer.data_ptr()
    start = -address % PAGE_BYTES
    return buffer[start : start + nbytes]


def kinds_of_memory(nbytes: int) -> Iterator[tuple[str, Callable[[], Any], bool]]:
    """Yield kinds of users' memory: name, function that makes it, whether it is aligned.

    Touched memory is made once and reused.  Untouched memory is made for each turn.  It is
    smaller, because otherwise it would be new to the host too, which then takes a random
    time to provide it.
    """
    makers: dict[str, Callable[[int], Any]] = {
        "numpy": lambda size: np.empty(size, np.uint8),
        "torch": lambda size: torch.empty(size, dtype=torch.uint8),
    }
    for library, make in makers.items():
        touched = make(nbytes + PAGE_BYTES)
        touched[:] = 1
        yield f"{library}", lambda m=touched: m[:nbytes], False
        yield f"{library}, at a page", lambda m=touched: aligned(m, nbytes), True
    shuffled = torch.empty(nbytes + PAGE_BYTES, dtype=torch.uint8)
    for page in np.random.default_rng(0).permutation(len(shuffled) // PAGE_BYTES):
        shuffled[page * PAGE_BYTES] = 1
    yield "torch, scattered pages", lambda: aligned(shuffled, nbytes), True
    fresh = nbytes // FRESH_TURNS
    for library, make in makers.items():
        yield f"{library}, {FRESH}", lambda make=make: make(fresh), False
        yield (
            f"{library}, {FRESH}, at a page",
            lambda make=make: aligned(make(fresh + PAGE_BYTES), fresh),
            True,
        )


def route_comparisons(scratch: Scratch) -> Iterator[Comparison]:
    """Compare the route that "auto" chooses with every possible one."""
    chosen = nvmeio.Handle()
    others = {
        "direct": nvmeio.Handle(bounce="never"),
        "bounced": nvmeio.Handle(bounce="always"),
    }
    pool = ("pool", lambda: scratch.pool, True)

    def turn(handle: nvmeio.Handle, op: str, memory: Callable[[], Any]) -> Move:
        return lambda: whole(handle, scratch, op, memory())()

    for name, memory, suits in (pool, *kinds_of_memory(scratch.pool.nbytes)):
        for op, (route, handle) in itertools.product(("read", "write"), others.items()):
            if route == "direct" and not suits:
                continue
            yield Comparison(
                f"{op}, {name}",
                ("auto", route),
                (turn(chosen, op, memory), turn(handle, op, memory)),
                op == "read",
                alternations=FRESH_TURNS if FRESH in name else 1,
            )


def small_comparisons(scratch: Scratch) -> Iterator[Comparison]:
    """Compare 1000 requests of 64 KiB with one request of as many bytes."""
    handle = nvmeio.Handle()
    buffer = scratch.pool[: min(SMALL_COUNT * SMALL_BYTES, scratch.pool.nbytes)]
    for op in ("read", "write"):
        yield Comparison(
            f"{op}, 64 MiB",
            (f"{buffer.nbytes // SMALL_BYTES} x 64 KiB", "one request"),
            (
                pieces(handle, scratch, op, buffer, SMALL_BYTES),
                whole(handle, scratch, op, buffer),
            ),
            op == "read",
            alternations=4,
        )


def turn_comparisons(scratch: Scratch) -> Iterator[Comparison]:
    """Compare a write that makes a file longer, beside three large readers and alone."""
    handle = nvmeio.Handle()
    quarters = scratch.pool.split(scratch.pool.nbytes // 4)
    content = quarters[3][: min(GROWN_BYTES, quarters[3].nbytes)]
    path = scratch.path.with_name("grown")

    def grow() -> int:
        with nvmeio.File(path, "w") as file:
            return handle.write(content, file)

    def alone() -> Sample:
        try:
            return measured(grow)
        finally:
            path.unlink()

    def read_until(stopped: threading.Event, number: int) -> None:
        offset = number * quarters[number].nbytes
        while not stopped.is_set():
            handle.read(quarters[number], scratch.file, offset)

    def beside_readers() -> Sample:
        stopped = threading.Event()
        with ThreadPoolExecutor(3) as readers:
            for number in range(3):
                readers.submit(read_until, stopped, number)
            try:
                time.sleep(0.1)
                return alone()
            finally:
                stopped.set()

    yield Comparison(
        f"write, new file of {content.nbytes >> 20} MiB",
        ("beside three readers", "alone"),
        (beside_readers, alone),
        False,
    )


def engine_comparisons(scratch: Scratch) -> Iterator[Comparison]:
    """Compare the engines that nvmeio falls back to with io_uring."""
    known = nvmeio.engines()
    engines = [name for name in ("io_uring", "libaio", "threads") if known[name]["works"]]
    handles = {name: nvmeio.Handle(engine=name) for name in engines}
    page: np.ndarray = scratch.pool[:PAGE_BYTES].numpy()
    pages = scratch.pool[: min(PAGES_COUNT * PAGE_BYTES, scratch.pool.nbytes)]

    def one_by_one(handle: nvmeio.Handle) -> Move:
        return scattered(
            lambda at: handle.read(page, scratch.file, at), scratch, READS, PAGE_BYTES
        )

    works: dict[str, tuple[Callable[[nvmeio.Handle], Move], int, int]] = {
        "read, one request": (lambda h: whole(h, scratch, "read", scratch.pool), 0, 1),
        "write, one request": (lambda h: whole(h, scratch, "write", scratch.pool), 0, 1),
        f"read, {pages.nbytes // PAGE_BYTES} x 4 KiB": (
            lambda h: pieces(h, scratch, "read", pages, PAGE_BYTES),
            PAGE_BYTES,
            2,
        ),
        "read, 4 KiB synchronous": (one_by_one, PAGE_BYTES, 10),
    }
    for work, (turn, record_bytes, alternations) in works.items():
        for name in engines[1:]:
            yield Comparison(
                work,
                (name, engines[0]),
                (turn(handles[name]), turn(handles[engines[0]])),
                work.startswith("read"),
                record_bytes=record_bytes,
                alternations=alternations,
            )


def grid() -> Iterator[dict[str, Any]]:
    """Yield the configurations that the default one is compared with."""
    for values in itertools.product(*GRID.values()):
        yield dict(zip(GRID, values, strict=True))


def described(options: dict[str, Any]) -> str:
    """Abbreviate a configuration."""
    return (
        f"{options['block_size'] >> 10} KiB x {options['queue_depth']}, "
        f"{options['workers']} workers"
    )


def default_comparison(scratch: Scratch, op: str, options: dict[str, Any]) -> Comparison:
    """Compare a default handle with a configured one."""
    return Comparison(
        f"{op}, pool memory",
        ("default handle", described(options)),
        (
            whole(nvmeio.Handle(), scratch, op, scratch.pool),
            whole(nvmeio.Handle(**options), scratch, op, scratch.pool),
        ),
        op == "read",
    )


def finalists(scratch: Scratch, quick: bool) -> Iterator[Comparison]:
    """Measure the grid, and yield comparisons with the configurations that look best."""
    for op in ("read", "write"):
        found = []
        for options in itertools.islice(grid(), 0, None, 9 if quick else 1):
            progress(f"{op}, {described(options)}")
            comparison = default_comparison(scratch, op, options)
            for _ in range(SCREENINGS):
                comparison.run_round()
            found.append((statistics.median(SPEED.values(comparison)), options))
        found.sort(key=lambda ratio_and_options: ratio_and_options[0])
        for _, options in found[: 1 if quick else FINALISTS]:
            yield default_comparison(scratch, op, options)


def page_cache_comparisons(scratch: Scratch) -> Iterator[Comparison]:
    """Compare reads of a .npy file with numpy's, from the page cache and from the drive."""
    handle = nvmeio.default_handle()
    for size in (size for size in CACHED_BYTES if size <= scratch.pool.nbytes):
        path = scratch.path.with_name(f"{size}.npy")
        np.save(path, scratch.pool[:size].numpy())
        target = np.ones(size, np.uint8)
        repeats = max(1, CACHED_TURN_BYTES // size)

        def load(read: Callable[[Any], Any], path: Any = path) -> int:
            return int(read(path).nbytes)

        def read(file: nvmeio.File, target: Any = target) -> int:
            return handle.read(target, file, offset=128)

        def readinto(file: io.FileIO, target: Any = target) -> int:
            file.seek(128)
            return file.readinto(target)

        def turn(
            work: Callable[[], int], warm: bool, path: Any = path, repeats: int = repeats
        ) -> Move:
            def take() -> Sample:
                set_cached(path, warm)
                return measured(lambda: sum(work() for _ in range(repeats if warm else 1)))

            return take

        ours, theirs = nvmeio.File(path), io.FileIO(path)
        for warm, state in ((True, "cached"), (False, "not cached")):
            yield Comparison(
                f"load, {size_name(size)}, {state}",
                ("nvmeio.load", "numpy.load"),
                (
                    turn(partial(load, nvmeio.load), warm),
                    turn(partial(load, np.load), warm),
                ),
                not warm,
            )
            yield Comparison(
                f"read into an array, {size_name(size)}, {state}",
                ("Handle.read", "readinto"),
                (turn(partial(read, ours), warm), turn(partial(readinto, theirs), warm)),
                not warm,
            )


def set_cached(path: Any, warm: bool) -> None:
    """Bring a file into the page cache, or drop it."""
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while warm and file.read(1 << 20):
            pass


def aiming(comparisons: Iterable[Comparison], *goals: Goal) -> Iterator[Comparison]:
    """Yield the comparisons with these goals."""
    return (dataclasses.replace(comparison, goals=goals) for comparison in comparisons)


def groups(scratch: Scratch, quick: bool) -> dict[str, Callable[[], Iterator[Comparison]]]:
    """Return functions that make the comparisons, by the names of --only."""
    return {
        "fio": lambda: fio_comparisons(scratch),
        "memory": lambda: aiming(memory_comparisons(scratch), Goal("speed", 0.8)),
        "routes": lambda: aiming(route_comparisons(scratch), Goal("speed", 0.95)),
        "small": lambda: aiming(small_comparisons(scratch), Goal("speed", 0.85)),
        "turns": lambda: aiming(turn_comparisons(scratch), Goal("speed", 0.2)),
        "cached": lambda: aiming(page_cache_comparisons(scratch), Goal("speed", 0.95)),
        "engines": lambda: engine_comparisons(scratch),
        "default": lambda: aiming(finalists(scratch, quick), Goal("speed", 0.95)),
    }


OTHERS = ("fio", "memory", "routes", "small", "turns", "cached", "engines", "default")
GROUPS = (*beside_loop.GROUPS, *OTHERS)


def loop_places(
    stack: contextlib.ExitStack, disk: Scratch, wanted: Sequence[str], peers: Peers
) -> dict[str, Scratch]:
    """Return the disk and, if root runs a row that needs it, a loop device, by name."""
    places = {"disk": disk}
    if beside_loop.ON_LOOP_DEVICE.intersection(wanted):
        size = beside_loop.LOOP_DEVICE_BYTES
        if mount := try_loop_mount(stack, size + (256 << 20), peers):
            places["loop over tmpfs"] = stack.enter_context(make_scratch(mount, size))
    return places


def main() -> None:
    """Measure and report. The results never change the exit status."""
    options = arguments(__doc__, ("1G", "64M"), (10, 3), groups=GROUPS, loop_rounds=True)
    peers = Peers()
    with contextlib.ExitStack() as stack:
        disk = stack.enter_context(make_scratch(options.dir, options.size))
        about = machine(options.dir)
        about |= {"size": options.size, "rounds": options.rounds}
        found: list[Comparison] = []
        child = stack.enter_context(loop_child(peers))
        if set(beside_loop.GROUPS).intersection(options.only):
            about["rounds beside the loop"] = options.loop_rounds
            places = loop_places(stack, disk, options.only, peers)
            found += beside_loop.comparisons(options.only, places, child, stack)
            compare(found, options.loop_rounds)
        others = groups(disk, options.quick)
        if "fio" in options.only:
            if peers.has_fio():
                reserved = stack.enter_context(huge_pages(HUGE_PAGES_WANTED))
                about["huge pages for fio"] = reserved
            else:
                del others["fio"]
        rest = [
            comparison
            for name in options.only
            if name in others
            for comparison in others[name]()
        ]
        compare(rest, options.rounds)
    finish("transfer", about, found + rest, peers.left_out, options.json)


if __name__ == "__main__":
    main()
