"""Write a rank's files, under new names, durably before the metadata refers to them."""

import dataclasses
import errno
import functools
import heapq
import io
import math
import os
import pickle
import re
import secrets
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ParamSpec

import numpy as np
import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from nvmeio._files.descriptors import ask_anew, cut
from nvmeio._files.folders import make_folders, sync_folder
from nvmeio._files.kinds import METADATA, OF_RANK
from nvmeio._files.paths import absolute, exists, exists_now, refuse_url
from nvmeio._native.file import open_for_writing
from nvmeio._publish.attributes import become_like
from nvmeio._publish.claims import Claim, log_left, remove_if, remove_unneeded
from nvmeio._publish.names import final_name, is_dead, remove_left
from nvmeio._streams.writing import Stages, reserve
from nvmeio._tensors.memory import freed_problem
from nvmeio.default import default_handle
from nvmeio.torch._bits import is_plain
from nvmeio.torch._saving import errors_of, saving_with
from nvmeio.torch.dcp._archives import LARGE_BYTES, PAGE, load_allowed
from nvmeio.torch.dcp._metadata import shards_of

__all__ = [
    "FileSystemWriter",
    "OfThread",
    "is_told_first",
    "like",
]

P = ParamSpec("P")

# How many keys a warning names.
_NAMES_MAX = 8
# The name of a shard: its rank, the key of its save, and its number.
_SHARD = re.compile(r"__(?P<rank>\d+)_[0-9a-f]{8}_\d+\.distcp")


@dataclasses.dataclass
class _Told:
    """What the coordinator tells a rank: the beginning of its names, and what to keep."""

    prefix: str
    kept: set[str] | None
    save: str  # differs for each save
    claim: str = ""  # the name of its file


@dataclasses.dataclass
class _Save:
    """What a rank knows of a save."""

    names: list[str] = dataclasses.field(default_factory=list)
    before: list[str] = dataclasses.field(default_factory=list)
    refused: list[str] = dataclasses.field(default_factory=list)
    claim: "Claim | None" = None
    # Of a model's folders, instead of the one claim.
    claims: list["Claim"] = dataclasses.field(default_factory=list)
    # What raises if another names its files in one of them now.
    turns: list[Callable[[], None]] = dataclasses.field(default_factory=list)


def like(function: Callable[P, Any]) -> Callable[[Callable[..., Any]], Callable[P, Any]]:
    """Return ``functools.wraps(function)``, of a type that pyright binds as a method."""
    return functools.wraps(function)


class OfThread:
    """A writer's folder, and what it knows of a save, in the thread of that save.

    A second save may be told of its folder while the first one runs in another thread.
    """

    _path: Any
    fs: Any

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Set the folder of the next save, as torch's method."""
        if checkpoint_id is not None:
            refuse_url("checkpoint_id", checkpoint_id)
        else:
            self.path = self._path
        super().reset(checkpoint_id)  # type: ignore[misc]
        self._stay()
        self._saves.is_named = checkpoint_id is not None

    def set_up_storage_writer(self, *args: Any, **kwargs: Any) -> None:
        """Begin a save, as torch's method; one that names no folder goes to the last one.

        It may have been named in another thread.
        """
        if not getattr(self._saves, "is_named", False):
            self.path = self._path
        self._saves.is_named = False
        super().set_up_storage_writer(*args, **kwargs)  # type: ignore[misc]

    def _stay(self) -> None:
        """Keep the folder if the program changes its own; ".." is for the kernel."""
        self.path = self.fs.init_path(os.fsdecode(absolute(self.path)))

    @property
    def path(self) -> Any:
        """The folder of the save in this thread, or of the next one."""
        return getattr(self._saves, "path", self._path)

    @path.setter
    def path(self, path: Any) -> None:
        self._path = self._saves.path = path

    @property
    def _saves(self) -> threading.local:
        local: threading.local = self.__dict__.setdefault("_local", threading.local())
        return local

    @property
    def _save(self) -> "_Save":
        found = getattr(self._saves, "save", None)
        if found is None:
            found = self._saves.save = _Save()
        return found

    def _begin_save(self) -> None:
        self._saves.save = _Save()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_local"}


