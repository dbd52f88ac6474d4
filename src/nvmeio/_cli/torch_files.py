"""List the tensors of a torch.save file, without torch and without running its code."""

import contextlib
import functools
import os
import pickletools
import reprlib
import shlex
import zipfile
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any, NamedTuple

from nvmeio._cli.arguments import CommandError
from nvmeio._cli.terminal import sizes
from nvmeio._files.descriptors import open_regular
from nvmeio._files.kinds import HEAD_BYTES, is_torch_legacy, why_no_pickle
from nvmeio._tensors.torch_files import (
    Nothing,
    Reader,
    SavedTensor,
    Storage,
    begin_of,
    by_name_in_folder,
    content_of,
    cut_entries,
    shape_of,
    tensor_of,
    unpickled,
    wrapped,
)

__all__ = [
    "check_pickle_size",
    "in_checkpoint",
    "is_torch_file",
    "legacy_contents",
    "loaded",
    "script_or_saved",
]

# The limit for a pickle, whose size grows with the number of tensors.
PICKLE_BYTES_MAX = 256 << 20
DEPTH_MAX = 100
# Pickles name an object again in two bytes, and a class of Python takes a kilobyte.
TENSORS_MAX = 1_000_000
CLASSES_MAX = 10_000
NAME_CHARS_MAX = 2000

# In a whole module the keys of its attributes, which its state_dict leaves out.
_OF_MODULES = {"_parameters", "_buffers", "_modules"}


def is_torch_file(archive: zipfile.ZipFile) -> bool:
    """Return whether a zip archive is one of torch.save or of TorchScript."""
    return "data.pkl" in by_name_in_folder(archive)


def script_or_saved(path: str, file: IO[bytes], archive: zipfile.ZipFile) -> dict[str, Any]:
    """Return the contents of an archive of torch.save or of TorchScript."""
    entries = by_name_in_folder(archive)
    if min(each.header_offset for each in entries.values()) > 0:
        # Zip archives are read from their end, so only the last one would be listed.
        raise CommandError(in_checkpoint(path))
    problems = [f"{path}: {words}" for words in cut_entries(file, archive)]
    if not entries.keys() & {"version", ".data/version"}:
        problems.append(f"{path}: its record 'version' is missing")

    def rows(folder: str, entry: zipfile.ZipInfo) -> tuple[Any, list[dict[str, Any]]]:
        storages: dict[str, Storage] = {}
        reader = functools.partial(ObjectReader, storages)
        content = _unpickled_entry(path, file, entry, reader)
        places: dict[str, int] = {}
        for key, storage in storages.items():
            name = f"{folder}/{key}"
            found = entries.get(name)
            if found is None:
                problems.append(f"{path}: its record {name!r:.200} is missing")
            elif found.file_size < storage.nbytes:
                problems.append(
                    f"{path}: its record {name!r:.200} was truncated: it has "
                    f"{found.file_size} bytes, and a storage of {storage.nbytes}"
                )
            with contextlib.suppress(ValueError):
                if found is not None:
                    places[key] = begin_of(file, found)
        named = content if folder == "data" else {folder: content}
        return content, list(_rows(path, named, places))

    content, tensors = rows("data", entries["data.pkl"])
    # Only TorchScript has this.
    constants = entries.get("constants.pkl")
    if constants is not None:
        tensors += rows("constants", constants)[1]
    kind = "torch" if constants is None else "TorchScript"
    return _contents(kind, content, tensors, problems)


def in_checkpoint(path: str) -> str:
    """Say that a file is a shard of torch's distributed checkpoint."""
    folder = os.path.dirname(path) or "."
    return (
        f"{path}: it is a shard of torch.distributed.checkpoint, with an archive of "
        f"torch.save for each value; `nvmeio inspect {shlex.quote(folder)}` lists the "
        "checkpoint"
    )


def _contents(
    kind: str, content: Any, tensors: list[dict[str, Any]], problems: list[str]
) -> dict[str, Any]:
    """Return what inspect shows; a whole module is named by its class."""
    said = {"class": content.name} if isinstance(content, Kept) and content.name else None
    return {"format": kind, "metadata": said, "tensors": tensors, "problems": problems}


