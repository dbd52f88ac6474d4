"""The options of a handle: bound, checked, or taken from the environment."""

import os
from typing import Any

from nvmeio.arguments import LIMITS, flag, whole, word
from nvmeio.lanes import BOUNCES, ENGINES

__all__ = ["aio_handle"]


# It bears the name of the class, for Python puts a function's name into what it says of
# arguments that are unknown or too many.
def aio_handle(
    block_size: Any = None,
    queue_depth: Any = None,
    single_submit: Any = False,
    overlap_events: Any = False,
    intra_op_parallelism: Any = 1,
    *,
    engine: Any = "auto",
    direct: Any = "auto",
    bounce: Any = "auto",
    errors: Any = "raise",
) -> dict[str, Any]:
    """Return the options of ``nvmeio.aio_handle`` by name.

    Raises
    ------
    TypeError
        An argument is unknown, given twice or of the wrong type.
    ValueError
        A value is out of its limits or unknown, the environment's included.
    """
    lanes_max = LIMITS["intra_op_parallelism"]
    return {
        "block_size": _number("block_size", block_size, 1 << 20),
        "queue_depth": _number("queue_depth", queue_depth, 128),
        "single_submit": flag("single_submit", single_submit),
        "overlap_events": flag("overlap_events", overlap_events),
        "intra_op_parallelism": whole(
            "intra_op_parallelism", intra_op_parallelism, 1, lanes_max
        ),
        "engine": word("engine", engine, ENGINES),
        "direct": direct,
        "bounce": word("bounce", bounce, BOUNCES),
        "errors": word("errors", errors, ("raise", "status")),
    }


def _number(name: str, value: Any, default: int) -> int:
    """Return what was passed, or the environment's value, or the default."""
    most = LIMITS[name]
    if value is not None:
        return whole(name, value, 1, most)
    variable = f"NVMEIO_{name.upper()}"
    text = os.environ.get(variable)
    if not text:
        return default
    try:
        number = int(text)
    except ValueError:
        raise ValueError(f"{variable} is {text!r}; it must be an integer") from None
    return whole(variable, number, 1, most)
