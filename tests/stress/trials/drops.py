"""What children do who let go of everything in any order while I/O is in flight.

The memory that is lent lies in an arena which stays mapped.  As soon as the library has let
go of a piece, and nobody else has it either, the piece is looked at (all bytes must have
come) and filled with canaries; a device that writes to it later is found out.
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
from helpers import PAGE, Guarded, pattern
from trials.seeded import each_trial
from workloads.common import make_file, report

PIECE = 256 << 10
PIECES = 32
SIZES = (512, PAGE, 65536, 65536 + 1, 200_000, PIECE)
REQUESTS = 8


class Lent(np.ndarray):
    """Memory of which one can tell when the last reference to it goes."""


def is_untouched(memory):
    """Tell whether whole pages are full of canaries."""
    return (memory.view(np.uint64) == Guarded.CANARY * 0x0101010101010101).all()


class Arena:
    """Pieces of memory; those that came back are full of canaries, and stay so."""

    def __init__(self):
        self.map = mmap.mmap(-1, PIECES * PIECE)
        self.memory = np.frombuffer(self.map, np.uint8)
        self.memory[:] = Guarded.CANARY
        # The longest unused first, so that late writes have time to show.
        self.free = list(range(PIECES))
        self.wrong = []
        self.returned = 0

    def lend(self, size, skew, judge, content=None):
        """Return an array; `judge` sees its bytes when all have let go of it."""
        number = self.free.pop(0)
        whole = self.memory[number * PIECE : (number + 1) * PIECE]
        assert is_untouched(whole), "written to after it was let go of"
        begin = skew if size + skew <= PIECE else 0
        piece = whole[begin : begin + size]
        if content is not None:
            piece[:] = content
        array = piece.view(Lent)
        weakref.finalize(array, self.take_back, number, begin, size, judge)
        return array

    def take_back(self, number, begin, size, judge):
        """Look at the bytes and the canaries round them; any thread, and no exception."""
        whole = self.memory[number * PIECE : (number + 1) * PIECE]
        complaint = judge(whole[begin : begin + size])
        whole[begin : begin + size] = Guarded.CANARY
        if not is_untouched(whole):
            complaint = "written to round the memory that was lent"
            whole[:] = Guarded.CANARY
        if complaint:
            self.wrong.append(complaint)
        self.returned += 1
        self.free.append(number)

    def check(self):
        """Nothing was wrong, and nobody has written to what is free."""
        # A thread that calls a callback has a request until it has returned.
        deadline = time.monotonic() + 20
        while len(self.free) < PIECES and time.monotonic() < deadline:
            time.sleep(0.001)
        assert not self.wrong, self.wrong
        assert len(self.free) == PIECES, "memory is still held when all is done"
        assert is_untouched(self.memory), "written to after it was let go of"


class Trial:
    """A handle, a file, and some requests of which all is let go in an order drawn."""

    def __init__(self, draw, arena, path, data, engine, counts):
        self.draw = draw
        self.arena = arena
        self.path = path
        self.data = data
        self.counts = counts
        self.written = []
        # For what is submitted because all had come: whether it had is not drawn, and the
        # numbers of everything else must not change by it.
        self.more = random.Random(draw.getrandbits(64))
        self.handle = nvmeio.Handle(
            block_size=draw.choice((PAGE, 16384, 1 << 20)),
            queue_depth=draw.choice((1, 4, 32)),
            engine=engine,
            workers=draw.choice((1, 1, 2)),
            bounce=draw.choice(("auto", "never", "always")),
        )
        self.source = nvmeio.File(path)
        self.target = nvmeio.File(f"{path}-target", "r+")
        # Names and what they hold: taken out one by one.
        self.held = {}
        self.cancelled = set()

    def start(self, number):
        """Submit one request of any kind, and hold on to it and its memory."""
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
            array = self.arena.lend(size, skew, self.judge_read(number, expected))
            request = self.handle.submit_read(array, self.source, begin)
            if way == "unheld":
                request = None
        self.held[f"array {number}"] = array
        if request is not None:
            self.held[f"request {number}"] = request

    def judge_read(self, number, expected):
        """Return what judges a read: all has come, unless it was cancelled."""

        def judge(found):
            if number in self.cancelled or np.array_equal(found, expected):
                return None
            return f"request {number} had not finished when its memory was let go of"

        return judge

    def write(self, number, size, skew):
        content = np.frombuffer(pattern(size, self.draw.randrange(1 << 30)), np.uint8)
        begin = number * PIECE + self.draw.choice((0, 0, 100))
        size = min(size, (number + 1) * PIECE - begin)
        content = content[:size]
        array = self.arena.lend(size, skew, lambda found: None, content)
        self.written.append((number, begin, content))
        return array, self.handle.submit_write(array, self.target, begin)

    def gather(self, number, skew):
        count = self.draw.choice((3, 250))
        offsets = np.array([self.draw.randrange(500) * 1000 for _ in range(count)])
        index = (offsets[:, None] + np.arange(1000)).ravel()
        judge = self.judge_read(number, self.data[index])
        array = self.arena.lend(count * 1000, skew, judge)
        return array, self.handle.submit_gather(self.source, offsets, 1000, array)

    def let_go(self):
        """Let go of all in any order, with a few other calls in between."""
        self.held |= {"source": self.source, "target": self.target}
        del self.source, self.target
        if self.draw.random() < 0.3:
            # A cycle, which only the collector of garbage takes apart.
            cycle = [self.handle, *self.held.values()]
            cycle.append(cycle)
        cycle = None
        order = ["handle", *self.held]
        for name in self.draw.sample(order, len(order)):
            if name == "handle":
                held_longer = self.let_go_of_handle()
                continue
            self.disturb(name)
            value = self.held.pop(name)
            if name in ("source", "target") and self.draw.random() < 0.5:
                value.close()
            value = None
            if self.draw.random() < 0.1:
                gc.collect()
        del held_longer

    def let_go_of_handle(self):
        """Drop or close it while something is in flight; return what is let go of later."""
        way = self.draw.choice(("closed", "dropped"))
        at_once = self.more.random() < 0.5
        started = []
        for number in range(REQUESTS, PIECES):
            if self.handle.pending:
                self.counts[f"{way}_in_flight"] += 1
                break
            # Aligned, so that it waits for the disk: what the page cache has may have come
            # before the caller gets to look, where processors are busy.
            begin = self.more.randrange((len(self.data) - PIECE) // PAGE) * PAGE
            expected = self.data[begin : begin + PIECE]
            array = self.arena.lend(PIECE, 0, self.judge_read(number, expected))
            started.append((array, self.handle.submit_read(array, self.path, begin)))
            array = None
        if at_once:
            started.clear()
        if way == "closed":
            self.close()
        self.handle = None
        # Where a cycle has it, it goes now.
        gc.collect()
        return started

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
        """Cancel, look at or wait for a request before it is let go of."""
        value = self.held[name]
        if not name.startswith("request"):
            return
        drawn = self.draw.random()
        if drawn < 0.2:
            # Before the call: its outcome may be seen by another thread at once.
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
        """What was written is in the file: canaries never are."""
        found = np.fromfile(f"{path}-target", np.uint8)
        for number, begin, content in self.written:
            part = found[begin : begin + len(content)]
            if number in self.cancelled:
                # Block by block it is there, or it was never begun.
                assert ((part == content) | (part == 0)).all()
            else:
                assert np.array_equal(part, content)


def drop(first, count, folder, engine):
    """Start requests, and let go of them, their memory, files and handle."""
    path = f"{folder}/drops"
    data = np.frombuffer(make_file(path, 1 << 20), np.uint8)
    counts = {"closed_in_flight": 0, "dropped_in_flight": 0}
    arena = Arena()
    # What is there now is no garbage, and need not be looked through each time.
    gc.freeze()
    for draw in each_trial(first, count):
        with open(f"{path}-target", "wb") as file:
            file.truncate(REQUESTS * PIECE)
        trial = Trial(draw, arena, path, data, engine, counts)
        for number in range(draw.randint(1, REQUESTS)):
            trial.start(number)
        trial.let_go()
        gc.collect()
        trial.check_written(path)
        arena.check()
    time.sleep(0.1)
    arena.check()
    report({**counts, "returned": arena.returned})
