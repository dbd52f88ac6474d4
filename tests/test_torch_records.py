"""Records of any sizes, in one file or several, read by one gather for each file."""

import contextlib
import errno
import functools
import os
import pickle
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

# Imported after the check, because the module needs torch.
from torch.utils.data import DataLoader  # noqa: E402

import nvmeio  # noqa: E402
from children import find_tool, run_child, run_tool  # noqa: E402
from fuse_mounts import empty  # noqa: E402
from helpers import POINTER, descriptors_below, left_open, pattern  # noqa: E402
from mounts import overlay, unmount  # noqa: E402
from nvmeio.torch import BatchStream, MegatronDataset, RecordDataset  # noqa: E402

SIZES = [5, 0, 4096, 1, 70_000, 0, 4095, 4097, 12]


class Records:
    """A file of records in random order, with gaps between them."""

    def __init__(self, path, seed=0):
        self.path = path
        self.sizes = np.array(SIZES)
        order = np.random.default_rng(seed).permutation(len(SIZES))
        self.offsets = np.empty(len(SIZES), np.int64)
        self.offsets[order] = np.cumsum(self.sizes[order] + 7) - self.sizes[order] - 7
        self.content = pattern(self.sizes.sum() + 7 * len(SIZES), seed)
        path.write_bytes(self.content)
        self.expected = [
            self.content[offset : offset + size]
            for offset, size in zip(self.offsets, self.sizes, strict=True)
        ]


@pytest.fixture
def records(tmp_path):
    """Records of one file."""
    return Records(tmp_path / "records")


def bytes_of(sample):
    """Return the bytes of a sample."""
    assert (sample.dtype, sample.dim()) == (torch.uint8, 1)
    return sample.numpy().tobytes()


def test_a_sample_is_a_record(records):
    dataset = RecordDataset(records.path, records.offsets, records.sizes)
    assert len(dataset) == len(SIZES)
    for index in range(-len(SIZES), len(SIZES)):
        assert bytes_of(dataset[index]) == records.expected[index]


def test_a_batch_is_one_gather(records):
    dataset = RecordDataset(records.path, records.offsets, records.sizes)
    indices = [4, 0, 1, -1, 4, 2, 6, 4]
    before = nvmeio.default_handle().stats()["requests"]
    samples = dataset.__getitems__(indices)
    assert nvmeio.default_handle().stats()["requests"] == before + 1
    assert [bytes_of(sample) for sample in samples] == [
        records.expected[index] for index in indices
    ]
    assert len({sample.untyped_storage().data_ptr() for sample in samples}) == 1


def test_records_of_several_files_keep_their_order(tmp_path):
    shards = [Records(tmp_path / f"shard-{seed}", seed) for seed in range(3)]
    # The files alternate.
    offsets = np.stack([shard.offsets for shard in shards], axis=1).ravel()
    sizes = np.stack([shard.sizes for shard in shards], axis=1).ravel()
    files = np.arange(len(offsets)) % 3
    expected = [shards[i % 3].expected[i // 3] for i in range(len(offsets))]
    dataset = RecordDataset([s.path for s in shards], offsets, sizes, files=files)
    indices = np.random.default_rng(0).integers(-len(dataset), len(dataset), 100)
    for chosen in (indices, indices[:1], indices[indices % 3 == 1], []):
        samples = dataset.__getitems__(chosen)
        assert [bytes_of(sample) for sample in samples] == [expected[i] for i in chosen]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"offsets": [0, -1]}, ValueError, r"offsets\[1\] is -1; it must be from 0"),
        ({"sizes": [5, -(2**63)]}, ValueError, r"sizes\[1\] is -9223372036854775808; it"),
        (
            {"offsets": np.array([0, 2**63], np.uint64)},
            ValueError,
            r"offsets\[1\] is 9223372036854775808; it must be from 0 to 2\*\*63 - 1",
        ),
        ({"sizes": [5, 2**63 - 1]}, ValueError, "record 1 of 9223372036854775807 bytes"),
        ({"offsets": [0, 101], "sizes": [5, 0]}, ValueError, "record 1 of 0 bytes at"),
        (
            {"offsets": [96, 97], "sizes": [4, 4]},
            ValueError,
            "record 1 of 4 bytes at offset 97 reaches past the end of .*file', which has",
        ),
        ({"sizes": [5]}, ValueError, "there are 2 offsets and 1 sizes; the numbers must"),
        ({"files": [0]}, ValueError, "there are 2 offsets and 1 files; the numbers must"),
        ({"files": [0, 1]}, ValueError, r"files\[1\] is 1; it must be from 0 to 0"),
        ({"files": [0, -1]}, ValueError, r"files\[1\] is -1; it must be from 0 to 0"),
        ({"offsets": [0.0, np.nan]}, TypeError, "offsets is of dtype float64; it must"),
        ({"offsets": [0, 2**64]}, ValueError, rf"offsets\[1\] is {2**64}; it must be from"),
        ({"offsets": [0, None]}, TypeError, "offsets is of dtype object; it must be"),
        ({"sizes": [True, True]}, TypeError, "sizes is of dtype bool; it must be of"),
        ({"sizes": 5}, ValueError, r"sizes is of shape \(\); it must be of one axis"),
        ({"path": 3}, TypeError, "path is 3; it must be a path, or a sequence of paths"),
        ({"path": []}, ValueError, "path is empty; it must name at least one file"),
    ],
    ids=str,
)
def test_hostile_indices_are_refused_before_a_read(tmp_path, change, error, message):
    (tmp_path / "file").write_bytes(bytes(100))
    before = nvmeio.default_handle().stats()["requests"]
    arguments = {"path": tmp_path / "file", "offsets": [0, 0], "sizes": [5, 5]} | change
    with pytest.raises(error, match=message):
        RecordDataset(**arguments)
    assert nvmeio.default_handle().stats()["requests"] == before


