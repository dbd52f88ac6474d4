"""The works of ``nvmeio bench``, as nvmeio does them, and the memory that they use."""

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from nvmeio._cli.arguments import CommandError
from nvmeio._cli.measuring import forget_cached
from nvmeio._cli.samples import PERCENTILES, Sample
from nvmeio._cli.terminal import Advance
from nvmeio._native.copy import memcpy
from nvmeio._native.file import File
from nvmeio._native.handle import Handle
from nvmeio.memory import empty

# The memory to read into: nvmeio's pool; memory of numpy or torch, with every page touched;
# or memory of numpy that was never touched.
MEMORY = ("pool", "numpy", "torch", "fresh")

# From this size on, glibc returns memory that was never used before (mallopt(3),
# M_MMAP_THRESHOLD); for less it may reuse freed memory.
FRESH_BYTES_MIN = 64 << 20

# The limits of a turn of random reads: their number, and the time.
RANDOM_READS = 1 << 16
RANDOM_SECONDS = 2.0
# Random reads in one call: large, because the queue drains at the end of each call.
RANDOM_BATCH = 1 << 14

# The size of a request, small enough to show progress.  The blocks of all requests share
# one queue.
REQUEST_BYTES = 8 << 20
# The size of the memory that is transferred repeatedly; or twice the queue, if larger.
WINDOW_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a measurement; the names are also the keys of the JSON."""

    size: int  # of the file
    block_bytes: int
    random_bytes: int  # of a random read
    small_bytes: int  # of one of the small tensors
    small_count: int
    copy_bytes: int  # of a copy in memory
    # As for Handle.
    queue_depth: int
    workers: int
    engine: Any
    direct: Any
    memory: str  # one of MEMORY

    @property
    def disk_bytes(self) -> int:
        """The space that all files need on the drive."""
        return self.size + self.small_bytes * self.small_count

    @property
    def depth(self) -> int:
        return self.queue_depth * self.workers

    @property
    def random_reads(self) -> int:
        """The most random reads of a turn: half of the file's blocks."""
        return min(RANDOM_READS, self.size // (2 * self.random_bytes))

    @property
    def window_bytes(self) -> int:
        """The size of the memory that transfers use in turn."""
        return min(self.size, max(WINDOW_BYTES, 2 * self.depth * self.block_bytes))

    @property
    def request_bytes(self) -> int:
        """The size of a request, a multiple of the block size."""
        return max(1, REQUEST_BYTES // self.block_bytes) * self.block_bytes


class Workbench(contextlib.ExitStack):
    """A file, small files and memory to work with; the caller removes their directory."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        super().__init__()
        if settings.memory == "torch" and find_spec("torch") is None:
            raise CommandError("--memory torch needs torch, which is not installed")
        self.settings = settings
        self.path = folder / "file"
        self._small = [folder / f"small-{i}" for i in range(settings.small_count)]
        self._window = self._allocated(settings.window_bytes)
        self._random = np.random.default_rng()
        self._handle: Handle = self.enter_context(
            Handle(
                engine=settings.engine,
                direct=settings.direct,
                block_size=settings.block_bytes,
                queue_depth=settings.queue_depth,
                workers=settings.workers,
            )
        )
        self.engine: str = self._handle.engine

    def prepare(self, advance: Advance) -> None:
        """Write the files, and check that reading returns the same bytes.

        Advances by twice the bytes of the files.
        """
        nbytes = len(self._window)
        # Six times faster than the generator's bytes().
        words = self._random.integers(0, 1 << 64, -(-nbytes // 8), np.uint64)
        pattern = words.view(np.uint8)[:nbytes]
        memcpy(self._window, pattern)
        with File(self.path, "w", direct=self.settings.direct) as file:
            self.direct = file.direct
            self._stream("write", file, advance)
        forget_cached(self.path)
        self._file = self.enter_context(File(self.path, "r+", direct=self.direct))
        for buffer, _, offset in self._pieces("write", self._file):
            array = np.asarray(buffer)
            array.fill(0)
            advance(self._handle.read(buffer, self._file, offset))
            begin = offset % len(pattern)
            if not np.array_equal(array, pattern[begin : begin + len(array)]):
                raise CommandError(f"{self.path}: the bytes read differ from those written")
        self.write_small(advance)
        self.read_small(advance)

    def write_new(self, advance: Advance) -> Sample:
        """Write a new file, and sync it."""
        path = self.path.with_name("new")

        def work() -> int:
            with File(path, "x", direct=self.settings.direct) as file:
                moved = self._stream("write", file, advance)
                self._handle.fsync(file)
            return moved

        try:
            return self._measured(work)
        finally:
            path.unlink(missing_ok=True)

    def overwrite(self, advance: Advance) -> Sample:
        forget_cached(self.path)
        return self._measured(lambda: self._stream("write", self._file, advance))

    def read(self, advance: Advance) -> Sample:
        forget_cached(self.path)
        return self._measured(lambda: self._stream("read", self._file, advance))

    def read_random(self, advance: Advance) -> Sample:
        """Read blocks at random offsets, none twice, and no two neighbours."""
        nbytes = self.settings.random_bytes
        forget_cached(self.path)
        places = self._random.permutation(self.settings.size // (2 * nbytes))
        offsets = places[: self.settings.random_reads] * (2 * nbytes)
        batch = min(RANDOM_BATCH, len(self._window) // nbytes)

        def work() -> int:
            moved = 0
            deadline = time.perf_counter() + RANDOM_SECONDS
            for begin in range(0, len(offsets), batch):
                part = offsets[begin : begin + batch]
                out = self._memory("read")[: len(part) * nbytes]
                count = self._handle.gather(self._file, part, nbytes, out, max_gap=0)
                moved += count
                advance(count)
                if time.perf_counter() > deadline:
                    break
            return moved

        return self._measured(work)

    def write_small(self, advance: Advance) -> Sample:
        """Write small tensors, each to a file of its own; new files in the first round."""
        return self._measured(lambda: self._move_small("write", advance))

    def read_small(self, advance: Advance) -> Sample:
        for path in self._small:
            forget_cached(path)
        return self._measured(lambda: self._move_small("read", advance))

    def copy(self, advance: Advance) -> Sample:
        return self._copied(memcpy, advance)

    def copy_by_numpy(self, advance: Advance) -> Sample:
        return self._copied(
            lambda dest, src: np.copyto(np.asarray(dest), np.asarray(src)), advance
        )

    def _copied(self, copy: Callable[[Any, Any], object], advance: Advance) -> Sample:
        nbytes = self.settings.copy_bytes
        dest, src = self._allocated(nbytes), self._window[:nbytes]

        def work() -> int:
            copy(dest, src)
            return nbytes

        sample = self._measured(work)
        advance(nbytes)
        return sample

    def _measured(self, work: Callable[[], int]) -> Sample:
        before = self._handle.latencies()
        cpu, begin = time.process_time(), time.perf_counter()
        moved = work()
        seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
        taken = self._handle.latencies() - before
        latency_us = {q: taken.percentile_us(q) for q in PERCENTILES if taken.count}
        return Sample(moved, taken.count, seconds, cpu, latency_us)

    def _allocated(self, nbytes: int) -> Any:
        """Allocate memory of the kind to measure."""
        kind = self.settings.memory
        if kind == "pool":
            return empty(nbytes, np.uint8)
        if kind == "fresh":
            return np.empty(max(nbytes, FRESH_BYTES_MIN), np.uint8)[:nbytes]
        if kind == "torch":
            import torch

            return torch.empty(nbytes, dtype=torch.uint8).fill_(0)
        array = np.empty(nbytes, np.uint8)
        # Touch the pages, which np.zeros() would not do.
        array.fill(0)
        return array

    def _memory(self, op: str) -> Any:
        """Return memory to read into, or to write from, which is always touched."""
        if op == "read" and self.settings.memory == "fresh":
            return self._allocated(len(self._window))
        return self._window

    def _pieces(self, op: str, file: File) -> Iterator[tuple[Any, File, int]]:
        """Yield a buffer for each part of a file, the file, and the part's offset."""
        size, nbytes = self.settings.size, self.settings.request_bytes
        for begin in range(0, size, len(self._window)):
            memory = self._memory(op)
            end = min(size, begin + len(memory))
            for offset in range(begin, end, nbytes):
                part = memory[offset - begin : min(end, offset + nbytes) - begin]
                yield part, file, offset

    def _stream(self, op: str, file: File, advance: Advance) -> int:
        """Transfer the whole file, with as many requests as the memory has room for."""
        at_most = max(1, len(self._window) // self.settings.request_bytes)
        return self._moved(op, self._pieces(op, file), at_most, advance)

    def _move_small(self, op: str, advance: Advance) -> int:
        memory, nbytes = self._memory(op), self.settings.small_bytes
        places = enumerate(self._small)
        parts = ((memory[i * nbytes : (i + 1) * nbytes], path) for i, path in places)
        return self._moved(op, parts, len(self._small) + 1, advance)

    def _moved(
        self, op: str, transfers: Iterable[Any], at_most: int, advance: Advance
    ) -> int:
        submit: Callable[..., Any] = getattr(self._handle, f"submit_{op}")
        requests: deque[Any] = deque()
        moved = 0

        def finish() -> None:
            nonlocal moved
            count = requests[0].wait()
            requests.popleft()
            moved += count
            advance(count)

        try:
            for transfer in transfers:
                if len(requests) == at_most:
                    finish()
                requests.append(submit(*transfer))
            while requests:
                finish()
        except BaseException:
            # One request failed: cancel the others, and ignore their errors.
            for request in requests:
                request.cancel()
            for request in requests:
                with contextlib.suppress(CancelledError):
                    request.exception()
            raise
        return moved
