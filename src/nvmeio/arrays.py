"""Arrays on disk: numpy's indexing, rows and windows, without mapping the file.

indexing.py finds the elements that an index selects, and npy_header.py parses headers.
This module turns them into reads, writes, gathers and scatters of a handle.
"""

import contextlib
import errno
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import IO, TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from nvmeio._arguments.checks import Shape, extents_of, flag, path_of, whole, word
from nvmeio._arguments.types import Path
from nvmeio._arrays.elements import Elements, bytes_of, element_of
from nvmeio._arrays.indexing import (
    Selection,
    last_of_each,
    select,
    select_rows,
    select_windows,
    strides_of,
)
from nvmeio._arrays.npy_header import (
    Layout,
    check_extents,
    check_size,
    has_magic,
    header_of,
    read_layout,
    replace_shape,
)
from nvmeio._arrays.operators import Unread
from nvmeio._files.descriptors import opened
from nvmeio._files.locks import FileLock, locked_for_reading
from nvmeio._files.paths import absolute, naming, synced_folder
from nvmeio._memory.registry import library_of, library_of_dtype
from nvmeio._native.buffer import borrow
from nvmeio._native.copy import memcpy
from nvmeio._native.file import File
from nvmeio._native.gather import Deferred
from nvmeio._native.handle import Handle
from nvmeio._native.request import Request
from nvmeio.default import default_handle

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ArrayFile"]

Array = npt.NDArray[Any]

# Runs whose average distance is at most this are read together with the gaps between them.
# It is about the memory that a gather needs for each run, in arrays and in the engine.
_SPACING_BYTES = 64

# A single run up to this size is read in the calling thread, which costs less than
# switching to a worker; workers share a larger one in blocks.
_CALLER_BYTES_MAX = 1 << 20

# How much an iteration reads at once.
_PART_BYTES = 4 << 20

# As DLPack numbers devices.
_DLPACK_CPU = 1

After = Request | Iterable[Request] | None


@dataclass(frozen=True)
class _Transfer:
    """Records of a file, and the memory to read them into or write them from."""

    offsets: Any  # of the records, in bytes
    nbytes: int  # of each
    memory: Any
    result: Any = None
    # Makes the result once the memory is filled; None if it exists before.
    make: Callable[[], Any] | None = None


