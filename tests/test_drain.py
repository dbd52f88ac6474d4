"""nvmeio.checkpoint.drain: copying folders elsewhere, and copies of steps."""

import errno
import fcntl
import ftplib
import functools
import gc
import io
import itertools
import json
import logging
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

import numpy as np
import pytest

from children import Child, run_tool
from fuse_mounts import FAULTYFS, empty, fuse_refusal, served
from helpers import become_host, pattern
from mounts import overlay, unmount
from nvmeio._files import paths
from nvmeio._safetensors.places import REPLACING
from nvmeio.checkpoint import Checkpointer, CheckpointError, _draining, _places, drain
from nvmeio.checkpoint._restoring import Held

fsspec = pytest.importorskip("fsspec")

FILES = {
    ".metadata": b"what there is",
    "__0_0.distcp": pattern(9_000_001, 1),
    "__1_0.distcp": pattern(4 << 20, 2),
    "empty": b"",
    "below/further/one": b"x" * 5000,
}


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Drains do not pause between attempts."""
    monkeypatch.setattr(_draining, "PAUSE_S", 0)


@pytest.fixture
def source(tmp_path):
    """A folder of files."""
    folder = tmp_path / "source"
    for name, data in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


@pytest.fixture(params=["disk", "other file system", "file URL", "memory URL"])
def target(request, tmp_path):
    """The target, and a function that reads a file there, or returns None."""
    if request.param == "memory URL":
        system = fsspec.filesystem("memory")
        system.store.clear()
        yield (
            "memory://run/7",
            lambda: {
                name.removeprefix("/run/7/"): system.cat(name)
                for name in system.find("/run/7")
            },
        )
        system.store.clear()
        return
    other = request.param == "other file system"
    folder = request.getfixturevalue("tmpfs") if other else tmp_path
    folder = folder / "run" / "7"

    def content():
        return {
            os.path.relpath(os.path.join(top, name), folder): open(
                os.path.join(top, name), "rb"
            ).read()
            for top, _, names in os.walk(folder)
            for name in names
        }

    yield (f"file://{folder}" if request.param == "file URL" else folder), content
    shutil.rmtree(folder.parent)


class Watched:
    """A place that records the calls, and raises `failures` by name."""

    def __init__(self, place):
        self.place, self.done, self.failures = place, [], {}
        self.held = threading.Event()
        self.held.set()
        self.reached = threading.Event()

    def __getattr__(self, name):
        return getattr(self.place, name)

    def writing(self, name, mode):
        self.done.append(name)
        self.reached.set()
        self.held.wait()
        if self.failures.get(name):
            raise self.failures[name].pop(0)
        return self.place.writing(name, mode)


@pytest.fixture
def watched(monkeypatch):
    """The place of the next drain."""
    made = []

    def watch(target):
        made.append(Watched(_places.place_of(target)))
        return made[-1]

    monkeypatch.setattr(_draining, "place_of", watch)
    return made


@pytest.fixture
def drain_with(source, tmp_path, monkeypatch, watched):
    """Drain to a place with the given failures, or one that holds its first write."""

    def drain_with(failures=(), *, held=False):
        watch = _draining.place_of

        def prepared(target):
            place = watch(target)
            place.failures = dict(failures)
            if held:
                place.held.clear()
            return place

        with monkeypatch.context() as patch:
            patch.setattr(_draining, "place_of", prepared)
            return drain(source, tmp_path / "target")

    return drain_with


@pytest.fixture
def copies(monkeypatch):
    """Hold the copies of steps in folders, from the first file that ends with `ends` on."""
    writing = _places.Folder.writing

    class Copies:
        ends = ""
        begun, go_on = threading.Event(), threading.Event()

    def held(place, name, mode):
        if name.endswith(Copies.ends):
            Copies.begun.set()
            Copies.go_on.wait()
        return writing(place, name, mode)

    monkeypatch.setattr(_places.Folder, "writing", held)
    yield Copies
    Copies.go_on.set()


def test_a_drained_folder_is_copied(source, target):
    where, content = target
    assert drain(source, where).result() == sum(map(len, FILES.values()))
    assert content() == FILES
    # Drain again over the copy; one file has changed and one is new.
    (source / "empty").write_bytes(b"no more")
    (source / "new").write_bytes(b"new")
    # NFS calls a file so that is removed, and which a process of this host has open.
    (source / ".nfs00000000000000180000001a").write_bytes(b"old")
    drain(source, where).result()
    assert content() == {**FILES, "empty": b"no more", "new": b"new"}


def test_last_files_are_copied_last_and_unchanged_files_not_again(
    source, tmp_path, watched
):
    last = ("one", "__1*", ".metadata")
    drain(source, tmp_path / "target", last=last).result()
    (first,) = watched
    assert first.done[-3:] == ["below/further/one", "__1_0.distcp", ".metadata"]
    assert sorted(first.done) == sorted(FILES)
    (tmp_path / "target" / "empty").unlink()
    (tmp_path / "target" / "__1_0.distcp").write_bytes(bytes(4 << 20))
    drain(source, tmp_path / "target", last=last).result()
    # The last one goes before one that it marks is replaced.
    assert watched[1].done == ["empty", "__1_0.distcp", ".metadata"]
    assert (tmp_path / "target" / "__1_0.distcp").read_bytes() == FILES["__1_0.distcp"]


@pytest.mark.parametrize(
    "index",
    [
        "model.safetensors.index.json",
        "unet/diffusion_pytorch_model.safetensors.index.fp16.json",
        "pytorch_model.bin.index.json",
    ],
)
def test_the_index_of_a_model_is_copied_last(source, tmp_path, watched, index):
    (source / ".metadata").unlink()
    (source / index).parent.mkdir(exist_ok=True)
    (source / index).write_bytes(pattern(6 << 20))
    drain(source, tmp_path / "target").result()
    assert watched[0].done[-1] == index


def test_a_passing_error_is_retried(tmp_path, watched, drain_with):
    future = drain_with({"empty": [OSError(errno.EIO, "no")] * 3})
    assert future.result() > 0
    assert watched[0].done.count("empty") == 4
    assert (tmp_path / "target" / "empty").exists()


@pytest.mark.parametrize(
    ("error", "tries"),
    [
        (OSError(errno.EIO, "broken"), 4),
        (RuntimeError("what a client of a store raises"), 4),
        *((OSError(getattr(errno, name), "no"), 1) for name in ("ENOSPC", "EDQUOT")),
        *((OSError(getattr(errno, name), "no"), 1) for name in ("EROFS", "EACCES")),
        (OSError(errno.EPERM, "no"), 1),
        (PermissionError("of a store"), 1),
    ],
)
def test_a_lasting_error_is_raised_and_the_last_files_are_not_copied(
    tmp_path, watched, drain_with, error, tries
):
    future = drain_with({"__0_0.distcp": [error] * 9})
    with pytest.raises(OSError, match=r"target/__0_0\.distcp") as told:
        future.result()
    assert told.value.errno == (getattr(error, "errno", None) or errno.EIO)
    assert told.value.__cause__ is error
    assert watched[0].done.count("__0_0.distcp") == tries
    assert not {".metadata", "__0_0.distcp"} & {*os.listdir(tmp_path / "target")}
    assert not [n for n in os.listdir(tmp_path / "target") if n.endswith("-tmp")]


def test_a_wrong_copy_is_written_again(source, tmp_path, monkeypatch):
    spoiled = []
    finish = _places._FolderWriter.finish

    def spoil(writer):
        finish(writer)
        if "__0_0" in writer.target and len(spoiled) < 2:
            spoiled.append(writer.target)
            with open(writer.unnamed, "r+b") as file:
                file.seek(1000)
                file.write(b"?")

    monkeypatch.setattr(_places._FolderWriter, "finish", spoil)
    drain(source, tmp_path / "target").result()
    assert len(spoiled) == 2
    assert (tmp_path / "target/__0_0.distcp").read_bytes() == FILES["__0_0.distcp"]
    monkeypatch.setattr(_places._FolderWriter, "finish", spoil)
    spoiled.clear()
    (tmp_path / "target/__0_0.distcp").unlink()
    with pytest.raises(OSError, match="were read back") as told:
        drain(source, tmp_path / "target", retries=0).result()
    assert told.value.errno == errno.EIO
    assert "__0_0.distcp" not in os.listdir(tmp_path / "target")


def test_a_full_target_is_an_error(source, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("mounts need root")
    folder = tmp_path / "small"
    folder.mkdir()
    run_tool("mount", "-t", "tmpfs", "-o", "size=6M", "none", folder)
    try:
        # Any of the files may be the first without space.
        words = r"while it is copied\): .*bytes\) are needed, and \d+ are free"
        with pytest.raises(OSError, match=words) as told:
            drain(source, folder / "run").result()
        assert told.value.errno == errno.ENOSPC
        assert ".metadata" not in os.listdir(folder / "run")
        assert not [n for n in os.listdir(folder / "run") if n.endswith("-part")]
    finally:
        unmount(folder)


def test_a_target_that_fails_halfway_is_an_error_and_can_be_resumed(source, tmp_path):
    if refusal := fuse_refusal():
        pytest.skip(f"there is no FUSE here: {refusal}")
    folder = tmp_path / "mount"
    folder.mkdir()
    with served(FAULTYFS, folder) as server:
        control = folder / "control"
        control.touch()
        held = {"write": {"held": True, "at": 5_000_000}}
        os.setxattr(control, "user.faults", json.dumps(held).encode())
        future = drain(source, folder / "run")
        while int(os.getxattr(control, "user.waiting")) == 0:
            assert not future.done()
        server.kill()
        told = future.exception()
        # It imports fuse, which may not be installed.
        from faultyfs import unmount_lazily

        unmount_lazily(folder)
    assert told.errno in (errno.ENOTCONN, errno.ECONNABORTED, errno.EIO)
    assert str(folder) in told.filename
    # After the target is back, the drain succeeds.
    drain(source, folder / "run").result()
    assert (folder / "run/__0_0.distcp").read_bytes() == FILES["__0_0.distcp"]
    assert (folder / "run/.metadata").exists()


def test_a_slow_target_delays_nobody_and_can_be_cancelled(tmp_path, watched, drain_with):
    future = drain_with(held=True)
    watched[0].reached.wait()
    assert not future.done()
    assert future.cancel()
    watched[0].held.set()
    with pytest.raises(CancelledError):
        future.result()
    for thread in threading.enumerate():
        if thread.name == "nvmeio-drain":
            thread.join()
    assert ".metadata" not in os.listdir(tmp_path / "target")
    assert not [n for n in os.listdir(tmp_path / "target") if n.endswith("-tmp")]


def test_a_drain_resumes_after_its_process_was_killed(source, tmp_path, watched):
    target = tmp_path / "target"
    child = Child("drain_and_die", source=str(source), target=str(target))
    child.process.wait()
    assert child.process.returncode == -9
    child.finish()
    left = {*os.listdir(target)}
    assert ".metadata" not in left
    unfinished = [name for name in left if name.endswith(".nvmeio-tmp")]
    assert unfinished
    for name in unfinished:
        # The kernel ends the io_uring of a killed process later, and with it the locks.
        with open(target / name, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
    drain(source, target).result()
    assert {*os.listdir(target)} == {name.partition("/")[0] for name in FILES}
    assert "__1_0.distcp" not in watched[0].done
    assert (target / "__0_0.distcp").read_bytes() == FILES["__0_0.distcp"]


def test_the_bandwidth_is_limited(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(_draining.time, "monotonic", lambda: now[0])
    pace = _draining._Pace(1000)
    assert [pace.delay(500) for _ in range(3)] == [0, 0.5, 1.0]
    now[0] += 10
    assert [pace.delay(2000), pace.delay(1)] == [0, 2.0]
    assert _draining._Pace(None).delay(1 << 40) == 0


def test_a_source_that_changes_is_an_error(source, tmp_path, drain_with):
    def change():
        (source / "__0_0.distcp").write_bytes(pattern(9_000_001, 3))
        return ValueError("and once more")

    class Changing(list):
        def pop(self, _):
            return change()

    failures = {"__0_0.distcp": Changing([1])}
    assert isinstance(drain_with(failures).exception(), CheckpointError)
    assert ".metadata" not in os.listdir(tmp_path / "target")
    (source / "empty").write_bytes(b"")
    (source / "__1_0.distcp").write_bytes(b"shorter")
    work = _draining.Drain(source, _places.place_of(tmp_path / "other"), (), 3, None)
    (source / "__1_0.distcp").write_bytes(b"longer than before")
    work.start()
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp has changed while it was"):
        work.future.result()


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"last": ".metadata"}, TypeError, "it must be a sequence of names"),
        ({"last": {"a", "b"}}, TypeError, "it must be a sequence of names"),
        ({"retries": -1}, ValueError, "retries is -1; it must be from 0 to 1000"),
        ({"bandwidth": 0}, ValueError, "bandwidth is 0; it must be more than 0"),
        ({"bandwidth": float("inf")}, ValueError, "bandwidth is inf; it must be .* finite"),
        (
            {"bandwidth": "1G"},
            TypeError,
            "bandwidth is '1G'; it must be a number of bytes per second, such",
        ),
        (
            {"last": ("empty", "nosuch*")},
            ValueError,
            r"last has 'nosuch\*', which matches no file",
        ),
    ],
)
def test_wrong_arguments_are_refused(source, tmp_path, options, kind, words):
    with pytest.raises(kind, match=words):
        drain(source, tmp_path / "target", **options)
    assert not (tmp_path / "target").exists()


def test_impossible_drains_are_refused(source, tmp_path):
    with pytest.raises(ValueError, match="is inside the source"):
        drain(source, source / "below" / "target")
    with pytest.raises(ValueError, match="is both source and target"):
        drain(source, f"{source}/below/..")
    with pytest.raises(FileNotFoundError, match="nothing"):
        drain(tmp_path / "nothing", tmp_path / "target")
    with pytest.raises(NotADirectoryError):
        drain(source / "empty", tmp_path / "target")
    with pytest.raises(ValueError, match=r"Protocol not known"):
        drain(source, "nosuch://bucket/x")
    with pytest.raises(ValueError, match="a URL; only the target may be one"):
        drain("s3://bucket/x", tmp_path / "target")
    os.symlink("empty", source / "link")
    with pytest.raises(ValueError, match="link is not a regular file"):
        drain(source, tmp_path / "target")


# Checkpointer(drain_to=...)


def test_the_root_is_no_place_for_its_own_copies(tmp_path):
    (tmp_path / "link").symlink_to("run")
    run = tmp_path / "run"
    for target in (run, tmp_path / "link", f"file://{run}", f"local://{run}"):
        with pytest.raises(ValueError, match=r"drain_to is '/.*', the root itself"):
            Checkpointer(tmp_path / "run", drain_to=target)


def state_of(seed):
    return {"a": np.arange(300_000) * seed, "seed": seed}


def same(found, seed):
    return found["seed"] == seed and np.array_equal(found["a"], state_of(seed)["a"])


@pytest.fixture(params=["folder", "memory URL"])
def far(request, tmp_path):
    """The target of the drained steps."""
    fsspec.filesystem("memory").store.clear()
    yield tmp_path / "far" if request.param == "folder" else "memory://far/run"
    fsspec.filesystem("memory").store.clear()


def names_in(far):
    system = fsspec.filesystem("memory" if str(far).startswith("memory") else "file")
    path = str(far).removeprefix("memory:/")
    names = (os.path.basename(each) for each in system.ls(path, detail=False))
    return sorted(name for name in names if not name.startswith(".nvmeio-l"))


def find_copy(far, step, name):
    """Return the fsspec path of a file of a copy."""
    system = fsspec.filesystem("memory")
    path = str(far).removeprefix("memory:/")
    (found,) = (each for each in system.find(f"{path}/step-{step}") if name in each)
    return found


@pytest.mark.parametrize("way", ["save", "save_async"])
def test_each_step_is_drained_and_pruned_as_in_the_root(tmp_path, far, way):
    with Checkpointer(tmp_path / "near", keep=2, keep_every=10, drain_to=far) as saver:
        for step in (9, 10, 11, 12):
            made = getattr(saver, way)(step, state_of(step))
            if way == "save_async":
                made.result()
            assert saver.drained.result() > 0
    assert names_in(far) == ["step-10", "step-11", "step-12"]


def test_missing_steps_are_read_from_their_copies(tmp_path, far):
    with Checkpointer(tmp_path / "near", drain_to=far) as saver:
        saver.save(1, state_of(1), {"said": "one"})
        saver.drained.result()
        saver.save(2, state_of(2))
    other = Checkpointer(tmp_path / "new machine", drain_to=far)
    assert other.steps() == [1, 2]
    assert other.latest() == 2
    assert same(other.restore(), 2)
    assert other.restored == 2
    assert same(other.restore(1), 1)
    assert other.metadata(1) == {"said": "one"}
    with pytest.raises(FileNotFoundError):
        other.restore(3)
    into = {"a": np.zeros(300_000, int), "seed": 0}
    assert other.restore(1, into=into)["a"] is into["a"]
    # The restored copy was put there temporarily.
    assert not [*tmp_path.glob("new machine/*")]


def test_damaged_steps_are_read_from_their_copies(tmp_path, far):
    near = tmp_path / "near"
    with Checkpointer(near, drain_to=far, verify="checksum") as saver:
        saver.save(1, state_of(1))
        saver.save(2, state_of(2))
        saver.drained.result()
        with open(near / "step-2" / "tensors.safetensors", "r+b") as file:
            file.seek(100_000)
            file.write(b"?")
        with pytest.warns(
            RuntimeWarning, match="step 2 is read from its copy in .*: .*damag"
        ):
            assert same(saver.restore(), 2)
        with pytest.warns(RuntimeWarning, match="step 2 is read from its copy"):
            assert same(saver.restore(2), 2)
        assert saver.steps() == [1, 2]
        # Pruning counts only what is intact here.
        saver.keep = 1
        assert saver.prune() == []


def test_an_error_says_where_damaged_copies_are(tmp_path):
    near, far = tmp_path / "near", tmp_path / "far"
    with Checkpointer(near, drain_to=far) as saver:
        saver.save(1, state_of(1))
    shutil.rmtree(near / "step-1")
    (far / "step-1" / "tree.json").write_bytes(b"{}")
    words = f"the only checkpoint in {near} and {far} cannot be read; step 1: .*tree.json"
    other = Checkpointer(near, drain_to=far)
    with pytest.warns(RuntimeWarning), pytest.raises(CheckpointError, match=words):
        other.restore()


def test_a_step_that_is_saved_again_is_drained_again(tmp_path, far):
    with Checkpointer(tmp_path / "near", drain_to=far) as saver:
        for seed in (1, 2):
            saver.save(5, state_of(seed))
            saver.drained.result()
    assert same(Checkpointer(tmp_path / "other", drain_to=far).restore(), 2)


def test_a_copy_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch, far):
    saver = Checkpointer(tmp_path / "near", drain_to=far)
    saver.save(5, state_of(1))
    saver.drained.result()
    kind = _places.Remote if str(far).startswith("memory") else _places.Folder
    writing = kind.writing

    def fail(place, name, mode):
        if name.endswith("tree.json"):
            raise OSError(errno.ENOSPC, "no room")
        return writing(place, name, mode)

    monkeypatch.setattr(kind, "writing", fail)
    saver.save(5, {**state_of(2), "more": 1})
    with pytest.raises(OSError, match="no room"):
        saver.close()
    assert saver.drained.exception().errno == errno.ENOSPC
    monkeypatch.undo()
    # The older copy of the step stays until the new one is complete.
    other = Checkpointer(tmp_path / "other", drain_to=far)
    assert other.steps() == [5]
    assert same(other.restore(), 1)


def test_a_failed_drain_is_reported_and_saving_goes_on(tmp_path, caplog):
    far = tmp_path / "far"
    far.write_bytes(b"no folder")
    caplog.set_level(logging.ERROR, "nvmeio")
    saver = Checkpointer(tmp_path / "near", drain_to=far)
    saver.save(1, state_of(1))
    assert isinstance(saver.drained.exception(), OSError)
    assert "step 1 was not copied" in caplog.text
    with pytest.warns(RuntimeWarning, match="was saved but not copied to"):
        saver.save(2, state_of(2))
    with pytest.raises(OSError, match="far"):
        saver.close()
    assert same(Checkpointer(tmp_path / "near").restore(), 2)


@pytest.mark.parametrize("code", [errno.ETIMEDOUT, errno.ESTALE, errno.ENOMEM])
@pytest.mark.parametrize("named", [True, False])
def test_a_step_that_cannot_be_looked_up_is_not_missing(fuse_kinds, tmp_path, code, named):
    """Neither an older step nor a copy of an older save takes its place."""
    folder = fuse_kinds("uncached")
    empty(folder)
    control = folder / "control"
    control.touch()
    near, far = folder / "near", tmp_path / "far"
    with Checkpointer(near, drain_to=far) as saver:
        saver.save(1, state_of(1))
        saver.save(2, state_of(2))
        saver.drained.result()
    with Checkpointer(near) as saver:
        saver.save(2, state_of(3))
    if not named:
        (near / ".nvmeio-latest").unlink()
    lookups = {"error": code, "under": f"/{near.name}/step-2"}
    for kept in (Checkpointer(near), Checkpointer(near, drain_to=far)):
        os.setxattr(control, "user.faults", json.dumps({"getattr": lookups}).encode())
        calls = (kept.restore, functools.partial(kept.restore, 2), kept.latest)
        for call in (*calls, functools.partial(kept.remove, 2)):
            with pytest.raises(OSError, match="step-2") as caught:
                call()
            assert caught.value.errno == code
        os.setxattr(control, "user.faults", b"{}")
        assert same(kept.restore(), 3)
        kept.close()


def in_store(tmp_path):
    """Return the root of another host without steps, whose copies are 1 and 2."""
    fsspec.filesystem("memory").store.clear()
    with Checkpointer(tmp_path / "near", drain_to="memory://run/9") as saver:
        for step in (1, 2):
            saver.save(step, state_of(step))
            saver.drained.result()
    return tmp_path / "other"


def while_fetched(monkeypatch, call):
    """Call a function after the first file of each fetch of step 2 was read."""
    read = _places.Remote.read

    def slow(place, name):
        yield from read(place, name)
        if name.startswith("step-2/") and name.endswith("/manifest.json"):
            call()

    monkeypatch.setattr(_places.Remote, "read", slow)


@pytest.mark.parametrize("times", [1, None])
def test_a_fetch_that_is_removed_says_nothing_about_the_copy(tmp_path, monkeypatch, times):
    """As by a clean-up of temporary files."""
    root, removed = in_store(tmp_path), []

    def clean_up():
        # Reading the manifest comes first, and needs no folder.
        for each in root.glob(".*") if times is None or len(removed) < times else ():
            shutil.rmtree(each)
            removed.append(each)

    while_fetched(monkeypatch, clean_up)
    other = Checkpointer(root, drain_to="memory://run/9")
    if times is None:
        with pytest.raises(CheckpointError, match="what was fetched of it, was replaced"):
            other.restore()
        monkeypatch.undo()
    assert same(other.restore(), 2)
    assert removed
    assert other.steps() == [1, 2]


def test_a_writer_leaves_alone_what_another_host_fetches(tmp_path, monkeypatch):
    """Where locks of folders are not seen by other hosts, as on NFS."""
    root, flock, saved = in_store(tmp_path), fcntl.flock, []

    def without_folders(file, operation):
        if not stat.S_ISDIR(os.fstat(file).st_mode):
            flock(file, operation)

    def save():
        if any(root.glob(".*")) and not saved:
            monkeypatch.undo()
            monkeypatch.setattr(fcntl, "flock", without_folders)
            with Checkpointer(root) as writer:
                saved.append(writer.save(0, state_of(0)))

    monkeypatch.setattr(fcntl, "flock", without_folders)
    become_host(monkeypatch, "another")
    while_fetched(monkeypatch, save)
    assert same(Checkpointer(root, drain_to="memory://run/9").restore(), 2)
    assert saved


def test_steps_of_a_lower_layer_are_pruned_and_removed(tmp_path):
    """As of an image, in which overlayfs cannot rename a folder."""
    lower = tmp_path / "lower"
    with Checkpointer(lower / "run") as saver:
        for step in (1, 2, 3):
            saver.save(step, state_of(step))
    left = lower / "run/.step-9.another-77-1234-0a0b0c0d.nvmeio-tmp"
    left.mkdir()
    (left / "tensors.safetensors").touch()
    with overlay(lower, tmp_path) as merged:
        far = tmp_path / "far"
        with Checkpointer(merged / "run", keep=3, drain_to=far) as saver:
            with pytest.raises(OSError, match="lower layer, as of an image") as caught:
                saver.save(3, state_of(4))
            assert caught.value.errno == errno.EXDEV
            assert same(saver.restore(3), 3)
            saver.save(4, state_of(4))
            saver.drained.result()
            assert saver.steps() == [2, 3, 4]
            (merged / "run/step-2/manifest.json").unlink()
            saver.remove(2)
            assert saver.steps() == [3, 4]
        assert sorted(os.listdir(merged / "run"))[-2:] == ["step-3", "step-4"]
        assert not (merged / "run" / left.name).exists()


def test_a_name_that_was_cut_short_in_a_store_is_written_again(tmp_path):
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pipe_file("/run/.nvmeio-latest", b"")
    with Checkpointer(tmp_path / "near", drain_to="memory://run") as saver:
        saver.save(1, state_of(1))
        saver.drained.result()
    assert system.cat("/run/.nvmeio-latest") == b"step-1\n"


def test_unreachable_copies_do_not_disturb_local_steps(tmp_path, monkeypatch):
    with Checkpointer(tmp_path / "near", drain_to=tmp_path / "far") as saver:
        saver.save(1, state_of(1))
        saver.drained.result()

        def refuse(*_):
            raise ConnectionError("nobody answers")

        monkeypatch.setattr(saver._copies.place, "steps", refuse)
        with pytest.warns(RuntimeWarning, match="cannot be listed: nobody answers"):
            assert same(saver.restore(), 1)


def test_a_step_that_waits_gives_way_to_a_newer_one(tmp_path, copies):
    far = tmp_path / "far"
    with Checkpointer(tmp_path / "near", keep=1, drain_to=far) as saver:
        saver.save(1, state_of(1))
        first = saver.drained
        copies.begun.wait()
        saver.save(2, state_of(2))
        second = saver.drained
        saver.save(3, state_of(3))
        assert second.cancelled()
        # It is being read, so it is not removed.
        assert sorted(saver.root.iterdir())[0].name in {".nvmeio-latest", "step-1"}
        assert (saver.root / "step-1").exists()
        copies.go_on.set()
        assert first.result() > 0
        assert saver.drained.result() > 0
    assert names_in(far) == ["step-3"]
    manifest = json.loads((far / "step-3" / "manifest.json").read_text())
    assert manifest["step"] == 3


def test_a_callback_of_a_copy_may_call_while_another_thread_closes(
    tmp_path, copies, monkeypatch
):
    saver = Checkpointer(tmp_path / "near", drain_to=tmp_path / "far")
    saver.save(1, state_of(1))
    called: Future = Future()

    def call(_):
        try:
            called.set_result(saver.save(2, state_of(2)))
        except ValueError as error:
            called.set_exception(error)

    saver.drained.add_done_callback(call)
    waiting, wait = threading.Event(), saver._copies.wait

    def wait_for_copies():
        waiting.set()
        wait()

    monkeypatch.setattr(saver._copies, "wait", wait_for_copies)
    with ThreadPoolExecutor(1) as pool:
        closed = pool.submit(saver.close)
        assert waiting.wait(60)
        copies.go_on.set()
        closed.result(60)
        with pytest.raises(ValueError, match="the Checkpointer is closed"):
            called.result(60)
    assert same(Checkpointer(tmp_path / "far").restore(), 1)


# Defects that reviews found.


def test_brackets_in_a_name_are_no_pattern(source):
    system = fsspec.filesystem("memory")
    system.store.clear()
    for run in ("lr[1]", "lr1"):
        with Checkpointer(source.parent / run, keep=1, drain_to=f"memory://{run}") as saver:
            for step in (1, 2):
                saver.save(step, state_of(step))
                saver.drained.result()
    assert names_in("memory://lr[1]") == names_in("memory://lr1") == ["step-2"]
    (source / "a[b]*.bin").write_bytes(b"x")
    drain(source, "memory://other").result()
    with system.open("/other/a[b]*.bin") as stream:
        assert stream.read() == b"x"
    system.store.clear()


def test_a_damaged_only_copy_is_reported(tmp_path):
    far = tmp_path / "far"
    with Checkpointer(tmp_path / "near", drain_to=far) as saver:
        for step in (1, 2):
            saver.save(step, state_of(step))
            saver.drained.result()
    os.truncate(far / "step-2" / "tensors.safetensors", 1000)
    other = Checkpointer(tmp_path / "other", drain_to=far)
    with pytest.warns(RuntimeWarning, match=r"step 2 is skipped: .*far.step-2"):
        assert same(other.restore(), 1)
    with pytest.raises(CheckpointError, match=r"far.step-2"):
        other.restore(2)


def test_the_error_names_a_damaged_step_and_its_damaged_copy(tmp_path, far):
    with Checkpointer(tmp_path / "near", drain_to=far) as saver:
        for step in (1, 2):
            saver.save(step, state_of(step))
            saver.drained.result()
        os.truncate(tmp_path / "near/step-2/tensors.safetensors", 1000)
        at = "tensors.safetensors"
        if str(far).startswith("memory"):
            fsspec.filesystem("memory").pipe(find_copy(far, 2, at), b"x")
        else:
            (far / "step-2" / at).write_bytes(b"x")
        words = r"near/step-2/.*; its copy in .*far.*: .*step-2"
        with pytest.raises(CheckpointError, match=words):
            saver.restore(2)
        with pytest.warns(RuntimeWarning, match=f"step 2 is skipped: .*{words}"):
            assert same(saver.restore(), 1)


def test_metadata_is_read_without_the_tensors(tmp_path, monkeypatch):
    with Checkpointer(tmp_path / "near", drain_to="memory://beside") as saver:
        saver.save(1, state_of(1), {"said": "one"})
    read = []
    monkeypatch.setattr(
        _places.Remote,
        "read",
        lambda self, name, read_=_places.Remote.read: (
            read.append(name) or read_(self, name)
        ),
    )
    other = Checkpointer(tmp_path / "other", drain_to="memory://beside")
    assert other.metadata() == {"said": "one"}
    names = [os.path.basename(name) for name in read]
    assert names == ["manifest.json", "tree.json"]
    fsspec.filesystem("memory").store.clear()


def test_a_copy_that_is_being_read_is_kept(tmp_path):
    far = tmp_path / "far"
    with Checkpointer(tmp_path / "near", keep=1, drain_to=far) as saver:
        saver.save(1, state_of(1))
        saver.drained.result()
        with Held(str(far / "step-1"), 1):
            saver.save(2, state_of(2))
            saver.drained.result()
            assert names_in(far) == ["step-1", "step-2"]
        saver.save(3, state_of(3))
    assert names_in(far) == ["step-3"]


def test_a_removed_step_does_not_come_back(tmp_path, far):
    with Checkpointer(tmp_path / "near", keep=2, drain_to=far) as saver:
        for step in (100, 200, 300):
            saver.save(step, state_of(step))
            saver.drained.result()
        saver.remove(300)
        saver.save(210, state_of(210))
        saver.drained.result()
        assert saver.latest() == 210
    assert names_in(far) == ["step-200", "step-210"]
    other = Checkpointer(tmp_path / "other", drain_to=far)
    other.remove(210)
    assert other.steps() == [200]
    with pytest.raises(FileNotFoundError):
        other.remove(210)
    with pytest.warns(
        RuntimeWarning, match=r"step 3 is not the newest: restore\(\) reads step 200"
    ):
        other.save(3, state_of(3))
    other.close()


@pytest.mark.parametrize("mark", [".metadata", "__0.metadata"])
def test_a_partly_replaced_copy_has_no_manifest(
    source, tmp_path, drain_with, monkeypatch, mark
):
    monkeypatch.setattr(_draining, "FILES", 1)
    target = tmp_path / "target"
    (source / ".metadata").rename(source / mark)
    drain(source, target).result()
    (source / "__0_0.distcp").write_bytes(pattern(9_000_001, 8))
    (source / "__1_0.distcp").write_bytes(b"of the second save")
    failures = {"__1_0.distcp": [OSError(errno.ENOSPC, "no room")]}
    assert drain_with(failures).exception()
    assert mark not in os.listdir(target)
    # A new file beside the old ones leaves the copy complete.
    drain(source, target).result()
    (source / "new").write_bytes(b"x")
    failures = {"new": [OSError(errno.ENOSPC, "no room")]}
    assert drain_with(failures).exception()
    assert (target / mark).read_bytes() == FILES[".metadata"]


def test_a_partly_replaced_copy_that_nfs_does_not_remember_has_no_metadata(
    source, tmp_path, drain_with, monkeypatch
):
    """NFS forgets what was missing once it has asked about the folder."""
    monkeypatch.setattr(_draining, "FILES", 1)
    target, hidden = tmp_path / "target", tmp_path / "hidden"
    drain(source, target).result()
    shutil.move(target, hidden)
    target.mkdir()

    def asking(path):
        if path == str(target) and hidden.exists():
            shutil.copytree(hidden, target, dirs_exist_ok=True)
            shutil.rmtree(hidden)

    monkeypatch.setattr(paths, "ask_anew", asking)
    for name in ("__0_0.distcp", "__1_0.distcp"):
        (source / name).write_bytes(b"of the second save")
    failures = {"__1_0.distcp": [OSError(errno.ENOSPC, "no room")]}
    assert drain_with(failures).exception()
    assert not [folder for folder in (target, hidden) if (folder / ".metadata").exists()]


def test_a_copy_whose_last_file_cannot_be_written_stays_as_it_was(
    source, tmp_path, drain_with
):
    target = tmp_path / "target"
    drain(source, target).result()
    (source / "new").write_bytes(b"of the second save")
    (source / ".metadata").write_bytes(b"there is more")
    told = drain_with({".metadata": [OSError(errno.ENOSPC, "no room")]}).exception()
    assert told.errno == errno.ENOSPC
    assert (target / ".metadata").read_bytes() == FILES[".metadata"]
    # Not so if a file that it describes was replaced.
    (source / "empty").write_bytes(b"no more")
    assert drain_with({".metadata": [OSError(errno.ENOSPC, "no room")]}).exception()
    assert not (target / ".metadata").exists()


def test_a_last_file_that_was_half_written_over_is_removed(source, monkeypatch):
    system = fsspec.filesystem("memory")
    system.store.clear()
    drain(source, "memory://half").result()
    (source / ".metadata").write_bytes(b"there is more")

    def refuse(writer, _):
        assert system.exists(writer.target)
        raise OSError(errno.EIO, "no")

    monkeypatch.setattr(_places._RemoteWriter, "write", refuse)
    with pytest.raises(OSError, match=r"no .while it is copied"):
        drain(source, "memory://half", retries=0).result()
    assert {*system.find("/half")} == {f"/half/{name}" for name in FILES} - {
        "/half/.metadata"
    }
    system.store.clear()


def test_a_last_file_goes_before_an_earlier_one_is_replaced(source, tmp_path, monkeypatch):
    target = tmp_path / "target"
    drain(source, target, last=("empty", ".metadata")).result()
    (source / "empty").write_bytes(b"no more")
    found = []

    def looking(commit):
        def look(writer):
            found.append((os.path.basename(writer.target), (target / ".metadata").exists()))
            commit(writer)

        return look

    for writer in (_places._FolderWriter, _places._ClaimWriter):
        monkeypatch.setattr(writer, "commit", looking(writer.commit))
    drain(source, target, last=("empty", ".metadata")).result()
    assert found == [("empty", False), (".metadata", False)]


@pytest.mark.parametrize("name", [".metadata", "__1_0.distcp"])
def test_a_file_that_cannot_be_read_back_is_not_taken_for_another(
    source, tmp_path, watched, monkeypatch, name
):
    drain(source, tmp_path / "target").result()
    read, failures = _places.Folder.read, []

    def fail(place, which):
        if which == name and failures:
            raise failures.pop()
        return read(place, which)

    monkeypatch.setattr(_places.Folder, "read", fail)
    failures[:] = [TimeoutError(errno.ETIMEDOUT, "no answer")] * 2
    drain(source, tmp_path / "target").result()
    assert not failures
    failures[:] = [TimeoutError(errno.ETIMEDOUT, "no answer")]
    with pytest.raises(TimeoutError, match=f"no answer .*target/{name}"):
        drain(source, tmp_path / "target", retries=0).result()
    assert [each.done for each in watched[1:]] == [[], []]
    assert (tmp_path / "target" / ".metadata").read_bytes() == FILES[".metadata"]


def test_a_step_is_replaced_during_its_drain(tmp_path, monkeypatch, copies):
    far, near = tmp_path / "far", tmp_path / "near"
    copies.ends = "tree.json"
    saver = Checkpointer(near, drain_to=far)
    saver.save(5, state_of(1))
    copies.begun.wait()
    saver.save(5, {**state_of(2), "more": 1})
    complete = []
    copy = saver._copies._copy

    def look(step, folder):
        complete.append((far / "step-5" / "manifest.json").exists())
        return copy(step, folder)

    monkeypatch.setattr(saver._copies, "_copy", look)
    copies.go_on.set()
    saver.close()
    assert complete == [False]
    assert same(Checkpointer(tmp_path / "other", drain_to=far).restore(), 2)


def test_a_wrong_object_is_deleted(source, monkeypatch):
    system = fsspec.filesystem("memory")
    system.store.clear()
    finish = _places._RemoteWriter.finish

    def spoil(writer):
        finish(writer)
        if writer.target.endswith("__1_0.distcp"):
            system.pipe_file(writer.target, bytes(4 << 20))

    monkeypatch.setattr(_places._RemoteWriter, "finish", spoil)
    with pytest.raises(OSError, match="were read back"):
        drain(source, "memory://store", retries=1).result()
    assert not system.exists("/store/__1_0.distcp")
    system.store.clear()


@pytest.mark.skipif(sys.version_info[:2] == (3, 12), reason="Python refuses the thread")
def test_a_store_that_needs_executors_works_while_python_exits(tmp_path):
    """As asyncio does, and with it s3fs, to look up a host."""
    program = """
