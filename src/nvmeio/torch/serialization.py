"""torch.save and torch.load at the speed of the drive; the files are torch's own."""

import contextlib
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from nvmeio._arguments.checks import flag, path_of, whole
from nvmeio._arguments.keywords import suggesting
from nvmeio._arguments.types import Path
from nvmeio._native.file import File
from nvmeio.default import default_handle
from nvmeio.files import cut, new_contents
from nvmeio.torch.streams import Stream

__all__ = ["load", "save"]

_ALIGNMENT_MAX = 1 << 30
# What has no tensors in it.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype)


@suggesting
def save(obj: Any, path: Path, *, storage_alignment: int = 4096, sync: bool = True) -> None:
    """Save an object as torch.save does; the file is replaced as a whole or not at all.

    Parameters
    ----------
    obj : object
        What torch.save takes, such as a state_dict.
    path : str, bytes or os.PathLike
        The file; an ordinary file of torch's, which torch.load reads.
    storage_alignment : int, default 4096
        At multiples of how many bytes the tensors begin in the file, a power of two from
        64 to 2**30: from pages on they need no copy to go straight to the drive.  Versions
        of torch that cannot choose it keep their own.
    sync : bool, default True
        Have the file and its name on the device before this returns.

    Raises
    ------
    OSError
        With errno and path; the old file stays.
    TypeError, ValueError
        An argument is of the wrong type or out of range.
    Exception
        What torch.save raises, of what it cannot pickle; the old file stays.

    Notes
    -----
    As ``nvmeio.write_file`` a file with the old one's mode takes its place when all bytes
    are written and synced.
    """
    sync = flag("sync", sync)
    alignment = whole("storage_alignment", storage_alignment, 64, _ALIGNMENT_MAX)
    if alignment & (alignment - 1):
        raise ValueError(f"storage_alignment is {alignment}; it must be a power of two")
    with new_contents(path_of(path), sync=sync, atomic=True) as file:
        stream = Stream(file, closes=False)
        with _errors_of(stream), _aligned(alignment):
            torch.save(obj, stream)
        stream.flush()
        cut(file, stream.tell())
        default_handle().fsync(file)


@contextlib.contextmanager
def _errors_of(stream: Stream) -> Iterator[None]:
    """Raise what a stream has raised, for which torch may raise something else."""
    try:
        yield
    except Exception:
        if stream.error is not None:
            raise stream.error from None
        raise


def _loaded(file: File, **options: Any) -> Any:
    """Load all of a file by torch itself."""
    stream = Stream(file, closes=False)
    with _errors_of(stream):
        return torch.load(stream, **options)


def _aligned(alignment: int) -> contextlib.AbstractContextManager[Any]:
    """Have torch.save align storages, where it can."""
    try:
        from torch.utils.serialization import config

        config.save.storage_alignment  # noqa: B018
        found: contextlib.AbstractContextManager[Any]
        found = config.patch({"save.storage_alignment": alignment})
    except (ImportError, AttributeError):
        return contextlib.nullcontext()
    return found


@suggesting
def load(
    path: Path,
    *,
    map_location: Any = None,
    weights_only: bool = True,
    names: Collection[str] | None = None,
    out: Mapping[str, torch.Tensor] | None = None,
) -> Any:
    """Load what torch.save, or ``save``, has written.

    Parameters
    ----------
    path : str, bytes or os.PathLike
        The file.
    map_location, weights_only
        As for torch.load.
    names : collection of str, optional
        Of a dict these keys alone; only their tensors' bytes are read, where torch tells
        where these are.
    out : dict of str to torch.Tensor, optional
        Of a dict, tensors that are filled, of the same dtype and shape; then `names` is by
        default what it has.

    Returns
    -------
    object
        What was saved; with `names` or `out` a dict.

    Raises
    ------
    KeyError
        The file has none of a name.
    TypeError, ValueError
        The file has no dict, or a tensor of `out` does not fit: before it is changed.
    OSError
        With errno and path.
    Exception
        What torch.load raises, of what it cannot or must not unpickle.
    """
    weights_only = flag("weights_only", weights_only)
    if isinstance(names, str):
        raise TypeError(f"names is {names!r}; it must be several names, or None")
    with File(path_of(path)) as file:
        options = {"map_location": map_location, "weights_only": weights_only}
        if names is None and out is None:
            return _loaded(file, **options)
        chosen = list(out or ()) if names is None else list(names)
        skeleton = _skeleton(file) if weights_only and map_location is None else None
        if skeleton is None:
            found = _loaded(file, **options)
            return _delivered(_picked(found, chosen), out)
        picked = _picked(skeleton, chosen)
        _check(picked, out)
        return _delivered(_read(file, picked), out)


