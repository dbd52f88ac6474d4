"""The works of ``nvmeio bench``, as nvmeio does them."""

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nvmeio.cli.arguments import CommandError
from nvmeio.cli.files.streams import drop
from nvmeio.cli.measuring.buffers import Buffers
from nvmeio.cli.measuring.ground import forget_cached
from nvmeio.cli.measuring.samples import PERCENTILES, Sample
from nvmeio.cli.terminal import Advance
from nvmeio.copy import memcpy
from nvmeio.file import File
from nvmeio.handle import aio_handle

__all__ = ["RANDOM_SECONDS", "Settings", "Workbench"]

# Random reads of a turn: so many, or as many as this time has room for.
RANDOM_READS = 1 << 16
RANDOM_SECONDS = 2.0
# Of one call: the queue runs empty at its end alone.
RANDOM_BATCH = 1 << 14

# What one request carries, so that there is progress to show; the blocks of all requests
# share one queue.
REQUEST_BYTES = 8 << 20
# What is transferred is memory of this size over and over, or twice the queue if larger.
WINDOW_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes
    ----------
    size, block_bytes, random_bytes : int
        Of the file, of its blocks, and of a random read.
    small_bytes, small_count : int
        Of one of the small tensors, and how many.
    copy_bytes : int
        What is copied in memory.
    queue_depth, workers : int
        As for ``aio_handle``.
    engine : str
        As for ``aio_handle``.
    direct : {"auto", True, False}
        As for ``aio_handle``.
    memory : str
        A kind of Buffers.
    """

    size: int
    block_bytes: int
    random_bytes: int
    small_bytes: int
    small_count: int
    copy_bytes: int
    queue_depth: int
    workers: int
    engine: Any
    direct: Any
    memory: str

    @property
    def disk_bytes(self) -> int:
        """What lies on the disk at the same time."""
        return self.size + self.small_bytes * self.small_count

    @property
    def random_reads(self) -> int:
        """How many random reads a turn has at most: half of the file's blocks."""
        return min(RANDOM_READS, self.size // (2 * self.random_bytes))

    @property
    def window_bytes(self) -> int:
        """How much memory a transfer goes through before it begins anew."""
        queue = 2 * self.queue_depth * self.workers * self.block_bytes
        return min(self.size, max(WINDOW_BYTES, queue))

    @property
    def request_bytes(self) -> int:
        """What one request carries: whole blocks."""
        blocks = max(1, REQUEST_BYTES // self.block_bytes)
        return blocks * self.block_bytes


class Workbench:
    """A file, small files and memory to work with.

    Parameters
    ----------
    folder : Path
        Empty; somebody else takes it away with all that is in it.
    settings : Settings
        What is measured.

    Attributes
    ----------
    path : Path
        The file.
    direct : bool
        Whether it bypasses the page cache.
    engine : str
        What carries the blocks out.

    Raises
    ------
    OSError
        The engine or the file system refuses something.
    CommandError
        torch's memory is wanted, and torch is not installed.
    """

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.settings = settings
        self.path = folder / "file"
        self._small = [folder / f"small-{i}" for i in range(settings.small_count)]
        self._buffers = Buffers(settings.memory)
        self._window = self._buffers.make(settings.window_bytes)
        self._random = np.random.default_rng()
        self._stack = contextlib.ExitStack()
        self._handle: aio_handle = self._stack.enter_context(
            aio_handle(
                settings.block_bytes,
                settings.queue_depth,
                intra_op_parallelism=settings.workers,
                engine=settings.engine,
                direct=settings.direct,
            )
        )
        self.engine: str = self._handle.stats()["engine"]

    def __enter__(self) -> "Workbench":
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    def prepare(self, advance: Advance) -> None:
        """Make the files, and see that they are read as they were written.

        Parameters
        ----------
        advance : callable
            Is told of every byte that was moved, twice the disk's.

        Raises
        ------
        CommandError
            A read brought other bytes.
        """
        pattern = np.frombuffer(self._random.bytes(len(self._window)), np.uint8)
        memcpy(self._window, pattern)
        with File(self.path, "w", direct=self.settings.direct) as file:
            self.direct = file.direct
            self._stream(self._handle.submit_write, file, self._source, advance)
        forget_cached(self.path)
        self._file = self._stack.enter_context(
            File(self.path, "r+", direct=self.settings.direct)
        )
        for buffer, offset in self._pieces(self._source):
            array = np.asarray(buffer)
            array.fill(0)
            advance(self._handle.submit_read(buffer, self._file, offset).wait())
            begin = offset % len(pattern)
            if not np.array_equal(array, pattern[begin : begin + len(array)]):
                raise CommandError(f"{self.path}: other bytes were read than written")
        self.write_small(advance)
        self.read_small(advance)

    def write_new(self, advance: Advance) -> Sample:
        """Write a file that does not exist, and sync it."""
        path = self.path.with_name("new")

        def work() -> int:
            with File(path, "x", direct=self.settings.direct) as file:
                moved = self._stream(self._handle.submit_write, file, self._source, advance)
                self._handle.fsync(file)
            return moved

        try:
            return self._measured(work)
        finally:
            path.unlink(missing_ok=True)

    def overwrite(self, advance: Advance) -> Sample:
        """Write the file anew from its beginning to its end."""
        forget_cached(self.path)
        return self._measured(
            lambda: self._stream(
                self._handle.submit_write, self._file, self._source, advance
            )
        )

    def read(self, advance: Advance) -> Sample:
        """Read the file from its beginning to its end."""
        forget_cached(self.path)
        return self._measured(
            lambda: self._stream(
                self._handle.submit_read, self._file, self._target, advance
            )
        )

    def read_random(self, advance: Advance) -> Sample:
        """Read blocks at random places, none of them twice, no two neighbours."""
        nbytes = self.settings.random_bytes
        forget_cached(self.path)
        places = self._random.permutation(self.settings.size // (2 * nbytes))
        offsets: npt.NDArray[Any] = places[: self.settings.random_reads] * (2 * nbytes)
        batch = min(RANDOM_BATCH, len(self._window) // nbytes)

        def work() -> int:
            moved = 0
            deadline = time.perf_counter() + RANDOM_SECONDS
            for begin in range(0, len(offsets), batch):
                part = offsets[begin : begin + batch]
                out = self._target()[: len(part) * nbytes]
                count = self._handle.gather(self._file, part, nbytes, out, max_gap=0)
                moved += count
                advance(count)
                if time.perf_counter() > deadline:
                    break
            return moved

        return self._measured(work)

    def write_small(self, advance: Advance) -> Sample:
        """Write small tensors into a file each; only the first time they are new."""
        return self._measured(
            lambda: self._each(self._handle.submit_write, self._source(), advance)
        )

    def read_small(self, advance: Advance) -> Sample:
        """Read small tensors from a file each."""
        for path in self._small:
            forget_cached(path)
        return self._measured(
            lambda: self._each(self._handle.submit_read, self._target(), advance)
        )

    def copy(self, advance: Advance) -> Sample:
        """Copy memory."""
        return self._copied(memcpy, advance)

    def copy_by_numpy(self, advance: Advance) -> Sample:
        """Copy the same memory with numpy."""

        def copy(dest: Any, src: Any) -> None:
            np.copyto(np.asarray(dest), np.asarray(src))

        return self._copied(copy, advance)

    def _measured(self, work: Callable[[], int]) -> Sample:
        before = self._handle.latencies()
        cpu, begin = time.process_time(), time.perf_counter()
        moved = work()
        seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
        taken = self._handle.latencies() - before
        latency_us = (
            {percentile: taken.percentile_us(percentile) for percentile in PERCENTILES}
            if taken.count
            else {}
        )
        return Sample(moved, taken.count, seconds, cpu, latency_us)

    def _source(self) -> Any:
        """Return memory that is written: what a program saves it has touched."""
        return self._window

    def _target(self) -> Any:
        """Return memory that is read into."""
        return self._buffers.again(self._window)

    def _pieces(self, window: Callable[[], Any]) -> Iterator[tuple[Any, int]]:
        """Yield a buffer for each part of the file, and where that begins."""
        size, nbytes = self.settings.size, self.settings.request_bytes
        for begin in range(0, size, len(self._window)):
            memory = window()
            end = min(size, begin + len(memory))
            for offset in range(begin, end, nbytes):
                yield memory[offset - begin : min(end, offset + nbytes) - begin], offset

    def _stream(
        self,
        submit: Callable[..., Any],
        file: File,
        window: Callable[[], Any],
        advance: Advance,
    ) -> int:
        """Move the whole file, with no more requests in flight than the memory is for."""
        moved = 0
        at_most = max(1, len(self._window) // self.settings.request_bytes)
        requests: deque[Any] = deque()
        with _dropped(requests):
            for buffer, offset in self._pieces(window):
                if len(requests) == at_most:
                    moved += _finished(requests.popleft(), advance)
                requests.append(submit(buffer, file, offset))
            return moved + sum(_finished(request, advance) for request in requests)

    def _each(self, submit: Callable[..., Any], memory: Any, advance: Advance) -> int:
        """Move every small tensor."""
        nbytes = self.settings.small_bytes
        requests: deque[Any] = deque()
        with _dropped(requests):
            for index, path in enumerate(self._small):
                part = memory[index * nbytes : (index + 1) * nbytes]
                requests.append(submit(part, path))
            return sum(_finished(request, advance) for request in requests)

    def _copied(self, copy: Callable[[Any, Any], object], advance: Advance) -> Sample:
        nbytes = self.settings.copy_bytes
        dest, src = self._buffers.make(nbytes), self._window[:nbytes]

        def work() -> int:
            copy(dest, src)
            return nbytes

        sample = self._measured(work)
        advance(nbytes)
        return sample


@contextlib.contextmanager
def _dropped(requests: Collection[Any]) -> Iterator[None]:
    """Drop requests after an error, which is of one of them; the others say no more."""
    try:
        yield
    except BaseException:
        drop(requests)
        raise


def _finished(request: Any, advance: Advance) -> int:
    """Wait for a request, and tell of it."""
    moved: int = request.wait()
    advance(moved)
    return moved
