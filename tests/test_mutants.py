"""The faults of tests/mutants can be planted; `make mutants` runs the tests on them."""

import re
import subprocess

import pytest

from children import find_tool, system_environment
from pages import ROOT

PATCHES = sorted((ROOT / "tests" / "mutants").glob("*.patch"))


@pytest.mark.skipif(find_tool("git") is None, reason="git is not installed")
def test_every_fault_can_be_planted_and_names_tests():
    assert PATCHES
    for path in PATCHES:
        tests = re.search(r"^Tests: (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        missing = [test for test in tests[1].split() if not (ROOT / test).is_file()]
        assert not missing, f"take {missing} out of the line Tests: of {path}"
        done = subprocess.run(
            ["git", "apply", "--check", path],
            cwd=ROOT,
            env=system_environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"make {path} fit the changed file: {done.stderr}"
