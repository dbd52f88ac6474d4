"""aio_handle: what it counts and waits for, how it fails, and how it ends.

"Case n" is a numbered line of what DeepSpeed's op is known to do wrong.
"""

import copy
import errno
import inspect
import logging
import pickle
import resource
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
    limit,
    pattern,
    plugged,
    routes,
)


@pytest.mark.parametrize(
    ("name", "value", "most"),
    [
        ("block_size", 0, 1 << 30),
        ("block_size", (1 << 30) + 1, 1 << 30),
        ("queue_depth", 0, 32768),
        ("queue_depth", -1, 32768),
        ("queue_depth", 32769, 32768),
        ("queue_depth", 1_000_000, 32768),
        ("intra_op_parallelism", 0, 256),
        ("intra_op_parallelism", 257, 256),
        ("block_size", 1 << 70, 1 << 30),
    ],
)
def test_values_beyond_the_limits_are_refused_at_construction(name, value, most):
    """Cases 10 and 11: a huge queue, no queue, no workers."""
    words = f"{name} is {value}; it must be from 1 to {most}$"
    with pytest.raises(ValueError, match=words):
        nvmeio.aio_handle(**{name: value})


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"engine": "posix"}, "engine is 'posix'; it must be one of auto, io_uring"),
        ({"bounce": "maybe"}, "bounce is 'maybe'; it must be one of auto, always, never"),
        ({"errors": "print"}, "errors is 'print'; it must be one of raise, status"),
        ({"direct": "yes"}, "direct is 'yes'; it must be 'auto', True or False"),
        ({"bounce": []}, "bounce is of type list; it must be one of auto"),
    ],
)
def test_unknown_words_are_refused_at_construction(option, words):
    with pytest.raises(ValueError, match=words):
        nvmeio.aio_handle(**option)


@pytest.mark.parametrize("value", [1.5, "8", True, np.True_], ids=repr)
@pytest.mark.parametrize("name", ["block_size", "queue_depth", "intra_op_parallelism"])
def test_limits_are_integers(name, value):
    with pytest.raises(TypeError, match=f"{name} is {value!r}; it must be an integer"):
        nvmeio.aio_handle(**{name: value})


@pytest.mark.parametrize("variable", ["NVMEIO_BLOCK_SIZE", "NVMEIO_QUEUE_DEPTH"])
def test_a_limit_that_the_environment_breaks_is_named(monkeypatch, variable):
    monkeypatch.setenv(variable, "0")
    with pytest.raises(ValueError, match=f"{variable} is 0; it must be from 1 to"):
        nvmeio.aio_handle()


# Words, of which any but "" would count as true, and numbers that were meant for another
# argument.
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
            lambda: nvmeio.write_file(path, b"1", sync=value),
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


@pytest.mark.parametrize(
    ("args", "options", "words"),
    [
        ((1, 2, False, False, 1, "auto"), {}, "takes from 0 to 5 positional arguments but"),
        ((), {"depth": 3}, "got an unexpected keyword argument 'depth'"),
        ((4096,), {"block_size": 4096}, "got multiple values for argument 'block_size'"),
    ],
)
def test_mistakes_of_the_constructor_name_the_class(args, options, words):
    with pytest.raises(TypeError, match=rf"^aio_handle\(\) {words}"):
        nvmeio.aio_handle(*args, **options)


@pytest.mark.parametrize("offset", [-1, 1 << 63])
def test_an_offset_that_no_file_has_is_refused(handle, path, offset):
    path.write_bytes(b"12345678")
    with pytest.raises(ValueError, match=rf"file_offset is {offset}; it must be from 0 to"):
        handle.submit_read(bytearray(8), path, offset)
    for odd in (1.0, True, None):
        with pytest.raises(TypeError, match=f"file_offset is {odd}; it must be an integer"):
            handle.submit_read(bytearray(8), path, odd)


def test_an_end_that_no_file_has_is_refused(handle, path):
    path.write_bytes(b"12345678")
    with pytest.raises(ValueError, match=f"file_offset is {(1 << 63) - 4} for 8 bytes"):
        handle.submit_read(bytearray(8), path, (1 << 63) - 4)


