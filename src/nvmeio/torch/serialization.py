"""``save`` and ``load``: torch's own file format, at the speed of the drive."""

import bisect
import contextlib
import io
import os
import sys
import zipfile
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from nvmeio._arguments.checks import flag, integer, path_of
from nvmeio._arguments.types import Path
from nvmeio._files.descriptors import cut
from nvmeio._files.kinds import HEAD_BYTES, PICKLE, what_begins
from nvmeio._native.file import File
from nvmeio._publish.files import new_contents
from nvmeio._publish.mapped import Map, is_mapped, maps_of, require_copy
from nvmeio._tensors.errors import note
from nvmeio._tensors.memory import content_problem, flat_bytes
from nvmeio._tensors.sharing import place_of
from nvmeio._tensors.targets import Filled, check_apart, check_target, chosen_names
from nvmeio._tensors.torch_files import content_of, entries_of
from nvmeio.default import default_handle
from nvmeio.torch._bits import is_memory, is_plain
from nvmeio.torch._saving import errors_of, saving_with

__all__ = ["load", "save"]

# torch.save calls write() three times for each tensor.  Without a buffer, saving 10,000
# tensors of 4 KiB took a fifth longer (2 cores, ext4, 2026-11-25).  torch.load is no faster
# with one.
_BUFFER_BYTES = 1 << 20
_ALIGNMENT_MAX = 1 << 30
# The most that precedes the bytes of an entry: its header, its name and the padding.
_HEADER_BYTES_MAX = _ALIGNMENT_MAX + (1 << 17)
# Types that contain no tensors.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype)


def save(
    obj: Any,
    path: Path,
    *,
    storage_alignment: int = 4096,
    sync: bool = True,
    atomic: bool = True,
) -> None:
    """Save an object in the format of torch.save; the file is replaced atomically.

    Parameters
    ----------
    obj : object
        Any object that torch.save can save, such as a state_dict.
    path : str, bytes or os.PathLike
        The file to write.  torch.load can read it.
    storage_alignment : int, default 4096
        The alignment of the tensors in the file in bytes, a power of two from 64 to 2**30.
        With 4096 or more, tensors can be read and written directly, without a copy.  With
        many tensors smaller than a page, 64 makes the file smaller.  Versions of torch
        without this option use their own alignment.
    sync : bool, default True
        Return only when the file and its name are on the device.  With False the file is
        synced too, but not its name: a power failure leaves the old file or the new one.
    atomic : bool, default True
        Replace an old file when the new one is complete.  With False it is written in
        place, for file systems that cannot rename files.

    Raises
    ------
    OSError
        Writing failed; has errno and path.  The old file is unchanged.
    MemoryError
        The file is written in place and the data are mapped from it, so they are copied
        first, and there is not enough memory for that.  The file is unchanged.
    TypeError, ValueError
        An argument is of the wrong type or out of range.
    Exception
        torch.save raised it, for example because it cannot pickle an object.  The old file
        is unchanged.

    Notes
    -----
    The new file keeps the mode of the old one.  It gets its name when all bytes are written
    and synced.  ``nvmeio.write_file`` lists the files that are written in place instead.

    Examples
    --------
    >>> import torch
    >>> nvmeio.torch.save({"weight": torch.ones(3), "epoch": 3}, "model.pt")
    >>> nvmeio.torch.load("model.pt", names=["epoch"])
    {'epoch': 3}
    """
    save_to(obj, path, storage_alignment=storage_alignment, sync=sync, atomic=atomic)


