"""Leaving with I/O in flight: no crash, no hang, no write into memory given back."""

import pytest

from children import run_child
from mounts import SLOW_PLACES

IN_FLIGHT = pytest.mark.parametrize(("engine", "slow"), SLOW_PLACES, indirect=["slow"])
STATUS = {"return": 0, "exit": 3, "_exit": 4}


@pytest.mark.parametrize("hold", ["nothing", "local", "global", "cycle", "threads"])
@IN_FLIGHT
def test_the_interpreter_ends_quietly(slow, engine, hold):
    done = run_child("leave", **slow, engine=engine, way="return", hold=hold)
    assert (done.status, done.stderr) == (0, "")
    assert done.reports == [{"pending": 2}]


@pytest.mark.parametrize("way", ["exit", "_exit", "raise"])
@IN_FLIGHT
def test_it_may_be_left_in_any_way(slow, engine, way):
    done = run_child("leave", **slow, engine=engine, way=way, hold="global")
    assert done.status == STATUS.get(way, 1)
    assert done.stderr.splitlines()[-1:] == (
        ["ValueError: leaving"] if way == "raise" else []
    )
    assert done.reports == [{"pending": 2}]


@pytest.mark.parametrize("hold", ["local", "global"])
@IN_FLIGHT
def test_development_mode_has_nothing_to_say(slow, engine, hold):
    done = run_child(
        "leave",
        flags=["-X", "dev"],
        **slow,
        engine=engine,
        way="return",
        hold=hold,
    )
    assert (done.status, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "way", ["close", "handle first", "requests first", "cycle", "file first"]
)
@IN_FLIGHT
def test_whatever_is_dropped_first_the_bytes_arrive(slow, engine, way):
    report = run_child("let_go_in_flight", **slow, engine=engine, way=way).report
    assert report["pending"] == 3
    assert report["fired"]["read.delay_s"] > 0
