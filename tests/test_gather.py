"""Gathers and scatters: any records, any memory, refusals and failures."""

import copy
import errno
import gc
import json
import mmap
import os
import pickle
import sys
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import nvmeio
from helpers import (
    PAGE,
    SLOW,
    Guarded,
    drop,
    left_open,
    need_direct,
    plugged,
    routes,
    warm,
    warm_pages,
)
from nvmeio._native import gather
from nvmeio._native.gather import NewBytes
from nvmeio._native.system_calls import cached_fraction

SIZE = (1 << 20) + 777
CONTENT = np.random.default_rng(4).integers(0, 256, SIZE, np.uint8)
SETTINGS = settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture
def data(path):
    """A file of SIZE bytes; cold, if it is on a disk."""
    path.write_bytes(CONTENT.tobytes())
    if not path.is_relative_to("/dev/shm"):
        drop(path)
    return path


@st.composite
def records(draw, apart=False):
    """Offsets and sizes of records within the file; with `apart` they share no bytes."""
    unit = draw(st.sampled_from([1, 64, 512, 4096]))
    longest = draw(st.sampled_from([unit, 8 * unit, 40 * unit]))
    count = draw(st.integers(0, 60))
    seed = draw(st.integers(0, 2**32))
    rng = np.random.default_rng(seed)
    sizes = rng.integers(0, longest + 1, count) // unit * unit
    if apart:
        gaps = rng.integers(0, 3, count) * unit
        offsets = np.cumsum(sizes + gaps) - sizes
        keep = offsets + sizes <= SIZE
        order = rng.permutation(np.flatnonzero(keep))
        return offsets[order], sizes[order]
    within = draw(st.sampled_from([longest + 1, 64 << 10, SIZE - longest]))
    return rng.integers(0, within, count) // unit * unit, sizes


def taken(offsets, sizes):
    """Return the bytes of the records, one after the other."""
    parts = [
        CONTENT[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True)
    ]
    return np.concatenate([np.empty(0, np.uint8), *parts])


@SETTINGS
@given(wanted=records(), residue=st.integers(0, 5), max_gap=st.sampled_from([0, 4096]))
def test_records_land_one_after_the_other(handle, data, wanted, residue, max_gap):
    offsets, sizes = wanted
    memory = Guarded(int(sizes.sum()), residue)
    assert handle.gather(data, offsets, sizes, memory.array, max_gap=max_gap) == sizes.sum()
    assert memory.content() == taken(offsets, sizes).tobytes()


@SETTINGS
@given(wanted=records(), seed=st.integers(0, 99))
def test_records_land_at_their_places_and_leave_the_rest_alone(handle, data, wanted, seed):
    offsets, sizes = wanted
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(sizes))
    ends = np.cumsum(sizes[order] + rng.integers(0, 100, len(sizes)))
    places = np.empty_like(ends)
    places[order] = ends - sizes[order]
    expected = np.full(int(ends[-1]) if len(ends) else 0, Guarded.CANARY, np.uint8)
    for offset, size, place in zip(offsets, sizes, places, strict=True):
        expected[place : place + size] = CONTENT[offset : offset + size]
    memory = Guarded(len(expected))
    request = handle.submit_gather(data, offsets, sizes, memory.array, out_offsets=places)
    assert request.wait() == sizes.sum()
    assert memory.content() == expected.tobytes()


@SETTINGS
@given(wanted=records(apart=True))
def test_a_scatter_writes_the_records_and_nothing_else(handle, data, wanted):
    offsets, sizes = wanted
    source = np.random.default_rng(9).integers(0, 256, int(sizes.sum()), np.uint8)
    data.write_bytes(CONTENT.tobytes())
    expected, begin = CONTENT.copy(), 0
    for offset, size in zip(offsets, sizes, strict=True):
        expected[offset : offset + size] = source[begin : begin + size]
        begin += size
    assert handle.scatter(data, offsets, sizes, source) == sizes.sum()
    assert data.read_bytes() == expected.tobytes()


def test_a_scatter_takes_its_records_from_anywhere_and_makes_the_file(handle, path):
    source = np.arange(40, dtype=np.uint8)
    request = handle.submit_scatter(path, [8, 0], 4, source, buffer_offsets=[20, 30])
    assert request.wait() == 8
    assert path.read_bytes() == bytes([30, 31, 32, 33, 0, 0, 0, 0, 20, 21, 22, 23])


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int32, np.uint64, list, range])
def test_offsets_may_have_any_integer_dtype(handle, data, kind):
    offsets = range(3, 90, 7)
    if kind not in (list, range):
        offsets = np.array(offsets, kind)
    elif kind is list:
        offsets = list(offsets)
    out = np.empty(13 * 5, np.uint8)
    assert handle.gather(data, offsets, 5, out) == 65
    assert np.array_equal(out, taken(range(3, 90, 7), [5] * 13))


