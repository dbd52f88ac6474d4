"""Whole files in one call, and DeepSpeed's two functions for them."""

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from nvmeio._arguments.checks import flag, integer, path_of, refuse_path, whole
from nvmeio._arguments.keywords import suggesting
from nvmeio._arguments.types import FileLike, Path
from nvmeio._arrays.elements import bytes_of, element_of
from nvmeio._events.calls import BLOCKING, Calls, run
from nvmeio._files.paths import naming, resolved, synced_folder
from nvmeio._files.replacing import become_like, is_replaceable, link, replacement
from nvmeio._memory.registry import library_of_dtype
from nvmeio._native import pool
from nvmeio._native.aio_handle import aio_handle
from nvmeio._native.buffer import Buffer, borrow
from nvmeio._native.file import File, open_for_writing, open_unnamed
from nvmeio.default import default_handle

__all__ = ["aio_read", "aio_write", "read_file", "read_into", "write_file"]


@overload
def read_file(
    path: Path, offset: int = 0, size: int | None = None, dtype: None = None
) -> npt.NDArray[np.uint8]: ...
@overload
def read_file(
    path: Path, offset: int = 0, size: int | None = None, *, dtype: Any
) -> Any: ...
@overload
def read_file(path: Path, offset: int, size: int | None, dtype: Any) -> Any: ...
@suggesting
def read_file(
    path: Path, offset: int = 0, size: int | None = None, dtype: Any = None
) -> Any:
    """Read a file, or a part of it, into new memory.

    Parameters
    ----------
    path : str, bytes or os.PathLike
        The file.
    offset : int, default 0
        Where in the file to begin, in bytes.
    size : int, optional
        How much to read, in bytes, whatever the dtype; default: up to the end of the file.
    dtype : dtype of numpy or torch, default uint8
        What the bytes are elements of.

    Returns
    -------
    numpy.ndarray or torch.Tensor
        One dimension of elements in memory of the pool: writable, and given back when the
        last view has died.  A dtype of torch makes a tensor.

    Raises
    ------
    OSError
        With errno and path: ENODATA where the file ends before ``offset`` plus ``size``.
    MemoryError
        The bytes are more than the memory that is left.
    TypeError, ValueError
        An argument is of the wrong type or out of range, or the bytes are no whole number
        of elements.

    Notes
    -----
    A file that claims to have no bytes, as those in ``/proc`` do, is read by ordinary
    reads up to its end.  Releases the GIL while it waits.  Uses ``default_handle()``.

    Examples
    --------
    >>> nvmeio.write_file(np.arange(6, dtype=np.float32), "values.bin")
    24
    >>> nvmeio.read_file("values.bin", offset=8, size=8, dtype=np.float32)
    array([2., 3.], dtype=float32)
    """
    return run(reading(BLOCKING, path, offset, size, dtype))


async def reading(
    calls: Calls, path: Path, offset: int, size: int | None, dtype: Any
) -> Any:
    """Read a file, or a part of it, as ``read_file`` does."""
    offset = whole("offset", offset, 0, 2**63 - 1)
    if size is not None:
        size = whole("size", size, 0, 2**63 - 1)
    element = np.dtype(np.uint8) if dtype is None else element_of(dtype)
    file, array, left = await calls.call(_opened, path, offset, size, element)
    with file:
        if left:
            handle, lent = default_handle(), bytes_of(array)
            await calls.transfer(handle.read, handle.submit_read, lent, file, offset)
    library = None if dtype is None else library_of_dtype(dtype)
    return array if library is None else library.dress(array, dtype)


def _opened(
    path: Path, offset: int, size: int | None, element: np.dtype[Any]
) -> tuple[File, npt.NDArray[Any], int]:
    """Open a file, and make an array; return also how many bytes are left to be read."""
    file = File(path)
    try:
        end = file.size
        if end == 0:
            data = np.frombuffer(_read_to_the_end(file), np.uint8)
            count = _count_bytes(file, offset, size, len(data), element)
            return file, data[offset : offset + count].view(element), 0
        count = _count_bytes(file, offset, size, end, element)
        if not count:
            return file, np.empty(0, element), 0
        memory = memoryview(pool.PoolMemory(count))
        return file, np.frombuffer(memory, element), count
    except BaseException:
        file.close()
        raise


