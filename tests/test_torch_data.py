"""Datasets return the rows of their files, in any process; streams read ahead."""

import base64
import contextlib
import copy
import errno
import io
import itertools
import json
import os
import pickle
import random
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

# Imported after the check, because the module needs torch.
from torch.utils.data import (  # noqa: E402
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler  # noqa: E402

import nvmeio  # noqa: E402
from children import run_child  # noqa: E402
from helpers import ENGINES, PAGE, descriptors_below, left_open, routes, warm  # noqa: E402
from nvmeio.torch import (  # noqa: E402
    ArrayDataset,
    BatchStream,
    RecordDataset,
    TokenDataset,
)
from nvmeio.torch.data import _tokens  # noqa: E402

COUNT = 103


@pytest.fixture
def rows():
    """The rows of the file."""
    return np.random.default_rng(0).random((COUNT, 5, 3), np.float32)


@pytest.fixture
def file(tmp_path, rows):
    """A file of rows."""
    nvmeio.save(tmp_path / "rows.npy", rows)
    return tmp_path / "rows.npy"


@pytest.fixture
def labels(tmp_path):
    """A file with one number for each row."""
    nvmeio.save(tmp_path / "labels.npy", np.arange(COUNT))
    return tmp_path / "labels.npy"


@pytest.fixture
def tokens(tmp_path):
    """A raw file of tokens, and the tokens."""
    values = np.random.default_rng(1).integers(0, 1 << 16, 500, np.uint16)
    values.tofile(tmp_path / "tokens")
    return tmp_path / "tokens", values


def batches_of(count, size=10, seed=0):
    """Return the indices of batches, in the same random order each time."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(count, generator=generator).tolist()
    return [order[begin : begin + size] for begin in range(0, count, size)]


def shards_of(folder, counts, stride=1):
    """Make shards of given lengths; return the dataset and its expected samples."""
    samples, paths = [], []
    for number, count in enumerate(counts):
        values = 1000 * (number % 60) + np.arange(count)
        paths.append(folder / f"{number}.npy")
        np.save(paths[-1], values.astype([np.uint16, np.int32][number % 2]))
        whole = torch.from_numpy(values)
        samples += [
            (whole[begin : begin + 7], whole[begin + 1 : begin + 8])
            for begin in range(0, count - 7, stride)
        ]
    return TokenDataset(paths, 7, stride=stride), samples


# Magic number, version and dtype in llm.c's headers.
LLM_C = [(20240520, 1, np.dtype("u2")), (20240801, 7, np.dtype("u4"))]


def write_llm_c(path, magic, version, values):
    """Write a shard as dev/data/data_common.py of llm.c does."""
    header = np.zeros(256, np.int32)
    header[:3] = magic, version, len(values)
    path.write_bytes(header.tobytes() + values.tobytes())


def assert_equal(found, expected):
    """Assert equality of batches or samples, in structure, types and values."""
    assert type(found) is type(expected)
    if isinstance(expected, (tuple, list)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    else:
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert torch.equal(found, expected)


class TestArrayDataset:
    def test_a_sample_is_a_row(self, file, rows):
        dataset = ArrayDataset(file)
        assert len(dataset) == COUNT
        for index in (0, 57, -1, np.int64(5), torch.tensor(7)):
            assert_equal(dataset[index], torch.from_numpy(rows[int(index)]))

    def test_several_arrays_make_tuples(self, file, labels, rows):
        memory = np.arange(COUNT, dtype=np.uint8)
        tensor = torch.arange(2 * COUNT).view(-1, 2)
        with nvmeio.ArrayFile(labels) as array:
            dataset = ArrayDataset(file, array, memory, tensor)
            expected = (
                torch.from_numpy(rows[9]),
                torch.tensor(9),
                torch.tensor(9, dtype=torch.uint8),
                torch.tensor([18, 19]),
            )
            assert_equal(dataset[9], expected)
            assert_equal(dataset.__getitems__([9, 9]), [expected, expected])
        with pytest.raises(ValueError, match="is closed"):
            dataset[0]

    def test_a_batch_is_one_gather(self, file, rows):
        with nvmeio.Handle() as handle:
            dataset = ArrayDataset(nvmeio.ArrayFile(file, handle=handle))
            found = dataset.__getitems__([5, 100, 5, -1])
            assert handle.stats()["requests"] == 1
        assert_equal(found, [torch.from_numpy(rows[row]) for row in (5, 100, 5, -1)])

    @pytest.mark.parametrize("way", ["loader", "stream"])
    def test_cached_samples_come_from_the_page_cache(self, tmp_path, way):
        rows = np.random.default_rng(0).integers(0, 256, (200, PAGE), np.uint8)
        rows.tofile(tmp_path / "rows")
        found = []
        # The kernel may drop a page at any moment.
        for _ in range(5):
            warm(tmp_path / "rows")
            with nvmeio.Handle() as handle:
                array = nvmeio.ArrayFile(
                    tmp_path / "rows", dtype="u1", shape=(-1, PAGE), handle=handle
                )
                dataset, batches = ArrayDataset(array), batches_of(200)
                if way == "loader":
                    loaded = DataLoader(dataset, batch_sampler=batches)
                else:
                    loaded = BatchStream(dataset, batches)
                for batch, indices in zip(loaded, batches, strict=True):
                    assert_equal(batch, torch.from_numpy(rows[indices]))
                found.append({way for way, nbytes in routes(handle).items() if nbytes})
        assert {"buffered"} in found

    def test_samples_are_views_of_one_tensor(self, file):
        samples = ArrayDataset(file).__getitems__([3, 1, 2])
        storages = {sample.untyped_storage().data_ptr() for sample in samples}
        assert len(storages) == 1
        addresses = [sample.data_ptr() for sample in samples]
        assert np.diff(addresses).tolist() == [60, 60]

    def test_bfloat16_comes_through_an_array_file(self, tmp_path):
        expected = torch.randn(20, 4).bfloat16()
        nvmeio.write_file(expected, tmp_path / "raw")
        array = nvmeio.ArrayFile(tmp_path / "raw", dtype=torch.bfloat16, shape=(-1, 4))
        dataset = ArrayDataset(array)
        assert_equal(dataset[3], expected[3])
        (batch,) = BatchStream(dataset, [[3, 1]])
        assert_equal(batch, expected[[3, 1]])

    def test_a_transform_makes_the_samples(self, file, labels, rows):
        dataset = ArrayDataset(file, labels, transform=lambda sample: sample[0].sum())
        assert_equal(dataset[4], torch.from_numpy(rows[4]).sum())
        assert_equal(dataset.__getitems__([4]), [torch.from_numpy(rows[4]).sum()])

    @pytest.mark.parametrize("index", [COUNT, -COUNT - 1, 10**30])
    def test_an_index_out_of_range_is_named(self, file, index):
        dataset = ArrayDataset(file)
        with pytest.raises(IndexError, match=f"index is {index}; it must be from -103 to"):
            dataset[index]
        with pytest.raises(IndexError, match=rf"index\[1\] is {index}"):
            dataset.__getitems__([0, index])
        with pytest.raises(IndexError, match=rf"index\[1\] is {index}"):
            dataset[[0, index]]
        with pytest.raises(TypeError, match=r"index is .*; it must be an integer; .*Sub"):
            dataset[0:5]

    @pytest.mark.parametrize("workers", [0, 1])
    def test_a_sampler_of_batches_gives_what_a_batch_sampler_gives(
        self, file, labels, workers
    ):
        for dataset in (ArrayDataset(file), ArrayDataset(file, labels)):
            batches = BatchSampler(SequentialSampler(dataset), 10, drop_last=False)
            whole = DataLoader(
                dataset, sampler=batches, batch_size=None, num_workers=workers
            )
            single = DataLoader(dataset, batch_sampler=batches)
            for found, expected in zip(whole, single, strict=True):
                assert_equal(found, expected)

    @pytest.mark.parametrize("indices", [3, torch.tensor(3), [[0, 1]]], ids=repr)
    def test_indices_of_a_batch_must_be_of_one_axis(self, file, tmp_path, indices):
        np.arange(100, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
        tokens = TokenDataset(tmp_path / "tokens.bin", 8, np.uint16)
        for dataset in (ArrayDataset(file), tokens):
            with pytest.raises(ValueError, match=r"shape \(.*\); .* must be of one axis"):
                dataset.__getitems__(indices)
        # A tensor of indices yields tensors of no axis.
        with pytest.raises(ValueError, match=r"index is of shape \(\); that of a batch"):
            next(iter(BatchStream(tokens, torch.arange(5))))

    @pytest.mark.parametrize("dtype", [[("x", "f4")], "M8[s]", ">f4", "U3", "f16"], ids=str)
    def test_dtypes_that_tensors_lack_are_refused(self, tmp_path, dtype):
        nvmeio.save(tmp_path / "array.npy", np.zeros(3, dtype))
        with pytest.raises(
            TypeError, match=r"array 0 '.*array.npy' is of dtype .* tensors do"
        ):
            ArrayDataset(tmp_path / "array.npy")

    @pytest.mark.parametrize("array", [np.array(1), torch.tensor(1)])
    def test_an_array_without_axes_is_refused(self, array):
        with pytest.raises(ValueError, match="array 1 has no axes"):
            ArrayDataset(np.arange(3), array)

    def test_a_masked_array_is_refused(self):
        with pytest.raises(TypeError, match="is masked, and its mask would be lost"):
            ArrayDataset(np.ma.masked_equal(np.arange(3), 1))

    @pytest.mark.parametrize("name", ["uint16", "uint32", "uint64", "bool", "complex64"])
    def test_every_common_dtype_is_accepted(self, tmp_path, name):
        array = np.arange(6).reshape(3, 2).astype(name)
        nvmeio.save(tmp_path / "array.npy", array)
        dataset = ArrayDataset(tmp_path / "array.npy")
        assert_equal(dataset[1], torch.from_numpy(array[1]))

    def test_arrays_of_different_lengths_are_refused(self, file):
        with pytest.raises(ValueError, match=r"the arrays have \[103, 5\] rows"):
            ArrayDataset(file, np.zeros(5))
        with pytest.raises(TypeError, match="at least one array"):
            ArrayDataset()
        with pytest.raises(TypeError, match="array 0 is of type int; it must be a path"):
            ArrayDataset(3)
        with pytest.raises(FileNotFoundError, match="missing"):
            ArrayDataset(file.parent / "missing")


class TestTokenDataset:
    @pytest.mark.parametrize("dtype", [np.uint16, torch.uint16, "u2"], ids=repr)
    def test_a_sample_is_a_window_and_the_next_tokens(self, tokens, dtype):
        path, values = tokens
        dataset = TokenDataset(path, 16, dtype, stride=1)
        assert len(dataset) == 500 - 16
        whole = torch.from_numpy(values.astype(np.int64))
        for index in (0, 77, 483, -1):
            start = index % 484
            expected = (whole[start : start + 16], whole[start + 1 : start + 17])
            assert_equal(dataset[index], expected)
            assert_equal(dataset.__getitems__([5, index])[1], expected)

    @pytest.mark.parametrize("stride", [None, 3, 16, 700])
    def test_windows_start_a_stride_apart(self, tokens, stride):
        path, values = tokens
        dataset = TokenDataset(path, 16, np.uint16, stride=stride)
        whole = torch.from_numpy(values.astype(np.int64))
        starts = range(0, 500 - 16, stride or 16)
        expected = [(whole[at : at + 16], whole[at + 1 : at + 17]) for at in starts]
        assert_equal([dataset[index] for index in range(len(dataset))], expected)
        assert dataset.stride == (stride or 16)

    @pytest.mark.parametrize("stride", [3, 10])
    def test_each_shard_begins_with_a_window(self, tmp_path, stride):
        dataset, expected = shards_of(tmp_path, [20, 3, 0, 38, 7, 8], stride)
        assert_equal(dataset.__getitems__(range(len(dataset))), expected)
        order = batches_of(len(dataset), 3)
        stream = BatchStream(dataset, order)
        next(iter(stream))
        again = BatchStream(dataset, order)
        again.load_state_dict(stream.state_dict())
        rest = [default_collate([expected[index] for index in one]) for one in order[1:]]
        assert_equal(list(again), rest)

    def test_the_halves_share_no_memory(self, tmp_path):
        nvmeio.save(tmp_path / "tokens.npy", np.arange(50))
        x, y = TokenDataset(tmp_path / "tokens.npy", 4, stride=1)[3]
        x.zero_()
        assert y.tolist() == [4, 5, 6, 7]

    @pytest.mark.parametrize("count", [0, 1, 16])
    def test_a_file_shorter_than_a_window_is_empty(self, tmp_path, count):
        np.arange(count, dtype=np.uint8).tofile(tmp_path / "tokens")
        dataset = TokenDataset(tmp_path / "tokens", 16, np.uint8)
        assert len(dataset) == 0
        words = f"empty: block_size 16 needs 17 tokens, and '.*tokens' has {count}$"
        with pytest.raises(IndexError, match=words):
            dataset[0]
        with pytest.raises(IndexError, match=words):
            next(iter(BatchStream(dataset, [[0]])))
        assert list(DataLoader(dataset)) == []
        assert dataset.__getitems__([]) == []

    def test_shards_follow_each_other_and_no_window_crosses_them(self, tmp_path):
        dataset, expected = shards_of(tmp_path, [20, 3, 0, 40, 7, 8])
        assert len(dataset) == len(expected) == 13 + 33 + 1
        assert_equal(
            [dataset[index] for index in range(-1, 46)], expected[-1:] + expected[:-1]
        )
        for batch in batches_of(len(dataset)):
            assert_equal(dataset.__getitems__(batch), [expected[index] for index in batch])
        order = [46, 0, 12, 13, 45, 0, -1]
        (batch,) = BatchStream(dataset, [order])
        assert_equal(batch, default_collate([expected[index] for index in order]))

    def test_the_shards_of_a_batch_are_read_at_once(self, tmp_path):
        with nvmeio.Handle() as handle:
            shards_of(tmp_path, [30] * 4)
            dataset = TokenDataset(
                [
                    nvmeio.ArrayFile(tmp_path / f"{number}.npy", handle=handle)
                    for number in range(4)
                ],
                7,
                stride=1,
            )
            # Three of the four shards, in any distribution over the waiting threads.
            stream = iter(BatchStream(dataset, [[0, 50, 1, 91], [24]], 1))
            next(stream)
            assert handle.stats()["requests"] == 3 + 1
            stream.close()

    def test_an_array_file_has_its_own_dtype_and_offset(self, tokens):
        path, values = tokens
        expected = TokenDataset(path, 16, np.uint16, offset=200)
        assert len(expected) == 399 // 16
        np.testing.assert_array_equal(expected[5][0], values[180:196])
        for dtype in (np.uint16, torch.uint16):
            with nvmeio.ArrayFile(path, dtype=dtype, offset=200) as array:
                assert_equal(TokenDataset(array, 16)[7], expected[7])
                assert_equal(TokenDataset([array], 16)[-1], expected[-1])
                with pytest.raises(ValueError, match=r"offset 8; they are for paths"):
                    TokenDataset(array, 16, offset=8)

    @pytest.mark.parametrize(("magic", "version", "kind"), LLM_C)
    def test_shards_of_llm_c_are_recognized(self, tmp_path, magic, version, kind):
        values = np.random.default_rng(5).integers(0, 1 << 16, 90).astype(kind)
        write_llm_c(tmp_path / "shard.bin", magic, version, values)
        values.tofile(tmp_path / "raw")
        expected = TokenDataset(tmp_path / "raw", 16, kind)
        path = tmp_path / "shard.bin"
        for dataset in (
            TokenDataset(path, 16),
            TokenDataset(path, 16, kind),
            TokenDataset(path, 16, kind, offset=1024),
            pickle.loads(pickle.dumps(TokenDataset([path], 16))),
        ):
            assert len(dataset) == len(expected)
            assert_equal(dataset[4], expected[4])
        # Half of the header is no valid offset.
        count = 90 + 512 // kind.itemsize
        assert len(TokenDataset(path, 16, kind, offset=512)) == (count - 1) // 16

    def test_a_header_that_disagrees_is_refused(self, tmp_path):
        path = tmp_path / "shard.bin"
        write_llm_c(path, 20240520, 1, np.arange(90, dtype=np.uint16))
        for offset in (0, 1024):
            with pytest.raises(
                ValueError, match=r"dtype is int32; the header .* says uint16"
            ):
                TokenDataset(path, 16, np.int32, offset=offset)
        os.truncate(path, 1024 + 178)
        words = "has 1202 bytes; its header says 90 tokens, which are 1204 bytes"
        for options in ({}, {"dtype": np.uint16}, {"dtype": np.uint16, "offset": 1024}):
            with pytest.raises(ValueError, match=words):
                TokenDataset(path, 16, **options)
        write_llm_c(path, 20240520, 2, np.arange(90, dtype=np.uint16))
        with pytest.raises(ValueError, match="of version 2; it must be 1"):
            TokenDataset(path, 16, np.uint16)
        with nvmeio.ArrayFile(path, dtype=np.uint16, offset=1024) as array:
            assert len(TokenDataset(array, 16)) == 89 // 16

    def test_a_shard_that_is_replaced_while_it_is_opened_is_refused(
        self, tmp_path, monkeypatch
    ):
        path, other = tmp_path / "shard.bin", tmp_path / "other.bin"
        write_llm_c(path, 20240520, 1, np.arange(100, dtype=np.uint16))
        write_llm_c(other, 20240801, 7, np.arange(50, dtype=np.uint32))

        class Replacing(nvmeio.ArrayFile):
            def __init__(self, *args, **options):
                os.replace(other, path)
                super().__init__(*args, **options)

        monkeypatch.setattr(_tokens, "ArrayFile", Replacing)
        with pytest.raises(OSError, match=r"replaced while it was opened.*shard\.bin"):
            TokenDataset(path, 5)

    def test_a_loader_returns_every_window_of_shards(self, tmp_path):
        dataset, expected = shards_of(tmp_path, [20, 3, 40])
        loader = DataLoader(dataset, 9, num_workers=2)
        x, y = map(torch.cat, zip(*loader, strict=True))
        assert_equal([x, y], default_collate(expected))

    def test_shards_that_are_all_too_short_are_empty(self, tmp_path):
        dataset, _ = shards_of(tmp_path, [3, 7, 0, 2])
        words = r"needs 8 tokens, and '.*0.npy', .* and 1 more have 7 at most"
        with pytest.raises(IndexError, match=words):
            dataset[0]
        assert dataset.__getitems__([]) == []
        assert "shape=(0, 7)" in repr(dataset)

    @pytest.mark.parametrize("kind", ["uint64", "int8", "int64"])
    def test_tokens_of_any_integers_become_int64(self, tmp_path, kind):
        nvmeio.save(tmp_path / "tokens.npy", np.arange(100).astype(kind))
        x, y = TokenDataset(tmp_path / "tokens.npy", 4, stride=1)[60]
        assert (x.tolist(), y.tolist()) == ([60, 61, 62, 63], [61, 62, 63, 64])
        assert x.dtype == y.dtype == torch.int64

    def test_arrays_that_are_no_tokens_are_refused(self, tmp_path, file):
        with pytest.raises(ValueError, match=r"of shape \(103, 5, 3\); they need one axis"):
            TokenDataset(file, 16)
        nvmeio.save(tmp_path / "floats.npy", np.zeros(50))
        with pytest.raises(TypeError, match="of dtype float64, not of integers"):
            TokenDataset(tmp_path / "floats.npy", 16)
        with pytest.raises(ValueError, match="block_size is 0"):
            TokenDataset(tmp_path / "floats.npy", 0)
        with pytest.raises(ValueError, match="stride is 0; it must be from 1"):
            TokenDataset(file, 16, stride=0)
        with pytest.raises(ValueError, match="paths is empty"):
            TokenDataset([], 16)
        with pytest.raises(TypeError, match="path is 3; it must be"):
            TokenDataset([3], 16)
        with pytest.raises(TypeError, match="paths is 3; it must be a path, an ArrayFile"):
            TokenDataset(3, 16)
        with pytest.raises(FileNotFoundError, match="missing"):
            TokenDataset(tmp_path / "missing", 16)


class TestDescription:
    """Properties of a dataset, and closing."""

    def test_shape_and_dtype_describe_all_samples(self, file, labels, tokens):
        one, two = ArrayDataset(file), ArrayDataset(file, labels)
        assert (one.shape, one.dtype) == ((COUNT, 5, 3), torch.float32)
        assert two.shape == ((COUNT, 5, 3), (COUNT,))
        assert two.dtype == (torch.float32, torch.int64)
        windows = TokenDataset(tokens[0], 16, np.uint16, stride=1)
        assert (windows.shape, windows.dtype) == ((484, 16), torch.int64)

    def test_the_dtype_of_tensors_is_torchs(self, tmp_path):
        nvmeio.write_file(torch.zeros(8).bfloat16(), tmp_path / "raw")
        with nvmeio.ArrayFile(tmp_path / "raw", dtype=torch.bfloat16) as array:
            dataset = ArrayDataset(array, torch.zeros(8, dtype=torch.uint8))
            assert dataset.dtype == (torch.bfloat16, torch.uint8)
            assert dataset.paths == (str(tmp_path / "raw"),)

    def test_repr_has_files_shape_and_dtype(self, file, labels, tokens):
        assert repr(ArrayDataset(file)) == (
            f"<nvmeio.torch.ArrayDataset {str(file)!r} shape=(103, 5, 3) "
            "dtype=torch.float32>"
        )
        assert repr(TokenDataset(tokens[0], 16, np.uint16, stride=1)) == (
            f"<nvmeio.torch.TokenDataset {str(tokens[0])!r} shape=(484, 16) "
            "dtype=torch.int64>"
        )
        with nvmeio.ArrayFile(labels) as array:
            many = ArrayDataset(array, np.zeros(COUNT), torch.ones(COUNT), file, file)
            names = f"{str(labels)!r}, numpy.ndarray, torch.Tensor and 2 more shape="
            assert names in repr(many)

    def test_an_empty_dataset_says_so_in_its_error(self, tmp_path):
        nvmeio.save(tmp_path / "rows.npy", np.zeros((0, 3)))
        dataset = ArrayDataset(tmp_path / "rows.npy")
        assert "shape=(0, 3)" in repr(dataset)
        assert dataset.__getitems__([]) == []
        with pytest.raises(
            IndexError, match=r"dataset is empty: no samples in '.*rows\.npy"
        ):
            dataset[0]

    @pytest.mark.parametrize("kind", ["array", "tokens"])
    def test_a_closed_dataset_is_refused(self, labels, kind):
        with (
            ArrayDataset(labels) if kind == "array" else TokenDataset(labels, 4) as dataset
        ):
            assert not dataset.closed
            dataset[0]
        assert dataset.closed
        assert left_open(labels.parent) == []
        assert repr(dataset).endswith(" dtype=torch.int64 closed>")
        dataset.close()
        assert len(dataset) == dataset.shape[0]
        for use in (lambda one: one[0], lambda one: one.__getitems__([0])):
            with pytest.raises(ValueError, match=r"the dataset of '.*' is closed"):
                use(dataset)
        copy = pickle.loads(pickle.dumps(dataset))
        assert copy.closed

    def test_arrays_that_were_passed_open_stay_open(self, file, labels):
        with nvmeio.ArrayFile(labels) as array:
            dataset = ArrayDataset(file, array)
            dataset.close()
            assert set(descriptors_below(file.parent)) == {str(labels)}
            assert array[3] == 3

    def test_copies_stay_open(self, labels):
        dataset = ArrayDataset(labels)
        copy = pickle.loads(pickle.dumps(dataset))
        dataset.close()
        assert copy[5] == 5

    def test_running_workers_are_not_closed(self, labels):
        dataset = ArrayDataset(labels)
        batches = iter(DataLoader(dataset, 10, num_workers=2))
        first = next(batches)
        dataset.close()
        assert torch.cat([first, *batches]).tolist() == list(range(COUNT))


class TestProcesses:
    def test_a_copy_opens_its_files_on_demand(self, file, labels, rows):
        dataset = ArrayDataset(file, labels)
        before = descriptors_below(file.parent)
        copy = pickle.loads(pickle.dumps(dataset))
        assert descriptors_below(file.parent) == before
        assert_equal(copy[3], dataset[3])
        assert len(descriptors_below(file.parent)) == 2 * len(before)
        del copy, dataset
        assert left_open(file.parent) == []

    def test_a_copy_is_found_from_any_folder(self, file, monkeypatch):
        monkeypatch.chdir(file.parent)
        dataset = ArrayDataset(file.name)
        monkeypatch.chdir("/")
        assert_equal(pickle.loads(pickle.dumps(dataset))[3], dataset[3])

    def test_a_worker_refuses_a_file_that_was_replaced(self, labels):
        dataset = TokenDataset(labels, 5)
        loader = DataLoader(dataset, 10, num_workers=1, multiprocessing_context="spawn")
        expected = list(loader)
        nvmeio.save(labels, -np.arange(COUNT))
        with pytest.raises(OSError, match=r"was replaced .*labels\.npy"):
            list(loader)
        # This process has the old file open.
        assert_equal(list(DataLoader(dataset, 10)), expected)

    @pytest.mark.parametrize("way", ["r", "c"])
    def test_a_memory_map_is_mapped_again_in_workers(self, file, rows, way):
        mapped = np.load(file, mmap_mode=way)
        dataset = ArrayDataset(mapped[3:])
        state = pickle.dumps(dataset)
        # What was written to a private mapping is not in the file.
        assert (len(state) < 3000) == (way == "r")
        assert_equal(pickle.loads(state)[5], torch.from_numpy(rows[8]))
        loader = DataLoader(dataset, 10, num_workers=1, multiprocessing_context="spawn")
        assert_equal(next(iter(loader)), torch.from_numpy(rows[3:13]))
        nvmeio.save(file, -rows)
        for pickled in (state, pickle.dumps(dataset)):
            copy = pickle.loads(pickled)
            if way == "r":
                with pytest.raises(OSError, match=r"replaced or changed .*rows\.npy") as no:
                    copy[5]
                assert no.value.errno == errno.ESTALE
            else:
                assert_equal(copy[5], torch.from_numpy(rows[8]))
        assert_equal(dataset[5], torch.from_numpy(rows[8]))

    @pytest.mark.parametrize("kind", ["map", "array file"])
    @pytest.mark.parametrize("method", ["fork", "spawn"])
    def test_a_worker_names_a_source_that_was_replaced(self, file, rows, kind, method):
        source = np.load(file, mmap_mode="r") if kind == "map" else nvmeio.ArrayFile(file)
        dataset = ArrayDataset(source)
        expected = dataset[5]
        nvmeio.save(file, -rows)
        loader = DataLoader(dataset, 10, num_workers=1, multiprocessing_context=method)
        with pytest.raises(OSError, match=r"Errno 116. .*replaced or changed .*rows\.npy"):
            next(iter(loader))
        assert_equal(dataset[5], expected)

    def test_a_map_of_a_file_that_was_replaced_is_copied(self, file, rows):
        """It was mapped, and replaced before the dataset was made."""
        mapped = np.load(file, mmap_mode="r")
        nvmeio.save(file, -rows)
        dataset = ArrayDataset(mapped)
        for one in (dataset, pickle.loads(pickle.dumps(dataset))):
            assert_equal(one[5], torch.from_numpy(rows[5]))

    def test_a_map_that_reaches_past_the_end_of_its_file_is_refused(self, file):
        mapped = np.load(file, mmap_mode="r")
        os.truncate(file, 4096)
        words = r"was truncated since it was mapped: it has 4096 bytes.*rows\.npy"
        with pytest.raises(OSError, match=words) as caught:
            ArrayDataset(mapped)
        assert caught.value.errno == errno.ESTALE

    def test_a_copy_refuses_other_elements(self, labels):
        pickled = pickle.dumps(ArrayDataset(labels))
        for other in (np.zeros(COUNT, np.float32), np.zeros((COUNT, 2), np.int64)):
            nvmeio.save(labels, other)
            with pytest.raises(OSError, match="was replaced") as caught:
                pickle.loads(pickled)[0]
            assert caught.value.errno == errno.ESTALE

    @pytest.mark.parametrize(
        "content", [b"", b"<html>", None], ids=["empty", "html", "cut"]
    )
    def test_a_copy_refuses_what_is_no_such_file(self, file, content):
        """With the same error as another array, which says that the file has changed."""
        pickled = pickle.dumps(ArrayDataset(file))
        if content is None:
            os.truncate(file, 1000)
        else:
            nvmeio.write_file(content, file)
        with pytest.raises(OSError, match=r"was replaced or changed .*rows\.npy") as caught:
            pickle.loads(pickled)[0]
        assert caught.value.errno == errno.ESTALE

    def test_threads_share_a_dataset(self, file, rows):
        dataset = pickle.loads(pickle.dumps(ArrayDataset(file)))
        barrier = threading.Barrier(6)

        def read(seed):
            barrier.wait()
            for batch in batches_of(COUNT, 10, seed):
                expected = torch.from_numpy(rows[batch])
                assert_equal(torch.stack(dataset.__getitems__(batch)), expected)

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(read, range(6)))

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("method", "engine"),
        [
            *(("fork", engine) for engine in ENGINES),
            # Spawned workers inherit nothing of their parent's engine.
            ("spawn", "auto"),
        ],
    )
    def test_workers_read_every_row_once_an_epoch(self, tmp_path, method, engine):
        # Spawned workers are slow to start.
        workers = 4 if method == "fork" else 2
        outcome = run_child(
            "load_with_workers",
            folder=str(tmp_path),
            method=method,
            engine=engine,
            workers=workers,
        )
        assert outcome.status == 0, outcome
        (report,) = outcome.reports
        assert engine in (report["engine"], "auto")
        assert report["readers"] == workers
        assert report["open_there"] == [report["open_here"]]
        assert report["left_open"] == []


DATASETS = {
    "one array": lambda file, labels: ArrayDataset(file),
    "numbers": lambda file, labels: ArrayDataset(labels),
    "two arrays": lambda file, labels: ArrayDataset(file, labels),
    "file and memory": lambda file, labels: ArrayDataset(file, np.arange(COUNT)),
    "transformed": lambda file, labels: ArrayDataset(file, labels, transform=doubled),
    "tokens": lambda file, labels: TokenDataset(labels, 4, stride=1),
    "subset": lambda file, labels: Subset(
        Subset(ArrayDataset(file, labels), range(90, 0, -1)), range(50)
    ),
}


def doubled(sample):
    """Transform a sample."""
    return {"twice": sample[0] * 2, "number": int(sample[1])}


class TestBatchStream:
    def test_a_stream_keeps_no_batch_that_the_loop_has_freed(self, file, labels):
        seen = []

        def batches():
            for number in range(6):
                # The batch before is freed when the stream reads ahead again.
                assert [one for one in seen if one() is not None] == []
                yield [number]

        for batch in BatchStream(ArrayDataset(file, labels), batches(), 2):
            seen += map(weakref.ref, batch)
            del batch
        assert len(seen) == 12

    @pytest.mark.parametrize("make", DATASETS.values(), ids=DATASETS)
    @pytest.mark.parametrize("depth", [1, 2, 50])
    def test_a_stream_returns_what_a_loader_returns(self, file, labels, make, depth):
        dataset = make(file, labels)
        batches = batches_of(len(dataset))
        stream = BatchStream(dataset, batches, depth)
        assert len(stream) == len(batches)
        expected = list(DataLoader(dataset, batch_sampler=batches))
        for _ in range(2):
            found = list(stream)
            assert len(found) == len(expected)
            for one, other in zip(found, expected, strict=True):
                if isinstance(other, dict):
                    one, other = list(one.items()), list(other.items())
                    assert [key for key, _ in one] == [key for key, _ in other]
                    one, other = [value for _, value in one], [value for _, value in other]
                assert_equal(one, other)

    def test_the_next_batches_are_read_ahead(self, file):
        with nvmeio.Handle() as handle:
            dataset = ArrayDataset(nvmeio.ArrayFile(file, handle=handle))
            begun = []
            for taken, _ in enumerate(BatchStream(dataset, batches_of(COUNT), 3), 1):
                begun.append(handle.stats()["requests"] - taken)
        assert begun == [3] * 8 + [2, 1, 0]

    def test_an_error_is_raised_with_its_batch(self, file, rows):
        dataset = ArrayDataset(file)
        stream = iter(BatchStream(dataset, [[0, 1], [2], [3, 200], [4]], 3))
        assert_equal(next(stream), torch.from_numpy(rows[:2]))
        assert_equal(next(stream), torch.from_numpy(rows[2:3]))
        with pytest.raises(IndexError, match=r"index\[1\] is 200"):
            next(stream)
        assert list(stream) == []

    def test_an_error_of_the_sampler_is_raised_in_place_of_its_batch(self, file):
        def batches():
            yield [0]
            yield [1]
            raise RuntimeError("the sampler is out of order")

        stream = iter(BatchStream(ArrayDataset(file), batches(), 2))
        assert (len(next(stream)), len(next(stream))) == (1, 1)
        with pytest.raises(RuntimeError, match="out of order"):
            next(stream)

    def test_a_stop_iteration_of_indices_does_not_end_the_epoch(self, labels):
        class Broken(list):
            def __getitem__(self, index):
                return 0 if index < 2 else next(iter(()))

        part = Subset(ArrayDataset(labels), Broken(range(10)))
        batches = iter(BatchStream(part, [[0], [1], [2], [3]]))
        assert [next(batches).tolist() for _ in range(2)] == [[0], [0]]
        with pytest.raises(RuntimeError, match="StopIteration"):
            next(batches)

    def test_an_error_of_the_disk_is_raised_with_its_batch(self, file, labels):
        """An error of the second array, while the first one's rows are being read."""
        dataset = ArrayDataset(file, labels)
        os.truncate(labels, 4096 + 8 * 50)
        stream = iter(BatchStream(dataset, [[0], [60], [1]], 2))
        assert next(stream)[1].tolist() == [0]
        with pytest.raises(OSError, match=r"past the end of .*labels\.npy"):
            next(stream)
        del stream, dataset
        assert left_open(file.parent) == []

    @pytest.mark.parametrize("end", ["close", "drop", "raise"])
    def test_an_abandoned_iteration_leaves_nothing_in_flight(self, file, end):
        with nvmeio.Handle() as handle:
            dataset = ArrayDataset(nvmeio.ArrayFile(file, handle=handle))
            stream = iter(BatchStream(dataset, batches_of(COUNT), 5))
            next(stream)
            if end == "close":
                stream.close()
            elif end == "raise":
                with pytest.raises(KeyError):
                    stream.throw(KeyError())
            del stream
            assert handle.pending == 0
            assert len(dataset.__getitems__([0])) == 1
        dataset = None
        assert left_open(file.parent) == []

    def test_a_forked_child_drops_the_iteration_of_its_parent(self, labels):
        stream = iter(BatchStream(ArrayDataset(labels), batches_of(COUNT)))
        expected = next(stream).tolist()
        child = os.fork()
        if child == 0:
            status = 1
            with contextlib.suppress(BaseException):
                stream.close()
                status = 0
            os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        expected += itertools.chain.from_iterable(batch.tolist() for batch in stream)
        assert sorted(expected) == list(range(COUNT))

    def test_invalid_datasets_and_samplers_are_refused(self, file):
        dataset = ArrayDataset(file)
        with pytest.raises(TypeError, match="of type list; a stream reads"):
            BatchStream([1, 2], [[0]])
        with pytest.raises(ValueError, match="depth is 0"):
            BatchStream(dataset, [[0]], 0)
        with pytest.raises(TypeError, match="the batch sampler is 32; it must be iterable"):
            BatchStream(dataset, 32)
        with pytest.raises(TypeError, match="gave 0, not the indices of a batch"):
            next(iter(BatchStream(dataset, SequentialSampler(dataset))))
        with pytest.raises(TypeError, match="no length"):
            len(BatchStream(dataset, iter([[0]])))

    def test_a_subclass_with_its_own_getitem_is_refused(self, labels):
        with pytest.raises(TypeError, match="Doubled has a __getitem__ of its own"):

            class Doubled(ArrayDataset):
                def __getitem__(self, index):
                    return 2 * super().__getitem__(index)

        class Negative(ArrayDataset):
            def __getitem__(self, index):
                return -super().__getitem__(index)

            def __getitems__(self, indices):
                return [-sample for sample in super().__getitems__(indices)]

        class Part(Subset):
            def __getitem__(self, index):
                return -super().__getitem__(index)

            def __getitems__(self, indices):
                return [self[index] for index in indices]

        assert next(iter(DataLoader(Negative(labels), 3))).tolist() == [0, -1, -2]
        for dataset in (Negative(labels), Part(ArrayDataset(labels), range(5))):
            with pytest.raises(TypeError, match="which batches of a stream do not"):
                BatchStream(dataset, [[0]])

    def test_collate_fn_makes_the_batches_of_samples(self, file, labels):
        dataset = ArrayDataset(file, labels)

        def collate(samples):
            assert type(samples) is list
            return {number.item(): sample for sample, number in samples}

        (found,) = BatchStream(dataset, [[7, 3]], collate_fn=collate)
        assert list(found) == [7, 3]
        assert_equal(found[3], dataset[3][0])
        dataset.transform = doubled
        (found,) = BatchStream(dataset, [[7, 3]], collate_fn=list)
        assert [sample["number"] for sample in found] == [7, 3]
        with pytest.raises(TypeError, match="collate_fn is 3; it must be callable"):
            BatchStream(dataset, [[7, 3]], collate_fn=3)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
    def test_without_cuda_pin_memory_warns(self, labels):
        stream = BatchStream(ArrayDataset(labels), [[1]], pin_memory=True)
        with pytest.warns(UserWarning, match="there is no CUDA device"):
            assert [batch.tolist() for batch in stream] == [[1]]

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    def test_batches_are_pinned(self, file, labels):
        for dataset in (ArrayDataset(file, labels), TokenDataset(labels, 4)):
            batches = batches_of(len(dataset))
            pairs = zip(
                BatchStream(dataset, batches, pin_memory=True),
                BatchStream(dataset, batches),
                strict=True,
            )
            for found, expected in pairs:
                assert all(part.is_pinned() for part in found)
                assert_equal(found, expected)

    def test_a_custom_batch_pins_itself(self, labels, monkeypatch):
        """torch calls the method pin_memory() of such a batch."""

        class Batch:
            # Of a list, torch 2.9 would pin the items.
            def __init__(self, samples):
                self.samples = samples

            def pin_memory(self):
                return ("pinned", *self.samples)

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        dataset = ArrayDataset(labels)
        for pin_memory, kind in ((True, tuple), (False, Batch)):
            stream = BatchStream(dataset, [[1]], pin_memory=pin_memory, collate_fn=Batch)
            (found,) = stream
            assert type(found) is kind


class OwnState:
    """A batch sampler with its own state, which lasts across epochs."""

    def __init__(self, count):
        self.batches = batches_of(count)
        self.state = {"position": 0, "epoch": 0}

    def __iter__(self):
        while self.state["position"] < len(self.batches):
            self.state["position"] += 1
            yield self.batches[self.state["position"] - 1 - self.state["epoch"]]
        self.state["position"] = 0
        self.state["epoch"] += 1

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class Eager:
    """A batch sampler that draws all batches when an iteration begins."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter([part.tolist() for part in torch.randperm(self.count).split(10)])


def in_batches(sampler):
    """Return batches of a sampler's indices."""
    return BatchSampler(sampler, 10, False)


def seeded():
    """Return a generator that draws the same numbers in every process."""
    return torch.Generator().manual_seed(7)


# Functions that make the samplers again, as a program does when it restarts.
SAMPLERS = {
    "list": lambda data: batches_of(len(data)),
    "in order": lambda data: in_batches(SequentialSampler(data)),
    "seeded": lambda data: in_batches(RandomSampler(data, generator=seeded())),
    "global": lambda data: in_batches(RandomSampler(data)),
    "replacement": lambda data: in_batches(RandomSampler(data, replacement=True)),
    "many": lambda data: in_batches(RandomSampler(data, True, 250, generator=seeded())),
    "subset": lambda data: in_batches(SubsetRandomSampler(range(0, 103, 2))),
    "rank": lambda data: in_batches(DistributedSampler(data, 2, 1, seed=3)),
    "drop last": lambda data: BatchSampler(RandomSampler(data), 10, True),
    "eager": lambda data: Eager(len(data)),
    "own state": lambda data: OwnState(len(data)),
}


class Training:
    """A program that trains from a stream, and its saved state."""

    def __init__(self, labels, make, state=None):
        self.stream = BatchStream(ArrayDataset(labels), make(range(COUNT)))
        self.epoch = 0
        if state is not None:
            self.epoch = state["epoch"]
            torch.set_rng_state(state["rng_state"])
            self.stream.load_state_dict(state["stream"])

    def epochs(self, count):
        """Yield each batch with its epoch; the loop ends after the last one."""
        while self.epoch < count:
            inner = getattr(self.stream.batch_sampler, "sampler", None)
            if isinstance(inner, DistributedSampler):
                inner.set_epoch(self.epoch)
            for batch in self.stream:
                # Draws a random number, as a training step does.
                torch.rand(3)
                yield self.epoch, batch.tolist()
            self.epoch += 1

    def state(self):
        """Return the saved state, after a round trip through torch.save."""
        file = io.BytesIO()
        state = {
            "epoch": self.epoch,
            "rng_state": torch.get_rng_state(),
            "stream": self.stream.state_dict(),
        }
        torch.save(state, file)
        file.seek(0)
        return torch.load(file, weights_only=True)


class TestResume:
    @pytest.mark.parametrize("name", SAMPLERS)
    def test_every_batch_is_returned_once_in_the_same_order(self, labels, name):
        """A resume after any batch of two epochs, including the last of each."""
        make = SAMPLERS[name]
        torch.manual_seed(0)
        expected = list(Training(labels, make).epochs(3))
        torch.manual_seed(0)
        training = Training(labels, make)
        states = [(0, training.state())]
        for given, _ in enumerate(training.epochs(2), 1):
            states.append((given, training.state()))
        # The last batch was returned, and then the loop ended.
        states.append((given, training.state()))
        assert len(states) == len([1 for epoch, _ in expected if epoch < 2]) + 2
        for given, state in states:
            torch.manual_seed(100 + given)
            rest = list(Training(labels, make, state).epochs(3))
            assert rest == expected[given:], given

    @pytest.mark.parametrize("name", ["seeded", "eager", "own state"])
    def test_a_second_resume_continues_the_first(self, labels, name):
        make = SAMPLERS[name]
        torch.manual_seed(0)
        expected = list(Training(labels, make).epochs(3))
        torch.manual_seed(0)
        found, state = [], None
        while True:
            training = Training(labels, make, state)
            batches = training.epochs(3)
            taken = list(itertools.islice(batches, 4))
            if not taken:
                break
            found += taken
            state = training.state()
            torch.manual_seed(len(found))
        assert found == expected

    def test_global_random_numbers_need_not_be_restored_within_an_epoch(self, labels):
        make = SAMPLERS["global"]
        stream = BatchStream(ArrayDataset(labels), make(range(COUNT)))
        found = [batch.tolist() for batch in itertools.islice(stream, 4)]
        state = stream.state_dict()
        before = torch.manual_seed(1).get_state()
        stream = BatchStream(ArrayDataset(labels), make(range(COUNT)))
        stream.load_state_dict(state)
        found += [batch.tolist() for batch in stream]
        assert sorted(itertools.chain(*found)) == list(range(COUNT))
        assert torch.equal(torch.get_rng_state(), before)

    def test_batches_that_were_returned_before_are_not_read(self, file):
        with nvmeio.Handle() as handle:
            dataset = ArrayDataset(nvmeio.ArrayFile(file, handle=handle))
            stream = BatchStream(dataset, batches_of(COUNT))
            for _ in itertools.islice(stream, 8):
                pass
            state = stream.state_dict()
            stream = BatchStream(dataset, batches_of(COUNT))
            stream.load_state_dict(state)
            before = handle.stats()["requests"]
            assert len(list(stream)) == 3
            assert handle.stats()["requests"] == before + 3

    def test_a_state_is_small_and_plain(self, labels):
        dataset = ArrayDataset(labels)
        stream = BatchStream(dataset, SAMPLERS["seeded"](dataset))
        next(iter(stream))
        state = stream.state_dict()
        assert len(json.dumps(state)) < 20_000
        assert json.loads(json.dumps(state)) == state

    def test_a_state_with_tensors_of_random_numbers_is_loaded(self, labels):
        """As state_dict() returned it before."""
        dataset = ArrayDataset(labels)
        stream = BatchStream(dataset, SAMPLERS["seeded"](dataset))
        batches = iter(stream)
        next(batches)
        state = stream.state_dict()
        expected = [batch.tolist() for batch in batches]

        def tensor(text):
            return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)

        state["rng_state"] = tensor(state["rng_state"])
        state["generators"] = [tensor(each) for each in state["generators"]]
        again = BatchStream(dataset, SAMPLERS["seeded"](dataset))
        again.load_state_dict(state)
        assert [batch.tolist() for batch in again] == expected

    @pytest.mark.parametrize("kind", ["array", "in memory", "tokens", "records"])
    @pytest.mark.parametrize("sampler", ["list", "own state"])
    def test_a_state_of_other_data_is_refused(self, tmp_path, kind, sampler):
        """It must have as many samples in the same order; its files may be elsewhere."""

        def stream_of(folder, values):
            path = tmp_path / folder / "values.npy"
            path.parent.mkdir(exist_ok=True)
            nvmeio.save(path, values)
            end = path.stat().st_size
            dataset = {
                "array": lambda: ArrayDataset(path),
                "in memory": lambda: ArrayDataset(torch.from_numpy(values)),
                "tokens": lambda: TokenDataset(path, 1),
                "records": lambda: RecordDataset(path, range(end - 800, end, 8), [8] * 100),
            }[kind]()
            return BatchStream(dataset, SAMPLERS[sampler](range(99)))

        values = np.random.default_rng(0).permutation(1000)[:100]
        first = stream_of("first", values)
        assert len(list(itertools.islice(first, 4))) == 4
        state = first.state_dict()
        moved = stream_of("moved", values)
        moved.load_state_dict(state)
        assert len(list(moved)) == 6
        other = stream_of("other", values[::-1].copy())
        words = "the state is of other data: the contents of the samples differ"
        with pytest.raises(ValueError, match=words) as refused:
            other.load_state_dict(state)
        assert "remove 'dataset' from the state" in str(refused.value)
        assert other.state_dict()["batches"] == 0
        del state["dataset"]
        other.load_state_dict(state)
        assert len(list(other)) == 6

    def test_what_differs_of_other_data_is_named(self, labels):
        dataset = TokenDataset(labels, 4)
        state = BatchStream(dataset, batches_of(25)).state_dict()
        for options, words in (
            ({"block_size": 5}, r"the shape was \(25, 4\) and is \(20, 5\);"),
            ({"block_size": 4, "stride": 2}, r"the shape was \(25, 4\) and is \(50, 4\);"),
        ):
            other = BatchStream(TokenDataset(labels, **options), batches_of(20))
            with pytest.raises(ValueError, match=f"the state is of other data: {words}"):
                other.load_state_dict(state)
        for value in (None, {"shape": "(25, 4)"}):
            stream = BatchStream(dataset, batches_of(25))
            with pytest.raises(ValueError, match=r"it must be a dict of .*dtype"):
                stream.load_state_dict({**state, "dataset": value})

    def test_a_state_shares_no_memory_with_the_stream(self, labels):
        dataset = ArrayDataset(labels)
        for name in ("seeded", "own state"):
            stream = BatchStream(dataset, SAMPLERS[name](dataset))
            batches = iter(stream)
            next(batches)
            state = stream.state_dict()
            kept = copy.deepcopy(state)
            expected = [batch.tolist() for batch in batches]
            assert str(state) == str(kept)
            again = BatchStream(dataset, SAMPLERS[name](dataset))
            again.load_state_dict(state)
            if "rng_state" in state:
                state["generators"].clear()
            else:
                state["sampler"]["position"] = 9
            assert [batch.tolist() for batch in again] == expected

    @pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
    def test_checkpoints_carry_a_state(self, labels, tmp_path):
        from torch.distributed import checkpoint as dcp

        dataset = ArrayDataset(labels)
        make = SAMPLERS["seeded"]
        stream = BatchStream(dataset, make(dataset))
        batches = iter(stream)
        for _ in range(4):
            next(batches)
        dcp.save({"stream": stream}, checkpoint_id=tmp_path / "dcp")
        with nvmeio.checkpoint.Checkpointer(tmp_path / "own") as checkpointer:
            checkpointer.save(1, {"stream": stream.state_dict()})
            restored = checkpointer.restore()
        expected = [batch.tolist() for batch in batches]
        by_dcp, by_own = (BatchStream(dataset, make(dataset)) for _ in range(2))
        dcp.load({"stream": by_dcp}, checkpoint_id=tmp_path / "dcp")
        by_own.load_state_dict(restored["stream"])
        for again in (by_dcp, by_own):
            assert [batch.tolist() for batch in again] == expected

    def test_an_unused_iterator_does_not_consume_the_state(self, labels):
        """A DataLoader may call iter() twice, and use only the second iterator."""
        dataset = ArrayDataset(labels)
        stream = BatchStream(dataset, batches_of(COUNT))
        for _ in itertools.islice(stream, 6):
            pass
        state = stream.state_dict()
        stream.load_state_dict(state)
        unused = iter(stream)
        assert str(stream.state_dict()) == str(state)
        assert len(list(stream)) == 5
        assert len(list(unused)) == 11

    def test_the_state_belongs_to_the_last_started_iteration(self, labels):
        stream = BatchStream(ArrayDataset(labels), batches_of(COUNT))
        first, second = iter(stream), iter(stream)
        next(first)
        assert stream.state_dict()["batches"] == 1
        next(second)
        next(first)
        assert stream.state_dict()["batches"] == 1
        list(first)
        assert stream.state_dict()["batches"] == 1
        list(second)
        assert stream.state_dict()["batches"] == 0

    def test_a_running_iteration_does_not_change_a_loaded_state(self, labels):
        stream = BatchStream(ArrayDataset(labels), batches_of(COUNT))
        batches = iter(stream)
        for _ in range(4):
            next(batches)
        state = stream.state_dict()
        next(batches)
        stream.load_state_dict(state)
        assert len(list(batches)) == 6
        assert stream.state_dict()["batches"] == 4
        assert len(list(stream)) == 7

    def test_a_failed_batch_is_repeated_after_a_resume(self, labels):
        dataset = ArrayDataset(labels)
        failing = [[0], [1], [2]]

        def transform(sample):
            if sample == 1 and failing:
                raise RuntimeError("no memory")
            return sample

        dataset.transform = transform
        stream = BatchStream(dataset, [[0], [1], [2]])
        with pytest.raises(RuntimeError, match="no memory"):
            list(stream)
        failing.clear()
        stream.load_state_dict(stream.state_dict())
        assert [batch.tolist() for batch in stream] == [[1], [2]]

    def test_a_state_may_be_taken_by_another_thread(self, labels):
        dataset = ArrayDataset(labels)
        order = torch.randperm(COUNT, generator=seeded()).tolist()
        batches = [[number] for number in order] * 4
        stream = BatchStream(dataset, batches)
        states, ended = {}, threading.Event()

        def take():
            while not ended.is_set():
                state = stream.state_dict()
                states[state["batches"]] = state

        with ThreadPoolExecutor(1) as pool:
            taking = pool.submit(take)
            expected = []
            for batch in stream:
                expected.append(batch.tolist())
                # The other thread may not get a turn otherwise, on a busy machine.
                while len(expected) % 50 == 0 and len(states) < len(expected) // 50:
                    assert not taking.done()
                    time.sleep(0)
            ended.set()
            taking.result()
        assert len(states) > 3
        for given, state in list(states.items())[::20]:
            again = BatchStream(dataset, batches)
            again.load_state_dict(state)
            assert [batch.tolist() for batch in again] == expected[given:]

    def test_a_different_order_is_refused(self, labels):
        dataset = ArrayDataset(labels)
        half = Subset(dataset, range(0, COUNT, 2))

        def ranked(epoch=1, ranks=2, seed=3):
            sampler = DistributedSampler(dataset, ranks, 1, seed=seed)
            sampler.set_epoch(epoch)
            return in_batches(sampler)

        changes = [
            (dataset, ranked(), dataset, ranked(epoch=0)),
            (dataset, ranked(), dataset, ranked(ranks=3)),
            (dataset, ranked(), dataset, ranked(seed=4)),
            (dataset, batches_of(COUNT, 10), dataset, batches_of(COUNT, 9)),
            (dataset, batches_of(50), Subset(dataset, range(50, 0, -1)), batches_of(50)),
            (half, batches_of(50), Subset(dataset, range(50)), batches_of(50)),
        ]
        for before, batches, after, others in changes:
            stream = BatchStream(before, batches)
            for _ in itertools.islice(stream, 3):
                pass
            state = stream.state_dict()
            same = BatchStream(before, batches)
            same.load_state_dict(state)
            next(iter(same))
            stream = BatchStream(after, others)
            stream.load_state_dict(state)
            for _ in range(2):
                with pytest.raises(
                    ValueError, match="after batch 3: the batch sampler gives other"
                ):
                    next(iter(stream))
        stream = BatchStream(dataset, batches[:2])
        stream.load_state_dict(state)
        with pytest.raises(ValueError, match="batch sampler gives only 2"):
            next(iter(stream))

    def test_all_ranks_may_load_the_state_of_one(self, labels):
        dataset = ArrayDataset(labels)

        def of_rank(rank):
            return BatchStream(dataset, in_batches(DistributedSampler(dataset, 3, rank)))

        first = of_rank(0)
        for _ in itertools.islice(first, 2):
            pass
        for rank in range(3):
            expected = [batch.tolist() for batch in of_rank(rank)]
            stream = of_rank(rank)
            stream.load_state_dict(first.state_dict())
            batches = iter(stream)
            assert next(batches).tolist() == expected[2]
            # From here on the state belongs to this rank, which notices a wrong order.
            state = stream.state_dict()
            assert (state["batches"], state["rank"]) == (3, rank)
            again = of_rank(rank)
            again.load_state_dict(state)
            assert [batch.tolist() for batch in again] == expected[3:]

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"epoch": 0}, "epoch 0.* had .*epoch 2"),
            ({"seed": 1}, "seed 1.* had .*seed 0"),
            ({"ranks": 4}, "num_replicas 4.* had .*num_replicas 3"),
            ({"size": 9}, "batch_size 9.* had batch_size 10"),
            ({"drawn": 60}, "length 20.* had .*length 30"),
            ({"part": 92}, "samples 92.* had .*samples 91"),
        ],
        ids=str,
    )
    def test_another_rank_refuses_another_order(self, labels, change, words):
        dataset = ArrayDataset(labels)

        def of_rank(rank, epoch=2, seed=0, ranks=3, size=10, drawn=90, part=91):
            sampler = DistributedSampler(range(drawn), ranks, rank, seed=seed)
            sampler.set_epoch(epoch)
            batches = BatchSampler(sampler, size, drop_last=False)
            return BatchStream(Subset(dataset, range(part)), batches)

        first = of_rank(0)
        next(iter(first))
        stream = of_rank(1, **change)
        stream.load_state_dict(first.state_dict())
        with pytest.raises(ValueError, match=f"the batch sampler has .*{words}"):
            next(iter(stream))

    def test_random_numbers_of_another_rank_are_refused(self, labels):
        dataset = ArrayDataset(labels)
        streams = []
        for rank in range(2):
            sampler = RandomSampler(dataset, generator=torch.Generator().manual_seed(rank))
            sampler.rank = rank
            streams.append(BatchStream(dataset, in_batches(sampler)))
        with pytest.raises(ValueError, match="state is of rank 0, and this is rank 1"):
            streams[1].load_state_dict(streams[0].state_dict())

    def test_an_order_of_another_rank_that_nothing_tells_is_refused(self, labels):
        """It would be a mixture: some samples twice, and others never."""

        class Shuffled:
            def __init__(self, rank):
                self.rank = rank

            def __iter__(self):
                yield from random.sample([[i] for i in range(self.rank, 100, 2)], 50)

        dataset = ArrayDataset(labels)
        streams = [BatchStream(dataset, Shuffled(rank)) for rank in range(2)]
        next(iter(streams[0]))
        with pytest.raises(ValueError, match="Shuffled may draw numbers of its own"):
            streams[1].load_state_dict(streams[0].state_dict())

    def test_a_state_of_another_sampler_is_refused(self, labels):
        dataset = ArrayDataset(labels)
        plain, own, random = (
            BatchStream(dataset, SAMPLERS[name](dataset))
            for name in ("list", "own state", "seeded")
        )
        with pytest.raises(TypeError, match="state_dict is None; it must be a dict"):
            plain.load_state_dict(None)
        for stream, state in ((plain, {}), (plain, own.state_dict())):
            with pytest.raises(ValueError, match="that of this batch sampler has"):
                stream.load_state_dict(state)
        with pytest.raises(ValueError, match="has 1 generators of samplers"):
            plain.load_state_dict(random.state_dict())
        with pytest.raises(ValueError, match="batches is -1"):
            plain.load_state_dict({**plain.state_dict(), "batches": -1})
        for name, value in (
            ("rng_state", None),
            ("generators", [None]),
            ("rng_state", "no base64"),
        ):
            with pytest.raises(ValueError, match=r"(None|no base64).* for random numbers"):
                plain.load_state_dict({**plain.state_dict(), name: value})
        assert len(list(plain)) == 11

    def test_workers_that_would_repeat_batches_are_refused(self, labels):
        stream = BatchStream(ArrayDataset(labels), batches_of(COUNT))
        with pytest.raises(RuntimeError, match="each of 2 workers would give every batch"):
            list(DataLoader(stream, batch_size=None, num_workers=2))
        for workers in (0, 1):
            loader = DataLoader(stream, batch_size=None, num_workers=workers)
            assert_equal(list(loader), list(stream))
