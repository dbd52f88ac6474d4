"""Reset state in forked children.  The C library detects a fork."""

import os
from collections.abc import Callable

__all__ = ["call_in_child"]

_calls: list[Callable[[], object]] = []


def call_in_child(function: Callable[[], object]) -> None:
    """Call a function in every forked child, before any other code of nvmeio."""
    _calls.append(function)


def _call_all() -> None:
    for function in _calls:
        function()


os.register_at_fork(after_in_child=_call_all)
