"""Arrays on disk return and assign what numpy does for the same index."""

import asyncio
import contextlib
import errno
import math
import os
import pickle
import resource
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib import format as npy

import nvmeio
import nvmeio.aio
from array_samples import DTYPES, RECORD, noise, numbers, write_npy
from helpers import (
    MIB,
    PAGE,
    POINTER,
    SLOW,
    drop,
    fork,
    left_open,
    limit,
    need_direct,
    pattern,
    plugged,
    routes,
    warm,
)
from index_strategies import INVENTED, assert_same, cases, outcome
from nvmeio import ArrayFile
from nvmeio._arrays import transfers

# The size of a worker's bounce: NVMEIO_BOUNCE_BYTES.
BOUNCE_BYTES = 256 << 10


@pytest.fixture
def saved(path):
    """An array, and its file."""
    array = numbers((1000, 4, 25))
    return array, write_npy(path, array)


class TestIndexing:
    @INVENTED
    @given(cases())
    def test_an_index_gives_what_numpy_gives(self, tmp_path, case):
        shape, index = case
        path = write_npy(tmp_path / "array.npy", numbers(shape, "i4"))
        expected = outcome(lambda: np.load(path)[index])
        with ArrayFile(path) as array:
            assert_same(outcome(lambda: array[index]), expected)
            assert_same(outcome(lambda: array.prefetch(index).result()), expected)
            if isinstance(expected, np.ndarray):
                out = np.empty_like(expected)
                assert array.prefetch(index, out).result() is out
                assert_same(out, expected)

    # Indices whose extents are far apart, near each other, or one.
    INDICES = (
        5,
        -1,
        np.s_[:],
        np.s_[10:20],
        np.s_[700:2:-3],
        np.s_[::100, 1:3, ::2],
        np.s_[:, 2],
        np.s_[..., 3],
        np.s_[3, 2, 1],
        np.s_[5, ...],
        [900, 3, 3, -1],
        np.s_[[1, 999, 500], 1:, 2],
        np.s_[[1, 999, 500], :, [2, 24, 0]],
        np.s_[[[7]] * 50, [[1, 2]]],
        np.s_[:0],
        np.s_[[]],
        np.s_[None, 3:5, None, 0],
        [True, False] * 500,
        np.s_[np.arange(1000) % 100 == 0, 1],
    )

    @pytest.mark.parametrize("index", INDICES, ids=repr)
    def test_every_engine_gives_what_numpy_gives(self, handle, saved, index):
        expected, path = saved
        with ArrayFile(path, handle=handle) as array:
            assert_same(array[index], expected[index])
            assert_same(array.prefetch(index).result(), expected[index])
        assert not handle.closed

    def test_neighbours_are_one_read(self, saved):
        expected, path = saved
        with (
            nvmeio.Handle(block_size=64 * MIB) as handle,
            ArrayFile(path, handle=handle) as array,
        ):
            for index in (np.s_[:], np.s_[3:900], np.s_[3], np.s_[3:5, ..., ::-3]):
                before = handle.stats()
                found = array[index]
                assert_same(found, expected[index])
                after = handle.stats()
                assert after["requests"] == before["requests"] + 1
                # Unaligned edges are blocks of their own; memory that numpy allocates in
                # small pages goes through bounces.
                bounces = -(-found.nbytes // BOUNCE_BYTES)
                assert after["blocks"] <= before["blocks"] + 2 + bounces

    @pytest.mark.parametrize(
        "index",
        [
            np.s_[:, 1],
            np.s_[::2],
            np.s_[::-3, ::-1, 2:4],
            np.s_[None, 1:, :, 3],
            np.s_[..., ::2],
            np.s_[3:7, None, ::-2, 1:],
        ],
        ids=str,
    )
    @pytest.mark.parametrize("limit", [8, 24, 100, 1000])
    def test_what_is_read_with_its_gaps_is_read_in_parts(
        self, handle, path, monkeypatch, index, limit
    ):
        monkeypatch.setattr(transfers, "_PART_BYTES", limit)
        expected = numbers((40, 3, 4), "i2")
        with ArrayFile(write_npy(path, expected), handle=handle) as array:
            assert_same(array[index], expected[index])
        assert handle.stats()["requests"] > 1 or limit > 8

    @pytest.mark.parametrize("index", ["vector", "key", ["key", "when"]], ids=str)
    @pytest.mark.parametrize("shape", [(20,), (7, 3)], ids=str)
    @pytest.mark.parametrize("limit", [1, 100, 300])
    def test_fields_are_read_in_parts(self, path, monkeypatch, index, shape, limit):
        monkeypatch.setattr(transfers, "_PART_BYTES", limit)
        expected = noise(shape, RECORD)
        with ArrayFile(write_npy(path, expected)) as array:
            found = array[index]
            assert (found.dtype, found.shape) == (
                expected[index].dtype,
                expected[index].shape,
            )
            np.testing.assert_array_equal(found, expected[index])

    def test_a_column_needs_little_more_memory_than_its_result(self, path):
        nvmeio.save(path, np.ones((2_000_000, 16), "f4"))
        with ArrayFile(path) as array:
            column = array[:, 3]  # imports nvmeio.torch if other tests have imported torch
            tracemalloc.start()
            try:
                column = array[:, 3]
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
        assert column.sum() == 2_000_000
        assert peak < 2 * column.nbytes + transfers._PART_BYTES

    def test_a_result_is_in_memory_of_its_own(self, saved):
        expected, path = saved
        with ArrayFile(path) as array:
            for index in (0, np.s_[2:5], [1, 2], np.s_[..., 0]):
                found = array[index]
                found[...] = -1
                assert found.base is None or found.base.nbytes == found.nbytes
                assert_same(array[index], expected[index])

    @pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
    def test_every_dtype_of_plain_bytes_is_read_and_written(self, path, dtype):
        expected = noise((50, 3), dtype)
        write_npy(path, expected)
        with ArrayFile(path, mode="r+") as array:
            assert array.dtype == dtype
            for index in (np.s_[:], 7, (7, 2), [3, 1, 3], np.s_[::9, 1]):
                assert_same(array[index], np.load(path)[index])
            array[[4, 2]] = expected[[0, 1]]
            assert_same(array[[2, 4]], expected[[1, 0]])
        expected[[4, 2]] = expected[[0, 1]]
        assert_same(np.load(path), expected)

    @pytest.mark.parametrize("index", [np.s_[::2], [3, 1, 1], np.s_[::-1]], ids=str)
    def test_padding_between_fields_is_read_as_it_is(self, path, index):
        """numpy itself calls the padding f1, the name of the second field."""
        expected = noise((20,), np.dtype("i1,i8", align=True))
        write_npy(path, expected)
        with ArrayFile(path) as array:
            taken = np.ascontiguousarray(expected.view("V16")[index])
            assert_same(array[index], taken.view(expected.dtype))

    def test_fields_are_read_by_name(self, path):
        expected = noise((20,), RECORD)
        write_npy(path, expected)
        with ArrayFile(path, mode="r+") as array:
            assert_same(array["vector"], expected["vector"])
            np.testing.assert_array_equal(array[["key", "when"]], expected[["key", "when"]])
            assert_same(array.prefetch("vector").result(), expected["vector"])
            found = array.prefetch(["key", "when"]).result()
            np.testing.assert_array_equal(found, expected[["key", "when"]])
            out = np.empty((20, 3), "f4")
            assert array.prefetch("vector", out).result() is out
            assert_same(out, expected["vector"])
            for assign in (array.__setitem__, array.submit_setitem):
                with pytest.raises(IndexError, match="'key'; assign whole records"):
                    assign("key", 0)
            for read in (array.__getitem__, array.prefetch):
                with pytest.raises(ValueError, match="no field of name other"):
                    read("other")

    @pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 5), ()], ids=repr)
    def test_arrays_without_rows_or_elements_work(self, path, shape):
        expected = numbers(shape)
        write_npy(path, expected)
        with ArrayFile(path) as array:
            assert_same(array[...], expected)
            assert (array.shape, array.size, array.nbytes) == (
                shape,
                expected.size,
                expected.nbytes,
            )
            if shape:
                assert_same(array.gather([0] * shape[0]), expected[[0] * shape[0]])
                assert_same(array.prefetch([]).result(), expected[[]])
            else:
                assert_same(array[()], expected[()])
                for call in (len, lambda array: next(iter(array)), lambda a: a.gather([0])):
                    with pytest.raises(TypeError, match="without axes has no"):
                        call(array)

    def test_an_array_iterates_and_converts(self, path):
        expected = numbers((4, 3))
        write_npy(path, expected)
        with ArrayFile(path) as array:
            np.testing.assert_array_equal(list(array), expected)
            assert_same(np.asarray(array), expected)
            assert_same(np.asarray(array, "f8"), expected.astype("f8"))
            assert len(array) == 4

    @pytest.mark.parametrize(("shape", "reads"), [((3000, 500), 2), ((3, 2 << 20), 3)])
    def test_an_iteration_reads_parts(self, handle, path, shape, reads):
        expected = numbers(shape, "f4")
        write_npy(path, expected)
        with ArrayFile(path, handle=handle) as array:
            for row, wanted in zip(array, expected, strict=True):
                assert_same(row, wanted)
        assert handle.stats()["requests"] == reads


