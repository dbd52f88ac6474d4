"""Rows of checkpoints, beside plain loops, a plain copy, and training without saves."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from comparisons import Comparison, Goal, Sample, measured
from loop_child import LoopChild

from nvmeio._cli.measuring import forget_cached
from nvmeio.checkpoint import Checkpointer

__all__ = ["checkpoint_comparisons"]

LOOP = "plain loop"
BLOCK, DEPTH = 1 << 20, 128
COUNT = 300

Turn = Callable[[], Sample]


def checkpoint_comparisons(
    folder: Path, size: int, child: LoopChild | None
) -> Iterator[Comparison]:
    """Compare saves, restores and the delay of save_async with the least they can take."""
    rows = size // COUNT // 4096 * 4096
    numbers = np.random.default_rng(1)
    state = {f"{n:03}": numbers.integers(0, 256, rows, np.uint8) for n in range(COUNT)}
    nbytes = COUNT * rows
    span = nbytes // BLOCK * BLOCK
    root = folder / "checkpoints"
    checkpointer = Checkpointer(root, keep=1)
    checkpointer.save(0, state)
    path = root / "step-0" / "tensors.safetensors"

    def saved() -> Sample:
        # Write to new blocks of the file system, as the loop does.
        shutil.rmtree(root / "step-1", ignore_errors=True)
        return measured(lambda: (checkpointer.save(1, state), nbytes)[1])

    def restored() -> Sample:
        forget_cached(path)
        found = []
        sample = measured(lambda: (found.append(checkpointer.restore(0)), nbytes)[1])
        if not np.array_equal(found[0]["007"], state["007"]):
            raise RuntimeError("a restored checkpoint has other bytes than the saved one")
        return sample

    def staged() -> Sample:
        shutil.rmtree(root / "step-1", ignore_errors=True)
        futures = []
        sample = measured(
            lambda: (futures.append(checkpointer.save_async(1, state)), nbytes)[1]
        )
        futures[0].result()
        return sample

    memory = np.ones(nbytes, np.uint8)

    def copied() -> Sample:
        def work() -> int:
            low = 0
            for array in state.values():
                memory[low : low + len(array)] = array
                low += len(array)
            return nbytes

        return measured(work)

    checkpointer.keep = None
    checkpointer.save_async(1, state).result()
    if child is not None:
        turn = child.turn("model save", folder / "loop", BLOCK, DEPTH, span)
        yield Comparison(
            "save a checkpoint, with checksums",
            ("nvmeio", LOOP),
            (saved, turn),
            False,
            (Goal("speed", 0.9),),
        )
        turn = child.turn("model load", path, BLOCK, DEPTH, span)
        yield Comparison(
            "restore a checkpoint, cold, new memory",
            ("nvmeio", LOOP),
            (restored, turn),
            True,
            (Goal("speed", 0.9),),
        )
    yield Comparison(
        "save_async until it returns",
        ("nvmeio", "copy into memory used before"),
        (staged, copied),
        False,
        (Goal("time", 1.2),),
    )
    yield training_comparison(checkpointer, dict(list(state.items())[: COUNT // 4]), root)


def training_comparison(
    checkpointer: Checkpointer, state: dict[str, np.ndarray], root: Path
) -> Comparison:
    """Compare a loop that saves for a tenth of its time with a loop that only computes."""
    numbers = np.random.default_rng(2)
    batch, weights = (numbers.random((512, 512), np.float32) for _ in range(2))
    result = np.empty_like(batch)

    def train(steps: int) -> int:
        for _ in range(steps):
            np.matmul(batch, weights, out=result)
            # The part of a step that Python computes itself.
            sum(range(1000))
        # The bytes that they read and write, because a speed needs bytes.
        return steps * 3 * result.nbytes

    def new() -> None:
        shutil.rmtree(root / "step-1", ignore_errors=True)

    begin = time.perf_counter()
    train(500)
    step_seconds = (time.perf_counter() - begin) / 500
    durations = []
    for _ in range(3):
        new()
        begin = time.perf_counter()
        checkpointer.save_async(1, state).result()
        durations.append(time.perf_counter() - begin)
    steps = int(10 * sorted(durations)[1] / step_seconds)

    def saving() -> Sample:
        new()
        future = checkpointer.save_async(1, state)
        sample = measured(lambda: train(steps))
        future.result()
        return sample

    return Comparison(
        "a training loop during and after save_async, ten times its duration",
        ("beside a save", "alone"),
        (saving, lambda: measured(lambda: train(steps))),
        False,
        (Goal("time", 1.05),),
    )
