"""nvmeio.torch.dcp: torch's files, durable, by one rank and by several."""

import contextlib
import contextvars
import dataclasses
import enum
import errno
import fcntl
import gc
import glob
import importlib
import inspect
import os
import pathlib
import pickle
import re
import shutil
import tempfile
import threading
import time
import warnings
from collections import OrderedDict

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed._shard.sharded_tensor import metadata as sharded
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.testing._internal.two_tensor import TwoTensor

import nvmeio
from helpers import pairs_of_one_hash
from nvmeio._files import locks, paths
from nvmeio._publish import claims, names
from nvmeio.checkpoint import CheckpointError, _draining, _places, drain
from nvmeio.torch import dcp as ours
from nvmeio.torch.dcp import (
    FileSystemReader,
    FileSystemWriter,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
    PoolStager,
    _reading,
    _staging,
    _writing,
)
from ranks import together
from trainings import FORMS, KINDS, new_training, steps
from workloads import dcp as work

READERS = {"nvmeio": FileSystemReader, "torch": dcp.FileSystemReader}
WRITERS = {"nvmeio": FileSystemWriter, "torch": dcp.FileSystemWriter}
WAYS = ("Reader", "Writer")
PAIRS = [("nvmeio", "nvmeio"), ("nvmeio", "torch"), ("torch", "nvmeio")]

pytestmark = [
    # torch warns if there is no process group, and if it overwrites a checkpoint.
    pytest.mark.filterwarnings("ignore:torch.distributed"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]


def state_of(seed):
    """Return a state of tensors of many kinds and other values."""
    torch.manual_seed(seed)
    large = torch.randn(300, 500)
    return {
        "large": large,
        "turned": torch.randn(400, 300).t(),
        "part": torch.randn(900, 900)[100:400, 5:300],
        "half": torch.randn(100_000, dtype=torch.bfloat16),
        "complex": torch.randn(30_000, dtype=torch.complex64),
        "small": torch.randn(7),
        "one": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "parameter": torch.nn.Parameter(torch.randn(200, 200)),
        "nested": {"step": seed, "list": [1, 2.5, "x"], "more": torch.arange(50_000)},
    }


def zeroed(state):
    """Return the same state with zeros, to be filled."""
    if isinstance(state, dict):
        return {name: zeroed(each) for name, each in state.items()}
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state, requires_grad=False)
    return [None] * len(state) if isinstance(state, list) else None


def same(one, other):
    """Return whether two states are equal."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return one == other


def save(folder, state, writer="nvmeio", **options):
    return dcp.save(state, storage_writer=WRITERS[writer](folder, **options), no_dist=True)


def load(folder, state, reader="nvmeio", **options):
    dcp.load(state, storage_reader=READERS[reader](folder, **options), no_dist=True)
    return state


@pytest.mark.parametrize(("writer", "reader"), PAIRS)
@pytest.mark.parametrize(
    "options", [{}, {"thread_count": 3}, {"single_file_per_rank": False}], ids=str
)
def test_each_reads_what_the_other_writes(
    tmp_path, default_engine, writer, reader, options
):
    state = state_of(1)
    save(tmp_path, state, writer, **options)
    assert same(load(tmp_path, zeroed(state), reader), state)


@pytest.mark.parametrize(("writer", "reader"), PAIRS)
def test_stream_extensions_are_applied(tmp_path, writer, reader):
    state = state_of(1) | {"same": torch.zeros(300_000)}
    save(tmp_path, state, writer, _extensions=[ZStandard()])
    size = sum(each.stat().st_size for each in tmp_path.iterdir())
    nbytes = sum(e.nbytes for e in state.values() if isinstance(e, torch.Tensor))
    assert size < nbytes - state["same"].nbytes / 2
    assert same(load(tmp_path, zeroed(state), reader), state)


def test_unpickling_after_an_extension_is_restricted_too(tmp_path):
    marker = tmp_path / "marker"
    with pytest.warns(RuntimeWarning, match="'x' will be refused"):
        save(tmp_path / "folder", {"x": Evil(marker)}, _extensions=[ZStandard()])
    with pytest.raises(CheckpointException, match="Weights only"):
        load(tmp_path / "folder", {"x": None})
    assert not marker.exists()


def test_a_state_that_could_not_be_read_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="HuggingFaceStorageWriter"):
        FileSystemWriter(
            tmp_path / "folder", serialization_format=SerializationFormat.SAFETENSORS
        )
    assert not (tmp_path / "folder").exists()


def test_torchs_option_to_map_files_matters_neither_to_saves_nor_to_loads(
    tmp_path, monkeypatch
):
    config = importlib.import_module("torch.utils.serialization.config")
    monkeypatch.setattr(config.load, "mmap", True)
    state = {"small": torch.ones(3), "large": torch.ones(300, 300)}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "will be refused")
        save(tmp_path / "both", {**state, "epoch": 3})
    into = {name: torch.zeros_like(value) for name, value in state.items()}
    assert load(tmp_path / "both", into).keys() == state.keys()
    assert all(torch.equal(into[name], value) for name, value in state.items())


def test_a_part_is_read_into_targets_of_any_kind(tmp_path):
    state = {"a": torch.arange(400_000.0).reshape(800, 500)}
    for writer in WRITERS:
        save(tmp_path / writer, state, writer)
        into = {"a": torch.zeros(500, 800).t()}
        assert torch.equal(load(tmp_path / writer, into)["a"], state["a"])
        into = {"a": torch.zeros(800, 500, dtype=torch.float64)}
        assert torch.equal(load(tmp_path / writer, into)["a"], state["a"].double())


def test_saves_leave_nothing_in_the_context_of_the_thread(tmp_path):
    """torch's patch() of a setting leaves a variable there."""
    sizes = []
    for _ in range(3):
        state = {str(number): torch.zeros(number * 2000) for number in range(20)}
        dcp.save(state, storage_writer=FileSystemWriter(tmp_path / "step"))
        nvmeio.torch.save(state, tmp_path / "state.pt")
        sizes.append(len(contextvars.copy_context()))
    assert len({*sizes}) == 1


@pytest.mark.parametrize("nbytes", [0, 4])
def test_a_tensor_whose_storage_was_freed_is_not_saved(tmp_path, nbytes):
    freed = torch.zeros(4 << 20)
    freed.untyped_storage().resize_(nbytes)
    words = f"'a' cannot be saved: its storage was freed: it has {nbytes} bytes"
    with pytest.raises(CheckpointException, match=words):
        save(tmp_path, {"a": freed})
    assert not (tmp_path / ".metadata").exists()


@pytest.mark.parametrize("writer", WRITERS)
def test_a_target_whose_storage_was_freed_is_refused(tmp_path, writer):
    save(tmp_path, {"a": torch.ones(2)}, writer)
    freed = torch.zeros(2)
    freed.untyped_storage().resize_(4)
    with pytest.raises(CheckpointException, match="'a' cannot be filled: its storage was"):
        load(tmp_path, {"a": freed})


@pytest.mark.parametrize("writer", WRITERS)
def test_lazy_tensors_of_a_file_are_resolved(tmp_path, writer):
    state = {
        "conjugate": torch.randn(30_000, dtype=torch.complex64).conj(),
        "negative": torch._neg_view(torch.randn(90_000)),
    }
    save(tmp_path, state, writer)
    assert same(load(tmp_path, zeroed(state)), state)


@pytest.mark.parametrize(
    "name",
    [f"{kind}{way}" for kind in ("FileSystem", "HuggingFaceStorage") for way in WAYS],
)
def test_the_arguments_equal_torchs(name):
    theirs = [*inspect.signature(getattr(dcp, name)).parameters.values()]
    found = [*inspect.signature(getattr(ours, name)).parameters.values()]
    more = {"FileSystemReader": ["weights_only"]}.get(name, [])
    pairs = [(each.name, each.default, each.kind) for each in theirs]
    assert [(each.name, each.default, each.kind) for each in found[: len(pairs)]] == pairs
    assert [each.name for each in found[len(pairs) :]] == more