@pytest.mark.parametrize("opened", [True, False])
def test_a_truncated_file_is_named(records, opened):
    dataset = RecordDataset(records.path, records.offsets, records.sizes)
    if opened:
        dataset[0]
    os.truncate(records.path, records.offsets[4] + 100)
    words = "past the end of the file" if opened else r"was replaced .* and had"
    with pytest.raises(OSError, match=words) as caught:
        dataset.__getitems__([1, 4])
    assert caught.value.errno == (errno.ENODATA if opened else errno.ESTALE)
    assert caught.value.filename == str(records.path)


def test_a_worker_raises_an_os_error_too(records):
    dataset = RecordDataset(records.path, records.offsets, records.sizes)

    def cut(batch):
        os.truncate(records.path, 0)
        return batch

    loader = DataLoader(
        dataset, 3, num_workers=1, collate_fn=cut, multiprocessing_context="fork"
    )
    with pytest.raises(nvmeio.GatherError, match="records") as caught:
        list(loader)
    assert (caught.value.failures, caught.value.index) == ((), -1)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)


def change(path, how):
    """Change a file, or replace it by a copy; return whether it still has its bytes."""
    content = path.read_bytes()
    if how == "touched":
        os.utime(path, ns=(1, 1))
    elif how == "made readable":
        path.chmod(0o640)
    elif how == "copied":
        other = path.with_name("other")
        other.write_bytes(content)
        os.replace(other, path)
    elif how == "grown":
        path.write_bytes(content + b"more")
    elif how == "written anew":
        # ext4 gives it the number of the old one.
        path.unlink()
        path.write_bytes(bytes(len(content)))
    elif how == "written in place":
        path.write_bytes(content[:-1] + b"?")
    elif how == "of another length":
        path.write_bytes(content[:-1])
    return how in ("touched", "made readable", "copied", "grown")


CHANGES = ["touched", "made readable", "copied", "grown"]
CHANGES += ["written anew", "written in place", "of another length"]


@pytest.mark.parametrize("way", ["reopened", "spawn", "fork", "pickled"])
@pytest.mark.parametrize("how", CHANGES)
def test_what_a_dataset_reads_is_what_it_was_made_from(records, how, way):
    dataset = RecordDataset(records.path, records.offsets, records.sizes)
    if way != "reopened":
        # A forked worker has an open file of its parent.
        dataset[0]
    is_same = change(records.path, how)
    if way == "pickled":
        dataset = pickle.loads(pickle.dumps(dataset))
    read = functools.partial(dataset.__getitems__, range(3))
    if way in ("spawn", "fork"):
        loader = DataLoader(
            dataset, 3, num_workers=1, collate_fn=list, multiprocessing_context=way
        )
        read = functools.partial(next, iter(loader))
    if is_same:
        assert [bytes_of(sample) for sample in read()] == records.expected[:3]
    else:
        with pytest.raises(OSError, match=r"was replaced or changed .*records") as caught:
            read()
        # torch passes on the text of a worker's error alone.
        assert caught.value.errno == (
            errno.ESTALE if way in ("reopened", "pickled") else None
        )


