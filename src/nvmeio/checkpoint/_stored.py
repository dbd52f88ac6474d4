"""Tensors and arrays as a safetensors file has them: which are one, and under which names.

Those that share memory are stored once: the one that covers all the others, if there is
one, else their memory as bytes; the others are views of it.  A view that shares with nobody
in the state is stored as what it has.
"""

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nvmeio._memory.deferred import Deferred
from nvmeio.checkpoint._tree import Leaf, name_of, path_of
from nvmeio.safetensors._dtypes import FORMAT_NAMES, header_shape, numpy_dtype
from nvmeio.safetensors._errors import SafetensorError

__all__ = ["PAIRS", "Stored", "bytes_of", "contents", "store"]

Bytes = npt.NDArray[np.uint8]

# What the format has not, as pairs of what it has.
PAIRS = {"complex128": "F64", "complex32": "F16"}

# It was in numpy itself before 1.25.
_TooHardError = getattr(np, "exceptions", np).TooHardError

# How long numpy may look whether two strided views have an element in common.
_WORK_MAX: Any = 100_000


class Stored(NamedTuple):
    """A tensor of the file."""

    name: str
    dtype: str  # as the header has it
    shape: tuple[int, ...]
    value: Any  # a tensor or an array; its bytes in C order are the file's


class _Place(NamedTuple):
    """Where a leaf lies."""

    device: str
    low: int
    high: int
    dense: bool  # it has every byte between, in C order
    strides: tuple[int, ...]  # in bytes
    leaf: Leaf


def store(leaves: Sequence[Leaf]) -> list[Stored]:
    """Fill the nodes of the tree, and return what is to be written.

    Raises TypeError, with the path, for what cannot be stored.
    """
    here = [leaf for leaf in leaves if not isinstance(leaf.value, Deferred)]
    for leaf in here:
        _check(leaf)
    namer = _Namer()
    found: list[Stored] = []
    places = [_place(leaf) for leaf in here]
    alone = [leaf for leaf in leaves if isinstance(leaf.value, Deferred)]
    alone += [place.leaf for place in places if place.low == place.high]
    for group in _sharing([place for place in places if place.low < place.high]):
        if len(group) == 1 and not _is_expanded(group[0]):
            alone.append(group[0].leaf)
        else:
            found.append(_shared(group, namer))
    found.extend(_alone(leaf, namer) for leaf in alone)
    return found


def _is_expanded(place: _Place) -> bool:
    """Tell whether a leaf has more elements than there are bytes for them."""
    value = place.leaf.value
    return (
        int(np.prod(value.shape, dtype=object)) * _itemsize(value) > place.high - place.low
    )


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray)


def _check(leaf: Leaf) -> None:
    """Refuse what is more, or less, than an array of numbers in memory."""
    value, where = leaf.value, path_of(leaf.path)
    problem = _array_problem(value) if _is_array(value) else _tensor_problem(value)
    if problem:
        raise TypeError(f"{where} cannot be saved: {problem}")


def _array_problem(array: npt.NDArray[Any]) -> str:
    if type(array) not in (np.ndarray, np.memmap):
        return f"it is a {type(array).__qualname__}; pass its np.asarray()"
    if array.dtype.hasobject:
        return f"its elements, {array.dtype}, are or have Python objects"
    return _dtype_problem(array.dtype)


def _dtype_problem(dtype: np.dtype[Any]) -> str:
    """Say why a dtype could not be made again of what a file has of it."""
    if dtype.names is not None:
        try:
            if dtype.names and np.lib.format.dtype_to_descr(dtype):
                return ""
        except ValueError:
            pass
        return f"its dtype, {dtype}, cannot be written down; pass an array of plain fields"
    if dtype.name in FORMAT_NAMES:
        try:
            numpy_dtype(FORMAT_NAMES[dtype.name])
        except (AttributeError, ImportError, TypeError, ValueError, SafetensorError):
            return f"its dtype, {dtype}, is one that arrays are not restored to"
    elif dtype.kind == "V" and dtype.type is not np.void:
        return f"its dtype, {dtype}, is one that no file has"
    return ""


def _tensor_problem(tensor: Any) -> str:
    torch = sys.modules["torch"]
    kind = type(tensor)
    if kind.__name__ == "DTensor":
        return (
            "it is a DTensor, a part of a tensor of several processes; save it by "
            "torch.distributed.checkpoint, or pass its full_tensor()"
        )
    if kind not in (torch.Tensor, torch.nn.Parameter):
        return f"it is a {kind.__module__}.{kind.__qualname__}; pass a plain tensor"
    if torch.nn.parameter.is_lazy(tensor):
        return "it is not initialized yet"
    if tensor.is_nested:
        return "it is nested; pass its values() and offsets()"
    if tensor.layout != torch.strided:
        return f"its layout is {tensor.layout}; pass its to_dense(), or its parts"
    if tensor.is_quantized:
        return f"it is quantized ({tensor.dtype}); pass its int_repr()"
    if tensor.is_meta:
        return "it is on the device meta and has no data"
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in FORMAT_NAMES and name not in PAIRS:
        return f"its dtype, {tensor.dtype}, is one that no file has"
    try:
        nbytes = tensor.untyped_storage().nbytes()
        known = tensor.data_ptr() or not tensor.numel()
    except RuntimeError as error:
        return f"torch says no address of it: {error}"
    extents = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum(
        (extent - 1) * stride for extent, stride in extents
    )
    if tensor.numel() and (not known or (last + 1) * tensor.element_size() > nbytes):
        return f"its storage has {nbytes} bytes, and not its elements: it was freed"
    return ""


