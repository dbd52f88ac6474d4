"""Read and write whole files in one call."""

import contextlib
import errno
import os
from collections.abc import Iterator
from mmap import PAGESIZE
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from nvmeio._arguments.checks import flag, path_of, whole
from nvmeio._arguments.types import FileLike, Path
from nvmeio._arrays.elements import element_of
from nvmeio._files.descriptors import cut
from nvmeio._files.paths import naming
from nvmeio._memory.registry import library_of_dtype
from nvmeio._native import pool
from nvmeio._native.buffer import borrow
from nvmeio._native.file import File
from nvmeio._publish.files import new_contents
from nvmeio._publish.mapped import apart
from nvmeio.default import default_handle

__all__ = ["read_file", "read_into", "write_file"]


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
def read_file(
    path: Path, offset: int = 0, size: int | None = None, dtype: Any = None
) -> Any:
    """Read a file, or part of it, into new memory.

    Parameters
    ----------
    path : str, bytes or os.PathLike
        The file.
    offset : int, default 0
        The position in the file, in bytes.
    size : int, optional
        How much to read, in bytes, not elements; default: up to the end of the file.
    dtype : dtype of numpy or torch, default uint8
        The type of the elements.

    Returns
    -------
    numpy.ndarray or torch.Tensor
        A one-dimensional, writable array; a tensor if ``dtype`` is torch's.  Its memory
        belongs to the pool, and returns there when the last view dies.

    Raises
    ------
    OSError
        The file cannot be read; has errno and path.  ENODATA: it ends before ``offset``
        plus ``size``.
    MemoryError
        Not enough memory, or over the limit that ``NVMEIO_POOL_BYTES`` sets.
    TypeError, ValueError
        An argument is of the wrong type or out of range, or the size is not a multiple of
        the element's.

    Notes
    -----
    A file of ``/sys``, or one that reports a size of 0, like those in ``/proc``, is read to
    its end by ordinary reads.  Releases the GIL while it waits.  Uses ``default_handle()``.

    Examples
    --------
    >>> nvmeio.write_file(np.arange(6, dtype=np.float32), "values.bin")
    24
    >>> nvmeio.read_file("values.bin", offset=8, size=8, dtype=np.float32)
    array([2., 3.], dtype=float32)
    """
    with opened_for(path, offset, size, dtype) as (file, array, left):
        if left:
            default_handle().read(array, file, offset)
    return as_dtype(array, dtype)


@contextlib.contextmanager
def opened_for(
    path: Path, offset: int, size: int | None, dtype: Any
) -> Iterator[tuple[File, npt.NDArray[Any], int]]:
    """Open a file and make an array; also yield how many bytes are still to be read."""
    offset = whole("offset", offset, 0, 2**63 - 1)
    if size is not None:
        size = whole("size", size, 0, 2**63 - 1)
    element = np.dtype(np.uint8) if dtype is None else element_of(dtype)
    with File(path) as file:
        end, count = file.size, 0
        if end == 0 or _is_of_sysfs(file, end):
            data = np.frombuffer(_read_to_the_end(file), np.uint8)
            nbytes = _count_bytes(file, offset, size, len(data), element)
            array = data[offset : offset + nbytes].view(element)
        else:
            count = _count_bytes(file, offset, size, end, element)
            array = np.empty(0, element)
        if count:
            array = np.frombuffer(memoryview(pool.PoolMemory(count)), element)
        yield file, array, count


def as_dtype(array: npt.NDArray[Any], dtype: Any) -> Any:
    """Return an array, or a tensor of its memory if the dtype is a tensor's."""
    library = None if dtype is None else library_of_dtype(dtype)
    return array if library is None else library.to_tensor(array, dtype)


def _is_of_sysfs(file: File, size: int) -> bool:
    """Return whether a file's size is not its own: in sysfs it is that of a page."""
    if size != PAGESIZE or os.fstat(file.fileno()).st_blocks:
        return False
    return os.path.realpath(os.fsdecode(file.path)).startswith("/sys/")


