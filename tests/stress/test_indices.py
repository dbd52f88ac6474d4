"""Thousands of indices: arrays on disk return and assign what numpy does.

The strategies are those of the ordinary tests, with every dtype, any beginning of the data
and values that numpy broadcasts.  Each seed is a run of hypothesis.
"""

import contextlib

import hypothesis
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from array_samples import noise
from index_strategies import assert_same, assignments, outcome
from nvmeio import ArrayFile

EXAMPLES = 150
FEW = 20 * EXAMPLES


def for_all(strategy, seed, check):
    """Apply a check to many examples, the same ones for the same seed."""

    @hypothesis.seed(seed)
    @settings(
        max_examples=EXAMPLES,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def invented(example):
        check(example)

    invented()


def check_assignment(path, case, begin):
    """Read and assign the selection of an index, and compare with numpy."""
    shape, dtype, index, shape_of_value = case
    expected = noise(shape, dtype)
    head = bytes(range(256)) * 20
    path.write_bytes(head[:begin] + expected.tobytes())
    value = None
    with contextlib.suppress(IndexError):
        value = noise(shape_of_value(np.shape(expected[index])), dtype, seed=1)

    def assign(array):
        array[index] = value

    with ArrayFile(path, dtype=dtype, shape=shape, offset=begin, mode="r+") as array:
        taken = outcome(lambda: expected[index])
        assert_same(outcome(lambda: array[index]), taken)
        if value is None:
            value = noise((), dtype)
        assert outcome(assign, array) == outcome(assign, expected)
    assert path.read_bytes() == head[:begin] + expected.tobytes()
    return not isinstance(taken, type)


@pytest.mark.amount(short=2, full=15, long=600)
def test_indices_do_what_numpys_do(seeds, tmp_path):
    path = tmp_path / "array"
    begins = st.one_of(st.just(0), st.integers(0, 5000))
    good = []
    for seed in seeds:
        for_all(
            st.tuples(assignments(), begins),
            seed,
            lambda example: good.append(check_assignment(path, *example)),
        )
    # There were indices that numpy accepts and ones that it refuses; about one run of
    # hypothesis in twenty has none that it refuses.
    assert any(good)
    assert not all(good) or len(good) < FEW
