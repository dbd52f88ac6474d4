"""Fork in every state of a handle: eight children at once, while the parent works."""

import pytest

from batches import run_cases
from children import skip_sanitized
from mounts import SLOW_PLACES

STATES = (
    "never_used",
    "idle",
    "queued_and_in_flight",
    "done_and_not_looked_at",
    "cancelled",
    "waited_for",
    "gathering",
    "watched",
    "closing",
    "stopping",
    "closed",
)


@pytest.mark.amount(short=1, full=4, long=60)
@pytest.mark.parametrize(("engine", "slow"), SLOW_PLACES, indirect=["slow"])
def test_children_of_every_state_work_and_so_does_the_parent(
    slow, tmp_path, engine, seeds, record_property
):
    skip_sanitized("cannot follow forks of a process with threads")
    counts = run_cases(
        "fork_in_states", seeds, batch=25, **slow, other=str(tmp_path), engine=engine
    )
    assert counts["held"] > 0
    for state in (*STATES, *(["dead"] if engine == "io_uring" else [])):
        assert counts[state] == 8 * counts["cases"]
        record_property(f"children of {state.replace('_', ' ')}", counts[state])
