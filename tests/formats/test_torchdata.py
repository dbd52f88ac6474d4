"""torchdata's StatefulDataLoader and samplers resume our datasets at the exact batch."""

import itertools
import pickle

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
stateful = pytest.importorskip(
    "torchdata.stateful_dataloader", reason="torchdata is not installed"
)

# Imported after the check, because they need torch.
from torch.utils.data import BatchSampler, RandomSampler  # noqa: E402
from torchdata.stateful_dataloader import sampler as samplers  # noqa: E402

import nvmeio  # noqa: E402
from nvmeio.torch import ArrayDataset, BatchStream, TokenDataset  # noqa: E402

COUNT = 95


@pytest.fixture
def folder(tmp_path):
    """A folder with an array, labels and two shards of tokens."""
    rng = np.random.default_rng(0)
    nvmeio.save(tmp_path / "rows.npy", rng.random((COUNT, 5), np.float32))
    nvmeio.save(tmp_path / "labels.npy", np.arange(COUNT))
    for number in range(2):
        values = rng.integers(0, 1 << 16, 64).astype(np.uint16)
        nvmeio.save(tmp_path / f"{number}.npy", values)
    return tmp_path


DATASETS = {
    "array": lambda folder: ArrayDataset(folder / "labels.npy"),
    "arrays": lambda folder: ArrayDataset(folder / "rows.npy", folder / "labels.npy"),
    "tokens": lambda folder: TokenDataset(
        [folder / "0.npy", folder / "1.npy"], 16, stride=1
    ),
}


def seeded():
    """Return a generator that draws the same numbers in every process."""
    return torch.Generator().manual_seed(3)


# Functions that make the samplers again, as a program does when it restarts.
SAMPLERS = {
    "torch": lambda data: BatchSampler(RandomSampler(data, generator=seeded()), 10, False),
    "torchdata": lambda data: samplers.BatchSampler(
        samplers.RandomSampler(data, generator=seeded()), 10, False
    ),
    "distributed": lambda data: BatchSampler(
        samplers.StatefulDistributedSampler(data, 2, 1), 5, False
    ),
}


def content(batches):
    """Return the bytes of batches."""
    return [
        [part.numpy().tobytes() for part in (batch if isinstance(batch, list) else [batch])]
        for batch in batches
    ]


def assert_resumes(make, given):
    """Assert that a new loader or stream resumes after some batches, and in the next epoch.

    One batch more than there are lets the loop end.
    """
    loader = make()
    first, second = content(loader), content(loader)
    assert len(first) == 10
    loader = make()
    assert content(itertools.islice(loader, given)) == first[:given]
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    loader = make()
    loader.load_state_dict(state)
    if given <= len(first):
        assert content(loader) == first[given:]
    assert content(loader) == second


@pytest.mark.parametrize("given", [0, 6, 10, 11])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", DATASETS)
def test_a_loader_resumes_in_a_dataset(folder, name, workers, given):
    def make():
        # This draws the seed of the order, which is part of the state.
        torch.manual_seed(next(seeds))
        return stateful.StatefulDataLoader(
            DATASETS[name](folder), 10, shuffle=True, num_workers=workers
        )

    seeds = iter([5, 5, 6])

    assert_resumes(make, given)


@pytest.mark.parametrize("given", [0, 6, 10, 11])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_resumes_in_a_stream(folder, workers, given):
    def make():
        dataset = DATASETS["arrays"](folder)
        stream = BatchStream(dataset, SAMPLERS["torch"](dataset))
        return stateful.StatefulDataLoader(
            stream,
            batch_size=None,
            num_workers=workers,
            # Otherwise each epoch would start from the stream's first state.
            persistent_workers=bool(workers),
        )

    assert_resumes(make, given)


@pytest.mark.parametrize("given", [0, 6, 10, 11])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_stream_resumes_with_torchdatas_samplers(folder, sampler, given):
    def make():
        dataset = DATASETS["tokens"](folder)
        return BatchStream(dataset, SAMPLERS[sampler](range(95)))

    assert_resumes(make, given)
