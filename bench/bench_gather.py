"""Compares gathers with fio, and with what people use for small records instead.

Records of one size are read from random places of one large file that no cache holds.  All
duels are gone through once a round; bench/README.md says how to read the tables.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import mmap
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from duels import Duel, Goal, Sample, device_bytes, measured, spread, table
from machine import arguments, huge_pages, machine, output

import nvmeio

try:
    import caio
except ImportError:
    caio = None

DEPTH = 128
ROW_BYTES = 4096
ROW_SIZES = (64, 512, 4096, 65536)
# Of a turn, so that fio's clock, which counts milliseconds, is exact to a percent.
ROWS = 20_000
# Of what reads one row after another: at 0.1 ms each.
SLOW_ROWS = 1_000
# The memory of the largest turn.
TURN_BYTES = 256 << 20
HUGE_PAGES_WANTED = 16
# A turn of fio's with memory of its own for each block in flight.
BATCH = ("--iodepth_batch_submit=32", "--iodepth_batch_complete_min=32",
         f"--iodepth_batch_complete_max={DEPTH}")  # fmt: skip
FIXED = (*BATCH, "--fixedbufs=1", "--registerfiles=1")
# The exponent of the skew: a few rows are wanted again and again.
ZIPF = 1.2


@dataclasses.dataclass(frozen=True)
class Ground:
    """A file of random bytes, and memory for what is read.

    Attributes
    ----------
    path : Path
        The file.
    size : int
        Its size in bytes.
    handle : nvmeio.aio_handle
        With the depth that fio is given.
    file : nvmeio.File
        The same file, open.
    memory : ndarray
        In the pool, touched.
    """

    path: Path
    size: int
    handle: nvmeio.aio_handle
    file: nvmeio.File
    memory: np.ndarray


@contextlib.contextmanager
def ground(folder: Path, size: int) -> Iterator[Ground]:
    """Make the file and the memory, and clear up."""
    with contextlib.ExitStack() as stack:
        inside = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="nvmeio-bench-", dir=folder)
        )
        path = Path(inside, "file")
        memory = nvmeio.empty(TURN_BYTES, np.uint8)
        memory[:] = np.frombuffer(np.random.default_rng(0).bytes(TURN_BYTES), np.uint8)
        handle = stack.enter_context(nvmeio.aio_handle(queue_depth=DEPTH))
        file = stack.enter_context(nvmeio.File(path, "w"))
        for offset in range(0, size, TURN_BYTES):
            handle.submit_write(memory[: size - offset], file, offset).wait()
        handle.fsync(file)
        yield Ground(path, size, handle, file, memory)


def unmount(folder: Path) -> None:
    """Unmount once the kernel has let go of the rings that were closed."""
    for _ in range(500):
        if subprocess.run(["umount", folder], stderr=subprocess.DEVNULL).returncode == 0:
            return
        time.sleep(0.01)
    output("umount", str(folder))


@contextlib.contextmanager
def loop_ground(size: int) -> Iterator[Ground]:
    """Make the same on a file system on a loop device over tmpfs."""
    with tempfile.TemporaryDirectory(prefix="nvmeio-bench-", dir="/dev/shm") as inside:
        image, mount = Path(inside, "image"), Path(inside, "mount")
        mount.mkdir()
        with open(image, "wb") as file:
            file.truncate(size + (256 << 20))
        device = output("losetup", "--find", "--show", "--direct-io=on", image).strip()
        try:
            output("mkfs.ext4", "-q", "-m", "0", device)
            output("mount", device, mount)
            try:
                with ground(mount, size) as place:
                    yield place
            finally:
                unmount(mount)
        finally:
            output("losetup", "--detach", device)


def drop_cache(path: Path) -> None:
    """Have the kernel forget what it holds of a file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def fio(ground: Ground, rows: int, row_bytes: int, options: tuple[str, ...]) -> Sample:
    """Let fio read as many blocks from random places.

    Time and CPU time are those that fio gives for its job, without its start.
    """
    command = [
        "fio",
        "--name=bench",
        f"--filename={ground.path}",
        f"--size={ground.size}",
        "--rw=randread",
        "--norandommap",
        f"--bs={row_bytes}",
        f"--number_ios={rows}",
        f"--iodepth={DEPTH}",
        "--ioengine=io_uring",
        "--direct=1",
        "--allow_file_create=0",
        "--output-format=json",
        *options,
    ]
    device = device_bytes()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    job = json.loads(done.stdout)["jobs"][0]
    seconds = job["read"]["runtime"] / 1000
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    return Sample(job["read"]["io_bytes"], seconds, cpu, device_bytes() - device)


Choose = Callable[[np.random.Generator, int, int], np.ndarray]

