"""Records of any sizes, of one file or of several, by one gather for each file."""

import errno
import os

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

# Imported late, for the module cannot be imported where torch is not.
import nvmeio  # noqa: E402
from helpers import pattern  # noqa: E402
from nvmeio.torch import BatchStream, RecordDataset  # noqa: E402

SIZES = [5, 0, 4096, 1, 70_000, 0, 4095, 4097, 12]


class Records:
    """A file of records, with gaps between them, in no order."""

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
    """Return what a sample has."""
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
    # The files take turns.
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
        ({"sizes": [5]}, ValueError, "there are 2 offsets and 1 sizes; there must be"),
        ({"files": [0]}, ValueError, "there are 2 offsets and 1 files; there must be"),
        ({"files": [0, 1]}, ValueError, r"files\[1\] is 1; it must be from 0 to 0"),
        ({"files": [0, -1]}, ValueError, r"files\[1\] is -1; it must be from 0 to 0"),
        ({"offsets": [0.0, np.nan]}, TypeError, "offsets is of dtype float64; it must"),
        ({"offsets": [0, 2**64]}, TypeError, "offsets is of dtype object; it must be"),
        ({"sizes": [True, True]}, TypeError, "sizes is of dtype bool; it must be of"),
        ({"sizes": 5}, ValueError, r"sizes is of shape \(\); it must be of one axis"),
        ({"path": 3}, TypeError, "path is 3; it must be a path, or a sequence of paths"),
        ({"path": []}, TypeError, "path is of type list; it must be a path, or a"),
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


def test_a_file_that_was_cut_is_named(records):
    dataset = RecordDataset(records.path, records.offsets, records.sizes)
    os.truncate(records.path, records.offsets[4] + 100)
    with pytest.raises(OSError, match="past the end of the file") as caught:
        dataset.__getitems__([1, 4])
    assert caught.value.errno == errno.ENODATA
    assert caught.value.filename == str(records.path)


def test_a_stream_collates_what_the_transform_returns(records):
    def first(record):
        return record.sum()

    dataset = RecordDataset(records.path, records.offsets, records.sizes, transform=first)
    expected = [sum(records.expected[index]) for index in (0, 4, 7)]
    assert [b.tolist() for b in BatchStream(dataset, [[0, 4], [7]])] == [
        expected[:2],
        expected[2:],
    ]
