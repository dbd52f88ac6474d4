"""Check the names of a load, and the arrays and tensors that it reads into."""

from collections.abc import Hashable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from nvmeio._arguments.checks import shown
from nvmeio._memory.strides import may_overlap
from nvmeio._tensors.dtypes import torch_module
from nvmeio._tensors.memory import content_problem, storage_problem
from nvmeio._tensors.sharing import Place, place_of, sharing, start_of

__all__ = ["Filled", "check_apart", "check_target", "chosen_names"]


def chosen_names(
    names: Iterable[str] | None, out: Mapping[str, Any] | None
) -> list[str] | None:
    """Return the names to load, each once; by default those of `out`, or None for all."""
    if isinstance(names, str) or not isinstance(names, Iterable | None):
        raise TypeError(f"names is {names!r}; it must be an iterable of names, or None")
    if not isinstance(out, Mapping | None):
        raise TypeError(f"out is {shown(out)}; it must be a dict of tensors, or None")
    if names is None:
        return None if out is None else list(out)
    return list(dict.fromkeys(names))


def check_target(
    name: str,
    target: Any,
    by_torch: bool,
    dtype: Any,
    shape: tuple[int, ...],
    source: str = "file",
) -> None:
    """Raise TypeError or ValueError if a tensor or an array cannot be read into a target.

    ``name`` is the target's in the message, ``source`` what has the tensor or array.
    """
    if not isinstance(target, torch_module().Tensor if by_torch else np.ndarray):
        raise TypeError(
            f"{name} is of type {type(target).__qualname__}; the {source} has "
            f"{'a tensor' if by_torch else 'an array'}"
        )
    # First, because a nested tensor has no shape.
    if problem := _problem(target):
        raise ValueError(f"{name} cannot be filled: {problem}")
    if target.dtype != dtype or tuple(target.shape) != tuple(shape):
        raise ValueError(
            f"{name} has the dtype {target.dtype} and shape {list(target.shape)}; the "
            f"{source} has {dtype} and {list(shape)}"
        )


def _problem(target: Any) -> str:
    """Return why a tensor or an array cannot be written to; "" if it can."""
    if isinstance(target, np.ndarray):
        strides, item = target.strides, target.itemsize
        if not target.flags.writeable:
            return "it is read-only; pass a writable array"
    elif problem := content_problem(target) or storage_problem(target):
        return problem
    elif target.is_conj() or target.is_neg():
        words = "it is a conjugate or negative view"
        return f"{words}; pass its resolve_conj() or resolve_neg()"
    else:
        strides, item = target.stride(), 1
    if 0 not in target.shape and may_overlap(target.shape, strides, item):
        return "several of its elements share memory; pass its clone() or copy()"
    return ""


class Filled(NamedTuple):
    """A target, and where its elements are in what is read."""

    name: str  # for the message
    target: Any
    stored: Hashable  # what has the elements
    offset: int  # of the first one, in bytes
    strides: tuple[int, ...]  # in bytes


def check_apart(filled: Iterable[Filled], source: str = "file") -> None:
    """Raise ValueError for targets that share memory, unless the source's do so alike.

    Else each would be filled with a mixture of both.
    """
    places = [place_of(each.target, each) for each in filled]
    for group in sharing([place for place in places if place.low < place.high]):
        apart = {_mapping(place): place.leaf.name for place in group}
        if len(apart) > 1:
            one, other, *_ = apart.values()
            raise ValueError(
                f"{one} and {other} share memory, but not in the {source}, or not alike; "
                "each needs its own"
            )


def _mapping(place: Place) -> Hashable:
    """Return what maps the bytes of the source to those of a target.

    Of the same strides, it is their distance alone.
    """
    shape, filled, start = tuple(place.value.shape), place.leaf, start_of(place.value)
    matter = [axis for axis, extent in enumerate(shape) if extent > 1]
    there, here = ([s[axis] for axis in matter] for s in (filled.strides, place.strides))
    if there == here:
        return filled.stored, start - filled.offset
    return filled.stored, start, filled.offset, shape, tuple(there), tuple(here)