WRONG_ROWS = {
    "row": (lambda a: a.gather([0, 1000]), IndexError, r"rows\[1\] is 1000; .* to 999"),
    "negative": (lambda a: a.gather(-1001), IndexError, "rows is -1001"),
    "window": (lambda a: a.windows([0, 991], 10), IndexError, r"starts\[1\] is 991"),
    "wrapped": (lambda a: a.windows([-1], 1), IndexError, r"starts\[0\] is -1"),
    "length": (lambda a: a.windows([0], 1001), ValueError, "length is 1001"),
    "mask": (lambda a: a.gather([True]), TypeError, "rows is of dtype bool"),
    "size": (lambda a: a.gather([0], np.empty(99, "f4")), ValueError, "out has 396 by"),
    "dtype": (
        lambda a: a.gather([0], np.empty(100, "i4")),
        TypeError,
        "out is of dtype",
    ),
    "bytes": (
        lambda a: a.gather([0], bytearray(400)),
        TypeError,
        "out is of type bytea",
    ),
}


class TestRows:
    @pytest.mark.parametrize(
        "rows",
        [[], [0], 7, [999, 0, 500, 0, -1], [[1, 2], [3, 4]], np.arange(1000, dtype="u2")],
        ids=lambda rows: str(np.shape(rows)),
    )
    def test_rows_are_gathered(self, handle, saved, rows):
        expected, path = saved
        with ArrayFile(path, handle=handle) as array:
            wanted = np.take(expected, rows, axis=0)
            assert_same(np.asarray(array.gather(rows)), np.asarray(wanted))
            out = np.empty(wanted.shape, "f4")
            assert array.gather(rows, out) is out
            assert_same(out, np.asarray(wanted))
            assert_same(array.prefetch(rows).result(), expected[rows])

    def test_memory_of_any_strides_is_filled(self, saved):
        expected, path = saved
        with ArrayFile(path) as array:
            # Strides with which the records are apart, dense, and one.
            for index in ([900, 3], np.s_[::2, 0, 1], 5):
                wanted = expected[index]
                out = np.zeros((*wanted.shape, 2), "f4")
                assert array.prefetch(index, out[..., 1]).result().base is out
                assert_same(np.ascontiguousarray(out[..., 1]), wanted)
                assert not out[..., 0].any()

    def test_after_refuses_a_request_whose_result_python_makes(
        self, open_handle, saved, tmp_path
    ):
        """The bytes of such a result are in place only after somebody asks for it."""
        expected, path = saved
        handle = open_handle(**SLOW)
        with ArrayFile(path, handle=handle) as array, plugged(handle, tmp_path):
            dense = array.prefetch(np.s_[0, 0, ::2])
            with pytest.raises(TypeError, match="pass through Python"):
                array.prefetch(0, after=dense)
        assert_same(dense.result(), expected[0, 0, ::2])

    def test_a_result_made_by_python_can_be_awaited_and_called_back(self, saved):
        expected, path = saved
        indices = (np.s_[0, 0, ::2], (3, 2, 1), [1, 999], np.s_[::-1, 0, 5:7], slice(None))

        async def read_all(array):
            requests = [array.prefetch(index) for index in indices]
            return [await request for request in (*requests, *requests)]

        with ArrayFile(path) as array:
            for found, index in zip(asyncio.run(read_all(array)), indices * 2, strict=True):
                assert_same(found, expected[index])
            called = threading.Event()
            request = array.prefetch(np.s_[0, 0, ::2])
            request.add_done_callback(lambda _: called.set())
            assert called.wait(30)
            assert_same(request.result(), expected[0, 0, ::2])

    def test_a_failure_to_make_the_result_is_an_error(self, saved, monkeypatch):
        def fail(*_):
            raise MemoryError("no memory for the result")

        with ArrayFile(saved[1]) as array:
            monkeypatch.setattr(transfers, "memcpy", fail)
            request = array.prefetch(np.s_[0, 0, ::2])
            for _ in range(2):
                with pytest.raises(MemoryError, match="for the result"):
                    request.wait()

    def test_a_tensor_of_one_row_keeps_the_axis(self, saved):
        torch = pytest.importorskip("torch", reason="torch is not installed")
        expected, path = saved
        with ArrayFile(path) as array:
            for rows in (torch.tensor([5]), torch.tensor([[5]])):
                assert_same(array[rows], expected[rows.numpy()])
                assert_same(array.prefetch(rows).result(), array.gather(rows))

    @pytest.mark.parametrize("starts", [[], [0], 3, [990, 0, 5, 5], [[1], [2]]], ids=repr)
    @pytest.mark.parametrize("length", [0, 1, 10])
    def test_windows_are_gathered(self, handle, saved, starts, length):
        expected, path = saved
        places = np.array(starts, int)[..., None] + np.arange(length)
        wanted = expected[places]
        with ArrayFile(path, handle=handle) as array:
            assert_same(array.windows(starts, length), wanted)
            assert_same(array.prefetch_windows(starts, length).wait(), wanted)
            out, other = np.empty_like(wanted), np.empty_like(wanted)
            assert array.windows(starts, length, out=out) is out
            assert_same(out, wanted)
            assert array.prefetch_windows(starts, length, out=other).wait() is other
            assert_same(other, wanted)

    @pytest.mark.parametrize(
        ("call", "error", "words"), WRONG_ROWS.values(), ids=WRONG_ROWS
    )
    def test_rows_that_cannot_be_gathered_are_refused(self, saved, call, error, words):
        with ArrayFile(saved[1]) as array, pytest.raises(error, match=words):
            call(array)

    @pytest.mark.parametrize(
        "index", [999, np.s_[:], np.s_[500:, 0, ::2], [0, 999], np.s_[-1, 3, 24]], ids=repr
    )
    def test_a_truncated_file_is_an_error_for_every_index(self, path, index):
        # The calling thread reads one of these, workers the others.
        write_npy(path, numbers((1000, 4, 250)))
        with ArrayFile(path) as array:
            os.truncate(path, 1000)
            for call in (array.__getitem__, lambda index: array.prefetch(index).wait()):
                with pytest.raises(OSError, match="past the end") as caught:
                    call(index)
                assert (caught.value.errno, caught.value.filename) == (
                    errno.ENODATA,
                    str(path),
                )

    @pytest.mark.parametrize("way", ["gather", "prefetch", "windows", "prefetch_windows"])
    @pytest.mark.parametrize("held", [False, True])
    def test_cached_rows_come_from_the_page_cache(self, tmp_path, way, held):
        need_direct(tmp_path)
        expected = numbers((300, PAGE), "u1")
        # Far from the header, behind which the kernel reads ahead.
        path, rows = write_npy(tmp_path / "array.npy", expected), np.arange(99, 299, 7)
        wanted, more = expected[rows], ()
        if "windows" in way:
            wanted, more = np.stack([expected[row : row + 2] for row in rows]), (2,)
        found = []
        # Pages may enter or leave the cache at any moment.
        for _ in range(5):
            warm(path) if held else drop(path)
            with nvmeio.Handle() as handle, ArrayFile(path, handle=handle) as array:
                got = getattr(array, way)(rows, *more)
                assert_same(got.result() if "prefetch" in way else got, wanted)
                moved = routes(handle)
                found.append(moved["direct"] + moved["bounced"] == 0)
        assert held in found


