"""An index selects the elements that numpy selects."""

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings

from index_strategies import assert_same, cases, outcome
from nvmeio._arrays import indexing
from nvmeio._arrays.indexing import positions, select


def taken(array, index):
    """Index an array by the result of select()."""
    selection = select(index, array.shape)
    result = np.empty(selection.shape, array.dtype)
    if result.size:
        starts = selection.starts()
        assert len(starts) == selection.runs
        places = starts[:, None] + np.arange(selection.run)
        assert (places.min(), places.max() + 1) == selection.hull()
        result[...] = array.reshape(-1)[places].reshape(selection.shape)
    return result[()] if selection.scalar else result


@settings(max_examples=2000)
@given(cases())
def test_every_index_selects_what_numpy_selects(case):
    shape, index = case
    array = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    expected = outcome(lambda: array[index])
    assert_same(outcome(taken, array, index), expected)


@pytest.mark.parametrize("index", [np.s_[[0, 2]], np.s_[1:, [0, 2]], np.s_[[0], [2]]])
def test_the_positions_of_each_array_are_computed_once(index, monkeypatch):
    seen = []

    def counted(rows, *arguments):
        seen.append(rows)
        return positions(rows, *arguments)

    monkeypatch.setattr(indexing, "positions", counted)
    select(index, (4, 5))
    assert len(seen) == sum(isinstance(item, list) for item in np.index_exp[index])