import threading
import nvmeio.checkpoint, fsspec
from concurrent.futures import ThreadPoolExecutor
from fsspec.implementations.memory import MemoryFileSystem

class Far(MemoryFileSystem):
    protocol = "far"

    @classmethod
    def _strip_protocol(cls, path):
        return "/" + path.removeprefix("far://").strip("/")

    def _open(self, path, mode="rb", **options):
        # Until the main thread is at the end, unless it waits.
        threading.main_thread().join(0.5)
        ThreadPoolExecutor(1).submit(int).result()
        return super()._open(path, mode, **options)

fsspec.register_implementation("far", Far)
future = nvmeio.checkpoint.drain("folder", "far://run", retries=0)
future.add_done_callback(lambda future: print(future.exception()))
"""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(b"x")
    command = [sys.executable, "-c", program]
    found = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (found.stdout, found.stderr, found.returncode) == ("None\n", "", 0)


class Upload(io.BytesIO):
    """An object that has its name once it is closed, as in a store."""

    def __init__(self, system, path):
        super().__init__()
        self.finish = functools.partial(system.pipe_file, path)

    def discard(self):
        self.finish = len

    def close(self):
        if not self.closed:
            self.finish(self.getvalue())
        super().close()


def test_an_upload_that_cannot_be_completed_is_abandoned(source, monkeypatch):
    """S3 would keep its parts for ever, where no listing shows them."""
    begun, abandoned = [], []

    class Refused(Upload):
        def close(self):
            # fsspec's files count as closed after that.
            io.BytesIO.close(self)
            raise OSError(errno.EIO, "not completed")

        def discard(self):
            abandoned.append(self)

    def open_file(system, path, mode="rb", **options):
        begun.append(Refused(system, path))
        return begun[-1]

    system = fsspec.filesystem("memory")
    system.store.clear()
    monkeypatch.setattr(type(system), "open", open_file)
    with pytest.raises(OSError, match="not completed"):
        drain(source, "memory://refused", retries=0).result()
    assert begun
    assert all(any(each is other for other in abandoned) for each in begun)


@pytest.mark.parametrize("kind", ["SFTP", "store", "store, and another drain"])
def test_a_drain_that_fails_leaves_no_part_of_a_file(source, monkeypatch, kind):
    """What another drain has written meanwhile stays, too."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    if kind != "SFTP":
        opened = type(system).open

        def open_file(system, path, mode="rb", **options):
            if mode == "wb" and not options:
                return Upload(system, path)
            return opened(system, path, mode, **options)

        monkeypatch.setattr(type(system), "open", open_file)
    stays = {"/part/__0_0.distcp": b"an older one"}
    system.pipe(stays)
    write = _places._RemoteWriter.write

    def half(writer, piece):
        write(writer, piece[:-1])
        if "another" in kind:
            stays[writer.target] = bytes(piece)
            system.pipe_file(writer.target, bytes(piece))
        raise OSError(errno.EIO, "no")

    monkeypatch.setattr(_places._RemoteWriter, "write", half)
    with pytest.raises(OSError, match=r"no .while it is copied"):
        drain(source, "memory://part", retries=0).result()
    for thread in threading.enumerate():
        if thread.name == "nvmeio-drain":
            thread.join()
    found = {name: system.cat_file(name) for name in system.find("/part")}
    # That one has no bytes to write.
    found.pop("/part/empty", None)
    assert found == ({} if kind == "SFTP" else stays)
    system.store.clear()


