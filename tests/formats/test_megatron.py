"""Files that megatron-core wrote, beside its own reader."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
indexed = pytest.importorskip(
    "megatron.core.datasets.indexed_dataset", reason="megatron_core is not installed"
)

from nvmeio.torch import RecordDataset  # noqa: E402


def test_records_are_what_its_reader_returns(tmp_path):
    builder = indexed.IndexedDatasetBuilder(str(tmp_path / "tokens.bin"), np.uint16)
    for length in (5, 0, 300):
        builder.add_item(torch.arange(length))
        builder.end_document()
    builder.finalize(str(tmp_path / "tokens.idx"))
    theirs = indexed.IndexedDataset(str(tmp_path / "tokens"))
    offsets = theirs.index.sequence_pointers
    ours = RecordDataset(tmp_path / "tokens.bin", offsets, 2 * theirs.sequence_lengths)
    for index in range(3):
        np.testing.assert_array_equal(ours[index].view(torch.uint16), theirs[index])
