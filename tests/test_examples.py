"""The examples run, report right results, and leave nothing behind."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from children import skip_under_asan

pytest.importorskip("torch", reason="torch is not installed")

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def run(folder, name, **options):
    """Run an example in a folder; return its status and its output lines."""
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *words],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    # torch makes a folder of its own there.
    left = [name for name in os.listdir(folder) if not name.startswith("torchinductor_")]
    assert left == []
    assert done.stderr == ""
    return done.returncode, [" ".join(line.split()) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_a_killed_rank_resumes_with_the_same_losses(tmp_path):
    status, lines = run(tmp_path, "train_gpt.py", steps=20)
    assert status == 0, lines
    assert lines[0] == "48000 tokens in 3 shards, for 2 ranks"
    whole, killed, resumed = lines[1:]
    losses = r"20 steps, loss 5\.\d{3} to 3\.\d{3}"
    assert re.fullmatch(f"without interruption {losses}", whole)
    assert re.fullmatch(f"killed and resumed {losses}", killed)
    assert resumed == "resumed from step 10, with the same losses to the last digit"


def test_features_that_do_not_fit_into_memory_are_gathered(tmp_path):
    skip_under_asan("needs more memory than the example leaves itself")
    # So little that even importing torch would not fit.
    options = {"nodes": 400_000, "memory": 64, "steps": 20}
    status, lines = run(tmp_path, "gnn_features.py", **options)
    assert status == 0, lines
    assert lines[0].startswith("features of 195 MiB; the process may have 64 MiB")
    assert lines[1] == "all of them do not fit into memory"
    assert re.fullmatch(r"56320 rows of 512 bytes, \d+ rows/s", lines[3])
    assert lines[-1] == "every row was the right one"


def test_a_service_answers_the_clients_that_still_wait(tmp_path):
    options = {"count": 20_000, "requests": 2000, "rows": 16}
    status, lines = run(tmp_path, "feature_service.py", **options)
    assert status == 0, lines
    counts = re.fullmatch(r"(\d+) answered, (\d+) cancelled, (\d+) out of time", lines[1])
    assert sum(map(int, counts.groups())) == 2000
    assert all(int(count) > 0 for count in counts.groups())
    assert re.fullmatch(r"\d+ rows of 512 bytes, \d+ rows/s", lines[2])
    assert lines[-2:] == ["every row was the right one", "nothing is left"]


def test_an_embedding_table_ends_as_in_memory(tmp_path):
    options = {"rows": 3000, "batch": 1000, "steps": 4}
    status, lines = run(tmp_path, "embedding_table.py", **options)
    assert status == 0, lines
    assert re.fullmatch(r"4 steps of 1000 ids in 2 processes, \d+ ids/s", lines[0])
    assert lines[-1] == "as in memory, to the last bit"


@pytest.mark.slow
def test_training_goes_on_beyond_memory(tmp_path):
    skip_under_asan("needs memory beside that of the training")
    status, lines = run(tmp_path, "train_beyond_memory.py", steps=2)
    assert status == 0, lines
    if any(line.startswith("limit none") for line in lines):
        # Without a limit, both loops train.
        assert any("(2 steps of both)" in line for line in lines)
        assert lines[-1] == "trained with memory to spare"
        return
    (limit,) = [int(line.split()[1]) for line in lines if line.startswith("limit ")]
    (killed,) = [line for line in lines if " killed " in line]
    found = re.fullmatch(r"ordinary killed by the kernel at (\d+) MiB, in step 1", killed)
    # Memory is sampled at intervals.
    assert limit * 0.8 < int(found[1]) <= limit
    (beyond,) = [line for line in lines if line.startswith("beyond memory 2 steps")]
    found = re.search(r"loss \d\.\d{3} to \d\.\d{3}, (\d+) MiB at most$", beyond)
    assert int(found[1]) <= limit
    assert lines[-1] == "trained beyond memory"


def test_an_interrupted_training_leaves_nothing_behind(tmp_path):
    process = subprocess.Popen(
        [sys.executable, EXAMPLES / "train_beyond_memory.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while True:
        assert process.poll() is None, process.communicate()
        for child in children.read_text(encoding="ascii").split():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
                if b"--run" in words:
                    break
        else:
            time.sleep(0.01)
            continue
        break
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate()
    assert process.returncode == 130, printed + errors
    assert errors == "\ninterrupted; the files are removed\n"
    assert not Path(f"/proc/{child}").exists()
    for folder in ("/sys/fs/cgroup", "/sys/fs/cgroup/memory"):
        assert not Path(folder, f"nvmeio-beyond-{process.pid}").exists()
    assert os.listdir(tmp_path) == []
