"""Agree with the other processes of a training about the step to restore."""

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

from nvmeio._files.kinds import MANIFEST
from nvmeio.checkpoint._errors import CheckpointError, GoneError, is_lost
from nvmeio.checkpoint._steps import Steps

__all__ = ["agree", "agreed_step"]

# How many of the newest steps the ranks compare at once.
_AT_ONCE = 8
# Sends an object to all ranks, and returns those of all, by rank.
Gather = Callable[[Any], list[Any]]


def agreed_step(steps: Steps, group: Any) -> int | None:
    """Return the newest step that is complete on all ranks of torch.distributed."""
    dist: Any = sys.modules.get("torch.distributed")
    alone = dist is None or not (dist.is_available() and dist.is_initialized())

    if not alone and dist.get_rank(group) < 0:
        raise ValueError(
            f"group is {group!r:.100}, which this process, of rank {dist.get_rank()}, is "
            "not in"
        )

    def gather(mine: Any) -> list[Any]:
        if alone:
            return [mine]
        told = [None] * dist.get_world_size(group)
        dist.all_gather_object(told, mine, group=group)
        return told

    return agree(steps, gather)


def agree(steps: Steps, gather: Gather) -> int | None:
    """Return the newest step of which all ranks have the same save.

    ``restore(step)`` then reads that save, where root and copy have different ones.
    """
    words: list[str] = []
    try:
        return _agreed(steps, gather, words)
    finally:
        # Not before: if warnings are errors here, other ranks would wait for this one.
        for each in words:
            warnings.warn(each, RuntimeWarning, stacklevel=4)


def _agreed(steps: Steps, gather: Gather, words: list[str]) -> int | None:
    """Do as ``agree`` does; append to `words` what to warn of."""

    def gathered(look: Callable[[], Any]) -> list[Any]:
        """Return what each rank has found; raise on all ranks what one has raised."""
        mine: tuple[Any, str | None]
        try:
            mine = look(), None
        except Exception as error:
            mine = None, f"{type(error).__name__}: {error}"
        told = gather(mine)
        for rank, (_, failed) in enumerate(told):
            if failed is not None:
                raise CheckpointError(f"rank {rank} cannot read its checkpoints: {failed}")
        return [found for found, _ in told]

    def require_none() -> None:
        # Steps that are damaged, or named but missing, are not none.
        with contextlib.suppress(FileNotFoundError):
            step, _ = steps.read(None, lambda held: None, (MANIFEST,))
            raise CheckpointError(
                f"step {step} was found damaged before, or has come meanwhile"
            )

    listed: list[list[int]] = []
    found: int | CheckpointError | None = None
    while True:
        before, listed = listed, gathered(lambda: steps.names(level=9))
        if listed == before or not any(listed):
            break
        words.clear()
        found = _agree_on(listed, steps, gathered, words)
        if found == max(map(max, filter(None, listed))):
            break
        # Another process may have removed newer ones, after it added newer ones still.
    if isinstance(found, CheckpointError):
        raise found
    if found is None:
        gathered(require_none)
    return found


def _agree_on(
    listed: list[list[int]],
    steps: Steps,
    gathered: Callable[[Callable[[], Any]], list[Any]],
    words: list[str],
) -> int | CheckpointError | None:
    """Return the newest of the steps of all ranks of which all have the same save.

    None if no rank has any; the error if no save is complete on all.
    """
    every = sorted({step for found in listed for step in found}, reverse=True)
    seen: list[list[int]] = [[] for _ in listed]
    # Not all at once, because each needs several requests of an object store.
    for at in range(0, len(every), _AT_ONCE):
        newest = every[at : at + _AT_ONCE]
        has = gathered(functools.partial(_identities, steps, newest))
        saved = {step: [found[step] for found in has] for step in newest}
        agreed = next((step for step in newest if _common(saved[step])), -1)
        nowhere = [step for step in newest if step > agreed and not any(saved[step])]
        damaged = gathered(functools.partial(_damage, steps, nowhere)) if nowhere else []
        for step, saves in saved.items():
            if step == agreed:
                common = _common(saves)
                # The later of two that all have; the words begin with the time.
                steps.agreed = {step: max(common)}
                return step
            if any(saves):
                words.append(_passed_over(step, saves))
            else:
                why = [found[step] for found in damaged if found[step] is not None]
                words += [f"step {step} is passed over: {each}" for each in why[:1]]
            for rank, found in enumerate(saves):
                seen[rank] += [step] if found else []
    if not any(seen):
        return None
    some = "; ".join(f"rank {rank} has {found[:3]}" for rank, found in enumerate(seen[:4]))
    said = f"no save of a step is complete on all {len(seen)} ranks: {some}"
    if set(seen[0]).intersection(*seen[1:]):
        said += (
            "; these are different saves where the numbers are the same, as if each rank "
            "had saved for itself: let one save, and copy its steps to the others"
        )
    return CheckpointError(said)


def _identities(steps: Steps, some: list[int]) -> dict[int, list[str]]:
    return {step: steps.identities(step) for step in some}


def _common(saves: list[list[str]]) -> set[str]:
    return set(saves[0]).intersection(*saves[1:])


def _damage(steps: Steps, some: list[int]) -> dict[int, str | None]:
    """Say why steps are not complete; None if one is no step of a Checkpointer."""
    found: dict[int, str | None] = dict.fromkeys(some)
    for step in some:
        steps.agreed.pop(step, None)
        try:
            # Not by read(), which lists all steps to say that there is no such one.
            steps.here_or_copy(step, lambda held: None, (MANIFEST,))
            found[step] = "it was found damaged before"
        except (FileNotFoundError, GoneError):
            continue
        except (CheckpointError, OSError) as error:
            if not is_lost(error):
                raise
            found[step] = str(error)
    return found


def _passed_over(step: int, saves: list[list[str]]) -> str:
    lacking = [rank for rank, found in enumerate(saves) if not found]
    words = "the ranks have different saves of it"
    if lacking:
        words = f"rank {lacking[0]} has no complete copy of it"
        if len(lacking) > 1:
            words += f", and {len(lacking) - 1} more ranks neither"
    return f"step {step} is passed over: {words}"