def test_an_unreachable_target_does_not_disturb_saving(tmp_path, monkeypatch):
    near = tmp_path / "near"
    with Checkpointer(near) as saver:
        saver.save(1, state_of(1))

    def refuse(*_, **__):
        raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody is there")

    monkeypatch.setattr(fsspec.core, "url_to_fs", refuse)
    saver = Checkpointer(near, drain_to="memory://run")
    assert same(saver.restore(), 1)
    saver.save(2, state_of(2))
    assert isinstance(saver.drained.exception(), ConnectionRefusedError)
    saver.close()


def test_ctrl_c_while_a_thread_starts_lets_all_of_them_copy(source, target, monkeypatch):
    """CPython may raise RuntimeError then, of a lock, and the thread runs."""
    start = threading.Thread.start

    def interrupted(thread):
        start(thread)
        if threading.current_thread() is threading.main_thread():
            try:
                raise KeyboardInterrupt
            except KeyboardInterrupt:
                raise RuntimeError("release unlocked lock")  # noqa: B904

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    there, content = target
    with pytest.raises(KeyboardInterrupt):
        drain(source, there)
    # The first one starts the others.
    while found := [t for t in threading.enumerate() if t.name.startswith("nvmeio-drain")]:
        found[0].join()
    assert content() == FILES


