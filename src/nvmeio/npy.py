"""Save an array or tensor as a .npy file, and load an array."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from nvmeio._arguments.checks import flag, path_of, refuse_masked
from nvmeio._arguments.types import Path
from nvmeio._arrays.elements import storable
from nvmeio._arrays.npy_header import Layout, header_of, read_layout
from nvmeio._files.descriptors import cut
from nvmeio._memory.registry import library_of
from nvmeio._memory.strides import without_fields
from nvmeio._native.buffer import Buffer, borrow
from nvmeio._native.file import File
from nvmeio._publish.files import new_contents
from nvmeio._publish.mapped import apart
from nvmeio.default import default_handle
from nvmeio.memory import empty

__all__ = ["load", "save"]


def load(path: Path) -> npt.NDArray[Any]:
    """Read a whole .npy file.

    Parameters
    ----------
    path : str, bytes or os.PathLike
        A .npy file of version 1 to 3, in C or Fortran order.

    Returns
    -------
    numpy.ndarray
        The same as from ``numpy.load``, in memory of the pool.

    Raises
    ------
    OSError
        The file cannot be read; has errno and path.
    MemoryError
        Not enough memory, or over the limit that ``NVMEIO_POOL_BYTES`` sets.
    TypeError
        ``path`` is not a path.
    ValueError
        The file is not a .npy file, contains Python objects, or ends before its array.

    Notes
    -----
    What the page cache does not have is read past it, and does not fill it.
    Releases the GIL while it waits.  Uses ``default_handle()``.

    Examples
    --------
    >>> nvmeio.save("data.npy", np.arange(4))
    >>> nvmeio.load("data.npy")
    array([0, 1, 2, 3])
    """
    with opened_npy(path) as (file, layout, array):
        if array.nbytes:
            default_handle().read(array, file, layout.offset)
    return array.T if layout.fortran else array


@contextlib.contextmanager
def opened_npy(path: Path) -> Iterator[tuple[File, Layout, npt.NDArray[Any]]]:
    """Open a file, read its header, and allocate an array for its elements."""
    with File(path) as file:
        layout = read_layout(file, shared=False)
        shape = layout.shape[::-1] if layout.fortran else layout.shape
        yield file, layout, empty(shape, layout.dtype)


def save(path: Path, array: Any, *, sync: bool = False, atomic: bool = True) -> None:
    """Write an array or a tensor as a .npy file.

    Parameters
    ----------
    path : str, bytes or os.PathLike
        The file; no suffix is added.  An existing file is replaced by the new one once that
        is complete and synced.  Until then, and after an error, it does not change.
    array : array_like or tensor
        The array, with a dtype that numpy has, and any strides and device; written in C
        order.
    sync : bool, default False
        Return only when the file and its name are on the device.  With False, a
        power failure soon afterwards may still leave the old file.
    atomic : bool, default True
        As for ``write_file``; with False the file is written in place.

    Raises
    ------
    OSError
        The file cannot be written; has errno and path.
    MemoryError
        The file is written in place and the data are mapped from it, so they are copied
        first, and there is not enough memory for that.  The file is unchanged.
    TypeError
        The elements are Python objects, or have a dtype that numpy lacks, such as bfloat16;
        or an argument is of the wrong type.

    Notes
    -----
    The array begins at byte 4096, where drives can transfer it without a copy.  Works as
    ``write_file(..., atomic=True)``: see there for its cost, and for files that
    are written in place.  Releases the GIL while it waits.  Uses ``default_handle()``.

    Examples
    --------
    >>> nvmeio.save("data.npy", np.arange(4), sync=True)
    >>> np.load("data.npy")
    array([0, 1, 2, 3])
    """
    path, sync, atomic = path_of(path), flag("sync", sync), flag("atomic", atomic)
    header, source = header_and_source(array)
    handle = default_handle()
    with new_contents(path, sync=sync, atomic=atomic) as file:
        source = apart(source, file)
        handle.write(header, file)
        handle.write(source, file, len(header))
        cut(file, len(header) + source.nbytes)
        handle.fsync(file)


def header_and_source(array: Any) -> tuple[bytes, Buffer]:
    """Return the header and the memory of the array or tensor to save."""
    if library_of(array) is not None:
        header = header_of(tuple(array.shape), storable(array.dtype), long=True)
        return header, borrow(array, writable=False)
    refuse_masked("array", array)
    found = np.asarray(array)
    header = header_of(found.shape, storable(found.dtype), long=True)
    return header, borrow(np.ascontiguousarray(without_fields(found)), writable=False)
