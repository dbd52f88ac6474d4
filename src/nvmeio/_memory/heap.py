"""The heap of the libc, which keeps memory after it is freed."""

import ctypes

__all__ = ["give_back"]

# Only glibc has it.
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def give_back() -> None:
    """Return the pages of freed memory to the system."""
    if _malloc_trim is not None:
        _malloc_trim(0)
