"""Many threads use each public class at once, with and without the GIL.

The threads of a test begin at a barrier, and each result is checked.  Other tests hold a
thread at one place; these find what nobody thought of, most of all without the GIL.
"""

import contextlib
import itertools
import os
import pickle
import subprocess
import sys
import threading
import weakref
from collections import Counter
from concurrent.futures import CancelledError, ThreadPoolExecutor

import numpy as np
import pytest

import nvmeio
import nvmeio.safetensors.numpy
from helpers import BLOCK, DEPTH, PAGE, SLOW, pattern, plugged
from nvmeio.checkpoint import Checkpointer
from nvmeio.safetensors import safe_open

THREADS = 8


@pytest.fixture(autouse=True)
def _quick_switches():
    """With the GIL, let the threads take turns every few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def together(work, count=THREADS):
    """Call ``work(number)`` in threads that begin together; return the results."""
    barrier = threading.Barrier(count)

    def call(number):
        barrier.wait()
        return work(number)

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(call, range(count)))


@contextlib.contextmanager
def until_closed():
    """Leave the block when another thread has closed what it uses."""
    try:
        yield
    except ValueError as error:
        if "closed" not in str(error):
            raise


@pytest.fixture
def data(path):
    """The bytes of the file `path`."""
    content = pattern(64 * PAGE)
    path.write_bytes(content)
    return content


@pytest.fixture
def handle(open_handle):
    return open_handle(block_size=BLOCK, queue_depth=DEPTH, workers=2)


def test_all_threads_observe_one_request(handle, path, data):
    for _ in range(20):
        target, called = np.zeros((PAGE, 64), np.uint8), []
        request = handle.submit_read(target.T, path)

        def observe(number, request=request, called=called):
            for n in range(5):
                request.add_done_callback(lambda r, key=(number, n): called.append(key))
            looks = (
                request.wait,
                request.result,
                lambda: request.exception() is None and len(data),
                lambda: nvmeio.wait([request]).done == {request} and len(data),
                lambda: next(nvmeio.as_completed([request])).wait(),
                lambda: (handle.drain(), repr(request), request.wait())[2],
            )
            found = looks[number % len(looks)]()
            request.add_done_callback(lambda r, key=(number, 5): called.append(key))
            return found

        assert together(observe) == [len(data)] * THREADS
        handle.drain()
        assert target.T.tobytes() == data
        assert Counter(called) == Counter((i, n) for i in range(THREADS) for n in range(6))


def test_all_threads_cancel_and_wait_for_one_request(handle, path, data):
    for _ in range(20):
        target = bytearray(len(data))
        request = handle.submit_read(target, path)

        def end(number, request=request):
            cancelled = number % 2 and request.cancel()
            try:
                return cancelled, request.wait()
            except CancelledError:
                return cancelled, None

        found = together(end)
        results = {result for _, result in found}
        assert len(results) == 1, "all threads see the same outcome"
        assert results == {None} or not any(cancelled for cancelled, _ in found)
        assert results == {None} or target == data


def test_failures_pass_along_chains_in_any_thread(handle, path, data):
    for _ in range(20):
        past = handle.submit_read(bytearray(PAGE), path, offset=len(data))
        chain = [past]
        for _ in range(THREADS - 1):
            chain.append(handle.submit_read(bytearray(PAGE), path, after=chain[-1]))
        errors = together(lambda number, chain=chain: chain[-1 - number].exception())
        assert {type(error) for error in errors} == {OSError}
        for one, before in itertools.pairwise(errors):
            assert one.__cause__ is before


def test_all_kinds_of_requests_at_once(handle, path, data, tmp_path):
    array = np.frombuffer(data, np.uint8)

    def work(number):
        random = np.random.default_rng(number)
        own = path.with_name(f"of {number}")
        handle.write(data, own)
        for _ in range(10):
            offsets = random.permutation(63)[:20] * PAGE + number
            out, strided = np.zeros((20, 99), np.uint8), np.zeros((99, 20), np.uint8)
            requests = [
                handle.submit_gather(path, offsets, 99, out),
                handle.submit_gather(own, offsets, 99, strided.T),
            ]
            expected = np.array([array[at : at + 99] for at in offsets])
            many = [bytearray(100) for _ in range(3)]
            handle.read_many([(each, path, 7 * n) for n, each in enumerate(many)])
            handle.scatter(own, [0, 200], 10, array[:20])
            handle.scatter(own, [0, 200], 10, np.r_[array[:10], array[200:210]])
            handle.fsync(own)
            assert nvmeio.wait(requests).done == set(requests)
            assert (out == expected).all()
            assert many == [bytearray(data[7 * n : 7 * n + 100]) for n in range(3)]
            assert handle.stats()["requests"] > 0
            assert handle.latencies().percentile_us(50) > 0
            assert "pending" in repr(handle)
        return own.read_bytes() == data

    assert all(together(work))
    assert handle.pending == 0


def test_threads_close_one_handle(open_handle, path, data):
    for _ in range(10):
        handle = open_handle(block_size=BLOCK, queue_depth=DEPTH)

        def use(number, handle=handle):
            with until_closed():
                for _ in range(number):
                    target = bytearray(PAGE)
                    assert handle.read(target, path) == PAGE
                    assert target == data[:PAGE]
            handle.close()
            return handle.closed

        assert all(together(use))


def test_threads_open_and_close_handles_while_the_interpreter_ends(tmp_path):
    """The hook at exit lists all handles: that must not fail, and must miss none."""
    code = """
