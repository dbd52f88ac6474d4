"""Requests: waiting, cancelling, callbacks, errors and lifetime."""

import contextlib
import errno
import gc
import inspect
import os
import pickle
import sys
import threading
import time
import weakref
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import nvmeio
from helpers import (
    BLOCK,
    DEPTH,
    PAGE,
    SLOW,
    Guarded,
    cancelled,
    descriptors_below,
    left_open,
    pattern,
    plugged,
    routes,
)
from nvmeio._native import buffer


@pytest.fixture
def slow_handle(open_handle):
    """A handle that `plugged` can keep busy."""
    return open_handle(**SLOW)


@pytest.mark.parametrize("wait", ["wait", "result"])
def test_waiting_returns_the_bytes_that_were_moved(handle, path, wait):
    write = handle.submit_write(pattern(BLOCK + 7), path)
    assert write.nbytes == BLOCK + 7
    assert getattr(write, wait)() == BLOCK + 7
    target = np.zeros(1000, np.int16)
    read = handle.submit_read(target, path, 10)
    assert read.nbytes == 2000
    assert getattr(read, wait)(60) == 2000
    assert target.tobytes() == pattern(BLOCK + 7)[10:2010]
    assert (write.done(), read.done()) == (True, True)
    assert (write.exception(), read.exception(60)) == (None, None)
    assert getattr(read, wait)() == 2000
    assert routes(handle).total() == BLOCK + 2007


def test_done_is_true_only_when_the_bytes_are_in_place(handle, path):
    """The call that finds the transfer done fills a strided target."""
    expected = np.arange(3 * BLOCK, dtype=np.uint8)
    path.write_bytes(expected.tobytes())
    target = np.zeros((3 * BLOCK, 2), np.uint8)
    request = handle.submit_read(target[:, 1], path)
    while not request.done():
        os.sched_yield()
    np.testing.assert_array_equal(target[:, 1], expected)
    assert not target[:, 0].any()


@pytest.mark.parametrize("ask", ["wait", "result", "exception"])
def test_a_wait_that_times_out_leaves_the_request_running(slow_handle, path, ask):
    path.write_bytes(b"12345678")
    target = bytearray(8)
    with plugged(slow_handle, path.parent):
        request = slow_handle.submit_read(target, path)
        assert not request.done()
        for timeout in (0, 0.01, 0.12):
            begin = time.monotonic()
            with pytest.raises(
                TimeoutError, match=f"not done within {timeout} s; it goes on"
            ):
                getattr(request, ask)(timeout)
            assert time.monotonic() - begin >= timeout
    assert request.wait(timeout=60) == 8
    assert target == b"12345678"


@pytest.mark.parametrize("timeout", [-1, float("nan")])
def test_an_invalid_timeout_is_refused(handle, path, timeout):
    request = handle.submit_write(b"1", path)
    with pytest.raises(ValueError, match=r"timeout is .*; it must be 0 or more"):
        request.wait(timeout)
    assert request.wait(float("inf")) == 1


def test_every_way_to_retrieve_a_result_reports_the_failure(handle, path):
    path.write_bytes(bytes(10))
    request = handle.submit_read(bytearray(11), path)
    error = request.exception()
    assert (error.errno, error.filename) == (errno.ENODATA, str(path))
    for ask in (request.wait, request.result):
        with pytest.raises(OSError, match="past the end") as caught:
            ask()
        assert caught.value is error
    assert request.done()
    assert not request.cancel()


