"""Exit with I/O in flight: no crash, no hang, no write to released memory."""

import pytest

from children import run_child
from helpers import ENGINES, PAGE, Guarded, pattern
from mounts import SLOW_PLACES

IN_FLIGHT = pytest.mark.parametrize(("engine", "slow"), SLOW_PLACES, indirect=["slow"])
STATUS = {"return": 0, "exit": 3, "_exit": 4}


@pytest.fixture
def leave(slow, engine, tmp_path):
    """A function that runs `leave`, and checks the memory of its reads."""
    memory = tmp_path / "memory"
    memory.mkdir()

    def leave(**options):
        done = run_child("leave", **slow, memory=str(memory), engine=engine, **options)
        assert done.reports == [{"pending": 2}]
        canaries = bytes([Guarded.CANARY]) * PAGE
        for name in ("async_pread", "submit_read"):
            left = (memory / name).read_bytes()
            assert (left[:PAGE], left[-PAGE:]) == (canaries, canaries)
            # Every way to exit waits for the reads, except _exit.
            if options["way"] != "_exit":
                assert left[PAGE:-PAGE] == pattern(len(left) - 2 * PAGE)
        return done

    return leave


@pytest.mark.parametrize("hold", ["nothing", "local", "global", "cycle", "threads"])
@IN_FLIGHT
def test_the_interpreter_exits_quietly(leave, hold):
    done = leave(way="return", hold=hold)
    assert (done.status, done.stderr) == (0, "")


@pytest.mark.parametrize("way", ["exit", "_exit", "raise"])
@IN_FLIGHT
def test_the_process_may_exit_in_any_way(leave, way):
    done = leave(way=way, hold="global")
    assert done.status == STATUS.get(way, 1)
    assert done.stderr.splitlines()[-1:] == (
        ["ValueError: leaving"] if way == "raise" else []
    )


@pytest.mark.parametrize("hold", ["local", "global"])
@IN_FLIGHT
def test_development_mode_prints_no_warning(leave, hold):
    done = leave(flags=["-X", "dev"], way="return", hold=hold)
    assert (done.status, done.stderr) == (0, "")


@IN_FLIGHT
def test_bytes_arrive_in_any_order_of_dropped_references(slow, engine):
    ways = ["close", "handle first", "requests first", "cycle", "file first"]
    found = run_child("drop_in_flight", **slow, engine=engine, ways=ways).report
    assert [*found] == ways
    for way, report in found.items():
        assert report["pending"] == 3, way
        assert report["fired"]["read.delay_s"] > 0, way


@pytest.mark.parametrize("engine", ENGINES)
def test_no_thread_opens_the_default_handle_again_at_exit(tmp_path, engine):
    done = run_child("end_amid_submissions", folder=str(tmp_path), engine=engine)
    error = "the interpreter is ending; no handle can be opened any more"
    assert done.report == {"same": True, "pending": 0, "error": error}


# close() must refuse new requests before it waits; otherwise it would wait forever.
@pytest.mark.parametrize("way", ["close", "with", "exit"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_thread_that_keeps_submitting_does_not_delay_the_end(tmp_path, engine, way):
    done = run_child("close_amid_submissions", folder=str(tmp_path), engine=engine, way=way)
    assert done.report["ended"]
    assert done.stderr == ""
