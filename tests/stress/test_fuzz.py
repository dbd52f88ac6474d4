"""libFuzzer on pure functions: splitting transfers, merging records, reading headers.

A case runs a target of tests/fuzz many times: first on the inputs of its corpus, then on
libFuzzer's mutations of them.  An input that fails is kept in build/fuzz/found; after the
fix it belongs in the corpus.
"""

import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from builds import build
from children import WATCHDOG_S, run_tool, skip_sanitized, system_environment

ROOT = Path(__file__).resolve().parents[2]
FUZZ = ROOT / "tests" / "fuzz"
BUILT = ROOT / "build" / "fuzz"
FOUND = BUILT / "found"


@dataclass(frozen=True)
class Target:
    """The length and inputs of a case; the corpus covers a few more than `branches`."""

    runs: int
    input_bytes_max: int
    branches_min: int
    flags: tuple[str, ...] = ()


TARGETS = {
    "split": Target(runs=170_000, input_bytes_max=64, branches_min=90),
    "records": Target(runs=70_000, input_bytes_max=256, branches_min=280),
    "npy": Target(1_000, 512, 150, (f"-dict={FUZZ / 'npy.dict'}",)),
}


@pytest.fixture(scope="session")
def built():
    """The compiled targets, which are written in C."""
    if shutil.which("clang") is None:
        pytest.skip("clang is not installed")
    runtime = run_tool("clang", "--rtlib=compiler-rt", "-print-libgcc-file-name")
    if not Path(runtime.strip()).exists():
        pytest.skip("clang is installed without libFuzzer")
    build(ROOT / "scripts" / "build-fuzz", sys.executable)


@pytest.fixture
def command(request, target):
    """Return the command that runs a target."""
    if (FUZZ / f"fuzz_{target}.c").exists():
        request.getfixturevalue("built")
        return [BUILT / f"fuzz_{target}"]
    if importlib.util.find_spec("atheris") is None:
        pytest.skip("atheris is not installed")
    skip_sanitized("and libFuzzer want the same hooks")
    return [sys.executable, FUZZ / f"fuzz_{target}.py"]


def fuzz(command, target, seed, folder):
    """Run a target, which leaves new inputs in a folder; return libFuzzer's output."""
    known = TARGETS[target]
    options = [
        f"-runs={known.runs}",
        f"-max_len={known.input_bytes_max}",
        # libFuzzer's seed has 32 bits, and 0 means a random one.
        f"-seed={seed % (2**32 - 1) + 1}",
        f"-timeout={WATCHDOG_S}",
        f"-artifact_prefix={FOUND}/{target}-",
    ]
    FOUND.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [*command, *options, *known.flags, folder, FUZZ / "corpus" / target],
        cwd=ROOT,
        env=system_environment() if command[0] != sys.executable else None,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="backslashreplace",
        check=False,
    )
    kept = re.search(r"Test unit written to (\S+)", done.stdout)
    if kept:
        again = shlex.join(map(str, [*command, kept[1]]))
        done.stdout += f"\nThe input alone: {again}\n"
    return done


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.xdist_group("fuzz")
@pytest.mark.amount(short=1, full=3, long=90)
def test_no_input_breaks_a_target(command, target, seeds, tmp_path):
    for seed in seeds:
        new = tmp_path / str(seed)
        new.mkdir()
        done = fuzz(command, target, seed, new)
        shutil.rmtree(new)
        assert done.returncode == 0, done.stdout[-8000:]
        last = re.search(r"^#(\d+)\s+DONE\s+cov: (\d+)", done.stdout, re.MULTILINE)
        assert int(last[1]) >= TARGETS[target].runs, done.stdout[-8000:]
        # Fewer branches mean that the target is built without coverage, so the fuzzer is
        # blind.
        assert int(last[2]) >= TARGETS[target].branches_min, done.stdout[-8000:]


def test_every_target_has_a_small_corpus():
    assert {path.stem for path in FUZZ.glob("fuzz_*.*")} == {f"fuzz_{t}" for t in TARGETS}
    for target in TARGETS:
        sizes = [path.stat().st_size for path in (FUZZ / "corpus" / target).iterdir()]
        assert 10 <= len(sizes) <= 100
        assert sum(sizes) <= 16 << 10
