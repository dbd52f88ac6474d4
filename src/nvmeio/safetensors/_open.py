"""``safe_open``: read tensors of a file one by one, with read-ahead."""

import os
import threading
import weakref
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from nvmeio._arguments.checks import shown, whole
from nvmeio._events.forks import call_in_child
from nvmeio._safetensors.file import Direct, Mapped, ModelFile, mapped_choice
from nvmeio._safetensors.header import FileLayout, Tensor
from nvmeio._safetensors.loading import Loading, Wanted, load, look_up, wanted
from nvmeio._tensors.dtypes import BITS
from nvmeio._tensors.errors import SafetensorError
from nvmeio._tensors.frameworks import Framework, framework_of
from nvmeio._tensors.slices import plan

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["TensorSlice", "check_backend", "rules_of", "safe_open", "selected"]

BACKENDS = ("mmap", "pread")

# How many whole tensors must be read in the order of the file before read-ahead begins.
# The number doubles each time that read-ahead was in vain.
IN_ORDER = 2
RUN_MAX = 1 << 16
# How much is read ahead at first: this, or two tensors.  It doubles with each tensor taken.
WINDOW_BYTES = 1 << 20
# The size of a batch of neighbouring tensors that are read together.
BATCH_BYTES = 32 << 20
READ_AHEAD_MAX = (1 << 63) - 1


def check_backend(backend: str) -> None:
    """Raise SafetensorError for an unknown backend, as safetensors does."""
    if backend not in BACKENDS:
        raise SafetensorError(
            f'backend "{backend}" is invalid (expected one of: "mmap", "pread")'
        )


def rules_of(framework: Framework, backend: str) -> Literal["safetensors", "torch"]:
    """Return whose rules apply to the index of a slice."""
    return "torch" if framework.by_torch and backend == "mmap" else "safetensors"


class _Batch(NamedTuple):
    """Tensors that are being read ahead."""

    loading: Loading
    names: list[str]


def _size(tensor: Tensor) -> int:
    return tensor.end - tensor.begin


def _require_name(name: Any) -> None:
    if not isinstance(name, str):
        kind = "'None'" if name is None else f"'{type(name).__name__}' object"
        raise TypeError(f"argument 'name': {kind} is not an instance of 'str'")


# All open files, which are reset in a forked child.
_of_process: "weakref.WeakSet[safe_open]" = weakref.WeakSet()


