"""Tensors on a device are staged in pieces of host memory; the device is simulated."""

import asyncio
import contextlib
import errno
import gc
import queue
import threading
import weakref
from concurrent.futures import CancelledError, ThreadPoolExecutor

import numpy as np
import pytest

import nvmeio
from helpers import (
    BLOCK,
    DEPTH,
    PAGE,
    SLOW,
    descriptors_below,
    left_open,
    pattern,
    plugged,
    routes,
)
from nvmeio._memory.registry import Export, libraries, register
from workloads.common import Faults

PIECE = 3 * PAGE


class Device:
    """A tensor whose bytes the host cannot access: it has no buffer protocol."""

    dtype = np.dtype(np.uint8)

    def __init__(self, content):
        self.memory = np.array(np.frombuffer(content, np.uint8))

    def content(self):
        return self.memory.tobytes()


class Staging:
    """Like nvmeio.torch._staging; checks that memory of a piece is not reused too early."""

    def __init__(self, tensor, library):
        self._tensor = tensor
        self._library = library
        nbytes = len(tensor.memory)
        self.pieces = [(at, min(PIECE, nbytes - at)) for at in range(0, nbytes, PIECE)]
        self.slots = library.slots
        self._memory = [np.zeros(PIECE, np.uint8) for _ in range(self.slots)]
        self._delivered = -1

    def host(self, index):
        # The previous piece in this memory must have been delivered.
        assert index - self.slots <= self._delivered
        return self._memory[index % self.slots][: self.pieces[index][1]]

    def fetch(self, index):
        self._library.cross(index)
        offset, nbytes = self.pieces[index]
        memory = self._memory[index % self.slots][:nbytes]
        memory[:] = self._tensor.memory[offset : offset + nbytes]
        return memory

    def deliver(self, index):
        self._library.cross(index)
        assert index == self._delivered + 1
        offset, nbytes = self.pieces[index]
        self._tensor.memory[offset : offset + nbytes] = self.host(index)
        self._delivered = index

    def finish(self):
        self._library.finished += 1


class Library:
    """A library of tensors on a device, for nvmeio._memory.registry."""

    def __init__(self):
        self.slots = 3
        self.broken_at = None
        self.interruptions = {}
        self.crossing = lambda: None
        self.threads = set()
        self.finished = 0
        self.touched = 0
        self.stagings = weakref.WeakSet()

    def export(self, tensor, writable):
        staging = Staging(tensor, self)
        self.stagings.add(staging)
        nbytes = len(tensor.memory)
        return Export(0, nbytes, 0, staging, lambda _: staging.finish(), staging)

    def host_like(self, tensor):
        return np.zeros(len(tensor.memory), np.uint8)

    def byte_view(self, tensor):
        return getattr(tensor, "memory", tensor)

    def touch(self, tensor):
        self.touched += 1

    def copy(self, dest, src):
        self.cross(None)
        dest, src = (getattr(each, "memory", each) for each in (dest, src))
        dest[:] = src

    def cross(self, index):
        """Record the thread that copies a piece to or from the device, or fail."""
        self.threads.add(threading.current_thread())
        self.crossing()
        if index in self.interruptions:
            raise self.interruptions.pop(index)
        if index is not None and index == self.broken_at:
            raise RuntimeError("the device fell off the bus")


@pytest.fixture
def library():
    """The library of tensors on the device."""
    library = Library()
    register(Device, library)
    yield library
    libraries.remove((Device, library))


def returned_by(function, *arguments):
    """Call a function in another thread; fail if it does not return."""
    found = queue.Queue()
    threading.Thread(target=lambda: found.put(function(*arguments)), daemon=True).start()
    return found.get(timeout=30)


def outcome_of(request):
    """Wait for a request; return its error, or None."""
    try:
        return request.exception()
    except CancelledError as error:
        return error


# From no piece to many more than there are slots; the last piece may have any size.
SIZES = [0, 1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE, 3 * PIECE + 1, 20 * PIECE + 777]


@pytest.mark.all_combinations
@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("offset", [0, 1, PAGE])
@pytest.mark.parametrize("size", SIZES)
def test_a_tensor_goes_to_disk_and_back(handle, path, size, offset):
    path.write_bytes(pattern(offset))
    source, target = Device(pattern(size)), Device(bytes(size))
    assert handle.submit_write(source, path, offset).wait() == size
    assert path.read_bytes() == pattern(offset) + pattern(size)
    assert handle.submit_read(target, path, offset).wait() == size
    assert target.content() == pattern(size)
    assert routes(handle).total() == 2 * size
    assert handle.pending == 0


