"""Sizes for people: formatting and parsing."""

import re
from fractions import Fraction
from typing import Any

from nvmeio._arguments.checks import integer, shown

__all__ = ["in_binary", "needed_and_free", "size_of"]

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def in_binary(nbytes: float) -> str:
    """Format a size with the largest unit below its value, such as 1.5 GiB."""
    value, unit = float(nbytes), 0
    while value >= 1024 and unit < len(UNITS) - 1:
        value /= 1024
        unit += 1
    return f"{value:.3g} {UNITS[unit]}" if value < 1000 else f"{value:.0f} {UNITS[unit]}"


def needed_and_free(needed: int, free: int) -> str:
    """Return the text for a lack of space: how much is needed, how much is free."""
    return f"{in_binary(needed)} ({needed} bytes) are needed, and {free} are free"


def size_of(name: str, value: Any, least: int) -> int:
    """Parse a number of bytes: an integer, or text such as "64MiB" or "1.5G".

    The units are powers of 1024.  Fractions of a byte are rounded down.
    """
    if isinstance(value, str):
        found = re.fullmatch(
            r"(\d{1,18}(?:\.\d{1,9})?) ?([KMGT]?)(?:i?B)?", value.strip(), re.A | re.I
        )
        if not found or ("." in found[1] and not found[2]):
            words = 'it must be a number of bytes, or text such as "64MiB" or "1.5GiB"'
            raise ValueError(f"{name} is {value!r:.50}; {words}")
        unit = 1024 ** " KMGT".index(found[2].upper() or " ")
        nbytes = int(Fraction(found[1]) * unit)
    else:
        try:
            nbytes = integer(name, value)
        except TypeError:
            words = 'it must be a number of bytes, or text such as "64MiB"'
            raise TypeError(f"{name} is {shown(value)}; {words}") from None
    if not least <= nbytes < 1 << 63:
        limit = f"{least} bytes ({in_binary(least)}) or more"
        raise ValueError(f"{name} is {value!r:.50}; it must be {limit}")
    return nbytes
