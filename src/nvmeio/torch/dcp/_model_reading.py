"""Read checkpoints of many ranks that are stored as model files (safetensors)."""

import errno
import hashlib
import math
import os
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint import _hf_utils, hf_storage
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
)
from torch.futures import Future

from nvmeio._files.kinds import what_is_in
from nvmeio._files.times import ambiguous_s
from nvmeio._safetensors.file import ModelFile
from nvmeio._safetensors.parts import SAVE_KEY, part_of, parts_in
from nvmeio._safetensors.places import NUMBERED, SINGLE_NAME
from nvmeio._safetensors.replacing import of_one_save
from nvmeio._tensors.errors import SafetensorError
from nvmeio._tensors.frameworks import Torch
from nvmeio.torch.dcp._archives import Located
from nvmeio.torch.dcp._reading import (
    OfRanks,
    Parts,
    by_files,
    nelements,
    refuse_store,
    told,
)
from nvmeio.torch.dcp._writing import like

__all__ = [
    "Files",
    "HuggingFaceStorageReader",
    "cover",
    "stored_of",
]


def stored_of(file: ModelFile, tensor: Any) -> Located:
    """Return where a tensor is in a model file, with torch's dtype and shape."""
    framework = Torch()
    shape = framework.shape(tensor.dtype, tensor.shape)
    return Located(file.offset(tensor.begin), framework.dtype(tensor.dtype), tuple(shape))


_GOES_ON = (
    "one of which goes on, or did not finish: load again when no save goes on; if that "
    "fails, save again, or remove the files of one"
)


@dataclass
class _Info(_hf_utils._HFStorageInfo):  # type: ignore[misc]
    """Torch's record of where a part of a tensor is, with its offset in the file."""

    begin: int = 0
    version: tuple[object, ...] = ()  # of the file


def _version(file: ModelFile) -> tuple[object, ...]:
    """Return what tells a file from another one that gets its name, of the same layout."""
    key = (file.layout.metadata or {}).get(SAVE_KEY)
    return key, *file.version


