"""Read ``.metadata``, the pickled description of a checkpoint, without running its code."""

import enum
import functools
import hashlib
import io
import os
import pathlib
import pickle
from collections import Counter
from collections.abc import Sized
from typing import IO, Any

import torch
from torch.distributed._shard.sharded_tensor import metadata as sharded_metadata
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from nvmeio._events.log import log
from nvmeio._files.descriptors import open_regular
from nvmeio._files.kinds import METADATA, what_is_in, why_no_pickle
from nvmeio._files.paths import exists_now
from nvmeio._native.pickles import require_linear

__all__ = ["read_metadata", "read_with_digest", "shards_of"]

# How many keys of storage_data may have the same hash.
ALIKE_MAX = 100
# limits.h
_PATH_MAX = 4096
_WAY_OUT = "pass weights_only=False to allow it, which runs any code in the file"


def shards_of(path: str) -> set[str] | None:
    """Return the names of a checkpoint's files, or None if its metadata is unreadable."""
    try:
        found = read_metadata(path, weights_only=True)
        names = {str(each.relative_path) for each in found.storage_data.values()}
    except FileNotFoundError:
        return set()
    except Exception as error:
        log.warning("the checkpoint that will be replaced cannot be read: %s", error)
        return None
    # These will be removed, so accept only plain names of shards.
    suffix = filesystem.DEFAULT_SUFFIX
    return {n for n in names if os.path.basename(n) == n and n.endswith(suffix)}


_DESCRIBING = {each.__name__: each for each in (metadata, sharded_metadata)}


