"""Processes under signals."""

import os
import signal
import threading
import time
import weakref

import nvmeio
from helpers import Guarded, pattern
from workloads.common import (
    Faults,
    make_file,
    read_checked,
    read_small,
    report,
    write_checked,
)


class Storm:
    """SIGALRM every 100 us, with a handler in Python."""

    def __init__(self):
        self.count = 0

    def strike(self, *_):
        self.count += 1

    def __enter__(self):
        signal.signal(signal.SIGALRM, self.strike)
        signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
        return self

    def __exit__(self, *_):
        signal.setitimer(signal.ITIMER_REAL, 0)


def signal_storm(folder, engine, size=2 << 20, rounds=2):
    """Transfer in every way under many signals."""
    path = f"{folder}/storm-{engine}"
    data = make_file(path, size)
    op = nvmeio.aio_handle(65536, queue_depth=4, engine=engine)
    handle = op.handle
    with Storm() as storm:
        for number in range(rounds):
            read_checked(handle, path, data)
            read_checked(handle, path, data[5:], 5, 1)
            read_small(handle, path, data[: 60_000 + number])
            parts = [Guarded(size // 4) for _ in range(4)]
            for index, part in enumerate(parts):
                op.async_pread(part.array, path, index * size // 4)
            assert op.wait() == 4
            for index, part in enumerate(parts):
                assert part.content() == data[index * size // 4 : (index + 1) * size // 4]
            changed = pattern(size, number)
            write_checked(handle, f"{path}-{number}", changed)
            os.unlink(f"{path}-{number}")
        handle.fsync(path)
        op.close()
    report({"signals": storm.count, **handle.stats()})


def interrupted(call):
    """Call a function; return whether it raised KeyboardInterrupt."""
    try:
        call()
    except KeyboardInterrupt:
        return True
    return False


def press_ctrl_c(faults):
    """Send SIGINT once a call is held and the main thread is about to wait for it."""
    faults.await_waiting()
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGINT)


def ctrl_c(folder, control, engine, ways, size):
    """Be interrupted in each way to wait for a held read, and wait again."""
    report({way: ctrl_c_in_wait(folder, control, engine, way, size) for way in ways})


def ctrl_c_in_wait(folder, control, engine, way, size):
    """Wait for a held read, be interrupted, and wait again; return what was found."""
    path = f"{folder}/ctrl-c-{engine}"
    faults = Faults(control)
    data = make_file(path, size)
    file = nvmeio.File(path)
    op = nvmeio.aio_handle(engine=engine)
    handle = op.handle
    guarded = Guarded(size)
    faults.set(read={"held": True})
    presser = threading.Thread(target=press_ctrl_c, args=[faults])
    presser.start()
    if way == "op":
        op.async_pread(guarded.array, file)
        came = interrupted(op.wait)
    else:
        request = handle.submit_read(guarded.array, file)
        waits = {
            "request": request.wait,
            "drain": handle.drain,
            "close": handle.close,
            "wait": lambda: nvmeio.wait([request]),
            "as_completed": lambda: list(nvmeio.as_completed([request])),
        }
        came = interrupted(waits[way])
    # The interrupt came while the read was still held.
    pending = handle.pending
    presser.join()
    faults.set()
    if way == "op":
        assert op.wait() == 1
    else:
        assert request.wait() == size
    handle.close()
    assert guarded.content() == data
    return {"interrupted": came, "pending": pending, "fired": faults.fired()}


def ctrl_c_in_calls(folder, control, engine, ways, presses):
    """Be interrupted in each blocking call."""
    report({way: ctrl_c_in_call(folder, control, engine, way, presses) for way in ways})


def ctrl_c_in_call(folder, control, engine, way, presses, size=16 << 20):
    """Press Ctrl-C once or twice in a held call; release the call after a single one."""
    path = f"{folder}/ctrl-c-call-{engine}"
    faults = Faults(control)
    make_file(path, size)
    # A gather would read cached records without waiting for the device.
    file = nvmeio.File(path, direct=True)
    handle = nvmeio.Handle(queue_depth=2, engine=engine)
    guarded = Guarded(size)
    # After the call only the request refers to it.
    arrays = [guarded.array[:]]
    held = weakref.ref(arrays[0])
    calls = {
        "read": lambda: handle.read(arrays.pop(), file),
        "gather": lambda: handle.gather(file, [0], size, arrays.pop()),
        "read_many": lambda: handle.read_many([(arrays.pop(), file, 0)]),
        "read_into": lambda: nvmeio.read_into(arrays.pop(), file),
    }
    if way == "read_into":
        # It uses the default handle, configured by the environment.
        handle.close()
        os.environ |= {"NVMEIO_QUEUE_DEPTH": "2", "NVMEIO_ENGINE": engine}
        handle = nvmeio.default_handle()

    def in_a_block():
        with nvmeio.Handle(queue_depth=2, engine=engine) as handle:
            blocks.append((handle, handle.submit_read(arrays.pop(), file)))

    blocks = []
    calls["with"] = in_a_block
    returned, still_inside = threading.Event(), []

    def press():
        press_ctrl_c(faults)
        still_inside.append(not returned.wait(0.3))
        if presses == 2:
            os.kill(os.getpid(), signal.SIGINT)
        else:
            faults.set()

    presser = threading.Thread(target=press)
    faults.set(read={"held": True})
    presser.start()
    came = notes = None
    try:
        calls[way]()
    except KeyboardInterrupt as interruption:
        came = True
        notes = getattr(interruption, "__notes__", [])
    returned.set()
    pending = (blocks[0][0] if blocks else handle).pending
    still_held = held() is not None
    presser.join()
    faults.set()
    for left, request in blocks:
        assert left.closed
        assert request.wait() == size
        left.close()
    handle.close()
    return {
        "interrupted": came,
        "still_inside": still_inside,
        "pending": pending,
        "still_held": still_held,
        "notes": notes,
        # Blocks that were never submitted keep the canaries of Guarded.
        "dropped": way != "with" and bool((guarded.array[-4096:] == Guarded.CANARY).all()),
        "fired": faults.fired(),
    }