import threading, nvmeio

def work(number):
    while True:
        try:
            handle = nvmeio.Handle(engine="sync")
        except ValueError:
            return
        handle.submit_write(bytes(100), f"{number}")
        handle.close()

for number in range(8):
    threading.Thread(target=work, args=[number], daemon=True).start()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_threads_share_the_position_of_a_file(path):
    records = [b"%015d\n" % n for n in range(2000)]
    path.write_bytes(b"".join(records))
    with nvmeio.File(path) as file:

        def read(number):
            found = []
            while part := (file.read(16) if number % 2 else file.readline()):
                found.append(part)
            return found

        found = [part for parts in together(read) for part in parts]
    assert sorted(found) == records
    with nvmeio.File(path, "w") as file:
        together(lambda n: [file.write(b"%015d\n" % n) for n in range(n, 2000, THREADS)])
        assert file.tell() == file.size == 16 * 2000
    assert sorted(path.read_bytes().splitlines(keepends=True)) == records


def test_threads_close_one_file(path, data):
    for _ in range(20):
        file = nvmeio.File(path)

        def use(number, file=file):
            with until_closed():
                for _ in range(number):
                    assert file.size == len(data)
                    assert nvmeio.default_handle().read(bytearray(PAGE), file) == PAGE
            file.close()
            return file.closed, repr(file)

        assert {closed for closed, _ in together(use)} == {True}


def test_threads_share_the_pool(path, data):
    def work(number):
        random = np.random.default_rng(number)
        kept = []
        for turn in range(60):
            array = nvmeio.empty(int(random.integers(1, 300_000)), np.uint8)
            array[:] = (number * 60 + turn) % 251
            kept.append(array)
            if turn % 7 == 0:
                nvmeio.pool_trim()
                assert nvmeio.pool_stats()["bytes_used"] > 0
            if turn % 3 == 0:
                kept.pop(int(random.integers(len(kept))))
            copy = np.empty_like(array)
            nvmeio.memcpy(copy, array)
            assert (copy == copy[0]).all()
        return all((array == array[0]).all() for array in kept)

    assert all(together(work))


def test_threads_write_and_read_rows_of_one_array(path):
    array = nvmeio.ArrayFile.create(path, shape=(800, 33), dtype=np.int32)
    with array:

        def work(number):
            rows = np.arange(number, 800, THREADS)
            array.scatter(rows, np.repeat(rows[:, None], 33, 1))
            array[number] = number
            request = array.prefetch(rows[1:])
            assert (array.gather(rows)[:, 0] == rows).all()
            assert (request.wait()[:, 32] == rows[1:]).all()

        together(work)
        assert (array[:] == np.arange(800)[:, None]).all()


def test_threads_append_to_one_array(path):
    nvmeio.save(path, np.zeros((0, 3), np.int64))
    with nvmeio.ArrayFile(path, mode="r+") as array:
        together(lambda number: [array.append(np.full((2, 3), number)) for _ in range(10)])
    found = np.load(path)
    assert Counter(found[:, 0].tolist()) == dict.fromkeys(range(THREADS), 20)
    assert (found == found[:, :1]).all()