class TestCancel:
    def test_a_queued_request_is_cancelled_completely(self, slow_handle, path):
        path.write_bytes(bytes(100 * PAGE))
        memory = Guarded(100 * PAGE)
        with plugged(slow_handle, path.parent):
            request = slow_handle.submit_read(memory.array, path)
            assert request.cancel() is True
            for ask in (request.wait, request.result, request.exception):
                with pytest.raises(CancelledError, match="was cancelled"):
                    ask()
            assert request.done()
            assert request.cancel() is False
        assert memory.content() == bytes([Guarded.CANARY]) * 100 * PAGE

    def test_a_request_cancelled_halfway_keeps_its_finished_blocks(self, open_handle, path):
        """Submitted blocks land before the request is done; nothing lands later."""
        expected = pattern(400 * PAGE)
        path.write_bytes(expected)
        memory = Guarded(len(expected))
        handle = open_handle(**SLOW)
        request = handle.submit_read(memory.array, path)
        while routes(handle).total() == 0:
            os.sched_yield()
        dropped = request.cancel()
        assert cancelled(request) is dropped
        left = memory.content()
        landed = [
            page * PAGE
            for page in range(400)
            if left[page * PAGE :][:PAGE] == expected[page * PAGE :][:PAGE]
        ]
        assert len(landed) * PAGE == routes(handle).total()
        assert dropped or len(landed) == 400
        memory.array[:] = 0
        handle.fsync(path)
        assert memory.content() == bytes(len(expected))

    def test_a_request_that_is_done_cannot_be_cancelled(self, handle, path):
        request = handle.submit_write(b"1234", path)
        request.wait()
        assert request.cancel() is False
        assert request.wait() == 4

    def test_a_write_that_never_began_leaves_an_empty_file(self, slow_handle, path):
        with plugged(slow_handle, path.parent):
            request = slow_handle.submit_write(pattern(BLOCK), path)
            assert request.cancel() is True
            assert cancelled(request)
        assert path.stat().st_size == 0


def test_many_threads_wait_for_one_request(slow_handle, path):
    path.write_bytes(b"12345678")
    target = np.zeros((8, 3), np.uint8)
    started = threading.Barrier(9)

    def wait(_):
        started.wait()
        return request.wait(), target[:, 1].tobytes()

    with ThreadPoolExecutor(8) as threads:
        waiters = [threads.submit(wait, number) for number in range(8)]
        # The plug lasts for less than a second, in which a busy machine may not even start
        # them.
        while started.n_waiting < 8:
            os.sched_yield()
        with plugged(slow_handle, path.parent):
            request = slow_handle.submit_read(target[:, 1], path)
            started.wait()
            assert not request.done()
        assert [waiter.result() for waiter in waiters] == [(8, b"12345678")] * 8


class TestRepr:
    def test_repr_shows_the_transfer_and_the_file(self, slow_handle, path):
        path.write_bytes(bytes(20))
        with plugged(slow_handle, path.parent):
            request = slow_handle.submit_read(bytearray(8), path, 12)
            words = f"read 8 bytes at offset 12 of {str(path)!r}"
            assert repr(request) == f"<nvmeio.Request {words}, in flight>"
        request.wait()
        assert repr(request) == f"<nvmeio.Request {words}, done>"

    def test_repr_shows_the_error(self, handle, path):
        path.write_bytes(bytes(20))
        request = handle.submit_read(bytearray(8), path, 13)
        failure = request.exception()
        assert repr(request).endswith(f", failed: {failure}>")

    def test_repr_names_every_kind(self, handle, path):
        write, fsync = handle.submit_write(b"1", path), handle.submit_fsync(path)
        assert "Request write 1 bytes" in repr(write)
        assert "Request fsync of" in repr(fsync)
        assert (write.wait(), fsync.wait()) == (1, 0)


def unseen(recorded):
    """Return the warnings about errors that were never retrieved."""
    return [str(w.message) for w in recorded if "never looked at" in str(w.message)]


def look_until_done(handle):
    """Poll the handle, which releases finished requests, until nothing is pending."""
    deadline = time.monotonic() + 60
    while handle.pending:
        assert time.monotonic() < deadline


