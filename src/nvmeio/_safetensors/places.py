"""Which file has which tensor of a model in one or several safetensors files."""

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Any

from nvmeio._files.descriptors import open_regular
from nvmeio._files.kinds import INDEX_END, json_of
from nvmeio._files.paths import is_within
from nvmeio._safetensors.file import Direct, Mapped, ModelFile
from nvmeio._tensors.errors import SafetensorError

__all__ = [
    "INDEX_BYTES_MAX",
    "INDEX_NAME",
    "REPLACING",
    "SINGLE_NAME",
    "file_at",
    "indices_in",
    "naming_model",
    "places_of",
    "read_index",
    "replaced",
]

# The limit of a header; an index has less about each tensor than a header.
INDEX_BYTES_MAX = 100_000_000

INDEX_NAME = f"model{INDEX_END}"
# The name of a model in one file, which transformers loads even if there is an index.
SINGLE_NAME = "model.safetensors"

# How the name of a file ends that is one of several.
_OF_SET = re.compile(r"-\d{5}-of-(\d{5})\.safetensors\Z")

# No JSON, so that every library refuses it.
REPLACING = (
    b"The files of this model are being replaced one by one, or that was interrupted. They "
    b"may be of two models: save it again.\n"
)


@contextlib.contextmanager
def file_at(path: str, direct: Direct, mapped: Mapped = False) -> Iterator[ModelFile]:
    with naming_model(path):
        file = ModelFile(path, direct, mapped)
    try:
        yield file
    finally:
        file.close()


@contextlib.contextmanager
def naming_model(path: str) -> Iterator[None]:
    """Add the path to a SafetensorError."""
    try:
        yield
    except SafetensorError as error:
        raise SafetensorError(f"{path}: {error}") from None


def places_of(path: str) -> dict[str, str]:
    """Return the path of the file of each tensor of a model."""
    if path.endswith(".safetensors"):
        return _only(path)
    if not os.path.isdir(path):
        return _index(path)
    entries = sorted(os.listdir(path))
    indices = indices_in(entries)
    if SINGLE_NAME in entries and INDEX_NAME not in entries:
        # Another index, such as consolidated.safetensors.index.json, is of other files.
        return _only(os.path.join(path, SINGLE_NAME))
    if len(indices) == 1:
        return _index(os.path.join(path, indices[0]))
    files = [name for name in entries if name.endswith(".safetensors")]
    if indices or len(files) != 1:
        raise FileNotFoundError(
            2,
            f"a model is one {INDEX_NAME} or one file *.safetensors, but there are "
            f"{len(indices)} and {len(files)}; pass the path of the index or file",
            path,
        )
    if files[0].startswith("shard-"):
        raise FileNotFoundError(
            2,
            f"{files[0]} is by its name the file of one rank, which may have parts of "
            "tensors: read the folder with nvmeio.torch.dcp.HuggingFaceStorageReader; to "
            "read this file alone, pass its path",
            path,
        )
    if (of_set := _OF_SET.search(files[0])) is not None and int(of_set[1]) != 1:
        raise FileNotFoundError(
            2,
            f"{files[0]} is one of {int(of_set[1])} files, and there is no {INDEX_NAME}: "
            "the others may not have come yet; to read this one alone, pass its path",
            path,
        )
    return _only(os.path.join(path, files[0]))


def _only(path: str) -> dict[str, str]:
    """Return the path of each tensor of a model in a single file."""
    with file_at(path, False) as file:
        return dict.fromkeys(file.layout.by_name, path)


def indices_in(names: list[str]) -> list[str]:
    """Return the indices of models in a folder: only the usual one, if it is there."""
    indices = [name for name in names if name.endswith(INDEX_END)]
    return [INDEX_NAME] if INDEX_NAME in indices else indices


def _index(path: str) -> dict[str, str]:
    """Return the path of each tensor's file, by an index."""
    folder = os.path.dirname(path)
    places, _ = read_index(path)
    return {name: os.path.join(folder, place) for name, place in places.items()}


def replaced(path: str) -> SafetensorError:
    """Return the error for an index of a model whose files are not all of one save."""
    return SafetensorError(f"{path}: {REPLACING.decode().strip()}")


def read_index(path: str) -> tuple[dict[str, str], Any]:
    """Return the file of each tensor, which is in the folder of the index; and metadata."""
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > INDEX_BYTES_MAX:
            raise SafetensorError(
                f"{path} is not the index of a model: it has {size} bytes, and "
                f"{INDEX_BYTES_MAX} is the limit"
            )
        text = file.read()
        if text == REPLACING:
            raise replaced(path)
        try:
            found = json_of(text)
            places: dict[str, str] = dict(found["weight_map"].items())
        except UnicodeDecodeError:
            raise SafetensorError(
                f"{path} is not the index of a model: it is not text"
            ) from None
        except ValueError as error:
            raise SafetensorError(f"{path} is not the index of a model: {error}") from None
        except (TypeError, KeyError, AttributeError, RecursionError) as error:
            raise SafetensorError(
                f"{path} is not the index of a model: {error!r}"
            ) from None
    for name, place in places.items():
        if not isinstance(place, str) or not is_within(place):
            raise SafetensorError(
                f"{path} says that tensor {name} is in {place!r}; it must be a file in the "
                "folder of the index"
            )
    return places, found.get("metadata")
