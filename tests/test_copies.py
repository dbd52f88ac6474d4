"""Checkpointers beside strangers' folders, other writers, and damaged or far copies."""

import contextlib
import errno
import fcntl
import functools
import gc
import os
import re
import shutil
import signal
import stat
import sys
import tempfile
import threading
import warnings
import weakref
from concurrent.futures import CancelledError
from pathlib import Path

import numpy as np
import pytest

from children import Child
from mounts import SIZES_MIN
from nvmeio._files import locks
from nvmeio._publish.folders import Unfinished
from nvmeio._publish.names import _host, _start_of, temporary_name
from nvmeio.checkpoint import (
    Checkpointer,
    CheckpointError,
    _draining,
    _places,
    _roots,
    _stores,
    drain,
)
from nvmeio.checkpoint._draining import Drain
from nvmeio.checkpoint._futures import DRAINING, SAVING
from nvmeio.checkpoint._places import Connection, Remote
from nvmeio.checkpoint._restoring import Held
from nvmeio.checkpoint._roots import Root
from nvmeio.checkpoint._saving import Plan
from nvmeio.safetensors import save_sharded

fsspec = pytest.importorskip("fsspec")
from fsspec.implementations.memory import MemoryFileSystem  # noqa: E402

FILES = ("manifest.json", "tree.json", "tensors.safetensors")


class Shelf(MemoryFileSystem):
    """An object store whose calls a test can watch."""

    protocol = "shelf"
    cachable = False
    store: dict = {}  # noqa: RUF012
    pseudo_dirs: list = [""]  # noqa: RUF012
    watch = None

    @classmethod
    def _strip_protocol(cls, path):
        path = path.removeprefix("shelf://").strip("/")
        return f"/{path}" if path else ""

    def _watched(self, name, path):
        if Shelf.watch is not None:
            Shelf.watch(name, path)

    def _open(self, path, mode="rb", **options):
        self._watched("open", path)
        return super()._open(path, mode, **options)

    def ls(self, path, detail=True, **options):
        self._watched("ls", path)
        return super().ls(path, detail, **options)

    def rm_file(self, path):
        self._watched("rm_file", path)
        super().rm_file(path)


fsspec.register_implementation("shelf", Shelf, clobber=True)


@pytest.fixture(autouse=True)
def shelf():
    """The store of the URL shelf://, which is empty."""
    Shelf.store.clear()
    yield Shelf
    Shelf.watch = None
    Shelf.store.clear()


@pytest.fixture(params=["folder", "store"])
def far(request, tmp_path):
    """Where the copies are."""
    return tmp_path / "far" if request.param == "folder" else "shelf://bucket/run"


def write(far, name, data):
    """Write a file below the target of copies."""
    if isinstance(far, str):
        Shelf.store.clear() if data is None else Shelf().pipe_file(f"{far}/{name}", data)
        return
    (far / name).parent.mkdir(parents=True, exist_ok=True)
    (far / name).write_bytes(data)


def contents(far):
    """Return the files below a folder or URL, by relative path, without the lock's time."""
    if isinstance(far, str):
        root = Shelf._strip_protocol(far)
        system = Shelf()
        return {os.path.relpath(p, root): system.cat_file(p) for p in system.find(root)}
    files = [p for p in far.rglob("*") if p.is_file() and p.name != ".nvmeio-lock"]
    return {str(p.relative_to(far)): p.read_bytes() for p in files}


def file_of(far, step, name):
    """Return a function that removes a file of a copy."""
    (found,) = (
        each
        for each in contents(far)
        if each.startswith(f"step-{step}/") and each.endswith(name)
    )
    if isinstance(far, str):
        return lambda: Shelf().rm_file(f"{far}/{found}")
    return (far / found).unlink


def save(root, far, *steps, **options):
    """Save and copy steps, whose state is their number."""
    with Checkpointer(root, drain_to=far, **options) as saver:
        for step in steps:
            saver.save(step, {"w": np.full(5000, step)})
            if far is not None:
                saver.drained.result()


def value(found):
    """Return the number of a state, all of whose parts must agree."""
    (one,) = set(found["w"].tolist())
    return one


# Strangers


STRANGERS = {
    "dcp": ({".metadata": b"x", "__0_0.distcp": b"y"}, "torch.distributed.checkpoint"),
    "notes": ({"notes/precious.txt": b"x"}, "it has notes"),
    "model": ({"tensors.safetensors": b"x", "config.json": b"y"}, "model files"),
    "lone model": ({"tensors.safetensors": b"x"}, "model files"),
    "other manifest": ({"manifest.json": b'{"format": "web"}'}, "it has manifest.json"),
    "no file": (
        {
            "manifest.json": b'{"format": "nvmeio-checkpoint-2"}',
            "tensors.safetensors/precious.txt": b"x",
        },
        r"besides .* it has tensors\.safetensors",
    ),
    "step and more": ({".metadata": b"x", "tree.json": b""}, "torch.distributed"),
}


@pytest.fixture(params=STRANGERS)
def stranger(request):
    """Files of another program, and what the error says about them."""
    return STRANGERS[request.param]


@pytest.mark.parametrize("way", ["save", "save_async"])
def test_a_strangers_folder_is_not_replaced_pruned_or_removed(tmp_path, stranger, way):
    root = tmp_path / "run"
    files, words = stranger
    for name, data in files.items():
        write(root, f"step-2/{name}", data)
    with Checkpointer(root, keep=1) as saver:
        for step in (1, 3, 4):
            saver.save(step, {"w": np.full(5, step)})
        with pytest.raises(FileExistsError, match=words) as told:
            getattr(saver, way)(2, {"w": np.zeros(5)})
        assert told.value.filename == str(root / "step-2")
        with pytest.raises(FileExistsError, match=f"is not removed.*{words}"):
            saver.remove(2)
        assert saver.prune() == saver.cleanup() == []
    assert contents(root / "step-2") == files


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes names of other users")
@pytest.mark.parametrize(
    ("mode", "name", "own_mode", "words"),
    [
        (0o1777, "step-99", 0o40000, ["step 99 is skipped: .* is another user's"]),
        (0o777, "step-99", 0o40000, ["step 99 is skipped: .* is another user's"]),
        (0o1777, ".nvmeio-latest", 0, []),
        (0o1777, ".nvmeio-latest", 0o644, []),
        # As of a process of this host that has died.
        (0o1777, f".step-9.{_host()}-{1 << 30}-1-01234567.nvmeio-tmp", 0o40000, []),
        (0o777, f".step-9.{_host()}-{1 << 30}-1-01234567.nvmeio-tmp", 0o40000, []),
    ],
    ids=["step", "shared step", "newest", "readable", "unfinished", "shared unfinished"],
)
def test_what_another_user_has_planted_is_passed_over(
    tmp_path, mode, name, own_mode, words
):
    """In a folder such as /tmp, where this user cannot remove it."""
    # As root, so that nothing need be imported later.
    save(tmp_path, tmp_path / "far", 1)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, mode)
        planted = Path(folder, name)
        is_folder = stat.S_ISDIR(own_mode)
        planted.mkdir() if is_folder else planted.write_bytes(b"step-99\n")
        planted.chmod(stat.S_IMODE(own_mode))
        os.chown(planted, 1001, 1001)
        os.seteuid(1002)
        try:
            with Checkpointer(folder, keep=1) as saver:
                for step in (1, 2):
                    saver.save(step, step)
                with warnings.catch_warnings(record=True) as told:
                    warnings.simplefilter("always")
                    assert saver.restore() == saver.latest() == 2
                assert len(told) == len(words)
                assert all(map(re.match, words, (str(each.message) for each in told)))
                assert saver.prune() == saver.cleanup() == []
                assert saver.steps() == [2]
        finally:
            os.seteuid(0)
        found = planted.stat()
        assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (1001, own_mode & 0o777)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes names of other users")
@pytest.mark.parametrize("mode", [0, 0o666])
def test_the_owner_of_a_lock_in_the_way_is_named(tmp_path, mode):
    save(tmp_path, None, 1)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o1777)
        lock = Path(folder, ".nvmeio-lock")
        lock.touch()
        lock.chmod(mode)
        os.chown(lock, 1001, 1001)
        with lock.open() as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            os.seteuid(1002)
            try:
                with pytest.raises(OSError, match="belongs to user 1001: if"):
                    Checkpointer(folder).save(1, 1)
            finally:
                os.seteuid(0)


