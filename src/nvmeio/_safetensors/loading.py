"""Load whole tensors and parts of tensors from several files, in one submission."""

import contextlib
import errno
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from nvmeio._safetensors.file import ModelFile
from nvmeio._safetensors.header import Tensor
from nvmeio._streams.pending import Item, Pending
from nvmeio._streams.progress import Progress
from nvmeio._streams.reading import (
    CHUNK_BYTES,
    Records,
    Start,
    into_region,
    max_gap,
    place,
    read,
)
from nvmeio._tensors.dtypes import BITS
from nvmeio._tensors.errors import SafetensorError
from nvmeio._tensors.frameworks import Framework
from nvmeio._tensors.memory import SLICE_BYTES, in_slices
from nvmeio._tensors.sharing import is_in_c_order, place_of
from nvmeio._tensors.targets import Filled, check_apart, check_target
from nvmeio.default import default_handle

__all__ = ["Loading", "Wanted", "load", "look_up", "targets_in", "wanted"]

# A tensor up to this size is read by the calling thread.
SMALL_BYTES = 64 << 10
# How much may be read at a time for targets that are not in C order.
SLICED_BYTES = 8 * SLICE_BYTES


class Wanted(NamedTuple):
    """A tensor or part of a tensor to read, as runs of bytes of equal length."""

    key: Any
    file: ModelFile
    tensor: Tensor
    dtype: Any
    shape: tuple[int, ...]  # of the result, as the framework has it
    offsets: Any  # array of where the runs begin in the tensor; None for all of it
    nbytes: int  # of all runs together


def wanted(
    file: ModelFile, names: Iterable[str] | None, framework: Framework
) -> list[Wanted]:
    """Look up whole tensors, in the order of the file; raise SafetensorError if missing."""
    tensors: Sequence[Tensor] = file.layout.tensors
    if names is not None:
        chosen = {name: look_up(file, name) for name in names}
        tensors = sorted(chosen.values(), key=lambda tensor: tensor.begin)
    dtypes: dict[str, Any] = {}
    found = []
    for tensor in tensors:
        name, kind, shape, first, end = tensor
        dtype = dtypes.get(kind)
        if dtype is None:
            dtype = dtypes[kind] = framework.dtype(kind)
        shape = framework.shape(kind, shape)
        found.append(Wanted(name, file, tensor, dtype, shape, None, end - first))
    return found


def look_up(file: ModelFile, name: str) -> Tensor:
    """Return a tensor of a file, or raise safetensors' error for a missing one."""
    tensor = file.layout.by_name.get(name)
    if tensor is None:
        raise SafetensorError(f"File does not contain tensor {name}")
    return tensor


def load(
    chosen: Sequence[Wanted],
    framework: Framework,
    *,
    out: Mapping[Any, Any] | None = None,
    progress: Progress | None = None,
) -> dict[Any, Any]:
    """Return tensors: read into their own memory or into those of `out`, or mapped."""
    if out is None and any(each.file.map is not None for each in chosen):
        return _mapped(chosen, framework, progress)
    return _read(chosen, framework, out, progress)


