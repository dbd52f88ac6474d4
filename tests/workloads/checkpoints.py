"""Folders and checkpoints: under faults, killed, and at the end of Python."""

import errno
import os
import signal
import sys
import threading
import time
import warnings

import numpy as np

import nvmeio
from nvmeio.checkpoint import (
    Checkpointer,
    CheckpointError,
    _places,
    _saving,
    atomic_directory,
    drain,
)
from workloads.common import pause, report


def fill_folder(path, replace=False):
    """Write a folder while system calls fail; report the result."""
    nvmeio.default_handle()
    pause()
    try:
        with atomic_directory(path, replace=replace) as folder:
            (folder / "deep" / "er").mkdir(parents=True)
            (folder / "deep" / "er" / "file").write_text("new")
    except OSError as error:
        report([type(error).__name__, str(error)])
    else:
        report(["ok", ""])


def state_of(seed, size=300_000):
    """Return a state, by its seed."""
    numbers = np.random.default_rng(seed)
    return {
        "seed": seed,
        "weights": [numbers.integers(0, 256, size, np.uint8) for _ in range(4)],
        "name": f"state {seed}",
    }


def same(one, other):
    """Return whether two states of state_of() are equal."""
    arrays = zip(one.pop("weights"), other.pop("weights"), strict=True)
    return one == other and all(np.array_equal(*pair) for pair in arrays)


def save_step(root, step, how="save"):
    """Save a step while system calls fail; report the result."""
    checkpointer = Checkpointer(root)
    state = state_of(step)
    pause()
    try:
        if how == "save":
            checkpointer.save(step, state)
        else:
            checkpointer.save_async(step, state, stage=how == "staged").result()
        checkpointer.close()
    except OSError as error:
        report([type(error).__name__, str(error)])
    else:
        report(["ok", ""])


def save_until_killed(root):
    """Save step after step, and report each one when it is durable."""
    checkpointer = Checkpointer(root, keep=2)
    step = (checkpointer.latest() or 0) + 1
    pause()
    while True:
        checkpointer.save(step, state_of(step))
        report(step)
        step += 1


def save_and_leave(root, stage):
    """Start a save, and exit at once."""
    checkpointer = Checkpointer(root)
    checkpointer.save_async(1, state_of(1), stage=stage)


def hold_lock(root):
    """Take the lock of a root, and wait."""
    checkpointer = Checkpointer(root)
    checkpointer.save(1, state_of(1))
    pause()
    os._exit(0)


def fork_while_saving(root, call):
    """Fork during a save; the child saves or closes, and reports the result."""
    checkpointer = Checkpointer(root)
    gate, write = threading.Event(), _saving.Plan.write

    def write_late(*arguments):
        assert gate.wait(60)
        return write(*arguments)

    _saving.Plan.write = write_late
    future = checkpointer.save_async(1, state_of(1))
    child = os.fork()
    if not child:
        try:
            checkpointer.save(2, 2) if call == "save" else checkpointer.close()
            report("closed")
        except BlockingIOError as error:
            report(error.strerror.partition(":")[0])
        os._exit(0)
    os.waitpid(child, 0)
    gate.set()
    future.result()
    checkpointer.close()


def fork_while_verifying(root):
    """Fork while a step is being read, and stop reading; the child lives on."""
    checkpointer = Checkpointer(root)
    reader, writer = os.pipe()

    def fork(done, total):
        if done == total and not os.fork():
            os.close(writer)
            # Until this process ends.
            os.read(reader, 1)
            os._exit(0)

    checkpointer.verify(1, progress=fork)
    pause()
    os.close(writer)
    os.waitpid(-1, 0)


def drain_and_die(source, target):
    """Drain a folder, and be killed while the largest file is being written."""
    writing = _places._FolderWriter.write

    def write(writer, piece):
        writing(writer, piece)
        if "__0_0" in writer.target:
            # Smaller files are complete by then.
            while not os.path.exists(os.path.join(target, "__1_0.distcp")):
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGKILL)

    _places._FolderWriter.write = write
    drain(source, target).result()


def restore_far_and_die(root):
    """Restore a copy from a store, and be killed while it is fetched."""
    with Checkpointer(os.path.join(root, "near"), drain_to="memory://bucket/run") as saver:
        saver.save(1, {"w": np.arange(5000)})
    read = _places.Remote.read

    def die(place, name):
        if name.endswith("tensors.safetensors"):
            os.kill(os.getpid(), signal.SIGKILL)
        return read(place, name)

    _places.Remote.read = die
    Checkpointer(os.path.join(root, "new"), drain_to="memory://bucket/run").restore()


def agree(roots, far=None, listed=None, broken=None):
    """Agree with the other ranks; return the step, what was restored, and the warnings.

    A rank in `listed` has that old list of its root; `broken` cannot list its root.
    """
    rank = sys.modules["torch.distributed"].get_rank()
    root = roots[rank % len(roots)]
    listdir = os.listdir

    def old_list(path):
        if str(path) == root and broken == rank:
            raise OSError(errno.EIO, "broken", path)
        if str(path) == root and listed and rank in listed:
            return [f"step-{step}" for step in listed[rank]]
        return listdir(path)

    os.listdir = old_list
    try:
        with Checkpointer(root, drain_to=far) as checkpointer:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                step = checkpointer.agreed_step()
            restored = None if step is None else checkpointer.restore(step)
            return step, restored, [str(each.message) for each in said]
    except CheckpointError as error:
        return str(error)
    finally:
        os.listdir = listdir


def agree_in_group(root, members):
    """Agree in a group; return the step, or what is wrong."""
    group = sys.modules["torch.distributed"].new_group(members)
    with Checkpointer(root) as checkpointer:
        try:
            return checkpointer.agreed_step(group)
        except ValueError as error:
            return str(error)
