"""``nvmeio checkpoints``, and ``nvmeio verify`` of a root."""

import datetime as dt
import json
import os
import re
import stat

import numpy as np
import pytest

from commands import call_nvmeio, nvmeio, nvmeio_in_terminal
from nvmeio.checkpoint import Checkpointer
from nvmeio.checkpoint._restoring import Held


@pytest.fixture
def root(tmp_path):
    with Checkpointer(tmp_path / "run", keep=None) as checkpointer:
        for step in (2, 10, 100):
            checkpointer.save(step, {"x": np.full(5000, step)})
    return tmp_path / "run"


def damage(root, step, at=4500):
    """Change a byte of a step's tensors."""
    with open(root / f"step-{step}" / "tensors.safetensors", "r+b") as file:
        file.seek(at)
        file.write(b"\xff")


def test_steps_are_listed_with_their_sizes_and_age(root):
    found = call_nvmeio("checkpoints", root)
    assert found.status == 0, found.err
    lines = found.out.splitlines()
    assert lines[0].split() == ["step", "size", "age", "checksums"]
    assert [line.split()[0] for line in lines[1:4]] == ["2", "10", "100"]
    assert all(line.split()[-2:] == ["crc32c", "complete"] for line in lines[1:4])
    assert lines[1].split()[2:6:2] == ["KiB", "s"]
    assert lines[-1] == "3 steps, 3 complete"


def test_a_step_that_a_run_prunes_meanwhile_is_not_listed(root, monkeypatch):
    entered, pruned = Held.__enter__, []

    def enter_and_prune(held):
        if not pruned:
            pruned.append(10)
            with Checkpointer(root, keep=None) as run:
                run.remove(10)
        return entered(held)

    monkeypatch.setattr(Held, "__enter__", enter_and_prune)
    found = call_nvmeio("checkpoints", root)
    assert found.status == 0, found.err
    assert found.out.splitlines()[-1] == "2 steps, 2 complete"


def test_a_step_is_listed_whatever_a_run_does_meanwhile(tmp_path, monkeypatch):
    """It keeps one, and saves the next."""
    begun, left = Held.__init__, [3]
    with Checkpointer(tmp_path, keep=1) as run:
        run.save(1, 1)

        def save_and_begin(held, folder, step):
            if left[0]:
                left[0] -= 1
                run.save(step + 1, 1)
            begun(held, folder, step)

        monkeypatch.setattr(Held, "__init__", save_and_begin)
        found = call_nvmeio("checkpoints", tmp_path)
    assert found.status == 0, found.err
    assert found.out.splitlines()[-1] == "1 step, 1 complete"
    assert left == [0]


@pytest.mark.parametrize(
    ("ago", "age"),
    [
        *(({"days": 49}, "49 d"), ({"hours": 47}, "47 h"), ({"minutes": 119}, "119 min")),
        *(({"minutes": 30}, "30 min"), ({"hours": -9}, "0 s"), (None, "-")),
    ],
    ids=str,
)
def test_ages_do_not_depend_on_the_time_zone(root, monkeypatch, ago, age):
    monkeypatch.setenv("TZ", "UTC-3")
    saved = "some day"
    if ago is not None:
        zone = dt.timezone(dt.timedelta(hours=-7))
        moment = dt.datetime.now(zone) - dt.timedelta(**ago)
        saved = moment.strftime("%Y-%m-%dT%H:%M:%S%z")
    path = root / "step-2" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"saved": saved}))
    found = nvmeio("checkpoints", root)
    assert re.search(rf"^2 +[0-9.]+ KiB +{age} ", found.out.splitlines()[1].strip())


def test_a_damaged_step_is_listed_with_its_file(root):
    os.truncate(root / "step-10" / "tree.json", 10)
    (root / ".step-11.host-1-2-00000000.nvmeio-tmp").mkdir()
    found = call_nvmeio("checkpoints", root)
    assert found.status == 1
    assert f"{root}/step-10/tree.json has 10 bytes" in found.out
    assert found.out.splitlines()[-1] == (
        "3 steps, 2 complete; 1 unfinished, or left by a process that died, which the "
        "next run that saves here removes"
    )