def _place(leaf: Leaf) -> _Place:
    """Return the range of memory that a leaf has elements in."""
    value = leaf.value
    if _is_array(value):
        device, address, itemsize = "cpu", _start(value), value.itemsize
        strides, shape = value.strides, value.shape
        dense = value.flags.c_contiguous
    else:
        value = value.detach()
        itemsize = value.element_size()
        device, address = str(value.device), _start(value)
        strides = tuple(stride * itemsize for stride in value.stride())
        shape = tuple(value.shape)
        dense = value.is_contiguous() and not (value.is_conj() or value.is_neg())
    if 0 in shape or not itemsize:
        return _Place(device, address, address, True, strides, leaf)
    reach = [(extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)]
    low = address + sum(each for each in reach if each < 0)
    high = address + sum(each for each in reach if each > 0) + itemsize
    return _Place(device, low, high, dense, strides, leaf)


def _sharing(places: list[_Place]) -> Iterator[list[_Place]]:
    """Part leaves into those that have memory in common."""
    parents = list(range(len(places)))

    def root(index: int) -> int:
        while parents[index] != index:
            parents[index] = parents[parents[index]]
            index = parents[index]
        return index

    order = sorted(range(len(places)), key=lambda i: (places[i].device, places[i].low))
    open_: list[int] = []
    for index in order:
        place = places[index]
        open_ = [
            other
            for other in open_
            if places[other].device == place.device and places[other].high > place.low
        ]
        for other in open_:
            if root(other) != root(index) and _overlap(places[other], place):
                parents[root(other)] = root(index)
        # Of those that are alike to others one is enough.
        if not any(_alike(places[other], place) for other in open_):
            open_.append(index)
    groups: dict[int, list[_Place]] = {}
    for index, place in enumerate(places):
        groups.setdefault(root(index), []).append(place)
    yield from groups.values()


def _alike(one: _Place, other: _Place) -> bool:
    return (one.low, one.high, one.dense) == (other.low, other.high, True)


def _overlap(one: _Place, other: _Place) -> bool:
    """Tell whether two of overlapping ranges have a byte in common."""
    if one.dense and other.dense:
        return True
    try:
        return bool(np.shares_memory(_shadow(one), _shadow(other), max_work=_WORK_MAX))
    except _TooHardError:
        return True


def _shadow(place: _Place) -> npt.NDArray[Any]:
    """Return an array of the same addresses, which nobody reads: they may be a device's."""
    value = place.leaf.value
    # Where they begin is no matter for what they cover.
    strides = tuple(map(abs, place.strides))
    shape, itemsize = tuple(value.shape), _itemsize(value)
    return np.asarray(_Memory(place.low, shape, f"|V{itemsize}", value, strides))


def _itemsize(value: Any) -> int:
    return int(value.itemsize if _is_array(value) else value.element_size())


def _shared(group: list[_Place], namer: "_Namer") -> Stored:
    """Store memory once, for several leaves."""
    low, high = min(each.low for each in group), max(each.high for each in group)
    whole = next(
        (each for each in group if each.dense and (each.low, each.high) == (low, high)),
        None,
    )
    if whole is not None and all(_is_at_a_multiple(each.leaf, low) for each in group):
        stored = _alone(whole.leaf, namer)
    else:
        whole = None
        low = _aligned(low, group)
        name = namer(group[0].leaf.path, "memory")
        value = _bytes_between(group[0], low, high)
        stored = Stored(name, "U8", (high - low,), value)
    for each in group:
        if each is whole:
            continue
        _describe(each.leaf, stored.name)
        node, value = each.leaf.node, each.leaf.value
        if whole is not None and _same(each, whole):
            for word in ("dtype", "shape"):
                if word in whole.leaf.node:
                    node[word] = whole.leaf.node[word]
            continue
        strides = list(each.strides)
        node["view"] = {"offset": _start(value) - low, "strides": strides}
        _name_dtype(node, value)
        node["shape"] = list(value.shape)
        lazy = () if _is_array(value) else ("conj", "neg")
        for word in lazy:
            if getattr(value, f"is_{word}")():
                node["view"][word] = True
    return stored


def _start(value: Any) -> int:
    """Return the address of the first element."""
    found: int
    found = value.__array_interface__["data"][0] if _is_array(value) else value.data_ptr()
    return found


def _is_at_a_multiple(leaf: Leaf, low: int) -> bool:
    """Tell whether torch can see a leaf in memory that begins there, if it is torch's."""
    value = leaf.value
    return _is_array(value) or (_start(value) - low) % _itemsize(value) == 0


