"""Everything is let go of while I/O is in flight, ten thousand times."""

import pytest

from batches import run_trials
from helpers import ENGINES


@pytest.mark.amount(short=100, full=2_500, long=100_000)
@pytest.mark.parametrize("engine", ENGINES)
def test_memory_that_was_let_go_of_is_written_to_no_more(tmp_path, engine, seeds, amount):
    counts = run_trials("drop", seeds, batch=500, folder=str(tmp_path), engine=engine)
    assert counts["returned"] >= counts["trials"]
    # Of one trial that is repeated nothing is known; and how many of them found nothing in
    # flight any more, is up to the disk.
    if counts["trials"] > 1:
        assert counts["closed"] > 0
        assert counts["trials_in_flight"] > counts["trials"] // 10