class ArrayFile(Unread):
    """An array in a file; indexing reads only the selected elements.

    Parameters
    ----------
    path : str, bytes or os.PathLike
        A .npy file of version 1 to 3 in C order; or, if ``dtype`` is given, raw bytes.
    dtype : dtype of numpy or torch, optional
        The dtype of raw bytes; or that of a .npy file, which must match its header.  With a
        torch dtype, every result is a tensor.
    shape : int or sequence of int, optional
        The shape of raw bytes.  One extent may be -1; the size of the file determines it.
        By default one axis, up to the end of the file.
    offset : int, default 0
        Where raw bytes begin in the file, in bytes.
    mode : {"r", "r+"}, default "r"
        "r+" permits assignments too.
    handle : Handle, optional
        The handle to read and write with; it is not closed.  Default: ``default_handle()``.

    Raises
    ------
    OSError
        The file cannot be opened or read; has errno and path.
    TypeError
        An argument is of the wrong type, or the elements are Python objects.
    ValueError
        The file is not a .npy file, is in Fortran order, contains Python objects, ends
        before its array, or has another dtype than the one passed; or an argument is out of
        range.

    Notes
    -----
    Thread-safe, except for assignments to the same elements.  Every call releases the GIL
    while it waits.  Pickling stores the path; the copy opens the file again.  Forked
    children can use it.

    Opening raw bytes waits while another holds the file's lock (flock), as an append does.

    Indexing accepts what numpy accepts, and the result has the values, shape and dtype of
    ``numpy.load(path)[index]``, in new memory.  Nothing is cached between calls.  Adjacent
    elements are read by one large read.  Others are gathered; if their average distance is
    below 64 bytes, the gaps are read too.  The name of a field, or a list of names, reads
    the whole array first.  A loop over the array reads parts of 4 MiB.

    Comparisons, arithmetic and functions of numpy and torch raise TypeError, because they
    would silently read the whole file: read what you need first.  numpy.asarray() and
    torch.as_tensor() read all of it.  An ArrayFile equals itself, so it can be a key of a
    dict.  Comparing it with another object by ``==`` raises too, so use ``is`` to find one
    in a list.

    An assignment broadcasts and converts as in numpy, and writes only the bytes that the
    index selects.  If an element is selected twice, its last value counts.  When the
    assignment returns, every process can read the bytes back; ``flush`` makes them durable.

    Examples
    --------
    >>> nvmeio.save("rows.npy", np.arange(12).reshape(4, 3))
    >>> with nvmeio.ArrayFile("rows.npy", mode="r+") as rows:
    ...     rows[0] = 7
    ...     rows[[3, 0]]
    array([[ 9, 10, 11],
           [ 7,  7,  7]])
    """

    def __init__(
        self,
        path: Path,
        *,
        dtype: Any = None,
        shape: Shape | None = None,
        offset: int = 0,
        mode: Literal["r", "r+"] = "r",
        handle: Handle | None = None,
    ) -> None:
        _check_handle(handle)
        self._arguments = {"dtype": dtype, "shape": shape, "offset": offset}
        self._passed_handle = handle
        # The directory to sync, if create() made the file.
        self._created: str | None = None
        self._is_raw = self._reaches_end = False
        word("mode", mode, ("r", "r+"))
        self._file = File(path, mode)
        # For pickling: valid in any working directory.
        self._absolute = absolute(path)
        try:
            self._elements, layout = self._found(dtype)
        except BaseException:
            self._file.close()
            raise
        self._dtype, self._shape, self._offset = layout.dtype, layout.shape, layout.offset

    def _found(self, dtype: Any) -> tuple[Elements, Layout]:
        """Return the file's elements and layout."""
        if dtype is None:
            layout = self._npy_layout()
            return Elements(layout.dtype), layout
        library = library_of_dtype(dtype)
        elements = Elements(element_of(dtype), library, dtype if library else None)
        offset = whole("offset", self._arguments["offset"], 0, 2**63 - 1)
        if offset or not has_magic(self._file):
            self._is_raw = True
            # An append in progress may have written a part of a row.
            with naming(self.path), locked_for_reading(self._file):
                layout = self._raw_layout(elements.dtype, offset)
                self._reaches_end = self._file.size == offset + layout.nbytes
            return elements, layout
        layout = self._npy_layout()
        if elements.dtype != layout.dtype:
            raise ValueError(
                f"{self.path!r} is a .npy file of dtype {layout.dtype}; the dtype passed "
                f"is {elements.shown}.  To read it as raw bytes, pass the offset of its "
                f"data, {layout.offset}"
            )
        return elements, layout

    def _npy_layout(self) -> Layout:
        """Read the header of a .npy file."""
        for name, default in (("shape", None), ("offset", 0)):
            value = self._arguments[name]
            if value is not default and value != default:
                raise ValueError(
                    f"{name} is {value!r}; pass it for raw bytes only, with a dtype: a "
                    ".npy file has it in its header"
                )
        if not has_magic(self._file):
            raise ValueError(
                f"{self.path!r} is not a .npy file; with dtype= it is read as raw bytes.  "
                "Save an array that is inside an archive (.npz, .pt) by itself first"
            )
        layout = read_layout(self._file)
        if layout.fortran:
            raise ValueError(
                f"{self.path!r} is in Fortran order, so its rows are not contiguous; read "
                "all of it with nvmeio.load(), or nvmeio.save() it anew"
            )
        return layout

    def _raw_layout(self, dtype: np.dtype[Any], offset: int) -> Layout:
        """Make the layout of raw bytes from the arguments."""
        shape = self._arguments["shape"]
        extents = _raw_extents(self._file, dtype, offset, -1 if shape is None else shape)
        layout = Layout(dtype, extents, offset)
        check_size(self._file, layout)
        return layout

    @classmethod
    def create(
        cls,
        path: Path,
        shape: Shape,
        dtype: Any,
        *,
        raw: bool = False,
        overwrite: bool = False,
        handle: Handle | None = None,
    ) -> "Self":
        """Create a file of zeros, to be filled by assignments.

        Parameters
        ----------
        path : str, bytes or os.PathLike
            The file.
        shape : int or sequence of int
            The extent of each axis.
        dtype : dtype of numpy or torch
            The dtype of the elements, not of Python objects.  With a torch dtype, every
            result is a tensor.
        raw : bool, default False
            Write the elements only, without a .npy header.  Opening the file again then
            needs ``dtype`` and ``shape``.
        overwrite : bool, default False
            Replace the contents of an existing file, instead of raising FileExistsError.
            If the file cannot have the new size, or its header cannot be written, it keeps
            its contents, unless restoring them fails too.
        handle : Handle, optional
            As for ``ArrayFile``.

        Returns
        -------
        ArrayFile
            Open in mode "r+".

        Raises
        ------
        FileExistsError
            The file exists, and ``overwrite`` is False.
        OSError
            The file cannot be created; has errno and path.
        TypeError, ValueError
            An argument is of the wrong type or out of range.

        Notes
        -----
        The data begin at a multiple of 4096 bytes, so that rows of whole pages can be
        transferred zero-copy.  The file has its full size immediately, but is sparse: it
        takes space on the device as it is filled.

        For dtypes that numpy does not have, such as bfloat16, the header has a void dtype
        of the same size.  numpy.load() then returns raw bytes, and ``ArrayFile(path,
        dtype=torch.bfloat16)`` returns tensors.

        Examples
        --------
        >>> with nvmeio.ArrayFile.create("rows.npy", (4, 3), np.int64) as rows:
        ...     rows[1] = [1, 2, 3]
        ...     rows[:2]
        array([[0, 0, 0],
               [1, 2, 3]])
        """
        # Check everything before truncating a file.
        _check_handle(handle)
        path, overwrite, raw = path_of(path), flag("overwrite", overwrite), flag("raw", raw)
        element, extents = element_of(dtype), extents_of(shape)
        header = b"" if raw else header_of(extents, element)
        size = Layout(element, extents, len(header)).nbytes + len(header)
        if size > 2**63 - 1:
            raise ValueError(
                f"an array of shape {extents} needs a file of {size} bytes, too many; the "
                "limit is 2**63 - 1"
            )
        check_extents(extents, element)
        with naming(path), _opened_anew(path, overwrite=overwrite) as stream:
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
        tensors = library_of_dtype(dtype) is not None
        array = cls(
            path,
            dtype=dtype if raw or tensors else None,
            shape=extents if raw else None,
            mode="r+",
            handle=handle,
        )
        array._created = os.path.realpath(os.fsdecode(path))
        return array

    @property
    def path(self) -> str | bytes:
        """The path, as given."""
        return self._file.path

    @property
    def shape(self) -> tuple[int, ...]:
        """The extent of each axis."""
        return self._shape

    @property
    def dtype(self) -> Any:
        """The dtype of the elements: a torch dtype if that was passed, else numpy's."""
        return self._elements.shown

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self._shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self._shape)

    @property
    def itemsize(self) -> int:
        """The size of an element in bytes."""
        return self._dtype.itemsize

    @property
    def strides(self) -> tuple[int, ...]:
        """The distance in the file of neighbours along each axis, in bytes."""
        return tuple(stride * self.itemsize for stride in strides_of(self._shape))

    @property
    def offset(self) -> int:
        """The offset of the data in the file, in bytes."""
        return self._offset

    @property
    def nbytes(self) -> int:
        """The size of the array in bytes, without the header."""
        return Layout(self._dtype, self._shape, 0).nbytes

    @property
    def mode(self) -> str:
        """ "r", or "r+" if assignments are permitted."""
        return "r" if self._file.mode == "rb" else "r+"

    @property
    def closed(self) -> bool:
        """Whether the file is closed."""
        return self._file.closed

    def __len__(self) -> int:
        if not self._shape:
            raise TypeError(f"{self.path!r}: an array without axes has no length")
        return self._shape[0]

    def __getitem__(self, index: Any) -> Any:
        return self._read(self._reading(index, None))

    def __setitem__(self, index: Any, value: Any) -> None:
        self._write(self._writing(index, value))

    def __iter__(self) -> Iterator[Any]:
        """Read the rows in parts, and yield each as a view of its part."""
        rows = max(1, _PART_BYTES // max(1, self._row_bytes))
        for begin in range(0, len(self), rows):
            yield from self[begin : begin + rows]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError("copy is False, but reading an array on disk makes a copy")
        if self._elements.library is not None and self._dtype.kind == "V":
            raise TypeError(f"numpy has no {self.dtype}; use array[...], which is a tensor")
        return np.asarray(self[...], dtype)

    def __dlpack__(self, **options: Any) -> Any:
        if options.get("copy") is False:
            raise BufferError("copy is False, but reading an array on disk makes a copy")
        return self[...].__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _DLPACK_CPU, 0

    def gather(self, rows: Any, out: Any = None) -> Any:
        """Read rows, in any order and with repetitions.

        Parameters
        ----------
        rows : array_like of int
            Indices on the first axis, of any shape; -1 is the last row.
        out : array or tensor, optional
            The memory to fill; of the array's dtype and the result's size.

        Returns
        -------
        numpy.ndarray or tensor
            ``out``, or a new array of shape ``rows.shape + shape[1:]``.

        Raises
        ------
        IndexError
            An index is out of range.  The message names the first, and nothing is read.
        OSError
            Rows cannot be read; has errno and path, see ``Handle.gather``.  ENODATA: the
            file was truncated after it was opened.
        TypeError
            ``rows`` are not integers; or ``out`` is not an array, or has another dtype.
        ValueError
            ``out`` has another size, or the file is closed.

        Notes
        -----
        Releases the GIL while it waits.  A row that is requested several times is read
        once.

        Examples
        --------
        >>> nvmeio.save("rows.npy", np.arange(12).reshape(4, 3))
        >>> with nvmeio.ArrayFile("rows.npy") as rows:
        ...     rows.gather([3, 0, 3])
        array([[ 9, 10, 11],
               [ 0,  1,  2],
               [ 9, 10, 11]])
        """
        self._check_open()
        return self._read(self._gathering(select_rows(rows, self._axes()), out))

    def windows(self, starts: Any, length: int, out: Any = None) -> Any:
        """Read windows: runs of neighbouring rows, for example of a file of tokens.

        Parameters
        ----------
        starts : array_like of int
            The first row of each window, 0 or more, of any shape.
        length : int
            The number of rows in each window.
        out : array or tensor, optional
            As for ``gather``.

        Returns
        -------
        numpy.ndarray or tensor
            ``out``, or a new array of shape ``starts.shape + (length,) + shape[1:]``.

        Raises
        ------
        IndexError
            A window is not inside the array.  The message names the first.
        OSError, TypeError, ValueError
            As ``gather``; or ``length`` is out of range.

        Notes
        -----
        As ``gather``; rows that windows share are read once.

        Examples
        --------
        >>> nvmeio.save("tokens.npy", np.arange(100))
        >>> with nvmeio.ArrayFile("tokens.npy") as tokens:
        ...     tokens.windows([90, 10], 4)
        array([[90, 91, 92, 93],
               [10, 11, 12, 13]])
        """
        return self._read(self._windowing(starts, length, out))

    def scatter(self, rows: Any, values: Any) -> None:
        """Write rows, in any order.

        Parameters
        ----------
        rows : array_like of int
            As for ``gather``.
        values : array_like or tensor
            The new rows, broadcast to ``rows.shape + shape[1:]`` and converted as by
            ``array[rows] = values``.

        Raises
        ------
        IndexError
            An index is out of range.  The message names the first, and nothing is written.
        OSError
            Rows cannot be written; has errno and path, see ``Handle.scatter``.
        TypeError
            ``rows`` are not integers, or ``values`` cannot be converted.
        ValueError
            ``values`` cannot be broadcast, or the file is closed or open read-only.

        Notes
        -----
        If a row is named several times, its last value counts.  Releases the GIL while it
        waits.

        Examples
        --------
        >>> with nvmeio.ArrayFile.create("rows.npy", (4, 2), np.int64) as rows:
        ...     rows.scatter([3, 0], [[7, 8], [1, 2]])
        ...     rows[3]
        array([7, 8])
        """
        self._write(self._scattering(rows, values))

    def append(self, values: Any) -> None:
        """Append rows to the array.

        Parameters
        ----------
        values : array_like or tensor
            The new rows, of shape ``(n,) + shape[1:]``; converted as by an assignment.

        Raises
        ------
        OSError
            The rows cannot be written; has errno and path.  ENOSPC: the drive is full.
            ESTALE: the file was replaced or removed after it was opened.
        TypeError
            The array has no axes, or ``values`` cannot be converted.
        ValueError
            ``values`` have another shape; the .npy header has no room for the new shape
            (those of ``create``, ``save`` and numpy have room); the array is followed by
            another array, or in a raw file by any bytes; the file now has another array; or
            it is closed or open read-only.

        Notes
        -----
        When it returns, everyone who opens the file can read the rows.  ``shape`` includes
        them here; another ArrayFile keeps its shape until its ``refresh``.  ``flush`` makes
        them durable.

        The rows are written first and, in a .npy file, synced; then the shape in the header
        is updated.  If the process dies or the power fails, the file has all of the rows or
        none.  The next append overwrites what an unfinished one left behind the array.  It
        cannot distinguish that from another program's data, so do not append to a .npy file
        that has anything but arrays behind its array.  After an error the file is as
        before.  A raw file has no header: if the process is killed, it may have some of the
        rows.

        Appends of all threads and processes are serialized by a lock on the file (flock),
        and each appends to the current end.

        Examples
        --------
        >>> with nvmeio.ArrayFile.create("rows.npy", (0, 2), np.int64) as rows:
        ...     rows.append([[1, 2], [3, 4]])
        ...     rows.shape
        (2, 2)
        """
        self._append_rows(self._rows_to_append(values))

    def _rows_to_append(self, values: Any) -> Array:
        """Convert values to rows of the array."""
        self._check_writable()
        self._axes()
        return self._elements.rows(values, self._shape)

    def _append_rows(self, rows: Array, *, waits: bool = True) -> bool:
        """Append rows; or return False if another has the lock, and this must not wait."""
        with naming(self.path), FileLock(self._file) as lock:
            if not lock.take(waits=waits):
                return False
            self._append_locked(rows, lock.descriptor)
            return True

    def _append_locked(self, rows: Array, descriptor: int) -> None:
        """Append rows to the array that the file has now, while its lock is held."""
        if self._is_raw and not self._can_grow:
            why = "rows have no bytes" if self._reaches_end else "bytes follow the array"
            raise ValueError(f"rows cannot be appended to {self.path!r}: {why}")
        layout = self._layout_now(descriptor)
        if not self._is_raw and has_magic(self._file, layout.offset + layout.nbytes):
            raise ValueError(f"{self.path!r} has another array behind this one")
        if len(rows):
            self._append(rows, layout, descriptor)
        self._take_shape((layout.shape[0] + len(rows), *layout.shape[1:]))

    def refresh(self) -> None:
        """See the rows that others have appended since the file was opened.

        Raises
        ------
        OSError
            With errno and path.  ESTALE: the file was replaced or removed since it was
            opened.
        ValueError
            The file now holds a different array, or it is closed.

        Notes
        -----
        Only ``shape`` changes.  For a raw file, it waits for an append in progress.  An
        array of raw bytes that did not reach the end of its file when it was opened stays
        the same.

        Examples
        --------
        >>> nvmeio.save("rows.npy", np.zeros((4, 3)))
        >>> with nvmeio.ArrayFile("rows.npy") as rows:
        ...     with nvmeio.ArrayFile("rows.npy", mode="r+") as other:
        ...         place = other.append(np.ones((2, 3)))
        ...     before = rows.shape
        ...     rows.refresh()
        ...     before, rows.shape
        ((4, 3), (6, 3))
        """
        self._check_open()
        with (
            naming(self.path),
            locked_for_reading(self._file)
            if self._is_raw
            else opened(f"/proc/self/fd/{self._file.fileno()}", os.O_RDONLY) as descriptor,
        ):
            self._take_shape(self._layout_now(descriptor).shape)

    def _take_shape(self, shape: tuple[int, ...]) -> None:
        """Set the shape that the file has now."""
        self._shape = shape
        if self._is_raw and self._reaches_end and shape:
            # For pickling.
            self._arguments["shape"] = (-1, *shape[1:])

    def prefetch(self, index: Any, out: Any = None, *, after: After = None) -> Request:
        """Start reading the elements that an index selects.

        Parameters
        ----------
        index : index
            Any index of ``array[index]``: an integer, a slice, an array of rows, a mask,
            Ellipsis, a tuple of these, or fields.
        out : array or tensor, optional
            The memory to fill; of the result's dtype and size.
        after : Request or iterable of Request, optional
            Requests of the same handle that must be done first, as for
            ``Handle.submit_read``.

        Returns
        -------
        Request
            Its ``wait()`` and ``result()``, and ``await``, return ``out``, or the same as
            ``array[index]``.

        Raises
        ------
        IndexError, TypeError, ValueError
            As ``array[index]`` and ``gather``, immediately.  ``Request.wait`` raises later
            errors.

        Notes
        -----
        The request holds ``out`` and the file until it is done.  The thread that waits
        copies to the result if the index selects fields, or a slice that is read together
        with its gaps.  Such a request cannot be passed as ``after``.

        Examples
        --------
        >>> nvmeio.save("rows.npy", np.arange(12).reshape(4, 3))
        >>> with nvmeio.ArrayFile("rows.npy") as rows:
        ...     request = rows.prefetch([3, 0])
        ...     request.wait()
        array([[ 9, 10, 11],
               [ 0,  1,  2]])
        """
        return self._begin(self._reading(index, out), after)

    def prefetch_windows(
        self, starts: Any, length: int, out: Any = None, *, after: After = None
    ) -> Request:
        """Start reading windows.

        Parameters
        ----------
        starts, length, out
            As for ``windows``.
        after : Request or iterable of Request, optional
            As for ``prefetch``.

        Returns
        -------
        Request
            Its ``wait()`` and ``result()``, and ``await``, return the same as ``windows``.

        Raises
        ------
        IndexError, TypeError, ValueError
            As ``windows``, immediately.  ``Request.wait`` raises later errors.

        Examples
        --------
        >>> nvmeio.save("tokens.npy", np.arange(100))
        >>> with nvmeio.ArrayFile("tokens.npy") as tokens:
        ...     request = tokens.prefetch_windows([90, 0], 3)
        ...     request.wait()
        array([[90, 91, 92],
               [ 0,  1,  2]])
        """
        return self._begin(self._windowing(starts, length, out), after)

    def submit_scatter(
        self, rows: Any, values: Any, *, after: After = None
    ) -> Request[int]:
        """Start writing rows.

        Parameters
        ----------
        rows, values
            As for ``scatter``.  Do not change ``values`` until the request is done.
        after : Request or iterable of Request, optional
            As for ``prefetch``.

        Returns
        -------
        Request
            Its result is the number of bytes written.

        Raises
        ------
        IndexError, TypeError, ValueError
            As ``scatter``, immediately.  ``Request.wait`` raises later errors.

        Notes
        -----
        As ``submit_setitem``.

        Examples
        --------
        >>> nvmeio.save("rows.npy", np.zeros((4, 2), np.int64))
        >>> with nvmeio.ArrayFile("rows.npy", mode="r+") as rows:
        ...     rows.submit_scatter([3, 0], [[1, 2], [3, 4]]).wait()
        ...     rows[[3, 0]]
        32
        array([[1, 2],
               [3, 4]])
        """
        return self._begin_writing(self._scattering(rows, values), after)

    def submit_setitem(
        self, index: Any, value: Any, *, after: After = None
    ) -> Request[int]:
        """Start an assignment, ``array[index] = value``.

        Parameters
        ----------
        index : index
            Any index of ``array[index] = value``.
        value : array_like or tensor
            The new values, broadcast and converted.  Do not change them until the request
            is done.
        after : Request or iterable of Request, optional
            As for ``prefetch``.

        Returns
        -------
        Request
            Its result is the number of bytes written.

        Raises
        ------
        IndexError, TypeError, ValueError
            As the assignment, immediately.  ``Request.wait`` raises later errors.

        Notes
        -----
        A value with the array's dtype and the right shape, C-ordered and in host memory, is
        written without a copy, and held until the request is done.  Any other value is
        copied first.  Requests in flight are not ordered: wait for requests on the same
        elements, or chain them by ``after``.

        Examples
        --------
        >>> nvmeio.save("rows.npy", np.zeros((4, 2), np.int64))
        >>> with nvmeio.ArrayFile("rows.npy", mode="r+") as rows:
        ...     rows.submit_setitem((slice(1, 3), 0), 7).wait()
        ...     rows[:, 0]
        16
        array([0, 7, 7, 0])
        """
        return self._begin_writing(self._writing(index, value), after)

    def flush(self, *, sync: bool = True) -> None:
        """Make what was written survive a power loss.

        Parameters
        ----------
        sync : bool, default True
            Wait for earlier writes, submitted ones too, and return when they are on the
            device, with the name of the file if ``create`` made it.  False does nothing,
            because an ArrayFile buffers nothing.

        Raises
        ------
        OSError
            The device failed, or the directory of a new file cannot be read.
        ValueError
            The file is closed.

        Examples
        --------
        >>> nvmeio.save("rows.npy", np.zeros((4, 3)))
        >>> with nvmeio.ArrayFile("rows.npy", mode="r+") as rows:
        ...     rows[0] = 1
        ...     rows.flush()
        """
        self._check_open()
        if flag("sync", sync):
            with self._synced_name():
                self._handle().fsync(self._file)

    @contextlib.contextmanager
    def _synced_name(self) -> Iterator[None]:
        """Sync the name of a file that ``create`` made at the end of the block."""
        made = self._created
        with contextlib.nullcontext() if made is None else synced_folder(made):
            yield
        self._created = None

    def close(self) -> None:
        """Close the file without waiting; a second call does nothing.

        Notes
        -----
        Requests in flight keep running.  Closing does not make assignments durable; call
        ``flush`` first.
        """
        self._file.close()

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        options = {**self._arguments, "mode": self.mode, "handle": self._passed_handle}
        return _restore, (type(self), self._absolute, options, self.closed)

    def __repr__(self) -> str:
        state = " closed" if self.closed else ""
        return (
            f"<nvmeio.ArrayFile {self.path!r} shape={self._shape} dtype={self.dtype} "
            f"mode={self.mode!r}{state}>"
        )

    # Shared by the methods above.

    def _check_open(self) -> None:
        """Raise ValueError if the file is closed, even if no bytes would be transferred."""
        if self._file.closed:
            raise ValueError(f"the array file {self.path!r} is closed")

    def _handle(self) -> Handle:
        """Return the handle to read and write with."""
        return default_handle() if self._passed_handle is None else self._passed_handle

    def _names_fields(self, index: Any) -> bool:
        """Return whether an index names fields of a structured dtype."""
        names = index if isinstance(index, list) else [index]
        return bool(
            self._dtype.names and names and all(isinstance(name, str) for name in names)
        )

    def _axes(self) -> tuple[int, ...]:
        """Return the shape; raise TypeError if there is no first axis."""
        len(self)
        return self._shape

    def _reading(self, index: Any, out: Any) -> _Transfer:
        """Return the transfer that reads the elements of an index."""
        self._check_open()
        if self._names_fields(index):
            return self._field_reading(index, out)
        selection = select(index, self._shape)
        item, count = self._dtype.itemsize, selection.count
        if count < 2 or selection.run == 0:
            return self._gathering(selection, out)
        low, high = selection.hull()
        if (high - low) * item > _SPACING_BYTES * count:
            return self._gathering(selection, out)
        hull: Array = np.empty(high - low, self._dtype)
        target, result = self._target(selection.shape, self._dtype, out)

        def make() -> Any:
            _copy(target, selection.taken_of(hull, low))
            return result

        offsets = [self._offset + low * item]
        return _Transfer(offsets, hull.nbytes, bytes_of(hull), make=make)

    def _gathering(self, selection: Selection, out: Any) -> _Transfer:
        """Return the transfer that reads the selected elements without gaps."""
        target, result = self._target(selection.shape, self._dtype, out)
        offsets, nbytes = self._records(selection)
        if selection.scalar and out is None and self._elements.library is None:
            return _Transfer(offsets, nbytes, target, make=partial(result.__getitem__, ()))
        return _Transfer(offsets, nbytes, target, result)

    def _records(self, selection: Selection) -> tuple[Any, int]:
        """Return the offsets in the file of a selection's runs, and their size."""
        item = self._dtype.itemsize
        if selection.run == 0:
            return [], 0
        return self._offset + selection.starts() * item, selection.run * item

    def _layout_now(self, descriptor: int) -> Layout:
        """Return the current layout of the file: another process may have appended."""
        if os.fstat(descriptor).st_nlink == 0:
            words = "the file was replaced or removed since it was opened"
            raise OSError(errno.ESTALE, words)
        if not self._is_raw:
            layout = read_layout(self._file, descriptor)
        elif self._can_grow:
            shape = (-1, *self._shape[1:])
            extents = _raw_extents(self._file, self._dtype, self._offset, shape)
            layout = Layout(self._dtype, extents, self._offset)
        else:
            layout = Layout(self._dtype, self._shape, self._offset)
        same = (layout.dtype, layout.offset) == (self._dtype, self._offset)
        if not same or layout.fortran or layout.shape[1:] != self._shape[1:]:
            raise ValueError(
                f"{self.path!r} now has another array, of shape {layout.shape} and dtype "
                f"{layout.dtype}; open it again"
            )
        return layout

    @property
    def _can_grow(self) -> bool:
        """Whether the size of a file of raw bytes says how many rows it has."""
        return bool(self._shape and self._row_bytes and self._reaches_end)

    def _append(self, rows: Array, layout: Layout, descriptor: int) -> None:
        """Write rows at the end of the array, and then the header."""
        shape = (layout.shape[0] + len(rows), *layout.shape[1:])
        old = os.pread(descriptor, 0 if self._is_raw else layout.offset, 0)
        new = old and replace_shape(self.path, old, shape, layout.dtype)
        end, handle = layout.offset + layout.nbytes, self._handle()
        # Remove what a killed append has left.
        if os.fstat(descriptor).st_size > end:
            os.ftruncate(descriptor, end)
        try:
            if rows.nbytes:
                handle.write(bytes_of(rows), self._file, end)
            if new != old:
                handle.fsync(self._file, data_only=True)
                _write_changes(descriptor, old, new)
        except BaseException:
            # Keep the rows if the header was written before the interruption.
            if os.pread(descriptor, len(old), 0) == old:
                os.ftruncate(descriptor, end)
            raise

    def _field_reading(self, index: Any, out: Any) -> _Transfer:
        """Return the transfer that reads all records, and takes fields of them."""
        records: Array = np.empty(self._shape, self._dtype)
        part = records[index]
        target, result = self._target(part.shape, part.dtype, out)

        def make() -> Any:
            _copy(target, np.ascontiguousarray(part))
            return result

        offsets = [self._offset] if records.nbytes else []
        return _Transfer(offsets, records.nbytes, bytes_of(records), make=make)

    def _windowing(self, starts: Any, length: int, out: Any) -> _Transfer:
        """Return the transfer that reads windows."""
        self._check_open()
        length = whole("length", length, 0, len(self))
        return self._gathering(select_windows(starts, length, self._shape), out)

    def _read(self, transfer: _Transfer) -> Any:
        """Read, and return the result."""
        offsets, handle = transfer.offsets, self._handle()
        if len(offsets) == 1 and transfer.nbytes > _CALLER_BYTES_MAX:
            handle.read(transfer.memory, self._file, int(offsets[0]))
        elif len(offsets):
            handle.gather(self._file, offsets, transfer.nbytes, transfer.memory)
        return transfer.result if transfer.make is None else transfer.make()

    def _begin(self, transfer: _Transfer, after: After) -> Request:
        """Start reading."""
        make = transfer.make
        return self._handle().submit_gather(
            self._file,
            transfer.offsets,
            transfer.nbytes,
            transfer.memory,
            result=transfer.result if make is None else Deferred(make),
            after=after,
        )

    def _check_writable(self) -> None:
        """Raise ValueError if the file is closed or open read-only."""
        self._check_open()
        if self.mode == "r":
            raise ValueError(f"{self.path!r} is open read-only; open it with mode='r+'")

    def _writing(self, index: Any, value: Any) -> _Transfer:
        """Return the transfer that assigns a value."""
        self._check_writable()
        if self._names_fields(index):
            raise IndexError(f"the index is {index!r}; assign whole records")
        return self._storing(select(index, self._shape), value)

    def _scattering(self, rows: Any, values: Any) -> _Transfer:
        """Return the transfer that writes rows."""
        self._check_writable()
        return self._storing(select_rows(rows, self._axes()), values)

    def _storing(self, selection: Selection, value: Any) -> _Transfer:
        """Return the transfer that writes the selected elements."""
        array = self._elements.spread(value, selection.shape)
        offsets, nbytes = self._records(selection)
        if selection.repeats and len(offsets):
            last = last_of_each(offsets)
            if len(last) < len(offsets):
                array = array.reshape(len(offsets), -1)[last]
                offsets = offsets[last]
        return _Transfer(offsets, nbytes, bytes_of(array))

    def _write(self, transfer: _Transfer) -> None:
        """Write, and return when the bytes can be read back."""
        offsets, handle = transfer.offsets, self._handle()
        if len(offsets) == 1:
            handle.write(transfer.memory, self._file, int(offsets[0]))
        elif len(offsets):
            handle.scatter(self._file, offsets, transfer.nbytes, transfer.memory)

    def _begin_writing(self, transfer: _Transfer, after: After) -> Request[int]:
        """Start writing."""
        return self._handle().submit_scatter(
            self._file, transfer.offsets, transfer.nbytes, transfer.memory, after=after
        )

    @property
    def _row_bytes(self) -> int:
        """The size of a row."""
        return math.prod(self._shape[1:]) * self._dtype.itemsize

    def _target(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], out: Any
    ) -> tuple[Any, Any]:
        """Return the memory to fill, and the result that shares it."""
        if out is None:
            array: Array = np.empty(shape, dtype)
            return bytes_of(array), self._elements.to_result(array)
        library = library_of(out)
        if library is not None:
            same = out.dtype == self._elements.tensor_dtype
            if self._elements.library is None:
                same = library.carrier(out.dtype) == dtype
        elif isinstance(out, np.ndarray):
            same = out.dtype == dtype
        else:
            raise TypeError(
                f"out is of type {type(out).__qualname__}; it must be an array or a tensor"
            )
        if not same:
            wanted = dtype if self._elements.library is None else self.dtype
            raise TypeError(f"out is of dtype {out.dtype}; it must be of {wanted}")
        nbytes = math.prod(shape) * dtype.itemsize
        try:
            found = out.nbytes
        except RuntimeError:
            # Raises a precise error, for example for a sparse tensor.
            borrow(out, writable=True)
            raise
        if found != nbytes:
            raise ValueError(
                f"out has {found} bytes; the result, of shape {shape}, has {nbytes}"
            )
        return out if library else bytes_of(out), out


