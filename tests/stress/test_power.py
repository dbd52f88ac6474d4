"""Power cuts: what was reported as synced is there afterwards, and right.

A child writes files on a drive that logs everything (``drive.py``), and is killed.  Then
the test checks the drive as it would be after power cuts at many earlier moments.
"""

import hashlib
import itertools
import random
import signal
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from builds import faults_in, read_tallies
from cases.power import appended_row, checkpoint_state, distributed_state
from children import Child
from drive import PowerCuts, mounted_drive, mounted_image
from helpers import ENGINES
from mounts import make_image
from nvmeio.checkpoint import Checkpointer, CheckpointError

# torch warns if there is no process group.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

CUTS = 24
KINDS = ("ext4", "xfs", "btrfs")


@dataclass
class Version:
    """The expected contents of a file, or of a part of it."""

    begun: int
    size: int
    digest: str
    whole: bool
    replaces: bool
    synced: int | None = None

    def is_in(self, content, offset):
        """Return whether a file holds this; None stands for no file."""
        if content is None or (self.whole and len(content) != self.size):
            return False
        part = content[offset : offset + self.size]
        return hashlib.sha256(part).hexdigest() == self.digest


@dataclass
class Promised:
    """The versions of each part of each file that the child has reported."""

    parts: dict = field(default_factory=lambda: defaultdict(list))
    # For each root of checkpoints: when each step was reported as saved.
    saved: dict = field(default_factory=lambda: defaultdict(list))

    def record(self, said):
        """Record a report."""
        for promise in said.get("begin", ()):
            place = promise.pop("path"), promise.pop("offset")
            self.parts[place].append(Version(begun=said["entries"], **promise))
        for promise in said.get("synced", ()):
            self.parts[promise["path"], promise["offset"]][-1].synced = said["entries"]
        if "saved" in said:
            root, step = said["saved"]
            self.saved[root].append((said["entries"], step))

    def synced_at(self):
        """Return when things were reported as synced, in entries of the log."""
        moments = {v.synced for versions in self.parts.values() for v in versions}
        moments |= {at for steps in self.saved.values() for at, _ in steps}
        return sorted(moments - {None})

    def check(self, folder, at, root):
        """Check all files after a cut at an entry; count right parts, list errors.

        `root` is the child's folder of the files that are now in `folder`.
        """
        held, broken, contents = 0, [], {}
        for (path, offset), versions in self.parts.items():
            if path not in contents:
                found = folder / Path(path).relative_to(root)
                contents[path] = found.read_bytes() if found.exists() else None
            begun = [version for version in versions if version.begun < at]
            done = [
                i for i, v in enumerate(begun) if v.synced is not None and v.synced <= at
            ]
            allowed = begun[done[-1] :] if done else begun
            replaces = versions[0].replaces
            if not begun or (not replaces and len(allowed) > 1) or not (done or replaces):
                continue
            if any(version.is_in(contents[path], offset) for version in allowed):
                held += bool(done)
            elif done or contents[path] is not None:
                broken.append((path, offset, at))
        for path, steps in self.saved.items():
            told = [step for entries, step in steps if entries <= at]
            look = LOOKS[Path(path).name]
            if problem := look(folder / Path(path).relative_to(root), told):
                broken.append((path, problem, at))
            held += bool(told)
        return held, broken


def wrong_in(root, told):
    """Return what is wrong with a root of checkpoints, given the promised steps."""
    checkpointer, problem = Checkpointer(root), ""
    newest = checkpointer.latest()
    if told and (newest is None or newest < max(told)):
        problem = f"the newest step is {newest}, and {max(told)} was saved"
    for folder in root.glob("step-*"):
        step = int(folder.name.removeprefix("step-"))
        try:
            checkpointer.verify(step)
            state = checkpointer.restore(step)
            expected = checkpoint_state(state["seed"], state["size"])["parts"]
            same = [each.tobytes() for each in expected]
            if [each.tobytes() for each in state["parts"]] != same:
                problem = f"step {step} has other bytes"
        except (CheckpointError, OSError) as error:
            problem = str(error)
    return problem