class TestWarnings:
    """An error that is never retrieved causes a warning."""

    def test_an_error_that_was_never_retrieved_causes_a_warning(
        self, handle, path, recwarn, caplog
    ):
        path.write_bytes(b"1234")
        handle.submit_read(bytearray(8), path)
        handle.close()
        gc.collect()
        (words,) = unseen(recwarn)
        assert "wanted 8 bytes at offset 0, got 4" in words
        assert str(path) in words
        assert caplog.records == []

    @pytest.mark.parametrize("ask", ["wait", "result", "exception"])
    def test_a_retrieved_error_causes_no_warning(self, handle, path, recwarn, ask):
        path.write_bytes(b"1234")
        request = handle.submit_read(bytearray(8), path)
        with contextlib.suppress(OSError):
            getattr(request, ask)()
        del request
        gc.collect()
        assert unseen(recwarn) == []

    def test_done_does_not_count_as_retrieving_the_error(self, handle, path, recwarn):
        path.write_bytes(b"1234")
        request = handle.submit_read(bytearray(8), path)
        while not request.done():
            os.sched_yield()
        handle.close()
        del request
        gc.collect()
        assert len(unseen(recwarn)) == 1

    @pytest.mark.filterwarnings("error::RuntimeWarning")
    def test_a_warning_that_is_an_error_leaks_no_memory(self, tmp_path, monkeypatch):
        monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
        (tmp_path / "data").write_bytes(b"1234")

        def fail(count):
            """Return the pages of memory in use after requests have failed."""
            for _ in range(count):
                handle.submit_read(bytearray(8), tmp_path / "data")
                handle.drain()
            return int(Path("/proc/self/statm").read_text().split()[1])

        with nvmeio.Handle() as handle:
            before = fail(2_000)
            assert fail(20_000) < before + 500


class TestInterruptions:
    """Python code at the end of a request, which signals may interrupt."""

    @pytest.fixture
    def landings(self, monkeypatch):
        """Functions that are called, each once, before read bytes are copied back."""
        before = []
        land = buffer._copy_back

        def landing(target, staging, source):
            if before:
                before.pop(0)()
            land(target, staging, source)

        monkeypatch.setattr(buffer, "_copy_back", landing)
        return before

    @pytest.fixture
    def strided(self):
        return np.zeros((500, 2), np.int64)[:, 0]

    @pytest.mark.parametrize("interruption", [KeyboardInterrupt, TimeoutError])
    @pytest.mark.parametrize("way", ["wait", "drain"])
    def test_an_exception_of_a_signal_handler_loses_no_bytes(
        self, handle, path, landings, strided, interruption, way
    ):
        path.write_bytes(pattern(4000))

        def interrupt():
            raise interruption("mine")

        landings.append(interrupt)
        request = handle.submit_read(strided, path)
        wait = request.wait if way == "wait" else handle.drain
        with pytest.raises(interruption, match="mine"):
            wait()
        assert landings == []
        assert wait() == (4000 if way == "wait" else None)
        assert strided.tobytes() == pattern(4000)

    def test_an_interrupted_copy_of_a_dropped_request_is_repeated(
        self, handle, path, landings, strided
    ):
        path.write_bytes(pattern(4000))

        def interrupt():
            raise KeyboardInterrupt

        landings.append(interrupt)
        handle.submit_read(strided, path)
        with pytest.raises(KeyboardInterrupt):
            look_until_done(handle)
        assert strided.tobytes() == pattern(4000)
        assert handle.pending == 0

    def test_a_failure_to_copy_back_is_the_requests_error(
        self, handle, path, landings, strided
    ):
        path.write_bytes(pattern(4000))

        def fail():
            raise RuntimeError("no way")

        landings += [fail, fail]
        request = handle.submit_read(strided, path)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no way"):
                request.wait()

    def test_waiting_within_its_own_completion_is_refused(
        self, handle, path, landings, strided
    ):
        path.write_bytes(pattern(4000))
        refused = []

        def wait():
            try:
                request.wait()
            except RuntimeError as error:
                refused.append(str(error))

        landings.append(wait)
        request = handle.submit_read(strided, path)
        assert request.wait() == 4000
        assert "is being completed by this very thread" in refused[0]
        assert strided.tobytes() == pattern(4000)

    def test_a_destructor_at_the_release_may_use_the_handle(self, handle, path):
        path.write_bytes(bytes(100))
        answers = []
        file = nvmeio.File(path)
        gone = weakref.ref(file, lambda _: answers.append(handle.fsync(path)))
        handle.submit_read(bytearray(100), file)
        del file
        look_until_done(handle)
        assert gone() is None
        assert answers == [None]


