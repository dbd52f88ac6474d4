"""``nvmeio bench``: how fast a disk and its memory are, beside fio."""

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

from nvmeio.arguments import LIMITS
from nvmeio.cli import plots, report, transfer_options
from nvmeio.cli.arguments import Parser, UsageError, number, size
from nvmeio.cli.diagnosis.storage import Storage, storage_of
from nvmeio.cli.diagnosis.system import system
from nvmeio.cli.measuring import ground
from nvmeio.cli.measuring.buffers import KINDS
from nvmeio.cli.measuring.fio import Fio, fio_version
from nvmeio.cli.measuring.samples import PERCENTILES, Contest
from nvmeio.cli.measuring.workloads import RANDOM_SECONDS, Settings, Workbench
from nvmeio.cli.terminal import Terminal
from nvmeio.cli.units import in_binary, in_time, spread

__all__ = ["configure", "run"]

WORKS = ("write", "read", "random", "small", "copy")
PERCENTILE_HEADS = [f"p{percentile:g}" for percentile in PERCENTILES]
SMALL_COUNT_MAX = 1000
COPY_BYTES_MAX = 256 << 20
MIB = 1 << 20

DETAILS = """\
The work: sequential writes to a new file with fsync, sequential overwrites,
sequential reads, random reads, many small tensors in a file each, and a copy
from memory to memory.  fio, if it is installed, reads and writes the same file
with the same block size and queue depth, in huge pages that it has touched;
beside the engines threads and sync it is psync, with one block in flight.

Everything is written to a folder nvmeio-bench-* in DIR that is removed at the
end, also after Ctrl-C; what SIGKILL leaves can be deleted.  The contestants
take turns.  Reads find nothing in the page cache.

GB/s       10^9 bytes a second: median of the rounds [slowest-fastest]
IOPS       I/Os a second, as the kernel sees them
CPU s/GiB  CPU time of all threads, user and system, for each GiB
speedup    of nvmeio over the contestant below: the median of the rounds'
           ratios, which is not the ratio of the medians
p50, ...   latency of single I/Os from submission to completion: with a deep
           queue most of it is waiting in the queue

examples:
  nvmeio bench /mnt/nvme
  nvmeio bench /mnt/nvme --size 4G --block-size 512K --queue-depth 32
  nvmeio bench . --memory torch --only read,write --plot figures.png
"""


def configure(parser: Parser) -> None:
    """Add the arguments.

    Parameters
    ----------
    parser : Parser
        Of the command.
    """
    parser.epilog = DETAILS
    add = parser.add_argument
    add(
        "dir",
        nargs="?",
        default=".",
        metavar="DIR",
        help="a folder on the drive (default: the current folder)",
    )
    add(
        "--size",
        type=size,
        default=1 << 30,
        help="of the file (default: 1G); the disk needs twice as much",
    )
    transfer_options.add_options(parser, block_size=MIB, queue_depth=128)
    add(
        "--random-block-size",
        type=size,
        default=4096,
        metavar="SIZE",
        help="of a random read (default: 4K)",
    )
    add(
        "--workers",
        type=number(1, LIMITS["intra_op_parallelism"]),
        default=1,
        metavar="N",
        help="threads that each have a queue (default: 1)",
    )
    add(
        "--memory",
        choices=KINDS,
        default="pool",
        help="what is read into: nvmeio's pool in huge pages (default), arrays of numpy, "
        "tensors of torch, or arrays that were never touched (fresh)",
    )
    add(
        "--only",
        type=_works,
        default=WORKS,
        metavar="WORK,...",
        help=f"some of {', '.join(WORKS)} (default: all)",
    )
    add(
        "--rounds",
        type=number(1, 1000),
        default=3,
        metavar="N",
        help="how often each contestant has its turn (default: 3)",
    )
    add("--no-fio", action="store_true", help="leave fio out")
    ground.add_option(parser)
    report.add_options(parser, "every round", "a chart")


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    """Measure, and show what came out.

    Parameters
    ----------
    options : argparse.Namespace
        What configure() asked for.
    terminal : Terminal
        Where the answer goes.

    Returns
    -------
    int
        0.
    """
    settings = _settings(options)
    if options.plot:
        plots.require()
    storage = storage_of(options.dir)
    fio = "" if options.no_fio else fio_version()
    needed = settings.disk_bytes + settings.size * ("write" in options.only)
    with (
        ground.folder_of_its_own(options.dir, needed, options.reserve) as folder,
        Workbench(folder, settings) as bench,
    ):
        with terminal.progress("preparing", 2 * settings.disk_bytes) as advance:
            bench.prepare(advance)
        contests = list(_contests(bench, settings, options.only, bool(fio)))
        for _, contest in itertools.product(range(options.rounds), contests):
            contest.fight(terminal)
        about = _about(bench, settings, storage, fio)
    found = {
        "schema": 1,
        "nvmeio": version("nvmeio"),
        "fio": fio or None,
        "date": dt.datetime.now().astimezone().isoformat(timespec="seconds"),
        "settings": {**vars(settings), "engine": bench.engine, "direct": bench.direct},
        "system": dataclasses.asdict(system()),
        "storage": dataclasses.asdict(storage),
        "results": [contest.as_dict() for contest in contests],
    }
    if options.json != "-":
        terminal.say(about)
        terminal.say()
        terminal.table("", *_throughput(contests))
        if latencies := _latencies(contests):
            terminal.table("", ["latency of an I/O", "by", *PERCENTILE_HEADS], latencies)
    report.keep(found, options.json)
    if options.plot:
        plots.bars(contests, about, options.plot)
        terminal.note(f"drawn: {options.plot}")
    if not fio and not options.no_fio:
        terminal.note("fio is not installed; if it were, its figures would be shown too")
    return 0


