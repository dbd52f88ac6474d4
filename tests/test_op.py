"""aio_handle: DeepSpeed's statuses and tensors, counts, failures and closing."""

import copy
import errno
import inspect
import os
import pickle
import re
import threading
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import nvmeio
from helpers import (
    BLOCK,
    DEPTH,
    MIB,
    PAGE,
    SLOW,
    Guarded,
    pattern,
    plugged,
    routes,
)
from nvmeio._native import buffer


@pytest.fixture
def handle_class():
    """The class of handles for open_handle."""
    return nvmeio.aio_handle


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"intra_op_parallelism": 0}, "intra_op_parallelism is 0; it must be from 1 to"),
        ({"block_size": 0}, "block_size is 0; it must be from 1 to"),
        ({"errors": "print"}, "errors is 'print'; it must be one of raise, status"),
    ],
)
def test_invalid_options_are_refused_at_construction(option, words):
    with pytest.raises(ValueError, match=words):
        nvmeio.aio_handle(**option)


# Strings, of which all but "" would be true, and numbers meant for another argument.
NO_BOOLEANS = [("false", TypeError), ("no", TypeError), (None, TypeError), (1.0, TypeError)]
NO_BOOLEANS += [(16, ValueError), (-1, ValueError)]


@pytest.mark.parametrize(("value", "error"), NO_BOOLEANS)
class TestBooleans:
    @pytest.mark.parametrize("name", ["single_submit", "overlap_events"])
    def test_options_are_not_guessed(self, name, value, error):
        words = f"{name} is {value!r}; it must be True or False"
        with pytest.raises(error, match=words):
            nvmeio.aio_handle(**{name: value})

    def test_arguments_are_not_guessed(self, handle, path, value, error):
        path.write_bytes(b"12345678")
        words = f"is {value!r}; it must be True or False"
        for call in (
            lambda: handle.read(bytearray(8), path, value),
            lambda: handle.write(b"1", path, value),
            lambda: handle.pread(bytearray(8), path, value, False),
            lambda: handle.pwrite(b"1", path, False, value),
        ):
            with pytest.raises(error, match=words):
                call()
        assert path.read_bytes() == b"12345678"


@pytest.mark.parametrize("yes", [True, np.True_, 1, np.int64(1)], ids=repr)
def test_booleans_of_every_kind_are_taken(open_handle, path, yes):
    handle = open_handle(overlap_events=yes, single_submit=yes)
    assert handle.get_overlap_events() is handle.get_single_submit() is True
    assert handle.write(b"12345678", path, yes) == 0
    assert handle.pread(bytearray(8), path, yes, yes) == 0
    assert handle.wait() == 1


class TestStatus:
    """errors="status": return -1, log and keep the error, print nothing."""

    @pytest.fixture
    def handle(self, open_handle):
        return open_handle(block_size=BLOCK, queue_depth=DEPTH, errors="status")

    def test_wait_is_minus_one_once(self, handle, path, caplog):
        path.write_bytes(bytes(10))
        assert handle.async_pread(bytearray(11), path) == 0
        assert handle.wait() == -1
        assert handle.last_error.errno == errno.ENODATA
        assert "wanted 11 bytes at offset 0, got 10" in caplog.text
        assert handle.wait() == 0

    def test_requests_raise_with_errors_status_too(self, handle, path):
        with pytest.raises(FileNotFoundError):
            handle.handle.submit_read(bytearray(5), path)
        with pytest.raises(FileNotFoundError):
            handle.handle.gather(path, [0], 1, bytearray(1))
        assert handle.last_error is None


