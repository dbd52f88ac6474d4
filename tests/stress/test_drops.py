"""Drop every reference while I/O is in flight, ten thousand times."""

import pytest

from batches import run_cases
from helpers import ENGINES

amount = pytest.mark.amount
# Each close of a libaio context waits 0.05 s for the kernel.
AMOUNTS = {engine: amount(short=100, full=3_300, long=32_000) for engine in ENGINES}
AMOUNTS["libaio"] = amount(short=30, full=200, long=4_000)


@pytest.mark.parametrize(
    "engine", [pytest.param(engine, marks=mark) for engine, mark in AMOUNTS.items()]
)
def test_released_memory_is_never_written_to(tmp_path, engine, seeds, record_property):
    counts = run_cases("drop", seeds, batch=500, folder=str(tmp_path), engine=engine)
    in_flight = {way: counts[f"{way}_in_flight"] for way in ("closed", "dropped")}
    # All engines together make ten thousand.
    assert sum(in_flight.values()) == counts["cases"]
    assert min(in_flight.values()) > 0 or counts["cases"] == 1
    assert counts["returned"] >= counts["cases"]
    for way, count in in_flight.items():
        record_property(f"handles {way} with I/O in flight", count)
    record_property("pieces of memory checked", counts["returned"])
