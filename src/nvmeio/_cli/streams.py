"""Read and write whole files in pieces: reading ahead, writing behind, skipping holes."""

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

# Half of the memory is for reading while the other half is written: with the default block
# size, 16 blocks are in flight in each direction.  Larger blocks take more memory.
MEMORY_BYTES = 32 << 20
PIECE_BYTES_MIN = 4 << 20

# Pieces begin at page boundaries, for zero-copy transfers.
PAGE_BYTES = 4096

Bytes = npt.NDArray[np.uint8]


class Piece(NamedTuple):
    offset: int
    memory: Bytes
    # The whole buffer; `memory` is its beginning.
    buffer: Bytes


def add_options(parser: Parser) -> None:
    """Add the options of a Stream, and --quiet."""
    add_transfer_options(parser)
    parser.add_argument(
        "-q", "--quiet", action="store_true", help="no progress, and no notes at the end"
    )


class Stream:
    """A handle, and buffers to read and write files in pieces.

    The end of its ``with`` block cancels requests in flight, and waits for them.
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
        """Yield the data of a file in pieces, with read-ahead, and show progress.

        Pass each piece to ``write`` or ``release``.
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
        """Start writing a piece at its offset.  Do not change it before ``flush``."""
        request = self.handle.submit_write(piece.memory, file, piece.offset)
        self._writes.append((request, piece))

    def release(self, piece: Piece) -> None:
        """Return a piece's memory for reuse."""
        self._free.append(piece.buffer)

    def flush(self) -> None:
        while self._writes:
            self.release(self._next(self._writes))

    def drop(self) -> None:
        """Cancel requests in flight after an error; do not release pieces afterwards."""
        drop([request for request, _ in (*self._reads, *self._writes)])
        for buffers in (self._reads, self._writes, self._free):
            buffers.clear()
        self._buffers_made = 0

    def _take(self) -> Bytes:
        """Return a free buffer; wait for the oldest write if there is none."""
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
        """Wait for the oldest of several requests."""
        request, piece = requests[0]
        request.wait()
        requests.popleft()
        if advance is not None:
            advance(len(piece.memory))
        return piece


def drop(requests: Collection[Request]) -> None:
    """Cancel requests and wait for them, ignoring their errors."""
    for request in requests:
        request.cancel()
    for request in requests:
        with contextlib.suppress(CancelledError):
            request.exception()


def data_bytes(file: File) -> int:
    """Return the number of bytes of a file that are not in holes."""
    return sum(end - begin for begin, end in _extents_of_data(file))


def _extents_of_data(file: File) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each extent of data; all of the file if holes are unknown."""
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
            # Block devices, and file systems that do not support SEEK_DATA.
            begin, position = position, end
        if begin < position:
            yield begin, position


def check_unchanged(file: File, before: os.stat_result, size: int, doing: str) -> None:
    """Raise CommandError if a file changed while it was read: parts may be older."""
    changed = file.size != size
    # The times of a device file say nothing about the device's contents.
    if stat.S_ISREG(before.st_mode):
        changed |= os.fstat(file.fileno()).st_mtime_ns != before.st_mtime_ns
    if changed:
        raise CommandError(f"{os.fsdecode(file.path)} has changed while it was {doing}")


def leave_cache(file: File) -> None:
    """Ask the page cache to drop a file, so that reads are cold.

    Pages that are dirty, locked or mapped stay, and so do files in memory.
    """
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