LOOKS = {
    "restore": lambda reader: reader.restore()["step"],
    "latest": lambda reader: reader.latest(),
    "agreed_step": lambda reader: reader.agreed_step(),
    "metadata": lambda reader: reader.metadata()["step"],
    "steps": lambda reader: max(reader.steps()),
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("older", ["copy", "kept", "kept copy"])
def test_no_older_step_takes_the_place_of_one_that_was_pruned(
    tmp_path, monkeypatch, look, older
):
    """A newer one was saved before, after the list that is being read."""
    root, far = tmp_path / "run", tmp_path / "far"
    options = {"keep_every": 100} if "kept" in older else {}
    copies = {"drain_to": far} if "copy" in older else {}

    def save(saver, step):
        saver.save(step, {"step": step}, metadata={"step": step})
        if saver.drained is not None:
            saver.drained.result()

    with Checkpointer(root, keep=1, **options, **copies) as saver:
        save(saver, 0)
    copies_of_saver = copies if older == "kept copy" else {}
    with Checkpointer(root, keep=1, **options, **copies_of_saver) as saver:
        save(saver, 1)
        of_reader = tmp_path / "empty" if older == "kept copy" else root
        reader, list_of, done = Checkpointer(of_reader, **copies), Root.steps, []

        def old_list(self):
            found = list_of(self)
            listed = far if older == "kept copy" else root
            if not done and self.where == str(listed):
                done.append(found)
                save(saver, 2)
            return found

        monkeypatch.setattr(Root, "steps", old_list)
        assert LOOKS[look](reader) == 2
        assert 1 in done[0]
        assert not (root / "step-1").exists()


@pytest.mark.parametrize("contents", [b"precious", b"", bytes(4000), b"processes: 3\n"])
@pytest.mark.parametrize("link", [os.symlink, os.link])
@pytest.mark.parametrize("kind", ["root", "model"])
def test_a_file_that_is_linked_in_the_place_of_a_lock_stays_as_it_is(
    tmp_path, kind, link, contents
):
    """Somebody may write in the folder, and would have another write to it, or share it."""
    mine = tmp_path / "mine"
    mine.write_bytes(contents)
    mine.chmod(0o640)
    folder = tmp_path / "folder"
    folder.mkdir()
    folder.chmod(0o777)
    if kind == "root":
        link(mine, folder / ".nvmeio-lock")
        act = functools.partial(save, folder, None, 1)
    else:
        link(mine, folder / ".nvmeio-save")
        tensors = {name: np.ones(9) for name in "ab"}
        act = functools.partial(save_sharded, tensors, folder, 72)
    with pytest.raises(OSError, match=r"it is not a file of|Too many levels"):
        act()
    assert mine.read_bytes() == contents
    assert stat.S_IMODE(mine.stat().st_mode) == 0o640
    assert os.listdir(folder) == [f".nvmeio-{'lock' if kind == 'root' else 'save'}"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes names of other users")
def test_steps_of_another_user_are_neither_replaced_nor_removed(tmp_path):
    """In a folder such as /tmp, not even by root; one that can be read is restored."""
    tmp_path.chmod(0o1777)
    save(tmp_path, None, 1, 2, 20)
    for path in (*tmp_path.glob("step-*"), *tmp_path.glob("step-*/*")):
        os.chown(path, 1001, 1001)
    with Checkpointer(tmp_path, keep=1) as saver:
        assert value(saver.restore()) == 20
        for refused in (lambda: saver.save(20, {}), lambda: saver.remove(20)):
            with pytest.raises(FileExistsError, match="it is another user's"):
                refused()
        with pytest.warns(RuntimeWarning, match="restore\\(\\) reads step 20"):
            saver.save(3, 3)
        saver.save(4, 4)
        assert saver.steps() == [1, 2, 4, 20]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes names of other users")
def test_a_step_whose_files_may_not_be_removed_stays(tmp_path):
    """In the folder of a group, whose members save in turn without write permissions."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o777)
        save(Path(folder), None, 1)
        Path(folder, ".nvmeio-lock").unlink()
        for path in (*Path(folder).iterdir(), *Path(folder).glob("step-1/*")):
            os.chown(path, 1001, 1001)
            path.chmod(0o755 if path.is_dir() else 0o644)
        os.seteuid(1002)
        try:
            with Checkpointer(folder, keep=1) as saver:
                words = "not removed: .*no permission to remove its files: .*step-1"
                with pytest.warns(RuntimeWarning, match=words):
                    saver.save(2, 2)
                for refused in (lambda: saver.save(1, {}), lambda: saver.remove(1)):
                    with pytest.raises(PermissionError, match="no permission to remove"):
                        refused()
        finally:
            os.seteuid(0)
        names = [".nvmeio-latest", ".nvmeio-lock", "step-1", "step-2"]
        assert sorted(os.listdir(folder)) == names
        assert Path(folder, ".nvmeio-latest").read_text() == "step-2\n"
        assert value(Checkpointer(folder).restore(1)) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes names of other users")
@pytest.mark.parametrize("name", FILES)
def test_a_step_with_files_that_cannot_be_read_is_none(tmp_path, name):
    save(tmp_path / "near", None, 1)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o1777)
        planted = Path(folder, "step-99")
        shutil.copytree(tmp_path / "near" / "step-1", planted)
        planted.chmod(0o755)
        (planted / name).chmod(0)
        for path in (planted, *planted.iterdir()):
            os.chown(path, 1001, 1001)
        os.seteuid(1002)
        try:
            with Checkpointer(folder) as saver:
                saver.save(2, 2)
                assert (saver.latest(), saver.steps()) == (2, [2])
                with pytest.warns(RuntimeWarning, match="step 99 is skipped"):
                    assert saver.restore() == 2
        finally:
            os.seteuid(0)


def test_unfinished_files_that_are_no_steps_stay(tmp_path):
    """And those of a process of this host that runs."""
    of_us = temporary_name("step-9").split(".")[2]
    of_one = f"{_host()}-1-{_start_of(1)}-01234567"
    stay = {f".step-5.npy.{of_us}.nvmeio-tmp", f".step-5.{of_one}.nvmeio-tmp"}
    stay.add(f"..nvmeio-latest.npy.{of_us}.nvmeio-tmp")
    goes = {".step-5.elsewhere-1-1-01234567.nvmeio-tmp", f".step-9.{of_us}.nvmeio-tmp"}
    for name in stay | goes:
        (tmp_path / name).mkdir()
    save(tmp_path, None, 1)
    assert {each for each in os.listdir(tmp_path) if each.endswith("-tmp")} == stay


def test_a_root_that_is_not_mounted_is_not_empty(tmp_path):
    """A program that begins anew where there is no checkpoint must not do so then."""
    (tmp_path / "root").symlink_to("elsewhere")
    saver = Checkpointer(tmp_path / "root")
    for look in (saver.latest, saver.steps, saver.restore):
        with pytest.raises(OSError, match="which does not exist") as told:
            look()
        assert not isinstance(told.value, FileNotFoundError)
    save(tmp_path / "near", None, 1)
    (tmp_path / "new").mkdir()
    saver = Checkpointer(tmp_path / "new", drain_to=tmp_path / "root")
    with (
        pytest.warns(RuntimeWarning, match="which does not exist"),
        pytest.raises(OSError, match="which does not exist"),
    ):
        saver.restore()


@pytest.mark.parametrize("name", ["step-3", "step-3/copies", "file:{}/step-3"])
def test_a_target_in_a_step_is_refused(tmp_path, name):
    target = name.format(tmp_path) if "{" in name else tmp_path / name
    with pytest.raises(ValueError, match="in a step of the root"):
        Checkpointer(tmp_path, drain_to=target)


@pytest.mark.parametrize("target", ["file:x", "file://localhost/x", "local:x", "file://"])
def test_a_path_in_a_url_must_be_absolute(tmp_path, target):
    with pytest.raises(ValueError, match="must be absolute"):
        Checkpointer(tmp_path, drain_to=target)


def test_unfinished_uploads_of_the_dead_are_pruned(tmp_path):
    """Those of this host, older than the kept steps; none of others or of the living."""
    far, dead = "shelf://bucket/run", f"1.{_host()}-{1 << 30}-1-01234567"
    living = temporary_name("1")[1:].removesuffix(".nvmeio-tmp")
    theirs = {
        "step-1/1.elsewhere-1-1-01234567/tensors.safetensors",
        "step-1/notes.txt",
        f"step-1/{dead}/notes.txt",
        f"step-2/{living}/tensors.safetensors",
        f"step-99/{dead}/tensors.safetensors",
    }
    gone = {f"step-{n}/{dead}/{name}" for n in (1, 2, 3) for name in FILES[1:]}
    for name in theirs | gone:
        write(far, name, b"x")
    save(tmp_path, far, 5, 6, keep=1)
    left = {name for name in contents(far) if not name.startswith(("step-6/", ".nvmeio"))}
    assert left == theirs


@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_is_no_folder_is_not_replaced(tmp_path, kind):
    (tmp_path / "elsewhere").mkdir()
    path = tmp_path / "step-2"
    path.write_bytes(b"x") if kind == "file" else path.symlink_to("elsewhere")
    words = "it is not a folder" if kind == "file" else "it is a symbolic link"
    with Checkpointer(tmp_path) as saver, pytest.raises(FileExistsError, match=words):
        saver.save(2, {})
    assert path.is_symlink() == (kind == "link")


def test_a_step_with_a_strangers_file_stays(tmp_path):
    save(tmp_path / "run", tmp_path / "far", 1)
    for place in ("run", "far"):
        (tmp_path / place / "step-1" / "notes.txt").write_text("precious")
    save(tmp_path / "run", tmp_path / "far", 2, 3, keep=1)
    for place in ("run", "far"):
        assert sorted(p.name for p in (tmp_path / place).glob("step*")) == [
            "step-1",
            "step-3",
        ]
        with (
            Checkpointer(tmp_path / place) as saver,
            pytest.raises(FileExistsError, match=r"besides .* it has notes\.txt"),
        ):
            saver.save(1, {})


def test_copies_leave_strangers_alone(tmp_path, far, stranger):
    files, words = stranger
    theirs = {f"step-{n}/{name}": files[name] for n in (5, 10, 99) for name in files}
    theirs["step-10.backup/x"] = theirs["notes.txt"] = b"x"
    for name, data in theirs.items():
        write(far, name, data)
    save(tmp_path / "a", far, 15, 16, keep=1)
    save(tmp_path / "b", far, 17, keep=None)
    assert theirs.items() <= contents(far).items()
    if isinstance(far, str):
        # An object store has room for both, beside each other.
        with pytest.warns(RuntimeWarning, match=r"restore\(\) reads step 17"):
            save(tmp_path / "c", far, 10)
        new = Checkpointer(tmp_path / "new", drain_to=far)
        assert new.steps() == [10, 16, 17]
        new.remove(10)
        new.close()
        assert theirs.items() <= contents(far).items()
        return
    saver = Checkpointer(tmp_path / "c", drain_to=far)
    with pytest.warns(RuntimeWarning, match=r"restore\(\) reads step 17"):
        saver.save(10, {})
    with pytest.raises(FileExistsError, match=words):
        saver.drained.result()
    saver.close()  # the error was retrieved
    assert theirs.items() <= contents(far).items()


def test_a_folder_that_is_filled_during_a_save_comes_back(tmp_path, monkeypatch):
    target = tmp_path / "step-1"
    target.mkdir()
    replace = Unfinished._replace
    calls = []

    def late(self, path, name):
        if not calls:
            (target / "notes.txt").write_text("precious")
        calls.append(name)
        replace(self, path, name)

    monkeypatch.setattr(Unfinished, "_replace", late)
    with (
        Checkpointer(tmp_path) as saver,
        pytest.raises(FileExistsError, match=r"notes\.txt"),
    ):
        saver.save(1, {})
    assert contents(target) == {"notes.txt": b"precious"}
    assert not [*tmp_path.glob(".step*")]


@pytest.mark.parametrize("how", ["remove", "prune"])
def test_a_step_that_another_program_writes_to_is_not_removed(tmp_path, far, how):
    save(tmp_path / "near", far, 1, 2)
    before = contents(far)
    saver = Checkpointer(tmp_path / "near", keep=1, drain_to=far)
    target, lock = tmp_path / "near" / "step-1", saver._steps.root.lock
    require = lock.require

    def late():
        # After the step was looked at.
        (target / "notes.txt").write_text("precious")
        require()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lock, "require", late)
        if how == "remove":
            with pytest.raises(FileExistsError, match=r"not removed, .*notes\.txt"):
                saver.remove(1)
        else:
            assert saver.prune() == []
    assert contents(target)["notes.txt"] == b"precious"
    assert value(saver.restore(1)) == 1
    assert contents(far) == before


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["missing", "empty", "other bytes"])
def test_a_damaged_step_is_replaced(tmp_path, name, damage):
    save(tmp_path, tmp_path / "far", 1)
    for path in (tmp_path / "step-1" / name, tmp_path / "far" / "step-1" / name):
        path.unlink() if damage == "missing" else path.write_bytes(b"?" * len(damage))
    save(tmp_path, tmp_path / "far", 1)
    for place in (tmp_path, tmp_path / "far"):
        assert value(Checkpointer(place).restore()) == 1


# Damaged and unreachable copies


@pytest.mark.parametrize("name", FILES)
def test_a_copy_without_a_file_is_damaged(tmp_path, far, name):
    save(tmp_path / "near", far, 10, 20)
    file_of(far, 20, name)()
    new = Checkpointer(tmp_path / "new", drain_to=far)
    assert (new.steps(), new.latest()) == ([10], 10)
    with pytest.warns(RuntimeWarning, match=f"step 20 is skipped: .*{name}.* is missing"):
        assert value(new.restore()) == 10
    file_of(far, 10, name)()
    assert (new.steps(), new.latest()) == ([], None)
    with (
        pytest.warns(RuntimeWarning),
        pytest.raises(CheckpointError, match="all 2 checkpoints"),
    ):
        new.restore()


@pytest.mark.parametrize("error", [OSError(errno.EIO, "of one"), RuntimeError("of it")])
@pytest.mark.parametrize("here", ["absent", "damaged", "removed"])
@pytest.mark.parametrize("call", [("open", "/tensors.safetensors"), ("ls", "/step-2")])
def test_an_error_of_a_store_is_not_damage_of_its_copy(tmp_path, call, here, error):
    save(tmp_path / "run", "shelf://bucket/run", 1, 2)
    root = tmp_path / ("elsewhere" if here == "absent" else "run")
    if here == "damaged":
        os.truncate(root / "step-2/tensors.safetensors", 5)
    elif here == "removed":
        shutil.rmtree(root / "step-2")
    reader = Checkpointer(root, drain_to="shelf://bucket/run")

    def watch(name, path):
        if name == call[0] and path.endswith(call[1]):
            raise error

    Shelf.watch = watch
    for step in (None, 2):
        with pytest.raises(Exception, match="of ") as raised:
            reader.restore(step)
        if isinstance(error, OSError):
            assert raised.value.errno == errno.EREMOTEIO
            assert "the copy may be intact" in str(raised.value)
        else:
            assert raised.value is error
    Shelf.watch = None
    with contextlib.nullcontext() if here == "absent" else pytest.warns(RuntimeWarning):
        assert value(reader.restore()) == 2


def test_a_file_of_a_store_that_ends_early_is_not_damage(tmp_path, monkeypatch):
    save(tmp_path / "near", "shelf://bucket/run", 1, 2)
    read = Remote.read

    def end_early(place, name):
        pieces = read(place, name)
        return iter(()) if name.endswith("tensors.safetensors") else pieces

    monkeypatch.setattr(Remote, "read", end_early)
    far = Checkpointer(tmp_path / "far", drain_to="shelf://bucket/run")
    with pytest.raises(OSError, match=r"only 0 of .* bytes were sent"):
        far.restore()
    monkeypatch.undo()
    assert value(far.restore()) == 2


def test_a_store_that_does_not_answer_holds_up_no_other():
    answers, asked = threading.Event(), threading.Event()

    def connect():
        asked.set()
        answers.wait()
        return Shelf(), "/slow"

    slow = Remote(Connection(connect), "shelf://slow")
    waiting = threading.Thread(target=lambda: slow.path(""))
    waiting.start()
    asked.wait()
    other = Remote(Connection(lambda: (Shelf(), "/quick")), "shelf://quick")
    thread = threading.Thread(target=lambda: other.path(""))
    thread.start()
    thread.join(30)
    held_up = thread.is_alive()
    answers.set()
    waiting.join()
    assert not held_up


def test_a_file_that_vanishes_after_its_size_was_checked_is_damage(tmp_path, monkeypatch):
    with Checkpointer(tmp_path / "near") as saver:
        for step in (1, 2):
            saver.save(step, {"w": np.full(5, step)})
    restore = Held.restore

    def late(held, *values, **options):
        if held.step == 2:
            os.unlink(os.path.join(held.folder, "tensors.safetensors"))
        return restore(held, *values, **options)

    monkeypatch.setattr(Held, "restore", late)
    with pytest.warns(RuntimeWarning, match=r"step 2 is skipped: .*tensors.* is missing"):
        assert value(Checkpointer(tmp_path / "near").restore()) == 1


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("nobody answers"),
        PermissionError("no key"),
        TimeoutError(),
        RuntimeError("of a client"),
        OSError(5, "broken"),
    ],
)
def test_no_step_is_found_only_if_the_copies_were_listed(tmp_path, shelf, error):
    save(tmp_path / "near", "shelf://bucket/run", 1)

    def fail(name, path):
        raise error

    shelf.watch = fail
    near = Checkpointer(tmp_path / "near", drain_to="shelf://bucket/run")
    new = Checkpointer(tmp_path / "new", drain_to="shelf://bucket/run")
    for look, here in (("restore", None), ("latest", 1), ("steps", [1])):
        with pytest.warns(RuntimeWarning, match="cannot be listed") as warned:
            found = getattr(near, look)()
        assert warned[0].filename == __file__
        assert value(found) == 1 if look == "restore" else found == here
        with pytest.warns(RuntimeWarning), pytest.raises(OSError) as told:  # noqa: PT011
            getattr(new, look)()
        assert not isinstance(told.value, FileNotFoundError)
    shelf.watch = None
    assert new.latest() == 1
    empty = Checkpointer(tmp_path / "new", drain_to="shelf://other")
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        empty.restore()


# Two writers


def test_one_process_writes_to_a_folder_of_copies(tmp_path):
    far = tmp_path / "far"
    first = Checkpointer(tmp_path / "a", drain_to=far)
    first.save(100, {"w": np.full(5000, 1)})
    first.drained.result()
    second = Checkpointer(tmp_path / "b", drain_to=far)
    second.save(100, {"w": np.full(5000, 2)})
    with pytest.raises(BlockingIOError, match="another writes checkpoints here: process"):
        second.drained.result()
    second.close()
    first.close()
    assert value(Checkpointer(far).restore()) == 1


class Line(Shelf):
    """A store of one connection, as of SFTP: the answers of two threads would be mixed."""

    protocol = "line"

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("line://"))

    def __init__(self, **options):
        super().__init__(**options)
        self.thread = threading.get_ident()

    def _watched(self, name, path):
        assert threading.get_ident() == self.thread


def test_each_thread_has_its_own_connection_to_a_store(tmp_path):
    fsspec.register_implementation("line", Line, clobber=True)
    save(tmp_path / "near", "line://bucket/run", 1)
    near = Checkpointer(tmp_path / "other", drain_to="line://bucket/run")
    assert near.steps() == [1]
    near.restore()


class Closed(Shelf):
    """A store whose server closes the connections that are there."""

    protocol = "closed"
    cachable = True
    closed = 0

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("closed://"))

    def __init__(self, **options):
        super().__init__(**options)
        self.number = Closed.closed

    def _watched(self, name, path):
        if self.number < Closed.closed:
            raise OSError("Socket is closed")


# Those of async file systems, such as the package sshfs, are shared by all threads.
@pytest.mark.parametrize("shared", [False, True])
def test_a_connection_that_was_closed_is_made_anew(tmp_path, monkeypatch, shared):
    monkeypatch.setattr(Closed, "store", {})
    monkeypatch.setattr(Closed, "async_impl", shared)
    fsspec.register_implementation("closed", Closed, clobber=True)
    with Checkpointer(tmp_path / "near", keep=9, drain_to="closed://bucket/run") as saver:
        saver.save(1, {"w": np.full(5000, 1)})
        saver.drained.result()
        # As by a restart of the server.
        Closed.closed += 1
        saver.save(2, {"w": np.full(5000, 2)})
        # What each thread has connected for itself is new anyway.
        said = pytest.raises(OSError, match="Socket is closed")
        with said if shared else contextlib.nullcontext():
            saver.drained.result()
        saver.save(3, {"w": np.full(5000, 3)})
        saver.drained.result()
        # As after a while without work.
        Closed.closed += 1
        monkeypatch.setattr(_places, "IDLE_S_MAX", -1)
        saver.save(4, {"w": np.full(5000, 4)})
        saver.drained.result()
    other = Checkpointer(tmp_path / "other", drain_to="closed://bucket/run")
    assert other.steps() == ([1, 3, 4] if shared else [1, 2, 3, 4])
    Closed.closed += 1
    assert value(other.restore()) == 4


def test_credentials_that_were_renewed_are_read_after_an_error(tmp_path, monkeypatch):
    """As those of S3 in a file, which fsspec's object has read once."""
    monkeypatch.setattr(Closed, "store", {})
    monkeypatch.setattr(Closed, "async_impl", True)
    monkeypatch.setattr(_places, "_WITHOUT_FOLDERS", {"closed"})
    fsspec.register_implementation("closed", Closed, clobber=True)
    with Checkpointer(tmp_path / "near", drain_to="closed://bucket/run") as saver:
        saver.save(1, {"w": np.full(5000, 1)})
        saver.drained.result()
        Closed.closed += 1
        saver.save(2, {"w": np.full(5000, 2)})
        with pytest.raises(OSError, match="Socket is closed"):
            saver.drained.result()
        saver.save(3, {"w": np.full(5000, 3)})
        saver.drained.result()


class Shell(Shelf):
    """As sshfs: fsspec's own rmdir() does nothing, and rm() removes an empty folder."""

    protocol = "shell"
    store: dict = {}  # noqa: RUF012
    pseudo_dirs: list = [""]  # noqa: RUF012
    rmdir = fsspec.AbstractFileSystem.rmdir

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("shell://"))

    def rm(self, path):
        MemoryFileSystem.rmdir(self, path)


def test_no_empty_folders_are_left_where_rmdir_does_nothing(tmp_path):
    fsspec.register_implementation("shell", Shell, clobber=True)
    save(tmp_path / "near", "shell://bucket/run", 1, 2, keep=1)
    names = {path.rpartition("/")[2] for path in Shell().ls("/bucket/run", detail=False)}
    assert names == {"step-2", ".nvmeio-latest"}


def test_a_failed_copy_to_a_store_leaves_nothing(tmp_path, shelf):
    far = "shelf://bucket/run"
    save(tmp_path / "near", far, 1)
    before = contents(far)

    def fail(name, path):
        if name == "open" and path.endswith("manifest.json") and "/step-2/" in path:
            raise PermissionError(13, "no key", path)

    shelf.watch = fail
    with pytest.raises(PermissionError):
        save(tmp_path / "near", far, 2)
    assert contents(far) == before


@pytest.mark.parametrize("when", ["copy", "prune"])
@pytest.mark.filterwarnings("ignore:a step was saved but not copied")
def test_what_a_store_does_not_remove_is_removed_later(tmp_path, shelf, when):
    far, failed = "shelf://bucket/run", []

    def fail(name, path):
        if when == "copy":
            # The store is not there from here on, until the next copy.
            if failed or ("/step-2/" in path and path.endswith("manifest.json")):
                failed.append(path)
                raise PermissionError(13, "no key", path)
        elif name == "rm_file" and path.endswith("tensors.safetensors") and not failed:
            failed.append(path)
            raise OSError("slow down")

    with Checkpointer(tmp_path / "near", keep=1, drain_to=far) as saver:
        for step in (1, 2, 3, 4):
            shelf.watch = fail if step < 3 else None
            saver.save(step, {"w": np.zeros(8)})
            with contextlib.suppress(PermissionError):
                saver.drained.result()
    assert failed
    names = {name.partition("/")[0] for name in contents(far)}
    assert names == {"step-4", ".nvmeio-latest"}


@pytest.mark.parametrize("how", ["finish", "read"])
def test_a_copy_that_is_tried_again_removes_nothing_of_itself(
    tmp_path, shelf, monkeypatch, how
):
    """A store may remove it late, when the next try has written it."""
    monkeypatch.setattr(_draining, "PAUSE_S", 0)
    removed, failed = [], []
    call = getattr(_places._RemoteWriter, how)

    def fail(writer):
        found = call(writer)
        if writer.target.endswith("tree.json") and not failed:
            failed.append(writer.target)
            raise TimeoutError("no answer")
        return found

    def watch(name, path):
        if name == "rm_file":
            removed.append(path)

    monkeypatch.setattr(_places._RemoteWriter, how, fail)
    shelf.watch = watch
    save(tmp_path / "near", "shelf://bucket/run", 1)
    assert failed
    assert not removed


def test_a_copy_that_drain_made_at_a_url_is_read_and_replaced(tmp_path):
    far = "shelf://bucket/run"
    save(tmp_path / "near", tmp_path / "far", 1)
    drain(tmp_path / "near/step-1", f"{far}/step-1", last=("manifest.json",)).result()
    new = Checkpointer(tmp_path / "new", drain_to=far)
    assert new.steps() == [1]
    assert value(new.restore()) == 1
    save(tmp_path / "near", far, 1)
    assert len(contents(far)) == len(FILES) + 1
    assert value(new.restore()) == 1


def calls_of_a_copy(tmp_path, shelf):
    """Return how many calls of the store one copy of a step makes."""
    save(tmp_path / "count", "shelf://count/run", 100)
    calls = []
    shelf.watch = lambda *call: calls.append(call)
    save(tmp_path / "count", "shelf://count/run", 100)
    shelf.watch = None
    return len(calls)


def test_two_writers_of_a_store_never_mix(tmp_path, shelf):
    """One writer is held at each of its calls of the store, while another copies."""
    count = calls_of_a_copy(tmp_path, shelf)
    assert count > 10
    for number in range(count):
        far = f"shelf://bucket-{number}/run"
        save(tmp_path / f"before-{number}", far, 100)
        one = Checkpointer(tmp_path / f"one-{number}", drain_to=far)
        two = Checkpointer(tmp_path / f"two-{number}", drain_to=far)
        for saver in (one, two):
            assert saver.latest() == 100
            saver._copies.place.take(100)
            saver._begun = True
        held, go_on, calls = threading.Event(), threading.Event(), []

        def watch(*call, number=number, held=held, go_on=go_on, calls=calls):
            calls.append(call)
            if len(calls) == number + 1:
                held.set()
                go_on.wait()

        shelf.watch = watch
        one.save(100, {"w": np.full(5000, 1)})
        while not (held.wait(0.001) or one.drained.done()):
            pass
        shelf.watch = None
        two.save(100, {"w": np.full(5000, 2)})
        second = two.drained.exception()
        go_on.set()
        first = one.drained.exception()
        assert {type(first), type(second)} == {type(None), FileExistsError}
        reader = Checkpointer(tmp_path / "reader", drain_to=far)
        assert value(reader.restore()) == (2 if first else 1)
        for saver in (one, two):
            saver._copies.failure()
            saver.close()


class Calls:
    """Python's calls of the system, by its audit events, of which a test may watch."""

    watch = None

    @classmethod
    def hear(cls, event, arguments):
        if cls.watch is not None and event.partition(".")[0] in ("open", "os", "fcntl"):
            cls.watch(event)


sys.addaudithook(Calls.hear)


def held_at(number):
    """Return events that tell that a thread of a save is held, and that it may go on."""
    held, go_on, seen, mine = (
        threading.Event(),
        threading.Event(),
        [],
        threading.get_ident(),
    )

    def watch(event):
        if threading.get_ident() != mine and not held.is_set():
            seen.append(event)
            if len(seen) == number + 1:
                held.set()
                assert go_on.wait(60)

    Calls.watch = watch
    return held, go_on, seen


@pytest.mark.parametrize("kind", ["root", "copies"])
def test_two_writers_of_a_folder_never_mix(tmp_path, kind):
    """One is held at each of its calls of the system, while the other saves."""
    number, outcomes = 0, []
    while True:
        far = tmp_path / f"far-{number}"
        save(tmp_path / f"before-{number}", far, 100)
        roots = [far, far]
        options = {}
        if kind == "copies":
            roots, options = [tmp_path / f"{n}-{number}" for n in (1, 2)], {"drain_to": far}
        one, two = (Checkpointer(root, **options) for root in roots)
        errors = []

        def write(saver, mark, errors=errors):
            try:
                saver.save(100, {"w": np.full(5000, mark)})
                if saver.drained is not None:
                    saver.drained.result()
            except BlockingIOError:
                errors.append(mark)

        first = threading.Thread(target=write, args=(one, 1))
        held, go_on, _ = held_at(number)
        first.start()
        while not (held.wait(0.001) or not first.is_alive()):
            pass
        Calls.watch = None
        write(two, 2)
        go_on.set()
        first.join()
        there = value(Checkpointer(far).restore(100))
        # If one came after the other, both succeed.
        assert there in {1, 2} - {*errors}
        outcomes.append(len(errors))
        assert [n for n in os.listdir(far) if "nvmeio-tmp" in n or "nvmeio-old" in n] == []
        for saver in (one, two):
            with contextlib.suppress(BlockingIOError):
                saver.close()
        if not held.is_set():
            break
        number += 1
    assert number > 20
    # The last was not held; before it there was a lock to run into.
    assert 1 in outcomes


# Readers


@pytest.fixture(params=["root", "folder", "store"])
def seen(request, tmp_path, shelf, monkeypatch):
    """Steps 1 and 3 of a run, as a process sees them whose list of names is an old one."""
    far = {"root": None, "folder": tmp_path / "far", "store": "shelf://bucket/run"}
    far = far[request.param]
    with Checkpointer(tmp_path / "near", keep=None, drain_to=far) as saver:
        for step in (1, 3):
            saver.save(step, {"w": np.full(5000, step)})
            if far is not None:
                saver.drained.result()
    if far is None:
        return Checkpointer(tmp_path / "near"), tmp_path / "near"
    return Checkpointer(tmp_path / "new", drain_to=far), far


@pytest.mark.parametrize("listed", [[], [1]])
def test_an_old_list_of_names_does_not_hide_the_newest_step(
    seen, shelf, monkeypatch, listed
):
    """As NFS caches them: a loop would begin anew, or go on from an old step."""
    reader, where = seen
    names = [f"step-{step}" for step in listed]
    if isinstance(where, str):
        all_sizes = Remote.sizes
        old = dict.fromkeys(names)
        monkeypatch.setattr(
            Remote, "sizes", lambda place, name: all_sizes(place, name) if name else old
        )
    else:
        listdir = os.listdir
        monkeypatch.setattr(
            os, "listdir", lambda path: names if str(path) == str(where) else listdir(path)
        )
    assert reader.latest() == 3
    assert value(reader.restore()) == 3
    assert reader.steps() == [*listed, 3]


def test_a_named_step_that_is_missing_is_not_no_checkpoint(seen):
    reader, where = seen
    for step in (3, 1):
        if isinstance(where, str):
            Shelf().rm(f"{where}/step-{step}", recursive=True)
        else:
            shutil.rmtree(where / f"step-{step}")
        words = f"step-3 is missing, but {where}/.nvmeio-latest names it"
        if step == 3:
            with pytest.warns(RuntimeWarning, match=f"step 3 is skipped: .*{words}"):
                assert value(reader.restore()) == 1
        else:
            with pytest.warns(RuntimeWarning), pytest.raises(CheckpointError, match=words):
                reader.restore()
    assert reader.latest() is None
    # The next one that is saved there is named in its place.
    far = where if reader.drain_to else None
    with Checkpointer(reader.root, drain_to=far) as saver:
        saver.save(2, 2)
        if far is not None:
            saver.drained.result()
    assert reader.restore() == 2
    reader.remove(2)
    reader.close()
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        reader.restore()


def test_a_step_that_comes_while_it_is_looked_for_is_read(tmp_path, seen, monkeypatch):
    reader, _ = seen
    place = reader._steps.root if reader.drain_to is None else reader._copies.place
    named = place.named

    def later():
        monkeypatch.setattr(place, "named", named)
        save(tmp_path / "near", reader.drain_to, 5)
        return named()

    monkeypatch.setattr(place, "named", later)
    assert value(reader.restore(5)) == 5


def test_a_step_that_is_removed_is_no_longer_named(seen):
    reader, _ = seen
    named = reader._places()[-1].named
    assert named() == 3
    reader.remove(3)
    assert named() == 1
    reader.remove(1)
    assert named() is None
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        reader.restore()
    reader.close()


@pytest.mark.parametrize("what", ["link", "other file", "folder", "empty"])
def test_something_else_with_the_name_of_that_file_stays(tmp_path, what):
    latest, victim = tmp_path / "near/.nvmeio-latest", tmp_path / "victim"
    victim.write_text("step-7\n")
    latest.parent.mkdir()
    if what == "folder":
        latest.mkdir()
    elif what == "link":
        latest.symlink_to(victim)
    else:
        latest.write_text("" if what == "empty" else "mine")
    with Checkpointer(tmp_path / "near") as saver:
        saver.save(1, 1)
        assert saver.latest() == 1
        assert saver.restore() == 1
    assert victim.read_text() == "step-7\n"
    if what in ("other file", "empty"):
        assert latest.read_text() == ("step-1\n" if what == "empty" else "mine")


def calls_of_a_save(root, far, kept, monkeypatch):
    """Return the calls of the store, and the manifests read, of a save beside `kept`."""
    calls, opened = [], []
    with Checkpointer(root, keep=3, keep_every=10, drain_to=far) as saver:
        for step in range(10, 10 * kept + 10, 10):
            saver.save(step, step)
            saver.drained.result()
        began = Held.__init__
        monkeypatch.setattr(
            Held, "__init__", lambda held, *what: opened.append(what) or began(held, *what)
        )
        Shelf.watch = lambda *call: calls.append(call[0])
        saver.save(10 * kept + 10, 1)
        saver.drained.result()
        Shelf.watch = None
        monkeypatch.undo()
        assert len(saver.steps()) == kept + 1
    return sorted(calls), len(opened)


def test_a_save_costs_the_same_however_many_steps_are_kept(tmp_path, monkeypatch):
    few, many = (
        calls_of_a_save(tmp_path / str(kept), f"shelf://{kept}/run", kept, monkeypatch)
        for kept in (4, 40)
    )
    assert few == many
    # The copy reads its source.
    assert few[1] == 1


@pytest.mark.parametrize("then", ["restore", "save"])
def test_a_process_killed_while_it_fetches_a_copy_leaves_nothing(tmp_path, then):
    child = Child("restore_far_and_die", root=str(tmp_path))
    child.process.wait()
    assert child.process.returncode == -signal.SIGKILL
    child.finish()
    new = tmp_path / "new"
    assert [*new.glob(".fetched-step-1.*")]
    if then == "save":
        Checkpointer(new).save(1, 1)
    else:
        save(tmp_path / "other", "shelf://bucket/run", 1)
        assert value(Checkpointer(new, drain_to="shelf://bucket/run").restore()) == 1
    assert not [*new.glob(".fetched-*")]


def test_a_root_without_space_for_what_is_fetched_is_named_so(loop_mount, tmp_path):
    far, state = "shelf://bucket/run", np.zeros(SIZES_MIN["ext4"], np.uint8)
    with Checkpointer(tmp_path / "near", drain_to=far) as saver:
        saver.save(1, state)
        saver.drained.result()
    root = loop_mount("ext4", SIZES_MIN["ext4"]) / "root"
    with pytest.raises(OSError, match=r"bytes\) are needed, and \d+ are free") as caught:
        Checkpointer(root, drain_to=far).restore()
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(root / "fetched-step-1")
    assert os.listdir(root) == []


@pytest.mark.parametrize("replaced", [False, True])
def test_a_copy_that_goes_while_it_is_read_is_no_error(
    tmp_path, far, monkeypatch, replaced
):
    save(tmp_path / "near", far, 10, 20)
    kind, name = (Remote, "read") if isinstance(far, str) else (Held, "restore")
    original, done = getattr(kind, name), []

    def late(self, *values, **options):
        if not done and (kind is Held or values[0].endswith("tensors.safetensors")):
            done.append(values)
            if replaced:
                save(tmp_path / "near", far, 20)
            elif isinstance(far, str):
                for each in FILES:
                    file_of(far, 20, each)()
            else:
                shutil.rmtree(far / "step-20")
        return original(self, *values, **options)

    monkeypatch.setattr(kind, name, late)
    new = Checkpointer(tmp_path / "new", drain_to=far)
    assert value(new.restore()) == (20 if replaced else 10)
    assert done


def test_a_removed_step_does_not_come_back_after_a_power_failure(tmp_path, monkeypatch):
    """Else the next restore would read it, although the run went on from an older one."""
    root, far = tmp_path / "run", tmp_path / "far"
    with Checkpointer(root, drain_to=far) as checkpointer:
        for step in (80, 100):
            checkpointer.save(step, {"epoch": step})
            checkpointer.drained.result()
        synced, fsync = {}, os.fsync

        def record(descriptor):
            fsync(descriptor)
            folder = os.readlink(f"/proc/self/fd/{descriptor}")
            synced[folder] = sorted(n for n in os.listdir(folder) if n.startswith("step-"))

        monkeypatch.setattr(os, "fsync", record)
        checkpointer.remove(100)
    assert synced == {str(root): ["step-80"], str(far): ["step-80"]}


@pytest.mark.parametrize("read", ["run", "far"])
def test_remove_refuses_before_it_removes_anything(tmp_path, read):
    save(tmp_path / "run", tmp_path / "far", 1)
    before = contents(tmp_path)
    with Checkpointer(tmp_path / "run", drain_to=tmp_path / "far") as saver:
        with (
            Held(str(tmp_path / read / "step-1"), 1),
            pytest.raises(BlockingIOError, match="is being read"),
        ):
            saver.remove(1)
        assert contents(tmp_path).keys() == before.keys()
        saver.remove(1)
        assert saver.steps() == []


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS])
def test_a_step_that_cannot_be_removed_keeps_its_copy(tmp_path, monkeypatch, code):
    save(tmp_path / "run", tmp_path / "far", 1)
    rename = os.rename

    def failing(source, target):
        if str(source).startswith(str(tmp_path / "run")):
            raise OSError(code, os.strerror(code), source)
        rename(source, target)

    with Checkpointer(tmp_path / "run", drain_to=tmp_path / "far") as saver:
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", failing)
            with pytest.raises(OSError, match=os.strerror(code)):
                saver.remove(1)
        for root in ("run", "far"):
            assert value(Checkpointer(tmp_path / root).restore()) == 1
        saver.remove(1)
        assert saver.steps() == []


