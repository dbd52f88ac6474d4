"""nvmeio.torch.dcp under torchrun: FSDP2, asynchronous saves, ranks that die or hang."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as dcp

from nvmeio.torch.dcp import FileSystemReader

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(600)]

PROGRAM = Path(__file__).with_name("program.py")
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_fsdp.py"
WATCHDOG_S = 240


class Run:
    """A program that torchrun has started on several ranks."""

    def __init__(self, name, size, **arguments):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(size), str(PROGRAM), name]
        self.process = subprocess.Popen(
            [*command, json.dumps(arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        self.errors = []
        self.reader = threading.Thread(
            target=lambda: self.errors.extend(self.process.stderr), daemon=True
        )
        self.reader.start()
        self.watchdog = threading.Timer(WATCHDOG_S, self.end)
        self.watchdog.daemon = True
        self.watchdog.start()

    def end(self):
        """End it and its ranks."""
        os.killpg(self.process.pid, signal.SIGKILL)

    def reports(self):
        """Yield the reports of the ranks."""
        for line in self.process.stdout:
            yield json.loads(line)

    def finish(self):
        """Wait, and return all reports and the exit status."""
        found = [*self.reports()]
        status = self.process.wait()
        self.watchdog.cancel()
        self.reader.join()
        return found, status


def run(name, size, **arguments):
    """Run a function on several ranks; return what they report."""
    ranks = Run(name, size, **arguments)
    found, status = ranks.finish()
    assert status == 0, "".join(ranks.errors)
    assert sorted(each["rank"] for each in found) == [*range(size)]
    return found


@pytest.mark.parametrize("saved", [1, 2, 4])
def test_fsdp_and_its_optimizer_are_loaded_by_more_or_fewer_ranks(tmp_path, saved):
    folder = str(tmp_path / "checkpoint")
    reports = run("save", saved, folder=folder, steps=3)
    expected = reports[0]["digests"]
    assert len(expected) > 10
    assert all(each["digests"] == expected for each in reports)
    for loaded in {1: [2], 2: [1], 4: [2, 3]}[saved]:
        for found in run("load", loaded, folder=folder):
            assert found["digests"] == expected
            assert found["steps"] == 3


@pytest.mark.parametrize("way", ["THREAD", "PROCESS"])
def test_an_asynchronous_save_has_the_state_at_the_call(tmp_path, way):
    folder = str(tmp_path / "checkpoint")
    expected = run("save", 2, folder=folder, steps=2, way=way)[0]["digests"]
    for found in run("load", 2, folder=folder):
        assert found["digests"] == expected


@pytest.mark.parametrize("at", ["write", "finish", "read", "async"])
def test_an_error_of_one_rank_is_raised_on_all_at_once(tmp_path, at):
    folder, size = tmp_path / "checkpoint", 4
    broken = 0 if at == "finish" else size - 1
    for told in run("fail", size, folder=str(folder), at=at):
        # A rank that had waited for the group's timeout would report that.
        assert f"the drive of rank {broken} is broken" in told["error"]
    state = {"step": 0, "data": torch.zeros(64, 4096)}
    with pytest.warns(UserWarning, match=r"torch\.distributed is"):
        dcp.load(state, storage_reader=FileSystemReader(folder), no_dist=True)
    assert state["step"] == 1


@pytest.mark.parametrize(("saved", "loaded"), [(1, 2), (4, 2), (4, 3)])
def test_each_rank_reads_its_share(tmp_path, saved, loaded):
    folder = str(tmp_path / "checkpoint")
    run("save_large", saved, folder=folder)
    for told in run("load_large", loaded, folder=folder):
        assert told["right"]
        assert told["share"] <= told["read"] <= 1.1 * told["share"]


@pytest.mark.parametrize("seed", range(6))
def test_a_rank_that_is_killed_leaves_the_old_checkpoint_or_the_new_one(tmp_path, seed):
    rng = random.Random(f"killed-{seed}")
    folder, size = tmp_path / "checkpoint", rng.choice([2, 4])
    ranks = Run("save_on_and_on", size, folder=str(folder))
    pids, saved, wanted = {}, 0, rng.randint(2, 12)
    for said in ranks.reports():
        if "pid" in said:
            pids[said["rank"]] = said["pid"]
            continue
        saved = max(saved, said["saved"])
        if saved >= wanted:
            break
    time.sleep(rng.random() / 20)
    os.kill(pids[rng.randrange(size)], signal.SIGKILL)
    reports, status = ranks.finish()
    assert status != 0
    saved = max([saved, *(said["saved"] for said in reports if "saved" in said)])
    state = {"step": 0, "data": torch.zeros(64, 4096)}
    with pytest.warns(UserWarning, match=r"torch\.distributed is"):
        dcp.load(state, storage_reader=FileSystemReader(folder), no_dist=True)
    assert state["step"] in (saved, saved + 1)
    torch.manual_seed(state["step"])
    assert torch.equal(state["data"], torch.randn(64, 4096))


def test_a_hanging_rank_is_reported_after_the_timeout_of_the_group(tmp_path):
    folder, patience_s = tmp_path / "checkpoint", 5
    ranks = Run("hang", 2, folder=str(folder), patience_s=patience_s)
    pids, said = {}, {}
    for said in ranks.reports():
        if "error" in said:
            break
        pids[said["rank"]] = said["pid"]
    # The hanging rank would never end by itself.
    os.kill(pids[1], signal.SIGKILL)
    ranks.finish()
    assert said["rank"] == 0
    assert patience_s <= said["waited_s"]
    state = {"step": 0, "data": torch.zeros(64, 4096)}
    with pytest.warns(UserWarning, match=r"torch\.distributed is"):
        dcp.load(state, storage_reader=FileSystemReader(folder), no_dist=True)
    assert state["step"] == 1


def train(folder, *, killed_at=None):
    """Run the example; kill a rank after `killed_at` reports, or return the last line."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(EXAMPLE), "--folder", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        lines = []
        for line in process.stdout:
            lines.append(line.strip())
            if len(lines) == killed_at:
                children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
                os.kill(int(children.read_text().split()[-1]), signal.SIGKILL)
        errors = process.stderr.read()
    assert (process.returncode == 0) == (killed_at is None), errors
    return lines


def test_killed_and_resumed_training_ends_as_uninterrupted_training(tmp_path):
    straight = train(tmp_path / "straight")
    assert len(straight) == 9
    killed = train(tmp_path / "killed", killed_at=4)
    assert killed[:4] == straight[:4]
    resumed = train(tmp_path / "killed")
    assert resumed[-1] == straight[-1]
    assert 1 < len(resumed) < 9
