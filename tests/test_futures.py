"""Requests as futures: awaited, gathered, iterated as they complete, on every engine."""

import asyncio
import contextlib
import errno
import gc
import os
import queue
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import nvmeio
from children import run_child
from helpers import DEPTH, ENGINES, PAGE, SLOW, Guarded, no_descriptors, pattern, plugged
from mounts import SLOW_PLACES
from nvmeio._events.listener import Listener, _Notice
from nvmeio.futures import ThreadListener


@pytest.fixture(params=["asyncio", "uvloop"])
def new_loop(request):
    """A function that makes an event loop of asyncio or uvloop."""
    if request.param == "asyncio":
        return asyncio.new_event_loop
    return pytest.importorskip("uvloop").new_event_loop


@pytest.fixture
def run(new_loop):
    """A function that runs a coroutine in a new event loop, and closes the loop."""

    def run(coroutine):
        return run_in(new_loop(), coroutine)

    return run


def run_in(loop, coroutine):
    """Do what asyncio.run() does, with any loop."""
    with contextlib.closing(loop):
        try:
            return loop.run_until_complete(coroutine)
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())


def test_a_request_may_be_done_while_its_listener_closes(open_handle, path):
    class Awaited(set):
        """Another thread removes the requests as soon as this one has looked."""

        def __len__(self):
            size = super().__len__()
            self.clear()
            return size

    path.write_bytes(pattern(PAGE))
    listener = ThreadListener()
    request = open_handle().submit_read(bytearray(PAGE), path)
    listener._awaited = Awaited([request])
    listener.close()
    assert request.wait() == PAGE


@pytest.fixture
def slow_handle(open_handle):
    """A handle that `plugged` can keep busy."""
    return open_handle(**SLOW)


async def leave(handle):
    """Enter and leave the block of a handle."""
    async with handle:
        pass