@pytest.mark.parametrize("slots", [1, 2, 100])
def test_any_number_of_slots_works(handle, path, library, slots):
    library.slots = slots
    source, target = Device(pattern(9 * PIECE + 5)), Device(bytes(9 * PIECE + 5))
    handle.write(source, path)
    handle.read(target, path)
    assert target.content() == source.content()
    assert routes(handle).total() == 2 * len(source.memory)


@pytest.mark.usefixtures("library")
def test_every_call_of_the_contract_takes_device_tensors(engine, path):
    handle = nvmeio.aio_handle(BLOCK, DEPTH, engine=engine)
    source, target = Device(pattern(5 * PIECE)), Device(bytes(5 * PIECE))
    assert handle.write(source, path, True) == 0
    assert handle.sync_pwrite(source, path, 5 * PIECE) == 1
    assert handle.async_pwrite(source, path, 10 * PIECE) == 0
    assert handle.wait() == 1
    assert path.read_bytes() == 3 * pattern(5 * PIECE)
    assert handle.read(target, path, True, 5 * PIECE) == 0
    assert handle.async_pread(target, path) == 0
    assert handle.pread(Device(bytes(5 * PIECE)), path, True, True, 10 * PIECE) == 0
    assert handle.wait() == 2
    assert target.content() == source.content()


@pytest.mark.usefixtures("library")
def test_device_tensors_work_in_many_and_in_gathers_and_scatters(handle, path, tmp_path):
    data, other = pattern(7 * PIECE + 3), tmp_path / "other"
    half = len(data) // 2
    items = [(Device(data), path, 0), (data[:half], other, 0)]
    items.append((Device(data[half:]), other, half))
    assert handle.write_many(items) == 2 * len(data)
    assert path.read_bytes() == other.read_bytes() == data
    whole, part = Device(bytes(len(data))), Device(bytes(10))
    request = handle.submit_read_many([(whole, other, 0), (part, path, half)])
    assert request.wait() == len(data) + 10
    assert (whole.content(), part.content()) == (data, data[half : half + 10])
    # A failed item leaves the others complete, on devices too.
    again, short = Device(bytes(10)), Device(bytes(10))
    with pytest.raises(nvmeio.GatherError, match="item 1: "):
        handle.read_many([(again, path, 0), (short, path, len(data) - 1)])
    assert (again.content(), short.content()) == (data[:10], bytes(10))
    gathered = Device(b"x" * 25)
    assert handle.gather(path, [half, 0], 10, gathered) == 20
    assert gathered.content() == data[half : half + 10] + data[:10] + b"x" * 5
    assert handle.scatter(other, [0, half], 10, gathered) == 20
    assert other.read_bytes()[:10] == data[half : half + 10]
    assert other.read_bytes()[half : half + 10] == data[:10]


def test_a_gather_assigns_its_records_alone_to_a_device_tensor(tmp_path, library):
    (tmp_path / "data").write_bytes(pattern(PAGE))
    target, calls = Device(bytes(100)), []

    def cross():
        calls.append(None)
        target.memory[99] = len(calls)

    library.crossing = cross
    with nvmeio.Handle() as handle:
        handle.gather(tmp_path / "data", [7, 70], 20, target, out_offsets=[30, 10])
    expected = pattern(PAGE)[70:90] + pattern(PAGE)[7:27]
    assert target.content() == bytes(10) + expected + bytes(49) + bytes([len(calls)])
    assert library.touched > 0


@pytest.mark.usefixtures("library")
def test_device_and_host_requests_are_in_flight_at_once(open_handle, path):
    handle = open_handle(block_size=BLOCK, queue_depth=DEPTH, workers=2)
    size = 7 * PIECE + 1
    path.write_bytes(pattern(10 * size))
    targets = [Device(bytes(size)) if index % 2 else bytearray(size) for index in range(10)]
    requests = [
        handle.submit_read(target, path, index * size)
        for index, target in enumerate(targets)
    ]
    assert [request.wait() for request in requests] == [size] * 10
    found = [getattr(target, "memory", target) for target in targets]
    assert b"".join(map(bytes, found)) == pattern(10 * size)
    assert routes(handle).total() == 10 * size


