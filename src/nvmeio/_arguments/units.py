"""Sizes for people: formatting and parsing."""

import re
from typing import Any

from nvmeio._arguments.checks import integer, shown

__all__ = ["in_binary", "needed_and_free", "parse_size", "size_of"]

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


def parse_size(text: str, *, decimal: bool = False) -> tuple[int, bool] | None:
    """Parse text such as "64MiB" or "1.5G"; return None if it is no number of bytes.

    Return the bytes, rounded down, and whether they were whole.  The units are powers of
    1024; with `decimal`, KB, MB, GB and TB are powers of 1000.
    """
    pattern = r"(\d{1,18})(?:\.(\d{1,9}))? ?([KMGT]?)(i?B)?"
    found = re.fullmatch(pattern, text.strip(), re.ASCII | re.IGNORECASE)
    if not found or (found[2] and not found[3]):
        return None
    base = 1000 if decimal and (found[4] or "").upper() == "B" else 1024
    unit: int = base ** " KMGT".index(found[3].upper() or " ")
    places = found[2] or ""
    nbytes, rest = divmod(int(found[1] + places) * unit, 10 ** len(places))
    return nbytes, not rest


def size_of(name: str, value: Any, least: int, *, decimal: bool = False) -> int:
    """Return a number of bytes: an integer, or text that ``parse_size`` parses.

    Fractions of a byte are rounded down.
    """
    if isinstance(value, str):
        found = parse_size(value, decimal=decimal)
        if found is None:
            words = 'it must be a number of bytes, or text such as "64MiB" or "1.5GiB"'
            raise ValueError(f"{name} is {value!r:.50}; {words}")
        nbytes, _ = found
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
