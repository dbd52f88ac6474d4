"""Decide which tensors of a safetensors file store the tensors and arrays of a state.

Those that share memory are stored once.  If one of them covers all the others, it is
stored, and the others become views of it.  If all are the same elements, these are stored
without what is between them.  Else their memory is stored as bytes, and all become views of
that.  A view that shares memory with no other part of the state is stored alone, with only
its own elements, in C order; its node has its strides if they are others.
"""

import json
import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nvmeio._memory.deferred import Deferred
from nvmeio._memory.strides import c_strides, in_bytes
from nvmeio._tensors.dtypes import FORMAT_NAMES, header_shape, numpy_dtype
from nvmeio._tensors.errors import SafetensorError
from nvmeio._tensors.memory import content_problem, moved_problem, storage_problem
from nvmeio._tensors.overlapping import MemoryAt
from nvmeio._tensors.sharing import (
    Place,
    itemsize_of,
    place_of,
    sharing,
    start_of,
)
from nvmeio.checkpoint._tree import Leaf, has_text, name_of, path_of

__all__ = ["PAIRS", "Stored", "store", "structured"]

# Dtypes that the format lacks, stored as pairs of these.
PAIRS = {"complex128": "F64", "complex32": "F16"}


class Stored(NamedTuple):
    """A tensor of the file."""

    name: str
    dtype: str  # as the header has it
    shape: tuple[int, ...]
    value: Any  # a tensor or an array; its bytes in C order are the file's
    # Of each storage or array that owns the memory, the place that reaches furthest.
    places: tuple[Place, ...] = ()

    def check_memory(self) -> None:
        """Raise RuntimeError if the memory of the value was freed or moved meanwhile."""
        for place in self.places:
            if problem := moved_problem(place):
                raise RuntimeError(
                    f"the memory of {path_of(place.leaf.path)} was changed while it was "
                    f"being saved: {problem}; wait for the future's `staged`, or pass "
                    "stage=True"
                )


def store(leaves: Sequence[Leaf]) -> list[Stored]:
    """Fill the nodes of the tree, and return the tensors to write.

    Raise TypeError, with the path, for a tensor or array that cannot be stored.
    """
    here = [leaf for leaf in leaves if not isinstance(leaf.value, Deferred)]
    for leaf in here:
        _check(leaf)
    namer = _Namer()
    found: list[Stored] = []
    places = [place_of(leaf.value, leaf) for leaf in here]
    alone = [leaf for leaf in leaves if isinstance(leaf.value, Deferred)]
    alone += [place.leaf for place in places if place.low == place.high]
    for group in sharing([place for place in places if place.low < place.high]):
        if len(group) == 1 and not _is_expanded(group[0]):
            alone.append(group[0].leaf)
        elif _nbytes(group[0]) < group[0].high - group[0].low and _are_one(group):
            found.append(_tied(group, namer))
        else:
            found.append(_shared(group, namer))
    found.extend(_alone(leaf, namer) for leaf in alone)
    return found


def _is_expanded(place: Place) -> bool:
    """Return whether several elements of a leaf share memory."""
    return _nbytes(place) > place.high - place.low


def _nbytes(place: Place) -> int:
    count: int = math.prod(place.value.shape)
    return count * itemsize_of(place.value)


def _are_one(group: list[Place]) -> bool:
    """Return whether all leaves are the same elements, with the same shape and dtype."""
    found = {
        (each.low, each.strides, tuple(value.shape), _dtype_of(value), *_lazy(value))
        for each in group
        for value in [each.value]
    }
    return len(found) == 1


def _tied(group: list[Place], namer: "_Namer") -> Stored:
    """Store the elements that all leaves have, in their order in memory."""
    leaf, value = group[0].leaf, group[0].value
    shape = tuple(value.shape)
    strides = _dense_strides(value) or c_strides(shape, itemsize_of(value))
    order = sorted(range(len(shape)), key=lambda axis: -strides[axis])
    turned = (
        value.transpose(order) if isinstance(value, np.ndarray) else value.permute(order)
    )
    stored = _alone(leaf._replace(value=turned, node={}), namer)
    for each in group:
        _describe(each.leaf, stored.name)
        _describe_view(each, 0, strides)
    return stored._replace(places=_furthest(group))


def _check(leaf: Leaf) -> None:
    """Raise TypeError for a leaf that is not a plain tensor or array in memory."""
    value, where = leaf.value, path_of(leaf.path)
    problem = (
        _array_problem(value) if isinstance(value, np.ndarray) else _tensor_problem(value)
    )
    if problem:
        raise TypeError(f"{where} cannot be saved: {problem}")


def _array_problem(array: npt.NDArray[Any]) -> str:
    if type(array) not in (np.ndarray, np.memmap):
        if isinstance(array, np.ma.MaskedArray):
            return "it is masked, and its mask would be lost; pass its data and its mask"
        return f"it is a {type(array).__qualname__}; pass its np.asarray()"
    if array.dtype.hasobject:
        return f"its dtype, {array.dtype}, has Python objects; pass an array of numbers"
    return _dtype_problem(array.dtype)


