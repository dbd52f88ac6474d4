"""``nvmeio bench``: measure a drive and memory copies, and compare with fio."""

import argparse
import dataclasses
import datetime as dt
import functools
import itertools
import math
import statistics
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

from nvmeio._arguments.units import in_binary
from nvmeio._cli import plots
from nvmeio._cli.arguments import (
    Parser,
    UsageError,
    add_transfer_options,
    number,
    option,
    size,
)
from nvmeio._cli.fio import Fio, fio_version
from nvmeio._cli.measuring import (
    add_figure_options,
    check_plotting,
    keep_figures,
    scratch_folder,
)
from nvmeio._cli.samples import PERCENTILES, Contest
from nvmeio._cli.system import Storage, System, storage_of
from nvmeio._cli.terminal import Terminal, in_time, spread
from nvmeio._cli.workloads import MEMORY, RANDOM_SECONDS, Settings, Workbench
from nvmeio._config.constants import LIMITS

WORKS = ("write", "read", "random", "small", "copy")
SMALL_COUNT_MAX = 1000
COPY_BYTES_MAX = 256 << 20
MIB = 1 << 20

DETAILS = """\
Measures sequential writes to a new file with fsync, sequential overwrites,
sequential reads, random reads, many small tensors in a file each, and a copy
from memory to memory.  fio, if it is installed, reads and writes the same file
with the same block size and queue depth, in touched huge pages.  With the
engines threads and sync, fio uses psync with one block in flight.

All files are in a folder nvmeio-bench-* in DIR, which is removed at the end,
also after Ctrl-C; after SIGKILL you can delete it.  The contenders take turns.
Reads find nothing in the page cache.

GB/s       10^9 bytes per second: median of the rounds [slowest-fastest]
IOPS       I/Os per second, as the kernel sees them
CPU s/GiB  CPU time of all threads, user and system, per GiB
speedup    of nvmeio over the contender below: the median of the rounds'
           ratios, which can differ from the ratio of the medians
p50, ...   latency of single I/Os from submission to completion; with a deep
           queue most of it is time in the queue

examples:
  nvmeio bench /mnt/nvme
  nvmeio bench /mnt/nvme --size 4G --block-size 512K --queue-depth 32
  nvmeio bench . --memory torch --only read,write --plot figures.png
"""


def configure(parser: Parser) -> None:
    parser.epilog = DETAILS
    about = "a folder on the drive (default: the current folder)"
    parser.add_argument("dir", nargs="?", default=".", metavar="DIR", help=about)
    about = "of the file (default: 1G); the disk needs twice as much"
    option(parser, "--size SIZE", about, size, 1 << 30)
    add_transfer_options(parser, block_size=MIB, queue_depth=128)
    about = "of a random read (default: 4K)"
    option(parser, "--random-block-size SIZE", about, size, 4096)
    about = "threads that each have a queue (default: 1)"
    option(parser, "--workers N", about, number(1, LIMITS["workers"]), 1)
    parser.add_argument(
        "--memory",
        choices=MEMORY,
        default="pool",
        help="what is read into: nvmeio's pool in huge pages (default), arrays of numpy, "
        "tensors of torch, or arrays that were never touched (fresh)",
    )
    about = f"some of {', '.join(WORKS)} (default: all)"
    option(parser, "--only WORK,...", about, _works, WORKS)
    about = "rounds; each contender runs once per round (default: 3)"
    option(parser, "--rounds N", about, number(1, 1000), 3)
    option(parser, "--no-fio", "do not run fio")
    add_figure_options(parser, "every round", "a chart")


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    settings = _settings(options)
    check_plotting(options)
    storage = storage_of(options.dir)
    fio = "" if options.no_fio else fio_version()
    needed = settings.disk_bytes + settings.size * ("write" in options.only)
    with (
        scratch_folder(options.dir, needed, options.reserve) as folder,
        Workbench(folder, settings) as bench,
    ):
        bench.prepare(terminal.progress("preparing", 2 * settings.disk_bytes))
        contests = list(_contests(bench, settings, options.only, bool(fio)))
        for _, contest in itertools.product(range(options.rounds), contests):
            contest.add_round(terminal)
    about = _about(bench, settings, storage, fio)
    found = {
        "schema": 1,
        "nvmeio": version("nvmeio"),
        "fio": fio or None,
        "date": dt.datetime.now().astimezone().isoformat(timespec="seconds"),
        "settings": {**vars(settings), "engine": bench.engine, "direct": bench.direct},
        "system": dataclasses.asdict(System()),
        "storage": dataclasses.asdict(storage),
        "results": [contest.as_dict() for contest in contests],
    }
    if options.json != "-":
        terminal.say(f"{about}\n")
        _show_throughput(contests, terminal)
        _show_latencies(contests, settings.depth, terminal)
    keep_figures(found, lambda: plots.bars(contests, about), options, terminal)
    if not fio and not options.no_fio:
        terminal.note("fio is not installed; if it were, its figures would be shown too")
    return 0


def _works(text: str) -> tuple[str, ...]:
    words = tuple(text.split(","))
    unknown = [word for word in words if word not in WORKS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"{unknown[0]!r} must be one of {', '.join(WORKS)}, separated by commas"
        )
    return words


