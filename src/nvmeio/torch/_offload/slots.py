"""Move bytes from memory to an unnamed file, and read them back ahead of need.

A slot is a range of that file.  This module limits the memory, allocates slots and reads
ahead.  activations.py knows what the bytes are, and when they are needed.
"""

import bisect
import contextlib
import ctypes
import errno
import functools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError
from typing import Any, NoReturn, TypeVar, cast

import torch

from nvmeio._arguments.units import in_binary
from nvmeio._events.forks import call_in_child
from nvmeio._files.descriptors import best_effort
from nvmeio._memory.heap import give_back
from nvmeio._native.file import File, written_last
from nvmeio._native.interrupts import Finalizer, call_if_free
from nvmeio._native.request import Request
from nvmeio._publish.files import unnamed_file
from nvmeio.default import default_handle
from nvmeio.torch._offload.plan import pages
from nvmeio.torch.memory import empty

__all__ = ["Slot", "SlotFile", "WeakStorage", "memory_of"]

_Method = TypeVar("_Method", bound=Callable[..., Any])

# After freeing this much, return the heap's free memory to the system.  glibc keeps freed
# memory, with small objects between it: without this the process grew by 1323 MiB while 28
# MiB were held (64 x 3 tensors of 7 MiB, 2026-11-25).
TRIM_BYTES = 32 << 20
_live: weakref.WeakSet["SlotFile"] = weakref.WeakSet()


def memory_of(nbytes: int, device: torch.device, lead: int) -> torch.Tensor:
    """Make a tensor of bytes that begins `lead` bytes after an aligned address.

    It is in the pool's memory if possible, which needs no bounce buffer and is populated:
    elementwise steps took 1.70 times as long as computing alone, against 2.03 times with
    torch's own memory (2026-11-25).
    """
    if device.type == "cpu":
        with contextlib.suppress(MemoryError):
            return empty(lead + nbytes, dtype=torch.uint8)[lead:]
    storage = torch.UntypedStorage(lead + nbytes, device=device)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(
        storage, lead, (nbytes,), (1,)
    )


class WeakStorage:
    """A weak reference to a storage; as long as it exists, no other has its address.

    That of torch has a ``__del__``, in which Ctrl-C would be lost.
    """

    __slots__ = ("_finalizer", "cdata")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.cdata: int = storage._weak_ref()
        self._finalizer = Finalizer(torch.UntypedStorage._free_weak_ref, self.cdata)


class Slot:
    """Saved bytes, in the file, in memory, or in flight between them.

    ``data`` has the bytes while they are in memory, ``lead`` bytes after an aligned
    address.  ``request`` is a read or write in flight; ``reads`` is True for a read.
    ``storage`` and ``address`` identify the storage that was saved, and ``part`` the part
    of it, if not all.  ``witness`` shares the version counter of the saved tensor, but has
    no memory; ``version`` is the version at that time.  ``users`` counts the graph nodes
    that need the bytes.  ``error`` is why they could not be written.
    """

    __slots__ = (
        *("address", "data", "device", "error", "lead", "nbytes", "part", "place"),
        *("reads", "request", "serial", "storage", "users", "version", "witness"),
    )

    def __init__(
        self,
        serial: int,
        data: torch.Tensor,
        tensor: torch.Tensor,
        lead: int,
        part: object,
    ) -> None:
        self.serial, self.lead, self.part = serial, lead, part
        storage = tensor.untyped_storage()
        self.storage, self.address = WeakStorage(storage), storage.data_ptr()
        # Assigning to .data does not change the version counter.
        self.witness, self.version = tensor.detach(), tensor._version
        self.witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self.data: torch.Tensor | None = data
        self.nbytes, self.device = data.nbytes, data.device
        self.place = -1
        self.request: Request | None = None
        self.reads = False
        self.users = 1
        self.error: Exception | None = None

    def changed(self) -> bool:
        """Return whether the tensor was changed in place since it was saved."""
        return bool(self.witness._version != self.version)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor of the same storage is unchanged since this was saved."""
        version = tensor._version
        if not version == self.version == self.witness._version:
            return False
        # Resizing moves a storage.
        if tensor.untyped_storage().data_ptr() != self.address:
            return False
        # A tensor from .data has the same memory but its own version counter.
        counter = _counter_of(tensor)
        return counter is not None and counter == _counter_of(self.witness)


# How many words of a tensor's object are searched for its version counter: those before its
# sizes, fewer than every object has.
_COUNTER_WORDS = 12


def _words(tensor: torch.Tensor) -> list[int]:
    return list((ctypes.c_uint64 * _COUNTER_WORDS).from_address(tensor._cdata))


def _counter_word() -> int | None:
    """Return which word of a tensor's object points to its version counter, if one does.

    torch does not say whether two tensors share a counter.  To change one for a moment, and
    look at the other, would show other threads a change that never was.
    """
    one, other = torch.zeros(1), torch.zeros(1)
    found = []
    for tensor, different in ((one, other), (other, one)):
        own, shared = _words(tensor), _words(tensor.detach())
        data, unlike = _words(tensor.data), _words(different)
        found.append(
            {
                word
                for word in range(_COUNTER_WORDS)
                if own[word] == shared[word] and own[word] not in (data[word], unlike[word])
            }
        )
    (words,) = {frozenset(each) for each in found} if found[0] == found[1] else (set(),)
    return next(iter(words)) if len(words) == 1 else None


# What _counter_word() has found, once.
_known_word: list[int | None] = []


def _counter_of(tensor: torch.Tensor) -> int | None:
    """Return the address of a tensor's version counter; None if torch is unfamiliar."""
    if not _known_word:
        _known_word.append(_counter_word())
    (word,) = _known_word
    return None if word is None else _words(tensor)[word]


