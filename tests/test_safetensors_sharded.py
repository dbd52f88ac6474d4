"""Models in several files, with the names and the index of huggingface_hub."""

import errno
import gc
import json
import os
import random
import re
import resource
import shutil
import threading
import time
from contextlib import ExitStack, closing

import numpy as np
import pytest

pytest.importorskip("torch")
huggingface_hub = pytest.importorskip("huggingface_hub")

import safetensors.numpy
import safetensors.torch
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint import CheckpointException

import nvmeio.checkpoint
import nvmeio.torch
from helpers import become_host, drop, interrupted_after_each_call, need_direct
from model_samples import Moved, bits_of, filled, in_flight
from nvmeio._arguments.units import size_of
from nvmeio._cli.arguments import size
from nvmeio._files import locks, paths
from nvmeio._publish import locks as locks_of_folders
from nvmeio._publish.claims import Claim
from nvmeio._publish.names import final_name
from nvmeio._safetensors import replacing, turns, writing
from nvmeio._safetensors.file import ModelFile
from nvmeio.checkpoint import _draining, _places
from nvmeio.safetensors import SafetensorError, _sharded, load_sharded, save_sharded
from nvmeio.torch.dcp import HuggingFaceStorageReader, HuggingFaceStorageWriter

INDEX = "model.safetensors.index.json"


def tensors_of(sizes):
    """Return tensors of the given sizes in KB (10^3)."""
    return {f"t{n:02}": filled("uint8", (size * 1000,), n) for n, size in enumerate(sizes)}


def bits(tensors):
    """Return the bits of each tensor."""
    return {name: bits_of(tensor) for name, tensor in tensors.items()}


SIZES = {
    "equal": [6, 6, 2, 6, 2, 2],
    "larger than a file": [2, 30, 2, 2, 30, 30, 2],
    "first larger": [30, 2, 2],
    "all larger": [30, 20],
    "exactly": [10, 10, 5, 5, 10],
    "one file": [1, 2, 3],
    "with empty ones": [0, 10, 0, 10, 0],
    "many": [random.Random(4).randrange(14) for _ in range(60)],
}


class TestLikeTheHubs:
    """Names, files and index equal huggingface_hub's, with listed exceptions."""

    @pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
    @pytest.mark.parametrize("limit", ["10KB", 10_000])
    def test_names_and_contents(self, tmp_path, sizes, limit):
        tensors = tensors_of(sizes)
        split = huggingface_hub.split_torch_state_dict_into_shards
        found = save_sharded(tensors, tmp_path / "ours", limit)
        # The Hub does not sort, and treats views of empty storages as shared.
        full = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
        expected = split(tensors, max_shard_size=limit)
        names = list(expected.filename_to_tensors)
        assert found == names + ([INDEX] if expected.is_sharded else [])
        assert sorted(os.listdir(tmp_path / "ours")) == sorted(found)
        for name in names:
            theirs = {n: tensors[n] for n in expected.filename_to_tensors[name]}
            ours = safetensors.torch.load_file(tmp_path / "ours" / name)
            assert (
                bits(ours).items()
                >= bits({n: theirs[n] for n in theirs if n in full}).items()
            )
        (tmp_path / "theirs").mkdir()
        huggingface_hub.save_torch_state_dict(
            full, tmp_path / "theirs", max_shard_size=limit
        )
        if len(full) == len(tensors):
            assert sorted(os.listdir(tmp_path / "theirs")) == sorted(found)
            for name in found:
                texts = [(tmp_path / who / name).read_bytes() for who in ("ours", "theirs")]
                if name == INDEX:
                    texts = [json.loads(text) for text in texts]
                assert texts[0] == texts[1]
        assert bits(load_sharded(tmp_path / "ours")) == bits(tensors)
        assert bits(load_sharded(tmp_path / "theirs")) == bits(full)

    def test_the_index_is_text_as_transformers_writes_it(self, tmp_path):
        save_sharded(tensors_of([6, 6, 6]), tmp_path, 6000)
        text = (tmp_path / INDEX).read_text()
        expected = {
            "metadata": {"total_size": 18000},
            "weight_map": {
                f"t0{n}": f"model-0000{n + 1}-of-00003.safetensors" for n in range(3)
            },
        }
        assert text == json.dumps(expected, indent=2, sort_keys=True) + "\n"
        with safetensors.safe_open(
            tmp_path / "model-00001-of-00003.safetensors", "pt"
        ) as f:
            assert f.metadata() == {"format": "pt"}


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [
        *((1000, 1000), ("1000", 1000), ("1KB", 1000), ("1 kb", 1000), ("1KiB", 1024)),
        *(
            ("0.5MB", 500_000),
            (" 2GB ", 2 * 10**9),
            ("1TiB", 2**40),
            ("1G", 2**30),
            (np.int64(7), 7),
        ),
    ],
)
def test_shard_sizes_are_parsed(size, nbytes):
    """Like everywhere in nvmeio, except that Hugging Face's "GB" is decimal."""
    assert size_of("max_shard_size", size, 1, decimal=True) == nbytes


def test_targets_that_overlap_in_part_are_refused(tmp_path):
    save_sharded({"a": np.ones(4), "b": np.zeros(4)}, tmp_path)
    memory = np.full(8, 7.0)
    out = {"a": memory[:4], "b": memory[2:6]}
    with pytest.raises(ValueError, match="share memory"):
        load_sharded(tmp_path, framework="np", out=out)
    assert (memory == 7).all()


def test_a_unit_without_b_is_binary_as_everywhere(tmp_path):
    tensors = tensors_of([1, 1])
    assert size_of("memory", "1GB", 1) == size("1GB") == size("1G") == 2**30
    assert save_sharded(tensors, tmp_path, "1G") == ["model.safetensors"]


def test_a_model_is_saved_at_once_within_an_atomic_directory(tmp_path, monkeypatch):
    """Which has locked its folder, as a save does that renames its files."""
    monkeypatch.chdir(tmp_path)
    tensors = {name: torch.arange(4) for name in "ab"}
    with (
        monkeypatch.context() as patch,
        nvmeio.checkpoint.atomic_directory("model") as folder,
    ):
        patch.setattr(turns.time, "sleep", lambda _: pytest.fail("it waits"))
        save_sharded(tensors, folder, 32)
        writer = HuggingFaceStorageWriter(folder, {"a": 1, "b": 2})
        checkpoint.save(dict(tensors), storage_writer=writer, no_dist=True)
        os.chdir(folder)
        save_sharded(tensors, ".", 32)
        os.chdir(tmp_path)
    assert load_sharded("model").keys() == tensors.keys()


