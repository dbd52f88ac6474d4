"""Files larger than the memory limit of a control group."""

import pytest

from batches import run_cases
from cases.pressure import group_events
from children import skip_sanitized
from helpers import ENGINES, MIB

LIMIT = 160 * MIB
POOL = 24 * MIB


@pytest.mark.amount(short=1, full=4, long=60)
@pytest.mark.parametrize("engine", ENGINES)
def test_bytes_are_right_with_little_memory(
    control_group, tmp_path, engine, seeds, patience_s, record_property
):
    skip_sanitized("keep memory of their own")
    # With version 1, processes wait, and are not killed, while a busy disk writes the
    # group's dirty pages.  Version 2 slows the writers down instead.
    prefix = control_group(
        "memory",
        {"memory.limit_in_bytes": LIMIT, "memory.oom_control": 1},
        {"memory.max": LIMIT},
    )
    counts = run_cases(
        "press",
        seeds,
        batch=20,
        # Each moves 640 MiB, on a disk that may be slow.
        watchdog_s=min(1800, patience_s),
        prefix=prefix,
        env={"NVMEIO_POOL_BYTES": str(POOL)},
        folder=str(tmp_path),
        engine=engine,
        file_bytes=LIMIT,
        pool_bytes=POOL,
    )
    record_property("MiB written and read", counts["bytes"] // MIB)
    record_property("times that the group met its limit", counts["met_limit"])
    record_property("times that the pool had none", counts["refused"])
    assert counts["met_limit"] > 0
    assert counts["refused"] > 0
    assert counts["bytes"] == counts["cases"] * 4 * LIMIT


@pytest.mark.parametrize(
    ("own", "name", "text"),
    [
        ("9:name=systemd:/\n3:memory:/a/b\n", "memory/a/b/memory.failcnt", "7\n"),
        ("0::/a/b\n", "a/b/memory.events", "low 0\nhigh 3\nmax 7\noom 0\n"),
    ],
    ids=["version-1", "version-2"],
)
def test_hits_of_the_limit_are_read_from_either_version(tmp_path, own, name, text):
    (tmp_path / "own").write_text(own)
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text(text)
    assert group_events(tmp_path, tmp_path / "own") == 7