def test_taking_runs_needs_no_more_memory_than_they_have():
    hull, rows = np.arange(400_000), np.arange(0, 25_000, 2)
    selection = select(rows, (25_000, 16))
    tracemalloc.start()
    try:
        taken = selection.taken_of(hull, 0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert np.array_equal(taken, hull.reshape(-1, 16)[rows])
    assert peak < 2 * taken.nbytes


@pytest.mark.parametrize("step", [2**63, -(2**63) - 1])
@pytest.mark.parametrize("shape", [(0, 0), (1, 3), (4, 2)])
def test_a_step_that_is_not_taken_may_be_huge(shape, step):
    array = np.arange(math.prod(shape)).reshape(shape)
    for index in (np.s_[::step], np.s_[:, ::step]):
        assert_same(taken(array, index), array[index])
        selection = select(index, shape)
        assert len(selection.starts()) == selection.runs


# Indices of an array (4, 5, 6), and whether their elements are one extent.
RUNS = {
    "all": (np.s_[:], 1, 120),
    "one row": (np.s_[2], 1, 30),
    "neighbouring rows": (np.s_[1:3], 1, 60),
    "part of a row": (np.s_[1, 2:4], 1, 12),
    "one of each row": (np.s_[:, 2], 4, 6),
    "neighbours of each row": (np.s_[:, 1:3], 4, 12),
    "every second row": (np.s_[::2], 2, 30),
    "backwards": (np.s_[::-1], 4, 30),
    "the last axis": (np.s_[..., 3], 20, 1),
    "rows by number": (np.s_[[3, 0, 3]], 3, 30),
    "pairs of numbers": (np.s_[[3, 0, 3], [1, 2, 1]], 3, 6),
    "one element": (np.s_[1, 2, 3], 1, 1),
}


@pytest.mark.parametrize(("index", "count", "run"), RUNS.values(), ids=RUNS)
def test_neighbours_are_one_extent(index, count, run):
    selection = select(index, (4, 5, 6))
    assert (selection.runs, selection.run) == (count, run)


# For an array (2, 3, 4, 5): lists of three select one axis of extent 3 together.  It comes
# first if a slice, None or Ellipsis is between them, or between one and an integer.
PLACED = {
    "arrays parted by a slice": (np.s_[:, [0, 2, 1], :, [4, 0, 1]], (3, 2, 4)),
    "arrays parted by None": (np.s_[:, [0, 2, 1], None, [3, 0, 1]], (3, 2, 1, 5)),
    "array and integer parted": (np.s_[:, 1, ..., [4, 0, 1]], (3, 2, 4)),
    "arrays side by side": (np.s_[:, [0, 2, 1], [3, 0, 1]], (2, 3, 5)),
    "array beside an integer": (np.s_[:, :, 1, [4, 0, 1]], (2, 3, 3)),
}


@pytest.mark.parametrize(("index", "shape"), PLACED.values(), ids=PLACED)
def test_separated_array_indices_put_their_axis_first(index, shape):
    array = np.arange(120).reshape(2, 3, 4, 5)
    found = taken(array, index)
    assert found.shape == shape
    assert_same(found, array[index])


REFUSED = {
    "beyond the end": (5, IndexError, "index 5 is out of bounds for axis 0 of size 4"),
    "before the begin": ((0, -6), IndexError, "index -6 is out of bounds for axis 1 of"),
    "array": ([1, 9], IndexError, r"axis 0, index\[1\] is 9; it must be from -4 to 3"),
    "float": (1.0, IndexError, "the index is of dtype float64; only integers"),
    "text": ("x", IndexError, "the index is of dtype <U1; only integers"),
    "too many": ((0, 0, 0, 0), IndexError, "the index has 4 axes and the array 3"),
    "two ellipses": ((..., ...), IndexError, "only one Ellipsis"),
    "mask": (np.ones(3, bool), IndexError, r"the mask is of shape \(3,\); .* \(4,\)"),
    "shapes": (([0, 1], [0, 1, 2]), IndexError, "arrays of the index do not match"),
    "huge": (1 << 70, IndexError, "out of bounds"),
    "array of huge": ([1, 1 << 70], IndexError, rf"index\[1\] is {1 << 70}; it must be"),
    "slice of text": (slice("a", None), TypeError, "slice indices must be integers"),
    "step of 0": (slice(None, None, 0), ValueError, "slice step cannot be zero"),
}


@pytest.mark.parametrize(("index", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_index_raises_as_in_numpy(index, error, words):
    with pytest.raises(error, match=words):
        select(index, (4, 5, 6))
    assert outcome(lambda: np.zeros((4, 5, 6))[index]) is error


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64", "uint64", ">i2"])
def test_positions_are_counted_from_the_beginning(dtype):
    rows = np.array([[0, 5], [9, 3]], dtype)
    found = positions(rows, 10, "rows")
    assert found.dtype == np.int64
    np.testing.assert_array_equal(found, rows)


def test_negative_positions_are_counted_from_the_end():
    np.testing.assert_array_equal(positions([-1, 0, -10], 10, "rows"), [9, 0, 0])
    assert positions([], 10, "rows").dtype == np.int64
    assert positions(-1, 10, "rows").shape == ()


BAD_POSITIONS = {
    "first of many": ([0, -11, 10], IndexError, r"rows\[1\] is -11; .* from -10 to 9"),
    "in a matrix": ([[0, 1], [2, 10]], IndexError, r"rows\[1, 1\] is 10; .* -10 to 9"),
    "alone": (10, IndexError, "rows is 10; it must be from -10 to 9"),
    "unsigned": (
        np.array([2**64 - 1], np.uint64),
        IndexError,
        r"\[0\] is 18446744073709551615",
    ),
    # numpy makes floats of the first, and objects of the next.
    "beyond int64": ([0, 2**63], IndexError, rf"rows\[1\] is {2**63}; .* from -10 to 9"),
    "beyond 64 bits": ([[9, -(2**70)]], IndexError, rf"rows\[0, 1\] is -{2**70}; .* -10 "),
    "huge and alone": (2**70, IndexError, rf"rows is {2**70}; it must be from -10 to 9"),
    "objects": (np.array([1, 2], object), TypeError, "rows is of dtype object"),
    "floats": ([1.0], TypeError, "rows is of dtype float64; it must be of integers"),
    "mask": ([True], TypeError, "rows is of dtype bool; .* numpy.flatnonzero"),
    "no floats": (np.empty(0), TypeError, "rows is of dtype float64"),
}


@pytest.mark.parametrize(
    ("rows", "error", "words"), BAD_POSITIONS.values(), ids=BAD_POSITIONS
)
def test_the_first_position_that_is_wrong_is_named(rows, error, words):
    with pytest.raises(error, match=words):
        positions(rows, 10, "rows")


def test_negative_positions_can_be_refused():
    with pytest.raises(IndexError, match=r"starts\[0\] is -1; it must be from 0 to 9"):
        positions([-1], 10, "starts", wrap=False)
