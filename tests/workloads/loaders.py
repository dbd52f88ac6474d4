"""Data loading with workers of torch's DataLoader."""

import contextlib
import gc
import os
import resource

import numpy as np

import nvmeio
from helpers import descriptors_below, left_open, limit
from workloads.common import report


class Watched:
    """A transform that adds to each sample its process and that process's open files."""

    def __init__(self, folder):
        self.folder = folder

    def __call__(self, sample):
        from torch.utils.data import get_worker_info

        return (*sample, get_worker_info().id, len(descriptors_below(self.folder)))


def load_with_workers(folder, method, engine, workers, count=403):
    """Load every row twice, in persistent workers with a given start method."""
    os.environ["NVMEIO_ENGINE"] = engine
    import torch
    from torch.utils.data import DataLoader

    from nvmeio.torch import ArrayDataset

    rows = np.random.default_rng(0).random((count, 33), np.float32)
    nvmeio.save(f"{folder}/rows.npy", rows)
    nvmeio.save(f"{folder}/numbers.npy", np.arange(count))
    dataset = ArrayDataset(f"{folder}/rows.npy", f"{folder}/numbers.npy")
    dataset[0]
    engine = nvmeio.default_handle().engine
    open_here = len(descriptors_below(folder))
    dataset.transform = Watched(folder)
    loader = DataLoader(
        dataset,
        batch_size=7,
        shuffle=True,
        num_workers=workers,
        multiprocessing_context=method,
        persistent_workers=True,
        pin_memory=True,
    )
    readers, open_there = set(), set()
    for _ in range(2):
        found = []
        for samples, numbers, ids, descriptors in loader:
            assert torch.equal(samples, torch.from_numpy(rows[numbers]))
            found += numbers.tolist()
            readers |= set(ids.tolist())
            open_there |= set(descriptors.tolist())
        assert sorted(found) == list(range(count))
    del loader, dataset
    gc.collect()
    report(
        {
            "engine": engine,
            "readers": len(readers),
            "open_here": open_here,
            "open_there": sorted(open_there),
            "left_open": left_open(folder),
        }
    )


class Owners:
    """Joins the records of a batch, and reports which memory holds the dataset's index."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __call__(self, records):
        import torch

        indices = (self.dataset._offsets, self.dataset._sizes)
        owners = [type(index.array.base).__name__ for index in indices]
        return torch.cat(records), ",".join(owners)


def load_records_with_workers(folder, method, shared_bytes_max=None, count=140_000):
    """Load records in workers with a given start method; report where the index is."""
    from torch.utils.data import DataLoader

    from nvmeio.torch import RecordDataset

    sizes = np.random.default_rng(0).integers(0, 5, count)
    ends = np.cumsum(sizes)
    content = np.random.default_rng(1).integers(0, 256, ends[-1], np.uint8)
    content.tofile(f"{folder}/records")
    np.save(f"{folder}/offsets.npy", ends - sizes)
    offsets = np.load(f"{folder}/offsets.npy", mmap_mode="r")
    dataset = RecordDataset(f"{folder}/records", offsets, sizes)
    loader = DataLoader(
        dataset,
        batch_sampler=[range(begin, begin + 5000) for begin in range(0, count, 5000)],
        num_workers=1,
        multiprocessing_context=method,
        collate_fn=Owners(dataset),
    )
    found, owners = [], set()
    room = contextlib.nullcontext()
    if shared_bytes_max is not None:
        room = limit(resource.RLIMIT_FSIZE, shared_bytes_max)
    with room:
        for joined, names in loader:
            found.append(joined.numpy())
            owners.add(names)
    np.testing.assert_array_equal(np.concatenate(found), content)
    report({"owners": sorted(owners)})
