"""Work while descriptors, threads or locked memory run out and come back.

A case runs steps in random order under changing limits: each step succeeds with the right
bytes, or reports what has run out.  Then the limits are lifted, and every step succeeds
with the same handle.
"""

import asyncio
import contextlib
import ctypes
import errno
import os
import random
import resource
import time

import numpy as np

import nvmeio
from cases.seeded import each_case
from helpers import MIB, Guarded
from workloads.common import (
    gather_checked,
    make_file,
    read_checked,
    read_small,
    report,
    thread_count,
    write_checked,
)
from workloads.faults import can_start_thread
from workloads.forks import fork, join

SIZE = 300_000


def open_descriptors():
    """Return the open descriptors of this process."""
    found = set(map(int, os.listdir("/proc/self/fd")))
    # Without the descriptor of the listing.
    return {number for number in found if os.path.exists(f"/proc/self/fd/{number}")}


class Descriptors:
    """Leave few descriptors, or none."""

    refusal = errno.EMFILE
    limit = resource.RLIMIT_NOFILE

    def tighten(self, draw, utterly):
        used = open_descriptors()
        free = (number for number in range(1 << 16) if number not in used)
        for _ in range(0 if utterly else draw.randrange(7)):
            next(free)
        return next(free)

    def is_refused(self):
        taken = []
        try:
            while len(taken) < 7:
                taken.append(os.dup(0))
        except OSError as error:
            return error.errno == errno.EMFILE
        finally:
            for number in taken:
                os.close(number)


class Threads:
    """Allow no new thread and no new process."""

    refusal = errno.EAGAIN
    limit = resource.RLIMIT_NPROC

    def __init__(self):
        # Little locked memory too, so that rings meet its limit.
        hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (min(2 * MIB, hard), hard))

    def tighten(self, draw, utterly):
        return 0

    def is_refused(self):
        return not can_start_thread()


class LockedMemory:
    """Allow little locked memory, or none."""

    refusal = errno.ENOMEM
    limit = resource.RLIMIT_MEMLOCK

    def tighten(self, draw, utterly):
        return 0 if utterly else draw.choice((0, 4096, 1 << 16))

    def is_refused(self):
        page = np.zeros(1 << 17, np.uint8)
        address = ctypes.c_void_p(page.ctypes.data)
        return ctypes.CDLL(None).mlock(address, ctypes.c_size_t(len(page))) != 0


KINDS = {"descriptors": Descriptors, "threads": Threads, "memlock": LockedMemory}


