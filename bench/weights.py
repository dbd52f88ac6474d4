"""Models whose weights are on the drive, beside computing alone and the plain loop."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from comparisons import Comparison, Goal, Sample, measured
from loop_child import LoopChild
from peers import Peers

import nvmeio.safetensors.torch
import nvmeio.torch
from nvmeio._cli.measuring import forget_cached

__all__ = ["weight_comparisons"]

BLOCK, DEPTH = 1 << 20, 128
WIDTH = 2048
LAYER_BYTES = 4 * WIDTH * WIDTH
# Of a model that does not fit, one part in this many stays in memory.
MEMORY_SHARE = 8
# Rows of a batch that computes for much less, about as, and much longer than reading takes.
BATCHES = {"little": 1, "much": 512}
COLUMNS = 2048
LOOKUPS = 4096


def network(layers: int, device: str = "cpu") -> torch.nn.Module:
    """Return a model of linear layers, without biases."""
    with torch.device(device):
        made = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))
        return torch.nn.Sequential(*made)


def passed(model: Any, batch: torch.Tensor, nbytes: int) -> Sample:
    """Measure a forward pass."""

    def work() -> int:
        with torch.no_grad():
            model(batch)
        return nbytes

    return measured(work)


def cold(path: Path, turn: Callable[[], Sample]) -> Callable[[], Sample]:
    """Return a turn that begins with nothing in the page cache."""

    def begin() -> Sample:
        forget_cached(path)
        return turn()

    return begin


def dense(
    folder: Path, size: int, child: LoopChild | None, peers: Peers
) -> Iterator[Comparison]:
    """Compare forward passes of a model that does not fit, and of one that does."""
    layers = max(size // LAYER_BYTES, MEMORY_SHARE)
    path = folder / "dense.safetensors"
    resident = network(layers)
    nvmeio.safetensors.torch.save_file(resident.state_dict(), path, align=4096)
    total = layers * LAYER_BYTES
    memory = max(total // MEMORY_SHARE, 2 * LAYER_BYTES)
    # What cannot stay in memory, in whole blocks.
    moved = (total - memory) // BLOCK * BLOCK
    for name, rows in BATCHES.items():
        batch = torch.randn(rows, WIDTH)
        streamed = nvmeio.torch.disk_offload(network(layers, "meta"), path, memory=memory)
        ours = cold(path, functools.partial(passed, streamed, batch, moved))
        alone = functools.partial(passed, resident, batch, moved)

        def limit(alone: Callable[[], Sample] = alone) -> Sample:
            assert child is not None
            forget_cached(path)
            loop = child.run("plain blocks", "read", path, BLOCK, DEPTH, moved, "huge")
            return max(loop, alone(), key=lambda sample: sample.seconds)

        work = f"a forward pass, {name} computing"
        if child is not None:
            names = ("disk_offload", "the larger of computing alone and the loop")
            yield Comparison(work, names, (ours, limit), False, (Goal("speed", 0.9),))
        fits = nvmeio.torch.disk_offload(network(layers, "meta"), path, memory=2 * total)
        passed(fits, batch, total)
        yield Comparison(
            f"{work}, a model that fits",
            ("disk_offload", "in memory"),
            (
                functools.partial(passed, fits, batch, total),
                functools.partial(passed, resident, batch, total),
            ),
            False,
            (Goal("speed", 0.97),),
        )
    try:
        from accelerate import disk_offload
    except ImportError as error:
        peers.leave_out("accelerate", str(error))
        return
    (folder / "accelerate").mkdir()
    theirs = disk_offload(network(layers), folder / "accelerate")
    batch = torch.randn(1, WIDTH)
    streamed = nvmeio.torch.disk_offload(network(layers, "meta"), path, memory=memory)
    files = [path, *(folder / "accelerate").iterdir()]

    def turn(model: Any, warm: bool) -> Sample:
        for each in files:
            if warm:
                each.read_bytes()
            else:
                forget_cached(each)
        return passed(model, batch, total)

    for name, warm, goal in (("cold", False, 3.0), ("warm", True, 0.9)):
        yield Comparison(
            f"a forward pass, {name}",
            ("disk_offload", "accelerate's disk_offload"),
            (
                functools.partial(turn, streamed, warm),
                functools.partial(turn, theirs, warm),
            ),
            False,
            (Goal("speed", goal),),
        )


def rows(folder: Path, size: int) -> Iterator[Comparison]:
    """Compare an embedding of a table on the drive with one gather."""
    path = folder / "table.safetensors"
    count = max(size // (2 * COLUMNS), LOOKUPS)
    table = torch.zeros(count, COLUMNS, dtype=torch.bfloat16)
    nvmeio.safetensors.torch.save_file({"table": table}, path, align=4096)
    embedding = nvmeio.torch.DiskEmbedding(path, "table", memory=0)
    begin = path.stat().st_size - table.nbytes
    out = torch.empty(LOOKUPS, COLUMNS, dtype=torch.bfloat16)
    handle = nvmeio.Handle()

    def numbers() -> torch.Tensor:
        return torch.randint(0, count, (LOOKUPS,)).unique()

    def ours() -> Sample:
        forget_cached(path)
        ids = numbers()
        return measured(lambda: embedding(ids).nbytes)

    def gather() -> Sample:
        forget_cached(path)
        offsets = begin + numbers().numpy() * 2 * COLUMNS
        found = out[: len(offsets)]
        return measured(lambda: handle.gather(path, offsets, 2 * COLUMNS, found))

    yield Comparison(
        f"{LOOKUPS} rows of 4 KiB of a table",
        ("DiskEmbedding", "gather"),
        (ours, gather),
        False,
        (Goal("speed", 0.9),),
        2 * COLUMNS,
        alternations=8,
    )


def weight_comparisons(
    folder: Path, size: int, child: LoopChild | None, peers: Peers
) -> Iterator[Comparison]:
    """Compare models of about `size` bytes."""
    yield from dense(folder, size, child, peers)
    yield from rows(folder, size)
