"""Whole files in one call, and DeepSpeed's two functions for them."""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from nvmeio import pool
from nvmeio._types import Path
from nvmeio.arguments import flag, path_of, refuse_path
from nvmeio.buffer import Buffer, borrow
from nvmeio.file import File, open_for_writing
from nvmeio.handle import aio_handle
from nvmeio.request import wait_or_cancel

__all__ = ["aio_read", "aio_write", "read_file", "read_into", "write_file"]


def read_file(path: Path) -> npt.NDArray[np.uint8]:
    """Read a whole file.

    Parameters
    ----------
    path : str, bytes or os.PathLike
        The file.

    Returns
    -------
    numpy.ndarray
        Its bytes, uint8 of one dimension, in memory of the pool: writable, and given back
        when the last view of it has died.  ``view(dtype)`` makes other elements of them.

    Raises
    ------
    OSError
        With errno and path.
    MemoryError
        The file is larger than the memory that is left.
    TypeError
        ``path`` is no path.

    Notes
    -----
    A file that claims to have no bytes, as those in ``/proc`` do, is read by ordinary
    reads up to its end.  Releases the GIL while it waits.
    """
    with File(path) as file, aio_handle() as handle:
        size = file.size
        if size == 0:
            return np.frombuffer(_read_to_the_end(file), np.uint8)
        array = np.frombuffer(memoryview(pool.PoolMemory(size)), np.uint8)
        wait_or_cancel(handle.submit_read(array, file))
    return array


def _read_to_the_end(file: File) -> bytearray:
    """Read what a file of no known size has to give."""
    with naming(file.path), open(file.fileno(), "rb", closefd=False) as stream:
        return bytearray(stream.read())


def read_into(path: Path, buffer: Any, offset: int = 0) -> int:
    """Fill a buffer from a file.

    Parameters
    ----------
    path : str, bytes or os.PathLike
        The file, which must hold ``offset`` plus the buffer's size bytes.
    buffer : array, tensor or object with the buffer protocol
        Is filled; of any dtype, shape and strides.
    offset : int, default 0
        Where in the file to begin, in bytes.

    Returns
    -------
    int
        The number of bytes read: the size of the buffer.

    Raises
    ------
    OSError
        With errno and path: ENODATA where the file ends before the buffer is full.
    TypeError, ValueError
        The buffer cannot be read into, or an argument is of the wrong type or out of range.

    Notes
    -----
    Releases the GIL while it waits.
    """
    with aio_handle() as handle:
        count: int = wait_or_cancel(handle.submit_read(buffer, path, offset))
    return count


def write_file(path: Path, buffer: Any, sync: bool = False) -> int:
    """Make a file of exactly the bytes of a buffer.

    Parameters
    ----------
    path : str, bytes or os.PathLike
        The file; created where it does not exist.  A longer one is cut only after the
        bytes have landed.
    buffer : array, tensor or object with the buffer protocol
        Written in C order.
    sync : bool, default False
        Return only when the file, and its name, are on the device.

    Returns
    -------
    int
        The number of bytes written: the size of the buffer.

    Raises
    ------
    OSError
        With errno and path.  A new file is not left longer than what was written.
    TypeError, ValueError
        The buffer cannot be written, or an argument is of the wrong type.

    Notes
    -----
    A name is made durable by an fsync of the folder that has it, which takes permission to
    read that folder: without it ``sync=True`` is refused before the file is touched.
    Releases the GIL while it waits.
    """
    path = path_of(path)
    sync = flag("sync", sync)
    with (
        synced_folder(path) if sync else contextlib.nullcontext(),
        aio_handle() as handle,
    ):
        return _write_exactly(handle, path, buffer, False, sync)


def _write_exactly(
    handle: aio_handle, path: Path, buffer: Any, validate: bool, sync: bool
) -> int:
    """Write a buffer, then cut the file behind it."""
    lent = _borrow(buffer, writable=False)
    with open_for_writing(path) as file:
        handle.write(lent, file, validate)
        # A device has the length that it has.
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.truncate(lent.nbytes)
        if sync:
            handle.fsync(file)
    return lent.nbytes


def _borrow(buffer: Any, *, writable: bool) -> Buffer:
    """Take hold of a buffer before there is a request."""
    try:
        return borrow(buffer, writable=writable)
    except TypeError:
        refuse_path(buffer)
        raise


@contextlib.contextmanager
def synced_folder(path: str | bytes) -> Iterator[None]:
    """Open the folder of a file, and make its names durable if all goes well."""
    # Of the file that a link leads to, and of "link/../file" as the kernel takes it.
    folder = os.path.dirname(os.path.realpath(path))
    words = f" (its folder {folder!r}, to be synced)"
    with naming(path, words):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield
        with naming(path, words):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def absolute(path: Path) -> str | bytes:
    """Return a path that another process, in another folder, can take."""
    path = path_of(path)
    folder = os.getcwdb() if isinstance(path, bytes) else os.getcwd()
    # Not normalized: "link/../file" is what the kernel takes it for.
    return os.path.join(folder, path)  # type: ignore[arg-type]  # both are of one type


@contextlib.contextmanager
def naming(path: str | bytes, words: str = "") -> Iterator[None]:
    """Let every OSError name a file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}{words}", path) from error


def aio_read(
    buffer: Any,
    filename: Path,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """Read a whole file into a buffer of exactly its size, as DeepSpeed's function does.

    Parameters
    ----------
    buffer : array, tensor or object with the buffer protocol
        Is filled.
    filename : str, bytes or os.PathLike
        The file.
    block_size, queue_depth, single_submit, overlap_events
        As for ``aio_handle``.
    validate : bool
        Compare with an ordinary read afterwards.

    Returns
    -------
    int
        0.

    Raises
    ------
    OSError
        With errno and path: EINVAL where the file and the buffer differ in size.
    TypeError, ValueError
        The buffer cannot be read into, or an argument is of the wrong type or out of range.
    """
    with (
        aio_handle(block_size, queue_depth, single_submit, overlap_events) as handle,
        File(filename) as file,
    ):
        lent, size = _borrow(buffer, writable=True), file.size
        if lent.nbytes != size:
            raise OSError(
                errno.EINVAL,
                f"the buffer has {lent.nbytes} bytes and the file {size}; aio_read() reads "
                "a whole file, aio_handle reads parts",
                file.path,
            )
        return handle.read(lent, file, validate)


def aio_write(
    buffer: Any,
    filename: Path,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """Make a file of exactly the bytes of a buffer, as DeepSpeed's function does.

    Parameters
    ----------
    buffer, filename, block_size, queue_depth, single_submit, overlap_events, validate
        As for ``aio_read``.  A longer file is cut after the bytes have landed.

    Returns
    -------
    int
        0.

    Raises
    ------
    OSError
        With errno and path.
    TypeError, ValueError
        The buffer cannot be written, or an argument is of the wrong type or out of range.
    """
    with aio_handle(block_size, queue_depth, single_submit, overlap_events) as handle:
        _write_exactly(handle, filename, buffer, validate, False)
    return 0
