"""Callbacks in nvmeio's callback thread."""

import multiprocessing
import threading
import time

import numpy as np

import nvmeio
from workloads.common import report
from workloads.forks import fork, join

SIZE = 64 << 20


def is_there():
    """Return whether the callback thread exists."""
    return any(thread.name == "nvmeio-callbacks" for thread in threading.enumerate())


def call(handle, path):
    """Add a callback, and return how often it was called."""
    calls, called = [], threading.Event()
    request = handle.submit_write(np.zeros(SIZE, np.uint8), path)
    request.add_done_callback(calls.append)
    request.add_done_callback(lambda _: called.set())
    deadline = time.monotonic() + 10
    while not (there := is_there()) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert called.wait(60)
    del request
    return len(calls), there


def callbacks_alone(folder):
    """Check that the thread ends some time after the last callback, and starts again."""
    with nvmeio.Handle() as handle:
        during = call(handle, f"{folder}/file")[1]
        while is_there():
            time.sleep(0.01)
        after = is_there()
        again = call(handle, f"{folder}/file")[1]
    report({"during": during, "after": after, "again": again})


def callbacks_in_a_child(folder):
    """Fork while the thread exists, and call callbacks in both processes."""
    counts = multiprocessing.get_context("fork").Array("i", 2)
    handle = nvmeio.default_handle()
    calls = threading.Event()
    request = handle.submit_write(np.zeros(SIZE, np.uint8), f"{folder}/file")
    request.add_done_callback(lambda _: calls.set())

    def in_child():
        counts[1] = call(nvmeio.default_handle(), f"{folder}/child")[0]

    child = fork(in_child)
    assert calls.wait(60)
    join(child)
    counts[0] = call(handle, f"{folder}/file")[0]
    report({"parent": counts[0], "child": counts[1]})
