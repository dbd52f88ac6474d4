"""Files from beginning to end: read ahead in pieces, written behind, without holes."""

import argparse
import contextlib
import errno
import os
import stat
from collections import deque
from collections.abc import Collection, Iterator
from concurrent.futures import CancelledError
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from nvmeio._cli.arguments import CommandError, Parser, UsageError, add_transfer_options
from nvmeio._cli.terminal import Advance, Terminal
from nvmeio._native.file import File
from nvmeio._native.handle import Handle
from nvmeio._native.request import Request
from nvmeio.memory import empty

# Half of the memory is read into while the other half is written from: with blocks of the
# default size 16 of them are in flight each way.  Larger blocks take more.
MEMORY_BYTES = 32 << 20
PIECE_BYTES_MIN = 4 << 20

# Pieces begin where pages do, so that they can go straight to the device.
PAGE_BYTES = 4096

Bytes = npt.NDArray[np.uint8]


class Piece(NamedTuple):
    offset: int
    memory: Bytes
    # What the memory is the beginning of.
    buffer: Bytes


def add_options(parser: Parser) -> None:
    """Add what a Stream wants to know, and whether to be quiet."""
    add_transfer_options(parser)
    parser.add_argument(
        "-q", "--quiet", action="store_true", help="no progress, and no notes at the end"
    )


class Stream:
    """A handle, with buffers for files that are read and written in pieces.

    The end of its ``with`` statement drops what is in flight, and waits for it.
    """

    def __init__(self, options: argparse.Namespace, terminal: Terminal) -> None:
        self.options, self.terminal = options, terminal
        terminal.quiet = options.quiet
        try:
            self.handle = Handle(
                engine=options.engine,
                block_size=options.block_size,
                queue_depth=options.queue_depth,
            )
        except ValueError as error:
            raise UsageError(str(error)) from error
        block_pages = -(-self.handle.block_size // PAGE_BYTES)
        self._piece_bytes = max(PIECE_BYTES_MIN, block_pages * PAGE_BYTES)
        self._buffers_max = max(2, MEMORY_BYTES // self._piece_bytes)
        self._buffers_made = 0
        self._free: list[Bytes] = []
        self._reads: deque[tuple[Request, Piece]] = deque()
        self._writes: deque[tuple[Request, Piece]] = deque()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *raised: object) -> None:
        with self.handle:
            self.drop()

    def read(self, file: File, label: str) -> Iterator[Piece]:
        """Read the data of a file ahead of whoever asks for it, and show how far that is.

        Each piece must be given to ``write`` or ``release``.
        """
        advance = self.terminal.progress(label, data_bytes(file), speed=True)
        for begin, end in _extents_of_data(file):
            for offset in range(begin, end, self._piece_bytes):
                buffer = self._take()
                piece = Piece(offset, buffer[: end - offset], buffer)
                request = self.handle.submit_read(piece.memory, file, offset)
                self._reads.append((request, piece))
                if len(self._reads) > self._buffers_max // 2:
                    yield self._next(self._reads, advance)
        while self._reads:
            yield self._next(self._reads, advance)

    def write(self, piece: Piece, file: File) -> None:
        """Start writing a piece, which must not change before ``flush``, to its place."""
        request = self.handle.submit_write(piece.memory, file, piece.offset)
        self._writes.append((request, piece))

    def release(self, piece: Piece) -> None:
        """Take a piece's memory back."""
        self._free.append(piece.buffer)

    def flush(self) -> None:
        while self._writes:
            self.release(self._next(self._writes))

    def drop(self) -> None:
        """Drop what is in flight after an error; pieces must not be released any more."""
        drop([request for request, _ in (*self._reads, *self._writes)])
        for buffers in (self._reads, self._writes, self._free):
            buffers.clear()
        self._buffers_made = 0

    def _take(self) -> Bytes:
        """Return a free buffer, if need be that of the oldest write."""
        if self._free:
            return self._free.pop()
        if self._buffers_made < self._buffers_max:
            self._buffers_made += 1
            buffer: Bytes = empty(self._piece_bytes, np.uint8)
            return buffer
        return self._next(self._writes).buffer

    def _next(
        self, requests: deque[tuple[Request, Piece]], advance: Advance | None = None
    ) -> Piece:
        """Wait for the oldest of some requests."""
        request, piece = requests[0]
        request.wait()
        requests.popleft()
        if advance is not None:
            advance(len(piece.memory))
        return piece


def drop(requests: Collection[Request]) -> None:
    """Drop requests, whatever becomes of them, and wait for what is in flight."""
    for request in requests:
        request.cancel()
    for request in requests:
        with contextlib.suppress(CancelledError):
            request.exception()


def data_bytes(file: File) -> int:
    """Return how much of a file is not in holes."""
    return sum(end - begin for begin, end in _extents_of_data(file))


def _extents_of_data(file: File) -> Iterator[tuple[int, int]]:
    """Yield begin and end of what is not in a hole; all of it where that is not known."""
    end, descriptor = file.size, file.fileno()
    position = 0
    while position < end:
        try:
            begin = os.lseek(descriptor, position, os.SEEK_DATA)
            position = min(end, os.lseek(descriptor, begin, os.SEEK_HOLE))
        except OSError as error:
            if error.errno == errno.ENXIO:
                return  # a hole up to the end
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise OSError(error.errno, error.strerror, file.path) from error
            # Block devices, and file systems that do not know.
            begin, position = position, end
        if begin < position:
            yield begin, position


def check_unchanged(file: File, before: os.stat_result, size: int, doing: str) -> None:
    """Refuse a file that is not what it was: some parts may be older than others."""
    changed = file.size != size
    # The file of a device tells nothing of the times of what it leads to.
    if stat.S_ISREG(before.st_mode):
        changed |= os.fstat(file.fileno()).st_mtime_ns != before.st_mtime_ns
    if changed:
        raise CommandError(f"{os.fsdecode(file.path)} has changed while it was {doing}")


def leave_cache(file: File) -> None:
    """Ask the page cache to drop a file, so that reads ask the device.

    What is not yet on the device, locked or mapped stays; so do files in memory.
    """
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