class _Sealed(type):
    """The metaclass of stand-ins for classes, whose attributes a pickle must not set."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise pickle.UnpicklingError(f"it sets {name} of the class {cls.__name__}")


class _Member:
    """Stands for a member of an enumeration, which a pickle could change for all."""

    def __init__(self, kind: Any, value: Any) -> None:
        self._member = kind(value)

    def __eq__(self, other: object) -> bool:
        return other is self._member or (
            type(other) is _Member and other._member is self._member
        )

    def __hash__(self) -> int:
        return hash(self._member)


class _Index(metaclass=_Sealed):
    """Stands for a MetadataIndex, because a file could choose the hashes of many.

    Those of tuples of ints can be chosen, and those of texts cannot.
    """

    fqn: Any = None
    offset: Any = None
    index: Any = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Index) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __str__(self) -> str:
        return repr((self.fqn, self.offset))


@functools.cache
def _sealed(kind: Any) -> type:
    """Return a stand-in whose instances are objects of another class."""
    return _Sealed(
        kind.__name__, (), {"__new__": lambda _, *said: kind.__new__(kind, *said)}
    )


# What is as large as its arguments.
_MADE_OF_PARTS = {
    "builtins": frozenset({"set", "frozenset", "bytearray"}),
    "collections": frozenset({"OrderedDict"}),
    "torch": frozenset({"Size"}),
}


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles ``.metadata``, and allows only classes that describe a checkpoint."""

    def __init__(self, text: bytes) -> None:
        super().__init__(io.BytesIO(text))
        self._made = 0
        # Each object that is pickled brings its own parts, of a byte or more each.
        self._parts_left = len(text)
        self._has_path = False
        # A class of its own, because NEWOBJ takes nothing else.
        self._index = _Sealed("MetadataIndex", (_Index,), {"__new__": self._new_index})

    def _new_index(self, kind: type) -> object:
        self._made += 1
        return object.__new__(kind)

    def _make(self, kind: Any, *arguments: Any) -> Any:
        """Return an object; raise UnpicklingError if all have more parts than bytes.

        So a number of bytes is refused, and a few bytes that name the same parts again and
        again.  A bytearray may be made of text, but some encodings take long.
        """
        for each in arguments:
            self._parts_left -= len(each) if isinstance(each, Sized) else 1 << 64
        is_text = kind is bytearray and arguments[1:]
        if self._parts_left < 0 or (is_text and arguments[1] != "latin-1"):
            raise pickle.UnpicklingError("its objects have more parts than it has bytes")
        return kind(*arguments)

    def _path(self, *parts: Any) -> Any:
        """Return a path; that of the checkpoint may have one name for many folders."""
        texts = [each for each in parts if isinstance(each, str)]
        if self._has_path or texts != [*parts] or sum(map(len, texts)) > _PATH_MAX:
            return self._make(pathlib.Path, *parts)
        self._has_path = True
        return pathlib.Path(*texts)

    def load(self) -> Any:
        """Return the object in the file, with each MetadataIndex."""
        found = super().load()
        if not self._made:
            return found
        if not (isinstance(found, Metadata) and isinstance(found.storage_data, dict)):
            raise pickle.UnpicklingError("not the metadata of a checkpoint")
        stored = [
            (MetadataIndex(key.fqn, key.offset, key.index), value)
            for key, value in found.storage_data.items()
            if isinstance(key, _Index)
        ]
        if self._made != len(stored) or len(stored) != len(found.storage_data):
            raise pickle.UnpicklingError(
                f"it has {self._made} objects of MetadataIndex, and {len(stored)} of "
                f"{len(found.storage_data)} keys of storage_data are such; {_WAY_OUT}"
            )
        if (most := max(Counter(hash(key) for key, _ in stored).values())) > ALIKE_MAX:
            raise pickle.UnpicklingError(
                f"storage_data has {most} keys with the same hash; {ALIKE_MAX} is the limit"
            )
        found.storage_data = dict(stored)
        return found

    def find_class(self, module: str, name: str) -> Any:
        """Return an allowed class or function; raise UnpicklingError for others."""
        if name in _MADE_OF_PARTS.get(module, ()):
            kind = super().find_class(module, name)
            return lambda *said: self._make(kind, *said)
        if module == "torch":
            found = getattr(torch, name, None)
            if name == "device" or isinstance(found, torch.dtype):
                return found
        elif module == "torch.serialization" and name == "_get_layout":
            # Wrapped, because a pickle could change the function's defaults.
            return lambda layout: torch.serialization._get_layout(layout)
        elif module in _DESCRIBING:
            # Only classes defined in this module; older versions of torch have some of them
            # elsewhere.
            found = getattr(_DESCRIBING[module], name, None)
            if isinstance(found, type) and found.__module__ == module:
                if issubclass(found, enum.Enum):
                    return lambda value: _Member(found, value)
                if found is MetadataIndex:
                    return self._index
                return _sealed(found)  # type: ignore[arg-type]  # of a class
        elif (module, name) == ("torch.distributed.checkpoint.filesystem", "_StorageInfo"):
            return _sealed(filesystem._StorageInfo)
        elif module in ("pathlib", "pathlib._local"):
            if name.endswith("Path"):
                return lambda *parts: self._path(*parts)
        elif module == "builtins" and name in ("slice", "complex"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(
            f"it needs {module}.{name}, which is not part of a checkpoint's description; "
            f"{_WAY_OUT}"
        )


def _open(path: str) -> IO[bytes]:
    folder, name = os.path.split(path)
    try:
        return open_regular(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        # This host may remember that another one had not saved it yet.
        if exists_now(path):
            return open_regular(path)
        # Torch tries the rank's own metadata next, and reports both errors.
        if name != METADATA:
            raise
        words = f"no checkpoint to load; {what_is_in(folder)}"
        raise type(error)(error.errno, words, path) from None


def read_metadata(path: str, *, weights_only: bool) -> Any:
    """Return the metadata of a checkpoint; with `weights_only`, run no code of the file."""
    return read_with_digest(path, weights_only=weights_only)[0]


def read_with_digest(path: str, *, weights_only: bool) -> tuple[Any, str]:
    """Return the metadata of a checkpoint, and a digest of the file's bytes."""
    with _open(path) as file:
        text = file.read()
    try:
        if weights_only:
            require_linear(text, by_fields=True)
            found = _MetadataUnpickler(text).load()
        else:
            found = pickle.loads(text)
    except (pickle.UnpicklingError, ValueError, EOFError) as error:
        raise pickle.UnpicklingError(f"{path}: {why_no_pickle(text, error)}") from None
    if not isinstance(found, Metadata):
        raise pickle.UnpicklingError(f"{path}: not the metadata of a checkpoint")
    return found, hashlib.sha256(text).hexdigest()
