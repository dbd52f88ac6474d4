"""Fork with a handle in every state that it can be in.

A state is a context manager.  It brings the scene's handle into the state, yields while
children are forked, and then checks that the parent's work went on.
"""

import asyncio
import contextlib
import errno
import gc
import os
import random
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor

import numpy as np

import nvmeio
from cases.seeded import each_case
from helpers import Guarded
from workloads.common import Faults, descriptor_count, make_file, read_checked, report
from workloads.forks import fork, join, use_handle

SIZE = 256 << 10
CHILDREN = 8


class Scene:
    """A handle, and a file on a disk that can be held."""

    def __init__(self, draw, folder, control, engine):
        self.path = f"{folder}/scene"
        self.faults = Faults(control)
        self.engine = engine
        self.data = make_file(self.path, SIZE, draw.randrange(99))
        # What the page cache has would not wait for the drive.
        self.file = nvmeio.File(self.path, direct=True)
        self.old = []
        self.handle = nvmeio.Handle(
            block_size=65536,
            queue_depth=draw.choice((1, 2, 16)),
            engine=engine,
            workers=draw.choice((1, 2)),
        )

    @contextlib.contextmanager
    def held(self):
        """Hold reads, so that requests stay in flight or queued."""
        self.faults.set(read={"held": True})
        try:
            yield
        finally:
            self.fired = self.faults.fired()["read.held"]
            self.faults.set()

    def read(self):
        """Submit a read; return its memory and the request, which children inherit."""
        guarded = Guarded(SIZE)
        request = self.handle.submit_read(guarded.array, self.file)
        self.old.append(request)
        return guarded, request

    def finish(self, *reads):
        """Wait for reads, and check their bytes."""
        for guarded, request in reads:
            assert request.wait() == SIZE
            assert guarded.content() == self.data


@contextlib.contextmanager
def never_used(scene):
    yield
    read_checked(scene.handle, scene.file, scene.data)


@contextlib.contextmanager
def idle(scene):
    scene.finish(scene.read(), scene.read())
    scene.handle.read(bytearray(100), scene.file)
    yield


@contextlib.contextmanager
def queued_and_in_flight(scene):
    with scene.held():
        reads = [scene.read() for _ in range(6)]
        scene.faults.await_waiting()
        assert scene.handle.pending == 6
        yield
        assert scene.handle.pending == 6
    scene.finish(*reads)


@contextlib.contextmanager
def done_and_not_looked_at(scene):
    reads = [scene.read() for _ in range(3)]
    while scene.handle.pending:
        time.sleep(0.001)
    yield
    scene.finish(*reads)


@contextlib.contextmanager
def cancelled(scene):
    with scene.held():
        reads = [scene.read() for _ in range(6)]
        scene.faults.await_waiting()
        dropped = [request.cancel() for _, request in reads]
        yield
    # Requests whose blocks were all submitted to the kernel could not be cancelled.
    for read, was_dropped in zip(reads, dropped, strict=True):
        if was_dropped:
            with contextlib.suppress(CancelledError):
                read[1].wait()
                raise AssertionError("cancelled, and yet it succeeds")
        else:
            scene.finish(read)


@contextlib.contextmanager
def waited_for(scene):
    unheld, small = Guarded(SIZE), Guarded(5000)
    with ThreadPoolExecutor(5) as pool:
        with scene.held():
            reads = [scene.read() for _ in range(3)]
            scene.handle.submit_read(unheld.array, scene.file)
            waits = [
                pool.submit(reads[0][1].wait),
                pool.submit(reads[0][1].wait),
                pool.submit(nvmeio.wait, [reads[1][1], reads[2][1]]),
                pool.submit(scene.handle.drain),
                pool.submit(scene.handle.read, small.array, scene.file),
            ]
            scene.faults.await_waiting()
            yield
            assert not any(wait.done() for wait in waits)
        assert [waits[0].result(), waits[1].result()] == [SIZE, SIZE]
        assert waits[2].result().done == {reads[1][1], reads[2][1]}
        assert waits[3].result() is None
        assert waits[4].result() == 5000
    scene.finish(*reads)
    assert unheld.content() == scene.data
    assert small.content() == scene.data[:5000]


@contextlib.contextmanager
def gathering(scene):
    offsets = np.arange(60)[::-1] * 4096
    out, other = Guarded(60 * 512), Guarded(60 * 512)
    # Otherwise the page cache would serve the gather, which then could not be held.
    file = nvmeio.File(scene.file.path, direct=True)
    with ThreadPoolExecutor(1) as pool:
        with scene.held():
            gather = pool.submit(
                scene.handle.gather, file, offsets, 512, out.array, max_gap=0
            )
            scene.old.append(scene.handle.submit_gather(file, offsets, 512, other.array))
            scene.faults.await_waiting()
            yield
            assert not gather.done()
        assert gather.result() == scene.old[-1].wait() == 60 * 512
    expected = b"".join(scene.data[offset : offset + 512] for offset in offsets)
    assert out.content() == other.content() == expected


async def awaited(request):
    return await request


@contextlib.contextmanager
def watched(scene):
    loop = asyncio.new_event_loop()
    with scene.held():
        guarded, request = scene.read()
        task = loop.create_task(awaited(request))
        loop.run_until_complete(asyncio.sleep(0))
        scene.faults.await_waiting()
        yield
        assert not task.done()
    assert loop.run_until_complete(task) == SIZE
    loop.close()
    assert guarded.content() == scene.data


