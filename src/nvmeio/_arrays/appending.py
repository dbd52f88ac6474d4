"""Append rows to the array in a file, of which a crash leaves all or none.

The rows are written behind the array and synced, then the shape in the header is replaced.
A lock on the file (flock) admits one append at a time; a lock of the header keeps readers
out while that changes.
"""

import fcntl
import os
from typing import Any

import numpy.typing as npt

from nvmeio._arrays.npy_header import has_magic, replace_shape
from nvmeio._arrays.stored import StoredArray
from nvmeio._files.locks import FileLock, locked_header
from nvmeio._files.paths import naming
from nvmeio._native.handle import Handle

__all__ = ["append"]


def append(
    array: StoredArray, rows: npt.NDArray[Any], handle: Handle, *, waits: bool
) -> bool:
    """Append rows; or return False if another has the lock, and this must not wait."""
    with naming(array.file.path), FileLock(array.file) as lock:
        if not lock.take(waits=waits):
            return False
        _append_locked(array, rows, handle, lock.descriptor)
        # The header is not synced: NFS and FUSE report what became of it here.
        lock.check_written()
        return True


def _append_locked(
    array: StoredArray, rows: npt.NDArray[Any], handle: Handle, descriptor: int
) -> None:
    """Append rows to the array that the file has now, while its lock is held."""
    file = array.file
    if not array.grows:
        why = "bytes follow the array" if array.row_bytes else "rows have no bytes"
        raise ValueError(f"rows cannot be appended to {file.path!r}: {why}")
    before = array.layout_now()
    end = before.offset + before.nbytes
    if not array.raw and has_magic(file, end):
        raise ValueError(f"{file.path!r} has another array behind this one")
    if len(rows) == 0:
        array.take(before)
        return
    after = before._replace(shape=(before.shape[0] + len(rows), *before.shape[1:]))
    # Raw bytes have no header.
    old = os.pread(descriptor, 0 if array.raw else before.offset, 0)
    new = old and replace_shape(file.path, old, after.shape, after.dtype)
    # Remove what a killed append has left.
    if os.fstat(descriptor).st_size > end:
        os.ftruncate(descriptor, end)
    try:
        if rows.nbytes:
            handle.write(rows, file, end)
        if new != old:
            handle.fsync(file, data_only=True)
            _replace_header(descriptor, old, new)
    except BaseException:
        found = os.pread(descriptor, len(old), 0)
        if new == old or found != new:
            _replace_header(descriptor, found, old)
            os.ftruncate(descriptor, end)
        else:
            # The interruption came after the last step.
            array.take(after)
        raise
    array.take(after)


def _replace_header(descriptor: int, old: bytes, new: bytes) -> None:
    """Write the bytes of a header that differ, in one write so that no kill tears it."""
    places = [place for place in range(len(new)) if old[place] != new[place]]
    if not places:
        return
    begin, end = places[0], places[-1] + 1
    with locked_header(descriptor, fcntl.F_WRLCK):
        while begin < end:
            begin += os.pwrite(descriptor, new[begin:end], begin)