class TestWait:
    def test_nothing_pending_is_zero(self, handle):
        """DeepSpeed's op aborts when it waits for nothing."""
        assert handle.wait() == 0
        assert handle.wait() == 0

    def test_wait_counts_asynchronous_calls_since_the_last_wait(self, handle, path):
        handle.async_pwrite(b"1234", path)
        handle.pwrite(b"5678", path, False, True, 4)
        handle.write(b"9", path, file_offset=8)
        request = handle.handle.submit_write(b"0", path, 9)
        assert handle.wait() == 2
        assert request.done()
        handle.async_pread(bytearray(4), path)
        assert handle.wait() == 1
        assert handle.wait() == 0
        assert path.read_bytes() == b"1234567890"

    def test_the_first_failure_is_raised_when_all_have_been_consumed(self, handle, path):
        path.write_bytes(pattern(100))
        targets = [bytearray(100) for _ in range(5)]
        for target, offset in zip(targets, [0, 30, 0, 20, 0], strict=True):
            handle.async_pread(target, path, offset)
        with pytest.raises(OSError, match="at offset 30, got 70"):
            handle.wait()
        assert targets[0] == targets[2] == targets[4] == pattern(100)
        assert handle.wait() == handle.handle.pending == 0

    def test_wait_ignores_failures_of_requests(self, handle, path):
        path.write_bytes(b"1234")
        request = handle.handle.submit_read(bytearray(5), path)
        handle.async_pread(bytearray(4), path)
        assert handle.wait() == 1
        assert request.exception().errno == errno.ENODATA

    def test_several_threads_wait_for_each_operation_once(self, handle, path):
        path.write_bytes(bytes(PAGE))
        with ThreadPoolExecutor(4) as threads:
            for _ in range(20):
                for _ in range(30):
                    handle.async_pread(bytearray(PAGE), path)
                assert sum(threads.map(lambda _: handle.wait(), range(4))) == 30


def test_validation_finds_a_difference(handle, path):
    """The bytes change after the transfer and before the comparison."""
    for transfer in (handle.pread, handle.pwrite):
        path.write_bytes(bytes(3 * PAGE))
        moved = routes(handle).total() + 3 * PAGE
        assert transfer(bytearray(3 * PAGE), path, True, True) == 0
        while routes(handle).total() < moved:
            os.sched_yield()
        with open(path, "r+b") as file:
            os.pwrite(file.fileno(), b"!", 5000)
        with pytest.raises(OSError, match="differs from the file at byte 5000") as caught:
            handle.wait()
        assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(path))


def test_validation_passes_equal_bytes(handle, path):
    expected = pattern(BLOCK + 100)
    target = bytearray(len(expected))
    assert handle.write(expected, path, True) == 0
    assert handle.read(target, path, validate=True) == 0
    assert handle.pwrite(expected, path, True, True, 5) == 0
    assert handle.wait() == 1
    assert target == expected


@pytest.mark.parametrize("name", ["pread", "pwrite"])
def test_a_file_closed_before_wait_is_validated(handle, path, name):
    path.write_bytes(bytes(PAGE))
    with nvmeio.File(path, "r+") as file:
        assert getattr(handle, name)(bytearray(PAGE), file, True, True) == 0
    assert handle.wait() == 1


def test_memory_gone_before_wait_hides_no_other_failure(handle, path, caplog):
    path.write_bytes(bytes(PAGE))
    gone, target = memoryview(bytearray(PAGE)), bytearray(PAGE)
    handle.pread(gone, path, True, True)
    handle.pread(target, path, True, True)
    handle.handle.drain()
    gone.release()
    target[100] = 1
    with pytest.raises(ValueError, match="released memoryview"):
        handle.wait()
    assert "differs from the file at byte 100" in caplog.text
    assert handle.wait() == 0


