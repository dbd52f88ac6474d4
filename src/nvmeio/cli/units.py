"""Numbers as people read them: sizes, speeds, times."""

import statistics
from collections.abc import Sequence

__all__ = ["in_binary", "in_speed", "in_time", "spread"]

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def in_binary(nbytes: int) -> str:
    """Write a size with the largest unit that keeps it short, such as 1.5 GiB.

    Parameters
    ----------
    nbytes : int
        Bytes.

    Returns
    -------
    str
        With a unit of a power of 1024.
    """
    value, unit = float(nbytes), 0
    while value >= 1024 and unit < len(UNITS) - 1:
        value /= 1024
        unit += 1
    return f"{value:.3g} {UNITS[unit]}" if value < 1000 else f"{value:.0f} {UNITS[unit]}"


def in_speed(nbytes: float, seconds: float) -> str:
    """Write a throughput, such as 3.91 GB/s or 25.3 MB/s.

    Parameters
    ----------
    nbytes : float
        How much was moved.
    seconds : float
        How long it took; what is no time at all counts as a nanosecond.

    Returns
    -------
    str
        With three digits and a unit of a power of 1000.
    """
    speed = nbytes / max(seconds, 1e-9)
    # What rounds to 1000 of a unit is 1 of the next.
    if speed >= 999.5e6:
        return f"{speed / 1e9:.2f} GB/s"
    if speed >= 999.5e3:
        return f"{speed / 1e6:.3g} MB/s"
    return f"{speed / 1e3:.3g} kB/s"


def in_time(microseconds: float) -> str:
    """Write a latency, such as 85 us or 1.2 ms.

    Parameters
    ----------
    microseconds : float
        How long.

    Returns
    -------
    str
        With three digits and a unit.
    """
    if microseconds < 1000:
        return f"{microseconds:.3g} us"
    if microseconds < 1e6:
        return f"{microseconds / 1e3:.3g} ms"
    return f"{microseconds / 1e6:.3g} s"


def spread(values: Sequence[float], digits: int) -> str:
    """Write the median of some values, with the least and the greatest of several.

    Parameters
    ----------
    values : sequence of float
        At least one.
    digits : int
        Behind the point.

    Returns
    -------
    str
        Such as ``3.91 [3.31-3.93]``.
    """
    middle = f"{statistics.median(values):.{digits}f}"
    if len(values) == 1:
        return middle
    return f"{middle} [{min(values):.{digits}f}-{max(values):.{digits}f}]"
