"""nvmeio.torch.dcp: checkpoints that are model files, by one rank and by several."""

import contextlib
import copy
import dataclasses
import errno
import fcntl
import glob
import itertools
import json
import os
import re
import shutil
import tempfile
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

import safetensors.torch
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)

from helpers import become_host
from nvmeio._files import locks
from nvmeio._publish.files import new_file
from nvmeio._publish.names import _host, final_name, temporary_name
from nvmeio._safetensors import places, replacing, turns
from nvmeio.safetensors import SafetensorError, load_sharded, save_sharded
from nvmeio.torch.dcp import (
    FileSystemReader,
    FileSystemWriter,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
    _model_reading,
    _model_writing,
)
from nvmeio.torch.dcp._model_reading import cover
from ranks import together
from workloads import dcp as work

READERS = {"nvmeio": HuggingFaceStorageReader, "torch": dcp.HuggingFaceStorageReader}
WRITERS = {"nvmeio": HuggingFaceStorageWriter, "torch": dcp.HuggingFaceStorageWriter}
PAIRS = [("nvmeio", "nvmeio"), ("nvmeio", "torch"), ("torch", "nvmeio")]
INDEX = "model.safetensors.index.json"
JOINED = {"save_distributed": True, "enable_consolidation": True}

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]


def state_of(seed):
    """Return tensors of many kinds."""
    torch.manual_seed(seed)
    return {
        "large": torch.randn(300, 500),
        "turned": torch.randn(400, 300).t(),
        "half": torch.randn(100_000, dtype=torch.bfloat16),
        "small": torch.randn(7),
        "one": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
    }


def zeroed(state):
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def save(folder, state, writer="nvmeio", **options):
    dcp.save(state, storage_writer=WRITERS[writer](str(folder), **options), no_dist=True)


def load(folder, state, reader="nvmeio"):
    dcp.load(state, storage_reader=READERS[reader](str(folder)), no_dist=True)
    return state


@pytest.mark.parametrize(("writer", "reader"), PAIRS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fqn_to_index_mapping": dict(zip(state_of(0), (1, 1, 2, 2, 3, 3), strict=True))},
        {"save_distributed": True},
    ],
    ids=["one file", "three files", "of a rank"],
)
def test_each_reads_what_the_other_writes(
    tmp_path, default_engine, writer, reader, options
):
    state = state_of(1)
    if writer == "torch":
        state["turned"] = state["turned"].contiguous()
    save(tmp_path, state, writer, **options)
    assert same(load(tmp_path, zeroed(state), reader), state)
    found = {}
    for name in os.listdir(tmp_path):
        if name.endswith(".safetensors"):
            found |= safetensors.torch.load_file(tmp_path / name)
    assert same(found, state)
    if "save_distributed" not in options:
        index = json.loads((tmp_path / INDEX).read_text())
        assert index["weight_map"].keys() == state.keys()
        total = sum(each.nbytes for each in state.values())
        assert index["metadata"]["total_size"] == total


def test_parts_are_joined_into_whole_tensors(tmp_path):
    folder = tmp_path / "checkpoint"
    together(tmp_path, work.save_models, 3, folder=str(folder), joined=True)
    (found,) = together(tmp_path, work.whole_state, 1, seed=3)
    index = json.loads((folder / INDEX).read_text())
    files = sorted({*index["weight_map"].values()})
    assert files == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for name in files:
        for key, tensor in safetensors.torch.load_file(folder / name).items():
            assert tensor.double().sum().item() == found.pop(key)
            assert index["weight_map"][key] == name
        with safetensors.safe_open(folder / name, "pt") as file:
            assert file.metadata()["format"] == "pt"
    assert found == {}


def test_files_of_parts_are_not_all_open_at_once(tmp_path, monkeypatch):
    state = {f"{i}": torch.full((8,), float(i)) for i in range(10)}
    mapping = {name: number for number, name in enumerate(state, 1)}
    options = {"save_distributed": True, "enable_consolidation": True}
    counts, read = [], _model_writing._joined

    def joined(*arguments):
        opened = map(os.path.realpath, glob.glob("/proc/self/fd/*"))
        counts.append(sum("/sharded/shard-" in path for path in opened))
        return read(*arguments)

    monkeypatch.setattr(_model_writing, "_joined", joined)
    save(tmp_path, state, fqn_to_index_mapping=mapping, **options)
    assert counts == [0] * 10
    assert same(load_sharded(tmp_path), state)


def test_parts_are_joined_on_the_cpu_whatever_the_default_device(tmp_path):
    options = {"save_distributed": True, "enable_consolidation": True}
    state = state_of(1)
    with torch.device("meta"):
        save(tmp_path, state, fqn_to_index_mapping=dict.fromkeys(state, 1), **options)
    (whole,) = tmp_path.glob("model-*.safetensors")
    assert same(safetensors.torch.load_file(whole), state)


@pytest.mark.parametrize(
    ("saved", "loaded", "writer", "reader"),
    [(3, 2, "nvmeio", "nvmeio"), (2, 1, "nvmeio", "torch"), (3, 2, "torch", "nvmeio")],
)
def test_ranks_load_checkpoints_of_more_or_fewer_ranks(
    tmp_path, saved, loaded, writer, reader
):
    folder = str(tmp_path / "checkpoint")
    together(tmp_path, work.save_models, saved, folder=folder, by=writer)
    for found in together(tmp_path, work.load_models, loaded, folder=folder, by=reader):
        assert found["wrong"] == []
        if reader == "nvmeio":
            assert found["share"] <= found["read"] <= 1.1 * found["share"]


@pytest.mark.parametrize("before", [*WRITERS, "save_sharded"])
def test_saving_again_leaves_nothing_of_the_old_checkpoint(tmp_path, before):
    mapping = dict(zip(state_of(0), (1, 2, 3, 3, 3, 3), strict=True))
    old = {name: tensor.contiguous() for name, tensor in state_of(1).items()}
    if before == "save_sharded":
        assert len(save_sharded(old, tmp_path, "500KB")) > 3
    else:
        save(tmp_path, old, before, fqn_to_index_mapping=mapping)
    left = temporary_name("model-00001-of-00009.safetensors")
    (tmp_path / left).write_bytes(b"of a save that died")
    (tmp_path / "mine.txt").write_bytes(b"x")
    save(tmp_path, state_of(2))
    names = {"model-00001-of-00001.safetensors", INDEX, "mine.txt"}
    assert {*os.listdir(tmp_path)} == names
    assert same(load(tmp_path, zeroed(state_of(2))), state_of(2))


