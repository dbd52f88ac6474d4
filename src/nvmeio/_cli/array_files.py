"""List the arrays of .npy and .npz files."""

import contextlib
import io
import os
import zipfile
import zlib
from typing import Any

import numpy as np

from nvmeio._arrays.npy_header import has_magic, header_in, read_layout
from nvmeio._cli.arguments import CommandError
from nvmeio._native.file import File
from nvmeio._tensors.torch_files import begin_of

__all__ = ["is_npz", "npy_contents", "npz_contents"]

# How much of a member is decompressed: the longest header that numpy reads, and its length.
_HEAD_BYTES = 64 << 10

# What numpy and zipfile raise for damaged archives.
_DAMAGED = (
    EOFError,
    NotImplementedError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    zipfile.BadZipFile,
    zlib.error,
)


def npy_contents(path: str) -> dict[str, Any] | None:
    """Return the contents of a .npy file; None for other files."""
    with File(path, direct=False) as file:
        if not has_magic(file):
            return None
        head = io.BytesIO(os.pread(file.fileno(), _HEAD_BYTES, 0))
        with contextlib.suppress(Exception):
            shape, fortran, dtype = header_in(head)
            if dtype.hasobject:
                # Of these, read_layout() would say only that it does not unpickle them.
                one = _array("", dtype, shape, head.tell())
                said = {"order": _order(fortran), "pickled": "Python objects"}
                return {"format": "npy", "metadata": said, "tensors": [one]}
        layout = read_layout(file, shared=False)
    one = _array("", layout.dtype, layout.shape, layout.offset)
    said = {"order": _order(layout.fortran)}
    return {"format": "npy", "metadata": said, "tensors": [one]}


def _order(fortran: bool) -> str:
    return "Fortran" if fortran else "C"


def is_npz(path: str) -> bool:
    """Return whether a zip archive is one of numpy.savez."""
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
    return bool(names) and all(name.endswith(".npy") for name in names)


def npz_contents(path: str) -> dict[str, Any]:
    """Return the contents of a .npz file; compressed arrays have no offset."""
    found = []
    with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            name = entry.filename.removesuffix(".npy")
            try:
                with archive.open(entry) as stream:
                    head = io.BytesIO(stream.read(_HEAD_BYTES))
                shape, _, dtype = header_in(head)
                stored = entry.compress_type == zipfile.ZIP_STORED
                begin = begin_of(file, entry) + head.tell() if stored else None
            except _DAMAGED as error:
                raise CommandError(f"{path}: its array {name!r}: {error}") from None
            found.append(_array(name, dtype, shape, begin))
    return {"format": "npz", "metadata": None, "tensors": found}


def _array(
    name: str, dtype: np.dtype[Any], shape: tuple[int, ...], offset: int | None
) -> dict[str, Any]:
    # In Python's integers, because numpy's overflow.
    nbytes = dtype.itemsize
    for extent in shape:
        nbytes *= extent
    return {
        "name": name,
        "dtype": str(dtype),
        "shape": list(shape),
        "bytes": nbytes,
        "offset": offset,
    }