class safe_open:  # noqa: N801
    """Open a safetensors file, and read its tensors on demand.

    Parameters
    ----------
    filename : str or os.PathLike
        The file to read.
    framework : {"pt", "torch", "pytorch", "np", "numpy"}
        Whether to return torch tensors or numpy arrays.
    device : str, int or torch.device, default "cpu"
        The device of torch tensors.
    backend : {"mmap", "pread"}, default "mmap"
        As in safetensors, it selects the rules for indices of slices with torch: torch's
        own ("mmap"), or those of safetensors ("pread").  Whether the file is mapped depends
        on `mapped` alone.
    direct : {"auto", True, False}, default "auto"
        Whether to bypass the page cache.  "auto": for what it does not have.  True:
        always, which fails if the file system lacks O_DIRECT.  False: never.
    read_ahead : int, default 256 MiB
        The limit of read-ahead in bytes: tensors that are being read, or were read and not
        taken yet.  0 turns it off.  Read-ahead begins once whole tensors are read in the
        order of the file.  Its window begins with 1 MiB or two tensors, and doubles with
        each tensor.
    mapped : {False, True, "auto"}, default False
        Whether to map the file instead of reading it, as for ``load_file``; "auto": if the
        page cache has all of it when it is opened, and `direct` is not True.  Parts in one
        run of bytes, such as rows, are mapped too; others are read.

    Raises
    ------
    SafetensorError
        The file is not a valid safetensors file, or the framework, device or backend is
        unknown.
    TypeError, ValueError
        An argument is of the wrong type or out of range.
    OSError
        The file cannot be opened or read.

    Notes
    -----
    Thread-safe.  A forked child can use the file too; it starts without read-ahead.  Each
    tensor has its own memory, independent of the file, unless it is mapped.  If the file's
    size or modification time changes while tensors are read, a SafetensorError is raised.

    Examples
    --------
    >>> tensors = {"weight": np.arange(12).reshape(3, 4), "bias": np.zeros(4)}
    >>> nvmeio.safetensors.numpy.save_file(tensors, "model.safetensors")
    >>> with nvmeio.safetensors.safe_open("model.safetensors", "np") as file:
    ...     print(file.keys())
    ...     file.get_slice("weight")[0]
    ['bias', 'weight']
    array([0, 1, 2, 3])
    """

    def __init__(
        self,
        filename: str | os.PathLike[str],
        framework: str,
        device: Any = "cpu",
        *,
        backend: Literal["mmap", "pread"] = "mmap",
        direct: Direct = "auto",
        read_ahead: int = 256 << 20,
        mapped: Mapped = False,
    ) -> None:
        check_backend(backend)
        self._read_ahead = whole("read_ahead", read_ahead, 0, READ_AHEAD_MAX)
        if not isinstance(framework, str):
            kind = f"'{type(framework).__name__}' object"
            kind = "'None'" if framework is None else kind
            raise TypeError(f"argument 'framework': {kind} is not an instance of 'str'")
        self._framework = framework_of(framework, device)
        self._rules = rules_of(self._framework, backend)
        mapped = mapped_choice(mapped, direct)
        self._file: ModelFile | None = ModelFile(filename, direct, mapped)
        if self._file.map is not None:
            self._read_ahead = 0
        self._places = {
            tensor.name: place for place, tensor in enumerate(self._file.layout.tensors)
        }
        self._begin()
        _of_process.add(self)

    def _begin(self) -> None:
        """Start without read-ahead; in a forked child, pending reads are the parent's."""
        self._lock = threading.Lock()
        # The batches that have the tensors read ahead, by name, and their size in bytes.
        self._ahead: dict[str, _Batch] = {}
        self._held = 0
        # The last tensor asked for, how many came in order, and the last one read ahead.
        self._last, self._in_order, self._asked = -1, 0, -1
        self._run, self._window = IN_ORDER, WINDOW_BYTES

    def _require_open(self) -> ModelFile:
        file = self._file
        if file is None:
            raise SafetensorError("File is closed")
        return file

    def _layout(self) -> FileLayout:
        """Return the layout of the file; dcp uses it."""
        return self._require_open().layout

    def keys(self) -> list[str]:
        """Return the names of the tensors, sorted.

        Returns
        -------
        list of str
            The names.

        Raises
        ------
        SafetensorError
            The file is closed.
        """
        return self._require_open().layout.names

    def offset_keys(self) -> list[str]:
        """Return the names of the tensors, in the order of the file.

        Returns
        -------
        list of str
            The names.

        Raises
        ------
        SafetensorError
            The file is closed.

        Examples
        --------
        >>> tensors = {"a": np.ones(3, np.int8), "b": np.ones(3)}
        >>> nvmeio.safetensors.numpy.save_file(tensors, "model.safetensors")
        >>> with nvmeio.safetensors.safe_open("model.safetensors", "np") as file:
        ...     file.keys(), file.offset_keys()
        (['a', 'b'], ['b', 'a'])
        """
        return [tensor.name for tensor in self._require_open().layout.tensors]

    def metadata(self) -> dict[str, str] | None:
        """Return the metadata of the file.

        Returns
        -------
        dict of str to str, or None
            The metadata; None if the file has none.

        Raises
        ------
        SafetensorError
            The file is closed.

        Examples
        --------
        >>> tensors, metadata = {"bias": np.ones(3)}, {"format": "np"}
        >>> nvmeio.safetensors.numpy.save_file(tensors, "model.safetensors", metadata)
        >>> with nvmeio.safetensors.safe_open("model.safetensors", "np") as file:
        ...     file.metadata()
        {'format': 'np'}
        """
        kept = self._require_open().layout.metadata
        return None if kept is None else dict(kept)

    def get_tensor(self, name: str) -> Any:
        """Read a tensor.

        Parameters
        ----------
        name : str
            The name of the tensor, one of ``keys()``.

        Returns
        -------
        torch.Tensor or numpy.ndarray
            The tensor, in its own memory unless mapped.

        Raises
        ------
        SafetensorError
            The file has no such tensor, no framework has its dtype, or the file has
            changed or is closed.
        AttributeError, TypeError
            This framework lacks the dtype, or `name` is not a str.
        OSError
            The file cannot be read.
        MemoryError
            Not enough memory.

        Examples
        --------
        >>> nvmeio.safetensors.numpy.save_file({"bias": np.ones(3)}, "model.safetensors")
        >>> with nvmeio.safetensors.safe_open("model.safetensors", "np") as file:
        ...     file.get_tensor("bias")
        array([1., 1., 1.])
        """
        file = self._require_open()
        _require_name(name)
        (each,) = wanted(file, [name], self._framework)
        return self._whole(file, each)

    def _whole(self, file: ModelFile, each: Wanted) -> Any:
        """Take a tensor from read-ahead, or read it."""
        name = each.tensor.name
        batch = None
        with self._lock:
            # After the file was closed, slices still read from it, but without read-ahead.
            if self._file is file:
                batch = self._batch_of(file, name)
        found = None
        if batch is not None:
            try:
                found = batch.loading.take(name)
            except Exception:
                # The failure may be another tensor's, so read this one again, alone.
                self._forget(batch)
        return load([each], self._framework)[name] if found is None else found

    def _batch_of(self, file: ModelFile, name: str) -> _Batch | None:
        """Return the batch that has a tensor, if any, and start reading ahead."""
        place = self._places[name]
        found = self._ahead.pop(name, None)
        if found is not None:
            self._held -= _size(file.layout.tensors[place])
            self._last = max(place, self._last)
            self._window = min(2 * self._window, self._read_ahead)
        elif place == self._last + 1:
            self._last, self._in_order = place, self._in_order + 1
            if self._in_order > self._run:
                # It was in order but not read ahead, because the window was too small.
                self._window = min(2 * self._window, self._read_ahead)
        else:
            self._last, self._in_order = place, 1
            self._drop()
            self._window = max(WINDOW_BYTES, 2 * _size(file.layout.tensors[place]))
        # Tensors on a device also need a copy, which cannot be done ahead here.
        if self._in_order >= self._run and self._framework.on_host and self._read_ahead:
            self._follow(file)
        return found

    def _follow(self, file: ModelFile) -> None:
        """Start reading the next tensors, as many as fit in the window."""
        tensors = file.layout.tensors
        window = min(self._window, self._read_ahead)
        full = min(BATCH_BYTES, window // 4)
        next_place = 1 + max(self._last, self._asked)
        while next_place < len(tensors) and self._held < window:
            low, size = next_place, 0
            while next_place < len(tensors) and (size < full or next_place == low):
                more = _size(tensors[next_place])
                if self._held + size + more > window:
                    break
                size, next_place = size + more, next_place + 1
            # Unless it has the file's last tensors, wait until a whole batch fits.
            if next_place == low or (size < full and next_place < len(tensors)):
                return
            names = [tensor.name for tensor in tensors[low:next_place]]
            try:
                loading = Loading(wanted(file, names, self._framework), self._framework)
            except Exception:
                # The error is raised when such a tensor is asked for.
                self._read_ahead = 0
                return
            self._ahead.update(dict.fromkeys(names, _Batch(loading, names)))
            self._held, self._asked = self._held + size, next_place - 1

    def _drop(self) -> None:
        """Cancel all read-ahead; if it was in vain, require a longer run the next time."""
        if self._ahead:
            self._run = min(2 * self._run, RUN_MAX)
        for batch in {id(batch): batch for batch in self._ahead.values()}.values():
            batch.loading.abandon()
        self._ahead.clear()
        self._held, self._asked = 0, -1

    def _forget(self, batch: _Batch) -> None:
        """Remove a batch that has failed."""
        with self._lock:
            layout = self._file.layout if self._file is not None else None
            for name in batch.names:
                if self._ahead.get(name) is batch and layout is not None:
                    del self._ahead[name]
                    self._held -= _size(layout.by_name[name])

    def get_tensors(self) -> dict[str, Any]:
        """Read all tensors, in one submission.

        Returns
        -------
        dict of str to torch.Tensor or numpy.ndarray
            The tensors, in the order of the file.

        Raises
        ------
        SafetensorError, OSError, MemoryError
            As ``get_tensor``.

        Examples
        --------
        >>> nvmeio.safetensors.numpy.save_file({"bias": np.ones(3)}, "model.safetensors")
        >>> with nvmeio.safetensors.safe_open("model.safetensors", "np") as file:
        ...     file.get_tensors()
        {'bias': array([1., 1., 1.])}
        """
        return load(wanted(self._require_open(), None, self._framework), self._framework)

    def get_slice(self, name: str) -> "TensorSlice":
        """Return an object that reads part of a tensor when it is indexed.

        Parameters
        ----------
        name : str
            The name of the tensor, one of ``keys()``.

        Returns
        -------
        TensorSlice
            Index it to read: ``file.get_slice("weight")[:10]``.

        Raises
        ------
        SafetensorError
            The file has no such tensor, or is closed.
        """
        file = self._require_open()
        _require_name(name)
        return TensorSlice(self, file, look_up(file, name))

    def get_many(
        self, indices: Mapping[str, Any], out: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Read several tensors or parts of tensors, in one submission.

        Parameters
        ----------
        indices : dict of str to index or None
            The index of each tensor, as in ``get_slice(name)[index]``; None for the whole
            tensor.  Only these bytes are read.
        out : dict of str to torch.Tensor or numpy.ndarray, optional
            Tensors to read into, of the same dtypes and shapes as the results.

        Returns
        -------
        dict of str to torch.Tensor or numpy.ndarray
            The tensors, in the order of `indices`; with `out`, its tensors.

        Raises
        ------
        SafetensorError, TypeError, IndexError
            As ``get_slice`` and ``get_tensor``; nothing was read.
        ValueError
            `out` lacks a tensor, or has one of another dtype or shape; nothing was read.

        Examples
        --------
        >>> tensors = {"weight": np.arange(12).reshape(3, 4), "bias": np.zeros(4)}
        >>> nvmeio.safetensors.numpy.save_file(tensors, "model.safetensors")
        >>> with nvmeio.safetensors.safe_open("model.safetensors", "np") as file:
        ...     found = file.get_many({"weight": np.s_[:, 1], "bias": None})
        >>> found["weight"], found["bias"]
        (array([1, 5, 9]), array([0., 0., 0., 0.]))
        """
        file = self._require_open()
        if not isinstance(indices, Mapping):
            raise TypeError(
                f"indices is {shown(indices)}; it must be a dict from names to indices, or "
                "to None for whole tensors"
            )
        chosen = [
            selected(file, name, index, self._framework, self._rules)
            for name, index in indices.items()
        ]
        return load(chosen, self._framework, out=out)

    def _read_slice(self, file: ModelFile, tensor: Tensor, index: Any) -> Any:
        (each,) = wanted(file, [tensor.name], self._framework)
        part = _part(each, index, self._framework, self._rules)
        if part.offsets is None:
            return self._whole(file, each).reshape(part.shape)
        with self._lock:
            self._in_order = 0
        return load([part], self._framework)[tensor.name]

    def __enter__(self) -> "Self":
        """Return this file; the end of the block closes it."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
        /,
    ) -> None:
        """Close the file; tensors stay valid, and slices can still be read."""
        with self._lock:
            self._drop()
            self._file = None


def selected(
    file: ModelFile,
    name: str,
    index: Any,
    framework: Framework,
    rules: Literal["safetensors", "torch"],
) -> Wanted:
    """Return the part of a tensor that an index selects; None selects all of it."""
    (each,) = wanted(file, [name], framework)
    return each if index is None else _part(each, index, framework, rules)


def _part(
    each: Wanted, index: Any, framework: Framework, rules: Literal["safetensors", "torch"]
) -> Wanted:
    """Return the part of a tensor that an index selects; None is an index too."""
    tensor = each.tensor
    found = plan(index, tensor.shape, BITS[tensor.dtype], rules=rules)
    nbytes = len(found.offsets) * found.run_bytes
    shape = framework.shape(tensor.dtype, found.shape)
    # A single run of all bytes is the whole tensor.
    runs = None if found.run_bytes == each.nbytes == nbytes else found.offsets
    return each._replace(shape=shape, offsets=runs, nbytes=nbytes)


class TensorSlice:
    """Read part of a tensor by indexing; ``safe_open(...).get_slice(name)`` makes it.

    Examples
    --------
    >>> tensors = {"weight": np.arange(12).reshape(3, 4)}
    >>> nvmeio.safetensors.numpy.save_file(tensors, "model.safetensors")
    >>> with nvmeio.safetensors.safe_open("model.safetensors", "np") as file:
    ...     part = file.get_slice("weight")
    ...     print(isinstance(part, nvmeio.safetensors.TensorSlice))
    ...     print(part.get_dtype(), part.get_shape())
    ...     part[1:, 2]
    True
    I64 [3, 4]
    array([ 6, 10])
    """

    def __init__(self, opened: safe_open, file: ModelFile, tensor: Tensor) -> None:
        self._opened, self._file, self._tensor = opened, file, tensor

    def get_shape(self) -> list[int]:
        """Return the shape of the whole tensor, as in the header."""
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        """Return the dtype as in the header, such as "F32"."""
        return self._tensor.dtype

    def __getitem__(self, index: Any) -> Any:
        """Read the part that an index selects.

        Parameters
        ----------
        index : int, slice, Ellipsis, None, tensor, list or tuple of these
            As safetensors 0.8 accepts it: with torch and ``backend="mmap"`` any index of
            torch, else integers, slices with a positive step and an Ellipsis.

        Returns
        -------
        torch.Tensor or numpy.ndarray
            The part, in its own memory unless mapped.

        Raises
        ------
        SafetensorError, IndexError, TypeError
            The index is invalid or out of range.
        OSError
            The file cannot be read.
        """
        return self._opened._read_slice(self._file, self._tensor, index)


def _safe_open_handle(
    f: Any,
    framework: str,
    device: Any = "cpu",
    *,
    backend: Literal["mmap", "pread"] = "mmap",
    mapped: Mapped = False,
) -> safe_open:
    """Open a safetensors file that Python has open; safetensors has this function too."""
    path = f"/proc/self/fd/{f.fileno()}"
    return safe_open(path, framework, device, backend=backend, mapped=mapped)


def _begin_anew() -> None:
    for each in list(_of_process):
        each._begin()


call_in_child(_begin_anew)
