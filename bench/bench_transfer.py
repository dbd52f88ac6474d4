"""Compares the transfers of nvmeio with fio, with os.preadv and with each other.

All duels are gone through once a round on one file, so they see the same moods of the disk.
bench/README.md says how to read the tables and what they showed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import mmap
import os
import random
import statistics
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from duels import SPEED, Duel, Goal, Sample, fight, measured, progress
from machine import arguments, machine
from peers import Peers, fio, huge_pages
from report import finish

import nvmeio

# At 1 MiB a block.  fio uses depth blocks of memory over and over, which the host's caches
# reward where they are few; the deepest is close to the footprint of a large tensor.
FIO_DEPTHS = (16, 128, 512)
# Passes over the file in a turn beside fio, whose clock counts milliseconds and whose CPU
# time includes some of its start.
FIO_PASSES = 2
SMALL_COUNT = 1000
SMALL_BYTES = 64 << 10
LATENCY_BYTES = 4096
PAGE_BYTES = 4096
# Memory that was never touched, and how many turns take the place of one.
FRESH = "never touched"
FRESH_TURNS = 8
# What a ring has places for, or less.
REGISTERED_BYTES = 24 << 20
HUGE_BYTES = 2 << 20
LATENCY_READS = 50

# The configurations that the default one is compared with.
GRID = {
    "block_size": (512 << 10, 1 << 20, 4 << 20),
    "queue_depth": (16, 128),
    "overlap_events": (False, True),
    "intra_op_parallelism": (1, 2),
}
# The best of many noisy figures is the luckiest: those that look best are measured anew.
SCREENINGS = 2
FINALISTS = 3

# What the deepest queue of 1 MiB blocks needs in pages of 2 MiB, and some to spare.
HUGE_PAGES_WANTED = max(FIO_DEPTHS) // 2 + 48

Move = Callable[[], Sample]


@dataclasses.dataclass
class Ground:
    """The file and the memory that all duels are fought on.

    Attributes
    ----------
    path : Path
        The file, written once and synced.
    file : nvmeio.File
        The same, open for reading and writing, past the page cache.
    descriptor : int
        The same, open with O_DIRECT.
    pool, ordinary : torch.Tensor
        As many bytes as the file has, every page touched: from new_cpu_locked_tensor, and
        as torch allocates them.
    has_huge_pages : bool
        Whether fio has some that are reserved.
    """

    path: Path
    file: nvmeio.File
    descriptor: int
    pool: torch.Tensor
    ordinary: torch.Tensor
    has_huge_pages: bool


@contextlib.contextmanager
def ground(folder: Path, size: int) -> Iterator[Ground]:
    """Make the file and the memory, and clear up."""
    with contextlib.ExitStack() as stack:
        has_huge_pages = stack.enter_context(huge_pages(HUGE_PAGES_WANTED))
        inside = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="nvmeio-bench-", dir=folder)
        )
        path = Path(inside, "file")
        handle = stack.enter_context(nvmeio.aio_handle())
        pool = handle.new_cpu_locked_tensor(size, torch.empty(0, dtype=torch.uint8))
        pool.random_(0, 256)
        nvmeio.write_file(path, pool, sync=True)
        file = stack.enter_context(nvmeio.File(path, "r+", direct=True))
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        stack.callback(os.close, descriptor)
        yield Ground(path, file, descriptor, pool, pool.clone(), has_huge_pages)


def by_fio(ground: Ground, op: str, depth: int) -> Move:
    """Return a turn of fio's, in blocks of 1 MiB."""
    size = ground.pool.nbytes
    return lambda: fio(ground.path, size, op, 1 << 20, depth, loops=FIO_PASSES)


def whole(
    handle: nvmeio.aio_handle,
    ground: Ground,
    op: str,
    buffer: torch.Tensor,
    passes: int = 1,
) -> Move:
    """Return a turn that moves a buffer in one request, some times over."""
    submit = handle.submit_read if op == "read" else handle.submit_write
    return lambda: measured(
        lambda: sum(submit(buffer, ground.file).wait() for _ in range(passes))
    )


def recycled(
    handle: nvmeio.aio_handle, ground: Ground, op: str, blocks: int, passes: int
) -> Move:
    """Return a turn that moves the file through a few MiB of pool memory, as fio does."""
    submit = handle.submit_read if op == "read" else handle.submit_write
    slots = ground.pool[: blocks << 20].split(1 << 20)
    offsets = range(0, ground.pool.nbytes, 1 << 20)

    def work() -> int:
        moved = 0
        requests: deque[nvmeio.Request] = deque()
        for index, offset in enumerate(itertools.chain(*[offsets] * passes)):
            if len(requests) == len(slots):
                moved += requests.popleft().wait()
            requests.append(submit(slots[index % len(slots)], ground.file, offset))
        return moved + sum(request.wait() for request in requests)

    return lambda: measured(work)