@pytest.mark.parametrize("mount", ["local", "NFS"])
def test_what_another_host_writes_is_left(tmp_path, monkeypatch, mount):
    with monkeypatch.context() as patch:
        become_host(patch, "another")
        path = tmp_path / temporary_name("model-00001-of-00002.safetensors")
    lock = fcntl.flock

    def as_nfs(descriptor, kind):
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        if kind & fcntl.LOCK_EX and flags & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "an exclusive lock needs a file open for writing")
        lock(descriptor, kind)

    if mount == "NFS":
        monkeypatch.setattr(fcntl, "flock", as_nfs)
    with new_file(os.fspath(path)):
        save(tmp_path, state_of(1))
        assert path.exists()
    save(tmp_path, state_of(1))
    assert not path.exists()


@pytest.mark.parametrize("limit", ["1KB", "5GB"])
@pytest.mark.parametrize("options", [{}, {"save_distributed": True}, JOINED])
def test_save_sharded_replaces_what_this_writer_saved(tmp_path, options, limit):
    """Also if it has no tensor in common, which readers would add."""
    save(tmp_path, state_of(1), **options)
    state = {name: torch.full((200,), 2.0) for name in "ab"}
    files = save_sharded(state, tmp_path, limit)
    joined = {"sharded"} if options == JOINED else set()
    assert {*os.listdir(tmp_path)} == {*files} | joined
    assert same(load_sharded(tmp_path), state)
    reader = HuggingFaceStorageReader(str(tmp_path))
    assert reader.read_metadata().state_dict_metadata.keys() == state.keys()
    assert same(load(tmp_path, zeroed(state)), state)


OLD_AND_NEW = [("abcde", "abcdef"), ("abcde", "abcd"), ("abcde", "f")]


@pytest.mark.parametrize(("old", "new"), OLD_AND_NEW)
@pytest.mark.parametrize("limit", [800, "5GB"])
@pytest.mark.parametrize("before", ["sharded", "whole", "parts", "one"])
def test_no_reader_takes_files_of_two_saves_for_one(tmp_path, old, new, limit, before):
    """save_sharded is killed before each of its renames and removals."""
    first, second = (
        {name: torch.full((100,), value) for name in names}
        for names, value in ((old, 1.0), (new, 2.0))
    )
    kills = 0
    while True:
        # A folder may be called like a file.
        folder = tmp_path / f"{kills}.safetensors"
        if before == "sharded":
            save_sharded(first, folder, 800)
        elif before == "one":
            save_sharded(first, folder)
        else:
            mapping = {name: 1 + at // 2 for at, name in enumerate(first)}
            in_parts = before == "parts"
            save(folder, first, fqn_to_index_mapping=mapping, save_distributed=in_parts)
        if not is_killed(kills, save_sharded, second, folder, limit, sync=False):
            break
        kills += 1
        reader = HuggingFaceStorageReader(str(folder))
        with contextlib.suppress(SafetensorError):
            found = reader.read_metadata().state_dict_metadata.keys()
            values = load(folder, {name: torch.zeros(100) for name in found})
            assert same(values, first) or same(values, second)
        with contextlib.suppress(SafetensorError, FileNotFoundError):
            values = load_sharded(folder)
            assert same(values, first) or same(values, second)
        # What it left says that it goes on, but does not delay the next one.
        save_sharded(second, folder, limit, sync=False)
        assert same(load_sharded(folder), second)
        assert not [name for name in os.listdir(folder) if "nvmeio-save" in name]
    assert kills > 1
    assert same(load_sharded(folder), second)
    assert same(load(folder, zeroed(second)), second)


@pytest.mark.parametrize("others", [True, False])
def test_the_mark_of_a_killed_save_goes_with_its_files(tmp_path, others):
    """Another file may be one of them."""
    mapping = {"a": 1, "b": 2}
    first, second, third = (dict.fromkeys("ab", torch.full((9,), n)) for n in (1, 2, 3))
    save(tmp_path, first, fqn_to_index_mapping=mapping)
    assert is_killed(3, save, tmp_path, second, fqn_to_index_mapping=mapping)
    assert (tmp_path / INDEX).read_bytes() == places.REPLACING
    if others:
        safetensors.torch.save_file({"other": torch.zeros(9)}, tmp_path / "o.safetensors")
    save(tmp_path, third, save_distributed=True)
    assert same(load(tmp_path, zeroed(third)), third)
    assert (tmp_path / INDEX).exists() == others


def is_killed(number, save, *args, **options):
    """Save in a child, which ends before this rename or removal; return whether it did."""
    child = os.fork()
    if not child:
        done = []

        def ending(call):
            def step(*args, **options):
                done.append(args)
                if len(done) > number:
                    os._exit(9)
                return call(*args, **options)

            return step

        os.replace, os.unlink = ending(os.replace), ending(os.unlink)
        try:
            save(*args, **options)
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 9)
    return status == 9


def test_an_index_never_has_less_than_the_file_that_it_leads_to(tmp_path, monkeypatch):
    """If the save ended between the name of its only file and the index."""
    first, more = {"a": torch.zeros(3)}, {"a": torch.ones(3), "b": torch.ones(3)}
    for state in (first, {"a": torch.full((3,), 2.0)}, more):

        def fail(*arguments):
            raise OSError(errno.EIO, "broken")

        if state is not first:
            with monkeypatch.context() as patch:
                patch.setattr(_model_writing, "sync_folder", fail)
                with pytest.raises(CheckpointException, match="broken"):
                    save(tmp_path, state)
            if state is more:
                with pytest.raises(SafetensorError, match="may be of two models"):
                    load_sharded(tmp_path)
            else:
                assert same(load_sharded(tmp_path), state)
        save(tmp_path, state)
        assert same(load_sharded(tmp_path), state)


def test_a_copy_by_hard_links_keeps_the_old_model(tmp_path):
    save(tmp_path / "run", state_of(1))
    shutil.copytree(tmp_path / "run", tmp_path / "copy", copy_function=os.link)
    mapping = dict(zip(state_of(0), (1, 2, 3, 3, 3, 3), strict=True))
    save(tmp_path / "run", state_of(2), fqn_to_index_mapping=mapping)
    for folder, seed in (("run", 2), ("copy", 1)):
        assert same(load(tmp_path / folder, zeroed(state_of(seed))), state_of(seed))
        assert load_sharded(tmp_path / folder).keys() == state_of(seed).keys()


def test_old_files_do_not_come_back_after_a_power_failure(tmp_path, monkeypatch):
    state = {"a": torch.ones(5), "b": torch.ones(5)}
    save(tmp_path, state, fqn_to_index_mapping={"a": 1, "b": 2})
    calls, fsync, unlink = [], os.fsync, os.unlink

    def watched_fsync(descriptor):
        calls.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def watched_unlink(path):
        # It has left its name.
        calls.append(final_name(os.path.basename(path)))
        unlink(path)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "unlink", watched_unlink)
    save(tmp_path, state, fqn_to_index_mapping={"a": 1, "b": 1})
    removed = calls.index("model-00002-of-00002.safetensors")
    assert str(tmp_path) in calls[removed:]