def test_no_records_are_no_io(handle, data):
    assert handle.gather(data, [], 4096, np.empty(0, np.uint8)) == 0
    assert handle.gather(data, [5, SIZE], 0, np.empty(0, np.uint8)) == 0
    assert handle.stats()["blocks"] == 0


@pytest.mark.parametrize(("size", "blocks"), [(2048, 1), (4096, 8)])
def test_larger_records_are_not_merged_across_gaps(open_handle, data, size, blocks):
    """From 16 KiB on, because copying the gap costs more than another I/O."""
    handle, out = open_handle(), np.empty((16, size), np.uint8)
    offsets = np.arange(16) * 8192
    handle.gather(data, offsets, size, out, max_gap=8192)
    assert np.array_equal(out, CONTENT[offsets[:, None] + np.arange(size)])
    assert handle.stats()["blocks"] == blocks


@pytest.mark.parametrize(("max_gap", "blocks"), [(4096, 16), (16384, 4)])
def test_max_gap_limits_the_bytes_read_and_discarded(handle, data, max_gap, blocks):
    out = np.empty((16, 64), np.uint8)
    handle.gather(data, np.arange(16) * 16384, 64, out, max_gap=max_gap)
    assert np.array_equal(out, taken(np.arange(16) * 16384, [64] * 16).reshape(16, 64))
    assert handle.stats()["blocks"] == blocks


