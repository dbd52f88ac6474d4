"""Create the file of an array, or replace the contents of one."""

import contextlib
import errno
import fcntl
import os
from typing import IO, Any

import numpy as np

from nvmeio._arrays.npy_header import Layout, check_extents, header_of
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
    with (
        naming(path),
        opened_anew(path, overwrite=overwrite) as stream,
        locked_header(stream.fileno(), fcntl.F_WRLCK),
    ):
        before, old = os.fstat(stream.fileno()).st_size, b""
        try:
            # Extend it first: if the file system refuses the size, nothing is lost.
            stream.truncate(max(size, before))
            old = os.pread(stream.fileno(), len(header), 0)
            if stream.write(header) != len(header):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except BaseException:
            if overwrite:
                # On a full drive, writing zeros to a hole may fail; it reads as zeros.
                with contextlib.suppress(OSError):
                    os.pwrite(stream.fileno(), old, 0)
                os.ftruncate(stream.fileno(), before)
            else:
                os.unlink(path)
            raise
        stream.truncate(len(header))
        stream.truncate(size)


def opened_anew(path: str | bytes, *, overwrite: bool) -> IO[bytes]:
    """Create a file, or open one that ``overwrite`` permits the caller to truncate."""
    flags = os.O_RDWR | os.O_CREAT | (0 if overwrite else os.O_EXCL)
    try:
        # Without a buffer, which close() would write out after an error, too.
        return open(path, "r+b", 0, opener=lambda name, _: os.open(name, flags, 0o666))
    except FileExistsError as error:
        words = f"{error.strerror}; overwrite=True replaces its contents"
        raise FileExistsError(error.errno, words, path) from None
