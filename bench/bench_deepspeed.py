"""Compare DeepSpeed's own async_io op with nvmeio.deepspeed, by the same calls.

Both run in one process and take turns there, on the same files and with the same
arguments.  Several such processes run one after the other, because the speed of pinned
memory depends on the pages that a process happens to get.  bench/README.md explains the
tables and their results.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import gc
import itertools
import mmap
import multiprocessing
import os
import resource
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import torch
from comparisons import Comparison, Goal, Sample, compare, measured, progress
from machine import arguments, machine
from peers import Peers, deepspeed_op
from report import finish

# nvmeio and DeepSpeed are imported late, because the time that takes is measured.

# Starts processes that have imported torch and nothing else. They are forked from one that
# has, because the import takes longer than most of what they measure.
FRESH = multiprocessing.get_context("forkserver")
FRESH.set_forkserver_preload(["torch"])

NAMES = ("nvmeio", "DeepSpeed")

# block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism.
CONFIGURATIONS = {
    "depth 32": (1 << 20, 32, False, True, 1),
    "depth 32, 2 threads": (1 << 20, 32, False, True, 2),
    "depth 8, DeepSpeed's default": (1 << 20, 8, False, True, 1),
}

SMALL_COUNT = 1000
SMALL_BYTES = 64 << 10
# Turns per round, because one is too short to measure.
SMALL_TURNS = 4

# The goals: everywhere, in ordinary memory, and with small tensors.
FLOOR, UNPINNED, SMALL = 1.0, 2.0, 3.0

# DeepSpeed's copy counts the first dimension in steps of 128 elements of 4 bytes. It copies
# too little or too much of other tensors.
ELEMENT = torch.int32


def op_of(name: str) -> Any:
    """Return the module that has the op's functions and classes."""
    if name == "DeepSpeed":
        return deepspeed_op()
    import nvmeio.deepspeed

    return nvmeio.deepspeed


