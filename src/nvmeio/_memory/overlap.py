"""Find requests in flight that touch the same bytes, for handles with check_overlap.

Requests of all handles of the process with check_overlap are compared, byte by byte and not
by blocks, so adjacent records do not overlap.
"""

import itertools
import threading
import weakref
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nvmeio._events.forks import call_in_child
from nvmeio._events.listener import Request

__all__ = ["OVERLAPS", "elements_of", "footprint_of"]

Integers = npt.NDArray[np.int64]
Part = tuple[Any, Any, Any, Any, Any, Any]


class Spans:
    """Ranges of bytes, sorted by where they begin."""

    def __init__(self, starts: Any, sizes: Any) -> None:
        begins: Integers = np.asarray(starts, np.int64)
        ends = begins + sizes
        filled = np.flatnonzero(ends > begins)
        # For each sorted range, its index as passed.
        self.order = filled[np.argsort(begins[filled], kind="stable")]
        self.starts, self.ends = begins[self.order], ends[self.order]
        # For each range, the largest end among it and those before it.
        self.reach = np.maximum.accumulate(self.ends)

    def meeting(self, other: "Spans") -> int | None:
        """Return the offset or address of a byte that both contain, or None."""
        if not (len(self.order) and len(other.order)):
            return None
        for mine, others in ((self, other), (other, self)):
            # For each of mine, the last of the others that begins no later.
            place = np.searchsorted(others.starts, mine.starts, "right") - 1
            found = (place >= 0) & (others.reach[place] > mine.starts)
            if found.any():
                return int(mine.starts[found.argmax()])
        return None

    def clash(self) -> tuple[int, int] | None:
        """Return the indices, as passed, of two ranges that share a byte, or None."""
        found = self.starts[1:] < self.reach[:-1]
        if not found.any():
            return None
        later = int(found.argmax()) + 1
        earlier = int(self.ends[:later].argmax())
        return int(self.order[earlier]), int(self.order[later])


class Footprint(NamedTuple):
    """The bytes that a request touches."""

    # The bytes of each file, by device and inode; None for all bytes (an fsync).
    files: dict[Any, Spans | None]
    memory: Spans  # the caller's
    writes: bool  # whether it writes to files; else it writes to memory
    paths: dict[Any, Any]  # the path of each file as given, by device and inode


class Flight(NamedTuple):
    """A request in flight, and the earlier ones that it waits for."""

    number: int  # unique
    request: Any  # a weak reference; the library holds the request while it runs
    footprint: Footprint
    chain: set[int]  # the numbers of all requests that it waits for

    def is_over(self) -> bool:
        """Return whether it no longer touches anything."""
        request = self.request()
        return request is None or request._is_over()


class Overlaps:
    """The requests in flight on all handles with check_overlap."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forget all requests, as a forked child must."""
        # An RLock, because a signal handler may come back here.
        self._lock = threading.RLock()
        self._flights: list[Flight] = []
        self._numbers = itertools.count()

    def admit(
        self, request: Request, footprint: Footprint, before: Collection[Request]
    ) -> None:
        """Add a request before its submission; raise RuntimeError if it conflicts."""
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
                # An fsync does not conflict with writes that are submitted later.
                footprint = footprint._replace(files={})
            number = next(self._numbers)
            self._flights.append(Flight(number, weakref.ref(request), footprint, chain))


def _syncs(request: Request, footprint: Footprint, flight: Flight) -> bool:
    """Return whether a request is an fsync that waits for the write `flight` anyway."""
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
    """Raise RuntimeError if two requests overlap."""
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
    """Combine the parts of a request into its footprint."""
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
    """Make Spans of several parts' ranges; if `changed`, raise if two parts overlap."""
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
    """Return the addresses of an array's or tensor's elements, and their size in bytes."""
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
