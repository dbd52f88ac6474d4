"""Bytes that go from memory to a file without a name, and come back ahead of need.

A slot is a piece of that file.  What the bytes are, and who needs them when, is known to
activations.py; here memory is bounded, room in the file is found, and reads go ahead.
"""

import bisect
import contextlib
import errno
import os
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import NoReturn

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from nvmeio._arguments.units import in_binary
from nvmeio._events.forks import call_in_child
from nvmeio._memory.heap import give_back
from nvmeio._native.file import File, open_unnamed
from nvmeio._native.handle import Handle
from nvmeio._native.request import Request
from nvmeio.torch._offload.plan import pages
from nvmeio.torch.memory import empty

__all__ = ["Slot", "SlotFile", "memory_of"]

# glibc keeps what is freed in its heap, and small things in it: without this the process
# grew by 1323 MiB while 28 were held (64 x 3 tensors of 7 MiB, 2026-11-25).
TRIM_BYTES = 32 << 20
_live: weakref.WeakSet["SlotFile"] = weakref.WeakSet()


def memory_of(nbytes: int, device: torch.device, lead: int) -> torch.Tensor:
    """Make a tensor of bytes that begins so far behind an aligned address.

    The pool's memory needs no bounce, and its pages are there: elementwise steps took 1.70
    times as long as computing alone, and 2.03 times with torch's own memory (2026-11-25).
    """
    if device.type == "cpu":
        with contextlib.suppress(MemoryError):
            return empty(lead + nbytes, dtype=torch.uint8)[lead:]
    storage = torch.UntypedStorage(lead + nbytes, device=device)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(
        storage, lead, (nbytes,), (1,)
    )


class Slot:
    """Bytes that are in the file, in memory, or on the way.

    ``data`` has them while they are in memory, ``request`` what is in flight, and ``reads``
    tells which way.  They begin ``lead`` bytes behind an aligned address.  ``part`` says
    which bytes of ``storage`` they are, if not all, and ``address`` where it began.
    ``witness`` shares the version counter of the saved tensor, and has no memory;
    ``version`` is what it was then.  ``users`` counts the graph nodes that need them.
    ``error`` is why they were lost.
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
        self.storage, self.address = StorageWeakRef(storage), storage.data_ptr()
        # An assignment to .data leaves the counter alone.
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
        """Tell whether the tensor was changed in place since it was saved."""
        return bool(self.witness._version != self.version)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor of the same storage is as it was when this was saved."""
        version = tensor._version
        if not version == self.version == self.witness._version:
            return False
        # A storage that was resized has other memory.
        if tensor.untyped_storage().data_ptr() != self.address:
            return False
        # What .data gives has the memory, but counts by itself.  Nobody else can look now.
        set_version = torch._C._autograd._unsafe_set_version_counter
        set_version((tensor,), (version + 1,))
        same = self.changed()
        set_version((tensor,), (version,))
        return same


class _Room:
    """Places in a file: the first gap that is large enough."""

    def __init__(self) -> None:
        self._gaps: list[tuple[int, int]] = []
        self._end = 0

    def take(self, nbytes: int) -> int:
        """Return where there is room for so many bytes."""
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
        """Take back a place, and join it with the gaps at its ends."""
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


