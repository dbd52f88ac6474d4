"""Whole files in one call, and DeepSpeed's two functions for them."""

import errno
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from nvmeio import pool
from nvmeio._types import Path
from nvmeio.buffer import borrow
from nvmeio.file import File, open_for_writing
from nvmeio.handle import aio_handle

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
    """
    with File(path) as file, aio_handle(overlap_events=True) as handle:
        size = file.size
        if size == 0:
            return np.empty(0, np.uint8)
        array = np.frombuffer(memoryview(pool.PoolMemory(size)), np.uint8)
        handle.submit_read(array, file).wait()
    return array


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
        The buffer cannot be read into, or the offset is out of range.
    """
    with aio_handle(overlap_events=True) as handle:
        return handle.submit_read(buffer, path, offset).wait()


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
        Return only when the file, and its name if it is new, are on the device.

    Returns
    -------
    int
        The number of bytes written: the size of the buffer.

    Raises
    ------
    OSError
        With errno and path.  A new file is not left longer than what was written.
    TypeError, ValueError
        The buffer cannot be written.
    """
    with aio_handle(overlap_events=True) as handle:
        written = _write_exactly(handle, path, buffer, False, sync)
    if sync:
        _sync_folder(os.path.dirname(os.path.abspath(os.fsdecode(path))))
    return written


def _write_exactly(
    handle: aio_handle, path: Path, buffer: Any, validate: bool, sync: bool
) -> int:
    """Write a buffer, then cut the file behind it."""
    lent = borrow(buffer, writable=False)
    with open_for_writing(path) as file:
        handle.write(lent, file, validate)
        file.truncate(lent.nbytes)
        if sync:
            handle.fsync(file)
    return lent.nbytes


def _sync_folder(folder: str) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
        An argument is out of range.
    """
    with (
        aio_handle(block_size, queue_depth, single_submit, overlap_events) as handle,
        File(filename) as file,
    ):
        lent, size = borrow(buffer, writable=True), file.size
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
        An argument is out of range.
    """
    with aio_handle(block_size, queue_depth, single_submit, overlap_events) as handle:
        _write_exactly(handle, filename, buffer, validate, False)
    return 0