def test_a_root_that_was_moved_during_a_run_is_named(tmp_path, caplog):
    """As a drive that was unmounted: the next start would not find the steps."""
    near, far = tmp_path / "near", tmp_path / "far"
    with Checkpointer(near, drain_to=far) as saver:
        saver.save(1, 1)
        saver.drained.result()
        near.rename(tmp_path / "before")
        with pytest.warns(RuntimeWarning, match="near is another folder than at the last"):
            saver.save(2, 2)
        saver.drained.result()
        far.rename(tmp_path / "far before")
        caplog.clear()
        saver.save(3, 3)
        saver.drained.result()
        assert f"{far} is another folder than at the last save" in caplog.text
        # Not by the save that copies, which may go to a file system that hangs.
        with pytest.warns(RuntimeWarning, match="far is another folder than at the last"):
            saver.save(4, 4)
        saver.drained.result()
        shutil.rmtree(near)
        saver.save(4, 4)
    assert Checkpointer(near).steps() == [4]


def test_a_lock_that_a_copy_by_hard_links_shares_is_named(tmp_path):
    save(tmp_path / "run", None, 1)
    shutil.copytree(tmp_path / "run", tmp_path / "copy", copy_function=os.link)
    with Checkpointer(tmp_path / "run") as saver:
        saver.save(2, 2)
        with pytest.raises(BlockingIOError, match="remove this file there"):
            save(tmp_path / "copy", None, 3)
        (tmp_path / "copy" / ".nvmeio-lock").unlink()
        save(tmp_path / "copy", None, 3)
        saver.save(4, 4)
    assert Checkpointer(tmp_path / "run").steps() == [1, 2, 4]
    assert Checkpointer(tmp_path / "copy").steps() == [1, 3]