def _skeleton(file: File) -> Any:
    """Return what a file has, with tensors that only say where their bytes are, or None."""
    try:
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            found = _loaded(file, weights_only=True)
    except Exception:
        # Of an old format, or of a torch without this: it is loaded as ever.
        return None
    fakes = [each for each in _values(found) if isinstance(each, torch.Tensor)]
    known = all(_offset(each) is not None for each in fakes if each.numel())
    plain = all(isinstance(each, (torch.Tensor, *_PLAIN)) for each in _values(found))
    return found if known and plain else None


def _offset(fake: torch.Tensor) -> int | None:
    """Return where in the file the storage of a tensor begins, where torch says so."""
    return getattr(fake.untyped_storage(), "_checkpoint_offset", None)


def _values(found: Any) -> list[Any]:
    return list(found.values()) if isinstance(found, dict) else [found]


def _picked(found: Any, names: list[str]) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise TypeError(f"names and out pick from a dict; the file has a {type(found)}")
    if missing := [name for name in names if name not in found]:
        raise KeyError(f"the file has no {', '.join(map(repr, missing))}")
    return {name: found[name] for name in names}


def _check(found: Mapping[str, Any], out: Mapping[str, torch.Tensor] | None) -> None:
    """Refuse targets that do not fit."""
    for name, target in (out or {}).items():
        if name not in found:
            continue
        value = found[name]
        if not isinstance(value, torch.Tensor) or not isinstance(target, torch.Tensor):
            raise TypeError(f"out[{name!r}]: both must be tensors")
        if (target.dtype, target.shape) != (value.dtype, value.shape):
            raise ValueError(
                f"out[{name!r}] is of {target.dtype} and shape {list(target.shape)}; the "
                f"file has {value.dtype} and {list(value.shape)}"
            )


def _delivered(
    found: dict[str, Any], out: Mapping[str, torch.Tensor] | None
) -> dict[str, Any]:
    """Copy tensors to those of the caller's."""
    _check(found, out)
    for name, target in (out or {}).items():
        if name in found:
            with torch.no_grad():
                target.copy_(found[name])
            found[name] = target
    return found


class _Span(NamedTuple):
    """Bytes of a storage that tensors need."""

    low: int
    high: int


def _read(file: File, picked: dict[str, Any]) -> dict[str, Any]:
    """Read the bytes of tensors, by one submission, and make them."""
    spans: dict[int, _Span] = {}
    for each in picked.values():
        if isinstance(each, torch.Tensor) and each.numel():
            offset, mine = _offset(each) or 0, _span(each)
            other = spans.get(offset, mine)
            spans[offset] = _Span(min(mine.low, other.low), max(mine.high, other.high))
    memory = {
        offset: torch.empty(span.high - span.low, dtype=torch.uint8)
        for offset, span in spans.items()
    }
    items = [(memory[offset], file, offset + spans[offset].low) for offset in spans]
    if items:
        default_handle().read_many(items)
    made: dict[str, Any] = {}
    for name, each in picked.items():
        if not isinstance(each, torch.Tensor):
            made[name] = each
            continue
        if each.numel():
            offset = _offset(each) or 0
            storage = memory[offset].untyped_storage()
            low = spans[offset].low // each.element_size()
            tensor = torch.empty(0, dtype=each.dtype).set_(
                storage, each.storage_offset() - low, each.shape, each.stride()
            )
        else:
            tensor = torch.empty(each.shape, dtype=each.dtype)
        if isinstance(each, torch.nn.Parameter):
            tensor = torch.nn.Parameter(tensor, each.requires_grad)
        made[name] = tensor.requires_grad_(each.requires_grad)
    return made


def _span(fake: torch.Tensor) -> _Span:
    """Return which bytes of its storage a tensor has, in whole multiples of 16."""
    size = fake.element_size()
    reach = sum(
        (extent - 1) * stride
        for extent, stride in zip(fake.shape, fake.stride(), strict=True)
    )
    low = fake.storage_offset() * size
    # Elements of every dtype begin at a multiple of their size.
    return _Span(math.floor(low / 16) * 16, low + (reach + 1) * size)