def save_to(
    obj: Any,
    path: Path,
    *,
    storage_alignment: int = 4096,
    sync: bool = True,
    atomic: bool = True,
    follow: bool = True,
) -> None:
    """Save an object; with ``follow=False`` replace a symbolic link, not its target."""
    sync, atomic = flag("sync", sync), flag("atomic", atomic)
    alignment = integer("storage_alignment", storage_alignment)
    if not 64 <= alignment <= _ALIGNMENT_MAX or alignment & (alignment - 1):
        raise ValueError(
            f"storage_alignment is {alignment}; it must be a power of two from 64 to "
            f"{_ALIGNMENT_MAX}"
        )
    with new_contents(path_of(path), sync=sync, atomic=atomic, follow=follow) as file:
        # What is mapped from a file that is written in place is copied first.
        copy = _Copy(file) if is_mapped(file) else None
        stream = io.BufferedWriter(file if copy is None else copy, _BUFFER_BYTES)
        with errors_of(stream) as noting, saving_with(storage_alignment=alignment):
            torch.save(obj, noting)
        # Else the stream would close the file.
        stream.detach()
        if copy is not None:
            file.write(copy.getbuffer())
        cut(file, file.tell())
        file.fsync()


class _Copy(io.BytesIO):
    """The new contents of a file, in memory if there is room for them."""

    def __init__(self, file: File) -> None:
        super().__init__()
        self._file = file

    def write(self, data: Any) -> int:
        require_copy(memoryview(data).nbytes, self._file)
        return super().write(data)


def _loaded(file: File, **options: Any) -> Any:
    """Load a whole file with torch.load."""
    with naming_file(file), errors_of(file) as noting:
        # Else torch's option config.load.mmap would count, which needs a path.
        return torch.load(noting, mmap=False, **options)