def test_an_existing_checkpoint_is_replaced_only_with_overwrite(tmp_path):
    save(tmp_path, state_of(1))
    before = {*os.listdir(tmp_path)}
    with pytest.raises(CheckpointException, match="overwrite=False"):
        save(tmp_path, state_of(2), overwrite=False)
    assert {*os.listdir(tmp_path)} == before
    assert same(load(tmp_path, zeroed(state_of(1))), state_of(1))


class Halving(dcp.DefaultSavePlanner):
    """A planner that saves tensors with half the bytes."""

    def transform_object(self, write_item, held):
        found = super().transform_object(write_item, held)
        return found.half() if isinstance(found, torch.Tensor) else found


@pytest.mark.parametrize(("writer", "reader"), PAIRS)
def test_planners_are_used(tmp_path, writer, reader):
    state = {"a": torch.randn(300, 500), "small": torch.randn(7), "step": 3}
    by, of = WRITERS[writer], READERS[reader]
    dcp.save(state, storage_writer=by(tmp_path), planner=Halving(), no_dist=True)
    halved = {n: e.half().float() if n != "step" else e for n, e in state.items()}
    found = zeroed(state) | {"more": torch.ones(3)}
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(found, storage_reader=of(tmp_path), planner=planner, no_dist=True)
    assert found.pop("more").equal(torch.ones(3))
    assert same(found, halved)
    # Plans are cached from one save to the next.
    for step in (1, 2, 3):
        state = {"a": torch.full((300, 500), float(step)), "step": step}
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        folder = tmp_path / "kept"
        dcp.save(state, storage_writer=by(folder), planner=planner, no_dist=True)
        assert same(load(folder, zeroed(state), reader), state)
    # Keys that the target does not have yet.
    found = _load_state_dict_from_keys(storage_reader=of(folder))
    assert same(found, state)


def test_parts_are_read_by_one_submission_into_their_targets(tmp_path, monkeypatch):
    state = {f"{i}": torch.randn(300, 500) for i in range(5)}
    save(tmp_path, state)
    handle, calls = _reading.default_handle(), []

    class Watched:
        def __getattr__(self, name):
            def call(*arguments, **options):
                calls.append((name, arguments))
                return getattr(handle, name)(*arguments, **options)

            return call

    monkeypatch.setattr(_reading, "default_handle", Watched)
    found = load(tmp_path, zeroed(state))
    assert same(found, state)
    # The first read is of the metadata.
    assert [name for name, _ in calls] == ["read_many", "submit_read_many"]
    ((parts,),) = [arguments for name, arguments in calls if name == "submit_read_many"]
    pointers = [memory.data_ptr() for memory, _, _ in parts]
    assert sorted(pointers) == sorted(each.data_ptr() for each in found.values())


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("target", [torch.contiguous_format, torch.channels_last])
def test_a_part_is_read_in_any_order_of_memory(tmp_path, monkeypatch, writer, target):
    image = torch.randn(8, 16, 32, 64).contiguous(memory_format=torch.channels_last)
    save(tmp_path, {"image": image}, writer)
    monkeypatch.setattr(_reading._Reading, "_deliver", None)
    sizes, read = [], _reading.Pending.read_many

    def note(pending, items, **options):
        sizes.extend(memory.nbytes for memory, _, _ in items)
        return read(pending, items, **options)

    monkeypatch.setattr(_reading.Pending, "read_many", note)
    found = torch.zeros(8, 16, 32, 64).contiguous(memory_format=target)
    assert torch.equal(load(tmp_path, {"image": found})["image"], image)
    assert sizes == [image.nbytes]


@pytest.mark.parametrize("part", [slice(None), slice(100_000, None)], ids=["all", "half"])
def test_what_is_read_into_shared_memory_is_no_mixture(tmp_path, monkeypatch, part):
    state = {"a": torch.full((200_000,), 1.0), "b": torch.full((200_000,), 2.0)[part]}
    save(tmp_path, state)
    read, together_read = _reading.Pending.read_many, []

    def note(pending, items, **options):
        together_read.append([memory.nbytes for memory, _, _ in items])
        return read(pending, items, **options)

    monkeypatch.setattr(_reading.Pending, "read_many", note)
    tied = torch.zeros(200_000)
    found = load(tmp_path, {"a": tied, "b": tied[part]})
    # As torch loads it: the later one is whole.
    assert torch.equal(found["b"], state["b"])
    assert together_read == [[state[name].nbytes] for name in "ab"]


class Planner(dcp.DefaultLoadPlanner):
    """Counts the tensors between resolve_tensor() and commit_tensor()."""

    held = most = 0

    def resolve_tensor(self, read_item):
        self.held += 1
        self.most = max(self.most, self.held)
        return super().resolve_tensor(read_item)

    def commit_tensor(self, read_item, tensor):
        self.held -= 1


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_staged_reads_are_not_all_in_memory_at_once(tmp_path, monkeypatch, kind):
    state = {f"{i}": torch.full((100_000,), float(i)) for i in range(10)}
    save(tmp_path, state)
    monkeypatch.setattr(_reading, "BESIDE_BYTES_MAX", 3 * 400_000)
    found, planner = {name: each.to(kind) * 0 for name, each in state.items()}, Planner()
    reader = FileSystemReader(tmp_path)
    dcp.load(found, storage_reader=reader, planner=planner, no_dist=True)
    assert same({name: each.float() for name, each in found.items()}, state)
    assert planner.held == 0
    # One more tensor is already in its target, without separate memory.
    assert planner.most == (10 if kind == torch.float32 else 4)


def test_whole_reads_are_not_all_in_memory_at_once(tmp_path, monkeypatch):
    state = {f"{i}": torch.randn(100, 100) for i in range(10)}
    save(tmp_path, state)
    sizes, read_whole = [], _reading._Reading._read_whole

    def watch(reading, blobs):
        found = read_whole(reading, blobs)
        sizes.append(sum(map(len, found.values())))
        return found

    monkeypatch.setattr(_reading._Reading, "_read_whole", watch)
    for limit, count in ((_reading.BESIDE_BYTES_MAX, 1), (170_000, 3)):
        monkeypatch.setattr(_reading, "BESIDE_BYTES_MAX", limit)
        assert same(load(tmp_path, zeroed(state)), state)
        assert len(sizes) == count
        assert max(sizes) <= limit
        sizes.clear()


def test_ends_of_tensors_are_not_all_in_memory_at_once(tmp_path, monkeypatch):
    state = {f"{i}": torch.full((50_000,), float(i)) for i in range(10)}
    save(tmp_path, state)
    monkeypatch.setattr(_reading, "_ENDS_MAX", 4)
    handle, counts = _reading.default_handle(), []

    class Watched:
        def read_many(self, parts):
            counts.append(len(parts))
            handle.read_many(parts)

        def __getattr__(self, name):
            return getattr(handle, name)

    monkeypatch.setattr(_reading, "default_handle", Watched)
    assert same(load(tmp_path, zeroed(state)), state)
    # The head and the tail of each.
    assert counts == [8, 8, 4]


OPTIONS = {
    "FileSystem": {"single_file_per_rank": False},
    "HuggingFaceStorage": {"fqn_to_index_mapping": {f"{i}": i + 1 for i in range(10)}},
}


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("count", [8, 30_000])
def test_the_files_of_a_checkpoint_are_not_all_open_at_once(
    tmp_path, monkeypatch, kind, count
):
    """Those of hundreds of ranks would be too many."""
    state = {f"{i}": torch.full((count,), float(i)) for i in range(10)}
    writer = getattr(ours, f"{kind}Writer")(str(tmp_path), **OPTIONS[kind])
    dcp.save(state, storage_writer=writer, no_dist=True)
    monkeypatch.setattr(_reading, "FILES_MAX", 4)
    counts = []

    class Watching(dcp.DefaultLoadPlanner):
        def resolve_tensor(self, read_item):
            opened = map(os.path.realpath, glob.glob("/proc/self/fd/*"))
            counts.append(len({path for path in opened if str(tmp_path) in path}))
            return super().resolve_tensor(read_item)

    reader, found = getattr(ours, f"{kind}Reader")(str(tmp_path)), zeroed(state)
    dcp.load(found, storage_reader=reader, planner=Watching(), no_dist=True)
    assert same(found, state)
    assert max(counts) == 4