def test_a_change_that_the_times_do_not_show_is_found(records, monkeypatch):
    """As where a file system keeps whole seconds, and the file was new."""
    dataset = RecordDataset(records.path, records.offsets, records.sizes)
    found = os.stat(records.path)
    change(records.path, "written in place")
    monkeypatch.setattr(os, "fstat", lambda descriptor: found)
    with pytest.raises(OSError, match=r"changed .* it has other contents.*records"):
        dataset[0]


@pytest.mark.parametrize("how", ["touched", "copied", "written anew", "of another length"])
def test_a_mapped_index_is_the_one_that_was_mapped(records, tmp_path, how):
    path = tmp_path / "offsets.npy"
    np.save(path, records.offsets)
    mapped = np.load(path, mmap_mode="r")
    dataset = RecordDataset(records.path, mapped, records.sizes)
    other = tmp_path / "other.npy"
    other.write_bytes(path.read_bytes())
    is_same = change(other, how)
    os.replace(other, path)
    copy = pickle.loads(pickle.dumps(dataset))
    assert len(copy) == len(SIZES)
    if is_same:
        assert bytes_of(copy[3]) == records.expected[3]
    else:
        with pytest.raises(OSError, match=r"was replaced or changed .*offsets.npy"):
            copy[3]


def test_repr_and_close_work(tmp_path):
    shards = [Records(tmp_path / f"shard-{seed}", seed) for seed in range(2)]
    dataset = RecordDataset(
        [shard.path for shard in shards],
        shards[1].offsets,
        shards[1].sizes,
        files=[1] * len(SIZES),
    )
    assert repr(dataset) == (
        f"<nvmeio.torch.RecordDataset {str(shards[0].path)!r}, {str(shards[1].path)!r} "
        "shape=(9,) dtype=torch.uint8>"
    )
    assert bytes_of(dataset[4]) == shards[1].expected[4]
    dataset.close()
    dataset.close()
    assert left_open(tmp_path) == []
    # Also for an empty record, which needs no file.
    for index in (4, 1):
        with pytest.raises(ValueError, match="is closed"):
            dataset[index]


def test_an_empty_dataset_says_so_in_its_error(records):
    dataset = RecordDataset(records.path, [], [])
    assert len(dataset) == 0
    assert dataset.__getitems__([]) == []
    with pytest.raises(IndexError, match=r"dataset is empty: no samples in .*records"):
        dataset[0]


def test_an_index_is_not_copied(records):
    """Indices of small integers, with strides, or of the other byte order."""
    table = np.zeros(len(SIZES), [("offset", ">u8"), ("size", "<u4")])
    table["offset"], table["size"] = records.offsets, records.sizes
    dataset = RecordDataset(records.path, table["offset"][::-1], table["size"][::-1])
    found = [bytes_of(sample) for sample in dataset.__getitems__(range(len(SIZES)))]
    assert found == records.expected[::-1]
    assert np.shares_memory(dataset._offsets.array, table)
    assert np.shares_memory(dataset._sizes.array, table)


def test_a_part_of_a_mapped_index_is_mapped_again(records, tmp_path):
    np.save(tmp_path / "offsets.npy", np.repeat(records.offsets, 3000))
    mapped = np.load(tmp_path / "offsets.npy", mmap_mode="r")[::-1][2::3000]
    sizes = np.array(SIZES[::-1], np.uint32)
    copy = pickle.loads(pickle.dumps(RecordDataset(records.path, mapped, sizes)))
    assert isinstance(copy._offsets.array.base, np.memmap)
    for index in range(len(SIZES)):
        assert bytes_of(copy[index]) == records.expected[::-1][index]


