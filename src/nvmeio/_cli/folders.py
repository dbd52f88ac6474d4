"""List the contents of a checkpoint's folder, without torch and without running its code.

For a step of nvmeio.checkpoint these are in its files; for torch.distributed.checkpoint
they are in ``.metadata``, a pickle.
"""

import math
import os
import shlex
from typing import Any

from nvmeio._arguments.json_texts import parse_json
from nvmeio._cli.arguments import CommandError
from nvmeio._cli.record_files import is_mds_folder, mds_folder
from nvmeio._cli.torch_files import check_pickle_size, loaded
from nvmeio._files.kinds import INDEX_END, METADATA, STEP, TENSORS, what_is_in
from nvmeio._tensors.torch_files import SIZES, Reader
from nvmeio.checkpoint import CheckpointError
from nvmeio.checkpoint._restoring import Held, MovedError
from nvmeio.safetensors import SafetensorError, safe_open

__all__ = ["contents_of", "models_in", "step_of", "tensors_in"]

# No index of a model is longer than the longest header.
HEADER_BYTES_MAX = 100_000_000


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
    if any(name.endswith(".safetensors") for name in names):
        return models_in(path)
    if is_mds_folder(path, names):
        return mds_folder(path)
    words = f"{path}: it is a folder, not a file; {what_is_in(path)}"
    if any(map(STEP.fullmatch, names)):
        words += f"; `nvmeio checkpoints {shlex.quote(path)}` lists them"
    raise CommandError(words)


def models_in(path: str) -> dict[str, Any]:
    """Return the tensors of a model in several files, with the file of each.

    Those of the index are listed, where there is one, or else all of the folder.
    """
    names = sorted(name for name in os.listdir(path) if name.endswith(".safetensors"))
    index = next((each for each in os.listdir(path) if each.endswith(INDEX_END)), None)
    said: dict[str, Any] = {}
    if index:
        names, said = _indexed(os.path.join(path, index))
    tensors = []
    for name in names:
        file = os.path.join(path, name)
        try:
            found = tensors_in(file)["tensors"]
        except SafetensorError as error:
            words = "; ".join((str(error), *getattr(error, "__notes__", ())))
            raise CommandError(f"{file}: {words}") from None
        for each in found:
            del each["offset"]
            tensors.append({**each, "files": [name]})
    kind = "safetensors, in several files" if len(names) > 1 else "safetensors, in a folder"
    return {"format": kind, "metadata": said or None, "tensors": tensors, "values": []}


def _indexed(index: str) -> tuple[list[str], dict[str, Any]]:
    """Return the files and the metadata of an index, checked."""
    try:
        with open(index, "rb") as file:
            text = file.read(HEADER_BYTES_MAX + 1)
        if len(text) > HEADER_BYTES_MAX:
            raise ValueError(f"it has more than {HEADER_BYTES_MAX} bytes")
        found = parse_json(text)
        names = sorted(set(found["weight_map"].values()))
        said = found.get("metadata") or {}
        if not isinstance(said, dict):
            raise TypeError("its metadata are no object")
        for name in names:
            if os.path.basename(name) != name or name in ("", ".", ".."):
                raise ValueError(f"it names {name!r}, which is not in its folder")
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise CommandError(f"{index}: it is no index of model files: {error!r}") from None
    return names, said


def tensors_in(path: str) -> dict[str, Any]:
    """Return the tensors of a safetensors file, in the order of the file."""
    with safe_open(path, "np", direct=False) as file:
        layout = file._layout()
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
    check_pickle_size(f"{file}: it", os.path.getsize(file))
    with open(file, "rb") as stream:
        content = loaded(stream.read(), file, MetadataReader)
    try:
        return _described(content.state)
    except (AttributeError, LookupError, TypeError, ValueError):
        raise CommandError(
            f"{file}: it is not the metadata of a checkpoint, or of an unknown version"
        ) from None


def _described(state: dict[str, Any]) -> dict[str, Any]:
    files: dict[str, set[str]] = {}
    stored: dict[str, int] = {}
    for index, info in (state["storage_data"] or {}).items():
        name = index.state["fqn"]
        files.setdefault(name, set()).add(str(info.state["relative_path"]))
        stored[name] = stored.get(name, 0) + int(info.state["length"])
    tensors, values = [], []
    for name, value in state["state_dict_metadata"].items():
        held = sorted(files.get(name, ()))
        if not (isinstance(value.state, dict) and "size" in value.state):
            values.append({"name": name, "bytes": stored.get(name, 0), "files": held})
            continue
        dtype = str(value.state["properties"].state[0])
        shape = [int(each) for each in value.state["size"]]
        nbytes = math.prod(shape) * SIZES.get(dtype, 1)
        one = {"name": name, "dtype": dtype, "shape": shape, "bytes": nbytes}
        tensors.append({**one, "files": held})
    for each in (*tensors, *values):
        if not isinstance(each["name"], str) or not 0 <= each["bytes"] < 2**63:
            raise ValueError(each)
    kind = "torch.distributed.checkpoint"
    return {"format": kind, "metadata": None, "tensors": tensors, "values": values}
