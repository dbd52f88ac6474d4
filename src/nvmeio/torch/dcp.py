"""torch.distributed.checkpoint on nvmeio: torch's files, durable, and read in part.

The writers and readers take torch's arguments; torch reads what they have written, and they
read what torch has.
"""

import contextlib
import dataclasses
import heapq
import io
import logging
import math
import os
import pickle
import re
import secrets
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint import _storage_utils, filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from nvmeio._arguments.checks import flag
from nvmeio._files.archives import begin_of, bytes_of
from nvmeio._files.folders import make_folders, sync_folder
from nvmeio._native.file import File
from nvmeio._native.request import Request
from nvmeio.default import default_handle
from nvmeio.files import cut, write_file
from nvmeio.safetensors._slices import plan as runs_of
from nvmeio.safetensors._writing import Stages, reserve
from nvmeio.torch._saving import saving_with

__all__ = ["FileSystemReader", "FileSystemWriter", "install", "uninstall"]

_log = logging.getLogger("nvmeio")

PAGE = 4096
# A tensor of so many bytes begins at a page of the file, and of such the parts that are
# needed are read; others are read as a whole.
LARGE_BYTES = 64 << 10
# What torch.save writes before the bytes of a tensor, each of four entries at a page of its
# own, and behind them.
HEAD_BYTES, TAIL_BYTES = 32 << 10, 4 << 10

# A shard of a save: of which rank, of which save, and which of them.
_SHARD = re.compile(r"__(?P<rank>\d+)_[0-9a-f]{8}_\d+\.distcp")


