"""Callbacks are called without anybody waiting, and keep nothing alive."""

import _thread
import asyncio
import concurrent.futures
import gc
import logging
import os
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest

import nvmeio
from children import run_child
from helpers import BLOCK, SLOW, no_descriptors, pattern, plugged
from nvmeio._events import caller as _caller

CALLER = "nvmeio-callbacks"


class Owner:
    """Holds a handle and a request whose callback is its own method."""

    def __init__(self, open_handle, path):
        self.handle = open_handle()
        self.memory = np.zeros(BLOCK, np.uint8)
        self.called = threading.Event()
        self.request = self.handle.submit_read(self.memory, path)
        self.request.add_done_callback(self.note)

    def note(self, request):
        assert request is self.request
        self.thread = threading.current_thread().name
        self.called.set()


def test_a_callback_is_called_though_nobody_waits(engine, path):
    path.write_bytes(pattern(BLOCK))
    owner = Owner(lambda: nvmeio.Handle(engine=engine), path)
    # Waits for a Python event, which polls no handle.
    assert owner.called.wait(60)
    assert owner.thread in (CALLER, threading.current_thread().name)
    assert owner.memory.tobytes() == pattern(BLOCK)
    owner.handle.close()


def test_a_callback_is_called_in_its_own_thread_while_others_are_busy(open_handle, path):
    path.write_bytes(pattern(BLOCK))
    handle = open_handle()
    seen = []
    called = threading.Event()

    def note(request):
        seen.append(threading.current_thread().name)
        called.set()

    # A callback that is added to a finished request is called at once, in this thread.  Two
    # writes are slow enough that one of them is not finished.
    requests = [handle.submit_write(np.zeros(64 << 20, np.uint8), path) for _ in range(2)]
    for request in requests:
        request.add_done_callback(note)
    assert called.wait(60)
    assert CALLER in seen
    handle.drain()