@pytest.mark.parametrize("place", ["save", "replace_file", "sync_folder"])
def test_a_failed_save_leaves_the_old_checkpoint_or_none(tmp_path, monkeypatch, place):
    save(tmp_path, state_of(1))

    def fail(*arguments, **options):
        raise OSError(errno.EIO, "broken")

    module = replacing if place == "replace_file" else _model_writing
    monkeypatch.setattr(module, place, fail)
    with pytest.raises(CheckpointException, match="broken"):
        save(tmp_path, state_of(2))
    monkeypatch.undo()
    # The only file of this save may have its name by then.
    seed = 1 if place == "save" else 2
    assert same(load(tmp_path, zeroed(state_of(seed))), state_of(seed))


def test_values_that_no_model_file_can_hold_are_refused(tmp_path):
    with pytest.raises(CheckpointException, match="'step' is not a tensor"):
        save(tmp_path, {"step": 3, "a": torch.ones(3)})
    with pytest.raises(CheckpointException, match="'a' is not in fqn_to_index_mapping"):
        save(tmp_path, {"a": torch.ones(3)}, fqn_to_index_mapping={"b": 1})
    with pytest.raises(CheckpointException, match="'step' is not a tensor"):
        save(tmp_path / "new", {"step": 3})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["model", "model/sharded", "other"])
def test_joined_files_are_in_the_folder_that_a_save_names(tmp_path, name):
    options = {"save_distributed": True, "enable_consolidation": True}
    writer = HuggingFaceStorageWriter(str(tmp_path / "model"), **options)
    for seed in (1, 2):
        state, folder = state_of(seed), tmp_path / name
        dcp.save(state, storage_writer=writer, checkpoint_id=str(folder), no_dist=True)
        whole = folder.parent if folder.name == "sharded" else folder
        found = load_sharded(whole)
        assert same(found, state)
        assert len(os.listdir(whole / "sharded")) == 1
    assert len(os.listdir(tmp_path)) == 1


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("kind", ["files", "whole", "joined"])
def test_a_save_without_a_folder_goes_where_the_last_one_went(tmp_path, kind, reset):
    """As with torch's writers, also if that one ran in another thread."""
    if kind == "files":
        writer, reader = FileSystemWriter(tmp_path / "first"), FileSystemReader
    else:
        options = JOINED if kind == "joined" else {}
        writer = HuggingFaceStorageWriter(str(tmp_path / "first"), **options)
        reader = HuggingFaceStorageReader
    options = {"storage_writer": writer, "no_dist": True}
    dcp.save(state_of(1), checkpoint_id=str(tmp_path / "second"), **options)
    dcp.async_save(
        state_of(2), checkpoint_id=str(tmp_path / "third"), storage_writer=writer
    ).result()
    if reset:
        # As torch's save_state_dict() does.
        writer.reset()
    dcp.save(state_of(3), **options)
    for name, seed in (("second", 1), ("third", 3)):
        state = zeroed(state_of(0))
        dcp.load(state, storage_reader=reader(str(tmp_path / name)), no_dist=True)
        assert same(state, state_of(seed))
    assert {*os.listdir(tmp_path)} <= {"first", "second", "third"}