def _count_bytes(
    file: File, offset: int, size: int | None, end: int, element: np.dtype[Any]
) -> int:
    """Return how many bytes to read of a file that ends at `end`."""
    if offset + (size or 0) > end:
        wanted = f"{size} bytes at offset {offset}" if size else f"offset {offset}"
        raise OSError(errno.ENODATA, f"{wanted} is beyond the end, {end}", file.path)
    count = end - offset if size is None else size
    if element.itemsize == 0:
        raise TypeError(f"elements of dtype {element} have no bytes")
    if count % element.itemsize:
        name = "the rest of the file" if size is None else "size"
        raise ValueError(
            f"{name} is {count} bytes, no multiple of the {element.itemsize} bytes "
            f"of a {element}"
        )
    return count


def _read_to_the_end(file: File) -> bytearray:
    """Read what a file of no known size has to give."""
    with naming(file.path), open(file.fileno(), "rb", closefd=False) as stream:
        return bytearray(stream.read())


@suggesting
def read_into(buffer: Any, file: FileLike, offset: int = 0) -> int:
    """Fill a buffer from a file.

    Parameters
    ----------
    buffer : array, tensor or object with the buffer protocol
        Is filled; of any dtype, shape and strides.
    file : str, bytes, os.PathLike, int, File or file object
        A path, a descriptor or a file object with one; must hold ``offset`` plus the
        buffer's size bytes.
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
    Releases the GIL while it waits.  Uses ``default_handle()``.

    Examples
    --------
    >>> nvmeio.write_file(np.arange(4), "data.bin")
    32
    >>> array = np.empty(2, np.int64)
    >>> nvmeio.read_into(array, "data.bin", offset=16)
    16
    >>> array
    array([2, 3])
    """
    return default_handle().read(buffer, file, offset)


@suggesting
def write_file(buffer: Any, path: Path, *, sync: bool = False, atomic: bool = True) -> int:
    """Make a file of exactly the bytes of a buffer.

    Parameters
    ----------
    buffer : array, tensor or object with the buffer protocol
        Written in C order.
    path : str, bytes or os.PathLike
        The file; created where it does not exist.
    sync : bool, default False
        Return only when the file, and its name, are on the device.
    atomic : bool, default True
        Write another file beside it, sync that, and give it the name: whoever looks, also
        after an error or a power failure, finds the old file or the new one, complete.

    Returns
    -------
    int
        The number of bytes written: the size of the buffer.

    Raises
    ------
    OSError
        With errno and path.
    TypeError, ValueError
        The buffer cannot be written, or an argument is of the wrong type.

    Notes
    -----
    What ``atomic`` costs: room for both files, blocks of the file system that are new each
    time, and one sync.  The new file has the old one's mode, access control list and
    extended attributes, and its owner and group where this user may give them.  A symbolic
    link stays, and the file that it leads to is replaced.  A process that is killed leaves
    nothing behind, but for the moment of renaming and for file systems that have no files
    without a name (O_TMPFILE), as NFS: there ``.nvmeio-*.tmp`` may stay beside the file,
    and may be removed.

    With ``atomic=False``, and where the path leads to a device or to a file that has other
    names (hard links), which it would lose, the file is written in place: a longer one is
    cut only after the bytes have landed, and after an error it holds a part of them.

    A name is made durable by an fsync of the folder that has it, which takes permission to
    read that folder: without it ``sync=True`` is refused before the file is touched.
    Releases the GIL while it waits.  Uses ``default_handle()``.

    Examples
    --------
    >>> nvmeio.write_file(np.arange(4), "data.bin", sync=True)
    32
    """
    return run(writing(BLOCKING, buffer, path, sync=sync, atomic=atomic))


