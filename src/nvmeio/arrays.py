"""Arrays on disk: numpy's indices, rows and windows, without a mapping of the file.

Which elements an index names is indexing.py's, what a header says npy_header.py's; here
they become reads, writes, gathers and scatters of a handle.
"""

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import numpy as np
import numpy.typing as npt

from nvmeio._arguments.checks import Shape, extents_of, flag, path_of, whole, word
from nvmeio._arguments.keywords import suggesting
from nvmeio._arguments.types import Path
from nvmeio._arrays.elements import bytes_of, element_of, storable
from nvmeio._arrays.indexing import Positions, Selection, positions, select
from nvmeio._arrays.npy_header import (
    Layout,
    check_size,
    has_magic,
    header_of,
    read_layout,
)
from nvmeio._files.paths import absolute, naming, synced_folder
from nvmeio._memory.registry import TensorLibrary, library_of, library_of_dtype
from nvmeio._native.file import File
from nvmeio._native.handle import Handle
from nvmeio._native.request import Request
from nvmeio.default import default_handle

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ArrayFile"]

Array = npt.NDArray[Any]

# Runs that are no farther apart than this on the average are read with what lies between
# them: about what the places of a run in the file and in the result take in memory, with
# the engine's own notes of it.
_SPACING_BYTES = 64

# A single run up to this size is read in the calling thread, which costs less than a hop to
# a worker; a larger one is shared out to the workers in blocks.
_CALLER_BYTES_MAX = 1 << 20

# What an iteration reads at once.
_PART_BYTES = 4 << 20


