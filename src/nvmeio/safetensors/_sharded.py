"""Models in several files, with an index of which file has which tensor."""

import errno
import functools
import os
import resource
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any, Literal

import numpy as np

from nvmeio._arguments.checks import flag, path_of, shown
from nvmeio._arguments.units import size_of
from nvmeio._files.folders import make_folders
from nvmeio._files.paths import refuse_url
from nvmeio._publish.claims import Claim
from nvmeio._safetensors.file import Direct, Mapped, ModelFile, mapped_choice
from nvmeio._safetensors.header import build
from nvmeio._safetensors.loading import Wanted, load, targets_in
from nvmeio._safetensors.places import (
    INDEX_NAME,
    SINGLE_NAME,
    file_at,
    leading_to,
    naming_model,
    places_of,
)
from nvmeio._safetensors.replacing import (
    of_one_save,
    old_files,
    replacing_model,
    require_replaceable,
)
from nvmeio._safetensors.turns import alone_in
from nvmeio._safetensors.writing import saving
from nvmeio._streams.progress import Progress, check_progress
from nvmeio._streams.reading import FILES_MAX
from nvmeio._tensors.dtypes import torch_module
from nvmeio._tensors.errors import SafetensorError
from nvmeio._tensors.frameworks import framework_of
from nvmeio._tensors.targets import chosen_names
from nvmeio.safetensors._open import rules_of, selected

__all__ = ["load_sharded", "save_sharded"]

# For each file being written: one with O_DIRECT, one without, and one of its folder.
DESCRIPTORS = 3
# For the lock and the index of a save.
OTHERS = 5


def load_sharded(
    folder_or_index: str | os.PathLike[str],
    *,
    names: Iterable[str] | None = None,
    slices: Mapping[str, Any] | None = None,
    out: Mapping[str, Any] | None = None,
    framework: str = "pt",
    device: Any = "cpu",
    progress: Progress | None = None,
    direct: Direct = "auto",
    mapped: Mapped = False,
) -> dict[str, Any]:
    """Read a model in several files, or some of its tensors, in one submission.

    Parameters
    ----------
    folder_or_index : str or os.PathLike
        An index, such as ``model.safetensors.index.json``; or a folder with an index or
        with a single safetensors file; or a safetensors file.  As in transformers,
        ``model.safetensors`` in a folder comes before an index.
    names : iterable of str, optional
        The tensors to read; by default all, or those of `out`.
    slices : dict of str to index, optional
        The tensors of which to read only a part, each with its index, as in
        ``safe_open(...).get_slice(name)[index]``: for example the part of a rank in tensor
        parallelism.
    out : dict of str to torch.Tensor or numpy.ndarray, optional
        Tensors to read into, of the same dtypes and shapes as the results.
    framework : {"pt", "np"}, default "pt"
        Whether to return torch tensors or numpy arrays.
    device : str, int or torch.device, default "cpu"
        The device of torch tensors.
    progress : callable, optional
        Called during the read with two ints: bytes read so far, and bytes in total.
    direct : {"auto", True, False}, default "auto"
        Whether to bypass the page cache.  "auto": for what it does not have.  True:
        always, which fails if the file system lacks O_DIRECT.  False: never.
    mapped : {False, True, "auto"}, default False
        Whether to map the files instead of reading them, as for ``load_file``; "auto"
        decides for each file.  Slices of rows are mapped too, other slices are read.

    Returns
    -------
    dict of str to torch.Tensor or numpy.ndarray
        The tensors, each in its own memory unless mapped; with `out`, its tensors.

    Raises
    ------
    SafetensorError
        The index or a file is invalid; the index names a file outside its folder; a tensor
        is missing; or a file changes while it is read.
    FileNotFoundError
        The folder has no index, and not exactly one safetensors file, or one that is by its
        name one of several; or a file is missing.
    OSError, MemoryError
        As ``load_file``.
    TypeError, ValueError, IndexError
        As ``load_file`` and ``get_slice``; nothing was read.

    Notes
    -----
    More than 128 files are read in several submissions, of 128 files each.

    Examples
    --------
    >>> tensors = {name: np.arange(1000) for name in ("first", "second")}
    >>> files = nvmeio.safetensors.save_sharded(tensors, "model", 8000)
    >>> found = nvmeio.safetensors.load_sharded(
    ...     "model", framework="np", slices={"second": np.s_[:3]}
    ... )
    >>> found["first"].shape, found["second"]
    ((1000,), array([0, 1, 2]))
    """
    wanted = chosen_names(names, out)
    check_progress(progress)
    if not isinstance(slices, (Mapping, type(None))):
        raise TypeError(f"slices is {shown(slices)}; it must be a dict of indices, or None")
    mapped = mapped_choice(mapped, direct, out)
    kind = framework_of(framework, device)
    rules = rules_of(kind, "mmap")
    model = leading_to(os.fsdecode(path_of(folder_or_index)))
    check = of_one_save(model)
    places = places_of(model)
    parts = dict(slices or {})
    if wanted is None:
        wanted = list(places)
    for name in (*wanted, *parts):
        if name not in places:
            raise SafetensorError(f"the model does not contain tensor {name}")
    if missing := parts.keys() - set(wanted):
        raise ValueError(f"slices has {min(missing)!r}, which is not in names")
    by_file: dict[str, list[str]] = {}
    for name in wanted:
        by_file.setdefault(places[name], []).append(name)
    paths = list(by_file)

    def choose(path: str, file: ModelFile) -> list[Wanted]:
        with naming_model(path):
            chosen = [selected(file, n, parts.get(n), kind, rules) for n in by_file[path]]
        # In the order of the file.
        return sorted(chosen, key=lambda each: each.tensor.begin)

    versions: dict[str, tuple[int, int]] = {}
    if len(paths) > FILES_MAX:
        # They are not all open at once, so check all of them before any is read.
        every: list[Wanted] = []
        for path in paths:
            with file_at(path, direct) as file:
                every += choose(path, file)
                versions[path] = file.version
        if out is not None:
            targets_in(out, every, kind)
        total = sum(each.nbytes for each in every)
    found: dict[str, Any] = {}
    before, report = 0, progress
    for low in range(0, len(paths), FILES_MAX):
        with ExitStack() as stack:
            chosen = []
            for path in paths[low : low + FILES_MAX]:
                file = stack.enter_context(file_at(path, direct, mapped))
                if versions.get(path, file.version) != file.version:
                    raise file.changed()
                chosen += choose(path, file)
            check()
            if progress is not None and len(paths) > FILES_MAX:

                def report(done: int, _: int, before: int = before) -> None:
                    progress(before + done, total)

            found |= load(chosen, kind, out=out, progress=report)
            before += sum(each.nbytes for each in chosen)
    return found