def test_the_waiting_thread_finishes_a_read_once(handle, path, library):
    path.write_bytes(pattern(8 * PIECE))
    request = handle.submit_read(Device(bytes(8 * PIECE)), path)
    assert library.threads == set()
    assert request.wait() == request.result() == 8 * PIECE
    assert library.threads == {threading.current_thread()}
    assert library.finished == 1


@pytest.mark.usefixtures("library")
def test_done_advances_the_pieces(handle, path):
    path.write_bytes(pattern(30 * PIECE))
    target = Device(bytes(30 * PIECE))
    request = handle.submit_read(target, path)
    while not request.done():
        pass
    assert target.content() == pattern(30 * PIECE)


def completed_by_for(requests):
    return list(nvmeio.as_completed(requests))


def completed_by_wait(requests):
    return nvmeio.wait(requests).done


def completed_by_tasks(requests):
    async def main():
        assert await asyncio.gather(*requests) == [request.nbytes for request in requests]
        return [request async for request in nvmeio.as_completed(requests)]

    return asyncio.run(main())


@pytest.mark.parametrize(
    "completed", [completed_by_for, completed_by_wait, completed_by_tasks]
)
def test_waiting_for_several_advances_them_all(handle, path, library, completed):
    size = 30 * PIECE
    source = Device(pattern(size))
    targets = [Device(bytes(size)) for _ in range(4)]
    assert handle.submit_write(source, path).wait() == size
    requests = [handle.submit_read(target, path) for target in targets]
    requests.append(handle.submit_write(source, f"{path}-copy"))
    assert set(completed(requests)) == set(requests)
    assert all(target.content() == source.content() for target in targets)
    assert library.finished == 4
    assert library.threads == {threading.current_thread()}


@pytest.mark.parametrize("look", [lambda _: None, lambda request: request.wait()])
def test_a_callback_is_called_once_whichever_thread_advances_it(
    handle, path, library, look
):
    path.write_bytes(pattern(30 * PIECE))
    target = Device(bytes(30 * PIECE))
    request = handle.submit_read(target, path)
    called = queue.Queue()
    request.add_done_callback(called.put)
    look(request)
    assert called.get(timeout=30) is request
    assert target.content() == pattern(30 * PIECE)
    handle.drain()
    assert called.empty()
    assert library.finished == 1


@pytest.mark.usefixtures("library")
def test_a_cancelled_await_ends_after_the_last_piece(open_handle, path):
    handle = open_handle(**SLOW)
    path.write_bytes(pattern(20 * PIECE))
    target = Device(bytes(20 * PIECE))

    async def main():
        with plugged(handle, path.parent):
            request = handle.submit_read(target, path)
            task = asyncio.ensure_future(request)
            for _ in range(2):
                await asyncio.sleep(0)
                task.cancel()
            await asyncio.sleep(0)
            # Some pieces are still in flight.
            assert not task.done()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(CancelledError):
            request.wait(0)
        target.memory[:] = 7
        assert handle.pending == 0

    asyncio.run(main())
    assert (target.memory == 7).all()


@pytest.mark.usefixtures("library")
def test_many_threads_wait_for_one_device_tensor(handle, path):
    path.write_bytes(pattern(30 * PIECE))
    target = Device(bytes(30 * PIECE))
    request = handle.submit_read(target, path)
    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(lambda _: request.wait(), range(6))) == [30 * PIECE] * 6
    assert target.content() == pattern(30 * PIECE)


@pytest.mark.usefixtures("library")
def test_a_file_that_ends_in_the_middle_is_an_error(handle, path):
    path.write_bytes(pattern(10 * PIECE + 100))
    target = Device(bytes(20 * PIECE))
    request = handle.submit_read(target, path)
    with pytest.raises(OSError, match=r"past the end of the file.*data") as caught:
        request.wait()
    assert caught.value.errno == errno.ENODATA
    assert target.content()[: 10 * PIECE] == pattern(10 * PIECE + 100)[: 10 * PIECE]
    assert handle.pending == 0


@pytest.mark.usefixtures("library")
def test_a_failure_is_minus_one_with_errors_status(engine, path):
    handle = nvmeio.aio_handle(BLOCK, DEPTH, engine=engine, errors="status")
    path.write_bytes(pattern(10 * PIECE))
    assert handle.read(Device(bytes(10 * PIECE + 1)), path) == -1
    assert handle.last_error.errno == errno.ENODATA