def _works(text: str) -> tuple[str, ...]:
    words = tuple(text.split(","))
    unknown = [word for word in words if word not in WORKS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"{unknown[0]!r} must be of {', '.join(WORKS)}, with commas between"
        )
    return words


def _settings(options: argparse.Namespace) -> Settings:
    """Fit the sizes to each other."""
    block, most = options.block_size, options.size
    for flag in ("block_size", "random_block_size"):
        if 2 * getattr(options, flag) > most:
            raise UsageError(
                f"--size {in_binary(most)} must have room for two blocks of "
                f"--{flag.replace('_', '-')} {in_binary(getattr(options, flag))}"
            )
    # fio leaves out what is no whole block.
    most -= most % block
    small = min(64 << 10, most // 16)
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
    """Pair each work that is wanted with those who do it."""
    random_bytes = settings.random_reads * settings.random_bytes
    beside: dict[str, Any] = {"write": {}, "read": {}, "randread": {}}
    if fio:
        other = Fio(
            bench.path,
            settings.size,
            bench.engine,
            bench.direct,
            settings.queue_depth * settings.workers,
        )
        block, random = settings.block_bytes, settings.random_bytes
        capped: dict[str, Any] = {
            "io_size": random_bytes,
            "runtime": f"{RANDOM_SECONDS:g}",
        }
        beside = {
            "write": {other.name: functools.partial(other.run, "write", block)},
            "read": {other.name: functools.partial(other.run, "read", block)},
            "randread": {
                other.name: functools.partial(other.run, "randread", random, **capped)
            },
        }
    small_bytes = settings.small_count * settings.small_bytes
    small = f"{settings.small_count} tensors of {in_binary(settings.small_bytes)}"
    names = {
        "write": [
            ("write, new file, synced", settings.size, {"nvmeio": bench.write_new}),
            ("write", settings.size, {"nvmeio": bench.overwrite, **beside["write"]}),
        ],
        "read": [("read", settings.size, {"nvmeio": bench.read, **beside["read"]})],
        "random": [
            (
                f"random read, {in_binary(settings.random_bytes)}",
                random_bytes,
                {"nvmeio": bench.read_random, **beside["randread"]},
            )
        ],
        "small": [
            (f"write, {small}", small_bytes, {"nvmeio": bench.write_small}),
            (f"read, {small}", small_bytes, {"nvmeio": bench.read_small}),
        ],
        "copy": [
            (
                "copy in memory",
                settings.copy_bytes,
                {"nvmeio": bench.copy, "numpy": bench.copy_by_numpy},
            )
        ],
    }
    for work in works:
        for name, nbytes, turns in names[work]:
            yield Contest(name, nbytes, turns)


def _about(bench: Workbench, settings: Settings, storage: Storage, fio: str) -> str:
    """Say in a line what was measured."""
    on = f" on {storage.device}" if storage.device else ""
    way = "O_DIRECT" if bench.direct else "buffered"
    if storage.in_memory:
        # Whatever it was opened with.
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


def _throughput(contests: list[Contest]) -> tuple[list[str], list[list[str]]]:
    """Return head and rows: one for each work and contestant."""
    several = len(next(iter(contests[0].samples.values()))) > 1
    head = ["work", "by", "GB/s" + (" [min-max]" if several else ""), "IOPS"]
    head += ["CPU s/GiB", "speedup"]
    rows = []
    for contest in contests:
        # At most one other stands beside nvmeio, which comes first.
        ours, *others = contest.samples
        speedups = [spread(contest.ratios(name), 2).split()[0] for name in others]
        for name in contest.samples:
            iops = contest.figures(name, "iops")
            row = [contest.work if name == ours else "", name]
            row.append(spread(contest.figures(name, "gb_per_s"), 2))
            row.append(f"{statistics.median(iops):,.0f}" if any(iops) else "-")
            cpu = statistics.median(contest.figures(name, "cpu_s_per_gib"))
            row.append("-" if math.isnan(cpu) else f"{cpu:.3f}")
            row.append(speedups[0] if speedups and name == ours else "")
            rows.append(row)
    return head, rows


def _latencies(contests: list[Contest]) -> list[list[str]]:
    """Return rows of percentiles, for each work with I/O and each contestant."""
    rows = []
    for contest in contests:
        for index, name in enumerate(contest.samples):
            found = [contest.latency_us(name, percentile) for percentile in PERCENTILES]
            known = [in_time(latency) for latency in found if latency is not None]
            if known:
                rows.append(["" if index else contest.work, name, *known])
    return rows