class SlotFile:
    """All slots of one context, in one file, with one handle.

    Thread-safe.  Slots have ``memory`` bytes in memory at most, on the way or waiting to be
    asked for; a larger slot is in memory alone.  Each saved tensor refers to this, so the
    file and the handle go with the last one.  No destructor waits for the lock: a call that
    is under way sees to the slots that are dropped meanwhile.
    """

    def __init__(self, folder: str, memory: int) -> None:
        self.folder, self.memory = folder, memory
        self.held = self._freed = 0
        self._file = _unnamed(folder)
        self._handle = Handle()
        self._room = _Room()
        self._lock = threading.Lock()
        self._dropped: deque[Slot] = deque()
        self._slots: dict[int, Slot] = {}
        # A weak reference keeps the address of a storage from being used again.
        self._by_storage: dict[int, list[Slot]] = {}
        # Their serials in order; and of those in memory whose bytes are in the file too.
        self._serials: list[int] = []
        self._resident: list[int] = []
        # In the order in which they were submitted.
        self._in_flight: dict[Slot, None] = {}
        self._count = 0
        # Where the forward or the backward pass is, and how far reads have gone ahead.
        self._position = self._ahead = 0
        self.forked = False
        _live.add(self)

    def find(self, part: object, tensor: torch.Tensor, end: int) -> Slot | None:
        """Return what has a storage's first bytes, or a part; count one more user."""
        with self._locked():
            for slot in self._by_storage.get(tensor.untyped_storage()._cdata, ()):
                known = slot.part == part and slot.error is None and slot.nbytes >= end
                if known and slot.holds(tensor):
                    slot.users += 1
                    return slot
        return None

    def write(
        self, data: torch.Tensor, tensor: torch.Tensor, lead: int = 0, part: object = None
    ) -> Slot:
        """Send bytes of a tensor to the file; waits only while too many are in memory."""
        with self._locked():
            self._collect()
            self._position = self._ahead = self._count
            self._make_room(data.nbytes)
            slot = Slot(self._count, data, tensor, lead, part)
            slot.place = self._room.take(slot.nbytes)
            try:
                slot.request = self._handle.submit_write(data, self._file, slot.place)
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
                # Nobody else has it to drop it.
                self._dropped.append(slot)
                raise
        return slot

    def read(self, slot: Slot) -> torch.Tensor:
        """Return the bytes of a slot, and have those read that come before it."""
        with self._locked():
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
        """Count one user of a slot less; may be called by the garbage collector."""
        if not self.forked:
            self._dropped.append(slot)
            self._settle()

    def drain(self) -> None:
        """Wait until nothing is in flight; what has failed is raised by who needs it."""
        with self._locked():
            for slot in [] if self.forked else list(self._in_flight):
                self._finish(slot)

    def leave(self) -> None:
        """Be a forked child's: the file is the parent's, and what is in memory is here."""
        self.forked = True
        self._lock = threading.Lock()
        self._dropped.clear()

    def __del__(self) -> None:
        # Forked children may have the file open for long.
        with contextlib.suppress(AttributeError, OSError, TypeError, ValueError):
            if not self.forked:
                # What fails now is nobody's concern.
                for slot in self._in_flight:
                    _outcome(slot)
                self._handle.close()
                self._file.truncate(0)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            with self._lock:
                self._free_dropped()
                yield
        finally:
            # What was dropped meanwhile, for the lock was taken.
            self._settle()
            if self._freed > TRIM_BYTES:
                self._freed = 0
                give_back()

    def _settle(self) -> None:
        """See to slots that were dropped, unless somebody is about to."""
        while self._dropped and self._lock.acquire(blocking=False):
            try:
                self._free_dropped()
            finally:
                self._lock.release()

    def _free_dropped(self) -> None:
        """Free the slots that nobody needs; those in flight when they are done."""
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
        """Take note of what has ended, in order, and raise what has failed."""
        while self._in_flight:
            slot = next(iter(self._in_flight))
            assert slot.request is not None
            if not slot.request.done():
                return
            self._finish(slot)
            if not slot.reads and slot.users:
                self._raise_lost(slot)

    def _finish(self, slot: Slot) -> Exception | None:
        """Wait for the end of a request, and return what went wrong."""
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
        """Raise why the bytes of a slot did not get to the file, if they did not."""
        if slot.error is not None:
            self._raise(slot, slot.error, "written to")

    def _raise(self, slot: Slot, error: Exception, done: str) -> NoReturn:
        # A new one: the request's own would refer to this frame, and so to itself.
        number = getattr(error, "errno", None) or errno.EIO
        words = (
            f"{os.strerror(number)}: {in_binary(slot.nbytes)} that the forward pass has "
            f"saved could not be {done} a file in this folder"
        )
        raise OSError(number, words, self.folder) from error

    def _make_room(self, nbytes: int) -> None:
        """Have slots give their memory back, and wait for those in flight if they must."""
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
        """Return which of those in memory is likely to be asked for last.

        A backward pass goes from later ones to earlier ones.
        """
        last = self._resident[-1]
        return last if last > self._position else self._resident[0]

    def _submit_read(self, slot: Slot) -> None:
        data = memory_of(slot.nbytes, slot.device, slot.lead)
        slot.request = self._handle.submit_read(data, self._file, slot.place)
        slot.data, slot.reads = data, True
        self.held += slot.nbytes
        self._in_flight[slot] = None

    def _read_ahead(self, slot: Slot, known: bool) -> None:
        """Read the slots before one, the nearest first, as far as there is memory."""
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
        """Make room for a slot at the cost of those that are likely to be needed later."""
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
                "this tensor was saved on disk before a fork(); only the parent can go "
                "backward through it"
            )
        return slot.data


def _outcome(slot: Slot) -> Exception | None:
    """Wait for the end of a request, and return what went wrong."""
    assert slot.request is not None
    try:
        return slot.request.exception()
    except CancelledError as cancelled:
        # It would refer to this frame, and so to the request that has it.
        return cancelled.with_traceback(None)


def _unnamed(folder: str) -> File:
    """Make a file that no name leads to."""
    try:
        return open_unnamed(folder)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    # The file system has no files without a name.
    descriptor, path = tempfile.mkstemp(prefix=".nvmeio-", suffix=".tmp", dir=folder)
    try:
        os.close(descriptor)
        return File(path, "r+")
    finally:
        os.unlink(path)


def _leave_all() -> None:
    for each in list(_live):
        each.leave()


call_in_child(_leave_all)
