"""Coroutine functions for asyncio.

``load``, ``save``, ``read_file``, ``read_into`` and ``write_file`` have the arguments of
the functions of nvmeio that block.  For an ``ArrayFile`` there are ``getitem`` and
``setitem`` (named as in the ``operator`` module), ``append`` and ``flush``.  Requests need
none, because they can be awaited: ``await handle.submit_read(...)``,
``await array.prefetch(...)``.

Data are transferred by requests: an eventfd wakes the event loop, and no thread waits.
Short calls that may block run in the loop's default executor, which is one pool of threads
for all calls: opening and closing a file, reading its header, allocating memory, renaming,
truncating, the fsync of a directory, submitting what an index selects, and copying it out
of what was read with it.  Strided memory and device memory are copied in the loop's thread.

A cancelled task cancels its transfer, waits until the memory is no longer in use, and then
raises ``asyncio.CancelledError``, even if it is cancelled again meanwhile.
``asyncio.timeout`` and ``asyncio.wait_for`` cancel in the same way.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

from nvmeio._arguments.checks import flag, path_of
from nvmeio._arguments.types import Path
from nvmeio._events.event_loop import InThread, in_thread, submitted
from nvmeio._files.descriptors import cut
from nvmeio._native.buffer import borrow
from nvmeio._native.file import File
from nvmeio._native.handle import Handle
from nvmeio._publish.files import new_contents
from nvmeio._publish.mapped import apart
from nvmeio.arrays import ArrayFile
from nvmeio.default import default_handle
from nvmeio.files import as_dtype, opened_for, opened_for_reading
from nvmeio.npy import header_and_source, opened_npy

__all__ = [
    "append",
    "flush",
    "getitem",
    "load",
    "read_file",
    "read_into",
    "save",
    "setitem",
    "write_file",
]

V = TypeVar("V")


def _ready(opened: AbstractContextManager[V]) -> InThread[tuple[Handle, V]]:
    """Open a file in the default executor, so that no submission opens or closes one."""
    return InThread(_with_handle(opened))


@contextlib.contextmanager
def _with_handle(opened: AbstractContextManager[V]) -> Iterator[tuple[Handle, V]]:
    handle = default_handle()
    with opened as found:
        file: Any = found[0] if isinstance(found, tuple) else found
        # Unaligned transfers need the second descriptor.
        handle._open(file)
        yield handle, found


# What is copied in the loop's thread: a thread would take as long to wake up.
_COPY_BYTES_MAX = 256 << 10

# Pauses between attempts to take a file's lock: the first, and the longest.
_PAUSE_MIN_S, _PAUSE_MAX_S = 0.001, 0.05


async def _read(handle: Handle, buffer: Any, file: File, offset: int) -> int:
    return int(await handle.submit_read(buffer, file, offset))


async def _write(
    contents: AbstractContextManager[File],
    source: Any,
    *,
    header: bytes | bytearray = b"",
    sync: bool,
) -> int:
    """Write a header and a Buffer to a file, and return their size."""
    size = 0
    async with _ready(contents) as (handle, file):
        source = await in_thread(apart, source, file)
        for part in (header, source) if header else (source,):
            size += await handle.submit_write(part, file, size)
        await in_thread(cut, file, size)
        if sync:
            await handle.submit_fsync(file)
    return size


async def load(path: Path) -> npt.NDArray[Any]:
    """Read a whole .npy file.

    Parameters
    ----------
    path : str, bytes or os.PathLike
        As for ``nvmeio.load``.

    Returns
    -------
    numpy.ndarray
        As from ``nvmeio.load``.

    Raises
    ------
    OSError, MemoryError, TypeError, ValueError
        As ``nvmeio.load``.
    asyncio.CancelledError
        The task was cancelled; the transfer has ended.

    Examples
    --------
    >>> import asyncio
    >>> nvmeio.save("data.npy", np.arange(4))
    >>> asyncio.run(nvmeio.aio.load("data.npy"))
    array([0, 1, 2, 3])
    """
    async with _ready(opened_npy(path)) as (handle, found):
        file, layout, array = found
        await _read(handle, array, file, layout.offset)
    return array.T if layout.fortran else array


async def save(path: Path, array: Any, *, sync: bool = False, atomic: bool = True) -> None:
    """Write an array or a tensor as a .npy file.

    Parameters
    ----------
    path, array, sync, atomic
        As for ``nvmeio.save``.

    Raises
    ------
    OSError, TypeError
        As ``nvmeio.save``.
    asyncio.CancelledError
        As for ``write_file``.

    Examples
    --------
    >>> import asyncio
    >>> asyncio.run(nvmeio.aio.save("data.npy", np.arange(4)))
    >>> nvmeio.load("data.npy")
    array([0, 1, 2, 3])
    """
    path, sync, atomic = path_of(path), flag("sync", sync), flag("atomic", atomic)
    header, source = await in_thread(header_and_source, array)
    contents = new_contents(path, sync=sync, atomic=atomic)
    await _write(contents, source, header=header, sync=True)


@overload
async def read_file(
    path: Path, offset: int = 0, size: int | None = None, dtype: None = None
) -> npt.NDArray[np.uint8]: ...
@overload
async def read_file(
    path: Path, offset: int = 0, size: int | None = None, *, dtype: Any
) -> Any: ...
@overload
async def read_file(path: Path, offset: int, size: int | None, dtype: Any) -> Any: ...
async def read_file(
    path: Path, offset: int = 0, size: int | None = None, dtype: Any = None
) -> Any:
    """Read a file, or part of it, into new memory.

    Parameters
    ----------
    path, offset, size, dtype
        As for ``nvmeio.read_file``.

    Returns
    -------
    numpy.ndarray or torch.Tensor
        As from ``nvmeio.read_file``.

    Raises
    ------
    OSError, MemoryError, TypeError, ValueError
        As ``nvmeio.read_file``.
    asyncio.CancelledError
        The task was cancelled; the transfer has ended.

    Examples
    --------
    >>> import asyncio
    >>> nvmeio.write_file(np.arange(4), "data.bin")
    32
    >>> asyncio.run(nvmeio.aio.read_file("data.bin", offset=16, dtype=np.int64))
    array([2, 3])
    """
    opened = opened_for(path, offset, size, dtype)
    async with _ready(opened) as (handle, (file, array, left)):
        if left:
            await _read(handle, array, file, offset)
    return as_dtype(array, dtype)


async def read_into(buffer: Any, file: Path | int | File, offset: int = 0) -> int:
    """Fill a buffer from a file.

    Parameters
    ----------
    buffer, file, offset
        As for ``nvmeio.read_into``.

    Returns
    -------
    int
        The number of bytes read, which is the size of the buffer.

    Raises
    ------
    OSError, TypeError, ValueError
        As ``nvmeio.read_into``.
    asyncio.CancelledError
        The task was cancelled; the buffer is no longer in use.

    Examples
    --------
    >>> import asyncio
    >>> nvmeio.write_file(np.arange(4), "data.bin")
    32
    >>> array = np.empty(4, np.int64)
    >>> asyncio.run(nvmeio.aio.read_into(array, "data.bin"))
    32
    """
    async with _ready(opened_for_reading(file)) as (handle, opened):
        return await _read(handle, buffer, opened, offset)


async def write_file(
    buffer: Any, path: Path, *, sync: bool = False, atomic: bool = True
) -> int:
    """Write exactly the bytes of a buffer to a file.

    Parameters
    ----------
    buffer, path, sync, atomic
        As for ``nvmeio.write_file``.  Do not change the buffer meanwhile.

    Returns
    -------
    int
        The number of bytes written, which is the size of the buffer.

    Raises
    ------
    OSError, TypeError, ValueError
        As ``nvmeio.write_file``.
    asyncio.CancelledError
        The task was cancelled.  The transfer has ended, and no temporary file is left.
        With ``atomic`` the path leads to the old file, or to the complete new one if that
        was renamed already.

    Notes
    -----
    See ``nvmeio.write_file`` for the cost of ``atomic``, and for files that are written in
    place.

    Examples
    --------
    >>> import asyncio
    >>> asyncio.run(nvmeio.aio.write_file(np.arange(4), "data.bin"))
    32
    """
    path, sync, atomic = path_of(path), flag("sync", sync), flag("atomic", atomic)
    held = borrow(buffer, writable=False)
    contents = new_contents(path, sync=sync, atomic=atomic)
    return await _write(contents, held, sync=sync or atomic)


async def getitem(array: ArrayFile, index: Any) -> Any:
    """Read the elements that an index selects: ``array[index]``.

    Parameters
    ----------
    array : ArrayFile
        The array to read from.
    index : numpy index
        The elements to read.

    Returns
    -------
    numpy.ndarray, scalar or tensor
        As ``array[index]``.

    Raises
    ------
    IndexError, OSError, TypeError, ValueError
        As ``array[index]``.
    asyncio.CancelledError
        The task was cancelled; the transfer has ended.

    See Also
    --------
    nvmeio.ArrayFile.prefetch : The request that this awaits, which takes ``out=`` too.

    Examples
    --------
    >>> import asyncio
    >>> nvmeio.save("rows.npy", np.arange(12).reshape(4, 3))
    >>> with nvmeio.ArrayFile("rows.npy") as rows:
    ...     asyncio.run(nvmeio.aio.getitem(rows, [3, 0]))
    array([[ 9, 10, 11],
           [ 0,  1,  2]])
    """
    transfer = await submitted(array._begin_filling, index)
    # A large copy would hold up the event loop.
    if transfer.make is not None and transfer.nbytes > _COPY_BYTES_MAX:
        return await in_thread(transfer.finished)
    return transfer.finished()


async def setitem(array: ArrayFile, index: Any, value: Any) -> None:
    """Write the elements that an index selects: ``array[index] = value``.

    Parameters
    ----------
    array : ArrayFile
        The array to write to, open in mode "r+".
    index : numpy index
        The elements to write.
    value : array_like or tensor
        Their new values.

    Raises
    ------
    IndexError, OSError, TypeError, ValueError
        As ``array[index] = value``.
    asyncio.CancelledError
        The task was cancelled.  The transfer has ended; some elements may have their new
        values.

    Examples
    --------
    >>> import asyncio
    >>> nvmeio.save("rows.npy", np.arange(12).reshape(4, 3))
    >>> with nvmeio.ArrayFile("rows.npy", mode="r+") as rows:
    ...     asyncio.run(nvmeio.aio.setitem(rows, 0, 7))
    ...     rows[0]
    array([7, 7, 7])
    """
    await submitted(array.submit_setitem, index, value)


async def flush(array: ArrayFile, *, sync: bool = True) -> None:
    """Make the assignments to an array durable.

    Parameters
    ----------
    array : ArrayFile
        The array that was written to.
    sync
        As for ``ArrayFile.flush``.

    Raises
    ------
    OSError, ValueError
        As ``ArrayFile.flush``.
    asyncio.CancelledError
        The task was cancelled; it is unknown which assignments are durable.

    Examples
    --------
    >>> import asyncio
    >>> async def main():
    ...     with nvmeio.ArrayFile.create("rows.npy", (4, 3), np.int64) as rows:
    ...         await nvmeio.aio.setitem(rows, 0, 7)
    ...         await nvmeio.aio.flush(rows)
    >>> asyncio.run(main())
    """
    array._check_open()
    if flag("sync", sync):
        async with InThread(array._synced_name()):
            await submitted(lambda: array._handle().submit_fsync(array._file))


async def append(array: ArrayFile, values: Any) -> None:
    """Append rows to an array.

    Parameters
    ----------
    array : ArrayFile
        The array to append to, open in mode "r+".
    values
        As for ``ArrayFile.append``.

    Raises
    ------
    OSError, TypeError, ValueError
        As ``ArrayFile.append``.
    asyncio.CancelledError
        The task was cancelled.  Nothing was written if it was still waiting for the file's
        lock.  Otherwise the rows were appended anyway, and ``array.shape`` includes them,
        unless that failed.

    Notes
    -----
    If another append holds the file's lock, this one tries again after 1 ms, and then less
    and less often, at least every 50 ms.  Under many blocking appends of others it may wait
    longer than its turn.  Everything else runs in the default executor.

    Examples
    --------
    >>> import asyncio
    >>> async def main():
    ...     with nvmeio.ArrayFile.create("rows.npy", (0, 3), np.int64) as rows:
    ...         await nvmeio.aio.append(rows, [[1, 2, 3]])
    ...         return rows.shape
    >>> asyncio.run(main())
    (1, 3)
    """
    rows = await in_thread(array._rows_to_append, values)
    pause = _PAUSE_MIN_S
    # It retries, so that no thread waits for the lock, and no cancelled task.
    while not await in_thread(partial(array._append_rows, rows, waits=False)):
        await asyncio.sleep(pause)
        pause = min(2 * pause, _PAUSE_MAX_S)
