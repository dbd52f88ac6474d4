"""The elementwise optimizers, which can be offloaded, and their states."""

from collections.abc import Callable
from typing import Any

import torch
from torch import optim

__all__ = ["KEPT", "refuse", "refuse_options", "states_of", "temporary_copies"]

Group = dict[str, Any]

# States that are a single number, and stay in memory.
KEPT = frozenset({"step", "mu_product"})


def _adam(group: Group) -> tuple[str, ...]:
    names = ("exp_avg", "exp_avg_sq")
    return (*names, "max_exp_avg_sq") if group["amsgrad"] else names


def _rmsprop(group: Group) -> tuple[str, ...]:
    momentum = ("momentum_buffer",) if group["momentum"] > 0 else ()
    return ("square_avg", *momentum, *(("grad_avg",) if group["centered"] else ()))


# The states that are as large as the parameter, as a function of its group's options.
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

# How many temporary copies of a parameter torch makes for its update, at most; checked by
# test_memory_of_a_step_stays_within_the_limit in tests/test_torch_optimizers.py.
_LOOP_COPIES = 4
_FOREACH_COPIES = 5


def refuse(optimizer: Any) -> None:
    """Raise TypeError if an optimizer is not one that can be offloaded."""
    if not isinstance(optimizer, optim.Optimizer):
        raise TypeError(
            f"optimizer is of type {type(optimizer).__qualname__}; it must be an "
            "optimizer of torch.optim"
        )
    kind = type(optimizer)
    if kind not in _STATES:
        names = ", ".join(sorted(each.__name__ for each in _STATES))
        raise TypeError(
            f"{kind.__qualname__} cannot be offloaded; use one of {names} of torch.optim, "
            "and not a subclass, because only elementwise optimizers can be offloaded"
        )


def refuse_options(group: Group, number: int) -> None:
    """Raise ValueError for options that do not allow moving the states."""
    for option in ("differentiable", "capturable"):
        if group.get(option):
            raise ValueError(
                f"group {number} has {option}=True, which cannot be offloaded; set it to "
                "False"
            )


def states_of(kind: type[optim.Optimizer], group: Group) -> tuple[str, ...]:
    """Return the names of the states of a group's parameters that are kept in a file."""
    return _STATES[kind](group)


def temporary_copies(group: Group, param: torch.Tensor) -> tuple[int, bool]:
    """Return how many copies an update makes of each parameter, and if all at once."""
    if group.get("fused"):
        return 0, False
    foreach = group.get("foreach")
    if foreach or (foreach is None and param.device.type != "cpu"):
        return _FOREACH_COPIES, True
    return _LOOP_COPIES, False
