"""What sizes, shapes and strides of arrays tell of their memory."""

from collections.abc import Sequence

__all__ = ["check_sizes", "may_overlap"]


def may_overlap(shape: Sequence[int], strides: Sequence[int], item: int) -> bool:
    """Tell whether two elements of a strided array may share memory; no extent is 0.

    True also for the rare layouts in which axes interleave without meeting: to tell them
    apart is a Diophantine problem.
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
    """Refuse to copy between arrays of different sizes."""
    if dest_bytes != src_bytes:
        raise ValueError(
            f"dest has {dest_bytes} bytes and src {src_bytes}; they must be equal"
        )