class ArrayFile:
    """An array in a file, of which an index reads what it names.

    Parameters
    ----------
    path : str, bytes or os.PathLike
        A .npy file of version 1 to 3 in C order; or, where ``dtype`` is given, raw bytes.
    dtype : dtype of numpy or torch, optional
        Of raw bytes.  One of torch's makes every result a tensor.
    shape : int or sequence of int, optional
        Of raw bytes; one extent may be -1 and is found from the size of the file.  By
        default one axis up to the end.
    offset : int, default 0
        Where raw bytes begin, in bytes.
    mode : {"r", "r+"}, default "r"
        Whether items can be assigned to, too.
    handle : Handle, optional
        What reads and writes; is left open.  By default ``default_handle()``.

    Raises
    ------
    OSError
        The file cannot be opened or read; with errno and path.
    TypeError
        An argument is of the wrong type, or the elements hold Python objects.
    ValueError
        The file is no .npy file, in Fortran order, of Python objects, or shorter than the
        array; a .npy file is to be taken for raw bytes; an argument is out of range.

    Notes
    -----
    Thread-safe, but for assignments to the same elements; every call releases the GIL while
    it waits.  Can be pickled, which opens the file anew, and used in forked children.

    An index is what numpy takes, and the result has the values, shape and dtype that
    ``numpy.load(path)[index]`` has, in memory of its own.  Nothing is kept between calls.
    Elements that follow each other are one large read; others are gathered, and where they
    are closer than 64 bytes on the average, read with what lies between them.  The name of
    a field, or a list of names, reads the whole array first.  A loop over the array reads
    parts of 4 MiB.

    Assigning broadcasts and converts as numpy does, writes no byte that the index does not
    name, and takes the last of several values for the same element.  It returns when the
    bytes can be read back, by whomever; ``flush`` makes them durable.

    Examples
    --------
    >>> nvmeio.save("rows.npy", np.arange(12).reshape(4, 3))
    >>> with nvmeio.ArrayFile("rows.npy", mode="r+") as rows:
    ...     rows[0] = 7
    ...     rows[[3, 0]]
    array([[ 9, 10, 11],
           [ 7,  7,  7]])
    """

    @suggesting
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
        self._lent = handle
        # Where the name of a file that was made here is to be made durable.
        self._created: str | None = None
        # What makes tensors of results, and their dtype.
        self._library: TensorLibrary | None = None
        self._tensor_dtype: Any = None
        word("mode", mode, ("r", "r+"))
        self._file = File(path, mode)
        # For a copy by pickle, wherever it will be.
        self._absolute = absolute(path)
        try:
            layout = self._npy_layout() if dtype is None else self._raw_layout()
        except BaseException:
            self._file.close()
            raise
        self._dtype, self._shape, self._offset = layout.dtype, layout.shape, layout.offset

    def _npy_layout(self) -> Layout:
        """Read the header of a .npy file."""
        for name, default in (("shape", None), ("offset", 0)):
            value = self._arguments[name]
            if value is not default and value != default:
                raise ValueError(
                    f"{name} is {value!r}; only raw bytes, with a dtype, have one: the "
                    "header of a .npy file says where what is"
                )
        if not has_magic(self._file):
            raise ValueError(
                f"{self.path!r} is no .npy file; with dtype= it is taken for raw bytes.  "
                "An array inside of an archive (.npz, .pt) must be saved by itself first"
            )
        layout = read_layout(self._file)
        if layout.fortran:
            raise ValueError(
                f"{self.path!r} is in Fortran order, so its rows are scattered; read "
                "all of it with nvmeio.load(), or nvmeio.save() it anew"
            )
        return layout

    def _raw_layout(self) -> Layout:
        """Make a layout of what was passed."""
        dtype = self._element_dtype(self._arguments["dtype"])
        offset = whole("offset", self._arguments["offset"], 0, 2**63 - 1)
        if offset == 0 and has_magic(self._file):
            raise ValueError(
                f"{self.path!r} is a .npy file, whose header says its dtype; to take it "
                "for raw bytes, pass the offset of its data"
            )
        shape = self._arguments["shape"]
        extents = _raw_extents(self._file, dtype, offset, -1 if shape is None else shape)
        layout = Layout(dtype, extents, offset)
        check_size(self._file, layout)
        return layout

    def _element_dtype(self, dtype: Any) -> np.dtype[Any]:
        """Return numpy's dtype for a dtype of numpy or torch."""
        self._library = library_of_dtype(dtype)
        if self._library is not None:
            self._tensor_dtype = dtype
        return element_of(dtype)

    @classmethod
    @suggesting
    def create(
        cls,
        path: Path,
        shape: Shape,
        dtype: Any,
        *,
        overwrite: bool = False,
        handle: Handle | None = None,
    ) -> "Self":
        """Make a .npy file, all zeros, to be filled by assignments.

        Parameters
        ----------
        path : str, bytes or os.PathLike
            The file.
        shape : int or sequence of int
            The extent of each axis.
        dtype : dtype of numpy or torch
            Of plain bytes, and one that numpy has.
        overwrite : bool, default False
            Whether a file that exists is cut and filled anew.
        handle : Handle, optional
            As for ``ArrayFile``.

        Returns
        -------
        ArrayFile
            Open in the mode "r+".

        Raises
        ------
        FileExistsError
            The file exists, and ``overwrite`` is False.
        OSError
            The file cannot be made; with errno and path.
        TypeError, ValueError
            An argument is of the wrong type or out of range.

        Notes
        -----
        The data begin at a multiple of 4096 bytes, so that rows of whole pages go straight
        to the device.  The file has its full size at once, and takes up space on the device
        as it is filled.
        """
        # All that can be refused is refused before a file is cut.
        _check_handle(handle)
        path, overwrite = path_of(path), flag("overwrite", overwrite)
        element, extents = storable(dtype), extents_of(shape)
        header = header_of(extents, element)
        size = Layout(element, extents, len(header)).nbytes + len(header)
        if size > 2**63 - 1:
            raise ValueError(f"an array of shape {extents} has {size} bytes, too many")
        with naming(path), _opened_anew(path, overwrite=overwrite) as stream:
            try:
                stream.write(header)
                stream.truncate(size)
            except BaseException:
                if not overwrite:
                    os.unlink(path)
                raise
        array = cls(path, mode="r+", handle=handle)
        array._created = os.path.realpath(os.fsdecode(path))
        return array

    @property
    def path(self) -> str | bytes:
        """The path, as it was given."""
        return self._file.path

    @property
    def shape(self) -> tuple[int, ...]:
        """The extent of each axis."""
        return self._shape

    @property
    def dtype(self) -> Any:
        """The dtype of the elements: torch's where it was given, else numpy's."""
        return self._dtype if self._library is None else self._tensor_dtype

    @property
    def ndim(self) -> int:
        """How many axes there are."""
        return len(self._shape)

    @property
    def size(self) -> int:
        """How many elements there are."""
        return math.prod(self._shape)

    @property
    def nbytes(self) -> int:
        """The size of the array in bytes, the header not included."""
        return Layout(self._dtype, self._shape, 0).nbytes

    @property
    def mode(self) -> str:
        """ "r", or "r+" where items can be assigned to."""
        return self._file.mode

    @property
    def closed(self) -> bool:
        """Whether the file is closed."""
        return self._file.closed

    def __len__(self) -> int:
        if not self._shape:
            raise TypeError(f"{self.path!r}: an array of no axes has no length")
        return self._shape[0]

    def __getitem__(self, index: Any) -> Any:
        if self._names_fields(index):
            return self[...][index].copy()
        selection = select(index, self._shape)
        array: Array = np.empty(selection.shape, self._dtype)
        self._check_open()
        if array.nbytes:
            self._fetch(selection, array)
        if selection.scalar and self._library is None:
            return array[()]
        return self._dressed(array)

    def __setitem__(self, index: Any, value: Any) -> None:
        self._check_open()
        if self.mode == "r":
            raise ValueError(f"{self.path!r} is open for reading alone; pass mode='r+'")
        if self._names_fields(index):
            raise IndexError(f"the index is {index!r}; assign whole records")
        selection = select(index, self._shape)
        array = self._spread(value, selection.shape)
        if array.nbytes:
            self._store(selection, array)

    def __iter__(self) -> Iterator[Any]:
        """Read the rows in parts, and yield each as a view of its part."""
        rows = max(1, _PART_BYTES // max(1, self._row_bytes))
        for begin in range(0, len(self), rows):
            yield from self[begin : begin + rows]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError("an array on disk cannot be had without a copy")
        return np.asarray(self[...], dtype)

    @suggesting
    def gather(self, rows: Any, out: Any = None) -> Any:
        """Read rows, in any order and as often as they are named.

        Parameters
        ----------
        rows : array_like of int
            Positions on the first axis, of any shape; -1 is the last one.
        out : array or tensor, optional
            Is filled; of the array's dtype and of the size of the result.

        Returns
        -------
        numpy.ndarray or tensor
            ``out``, or a new array of shape ``rows.shape + shape[1:]``.

        Raises
        ------
        IndexError
            A position is out of bounds; names the first, before anything is read.
        OSError
            Rows cannot be read; with errno and path, see ``Handle.gather``.  ENODATA: the
            file was cut since it was opened.
        TypeError
            ``rows`` are not integers; ``out`` is no array, or of another dtype.
        ValueError
            ``out`` is of another size, or the file is closed.

        Notes
        -----
        Runs in the calling thread, without the GIL; rows that are named twice are read
        once.
        """
        return self._gather(*self._rows(rows), out)

    @suggesting
    def windows(self, starts: Any, length: int, out: Any = None) -> Any:
        """Read runs of neighbouring rows, as the windows of a file of tokens.

        Parameters
        ----------
        starts : array_like of int
            The first row of each, 0 or more, of any shape.
        length : int
            How many rows each has.
        out : array or tensor, optional
            As for ``gather``.

        Returns
        -------
        numpy.ndarray or tensor
            ``out``, or a new array of shape ``starts.shape + (length,) + shape[1:]``.

        Raises
        ------
        IndexError
            A window does not lie inside of the array; names the first.
        OSError, TypeError, ValueError
            As ``gather``; ``length`` is out of range.

        Notes
        -----
        As ``gather``; what windows have in common is read once.
        """
        return self._gather(*self._windows(starts, length), out)

    @suggesting
    def prefetch(self, rows: Any) -> Request:
        """Start reading rows.

        Parameters
        ----------
        rows : array_like of int
            As for ``gather``.

        Returns
        -------
        Request
            Whose ``wait()`` and ``result()`` return what ``gather(rows)`` would.

        Raises
        ------
        IndexError, TypeError, ValueError
            As ``gather``, at once.  What fails later is raised by ``Request.wait``.
        """
        return self._begin(*self._rows(rows))

    @suggesting
    def prefetch_windows(self, starts: Any, length: int) -> Request:
        """Start reading windows.

        Parameters
        ----------
        starts, length
            As for ``windows``.

        Returns
        -------
        Request
            Whose ``wait()`` and ``result()`` return what ``windows(...)`` would.

        Raises
        ------
        IndexError, TypeError, ValueError
            As ``windows``, at once.  What fails later is raised by ``Request.wait``.
        """
        return self._begin(*self._windows(starts, length))

    @suggesting
    def flush(self, *, sync: bool = True) -> None:
        """Make durable what was assigned.

        Parameters
        ----------
        sync : bool, default True
            Return only when the file, and its name where ``create`` made it, are on the
            device.  False does nothing, for nothing is kept back here.

        Raises
        ------
        OSError
            The device failed; or the folder of a new file may not be read.
        ValueError
            The file is closed.
        """
        self._check_open()
        if not flag("sync", sync):
            return
        made = self._created
        with contextlib.nullcontext() if made is None else synced_folder(made):
            self._handle().fsync(self._file)
        self._created = None

    def close(self) -> None:
        """Close the file; a second call does nothing.

        Notes
        -----
        Does not wait: what was prefetched goes on.  What was not flushed is no more durable
        than with any file.
        """
        self._file.close()

    def __enter__(self) -> "Self":
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
        /,
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        options = {**self._arguments, "mode": self.mode, "handle": self._lent}
        return _restore, (type(self), self._absolute, options, self.closed)

    def __repr__(self) -> str:
        state = " closed" if self.closed else ""
        return (
            f"<nvmeio.ArrayFile {self.path!r} shape={self._shape} dtype={self.dtype} "
            f"mode={self.mode!r}{state}>"
        )

    # From here on, what the methods above have in common.

    def _check_open(self) -> None:
        """Refuse to go on with a closed file, also where nothing is to be transferred."""
        if self._file.closed:
            raise ValueError(f"the array file {self.path!r} is closed")

    def _handle(self) -> Handle:
        """Return what reads and writes."""
        return default_handle() if self._lent is None else self._lent

    def _names_fields(self, index: Any) -> bool:
        """Tell whether an index is that of fields of a structured dtype."""
        names = index if isinstance(index, list) else [index]
        return bool(
            self._dtype.names and names and all(isinstance(name, str) for name in names)
        )

    def _fetch(self, selection: Selection, array: Array) -> None:
        """Read what was selected."""
        item = self._dtype.itemsize
        low, high = selection.hull()
        count = selection.count
        if count == 1:
            self._read(array, low)
        elif (high - low) * item <= _SPACING_BYTES * count:
            hull: Array = np.empty(high - low, self._dtype)
            self._read(hull, low)
            runs = np.lib.stride_tricks.sliding_window_view(hull, selection.run)
            array.reshape(count, -1)[...] = runs[selection.starts() - low]
        else:
            offsets = self._offset + selection.starts() * item
            self._handle().gather(
                self._file, offsets, selection.run * item, bytes_of(array)
            )

    def _read(self, array: Array, start: int) -> None:
        """Read neighbouring elements."""
        offset = self._offset + start * self._dtype.itemsize
        lent, handle = bytes_of(array), self._handle()
        if array.nbytes <= _CALLER_BYTES_MAX:
            handle.gather(self._file, [offset], array.nbytes, lent)
        else:
            handle.read(lent, self._file, offset)

    def _spread(self, value: Any, shape: tuple[int, ...]) -> Array:
        """Return values as a whole array of a shape, as numpy would assign them."""
        library = library_of(value)
        if self._library is not None:
            value = self._library.undress(value, self._tensor_dtype)
        elif library is not None:
            try:
                storable(value.dtype)
            except TypeError:
                raise TypeError(
                    f"a tensor of {value.dtype} cannot be assigned to elements of "
                    f"{self._dtype}; convert it first"
                ) from None
        same = isinstance(value, np.ndarray) and value.dtype == self._dtype
        if same and value.shape == shape:
            return np.ascontiguousarray(value).reshape(shape)
        array: Array = np.empty(shape, self._dtype)
        array[...] = value
        return array

    def _store(self, selection: Selection, array: Array) -> None:
        """Write what was selected."""
        item, handle = self._dtype.itemsize, self._handle()
        if selection.count == 1:
            offset = self._offset + selection.hull()[0] * item
            handle.write(bytes_of(array), self._file, offset)
            return
        starts = selection.starts()
        if selection.repeats:
            # The first of the reversed is the last, which is the one that numpy leaves.
            starts, last = np.unique(starts[::-1], return_index=True)
            array = array.reshape(selection.count, -1)[::-1][last]
        offsets = self._offset + starts * item
        handle.scatter(self._file, offsets, selection.run * item, bytes_of(array))

    def _rows(self, rows: Any) -> tuple[Positions, int, tuple[int, ...]]:
        """Return what to gather for rows: first rows, rows of each, shape of the result."""
        found = positions(rows, len(self), "rows")
        return found, 1, found.shape + self._shape[1:]

    def _windows(self, starts: Any, length: int) -> tuple[Positions, int, tuple[int, ...]]:
        """Return the same for windows."""
        length = whole("length", length, 0, len(self))
        found = positions(starts, len(self) - length + 1, "starts", wrap=False)
        return found, length, (*found.shape, length, *self._shape[1:])

    def _gather(
        self, starts: Positions, rows: int, shape: tuple[int, ...], out: Any
    ) -> Any:
        """Read records of neighbouring rows."""
        self._check_open()
        target, result = self._target(shape, out)
        nbytes = rows * self._row_bytes
        if starts.size and nbytes:
            offsets = self._offset + starts.ravel() * self._row_bytes
            self._handle().gather(self._file, offsets, nbytes, target)
        return result

    def _begin(self, starts: Positions, rows: int, shape: tuple[int, ...]) -> Request:
        """Start reading records of neighbouring rows."""
        self._check_open()
        target, result = self._target(shape, None)
        offsets = self._offset + starts.ravel() * self._row_bytes
        return self._handle().submit_gather(
            self._file, offsets, rows * self._row_bytes, target, result=result
        )

    @property
    def _row_bytes(self) -> int:
        """The size of a row."""
        return math.prod(self._shape[1:]) * self._dtype.itemsize

    def _target(self, shape: tuple[int, ...], out: Any) -> tuple[Any, Any]:
        """Return the memory to be filled, and what is returned for it."""
        if out is None:
            array: Array = np.empty(shape, self._dtype)
            return bytes_of(array), self._dressed(array)
        library = library_of(out)
        if library is not None:
            same = out.dtype == self._tensor_dtype
            if self._library is None:
                same = library.carrier(out.dtype) == self._dtype
        elif isinstance(out, np.ndarray):
            same = out.dtype == self._dtype
        else:
            raise TypeError(
                f"out is of type {type(out).__qualname__}; it must be an array or a tensor"
            )
        if not same:
            raise TypeError(f"out is of dtype {out.dtype}; it must be of {self.dtype}")
        nbytes = math.prod(shape) * self._dtype.itemsize
        if out.nbytes != nbytes:
            raise ValueError(
                f"out has {out.nbytes} bytes; the result, of shape {shape}, has {nbytes}"
            )
        return out if library else bytes_of(out), out

    def _dressed(self, array: Array) -> Any:
        """Return an array as what this one's results are."""
        if self._library is None:
            return array
        return self._library.dress(array, self._tensor_dtype)


def _check_handle(handle: Any) -> None:
    """Refuse what is no handle."""
    if handle is not None and not isinstance(handle, Handle):
        raise TypeError(
            f"handle is of type {type(handle).__qualname__}; it must be a Handle"
        )


def _raw_extents(
    file: File, dtype: np.dtype[Any], offset: int, shape: Shape
) -> tuple[int, ...]:
    """Return the shape of raw bytes, of which the size of the file may tell one extent."""
    axes = list(shape) if isinstance(shape, Sequence | np.ndarray) else [shape]
    unknown = [place for place, extent in enumerate(axes) if extent == -1]
    if not unknown:
        return extents_of(axes)
    known = extents_of([extent for extent in axes if extent != -1])
    row_bytes, size = math.prod(known) * dtype.itemsize, file.size
    if len(unknown) > 1 or row_bytes == 0:
        raise ValueError(
            f"the shape is {tuple(axes)} of elements of {dtype.itemsize} bytes; the size "
            "of a file tells one extent, where there are bytes"
        )
    if offset > size or (size - offset) % row_bytes:
        raise ValueError(
            f"{file.path!r} has {size} bytes; behind the offset {offset} they must be a "
            f"multiple of {row_bytes}, for the shape {tuple(axes)} and the dtype {dtype}"
        )
    axes[unknown[0]] = (size - offset) // row_bytes
    return extents_of(axes)


def _opened_anew(path: str | bytes, *, overwrite: bool) -> BinaryIO:
    """Open a file that is new or may be cut."""
    try:
        return open(path, "wb" if overwrite else "xb")
    except FileExistsError as error:
        words = f"{error.strerror}; overwrite=True makes it anew"
        raise FileExistsError(error.errno, words, path) from None


def _restore(
    kind: type[ArrayFile], path: Path, options: dict[str, Any], closed: bool
) -> ArrayFile:
    """Open what pickling carried; what was closed comes back closed."""
    array = kind(path, **options)
    if closed:
        array.close()
    return array