def test_a_file_that_another_has_replaced_at_the_same_time_is_noticed(
    source, tmp_path, monkeypatch
):
    """Some file systems have times of whole seconds."""
    target, settle = tmp_path / "target", _places.Folder.settle

    def settle_later(place, folder):
        if (one := target / "__1_0.distcp").read_bytes() == FILES[one.name]:
            other, times = tmp_path / "other", os.stat(one)
            other.write_bytes(bytes(times.st_size))
            os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
            other.replace(one)
        settle(place, folder)

    monkeypatch.setattr(_places.Folder, "settle", settle_later)
    with pytest.raises(FileExistsError, match="replaced or removed this file of the copy"):
        drain(source, target).result()


def test_a_slow_drain_ends_when_it_is_cancelled(source, tmp_path):
    future = drain(source, tmp_path / "target", bandwidth=1.0)
    assert future.cancel()
    for thread in threading.enumerate():
        if thread.name == "nvmeio-drain":
            thread.join()
    assert not [n for n in os.listdir(tmp_path / "target") if n.endswith("-tmp")]


@pytest.mark.parametrize("again", [False, True])
def test_a_drain_that_is_cancelled_while_it_reads_leaves_nothing_open(
    source, tmp_path, monkeypatch, again
):
    """However long its future is kept: the space of a file in use is not free."""
    target = tmp_path / "target"
    if again:
        drain(source, target).result()
    held, goes_on = threading.Event(), threading.Event()
    owner = _places.Folder if again else _places._FolderWriter
    read = owner.read

    def held_read(self, *name):
        for piece in read(self, *name):
            held.set()
            assert goes_on.wait(60)
            yield piece

    monkeypatch.setattr(owner, "read", held_read)
    gc.collect()
    gc.disable()
    try:
        future = drain(source, target)
        assert held.wait(60)
        assert future.cancel()
        goes_on.set()
        for thread in threading.enumerate():
            if thread.name == "nvmeio-drain":
                thread.join()
        links = [
            os.path.join("/proc/self/fd", each) for each in os.listdir("/proc/self/fd")
        ]
        links = [os.readlink(each) for each in links if os.path.lexists(each)]
        assert not [each for each in links if str(target) in each or str(source) in each]
    finally:
        gc.enable()
    assert future.cancelled()


