"""Drop every reference in random order while I/O is in flight.

The memory is in an arena that stays mapped.  When the last reference to a piece goes, the
piece is checked (all bytes must have arrived) and filled with canaries, which show if a
device writes to it later.
"""

import contextlib
import gc
import mmap
import random
import threading
import time
import weakref
from concurrent.futures import CancelledError

import numpy as np

import nvmeio
from cases.seeded import each_case
from helpers import PAGE, Guarded, pattern
from workloads.common import make_file, report

PIECE = 256 << 10
PIECES = 32
SIZES = (512, PAGE, 65536, 65536 + 1, 200_000, PIECE)
REQUESTS = 8


class Tracked(np.ndarray):
    """An array that supports weak references, to notice when its last reference goes."""


def is_untouched(memory):
    """Return whether whole pages are full of canaries."""
    return (memory.view(np.uint64) == Guarded.CANARY * 0x0101010101010101).all()


class Arena:
    """Pieces of memory; returned pieces are full of canaries, and must stay so."""

    def __init__(self):
        self.map = mmap.mmap(-1, PIECES * PIECE)
        self.memory = np.frombuffer(self.map, np.uint8)
        self.memory[:] = Guarded.CANARY
        # The piece that was unused the longest comes first, so that late writes can show.
        self.free = list(range(PIECES))
        self.wrong = []
        self.returned = 0

    def allocate(self, size, skew, judge, content=None):
        """Return an array; `judge` gets its bytes when the last reference goes."""
        number = self.free.pop(0)
        whole = self.memory[number * PIECE : (number + 1) * PIECE]
        assert is_untouched(whole), "written to after it was released"
        begin = skew if size + skew <= PIECE else 0
        piece = whole[begin : begin + size]
        if content is not None:
            piece[:] = content
        array = piece.view(Tracked)
        weakref.finalize(array, self.take_back, number, begin, size, judge)
        return array

    def take_back(self, number, begin, size, judge):
        """Check the bytes and the canaries round them; any thread may call this."""
        whole = self.memory[number * PIECE : (number + 1) * PIECE]
        complaint = judge(whole[begin : begin + size])
        whole[begin : begin + size] = Guarded.CANARY
        if not is_untouched(whole):
            complaint = "bytes round the borrowed memory were overwritten"
            whole[:] = Guarded.CANARY
        if complaint:
            self.wrong.append(complaint)
        self.returned += 1
        self.free.append(number)

    def check(self):
        """Check that nothing was wrong, and that free pieces are untouched."""
        # A thread that runs a callback keeps the request until the callback returns.
        deadline = time.monotonic() + 20
        while len(self.free) < PIECES and time.monotonic() < deadline:
            time.sleep(0.001)
        assert not self.wrong, self.wrong
        assert len(self.free) == PIECES, "memory is still held when all is done"
        assert is_untouched(self.memory), "written to after it was let go of"


