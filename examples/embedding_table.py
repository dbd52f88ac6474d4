"""Train an embedding table that stays on disk, from two processes at once.

The table and the states of the optimizer are files with one row per id.  Each step has a
batch of ids.  One process owns the even ids, and the other one the odd ids.  A process
reads the rows of its ids, computes their sparse gradient with torch, updates them with
torch.optim.SparseAdam, and writes them back.  Training the same table in memory must give
the same result to the last bit.  All files are in a temporary folder, which is removed at
the end.  The exit status is 0 only if both results are equal.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

import nvmeio

PROCESSES = 2
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
STATES = ("exp_avg", "exp_avg_sq")
FILES = ("table", *STATES)
# Rows per part, when files are made and compared.
CHUNK = 1 << 14
# How long a process waits for the others, in seconds.
TIMEOUT = 300


def chunks(count: int) -> Iterator[slice]:
    """Divide rows into parts."""
    return (slice(begin, min(begin + CHUNK, count)) for begin in range(0, count, CHUNK))


def initial(rows: slice, options: argparse.Namespace) -> torch.Tensor:
    """Return rows of the table as they are before the first step."""
    generator = torch.Generator().manual_seed(rows.start)
    values = torch.randn(rows.stop - rows.start, options.width, generator=generator)
    return values.to(DTYPES[options.dtype])


def create(folder: Path, options: argparse.Namespace) -> None:
    """Make the files: a table of random rows, and states of zeros."""
    shape = (options.rows, options.width)
    for name in FILES:
        path = folder / f"{name}.npy"
        with nvmeio.ArrayFile.create(path, shape, DTYPES[options.dtype]) as file:
            for rows in chunks(options.rows) if name == "table" else ():
                file[rows] = initial(rows, options)


def batch(
    step: int, process: int, options: argparse.Namespace
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a process's ids for a step, some of them repeated, and a target for each."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(options.rows, (options.batch,), generator=generator)
    targets = torch.rand(options.batch, 1, generator=generator)
    own = ids % PROCESSES == process
    return ids[own], targets[own]


def learn(
    optimizer: torch.optim.Optimizer,
    table: torch.nn.Parameter,
    ids: torch.Tensor,
    targets: torch.Tensor,
) -> None:
    """Do one step for the rows of a table that have these ids."""
    optimizer.zero_grad()
    found = torch.nn.functional.embedding(ids, table, sparse=True)
    (found - targets.to(found.dtype)).square().sum().backward()
    optimizer.step()


def train_on_disk(
    process: int, folder: str, options: argparse.Namespace, barrier: Any
) -> None:
    """Train the rows that a process owns."""
    torch.set_num_threads(1)
    with ExitStack() as stack:
        files = [
            stack.enter_context(
                nvmeio.ArrayFile(
                    Path(folder) / f"{name}.npy", dtype=DTYPES[options.dtype], mode="r+"
                )
            )
            for name in FILES
        ]
        barrier.wait(TIMEOUT)
        writes: list[nvmeio.Request] = []
        for step in range(options.steps):
            named, targets = batch(step, process, options)
            ids, places = named.unique(return_inverse=True)
            # Read all three files at once. An id of the last step may come again, so
            # reading begins after the writes of that step.
            reads = [file.prefetch(ids, after=writes) for file in files]
            rows, *states = (read.result() for read in reads)
            table = torch.nn.Parameter(rows)
            optimizer = torch.optim.SparseAdam([table], lr=options.rate)
            optimizer.state[table] = {
                "step": step,
                **dict(zip(STATES, states, strict=True)),
            }
            learn(optimizer, table, places, targets)
            updated = (table.detach(), *states)
            writes = [
                file.submit_scatter(ids, values)
                for file, values in zip(files, updated, strict=True)
            ]
        for write in writes:
            write.result()
        for file in files:
            file.flush()


def wait_for_all(workers: list[Any], barrier: Any) -> list[int]:
    """Let the workers begin once all are ready; return the numbers of those that died."""
    sentinels = [worker.sentinel for worker in workers]
    while barrier.n_waiting < len(workers):
        if dead := wait(sentinels, timeout=0.05):
            # The others give up too.
            barrier.abort()
            return [sentinels.index(one) for one in dead]
    barrier.wait(TIMEOUT)
    return []


def train_in_memory(options: argparse.Namespace) -> list[torch.Tensor]:
    """Train the same table in memory, and return it and the states."""
    torch.set_num_threads(1)
    rows = torch.cat([initial(part, options) for part in chunks(options.rows)])
    table = torch.nn.Parameter(rows)
    # One optimizer per process, because each process counts its own steps.
    optimizers = [
        torch.optim.SparseAdam([table], lr=options.rate) for _ in range(PROCESSES)
    ]
    for step in range(options.steps):
        for process, optimizer in enumerate(optimizers):
            learn(optimizer, table, *batch(step, process, options))
    states = [optimizer.state[table] for optimizer in optimizers]
    # The rows that one process updates stay zero in the state of the other.
    return [table.detach(), *(sum(state[name] for state in states) for name in STATES)]


def differing(folder: Path, expected: list[torch.Tensor]) -> int:
    """Return how many rows of all files differ from those in memory, in any bit."""
    count = 0
    for name, wanted in zip(FILES, expected, strict=True):
        with nvmeio.ArrayFile(folder / f"{name}.npy", dtype=wanted.dtype) as file:
            for rows in chunks(len(file)):
                bits = file[rows].view(torch.uint8), wanted[rows].view(torch.uint8)
                count += int((bits[0] != bits[1]).any(1).sum())
    return count


def main(arguments: list[str] | None = None) -> int:
    """Train on disk and in memory, compare, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rows", type=int, default=50_000, help="rows of the table (50000)"
    )
    parser.add_argument("--width", type=int, default=64, help="elements of a row (64)")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="bfloat16", help="of an element (bfloat16)"
    )
    parser.add_argument("--batch", type=int, default=2048, help="ids per step (2048)")
    parser.add_argument("--steps", type=int, default=20, help="number of steps (20)")
    parser.add_argument("--rate", type=float, default=0.05, help="learning rate (0.05)")
    options = parser.parse_args(arguments)
    for name in ("rows", "width", "batch", "steps"):
        if getattr(options, name) < 1:
            value = getattr(options, name)
            parser.error(f"--{name} is {value}; at least one is needed")
    # The server imports this module, and torch with it, once for all workers.
    context = multiprocessing.get_context("forkserver")
    barrier = context.Barrier(PROCESSES + 1)
    with tempfile.TemporaryDirectory(prefix="nvmeio-embedding-", dir=".") as name:
        folder = Path(name)
        create(folder, options)
        workers = [
            context.Process(target=train_on_disk, args=(number, name, options, barrier))
            for number in range(PROCESSES)
        ]
        for worker in workers:
            worker.start()
        failed = wait_for_all(workers, barrier)
        begin = time.perf_counter()
        for worker in workers:
            worker.join()
        seconds = time.perf_counter() - begin
        failed = failed or [n for n, worker in enumerate(workers) if worker.exitcode]
        for number in failed:
            code = workers[number].exitcode
            print(f"PROCESS {number} HAS FAILED: exit code {code}")
        if failed:
            return 1
        print(
            f"   {options.steps} steps of {options.batch} ids in {PROCESSES} processes, "
            f"{options.steps * options.batch / seconds:.0f} ids/s"
        )
        wrong = differing(folder, train_in_memory(options))
    print(f"{wrong} ROWS DIFFER" if wrong else "as in memory, to the last bit")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