def test_json_has_exact_values(root):
    os.unlink(root / "step-10" / "tree.json")
    os.unlink(root / "step-100" / "manifest.json")
    os.mknod(root / "step-100" / "manifest.json", stat.S_IFSOCK | 0o600)
    found = json.loads(call_nvmeio("checkpoints", root, "--json").out)
    steps = {each["step"]: each for each in found["steps"]}
    assert list(steps) == [2, 10, 100]
    folder = root / "step-2"
    sizes = [path.stat().st_size for path in folder.iterdir() if path.stem != "manifest"]
    assert steps[2]["bytes"] == sum(sizes)
    assert (steps[2]["complete"], steps[2]["problem"]) == (True, None)
    assert steps[10]["problem"] == f"{root}/step-10/tree.json is missing"
    words = f"[Errno 6] No such device or address: '{root}/step-100/manifest.json'"
    assert steps[100]["problem"] == words
    assert found["unfinished"] == []


def test_the_folder_of_a_step_is_no_root(root):
    found = call_nvmeio("checkpoints", root / "step-10")
    assert (found.status, found.out) == (1, "")
    assert "it is the folder of step 10; its ROOT is the folder above" in found.err


@pytest.mark.parametrize("kind", ["empty", "missing", "link", "file"])
def test_a_folder_without_checkpoints(tmp_path, kind):
    path = tmp_path if kind == "empty" else tmp_path / "no"
    if kind == "link":
        path.symlink_to("gone")
    elif kind == "file":
        path.touch()
    found = call_nvmeio("checkpoints", path)
    assert found.status == 1
    assert ("0 steps, 0 complete" in found.out) == (kind == "empty")
    assert {
        "empty": "",
        "missing": "there is no such folder",
        "link": "it is a symbolic link to 'gone', which does not exist",
        "file": "it is not a folder",
    }[kind] in found.err


def test_verify_reads_all_of_each_step(root):
    found = call_nvmeio("verify", root)
    assert (found.status, found.err) == (0, "")
    fine = [f"{root}/step-{step}: OK" for step in (2, 10, 100)]
    assert found.out.splitlines() == [*fine, "3 checkpoints, 0 bad"]
    damage(root, 10)
    found = call_nvmeio("verify", root)
    assert found.status == 1
    assert found.out.splitlines() == [fine[0], fine[2], "3 checkpoints, 1 bad"]
    assert found.err.startswith(
        f"nvmeio verify: error: {root}/step-10/tensors.safetensors is damaged: bytes 0 to"
    )
    assert found.err.count("\n") == 1
    for step in (10, 100):
        found = call_nvmeio("verify", root / f"step-{step}")
        assert found.status == (step == 10)
        assert found.out.splitlines()[-1] == f"1 checkpoint, {int(step == 10)} bad"
    # The list checks only sizes.
    assert call_nvmeio("checkpoints", root).status == 0
    root = root.rename(root.parent / "step-4")
    found = call_nvmeio("verify", root)
    assert (found.status, found.out.splitlines()[-1]) == (1, "3 checkpoints, 1 bad")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (".", "there are no checkpoints of nvmeio.checkpoint; it has dcp, file, run"),
        ("missing", "there are no checkpoints of nvmeio.checkpoint; there is no such fol"),
        ("file", "Not a directory"),
        ("dcp", "it has a checkpoint of torch.distributed.checkpoint, which nvmeio."),
        ("run/step-7", "step-7"),
    ],
)
def test_verify_goes_on_after_a_folder_without_checkpoints(root, name, words):
    (root.parent / "file").touch()
    (root.parent / "dcp").mkdir()
    (root.parent / "dcp" / ".metadata").touch()
    found = nvmeio("verify", name, root, cwd=root.parent)
    assert found.status == 1
    assert found.err.startswith("nvmeio verify: error: ")
    assert words in found.err
    assert found.out.splitlines()[-2].endswith("/step-100: OK")
    assert found.out.splitlines()[-1].endswith(" checkpoints, 1 bad")


def test_verify_passes_over_a_step_that_a_run_prunes_meanwhile(root, monkeypatch):
    verify = Checkpointer.verify

    def verify_and_prune(self, step, **options):
        verify(self, step, **options)
        if step == 2:
            with Checkpointer(root, keep=None) as run:
                run.remove(10)

    monkeypatch.setattr(Checkpointer, "verify", verify_and_prune)
    found = call_nvmeio("verify", root)
    assert found.status == 0, found.err
    lines = found.out.splitlines()
    assert lines[1:] == [
        f"{root}/step-10: removed meanwhile",
        f"{root}/step-100: OK",
        "2 checkpoints, 0 bad",
    ]
    assert call_nvmeio("verify", root / "step-10").status == 1


def test_verify_shows_progress_in_a_terminal(root):
    found = nvmeio_in_terminal("verify", root / "step-2", until="step-2: .*%", typed=b"")
    assert (found.status, found.out.splitlines()[-1]) == (0, "1 checkpoint, 0 bad")
