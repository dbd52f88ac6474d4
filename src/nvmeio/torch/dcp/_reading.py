"""Read the parts of a checkpoint that a rank needs, directly into its tensors."""

import bisect
import contextlib
import dataclasses
import errno
import functools
import io
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
)
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.tensor import DTensor
from torch.futures import Future

from nvmeio._arguments.checks import flag
from nvmeio._files.paths import refuse_url
from nvmeio._native.file import File
from nvmeio._streams.pending import Pending
from nvmeio._streams.reading import FILES_MAX
from nvmeio._tensors.memory import freed_problem
from nvmeio._tensors.slices import plan as runs_of
from nvmeio.default import default_handle
from nvmeio.torch._bits import is_plain
from nvmeio.torch.dcp._archives import (
    HEAD_BYTES,
    LARGE_BYTES,
    TAIL_BYTES,
    Ends,
    Located,
    load_allowed,
    stored_in,
)
from nvmeio.torch.dcp._metadata import read_with_digest

__all__ = ["FileSystemReader", "OfRanks", "Parts", "by_files", "nelements", "target_of"]
__all__ += ["refuse_store", "told"]

# The limit of memory for parts that cannot be read directly into their targets.
BESIDE_BYTES_MAX = 256 << 20
# How many tensors are looked up at once, each with the ends of its blob in memory.
_ENDS_MAX = 256
# How many ranks, and groups of ranks, a message names.
_KINDS_MAX = 8
# Before 2.12, torch drops what read_metadata() raises, and says only AssertionError.
DROPS_ERRORS = torch.__version__ < (2, 12)


class _Read(NamedTuple):
    """What a rank tells the coordinator about the metadata that it has read."""

    digest: str
    folder: str
    host: str


def _refuse_differences(found: list[object]) -> None:
    """Raise ValueError if ranks have read different metadata."""
    ranks: dict[str, list[int]] = {}
    for rank, each in enumerate(found):
        # A planner may have replaced the plans, or a rank may use another reader.
        if isinstance(each, _Read):
            ranks.setdefault(each.digest, []).append(rank)
    if len(ranks) < 2:
        return
    kinds = []
    for several in sorted(ranks.values())[:_KINDS_MAX]:
        first = found[several[0]]
        assert isinstance(first, _Read)
        names = ", ".join(map(str, several[:_KINDS_MAX]))
        more = f" and {len(several) - _KINDS_MAX} more" if several[_KINDS_MAX:] else ""
        kinds.append(f"rank {names}{more}: {first.folder!r} on {first.host}")
    raise ValueError(
        f"the ranks have read {len(ranks)} different checkpoints ({'; '.join(kinds)}); "
        "let rank 0 choose the step and broadcast it, and load again if a folder was just "
        "replaced"
    )


class _Failed:
    """Metadata that could not be read; any use raises the error."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __bool__(self) -> bool:
        raise self._error

    def __getattr__(self, name: str) -> Any:
        raise self._error


def told(read_metadata: Callable[..., Metadata]) -> Callable[..., Metadata]:
    """Make an older torch tell errors of `read_metadata`."""

    @functools.wraps(read_metadata)
    def read(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return read_metadata(self, *args, **kwargs)
        except Exception as error:
            if not DROPS_ERRORS:
                raise
            if isinstance(error, FileNotFoundError) and self.tries_ranks:
                if "rank" not in kwargs:
                    # Torch asks for the metadata of the rank next.
                    self.missing = error
                    raise
                error = self.missing or error
            return _Failed(error)

    return read


def refuse_store(name: str, path: str | os.PathLike[str]) -> None:
    """Raise ValueError for the URL of an object store, which is no folder to load from."""
    words = "copy it to a local folder, or read it with torch's FsspecReader"
    refuse_url(name, path, words)


class OfRanks:
    """A reader whose ranks compare what they have read, before they change a tensor."""

    _read: _Read | None = None
    # Whether torch reads the metadata of each rank, if there are none of all ranks.
    tries_ranks = False
    # Why there are none of all ranks.
    missing: FileNotFoundError | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Set the folder to load from, as torch's method."""
        if checkpoint_id is not None:
            refuse_store("checkpoint_id", checkpoint_id)
        super().reset(checkpoint_id)  # type: ignore[misc]

    def _has_read(self, digest: str, folder: str) -> None:
        self._read = _Read(digest, os.path.abspath(folder), os.uname().nodename)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Add a digest of the metadata that this rank has read."""
        told: LoadPlan = dataclasses.replace(plan, storage_data=self._read)
        return told

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Raise ValueError if the ranks have read different metadata."""
        _refuse_differences([plan.storage_data for plan in plans])
        return plans


