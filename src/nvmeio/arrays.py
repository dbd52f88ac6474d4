"""Arrays on disk: numpy's indexing, rows and windows, without mapping the file.

indexing.py finds the elements that an index selects, and npy_header.py parses headers.
This module turns them into reads, writes, gathers and scatters of a handle.
"""

import contextlib
import math
import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from nvmeio._arguments.checks import Shape, extents_of, flag, path_of, whole, word
from nvmeio._arguments.types import Path
from nvmeio._arrays.appending import append
from nvmeio._arrays.creating import create_file
from nvmeio._arrays.elements import element_of
from nvmeio._arrays.indexing import select, select_rows, select_windows, strides_of
from nvmeio._arrays.operators import Unread
from nvmeio._arrays.stored import StoredArray
from nvmeio._arrays.transfers import Transfer, gathering, names_fields, reading, storing
from nvmeio._files.paths import absolute, synced_folder
from nvmeio._memory.registry import library_of_dtype
from nvmeio._native.file import File, owned
from nvmeio._native.gather import LateResult
from nvmeio._native.handle import Handle
from nvmeio._native.request import Request
from nvmeio.default import default_handle

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ArrayFile"]

Array = npt.NDArray[Any]

# A single run up to this size is read in the calling thread, which costs less than
# switching to a worker; workers share a larger one in blocks.
_CALLER_BYTES_MAX = 1 << 20

# How much an iteration reads at once.
_PART_BYTES = 4 << 20

# As DLPack numbers devices.
_DLPACK_CPU = 1