def test_a_cycle_of_handle_request_and_callback_is_collected(engine, path):
    path.write_bytes(pattern(BLOCK))
    before = [len(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd")]
    known = []
    for _ in range(20):
        owner = Owner(lambda: nvmeio.Handle(engine=engine), path)
        owner.called.wait(60)
        known += [weakref.ref(owner), weakref.ref(owner.handle)]
    del owner
    gc.collect()
    assert [reference() for reference in known] == [None] * 40
    # The callback thread stays for a second, with a descriptor.
    assert len(os.listdir("/proc/self/task")) <= before[0] + 1
    assert len(os.listdir("/proc/self/fd")) <= before[1] + 1


@pytest.mark.parametrize("fails", [False, True])
def test_a_cycle_through_a_result_or_an_error_is_collected(open_handle, path, fails):
    path.write_bytes(pattern(BLOCK))
    handle = open_handle()

    class Result(list):
        pass

    result = Result()
    out = np.zeros(100, np.uint8)
    if fails:
        request = handle.submit_read(out, path, BLOCK)
        request.exception().holder = result
    else:
        request = handle.submit_gather(path, [0], 100, out, result=result)
        assert request.wait() is result
    result.append(request)
    known = weakref.ref(result)
    del result, request
    gc.collect()
    assert known() is None


def test_a_callback_that_raises_is_logged(open_handle, path, caplog):
    path.write_bytes(pattern(BLOCK))
    handle, called = open_handle(), threading.Event()

    class Stop(BaseException):
        pass

    def fail(request):
        raise Stop("of the callback")

    with caplog.at_level(logging.ERROR, "nvmeio"):
        request = handle.submit_write(np.zeros(64 << 20, np.uint8), path)
        request.add_done_callback(fail)
        request.add_done_callback(lambda _: called.set())
        assert called.wait(60)
        # The thread lives on.
        again = threading.Event()
        other = handle.submit_write(np.zeros(64 << 20, np.uint8), path)
        other.add_done_callback(lambda _: again.set())
        assert again.wait(60)
    assert "of the callback" in caplog.text


def test_the_thread_ends_when_there_is_nothing_to_call(tmp_path):
    report = run_child("callbacks_alone", folder=str(tmp_path)).report
    assert report == {"during": True, "after": False, "again": True}


def test_drain_waits_for_a_callback_beside_one_that_was_called_at_once(open_handle, path):
    path.write_bytes(pattern(BLOCK))
    handle, called = open_handle(**SLOW), []
    begun, held = threading.Event(), threading.Event()

    def hold(request):
        begun.set()
        held.wait()
        called.append(request)

    with plugged(handle, path.parent):
        request = handle.submit_read(bytearray(BLOCK), path)
        request.add_done_callback(hold)
    try:
        assert begun.wait(60)
        request.add_done_callback(lambda _: called.append("at once"))
        assert called == ["at once"]
        with pytest.raises(TimeoutError):
            handle.drain(timeout=0.1)
    finally:
        held.set()
    handle.drain()
    assert called == ["at once", request]


def test_drain_waits_for_callbacks_and_their_requests(open_handle, path):
    path.write_bytes(pattern(BLOCK))
    handle, memory, called = open_handle(), np.zeros(BLOCK, np.uint8), []

    def go_on(request):
        time.sleep(0.02)
        called.append(request.wait())
        if len(called) < 10:
            handle.submit_read(memory, path).add_done_callback(go_on)
        # A callback that drains waits for no callbacks, because it is one itself.
        handle.drain()

    handle.submit_read(memory, path).add_done_callback(go_on)
    handle.drain()
    assert called == [BLOCK] * 10


def test_the_end_of_a_block_waits_for_callbacks(engine, path):
    path.write_bytes(pattern(BLOCK))
    ended = []

    def call(request):
        time.sleep(0.1)
        ended.append(request.wait())

    with nvmeio.Handle(engine=engine) as handle:
        handle.submit_read(bytearray(BLOCK), path).add_done_callback(call)
    assert ended == [BLOCK]


def test_drains_timeout_includes_callbacks(open_handle, path):
    handle, begun, go_on = open_handle(), threading.Event(), threading.Event()

    def call(request):
        begun.set()
        go_on.wait(60)

    request = handle.submit_write(np.zeros(64 << 20, np.uint8), path)
    request.add_done_callback(call)
    # Nobody polls meanwhile, so the callback thread calls it.
    assert begun.wait(60)
    try:
        with pytest.raises(TimeoutError):
            handle.drain(0.1)
    finally:
        go_on.set()
    handle.drain()


def test_the_interpreter_exits_after_its_callbacks(tmp_path):
    script = (
        "import os, sys, time, nvmeio\n"
        "def call(request):\n"
        "    os.write(1, b'begun ')\n"
        "    time.sleep(0.3)\n"
        "    os.write(1, b'ended')\n"
        "handle = nvmeio.Handle()\n"
        "handle.submit_write(bytes(1 << 20), sys.argv[1]).add_done_callback(call)\n"
        "time.sleep(0.1)\n"
    )
    command = [sys.executable, "-c", script, tmp_path / "file"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "begun ended"


def test_a_callback_must_be_callable(open_handle, path):
    request = open_handle().submit_write(b"bytes", path)
    with pytest.raises(TypeError, match="fn is None; it must be callable"):
        request.add_done_callback(None)
    request.wait()


def refuse_thread(*_):
    raise RuntimeError("can't start new thread")


# No thread can start, as at the system's limit.
REFUSED = pytest.mark.parametrize(
    ("owner", "name"), [(_thread, "start_new_thread"), (threading.Thread, "start")]
)


@REFUSED
def test_callbacks_survive_a_failure_to_start_their_thread(
    tmp_path, monkeypatch, caplog, owner, name
):
    """The next attempt calls both."""
    handle, path = nvmeio.Handle(), tmp_path / "file"
    while _caller.CALLER._thread is not None:
        time.sleep(0.01)
    with handle, monkeypatch.context() as patched:
        patched.setattr(owner, name, refuse_thread)
        called = [threading.Event(), threading.Event()]
        source = np.zeros(64 << 20, np.uint8)
        handle.submit_write(source, path).add_done_callback(lambda _: called[0].set())
        while "cannot start" not in caplog.text:
            time.sleep(0.001)
        patched.undo()
        handle.submit_write(source, path).add_done_callback(lambda _: called[1].set())
        assert all(event.wait(60) for event in called)


@pytest.mark.parametrize("end", [nvmeio.Handle.close, nvmeio.Handle.drain])
@REFUSED
def test_the_end_calls_back_if_no_thread_can(tmp_path, monkeypatch, owner, name, end):
    while _caller.CALLER._thread is not None:
        time.sleep(0.01)
    with nvmeio.Handle() as handle:
        monkeypatch.setattr(owner, name, refuse_thread)
        request = handle.submit_write(np.zeros(BLOCK, np.uint8), tmp_path / "file")
        called = []
        request.add_done_callback(called.append)
        # It is done, and so not waited for, but its callbacks were not called by the end.
        end(handle)
        assert called == [request]


def test_without_descriptors_callbacks_are_called_too(tmp_path):
    while _caller.CALLER._thread is not None:
        time.sleep(0.01)
    with nvmeio.Handle() as handle, nvmeio.File(tmp_path / "file", "w") as file:
        request = handle.submit_write(np.zeros(64 << 20, np.uint8), file)
        with no_descriptors():
            called = threading.Event()
            request.add_done_callback(lambda _: called.set())
            assert called.wait(60)


def test_a_closed_descriptor_is_no_longer_watched(open_handle, path, monkeypatch):
    """The thread ends while a request completes; its descriptor number may be reused."""
    path.write_bytes(pattern(BLOCK))
    handle, memory = open_handle(), np.zeros(BLOCK, np.uint8)
    monkeypatch.setattr(_caller, "IDLE_MS", 1)
    for _ in range(50):
        request, called = handle.submit_read(memory, path), threading.Event()
        request.add_done_callback(lambda _, called=called: called.set())
        assert called.wait(60)
        while _caller.CALLER._thread is not None:
            time.sleep(0.0005)
        with open(path.with_name("other"), "wb") as file:
            handle.submit_read(memory, path)
            handle.drain()
            assert os.fstat(file.fileno()).st_size == 0


def test_a_forked_child_calls_its_own_callbacks(tmp_path):
    report = run_child("callbacks_in_a_child", folder=str(tmp_path)).report
    assert report == {"parent": 1, "child": 1}


def test_a_request_is_refused_where_a_concurrent_future_is_needed(open_handle, path):
    path.write_bytes(pattern(BLOCK))
    request = open_handle().submit_read(np.zeros(BLOCK, np.uint8), path)
    with pytest.raises(TypeError, match=r"nvmeio\.wait\(\)"):
        concurrent.futures.wait([request])
    with pytest.raises(TypeError, match=r"nvmeio\.as_completed\(\)"):
        next(concurrent.futures.as_completed([request]))

    async def wait():
        await asyncio.wait([request])

    if sys.version_info >= (3, 11):  # before, asyncio.wait() took everything awaitable
        with pytest.raises(TypeError, match=r"create_task\(request\.as_coroutine\(\)\)"):
            asyncio.run(wait())
    assert not hasattr(request, "_condition")
    assert request.wait() == BLOCK