def test_saving_again_writes_new_files_and_removes_the_old_ones(tmp_path):
    names = []
    for seed in (1, 2):
        save(tmp_path, state_of(seed))
        assert same(load(tmp_path, zeroed(state_of(seed))), state_of(seed))
        names.append({*os.listdir(tmp_path)} - {".metadata"})
    assert len(names[1]) == 1
    assert not names[0] & names[1]
    # torch's files are replaced too, and leftovers of a dead save are removed.
    save(tmp_path / "torch", state_of(1), "torch")
    (tmp_path / "torch" / "__5_01234567_0.distcp").write_bytes(b"x")
    (tmp_path / "torch" / "mine.distcp").write_bytes(b"x")
    save(tmp_path / "torch", state_of(3))
    (name,) = {*os.listdir(tmp_path / "torch")} - {".metadata", "mine.distcp"}
    assert re.fullmatch(r"__0_[0-9a-f]{8}_0\.distcp", name)


@pytest.mark.parametrize("name", [".metadata", "mine.txt", "..", "../outside.distcp"])
def test_only_shards_are_removed_whatever_the_old_metadata_names(tmp_path, name):
    for path in (tmp_path / "in" / "mine.txt", tmp_path / "outside.distcp"):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
    save(tmp_path / "in", state_of(1))
    found = pickle.loads((tmp_path / "in" / ".metadata").read_bytes())
    for info in found.storage_data.values():
        info.relative_path = name
    (tmp_path / "in" / ".metadata").write_bytes(pickle.dumps(found))
    save(tmp_path / "in", state_of(2))
    assert same(load(tmp_path / "in", zeroed(state_of(2))), state_of(2))
    assert (tmp_path / "in" / "mine.txt").exists()
    assert (tmp_path / "outside.distcp").exists()


@pytest.mark.parametrize("place", ["write_data", "metadata", "sync"])
def test_a_failed_save_leaves_the_old_checkpoint(tmp_path, monkeypatch, place):
    save(tmp_path, state_of(1))
    broken = OSError(errno.EIO, "broken")

    def fail(*arguments, **options):
        raise broken

    names = {"write_data": "reserve", "metadata": "become_like", "sync": "sync_folder"}
    monkeypatch.setattr(_writing, names[place], fail)
    before = {*os.listdir(tmp_path)}
    with pytest.raises(CheckpointException, match="broken"):
        save(tmp_path, state_of(2), thread_count=2)
    # The files of the failed save take no space.
    assert {*os.listdir(tmp_path)} == before
    monkeypatch.undo()
    for reader in READERS:
        assert same(load(tmp_path, zeroed(state_of(1)), reader), state_of(1))
    save(tmp_path, state_of(3))
    assert len(os.listdir(tmp_path)) == 2


def test_a_copy_by_hard_links_keeps_the_old_checkpoint(tmp_path):
    save(tmp_path / "run", state_of(1))
    shutil.copytree(tmp_path / "run", tmp_path / "copy", copy_function=os.link)
    save(tmp_path / "run", state_of(2))
    for folder, seed in (("run", 2), ("copy", 1)):
        assert same(load(tmp_path / folder, zeroed(state_of(seed))), state_of(seed))


def test_of_two_concurrent_saves_one_wins(tmp_path):
    writer = FileSystemWriter(tmp_path)
    finish = writer.finish

    def finish_behind_another(metadata, results):
        save(tmp_path, state_of(2))
        finish(metadata, results)

    writer.finish = finish_behind_another
    with pytest.raises(CheckpointException, match="another save to this folder has begun"):
        dcp.save(state_of(1), storage_writer=writer, no_dist=True)
    assert same(load(tmp_path, zeroed(state_of(2))), state_of(2))


class Steps:
    """Stands for the module os, and calls a thread's hook before each system call."""

    CALLS = frozenset({"close", "listdir", "lstat", "open", "rename", "stat", "unlink"})

    def __init__(self):
        self.local = threading.local()

    def __getattr__(self, name):
        found = getattr(os, name)
        if name not in self.CALLS:
            return found

        def stepping(*arguments, **options):
            getattr(self.local, "hook", lambda: None)()
            return found(*arguments, **options)

        return stepping


class Held(threading.Thread):
    """A save that stops before its system call of a number, until it may go on."""

    def __init__(self, steps, folder, seed, at):
        super().__init__(daemon=True)
        self.steps, self.folder, self.seed, self.at = steps, folder, seed, at
        self.calls, self.error, self.stopped = 0, None, False
        self.waits, self.goes_on = threading.Event(), threading.Event()

    def hook(self):
        if self.calls == self.at:
            self.stopped = True
            self.waits.set()
            assert self.goes_on.wait(60)
        self.calls += 1

    def run(self):
        self.steps.local.hook = self.hook
        try:
            save(self.folder, {"x": torch.full((4,), float(self.seed))})
        except CheckpointException as error:
            self.error = error
        self.waits.set()

    def end(self):
        self.goes_on.set()
        self.join(60)


def test_of_two_saves_one_is_whole_wherever_both_are_held(tmp_path, monkeypatch):
    steps = Steps()
    monkeypatch.setattr(_writing, "os", steps)
    folder, first_at, more = tmp_path / "step", 0, True
    while more:
        more, other_at, other_more = False, 0, True
        while other_more:
            save(folder, {"x": torch.zeros(4)})
            first = Held(steps, folder, 1, first_at)
            other = Held(steps, folder, 2, other_at)
            for each in (first, other):
                each.start()
                assert each.waits.wait(60)
            for each in (first, other):
                each.end()
            more, other_more = first.stopped, first.stopped and other.stopped
            ended = [each.seed for each in (first, other) if each.error is None]
            # Both succeed only one after the other.
            assert ended, (first.error, other.error)
            (value,) = load(folder, {"x": torch.zeros(4)})["x"].unique().tolist()
            assert value in ended
            other_at += 3
        first_at += 1
    assert len(os.listdir(folder)) == 2


def test_a_save_that_goes_on_after_a_restart_fails(tmp_path):
    zombie = FileSystemWriter(tmp_path)
    write = zombie.write_data

    def write_behind_a_restart(plan, planner):
        save(tmp_path, state_of(2))
        return write(plan, planner)

    zombie.write_data = write_behind_a_restart
    with pytest.raises(CheckpointException, match="another save to this folder has begun"):
        dcp.save(state_of(1), storage_writer=zombie, no_dist=True)
    assert same(load(tmp_path, zeroed(state_of(2))), state_of(2))


@pytest.mark.parametrize("ahead", [3600, 10**8])
def test_a_claim_from_the_future_blocks_no_save(tmp_path, monkeypatch, ahead):
    save(tmp_path, state_of(1))
    # Of another host, so nobody knows whether its process lives.
    with monkeypatch.context() as patch:
        patch.setattr(names, "_host", lambda: "elsewhere")
        left = names.temporary_name(str(tmp_path / ".metadata"))
    with open(left, "wb") as file:
        os.utime(left, (time.time() + ahead,) * 2)
        # As by a machine that has lost its network: nobody else can take the lock.
        fcntl.flock(file, fcntl.LOCK_EX)
        save(tmp_path, state_of(2))
    assert not os.path.exists(left)
    assert same(load(tmp_path, zeroed(state_of(2))), state_of(2))


def test_files_of_a_checkpoint_stay_if_only_its_folder_is_not_synced(tmp_path, monkeypatch):
    rename = claims.rename

    def rename_and_break(*arguments):
        rename(*arguments)
        monkeypatch.setattr(claims, "sync_folder", lambda folder: 1 / 0)

    monkeypatch.setattr(claims, "rename", rename_and_break)
    with pytest.raises(CheckpointException, match="division"):
        save(tmp_path, state_of(1))
    assert same(load(tmp_path, zeroed(state_of(1))), state_of(1))


