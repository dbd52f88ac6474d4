"""The heap of the C library, which keeps memory that was freed."""

import ctypes

__all__ = ["give_back"]

# glibc's alone.
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def give_back() -> None:
    """Give the system the pages of memory that was freed."""
    if _malloc_trim is not None:
        _malloc_trim(0)