def test_an_ordinary_array_of_any_shape_is_filled(handle, path):
    """Case 9: destinations that are strided or of two dimensions."""
    expected = np.arange(6000, dtype=np.float32).reshape(60, 100)
    handle.write(expected, path)
    plain, strided = np.zeros((60, 100), np.float32), np.zeros((60, 200), np.float32)
    assert handle.read(plain, path) == 0
    assert handle.read(strided[:, ::2], path) == 0
    np.testing.assert_array_equal(plain, expected)
    np.testing.assert_array_equal(strided[:, ::2], expected)
    assert not strided[:, 1::2].any()


class TestStatus:
    """errors="status": -1, the error logged and kept, nothing printed."""

    @pytest.fixture
    def handle(self, open_handle):
        return open_handle(BLOCK, DEPTH, errors="status")

    def test_failures_are_minus_one(self, handle, path, caplog, capfd):
        """Case 16: nothing is printed."""
        assert handle.last_error is None
        calls = [
            lambda: handle.read(bytearray(5), path),
            lambda: handle.sync_pread(bytearray(5), path),
            lambda: handle.async_pread(bytearray(5), path),
            lambda: handle.pread(bytearray(5), path, False, False),
            lambda: handle.write(b"12345", path / "below"),
            lambda: handle.async_pwrite(b"12345", path / "below"),
        ]
        for call in calls:
            caplog.clear()
            assert call() == -1
            assert handle.last_error.errno == errno.ENOENT
            assert [record.levelno for record in caplog.records] == [logging.ERROR]
            assert str(handle.last_error) in caplog.text
        assert handle.wait() == 0
        assert capfd.readouterr() == ("", "")

    def test_wait_is_minus_one_once(self, handle, path, caplog):
        path.write_bytes(bytes(10))
        assert handle.async_pread(bytearray(11), path) == 0
        assert handle.wait() == -1
        assert handle.last_error.errno == errno.ENODATA
        assert "wanted 11 bytes at offset 0, got 10" in caplog.text
        assert handle.wait() == 0

    def test_what_goes_well_is_as_ever(self, handle, path, capfd):
        assert handle.write(b"12345", path) == 0
        assert handle.sync_pread(bytearray(5), path) == 1
        assert handle.last_error is None
        assert capfd.readouterr() == ("", "")

    def test_mistakes_in_the_program_still_raise(self, handle, path):
        path.write_bytes(b"12345")
        with pytest.raises(ValueError, match="read-only"):
            handle.read(b"12345", path)
        with pytest.raises(TypeError, match="object"):
            handle.write(object(), path)
        with pytest.raises(ValueError, match="file_offset"):
            handle.async_pread(bytearray(1), path, -1)
        with pytest.raises(TypeError):
            handle.read(bytearray(5), None)
        assert handle.last_error is None

    def test_requests_raise_whatever_the_handle_says(self, handle, path):
        with pytest.raises(FileNotFoundError):
            handle.submit_read(bytearray(5), path)
        with pytest.raises(FileNotFoundError):
            handle.fsync(path / "below")


class TestWait:
    def test_nothing_pending_is_zero(self, handle):
        """Case 10: waiting for nothing is no reason to abort."""
        assert handle.wait() == 0
        assert handle.wait() == 0

    def test_it_counts_what_was_asynchronous_since_the_last_wait(self, handle, path):
        handle.async_pwrite(b"1234", path)
        handle.pwrite(b"5678", path, False, True, 4)
        handle.write(b"9", path, file_offset=8)
        request = handle.submit_write(b"0", path, 9)
        assert handle.wait() == 2
        handle.async_pread(bytearray(4), path)
        assert handle.wait() == 1
        assert handle.wait() == 0
        assert request.wait() == 1
        assert path.read_bytes() == b"1234567890"

    def test_the_first_failure_is_raised_when_all_have_been_consumed(self, handle, path):
        path.write_bytes(pattern(100))
        targets = [bytearray(100) for _ in range(5)]
        for target, offset in zip(targets, [0, 30, 0, 20, 0], strict=True):
            handle.async_pread(target, path, offset)
        with pytest.raises(OSError, match="at offset 30, got 70"):
            handle.wait()
        assert targets[0] == targets[2] == targets[4] == pattern(100)
        assert handle.wait() == handle.pending == 0

    def test_failures_of_requests_are_not_its_business(self, handle, path):
        path.write_bytes(b"1234")
        request = handle.submit_read(bytearray(5), path)
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


