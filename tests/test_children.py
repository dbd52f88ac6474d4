"""A test that fails or is interrupted leaves no child or grandchild behind."""

import os
import select
import subprocess
import sys

import pytest

from children import TESTS, WATCHDOG_S

SUITE = """
import time
from children import Child

def test_that_does_not_wait_for_its_child():
    child = Child("endless", command=["sh", "-c", {script!r}])
    assert child.next_report() == "begun"
    child.go()
    {then}
"""
INTERRUPTED, FAILED = 2, 1


@pytest.mark.parametrize(
    ("interrupts", "then", "status"),
    [
        (True, "child.finish()", INTERRUPTED),
        (True, "time.sleep(600)", INTERRUPTED),
        (False, "raise AssertionError", FAILED),
    ],
)
def test_children_end_with_their_test(tmp_path, interrupts, then, status):
    # All children keep this file open as long as they live.
    held = tmp_path / "held"
    os.mkfifo(held)
    reading = os.open(held, os.O_RDONLY | os.O_NONBLOCK)
    words = [f"exec 9> {held}", "echo '\"begun\"'", "read line"]
    words += ["kill -INT $PPID"] if interrupts else []
    script = "; ".join([*words, f"sleep {2 * WATCHDOG_S} & wait"])
    (tmp_path / "test_small.py").write_text(SUITE.format(script=script, then=then))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "children", "-p", "no:cacheprovider", "."],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(TESTS), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=WATCHDOG_S,
        check=False,
    )
    assert done.returncode == status, done.stdout
    assert select.select([reading], [], [], WATCHDOG_S)[0], "a child is left"
    assert os.read(reading, 1) == b""
    os.close(reading)
