"""safe_open: tensors of an open file one by one, with those that follow read ahead."""

import os
import threading
import weakref
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal, NamedTuple

from typing_extensions import Self

from nvmeio._arguments.checks import whole
from nvmeio._events.forks import call_in_child
from nvmeio.safetensors._dtypes import BITS
from nvmeio.safetensors._errors import SafetensorError
from nvmeio.safetensors._file import Direct, ModelFile
from nvmeio.safetensors._frameworks import Framework, framework_of
from nvmeio.safetensors._header import Layout, Tensor
from nvmeio.safetensors._loading import Loading, Wanted, load, look_up, wanted
from nvmeio.safetensors._slices import plan

__all__ = ["TensorSlice", "check_backend", "rules_of", "safe_open", "selected"]

BACKENDS = ("mmap", "pread")

# Whole tensors that must have been asked for, one after the other, before others are read;
# twice as many each time that this was in vain.
IN_ORDER = 2
RUN_MAX = 1 << 16
# How much is read ahead at first, or two tensors; it doubles with each that is asked for.
WINDOW_BYTES = 1 << 20
# Tensors that follow each other are read together, up to so much.
BATCH_BYTES = 32 << 20
READ_AHEAD_MAX = (1 << 63) - 1


def check_backend(backend: str) -> None:
    """Refuse what safetensors refuses; nothing depends on it but who reads an index."""
    if backend not in BACKENDS:
        raise SafetensorError(
            f'backend "{backend}" is invalid (expected one of: "mmap", "pread")'
        )


def rules_of(framework: Framework, backend: str) -> Literal["safetensors", "torch"]:
    """Say who reads the index of a slice."""
    return "torch" if framework.by_torch and backend == "mmap" else "safetensors"


class _Batch(NamedTuple):
    """Tensors that are on their way."""

    loading: Loading
    names: list[str]


def _size(tensor: Tensor) -> int:
    return tensor.end - tensor.begin


def _require_name(name: Any) -> None:
    if not isinstance(name, str):
        kind = "'None'" if name is None else f"'{type(name).__name__}' object"
        raise TypeError(f"argument 'name': {kind} is not an instance of 'str'")


# A forked child begins anew with each.
_of_process: "weakref.WeakSet[safe_open]" = weakref.WeakSet()


