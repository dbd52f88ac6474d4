"""Models of several files, with an index that says which tensor is in which."""

import contextlib
import errno
import json
import os
import re
import resource
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, Literal

import numpy as np

from nvmeio._arguments.checks import integer, shown
from nvmeio._files.paths import synced_folder
from nvmeio.files import write_file
from nvmeio.safetensors._dtypes import torch_module
from nvmeio.safetensors._errors import SafetensorError
from nvmeio.safetensors._file import Direct, ModelFile
from nvmeio.safetensors._frameworks import framework_of
from nvmeio.safetensors._header import build
from nvmeio.safetensors._loading import Wanted, load
from nvmeio.safetensors._open import rules_of, selected
from nvmeio.safetensors._reading import Progress, check_progress
from nvmeio.safetensors._writing import saving

__all__ = ["load_sharded", "save_sharded"]

# Of each file that is being written: one with O_DIRECT and one without, and its folder.
DESCRIPTORS = 3
# As many files are read together.
FILES_MAX = 128
# No index is longer: it has less of each tensor than its file's header.
INDEX_BYTES_MAX = 100_000_000

INDEX_END = ".safetensors.index.json"
INDEX_NAME = f"model{INDEX_END}"
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


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
) -> dict[str, Any]:
    """Read tensors, or parts of them, of a model in several files, by one submission.

    Parameters
    ----------
    folder_or_index : str or os.PathLike
        An index, such as ``model.safetensors.index.json``; or a folder with one, or with
        one safetensors file.
    names : iterable of str, optional
        Those that are wanted; all by default.
    slices : dict of str to index, optional
        Of these tensors only a part is read, as ``safe_open(...).get_slice(name)[index]``
        reads it: what a rank of tensor parallelism needs.
    out : dict of str to torch.Tensor or numpy.ndarray, optional
        Tensors that are filled, of the right dtype and shape; then `names` is by default
        what it has.
    framework : {"pt", "np"}, default "pt"
        Whose tensors are made.
    device : str, int or torch.device, default "cpu"
        Where tensors of torch go.
    progress : callable, optional
        Is called with the bytes read so far and all there are.
    direct : {"auto", True, False}, default "auto"
        Whether to read past the page cache: where it has less than half of a file, always,
        or never.

    Returns
    -------
    dict of str to torch.Tensor or numpy.ndarray
        Each with a storage of its own, of exactly its bytes, or of `out`.

    Raises
    ------
    SafetensorError
        The index or a file is none, names a file outside of its folder, or lacks a tensor;
        or a file changes while it is read.
    FileNotFoundError
        The folder has neither an index nor one safetensors file, or a file is missing.
    OSError, MemoryError, TypeError, ValueError, IndexError
        As ``load_file`` and ``get_slice``; before anything is read.

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
    if isinstance(names, str):
        raise TypeError(f"names is {names!r}; it must be an iterable of names, or None")
    check_progress(progress)
    if not isinstance(slices, (Mapping, type(None))):
        raise TypeError(f"slices is {shown(slices)}; it must be a dict of indices, or None")
    kind = framework_of(framework, device)
    rules = rules_of(kind, "mmap")
    places = _places(os.fsdecode(folder_or_index))
    parts = dict(slices or {})
    if names is not None:
        wanted = list(dict.fromkeys(names))
    else:
        wanted = list(places if out is None else out)
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
        with _naming(path):
            chosen = [selected(file, n, parts.get(n), kind, rules) for n in by_file[path]]
        # In the order of its bytes.
        return sorted(chosen, key=lambda each: each.tensor.begin)

    if len(paths) > FILES_MAX:
        # Not all can be open together; what is wrong with one is told before any is read.
        total = 0
        for path in paths:
            with _opened(path, direct) as file:
                total += sum(each.nbytes for each in choose(path, file))
    found: dict[str, Any] = {}
    before, tell = 0, progress
    for low in range(0, len(paths), FILES_MAX):
        with ExitStack() as stack:
            chosen = []
            for path in paths[low : low + FILES_MAX]:
                chosen += choose(path, stack.enter_context(_opened(path, direct)))
            if progress is not None and len(paths) > FILES_MAX:

                def tell(done: int, _: int, before: int = before) -> None:
                    progress(before + done, total)

            found |= load(chosen, kind, out=out, progress=tell)
            before += sum(each.nbytes for each in chosen)
    return found


@contextlib.contextmanager
def _opened(path: str, direct: Direct) -> Iterator[ModelFile]:
    with _naming(path):
        file = ModelFile(path, direct)
    try:
        yield file
    finally:
        file.close()


@contextlib.contextmanager
def _naming(path: str) -> Iterator[None]:
    """Say which of several files is wrong."""
    try:
        yield
    except SafetensorError as error:
        raise SafetensorError(f"{path}: {error}") from None


def _places(path: str) -> dict[str, str]:
    """Return for each tensor of a model the path of its file."""
    if path.endswith(".safetensors"):
        return _only(path)
    if not os.path.isdir(path):
        return _index(path)
    entries = sorted(os.listdir(path))
    indices = [name for name in entries if name.endswith(INDEX_END)]
    if INDEX_NAME in indices:
        indices = [INDEX_NAME]
    if len(indices) == 1:
        return _index(os.path.join(path, indices[0]))
    files = [name for name in entries if name.endswith(".safetensors")]
    if indices or len(files) != 1:
        raise FileNotFoundError(
            2,
            f"a model is one {INDEX_NAME}, or one file *.safetensors: there are "
            f"{len(indices)} and {len(files)}",
            path,
        )
    return _only(os.path.join(path, files[0]))


def _only(path: str) -> dict[str, str]:
    """Return the same of a model in one file."""
    with _opened(path, False) as file:
        return dict.fromkeys(file.layout.by_name, path)


def _index(path: str) -> dict[str, str]:
    """Read an index: each file lies in its folder."""
    with open(path, "rb") as file:
        if (size := os.fstat(file.fileno()).st_size) > INDEX_BYTES_MAX:
            raise SafetensorError(
                f"{path} is not the index of a model: it has {size} bytes, and "
                f"{INDEX_BYTES_MAX} is the limit"
            )
        try:
            places = json.load(file)["weight_map"]
            items = list(places.items())
        except UnicodeDecodeError:
            raise SafetensorError(
                f"{path} is not the index of a model: it is not text"
            ) from None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise SafetensorError(
                f"{path} is not the index of a model: {error!r}"
            ) from None
    folder = os.path.dirname(path)
    for name, place in items:
        if not isinstance(place, str) or not _is_within(place):
            raise SafetensorError(
                f"{path} says that tensor {name} is in {place!r}; it must be a file in the "
                "folder of the index"
            )
    return {name: os.path.join(folder, place) for name, place in items}


def _is_within(place: str) -> bool:
    """Tell whether a path leads to something in a folder, without climbing out of it."""
    parts = place.split("/")
    try:
        os.fsencode(place)
    except UnicodeEncodeError:
        return False
    return bool(place) and "\0" not in place and not {"", ".", ".."} & set(parts)


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
    """Write tensors to as many files as it takes, and an index, as transformers does.

    Parameters
    ----------
    tensors : dict of str to torch.Tensor or numpy.ndarray
        All of one kind; no two tensors of torch may share memory.
    folder : str or os.PathLike
        Is made where it does not exist.
    max_shard_size : int or str, default "50GB"
        How many bytes of tensors a file has at most, such as "5GB" (10**9) or "4GiB"
        (2**30).  A tensor that is larger has a file to itself.
    metadata : dict of str to str, optional
        Text for every file; ``{"format": "pt"}`` or ``"np"`` by default.
    align, sync, progress
        As for ``save_file``.

    Returns
    -------
    list of str
        The names of the files in `folder`: ``model.safetensors`` alone, or
        ``model-00001-of-00003.safetensors`` and so on, and the index last.

    Raises
    ------
    RuntimeError, SafetensorError, TypeError, ValueError, OSError
        As ``save_file``; or `max_shard_size` is no size.

    Notes
    -----
    Each file and the index is replaced as a whole, the index last.  Files of a model that
    was saved here before, and that this one has not, are removed at the end; a folder that
    must never be seen with files of two models is better written anew.

    Examples
    --------
    >>> tensors = {name: np.arange(1000) for name in ("first", "second")}
    >>> files = nvmeio.safetensors.save_sharded(tensors, "model", "8KB")
    >>> files[0], files[-1]
    ('model-00001-of-00002.safetensors', 'model.safetensors.index.json')
    """
    limit = _size(max_shard_size)
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
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [
            f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            for number in range(1, len(shards) + 1)
        ]
    options: dict[str, Any] = {"align": align, "sync": sync}
    for shard in shards:
        # What a file cannot have is refused before there is a folder.
        build(((s.name, s.dtype, s.shape) for s in kind._sources(shard)), align=align)
    folder = os.fsdecode(folder)
    os.makedirs(folder, exist_ok=True)
    text = {"format": word} if metadata is None else dict(metadata)
    total = sum(tensor.nbytes for tensor in tensors.values())
    done = 0
    _require_descriptors(len(shards), folder)
    with ExitStack() as stack:
        # All are checked and reserved before the first is written, and written before the
        # first has its name.
        writers = [
            stack.enter_context(
                saving(kind._sources(shard), os.path.join(folder, name), text, **options)
            )
            for name, shard in zip(names, shards, strict=True)
        ]
        for write_all, shard in zip(writers, shards, strict=True):
            size = sum(tensor.nbytes for tensor in shard.values())
            tell = None
            if progress is not None:

                def tell(
                    written: int, of: int, before: int = done, size: int = size
                ) -> None:
                    # Without the headers.
                    progress(before + min(size, max(0, written - of + size)), total)

            write_all(tell)
            done += size
    if len(shards) > 1:
        pairs = zip(names, shards, strict=True)
        places = {key: name for name, shard in pairs for key in shard}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        contents = json.dumps(index, indent=2, sort_keys=True) + "\n"
        write_file(contents.encode(), os.path.join(folder, INDEX_NAME), sync=sync)
        names.append(INDEX_NAME)
    _remove_others(folder, set(names))
    return names


def _require_descriptors(files: int, folder: str) -> None:
    """Refuse more files than this process may have open."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    free = limit - len(os.listdir("/proc/self/fd"))
    if limit != resource.RLIM_INFINITY and DESCRIPTORS * files > free:
        words = f"{DESCRIPTORS * files} descriptors are needed for {files} files"
        words += f", and {free} are free (ulimit -n is {limit})"
        raise OSError(errno.EMFILE, words, folder)