def test_leftovers_with_long_names_are_removed(source, tmp_path):
    (source / ("n" * 250)).write_bytes(b"x")
    target = tmp_path / "target"
    target.mkdir()
    left = [target / f".{letter * 220}.01234567.nvmeio-part" for letter in "nm"]
    for path in left:
        path.write_bytes(b"x")
    # Nobody has written to it for a day.
    os.utime(left[0], (0, 0))
    drain(source, target).result()
    assert [path.exists() for path in left] == [False, True]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_what_a_killed_drain_of_another_user_has_left_is_passed_over(source):
    with tempfile.TemporaryDirectory(dir="/tmp") as shared:
        copied = shutil.copytree(source, os.path.join(shared, "source"))
        target = os.path.join(shared, "target")
        os.mkdir(target)
        for folder in (shared, target):
            os.chmod(folder, 0o777)
        left = os.path.join(target, ".empty.host-1-1-01234567.nvmeio-tmp")
        os.close(os.open(left, os.O_CREAT, 0o600))
        try:
            os.seteuid(65534)
            assert drain(copied, target).result() == sum(map(len, FILES.values()))
        finally:
            os.seteuid(0)
        assert os.path.exists(left)


def test_two_drains_to_one_folder_leave_each_other_alone(tmp_path, monkeypatch):
    """As of two ranks, whose files have long names that begin alike."""
    files = [f"{'n' * 100}-{rank}" for rank in (0, 1)]
    for rank, name in enumerate(files):
        (tmp_path / f"rank{rank}").mkdir()
        (tmp_path / f"rank{rank}" / name).write_bytes(bytes(5000))
    writer_of = _places._FolderWriter
    finish, others = writer_of.finish, []

    def finish_late(writer):
        if not others:
            others.append(None)
            drain(tmp_path / "rank1", tmp_path / "far").result()
        finish(writer)

    monkeypatch.setattr(writer_of, "finish", finish_late)
    drain(tmp_path / "rank0", tmp_path / "far", retries=0).result()
    assert sorted(os.listdir(tmp_path / "far")) == files