class FileSystemReader(OfRanks, filesystem.FileSystemReader):  # type: ignore[misc]
    """A reader for ``torch.distributed.checkpoint.load``.

    Parameters
    ----------
    path, _extension_registry
        As for ``torch.distributed.checkpoint.FileSystemReader``.
    weights_only : bool, default True
        Unpickle only the description of a checkpoint, and objects that
        ``torch.load(weights_only=True)`` accepts.  With False, a file can run any code.

    Notes
    -----
    All ranks must read the same ``.metadata``.  If it differs between them, because they
    name different steps or see an old state of a shared folder, loading raises on all ranks
    before any tensor is changed.  Of a save with ``use_collectives=False`` each rank reads
    its own metadata, and nothing compares them: if a folder has files of two such saves,
    the ranks load a mixture without an error.  Save to a new folder each time.  Such a
    save is loaded by as many ranks as have made it: a rank that needs a part of a tensor
    which it cannot find raises ValueError, before any of its tensors is changed.

    A rank reads only the bytes that it needs, many at once.  They are read directly into
    its tensors if these are contiguous, on the CPU and of the same dtype as in the file.
    Tensors below about 100 KiB are read whole.

    Examples
    --------
    >>> import torch
    >>> from torch.distributed import checkpoint
    >>> import nvmeio.torch.dcp
    >>> writer = nvmeio.torch.dcp.FileSystemWriter("step-100")
    >>> saved = checkpoint.save({"weight": torch.arange(4)}, storage_writer=writer)
    >>> state = {"weight": torch.zeros(4, dtype=torch.int64)}
    >>> reader = nvmeio.torch.dcp.FileSystemReader("step-100")
    >>> checkpoint.load(state, storage_reader=reader)
    >>> state["weight"]
    tensor([0, 1, 2, 3])
    """

    tries_ranks = True
    # The names of the tensors of which the metadata describe only some parts.
    _partial: frozenset[str] = frozenset()

    def __init__(
        self,
        path: str | os.PathLike[str],
        _extension_registry: Any = None,
        *,
        weights_only: bool = True,
    ) -> None:
        refuse_store("path", path)
        super().__init__(path, _extension_registry)
        self.weights_only = flag("weights_only", weights_only)

    @told
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read ``.metadata``, or the metadata file of a rank.

        With torch before 2.12, an error is raised by the first use of the result.
        """
        path = os.fspath(self._get_metadata_path(kwargs.get("rank")))
        found, digest = read_with_digest(path, weights_only=self.weights_only)
        # A rank's own metadata is not that of the others.
        digest = digest if kwargs.get("rank") is None else ""
        self._partial = _partial_in(found)
        self._has_read(digest, os.path.dirname(path))
        if getattr(found, "storage_meta", None) is None:
            found.storage_meta = StorageMeta()
        assert found.storage_meta is not None
        found.storage_meta.load_id = self.load_id
        return found

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a plan."""
        _refuse_gaps(plan.items, planner, self._partial, os.fspath(self.path))
        for items in by_files(plan.items, self.storage_data):
            with contextlib.ExitStack() as stack:
                _Reading(self, items, planner, stack).run()
        future: Future[None] = Future()
        future.set_result(None)
        return future