def save_sharded(
    tensors: Mapping[str, Any],
    folder: str | os.PathLike[str],
    max_shard_size: int | str = "50GB",
    *,
    metadata: Mapping[str, str] | None = None,
    align: Literal[8, 4096] = 8,
    sync: bool = True,
    progress: Progress | None = None,
) -> list[str]:
    """Write a model to several files with an index, as transformers does.

    Parameters
    ----------
    tensors : dict of str to torch.Tensor or numpy.ndarray
        The tensors by name, all torch tensors or all numpy arrays.  No two torch tensors
        may share memory.
    folder : str or os.PathLike
        The folder to write to; created if it does not exist.
    max_shard_size : int or str, default "50GB"
        The largest size of the tensors in a file: bytes, or a text such as "4GiB" or "4G"
        (4*2**30).  As in Hugging Face's libraries, "5GB" is decimal (5*10**9); everywhere
        else in nvmeio it is binary.  A larger tensor gets a file of its own.
    metadata : dict of str to str, optional
        Metadata for every file; by default ``{"format": "pt"}`` or ``{"format": "np"}``.
    align, sync, progress
        As for ``save_file``.

    Returns
    -------
    list of str
        The names of the files in `folder`: ``model.safetensors`` alone, or
        ``model-00001-of-00003.safetensors`` and so on, with the index last.

    Raises
    ------
    RuntimeError, SafetensorError, TypeError, ValueError, OSError
        As ``save_file``; or ValueError if `max_shard_size` is not a size or `folder` is a
        URL, or OSError with
        EMFILE if the process may not open three descriptors for each file.

    Notes
    -----
    Each file is replaced atomically, the index last.  At the end, files of a model that was
    saved here before are removed, also those of ``HuggingFaceStorageWriter``; if only
    another user may remove one, PermissionError is raised before anything is written.  If
    new files have the names of old ones, the index is no JSON meanwhile, and stays so if
    the process ends there: who reads it takes no files of both models for one.  (torch's
    ``HuggingFaceStorageReader`` does not read it.)  If readers need the old model until the
    new one is complete, save to a new folder.

    Examples
    --------
    >>> tensors = {name: np.arange(1000) for name in ("first", "second")}
    >>> files = nvmeio.safetensors.save_sharded(tensors, "model", "8KB")
    >>> files[0], files[-1]
    ('model-00001-of-00002.safetensors', 'model.safetensors.index.json')
    """
    # Hugging Face's libraries document "5GB" as 5 * 10**9 bytes.
    limit = size_of("max_shard_size", max_shard_size, 1, decimal=True)
    sync = flag("sync", sync)
    check_progress(progress)
    arrays = [isinstance(tensor, np.ndarray) for tensor in tensors.values()]
    kind: Any
    if all(arrays) and arrays:
        from nvmeio.safetensors import numpy as kind

        word = "np"
    else:
        torch_module()
        from nvmeio.safetensors import torch as kind

        kind._evaluate_tensors_for_save(tensors)
        word = "pt"
    shards = _shards(tensors, limit)
    names = [SINGLE_NAME]
    if len(shards) > 1:
        names = [
            f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            for number in range(1, len(shards) + 1)
        ]
    options: dict[str, Any] = {"align": align, "sync": sync}
    for shard in shards:
        # Refuse invalid tensors before the folder is created.
        build(((s.name, s.dtype, s.shape) for s in kind._sources(shard)), align=align)
    folder = os.fsdecode(path_of(folder))
    refuse_url("folder", folder)
    make_folders(os.path.abspath(folder), sync=sync)
    text = {"format": word} if metadata is None else dict(metadata)
    total = sum(tensor.nbytes for tensor in tensors.values())
    done = 0
    _require_descriptors(len(shards), folder)
    places = None
    if len(shards) > 1:
        pairs = zip(names, shards, strict=True)
        places = {key: name for name, shard in pairs for key in shard}
    old_names = functools.partial(old_files, folder, single=True)
    replacing: dict[str, Any] = {"total": total, "sync": sync, "old_names": old_names}
    require_replaceable(folder, {*names, *old_names(())}, index=True)
    turns: list[Callable[[], None]] = []

    def check() -> None:
        for require in turns:
            require()

    options["check"] = replacing["check"] = check
    with (
        ExitStack() as alone,
        replacing_model(folder, names, places, **replacing) as begin,
        ExitStack() as stack,
    ):
        # Check and reserve all files before the first is written, and write all before the
        # first gets its name.
        writers = [
            stack.enter_context(
                saving(kind._sources(shard), os.path.join(folder, name), text, **options)
            )
            for name, shard in zip(names, shards, strict=True)
        ]
        for write_all, shard in zip(writers, shards, strict=True):
            size = sum(tensor.nbytes for tensor in shard.values())
            report = None
            if progress is not None:

                def report(
                    written: int, of: int, before: int = done, size: int = size
                ) -> None:
                    # Without the headers.
                    progress(before + min(size, max(0, written - of + size)), total)

            write_all(report)
            done += size
        # Else files of two saves could be left, with an index.
        turns.append(alone.enter_context(alone_in(folder)))
        claim = Claim(os.path.join(folder, INDEX_NAME))
        alone.callback(claim.remove)
        turns.append(claim.check)
        begin()
    return [*names, INDEX_NAME] if places else names


def _require_descriptors(files: int, folder: str) -> None:
    """Raise OSError if the process cannot open the descriptors for this many files."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if not os.path.isdir("/proc/self/fd"):
        return
    free = limit - len(os.listdir("/proc/self/fd"))
    needed = DESCRIPTORS * files + OTHERS
    if limit != resource.RLIM_INFINITY and needed > free:
        words = f"{needed} descriptors are needed for {files} files"
        words += f", but {free} are free (ulimit -n is {limit}); raise it, or use larger "
        words += "files (max_shard_size)"
        raise OSError(errno.EMFILE, words, folder)


def _shards(tensors: Mapping[str, Any], limit: int) -> list[dict[str, Any]]:
    """Distribute tensors to files, in their order, as huggingface_hub does."""
    shards: list[dict[str, Any]] = []
    filling: dict[str, Any] = {}
    room = limit
    for name, tensor in tensors.items():
        if tensor.nbytes > limit:
            shards.append({name: tensor})
            continue
        if tensor.nbytes > room:
            shards.append(filling)
            filling, room = {}, limit
        filling[name] = tensor
        room -= tensor.nbytes
    if filling or not shards:
        shards.append(filling)
    return shards
