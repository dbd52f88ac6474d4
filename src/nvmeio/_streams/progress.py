"""What callers pass to hear how much of a stream is done."""

from collections.abc import Callable

from nvmeio._arguments.checks import shown

__all__ = ["Progress", "check_progress"]

# Called with the bytes that are done, and those of all.
Progress = Callable[[int, int], object]


def check_progress(progress: Progress | None) -> None:
    """Raise TypeError if `progress` cannot be called."""
    if progress is not None and not callable(progress):
        raise TypeError(f"progress is {shown(progress)}; it must be callable, or None")