def test_an_index_with_a_name_twice_is_refused(tmp_path):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text('{"weight_map": {"a": "1.safetensors", "a": "2.safetensors"}}')
    with pytest.raises(SafetensorError, match="'a' comes twice"):
        load_sharded(path)


@pytest.mark.parametrize(
    "size", [0, -1, "", "0", "0.1", "GB", "1 XB", "1e3", "nan", None, 1.5, True, b"1KB"]
)
def test_invalid_shard_sizes_are_refused(tmp_path, size):
    with pytest.raises((ValueError, TypeError), match="max_shard_size"):
        save_sharded(tensors_of([1]), tmp_path, size)
    assert os.listdir(tmp_path) == []


def test_a_url_is_not_taken_for_a_local_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="folder is 's3://bucket/model', a URL"):
        save_sharded({"a": np.ones(3)}, "s3://bucket/model")
    assert os.listdir(tmp_path) == []


class TestRefused:
    """A fault in one shard leaves the whole old model."""

    OLD = {"a": 1.0, "b": 2.0, "c": 3.0}  # noqa: RUF012

    def values(self, folder):
        return {name: tensor[0, 0].item() for name, tensor in load_sharded(folder).items()}

    def old(self, folder):
        tensors = {n: torch.full((20, 50), value) for n, value in self.OLD.items()}
        save_sharded(tensors, folder, max_shard_size=4000)
        return {n: tensor + 100 for n, tensor in tensors.items()}

    @pytest.mark.parametrize(
        "last",
        [
            torch.ones(50, 20).t(),
            torch.ones(3, dtype=torch.complex128),
            torch.ones(3, device="meta"),
            "no tensor",
        ],
        ids=["not contiguous", "no dtype", "no data", "no tensor"],
    )
    def test_a_bad_tensor_of_the_last_file(self, tmp_path, last):
        new = self.old(tmp_path)
        names = sorted(os.listdir(tmp_path))
        with pytest.raises((ValueError, SafetensorError, NotImplementedError)):
            save_sharded(new | {"c": last}, tmp_path, max_shard_size=4000)
        assert self.values(tmp_path) == self.OLD
        assert sorted(os.listdir(tmp_path)) == names

    def test_interrupted_in_the_last_file(self, tmp_path):
        new, names = self.old(tmp_path), sorted(os.listdir(tmp_path))

        def progress(done, total):
            if done == total:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            save_sharded(new, tmp_path, max_shard_size=4000, progress=progress)
        assert self.values(tmp_path) == self.OLD
        assert sorted(os.listdir(tmp_path)) == names

    @pytest.mark.parametrize("number", [1, 2, 3])
    def test_interrupted_between_renames(self, tmp_path, monkeypatch, number):
        """The files are of both models then, so no library reads them as one."""
        new = self.old(tmp_path)
        replace, done = os.replace, []

        def interrupt(part, whole):
            if whole.endswith(".safetensors"):
                done.append(whole)
                if len(done) == number:
                    raise KeyboardInterrupt
            replace(part, whole)

        monkeypatch.setattr(os, "replace", interrupt)
        with pytest.raises(KeyboardInterrupt):
            save_sharded(new, tmp_path, max_shard_size=4000)
        monkeypatch.undo()
        if number == 1:
            assert self.values(tmp_path) == self.OLD
        else:
            with pytest.raises(SafetensorError, match="may be of two models"):
                load_sharded(tmp_path)
            with pytest.raises(ValueError, match="Expecting value"):
                json.loads((tmp_path / INDEX).read_bytes())
        save_sharded(new, tmp_path, max_shard_size=4000)
        assert bits(load_sharded(tmp_path)) == bits(new)

    @pytest.mark.parametrize("indexed", [True, False])
    def test_interrupted_before_the_first_rename(self, tmp_path, monkeypatch, indexed):
        """Such as while the folder is synced: no file was replaced."""
        new = self.old(tmp_path)
        if not indexed:
            os.unlink(tmp_path / INDEX)
        before = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
        replace, done = replacing.replace_file, []

        def interrupted(*args, **options):
            replace(*args, **options)
            if not done:
                done.append(args)
                raise KeyboardInterrupt

        monkeypatch.setattr(replacing, "replace_file", interrupted)
        with pytest.raises(KeyboardInterrupt):
            save_sharded(new, tmp_path, max_shard_size=4000)
        assert {n: (tmp_path / n).read_bytes() for n in os.listdir(tmp_path)} == before

    def test_files_that_another_save_left_do_not_end_the_old_model(
        self, tmp_path, monkeypatch
    ):
        """The old one has other names, and stays whole until the index is replaced."""
        new = self.old(tmp_path)
        for number in (1, 2):
            left = tmp_path / f"model-0000{number}-of-00002.safetensors"
            left.write_bytes(b"left by a save that was killed")
        replace, done = os.replace, []

        def interrupt(part, whole):
            if done:
                raise KeyboardInterrupt
            done.append(whole)
            replace(part, whole)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", interrupt)
            with pytest.raises(KeyboardInterrupt):
                save_sharded(new, tmp_path, max_shard_size=8000)
        assert done == [os.fspath(tmp_path / "model-00002-of-00002.safetensors")]
        assert self.values(tmp_path) == self.OLD
        save_sharded(new, tmp_path, max_shard_size=8000)
        assert bits(load_sharded(tmp_path)) == bits(new)

    @pytest.mark.parametrize("links", [False, True])
    def test_interrupted_between_renames_of_links(self, tmp_path, monkeypatch, links):
        """A link is the same file afterwards, but what it leads to is not."""
        new = self.old(tmp_path)
        if links:
            (tmp_path / "blobs").mkdir()
            for name in [each for each in os.listdir(tmp_path) if each != "blobs"]:
                os.rename(tmp_path / name, tmp_path / "blobs" / name)
                os.symlink(tmp_path / "blobs" / name, tmp_path / name)
        replace, done = os.replace, []

        def interrupt(part, whole):
            if whole.endswith(".safetensors"):
                if done:
                    raise KeyboardInterrupt
                done.append(whole)
            replace(part, whole)

        monkeypatch.setattr(os, "replace", interrupt)
        with pytest.raises(KeyboardInterrupt):
            save_sharded(new, tmp_path, max_shard_size=4000)
        monkeypatch.undo()
        with pytest.raises(SafetensorError, match="may be of two models"):
            load_sharded(tmp_path)
        reader = HuggingFaceStorageReader(tmp_path)
        with pytest.raises(CheckpointException, match="may be of two models"):
            checkpoint.load(dict(new), storage_reader=reader, no_dist=True)

    @pytest.mark.parametrize("remembers", [False, True])
    def test_saved_anew_between_two_opens(self, tmp_path, monkeypatch, remembers):
        """Also if this host remembers what the index is like, as NFS does."""
        new = self.old(tmp_path)
        opened, done, known, stat = _sharded.file_at, [], {}, os.stat

        def remembered(path, *args, **options):
            found = stat(path, *args, **options)
            return known.setdefault(path, found) if str(path).endswith(INDEX) else found

        if remembers:
            monkeypatch.setattr(os, "stat", remembered)
            monkeypatch.setattr(replacing, "ask_anew", lambda path: known.pop(path, None))

        def save_between(*args):
            if len(done) == 1:
                save_sharded(new, tmp_path, max_shard_size=4000)
            done.append(args)
            return opened(*args)

        monkeypatch.setattr(_sharded, "file_at", save_between)
        with pytest.raises(SafetensorError, match="may be of two models"):
            load_sharded(tmp_path)
        assert bits(load_sharded(tmp_path)) == bits(new)

    def test_a_single_file_saved_anew_between_two_opens(self, tmp_path, monkeypatch):
        """The tensors that only the new one has would be missing."""
        old = {name: np.zeros(9) for name in "ab"}
        new = {name: np.ones(9) for name in "abcd"}
        save_sharded(old, tmp_path)
        places_of = _sharded.places_of

        def save_after(path):
            found = places_of(path)
            save_sharded(new, tmp_path)
            return found

        with monkeypatch.context() as patch:
            patch.setattr(_sharded, "places_of", save_after)
            with pytest.raises(SafetensorError, match="was replaced while"):
                load_sharded(tmp_path, framework="np")
        assert bits(load_sharded(tmp_path, framework="np")) == bits(new)

    def test_two_saves_at_once(self, tmp_path, monkeypatch):
        """The files of the second get their names after those of the first."""
        new = self.old(tmp_path)
        replace, second = os.replace, []

        def save_between(part, whole):
            if not second and whole.endswith(".safetensors"):
                second.append(
                    threading.Thread(target=save_sharded, args=(new, tmp_path, 4000))
                )
                replace(part, whole)
                monkeypatch.setattr(turns.time, "sleep", noting)
                second[0].start()
                assert waits.wait(60)
            else:
                replace(part, whole)

        waits, sleep = threading.Event(), time.sleep

        def noting(seconds):
            waits.set()
            sleep(seconds)

        monkeypatch.setattr(os, "replace", save_between)
        third = {name: tensor + 100 for name, tensor in new.items()}
        save_sharded(third, tmp_path, max_shard_size=4000)
        second[0].join()
        assert bits(load_sharded(tmp_path)) == bits(new)

    def test_where_there_are_no_locks_nothing_is_left(self, tmp_path, monkeypatch):
        new = self.old(tmp_path)
        names = sorted(os.listdir(tmp_path))

        def refuse(*args):
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        with monkeypatch.context() as patch:
            patch.setattr(locks.fcntl, "flock", refuse)
            save_sharded(new, tmp_path, max_shard_size=4000)
        assert bits(load_sharded(tmp_path)) == bits(new)
        assert sorted(os.listdir(tmp_path)) == names

    def test_more_files_than_descriptors_are_refused(self, tmp_path):
        new = self.old(tmp_path)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        few = len(os.listdir("/proc/self/fd")) + 10
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, limits[1]))
        try:
            with pytest.raises(OSError, match="14 descriptors are needed") as caught:
                save_sharded(new, tmp_path, max_shard_size=4000)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert caught.value.errno == errno.EMFILE
        assert self.values(tmp_path) == self.OLD


