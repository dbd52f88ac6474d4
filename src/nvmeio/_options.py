"""The options of a handle: bound and checked, or from the environment, or a profile."""

import functools
import logging
import os
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from nvmeio._types import Path
from nvmeio._values import DEFAULTS, checked
from nvmeio.arguments import word
from nvmeio.info import engines

__all__ = ["aio_handle", "profile_arguments"]

_log = logging.getLogger("nvmeio")

# In place of the defaults, which come after the environment and a profile.
_ABSENT: Any = object()

# Of these None says the same.
_OPTIONAL = ("block_size", "queue_depth", "engine", "bounce")

_VARIABLES = {
    "block_size": "NVMEIO_BLOCK_SIZE",
    "queue_depth": "NVMEIO_QUEUE_DEPTH",
    "engine": "NVMEIO_ENGINE",
}


# It bears the name of the class, for Python puts a function's name into what it says of
# arguments that are unknown or too many.
def aio_handle(
    block_size: Any = None,
    queue_depth: Any = None,
    single_submit: Any = _ABSENT,
    overlap_events: Any = _ABSENT,
    intra_op_parallelism: Any = _ABSENT,
    *,
    engine: Any = None,
    direct: Any = "auto",
    bounce: Any = None,
    errors: Any = "raise",
) -> dict[str, Any]:
    """Return the options of ``nvmeio.aio_handle`` by name.

    Raises
    ------
    OSError
        There is no profile where ``NVMEIO_PROFILE`` says, or it cannot be read.
    TypeError
        An argument is unknown, given twice or of the wrong type.
    ValueError
        A value is out of its limits or unknown, the environment's included.
    """
    passed = _passed(
        block_size=block_size,
        queue_depth=queue_depth,
        single_submit=single_submit,
        overlap_events=overlap_events,
        intra_op_parallelism=intra_op_parallelism,
        engine=engine,
        bounce=bounce,
    )
    options = {name: checked(name, value, name) for name, value in passed.items()}
    rest = _others(options)
    return {
        **options,
        # A profile is looked for only where it has anything to say.
        **(_settled(rest, _environment_profile()) if rest else {}),
        "direct": direct,
        "errors": word("errors", errors, ("raise", "status")),
    }


def profile_arguments(path: Path, op: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``aio_handle.from_profile(path, op=op, **arguments)``.

    Raises
    ------
    OSError
        The device has no profile, or it cannot be read.
    ValueError
        The profile is broken, or ``op`` is unknown.
    """
    # Loaded on first use, here and below, for few programs use it.
    from nvmeio._lookup import profile_at

    op = word("op", op, ("both", "read", "write"))
    passed = _passed(**arguments)
    tuned = getattr(profile_at(path), op).options
    return {**_settled(_others(passed), tuned), **passed}


def _passed(**arguments: Any) -> dict[str, Any]:
    """Leave out what stands for nothing."""
    return {
        name: value
        for name, value in arguments.items()
        if value is not _ABSENT and not (value is None and name in _OPTIONAL)
    }


def _environment_profile() -> Mapping[str, Any]:
    """Return the options of the profile that the environment asks for, if it does."""
    value = os.environ.get("NVMEIO_PROFILE")
    if not value:
        return {}
    from nvmeio._lookup import environment_options

    return environment_options(value)


def _others(names: Collection[str]) -> list[str]:
    """Return the options that are not among these."""
    return [name for name in DEFAULTS if name not in names]


def _settled(names: Iterable[str], tuned: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the environment sets, or else a profile, or else the defaults."""
    return {name: _setting(name, tuned) for name in names}


def _setting(name: str, tuned: Mapping[str, Any]) -> Any:
    variable = _VARIABLES.get(name)
    text = os.environ.get(variable) if variable else None
    if not variable or not text:
        value = tuned.get(name, DEFAULTS[name])
        return _usable_once(value) if name == "engine" else value
    if name == "engine":
        # workers.pyx reads it, for "auto" that was passed means the same.
        return "auto"
    try:
        number = int(text)
    except ValueError:
        raise ValueError(f"{variable} is {text!r}; it must be an integer") from None
    return checked(name, number, variable)


def _usable(engine: str) -> str:
    """Return a profile's engine, or "auto" where it does not work in this process."""
    if engine == "auto":
        return engine
    found = engines()[engine]
    if found["works"]:
        return engine
    _log.warning("the profile's engine %s cannot be used: %s", engine, found["reason"])
    return "auto"


# To try the engines takes 40 ms (2026-11-21, 2 cores).
_usable_once = functools.cache(_usable)