def test_a_save_keeps_files_whose_metadata_it_cannot_read(tmp_path, monkeypatch):
    save(tmp_path, state_of(1))
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "marker")))
    before = {*os.listdir(tmp_path)}
    monkeypatch.setattr(_writing, "reserve", lambda *_: 1 / 0)
    with pytest.raises(CheckpointException, match="division"):
        save(tmp_path, state_of(2))
    assert {*os.listdir(tmp_path)} == before


@pytest.mark.parametrize("shared", [True, False])
def test_files_of_failed_saves_do_not_accumulate(tmp_path, shared):
    folders = [str(tmp_path / ("run" if shared else f"run-{rank}")) for rank in range(3)]
    options = {"folders": folders, "failing": 2, "times": 3}
    found = together(tmp_path, work.save_and_fail_again, 3, **options)
    assert found == [[1, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1]]


@pytest.mark.parametrize("relative", [False, True])
def test_what_nfs_remembers_as_missing_is_loaded(tmp_path, monkeypatch, relative):
    """NFS forgets that once it has asked about the folder that has the name."""
    folder = tmp_path
    if relative:
        monkeypatch.chdir(tmp_path)
        folder = pathlib.Path()
    there, hidden = folder / "step-5", folder / "hidden"
    dcp.save({"x": torch.arange(5)}, storage_writer=FileSystemWriter(there))
    there.rename(hidden)

    def asking(path):
        if path == str(folder) and hidden.exists():
            hidden.rename(there)

    monkeypatch.setattr(paths, "ask_anew", asking)
    found = {"x": torch.zeros(5, dtype=torch.int64)}
    dcp.load(found, storage_reader=FileSystemReader(there))
    assert found["x"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("view", ["drives", "stale"])
def test_ranks_with_different_metadata_load_nothing(tmp_path, view):
    names = {"drives": ("a/step-9", "b/step-10"), "stale": ("a/step-9", "b/step-9")}
    folders = [str(tmp_path / name) for name in names[view]]
    for seed, folder in enumerate(folders):
        save(folder, {"x": torch.full((4,), float(seed))})
    for error, left in together(tmp_path, work.load_different, 2, folders=folders):
        assert "different checkpoints" in error
        assert all(f"rank {rank}: {folders[rank]!r}" in error for rank in range(2))
        assert left == [-1] * 4
    shutil.rmtree(folders[1])
    shutil.copytree(*folders)
    for error, left in together(tmp_path, work.load_different, 2, folders=folders):
        assert (error, left) == ("", [0] * 4)


class Unsliceable(torch.Tensor):
    """A tensor without slices, like the optimizer states of torchao."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in (torch.Tensor.__getitem__, torch.Tensor.narrow):
            raise NotImplementedError(function)
        return super().__torch_function__(function, types, args, kwargs or {})


def test_a_tensor_that_cannot_be_sliced_is_loaded_whole(tmp_path):
    with torch.serialization.safe_globals([Unsliceable]):
        state = {"x": torch.arange(6.0).reshape(2, 3).as_subclass(Unsliceable)}
        save(tmp_path, state)
        found = {"x": torch.zeros(2, 3)}
        load(tmp_path, found)
    assert found["x"].tolist() == [[0, 1, 2], [3, 4, 5]]


class Evil:
    """Creates a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_reading_runs_no_code(tmp_path):
    made = tmp_path / "made"
    save(tmp_path / "bytes", {"x": Evil(made), "y": torch.ones(3)}, "torch")
    with pytest.raises(CheckpointException, match="Weights only load failed"):
        load(tmp_path / "bytes", {"x": None, "y": torch.zeros(3)})
    assert not made.exists()
    save(tmp_path / "meta", {"y": torch.ones(3)})
    (tmp_path / "meta" / ".metadata").write_bytes(pickle.dumps(Evil(made)))
    with pytest.raises(CheckpointException, match="is not part of a checkpoint"):
        load(tmp_path / "meta", {"y": torch.zeros(3)})
    assert not made.exists()
    load(tmp_path / "bytes", {"x": None, "y": torch.zeros(3)}, weights_only=False)
    assert made.exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("pathlib", "PurePath"),
        ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
    ],
)
def test_reading_changes_no_class(tmp_path, module, name):
    save(tmp_path, {"y": torch.ones(3)})
    kind = getattr(importlib.import_module(module), name)
    # The opcode BUILD with a state of two parts sets attributes, even of a class.
    sets = f"\x80\x04c{module}\n{name}\nN}}\x8c\x04evilNs\x86b0".encode("latin1")
    path = tmp_path / ".metadata"
    path.write_bytes(sets + path.read_bytes()[2:])
    with contextlib.suppress(CheckpointException):
        load(tmp_path, {"y": torch.zeros(3)})
    assert not hasattr(kind, "evil")


MEGABYTE = b"B\x40\x42\x0f\x00" + b"x" * 1_000_000
LIST = b"](" + b"N" * 1000 + b"e"


@pytest.mark.parametrize(
    ("name", "members", "calls"),
    [
        ("builtins\nbytearray", b"\x8a\x08" + (1 << 32).to_bytes(8, "little"), 1),
        ("builtins\nbytearray", MEGABYTE, 2),
        ("builtins\nbytearray", b"X\1\0\0\0xX\5\0\0\0utf-8\x86", 1),
        ("builtins\nset", LIST, 20),
        ("builtins\nfrozenset", LIST, 20),
        ("torch\nSize", MEGABYTE, 2),
        ("pathlib\nPosixPath", b"X" + MEGABYTE[1:], 2),
        (
            "collections\nOrderedDict",
            b"}(" + b"".join(map(b"M%caN".__mod__, range(256))) + b"u",
            20,
        ),
    ],
    ids=lambda each: each.partition("\n")[2] if isinstance(each, str) else "",
)
def test_metadata_of_a_few_bytes_take_little_memory(tmp_path, name, members, calls):
    arguments = members if members[-1:] == b"\x86" else members + b"\x85"
    call = b"c%b\n" % name.encode() + b"h\x00R"
    body = b"\x80\x04" + arguments + b"q\x000" + call * calls + b"."
    (tmp_path / ".metadata").write_bytes(body)
    with pytest.raises(pickle.UnpicklingError, match="more parts than it has bytes"):
        bool(FileSystemReader(tmp_path).read_metadata())


def test_a_path_may_have_one_name_many_times(tmp_path):
    """Pickle writes it once, and then refers to it."""
    folder = tmp_path.joinpath(*["d" * 99] * 20)
    save(folder, {"y": torch.ones(3)})
    state = {"y": torch.zeros(3)}
    dcp.load(state, storage_reader=FileSystemReader(folder), no_dist=True)
    assert torch.equal(state["y"], torch.ones(3))


def test_an_older_torch_tells_why_metadata_cannot_be_read(tmp_path, monkeypatch):
    """It catches what read_metadata() raises, and forgets it."""
    monkeypatch.setattr(_reading, "DROPS_ERRORS", True)
    for reader in (FileSystemReader(tmp_path), HuggingFaceStorageReader(tmp_path)):
        with pytest.raises(CheckpointException, match="is empty"):
            dcp.load({"y": torch.zeros(3)}, storage_reader=reader, no_dist=True)
    with pytest.raises(FileNotFoundError):
        FileSystemReader(tmp_path).read_metadata()
    (tmp_path / ".metadata").write_bytes(b"junk")
    found = FileSystemReader(tmp_path).read_metadata()
    for use in (bool, lambda each: each.storage_data):
        with pytest.raises(pickle.UnpicklingError):
            use(found)


@pytest.mark.parametrize("protocol", range(3, pickle.HIGHEST_PROTOCOL + 1))
def test_containers_in_metadata_are_read(tmp_path, protocol):
    save(tmp_path, {"y": torch.ones(3)})
    found = pickle.loads((tmp_path / ".metadata").read_bytes())
    found.planner_data = [
        OrderedDict(a=1),
        {1, 2},
        frozenset("ab"),
        torch.Size([3, 4]),
        torch.Size([]),
        pathlib.Path("a", "b"),
        bytearray(),
        bytearray(b"abc"),
        slice(1, 2),
        2j,
    ]
    text = pickle.dumps(found, protocol)
    (tmp_path / ".metadata").write_bytes(text)
    assert FileSystemReader(tmp_path).read_metadata().planner_data == found.planner_data


