"""Bind the arguments of DeepSpeed's methods that have one named ``async``, a keyword."""

from collections.abc import Mapping, Sequence
from typing import Any

from nvmeio._arguments.keywords import hint_among

__all__ = ["pread_arguments"]

_NAMES = ("buffer", "filename", "validate", "async", "file_offset")


def pread_arguments(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Return buffer, filename, validate, async, file_offset of ``pread`` or ``pwrite``."""
    if len(args) > len(_NAMES):
        raise TypeError(f"{name}() takes at most {len(_NAMES)} arguments, not {len(args)}")
    bound = dict(zip(_NAMES, args, strict=False))
    for key, value in kwargs.items():
        if key not in _NAMES:
            hint = hint_among(_NAMES, key)
            raise TypeError(f"{name}() has no argument {key!r}{hint}")
        if key in bound:
            raise TypeError(f"{name}() got {key!r} twice")
        bound[key] = value
    bound.setdefault("file_offset", 0)
    for key in _NAMES:
        if key not in bound:
            raise TypeError(f"{name}() lacks the argument {key!r}")
    return tuple(bound[key] for key in _NAMES)