def _size(text: int | str) -> int:
    """Return the limit of a file in bytes."""
    found = (
        re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]i?B)?", text.strip(), re.I | re.A)
        if isinstance(text, str)
        else None
    )
    nbytes = 0
    if found:
        with contextlib.suppress(OverflowError):
            nbytes = int(float(found[1]) * UNITS[(found[2] or "").upper()])
    if not isinstance(text, str):
        nbytes = integer("max_shard_size", text)
    if nbytes < 1:
        raise ValueError(
            f"max_shard_size is {text!r}; it must be a number of bytes, such as "
            '5000000000, "5GB" or "4GiB"'
        )
    return nbytes


def _shards(tensors: Mapping[str, Any], limit: int) -> list[dict[str, Any]]:
    """Fill file after file, in the order of the tensors, as huggingface_hub does."""
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


def _remove_others(folder: str, names: set[str]) -> None:
    """Remove the files of a model that was saved here before.

    First its index, if this model has none: until that is gone for good, whoever loads from
    the folder needs the files that it names.
    """
    pattern = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
    with contextlib.suppress(FileNotFoundError):
        if INDEX_NAME not in names:
            index = os.path.join(folder, INDEX_NAME)
            with synced_folder(index):
                os.unlink(index)
    for name in os.listdir(folder):
        if pattern.fullmatch(name) and name not in names:
            os.unlink(os.path.join(folder, name))
