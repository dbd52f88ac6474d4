"""What the times of files can tell."""

import time

__all__ = ["ambiguous_s"]

# How far apart the times of two changes may be and still be the same: two seconds on FAT,
# one where whole seconds are kept, else a tick of the kernel's clock.
_COARSE_S, _FINE_S = 2.0, 0.01


def ambiguous_s(mtime_ns: int) -> float:
    """Return for how long another file could get the same time, in seconds.

    Who compares times to notice that a file was replaced waits so long before it reads.
    The clock of a server may differ from this one; the wait itself is long enough for any.
    """
    step = _FINE_S if mtime_ns % 1_000_000_000 else _COARSE_S
    return min(max(0.0, mtime_ns / 1e9 + step - time.time()), step)