@pytest.mark.parametrize("mapping", [None, {f"{i}": i // 4 + 1 for i in range(8)}], ids=str)
def test_ranks_that_have_the_whole_state_save_one_model(tmp_path, mapping):
    folder = str(tmp_path / "model")
    options = {"folder": folder, "mapping": mapping}
    state, _ = together(tmp_path, work.save_models_that_all_have, 2, **options)
    found = load_sharded(folder)
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_two_files_of_one_name_are_refused(tmp_path):
    save(tmp_path, state_of(1), save_distributed=True)
    before = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
    writer = HuggingFaceStorageWriter(str(tmp_path), save_distributed=True)
    finish = writer.finish

    def finish_with_another(metadata, results):
        # As if a second rank behaved as the first.
        told = copy.deepcopy(results[0])
        for each in told:
            name = final_name(each.storage_data.relative_path)
            each.storage_data.relative_path = temporary_name(name)
        finish(metadata, [*results, told])

    writer.finish = finish_with_another
    with pytest.raises(CheckpointException, match="several ranks wrote"):
        dcp.save(state_of(2), storage_writer=writer, no_dist=True)
    now = {n: (tmp_path / n).read_bytes() for n in os.listdir(tmp_path)}
    assert {n: each for n, each in now.items() if not n.endswith(".nvmeio-tmp")} == before


def test_files_of_two_saves_are_refused(tmp_path):
    for seed in (1, 2):
        save(tmp_path / str(seed), state_of(seed), save_distributed=True)
    (name,) = os.listdir(tmp_path / "2")
    os.rename(tmp_path / "2" / name, tmp_path / "1" / name.replace("00001", "00002", 1))
    with pytest.raises(CheckpointException, match="two saves"):
        load(tmp_path / "1", zeroed(state_of(1)))
    assert os.listdir(tmp_path / "2") == []


OF_RANKS = {"save_distributed": True}


@pytest.mark.parametrize(
    ("before", "after"), [({}, {}), (OF_RANKS, OF_RANKS), (OF_RANKS, {})]
)
@pytest.mark.parametrize("name", ["a", "b"])
def test_files_of_another_model_are_no_part_of_a_save(tmp_path, before, after, name):
    """The save was killed when its first file had its name; the old one had others."""
    old, new = tmp_path / "old", tmp_path / "new"
    save(old, {name: torch.zeros(9)}, "torch", **before)
    save(new, {"a": torch.ones(9)}, **after)
    (kept,) = (path for path in old.glob("*.safetensors"))
    there = kept.name.replace("-of-00001", "-of-00002")
    kept.rename(new / there.replace("00001", "00002", 1))
    with pytest.raises(CheckpointException, match="are from two saves"):
        load(new, {"a": torch.zeros(9), name: torch.zeros(9)})


def test_a_part_that_is_missing_is_refused(tmp_path):
    folder = tmp_path / "checkpoint"
    together(tmp_path, work.save_models, 2, folder=str(folder))
    (last,) = (name for name in os.listdir(folder) if name.startswith("shard-00002"))
    os.unlink(folder / last)
    with pytest.raises(CheckpointException, match=r"files have \d+ elements of"):
        load(folder, {"wide": torch.zeros(1200, 700)})


@pytest.mark.parametrize(
    "told",
    [
        "[]",
        "{",
        '{"a": {}}',
        '{"a": {"saved_offsets": [0]}}',
        '{"a": {"saved_offsets": [-1, 0]}}',
        '{"a": {"saved_offsets": [0, 0.5]}}',
        '{"a": {"saved_offsets": [0, 1], "nvmeio_size": [3, 4]}}',
    ],
)
def test_foreign_metadata_of_offsets_are_checked(tmp_path, told):
    path = tmp_path / "shard-00001-model-00001-of-00001.safetensors"
    tensors = {"a": torch.ones(3, 4)}
    safetensors.torch.save_file(tensors, path, {"DCP_SHARDING_INFO": told})
    with pytest.raises(CheckpointException, match=f"{path.name}: "):
        load(tmp_path, {"a": torch.zeros(3, 4)})


def test_a_file_that_changes_meanwhile_is_an_error(tmp_path):
    save(tmp_path, state_of(1))
    reader = HuggingFaceStorageReader(str(tmp_path))
    read = reader.read_metadata

    def read_and_replace():
        found = read()
        save(tmp_path, {"small": torch.ones(3), **state_of(2)}, save_distributed=False)
        other = tmp_path / "model-00001-of-00001.safetensors"
        safetensors.torch.save_file({"large": torch.ones(2)}, other)
        return found

    reader.read_metadata = read_and_replace
    with pytest.raises(CheckpointException, match="has changed while it was read"):
        dcp.load(zeroed(state_of(1)), storage_reader=reader, no_dist=True)


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("by", ["nvmeio", "safetensors"])
def test_a_model_that_is_replaced_by_one_of_the_same_layout_is_no_mixture(
    tmp_path, monkeypatch, by, at
):
    def put(value):
        state = {name: torch.full((5,), value) for name in ("a", "b")}
        if by == "nvmeio":
            save(tmp_path, state, fqn_to_index_mapping={"a": 1, "b": 2})
            return
        for number, name in enumerate(state, 1):
            path = tmp_path / f"model-{number:05d}-of-00002.safetensors"
            safetensors.torch.save_file({name: state[name]}, path)

    put(1.0)
    for path in tmp_path.glob("*.safetensors"):
        os.utime(path, (1, 1))  # not in the same tick of the clock as the second
    file_of, count = _model_reading.ModelFile, itertools.count(1)

    def replace(*arguments):
        # After both files were opened for their headers, before file `at` is read.
        if next(count) == 2 + at:
            monkeypatch.undo()
            put(2.0)
        return file_of(*arguments)

    monkeypatch.setattr(_model_reading, "ModelFile", replace)
    with pytest.raises(CheckpointException, match="has changed while it was read"):
        load(tmp_path, {"a": torch.zeros(5), "b": torch.zeros(5)})


def test_ranks_with_different_models_load_nothing(tmp_path):
    folders = [str(tmp_path / name) for name in "ab"]
    for seed, folder in enumerate(folders):
        save(folder, {"x": torch.full((4,), float(seed))})
    options = {"folders": folders, "models": True}
    for error, left in together(tmp_path, work.load_different, 2, **options):
        assert "different checkpoints" in error
        assert all(f"rank {rank}: {folders[rank]!r}" in error for rank in range(2))
        assert left == [-1] * 4
    shutil.rmtree(folders[1])
    shutil.copytree(*folders)
    for error, left in together(tmp_path, work.load_different, 2, **options):
        assert (error, left) == ("", [0] * 4)


@pytest.mark.parametrize("before", WRITERS)
@pytest.mark.parametrize("options", [{}, {"save_distributed": True}], ids=str)
def test_a_save_interrupted_between_renames_is_an_error_on_load(
    tmp_path, monkeypatch, before, options
):
    options["fqn_to_index_mapping"] = dict(
        zip(state_of(0), (1, 1, 1, 2, 2, 2), strict=True)
    )
    old = {name: tensor.contiguous() for name, tensor in state_of(1).items()}
    save(tmp_path, old, before, **options)
    replace, done = os.replace, []

    def fail_in_between(part, whole):
        done.extend([whole] if whole.endswith(".safetensors") else [])
        if len(done) == 2:
            raise OSError(errno.EIO, "broken")
        replace(part, whole)

    monkeypatch.setattr(_model_writing.os, "replace", fail_in_between)
    with pytest.raises(CheckpointException, match="broken"):
        save(tmp_path, state_of(2), **options)
    monkeypatch.undo()
    with pytest.raises(CheckpointException, match="two saves"):
        load(tmp_path, zeroed(state_of(1)))
    if not options.get("save_distributed"):
        with pytest.raises(SafetensorError, match="may be of two models"):
            load_sharded(tmp_path)
    save(tmp_path, state_of(3), **options)
    assert same(load(tmp_path, zeroed(state_of(3))), state_of(3))


def test_a_mixture_of_joined_files_is_refused(tmp_path, monkeypatch):
    mapping = dict(zip(state_of(0), (1, 1, 1, 2, 2, 2), strict=True))
    options = {"save_distributed": True, "enable_consolidation": True}
    save(tmp_path, state_of(1), fqn_to_index_mapping=mapping, **options)
    replace, done = os.replace, []

    def fail_in_between(part, whole):
        if "sharded" not in str(whole) and str(whole).endswith(".safetensors"):
            done.append(whole)
            if len(done) == 2:
                raise OSError(errno.EIO, "broken")
        replace(part, whole)

    monkeypatch.setattr(_model_writing.os, "replace", fail_in_between)
    with pytest.raises(CheckpointException, match="broken"):
        save(tmp_path, state_of(2), fqn_to_index_mapping=mapping, **options)
    monkeypatch.undo()
    with pytest.raises(CheckpointException, match="two saves"):
        load(tmp_path, zeroed(state_of(1)))


def test_parts_that_cannot_be_joined_leave_the_old_model_and_nothing_else(
    tmp_path, monkeypatch
):
    mapping = dict(zip(state_of(0), (1, 1, 1, 2, 2, 2), strict=True))
    options = {"save_distributed": True, "enable_consolidation": True}
    save(tmp_path, state_of(1), fqn_to_index_mapping=mapping, **options)
    before, read = set(os.listdir(tmp_path)), _model_writing._joined
    # As a process that was killed leaves it.
    (tmp_path / temporary_name("model-00001-of-00002.safetensors")).write_bytes(b"part")

    def joined(name, *arguments):
        if mapping[name] == 2:
            raise OSError(errno.EIO, "broken")
        return read(name, *arguments)

    monkeypatch.setattr(_model_writing, "_joined", joined)
    with pytest.raises(CheckpointException, match="broken"):
        save(tmp_path, state_of(2), fqn_to_index_mapping=mapping, **options)
    assert set(os.listdir(tmp_path)) == before
    assert same(load_sharded(tmp_path), state_of(1))


def test_fewer_ranks_save_over_torchs_checkpoint(tmp_path):
    folder = tmp_path / "checkpoint"
    together(tmp_path, work.save_models, 3, folder=str(folder), by="torch")
    together(tmp_path, work.save_models, 2, folder=str(folder))
    assert len(os.listdir(folder)) == 2
    for found in together(tmp_path, work.load_models, 1, folder=str(folder)):
        assert found["wrong"] == []


@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00002.safetensors"])
def test_parts_of_ranks_replace_no_foreign_model(tmp_path, name):
    theirs = tmp_path / name
    safetensors.torch.save_file({"base": torch.ones(3)}, theirs)
    with pytest.raises(CheckpointException, match="are from two saves"):
        save(tmp_path, state_of(1), save_distributed=True)
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("options", [{}, JOINED], ids=["whole", "joined"])
def test_no_model_is_saved_beside_a_file_that_would_be_loaded(tmp_path, options):
    theirs = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"base": torch.ones(3)}, theirs)
    with pytest.raises(CheckpointException, match="instead of the model"):
        save(tmp_path, state_of(1), **options)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [theirs.name]
    theirs.unlink()
    save(tmp_path, state_of(1), **options)
    assert same(load_sharded(tmp_path), state_of(1))


def there_is(name, **metadata):
    """Return what makes a file with one tensor."""
    tensors = {name: torch.ones(3)}
    return lambda path: safetensors.torch.save_file(tensors, path, metadata)


def of_another_save(path):
    folder = path.parent / "theirs"
    save(folder, {"theirs": torch.ones(3)})
    os.rename(folder / "model-00001-of-00001.safetensors", path)
    shutil.rmtree(folder)


def with_a_tensor_twice(path):
    there_is("theirs")(path)
    shutil.copy(path, path.with_name("copy.safetensors"))


def of_a_dtype_that_torch_lacks(path):
    header = json.dumps({"x": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}})
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(3))


