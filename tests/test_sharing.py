"""Which arrays and tensors share memory, beside all of their bytes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvmeio._tensors import overlapping, sharing

MEMORY = np.zeros(128, np.uint8)


@st.composite
def views(draw):
    """Draw a view of MEMORY: of any element size, strides, order and overlap."""
    dtype = np.dtype(draw(st.sampled_from(["u1", "u2", "u4", "V3"])))
    if draw(st.booleans()):
        # A part of some rows and columns of a matrix.
        width = draw(st.sampled_from([8, 12, 16]))
        shape = [draw(st.integers(1, 8)), draw(st.integers(1, 4))]
        strides = [draw(st.integers(1, 4)) * width, dtype.itemsize]
    else:
        shape = draw(st.lists(st.integers(1, 4), max_size=3))
        strides = [draw(st.integers(-12, 12)) for _ in shape]
    if draw(st.booleans()):
        strides = [stride // dtype.itemsize * dtype.itemsize for stride in strides]
    reach = [(n - 1) * stride for n, stride in zip(shape, strides, strict=True)]
    low = -sum(each for each in reach if each < 0)
    high = sum(each for each in reach if each > 0) + dtype.itemsize
    if low + high > len(MEMORY):
        shape, strides, low, high = [], [], 0, dtype.itemsize
    begin = draw(st.integers(low, len(MEMORY) - high))
    return np.ndarray(shape, dtype, MEMORY.data, begin, strides)


def bytes_of(view):
    """Return the offsets of all bytes of a view."""
    first = view.__array_interface__["data"][0] - MEMORY.__array_interface__["data"][0]
    offsets = {first}
    for extent, stride in zip(view.shape, view.strides, strict=True):
        offsets = {each + n * stride for each in offsets for n in range(extent)}
    return {each + n for each in offsets for n in range(view.itemsize)}


@st.composite
def limits(draw):
    """Draw limits, so that few ranges are compared in each of the ways for many."""
    return {
        "RUNS_MAX": draw(st.sampled_from([1, 4, 20, 1 << 20])),
        "_PAIR_RUNS": draw(st.sampled_from([0, 50, 1 << 20])),
        "_RANGE_RUNS": draw(st.sampled_from([0, 150])),
        "_SAMPLES": draw(st.sampled_from([2, 64])),
    }


@given(st.lists(views(), max_size=12), limits())
def test_views_are_grouped_as_by_their_bytes(leaves, limits):
    expected = []
    for number, view in enumerate(leaves):
        near = [group for group in expected if group[1] & bytes_of(view)]
        numbers = {number}.union(*(group[0] for group in near))
        covered = bytes_of(view).union(*(group[1] for group in near))
        expected = [group for group in expected if group not in near]
        expected.append((numbers, covered))
    places = [sharing.place_of(view, number) for number, view in enumerate(leaves)]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in limits.items():
            patch.setattr(overlapping, name, value)
        found = [{place.leaf for place in group} for group in sharing.sharing(places)]
    assert sorted(map(sorted, found)) == sorted(sorted(each[0]) for each in expected)


def columns_and_others(matrix):
    return [*matrix.T, *(np.zeros(2) for _ in range(len(matrix.T)))], 2 * len(matrix.T)


def rows_and_columns(matrix):
    return [*matrix, *matrix.T], 1


def rows_between_columns(matrix):
    return [*matrix[::2], *matrix[1::2].T], len(matrix) // 2 + len(matrix.T)


def halves_of_rows_and_columns(matrix):
    half = len(matrix.T) // 2
    return [*matrix[:, half:], *matrix[:, :half].T], len(matrix) + half


def two_triangles(matrix):
    size = len(matrix)
    below = [matrix[n:, n] for n in range(size)]
    return below + [matrix[n, n + 1 :] for n in range(size - 1)], 2 * size - 1


def equal_columns(matrix):
    return [matrix[:, 0] for _ in range(1000)], 1


def nested_pairs(matrix):
    flat = matrix.reshape(-1)
    return [flat[n : 2001 - n : 2000 - 2 * n] for n in range(999)], 999


KINDS = [columns_and_others, rows_and_columns, rows_between_columns]
KINDS += [halves_of_rows_and_columns, two_triangles, equal_columns, nested_pairs]


@pytest.mark.parametrize("kind", KINDS)
def test_many_views_are_not_compared_in_pairs(monkeypatch, kind):
    """All pairs would be 500,000, and all runs a million."""
    compared, listed = [], []
    overlap, meet = overlapping.overlap, overlapping.Groups._meet

    def met(groups, ranges, limit):
        listed.extend(min(each.runs, limit) for each in ranges)
        return meet(groups, ranges, limit)

    monkeypatch.setattr(
        overlapping, "overlap", lambda *pair: compared.append(pair) or overlap(*pair)
    )
    monkeypatch.setattr(overlapping.Groups, "_meet", met)
    monkeypatch.setattr(overlapping, "RUNS_MAX", 10_000)
    views, count = kind(np.zeros((1000, 1000), np.float32))
    places = [sharing.place_of(view) for view in views]
    assert len([*sharing.sharing(places)]) == count
    assert len(compared) + sum(listed) < 250_000