@pytest.mark.parametrize("library", ["numpy", "torch"])
class TestLockedTensors:
    @pytest.fixture
    def example(self, library):
        module = pytest.importorskip(library, reason=f"{library} is not installed")
        return module.zeros(1, dtype=module.int16)

    def test_locked_tensors_are_pinned_until_freed_once(self, open_handle, example):
        handle, other = open_handle(), open_handle()
        tensor = handle.new_cpu_locked_tensor(1000, example)
        assert (tensor.dtype, tuple(tensor.shape)) == (example.dtype, (1000,))
        assert handle.is_pinned(tensor)
        assert other.is_pinned(tensor[500:510])
        assert not handle.is_pinned(example)
        assert other.free_cpu_locked_tensor(tensor) is True
        assert handle.free_cpu_locked_tensor(tensor) is False
        assert not handle.is_pinned(tensor)
        assert handle.free_cpu_locked_tensor(example) is False

    def test_a_view_that_begins_elsewhere_frees_nothing(self, handle, example):
        tensor = handle.new_cpu_locked_tensor(10, example)
        for view in (tensor[5:], tensor[1:2]):
            assert handle.free_cpu_locked_tensor(view) is False
            assert handle.is_pinned(view)
        assert handle.free_cpu_locked_tensor(tensor[:3]) is True
        assert not handle.is_pinned(tensor[5:])

    def test_the_number_of_elements_is_an_integer(self, handle, example):
        for odd in (True, 1.5, "3", None):
            with pytest.raises(TypeError, match=f"num_elem is {odd!r}; it must be an int"):
                handle.new_cpu_locked_tensor(odd, example)
        with pytest.raises(ValueError, match="num_elem is -1; it must be 0 or more"):
            handle.new_cpu_locked_tensor(-1, example)

    def test_a_strided_view_of_a_locked_tensor_is_filled(
        self, open_handle, folder, example
    ):
        """A destination that is pinned and not contiguous."""
        handle = open_handle(block_size=BLOCK, queue_depth=DEPTH)
        expected = np.arange(60_000, dtype=np.int16).reshape(600, 100)
        handle.write(expected, folder / "data")
        tensor = handle.new_cpu_locked_tensor(120_000, example).reshape(600, 200)
        tensor[:] = 0
        assert handle.is_pinned(tensor[:, ::2])
        assert handle.read(tensor[:, ::2], folder / "data") == 0
        np.testing.assert_array_equal(np.asarray(tensor)[:, ::2], expected)
        assert not np.asarray(tensor)[:, 1::2].any()
        assert routes(handle).total() == 2 * expected.nbytes

    def test_locked_tensors_are_transferred_without_a_copy(
        self, open_handle, folder, alignment, example
    ):
        handle = open_handle()
        tensor = handle.new_cpu_locked_tensor(MIB, example_tenosr=example)
        tensor[:] = 3
        handle.write(tensor, folder / "data")
        tensor[:] = 0
        handle.read(tensor, folder / "data")
        assert bool((tensor == 3).all())
        assert routes(handle) == Counter(
            {"direct" if alignment > 1 else "buffered": 4 * MIB}
        )
        assert handle.free_cpu_locked_tensor(tensor)

    def test_a_tensor_in_use_is_not_freed(self, open_handle, folder, example):
        """DeepSpeed's op frees a locked tensor while a file is read into it."""
        handle = open_handle(**SLOW)
        tensor = handle.new_cpu_locked_tensor(PAGE, example)
        (folder / "data").write_bytes(bytes(2 * PAGE))
        with plugged(handle.handle, folder):
            handle.async_pread(tensor, folder / "data")
            with pytest.raises(ValueError, match="in use by 1 request; wait for it first"):
                handle.free_cpu_locked_tensor(tensor[:])
            assert handle.is_pinned(tensor)
        assert handle.wait() == 1
        assert handle.free_cpu_locked_tensor(tensor) is True


@pytest.mark.parametrize(
    "thing", [None, 5, "x", [1], object(), b"bytes"], ids=lambda thing: type(thing).__name__
)
def test_foreign_memory_is_neither_pinned_nor_freed(handle, thing):
    assert handle.is_pinned(thing) is False
    assert handle.free_cpu_locked_tensor(thing) is False


class TestEndOfABlock:
    """The end of a block waits for all requests, and raises their errors."""

    @pytest.fixture
    def handle(self, open_handle, path):
        path.write_bytes(b"1234")
        handle = open_handle()
        handle.async_pread(bytearray(4), path)
        handle.async_pread(bytearray(5), path)
        return handle

    def test_a_failure_is_raised_once(self, handle):
        with pytest.raises(OSError, match="wanted 5 bytes at offset 0, got 4"), handle:
            assert not handle.closed
        assert handle.closed
        assert handle.close() is None
        assert handle.wait() == 0

    def test_an_exception_of_the_block_is_kept(self, handle):
        with pytest.raises(KeyError, match="mine"), handle:
            raise KeyError("mine")
        assert handle.closed
        with pytest.raises(OSError, match="wanted 5 bytes"):
            handle.wait()

    def test_with_errors_status_the_block_keeps_the_error(self, open_handle, path, caplog):
        path.write_bytes(b"1234")
        with open_handle(errors="status") as handle:
            handle.async_pread(bytearray(5), path)
        assert handle.last_error.errno == errno.ENODATA
        assert "wanted 5 bytes at offset 0, got 4" in caplog.text


