"""Run rounds of everything for hours, and measure the resources that the process holds.

A round leaves nothing behind, so a process holds as much after many rounds as after the
first ones.  Rounds can leak on purpose, to test the check itself.
"""

import asyncio
import ctypes
import gc
import mmap
import os
import threading
import time
from concurrent.futures import CancelledError

import numpy as np

import nvmeio
from cases.seeded import each_case
from helpers import Guarded
from workloads.common import (
    descriptor_count,
    errors_of,
    gather_checked,
    make_file,
    read_checked,
    read_small,
    report,
    thread_count,
    write_checked,
)
from workloads.forks import fork, join, use_handle

SIZE = 300_000
# Resources whose counts must never change.
EXACT = ("descriptors", "threads", "locked", "pool", "pinned")
LIBC = ctypes.CDLL(None)


class Leaks:
    """Leaks that a round makes on purpose."""

    def __init__(self, size):
        self.size = size
        self.held = []
        self.over = threading.Event()

    def descriptor(self):
        self.held.append(os.dup(0))

    def thread(self):
        self.held.append(threading.Thread(target=self.over.wait, daemon=True))
        self.held[-1].start()

    def locked_page(self):
        page = mmap.mmap(-1, mmap.PAGESIZE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        LIBC.mlock(ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE))
        self.held.append(page)

    def memory(self):
        self.held.append(b"\1" * self.size)

    def pool_memory(self):
        self.held.append(nvmeio.empty(1, np.uint8))


def held_now():
    """Return the resources of this process: counts, bytes of the pool, and KiB."""
    with open("/proc/self/status") as file:
        status = dict(line.split(":", 1) for line in file)
    pool = nvmeio.pool_stats()
    return {
        "descriptors": descriptor_count(),
        "threads": thread_count(),
        "locked": int(status["VmLck"].split()[0]),
        "pool": pool["bytes_used"],
        "pinned": pool["bytes_locked"],
        "mapped": pool["bytes_mapped"],
        # Allocated memory only: the system decides about pages of files, and the pool keeps
        # what it has mapped.
        "memory": int(status["RssAnon"].split()[0]) - (pool["bytes_mapped"] >> 10),
    }


def held_at_rest(threads):
    """Return the resources of this process once it has `threads` threads again.

    The thread that calls callbacks ends a second after its last request, and any thread
    disappears a moment after it was joined.
    """
    gc.collect()
    LIBC.malloc_trim(0)
    for thread in threading.enumerate():
        if thread.name == "nvmeio-callbacks":
            # Another thread starts it, and may be about to.
            while not thread.is_alive() and thread in threading.enumerate():
                time.sleep(0.001)
            thread.join(60)
    deadline = time.monotonic() + 1
    while thread_count() != threads and time.monotonic() < deadline:
        time.sleep(0.001)
    return held_now()


class Round:
    """One of everything, in random order."""

    def __init__(self, draw, folder, engine, data):
        self.draw = draw
        self.folder = folder
        self.path = f"{folder}/soak"
        self.engine = engine
        self.data = data
        self.op = nvmeio.aio_handle(
            draw.choice((16384, 1 << 20)),
            draw.choice((2, 32)),
            engine=engine,
            bounce=draw.choice(("auto", "always", "never")),
            intra_op_parallelism=draw.choice((1, 2)),
        )
        self.handle = self.op.handle

    def transfer(self):
        write_checked(self.handle, f"{self.path}-written", self.data)
        self.handle.fsync(f"{self.path}-written")
        read_checked(self.handle, self.path, self.data[3:], 3, 1)
        read_small(self.handle, self.path, self.data[:4096])
        os.unlink(f"{self.path}-written")

    def gather(self):
        gather_checked(self.handle, self.path, self.data)

    def cancel(self):
        reads = [Guarded(SIZE) for _ in range(4)]
        requests = [self.handle.submit_read(read.array, self.path) for read in reads]
        for request in self.draw.sample(requests, 4):
            request.cancel()
        for request, read in zip(requests, reads, strict=True):
            try:
                request.wait()
            except CancelledError:
                continue
            assert read.content() == self.data

    def fail(self):
        buffer = bytearray(100)
        ended = [
            errors_of(self.handle.submit_read, buffer, f"{self.folder}/missing"),
            errors_of(lambda: self.handle.submit_read(buffer, self.path, SIZE).wait()),
            errors_of(self.handle.submit_write, buffer, self.folder),
            errors_of(self.handle.read, buffer, -1),
            errors_of(nvmeio.File, self.path, "x"),
        ]
        assert "ok" not in ended, ended

    def fork(self):
        join(fork(use_handle, self.handle, self.folder, f"child{os.getpid()}", self.engine))

    def watch(self):
        async def read():
            reads = [Guarded(SIZE) for _ in range(3)]
            await asyncio.gather(
                *(self.handle.submit_read(part.array, self.path) for part in reads)
            )
            assert all(part.content() == self.data for part in reads)

        asyncio.run(read())

    def wait_together(self):
        reads = [Guarded(SIZE) for _ in range(3)]
        requests = [self.handle.submit_read(read.array, self.path) for read in reads]
        called = []
        requests[0].add_done_callback(called.append)
        assert set(nvmeio.as_completed(requests)) == set(requests)
        assert called == requests[:1]

    def lock(self):
        memory = self.op.new_cpu_locked_tensor(SIZE, np.empty(0, np.uint8))
        self.handle.read(memory, self.path)
        assert memory.tobytes() == self.data
        if self.draw.random() < 0.5:
            self.op.free_cpu_locked_tensor(memory)

    def whole_files(self):
        nvmeio.aio_write(self.data, f"{self.path}-whole", 65536, 8, False, True, False)
        with nvmeio.File(f"{self.path}-whole") as file:
            read_checked(self.handle, file, self.data)
        nvmeio.memcpy(np.zeros(2 << 20, np.uint8), np.ones(2 << 20, np.uint8), threads=2)

    def drop_all(self):
        """Drop everything without waiting, polling or closing."""
        self.handle.submit_read(bytearray(SIZE), self.path)
        self.op.async_pread(bytearray(SIZE), self.path)
        if self.draw.random() < 0.5:
            self.op.close()


STEPS = (
    "transfer",
    "gather",
    "cancel",
    "fail",
    "fork",
    "watch",
    "wait_together",
    "lock",
    "whole_files",
)


def soak(
    first, count, folder, engine, warm_up, looks, steps=STEPS, leak=None, leak_bytes=0
):
    """Run rounds; report the resources at `looks` times after the warm-up."""
    data = make_file(f"{folder}/soak", SIZE)
    leaks = Leaks(leak_bytes)
    after = count - warm_up
    at = {warm_up + after * (number + 1) // looks for number in range(looks)}
    held, threads = [], None
    for number, draw in enumerate(each_case(first, count), 1):
        this = Round(draw, folder, engine, data)
        for step in draw.sample(steps, len(steps)):
            getattr(this, step)()
        this.drop_all()
        this = None
        if leak:
            getattr(leaks, leak)()
        if number in at:
            held.append(held_at_rest(threads))
            threads = held[-1]["threads"]
    report({"held": held})
