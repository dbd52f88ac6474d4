"""The plugin that prints skips, and in CI fails on one that is not listed."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from skip_report import ALLOWED_SKIPS, read_allowed

TESTS = Path(__file__).resolve().parent
SUITE = """
import pytest

def test_that_passes():
    assert True

def test_that_is_skipped():
    pytest.skip("no such device")
"""
MODULE = 'import pytest\npytest.importorskip("a_module_that_is_missing")\n'


@pytest.fixture
def run_pytest(tmp_path):
    """Run pytest on a small suite, with the plugin; return exit status and output."""

    def run(*options, suite=SUITE, **environment):
        (tmp_path / "test_small.py").write_text(suite)
        (tmp_path / "pytest.ini").touch()
        inherited = {
            k: v for k, v in os.environ.items() if k not in ("CI", "PYTEST_ADDOPTS")
        }
        command = [sys.executable, "-m", "pytest", "-p", "skip_report", *options, "."]
        result = subprocess.run(
            command,
            cwd=tmp_path,
            env=inherited | {"PYTHONPATH": str(TESTS)} | environment,
            capture_output=True,
            text=True,
        )
        return result.returncode, result.stdout + result.stderr

    return run


def test_skips_are_printed_with_their_reason(run_pytest):
    status, output = run_pytest()
    assert status == 0
    assert "   1 no such device" in output


@pytest.mark.parametrize(
    ("options", "environment"),
    [(["--strict-skips"], {}), ([], {"CI": "true"}), (["-n", "2"], {"CI": "true"})],
)
def test_an_unlisted_skip_fails_the_run(run_pytest, options, environment):
    status, output = run_pytest(*options, **environment)
    assert status == 1
    assert "NOT LISTED in allowed_skips.txt: no such device" in output


@pytest.mark.parametrize("processes", ["0", "2"])
def test_a_module_that_skips_itself_counts(run_pytest, processes):
    options = ("--strict-skips", "-n", processes)
    status, output = run_pytest(*options, suite=MODULE + SUITE)
    assert status == 1
    assert "a_module_that_is_missing" in output


def test_a_listed_reason_passes(run_pytest):
    status, output = run_pytest("--strict-skips", "--allow-skip", "no such \\w+$")
    assert status == 0
    assert "NOT LISTED" not in output


def reasons_of_python(text):
    """Yield the reasons for skips that are literals in Python code."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and "skip" in ast.unparse(node.func):
            values = [word.value for word in node.keywords if word.arg == "reason"]
            if ast.unparse(node.func) == "pytest.skip":
                values += node.args
            yield from (each.value for each in values if isinstance(each, ast.Constant))


def test_the_reasons_in_the_tests_are_listed():
    found = set()
    for path in TESTS.rglob("*.py"):
        found.update(reasons_of_python(path.read_text(encoding="utf-8")))
    for path in TESTS.glob("c/**/*.[ch]"):
        found.update(re.findall(r'SKIP\("(.*)"\)', path.read_text(encoding="utf-8")))
    patterns = read_allowed(ALLOWED_SKIPS)
    unlisted = {
        reason
        for reason in found
        if not any(re.search(pattern, reason) for pattern in patterns)
    }
    assert found
    assert unlisted == set()


def test_a_listed_reason_must_say_why(tmp_path):
    path = tmp_path / "allowed_skips.txt"
    path.write_text("# a comment\n\nno GPU # CI has none\n")
    assert read_allowed(path) == ["no GPU"]
    path.write_text("no GPU\n")
    with pytest.raises(pytest.UsageError, match="does not say why"):
        read_allowed(path)
