"""List the tensors of a torch.save file, without torch and without running its code."""

import functools
import math
import os
import pickletools
import shlex
import zipfile
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any, NamedTuple

from nvmeio._cli.arguments import CommandError
from nvmeio._cli.terminal import sizes
from nvmeio._files.kinds import TORCH_LEGACY
from nvmeio._tensors.torch_files import (
    Nothing,
    Reader,
    Stored,
    begin_of,
    content_of,
    entries_of,
    storage_itemsize,
    tensor_of,
    unpickled,
)

__all__ = [
    "check_pickle_size",
    "is_torch_file",
    "legacy_contents",
    "loaded",
    "script_or_saved",
]

# The limit for a pickle, whose size grows with the number of tensors.
PICKLE_BYTES_MAX = 256 << 20
DEPTH_MAX = 100

# In a whole module the keys of its attributes, which its state_dict leaves out.
_OF_MODULES = {"_parameters", "_buffers", "_modules"}


def is_torch_file(path: str) -> bool:
    """Return whether a zip archive is one of torch.save or of TorchScript."""
    entries = entries_of(path)
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


def script_or_saved(path: str) -> dict[str, Any]:
    """Return the contents of an archive of torch.save or of TorchScript."""
    entries = entries_of(path)
    # Only TorchScript has this.
    scripted = "constants.pkl" in entries
    with open(path, "rb") as file:

        def place(folder: str) -> Callable[[Stored], int]:
            def found(tensor: Stored) -> int:
                entry = entries[f"{folder}/{tensor.key}"]
                return begin_of(file, entry) + tensor.begin * tensor.itemsize

            return found

        tensors = []
        if scripted:
            content = _unpickled_entry(path, file, entries["constants.pkl"])
            named = {"constants": content} if _has_tensors(content) else {}
            tensors = list(_rows(path, named, place("constants")))
        content = _unpickled_entry(path, file, entries["data.pkl"])
        tensors = [*_rows(path, content, place("data")), *tensors]
    return _contents("TorchScript" if scripted else "torch", content, tensors)