OTHERS = {
    "other": there_is("other"),
    "no model": lambda path: path.write_bytes(b"x"),
    "no file": lambda path: path.symlink_to("nowhere"),
    "another save": of_another_save,
    "a tensor twice": with_a_tensor_twice,
    "a gap": there_is("theirs", DCP_SHARDING_INFO='{"theirs": {"saved_offsets": [3]}}'),
    "no dtype": of_a_dtype_that_torch_lacks,
    "part of ranks": lambda path: there_is("theirs")(
        path.with_name("shard-00001-model-00001-of-00001.safetensors")
    ),
}


@pytest.mark.parametrize("options", [{}, {"save_distributed": True}, JOINED])
@pytest.mark.parametrize("there", [*OTHERS, "small"])
def test_a_file_is_refused_beside_which_no_reader_could_read(tmp_path, options, there):
    theirs = tmp_path / "extra.safetensors"
    OTHERS.get(there, there_is("small"))(theirs)
    before = {each: each.read_bytes() for each in tmp_path.iterdir() if each.is_file()}
    if there == "other":
        save(tmp_path, state_of(1), **options)
        assert same(load(tmp_path, zeroed(state_of(1))), state_of(1))
        return
    with pytest.raises(CheckpointException, match="no reader could read the folder"):
        save(tmp_path, state_of(1), **options)
    left = {each for each in tmp_path.rglob("*") if each.is_file()}
    assert {each: each.read_bytes() for each in left} == before


def test_parts_of_ranks_are_not_saved_beside_another_model(tmp_path):
    old = {name: tensor.contiguous() for name, tensor in state_of(1).items()}
    files = save_sharded(old, tmp_path, "500KB")
    with pytest.raises(CheckpointException, match=r"it has '.*' too"):
        save(tmp_path, state_of(2), save_distributed=True)
    assert {*os.listdir(tmp_path)} == {*files}


def test_ranks_without_collectives_save_and_load(tmp_path):
    folder = str(tmp_path / "checkpoint")
    alone = {"folder": folder, "collectives": False}
    together(tmp_path, work.save_models, 2, **alone)
    for found in together(tmp_path, work.load_models, 2, folder=folder):
        assert found["wrong"] == []
    (said,) = together(tmp_path, work.save_models_alone_and_join, 1, folder=folder)
    assert "use_collectives=False" in said
    # The last one would remove the other's file, whose index would be gone too.
    shared = str(tmp_path / "shared")
    for said in together(
        tmp_path, work.save_models_alone_under_common_names, 2, folder=shared
    ):
        assert "pass save_distributed=True" in said
    assert not os.path.exists(shared)


