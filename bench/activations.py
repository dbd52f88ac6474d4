"""Rows of activations on disk, beside computing alone and the plain loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from comparisons import Comparison, Goal, Sample, measured
from loop_child import LoopChild

import nvmeio.torch

__all__ = ["activation_comparisons"]

BLOCK, DEPTH = 1 << 20, 128
WIDTH = 512
# One part in this many stays in memory. Training that needs offloading has such a share.
MEMORY_SHARE = 8


class Block(torch.nn.Module):
    """Half of a transformer layer. It computes for longer than the drive takes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Waves(torch.nn.Module):
    """Elementwise operations. They compute for less time than the drive takes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin()


def written_bytes() -> int:
    """Return how many bytes drives have written for this process."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return int(dict(line.split(": ") for line in lines)["write_bytes"])


def activation_comparisons(
    folder: Path, size: int, child: LoopChild | None
) -> Iterator[Comparison]:
    """Compare steps that save about `size` bytes with the slower of computing and loop."""
    # A row of a Block saves its input, before and after norm, and those of gelu and down.
    layers = 32
    kinds: dict[str, tuple[Callable[[], torch.nn.Module], int]] = {
        "half a transformer": (Block, (2 + 8) * WIDTH * 4),
        "elementwise": (Waves, WIDTH * 4),
    }
    for name, (kind, row_bytes) in kinds.items():
        model = torch.nn.Sequential(*(kind() for _ in range(layers)))
        rows = max(size // layers // row_bytes, 1)
        batch = torch.randn(rows, WIDTH, requires_grad=True)

        def saving() -> contextlib.AbstractContextManager[None]:
            memory = size // MEMORY_SHARE
            return nvmeio.torch.save_on_disk(folder, min_bytes="64KiB", memory=memory)

        def step(
            context: Callable[[], contextlib.AbstractContextManager[None]],
            model: torch.nn.Module,
            batch: torch.Tensor,
        ) -> None:
            with context():
                loss = model(batch).sum()
            loss.backward()
            model.zero_grad()
            batch.grad = None

        before = written_bytes()
        step(saving, model, batch)
        # In whole blocks. Nothing else in this process writes meanwhile.
        span = max((written_bytes() - before) // BLOCK, 1) * BLOCK
        file = folder / f"activations-{name.partition(' ')[0]}"
        with open(file, "wb") as made:
            for _ in range(span // BLOCK):
                made.write(bytes(BLOCK))

        def ours(
            model: torch.nn.Module = model, batch: torch.Tensor = batch, span: int = span
        ) -> Sample:
            return measured(lambda: (step(saving, model, batch), 2 * span)[1])

        def alone(
            model: torch.nn.Module = model, batch: torch.Tensor = batch, span: int = span
        ) -> Sample:
            null = contextlib.nullcontext
            return measured(lambda: (step(null, model, batch), 2 * span)[1])

        def limit(
            file: Path = file, span: int = span, alone: Callable[[], Sample] = alone
        ) -> Sample:
            assert child is not None
            words = (file, BLOCK, DEPTH, span, "huge")
            loop = child.run("plain blocks", "write", *words)
            loop += child.run("plain blocks", "read", *words)
            return max(loop, alone(), key=lambda sample: sample.seconds)

        work = f"a step, {layers} layers, {name}"
        if child is not None:
            yield Comparison(
                work,
                ("save_on_disk", "the larger of computing alone and the loop"),
                (ours, limit),
                False,
                (Goal("time", 1.25),),
            )
        yield Comparison(work, ("save_on_disk", "in memory"), (ours, alone), False)