@contextlib.contextmanager
def naming_file(file: File) -> Iterator[None]:
    """Add to errors of torch which file it is, and of what kind if torch reads no such."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        words = f"while {os.fsdecode(file.path)!r} was loaded"
        first = os.pread(file.fileno(), HEAD_BYTES, 0)
        known = what_begins(first, file.size)
        if known and known != PICKLE and not first.startswith(b"PK"):
            words += f": {known}"
        note(error, words)
        raise


def load(
    path: Path,
    *,
    map_location: Any = None,
    weights_only: bool = True,
    names: Collection[str] | None = None,
    out: Mapping[str, torch.Tensor] | None = None,
) -> Any:
    """Load a file that ``save`` or torch.save has written.

    Parameters
    ----------
    path : str, bytes or os.PathLike
        The file to read.
    map_location : optional
        As for torch.load; by default None.
    weights_only : bool, default True
        As for torch.load.  The default counts as passed, so the environment variable
        ``TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD`` does not change it: pass False here instead.
    names : collection of str, optional
        The keys to load if the file has a dict; by default all, or those of `out`.  Only
        the bytes of their tensors are read, except with `map_location` or
        ``weights_only=False``, and in files that are compressed, of another byte order, of
        TorchScript, or of torch before 1.6.
    out : dict of str to torch.Tensor, optional
        Tensors to read into, of the same dtypes and shapes as in the file.

    Returns
    -------
    object
        The object that was saved; with `names` or `out`, a dict of these keys.

    Raises
    ------
    KeyError
        The file lacks one of the names.
    TypeError, ValueError
        The object in the file is not a dict, or a tensor of `out` does not fit or is not
        in `names`; `out` is unchanged.
    OSError
        Reading failed; has errno and path.
    Exception
        torch.load raised it, for example because it must not unpickle an object.

    Examples
    --------
    >>> import torch
    >>> nvmeio.torch.save({"weight": torch.ones(3), "epoch": 3}, "model.pt")
    >>> nvmeio.torch.load("model.pt")
    {'weight': tensor([1., 1., 1.]), 'epoch': 3}
    """
    weights_only = flag("weights_only", weights_only)
    chosen = chosen_names(names, out)
    with File(path_of(path)) as file:
        options = {"map_location": map_location, "weights_only": weights_only}
        if chosen is None:
            return _loaded(file, **options)
        if left := [name for name in out or () if name not in chosen]:
            raise ValueError(f"out has {left[0]!r}, which is not in names")
        mapped = _mapped(file) if weights_only and map_location is None else None
        if mapped is not None:
            picked = _picked(mapped.found, chosen)
            _check(picked, out)
            if (tensors := _tensors_in(list(picked.values()))) is not None:
                spans = _spans(file, tensors, mapped.records)
                if spans is not None:
                    return _read(file, picked, tensors, spans, out)
        found = _loaded(file, **options)
        return _delivered(_picked(found, chosen), out)


def _reopened(file: File) -> str:
    """Return a path that opens the same file again, even if it was renamed."""
    return f"/proc/self/fd/{file.fileno()}"


def _records_of(file: File) -> list[tuple[int, int]] | None:
    """Return the offset and size of each entry of an archive, sorted.

    Return None if the bytes in the file differ from those in memory, as when compressed.
    """
    try:
        with open(_reopened(file), "rb") as again:
            found = entries_of(again)
            entries = found.values()
            stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
            order = found.get("byteorder")
            written = _default_order() if order is None else content_of(again, order)
            same = written.decode() == sys.byteorder
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError):
        return None
    # Only files of TorchScript have constants.pkl.
    if not (stored and same and "data.pkl" in found and "constants.pkl" not in found):
        return None
    return sorted((entry.header_offset, entry.file_size) for entry in entries)


def _default_order() -> bytes:
    """Return the byte order that torch assumes where a file does not say it."""
    kinds = torch.serialization.LoadEndianness
    said = torch.serialization.get_default_load_endianness()
    return {kinds.BIG: b"big", kinds.NATIVE: sys.byteorder.encode()}.get(said, b"little")


class _Mapped(NamedTuple):
    """The object in a file, with tensors that are mapped but not read."""

    found: Any
    records: list[tuple[int, int]]


def _mapped(file: File) -> _Mapped | None:
    """Map a file; return None if it cannot be, so that torch.load raises any error."""
    records = _records_of(file)
    if records is None:
        return None
    try:
        return _Mapped(torch.load(_reopened(file), weights_only=True, mmap=True), records)
    except Exception:
        return None


def _tensors_in(values: list[Any]) -> list[torch.Tensor] | None:
    """Return the tensors in values, each time they occur; None if one may hide others."""
    found: list[torch.Tensor] = []
    seen: set[int] = set()
    while values:
        value = values.pop()
        if isinstance(value, torch.Tensor):
            if not is_plain(value):
                return None
            found.append(value)
        elif isinstance(value, (dict, list, tuple)):
            if id(value) not in seen:
                seen.add(id(value))
                values.extend(value.values() if isinstance(value, dict) else value)
        elif not isinstance(value, _PLAIN):
            return None
    return found


def _picked(found: Any, names: list[str]) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise TypeError(
            f"names and out need a dict, but the file has a {type(found).__qualname__}"
        )
    if missing := [name for name in names if name not in found]:
        raise KeyError(f"the file has no {', '.join(map(repr, missing))}")
    return {name: found[name] for name in names}


def _check(found: Mapping[str, Any], out: Mapping[str, torch.Tensor] | None) -> None:
    """Raise TypeError or ValueError if a tensor of `out` does not fit."""
    filled = []
    for name, target in (out or {}).items():
        if name not in found:
            continue
        value = found[name]
        if not isinstance(value, torch.Tensor) or not isinstance(target, torch.Tensor):
            raise TypeError(
                f"out[{name!r}] is of type {type(target).__qualname__}, and the file has a "
                f"{type(value).__qualname__}; both must be tensors"
            )
        if value.is_nested:
            # It has no shape to compare.
            raise ValueError(
                f"out[{name!r}] cannot be filled: the tensor in the file is nested"
            )
        check_target(f"out[{name!r}]", target, True, value.dtype, value.shape)
        filled.append(_filled_by(value, f"out[{name!r}]", target))
    check_apart(filled)


def _filled_by(value: torch.Tensor, name: str, target: torch.Tensor) -> Filled:
    """Return where the elements of a target are in the file."""
    if content_problem(value):
        # Such as a sparse tensor: it shares memory with no other.
        return Filled(name, target, id(value), 0, place_of(target).strides)
    size = value.element_size()
    stored = value.untyped_storage().data_ptr(), value.is_conj(), value.is_neg()
    strides = tuple(stride * size for stride in value.stride())
    return Filled(name, target, stored, value.storage_offset() * size, strides)


def _delivered(
    found: dict[str, Any], out: Mapping[str, torch.Tensor] | None
) -> dict[str, Any]:
    """Copy tensors to those of `out`."""
    _check(found, out)
    for name, target in (out or {}).items():
        if name in found:
            with torch.no_grad():
                target.copy_(found[name])
            found[name] = target
    return found


class _Span(NamedTuple):
    """A range of the file's bytes."""

    low: int
    high: int