def test_a_private_mapping_is_pickled_with_its_contents(records, tmp_path):
    np.save(tmp_path / "offsets.npy", np.zeros(len(SIZES), np.int64))
    mapped = np.load(tmp_path / "offsets.npy", mmap_mode="c")
    mapped[:] = records.offsets
    copy = pickle.loads(pickle.dumps(RecordDataset(records.path, mapped, SIZES)))
    assert copy._offsets.array.tolist() == records.offsets.tolist()


def test_records_beyond_4_gib_are_read(tmp_path):
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(1 << 40)
        file.seek((1 << 40) - 3)
        file.write(b"end")
    dataset = RecordDataset(tmp_path / "sparse", [2**40 - 3, 2**40 - 2**26], [3, 2**26 - 3])
    end, zeros = dataset.__getitems__([0, 1])
    assert bytes_of(end) == b"end"
    assert (len(zeros), int(zeros.count_nonzero())) == (2**26 - 3, 0)


@pytest.fixture
def many(tmp_path):
    """Arguments of a dataset with one record in each of more files than may be open."""
    paths = [tmp_path / str(number) for number in range(400)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number % 256]) * (number + 1))
    return {
        "path": paths,
        "offsets": np.zeros(400, np.int64),
        "sizes": np.arange(1, 401),
        "files": np.arange(400),
    }


def test_few_of_many_files_are_open(many, tmp_path):
    counts = []

    def opened(record):
        counts.append(len(descriptors_below(tmp_path)))
        return record.sum()

    dataset = RecordDataset(**many, transform=opened)
    assert left_open(tmp_path) == []
    batches = [range(400), range(399, -1, -1), range(0, 400, 3)]
    for batch, found in zip(batches, BatchStream(dataset, batches, 3), strict=True):
        assert found.tolist() == [number % 256 * (number + 1) for number in batch]
    # Each file has up to two descriptors, and a request closes its file a moment late.
    assert max(counts) <= 2 * 128 + 20
    del dataset
    assert left_open(tmp_path) == []


@pytest.mark.parametrize("how", ["batch", "stream"])
def test_an_error_leaves_no_file_open(tmp_path, how):
    """The error of one file cancels the request of the other, which has many blocks."""
    sizes, paths = [64 << 20, 100], [tmp_path / "large", tmp_path / "short"]
    for path, size in zip(paths, sizes, strict=True):
        path.touch()
        os.truncate(path, size)
    dataset = RecordDataset(paths, [0, 0], sizes, files=[0, 1])
    dataset[1]
    os.truncate(paths[1], 50)
    stream = iter(BatchStream(dataset, [[0, 1]]))
    with pytest.raises(OSError, match=r"past the end of .*short"):
        next(stream) if how == "stream" else dataset.__getitems__([0, 1])
    del stream, dataset
    assert left_open(tmp_path) == []


def test_a_forked_worker_reads_while_its_parent_does(many):
    """The worker drops files that its parent's requests are reading."""
    dataset = RecordDataset(**many, transform=torch.sum)
    stream = iter(BatchStream(dataset, [range(400)] * 4, 2))
    expected = [number % 256 * (number + 1) for number in range(400)]
    assert next(stream).tolist() == expected
    loader = DataLoader(
        dataset,
        batch_sampler=[range(400)],
        num_workers=1,
        multiprocessing_context="fork",
    )
    assert [batch.tolist() for batch in loader] == [expected]
    assert [batch.tolist() for batch in stream] == [expected] * 3


def test_a_stream_collates_what_the_transform_returns(records):
    def first(record):
        return record.sum()

    dataset = RecordDataset(records.path, records.offsets, records.sizes, transform=first)
    expected = [sum(records.expected[index]) for index in (0, 4, 7)]
    assert [b.tolist() for b in BatchStream(dataset, [[0, 4], [7]])] == [
        expected[:2],
        expected[2:],
    ]


