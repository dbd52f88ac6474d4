"""Files that are larger than what a control group may have of memory."""

import pytest

from batches import run_trials
from helpers import ENGINES, MIB

LIMIT = 160 * MIB
POOL = 24 * MIB


@pytest.mark.amount(short=1, full=6, long=500)
@pytest.mark.parametrize("engine", ENGINES)
def test_little_memory_makes_no_wrong_bytes(control_group, tmp_path, engine, seeds, amount):
    prefix = control_group(
        "memory", {"memory.limit_in_bytes": LIMIT}, {"memory.max": LIMIT}
    )
    counts = run_trials(
        "press",
        seeds,
        batch=20,
        prefix=prefix,
        env={"NVMEIO_POOL_BYTES": str(POOL)},
        folder=str(tmp_path),
        engine=engine,
        file_bytes=LIMIT,
        pool_bytes=POOL,
    )
    assert counts["met_limit"] > 0
    assert counts["refused"] > 0
    assert counts["bytes"] == counts["trials"] * 4 * LIMIT
