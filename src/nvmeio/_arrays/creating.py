"""Create the file of an array, or replace the contents of one."""

import errno
import fcntl
import os
from typing import Any

import numpy as np

from nvmeio._arrays.npy_header import Layout, check_extents, header_of
from nvmeio._files.descriptors import Descriptor, best_effort
from nvmeio._files.locks import locked_header
from nvmeio._files.paths import naming

__all__ = ["create_file"]


def create_file(
    path: str | bytes,
    element: np.dtype[Any],
    extents: tuple[int, ...],
    *,
    raw: bool,
    overwrite: bool,
) -> None:
    """Create a file of zeros; an error leaves none, or with ``overwrite`` the old one."""
    # Check everything before truncating a file.
    header = b"" if raw else header_of(extents, element)
    size = Layout(element, extents, len(header)).nbytes + len(header)
    if size > 2**63 - 1:
        raise ValueError(
            f"an array of shape {extents} needs a file of {size} bytes, too many; the "
            "limit is 2**63 - 1"
        )
    check_extents(extents, element)
    made, before, old = Descriptor(), None, b""
    with naming(path), made:
        try:
            _open_anew(made, path, overwrite=overwrite)
            file = made.number
            with locked_header(file, fcntl.F_WRLCK):
                before = os.fstat(file).st_size
                # Extend it first: if the file system refuses the size, nothing is lost.
                os.ftruncate(file, max(size, before))
                old = os.pread(file, len(header), 0)
                if os.pwrite(file, header, 0) != len(header):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                # From here on, the old contents are gone.
                before = None
                made.clear(len(header), size)
            made.check_written()
        except BaseException:
            if not overwrite and made.number >= 0:
                os.unlink(path)
            elif before is not None:
                # On a full drive, writing zeros to a hole may fail; it reads as zeros.
                with locked_header(made.number, fcntl.F_WRLCK):
                    with best_effort():
                        os.pwrite(made.number, old, 0)
                    os.ftruncate(made.number, before)
            raise


def _open_anew(file: Descriptor, path: str | bytes, *, overwrite: bool) -> None:
    """Create a file, or open one that ``overwrite`` permits the caller to truncate."""
    try:
        file.open(path, os.O_RDWR | os.O_CREAT | (0 if overwrite else os.O_EXCL))
    except FileExistsError as error:
        words = f"{error.strerror}; overwrite=True replaces its contents"
        raise FileExistsError(error.errno, words, path) from None
