"""The examples do what they say, and leave nothing behind."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from children import skip_under_asan

pytest.importorskip("torch", reason="torch is not installed")

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def run(folder, name, errors=False, **options):
    """Run an example in a folder, and return its status and the lines that it prints."""
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *words],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    # torch has a folder of its own there.
    left = [name for name in os.listdir(folder) if not name.startswith("torchinductor_")]
    assert left == []
    assert bool(done.stderr) == errors, done.stderr
    printed = done.stderr if errors else done.stdout
    return done.returncode, [" ".join(line.split()) for line in printed.splitlines()]


@pytest.mark.slow
def test_a_model_learns_from_a_file_of_tokens(tmp_path):
    status, lines = run(tmp_path, "train_tokens.py", steps=24)
    assert status == 0, lines
    assert re.fullmatch(r"\d+ tokens of \d+ characters", lines[0])
    losses = [float(line.rpartition(" ")[2]) for line in lines if " loss 3" in line]
    steps = [line for line in lines if line.startswith("step ")]
    assert len(steps) == 8
    assert losses == sorted(losses, reverse=True)
    assert any(
        re.fullmatch(r"\d+ samples/s, \d+\.\d% of the time waiting", line) for line in lines
    )
    assert lines[-1] == "the loss has fallen"


@pytest.mark.parametrize("name", ["train_tokens.py", "gnn_features.py"])
def test_no_steps_at_all_are_refused(tmp_path, name):
    status, lines = run(tmp_path, name, errors=True, steps=0)
    assert (status, lines[-1]) == (
        2,
        f"{name}: error: --steps is 0; at least one is needed",
    )


@pytest.mark.slow
def test_a_model_that_learns_nothing_is_told(tmp_path):
    status, lines = run(tmp_path, "train_tokens.py", steps=1)
    assert (status, lines[-1]) == (1, "THE LOSS HAS NOT FALLEN")


def test_features_that_do_not_fit_into_memory_are_gathered(tmp_path):
    skip_under_asan("needs more memory than the example leaves itself")
    # So little that torch could not even be imported to its end within it.
    options = {"nodes": 400_000, "memory": 64, "steps": 20}
    status, lines = run(tmp_path, "gnn_features.py", **options)
    assert status == 0, lines
    assert lines[0].startswith("features of 195 MiB; the process may have 64 MiB")
    assert lines[1] == "all of them do not fit into memory"
    assert re.fullmatch(r"56320 rows of 512 bytes, \d+ rows/s", lines[3])
    assert lines[-1] == "every row was the right one"


def test_features_that_fit_are_told(tmp_path):
    skip_under_asan("needs more memory than the example leaves itself")
    options = {"nodes": 1000, "memory": 128, "steps": 2}
    status, lines = run(tmp_path, "gnn_features.py", **options)
    assert (status, lines[1]) == (1, "all of them FIT into memory")
