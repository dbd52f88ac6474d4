"""Signals lose nothing: storms of them, and Ctrl-C while I/O is held up."""

import pytest

from children import run_child
from helpers import ENGINES


@pytest.mark.parametrize("overlap_events", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_storm_of_signals_loses_nothing(tmp_path, engine, overlap_events):
    report = run_child(
        "signal_storm", folder=str(tmp_path), engine=engine, overlap_events=overlap_events
    ).report
    assert report["signals"] > 10
    assert report["engine"] == engine


WAITS = [
    (engine, way, size)
    for engine in ENGINES
    for way in ("request", "handle", "close", "read")
    for size in (4096, 1 << 21)
    # Small synchronous reads are submitted by the caller's thread, and FUSE, unlike a
    # disk, holds the submission up.
    if (way, size) != ("read", 4096) or engine in {"threads", "sync"}
]


@pytest.mark.parametrize(("engine", "way", "size"), WAITS)
def test_ctrl_c_ends_a_wait_and_the_transfer_goes_on(faulty, engine, way, size):
    report = run_child(
        "ctrl_c", folder=str(faulty), engine=engine, way=way, size=size
    ).report
    assert report["interrupted"]
    assert report["pending"] == 1
    assert report["fired"]["read.held"] > 0