class Scene:
    """DeepSpeed's op, the handle under it, and everything that is done with them."""

    def __init__(self, draw, folder, engine, scarcity, forks):
        self.draw = draw
        self.forks = forks
        self.path = f"{folder}/scarce"
        self.engine = engine
        self.scarcity = scarcity
        self.options = {
            "block_size": draw.choice((4096, 65536)),
            "queue_depth": draw.choice((4, 32)),
            "engine": engine,
            "intra_op_parallelism": draw.choice((1, 3)),
            "bounce": draw.choice(("auto", "always")),
        }
        self.data = make_file(self.path, SIZE, draw.randrange(99))
        self.op = nvmeio.aio_handle(**self.options)
        self.handle = self.op.handle
        # Made in advance, because an event loop opens descriptors.
        self.loop = asyncio.new_event_loop()
        self.descriptor = os.open(self.path, os.O_RDONLY)

    def close(self):
        self.op.close()
        self.loop.close()
        os.close(self.descriptor)

    def read(self):
        read_checked(self.handle, self.path, self.data, 0, self.draw.choice((0, 3)))

    def read_descriptor(self):
        read_checked(self.handle, self.descriptor, self.data[7:], 7)

    def read_many(self):
        """Read more files at once than there are descriptors, so that they take turns."""
        paths = [f"{self.path}-{number}" for number in range(12)]
        reads = [Guarded(1000) for _ in paths]
        for path in paths:
            if not os.path.exists(path):
                os.link(self.path, path)
        for path, guarded in zip(paths, reads, strict=True):
            self.op.async_pread(guarded.array, path)
        assert self.op.wait() == len(paths)
        assert all(guarded.content() == self.data[:1000] for guarded in reads)

    def read_at_once(self):
        read_small(self.handle, self.path, self.data[:5000])

    def write(self):
        write_checked(self.handle, f"{self.path}-written", self.data)
        self.handle.fsync(f"{self.path}-written")

    def gather(self):
        gather_checked(self.handle, self.path, self.data)

    def use_fresh(self):
        with nvmeio.aio_handle(**self.options) as op:
            read_checked(op.handle, self.path, self.data)

    def wait_for_several(self):
        reads = [Guarded(SIZE // 2) for _ in range(2)]
        requests = [
            self.handle.submit_read(read.array, self.path, index * SIZE // 2)
            for index, read in enumerate(reads)
        ]
        try:
            assert nvmeio.wait(requests).done == set(requests)
        finally:
            # The reads succeed even if the waiting failed.
            assert [request.wait() for request in requests] == [SIZE // 2] * 2
        assert b"".join(read.content() for read in reads) == self.data

    def await_it(self):
        guarded = Guarded(SIZE)
        request = self.handle.submit_read(guarded.array, self.path)

        async def awaited():
            return await request

        try:
            assert self.loop.run_until_complete(awaited()) == SIZE
        finally:
            assert request.wait() == SIZE
        assert guarded.content() == self.data

    def lock(self):
        memory = self.op.new_cpu_locked_tensor(SIZE, np.empty(0, np.uint8))
        self.handle.read(memory, self.path)
        assert memory.tobytes() == self.data

    def use_pool(self):
        """Transfer small blocks in memory of the pool."""
        memory = nvmeio.empty(SIZE, np.uint8)
        for _ in range(2):
            self.op.async_pread(memory, self.path)
            assert self.op.wait() == 1
            assert memory.tobytes() == self.data

    def copy(self):
        target = np.zeros(8 << 20, np.uint8)
        source = np.resize(np.frombuffer(self.data, np.uint8), 8 << 20)
        nvmeio.memcpy(target, source, threads=2)
        assert np.array_equal(target, source)

    def fork(self):
        """Fork a child that works under the limit and after it is lifted."""
        steps = [self.draw.choice(IN_CHILDREN) for _ in range(3)]
        if self.forks:
            join(fork(self.carry_on, steps))

    def carry_on(self, steps):
        for step in steps:
            self.attempt(step)
        lift(self.scarcity)
        for step in steps:
            step(self)

    def attempt(self, step):
        """Run a step; return true if it succeeded, false if it reported what is missing."""
        try:
            step(self)
        except OSError as error:
            if error.errno != self.scarcity.refusal:
                raise
            return False
        return True


IN_CHILDREN = (
    Scene.read,
    Scene.read_descriptor,
    Scene.read_at_once,
    Scene.gather,
    Scene.use_pool,
)
STEPS = (
    *IN_CHILDREN,
    Scene.read_many,
    Scene.write,
    Scene.use_fresh,
    Scene.wait_for_several,
    Scene.await_it,
    Scene.lock,
    Scene.copy,
    Scene.fork,
)


def pinned_by_closed():
    """Return how many bytes rings still pin for a moment after they are closed."""
    with open("/proc/self/status") as file:
        status = dict(line.split(":", 1) for line in file)
    return int(status["VmPin"].split()[0]) << 10


def lift(scarcity):
    """Raise the limit to its maximum."""
    hard = resource.getrlimit(scarcity.limit)[1]
    resource.setrlimit(scarcity.limit, (hard, hard))
    assert settled(pinned_by_closed, 0)


@contextlib.contextmanager
def in_want(scarcity, draw, utterly):
    """Lower the limit to little or nothing, and check that it is in force."""
    hard = resource.getrlimit(scarcity.limit)[1]
    resource.setrlimit(scarcity.limit, (scarcity.tighten(draw, utterly), hard))
    try:
        assert scarcity.is_refused()
        yield
    finally:
        lift(scarcity)


def settled(look, before):
    """Return whether a figure returns to its old value within some time."""
    deadline = time.monotonic() + 10
    while look() != before and time.monotonic() < deadline:
        time.sleep(0.001)
    return look() == before


def run_out(first, count, folder, engine, kind, forks):
    """Run steps with and without limits; nothing must be left behind.

    Without `forks` the same steps are drawn, but forks are not carried out.
    """
    scarcity = KINDS[kind]()
    lift(scarcity)
    counts = {"went_well": 0, "refused": 0}
    # Start what is started once, such as the team that copies, before any case.
    warm_up = Scene(random.Random(0), folder, engine, scarcity, forks)
    for step in STEPS:
        step(warm_up)
    warm_up.close()
    for draw in each_case(first, count):
        descriptors, threads = open_descriptors(), thread_count()
        scene = Scene(draw, folder, engine, scarcity, forks)
        for number in range(3):
            utterly = number == 0
            with in_want(scarcity, draw, utterly):
                # The first step cannot be done with nothing.
                must = [Scene.use_fresh] if utterly else []
                for step in must + draw.sample(STEPS, 5):
                    well = scene.attempt(step)
                    counts["went_well" if well else "refused"] += 1
            # The same handle as under the limit.
            draw.choice(STEPS)(scene)
        for step in draw.sample(STEPS, len(STEPS)):
            step(scene)
        assert scene.handle.pending == 0
        scene.close()
        assert settled(open_descriptors, descriptors)
        assert settled(thread_count, threads)
    report(counts)