def test_files_with_other_inode_numbers_each_time_are_drained(fuse_kinds, tmp_path):
    folder = fuse_kinds("inodes")
    with Checkpointer(folder / "run", drain_to=tmp_path / "far") as saver:
        saver.save(1, state_of(1))
        saver.drained.result()
    drain(folder / "run", tmp_path / "other").result()
    assert same(Checkpointer(tmp_path / "far").restore(), 1)


def test_a_target_that_is_no_folder_fails_without_retries(source, tmp_path, monkeypatch):
    monkeypatch.setattr(_draining, "PAUSE_S", 1000)
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="while it is copied") as told:
        drain(source, tmp_path / "file").result()
    assert told.value.filename == str(tmp_path / "file")


def test_a_private_file_stays_private(tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "private").write_bytes(b"key")
    (tmp_path / "source" / "private").chmod(0o600)
    (tmp_path / "source" / "public").write_bytes(b"text")
    (tmp_path / "source" / "secret").mkdir(mode=0o700)
    (tmp_path / "source" / "secret" / "text").write_bytes(b"text")
    drain(tmp_path / "source", tmp_path / "far").result()
    for name in ("private", "public", "secret", "secret/text", ""):
        one, other = ((tmp_path / each / name).stat().st_mode for each in ("source", "far"))
        assert oct(one) == oct(other)


def test_the_mode_of_a_file_that_belongs_to_its_mount_is_not_changed(
    source, tmp_path, monkeypatch
):
    """As on exFAT, or on FUSE with uid=, for a user who is not that one."""

    def refuse(*_):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    (source / "empty").chmod(0o600)
    monkeypatch.setattr(os, "fchmod", refuse)
    monkeypatch.setattr(os, "chmod", refuse)
    drain(source, tmp_path / "target").result()
    assert stat.S_IMODE((tmp_path / "target" / "empty").stat().st_mode) == 0o600


def test_each_of_the_last_files_costs_one_sync_of_its_folder(tmp_path, monkeypatch):
    for number in range(5):
        (tmp_path / f"run/step-{number}").mkdir(parents=True)
        (tmp_path / f"run/step-{number}/manifest.json").touch()
    settled, settle = [], _places.Folder.settle

    def note(place, folder):
        settled.append(folder)
        settle(place, folder)

    monkeypatch.setattr(_places.Folder, "settle", note)
    drain(tmp_path / "run", tmp_path / "far", last=("manifest.json",)).result()
    folders = [f"step-{number}" for number in range(5)]
    assert settled[-5:] == folders
    assert sorted(settled[:-5]) == ["", *folders]


def test_a_file_of_the_source_that_is_gone_is_named(source, tmp_path):
    work = _draining.Drain(source, _places.place_of(tmp_path / "far"), (), 0, None)
    name = max(work.sizes, key=work.sizes.get)
    (source / name).unlink()
    work.start()
    with pytest.raises(FileNotFoundError) as told:
        work.future.result()
    assert told.value.filename == str(source / name)


def test_folders_are_compared_by_their_whole_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saver = Checkpointer("near", drain_to="far")
    monkeypatch.chdir("/")
    with saver:
        saver.save(1, state_of(1))
    assert names_in(tmp_path / "far") == ["step-1"]


