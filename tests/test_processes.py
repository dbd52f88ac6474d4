"""Several processes of pytest: groups of tests, and the seed of a stress run."""

import os
import re
import subprocess
import sys

import pytest

from children import TESTS, WATCHDOG_S

GROUPED = """
import os
import pytest

@pytest.fixture
def tmpfs():
    pass

@pytest.mark.parametrize("number", range(8))
def test_that_mounts(tmpfs, number):
    print("mounts:", os.environ["PYTEST_XDIST_WORKER"])

@pytest.mark.parametrize("number", range(8))
def test_that_does_not(number):
    print("does not:", os.environ["PYTEST_XDIST_WORKER"])
"""
SEEDED = """
import pytest

@pytest.mark.amount(short=2, full=2, long=2)
@pytest.mark.parametrize("number", range(8))
def test_cases(number, seeds):
    print("drawn:", *seeds)
"""


@pytest.fixture
def printed(tmp_path):
    """A function that returns the output of a small suite, run by two processes."""

    def printed(suite, *folders):
        (tmp_path / "test_small.py").write_text(suite)
        (tmp_path / "pytest.ini").touch()
        paths = [*folders, TESTS, os.environ.get("PYTHONPATH", "")]
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "conftest",
            "-p",
            "no:cacheprovider",
        ]
        done = subprocess.run(
            [*command, "-n", "2", "--dist", "loadgroup", "-rP", "."],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
            capture_output=True,
            text=True,
            timeout=WATCHDOG_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return printed


def test_tests_that_mount_run_in_one_process(printed):
    output = printed(GROUPED)
    mounting = re.findall(r"^mounts: (\w+)$", output, re.MULTILINE)
    others = re.findall(r"^does not: (\w+)$", output, re.MULTILINE)
    assert (len(mounting), len(set(mounting))) == (8, 1)
    assert (len(others), len({*mounting, *others})) == (8, 2)


def test_processes_draw_from_the_printed_seed(printed):
    output = printed(SEEDED, TESTS / "stress")
    (seed,) = re.findall(r"--seed=(\d+)$", output, re.MULTILINE)
    drawn = re.findall(r"^drawn: (\d+) \d+$", output, re.MULTILINE)
    assert (len(drawn), set(drawn)) == (8, {seed})
