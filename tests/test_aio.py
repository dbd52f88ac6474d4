"""Coroutine functions: the same results, and cancelled calls leave nothing behind."""

import asyncio
import contextlib
import fcntl
import functools
import gc
import inspect
import os
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

import nvmeio
from children import run_child, skip_sanitized
from helpers import MIB, PAGE, descriptors_below, pattern, plugged
from nvmeio import aio
from nvmeio._arrays.indexing import Selection

# Functions without a coroutine function: the two of DeepSpeed.
OF_DEEPSPEED = {"aio_read", "aio_write"}
OF_ARRAYS = {"getitem", "setitem", "append", "flush"}

OLD, NEW = pattern(3 * PAGE, 1), pattern(5 * PAGE + 1, 2)


@pytest.fixture(params=["asyncio", "uvloop", "debug"])
def new_loop(request):
    """A function that makes an event loop: asyncio, uvloop, asyncio in debug mode."""
    if request.param == "uvloop":
        return pytest.importorskip("uvloop").new_event_loop

    def new_loop():
        loop = asyncio.new_event_loop()
        loop.set_debug(request.param == "debug")
        return loop

    return new_loop


@pytest.fixture
def run(new_loop):
    """A function that runs a coroutine in a new event loop, and closes the loop."""

    def run(coroutine):
        with contextlib.closing(new_loop()) as loop:
            try:
                return loop.run_until_complete(coroutine)
            finally:
                loop.run_until_complete(loop.shutdown_default_executor())

    return run


class Gate(ThreadPoolExecutor):
    """An executor that holds one call, given by its number, until it is opened."""

    def __init__(self, number):
        super().__init__(1)
        self.number = number
        self.count = 0
        self.reached = threading.Event()
        self.opened = threading.Event()

    def submit(self, function, /, *args, **kwargs):
        self.count += 1
        if self.count == self.number:
            function = functools.partial(self._held, function)
        return super().submit(function, *args, **kwargs)

    def _held(self, function, *args):
        self.reached.set()
        assert self.opened.wait(60)
        return function(*args)


async def cancelled_at(gate, task, look=None):
    """Cancel a task twice in the held call, which it waits for; False if it ends before."""
    while not (gate.reached.is_set() or task.done()):
        await asyncio.sleep(0)
    if task.done():
        await task
        return False
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
    gate.opened.set()
    with pytest.raises(asyncio.CancelledError) as caught:
        await task
    if look is not None:
        # The error still holds what the task had.
        look()
    del caught
    return True


def in_use():
    """Return the resources that a call must release: descriptors, memory of the pool."""
    gc.collect()
    return os.listdir("/proc/self/fd"), nvmeio.pool_stats()["bytes_used"]


def submitted(handle):
    """Return how many requests were submitted to a handle."""
    return handle.stats()["requests"]


def call_of(way, path, memory=NEW):
    """Return a coroutine that replaces a file, and the file's new contents."""
    if way == "write_file":
        return aio.write_file(memory, path, sync=True), NEW
    array = np.frombuffer(memory, np.uint8)
    nvmeio.save(path.with_name("like"), array)
    expected = path.with_name("like").read_bytes()
    path.with_name("like").unlink()
    return aio.save(path, array, sync=True), expected


class TestRule:
    """Every blocking function has a coroutine function of the same name and arguments."""

    def test_every_function_of_the_default_handle_has_one(self):
        blocking = {
            name
            for name in nvmeio.__all__
            if "Uses ``default_handle()``" in (getattr(nvmeio, name).__doc__ or "")
        }
        assert "load" in blocking
        assert {*aio.__all__} == (blocking - OF_DEEPSPEED) | OF_ARRAYS

    @pytest.mark.parametrize("name", aio.__all__)
    def test_each_is_a_coroutine_function_with_the_same_arguments(self, name):
        function = getattr(aio, name)
        assert inspect.iscoroutinefunction(function)
        assert function.__name__ == name
        if name in OF_ARRAYS:
            method = f"__{name}__" if name.endswith("item") else name
            expected = inspect.signature(getattr(nvmeio.ArrayFile, method))
        else:
            expected = inspect.signature(getattr(nvmeio, name))
        found = inspect.signature(function)
        names = [each for each in found.parameters if each != "array" or name == "save"]
        assert names == [each for each in expected.parameters if each != "self"]
        for each in names:
            for what in ("kind", "default"):
                assert getattr(found.parameters[each], what) == getattr(
                    expected.parameters[each], what
                )


