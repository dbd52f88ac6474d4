"""Read datasets that megatron-core wrote, and compare with its own reader."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
indexed = pytest.importorskip(
    "megatron.core.datasets.indexed_dataset", reason="megatron_core is not installed"
)

# Imported after the check, because they need torch.

from nvmeio.torch import MegatronDataset  # noqa: E402

DTYPES = [getattr(np, code.name) for code in indexed.DType]
LENGTHS = [5, 0, 300, 1, 4096, 17, 0]


def write(prefix, dtype, *, multimodal=False, lengths=LENGTHS):
    """Write documents of two sequences each with megatron-core, and return the prefix."""
    rng = np.random.default_rng(0)
    builder = indexed.IndexedDatasetBuilder(f"{prefix}.bin", dtype, multimodal)
    for number, length in enumerate(lengths):
        values = rng.integers(0, 100, length)
        builder.add_item(torch.from_numpy(values), mode=number % 3)
        if number % 2:
            builder.end_document()
    builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def assert_equal(ours, theirs):
    """Assert that a sample has the elements and the dtype of megatron-core's."""
    if isinstance(theirs, tuple):
        assert isinstance(ours, tuple)
        assert (ours[1].dtype, ours[1].item()) == (torch.int8, theirs[1])
        ours, theirs = ours[0], theirs[0]
    assert ours.numpy().dtype == theirs.dtype
    np.testing.assert_array_equal(ours.numpy(), theirs)


@pytest.mark.parametrize("multimodal", [False, True], ids=["plain", "multimodal"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_samples_equal_those_of_megatrons_reader(tmp_path, dtype, multimodal):
    prefix = write(tmp_path / "data", dtype, multimodal=multimodal)
    ours = MegatronDataset(prefix, multimodal=multimodal)
    theirs = indexed.IndexedDataset(prefix, multimodal=multimodal)
    assert len(ours) == len(theirs) == len(LENGTHS)
    for index in range(-1, len(theirs)):
        assert_equal(ours[index], theirs[index])
    order = np.random.default_rng(1).integers(0, len(theirs), 50)
    for sample, index in zip(ours.__getitems__(order), order, strict=True):
        assert_equal(sample, theirs[index])
    for index, offset, length in [(2, 0, None), (4, 100, 1000), (0, 5, None), (5, 3, 0)]:
        assert_equal(ours.get(index, offset, length), theirs.get(index, offset, length))
    np.testing.assert_array_equal(ours.document_indices, theirs.document_indices)
    np.testing.assert_array_equal(ours.sequence_lengths, theirs.sequence_lengths)
    sequences = theirs[1:5]
    if multimodal:
        np.testing.assert_array_equal(ours.sequence_modes, theirs.index.sequence_modes)
        sequences = list(zip(*sequences, strict=True))
    for sample, sequence in zip(ours[1:5], sequences, strict=True):
        assert_equal(sample, sequence)


def test_merged_datasets_are_read(tmp_path):
    parts = [write(tmp_path / f"part{n}", np.uint16, lengths=[n, 40, 3]) for n in (1, 2)]
    builder = indexed.IndexedDatasetBuilder(str(tmp_path / "all.bin"), np.uint16)
    for part in parts:
        builder.add_index(part)
    builder.finalize(str(tmp_path / "all.idx"))
    ours = MegatronDataset(tmp_path / "all")
    theirs = indexed.IndexedDataset(str(tmp_path / "all"))
    for index in range(6):
        assert_equal(ours[index], theirs[index])