class TestAssigning:
    @INVENTED
    @given(cases(), st.booleans())
    def test_an_assignment_leaves_what_numpy_leaves(self, tmp_path, case, whole):
        shape, index = case
        path = tmp_path / "array.npy"
        expected = numbers(shape, "i4")
        write_npy(path, expected)
        with contextlib.suppress(IndexError):
            taken = expected[index]
            # All values differ, which shows which one was written last.
            value = -1 - numbers(np.shape(taken), "f8") if whole else -1

        def assign(array):
            array[index] = value

        if outcome(lambda: expected[index]) is IndexError:
            value = -1
        before = expected.copy()
        with ArrayFile(path, mode="r+") as array:
            assert outcome(assign, array) == outcome(assign, expected)
            assert_same(array[...], expected)
            array[...] = before
            with contextlib.suppress(IndexError):
                assert array.submit_setitem(index, value).result() >= 0
        assert_same(np.load(path), expected)

    @pytest.mark.parametrize("index", TestIndexing.INDICES, ids=repr)
    def test_every_engine_writes_what_numpy_writes(self, handle, saved, index):
        expected, path = saved
        value = -numbers(np.shape(expected[index]), "f4")
        with ArrayFile(path, mode="r+", handle=handle) as array:
            array[index] = value
            found = array[...]
            array[...] = expected
            array.submit_setitem(index, value).wait()
        expected[index] = value
        assert_same(found, expected)
        assert_same(np.load(path), expected)

    @pytest.mark.parametrize("values", ["rows", "one", "number"])
    def test_rows_are_scattered(self, handle, saved, values):
        expected, path = saved
        rows = np.array([[900, 3], [3, -1], [0, 900]])
        taken = -numbers(expected[rows].shape, "f8")
        values = {"rows": taken, "one": taken[0, 0], "number": 7}[values]
        wanted = expected.copy()
        wanted[rows] = values
        with ArrayFile(path, mode="r+", handle=handle) as array:
            array.scatter(rows, values)
            assert_same(array[...], wanted)
            array[...] = expected
            # Rows that are named twice are written once.
            assert array.submit_scatter(rows, values).result() == 4 * 400
            array.scatter([], np.empty((0, 4, 25)))
            assert array.submit_scatter([], 0).result() == 0
        assert_same(np.load(path), wanted)

    def test_values_are_copied_only_where_they_must_be(self, open_handle, saved, tmp_path):
        expected, path = saved
        rows = np.arange(0, 1000, 100)
        values = -expected[rows]
        others = values.astype("f8")
        handle = open_handle(**SLOW)
        with ArrayFile(path, mode="r+", handle=handle) as array:
            with plugged(handle, tmp_path):
                requests = [
                    array.submit_scatter(rows, values),
                    array.submit_scatter(rows + 1, others),
                    array.submit_setitem([3, 3], values[:2]),
                ]
                # Changing the values meanwhile, which a program must not do, shows what was
                # not copied.
                values[...], others[...] = 9, 9
            for request in requests:
                request.wait()
            assert (array[rows] == 9).all()
            assert_same(array[rows + 1], -expected[rows])
            assert_same(array[3], -expected[100])

    def test_messages_name_what_must_be_done_first(self, handle, saved):
        _, path = saved
        rows = [7, 1]
        with ArrayFile(path, mode="r+", handle=handle) as array:
            first = array.submit_scatter(rows, -1)
            second = array.submit_setitem(7, -2, after=first)
            found = array.prefetch(rows, after=[first, second]).result()
            again = array.prefetch_windows([1], 1, after=second).result()
        assert (found[0] == -2).all()
        assert (found[1] == -1).all()
        assert (again == -1).all()

    def test_values_are_broadcast_and_converted(self, saved):
        expected, path = saved
        with ArrayFile(path, mode="r+") as array:
            for target in (array, expected):
                target[3:6] = range(25)
                target[[1, 2], 1] = np.arange(50, dtype="i8").reshape(1, 2, 25)
                target[:, 0, 0] = np.float64(0.1)
        assert_same(np.load(path), expected)

    def test_a_value_that_does_not_fit_changes_nothing(self, saved):
        expected, path = saved
        with ArrayFile(path, mode="r+") as array:
            with pytest.raises(
                ValueError, match=r"of shape \(7,\); .* broadcast to \(3, 4, 25\)"
            ):
                array[3:6] = np.zeros(7)
            with pytest.raises(IndexError):
                array[1000] = 0
        assert_same(np.load(path), expected)

    def test_a_file_is_written_only_in_mode_r_plus(self, saved):
        expected, path = saved
        with ArrayFile(path) as array, pytest.raises(ValueError, match="open read-only"):
            array[0] = 0
        with pytest.raises(ValueError, match="mode is 'w'; it must be one of r, r"):
            ArrayFile(path, mode="w")
        assert_same(np.load(path), expected)

    def test_threads_write_parts_of_the_same_rows(self, saved):
        expected, path = saved
        with ArrayFile(path, mode="r+") as array, ThreadPoolExecutor(4) as pool:

            def write(part):
                for row in range(0, 1000, 50):
                    array[row : row + 50, part] = -part

            list(pool.map(write, range(4)))
        expected[...] = -np.arange(4)[:, None]
        assert_same(np.load(path), expected)


