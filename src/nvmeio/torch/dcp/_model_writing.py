"""Checkpoints of many ranks as model files: what a rank writes, and parts joined."""

import functools
import json
import math
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from contextlib import ExitStack

import numpy as np
import torch
from torch.distributed.checkpoint import _hf_utils, filesystem, hf_storage
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from nvmeio._files.folders import make_folders, sync_folder
from nvmeio.default import default_handle
from nvmeio.files import write_file
from nvmeio.safetensors._dtypes import header_dtype, header_shape
from nvmeio.safetensors._file import ModelFile
from nvmeio.safetensors._writing import Bytes, Source, save
from nvmeio.safetensors.torch import _bytes_of
from nvmeio.torch.dcp._model_reading import SAVE_KEY, SIZE_KEY, opened, stored_of
from nvmeio.torch.dcp._writing import remove_unneeded

__all__ = ["HuggingFaceStorageWriter"]

# Files of a save before they have their names, and when they do.
_UNNAMED = re.compile(r".+\.safetensors\.[0-9a-f]{8}\.part")
_NAMED = re.compile(r"(?:shard-\d+-)?model-\d+-of-\d+\.safetensors")


class HuggingFaceStorageWriter(hf_storage.HuggingFaceStorageWriter):  # type: ignore[misc]
    """Writes checkpoints as model files, by ``torch.distributed.checkpoint.save``.

    Parameters
    ----------
    path, fqn_to_index_mapping, thread_count, save_distributed, enable_consolidation, \
thread_count_consolidation
        As for ``torch.distributed.checkpoint.HuggingFaceStorageWriter``.  The counts of
        threads change nothing: the engine moves the bytes.

    Notes
    -----
    Every file is complete and on the device before one of them has its name.  Names are
    given last, the index behind them, and files of the checkpoint before go that the new
    one has not.  A process that ends in the middle of that may leave files of two saves,
    which ``HuggingFaceStorageReader`` refuses.
    """

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Make the folder, durably, and do what torch does."""
        make_folders(os.path.abspath(self.path))
        return super().prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Say on all ranks which save it is."""
        found: list[SavePlan] = super().prepare_global_plan(plans)
        self._save = secrets.token_hex(4)
        for plan in found:
            plan.storage_data["save"] = self._save
            if not self.use_collectives and self.save_distributed:
                # Each rank plans for itself, and would be the first.
                plan.storage_data["shard_index"] = (self.rank or 0) + 1
        return found

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files; they are on the device when this returns."""
        told = plan.storage_data
        mapping = told.get("fqn_to_index_mapping")
        _refuse(plan.items, mapping)
        highest = max(mapping.values()) if mapping else 1
        results = []
        buckets = self._split_by_storage_plan(mapping, plan.items) if plan.items else {}
        for index, items in buckets.items():
            name = _hf_utils._gen_file_name(index, highest, told.get("shard_index"))
            path = os.path.join(self.path, _part(name, told["save"]))
            sources = [_source(planner, item) for item in items]
            save(sources, path, _said(items, told["save"]), sync=self.sync_files)
            for item in items:
                length = math.prod(item.tensor_data.chunk.sizes) * _itemsize(item)
                info = filesystem._StorageInfo(name, 0, length)
                results.append(WriteResult(item.index, length, info))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Give the files their names; join them, if that is wanted; write the index."""
        all_ = [each for group in results for each in group]
        folder = os.fspath(self.path)
        names = {each.storage_data.relative_path for each in all_}
        alone = not self.use_collectives and self.save_distributed
        prefix = f"shard-{(self.rank or 0) + 1:05d}-" if alone else ""
        self._give_names(folder, names, prefix)
        if not self.save_distributed:
            self._write_index(folder, all_, metadata)
        elif self.enable_consolidation:
            self._consolidate(folder, all_, metadata)

    def _give_names(self, folder: str, names: Iterable[str], prefix: str = "") -> None:
        """Name the files of this save, durably, and remove those of others."""
        names = set(names)
        for name in sorted(names):
            unnamed = os.path.join(folder, _part(name, self._save))
            os.replace(unnamed, os.path.join(folder, name))
        if self.sync_files:
            sync_folder(folder)
        left = (each for each in os.listdir(folder) if each.startswith(prefix))
        old = [name for name in left if _NAMED.fullmatch(name) or _UNNAMED.fullmatch(name)]
        remove_unneeded(folder, set(old) - names)

    def _write_index(
        self, folder: str, results: Iterable[WriteResult], metadata: Metadata
    ) -> None:
        names = {each.index.fqn: each.storage_data.relative_path for each in results}
        total = sum(_nbytes_in(metadata, name) for name in names)
        index = {"metadata": {"total_size": total}, "weight_map": names}
        text = np.frombuffer(json.dumps(index, indent=2).encode(), np.uint8)
        path = os.path.join(folder, _hf_utils._metadata_fn)
        write_file(text, path, sync=self.sync_files)

    def _consolidate(
        self, folder: str, results: list[WriteResult], metadata: Metadata
    ) -> None:
        """Write whole tensors, of parts that lie in the files of ranks."""
        target = os.fspath(self.consolidated_output_path)
        mapping = self.fqn_to_index_mapping or dict.fromkeys(
            metadata.state_dict_metadata, 1
        )
        highest = max(mapping.values(), default=1)
        parts: dict[str, list[WriteResult]] = {}
        for each in results:
            parts.setdefault(each.index.fqn, []).append(each)
        named: dict[str, list[Source]] = {}
        with ExitStack() as stack:
            files: dict[str, ModelFile] = {}
            for name in {each.storage_data.relative_path for each in results}:
                files[name] = opened(stack, os.path.join(folder, name))
            for fqn, found in parts.items():
                about = metadata.state_dict_metadata[fqn]
                dtype = _header_dtype(about.properties.dtype)
                shape = header_shape(dtype, tuple(about.size))
                contents = functools.partial(_joined, about, found, files)
                name = _hf_utils._gen_file_name(mapping[fqn], highest)
                named.setdefault(name, []).append(Source(fqn, dtype, shape, contents))
            for name, sources in named.items():
                path = os.path.join(target, _part(name, self._save))
                # Transformers wants to know whose tensors they are.
                told = {"format": _hf_utils.FORMAT_VALUE, SAVE_KEY: self._save}
                save(sources, path, told, sync=self.sync_files)
        self._give_names(target, named)
        whole = [
            WriteResult(MetadataIndex(source.name), 0, filesystem._StorageInfo(name, 0, 0))
            for name, sources in named.items()
            for source in sources
        ]
        self._write_index(target, whole, metadata)


