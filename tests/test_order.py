"""Requests after others, and many transfers in one request."""

import errno
import gc
import itertools
import os
import resource
from concurrent.futures import CancelledError

import numpy as np
import pytest

import nvmeio
from children import run_child
from helpers import PAGE, SLOW, Guarded, limit, pattern, plugged
from mounts import SLOW_PLACES
from nvmeio._native import buffer as buffer_module

SIZE = 3 * PAGE + 100


@pytest.fixture
def handle(open_handle):
    """A handle with a small queue."""
    return open_handle(block_size=16384, queue_depth=4)


class TestAfter:
    def test_a_read_follows_the_write_that_makes_the_file(self, handle, path):
        for seed in range(20):
            data, target = pattern(SIZE, seed), Guarded(SIZE)
            path.unlink(missing_ok=True)
            write = handle.submit_write(data, path)
            read = handle.submit_read(target.array, path, after=write)
            assert read.wait() == SIZE
            assert write.done()
            assert target.content() == data

    def test_a_chain_of_writes_leaves_the_bytes_of_the_last(self, handle, path):
        requests = []
        for seed in range(50):
            before = requests[-1:]
            requests.append(handle.submit_write(pattern(SIZE, seed), path, after=before))
        gathered = Guarded(200)
        gather = handle.submit_gather(path, [0, PAGE], 100, gathered.array, after=requests)
        sync = handle.submit_fsync(path, after=iter(requests))
        assert gather.wait() == 200
        sync.wait()
        last = pattern(SIZE, 49)
        assert path.read_bytes() == last
        assert gathered.content() == last[:100] + last[PAGE : PAGE + 100]

    @pytest.mark.parametrize("kind", ["read", "write", "fsync", "gather", "many"])
    def test_a_failure_is_the_cause_of_the_later_failures(self, handle, path, kind):
        path.write_bytes(b"old")
        failed = handle.submit_read(bytearray(100), path)
        buffer = bytearray(3)
        request = {
            "read": lambda: handle.submit_read(buffer, path, after=failed),
            "write": lambda: handle.submit_write(b"new", path, after=failed),
            "fsync": lambda: handle.submit_fsync(path, after=failed),
            "gather": lambda: handle.submit_gather(path, [0], 3, buffer, after=failed),
            "many": lambda: handle.submit_read_many([(buffer, path, 0)], after=failed),
        }[kind]()
        last = handle.submit_fsync(path, after=request)
        with pytest.raises(OSError, match="past the end") as first:
            failed.wait()
        for later in (request, last):
            with pytest.raises(OSError, match="was not started: it comes after") as raised:
                later.wait()
            assert raised.value.errno == first.value.errno == errno.ENODATA
        assert request.exception().__cause__ is first.value
        assert last.exception().__cause__ is request.exception()
        assert bytes(buffer) == bytes(3)
        assert path.read_bytes() == b"old"

    @pytest.mark.parametrize("looked_at", [False, True])
    def test_a_failure_in_python_is_the_cause_too(
        self, handle, path, monkeypatch, looked_at
    ):
        path.write_bytes(b"old")
        strided = np.zeros((3, 2), np.uint8)[:, 0]

        def refuse(*arguments):
            raise MemoryError("no memory for what was read")

        monkeypatch.setattr(buffer_module, "_copy_back", refuse)
        read = handle.submit_read(strided, path)
        with pytest.raises(MemoryError):
            read.wait()
        if looked_at:
            assert read.done()
        later = handle.submit_write(b"new", path, after=[read])
        last = handle.submit_write_many([(b"new", path, 0)], after=later)
        assert later.done()
        for each, cause in ((later, read), (last, later)):
            with pytest.raises(OSError, match="was not started: it comes after the"):
                each.wait()
            assert each.exception().__cause__ is cause.exception()
        assert path.read_bytes() == b"old"

    @pytest.mark.parametrize("way", ["failed", "cancelled"])
    def test_a_request_that_was_waited_for_is_the_cause_too(self, handle, path, way):
        path.write_bytes(b"old")
        if way == "failed":
            before = handle.submit_read(bytearray(100), path)
        else:
            before = handle.submit_write(np.zeros(64 << 20, np.uint8), f"{path}.big")
            assert before.cancel()
        expected = OSError if way == "failed" else CancelledError
        with pytest.raises(expected) as first:
            before.wait()
        later = handle.submit_write(b"new", path, after=before)
        with pytest.raises(expected, match="was not started") as second:
            later.wait()
        assert second.value.__cause__ is first.value
        assert path.read_bytes() == b"old"

    def test_a_scatter_or_a_write_of_many_may_create_the_file(self, handle, path):
        data = pattern(200)
        for make in (
            lambda: handle.submit_scatter(path, [0, 100], 100, data),
            lambda: handle.submit_write_many([(data[:50], path, 0), (data[50:], path, 50)]),
        ):
            path.unlink(missing_ok=True)
            made = make()
            into = np.zeros((200, 2), np.uint8)[:, 0]
            reads = [
                handle.submit_gather(path, [0, 150], 50, into[:100], after=made),
                handle.submit_read_many([(into[100:], path, 100)], after=made),
            ]
            assert [read.wait() for read in reads] == [100, 100]
            assert into.tobytes() == data[:50] + data[150:] + data[100:]

    def test_a_closed_handle_refuses_requests_with_after(self, handle, path):
        write = handle.submit_write(b"12345", path)
        handle.close()
        with pytest.raises(ValueError, match="the handle is closed"):
            handle.submit_read(bytearray(5), path, after=write)

    def test_strided_sources_are_refused_with_after(self, handle, path):
        path.write_bytes(bytes(1000))
        strided = np.zeros(200, np.uint8)[::2]
        first = handle.submit_fsync(path)
        with pytest.raises(TypeError, match="copied at submission"):
            handle.submit_write(strided, path, after=first)
        with pytest.raises(TypeError, match="copied at submission"):
            handle.submit_write_many([(strided, path, 0)], after=first)
        with pytest.raises(TypeError, match="copied at submission"):
            handle.submit_scatter(path, [0], 100, strided, after=first)
        # A read into a view is copied there when the request is waited for, which is in
        # time.
        assert handle.submit_read(strided, path, after=first).wait() == 100
        staged = handle.submit_gather(path, [0], 100, strided)
        staged.wait()
        handle.submit_fsync(path, after=staged).wait()

    def test_a_strided_read_in_flight_is_refused_as_predecessor(self, open_handle, folder):
        handle, path = open_handle(**SLOW), folder / "data"
        path.write_bytes(pattern(100))
        columns = np.zeros((100, 4), np.uint8)
        with plugged(handle, folder):
            reads = [
                handle.submit_read(columns[:, 0], path),
                handle.submit_read_many([(columns[:, 1], path, 0)]),
                handle.submit_gather(path, [0], 100, columns[:, 2]),
            ]
            for read in reads:
                with pytest.raises(TypeError, match=r"pass through Python.*wait for it"):
                    handle.submit_write(b"new", path, after=[read])
            # The bytes to write were copied at submission.
            write = handle.submit_write(columns[:, 3], folder / "other")
            later = handle.submit_fsync(folder / "other", after=write)
        for request in [*reads, later]:
            request.wait()
        assert columns[:, :3].T.tobytes() == pattern(100) * 3
        # Requests that are done delay nothing.
        handle.submit_write(b"new", path, after=reads).wait()
        assert path.read_bytes() == b"new" + pattern(100)[3:]

    def test_after_accepts_only_requests_of_the_same_handle(
        self, handle, path, open_handle
    ):
        path.write_bytes(bytes(100))
        other = open_handle(block_size=16384, queue_depth=4)
        foreign = other.submit_read(bytearray(100), path)
        with pytest.raises(ValueError, match="of another handle"):
            handle.submit_read(bytearray(100), path, after=foreign)
        foreign.wait()
        with pytest.raises(TypeError, match=r"after\[1\] is 3; it must be a Request"):
            handle.submit_read(bytearray(100), path, after=[handle.submit_fsync(path), 3])
        with pytest.raises(TypeError, match="after is 3; it must be a Request or an iter"):
            handle.submit_read(bytearray(100), path, after=3)
        with pytest.raises(TypeError, match="after is 'path'; it must be a Request or an"):
            handle.submit_read(bytearray(100), path, after="path")
        handle.drain()

    def test_a_predecessor_that_is_being_cancelled_is_the_cause(self, handle, path):
        big = handle.submit_write(np.zeros(64 << 20, np.uint8), path)
        read = handle.submit_read(bytearray(10), path, after=big)
        assert big.cancel()
        with pytest.raises(CancelledError, match="comes after the write of") as caught:
            read.wait()
        assert isinstance(caught.value.__cause__, CancelledError)
        with pytest.raises(CancelledError):
            big.wait()

    def test_a_long_chain_fails_with_a_short_message(self, handle, path, recwarn):
        path.write_bytes(b"old")
        request = handle.submit_read(bytearray(100), path)
        for _ in range(200):
            request = handle.submit_read(bytearray(1), path, after=request)
        handle.drain()
        error = request.exception()
        assert len(str(error)) < 300 + 2 * len(str(path))
        causes = [error]
        while causes[-1].__cause__ is not None:
            causes.append(causes[-1].__cause__)
        assert len(causes) == 201
        assert "past the end" in str(causes[-1])
        # The error of the last one reports all of them.
        del request, error, causes
        gc.collect()
        assert not recwarn.list

    @pytest.mark.parametrize(("engine", "slow"), SLOW_PLACES, indirect=["slow"])
    def test_nothing_starts_before_its_turn(self, slow, engine):
        report = run_child("order_held", **slow, engine=engine).report
        assert report["waiting"] == [False, False, False, True, False]
        # Only that of b"old".
        assert (report["blocks"], report["cancelled"]) == (1, True)
        assert report["right"]