def pieces(
    handle: nvmeio.aio_handle, ground: Ground, op: str, buffer: torch.Tensor
) -> Move:
    """Return a turn that moves a buffer in a request for each 64 KiB."""
    submit = handle.submit_read if op == "read" else handle.submit_write
    views = list(enumerate(buffer.split(SMALL_BYTES)))

    def work() -> int:
        requests = [submit(view, ground.file, index * SMALL_BYTES) for index, view in views]
        return sum(request.wait() for request in requests)

    return lambda: measured(work)


def scattered(read: Callable[[int], Any], ground: Ground) -> Move:
    """Return a turn of synchronous reads at random places; `read` takes the offset."""
    generator = random.Random()
    last = ground.pool.nbytes // LATENCY_BYTES - 1

    def turn() -> Sample:
        offsets = [LATENCY_BYTES * generator.randint(0, last) for _ in range(LATENCY_READS)]

        def work() -> int:
            for offset in offsets:
                read(offset)
            return LATENCY_READS * LATENCY_BYTES

        return measured(work)

    return turn


def fio_duels(ground: Ground) -> Iterator[Duel]:
    """Pair pool memory with fio at the same block size and depth."""
    for op, depth in itertools.product(("read", "write"), FIO_DEPTHS):
        handle = nvmeio.aio_handle(1 << 20, depth, overlap_events=True)
        if depth == min(FIO_DEPTHS):
            yield Duel(
                f"{op}, 1 MiB x {depth}",
                ("requests of 1 MiB, memory as fio's", "fio"),
                (
                    recycled(handle, ground, op, depth, FIO_PASSES),
                    by_fio(ground, op, depth),
                ),
                op == "read",
            )
        yield Duel(
            f"{op}, 1 MiB x {depth}",
            ("one request", "fio"),
            (
                whole(handle, ground, op, ground.pool, FIO_PASSES),
                by_fio(ground, op, depth),
            ),
            op == "read",
        )


def memory_duels(ground: Ground) -> Iterator[Duel]:
    """Pair ordinary tensors with pool memory."""
    for op, overlap in itertools.product(("read", "write"), (False, True)):
        handle = nvmeio.aio_handle(overlap_events=overlap)
        yield Duel(
            f"{op}, overlap_events={overlap}",
            ("ordinary tensor", "pool memory"),
            (
                whole(handle, ground, op, ground.ordinary),
                whole(handle, ground, op, ground.pool),
            ),
            op == "read",
        )


def aligned(buffer: Any, nbytes: int) -> Any:
    """Return the first bytes of an array or tensor that begin at a page."""
    address = buffer.ctypes.data if isinstance(buffer, np.ndarray) else buffer.data_ptr()
    start = -address % PAGE_BYTES
    return buffer[start : start + nbytes]


