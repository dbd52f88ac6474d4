"""Which file has which tensor of a model in one or several safetensors files."""

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Any

from nvmeio._files.descriptors import open_regular
from nvmeio._files.kinds import INDEX_END, INDEX_NAME, json_of
from nvmeio._files.paths import is_within
from nvmeio._safetensors.file import Direct, Mapped, ModelFile
from nvmeio._tensors.errors import SafetensorError

__all__ = [
    "INDEX_BYTES_MAX",
    "INDEX_NAME",
    "NUMBERED",
    "REPLACING",
    "SINGLE_NAME",
    "file_at",
    "leading_in",
    "leading_to",
    "naming_model",
    "places_of",
    "read_index",
    "replaced",
]

# The limit of a header; an index has less about each tensor than a header.
INDEX_BYTES_MAX = 100_000_000
# The name of a model in one file, which transformers loads even if there is an index.
SINGLE_NAME = "model.safetensors"

# The name of a file that is one of several, of a whole model or of what one rank has of it.
NUMBERED = re.compile(
    r"(?P<rank>shard-\d+-)?(?P<stem>.+)-(?P<number>\d{5,})-of-(?P<count>\d{5,})\.safetensors"
)

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
    """Return the path of the file of each tensor, by an index or a file."""
    if path.endswith(".safetensors"):
        with file_at(path, False) as file:
            return dict.fromkeys(file.layout.by_name, path)
    folder = os.path.dirname(path)
    places, _ = read_index(path)
    return {name: os.path.join(folder, place) for name, place in places.items()}


def leading_in(names: list[str]) -> list[str]:
    """Return which of the files in a folder lead to its model: best a single one.

    As in transformers, a model in one file comes before an index, and the usual index
    before others, such as consolidated.safetensors.index.json.
    """
    for usual in (SINGLE_NAME, INDEX_NAME):
        if usual in names:
            return [usual]
    return [name for name in names if name.endswith(INDEX_END)]


def leading_to(path: str) -> str:
    """Return the path of the index or the file by which a model is loaded."""
    if not os.path.isdir(path):
        return path
    entries = sorted(os.listdir(path))
    leading = leading_in(entries)
    if len(leading) == 1:
        return os.path.join(path, leading[0])
    files = [name for name in entries if name.endswith(".safetensors")]
    if leading or len(files) != 1:
        raise FileNotFoundError(
            2,
            f"a model is one {INDEX_NAME} or one file *.safetensors, but there are "
            f"{len(leading)} and {len(files)}; pass the path of the index or file",
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
    numbered = NUMBERED.fullmatch(files[0])
    if numbered is not None and (count := int(numbered["count"])) != 1:
        raise FileNotFoundError(
            2,
            f"{files[0]} is one of {count} files, and there is no {INDEX_NAME}: "
            "the others may not have come yet; to read this one alone, pass its path",
            path,
        )
    return os.path.join(path, files[0])


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
