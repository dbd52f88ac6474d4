"""Models whose weights are on the drive, beside computing alone and the plain loop."""

from __future__ import annotations

import contextlib
import functools
import os
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
# Rows of a batch that computes for much less, about as, and much longer than reading takes,
# and what share of the larger of both is the goal.
BATCHES = {"little": (1, 0.9), "some": (64, 0.8), "much": (512, 0.9)}
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
    folder: Path,
    size: int,
    child: LoopChild | None,
    peers: Peers,
    stack: contextlib.ExitStack,
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
    for name, (rows, goal) in BATCHES.items():
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
            yield Comparison(work, names, (ours, limit), False, (Goal("speed", goal),))
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
    batch = torch.randn(1, WIDTH)
    files = [path]

    def turn(model: Any, warm: bool) -> Sample:
        for each in files:
            if warm:
                each.read_bytes()
            else:
                forget_cached(each)
        return passed(model, batch, total)

    def grouped(model: Any, group: Path) -> Sample:
        for each in files:
            forget_cached(each)
        with member(group):
            return passed(model, batch, total)

    def compared(
        name: str, goal: float, work: Callable[..., Sample], *options: Any
    ) -> Comparison:
        streamed = nvmeio.torch.disk_offload(network(layers, "meta"), path, memory=memory)
        return Comparison(
            f"a forward pass, {name}",
            ("disk_offload", "accelerate's disk_offload"),
            tuple(functools.partial(work, each, *options) for each in (streamed, theirs)),
            False,
            (Goal("speed", goal),),
        )

    theirs = disk_offload(network(layers), folder / "accelerate")
    files += (folder / "accelerate").iterdir()
    yield compared("cold", 3.0, turn, False)
    yield compared("warm", 0.9, turn, True)
    group = stack.enter_context(limited(total // 2, peers))
    if group is not None:
        yield compared("cold, no room for the page cache", 3.0, grouped, group)


def group_here() -> Path:
    """Return the folder of this process's control group that limits memory."""
    found = {}
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        found.update(dict.fromkeys(controllers.split(","), path))
    if "memory" in found:
        return Path(f"/sys/fs/cgroup/memory{found['memory']}")
    return Path(f"/sys/fs/cgroup{found['']}")


@contextlib.contextmanager
def limited(nbytes: int, peers: Peers) -> Iterator[Path | None]:
    """Make a control group with so much memory and page cache; None if that fails."""
    group = group_here() / f"nvmeio-bench-{os.getpid()}"
    old = (group.parent / "memory.limit_in_bytes").exists()
    try:
        group.mkdir()
    except OSError as error:
        peers.leave_out("control groups", str(error))
        yield None
        return
    try:
        name = "memory.limit_in_bytes" if old else "memory.max"
        (group / name).write_text(str(nbytes), encoding="ascii")
        yield group
    finally:
        group.rmdir()


@contextlib.contextmanager
def member(group: Path) -> Iterator[None]:
    """Put this process into a control group below its own, and back.

    What it allocates and reads meanwhile counts there, with the pages in the page cache.
    """
    number = str(os.getpid())
    (group / "cgroup.procs").write_text(number, encoding="ascii")
    try:
        yield
    finally:
        (group.parent / "cgroup.procs").write_text(number, encoding="ascii")


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
    folder: Path,
    size: int,
    child: LoopChild | None,
    peers: Peers,
    stack: contextlib.ExitStack,
) -> Iterator[Comparison]:
    """Compare models of about `size` bytes; the stack ends what they need."""
    yield from dense(folder, size, child, peers, stack)
    yield from rows(folder, size)
