"""Where in memory arrays and tensors are, and which of them share it."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from nvmeio._tensors.overlapping import Groups, Range, range_of

__all__ = [
    "Place",
    "c_strides",
    "is_array",
    "itemsize_of",
    "place_of",
    "sharing",
    "start_of",
]


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
    by_device: dict[str, list[Range]] = {}
    for index, place in enumerate(places):
        shape, itemsize = tuple(place.value.shape), itemsize_of(place.value)
        found = range_of(index, place.low, itemsize, shape, place.strides)
        by_device.setdefault(place.device, []).append(found)
    joined = Groups(len(places))
    for ranges in by_device.values():
        joined.add(ranges)
    groups: dict[int, list[Place]] = {}
    for index, place in enumerate(places):
        groups.setdefault(joined.root(index), []).append(place)
    yield from groups.values()


def itemsize_of(value: Any) -> int:
    return int(value.itemsize if is_array(value) else value.element_size())


def c_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return the strides of elements in C order, in bytes."""
    strides, step = [], itemsize
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))