def test_a_copy_is_there_if_the_one_before_cannot_be_removed(tmp_path, shelf, monkeypatch):
    """As in a store that does not permit to delete."""

    def refused(store, path):
        raise PermissionError(errno.EACCES, "DeleteObject", path)

    monkeypatch.setattr(shelf, "rm_file", refused)
    with Checkpointer(tmp_path / "run", drain_to="shelf://bucket/run") as saver:
        for number in (1, 2):
            saver.save(1, number)
            saver.drained.result()
    assert Checkpointer(tmp_path / "new", drain_to="shelf://bucket/run").restore() == 2


def test_a_huge_object_that_names_the_newest_is_not_read_whole(tmp_path, monkeypatch):
    with Checkpointer(tmp_path / "run", drain_to="shelf://bucket/run") as saver:
        saver.save(1, 1)
    write("shelf://bucket/run", ".nvmeio-latest", bytes(12 << 20))
    nbytes = []
    cat_file = Shelf.cat_file

    def counted(self, path, **options):
        found = cat_file(self, path, **options)
        nbytes.append(len(found))
        return found

    monkeypatch.setattr(Shelf, "cat_file", counted)
    found = Checkpointer(tmp_path / "new", drain_to="shelf://bucket/run")
    assert found.latest() == 1
    assert 0 < sum(nbytes) < 1 << 20