def test_writes_never_truncate(handle, path):
    path.write_bytes(bytes(3 * BLOCK))
    handle.write(b"new", path, file_offset=10)
    handle.sync_pwrite(pattern(BLOCK), path)
    handle.async_pwrite(b"", path)
    assert handle.wait() == 1
    assert path.read_bytes() == pattern(BLOCK) + bytes(2 * BLOCK)


@pytest.mark.parametrize("size", [3 * BLOCK + 5, 3 * MIB + 5])
def test_a_failed_write_leaves_no_more_than_was_written(handle, path, size):
    """Case 8: a write that cannot be completed is an error, and no file of the full size.

    Files of 128 KiB and more are preallocated, which fails at once.
    """
    with (
        limit(resource.RLIMIT_FSIZE, 2 * BLOCK),
        pytest.raises(OSError, match="File too large") as caught,
    ):
        handle.write(pattern(size), path)
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(path))
    left = path.read_bytes()
    assert len(left) <= 2 * BLOCK
    assert left == pattern(size)[: len(left)]


def test_a_failed_write_cuts_no_file_that_was_there(handle, path):
    path.write_bytes(bytes(2 * BLOCK))
    with (
        limit(resource.RLIMIT_FSIZE, 2 * BLOCK),
        pytest.raises(OSError, match="File too large") as caught,
    ):
        handle.write(bytes(2 * BLOCK), path, file_offset=BLOCK)
    assert caught.value.errno == errno.EFBIG
    assert path.stat().st_size == 2 * BLOCK


def test_several_writers_make_one_new_file(open_handle, path):
    """Each rank writes its part; none takes the file for its own."""
    parts = [pattern(BLOCK + 1000 * rank, seed=rank) for rank in range(6)]
    offsets = np.cumsum([0] + [len(part) for part in parts])
    handles = [open_handle(BLOCK, DEPTH) for _ in parts]
    for handle, part, offset in zip(handles, parts, offsets, strict=False):
        handle.async_pwrite(part, path, int(offset))
    assert [handle.wait() for handle in handles] == [1] * len(parts)
    assert path.read_bytes() == b"".join(parts)


def test_a_writer_that_fails_leaves_the_others_their_bytes(handle, path):
    """The request that made the file fails when another has written behind it."""
    with limit(resource.RLIMIT_FSIZE, 4 * BLOCK):
        requests = [
            handle.submit_write(pattern(BLOCK), path, 3 * BLOCK),
            handle.submit_write(pattern(BLOCK), path, 8 * BLOCK),
            handle.submit_write(pattern(BLOCK), path, BLOCK),
        ]
        assert [request.exception() is None for request in requests] == [True, False, True]
    assert path.read_bytes() == (
        bytes(BLOCK) + pattern(BLOCK) + bytes(BLOCK) + pattern(BLOCK)
    )


def test_fsync_follows_the_writes_before_it(handle, path):
    requests = [handle.submit_write(pattern(BLOCK), path, i * BLOCK) for i in range(20)]
    assert handle.submit_fsync(path).wait() == 0
    assert all(request.done() for request in requests)
    assert handle.fsync(path) is None
    assert path.read_bytes() == 20 * pattern(BLOCK)