def cached_pages(path):
    """Return the numbers of the cached pages of a file of SIZE bytes."""
    with open(path, "rb", buffering=0) as file:
        pages = range(-(-SIZE // PAGE))
        return {page for page in pages if cached_fraction(file.fileno(), page * PAGE, 1)}


def wakeups():
    """Return how often each other thread of the process has gone to sleep."""
    own, counts = threading.get_native_id(), {}
    for task in Path("/proc/self/task").iterdir():
        status = (task / "status").read_text()
        counts[task.name] = status.partition("\nvoluntary_ctxt_switches:")[2].split()[0]
    del counts[str(own)]
    return counts


@pytest.fixture
def on_disk(tmp_path):
    """A file of SIZE bytes on a disk with O_DIRECT."""
    need_direct(tmp_path)
    (tmp_path / "data").write_bytes(CONTENT.tobytes())
    return tmp_path / "data"


class TestPageCache:
    @SETTINGS
    @given(
        wanted=records(),
        pages=st.sets(st.integers(0, SIZE // PAGE)),
        max_gap=st.sampled_from([0, 4096]),
    )
    def test_a_gather_reads_right_bytes_and_caches_none(
        self, handle, on_disk, wanted, pages, max_gap
    ):
        offsets, sizes = wanted
        warm_pages(on_disk, pages)
        memory = Guarded(int(sizes.sum()))
        handle.gather(on_disk, offsets, sizes, memory.array, max_gap=max_gap)
        assert memory.content() == taken(offsets, sizes).tobytes()
        assert cached_pages(on_disk) <= pages

    @pytest.mark.parametrize(
        ("begin", "cached", "blocks"), [(100, False, 1), (100, True, 2), (PAGE, False, 2)]
    )
    def test_a_large_record_is_merged_where_it_is_bounced_anyway(
        self, open_handle, on_disk, begin, cached, blocks
    ):
        """Not from the page cache, and not where its pages come without a copy."""
        handle, found = open_handle(), []
        offsets, sizes, places = [begin, begin + 10 * PAGE], [10 * PAGE, 10], [0, 11 * PAGE]
        out = nvmeio.empty(12 * PAGE, np.uint8)
        # Another process may read, or the kernel drop, a page at any moment.
        for _ in range(5):
            warm_pages(on_disk, range(12 if cached else 0))
            before = handle.stats()["blocks"]
            handle.gather(on_disk, offsets, sizes, out, out_offsets=places)
            found.append(handle.stats()["blocks"] - before)
            read = np.concatenate([out[: 10 * PAGE], out[11 * PAGE :][:10]])
            assert np.array_equal(read, taken(offsets, sizes))
        assert blocks in found

    @pytest.mark.parametrize("waits", [True, False])
    def test_an_uncached_neighbour_of_a_cached_record_comes_from_the_device(
        self, open_handle, on_disk, waits
    ):
        """The first two records are merged at first, and the third adjoins the second.

        A call that waits reads these two itself, and none of them a second time.
        """
        handle, found = open_handle(block_size=64 << 10), []
        offsets = np.array([100, 11 * PAGE, 11 * PAGE + 1000])
        sizes, places = (
            np.array([10 * PAGE, 1000, 8 * PAGE]),
            [0, 20 * PAGE, 20 * PAGE + 1000],
        )
        out = nvmeio.empty(28 * PAGE + 1000, np.uint8)
        # At any moment another process may read, or the kernel drop, a page.
        for _ in range(5):
            warm_pages(on_disk, range(12))
            before = routes(handle)
            gather = handle.gather if waits else handle.submit_gather
            request = gather(on_disk, offsets, sizes, out, out_offsets=places)
            assert (request if waits else request.wait()) == sizes.sum()
            found.append((routes(handle) - before)["buffered"])
            read = np.concatenate([out[: 10 * PAGE], out[20 * PAGE :]])
            assert np.array_equal(read, taken(offsets, sizes))
        assert 10 * PAGE + 1000 in found

    @pytest.mark.parametrize("memory", ["plain", "strided", "placed", "bytes"])
    def test_one_cached_record_is_read_by_the_calling_thread(
        self, open_handle, on_disk, memory
    ):
        """No worker wakes, as one does for a cold record."""
        wanted, places = taken([5000], [3000]).tobytes(), None
        handle, woken = open_handle(), {False: [], True: []}
        # Another process may read, or the kernel drop, a page at any moment.
        for held in (False, True) * 5:
            out = np.zeros(3000, np.uint8)
            if memory == "strided":
                out = np.zeros((3000, 2), np.uint8)[:, 0]
            elif memory == "placed":
                out, places = np.zeros(4000, np.uint8), [700]
            elif memory == "bytes":
                out = NewBytes(np.array([3000]))
            warm_pages(on_disk, range(3 if held else 0))
            before, requests = wakeups(), handle.stats()["requests"]
            assert handle.gather(on_disk, [5000], 3000, out, out_offsets=places) == 3000
            woken[held].append(wakeups() != before)
            assert handle.stats()["requests"] == requests + 1
            found = out.values[0] if memory == "bytes" else out.tobytes()
            assert found == (bytes(700) + wanted + bytes(300) if places else wanted)
        assert False in woken[True]
        assert True in woken[False]

    def test_few_cached_records_are_read_by_the_calling_thread(self, open_handle, on_disk):
        offsets, sizes = np.array([5000, 70, 9000]), np.array([3000, 1, 2000])
        handle, woken, out = open_handle(), [], np.zeros(7000, np.uint8)
        for places in (None, [3000, 6999, 100]) * 5:
            warm_pages(on_disk, range(3))
            before, requests = wakeups(), handle.stats()["requests"]
            handle.gather(
                on_disk, offsets, sizes, out[: 7000 if places else 5001], out_offsets=places
            )
            woken.append(wakeups() != before)
            assert handle.stats()["requests"] == requests + 1
            wanted = np.split(taken(offsets, sizes), np.cumsum(sizes)[:-1])
            for place, record in zip(places or [0, 3000, 3001], wanted, strict=True):
                assert np.array_equal(out[place : place + len(record)], record)
        assert False in woken

    def test_one_record_fails_as_any_other(self, handle, on_disk):
        """Its page is cached as far as the file goes."""
        warm(on_disk)
        with pytest.raises(nvmeio.GatherError, match=r"record 0 .* past the end") as past:
            handle.gather(on_disk, [SIZE - 10], 11, np.zeros(11, np.uint8))
        assert past.value.failures == ((0, errno.ENODATA),)
        with pytest.raises(ValueError, match="does not fit into out"):
            handle.gather(on_disk, [0], 11, np.zeros(10, np.uint8))

    @pytest.mark.parametrize("kind", ["descriptor", "file object"])
    def test_one_record_of_a_file_open_for_writing_fails_as_any_other(
        self, open_handle, on_disk, kind
    ):
        """Reading it in the calling thread fails first, and must not close the file."""
        handle, out = open_handle(direct=False), np.zeros(11, np.uint8)
        with open(on_disk, "r+b") as opened:
            file = opened.fileno() if kind == "descriptor" else opened
            with pytest.raises(nvmeio.GatherError, match="past the end"):
                handle.gather(file, [SIZE - 10], 11, out)
            assert handle.gather(file, [SIZE - 11], 11, out) == 11
        assert np.array_equal(out, taken([SIZE - 11], [11]))

    def test_a_record_past_the_end_is_refused_before_others_are_read(self, handle, on_disk):
        warm(on_disk)
        out = np.zeros(300, np.uint8)
        with pytest.raises(nvmeio.GatherError, match=r"record 1 .* past the end") as past:
            handle.gather(on_disk, [0, SIZE - 10, 200], 100, out)
        assert past.value.failures == ((1, errno.ENODATA),)
        assert not out.any()

    @pytest.mark.parametrize("way", ["the handle", "the file"])
    def test_the_page_cache_can_be_bypassed(self, open_handle, on_disk, way):
        handle = open_handle(direct=True) if way == "the handle" else open_handle()
        out = nvmeio.empty((100, PAGE), np.uint8)
        warm_pages(on_disk, range(-(-SIZE // PAGE)))
        with nvmeio.File(on_disk, direct=True) as file:
            source = on_disk if way == "the handle" else file
            handle.gather(source, np.arange(100) * 2 * PAGE, PAGE, out)
        assert routes(handle)["buffered"] == 0

    def test_bytes_written_in_any_way_are_read(self, handle, on_disk):
        """Writes to the page cache, past it and to a memory map, and a truncated file."""
        rows, out = np.arange(64) * 2 * PAGE, np.empty((64, PAGE), np.uint8)

        def gathered():
            handle.gather(on_disk, rows, PAGE, out)
            assert (out == out[0, 0]).all()
            return out[0, 0]

        warm_pages(on_disk, range(-(-SIZE // PAGE)))
        with open(on_disk, "r+b", buffering=0) as file:
            for row in rows:
                os.pwrite(file.fileno(), bytes([7]) * PAGE, row)
            assert gathered() == 7
            handle.scatter(on_disk, rows, PAGE, np.full((64, PAGE), 8, np.uint8))
            assert gathered() == 8
            with mmap.mmap(file.fileno(), 0) as memory:
                for row in rows.tolist():
                    memory[row : row + PAGE] = bytes([9]) * PAGE
                assert gathered() == 9
                handle.scatter(on_disk, rows, PAGE, np.full((64, PAGE), 10, np.uint8))
                assert gathered() == memory[0] == 10
            file.truncate(0)
            file.truncate(SIZE)
            assert gathered() == 0


class TestMemory:
    """Memory of records: arrays of any kind."""

    def test_strided_memory_between_records_stays_unchanged(self, handle, data):
        memory = np.full((8, 64), 7, np.uint8)
        handle.gather(data, [9, 300], 16, memory[::2, :32], out_offsets=[0, 64])
        expected = np.full((4, 32), 7, np.uint8).ravel()
        expected[:16], expected[64:80] = CONTENT[9:25], CONTENT[300:316]
        assert np.array_equal(memory[::2, :32].ravel(), expected)
        assert (memory[1::2] == 7).all()
        assert (memory[:, 32:] == 7).all()

    @pytest.mark.parametrize("kind", ["array", "tensor"])
    def test_gathers_share_strided_memory(self, handle, data, kind):
        """Each copies back only its own records."""
        memory = np.zeros((40, 64), np.uint8)
        out = memory[::2]
        if kind == "tensor":
            out = pytest.importorskip("torch").from_numpy(memory)[::2]
        rows = np.arange(20)
        requests = [
            handle.submit_gather(data, [row * 99], 64, out, out_offsets=[row * 64])
            for row in rows[1:]
        ]
        requests.append(handle.submit_gather(data, [0], 64, out))
        for request in requests:
            request.wait()
        assert np.array_equal(memory[::2], CONTENT[rows[:, None] * 99 + np.arange(64)])
        assert not memory[1::2].any()

    def test_the_arrays_of_records_may_change_once_it_has_begun(self, handle, data):
        memory = np.zeros((64, 2), np.uint8)
        offsets, sizes, places = np.array([[9, 300], [16, 10], [40, 0]])
        request = handle.submit_gather(
            data, offsets, sizes, memory[:, 0], out_offsets=places
        )
        for array in (offsets, sizes, places):
            array[:] = [1, 2]
        request.wait()
        expected = np.zeros(64, np.uint8)
        expected[40:56], expected[:10] = CONTENT[9:25], CONTENT[300:310]
        assert np.array_equal(memory[:, 0], expected)

    @pytest.mark.parametrize("kind", ["array", "tensor"])
    def test_what_others_write_to_the_rest_meanwhile_stays(self, data, kind, monkeypatch):
        memory, calls = np.zeros((40, 64), np.uint8), []
        out = memory[::2]
        if kind == "tensor":
            out = pytest.importorskip("torch").from_numpy(memory)[::2]
        memcpy = gather.memcpy

        def other(*arguments):
            calls.append(arguments)
            memory[38, 0] = len(calls)
            memcpy(*arguments)

        monkeypatch.setattr(gather, "memcpy", other)
        with nvmeio.Handle() as handle:
            handle.gather(data, [5, 999], 64, out, out_offsets=[64, 0])
        assert memory[38, 0] == len(calls)
        assert np.array_equal(memory[:4:2], [CONTENT[999 : 999 + 64], CONTENT[5 : 5 + 64]])

    def test_the_padding_of_structured_elements_is_part_of_a_record(self, data):
        dtype = np.dtype([("flag", "u1"), ("number", "i8")], align=True)
        memory = np.zeros((10, 2 * dtype.itemsize), np.uint8)
        with nvmeio.Handle() as handle:
            handle.gather(data, np.arange(10) * 16 + 3, 16, memory.view(dtype)[:, 0])
        assert np.array_equal(memory[:, :16].ravel(), CONTENT[3 : 3 + 160])
        assert not memory[:, 16:].any()

    @pytest.mark.parametrize("kind", ["array", "memoryview", "tensor"])
    @pytest.mark.parametrize("seed", range(20))
    def test_records_may_be_any_bytes_of_strided_elements(self, data, kind, seed):
        random = np.random.default_rng(seed)
        memory = np.full((8, 5, 3, 8), 7, np.uint8)
        elements = memory.view(np.int32)[1::2, ::-1, :, 0]
        if kind == "tensor":
            torch = pytest.importorskip("torch")
            elements = torch.from_numpy(memory).view(torch.float32)[1::2, 1:, :, 0]
        size = elements.nbytes
        borders = np.sort(random.choice(size + 1, 12, replace=False))
        order = random.permutation(6)
        places, sizes = borders[::2][order], np.diff(borders)[::2][order]
        offsets = random.integers(0, PAGE, 6)
        expected = np.full(size, 7, np.uint8)
        for place, number, offset in zip(places, sizes, offsets, strict=True):
            expected[place : place + number] = CONTENT[offset : offset + number]
        out = memoryview(elements) if kind == "memoryview" else elements
        with nvmeio.Handle() as handle:
            handle.gather(data, offsets, sizes, out, out_offsets=places)
        if kind == "tensor":
            elements = elements.numpy()
        assert elements.tobytes() == expected.tobytes()
        assert (memory[::2] == 7).all()
        assert (memory[..., 4:] == 7).all()

    def test_a_strided_source_is_scattered_in_c_order(self, handle, path):
        source = np.arange(64, dtype=np.uint8).reshape(8, 8).T
        handle.scatter(path, np.arange(8) * 10, 8, source)
        written = np.frombuffer(path.read_bytes() + bytes(2), np.uint8).reshape(8, 10)
        assert np.array_equal(written[:, :8], source)

    @pytest.mark.parametrize("strided", [False, True])
    def test_tensors_are_gathered_and_scattered(self, handle, data, strided):
        torch = pytest.importorskip("torch")
        memory = torch.zeros(20, 64, dtype=torch.uint8)
        out, rest = memory[:10], memory[10:]
        if strided:
            out, rest = memory[::2], memory[1::2]
        version = memory._version
        handle.gather(data, np.arange(10) * 4096 + 5, 64, out)
        expected = taken(np.arange(10) * 4096 + 5, [64] * 10).reshape(10, 64)
        assert np.array_equal(out.numpy(), expected)
        assert memory._version > version
        assert not rest.any()

    @pytest.mark.parametrize("name", ["offsets", "sizes", "out_offsets"])
    def test_masked_integers_are_refused(self, data, name):
        numbers = {"offsets": [0, 9], "sizes": [4, 4], "out_offsets": [0, 4]}
        numbers[name] = np.ma.array(numbers[name], mask=[0, 1])
        offsets, sizes = numbers.pop("offsets"), numbers.pop("sizes")
        with (
            nvmeio.Handle() as handle,
            pytest.raises(TypeError, match="its mask would be lost"),
        ):
            handle.gather(data, offsets, sizes, bytearray(8), **numbers)

    @pytest.mark.parametrize("out", ["data", b"bytes", np.empty(5, object)])
    def test_memory_that_cannot_be_filled_is_refused(self, handle, data, out):
        with pytest.raises((TypeError, ValueError)):
            handle.gather(data, [0], 5, out)
        assert handle.stats()["requests"] == 0

    def test_memory_and_file_are_held_until_the_request_is_done(self, open_handle, data):
        handle = open_handle(**SLOW)
        with plugged(handle, data.parent):
            out = np.zeros((50, 64), np.uint8)
            kept = out.ctypes.data, out
            request = handle.submit_gather(nvmeio.File(data), np.arange(50) * 9, 64, out)
            del out
            assert not request.done()
        assert request.wait() == 50 * 64
        assert np.array_equal(kept[1].ravel(), taken(np.arange(50) * 9, [64] * 50))
        del request
        assert left_open(data.parent) == []


class TestNewBytes:
    """Bytes objects that a gather fills; datasets use them."""

    @SETTINGS
    @given(wanted=records(), seed=st.integers(0, 99))
    def test_each_object_gets_its_record(self, handle, data, wanted, seed):
        """Also repeated and empty records, in any order, by several gathers."""
        offsets, sizes = wanted
        new = NewBytes(sizes)
        for part in np.array_split(np.random.default_rng(seed).permutation(len(sizes)), 3):
            found = handle.gather(data, offsets[part], sizes[part], new, out_offsets=part)
            assert found == sizes[part].sum()
        assert b"".join(new.values) == taken(offsets, sizes).tobytes()
        assert [len(value) for value in new.values] == sizes.tolist()

    def test_objects_that_python_shares_do_not_change(self, handle, data):
        every = bytes(range(256))
        shared = [every[i : i + 1] for i in range(256)]
        sizes = np.repeat([0, 1], 300)
        new = NewBytes(sizes)
        assert handle.gather(data, np.arange(600), sizes, new) == 300
        assert b"".join(new.values) == CONTENT[300:600].tobytes()
        assert b"".join(shared) == every

    @pytest.mark.parametrize(
        ("call", "error", "words"),
        [
            ("gather", ValueError, "must have their sizes"),
            ("twice", ValueError, "record 1 .* shares its place"),
            ("beyond", IndexError, "out of bounds"),
            ("fewer", ValueError, "1 offsets and 2 out_offsets"),
            ("read", TypeError, "not nvmeio._native.gather.NewBytes"),
            ("scatter", TypeError, "not nvmeio._native.gather.NewBytes"),
        ],
    )
    def test_other_memory_is_never_reached(self, handle, data, call, error, words):
        new = NewBytes(np.array([64, 64]))
        calls = {
            "gather": lambda: handle.gather(data, [0, 0], [64, 65], new),
            "twice": lambda: handle.gather(data, [0, 0], 64, new, out_offsets=[1, 1]),
            "beyond": lambda: handle.gather(data, [0], 64, new, out_offsets=[2]),
            "fewer": lambda: handle.gather(data, [0], 64, new, out_offsets=[0, 1]),
            "read": lambda: handle.read(new, data),
            "scatter": lambda: handle.scatter(data, [0, 64], 64, new),
        }
        with pytest.raises(error, match=words):
            calls[call]()
        assert handle.stats()["requests"] == 0

    def test_more_than_memory_is_refused_at_once(self):
        with pytest.raises(MemoryError, match="1024 records have 1125899906842624 bytes"):
            NewBytes(np.full(1 << 10, 1 << 40))
        with pytest.raises(MemoryError, match="have 36893488147419103232 bytes"):
            NewBytes(np.full(8, 1 << 62))

    def test_objects_live_until_the_request_is_done(self, open_handle, data):
        handle = open_handle(**SLOW)
        new = NewBytes(np.full(50, 64))
        values = new.values
        alone = sys.getrefcount(values) - 1
        with plugged(handle, data.parent):
            request = handle.submit_gather(data, np.arange(50) * 9, 64, new)
            assert not request.done()
            del request, new
            gc.collect()
            assert sys.getrefcount(values) == alone + 1
        handle.drain()
        assert sys.getrefcount(values) == alone
        assert b"".join(values) == taken(np.arange(50) * 9, [64] * 50).tobytes()


REFUSED = {
    "a float": ({"offsets": [0.5]}, TypeError, "offsets has elements of dtype float64"),
    "booleans": ({"offsets": [True]}, TypeError, "offsets has elements of dtype bool"),
    "two dimensions": ({"offsets": [[1]]}, ValueError, r"offsets is of shape \(1, 1\)"),
    "too few sizes": ({"sizes": [64]}, ValueError, "3 offsets and 1 sizes"),
    "too many places": (
        {"out_offsets": [1] * 4},
        ValueError,
        "3 offsets and 4 out_offsets",
    ),
    "a size beyond": ({"sizes": 2**63}, ValueError, "sizes is 9223372036854775808"),
    "a negative size": ({"sizes": -1}, ValueError, "sizes is -1"),
    "negative sizes": ({"sizes": [1, -2, -3]}, ValueError, r"sizes\[1\] is -2"),
    "a negative offset": ({"offsets": [1, 2, -3]}, ValueError, r"offsets\[2\] is -3"),
    "a huge offset": (
        {"offsets": np.array([1, 2**63, 3], np.uint64)},
        ValueError,
        r"offsets\[1\] is 9223372036854775808",
    ),
    "beyond 64 bits": ({"offsets": [1, -(2**64)]}, ValueError, rf"\[1\] is -{2**64}; it"),
    "an overflow": (
        {"offsets": [1, 2**63 - 64, 3]},
        ValueError,
        r"record 1 of 64 bytes at offset 9223372036854775744 is beyond 2\*\*63 - 1",
    ),
    "past the end": (
        {"offsets": [1, 2, SIZE - 63]},
        nvmeio.GatherError,
        rf"record 2 of 64 bytes at offset {SIZE - 63} reaches past the end .*{SIZE} bytes",
    ),
    "memory too small": (
        {"out": np.empty(191, np.uint8)},
        ValueError,
        "record 2 of 64 bytes at offset 200 does not fit into out, which has 191 bytes",
    ),
    "a negative place": (
        {"out_offsets": [0, -1, 64]},
        ValueError,
        r"out_offsets\[1\] is -1",
    ),
    "a place outside": (
        {"out_offsets": [0, 64, 900]},
        ValueError,
        r"record 2 .* does not fit into out, .* at out_offsets\[2\] = 900",
    ),
    "places that overlap": (
        {"out_offsets": [64, 200, 127]},
        ValueError,
        "record 2 of 64 bytes at offset 200 shares its place in out",
    ),
    "a gap of words": ({"max_gap": "4096"}, TypeError, "max_gap is '4096'"),
    "a negative gap": ({"max_gap": -1}, ValueError, "max_gap is -1"),
}


@pytest.mark.parametrize(("changed", "kind", "words"), REFUSED.values(), ids=REFUSED)
def test_the_first_wrong_record_is_named_before_any_io(handle, data, changed, kind, words):
    out = np.full(900, 7, np.uint8)
    arguments = {"offsets": [0, 100, 200], "sizes": 64, "out": out} | changed
    for call in (handle.gather, handle.submit_gather):
        with pytest.raises(kind, match=words):
            call(data, **arguments)
    assert (out == 7).all()
    assert handle.stats()["requests"] == handle.stats()["blocks"] == 0


def test_a_scatter_refuses_records_that_share_bytes_of_the_file(handle, data):
    with pytest.raises(ValueError, match=r"record 1 .* shares its bytes of the file"):
        handle.scatter(data, [0, 63], 64, np.zeros(128, np.uint8))
    assert data.read_bytes() == CONTENT.tobytes()


@pytest.mark.parametrize("size", [5, [5, 5]])
@pytest.mark.parametrize("offsets", [[-1, 9], [0, 3], [9, 2**63 - 2]])
def test_a_refused_scatter_creates_no_file(handle, path, offsets, size):
    with pytest.raises(ValueError, match=r"record \d of 5 bytes|offsets\[0\] is -1"):
        handle.scatter(path, offsets, size, bytes(10))
    assert not path.exists()


class Unbound:
    """An object whose type cannot be tested, such as an unbound proxy."""

    @property
    def __class__(self):
        raise KeyError("not bound")


def test_an_error_of_a_type_test_is_raised(handle, data):
    """Ctrl-C may be raised there too, because abstract classes test types in Python."""
    with pytest.raises(KeyError, match="not bound"):
        handle.gather(data, Unbound(), 1, bytearray(1))
    with pytest.raises(KeyError, match="not bound"):
        handle.read(bytearray(1), Unbound())
    with pytest.raises(KeyError, match="not bound"):
        handle.drain(timeout=Unbound())


def test_an_interrupted_submission_leaves_no_file_open(handle, data):
    def interrupt(frame, event, _):
        if event == "call" and frame.f_code.co_filename.endswith("checks.py"):
            raise KeyboardInterrupt

    sys.setprofile(interrupt)
    try:
        # Lists are converted by Python code.
        with pytest.raises(KeyboardInterrupt):
            handle.submit_gather(data, [0, 9], [1, 2], bytearray(3))
    finally:
        sys.setprofile(None)
    assert left_open(data.parent) == []
    assert handle.gather(data, [0, 9], [1, 2], bytearray(3)) == 3


def test_a_closed_handle_refuses(open_handle, data):
    handle = open_handle()
    handle.close()
    with pytest.raises(ValueError, match="closed"):
        handle.gather(data, [0], 1, bytearray(1))


class TestFailures:
    """Some records fail, and others do not."""

    @pytest.fixture
    def failing(self, faulty):
        """A file whose bytes at 100 * PAGE cannot be read."""
        path = faulty / "data"
        path.write_bytes(CONTENT.tobytes())
        yield path
        fired = json.loads(os.getxattr(path, "user.fired"))
        assert fired.get("read.error", 0) + fired.get("write.error", 0) > 0
        os.setxattr(path, "user.faults", b"{}")

    @pytest.mark.parametrize("strided", [False, True])
    @pytest.mark.parametrize("late", [False, True])
    def test_a_failed_record_is_named_and_the_others_complete(
        self, open_handle, failing, late, strided
    ):
        handle = open_handle(direct=False)
        faults = {"read": {"error": errno.EIO, "at": 100 * PAGE}}
        os.setxattr(failing, "user.faults", json.dumps(faults).encode())
        # The kernel reads whole pages from FUSE, and reads ahead.
        os.posix_fadvise(fd := os.open(failing, os.O_RDONLY), 0, 0, os.POSIX_FADV_RANDOM)
        os.close(fd)
        pages = np.array([3, 100, 200, 7, 100, 250])
        out = (
            np.full((6, 128), 7, np.uint8)[:, ::2] if strided else np.full((6, 64), 7, "B")
        )
        arguments = (failing, pages * PAGE, 64, out)
        request = handle.submit_gather(*arguments, max_gap=0) if late else None
        with pytest.raises(nvmeio.GatherError) as caught:
            request.wait() if late else handle.gather(*arguments, max_gap=0)
        error = caught.value
        assert (error.errno, error.filename) == (errno.EIO, str(failing))
        assert error.index == 1
        assert error.failures == ((1, errno.EIO), (4, errno.EIO))
        assert f"record 1: 64 bytes at offset {100 * PAGE}" in str(error)
        assert "2 of 6 records failed" in str(error)
        for i in (0, 2, 3, 5):
            begin = pages[i] * PAGE
            assert np.array_equal(out[i], CONTENT[begin : begin + 64])
        assert (out[[1, 4]] == 7).all()
        again = pickle.loads(pickle.dumps(error))
        assert (again.failures, str(again)) == (error.failures, str(error))


@pytest.mark.parametrize("arguments", [("words",), (5, "x"), (5, "x", "f")])
def test_a_gather_error_takes_what_every_os_error_takes(arguments):
    plain, error = OSError(*arguments), nvmeio.GatherError(*arguments)
    for one in (error, pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (one.errno, one.strerror) == (plain.errno, plain.strerror)
        assert (one.filename, one.args, str(one)) == (
            plain.filename,
            plain.args,
            str(plain),
        )
        assert (one.failures, one.index) == ((), -1)


def test_truncating_the_file_meanwhile_fails_the_records_after_its_end(open_handle, data):
    handle = open_handle(**SLOW)
    out = np.full((2, 64), 7, np.uint8)
    with nvmeio.File(data, "r+") as file:
        with plugged(handle, data.parent):
            request = handle.submit_gather(file, [SIZE - 64, 0], 64, out)
            file.truncate(PAGE)
        with pytest.raises(nvmeio.GatherError, match="past the end of the file") as caught:
            request.wait()
    assert caught.value.failures == ((0, errno.ENODATA),)
    assert np.array_equal(out[1], CONTENT[:64])


def test_a_gather_can_be_cancelled(open_handle, data):
    handle = open_handle(**SLOW)
    with plugged(handle, data.parent):
        request = handle.submit_gather(
            data, np.arange(200) * PAGE, 64, np.empty((200, 64), np.uint8), max_gap=0
        )
        assert request.cancel()
    with pytest.raises(CancelledError, match="gather of 200 records"):
        request.wait()


def test_the_result_is_the_requested_memory(handle, data):
    out = np.empty(64, np.uint8)
    request = handle.submit_gather(data, [0], 64, out, result=out)
    assert request.result() is out
    assert request.wait() is out
    assert np.array_equal(out, CONTENT[:64])
    assert "gather of 1 records" in repr(request)


def test_threads_gather_side_by_side_on_one_handle(open_handle, data):
    handle = open_handle()
    start = threading.Barrier(8)

    def gather(seed):
        start.wait()
        for offsets in np.random.default_rng(seed).integers(0, SIZE - 100, (20, 200)):
            out = np.empty((200, 100), np.uint8)
            handle.gather(data, offsets, 100, out)
            assert np.array_equal(out, CONTENT[offsets[:, None] + np.arange(100)])
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(gather, range(8)))
    assert handle.stats()["requests"] == 160


def test_records_may_exceed_a_block_and_the_queue(handle, data):
    offsets, sizes = [5, 1000, 0, 300_000], [900_000, 400_000, 0, 12]
    out = np.empty(sum(sizes), np.uint8)
    assert handle.gather(data, offsets, sizes, out) == sum(sizes)
    assert np.array_equal(out, taken(offsets, sizes))
