"""End a process with I/O in flight."""

import atexit
import contextlib
import gc
import os
import sys
import threading
import time
from collections import deque

import numpy as np

import nvmeio
from helpers import PAGE, Guarded
from nvmeio import default
from nvmeio._native.handle import _drain_at_exit
from workloads.common import Faults, make_file, report

KEPT = []


def map_memory(path, size):
    """Return memory between canaries, mapped from a file, which outlives the process."""
    memory = np.memmap(path, np.uint8, "w+", shape=size + 2 * PAGE)
    memory[:] = Guarded.CANARY
    return memory[PAGE : PAGE + size]


def leave(folder, control, memory, engine, way, hold):
    """End the interpreter with slow reads in flight."""
    path = f"{folder}/leave-{engine}"
    faults = Faults(control)
    data = make_file(path, 1 << 17)
    file = nvmeio.File(path)
    op = nvmeio.aio_handle(65536, engine=engine)
    faults.set(read={"delay_s": 0.15})
    buffer = map_memory(f"{memory}/async_pread", len(data))
    op.async_pread(buffer, file)
    request = op.handle.submit_read(map_memory(f"{memory}/submit_read", len(data)), file)
    # The requests keep it open.
    file.close()
    report({"pending": op.handle.pending})
    if hold == "global":
        KEPT.extend([op, request])
    elif hold == "cycle":
        cycle = [op, request]
        cycle.append(cycle)
    elif hold == "threads":
        for call in (op.wait, op.handle.drain, request.wait):
            threading.Thread(target=call, daemon=True).start()
    elif hold == "nothing":
        del op, request, buffer
    if way == "exit":
        sys.exit(3)
    if way == "raise":
        raise ValueError("leaving")
    if way == "_exit":
        os._exit(4)


def drop_in_flight(folder, control, engine, ways):
    """Drop everything with reads in flight, in each way; the process goes on."""
    report({way: drop_in_a_way(folder, control, engine, way) for way in ways})


def drop_in_a_way(folder, control, engine, way):
    """Drop everything with reads in flight; return what was found."""
    path = f"{folder}/drop-{engine}"
    faults = Faults(control)
    data = make_file(path, 1 << 17)
    file = nvmeio.File(path)
    handle = nvmeio.Handle(block_size=65536, engine=engine)
    faults.set(read={"delay_s": 0.1})
    guarded = [Guarded(len(data)) for _ in range(3)]
    requests = [handle.submit_read(part.array, file) for part in guarded]
    pending = handle.pending
    if way == "close":
        handle.close()
    elif way == "handle first":
        del handle
        gc.collect()
        assert [request.wait() for request in requests] == [len(data)] * 3
    elif way == "requests first":
        del requests
        gc.collect()
        del handle
    elif way == "cycle":
        cycle = [handle, requests]
        cycle.append(cycle)
        del cycle, handle, requests
        gc.collect()
    elif way == "file first":
        file.close()
        del file, requests
        gc.collect()
        handle.close()
    # In any case nothing is in flight any more.
    for part in guarded:
        assert part.content() == data
    faults.set()
    time.sleep(0.1)
    for part in guarded:
        assert part.content() == data
    return {"pending": pending, "fired": faults.fired()}


def submit_until_refused(handle, path, started, ended):
    """Keep eight reads in flight until the handle is closed."""
    requests = deque()
    with contextlib.suppress(ValueError):
        while True:
            requests.append(handle.submit_read(np.empty(4 << 20, np.uint8), path))
            if len(requests) == 8:
                started.set()
                requests.popleft().wait()
    for request in requests:
        assert request.wait() == 4 << 20
    ended.set()


def end_amid_submissions(folder, engine):
    """End the process while threads use the default handle."""
    path = f"{folder}/file"
    make_file(path, 4 << 20)
    os.environ["NVMEIO_ENGINE"] = engine
    first = nvmeio.default_handle()
    started, tried, outcomes = threading.Barrier(4), threading.Event(), []

    def submit():
        started.wait()
        requests = deque()
        with contextlib.suppress(ValueError):
            while True:
                memory = np.empty(4 << 20, np.uint8)
                requests.append(nvmeio.default_handle().submit_read(memory, path))
                if len(requests) == 8:
                    requests.popleft().wait()
        # The default handle was closed meanwhile, so the thread asks for another.
        try:
            nvmeio.default_handle()
        except ValueError as error:
            outcomes.append(str(error))
        else:
            outcomes.append("opened")
        tried.set()

    for _ in range(3):
        threading.Thread(target=submit, daemon=True).start()
    started.wait()

    def look():
        tried.wait()
        same = default._shared.handle is first
        report({"same": same, "pending": first.pending, "error": outcomes[0]})

    # The first registered function is called last.
    atexit.unregister(_drain_at_exit)
    atexit.register(look)
    atexit.register(_drain_at_exit)


def close_amid_submissions(folder, engine, way):
    """Close a handle, or end the process, while a thread keeps submitting."""
    path = f"{folder}/file"
    make_file(path, 4 << 20)
    handle = nvmeio.Handle(engine=engine)
    started, ended = threading.Event(), threading.Event()
    thread = threading.Thread(
        target=submit_until_refused, args=[handle, path, started, ended], daemon=True
    )
    thread.start()
    started.wait()
    if way == "exit":
        report({"ended": True})
        return
    if way == "with":
        with handle:
            pass
    else:
        handle.close()
    thread.join()
    report({"ended": ended.is_set()})
