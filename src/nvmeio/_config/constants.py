"""The options of a handle: their defaults and limits; those of numbers come from C."""

from typing import Any

from nvmeio._arguments.checks import direct_choice, flag, whole, word
from nvmeio._native.settings import LIMITS

__all__ = ["BOUNCES", "DEFAULTS", "ENGINES", "LIMITS", "TUNABLE", "checked"]

ENGINES = ("auto", "io_uring", "libaio", "threads", "sync")
BOUNCES = ("auto", "always", "never")

DEFAULTS: dict[str, int | bool | str] = {
    "engine": "auto",
    "direct": "auto",
    "bounce": "auto",
    "block_size": 1 << 20,
    "queue_depth": 128,
    "workers": 1,
    "check_overlap": False,
}

# The options that `nvmeio tune` measures and a profile contains.
TUNABLE = ("engine", "bounce", "block_size", "queue_depth", "workers")

_WORDS = {"engine": ENGINES, "bounce": BOUNCES}


def checked(option: str, value: Any, name: str) -> Any:
    """Check the value of an option and return it; errors call it ``name``."""
    if option in LIMITS:
        return whole(name, value, 1, LIMITS[option])
    if option in _WORDS:
        return word(name, value, _WORDS[option])
    if option == "direct":
        return direct_choice(name, value)
    return flag(name, value)