@pytest.mark.usefixtures("library")
def test_an_error_of_closing_the_file_is_raised(handle, faulty):
    (faulty / "control").touch()
    Faults(faulty / "control").set(flush={"error": errno.ENOSPC})
    with pytest.raises(OSError, match="No space left on device") as caught:
        handle.write(Device(pattern(9 * PIECE)), faulty / "data")
    assert caught.value.filename == str(faulty / "data")
    assert left_open(faulty) == []


@pytest.mark.parametrize("broken_at", [0, 1, 5])
class TestBrokenDevice:
    """An error of the device or its library ends the request, not the handle."""

    def test_a_write_raises_in_the_submitting_call(self, handle, path, library, broken_at):
        library.broken_at = broken_at
        with pytest.raises(RuntimeError, match="fell off the bus"):
            handle.submit_write(Device(pattern(8 * PIECE)), path)
        self.assert_handle_goes_on(handle, path)

    def test_a_read_raises_in_the_waiting_call(self, handle, path, library, broken_at):
        path.write_bytes(pattern(8 * PIECE))
        library.broken_at = broken_at
        request = handle.submit_read(Device(bytes(8 * PIECE)), path)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="fell off the bus"):
                request.wait()
        assert request.done()
        self.assert_handle_goes_on(handle, path)

    def assert_handle_goes_on(self, handle, path):
        path = path.with_name("another")
        assert handle.write(b"1234", path) == 4
        assert path.read_bytes() == b"1234"
        handle.close()
        assert handle.pending == 0


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, TimeoutError])
def test_an_exception_of_a_signal_handler_loses_no_bytes(
    handle, path, library, interruption
):
    path.write_bytes(pattern(9 * PIECE))
    library.interruptions = {index: interruption("mine") for index in (0, 4, 8)}
    target = Device(bytes(9 * PIECE))
    request = handle.submit_read(target, path)
    for _ in range(3):
        with pytest.raises(interruption, match="mine"):
            request.wait()
    assert request.wait() == 9 * PIECE
    assert target.content() == pattern(9 * PIECE)


@pytest.mark.usefixtures("library")
class TestInFlight:
    """The worker is busy with other requests."""

    @pytest.fixture
    def handle(self, open_handle):
        return open_handle(**SLOW)

    def test_a_staged_request_is_pending_until_it_is_done(self, handle, folder):
        (folder / "data").write_bytes(pattern(9 * PIECE))
        target = Device(bytes(9 * PIECE))
        with plugged(handle, folder):
            request = handle.submit_read(target, folder / "data")
            assert not request.done()
            assert "in flight" in repr(request)
            with pytest.raises(TimeoutError, match=r"was not done within 0\.01 s"):
                request.wait(0.01)
            assert target.content() == bytes(9 * PIECE)
        assert request.wait() == 9 * PIECE
        assert target.content() == pattern(9 * PIECE)
        assert "done" in repr(request)

    def test_a_staged_request_refuses_after_on_either_side(self, handle, folder):
        """Its bytes pass through Python, and would be stale."""
        path = folder / "data"
        path.write_bytes(pattern(9 * PIECE))
        tensor = Device(pattern(9 * PIECE, 1))
        with plugged(handle, folder):
            first = handle.submit_fsync(path)
            for submit in (handle.submit_read, handle.submit_write):
                with pytest.raises(TypeError, match="after= takes no tensor on a device"):
                    submit(tensor, path, after=first)
            request = handle.submit_read(tensor, path)
            with pytest.raises(TypeError, match=r"after is .*pass through Python"):
                handle.submit_write(b"new", path, after=request)
            assert path.read_bytes() == pattern(9 * PIECE)
            assert tensor.content() == pattern(9 * PIECE, 1)
        assert request.wait() == 9 * PIECE
        assert handle.submit_write(b"new", path, after=[request, first]).wait() == 3
        assert path.read_bytes()[:3] == b"new"

    def test_cancel_drops_the_pieces_that_have_not_begun(self, handle, folder):
        (folder / "data").write_bytes(pattern(9 * PIECE))
        with plugged(handle, folder):
            request = handle.submit_read(Device(bytes(9 * PIECE)), folder / "data")
            assert request.cancel() is True
            assert request.cancel() is True
        with pytest.raises(CancelledError, match="data"):
            request.wait()
        with pytest.raises(CancelledError):
            request.exception()
        assert request.done()
        assert request.cancel() is False
        assert handle.pending == 0

    def test_a_request_whose_pieces_are_all_in_flight_is_not_cancelled(
        self, handle, folder
    ):
        (folder / "data").write_bytes(pattern(3 * PIECE))
        target = Device(bytes(3 * PIECE))
        with plugged(handle, folder):
            request = handle.submit_read(target, folder / "data")
            assert request.cancel() is False
        assert request.wait() == 3 * PIECE
        assert target.content() == pattern(3 * PIECE)

    def test_a_staged_request_keeps_the_file_open_until_it_is_done(self, handle, folder):
        (folder / "data").write_bytes(pattern(9 * PIECE))
        with plugged(handle, folder):
            request = handle.submit_read(Device(bytes(9 * PIECE)), folder / "data")
            (folder / "data").unlink()
            assert any("data" in path for path in descriptors_below(folder))
        assert request.wait() == 9 * PIECE
        handle.close()
        assert left_open(folder) == []


