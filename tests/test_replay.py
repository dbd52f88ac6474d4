"""A failed stress test prints a command that repeats exactly the failure."""

import os
import re
import shlex
import subprocess
import sys

from children import TESTS, WATCHDOG_S, system_environment

SUITE = """
import pytest

@pytest.mark.amount(short=2, full=5, long=9)
@pytest.mark.parametrize("kind", ["good", "io_uring-a file.py"])
def test_cases(kind, seeds):
    drawn = []
    for seed in seeds:
        drawn.append(seed)
        print("drawn:", drawn)
        assert kind == "good" or seed < 9
"""


def run_and_fail(folder, *options):
    """Run a small suite as the stress tests are run; return its output."""
    (folder / "test_small.py").write_text(SUITE)
    (folder / "pytest.ini").touch()
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider"]
    paths = [str(TESTS / "stress"), str(TESTS), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [*command, *options, "."],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=WATCHDOG_S,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def line_of(printed):
    """Return the only line that repeats a failure."""
    (line,) = re.findall("^make .*$", printed, re.MULTILINE)
    return line


def options_of(line):
    """Return the arguments that pytest gets from such a line by the shell and make."""
    done = subprocess.run(
        [*shlex.split(line), "--dry-run", "--no-print-directory"],
        cwd=TESTS.parent,
        env=system_environment(),
        capture_output=True,
        text=True,
        timeout=WATCHDOG_S,
        check=True,
    )
    (command,) = re.findall(
        r"-m pytest (?:-n \d+ )?tests/stress (.*)$", done.stdout, re.MULTILINE
    )
    return shlex.split(command)


def drawn_in(printed):
    """Return the seeds that a test has drawn at its end."""
    return re.findall("^drawn: (.*)$", printed, re.MULTILINE)[-1]


def test_a_failed_case_is_repeated_alone(tmp_path):
    printed = run_and_fail(tmp_path, "--length", "full", "--seed", "7")
    assert "1 failed, 1 passed" in printed
    assert drawn_in(printed) == "[7, 8, 9]"
    again = run_and_fail(tmp_path, *options_of(line_of(printed)))
    assert "1 failed, 1 deselected" in again
    assert drawn_in(again) == "[9]"
    assert line_of(again) == line_of(printed)
