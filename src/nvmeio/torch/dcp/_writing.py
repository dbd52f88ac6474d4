"""Write a rank's files, under new names, durably before the metadata refers to them."""

import errno
import functools
import heapq
import io
import logging
import math
import os
import pickle
import re
import secrets
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

from nvmeio._files.descriptors import cut
from nvmeio._files.folders import make_folders, sync_folder
from nvmeio._native.file import open_for_writing
from nvmeio._publish.files import replace_file
from nvmeio._streams.writing import Stages, reserve
from nvmeio.default import default_handle
from nvmeio.torch._saving import errors_of, saving_with
from nvmeio.torch.dcp._archives import LARGE_BYTES, PAGE
from nvmeio.torch.dcp._metadata import shards_of

__all__ = ["FileSystemWriter", "log_left", "remove_unneeded"]

P = ParamSpec("P")

_log = logging.getLogger("nvmeio")

# The name of a shard: its rank, the key of its save, and its number.
_SHARD = re.compile(r"__(?P<rank>\d+)_[0-9a-f]{8}_\d+\.distcp")


def _like(function: Callable[P, Any]) -> Callable[[Callable[..., Any]], Callable[P, Any]]:
    """Return ``functools.wraps(function)``, of a type that pyright binds as a method."""
    return functools.wraps(function)


class FileSystemWriter(filesystem.FileSystemWriter):  # type: ignore[misc]
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
        `serialization_format` is ``SAFETENSORS``, which no FileSystemReader can read, not
        even torch's.  Use `HuggingFaceStorageWriter` for such files.

    Notes
    -----
    Each save writes files with new names.  When the files of all ranks, and their names,
    are on the device, ``.metadata`` is replaced atomically and durably.  Then the files of
    the previous checkpoint are removed.  So at every moment, also after a power failure,
    the folder has either the old checkpoint or the new one.

    If two saves write to one folder at the same time, the one that ends last fails.  With
    ``sync_files=False`` nothing is synced.

    Examples
    --------
    >>> import torch
    >>> from torch.distributed import checkpoint
    >>> import nvmeio.torch.dcp
    >>> writer = nvmeio.torch.dcp.FileSystemWriter("step-100")
    >>> saved = checkpoint.save({"weight": torch.arange(4)}, storage_writer=writer)
    """

    @_like(filesystem.FileSystemWriter.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.serialization_format != filesystem.SerializationFormat.TORCH_SAVE:
            raise ValueError(
                f"serialization_format is {self.serialization_format}, which no "
                "FileSystemReader can read, not even torch's; use HuggingFaceStorageWriter "
                "and HuggingFaceStorageReader"
            )
        self._names: list[str] = []

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Create the folder durably, and call torch's method."""
        path = os.fspath(self._get_metadata_path())
        if not self.use_collectives and os.path.lexists(path):
            raise FileExistsError(
                errno.EEXIST,
                "the folder has a checkpoint of all ranks, which would be loaded first; "
                "save to another folder with use_collectives=False",
                path,
            )
        make_folders(os.path.abspath(self.path))
        return super().prepare_local_plan(plan)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files, and return when they are on the device."""
        prefix = f"{plan.storage_data.prefix}{secrets.token_hex(4)}_"
        results = []
        names = self._names = []
        try:
            for number, items in enumerate(self._files(plan.items)):
                names.append(f"{prefix}{number}{filesystem.DEFAULT_SUFFIX}")
                results += self._write_file(names[-1], items, planner)
            if self.sync_files:
                sync_folder(os.fspath(self.path))
        except BaseException:
            # Free their space, because the caller may try again.
            remove_unneeded(os.fspath(self.path), names)
            raise
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

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
            tensor = data.detach().cpu()
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
        folder = os.fspath(self.path)
        for name in self._names:
            # Only this rank's names: other ranks may write to other file systems.
            if not os.path.lexists(os.path.join(folder, name)):
                words = (
                    "another save to this folder has ended meanwhile and removed it; save "
                    "again, one save at a time"
                )
                raise FileNotFoundError(errno.ENOENT, words, os.path.join(folder, name))
        metadata.version = filesystem.CURRENT_DCP_VERSION
        metadata.storage_data = {
            each.index: each.storage_data for group in results for each in group
        }
        metadata.storage_meta = self.storage_meta()
        rank = None if self.use_collectives else self.rank
        path = os.fspath(self._get_metadata_path(rank))
        before = shards_of(path)
        text = np.frombuffer(pickle.dumps(metadata), np.uint8)
        replace_file(text, path, sync=self.sync_files)
        now = {each.relative_path for each in metadata.storage_data.values()}
        left = before | set(_left_in(folder, rank))
        remove_unneeded(folder, left - now)


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


def remove_unneeded(folder: str, names: Iterable[str]) -> None:
    """Remove files that are not referred to any more; log it if one cannot be removed."""
    for name in names:
        try:
            os.unlink(os.path.join(folder, name))
        except FileNotFoundError:
            pass
        except OSError as error:
            log_left(error)


def log_left(error: OSError) -> None:
    """Log that a file could not be removed."""
    _log.warning("an obsolete file was not removed: %s", error)
