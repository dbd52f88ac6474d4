"""Hundreds of thousands of interrupted calls: no operation is lost or repeated."""

import pytest

from children import run_child, run_with_faults
from helpers import ENGINES


@pytest.mark.amount(short=10_000, full=100_000, long=1_000_000)
@pytest.mark.parametrize("engine", ENGINES)
def test_signals_to_every_thread_lose_no_operation(
    tmp_path, engine, amount, record_property
):
    report = run_child(
        "storm",
        package="cases",
        watchdog_s=60 + amount // 500,
        folder=str(tmp_path),
        engine=engine,
        amount=amount,
    ).report
    record_property("signals sent to threads", report["sent"])
    record_property("alarms", report["alarms"])
    record_property("rounds of I/O under them", sum(report["rounds"]))
    assert report["sent"] >= amount
    assert report["alarms"] > 0
    # Threads that wait, read, gather and write: each made progress.
    assert len(report["rounds"]) == 4
    assert min(report["rounds"]) > 0
    # Workers block signals.
    assert report["retries"] == 0


# The calls by which an engine submits, collects and sleeps.
CALLS = {
    "io_uring": ["io_uring_enter"],
    "libaio": ["io_submit", "io_getevents", "ppoll"],
    "threads": ["pread64", "pwrite64", "fsync"],
    "sync": ["pread64", "pwrite64", "fsync"],
}


@pytest.mark.amount(short=1_000, full=25_000, long=100_000)
@pytest.mark.parametrize("engine", ENGINES)
def test_every_second_call_is_interrupted_and_repeated(
    tmp_path, engine, amount, record_property
):
    faults = [f"{call}:error=EINTR:when=1+2" for call in CALLS[engine]]
    done = run_with_faults(
        "interrupted_calls",
        *faults,
        package="cases",
        watchdog_s=60 + amount // 50,
        folder=str(tmp_path),
        engine=engine,
        rounds=-(-amount // 200),
    )
    assert done.report["retries"] > 0
    assert done.injected.total() >= amount
    for call, count in done.injected.items():
        record_property(f"EINTR of {call}", count)