class TestLifetime:
    def test_a_request_outlives_handle_and_file(self, engine, path):
        expected = pattern(20 * BLOCK)
        path.write_bytes(expected)
        target = Guarded(len(expected))
        handle = nvmeio.Handle(block_size=PAGE, queue_depth=DEPTH, engine=engine)
        file = nvmeio.File(path)
        assert handle.stats()["engine"] == engine
        request = handle.submit_read(target.array, file)
        file.close()
        del file
        handle.close()
        del handle
        gc.collect()
        assert request.wait() == len(expected)
        assert target.content() == expected
        assert left_open(path.parent) == []
        assert str(path) in repr(request)

    def test_the_caller_may_drop_everything(self, slow_handle, path):
        """The bytes land, and then buffer, file and request are released."""
        path.write_bytes(b"12345678")
        array = np.zeros(8, np.uint8).view(Owner)
        witness, gone = bytearray(8), weakref.ref(array)
        with plugged(slow_handle, path.parent):
            with nvmeio.File(path) as file:
                slow_handle.submit_read(array, file)
                slow_handle.submit_read(witness, file)
            del array, file
            # First, because a collection may take longer than the plug does.
            assert str(path) in descriptors_below(path.parent)
            gc.collect()
            assert gone() is not None
        slow_handle.close()
        assert witness == b"12345678"
        assert gone() is None
        assert left_open(path.parent) == []

    def test_a_bytearray_cannot_be_resized_while_it_is_borrowed(self, slow_handle, path):
        path.write_bytes(b"12345678")
        target = bytearray(8)
        with plugged(slow_handle, path.parent):
            request = slow_handle.submit_read(target, path)
            with pytest.raises(BufferError):
                target.append(0)
        assert request.wait() == 8
        target.append(0)
        assert target == b"12345678\0"

    def test_a_finished_request_keeps_nothing_alive(self, handle, path):
        array = np.zeros(100, np.uint8).view(Owner)
        gone = weakref.ref(array)
        request = handle.submit_write(array, path)
        request.wait()
        del array
        assert gone() is None
        assert left_open(path.parent) == []

    @pytest.mark.parametrize("synchronous", [False, True])
    def test_a_raised_error_keeps_nothing_alive(self, engine, path, synchronous):
        """The traceback holds the frame, and so the handle, which nobody polls any more."""
        path.write_bytes(b"12345678")

        def fail():
            handle = nvmeio.Handle(engine=engine)
            file = nvmeio.File(path)
            if synchronous:
                handle.read(bytearray(9), file)
            else:
                handle.submit_read(bytearray(9), file).wait()

        for _ in range(20):
            with pytest.raises(OSError, match="past the end"):
                fail()
        gc.collect()
        assert left_open(path.parent) == []