def _contents(kind: str, content: Any, tensors: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what inspect shows; a whole module is named by its class."""
    said = {"class": content.name} if isinstance(content, Kept) and content.name else None
    return {"format": kind, "metadata": said, "tensors": tensors}


def _has_tensors(content: Any) -> bool:
    return next(_walk(content, ""), None) is not None


def _unpickled_entry(path: str, file: IO[bytes], entry: zipfile.ZipInfo) -> Any:
    check_pickle_size(f"{path}: its pickle", entry.file_size)
    try:
        text = content_of(file, entry)
    except ValueError as error:
        raise CommandError(f"{path}: its pickle cannot be read: {error}") from None
    return loaded(text, path, ObjectReader)


def legacy_contents(path: str) -> dict[str, Any] | None:
    """Return the contents of a file as torch.save wrote them before 1.6; None for others.

    Three pickles, of a number and of what wrote the file, come first, then the object, the
    keys of the storages, and each storage after its number of elements.
    """
    with open(path, "rb") as file:
        file.seek(2)
        if file.read(len(TORCH_LEGACY)) != TORCH_LEGACY:
            return None
        file.seek(0)
        for _ in range(3):
            _next(file, path, Reader)
        storages: dict[str, str] = {}

        content = _next(file, path, functools.partial(LegacyReader, storages))
        keys = _next(file, path, Reader)
        places: dict[str, int] = {}
        size = os.fstat(file.fileno()).st_size
        for key in keys if isinstance(keys, list) else ():
            count = int.from_bytes(file.read(8), "little")
            begin = file.tell()
            kind = storages.get(str(key), "")
            end = begin + count * storage_itemsize(kind)
            if end > size or count >= 1 << 63:
                raise CommandError(
                    f"{path}: it was truncated: it has {size} bytes, and the storage "
                    f"{str(key)!r:.80} ends at {end}"
                )
            places[str(key)] = begin
            file.seek(end)

    def place(tensor: Stored) -> int:
        return places[tensor.key] + tensor.begin * tensor.itemsize

    tensors = list(_rows(path, content, place))
    return _contents("torch, before 1.6", content, tensors)


def _next(file: IO[bytes], path: str, reader: Callable[..., Reader]) -> Any:
    """Return what a reader makes of the next pickle of a file, which ends behind it."""
    begin = file.tell()
    # Only as much as a pickle may have, whatever length its own words claim.
    bounded = _Bounded(file, PICKLE_BYTES_MAX)
    try:
        for _ in pickletools.genops(bounded):  # type: ignore[arg-type]
            pass
    except CommandError:
        raise
    except Exception as error:
        raise CommandError(
            f"{path}: it was truncated or is damaged: its pickle cannot be read: {error}"
        ) from None
    size = file.tell() - begin
    file.seek(begin)
    return loaded(file.read(size), path, reader)


class _Bounded:
    """A file of which only some bytes may be read."""

    def __init__(self, file: IO[bytes], left: int) -> None:
        self.file, self.left = file, left

    def read(self, nbytes: int) -> bytes:
        return self._counted(self.file.read(min(nbytes, self.left + 1)))

    def readline(self) -> bytes:
        return self._counted(self.file.readline(self.left + 1))

    def tell(self) -> int:
        return self.file.tell()

    def _counted(self, found: bytes) -> bytes:
        self.left -= len(found)
        if self.left < 0:
            check_pickle_size(f"{self.file.name}: its pickle", PICKLE_BYTES_MAX + 1)
        return found


def check_pickle_size(what: str, nbytes: int) -> None:
    """Raise CommandError if a pickle is too large."""
    if nbytes > PICKLE_BYTES_MAX:
        has, most = sizes(nbytes, PICKLE_BYTES_MAX)
        raise CommandError(f"{what} has {has}; the limit is {most}")


def loaded(text: bytes, path: str, reader: Callable[..., Reader] = Reader) -> Any:
    """Return what a reader makes of the pickle of a file."""
    try:
        return unpickled(text, reader)
    except (OSError, MemoryError):
        raise
    except Exception as error:
        raise CommandError(f"{path}: its pickle cannot be read: {error}") from None


class Kept:
    """Stands for an object of any class, and keeps what its pickle gives it."""

    name = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> "Kept":
        made = super().__new__(cls)
        made.held = [*args, *kwargs.values()]
        return made

    held: list[Any]
    state: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, value: Any) -> None:
        self.held.append(value)

    add = append

    def extend(self, values: Iterable[Any]) -> None:
        self.held.extend(values)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.held.append({key: value})


class Several(NamedTuple):
    """A tensor that consists of others, such as a sparse one."""

    layout: str
    shape: tuple[int, ...]
    parts: tuple[Stored, ...]  # the values last


class ObjectReader(Reader):
    """Finds the tensors in objects of any class, and those of special layouts."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a harmless replacement for a function or class of the pickle."""
        if module in _BUILDING and name in _BUILDERS:
            return _BUILDERS[name]
        if module == "torch.jit._pickle":
            return _first
        found = super().find_class(module, name)
        if found is not Nothing:
            return found
        function = module in (*_BUILDING, "copy_reg", "copyreg")
        return type("Kept", (Kept,), {"name": "" if function else f"{module}.{name}"})


class LegacyReader(ObjectReader):
    """Reads objects of a file of torch before 1.6; collects the kinds of its storages."""

    def __init__(self, storages: dict[str, str], file: IO[bytes], **options: Any) -> None:
        super().__init__(file, **options)
        self.storages = storages

    def persistent_load(self, pid: Any) -> Any:
        """Return the key and the kind of a storage."""
        if pid[0] == "module":
            # An object, after which the text of its class is.
            return pid[1]
        if len(pid) > 5 and pid[5] is not None:
            raise ValueError(
                "its storages are views of others, as torch before 0.4 wrote; load it by "
                "torch and save it anew"
            )
        key, kind = super().persistent_load(pid)
        self.storages[key] = kind
        return key, kind


def _first(value: Any, *rest: Any) -> Any:
    return value


def _quantized(storage: Any, begin: int, shape: Any, strides: Any, *rest: Any) -> Stored:
    """Read a quantized tensor, whose storage has a dtype of its own."""
    return tensor_of(storage, begin, shape, strides)


def _sparse(layout: Any, data: Any) -> Any:
    """Read a sparse tensor: of COO its indices, of others two kinds of them, and values."""
    parts = tuple(each for each in data if isinstance(each, Stored))
    shape = next(
        (each for each in data if isinstance(each, tuple) and not isinstance(each, Stored)),
        (),
    )
    name = layout if isinstance(layout, str) else "sparse"
    return Several(name, tuple(map(int, shape)), parts)


def _nested(values: Any, *rest: Any) -> Any:
    return (
        Several("nested", values.shape, (values,)) if isinstance(values, Stored) else rest
    )


def _meta(dtype: Any, shape: Any, *rest: Any) -> Any:
    return Several(f"{dtype} meta", tuple(map(int, shape)), ())


def _of_type(make: Any, kind: Any, args: Any, state: Any) -> Any:
    """Read a tensor of a subclass."""
    return make(*args)


_BUILDING = ("torch._utils", "torch._tensor", "torch.serialization")
_BUILDERS: dict[str, Any] = {
    # Of torch before 0.4.
    "_rebuild_tensor": tensor_of,
    "_rebuild_qtensor": _quantized,
    "_rebuild_sparse_tensor": _sparse,
    "_rebuild_sparse_csr_tensor": _sparse,
    "_rebuild_nested_tensor": _nested,
    "_rebuild_meta_tensor_no_storage": _meta,
    "_rebuild_device_tensor_from_cpu_tensor": _first,
    "_rebuild_from_type": _first,
    "_rebuild_from_type_v2": _of_type,
    "_get_layout": str,
}


def _rows(
    path: str, content: Any, place: Callable[[Stored], int]
) -> Iterator[dict[str, Any]]:
    """Yield what inspect shows of each tensor."""
    for key, tensor in _walk(content, path):
        parts = tensor.parts if isinstance(tensor, Several) else (tensor,)
        dtype, offset = parts[-1].dtype if parts else "", None
        try:
            for each in parts:
                offset = place(each)
        except (KeyError, ValueError):
            raise CommandError(f"{path}: it lacks the bytes of {key}") from None
        if isinstance(tensor, Several):
            dtype = f"{dtype} {tensor.layout.removeprefix('torch.')}".strip()
        yield {
            "name": key,
            "dtype": dtype,
            "shape": list(tensor.shape),
            "bytes": sum(math.prod(each.shape) * each.itemsize for each in parts),
            "offset": offset,
        }


def _walk(content: Any, file: str) -> Iterator[tuple[str, Stored | Several]]:
    """Yield the tensors of nested containers and objects, each container once."""
    seen: set[int] = set()
    waiting: list[tuple[tuple[str, ...], Any]] = [((), content)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, (Stored, Several)):
            yield "/".join(path), value
        elif isinstance(value, (dict, list, tuple, Kept)) and id(value) not in seen:
            seen.add(id(value))
            if len(path) == DEPTH_MAX:
                raise CommandError(f"{file}: it is nested deeper than {DEPTH_MAX} levels")
            if isinstance(value, Kept):
                # An object's attributes belong to it, so that names are those of its state.
                waiting += [(path, value.held), (path, value.state)]
                continue
            items = value.items() if isinstance(value, dict) else enumerate(value)
            waiting += [(_below(path, key), each) for key, each in items][::-1]


def _below(path: tuple[str, ...], key: Any) -> tuple[str, ...]:
    return path if key in _OF_MODULES else (*path, str(key))
