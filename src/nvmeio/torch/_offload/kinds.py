"""The optimizers that update each element of a parameter by itself, and their states."""

from collections.abc import Callable
from typing import Any

import torch
from torch import optim

__all__ = ["KEPT", "refuse", "refuse_options", "states_of", "temporary_copies"]

Group = dict[str, Any]

# States of one number each stay in memory.
KEPT = frozenset({"step", "mu_product"})


def _adam(group: Group) -> tuple[str, ...]:
    names = ("exp_avg", "exp_avg_sq")
    return (*names, "max_exp_avg_sq") if group["amsgrad"] else names


def _rmsprop(group: Group) -> tuple[str, ...]:
    momentum = ("momentum_buffer",) if group["momentum"] > 0 else ()
    return ("square_avg", *momentum, *(("grad_avg",) if group["centered"] else ()))


# The states that have the size of a parameter, by the options of its group.
_STATES: dict[type[optim.Optimizer], Callable[[Group], tuple[str, ...]]] = {
    optim.SGD: lambda group: ("momentum_buffer",) if group["momentum"] != 0 else (),
    optim.Adam: _adam,
    optim.AdamW: _adam,
    optim.NAdam: lambda _: ("exp_avg", "exp_avg_sq"),
    optim.RAdam: lambda _: ("exp_avg", "exp_avg_sq"),
    optim.RMSprop: _rmsprop,
    optim.Adagrad: lambda _: ("sum",),
    optim.Adamax: lambda _: ("exp_avg", "exp_inf"),
}

# How many copies of a parameter torch makes while it updates it, at most: measured by
# test_memory_of_a_step_stays_within_the_limit of tests/test_torch_optimizers.py.
_LOOP_COPIES = 4
_FOREACH_COPIES = 5


def refuse(optimizer: Any) -> None:
    """Refuse what is no optimizer of the list."""
    if not isinstance(optimizer, optim.Optimizer):
        raise TypeError(
            f"optimizer is of type {type(optimizer).__qualname__}; it must be one of "
            "torch.optim"
        )
    kind = type(optimizer)
    if kind not in _STATES:
        names = ", ".join(sorted(each.__name__ for each in _STATES))
        raise TypeError(
            f"{kind.__qualname__} cannot be offloaded: only optimizers that update each "
            f"element by itself can, which are {names} of torch.optim, and no subclasses"
        )


def refuse_options(group: Group, number: int) -> None:
    """Refuse options under which the states cannot move."""
    for option in ("differentiable", "capturable"):
        if group.get(option):
            raise ValueError(
                f"group {number} has {option}=True, which cannot be offloaded: its update "
                "must not be recorded"
            )


def states_of(kind: type[optim.Optimizer], group: Group) -> tuple[str, ...]:
    """Return the names of the states that a parameter of a group has in a file."""
    return _STATES[kind](group)


def temporary_copies(group: Group, param: torch.Tensor) -> tuple[int, bool]:
    """Return how many copies of a parameter its update makes; whether all at once."""
    if group.get("fused"):
        return 0, False
    foreach = group.get("foreach")
    if foreach or (foreach is None and param.device.type != "cpu"):
        return _FOREACH_COPIES, True
    return _LOOP_COPIES, False
