"""Handles in forked, spawned and forkserver children, and the parent's work."""

import pytest

from children import run_child
from helpers import ENGINES
from mounts import SLOW_PLACES


@pytest.mark.parametrize("engine", ENGINES)
def test_children_and_grandchildren_use_the_parents_handle(tmp_path, engine):
    report = run_child("fork_idle", folder=str(tmp_path), engine=engine).report
    assert report == {"engine": engine}


@pytest.mark.parametrize(("engine", "slow"), SLOW_PLACES, indirect=["slow"])
def test_requests_in_flight_stay_the_parents(slow, tmp_path, engine):
    report = run_child("fork_in_flight", **slow, other=str(tmp_path), engine=engine).report
    assert report["pending"] == 2
    assert report["fired"]["read.held"] > 0


@pytest.mark.parametrize("engine", ENGINES)
def test_a_child_that_submits_nothing_starts_no_worker(tmp_path, engine):
    report = run_child("fork_unused", folder=str(tmp_path), engine=engine).report
    assert len(report["ends"]) == 5


@pytest.mark.parametrize("engine", ENGINES)
def test_threads_may_submit_while_another_forks(tmp_path, engine):
    report = run_child("fork_from_crowd", folder=str(tmp_path), engine=engine).report
    assert min(report["rounds"]) > 0


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_handle_is_pickled_to_the_workers_of_a_pool(tmp_path, engine, method):
    report = run_child(
        "processes", folder=str(tmp_path), engine=engine, method=method
    ).report
    assert report["workers"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_workers_of_a_data_loader_use_a_handle(tmp_path, method):
    pytest.importorskip("torch")
    report = run_child("data_loader", folder=str(tmp_path), method=method).report
    assert report["records"] > 0