@pytest.mark.usefixtures("library")
class TestOtherThreads:
    """Nobody waits for pieces that another thread or a failed call has started."""

    @pytest.fixture
    def handle(self):
        with nvmeio.Handle(**SLOW) as handle:
            yield handle

    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, TimeoutError])
    @pytest.mark.parametrize("call", ["write", "submit_write"])
    def test_a_write_that_fails_while_it_is_started_leaves_no_piece_in_flight(
        self, handle, tmp_path, library, error, call
    ):
        path = tmp_path / "data"
        library.interruptions = {2: error("mine")}
        with plugged(handle, tmp_path):
            with pytest.raises(error, match="mine"):
                getattr(handle, call)(Device(pattern(9 * PIECE)), path)
            path.write_bytes(b"later")
        handle.drain()
        assert path.read_bytes() == b"later"
        assert handle.pending == 0
        assert len(library.stagings) == 0

    @pytest.fixture
    def copying(self, handle, tmp_path, library):
        """A read of 9 pieces, and an event that ends another thread's copy of the first."""
        (tmp_path / "data").write_bytes(pattern(9 * PIECE))
        started, end = threading.Event(), threading.Event()

        def cross():
            started.set()
            end.wait()

        library.crossing = cross
        request = handle.submit_read(Device(bytes(9 * PIECE)), tmp_path / "data")
        waiting = threading.Thread(target=outcome_of, args=[request])
        waiting.start()
        started.wait()
        yield request, end
        end.set()
        waiting.join()

    def test_cancel_and_other_requests_do_not_wait_for_a_copy(
        self, handle, tmp_path, copying
    ):
        request, end = copying
        assert returned_by(handle.write, b"123", tmp_path / "other") == 3
        assert returned_by(request.cancel) is True
        end.set()
        assert isinstance(outcome_of(request), CancelledError)

    def test_done_returns_while_pieces_of_a_failed_request_are_in_flight(
        self, handle, tmp_path, library
    ):
        (tmp_path / "data").write_bytes(pattern(9 * PIECE))
        library.broken_at = 2
        plugging = threading.Event()

        def cross():
            # The pieces that follow come behind the plug.
            if not plugging.is_set():
                plugs.enter_context(plugged(handle, tmp_path))
                plugging.set()

        library.crossing = cross
        with contextlib.ExitStack() as plugs:
            request = handle.submit_read(Device(bytes(9 * PIECE)), tmp_path / "data")
            waiting = threading.Thread(target=outcome_of, args=[request])
            waiting.start()
            assert plugging.wait(timeout=60)
            assert returned_by(request.done) in (True, False)
        waiting.join()
        assert isinstance(outcome_of(request), RuntimeError)


@pytest.mark.usefixtures("library")
def test_a_dropped_request_is_completed(handle, path):
    path.write_bytes(pattern(9 * PIECE))
    target = Device(bytes(9 * PIECE))
    handle.submit_read(target, path)
    handle.submit_write(Device(pattern(9 * PIECE)), path.with_name("copy"))
    handle.close()
    assert target.content() == path.with_name("copy").read_bytes() == pattern(9 * PIECE)


@pytest.mark.usefixtures("library")
def test_dropping_the_handle_finishes_its_work(engine, path):
    path.write_bytes(pattern(9 * PIECE))
    target = Device(bytes(9 * PIECE))
    handle = nvmeio.Handle(block_size=PAGE, queue_depth=1, engine=engine)
    request = handle.submit_read(target, path)
    gone = weakref.ref(handle)
    del handle
    gc.collect()
    assert gone() is None
    assert request.done()
    assert request.wait() == 9 * PIECE
    assert target.content() == pattern(9 * PIECE)


