"""The plugin that leaves out combinations of parameters."""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pairwise import pairwise

SUITE = """
import pytest

@pytest.fixture(params=["disk", "shm"])
def folder(request):
    return request.param

@pytest.mark.parametrize("size", range(4))
@pytest.mark.parametrize(("name", "number"), [("a", 1), ("b", 1), ("c", 2)])
def test_three_axes(folder, name, number, size):
    pass

@pytest.mark.all_combinations
@pytest.mark.parametrize("size", range(4))
@pytest.mark.parametrize("name", "abc")
def test_whose_combinations_count(folder, name, size):
    pass

@pytest.mark.parametrize("size", range(4))
def test_two_axes(folder, size):
    pass
"""


@pytest.fixture
def collected(tmp_path):
    """A function that returns how many tests pytest would run for each test function."""

    def collected(*options):
        (tmp_path / "test_small.py").write_text(SUITE)
        (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = all_combinations\n")
        command = [sys.executable, "-m", "pytest", "-p", "pairwise", "--co", "-q", *options]
        listed = subprocess.run(
            [*command, "."],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        names = re.findall(r"::(\w+)\[", listed)
        return {name: names.count(name) for name in names}

    return collected


@pytest.mark.parametrize("sizes", [(2, 3, 4), (4, 2, 10, 3), (6, 6, 2), (1, 1, 1)])
def test_every_pair_of_values_is_tested(sizes):
    rows = [*itertools.product(*map(range, sizes))]
    chosen = pairwise(rows)
    for row in rows:
        for pair in itertools.combinations(enumerate(row), 2):
            assert any(all(one[axis] == value for axis, value in pair) for one in chosen)
    largest, second = sorted(sizes)[-1], sorted(sizes)[-2]
    assert largest * second <= len(chosen) <= len(rows)


def test_pairs_that_are_in_no_row_are_not_needed():
    rows = [(0, 0, 0), (0, 1, 1), (1, 1, 0)]
    assert pairwise(rows) == {*rows}


def test_values_that_are_given_together_stay_together(collected):
    assert collected() == {
        "test_three_axes": 12,
        "test_whose_combinations_count": 24,
        "test_two_axes": 8,
    }


def test_all_combinations_can_be_run(collected):
    assert collected("--all-combinations")["test_three_axes"] == 24
