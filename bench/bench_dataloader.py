"""Compares samples a second through torch's DataLoader: ArrayDataset beside numpy.memmap.

Random rows of 4 KiB, of a file that the page cache holds (warm) or not (cold), in the
process of the loop and by workers.  bench/README.md says how to read the tables.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import mmap
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from duels import Duel, Goal, Sample, fight, measured
from machine import arguments, machine
from report import finish
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

import nvmeio
from nvmeio._cli.measuring import forget_cached

ROW_BYTES = 4096
BATCH_ROWS = 256
BATCHES = 16
WORKERS = (0, 1, 2)


class MemmapDataset(Dataset[torch.Tensor]):
    """What people write: rows of a memory map, copied as it must not be written to."""

    def __init__(self, path: Path, count: int, advice: int = mmap.MADV_NORMAL) -> None:
        self.path = path
        self.count = count
        self.advice = advice
        self.rows: np.ndarray | None = None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.rows is None:
            self.rows = np.load(self.path, mmap_mode="r")
            self.rows._mmap.madvise(self.advice)
        return torch.from_numpy(self.rows[index].copy())


@dataclasses.dataclass(frozen=True)
class Ground:
    """A .npy file of random rows, and how many."""

    path: Path
    rows: int


@contextlib.contextmanager
def ground(folder: Path, size: int) -> Iterator[Ground]:
    """Make the file, and clear up."""
    with tempfile.TemporaryDirectory(prefix="nvmeio-bench-", dir=folder) as inside:
        path = Path(inside, "rows.npy")
        rows = size // ROW_BYTES
        piece = np.frombuffer(np.random.default_rng(0).bytes(64 << 20), np.uint8)
        piece = piece.reshape(-1, ROW_BYTES)
        with nvmeio.ArrayFile.create(path, (rows, ROW_BYTES), np.uint8) as array:
            for begin in range(0, rows, len(piece)):
                array[begin : begin + len(piece)] = piece[: rows - begin]
            array.flush()
        yield Ground(path, rows)


def fill_cache(path: Path) -> None:
    """Have the kernel hold all of a file."""
    with open(path, "rb", buffering=0) as file:
        while file.read(16 << 20):
            pass


def epoch(ground: Ground, loader: Callable[[], Any], warm: bool) -> Callable[[], Sample]:
    """Return a turn: a few batches of random rows, the start of workers included."""

    def work() -> int:
        count = sum(len(batch) for batch in loader())
        assert count == BATCHES * BATCH_ROWS
        return count * ROW_BYTES

    def turn() -> Sample:
        (fill_cache if warm else forget_cached)(ground.path)
        return measured(work)

    return turn


def sampler(dataset: Dataset[Any]) -> RandomSampler:
    """Return the choice of random rows for one turn."""
    return RandomSampler(dataset, replacement=True, num_samples=BATCHES * BATCH_ROWS)


def loading(make: Callable[[], Dataset[Any]], workers: int) -> Callable[[], Any]:
    """Return what makes a DataLoader for one turn.

    With a dataset of its own: what a memory map holds is not dropped from the page cache.
    """

    def load() -> DataLoader[Any]:
        dataset = make()
        return DataLoader(
            dataset,
            batch_size=BATCH_ROWS,
            sampler=sampler(dataset),
            num_workers=workers,
        )

    return load


def streaming(make: Callable[[], Dataset[Any]]) -> Callable[[], Any]:
    """Return what makes a BatchStream for one turn."""

    def load() -> nvmeio.torch.BatchStream:
        dataset = make()
        batches = BatchSampler(sampler(dataset), BATCH_ROWS, False)
        return nvmeio.torch.BatchStream(dataset, batches)

    return load


def duels(ground: Ground) -> Iterator[Duel]:
    """Give every duel."""

    def ours() -> nvmeio.torch.ArrayDataset:
        return nvmeio.torch.ArrayDataset(ground.path)

    def theirs() -> MemmapDataset:
        return MemmapDataset(ground.path, ground.rows)

    def advised() -> MemmapDataset:
        return MemmapDataset(ground.path, ground.rows, mmap.MADV_RANDOM)

    def turns(first: Any, second: Any, warm: bool = False) -> Any:
        return epoch(ground, first, warm), epoch(ground, second, warm)

    cold, cached = (Goal("speed", 5.0),), (Goal("speed", 0.9),)
    for warm, workers in itertools.product((False, True), WORKERS):
        yield Duel(
            f"{'warm' if warm else 'cold'}, {workers} workers",
            ("ArrayDataset", "numpy.memmap"),
            turns(loading(ours, workers), loading(theirs, workers), warm),
            False,
            cached if warm else () if workers else cold,
            ROW_BYTES,
        )
    yield Duel(
        "cold, 0 workers",
        ("ArrayDataset", "numpy.memmap, MADV_RANDOM"),
        turns(loading(ours, 0), loading(advised, 0)),
        False,
        cold,
        ROW_BYTES,
    )
    yield Duel(
        "cold, no DataLoader",
        ("BatchStream", "numpy.memmap, 0 workers"),
        turns(streaming(ours), loading(theirs, 0)),
        False,
        record_bytes=ROW_BYTES,
    )


def main() -> None:
    """Measure and report; what was measured never changes the exit status."""
    options = arguments(__doc__, ("4G", "256M"), (8, 2))
    with ground(options.dir, options.size) as place:
        about = machine(options.dir) | {"size": options.size, "rounds": options.rounds}
        found = list(duels(place))
        fight(found, options.rounds)
    finish("dataloader", about, found, [], options.json)


if __name__ == "__main__":
    main()
