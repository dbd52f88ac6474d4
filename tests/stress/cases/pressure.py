"""Move large files in a control group with little memory, page cache included."""

import errno
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import nvmeio
from cases.seeded import each_case
from helpers import MIB, PAGE
from workloads.common import report


def group_events(top="/sys/fs/cgroup", own="/proc/self/cgroup"):
    """Return how often this process's group has hit its limit, for either version."""
    groups = dict(
        line.strip().split(":", 2)[1:] for line in Path(own).read_text().splitlines()
    )
    if "memory" in groups:
        return int(Path(f"{top}/memory{groups['memory']}/memory.failcnt").read_text())
    events = Path(f"{top}{groups['']}/memory.events").read_text()
    return int(dict(map(str.split, events.splitlines()))["max"])


def content(size, seed, begin):
    """Return bytes of a file from an offset on; each word depends on its offset."""
    words = np.arange(begin // 8, (begin + size) // 8, dtype=np.uint64)
    return (words * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)).view(np.uint8)


class Mover:
    """Writes and reads files larger than the memory of the group."""

    def __init__(self, draw, folder, engine, file_bytes):
        self.draw = draw
        self.folder = folder
        self.file_bytes = file_bytes
        self.handle = nvmeio.Handle(
            block_size=draw.choice((65536, MIB)),
            queue_depth=draw.choice((4, 16)),
            engine=engine,
            bounce=draw.choice(("auto", "always", "never")),
            workers=draw.choice((1, 2)),
        )
        self.refused = 0

    def memory(self, size):
        """Return memory of the pool, or of numpy if the pool is full."""
        if self.draw.random() < 0.5:
            try:
                return nvmeio.empty(size, np.uint8)
            except MemoryError:
                self.refused += 1
        return np.empty(size, np.uint8)

    def insist(self, submit, *args):
        """Transfer; repeat while the pool reports that it has no memory for bounces."""
        while True:
            try:
                return submit(*args).wait()
            except OSError as error:
                if error.errno != errno.ENOMEM:
                    raise
                self.refused += 1

    def move(self, name, direct, chunk):
        """Write a file and read it back, in chunks in random order."""
        path = f"{self.folder}/{name}"
        seed = self.draw.randrange(1 << 30)
        begins = range(0, self.file_bytes, chunk)
        memory = self.memory(chunk)
        with nvmeio.File(path, "w", direct=direct) as file:
            for begin in self.draw.sample(begins, len(begins)):
                memory[:] = content(chunk, seed, begin)
                self.insist(self.handle.submit_write, memory, file, begin)
            self.handle.fsync(file)
        memory[:] = 0
        with nvmeio.File(path, direct=direct) as file:
            for begin in self.draw.sample(begins, len(begins)):
                self.insist(self.handle.submit_read, memory, file, begin)
                assert np.array_equal(memory, content(chunk, seed, begin))
            self.gather(file, seed)
        os.unlink(path)
        return 2 * self.file_bytes

    def gather(self, file, seed, count=256):
        offsets = np.array(
            [self.draw.randrange(self.file_bytes // PAGE) * PAGE for _ in range(count)]
        )
        out = np.zeros((count, 512), np.uint8)
        self.insist(self.handle.submit_gather, file, offsets, 512, out)
        expected = [content(512, seed, offset) for offset in offsets]
        assert np.array_equal(out, expected)


def hog(most, over):
    """Take all memory of the pool and release it, again and again."""
    refused = 0
    while not over.is_set():
        held = []
        try:
            while len(held) << 20 < most:
                held.append(nvmeio.empty(MIB, np.uint8))
        except MemoryError:
            refused += 1
        held.clear()
        time.sleep(0.001)
    return refused


def press(first, count, folder, engine, file_bytes, pool_bytes):
    """Move files with and without the page cache, while the pool is filled."""
    counts = {"met_limit": 0, "refused": 0, "bytes": 0}
    for draw in each_case(first, count):
        before = group_events()
        mover = Mover(draw, folder, engine, file_bytes)
        over = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            refusals = pool.submit(hog, 2 * pool_bytes, over)
            try:
                for name in draw.sample(("buffered", "direct"), 2):
                    direct = "auto" if name == "direct" else False
                    chunk = draw.choice((MIB // 4, MIB, 4 * MIB))
                    counts["bytes"] += mover.move(name, direct, chunk)
            finally:
                over.set()
        counts["refused"] += refusals.result() + mover.refused
        assert mover.handle.pending == 0
        mover.handle.close()
        counts["met_limit"] += group_events() - before
    report(counts)
