"""Checks of arrays' sizes, shapes and strides."""

from collections.abc import Sequence

__all__ = ["check_sizes", "may_overlap"]


def may_overlap(shape: Sequence[int], strides: Sequence[int], item: int) -> bool:
    """Return whether elements of a strided array may share memory; no extent may be 0.

    Also True for rare layouts whose axes interleave without sharing memory, because an
    exact answer would mean solving a Diophantine equation.
    """
    reach = item - 1
    for stride, extent in sorted(
        (abs(stride), extent)
        for extent, stride in zip(shape, strides, strict=True)
        if extent > 1
    ):
        if stride <= reach:
            return True
        reach += stride * (extent - 1)
    return False


def check_sizes(dest_bytes: int, src_bytes: int) -> None:
    """Raise ValueError if the sizes differ."""
    if dest_bytes != src_bytes:
        raise ValueError(
            f"dest has {dest_bytes} bytes and src {src_bytes}; they must be equal"
        )