def test_parts_of_tensors_with_one_hash_are_refused(tmp_path):
    """A dict of them takes quadratic time."""
    save(tmp_path, {"y": torch.ones(3)})
    found = pickle.loads((tmp_path / ".metadata").read_bytes())
    ((index, info),) = found.storage_data.items()
    for pair in pairs_of_one_hash(101):
        found.storage_data[metadata.MetadataIndex(index.fqn, pair)] = info
    (tmp_path / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(CheckpointException, match="101 keys with the same hash; 100 is"):
        load(tmp_path, {"y": torch.zeros(3)})
    found.storage_data = {index: info}
    found.planner_data = index
    (tmp_path / ".metadata").write_bytes(pickle.dumps(found))
    load(tmp_path, {"y": torch.zeros(3)})
    found.planner_data = metadata.MetadataIndex("z")
    (tmp_path / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(CheckpointException, match="2 objects of MetadataIndex, and 1 of 1"):
        load(tmp_path, {"y": torch.zeros(3)})


@pytest.mark.parametrize("name", ["../outside", "{}/outside", "a/../../outside"])
def test_files_outside_of_the_folder_are_not_read(tmp_path, name):
    save(tmp_path / "in", {"a": torch.randn(300_000)})
    (shard,) = {*os.listdir(tmp_path / "in")} - {".metadata"}
    os.rename(tmp_path / "in" / shard, tmp_path / "outside")
    found = pickle.loads((tmp_path / "in" / ".metadata").read_bytes())
    for info in found.storage_data.values():
        info.relative_path = name.format(tmp_path)
    (tmp_path / "in" / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(CheckpointException, match="is not a file in this folder"):
        load(tmp_path / "in", {"a": torch.zeros(300_000)})


def test_a_tensor_that_contradicts_the_metadata_is_an_error(tmp_path):
    save(tmp_path, {"a": torch.randn(800, 500)})
    found = pickle.loads((tmp_path / ".metadata").read_bytes())
    about = found.state_dict_metadata["a"]
    about.size = about.chunks[0].sizes = torch.Size([800])
    about.chunks[0].offsets = torch.Size([0])
    ((index, info),) = found.storage_data.items()
    found.storage_data = {dataclasses.replace(index, offset=torch.Size([0])): info}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(
        CheckpointException, match=r"has the shape \[800, 500\] there, and no part"
    ):
        load(tmp_path, {"a": torch.zeros(800)})


def test_old_names_of_torchs_classes_are_read(tmp_path):
    state = {"a": torch.randn(300, 500)}
    save(tmp_path, state)
    found = pickle.loads((tmp_path / ".metadata").read_bytes())
    about = found.state_dict_metadata["a"]
    about.properties = sharded.TensorProperties(dtype=about.properties.dtype)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(found))
    assert same(load(tmp_path, zeroed(state)), state)


def test_a_shard_that_is_shorter_is_an_error_that_names_it(tmp_path):
    save(tmp_path, {"a": torch.randn(300_000)})
    (name,) = {*os.listdir(tmp_path)} - {".metadata"}
    os.truncate(tmp_path / name, 600_000)
    with pytest.raises(CheckpointException, match=name):
        load(tmp_path, {"a": torch.zeros(300_000)})


def test_a_length_beyond_the_file_takes_no_memory(tmp_path):
    save(tmp_path, {"epoch": 3})
    path = tmp_path / ".metadata"
    found = pickle.loads(path.read_bytes())
    for info in found.storage_data.values():
        info.length = 1 << 50
        name = info.relative_path
    path.write_bytes(pickle.dumps(found))
    with pytest.raises(CheckpointException, match=f"names {1 << 50} of them: .*{name}"):
        load(tmp_path, {"epoch": 0})


def test_objects_that_will_be_refused_are_named_at_the_save(tmp_path):
    state = {"a": torch.ones(3), "b": [1, "x", 2.5], "rng": np.random.get_state()}
    with pytest.warns(RuntimeWarning, match="'b', 'rng' will.*add_safe_globals"):
        save(tmp_path, {**state, "b": [1, "x", np.float64(2.5)]})
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        save(tmp_path, {"a": state["a"], "b": state["b"]})
        # An error instead of a warning leaves the checkpoint as it was.
        with pytest.raises(CheckpointException, match="'c' will be refused"):
            save(tmp_path, {"a": state["a"], "c": Evil(tmp_path / "made")})
    assert load(tmp_path, {"b": [None] * 3})["b"] == state["b"]
    assert len(os.listdir(tmp_path)) == 2


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "transposed"])
@pytest.mark.parametrize("stages", [False, True], ids=["direct", "staged"])
def test_an_optimizer_resumes_to_the_bit(tmp_path, layout, kind, form, stages):
    # Wide enough for a tensor that is read into its target directly.
    wide = 64
    model, optimizer = new_training(layout, kind, form, wide)
    steps(model, optimizer, 2, wide=wide)
    found = get_state_dict(model, optimizer)
    if stages:
        found = PoolStager().stage(found)
    save(tmp_path, dict(enumerate(found)))
    steps(model, optimizer, 2, first=2, wide=wide)
    again, other = new_training(layout, kind, form, wide)
    state = load(tmp_path, dict(enumerate(get_state_dict(again, other))))
    set_state_dict(again, other, model_state_dict=state[0], optim_state_dict=state[1])
    steps(again, other, 2, first=2, wide=wide)
    assert all(torch.isfinite(each).all() for each in again.parameters())
    assert same(again.state_dict(), model.state_dict())


def test_after_install_a_folders_name_is_enough(tmp_path):
    from torch.distributed.checkpoint import _storage_utils

    torchs = _storage_utils.FileSystemWriter
    ours.install()
    ours.install()
    try:
        dcp.save(state_of(1), checkpoint_id=tmp_path, no_dist=True)
        found = zeroed(state_of(1))
        dcp.load(found, checkpoint_id=tmp_path, no_dist=True)
        assert same(found, state_of(1))
        assert any(re.match(r"__0_[0-9a-f]{8}_", name) for name in os.listdir(tmp_path))
    finally:
        ours.uninstall()
    assert _storage_utils.FileSystemWriter is torchs


def test_a_class_of_tensors_is_loaded_if_any_object_is_allowed(tmp_path):
    save(tmp_path, {"x": TwoTensor(torch.ones(3), torch.full((3,), 2.0))})
    found = {"x": TwoTensor(torch.zeros(3), torch.zeros(3))}
    with pytest.raises(CheckpointException, match="TwoTensor"):
        load(tmp_path, found)
    load(tmp_path, found, weights_only=False)
    assert (found["x"].a.sum(), found["x"].b.sum()) == (3, 6)


def test_after_install_another_process_saves_by_nvmeio_too(tmp_path):
    folder = str(tmp_path / "saved")
    (names,) = together(tmp_path, work.save_in_a_process_after_install, 1, folder=folder)
    # torch's own writer would call it __0_0.distcp.
    assert any(re.match(r"__0_[0-9a-f]{8}_", name) for name in names)


def test_install_can_allow_any_object(tmp_path):
    dcp.save({"x": Evil(tmp_path / "marker")}, checkpoint_id=tmp_path / "a", no_dist=True)
    try:
        for weights_only in (True, False):
            ours.install(weights_only=weights_only)
            with contextlib.ExitStack() as stack:
                if weights_only:
                    stack.enter_context(pytest.raises(CheckpointException))
                dcp.load({"x": None}, checkpoint_id=tmp_path / "a", no_dist=True)
            assert (tmp_path / "marker").exists() == (not weights_only)
    finally:
        ours.uninstall()