def test_the_name_of_the_newest_is_read_anew(tmp_path, shelf, monkeypatch):
    """As s3fs does, which opens an object by the size and tag of its last list."""
    far, listed = "shelf://bucket/run", {}
    reader = Checkpointer(tmp_path / "near", drain_to=far)
    save(tmp_path / "near", far, 9)

    def remember(name, path):
        if name == "ls":
            listed.update(shelf.store)
        elif name == "open" and listed.get(path) is not shelf.store.get(path):
            raise OSError(errno.EBUSY, "the remote file no longer exists", path)

    def invalidate(self, path=None):
        listed.clear()

    monkeypatch.setattr(shelf, "invalidate_cache", invalidate)
    shelf.watch = remember
    assert reader.latest() == 9
    shelf.watch = None
    save(tmp_path / "near", far, 10)
    shelf.watch = remember
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert value(reader.restore()) == 10


def test_an_empty_object_in_the_place_of_the_name_is_none(tmp_path, shelf, monkeypatch):
    far = "shelf://bucket/run"
    cat_file = shelf.cat_file

    def refused(self, path, start=None, end=None, **options):
        found = cat_file(self, path, start=start, end=end, **options)
        if start is not None and not found:
            raise OSError(errno.EINVAL, "the requested range is not satisfiable", path)
        return found

    monkeypatch.setattr(shelf, "cat_file", refused)
    save(tmp_path / "near", far, 1)
    write(far, ".nvmeio-latest", b"")
    assert Checkpointer(tmp_path / "new", drain_to=far).latest() == 1
    save(tmp_path / "near", far, 2)
    assert contents(far)[".nvmeio-latest"] == b"step-2\n"