def test_a_link_to_the_source_is_no_copy(source, tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    os.symlink(source / "__1_0.distcp", target / "__1_0.distcp")
    drain(source, target).result()
    assert not (target / "__1_0.distcp").is_symlink()
    assert (target / "__1_0.distcp").read_bytes() == FILES["__1_0.distcp"]
    os.symlink(source, tmp_path / "link")
    with pytest.raises(ValueError, match="is inside the source"):
        drain(tmp_path / "link", source / "below" / "target")


def test_a_file_that_changes_after_it_was_copied_is_an_error(source, tmp_path, drain_with):
    class Changing(list):
        """Failures that change a copied file before another file fails."""

        def pop(self, _):
            while not (tmp_path / "target" / "__1_0.distcp").exists():
                pass
            (source / "__1_0.distcp").write_bytes(pattern(4 << 20, 9))
            return OSError(errno.EIO, "once")

    failures = {"empty": Changing([1, 2])}
    inner = failures["empty"]
    inner.pop = lambda _: (inner.__class__.pop(inner, 0), inner.clear())[0]
    with pytest.raises(CheckpointError, match="has changed while it was copied"):
        drain_with(failures).result()
    assert ".metadata" not in os.listdir(tmp_path / "target")


def test_a_last_file_replaced_before_its_copy_is_an_error(
    source, tmp_path, watched, drain_with
):
    future = drain_with(held=True)
    watched[0].reached.wait()
    # A second save to the same folder writes other shards, which are not drained.
    (source / "new").write_bytes(FILES[".metadata"][::-1])
    os.replace(source / "new", source / ".metadata")
    watched[0].held.set()
    with pytest.raises(CheckpointError, match=r"\.metadata has changed while it was"):
        future.result()
    assert ".metadata" not in os.listdir(tmp_path / "target")


def test_what_a_save_replaces_while_the_source_is_listed_is_listed_anew(
    source, tmp_path, monkeypatch
):
    state_of, changes = _draining._state_of, []

    def replacing(found):
        if not changes:
            changes.append(None)
            (source / "__2_0.distcp").write_bytes(b"of the second save")
            (source / ".metadata").write_bytes(b"what there is now")
        return state_of(found)

    monkeypatch.setattr(_draining, "_state_of", replacing)
    drain(source, tmp_path / "target").result()
    found = [
        (tmp_path / "target" / name).read_bytes() for name in ("__2_0.distcp", ".metadata")
    ]
    assert found == [b"of the second save", b"what there is now"]


def test_a_folder_that_goes_while_the_source_is_listed_is_not_missed(
    source, tmp_path, monkeypatch
):
    state_of = _draining._state_of

    def removing(found):
        shutil.rmtree(source / "below", ignore_errors=True)
        return state_of(found)

    monkeypatch.setattr(_draining, "_state_of", removing)
    drain(source, tmp_path / "target").result()
    names = {os.path.basename(name) for name in FILES} - {"one"}
    assert {*os.listdir(tmp_path / "target")} == names


def test_a_source_that_keeps_changing_is_refused(source, tmp_path, monkeypatch):
    numbers = itertools.count()
    monkeypatch.setattr(_draining, "_state_of", lambda found: (next(numbers), 0))
    with pytest.raises(CheckpointError, match="is being written to"):
        drain(source, tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_a_source_that_changes_during_the_last_file_does_not_disturb_the_copy(
    source, tmp_path, monkeypatch
):
    commit = _places._ClaimWriter.commit

    def change(writer):
        (source / "empty").write_bytes(b"no more")
        commit(writer)

    monkeypatch.setattr(_places._ClaimWriter, "commit", change)
    drain(source, tmp_path / "target").result()
    assert {name: (tmp_path / "target" / name).read_bytes() for name in FILES} == FILES


def test_a_mark_comes_before_those_of_the_folders_above_it(source, tmp_path, drain_with):
    (source / "below" / ".metadata").write_bytes(b"what there is below")
    (source / "z").mkdir()
    (source / "z" / ".metadata").write_bytes(b"what there is in z")
    failures = {os.path.join("z", ".metadata"): [OSError(errno.ENOSPC, "no room")]}
    with pytest.raises(OSError, match="no room"):
        drain_with(failures).result()
    # What is complete stays so.
    found = (tmp_path / "target").glob("**/.metadata")
    assert [*found] == [tmp_path / "target" / "below" / ".metadata"]


def test_a_step_is_removed_during_its_drain(tmp_path, copies):
    near, far = tmp_path / "near", tmp_path / "far"
    with Checkpointer(near, drain_to=far) as saver:
        saver.save(1, state_of(1))
        drained = saver.drained
        copies.begun.wait()
        threading.Timer(0.2, copies.go_on.set).start()
        saver.remove(1)
        assert isinstance(drained.exception(), CancelledError)
    assert not [*far.glob("step-*/manifest.json")]
    assert Checkpointer(near, drain_to=far).steps() == []


@pytest.mark.parametrize("marks", ["manifest.json", "*/manifest.json"])
def test_a_drain_of_several_checkpoints_keeps_the_marks_of_those_that_are_unchanged(
    tmp_path, marks
):
    """Or a machine that is lost meanwhile would take all of an archive with it."""
    source, target = tmp_path / "run", tmp_path / "archive"
    for step in ("step-1", "step-2"):
        (source / step).mkdir(parents=True)
        for name in ("manifest.json", "tensors"):
            (source / step / name).write_text(name)
    (source / "log").write_text("one")
    drain(source, target, last=(marks,)).result()
    (source / "log").write_text("other")
    (source / "step-2" / "tensors").write_text("other")
    place = _places.Folder(str(target))
    work = _draining.Drain(source, place, (marks,), 0, None)
    removed = []
    place.remove = lambda name, check: removed.append(name)
    work.start()
    work.future.result()
    assert removed == ["step-2/manifest.json"]


def test_a_mark_that_the_source_lacks_goes_with_the_first_file_that_is_replaced(tmp_path):
    """As a save of torch.distributed.checkpoint leaves it that was killed."""
    source, target = tmp_path / "checkpoint", tmp_path / "far"
    source.mkdir()
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp"):
        (source / name).write_text("one")
    drain(source, target).result()
    (source / ".metadata").unlink()
    drain(source, target).result()
    assert (target / ".metadata").exists()  # nothing was replaced
    (source / "__0_0.distcp").write_text("two")
    drain(source, target).result()
    assert not (target / ".metadata").exists()


@pytest.fixture
def full_at(monkeypatch):
    """Let the drive be full when a copied file whose name ends so would get it."""
    commit = _places._FolderWriter.commit

    def full_at(end):
        def failing(writer):
            if writer.target.endswith(end):
                raise OSError(errno.ENOSPC, "full")
            commit(writer)

        monkeypatch.setattr(_places._FolderWriter, "commit", failing)

    return full_at


def test_a_step_is_never_a_mixture_in_the_target(tmp_path, full_at):
    source, target = tmp_path / "run", tmp_path / "far"
    with Checkpointer(source, drain_to=target) as checkpointer:
        checkpointer.save(1, {"weights": np.zeros(1000), "epoch": 1})
    with Checkpointer(source) as checkpointer:
        checkpointer.save(1, {"weights": np.ones(1000), "epoch": 2})
    full_at("tensors.safetensors")
    with pytest.raises(OSError, match="full"):
        drain(source / "step-1", target / "step-1").result()
    assert Checkpointer(target).steps() == []


def test_a_model_that_a_save_has_left_half_replaced_takes_no_place_of_a_copy(
    tmp_path,
):
    source, target = tmp_path / "model", tmp_path / "copy"
    source.mkdir()
    for name in ("a.safetensors", "model.safetensors.index.json"):
        (source / name).write_text("old")
    drain(source, target).result()
    (source / "a.safetensors").write_text("new")
    (source / "model.safetensors.index.json").write_bytes(REPLACING)
    with pytest.raises(CheckpointError, match="may be of two models"):
        drain(source, target)
    assert {path.read_text() for path in target.iterdir()} == {"old"}


def test_a_target_of_links_is_no_mixture_when_a_drain_is_killed(tmp_path, full_at):
    """As the cache of Hugging Face's hub has a model's files."""
    source, blobs, target = (tmp_path / n for n in ("new", "blobs", "target"))
    names = ("a.safetensors", "b.safetensors", "model.safetensors.index.json")
    for folder in (source, blobs, target):
        folder.mkdir()
    for name in names:
        (source / name).write_text("new")
        (blobs / name).write_text("old")
        (target / name).symlink_to(blobs / name)
    full_at("b.safetensors")
    with pytest.raises(OSError, match="full"):
        drain(source, target).result()
    assert (target / names[-1]).read_bytes() == REPLACING
    assert {(blobs / name).read_text() for name in names} == {"old"}


@pytest.mark.parametrize(
    ("index", "file"),
    [
        ("model.safetensors.index.json", "model-1.safetensors"),
        ("diffusion_pytorch_model.safetensors.index.json", "part-1.safetensors"),
        ("pytorch_model.bin.index.json", "pytorch_model-1.bin"),
        ("manifest.json", "tree.json"),
        ("__0.metadata", "__0_0.distcp"),
    ],
)
def test_a_target_keeps_no_mark_of_an_older_copy_that_the_source_lacks(
    tmp_path, index, file
):
    """As save_sharded() or another drain leave it that were killed."""
    source, target = tmp_path / "model", tmp_path / "far"
    source.mkdir()
    for name in (index, file):
        (source / name).write_text("one")
    drain(source, target).result()
    (source / index).unlink()
    (source / file).write_text("two")
    drain(source, target).result()
    assert not (target / index).exists()


@pytest.mark.parametrize("far", ["far", "memory://far"])
def test_a_single_rank_is_not_copied_over_a_checkpoint_of_all(tmp_path, far):
    """Readers would take that one."""
    fsspec.filesystem("memory").store.clear()
    target = far if "://" in far else tmp_path / far
    for source, mark in (("all", ".metadata"), ("one", "__0.metadata")):
        (tmp_path / source).mkdir()
        for name in (mark, f"__0_{source}.distcp"):
            (tmp_path / source / name).write_text(source)
    drain(tmp_path / "all", target).result()
    with pytest.raises(FileExistsError, match="would be loaded first"):
        drain(tmp_path / "one", target).result()
    assert drain(tmp_path / "all", target).result() == 6
    # One folder may have had both.
    for name in os.listdir(tmp_path / "one"):
        shutil.copy(tmp_path / "one" / name, tmp_path / "all")
    assert drain(tmp_path / "all", target).result() == 12
    fsspec.filesystem("memory").store.clear()


@pytest.mark.parametrize("mark", [".metadata", "model.safetensors.index.json"])
def test_a_mark_stays_whose_files_are_not_replaced(tmp_path, mark):
    source, target = tmp_path / "results", tmp_path / "far"
    source.mkdir()
    target.mkdir()
    (target / mark).write_text("of a checkpoint")
    for loss in ("1", "2"):
        (source / "metrics.json").write_text(loss)
        drain(source, target).result()
    assert (target / mark).exists()


def test_names_that_are_one_in_the_target_are_an_error(tmp_path, monkeypatch):
    # At once, the one may find the other's bytes, which is an error of its own.
    monkeypatch.setattr(_draining, "FILES", 1)
    memory = pytest.importorskip("fsspec.implementations.memory")

    class Folding(memory.MemoryFileSystem):
        """As SMB and exFAT, it does not tell names apart by their case."""

        protocol = "folding"
        store, pseudo_dirs = {}, [""]

        @classmethod
        def _strip_protocol(cls, path):
            return super()._strip_protocol(path.replace("folding:", "memory:")).lower()

    fsspec.register_implementation("folding", Folding, clobber=True)
    for name, text in ("W", "one"), ("w", "two"), (".metadata", "all"):
        (tmp_path / name).write_text(text)
    copying = drain(tmp_path, "folding://run")
    with pytest.raises(FileExistsError, match="'W' and 'w' have one name there"):
        copying.result()
    assert Folding().ls("/run", detail=False) == ["/run/w"]
    # Where they are told apart, nothing is wrong with them.
    assert drain(tmp_path, "memory://alike").result() == 9
    fsspec.filesystem("memory").store.clear()


def test_a_drain_that_replaced_nothing_leaves_an_older_copy_complete(tmp_path, monkeypatch):
    source, target = tmp_path / "checkpoint", tmp_path / "far"
    source.mkdir()
    for name in (".metadata", "__0_0.distcp"):
        (source / name).write_text("one")
    drain(source, target).result()
    (source / "__0_0.distcp").write_text("two")

    def full(*_):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(_places._FolderWriter, "write", full)
    with pytest.raises(OSError, match="full"):
        drain(source, target).result()
    assert {path.name: path.read_text() for path in target.iterdir()} == {
        ".metadata": "one",
        "__0_0.distcp": "one",
    }


def test_an_error_of_a_package_with_a_constructor_of_its_own_disturbs_no_save(
    tmp_path, monkeypatch
):
    """As that of paramiko, when a server of SFTP does not answer."""

    class UnreachableError(OSError):
        def __init__(self, errors):
            super().__init__(None, f"cannot connect to {errors.keys()}")

    def unreachable(*_):
        raise UnreachableError({"host": 22})

    root = tmp_path / "run"
    Checkpointer(root).save(1, {"epoch": 1})
    monkeypatch.setattr(fsspec.core, "url_to_fs", unreachable)
    checkpointer = Checkpointer(root, drain_to="memory://run")
    with pytest.warns(RuntimeWarning, match="cannot be listed: .*host"):
        assert checkpointer.restore() == {"epoch": 1}
    with pytest.warns(RuntimeWarning, match="cannot be listed: .*host"):
        checkpointer.save(2, {"epoch": 2})
    with pytest.raises(UnreachableError):
        checkpointer.close()
    with pytest.warns(RuntimeWarning), pytest.raises(OSError, match="cannot be listed"):
        Checkpointer(tmp_path / "none", drain_to="memory://run").restore()


def test_a_store_with_an_error_of_its_own_for_a_missing_file_is_copied_to(
    source, monkeypatch
):
    """As FTP, of which fsspec passes the error on."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    remove = type(system).rm_file

    def rm_file(system, path):
        if not system.exists(path):
            raise ValueError("550 No such file or directory.")
        remove(system, path)

    monkeypatch.setattr(type(system), "rm_file", rm_file)
    (source / ".metadata").unlink()
    drain(source, "memory://odd").result()
    (source / "__0_0.distcp").write_bytes(b"of the second save")
    drain(source, "memory://odd").result()
    assert system.cat("/odd/__0_0.distcp") == b"of the second save"
    system.store.clear()


@pytest.fixture
def ftp(tmp_path):
    """A server, as the URL of a folder, the folder, and what it refuses once."""
    authorizers = pytest.importorskip("pyftpdlib.authorizers")
    from pyftpdlib.handlers import FTPHandler
    from pyftpdlib.servers import FTPServer

    home, refused, ended = tmp_path / "home", [], threading.Event()
    home.mkdir()

    class Handler(FTPHandler):
        authorizer = authorizers.DummyAuthorizer()
        authorizer.add_user("user", "password", str(home), perm="elradfmwMT")

        def pre_process_command(self, line, command, argument):
            if command == "MLSD" and refused and argument.endswith(refused[0]):
                refused.clear()
                self.respond("426 Connection closed; transfer aborted.")
            else:
                super().pre_process_command(line, command, argument)

    server = FTPServer(("127.0.0.1", 0), Handler)

    def serve():
        while not ended.is_set():
            server.serve_forever(timeout=0.01, blocking=False)

    thread = threading.Thread(target=serve)
    thread.start()
    port = server.socket.getsockname()[1]
    yield f"ftp://user:password@127.0.0.1:{port}/run", home / "run", refused
    ended.set()
    thread.join()
    server.close_all()


def test_a_list_that_ftp_has_not_sent_is_no_empty_folder(tmp_path, ftp):
    """fsspec returns one."""
    far, folder, refused = ftp
    saver = Checkpointer(tmp_path / "near", drain_to=far)
    for step in (1, 2):
        saver.save(step, step)
        saver.drained.result()
    reader = Checkpointer(tmp_path / "elsewhere", drain_to=far)
    for calls, end in (
        ((reader.restore, reader.steps, lambda: reader.restore(2)), "run/step-2"),
        ((lambda: reader.restore(1), lambda: saver.remove(1)), "run/step-1"),
    ):
        for call in calls:
            refused.append(end)
            with pytest.raises(OSError, match="has not listed it") as told:
                call()
            assert told.value.errno == errno.EREMOTEIO
    # As if it could not be written, which is only logged.
    (folder / ".nvmeio-latest").unlink()
    for call in (reader.restore, reader.latest):
        refused.append("run/step-2")
        with pytest.raises(OSError, match="has not listed it"):
            call()
    assert (reader.restore(), reader.steps()) == (2, [1, 2])
    saver.remove(1)
    assert not (folder / "step-1").exists()
    saver.close()


def test_an_error_of_ftp_that_passes_does_not_mean_that_there_is_no_checkpoint(
    tmp_path, monkeypatch
):
    """fsspec turns each into FileNotFoundError."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    with Checkpointer(tmp_path / "run", drain_to="memory://ftp") as checkpointer:
        checkpointer.save(1, {"epoch": 1})

    def refuse(_, path, *args, **options):
        try:
            raise ftplib.error_temp("425 Can't open data connection.")
        except ftplib.Error:
            try:
                next(iter(()))
            except StopIteration as error:
                raise FileNotFoundError(path) from error

    elsewhere = Checkpointer(tmp_path / "elsewhere", drain_to="memory://ftp")
    with monkeypatch.context() as patch:
        for name in ("ls", "info", "cat_file"):
            patch.setattr(type(system), name, refuse)
        with pytest.warns(RuntimeWarning), pytest.raises(OSError, match="425") as told:
            elsewhere.restore()
        assert not isinstance(told.value, FileNotFoundError)
    assert elsewhere.restore() == {"epoch": 1}
    system.store.clear()


@pytest.mark.parametrize(
    "said", ["501 No such directory.", '500 Command "MLSD" not understood.']
)
def test_a_server_of_ftp_that_refuses_mlsd_is_copied_to(tmp_path, monkeypatch, said):
    """fsspec then asks by LIST, whose answer counts: pyftpdlib's, and that of IIS."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    for name in ("ls", "info", "cat_file"):
        real = getattr(type(system), name)

        def act(*args, real=real, **options):
            try:
                return real(*args, **options)
            except FileNotFoundError as error:
                missing = error
            try:
                raise ftplib.error_perm(said)
            except ftplib.error_perm:
                try:
                    raise ftplib.error_perm("550 No such file or directory.")
                except ftplib.Error:
                    raise FileNotFoundError(str(missing)) from None

        monkeypatch.setattr(type(system), name, act)
    with Checkpointer(tmp_path / "run", drain_to="memory://ftp") as checkpointer:
        with pytest.raises(FileNotFoundError, match="no checkpoint"):
            checkpointer.restore()
        checkpointer.save(1, {"epoch": 1})
    assert Checkpointer(tmp_path / "b", drain_to="memory://ftp").restore() == {"epoch": 1}
    system.store.clear()


def test_a_store_whose_errors_are_of_a_class_of_their_own_is_copied_to(
    tmp_path, monkeypatch
):
    """As SMB's, which have the errno ENOENT, but are no FileNotFoundError."""

    class SMBError(OSError):
        pass

    system = fsspec.filesystem("memory")
    system.store.clear()
    for name in ("ls", "info", "cat_file", "rm_file"):
        real = getattr(type(system), name)

        def act(*args, real=real, **options):
            try:
                return real(*args, **options)
            except FileNotFoundError:
                raise SMBError(errno.ENOENT, "no such file") from None

        monkeypatch.setattr(type(system), name, act)
    with Checkpointer(tmp_path / "run", keep=1, drain_to="memory://smb") as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"epoch": step})
            checkpointer.drained.result()
    elsewhere = Checkpointer(tmp_path / "elsewhere", drain_to="memory://smb")
    assert elsewhere.restore() == {"epoch": 2}
    system.store.clear()


