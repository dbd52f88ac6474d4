"""What a forked child does anew.  Whether there was a fork is asked of the C library."""

import os
from collections.abc import Callable

__all__ = ["call_in_child"]

_calls: list[Callable[[], object]] = []


def call_in_child(function: Callable[[], object]) -> None:
    """Have a function called in every child before anything else of nvmeio's runs there."""
    _calls.append(function)


def _call_all() -> None:
    for function in _calls:
        function()


os.register_at_fork(after_in_child=_call_all)