def test_a_rank_without_collectives_sees_no_stranger_in_another_one(tmp_path, monkeypatch):
    """Which gives its file its name while this one looks for files that stay.

    Nor does it read those of the others, which may be thousands.
    """
    state, require = state_of(1), _model_writing.require_replaceable
    opened, open_model = [], _model_reading.ModelFile

    def noting(path, *args):
        opened.append(path)
        return open_model(path, *args)

    def other_rank_saves(*args, **options):
        name = "shard-00002-model-00001-of-00001.safetensors"
        tensors = {name: tensor.contiguous() for name, tensor in state.items()}
        of_torch = {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
        safetensors.torch.save_file(tensors, tmp_path / name, of_torch)
        require(*args, **options)

    offsets = {name: {"saved_offsets": [0] * t.dim()} for name, t in state.items()}
    monkeypatch.setattr(_model_writing, "require_replaceable", other_rank_saves)
    for module in (_model_reading, places):
        monkeypatch.setattr(module, "ModelFile", noting)
    writer = HuggingFaceStorageWriter(str(tmp_path), save_distributed=True)
    dcp.save(state, storage_writer=writer, no_dist=True, use_collectives=False)
    assert opened == []
    dcp.save(state, storage_writer=writer, no_dist=True, use_collectives=False)
    assert {os.path.basename(path)[:11] for path in opened} == {"shard-00001"}
    assert len(os.listdir(tmp_path)) == 2
    assert same(load(tmp_path, zeroed(state)), state)


@pytest.mark.parametrize("options", [{}, {"save_distributed": True}, JOINED])
@pytest.mark.parametrize("limit", ["1KB", "5GB"])
def test_save_sharded_in_the_middle_is_not_mixed(tmp_path, monkeypatch, options, limit):
    state = {name: torch.full((200,), 2.0) for name in "ab"}
    later = {name: torch.full((200,), 3.0) for name in "ab"}
    finish = HuggingFaceStorageWriter.finish

    def save_before(self, **arguments):
        save_sharded(state, tmp_path, limit)
        finish(self, **arguments)

    monkeypatch.setattr(HuggingFaceStorageWriter, "finish", save_before)
    with pytest.raises(CheckpointException, match="FileExistsError"):
        save(tmp_path, later, **options)
    monkeypatch.undo()
    for found in (load_sharded(tmp_path), load(tmp_path, zeroed(state))):
        assert same(found, state)


def caching_planner(tmp_path):
    # torch caches plans by the name of the planner's class.
    kind = type(tmp_path.name, (dcp.DefaultSavePlanner,), {})
    return kind(enable_plan_caching=True)


def test_a_planner_that_caches_plans_works(tmp_path):
    for seed in (1, 2):
        writer = HuggingFaceStorageWriter(str(tmp_path))
        planner = caching_planner(tmp_path)
        dcp.save(state_of(seed), storage_writer=writer, planner=planner, no_dist=True)
        assert same(load(tmp_path, zeroed(state_of(seed))), state_of(seed))


def test_a_folder_that_is_not_shared_is_an_error_before_any_rename(tmp_path):
    save(tmp_path, state_of(1), save_distributed=True)
    before = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
    writer = HuggingFaceStorageWriter(str(tmp_path), save_distributed=True)
    write_data = writer.write_data

    def write_elsewhere(plan, planner):
        future = write_data(plan, planner)
        for name in os.listdir(tmp_path):
            if name.startswith(".shard-"):
                os.rename(tmp_path / name, tmp_path.parent / name)
        return future

    writer.write_data = write_elsewhere
    with pytest.raises(CheckpointException, match="must share one folder"):
        dcp.save(state_of(2), storage_writer=writer, no_dist=True)
    assert before == {n: (tmp_path / n).read_bytes() for n in os.listdir(tmp_path)}


@pytest.mark.parametrize("second", [1, 2])
def test_parts_that_overlap_are_refused(tmp_path, second):
    for number, (at, rows) in enumerate([(0, 2), (second, 2), (4, 2)]):
        told = {"a": {"saved_offsets": [at, 0], "nvmeio_size": [6, 3]}}
        if second == 2:
            told["a"]["nvmeio_size"][0] += number
        path = tmp_path / f"shard-0000{number}-model-00001-of-00001.safetensors"
        metadata = {"DCP_SHARDING_INFO": json.dumps(told)}
        safetensors.torch.save_file({"a": torch.ones(rows, 3)}, path, metadata)
    words = "some are there twice" if second == 1 else "in another file"
    with pytest.raises(CheckpointException, match=words):
        load(tmp_path, {"a": torch.zeros(6, 3)})


def pinwheels(count):
    """Return parts of a square around each other, which no cut divides, and its side."""
    boxes, side = [], 4 * count + 1
    for low in range(2 * count):
        high = side - low - 1
        long = high - low
        boxes += [((low, low), (1, long)), ((low, high), (long, 1))]
        boxes += [((high, low + 1), (1, long)), ((low + 1, low), (long, 1))]
    boxes.append(((2 * count, 2 * count), (1, 1)))
    return [ChunkStorageMetadata(*map(torch.Size, box)) for box in boxes], side


@pytest.mark.parametrize("parts", ["grid", "pinwheels"])
def test_parts_of_a_thousand_ranks_are_not_compared_in_pairs(parts):
    """Each is looked at once; one that lies elsewhere is found."""
    chunks, side = pinwheels(125)
    if parts == "grid":
        side = 33 * 6
        places = itertools.product(range(0, side, 6), repeat=2)
        sizes = torch.Size([6, 6])
        chunks = [ChunkStorageMetadata(torch.Size(at), sizes) for at in places]

    class Counted(list):
        looks = 0

        def __iter__(self):
            Counted.looks += 1
            return super().__iter__()

    assert len(chunks) > 1000
    assert cover(Counted(chunks), (side, side))
    assert Counted.looks == 2
    moved = dataclasses.replace(chunks[500], offsets=chunks[501].offsets)
    without = [*chunks[:500], *chunks[501:]]
    for others in (without, [*chunks, chunks[500]], [*without, moved]):
        assert not cover(others, (side, side))
    assert not cover(chunks, (side, side, 1))


@pytest.mark.parametrize(
    ("begin", "words"),
    [
        (2, "^the parts of tensor 'a' have 6 elements; it has 8$"),
        (0, "^the parts of tensor 'a' have 8 elements; it has 8; some are there twice$"),
    ],
)
def test_parts_that_do_not_fit_together_are_not_joined(begin, words):
    sizes = torch.Size([4 if begin == 0 else 3])
    chunks = [ChunkStorageMetadata(torch.Size([at]), sizes) for at in (0, begin)]
    properties = TensorProperties(torch.float32)
    about = TensorStorageMetadata(properties, torch.Size([8]), chunks)
    with pytest.raises(RuntimeError, match=words):
        _model_writing._joined("a", about, [], {}, "")


def test_parts_are_not_saved_as_whole_tensors(tmp_path):
    folder = tmp_path / "checkpoint"
    found = together(tmp_path, work.save_models_of_parts, 2, folder=str(folder))
    assert found == [True] * 2
    assert not folder.exists()


def test_ranks_whose_plans_are_cached_are_refused(tmp_path):
    """The files of two saves could not be told apart."""
    for seed in (1, 2):
        writer = HuggingFaceStorageWriter(str(tmp_path), save_distributed=True)
        planner = caching_planner(tmp_path)
        arguments = {"storage_writer": writer, "planner": planner, "no_dist": True}
        if seed == 1:
            dcp.save(state_of(seed), **arguments)
            continue
        with pytest.raises(CheckpointException, match="use enable_plan_caching=False"):
            dcp.save(state_of(seed), **arguments)
    assert same(load(tmp_path, zeroed(state_of(1))), state_of(1))


def test_several_files_whose_plan_is_cached_are_refused(tmp_path):
    """If the save died between two of them, nothing would tell the mixture."""
    for seed in (1, 2):
        state = state_of(seed)
        files = {name: number for number, name in enumerate(state, 1)}
        writer = HuggingFaceStorageWriter(str(tmp_path), files)
        planner = caching_planner(tmp_path)
        arguments = {"storage_writer": writer, "planner": planner, "no_dist": True}
        if seed == 1:
            dcp.save(state, **arguments)
            continue
        with pytest.raises(CheckpointException, match="use enable_plan_caching=False"):
            dcp.save(state, **arguments)
    assert same(load(tmp_path, zeroed(state_of(1))), state_of(1))


def test_files_of_failed_saves_are_removed_before_the_next_one_writes(tmp_path):
    for _ in range(3):
        writer = HuggingFaceStorageWriter(str(tmp_path), save_distributed=True)
        writer.finish = None
        with pytest.raises(CheckpointException):
            dcp.save(state_of(1), storage_writer=writer, no_dist=True)
        assert len(list(tmp_path.glob(".shard-*"))) == 1


def test_a_joined_index_without_its_name_is_removed_by_the_next_save(tmp_path):
    # Of a process that has died.
    died = f"{_host()}-{1 << 30}-1-01234567"
    left = tmp_path / f".model.safetensors.index.json.{died}.nvmeio-tmp"
    left.touch()
    writer = HuggingFaceStorageWriter(
        str(tmp_path), save_distributed=True, enable_consolidation=True
    )
    dcp.save(state_of(1), storage_writer=writer, no_dist=True)
    assert not left.exists()


@pytest.mark.parametrize("at", ["before the lock", "in the middle", "before the index"])
def test_of_two_saves_at_once_one_fails_and_one_is_whole(tmp_path, monkeypatch, at):
    """Wherever the first one is held, while the other one saves as far as it can."""
    seeds, held, goes_on = {1: [], 2: []}, threading.Event(), threading.Event()
    first = threading.local()
    alone, replace = _model_writing.alone_in, os.replace
    check = HuggingFaceStorageWriter._check

    def hold():
        if getattr(first, "is_it", False):
            held.set()
            assert goes_on.wait(60)

    def held_before(*arguments, **options):
        if at == "before the lock" and [*tmp_path.glob(".model-*")]:
            hold()
        return alone(*arguments, **options)

    def held_between(*arguments):
        if at == "in the middle" and not held.is_set():
            hold()
        replace(*arguments)

    def held_with_the_lock(self):
        named = len([*tmp_path.glob("model-*")])
        if at == "before the index" and named == len(state_of(1)):
            hold()
        check(self)

    if at == "before the index":
        # The other one does not wait for the first, which has the lock.
        monkeypatch.setattr(turns, "PATIENCE_S", 0)
    monkeypatch.setattr(HuggingFaceStorageWriter, "_check", held_with_the_lock)
    monkeypatch.setattr(_model_writing, "alone_in", held_before)
    monkeypatch.setattr(_model_writing.os, "replace", held_between)

    def run(seed):
        first.is_it = seed == 1
        mapping = {name: number for number, name in enumerate(state_of(seed), 1)}
        writer = HuggingFaceStorageWriter(str(tmp_path), mapping)
        try:
            dcp.save(state_of(seed), storage_writer=writer, no_dist=True)
        except CheckpointException as error:
            seeds[seed].append(error)

    threads = [threading.Thread(target=run, args=[seed]) for seed in (1, 2)]
    threads[0].start()
    assert held.wait(60)
    threads[1].start()
    threads[1].join(1 if at == "in the middle" else 60)
    goes_on.set()
    for thread in threads:
        thread.join(60)
    failed, whole = (2, 1) if at == "before the index" else (1, 2)
    assert not seeds[whole]
    if at == "before the lock":
        assert "another save to this folder has begun" in str(seeds[failed])
    if at == "before the index":
        assert "another save of a model names its files" in str(seeds[failed])
    assert same(load_sharded(tmp_path), state_of(whole))
    assert same(load(tmp_path, zeroed(state_of(whole))), state_of(whole))
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("first", ["dcp", "sharded"])
@pytest.mark.parametrize("second", ["dcp", "sharded"])
def test_no_save_goes_on_beside_one_that_is_held(tmp_path, monkeypatch, first, second):
    """Before each call that names or removes a file, for longer than the patience."""
    ways = {
        "dcp": lambda state: save(tmp_path, state, fqn_to_index_mapping={"a": 1, "b": 2}),
        "sharded": lambda state: save_sharded(state, tmp_path, 400),
    }
    old, one, other = ({n: torch.full((100,), v) for n in "ab"} for v in (1.0, 2.0, 3.0))
    ways[first](old | {"c": torch.ones(3)} if first == "sharded" else old)
    calls = {name: getattr(os, name) for name in ("replace", "unlink", "link")}
    inside, refused, places = threading.local(), [], set()

    def held(name):
        def call(*args, **options):
            place = name, os.path.basename(os.fsdecode(args[-1]))
            others = r"nvmeio-tmp|distcp|\.nvmeio-save$"
            is_new = not re.search(others, place[1]) and place not in places
            # exists_now() asks for a link to a folder, which nobody makes.
            is_new = is_new and not str(args[0]).endswith("/.")
            if getattr(inside, "first", False) and is_new:
                places.add(place)
                inside.first = False
                with pytest.raises((FileExistsError, CheckpointException)) as caught:
                    ways[second](other)
                refused.append(str(caught.value))
                inside.first = True
            return calls[name](*args, **options)

        return call

    monkeypatch.setattr(turns, "PATIENCE_S", 0)
    for name in calls:
        monkeypatch.setattr(os, name, held(name))
    inside.first = True
    ways[first](one)
    monkeypatch.undo()
    assert len(refused) >= 3
    assert all("another save of a model names its files" in words for words in refused)
    assert same(load_sharded(tmp_path), one)
    assert same(load(tmp_path, zeroed(one)), one)


@pytest.mark.parametrize("collectives", [True, False])
def test_a_folder_that_is_locked_by_a_reader_stops_no_save(
    tmp_path, monkeypatch, collectives
):
    """Who may not write there cannot lock the file that counts."""
    monkeypatch.setattr(turns, "PATIENCE_S", 0)
    check, modes = HuggingFaceStorageWriter._check_folder, []

    def noting(*args, **options):
        modes.append((tmp_path / ".nvmeio-save").stat().st_mode & 0o777)
        return check(*args, **options)

    monkeypatch.setattr(HuggingFaceStorageWriter, "_check_folder", noting)
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_SH)
        options = {"no_dist": True, "use_collectives": collectives}
        for mode in (0o755, 0o775):
            tmp_path.chmod(mode)
            writer = HuggingFaceStorageWriter(str(tmp_path))
            dcp.save(state_of(1), storage_writer=writer, **options)
    finally:
        os.close(folder)
    assert same(load(tmp_path, zeroed(state_of(1))), state_of(1))
    # Another one, killed, may be followed by one of anybody who may write there.
    assert modes == [0o600, 0o600, 0o666, 0o666]


