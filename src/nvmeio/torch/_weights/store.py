"""Weights of a checkpoint in a bounded amount of memory, read again when they are needed.

A weight is forgotten, never overwritten: its memory is free once nobody holds it any more,
neither a tensor of the program nor a graph of autograd.
"""

import contextlib
import gc
import itertools
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from nvmeio._arguments.units import in_binary
from nvmeio._native.file import File
from nvmeio._native.pool import pool_memory, pool_stats, pool_trim
from nvmeio._native.request import Request
from nvmeio._safetensors.file import ModelFile
from nvmeio._tensors.errors import SafetensorError
from nvmeio.default import default_handle
from nvmeio.torch._weights.order import Order

__all__ = [
    "ALIGNMENT",
    "BY_EXPERT",
    "Extent",
    "Making",
    "Part",
    "Store",
    "Weight",
    "least_room",
    "naming",
    "new_memory",
    "no_inference",
    "over",
    "refuse_in_child",
]

# Of memory, as torch allocates it.
ALIGNMENT = 64
_CPU = torch.device("cpu")
# How many bytes are read ahead at most; also not more than this share of the limit, because
# what is kept for the next pass need not be read again.  At least two weights.
AHEAD_BYTES = 64 << 20
AHEAD_SHARE = 4
# How many of the coming uses are looked at for weights to read ahead.
AHEAD_USES = 64
PAGE = 4096
# How much of two weights is compared at a time.
PIECE_BYTES = 16 << 20
# The name of what computes with experts one by one, to transformers.
BY_EXPERT = "nvmeio"
# How much idle memory of the pool is left to it.
IDLE_BYTES = 32 << 20


class Extent(NamedTuple):
    """Bytes of a file, and where they begin in a weight."""

    file: ModelFile
    offset: int
    nbytes: int
    place: int


class Part(NamedTuple):
    """A tensor of the checkpoint, and where it begins in what is read for a weight."""

    shape: torch.Size
    place: int


class Making(NamedTuple):
    """How a weight is made of tensors that are read whole, given by their names."""

    parts: Mapping[str, Part]
    make: Callable[[Mapping[str, torch.Tensor]], torch.Tensor]


