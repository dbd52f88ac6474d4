"""Show how nvmeio was built, and what it uses in this process."""

import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypedDict, overload

from nvmeio._arguments.checks import word
from nvmeio._arguments.units import in_binary
from nvmeio._config.build import EngineInfo, Feature, versions
from nvmeio._config.options import environment, handle_options
from nvmeio._native.info import build_info, resources
from nvmeio._native.pool import pool_stats
from nvmeio._native.settings import selected_kernels

__all__ = ["show_config"]


class Build(TypedDict):
    """How nvmeio was compiled."""

    compiler: str
    cython: str
    debug: bool
    test_build: bool
    features: dict[str, Feature]


class Configuration(TypedDict):
    """The result of ``show_config("dicts")``."""

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


def show_config(mode: Literal["stdout", "dicts"] = "stdout") -> Configuration | None:
    """Show how nvmeio was built, which engines work, and the options of a handle.

    Parameters
    ----------
    mode : {"stdout", "dicts"}, default "stdout"
        Print the configuration, or return it.

    Returns
    -------
    dict or None
        With mode "dicts", a dict that JSON can represent.  If an environment variable has
        an invalid value, ``handle`` or ``pool`` is ``{"error": message}``.

        ``versions``
            The versions of nvmeio, Python, numpy and torch; None if not installed.
        ``build``
            The compiler and the optional libraries.
        ``engines``
            As ``engines()`` returns them.
        ``handle``
            The options of ``Handle()``.
        ``pool``
            As ``pool_stats()`` returns it.
        ``limits``
            ``processors``, ``memory_bytes`` and ``memlock_bytes`` (None: no limit).
        ``copies``
            The kernels for small and for large copies.
        ``environment``
            The environment variables that begin with ``NVMEIO_``.

    Raises
    ------
    ValueError
        ``mode`` is unknown.

    See Also
    --------
    numpy.show_config : The same for numpy.

    Notes
    -----
    Tries every engine, which takes 0.1 s.  The command ``nvmeio doctor`` also examines
    drives, and recommends improvements.

    Examples
    --------
    >>> nvmeio.show_config("dicts")["handle"]["queue_depth"]
    128
    """
    if word("mode", mode, ("stdout", "dicts")) == "dicts":
        return _configuration()
    # Not a print() of the library: the caller has asked for this output.
    sys.stdout.write("".join(f"{line}\n" for line in _lines(_configuration())))
    return None


def _configuration() -> Configuration:
    record = build_info()
    found = record["engines"]
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
    """Return the result of ``find``, or the error of an invalid environment variable."""
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