class TestCreating:
    @pytest.mark.parametrize("shape", [(), 5, (0, 3), (300, 7)], ids=repr)
    def test_a_new_file_has_zeros_until_it_is_filled(self, path, shape):
        with ArrayFile.create(path, shape, "f4") as array:
            assert_same(array[...], np.zeros(shape, "f4"))
            expected = np.full(shape, 7, "f4")
            array[...] = expected
            assert_same(array[...], expected)
            array.flush()
        assert_same(np.load(path), expected)

    def test_the_data_begin_at_a_page(self, path, alignment):
        ArrayFile.create(path, (16, PAGE), "u1").close()
        assert np.load(path, mmap_mode="r").offset == PAGE
        with nvmeio.Handle() as handle:
            with ArrayFile(path, mode="r+", handle=handle) as array:
                array[3] = nvmeio.empty(PAGE, "u1")
            way = "bytes_direct" if alignment > 1 else "bytes_buffered"
            assert handle.stats()[way] == PAGE

    @pytest.mark.parametrize(
        ("dtype", "version"),
        [
            ("f4", (1, 0)),
            (RECORD, (1, 0)),
            ([("größe", "f4")], (1, 0)),
            ([("大", "f4")], (3, 0)),
        ],
        ids=str,
    )
    def test_the_header_has_the_oldest_sufficient_version(self, path, dtype, version):
        with ArrayFile.create(path, (3,), dtype) as array:
            assert array.dtype == np.dtype(dtype)
        with open(path, "rb") as file:
            assert npy.read_magic(file) == version
        assert_same(np.load(path), np.zeros(3, dtype))

    @pytest.mark.parametrize(
        ("fields", "align"), [(1, PAGE), (100, PAGE), (250, PAGE), (320, 64)]
    )
    def test_a_header_is_never_longer_than_numpy_reads(self, path, fields, align):
        dtype = np.dtype([(f"field number {number:03}", "f4") for number in range(fields)])
        ArrayFile.create(path, (3,), dtype).close()
        assert np.load(path, mmap_mode="r").offset % align == 0
        assert_same(np.load(path), np.zeros(3, dtype))

    def test_a_dtype_that_numpy_would_not_read_is_refused(self, path):
        dtype = np.dtype([(f"field{number}", "f4") for number in range(5000)])
        with pytest.raises(ValueError, match=r"5000 fields has .* reads at most 10000"):
            ArrayFile.create(path, (1,), dtype)
        assert not path.exists()

    @pytest.mark.parametrize("fields", [600, 5000])
    @pytest.mark.parametrize("letter", ["f", "\N{CYRILLIC SMALL LETTER EF}"])
    def test_save_writes_a_long_header_as_numpy_does(self, path, fields, letter):
        dtype = np.dtype([(f"{letter}ield{number}", "f4") for number in range(fields)])
        array = np.arange(2 * fields, dtype=np.float32).view(dtype)
        nvmeio.save(path, array)
        assert_same(np.load(path, max_header_size=1 << 20), array)
        with pytest.raises(ValueError, match="max_header_size"):
            nvmeio.load(path)

    def test_an_existing_file_is_replaced_only_with_overwrite(self, saved):
        expected, path = saved
        with pytest.raises(FileExistsError, match="; overwrite=True replaces") as caught:
            ArrayFile.create(path, (3,), "f4")
        assert caught.value.filename == str(path)
        assert_same(np.load(path), expected)
        ArrayFile.create(path, (3,), "f4", overwrite=True).close()
        assert_same(np.load(path), np.zeros(3, "f4"))

    def test_a_failed_create_leaves_no_file(self, path):
        with (
            limit(resource.RLIMIT_FSIZE, MIB),
            pytest.raises(OSError, match="data") as caught,
        ):
            ArrayFile.create(path, (MIB,), "f4")
        assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(path))
        assert not path.exists()
        with pytest.raises(ValueError, match="too many"):
            ArrayFile.create(path, (1 << 62,), "f8")
        with pytest.raises(TypeError, match="Python objects"):
            ArrayFile.create(path, (1,), object)
        with pytest.raises(TypeError, match="text of length 0"):
            ArrayFile.create(path, (1,), "S")
        with pytest.raises(TypeError, match="handle is of type int"):
            ArrayFile.create(path, (1,), "f4", handle=3)
        assert not path.exists()

    @pytest.mark.parametrize("raw", [False, True])
    def test_a_failed_create_with_overwrite_keeps_the_old_file(self, saved, raw):
        _, path = saved
        before = path.read_bytes()
        with (
            limit(resource.RLIMIT_FSIZE, MIB),
            pytest.raises(OSError, match="data") as caught,
        ):
            ArrayFile.create(path, (MIB,), "f4", raw=raw, overwrite=True)
        assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(path))
        assert path.read_bytes() == before
        ArrayFile.create(path, (2,), "f4", raw=raw, overwrite=True).close()
        with ArrayFile(path, dtype="f4") as array:
            assert_same(array[...], np.zeros(2, "f4"))

    @pytest.mark.parametrize("size", [0, 10, 9000])
    def test_a_header_that_fails_half_written_is_undone(self, path, size, monkeypatch):
        pwrite = os.pwrite

        def half(file, data, offset):
            patch.undo()
            pwrite(file, data[: len(data) // 2], offset)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        path.write_bytes(pattern(size))
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", half)
            with pytest.raises(OSError, match="Input/output error"):
                ArrayFile.create(path, (3000,), "f4", overwrite=True)
        assert path.read_bytes() == pattern(size)

    def test_a_raw_file_has_only_the_elements(self, path):
        with ArrayFile.create(path, (4, 3), ">i2", raw=True) as array:
            assert path.stat().st_size == array.nbytes == 24
            array[...] = numbers((4, 3))
            array[1] = -1
        expected = numbers((4, 3), ">i2")
        expected[1] = -1
        assert path.read_bytes() == expected.tobytes()
        with ArrayFile(path, dtype=">i2", shape=(-1, 3)) as array:
            assert_same(array[...], expected)
        with pytest.raises(ValueError, match="raw is 2"):
            ArrayFile.create(path, 3, "f4", raw=2, overwrite=True)

    def test_refused_arguments_truncate_no_file(self, saved):
        expected, path = saved
        with pytest.raises(TypeError, match="handle is of type int"):
            ArrayFile.create(path, (1,), "f4", overwrite=True, handle=3)
        for shape in ((1 << 62, 0), (1,) * 65):
            for raw in (False, True):
                with pytest.raises(ValueError, match=r"too large|dimension"):
                    ArrayFile.create(path, shape, "f8", overwrite=True, raw=raw)
                with pytest.raises(ValueError, match=r"too large|dimension"):
                    ArrayFile.create(f"{path}.new", shape, "f8", raw=raw)
        assert_same(np.load(path), expected)
        assert list(path.parent.iterdir()) == [path]

    @pytest.mark.parametrize("asynchronous", [False, True])
    def test_a_flush_makes_file_and_name_durable(self, path, monkeypatch, asynchronous):
        def flush(**options):
            if asynchronous:
                asyncio.run(nvmeio.aio.flush(array, **options))
            else:
                array.flush(**options)

        synced = []
        monkeypatch.setattr(
            os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        )
        handle = nvmeio.Handle()
        with handle, ArrayFile.create(path, (3,), "f4", handle=handle) as array:
            flush(sync=False)
            assert (handle.stats()["requests"], synced) == (0, [])
            flush()
            flush(sync=True)
            assert handle.stats()["requests"] == 2
        assert synced == [os.path.realpath(path.parent)]

    def test_an_array_larger_than_memory_is_built_in_parts(self, tmp_path):
        """The file is sparse: it has its full size at once, and few blocks on the disk."""
        path = tmp_path / "large.npy"
        with ArrayFile.create(path, (1 << 20, 1 << 20), "f4") as array:
            array[1 << 19, 5:8] = [1, 2, 3]
            assert array[1 << 19, 4:9].tolist() == [0, 1, 2, 3, 0]
            assert array[[0, -1], -1].tolist() == [0, 0]
        assert path.stat().st_blocks * 512 < MIB


REFUSED = {
    "text": (b"x" * 200, {}, "is not a .npy file: it is a text; with dtype="),
    "pointer": (POINTER, {}, "is not a .npy file: it is a Git LFS pointer"),
    "no npy": (b"\xff" * 200, {}, "is not a .npy file; with dtype= it is"),
    "archive": (b"PK\3\4" + bytes(100), {}, "inside an archive"),
    "empty": (b"", {}, "is not a .npy file"),
    "version": (b"\x93NUMPY\x09\x00" + bytes(100), {}, "is not a .npy file: .*9, 0"),
    "header": (b"\x93NUMPY\x01\x00\x40\x00{'descr'", {}, "not a .npy file: .*ends within"),
    "remainder": (bytes(10), {"dtype": "i4"}, "has 10 bytes; .* multiple of 4"),
    "offset": (bytes(10), {"dtype": "u1", "offset": 11}, "those after offset 11"),
    "shape": (bytes(10), {"dtype": "u1", "shape": 11}, "has 10 bytes; .* ends at 11"),
    "two": (bytes(10), {"dtype": "u1", "shape": (-1, -1)}, "only one extent may be -1"),
    "none": (bytes(10), {"dtype": "u1", "shape": (-1, 0)}, "only one extent may be -1"),
    "negative": (bytes(10), {"dtype": "u1", "shape": -2}, "no extent may be negative"),
    "before": (bytes(10), {"dtype": "u1", "offset": -1}, "offset is -1"),
    "subarray": (bytes(12), {"dtype": ("i4", 3)}, "has a shape; give it to the array"),
    "no unit": (bytes(16), {"dtype": "M8[0s]"}, "has a time unit of length 0"),
    "objects": (bytes(16), {"dtype": object}, "are Python objects"),
    "handle": (bytes(16), {"dtype": "u1", "handle": 3}, "it must be a Handle"),
}


class TestOpening:
    def test_raw_bytes_have_a_dtype_and_a_shape(self, path):
        expected = numbers((6, 4), "i2")
        path.write_bytes(b"head" + expected.tobytes())
        for shape in (
            24,
            -1,
            (6, 4),
            (-1, 4),
            (6, -1),
            (2, -1, 4),
            (6, 3),
            np.array([6, 4]),
        ):
            whole = np.frombuffer(expected.tobytes(), "i2")
            extents = tuple(np.atleast_1d(shape))
            wanted = (
                whole[: abs(math.prod(map(int, extents)))] if -1 not in extents else whole
            )
            with ArrayFile(path, dtype="i2", shape=shape, offset=4) as array:
                assert_same(array[...], wanted.reshape(shape))
        with ArrayFile(path, dtype=np.int16, offset=4) as array:
            assert_same(array[...], expected.ravel())
            assert (
                repr(array)
                == f"<nvmeio.ArrayFile '{path}' shape=(24,) dtype=int16 mode='r'>"
            )

    def test_an_array_reports_its_properties(self, saved):
        expected, path = saved
        array = ArrayFile(path)
        for name in ("shape", "dtype", "nbytes", "ndim", "size", "itemsize", "strides"):
            assert getattr(array, name) == getattr(expected, name)
        assert (array.path, array.mode, array.closed) == (str(path), "r", False)
        assert array.offset == np.load(path, mmap_mode="r").offset
        array.close()
        array.close()
        assert array.closed
        assert "closed" in repr(array)
        assert array.shape == expected.shape
        for call in (
            lambda: array[0],
            lambda: array[:0],
            lambda: array.gather([]),
            array.flush,
        ):
            with pytest.raises(ValueError, match="is closed"):
                call()
        assert left_open(path.parent) == []

    @pytest.mark.parametrize(("content", "options", "words"), REFUSED.values(), ids=REFUSED)
    def test_a_file_that_is_no_array_is_refused(self, path, content, options, words):
        path.write_bytes(content)
        with pytest.raises((TypeError, ValueError), match=words):
            ArrayFile(path, **options)
        assert left_open(path.parent) == []

    def test_a_npy_file_is_not_taken_for_raw_bytes(self, saved):
        expected, path = saved
        with pytest.raises(
            ValueError, match=r"a \.npy file of dtype float32; .* is int32.*128"
        ):
            ArrayFile(path, dtype="i4")
        with ArrayFile(path, dtype="f4") as array:
            assert_same(array[...], expected)
        for options in ({"shape": (3,)}, {"offset": 128}):
            with pytest.raises(ValueError, match=r"a \.npy file has it in its header"):
                ArrayFile(path, **options)
        with ArrayFile(path, dtype="f4", offset=128) as array:
            assert_same(array[...], expected.ravel())

    def test_objects_are_never_unpickled(self, path):
        write_npy(path, np.array([{}, None]))
        for call in (ArrayFile, nvmeio.load):
            with pytest.raises(ValueError, match=r"has Python objects .* left to numpy"):
                call(path)

    def test_fortran_order_is_refused_with_a_remedy(self, path):
        expected = np.asfortranarray(numbers((5, 3)))
        write_npy(path, expected)
        with pytest.raises(ValueError, match=r"Fortran order.* nvmeio.load\(\)"):
            ArrayFile(path)
        nvmeio.save(path, nvmeio.load(path))
        with ArrayFile(path) as array:
            np.testing.assert_array_equal(array[...], expected)

    def test_a_missing_file_is_named(self, path):
        for call in (ArrayFile, nvmeio.load):
            with pytest.raises(FileNotFoundError, match=str(path)):
                call(path)


class TestSharing:
    @pytest.mark.parametrize("passed", [False, True], ids=["default handle", "a handle"])
    def test_threads_index_one_array(self, saved, passed):
        expected, path = saved
        barrier = threading.Barrier(8)
        with contextlib.ExitStack() as stack:
            own = stack.enter_context(nvmeio.Handle()) if passed else None
            array = stack.enter_context(ArrayFile(path, handle=own))

            def read(seed):
                barrier.wait()
                generator = np.random.default_rng(seed)
                for _ in range(20):
                    rows = generator.integers(-1000, 1000, 50)
                    assert_same(array.gather(rows), expected[rows])
                    assert_same(array[rows[0]], expected[rows[0]])

            with ThreadPoolExecutor(8) as pool:
                list(pool.map(read, range(8)))
            array.close()
            assert own is None or not own.closed

    def test_an_array_can_be_pickled(self, saved, tmp_path):
        expected, path = saved
        with nvmeio.Handle(block_size=8192) as handle:
            with ArrayFile(path, mode="r+", handle=handle) as array:
                copy = pickle.loads(pickle.dumps(array))
            copy[3] = -1
            assert_same(copy[4], expected[4])
            assert (copy.mode, copy.shape) == ("r+", expected.shape)
            copy.close()
        raw = tmp_path / "raw"
        raw.write_bytes(expected.tobytes())
        array = ArrayFile(raw, dtype="f4", shape=(-1, 100), offset=400)
        assert_same(pickle.loads(pickle.dumps(array))[0], expected[1].ravel())

    def test_an_unpickled_array_finds_its_file_from_any_folder(self, saved, monkeypatch):
        expected, path = saved
        monkeypatch.chdir(path.parent)
        with ArrayFile(path.name) as array:
            monkeypatch.chdir("/")
            with pickle.loads(pickle.dumps(array)) as copy:
                assert_same(copy[4], expected[4])
        # A closed array is unpickled closed.
        assert pickle.loads(pickle.dumps(array)).closed

    def test_forked_children_index_an_array(self, saved):
        expected, path = saved
        with ArrayFile(path) as array:
            assert_same(array[3], expected[3])
            child = fork(lambda: assert_same(array[:], expected))
            assert_same(array[[5, 9]], expected[[5, 9]])
            assert os.waitpid(child, 0)[1] == 0

    def test_a_dropped_array_closes_its_file(self, saved):
        _, path = saved
        array = ArrayFile(path)
        assert array[0, 0, 0] == 0
        del array
        assert left_open(path.parent) == []


class TestTensors:
    torch = None

    @pytest.fixture(autouse=True)
    def _torch(self):
        TestTensors.torch = pytest.importorskip("torch", reason="torch is not installed")

    @pytest.mark.parametrize(
        "name", ["bfloat16", "float32", "complex32", "float8_e5m2", "bool"]
    )
    def test_a_dtype_of_torch_makes_tensors_of_results(self, path, name):
        torch, dtype = self.torch, getattr(self.torch, name)
        bits = torch.arange(60 * dtype.itemsize, dtype=torch.uint8).view(60, -1)
        if name == "bool":
            bits %= 2
        expected = bits.view(dtype).view(20, 3)
        nvmeio.write_file(expected, path)

        def same(one, other):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            return torch.equal(
                one.contiguous().view(-1).view(torch.uint8),
                other.contiguous().view(-1).view(torch.uint8),
            )

        with ArrayFile(path, dtype=dtype, shape=(-1, 3), mode="r+") as array:
            assert array.dtype is dtype
            assert same(array[...], expected)
            assert same(array[3], expected[3])
            assert same(array[3, 2], expected[3, 2])
            assert same(array[::-7, 1], expected[[19, 12, 5], 1])
            rows = torch.tensor([[1], [-1]])
            assert same(array.gather(rows), expected[rows])
            assert same(
                array.windows([4, 5], 2), torch.stack([expected[4:6], expected[5:7]])
            )
            assert same(array.prefetch([2]).result(), expected[[2]])
            out = torch.empty(2, 3, dtype=dtype)
            assert array.gather([7, 8], out=out) is out
            assert same(out, expected[7:9])
            copy = pickle.loads(pickle.dumps(array))
            assert same(copy[0], expected[0])
            array[[2, 4]] = expected[[0, 1]]
            assert same(array[[4, 2]], expected[[1, 0]])

    def test_values_are_converted_to_bfloat16(self, path):
        torch = self.torch
        path.write_bytes(bytes(24))
        with ArrayFile(path, dtype=torch.bfloat16, shape=(4, 3), mode="r+") as array:
            array[0] = 1.5
            array[1] = np.array([1, 2, 3])
            array[2:, 1] = torch.tensor([4.0, 5.0], requires_grad=True)
            found = array[...]
        expected = [[1.5, 1.5, 1.5], [1, 2, 3], [0, 4, 0], [0, 5, 0]]
        assert torch.equal(found, torch.tensor(expected, dtype=torch.bfloat16))

    @pytest.mark.parametrize("name", ["bfloat16", "float32"])
    @pytest.mark.filterwarnings("error")
    def test_arrays_that_torch_refuses_are_converted(self, path, name):
        torch, dtype = self.torch, getattr(self.torch, name)
        frozen = np.arange(3.0)
        frozen.flags.writeable = False
        with ArrayFile.create(path, (4, 3), dtype) as array:
            array[0] = np.arange(3)[::-1]
            array[1] = np.arange(3, dtype=">i2")
            array.scatter([2], frozen)
            array[3] = np.array(7, ">f8")
            array[3, :1] = np.array([8.0])[::-1]
            array.append(np.arange(3, dtype=">f4")[None, ::-1])
            found = array[...]
        expected = [[2, 1, 0], [0, 1, 2], [0, 1, 2], [8, 7, 7], [2, 1, 0]]
        assert torch.equal(found, torch.tensor(expected, dtype=dtype))

    def test_rows_of_a_npy_file_are_gathered_into_tensors(self, saved):
        torch, (expected, path) = self.torch, saved
        rows = torch.tensor([5, 999, 5])
        with ArrayFile(path) as array:
            out = torch.empty(3, 4, 25)
            assert array.gather(rows, out) is out
            np.testing.assert_array_equal(out, expected[rows])
            with pytest.raises(TypeError, match=r"out is of dtype torch\.int32"):
                array.gather(rows, out.int())
            assert isinstance(array[rows], np.ndarray)

    @pytest.mark.parametrize("name", ["bfloat16", "float32"])
    @pytest.mark.parametrize(
        "index",
        [
            np.s_[2],
            np.s_[::2],
            np.s_[:, ::-1],
            np.s_[[0, 1]],
            np.s_[:, [0, 2]],
            np.s_[None, 3:1:-1],
        ],
        ids=str,
    )
    def test_every_index_fills_a_tensor(self, path, index, name):
        dtype = getattr(self.torch, name)
        values = self.torch.arange(24).view(4, 6).to(dtype)
        with ArrayFile.create(path, (4, 6), dtype) as array:
            array[...] = values
            expected = array[index]
            out = self.torch.zeros(*expected.shape, 2, dtype=dtype)[..., 1]
            assert array.prefetch(index, out).result() is out
            assert self.torch.equal(out, expected)

    def test_a_field_fills_a_tensor(self, path):
        nvmeio.save(path, np.array([(1, 2), (3, 4)], "u1,f4"))
        out = self.torch.zeros(2)
        with ArrayFile(path) as array:
            assert array.prefetch("f1", out).result() is out
        assert out.tolist() == [2, 4]

    def test_tensors_are_saved(self, path):
        torch = self.torch
        for tensor in (
            torch.arange(12).view(3, 4).T,
            torch.tensor(2.5),
            torch.ones(3) * 1j,
        ):
            nvmeio.save(path, tensor)
            assert_same(
                np.load(path), np.ascontiguousarray(tensor.numpy()).reshape(tensor.shape)
            )
        path.unlink()
        with pytest.raises(TypeError, match=r"the dtype is torch\.bfloat16, which"):
            nvmeio.save(path, torch.ones(3, dtype=torch.bfloat16))
        assert not path.exists()

    @pytest.mark.parametrize("raw", [False, True], ids=["npy", "raw"])
    @pytest.mark.parametrize(
        "name", ["bfloat16", "float8_e4m3fn", "float16", "complex32", "int64"]
    )
    def test_a_file_is_created_with_any_dtype_of_torch(self, path, name, raw):
        torch, dtype = self.torch, getattr(self.torch, name)
        expected = torch.arange(12).view(4, 3).to(dtype)
        with ArrayFile.create(path, (4, 3), dtype, raw=raw) as array:
            assert array.dtype is dtype
            assert (array.itemsize, array.offset) == (dtype.itemsize, 0 if raw else PAGE)
            assert not array[...].view(torch.uint8).any()
            array[...] = expected
            with pickle.loads(pickle.dumps(array)) as copy:
                assert copy[2].dtype is dtype
        shape = (-1, 3) if raw else None
        with ArrayFile(path, dtype=dtype, shape=shape) as array:
            assert torch.equal(array[...].view(torch.uint8), expected.view(torch.uint8))
        if raw:
            assert path.stat().st_size == expected.nbytes
            return
        # numpy opens it, as plain bytes if it lacks the dtype.
        found = np.load(path)
        assert found.tobytes() == expected.view(torch.uint8).numpy().tobytes()
        if name in ("float16", "int64"):
            assert_same(found, expected.numpy())
        else:
            assert found.dtype == f"V{dtype.itemsize}"

    def test_a_file_of_an_ml_dtypes_array_is_opened(self, path):
        """numpy.save() writes this header for an array of ml_dtypes.bfloat16 (0.6.0)."""
        torch = self.torch
        text = "{'descr': '<V2', 'fortran_order': False, 'shape': (4, 3), }"
        header = npy.magic(1, 0) + (118).to_bytes(2, "little") + text.ljust(117).encode()
        expected = torch.arange(12, dtype=torch.bfloat16).view(4, 3)
        path.write_bytes(header + b"\n" + expected.view(torch.uint8).numpy().tobytes())
        with ArrayFile(path, dtype=torch.bfloat16, mode="r+") as array:
            assert torch.equal(array[...], expected)
            array.append([[1, 2, 3]])
        assert np.load(path).shape == (5, 3)
        with ArrayFile(path, dtype=torch.bfloat16) as array:
            assert array[3:].tolist() == [[9, 10, 11], [1, 2, 3]]

    def test_a_npy_file_of_another_dtype_is_refused(self, saved):
        torch, (expected, path) = self.torch, saved
        for dtype in (torch.float64, torch.bfloat16, torch.int32, np.float64, ">f4"):
            with pytest.raises(
                ValueError, match=r"npy file of dtype float32; .* passed is"
            ):
                ArrayFile(path, dtype=dtype)
        with ArrayFile(path, dtype=torch.float32) as array:
            assert torch.equal(array[[3, 5]], torch.from_numpy(expected[[3, 5]]))
        with ArrayFile(path, dtype=torch.float32, offset=128, shape=(-1, 100)) as array:
            assert torch.equal(array[3], torch.from_numpy(expected[3].ravel()))