def wrong_in_plain(root, told):
    """Return what is wrong with files of torch.save."""
    import torch

    found, problem = [0], ""
    for path in root.glob("step-*.pt"):
        try:
            torch.load(path)
            found.append(int(path.stem.removeprefix("step-")))
        except Exception as error:
            problem = f"{path} cannot be loaded: {error}"
    if told and max(found) < max(told):
        problem = f"the newest step is {max(found)}, and {max(told)} was saved"
    return problem


def wrong_in_distributed(root, told):
    """Return what is wrong with a distributed checkpoint, or with folders of steps."""
    from torch.distributed import checkpoint as dcp

    from nvmeio.torch.dcp import FileSystemReader

    ours = root.name == "dcp by nvmeio"
    folders = [root] if ours else [*root.glob("step-*")]
    found, problem = [0], ""
    for folder in folders:
        state = distributed_state(0)
        reader = (FileSystemReader if ours else dcp.FileSystemReader)(folder)
        try:
            dcp.load(state, storage_reader=reader, no_dist=True)
        except dcp.CheckpointException as error:
            if told or not ours:
                problem = f"{folder} cannot be loaded: {error.failures}"
            continue
        if not state["data"].equal(distributed_state(state["step"])["data"]):
            problem = f"{folder} has other bytes than step {state['step']}"
        found.append(state["step"])
    if told and max(found) < max(told):
        problem += f" the newest step is {max(found)}, and {max(told)} was saved"
    return problem


def wrong_in_appended(path, told):
    """Return what is wrong with a file of rows, given the promised lengths over time."""
    # Until its first sync the file may hold anything.
    if not told:
        return ""
    try:
        rows = np.load(path)
    except (OSError, ValueError) as error:
        return f"it cannot be loaded: {error}"
    if len(rows) < max(told):
        return f"it has {len(rows)} rows, and {max(told)} were synced"
    same = [(row == appended_row(number)).all() for number, row in enumerate(rows)]
    return "" if all(same) else f"row {same.index(False)} of {len(rows)} has other bytes"


LOOKS = {
    "appended.npy": wrong_in_appended,
    "run": wrong_in,
    "plain": wrong_in_plain,
    "dcp by nvmeio": wrong_in_distributed,
    "dcp by torch": wrong_in_distributed,
}


@dataclass
class Found:
    """The findings of a case."""

    cuts: Counter = field(default_factory=Counter)
    log_entries: int = 0
    held: int = 0
    lost_pages: int = 0
    broken: list = field(default_factory=list)

    def figures(self):
        """Return the counts by name."""
        return {
            **{f"cuts of which the cache kept {what}": n for what, n in self.cuts.items()},
            "entries of drives' logs": self.log_entries,
            "parts of files that were synced, and found right": self.held,
            "pages lost from caches": self.lost_pages,
            "parts of files that were found wrong": len(self.broken),
        }


def write_until_killed(drive, rng, reports, engine, env=(), **options):
    """Run a child that writes files, and kill it at some moment after some reports.

    Return its promises, and when it had made its first files, in entries.
    """
    promised, delay_s = Promised(), rng.random() / 50
    child = Child(
        "synced_files",
        package="cases",
        env={"NVMEIO_ENGINE": engine, **dict(env)},
        folder=str(drive.folder),
        drive=str(drive.image),
        seed=rng.getrandbits(48),
        **options,
    )
    start, heard = None, 0
    while (said := child.next_report()) is not None:
        if said == "ready":
            start = drive.entries()
            continue
        promised.record(said)
        heard += start is not None
        if heard == reports:
            time.sleep(delay_s)
            child.process.kill()
    outcome = child.finish()
    assert outcome.status == -signal.SIGKILL, outcome.stderr
    return promised, start


