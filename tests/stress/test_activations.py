"""Activations on disk under faults in the library: the right gradients, or an error."""

import pytest

from batches import run_batch
from builds import faults_in, read_tallies
from helpers import ENGINES

# Fault rates of 1000; a step has some hundreds of blocks.
RATES = {"all": 20, "short": 200, "eio": 2, "enospc": 2}


@pytest.mark.amount(short=24, full=400, long=4000)
@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_are_right_or_an_error_says_why(
    engine, seeds, tmp_path, faulty_package, patience_s, record_property
):
    log = tmp_path / "faults"
    env = {"PYTHONPATH": str(faulty_package), **faults_in(RATES, log)}
    env |= {"NVMEIO_ENGINE": engine, "NVMEIO_BLOCK_SIZE": "16384"}
    folder = tmp_path / "drive"
    folder.mkdir()
    options = {"folder": str(folder), "env": env, "watchdog_s": patience_s}
    counts = run_batch("activation_cases", seeds, seeds.left, **options)
    assert counts.pop(f"engine is {engine}") == 1
    fired = {kind: tally.fired for kind, tally in read_tallies(log).items()}
    assert fired["eio"] + fired["enospc"] > 0, fired
    assert counts["right"] > 0
    assert counts["failed"] > 0
    for what, count in counts.items():
        record_property(what, count)