def _settings(options: argparse.Namespace) -> Settings:
    """Check that the sizes fit together, and round them."""
    block, most = options.block_size, options.size
    for flag in ("block_size", "random_block_size"):
        if 2 * getattr(options, flag) > most:
            raise UsageError(
                f"--size {in_binary(most)} must have room for two blocks of "
                f"--{flag.replace('_', '-')} {in_binary(getattr(options, flag))}"
            )
    # fio skips a last partial block.
    most -= most % block
    small = min(64 << 10, most // 16) if "small" in options.only else 0
    return Settings(
        size=most,
        block_bytes=block,
        random_bytes=options.random_block_size,
        small_bytes=small,
        small_count=min(SMALL_COUNT_MAX, most // 2 // small) if small else 0,
        copy_bytes=min(most, COPY_BYTES_MAX),
        queue_depth=options.queue_depth,
        workers=options.workers,
        engine=options.engine,
        direct=options.direct,
        memory=options.memory,
    )


def _contests(
    bench: Workbench, settings: Settings, works: tuple[str, ...], fio: bool
) -> Iterator[Contest]:
    """Return each requested work with its contenders."""
    size, block, random = settings.size, settings.block_bytes, settings.random_bytes
    other = Fio(bench.path, size, bench.engine, bench.direct, settings.depth)

    def beside(rw: str, nbytes: int, **more: Any) -> dict[str, Any]:
        turn = functools.partial(other.run, rw, nbytes, **more)
        return {other.name: turn} if fio else {}

    random_name = f"random read, {in_binary(random)}"
    random_bytes = settings.random_reads * random
    capped = {"io_size": random_bytes, "runtime": f"{RANDOM_SECONDS:g}"}
    by_numpy = {"numpy": bench.copy_by_numpy}
    by_fio = beside("randread", random, **capped)
    small_bytes = settings.small_count * settings.small_bytes
    small = f"{settings.small_count} tensors of {in_binary(settings.small_bytes)}"
    # One of WORKS, its name, the bytes of a turn, nvmeio's turn, and those of others.
    parts: list[tuple[str, str, int, Any, dict[str, Any]]] = [
        ("write", "write, new file, synced", size, bench.write_new, {}),
        ("write", "write", size, bench.overwrite, beside("write", block)),
        ("read", "read", size, bench.read, beside("read", block)),
        ("random", random_name, random_bytes, bench.read_random, by_fio),
        ("small", f"write, {small}", small_bytes, bench.write_small, {}),
        ("small", f"read, {small}", small_bytes, bench.read_small, {}),
        ("copy", "copy in memory", settings.copy_bytes, bench.copy, by_numpy),
    ]
    for wanted in works:
        for work, name, nbytes, ours, others in parts:
            if work == wanted:
                yield Contest(name, nbytes, {"nvmeio": ours, **others})


def _about(bench: Workbench, settings: Settings, storage: Storage, fio: str) -> str:
    """Return one line that says what was measured."""
    on = f" on {storage.device}" if storage.device else ""
    way = "O_DIRECT" if bench.direct else "buffered"
    if storage.in_memory:
        # O_DIRECT or not makes no difference there.
        way = "in memory, without a device"
    words = [
        f"{in_binary(settings.size)} on {storage.file_system}{on}",
        f"{bench.engine}, {way}",
        f"{in_binary(settings.block_bytes)} x {settings.queue_depth}",
        f"{settings.memory} memory",
        fio,
    ]
    if settings.workers > 1:
        words.insert(3, f"{settings.workers} workers")
    return "; ".join(filter(None, words))


def _show_throughput(contests: list[Contest], terminal: Terminal) -> None:
    several = len(next(iter(contests[0].samples.values()))) > 1
    head = ["work", "by", "GB/s" + (" [min-max]" if several else ""), "IOPS"]
    head += ["CPU s/GiB", "speedup"]
    rows = []
    for contest in contests:
        # nvmeio comes first; there is at most one other contender.
        ours, *others = contest.samples
        for name in contest.samples:
            iops = contest.figures(name, "iops")
            cpu = statistics.median(contest.figures(name, "cpu_s_per_gib"))
            row = [contest.work, name] if name == ours else ["", name]
            row.append(spread(contest.figures(name, "gb_per_s"), 2))
            row.append(f"{statistics.median(iops):,.0f}" if any(iops) else "-")
            row.append("-" if math.isnan(cpu) else f"{cpu:.3f}")
            ratios = contest.ratios(others[0]) if others and name == ours else []
            row.append(f"{statistics.median(ratios):.2f}" if ratios else "")
            rows.append(row)
    terminal.table(head, rows)


def _show_latencies(contests: list[Contest], depth: int, terminal: Terminal) -> None:
    rows, few = [], []
    for contest in contests:
        for index, name in enumerate(contest.samples):
            found = [contest.latency_us(name, percentile) for percentile in PERCENTILES]
            known = [in_time(latency) for latency in found if latency is not None]
            if known:
                rows.append(["" if index else contest.work, name, *known])
        if 0 < max(sample.operations for sample in contest.samples["nvmeio"]) <= depth:
            few.append(contest.work)
    if rows:
        percentiles = [f"p{percentile:g}" for percentile in PERCENTILES]
        terminal.table(["latency of an I/O", "by", *percentiles], rows)
    if few:
        terminal.say(
            f"Percentiles are alike if the queue of {depth} holds all I/Os at once:\n"
            f"{'; '.join(few)}.\n"
            "A larger --size or a smaller --queue-depth shows more.\n"
        )