class TestMany:
    @pytest.mark.parametrize("through", ["paths", "files", "descriptors", "mixed"])
    def test_many_items_are_written_and_read_back(self, handle, tmp_path, through):
        paths = [tmp_path / f"{index}" for index in range(3)]
        for path in paths:
            path.touch()
        files = {
            "paths": paths,
            "files": [nvmeio.File(path, "r+") for path in paths],
            "descriptors": [os.open(path, os.O_RDWR) for path in paths],
            "mixed": [
                str(paths[0]),
                nvmeio.File(paths[1], "r+"),
                os.open(paths[2], os.O_RDWR),
            ],
        }[through]
        sizes = [0, 1, 777, PAGE, 3 * PAGE, 40_000] * 20
        ends = [0, 0, 0]
        items, expected = [], [b"", b"", b""]
        for number, size in enumerate(sizes):
            place = number % 3
            data = pattern(size, number)
            items.append((data, files[place], ends[place]))
            ends[place] += size
            expected[place] += data
        assert handle.write_many(items) == sum(sizes)
        assert [path.read_bytes() for path in paths] == expected
        targets = [Guarded(size) for size in sizes]
        request = handle.submit_read_many(
            (target.array, file, offset)
            for target, (_, file, offset) in zip(targets, items, strict=True)
        )
        assert request.wait() == request.nbytes == sum(sizes)
        for target, (data, _, _) in zip(targets, items, strict=True):
            assert target.content() == data
        assert handle.read_many([]) == 0

    def test_items_may_have_any_kind_of_memory(self, handle, path):
        data = pattern(4000, 1)
        path.write_bytes(data)
        strided = np.zeros((10, 20), np.float32).T
        torch = pytest.importorskip("torch", reason="torch is not installed")
        tensor = torch.zeros(100, dtype=torch.float64)
        transposed = torch.zeros(10, 10).T
        items = [(strided, path, 0), (tensor, path, 800), (transposed, path, 1600)]
        assert handle.read_many(items) == 2000
        assert np.ascontiguousarray(strided).tobytes() == data[:800]
        assert tensor.numpy().tobytes() == data[800:1600]
        assert transposed.contiguous().numpy().tobytes() == data[1600:2000]
        assert handle.write_many([(strided, path, 2000), (transposed, path, 3600)]) == 1200
        assert (
            path.read_bytes()
            == data[:2000] + data[:800] + data[2800:3600] + data[1600:2000]
        )

    def test_items_of_strided_memory_land_beside_one_that_fails(self, handle, path):
        path.write_bytes(np.arange(100).tobytes())
        torch = pytest.importorskip("torch", reason="torch is not installed")
        columns = np.full((10, 2), -1)
        tensors = torch.full((10, 2), -1)
        failing = np.full((10, 2), -1)
        targets = [columns[:, 0], failing[:, 0], tensors[:, 1]]
        offsets = [80, 780, 240]
        with pytest.raises(nvmeio.GatherError) as raised:
            handle.read_many(
                (target, path, offset)
                for target, offset in zip(targets, offsets, strict=True)
            )
        assert raised.value.failures == ((1, errno.ENODATA),)
        assert columns[:, 0].tolist() == [*range(10, 20)]
        assert tensors[:, 1].tolist() == [*range(30, 40)]
        assert (columns[:, 1] == -1).all()
        assert (tensors[:, 0] == -1).all()
        assert (failing == -1).all()

    def test_a_failure_names_the_file_of_its_item(self, handle, path, tmp_path):
        other = tmp_path / "other"
        path.write_bytes(pattern(1000, 1))
        other.write_bytes(pattern(10, 2))
        targets = [Guarded(10) for _ in range(4)]
        items = [(targets[0].array, path, 0), (targets[1].array, other, 0)]
        items += [(targets[2].array, other, 1), (targets[3].array, path, 990)]
        items.append((Guarded(10).array, path, 991))
        with pytest.raises(nvmeio.GatherError, match="item 2: 10 bytes at offset 1") as err:
            handle.read_many(items)
        assert (err.value.index, err.value.filename) == (2, str(other))
        assert err.value.failures == ((2, errno.ENODATA), (4, errno.ENODATA))
        assert targets[0].content() == pattern(1000, 1)[:10]
        assert targets[1].content() == pattern(10, 2)
        assert targets[3].content() == pattern(1000, 1)[990:]

    def test_items_of_a_write_that_fail_leave_the_others_whole(self, handle, path):
        parts = [pattern(PAGE + index, index) for index in range(4)]
        offsets = [0, 64 * PAGE, 2 * PAGE, 4 * PAGE]
        with (
            limit(resource.RLIMIT_FSIZE, 16 * PAGE),
            pytest.raises(
                nvmeio.GatherError, match=r"File too large \(write of many, item 1"
            ) as err,
        ):
            handle.write_many(
                (part, path, offset) for part, offset in zip(parts, offsets, strict=True)
            )
        assert err.value.failures == ((1, errno.EFBIG),)
        written = path.read_bytes()
        assert len(written) == 5 * PAGE + 3
        for index in (0, 2, 3):
            assert written[offsets[index] :].startswith(parts[index])

    def test_a_refused_item_starts_nothing(self, handle, path, tmp_path):
        new = tmp_path / "new"
        for items, message in [
            ([(b"1", new, 0), (b"1", new)], r"items\[1\] is .*; it must be"),
            ([(b"1", new, 0), (b"1", new, -1)], r"items\[1\].* is -1"),
            ([(b"1", new, 0), (object(), new, 0)], r"items\[1\]: expected an array"),
            ([(b"1", new, 0), (b"1", new, 2**63 - 1)], r"items\[1\]: the offset"),
            ([(b"1", new, 0), (b"1", 1.5, 0)], r"items\[1\]: file is 1.5; it must"),
            ([(b"1", new, 0), (b"1", "\ud800", 0)], r"items\[1\]: the path '\\ud800' has"),
        ]:
            with pytest.raises((TypeError, ValueError), match=message):
                handle.submit_write_many(items)
            assert not new.exists()
        path.write_bytes(b"1")
        with (
            nvmeio.File(path) as file,
            pytest.raises(OSError, match="not open for writing"),
        ):
            handle.submit_write_many([(b"2", new, 0), (b"2", file, 0)])
        assert path.read_bytes() == b"1"
        handle.close()
        with pytest.raises(ValueError, match="closed"):
            handle.submit_write_many([(b"1", path, 0)])

    def test_a_request_of_many_can_be_cancelled_awaited_and_dropped(self, handle, path):
        path.write_bytes(bytes(PAGE))
        for _ in range(50):
            request = handle.submit_read_many(
                [(bytearray(PAGE), path, 0) for _ in range(100)]
            )
            if request.cancel():
                with pytest.raises(CancelledError):
                    request.wait()
            else:
                assert request.wait() == 100 * PAGE
        called = []
        request = handle.submit_read_many([(bytearray(PAGE), path, 0)] * 3)
        request.add_done_callback(called.append)
        nvmeio.wait([request])
        assert called == [request]
        handle.submit_read_many([(bytearray(PAGE), path, 0)] * 3)
        handle.drain()
        assert handle.pending == 0
        assert handle.stats()["requests"] == 52