def test_threads_share_a_dataset(tmp_path):
    shards = [Records(tmp_path / f"shard-{seed}", seed) for seed in range(3)]
    dataset = RecordDataset(
        [shard.path for shard in shards],
        np.concatenate([shard.offsets for shard in shards]),
        np.concatenate([shard.sizes for shard in shards]),
        files=np.repeat(range(3), len(SIZES)),
    )
    expected = [record for shard in shards for record in shard.expected]
    barrier = threading.Barrier(6)

    def read(seed):
        barrier.wait()
        for _ in range(20):
            indices = np.random.default_rng(seed).integers(0, len(dataset), 30)
            samples = dataset.__getitems__(indices)
            assert [bytes_of(one) for one in samples] == [expected[i] for i in indices]

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(read, range(6)))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_share_the_index(tmp_path, method):
    outcome = run_child("load_records_with_workers", folder=str(tmp_path), method=method)
    assert outcome.status == 0, outcome
    (report,) = outcome.reports
    # The offsets are mapped, and torch shares the sizes.
    owners = "memmap,Tensor" if method != "fork" else "memmap,NoneType"
    assert report["owners"] == [owners]


@pytest.mark.slow
def test_workers_have_copies_of_an_index_that_cannot_be_shared(tmp_path):
    """There may be too little space for shared memory."""
    outcome = run_child(
        "load_records_with_workers",
        folder=str(tmp_path),
        method="spawn",
        shared_bytes_max=1 << 20,
    )
    assert outcome.status == 0, outcome
    assert outcome.reports == [{"owners": ["memmap,bytes"]}]


TOKENS = np.random.default_rng(2).integers(0, 1 << 16, 400, np.uint16)
LENGTHS = [100, 0, 250, 1, 49]
DOCUMENTS = [0, 2, 2, 5]


def write_megatron(prefix, *, modes=b"", **changes):
    """Write a dataset as Megatron does, or a broken one; return the prefix."""
    TOKENS.tofile(f"{prefix}.bin")
    lengths = np.array(changes.get("lengths", LENGTHS), "<i4")
    pointers = 2 * (np.cumsum(LENGTHS) - LENGTHS)
    pointers = np.array(changes.get("pointers", pointers), "<i8")
    documents = np.array(changes.get("documents", DOCUMENTS), "<i8")
    header = struct.pack(
        "<9sQBQQ",
        changes.get("magic", b"MMIDIDX\0\0"),
        changes.get("version", 1),
        changes.get("code", 8),
        changes.get("sequences", len(lengths)),
        changes.get("indices", len(documents)),
    )
    content = header + lengths.tobytes() + pointers.tobytes() + documents.tobytes() + modes
    with open(f"{prefix}.idx", "wb") as file:
        file.write(content[: changes.get("size")])
    return prefix