class FileSystemWriter(filesystem.FileSystemWriter):  # type: ignore[misc]
    """What ``torch.distributed.checkpoint.save`` and ``async_save`` write by.

    Parameters
    ----------
    path, single_file_per_rank, sync_files, thread_count, per_thread_copy_ahead, \
cache_staged_state_dict, overwrite, _extensions, serialization_format
        As for ``torch.distributed.checkpoint.FileSystemWriter``.  `thread_count` is how
        many files a rank writes; the engine moves the bytes without threads of Python.

    Notes
    -----
    Each save writes files of new names.  Every rank's are on the device, by their names
    too, before ``.metadata`` is replaced by the new one, in one step and durably; only then
    the files of the checkpoint before go.  So a folder has the old checkpoint or the new
    one at every moment, also after a power failure.  With ``sync_files=False`` nothing is
    synced.
    """

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Make the folder, durably, and do what torch does."""
        make_folders(os.path.abspath(self.path))
        return super().prepare_local_plan(plan)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files; they are on the device when this returns."""
        prefix = f"{plan.storage_data.prefix}{secrets.token_hex(4)}_"
        torchs = filesystem.SerializationFormat.TORCH_SAVE
        if self.transforms.extensions or self.serialization_format != torchs:
            mine = dataclasses.replace(
                plan, storage_data=dataclasses.replace(plan.storage_data, prefix=prefix)
            )
            results = super().write_data(mine, planner).wait()
            if len(results) != len(plan.items):
                raise RuntimeError(
                    f"{len(results)} of {len(plan.items)} items were written: a thread of "
                    "torch's has failed"
                )
        else:
            results = []
            for number, items in enumerate(self._files(plan.items)):
                name = f"{prefix}{number}{filesystem.DEFAULT_SUFFIX}"
                results += self._write_file(name, items, planner)
        if self.sync_files:
            sync_folder(os.fspath(self.path))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _files(self, items: list[WriteItem]) -> list[list[WriteItem]]:
        """Part the items into files, of about one size."""
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
        with File(path, "x") as file:
            room = sum(_nbytes_of(item) + 2 * PAGE for item in items)
            if room:
                reserve(file, room, path)
            with Stages(default_handle(), file) as stages:
                stream = _Sink(stages)
                for item in items:
                    data = planner.resolve_data(item)
                    begin = _write_item(stream, item, data)
                    length = stream.tell() - begin
                    info = filesystem._StorageInfo(name, begin, length)
                    results.append(WriteResult(item.index, length, info))
                stages.finish()
            cut(file, stages.written)
            if self.sync_files:
                default_handle().fsync(file)
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Replace ``.metadata``; then the files of the checkpoint before go."""
        metadata.version = filesystem.CURRENT_DCP_VERSION
        metadata.storage_data = {
            each.index: each.storage_data for group in results for each in group
        }
        metadata.storage_meta = self.storage_meta()
        rank = None if self.use_collectives else self.rank
        path = os.fspath(self._get_metadata_path(rank))
        before = _shards_of(path)
        text = np.frombuffer(pickle.dumps(metadata), np.uint8)
        write_file(text, path, sync=self.sync_files)
        now = {each.relative_path for each in metadata.storage_data.values()}
        for name in before | set(_left_in(self.path, rank)):
            if name not in now:
                try:
                    os.unlink(os.path.join(self.path, name))
                except FileNotFoundError:
                    pass
                except OSError as error:
                    _log.warning("a file that is not needed any more is left: %s", error)


def _nbytes_of(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    found: int = (
        math.prod(item.tensor_data.size) * item.tensor_data.properties.dtype.itemsize
    )
    return found


class _Sink(io.RawIOBase):
    """What torch.save writes to: what it is given is on its way to the drive."""

    def __init__(self, stages: Stages) -> None:
        self.stages = stages
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.stages.written

    def write(self, buffer: Any) -> int:
        view = np.frombuffer(buffer, np.uint8)
        try:
            self.stages.put(view)
        except OSError as error:
            # Torch would raise something else.
            self.error = self.error or error
            raise
        return len(view)


def _write_item(stream: _Sink, item: WriteItem, data: Any) -> int:
    """Write an item as torch does, and return where it begins."""
    if item.type == WriteItemType.BYTE_IO:
        begin = stream.tell()
        stream.write(data.getbuffer())
        return begin
    tensor = data.detach().cpu()
    if tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor = tensor.clone()
    large = tensor.nbytes >= LARGE_BYTES
    begin = stream.tell()
    if large and begin % PAGE:
        stream.write(bytes(-begin % PAGE))
        begin = stream.tell()
    try:
        # Nobody looks at the sums of what is in a shard.
        alignment = PAGE if large else 64
        with saving_with(storage_alignment=alignment, compute_crc32=False):
            torch.save(tensor, stream)
    except Exception:
        if stream.error is not None:
            raise stream.error from None
        raise
    return begin


def _shards_of(path: str) -> set[str]:
    """Return the files of the checkpoint that a metadata file is of."""
    try:
        found = _unpickled(path, weights_only=True)
        names = {str(each.relative_path) for each in found.storage_data.values()}
    except FileNotFoundError:
        return set()
    except Exception as error:
        _log.warning("the checkpoint that is replaced cannot be read: %s", error)
        return set()
    return {name for name in names if os.path.basename(name) == name}


def _left_in(folder: str | os.PathLike[str], rank: int | None) -> Iterator[str]:
    """Yield the files that saves have left in a folder, of one rank or of all."""
    for name in os.listdir(folder):
        found = _SHARD.fullmatch(name)
        if found and (rank is None or int(found["rank"]) == rank):
            yield name


class _MetadataUnpickler(pickle.Unpickler):
    """Reads ``.metadata``, and makes nothing of it but what describes a checkpoint."""

    _BUILTINS = frozenset({"set", "frozenset", "slice", "complex", "bytearray"})
    _TORCH = frozenset({"Size", "device"})

    def find_class(self, module: str, name: str) -> Any:
        """Return a class or function of the list, or refuse."""
        if module == "torch":
            found = getattr(torch, name, None)
            if name in self._TORCH or isinstance(found, torch.dtype):
                return found
        elif module == "torch.serialization" and name == "_get_layout":
            return super().find_class(module, name)
        elif module == "torch.distributed.checkpoint.metadata":
            found = getattr(metadata, name, None)
            if isinstance(found, type) and found.__module__ == module:
                return found
        elif (module, name) == ("torch.distributed.checkpoint.filesystem", "_StorageInfo"):
            return filesystem._StorageInfo
        elif (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        elif module in ("pathlib", "pathlib._local"):
            if name.endswith("Path"):
                return super().find_class(module, name)
        elif module == "builtins" and name in self._BUILTINS:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(
            f"it wants {module}.{name}, which describes no checkpoint; weights_only=False "
            "runs whatever a file says"
        )


def _unpickled(path: str, *, weights_only: bool) -> Any:
    with open(path, "rb") as file:
        try:
            kind = _MetadataUnpickler if weights_only else pickle.Unpickler
            found = kind(file).load()
        except pickle.UnpicklingError as error:
            raise pickle.UnpicklingError(f"{path}: {error}") from None
    if not isinstance(found, Metadata):
        raise pickle.UnpicklingError(f"{path}: it is no metadata of a checkpoint")
    return found


class FileSystemReader(filesystem.FileSystemReader):  # type: ignore[misc]
    """What ``torch.distributed.checkpoint.load`` reads by.

    Parameters
    ----------
    path, _extension_registry
        As for ``torch.distributed.checkpoint.FileSystemReader``.
    weights_only : bool, default True
        Unpickle nothing but what describes a checkpoint, and of objects that are no tensors
        what ``torch.load(weights_only=True)`` takes.  With False a file may run anything.

    Notes
    -----
    Of each tensor the bytes that this rank needs are read, all at once, and right into the
    tensors that they are for, where these are contiguous, on the CPU and of the same dtype.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        _extension_registry: Any = None,
        *,
        weights_only: bool = True,
    ) -> None:
        super().__init__(path, _extension_registry)
        self.weights_only = flag("weights_only", weights_only)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read ``.metadata``, or that of a rank."""
        path = os.fspath(self._get_metadata_path(kwargs.get("rank")))
        found: Metadata = _unpickled(path, weights_only=self.weights_only)
        if getattr(found, "storage_meta", None) is None:
            found.storage_meta = StorageMeta()
        assert found.storage_meta is not None
        found.storage_meta.load_id = self.load_id
        return found

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what a plan says."""
        ours: list[ReadItem] = []
        others: list[ReadItem] = []
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            (others if info.transform_descriptors else ours).append(item)
        if others:
            super().read_data(dataclasses.replace(plan, items=others), planner)
        with contextlib.ExitStack() as stack:
            _Reading(self, ours, planner, stack).run()
        future: Future[None] = Future()
        future.set_result(None)
        return future