@pytest.mark.parametrize("library", ["numpy", "torch"])
class TestLockedTensors:
    @pytest.fixture
    def example(self, library):
        module = pytest.importorskip(library, reason=f"{library} is not installed")
        return module.zeros(1, dtype=module.int16)

    def test_they_are_pinned_until_freed_once(self, open_handle, example):
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

    def test_their_number_is_an_integer(self, handle, example):
        for odd in (True, 1.5, "3", None):
            with pytest.raises(TypeError, match=f"num_elem is {odd!r}; it must be an int"):
                handle.new_cpu_locked_tensor(odd, example)
        with pytest.raises(ValueError, match="num_elem is -1; it must be 0 or more"):
            handle.new_cpu_locked_tensor(-1, example)

    def test_a_strided_view_of_one_is_filled(self, open_handle, folder, example):
        """Case 9: a destination that is pinned and not contiguous."""
        handle = open_handle(BLOCK, DEPTH)
        expected = np.arange(60_000, dtype=np.int16).reshape(600, 100)
        handle.write(expected, folder / "data")
        tensor = handle.new_cpu_locked_tensor(120_000, example).reshape(600, 200)
        tensor[:] = 0
        assert handle.is_pinned(tensor[:, ::2])
        assert handle.read(tensor[:, ::2], folder / "data") == 0
        np.testing.assert_array_equal(np.asarray(tensor)[:, ::2], expected)
        assert not np.asarray(tensor)[:, 1::2].any()
        assert routes(handle).total() == 2 * expected.nbytes

    def test_they_go_straight_to_the_device(self, open_handle, folder, alignment, example):
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
        """Case 14: freeing a locked tensor while a file is read into it."""
        handle = open_handle(**SLOW)
        tensor = handle.new_cpu_locked_tensor(PAGE, example)
        (folder / "data").write_bytes(bytes(2 * PAGE))
        with plugged(handle, folder):
            handle.async_pread(tensor, folder / "data")
            with pytest.raises(ValueError, match="in use by 1 request; wait for it first"):
                handle.free_cpu_locked_tensor(tensor[:])
            assert handle.is_pinned(tensor)
        assert handle.wait() == 1
        assert handle.free_cpu_locked_tensor(tensor) is True


@pytest.mark.parametrize(
    "thing", [None, 5, "x", [1], object(), b"bytes"], ids=lambda thing: type(thing).__name__
)
def test_what_is_not_ours_is_neither_pinned_nor_freed(handle, thing):
    assert handle.is_pinned(thing) is False
    assert handle.free_cpu_locked_tensor(thing) is False


def test_a_handle_that_is_dropped_has_finished_its_work(open_handle, engine, path):
    """Case 10: a handle may be destroyed with operations pending."""
    handle = nvmeio.aio_handle(PAGE, DEPTH, engine=engine)
    expected = pattern(50 * BLOCK)
    target = Guarded(len(expected))
    path.write_bytes(expected)
    handle.async_pread(target.array, path)
    request = handle.submit_read(bytearray(expected), path)
    gone = weakref.ref(handle)
    del handle
    assert gone() is None
    assert target.content() == expected
    assert request.done()
    assert request.wait() == len(expected)


def test_close_waits_and_refuses_what_comes(open_handle, path):
    expected = pattern(50 * BLOCK)
    target = Guarded(len(expected))
    path.write_bytes(expected)
    handle = open_handle(PAGE, DEPTH)
    with handle as entered:
        assert entered is handle
        request = handle.submit_read(target.array, path)
    assert handle.closed
    assert request.done()
    assert target.content() == expected
    assert repr(handle).endswith(" closed>")
    assert routes(handle).total() == len(expected)
    handle.close()
    for call in (handle.read, handle.async_pread, handle.submit_read):
        with pytest.raises(ValueError, match="the handle is closed"):
            call(target.array, path)
    assert handle.wait() == handle.pending == 0


class TestEndOfABlock:
    """What nobody has waited for is waited for, and does not fail unseen."""

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

    def test_an_exception_on_its_way_goes_on(self, handle):
        with pytest.raises(KeyError, match="mine"), handle:
            raise KeyError("mine")
        assert handle.closed
        with pytest.raises(OSError, match="wanted 5 bytes"):
            handle.wait()

    def test_the_status_is_kept(self, open_handle, path, caplog):
        path.write_bytes(b"1234")
        with open_handle(errors="status") as handle:
            handle.async_pread(bytearray(5), path)
        assert handle.last_error.errno == errno.ENODATA
        assert "wanted 5 bytes at offset 0, got 4" in caplog.text


