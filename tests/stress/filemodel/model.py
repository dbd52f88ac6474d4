"""A file that is read and written, and a model in memory of its contents.

Requests in flight are not ordered: a read beside a write may see the old or the new bytes.
Overlapping writes are never in flight together, because either may come last.
"""

import errno
import time
from collections import Counter
from concurrent.futures import CancelledError

import numpy as np

from filemodel.fences import Memory
from filemodel.inflight import InFlight
from filemodel.regimes import Injected
from workloads.common import Faults
from workloads.forks import join

IN_FLIGHT_MAX = 48


class World:
    """The state that a model shares with those of its forked children."""

    def __init__(self, engine, direct, noise, errors, control):
        self.engine = engine
        self.direct = direct
        self.noise = noise
        self.injected = [Injected(getattr(errno, name)) for name in errors]
        self.control = Faults(control) if control else None
        self.regime = None  # the faults of FUSE that are set now
        self.figures = Counter()
        self.fired = Counter()
        self.warnings = []

    def regimes(self):
        """The faults that may strike now."""
        return [*self.injected, *([self.regime] if self.regime else [])]

    def count(self, handle):
        """Add up a handle's bytes by route."""
        stats = handle.stats()
        assert stats["engine"] == self.engine
        for way in ("bytes_direct", "bytes_buffered", "bytes_bounced"):
            self.figures[way] += stats[way]

    def plain(self, path):
        """Return the name under which a file is read without faults."""
        return f"{path}.plain" if self.control else path


def number_of(call):
    """Call a function; return the errno of its OSError, or None.

    Not the error itself, because its traceback would keep the arguments alive.
    """
    try:
        call()
    except OSError as error:
        return error.errno
    return None


def end_of(request):
    """Wait for a request; return its error, or None."""
    try:
        assert request.wait() == request.nbytes
    except (OSError, CancelledError) as error:
        return error
    return None