class _Room:
    """Allocates space in a file, in the first gap that is large enough."""

    def __init__(self) -> None:
        self._gaps: list[tuple[int, int]] = []
        self._end = 0

    def take(self, nbytes: int) -> int:
        """Allocate `nbytes` bytes, and return their offset."""
        nbytes = pages(nbytes)
        for index, (place, room) in enumerate(self._gaps):
            if room == nbytes:
                del self._gaps[index]
                return place
            if room > nbytes:
                self._gaps[index] = place + nbytes, room - nbytes
                return place
        place, self._end = self._end, self._end + nbytes
        return place

    def give(self, place: int, nbytes: int) -> None:
        """Free a range, and merge it with the gaps next to it."""
        index = bisect.bisect(self._gaps, (place,))
        low, high = place, place + pages(nbytes)
        if index < len(self._gaps) and self._gaps[index][0] == high:
            high += self._gaps.pop(index)[1]
        if index and sum(self._gaps[index - 1]) == low:
            index -= 1
            low = self._gaps.pop(index)[0]
        if high == self._end:
            self._end = low
        else:
            self._gaps.insert(index, (low, high - low))


def _end(file: File, in_flight: Iterable[Slot]) -> None:
    """Truncate a file, because forked children may keep it open for long."""
    for slot in in_flight:
        # Ignore errors, because no one needs the bytes any more.
        _outcome(slot)
    with best_effort():
        file.truncate(0)


def _locked(method: _Method) -> _Method:
    """Make a method take the lock, and free the slots that were dropped meanwhile.

    Not a context manager in Python: Ctrl-C could come when that has taken the lock, and
    before its block is entered.
    """

    @functools.wraps(method)
    def call(self: "SlotFile", *args: Any, **kwargs: Any) -> Any:
        try:
            with self._lock:
                self._free_dropped()
                return method(self, *args, **kwargs)
        finally:
            self._settle()
            if self._freed > TRIM_BYTES:
                self._freed = 0
                give_back()

    return cast("_Method", call)


