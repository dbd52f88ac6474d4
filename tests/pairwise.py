"""A pytest plugin: run only some combinations of three or more parameters of a test.

Every pair of values of two parameters is still tested.  The engine and the folder, on a
disk or in memory, count as one parameter, so each behaviour is tested with each engine in
each folder.  ``--all-combinations`` (`make check-all`) runs all combinations, and so does
``@pytest.mark.all_combinations`` for a test in which three values together matter.  The
tests of tests/stress set their own amounts.
"""

import importlib.util
import itertools

import pytest

from engine_fixtures import engine_refusal

TOGETHER = ("engine", "folder")


def pytest_addoption(parser):
    parser.getgroup("nvmeio").addoption(
        "--all-combinations",
        action="store_true",
        help="run every combination of parameters, not just every pair",
    )


def pairwise(rows):
    """Return enough of the rows that every pair of values is in one of them.

    Each next row is the one with the most new pairs; of several, the first, so that all
    processes choose the same.
    """
    pairs = {row: {*itertools.combinations(enumerate(row), 2)} for row in rows}
    if all(len(row) < 3 for row in pairs):
        return {*pairs}
    missing = set().union(*pairs.values())
    chosen = set()
    while missing:
        best = max(pairs, key=lambda row: len(pairs[row] & missing))
        missing -= pairs[best]
        chosen.add(best)
    return chosen


def axes_of(item):
    """Return for each parametrization the names that get their values together."""
    axes = [{name for name in TOGETHER if name in item.callspec.params}]
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0]
        names = (
            {name.strip() for name in names.split(",")}
            if isinstance(names, str)
            else {*names}
        )
        if names.intersection(TOGETHER):
            axes[0] |= names
        else:
            axes.append(names)
    named = set().union(*axes)
    axes += [{name} for name in item.callspec.params if name not in named]
    return [sorted(names) for names in axes if names]


def row_of(item):
    """Return a number for each axis that identifies its value."""
    params = item.callspec.params
    return tuple(tuple(id(params[name]) for name in names) for names in axes_of(item))


def is_skipped_here(item):
    """Return whether a test is skipped because this system lacks a parameter's value."""
    values = item.callspec.params.values()
    wants_uvloop = any(isinstance(value, str) and value == "uvloop" for value in values)
    lacks_uvloop = wants_uvloop and importlib.util.find_spec("uvloop") is None
    return lacks_uvloop or engine_refusal(item) is not None


def is_thinned(item):
    """Return whether some combinations of a test's parameters are enough."""
    return (
        hasattr(item, "callspec")
        and "stress" not in item.path.parts
        and item.get_closest_marker("all_combinations") is None
        and not is_skipped_here(item)
    )


# After -k and -m have selected tests, because every pair must be in their selection.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Deselect combinations whose pairs are all in other combinations."""
    if config.getoption("--all-combinations"):
        return
    functions = {}
    for item in filter(is_thinned, items):
        rows = functions.setdefault((item.parent.nodeid, item.originalname), {})
        rows.setdefault(row_of(item), []).append(item)
    left_out = set()
    for rows in functions.values():
        left_out.update(*(rows[row] for row in rows.keys() - pairwise(rows)))
    config.hook.pytest_deselected(items=[*left_out])
    items[:] = [item for item in items if item not in left_out]
