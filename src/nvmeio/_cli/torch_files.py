"""List the tensors of a torch.save file, without torch and without running its code."""

import math
import os
import shlex
import zipfile
from collections.abc import Iterator
from typing import Any

from nvmeio._cli.arguments import CommandError
from nvmeio._cli.terminal import sizes
from nvmeio._tensors.torch_files import Reader, Stored, content_of, entries_of, unpickled

__all__ = ["check_pickle_size", "is_torch_file", "loaded", "tensors_of"]

# The limit for a pickle, whose size grows with the number of tensors.
PICKLE_BYTES_MAX = 256 << 20
DEPTH_MAX = 100


def is_torch_file(path: str) -> bool:
    """Return whether a file is an archive of torch.save."""
    try:
        entries = entries_of(path)
    except (OSError, zipfile.BadZipFile):
        return False
    if "data.pkl" not in entries:
        return False
    first = min(each.header_offset for each in entries.values())
    if first > 0 or path.endswith(".distcp"):
        # Zip archives are read from their end, so only the last one would be listed.
        folder = os.path.dirname(path) or "."
        raise CommandError(
            f"{path}: it is a shard of torch.distributed.checkpoint, with an archive of "
            f"torch.save for each value; `nvmeio inspect {shlex.quote(folder)}` lists the "
            "checkpoint"
        )
    return True


def tensors_of(path: str) -> list[dict[str, Any]]:
    """Return the tensors of a torch.save file, named by their keys from the top down."""
    entries = entries_of(path)
    with open(path, "rb") as file:
        check_pickle_size(f"{path}: its pickle", entries["data.pkl"].file_size)
        try:
            text = content_of(file, entries["data.pkl"])
        except ValueError as error:
            raise CommandError(f"{path}: its pickle cannot be read: {error}") from None
        found = []
        for key, tensor in _walk(loaded(text, path), path):
            try:
                offset = tensor.place(file, entries)
            except (KeyError, ValueError):
                raise CommandError(f"{path}: it lacks the bytes of {key}") from None
            found.append(
                {
                    "name": key,
                    "dtype": tensor.dtype,
                    "shape": list(tensor.shape),
                    "bytes": math.prod(tensor.shape) * tensor.itemsize,
                    "offset": offset,
                }
            )
        return found


def check_pickle_size(what: str, nbytes: int) -> None:
    """Raise CommandError if a pickle is too large."""
    if nbytes > PICKLE_BYTES_MAX:
        has, most = sizes(nbytes, PICKLE_BYTES_MAX)
        raise CommandError(f"{what} has {has}; the limit is {most}")


def loaded(text: bytes, path: str, reader: type[Reader] = Reader) -> Any:
    """Return what a reader makes of the pickle of a file."""
    try:
        return unpickled(text, reader)
    except (OSError, MemoryError):
        raise
    except Exception as error:
        raise CommandError(f"{path}: its pickle cannot be read: {error}") from None


def _walk(content: Any, file: str) -> Iterator[tuple[str, Stored]]:
    """Yield the tensors of nested dicts, lists and tuples, each container once."""
    seen: set[int] = set()
    waiting: list[tuple[tuple[str, ...], Any]] = [((), content)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, Stored):
            yield "/".join(path), value
        elif isinstance(value, (dict, list, tuple)) and id(value) not in seen:
            seen.add(id(value))
            if len(path) == DEPTH_MAX:
                raise CommandError(f"{file}: it is nested deeper than {DEPTH_MAX} levels")
            items = value.items() if isinstance(value, dict) else enumerate(value)
            waiting += [((*path, str(key)), each) for key, each in items][::-1]