@pytest.mark.usefixtures("library")
def test_an_error_that_was_never_retrieved_causes_a_warning(handle, path, recwarn):
    path.write_bytes(bytes(PIECE))
    handle.submit_read(Device(bytes(9 * PIECE)), path)
    handle.close()
    gc.collect()
    assert [w for w in recwarn if "never looked at" in str(w.message)]


def test_the_tensor_is_released_when_the_request_is_done(handle, path, library):
    path.write_bytes(pattern(5 * PIECE))
    target = Device(bytes(5 * PIECE))
    gone = weakref.ref(target)
    request = handle.submit_read(target, path)
    del target
    assert gone() is not None
    assert len(library.stagings) == 1
    request.wait()
    assert gone() is None
    assert len(library.stagings) == 0


@pytest.mark.usefixtures("library")
def test_threads_submit_and_wait_at_once(open_handle, folder):
    handle = open_handle(block_size=BLOCK, queue_depth=DEPTH)

    def work(number):
        for turn in range(15):
            content = pattern(5 * PIECE + number, seed=turn)
            target = Device(bytes(len(content)))
            handle.submit_write(Device(content), folder / f"{number}").wait()
            handle.submit_read(target, folder / f"{number}").wait()
            assert target.content() == content

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(work, range(6)))
    assert handle.pending == 0


class TestTorch:
    """The staging of nvmeio.torch itself, with the CPU as the device."""

    @pytest.fixture
    def torch(self):
        return pytest.importorskip("torch", reason="torch is not installed")

    @pytest.fixture
    def on_device(self, torch):
        """Make an object that stands for a tensor on a device."""
        from nvmeio.torch._staging import DeviceStaging

        class Remote:
            def __init__(self, tensor):
                self.tensor = tensor

        class RemoteLibrary:
            def export(self, remote, writable):
                stage = DeviceStaging(remote.tensor, writable, piece_bytes=PIECE, slots=2)
                nbytes, landing = remote.tensor.nbytes, lambda _: stage.finish()
                return Export(0, nbytes, 0, stage, landing, stage, stage.storage)

        library = RemoteLibrary()
        register(Remote, library)
        yield Remote
        libraries.remove((Remote, library))

    @pytest.mark.parametrize("transposed", [False, True])
    def test_tensors_with_any_strides_are_written_and_read(
        self, handle, path, torch, on_device, transposed
    ):
        source = torch.arange(30_000, dtype=torch.int32).reshape(300, 100)
        target = torch.zeros_like(source)
        if transposed:
            source, target = source.t(), target.t()
        handle.write(on_device(source), path, offset=3)
        assert path.read_bytes()[3:] == source.contiguous().numpy().tobytes()
        assert handle.submit_read(on_device(target), path, 3).wait() == 120_000
        assert target.equal(source)
        assert routes(handle).total() == 240_000

    @pytest.mark.parametrize("transposed", [False, True])
    def test_memory_that_is_freed_under_a_read_is_an_error(
        self, tmp_path, torch, on_device, transposed
    ):
        (tmp_path / "data").write_bytes(bytes(120_000))
        memory = torch.zeros(300, 100, dtype=torch.int32)
        with nvmeio.Handle() as handle:
            target = memory.t() if transposed else memory
            request = handle.submit_read(on_device(target), tmp_path / "data")
            memory.untyped_storage().resize_(0)
            with pytest.raises(RuntimeError, match="freed or moved"):
                request.wait()

    def test_cuda_tensors_are_written_and_read(self, handle, path, torch):
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        source = torch.arange(40 << 20, dtype=torch.int32, device="cuda")
        target = torch.zeros_like(source)
        requests = [
            handle.submit_write(source, path),
            handle.submit_write(source[:5], f"{path}.5"),
        ]
        assert [request.wait() for request in requests] == [source.nbytes, 20]
        handle.read(target, path)
        assert target.equal(source)
        strided = torch.zeros(1000, 2000, dtype=torch.int32, device="cuda").t()[::2]
        assert handle.submit_read(strided, path, 4).wait() == strided.nbytes
        assert strided.flatten().equal(source[1:][: strided.numel()])
        assert routes(handle).total() == 2 * source.nbytes + 20 + strided.nbytes