class FileSystemWriter(OfThread, filesystem.FileSystemWriter):  # type: ignore[misc]
    """A writer for ``torch.distributed.checkpoint.save`` and ``async_save``.

    Parameters
    ----------
    path, single_file_per_rank, sync_files, thread_count, per_thread_copy_ahead, \
cache_staged_state_dict, overwrite, _extensions, serialization_format
        As for ``torch.distributed.checkpoint.FileSystemWriter``.  `thread_count` is the
        number of files that a rank writes; no Python threads are started.

    Raises
    ------
    ValueError
        `path` is a URL; or `serialization_format` is ``SAFETENSORS``, which no
        FileSystemReader can read, not even torch's.  Use `HuggingFaceStorageWriter` for
        such files.

    Notes
    -----
    Each save writes files with new names.  When the files of all ranks, and their names,
    are on the device, ``.metadata`` is replaced atomically and durably.  Then the files of
    the previous checkpoint are removed.  So at every moment, also after a power failure,
    the folder has either the old checkpoint or the new one.

    If two saves write to one folder at the same time, the one that began first fails, and
    the other one is complete.  If a rank fails, the files of the other ranks stay until the
    next save to this folder, which removes them before it writes, each rank those on its
    own drive.  With ``sync_files=False`` nothing is synced.

    A RuntimeWarning names objects that a FileSystemReader will refuse by default, such as
    numpy scalars.

    Examples
    --------
    >>> import torch
    >>> from torch.distributed import checkpoint
    >>> import nvmeio.torch.dcp
    >>> writer = nvmeio.torch.dcp.FileSystemWriter("step-100")
    >>> saved = checkpoint.save({"weight": torch.arange(4)}, storage_writer=writer)
    """

    @like(filesystem.FileSystemWriter.__init__)
    def __init__(self, path: Any, *args: Any, **kwargs: Any) -> None:
        refuse_url("path", path)
        super().__init__(path, *args, **kwargs)
        if self.serialization_format != filesystem.SerializationFormat.TORCH_SAVE:
            raise ValueError(
                f"serialization_format is {self.serialization_format}, which no "
                "FileSystemReader can read, not even torch's; use HuggingFaceStorageWriter "
                "and HuggingFaceStorageReader"
            )
        self._stay()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Create the folder durably, and call torch's method."""
        self._refuse_all_ranks()
        make_folders(os.fspath(self.path))
        self._begin_save()
        # What a killed save has set aside to remove it, perhaps on a drive of this rank.
        remove_left(
            os.fspath(self.path),
            lambda found: _SHARD.fullmatch(found["name"]) is not None and is_dead(found),
        )
        # Before this save has a claim: a later one has no files yet.
        own = shards_of(os.fspath(self._get_metadata_path(self.rank)))
        before = _left_in(self.path, self.rank)
        self._save.before = (
            [] if own is None else [each for each in before if each not in own]
        )
        return super().prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Claim the folder, and tell each rank which of its files must stay."""
        path = self._metadata_file()
        self._save.claim = Claim(path)
        try:
            self._refuse_all_ranks()
        except BaseException:
            self._save.claim.remove()
            raise
        # After the claim: from now on no earlier save replaces the metadata.
        needed = shards_of(path)
        kept: dict[int, set[str]] = {}
        for name in needed or ():
            if found := _SHARD.fullmatch(name):
                kept.setdefault(int(found["rank"]), set()).add(name)
        told, save = [], secrets.token_hex(8)
        for number, plan in enumerate(super().prepare_global_plan(plans)):
            rank = number if self.use_collectives else self.rank or 0
            names = None if needed is None else kept.get(rank, set())
            own = os.path.basename(self._save.claim.path)
            data = _Told(plan.storage_data.prefix, names, save, own)
            told.append(dataclasses.replace(plan, storage_data=data))
        return told

    def _refuse_all_ranks(self) -> None:
        """Refuse to save one rank where a checkpoint of all would be loaded first."""
        path = os.fspath(self._get_metadata_path())
        if not self.use_collectives and exists_now(path):
            raise FileExistsError(
                errno.EEXIST,
                "the folder has a checkpoint of all ranks, which would be loaded first; "
                "save to another folder with use_collectives=False",
                path,
            )

    def _metadata_file(self) -> str:
        rank = None if self.use_collectives else self.rank
        return str(os.fspath(self._get_metadata_path(rank)))

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files, and return when they are on the device."""
        prefix = f"{plan.storage_data.prefix}{secrets.token_hex(4)}_"
        results = []
        names = self._save.names = []
        self._save.refused = []
        # What failed saves of this rank have left, perhaps on a drive of its own.  Not if
        # the planner caches plans, and returns that of an earlier save, perhaps of torch's.
        told = plan.storage_data
        is_ours = isinstance(told, _Told) and told.kept is not None
        if is_ours and is_told_first(told.save):
            if self._save.claim is not None:
                self._save.claim.check()
            self._remove(set(self._save.before) - told.kept, told.claim)
        try:
            for number, items in enumerate(self._files(plan.items)):
                names.append(f"{prefix}{number}{filesystem.DEFAULT_SUFFIX}")
                results += self._write_file(names[-1], items, planner)
            self._warn()
            if self.sync_files:
                sync_folder(os.fspath(self.path))
        except BaseException:
            # Free their space, because the caller may try again.
            remove_unneeded(os.fspath(self.path), names)
            if self._save.claim is not None:
                self._save.claim.remove()
            raise
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _remove(self, names: Iterable[str], claim: str) -> None:
        """Remove files that no checkpoint needs, unless a later save has begun.

        They may be of a drain that has begun meanwhile.  A folder without the claim of this
        save, and without anything that a later one leaves, is on a drive of this rank.
        """
        folder = os.fspath(self.path)

        def check() -> None:
            if self._save.claim is not None:
                self._save.claim.require_last()
                return
            ask_anew(folder)
            there = os.listdir(folder)
            others = (each for each in there if (final_name(each) or each) == METADATA)
            if claim not in there and any(others):
                words = "another save to this folder has begun meanwhile"
                raise FileExistsError(errno.EEXIST, words, folder)

        left = {os.path.join(folder, name) for name in names}
        while left:
            try:
                remove_if(check, left)
                return
            except OSError as error:
                if error.errno is None:
                    # A signal handler raised it.
                    raise
                log_left(error)
                if error.filename not in left:
                    return
                left.remove(error.filename)

    def _warn(self) -> None:
        """Warn of objects that a FileSystemReader will refuse."""
        if not self._save.refused:
            return
        found = ", ".join(map(repr, sorted(self._save.refused)[:_NAMES_MAX]))
        more = len(self._save.refused) - _NAMES_MAX
        warnings.warn(
            f"{found}{f' and {more} more' if more > 0 else ''} will be refused when the "
            "checkpoint is loaded, because torch.load(weights_only=True) does not allow "
            "them; save tensors or plain values instead, or, to load them, use "
            "torch.serialization.add_safe_globals, FileSystemReader(weights_only=False) or "
            "nvmeio.torch.dcp.install(weights_only=False)",
            RuntimeWarning,
            stacklevel=2,
        )

    def _files(self, items: list[WriteItem]) -> list[list[WriteItem]]:
        """Distribute the items to files of about the same size."""
        if not self.single_file_per_rank:
            return [[item] for item in items]
        files: list[list[WriteItem]] = [[] for _ in range(max(1, self.thread_count))]
        filled = [(0, number) for number in range(len(files))]
        for item in sorted(items, key=_nbytes_of, reverse=True):
            size, number = heapq.heappop(filled)
            files[number].append(item)
            heapq.heappush(filled, (size + _nbytes_of(item), number))
        return [file for file in files if file]

    def _write_file(
        self, name: str, items: list[WriteItem], planner: SavePlanner
    ) -> list[WriteResult]:
        path = os.path.join(self.path, name)
        results = []
        with open_for_writing(path, new=True) as file:
            # Who may not read the old checkpoint must not read the new one.
            become_like(file.fileno(), self._metadata_file())
            room = sum(_nbytes_of(item) + 2 * PAGE for item in items)
            if room:
                reserve(file, room, path)
            with (
                Stages(default_handle(), file) as stages,
                errors_of(_Sink(stages)) as stream,
            ):
                for item in items:
                    data = planner.resolve_data(item)
                    begin, descriptors = self._write_item(stream, item, data)
                    length = stream.tell() - begin
                    # None instead of an empty list, as in torch: older versions lack the
                    # field.
                    info = filesystem._StorageInfo(name, begin, length, descriptors or None)
                    results.append(WriteResult(item.index, length, info))
            cut(file, stages.written)
            if self.sync_files:
                default_handle().fsync(file)
        return results

    def _write_item(self, stream: Any, item: WriteItem, data: Any) -> tuple[int, list[str]]:
        """Write an item as torch does; return its offset, and its transforms."""
        tensor = None
        if item.type != WriteItemType.BYTE_IO:
            # torch would copy memory that is not the tensor's, and crash.
            if is_plain(data) and (problem := freed_problem(data)):
                raise ValueError(f"{item.index.fqn!r} cannot be saved: {problem}")
            tensor = data.detach().cpu()
            if not is_traceable_wrapper_subclass(tensor):
                # A reader allows no classes of others, and fills the program's own tensors.
                tensor = tensor.as_subclass(torch.Tensor)
            if tensor.untyped_storage().nbytes() != tensor.nbytes:
                tensor = tensor.clone()
        large = tensor is not None and tensor.nbytes >= LARGE_BYTES
        if large:
            stream.write(bytes(-stream.tell() % PAGE))
        begin = stream.tell()
        output, descriptors = stream, []
        if self.transforms.extensions:
            output, descriptors = self.transforms.transform_save_stream(item, stream)
        if tensor is None:
            data.seek(0)
            try:
                load_allowed(data)
            # As in the reader, which fails whatever the error is.
            except Exception:
                self._save.refused.append(item.index.fqn)
            output.write(data.getbuffer())
        else:
            # Without CRC-32 sums, because no reader checks those in a shard.
            alignment = PAGE if large else 64
            with saving_with(storage_alignment=alignment, compute_crc32=False):
                torch.save(tensor, output)
        if output is not stream:
            output.close()
        return begin, descriptors

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Replace ``.metadata``, then remove the files of the previous checkpoint."""
        folder, claim = os.fspath(self.path), self._save.claim
        assert claim is not None
        try:
            self._publish(metadata, results, claim)
        except BaseException:
            # Not if it is published, for example without its folder being synced.
            if not claim.is_published:
                written = {each.storage_data.relative_path for g in results for each in g}
                remove_unneeded(folder, written - (shards_of(claim.target) or set()))
                claim.remove()
            raise

    def _publish(
        self, metadata: Metadata, results: list[list[WriteResult]], claim: Claim
    ) -> None:
        folder = os.fspath(self.path)
        metadata.version = filesystem.CURRENT_DCP_VERSION
        metadata.storage_data = {
            each.index: each.storage_data for group in results for each in group
        }
        metadata.storage_meta = self.storage_meta()
        rank = None if self.use_collectives else self.rank
        now = {each.relative_path for each in metadata.storage_data.values()}
        # Before publishing: afterwards a later save may begin, and have files here.
        left = (shards_of(claim.target) or set()) | set(_left_in(folder, rank))
        if rank is None:
            # torch falls back to it if it cannot read ``.metadata``.
            for name in filter(OF_RANK.fullmatch, os.listdir(folder)):
                if (needed := shards_of(os.path.join(folder, name))) and needed <= left:
                    left.add(name)
        # Only this rank's names: other ranks may write to other file systems.
        for name in self._save.names:
            if not exists(os.path.join(folder, name)):
                claim.check()
                words = "this save has written it, and another process has removed it"
                raise FileNotFoundError(errno.ENOENT, words, os.path.join(folder, name))
        claim.publish(pickle.dumps(metadata), sync=self.sync_files)
        self._remove(left - now, "")


# The saves of which this process was told.
_TOLD: set[str] = set()


def is_told_first(save: str) -> bool:
    """Return whether this is the first time that the process is told of a save."""
    known = save in _TOLD
    _TOLD.add(save)
    return not known


def _left_in(folder: str | os.PathLike[str], rank: int | None) -> Iterator[str]:
    """Yield the names of all shards in a folder, of one rank or of all."""
    for name in os.listdir(folder):
        found = _SHARD.fullmatch(name)
        if found and (rank is None or int(found["rank"]) == rank):
            yield name


def _nbytes_of(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    about = item.tensor_data
    # For a sharded tensor, the size of this rank's shard.
    size = about.size if about.chunk is None else about.chunk.sizes
    found: int = math.prod(size) * about.properties.dtype.itemsize
    return found


class _Sink(io.RawIOBase):
    """A file object for torch.save that writes through stages."""

    def __init__(self, stages: Stages) -> None:
        self.stages = stages

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.stages.written

    def write(self, buffer: Any) -> int:
        view = np.frombuffer(buffer, np.uint8)
        self.stages.put(view)
        return len(view)
