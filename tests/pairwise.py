"""A pytest plugin: of a test with three parameters and more, only some combinations run.

Of any two parameters, every value still meets every value of the other.  The engine and the
folder, on a disk or in memory, count as one, so each behaviour is met by each engine in
each folder.  ``--all-combinations`` runs the others too (`make check-all`), and so does
``@pytest.mark.all_combinations`` for a test in which three values make the case.  The tests
of tests/stress say themselves how much they do.
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
    """Return those of the rows that are needed for every two values to meet somewhere.

    The next one is always that in which the most pairs meet that have not met yet; of
    several the first, so that all processes choose the same.
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
    """Return the names that get their values together, of each parametrization."""
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
    """Return a number of each axis, which is another one for each of its values."""
    params = item.callspec.params
    return tuple(tuple(id(params[name]) for name in names) for names in axes_of(item))


def is_skipped_here(item):
    """Whether a test is skipped because the system lacks the value of a parameter."""
    values = item.callspec.params.values()
    wants_uvloop = any(isinstance(value, str) and value == "uvloop" for value in values)
    lacks_uvloop = wants_uvloop and importlib.util.find_spec("uvloop") is None
    return lacks_uvloop or engine_refusal(item) is not None


def is_thinned(item):
    """Whether some combinations of a test's parameters are enough."""
    return (
        hasattr(item, "callspec")
        and "stress" not in item.path.parts
        and item.get_closest_marker("all_combinations") is None
        and not is_skipped_here(item)
    )


# After -k and -m have chosen: what they choose is whole in itself.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Leave out the combinations of which every pair is met by another one."""
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
