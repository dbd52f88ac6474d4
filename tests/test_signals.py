"""Signals lose no operation: many at once, and Ctrl-C while I/O is held."""

import sys

import pytest

from children import run_child
from helpers import ENGINES
from mounts import SLOW_PLACES


@pytest.mark.parametrize("engine", ENGINES)
def test_a_storm_of_signals_loses_nothing(tmp_path, engine):
    report = run_child("signal_storm", folder=str(tmp_path), engine=engine).report
    assert report["signals"] > 10
    assert report["engine"] == engine


# FUSE makes even submissions to io_uring and libaio block, so they are interrupted too.
PLACES = [*SLOW_PLACES, ("io_uring", "fuse"), ("libaio", "fuse")]


@pytest.mark.parametrize("size", [4096, 1 << 21])
@pytest.mark.parametrize(("engine", "slow"), PLACES, indirect=["slow"])
def test_ctrl_c_ends_a_wait_and_the_transfer_goes_on(slow, engine, size):
    ways = ["request", "drain", "close", "op", "wait", "as_completed"]
    found = run_child("ctrl_c", **slow, engine=engine, ways=ways, size=size).report
    assert [*found] == ways
    for way, report in found.items():
        assert report["interrupted"], way
        assert report["pending"] == 1, way
        assert report["fired"]["read.held"] > 0, way


# The first Ctrl-C waits for submitted blocks and drops the others; a second one waits for
# nothing.
@pytest.mark.parametrize("presses", [1, 2])
@pytest.mark.parametrize(("engine", "slow"), PLACES, indirect=["slow"])
def test_ctrl_c_in_a_blocking_call_cancels_its_transfer(slow, engine, presses):
    ways = ["read", "gather", "read_many", "with", "read_into"]
    options = {"engine": engine, "ways": ways, "presses": presses}
    found = run_child("ctrl_c_in_calls", **slow, **options).report
    assert [*found] == ways
    for way, report in found.items():
        assert report["interrupted"], way
        assert report["still_inside"] == [True], way
        assert report["pending"] == presses - 1, way
        assert report["still_held"] == (presses == 2), way
        # The end of a `with` block waits for its requests.
        assert report["dropped"] == (way != "with"), way
        assert report["fired"]["read.held"] > 0, way
        # Exceptions have notes since Python 3.11.
        if presses == 2 and way != "with" and sys.version_info >= (3, 11):
            assert "its memory is in use" in report["notes"][0], way
