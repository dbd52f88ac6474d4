"""Find which strided ranges of memory share bytes, without comparing all pairs.

A set of ranges is split where addresses leave a gap, and where residues do: columns of a
matrix have other places in its rows, whichever rows they have.  What cannot be split
further is compared in pairs or run by run, whichever is less work.  So the work grows with
n log n of the ranges where they are parts of one array by slices, and never with more than
the bytes in them.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Groups", "MemoryAt", "Range", "overlap", "range_of"]

# Before numpy 1.25 it is in numpy itself.
_TooHardError = getattr(np, "exceptions", np).TooHardError

# The limit of numpy's search for an element that two strided views share.
_WORK_MAX: Any = 100_000

# How many runs are compared at a time, which takes about 64 bytes for each.
RUNS_MAX = 1 << 20
# The work of comparing a pair, and of listing the runs of a range, as a number of runs.
_PAIR_RUNS, _RANGE_RUNS = 50, 150
# The share of ranges up to which a part is split again rather than compared.
_PART_MAX = 0.75
# How many runs of each range are compared first, because most ranges that meet do so often.
_SAMPLES = 64


class Range(NamedTuple):
    """Memory of a leaf: runs of bytes, one at each sum of multiples of the strides."""

    leaf: int  # the number of its leaf
    low: int
    run: int  # bytes
    # Strides in bytes, each with its extent, by their size.
    dims: tuple[tuple[int, int], ...]

    @property
    def high(self) -> int:
        return self.low + self.run + sum(step * (count - 1) for step, count in self.dims)

    @property
    def runs(self) -> int:
        return math.prod(count for _, count in self.dims)

    @property
    def interleaves(self) -> bool:
        """Return whether what one dimension moves by is less than what is inside of it."""
        reach = self.run
        for step, count in self.dims:
            if step < reach:
                return True
            reach += step * (count - 1)
        return False


def range_of(
    leaf: int, low: int, itemsize: int, shape: Sequence[int], strides: Sequence[int]
) -> Range:
    """Return a range with as few dimensions and as long runs as its strides allow.

    Reversing a dimension does not change which bytes are covered, so the signs are ignored.
    """
    run, dims = itemsize, list[tuple[int, int]]()
    for step, count in sorted(zip(map(abs, strides), shape, strict=True)):
        if not step or count == 1:
            continue
        inner, extent = dims[-1] if dims else (0, 0)
        if not dims and step <= run:
            run += step * (count - 1)
        elif dims and step % inner == 0 and step <= inner * extent:
            dims[-1] = inner, extent + step // inner * (count - 1)
        else:
            dims.append((step, count))
    return Range(leaf, low, run, tuple(dims))


class Groups:
    """The leaves that share memory, directly or through others."""

    def __init__(self, count: int) -> None:
        self._parents = list(range(count))
        self._random: np.random.Generator | None = None

    def root(self, index: int) -> int:
        """Return the leaf that stands for a leaf's group."""
        parents = self._parents
        while parents[index] != index:
            parents[index] = parents[parents[index]]
            index = parents[index]
        return index

    def join(self, one: int, other: int) -> None:
        self._parents[self.root(one)] = self.root(other)

    def add(self, ranges: list[Range]) -> None:
        """Join the leaves of ranges in the same memory that share bytes."""
        todo = [ranges]
        while todo:
            ranges = self._merged(todo.pop())
            if not ranges or self._is_one(ranges):
                continue
            for strip in _by_address(ranges):
                for part in _by_residue(strip):
                    # To split off a few at a time would be quadratic.
                    if len(part) > _PART_MAX * len(ranges):
                        todo += self._compared(part)
                    else:
                        todo.append(part)

    def _is_one(self, ranges: list[Range]) -> bool:
        first = self.root(ranges[0].leaf)
        return all(self.root(each.leaf) == first for each in ranges)

    def _merged(self, ranges: list[Range]) -> list[Range]:
        """Join those that differ in the outermost extent only, and make one of each chain.

        Among them are those that are equal, and those without gaps.
        """
        alike: dict[Any, list[Range]] = {}
        for each in ranges:
            key: Any = None
            if each.dims:
                step = each.dims[-1][0]
                key = each.run, each.dims[:-1], step, each.low % step
            alike.setdefault(key, []).append(each)
        found = []
        for chain in alike.values():
            chain.sort(key=lambda each: each.low)
            last = chain[0]
            for each in chain[1:]:
                step, count = last.dims[-1] if last.dims else (1, last.run)
                behind = (each.low - last.low) // step
                if behind < count:
                    self.join(each.leaf, last.leaf)
                elif behind > count or self.root(each.leaf) != self.root(last.leaf):
                    found.append(last)
                    last = each
                    continue
                count = max(count, behind + (each.dims[-1][1] if each.dims else each.run))
                if last.dims:
                    last = last._replace(dims=(*last.dims[:-1], (step, count)))
                else:
                    last = last._replace(run=count)
            found.append(last)
        return found

    def _compared(self, ranges: list[Range]) -> list[list[Range]]:
        """Join ranges that share bytes; return parts that remain to be compared."""
        if self._is_one(ranges):
            return []
        count, runs = len(ranges), sum(each.runs for each in ranges)
        if count * (count - 1) // 2 * _PAIR_RUNS <= runs + count * _RANGE_RUNS:
            self._compare(ranges, ranges)
            return []
        if runs <= RUNS_MAX:
            self._meet(ranges, RUNS_MAX)
            return []
        if strange := [each for each in ranges if each.interleaves]:
            self._compare(strange, ranges)
            return [[each for each in ranges if not each.interleaves]]
        self._meet(ranges, max(2, min(_SAMPLES, RUNS_MAX // count)))
        return [] if self._is_one(ranges) else _halves(ranges)

    def _compare(self, some: list[Range], others: list[Range]) -> None:
        """Compare ranges in pairs; the first ones must be among the others."""
        for number, one in enumerate(some):
            for other in others[number + 1 :] if some is others else others:
                if self.root(one.leaf) != self.root(other.leaf) and overlap(one, other):
                    self.join(one.leaf, other.leaf)

    def _meet(self, ranges: list[Range], limit: int) -> None:
        """Join ranges whose runs share bytes; of more runs than the limit, draw some."""
        depth = max(len(each.dims) for each in ranges)
        dims = [(*each.dims, *[(0, 1)] * (depth - len(each.dims))) for each in ranges]
        table = np.array(dims, np.int64).reshape(len(ranges), depth, 2)
        counts = table[:, :, 1].prod(axis=1)
        samples = np.minimum(counts, limit)
        which = np.repeat(np.arange(len(ranges)), samples)
        numbers = np.arange(len(which)) - np.repeat(np.cumsum(samples) - samples, samples)
        # The first and the last run are among those that are drawn.
        drawn = (numbers > 0) & (samples < counts)[which]
        if drawn.any():
            # Of fixed seed, so that the work is the same each time; the answer does not
            # depend on it.  Not before: numpy would import numpy.random.
            self._random = self._random or np.random.default_rng(0)
            numbers[drawn] = self._random.integers(counts[which[drawn]])
        drawn &= np.append(which[1:], -1) != which
        numbers[drawn] = counts[which[drawn]] - 1
        begins = np.array([each.low for each in ranges], np.int64)[which]
        for level in range(depth):
            numbers, at = np.divmod(numbers, table[which, level, 1])
            begins += at * table[which, level, 0]
        order = np.argsort(begins, kind="stable")
        begins, which = begins[order], which[order]
        ends = begins + np.array([each.run for each in ranges], np.int64)[which]
        reach = np.maximum.accumulate(ends)
        # For each run, the one that ends last among it and those before it.
        last = np.maximum.accumulate(np.where(ends == reach, np.arange(len(ends)), 0))
        (met,) = np.nonzero(begins[1:] < reach[:-1])
        pairs = np.sort(which[met + 1] * len(ranges) + which[last[met]])
        for pair in pairs[np.diff(pairs, prepend=-1) > 0].tolist():
            one, other = divmod(pair, len(ranges))
            self.join(ranges[one].leaf, ranges[other].leaf)


def _by_address(ranges: Iterable[Range]) -> list[list[Range]]:
    """Split ranges where no byte lies between some and the rest."""
    return _split((each.low, each.high, each) for each in ranges)


def _period(ranges: list[Range]) -> int:
    """Return what divides all strides; 0 if there are none."""
    return math.gcd(*(step for each in ranges for step, _ in each.dims))


def _by_residue(ranges: list[Range]) -> list[list[Range]]:
    """Split ranges by their bytes' places in the period of all strides."""
    period = _period(ranges)
    if not period or any(each.run >= period for each in ranges):
        return [ranges]
    at = [each.low % period for each in ranges]
    parts = _split(
        (low, low + each.run, each) for low, each in zip(at, ranges, strict=True)
    )
    # The last ones may go on at the beginning of the period.
    end = max(each.low % period + each.run for each in parts[-1]) - period
    count = 0
    while count < len(parts) - 1 and min(each.low % period for each in parts[count]) < end:
        parts[-1] += parts[count]
        count += 1
    return parts[count:]


def _halves(ranges: list[Range]) -> list[list[Range]]:
    """Cut ranges in the middle of the addresses, or of the residues if that cuts fewer."""
    low, high = min(each.low for each in ranges), max(each.high for each in ranges)
    middle = (low + high) // 2
    found = [
        [cut for each in ranges for cut in _cut(each, *half)]
        for half in ((low, middle), (middle, high))
    ]
    period = _period(ranges)
    within = [each.low % period for each in ranges] if period else []
    if not within:
        return found
    ends = [at + each.run for at, each in zip(within, ranges, strict=True)]
    low = 0 if max(ends) > period else min(within)
    middle = (low + min(period, max(ends))) // 2
    if not low < middle:
        return found
    others = [
        [cut for each in ranges for cut in _cut_residues(each, period, *half)]
        for half in ((0, middle), (middle, period))
    ]
    # Cuts along what goes on for ever, such as whole columns, bring nothing.
    return min(found, others, key=lambda halves: sum(map(len, halves)))


def _split(spans: Iterable[tuple[int, int, Range]]) -> list[list[Range]]:
    parts: list[list[Range]] = []
    reach = -1
    for low, high, each in sorted(spans):
        if low >= reach:
            parts.append([])
        parts[-1].append(each)
        reach = max(reach, high)
    return parts


def _cut(each: Range, begin: int, end: int) -> Iterator[Range]:
    """Yield what of a range is between two addresses; it must not interleave."""
    if each.high <= begin or end <= each.low:
        return
    if begin <= each.low and each.high <= end:
        yield each
    elif not each.dims:
        low = max(each.low, begin)
        yield each._replace(low=low, run=min(each.high, end) - low)
    else:
        *inner, (step, count) = each.dims
        slab = each._replace(dims=tuple(inner))
        size = slab.high - slab.low
        # The slabs of which some bytes, and of which all bytes are between them.
        first = max(0, (begin - each.low - size) // step + 1)
        last = min(count, -((each.low - end) // step))
        full = max(first, -((each.low - begin) // step))
        done = max(full, min(last, (end - size - each.low) // step + 1))
        for number in (*range(first, min(full, last)), *range(done, last)):
            yield from _cut(slab._replace(low=each.low + number * step), begin, end)
        if full < done:
            dims = (*inner, (step, done - full))
            yield each._replace(low=each.low + full * step, dims=dims)


def _cut_residues(each: Range, period: int, begin: int, end: int) -> Iterator[Range]:
    """Yield what of a range has these residues; the period must divide its strides."""
    at = each.low % period
    # The parts of a run in its first period, in whole periods, and in the last one.
    first = min(each.run, period - at)
    whole, last = divmod(each.run - first, period)
    rest = each.low + first
    for low, run, count in (
        (each.low, first, 1),
        (rest, period, whole),
        (rest + whole * period, last, 1),
    ):
        at = low % period
        cut, stop = max(at, begin), min(at + run, end)
        if count and cut < stop:
            dims = ((period, count), *each.dims) if count > 1 else each.dims
            yield Range(each.leaf, low + cut - at, stop - cut, dims)


def overlap(one: Range, other: Range) -> bool:
    """Return whether two ranges share a byte; True also if that is too hard to say."""
    if one.high <= other.low or other.high <= one.low:
        return False
    try:
        return bool(np.shares_memory(_shadow(one), _shadow(other), max_work=_WORK_MAX))
    except _TooHardError:
        return True


def _shadow(each: Range) -> npt.NDArray[Any]:
    """Return an array of the same addresses; do not read it: it may be device memory."""
    steps, counts = zip(*each.dims, (1, each.run), strict=True)
    return np.asarray(MemoryAt(each.low, counts, "|u1", None, steps))


class MemoryAt:
    """Memory at an address, as numpy's array interface, which keeps its owner alive."""

    def __init__(
        self,
        address: int,
        shape: tuple[int, ...],
        elements: str,
        owner: Any,
        strides: tuple[int, ...] | None = None,
    ) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "data": (address, True),
            "typestr": elements,
            "shape": shape,
            "strides": strides,
        }