def nelements(parts: Iterable[Any]) -> int:
    """Return how many elements the parts of a tensor have together."""
    return sum(math.prod(part.sizes) for part in parts)


def _partial_in(found: Metadata) -> frozenset[str]:
    """Return the names of the tensors whose parts are not all described.

    One rank alone has saved its parts: without collectives, or with ``no_dist=True``.
    """
    return frozenset(
        name
        for name, about in found.state_dict_metadata.items()
        if isinstance(about, TensorStorageMetadata)
        and nelements(about.chunks) < math.prod(about.size)
    )


def _refuse_gaps(
    items: list[ReadItem], planner: LoadPlanner, partial: frozenset[str], folder: str
) -> None:
    """Raise ValueError for missing parts, which torch would silently not load."""
    if not partial:
        return
    there: Counter[str] = Counter()
    for item in items:
        there[item.dest_index.fqn] += math.prod(item.lengths)
    state = getattr(planner, "state_dict", {})
    for name in sorted(partial.intersection(state)):
        target = state[name]
        if isinstance(target, DTensor) and target.device_mesh.get_coordinate() is None:
            continue  # this rank has no part of it
        if there[name] < (wanted := nelements(_create_chunk_list(target))):
            raise ValueError(
                f"{folder}: it has {there[name]} of the {wanted} elements of {name!r} that "
                "this rank needs: one rank has saved its parts alone (no_dist=True or "
                "use_collectives=False); load them on the same rank of as many, or save "
                "from all ranks together"
            )


def by_files(
    items: list[ReadItem], stored: Mapping[MetadataIndex, Any]
) -> list[list[ReadItem]]:
    """Return groups of items whose files can all be open at once, in the order of these."""
    names: dict[str, int] = {}
    groups: list[list[ReadItem]] = []
    for item in items:
        name = stored[item.storage_index].relative_path
        group = names.setdefault(name, len(names)) // FILES_MAX
        if group == len(groups):
            groups.append([])
        groups[group].append(item)
    return groups


def target_of(planner: LoadPlanner, item: ReadItem) -> torch.Tensor:
    """Return the tensor to read a part into."""
    target: torch.Tensor = planner.resolve_tensor(item).detach()
    if target.size() != torch.Size(item.lengths):
        raise AssertionError(
            f"req {item.storage_index} mismatch sizes {target.size()} vs {item.lengths}"
        )
    if is_plain(target) and (problem := freed_problem(target)):
        raise ValueError(f"{item.dest_index.fqn!r} cannot be filled: {problem}")
    return target


