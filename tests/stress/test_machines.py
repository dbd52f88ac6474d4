"""Two machines save, drain, are killed and restart: no acknowledged step is lost.

Each machine is a mount namespace with a host name and a root of its own, and a mount of
its own of one shared folder, which lies like NFS (nfsfs.c), or an object store.  Two
writers of each save and copy at the same time; then a process, a machine with its drive,
or the server of its mount is killed, or a writer is stopped and goes on rounds later.
After each, some ranks restart anywhere.  They restore one state: one that was saved,
whole, and not older than the newest that a place which is still there has acknowledged.
Nobody's files are touched.
"""

import contextlib
import json
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter

import numpy as np
import pytest

from children import TESTS, WATCHDOG_S, skip_sanitized
from fuse_mounts import await_mount, end_server, fuse_refusal
from nvmeio._files import locks
from nvmeio._safetensors import turns
from nvmeio.checkpoint import Checkpointer
from nvmeio.safetensors import load_sharded, save_sharded

pytest.importorskip("fsspec")

MACHINE = TESTS / "stress/cases/machine.py"
# How long a mount keeps what it has seen.  Rounds are faster.
CACHED_S = 60
MACHINES = 2
# The names that a run must leave alone, some of them of steps.
STRANGERS = {
    "notes.txt": "mine",
    "step-4/.metadata": "another kind of checkpoint",
    "step-4/__0_0.distcp": "its data",
    "step-7": "not a folder",
    "step-9/manifest.json": '{"format": "somebody else\'s"}',
    "group-0.states": "mine too",
}


@pytest.fixture(scope="module")
def nfsfs(tmp_path_factory):
    """The path of the program that serves a folder as NFS does."""
    if refusal := fuse_refusal():
        pytest.skip(f"there is no FUSE here: {refusal}")
    if os.geteuid() != 0:
        pytest.skip("only root makes mount namespaces")
    flags = subprocess.run(
        ["pkg-config", "--cflags", "--libs", "fuse3"], capture_output=True, text=True
    )
    if flags.returncode != 0:
        pytest.skip("libfuse3-dev is not installed")
    program = tmp_path_factory.mktemp("nfsfs") / "nfsfs"
    source = TESTS / "nfsfs.c"
    subprocess.run(
        ["cc", "-O1", "-o", program, source, *flags.stdout.split(), "-lpthread"], check=True
    )
    return program


