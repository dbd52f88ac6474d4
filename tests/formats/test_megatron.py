"""Read datasets that megatron-core wrote, and compare with its own reader."""

import pickle

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
indexed = pytest.importorskip(
    "megatron.core.datasets.indexed_dataset", reason="megatron_core is not installed"
)

# Imported after the check, because they need torch.
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig  # noqa: E402
from megatron.core.datasets.utils import Split  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

import nvmeio  # noqa: E402
import nvmeio.torch.megatron  # noqa: E402
from docstring_examples import examples, run_example  # noqa: E402
from helpers import warm  # noqa: E402
from nvmeio.torch import BatchStream, MegatronDataset  # noqa: E402

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


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_and_streams_give_its_samples(tmp_path, workers):
    prefix = write(tmp_path / "data", np.uint16, lengths=[64] * 40)
    theirs = indexed.IndexedDataset(prefix)
    expected = np.stack([theirs[index] for index in range(40)])
    ours = MegatronDataset(prefix)
    loader = DataLoader(ours, batch_size=16, num_workers=workers)
    np.testing.assert_array_equal(torch.cat(list(loader)).numpy(), expected)
    batches = BatchStream(ours, [range(16), range(16, 40)])
    np.testing.assert_array_equal(torch.cat(list(batches)).numpy(), expected)


class TestBinReader:
    @pytest.mark.parametrize("dtype", [np.uint16, np.int32])
    def test_an_indexed_dataset_reads_with_the_bin_reader(self, tmp_path, dtype):
        prefix = write(tmp_path / "data", dtype)
        theirs, ours = indexed.IndexedDataset(prefix), indexed.IndexedDataset(prefix)
        ours.bin_reader = nvmeio.torch.megatron.BinReader(f"{prefix}.bin")
        for index in [*range(len(theirs)), slice(0, 4), slice(2, 7)]:
            for found, expected in zip(ours[index], theirs[index], strict=True):
                np.testing.assert_array_equal(found, expected)
        assert ours.get(4, 7, 11).tolist() == theirs.get(4, 7, 11).tolist()

    def test_what_is_cached_takes_no_request(self, tmp_path):
        prefix = write(tmp_path / "data", np.uint16)
        reader = nvmeio.torch.megatron.BinReader(f"{prefix}.bin")
        expected = np.fromfile(f"{prefix}.bin", np.uint16)
        requests = []
        # The kernel may drop a page at any moment.
        for _ in range(5):
            warm(f"{prefix}.bin")
            before = nvmeio.default_handle().stats()["requests"]
            np.testing.assert_array_equal(
                reader.read(np.uint16, 4100, 14), expected[7:4107]
            )
            requests.append(nvmeio.default_handle().stats()["requests"] - before)
        assert 0 in requests

    def test_reading_past_the_end_is_an_error(self, tmp_path):
        """megatron-core's own reader returns uninitialized memory for the rest."""
        prefix = write(tmp_path / "data", np.uint16)
        reader = nvmeio.torch.megatron.BinReader(f"{prefix}.bin")
        with pytest.raises(OSError, match="past the end of the file"):
            reader.read(np.uint16, 100, sum(LENGTHS) * 2 - 100)

    def test_a_gpt_dataset_reads_with_the_installed_bin_reader(self, tmp_path):
        prefix = write(tmp_path / "data", np.int32, lengths=[70, 3, 500, 41, 90])
        samples = []
        for installed in (False, True):
            if installed:
                nvmeio.torch.megatron.install()
            try:
                samples.append(gpt_samples(prefix, installed))
            finally:
                nvmeio.torch.megatron.uninstall()
        assert len(samples[0]) == 20
        for theirs, ours in zip(*samples, strict=True):
            assert theirs.keys() == ours.keys()
            for name in theirs:
                assert torch.equal(ours[name], theirs[name])
        assert isinstance(indexed.IndexedDataset(prefix).bin_reader, indexed._MMapBinReader)


class Tokenizer:
    """The attributes of a tokenizer that GPTDataset uses."""

    eod, pad = 0, 101
    vocab_size = None
    unique_identifiers = {"class": "none"}  # noqa: RUF012


def gpt_samples(prefix, installed):
    """Return the samples of a GPTDataset, after a pickled copy returned the same."""
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=32,
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        mmap_bin_files=not installed,
    )
    low = GPTDataset.build_low_level_dataset(prefix, config)
    copy = pickle.loads(pickle.dumps(low))
    for one in (low, copy):
        assert isinstance(one.bin_reader, nvmeio.torch.megatron.BinReader) is installed
    indices = np.arange(len(low))
    dataset = GPTDataset(copy, prefix, indices, 20, Split.train, config)
    return [dataset[index] for index in range(20)]


@pytest.mark.parametrize("name", examples("megatron"))
def test_the_example_in_a_docstring_runs(name, tmp_path, monkeypatch):
    run_example(name, tmp_path, monkeypatch)
