"""Arrays on disk: numpy's indices, rows and windows, without a mapping of the file.

Which elements an index names is indexing.py's, what a header says npy_header.py's; here
they become reads, writes, gathers and scatters of a handle.
"""

import contextlib
import errno
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from nvmeio._arguments.checks import Shape, extents_of, flag, path_of, whole, word
from nvmeio._arguments.keywords import suggesting
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
from nvmeio._events.calls import BLOCKING, Calls, run
from nvmeio._files.descriptors import opened
from nvmeio._files.locks import locked
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

# Runs that are no farther apart than this on the average are read with what lies between
# them: about what the places of a run in the file and in the result take in memory, with
# the engine's own notes of it.
_SPACING_BYTES = 64

# A single run up to this size is read in the calling thread, which costs less than a hop to
# a worker; a larger one is shared out to the workers in blocks.
_CALLER_BYTES_MAX = 1 << 20

# What an iteration reads at once.
_PART_BYTES = 4 << 20

# As DLPack numbers devices.
_DLPACK_CPU = 1

After = Request | Iterable[Request] | None


@dataclass(frozen=True)
class _Transfer:
    """Records of a file, and the memory that they go to or come from."""

    offsets: Any  # of the records, in bytes
    nbytes: int  # of each
    memory: Any
    result: Any = None
    # What makes the result once the memory is filled, where it is not there before.
    make: Callable[[], Any] | None = None