def await_that(condition):
    """Wait until a condition holds, which the callback thread brings about."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class TestDoneCallbacks:
    """Callbacks run once, in the thread that first sees the request done."""

    def test_callbacks_are_called_once_with_the_request_in_order(self, slow_handle, path):
        path.write_bytes(pattern(PAGE))
        calls = []
        with plugged(slow_handle, path.parent):
            request = slow_handle.submit_read(bytearray(PAGE), path)
            request.add_done_callback(lambda done: calls.append((1, done)))
            request.add_done_callback(lambda done: calls.append((2, done, done.done())))
            assert calls == []
        assert request.wait() == PAGE
        await_that(lambda: len(calls) == 2)
        assert calls == [(1, request), (2, request, True)]
        assert request.wait() == PAGE
        assert request.done()
        assert len(calls) == 2

    def test_a_callback_added_to_a_finished_request_is_called_at_once(self, handle, path):
        request = handle.submit_write(pattern(PAGE), path)
        request.wait()
        threads = []
        request.add_done_callback(lambda _: threads.append(threading.current_thread()))
        assert threads == [threading.current_thread()]

    def test_callbacks_are_called_without_polling(self, slow_handle, path):
        """The callback thread of nvmeio polls, and copies read bytes to their place."""
        path.write_bytes(pattern(2000))
        target = np.zeros((1000, 2), np.uint16)
        seen = []

        def callback(_):
            seen.append((threading.current_thread().name, target[:, 0].tobytes()))

        with plugged(slow_handle, path.parent) as plugs:
            request = slow_handle.submit_read(target[:, 0], path)
            request.add_done_callback(callback)
            for plug in reversed(plugs):
                plug.cancel()
            await_that(lambda: seen)
        assert seen == [("nvmeio-callbacks", pattern(2000))]
        assert request.wait() == 2000

    def test_callbacks_are_called_after_failures_and_cancels(self, slow_handle, path):
        path.write_bytes(pattern(PAGE))
        calls = []
        with plugged(slow_handle, path.parent):
            failing = slow_handle.submit_read(bytearray(PAGE + 1), path)
            dropped = slow_handle.submit_read(bytearray(PAGE), path)
            for request in (failing, dropped):
                request.add_done_callback(calls.append)
            assert dropped.cancel()
            await_that(lambda: set(calls) == {failing, dropped})
        assert failing.exception().errno == errno.ENODATA
        with pytest.raises(CancelledError):
            dropped.wait()

    def test_callbacks_of_a_dropped_request_are_called(self, handle, path):
        calls = []
        request = handle.submit_write(b"1", path)
        request.add_done_callback(lambda done: calls.append(done.nbytes))
        del request
        handle.close()
        await_that(lambda: calls == [1])

    def test_callbacks_added_while_the_request_ends_are_all_called(self, handle, path):
        calls = []
        path.write_bytes(pattern(PAGE))
        with ThreadPoolExecutor(4) as threads:
            for _ in range(50):
                request = handle.submit_read(bytearray(PAGE), path)
                added = [threads.submit(request.add_done_callback, calls.append)]
                added.append(threads.submit(request.wait))
                added.append(threads.submit(request.add_done_callback, calls.append))
                for future in added:
                    future.result()
                await_that(lambda: len(calls) == 2)
                assert calls == [request] * 2
                calls.clear()

    def test_a_callbacks_exception_is_logged_and_the_others_are_called(
        self, handle, path, caplog
    ):
        calls = []
        request = handle.submit_write(b"1", path)
        request.add_done_callback(lambda _: [][0])
        request.add_done_callback(calls.append)
        assert request.wait() == 1
        await_that(lambda: calls == [request] and caplog.records)
        (record,) = caplog.records
        assert record.name == "nvmeio"
        assert record.exc_info[0] is IndexError

    def test_ctrl_c_in_a_callback_is_lost_in_no_thread(self, slow_handle, path, caplog):
        """It is raised where a caller can catch it, else logged; other callbacks run."""

        def press(_):
            raise KeyboardInterrupt

        calls = []
        with plugged(slow_handle, path.parent) as plugs:
            request = slow_handle.submit_write(b"1", path)
            request.add_done_callback(press)
            request.add_done_callback(calls.append)
            for plug in reversed(plugs):
                plug.cancel()
            await_that(lambda: caplog.records)
        assert calls == [request]
        assert [record.exc_info[0] for record in caplog.records] == [KeyboardInterrupt]
        assert request.wait() == 1
        with pytest.raises(KeyboardInterrupt):
            request.add_done_callback(press)

    def test_a_callback_may_use_the_handle_and_the_request(self, handle, path):
        seen = []

        def go_on(request):
            request.add_done_callback(seen.append)
            other = handle.submit_read(bytearray(1), path)
            seen.append(other.wait())
            seen.append(handle.pending)

        request = handle.submit_write(b"1", path)
        request.add_done_callback(go_on)
        assert request.wait() == 1
        await_that(lambda: len(seen) == 3)
        assert sorted(map(str, seen)) == sorted(map(str, [request, 1, 0]))

    def test_a_callback_is_released_after_its_call(self, handle, path):
        array = np.zeros(1, np.uint8).view(Owner)
        gone = weakref.ref(array)
        request = handle.submit_write(b"1", path)
        request.add_done_callback(lambda _, array=array: None)
        del array
        request.wait()
        await_that(lambda: gone() is None)


def test_a_request_cannot_be_constructed():
    with pytest.raises(TypeError, match="made by submit_read"):
        nvmeio.Request()
    request = nvmeio.Request.__new__(nvmeio.Request)
    for ask in (request.wait, request.done, lambda: request.add_done_callback(print)):
        with pytest.raises(ValueError, match="never submitted"):
            ask()
    assert request.cancel() is False


def test_a_request_cannot_be_pickled(handle, path):
    request = handle.submit_write(b"1", path)
    with pytest.raises(TypeError, match="a Request cannot be pickled"):
        pickle.dumps(request)
    assert request.wait() == 1


def test_an_annotation_may_name_the_type_of_the_result():
    assert str(nvmeio.Request[int]) == "nvmeio._native.request.Request[int]"


def test_signatures_can_be_inspected():
    for name, member in inspect.getmembers(nvmeio.Request, callable):
        if not name.startswith("__"):
            assert "self" in inspect.signature(member).parameters, name
            assert inspect.getdoc(member), name


PAST_THE_END = {
    "read": lambda handle, *args: handle.read(*args, 90),
    "submit_read": lambda handle, *args: handle.submit_read(*args, 90).wait(),
}


@pytest.mark.parametrize("read", PAST_THE_END.values(), ids=PAST_THE_END)
def test_the_error_past_the_end_has_path_offset_wanted_and_got(handle, path, read):
    """DeepSpeed's op ends the process."""
    path.write_bytes(bytes(100))
    words = r"past the end of the file: wanted 50 bytes at offset 90, got 10.*data"
    with pytest.raises(OSError, match=words) as caught:
        read(handle, bytearray(50), path)
    assert (caught.value.errno, caught.value.filename) == (errno.ENODATA, str(path))