def _unpickled_entry(
    path: str, file: IO[bytes], entry: zipfile.ZipInfo, reader: Callable[..., Reader]
) -> Any:
    check_pickle_size(f"{path}: its pickle", entry.file_size)
    try:
        text = content_of(file, entry)
    except ValueError as error:
        raise CommandError(f"{path}: its pickle cannot be read: {error}") from None
    return loaded(text, path, reader)


def legacy_contents(path: str) -> dict[str, Any] | None:
    """Return the contents of a file as torch.save wrote them before 1.6; None for others.

    Three pickles, of a number and of what wrote the file, come first, then the object, the
    keys of the storages, and each storage after its number of elements.
    """
    with open_regular(path) as file:
        if not is_torch_legacy(file.read(HEAD_BYTES)):
            return None
        file.seek(0)
        for _ in range(3):
            _next(file, path, Reader)
        storages: dict[str, Storage] = {}
        content = _next(file, path, functools.partial(LegacyReader, storages))
        keys = _next(file, path, Reader)
        places: dict[str, int] = {}
        size = os.fstat(file.fileno()).st_size
        if not isinstance(keys, list) or {*map(str, keys)} != storages.keys():
            raise CommandError(
                f"{path}: it is damaged: its storages are not those that its tensors have"
            )
        for key in map(str, keys):
            storage = storages[key]
            head = file.read(8)
            begin = file.tell()
            end = begin + storage.nbytes
            if len(head) < 8 or end > size:
                raise CommandError(
                    f"{path}: it was truncated: it has {size} bytes, and the storage "
                    f"{key!r:.80} ends at {end}"
                )
            if int.from_bytes(head, "little") != storage.elements:
                raise CommandError(
                    f"{path}: it is damaged: the storage {key!r:.80} has "
                    f"{int.from_bytes(head, 'little')} elements, and its pickle says "
                    f"{storage.elements}"
                )
            places[key] = begin
            file.seek(end)
    return _contents("torch, before 1.6", content, list(_rows(path, content, places)), [])


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
        words = f"its pickle cannot be read: {why_no_pickle(text, error)}"
        raise CommandError(f"{path}: {words}") from None


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
    parts: tuple[SavedTensor, ...]  # the values last


class ObjectReader(Reader):
    """Finds the tensors in objects of any class, and those of special layouts."""

    def __init__(
        self, storages: dict[str, Storage], file: IO[bytes], **options: Any
    ) -> None:
        super().__init__(file, **options)
        # Filled with those that the pickle names.
        self.storages = storages
        self._classes: dict[tuple[str, str], type[Kept]] = {}

    def persistent_load(self, pid: Any) -> Any:
        """Return the description of a storage."""
        found = super().persistent_load(pid)
        known = self.storages.setdefault(found.key, found)
        if found.nbytes > known.nbytes:
            self.storages[found.key] = found
        return found

    def find_class(self, module: str, name: str) -> Any:
        """Return a harmless replacement for a function or class of the pickle."""
        if module in _BUILDING and name in _BUILDERS:
            return wrapped(_BUILDERS[name])
        if module == "torch.jit._pickle":
            return wrapped(_first)
        found = super().find_class(module, name)
        if found is not Nothing:
            return found
        made = self._classes.get((module, name))
        if made is None:
            if len(self._classes) == CLASSES_MAX:
                raise ValueError(f"it names more than {CLASSES_MAX} classes")
            function = module in (*_BUILDING, "copy_reg", "copyreg")
            named = {"name": "" if function else f"{module}.{name}"}
            made = self._classes[module, name] = type("Kept", (Kept,), named)
        return made


class LegacyReader(ObjectReader):
    """Reads objects of a file of torch before 1.6."""

    def persistent_load(self, pid: Any) -> Any:
        """Return the description of a storage, or an object."""
        if pid[0] == "module":
            # An object, after which the text of its class is.
            return pid[1]
        if len(pid) > 5 and pid[5] is not None:
            raise ValueError(
                "its storages are views of others, as torch before 0.4 wrote; load it by "
                "torch and save it anew"
            )
        return super().persistent_load(pid)