@pytest.mark.parametrize("way", ["joined", "whole"])
def test_no_save_begins_while_another_looks_at_its_folder_and_claims_it(
    tmp_path, monkeypatch, way
):
    """The one that names its files would lose its claim, and its files, in the middle."""
    options = JOINED if way == "joined" else {}
    save(tmp_path, state_of(1), **options)
    monkeypatch.setattr(turns, "PATIENCE_S", 0)
    places = []

    def beside(name):
        function = getattr(_model_writing, name)

        def call(*args, **options):
            with (
                pytest.raises(FileExistsError, match="names its files"),
                turns.alone_in(tmp_path / "sharded" if way == "joined" else tmp_path),
            ):
                pass
            places.append(name)
            return function(*args, **options)

        return call

    with monkeypatch.context() as patch:
        for name in ("Claim", "remove_parts"):
            patch.setattr(_model_writing, name, beside(name))
        save(tmp_path, state_of(2), **options)
    assert {*places} == {"Claim", "remove_parts"}
    assert same(load(tmp_path, zeroed(state_of(2))), state_of(2))


def test_a_save_that_is_refused_takes_no_claim_of_another(tmp_path, monkeypatch):
    """Its second folder is found to be in use when it could have claimed the first."""
    save(tmp_path, state_of(1), **JOINED)
    before = {path: path.stat().st_ino for path in tmp_path.rglob("*")}
    check = HuggingFaceStorageWriter._check_folder
    claim = _model_writing.Claim(str(tmp_path / places.INDEX_NAME))

    def refusing(self, folder, saved, *, indexed):
        if indexed:
            raise FileExistsError(errno.EEXIST, "in use", folder)
        check(self, folder, saved, indexed=indexed)

    monkeypatch.setattr(HuggingFaceStorageWriter, "_check_folder", refusing)
    with pytest.raises(CheckpointException, match="in use"):
        save(tmp_path, state_of(2), **JOINED)
    claim.check()
    claim.remove()
    assert {path: path.stat().st_ino for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("first", ["joined", "whole"])
def test_joined_and_whole_saves_of_one_folder_have_one_claim(tmp_path, monkeypatch, first):
    """Also if neither waits for the other one's lock: the one that began first fails."""
    monkeypatch.setattr(turns, "PATIENCE_S", 0)
    options = {"joined": JOINED, "whole": {}}
    finish, done = HuggingFaceStorageWriter.finish, []

    def save_before(self, **arguments):
        if not done:
            done.append(first)
            (other,) = options.keys() - {first}
            save(tmp_path, state_of(2), **options[other])
        finish(self, **arguments)

    monkeypatch.setattr(HuggingFaceStorageWriter, "finish", save_before)
    with pytest.raises(CheckpointException, match=r"one save( may go on there| at a time)"):
        save(tmp_path, state_of(1), **options[first])
    assert same(load_sharded(tmp_path), state_of(2))
    assert same(load(tmp_path, zeroed(state_of(2))), state_of(2))
    assert not [*tmp_path.rglob(".*")]


@pytest.mark.parametrize("locked", [".", "sharded"])
def test_a_joined_save_waits_for_others_in_both_folders(tmp_path, monkeypatch, locked):
    save(tmp_path, state_of(1), **JOINED)
    waits, sleep = threading.Event(), time.sleep

    def noting(seconds):
        waits.set()
        sleep(seconds)

    monkeypatch.setattr(turns.time, "sleep", noting)
    options = {"kwargs": JOINED, "args": (tmp_path, state_of(2))}
    saving = threading.Thread(target=save, **options)
    file = os.open(tmp_path / locked / ".nvmeio-save", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        saving.start()
        assert waits.wait(60)
        for each in (tmp_path, tmp_path / "sharded"):
            assert same(load(each, zeroed(state_of(1))), state_of(1))
    finally:
        os.close(file)
    saving.join(60)
    assert same(load(tmp_path, zeroed(state_of(2))), state_of(2))


def test_a_new_save_may_be_read_by_those_who_may_read_the_old_one(tmp_path):
    """Not by others, at any time: the files with temporary names neither."""
    before = os.umask(0o022)
    try:
        for seed in (1, 2):
            writer = HuggingFaceStorageWriter(str(tmp_path), {"a": 1})
            dcp.save({"a": torch.ones(seed)}, storage_writer=writer, no_dist=True)
            modes = {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
            assert modes == ({0o644} if seed == 1 else {0o600})
            for path in tmp_path.iterdir():
                path.chmod(0o600)
    finally:
        os.umask(before)


def killed_within(folder):
    """Leave what a save does that is killed while it names its files."""
    child = os.fork()
    if not child:
        with contextlib.suppress(OSError), turns.alone_in(folder):
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("killed", [1001, 0])
@pytest.mark.parametrize("mode", [0o1777, 0o755])
def test_what_a_killed_save_leaves_stops_nobody_who_may_write_there(
    tmp_path, monkeypatch, mode, killed
):
    """Linux refuses O_CREAT for the file of another in a sticky folder, if so set."""
    opened = locks.opened

    def refusing(path, flags, *args):
        protects = mode == 0o1777 and flags & os.O_CREAT and os.path.exists(path)
        if protects and os.stat(path).st_uid != os.geteuid():
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return opened(path, flags, *args)

    monkeypatch.setattr(locks, "opened", refusing)
    monkeypatch.setattr(turns, "PATIENCE_S", 0)
    # The others may not import from here.
    state = {name: torch.ones(100) for name in "ab"}
    save(tmp_path, state)
    save_sharded(state, tmp_path)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        user = 1002 if mode == 0o1777 else 1001
        os.chown(folder, 0 if mode == 0o1777 else 1001, -1)
        os.chmod(folder, mode)
        try:
            os.seteuid(killed)
            killed_within(folder)
            os.seteuid(0)
            os.seteuid(user)
            save(folder, state)
            save_sharded(state, folder)
        finally:
            os.seteuid(0)
        assert same(load_sharded(folder), state)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("mode", [0o2775, 0o775])
@pytest.mark.parametrize("way", ["dcp", "sharded"])
def test_a_model_of_another_user_is_replaced_with_its_index(way, mode, monkeypatch):
    """In a folder that a group shares; its files are writable for their owner alone.

    A save of that user, who has a group alone, was killed while it named its files.
    """

    def put(value):
        state = {name: torch.full((100,), value) for name in ("a", "b")}
        if way == "dcp":
            save(folder, state, fqn_to_index_mapping={"a": 1, "b": 2})
        else:
            save_sharded(state, folder, 400)
        return state

    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        put(1.0)
        os.chown(folder, 1000, 2000)
        os.chmod(folder, mode)
        for path in Path(folder).iterdir():
            os.chown(path, 1001, 1001)
            path.chmod(0o644)
        groups, group = os.getgroups(), os.getegid()
        monkeypatch.setattr(turns, "PATIENCE_S", 0)
        try:
            os.setgroups([2000])
            os.setegid(1001)
            os.seteuid(1001)
            killed_within(folder)
            assert Path(folder, ".nvmeio-save").stat().st_uid == 1001
            os.seteuid(0)
            os.setegid(1002)
            os.seteuid(1002)
            state = put(2.0)
        finally:
            os.seteuid(0)
            os.setegid(group)
            os.setgroups(groups)
        assert {path.stat().st_uid for path in Path(folder).iterdir()} == {1002}
        assert same(load_sharded(folder), state)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("way", ["dcp", "distributed", "sharded"])
def test_a_file_that_only_its_owner_may_remove_is_refused_first(way):
    """In a folder such as /tmp, where the old one would stay beside the new one."""

    def put(value):
        state = {name: torch.full((100,), value) for name in ("a", "b")}
        if way == "sharded":
            save_sharded(state, folder, 400)
        else:
            save(folder, state, save_distributed=way == "distributed")
        return state

    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        state = put(1.0)
        os.chmod(folder, 0o1777)
        before = {*os.listdir(folder)}
        os.seteuid(1002)
        try:
            words = "can be neither replaced nor removed"
            with pytest.raises((PermissionError, CheckpointException), match=words):
                put(2.0)
        finally:
            os.seteuid(0)
        assert {*os.listdir(folder)} == before
        assert same(load(folder, zeroed(state)), state)