# How rows are chosen: a function of a generator, how many, and how many there are.
ORDERS: dict[str, Choose] = {
    "random": lambda rng, count, rows: rng.integers(0, rows, count),
    "sorted": lambda rng, count, rows: np.sort(rng.integers(0, rows, count)),
    "Zipf": lambda rng, count, rows: rng.zipf(ZIPF, count) % rows,
    # One part of the file in 32, as a shard of it is read.
    "near": lambda rng, count, rows: rng.integers(0, rows // 32, count),
}


def gather(
    ground: Ground, rows: int, row_bytes: int, order: str = "random", **options: int
) -> Callable[[], Sample]:
    """Return a turn of one gather."""
    rng = np.random.default_rng()
    out = ground.memory[: rows * row_bytes]

    def turn() -> Sample:
        offsets = ORDERS[order](rng, rows, ground.size // row_bytes) * row_bytes
        drop_cache(ground.path)
        return measured(
            lambda: ground.handle.gather(ground.file, offsets, row_bytes, out, **options)
        )

    return turn


def peer(
    ground: Ground, read: Callable[[np.ndarray], int], rows: int, row_bytes: int
) -> Callable[[], Sample]:
    """Return a turn of something else that is given the numbers of rows."""
    rng = np.random.default_rng()

    def turn() -> Sample:
        chosen = rng.integers(0, ground.size // row_bytes, rows)
        drop_cache(ground.path)
        return measured(lambda: read(chosen))

    return turn


def memmap(ground: Ground, advice: int) -> Callable[[np.ndarray], int]:
    """Rows by numpy.memmap."""

    def read(rows: np.ndarray) -> int:
        whole = np.memmap(ground.path, np.uint8, "r")
        whole._mmap.madvise(advice)
        return int(whole.reshape(-1, ROW_BYTES)[rows].nbytes)

    return read


def preadv(ground: Ground) -> Callable[[np.ndarray], int]:
    """Rows by os.preadv with O_DIRECT."""
    views = [
        ground.memory[i * ROW_BYTES : (i + 1) * ROW_BYTES].data for i in range(SLOW_ROWS)
    ]

    def read(rows: np.ndarray) -> int:
        descriptor = os.open(ground.path, os.O_RDONLY | os.O_DIRECT)
        try:
            return sum(
                os.preadv(descriptor, [view], row * ROW_BYTES)
                for view, row in zip(views, rows.tolist(), strict=True)
            )
        finally:
            os.close(descriptor)

    return read


def by_caio(ground: Ground) -> Callable[[np.ndarray], int]:
    """Rows by caio, one coroutine each."""

    async def read_all(rows: list[int]) -> int:
        descriptor = os.open(ground.path, os.O_RDONLY)
        try:
            async with caio.AsyncioContext(max_requests=DEPTH) as context:
                found = await asyncio.gather(
                    *(context.read(ROW_BYTES, descriptor, row * ROW_BYTES) for row in rows)
                )
        finally:
            os.close(descriptor)
        return sum(map(len, found))

    return lambda rows: asyncio.run(read_all(rows.tolist()))


@dataclasses.dataclass(frozen=True)
class Match:
    """A duel with its goals and what a row is.

    Attributes
    ----------
    duel : Duel
        A gather first.
    row_bytes : int
        The size of a row.
    goals : tuple of Goal
        What the ratios have to be.
    cpu_goal : float or None
        How many microseconds of CPU time a row of the gather may take.
    """

    duel: Duel
    row_bytes: int
    goals: tuple[Goal, ...] = ()
    cpu_goal: float | None = None

    def cpu_us(self, index: int) -> list[float]:
        """Return the CPU time that a contestant took for a row in each round."""
        samples = [pair[index] for pair in self.duel.rounds]
        return [s.cpu_seconds / s.nbytes * self.row_bytes * 1e6 for s in samples]


def fio_matches(
    ground: Ground,
    place: str,
    has_huge_pages: bool,
    goal: float,
    cpu_goal: float | None = None,
) -> Iterator[Match]:
    """Pair gathers of 4 KiB with fio."""
    memory = ("--iomem=mmaphuge", "--hugepage-size=2m") if has_huge_pages else ()
    for name, options in {"batch": BATCH, "batch, fixed": FIXED}.items():
        turns = (
            gather(ground, ROWS, ROW_BYTES, max_gap=0),
            lambda options=options: fio(ground, ROWS, ROW_BYTES, (*options, *memory)),
        )
        yield Match(
            Duel(f"4 KiB x {DEPTH}, {place}", ("gather", f"fio, {name}"), turns, False),
            ROW_BYTES,
            (Goal("speed", goal),),
            cpu_goal,
        )


def peer_matches(ground: Ground) -> Iterator[Match]:
    """Pair gathers of 4 KiB with what reads them in Python."""
    peers = {
        "numpy.memmap": memmap(ground, mmap.MADV_NORMAL),
        "numpy.memmap, MADV_RANDOM": memmap(ground, mmap.MADV_RANDOM),
        "os.preadv": preadv(ground),
    }
    if caio is not None:
        peers["caio"] = by_caio(ground)
    for name, read in peers.items():
        turns = (
            gather(ground, SLOW_ROWS, ROW_BYTES),
            peer(ground, read, SLOW_ROWS, ROW_BYTES),
        )
        yield Match(
            Duel(f"{SLOW_ROWS} rows of 4 KiB", ("gather", name), turns, False), ROW_BYTES
        )


def merge_matches(ground: Ground) -> Iterator[Match]:
    """Pair gathers that merge with such that do not."""
    for row_bytes, order in itertools.product(ROW_SIZES, ORDERS):
        rows = min(ROWS, TURN_BYTES // row_bytes // 4)
        turns = (
            gather(ground, rows, row_bytes, order),
            gather(ground, rows, row_bytes, order, max_gap=0),
        )
        yield Match(
            Duel(
                f"{order} rows of {row_bytes} B",
                ("max_gap=4096", "max_gap=0"),
                turns,
                False,
            ),
            row_bytes,
        )


def figures(match: Match) -> Iterator[tuple[str, ...]]:
    """Give a row of absolute figures for each contestant."""
    for index, name in enumerate(match.duel.names):
        samples = [pair[index] for pair in match.duel.rounds]
        rows = [s.nbytes / match.row_bytes for s in samples]
        yield (
            match.duel.work,
            name,
            spread((n / s.seconds / 1e3 for n, s in zip(rows, samples, strict=True)), 1),
            spread(match.cpu_us(index), 2),
            spread((s.device_bytes / s.nbytes for s in samples), 2),
        )


def verdicts(match: Match) -> Iterator[tuple[str, ...]]:
    """Give a row for the speed of a duel beside its goals, if it has any."""
    for goal in match.goals or (Goal("speed", 1.0),):
        yield (
            match.duel.work,
            " / ".join(match.duel.names),
            str(goal) if match.goals else "speed",
            spread(goal.ratios(match.duel), 2),
            goal.verdict(match.duel) if match.goals else "",
        )
    if match.cpu_goal is not None:
        taken = match.cpu_us(0)
        yield (
            match.duel.work,
            f"{match.duel.names[0]}, beside {match.duel.names[1]}",
            f"CPU us/row <= {match.cpu_goal}",
            spread(taken, 2),
            "reached" if statistics.median(taken) <= match.cpu_goal else "missed",
        )


def report(matches: list[Match], about: dict[str, object]) -> None:
    """Print what was measured."""
    print("\n" + "\n".join(f"{key}: {value}" for key, value in about.items()))
    print("\nmedian [minimum-maximum] of the rounds; delivered: device bytes / row bytes\n")
    head = ("work", "contestant", "1000 rows/s", "CPU us/row", "delivered")
    print(table(head, itertools.chain.from_iterable(map(figures, matches))))
    head = ("work", "ratio of", "goal", "measured", "")
    print("\n" + table(head, itertools.chain.from_iterable(map(verdicts, matches))))


def main() -> None:
    """Measure and report; what was measured never changes the exit status."""
    # So that nothing is left behind: no file, no device, no huge pages.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    options = arguments(__doc__, ("4G", "256M"), (10, 2))
    if shutil.which("fio") is None:
        sys.exit("bench_gather: fio is missing; on Debian and Ubuntu: apt-get install fio")
    with contextlib.ExitStack() as stack:
        has_huge_pages = stack.enter_context(huge_pages(HUGE_PAGES_WANTED))
        disk = stack.enter_context(ground(options.dir, options.size))
        matches = [
            *fio_matches(disk, "disk", has_huge_pages, 0.95, 2.5),
            *peer_matches(disk),
            *merge_matches(disk),
        ]
        if os.geteuid() == 0:
            loop = stack.enter_context(loop_ground(min(options.size, 1 << 30)))
            matches += fio_matches(loop, "loop over tmpfs", has_huge_pages, 0.85)
        about = machine(options.dir) | {"huge pages for fio": has_huge_pages}
        about |= {"size": options.size, "rounds": options.rounds}
        # The first round warms up.
        for number in range(options.rounds + 1):
            print(f"\rround {number} of {options.rounds}", end="\r", file=sys.stderr)
            for match in matches:
                match.duel.fight()
        for match in matches:
            del match.duel.rounds[0]
    report(matches, about)
    if options.json:
        raw = {"machine": about, "duels": [match.duel.as_dict() for match in matches]}
        options.json.write_text(json.dumps(raw) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
