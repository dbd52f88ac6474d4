"""The fixed workload of test_errnos.py, in Python."""

import contextlib
import errno
import json
import os
import select

import nvmeio
from helpers import Guarded, pattern
from nvmeio.checkpoint import Checkpointer, CheckpointError, drain
from workloads.checkpoints import same, state_of
from workloads.common import make_file

KIB = 1 << 10
SIZE = 20 * 16 * KIB + 777
RECORD = 1000
# Bytes of a checkpoint's arrays; how many checkpoints there are before a call fails.
STATE_BYTES, STEPS_BEFORE = 5000, 2
# Neighbours, gaps that are read and discarded, and distant records.
OFFSETS = [(i * 5 % 12) * (RECORD + i % 2 * 24 * KIB) for i in range(12)]


def ended(function, *args, **options):
    """Call a function; return what it returns and 0, or None and -errno."""
    try:
        return function(*args, **options), 0
    except OSError as error:
        return None, -error.errno
    except MemoryError:
        return None, -errno.ENOMEM
    except CheckpointError:
        return None, -errno.EUCLEAN
    except RuntimeError:
        # No thread could be started.
        return None, -errno.EAGAIN


class Steps:
    """Steps that run twice: once to load everything lazy, and once with a fault."""

    def __init__(self, folder, engine):
        self.engine = engine
        self.source, self.target = f"{folder}/source", f"{folder}/target"
        self.data = make_file(self.source, SIZE, 1)
        make_file(self.target, 4096)
        # Used to read the target with preadv, which the library never calls.
        self.descriptor = os.open(self.target, os.O_RDONLY)
        self.written, self.scattered = pattern(SIZE, 2), pattern(12 * RECORD, 3)
        self.whole, self.skewed = Guarded(SIZE), Guarded(SIZE - 16, 3)
        self.small, self.gathered = Guarded(4096), Guarded(12 * RECORD)

    def landed(self, data, offset):
        """Assert that the target holds these bytes."""
        found = bytearray(len(data))
        assert os.preadv(self.descriptor, [found], offset) == len(data)
        assert found == data

    def write(self, handle, target):
        handle.submit_write(self.written, target).wait()
        self.landed(self.written, 0)

    def scatter(self, handle, target):
        handle.submit_scatter(target, OFFSETS, RECORD, self.scattered).wait()
        for i, offset in enumerate(OFFSETS):
            self.landed(self.scattered[i * RECORD : (i + 1) * RECORD], offset)

    def read(self, handle, source):
        self.whole.array[:] = 0
        handle.submit_read(self.whole.array, source).wait()
        assert self.whole.content() == self.data

    def unaligned(self, handle, source):
        self.skewed.array[:] = 0
        handle.submit_read(self.skewed.array, source, 7).wait()
        assert self.skewed.content() == self.data[7:-9]

    def at_once(self, handle, source):
        self.small.array[:] = 0
        handle.read(self.small.array, source, offset=4096)
        assert self.small.content() == self.data[4096:8192]

    def gather(self, handle, source):
        self.gathered.array[:] = 0
        handle.gather(source, OFFSETS, RECORD, self.gathered.array, max_gap=4096)
        parts = [self.data[offset : offset + RECORD] for offset in OFFSETS]
        assert self.gathered.content() == b"".join(parts)

    def run(self):
        """Run all steps, as far as files and handle can be opened."""
        options = {"engine": self.engine, "block_size": 16 * KIB, "queue_depth": 8}
        results = {}
        handle, results["handle"] = ended(nvmeio.Handle, **options)
        source, results["source"] = ended(nvmeio.File, self.source)
        target, results["target"] = ended(nvmeio.File, self.target, "w")
        for step in (self.write, self.scatter):
            if handle and target:
                results[step.__name__] = ended(step, handle, target)[1]
        for step in (self.read, self.unaligned, self.at_once, self.gather):
            if handle and source:
                results[step.__name__] = ended(step, handle, source)[1]
        if handle and target:
            results["fsync"] = ended(handle.fsync, target)[1]
        if handle and source:
            results["again"] = ended(self.read, handle, source)[1]
        everything = {"handle": handle, "source": source, "target": target}
        for name, opened in everything.items():
            if opened:
                results[f"close_{name}"] = ended(opened.close)[1]
        return results


def open_count():
    """Return how many descriptors are open, with poll, which the library never calls."""
    poll = select.poll()
    for descriptor in range(64):
        poll.register(descriptor, 0)
    return 64 - sum(event == select.POLLNVAL for _, event in poll.poll(0))


def say(value):
    """Report to the parent, with writev, which the library never calls."""
    line = f"{json.dumps(value)}\n".encode()
    assert os.writev(1, [line]) == len(line)


def carry_out_twice(steps):
    """Run all steps, and again after the pause; report 0 or -errno for each."""
    assert set(steps.run().values()) == {0}
    before = open_count()
    say("ready")
    assert os.readv(0, [bytearray(8)])
    results = steps.run()
    say({**results, "left_open": open_count() - before})
    # Exit without cleaning up: what numpy's libraries do at exit is not under test.
    os._exit(0)


def fixed_steps(folder, engine):
    """Run the steps of transfers."""
    carry_out_twice(Steps(folder, engine))


class Checkpoints:
    """Save checkpoints in two ways, restore one, and prune old ones."""

    def __init__(self, root):
        self.root, self.step = root, 0

    def run(self):
        """Save two steps, and keep two."""
        results = {}
        checkpointer, results["made"] = ended(Checkpointer, self.root, keep=STEPS_BEFORE)
        if checkpointer is None:
            return results

        def save_async(step, state):
            checkpointer.save_async(step, state).result()

        def restore(step):
            assert same(checkpointer.restore(step), state_of(step, STATE_BYTES))

        for save in (checkpointer.save, save_async):
            self.step += 1
            state = state_of(self.step, STATE_BYTES)
            results[f"save {self.step}"] = ended(save, self.step, state)[1]
        if not results[f"save {self.step}"]:
            results[f"restore {self.step}"] = ended(restore, self.step)[1]
        results["close"] = ended(checkpointer.close)[1]
        return results


def checkpoint_steps(root):
    """Run the steps of checkpoints."""
    carry_out_twice(Checkpoints(root))


class Drains:
    """Drain a folder onto the copy of its earlier contents."""

    def __init__(self, root):
        self.source, self.target, self.number = f"{root}/source", f"{root}/target", 0
        os.makedirs(self.source)

    def run(self):
        """Change all files, and drain them."""
        self.number += 1
        results = {"changed": ended(self.change)[1]}
        if not results["changed"]:
            results["drained"] = ended(self.drain)[1]
        return results

    def change(self):
        for name, data in drained_files(self.number).items():
            # Only close(2) returns EINTR to Python, and has closed the file all the same.
            with (
                contextlib.suppress(InterruptedError),
                open(f"{self.source}/{name}", "wb") as file,
            ):
                file.write(data)

    def drain(self):
        drain(self.source, self.target, retries=0).result()


def drained_files(number):
    """Return the files of a folder, by its number."""
    files = {"large": pattern(20_000, number), "small": pattern(700, number + 10)}
    return {**files, ".metadata": str(number).encode()}


def drain_steps(root):
    """Run the step of a drain."""
    carry_out_twice(Drains(root))
