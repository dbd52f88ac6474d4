"""The options of a handle: from arguments, else environment, else profile, else default."""

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

from nvmeio._arguments.checks import word
from nvmeio._arguments.types import Path
from nvmeio._config.constants import DEFAULTS, TUNABLE, checked
from nvmeio._events.log import log

__all__ = [
    "environment",
    "handle_options",
    "profile_arguments",
    "variable",
]

# Values that the environment can give to options that are neither words nor numbers.
_TEXTS: dict[str, Any] = {"0": False, "1": True, "auto": "auto"}


def variable(name: str) -> str:
    """Return the name of an option's environment variable."""
    return f"NVMEIO_{name.upper()}"


def environment() -> dict[str, str]:
    """Return nvmeio's own environment variables that are set."""
    own = (name for name in sorted(os.environ) if name.startswith("NVMEIO_"))
    return {name: os.environ[name] for name in own}


# The type of nvmeio.engines, which this module must not import.
Engines = Callable[[], Mapping[str, Any]]


def handle_options(arguments: Mapping[str, Any], engines: Engines) -> dict[str, Any]:
    """Return all options of ``nvmeio.Handle`` by name."""
    passed = {name: value for name, value in arguments.items() if value is not None}
    found = {name: checked(name, value, name) for name, value in passed.items()}
    for name in DEFAULTS:
        if name not in found and (text := os.environ.get(variable(name))):
            found[name] = _of_text(name, text)
    # Look for a profile only if it could set an option that is still missing.
    if any(name not in found for name in TUNABLE):
        tuned = _environment_profile()
        found |= _usable(
            {name: v for name, v in tuned.items() if name not in found}, engines
        )
    return {**DEFAULTS, **found}


def profile_arguments(
    path: Path, op: str, arguments: Mapping[str, Any], engines: Engines
) -> dict[str, Any]:
    """Return the arguments of ``Handle.from_profile(path, op=op, **arguments)``."""
    # Imported on first use, here and below, because few programs use it.
    from nvmeio._config.lookup import profile_at

    op = word("op", op, ("both", "read", "write"))
    passed = {name: value for name, value in arguments.items() if value is not None}
    tuned = getattr(profile_at(path), op).options
    # Leave these out: arguments and environment take precedence over the profile.
    known = {name for name in tuned if name in passed or os.environ.get(variable(name))}
    return {
        **_usable({name: tuned[name] for name in tuned.keys() - known}, engines),
        **passed,
    }


def _of_text(name: str, text: str) -> Any:
    """Convert the text of an option's environment variable to a value."""
    value: Any = text
    if name == "direct" and text not in _TEXTS:
        raise ValueError(f"{variable(name)} is {text!r}; it must be auto, 0 or 1")
    if name in ("direct", "check_overlap"):
        value = _TEXTS.get(text, text)
    elif isinstance(DEFAULTS[name], int):
        try:
            value = int(text)
        except ValueError:
            raise ValueError(
                f"{variable(name)} is {text!r}; it must be an integer"
            ) from None
    try:
        return checked(name, value, variable(name))
    except TypeError:
        raise ValueError(f"{variable(name)} is {text!r}; it must be 0 or 1") from None


def _environment_profile() -> Mapping[str, Any]:
    """Return the options of the profile that NVMEIO_PROFILE selects, if it is set."""
    value = os.environ.get("NVMEIO_PROFILE")
    if not value:
        return {}
    from nvmeio._config.lookup import environment_options

    return environment_options(value)


def _usable(tuned: Mapping[str, Any], engines: Engines) -> dict[str, Any]:
    """Return a profile's options, with "auto" for an engine that does not work here."""
    if "engine" not in tuned:
        return dict(tuned)
    return {**tuned, "engine": _engine_once(tuned["engine"], engines)}


def _engine_in_place_of(engine: str, engines: Engines) -> str:
    """Return a profile's engine, or "auto" if it does not work in this process."""
    if engine == "auto":
        return engine
    found = engines()[engine]
    if found["works"]:
        return engine
    log.warning("the profile's engine %s cannot be used: %s", engine, found["reason"])
    return "auto"


# Cached, because trying the engines takes 40 ms (2026-11-21, 2 cores).
_engine_once = functools.cache(_engine_in_place_of)