def pinned(handle: Any, nbytes: int) -> torch.Tensor:
    """Return pinned memory from an op."""
    example = torch.empty(0, dtype=ELEMENT)
    return handle.new_cpu_locked_tensor(nbytes // ELEMENT.itemsize, example)


def ordinary(nbytes: int) -> torch.Tensor:
    """Return touched memory, allocated by torch."""
    return torch.ones(nbytes // ELEMENT.itemsize, dtype=ELEMENT)


def paths_in(folder: Path, count: int) -> list[str]:
    """Name one file per tensor, as DeepSpeed's swappers do."""
    return [str(folder / f"{index} of {count}.swp") for index in range(count)]


@dataclasses.dataclass
class Files:
    """Files of one size, and their content.

    Attributes
    ----------
    paths : list of str
        One for each tensor.
    content : torch.Tensor
        The bytes that were written last.
    pages : mmap.mmap
        Room to read them again.
    """

    paths: list[str]
    content: torch.Tensor
    pages: mmap.mmap

    @classmethod
    def made(cls, folder: Path, count: int, nbytes: int) -> Files:
        """Write files of random content, or overwrite those of the previous process."""
        content = ordinary(nbytes).random_()
        files = cls(paths_in(folder, count), content, populated(nbytes))
        transfer(op_of("nvmeio").aio_handle(), "write", files.content, files.paths)
        return files


def populated(nbytes: int) -> mmap.mmap:
    """Map huge pages and touch each of them."""
    pages = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    torch.frombuffer(pages, dtype=ELEMENT).zero_()
    return pages


def stored(paths: list[str], pages: mmap.mmap) -> torch.Tensor:
    """Return the files' content on the device, read without either candidate."""
    begin = 0
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            end = begin + os.fstat(descriptor).st_size
            while begin < end:
                begin += os.readv(descriptor, [memoryview(pages)[begin:end]])
        finally:
            os.close(descriptor)
    return torch.frombuffer(pages, dtype=ELEMENT)


def transfer(handle: Any, op: str, buffer: torch.Tensor, paths: list[str]) -> int:
    """Move a tensor for each file, all of them in flight, as DeepSpeed's swappers do."""
    submit = handle.async_pread if op == "read" else handle.async_pwrite
    for part, path in zip(buffer.chunk(len(paths)), paths, strict=True):
        if submit(part, path, 0) != 0:
            raise RuntimeError(f"{op} of {path} was refused")
    if handle.wait() != len(paths):
        raise RuntimeError(f"not every {op} is done")
    return buffer.nbytes


def turn(handle: Any, op: str, buffer: torch.Tensor, files: Files) -> Callable[[], Sample]:
    """Return a candidate's turn. Its bytes are checked while the clock is stopped."""

    def take() -> Sample:
        if op == "read":
            buffer.zero_()
        else:
            buffer.copy_(files.content.bitwise_not_())
        sample = measured(lambda: transfer(handle, op, buffer, files.paths))
        found = buffer if op == "read" else stored(files.paths, files.pages)
        if not torch.equal(found, files.content):
            raise RuntimeError(f"a {op} by {type(handle)} has lost or changed bytes")
        return sample

    return take


def copying(op: Any, dest: torch.Tensor, src: torch.Tensor) -> Callable[[], Sample]:
    """Return a turn of the op's copy, which is checked as well."""

    def work() -> int:
        if op.deepspeed_memcpy(dest, src) != 0:
            raise RuntimeError("a copy was refused")
        return dest.nbytes

    def take() -> Sample:
        dest.zero_()
        sample = measured(work)
        if not torch.equal(dest, src):
            raise RuntimeError(f"a copy by {op} has lost or changed bytes")
        return sample

    return take


def transfer_comparisons(ops: list[Any], folder: Path, size: int) -> Iterator[Comparison]:
    """Compare both ops at transfers."""
    large = Files.made(folder, 1, size)
    small = Files.made(folder, SMALL_COUNT, SMALL_COUNT * SMALL_BYTES)
    shared = ordinary(size)
    own = [pinned(op.aio_handle(), max(size, small.content.nbytes)) for op in ops]
    memory = {
        "large, pinned": ([m[: size // 4] for m in own], large, FLOOR),
        "large, unpinned": ([shared] * 2, large, UNPINNED),
        f"{SMALL_COUNT} x {SMALL_BYTES >> 10} KiB, pinned": (
            [m[: small.content.numel()] for m in own],
            small,
            SMALL,
        ),
    }
    for words, configuration in CONFIGURATIONS.items():
        handles = [op.aio_handle(*configuration) for op in ops]
        for (what, (buffers, files, limit)), way in itertools.product(
            memory.items(), ("read", "write")
        ):
            ours, theirs = (
                turn(handle, way, buffer, files)
                for handle, buffer in zip(handles, buffers, strict=True)
            )
            work = f"{way}, {what}; {words}"
            often = SMALL_TURNS if files is small else 1
            goals = (Goal("speed", limit),)
            yield Comparison(
                work, NAMES, (ours, theirs), way == "read", goals, alternations=often
            )


def copy_comparisons(ops: list[Any], size: int) -> Iterator[Comparison]:
    """Compare both ops at copies."""
    source, target = ordinary(size).random_(), ordinary(size)
    handles = [op.aio_handle() for op in ops]
    own = [(pinned(handle, size), pinned(handle, size)) for handle in handles]
    for _, src in own:
        src.copy_(source)
    for what, memory in (("pinned", own), ("unpinned", [(target, source)] * 2)):
        ours, theirs = (copying(op, *pair) for op, pair in zip(ops, memory, strict=True))
        goals = (Goal("speed", FLOOR),)
        yield Comparison(f"copy, {what}", NAMES, (ours, theirs), False, goals)


def compare_here(folder: Path, size: int, rounds: int) -> list[Comparison]:
    """Run all comparisons of one process. The first round warms up."""
    # DeepSpeed keeps every file open until its wait().
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    ops = [op_of(name) for name in NAMES]
    done: list[Comparison] = []
    for comparisons in (
        transfer_comparisons(ops, folder, size),
        copy_comparisons(ops, size),
    ):
        begun = list(comparisons)
        # With DeepSpeed imported, a full garbage collection takes as long as several turns
        # of small tensors, and would hit the same candidate in each round.
        gc.collect()
        gc.freeze()
        compare(begun, rounds)
        done += begun
    return done


def first_read(name: str, path: str, is_pinned: bool) -> Sample:
    """Make the first handle of a process and read a file. The op is already loaded."""
    op = op_of(name)
    nbytes = os.stat(path).st_size
    handles: list[Any] = []

    def begin() -> int:
        handles.append(op.aio_handle(*CONFIGURATIONS["depth 32"]))
        return 0

    begun = measured(begin)
    buffer = pinned(handles[0], nbytes) if is_pinned else ordinary(nbytes)
    sample = begun + measured(lambda: transfer(handles[0], "read", buffer, [path]))
    if not torch.equal(buffer, stored([path], populated(nbytes))):
        raise RuntimeError(f"the first read by {name} has lost or changed bytes")
    return sample


def first_tensor(name: str, nbytes: int, is_backed: bool) -> Sample:
    """Make the first pinned tensor of a process.

    A virtual machine may return free memory to its host, huge pages first, because they
    are returned whole.  The host then needs time to provide it again.  With `is_backed`,
    the machine has just got as much memory from its host, and freed it.
    """
    handle = op_of(name).aio_handle()
    if is_backed:
        populated(2 * nbytes).close()
    return measured(lambda: pinned(handle, nbytes).nbytes)


def load(name: str) -> Sample:
    """Load an op by DeepSpeed's builder. Ours must be imported and installed first."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    def work() -> int:
        if name == "nvmeio":
            from nvmeio.deepspeed import install

            install()
        AsyncIOBuilder().load(verbose=False)
        return 0

    return measured(work)


def first_comparisons(path: str, nbytes: int) -> Iterator[Comparison]:
    """Compare both ops at the steps that each process does once. Each turn is a process."""

    def comparison(
        work: str, limit: float, function: Callable[..., Sample], *rest: Any
    ) -> Comparison:
        turns = tuple(lambda n=name: in_process(function, n, *rest) for name in NAMES)
        reads = function is first_read
        return Comparison(work, NAMES, turns, reads, (Goal("speed", limit),))

    yield comparison("first read, pinned", FLOOR, first_read, path, True)
    yield comparison("first read, unpinned", UNPINNED, first_read, path, False)
    work = "first pinned tensor"
    yield comparison(f"{work}, backed by the host", FLOOR, first_tensor, nbytes, True)
    yield comparison(f"{work}, as memory comes", FLOOR, first_tensor, nbytes, False)
    yield comparison("load of the op", FLOOR, load)


def silence() -> None:
    """Discard what DeepSpeed's op prints. It writes to the descriptor, not sys.stdout."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def in_process(function: Callable[..., Any], *given: Any) -> Any:
    """Call a function in a fresh process, because DeepSpeed's op may end its process."""
    with concurrent.futures.ProcessPoolExecutor(1, FRESH, silence) as pool:
        return pool.submit(function, *given).result()


def obstacle() -> str | None:
    """Return why DeepSpeed's op cannot be used, or None. Compiles it if necessary."""
    try:
        op_of("DeepSpeed")
    except (ImportError, RuntimeError, AttributeError) as error:
        return str(error).splitlines()[0]
    return None


def comparisons(folder: Path, size: int, rounds: int, processes: int) -> list[Comparison]:
    """Run all comparisons in one process after the other.

    A process that DeepSpeed's op has ended does not count, and is reported.
    """
    found: dict[str, Comparison] = {}
    firsts = list(first_comparisons(paths_in(folder, 1)[0], size))
    for number in range(processes):
        progress(f"process {number + 1} of {processes}")
        try:
            for comparison in in_process(compare_here, folder, size, rounds):
                found.setdefault(
                    comparison.work,
                    dataclasses.replace(comparison, rounds=[], rounds_each=rounds),
                ).rounds.extend(comparison.rounds)
            for comparison in firsts:
                comparison.run_round()
        except BrokenProcessPool:
            print(f"process {number + 1} was ended by a signal", file=sys.stderr)
    return [*found.values(), *firsts]


def main() -> None:
    """Measure and report. The results never change the exit status."""
    options = arguments(__doc__, ("512M", "64M"), (3, 1), (5, 2))
    # For the children: if nvmeio replaced DeepSpeed's op, it would be compared with
    # itself.
    os.environ.pop("NVMEIO_DEEPSPEED", None)
    peers = Peers()
    print("compiling DeepSpeed's op, if necessary", file=sys.stderr, flush=True)
    if problem := in_process(obstacle):
        peers.leave_out("DeepSpeed", problem)
    about = machine(options.dir) | {"size": options.size, "rounds": options.rounds}
    about |= {"processes": options.processes}
    found = []
    if not problem:
        with tempfile.TemporaryDirectory(prefix="nvmeio-bench-", dir=options.dir) as inside:
            found = comparisons(
                Path(inside), options.size, options.rounds, options.processes
            )
    finish("deepspeed", about, found, peers.left_out, options.json)


if __name__ == "__main__":
    main()
