"""List the contents of a checkpoint's folder, without torch and without running its code.

For a step of nvmeio.checkpoint these are in its files; for torch.distributed.checkpoint
they are in ``.metadata``, a pickle.
"""

import math
import os
import shlex
from collections.abc import Iterator
from typing import Any

from nvmeio._cli.arguments import CommandError
from nvmeio._cli.pieces import wrong_with
from nvmeio._cli.record_files import is_mds_folder, mds_folder
from nvmeio._cli.torch_files import check_pickle_size, loaded
from nvmeio._files.descriptors import open_regular
from nvmeio._files.kinds import INDEX_END, METADATA, STEP, TENSORS, what_is_in
from nvmeio._safetensors.parts import part_of, parts_in
from nvmeio._safetensors.places import NUMBERED, SINGLE_NAME, leading_in, read_index
from nvmeio._tensors.dtypes import framework_shape
from nvmeio._tensors.torch_files import SIZES, Reader, shape_of
from nvmeio.checkpoint import CheckpointError
from nvmeio.checkpoint._restoring import Held, MovedError
from nvmeio.safetensors import SafetensorError, safe_open

__all__ = ["contents_of", "models_in", "step_of", "tensors_in"]

MODEL_END = ".safetensors"


def step_of(path: str) -> tuple[str, int] | None:
    """Return the root and the number of a step's folder; None for other names."""
    root, name = os.path.split(os.path.abspath(path))
    found = STEP.fullmatch(name)
    return (root, int(found[1])) if found else None


def contents_of(path: str) -> dict[str, Any]:
    """Return the contents of a folder as ``nvmeio inspect`` shows them."""
    if os.path.exists(os.path.join(path, METADATA)):
        return _distributed(path)
    if step := step_of(path):
        try:
            return _step(path, step[1])
        except (CheckpointError, MovedError) as error:
            raise CommandError(f"{error}; {what_is_in(path)}") from None
    names = os.listdir(path)
    if any(name.endswith((MODEL_END, INDEX_END)) for name in names):
        return models_in(path)
    if is_mds_folder(path, names):
        return mds_folder(path)
    words = f"{path}: it is a folder, not a file; {what_is_in(path)}"
    if any(map(STEP.fullmatch, names)):
        words += f"; `nvmeio checkpoints {shlex.quote(path)}` lists them"
    raise CommandError(words)


def models_in(path: str) -> dict[str, Any]:
    """Return the tensors of a model in several files, with the file of each.

    `path` is an index, or a folder.  The files by which the model is loaded are listed, or
    else all of the folder.
    """
    problems: list[str] = []
    places: dict[str, str] = {}
    said: Any = None
    if not os.path.isdir(path):
        folder, indices = os.path.dirname(path) or ".", [os.path.basename(path)]
        names = []
    else:
        folder, entries = path, sorted(os.listdir(path))
        indices = leading_in(entries)
        names = [each for each in entries if each.endswith(MODEL_END)]
        if indices == [SINGLE_NAME]:
            # Files of an index beside it are of another model.
            has_index = any(each.endswith(INDEX_END) for each in entries)
            names, indices = indices if has_index else names, []
    if len(indices) > 1:
        some = ", ".join(indices[:3])
        raise CommandError(
            f"{path}: it has {len(indices)} indices of models; pass the path of one: {some}"
        )
    if indices:
        index = os.path.join(folder, indices[0])
        try:
            places, said = read_index(index)
        except SafetensorError as error:
            raise CommandError(str(error)) from None
        if not isinstance(said, (dict, type(None))):
            raise CommandError(f"{index}: its metadata are {said!r:.100}, not an object")
        names = sorted(set(places.values()))
    else:
        problems += _missing_parts(folder, names)
    tensors = []
    there = set()
    ranks = _Parts()
    for name in names:
        if wrong := wrong_with(folder, name, 0):
            problems.append(wrong)
            continue
        file = os.path.join(folder, name)
        try:
            listed = tensors_in(file)
            parts = parts_in(listed["metadata"] or {}, file)
            for each in listed["tensors"]:
                ranks.add(each, parts, file)
        except (CommandError, SafetensorError) as error:
            problems.append(str(error))
            continue
        for each in listed["tensors"]:
            del each["offset"]
            tensors.append({**each, "files": [name]})
            there.add((each["name"], name))
    problems += ranks.missing(folder)
    readable = {name for _, name in there}
    problems += [
        f"{os.path.join(folder, place)} lacks the tensor {name!r:.200} of the index"
        for name, place in places.items()
        if place in readable and (name, place) not in there
    ]
    kind = "safetensors, in several files" if len(names) > 1 else "safetensors, in a folder"
    return {
        "format": kind,
        "metadata": said or None,
        "tensors": tensors,
        "values": [],
        "problems": problems,
    }


class _Parts:
    """How many elements of each tensor the files have, as far as these are of ranks."""

    def __init__(self) -> None:
        self._there: dict[str, int] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}

    def add(self, tensor: dict[str, Any], parts: dict[str, Any] | None, file: str) -> None:
        """Count what a file has of a tensor."""
        if parts is None:
            return
        name, shape = tensor["name"], framework_shape(tensor["dtype"], tensor["shape"])
        offsets, whole = part_of(parts, name, shape, file)
        if whole is None:
            # As far as is known, it ends with its last part.
            known = self._shapes.get(name, offsets)
            ends = (low + count for low, count in zip(offsets, shape, strict=True))
            whole = tuple(map(max, known, ends))
        self._shapes[name] = whole
        self._there[name] = self._there.get(name, 0) + math.prod(shape)

    def missing(self, folder: str) -> Iterator[str]:
        """Yield of which tensors elements are missing."""
        for name, there in self._there.items():
            if there < (wanted := math.prod(self._shapes[name])):
                words = f"the files have {there} of {wanted} elements"
                yield f"{folder}: {words} of {name!r:.200}"


