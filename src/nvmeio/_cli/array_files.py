"""List the arrays of .npy and .npz files."""

import contextlib
import io
import os
import zipfile
import zlib
from typing import IO, Any

from nvmeio._arrays.npy_header import (
    MALFORMED,
    Layout,
    has_magic,
    layout_in,
    read_layout,
)
from nvmeio._native.file import File
from nvmeio._tensors.torch_files import begin_of, cut_entries

__all__ = ["is_npz", "npy_contents", "npz_contents"]

# How much of a member is decompressed: the longest header that numpy reads, and its length.
_HEAD_BYTES = 64 << 10

# What numpy and zipfile raise for damaged archives.
_DAMAGED = (
    *MALFORMED,
    EOFError,
    NotImplementedError,
    OSError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
)


def npy_contents(path: str) -> dict[str, Any] | None:
    """Return the contents of a .npy file; None for other files."""
    with File(path, direct=False) as file:
        if not has_magic(file):
            return None
        head = io.BytesIO(os.pread(file.fileno(), _HEAD_BYTES, 0))
        with contextlib.suppress(*MALFORMED):
            layout = layout_in(head)
            if layout.dtype.hasobject:
                # Of these, read_layout() would say only that it does not unpickle them.
                said = {"order": _order(layout.fortran), "pickled": "Python objects"}
                one = _array("", layout, layout.offset)
                return {"format": "npy", "metadata": said, "tensors": [one]}
        layout = read_layout(file, shared=False)
    one = _array("", layout, layout.offset)
    said = {"order": _order(layout.fortran)}
    return {"format": "npy", "metadata": said, "tensors": [one]}


def _order(fortran: bool) -> str:
    return "Fortran" if fortran else "C"


def is_npz(archive: zipfile.ZipFile) -> bool:
    """Return whether a zip archive is one of numpy.savez, perhaps without arrays."""
    names = archive.namelist()
    # Without entries nothing may be before the directory.
    whole = bool(names) or archive.start_dir == 0
    return whole and all(name.endswith(".npy") for name in names)


def npz_contents(path: str, file: IO[bytes], archive: zipfile.ZipFile) -> dict[str, Any]:
    """Return the contents of a .npz file; compressed arrays have no offset."""
    found = []
    problems = [f"{path}: {words}" for words in cut_entries(file, archive)]
    for entry in archive.infolist():
        name = entry.filename.removesuffix(".npy")
        try:
            layout, begin = _member(file, archive, entry)
        except _DAMAGED as error:
            problems.append(f"{path}: its array {name!r:.200}: {error}")
            continue
        needed = layout.offset + layout.nbytes
        if entry.file_size < needed and not layout.dtype.hasobject:
            problems.append(
                f"{path}: its array {name!r:.200} was truncated: it has {entry.file_size} "
                f"bytes, and its header says {needed}"
            )
        found.append(_array(name, layout, begin))
    contents = {"format": "npz", "metadata": None, "tensors": found}
    return {**contents, "problems": problems}


def _member(
    file: IO[bytes], archive: zipfile.ZipFile, entry: zipfile.ZipInfo
) -> tuple[Layout, int | None]:
    """Return the layout of an array, and its offset in the file unless it is compressed."""
    # Those of other methods could claim gigabytes for their tables.
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"it is compressed by method {entry.compress_type}")
    if entry.compress_type == zipfile.ZIP_DEFLATED:
        with archive.open(entry) as stream:
            return layout_in(io.BytesIO(stream.read(_HEAD_BYTES))), None
    begin = begin_of(file, entry)
    file.seek(begin)
    head = file.read(min(_HEAD_BYTES, entry.file_size))
    layout = layout_in(io.BytesIO(head))
    return layout, begin + layout.offset


def _array(name: str, layout: Layout, offset: int | None) -> dict[str, Any]:
    return {
        "name": name,
        "dtype": str(layout.dtype),
        "shape": list(layout.shape),
        "bytes": layout.nbytes,
        "offset": offset,
    }