def _copy(target: Any, array: Array) -> None:
    """Copy an array to the memory from ``_target``: bytes, or a tensor."""
    library = library_of(target)
    if library is None:
        memcpy(target, bytes_of(array))
    else:
        memcpy(target, library.to_tensor(np.ascontiguousarray(array), target.dtype))


def _check_handle(handle: Any) -> None:
    """Raise TypeError for anything but a Handle or None."""
    if handle is not None and not isinstance(handle, Handle):
        raise TypeError(
            f"handle is of type {type(handle).__qualname__}; it must be a Handle"
        )


def _raw_extents(
    file: File, dtype: np.dtype[Any], offset: int, shape: Shape
) -> tuple[int, ...]:
    """Return the shape of raw bytes; replace an extent of -1 by the file's size."""
    axes = list(shape) if isinstance(shape, Sequence | np.ndarray) else [shape]
    unknown = [place for place, extent in enumerate(axes) if extent == -1]
    if not unknown:
        return extents_of(axes)
    known = extents_of([extent for extent in axes if extent != -1])
    row_bytes, size = math.prod(known) * dtype.itemsize, file.size
    if len(unknown) > 1 or row_bytes == 0:
        raise ValueError(
            f"the shape is {tuple(axes)} with elements of {dtype.itemsize} bytes; only one "
            "extent may be -1, and the others and the elements must not be of size 0"
        )
    if offset > size or (size - offset) % row_bytes:
        raise ValueError(
            f"{file.path!r} has {size} bytes; those after offset {offset} must be a "
            f"multiple of {row_bytes}, for the shape {tuple(axes)} and the dtype {dtype}"
        )
    axes[unknown[0]] = (size - offset) // row_bytes
    return extents_of(axes)


def _write_changes(descriptor: int, old: bytes, new: bytes) -> None:
    """Write the bytes of a header that differ, in one write so that it is never torn."""
    places = [place for place in range(len(new)) if old[place] != new[place]]
    begin, end = places[0], places[-1] + 1
    while begin < end:
        begin += os.pwrite(descriptor, new[begin:end], begin)


def _opened_anew(path: str | bytes, *, overwrite: bool) -> IO[bytes]:
    """Create a file, or open one that ``overwrite`` permits the caller to truncate."""
    flags = os.O_RDWR | os.O_CREAT | (0 if overwrite else os.O_EXCL)
    try:
        # Without a buffer, which close() would write out after an error, too.
        return open(path, "r+b", 0, opener=lambda name, _: os.open(name, flags, 0o666))
    except FileExistsError as error:
        words = f"{error.strerror}; overwrite=True replaces its contents"
        raise FileExistsError(error.errno, words, path) from None


def _restore(
    kind: type[ArrayFile], path: Path, options: dict[str, Any], closed: bool
) -> ArrayFile:
    """Make an ArrayFile from its pickled state; a closed one stays closed."""
    array = kind(path, **options)
    if closed:
        array.close()
    return array