def kinds_of_memory(nbytes: int) -> Iterator[tuple[str, Callable[[], Any], bool]]:
    """Give names of memory that users have, how to get it, and whether a device may use it.

    What was touched is made once, for it is reused; what was not is made for each turn, and
    smaller, or it would be new to the host too, which takes its time at random.
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
    scattered = torch.empty(nbytes + PAGE_BYTES, dtype=torch.uint8)
    for page in np.random.default_rng(0).permutation(len(scattered) // PAGE_BYTES):
        scattered[page * PAGE_BYTES] = 1
    yield "torch, scattered pages", lambda: aligned(scattered, nbytes), True
    fresh = nbytes // FRESH_TURNS
    for library, make in makers.items():
        yield f"{library}, {FRESH}", lambda make=make: make(fresh), False
        yield (
            f"{library}, {FRESH}, at a page",
            lambda make=make: aligned(make(fresh + PAGE_BYTES), fresh),
            True,
        )


def route_duels(ground: Ground) -> Iterator[Duel]:
    """Pair the route that is chosen with each that can be."""
    chosen = nvmeio.aio_handle()
    others = {
        "direct": nvmeio.aio_handle(bounce="never"),
        "bounced": nvmeio.aio_handle(bounce="always"),
    }
    pool = ("pool", lambda: ground.pool, True)

    def turn(handle: nvmeio.aio_handle, op: str, memory: Callable[[], Any]) -> Move:
        return lambda: whole(handle, ground, op, memory())()

    for name, memory, suits in (pool, *kinds_of_memory(ground.pool.nbytes)):
        for op, (route, handle) in itertools.product(("read", "write"), others.items()):
            if route == "direct" and not suits:
                continue
            yield Duel(
                f"{op}, {name}",
                ("auto", route),
                (turn(chosen, op, memory), turn(handle, op, memory)),
                op == "read",
                alternations=FRESH_TURNS if FRESH in name else 1,
            )


def registered_duels(ground: Ground) -> Iterator[Duel]:
    """Pair blocks of the pool's memory, which the ring has registered, with others'.

    Both lie in huge pages, and are read again and again by blocks of one size.
    """
    nbytes = min(REGISTERED_BYTES, ground.pool.nbytes)
    ours = nvmeio.torch.empty(nbytes, dtype=torch.uint8).fill_(1)
    memory = mmap.mmap(-1, nbytes + HUGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    others = torch.frombuffer(memory, dtype=torch.uint8)
    start = -others.data_ptr() % HUGE_BYTES
    others = others[start : start + nbytes].fill_(1)
    for block_size in (4 << 10, 16 << 10, 64 << 10):
        handle = nvmeio.aio_handle(block_size)
        yield Duel(
            f"read, {block_size >> 10} KiB x 128",
            ("pool, registered", "other huge pages"),
            (
                whole(handle, ground, "read", ours, 4),
                whole(handle, ground, "read", others, 4),
            ),
            True,
        )


def small_duels(ground: Ground) -> Iterator[Duel]:
    """Pair 1000 requests of 64 KiB with one request of as many bytes."""
    handle = nvmeio.aio_handle(overlap_events=True)
    buffer = ground.pool[: min(SMALL_COUNT * SMALL_BYTES, ground.pool.nbytes)]
    for op in ("read", "write"):
        yield Duel(
            f"{op}, overlap_events=True",
            (f"{buffer.nbytes // SMALL_BYTES} x 64 KiB", "one request"),
            (pieces(handle, ground, op, buffer), whole(handle, ground, op, buffer)),
            op == "read",
            alternations=4,
        )


def latency_duel(ground: Ground) -> Duel:
    """Pair synchronous reads of 4 KiB with os.preadv into the same memory."""
    handle = nvmeio.aio_handle()
    buffer: np.ndarray = ground.pool[:LATENCY_BYTES].numpy()
    return Duel(
        "read, 4 KiB synchronous",
        ("handle.read", "os.preadv"),
        (
            scattered(lambda at: handle.read(buffer, ground.file, False, at), ground),
            scattered(lambda at: os.preadv(ground.descriptor, [buffer], at), ground),
        ),
        True,
        alternations=20,
    )


def grid() -> Iterator[dict[str, Any]]:
    """Give the configurations that the default one is compared with."""
    for values in itertools.product(*GRID.values()):
        yield dict(zip(GRID, values, strict=True))


def described(options: dict[str, Any]) -> str:
    """Write a configuration in few characters."""
    overlap = "overlapped" if options["overlap_events"] else "batched"
    return (
        f"{options['block_size'] >> 10} KiB x {options['queue_depth']}, {overlap}, "
        f"{options['intra_op_parallelism']} lanes"
    )


def default_duel(ground: Ground, op: str, options: dict[str, Any]) -> Duel:
    """Pair a default-constructed handle with a configured one."""
    return Duel(
        f"{op}, pool memory",
        ("default handle", described(options)),
        (
            whole(nvmeio.aio_handle(), ground, op, ground.pool),
            whole(nvmeio.aio_handle(**options), ground, op, ground.pool),
        ),
        op == "read",
    )


def finalists(ground: Ground, quick: bool) -> Iterator[Duel]:
    """Screen the grid, and give fresh duels with the configurations that looked best."""
    for op in ("read", "write"):
        found = []
        for options in itertools.islice(grid(), 0, None, 9 if quick else 1):
            progress(f"{op}, {described(options)}")
            duel = default_duel(ground, op, options)
            for _ in range(SCREENINGS):
                duel.fight()
            found.append((statistics.median(SPEED.values(duel)), options))
        found.sort(key=lambda ratio_and_options: ratio_and_options[0])
        for _, options in found[: 1 if quick else FINALISTS]:
            yield default_duel(ground, op, options)


def all_duels(ground: Ground, quick: bool, has_fio: bool) -> Iterator[Duel]:
    """Give every duel with its goals."""

    def aiming(duels: Iterable[Duel], *goals: Goal) -> Iterator[Duel]:
        return (dataclasses.replace(duel, goals=goals) for duel in duels)

    for duel in fio_duels(ground) if has_fio else ():
        speed = Goal("speed", 0.97 if duel.reads else 0.95)
        yield from aiming([duel], speed, Goal("CPU time", 1.3))
    yield from aiming(memory_duels(ground), Goal("speed", 0.8))
    yield from aiming(route_duels(ground), Goal("speed", 0.95))
    yield from aiming(registered_duels(ground), Goal("CPU time", 1.0))
    yield from aiming(small_duels(ground), Goal("speed", 0.85))
    yield from aiming(finalists(ground, quick), Goal("speed", 0.95))
    yield from aiming([latency_duel(ground)], Goal("time", 1.25))


def main() -> None:
    """Measure and report; what was measured never changes the exit status."""
    options = arguments(__doc__, ("1G", "64M"), (10, 3))
    peers = Peers()
    with ground(options.dir, options.size) as place:
        about = machine(options.dir) | {"huge pages for fio": place.has_huge_pages}
        about |= {"size": options.size, "rounds": options.rounds}
        duels = list(all_duels(place, options.quick, peers.has_fio()))
        fight(duels, options.rounds)
    finish("transfer", about, duels, peers.left_out, options.json)


if __name__ == "__main__":
    main()