def _first(value: Any, *rest: Any) -> Any:
    return value


def _quantized(
    storage: Any, begin: int, shape: Any, strides: Any, *rest: Any
) -> SavedTensor:
    """Read a quantized tensor, whose storage has a dtype of its own."""
    return tensor_of(storage, begin, shape, strides)


def _sparse(layout: Any, data: Any) -> Any:
    """Read a sparse tensor: of COO its indices, of others two kinds of them, and values."""
    parts = tuple(each for each in data if isinstance(each, SavedTensor))
    shape = next(
        (
            each
            for each in data
            if isinstance(each, tuple) and not isinstance(each, SavedTensor)
        ),
        (),
    )
    name = layout if isinstance(layout, str) else "sparse"
    return Several(name, shape_of(shape, 1), parts)


def _nested(values: Any, *rest: Any) -> Any:
    return (
        Several("nested", values.shape, (values,))
        if isinstance(values, SavedTensor)
        else rest
    )


def _alone(storage: Storage) -> Several:
    """Read a storage that no tensor has; one without a dtype has bytes."""
    shape = (storage.elements or 0,)
    kind = storage.kind if isinstance(storage.kind, str) else "ByteStorage"
    whole = tensor_of(storage._replace(kind=kind), 0, shape, (1,))
    return Several("storage", shape, (whole,))


def _meta(dtype: Any, shape: Any, *rest: Any) -> Any:
    return Several(
        f"{dtype if isinstance(dtype, str) else '?'} meta", shape_of(shape, 1), ()
    )


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


def _rows(path: str, content: Any, places: dict[str, int]) -> Iterator[dict[str, Any]]:
    """Yield what inspect shows of each tensor; `places` are the offsets of storages."""
    for number, (key, tensor) in enumerate(_walk(content, path)):
        if number == TENSORS_MAX:
            raise CommandError(f"{path}: it has more than {TENSORS_MAX} tensors")
        parts = tensor.parts if isinstance(tensor, Several) else (tensor,)
        dtype, offset = parts[-1].dtype if parts else "", None
        if parts and (begin := places.get(parts[-1].key)) is not None:
            offset = begin + parts[-1].begin * parts[-1].itemsize
        if isinstance(tensor, Several):
            dtype = f"{dtype} {tensor.layout.removeprefix('torch.')}".strip()
        yield {
            "name": key,
            "dtype": dtype,
            "shape": list(tensor.shape),
            "bytes": sum(each.nbytes for each in parts),
            "offset": offset,
        }


_WALKED = (SavedTensor, Several, Storage, dict, list, tuple, Kept)


def _walk(content: Any, file: str) -> Iterator[tuple[str, SavedTensor | Several]]:
    """Yield the tensors of nested containers and objects, each container once."""
    seen: set[int] = set()
    waiting: list[tuple[tuple[str, ...], Any]] = [((), content)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, Storage):
            value = _alone(value)
        if isinstance(value, (SavedTensor, Several)):
            if sum(map(len, path)) > NAME_CHARS_MAX:
                raise CommandError(
                    f"{file}: a tensor's name has more than {NAME_CHARS_MAX} characters"
                )
            yield "/".join(path), value
        elif isinstance(value, _WALKED) and id(value) not in seen:
            seen.add(id(value))
            if len(path) == DEPTH_MAX:
                raise CommandError(f"{file}: it is nested deeper than {DEPTH_MAX} levels")
            if isinstance(value, Kept):
                # An object's attributes belong to it, so that names are those of its state.
                waiting += [(path, value.held), (path, value.state)]
                continue
            items = value.items() if isinstance(value, dict) else enumerate(value)
            waiting += [
                (_below(path, key), each)
                for key, each in items
                if isinstance(each, _WALKED)
            ][::-1]


def _below(path: tuple[str, ...], key: Any) -> tuple[str, ...]:
    if isinstance(key, str):
        return path if key in _OF_MODULES else (*path, key)
    # A tuple may have the same long text many times.
    return (*path, str(key) if isinstance(key, int) else reprlib.repr(key))
