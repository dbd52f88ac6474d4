"""``.metadata``: what a checkpoint has, read without running what it says."""

import functools
import logging
import os
import pathlib
import pickle
from collections import OrderedDict
from typing import IO, Any

import torch
from torch.distributed._shard.sharded_tensor import metadata as sharded_metadata
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata

from nvmeio.checkpoint._kinds import what_is_in

__all__ = ["read_metadata", "shards_of"]

METADATA = ".metadata"

_log = logging.getLogger("nvmeio")


def shards_of(path: str) -> set[str]:
    """Return the files of the checkpoint that a metadata file is of."""
    try:
        found = read_metadata(path, weights_only=True)
        names = {str(each.relative_path) for each in found.storage_data.values()}
    except FileNotFoundError:
        return set()
    except Exception as error:
        _log.warning("the checkpoint that is replaced cannot be read: %s", error)
        return set()
    # It may say anything, and these are removed.
    suffix = filesystem.DEFAULT_SUFFIX
    return {n for n in names if os.path.basename(n) == n and n.endswith(suffix)}


_DESCRIBING = {each.__name__: each for each in (metadata, sharded_metadata)}


class _Sealed(type):
    """What is given to a file in place of a class, whose attributes it could set."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise pickle.UnpicklingError(f"it sets {name} of {cls.__name__} itself")


@functools.cache
def _sealed(kind: Any) -> type:
    """Return a class that makes objects of another one."""
    return _Sealed(
        kind.__name__, (), {"__new__": lambda _, *said: kind.__new__(kind, *said)}
    )


class _MetadataUnpickler(pickle.Unpickler):
    """Reads ``.metadata``, and makes nothing of it but what describes a checkpoint."""

    _BUILTINS = frozenset({"set", "frozenset", "slice", "complex", "bytearray"})
    _TORCH = frozenset({"Size", "device"})

    def find_class(self, module: str, name: str) -> Any:
        """Return a class or function of the list, or refuse."""
        if module == "torch":
            found = getattr(torch, name, None)
            if name in self._TORCH or isinstance(found, torch.dtype):
                return found
        elif module == "torch.serialization" and name == "_get_layout":
            # As of a class: the function itself could be given other defaults.
            return lambda layout: torch.serialization._get_layout(layout)
        elif module in _DESCRIBING:
            # Older versions of torch have some of it elsewhere.
            found = getattr(_DESCRIBING[module], name, None)
            if isinstance(found, type) and found.__module__ == module:
                return _sealed(found)
        elif (module, name) == ("torch.distributed.checkpoint.filesystem", "_StorageInfo"):
            return _sealed(filesystem._StorageInfo)
        elif (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        elif module in ("pathlib", "pathlib._local"):
            if name.endswith("Path"):
                return lambda *parts: pathlib.Path(*parts)
        elif module == "builtins" and name in self._BUILTINS:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(
            f"it needs {module}.{name}, which describes no checkpoint; weights_only=False "
            "allows it, and runs any code that is in the file"
        )


def _opened(path: str) -> IO[bytes]:
    folder, name = os.path.split(path)
    try:
        return open(path, "rb")
    except (FileNotFoundError, NotADirectoryError) as error:
        # Torch asks for that of the rank next, and says both.
        if name != METADATA:
            raise
        words = f"there is no checkpoint to load; {what_is_in(folder)}"
        raise type(error)(error.errno, words, path) from None


def read_metadata(path: str, *, weights_only: bool) -> Any:
    with _opened(path) as file:
        try:
            kind = _MetadataUnpickler if weights_only else pickle.Unpickler
            found = kind(file).load()
        except pickle.UnpicklingError as error:
            raise pickle.UnpicklingError(f"{path}: {error}") from None
    if not isinstance(found, Metadata):
        raise pickle.UnpicklingError(f"{path}: not the metadata of a checkpoint")
    return found
