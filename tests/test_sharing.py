"""Which arrays and tensors share memory, beside all of their bytes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvmeio._tensors import sharing

MEMORY = np.zeros(64, np.uint8)


@st.composite
def views(draw):
    """Draw a view of MEMORY: of any element size, strides, order and overlap."""
    dtype = np.dtype(draw(st.sampled_from(["u1", "u2", "u4", "V3"])))
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


@given(st.lists(views(), max_size=8))
def test_views_are_grouped_as_by_their_bytes(leaves):
    expected = []
    for number, view in enumerate(leaves):
        near = [group for group in expected if group[1] & bytes_of(view)]
        numbers = {number}.union(*(group[0] for group in near))
        covered = bytes_of(view).union(*(group[1] for group in near))
        expected = [group for group in expected if group not in near]
        expected.append((numbers, covered))
    places = [sharing.place_of(view, number) for number, view in enumerate(leaves)]
    found = [{place.leaf for place in group} for group in sharing.sharing(places)]
    assert sorted(map(sorted, found)) == sorted(sorted(each[0]) for each in expected)


@pytest.mark.parametrize("order", ["C", "F"])
def test_columns_of_a_matrix_are_not_compared_in_pairs(monkeypatch, order):
    compared, overlap = [], sharing.overlap
    monkeypatch.setattr(
        sharing, "overlap", lambda *pair: compared.append(pair) or overlap(*pair)
    )
    matrix = np.zeros((30, 500), np.float32, order=order)
    places = [sharing.place_of(matrix[:, n]) for n in range(500)]
    assert len([*sharing.sharing([*places, sharing.place_of(matrix[:, 7])])]) == 500
    assert len(compared) == 1
