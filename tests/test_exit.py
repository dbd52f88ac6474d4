"""Leaving with I/O in flight: no crash, no hang, no write into memory given back."""

import pytest

from children import run_child
from helpers import ENGINES

STATUS = {"return": 0, "exit": 3, "_exit": 4}


@pytest.mark.parametrize("hold", ["nothing", "local", "global", "cycle", "threads"])
@pytest.mark.parametrize("engine", ENGINES)
def test_the_interpreter_ends_quietly(faulty, engine, hold):
    done = run_child("leave", folder=str(faulty), engine=engine, way="return", hold=hold)
    assert (done.status, done.stderr) == (0, "")
    assert done.reports == [{"pending": 2}]


@pytest.mark.parametrize("way", ["exit", "_exit", "raise"])
@pytest.mark.parametrize("engine", ENGINES)
def test_it_may_be_left_in_any_way(faulty, engine, way):
    done = run_child("leave", folder=str(faulty), engine=engine, way=way, hold="global")
    assert done.status == STATUS.get(way, 1)
    assert done.stderr.splitlines()[-1:] == (
        ["ValueError: leaving"] if way == "raise" else []
    )
    assert done.reports == [{"pending": 2}]


@pytest.mark.parametrize("hold", ["local", "global"])
@pytest.mark.parametrize("engine", ENGINES)
def test_development_mode_has_nothing_to_say(faulty, engine, hold):
    done = run_child(
        "leave",
        flags=["-X", "dev"],
        folder=str(faulty),
        engine=engine,
        way="return",
        hold=hold,
    )
    assert (done.status, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "way", ["close", "handle first", "requests first", "cycle", "file first"]
)
@pytest.mark.parametrize("engine", ENGINES)
def test_whatever_is_dropped_first_the_bytes_arrive(faulty, engine, way):
    report = run_child(
        "let_go_in_flight", folder=str(faulty), engine=engine, way=way
    ).report
    assert report["pending"] == 3
    assert report["fired"]["read.delay_s"] > 0