def test_async_save_works(tmp_path):
    state = state_of(1)
    future = dcp.async_save(state, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    future.result()
    assert same(load(tmp_path, zeroed(state)), state)


@pytest.mark.parametrize(("saved", "loaded"), [(1, 2), (3, 2)])
def test_ranks_load_checkpoints_of_more_or_fewer_ranks(tmp_path, saved, loaded):
    folder = str(tmp_path / "checkpoint")
    options = {"folder": folder, "seed": 5}
    together(tmp_path, work.save_together, saved, **options)
    for found in together(tmp_path, work.load_together, loaded, **options):
        assert found["wrong"] == []
        assert found["said"] == [5, [0.9, 0.99]]
        assert found["share"] <= found["read"] <= 1.1 * found["share"]


def test_ranks_without_collectives_save_separate_files(tmp_path):
    folder = tmp_path / "checkpoint"
    for seed in (4, 5):
        options = {"folder": str(folder), "seed": seed, "collectives": False}
        together(tmp_path, work.save_together, 2, **options)
    names = sorted(re.sub("_[0-9a-f]{8}_", "_x_", name) for name in os.listdir(folder))
    shards = [f"__{rank}_x_0.distcp" for rank in range(2)]
    assert names == sorted([*shards, "__0.metadata", "__1.metadata"])
    for found in together(tmp_path, work.load_together, 2, folder=str(folder), seed=5):
        assert found["wrong"] == []
        assert found["said"] == [5, [0.9, 0.99]]


def test_ranks_without_collectives_load_no_part_of_a_tensor_for_the_whole(tmp_path):
    options = {"folder": str(tmp_path / "checkpoint"), "seed": 4}
    together(tmp_path, work.save_together, 4, collectives=False, **options)
    found = together(tmp_path, work.load_too_little, 2, **options)
    assert found == [["tall", "wide"]] * 2
    state = {"model": {"wide": torch.zeros(work.ROWS, work.COLUMNS)}}
    with pytest.raises(ValueError, match="of the 840000 elements"):
        dcp.load(state, storage_reader=FileSystemReader(options["folder"]), no_dist=True)
    assert not state["model"]["wide"].any()


def test_what_one_of_several_ranks_has_saved_is_loaded_only_there(tmp_path):
    options = {"folder": str(tmp_path / "checkpoint"), "seed": 4}
    together(tmp_path, work.save_on_first, 2, **options)
    found = together(tmp_path, work.load_too_little, 2, **options)
    assert found == [[], ["tall", "wide"]]


def test_a_single_rank_does_not_save_over_a_checkpoint_of_all(tmp_path):
    save(tmp_path, state_of(1))
    writer = FileSystemWriter(tmp_path)
    with pytest.raises(FileExistsError, match="which would be loaded first"):
        dcp.save(state_of(2), storage_writer=writer, no_dist=True, use_collectives=False)
    assert same(load(tmp_path, zeroed(state_of(1))), state_of(1))
    # A single rank's checkpoint does not hinder a save of all ranks.
    folder = tmp_path / "other"
    for collectives in (False, True):
        state, writer = state_of(2 + collectives), FileSystemWriter(folder)
        dcp.save(state, storage_writer=writer, no_dist=True, use_collectives=collectives)
        assert same(load(folder, zeroed(state)), state)
    # Else torch would take what is left of it, if it could not read ``.metadata``.
    assert not list(folder.glob("__*.metadata"))


def test_an_error_of_one_rank_is_raised_on_all(tmp_path):
    options = {"folder": str(tmp_path / "checkpoint"), "failing": 1}
    found = together(tmp_path, work.save_and_fail, 2, **options)
    assert found == [["CheckpointException", True]] * 2
    assert not (tmp_path / "checkpoint" / ".metadata").exists()


@pytest.fixture(params=[PoolStager, DefaultStager], ids=["nvmeio", "torch"])
def stager(request):
    options = StagingOptions(False, False, False, False)
    made = request.param(*([options] if request.param is DefaultStager else []))
    yield made
    made.close()


def test_sharded_tensors_are_staged(tmp_path):
    """FSDP1's sharded states have them."""
    ((kept, staged),) = together(tmp_path, work.stage_sharded, 1)
    assert kept == "ShardedTensor"
    assert torch.equal(staged, torch.ones(4, 5))


def test_a_staged_state_is_independent_of_the_original(tmp_path, stager):
    state = state_of(1)
    state["tied"] = state["large"][:, 3:]
    staged = stager.stage(state)
    assert same(staged, state)
    assert staged["tied"].data_ptr() == staged["large"].data_ptr() + 3 * 4
    state["large"].zero_()
    state["nested"]["list"].append(0)
    assert not same(staged, state)
    assert staged["tied"].count_nonzero() > 1000
    assert len(staged["nested"]["list"]) == 3


@pytest.mark.parametrize("pool", [0, 1 << 40], ids=["full", "free"])
def test_memory_is_on_the_cpu_whatever_the_default_device(tmp_path, monkeypatch, pool):
    def empty(*size, **options):
        if not pool:
            raise MemoryError
        return nvmeio.torch.empty(*size, **options)

    monkeypatch.setattr(_staging, "empty", empty)
    state = state_of(1)
    # Not the dtype of the file, so that another tensor is read into.
    found = {"large": torch.zeros(300, 500, dtype=torch.float64)}
    with torch.device("meta"):
        staged = PoolStager().stage(state)
        save(tmp_path, staged)
        load(tmp_path, found)
    assert same(staged, state)
    assert torch.equal(found["large"], state["large"].double())


def test_a_tensor_without_memory_is_not_staged():
    """Before, the process ended with SIGSEGV."""
    with pytest.raises(RuntimeError, match="invalid python storage"):
        PoolStager().stage({"tangent": torch._efficientzerotensor(3)})


def test_staged_memory_is_returned_to_the_pool(tmp_path):
    (found,) = together(tmp_path, work.stage_again_and_again, 1, folder=str(tmp_path))
    assert found["held"] == [True] * 3
    assert found["given back"] == [True] * 3
    assert found["right"]


def test_no_memory_is_held_after_a_save(tmp_path):
    """Otherwise a second save would need as much again."""
    writer = FileSystemWriter(tmp_path)
    before = nvmeio.pool_stats()["bytes_used"]
    gc.disable()
    try:
        dcp.save({"a": torch.ones(1000)}, storage_writer=writer, no_dist=True)
        assert nvmeio.pool_stats()["bytes_used"] == before
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", [torch.Tensor, torch.nn.Parameter])
def test_a_lazy_conjugate_is_resolved_when_staged(kind):
    tensor = torch.tensor([1 + 2j, 3 - 1j]).conj()
    for each in (tensor, tensor.imag):
        state = {"a": each if kind is torch.Tensor else kind(each)}
        assert torch.equal(PoolStager().stage(state)["a"], state["a"])


def test_a_part_of_a_distributed_tensor_is_staged(tmp_path):
    """Whose local tensor begins somewhere in its memory."""
    assert together(tmp_path, work.stage_parts, 1) == [[True, True, True]]


def test_one_writer_makes_two_saves_at_once(tmp_path, monkeypatch):
    """The second one is told its folder while the first one writes."""
    save(tmp_path / "b", state_of(1))
    writer = FileSystemWriter(str(tmp_path / "a"))
    begun, goes_on, write_file = threading.Event(), threading.Event(), writer._write_file

    def slow(*arguments):
        if not begun.is_set():
            begun.set()
            assert goes_on.wait(60)
        return write_file(*arguments)

    monkeypatch.setattr(writer, "_write_file", slow)
    options = {"storage_writer": writer, "no_dist": True}
    first = threading.Thread(
        target=dcp.save,
        args=[state_of(2)],
        kwargs={**options, "checkpoint_id": str(tmp_path / "a")},
    )
    first.start()
    assert begun.wait(60)
    dcp.save(state_of(3), **options, checkpoint_id=str(tmp_path / "b"))
    goes_on.set()
    first.join(60)
    for name, seed in (("a", 2), ("b", 3)):
        assert same(load(tmp_path / name, zeroed(state_of(seed))), state_of(seed))
        assert len(os.listdir(tmp_path / name)) == 2


def test_a_save_that_loses_leaves_nothing(tmp_path):
    """Also if the other one was done before it wrote its file."""
    writer = FileSystemWriter(str(tmp_path))
    write_data = writer.write_data

    def late(*arguments):
        save(tmp_path, state_of(2))
        return write_data(*arguments)

    writer.write_data = late
    with pytest.raises(CheckpointException, match="another save"):
        dcp.save(state_of(1), storage_writer=writer, no_dist=True)
    assert same(load(tmp_path, zeroed(state_of(2))), state_of(2))
    assert len(os.listdir(tmp_path)) == 2


def test_a_new_save_may_be_read_by_those_who_may_read_the_old_one(tmp_path):
    before = os.umask(0o022)
    try:
        for seed in (1, 2):
            save(tmp_path, state_of(seed))
            modes = {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
            assert modes == ({0o644} if seed == 1 else {0o600})
            for path in tmp_path.iterdir():
                path.chmod(0o600)
    finally:
        os.umask(before)


def test_a_link_in_the_place_of_the_metadata_chooses_no_mode(tmp_path):
    (tmp_path / ".metadata").symlink_to("/dev/null")
    before = os.umask(0o077)
    try:
        save(tmp_path, state_of(1))
    finally:
        os.umask(before)
    assert {path.lstat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_a_rank_reserves_only_the_space_it_needs(tmp_path):
    folder = str(tmp_path / "checkpoint")
    sizes = together(tmp_path, work.reserved_together, 2, folder=folder)
    assert all(0 < size < 1.5 * (4 << 20) for size in sizes)


def test_staging_works_with_a_full_pool(tmp_path):
    assert together(tmp_path, work.stage_without_pool, 1) == [[True, True]]


class Dies(FileSystemWriter):
    def finish(self, *args, **kwargs):
        raise OSError(errno.EIO, "broken")


@pytest.mark.parametrize("model_files", [True, False])
def test_a_cached_plan_of_torchs_writer_is_no_error(tmp_path, model_files):
    """A planner caches plans for all planners and writers of a process."""
    last = ours.HuggingFaceStorageWriter if model_files else WRITERS["nvmeio"]
    for number, writer in enumerate((WRITERS["torch"], WRITERS["nvmeio"], last)):
        state, folder = {"cached": torch.full((9,), number)}, tmp_path / str(number)
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, storage_writer=writer(folder), planner=planner, no_dist=True)
    if model_files:
        reader = ours.HuggingFaceStorageReader(folder)
    else:
        reader = READERS["nvmeio"](folder)
    dcp.load(found := {"cached": torch.zeros(9)}, storage_reader=reader, no_dist=True)
    assert (found["cached"] == 2).all()


def test_a_planner_that_caches_plans_loses_no_checkpoint(tmp_path):
    """Its plans say what to keep as of an earlier save."""
    for seed in (1, 2, 3):
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        writer = (Dies if seed == 3 else FileSystemWriter)(str(tmp_path))
        with contextlib.suppress(CheckpointException):
            dcp.save(state_of(seed), storage_writer=writer, planner=planner, no_dist=True)
    assert same(load(tmp_path, zeroed(state_of(2))), state_of(2))


def test_reading_changes_no_member_of_an_enumeration(tmp_path):
    save(tmp_path / "good", {"y": torch.ones(3)})
    (tmp_path / "bad").mkdir()
    for module in (metadata, sharded):
        (kind,) = [
            each
            for each in vars(module).values()
            if isinstance(each, enum.EnumMeta) and each.__module__ == module.__name__
        ]
        before = [vars(each).copy() for each in kind]
        text = f"\x80\x02c{module.__name__}\n{kind.__name__}\nK\x00\x85R}}X\x07\x00\x00\x00"
        body = text.encode("latin1") + b"_value_K\x63sb."
        (tmp_path / "bad" / ".metadata").write_bytes(body)
        with pytest.raises(CheckpointException):
            load(tmp_path / "bad", {"y": torch.zeros(3)})
        assert [vars(each) for each in kind] == before
    assert load(tmp_path / "good", {"y": torch.zeros(3)})["y"].sum() == 3


@pytest.mark.parametrize("kind", [FileSystemWriter, HuggingFaceStorageWriter])
def test_a_url_is_not_taken_for_a_local_folder(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="path is 's3://bucket/run', a URL"):
        kind("s3://bucket/run")
    with pytest.raises(ValueError, match="checkpoint_id is 's3://bucket/run', a URL"):
        dcp.save(
            {"a": torch.ones(3)},
            storage_writer=kind("local"),
            checkpoint_id="s3://bucket/run",
            no_dist=True,
        )
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", [FileSystemReader, HuggingFaceStorageReader])
def test_a_url_to_load_from_is_refused(kind):
    with pytest.raises(ValueError, match="a URL; copy it to a local folder"):
        kind("s3://bucket/run")
    with pytest.raises(ValueError, match="checkpoint_id is 's3://bucket/run', a URL"):
        dcp.load(
            {"a": torch.ones(3)},
            storage_reader=kind("local"),
            checkpoint_id="s3://bucket/run",
            no_dist=True,
        )


@pytest.mark.parametrize("change", ["link", "chdir"])
def test_a_checkpoint_stays_in_one_folder(tmp_path, monkeypatch, change):
    """The kernel resolves "..", and the program may change its folder meanwhile."""
    for name in ("home", "disk/run", "disk/ckpt", "other/ckpt"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "home" / "run").symlink_to(tmp_path / "disk" / "run")
    monkeypatch.chdir(tmp_path / "home")
    name = "run/../ckpt" if change == "link" else "ckpt"
    where = tmp_path / ("disk" if change == "link" else "home") / "ckpt"
    dcp.save(state_of(1), storage_writer=FileSystemWriter(name), no_dist=True)
    writer = FileSystemWriter(name)
    if change == "chdir":
        monkeypatch.chdir(tmp_path / "other")
    dcp.save(state_of(2), storage_writer=writer, no_dist=True)
    assert same(load(where, zeroed(state_of(2))), state_of(2))
    assert os.listdir(tmp_path / "other" / "ckpt") == []


@pytest.mark.parametrize("contents", [b"precious", b""])
@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_claim_that_was_swapped_is_not_written_to(tmp_path, monkeypatch, link, contents):
    (tmp_path / "mine").write_bytes(contents)
    folder = tmp_path / "run"
    writer = FileSystemWriter(str(folder))
    write_data = writer.write_data

    def swapped(plan, planner):
        (claim,) = [each for each in os.listdir(folder) if each.endswith(".nvmeio-tmp")]
        os.unlink(folder / claim)
        link(tmp_path / "mine", folder / claim)
        return write_data(plan, planner)

    monkeypatch.setattr(writer, "write_data", swapped)
    with pytest.raises(CheckpointException):
        dcp.save(state_of(1), storage_writer=writer, no_dist=True)
    assert (tmp_path / "mine").read_bytes() == contents


def test_a_pipe_in_the_place_of_the_metadata_is_no_wait(tmp_path):
    os.mkfifo(tmp_path / ".metadata")
    with pytest.raises(CheckpointException, match="not a regular file"):
        load(tmp_path, {"y": torch.zeros(3)})
    (tmp_path / ".metadata").unlink()
    (tmp_path / ".metadata").touch()
    with pytest.raises(CheckpointException, match=r"\.metadata: it is empty"):
        load(tmp_path, {"y": torch.zeros(3)})


class Named(torch.Tensor):
    """A tensor with a name of its own."""


def test_a_subclass_that_has_memory_is_saved_as_a_plain_tensor(tmp_path):
    save(tmp_path, {"y": torch.ones(4).as_subclass(Named)})
    for reader in ("nvmeio", "torch"):
        assert load(tmp_path, {"y": torch.zeros(4)}, reader)["y"].tolist() == [1] * 4


def save_of_rank(folder, state, **options):
    writer = FileSystemWriter(folder, **options)
    return dcp.save(state, storage_writer=writer, no_dist=True, use_collectives=False)


@pytest.mark.parametrize(
    ("save", "other", "mark", "there"),
    [
        (save, save, ".metadata", True),
        (save, save, ".metadata", False),
        (save, save_of_rank, ".metadata", False),
        (save_of_rank, save_of_rank, "__0.metadata", True),
        (save_of_rank, save, "__0.metadata", True),
        (save_of_rank, save, "__0.metadata", False),
    ],
)
@pytest.mark.parametrize("at", ["shard", "metadata", "commit"])
def test_a_save_that_begins_beside_a_drain_goes_on_alone(
    tmp_path, monkeypatch, at, save, other, mark, there
):
    source, target = tmp_path / "source", tmp_path / "target"
    save(source, state_of(1), thread_count=2)
    if there:
        shutil.copytree(source, target)
        save(source, state_of(2), thread_count=2)
    copy, finish, done = _draining.Drain._copy_once, _places._ClaimWriter.finish, []

    def beside():
        if not done:
            done.append(at)
            other(target, state_of(3))

    def copying(self, name):
        if at != "commit" and (name == mark) == (at == "metadata"):
            beside()
        copy(self, name)

    def finishing(self):
        if at == "commit":
            beside()
        finish(self)

    monkeypatch.setattr(_draining, "PAUSE_S", 0)
    monkeypatch.setattr(_draining.Drain, "_copy_once", copying)
    monkeypatch.setattr(_places._ClaimWriter, "finish", finishing)
    with pytest.raises(FileExistsError, match="begun meanwhile"):
        drain(source, target).result()
    assert done == [at]
    assert same(load(target, zeroed(state_of(3))), state_of(3))
    assert not [name for name in os.listdir(target) if name.endswith("nvmeio-tmp")]


@pytest.mark.parametrize("there", [True, False])
def test_a_file_that_was_removed_beside_a_drain_is_missed(tmp_path, monkeypatch, there):
    source, target = tmp_path / "source", tmp_path / "target"
    save(source, state_of(1))
    if there:
        shutil.copytree(source, target)
    settle = _places.Folder.settle

    def removing(self, folder):
        for path in target.glob("*.distcp"):
            path.unlink()
        settle(self, folder)

    monkeypatch.setattr(_places.Folder, "settle", removing)
    with pytest.raises(FileExistsError, match="removed this file of the copy"):
        drain(source, target).result()
    assert (target / ".metadata").exists() == there


@pytest.mark.parametrize("mark", [".metadata", "model.safetensors.index.json"])
def test_a_copy_on_a_full_drive_is_found(tmp_path, monkeypatch, mark):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    for name in ("a.safetensors", mark):
        (source / name).write_text(name)
    nbytes = drain(source, target).result()

    def full(path, flags, *args):
        if flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        return opened(path, flags, *args)

    opened = claims.opened
    for module in (claims, locks):
        monkeypatch.setattr(module, "opened", full)
    assert drain(source, target).result() == nbytes
    assert sorted(os.listdir(target)) == sorted(os.listdir(source))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("mark", [".metadata", "model.safetensors.index.json"])
def test_a_copy_in_a_read_only_folder_is_found(tmp_path, mark):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    for name in ("a.safetensors", mark):
        (source / name).write_text(name)
    drain(source, target).result()
    with tempfile.TemporaryDirectory(dir="/tmp") as shared:
        copied = shutil.copytree(target, os.path.join(shared, "copy"))
        os.chmod(shared, 0o755)
        shutil.copytree(source, os.path.join(shared, "source"))
        try:
            os.seteuid(65534)
            assert drain(os.path.join(shared, "source"), copied).result() > 0
        finally:
            os.seteuid(0)


@pytest.mark.parametrize("fails", [True, False])
def test_a_save_over_a_part_of_a_drain_that_fails_later_stays(tmp_path, monkeypatch, fails):
    source, target = tmp_path / "source", tmp_path / "target"
    for number, name in enumerate("ab"):
        save(source / name, state_of(number))
    copy, order = _draining.Drain._copy_once, []

    def beside(self, name):
        if order and name.endswith(".metadata"):
            save(target / os.path.dirname(order[0]), state_of(3))
            if fails:
                raise CheckpointError("planted")
        copy(self, name)
        if name.endswith(".metadata"):
            order.append(name)

    monkeypatch.setattr(_draining.Drain, "_copy_once", beside)
    copying = drain(source, target)
    assert isinstance(copying.exception(), CheckpointError) == fails
    folder = target / os.path.dirname(order[0])
    assert same(load(folder, zeroed(state_of(3))), state_of(3))


def test_a_save_during_the_last_calls_of_a_drain_that_fails_stays(tmp_path, monkeypatch):
    """Nothing tells its file from the drain's, where times are in whole seconds."""
    source, target = tmp_path / "source", tmp_path / "target"
    for number, name in enumerate("ab"):
        save(source / name, state_of(number))
    copy = _draining.Drain._copy_once

    def beside(self, name):
        if name == os.path.join("b", ".metadata"):
            there = target / "a" / ".metadata"
            ours = os.stat(there)
            save(target / "a", state_of(3))
            assert os.stat(there).st_size == ours.st_size
            os.utime(there, ns=(ours.st_atime_ns, ours.st_mtime_ns))
            raise CheckpointError("planted")
        copy(self, name)

    monkeypatch.setattr(_draining.Drain, "_copy_once", beside)
    with pytest.raises(CheckpointError, match="planted"):
        drain(source, target).result()
    assert same(load(target / "a", zeroed(state_of(3))), state_of(3))


@pytest.mark.parametrize("kind", ["symbolic", "hard"])
def test_a_link_in_place_of_a_claim_is_not_followed(tmp_path, monkeypatch, kind):
    source, target, other = (tmp_path / name for name in ("source", "target", "other"))
    save(source, state_of(1))
    other.write_bytes(b"" if kind == "hard" else b"mine")
    before, opened = other.read_bytes(), claims.Claim.opened

    def planted(claim):
        os.unlink(claim.path)
        (os.symlink if kind == "symbolic" else os.link)(other, claim.path)
        return opened(claim)

    monkeypatch.setattr(claims.Claim, "opened", planted)
    with pytest.raises(OSError, match=r"begun meanwhile|symbolic links"):
        drain(source, target, retries=0).result()
    assert other.read_bytes() == before


def test_a_mount_that_refuses_files_open_for_both_gets_a_copy(tmp_path, monkeypatch):
    source, target = tmp_path / "source", tmp_path / "target"
    save(source, state_of(1))
    opened = _places.File

    def refusing(path, mode="r", **options):
        if "+" in mode:
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP), path)
        return opened(path, mode, **options)

    monkeypatch.setattr(_places, "File", refusing)
    drain(source, target).result()
    assert same(load(target, zeroed(state_of(1))), state_of(1))