class Parts:
    """Parts of tensors that are read together, each into its target."""

    def __init__(self, planner: LoadPlanner) -> None:
        self._planner = planner
        self._whole: list[tuple[torch.Tensor, File, int]] = []
        self._pending = Pending(default_handle())
        self._targets: list[tuple[ReadItem, torch.Tensor, torch.Tensor | None]] = []
        self._beside = 0
        # The memory that is read into, sorted.
        self._filled: list[tuple[int, int]] = []

    def add(self, item: ReadItem, file: File, stored: Located) -> None:
        """Add a part; reading starts in ``finish``, or now if the part has several runs."""
        target = target_of(self._planner, item)
        # All of what follows is in the order of the bytes in the file.
        axes: Sequence[int] = range(len(item.lengths))
        shape = stored.shape
        if len(stored.axes) == len(axes):
            axes, shape = stored.axes, tuple(shape[axis] for axis in stored.axes)
        counts = [item.lengths[axis] for axis in axes]
        read, landing = None, None
        if is_plain(target) and target.dtype == stored.dtype:
            read = target.permute(tuple(axes))
        if read is None or not read.is_contiguous():
            nbytes = math.prod(counts) * stored.dtype.itemsize
            if self._beside + nbytes > BESIDE_BYTES_MAX:
                self.finish()
            self._beside += nbytes
            read = torch.empty(counts, dtype=stored.dtype, device="cpu")
            back = sorted(range(len(axes)), key=axes.__getitem__)
            landing = read.permute(back)
        elif target.nbytes:
            self._take(target.data_ptr(), target.nbytes)
        lows = (item.storage_offsets[axis] for axis in axes)
        index = tuple(slice(low, low + n) for low, n in zip(lows, counts, strict=True))
        runs = runs_of(index, shape, stored.dtype.itemsize * 8)
        if runs.shape != tuple(counts):
            raise ValueError(
                f"{file.path!r}: {item.storage_index.fqn!r} has the shape "
                f"{list(stored.shape)} there, and no part of shape {list(item.lengths)} at "
                f"{list(item.storage_offsets)}"
            )
        offsets = stored.begin + runs.offsets
        if runs.run_bytes and len(offsets) == 1:
            self._whole.append((read, file, int(offsets[0])))
        elif runs.run_bytes and len(offsets):
            self._pending.gather(file, offsets, runs.run_bytes, read, max_gap=0)
        self._targets.append((item, target, landing))

    def _take(self, low: int, nbytes: int) -> None:
        """Take memory to read into; finish first if a part is being read into it.

        So of two names of one tensor, as of tied weights, the later one counts, as in
        torch, and not a mixture of both.
        """
        high = low + nbytes
        at = bisect.bisect(self._filled, (low, high))
        beside = self._filled[max(0, at - 1) : at + 1]
        if any(begin < high and low < end for begin, end in beside):
            self.finish()
            at = 0
        self._filled.insert(at, (low, high))

    def finish(self) -> None:
        """Read the rest, wait for all, and pass the parts to the planner."""
        if self._whole:
            self._pending.read_many(self._whole)
        self._pending.finish()
        for item, target, landing in self._targets:
            if landing is not None:
                target.copy_(landing)
            self._planner.commit_tensor(item, target)
        self._whole, self._targets, self._beside, self._filled = [], [], 0, []

    def __enter__(self) -> "Parts":
        return self

    def __exit__(self, kind: object, error: object, where: object) -> None:
        # Wait, so that the memory is not freed while it is being read into.
        self._pending.__exit__(kind, error, where)


class _Blob(NamedTuple):
    """The range in a file of an object that torch.save has written."""

    name: str
    begin: int
    length: int


def _groups(blobs: Iterable[_Blob]) -> Iterator[list[_Blob]]:
    """Yield groups of blobs that fit within the limit of memory."""
    group: list[_Blob] = []
    nbytes = 0
    for blob in blobs:
        nbytes += blob.length
        if group and nbytes > BESIDE_BYTES_MAX:
            yield group
            group, nbytes = [], blob.length
        group.append(blob)
    if group:
        yield group