class safe_open:  # noqa: N801
    """Open a safetensors file, and read tensors of it when they are asked for.

    Parameters
    ----------
    filename : str or os.PathLike
        The file.
    framework : {"pt", "torch", "pytorch", "np", "numpy"}
        Whose tensors are made.
    device : str, int or torch.device, default "cpu"
        Where tensors of torch go.
    backend : {"mmap", "pread"}, default "mmap"
        Accepted, because safetensors has it; nothing is ever mapped.  As there, it decides
        who reads the index of a slice for torch: torch itself, or safetensors' rules.
    direct : {"auto", True, False}, default "auto"
        Whether to read past the page cache: where it has less than half of the file,
        always (then the file system must have O_DIRECT), or never.
    read_ahead : int, default 256 MiB
        How many bytes may be on their way, or wait to be asked for, once whole tensors are
        asked for in the order of the file; 0: none.  It begins with two tensors and doubles
        as long as the order holds.

    Raises
    ------
    SafetensorError
        The file is no safetensors file, or the framework, device or backend is unknown.
    OSError
        The file cannot be opened.

    Notes
    -----
    Thread-safe.  A forked child goes on with the file, without what was on its way.  Every
    tensor has memory of its own, which holds no file.  If the file's size or time of
    modification changes while tensors are read, that is a SafetensorError.

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
    ) -> None:
        check_backend(backend)
        self._read_ahead = whole("read_ahead", read_ahead, 0, READ_AHEAD_MAX)
        if not isinstance(framework, str):
            kind = f"'{type(framework).__name__}' object"
            kind = "'None'" if framework is None else kind
            raise TypeError(f"argument 'framework': {kind} is not an instance of 'str'")
        self._framework = framework_of(framework, device)
        self._rules = rules_of(self._framework, backend)
        self._file: ModelFile | None = ModelFile(filename, direct)
        self._places = {
            tensor.name: place for place, tensor in enumerate(self._file.layout.tensors)
        }
        self._begin()
        _of_process.add(self)

    def _begin(self) -> None:
        """Know of nothing on its way; in a forked child, what is belongs to the parent."""
        self._lock = threading.Lock()
        # What brings a tensor that nobody has taken yet, by its name, and how much that is.
        self._ahead: dict[str, _Batch] = {}
        self._held = 0
        # The last place that was asked for, how many in order, and the last one read ahead.
        self._last, self._in_order, self._asked = -1, 0, -1
        self._run, self._window = IN_ORDER, WINDOW_BYTES

    def _opened(self) -> ModelFile:
        file = self._file
        if file is None:
            raise SafetensorError("File is closed")
        return file

    def _layout(self) -> Layout:
        """Return all that the header says."""
        return self._opened().layout

    def keys(self) -> list[str]:
        """Return the names of the tensors, sorted."""
        return self._opened().layout.names

    def offset_keys(self) -> list[str]:
        """Return the names of the tensors, in the order of the file."""
        return [tensor.name for tensor in self._opened().layout.tensors]

    def metadata(self) -> dict[str, str] | None:
        """Return the text that is kept with the tensors; None where there is none."""
        kept = self._opened().layout.metadata
        return None if kept is None else dict(kept)

    def get_tensor(self, name: str) -> Any:
        """Read a tensor.

        Parameters
        ----------
        name : str
            One of ``keys()``.

        Returns
        -------
        torch.Tensor or numpy.ndarray
            In memory of its own.

        Raises
        ------
        SafetensorError
            There is no such tensor, the framework lacks its dtype, the file has changed or
            is closed.
        OSError, MemoryError
            It cannot be read, or there is not so much memory.
        """
        file = self._opened()
        _require_name(name)
        (each,) = wanted(file, [name], self._framework)
        return self._whole(file, each)

    def _whole(self, file: ModelFile, each: Wanted) -> Any:
        """Read a tensor, or take what was read before."""
        name = each.tensor.name
        batch = None
        with self._lock:
            # What is left of a closed file are its slices.
            if self._file is file:
                batch = self._batch_of(file, name)
        found = None
        if batch is not None:
            try:
                found = batch.loading.take(name)
            except Exception:
                # Another tensor may have failed: this one is read by itself.
                self._forget(batch)
        return load([each], self._framework)[name] if found is None else found

    def _batch_of(self, file: ModelFile, name: str) -> _Batch | None:
        """Return what brings a tensor, if anything; have others follow it."""
        place = self._places[name]
        found = self._ahead.pop(name, None)
        if found is not None:
            self._held -= _size(file.layout.tensors[place])
            self._last = max(place, self._last)
            self._window = min(2 * self._window, self._read_ahead)
        elif place == self._last + 1:
            self._last, self._in_order = place, self._in_order + 1
            if self._in_order > self._run:
                # The next one did not fit.
                self._window = min(2 * self._window, self._read_ahead)
        else:
            self._last, self._in_order = place, 1
            self._drop()
            self._window = max(WINDOW_BYTES, 2 * _size(file.layout.tensors[place]))
        # On a device what is read has to be copied, which nothing here does ahead.
        if self._in_order >= self._run and self._framework.on_host and self._read_ahead:
            self._follow(file)
        return found

    def _follow(self, file: ModelFile) -> None:
        """Begin to read what comes next, as much as the window leaves room for."""
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
            # A batch that is not full waits for room, but for the last one.
            if next_place == low or (size < full and next_place < len(tensors)):
                return
            names = [tensor.name for tensor in tensors[low:next_place]]
            try:
                loading = Loading(wanted(file, names, self._framework), self._framework)
            except Exception:
                # Whoever asks for such a tensor is told.
                self._read_ahead = 0
                return
            self._ahead.update(dict.fromkeys(names, _Batch(loading, names)))
            self._held, self._asked = self._held + size, next_place - 1

    def _drop(self) -> None:
        """Let go of what is on its way; if there was something, take more convincing."""
        if self._ahead:
            self._run = min(2 * self._run, RUN_MAX)
        for batch in {id(batch): batch for batch in self._ahead.values()}.values():
            batch.loading.abandon()
        self._ahead.clear()
        self._held, self._asked = 0, -1

    def _forget(self, batch: _Batch) -> None:
        """Take nothing more from a batch that has failed."""
        with self._lock:
            layout = self._file.layout if self._file is not None else None
            for name in batch.names:
                if self._ahead.get(name) is batch and layout is not None:
                    del self._ahead[name]
                    self._held -= _size(layout.by_name[name])

    def get_tensors(self) -> dict[str, Any]:
        """Read all tensors, by one submission.

        Returns
        -------
        dict of str to torch.Tensor or numpy.ndarray
            In the order of the file.
        """
        return load(wanted(self._opened(), None, self._framework), self._framework)

    def get_slice(self, name: str) -> "TensorSlice":
        """Return what reads parts of a tensor, when it is indexed.

        Parameters
        ----------
        name : str
            One of ``keys()``.

        Returns
        -------
        TensorSlice
            With ``get_shape()``, ``get_dtype()`` and brackets.
        """
        file = self._opened()
        _require_name(name)
        return TensorSlice(self, file, look_up(file, name))

    def get_many(
        self, indices: Mapping[str, Any], out: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Read tensors and parts of tensors, exactly their bytes, by one submission.

        Parameters
        ----------
        indices : dict of str to index or None
            For each name what would be in the brackets behind ``get_slice(name)``; None
            for the whole tensor.
        out : dict of str to torch.Tensor or numpy.ndarray, optional
            Tensors to be filled, of the right dtype and shape.

        Returns
        -------
        dict of str to torch.Tensor or numpy.ndarray
            In the order of `indices`; those of `out`, if passed.

        Raises
        ------
        SafetensorError, TypeError, IndexError
            As ``get_slice`` and ``get_tensor``, before anything is read.
        ValueError
            A tensor of `out` is missing, or of another dtype or shape.
        """
        file = self._opened()
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

    def __enter__(self) -> Self:
        """Return the same file, which is closed at the end of the block."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
        /,
    ) -> None:
        """Close the file; tensors stay, and slices can be read: the last one closes it."""
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
    """Return the part of a tensor that an index names; None: all of it."""
    (each,) = wanted(file, [name], framework)
    return each if index is None else _part(each, index, framework, rules)


def _part(
    each: Wanted, index: Any, framework: Framework, rules: Literal["safetensors", "torch"]
) -> Wanted:
    """Return the part of a whole tensor that an index names; None is an index too."""
    tensor = each.tensor
    found = plan(index, tensor.shape, BITS[tensor.dtype], rules=rules)
    nbytes = len(found.offsets) * found.run_bytes
    shape = framework.shape(tensor.dtype, found.shape)
    # All bytes in one run are all of the tensor, in its order.
    runs = None if found.run_bytes == each.nbytes == nbytes else found.offsets
    return each._replace(shape=shape, offsets=runs, nbytes=nbytes)


class TensorSlice:
    """Part of a tensor to be; ``safe_open(...).get_slice(name)`` makes it.

    Examples
    --------
    >>> tensors = {"weight": np.arange(12).reshape(3, 4)}
    >>> nvmeio.safetensors.numpy.save_file(tensors, "model.safetensors")
    >>> with nvmeio.safetensors.safe_open("model.safetensors", "np") as file:
    ...     part = file.get_slice("weight")
    ...     print(isinstance(part, nvmeio.safetensors.TensorSlice), part.get_shape())
    ...     part[1:, 2]
    True [3, 4]
    array([ 6, 10])
    """

    def __init__(self, opened: safe_open, file: ModelFile, tensor: Tensor) -> None:
        self._opened, self._file, self._tensor = opened, file, tensor

    def get_shape(self) -> list[int]:
        """Return the shape of the whole tensor, as the header has it."""
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        """Return the dtype, as the header has it, such as "F32"."""
        return self._tensor.dtype

    def __getitem__(self, index: Any) -> Any:
        """Read what an index names: exactly its bytes."""
        return self._opened._read_slice(self._file, self._tensor, index)


def _safe_open_handle(
    f: Any,
    framework: str,
    device: Any = "cpu",
    *,
    backend: Literal["mmap", "pread"] = "mmap",
) -> safe_open:
    """Open the safetensors file that an open file of Python's is."""
    return safe_open(f"/proc/self/fd/{f.fileno()}", framework, device, backend=backend)


def _begin_anew() -> None:
    for each in list(_of_process):
        each._begin()


call_in_child(_begin_anew)
