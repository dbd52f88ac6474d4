"""The examples run, report right results, and leave nothing behind."""

import argparse
import contextlib
import importlib.util
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from children import skip_under_asan

pytest.importorskip("torch", reason="torch is not installed")

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def run(folder, name, errors=False, **options):
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
    assert bool(done.stderr) == errors, done.stderr
    printed = done.stderr if errors else done.stdout
    return done.returncode, [" ".join(line.split()) for line in printed.splitlines()]


def module_of(name, monkeypatch):
    """Return an example as a module."""
    spec = importlib.util.spec_from_file_location("example", EXAMPLES / name)
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look up their module by name.
    monkeypatch.setitem(sys.modules, "example", module)
    spec.loader.exec_module(module)
    return module


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


class TestComparison:
    """The verdict of the killed training on its losses."""

    @pytest.mark.parametrize(
        ("log", "words"),
        [
            (
                [(0, 1, 3.0), (0, 2, 2.0), (1, 2, 2.0), (1, 3, 1.0)],
                "   resumed from step 1, ",
            ),
            ([(0, 1, 3.0), (0, 2, 2.0), (0, 3, 1.0)], "IT WAS NOT RESUMED"),
            (
                [(0, 1, 3.0), (0, 2, 2.0), (1, 2, 2.0), (1, 3, 1.5)],
                "THE LOSSES ARE DIFFERENT",
            ),
            (
                [(0, 1, 3.0), (0, 2, 2.0), (1, 2, 2.5), (1, 3, 1.0)],
                "THE LOSSES ARE DIFFERENT",
            ),
            ([(0, 1, 3.0), (0, 2, 2.0), (2, 4, 1.0)], "THE LOSSES ARE DIFFERENT"),
        ],
    )
    def test_the_verdict_and_the_exit_status(
        self, monkeypatch, tmp_path, capsys, log, words
    ):
        example = module_of("train_gpt.py", monkeypatch)
        keys = ("resumed", "step", "loss")
        lines = [json.dumps(dict(zip(keys, line, strict=True))) for line in log]
        (tmp_path / "losses").write_text("\n".join(lines))
        killed = example.read_log(tmp_path / "losses")
        whole = example.Run({1: 3.0, 2: 2.0, 3: 1.0}, 0, True)
        assert example.judge(whole, killed, 3) == words.startswith(" ")
        assert capsys.readouterr().out.splitlines()[-1].startswith(words)

    def test_a_loss_that_has_not_fallen_is_reported(self, monkeypatch, capsys):
        example = module_of("train_gpt.py", monkeypatch)
        runs = [example.Run({1: 3.0, 2: 3.0}, resumed, True) for resumed in (0, 1)]
        assert not example.judge(*runs, 2)
        assert capsys.readouterr().out.splitlines()[-1] == "THE LOSS HAS NOT FALLEN"


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("train_gpt.py", "20 are"),
        ("gnn_features.py", "one is"),
        ("train_beyond_memory.py", "one is"),
        ("embedding_table.py", "one is"),
    ],
)
def test_no_steps_at_all_are_refused(tmp_path, name, least):
    status, lines = run(tmp_path, name, errors=True, steps=0)
    assert (status, lines[-1]) == (
        2,
        f"{name}: error: --steps is 0; at least {least} needed",
    )


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


def test_features_that_fit_are_reported(tmp_path):
    skip_under_asan("needs more memory than the example leaves itself")
    options = {"nodes": 1000, "memory": 128, "steps": 2}
    status, lines = run(tmp_path, "gnn_features.py", **options)
    assert (status, lines[1]) == (1, "all of them FIT into memory")


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


@pytest.mark.parametrize("start", [True, False], ids=["before the start", "after it"])
def test_a_process_of_an_embedding_table_that_dies_is_reported(
    tmp_path, monkeypatch, capsys, start
):
    example = module_of("embedding_table.py", monkeypatch)
    context = multiprocessing.get_context("fork")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(example.multiprocessing, "get_context", lambda _: context)

    def die(process, folder, options, barrier):
        if process == 1 or not start:
            barrier.wait()
        if process == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(example, "train_on_disk", die)
    assert example.main(["--rows", "30", "--width", "2"]) == 1
    assert capsys.readouterr().out == "PROCESS 0 HAS FAILED: exit code -9\n"