class TestMegatronDataset:
    def test_a_sample_is_a_sequence(self, tmp_path):
        dataset = MegatronDataset(write_megatron(tmp_path / "data"))
        expected = np.split(TOKENS, np.cumsum(LENGTHS))[:-1]
        assert len(dataset) == len(LENGTHS)
        for sample, sequence in zip(dataset[:], expected, strict=True):
            assert sample.dtype == torch.uint16
            np.testing.assert_array_equal(sample.numpy(), sequence)
        np.testing.assert_array_equal(dataset[-3].numpy(), expected[-3])
        np.testing.assert_array_equal(dataset.get(2, 7, 11).numpy(), expected[2][7:18])
        assert dataset.sequence_lengths.tolist() == LENGTHS
        assert dataset.document_indices.tolist() == DOCUMENTS
        assert dataset.sequence_modes is None

    def test_a_sample_has_its_mode(self, tmp_path):
        prefix = write_megatron(tmp_path / "data", modes=bytes([1, 2, 3, 4, 5]))
        dataset = MegatronDataset(prefix, multimodal=True)
        assert [int(mode) for _, mode in dataset[1:4]] == [2, 3, 4]
        part, mode = dataset.get(4, 40)
        np.testing.assert_array_equal(part.numpy(), TOKENS[-9:])
        assert (mode.dtype, mode.item()) == (torch.int8, 5)
        assert isinstance(MegatronDataset(prefix)[0], torch.Tensor)

    @pytest.mark.parametrize("prefix", ["data", b"data"], ids=repr)
    def test_a_pickled_dataset_maps_the_index(self, tmp_path, monkeypatch, prefix):
        write_megatron(tmp_path / "data", modes=bytes(5))
        monkeypatch.chdir(tmp_path)
        dataset = MegatronDataset(prefix, multimodal=True)
        monkeypatch.chdir("/")
        copy = pickle.loads(pickle.dumps(dataset))
        assert torch.equal(copy[2][0], dataset[2][0])
        for index in (copy._offsets, copy._sizes, copy._documents, copy._modes):
            assert isinstance(index.array.base, np.memmap)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"magic": b"MMIDIDX\0\1"}, "is not a .idx file of Megatron: wrong header"),
            ({"size": 33}, "was truncated: it ends within its header"),
            ({"size": 0}, "is not a .idx file of Megatron: it is empty"),
            ({"magic": b"<html>\n"}, "is not a .idx file of Megatron: it is a page of"),
            ({"version": 2}, "is of version 2; it must be 1"),
            ({"code": 0}, "has dtype code 0; it must be from 1 to 8"),
            ({"code": 9}, "has dtype code 9; it must be from 1 to 8"),
            ({"code": 4}, "sequence 1 of 0 elements begins at byte 200, and those"),
            ({"size": 34 + 5 * 12 + 31}, "has 125 bytes; 5 sequences and 4 document"),
            ({"modes": bytes(4)}, "has 130 bytes; 5 sequences and 4 document indices take"),
            ({"sequences": 2**64 - 1}, "has 126 bytes; 18446744073709551615 sequences"),
            ({"indices": 2**61}, "and 2305843009213693952 document indices take"),
            ({"lengths": [100, 0, 250, -1, 49]}, "sequence 3 of -1 elements begins at"),
            (
                {"lengths": [100, 0, 251, 1, 49]},
                "sequence 3 of 1 elements begins at byte 700",
            ),
            (
                {"lengths": [100, 0, 250, 1, 50]},
                "data.bin. has 800 bytes; the sequences of .*data.idx. take 802",
            ),
            (
                {"lengths": [100, 0, 250, 1, 2**31 - 1]},
                "data.bin. has 800 bytes; the sequences of .*data.idx. take 4294967996",
            ),
            ({"lengths": [100, 0, 250, 1, 48]}, "data.bin. has 800 bytes; the sequences"),
            ({"pointers": [0, 200, 198, 700, 702]}, "sequence 2 of 250 elements begins at"),
            ({"pointers": [-2, 200, 200, 700, 702]}, "sequence 0 of 100 elements begins"),
            ({"documents": [0, 2, 1, 5]}, "document index 2 is 1; it must be from 2 to 5"),
            ({"documents": [0, 2, 5, 6]}, "document index 3 is 6; it must be from 5 to 5"),
            ({"documents": [0, 2, 2, 4]}, "its documents end at sequence 4 of 5"),
            ({"documents": [-1, 2, 5, 5]}, "document index 0 is -1; it must be from 0 to"),
        ],
        ids=repr,
    )
    def test_a_hostile_index_is_refused_before_a_read(self, tmp_path, changes, message):
        prefix = write_megatron(tmp_path / "data", **changes)
        before = nvmeio.default_handle().stats()["requests"]
        with pytest.raises(ValueError, match=message):
            MegatronDataset(prefix)
        assert nvmeio.default_handle().stats()["requests"] == before

    def test_an_index_that_is_replaced_meanwhile_is_not_mixed(self, tmp_path, monkeypatch):
        """Between the reads of its header and of its numbers."""
        prefix = write_megatron(tmp_path / "data")

        class Replacing(np.memmap):
            def __new__(cls, *args):
                write_megatron(tmp_path / "other", lengths=[0, 100, 250, 1, 49])
                os.replace(tmp_path / "other.idx", tmp_path / "data.idx")
                return super().__new__(cls, *args)

        monkeypatch.setattr(np, "memmap", Replacing)
        dataset = MegatronDataset(prefix)
        assert dataset.sequence_lengths.tolist() == LENGTHS

    def test_a_pointer_in_place_of_the_tokens_is_named(self, tmp_path):
        prefix = write_megatron(tmp_path / "data")
        (tmp_path / "data.bin").write_bytes(POINTER)
        with pytest.raises(ValueError, match="take 800: it is a Git LFS pointer"):
            MegatronDataset(prefix)

    def test_missing_modes_and_ranges_are_named(self, tmp_path):
        prefix = write_megatron(tmp_path / "data")
        with pytest.raises(ValueError, match="idx' has no modes; pass multimodal="):
            MegatronDataset(prefix, multimodal=True)
        dataset = MegatronDataset(prefix)
        with pytest.raises(ValueError, match="offset is 101; it must be from 0 to 100"):
            dataset.get(0, 101)
        with pytest.raises(ValueError, match="length is 91; it must be from 0 to 90"):
            dataset.get(0, 10, 91)
        with pytest.raises(IndexError, match="index is 5; it must be from -5 to 4"):
            dataset.get(5)
        os.remove(f"{prefix}.bin")
        with pytest.raises(FileNotFoundError, match=r"data\.bin"):
            MegatronDataset(prefix)
        os.remove(f"{prefix}.idx")
        with pytest.raises(FileNotFoundError, match=r"data\.idx"):
            MegatronDataset(prefix)