@contextlib.contextmanager
def closing(scene):
    with ThreadPoolExecutor(1) as pool:
        with scene.held():
            read = scene.read()
            scene.faults.await_waiting()
            close = pool.submit(scene.handle.close)
            time.sleep(0.05)
            yield
            assert not close.done()
        close.result()
    scene.finish(read)


@contextlib.contextmanager
def stopping(scene):
    """The workers stop; some rings and contexts take a while."""
    with ThreadPoolExecutor(1) as pool:
        with scene.held():
            read = scene.read()
            scene.faults.await_waiting()
            close = pool.submit(scene.handle.close)
            time.sleep(0.05)
        yield
        close.result()
    scene.finish(read)


@contextlib.contextmanager
def closed(scene):
    scene.finish(scene.read())
    scene.handle.close()
    yield


def descriptors(process="self"):
    """Return the open files of this process by descriptor, without the listing itself."""
    found = {}
    for name in os.listdir(f"/proc/{process}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found[int(name)] = os.readlink(f"/proc/{process}/fd/{name}")
    return found


@contextlib.contextmanager
def dead(scene):
    """Replace the rings by /dev/null; the handle retries for a second before it fails."""
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    for number, target in descriptors().items():
        if target == "anon_inode:[io_uring]":
            os.dup2(null, number, inheritable=False)
    os.close(null)
    error = scene.read()[1].exception()
    assert error.errno == errno.EOPNOTSUPP
    yield
    assert scene.read()[1].exception().errno == error.errno


STATES = (
    never_used,
    idle,
    queued_and_in_flight,
    done_and_not_looked_at,
    cancelled,
    waited_for,
    gathering,
    watched,
    closing,
    stopping,
    closed,
    dead,
)
# States in which the disk is held, and states in which the parent closes its handle.
HELD = {queued_and_in_flight, cancelled, waited_for, gathering, watched, closing, stopping}
SHUT = {closing, stopping, closed}
OWNER_DIED = "Owner died"
# How the parent's requests end in its children; states not listed: the owner died.
ENDS = {
    idle: {"ok"},
    done_and_not_looked_at: {"ok"},
    cancelled: {OWNER_DIED, "cancelled"},
    stopping: {OWNER_DIED, "ok"},
    closed: {"ok"},
    dead: {os.strerror(errno.EOPNOTSUPP)},
}


def use_old(scene, state):
    """Check the parent's requests: those that were done keep their results."""
    for request in scene.old:
        try:
            assert request.wait() == SIZE
            ended = "ok"
        except OSError as error:
            ended = os.strerror(error.errno)
        except CancelledError:
            ended = "cancelled"
        assert ended in ENDS.get(state, {OWNER_DIED}), ended


def use_inherited(scene, state, other, name):
    """Use the parent's handle, or find it closed."""
    try:
        use_handle(scene.handle, other, name, scene.engine)
        again = scene.handle.submit_read(bytearray(10), f"{other}/{name}")
    except ValueError as refused:
        if state not in SHUT or str(refused) != "the handle is closed":
            raise
    else:
        assert asyncio.run(awaited(again)) == 10
        assert state not in SHUT


def use_fresh(scene, state, other, name):
    """Open a handle as if there had been no fork."""
    with nvmeio.Handle(block_size=65536, engine=scene.engine) as handle:
        use_handle(handle, other, name, scene.engine)


def child(scene, state, other, number, seed, before):
    """Do all of that in random order, and exit in one of several ways."""
    inherited = descriptor_count()
    # Threads of the parent may have opened files just before the fork.
    opened = descriptors().keys() - before - descriptors(os.getppid()).keys()
    assert not opened, f"the fork has opened {opened}"
    draw = random.Random(seed)
    steps = [use_inherited, use_fresh]
    draw.shuffle(steps)
    use_old_at = draw.randrange(3)
    for index, step in enumerate([*steps, None]):
        if index == use_old_at:
            use_old(scene, state)
        if step:
            step(scene, state, other, f"{step.__name__}-{number}")
    way = draw.choice(("close", "drop", "leave"))
    if way == "close":
        scene.handle.close()
        assert descriptor_count() <= inherited
    elif way == "drop":
        scene.handle = None
        scene.old.clear()
        gc.collect()


def fork_in_states(first, count, folder, control, other, engine):
    """Go through all states in random order, with eight children in each."""
    counts = dict.fromkeys([state.__name__ for state in STATES], 0)
    held = 0
    for draw in each_case(first, count):
        states = [state for state in STATES if engine == "io_uring" or state is not dead]
        for state in draw.sample(states, len(states)):
            scene = Scene(draw, folder, control, engine)
            with state(scene):
                numbers = [(n, draw.getrandbits(32)) for n in range(CHILDREN)]
                before = descriptors().keys()
                children = [
                    fork(child, scene, state, other, number, seed, before)
                    for number, seed in numbers
                ]
                for process in children:
                    join(process)
            if state in HELD:
                assert scene.fired > 0
                held += scene.fired
            if state not in SHUT | {dead}:
                read_checked(scene.handle, scene.file, scene.data)
                assert scene.handle.pending == 0
            scene.handle.close()
            scene.file.close()
            counts[state.__name__] += CHILDREN
    report({**counts, "held": held})
