"""The settings that ``nvmeio tune`` tries, the cheapest of each kind first."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from nvmeio._values import DEFAULTS
from nvmeio.cli.units import in_binary

__all__ = [
    "DEFAULT",
    "GRID_BLOCKS",
    "GRID_DEPTHS",
    "Options",
    "bounces",
    "described",
    "distinct",
    "grid",
    "variations",
]

# As aio_handle(**options) takes them.
Options = dict[str, Any]

DEFAULT: Options = dict(DEFAULTS)

GRID_BLOCKS = (128 << 10, 512 << 10, 1 << 20, 4 << 20)
GRID_DEPTHS = (8, 32, 128)

WORKERS = (2, 4)


def grid() -> list[Options]:
    """Return the default, and every block size with every depth.

    Returns
    -------
    list of dict
        The default first.
    """
    pairs = sorted(
        itertools.product(GRID_BLOCKS, GRID_DEPTHS), key=lambda pair: pair[0] * pair[1]
    )
    options = [
        {**DEFAULT, "block_size": block, "queue_depth": depth} for block, depth in pairs
    ]
    return distinct([DEFAULT, *options])


def variations(
    winners: Iterable[Options], engines: Sequence[str], processors: int
) -> list[Options]:
    """Return winners and what differs from one in one option.

    Parameters
    ----------
    winners : iterable of dict
        Of the grid.
    engines : sequence of str
        Those that work here, the one that "auto" takes first.
    processors : int
        How many there are: more workers than that are not tried.

    Returns
    -------
    list of dict
        The winners first; the default is among them.
    """
    winners = list(winners)
    found = [*winners, DEFAULT]
    for winner in winners:
        changes: list[Options] = [{"single_submit": True}]
        changes += [
            {"intra_op_parallelism": count} for count in WORKERS if count <= processors
        ]
        changes += [{"engine": engine} for engine in engines[1:]]
        found += [{**winner, **change} for change in changes]
    return distinct(found)


def bounces(winner: Options) -> list[Options]:
    """Return a winner with every kind of bounce.

    Parameters
    ----------
    winner : dict
        Of the variations.

    Returns
    -------
    list of dict
        "auto" first.
    """
    return [{**winner, "bounce": kind} for kind in ("auto", "never", "always")]


def distinct(candidates: Iterable[Options]) -> list[Options]:
    """Return candidates without repetition, in their order.

    Parameters
    ----------
    candidates : iterable of dict
        Some of which may be equal.

    Returns
    -------
    list of dict
        Each once.
    """
    found: list[Options] = []
    for candidate in candidates:
        if candidate not in found:
            found.append(candidate)
    return found


def described(options: Options) -> str:
    """Say what settings are, in a line.

    Parameters
    ----------
    options : dict
        Of a handle.

    Returns
    -------
    str
        Such as "1 MiB x 32, 2 workers"; what is usual is left out.
    """
    words = [f"{in_binary(options['block_size'])} x {options['queue_depth']}"]
    if options["intra_op_parallelism"] > 1:
        words.append(f"{options['intra_op_parallelism']} workers")
    if options["single_submit"]:
        words.append("one by one")
    words += [options[name] for name in ("engine",) if options[name] != "auto"]
    if options["bounce"] != "auto":
        words.append(f"bounce {options['bounce']}")
    return ", ".join(words)
