"""What the times of files can tell."""

import time

__all__ = ["ambiguous_s"]

# How far apart the times of two changes may be and still be the same: two seconds on FAT,
# one where whole seconds are kept, else a tick of the kernel's clock.
_COARSE_S, _FINE_S = 2.0, 0.01
# How far the clock of a file server may be behind this one.  A whole save takes longer than
# a tick there.
_SKEW_S = 60.0


def ambiguous_s(mtime_ns: int) -> float:
    """Return for how long another file could get the same time, in seconds, at most.

    Who compares times to notice that a file was replaced waits so long before it reads.
    """
    is_fine = mtime_ns % 1_000_000_000 != 0
    step, skew = (_FINE_S, 0.0) if is_fine else (_COARSE_S, _SKEW_S)
    return step if time.time() - mtime_ns / 1e9 < step + skew else 0.0