After = Request | Iterable[Request] | None


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
    below 64 bytes, the gaps are read too, 64 MiB at a time.  So is the whole array for the
    name of a field or a list of names.  A loop over the array reads parts of 4 MiB.

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
        self._passed_handle = handle
        # The directory to sync, if create() made the file.
        self._created: str | None = None
        word("mode", mode, ("r", "r+"))
        self._file = owned(File(path, mode))
        # For pickling: valid in any working directory.
        self._absolute = absolute(path)
        try:
            self._stored = StoredArray(self._file, dtype, shape, offset)
        except BaseException:
            self._file.close()
            raise

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
        _check_handle(handle)
        path, overwrite, raw = path_of(path), flag("overwrite", overwrite), flag("raw", raw)
        element, extents = element_of(dtype), extents_of(shape)
        create_file(path, element, extents, raw=raw, overwrite=overwrite)
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
        return self._stored.layout.shape

    @property
    def dtype(self) -> Any:
        """The dtype of the elements: a torch dtype if that was passed, else numpy's."""
        return self._stored.elements.shown

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """The size of an element in bytes."""
        return self._stored.layout.dtype.itemsize

    @property
    def strides(self) -> tuple[int, ...]:
        """The distance in the file of neighbours along each axis, in bytes."""
        return tuple(stride * self.itemsize for stride in strides_of(self.shape))

    @property
    def offset(self) -> int:
        """The offset of the data in the file, in bytes."""
        return self._stored.layout.offset

    @property
    def nbytes(self) -> int:
        """The size of the array in bytes, without the header."""
        return self._stored.layout.nbytes

    @property
    def mode(self) -> str:
        """ "r", or "r+" if assignments are permitted."""
        return "r" if self._file.mode == "rb" else "r+"

    @property
    def closed(self) -> bool:
        """Whether the file is closed."""
        return self._file.closed

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"{self.path!r}: an array without axes has no length")
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        self._check_open()
        return self._read(reading(self._stored, index, None, in_parts=True))

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
        elements = self._stored.elements
        if elements.library is not None and elements.dtype.kind == "V":
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
        selection = select_rows(rows, self._axes())
        return self._read(gathering(self._stored, selection, out))

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
        and each appends to the current end.  Another lock keeps nvmeio from reading a
        header that is half written; numpy.load() takes none, and may see such a shape.

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
        return self._stored.elements.rows(values, self._axes())

    def _append_rows(self, rows: Array, *, waits: bool = True) -> bool:
        """Append rows; or return False if another has the lock, and this must not wait."""
        return append(self._stored, rows, self._handle(), waits=waits)

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
        self._stored.refresh()

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
        options = {
            **self._stored.arguments,
            "mode": self.mode,
            "handle": self._passed_handle,
        }
        return _restore, (type(self), self._absolute, options, self.closed)

    def __repr__(self) -> str:
        state = " closed" if self.closed else ""
        return (
            f"<nvmeio.ArrayFile {self.path!r} shape={self.shape} dtype={self.dtype} "
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

    def _axes(self) -> tuple[int, ...]:
        """Return the shape; raise TypeError if there is no first axis."""
        len(self)
        return self.shape

    def _reading(self, index: Any, out: Any) -> Transfer:
        """Return the transfer that reads the elements of an index."""
        self._check_open()
        return reading(self._stored, index, out)

    def _windowing(self, starts: Any, length: int, out: Any) -> Transfer:
        """Return the transfer that reads windows."""
        self._check_open()
        length = whole("length", length, 0, len(self))
        selection = select_windows(starts, length, self.shape)
        return gathering(self._stored, selection, out)

    def _read(self, transfer: Transfer) -> Any:
        """Read, and return the result."""
        for part in transfer.parts:
            self._read(part)
        offsets, handle = transfer.offsets, self._handle()
        if len(offsets) == 1 and transfer.nbytes > _CALLER_BYTES_MAX:
            handle.read(transfer.memory, self._file, int(offsets[0]))
        elif len(offsets):
            handle.gather(self._file, offsets, transfer.nbytes, transfer.memory)
        return transfer.finished()

    def _begin(self, transfer: Transfer, after: After) -> Request:
        """Start reading."""
        make = transfer.make
        result = transfer.result if make is None else LateResult(make)
        return self._fill(transfer, result, after)

    def _begin_filling(self, index: Any) -> Request[Transfer]:
        """Start reading the elements of an index into the memory of a transfer."""
        transfer = self._reading(index, None)
        return self._fill(transfer, transfer)

    def _fill(self, transfer: Transfer, result: Any, after: After = None) -> Request:
        """Start reading into the memory of a transfer."""
        return self._handle().submit_gather(
            self._file,
            transfer.offsets,
            transfer.nbytes,
            transfer.memory,
            result=result,
            after=after,
        )

    def _check_writable(self) -> None:
        """Raise ValueError if the file is closed or open read-only."""
        self._check_open()
        if self.mode == "r":
            raise ValueError(f"{self.path!r} is open read-only; open it with mode='r+'")

    def _writing(self, index: Any, value: Any) -> Transfer:
        """Return the transfer that assigns a value."""
        self._check_writable()
        if names_fields(self._stored, index):
            raise IndexError(f"the index is {index!r}; assign whole records")
        return storing(self._stored, select(index, self.shape), value)

    def _scattering(self, rows: Any, values: Any) -> Transfer:
        """Return the transfer that writes rows."""
        self._check_writable()
        return storing(self._stored, select_rows(rows, self._axes()), values)

    def _write(self, transfer: Transfer) -> None:
        """Write, and return when the bytes can be read back."""
        offsets, handle = transfer.offsets, self._handle()
        if len(offsets) == 1:
            handle.write(transfer.memory, self._file, int(offsets[0]))
        elif len(offsets):
            handle.scatter(self._file, offsets, transfer.nbytes, transfer.memory)

    def _begin_writing(self, transfer: Transfer, after: After) -> Request[int]:
        """Start writing."""
        return self._handle().submit_scatter(
            self._file, transfer.offsets, transfer.nbytes, transfer.memory, after=after
        )

    @property
    def _row_bytes(self) -> int:
        """The size of a row."""
        return self._stored.row_bytes


def _check_handle(handle: Any) -> None:
    """Raise TypeError for anything but a Handle or None."""
    if handle is not None and not isinstance(handle, Handle):
        raise TypeError(
            f"handle is of type {type(handle).__qualname__}; it must be a Handle"
        )


def _restore(
    kind: type[ArrayFile], path: Path, options: dict[str, Any], closed: bool
) -> ArrayFile:
    """Make an ArrayFile from its pickled state; a closed one stays closed."""
    array = kind(path, **options)
    if closed:
        array.close()
    return array