def _part(name: str, token: str) -> str:
    return f"{name}.{token}.part"


def _refuse(items: list[WriteItem], mapping: Mapping[str, int] | None) -> None:
    """Refuse what model files cannot hold, before a byte is written."""
    seen = set()
    for item in items:
        name = item.index.fqn
        if item.type == WriteItemType.BYTE_IO:
            raise TypeError(f"{name!r} is no tensor; model files hold tensors alone")
        if name in seen:
            raise ValueError(
                f"{name!r} has several parts on this rank; a model file holds one of a name"
            )
        if mapping is not None and name not in mapping:
            raise ValueError(f"{name!r} is not in fqn_to_index_mapping")
        seen.add(name)


def _header_dtype(dtype: torch.dtype) -> str:
    return header_dtype(str(dtype).removeprefix("torch."))


def _itemsize(item: WriteItem) -> int:
    found: int = item.tensor_data.properties.dtype.itemsize
    return found


def _source(planner: SavePlanner, item: WriteItem) -> Source:
    dtype = _header_dtype(item.tensor_data.properties.dtype)
    shape = header_shape(dtype, tuple(item.tensor_data.chunk.sizes))

    def contents() -> Bytes:
        return _bytes_of(planner.resolve_data(item))

    return Source(item.index.fqn, dtype, shape, contents)


def _said(items: Iterable[WriteItem], token: str) -> dict[str, str]:
    """Return what the header of a rank's file says beside its tensors."""
    sharding = {
        item.index.fqn: {
            _hf_utils.SAVED_OFFSETS_KEY: list(item.tensor_data.chunk.offsets),
            SIZE_KEY: list(item.tensor_data.size),
        }
        for item in items
    }
    return {
        _hf_utils.CUSTOM_METADATA_KEY: json.dumps(sharding),
        _hf_utils.DCP_VERSION_KEY: str(_hf_utils.HF_DCP_VERSION),
        _hf_utils.FORMAT_KEY: _hf_utils.FORMAT_VALUE,
        SAVE_KEY: token,
    }


def _nbytes_in(metadata: Metadata, name: str) -> int:
    about = metadata.state_dict_metadata[name]
    found: int = math.prod(about.size) * about.properties.dtype.itemsize
    return found


def _joined(
    about: TensorStorageMetadata,
    parts: Iterable[WriteResult],
    files: Mapping[str, ModelFile],
) -> Bytes:
    """Return a whole tensor's bytes, of parts that lie in files."""
    whole = torch.empty(tuple(about.size), dtype=about.properties.dtype)
    items = []
    for each in parts:
        file = files[each.storage_data.relative_path]
        (found,) = (t for t in file.layout.tensors if t.name == each.index.fqn)
        stored = stored_of(file, found)
        offsets = each.index.offset or (0,) * len(stored.shape)
        pairs = zip(offsets, stored.shape, strict=True)
        part = whole[tuple(slice(low, low + count) for low, count in pairs)]
        if part.numel():
            items.append((part, file.file, stored.begin))
    if items:
        default_handle().read_many(items)
    return _bytes_of(whole)
