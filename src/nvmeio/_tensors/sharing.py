"""Where in memory arrays and tensors are, and which of them share it."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from nvmeio._memory.strides import in_bytes
from nvmeio._tensors.overlapping import Groups, Range, range_of

__all__ = [
    "Place",
    "is_in_c_order",
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


def start_of(value: Any) -> int:
    """Return the address of the first element."""
    found: int
    if isinstance(value, np.ndarray):
        found = value.__array_interface__["data"][0]
    else:
        found = value.data_ptr()
    return found


def place_of(value: Any, leaf: Any = None) -> Place:
    """Return the range of memory of a leaf's elements."""
    if isinstance(value, np.ndarray):
        device, address, itemsize = "cpu", start_of(value), value.itemsize
        strides, shape = value.strides, value.shape
    else:
        value = value.detach()
        itemsize = value.element_size()
        device, address = str(value.device), start_of(value)
        strides = in_bytes(value.stride(), itemsize)
        shape = tuple(value.shape)
    dense = is_in_c_order(value)
    if 0 in shape or not itemsize:
        return Place(device, address, address, True, strides, value, leaf)
    low, high = address, address + itemsize
    for extent, stride in zip(shape, strides, strict=True):
        if stride < 0:
            low += (extent - 1) * stride
        else:
            high += (extent - 1) * stride
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
    return int(value.itemsize if isinstance(value, np.ndarray) else value.element_size())


def is_in_c_order(value: Any) -> bool:
    """Return whether the memory of an array or a tensor is its elements in C order."""
    if isinstance(value, np.ndarray):
        return bool(value.flags.c_contiguous)
    return bool(value.is_contiguous() and not (value.is_conj() or value.is_neg()))
