"""Which requests in flight touch the same bytes: for handles with check_overlap.

They are compared over all handles of the process that check.  What is compared are single
bytes, not blocks, so records side by side do not overlap.
"""

import itertools
import threading
import weakref
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from nvmeio._events.forks import call_in_child

__all__ = ["OVERLAPS", "elements_of", "footprint_of"]

Integers = npt.NDArray[np.int64]
Part = tuple[Any, Any, Any, Any, Any, Any]


class Request(Protocol):
    """What is compared."""

    @property
    def _workers(self) -> object: ...

    def _is_over(self) -> bool: ...


class Spans:
    """Ranges of bytes, sorted by where they begin."""

    def __init__(self, starts: Any, sizes: Any) -> None:
        begins: Integers = np.asarray(starts, np.int64)
        ends = begins + sizes
        filled = np.flatnonzero(ends > begins)
        # Of each range, its place as passed.
        self.order = filled[np.argsort(begins[filled], kind="stable")]
        self.starts, self.ends = begins[self.order], ends[self.order]
        # How far those reach that do not begin behind each.
        self.reach = np.maximum.accumulate(self.ends)

    def meeting(self, other: "Spans") -> int | None:
        """Return a byte that both have, or None."""
        if not (len(self.order) and len(other.order)):
            return None
        for mine, others in ((self, other), (other, self)):
            # For each of mine the last of the others' that does not begin behind it.
            place = np.searchsorted(others.starts, mine.starts, "right") - 1
            found = (place >= 0) & (others.reach[place] > mine.starts)
            if found.any():
                return int(mine.starts[found.argmax()])
        return None

    def clash(self) -> tuple[int, int] | None:
        """Return the places, as passed, of two ranges that share a byte, or None."""
        found = self.starts[1:] < self.reach[:-1]
        if not found.any():
            return None
        later = int(found.argmax()) + 1
        earlier = int(self.ends[:later].argmax())
        return int(self.order[earlier]), int(self.order[later])


class Footprint(NamedTuple):
    """What a request touches."""

    # By device and inode, the bytes of each file; None for all of them, of an fsync.
    files: dict[Any, Spans | None]
    memory: Spans  # the caller's
    writes: bool  # whether files are written; else memory is
    paths: dict[Any, Any]  # by device and inode, as they were given


class Flight(NamedTuple):
    """A request in flight, and those before it that it is chained to."""

    number: int  # of this flight, and of no other
    request: Any  # a weak reference; the library holds the request while it runs
    footprint: Footprint
    chain: set[int]  # the numbers of those that it comes after

    def is_over(self) -> bool:
        """Tell whether it touches nothing any more."""
        request = self.request()
        return request is None or request._is_over()


class Overlaps:
    """The requests in flight of all handles that check."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew, as in a forked child."""
        # A handler of a signal may come back here.
        self._lock = threading.RLock()
        self._flights: list[Flight] = []
        self._numbers = itertools.count()

    def admit(
        self, request: Request, footprint: Footprint, before: Collection[Request]
    ) -> None:
        """Add a request that is about to be submitted."""
        with self._lock:
            self._flights = [each for each in self._flights if not each.is_over()]
            chain: set[int] = set()
            for flight in self._flights:
                if flight.request() in before or _syncs(request, footprint, flight):
                    chain |= {flight.number, *flight.chain}
            for flight in self._flights:
                if flight.number not in chain:
                    _compare(request, footprint, flight)
            if None in footprint.files.values():
                # What is written later need not be durable when this is done.
                footprint = footprint._replace(files={})
            number = next(self._numbers)
            self._flights.append(Flight(number, weakref.ref(request), footprint, chain))


def _syncs(request: Request, footprint: Footprint, flight: Flight) -> bool:
    """Tell whether a request is an fsync that waits for a write by itself."""
    other = flight.request()
    return (
        other is not None
        and other._workers is request._workers
        and flight.footprint.writes
        and any(
            spans is None and file in flight.footprint.files
            for file, spans in footprint.files.items()
        )
    )


def _compare(request: Request, footprint: Footprint, flight: Flight) -> None:
    """Raise RuntimeError where two requests overlap."""
    other, rival = flight.footprint, flight.request()
    if rival is None:
        return
    if footprint.writes or other.writes:
        for file, spans in footprint.files.items():
            theirs = other.files.get(file)
            if theirs is None:
                continue
            at = 0 if spans is None else spans.meeting(theirs)
            if at is not None:
                what = f"byte {at} of {footprint.paths[file]!r}"
                raise _overlapping(request, rival, what)
    if not (footprint.writes and other.writes):
        at = footprint.memory.meeting(other.memory)
        if at is not None:
            raise _overlapping(request, rival, f"the memory at {at:#x}")


def _overlapping(request: Request, other: Request, what: str) -> RuntimeError:
    remedy = "wait for one first"
    if request._workers is other._workers:
        remedy = f"chain them by after=, or {remedy}"
    return RuntimeError(f"{request!r} and {other!r} both touch {what}; {remedy}")


def footprint_of(parts: Sequence[Part], writes: bool) -> Footprint:
    """Put together what a request touches."""
    whole = {file: None for file, _, offsets, *_ in parts if offsets is None}
    of_files: dict[Any, list[Any]] = {}
    of_memory = []
    for index, (file, _, offsets, sizes, addresses, lengths) in enumerate(parts):
        if offsets is not None:
            of_files.setdefault(file, []).append((index, offsets, sizes))
        of_memory.append((index, addresses, lengths))
    files = {file: _joined(ranges, writes) for file, ranges in of_files.items()}
    paths = {file: path for file, path, *_ in parts}
    return Footprint({**files, **whole}, _joined(of_memory, not writes), writes, paths)


def _joined(ranges: list[tuple[int, Any, Any]], changed: bool) -> Spans:
    """Make Spans of the ranges of several parts, which may not overlap if changed."""
    starts, sizes, parts = [], [], []
    for index, begins, lengths in ranges:
        flat, each = np.broadcast_arrays(
            np.asarray(begins, np.int64).ravel(), np.asarray(lengths, np.int64).ravel()
        )
        starts.append(flat)
        sizes.append(each)
        parts.append(np.full(len(flat), index))
    empty = [np.empty(0, np.int64)]
    spans = Spans(np.concatenate(starts or empty), np.concatenate(sizes or empty))
    found = spans.clash() if changed and len(ranges) > 1 else None
    if found:
        first, second = sorted(int(np.concatenate(parts)[place]) for place in found)
        raise RuntimeError(
            f"items[{first}] and items[{second}] touch the same bytes, and are not ordered"
        )
    return spans


def elements_of(source: Any) -> tuple[Integers, int]:
    """Return where the elements of an array or tensor lie, however it is strided."""
    if hasattr(source, "data_ptr"):
        item = int(source.element_size())
        address, shape = source.data_ptr(), tuple(source.shape)
        strides = tuple(stride * item for stride in source.stride())
    else:
        array = np.asarray(source)
        address = array.__array_interface__["data"][0]
        shape, strides, item = array.shape, array.strides, array.itemsize
    places: Integers = np.array(address, np.int64)
    for extent, stride in zip(shape, strides, strict=True):
        places = places[..., None] + np.arange(extent, dtype=np.int64) * stride
    return places.ravel(), item


OVERLAPS = Overlaps()
call_in_child(OVERLAPS.forget)