class _Blob(NamedTuple):
    """Where something that torch.save has written lies."""

    name: str
    begin: int
    length: int


class _Stored(NamedTuple):
    """A tensor of a file, whose bytes are in C order."""

    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class _Reading:
    """What one call of read_data reads."""

    def __init__(
        self,
        reader: FileSystemReader,
        items: list[ReadItem],
        planner: LoadPlanner,
        stack: contextlib.ExitStack,
    ) -> None:
        self.reader, self.items, self.planner, self.stack = reader, items, planner, stack
        self.files: dict[str, File] = {}
        self.requests: list[Request] = []

    def run(self) -> None:
        blobs = {id(item): self._blob(item) for item in self.items}
        tensors = [item for item in self.items if item.type != LoadItemType.BYTE_IO]
        large = {
            blobs[id(item)]
            for item in tensors
            if blobs[id(item)].length >= LARGE_BYTES + HEAD_BYTES + TAIL_BYTES
        }
        stored = self._located(sorted(large))
        rest = {blob for blob in blobs.values() if blob not in stored}
        texts = self._read_whole(sorted(rest))
        targets = []
        try:
            for item in tensors:
                found = stored.get(blobs[id(item)])
                if found is not None:
                    targets.append((item, *self._begin(item, blobs[id(item)], found)))
            for request in self.requests:
                request.wait()
        finally:
            # Memory is let go of when nothing is written to it any more.
            for request in self.requests:
                request.exception()
        for item, target, read in targets:
            if read is not target:
                target.copy_(read)
            self.planner.commit_tensor(item, target)
        for item in self.items:
            if blobs[id(item)] in texts:
                self._deliver(item, texts[blobs[id(item)]])

    def _blob(self, item: ReadItem) -> _Blob:
        info = self.reader.storage_data[item.storage_index]
        return _Blob(info.relative_path, info.offset, info.length)

    def _file(self, name: str) -> File:
        if name not in self.files:
            if os.path.isabs(name) or os.pardir in name.split("/"):
                raise ValueError(f"{self.reader.path}: {name!r} is no file in this folder")
            path = os.fspath(self.reader.fs.concat_path(self.reader.path, name))
            self.files[name] = self.stack.enter_context(File(path))
        return self.files[name]

    def _read_whole(self, blobs: Iterable[_Blob]) -> dict[_Blob, bytearray]:
        found = {blob: bytearray(blob.length) for blob in blobs}
        parts = [
            (memory, self._file(blob.name), blob.begin)
            for blob, memory in found.items()
            if memory
        ]
        if parts:
            default_handle().read_many(parts)
        return found

    def _located(self, blobs: list[_Blob]) -> dict[_Blob, _Stored]:
        """Find where the bytes of tensors begin, by the ends of what torch has written."""
        ends = {blob: (bytearray(HEAD_BYTES), bytearray(TAIL_BYTES)) for blob in blobs}
        parts = []
        for blob, (head, tail) in ends.items():
            file, end = self._file(blob.name), blob.begin + blob.length
            parts += [(head, file, blob.begin), (tail, file, end - TAIL_BYTES)]
        if parts:
            default_handle().read_many(parts)
        found = {}
        for blob, (head, tail) in ends.items():
            stored = _stored_in(_Ends(bytes(head), bytes(tail), blob.length))
            if stored is not None:
                found[blob] = stored._replace(begin=blob.begin + stored.begin)
        return found

    def _target(self, item: ReadItem) -> torch.Tensor:
        target: torch.Tensor = self.planner.resolve_tensor(item).detach()
        if target.size() != torch.Size(item.lengths):
            raise AssertionError(
                f"req {item.storage_index} mismatch sizes {target.size()} vs {item.lengths}"
            )
        return target

    def _begin(
        self, item: ReadItem, blob: _Blob, stored: _Stored
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Begin to read a part of a tensor; return its target, and what is read into."""
        target = self._target(item)
        read = target
        plain = target.layout == torch.strided and not (target.is_conj() or target.is_neg())
        if not (
            plain
            and target.device.type == "cpu"
            and target.is_contiguous()
            and target.dtype == stored.dtype
        ):
            read = torch.empty(tuple(item.lengths), dtype=stored.dtype)
        pairs = zip(item.storage_offsets, item.lengths, strict=True)
        index = tuple(slice(low, low + count) for low, count in pairs)
        runs = runs_of(index, stored.shape, stored.dtype.itemsize * 8)
        if runs.run_bytes and len(runs.offsets):
            file, offsets = self._file(blob.name), stored.begin + runs.offsets
            handle = default_handle()
            if len(offsets) == 1:
                request = handle.submit_read_many([(read, file, int(offsets[0]))])
            else:
                request = handle.submit_gather(
                    file, offsets, runs.run_bytes, read, max_gap=0
                )
            self.requests.append(request)
        return target, read

    def _deliver(self, item: ReadItem, text: bytearray) -> None:
        """Give the planner what was read as a whole."""
        if item.type == LoadItemType.BYTE_IO:
            if self.reader.weights_only:
                # The planner unpickles whatever there is.
                torch.load(io.BytesIO(text), weights_only=True, map_location="cpu")
            self.planner.load_bytes(item, io.BytesIO(text))
            return
        tensor = torch.load(io.BytesIO(text), weights_only=True, map_location="cpu")
        pairs = zip(item.storage_offsets, item.lengths, strict=True)
        part = tensor[tuple(slice(low, low + count) for low, count in pairs)]
        target = self._target(item)
        target.copy_(part)
        self.planner.commit_tensor(item, target)


class _Ends(io.RawIOBase):
    """The two ends of what torch.save has written, as a file of its length."""

    def __init__(self, head: bytes, tail: bytes, length: int) -> None:
        self.head, self.tail, self.length = head, tail, length
        self.position = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_CUR: self.position, io.SEEK_END: self.length}.get(whence, 0)
        self.position = base + offset
        return self.position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self.length - self.position))
        low = self.position - (self.length - len(self.tail))
        if low >= 0:
            view[:count] = self.tail[low : low + count]
        elif self.position + count <= len(self.head):
            view[:count] = self.head[self.position : self.position + count]
        else:
            raise OSError("it is longer than was read")
        self.position += count
        return count


# What storages are called in files, where the dtype stands nowhere else.
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}


class _Said(NamedTuple):
    dtype: torch.dtype
    begin: int  # in elements of the storage
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    key: str


class _TensorUnpickler(pickle.Unpickler):
    """Reads what torch.save says of one tensor, and refuses anything else."""

    def persistent_load(self, pid: Any) -> Any:
        """Return what is known of a storage."""
        _, kind, key, *_ = pid
        return kind, str(key)

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a function or class."""
        if module == "torch":
            found = getattr(torch, name, None)
            if isinstance(found, torch.dtype):
                return found
            if name in _STORAGES:
                return _STORAGES[name]
        if module == "torch.storage" and name == "UntypedStorage":
            return None
        if module == "torch._utils" and name == "_rebuild_tensor_v2":
            return lambda storage, *said: self._said(storage[0], storage[1], *said[:3])
        if module == "torch._utils" and name == "_rebuild_tensor_v3":
            return lambda storage, *said: self._said(said[5], storage[1], *said[:3])
        if module == "torch._utils" and name == "_rebuild_parameter":
            return lambda data, *said: data
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        raise pickle.UnpicklingError(f"{module}.{name}")

    @staticmethod
    def _said(dtype: Any, key: str, begin: int, shape: Any, strides: Any) -> _Said:
        return _Said(dtype, begin, tuple(shape), tuple(strides), key)


def _stored_in(ends: _Ends) -> _Stored | None:
    """Find the bytes of a tensor that torch.save has written, if they can be told."""
    try:
        with zipfile.ZipFile(ends) as archive:
            entries = {each.filename.partition("/")[2]: each for each in archive.infolist()}
        said = _TensorUnpickler(io.BytesIO(bytes_of(ends, entries["data.pkl"]))).load()
        if "byteorder" in entries and bytes_of(ends, entries["byteorder"]) != b"little":
            return None
        entry = entries[f"data/{said.key}"]
        begin = begin_of(ends, entry)
    except (OSError, KeyError, ValueError, TypeError, AttributeError):
        return None
    except (EOFError, IndexError, pickle.UnpicklingError, zipfile.BadZipFile):
        return None
    known = isinstance(said, _Said) and isinstance(said.dtype, torch.dtype)
    if not known or entry.compress_type != zipfile.ZIP_STORED:
        return None
    size = said.dtype.itemsize
    nbytes = math.prod(said.shape) * size
    contiguous, expected = [], 1
    for extent in reversed(said.shape):
        contiguous.append(expected)
        expected *= max(extent, 1)
    if said.strides != tuple(reversed(contiguous)):
        return None
    if min(said.begin, *said.shape, 0) < 0 or said.begin * size + nbytes > entry.file_size:
        return None
    return _Stored(begin + said.begin * size, said.dtype, said.shape)


_torchs: dict[str, Any] = {}


def install() -> None:
    """Have torch.distributed.checkpoint use these where it is given a `checkpoint_id`.

    Raises
    ------
    RuntimeError
        This version of torch finds its readers and writers in another way.
    """
    ours = {"FileSystemReader": FileSystemReader, "FileSystemWriter": FileSystemWriter}
    for name in ours:
        if not hasattr(_storage_utils, name):
            raise RuntimeError(f"torch {torch.__version__} has no _storage_utils.{name}")
    for name, kind in ours.items():
        if getattr(_storage_utils, name) is not kind:
            _torchs[name] = getattr(_storage_utils, name)
            setattr(_storage_utils, name, kind)


def uninstall() -> None:
    """Have torch use its own again."""
    for name, kind in _torchs.items():
        setattr(_storage_utils, name, kind)
    _torchs.clear()