def _dtype_problem(dtype: np.dtype[Any]) -> str:
    """Return why a dtype could not be restored from a file; "" if it could."""
    if dtype.names is not None:
        try:
            said = json.loads(json.dumps(np.lib.format.dtype_to_descr(dtype)))
            # A field of an extension's dtype, or of a name that JSON changes, is not.
            if dtype.names and structured(said) == dtype:
                return ""
        except (LookupError, SyntaxError, TypeError, ValueError):
            pass
        return f"its dtype, {dtype}, cannot be stored; pass an array with plain fields"
    if dtype.name in FORMAT_NAMES:
        try:
            numpy_dtype(FORMAT_NAMES[dtype.name])
        except (AttributeError, ImportError, TypeError, ValueError, SafetensorError):
            return f"its dtype, {dtype}, cannot be restored as an array"
    elif not has_text(dtype):
        return f"its dtype, {dtype}, is not one of safetensors"
    return ""


def structured(said: Any) -> np.dtype[Any]:
    """Return a structured dtype; in JSON its tuples have become lists."""

    def tuples(value: Any) -> Any:
        if isinstance(value, str):
            return value
        # A list of fields stays a list.  All else is a tuple: a field, a title and name, or
        # a shape.
        if value and isinstance(value[0], list) and isinstance(value[0][0], (str, list)):
            return [tuple(map(tuples, field)) for field in value]
        return tuple(each if isinstance(each, int) else tuples(each) for each in value)

    if not isinstance(said, list):
        raise TypeError
    dtype: np.dtype[Any] = np.lib.format.descr_to_dtype(tuples(said))
    return dtype


def _tensor_problem(tensor: Any) -> str:
    torch = sys.modules["torch"]
    kind = type(tensor)
    if kind.__name__ == "DTensor":
        return (
            "it is a DTensor, which is distributed over several processes; save it with "
            "torch.distributed.checkpoint, or pass its full_tensor()"
        )
    if kind not in (torch.Tensor, torch.nn.Parameter):
        if torch.nn.parameter.is_lazy(tensor):
            return content_problem(tensor)
        return f"it is a {kind.__module__}.{kind.__qualname__}; pass a plain tensor"
    if problem := content_problem(tensor):
        return problem
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in FORMAT_NAMES and name not in PAIRS:
        return f"its dtype, {tensor.dtype}, is not one of safetensors"
    return storage_problem(tensor)


def _shared(group: list[Place], namer: "_Namer") -> Stored:
    """Store the memory of several leaves once."""
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
    stored = stored._replace(places=_furthest(group))
    for each in group:
        if each is whole:
            continue
        _describe(each.leaf, stored.name)
        node, value = each.leaf.node, each.value
        if whole is not None and _same(each, whole):
            for word in ("dtype", "shape"):
                if word in whole.leaf.node:
                    node[word] = whole.leaf.node[word]
            if strides := _dense_strides(value):
                node["strides"] = list(strides)
            continue
        _describe_view(each, start_of(value) - low, each.strides)
        for word in _lazy(value):
            node["view"][word] = True
    return stored


def _lazy(value: Any) -> list[str]:
    words = () if isinstance(value, np.ndarray) else ("conj", "neg")
    return [word for word in words if getattr(value, f"is_{word}")()]


def _describe_view(place: Place, offset: int, strides: Sequence[int]) -> None:
    node = place.leaf.node
    node["view"] = {"offset": offset, "strides": list(strides)}
    _name_dtype(node, place.value)
    node["shape"] = list(place.value.shape)


def _furthest(group: list[Place]) -> tuple[Place, ...]:
    """Return the place that reaches furthest of each storage or array that owns memory."""
    found: dict[Any, Place] = {}
    for place in sorted(group, key=lambda place: place.high):
        if isinstance(place.value, np.ndarray):
            found[id(place.value if place.value.base is None else place.value.base)] = place
        else:
            found[place.value.untyped_storage()._cdata, "tensor"] = place
    return tuple(found.values())


def _is_at_a_multiple(leaf: Leaf, low: int) -> bool:
    """Return whether a leaf's offset from `low` is one that its framework allows."""
    value = leaf.value
    return (
        isinstance(value, np.ndarray) or (start_of(value) - low) % itemsize_of(value) == 0
    )


def _aligned(low: int, group: list[Place]) -> int:
    """Return an address, `low` or less, at which the stored memory is to begin.

    Each tensor must have an offset from it that is a multiple of its element size, because
    torch supports no others.
    """
    tensors = [each.leaf for each in group if not isinstance(each.value, np.ndarray)]
    if not tensors:
        return low
    largest = max(tensors, key=lambda leaf: itemsize_of(leaf.value))
    # It must be in the page of `low`, because the page before may not be mapped.
    found = low - (low - start_of(largest.value)) % itemsize_of(largest.value)
    for leaf in tensors:
        if found // 4096 != low // 4096 or not _is_at_a_multiple(leaf, found):
            raise TypeError(
                f"{path_of(leaf.path)} cannot be saved: it shares memory with another "
                "tensor or array, at a distance that is no multiple of its element size; "
                "pass its clone()"
            )
    return found