def pruned_between(reader, writer, monkeypatch):
    """Let a writer replace all steps once, after the reader has listed them."""
    listed = reader._steps.copies.steps

    def steps():
        found = listed()
        if writer is not None and not replaced:
            replaced.append(True)
            writer.save(9, {"w": np.full(5000, 9)})
            writer.drained.result()
            writer.prune()
            writer._copies.wait()
        return found

    replaced = []
    monkeypatch.setattr(reader._steps.copies, "steps", steps)


@pytest.mark.parametrize("call", ["restore", "latest", "steps", "metadata", "agreed_step"])
def test_copies_that_are_replaced_while_they_are_listed_are_found(
    tmp_path, far, shelf, monkeypatch, call
):
    save(tmp_path / "near", far, 1, keep=1)
    with Checkpointer(tmp_path / "near", drain_to=far, keep=1) as writer:
        reader = Checkpointer(tmp_path / "new", drain_to=far)
        pruned_between(reader, writer, monkeypatch)
        found = getattr(reader, call)()
    expected = {"latest": 9, "steps": [9], "metadata": None, "agreed_step": 9}
    assert (value(found) == 9) if call == "restore" else found == expected[call]


def test_a_thread_that_removes_and_one_that_copies_have_one_lock(tmp_path, monkeypatch):
    save(tmp_path / "near", tmp_path / "far", 1, 2)
    saver = Checkpointer(tmp_path / "near", drain_to=tmp_path / "far")
    lock, begun, go_on = locks._lock, threading.Event(), threading.Event()

    def slow(descriptor, doing):
        lock(descriptor, doing)
        if threading.current_thread().name == DRAINING:
            begun.set()
            assert go_on.wait(20)

    monkeypatch.setattr(locks, "_lock", slow)
    saver.save(3, {"w": np.full(5000, 3)})
    assert begun.wait(20)
    removing = threading.Thread(target=saver.remove, args=(1,))
    removing.start()
    # It waits for the other thread instead of finding its lock.
    removing.join(0.2)
    assert removing.is_alive()
    go_on.set()
    removing.join()
    saver.drained.result()
    saver.close()
    assert Checkpointer(tmp_path / "new", drain_to=tmp_path / "far").steps() == [2, 3]


@pytest.fixture
def held_drain(monkeypatch):
    """Hold copies when they begin: an event that one has, and one that lets them go on."""
    begun, go_on = threading.Event(), threading.Event()
    run = Drain.start

    def start(drain):
        begun.set()
        assert go_on.wait(20)
        run(drain)

    monkeypatch.setattr(Drain, "start", start)
    return begun, go_on


@pytest.mark.parametrize("when", ["waiting", "copied"])
def test_a_step_that_vanishes_before_its_copy_is_an_error(
    tmp_path, far, shelf, held_drain, when
):
    """Another program has renamed it.  A step that this has pruned is none."""
    begun, go_on = held_drain
    saver = Checkpointer(tmp_path / "near", drain_to=far)
    saver.save(1, {"w": np.full(5000, 1)})
    assert begun.wait(20)
    if when == "waiting":
        saver.save(2, {"w": np.full(5000, 2)})
    step = 2 if when == "waiting" else 1
    os.rename(tmp_path / "near" / f"step-{step}", tmp_path / "moved")
    go_on.set()
    with pytest.raises(FileNotFoundError, match=f"step-{step}"):
        saver.drained.result()
    saver.close()


def test_a_step_that_was_pruned_before_its_copy_is_no_error(tmp_path, held_drain):
    begun, go_on = held_drain
    with Checkpointer(tmp_path / "near", drain_to=tmp_path / "far", keep=1) as saver:
        saver.save(5, {"w": np.full(5000, 5)})
        assert begun.wait(20)
        with pytest.warns(RuntimeWarning, match=r"restore\(\) reads step 5"):
            saver.save(3, {"w": np.full(5000, 3)})
        assert saver.prune() == [3]
        go_on.set()
        with pytest.raises(CancelledError):
            saver.drained.result()


def test_a_damaged_copy_in_a_store_is_not_counted(tmp_path, shelf):
    far = "shelf://bucket/run"
    with Checkpointer(tmp_path / "near", drain_to=far, keep=2) as saver:
        for step in (1, 2):
            saver.save(step, {"w": np.full(5000, step)})
            saver.drained.result()
        saver._copies.wait()
        file_of(far, 2, "tensors.safetensors")()
        saver.save(3, {"w": np.full(5000, 3)})
        saver.drained.result()
    assert Checkpointer(tmp_path / "new", drain_to=far).steps() == [1, 3]


def test_an_empty_manifest_does_not_hide_the_copy_before_it(tmp_path, shelf):
    """Stores that show an object at once leave one, if the upload is killed."""
    far = "shelf://bucket/run"
    save(tmp_path / "near", far, 1)
    (name,) = {os.path.dirname(each) for each in contents(far) if "tensors" in each}
    later = name.replace("/1.", "/2.")
    for file, data in contents(far).items():
        if file.startswith(name):
            empty = file.endswith("manifest.json")
            write(far, later + file.removeprefix(name), b"" if empty else data)
    reader = Checkpointer(tmp_path / "new", drain_to=far)
    assert (reader.steps(), value(reader.restore())) == ([1], 1)


