"""Descriptors, threads and locked memory run out during work, and come back."""

import pytest

from batches import run_cases
from children import as_nobody, can_fork, skip_sanitized
from helpers import ENGINES


@pytest.mark.amount(short=2, full=12, long=200)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["descriptors", "threads", "memlock"])
def test_a_lack_is_reported_and_work_goes_on_after_it(
    tmp_path, kind, engine, seeds, record_property
):
    if kind == "memlock":
        skip_sanitized("lock no memory")
    tmp_path.chmod(0o777)
    counts = run_cases(
        "run_out",
        seeds,
        prefix=[] if kind == "descriptors" else as_nobody(),
        folder=str(tmp_path),
        engine=engine,
        kind=kind,
        forks=can_fork(),
    )
    assert counts["went_well"] > 0
    record_property(f"steps without {kind} that went well", counts["went_well"])
    record_property(f"steps without {kind} that said so", counts["refused"])
    # Without locked memory every step still works, unless a new ring needs it.
    if kind != "memlock":
        assert counts["refused"] >= counts["cases"]
    elif engine != "io_uring":
        assert counts["refused"] == 0
