"""List the tensors of a torch.save file, without torch and without running its code.

An unpickler that knows tensors reads the pickle, and replaces every other object by one
that does nothing.
"""

import collections
import io
import math
import os
import pickle
import pickletools
import shlex
import zipfile
from collections.abc import Iterator
from typing import Any, NamedTuple

from nvmeio._cli.arguments import CommandError
from nvmeio._cli.terminal import sizes
from nvmeio._files.archives import begin_of, content_of

__all__ = [
    "PICKLE_BYTES_MAX",
    "SIZES",
    "Reader",
    "is_torch_file",
    "loaded",
    "tensors_of",
]

# The limit for a pickle, whose size grows with the number of tensors.
PICKLE_BYTES_MAX = 256 << 20
DEPTH_MAX = 100

# The name of each storage's dtype, and the size of an element.
KINDS = {
    "DoubleStorage": ("float64", 8),
    "FloatStorage": ("float32", 4),
    "HalfStorage": ("float16", 2),
    "BFloat16Storage": ("bfloat16", 2),
    "LongStorage": ("int64", 8),
    "IntStorage": ("int32", 4),
    "BoolStorage": ("bool", 1),
    "ShortStorage": ("int16", 2),
    "CharStorage": ("int8", 1),
    "ByteStorage": ("uint8", 1),
    "ComplexFloatStorage": ("complex64", 8),
    "ComplexDoubleStorage": ("complex128", 16),
}
SIZES = dict(KINDS.values())
SIZES |= {"uint16": 2, "uint32": 4, "uint64": 8, "complex32": 4}


class Found(NamedTuple):
    """A tensor of the file."""

    key: str  # of its storage
    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    begin: int  # in the storage, in elements


class Nothing:
    """Replaces an object of any other class, and does nothing."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass

    def _take(self, *args: object) -> None:
        pass

    append = extend = add = __setitem__ = _take


class Reader(pickle.Unpickler):
    """Finds the tensors of a pickle."""

    def persistent_load(self, pid: Any) -> Any:
        """Return the description of a storage."""
        _, kind, key, *_ = pid
        return str(key), kind

    def find_class(self, module: str, name: str) -> Any:
        """Return a harmless replacement for a function or class of the pickle."""
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if module == "torch._utils" and name in (
            "_rebuild_tensor_v2",
            "_rebuild_tensor_v3",
        ):
            return _tensor
        if module == "torch._utils" and name.startswith("_rebuild_parameter"):
            return _parameter
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and (
            name in KINDS or name in SIZES or name.startswith("float8")
        ):
            return name
        return Nothing


def _tensor(storage: Any, begin: int, shape: Any, stride: Any, *rest: Any) -> Any:
    key, kind = storage
    # If the storage has no type, the dtype is the last argument.
    name = kind if isinstance(kind, str) else next(
        (each for each in rest[::-1] if isinstance(each, str)), ""
    )  # fmt: skip
    dtype, size = KINDS.get(name, (name, SIZES.get(name, 1)))
    if any(each < 0 for each in (begin, *shape)):
        raise ValueError(f"a tensor has the shape {tuple(shape)} and begins at {begin}")
    return Found(key, dtype or "?", size, tuple(map(int, shape)), int(begin))


def _parameter(data: Any, *rest: Any) -> Any:
    return data


def _is_pickle(name: str) -> bool:
    return name.endswith("/data.pkl")


def is_torch_file(path: str) -> bool:
    """Return whether a file is an archive of torch.save."""
    try:
        with zipfile.ZipFile(path) as archive:
            found = [each for each in archive.infolist() if _is_pickle(each.filename)]
            first = min((each.header_offset for each in archive.infolist()), default=0)
    except (OSError, zipfile.BadZipFile):
        return False
    if found and (first > 0 or path.endswith(".distcp")):
        # Zip archives are read from their end, so only the last one would be listed.
        folder = os.path.dirname(path) or "."
        raise CommandError(
            f"{path}: it is a shard of torch.distributed.checkpoint, with an archive of "
            f"torch.save for each value; `nvmeio inspect {shlex.quote(folder)}` lists the "
            "checkpoint"
        )
    return bool(found)


def tensors_of(path: str) -> list[dict[str, Any]]:
    """Return the tensors of a torch.save file, named by their keys from the top down."""
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        (name,) = [each for each in archive.namelist() if _is_pickle(each)][:1]
        info = archive.getinfo(name)
        if info.file_size > PICKLE_BYTES_MAX:
            has, most = sizes(info.file_size, PICKLE_BYTES_MAX)
            raise CommandError(f"{path}: its pickle has {has}; the limit is {most}")
        try:
            text = content_of(file, info)
        except ValueError as error:
            raise CommandError(f"{path}: its pickle cannot be read: {error}") from None
        content = loaded(text, path, Reader)
        folder = name.removesuffix("data.pkl")
        found = []
        for key, tensor in _walk(content, path):
            try:
                begin = begin_of(file, archive.getinfo(f"{folder}data/{tensor.key}"))
            except (KeyError, ValueError):
                raise CommandError(f"{path}: it lacks the bytes of {key}") from None
            found.append(
                {
                    "name": key,
                    "dtype": tensor.dtype,
                    "shape": list(tensor.shape),
                    "bytes": math.prod(tensor.shape) * tensor.itemsize,
                    "offset": begin + tensor.begin * tensor.itemsize,
                }
            )
        return found


def loaded(text: bytes, path: str, reader: type[Reader]) -> Any:
    """Return what a reader makes of the pickle of a file."""
    try:
        _check_opcodes(text)
        return reader(io.BytesIO(text)).load()
    except (OSError, MemoryError):
        raise
    except Exception as error:
        raise CommandError(f"{path}: its pickle cannot be read: {error}") from None


def _check_opcodes(text: bytes) -> None:
    """Refuse memo indices beyond the pickle's size, which would allocate much memory."""
    for opcode, value, _ in pickletools.genops(text):
        remembers = opcode.name in ("PUT", "BINPUT", "LONG_BINPUT")
        if remembers and value is not None and value > len(text):
            raise ValueError(f"it has {len(text)} bytes, and remembers {value} objects")


def _walk(content: Any, file: str) -> Iterator[tuple[str, Found]]:
    """Yield the tensors of nested dicts, lists and tuples, each container once."""
    seen: set[int] = set()
    waiting: list[tuple[tuple[str, ...], Any]] = [((), content)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, Found):
            yield "/".join(path), value
        elif isinstance(value, (dict, list, tuple)) and id(value) not in seen:
            seen.add(id(value))
            if len(path) == DEPTH_MAX:
                raise CommandError(f"{file}: it is nested deeper than {DEPTH_MAX} levels")
            items = value.items() if isinstance(value, dict) else enumerate(value)
            waiting += [((*path, str(key)), each) for key, each in items][::-1]