def eventfds():
    """Return the kernel's numbers of the eventfds of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            text = Path(f"/proc/self/fdinfo/{name}").read_text()
            found.update(re.findall(r"^eventfd-id:\s+(\d+)$", text, re.MULTILINE))
    return found


@pytest.fixture
def keep_eventfds():
    """Keep the numbers of the eventfds that earlier tests have left.

    They may be closed meanwhile, and a new one would get the number of an old one.
    """
    kept = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[eventfd]":
                kept.append(os.dup(int(name)))
    yield
    for each in kept:
        os.close(each)


def task_count():
    """Count the threads of this process, including those of C."""
    return len(os.listdir("/proc/self/task"))


@pytest.fixture
def pages(path):
    """Functions that start and check a read of one page of a file."""
    data = pattern(64 * PAGE)
    path.write_bytes(data)

    def start(handle, index):
        guarded = Guarded(PAGE)
        return handle.submit_read(guarded.array, path, index % 64 * PAGE), guarded

    def check(guarded, index):
        assert guarded.content() == data[index % 64 * PAGE :][:PAGE]

    return start, check


class TestAwait:
    """await request."""

    def test_await_returns_what_wait_returns(self, handle, path, run):
        async def main():
            write = handle.submit_write(pattern(3 * PAGE + 1), path)
            assert await write == write.wait() == await write == 3 * PAGE + 1
            assert await handle.submit_fsync(path) == 0
            target = np.zeros((PAGE, 2), np.uint8)
            assert await handle.submit_read(target[:, 1], path) == PAGE
            assert target[:, 1].tobytes() == pattern(3 * PAGE + 1)[:PAGE]

        run(main())

    def test_thousands_are_gathered_without_a_thread(self, handle, pages, run):
        start, check = pages

        async def main():
            reads = [start(handle, index) for index in range(2000)]
            before = task_count(), threading.active_count()
            got = await asyncio.gather(*(request for request, _ in reads))
            # Those of the engine may begin late, one for each block of the queue.
            assert task_count() <= before[0] + DEPTH
            assert threading.active_count() <= before[1]
            assert got == [PAGE] * 2000
            for index, (_, guarded) in enumerate(reads):
                check(guarded, index)

        run(main())

    def test_the_loop_runs_during_an_await(self, slow_handle, path, pages, run):
        start, check = pages

        async def main():
            with plugged(slow_handle, path.parent):
                request, guarded = start(slow_handle, 5)
                task = asyncio.ensure_future(request)
                for _ in range(5):
                    await asyncio.sleep(0)
                assert not task.done()
                assert not request.done()
            assert await task == PAGE
            check(guarded, 5)

        run(main())

    def test_await_raises_what_wait_raises(self, slow_handle, path, run):
        path.write_bytes(pattern(PAGE))

        async def main():
            with plugged(slow_handle, path.parent):
                short = slow_handle.submit_read(bytearray(PAGE + 1), path)
            with pytest.raises(OSError, match="past the end") as caught:
                await short
            assert (caught.value.errno, caught.value.filename) == (errno.ENODATA, str(path))

        run(main())

    def test_a_cancelled_request_raises_asyncios_error(self, slow_handle, path, pages, run):
        start, _ = pages

        async def main():
            with plugged(slow_handle, path.parent):
                dropped, _ = start(slow_handle, 1)
                tasks = [asyncio.ensure_future(dropped) for _ in range(3)]
                tasks.append(asyncio.create_task(dropped.as_coroutine()))
                await asyncio.sleep(0)
                assert dropped.cancel()
                for task in tasks:
                    with pytest.raises(asyncio.CancelledError) as caught:
                        await task
                    # Before Python 3.11 a task hands on an error without its message.
                    words = str(caught.value) or str(caught.value.__context__)
                    assert "was cancelled" in words
                assert all(task.cancelled() for task in tasks)
            with pytest.raises(asyncio.CancelledError) as caught:
                await dropped
            assert isinstance(caught.value.__cause__, CancelledError)
            with pytest.raises(CancelledError):
                dropped.wait(0)
            async for request in nvmeio.as_completed([dropped]):
                with pytest.raises(CancelledError):
                    request.wait(0)

        run(main())

    def test_many_tasks_of_many_loops_await_one_request(
        self, slow_handle, path, pages, new_loop
    ):
        start, check = pages
        begun = threading.Barrier(5)

        async def main(request):
            tasks = [asyncio.ensure_future(request) for _ in range(4)]
            await asyncio.sleep(0)
            begun.wait()
            return await asyncio.gather(*tasks)

        with ThreadPoolExecutor(4) as threads:
            with plugged(slow_handle, path.parent):
                request, guarded = start(slow_handle, 3)
                loops = [
                    threads.submit(run_in, new_loop(), main(request)) for _ in range(4)
                ]
                begun.wait()
            assert [loop.result() for loop in loops] == [[PAGE] * 4] * 4
        check(guarded, 3)

    def test_loops_in_many_threads_share_a_handle(self, handle, pages, new_loop):
        start, check = pages

        async def work(first):
            for index in range(first, first + 20):
                request, guarded = start(handle, index)
                assert await request == PAGE
                check(guarded, index)

        async def main(number):
            await asyncio.gather(*(work(100 * number + n) for n in range(10)))

        with ThreadPoolExecutor(4) as threads:
            jobs = [threads.submit(run_in, new_loop(), main(number)) for number in range(4)]
            for job in jobs:
                job.result()
        assert handle.pending == 0

    def test_a_request_finished_by_another_thread_wakes_the_task(
        self, slow_handle, path, pages, run
    ):
        start, check = pages

        async def main():
            with plugged(slow_handle, path.parent):
                reads = [start(slow_handle, index) for index in range(8)]
                tasks = [asyncio.ensure_future(request) for request, _ in reads]
                await asyncio.sleep(0)
            # The loop polls nothing while other threads finish all requests.
            with ThreadPoolExecutor(8) as threads:
                list(threads.map(lambda read: read[0].wait(), reads))
            assert await asyncio.gather(*tasks) == [PAGE] * 8
            for index, (_, guarded) in enumerate(reads):
                check(guarded, index)

        run(main())

    def test_await_needs_an_event_loop(self, slow_handle, path):
        with plugged(slow_handle, path.parent):
            request = slow_handle.submit_write(pattern(1), path)
            with pytest.raises(RuntimeError, match="no running event loop"):
                next(request.__await__())
        assert request.wait() == 1

    @pytest.mark.usefixtures("keep_eventfds")
    def test_a_loop_that_closes_first_is_released(self, slow_handle, path, pages, new_loop):
        start, check = pages
        before = eventfds()
        loop = new_loop()
        with plugged(slow_handle, path.parent):
            request, guarded = start(slow_handle, 1)
            task = asyncio.ensure_future(request, loop=loop)
            loop.run_until_complete(asyncio.sleep(0))
            assert len(eventfds() - before) >= 1
            # A task that will never go on still awaits it.
            with contextlib.suppress(RuntimeError):
                loop.close()
        assert request.wait() == PAGE
        check(guarded, 1)
        assert not task.done()
        task._log_destroy_pending = False
        del task
        gc.collect()
        assert eventfds() - before == set()


class TestCancelling:
    """A cancelled await cancels the request, waits for it, then raises."""

    def test_after_a_cancelled_await_the_memory_is_the_callers(
        self, slow_handle, path, pages, run
    ):
        start, _ = pages

        async def main():
            with plugged(slow_handle, path.parent):
                request, guarded = start(slow_handle, 1)
                guarded.array[:] = 7
                task = asyncio.ensure_future(request)
                await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                # stats() must already be right when the task ends.
                assert "failed" in repr(request)
                with pytest.raises(CancelledError):
                    request.wait(0)
            slow_handle.close()
            assert guarded.content() == bytes([7]) * PAGE

        run(main())

    def test_a_transfer_in_flight_ends_before_the_cancelled_await(
        self, open_handle, path, run
    ):
        handle = open_handle(**SLOW)
        size = 2000 * PAGE
        path.write_bytes(pattern(size))

        async def main():
            for _ in range(5):
                guarded = Guarded(size)
                request = handle.submit_read(guarded.array, path)
                task = asyncio.ensure_future(request)
                await asyncio.sleep(0)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
                assert not repr(request).endswith("in flight>")
                guarded.array[:] = 7
                assert handle.pending == 0
                assert guarded.content() == bytes([7]) * size

        run(main())

    def test_a_timeout_cancels_too(self, slow_handle, path, pages, run):
        start, check = pages

        async def main():
            with plugged(slow_handle, path.parent):
                request, _ = start(slow_handle, 1)
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(request, 0.01)
                with pytest.raises(CancelledError):
                    request.wait(0)
            other, guarded = start(slow_handle, 1)
            assert await asyncio.wait_for(other, 60) == PAGE
            check(guarded, 1)

        run(main())

    @pytest.mark.parametrize(("engine", "slow"), SLOW_PLACES, indirect=["slow"])
    @pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
    @pytest.mark.parametrize("work", ["cancel_awaits", "cancel_leaving"])
    def test_a_second_cancel_changes_nothing(self, slow, engine, loop, work):
        pytest.importorskip(loop)
        report = run_child(work, **slow, engine=engine, loop=loop).report
        assert report == {"ended_early": [False, False], "cancelled": True}


class TestAsCoroutine:
    """request.as_coroutine(), for functions that accept only coroutines."""

    def test_a_task_is_made_of_a_coroutine(self, handle, pages, run):
        start, check = pages

        async def main():
            reads = [start(handle, index) for index in range(20)]
            tasks = [asyncio.create_task(request.as_coroutine()) for request, _ in reads]
            done, left = await asyncio.wait(tasks)
            assert (len(done), left) == (20, set())
            assert [task.result() for task in tasks] == [PAGE] * 20
            for index, (_, guarded) in enumerate(reads):
                check(guarded, index)

        run(main())

    def test_a_coroutine_never_awaited_warns_and_the_transfer_goes_on(self, handle, pages):
        start, check = pages
        request, guarded = start(handle, 1)
        with pytest.warns(RuntimeWarning, match="'as_coroutine' was never awaited"):
            request.as_coroutine()
        assert request.wait() == PAGE
        check(guarded, 1)


class TestAsyncWith:
    """async with Handle()."""

    def test_async_with_waits_for_requests_nobody_awaited(self, open_handle, path, run):
        size = 300 * PAGE
        path.write_bytes(pattern(size))

        async def main():
            async with open_handle(**SLOW) as handle:
                guards = [Guarded(size) for _ in range(4)]
                requests = [handle.submit_read(each.array, path) for each in guards]
                strided = np.zeros((PAGE, 2), np.uint8)
                requests.append(handle.submit_read(strided[:, 1], path))
            assert (handle.closed, handle.pending) == (True, 0)
            # These must already be true before anybody polls.
            assert all(repr(request).endswith("done>") for request in requests)
            assert all(each.content() == pattern(size) for each in guards)
            assert strided[:, 1].tobytes() == pattern(size)[:PAGE]
            with pytest.raises(ValueError, match="the handle is closed"):
                async with handle:
                    pass

        run(main())

    def test_the_loop_runs_during_the_end_without_a_thread(
        self, slow_handle, path, run, monkeypatch
    ):
        # A completion wakes it, not a timeout.
        monkeypatch.setattr("nvmeio._events.event_loop.SLICE_S", 1000)

        async def main():
            with plugged(slow_handle, path.parent) as plugs:
                before = threading.active_count()
                task = asyncio.create_task(leave(slow_handle))
                for _ in range(5):
                    await asyncio.sleep(0)
                assert threading.active_count() <= before
                assert not task.done()
                with pytest.raises(ValueError, match="the handle is closed"):
                    slow_handle.submit_write(b"", path)
                plugs[-1].cancel()
            await asyncio.wait_for(task, 60)
            assert slow_handle.closed

        run(main())

    @pytest.mark.parametrize("way", ["raise", "cancel"])
    def test_a_failed_block_waits_too(self, slow_handle, path, run, way):
        async def leave(request):
            async with slow_handle:
                if way == "raise":
                    raise KeyError(way)
                await request

        async def main():
            with plugged(slow_handle, path.parent) as plugs:
                task = asyncio.create_task(leave(plugs[-1]))
                await asyncio.sleep(0)
                if way == "cancel":
                    task.cancel()
                for _ in range(5):
                    await asyncio.sleep(0)
                assert not task.done()
                assert slow_handle.pending
            with pytest.raises(KeyError if way == "raise" else asyncio.CancelledError):
                await task
            assert (slow_handle.closed, slow_handle.pending) == (True, 0)

        run(main())

    def test_another_thread_may_close_the_handle_meanwhile(self, slow_handle, path, run):
        async def main():
            with ThreadPoolExecutor(1) as thread:
                with plugged(slow_handle, path.parent):
                    task = asyncio.create_task(leave(slow_handle))
                    await asyncio.sleep(0)
                    closing = thread.submit(slow_handle.close)
                await task
                closing.result()
            assert slow_handle.closed

        run(main())

    def test_async_with_ends_without_descriptors(self, slow_handle, path, run):
        async def main():
            with plugged(slow_handle, path.parent) as plugs:
                await slow_handle.__aenter__()
                with no_descriptors():
                    task = asyncio.create_task(slow_handle.__aexit__(None, None, None))
                    await asyncio.sleep(0.01)
                assert not task.done()
                assert slow_handle.pending
                plugs[-1].cancel()
            await task
            assert (slow_handle.closed, slow_handle.pending) == (True, 0)

        run(main())

    def test_callbacks_were_called_at_the_end(self, open_handle, path, run):
        path.write_bytes(pattern(PAGE))
        called = []

        async def main():
            async with open_handle() as handle:
                request = handle.submit_read(bytearray(PAGE), path)
                request.add_done_callback(called.append)
            assert called == [request]

        run(main())

    @pytest.mark.usefixtures("keep_eventfds")
    def test_async_with_leaves_no_descriptor(self, engine, handle_class, path, new_loop):
        path.write_bytes(pattern(PAGE))

        async def main():
            async with handle_class(engine=engine) as handle:
                handle.submit_read(bytearray(PAGE), path)

        loop = new_loop()
        loop.run_until_complete(asyncio.sleep(0))
        before = eventfds()
        for _ in range(3):
            loop.run_until_complete(main())
        assert eventfds() <= before
        run_in(loop, asyncio.sleep(0))


class TestDescriptors:
    """There is one eventfd for each handle and loop, and none afterwards."""

    @pytest.mark.usefixtures("keep_eventfds")
    def test_there_is_one_eventfd_for_each_handle_and_loop(
        self, open_handle, folder, pages, run
    ):
        start, _ = pages
        handles = [open_handle(**SLOW) for _ in range(2)]
        folders = [folder / name for name in ("first", "second")]
        for one in folders:
            one.mkdir()
        # Those of earlier tests must not be closed meanwhile.
        gc.collect()
        before = eventfds()

        async def listed(requests):
            return [request async for request in nvmeio.as_completed(requests)]

        async def main():
            own = eventfds()
            for _ in range(3):
                with plugged(handles[0], folders[0]), plugged(handles[1], folders[1]):
                    requests = [start(handles[n % 2], n)[0] for n in range(16)]
                    tasks = [asyncio.ensure_future(request) for request in requests]
                    tasks.append(asyncio.ensure_future(listed(requests)))
                    await asyncio.sleep(0)
                    assert len(eventfds() - own) == 2
                await asyncio.gather(*tasks)
            handles[0].close()
            assert len(eventfds() - own) == 1
            handles[1].close()
            assert eventfds() <= own

        run(main())
        assert eventfds() <= before

    @pytest.mark.usefixtures("keep_eventfds")
    @pytest.mark.all_combinations
    @pytest.mark.parametrize("thread", ["own", "other"])
    @pytest.mark.parametrize("way", ["close", "drop"])
    def test_the_handle_may_go_while_it_is_awaited(self, engine, path, run, way, thread):
        path.write_bytes(pattern(64 * PAGE))
        handles = [nvmeio.Handle(engine=engine, **SLOW)]

        def leave():
            if way == "close":
                handles[0].close()
            handles.clear()

        async def main():
            first = eventfds()
            buffers = [bytearray(64 * PAGE) for _ in range(8)]
            requests = [handles[0].submit_read(buffer, path) for buffer in buffers]
            tasks = [asyncio.ensure_future(request) for request in requests]
            await asyncio.sleep(0)
            if thread == "own":
                leave()
                assert eventfds() <= first
            else:
                await asyncio.get_running_loop().run_in_executor(None, leave)
            assert await asyncio.gather(*tasks) == [64 * PAGE] * 8
            assert all(buffer == pattern(64 * PAGE) for buffer in buffers)
            # Let the loop run what the other thread has scheduled.
            await asyncio.sleep(0)
            assert eventfds() <= first
            await asyncio.get_running_loop().shutdown_default_executor()

        run(main())

    @pytest.mark.usefixtures("keep_eventfds")
    def test_waiting_threads_leave_no_eventfd(self, slow_handle, path, pages):
        start, _ = pages
        before = eventfds()
        with plugged(slow_handle, path.parent):
            requests = [start(slow_handle, index)[0] for index in range(3)]
            assert nvmeio.wait(requests, 0.01).not_done == set(requests)
            with pytest.raises(TimeoutError):
                next(iter(nvmeio.as_completed(requests, 0.01)))
            left_early = iter(nvmeio.as_completed(requests))
            requests[0].cancel()
            assert next(left_early) is requests[0]
            del left_early
            assert eventfds() - before == set()
        # Nothing may write to a closed eventfd.
        reused = os.eventfd(0, os.EFD_NONBLOCK)
        assert nvmeio.wait(requests).not_done == set()
        with pytest.raises(BlockingIOError):
            os.eventfd_read(reused)
        os.close(reused)

    @pytest.mark.parametrize("way", ["await", "async for", "as_completed", "wait"])
    def test_without_descriptors_completions_are_polled(
        self, slow_handle, path, pages, run, way
    ):
        start, check = pages

        async def listed(requests):
            return [request async for request in nvmeio.as_completed(requests)]

        async def main():
            with plugged(slow_handle, path.parent) as plugs:
                reads = [start(slow_handle, index) for index in range(3)]
                requests = [request for request, _ in reads]
                with no_descriptors():
                    tasks = [asyncio.ensure_future(request) for request in requests]
                    if way == "async for":
                        tasks.append(asyncio.ensure_future(listed(requests)))
                    await asyncio.sleep(0.01)
                    assert not any(task.done() for task in tasks)
                    for plug in plugs:
                        plug.cancel()
                    await asyncio.gather(*tasks)
            return reads

        def block():
            with plugged(slow_handle, path.parent) as plugs:
                reads = [start(slow_handle, index) for index in range(3)]
                requests = [request for request, _ in reads]
                with no_descriptors():
                    assert nvmeio.wait(requests, 0.01).done == set()
                    for plug in plugs:
                        plug.cancel()
                    if way == "wait":
                        assert nvmeio.wait(requests).done == set(requests)
                    else:
                        assert {*nvmeio.as_completed(requests)} == {*requests}
            return reads

        for index, (request, guarded) in enumerate(
            run(main()) if way in ("await", "async for") else block()
        ):
            assert request.wait() == PAGE
            check(guarded, index)


class TestAsCompleted:
    """Requests in order of completion, in threads and in event loops."""

    @pytest.fixture(params=["for", "asyncio", "uvloop"])
    def collected(self, request):
        """A function that lists the results of as_completed(), by `for` or `async for`."""
        if request.param == "for":
            return lambda *args, **options: list(nvmeio.as_completed(*args, **options))
        loops = {"asyncio": asyncio}.get(request.param) or pytest.importorskip("uvloop")

        def collected(*args, **options):
            async def main():
                completions = nvmeio.as_completed(*args, **options)
                return [request async for request in completions]

            return run_in(loops.new_event_loop(), main())

        return collected

    def test_each_is_yielded_once(self, open_handle, pages, collected):
        start, check = pages
        handles = [open_handle() for _ in range(3)]
        reads = dict(start(handles[index % 3], index) for index in range(600))
        found = collected(request for request in [*reads, *list(reads)[:10]])
        assert len(found) == 600
        assert set(found) == set(reads)
        for index, (request, guarded) in enumerate(reads.items()):
            assert request.wait(0) == PAGE
            check(guarded, index)

    def test_requests_are_yielded_in_order_of_completion(
        self, slow_handle, path, pages, collected, monkeypatch
    ):
        start, _ = pages
        order, listeners = [4, 2, 0, 3, 1], queue.SimpleQueue()
        listen = Listener.listen

        def listen_and_tell(self, requests):
            count = listen(self, requests)
            listeners.put(self)
            return count

        def cancel_in_turn():
            awaited = listeners.get(timeout=60)._awaited
            for index in order[1:]:
                requests[index].cancel()
                # Until this thread or the waiting one has reported it.
                while requests[index] in awaited:
                    requests[index].done()
                    time.sleep(0.001)

        with plugged(slow_handle, path.parent):
            requests = [start(slow_handle, index)[0] for index in range(6)]
            # One is done before the wait, the others during it.
            requests[4].cancel()
            requests[4].done()
            monkeypatch.setattr(Listener, "listen", listen_and_tell)
            canceller = threading.Thread(target=cancel_in_turn)
            canceller.start()
            found = collected(requests[:5])
            canceller.join()
        assert found == [requests[index] for index in order]
        assert requests[5].wait() == PAGE

    def test_as_completed_times_out(self, slow_handle, path, pages, collected):
        start, check = pages
        with plugged(slow_handle, path.parent):
            request, guarded = start(slow_handle, 1)
            for timeout in (0, 0.02):
                with pytest.raises(TimeoutError, match=f"1 of 1 .* {timeout} s; they go"):
                    collected([request], timeout)
        assert collected([request], timeout=60) == [request]
        assert collected([request], 0) == [request]
        check(guarded, 1)

    def test_failures_are_yielded_and_not_raised(self, handle, path, collected):
        path.write_bytes(pattern(10))
        request = handle.submit_read(bytearray(11), path)
        assert collected([request]) == [request]
        assert request.exception().errno == errno.ENODATA

    def test_as_completed_of_nothing_yields_nothing(self, engine, collected):
        assert collected([]) == []

    def test_next_takes_one_completion_at_a_time(self, handle, pages, run):
        start, _ = pages
        reads = {start(handle, index)[0] for index in range(3)}
        completions = nvmeio.as_completed(reads)
        found = {next(completions), *completions}
        assert found == reads
        with pytest.raises(StopIteration):
            next(completions)

        async def main():
            completions = nvmeio.as_completed(reads)
            found = {await anext(completions)}
            found |= {request async for request in completions}
            with pytest.raises(StopAsyncIteration):
                await anext(completions)
            return found

        assert run(main()) == reads

    def test_a_cancelled_iteration_can_be_repeated(self, slow_handle, path, pages, run):
        start, _ = pages

        async def cancelled():
            for _ in range(2):
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(anext(completions), 0.01)

        async def rest():
            return [request async for request in completions]

        with plugged(slow_handle, path.parent):
            reads = {start(slow_handle, index)[0] for index in range(3)}
            completions = nvmeio.as_completed(reads)
            # Each in an event loop of its own.
            for _ in range(2):
                run(cancelled())
            assert not any(request.done() for request in reads)
        found = run(rest())
        assert (set(found), len(found)) == (reads, 3)

    @pytest.mark.usefixtures("keep_eventfds")
    def test_a_thread_and_a_loop_may_iterate_in_turns(self, open_handle, pages, run):
        start, _ = pages
        handles = [open_handle() for _ in range(2)]
        reads = {start(handles[index % 2], index)[0] for index in range(60)}
        completions = nvmeio.as_completed(reads)
        before, found = eventfds(), set()

        async def main():
            found.update([await anext(completions) for _ in range(10)])

        for _ in range(3):
            found.update(next(completions) for _ in range(10))
            run(main())
        assert found == reads
        assert list(completions) == []
        assert eventfds() <= before

    @pytest.mark.usefixtures("keep_eventfds")
    def test_a_dropped_iterator_leaves_nothing(self, handle, slow_handle, path, pages):
        """It runs no Python code meanwhile, in which a Ctrl-C would be lost."""
        start, _ = pages

        def notices():
            return sum(type(each) is _Notice for each in gc.get_objects())

        before, kept, called = notices(), eventfds(), []
        with plugged(slow_handle, path.parent):
            pending, _ = start(slow_handle, 0)
            completions = nvmeio.as_completed([start(handle, 1)[0], pending])
            next(completions)
            assert notices() > before
            sys.setprofile(lambda frame, event, _: called.append((event, frame.f_code)))
            del completions
            sys.setprofile(None)
            assert [code for event, code in called if event == "call"] == []
            assert notices() == before
            assert eventfds() <= kept
        assert pending.wait() == PAGE

    def test_only_one_waiter_at_a_time_is_allowed(self, slow_handle, path, pages, run):
        start, _ = pages

        async def main():
            with plugged(slow_handle, path.parent):
                reads = {start(slow_handle, index)[0] for index in range(2)}
                completions = nvmeio.as_completed(reads)
                first = asyncio.ensure_future(anext(completions))
                await asyncio.sleep(0)
                with pytest.raises(RuntimeError, match="another thread or task"):
                    await anext(completions)
                with pytest.raises(RuntimeError, match="another thread or task"):
                    next(completions)
            assert {await first, await anext(completions)} == reads

        run(main())

    def test_only_requests_are_accepted(self, handle, pages):
        start, _ = pages
        request, _ = start(handle, 0)
        for function in (nvmeio.as_completed, nvmeio.wait):
            with pytest.raises(
                TypeError, match=r"requests\[1\] is 5; it must be a Request"
            ):
                function([request, 5])
            with pytest.raises(TypeError, match=r"pass \[request\]"):
                function(request)
            with pytest.raises(ValueError, match="timeout is -1"):
                function([request], -1)
            with pytest.raises(TypeError, match="timeout is True"):
                function([request], True)
        for wait in (request.wait, request.result, request.exception):
            with pytest.raises(TypeError, match="timeout is '1'; it must be seconds, or"):
                wait("1")
        with pytest.raises(ValueError, match="return_when is 'ANY'; it must be one"):
            nvmeio.wait([], return_when="ANY")
        assert request.wait() == PAGE


class TestWait:
    """nvmeio.wait()."""

    def test_wait_returns_when_all_are_done(self, open_handle, pages):
        start, check = pages
        handles = [open_handle() for _ in range(2)]
        reads = dict(start(handles[index % 2], index) for index in range(500))
        done, not_done = nvmeio.wait(iter(reads))
        assert (done, not_done) == (set(reads), set())
        for index, guarded in enumerate(reads.values()):
            check(guarded, index)
        assert nvmeio.wait([]) == (set(), set())

    def test_wait_returns_when_the_first_is_done(self, slow_handle, path, pages):
        start, _ = pages
        with plugged(slow_handle, path.parent):
            requests = [start(slow_handle, index)[0] for index in range(3)]
            canceller = threading.Timer(0.02, requests[1].cancel)
            canceller.start()
            found = nvmeio.wait(requests, return_when="FIRST_COMPLETED")
            canceller.join()
            assert found.done == {requests[1]}
            assert found.not_done == {requests[0], requests[2]}
            assert nvmeio.wait(found.not_done, 0.01) == (set(), found.not_done)
            assert nvmeio.wait(requests, 0, "FIRST_COMPLETED").done == {requests[1]}

    def test_wait_returns_at_the_first_failure(self, slow_handle, path, pages, recwarn):
        start, _ = pages
        with plugged(slow_handle, path.parent):
            requests = [start(slow_handle, index)[0] for index in range(3)]
            requests[0].cancel()
            found = nvmeio.wait(requests, 0.02, "FIRST_EXCEPTION")
            assert found == ({requests[0]}, set(requests[1:]))
            requests.append(slow_handle.submit_read(bytearray(PAGE), path, 64 * PAGE))
            found = nvmeio.wait(requests, None, "FIRST_EXCEPTION")
            assert found == ({requests[0], requests[3]}, set(requests[1:3]))
        found = nvmeio.wait(requests[:3], return_when="FIRST_EXCEPTION")
        assert found == (set(requests[:3]), set())
        # wait() leaves the error for the caller.
        del requests, found
        assert slow_handle.pending == 0
        gc.collect()
        assert ["never looked at" in str(warning.message) for warning in recwarn] == [True]

    def test_a_request_finished_by_another_thread_wakes_wait(
        self, slow_handle, path, pages
    ):
        start, _ = pages
        with ThreadPoolExecutor(8) as threads:
            for _ in range(5):
                with plugged(slow_handle, path.parent):
                    requests = [start(slow_handle, index)[0] for index in range(8)]
                    waiting = [
                        threads.submit(nvmeio.wait, requests),
                        threads.submit(list, nvmeio.as_completed(requests)),
                        *(threads.submit(request.wait) for request in requests[:6]),
                    ]
                assert waiting[0].result() == (set(requests), set())
                assert set(waiting[1].result()) == set(requests)
                assert [one.result() for one in waiting[2:]] == [PAGE] * 6


@pytest.mark.parametrize("engine", ENGINES)
def test_a_forked_child_waits_for_nothing_of_its_parent(tmp_path, engine):
    report = run_child("fork_awaits", folder=str(tmp_path), engine=engine).report
    assert report == {"parent": 8 * 4096}


def test_importing_nvmeio_does_not_import_asyncio():
    code = "import sys, nvmeio; sys.exit('asyncio' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