def _same(one: Place, other: Place) -> bool:
    """Return whether two leaves are the same elements, with the same shape and dtype."""
    first, second = one.value, other.value
    return (
        one.dense
        and (one.low, one.high) == (other.low, other.high)
        and tuple(first.shape) == tuple(second.shape)
        and _dtype_of(first) == _dtype_of(second)
    )


def _dtype_of(value: Any) -> Any:
    """Return the name of a dtype that numpy and torch share, else numpy's dtype."""
    if not isinstance(value, np.ndarray):
        return str(value.dtype).removeprefix("torch.")
    name = value.dtype.name
    known = name in FORMAT_NAMES or name in PAIRS
    return name if known and value.dtype.isnative else value.dtype


def _dtype_name(value: Any) -> str:
    """Return the name of a dtype, or numpy's text, which others may have as well."""
    dtype = _dtype_of(value)
    return dtype if isinstance(dtype, str) else str(dtype.str)


def _bytes_between(place: Place, low: int, high: int) -> Any:
    """Return memory as an array or a tensor of bytes that keeps its owner alive."""
    value = place.value
    if place.device == "cpu":
        # By address, because the leaves may be several torch storages over one array.
        return np.asarray(MemoryAt(low, (high - low,), "|u1", value))
    torch = sys.modules["torch"]
    storage = value.detach().untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device=value.device).set_(storage)
    begin = low - storage.data_ptr()
    return flat[begin : begin + high - low]


def _alone(leaf: Leaf, namer: "_Namer") -> Stored:
    """Store a leaf as a tensor of its own."""
    _describe(leaf, namer(leaf.path))
    value, node, places = leaf.value, leaf.node, tuple[Place, ...]()
    strides = _dense_strides(value)
    if not isinstance(value, Deferred):
        places = (place_of(value, leaf),)
        # Of a tensor, another one that keeps its storage, whatever set_() or data= do.
        value = places[0].value
    if strides:
        node["strides"] = list(strides)
    name, shape = _dtype_name(value), tuple(value.shape)
    if name in FORMAT_NAMES and not (name.startswith("float4") and not shape):
        dtype = FORMAT_NAMES[name]
        return Stored(_key(node), dtype, header_shape(dtype, shape), value, places)
    _name_dtype(node, value)
    if name in PAIRS:
        return Stored(_key(node), PAIRS[name], (*shape, 2), value, places)
    node["shape"] = list(shape)
    return Stored(_key(node), "U8", (value.nbytes,), value, places)


def _dense_strides(value: Any) -> tuple[int, ...]:
    """Return the strides, in bytes, of a dense copy; () if those are of C order."""
    shape, itemsize = tuple(value.shape), itemsize_of(value)
    if 0 in shape or not itemsize:
        return ()
    if isinstance(value, np.ndarray):
        if value.flags.c_contiguous:
            return ()
        strides: tuple[int, ...] = np.empty_like(value, order="K", subok=False).strides
        return strides
    # Compared exactly: an extent of 1 alone can make a tensor channels_last, or choose the
    # order in which a product is summed.
    found: tuple[int, ...] = value.stride()
    if found == (ordered := c_strides(shape)):
        return ()
    if not isinstance(value, Deferred):
        # On the meta device, which needs no memory.
        found = sys.modules["torch"].empty_like(value, device="meta").stride()
    return () if found == ordered else in_bytes(found, itemsize)


def _key(node: dict[str, Any]) -> str:
    name: str = node.get("tensor") or node["array"]
    return name


def _name_dtype(node: dict[str, Any], value: Any) -> None:
    """Add the dtype to a node, where the header has another one."""
    if isinstance(value, np.ndarray) and value.dtype.names is not None:
        node["dtype"] = np.lib.format.dtype_to_descr(value.dtype)
    else:
        node["dtype"] = _dtype_name(value)


def _describe(leaf: Leaf, name: str) -> None:
    """Fill a node with its stored tensor's name, and with flags that the header lacks."""
    node, value = leaf.node, leaf.value
    if isinstance(value, np.ndarray):
        node["array"] = name
        return
    node["tensor"] = name
    if isinstance(value, Deferred):
        return
    torch = sys.modules["torch"]
    if isinstance(value, torch.nn.Parameter):
        node["parameter"] = True
    # torch marks a Buffer, whose class is Tensor.
    if getattr(value, "_is_buffer", False):
        node["buffer"] = True
        if not getattr(value, "persistent", True):
            node["transient"] = True
    if value.requires_grad:
        node["requires_grad"] = True
    if value.device.type != "cpu":
        node["device"] = str(value.device)


class _Namer:
    """Returns a unique name for each path."""

    def __init__(self) -> None:
        self.taken: set[str] = set()

    def __call__(self, path: Sequence[Any], suffix: str = "") -> str:
        name = name_of(path) or "state"
        if suffix:
            name += f"~{suffix}"
        # Keys such as "1" and 1 give the same name, and the format reserves __metadata__.
        unique, count = name, 1
        while unique in self.taken or unique == "__metadata__":
            count += 1
            unique = f"{name}~{count}"
        self.taken.add(unique)
        return unique