class TestResults:
    """Coroutine functions do what the functions of the same name do."""

    @pytest.mark.parametrize("size", [0, 1, PAGE, 3 * MIB + 1])
    def test_files_are_written_and_read(self, default_engine, path, run, size):
        data = pattern(size)

        async def main():
            assert await aio.write_file(data, path, sync=True) == size
            assert path.read_bytes() == data
            found = await aio.read_file(path)
            assert (found.dtype, found.flags.writeable) == (np.uint8, True)
            assert found.tobytes() == data
            target = bytearray(size)
            assert await aio.read_into(target, path) == size
            assert target == data
            assert await aio.write_file(data[: size // 2], path, atomic=False) == size // 2
            assert path.read_bytes() == data[: size // 2]

        run(main())
        assert os.listdir(path.parent) == [path.name]

    @pytest.mark.parametrize("order", ["C", "F"])
    def test_arrays_are_saved_and_loaded(self, default_engine, path, run, order):
        array = np.asarray(np.arange(6000.0).reshape(60, 100), order=order)

        async def main():
            await aio.save(path, array[::-1], sync=True)
            assert (np.load(path) == array[::-1]).all()
            np.save(path.with_suffix(".npy"), array)
            found = await aio.load(path.with_suffix(".npy"))
            assert found.flags.f_contiguous == array.flags.f_contiguous
            assert (found == array).all()

        run(main())

    @pytest.mark.parametrize("options", [{}, {"sync": True}, {"atomic": False}], ids=str)
    @pytest.mark.parametrize("name", ["save", "write_file"])
    def test_as_much_is_written_and_synced(self, default_engine, path, run, name, options):
        handle, data = nvmeio.default_handle(), np.arange(PAGE)
        arguments = (path, data) if name == "save" else (data, path)
        path.touch()
        requests, contents = [], []
        for asynchronous in (False, True):
            path.write_bytes(bytes(20 * PAGE))
            before = submitted(handle)
            result = getattr(aio if asynchronous else nvmeio, name)(*arguments, **options)
            if asynchronous:
                run(result)
            requests.append(submitted(handle) - before)
            contents.append(path.read_bytes())
        assert requests[0] == requests[1]
        assert contents[0] == contents[1]

    def test_a_file_of_reported_size_0_is_read_to_its_end(self, run):
        assert run(aio.read_file("/proc/version")).tobytes().startswith(b"Linux")

    @pytest.mark.parametrize(
        "name", ["load", "read_file", "read_into", "save", "write_file"]
    )
    def test_errors_are_the_same(self, tmp_path, run, name):
        (tmp_path / "file").write_bytes(b"abc")
        missing = tmp_path / "no folder" / "file"
        calls = {
            "load": [("file",), (missing,), (3,)],
            "read_file": [(missing,), (tmp_path,), (None,)],
            "read_into": [(bytearray(4), "file"), (bytearray(4), missing), (b"1", "file")],
            "save": [(missing, [1]), ("file", [object()]), (3, [1])],
            "write_file": [(b"1", missing), ([1], "file"), (b"1", None)],
        }
        for words in calls[name]:
            arguments = [tmp_path / each if each == "file" else each for each in words]
            with pytest.raises(Exception, match=r".") as expected:
                getattr(nvmeio, name)(*arguments)
            with pytest.raises(type(expected.value), match=r".") as found:
                run(getattr(aio, name)(*arguments))
            assert str(found.value) == str(expected.value)
        assert (tmp_path / "file").read_bytes() == b"abc"
        assert os.listdir(tmp_path) == ["file"]

    def test_the_loop_runs_during_a_call(self, slow_default, path, run):
        path.write_bytes(OLD)

        async def main():
            with plugged(slow_default, path.parent):
                tasks = [
                    asyncio.create_task(each)
                    for each in (
                        aio.read_file(path),
                        aio.write_file(NEW, path.with_suffix(".new")),
                        aio.save(path.with_suffix(".npy"), [1, 2]),
                    )
                ]
                await asyncio.wait(tasks, timeout=0.05)
                assert not any(task.done() for task in tasks)
            assert (await tasks[0]).tobytes() == OLD
            assert await tasks[1] == len(NEW)
            await tasks[2]
            assert path.with_suffix(".new").read_bytes() == NEW
            assert (await aio.load(path.with_suffix(".npy"))).tolist() == [1, 2]

        run(main())

    def test_many_at_once_share_the_threads_of_the_loop(self, default_engine, path, run):
        count, threads = 50, 2

        async def main():
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(threads))
            await aio.save(path.with_suffix(".0"), [0])
            before = threading.active_count() - 1
            most = 0

            async def work(number):
                nonlocal most
                name = path.with_suffix(f".{number}")
                await aio.save(name, np.full(PAGE, number))
                most = max(most, threading.active_count())
                assert (await aio.load(name) == number).all()
                most = max(most, threading.active_count())

            await asyncio.gather(*map(work, range(count)))
            assert most <= before + threads

        run(main())


class TestArrays:
    """array[index], array[index] = value, array.flush()."""

    INDICES = (
        17,
        slice(100, 200),
        [3, 1, 3],
        (slice(None), 2),
        (..., -1),
        np.arange(500) % 3 == 0,
        (4, 5),
        slice(0, 0),
        None,
    )

    @pytest.mark.parametrize("number", range(len(INDICES)))
    def test_an_index_is_read_and_written(self, handle, path, run, number):
        index = self.INDICES[number]
        expected = np.arange(5000.0).reshape(500, 10)
        np.save(path.with_suffix(".npy"), expected)

        async def main():
            name = path.with_suffix(".npy")
            with nvmeio.ArrayFile(name, mode="r+", handle=handle) as array:
                found = await aio.getitem(array, index)
                assert type(found) is type(array[index])
                assert np.array_equal(found, expected[index])
                values = expected[index] + 0.5
                expected[index] = values
                await aio.setitem(array, index, values)
                await aio.flush(array)
                assert np.array_equal(array[...], expected)

        run(main())
        assert np.array_equal(np.load(path.with_suffix(".npy")), expected)

    def test_a_large_copy_does_not_hold_up_the_loop(self, tmp_path, run, monkeypatch):
        threads, taken_of = [], Selection.taken_of

        def noting(*arguments):
            threads.append(threading.current_thread())
            return taken_of(*arguments)

        expected = np.arange(200_000).reshape(-1, 4)
        np.save(tmp_path / "a.npy", expected)
        monkeypatch.setattr(Selection, "taken_of", noting)
        with nvmeio.ArrayFile(tmp_path / "a.npy") as array:
            assert np.array_equal(run(aio.getitem(array, np.s_[:, 1])), expected[:, 1])
        assert threads
        assert threading.main_thread() not in threads

    @pytest.mark.parametrize("threads", [1, 4])
    def test_rows_are_appended_by_many_at_once(self, tmp_path, run, threads):
        async def main():
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(threads))
            with nvmeio.ArrayFile.create(tmp_path / "a.npy", (0, 4), "f8") as array:
                values = [np.full((2, 4), number) for number in range(20)]
                await asyncio.gather(*(aio.append(array, each) for each in values))
                await aio.flush(array)
                assert array.shape == (40, 4)

        run(main())
        found = np.load(tmp_path / "a.npy")
        assert sorted(found[::2, 0].tolist()) == list(range(20))
        assert (found[::2] == found[1::2]).all()

    def test_mistakes_are_the_same(self, tmp_path, run):
        nvmeio.save(tmp_path / "a.npy", np.zeros((5, 2)))
        with nvmeio.ArrayFile(tmp_path / "a.npy") as array:
            with pytest.raises(IndexError, match="9"):
                run(aio.getitem(array, [0, 9]))
            with pytest.raises(ValueError, match="mode='r\\+'"):
                run(aio.setitem(array, 0, 1))
        for call in (aio.getitem(array, 0), aio.flush(array)):
            with pytest.raises(ValueError, match="is closed"):
                run(call)

    def test_a_cancelled_call_leaves_nothing_in_flight(self, slow_default, path, run):
        name = path.with_suffix(".npy")
        nvmeio.save(name, np.zeros((500, 10)))

        async def main():
            with nvmeio.ArrayFile(name, mode="r+") as array:
                with plugged(slow_default, path.parent):
                    pending, count = slow_default.pending, submitted(slow_default)
                    tasks = [
                        asyncio.create_task(aio.getitem(array, slice(10, 400))),
                        asyncio.create_task(aio.getitem(array, [3, 9])),
                        asyncio.create_task(aio.setitem(array, slice(10, 400), 1)),
                        asyncio.create_task(aio.setitem(array, [3, 9], 1)),
                        asyncio.create_task(aio.flush(array)),
                    ]
                    while submitted(slow_default) < count + len(tasks):
                        await asyncio.sleep(0)
                    for task in tasks:
                        task.cancel()
                    await asyncio.wait(tasks)
                    assert all(task.cancelled() for task in tasks)
                    assert slow_default.pending <= pending
                assert not array[...].any()

        run(main())


def test_no_file_is_opened_or_closed_in_the_thread_of_the_loop(tmp_path):
    """A filter (seccomp) refuses such system calls in that thread."""
    skip_sanitized("open files of their own")
    found = run_child("loop_without_files", folder=str(tmp_path)).report
    assert len(found) == 14
    assert found == dict.fromkeys(found, "ok")


@pytest.mark.parametrize("way", ["write_file", "save"])
class TestCancelling:
    """A cancelled call leaves the old file or the new one, and nothing else."""

    def test_cancelled_during_the_transfer(self, slow_default, path, run, way):
        path.write_bytes(OLD)
        memory = bytearray(NEW)

        async def main():
            loop = asyncio.get_running_loop()
            loop.set_default_executor(ThreadPoolExecutor(1))
            handle = nvmeio.default_handle()
            call, _ = call_of(way, path, memory)
            with plugged(handle, path.parent):
                pending, count = handle.pending, submitted(handle)
                task = asyncio.create_task(call)
                del call
                while submitted(handle) == count:
                    await asyncio.sleep(0)
                for _ in range(2):
                    task.cancel()
                    await asyncio.sleep(0)
                with pytest.raises(asyncio.CancelledError):
                    await task
                del task
                assert handle.pending <= pending
                # The loop and the executor drop their references in their next turns, and
                # the loop may do so while the executor's thread runs.
                await loop.run_in_executor(None, int)
                # Since Python 3.14, the call before may return without a turn of the loop.
                await asyncio.sleep(0)
                gc.collect()
                # Nothing has the memory any more; otherwise it could not grow.
                memory.append(1)

        slow_default.close()
        # Now, because uvloop opens descriptors once for all loops of the process.
        run(asyncio.sleep(0))
        before = in_use()
        run(main())
        nvmeio.default_handle().close()
        assert in_use() == before
        assert path.read_bytes() == OLD
        assert os.listdir(path.parent) == [path.name]

    @pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
    def test_the_loop_is_closed_during_the_transfer(
        self, slow_default, path, new_loop, way
    ):
        path.write_bytes(OLD)
        loop = new_loop()
        call, _ = call_of(way, path)
        with plugged(slow_default, path.parent):
            count = submitted(slow_default)
            task = loop.create_task(call)
            while submitted(slow_default) == count:
                loop.run_until_complete(asyncio.sleep(0))
            loop.run_until_complete(loop.shutdown_default_executor())
            with contextlib.suppress(RuntimeError):
                loop.close()
            task._log_destroy_pending = False
            del task, call
            gc.collect()
        slow_default.drain()
        assert path.read_bytes() == OLD
        assert os.listdir(path.parent) == [path.name]

    @pytest.mark.parametrize("link", ["unnamed", "named"])
    def test_cancelled_in_each_blocking_call(
        self, default_engine, path, run, way, link, monkeypatch
    ):
        if link == "named":
            # A file system without O_TMPFILE.
            monkeypatch.setattr(nvmeio._publish.files, "open_unnamed", refuse_unnamed)

        async def main(number):
            gate = Gate(number)
            asyncio.get_running_loop().set_default_executor(gate)
            path.write_bytes(OLD)
            call, new = call_of(way, path)
            task = asyncio.create_task(call)
            last = None if await cancelled_at(gate, task, left) else gate.count
            return path.read_bytes(), new, last

        def left():
            assert default_engine_is_idle()
            assert os.listdir(path.parent) == [path.name]
            assert descriptors_below(path.parent) == []

        found = []
        for number in range(1, 9):
            content, new, last = run(main(number))
            assert os.listdir(path.parent) == [path.name]
            assert content in (OLD, new)
            found.append(content == new)
            if last is not None:
                break
        # The last call renames: from then on the file is the new one.
        assert last == number - 1 > 2
        assert found == [False] * (number - 2) + [True] * 2
        before = in_use()
        run(main(2))
        assert in_use() == before


class TestCancelledAppends:
    """A cancelled append does not wait for the lock, and adds all of its rows or none."""

    def test_an_append_that_waits_for_the_lock_ends_at_once(self, tmp_path, run):
        name, rows = tmp_path / "a.npy", np.arange(8.0).reshape(2, 4)

        async def main():
            # Its one thread would be lost to an append that waits in it.
            gate = Gate(None)
            asyncio.get_running_loop().set_default_executor(gate)
            with nvmeio.ArrayFile.create(name, (0, 4), "f8") as array:
                with locked_by_a_child(name):
                    before = name.read_bytes(), descriptors_below(tmp_path)
                    tasks = [asyncio.create_task(aio.append(array, rows)) for _ in range(2)]
                    # Each converts its rows, and then tries more than once.
                    while gate.count < 12:
                        await asyncio.sleep(0)
                    for task in tasks:
                        task.cancel()
                    await asyncio.wait(tasks)
                    assert all(task.cancelled() for task in tasks)
                    assert (name.read_bytes(), descriptors_below(tmp_path)) == before
                    assert array.shape == (0, 4)
                await aio.append(array, rows)
                assert np.array_equal(array[...], rows)

        run(main())

    def test_cancelled_in_each_blocking_call(self, tmp_path, run):
        async def main(number):
            gate = Gate(number)
            asyncio.get_running_loop().set_default_executor(gate)
            name = tmp_path / f"{number}.npy"
            with nvmeio.ArrayFile.create(name, (0, 4), "f8") as array:
                before = descriptors_below(tmp_path)
                task = asyncio.create_task(aio.append(array, np.ones((2, 4))))
                assert await cancelled_at(gate, task)
                assert descriptors_below(tmp_path) == before
                assert array.shape == np.load(name).shape
                return len(array)

        # To convert the rows, and to append.
        assert [run(main(number)) for number in range(1, 3)] == [0, 2]

    def test_the_lock_is_free_whenever_the_event_loop_runs(self, tmp_path, run):
        name = tmp_path / "a.npy"

        async def main():
            asyncio.get_running_loop().set_default_executor(InThisThread(1))
            with nvmeio.ArrayFile.create(name, (0, 4), "f8") as array:
                task = asyncio.create_task(aio.append(array, np.ones((2, 4))))
                steps = 0
                with name.open("rb") as file:
                    while not task.done():
                        # What waited for it here would wait for ever.
                        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                        fcntl.flock(file, fcntl.LOCK_UN)
                        await asyncio.sleep(0)
                        steps += 1
                await task
                # Python 3.14 looks at once whether the executor is done.
                assert steps > (2 if sys.version_info < (3, 14) else 0)
                assert len(array) == 2

        run(main())


class InThisThread(ThreadPoolExecutor):
    """Runs each call at once, so that nothing is in progress between two of them."""

    def submit(self, function, /, *args):
        future = Future()
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)
        return future


@contextlib.contextmanager
def locked_by_a_child(path):
    """Let another process hold the lock of a file."""
    code = "import fcntl, sys; file = open(sys.argv[1]); fcntl.flock(file, fcntl.LOCK_EX)"
    child = subprocess.Popen(
        [sys.executable, "-c", f"{code}; print(flush=True); sys.stdin.read()", path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with child:
        child.stdout.readline()
        yield


def refuse_unnamed(folder):
    """Fail as on a file system without O_TMPFILE."""
    raise OSError(95, os.strerror(95), folder)


def default_engine_is_idle():
    """Return whether nothing is in flight."""
    return nvmeio.default_handle().pending == 0
