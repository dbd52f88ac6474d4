"""Model files under faults in the library: the right bytes, the old file, or an error."""

import pytest

from batches import run_batch
from builds import faults_in, read_tallies
from helpers import ENGINES

# Fault rates of 1000; a file has few blocks.
RATES = {"all": 20, "short": 200, "eio": 15, "enospc": 15}


@pytest.mark.amount(short=6, full=60, long=1000)
@pytest.mark.parametrize("engine", ENGINES)
def test_models_are_right_or_an_error_says_why(
    engine, seeds, tmp_path, faulty_package, patience_s, record_property
):
    log = tmp_path / "faults"
    env = {"PYTHONPATH": str(faulty_package), **faults_in(RATES, log)}
    env["NVMEIO_ENGINE"] = engine
    options = {"folder": str(tmp_path / "models"), "env": env, "watchdog_s": patience_s}
    counts = run_batch("model_cases", seeds, seeds.left, **options)
    assert counts.pop(f"engine is {engine}") == 1
    fired = {kind: tally.fired for kind, tally in read_tallies(log).items()}
    assert fired["eio"] + fired["enospc"] > 0, fired
    assert counts["saved"] > 0
    assert counts["loaded"] > 0
    assert counts["steps restored"] > 0
    assert sum(count for what, count in counts.items() if "failed" in what) > 0
    for what, count in counts.items():
        record_property(what, count)
