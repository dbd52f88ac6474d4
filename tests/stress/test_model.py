"""Random operations have the results that a model predicts, on every engine and place.

A case is one place and one engine, first with O_DIRECT and then through the page cache,
each with a plan of `plans.OPERATIONS` operations drawn from the seed.
"""

from collections import Counter

import pytest

from builds import faults_in, read_tallies
from children import Child, can_fork
from filemodel import plans
from helpers import ENGINES
from places import MOUNTED, PLACES
from workloads.common import Faults

AMOUNTS = {"short": 1, "full": 5, "long": 100}
CELLS = len(ENGINES) * len(PLACES) * 2


def run_case(seed, place, engine, *, env=(), **options):
    """Run a case in a child; return the counts of both cells."""
    control = str(place.control) if place.control else None
    try:
        child = Child(
            "random_operations",
            package="cases",
            seed=seed,
            folder=str(place.folder),
            place=place.name,
            engine=engine,
            control=control,
            forks=can_fork(),
            env=env,
            **options,
        )
        return child.finish().report
    finally:
        if control:
            Faults(control).set()


def check_cell(place, way, cell):
    """Assert that a cell ran all of its plan, by the route of its name."""
    figures = Counter(cell["figures"])
    # tmpfs accepts O_DIRECT since Linux 6.6; FUSE does what its server says.
    if way == "direct" and place.name in MOUNTED:
        assert cell["direct"] is True
    left_out = () if can_fork() else ("fork",)
    for kind, count in plans.DECK.items():
        assert figures[kind] == (0 if kind in left_out else count)
    assert min(figures["bytes"], figures["closed over"]) > 0
    assert figures["forked beside"] > 0 or left_out
    if cell["direct"] is True:
        assert figures["bytes_direct"] + figures["bytes_bounced"] > 0
    else:
        assert figures["bytes_direct"] == 0
        assert figures["bytes_buffered"] > 0
    struck = {name for name, times in cell["fired"].items() if times > 0}
    regimes = plans.REGIMES if place.control else ()
    names = {"error at": "error", "passing": "error"}
    assert struck == {f"{call}.{names.get(kind, kind)}" for call, kind in regimes}


@pytest.mark.amount(**AMOUNTS)
@pytest.mark.parametrize("engine", ENGINES)
def test_random_operations_match_the_model(place, engine, seeds, record_property):
    total = Counter()
    for seed in seeds:
        for way, cell in run_case(seed, place, engine).items():
            check_cell(place, way, cell)
            total.update(cell["figures"])
            total.update({f"faults of {name}": n for name, n in cell["fired"].items()})
            total["operations"] += sum(cell["figures"].get(kind, 0) for kind in plans.DECK)
    for name, count in total.items():
        record_property(name, count)


# Fault rates of 1000; higher for faults with few occasions.
RATES = {
    "all": 20,
    "reorder": 300,
    "partly": 300,
    "spurious": 50,
    "wake": 200,
    "eio": 5,
    "enospc": 5,
}
# Faults that can strike on every engine, and those of io_uring only.
EVERYWHERE = {"short", "again", "early", "late", "eintr", "eagain", "partly"}
OF_URING = {"ebusy", "enomem"}


@pytest.mark.amount(short=0, full=1, long=20)
@pytest.mark.parametrize("engine", ENGINES)
def test_random_operations_match_the_model_under_faults(
    place, engine, seeds, tmp_path, faulty_package, record_property
):
    fired, expected = Counter(), Counter()
    for seed in seeds:
        log = tmp_path / str(seed)
        env = {"PYTHONPATH": str(faulty_package), **faults_in(RATES, log, seed)}
        run_case(seed, place, engine, errors=["EIO", "ENOSPC"], env=env)
        for kind, tally in read_tallies(log).items():
            fired[kind] += tally.fired
            expected[kind] += tally.occasions * tally.rate / 1000
    assert fired["eio"] + fired["enospc"] > 0, fired
    must = EVERYWHERE | (OF_URING if engine == "io_uring" else set())
    # Other faults may have so few occasions that none strikes.
    must |= {kind for kind in expected if expected[kind] > 20}
    assert {kind for kind in must if not fired[kind]} == set(), (fired, expected)
    for kind, count in fired.items():
        if count:
            record_property(f"injected {kind}", count)


def test_all_cells_together_run_the_promised_number_of_operations():
    promised = {"short": 10**4, "full": 5 * 10**4, "long": 10**6}
    for length, count in promised.items():
        assert CELLS * AMOUNTS[length] * plans.OPERATIONS >= count
