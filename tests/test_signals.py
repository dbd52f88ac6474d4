"""Signals lose nothing: storms of them, and Ctrl-C while I/O is held up."""

from itertools import product

import pytest

from children import run_child
from helpers import ENGINES
from mounts import SLOW_PLACES


@pytest.mark.parametrize("overlap_events", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_storm_of_signals_loses_nothing(tmp_path, engine, overlap_events):
    report = run_child(
        "signal_storm", folder=str(tmp_path), engine=engine, overlap_events=overlap_events
    ).report
    assert report["signals"] > 10
    assert report["engine"] == engine


# FUSE holds up even what io_uring and libaio submit, so there too.
PLACES = [*SLOW_PLACES, ("io_uring", "fuse"), ("libaio", "fuse")]


# A block that is waited for at once, on a local file system, is the device's to end.
@pytest.mark.parametrize(
    ("way", "size"),
    [
        *product(["request", "handle", "close", "wait", "as_completed"], [4096, 1 << 21]),
        ("read", 1 << 21),
    ],
)
@pytest.mark.parametrize(("engine", "slow"), PLACES, indirect=["slow"])
def test_ctrl_c_ends_a_wait_and_the_transfer_goes_on(slow, engine, way, size):
    report = run_child("ctrl_c", **slow, engine=engine, way=way, size=size).report
    assert report["interrupted"]
    assert report["pending"] == 1
    assert report["fired"]["read.held"] > 0
