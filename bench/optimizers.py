"""Rows of offloaded optimizers, beside the update in memory, the plain loop, DeepSpeed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from comparisons import Comparison, Goal, Sample, measured
from loop_child import LoopChild
from peers import Peers
from zero_child import zero_child

import nvmeio.torch

__all__ = ["optimizer_comparisons"]

BLOCK = 1 << 20
# The memory that the windows of an offloaded optimizer take.
DEPTH = 96
COUNT = 32
FORMS: dict[str, dict[str, bool]] = {
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def params_of(size: int) -> list[torch.nn.Parameter]:
    """Make parameters with gradients, for which AdamW has `size` bytes of states."""
    made = [torch.nn.Parameter(torch.ones(size // COUNT // 8)) for _ in range(COUNT)]
    for param in made:
        param.grad = torch.full_like(param, 0.5)
    return made


def optimizer_comparisons(
    folder: Path,
    size: int,
    child: LoopChild | None,
    peers: Peers,
    stack: contextlib.ExitStack,
) -> Iterator[Comparison]:
    """Compare a step of AdamW with the slower of its update in memory and the loop."""
    if child is None:
        return
    zero = zero_child(folder, size, peers, stack)
    file = folder / "states"
    with open(file, "wb") as made:
        for _ in range(size // BLOCK):
            made.write(bytes(BLOCK))
    for form, options in FORMS.items():
        ordinary: Any = torch.optim.AdamW(params_of(size), **options)
        inner = torch.optim.AdamW(params_of(size), **options)
        offloaded = stack.enter_context(nvmeio.torch.offload(inner, folder / form))

        def step(optimizer: Any) -> Sample:
            # The states are read and written.
            return measured(lambda: (optimizer.step(), 2 * size)[1])

        def alone(optimizer: Any = ordinary) -> Sample:
            return step(optimizer)

        def limit(optimizer: Any = ordinary) -> Sample:
            loop = child.run("plain both", file, BLOCK, DEPTH, size, "huge")
            return max(loop, step(optimizer), key=lambda sample: sample.seconds)

        def ours(optimizer: Any = offloaded) -> Sample:
            return step(optimizer)

        yield Comparison(
            f"a step of AdamW, {form}",
            ("offloaded", "the larger of its update and the loop"),
            (ours, limit),
            False,
            (Goal("time", 1.2),),
        )
        yield Comparison(
            f"a step of AdamW, {form}", ("offloaded", "in memory"), (ours, alone), False
        )
    if zero is not None:
        yield Comparison(
            f"a step of AdamW, {form}",
            ("offloaded", "DeepSpeed's ZeRO-3 on NVMe"),
            (ours, zero.step),
            False,
            (Goal("time", 0.7),),
        )
