"""What the options of a handle are by default, and what they may be.

Those that a device can be tuned by; direct is file.pyx's.
"""

from typing import Any

from nvmeio.arguments import LIMITS, flag, whole, word
from nvmeio.workers import BOUNCES, ENGINES

__all__ = ["DEFAULTS", "checked"]

DEFAULTS: dict[str, int | bool | str] = {
    "block_size": 1 << 20,
    "queue_depth": 128,
    "single_submit": False,
    "overlap_events": False,
    "intra_op_parallelism": 1,
    "engine": "auto",
    "bounce": "auto",
}

_WORDS = {"engine": ENGINES, "bounce": tuple(BOUNCES)}


def checked(option: str, value: Any, name: str) -> Any:
    """Return the value of an option, or raise what names it.

    Parameters
    ----------
    option : str
        One of ``DEFAULTS``.
    value : object
        What was passed or found.
    name : str
        Of where it comes from, for the message.

    Returns
    -------
    int, bool or str
        The value, as the option's type.

    Raises
    ------
    TypeError, ValueError
        It is of the wrong type, out of its limits or unknown.
    """
    if option in LIMITS:
        return whole(name, value, 1, LIMITS[option])
    if option in _WORDS:
        return word(name, value, _WORDS[option])
    return flag(name, value)
