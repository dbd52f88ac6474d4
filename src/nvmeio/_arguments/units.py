"""Sizes as people read them."""

__all__ = ["in_binary", "needed_and_free"]

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def in_binary(nbytes: float) -> str:
    """Write a size with the largest unit that keeps it short, such as 1.5 GiB."""
    value, unit = float(nbytes), 0
    while value >= 1024 and unit < len(UNITS) - 1:
        value /= 1024
        unit += 1
    return f"{value:.3g} {UNITS[unit]}" if value < 1000 else f"{value:.0f} {UNITS[unit]}"


def needed_and_free(needed: int, free: int) -> str:
    """Say how many bytes there is no room for."""
    return f"{in_binary(needed)} ({needed} bytes) are needed, and {free} are free"
