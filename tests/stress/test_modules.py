"""Modules on top of the library, under faults in it: right results, or an error.

Activations on disk, model files, checkpoints and offloaded optimizers: gradients, tensors
and states are right to the bit, or an error says why and the old ones are there.
"""

import pytest

from batches import run_batch
from builds import faults_in, read_tallies
from helpers import ENGINES

amount = pytest.mark.amount
# Fault rates of 1000: a step has some hundreds of blocks, a window or a file few.  Counts
# that must not be 0.
CASES = [
    pytest.param(
        "activation_cases",
        {"eio": 2, "enospc": 2},
        ["right", "failed"],
        {"NVMEIO_BLOCK_SIZE": "16384"},
        marks=amount(short=24, full=400, long=4000),
        id="activations",
    ),
    pytest.param(
        "model_cases",
        {"eio": 15, "enospc": 15},
        ["saved", "loaded", "steps restored"],
        {},
        marks=amount(short=6, full=60, long=1000),
        id="models",
    ),
    pytest.param(
        "optimizer_cases",
        {"eio": 10, "enospc": 10},
        ["steps"],
        {},
        marks=amount(short=5, full=60, long=1000),
        id="optimizers",
    ),
]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("cases", "rates", "some", "env"), CASES)
def test_results_are_right_or_an_error_says_why(
    cases,
    rates,
    some,
    env,
    engine,
    seeds,
    tmp_path,
    faulty_package,
    patience_s,
    record_property,
):
    log, folder = tmp_path / "faults", tmp_path / "files"
    folder.mkdir()
    faults = faults_in({"all": 20, "short": 200, **rates}, log)
    env = {"PYTHONPATH": str(faulty_package), "NVMEIO_ENGINE": engine, **env, **faults}
    options = {"folder": str(folder), "env": env, "watchdog_s": patience_s}
    counts = run_batch(cases, seeds, seeds.left, **options)
    assert counts.pop(f"engine is {engine}") == 1
    tallies = read_tallies(log)
    assert tallies["eio"].fired + tallies["enospc"].fired > 0, tallies
    assert min(counts.get(what, 0) for what in some) > 0
    assert sum(count for what, count in counts.items() if "failed" in what) > 0
    for what, count in counts.items():
        record_property(what, count)