class Owner(np.ndarray):
    """An array with attributes, which can be part of a cycle."""


def test_a_cycle_through_buffer_request_and_handle_is_collected(engine, folder):
    expected = pattern(50 * BLOCK)
    (folder / "data").write_bytes(expected)
    memory = Guarded(len(expected))
    handle = nvmeio.Handle(block_size=PAGE, queue_depth=DEPTH, engine=engine)
    array = memory.array.view(Owner)
    array.handle = handle
    array.request = request = handle.submit_read(array, folder / "data")
    gone = weakref.ref(handle)
    del array, handle
    gc.collect()
    assert gone() is not None
    assert request.wait() == len(expected)
    del request
    gc.collect()
    assert gone() is None
    assert memory.content() == expected


def test_an_error_in_a_collected_cycle_causes_a_warning(handle, path, recwarn):
    """The collector clears the error before it destroys the request."""
    path.write_bytes(bytes(10))
    request = handle.submit_read(bytearray(11), path)
    while not request.done():
        os.sched_yield()
    assert handle.pending == 0
    cycle = [request]
    cycle.append(cycle)
    del request, cycle
    gc.collect()
    (words,) = unseen(recwarn)
    assert str(path) in words


def test_a_cancelled_request_causes_no_warning(slow_handle, path, recwarn):
    path.write_bytes(bytes(10))
    with plugged(slow_handle, path.parent):
        assert slow_handle.submit_read(bytearray(10), path).cancel() is True
    slow_handle.close()
    gc.collect()
    assert unseen(recwarn) == []


def test_dropped_requests_are_released(handle, path):
    """They are released at the handle's next call after they are done."""
    gone = []
    for index in range(50):
        array = np.zeros(PAGE, np.uint8).view(Owner)
        gone.append(weakref.ref(array))
        handle.submit_write(array, path, index * PAGE)
    del array
    while handle.pending:
        os.sched_yield()
    assert handle.pending == 0
    assert [reference() for reference in gone if reference() is not None] == []