# More files than a dataset keeps open, so that some are opened again.
SHARDS = 150


@pytest.fixture
def renumbered(fuse_kinds):
    """A folder whose files have another inode number at each look."""
    folder = fuse_kinds("inodes")
    empty(folder)
    return folder


@pytest.fixture
def overlaid(tmp_path):
    """An overlay over squashfs, as Apptainer mounts it, of a folder with shards."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    if find_tool("mksquashfs") is None:
        pytest.skip("mksquashfs is not installed")
    lower, shards = tmp_path / "lower", tmp_path / "shards"
    lower.mkdir()
    shards.mkdir()
    for number in range(SHARDS):
        (shards / f"{number}.bin").write_bytes(bytes([number]) * 3000)
    run_tool("mksquashfs", shards, tmp_path / "image", "-quiet", "-no-progress")
    with contextlib.ExitStack() as stack:
        try:
            run_tool("mount", "-o", "loop,ro", tmp_path / "image", lower)
            stack.callback(unmount, lower)
        except AssertionError as error:
            pytest.skip(f"nothing can be mounted here: {error}")
        yield stack.enter_context(overlay(lower, tmp_path))


def shards_in(folder):
    """Return the shards of a folder, of 3 records each, and a dataset of all of them."""
    paths = [folder / f"{number}.bin" for number in range(SHARDS)]
    for number, path in enumerate(paths):
        if not path.exists():
            path.write_bytes(bytes([number]) * 3000)
    return paths, RecordDataset(
        paths,
        np.tile([0, 1000, 2000], SHARDS),
        np.full(3 * SHARDS, 1000),
        files=np.repeat(np.arange(SHARDS), 3),
    )


def epoch(dataset, **options):
    """Return the first byte of each record, as a shuffled epoch yields them, sorted."""
    options = {"batch_size": 20, "shuffle": True, "collate_fn": list, **options}
    return sorted(int(one[0]) for batch in DataLoader(dataset, **options) for one in batch)


class TestChangingNumbers:
    """Unchanged files are the same, whatever the file system says of their numbers."""

    @pytest.mark.parametrize("kind", ["renumbered", "overlaid"])
    @pytest.mark.parametrize("way", [None, "fork", "spawn", "forkserver"])
    def test_more_shards_than_are_open_are_read_in_every_epoch(self, request, kind, way):
        paths, dataset = shards_in(request.getfixturevalue(kind))
        if kind == "renumbered":
            assert paths[0].stat().st_ino != paths[0].stat().st_ino
        # Closed also after a failure, or nothing could be unmounted.
        request.addfinalizer(dataset.close)
        expected = sorted(np.repeat(np.arange(SHARDS), 3).tolist())
        workers = {"num_workers": 1, "multiprocessing_context": way} if way else {}
        assert epoch(dataset, **workers) == expected
        # Neither does this change the bytes; an overlay gives both files new numbers.
        os.utime(paths[3])
        paths[4].chmod(0o400)
        assert epoch(dataset, **workers) == expected

    @pytest.mark.parametrize("content", [bytes(2999), bytes(3000)], ids=["size", "bytes"])
    def test_new_bytes_are_never_served_as_old_samples(self, renumbered, content):
        paths, dataset = shards_in(renumbered)
        epoch(dataset)
        pickled = pickle.dumps(dataset)
        paths[7].write_bytes(content)
        with pytest.raises(OSError, match=r"was replaced or changed .*7\.bin") as caught:
            epoch(pickle.loads(pickled))
        assert caught.value.errno == errno.ESTALE