class ArrayFile(Unread):
    """An array in a file, of which an index reads what it names.

    Parameters
    ----------
    path : str, bytes or os.PathLike
        A .npy file of version 1 to 3 in C order; or, where ``dtype`` is given, raw bytes.
    dtype : dtype of numpy or torch, optional
        Of raw bytes; or that of a .npy file, which must agree with its header.  One of
        torch's makes every result a tensor.
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
        array, or of another dtype than was passed; an argument is out of range.

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

    Comparisons, arithmetic and functions of numpy and torch are refused with a TypeError,
    because they would read the whole file unasked: read what you need first.
    numpy.asarray() and torch.as_tensor() read all of it.  An ArrayFile equals itself, so it
    can be a key; ``==`` with anything else is refused too, so look for one in a list by
    ``is``.

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
        self._is_raw = False
        word("mode", mode, ("r", "r+"))
        self._file = File(path, mode)
        # For a copy by pickle, wherever it will be.
        self._absolute = absolute(path)
        try:
            self._elements, layout = self._found(dtype)
        except BaseException:
            self._file.close()
            raise
        self._dtype, self._shape, self._offset = layout.dtype, layout.shape, layout.offset
        self._reaches_end = self._file.size == self._offset + self.nbytes

    def _found(self, dtype: Any) -> tuple[Elements, Layout]:
        """Return what the file has, and where."""
        if dtype is None:
            layout = self._npy_layout()
            return Elements(layout.dtype), layout
        library = library_of_dtype(dtype)
        elements = Elements(element_of(dtype), library, dtype if library else None)
        offset = whole("offset", self._arguments["offset"], 0, 2**63 - 1)
        if offset or not has_magic(self._file):
            self._is_raw = True
            return elements, self._raw_layout(elements.dtype, offset)
        layout = self._npy_layout()
        if elements.dtype != layout.dtype:
            raise ValueError(
                f"{self.path!r} is a .npy file of dtype {layout.dtype}; the dtype passed "
                f"is {elements.shown}.  To take it for raw bytes, pass the offset of its "
                f"data, {layout.offset}"
            )
        return elements, layout

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

    def _raw_layout(self, dtype: np.dtype[Any], offset: int) -> Layout:
        """Make a layout of what was passed."""
        shape = self._arguments["shape"]
        extents = _raw_extents(self._file, dtype, offset, -1 if shape is None else shape)
        layout = Layout(dtype, extents, offset)
        check_size(self._file, layout)
        return layout

    @classmethod
    @suggesting
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
        """Make a file of zeros, to be filled by assignments.

        Parameters
        ----------
        path : str, bytes or os.PathLike
            The file.
        shape : int or sequence of int
            The extent of each axis.
        dtype : dtype of numpy or torch
            Of plain bytes.  One of torch's makes every result a tensor.
        raw : bool, default False
            Whether the file has the elements alone, and not a .npy file's header.  To open
            it again takes ``dtype`` and ``shape``.
        overwrite : bool, default False
            Whether a file that exists is cut and filled anew.  Where there can be no file
            of the new size, it keeps what it has.
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

        Elements that numpy does not have, as bfloat16, are void of the same size in the
        header: numpy.load() gives their bytes, and ``ArrayFile(path,
        dtype=torch.bfloat16)`` tensors.
        """
        # All that can be refused is refused before a file is cut.
        _check_handle(handle)
        path, overwrite, raw = path_of(path), flag("overwrite", overwrite), flag("raw", raw)
        element, extents = element_of(dtype), extents_of(shape)
        header = b"" if raw else header_of(extents, element)
        size = Layout(element, extents, len(header)).nbytes + len(header)
        if size > 2**63 - 1:
            raise ValueError(f"an array of shape {extents} has {size} bytes, too many")
        check_extents(extents, element)
        with naming(path), _opened_anew(path, overwrite=overwrite) as stream:
            before = os.fstat(stream.fileno()).st_size
            try:
                # What the file system refuses is refused before anything is cut.
                stream.truncate(max(size, before))
                if stream.write(header) != len(header):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except BaseException:
                if overwrite:
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
        """The path, as it was given."""
        return self._file.path

    @property
    def shape(self) -> tuple[int, ...]:
        """The extent of each axis."""
        return self._shape

    @property
    def dtype(self) -> Any:
        """The dtype of the elements: torch's where it was given, else numpy's."""
        return self._elements.shown

    @property
    def ndim(self) -> int:
        """How many axes there are."""
        return len(self._shape)

    @property
    def size(self) -> int:
        """How many elements there are."""
        return math.prod(self._shape)

    @property
    def itemsize(self) -> int:
        """The size of an element in bytes."""
        return self._dtype.itemsize

    @property
    def strides(self) -> tuple[int, ...]:
        """How far apart neighbours along each axis are in the file, in bytes."""
        return tuple(stride * self.itemsize for stride in strides_of(self._shape))

    @property
    def offset(self) -> int:
        """Where in the file the data begin, in bytes."""
        return self._offset

    @property
    def nbytes(self) -> int:
        """The size of the array in bytes, the header not included."""
        return Layout(self._dtype, self._shape, 0).nbytes

    @property
    def mode(self) -> str:
        """ "r", or "r+" where items can be assigned to."""
        return "r" if self._file.mode == "rb" else "r+"

    @property
    def closed(self) -> bool:
        """Whether the file is closed."""
        return self._file.closed

    def __len__(self) -> int:
        if not self._shape:
            raise TypeError(f"{self.path!r}: an array of no axes has no length")
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
            raise ValueError("an array on disk cannot be had without a copy")
        if self._elements.library is not None and self._dtype.kind == "V":
            raise TypeError(f"numpy has no {self.dtype}; array[...] is a tensor")
        return np.asarray(self[...], dtype)

    def __dlpack__(self, **options: Any) -> Any:
        if options.get("copy") is False:
            raise BufferError("an array on disk cannot be had without a copy")
        return self[...].__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _DLPACK_CPU, 0

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
        self._check_open()
        return self._read(self._gathering(select_rows(rows, self._axes()), out))

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
        self._check_open()
        return self._read(self._windowing(starts, length, out))

    @suggesting
    def scatter(self, rows: Any, values: Any) -> None:
        """Write rows, in any order.

        Parameters
        ----------
        rows : array_like of int
            As for ``gather``.
        values : array_like or tensor
            Is broadcast to ``rows.shape + shape[1:]`` and converted, as by
            ``array[rows] = values``.

        Raises
        ------
        IndexError
            A position is out of bounds; names the first, before anything is written.
        OSError
            Rows cannot be written; with errno and path, see ``Handle.scatter``.
        TypeError
            ``rows`` are not integers, or ``values`` are not of such elements.
        ValueError
            ``values`` do not fit; the file is closed, or open read-only.

        Notes
        -----
        Of several values for the same row the last one counts.  Runs in the calling thread,
        without the GIL.
        """
        self._write(self._scattering(rows, values))

    @suggesting
    def append(self, values: Any) -> None:
        """Write rows behind the last one, and make the array longer by them.

        Parameters
        ----------
        values : array_like or tensor
            Of shape ``(n,) + shape[1:]``; is converted as by an assignment.

        Raises
        ------
        OSError
            The rows cannot be written; with errno and path.  ENOSPC: the drive is full.
            ESTALE: the file was replaced or removed since it was opened.
        TypeError
            The array has no axes, or ``values`` are not of such elements.
        ValueError
            ``values`` are of another shape; the header of the .npy file has no room for
            the new shape (that of ``create``, ``save`` and numpy has); another array, or
            in a raw file any bytes, are behind this one; the file is another array by now;
            it is closed, or open read-only.

        Notes
        -----
        Returns when anyone who opens the file can read the rows.  ``shape`` includes them
        here; another ArrayFile keeps its shape until its ``refresh``.
        ``flush`` makes them durable.

        First the rows are written and, in a .npy file, synced, then the shape in the
        header.  Whenever the process dies or the power fails, the file is an array with
        all of the rows or with none; what such an append has left behind the array, the
        next one overwrites.  It cannot tell that from bytes of another program's: do not
        append to a .npy file that has something else than arrays behind its array.  After
        an error the file is as it was.  A raw file has no header: a process that is killed
        meanwhile may leave a part of the rows.

        Appends wait for each other by a lock of the file (flock), those of other processes
        and threads included, and each adds to what is there by then.
        """
        self._check_writable()
        self._axes()
        rows = self._elements.rows(values, self._shape)
        with naming(self.path), locked(self._file.fileno()) as descriptor:
            self._check_can_append()
            layout = self._layout_now(descriptor)
            if not self._is_raw and has_magic(self._file, layout.offset + layout.nbytes):
                raise ValueError(f"{self.path!r} has another array behind this one")
            if len(rows):
                self._append(rows, layout, descriptor)
            self._take_shape((layout.shape[0] + len(rows), *layout.shape[1:]))

    def refresh(self) -> None:
        """Take over the rows that others have appended since the file was opened.

        Raises
        ------
        OSError
            With errno and path.  ESTALE: the file was replaced or removed since it was
            opened.
        ValueError
            The file is another array by now, or closed.

        Notes
        -----
        Changes ``shape`` alone, without waiting for an append that is under way.  An array
        of raw bytes that did not reach the end of its file when it was opened stays as it
        is.
        """
        self._check_open()
        with (
            naming(self.path),
            opened(f"/proc/self/fd/{self._file.fileno()}", os.O_RDONLY) as descriptor,
        ):
            self._take_shape(self._layout_now(descriptor).shape)

    def _take_shape(self, shape: tuple[int, ...]) -> None:
        """Have the shape that the file has by now."""
        self._shape = shape
        if self._is_raw and self._reaches_end and shape:
            # For a copy by pickle.
            self._arguments["shape"] = (-1, *shape[1:])

    @suggesting
    def prefetch(self, index: Any, out: Any = None, *, after: After = None) -> Request:
        """Start reading what an index names.

        Parameters
        ----------
        index : index
            Whatever ``array[index]`` takes: an integer, a slice, an array of rows, a mask,
            Ellipsis, a tuple of these, fields.
        out : array or tensor, optional
            Is filled; of the result's dtype and size.
        after : Request or iterable of Request, optional
            Requests of the same handle that are to be done first, as for
            ``Handle.submit_read``.

        Returns
        -------
        Request
            Its ``wait()`` and ``result()``, and ``await``, return ``out``, or what
            ``array[index]`` would.

        Raises
        ------
        IndexError, TypeError, ValueError
            As ``array[index]`` and ``gather``, at once.  What fails later is raised by
            ``Request.wait``.

        Notes
        -----
        The request holds ``out`` and the file until it is done.  Fields, and slices that
        are read together with the gaps between their elements, are copied to the result by
        the thread that waits; ``after`` takes no such request.
        """
        return self._begin(self._reading(index, out), after)

    @suggesting
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
            Its ``wait()`` and ``result()``, and ``await``, return what ``windows(...)``
            would.

        Raises
        ------
        IndexError, TypeError, ValueError
            As ``windows``, at once.  What fails later is raised by ``Request.wait``.
        """
        self._check_open()
        return self._begin(self._windowing(starts, length, out), after)

    @suggesting
    def submit_scatter(self, rows: Any, values: Any, *, after: After = None) -> Request:
        """Start writing rows.

        Parameters
        ----------
        rows, values
            As for ``scatter``; ``values`` must not change until the request is done.
        after : Request or iterable of Request, optional
            As for ``prefetch``.

        Returns
        -------
        Request
            Its result is the number of bytes written.

        Raises
        ------
        IndexError, TypeError, ValueError
            As ``scatter``, at once.  What fails later is raised by ``Request.wait``.

        Notes
        -----
        As ``submit_setitem``.
        """
        return self._begin_writing(self._scattering(rows, values), after)

    @suggesting
    def submit_setitem(self, index: Any, value: Any, *, after: After = None) -> Request:
        """Start an assignment, ``array[index] = value``.

        Parameters
        ----------
        index : index
            Whatever ``array[index] = value`` takes.
        value : array_like or tensor
            Is broadcast and converted; must not change until the request is done.
        after : Request or iterable of Request, optional
            As for ``prefetch``.

        Returns
        -------
        Request
            Its result is the number of bytes written.

        Raises
        ------
        IndexError, TypeError, ValueError
            As the assignment, at once.  What fails later is raised by ``Request.wait``.

        Notes
        -----
        A value of the array's dtype and of the right shape, in C order and in memory of
        the host, is written from where it is, and held until the request is done; any other
        is copied first.  Requests in flight are not ordered: what touches the same elements
        must wait, or be chained by ``after``.
        """
        return self._begin_writing(self._writing(index, value), after)

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
        run(self._flushing(BLOCKING, sync=sync))

    async def _flushing(self, calls: Calls, *, sync: bool) -> None:
        """Make durable what was assigned."""
        self._check_open()
        if not flag("sync", sync):
            return
        made, handle = self._created, self._handle()
        folder = contextlib.nullcontext() if made is None else synced_folder(made)
        async with calls.entered(folder):
            await calls.transfer(handle.fsync, handle.submit_fsync, self._file)
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

    def _axes(self) -> tuple[int, ...]:
        """Return the shape, of which there is a first extent."""
        len(self)
        return self._shape

    def _reading(self, index: Any, out: Any) -> _Transfer:
        """Return how to read what an index names."""
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
        """Return how to read what was selected, and not a byte more."""
        target, result = self._target(selection.shape, self._dtype, out)
        offsets, nbytes = self._records(selection)
        if selection.scalar and out is None and self._elements.library is None:
            return _Transfer(offsets, nbytes, target, make=partial(result.__getitem__, ()))
        return _Transfer(offsets, nbytes, target, result)

    def _records(self, selection: Selection) -> tuple[Any, int]:
        """Return where in the file the runs of a selection begin, and their size."""
        item = self._dtype.itemsize
        if selection.run == 0:
            return [], 0
        return self._offset + selection.starts() * item, selection.run * item

    def _layout_now(self, descriptor: int) -> Layout:
        """Return the layout of the file, which another process may have made longer."""
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
                f"{self.path!r} is another array by now, of shape {layout.shape} and dtype "
                f"{layout.dtype}; open it again"
            )
        return layout

    @property
    def _can_grow(self) -> bool:
        """Whether the size of a file of raw bytes says how many rows it has."""
        return bool(self._shape and self._row_bytes and self._reaches_end)

    def _check_can_append(self) -> None:
        """Refuse raw bytes that cannot have more rows."""
        if self._is_raw and not self._can_grow:
            why = (
                "rows have no bytes" if self._reaches_end else "bytes are behind the array"
            )
            raise ValueError(f"rows cannot be appended to {self.path!r}: {why}")

    def _append(self, rows: Array, layout: Layout, descriptor: int) -> None:
        """Write rows behind those that there are, and then the header."""
        shape = (layout.shape[0] + len(rows), *layout.shape[1:])
        old = os.pread(descriptor, 0 if self._is_raw else layout.offset, 0)
        new = old and replace_shape(self.path, old, shape, layout.dtype)
        end, handle = layout.offset + layout.nbytes, self._handle()
        # What an append has left that was killed.
        if os.fstat(descriptor).st_size > end:
            os.ftruncate(descriptor, end)
        try:
            if rows.nbytes:
                handle.write(bytes_of(rows), self._file, end)
            if new != old:
                handle.fsync(self._file, data_only=True)
                _write_changes(descriptor, old, new)
        except BaseException:
            # Who was interrupted may have written the header already.
            if os.pread(descriptor, len(old), 0) == old:
                os.ftruncate(descriptor, end)
            raise

    def _field_reading(self, index: Any, out: Any) -> _Transfer:
        """Return how to read whole records, of which fields are taken."""
        records: Array = np.empty(self._shape, self._dtype)
        part = records[index]
        target, result = self._target(part.shape, part.dtype, out)

        def make() -> Any:
            _copy(target, np.ascontiguousarray(part))
            return result

        offsets = [self._offset] if records.nbytes else []
        return _Transfer(offsets, records.nbytes, bytes_of(records), make=make)

    def _windowing(self, starts: Any, length: int, out: Any) -> _Transfer:
        """Return how to read windows."""
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
        """Refuse to write to a file that is closed or open read-only."""
        self._check_open()
        if self.mode == "r":
            raise ValueError(f"{self.path!r} is open read-only; open it with mode='r+'")

    def _writing(self, index: Any, value: Any) -> _Transfer:
        """Return how to assign a value."""
        self._check_writable()
        if self._names_fields(index):
            raise IndexError(f"the index is {index!r}; assign whole records")
        return self._storing(select(index, self._shape), value)

    def _scattering(self, rows: Any, values: Any) -> _Transfer:
        """Return how to write rows."""
        self._check_writable()
        return self._storing(select_rows(rows, self._axes()), values)

    def _storing(self, selection: Selection, value: Any) -> _Transfer:
        """Return how to write what was selected."""
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

    def _begin_writing(self, transfer: _Transfer, after: After) -> Request:
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
        """Return the memory to be filled, and what is returned for it."""
        if out is None:
            array: Array = np.empty(shape, dtype)
            return bytes_of(array), self._elements.dress(array)
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
            # Says why a sparse tensor cannot be filled.
            borrow(out, writable=True)
            raise
        if found != nbytes:
            raise ValueError(
                f"out has {found} bytes; the result, of shape {shape}, has {nbytes}"
            )
        return out if library else bytes_of(out), out