def _aligned(low: int, group: list[_Place]) -> int:
    """Return where memory begins so that torch can see each leaf in it again.

    Torch takes no elements at other places than multiples of their size.
    """
    tensors = [each.leaf for each in group if not _is_array(each.leaf.value)]
    if not tensors:
        return low
    largest = max(tensors, key=lambda leaf: _itemsize(leaf.value))
    # In the same page at the latest, which is there.
    found = low - (low - _start(largest.value)) % _itemsize(largest.value)
    for leaf in tensors:
        if found // 4096 != low // 4096 or not _is_at_a_multiple(leaf, found):
            raise TypeError(
                f"{path_of(leaf.path)} cannot be saved: it shares memory with another "
                "tensor or array at an odd distance; pass its clone()"
            )
    return found


def _same(one: _Place, other: _Place) -> bool:
    """Tell whether two are of the same elements."""
    first, second = one.leaf.value, other.leaf.value
    return (
        one.dense
        and (one.low, one.high) == (other.low, other.high)
        and tuple(first.shape) == tuple(second.shape)
        and _dtype_name(first) == _dtype_name(second)
    )


def _dtype_name(value: Any) -> str:
    """Return what numpy and torch alike call a dtype, or what numpy alone does."""
    if not _is_array(value):
        return str(value.dtype).removeprefix("torch.")
    name: str = value.dtype.name
    known = name in FORMAT_NAMES or name in PAIRS
    return name if known and value.dtype.isnative else value.dtype.str


def _bytes_between(place: _Place, low: int, high: int) -> Any:
    """Return memory as bytes; a leaf has hold of it."""
    value = place.leaf.value
    if place.device == "cpu":
        # Several storages of torch may be of one array.
        return np.asarray(_Memory(low, (high - low,), "|u1", value))
    torch = sys.modules["torch"]
    storage = value.detach().untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device=value.device).set_(storage)
    begin = low - storage.data_ptr()
    return flat[begin : begin + high - low]


class _Memory:
    """Memory as numpy sees it; it has hold of what has it."""

    def __init__(
        self,
        address: int,
        shape: tuple[int, ...],
        elements: str,
        owner: Any,
        strides: tuple[int, ...] | None = None,
    ) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "data": (address, True),
            "typestr": elements,
            "shape": shape,
            "strides": strides,
        }


def _alone(leaf: Leaf, namer: "_Namer") -> Stored:
    """Store a leaf as a tensor of its own."""
    _describe(leaf, namer(leaf.path))
    value, node = leaf.value, leaf.node
    name, shape = _dtype_name(value), tuple(value.shape)
    if name in FORMAT_NAMES and not (name.startswith("float4") and not shape):
        dtype = FORMAT_NAMES[name]
        return Stored(_key(node), dtype, header_shape(dtype, shape), value)
    _name_dtype(node, value)
    if name in PAIRS:
        return Stored(_key(node), PAIRS[name], (*shape, 2), value)
    node["shape"] = list(shape)
    return Stored(_key(node), "U8", (value.nbytes,), value)


def _key(node: dict[str, Any]) -> str:
    name: str = node.get("tensor") or node["array"]
    return name


def _name_dtype(node: dict[str, Any], value: Any) -> None:
    """Say what the elements are, which the file does not."""
    if _is_array(value) and value.dtype.names is not None:
        node["dtype"] = np.lib.format.dtype_to_descr(value.dtype)
    else:
        node["dtype"] = _dtype_name(value)


def _describe(leaf: Leaf, name: str) -> None:
    """Say which tensor of the file a leaf is, and what a file does not say of it."""
    node, value = leaf.node, leaf.value
    if _is_array(value):
        node["array"] = name
        return
    node["tensor"] = name
    if isinstance(value, Deferred):
        return
    torch = sys.modules["torch"]
    if isinstance(value, torch.nn.Parameter):
        node["parameter"] = True
    if value.requires_grad:
        node["requires_grad"] = True
    if value.device.type != "cpu":
        node["device"] = str(value.device)


class _Namer:
    """Names tensors by their paths, each once."""

    def __init__(self) -> None:
        self.taken: set[str] = set()

    def __call__(self, path: Sequence[Any], suffix: str = "") -> str:
        name = name_of(path) or "state"
        if suffix:
            name += f"~{suffix}"
        # A str and an int may look alike, and the format keeps a name for itself.
        unique, count = name, 1
        while unique in self.taken or unique == "__metadata__":
            count += 1
            unique = f"{name}~{count}"
        self.taken.add(unique)
        return unique


def contents(stored: Stored) -> Callable[[], Bytes]:
    """Return what gives a tensor's bytes when it is its turn."""
    return functools.partial(bytes_of, stored.value)


def bytes_of(value: Any) -> Bytes:
    """Return the bytes of a tensor or an array, in C order."""
    if isinstance(value, Deferred):
        value = value.load()
    if _is_array(value):
        flat = np.ascontiguousarray(value).reshape(-1)
        return flat.view(np.uint8) if flat.nbytes else np.empty(0, np.uint8)
    from nvmeio.safetensors.torch import _bytes_of

    return _bytes_of(value)
