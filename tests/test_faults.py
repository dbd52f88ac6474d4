"""Failing system calls and limits: right bytes or an OSError, never a hang.

strace injects faults into a child that runs a function of ``workloads``;
``run_with_faults`` asserts that they struck.
"""

import errno
import os
import re

import pytest

from children import (
    Child,
    as_nobody,
    need_strace,
    run_child,
    run_with_faults,
    skip_under_asan,
    without_capabilities,
)
from helpers import ENGINES, kernel_release
from mounts import with_file

STEPS = ("write", "read", "unaligned", "small", "fsync", "again")
ALL_WELL = dict.fromkeys(STEPS, "ok")
BLOCKS = {"block_size": 16384, "queue_depth": 8}


def round_trip(folder, *faults, engine, **options):
    """Run the workload round_trip with faults, and return its report."""
    arguments = {**BLOCKS, **options}
    return run_with_faults(
        "round_trip", *faults, folder=str(folder), engine=engine, **arguments
    ).report


# Faults that each engine must survive: the call, the errno, and when in each thread.
PASSING = [
    ("io_uring", ["io_uring_enter:error=EINTR:when=2+3"]),
    ("io_uring", ["io_uring_enter:error=EAGAIN:when=1..20"]),
    ("io_uring", ["io_uring_enter:error=EBUSY:when=2+3"]),
    ("io_uring", ["io_uring_enter:error=ENOMEM:when=1..20"]),
    ("io_uring", ["io_uring_enter:error=EIO:when=3+5"]),
    ("libaio", ["io_submit:error=EAGAIN:when=1+2"]),
    ("libaio", ["io_getevents:error=EINTR:when=1+2"]),
    ("libaio", ["io_getevents:error=EIO:when=1+2"]),
    ("threads", ["pread64:error=EINTR:when=1+2", "pwrite64:error=EAGAIN:when=1+2"]),
    ("sync", ["pread64:error=EAGAIN:when=1+2", "pwrite64:error=EINTR:when=1+2"]),
]


@pytest.mark.parametrize(("engine", "faults"), PASSING)
def test_passing_faults_are_retried(tmp_path, engine, faults):
    report = round_trip(tmp_path, *faults, engine=engine)
    assert report["engine"] == engine
    assert report["steps"] == ALL_WELL
    assert report["retries"] > 0
    assert report["pending"] == 0


@pytest.mark.parametrize("engine", ["libaio"])
def test_an_interrupted_sleep_is_repeated(tmp_path, engine):
    report = round_trip(tmp_path, "ppoll:error=EINTR:when=1+2", engine=engine)
    assert report["steps"] == ALL_WELL


def test_a_failed_truncation_is_an_error(tmp_path):
    done = run_with_faults("whole_files", "ftruncate:error=EIO", folder=str(tmp_path))
    assert done.report == {"aio_write": "EIO", "size_left": 600_000}


def test_an_interrupted_truncation_is_repeated(tmp_path):
    fault = "ftruncate:error=EINTR:when=1..2"
    done = run_with_faults("whole_files", fault, folder=str(tmp_path))
    assert done.report == {"aio_write": "ok", "size_left": 300_000}


@pytest.mark.parametrize("when", ["1..3", "2"])
def test_an_interrupted_open_is_repeated(tmp_path, when):
    # The second call opens the descriptor with O_DIRECT.
    fault = f"openat:error=EINTR:when={when}"
    done = run_with_faults("describe_file", fault, path=str(tmp_path / "file"))
    assert done.report["direct"]


def test_a_lack_of_descriptors_is_an_error_with_the_path_and_passes(tmp_path):
    path = tmp_path / "source"
    done = run_with_faults(
        "open_without_descriptors",
        "openat:error=EMFILE:when=1..2",
        folder=str(tmp_path),
        only=path,
    )
    assert done.report["first"] == ["EMFILE", str(path)]


# Opening handles.


