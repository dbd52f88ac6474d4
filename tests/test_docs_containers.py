"""The seccomp profiles of docs/troubleshooting.md allow io_uring in containers."""

import json
import shutil
import subprocess

import pytest

import nvmeio
from children import run_child, skip_under_asan
from pages import blocks_of
from seccomp_profiles import container_report, docker_profile, program_of

PAGE = "docs/troubleshooting.md"
SAMPLES = pytest.mark.parametrize("sample", [docker_profile, container_report])


def profile_in(sample):
    """Return the profile in a sample."""
    found = json.loads(sample)
    return found["info"]["runtimeSpec"]["linux"]["seccomp"] if "info" in found else found


def allowing(sample, folder):
    """Return the profile that the page's command makes of a sample."""
    if shutil.which("jq") is None:
        pytest.skip("jq is not installed")
    name = "container.json" if "info" in json.loads(sample) else "default.json"
    (folder / name).write_text(sample)
    (command,) = (
        line
        for block in blocks_of(PAGE)
        for line in block.text.splitlines()
        if line.startswith("jq ") and f" {name} " in line
    )
    subprocess.run(["sh", "-c", command], cwd=folder, check=True)
    return json.loads((folder / "nvmeio-seccomp.json").read_text())


def report_under(profile, folder):
    """Return the report of a process that runs under a profile."""
    skip_under_asan("makes system calls of its own")
    program = program_of(profile)
    return run_child("container", folder=str(folder), program=program).report


@SAMPLES
def test_the_profile_of_containers_refuses_io_uring_as_the_page_shows(sample, tmp_path):
    report = report_under(profile_in(sample()), tmp_path)
    (shown,) = (block.text for block in blocks_of(PAGE) if block.language == "pycon")
    told = repr(report["engines"]["io_uring"])
    assert shown.partition("\n")[2].split() == told.split()
    assert report["engine"] != "io_uring"
    assert report["engines"]["libaio"] == nvmeio.engines()["libaio"]


@SAMPLES
def test_the_page_makes_a_profile_that_allows_io_uring(sample, tmp_path):
    report = report_under(allowing(sample(), tmp_path), tmp_path)
    assert report["engines"] == nvmeio.engines()


@SAMPLES
def test_the_page_adds_three_names_to_a_profile_and_changes_nothing_else(sample, tmp_path):
    before, after = profile_in(sample()), allowing(sample(), tmp_path)
    added = after["syscalls"].pop()
    names = {"io_uring_setup", "io_uring_enter", "io_uring_register"}
    assert set(added["names"]) == names
    assert added["action"] == "SCMP_ACT_ALLOW"
    assert after == before