def test_a_missing_update_of_an_embedding_table_is_reported(tmp_path, monkeypatch):
    example = module_of("embedding_table.py", monkeypatch)
    monkeypatch.setattr(example.torch, "set_num_threads", lambda _: None)
    options = argparse.Namespace(
        rows=300, width=8, dtype="float32", batch=100, steps=3, rate=0.1
    )
    example.create(tmp_path, options)
    expected = example.train_in_memory(options)
    updated = int((expected[2] != 0).any(1).sum())
    assert example.differing(tmp_path, expected) == 3 * updated
    for process in range(2):
        example.train_on_disk(process, str(tmp_path), options, threading.Barrier(1))
    assert example.differing(tmp_path, expected) == 0


class TestBeyondMemory:
    """A training that a memory limit kills, and one that runs within the limit."""

    @pytest.fixture
    def example(self, monkeypatch):
        """The example as a module."""
        return module_of("train_beyond_memory.py", monkeypatch)

    @pytest.mark.slow
    def test_a_limit_kills_only_the_ordinary_loop(self, tmp_path, control_group):
        skip_under_asan("needs memory beside that of the training")
        control_group("memory", {}, {"memory.max": "max"})
        status, lines = run(tmp_path, "train_beyond_memory.py", steps=2)
        assert status == 0, lines
        (limit,) = [int(line.split()[1]) for line in lines if line.startswith("limit ")]
        (killed,) = [line for line in lines if " killed " in line]
        found = re.fullmatch(
            r"ordinary killed by the kernel at (\d+) MiB, in step 1", killed
        )
        # Memory is sampled at intervals.
        assert limit * 0.8 < int(found[1]) <= limit
        (beyond,) = [line for line in lines if line.startswith("beyond memory 2 steps")]
        found = re.search(r"loss \d\.\d{3} to \d\.\d{3}, (\d+) MiB at most$", beyond)
        assert int(found[1]) <= limit
        assert lines[-1] == "trained beyond memory"

    @pytest.mark.slow
    def test_without_a_limit_the_losses_are_the_same(self, tmp_path):
        status, lines = run(tmp_path, "train_beyond_memory.py", limit=0, steps=2, threads=1)
        assert status == 0, lines
        assert not any(line.startswith("limit ") for line in lines)
        assert "losses the same to the last digit (2 steps of both)" in lines
        assert lines[-1] == "trained with memory to spare"
        assert sum(bool(re.fullmatch(r"\d+ tokens/s", line)) for line in lines) == 2
        written = [
            int(found[1])
            for line in lines
            if (found := re.fullmatch(r"\d+ MiB read, (\d+) MiB written", line))
        ]
        # Each step writes the states, which have twice 218 MiB.
        assert written[0] < 10
        assert written[1] > 2 * 2 * 218
        waits = r"\d+\.\d% of the time waiting for states, \d+\.\d% for tokens"
        assert sum(bool(re.fullmatch(waits, line)) for line in lines) == 2
        assert lines.count("waits for activations are not counted") == 1

    @pytest.mark.parametrize(
        ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
    )
    def test_a_signal_leaves_nothing_behind(self, tmp_path, number, status):
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
        process.send_signal(number)
        printed, errors = process.communicate()
        assert process.returncode == status, printed + errors
        assert errors == "\ninterrupted; the files are removed\n"
        assert not Path(f"/proc/{child}").exists()
        for folder in ("/sys/fs/cgroup", "/sys/fs/cgroup/memory"):
            assert not Path(folder, f"nvmeio-beyond-{process.pid}").exists()
        assert os.listdir(tmp_path) == []

    @pytest.mark.parametrize(
        ("ending", "killer"), [("kill -9 $$", "SIGKILL"), ("exit 3", None), ("true", "")]
    )
    def test_the_end_of_a_loop_is_described(
        self, example, tmp_path, monkeypatch, ending, killer
    ):
        python = tmp_path / "python"
        said = '{"step": 1}\n{"loss": 0.5}\n{"step": 2}'
        python.write_text(f"#!/bin/sh\necho '{said}'\n{ending}\n")
        python.chmod(0o700)
        monkeypatch.setattr(example.sys, "executable", str(python))
        if killer is None:
            with pytest.raises(ChildProcessError, match=r"the ordinary loop .* status 3$"):
                example.start("ordinary", [], 0)
            return
        found = example.start("ordinary", [], 0)
        assert (found.steps, found.losses, found.killer) == (2, [0.5], killer)
        assert len(found.memory) >= 1

    def test_a_missing_permission_to_limit_is_reported(self, example, monkeypatch, capsys):
        def refuse(*_):
            raise PermissionError(13, "Permission denied", "/sys/fs/cgroup/memory/group")

        monkeypatch.setattr(example.Path, "mkdir", refuse)
        assert not example.can_limit(1 << 30)
        words = "none: control groups cannot be made here: Permission denied"
        assert capsys.readouterr().out.split(maxsplit=1) == ["limit", f"{words}\n"]

    @pytest.mark.parametrize(
        ("losses", "killers", "limited", "exact", "right", "words"),
        [
            ([4.5], ["the kernel", ""], True, True, True, "trained beyond memory"),
            ([4.0], ["the kernel", ""], True, True, False, ""),
            ([4.0], ["the kernel", ""], True, False, True, "trained beyond memory"),
            ([4.5, 3.5], ["", ""], False, True, True, "trained with memory to spare"),
            ([4.5, 3.0], ["", ""], False, True, False, ""),
            ([4.5, 3.5], ["", ""], True, True, False, "THE ORDINARY LOOP FITS TOO"),
            ([], ["SIGKILL"] * 2, True, True, False, "THE DRIVE WAS OF NO USE"),
        ],
    )
    def test_the_verdict_and_the_exit_status(
        self, example, capsys, losses, killers, limited, exact, right, words
    ):
        ordinary = example.Run("ordinary", losses=losses, killer=killers[0])
        beyond = example.Run("beyond memory", losses=[4.5, 3.5], killer=killers[1])
        assert example.judge(ordinary, beyond, limited, exact) == right
        about, *last = capsys.readouterr().out.splitlines()
        assert last == ([words] if words else [])
        different = losses != beyond.losses[: len(losses)]
        wanted = "the same to the last digit" if not different else "DIFFERENT"
        if different and not exact:
            wanted = "different, as several threads of torch may make them"
        assert f" {wanted} ({len(losses)} steps of both)" in about

    @pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "no matplotlib"])
    def test_memory_over_time_is_charted(
        self, example, tmp_path, monkeypatch, capsys, drawn
    ):
        chart = tmp_path / "chart.png"
        memory = [(number / 10, number << 20) for number in range(23)]
        runs = [example.Run(name, memory=memory) for name in ("ordinary", "beyond memory")]
        if drawn:
            pytest.importorskip("matplotlib")
        else:
            monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        example.show_memory(runs, 30 << 20, chart)
        lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
        if drawn:
            assert lines == [f"chart {chart}"]
            assert chart.read_bytes().startswith(b"\x89PNG")
            return
        figures = "0 2 4 6 8 10 12 14 16 18 20 22 MiB in 2.2 s"
        assert lines == [
            "chart none: matplotlib is not installed; the figures are:",
            f"ordinary {figures}",
            f"beyond memory {figures}",
        ]

    def test_a_folder_in_memory_is_refused(self, tmpfs):
        status, lines = run(tmpfs, "train_beyond_memory.py", errors=True)
        assert status == 1
        assert re.search(r"is in memory \(tmpfs\); name a folder on a drive$", lines[-1])