class TestDrain:
    def test_drain_waits_for_everything_up_to_a_timeout(self, handle, path):
        path.write_bytes(pattern(PAGE, 1))
        targets = [Guarded(PAGE) for _ in range(20)]
        requests = [handle.submit_read(target.array, path) for target in targets]
        handle.drain(timeout=60)
        assert all(request.done() for request in requests)
        assert all(target.content() == pattern(PAGE, 1) for target in targets)
        handle.drain(0)
        for wrong in ("1", -1, True):
            with pytest.raises((TypeError, ValueError)):
                handle.drain(wrong)

    def test_the_longest_of_chains_is_drained(self, handle, path):
        requests = [handle.submit_write(b"0", path)]
        for _, digit in zip(range(2000), itertools.cycle(b"123456789")):
            requests.append(handle.submit_write(bytes([digit]), path, after=requests[-1]))
        handle.drain()
        assert path.read_bytes() == b"2"


@pytest.mark.parametrize(
    ("items", "words"),
    [
        ([(bytearray(1), "missing", 0)], r"\(items\[0\]\): 'missing'"),
        ([("data", bytearray(1), 0)], r"items\[0\]: buffer is the path 'data'"),
        ([(bytearray(1), 3.5, 0)], r"items\[0\]: file is 3\.5"),
        ([np.zeros(2)], r"items\[0\] is of type ndarray and length 2; it must be \(buffer"),
        ([7], r"items\[0\] is of type int; it must be \(buffer"),
        (None, r"items is None; it must be an iterable of \(buffer, file, offset\)"),
    ],
)
def test_a_refused_item_is_named(handle, items, words):
    with pytest.raises((OSError, TypeError, ValueError), match=words):
        handle.read_many(items)
