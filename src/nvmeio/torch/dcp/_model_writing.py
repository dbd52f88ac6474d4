"""Write checkpoints of many ranks as model files (safetensors), and join their parts."""

import errno
import functools
import json
import math
import os
import secrets
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack, closing
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import _hf_utils, filesystem, hf_storage
from torch.distributed.checkpoint.metadata import (
    Metadata,
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

from nvmeio._files import descriptors
from nvmeio._files.folders import make_folders, sync_folder
from nvmeio._files.paths import exists, exists_now, naming, refuse_url
from nvmeio._native.file import File
from nvmeio._publish.attributes import become_like
from nvmeio._publish.claims import Claim, remove_unneeded
from nvmeio._publish.files import new_empty
from nvmeio._publish.names import final_name, rename, temporary_name
from nvmeio._safetensors.file import ModelFile
from nvmeio._safetensors.parts import (
    OFFSETS_KEY,
    PARTS_KEY,
    SAVE_KEY,
    SIZE_KEY,
    VERSION_KEY,
)
from nvmeio._safetensors.places import INDEX_NAME, SINGLE_NAME
from nvmeio._safetensors.replacing import (
    old_files,
    parts_of_ranks,
    replacing_model,
    require_replaceable,
    require_whole,
)
from nvmeio._safetensors.turns import alone_in, remove_parts
from nvmeio._safetensors.writing import Source, save
from nvmeio._streams.memory import Bytes
from nvmeio._streams.reading import FILES_MAX
from nvmeio._tensors.dtypes import header_dtype, header_shape
from nvmeio._tensors.errors import SafetensorError
from nvmeio._tensors.memory import bytes_of
from nvmeio.default import default_handle
from nvmeio.torch.dcp._archives import Located
from nvmeio.torch.dcp._model_reading import Files, cover, stored_of
from nvmeio.torch.dcp._reading import nelements
from nvmeio.torch.dcp._writing import OfThread, is_told_first, like

__all__ = ["HuggingFaceStorageWriter"]

_CURE = "no reader could read the folder then: remove what is there, or save to another one"


class HuggingFaceStorageWriter(OfThread, hf_storage.HuggingFaceStorageWriter):  # type: ignore[misc]
    """A writer of model files for ``torch.distributed.checkpoint.save``.

    Parameters
    ----------
    path, fqn_to_index_mapping, thread_count, save_distributed, enable_consolidation, \
thread_count_consolidation
        As for ``torch.distributed.checkpoint.HuggingFaceStorageWriter``.  The thread counts
        have no effect, because the engine moves the bytes.

    Notes
    -----
    All files are complete and on the device before the first one gets its name.  Then they
    are renamed, the index is written, and files of the previous checkpoint are removed.  If
    a process dies in the middle of that, files of two saves may be left, which
    ``HuggingFaceStorageReader`` refuses to load.

    A folder that has a ``model.safetensors`` is refused with FileExistsError where an index
    will be written: transformers would load that file instead.  So is one with another
    safetensors file beside which readers would refuse the save, such as one with the same
    tensor or a damaged one.  But the files of the model that the new one replaces are
    removed; PermissionError is raised first if only another user may do that.

    Examples
    --------
    >>> import torch
    >>> from torch.distributed import checkpoint
    >>> import nvmeio.torch.dcp
    >>> writer = nvmeio.torch.dcp.HuggingFaceStorageWriter("model", {"weight": 1})
    >>> saved = checkpoint.save({"weight": torch.arange(4)}, storage_writer=writer)
    >>> nvmeio.safetensors.load_sharded("model")
    {'weight': tensor([0, 1, 2, 3])}
    """

    @like(hf_storage.HuggingFaceStorageWriter.__init__)
    def __init__(self, path: Any, *args: Any, **kwargs: Any) -> None:
        refuse_url("path", path)
        super().__init__(path, *args, **kwargs)
        self._stay()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Set the folder of the next save, as the argument `path` does."""
        before = os.fspath(self.path)
        super().reset(checkpoint_id)
        is_new = checkpoint_id is not None and os.fspath(self.path) != before
        if self.enable_consolidation and is_new:
            # Torch would write the parts beside the joined files.
            self.path = self.fs.concat_path(self.path, _hf_utils.SHARDED_DIR_NAME)

    def _joined_in(self) -> str:
        """Return the folder of the joined files, of this thread's save as `path` is."""
        found: str = os.path.dirname(os.fspath(self.path))
        return found

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Check the plan, create the folder durably, and call torch's method."""
        if self.enable_consolidation and not self.use_collectives:
            raise ValueError(
                "enable_consolidation=True joins the parts of all ranks, which are unknown "
                "with use_collectives=False; set one of them differently"
            )
        if not (self.use_collectives or self.save_distributed) and _has_other_ranks():
            raise ValueError(
                "with use_collectives=False no rank knows which files, and whose index, it "
                "would replace or remove; pass save_distributed=True, or save on one rank "
                "with no_dist=True alone"
            )
        _refuse(plan.items, self.fqn_to_index_mapping, self.save_distributed)
        make_folders(os.fspath(self.path))
        self._begin_save()
        return super().prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give all ranks the same random key of this save."""
        saved = {item.index.fqn for plan in plans for item in plan.items}
        found: list[SavePlan] = super().prepare_global_plan(plans)
        token = secrets.token_hex(4)
        if self.use_collectives and not self.save_distributed:
            _part_files(found, self.fqn_to_index_mapping)
        try:
            self._begin_in(self._folders(), saved)
        except BaseException:
            self._give_up()
            raise
        for plan in found:
            # Without collectives, ranks cannot agree on a key.
            plan.storage_data["save"] = token if self.use_collectives else ""
            if not self.use_collectives and self.save_distributed:
                # Each rank plans alone, and would number itself as the first.
                plan.storage_data["shard_index"] = (self.rank or 0) + 1
        return found

    def _begin_in(self, folders: dict[str, bool], saved: set[str]) -> None:
        """Check and claim the folders, and remove what failed saves have left there.

        A save that names its files must not lose its claim, or its files, to this one.
        """
        with ExitStack() as stack:
            for folder in folders:
                stack.enter_context(alone_in(folder, self._own_prefix()))
            for folder, indexed in folders.items():
                self._check_folder(folder, saved, indexed=indexed)
            for folder in folders:
                name = f"{self._own_prefix()}{INDEX_NAME}"
                self._claims.append(Claim(os.path.join(folder, name)))
            # Before it is missed as space.
            for folder in folders:
                remove_parts(folder, self._own_prefix(), self._own_claims())

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files, and return when they are on the device."""
        try:
            return self._write_data(plan, planner)
        except BaseException:
            # Free their space, because the caller may try again.
            remove_unneeded(os.fspath(self.path), self._save.names)
            self._give_up()
            raise

    def _write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> Future[list[WriteResult]]:
        # A planner that caches plans returns them without storage_data, or that of another
        # writer.
        told = plan.storage_data if isinstance(plan.storage_data, dict) else {}
        token = told.get("save")
        is_cached = self.use_collectives and not (token and is_told_first(token))
        parts: list[str] = []
        self._save.names = parts
        mapping = told.get("fqn_to_index_mapping", self.fqn_to_index_mapping)
        own = (self.rank or 0) + 1 if self.save_distributed else None
        highest = told.get("files") or (max(mapping.values()) if mapping else 1)
        if is_cached and (self.save_distributed or highest > 1 or _has_other_ranks()):
            raise ValueError(
                "the planner caches plans, so the files of two saves could not be told "
                "apart; use enable_plan_caching=False"
            )
        results = []
        buckets = self._split_by_storage_plan(mapping, plan.items) if plan.items else {}
        for index, items in buckets.items():
            name = _hf_utils._gen_file_name(index, highest, told.get("shard_index", own))
            part = temporary_name(name)
            parts.append(part)
            sources = [_source(planner, item) for item in items]
            said = _said(items, token or "")
            path = os.path.join(self.path, part)
            _create_like(path, os.path.join(self.path, name))
            save(sources, path, said, sync=self.sync_files, atomic=False)
            for item in items:
                length = math.prod(item.tensor_data.chunk.sizes) * _itemsize(item)
                info = filesystem._StorageInfo(part, 0, length)
                results.append(WriteResult(item.index, length, info))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Rename the files, write the index or join the parts, and remove old files."""
        try:
            # Only one save renames its files at a time, where the file system has locks.
            own = self._own_claims() | {
                each.storage_data.relative_path for group in results for each in group
            }
            with ExitStack() as stack:
                for folder in self._folders():
                    turn = alone_in(folder, self._own_prefix(), own)
                    self._save.turns.append(stack.enter_context(turn))
                self._finish(metadata, results)
        except BaseException:
            parts = {each.storage_data.relative_path for g in results for each in g}
            remove_unneeded(os.fspath(self.path), filter(final_name, parts))
            raise
        finally:
            self._save.turns.clear()
            self._give_up()

    def _finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        all_ = [each for group in results for each in group]
        folder = os.fspath(self.path)
        parts = {each.storage_data.relative_path for each in all_}
        places = None
        if not self.save_distributed:
            places = {e.index.fqn: _whole(e.storage_data.relative_path) for e in all_}
        self._publish(folder, parts, places, metadata)
        for each in all_:
            each.storage_data.relative_path = _whole(each.storage_data.relative_path)
        if self.enable_consolidation:
            self._consolidate(folder, all_, metadata)

    def _folders(self) -> dict[str, bool]:
        """Return the folders of a save, and whether a whole model with an index gets there.

        Others may save whole models where the joined files of this one will be.
        """
        path = os.fspath(self.path)
        if self.enable_consolidation:
            return {path: False, self._joined_in(): True}
        return {path: not self.save_distributed}

    @property
    def _claims(self) -> list[Claim]:
        """The claims of this thread's save, one for each folder."""
        return self._save.claims

    def _own_claims(self) -> set[str]:
        return {os.path.basename(claim.path) for claim in self._claims}

    def _give_up(self) -> None:
        """Remove the claims."""
        for claim in self._claims:
            claim.remove()

    def _check_folder(self, folder: str, saved: set[str], *, indexed: bool) -> None:
        """Raise OSError if a folder has what prevents a save of these tensors."""
        # First, because other ranks may give their files names meanwhile.
        names = [n for n in os.listdir(folder) if n.endswith(_hf_utils.SUFFIX)]
        if indexed:
            _refuse_single(folder)
        old = self._old_in(folder, indexed=indexed)
        require_replaceable(folder, old, index=indexed)
        if not self.use_collectives:
            # Other ranks replace theirs, of which there may be many.
            old.update(name for name in names if name.startswith("shard-"))
        key = "" if self.use_collectives else None
        _refuse_others(folder, {*names} - old, saved, key, indexed=indexed)

    def _old_in(
        self, folder: str, besides: Collection[str] = (), *, indexed: bool
    ) -> set[str]:
        """Return the files of the old model that this save replaces."""
        if indexed:
            return old_files(folder, besides, single=False)
        return parts_of_ranks(folder, self._own_prefix(), besides)

    def _own_prefix(self) -> str:
        """Return how the names begin of the files that this rank may remove."""
        alone = self.save_distributed and not self.use_collectives
        return f"shard-{(self.rank or 0) + 1:05d}-" if alone else ""

    def _publish(
        self,
        folder: str,
        parts: Iterable[str],
        places: Mapping[str, str] | None,
        metadata: Metadata,
    ) -> None:
        """Give the files of this save their names, durably; replace the old model.

        `places` are those of an index.
        """
        parts = sorted(parts)
        names = [_whole(part) for part in parts]
        if len({*names}) < len(parts):
            raise RuntimeError(f"several ranks wrote a file of the same name: {parts}")
        # First, because another save may have removed them, or written the index.
        self._check()
        missing = [part for part in parts if not exists(os.path.join(folder, part))]
        if missing:
            raise FileNotFoundError(
                errno.ENOENT,
                "a rank wrote it, but this rank cannot see it: all ranks must share one "
                "folder, and only one save may go on there",
                os.path.join(folder, missing[0]),
            )
        # Others, which have no claim, may have saved here meanwhile.
        saved = {*metadata.state_dict_metadata}
        self._check_folder(folder, saved, indexed=places is not None)
        with replacing_model(
            folder,
            names,
            places,
            total=sum(_nbytes_in(metadata, name) for name in places or ()),
            sync=self.sync_files,
            old_names=lambda new: self._old_in(folder, new, indexed=places is not None),
            check=self._check,
        ) as begin:
            begin()
            for part, name in zip(parts, names, strict=True):
                self._check()
                source, target = os.path.join(folder, part), os.path.join(folder, name)
                rename(source, target, check=self._check)
            if self.sync_files:
                sync_folder(folder)
        remove_parts(folder, self._own_prefix(), self._own_claims())

    def _check(self) -> None:
        """Raise OSError if a later save has begun, or its turn was given to another.

        Otherwise files of two saves would be mixed, and neither could be loaded.
        """
        for claim in self._claims:
            claim.check()
        for require in self._save.turns:
            require()

    def _consolidate(
        self, folder: str, results: list[WriteResult], metadata: Metadata
    ) -> None:
        """Join the parts in the ranks' files to whole tensors, and write these."""
        target = self._joined_in()
        mapping = self.fqn_to_index_mapping or dict.fromkeys(
            metadata.state_dict_metadata, 1
        )
        highest = max(mapping.values(), default=1)
        parts: dict[str, list[WriteResult]] = {}
        for each in results:
            parts.setdefault(each.index.fqn, []).append(each)
        named: dict[str, list[Source]] = {}
        token = secrets.token_hex(4)
        parts_of: dict[str, str] = {}
        placed: dict[str, dict[str, Located]] = {}
        for name in {each.storage_data.relative_path for each in results}:
            with closing(ModelFile(os.path.join(folder, name))) as file:
                placed[name] = {e.name: stored_of(file, e) for e in file.layout.tensors}
        for fqn, found in parts.items():
            about = metadata.state_dict_metadata[fqn]
            dtype = _header_dtype(about.properties.dtype)
            shape = header_shape(dtype, tuple(about.size))
            contents = functools.partial(_joined, fqn, about, found, placed, folder)
            name = _hf_utils._gen_file_name(mapping[fqn], highest)
            named.setdefault(name, []).append(Source(fqn, dtype, shape, contents))
        try:
            for name, sources in named.items():
                parts_of[name] = temporary_name(name)
                path = os.path.join(target, parts_of[name])
                _create_like(path, os.path.join(target, name))
                # transformers requires the key "format".
                told = {"format": _hf_utils.FORMAT_VALUE, SAVE_KEY: token}
                save(sources, path, told, sync=self.sync_files, atomic=False)
            places = {each.name: name for name, every in named.items() for each in every}
            self._publish(target, parts_of.values(), places, metadata)
        except BaseException:
            # Free their space, because the caller may try again.
            remove_unneeded(target, parts_of.values())
            raise


def _refuse_single(folder: str) -> None:
    """Raise FileExistsError if an index in a folder would be passed over."""
    single = os.path.join(folder, SINGLE_NAME)
    if exists_now(single):
        raise FileExistsError(
            errno.EEXIST,
            "transformers would load this file instead of the model that is saved beside "
            "it; remove it, or save to another folder",
            single,
        )


def _part_files(plans: list[SavePlan], mapping: Mapping[str, int] | None) -> None:
    """Number the files anew if several ranks would write the same one.

    torch's planner divides the tensors that all ranks have, as with DDP.
    """

    def index_of(item: WriteItem) -> int:
        return 1 if mapping is None else mapping[item.index.fqn]

    pairs = sorted({(index_of(i), rank) for rank, p in enumerate(plans) for i in p.items})
    if len({index for index, _ in pairs}) == len(pairs):
        return
    numbers = {pair: number for number, pair in enumerate(pairs, 1)}
    for rank, plan in enumerate(plans):
        chosen = {item.index.fqn: numbers[index_of(item), rank] for item in plan.items}
        plan.storage_data.update(fqn_to_index_mapping=chosen, files=len(pairs))


def _has_other_ranks() -> bool:
    return bool(dist.is_initialized() and dist.get_world_size() > 1)


def _create_like(path: str, old: str) -> None:
    """Create an empty file that may be read by those who may read an old one."""
    if exists_now(old) and os.path.isfile(old) and not os.path.islink(old):
        with naming(path):
            # For nobody else, until it gets the mode of the old one.
            new_empty(path, 0o600)
            with descriptors.opened(path, os.O_WRONLY) as descriptor:
                become_like(descriptor, old)


def _whole(part: str) -> str:
    return final_name(part) or part


def _refuse_others(
    folder: str, names: set[str], saved: set[str], key: str | None, *, indexed: bool
) -> None:
    """Raise FileExistsError if readers would refuse this save beside files that stay."""
    there = Files(folder)
    for name in sorted(names):
        path, wrong = os.path.join(folder, name), ""
        try:
            if both := saved.intersection(there.add(name)):
                wrong = f"it has {min(both)!r} too"
        except FileNotFoundError:
            # Or it was removed meanwhile.
            wrong = "it is a link to nothing" if os.path.islink(path) else ""
        except SafetensorError as error:
            wrong = str(error)
        if wrong:
            raise FileExistsError(errno.EEXIST, f"{wrong}; {_CURE}", path)
    try:
        there.is_of_save(_hf_utils._gen_file_name(1, 1, None if indexed else 1), key)
        there.check()
        if key is None:
            require_whole(folder)
    except SafetensorError as error:
        raise FileExistsError(errno.EEXIST, f"{error}; {_CURE}", folder) from None


def _refuse(
    items: list[WriteItem], mapping: Mapping[str, int] | None, in_parts: bool
) -> None:
    """Raise TypeError or ValueError for items that model files cannot hold."""
    seen = set()
    for item in items:
        name = item.index.fqn
        if item.type == WriteItemType.BYTE_IO:
            raise TypeError(f"{name!r} is not a tensor; model files hold only tensors")
        about = item.tensor_data
        if not in_parts and about.chunk.sizes != about.size:
            raise ValueError(
                f"this rank has only a part of {name!r}, {list(about.chunk.sizes)} of "
                f"{list(about.size)}; pass save_distributed=True to save all parts"
            )
        if name in seen:
            raise ValueError(
                f"{name!r} has several parts on this rank; a model file holds one "
                "tensor per name"
            )
        if mapping is not None and name not in mapping:
            raise ValueError(f"{name!r} is not in fqn_to_index_mapping; add it")
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
        return bytes_of(planner.resolve_data(item))

    return Source(item.index.fqn, dtype, shape, contents)


def _said(items: Iterable[WriteItem], token: str) -> dict[str, str]:
    """Return the metadata for the header of a rank's file."""
    sharding = {
        item.index.fqn: {
            OFFSETS_KEY: list(item.tensor_data.chunk.offsets),
            SIZE_KEY: list(item.tensor_data.size),
        }
        for item in items
    }
    of_save = {SAVE_KEY: token} if token else {}
    return {
        **of_save,
        PARTS_KEY: json.dumps(sharding),
        VERSION_KEY: str(_hf_utils.HF_DCP_VERSION),
        _hf_utils.FORMAT_KEY: _hf_utils.FORMAT_VALUE,
    }


def _nbytes_in(metadata: Metadata, name: str) -> int:
    about = metadata.state_dict_metadata[name]
    found: int = math.prod(about.size) * about.properties.dtype.itemsize
    return found


def _joined(
    name: str,
    about: TensorStorageMetadata,
    parts: Iterable[WriteResult],
    placed: Mapping[str, Mapping[str, Located]],
    folder: str,
) -> Bytes:
    """Read the parts of a tensor from files, and return the whole tensor's bytes."""
    whole = torch.empty(tuple(about.size), dtype=about.properties.dtype, device="cpu")
    if not cover(about.chunks, whole.shape):
        there = nelements(about.chunks)
        words = "; some are there twice" if there >= whole.numel() else ""
        raise RuntimeError(
            f"the parts of tensor {name!r} have {there} elements; it has {whole.numel()}"
            f"{words}"
        )
    items = []
    for each in parts:
        stored = placed[each.storage_data.relative_path][each.index.fqn]
        offsets = each.index.offset or (0,) * len(stored.shape)
        pairs = zip(offsets, stored.shape, strict=True)
        part = whole[tuple(slice(low, low + count) for low, count in pairs)]
        if part.numel():
            path = os.path.join(folder, each.storage_data.relative_path)
            items.append((part, path, stored.begin))
    for low in range(0, len(items), FILES_MAX):
        with ExitStack() as stack:
            default_handle().read_many(
                (part, stack.enter_context(File(path)), begin)
                for part, path, begin in items[low : low + FILES_MAX]
            )
    return bytes_of(whole)