@pytest.mark.parametrize(("first", "later"), [(True, False), (False, True)])
def test_saves_of_all_ranks_and_of_one_exclude_each_other(tmp_path, first, later):
    def save(writer, seed, collectives):
        state = state_of(seed)
        dcp.save(state, storage_writer=writer, no_dist=True, use_collectives=collectives)

    class Late(ours.FileSystemWriter):
        def finish(self, **results):
            save(FileSystemWriter(tmp_path), 2, later)
            super().finish(**results)

    with pytest.raises((CheckpointException, FileExistsError), match="begun meanwhile"):
        save(Late(tmp_path), 1, first)
    assert same(load(tmp_path, zeroed(state_of(2))), state_of(2))


def test_one_rank_does_not_save_beside_what_all_have_just_published(tmp_path):
    class Slow(ours.FileSystemWriter):
        def prepare_global_plan(self, plans):
            save(tmp_path, state_of(2))
            return super().prepare_global_plan(plans)

    writer = Slow(tmp_path)
    with pytest.raises(FileExistsError, match="which would be loaded first"):
        dcp.save(state_of(1), storage_writer=writer, no_dist=True, use_collectives=False)
    assert same(load(tmp_path, zeroed(state_of(2))), state_of(2))


def test_a_save_that_began_before_a_drain_fails(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    save(source, state_of(1))

    class Late(ours.FileSystemWriter):
        def finish(self, **results):
            drain(source, target).result()
            super().finish(**results)

    with pytest.raises(CheckpointException, match="begun meanwhile"):
        dcp.save(state_of(2), storage_writer=Late(target), no_dist=True)
    assert same(load(target, zeroed(state_of(1))), state_of(1))
