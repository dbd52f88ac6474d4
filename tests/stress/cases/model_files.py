"""Save and load model files and checkpoints under faults."""

import contextlib
import json
import os
from collections import Counter
from pathlib import Path

import safetensors.torch as theirs

import nvmeio
import nvmeio.safetensors.torch as model_files
from cases.seeded import each_case, may_fail
from helpers import MIB
from model_samples import bits_of, bits_of_all, filled, in_flight
from nvmeio.checkpoint import Checkpointer
from nvmeio.safetensors import load_sharded, safe_open, save_sharded
from workloads.common import report

TENSORS_MAX = 24
FOLDER = "sharded"


def drawn_tensors(draw):
    """Return tensors of some dtypes; few are large, some are empty."""
    tensors = {}
    for index in range(draw.randint(1, TENSORS_MAX)):
        dtype = draw.choice(("uint8", "bfloat16", "float32", "int64"))
        size_max = draw.choice((0, 100, 100_000, 2 * MIB))
        shape = draw.choice(([], [draw.randint(0, size_max)], [7, size_max // 70]))
        tensors[f"layer.{index}"] = filled(dtype, shape, seed=draw.randrange(1 << 30))
    return tensors


def files_below(folder):
    """Return the contents of a folder's files by name."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file()
    }


class Case:
    """One model in a folder: as one file, and in shards."""

    def __init__(self, draw, folder):
        self.draw = draw
        self.folder = Path(folder)
        self.path = self.folder / "model.safetensors"
        self.shards = self.folder / FOLDER
        self.shards.mkdir(parents=True, exist_ok=True)
        self.counts = Counter()
        self.step = None

    @contextlib.contextmanager
    def may_fail(self, what):
        """Count a success or a failure by an injected fault."""
        with may_fail(what, self.folder, self.counts):
            yield
        # An open file may still read ahead.
        assert what == "tensors" or in_flight() == 0

    def save(self, tensors):
        """Save a file; its name must have the old or the new contents."""
        before = files_below(self.folder)
        align, sync = self.draw.choice((8, 4096)), self.draw.random() < 0.5
        failed = self.counts["saved, failed"]
        with self.may_fail("saved"):
            model_files.save_file(tensors, self.path, {"a": "b"}, align=align, sync=sync)
        after = files_below(self.folder)
        if self.counts["saved, failed"] > failed:
            assert after == before
            theirs.save_file(tensors, self.path, {"a": "b"})
        else:
            if align == 8:
                assert after[self.path.name] == theirs.save(tensors, {"a": "b"})
            assert before.keys() | {self.path.name} == after.keys()
        loaded = theirs.load_file(self.path)
        assert bits_of_all({name: loaded[name] for name in tensors}) == bits_of_all(tensors)

    def save_shards(self, tensors):
        """Save the shards; old or new, the index must match the files that it names."""
        index = self.shards / "model.safetensors.index.json"
        saved = self.counts["shards saved"]
        with self.may_fail("shards saved"):
            save_sharded(tensors, self.shards, max_shard_size=MIB)
        if self.counts["shards saved"] == saved:
            for path in self.shards.iterdir():
                path.unlink()
            theirs.save_file(tensors, self.shards / "model.safetensors")
        elif index.exists():
            places = json.loads(index.read_text())["weight_map"]
            assert places.keys() == tensors.keys()
            assert {*places.values(), index.name} == set(os.listdir(self.shards))

    def save_step(self, tensors):
        """Save a checkpoint; it or the one before must be there, and right."""
        checkpointer = Checkpointer(self.folder / "run", keep=1)
        before, how = checkpointer.latest() or 0, self.draw.choice(("save", True, False))
        saved = self.counts["steps saved"]
        with self.may_fail("steps saved"):
            if how == "save":
                checkpointer.save(before + 1, tensors)
            else:
                checkpointer.save_async(before + 1, tensors, stage=how).result()
        now = before + (self.counts["steps saved"] > saved)
        assert checkpointer.latest() == (now or None)
        assert checkpointer.steps() == ([now] if now else [])
        checkpointer.close()
        names = {f"step-{step}" for step in checkpointer.steps()}
        own = {".nvmeio-lock", ".nvmeio-latest"}
        assert set(os.listdir(checkpointer.root)) - own == names
        if now > before:
            self.step = tensors
        found = None
        reader = Checkpointer(
            checkpointer.root, verify=self.draw.choice(("size", "checksum"))
        )
        if now:
            with self.may_fail("steps restored"):
                found = reader.restore(now)
            self.same(found, self.step)
            with self.may_fail("steps verified"):
                reader.verify(now)

    def load(self, tensors):
        """Load them in every way; expect the right bytes, or an error."""
        direct = self.draw.choice(("auto", True, False))
        if self.draw.random() < 0.7:
            descriptor = os.open(self.path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
        found = None
        with self.may_fail("loaded"):
            found = model_files.load_file(self.path, direct=direct)
        self.same(found, tensors)
        found = {name: tensor.clone().zero_() for name, tensor in tensors.items()}
        out, found = found, None
        with self.may_fail("loaded, out"):
            found = model_files.load_file(self.path, direct=direct, out=out)
        self.same(found, tensors)
        found = None
        with self.may_fail("shards loaded"):
            found = load_sharded(self.shards, direct=direct)
        self.same(found, tensors)
        with self.may_fail("opened"), safe_open(self.path, "pt", direct=direct) as file:
            for name in file.offset_keys():
                found = None
                with self.may_fail("tensors"):
                    found = file.get_tensor(name)
                if found is not None:
                    self.same({name: found}, {name: tensors[name]})
        half = {name: slice(0, len(t) // 2) for name, t in tensors.items() if t.ndim}
        with self.may_fail("opened"), safe_open(self.path, "pt", direct=direct) as file:
            found = file.get_many(half)
            self.same(found, {name: tensors[name][part] for name, part in half.items()})

    def same(self, found, expected):
        """Check that tensors, if loaded, are right to the bit."""
        if found is not None:
            assert found.keys() == expected.keys()
            for name, tensor in expected.items():
                assert bits_of(found[name]) == bits_of(tensor), name


def model_cases(first, count, folder):
    """Save and load models."""
    cases = {}
    for number, draw in enumerate(each_case(first, count)):
        case = cases.setdefault(number % 2, Case(draw, Path(folder) / str(number % 2)))
        case.draw, tensors = draw, drawn_tensors(draw)
        case.save(tensors)
        case.save_shards(tensors)
        case.save_step(tensors)
        case.load(tensors)
    counts = sum((case.counts for case in cases.values()), Counter())
    counts["engine is " + nvmeio.default_handle().stats()["engine"]] += 1
    report(counts)