def test_a_changed_log_does_not_take_the_mark_of_a_checkpoint_beside_it_away(tmp_path):
    """Or a machine that is lost meanwhile would take the only archived one with it."""
    source, target = tmp_path / "run", tmp_path / "archive"
    with Checkpointer(source) as checkpointer:
        checkpointer.save(1, {"epoch": 1})
    (source / "log").write_text("one")
    drain(source, target).result()
    (source / "log").write_text("two")
    place = _places.Folder(str(target))
    work = _draining.Drain(source, place, _draining._LAST, 0, None)
    removed = []
    place.remove = lambda name, check: removed.append(name)
    work.start()
    work.future.result()
    assert removed == []


def test_an_upload_that_fails_leaves_an_older_copy_complete(source, monkeypatch):
    """S3 and Google's store replace an object once all of it is there."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    drain(source, "memory://whole").result()
    (source / "__0_0.distcp").write_bytes(b"of the second save")

    def refuse(*_):
        raise OSError(errno.EIO, "no")

    monkeypatch.setattr(_places, "_ATOMIC", {"memory"})
    monkeypatch.setattr(_places._RemoteWriter, "write", refuse)
    with pytest.raises(OSError, match="no"):
        drain(source, "memory://whole", retries=0).result()
    assert system.cat("/whole/.metadata") == FILES[".metadata"]
    monkeypatch.undo()
    drain(source, "memory://whole").result()
    assert system.cat("/whole/__0_0.distcp") == b"of the second save"
    system.store.clear()


def test_a_missing_file_of_the_client_is_not_no_checkpoint(tmp_path, monkeypatch):
    """As a token, or the program that gives S3's credentials, of which fsspec says so."""
    system = fsspec.get_filesystem_class("memory")
    with Checkpointer(tmp_path / "run", drain_to="memory://token/run") as checkpointer:
        checkpointer.save(1, {"epoch": 1})

    client = {"__name__": "botocore.credentials"}
    exec("def failing(*_, **__): open('/nowhere/token')", client)

    elsewhere = Checkpointer(tmp_path / "elsewhere", drain_to="memory://token/run")
    monkeypatch.setattr(system, "ls", client["failing"])
    for call in (elsewhere.restore, elsewhere.latest, elsewhere.steps):
        with pytest.warns(RuntimeWarning), pytest.raises(OSError, match="token") as caught:
            call()
        assert not isinstance(caught.value, FileNotFoundError)


def test_a_key_that_this_host_lacks_is_not_a_missing_step(tmp_path, monkeypatch):
    with Checkpointer(tmp_path / "run", drain_to="memory://key/run") as checkpointer:
        checkpointer.save(1, {"epoch": 1})

    def connect(*_, **__):
        (tmp_path / "key").read_text()

    monkeypatch.setattr(fsspec.core, "url_to_fs", connect)
    elsewhere = Checkpointer(tmp_path / "elsewhere", drain_to="memory://key/run")
    with pytest.raises(OSError, match="key") as caught:
        elsewhere.restore(1)
    assert not isinstance(caught.value, FileNotFoundError)