def test_a_model_has_more_files_than_are_opened_together(tmp_path, monkeypatch):
    monkeypatch.setattr(_sharded, "FILES_MAX", 3)
    tensors = tensors_of([1] * 10)
    save_sharded(tensors, tmp_path, 1000)
    said = []
    found = load_sharded(tmp_path, progress=lambda *numbers: said.append(numbers))
    assert bits(found) == bits(tensors)
    # Progress over all files, not only over those that are open together.
    assert said == sorted(said)
    assert {total for _, total in said} == {10_000} == {said[-1][0]}
    os.truncate(tmp_path / "model-00009-of-00010.safetensors", 200)
    moved = Moved()
    with pytest.raises(SafetensorError, match=r"model-00009-of-00010\.safetensors: Error"):
        load_sharded(tmp_path)
    assert moved.direct == moved.buffered == 0


def test_of_more_files_than_are_opened_together_no_mixture_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(_sharded, "FILES_MAX", 3)
    old, new = (
        {f"t{number}": np.full(1000, number + of, np.uint8) for number in range(10)}
        for of in (0, 100)
    )
    save_sharded(old, tmp_path, 1000)
    for name in os.listdir(tmp_path):
        # So that the times differ, however coarse they are.
        os.utime(tmp_path / name, (0, 0))
    saved = []

    def replace(done: int, total: int) -> None:
        # When the first of them are read.
        if not saved:
            saved.append(save_sharded(new, tmp_path, 1000))

    words = r"model-00004-of-00010\.safetensors has changed while it was read"
    with pytest.raises(SafetensorError, match=words):
        load_sharded(tmp_path, framework="np", progress=replace)
    assert saved
    assert bits(load_sharded(tmp_path, framework="np")) == bits(new)


