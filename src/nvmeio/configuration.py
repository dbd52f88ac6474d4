"""What nvmeio was built with, and what it makes of this process."""

import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypedDict, overload

from nvmeio._arguments.checks import word
from nvmeio._arguments.keywords import suggesting
from nvmeio._arguments.units import in_binary
from nvmeio._config.build import EngineInfo, Feature, build_record, versions
from nvmeio._config.options import environment, handle_options
from nvmeio._native.info import engines, resources
from nvmeio._native.pool import pool_stats
from nvmeio._native.settings import selected_kernels

__all__ = ["show_config"]


class Build(TypedDict):
    """What was settled when nvmeio was compiled."""

    compiler: str
    cython: str
    debug: bool
    test_build: bool
    features: dict[str, Feature]


class Configuration(TypedDict):
    """What ``show_config("dicts")`` returns."""

    versions: dict[str, str | None]
    build: Build
    engines: dict[str, EngineInfo]
    handle: dict[str, Any]
    pool: dict[str, Any]
    limits: dict[str, int | None]
    copies: dict[str, str]
    environment: dict[str, str]


@overload
def show_config(mode: Literal["stdout"] = "stdout") -> None: ...


@overload
def show_config(mode: Literal["dicts"]) -> Configuration: ...


@suggesting
def show_config(mode: Literal["stdout", "dicts"] = "stdout") -> Configuration | None:
    """Show what nvmeio was built with, what works here, and what a handle would use.

    Parameters
    ----------
    mode : {"stdout", "dicts"}, default "stdout"
        Whether to print it, or to return it.

    Returns
    -------
    dict or None
        With mode "dicts", a dict of these dicts, which can be written as JSON:
        ``versions`` of nvmeio, Python, numpy and torch, None for what is not installed;
        ``build``, the compiler and the optional libraries; ``engines``, as ``engines()``
        returns them; ``handle``, the options of ``Handle()``; ``pool``, as
        ``pool_stats()`` returns it; ``limits``, which are ``processors``,
        ``memory_bytes`` and ``memlock_bytes`` (None: no limit); ``copies``, the kernels
        for small and for large ones; and ``environment``, the variables that begin with
        ``NVMEIO_``.  Where the environment has a value that is refused, ``handle`` or
        ``pool`` is ``{"error": message}``.

    Raises
    ------
    ValueError
        ``mode`` is neither of the two.

    See Also
    --------
    numpy.show_config : The same for numpy.

    Notes
    -----
    Tries every engine, which takes 0.1 s.  ``nvmeio doctor`` looks at drives as well, and
    says what would help.

    Examples
    --------
    >>> nvmeio.show_config("dicts")["handle"]["queue_depth"]
    128
    """
    if word("mode", mode, ("stdout", "dicts")) == "dicts":
        return _configuration()
    # What the caller has asked for.
    sys.stdout.write("".join(f"{line}\n" for line in _lines(_configuration())))
    return None


def _configuration() -> Configuration:
    record = build_record()
    found = engines()
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    small, large = selected_kernels()
    return {
        "versions": versions(),
        "build": {
            "compiler": record["compiler"],
            "cython": record["cython"],
            "debug": record["debug"],
            "test_build": record["test_build"],
            "features": record["features"],
        },
        "engines": found,
        "handle": _or_error(lambda: handle_options({}, lambda: found)),
        "pool": _or_error(pool_stats),
        "limits": {
            **resources(),
            "memlock_bytes": None if memlock == resource.RLIM_INFINITY else memlock,
        },
        "copies": {"small": small, "large": large},
        "environment": environment(),
    }


def _or_error(find: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what is found, or why the environment does not allow it."""
    try:
        return find()
    except (OSError, ValueError) as error:
        return {"error": str(error)}


def _lines(found: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    for name, value in found.items():
        if isinstance(value, Mapping) and value:
            yield f"{indent}{name}:"
            yield from _lines(value, indent + "  ")
        elif value != "":
            yield f"{indent}{name}: {_text(name, value)}"


def _text(name: str, value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    if isinstance(value, int) and ("bytes" in name or name == "block_size"):
        return in_binary(value)
    if name == "memlock_bytes" and value is None:
        return "no limit"
    return "none" if value in (None, {}) else str(value)
