"""The C library under faults: its own tests, and a fault at each place in turn."""

import os
import re
import shutil
import subprocess

import pytest

from builds import HARMLESS, faults_in, read_tallies

# Programs of tests/c that assert what bytes are, and what must not strike where they hold
# back I/O of one engine until another has gone on.
PROGRAMS = {"test_transfer": (), "test_gather": (), "test_handle": ("early", "wake")}
PROGRAM_S = 280
# Of the places of a sweep, so many go by between two that it tries.
STRIDE = 50


def run(program, *arguments, environment=None):
    """Run a program of C tests, and return what it says."""
    prefix = [shutil.which("setarch"), "-R"] if "tsan" in program.parent.name else []
    done = subprocess.run(
        [*prefix, program, *map(str, arguments)],
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        check=False,
    )
    if done.returncode == 77:
        pytest.skip(done.stderr.strip().splitlines()[-1].removeprefix("skipped: "))
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.mark.parametrize(
    "sanitizer",
    [
        pytest.param("plain", marks=pytest.mark.amount(short=1, full=3, long=200)),
        pytest.param("asan", marks=pytest.mark.amount(short=0, full=1, long=20)),
        pytest.param("tsan", marks=pytest.mark.amount(short=0, full=1, long=20)),
    ],
)
def test_the_c_tests_hold_under_faults(
    faulty_programs, tmp_path, monkeypatch, seeds, sanitizer
):
    folder = faulty_programs(sanitizer)
    monkeypatch.setenv("NVMEIO_TEST_DIR", str(tmp_path))
    for seed in seeds:
        for program, left_out in PROGRAMS.items():
            kinds = [kind for kind in HARMLESS if kind not in left_out]
            log = tmp_path / f"{program}-{seed}"
            words = dict.fromkeys(kinds, 20 + seed % 60)
            run(folder / program, environment=faults_in(words, log, seed))
            tallies = read_tallies(log)
            silent = {kind for kind in kinds if not tallies[kind].fired}
            # Little is registered, and few lanes are woken.
            assert silent <= {"register", "wake"}, tallies


@pytest.mark.parametrize(
    "sanitizer",
    [
        pytest.param("plain", marks=pytest.mark.amount(short=1, full=3, long=STRIDE)),
        pytest.param("asan", marks=pytest.mark.amount(short=0, full=1, long=STRIDE)),
        pytest.param("tsan", marks=pytest.mark.amount(short=0, full=1, long=20)),
    ],
)
@pytest.mark.parametrize("place", ["disk", "memory"])
def test_one_fault_at_each_place(
    faulty_programs, tmp_path, tmpfs, monkeypatch, seeds, sanitizer, place
):
    program = faulty_programs(sanitizer) / "test_sweep"
    monkeypatch.setenv("NVMEIO_TEST_DIR", str(tmp_path if place == "disk" else tmpfs))
    for seed in seeds:
        said = run(program, STRIDE, seed)
        assert int(re.search(r"^(\d+) faults$", said, re.MULTILINE)[1]) >= 60, said


@pytest.mark.parametrize("name", ["test_file_faults", "test_child_faults"])
def test_single_faults(faulty_programs, name):
    run(faulty_programs("plain") / name)