def test_threads_share_asynchronous_calls(open_handle, folder):
    """One thread's wait() may count another's requests; each counts exactly once."""
    handle = open_handle(block_size=BLOCK, queue_depth=DEPTH, intra_op_parallelism=2)
    (folder / "data").write_bytes(pattern(BLOCK))
    counts = []

    def work(number):
        for _ in range(40):
            handle.async_pread(bytearray(BLOCK), folder / "data")
            handle.async_pwrite(pattern(BLOCK, seed=number), folder / f"{number}")
            counts.append(handle.wait())

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    assert sum(counts) + handle.wait() == 8 * 40 * 2
    for number in range(8):
        assert (folder / f"{number}").read_bytes() == pattern(BLOCK, seed=number)


def test_other_threads_run_while_one_waits(open_handle, folder):
    """Blocking calls release the GIL."""
    handle = open_handle(**SLOW)
    (folder / "data").write_bytes(b"12345678")
    running = threading.Event()
    with plugged(handle.handle, folder):
        handle.async_pread(bytearray(8), folder / "data")
        waiter = threading.Thread(target=lambda: (running.set(), handle.wait()))
        waiter.start()
        running.wait()
        assert sum(range(100_000)) > 0
        assert waiter.is_alive()
    waiter.join()


def test_the_handle_of_the_op_has_its_options(open_handle, engine, path):
    """It is an ordinary Handle, and counts the op's bytes too."""
    op = open_handle(
        block_size=8192,
        queue_depth=7,
        intra_op_parallelism=2,
        direct=False,
        bounce="never",
    )
    found = op.handle
    assert type(found) is nvmeio.Handle
    assert not isinstance(op, nvmeio.Handle)
    assert (found.engine, found.direct, found.bounce) == (engine, False, "never")
    assert (found.block_size, found.queue_depth, found.workers) == (8192, 7, 2)
    assert found.write(b"12345", path) == 5
    assert op.stats() == found.stats()
    assert op.stats()["bytes_buffered"] == 5
    op.close()
    assert found.closed


@pytest.mark.parametrize("name", ["handle", "last_error"])
def test_attributes_of_the_op_cannot_be_set(handle, name):
    with pytest.raises(AttributeError):
        setattr(handle, name, None)


def test_a_handle_is_initialized_once(open_handle):
    handle = open_handle()
    with pytest.raises(ValueError, match="open already"):
        handle.__init__()


def test_a_handle_that_was_never_opened_says_so(path):
    handle = nvmeio.aio_handle.__new__(nvmeio.aio_handle)
    for call in (
        handle.wait,
        handle.close,
        handle.stats,
        handle.get_block_size,
        handle.get_single_submit,
        lambda: repr(handle),
        lambda: handle.read(bytearray(1), path),
        lambda: handle.async_pread(bytearray(1), path),
        lambda: handle.free_cpu_locked_tensor(np.zeros(1)),
    ):
        with pytest.raises(ValueError, match="never opened"):
            call()
    assert handle.closed
    assert handle.handle is handle.last_error is None


def test_a_handle_that_is_dropped_has_finished_its_work(engine, path):
    """A handle may be dropped with requests pending; DeepSpeed's op aborts."""
    handle = nvmeio.aio_handle(PAGE, DEPTH, engine=engine)
    expected = pattern(50 * BLOCK)
    target = Guarded(len(expected))
    path.write_bytes(expected)
    handle.async_pread(target.array, path)
    gone = weakref.ref(handle)
    del handle
    assert gone() is None
    assert target.content() == expected


