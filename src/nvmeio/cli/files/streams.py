"""Files from beginning to end: read ahead in pieces, written behind, without holes."""

import argparse
import contextlib
import errno
import os
import stat
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import CancelledError
from types import TracebackType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from nvmeio.cli import transfer_options
from nvmeio.cli.arguments import Parser, UsageError
from nvmeio.file import File
from nvmeio.handle import aio_handle
from nvmeio.memory import empty
from nvmeio.request import Request

__all__ = [
    "Piece",
    "Stream",
    "add_options",
    "drop",
    "extents_of_data",
    "has_changed",
    "leave_cache",
]

# Half of the memory is read into while the other half is written from: with blocks of the
# default size 16 of them are in flight each way.  Larger blocks take more.
MEMORY_BYTES = 32 << 20
PIECE_BYTES_MIN = 4 << 20

# Pieces begin where pages do, so that they can go straight to the device.
PAGE_BYTES = 4096

Bytes = npt.NDArray[np.uint8]
Extent = tuple[int, int]


class Piece(NamedTuple):
    """Neighbouring bytes of a file.

    Attributes
    ----------
    offset : int
        Where in the file they begin.
    memory : numpy.ndarray
        They themselves, uint8.
    buffer : numpy.ndarray
        What `memory` is the beginning of.
    """

    offset: int
    memory: Bytes
    buffer: Bytes


def add_options(parser: Parser) -> None:
    """Add what a Stream wants to know, and whether to be quiet.

    Parameters
    ----------
    parser : Parser
        Of a command.
    """
    transfer_options.add_options(parser)
    parser.add_argument(
        "-q", "--quiet", action="store_true", help="no progress, and no notes at the end"
    )


class Stream:
    """A handle, with buffers for files that are read and written in pieces.

    Parameters
    ----------
    options : argparse.Namespace
        With what ``add_options`` adds.

    Raises
    ------
    OSError
        The engine does not work here.
    UsageError
        An option is out of its limits, or one of the environment's.

    Notes
    -----
    To be used in a ``with`` statement, whose end drops what is in flight and waits for it.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        try:
            self._handle = aio_handle(
                options.block_size,
                options.queue_depth,
                engine=options.engine,
            )
        except ValueError as error:
            raise UsageError(str(error)) from error
        block_pages = -(-self._handle.get_block_size() // PAGE_BYTES)
        self._piece_bytes = max(PIECE_BYTES_MIN, block_pages * PAGE_BYTES)
        self._buffers_max = max(2, MEMORY_BYTES // self._piece_bytes)
        self._buffers_made = 0
        self._free: list[Bytes] = []
        self._reads: deque[tuple[Request, Piece]] = deque()
        self._writes: deque[tuple[Request, Piece]] = deque()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._handle:
            self.drop()

    @property
    def engine(self) -> str:
        """The name of the engine that does the work."""
        name: str = self._handle.stats()["engine"]
        return name

    def read(self, file: File, extents: Iterable[Extent]) -> Iterator[Piece]:
        """Read parts of a file, ahead of whoever asks for them.

        Parameters
        ----------
        file : File
            Open for reading.
        extents : iterable of (int, int)
            Offset and size of each part.

        Yields
        ------
        Piece
            One after the other.  Each is to be given to ``write`` or ``release``.

        Raises
        ------
        OSError
            With errno and path: ENODATA where the file has become shorter.
        """
        for offset, nbytes in self._cut(extents):
            buffer = self._take()
            piece = Piece(offset, buffer[:nbytes], buffer)
            request = self._handle.submit_read(piece.memory, file, offset)
            self._reads.append((request, piece))
            if len(self._reads) > self._buffers_max // 2:
                yield self._next(self._reads)
        while self._reads:
            yield self._next(self._reads)

    def write(self, piece: Piece, file: File) -> None:
        """Start writing a piece to its place in another file.

        Parameters
        ----------
        piece : Piece
            Must not change until ``flush`` has returned; it may be read.
        file : File
            Open for writing.

        Raises
        ------
        OSError
            An earlier write has failed.
        """
        request = self._handle.submit_write(piece.memory, file, piece.offset)
        self._writes.append((request, piece))

    def release(self, piece: Piece) -> None:
        """Give a piece's memory back.

        Parameters
        ----------
        piece : Piece
            Must not be used any more.
        """
        self._free.append(piece.buffer)

    def flush(self) -> None:
        """Wait for all that is being written.

        Raises
        ------
        OSError
            With errno and path: a write has failed.
        """
        while self._writes:
            self.release(self._next(self._writes))

    def sync(self, file: File) -> None:
        """Make a file durable.

        Parameters
        ----------
        file : File
            Open.

        Raises
        ------
        OSError
            With errno and path.
        """
        self._handle.fsync(file)

    def drop(self) -> None:
        """Drop what is in flight, and wait for it.

        Notes
        -----
        After an error, with other files to go on with.  What becomes of the rest is of no
        interest any more; pieces that were yielded must not be released.
        """
        drop([request for request, _ in (*self._reads, *self._writes)])
        for buffers in (self._reads, self._writes, self._free):
            buffers.clear()
        self._buffers_made = 0

    def _cut(self, extents: Iterable[Extent]) -> Iterator[Extent]:
        for begin, nbytes in extents:
            for offset in range(begin, begin + nbytes, self._piece_bytes):
                yield offset, min(self._piece_bytes, begin + nbytes - offset)

    def _take(self) -> Bytes:
        """Return a free buffer, if need be that of the oldest write."""
        if self._free:
            return self._free.pop()
        if self._buffers_made < self._buffers_max:
            self._buffers_made += 1
            buffer: Bytes = empty(self._piece_bytes, np.uint8)
            return buffer
        return self._next(self._writes).buffer

    def _next(self, requests: deque[tuple[Request, Piece]]) -> Piece:
        """Wait for the oldest of some requests."""
        request, piece = requests[0]
        request.wait()
        requests.popleft()
        return piece


def drop(requests: Collection[Request]) -> None:
    """Drop requests, and wait for what of them is in flight.

    Parameters
    ----------
    requests : collection of Request
        What becomes of them is of no interest any more.
    """
    for request in requests:
        request.cancel()
    for request in requests:
        with contextlib.suppress(CancelledError):
            request.exception()


def extents_of_data(file: File) -> Iterator[Extent]:
    """Tell where a file has data; what lies between are holes, which read as zeros.

    Parameters
    ----------
    file : File
        Open for reading.

    Yields
    ------
    tuple of (int, int)
        Offset and size in bytes, in order.  All of a file where it cannot be told.

    Raises
    ------
    OSError
        With errno and path.
    """
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
            yield begin, position - begin


def has_changed(file: File, status: os.stat_result, nbytes: int) -> bool:
    """Tell whether a file is not what it was.

    Parameters
    ----------
    file : File
        Open.
    status : os.stat_result
        Of the file as it was.
    nbytes : int
        Its size then.

    Returns
    -------
    bool
        True if its size or the time of its last change is another.
    """
    if file.size != nbytes:
        return True
    # The file of a device tells nothing of the times of what it leads to.
    is_file = stat.S_ISREG(status.st_mode)
    return is_file and os.fstat(file.fileno()).st_mtime_ns != status.st_mtime_ns


def leave_cache(file: File) -> None:
    """Have the page cache let go of a file, so that reads ask the device.

    Parameters
    ----------
    file : File
        Open.

    Notes
    -----
    A wish: what is not yet on the device, locked or mapped stays; so do files in memory.
    """
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