def run_case(kind, seed, folder, engines, reports=None, **options):
    """Write, kill, and cut the power at many moments; return the findings."""
    rng = random.Random(seed)
    engine = rng.choice([name for name in ENGINES if engines[name]["works"]])
    reports, found = reports or rng.randint(3, 120), Found()
    with mounted_drive(kind, folder) as drive:
        promised, start = write_until_killed(drive, rng, reports, engine, **options)
        end = drive.entries()
        # Without a cut everything written may show, because a kill loses nothing.
        _, found.broken = promised.check(drive.folder, end + 1, drive.folder)
    cuts, image = PowerCuts(drive), make_image(folder, "cut", 0)
    found.log_entries = end
    # Right after reports of a sync, right before flushes, and at random moments.
    moments = rng.choices(promised.synced_at(), k=CUTS // 3)
    moments += rng.choices(cuts.flushes_after(start), k=CUTS // 3)
    moments += rng.choices(range(start, end + 1), k=CUTS // 3)
    # The cache keeps nothing, a part, or everything.
    shares = itertools.cycle([0, rng.random(), 1])
    for at, kept_share in sorted(zip(moments, shares, strict=False)):
        found.cuts[{0: "nothing", 1: "everything"}.get(kept_share, "a part")] += 1
        found.lost_pages += cuts.cut(at, kept_share, rng, image)
        with mounted_image(kind, image, drive.folder):
            held, broken = promised.check(drive.folder, at, drive.folder)
        found.held += held
        found.broken += broken
    return found


def carry_out(kind, seeds, tmp_path, engines, record_property, **options):
    """Yield the findings of each case, and record the sums at the end."""
    total = Counter()
    for seed in seeds:
        with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
            found = run_case(kind, seed, Path(folder), engines, **options)
        yield found
        total.update({"cases": 1, **found.figures()})
    for what, count in total.items():
        record_property(what, count)


@pytest.mark.amount(short=1, full=7, long=200)
@pytest.mark.parametrize("kind", KINDS)
def test_synced_data_survive_a_power_cut(
    kind, seeds, tmp_path, loop_devices, engines, record_property
):
    for found in carry_out(kind, seeds, tmp_path, engines, record_property):
        assert found.broken == []
        assert found.held > 0
        assert found.lost_pages > 0


LEFT_OUT = ("all", "library", "os.fsync")
# The short run has each file system and each build once.
BUILDS = [
    pytest.param(
        kind, left_out, marks=pytest.mark.amount(short=int(i == j), full=1, long=10)
    )
    for i, kind in enumerate(KINDS)
    for j, left_out in enumerate(LEFT_OUT)
]


@pytest.mark.parametrize(("kind", "left_out"), BUILDS)
def test_missing_fsyncs_are_detected(
    kind, left_out, seeds, tmp_path, loop_devices, engines, faulty_package, record_property
):
    log = tmp_path / "faults"
    env = {"PYTHONPATH": str(faulty_package), **faults_in({"nosync": 1000}, log)}
    if left_out == "os.fsync":
        env = {}
    names = ["os.fsync"] if left_out != "library" else []
    options = {"reports": 150, "env": env, "leave_out": names}
    for found in carry_out(kind, seeds, tmp_path, engines, record_property, **options):
        assert found.broken
    assert not env or read_tallies(log)["nosync"].fired > 0


WAYS = {"torch.save": "plain", "dcp": "dcp by torch"}
# The short run has each way once.
LOSSES = [
    pytest.param(kind, way, marks=pytest.mark.amount(short=int(i == j), full=2, long=20))
    for i, kind in enumerate(KINDS)
    for j, way in enumerate(WAYS)
]


@pytest.mark.parametrize(("kind", "way"), LOSSES)
def test_torchs_own_files_lose_data(
    kind, way, seeds, tmp_path, loop_devices, engines, record_property
):
    """This shows that the test can fail; nvmeio's functions pass it above."""
    options = {"reports": 12, "plainly": way}
    for found in carry_out(kind, seeds, tmp_path, engines, record_property, **options):
        problems = [problem for path, problem, _ in found.broken if WAYS[way] in path]
        assert any("was saved" in problem for problem in problems), found.broken
