"""Compare samples a second through torch's DataLoader, each format beside its own reader.

A BatchStream is compared with the reader through a DataLoader, both without workers.

Random samples are read from files that are in the page cache (warm) or not (cold), without
and with workers, and the memory that each takes is measured.  bench/README.md explains the
tables.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from comparisons import Comparison, Goal, Sample, compare, measured, progress
from machine import arguments, machine
from peers import Peers
from record_files import Format, formats
from report import finish
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

import nvmeio
from nvmeio._cli.measuring import forget_cached

WORKERS = (0, 2)

# A function that makes an iterable of batches, with a dataset of its own.
Loading = Callable[[], Any]


def fill_cache(path: Path) -> None:
    """Read all of a file into the page cache."""
    with open(path, "rb", buffering=0) as file:
        while file.read(16 << 20):
            pass


def epoch(form: Format, loading: Loading, warm: bool) -> Callable[[], Sample]:
    """Return a turn of a few batches of random samples, including the start of workers."""

    def turn() -> Sample:
        # Mapped pages are not dropped from the page cache, so each turn makes its
        # dataset.
        loader = loading()
        for path in form.paths:
            (fill_cache if warm else forget_cached)(path)

        def work() -> int:
            count = sum(len(samples_of(batch)) for batch in loader)
            assert count == form.count, count
            return count * form.sample_bytes

        return measured(work)

    return turn


def samples_of(batch: Any) -> Any:
    """Return an object with the batch's length, because windows are a pair of tensors."""
    return batch[0] if isinstance(batch, list) and len(batch) == 2 else batch


def loading(form: Format, make: Callable[[int], Any], workers: int) -> Loading:
    """Return a function that makes a DataLoader for one turn."""

    def load() -> DataLoader[Any]:
        dataset = make(form.count)
        sampler = None
        if not isinstance(dataset, IterableDataset):
            sampler = RandomSampler(dataset, replacement=True, num_samples=form.count)
        return DataLoader(
            dataset,
            batch_size=form.batch,
            sampler=sampler,
            num_workers=workers,
            collate_fn=form.collate,
        )

    return load


def streaming(form: Format) -> Loading:
    """Return a function that makes a BatchStream for one turn."""

    def load() -> nvmeio.torch.BatchStream:
        dataset = form.datasets[0](form.count)
        sampler = RandomSampler(dataset, replacement=True, num_samples=form.count)
        batches = BatchSampler(sampler, form.batch, False)
        return nvmeio.torch.BatchStream(dataset, batches, collate_fn=form.collate)

    return load


def anonymous_bytes(pid: int) -> int:
    """Return a process's memory without pages of files, with its share of shared pages."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    found = re.findall(r"^Pss_(?:Anon|Shmem):\s+(\d+) kB$", text, re.MULTILINE)
    return sum(map(int, found)) << 10


def memory_taken(form: Format, loading: Loading) -> int:
    """Return by how much memory grows until half of the batches are read, with workers.

    Measured in a separate process that has read nothing before.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def measure() -> None:
        before = anonymous_bytes(os.getpid())
        loader = iter(loading())
        for _ in range(form.batches // 2):
            batch = next(loader)
        workers = [child.pid for child in multiprocessing.active_children()]
        after = sum(map(anonymous_bytes, [os.getpid(), *filter(None, workers)]))
        sender.send(after - before)
        del batch, loader

    process = context.Process(target=measure)
    process.start()
    sender.close()
    try:
        return receiver.recv()
    finally:
        process.join()


def comparisons(found: Sequence[Format]) -> Iterator[Comparison]:
    """Yield all comparisons. The cold ones include the memory of both candidates."""

    def comparison(
        form: Format,
        names: tuple[str, str],
        what: str,
        loads: tuple[Loading, Loading],
        warm: bool = False,
        goal: float = 0.0,
    ) -> Comparison:
        return Comparison(
            f"{form.samples}, {'warm' if warm else 'cold'}, {what}",
            names,
            tuple(epoch(form, load, warm) for load in loads),
            False,
            (Goal("speed", goal),) if goal else (),
            form.sample_bytes,
            memory=() if warm else tuple(memory_taken(form, load) for load in loads),
        )

    for form in found:
        progress(f"memory of {form.samples}")
        for warm, workers in itertools.product((False, True), WORKERS):
            goal = 0.9 if warm else 0.0 if workers else form.cold
            loads = tuple(loading(form, make, workers) for make in form.datasets)
            yield comparison(form, form.names, f"{workers} workers", loads, warm, goal)
        ours, theirs = (loading(form, make, 0) for make in form.datasets)
        for name, make in form.peers:
            names, loads = (form.names[0], name), (ours, loading(form, make, 0))
            yield comparison(form, names, "0 workers", loads, goal=form.cold)
        names = ("BatchStream", f"{form.names[1]}, 0 workers")
        yield comparison(form, names, "no DataLoader", (streaming(form), theirs))


def main() -> None:
    """Measure and report. The results never change the exit status."""
    options = arguments(__doc__, ("4G", "512M"), (8, 2))
    peers = Peers()
    with formats(options.dir, options.size, peers) as place:
        about = machine(options.dir) | {"size": options.size, "rounds": options.rounds}
        found = list(comparisons(place))
        compare(found, options.rounds)
    finish("dataloader", about, found, peers.left_out, options.json)


if __name__ == "__main__":
    main()
