"""The plugin that leaves out combinations of parameters leaves out no pair."""

import itertools

import pytest

from pairwise import pairwise


@pytest.mark.parametrize("sizes", [(2, 3, 4), (4, 2, 10, 3), (6, 6, 2), (1, 1, 1)])
def test_every_pair_of_values_is_tested(sizes):
    rows = [*itertools.product(*map(range, sizes))]
    chosen = pairwise(rows)
    for one, other in itertools.combinations(range(len(sizes)), 2):
        pairs = {(row[one], row[other]) for row in chosen}
        assert len(pairs) == sizes[one] * sizes[other]
    assert len(chosen) < len(rows) or len(rows) == 1
