"""Sizes as people read them."""

__all__ = ["in_binary"]

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def in_binary(nbytes: float) -> str:
    """Write a size with the largest unit that keeps it short, such as 1.5 GiB."""
    value, unit = float(nbytes), 0
    while value >= 1024 and unit < len(UNITS) - 1:
        value /= 1024
        unit += 1
    return f"{value:.3g} {UNITS[unit]}" if value < 1000 else f"{value:.0f} {UNITS[unit]}"