def _mapped(
    chosen: Sequence[Wanted], framework: Framework, progress: Progress | None
) -> dict[Any, Any]:
    """Make tensors over the maps of their files, and read those that cannot be mapped."""
    # Touching a page beyond the end of a truncated file would kill the process.
    for file in {each.file: None for each in chosen}:
        file.check_unchanged()
    made = {}
    rest = []
    for each in chosen:
        start = _start(each)
        # Parts in several runs are copies.  Torch requires aligned elements, as below.
        if (
            each.file.map is not None
            and each.nbytes
            and (each.offsets is None or len(each.offsets) == 1)
            and start % max(1, BITS[each.tensor.dtype] // 8) == 0
        ):
            made[each.key] = framework.over(
                each.file.map, start, each.nbytes, each.dtype, each.shape
            )
        else:
            rest.append(each)
    report = progress
    if progress is not None:
        total = sum(each.nbytes for each in chosen)
        before = total - sum(each.nbytes for each in rest)
        if before:
            progress(before, total)

        def report(done: int, _: int) -> None:
            progress(before + done, total)

    if rest:
        made |= _read(rest, framework, None, report)
    return {each.key: made[each.key] for each in chosen}


def _start(each: Wanted) -> int:
    """Return where the first byte is in the file."""
    low = 0 if each.offsets is None or not each.nbytes else int(each.offsets[0])
    return each.file.offset(each.tensor.begin) + low


def _read(
    chosen: Sequence[Wanted],
    framework: Framework,
    out: Mapping[Any, Any] | None,
    progress: Progress | None,
) -> dict[Any, Any]:
    """Read tensors, each into its own memory, or into the tensors of `out`."""
    if out is None and framework.on_host:
        alone = len(chosen) == 1 and chosen[0].offsets is None and progress is None
        if alone and 0 < chosen[0].nbytes <= SMALL_BYTES:
            return _small(chosen[0], framework)
        memory = _Memory(chosen, framework)
        with _checked(memory.files):
            made = read(memory.start, memory.nbytes, progress, memory.build)
        return memory.finish(made)
    return _into(chosen, out, framework, progress)


def _small(each: Wanted, framework: Framework) -> dict[Any, Any]:
    """Read a small tensor in the calling thread."""
    made = framework.empty(each.dtype, each.shape)
    with _checked([each.file]):
        default_handle().read(made, each.file.file, _start(each))
    return {each.key: made}


class _Memory:
    """Tensors that are being read into one new region of memory."""

    def __init__(self, chosen: Sequence[Wanted], framework: Framework) -> None:
        self.chosen, self.framework = chosen, framework
        self.files = list({each.file: None for each in chosen})
        self.full = [each for each in chosen if each.nbytes]
        self.begins: list[int] = []
        self.nbytes = self.phase = 0
        self.start: Start = lambda _: None
        if self.full:
            records, self.begins, size, self.phase = _records(self.full, self.files)
            self.nbytes = int(records.nbytes.sum())
            what = f"loading {_named(self.files)}"
            self.region, self.start = into_region(records, size, self.phase, what)

    def build(self) -> dict[Any, Any]:
        """Make the tensors, over memory that is still being filled."""
        framework = self.framework
        over, empty = framework.over, framework.empty
        spans = iter(self.begins)
        return {
            each.key: (
                over(self.region, next(spans), each.nbytes, each.dtype, each.shape)
                if each.nbytes
                else empty(each.dtype, each.shape)
            )
            for each in self.chosen
        }

    def finish(self, made: dict[Any, Any]) -> dict[Any, Any]:
        """Return the tensors for the caller, when all is read."""
        for each, low in zip(self.full, self.begins, strict=True):
            # Torch requires elements at multiples of their size.
            if (low + self.phase) % max(1, BITS[each.tensor.dtype] // 8):
                made[each.key] = self.framework.copy(made[each.key])
        return made


class Loading:
    """Whole tensors that are read ahead, before the caller asks for them."""

    def __init__(self, chosen: Sequence[Wanted], framework: Framework) -> None:
        self.memory = _Memory(chosen, framework)
        self.lock = threading.Lock()
        self.made: dict[Any, Any] | None = None
        self.pending = Pending(default_handle())
        self.abandoned = False
        try:
            self.memory.start(self.pending)
        except BaseException:
            self.pending.abandon()
            raise

    def take(self, key: Any) -> Any:
        """Wait for a tensor and return it, once; None if the reads were abandoned."""
        with self.lock:
            if self.made is None:
                if self.abandoned:
                    return None
                with _checked(self.memory.files), self.pending:
                    made = self.memory.build()
                self.made = self.memory.finish(made)
            return self.made.pop(key)

    def abandon(self) -> None:
        """Cancel all reads and wait for them; complete tensors can still be taken."""
        with self.lock:
            self.abandoned = True
            self.pending.abandon()


def _records(
    full: Sequence[Wanted], files: Sequence[ModelFile]
) -> tuple[Records, list[int], int, int]:
    """Return the records, where each tensor begins in memory, the total size, the phase."""
    numbers = {file: number for number, file in enumerate(files)}
    file = np.array([numbers[each.file] for each in full], np.int64)
    start = np.array([each.file.offset(each.tensor.begin) for each in full], np.int64)
    nbytes = np.array([each.nbytes for each in full], np.int64)
    first = np.array([_start(each) for each in full], np.int64)
    align = max(each.align for each in files)
    begins, total, phase = place(file, first, nbytes, align)
    opened = [each.file for each in files]
    if all(each.offsets is None for each in full):
        return Records(opened, file, start, nbytes, begins), begins.tolist(), total, phase
    whole = np.zeros(1, np.int64)
    runs = [whole if each.offsets is None else each.offsets for each in full]
    counts = np.array([len(each) for each in runs], np.int64)
    size = nbytes // counts
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    records = Records(
        opened,
        np.repeat(file, counts),
        np.repeat(start, counts) + np.concatenate(runs),
        np.repeat(size, counts),
        np.repeat(begins, counts) + number * np.repeat(size, counts),
    )
    return records, begins.tolist(), total, phase


def targets_in(
    out: Mapping[Any, Any], chosen: Sequence[Wanted], framework: Framework
) -> dict[Any, Any]:
    """Return the tensors to read into; raise TypeError or ValueError if one is unfit."""
    made = {}
    for each in chosen:
        if each.key not in out:
            raise ValueError(f"out lacks the tensor {each.key!r}")
        target, by_torch = out[each.key], framework.by_torch
        check_target(f"out[{each.key!r}]", target, by_torch, each.dtype, each.shape)
        made[each.key] = target.detach() if by_torch else target
    check_apart(
        Filled(f"out[{key!r}]", target, key, 0, place_of(target).strides)
        for key, target in made.items()
    )
    return made


def _into(
    chosen: Sequence[Wanted],
    out: Mapping[Any, Any] | None,
    framework: Framework,
    progress: Progress | None,
) -> dict[Any, Any]:
    """Read into the caller's tensors, or into new ones on a device."""
    files = list({each.file: None for each in chosen})
    if out is None:
        made = {each.key: framework.empty(each.dtype, each.shape) for each in chosen}
    else:
        made = targets_in(out, chosen, framework)
    full = [each for each in chosen if each.nbytes]

    def start(pending: Pending) -> None:
        whole: dict[ModelFile, list[Item]] = {}
        sizes: dict[ModelFile, int] = {}
        sliced = []
        for each in full:
            file = each.file
            if each.offsets is None or len(each.offsets) == 1:
                if out is not None and not is_in_c_order(made[each.key]):
                    sliced.append(each)
                    continue
                whole.setdefault(file, []).append((made[each.key], file.file, _start(each)))
                sizes[file] = sizes.get(file, 0) + each.nbytes
                if progress is not None and sizes[file] >= CHUNK_BYTES:
                    pending.read_many(whole.pop(file))
                    del sizes[file]
                continue
            size = each.nbytes // len(each.offsets)
            pending.gather(
                file.file,
                file.offset(each.tensor.begin) + each.offsets,
                size,
                made[each.key],
                max_gap=max_gap(size),
            )
        for items in whole.values():
            pending.read_many(items)
        for each in sliced:
            # Each slice is read into memory of its own first.
            pending.limit = SLICED_BYTES
            for piece, offset in in_slices(made[each.key]):
                pending.read(piece, each.file.file, _start(each) + offset)

    with _checked(files):
        read(start, sum(each.nbytes for each in full), progress, lambda: None)
    return made if out is None else {key: out[key] for key in made}


def _named(files: Sequence[ModelFile]) -> str:
    """Return the files' names for a message; of several, only the first."""
    paths = [file.path for file in files]
    return paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"


@contextlib.contextmanager
def _checked(files: Sequence[ModelFile]) -> Iterator[None]:
    """Explain errors of reading, and raise an error if a file has changed meanwhile."""
    try:
        yield
    except OSError as error:
        for file in files:
            # A read past the end means a truncated file.
            if file.path == error.filename and error.errno == errno.ENODATA:
                raise file.changed() from error
        raise
    for file in files:
        file.check_unchanged()
