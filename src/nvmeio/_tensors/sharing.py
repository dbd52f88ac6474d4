"""Where in memory arrays and tensors are, and which of them share it."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = [
    "MemoryAt",
    "Place",
    "c_strides",
    "is_array",
    "itemsize_of",
    "place_of",
    "sharing",
    "start_of",
]

# Before numpy 1.25 it is in numpy itself.
_TooHardError = getattr(np, "exceptions", np).TooHardError

# The limit of numpy's search for an element that two strided views share.
_WORK_MAX: Any = 100_000


class Place(NamedTuple):
    """The memory of a leaf."""

    device: str
    low: int
    high: int
    dense: bool  # covers every byte from low to high, in C order
    strides: tuple[int, ...]  # in bytes
    value: Any
    leaf: Any  # whose memory it is, for the caller


def is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray)


def start_of(value: Any) -> int:
    """Return the address of the first element."""
    found: int
    found = value.__array_interface__["data"][0] if is_array(value) else value.data_ptr()
    return found


def place_of(value: Any, leaf: Any = None) -> Place:
    """Return the range of memory of a leaf's elements."""
    if is_array(value):
        device, address, itemsize = "cpu", start_of(value), value.itemsize
        strides, shape = value.strides, value.shape
        dense = value.flags.c_contiguous
    else:
        value = value.detach()
        itemsize = value.element_size()
        device, address = str(value.device), start_of(value)
        strides = tuple(stride * itemsize for stride in value.stride())
        shape = tuple(value.shape)
        dense = value.is_contiguous() and not (value.is_conj() or value.is_neg())
    if 0 in shape or not itemsize:
        return Place(device, address, address, True, strides, value, leaf)
    reach = [(extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)]
    low = address + sum(each for each in reach if each < 0)
    high = address + sum(each for each in reach if each > 0) + itemsize
    return Place(device, low, high, dense, strides, value, leaf)


def sharing(places: list[Place]) -> Iterator[list[Place]]:
    """Yield groups of leaves that share memory, directly or through others."""
    parents = list(range(len(places)))

    def root(index: int) -> int:
        while parents[index] != index:
            parents[index] = parents[parents[index]]
            index = parents[index]
        return index

    def join(index: int, near: list[int]) -> None:
        """Join a leaf with those that share its memory; forget those that ended before."""
        place = places[index]
        near[:] = [
            other
            for other in near
            if places[other].device == place.device and places[other].high > place.low
        ]
        for other in near:
            if root(other) != root(index) and overlap(places[other], place):
                parents[root(other)] = root(index)

    # Of each lattice the leaves whose range is not over, by where they are in its period.
    open_: dict[tuple[int, ...], dict[int, list[int]]] = {}
    order = sorted(range(len(places)), key=lambda i: (places[i].device, places[i].low))
    for index in order:
        lattice, residue = _lattice_of(places[index])
        for other, by_residue in open_.items():
            # Other columns of the same matrix share nothing.
            residues = [residue] if other == lattice else [*by_residue]
            for each in residues:
                join(index, by_residue.get(each, []))
        near = open_.setdefault(lattice, {}).setdefault(residue, [])
        # Among dense leaves of the same range, one is enough to compare others with.
        if not any(_alike(places[other], places[index]) for other in near):
            near.append(index)
    groups: dict[int, list[Place]] = {}
    for index, place in enumerate(places):
        groups.setdefault(root(index), []).append(place)
    yield from groups.values()


def _lattice_of(place: Place) -> tuple[tuple[int, ...], int]:
    """Return what divides all distances of a leaf's elements, and where in it they are.

    Leaves of the same lattice at different places share no byte.
    """
    pairs = zip(place.value.shape, place.strides, strict=True)
    period = math.gcd(*(abs(stride) for extent, stride in pairs if extent > 1))
    size = itemsize_of(place.value)
    if not period or period % size:
        return (), 0
    return (period, size, place.low % size), place.low % period


def _alike(one: Place, other: Place) -> bool:
    return (one.low, one.high, one.dense) == (other.low, other.high, True)


def overlap(one: Place, other: Place) -> bool:
    """Return whether two leaves with overlapping ranges share a byte."""
    if one.dense and other.dense:
        return True
    try:
        return bool(np.shares_memory(_shadow(one), _shadow(other), max_work=_WORK_MAX))
    except _TooHardError:
        return True


def _shadow(place: Place) -> npt.NDArray[Any]:
    """Return an array of the same addresses; do not read it: it may be device memory."""
    value = place.value
    # Reversing a dimension does not change which bytes are covered.
    strides = tuple(map(abs, place.strides))
    shape, itemsize = tuple(value.shape), itemsize_of(value)
    return np.asarray(MemoryAt(place.low, shape, f"|V{itemsize}", value, strides))


def itemsize_of(value: Any) -> int:
    return int(value.itemsize if is_array(value) else value.element_size())


def c_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return the strides of elements in C order, in bytes."""
    strides, step = [], itemsize
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


class MemoryAt:
    """Memory at an address, as numpy's array interface, which keeps its owner alive."""

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
