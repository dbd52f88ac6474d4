"""Train a small graph network on features that do not fit into memory.

The process first limits its own memory.  Features and edges are files, which are built in
parts.  Each step gathers the neighbours of some nodes, and then the features of all of
them.  All files are in a temporary folder, which is removed at the end.  The exit status is
0 only if the features do not fit into memory and every row was the right one.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

import nvmeio

MIB = 1 << 20
WIDTH = 128
DEGREE = 10
SEEDS = 256
# Rows per part, when the files are made.
CHUNK = 1 << 14


@contextlib.contextmanager
def limited_memory(room: int) -> Iterator[None]:
    """Limit this process to `room` bytes more than it uses now."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (used,) = (int(text.split()[1]) << 10 for text in lines if text.startswith("VmData:"))
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (used + room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def chunks(count: int) -> Iterator[slice]:
    """Divide rows into parts."""
    return (slice(begin, min(begin + CHUNK, count)) for begin in range(0, count, CHUNK))


def build(folder: Path, nodes: int) -> tuple[nvmeio.ArrayFile, nvmeio.ArrayFile]:
    """Make the files: random features, and random neighbours of each node."""
    generator = np.random.default_rng(0)
    features = nvmeio.ArrayFile.create(folder / "features.npy", (nodes, WIDTH), "f4")
    edges = nvmeio.ArrayFile.create(folder / "edges.npy", (nodes, DEGREE), "i4")
    for rows in chunks(nodes):
        size = rows.stop - rows.start
        values = generator.standard_normal((size, WIDTH), "f4")
        # The first feature is the row's number, so every row that is read can be
        # checked.
        values[:, 0] = np.arange(rows.start, rows.stop)
        features[rows] = values
        edges[rows] = generator.integers(0, nodes, (size, DEGREE), "i4")
    features.flush()
    edges.flush()
    return features, edges


def does_not_fit(path: Path) -> bool:
    """Return whether numpy runs out of memory when it loads a file."""
    try:
        np.load(path)
    except MemoryError:
        return True
    return False


class Layer(torch.nn.Module):
    """Combines a node's features with the mean of its neighbours' features."""

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.nn.Linear(WIDTH - 1, 32)
        self.others = torch.nn.Linear(WIDTH - 1, 32)
        self.score = torch.nn.Linear(32, 1)

    def forward(self, own: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        """Return a score for each node."""
        mixed = torch.relu(self.own(own) + self.others(others.mean(1)))
        return self.score(mixed).squeeze(1)


def train(features: nvmeio.ArrayFile, edges: nvmeio.ArrayFile, steps: int) -> bool:
    """Train for some steps, and return whether all rows were the right ones."""
    torch.manual_seed(0)
    layer = Layer()
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    generator = np.random.default_rng(1)
    right, loss = True, torch.tensor(torch.nan)
    gathered, seconds = 0, 0.0
    for _ in range(steps):
        seeds = generator.integers(0, len(features), SEEDS)
        begin = time.perf_counter()
        neighbours = edges.gather(seeds)
        nodes = np.concatenate([seeds[:, None], neighbours], axis=1)
        rows = torch.from_numpy(features.gather(nodes))
        seconds += time.perf_counter() - begin
        gathered += nodes.size
        right &= bool((rows[..., 0].numpy() == nodes).all())
        values = rows[..., 1:]
        # The value to learn: the mean of the neighbours' first feature, plus the node's
        # own.
        target = values[:, 0, 0] + values[:, 1:, 0].mean(1)
        optimizer.zero_grad()
        loss = (layer(values[:, 0], values[:, 1:]) - target).square().mean()
        loss.backward()
        optimizer.step()
    print(f"   {steps} steps, loss {loss.item():.3f}")
    print(f"   {gathered} rows of {4 * WIDTH} bytes, {gathered / seconds:.0f} rows/s")
    return right


def main(arguments: list[str] | None = None) -> int:
    """Build the files, train, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--nodes", type=int, default=1 << 20, help="nodes of the graph (1048576)"
    )
    parser.add_argument(
        "--memory", type=int, default=128, help="MiB to allow beyond the present use (128)"
    )
    parser.add_argument("--steps", type=int, default=200, help="number of steps (200)")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"--steps is {options.steps}; at least one is needed")
    # Stacks of threads count towards the limit, and machines may have many processors.
    torch.set_num_threads(1)
    # torch imports modules for its first optimizer. They should not count either.
    torch.optim.Adam([torch.zeros(1)])
    # Removing the folder needs memory, so the limit ends before that.
    with (
        tempfile.TemporaryDirectory(prefix="nvmeio-graph-", dir=".") as folder,
        limited_memory(options.memory * MIB),
    ):
        features, edges = build(Path(folder), options.nodes)
        with features, edges:
            print(
                f"   features of {features.nbytes / MIB:.0f} MiB; the process may have "
                f"{options.memory} MiB more than at its start"
            )
            outgrown = does_not_fit(Path(folder) / "features.npy")
            print(f"   all of them {'do not fit' if outgrown else 'FIT'} into memory")
            right = train(features, edges, options.steps)
    print("every row was the right one" if right else "ROWS WERE WRONG")
    return 0 if right and outgrown else 1


if __name__ == "__main__":
    sys.exit(main())