async def writing(
    calls: Calls, buffer: Any, path: Path, *, sync: bool, atomic: bool
) -> int:
    """Make a file of the bytes of a buffer as ``write_file`` does."""
    path = path_of(path)
    sync, atomic = flag("sync", sync), flag("atomic", atomic)
    lent = _borrow(buffer, writable=False)
    handle = default_handle()
    async with calls.entered(new_contents(path, sync=sync, atomic=atomic)) as file:
        await calls.transfer(handle.write, handle.submit_write, lent, file)
        await calls.call(cut, file, lent.nbytes)
        if sync or atomic:
            await calls.transfer(handle.fsync, handle.submit_fsync, file)
    return lent.nbytes


def _borrow(buffer: Any, *, writable: bool) -> Buffer:
    """Take hold of a buffer before there is a request."""
    try:
        return borrow(buffer, writable=writable)
    except TypeError:
        refuse_path(buffer)
        raise


@contextlib.contextmanager
def new_contents(path: str | bytes, *, sync: bool, atomic: bool) -> Iterator[File]:
    """Open a file to be filled from its beginning, then cut and synced."""
    with synced_folder(path) if sync else contextlib.nullcontext():
        if not (atomic and is_replaceable(path)):
            with open_for_writing(path) as file:
                yield file
            return
        with naming(path), file_in_place_of(resolved(path)) as file:
            yield file


@contextlib.contextmanager
def file_in_place_of(target: str, *, read_only: bool = False) -> Iterator[File]:
    """Open a new file that takes the place of another if all goes well.

    Until then it has no name, so that nothing is left of it by who is killed.  A symbolic
    link is replaced itself; the file that it leads to lends the new one nothing.  A file
    that must not be written to is replaced with `read_only` alone.
    """
    is_link = os.path.islink(target)
    is_old = not is_link and os.path.exists(target)
    if is_old and not read_only and not os.access(target, os.W_OK, effective_ids=True):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), target)
    try:
        file = _in_folder(lambda: open_unnamed(os.path.dirname(target)))
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
        # The file system has no files without a name.
        with (
            replacement(target) as temporary,
            _in_folder(lambda: File(temporary, "x")) as file,
        ):
            if not is_link:
                become_like(file.fileno(), target)
            yield file
        return
    with file:
        # Before the bytes, so that whoever syncs these has synced this too.
        if not is_link:
            become_like(file.fileno(), target)
        yield file
        with replacement(target) as temporary:
            link(file.fileno(), temporary)


def _in_folder(create: Callable[[], File]) -> File:
    """Create a file, and say where it was to be where that is not allowed."""
    try:
        return create()
    except PermissionError as error:
        words = f"{error.strerror} (its folder, where the new file is to be made)"
        raise PermissionError(error.errno, words, error.filename) from error


def cut(file: File, size: int) -> None:
    """Cut a file behind its contents; a device has the length that it has."""
    found = os.fstat(file.fileno())
    if found.st_size != size and stat.S_ISREG(found.st_mode):
        file.truncate(size)


@suggesting
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

    Examples
    --------
    >>> options = 1 << 20, 32, False, False, False
    >>> nvmeio.aio_write(np.arange(1000), "data.bin", *options)
    0
    >>> array = np.empty(1000, np.int64)
    >>> nvmeio.aio_read(array, "data.bin", *options)
    0
    """
    with (
        _op(block_size, queue_depth, single_submit, overlap_events) as handle,
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


@suggesting
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

    Examples
    --------
    >>> options = 1 << 20, 32, False, False, False
    >>> nvmeio.aio_write(np.arange(1000), "data.bin", *options)
    0
    """
    lent = _borrow(buffer, writable=False)
    with (
        _op(block_size, queue_depth, single_submit, overlap_events) as handle,
        open_for_writing(filename) as file,
    ):
        status = handle.write(lent, file, validate)
        cut(file, lent.nbytes)
    return status


def _op(
    block_size: int, queue_depth: int, single_submit: bool, overlap_events: bool
) -> aio_handle:
    """Open a handle of numbers: None stands elsewhere for what the environment says."""
    sizes = integer("block_size", block_size), integer("queue_depth", queue_depth)
    return aio_handle(*sizes, single_submit, overlap_events)
