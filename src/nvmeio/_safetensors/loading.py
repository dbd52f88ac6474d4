"""Load whole tensors and parts of tensors from several files, in one submission."""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from nvmeio._safetensors.file import ModelFile
from nvmeio._safetensors.header import Tensor
from nvmeio._streams.pending import abandon
from nvmeio._streams.progress import Progress
from nvmeio._streams.reading import (
    CHUNK_BYTES,
    Read,
    Records,
    begin,
    finish,
    max_gap,
    place,
)
from nvmeio._tensors.dtypes import BITS
from nvmeio._tensors.errors import SafetensorError
from nvmeio._tensors.frameworks import Framework
from nvmeio._tensors.sharing import place_of, sharing
from nvmeio.default import default_handle

__all__ = ["Loading", "Wanted", "load", "look_up", "wanted"]

# A tensor up to this size is read by the calling thread.
SMALL_BYTES = 64 << 10


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
        return _Memory(chosen, framework).finish(progress)
    return _into(chosen, out, framework, progress)


def _small(each: Wanted, framework: Framework) -> dict[Any, Any]:
    """Read a small tensor in the calling thread."""
    made = framework.empty(each.dtype, each.shape)
    try:
        default_handle().read(made, each.file.file, _start(each))
    except OSError as error:
        raise each.file.explained(error) from error
    each.file.check_unchanged()
    return {each.key: made}


class _Memory:
    """Tensors that are being read into one new region of memory."""

    def __init__(self, chosen: Sequence[Wanted], framework: Framework) -> None:
        self.chosen, self.framework = chosen, framework
        self.files = list({each.file: None for each in chosen})
        self.full = [each for each in chosen if each.nbytes]
        if self.full:
            records, self.begins, size, self.phase = _records(self.full, self.files)
            self.nbytes = int(records.nbytes.sum())
            what = f"loading {_named(self.files)}"
            self.region, self.reads = begin(records, size, self.phase, what)

    def finish(self, progress: Progress | None = None) -> dict[Any, Any]:
        """Wait for the reads, and return the tensors."""
        if not self.full:
            made = self.build()
        else:
            try:
                made = finish(self.reads, self.nbytes, progress, self.build)
            except OSError as error:
                raise _explained(error, self.files) from error
            for each, low in zip(self.full, self.begins, strict=True):
                # Torch requires elements at multiples of their size.
                if (low + self.phase) % max(1, BITS[each.tensor.dtype] // 8):
                    made[each.key] = self.framework.copy(made[each.key])
        for file in self.files:
            file.check_unchanged()
        return made

    def build(self) -> dict[Any, Any]:
        """Make the tensors, over memory that is still being filled."""
        framework = self.framework
        over, empty = framework.over, framework.empty
        spans = iter(self.begins) if self.full else iter(())
        return {
            each.key: (
                over(self.region, next(spans), each.nbytes, each.dtype, each.shape)
                if each.nbytes
                else empty(each.dtype, each.shape)
            )
            for each in self.chosen
        }


class Loading:
    """Whole tensors that are read ahead, before the caller asks for them."""

    def __init__(self, chosen: Sequence[Wanted], framework: Framework) -> None:
        self.memory = _Memory(chosen, framework)
        self.lock = threading.Lock()
        self.made: dict[Any, Any] | None = None
        self.begun: list[Read] = []
        self.abandoned = False
        try:
            for read in self.memory.reads if self.memory.full else ():
                self.begun.append(read)
        except BaseException:
            abandon([each.request for each in self.begun])
            raise

    def take(self, key: Any) -> Any:
        """Wait for a tensor and return it, once; None if the reads were abandoned."""
        with self.lock:
            if self.made is None:
                if self.abandoned:
                    return None
                if self.memory.full:
                    self.memory.reads = iter(self.begun)
                self.made = self.memory.finish()
            return self.made.pop(key)

    def abandon(self) -> None:
        """Cancel all reads and wait for them; complete tensors can still be taken."""
        with self.lock:
            self.abandoned = True
            abandon([each.request for each in self.begun])


def _records(
    full: Sequence[Wanted], files: Sequence[ModelFile]
) -> tuple[Records, list[int], int, int]:
    """Return the records, where each tensor begins in memory, the total size, the phase."""
    numbers = {file: number for number, file in enumerate(files)}
    file = np.array([numbers[each.file] for each in full], np.int64)
    start = np.array([each.file.offset(each.tensor.begin) for each in full], np.int64)
    nbytes = np.array([each.nbytes for each in full], np.int64)
    first = np.array([_start(each) for each in full], np.int64)
    begins, total, phase = place(file, first, nbytes)
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


def _into(
    chosen: Sequence[Wanted],
    out: Mapping[Any, Any] | None,
    framework: Framework,
    progress: Progress | None,
) -> dict[Any, Any]:
    """Read into the caller's tensors, or into new ones on a device."""
    files = list({each.file: None for each in chosen})
    made = {}
    for each in chosen:
        if out is None:
            made[each.key] = framework.empty(each.dtype, each.shape)
            continue
        if each.key not in out:
            raise ValueError(f"out lacks the tensor {each.key!r}")
        target = framework.checked(out[each.key], each.dtype, each.shape, each.key)
        made[each.key] = target
    if out is not None:
        targets = [place_of(made[each.key], each.key) for each in chosen if each.nbytes]
        for one, other, *_ in (found for found in sharing(targets) if len(found) > 1):
            raise ValueError(
                f"out[{other.leaf!r}] and out[{one.leaf!r}] share memory; each tensor "
                "needs its own"
            )
    handle = default_handle()
    full = [each for each in chosen if each.nbytes]
    whole: dict[ModelFile, list[tuple[Any, Any, int]]] = {}
    sizes: dict[ModelFile, int] = {}

    def submit(file: ModelFile) -> Read:
        request = handle.submit_read_many(whole.pop(file))
        return Read(request, sizes.pop(file))

    def begun() -> Iterator[Read]:
        for each in full:
            if each.offsets is None or len(each.offsets) == 1:
                items = whole.setdefault(each.file, [])
                items.append((made[each.key], each.file.file, _start(each)))
                sizes[each.file] = sizes.get(each.file, 0) + each.nbytes
                if progress is not None and sizes[each.file] >= CHUNK_BYTES:
                    yield submit(each.file)
                continue
            size = each.nbytes // len(each.offsets)
            request = handle.submit_gather(
                each.file.file,
                each.file.offset(each.tensor.begin) + each.offsets,
                size,
                made[each.key],
                max_gap=max_gap(size),
            )
            yield Read(request, each.nbytes)
        for file in list(whole):
            yield submit(file)

    try:
        finish(begun(), sum(each.nbytes for each in full), progress, lambda: None)
    except OSError as error:
        raise _explained(error, files) from error
    for file in files:
        file.check_unchanged()
    return made if out is None else {key: out[key] for key in made}


def _named(files: Sequence[ModelFile]) -> str:
    """Return the files' names for a message; of several, only the first."""
    paths = [file.path for file in files]
    return paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"


def _explained(error: OSError, files: Sequence[ModelFile]) -> Exception:
    """Return the error to raise: a read past the end means a truncated file."""
    for file in files:
        if file.path == error.filename:
            return file.explained(error)
    return error
