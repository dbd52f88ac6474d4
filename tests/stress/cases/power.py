"""Write files, and report what is synced, until the power is cut.

Before the child changes a file it reports the new contents.  After an API that promises
durability it reports them as synced.  Each report has the number of entries in the log of
the drive (``drivefs.py``).
"""

import contextlib
import functools
import hashlib
import itertools
import os
import random
from pathlib import Path

import numpy as np

import nvmeio
import nvmeio.safetensors.numpy as model_files
from children import run_tool
from helpers import pattern
from nvmeio import profiles
from nvmeio.checkpoint import Checkpointer, drain
from workloads.common import report

KIB = 1 << 10
SLOT = 96 * KIB
SLOTS = 8
FRESH_MAX = 12
ROW = 1000


def digest_of(content):
    """Return the digest that stands for some bytes in reports."""
    return hashlib.sha256(content).hexdigest()


def appended_row(number):
    """Return a row, by its number."""
    return np.frombuffer(pattern(ROW, number), np.uint8)


def checkpoint_state(seed, size):
    """Return a state, by its seed and size."""
    parts = np.array_split(np.frombuffer(pattern(size, seed), np.uint8), 3)
    return {"seed": seed, "size": size, "parts": parts}


def distributed_state(step):
    """Return a state for torch.distributed.checkpoint, by its step."""
    import torch

    data = np.frombuffer(pattern(200 * KIB, step), np.uint8)
    return {"step": step, "data": torch.from_numpy(data.copy())}


class Promises:
    """Reports to the parent what is being written, and when it is durable."""

    def __init__(self, drive):
        self.drive = drive

    def entries(self):
        """Return the number of entries in the log of the drive."""
        return int(os.getxattr(self.drive, "user.entries"))

    @contextlib.contextmanager
    def made(self, path, *parts, whole=False, replaces=False, synced=True):
        """Report the parts of a file that the block writes, as (offset, bytes).

        With `replaces`, the file must always have an old or a new content as a whole.
        """
        promises = [
            {
                "path": str(path),
                "offset": offset,
                "size": len(content),
                "digest": digest_of(content),
                "whole": whole,
                "replaces": replaces,
            }
            for offset, content in parts
        ]
        report({"begin": promises, "entries": self.entries()})
        yield
        if synced:
            report({"synced": promises, "entries": self.entries()})