class _Reading:
    """The state of one call of read_data."""

    def __init__(
        self,
        reader: FileSystemReader,
        items: list[ReadItem],
        planner: LoadPlanner,
        stack: contextlib.ExitStack,
    ) -> None:
        self.reader, self.items, self.planner, self.stack = reader, items, planner, stack
        self.files: dict[str, File] = {}

    def run(self) -> None:
        blobs = {id(item): self._blob(item) for item in self.items}
        tensors = [item for item in self.items if item.type != LoadItemType.BYTE_IO]
        large = {
            blobs[id(item)]
            for item in tensors
            if blobs[id(item)].length >= LARGE_BYTES + HEAD_BYTES + TAIL_BYTES
            and not self._descriptors(item)
        }
        stored = self._located(sorted(large))
        rest = {blob for blob in blobs.values() if blob not in stored}
        with Parts(self.planner) as parts:
            for item in tensors:
                blob = blobs[id(item)]
                if blob in stored:
                    parts.add(item, self._file(blob.name), stored[blob])
            parts.finish()
        wanted: dict[_Blob, list[ReadItem]] = {}
        for item in self.items:
            wanted.setdefault(blobs[id(item)], []).append(item)
        for group in _groups(sorted(rest)):
            for blob, text in self._read_whole(group).items():
                for item in wanted[blob]:
                    self._deliver(item, text)

    def _blob(self, item: ReadItem) -> _Blob:
        info = self.reader.storage_data[item.storage_index]
        return _Blob(info.relative_path, info.offset, info.length)

    def _descriptors(self, item: ReadItem) -> tuple[str, ...]:
        """Return the transforms of an item; files of older versions do not record them."""
        info = self.reader.storage_data[item.storage_index]
        return tuple(getattr(info, "transform_descriptors", None) or ())

    def _file(self, name: str) -> File:
        if name not in self.files:
            if os.path.isabs(name) or os.pardir in name.split("/"):
                raise ValueError(
                    f"{self.reader.path}: {name!r} is not a file in this folder"
                )
            path = os.fspath(self.reader.fs.concat_path(self.reader.path, name))
            self.files[name] = self.stack.enter_context(File(path))
        return self.files[name]

    def _read_whole(self, blobs: list[_Blob]) -> dict[_Blob, bytearray]:
        for blob in blobs:
            # Before memory is taken for it.
            if blob.length > (size := self._file(blob.name).size):
                raise OSError(
                    errno.ENODATA,
                    f"it has {size} bytes, and .metadata names {blob.length} of them",
                    self._file(blob.name).path,
                )
        found = {blob: bytearray(blob.length) for blob in blobs}
        parts = [
            (memory, self._file(blob.name), blob.begin)
            for blob, memory in found.items()
            if memory
        ]
        if parts:
            default_handle().read_many(parts)
        return found

    def _located(self, blobs: list[_Blob]) -> dict[_Blob, Located]:
        """Find where the bytes of tensors begin, from the ends of the blobs."""
        found: dict[_Blob, Located] = {}
        for low in range(0, len(blobs), _ENDS_MAX):
            found |= self._located_together(blobs[low : low + _ENDS_MAX])
        return found

    def _located_together(self, blobs: list[_Blob]) -> dict[_Blob, Located]:
        ends = {blob: (bytearray(HEAD_BYTES), bytearray(TAIL_BYTES)) for blob in blobs}
        parts = []
        for blob, (head, tail) in ends.items():
            file, end = self._file(blob.name), blob.begin + blob.length
            parts += [(head, file, blob.begin), (tail, file, end - TAIL_BYTES)]
        if parts:
            default_handle().read_many(parts)
        found = {}
        for blob, (head, tail) in ends.items():
            stored = stored_in(Ends(bytes(head), bytes(tail), blob.length))
            if stored is not None:
                found[blob] = stored._replace(begin=blob.begin + stored.begin)
        return found

    def _deliver(self, item: ReadItem, text: bytes | bytearray) -> None:
        """Pass an item that was read whole to the planner."""
        descriptors = self._descriptors(item)
        if descriptors:
            raw = io.BytesIO(text)
            transforms = self.reader.transforms
            text = transforms.transform_load_stream(item, descriptors, raw).read(-1)
        if item.type == LoadItemType.BYTE_IO:
            if self.reader.weights_only:
                # Load it once to check it, because the planner unpickles without limits.
                load_allowed(io.BytesIO(text))
            self.planner.load_bytes(item, io.BytesIO(text))
            return
        tensor = load_allowed(io.BytesIO(text), weights_only=self.reader.weights_only)
        pairs = zip(item.storage_offsets, item.lengths, strict=True)
        # Slice only what differs, because some subclasses of tensors cannot be sliced.
        part = tensor
        for dim, (low, count) in enumerate(pairs):
            if (low, count) != (0, part.size(dim)):
                part = part.narrow(dim, low, count)
        target = target_of(self.planner, item)
        target.copy_(part)
        self.planner.commit_tensor(item, target)