class Case:
    """A handle, a file and some requests, dropped in random order."""

    def __init__(self, draw, arena, path, data, engine, counts):
        self.draw = draw
        self.arena = arena
        self.path = path
        self.data = data
        self.counts = counts
        self.written = []
        # Separate random numbers for steps that depend on timing, so that these do not
        # change the others.
        self.more = random.Random(draw.getrandbits(64))
        # What the page cache has would be there at once.
        with nvmeio.File(path) as file:
            direct = file.direct
        self.handle = nvmeio.Handle(
            direct=direct,
            block_size=draw.choice((PAGE, 16384, 1 << 20)),
            queue_depth=draw.choice((1, 4, 32)),
            engine=engine,
            workers=draw.choice((1, 1, 2)),
            bounce=draw.choice(("auto", "never", "always")),
        )
        self.source = nvmeio.File(path, direct=direct)
        self.target = nvmeio.File(f"{path}-target", "r+")
        # References by name, which are dropped one by one.
        self.held = {}
        self.cancelled = set()

    def start(self, number):
        """Submit one request of any kind, and keep it and its memory."""
        way = self.draw.choice(("read", "read", "unheld", "write", "gather"))
        size = self.draw.choice(SIZES)
        skew = self.draw.choice((0, 0, 1, 512))
        if way == "write":
            array, request = self.write(number, size, skew)
        elif way == "gather":
            array, request = self.gather(number, skew)
        else:
            begin = self.draw.randrange(len(self.data) - size)
            begin -= self.draw.choice((0, begin % PAGE))
            expected = self.data[begin : begin + size]
            array = self.arena.allocate(size, skew, self.judge_read(number, expected))
            request = self.handle.submit_read(array, self.source, begin)
            if way == "unheld":
                request = None
        self.held[f"array {number}"] = array
        if request is not None:
            self.held[f"request {number}"] = request

    def judge_read(self, number, expected):
        """Return a check that a read's bytes have all arrived, unless it was cancelled."""

        def judge(found):
            if number in self.cancelled or np.array_equal(found, expected):
                return None
            return f"request {number} had not finished when its memory was released"

        return judge

    def write(self, number, size, skew):
        content = np.frombuffer(pattern(size, self.draw.randrange(1 << 30)), np.uint8)
        begin = number * PIECE + self.draw.choice((0, 0, 100))
        size = min(size, (number + 1) * PIECE - begin)
        content = content[:size]
        array = self.arena.allocate(size, skew, lambda found: None, content)
        self.written.append((number, begin, content))
        return array, self.handle.submit_write(array, self.target, begin)

    def gather(self, number, skew):
        count = self.draw.choice((3, 250))
        offsets = np.array([self.draw.randrange(500) * 1000 for _ in range(count)])
        index = (offsets[:, None] + np.arange(1000)).ravel()
        judge = self.judge_read(number, self.data[index])
        array = self.arena.allocate(count * 1000, skew, judge)
        return array, self.handle.submit_gather(self.source, offsets, 1000, array)

    def drop_all(self):
        """Drop everything in random order, with a few other calls in between."""
        self.held |= {"source": self.source, "target": self.target}
        del self.source, self.target
        if self.draw.random() < 0.3:
            # A cycle, which only the garbage collector frees.
            cycle = [self.handle, *self.held.values()]
            cycle.append(cycle)
        cycle = None
        order = ["handle", *self.held]
        for name in self.draw.sample(order, len(order)):
            if name == "handle":
                held_longer = self.drop_handle()
                continue
            self.disturb(name)
            value = self.held.pop(name)
            if name in ("source", "target") and self.draw.random() < 0.5:
                value.close()
            value = None
            if self.draw.random() < 0.1:
                gc.collect()
        del held_longer

    def drop_handle(self):
        """Drop or close the handle with requests in flight; return what to drop later."""
        way = self.draw.choice(("closed", "dropped"))
        at_once = self.more.random() < 0.5
        started = self.reads_in_flight()
        self.counts[f"{way}_in_flight"] += 1
        if at_once:
            started.clear()
        if way == "closed":
            self.close()
        self.handle = None
        # If a cycle holds the handle, it goes now.
        gc.collect()
        return started

    def reads_in_flight(self):
        """Start reads until some are in flight; return what holds them."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            started = []
            for number in range(REQUESTS, PIECES):
                # Several at once: one may be done before a busy processor gets here.
                if number % 4 == 0 and self.handle.pending:
                    return started
                # Aligned, so that it waits for the disk.  On busy processors, bytes from
                # the page cache may arrive before the caller can look.
                begin = self.more.randrange((len(self.data) - PIECE) // PAGE) * PAGE
                expected = self.data[begin : begin + PIECE]
                array = self.arena.allocate(PIECE, 0, self.judge_read(number, expected))
                request = self.handle.submit_read(array, self.path, begin)
                started.append((array, request))
                array = request = None
            # All were done before this thread ran again: their pieces can be used again.
            started.clear()
        raise AssertionError("no read is ever in flight")

    def close(self):
        """Close in this thread, in another, or in two at once."""
        threads = [threading.Thread(target=self.handle.close) for _ in range(2)]
        started = threads[: self.draw.choice((0, 1, 2))]
        for thread in started:
            thread.start()
        self.handle.close()
        for thread in started:
            thread.join()

    def disturb(self, name):
        """Cancel, poll or wait for a request before it is dropped."""
        value = self.held[name]
        if not name.startswith("request"):
            return
        drawn = self.draw.random()
        if drawn < 0.2:
            # Recorded before the call, because another thread may see its outcome at once.
            number = int(name.split()[1])
            self.cancelled.add(number)
            if not value.cancel():
                self.cancelled.discard(number)
        elif drawn < 0.3:
            value.done()
        elif drawn < 0.4:
            value.add_done_callback(lambda request: None)
        elif drawn < 0.5:
            with contextlib.suppress(TimeoutError, CancelledError):
                value.wait(0)

    def check_written(self, path):
        """Check that the file has the written bytes, and never canaries."""
        found = np.fromfile(f"{path}-target", np.uint8)
        for number, begin, content in self.written:
            part = found[begin : begin + len(content)]
            if number in self.cancelled:
                # Each block was written wholly, or never begun.
                assert ((part == content) | (part == 0)).all()
            else:
                assert np.array_equal(part, content)


def drop(first, count, folder, engine):
    """Start requests, and drop them, their memory, files and handle."""
    path = f"{folder}/drops"
    data = np.frombuffer(make_file(path, 1 << 20), np.uint8)
    counts = {"closed_in_flight": 0, "dropped_in_flight": 0}
    arena = Arena()
    # Objects that exist now are no garbage; the collector need not scan them each time.
    gc.freeze()
    for draw in each_case(first, count):
        with open(f"{path}-target", "wb") as file:
            file.truncate(REQUESTS * PIECE)
        case = Case(draw, arena, path, data, engine, counts)
        for number in range(draw.randint(1, REQUESTS)):
            case.start(number)
        case.drop_all()
        gc.collect()
        case.check_written(path)
        arena.check()
    time.sleep(0.1)
    arena.check()
    report({**counts, "returned": arena.returned})
