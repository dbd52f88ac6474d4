"""The faults of tests/mutants can be planted; `make mutants` runs the tests on them."""

import subprocess

import pytest

from children import find_tool, system_environment
from pages import ROOT

PATCHES = sorted((ROOT / "tests" / "mutants").glob("*.patch"))


@pytest.mark.skipif(find_tool("git") is None, reason="git is not installed")
def test_every_fault_can_be_planted():
    for path in PATCHES:
        done = subprocess.run(
            ["git", "apply", "--check", path],
            cwd=ROOT,
            env=system_environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr


def test_every_fault_is_explained_and_names_tests():
    assert PATCHES
    for path in PATCHES:
        explanation, tests = path.read_text(encoding="utf-8").splitlines()[:2]
        assert explanation.endswith("."), path.name
        assert tests.startswith("Tests: "), path.name
        assert all((ROOT / test).is_file() for test in tests.split()[1:]), path.name