class Weight:
    """A weight of the model, and where its bytes are; these are its values in their order.

    With `making`, these are tensors of which it is made.
    """

    # A model of experts has some ten thousand.
    __slots__ = (
        *("name", "shape", "stored", "dtype", "device", "extents", "making", "parts"),
        *("is_part", "is_table", "is_soon", "is_ahead", "stored_bytes", "nbytes"),
        *("values", "reading"),
    )

    def __init__(
        self,
        name: str,
        shape: Sequence[int],
        stored: torch.dtype,
        dtype: torch.dtype,
        extents: Sequence[Extent],
        making: Making | None = None,
    ) -> None:
        self.name = name
        self.shape = shape if isinstance(shape, torch.Size) else torch.Size(shape)
        self.stored, self.dtype = stored, dtype
        self.extents, self.making = extents, making
        # Those of its first dimension, if these are also read one by one.
        self.parts: Sequence[Weight] = ()
        self.is_part = False
        # Whether its rows are read one by one.
        self.is_table = False
        # Where its values are used.
        self.device = _CPU
        # Whether it is a part that will be needed soon.
        self.is_soon = False
        # Whether it was read ahead, and not used since.
        self.is_ahead = False
        self.stored_bytes = max((each.place + each.nbytes for each in extents), default=0)
        self.nbytes: int = self.shape.numel() * dtype.itemsize
        # What is in memory: the values, or their bytes on the way.
        self.values: _Values | None = None
        self.reading: _Reading | None = None

    @property
    def is_in_pieces(self) -> bool:
        """Whether it is expected to be read in parts or rows only."""
        return bool(self.parts) or self.is_table

    @property
    def room(self) -> int:
        """The memory to read it: as stored, converted, and on the device."""
        more = self.stored_bytes if self.is_converted else 0
        if self.device.type != "cpu":
            more += self.nbytes
        if self.making is not None:
            more += self.shape.numel() * self.stored.itemsize
        return self.nbytes + more

    @property
    def is_converted(self) -> bool:
        """Whether the bytes as stored are not the values."""
        return self.making is not None or self.stored != self.dtype

    def copy(self) -> "Weight":
        """Return the same weight, of which nothing is in memory."""
        found = Weight(
            self.name, self.shape, self.stored, self.dtype, self.extents, self.making
        )
        found.device = self.device
        return found

    def split(self) -> None:
        """Let the parts of the first dimension be read one by one."""
        if self.making is not None or len(self.shape) < 2 or not self.shape[0]:
            return
        size, shape = self.stored_bytes // self.shape[0], self.shape[1:]
        parts = []
        for number, extents in enumerate(self._cut(size, self.shape[0])):
            name = f"{self.name}[{number}]"
            part = Weight(name, shape, self.stored, self.dtype, tuple(extents))
            part.is_part, part.device = True, self.device
            parts.append(part)
        self.parts = parts

    def _cut(self, size: int, count: int) -> list[list[Extent]]:
        """Return the extents of pieces of so many bytes."""
        pieces: list[list[Extent]] = [[] for _ in range(count)]
        for file, offset, nbytes, place in self.extents:
            done = 0
            while done < nbytes:
                number, begin = divmod(place + done, size)
                taken = min(size - begin, nbytes - done)
                pieces[number].append(Extent(file, offset + done, taken, begin))
                done += taken
        return pieces

    def stored_pieces(self) -> Iterator[torch.Tensor]:
        """Read the values as they are stored, one piece after the other."""
        count = -(-self.stored_bytes // PIECE_BYTES)
        for number, extents in enumerate(self._cut(PIECE_BYTES, count)):
            nbytes = min(PIECE_BYTES, self.stored_bytes - number * PIECE_BYTES)
            memory = new_memory(nbytes)
            default_handle().read_many(_items(extents, memory))
            yield over(memory, self.stored, [nbytes // self.stored.itemsize])

    def values_of(self, stored: npt.NDArray[np.uint8]) -> torch.Tensor:
        """Return the values, in the dtype in which they are stored."""
        if self.making is None:
            return over(stored, self.stored, self.shape)
        parts = {
            name: over(stored[part.place :], self.stored, part.shape)
            for name, part in self.making.parts.items()
        }
        return self.making.make(parts)


class _Room:
    """A part of the limit for memory of a device, which is free once this is gone."""


class _Held(weakref.ref[Any]):
    """What holds memory, and how much; by identity, because arrays have no hash."""

    __slots__ = ("nbytes",)
    __hash__ = object.__hash__
    nbytes: int

    def __eq__(self, other: object) -> bool:
        return self is other


class _Values:
    """The values of a weight, in memory or on a device."""

    def __init__(
        self, weight: Weight, memory: npt.NDArray[np.uint8], room: _Room | None = None
    ) -> None:
        self.tensor = over(memory, weight.dtype, weight.shape)
        self.room = room
        # What copies them to the device, until the store has taken note of it.
        self.copy: _Copy | None = None
        if room is not None:
            device = weight.device
            with no_inference():
                self.tensor = self.tensor.to(device, non_blocking=True)
            module = torch.get_device_module(device)
            self.stream = module.current_stream(device)
            self.event = module.Event()
            self.event.record(self.stream)
            self.copy = _Copy(self.event, memory)

    def use(self) -> torch.Tensor:
        """Return the values; what the current stream does next waits for their copy."""
        if self.room is not None:
            device = self.tensor.device
            stream = torch.get_device_module(device).current_stream(device)
            if stream != self.stream:
                stream.wait_event(self.event)
                self.tensor.record_stream(stream)
        return self.tensor

    def are_held(self) -> bool:
        """Return whether others hold the tensor, or another one over its memory."""
        return self.holders() > _OWN_HOLDERS

    def holders(self) -> int:
        # Torch counts for a storage the tensors over it, and Python the names of the
        # tensor.  It is passed to no function of Python: once torch.compile has replaced
        # how these are run, the caller holds their arguments too.
        count: int = torch._C._storage_Use_Count(self.tensor.untyped_storage()._cdata)
        return count + sys.getrefcount(self.tensor)


def _is_held(weight: Weight) -> bool:
    """Return whether a weight is not in memory, or cannot be forgotten."""
    # No name for the values here: it would hold them.
    return weight.values is None or weight.values.are_held()


class _Copy(NamedTuple):
    """A copy to a device that may be going on, and the memory that it reads."""

    event: Any
    memory: npt.NDArray[np.uint8]


class _Fetch:
    """A call of fetch(), which is gone when that has ended, however it did."""

    __slots__ = ("__weakref__",)


class _Reading:
    """A weight that is being read."""

    def __init__(
        self,
        weight: Weight,
        stored: npt.NDArray[np.uint8],
        memory: npt.NDArray[np.uint8],
        room: _Room | None,
        request: Request | None,
    ) -> None:
        self.room = room
        self.stored: npt.NDArray[np.uint8] | None = stored
        self.memory: npt.NDArray[np.uint8] | None = memory
        self.weight, self.request = weight, request
        # The fetches that want it, while they go on.
        self.waiting: weakref.WeakSet[_Fetch] = weakref.WeakSet()
        self.lock = threading.Lock()
        self.is_abandoned = False
        self.values: _Values | None = None

    def wait(self) -> _Values | None:
        """Wait for the values; raise what failed.

        Return None if another thread has waited, and failed or was interrupted.
        """
        with self.lock:
            if self.values is None and not self.is_abandoned:
                try:
                    self.values = self._made()
                except BaseException as error:
                    self.abandon()
                    if isinstance(error, Exception):
                        raise naming(self.weight, error) from error
                    raise
                self.stored = self.memory = self.room = None
            return self.values

    def _made(self) -> _Values:
        weight = self.weight
        if self.request is not None:
            self.request.wait()
        for file in {each.file: None for each in weight.extents}:
            file.check_unchanged()
        assert self.stored is not None
        assert self.memory is not None
        if self.stored is not self.memory:
            made = weight.values_of(self.stored)
            over(self.memory, weight.dtype, weight.shape).copy_(made)
            del made
        return _Values(weight, self.memory, self.room)

    def is_done(self) -> bool:
        return self.request is None or self.request.done()

    def abandon(self) -> None:
        self.is_abandoned = True
        if self.request is not None:
            self.request.cancel()
            with contextlib.suppress(CancelledError):
                self.request.exception()
        # The traceback of an error keeps this.
        self.request = self.stored = self.memory = self.room = None


def no_inference() -> contextlib.AbstractContextManager[Any]:
    """Let tensors be made that autograd may save, also in inference.

    Nothing is changed where nothing must be: Ctrl-C in one of torch's contexts may leave
    gradients switched off.
    """
    enabled = torch.is_inference_mode_enabled()
    return torch.inference_mode(False) if enabled else contextlib.nullcontext()


def over(
    memory: npt.NDArray[np.uint8], dtype: torch.dtype, shape: Sequence[int]
) -> torch.Tensor:
    """Make a tensor over memory; autograd may save it, also if it is made in inference."""
    size = torch.Size(shape).numel() * dtype.itemsize
    with no_inference():
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        return whole[:size].view(dtype).view(torch.Size(shape)).detach()


def new_memory(nbytes: int, device: torch.device = _CPU) -> npt.NDArray[np.uint8]:
    """Allocate memory of the pool, or where that has reached its limit, of its own.

    What is copied to a device comes from torch, which keeps pinned memory for the next use.
    """
    if device.type == "cuda":
        pinned = torch.empty(max(nbytes, 1), dtype=torch.uint8, pin_memory=True)
        return np.asarray(pinned.numpy())
    try:
        return np.asarray(memoryview(pool_memory(max(nbytes, 1), False, None)))
    except MemoryError:
        whole = np.empty(nbytes + PAGE, np.uint8)
        begin = -whole.ctypes.data % PAGE
        # The view is an object of its own, whose end is noticed.
        return np.frombuffer(whole, np.uint8, max(nbytes, 1), begin)


def _items(
    extents: Sequence[Extent], memory: npt.NDArray[np.uint8]
) -> list[tuple[npt.NDArray[np.uint8], File, int]]:
    """Return what is to be read, each into its place in memory."""
    return [
        (memory[each.place : each.place + each.nbytes], each.file.file, each.offset)
        for each in extents
        if each.nbytes
    ]


def naming(weight: Weight, error: Exception) -> Exception:
    """Return an error of a read that says which weight it was."""
    words = f"the weight {weight.name} cannot be read: "
    if isinstance(error, OSError):
        return type(error)(error.errno, f"{words}{error.strerror}", error.filename)
    if isinstance(error, SafetensorError):
        return SafetensorError(f"{words}{error}")
    return RuntimeError(f"{words}{type(error).__name__}: {error}")


def refuse_in_child(process: int, weight: Weight) -> None:
    """Raise RuntimeError if this is not the process that has opened the files."""
    if process != os.getpid():
        raise RuntimeError(
            f"the weight {weight.name} is on a drive, and a forked child cannot read it; "
            "start the child by spawn, and open the weights there"
        )


def _end_all(process: int, reads: dict[_Reading, None], copies: deque[_Copy]) -> None:
    # Those of a parent go on, and only it can wait for them.
    if process != os.getpid():
        return
    for reading in list(reads):
        reading.abandon()
    reads.clear()
    # Their memory is used again, and what was computed with them may not be done.
    for copy in copies:
        copy.event.synchronize()
    copies.clear()


def _own_holders() -> int:
    weight = Weight("", (1,), torch.uint8, torch.uint8, ())
    return _Values(weight, np.empty(1, np.uint8)).holders()


# What a store's own reference counts for.
_OWN_HOLDERS = _own_holders()


def least_room(weights: Sequence[Weight], calls: Iterable[Sequence[Weight]]) -> int:
    """Return the room for what any call needs, and for the largest weight besides."""
    most = 0
    for call in calls:
        distinct = [each for each in dict.fromkeys(call) if not each.is_table]
        converted = max((each.room - each.nbytes for each in distinct), default=0)
        most = max(most, sum(each.nbytes for each in distinct) + converted)
    read = [part for each in weights for part in each.parts or [each]]
    return most + max((each.room for each in read if not each.is_table), default=0)


class Store:
    """The weights of one model, of which at most `limit` bytes are in memory.

    `calls` has the weights that are needed together, for each call; the smallest limit
    has room for any of them and for the largest weight, which is read ahead.
    """

    def __init__(
        self, weights: Sequence[Weight], calls: Iterable[Sequence[Weight]], limit: int
    ) -> None:
        self.limit = limit
        self.weights = [*weights, *(part for each in weights for part in each.parts)]
        self.numbers = {weight: number for number, weight in enumerate(self.weights)}
        self.total_bytes = sum(weight.nbytes for weight in weights)
        self.least = least_room(weights, calls)
        if limit < self.least:
            raise ValueError(
                f"memory is {limit}; it must be {self.least} bytes "
                f"({in_binary(self.least)}) or more: what the largest layer needs, and the "
                "largest weight, which is read ahead of it"
            )
        whole = [number for number, each in enumerate(weights) if not each.is_in_pieces]
        self._order = Order(whole)
        self._lock = threading.RLock()
        # How many weights are not in memory, without those that are read in parts.
        self._missing = len(whole)
        # The parts in memory, the ones that were used last at the end.
        self._recent: dict[Weight, None] = {}
        self._process = os.getpid()
        # How much may be read ahead, and is.
        largest = max((each.nbytes for each in self.weights), default=0)
        self._window = max(min(AHEAD_BYTES, limit // AHEAD_SHARE), 2 * largest)
        self._ahead = 0
        self._used = 0
        # What holds this memory, and what held some and is gone.
        self._held: set[_Held] = set()
        self._freed: deque[Any] = deque()
        # A handle keeps the memory of what nobody waits for.
        self._reads: dict[_Reading, None] = {}
        self._copies: deque[_Copy] = deque()
        ending = weakref.finalize(self, _end_all, self._process, self._reads, self._copies)
        ending.atexit = False
        self.bytes_read = self.bytes_peak = 0
        # Uses of what was in memory, was being read, and was not expected.
        self.hits = self.waits_ahead = self.waits_demanded = 0
        self.seconds_waited = 0.0

    def fetch(self, wanted: Sequence[Weight]) -> dict[Weight, torch.Tensor]:
        """Return the values of weights, which stay in memory while they are held."""
        refuse_in_child(self._process, wanted[0])
        found: dict[Weight, torch.Tensor] = {}
        readings: dict[Weight, _Reading] = {}
        this = _Fetch()
        try:
            with self._lock:
                for weight in wanted:
                    if weight.is_part:
                        weight.is_soon = False
                        if weight in self._recent:
                            self._recent[weight] = self._recent.pop(weight)
                    elif self._missing:
                        self._order.use(self.numbers[weight])
                    self._count_ahead(weight, is_ahead=False)
                    # What is needed now is held, so it is not forgotten for what comes.
                    if weight.values is not None:
                        found[weight] = weight.values.use()
                        self.hits += 1
                        continue
                    readings[weight] = self._reading_of(weight, this)
                if self._missing:
                    self._read_ahead()
            if readings:
                begin = time.perf_counter()
                for weight, reading in readings.items():
                    found[weight] = self._land(weight, reading, this).use()
                with self._lock:
                    self.seconds_waited += time.perf_counter() - begin
        except BaseException:
            # The traceback must not keep them in memory.
            found.clear()
            while readings:
                readings.popitem()[1].waiting.discard(this)
            del this
            self._mend()
            raise
        readings.clear()
        return found

    def _reading_of(self, weight: Weight, fetch: _Fetch) -> _Reading:
        """Return the read of a weight that is needed now, which may be going on."""
        reading = weight.reading
        if reading is None:
            self.waits_demanded += 1
            reading = self._start(weight, demanded=True)
            assert reading is not None
        elif reading.is_done():
            self.hits += 1
        else:
            self.waits_ahead += 1
        reading.waiting.add(fetch)
        return reading

    def _land(self, weight: Weight, reading: _Reading, fetch: _Fetch) -> _Values:
        while (values := reading.wait()) is None:
            with self._lock:
                if weight.values is not None:
                    return weight.values
                if weight.reading is reading:
                    self._drop(weight)
                reading = self._reading_of(weight, fetch)
        with self._lock:
            self._reads.pop(reading, None)
            if values.copy is not None:
                self._copies.append(values.copy)
                values.copy = None
            if weight.reading is reading:
                weight.reading = None
                weight.values = values
                if weight.is_part:
                    self._recent[weight] = None
        return values

    def _drop(self, weight: Weight) -> None:
        """Give up the read of a weight, which was abandoned."""
        if weight.reading is not None:
            self._reads.pop(weight.reading, None)
            weight.reading = None
            self._count_missing(weight, 1)

    def _mend(self) -> None:
        """Make what is counted true again after an error, or Ctrl-C anywhere."""
        with self._lock:
            for weight in self.weights:
                reading = weight.reading
                # What was read ahead may have met the fault that is gone by the next call.
                if reading is not None and (reading.is_abandoned or not reading.waiting):
                    weight.reading = None
                if weight.is_part and weight.values is not None:
                    self._recent.setdefault(weight)
                weight.is_soon = False
                weight.is_ahead &= weight.values is not None or weight.reading is not None
            known = {each.reading for each in self.weights if each.reading is not None}
            self._reads.update(dict.fromkeys(known))
            for reading in self._reads.keys() - known:
                # Nobody finds it any more; another thread may wait for it.
                if not reading.waiting:
                    reading.abandon()
                self._reads.pop(reading, None)
            for weight in [each for each in self._recent if each.values is None]:
                del self._recent[weight]
            self._missing = sum(
                each.values is None and each.reading is None
                for each in self.weights
                if not each.is_part and not each.is_in_pieces
            )
            self._ahead = sum(each.nbytes for each in self.weights if each.is_ahead)
            self._held = {each for each in self._held if each() is not None}
            self._used = sum(each.nbytes for each in self._held)
            self._order.mend()

    def prefetch(self, parts: Iterable[Weight]) -> None:
        """Start to read parts that are needed next, as far as there is room."""
        try:
            with self._lock:
                missing = []
                for part in parts:
                    part.is_soon = True
                    if part.values is None and part.reading is None:
                        missing.append(part)
                for part in missing:
                    if self._start(part, demanded=False) is None:
                        break
        except BaseException:
            self._mend()
            raise

    def forget_soon(self, parts: Iterable[Weight]) -> None:
        """End what prefetch() has begun: these parts are needed no sooner than others."""
        with self._lock:
            for part in parts:
                part.is_soon = False

    def _count_missing(self, weight: Weight, count: int) -> None:
        if count > 0:
            self._count_ahead(weight, is_ahead=False)
        if not weight.is_part and not weight.is_in_pieces:
            self._missing += count

    def _memory(self, nbytes: int, device: torch.device) -> npt.NDArray[np.uint8]:
        """Allocate memory that counts until nobody holds it."""
        array = new_memory(nbytes, device)
        self._count(array, nbytes)
        return array

    def _count(self, holder: object, nbytes: int) -> None:
        """Count memory until its holder is gone."""
        held = _Held(holder, self._freed.append)
        held.nbytes = nbytes
        self._held.add(held)
        self._used += nbytes
        self.bytes_peak = max(self.bytes_peak, self._used)

    def _start(self, weight: Weight, *, demanded: bool) -> _Reading | None:
        """Start to read a weight; return None if that needs room, and is not demanded."""
        if not self._make_room(weight, demanded):
            return None
        room = None
        if weight.device.type != "cpu":
            room = _Room()
            self._count(room, weight.nbytes)
        memory = stored = self._memory(weight.nbytes, weight.device)
        if weight.is_converted:
            stored = self._memory(weight.stored_bytes, _CPU)
        items = _items(weight.extents, stored)
        request = default_handle().submit_read_many(items) if items else None
        self.bytes_read += weight.stored_bytes
        weight.reading = _Reading(weight, stored, memory, room, request)
        self._reads[weight.reading] = None
        self._count_missing(weight, -1)
        return weight.reading

    def _read_ahead(self) -> None:
        """Start the reads of what is needed next."""
        for number in itertools.islice(self._order.expected(), AHEAD_USES):
            weight = self.weights[number]
            if weight.values is None and weight.reading is None:
                if self._ahead + weight.nbytes > self._window:
                    break
                if self._start(weight, demanded=False) is None:
                    break
                self._count_ahead(weight, is_ahead=True)

    def _count_ahead(self, weight: Weight, *, is_ahead: bool) -> None:
        if weight.is_ahead != is_ahead:
            weight.is_ahead = is_ahead
            self._ahead += weight.nbytes if is_ahead else -weight.nbytes

    def _count_freed(self) -> None:
        while self._copies and self._copies[0].event.query():
            self._copies.popleft()
        while self._freed:
            held = self._freed.popleft()
            if held in self._held:
                self._held.discard(held)
                self._used -= held.nbytes

    def _make_room(self, wanted: Weight, demanded: bool) -> bool:
        """Forget weights until there is room, only for later ones if not demanded."""
        limit = self.limit - wanted.room
        distance: int | None
        if demanded or wanted.is_part:
            distance = -1 if demanded else 0
        else:
            distance = self._order.distance(self.numbers[wanted])
        self._forget_to(limit, distance)
        if demanded and self._used > limit:
            while self._used > limit and self._copies:
                self._copies.popleft().event.synchronize()
                self._count_freed()
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
        # What copies read is free once they have ended.
        limit += sum(each.memory.nbytes for each in self._copies)
        if self._used > limit:
            for victim in self._victims(distance):
                self._forget(victim)
                self._count_freed()
                if self._used <= limit:
                    return

    def _victims(self, distance: int | None) -> Iterable[Weight]:
        """Yield weights that are needed in more than so many uses, or with -1 all.

        Parts come first, because who knows whether they are needed: the one that was used
        longest ago.  Then the others, the last ones first, and none that others hold.
        """
        if distance is None:
            return
        for weight in list(self._recent):
            if not weight.is_soon and not _is_held(weight):
                yield weight
        expected = set()
        for number in self._order.farthest():
            own = self._order.distance(number)
            if own is None or own <= distance:
                break
            expected.add(number)
            weight = self.weights[number]
            if not _is_held(weight):
                yield weight
        else:
            for number, weight in enumerate(self.weights):
                if number not in expected and not weight.is_part and not _is_held(weight):
                    yield weight
        if distance < 0:
            for weight in list(self._recent):
                if not _is_held(weight):
                    yield weight

    def _forget(self, weight: Weight) -> None:
        if weight.values is not None:
            weight.values = None
            self._recent.pop(weight, None)
            self._count_missing(weight, 1)

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
            weight.reading.abandon()
            self._drop(weight)
            self._count_freed()

    def _lack_of_memory(self, wanted: Weight) -> Exception:
        held = [
            each.name
            for each in self.weights
            if each.values is not None and each.values.are_held()
        ]
        some = ", ".join(held[:5]) + (f" and {len(held) - 5} more" if len(held) > 5 else "")
        words = (
            f"there is no room for the weight {wanted.name} of {in_binary(wanted.room)}: "
            f"memory is {in_binary(self.limit)}"
        )
        if wanted.is_table and wanted.room > self.limit:
            return RuntimeError(f"{words}; only its rows can be read, by an embedding")
        if wanted.parts and wanted.room > self.limit:
            return RuntimeError(
                f"{words}; it has {len(wanted.parts)} experts, which a forward pass reads "
                f"one by one if the model's experts_implementation is {BY_EXPERT!r}; what "
                "needs the whole, such as torch.save, needs more memory"
            )
        if not held:
            return RuntimeError(
                f"{words}, and reads of other threads take it; give more memory, or "
                "compute with fewer threads"
            )
        return RuntimeError(
            f"{words}, and the program holds {some}, or another thread computes with them; "
            "release them, or give more memory"
        )

    def stats(self) -> dict[str, int | float]:
        """Return what was read, and how often and long that had to be waited for."""
        with self._lock:
            self._count_freed()
            return {
                "bytes_total": self.total_bytes,
                "bytes_limit": self.limit,
                "bytes_used": self._used,
                "bytes_peak": self.bytes_peak,
                "bytes_read": self.bytes_read,
                "hits": self.hits,
                "waits_ahead": self.waits_ahead,
                "waits_demanded": self.waits_demanded,
                "seconds_waited": self.seconds_waited,
            }