@pytest.mark.parametrize(
    ("name", "words"), [("EPERM", "seccomp"), ("ENOSYS", "5.1"), ("ENOMEM", "ulimit -l")]
)
def test_if_io_uring_is_refused_the_next_engine_is_used_with_one_warning(
    name, words, fallback
):
    report = run_with_faults("open_handle", f"io_uring_setup:error={name}").report
    assert report["handle"] == fallback
    assert len(report["log"]) == 1
    assert fallback in report["log"][0]
    assert words in report["log"][0]
    refused = report["engines"]["io_uring"]
    assert refused["built"]
    assert not refused["works"]
    assert os.strerror(refused["errno"]) in refused["reason"]
    assert words in refused["reason"]


def test_if_both_are_refused_threads_are_used():
    faults = ("io_uring_setup:error=EPERM", "io_setup:error=ENOSYS")
    report = run_with_faults("open_handle", *faults).report
    assert report["handle"] == "threads"
    assert len(report["log"]) == 1
    assert "io_uring" in report["log"][0]
    assert "libaio" in report["log"][0]


@pytest.mark.parametrize(
    ("engine", "fault", "name"),
    [
        ("io_uring", "io_uring_setup:error=EPERM", "EPERM"),
        ("libaio", "io_setup:error=EAGAIN", "EAGAIN"),
    ],
)
def test_a_requested_engine_is_not_replaced(engine, fault, name):
    report = run_with_faults("open_handle", fault, engine=engine).report
    assert report["handle"].startswith(f"{name}: ")
    assert engine in report["handle"]
    assert report["log"] == []


@pytest.mark.parametrize("engine", ["io_uring"])
def test_a_ring_without_enough_memory_is_made_smaller(tmp_path, engine):
    fault = "io_uring_setup:error=ENOMEM:when=1..3"
    report = round_trip(tmp_path, fault, engine=engine, early=False, queue_depth=64)
    assert report["engine"] == engine
    assert report["steps"] == ALL_WELL


def test_one_worker_is_enough_if_others_cannot_start(tmp_path):
    fault = "clone3:error=EAGAIN:when=2+"
    report = round_trip(tmp_path, fault, engine="threads", early=False)
    assert report["engine"] == "threads"
    assert report["steps"] == ALL_WELL


# A ring that can no longer be entered.


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["io_uring"])
@pytest.mark.parametrize("name", ["EIO"])
def test_a_dead_ring_fails_its_requests_and_keeps_their_memory(tmp_path, engine, name):
    fault = f"io_uring_enter:error={name}"
    done = run_with_faults("dead_ring", fault, folder=str(tmp_path), engine=engine)
    report = done.report
    assert report["first"] == name
    assert report["later"] == [name, "ok", name]
    assert report["pending"] == 0
    assert any("never freed" in line for line in report["log"])


# Limits.


@pytest.mark.parametrize("engine", ENGINES)
def test_more_files_than_descriptors_take_turns(tmp_path, engine):
    report = run_child("few_descriptors", folder=str(tmp_path), engine=engine).report
    assert report == {"fired": "EMFILE", "engine": engine}


@pytest.mark.parametrize("engine", ["auto", *ENGINES])
def test_opening_a_handle_without_descriptors_is_an_error(engine):
    said = run_child("no_descriptor", engine=engine).report["handle"]
    assert said.startswith("[Errno 24]")
    assert "ulimit -n" in said
    assert "auto" not in said


@pytest.mark.parametrize("engine", ["auto", "libaio", "threads", "sync"])
def test_without_locked_memory_everything_works_unlocked(
    tmp_path, engine, engines, fallback
):
    skip_under_asan("makes nothing of mlock")
    prefix = without_capabilities("ipc_lock")
    done = run_child("no_memlock", prefix=prefix, folder=str(tmp_path), engine=engine)
    report = done.report
    assert report["mlock"] in {"EPERM", "ENOMEM"}
    assert report["bytes_locked"] == 0
    assert report["is_pinned"]
    if report["engine"] != "io_uring":
        assert report["engine"] == (fallback if engine == "auto" else engine)
    if report["log"] and engines["io_uring"]["works"]:
        # Rings count toward the limit, under any errno of the kernel.
        assert "raise ulimit -l, which is 0 KiB" in report["log"][0]
    assert bool(report["log"]) == (engine == "auto" and report["engine"] == fallback)