class Files:
    """What the files of a folder say, as far as they are read."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.tensors: dict[str, TensorStorageMetadata] = {}
        self.storage: dict[MetadataIndex, _Info] = {}
        # A path for each save found in the folder; among the files of ranks; and among
        # those of whole models, where saves also differ in how many files they have.
        # Files without the key of a save have None.
        self.saves: dict[str, str] = {}
        self._of_ranks: dict[str | None, str] = {}
        self._wholes: dict[tuple[str | None, int], str] = {}
        self._sizes: dict[str, tuple[int, ...]] = {}
        # When the last of them was changed.
        self.newest_ns = 0
        self.digest = hashlib.sha256()

    def add(self, name: str) -> Collection[str]:
        """Add a file by its header, and return the names of its tensors.

        Raise SafetensorError if no model has all these files.
        """
        path = os.path.join(self.folder, name)
        with closing(ModelFile(path)) as file:
            said = file.layout.metadata or {}
            self.newest_ns = max(self.newest_ns, file.before.st_mtime_ns)
            self.digest.update(repr((name, said, file.layout.tensors)).encode())
            parts = parts_in(said, path)
            self.is_of_save(name, said.get(SAVE_KEY))
            for tensor in file.layout.tensors:
                stored = stored_of(file, tensor)
                begin, size = part_of(parts, tensor.name, stored.shape, path)
                offsets = torch.Size(begin)
                sizes = self._sizes
                if size is not None and sizes.setdefault(tensor.name, size) != size:
                    raise SafetensorError(
                        f"{path}: {tensor.name!r} has the shape {list(size)} here, but "
                        f"{list(sizes[tensor.name])} in another file"
                    )
                index = MetadataIndex(tensor.name, offsets)
                info = _Info(path, stored.shape, stored.dtype, stored.begin, _version(file))
                other = self.storage.get(index)
                if other is not None and _each_has_it(path, other, info):
                    continue
                if other is not None:
                    raise SafetensorError(
                        f"{tensor.name!r} is in {other.relative_path} and in {path}: these "
                        f"files are from two saves, {_GOES_ON}"
                    )
                self.storage[index] = info
                _add_part(self.tensors, tensor.name, stored, offsets)
            return file.layout.by_name.keys()

    def is_of_save(self, name: str, key: str | None) -> None:
        """Note that there is a file of a save, or that it will be there."""
        path = os.path.join(self.folder, name)
        if key is not None:
            self.saves[key] = path
        numbered = NUMBERED.fullmatch(name)
        if name == SINGLE_NAME:
            self._wholes[key, 0] = path
        elif numbered and numbered["stem"] == "model":
            if numbered["rank"]:
                self._of_ranks[key] = path
            else:
                self._wholes[key, int(numbered["count"])] = path

    def check(self) -> None:
        """Raise SafetensorError for files of two saves, and for missing parts."""
        of_ranks = {**self._of_ranks}
        if self.saves and None in of_ranks:
            # Of ranks that saved without collectives, or by torch's writer.
            of_ranks.update(self.saves)
        paths = [list(each.values()) for each in (self.saves, of_ranks, self._wholes)]
        # Nor does one save write both parts of ranks and a whole model to a folder.
        for files in (*paths, [each[0] for each in paths[1:] if each]):
            if len(files) > 1:
                raise SafetensorError(
                    f"{files[0]} and {files[1]} are from two saves, {_GOES_ON}"
                )
        _refuse_gaps(self.tensors, self._sizes, self.folder)


class HuggingFaceStorageReader(OfRanks, hf_storage.HuggingFaceStorageReader):  # type: ignore[misc]
    """A reader of model files for ``torch.distributed.checkpoint.load``.

    Parameters
    ----------
    path, thread_count
        As for ``torch.distributed.checkpoint.HuggingFaceStorageReader``.  `thread_count`
        has no effect, because the engine moves the bytes.

    Notes
    -----
    A rank reads only the bytes that it needs.  They are read directly into its tensors if
    these are contiguous, on the CPU and of the same dtype as in the file.

    If a folder has files of two saves, or lacks part of a tensor, or a file is replaced
    meanwhile, loading raises a ``SafetensorError``.  If the names or headers of the files
    differ between the ranks, loading raises on all of them before any tensor is changed.
    Each save has a key in the headers; files of other programs have none, so two of their
    models that differ only in values are not told apart.

    Examples
    --------
    >>> import torch
    >>> from torch.distributed import checkpoint
    >>> import nvmeio.torch.dcp
    >>> nvmeio.safetensors.torch.save_file({"weight": torch.arange(4)}, "model.safetensors")
    >>> state = {"weight": torch.zeros(4, dtype=torch.int64)}
    >>> reader = nvmeio.torch.dcp.HuggingFaceStorageReader(".")
    >>> checkpoint.load(state, storage_reader=reader)
    >>> state["weight"]
    tensor([0, 1, 2, 3])
    """

    # Raises if the files may be of two saves.
    _check: Callable[[], None] | None = None

    @like(hf_storage.HuggingFaceStorageReader.__init__)
    def __init__(self, path: Any, *args: Any, **kwargs: Any) -> None:
        refuse_store("path", path)
        super().__init__(path, *args, **kwargs)

    @told
    def read_metadata(self) -> Metadata:
        """Read the headers of all files in the folder.

        With torch before 2.12, an error is raised by the first use of the result.
        """
        folder = os.fspath(self.path)
        check = of_one_save(folder)
        names = sorted(n for n in _names_in(folder) if n.endswith(_hf_utils.SUFFIX))
        if not names:
            words = f"no model files; {what_is_in(folder)}"
            raise FileNotFoundError(errno.ENOENT, words, folder)
        found = Files(folder)
        for name in names:
            found.add(name)
        found.check()
        # Where no file has a key that tells its save, the index does.
        self._check = check if not found.saves else None
        if self._check is not None:
            self._check()
            time.sleep(ambiguous_s(found.newest_ns))
        self._has_read(found.digest.hexdigest(), folder)
        metadata = Metadata(state_dict_metadata=found.tensors, storage_data=found.storage)
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a plan."""
        for items in by_files(plan.items, self.storage_data):
            self._read_items(items, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_items(self, items: list[ReadItem], planner: LoadPlanner) -> None:
        with ExitStack() as stack:
            files: dict[str, ModelFile] = {}
            known: dict[tuple[str, str], Located] = {}
            with Parts(planner) as parts:
                for item in items:
                    name = item.storage_index.fqn
                    info = self.storage_data[item.storage_index]
                    path = info.relative_path
                    if path not in files:
                        file = files[path] = stack.enter_context(closing(ModelFile(path)))
                        known |= {
                            (path, each.name): stored_of(file, each)
                            for each in file.layout.tensors
                        }
                    stored = Located(info.begin, info.dtype, tuple(info.shape))
                    is_same = _version(files[path]) == info.version
                    if not is_same or known.get((path, name)) != stored:
                        raise files[path].changed()
                    parts.add(item, files[path].file, stored)
                parts.finish()
            for file in files.values():
                file.check_unchanged()
        # Two saves may have written their files at one time, and named them later.
        if self._check is not None:
            self._check()


def _names_in(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise type(error)(error.errno, what_is_in(folder), folder) from None


def _each_has_it(path: str, one: _Info, other: _Info) -> bool:
    """Return whether two ranks, saving without collectives, have written the same part."""
    names = map(os.path.basename, (path, one.relative_path))
    alone = all(name.startswith("shard-") for name in names)
    alone &= one.version[0] is None is other.version[0]
    return alone and (one.shape, one.dtype) == (other.shape, other.dtype)


def _add_part(
    found: dict[str, TensorStorageMetadata],
    name: str,
    stored: Located,
    offsets: torch.Size,
) -> None:
    """Add a part to the metadata of its tensor."""
    chunk = ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(stored.shape))
    ends = [low + count for low, count in zip(offsets, stored.shape, strict=True)]
    about = found.get(name)
    if about is None:
        about = found[name] = TensorStorageMetadata(
            TensorProperties(dtype=stored.dtype), torch.Size(ends), []
        )
    elif about.properties.dtype != stored.dtype or len(about.size) != len(ends):
        raise SafetensorError(
            f"the parts of {name!r} differ in dtype or number of dimensions"
        )
    about.chunks.append(chunk)
    about.size = torch.Size(map(max, about.size, ends))


def _refuse_gaps(
    found: Mapping[str, TensorStorageMetadata],
    sizes: Mapping[str, tuple[int, ...]],
    folder: str,
) -> None:
    """Raise SafetensorError for missing parts, which torch would silently not load."""
    for name, about in found.items():
        size = sizes.get(name, about.size)
        if not cover(about.chunks, size):
            there, wanted = nelements(about.chunks), math.prod(size)
            raise SafetensorError(
                f"{folder}: the files have {there} elements of {name!r}, which has {wanted}"
                f"{'; some are there twice' if there >= wanted else ''}"
            )


# A Mersenne prime.
_PRIME = (1 << 127) - 1


def cover(chunks: Sequence[ChunkStorageMetadata], size: Sequence[int]) -> bool:
    """Return whether parts have each element of a tensor, and none twice.

    An element stands for a product of powers of random numbers, one for each dimension, and
    a part for the sum of its elements.  Other parts than those of a tensor have its sum
    with a chance of less than 2**-50.  So they are never compared in pairs, however many
    there are, and however they lie.
    """
    bases = [2 + secrets.randbelow(_PRIME - 2) for _ in size]

    def sum_of(begin: Sequence[int], sizes: Sequence[int]) -> int:
        found = 1
        for base, low, count in zip(bases, begin, sizes, strict=True):
            found *= pow(base, low + count, _PRIME) - pow(base, low, _PRIME)
            found %= _PRIME
        return found

    if any(len(chunk.sizes) != len(size) for chunk in chunks):
        return False
    there = sum(sum_of(chunk.offsets, chunk.sizes) for chunk in chunks)
    return there % _PRIME == sum_of([0] * len(size), size)