def test_a_handle_is_initialized_once(open_handle):
    handle = open_handle()
    with pytest.raises(ValueError, match="open already"):
        handle.__init__()


def test_its_error_cannot_be_set(handle):
    with pytest.raises(AttributeError):
        handle.last_error = None


def test_a_handle_that_was_never_opened_says_so(path):
    handle = nvmeio.aio_handle.__new__(nvmeio.aio_handle)
    for call in (
        handle.wait,
        handle.close,
        handle.stats,
        handle.latencies,
        lambda: handle.pending,
        lambda: repr(handle),
        lambda: handle.read(bytearray(1), path),
        lambda: handle.submit_read(bytearray(1), path),
    ):
        with pytest.raises(ValueError, match="never opened"):
            call()
    assert handle.free_cpu_locked_tensor(np.zeros(1)) is False


def test_pending_and_repr_tell_what_is_in_flight(open_handle, engine, folder):
    handle = open_handle(**SLOW)
    (folder / "data").write_bytes(b"12345678")
    assert handle.pending == 0
    with plugged(handle, folder):
        plugs = handle.pending
        requests = [handle.submit_read(bytearray(8), folder / "data") for _ in range(3)]
        assert handle.pending == plugs + 3
        assert repr(handle) == (
            f"<nvmeio.aio_handle engine={engine} block_size=1 queue_depth=1 "
            f"intra_op_parallelism=1 pending={plugs + 3}>"
        )
    assert [request.wait() for request in requests] == [8, 8, 8]
    assert handle.pending == 0


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


def test_what_was_closed_comes_back_closed():
    handle = nvmeio.aio_handle()
    handle.close()
    assert pickle.loads(pickle.dumps(handle)).closed
    assert copy.copy(handle).closed


class Subclass(nvmeio.aio_handle):
    """A handle with an attribute, and a constructor of its own."""

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


def test_threads_share_a_handle(open_handle, folder):
    handle = open_handle(BLOCK, DEPTH, overlap_events=True, intra_op_parallelism=2)
    rounds, size = 25, 3 * BLOCK + 17

    def work(number):
        path = folder / f"of thread {number}"
        for turn in range(rounds):
            expected = pattern(size, seed=number * rounds + turn)
            targets = [bytearray(size) for _ in range(3)]
            write = (
                handle.write
                if turn % 2
                else lambda *args: handle.submit_write(*args).wait()
            )
            write(expected, path)
            requests = [handle.submit_read(target, path) for target in targets[:2]]
            handle.read(targets[2], path)
            assert [request.wait() for request in requests] == [size, size]
            assert targets == [expected] * 3

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    assert handle.stats()["requests"] == 8 * rounds * 4
    assert routes(handle).total() == 8 * rounds * 4 * size
    assert handle.pending == 0


def test_threads_share_asynchronous_calls(open_handle, folder):
    """wait() of one thread may count for another; none is lost, none counted twice."""
    handle = open_handle(BLOCK, DEPTH, intra_op_parallelism=2)
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
    """Every call that blocks lets go of the GIL."""
    handle = open_handle(**SLOW)
    (folder / "data").write_bytes(b"12345678")
    running = threading.Event()
    with plugged(handle, folder):
        handle.async_pread(bytearray(8), folder / "data")
        waiter = threading.Thread(target=lambda: (running.set(), handle.wait()))
        waiter.start()
        running.wait()
        assert sum(range(100_000)) > 0
        assert waiter.is_alive()
    waiter.join()


def test_signatures_can_be_inspected():
    for name, member in inspect.getmembers(nvmeio.aio_handle, callable):
        if not name.startswith("__"):
            assert inspect.signature(member).parameters, name
            assert inspect.getdoc(member), name
