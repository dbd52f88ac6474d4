"""Weights of a checkpoint in a bounded amount of memory, read again when they are needed.

A weight is forgotten, never overwritten: its memory is free once nobody holds it any more,
neither a tensor of the program nor a graph of autograd.
"""

import contextlib
import gc
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from nvmeio._arguments.units import in_binary
from nvmeio._native.pool import pool_memory, pool_stats, pool_trim
from nvmeio._native.request import Request
from nvmeio._safetensors.file import ModelFile
from nvmeio._tensors.errors import SafetensorError
from nvmeio.default import default_handle
from nvmeio.torch._weights.order import Order

__all__ = ["Extent", "Store", "Weight"]

# How many bytes are read ahead, at least two weights.
AHEAD_BYTES = 64 << 20
# How many of the coming uses are looked at for weights to read ahead.
AHEAD_USES = 64
# How much idle memory of the pool is left to it.
IDLE_BYTES = 32 << 20


class Extent(NamedTuple):
    """Bytes of a file, and where they begin in a weight."""

    file: ModelFile
    offset: int
    nbytes: int
    place: int


class Weight:
    """A tensor of the checkpoint."""

    def __init__(
        self,
        name: str,
        shape: Sequence[int],
        stored: torch.dtype,
        dtype: torch.dtype,
        extents: Sequence[Extent],
    ) -> None:
        self.name = name
        self.shape = torch.Size(shape)
        self.stored, self.dtype = stored, dtype
        self.extents = extents
        self.stored_bytes = sum(each.nbytes for each in extents)
        self.nbytes: int = self.shape.numel() * dtype.itemsize
        # What is in memory: the values, or their bytes on the way.
        self.values: _Values | None = None
        self.reading: _Reading | None = None

    @property
    def room(self) -> int:
        """The memory that is needed to read it: for the bytes as stored, and converted."""
        return self.nbytes + (0 if self.stored == self.dtype else self.stored_bytes)


class _Values:
    """The values of a weight, in memory."""

    def __init__(self, weight: Weight, memory: npt.NDArray[np.uint8]) -> None:
        self.tensor = _over(memory, weight.dtype, weight.shape)

    def are_held(self) -> bool:
        """Return whether others hold the tensor, or another one over its memory."""
        return _holders(self.tensor) > _OWN_HOLDERS


def _holders(tensor: torch.Tensor) -> int:
    # Torch counts for a storage the tensors over it, and Python the names of the tensor.
    storage = tensor.untyped_storage()
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count + sys.getrefcount(tensor)


class _Reading:
    """A weight that is being read."""

    def __init__(
        self,
        weight: Weight,
        stored: npt.NDArray[np.uint8],
        memory: npt.NDArray[np.uint8],
        request: Request | None,
    ) -> None:
        self.stored: npt.NDArray[np.uint8] | None = stored
        self.memory: npt.NDArray[np.uint8] | None = memory
        self.weight, self.request = weight, request
        self.waiting = 0  # how many fetches want it
        self.lock = threading.Lock()
        self.values: _Values | None = None

    def wait(self) -> _Values:
        """Wait for the values; raise what failed."""
        with self.lock:
            if self.values is None:
                weight = self.weight
                try:
                    if self.request is not None:
                        self.request.wait()
                    for file in {each.file: None for each in weight.extents}:
                        file.check_unchanged()
                except Exception as error:
                    raise _naming(weight, error) from error
                assert self.stored is not None
                assert self.memory is not None
                if self.stored is not self.memory:
                    stored = _over(self.stored, weight.stored, weight.shape)
                    _over(self.memory, weight.dtype, weight.shape).copy_(stored)
                self.values = _Values(weight, self.memory)
                self.stored = self.memory = None
            return self.values

    def is_done(self) -> bool:
        return self.request is None or self.request.done()

    def abandon(self) -> None:
        if self.request is not None:
            self.request.cancel()
            with contextlib.suppress(CancelledError):
                self.request.exception()
        # The traceback of an error keeps this.
        self.request = self.stored = self.memory = None


def _over(
    memory: npt.NDArray[np.uint8], dtype: torch.dtype, shape: Sequence[int]
) -> torch.Tensor:
    """Make a tensor over memory; autograd may save it, also if it is made in inference."""
    size = torch.Size(shape).numel() * dtype.itemsize
    with torch.inference_mode(False), torch.no_grad():
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        return whole[:size].view(dtype).view(torch.Size(shape)).detach()