def test_out_of_more_files_than_are_opened_together_is_refused_before_it_changes(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(_sharded, "FILES_MAX", 1)
    save_sharded({name: np.ones(5000, np.uint8) for name in "abc"}, tmp_path, 5000)
    kept = np.zeros(5000, np.uint8)
    other = np.zeros(4999, np.uint8)
    for last, words in ((other, r"out\['c'\] has the dtype"), (kept, "share memory")):
        out = {"a": kept, "b": np.zeros(5000, np.uint8), "c": last}
        with pytest.raises(ValueError, match=words):
            load_sharded(tmp_path, out=out, framework="np")
        assert not kept.any()


def test_a_single_model_file_is_accepted_and_is_no_index(tmp_path):
    tensors = tensors_of([300])
    save_sharded(tensors, tmp_path)
    assert bits(load_sharded(tmp_path / "model.safetensors")) == bits(tensors)
    os.rename(tmp_path / "model.safetensors", tmp_path / INDEX)
    with pytest.raises(SafetensorError) as refused:
        load_sharded(tmp_path / INDEX)
    words = "is not the index of a model: it is not text"
    assert str(refused.value) == f"{tmp_path / INDEX} {words}"
    with open(tmp_path / INDEX, "r+b") as file:
        file.truncate(200 << 20)
    with pytest.raises(SafetensorError, match="it has 209715200 bytes, and 100000000 is"):
        load_sharded(tmp_path / INDEX)


def test_out_is_refused_before_any_of_it_changes(tmp_path):
    arrays = {name: np.ones(5000, np.uint8) for name in "abc"}
    save_sharded(arrays, tmp_path, max_shard_size=5000)
    kept = np.zeros(5000, np.uint8)
    locked = np.zeros(5000, np.uint8)
    locked.flags.writeable = False
    for other, words in ((locked, "out['c'] cannot be filled"), (kept, "share memory")):
        out = {"a": kept, "b": np.zeros(5000, np.uint8), "c": other}
        with pytest.raises(ValueError, match=re.escape(words)):
            load_sharded(tmp_path, out=out, framework="np")
        assert not kept.any()
    out = {name: np.zeros(5000, np.uint8) for name in "abc"}
    found = load_sharded(tmp_path, out=out, framework="np")
    assert all(found[name] is out[name] for name in out)


class TestReplacing:
    """A model replaces another one."""

    def test_files_of_the_old_model_are_removed_and_others_stay(self, tmp_path):
        for name in (
            "config.json",
            "model.safetensors.bak",
            "other.safetensors",
            "model.bin",
        ):
            (tmp_path / name).write_text(name)
        others = set(os.listdir(tmp_path))
        for sizes in ([6] * 5, [6] * 3, [1], [6] * 2, [1]):
            names = save_sharded(tensors_of(sizes), tmp_path, 6000)
            assert set(os.listdir(tmp_path)) == others | set(names)
            (tmp_path / "other.safetensors").unlink()
            assert bits(load_sharded(tmp_path)) == bits(tensors_of(sizes))
            (tmp_path / "other.safetensors").write_text("other.safetensors")

    def test_a_refused_save_leaves_the_old_model(self, tmp_path):
        save_sharded(tensors_of([6] * 3), tmp_path, 6000)
        before = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
        base = torch.ones(4)
        for tensors in ({"a": base, "b": base}, {"a": 1}, {"a": base, "b": np.ones(3)}):
            # Tensors that share memory would be in two files.
            for limit in ("50GB", base.nbytes):
                with pytest.raises((RuntimeError, ValueError, AttributeError)):
                    save_sharded(tensors, tmp_path, limit)
        assert {n: (tmp_path / n).read_bytes() for n in os.listdir(tmp_path)} == before

    def test_a_copy_by_hard_links_keeps_the_old_model(self, tmp_path):
        save_sharded(tensors_of([6] * 2), tmp_path / "model", 6000)
        shutil.copytree(tmp_path / "model", tmp_path / "copy", copy_function=os.link)
        save_sharded(tensors_of([6] * 3), tmp_path / "model", 6000)
        for folder, files in (("model", 3), ("copy", 2)):
            assert bits(load_sharded(tmp_path / folder)) == bits(tensors_of([6] * files))

    def test_an_old_index_is_durably_removed_before_its_files(self, tmp_path, monkeypatch):
        save_sharded(tensors_of([6] * 2), tmp_path, 6000)
        unlink, sync, said = os.unlink, os.fsync, []

        def noted(path):
            # It has left its name.
            if (name := os.path.basename(path)).endswith(".nvmeio-old"):
                said.append(final_name(name))
            unlink(path)

        monkeypatch.setattr(os, "unlink", noted)
        monkeypatch.setattr(
            os, "fsync", lambda descriptor: (said.append("synced"), sync(descriptor))
        )
        save_sharded(tensors_of([1]), tmp_path, sync=False)
        assert said[:2] == [INDEX, "synced"]
        files = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
        assert said[2:] == files

    @pytest.mark.parametrize("sync", [True, False])
    def test_the_name_of_a_new_folder_is_durable(self, tmp_path, monkeypatch, sync):
        synced, fsync = [], os.fsync

        def noting(descriptor):
            synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
            fsync(descriptor)

        monkeypatch.setattr(os, "fsync", noting)
        monkeypatch.chdir(tmp_path)
        save_sharded(tensors_of([6]), "new/folder", sync=sync)
        folders = {str(tmp_path), str(tmp_path / "new"), str(tmp_path / "new/folder")}
        assert (folders <= set(synced)) == sync

    def test_progress_rises_over_all_files(self, tmp_path):
        told = []
        save_sharded(
            tensors_of([9000] * 4),
            tmp_path,
            "10MB",
            progress=lambda *pair: told.append(pair),
        )
        assert [done for done, _ in told] == sorted(done for done, _ in told)
        assert told[-1] == (36_000_000, 36_000_000)

    def test_arrays_are_saved_as_arrays(self, tmp_path):
        arrays = {f"{n}": np.arange(1000 * n).reshape(2, -1).T for n in range(1, 5)}
        save_sharded(arrays, tmp_path, 16_000)
        found = load_sharded(tmp_path, framework="np")
        assert found.keys() == arrays.keys()
        assert all(np.array_equal(found[name], arrays[name]) for name in arrays)
        with safetensors.safe_open(next(tmp_path.glob("*s")), "np") as file:
            assert file.metadata() == {"format": "np"}

    def test_an_empty_model_is_one_file(self, tmp_path):
        assert save_sharded({}, tmp_path / "new" / "folder") == ["model.safetensors"]
        assert load_sharded(tmp_path / "new" / "folder") == {}


@pytest.mark.parametrize("sizes", [("8KB", "5GB"), ("5GB", "8KB")])
def test_files_of_the_old_model_do_not_come_back_after_a_power_failure(
    tmp_path, monkeypatch, sizes
):
    tensors = {name: np.arange(1000) for name in ("first", "second")}
    save_sharded(tensors, tmp_path, sizes[0])
    calls, fsync, unlink = [], os.fsync, os.unlink

    def noting(path):
        # It has left its name.
        if (final_name(os.path.basename(path)) or "").endswith(".safetensors"):
            calls.append("unlink")
        unlink(path)

    monkeypatch.setattr(os, "unlink", noting)
    monkeypatch.setattr(
        os,
        "fsync",
        lambda fd: calls.append(os.readlink(f"/proc/self/fd/{fd}")) or fsync(fd),
    )
    save_sharded(tensors, tmp_path, sizes[1])
    assert "unlink" in calls
    assert calls[-1] == str(tmp_path)


COARSE = {
    "load_sharded": (2, lambda folder, _: load_sharded(folder)),
    "disk_offload": (
        2,
        lambda folder, state: nvmeio.torch.disk_offload(
            torch.nn.ParameterDict(state), folder, memory="1MiB"
        ),
    ),
    "dcp, headers": (2, lambda folder, state: load_by_dcp(folder, state)),
    "dcp, tensors": (5, lambda folder, state: load_by_dcp(folder, state)),
    "drain": (1, lambda folder, _: nvmeio.checkpoint.drain(folder, f"{folder}-2").result()),
}


def load_by_dcp(folder, state):
    checkpoint.load(
        dict(state), storage_reader=HuggingFaceStorageReader(folder), no_dist=True
    )


@pytest.mark.parametrize("way", COARSE)
@pytest.mark.parametrize("times", ["in seconds", "in seconds, behind", "of writing"])
def test_a_model_saved_anew_is_noticed_where_its_files_have_the_old_times(
    tmp_path, monkeypatch, way, times
):
    """The files of both saves have one size, too.

    A server's clock is behind this one, or the files were written before, at one time.
    """
    number, read = COARSE[way]
    folder, opened = tmp_path / "model", []

    def put(value):
        state = {name: torch.full((1000,), value) for name in "abcd"}
        save_sharded(state, folder, 4000)
        second = int(time.time()) * 1_000_000_000
        if times == "in seconds, behind":
            second -= 9_000_000_000
        if times == "of writing":
            second = written
        for path in folder.iterdir():
            if times != "of writing" or path.name != INDEX:
                os.utime(path, ns=(second, second))
        return state

    def noting(function):
        def call(*args, **options):
            found = function(*args, **options)
            opened.append(args)
            if len(opened) == number:
                put(2.0)
            return found

        return call

    written = time.time_ns() - 3_000_000_001
    while time.time() % 1 > 0.2:
        time.sleep(0.01)
    state = put(1.0)
    with monkeypatch.context() as patch:
        if way == "drain":
            patch.setattr(_draining, "pieces_of", noting(_draining.pieces_of))
        else:
            patch.setattr(ModelFile, "__init__", noting(ModelFile.__init__))
        errors = SafetensorError, CheckpointException, nvmeio.checkpoint.CheckpointError
        with pytest.raises(errors, match=r"was replaced while|has changed while"):
            read(folder, state)
    assert len(opened) >= number


@pytest.mark.parametrize("there", ["an older copy", "files of one that failed"])
@pytest.mark.parametrize("far", ["folder", "store"])
def test_a_copy_that_fails_in_the_middle_is_no_mixture(tmp_path, monkeypatch, there, far):
    """HuggingFaceStorageReader needs no index."""
    source, target = tmp_path / "model", tmp_path / "copy"
    url = target if far == "folder" else f"local://{target}"
    old, new = ({n: torch.full((1000,), v) for n in "abcd"} for v in (1.0, 2.0))
    save_sharded(old, source, 4000)
    shutil.copytree(source, target)
    if there != "an older copy":
        (target / INDEX).unlink()
        (target / "model-00003-of-00004.safetensors").unlink()
        (target / "model-00004-of-00004.safetensors").unlink()
    save_sharded(new, source, 4000)
    copy, failed = _draining.Drain._copy_once, []

    def failing(self, name):
        if name == "model-00001-of-00004.safetensors":
            failed.append(name)
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)
        copy(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(_draining, "FILES", 1)
        patch.setattr(_draining.Drain, "_next", in_order("2341"))
        patch.setattr(_draining.Drain, "_copy_once", failing)
        with pytest.raises(PermissionError):
            nvmeio.checkpoint.drain(source, url).result()
    assert failed
    for read in (load_sharded, lambda folder: load_by_dcp(folder, dict(old))):
        with pytest.raises((SafetensorError, CheckpointException), match="two models"):
            read(target)
    nvmeio.checkpoint.drain(source, url).result()
    assert bits(load_sharded(target)) == bits(new)


@pytest.mark.parametrize("at", ["model-00001-of-00004.safetensors", INDEX])
@pytest.mark.parametrize("way", ["save_sharded", "dcp"])
@pytest.mark.parametrize("options", [{}, {"last": []}], ids=str)
def test_a_save_beside_a_drain_is_no_mixture(tmp_path, monkeypatch, way, at, options):
    """Here the save waits, no longer than it may; then the drain does."""
    source, target = tmp_path / "model", tmp_path / "copy"
    states = [{n: torch.full((1000,), v) for n in "abcd"} for v in (1.0, 2.0, 3.0)]
    save_sharded(states[0], target, 4000)
    save_sharded(states[1], source, 4000)
    monkeypatch.setattr(turns, "PATIENCE_S", 0)
    copy, tried = _draining.Drain._copy_once, []

    def put():
        if way == "save_sharded":
            save_sharded(states[2], target, 4000)
        else:
            mapping = {name: number for number, name in enumerate("abcd", 1)}
            writer = HuggingFaceStorageWriter(target, fqn_to_index_mapping=mapping)
            checkpoint.save(dict(states[2]), storage_writer=writer, no_dist=True)

    def beside(self, name):
        if name == at:
            with pytest.raises((FileExistsError, CheckpointException), match="names its"):
                put()
            tried.append(name)
        copy(self, name)

    holding, tries = _places.Folder.holding, []

    def counted(self, name, *args):
        tries.append(name)
        return holding(self, name, *args)

    with turns.alone_in(target), monkeypatch.context() as patch:
        patch.setattr(_places.Folder, "holding", counted)
        with pytest.raises(FileExistsError, match="names its files"):
            nvmeio.checkpoint.drain(source, target, **options).result()
    # Not each thread waits.
    assert tries == [INDEX]
    assert bits(load_sharded(target)) == bits(states[0])
    with monkeypatch.context() as patch:
        patch.setattr(_draining.Drain, "_copy_once", beside)
        nvmeio.checkpoint.drain(source, target, **options).result()
    assert tried == [at]
    assert bits(load_sharded(target)) == bits(states[1])
    put()
    assert bits(load_sharded(target)) == bits(states[2])
    assert not [name for name in os.listdir(target) if name.startswith(".")]


def test_a_save_of_parts_that_began_before_a_drain_fails(tmp_path, monkeypatch):
    """On another host, whose processes cannot be seen here."""
    source, target = tmp_path / "model", tmp_path / "copy"
    new, other = ({n: torch.full((9,), v) for n in "ab"} for v in (1.0, 2.0))
    save_sharded(new, source, 40)

    class Late(HuggingFaceStorageWriter):
        def finish(self, **results):
            with monkeypatch.context() as patch:
                become_host(patch, "another")
                nvmeio.checkpoint.drain(source, target).result()
            super().finish(**results)

    writer = Late(target, fqn_to_index_mapping={"a": 1, "b": 2})
    with pytest.raises(CheckpointException, match="another save to this folder has begun"):
        checkpoint.save(other, storage_writer=writer, no_dist=True)
    assert bits(load_sharded(target)) == bits(new)


def test_a_drain_that_waits_for_a_save_can_be_cancelled(tmp_path, monkeypatch):
    source, target = tmp_path / "model", tmp_path / "copy"
    save_sharded(tensors_of([1] * 2), source, 1000)
    target.mkdir()
    waits, over, report = threading.Event(), threading.Event(), _draining.Drain._report
    pause = _draining.Drain._pause

    def waiting(self, seconds):
        waits.set()
        pause(self, seconds)

    def reported(self):
        report(self)
        over.set()

    monkeypatch.setattr(_draining.Drain, "_pause", waiting)
    monkeypatch.setattr(_draining.Drain, "_report", reported)
    monkeypatch.setattr(turns, "PATIENCE_S", 600)
    with turns.alone_in(target):
        copying = nvmeio.checkpoint.drain(source, target)
        assert waits.wait(60)
        assert copying.cancel()
        assert over.wait(60)


def in_order(numbers):
    """A method that takes the files of a model in this order, and none after the last."""
    left = [f"model-0000{number}-of-00004.safetensors" for number in numbers]

    def following(self):
        return left.pop(0) if left else None

    return following


@pytest.mark.parametrize("way", ["sharded", "dcp"])
def test_an_index_that_could_not_be_read_is_refused_at_the_save(tmp_path, monkeypatch, way):
    monkeypatch.setattr(replacing, "INDEX_BYTES_MAX", 300)
    tensors = {name: torch.ones(10) for name in "ab"}
    save_sharded(tensors, tmp_path, 40)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    more = tensors | {name * 50: torch.ones(10) for name in "cd"}
    writer = HuggingFaceStorageWriter(tmp_path, {name: i for i, name in enumerate(more, 1)})
    save = {
        "sharded": lambda: save_sharded(more, tmp_path, 40),
        "dcp": lambda: checkpoint.save(more, storage_writer=writer, no_dist=True),
    }[way]
    with pytest.raises((ValueError, CheckpointException), match="and 300 is the limit"):
        save()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("at", ["write", "lock"])
def test_an_error_names_the_file_that_it_is_of(tmp_path, monkeypatch, at):
    """Not another one of the model."""
    put, done = writing.write, []

    def failing(*args):
        done.append(args)
        if len(done) == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        put(*args)

    with ExitStack() as stack:
        if at == "lock":
            stack.enter_context(turns.alone_in(tmp_path))
            monkeypatch.setattr(turns, "PATIENCE_S", 0)
        else:
            monkeypatch.setattr(writing, "write", failing)
        with pytest.raises(OSError, match=r"save of a model|Input/output") as caught:
            save_sharded(tensors_of([1] * 3), tmp_path, 1000)
    of = {"lock": ".nvmeio-save", "write": "model-00002-of-00003.safetensors"}
    assert os.path.basename(caught.value.filename) == of[at]


@pytest.mark.parametrize("way", ["load", "claim"])
def test_ctrl_c_after_any_call_leaves_no_descriptor(tmp_path, way):
    save_sharded(tensors_of([1] * 2), tmp_path, 1000)

    def claim():
        taken = Claim(os.fspath(tmp_path / INDEX))
        try:
            taken.publish(b"{}", sync=False)
        finally:
            taken.remove()

    call = {"load": lambda: load_sharded(tmp_path), "claim": claim}[way]

    def open_now():
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    load_sharded(tmp_path)
    before = open_now()
    assert len(list(interrupted_after_each_call(call))) > 50
    assert open_now() == before


@pytest.mark.parametrize("links", ["counted", "not counted"])
def test_a_save_takes_no_lock_whose_file_another_host_has_removed(
    tmp_path, monkeypatch, links
):
    """NFS remembers its name, under which there may be that of a third save."""
    first, lock, fstat = ExitStack(), locks._flock, os.fstat
    taken = []

    def late(descriptor, doing):
        first.close()
        lock(descriptor, doing)
        taken.append(fstat(descriptor).st_ino)

    def uncounted(descriptor):
        """As file systems in user space that leave it 0."""
        found = [*fstat(descriptor)]
        found[3] = 0
        return os.stat_result(found)

    first.enter_context(turns.alone_in(tmp_path))
    monkeypatch.setattr(paths, "_made", {})
    monkeypatch.setattr(locks, "_flock", late)
    monkeypatch.setattr(
        locks.WriterLock, "has_name", property(lambda self: self.descriptor >= 0)
    )
    if links == "not counted":
        monkeypatch.setattr(os, "fstat", uncounted)
        first.close()
    with turns.alone_in(tmp_path):
        (name,) = os.listdir(tmp_path)
        assert os.stat(tmp_path / name).st_ino == taken[-1]
    assert not os.listdir(tmp_path)


class TestIndex:
    """Valid and invalid indices."""

    def folder(self, tmp_path, **places):
        """A function that writes files of one tensor each, and an index of them."""
        for number, name in enumerate(["a", "b", "c"]):
            path = tmp_path / "folder" / f"{name}.safetensors"
            path.parent.mkdir(exist_ok=True)
            safetensors.numpy.save_file({name: np.full(9, number)}, path)
        safetensors.numpy.save_file({"out": np.ones(3)}, tmp_path / "out.safetensors")
        places = {name: f"{name}.safetensors" for name in "abc"} | places
        index = {"metadata": {}, "weight_map": places}
        (tmp_path / "folder" / INDEX).write_text(json.dumps(index))
        return tmp_path / "folder"

    @pytest.mark.parametrize(
        "place",
        [
            *("../out.safetensors", "/etc/passwd", "x/../../out.safetensors", "..", ""),
            *("./a.safetensors", "a//b", "a.safetensors/", "a\0b", None, 3, ["a"]),
        ],
        ids=str,
    )
    def test_a_path_outside_of_the_folder_is_refused(self, tmp_path, place):
        folder = self.folder(tmp_path, out=place)
        for names in (None, ["a"]):
            with pytest.raises(SafetensorError, match=r"tensor out is in .*in the folder"):
                load_sharded(folder, names=names)

    @pytest.mark.parametrize(
        "text",
        [
            *(b"", b"[]", b"3", b"{}", b"{", b"\xef\xbb\xbf{}", b"[" * 100_000),
            *(b'{"weight_map": []}', b'{"weight_map": 3}', b'{"weight_map": null}'),
            b'{"weight_map": {"\xff": "a"}}',
        ],
        ids=lambda text: str(text[:20]),
    )
    def test_an_invalid_index_is_refused(self, tmp_path, text):
        (tmp_path / INDEX).write_bytes(text)
        with pytest.raises(SafetensorError, match=re.escape(str(tmp_path / INDEX))):
            load_sharded(tmp_path)

    def test_folders_index_paths_and_links_are_accepted(self, tmp_path, monkeypatch):
        folder = self.folder(tmp_path)
        (tmp_path / "blob").write_bytes((folder / "b.safetensors").read_bytes())
        (folder / "b.safetensors").unlink()
        (folder / "b.safetensors").symlink_to("../blob")
        monkeypatch.chdir(folder)
        for place in (
            folder,
            folder / INDEX,
            str(folder),
            ".",
            INDEX,
            f"../folder/{INDEX}",
        ):
            found = load_sharded(place, framework="np")
            assert {name: int(array[0]) for name, array in found.items()} == {
                "a": 0,
                "b": 1,
                "c": 2,
            }

    def test_missing_tensors_are_named(self, tmp_path):
        folder = self.folder(tmp_path, none="a.safetensors", gone="gone.safetensors")
        for options, error, words in (
            ({"names": ["a", "x"]}, SafetensorError, "does not contain tensor x"),
            ({"slices": {"x": 0}}, SafetensorError, "does not contain tensor x"),
            ({"names": ["a"], "slices": {"b": 0}}, ValueError, "slices has 'b'"),
            ({"names": ["none"]}, SafetensorError, "does not contain tensor none"),
            ({"names": ["gone"]}, FileNotFoundError, "gone.safetensors"),
            ({"names": "abc"}, TypeError, "iterable of names"),
            ({"names": 5}, TypeError, "names is 5; it must be an iterable of names"),
            ({"out": [torch.ones(1)]}, TypeError, "out is of type list; it must be a dict"),
            (
                {"names": ["a"], "framework": "tf"},
                SafetensorError,
                "framework tf is invalid",
            ),
        ):
            with pytest.raises(error, match=words):
                load_sharded(folder, **{"framework": "np", **options})
        assert load_sharded(folder, names=[], framework="np") == {}

    def test_a_folder_with_one_file_needs_no_index(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="0 and 0"):
            load_sharded(tmp_path)
        safetensors.numpy.save_file({"a": np.ones(3)}, tmp_path / "any.safetensors")
        assert list(load_sharded(tmp_path)) == ["a"]
        safetensors.numpy.save_file({"b": np.ones(3)}, tmp_path / "two.safetensors")
        with pytest.raises(FileNotFoundError, match="0 and 2") as caught:
            load_sharded(tmp_path)
        assert str(caught.value.filename) == str(tmp_path)

    def test_a_single_file_comes_before_an_index_of_other_files(self, tmp_path):
        """As in repositories that also have consolidated files."""
        save_sharded({"a": np.zeros(9), "b": np.zeros(9)}, tmp_path, 80)
        for path in sorted(tmp_path.iterdir()):
            text = path.read_bytes()
            path.unlink()
            name = path.name.replace("model", "consolidated", 1)
            if path.suffix == ".json":
                text = text.replace(b"model-", b"consolidated-")
            (tmp_path / name).write_bytes(text)
        assert set(load_sharded(tmp_path, framework="np")["a"]) == {0.0}
        save_sharded({"a": np.ones(9)}, tmp_path)
        assert set(load_sharded(tmp_path, framework="np")["a"]) == {1.0}
        # Or of another model, which transformers would not take either.
        save_sharded({"a": np.zeros(9), "b": np.zeros(9)}, tmp_path, 80)
        safetensors.numpy.save_file({"a": np.ones(9)}, tmp_path / "model.safetensors")
        found = load_sharded(tmp_path, framework="np")
        assert {name: set(value) for name, value in found.items()} == {"a": {1.0}}

    def test_one_of_several_files_is_no_model(self, tmp_path):
        """The save, or the copy, was killed after its first file."""
        names = save_sharded({"a": np.ones(9), "b": np.ones(9)}, tmp_path / "new", 80)
        for name in (*names[1:], names[0]):
            (tmp_path / "new" / name).rename(tmp_path / name)
        with pytest.raises(FileNotFoundError, match="0 and 0"):
            load_sharded(tmp_path / "new", framework="np")
        (tmp_path / names[1]).rename(tmp_path / "new" / names[1])
        with pytest.raises(FileNotFoundError, match="is one of 2 files, and there is no"):
            load_sharded(tmp_path / "new", framework="np")
        found = load_sharded(tmp_path / "new" / names[1], framework="np")
        assert list(found) == ["b"]
        of_rank = tmp_path / "new" / "shard-00001-model-00001-of-00001.safetensors"
        (tmp_path / "new" / names[1]).rename(of_rank)
        with pytest.raises(FileNotFoundError, match="the file of one rank"):
            load_sharded(tmp_path / "new", framework="np")


class TestLoading:
    """All files are read by one submission."""

    @pytest.fixture
    def folder(self, tmp_path):
        need_direct(tmp_path)
        self.tensors = tensors_of([random.Random(1).randrange(900) for _ in range(80)])
        save_sharded(self.tensors, tmp_path, "3MB")
        for path in tmp_path.glob("*.safetensors"):
            drop(path)
        return tmp_path

    @pytest.mark.parametrize("direct", ["auto", True, False])
    def test_all_or_some_tensors_are_loaded(self, folder, default_engine, direct):
        moved = Moved()
        assert bits(load_sharded(folder, direct=direct)) == bits(self.tensors)
        assert moved.bounced == 0
        names = random.Random(2).sample(sorted(self.tensors), 20)
        found = load_sharded(folder, names=names, direct=direct)
        assert bits(found) == bits({name: self.tensors[name] for name in names})
        for tensor in found.values():
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert in_flight() == 0

    @pytest.mark.parametrize("direct", [True, False])
    def test_equal_offsets_in_two_files_are_not_merged(self, tmp_path, direct):
        """A read of one must not run on into the other file."""
        tensors = tensors_of([500] * 4)
        save_sharded(tensors, tmp_path, "1MB")
        for names in (["t00", "t03"], ["t02", "t01"]):
            found = load_sharded(tmp_path, names=names, direct=direct)
            assert bits(found) == bits({name: tensors[name] for name in names})

    def test_cached_files_come_from_the_page_cache(self, folder):
        first, *_ = sorted(folder.glob("*.safetensors"))
        first.read_bytes()
        size, moved = first.stat().st_size, Moved()
        assert bits(load_sharded(folder)) == bits(self.tensors)
        total = sum(tensor.nbytes for tensor in self.tensors.values())
        assert moved.buffered >= size - 10_000
        assert total - size - 1_000_000 <= moved.direct <= total - size + 10_000

    def test_a_rank_loads_its_slices(self, tmp_path, default_engine):
        tensors = {f"{n}": filled("bfloat16", (256, 2048), n) for n in range(8)}
        save_sharded(tensors, tmp_path, "3MB")
        ranks = 4
        for rank in range(ranks):
            rows, columns = (
                slice(rank * 64, rank * 64 + 64),
                slice(rank * 512, rank * 512 + 512),
            )
            slices = {n: rows if int(n) % 2 else (slice(None), columns) for n in tensors}
            found = load_sharded(tmp_path, slices=slices)
            assert bits(found) == bits({n: t[slices[n]] for n, t in tensors.items()})
            for part in found.values():
                assert part.is_contiguous()

    def test_targets_are_filled(self, folder):
        out = {name: torch.zeros_like(tensor) for name, tensor in self.tensors.items()}
        found = load_sharded(folder, out=out)
        assert bits(out) == bits(self.tensors)
        assert all(found[name].data_ptr() == out[name].data_ptr() for name in out)


def test_a_model_of_the_hubs_is_loaded(tmp_path):
    tensors = {f"{n}": filled("float16", (300, 1000), n) for n in range(9)}
    huggingface_hub.save_torch_state_dict(tensors, tmp_path, max_shard_size="1MB")
    assert bits(load_sharded(tmp_path)) == bits(tensors)
    out = {name: torch.zeros(300, 1000, dtype=torch.float16) for name in tensors}
    load_sharded(tmp_path, out=out, names=list(out)[::2])
    assert bits({n: out[n] for n in list(out)[::2]}) == bits(
        {n: tensors[n] for n in list(out)[::2]}
    )


def test_an_index_that_is_a_pipe_is_refused(tmp_path):
    """Opening it for reading would wait for a writer."""
    path = tmp_path / "model.safetensors.index.json"
    os.mkfifo(path)
    with pytest.raises(OSError, match="not a regular file"):
        load_sharded(path, framework="np")


@pytest.mark.parametrize("umask", [0o022, 0o000])
def test_nobody_else_can_ever_lock_a_model_in_a_folder_of_his_own(
    tmp_path, monkeypatch, umask
):
    """Neither the file of the lock nor the one that becomes it."""
    opened, before, modes = locks_of_folders.opened, os.umask(umask), []

    def looking(path, flags, mode=0o666):
        file = opened(path, flags, mode)
        modes.append(os.stat(path).st_mode & 0o777)
        return file

    tmp_path.chmod(0o755)
    monkeypatch.setattr(locks_of_folders, "opened", looking)
    try:
        save_sharded(tensors_of([1]), tmp_path)
    finally:
        os.umask(before)
    assert modes == [0o600]


@pytest.fixture
def remembered(tmp_path, monkeypatch):
    """Names that this host remembers as missing; only link(2) asks for one, as on FUSE."""
    hidden, link = tmp_path / "hidden", os.link
    hidden.mkdir()

    def asking(source, path, **options):
        if (there := hidden / os.path.basename(path)).exists():
            there.rename(path)
        link(source, path, **options)

    monkeypatch.setattr(os, "link", asking)
    return hidden


@pytest.mark.parametrize("failing_at", [1, 2])
def test_a_model_that_a_host_does_not_remember_is_replaced_as_one(
    tmp_path, monkeypatch, remembered, failing_at
):
    save_sharded(tensors_of([10, 10, 10]), remembered, 12_000)
    (remembered / INDEX).chmod(0o600)
    before = (remembered / INDEX).read_bytes()
    target = tmp_path / "model"
    target.mkdir()
    replace, renamed = os.replace, []

    def failing(path, to):
        if str(to).endswith(".safetensors"):
            renamed.append(to)
            if len(renamed) == failing_at:
                raise OSError(errno.EIO, "planted", to)
        replace(path, to)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(OSError, match="planted"):
        save_sharded(tensors_of([9, 9, 9]), target, 12_000)
    text = before if failing_at == 1 else replacing.REPLACING
    assert (target / INDEX).read_bytes() == text
    assert (target / INDEX).stat().st_mode & 0o777 == 0o600


def test_a_file_that_a_host_does_not_remember_is_loaded(tmp_path, remembered):
    safetensors.torch.save_file(tensors_of([1]), remembered / "one.safetensors")
    with closing(ModelFile(tmp_path / "one.safetensors")) as file:
        assert list(file.layout.by_name) == ["t00"]


def test_an_index_that_a_host_does_not_remember_says_that_files_are_replaced(
    tmp_path, remembered
):
    target, tensors = tmp_path / "model", tensors_of([9, 9])
    save_sharded(tensors, target, 12_000)
    (target / INDEX).unlink()
    (remembered / INDEX).write_bytes(replacing.REPLACING)
    with pytest.raises(CheckpointException, match="being replaced one by one"):
        load_by_dcp(target, tensors)