class FileModel:
    """Runs transfers, and checks their results."""

    def __init__(self, world, path, op, limit):
        self.world = world
        self.path = path
        self.op = op
        self.files = {}  # the names of the file: path, descriptor, File
        self.children = []  # that have been forked
        self.content = np.zeros(limit, np.uint8)
        self.size = 0
        self.settled = 0  # the size without requests in flight
        self.in_flight = []
        self.dropped = []  # in flight, and nothing waits for it
        self.uncertain = []  # writes that failed, or were cancelled
        self.inherited = []  # of a parent

    @property
    def handle(self):
        """The handle of the op, which has the only reference."""
        return self.op.handle

    def is_in_the_way(self, transfer):
        """Return whether something must end before this transfer can begin."""
        writing = transfer.op == "write"
        if len(self.in_flight) + len(self.dropped) >= IN_FLIGHT_MAX:
            return True
        if not writing and transfer.end > self.settled:
            return True
        race = transfer.race and transfer.way != "validate"
        others = [other for other in [*self.in_flight, *self.dropped] if other.writes]
        reads = [] if race or not writing else self.in_flight
        waited = [*self.uncertain, *reads, *(others if writing or not race else [])]
        return any(other.meets(transfer) for other in waited)

    def prepare(self, transfer, named):
        """Make the memory; record what it and the file should hold at the end."""
        memory = Memory(transfer.span, *transfer.memory)
        regimes = self.world.regimes()
        flight = InFlight(transfer, named, memory, regimes, self.world.regime)
        if transfer.op == "read":
            for offset, place, size in transfer.records:
                memory.expected[place : place + size] = self.content[offset : offset + size]
            for other in [*self.in_flight, *self.dropped, *self.inherited]:
                if other.writes and other.meets(transfer):
                    flight.others += other.before
            self.world.figures["raced"] += bool(flight.others)
            return flight
        memory.fill(self.world.noise[transfer.noise : transfer.noise + transfer.span])
        for offset, place, size in transfer.records:
            target = self.content[offset : offset + size]
            flight.before.append((offset, target.copy()))
            target[:] = memory.expected[place : place + size]
        self.size = max(self.size, transfer.end)
        for other in [*self.in_flight, *self.dropped]:
            if not other.writes and other.meets(transfer):
                other.others += [
                    (offset, memory.expected[place : place + size])
                    for offset, place, size in transfer.records
                ]
        return flight

    def begin(self, transfer):
        """Run or start a transfer; return it if it is in flight."""
        if self.is_in_the_way(transfer):
            self.settle()
        if transfer.op == "read" and transfer.end > self.size:
            self.fail_past_end(transfer)
            return None
        flight = self.prepare(transfer, self.files[transfer.file])
        try:
            flight.request = self.submit(flight)
        except OSError as error:
            self.ended(flight, error)
            return None
        if flight.request is None and transfer.way != "async":
            self.ended(flight, None)
            return None
        self.in_flight.append(flight)
        return flight

    def submit(self, flight):
        """Submit a transfer by its API; return its request, if there is one."""
        transfer, buffer, named = flight.transfer, flight.memory.buffer, flight.named
        if transfer.many:
            return self.submit_many(transfer, buffer, named)
        ((offset, _, _),) = transfer.records
        if transfer.way == "request":
            return getattr(self.handle, f"submit_{transfer.op}")(buffer, named, offset)
        if transfer.way == "async":
            assert getattr(self.op, f"async_p{transfer.op}")(buffer, named, offset) == 0
            return None
        # The comparison of `validate` does not retry passing errors.
        passing = self.world.regime is not None and self.world.regime.passes
        if transfer.way == "validate" and not passing:
            call = getattr(self.op, f"p{transfer.op}")
            assert call(buffer, named, True, False, offset) == 1
        else:
            assert getattr(self.handle, transfer.op)(buffer, named, offset) == transfer.span
        return None

    def submit_many(self, transfer, buffer, named):
        offsets, places, sizes = np.array(transfer.records, np.int64).reshape(-1, 3).T
        reading = transfer.op == "read"
        options = {"max_gap": transfer.max_gap} if reading else {}
        if transfer.placed:
            options["out_offsets" if reading else "buffer_offsets"] = places
        name = "gather" if reading else "scatter"
        if transfer.way == "request":
            submit = getattr(self.handle, f"submit_{name}")
            return submit(named, offsets, sizes, buffer, **options)
        call = getattr(self.handle, name)
        assert call(named, offsets, sizes, buffer, **options) == sizes.sum()
        return None

    def fail_past_end(self, transfer):
        """Check that a transfer past the end of the file moves nothing."""
        memory = Memory(transfer.span, *transfer.memory)
        named = self.files[transfer.file]
        flight = InFlight(transfer, named, memory, self.world.regimes())
        if transfer.many:
            number = number_of(lambda: self.submit_many(transfer, memory.buffer, named))
            assert number == errno.ENODATA, f"{number}: {transfer}"
        else:
            ((offset, _, _),) = transfer.records
            number = number_of(lambda: self.handle.read(memory.buffer, named, offset))
            assert number in {errno.ENODATA, *flight.errors()}, f"{number}: {transfer}"
        assert not flight.look(memory.whole)
        self.world.figures["past the end"] += 1

    # How operations end.

    def ended(self, flight, error):
        """Check the result of a transfer that has ended."""
        if flight in self.in_flight:
            self.in_flight.remove(flight)
        world, transfer = self.world, flight.transfer
        if error is None:
            flight.note(world.regime)
            assert not flight.cancelled, f"cancelled, and yet done: {flight}"
            assert not flight.must_fail(world.regime), f"a fault was swallowed: {flight}"
            assert not flight.doomed, f"lost data was forgotten: {flight}"
            assert all(other.request.done() for other in flight.earlier)
        elif isinstance(error, CancelledError):
            assert flight.cancelled, f"cancelled by nobody: {flight}"
            flight.failed = tuple(range(len(transfer.records)))
            world.figures["cancelled"] += 1
        else:
            flight.accept(error, world.regime)
            if transfer.op == "fsync":
                # Not of the file that is open now: it may be another.
                flight.lost.add(error.errno)
            if error.errno not in {each.error for each in world.injected}:
                flight.note(world.regime, error)
            world.figures["failed"] += 1
        if flight.memory is not None:
            wrong = flight.look(flight.memory.whole)
            assert not wrong, f"{wrong}: {flight}"
            world.figures["bytes"] += transfer.span
        if flight.writes:
            self.landed(flight)

    def end_tracked(self, call):
        """Wait with `call` for all async_* transfers; its error may be of any of them."""
        tracked = [flight for flight in self.in_flight if flight.request is None]
        counts = []
        number = number_of(lambda: counts.append(call()))
        if number is None:
            assert counts[0] in (None, len(tracked))
        else:
            possible = set().union(*(flight.errors() for flight in tracked))
            assert number in possible, f"{errno.errorcode[number]} of {tracked}"
        for flight in tracked:
            # The error does not tell which of them failed.
            possible = flight.errors() if number else None
            perhaps = OSError(min(possible), "perhaps", flight.path) if possible else None
            self.ended(flight, perhaps)

    def settle(self):
        """Wait for everything, and adopt the bytes that failed writes left."""
        self.end_tracked(self.op.wait)
        for flight in list(self.in_flight):
            self.ended(flight, end_of(flight.request))
        while self.handle.pending:
            time.sleep(0)
        self.end_dropped()
        self.join_children()
        if self.uncertain:
            self.adopt()
        self.settled = self.size

    def join_children(self):
        while self.children:
            join(self.children.pop())

    def end_dropped(self):
        """Check that dropped transfers were completed and released."""
        perhaps = [flight for flight in self.dropped if flight.errors()]
        forced = [flight for flight in perhaps if flight.must_fail(self.world.regime)]
        for flight in self.dropped:
            assert not flight.verdict, f"{flight.verdict}: {flight}"
            if not self.world.injected:
                flight.note(self.world.regime)
            if flight.writes:
                self.landed(flight)
        told = [each for each in self.world.warnings if each.category is RuntimeWarning]
        self.world.warnings.clear()
        assert len(forced) <= len(told) <= len(perhaps), [str(each) for each in told]
        self.world.figures["warnings"] += len(told)
        self.dropped.clear()

    def landed(self, flight):
        """Record the effect of a write on the file's size, and on its bytes."""
        if flight.failed:
            self.uncertain.append(flight)
        ends = [
            offset + size
            for index, (offset, _, size) in enumerate(flight.transfer.records)
            if size and index not in flight.failed
        ]
        self.settled = max([self.settled, *ends])

    def adopt(self):
        """Adopt the bytes that failed writes left; each must be old or new."""
        found = np.fromfile(self.world.plain(self.path), np.uint8)
        assert self.settled <= len(found) <= self.size, (
            f"{len(found)} bytes are left, of {self.settled} to {self.size}, after "
            f"{self.uncertain}"
        )
        self.content[len(found) :] = 0
        self.size = len(found)
        for flight in self.uncertain:
            for index in flight.failed:
                offset, place, size = flight.transfer.records[index]
                piece = found[offset : offset + size]
                old = flight.before[index][1][: len(piece)]
                new = flight.memory.expected[place : place + len(piece)]
                mixed = (piece == old) | (piece == new)
                assert mixed.all(), f"neither old nor new at {np.argmin(mixed)}: {flight}"
                self.content[offset : offset + len(piece)] = piece
        self.uncertain.clear()

    def compare(self):
        """Check the contents of the file."""
        found = np.fromfile(self.world.plain(self.path), np.uint8)
        assert len(found) == self.size
        wrong = np.flatnonzero(found != self.content[: self.size])
        if len(wrong):
            raise AssertionError(f"{len(wrong)} bytes are wrong, from {wrong[0]} on")
        self.world.figures["bytes"] += self.size