class Process:
    """A rank on a machine."""

    def __init__(self, machine, name, far, torch=None):
        self.machine, self.name = machine, name
        inside = f"hostname {machine.name} && mount --bind {machine.mount} {machine.shared}"
        command = f'{inside} && exec "$0" "$@"'
        words = [sys.executable, MACHINE, machine.root, far, name]
        words += [] if torch is None else [torch]
        self.process = subprocess.Popen(
            ["unshare", "--mount", "--uts", "sh", "-c", command, *map(str, words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"NVMEIO_TEST_SHELF": str(machine.shelf)},
        )
        self.lines = queue.SimpleQueue()
        self.reader = threading.Thread(target=self.read)
        self.reader.start()
        self.stopped = False

    def read(self):
        for line in self.process.stdout:
            self.lines.put(json.loads(line))
        self.lines.put(None)

    def ask(self, words):
        self.process.stdin.write(f"{words}\n")
        self.process.stdin.flush()

    def answer(self):
        """Return the next answer; None at the end."""
        return self.lines.get(timeout=WATCHDOG_S)

    def kill(self):
        """End the process; return the answers that are left."""
        self.process.kill()
        self.process.wait()
        self.reader.join()
        self.process.stdin.close()
        self.process.stdout.close()
        left = []
        while (found := self.lines.get()) is not None:
            left.append(found)
        return left


class Machine:
    """A drive, and a mount of the shared folder."""

    def __init__(self, folder, number, nfsfs):
        self.name = f"machine-{number}"
        self.folder = folder / self.name
        self.root = self.folder / "local/run"
        self.mount, self.shared = self.folder / "mount", folder / "shared"
        self.back, self.shelf, self.program = folder / "back", folder / "shelf", nfsfs
        self.mount.mkdir(parents=True)
        self.server = self.errors = None

    def serve(self):
        """Mount the shared folder, with empty caches."""
        self.errors = open(self.folder / "errors", "w+")  # noqa: SIM115
        words = [self.program, self.back, self.mount, str(CACHED_S)]
        self.server = subprocess.Popen(words, stdin=subprocess.PIPE, stderr=self.errors)
        await_mount(self.server, self.mount, self.errors)

    def crash(self):
        """Kill the server; calls of the mount then fail."""
        self.server.kill()
        self.server.wait()
        self.server.stdin.close()
        subprocess.run(["umount", "-l", self.mount], check=True)
        self.errors.close()

    def end(self):
        end_server(self.server, self.mount)
        self.errors.close()


def write_strangers(folder):
    """Make other people's files."""
    for name, text in STRANGERS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def strangers_in(folder):
    """Return them as they are now."""
    return {name: (folder / name).read_text() for name in STRANGERS}


class Run:
    """A training that is killed again and again; what was acknowledged, by place."""

    def __init__(self, folder, machines, target, draws):
        self.folder, self.machines, self.draws = folder, machines, draws
        self.target = target
        self.far = {
            "folder": folder / "shared/run",
            "store": "shelf://bucket/run",
            "root": "-",
        }[target]
        self.newest = Counter()  # what each place has acknowledged
        self.counts = Counter()
        self.made = 0
        self.zombie = None
        self.processes = []
        for where in self.places():
            write_strangers(where)
        if target == "root":
            for machine in machines:
                machine.root = folder / "shared/run"

    def places(self):
        """Return the folders with strangers' files, as the drives have them."""
        return [
            self.machines[0].back / "run",
            *(m.folder / "local/run" for m in self.machines),
        ]

    def start(self, machine, torch=None):
        self.made += 1
        process = Process(machine, f"p{self.made}", self.far, torch)
        self.processes.append(process)
        return process

    def place_of(self, machine):
        """Return the name of the place where save() puts steps."""
        return "shared" if self.target == "root" else machine.name

    def note(self, process, answer):
        """Remember what a writer has told."""
        if "saved" in answer:
            self.acknowledge(self.place_of(process.machine), answer["saved"])
        if "drained" in answer:
            self.acknowledge("shared", answer["drained"])
        for word in answer.keys() & {"saved", "drained", "failed"}:
            self.counts[word] += 1

    def acknowledge(self, place, step):
        self.newest[place] = max(self.newest[place], step)

    def restart(self, torch=None):
        """Restart on some machines; check what the ranks restore; return the step."""
        size = self.draws.randint(1, 4)
        machines = [self.draws.choice(self.machines) for _ in range(size)]
        words = [None] * size
        if torch:
            file = self.folder / f"rendezvous-{self.made}"
            words = [f"{rank},{size},{file}" for rank in range(size)]
        ranks = [self.start(m, w) for m, w in zip(machines, words, strict=True)]
        for rank in ranks:
            assert "ready" in rank.answer()
            rank.ask("agree")
        answers = [rank.answer() for rank in ranks]
        while "gather" in answers[0]:
            gathered = json.dumps([each["gather"] for each in answers])
            for rank in ranks:
                rank.ask(gathered)
            answers = [rank.answer() for rank in ranks]
        # A place counts if all ranks can read it.
        known = [self.newest["shared"]]
        if len({machine.name for machine in machines}) == 1:
            known.append(self.newest[self.place_of(machines[0])])
        assert answers == [answers[0]] * size, answers
        if max(known):
            assert "agreed" in answers[0], (answers, known)
            assert (answers[0]["agreed"] or 0) >= max(known), (answers, known)
        step = answers[0].get("agreed")
        if step is not None:
            for rank in ranks:
                rank.ask("restore")
            restored = [rank.answer() for rank in ranks]
            assert restored == [restored[0]] * size, restored
            name = restored[0].get("restored")
            assert name in {f"p{each}-{step}" for each in range(self.made)}, (
                step,
                restored,
            )
            self.counts["restored"] += 1
        for rank in ranks:
            self.end(rank)
        return step or 0

    def end(self, process):
        for answer in process.kill():
            self.note(process, answer)
        self.processes.remove(process)

    def save(self, first):
        """Let two writers of each machine save until something is killed."""
        writers = [self.start(machine) for machine in self.machines for _ in range(2)]
        for writer in writers:
            assert "ready" in writer.answer()
            writer.ask(f"save {first}")
        if self.zombie is not None:
            self.zombie.process.send_signal(signal.SIGCONT)
            writers.append(self.zombie)
            self.zombie = None
        watched = self.draws.choice(writers)
        for _ in range(self.draws.randint(0, 20)):
            if (answer := watched.answer()) is None:
                break
            self.note(watched, answer)
        # Anywhere in what it does next.
        threading.Event().wait(self.draws.random() * 0.03)
        kind = self.draws.choice(["rank", "machine", "drive", "server", "zombie"])
        self.counts[kind] += 1
        machine = self.draws.choice(self.machines)
        if kind == "zombie":
            watched.process.send_signal(signal.SIGSTOP)
            self.zombie = watched
            writers.remove(watched)
        if kind == "server":
            machine.crash()
            for writer in writers:
                if writer.machine is machine and (answer := writer.answer()):
                    self.note(writer, answer)
        for writer in writers:
            self.end(writer)
        if kind in ("machine", "drive"):
            if self.zombie is not None and self.zombie.machine is machine:
                self.end(self.zombie)
                self.zombie = None
            machine.crash()
        if kind in ("machine", "drive", "server"):
            machine.serve()
        if kind == "drive" and self.target != "root":
            # A new one has the strangers' files alone.
            shutil.rmtree(machine.root)
            write_strangers(machine.root)
            self.newest[machine.name] = 0

    def check_strangers(self):
        for place in self.places():
            assert strangers_in(place) == STRANGERS


@pytest.fixture
def machines(tmp_path, nfsfs):
    """Two machines that share a folder."""
    for name in ("back", "shared", "shelf"):
        (tmp_path / name).mkdir()
    with contextlib.ExitStack() as stack:
        made = [Machine(tmp_path, number, nfsfs) for number in range(MACHINES)]
        for machine in made:
            machine.serve()
            stack.callback(machine.end)
        yield made


def test_what_a_host_remembers_as_missing_is_found(machines):
    """The root itself, its lists, the name of the newest step, and a step."""
    here, there = (Checkpointer(machine.mount / "run") for machine in machines)
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        there.restore()
    with here:
        for step in (1, 2):
            here.save(step, {"step": step})
            with pytest.raises(FileNotFoundError):
                there.restore(step + 1)
            assert not (there.root / f"step-{step + 1}").exists()
            assert there.latest() == step
            assert there.restore() == {"step": step}
        # Removed and made again: what was open there is stale.
        here.remove(2)
        here.save(2, {"step": "2 again"})
        assert there.restore() == {"step": "2 again"}
        with pytest.raises(FileNotFoundError):
            there.restore(3)
        here.save(3, {"step": 3})
    with there:
        there.save(3, {"step": "3 again"})
    assert here.restore() == {"step": "3 again"}


def test_two_machines_name_the_files_of_a_model_one_after_the_other(machines, monkeypatch):
    """The second finds the first at each call that names or removes a file."""
    here, there = (os.fspath(machine.mount / "model") for machine in machines)
    old, one, other = ({n: np.full(100, v) for n in "abcd"} for v in (1.0, 2.0, 3.0))
    save_sharded(old, here, 1600)
    refused = []

    def held(call):
        def step(*args, **options):
            path = os.fspath(args[-1])
            if path.startswith(here) and not path.endswith((".nvmeio-save", "-tmp")):
                with pytest.raises(FileExistsError, match="names its files here") as caught:
                    save_sharded(other, there, 800)
                refused.append(caught)
            return call(*args, **options)

        return step

    with monkeypatch.context() as patch:
        patch.setattr(turns, "PATIENCE_S", 0)
        for name in ("replace", "unlink"):
            patch.setattr(os, name, held(getattr(os, name)))
        save_sharded(one, here, 800)
    assert len(refused) > 4
    back = machines[0].back / "model"
    for folder, model in ((here, one), (there, other)):
        save_sharded(model, folder, 800)
        found = load_sharded(back, framework="np")
        assert {name: set(value) for name, value in found.items()} == {
            name: set(value) for name, value in model.items()
        }


def test_a_save_waits_for_another_whose_lock_it_has_opened(machines, monkeypatch):
    """The file of the lock is removed before it is locked: the server knows it no more."""
    here, there = (os.fspath(machine.mount / "model") for machine in machines)
    (machines[0].back / "model").mkdir()
    first, lock = contextlib.ExitStack(), locks._flock

    def late(*args):
        first.close()
        lock(*args)

    first.enter_context(turns.alone_in(here))
    monkeypatch.setattr(locks, "_flock", late)
    with turns.alone_in(there):
        assert os.listdir(machines[0].back / "model") == [".nvmeio-save"]
        monkeypatch.setattr(turns, "PATIENCE_S", 0)
        with (
            pytest.raises(FileExistsError, match="names its files here"),
            turns.alone_in(here),
        ):
            pass
    assert not os.listdir(machines[0].back / "model")


@pytest.mark.amount(short=4, full=70, long=700)
@pytest.mark.parametrize("target", ["folder", "store", "root"])
def test_what_was_acknowledged_is_restored(
    tmp_path, machines, target, amount, seeds, record_property
):
    """Rounds of one run; one in ten restarts by torch.distributed."""
    skip_sanitized("are too slow for hundreds of processes")
    draws = random.Random(next(seeds))
    run = Run(tmp_path, machines, target, draws)
    try:
        for number in range(amount):
            step = run.restart(torch=number % 10 == 5)
            run.save(step + 1)
            run.check_strangers()
        run.restart()
    finally:
        for process in [*run.processes]:
            run.end(process)
    assert run.counts["restored"]
    for word, count in sorted(run.counts.items()):
        record_property(word, count)