def _naming(weight: Weight, error: Exception) -> Exception:
    """Return an error of a read that says which weight it was."""
    words = f"the weight {weight.name} cannot be read: "
    if isinstance(error, OSError):
        return type(error)(error.errno, f"{words}{error.strerror}", error.filename)
    if isinstance(error, SafetensorError):
        return SafetensorError(f"{words}{error}")
    return RuntimeError(f"{words}{type(error).__name__}: {error}")


def _abandon_all(reads: dict[_Reading, None]) -> None:
    for reading in list(reads):
        reading.abandon()
    reads.clear()


def _own_holders() -> int:
    weight = Weight("", (1,), torch.uint8, torch.uint8, ())
    values = _Values(weight, np.empty(1, np.uint8))
    return _holders(values.tensor)


# What a store's own reference counts for.
_OWN_HOLDERS = _own_holders()


class Store:
    """The weights of one model, of which at most `limit` bytes are in memory.

    `calls` has the weights that are needed together, for each call; the smallest limit
    has room for any of them and for the largest weight, which is read ahead.
    """

    def __init__(
        self, weights: Sequence[Weight], calls: Iterable[Sequence[Weight]], limit: int
    ) -> None:
        self.weights, self.limit = list(weights), limit
        self.numbers = {weight: number for number, weight in enumerate(self.weights)}
        self.total_bytes = sum(weight.nbytes for weight in self.weights)
        self.least = self._least(calls)
        if limit < self.least:
            raise ValueError(
                f"memory is {limit}; it must be {self.least} bytes "
                f"({in_binary(self.least)}) or more: what the largest layer needs, and the "
                "largest weight, which is read ahead of it"
            )
        self._order = Order(range(len(self.weights)))
        self._lock = threading.RLock()
        self._missing = len(self.weights)
        self._process = os.getpid()
        self._used = 0
        self._freed: deque[int] = deque()
        self._handle = default_handle()
        # A handle keeps the memory of what nobody waits for.
        self._reads: dict[_Reading, None] = {}
        weakref.finalize(self, _abandon_all, self._reads).atexit = False
        self.bytes_read = self.hits = self.waits = self.bytes_peak = 0

    def _least(self, calls: Iterable[Sequence[Weight]]) -> int:
        most = 0
        for call in calls:
            distinct = dict.fromkeys(call)
            converted = max((each.room - each.nbytes for each in distinct), default=0)
            most = max(most, sum(each.nbytes for each in distinct) + converted)
        return most + max((each.room for each in self.weights), default=0)

    def fetch(self, wanted: Sequence[Weight]) -> dict[Weight, torch.Tensor]:
        """Return the values of weights, which stay in memory while they are held."""
        if self._process != os.getpid():
            raise RuntimeError(
                f"the weight {wanted[0].name} is on a drive, and a forked child cannot "
                "read it; start the child by spawn, and call disk_offload there"
            )
        found: dict[Weight, torch.Tensor] = {}
        readings: dict[Weight, _Reading] = {}
        with self._lock:
            for weight in wanted:
                if self._missing:
                    self._order.use(self.numbers[weight])
                # What is needed now is held, so it is not forgotten for what comes.
                if weight.values is not None:
                    found[weight] = weight.values.tensor
                    self.hits += 1
                    continue
                reading = weight.reading
                if reading is not None and reading.is_done():
                    self.hits += 1
                else:
                    self.waits += 1
                if reading is None:
                    reading = self._start(weight, demanded=True)
                    assert reading is not None
                reading.waiting += 1
                readings[weight] = reading
            if self._missing:
                self._read_ahead()
        try:
            for weight, reading in readings.items():
                found[weight] = self._land(weight, reading).tensor
        except BaseException:
            # The traceback must not keep them in memory.
            found.clear()
            raise
        finally:
            with self._lock:
                for reading in readings.values():
                    reading.waiting -= 1
            readings.clear()
        return found

    def _land(self, weight: Weight, reading: _Reading) -> _Values:
        try:
            values = reading.wait()
        except BaseException:
            with self._lock:
                self._reads.pop(reading, None)
                if weight.reading is reading:
                    weight.reading = None
                    self._missing += 1
            reading.abandon()
            raise
        with self._lock:
            self._reads.pop(reading, None)
            if weight.reading is reading:
                weight.reading = None
                weight.values = values
        return values

    def memory(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Allocate memory that counts until nobody holds it."""
        array = np.asarray(memoryview(pool_memory(max(nbytes, 1), False, None)))
        self._used += nbytes
        self.bytes_peak = max(self.bytes_peak, self._used)
        weakref.finalize(array, self._freed.append, nbytes).atexit = False
        return array

    def _start(self, weight: Weight, *, demanded: bool) -> _Reading | None:
        """Start to read a weight; return None if that needs room, and is not demanded."""
        if not self._make_room(weight, demanded):
            return None
        memory = stored = self.memory(weight.nbytes)
        if weight.stored != weight.dtype:
            stored = self.memory(weight.stored_bytes)
        whole = stored[: weight.stored_bytes]
        items = [
            (whole[each.place : each.place + each.nbytes], each.file.file, each.offset)
            for each in weight.extents
            if each.nbytes
        ]
        request = self._handle.submit_read_many(items) if items else None
        self.bytes_read += weight.stored_bytes
        weight.reading = _Reading(weight, stored, memory, request)
        self._reads[weight.reading] = None
        self._missing -= 1
        return weight.reading

    def _read_ahead(self) -> None:
        """Start the reads of what is needed next."""
        ahead = count = 0
        for uses, number in enumerate(self._order.expected()):
            if uses == AHEAD_USES:
                break
            weight = self.weights[number]
            if weight.values is not None:
                continue
            ahead += weight.room
            count += 1
            if weight.reading is None and (
                (count > 2 and ahead > AHEAD_BYTES)
                or self._start(weight, demanded=False) is None
            ):
                break

    def _count_freed(self) -> None:
        while self._freed:
            self._used -= self._freed.popleft()

    def _make_room(self, wanted: Weight, demanded: bool) -> bool:
        """Forget weights until there is room, only for later ones if not demanded."""
        limit = self.limit - wanted.room
        distance = -1 if demanded else self._order.distance(self.numbers[wanted])
        self._forget_to(limit, distance)
        if demanded and self._used > limit:
            self._abandon_reads(limit)
            # A thread that has just done a read may still hold its memory, and a cycle of
            # Python objects that of weights.
            for pause in (*[0.001] * 10, None):
                if self._used <= limit:
                    break
                if pause is None:
                    gc.collect()
                else:
                    time.sleep(pause)
                self._forget_to(limit, distance)
        if self._used > limit:
            if demanded:
                raise self._lack_of_memory(wanted)
            return False
        idle = pool_stats()
        if idle["bytes_mapped"] - idle["bytes_used"] > wanted.room + IDLE_BYTES:
            pool_trim()
        return True

    def _forget_to(self, limit: int, distance: int | None) -> None:
        """Forget weights until at most `limit` bytes are used, if that is possible."""
        self._count_freed()
        if self._used > limit:
            for victim in self._victims(distance):
                self._forget(victim)
                self._count_freed()
                if self._used <= limit:
                    return

    def _victims(self, distance: int | None) -> Iterable[Weight]:
        """Yield weights that are needed in more than so many uses, or with -1 all.

        The last ones first, and none that others hold.
        """
        expected = set()
        for number in self._order.farthest():
            own = self._order.distance(number)
            if distance is None or own is None or own <= distance:
                return
            expected.add(number)
            # No name for the values here: it would hold them.
            weight = self.weights[number]
            if weight.values is not None and not weight.values.are_held():
                yield weight
        for number, weight in enumerate(self.weights):
            if number in expected or weight.values is None or weight.values.are_held():
                continue
            yield weight

    def _forget(self, weight: Weight) -> None:
        if weight.values is not None:
            weight.values = None
            self._missing += 1

    def _abandon_reads(self, limit: int) -> None:
        """Cancel what was read ahead, the last one first."""
        reading = [
            each
            for each in self.weights
            if each.reading is not None and not each.reading.waiting
        ]
        reading.sort(key=lambda each: -(self._order.distance(self.numbers[each]) or 0))
        for weight in reading:
            if self._used <= limit:
                return
            assert weight.reading is not None
            self._reads.pop(weight.reading, None)
            weight.reading.abandon()
            weight.reading = None
            self._missing += 1
            self._count_freed()

    def _lack_of_memory(self, wanted: Weight) -> Exception:
        held = [
            each.name
            for each in self.weights
            if each.values is not None and each.values.are_held()
        ]
        some = ", ".join(held[:5]) + (f" and {len(held) - 5} more" if len(held) > 5 else "")
        return RuntimeError(
            f"there is no room for the weight {wanted.name} of {in_binary(wanted.room)}: "
            f"memory is {in_binary(self.limit)}, and the program holds {some}; release "
            "them, or give more memory"
        )

    def stats(self) -> dict[str, int]:
        """Return what was read, and how often that had to be waited for."""
        with self._lock:
            self._count_freed()
            return {
                "bytes_total": self.total_bytes,
                "bytes_limit": self.limit,
                "bytes_used": self._used,
                "bytes_peak": self.bytes_peak,
                "bytes_read": self.bytes_read,
                "hits": self.hits,
                "waits": self.waits,
            }
