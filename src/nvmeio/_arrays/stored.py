"""The array that an open file has: found when the file is opened, and looked for again."""

import errno
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from nvmeio._arguments.checks import Shape, extents_of, whole
from nvmeio._arrays.elements import Elements, element_of
from nvmeio._arrays.npy_header import Layout, check_size, has_magic, read_layout
from nvmeio._files.kinds import because_of_kind
from nvmeio._files.locks import header_for_reading, locked_for_reading
from nvmeio._files.paths import absolute, has_name, leads_to, naming
from nvmeio._memory.registry import library_of_dtype
from nvmeio._native.file import File

__all__ = ["StoredArray"]


class StoredArray:
    """The array in an open file, with the shape that was last seen.

    Only ``append`` and ``refresh`` change the layout, by replacing it.  Both hold a lock
    from looking at the file until then: of a .npy file that of its header, of raw bytes
    that of the file.  So no thread restores a shape that another has replaced.
    """

    def __init__(self, file: File, dtype: Any, shape: Shape | None, offset: int) -> None:
        self.file, self._absolute = file, absolute(file.path)
        # The arguments for opening the file again, and whether it has raw bytes.
        self.arguments = {"dtype": dtype, "shape": shape, "offset": offset}
        self.raw = False
        # Whether the size of a file of raw bytes determines how many rows it has.
        self.grows = True
        if dtype is None:
            self.layout = self._npy_layout()
            self.elements = Elements(self.layout.dtype)
            return
        library = library_of_dtype(dtype)
        self.elements = Elements(element_of(dtype), library, dtype if library else None)
        offset = whole("offset", offset, 0, 2**63 - 1)
        if offset or not has_magic(file):
            self.raw = True
            # An append in progress may have written a part of a row.
            with naming(file.path), locked_for_reading(file):
                self.layout = self._raw_layout(-1 if shape is None else shape, offset)
                end = offset + self.layout.nbytes
                self.grows = bool(self.layout.shape and self.row_bytes and file.size == end)
            return
        self.layout = self._npy_layout()
        if self.elements.dtype != self.layout.dtype:
            raise ValueError(
                f"{file.path!r} is a .npy file of dtype {self.layout.dtype}; the dtype "
                f"passed is {self.elements.shown}.  To read it as raw bytes, pass the "
                f"offset of its data, {self.layout.offset}"
            )

    @property
    def row_bytes(self) -> int:
        """The size of a row."""
        return math.prod(self.layout.shape[1:]) * self.layout.dtype.itemsize

    def _npy_layout(self) -> Layout:
        """Read the header of a .npy file, when it is opened."""
        for name, default in (("shape", None), ("offset", 0)):
            value = self.arguments[name]
            if value is not default and value != default:
                raise ValueError(
                    f"{name} is {value!r}; pass it for raw bytes only, with a dtype: a "
                    ".npy file has it in its header"
                )
        path = self.file.path
        if not has_magic(self.file):
            raise ValueError(
                f"{path!r} is not a .npy file{because_of_kind(self.file.fileno())}; with "
                "dtype= it is read as raw bytes.  "
                "Save an array that is inside an archive (.npz, .pt) by itself first"
            )
        layout = read_layout(self.file, shared=True)
        if layout.fortran:
            raise ValueError(
                f"{path!r} is in Fortran order, so its rows are not contiguous; read "
                "all of it with nvmeio.load(), or nvmeio.save() it anew"
            )
        return layout

    def _raw_layout(self, shape: Shape, offset: int) -> Layout:
        """Return the layout of raw bytes; the file's size replaces an extent of -1."""
        path, size, dtype = self.file.path, self.file.size, self.elements.dtype
        axes = list(shape) if isinstance(shape, Sequence | np.ndarray) else [shape]
        unknown = [place for place, extent in enumerate(axes) if extent == -1]
        if unknown:
            known = extents_of([extent for extent in axes if extent != -1])
            row_bytes = math.prod(known) * dtype.itemsize
            if len(unknown) > 1 or row_bytes == 0:
                raise ValueError(
                    f"the shape is {tuple(axes)} with elements of {dtype.itemsize} bytes; "
                    "only one extent may be -1, and the others and the elements must not "
                    "be of size 0"
                )
            if offset > size or (size - offset) % row_bytes:
                raise ValueError(
                    f"{path!r} has {size} bytes; those after offset {offset} must be a "
                    f"multiple of {row_bytes}, for the shape {tuple(axes)} and the dtype "
                    f"{dtype}"
                )
            axes[unknown[0]] = (size - offset) // row_bytes
        layout = Layout(dtype, extents_of(axes), offset)
        check_size(path, size, layout)
        return layout

    def layout_now(self) -> Layout:
        """Return the current layout of the file: another process may have appended."""
        if not self._has_name():
            words = "the file was replaced or removed since it was opened"
            raise OSError(errno.ESTALE, words)
        seen = self.layout
        if not self.raw:
            layout = read_layout(self.file, shared=True)
        elif self.grows:
            layout = self._raw_layout((-1, *seen.shape[1:]), seen.offset)
        else:
            layout = seen
        same = (layout.dtype, layout.offset) == (seen.dtype, seen.offset)
        if not same or layout.fortran or layout.shape[1:] != seen.shape[1:]:
            raise ValueError(
                f"{self.file.path!r} now has another array, of shape {layout.shape} and "
                f"dtype {layout.dtype}; open it again"
            )
        return layout

    def _has_name(self) -> bool:
        """Return whether the path still leads to the file; other links may be copies."""
        descriptor = self.file.fileno()
        try:
            return leads_to(self._absolute, descriptor)
        except PermissionError as error:
            if error.errno is None:
                # A signal handler raised it.
                raise
            # This user cannot look there any more.
            return has_name(descriptor)

    def refresh(self) -> None:
        """See the rows that others have appended."""
        lock = locked_for_reading if self.raw else partial(header_for_reading, shared=True)
        with naming(self.file.path), lock(self.file):
            self.take(self.layout_now())

    def take(self, layout: Layout) -> None:
        """Take the layout that the file has now."""
        self.layout = layout
        if self.raw and self.grows:
            self.arguments["shape"] = (-1, *layout.shape[1:])
