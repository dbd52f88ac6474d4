"""Whole .npy files: an array or a tensor saved, an array loaded."""

import contextlib
import errno
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from nvmeio._elements import bytes_of, storable
from nvmeio._npy import header_of, read_layout
from nvmeio._registry import library_of
from nvmeio._replacing import create_like, replacement
from nvmeio._types import Path
from nvmeio.arguments import flag, path_of
from nvmeio.file import File
from nvmeio.files import naming, synced_folder
from nvmeio.handle import aio_handle
from nvmeio.memory import empty
from nvmeio.request import Request, wait_or_cancel

__all__ = ["load", "save"]


def load(path: Path) -> npt.NDArray[Any]:
    """Read a whole .npy file.

    Parameters
    ----------
    path : str, bytes or os.PathLike
        A file of version 1 to 3, in C or Fortran order.

    Returns
    -------
    numpy.ndarray
        What ``numpy.load`` returns, in memory of the pool.

    Raises
    ------
    OSError
        With errno and path.
    MemoryError
        The array is larger than the memory that is left.
    TypeError
        ``path`` is no path.
    ValueError
        It is no .npy file, holds Python objects, or ends before the array does.

    Notes
    -----
    Releases the GIL while it waits.
    """
    with File(path) as file:
        layout = read_layout(file)
        shape = layout.shape[::-1] if layout.fortran else layout.shape
        array = empty(shape, layout.dtype)
        if array.nbytes:
            with aio_handle() as handle:
                wait_or_cancel(handle.submit_read(bytes_of(array), file, layout.offset))
    return array.T if layout.fortran else array


def save(path: Path, array: Any, *, sync: bool = False) -> None:
    """Write an array or a tensor as a .npy file.

    Parameters
    ----------
    path : str, bytes or os.PathLike
        The file, as it is named: no suffix is added.  One that exists is replaced by a new
        one, once that is complete; until then, and after an error, it stays as it was.
    array : array_like or tensor
        Of a dtype that numpy has, of any strides and device; written in C order.
    sync : bool, default False
        Return only when the file, and its name, are on the device.

    Raises
    ------
    OSError
        With errno and path.
    TypeError
        The elements are Python objects or, like bfloat16, of no dtype of numpy's; an
        argument is of the wrong type.

    Notes
    -----
    Releases the GIL while it waits.  The folder must have room for both files.  Without
    ``sync``, a power failure may leave the name with an incomplete file.
    """
    path, sync = path_of(path), flag("sync", sync)
    dtype, shape, source = _source_of(array)
    target = os.path.realpath(os.fsdecode(path))
    with naming(path):
        if os.path.exists(target) and not os.path.isfile(target):
            raise OSError(errno.EINVAL, "it is no regular file, to be replaced")
    with (
        naming(path),
        synced_folder(path) if sync else contextlib.nullcontext(),
        replacement(target) as temporary,
    ):
        create_like(temporary, target)
        _write(temporary, header_of(shape, dtype), source, sync=sync)


def _write(path: str, header: bytes, source: Any, *, sync: bool) -> None:
    """Make a file of a header and what follows it."""
    with aio_handle() as handle, File(path, "r+") as file:
        _finish(
            [
                handle.submit_write(header, file),
                handle.submit_write(source, file, len(header)),
            ]
        )
        if sync:
            handle.fsync(file)


def _finish(requests: list[Request]) -> None:
    """Wait for all requests, and raise the first error of any."""
    first = None
    try:
        for request in requests:
            try:
                wait_or_cancel(request)
            except OSError as error:
                first = first or error
    except BaseException:
        for request in requests:
            request.cancel()
        for request in requests:
            with contextlib.suppress(Exception):
                request.wait()
        raise
    if first is not None:
        raise first


def _source_of(array: Any) -> tuple[np.dtype[Any], tuple[int, ...], Any]:
    """Return dtype, shape and memory of what is to be saved."""
    library = library_of(array)
    if library is not None:
        return storable(array.dtype), tuple(array.shape), array
    found = np.asarray(array)
    dtype = storable(found.dtype)
    return dtype, found.shape, bytes_of(np.ascontiguousarray(found))
