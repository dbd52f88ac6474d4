"""Files as torch.save and torch.load want them, and anything else that takes a file."""

import contextlib
import io
import os
import stat
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from nvmeio._arguments.checks import path_of, word
from nvmeio._arguments.keywords import suggesting
from nvmeio._arguments.types import Path
from nvmeio._native.file import File
from nvmeio.default import default_handle

__all__ = ["open_stream"]

# What is written in small pieces is collected, so that the drive sees whole pages.
STAGE_BYTES = 1 << 20
PAGE = 4096
# Reads of so much at most are served from a stage that was read ahead.
SMALL_BYTES = 64 << 10


@suggesting
def open_stream(path: Path, mode: str = "rb") -> io.RawIOBase:
    """Open a file for whatever reads or writes a stream of bytes.

    Parameters
    ----------
    path : str, bytes or os.PathLike
        The file.
    mode : {"rb", "wb", "xb", "r", "w", "x"}, default "rb"
        To read; to write it anew, in place; or to make it, and fail where it exists.

    Returns
    -------
    io.RawIOBase
        With ``read``, ``readinto``, ``write``, ``seek`` and ``tell``; a context manager.

    Raises
    ------
    OSError
        With errno and path.
    TypeError, ValueError
        The path is none, or the mode is unknown.

    Notes
    -----
    ``write`` takes all bytes or raises, where ordinary files may take a part, which
    torch.save would not notice.  ``readinto`` fills the buffer, or is at the end.  Both go
    past the page cache, and wait without the GIL.  Small pieces are collected; ``flush``
    and ``close`` write them, and raise what goes wrong.  A file that is being written is
    incomplete until then: ``nvmeio.torch.save`` is what replaces a file as a whole.

    Examples
    --------
    >>> import torch
    >>> with nvmeio.torch.open_stream("model.pt", "wb") as stream:
    ...     torch.save({"weight": torch.ones(3)}, stream)
    >>> with nvmeio.torch.open_stream("model.pt") as stream:
    ...     torch.load(stream)
    {'weight': tensor([1., 1., 1.])}
    """
    word("mode", mode, ("rb", "wb", "xb", "r", "w", "x"))
    kinds: dict[str, Literal["r", "w", "x"]] = {"r": "r", "w": "w", "x": "x"}
    return Stream(File(path_of(path), kinds[mode[0]]))


class Stream(io.RawIOBase):
    """A stream over an open file, which it closes unless that is somebody else's."""

    def __init__(self, file: File, *, closes: bool = True) -> None:
        self._file, self._closes = file, closes
        # What the first write or read that failed has raised: torch may raise another one.
        self.error: OSError | None = None
        self._writes = file.mode != "r"
        self._position = 0
        # What was read ahead for small reads, and where it is of.
        self._ahead = memoryview(b"")
        self._ahead_at = 0
        # The bytes before the position that are not written yet; it has none to read.
        self._stage = bytearray()

    @property
    def mode(self) -> str:
        """As `open` has it: "rb", "wb" or "xb"."""
        return f"{self._file.mode}b"

    @property
    def name(self) -> Any:
        """The file's path."""
        return self._file.path

    def readable(self) -> bool:
        """Tell whether it was opened to be read."""
        return not self._writes

    def writable(self) -> bool:
        """Tell whether it was opened to be written."""
        return self._writes

    def seekable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the descriptor of a file that is read.

        One that is written has none to give: its own position is not the stream's.
        """
        self._check_open()
        if self._writes:
            raise io.UnsupportedOperation("fileno of a stream that is written")
        return self._file.fileno()

    def tell(self) -> int:
        """Return the position, in bytes."""
        self._check_open()
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to another position, and return it."""
        self._check_open()
        self.flush()
        if whence == io.SEEK_CUR:
            offset += self._position
        elif whence == io.SEEK_END:
            offset += self._size()
        elif whence != io.SEEK_SET:
            raise ValueError(f"whence is {whence}; it must be 0, 1 or 2")
        if offset < 0:
            raise ValueError(f"the position is {offset}; it must be 0 or more")
        self._position = offset
        return offset

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer, as far as the file goes, and return how many bytes that are."""
        self._check_open()
        if self._writes:
            raise io.UnsupportedOperation("it was opened to be written")
        view = memoryview(buffer).cast("B")
        if len(view) <= SMALL_BYTES:
            return self._read_small(view)
        count = max(0, min(len(view), self._size() - self._position))
        if count:
            with self._noting():
                default_handle().read(view[:count], self._file, self._position)
        self._position += count
        return count

    def _read_small(self, view: memoryview) -> int:
        """Read from memory that is filled ahead, for there may be many."""
        low = self._position - self._ahead_at
        if low < 0 or low + len(view) > len(self._ahead):
            at = self._position // PAGE * PAGE
            ahead = bytearray(max(0, min(STAGE_BYTES, self._size() - at)))
            if ahead:
                with self._noting():
                    default_handle().read(ahead, self._file, at)
            self._ahead, self._ahead_at = memoryview(ahead), at
            low = self._position - at
        found = self._ahead[low : low + len(view)]
        view[: len(found)] = found
        self._position += len(found)
        return len(found)

    def _size(self) -> int:
        """Return how many bytes the file has by now."""
        found = os.fstat(self._file.fileno())
        if stat.S_ISBLK(found.st_mode):
            return os.lseek(self._file.fileno(), 0, os.SEEK_END)
        return found.st_size

    def readall(self) -> bytes:
        """Return all bytes from the position on."""
        left = max(0, self._size() - self._position)
        found = bytearray(left)
        self.readinto(found)
        return bytes(found)

    def write(self, buffer: Any) -> int:
        """Write all of a buffer, and return how many bytes it has."""
        self._check_open()
        if not self._writes:
            raise io.UnsupportedOperation("it was opened to be read")
        view = memoryview(buffer).cast("B")
        if len(self._stage) + len(view) <= STAGE_BYTES:
            self._stage += view
        else:
            self._write_long(view)
        self._position += len(view)
        return len(view)

    def _write_long(self, view: memoryview) -> None:
        """Write what is staged, up to a page, and what follows from its own memory."""
        begin = self._position - len(self._stage)
        head = min(len(view), -self._position % PAGE)
        self._stage += view[:head]
        middle = (len(view) - head) // PAGE * PAGE
        handle = default_handle()
        with self._noting():
            handle.write(self._taken(), self._file, begin)
            if middle:
                handle.write(view[head : head + middle], self._file, self._position + head)
        self._stage += view[head + middle :]

    def _taken(self) -> Any:
        taken, self._stage = self._stage, bytearray()
        return np.frombuffer(taken, np.uint8)

    def flush(self) -> None:
        """Write what was collected."""
        if not self.closed and self._stage:
            begin = self._position - len(self._stage)
            with self._noting():
                default_handle().write(self._taken(), self._file, begin)

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.error = self.error or error
            raise

    def close(self) -> None:
        """Write what was collected, and close the file."""
        if self.closed:
            return
        try:
            super().close()
        finally:
            if self._closes:
                self._file.close()

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError("the stream is closed")
