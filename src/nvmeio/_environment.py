"""Settings that the environment may give where the caller does not."""

import os

__all__ = ["setting"]


def setting(value: int | None, variable: str, default: int) -> int:
    """Return what was passed, or the environment's value, or the default.

    Parameters
    ----------
    value : int or None
        What the caller passed; it wins.
    variable : str
        Of the environment; empty counts as not set.
    default : int
        Where neither is given.

    Raises
    ------
    ValueError
        The environment's value is not an integer.
    """
    if value is not None:
        return value
    text = os.environ.get(variable)
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{variable} is {text!r}; it must be an integer") from None