def _missing_parts(folder: str, names: list[str]) -> Iterator[str]:
    """Yield which files are missing of models whose files have numbers."""
    # The files of ranks have numbers in common: each rank has those of its tensors.
    there: dict[tuple[str, int], set[int]] = {}
    for name in names:
        if found := NUMBERED.fullmatch(name):
            key = found["stem"], int(found["count"])
            there.setdefault(key, set()).add(int(found["number"]))
    for (stem, count), numbers in there.items():
        if len(numbers) < count:
            yield (
                f"{folder}: {stem}-...-of-{count:05}{MODEL_END}: {count - len(numbers)} of "
                f"{count} files are missing"
            )


def tensors_in(path: str) -> dict[str, Any]:
    """Return the tensors of a safetensors file, in the order of the file.

    Raise CommandError that says what else the file is.
    """
    try:
        with safe_open(path, "np", direct=False) as file:
            layout = file._layout()
    except SafetensorError as error:
        notes = (each.removeprefix(f"{path}: ") for each in getattr(error, "__notes__", ()))
        raise CommandError(f"{path}: {'; '.join((str(error), *notes))}") from None
    return {
        "format": "safetensors",
        "metadata": layout.metadata,
        "tensors": [
            {
                "name": tensor.name,
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "bytes": tensor.end - tensor.begin,
                "offset": layout.data_start + tensor.begin,
            }
            for tensor in layout.tensors
        ],
    }


def _step(path: str, step: int) -> dict[str, Any]:
    """Return the contents of a step; offsets are those of its tensors.safetensors."""
    with Held(path, step) as held:
        said = {
            "step": step,
            "saved": held.manifest.saved,
            "checksum": held.manifest.checksum,
            "metadata": held.plain_metadata(),
        }
        found = tensors_in(os.path.join(path, TENSORS))
    return {**found, "format": "nvmeio.checkpoint", "metadata": said}


class Described:
    """Stands for an object of a class that describes a checkpoint."""

    state: Any = None

    def __init__(self, *args: object) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


class Index(Described):
    """The name of a value, and the offset of a part of it."""


class MetadataReader(Reader):
    """Reads the description of a checkpoint of torch.distributed.checkpoint."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a harmless replacement for a function or class of the pickle."""
        if name == "MetadataIndex":
            return Index
        describes = module.startswith("torch.distributed.checkpoint.")
        return Described if describes else super().find_class(module, name)


def _distributed(path: str) -> dict[str, Any]:
    """Return the contents of a folder of torch.distributed.checkpoint."""
    file = os.path.join(path, METADATA)
    with open_regular(file) as stream:
        check_pickle_size(f"{file}: it", os.fstat(stream.fileno()).st_size)
        content = loaded(stream.read(), file, MetadataReader)
    try:
        return _described(path, content.state)
    except (AttributeError, LookupError, TypeError, ValueError):
        raise CommandError(
            f"{file}: it is not the metadata of a checkpoint, or of an unknown version"
        ) from None


def _described(folder: str, state: dict[str, Any]) -> dict[str, Any]:
    files: dict[str, set[str]] = {}
    stored: dict[str, int] = {}
    parts: dict[str, set[Any]] = {}
    ends: dict[str, int] = {}
    for index, info in (state["storage_data"] or {}).items():
        name, file = index.state["fqn"], info.state["relative_path"]
        begin, length = _number(info.state["offset"]), _number(info.state["length"])
        if not isinstance(file, str):
            raise TypeError(file)
        files.setdefault(name, set()).add(file)
        stored[name] = stored.get(name, 0) + length
        parts.setdefault(name, set()).add(index.state.get("offset"))
        ends[file] = max(ends.get(file, 0), begin + length)
    problems = [
        wrong for file in sorted(ends) if (wrong := wrong_with(folder, file, ends[file]))
    ]
    tensors, values = [], []
    for name, value in state["state_dict_metadata"].items():
        if not isinstance(name, str):
            raise TypeError(name)
        held = sorted(files.get(name, ()))
        if not (isinstance(value.state, dict) and "size" in value.state):
            values.append({"name": name, "bytes": stored.get(name, 0), "files": held})
            missing = not held
        else:
            dtype = value.state["properties"].state[0]
            if not isinstance(dtype, str):
                raise TypeError(dtype)
            shape, nbytes = _sized(value.state["size"], dtype)
            one = {"name": name, "dtype": dtype, "shape": list(shape), "bytes": nbytes}
            tensors.append({**one, "files": held})
            chunks = [each.state for each in value.state["chunks"]]
            covered = sum(_sized(each["sizes"], dtype)[1] for each in chunks)
            offsets = {each["offsets"] for each in chunks}
            missing = covered < nbytes or not offsets <= parts.get(name, set())
        if missing:
            problems.append(f"{folder}: no file has all bytes of {name!r:.200}")
    return {
        "format": "torch.distributed.checkpoint",
        "metadata": None,
        "tensors": tensors,
        "values": values,
        "problems": problems,
    }


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(value)
    return value


def _sized(shape: Any, dtype: str) -> tuple[tuple[int, ...], int]:
    """Return the shape and the size in bytes of a tensor."""
    itemsize = SIZES.get(dtype, 1)
    extents = shape_of(shape, itemsize)
    return extents, math.prod(extents) * itemsize