def test_a_copy_that_was_read_before_it_was_finished_counts_later(tmp_path, shelf):
    reached, go_on = threading.Event(), threading.Event()

    def hold(name, path):
        if name == "open" and path.endswith("manifest.json"):
            shelf.watch = None
            reached.set()
            assert go_on.wait(20)

    far = "shelf://bucket/run"
    save(tmp_path / "near", far, 1)
    reader = Checkpointer(tmp_path / "new", drain_to=far)
    with Checkpointer(tmp_path / "near") as saver:
        folder = saver.save(2, {"w": np.full(5000, 2)})
    copies = Checkpointer(tmp_path / "near", drain_to=far)._copies
    shelf.watch = hold
    copies.begin(2, str(folder))
    assert reached.wait(20)
    with pytest.warns(RuntimeWarning, match=r"step 2 is skipped: .* is unfinished"):
        assert value(reader.restore()) == 1
    go_on.set()
    copies.latest.result()
    assert reader.steps() == [1, 2]
    assert reader.latest() == reader.agreed_step() == 2


def test_a_machine_that_is_lost_in_the_first_upload_lets_the_run_begin_anew(
    tmp_path, shelf
):
    """On another machine, which has neither a step nor a copy."""
    far = "shelf://bucket/run"
    attempt = "step-1/1.elsewhere-5-77-0123abcd"
    write(far, f"{attempt}/tree.json", b"{}")
    with Checkpointer(tmp_path / "new", drain_to=far) as saver:
        for call in (saver.restore, lambda: saver.restore(1)):
            with (
                pytest.warns(RuntimeWarning, match="step-1 is unfinished, as is all"),
                pytest.raises(FileNotFoundError, match="checkpoint"),
            ):
                call()
        with pytest.warns(RuntimeWarning, match="is unfinished"):
            assert saver.agreed_step() is None
        saver.save(1, 1)
        saver.drained.result()
    # Something was complete once: what is unfinished may be damaged.
    file_of(far, 1, "manifest.json")()
    reader = Checkpointer(tmp_path / "third", drain_to=far)
    with (
        pytest.warns(RuntimeWarning, match="step 1 is skipped"),
        pytest.raises(CheckpointError, match=r"manifest\.json is missing"),
    ):
        reader.restore()


def test_a_step_that_cannot_be_removed_does_not_keep_the_others(tmp_path, monkeypatch):
    set_aside = _roots.set_aside

    def refused(folder, *how):
        if folder.endswith("step-1"):
            raise OSError(errno.EPERM, "Operation not permitted", folder)
        set_aside(folder, *how)

    with Checkpointer(tmp_path / "near", keep=1) as saver:
        saver.save(1, 1)
        monkeypatch.setattr(_roots, "set_aside", refused)
        for step in (2, 3):
            with pytest.warns(RuntimeWarning, match="older checkpoints were not removed"):
                saver.save(step, step)
        assert saver.steps() == [1, 3]


@pytest.mark.parametrize("way", ["save", "save_async"])
def test_warnings_that_are_errors_fail_no_save(tmp_path, monkeypatch, way):
    """They are raised once the step is saved, and its copy has begun."""
    set_aside, raised = _roots.set_aside, []
    monkeypatch.setattr(threading, "excepthook", lambda told: raised.append(told.exc_value))

    def refused(folder, *how):
        raise OSError(errno.EPERM, "Operation not permitted", folder)

    with Checkpointer(tmp_path / "near", keep=1, drain_to=tmp_path / "far") as saver:
        saver.save(1, 1)
        saver.drained.result()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            monkeypatch.setattr(_roots, "set_aside", refused)
            if way == "save":
                with pytest.raises(RuntimeWarning, match="were not removed"):
                    saver.save(2, 2)
            else:
                assert saver.save_async(2, 2).result().name == "step-2"
                for thread in threading.enumerate():
                    if thread.name == SAVING:
                        thread.join()
                assert "were not removed" in str(raised.pop())
            saver.drained.result()
            monkeypatch.setattr(_roots, "set_aside", set_aside)
            with pytest.raises(RuntimeWarning, match=r"restore\(\) reads step 2"):
                getattr(saver, way)(0, 0)
    assert Checkpointer(tmp_path / "near").steps() == [0, 2]
    assert {0, 2} <= {*Checkpointer(tmp_path / "far").steps()}


def test_an_error_of_pruning_keeps_nothing_open(tmp_path, monkeypatch):
    """Its traceback must not be part of a cycle, which only the collector frees."""

    class Opened:
        pass

    known = []

    def fail(root, step, *, again):
        opened = Opened()
        known.append(weakref.ref(opened))
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with Checkpointer(tmp_path, keep=1) as saver:
        for step in (1, 2, 3):
            save(tmp_path / "other", None, step)
            shutil.copytree(tmp_path / "other" / f"step-{step}", tmp_path / f"step-{step}")
        failing = [lambda root, step, *, again: step == 3, fail]
        monkeypatch.setattr(
            _roots.Root,
            "was_complete",
            lambda root, step, *, again: failing[step < 3](root, step, again=again),
        )
        gc.collect()
        gc.disable()
        try:
            with contextlib.suppress(OSError):
                saver.prune()
            assert len(known) == 2
            assert [each() for each in known] == [None, None]
        finally:
            gc.enable()