@pytest.mark.parametrize("engine", ["auto", *ENGINES])
def test_opening_a_handle_without_threads_is_an_error(engine):
    report = run_child("no_threads", prefix=as_nobody(), engine=engine).report
    assert report["fired"]
    assert report["handle"].startswith("[Errno 11]")
    assert "ulimit -u" in report["handle"]
    assert "auto" not in report["handle"]


@pytest.mark.parametrize("engine", ENGINES)
def test_buffered_writes_work_without_new_threads(tmp_path, engine):
    """io_uring hands blocking I/O to kernel threads, which count toward the limit."""
    tmp_path.chmod(0o777)
    report = run_child(
        "no_more_threads", prefix=as_nobody(), folder=str(tmp_path), engine=engine
    ).report
    assert report["fired"]
    assert report["steps"] == {"write": "ok", "fsync": "ok", "read": "ok"}
    assert report["bytes_buffered"] > 0


@pytest.mark.parametrize(("error", "words"), [(1, "seccomp"), (38, "seccomp")])
def test_another_engine_is_used_under_a_seccomp_filter(tmp_path, error, words, fallback):
    report = run_child("seccomp", folder=str(tmp_path), error=error).report
    assert report["engine"] == fallback
    assert len(report["log"]) == 1
    assert report["engines"]["io_uring"]["errno"] == error
    assert words in report["engines"]["io_uring"]["reason"]


@pytest.mark.parametrize("value", [1, 2])
def test_a_sysctl_that_forbids_io_uring_is_named(tmp_path, value, fallback):
    sysctl = "/proc/sys/kernel/io_uring_disabled"
    if not os.path.exists(sysctl):
        pytest.skip("the kernel has no sysctl kernel.io_uring_disabled")
    prefix = with_file(tmp_path, sysctl, f"{value}\n")
    done = run_child("seccomp", prefix=prefix, folder=str(tmp_path), error=errno.EPERM)
    report = done.report
    words = f"sysctl kernel.io_uring_disabled is {value}; set it to 0"
    assert words in report["engines"]["io_uring"]["reason"]
    assert report["engine"] == fallback
    assert len(report["log"]) == 1
    assert words in report["log"][0]


def traced_rings(folder, **arguments):
    """Run round_trip under strace; return the flags of each requested ring."""
    need_strace()
    skip_under_asan("does not run under strace from the start")
    # One log for each thread, so that no other call splits a line.
    prefix = ["strace", "-ff", "-qqq", "-X", "raw", "-e", "trace=io_uring_setup"]
    prefix += ["-o", folder / "strace"]
    child = Child("round_trip", prefix=prefix, folder=str(folder), **arguments)
    child.ready()
    child.go()
    assert child.finish().report["steps"] == ALL_WELL
    text = "".join(log.read_text() for log in folder.glob("strace.*"))
    calls = re.findall(r"io_uring_setup\(\d+, {flags=(\w+).*= (-?\d+)", text)
    return [(int(flags, 16), int(result) >= 0) for flags, result in calls]


@pytest.mark.parametrize("engine", ["io_uring"])
def test_workers_have_rings_of_one_issuer_that_runs_its_completions(tmp_path, engine):
    """Linux 6.1 has both flags; older kernels refuse them, and get fewer."""
    wanted = 1 << 12 | 1 << 13  # IORING_SETUP_SINGLE_ISSUER, IORING_SETUP_DEFER_TASKRUN
    rings = traced_rings(tmp_path, engine=engine, workers=3)
    asked = [made for flags, made in rings if flags & wanted == wanted]
    assert asked == [kernel_release() >= (6, 1)] * 3


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("exists", [False, True])
def test_a_write_beyond_the_limit_of_file_sizes_fails(tmp_path, engine, exists):
    limit = 1 << 20
    done = run_child(
        "file_size_limit", folder=str(tmp_path), engine=engine, limit=limit, exists=exists
    )
    assert done.report["write"] == "EFBIG"
    assert done.report["engine"] == engine
    assert done.report["size_left"] <= limit