class Writer:
    """Writes files with random ones of the functions that promise durability."""

    def __init__(self, folder, drive, seed):
        self.folder = Path(folder)
        self.rng = random.Random(seed)
        self.seeds = itertools.count(1)
        self.promises = Promises(drive)
        self.handle = nvmeio.Handle(
            block_size=16 * KIB,
            queue_depth=8,
            workers=self.rng.choice([1, 2]),
            bounce=self.rng.choice(["auto", "always", "never"]),
        )
        self.checkpointer, self.step = Checkpointer(self.folder / "run", keep=2), 0
        self.distributed_step = 0
        self.noise = []
        self.fresh = 0
        # This folder is not on the drive.
        self.scratch = Path(drive).parents[1]

    def content(self, size_max=256 * KIB):
        """Return random bytes of random size."""
        edge = self.rng.choice([1, 4096, 16 * KIB])
        size = self.rng.randint(0, size_max // edge) * edge
        return pattern(size, next(self.seeds))

    def name(self, kind, count):
        """Return one of a few names."""
        return self.folder / f"{kind}-{self.rng.randrange(count)}"

    def set_up(self):
        """Make the files that other steps write into or replace, and sync all."""
        with contextlib.ExitStack() as stack:
            for number in range(2):
                content = pattern(SLOT * SLOTS, next(self.seeds))
                parts = [
                    (at, content[at : at + SLOT]) for at in range(0, len(content), SLOT)
                ]
                path = self.folder / f"slots-{number}"
                stack.enter_context(self.promises.made(path, *parts))
                path.write_bytes(content)
                content, path = self.content(), self.folder / f"checkpoint-{number}"
                kept = self.promises.made(path, (0, content), whole=True, replaces=True)
                stack.enter_context(kept)
                path.write_bytes(content)
            (self.folder / "config").mkdir()
            run_tool("sync", "--file-system", self.folder)

    def sync(self, file):
        """Make a file durable in one of two ways."""
        if self.rng.random() < 0.5:
            self.handle.fsync(file)
        else:
            self.handle.submit_fsync(file).wait()

    def sync_folder(self):
        """Make the names in the folder durable."""
        descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def make_noise(self):
        """Write by requests to a file that is never synced."""
        if len(self.noise) == 8:
            nvmeio.wait(self.noise)
            self.noise.clear()
        offset = self.rng.randrange(8) * SLOT
        path = self.folder / "noise"
        self.noise.append(self.handle.submit_write(self.content(SLOT), path, offset))

    def write_slots(self):
        """Submit requests without waiting, write synchronously, then fsync."""
        path = self.name("slots", 2)
        parts = [
            (slot * SLOT, self.content(SLOT))
            for slot in self.rng.sample(range(SLOTS), self.rng.randint(1, 4))
        ]
        with self.promises.made(path, *parts):
            requests = []
            for at, data in parts:
                if self.rng.random() < 0.8:
                    requests.append(self.handle.submit_write(data, path, at))
                else:
                    self.handle.write(data, path, offset=at)
            self.sync(path)
            for request in requests:
                request.wait()

    def scatter_slots(self):
        """Scatter records, then fsync."""
        path, size = self.name("slots", 2), self.rng.choice([512, 777, 4096])
        slots = self.rng.sample(range(SLOTS), self.rng.randint(1, SLOTS))
        data = pattern(size * len(slots), next(self.seeds))
        offsets = [slot * SLOT for slot in slots]
        parts = [(at, data[i * size : (i + 1) * size]) for i, at in enumerate(offsets)]
        with self.promises.made(path, *parts), nvmeio.File(path, "r+") as file:
            request = self.handle.submit_scatter(file, offsets, size, data)
            self.sync(file)
            request.wait()

    def write_fresh(self):
        """Write a new file by requests, then fsync it and its folder."""
        if self.fresh == FRESH_MAX:
            return
        path, content = self.folder / f"fresh-{self.fresh}", self.content()
        self.fresh += 1
        middle = self.rng.randint(0, len(content))
        with self.promises.made(path, (0, content), whole=True):
            with nvmeio.File(path, "x") as file:
                self.handle.submit_write(content[:middle], file)
                self.handle.submit_write(content[middle:], file, middle)
                self.sync(file)
            self.sync_folder()

    def write_file(self):
        """Call write_file() in place on a file that may be longer."""
        path, content = self.name("file", 2), self.content()
        with self.promises.made(path, (0, content), whole=True):
            nvmeio.write_file(content, path, sync=True, atomic=False)

    def replace_file(self):
        """Replace a file by write_file(), synced or not; old or new content must stay."""
        path, content = self.name("replaced", 2), self.content()
        sync = self.rng.random() < 0.5
        made = self.promises.made(
            path, (0, content), whole=True, replaces=True, synced=sync
        )
        with made:
            nvmeio.write_file(content, path, sync=sync)

    def save(self):
        """Replace an array by save()."""
        path = self.name("saved", 2)
        array = np.frombuffer(self.content(), np.uint8)
        nvmeio.save(self.scratch / "saved", array)
        assert np.array_equal(np.load(self.scratch / "saved"), array)
        content = (self.scratch / "saved").read_bytes()
        with self.promises.made(path, (0, content), whole=True, replaces=True):
            nvmeio.save(path, array, sync=True)

    def save_model(self):
        """Replace a model by save_file() of safetensors."""
        path, data = self.name("model", 2), self.content()
        count = self.rng.randint(1, 20)
        parts = np.array_split(np.frombuffer(data, np.uint8), count)
        tensors = {f"layer.{index}": part for index, part in enumerate(parts)}
        content = model_files.save(tensors)
        with self.promises.made(path, (0, content), whole=True, replaces=True):
            model_files.save_file(tensors, path)

    def save_checkpoint(self):
        """Save a step of a Checkpointer, a new one or the last one again."""
        step = self.step = self.step + (self.rng.random() < 0.7)
        state = checkpoint_state(next(self.seeds), self.rng.randint(0, 256 * KIB))
        way = self.rng.choice(["save", "staged", "unstaged"])
        if way == "save":
            self.checkpointer.save(step, state)
        else:
            self.checkpointer.save_async(step, state, stage=way == "staged").result()
        root = str(self.checkpointer.root)
        report({"saved": [root, step], "entries": self.promises.entries()})

    def save_plainly(self):
        """Save as a plain training loop does: torch.save, and a rename."""
        import torch

        root, self.step = self.folder / "plain", self.step + 1
        root.mkdir(exist_ok=True)
        state = checkpoint_state(next(self.seeds), 256 * KIB)
        state["parts"] = [torch.from_numpy(part.copy()) for part in state["parts"]]
        torch.save(state, root / "new")
        os.replace(root / "new", root / f"step-{self.step}.pt")
        report({"saved": [str(root), self.step], "entries": self.promises.entries()})

    def save_distributed(self, by="nvmeio"):
        """Replace a state by torch.distributed.checkpoint.

        torch's own writer gets a folder for each, because it would overwrite the old one.
        """
        from torch.distributed import checkpoint as dcp

        from nvmeio.torch.dcp import FileSystemWriter

        step = self.distributed_step = self.distributed_step + 1
        root = self.folder / f"dcp by {by}"
        if by == "nvmeio":
            writer = FileSystemWriter(root)
        else:
            writer = dcp.FileSystemWriter(root / f"step-{step}")
        dcp.save(distributed_state(step), storage_writer=writer, no_dist=True)
        report({"saved": [str(root), step], "entries": self.promises.entries()})

    def drain(self):
        """Drain a folder outside the drive onto the copy of its earlier contents."""
        source, target = self.scratch / "drained", self.folder / "drained"
        source.mkdir(exist_ok=True)
        contents = {name: self.content() for name in ("one", "two", ".metadata")}
        with contextlib.ExitStack() as stack:
            for name, content in contents.items():
                (source / name).write_bytes(content)
                # The manifest, which says that the copy is complete, is removed first.
                replaces = name != ".metadata"
                parts = (target / name, (0, content))
                made = self.promises.made(*parts, whole=True, replaces=replaces)
                stack.enter_context(made)
            drain(source, target).result()

    def checkpoint(self):
        """Follow the recipe of docs/tuning.md, which keeps one of two files whole."""
        path, content = self.name("checkpoint", 2), self.content()
        made = self.promises.made(
            path, (0, content), whole=True, replaces=True, synced=False
        )
        with made:
            new = f"{path}.new"
            with nvmeio.File(new, "w") as file:
                for at in range(0, len(content), SLOT):
                    self.handle.submit_write(content[at : at + SLOT], file, at)
                self.sync(file)
            os.replace(new, path)

    def header_of(self, shape):
        """Return the header of an ArrayFile of bytes."""
        path = self.scratch / "array"
        with nvmeio.ArrayFile.create(path, shape, np.uint8, overwrite=True):
            return path.read_bytes()[: -np.prod(shape)]

    def fill_array(self):
        """Assign rows of an ArrayFile, made here if missing, and flush()."""
        path, shape = self.name("array", 2), (16, 10_000)
        rows = self.rng.sample(range(shape[0]), self.rng.randint(1, 6))
        data = {row: pattern(shape[1], next(self.seeds)) for row in rows}
        header = self.header_of(shape)
        parts = [(len(header) + row * shape[1], data[row]) for row in rows]
        new = not path.exists()
        if new:
            parts.append((0, header))
        with (
            self.promises.made(path, *parts),
            (
                nvmeio.ArrayFile.create(path, shape, np.uint8)
                if new
                else nvmeio.ArrayFile(path, mode="r+")
            ) as array,
        ):
            for row in rows:
                array[row] = np.frombuffer(data[row], np.uint8)
            array.flush()

    def append_rows(self):
        """Append rows to an ArrayFile, sometimes with a flush()."""
        path = self.folder / "appended.npy"
        new = not path.exists()
        with (
            nvmeio.ArrayFile.create(path, (0, ROW), np.uint8, handle=self.handle)
            if new
            else nvmeio.ArrayFile(path, mode="r+", handle=self.handle)
        ) as array:
            if not new:
                begin = len(array)
                end = begin + self.rng.randint(1, 60)
                array.append([appended_row(number) for number in range(begin, end)])
            if new or self.rng.random() < 0.3:
                array.flush()
                saved = [str(path), len(array)]
                report({"saved": saved, "entries": self.promises.entries()})

    def save_profile(self):
        """Save a profile; the old or the new one must be complete."""
        options = {"block_size": 1 << 20, "queue_depth": next(self.seeds)}
        options |= {"workers": 1, "engine": "auto", "bounce": "auto"}
        choice = profiles.Choice(options, {"note": "x" * self.rng.randrange(50_000)})
        words = dict.fromkeys(("description", "made", "nvmeio", "kernel"), "of a test")
        profile = profiles.Profile("drive", **words, both=choice, read=choice, write=choice)

        def save(home):
            os.environ["XDG_CONFIG_HOME"] = str(home)
            return profiles.save_profile(profile)

        content = save(self.scratch / "config").read_bytes()
        path = profiles_below(self.folder / "config") / "drive.json"
        made = self.promises.made(
            path, (0, content), whole=True, replaces=True, synced=False
        )
        with made:
            assert save(self.folder / "config") == path

    def run(self, plainly=""):
        """Write until killed."""
        while plainly == "torch.save":
            self.save_plainly()
        while plainly == "dcp":
            self.save_distributed("torch")
        ways = (
            (self.make_noise, 4),
            (self.write_slots, 4),
            (self.scatter_slots, 2),
            (self.write_fresh, 2),
            (self.write_file, 3),
            (self.replace_file, 3),
            (self.save, 3),
            (self.save_model, 3),
            (self.save_checkpoint, 3),
            (self.save_distributed, 2),
            (self.drain, 2),
            (self.checkpoint, 2),
            (self.fill_array, 2),
            (self.append_rows, 4),
            (self.save_profile, 1),
        )
        while True:
            self.rng.choices([way for way, _ in ways], [often for _, often in ways])[0]()


def profiles_below(home):
    """Return the folder of profiles."""
    return home / "nvmeio" / "profiles"


def synced_files(folder, drive, seed, leave_out=(), plainly=""):
    """Write files until killed; `leave_out` may name os.fsync, to show that it matters."""
    if "os.fsync" in leave_out:
        os.fsync = functools.partial(lambda descriptor: None)
    writer = Writer(folder, drive, seed)
    writer.set_up()
    report("ready")
    writer.run(plainly)
