"""What sizes, shapes and strides of arrays tell of their memory."""

from collections.abc import Sequence

__all__ = ["check_sizes", "may_overlap"]


def may_overlap(shape: Sequence[int], strides: Sequence[int], item: int) -> bool:
    """Tell whether two elements of a strided array may share memory.

    Parameters
    ----------
    shape, strides : sequence of int
        Extent and stride of each axis, all extents at least 1; strides of either sign.
    item : int
        The size of an element in the unit of the strides.

    Returns
    -------
    bool
        False only if no two elements share memory.  True also for the rare layouts in
        which axes interleave without meeting: to tell them apart is a Diophantine problem.
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
    """Refuse to copy between arrays of different sizes.

    Parameters
    ----------
    dest_bytes, src_bytes : int
        The sizes in bytes.

    Raises
    ------
    ValueError
        They differ.
    """
    if dest_bytes != src_bytes:
        raise ValueError(
            f"dest has {dest_bytes} bytes and src {src_bytes}; they must be equal"
        )