def _copy(target: Any, array: Array) -> None:
    """Copy an array to what ``_target`` has returned: bytes, or a tensor."""
    library = library_of(target)
    if library is None:
        memcpy(target, bytes_of(array))
    else:
        memcpy(target, library.dress(np.ascontiguousarray(array), target.dtype))


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


def _write_changes(descriptor: int, old: bytes, new: bytes) -> None:
    """Write what differs of a header, a few bytes, at once: they are never half written."""
    places = [place for place in range(len(new)) if old[place] != new[place]]
    begin, end = places[0], places[-1] + 1
    while begin < end:
        begin += os.pwrite(descriptor, new[begin:end], begin)


def _opened_anew(path: str | bytes, *, overwrite: bool) -> IO[bytes]:
    """Open a file that is new or may be cut, which the caller does."""
    try:
        mode = "wb" if overwrite else "xb"
        # Without a buffer, which close() would write out after an error, too.
        return open(path, mode, buffering=0, opener=_opened_uncut)
    except FileExistsError as error:
        words = f"{error.strerror}; overwrite=True makes it anew"
        raise FileExistsError(error.errno, words, path) from None


def _opened_uncut(path: str | bytes, flags: int) -> int:
    """Open a file as open() would, but leave in it what it has."""
    return os.open(path, flags & ~os.O_TRUNC, 0o666)


def _restore(
    kind: type[ArrayFile], path: Path, options: dict[str, Any], closed: bool
) -> ArrayFile:
    """Open what pickling carried; what was closed comes back closed."""
    array = kind(path, **options)
    if closed:
        array.close()
    return array