@pytest.mark.parametrize("way", ["save", "save_async"])
def test_warnings_that_are_errors_hide_no_error(tmp_path, monkeypatch, way):
    def full(plan, *_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with Checkpointer(tmp_path) as saver:
        saver.save(9, 9)
        monkeypatch.setattr(Plan, "stage" if way == "save_async" else "write", full)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(OSError, match="No space left") as told:
                getattr(saver, way)(5, {"w": np.ones(3)})
        if sys.version_info >= (3, 11):
            assert "step 5 is not the newest" in told.value.__notes__[-1]


def test_a_step_that_another_removes_meanwhile_is_gone(tmp_path, monkeypatch):
    """Such as a copy that the thread that copies has pruned."""
    set_aside = _roots.set_aside

    def late(folder, *how):
        if folder.endswith("step-1") and "far" in folder:
            shutil.rmtree(folder)
        set_aside(folder, *how)

    near, far = tmp_path / "near", tmp_path / "far"
    save(near, far, 1, 2)
    monkeypatch.setattr(_roots, "set_aside", late)
    with Checkpointer(near, drain_to=far) as saver:
        saver.remove(1)
        assert saver.steps() == [2]
    save(tmp_path / "other", far / "other", 1)
    with (
        Checkpointer(far / "other") as saver,
        pytest.raises(FileNotFoundError, match="no such checkpoint"),
    ):
        saver.remove(1)
    save(tmp_path / "other", far / "other", 1)
    with Checkpointer(far / "other", keep=1) as saver, warnings.catch_warnings():
        warnings.simplefilter("error")
        saver.save(2, 2)
        assert saver.steps() == [2]


def test_the_error_for_a_missing_step_names_the_copies(tmp_path):
    near, far = tmp_path / "near", tmp_path / "far"
    save(near, far, 4, 5)
    shutil.rmtree(near)
    with Checkpointer(near, drain_to=far) as saver:
        for call in (saver.restore, saver.remove):
            with pytest.raises(FileNotFoundError) as told:
                call(3)
            words = f"there is no such folder; in {far} there are the steps 5, 4"
            assert told.value.strerror == f"no such checkpoint; {words}"
            assert told.value.filename == f"{near}/step-3"


def test_ctrl_c_while_copies_are_waited_for_changes_nothing(tmp_path, monkeypatch):
    """Also before the thread that copies has begun."""
    saver = Checkpointer(tmp_path / "near", drain_to=tmp_path / "far")
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        saver.save(1, {"w": np.full(5000, 1)})
    monkeypatch.setattr(threading.Thread, "start", start)
    begun, go_on, run = threading.Event(), threading.Event(), Drain.start

    def slow(drain):
        begun.set()
        assert go_on.wait(20)
        run(drain)

    monkeypatch.setattr(Drain, "start", slow)
    saver.save(2, {"w": np.full(5000, 2)})
    # Else close() would copy in this thread.
    assert begun.wait(20)
    monkeypatch.setattr(saver._copies._idle, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        saver.close()
    monkeypatch.undo()
    # The lock is still held, because the copy goes on.
    with pytest.raises(BlockingIOError):
        save(tmp_path / "other", tmp_path / "far", 7)
    go_on.set()
    saver.close()
    assert Checkpointer(tmp_path / "new", drain_to=tmp_path / "far").latest() == 2


def interrupted(*_):
    raise KeyboardInterrupt


def test_ctrl_c_before_a_save_begins_keeps_nobody_waiting(tmp_path, monkeypatch):
    saver = Checkpointer(tmp_path)
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        saver.save_async(1, 1)
    monkeypatch.setattr(threading.Thread, "start", start)
    saver.save(2, 2)
    saver.close()
    assert saver.steps() == [2]


def test_a_file_of_others_stays_where_removing_a_folder_removes_all_in_it(monkeypatch):
    """As with the file systems of pyarrow, such as hdfs."""

    def remove_all(self, path):
        self.rm(path, recursive=True)

    monkeypatch.setattr(Shelf, "rmdir", remove_all)
    url = "shelf://run"
    system = fsspec.filesystem("shelf")
    system.store.clear()
    with tempfile.TemporaryDirectory() as root:
        saver = Checkpointer(root, keep=1, drain_to=url)
        saver.save(1, "old")
        saver.drained.result()
        system.pipe_file("/run/step-1/notes.txt", b"mine")
        saver.save(2, "new")
        saver.close()
    assert system.cat_file("/run/step-1/notes.txt") == b"mine"
    assert Checkpointer(root, drain_to=url).restore() == "new"


def test_a_password_in_a_url_is_not_shown(tmp_path, monkeypatch):
    def unreachable(*_, **__):
        raise OSError(errno.EHOSTUNREACH, "no route")

    Checkpointer(tmp_path).save(1, "here")
    monkeypatch.setattr(Shelf, "ls", unreachable)
    with pytest.warns(RuntimeWarning, match="cannot be listed") as caught:
        assert Checkpointer(tmp_path, drain_to="shelf://me:secret@host/run").steps() == [1]
    assert "shelf://me:***@host/run" in str(caught[0].message)
    assert "secret" not in str(caught[0].message)


@pytest.mark.parametrize("password", ["secret", "p@secret"])
def test_a_password_in_a_url_is_not_shown_if_a_copy_fails(
    tmp_path, shelf, caplog, password
):
    def full(name, path):
        if name == "open" and path.endswith("tensors.safetensors"):
            raise OSError(errno.ENOSPC, "no room")

    shelf.watch = full
    with Checkpointer(tmp_path, drain_to=f"shelf://me:{password}@host/run") as saver:
        saver.save(1, "here")
        copy = saver.drained
        with pytest.raises(OSError, match="no room") as raised:
            copy.result()
        with pytest.warns(RuntimeWarning, match="not copied to") as caught:
            saver.save(2, "here")
        with pytest.raises(OSError, match="no room"):
            saver.drained.result()
    shown = [str(raised.value), *(str(each.message) for each in caught), caplog.text]
    assert all("me:***@host/run" in each for each in shown)
    assert not any("secret" in each for each in shown)


@pytest.mark.parametrize("reads", [1, None])
@pytest.mark.parametrize("url", [False, True])
def test_a_wrong_read_is_no_copy(tmp_path, monkeypatch, reads, url):
    """Of a bad cable it is read again; of a rotten file the copy fails."""
    far = "memory://misread" if url else str(tmp_path / "far")
    pieces_of, wrong = _draining.pieces_of, []

    def misread(file, size):
        for piece in pieces_of(file, size):
            if size > 8000 and (reads is None or len(wrong) < reads):
                piece = piece.copy()
                piece[-5] ^= 1
                wrong.append(size)
            yield piece

    monkeypatch.setattr(_draining, "pieces_of", misread)
    monkeypatch.setattr(_draining, "PAUSE_S", 0.001)
    state = {"weights": np.arange(1000.0)}
    saver = Checkpointer(tmp_path / "near", drain_to=far)
    saver.save(1, state)
    if reads is None:
        with pytest.raises(OSError, match=r"tensors.* is damaged: bytes 0 to"):
            saver.drained.result()
        assert Checkpointer(tmp_path / "other", drain_to=far).steps() == []
    else:
        saver.drained.result()
        found = Checkpointer(tmp_path / "other", drain_to=far).restore(1)
        assert np.array_equal(found["weights"], state["weights"])
    assert wrong
    fsspec.filesystem("memory").store.clear()


def test_a_copy_that_drain_has_repaired_counts_again(tmp_path):
    far = "memory://repaired"
    fsspec.filesystem("memory").store.clear()
    source = Checkpointer(tmp_path / "near").save(7, {"w": np.full(9, 7)})
    drain(source, f"{far}/step-7").result()
    fsspec.filesystem("memory").rm_file("/repaired/step-7/tensors.safetensors")
    reader = Checkpointer(tmp_path / "other", drain_to=far)
    with pytest.raises(CheckpointError, match="is missing"):
        reader.restore()
    assert reader.steps() == []
    drain(source, f"{far}/step-7").result()
    assert (reader.steps(), value(reader.restore())) == ([7], 7)


@pytest.mark.parametrize("killed", [False, True])
def test_a_later_save_that_drain_has_copied_is_the_one_to_read(tmp_path, killed):
    """Also beside what a killed copy of that save has left."""
    far = "memory://later"
    fsspec.filesystem("memory").store.clear()
    save(tmp_path / "near", far, 300)
    again = Checkpointer(tmp_path / "near").save(300, {"w": np.full(9, 301)})
    if killed:
        left = "/later/step-300/2.elsewhere-5-77-0123abcd/tree.json"
        fsspec.filesystem("memory").pipe_file(left, b"{}")
    drain(again, f"{far}/step-300", last=("manifest.json",)).result()
    reader = Checkpointer(tmp_path / "other", drain_to=far)
    assert value(reader.restore()) == 301
    # The next copy of this step replaces both.
    save(tmp_path / "near", far, 300)
    assert value(reader.restore(300)) == 300


def test_runs_that_copy_other_steps_to_one_store_remove_none_of_each_other(tmp_path):
    far = "memory://two"
    fsspec.filesystem("memory").store.clear()
    one, two = (Checkpointer(tmp_path / n, drain_to=far, keep=1) for n in "ab")
    one.save(10, 10)
    one.drained.result()
    two.save(1000, 1000)
    two.drained.result()
    for saver, step in ((one, 20), (two, 1010)):
        saver.save(step, step)
        with pytest.raises(FileExistsError, match="another run copies here too"):
            saver.drained.result()
    assert Checkpointer(tmp_path / "c", drain_to=far).steps() == [20, 1010]
    # Such as the last copy of a machine that is lost now: the run goes on.
    told = []
    for step in (30, 40, 50):
        one.save(step, step)
        told.append(type(one.drained.exception()))
    assert told == [FileExistsError, type(None), type(None)]
    assert Checkpointer(tmp_path / "c", drain_to=far).steps() == [50, 1010]


def test_a_step_that_another_run_copies_just_before_a_prune_stays(tmp_path, monkeypatch):
    """A new one, and one that this run has copied itself."""
    far, remove_left, copied = "memory://late", _stores.Store._remove_left, []
    fsspec.filesystem("memory").store.clear()
    one = Checkpointer(tmp_path / "a", drain_to=far, keep=1)
    two = Checkpointer(tmp_path / "b", drain_to=far, keep=3)
    for step in (10, 20):
        one.save(step, "one")
        one.drained.result()

    def late(store):
        remove_left(store)
        if not copied:
            copied.append(7)
            with pytest.warns(RuntimeWarning, match="7 is pruned first"):
                two.save(7, "two")
            two.drained.result()
            # It has also gone back to a step of the other, and takes it for its own.
            two.save(20, "two")
            copied.append(two.drained.exception())

    monkeypatch.setattr(_stores.Store, "_remove_left", late)
    one.save(30, "one")
    with pytest.raises(FileExistsError, match="another run copies here too"):
        one.drained.result()
    reader = Checkpointer(tmp_path / "c", drain_to=far)
    assert copied == [7, None]
    assert {step: reader.restore(step) for step in reader.steps()} == {
        7: "two",
        20: "two",
        30: "one",
    }


def test_a_step_that_another_run_has_copied_again_is_not_pruned(tmp_path):
    """It was there when this run began, or this run has pruned the one before."""
    far = "memory://again"
    fsspec.filesystem("memory").store.clear()
    with Checkpointer(tmp_path / "before", drain_to=far) as before:
        for step in (90, 100):
            before.save(step, "before")
            before.drained.result()
    one, two = (Checkpointer(tmp_path / n, drain_to=far, keep=3) for n in "ab")
    one.save(110, "one")
    one.drained.result()
    # As a user goes back who does not know of the other run.
    for step in (110, 100):
        two.remove(step)
    two.save(90, "two")
    two.drained.result()
    for step in (120, 130, 140):
        one.save(step, "one")
        one.drained.result()
    reader = Checkpointer(tmp_path / "c", drain_to=far)
    assert {step: reader.restore(step) for step in reader.steps()} == {
        90: "two",
        **dict.fromkeys((120, 130, 140), "one"),
    }
    one.save(150, "one")
    one.drained.result()
    for saver, step in ((two, 120), (one, 160)):
        saver.save(step, "one" if saver is one else "two")
        with pytest.raises(FileExistsError, match="another run copies here too"):
            saver.drained.result()
    one.save(170, "one")
    one.drained.result()
    assert reader.restore(120) == "two"


def test_a_target_that_is_stale_is_named_at_once(tmp_path, monkeypatch):
    """It is not the step that has moved."""
    near, far, tried = tmp_path / "near", tmp_path / "far", []
    take = _roots.Root.take

    def stale(root, *arguments):
        if root.where == str(far):
            tried.append(far)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), root.where)
        take(root, *arguments)

    monkeypatch.setattr(_roots.Root, "take", stale)
    saver = Checkpointer(near, drain_to=far)
    saver.save(1, 1)
    error = saver.drained.exception()
    assert (error.errno, error.filename, tried) == (errno.ESTALE, str(far), [far])


@pytest.mark.parametrize("named", [True, False])
def test_copies_of_a_store_that_are_seen_as_a_folder_are_not_no_checkpoint(tmp_path, named):
    far, folder = f"memory://seen-{named}", tmp_path / "seen"
    with Checkpointer(tmp_path / "near", drain_to=far) as checkpointer:
        checkpointer.save(7, {"weights": np.arange(5)})
    # As gcsfuse mounts it, or `aws s3 sync` downloads it.
    fsspec.filesystem("memory").get(f"/seen-{named}/", f"{folder}/", recursive=True)
    if not named:
        (folder / ".nvmeio-latest").unlink()
    with pytest.raises(CheckpointError, match="read by the URL of the store"):
        Checkpointer(folder).restore(7)
    with pytest.raises(CheckpointError), pytest.warns(RuntimeWarning, match="step 7"):
        Checkpointer(folder).restore()


def test_a_named_step_of_strange_files_is_not_no_checkpoint(tmp_path):
    save(tmp_path, None, 7)
    for name in FILES:
        (tmp_path / "step-7" / name).rename(tmp_path / "step-7" / f"{name}.old")
    with pytest.raises(CheckpointError, match="nvmeio-latest, but is no step"):
        Checkpointer(tmp_path).restore(7)
    with pytest.raises(CheckpointError), pytest.warns(RuntimeWarning, match="step 7"):
        Checkpointer(tmp_path).restore()