def _read(
    file: File,
    picked: dict[str, Any],
    tensors: list[torch.Tensor],
    spans: dict[int, _Span],
    out: Mapping[str, torch.Tensor] | None,
) -> dict[str, Any]:
    """Read the bytes of mapped tensors in one submission, into targets or new memory."""
    shared: dict[int, int] = {}
    for each in tensors:
        storage = each.untyped_storage().data_ptr()
        shared[storage] = shared.get(storage, 0) + 1
    items: list[Any] = []
    into: dict[int, torch.Tensor] = {}
    for name, target in (out or {}).items():
        source = picked.get(name)
        if source is None or id(source) not in spans:
            continue
        # What occurs twice needs memory of its own, for the other place.
        alone = shared[source.untyped_storage().data_ptr()] == 1
        if alone and source.is_contiguous() and is_memory(target) and target.numel():
            into[id(source)] = target
            flat = flat_bytes(target.detach())
            items.append((flat, file, spans[id(source)].low))
    memory = _memory({k: span for k, span in spans.items() if k not in into})
    wholes = list(memory)
    items += [(memory[whole], file, whole.low) for whole in wholes]
    if items:
        default_handle().read_many(items)
    for each in tensors:
        if id(each) in into:
            continue
        if id(each) not in spans:
            strides, dtype = each.stride(), each.dtype
            each.data = torch.empty_strided(each.shape, strides, dtype=dtype, device="cpu")
            continue
        span = spans[id(each)]
        whole = wholes[bisect.bisect_right(wholes, (span.low, sys.maxsize)) - 1]
        begin = (span.low - whole.low) // each.element_size()
        # Only the data are replaced: the tensor keeps its class and attributes.
        each.data = torch.empty(0, dtype=each.dtype, device="cpu").set_(
            memory[whole].untyped_storage(), begin, each.shape, each.stride()
        )
    read = {name: into.get(id(value), value) for name, value in picked.items()}
    others = {k: target for k, target in (out or {}).items() if read.get(k) is not target}
    return _delivered(read, others)


def _spans(
    file: File, tensors: list[torch.Tensor], records: list[tuple[int, int]]
) -> dict[int, _Span] | None:
    """Return the range in the file of each tensor that is not empty, by id.

    Return None if a tensor extends beyond its entry; torch.load then raises the error.
    """
    maps = maps_of(file)
    found = {}
    for each in tensors:
        if not each.numel():
            continue
        size = each.element_size()
        reach = sum(
            (extent - 1) * stride
            for extent, stride in zip(each.shape, each.stride(), strict=True)
        )
        low = _offset(maps, each.data_ptr())
        if low is None:
            return None
        high = low + (reach + 1) * size
        index = bisect.bisect_right(records, (low, 0)) - 1
        begin, nbytes = records[index] if index >= 0 else (0, 0)
        after = records[index + 1][0] if index + 1 < len(records) else high
        if high > after or high - begin > nbytes + _HEADER_BYTES_MAX or high - low > nbytes:
            return None
        found[id(each)] = _Span(low, high)
    return found


def _memory(spans: dict[int, _Span]) -> dict[_Span, torch.Tensor]:
    """Return new memory for spans: one tensor for those that overlap."""
    merged: list[_Span] = []
    for span in sorted(set(spans.values())):
        if merged and span.low < merged[-1].high:
            # Tensors that shared memory when they were saved share it again.
            merged[-1] = _Span(merged[-1].low, max(merged[-1].high, span.high))
        else:
            merged.append(span)
    return {
        span: torch.empty(span.high - span.low, dtype=torch.uint8, device="cpu")
        for span in merged
    }


def _offset(maps: list[Map], address: int) -> int | None:
    """Return the offset in the file of an address; None if it is not mapped."""
    for each in maps:
        if each.begin <= address < each.end:
            return each.offset + address - each.begin
    return None