class SlotFile:
    """All slots of one context, in one file.

    Thread-safe.  All slots together have at most ``memory`` bytes in memory; a single slot
    that is larger is in memory alone.  Each saved tensor refers to this object, so the file
    lives as long as the last one.  Destructors never wait for the lock: slots
    that are dropped while it is taken are freed by the thread that has it.
    """

    def __init__(self, folder: str, memory: int) -> None:
        self.folder, self.memory = folder, memory
        self.held = self._freed = 0
        # What others read of the same drive is needed sooner.
        self._file = written_last(unnamed_file(folder))
        self._room = _Room()
        self._lock = threading.Lock()
        self._dropped: deque[Slot] = deque()
        self._slots: dict[int, Slot] = {}
        # By address, which is not used again while the slot's weak reference exists.
        self._by_storage: dict[int, list[Slot]] = {}
        # The serials of all slots, sorted; and of those in memory and in the file.
        self._serials: list[int] = []
        self._resident: list[int] = []
        # In the order of submission.
        self._in_flight: dict[Slot, None] = {}
        self._count = 0
        # The slot at which the forward or backward pass is, and the last one read ahead.
        self._position = self._ahead = 0
        self.forked = False
        self._finalizer = Finalizer(_end, self._file, self._in_flight)
        _live.add(self)

    @_locked
    def find(self, part: object, tensor: torch.Tensor, end: int) -> Slot | None:
        """Return the slot that has a storage, or a part of it, and count one more user."""
        for slot in self._by_storage.get(tensor.untyped_storage()._cdata, ()):
            known = slot.part == part and slot.error is None and slot.nbytes >= end
            if known and slot.holds(tensor):
                slot.users += 1
                return slot
        return None

    @_locked
    def write(
        self, data: torch.Tensor, tensor: torch.Tensor, lead: int = 0, part: object = None
    ) -> Slot:
        """Start writing bytes of a tensor; wait only while memory is over its limit."""
        self._collect()
        self._position = self._ahead = self._count
        self._make_room(data.nbytes)
        slot = Slot(self._count, data, tensor, lead, part)
        slot.place = self._room.take(slot.nbytes)
        try:
            slot.request = default_handle().submit_write(data, self._file, slot.place)
        except BaseException:
            self._room.give(slot.place, slot.nbytes)
            raise
        self._count += 1
        self.held += slot.nbytes
        self._slots[slot.serial] = slot
        self._by_storage.setdefault(slot.storage.cdata, []).append(slot)
        self._serials.append(slot.serial)
        self._in_flight[slot] = None
        try:
            if self.held > self.memory:
                self._make_room(0)
        except BaseException:
            # The caller does not get the slot, so it cannot drop it.
            self._dropped.append(slot)
            raise
        return slot

    @_locked
    def read(self, slot: Slot) -> torch.Tensor:
        """Return the bytes of a slot, and start reading the slots before it."""
        if self.forked:
            return self._read_in_child(slot)
        self._collect()
        self._raise_lost(slot)
        known = slot.data is not None
        if not known:
            self._position = slot.serial
            self._make_room(slot.nbytes)
            self._submit_read(slot)
        self._read_ahead(slot, known)
        data = slot.data
        if slot.request is not None and slot.reads:
            error = self._finish(slot)
            if error is not None:
                self._raise(slot, error, "read from")
        if self.held > self.memory and slot.serial in self._resident:
            self._forget(slot)
        assert data is not None
        return data

    def drop(self, slot: Slot) -> None:
        """Count one fewer user of a slot; may be called by the garbage collector."""
        if not self.forked:
            self._dropped.append(slot)
            self._settle()

    @_locked
    def drain(self) -> None:
        """Wait until nothing is in flight; errors are raised later, on use of the slot."""
        for slot in [] if self.forked else list(self._in_flight):
            self._finish(slot)

    def leave(self) -> None:
        """In a forked child, leave the file to the parent; bytes in memory stay usable."""
        self.forked = True
        self._finalizer.detach()
        self._lock = threading.Lock()
        self._dropped.clear()

    def _settle(self) -> None:
        """Free the dropped slots, unless the thread that has the lock will do it."""
        while self._dropped and call_if_free(self._lock, self._free_dropped):
            pass

    def _free_dropped(self) -> None:
        """Free slots without users; those in flight are freed when they are done."""
        while self._dropped and not self.forked:
            slot = self._dropped.popleft()
            slot.users -= 1
            if slot.users:
                continue
            del self._slots[slot.serial]
            others = self._by_storage[slot.storage.cdata]
            others.remove(slot)
            if not others:
                del self._by_storage[slot.storage.cdata]
            del self._serials[bisect.bisect_left(self._serials, slot.serial)]
            if slot.request is not None:
                slot.request.cancel()
                continue
            self._forget(slot)
            self._room.give(slot.place, slot.nbytes)

    def _forget(self, slot: Slot) -> None:
        """Release the memory of a slot that is not in flight."""
        if slot.data is None:
            return
        slot.data = None
        self.held -= slot.nbytes
        self._freed += slot.nbytes if slot.device.type == "cpu" else 0
        index = bisect.bisect_left(self._resident, slot.serial)
        if self._resident[index : index + 1] == [slot.serial]:
            del self._resident[index]

    def _collect(self) -> None:
        """Handle completed requests, in order, and raise the error of a failed write."""
        while self._in_flight:
            slot = next(iter(self._in_flight))
            assert slot.request is not None
            if not slot.request.done():
                return
            self._finish(slot)
            if not slot.reads and slot.users:
                self._raise_lost(slot)

    def _finish(self, slot: Slot) -> Exception | None:
        """Wait for the request of a slot, update its state, and return the error."""
        error = _outcome(slot)
        slot.request = None
        del self._in_flight[slot]
        if not slot.users:
            self._forget(slot)
            self._room.give(slot.place, slot.nbytes)
        elif error is None and not slot.changed():
            bisect.insort(self._resident, slot.serial)
        else:
            self._forget(slot)
            if not slot.reads:
                slot.error = error
        return error

    def _raise_lost(self, slot: Slot) -> None:
        """Raise OSError if the bytes of a slot could not be written."""
        if slot.error is not None:
            self._raise(slot, slot.error, "written to")

    def _raise(self, slot: Slot, error: Exception, done: str) -> NoReturn:
        # A new error: the request's own one would refer to this frame, a reference cycle.
        number = getattr(error, "errno", None) or errno.EIO
        words = (
            f"{os.strerror(number)}: {in_binary(slot.nbytes)} saved by the forward pass "
            f"could not be {done} a file in this folder"
        )
        raise OSError(number, words, self.folder) from error

    def _make_room(self, nbytes: int) -> None:
        """Release memory of slots for `nbytes` bytes, or wait for those in flight."""
        while self.held and self.held + nbytes > self.memory:
            if self._resident:
                self._forget(self._slots[self._farthest()])
            elif self._in_flight:
                slot = next(iter(self._in_flight))
                self._finish(slot)
                if not slot.reads and slot.users:
                    self._raise_lost(slot)
            else:
                return

    def _farthest(self) -> int:
        """Return the resident slot that is likely to be needed last.

        A backward pass goes from later slots to earlier ones.
        """
        last = self._resident[-1]
        return last if last > self._position else self._resident[0]

    def _submit_read(self, slot: Slot) -> None:
        data = memory_of(slot.nbytes, slot.device, slot.lead)
        slot.request = default_handle().submit_read(data, self._file, slot.place)
        slot.data, slot.reads = data, True
        self.held += slot.nbytes
        self._in_flight[slot] = None

    def _read_ahead(self, slot: Slot, known: bool) -> None:
        """Start reading the slots before one, the nearest first, while memory allows."""
        again = not known or slot.serial > self._position
        self._ahead = slot.serial if again else min(self._ahead, slot.serial)
        self._position = slot.serial
        index = bisect.bisect_left(self._serials, self._ahead)
        while index:
            index -= 1
            serial = self._serials[index]
            found = self._slots[serial]
            if found.data is None and found.error is None and not found.changed():
                if not self._can_hold(found):
                    return
                self._submit_read(found)
            self._ahead = serial

    def _can_hold(self, slot: Slot) -> bool:
        """Make room for a slot by releasing those that are likely to be needed later."""
        while self.held + slot.nbytes > self.memory:
            if not self._resident:
                return False
            serial = self._farthest()
            if slot.serial <= serial <= self._position:
                return False
            self._forget(self._slots[serial])
        return True

    def _read_in_child(self, slot: Slot) -> torch.Tensor:
        if slot.data is None or (slot.request is not None and slot.reads):
            raise RuntimeError(
                "this tensor was saved on disk before a fork(); only the parent can run "
                "the backward pass through it"
            )
        return slot.data


def _outcome(slot: Slot) -> Exception | None:
    """Wait for the request of a slot, and return its error or None."""
    assert slot.request is not None
    try:
        return slot.request.exception()
    except CancelledError as cancelled:
        # The traceback would refer to this frame, and so to the request: a cycle.
        return cancelled.with_traceback(None)


def _leave_all() -> None:
    for each in list(_live):
        each.leave()


call_in_child(_leave_all)
