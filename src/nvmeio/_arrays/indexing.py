"""Compute the positions of the elements that an index selects, by numpy's rules.

Nothing here touches a file.  Positions are counted in elements, in C order.
"""

import math
import operator
from collections.abc import Iterator, Sequence
from types import EllipsisType
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from nvmeio._arguments.checks import exact_array, has_integers
from nvmeio._memory.registry import library_of

__all__ = [
    "Axis",
    "Positions",
    "Selection",
    "in_runs",
    "last_of_each",
    "positions",
    "select",
    "select_rows",
    "select_windows",
    "strides_of",
]

Positions = npt.NDArray[np.int64]


# Named tuples, which are imported faster than dataclasses and made as fast.
class Axis(NamedTuple):
    """One axis of a result, along which positions are equally spaced."""

    extent: int
    stride: int


class Points(NamedTuple):
    """The axes of a result that the integer arrays and masks of an index produce."""

    offsets: Positions


class Selection(NamedTuple):
    """The elements that an index selects: runs of neighbouring elements, in order."""

    shape: tuple[int, ...]  # of the result, which is the runs one after another
    run: int  # elements in each run
    base: int  # position of the first run if all offsets of `outer` are 0
    outer: tuple[Axis | Points, ...]  # offsets of the runs; empty if there is only one run
    scalar: bool  # whether numpy would return an element, not an array without axes

    @property
    def runs(self) -> int:
        """The number of runs."""
        runs = 1
        for part in self.outer:
            runs *= part.extent if isinstance(part, Axis) else part.offsets.size
        return runs

    @property
    def repeats(self) -> bool:
        """Whether an element may be selected twice."""
        return any(isinstance(part, Points) for part in self.outer)

    def starts(self, begin: int = 0, item: int = 1) -> Positions:
        """Return where the runs begin, in the order of the result.

        These are positions; or offsets in bytes, if the array begins at `begin` and its
        elements have `item` bytes.
        """
        found = np.full(1, begin + self.base * item, np.int64)
        for part in self.outer:
            if isinstance(part, Axis):
                steps = np.arange(part.extent, dtype=np.int64) * (part.stride * item)
            else:
                steps = part.offsets.ravel() * item
            found = found + steps if len(found) == 1 else np.add.outer(found, steps).ravel()
        return found

    def hull(self) -> tuple[int, int]:
        """Return the position of the first selected element, and the end of the last.

        The selection must not be empty.
        """
        low = high = self.base
        for part in self.outer:
            if isinstance(part, Axis):
                reach = (part.extent - 1) * part.stride
                low, high = low + min(reach, 0), high + max(reach, 0)
            else:
                low, high = low + int(part.offsets.min()), high + int(part.offsets.max())
        return low, high + self.run

    def pieces(self, most: int) -> Iterator["Selection"]:
        """Yield selections that together are this one, with hulls of about `most` elements.

        This one must not repeat elements.  The shapes of the pieces are flat.
        """
        low, high = self.hull()
        if high - low <= most or not self.outer:
            yield self
            return
        first, inner = cast(Axis, self.outer[0]), self.outer[1:]
        step = max(1, most // max(1, abs(first.stride)))
        count = self.runs // first.extent * self.run
        for begin in range(0, first.extent, step):
            extent = min(step, first.extent - begin)
            outer = inner if extent == 1 else (Axis(extent, first.stride), *inner)
            base = self.base + begin * first.stride
            piece = Selection((extent * count,), self.run, base, outer, scalar=False)
            if extent == 1:
                yield from piece.pieces(most)
            else:
                yield piece

    def taken_of(self, hull: npt.NDArray[Any], low: int) -> npt.NDArray[Any]:
        """Return the selected elements, given those from position `low` on."""
        tricks, item, dtype = np.lib.stride_tricks, hull.itemsize, hull.dtype
        # numpy's functions here invent names for the padding between fields, and then
        # refuse a field that has such a name.  As opaque items, padding is copied too.
        if item and dtype.names:
            hull = hull.view(f"V{item}")
        if self.repeats:
            # Not by numpy.take(), which would copy every run of the hull first.
            runs = tricks.sliding_window_view(hull, self.run)
            return np.asarray(runs[self.starts() - low]).view(dtype)
        axes = [part for part in self.outer if isinstance(part, Axis)]
        shape = [*(axis.extent for axis in axes), self.run]
        strides = [*(axis.stride * item for axis in axes), item]
        view = tricks.as_strided(hull[self.base - low :], shape, strides)
        return np.ascontiguousarray(view).view(dtype)


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a C-ordered array, in elements."""
    strides, stride = [1] * len(shape), 1
    for axis in range(len(shape) - 1, 0, -1):
        stride *= shape[axis]
        strides[axis - 1] = stride
    return tuple(strides)


def positions(rows: Any, extent: int, name: str, *, wrap: bool = True) -> Positions:
    """Check positions along an axis; return them as non-negative integers."""
    found = array_of(rows)
    if not has_integers(found):
        hint = "; numpy.flatnonzero() makes them of a mask" if found.dtype == bool else ""
        raise TypeError(f"{name} is of dtype {found.dtype}; it must be of integers{hint}")
    least = -extent if wrap else 0
    if found.size == 0:
        return found.astype(np.int64)
    # The most common case needs a single pass: as unsigned, negative ones are too large.
    if found.dtype == np.int64 and found.view(np.uint64).max() < extent:
        return found
    if int(found.min()) < least or int(found.max()) >= extent:
        wrong = found >= extent
        if found.dtype.kind != "u":
            wrong |= found < least
        place = np.unravel_index(int(wrong.argmax()), found.shape)
        where = f"[{', '.join(str(int(number)) for number in place)}]" if place else ""
        if extent <= 0:
            raise IndexError(f"{name}{where} is {found[place]}, and there are no rows")
        raise IndexError(
            f"{name}{where} is {found[place]}; it must be from {least} to {extent - 1}"
        )
    found = found.astype(np.int64, copy=False)
    return np.where(found < 0, found + extent, found) if found.min() < 0 else found


def select(index: Any, shape: Sequence[int]) -> Selection:
    """Return what an index selects from an array, by numpy's rules."""
    # The most common indices, which would take several times as long below.
    if type(index) is np.ndarray and index.dtype.kind in "iu" and index.ndim and shape:
        return select_rows(index, shape, "on axis 0, index")
    if type(index) is int and shape and -shape[0] <= index < shape[0]:
        run = math.prod(shape[1:])
        base = (index % shape[0]) * run
        return Selection(tuple(shape[1:]), run, base, (), scalar=len(shape) == 1)
    items = [_item_of(item) for item in (index if isinstance(index, tuple) else (index,))]
    used = omitted = 0
    for item in items:
        used += _axes_of(item)
        omitted += item is Ellipsis
    if used > len(shape):
        raise IndexError(f"the index has {used} axes and the array {len(shape)}")
    if omitted > 1:
        raise IndexError("an index can have only one Ellipsis ('...')")
    walk = _Walk(shape)
    for item in items:
        walk.take(item, len(shape) - used)
    if not omitted:
        walk.take(Ellipsis, len(shape) - used)
    parts = walk.parts()
    return in_runs(parts, walk.base, scalar=not (omitted or parts))


def select_rows(rows: Any, shape: Sequence[int], name: str = "rows") -> Selection:
    """Select rows of an array with at least one axis."""
    found, inner = positions(rows, shape[0], name), tuple(shape[1:])
    run = math.prod(inner)
    return Selection(found.shape + inner, run, 0, (Points(found * run),), scalar=False)


def select_windows(starts: Any, length: int, shape: Sequence[int]) -> Selection:
    """Select runs of ``length`` neighbouring rows."""
    found = positions(starts, shape[0] - length + 1, "starts", wrap=False)
    row = math.prod(shape[1:])
    extents = (*found.shape, length, *shape[1:])
    return Selection(extents, length * row, 0, (Points(found * row),), scalar=False)


def last_of_each(starts: Positions) -> Positions:
    """Return the indices of starts; of equal ones, only that of the last."""
    ordered = np.sort(starts)
    if not (ordered[1:] == ordered[:-1]).any():
        return np.arange(len(starts))
    # unique() finds the first of equal elements: reversed, that is the last.
    _, place = np.unique(starts[::-1], return_index=True)
    return len(starts) - 1 - place


Item = None | int | slice | EllipsisType | npt.NDArray[Any]


def _item_of(item: Any) -> Item:
    """Convert an item of an index to one of a few types, or raise IndexError."""
    if item is None or item is Ellipsis or type(item) is int or isinstance(item, slice):
        return item
    # Check the shape too: torch converts any tensor with a single element to an integer.
    if not isinstance(item, bool | np.bool_) and getattr(item, "shape", ()) == ():
        try:
            return operator.index(item)
        except TypeError:
            pass
    array = array_of(item)
    if array.dtype != bool and not has_integers(array):
        raise IndexError(
            f"the index is of dtype {array.dtype}; only integers, slices, integer arrays, "
            "masks, None and Ellipsis are indices"
        )
    return array


def _axes_of(item: Item) -> int:
    """Return how many axes of the array an item uses."""
    if item is None or item is Ellipsis:
        return 0
    if isinstance(item, np.ndarray) and item.dtype.kind == "b":
        return item.ndim
    return 1


class _Walk:
    """Walks along the axes of an array, and collects what the items of an index select."""

    def __init__(self, shape: Sequence[int]) -> None:
        self._shape = shape
        self._strides = strides_of(shape)
        self._axis = 0
        self._axes: list[Axis] = []
        # Arrays of positions, each with its axis; the axis of True or False is None.
        self._arrays: list[tuple[npt.NDArray[Any], int | None]] = []
        # Where numpy puts the axes that arrays produce: at the first array or integer if
        # all of them are adjacent; else in front.
        self._place: int | None = None
        self._interrupted = False
        self._in_front = False
        # The position at which the selection begins, by its integers and slices.
        self.base = 0

    def take(self, item: Item, omitted: int) -> None:
        """Apply one item; an Ellipsis stands for ``omitted`` axes."""
        if item is None:
            self._axes.append(Axis(1, 0))
        elif item is Ellipsis:
            for _ in range(omitted):
                stride = self._strides[self._axis]
                self._axes.append(Axis(self._shape[self._axis], stride))
                self._axis += 1
        elif isinstance(item, slice):
            self._take_slice(item)
        else:
            self._note_place()
            if isinstance(item, np.ndarray):
                self._take_array(item)
            else:
                self._take_integer(item)
            return
        self._interrupted = self._place is not None

    def _note_place(self) -> None:
        """Record where arrays and integers are among the axes of the result."""
        if self._place is None:
            self._place = len(self._axes)
        self._in_front |= self._interrupted

    def _take_slice(self, item: slice) -> None:
        """Select equally spaced positions of the next axis."""
        stride = self._strides[self._axis]
        start, stop, step = item.indices(self._shape[self._axis])
        extent = len(range(start, stop, step))
        self.base += start * stride
        # The step may be larger than any position if it is not taken.
        self._axes.append(Axis(extent, (step if extent > 1 else 1) * stride))
        self._axis += 1

    def _take_integer(self, item: int) -> None:
        """Select one position of the next axis."""
        extent = self._shape[self._axis]
        if not -extent <= item < extent:
            raise IndexError(
                f"index {item} is out of bounds for axis {self._axis} of size {extent}"
            )
        self.base += (item % extent) * self._strides[self._axis]
        self._axis += 1

    def _take_array(self, item: npt.NDArray[Any]) -> None:
        """Select listed positions of the next axis, or by a mask those of several axes."""
        if item.dtype.kind != "b":
            self._arrays.append((item, self._axis))
            self._axis += 1
        elif item.ndim == 0:
            self._arrays.append((np.zeros(int(item), np.int64), None))
        else:
            extents = tuple(self._shape[self._axis : self._axis + item.ndim])
            # As in numpy, a mask of length 0 fits any axis.
            if any(
                length not in (0, extent)
                for length, extent in zip(item.shape, extents, strict=True)
            ):
                raise IndexError(
                    f"the mask is of shape {item.shape}; it must be of the shape of its "
                    f"axes, {extents}"
                )
            for marked in item.nonzero():
                self._arrays.append((marked, self._axis))
                self._axis += 1

    def parts(self) -> list[Axis | Points]:
        """Return the axes of the result, from slices and arrays, in order."""
        parts: list[Axis | Points] = list(self._axes)
        if self._arrays:
            parts.insert(0 if self._in_front else self._place or 0, self._points())
        return parts

    def _points(self) -> Points:
        """Return what the arrays select together, broadcast against each other."""
        array, axis = self._arrays[0]
        if len(self._arrays) == 1 and axis is not None:
            return Points(self._along(array, axis))
        try:
            shape = np.broadcast_shapes(*(array.shape for array, _ in self._arrays))
        except ValueError as error:
            raise IndexError(f"the arrays of the index do not match: {error}") from None
        total = np.zeros(shape, np.int64)
        # As in numpy, positions are not checked if the result is empty.
        if total.size:
            for array, axis in self._arrays:
                if axis is not None:
                    total += self._along(array, axis)
        return Points(total)

    def _along(self, array: npt.NDArray[Any], axis: int) -> Positions:
        """Convert an array's positions on an axis to offsets in elements."""
        found = positions(array, self._shape[axis], f"on axis {axis}, index")
        return found * self._strides[axis]


def in_runs(
    parts: Sequence[Axis | Points], base: int, *, scalar: bool = False
) -> Selection:
    """Merge the innermost axes into runs, as far as their elements are neighbours."""
    shape: tuple[int, ...] = ()
    for part in parts:
        shape += (part.extent,) if isinstance(part, Axis) else part.offsets.shape
    run = 1
    while parts:
        last = parts[-1]
        if not isinstance(last, Axis) or (last.extent != 1 and last.stride != run):
            break
        run *= last.extent
        parts = parts[:-1]
    return Selection(shape, run, base, tuple(parts), scalar)


def array_of(item: Any) -> npt.NDArray[Any]:
    """Return positions as an array; an empty list becomes an array of integers."""
    try:
        found = exact_array(item)
    except (TypeError, RuntimeError) as error:
        if library_of(item) is None:
            raise
        raise TypeError(
            f"an index is a tensor of {item.dtype} on {item.device}, {item.layout}; it "
            "must be a dense one of integers on the CPU, without gradients"
        ) from error
    if found.size == 0 and not hasattr(item, "dtype"):
        return found.astype(np.int64)
    return found