def _count_bytes(
    file: File, offset: int, size: int | None, end: int, element: np.dtype[Any]
) -> int:
    """Return how many bytes to read of a file that ends at `end`."""
    if offset + (size or 0) > end:
        wanted = f"offset {offset} plus size {size}" if size else f"offset {offset}"
        raise OSError(
            errno.ENODATA, f"{wanted} is beyond the end of the file, {end}", file.path
        )
    count = end - offset if size is None else size
    if element.itemsize == 0:
        raise TypeError(f"elements of dtype {element} have no bytes")
    if count % element.itemsize:
        name = "the rest of the file" if size is None else "size"
        raise ValueError(
            f"{name} is {count} bytes; it must be a multiple of {element.itemsize}, the "
            f"size of {element}"
        )
    return count


def _read_to_the_end(file: File) -> bytearray:
    """Read a file of unknown size to its end."""
    with naming(file.path), open(file.fileno(), "rb", closefd=False) as stream:
        return bytearray(stream.read())


def read_into(buffer: Any, file: FileLike, offset: int = 0) -> int:
    """Fill a buffer from a file.

    Parameters
    ----------
    buffer : array, tensor or object with the buffer protocol
        The memory to fill; of any dtype, shape and strides.
    file : str, bytes, os.PathLike, int, File or file object
        A path, a descriptor or a file object with a descriptor.  The file must have at
        least ``offset`` plus the buffer's size bytes.
    offset : int, default 0
        The position in the file, in bytes.

    Returns
    -------
    int
        The number of bytes read, which is the size of the buffer.

    Raises
    ------
    OSError
        The file cannot be read; has errno and path.  ENODATA: it ends before the buffer is
        full.
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


def write_file(buffer: Any, path: Path, *, sync: bool = False, atomic: bool = True) -> int:
    """Write exactly the bytes of a buffer to a file.

    Parameters
    ----------
    buffer : array, tensor or object with the buffer protocol
        The bytes to write, in C order.
    path : str, bytes or os.PathLike
        The file; created if it does not exist.
    sync : bool, default False
        Return only when the file and its name are on the device.  With False, a
        power failure soon afterwards may still leave the old file.
    atomic : bool, default True
        Write and sync a new file beside the old one, then rename it.  At any time, also
        after an error or a power failure, the path leads either to the old file or to the
        complete new one.

    Returns
    -------
    int
        The number of bytes written, which is the size of the buffer.

    Raises
    ------
    OSError
        The file cannot be written; has errno and path.
    MemoryError
        The file is written in place and the data are mapped from it, so they are copied
        first, and there is not enough memory for that.  The file is unchanged.
    TypeError, ValueError
        The buffer cannot be written, or an argument is of the wrong type.

    Notes
    -----
    ``atomic`` costs space for both files, newly allocated blocks of the file system, and a
    sync.  The new file has the old one's mode, access control list and extended attributes,
    and its owner and group if this user may set them.  If the path is a symbolic link, the
    file that it leads to is replaced; in a folder like /tmp, only if the link belongs to
    this user or to the folder's owner.  A process that is killed leaves no temporary file,
    except at the moment of renaming, and on file systems without O_TMPFILE, such as NFS:
    there ``.NAME.*.nvmeio-tmp`` may be left beside the file; ``checkpoint.cleanup``
    removes it.

    Other hard links of the old file keep its contents, as in a copy that ``cp -al`` made.
    The file is written in place with ``atomic=False``, and also if it is a device, a mount
    point (a file that is mounted into a container), or an open file in ``/proc``.  A longer
    file is then truncated only after the bytes were written, and after an error or a power
    failure it may have some of them.

    An fsync of its directory makes a name durable.  That needs permission to read the
    directory; without it, ``sync=True`` raises before the file is changed.  Releases the
    GIL while it waits.  Uses ``default_handle()``.

    Examples
    --------
    >>> nvmeio.write_file(np.arange(4), "data.bin", sync=True)
    32
    """
    path, sync, atomic = path_of(path), flag("sync", sync), flag("atomic", atomic)
    held, handle = borrow(buffer, writable=False), default_handle()
    with new_contents(path, sync=sync, atomic=atomic) as file:
        handle.write(apart(held, file), file)
        cut(file, held.nbytes)
        if sync or atomic:
            handle.fsync(file)
    return held.nbytes


@contextlib.contextmanager
def opened_for_reading(file: FileLike) -> Iterator[File]:
    """Open a file as a request that names it would; a ``File`` stays open."""
    found = default_handle()._open(file)
    try:
        yield found
    finally:
        if found is not file:
            found.close()