def test_threads_use_one_op(path, data):
    op = nvmeio.aio_handle(BLOCK, DEPTH, errors="status")

    def work(number):
        total = 0
        for _ in range(30):
            target = bytearray(PAGE)
            assert op.async_pread(target, str(path)) == 0
            # Another thread may wait for it; a failure may be any thread's.
            total += max(0, op.wait())
            assert op.sync_pread(bytearray(1), str(path) + " missing") == -1
            assert op.last_error.errno == 2
        return total

    counted = together(work)
    assert sum(counted) + max(0, op.wait()) == THREADS * 30
    op.close()


def test_threads_publish_and_read_files(folder):
    def work(number):
        own, shared = folder / f"of {number}", folder / "shared.npy"
        for turn in range(10):
            array = np.full(5000, number * 10 + turn)
            nvmeio.save(own, array)
            nvmeio.save(shared, array)
            assert (nvmeio.load(own) == array).all()
            found = nvmeio.load(shared)
            assert (found == found[0]).all(), "it appears whole"
            nvmeio.write_file(array, own, atomic=False)
            assert bytes(nvmeio.read_file(own)) == array.tobytes()
            assert nvmeio.read_into(np.zeros(5000, np.int64), own) == array.nbytes

    together(work)
    assert sorted(os.listdir(folder)) == [f"of {n}" for n in range(THREADS)] + [
        "shared.npy"
    ]


def test_threads_read_one_model(folder):
    tensors = {f"{n}": np.full((n + 1, 100), n, np.float32) for n in range(50)}
    path = folder / "model.safetensors"
    nvmeio.safetensors.numpy.save_file(tensors, path)
    with safe_open(path, "np") as model:

        def work(number):
            names = np.random.default_rng(number).permutation(50).astype(str)
            for name in names:
                assert np.array_equal(model.get_tensor(name), tensors[name])
                assert np.array_equal(model.get_slice(name)[0], tensors[name][0])
            found = model.get_many(dict.fromkeys(names.tolist()))
            return all(np.array_equal(found[name], tensors[name]) for name in tensors)

        assert all(together(work))


@pytest.mark.filterwarnings("ignore:step .* is saved, but")
def test_threads_share_a_checkpointer(tmp_path):
    with Checkpointer(tmp_path / "run", keep=None) as checkpointer:

        def work(number):
            for turn in range(3):
                step = number * 3 + turn
                state = {"a": np.full(1000, step), "b": [step, "text"]}
                if number % 2:
                    checkpointer.save(step, state)
                else:
                    checkpointer.save_async(step, state).result()
                found = checkpointer.restore(step)
                assert (found["a"] == step).all()
                assert found["b"] == [step, "text"]
                assert step in checkpointer.steps()
                assert checkpointer.latest() is not None

        together(work)
        assert sorted(checkpointer.steps()) == [*range(THREADS * 3)]
        checkpointer.verify(5)


def test_threads_call_callbacks_that_nobody_observes(handle, path, data):
    ended = threading.Semaphore(0)

    def work(number):
        for _ in range(30):
            request = handle.submit_read(bytearray(PAGE), path)
            request.add_done_callback(lambda _: ended.release())

    together(work)
    for _ in range(THREADS * 30):
        assert ended.acquire(timeout=60)


def test_copies_of_handles_and_files_in_threads(handle, path, data):
    with nvmeio.File(path) as file:
        texts = pickle.dumps(handle), pickle.dumps(file)

        def work(number):
            with pickle.loads(texts[0]) as own, pickle.loads(texts[1]) as copy:
                target = bytearray(len(data))
                own.read(target, copy)
                return target == data

        assert all(together(work))


def test_a_predecessor_is_freed_once_the_outcome_is_there(open_handle, path, data):
    """Freeing it may run any code, which must not find a request that is half done."""
    handle, states = open_handle(**SLOW), []
    with plugged(handle, path.parent):
        before = handle.submit_read(bytearray(PAGE), path)
        request = handle.submit_read(bytearray(PAGE), path, after=before)
    before.wait()
    watch = weakref.ref(before, lambda _: states.append(repr(request)))
    del before
    assert request.wait() == PAGE
    assert watch() is None
    assert len(states) == 1
    assert "done" in states[0]
