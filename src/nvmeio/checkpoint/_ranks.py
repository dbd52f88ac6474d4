"""Agree with the other processes of a training about the step to restore."""

import sys
import warnings
from collections.abc import Callable
from typing import Any

from nvmeio.checkpoint._errors import CheckpointError
from nvmeio.checkpoint._steps import Steps

__all__ = ["agreed_step"]

# What a rank has found, or its error.
_Told = tuple[list[int], str | None]


def agreed_step(steps: Steps, group: Any) -> int | None:
    """Return the newest step that is complete on all ranks of torch.distributed."""
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not (dist.is_available() and dist.is_initialized()):
        return next(steps.listed(level=5), None)

    def gathered(look: Callable[[], list[int]]) -> list[list[int]]:
        """Return what each rank has found; raise on all ranks what one has raised."""
        mine: _Told = [], None
        try:
            mine = look(), None
        except Exception as error:
            mine = [], f"{type(error).__name__}: {error}"
        told: list[_Told] = [mine] * dist.get_world_size(group)
        dist.all_gather_object(told, mine, group=group)
        for rank, (_, failed) in enumerate(told):
            if failed is not None:
                raise CheckpointError(f"rank {rank} cannot list its checkpoints: {failed}")
        return [found for found, _ in told]

    listed = gathered(lambda: [*steps.listed(level=7)])
    every = sorted({step for found in listed for step in found}, reverse=True)
    has = gathered(lambda: [step for step in every if steps.is_complete(step)])
    for step in every:
        lacking = [rank for rank, found in enumerate(has) if step not in found]
        if not lacking:
            return step
        words = f"step {step} is passed over: rank {lacking[0]} has no complete copy of it"
        if len(lacking) > 1:
            words += f", and {len(lacking) - 1} more ranks neither"
        warnings.warn(words, RuntimeWarning, stacklevel=3)
    if not every:
        return None
    some = "; ".join(f"rank {rank} has {found[:3]}" for rank, found in enumerate(has[:4]))
    raise CheckpointError(f"no step is complete on all {len(has)} ranks: {some}")