def test_the_repr_shows_what_is_in_flight(open_handle, engine, folder):
    handle = open_handle(**SLOW)
    with plugged(handle.handle, folder) as plugs:
        shown = re.fullmatch(
            f"<nvmeio.aio_handle engine={engine} block_size=1 queue_depth=1 "
            r"intra_op_parallelism=1 pending=(\d+)>",
            repr(handle),
        )
        # On a busy machine some may be done by now.
        assert sum(not plug.done() for plug in plugs) <= int(shown[1]) <= len(plugs)
    handle.close()
    assert repr(handle).endswith(" closed>")


def test_pickling_carries_the_configuration(engine, path):
    options = {
        "block_size": 8192,
        "queue_depth": 7,
        "single_submit": True,
        "overlap_events": True,
        "intra_op_parallelism": 2,
        "engine": engine,
        "direct": False,
        "bounce": "never",
        "errors": "status",
    }
    with pickle.loads(pickle.dumps(nvmeio.aio_handle(**options))) as handle:
        assert handle.get_block_size() == 8192
        assert handle.get_queue_depth() == 7
        assert handle.get_single_submit() is True
        assert handle.get_overlap_events() is True
        assert handle.get_intra_op_parallelism() == 2
        assert handle.read(bytearray(5), path) == -1
        handle.write(bytes(BLOCK), path)
        assert routes(handle) == Counter(buffered=BLOCK)
        assert handle.stats()["engine"] == engine


class Subclass(nvmeio.aio_handle):
    """A handle with its own attribute and constructor."""

    def __init__(self, name, **options):
        super().__init__(8192, **options)
        self.names = [name]


@pytest.mark.parametrize(
    "clone",
    [lambda handle: pickle.loads(pickle.dumps(handle)), copy.copy, copy.deepcopy],
    ids=["pickle", "copy", "deepcopy"],
)
def test_a_copy_is_of_the_same_class(engine, path, clone):
    with (
        Subclass("one", engine=engine, overlap_events=True) as handle,
        clone(handle) as found,
    ):
        assert found is not handle
        assert type(found) is Subclass
        assert found.names == ["one"]
        assert (found.get_block_size(), found.get_overlap_events()) == (8192, True)
        assert found.write(bytes(BLOCK), path) == 0
        assert found.stats()["engine"] == engine
        assert handle.stats()["requests"] == 0


PAST_THE_END = {
    "read": lambda handle, *args: handle.read(*args, False, 90),
    "sync_pread": lambda handle, *args: handle.sync_pread(*args, 90),
    "pread": lambda handle, *args: handle.pread(*args, False, False, 90),
    "async_pread": lambda handle, *args: (handle.async_pread(*args, 90), handle.wait()),
}


@pytest.mark.parametrize("read", PAST_THE_END.values(), ids=PAST_THE_END)
def test_a_read_past_the_end_is_an_error(handle, path, read):
    """DeepSpeed's op ends the process."""
    path.write_bytes(bytes(100))
    with pytest.raises(OSError, match="wanted 50 bytes at offset 90, got 10") as caught:
        read(handle, bytearray(50), path)
    assert (caught.value.errno, caught.value.filename) == (errno.ENODATA, str(path))


@pytest.mark.parametrize("validate", [False, True])
def test_an_exception_of_a_signal_handler_in_wait_loses_no_count(
    handle, path, monkeypatch, validate
):
    path.write_bytes(pattern(4000))
    target = np.zeros((500, 2), np.int64)[:, 0]
    presses, land = [KeyboardInterrupt], buffer._copy_back

    def landing(*args):
        if presses:
            raise presses.pop()
        land(*args)

    monkeypatch.setattr(buffer, "_copy_back", landing)
    handle.pread(target, path, validate, True)
    with pytest.raises(KeyboardInterrupt):
        handle.wait()
    assert presses == []
    assert handle.wait() == 1
    assert target.tobytes() == pattern(4000)


def test_signatures_can_be_inspected():
    for name, member in inspect.getmembers(nvmeio.aio_handle, callable):
        if not name.startswith("__"):
            assert inspect.signature(member).parameters, name
            assert inspect.getdoc(member), name
