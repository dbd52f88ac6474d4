"""Checkpointer: steps, damage, asynchronous saves, locks and durability."""

import collections
import contextlib
import errno
import fcntl
import functools
import gc
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import warnings
import weakref
from concurrent import futures
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path

import numpy as np
import pytest

import nvmeio
from children import Child, as_nobody, need_strace, run_child, skip_sanitized
from helpers import plugged
from mounts import SIZES_MIN, Filler
from nvmeio._files import locks, paths
from nvmeio._publish import folders, names
from nvmeio._publish.folders import Unfinished
from nvmeio._publish.names import _host, temporary_name
from nvmeio._streams import reading
from nvmeio.checkpoint import (
    Checkpointer,
    CheckpointError,
    _checkpointer,
    _futures,
    _locks,
    _manifest,
    _restoring,
    _roots,
    _saving,
    drain,
)
from nvmeio.checkpoint._restoring import Held
from nvmeio.checkpoint._roots import Root, StepFolder
from workloads.checkpoints import same, state_of

# The files of a root, besides its steps.
OURS = {".nvmeio-lock", ".nvmeio-latest"}


@pytest.fixture
def root(tmp_path):
    return tmp_path / "root"


@pytest.fixture
def checkpointer(root):
    """A Checkpointer of the root."""
    with Checkpointer(root) as checkpointer:
        yield checkpointer


@pytest.fixture
def slow(monkeypatch):
    """A gate that holds saves before their first byte is written."""
    gate = gated(monkeypatch, _saving.Plan, "_write_tensors")
    yield gate
    gate.set()


def gated(monkeypatch, where, name):
    """Return a gate that holds calls of a function; the first call sets `begun`."""
    gate, gate_begun = threading.Event(), threading.Event()
    call = getattr(where, name)

    def call_late(*arguments, **options):
        gate_begun.set()
        assert gate.wait(60)
        return call(*arguments, **options)

    monkeypatch.setattr(where, name, call_late)
    gate.begun = gate_begun
    return gate


def raised(error):
    """Raise an error, also in a lambda."""
    raise error


@pytest.fixture
def no_room(monkeypatch):
    """Make saves fail with the returned error until the patch is undone."""
    broken = OSError(errno.EIO, "broken")
    monkeypatch.setattr(_saving, "reserve", lambda *_: raised(broken))
    return broken


class TestSteps:
    """Which steps exist, and which are pruned."""

    def test_a_new_root_has_no_steps(self, root):
        with Checkpointer(root) as checkpointer:
            assert (checkpointer.latest(), checkpointer.steps()) == (None, [])
            assert (checkpointer.prune(), checkpointer.cleanup()) == ([], [])
            with pytest.raises(FileNotFoundError, match="no checkpoint; there is no"):
                checkpointer.restore()
            with pytest.raises(FileNotFoundError, match="; there is no such folder"):
                checkpointer.restore(3)
        assert not root.exists()

    def test_the_error_for_a_missing_step_names_those_that_exist(self, root):
        with Checkpointer(root, keep=None) as checkpointer:
            for step in range(13):
                checkpointer.save(step, step)
            for call in (checkpointer.restore, checkpointer.verify, checkpointer.remove):
                with pytest.raises(FileNotFoundError) as raised:
                    call(13)
                # A private subclass would be in the traceback.
                assert raised.type is FileNotFoundError
                assert raised.value.filename == f"{root}/step-13"
                assert raised.value.strerror == (
                    "no such checkpoint; there are the steps 12, 11, 10, 9, 8, 7, 6, 5, 4, "
                    "3 and 3 more"
                )

    @pytest.mark.parametrize("how", ["save", "staged", "unstaged"])
    def test_a_saved_state_is_restored(self, checkpointer, root, default_engine, how):
        for step in (0, 9, 10):
            if how == "save":
                path = checkpointer.save(step, state_of(step))
            else:
                future = checkpointer.save_async(
                    step, state_of(step), stage=how == "staged"
                )
                path = future.result()
                assert (future.step, future.staged.result()) == (step, None)
            assert path == root / f"step-{step}"
            assert checkpointer.latest() == step
            checkpointer.verify(step)
            assert same(checkpointer.restore(), state_of(step))
        assert checkpointer.steps() == [0, 9, 10]
        assert same(checkpointer.restore(9), state_of(9))

    def test_keep_and_keep_every_choose_the_steps_that_stay(self, root):
        with Checkpointer(root, keep=2, keep_every=4) as checkpointer:
            for step in range(1, 12):
                checkpointer.save(step, step)
            assert checkpointer.steps() == [4, 8, 10, 11]
        with Checkpointer(root, keep=None) as checkpointer:
            for step in range(12, 16):
                checkpointer.save(step, step)
            assert checkpointer.steps() == [4, 8, *range(10, 16)]
        with Checkpointer(root, keep=1) as checkpointer:
            assert checkpointer.prune() == [4, 8, *range(10, 15)]
            # A step that was just saved stays, even if it is older than those that are
            # kept.
            checkpointer.save(3, 3)
            assert checkpointer.steps() == [3, 15]

    def test_a_damaged_step_is_neither_counted_nor_removed(self, root):
        with Checkpointer(root, keep=2) as checkpointer:
            for step in (1, 2):
                checkpointer.save(step, step)
            (root / "step-2" / "tree.json").unlink()
            checkpointer.save(3, 3)
            assert checkpointer.prune() == []
            assert checkpointer.steps() == [1, 3]
            assert (root / "step-2").is_dir()

    def test_a_step_is_replaced(self, root):
        with Checkpointer(root) as checkpointer:
            checkpointer.save(1, state_of(1))
            checkpointer.save(1, state_of(2))
            assert same(checkpointer.restore(), state_of(2))
        assert sorted(os.listdir(root)) == [".nvmeio-latest", ".nvmeio-lock", "step-1"]

    def test_other_files_in_the_root_stay(self, root):
        with Checkpointer(root, keep=1) as checkpointer:
            checkpointer.save(1, 1)
            for name in ("step-01", "step-", "step-2x", "step-3.old", "other"):
                (root / name).mkdir()
            (root / "step-7").write_text("no folder")
            assert checkpointer.steps() == [1]
            checkpointer.save(2, 2)
        assert len(os.listdir(root)) == 9

    def test_other_readers_of_safetensors_read_the_tensors(self, root):
        with Checkpointer(root) as checkpointer:
            path = checkpointer.save(1, state_of(1))
        safetensors = pytest.importorskip("safetensors.numpy")
        found = safetensors.load_file(path / "tensors.safetensors")
        expected = state_of(1)["weights"]
        assert sorted(found) == [f"weights/{index}" for index in range(4)]
        assert all(np.array_equal(found[f"weights/{n}"], expected[n]) for n in range(4))
        assert not any(b"pickle" in path.read_bytes() for path in path.glob("*.json"))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        *(({"keep": 0}, ValueError), ({"keep": "3"}, TypeError), ({"kep": 3}, TypeError)),
        *(({"keep_every": 0}, ValueError), ({"checksum": "md5"}, ValueError)),
        *(({"verify": True}, ValueError), ({"busy": None}, ValueError)),
    ],
)
def test_bad_options(root, options, error):
    with pytest.raises(error, match=next(iter(options))):
        Checkpointer(root, **options)


@pytest.mark.parametrize("step", [-1, 10**18 + 1, 1.0, "1", True, None])
def test_bad_steps(checkpointer, step):
    with pytest.raises((TypeError, ValueError), match="step is"):
        checkpointer.save(step, 1)
    with pytest.raises((TypeError, ValueError), match="step is"):
        checkpointer.verify(step)


def flip(path, at):
    """Change one bit."""
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


class TestDamage:
    """Errors name the damaged file, and restore() takes an older step."""

    @pytest.fixture
    def checkpointer(self, root):
        with Checkpointer(root) as checkpointer:
            for step in (1, 2):
                checkpointer.save(step, state_of(step))
            yield checkpointer

    @pytest.mark.parametrize("name", ["tensors.safetensors", "tree.json", "manifest.json"])
    @pytest.mark.parametrize("change", ["gone", "shorter", "longer", "link", "folder"])
    def test_missing_and_changed_files_are_damage(self, checkpointer, root, name, change):
        path = root / "step-2" / name
        if change == "gone":
            path.unlink()
        elif change == "shorter":
            os.truncate(path, path.stat().st_size - 3)
        elif change == "longer":
            with open(path, "ab") as file:
                file.write(b" ]")
        else:
            path.rename(root / "moved")
            path.symlink_to(root / "moved") if change == "link" else path.mkdir()
        assert checkpointer.steps() == [1]
        assert checkpointer.latest() == 1
        with pytest.raises((CheckpointError, OSError), match=str(path)):
            checkpointer.restore(2)
        with pytest.warns(RuntimeWarning, match=f"step 2 is skipped: .*{path}"):
            assert same(checkpointer.restore(), state_of(1))
        # A damaged step can be saved again.
        if change == "gone":
            checkpointer.save(2, state_of(3))
            assert same(checkpointer.restore(), state_of(3))

    def test_damage_in_every_step_is_an_error_of_its_own(self, checkpointer, root):
        """Many loops begin anew on FileNotFoundError; they must not do so over damage."""
        for step in (1, 2):
            flip(root / f"step-{step}" / "tree.json", 5)
        for read in (checkpointer.restore, checkpointer.metadata):
            words = f"^all 2 checkpoints in {root} cannot be read; step 2: .*step-2/tree"
            with pytest.warns(RuntimeWarning), pytest.raises(CheckpointError, match=words):
                read()
        checkpointer.remove(2)
        words = f"^the only checkpoint in {root} cannot be read; step 1: .*step-1/tree"
        with pytest.warns(RuntimeWarning), pytest.raises(CheckpointError, match=words):
            checkpointer.restore()

    @pytest.mark.parametrize("place", [0, 9, 500_000, -1])
    @pytest.mark.parametrize("name", ["tensors.safetensors", "tree.json"])
    def test_checksums_find_a_flipped_bit(
        self, checkpointer, root, name, place, monkeypatch
    ):
        path = root / "step-2" / name
        flip(path, place % path.stat().st_size)
        with pytest.raises(
            CheckpointError, match=rf"{path} is damaged: bytes 0 to \d+ have"
        ):
            checkpointer.verify(2)
        checkpointer.verify(1)
        words = f"{path} is damaged: "
        with Checkpointer(root, verify="checksum") as careful:
            for options in ({}, {"names": ["weights"]}, {"into": state_of(3)}):
                with pytest.warns(RuntimeWarning, match=words):
                    found = careful.restore(**options)
                assert np.array_equal(found["weights"][3], state_of(1)["weights"][3])
                with pytest.raises(CheckpointError, match=words):
                    careful.restore(2, **options)

    def test_checksums_find_a_wrong_read_of_a_good_file(self, root, monkeypatch):
        """As of a bad cable: no other step or copy is at fault."""
        read = _restoring._read

        def misread(*arguments):
            bases, values = read(*arguments)
            bases["weights"].view(np.uint8).flat[5] ^= 1
            return bases, values

        with Checkpointer(root, verify="checksum") as careful:
            careful.save(1, {"weights": np.arange(1000)})
            monkeypatch.setattr(_restoring, "_read", misread)
            for options in (
                {},
                {"names": ["weights"]},
                {"into": {"weights": np.zeros(1000, int)}},
            ):
                with pytest.raises(CheckpointError, match="was read wrongly"):
                    careful.restore(**options)
            assert careful.steps() == [1]

    def test_what_verify_has_found_damaged_is_not_restored(self, checkpointer, root):
        path = root / "step-2" / "tensors.safetensors"
        flip(path, 500_000)
        with pytest.raises(CheckpointError):
            checkpointer.verify(2)
        assert checkpointer.latest() == 1
        with pytest.warns(RuntimeWarning, match=f"step 2 is skipped: {path} is damaged"):
            assert same(checkpointer.restore(), state_of(1))
        flip(path, 500_000)
        checkpointer.verify(2)
        assert same(checkpointer.restore(), state_of(2))

    @pytest.mark.parametrize("options", [{}, {"names": ["weights"]}])
    def test_a_new_time_alone_is_no_damage(self, checkpointer, root, monkeypatch, options):
        """As touch(1) sets it, each time that the file is read; other bytes are damage."""
        path, change = root / "step-2" / "tensors.safetensors", os.utime
        read = _restoring._read

        def touched(*arguments):
            if "step-2" in arguments[0].path:
                change(path)
            return read(*arguments)

        monkeypatch.setattr(_restoring, "_read", touched)
        for again in (None, 2):
            found = checkpointer.restore(again, **options)["weights"]
            assert np.array_equal(found[3], state_of(2)["weights"][3])
        assert checkpointer.latest() == 2
        change = functools.partial(flip, at=500_000)
        with pytest.warns(RuntimeWarning, match="step 2 is skipped: .*is damaged"):
            checkpointer.restore(**options)

    def test_an_error_of_progress_is_not_the_steps(self, checkpointer):
        """Such as EIO, with which print() fails when the terminal is gone."""
        hung_up = OSError(errno.EIO, "hung up")
        with pytest.raises(OSError, match="hung up") as raised_first:
            checkpointer.verify(2, progress=lambda done, total: raised(hung_up))
        assert raised_first.value is hung_up
        assert checkpointer.steps() == [1, 2]

    def test_errors_of_skipped_steps_do_not_keep_what_was_read(self, root):
        """Otherwise each damaged step would cost the memory of a whole state."""
        with Checkpointer(root, verify="checksum", keep=None) as checkpointer:
            for step in (1, 2, 3):
                checkpointer.save(step, {"weights": np.zeros(4000)})
            for step in (2, 3):
                flip(root / f"step-{step}" / "tensors.safetensors", 2000)
            into = {"weights": np.empty(4000)}
            target = weakref.ref(into["weights"])
            with pytest.warns(RuntimeWarning, match="step [23] is skipped"):
                checkpointer.restore(into=into)
            del into
            assert target() is None

    @pytest.mark.parametrize("found_by", ["restore", "restore(step)", "verify"])
    def test_known_damage_is_not_counted(self, root, found_by):
        """Otherwise new saves are pruned in favour of damaged ones with higher numbers."""
        with Checkpointer(root, keep=None) as saver:
            for step in (1, 8, 9):
                saver.save(step, state_of(step))
        for step in (8, 9):
            flip(root / f"step-{step}" / "tensors.safetensors", 2000)
        with Checkpointer(root, verify="checksum", keep=2) as checkpointer:
            if found_by == "restore":
                with pytest.warns(RuntimeWarning, match="step [89] is skipped"):
                    checkpointer.restore()
            else:
                for step in (8, 9):
                    read = checkpointer.verify
                    if found_by == "restore(step)":
                        read = checkpointer.restore
                    with pytest.raises(CheckpointError):
                        read(step)
            assert (checkpointer.latest(), checkpointer.steps()) == (1, [1])
            with warnings.catch_warnings():
                # There is no warning about newer steps.
                warnings.simplefilter("error")
                for step in (2, 3):
                    checkpointer.save(step, state_of(step))
            assert checkpointer.steps() == [2, 3]
            # Damaged ones stay, unless they are saved again.
            assert all((root / f"step-{step}").is_dir() for step in (8, 9))
            checkpointer.save(8, state_of(8))
            assert checkpointer.steps() == [3, 8]

    def test_the_error_names_the_damaged_block(self, root):
        array = np.zeros(20 << 20, np.uint8)
        with Checkpointer(root) as checkpointer:
            path = checkpointer.save(1, [array]) / "tensors.safetensors"
            flip(path, 9 << 20)
            with pytest.raises(CheckpointError, match="bytes 8388608 to 16777216 have"):
                checkpointer.verify(1)

    def test_progress(self, checkpointer):
        said = []
        checkpointer.verify(1, progress=lambda *numbers: said.append(numbers))
        done, total = said[-1]
        assert done == total > 4 * 300_000

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"format": "other"}, "its format is not"),
            ({"step": 3}, "it is of step 3, not 2"),
            ({"step": 2.0}, "it is of step"),
            ({"checksum": "md5"}, "its checksum is 'md5'"),
            ({"block_bytes": 1}, "its block_bytes is 1"),
            ({"files": {}}, "its files lack"),
            ({"files": []}, "its files lack"),
        ],
        ids=str,
    )
    def test_hostile_manifests(self, checkpointer, root, change, words):
        path = root / "step-2" / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
        with pytest.raises(CheckpointError, match=f"{path} is damaged: {words}"):
            checkpointer.restore(2)

    @pytest.mark.parametrize(
        ("name", "record", "words"),
        [
            *(
                (name, {}, "is not a valid name of a file")
                for name in ("/etc/passwd", "../x", "a/b")
            ),
            *(
                (name, {}, "is not a valid name of a file")
                for name in ("", ".", "..", "manifest.json")
            ),
            *(
                ("x", record, "bytes")
                for record in ({}, 3, {"nbytes": -1}, {"nbytes": 2.0})
            ),
            ("x", {"nbytes": 2**63}, "bytes"),
            ("x", {"nbytes": 10}, "lacks the checksums of its 1 blocks"),
            (
                "x",
                {"nbytes": 10, "checksums": ["xyz"]},
                "lacks the checksums of its 1 blocks",
            ),
            ("x", {"nbytes": 0, "checksums": []}, "is missing"),
            ("link", {"nbytes": 0, "checksums": []}, "is not a regular file"),
            (
                "tree.json",
                {"nbytes": 2**40, "checksums": ["00000000"] * 2**17},
                "has .* bytes",
            ),
        ],
        ids=lambda value: str(value)[:30],
    )
    def test_hostile_files_of_a_manifest(self, checkpointer, root, name, record, words):
        folder = root / "step-2"
        (folder / "link").symlink_to("/dev/null")
        said = json.loads((folder / "manifest.json").read_text())
        said["files"][name] = record
        (folder / "manifest.json").write_text(json.dumps(said))
        with pytest.raises(CheckpointError, match=words):
            checkpointer.restore(2)

    @pytest.mark.parametrize(
        "text", ["", "[", "NaN", '{"a": 1, "a": 1}', "\xff", "[" * 100_000, "9" * 9999, "3"]
    )
    def test_a_manifest_that_is_no_json_is_damage(self, checkpointer, root, text):
        path = root / "step-2" / "manifest.json"
        path.write_bytes(text.encode("latin1"))
        with pytest.raises(CheckpointError, match=r"manifest\.json"):
            checkpointer.restore(2)
        # A huge one is not read.
        os.truncate(path, 128 << 20)
        with pytest.raises(CheckpointError, match="67108864 is the limit"):
            checkpointer.restore(2)

    @pytest.mark.parametrize("code", ["EMFILE", "EACCES", "EIO", "ENODATA", "EUCLEAN"])
    def test_only_damage_makes_restore_take_an_older_step(
        self, checkpointer, monkeypatch, code
    ):
        opened, lost = _restoring.StepFile, code not in ("EMFILE", "EACCES")

        def refused(path):
            if "step-2" in path:
                raise OSError(getattr(errno, code), "refused")
            return opened(path)

        monkeypatch.setattr(_restoring, "StepFile", refused)
        if lost:
            with pytest.warns(RuntimeWarning, match="step 2 is skipped: .*refused"):
                assert same(checkpointer.restore(), state_of(1))
        else:
            with pytest.raises(OSError, match="refused"):
                checkpointer.restore()

    @pytest.mark.parametrize("where", ["", "tree.json", "tensors.safetensors"])
    def test_no_descriptor_stays_open(self, checkpointer, root, where):
        """Neither after success nor after an error."""
        if where:
            os.truncate(root / "step-2" / where, 5)
        before = os.listdir("/proc/self/fd")
        assert checkpointer.latest() == (1 if where else 2)
        with contextlib.suppress(CheckpointError):
            checkpointer.restore(2)
        with contextlib.suppress(CheckpointError):
            checkpointer.verify(2)
        with Checkpointer(root) as other, pytest.raises(BlockingIOError):
            other.save(3, 3)
        checkpointer.save(2, 2)
        assert os.listdir("/proc/self/fd") == before

    def test_blocks_are_read_ahead_into_free_memory(self, root, monkeypatch):
        """A read that ends at once must not overwrite the block that is being checked."""

        class Handle:
            def submit_read(self, *arguments):
                request = nvmeio.default_handle().submit_read(*arguments)
                request.wait()
                return request

        monkeypatch.setattr(reading, "default_handle", Handle)
        monkeypatch.setattr(_restoring, "BLOCK_BYTES", 1 << 16)
        with Checkpointer(root) as checkpointer:
            checkpointer.save(1, state_of(1))
            checkpointer.verify(1)
            with pytest.raises(TypeError, match="progress is 5"):
                checkpointer.verify(1, progress=5)


@pytest.mark.parametrize("older", [{"a": 1}, {"a": 1, "b": (1, 2)}])
def test_no_older_step_is_mixed_into_what_a_damaged_one_has_filled(tmp_path, older):
    """The older one has fewer arrays, or another shape."""
    saved = {name: np.zeros(shape) for name, shape in older.items()}
    into = {"a": np.zeros(5), "b": np.zeros(6)}
    with Checkpointer(tmp_path, verify="checksum") as saver:
        saver.save(1, saved)
        folder = saver.save(2, {"a": np.ones(5), "b": np.ones(6)})
        with open(folder / "tensors.safetensors", "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"x")
        with (
            pytest.warns(RuntimeWarning, match="step 2 is skipped"),
            pytest.raises(CheckpointError, match="step-1 is not restored: `into` was"),
        ):
            saver.restore(into=into)
        # One that fills all of it replaces it.
        saver.save(1, {"a": np.full(5, 3.0), "b": np.full(6, 4.0)})
        with pytest.warns(RuntimeWarning, match="step 2 is skipped"):
            assert saver.restore(into=into) is not None
        assert into["a"].tolist() == [3] * 5
        assert into["b"].tolist() == [4] * 6


class TestARemovedLock:
    """Somebody took the file of a lock for a stale one, and another process began."""

    @pytest.fixture
    def before_commit(self, monkeypatch):
        """Call a function before the next step gets its name."""
        commit = StepFolder.commit

        def before_commit(act):
            def late(folder, *, sync):
                monkeypatch.undo()
                act()
                commit(folder, sync=sync)

            monkeypatch.setattr(StepFolder, "commit", late)

        return before_commit

    def test_a_save_replaces_and_prunes_nothing(self, tmp_path, before_commit):
        first, second = Checkpointer(tmp_path, keep=1), Checkpointer(tmp_path, keep=3)

        def begin_anew():
            (tmp_path / ".nvmeio-lock").unlink()
            second.save(9, state_of(9))
            second.save(10, state_of(10))

        before_commit(begin_anew)
        with first, second:
            with pytest.raises(BlockingIOError, match="this file of the lock was removed"):
                first.save(10, state_of(666))
            assert second.steps() == [9, 10]
            assert same(second.restore(), state_of(10))
            second.save(11, state_of(11))

    def test_a_step_is_not_removed(self, tmp_path, monkeypatch):
        def late(place, step):
            (tmp_path / ".nvmeio-lock").unlink(missing_ok=True)

        monkeypatch.setattr(_checkpointer, "name_another", late)
        with Checkpointer(tmp_path) as saver:
            saver.save(1, state_of(1))
            with pytest.raises(BlockingIOError, match="this file of the lock was removed"):
                saver.remove(1)
            assert same(saver.restore(), state_of(1))

    @pytest.mark.parametrize("anew", [False, True])
    @pytest.mark.parametrize("number", [errno.ESTALE, errno.ENOTCONN])
    def test_one_that_is_gone_for_its_server_is_taken_anew(
        self, tmp_path, monkeypatch, number, anew
    ):
        """Another host of NFS has removed it, or a FUSE server died, and another serves."""
        fstat = os.fstat
        with Checkpointer(tmp_path) as saver:
            saver.save(1, state_of(1))
            stale = saver._steps.root.lock.descriptor
            (tmp_path / ".nvmeio-lock").unlink()
            if anew:
                (tmp_path / ".nvmeio-lock").touch()

            def of_server(descriptor):
                if descriptor == stale:
                    raise OSError(number, os.strerror(number))
                return fstat(descriptor)

            monkeypatch.setattr(os, "fstat", of_server)
            saver.save(2, state_of(2))
            monkeypatch.undo()
            assert saver.steps() == [1, 2]

    def test_one_that_a_server_has_forgotten_is_not_held(self, tmp_path, monkeypatch):
        """As that of NFS forgets the locks of a host that was away for longer."""
        with Checkpointer(tmp_path, keep=1) as first, Checkpointer(tmp_path) as second:
            first.save(1, state_of(1))
            lost, pread = first._steps.root.lock.descriptor, os.pread

            def failing(descriptor, *arguments):
                if descriptor == lost:
                    # As the kernel's client says of what has lost its lock.
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                return pread(descriptor, *arguments)

            monkeypatch.setattr(os, "pread", failing)
            fcntl.flock(lost, fcntl.LOCK_UN)
            second.save(2, state_of(2))
            for call in (lambda: first.save(3, state_of(3)), lambda: first.remove(2)):
                with pytest.raises(BlockingIOError, match="another writes checkpoints"):
                    call()
            assert second.steps() == [1, 2]
            second.close()
            # It is opened anew.
            monkeypatch.setattr(os, "pread", pread)
            first.save(3, state_of(3))
            fcntl.flock(first._steps.root.lock.descriptor, fcntl.LOCK_UN)
            with open(tmp_path / ".nvmeio-lock") as other:
                # As one of another process.
                fcntl.flock(other, fcntl.LOCK_EX)
                with pytest.raises(BlockingIOError, match=r"here: process [^;]*$"):
                    first.save(4, state_of(4))

    def test_one_that_is_forgotten_during_a_save_gives_no_step(
        self, tmp_path, before_commit
    ):
        first, second = Checkpointer(tmp_path, keep=1), Checkpointer(tmp_path)

        def forget():
            fcntl.flock(first._steps.root.lock.descriptor, fcntl.LOCK_UN)
            second.save(2, state_of(2))

        before_commit(forget)
        with first, second:
            with pytest.raises(BlockingIOError, match="another writes checkpoints"):
                first.save(2, state_of(666))
            assert same(second.restore(), state_of(2))

    def test_one_that_is_forgotten_is_named_by_a_save_whose_files_are_gone(
        self, tmp_path, monkeypatch
    ):
        """The next writer has removed them, and has ended."""
        first, saying_space = Checkpointer(tmp_path), StepFolder.saying_space

        def late(folder):
            if os.path.exists(folder.path):
                monkeypatch.undo()
                fcntl.flock(first._steps.root.lock.descriptor, fcntl.LOCK_UN)
                with Checkpointer(tmp_path) as second:
                    second.save(2, state_of(2))
                shutil.rmtree(folder.path)
            return saying_space(folder)

        monkeypatch.setattr(StepFolder, "saying_space", late)
        with first:
            with pytest.raises(BlockingIOError, match="another has had this lock"):
                first.save(2, state_of(666))
            assert same(first.restore(), state_of(2))

    @pytest.mark.parametrize("call", ["save", "prune"])
    def test_one_that_is_forgotten_at_the_last_moment_changes_no_step(
        self, tmp_path, monkeypatch, call
    ):
        """After it was asked, and before a step is replaced or removed."""
        with Checkpointer(tmp_path) as old:
            for step in (1, 2):
                old.save(step, state_of(step))
        first, second = Checkpointer(tmp_path, keep=1), Checkpointer(tmp_path)
        module, name = {"save": (folders, "exchange"), "prune": (_roots, "set_aside")}[call]
        function = getattr(module, name)

        def late(*arguments):
            monkeypatch.undo()
            fcntl.flock(first._steps.root.lock.descriptor, fcntl.LOCK_UN)
            second.save(2, state_of(3))
            function(*arguments)

        monkeypatch.setattr(module, name, late)
        with first, second:
            with pytest.raises(BlockingIOError, match="another writes checkpoints"):
                first.save(2, state_of(666)) if call == "save" else first.prune()
            assert second.steps() == [1, 2]
            assert same(second.restore(), state_of(3))

    def test_one_that_is_not_granted_twice_is_held(self, tmp_path, monkeypatch):
        """As on a mount of SMB, which looks at ranges of bytes, not at whose they are."""
        flock, held = fcntl.flock, set()

        def once(file, how):
            if how & fcntl.LOCK_EX and file in held:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            flock(file, how)
            (held.add if how & fcntl.LOCK_EX else held.discard)(file)

        with Checkpointer(tmp_path) as saver:
            saver.save(1, state_of(1))
            held.add(saver._steps.root.lock.descriptor)
            monkeypatch.setattr(fcntl, "flock", once)
            saver.save(2, state_of(2))
            monkeypatch.undo()
            assert saver.steps() == [1, 2]


class TestAsync:
    """save_async(): when it returns, a second one meanwhile, and errors."""

    def test_a_staged_state_may_change_at_once(self, checkpointer, slow):
        state = state_of(1)
        future = checkpointer.save_async(1, state)
        assert future.staged.done()
        for array in state["weights"]:
            array[:] = 0
        assert not future.done()
        slow.set()
        future.result()
        assert same(checkpointer.restore(), state_of(1))

    @pytest.mark.parametrize("more", [-1, 0, 1])
    def test_states_of_whole_blocks_and_a_byte_more_or_less(self, root, more):
        array = np.ones(_saving.BLOCK_BYTES - 4096 + more, np.uint8)
        with Checkpointer(root) as checkpointer:
            path = checkpointer.save_async(1, [array]).result() / "tensors.safetensors"
            assert path.stat().st_size == _saving.BLOCK_BYTES + more
            checkpointer.verify(1)
            assert checkpointer.restore(1)[0].all()

    def test_staging_memory_is_reused(self, root):
        with Checkpointer(root) as checkpointer:
            addresses = set()
            for step in range(3):
                checkpointer.save_async(step, state_of(step)).result()
                addresses.add(checkpointer._staging._region.address)
            checkpointer.save_async(3, state_of(3, 200)).result()
            addresses.add(checkpointer._staging._region.address)
            assert len(addresses) == 1
            # A state that is larger by less than a page still fits.
            checkpointer.save_async(4, state_of(4, 301_000)).result()
            assert same(checkpointer.restore(4), state_of(4, 301_000))
        assert checkpointer._staging._region is None

    def test_an_unstaged_save_reports_when_the_state_may_change(self, checkpointer, slow):
        future = checkpointer.save_async(1, state_of(1), stage=False)
        assert slow.begun.wait(60)
        assert not future.staged.done()
        slow.set()
        assert future.staged.result() is None
        future.result()
        assert checkpointer._staging._region is None

    def test_a_failed_save_keeps_no_state(self, checkpointer, monkeypatch):
        def refuse(*_):
            raise OSError(errno.EIO, "broken")

        monkeypatch.setattr(_saving, "reserve", refuse)
        # Its records are kept by pytest, and have the error.
        monkeypatch.setattr(logging.getLogger("nvmeio"), "disabled", True)
        state = np.ones(1000)
        seen = weakref.ref(state)
        future = checkpointer.save_async(1, {"x": state}, stage=False)
        assert future.exception().errno == errno.EIO
        checkpointer.close()
        del state, future
        for thread in threading.enumerate():
            if thread.name == "nvmeio-checkpoint":
                thread.join(60)
        gc.collect()
        assert seen() is None

    @pytest.mark.parametrize("call", ["result", "exception", "save", "remove", "close"])
    def test_a_callback_of_staged_does_not_wait_for_itself(self, checkpointer, slow, call):
        future = checkpointer.save_async(1, state_of(1), stage=False)
        calls = {
            "result": future.result,
            "exception": future.exception,
            "save": lambda: checkpointer.save(2, state_of(2)),
            "remove": lambda: checkpointer.remove(1),
            "close": checkpointer.close,
        }
        called: Future = Future()

        def of_staged(_):
            try:
                called.set_result(calls[call]())
            except RuntimeError as error:
                called.set_exception(error)

        future.staged.add_done_callback(of_staged)
        slow.set()
        with pytest.raises(RuntimeError, match="waits for the save of step 1, but was"):
            called.result(60)
        assert future.result().name == "step-1"
        checkpointer.save(2, state_of(2))

    def test_a_second_save_does_not_overwrite_the_staged_first(
        self, root, slow, monkeypatch
    ):
        with Checkpointer(root) as checkpointer, ThreadPoolExecutor(1) as pool:
            checkpointer.save_async(1, state_of(1))
            waiting, await_last = threading.Event(), checkpointer._await_last

            def await_it():
                waiting.set()
                await_last()

            monkeypatch.setattr(checkpointer, "_await_last", await_it)
            second = pool.submit(checkpointer.save_async, 2, state_of(2))
            assert waiting.wait(60)
            slow.set()
            second.result().result()
            for step in (1, 2):
                assert same(checkpointer.restore(step), state_of(step))

    def test_a_second_save_waits_is_skipped_or_raises(self, root, slow):
        checkpointers = {
            busy: Checkpointer(root / busy, busy=busy) for busy in ("wait", "skip", "raise")
        }
        for checkpointer in checkpointers.values():
            checkpointer.save_async(1, 1)
        # Neither looks at the state, which would take as long as for a save.
        assert checkpointers["skip"].save_async(2, object()) is None
        with pytest.raises(RuntimeError, match="step 1 is still being saved"):
            checkpointers["raise"].save_async(2, object())
        with ThreadPoolExecutor(1) as pool:
            second = pool.submit(checkpointers["wait"].save_async, 2, 2)
            assert not second.done()
            slow.set()
            second.result().result()
        for busy, checkpointer in checkpointers.items():
            checkpointer.close()
            assert checkpointer.steps() == ([1, 2] if busy == "wait" else [1])

    @pytest.mark.parametrize("teller", ["save", "save_async", "remove", "close", "with"])
    def test_an_error_is_raised_by_the_next_call(self, root, no_room, monkeypatch, teller):
        """Which does its work first: a final save() must not be lost to an old error."""
        checkpointer = Checkpointer(root)
        if teller == "remove":
            monkeypatch.undo()
            checkpointer.save(3, 3)
            monkeypatch.setattr(_saving, "reserve", lambda *_: raised(no_room))
        future = checkpointer.save_async(2, 2)
        checkpointer._last._over.wait()
        monkeypatch.undo()
        arguments = {"save": (3, 3), "save_async": (3, 3), "remove": (3,), "close": ()}
        call = checkpointer.__exit__ if teller == "with" else getattr(checkpointer, teller)
        with pytest.raises(OSError, match="broken") as raised_first:
            call(*arguments.get(teller, (None,) * 3))
        if teller in ("save", "save_async", "remove") and sys.version_info >= (3, 11):
            assert "this is the error of step 2; " in raised_first.value.__notes__[0]
        # After close() another Checkpointer may write to the root, in spite of the error.
        if teller in ("close", "with"):
            with Checkpointer(root) as other:
                other.save(1, 1)
        assert future.exception() is no_room
        # The error is reported once.
        if teller not in ("close", "with"):
            checkpointer.save(4, 4)
        checkpointer.close()
        kept = {"save": [3, 4], "save_async": [3, 4], "remove": [4]}
        assert checkpointer.steps() == kept.get(teller, [1])

    def test_an_error_outlives_a_save_that_fails_too(self, root, monkeypatch):
        with Checkpointer(root) as checkpointer:
            first, second = OSError(errno.EIO, "first"), OSError(errno.EIO, "second")
            monkeypatch.setattr(_saving, "reserve", lambda *_: raised(first))
            checkpointer.save_async(1, 1)
            checkpointer._last._over.wait()
            monkeypatch.setattr(_saving, "reserve", lambda *_: raised(second))
            with pytest.raises(OSError, match="second"):
                checkpointer.save(2, 2)
            monkeypatch.undo()
            with pytest.raises(OSError, match="first"):
                checkpointer.save(3, 3)
            assert checkpointer.steps() == [3]

    @pytest.mark.parametrize("asked", [False, True])
    def test_python_fails_at_exit_if_nobody_has_heard_of_an_error(self, tmp_path, asked):
        """Of saves, of copies to drain_to, and of drain()."""
        program = """
import nvmeio.checkpoint, os, pathlib, sys
pathlib.Path("file").touch()
os.mkdir("folder")
saver = nvmeio.checkpoint.Checkpointer("run", drain_to="file/far")
saver.save(1, 1)
futures = [saver.drained, nvmeio.checkpoint.drain("folder", "file/elsewhere")]
nvmeio.checkpoint._saving.reserve = None
other = nvmeio.checkpoint.Checkpointer("other")
futures.append(other.save_async(2, {}))
del saver, other
print("the end")
if sys.argv[1] == "True":
    for each in futures:
        each.exception()
"""
        command = [sys.executable, "-W", "ignore", "-c", program, str(asked)]
        found = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert found.stdout == "the end\n"
        if asked:
            assert (found.returncode, found.stderr) == (0, "")
            return
        assert found.returncode == 120
        lines = sorted(found.stderr.splitlines())
        patterns = [
            r"nvmeio: /.*/folder was not copied to /.*/file/elsewhere: .*",
            r"nvmeio: step 1 was not copied: \[Errno 20\] .*",
            r"nvmeio: step 2 was not saved: 'NoneType' object is not callable",
        ]
        assert len(lines) == len(patterns)
        for line, pattern in zip(lines, patterns, strict=True):
            assert re.fullmatch(pattern + r" \(no call has raised this\)", line)

    @pytest.mark.parametrize(
        "last",
        ["sys.stdout.close()", "sys.stderr.close()", "sys.stdout = object()"],
    )
    def test_python_fails_at_exit_whatever_became_of_its_streams(self, tmp_path, last):
        program = f"""
import nvmeio.checkpoint, sys
nvmeio.checkpoint._saving.reserve = None
saver = nvmeio.checkpoint.Checkpointer("run")
saver.save_async(2, {{}})
saver._last._over.wait()
{last}
"""
        command = [sys.executable, "-c", program]
        found = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert found.returncode == 120
        told = "nvmeio: step 2 was not saved: 'NoneType' object is not callable (no call"
        assert found.stderr.startswith("" if "stderr" in last else told)
        assert found.stderr.count("\n") == ("stderr" not in last)

    @pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
    def test_a_worker_of_multiprocessing_tells_its_errors(self, tmp_path, method):
        """A forked one ends without the functions of atexit."""
        (tmp_path / "program.py").write_text("""
import multiprocessing, sys
import nvmeio.checkpoint

def work():
    nvmeio.checkpoint._saving.reserve = None
    nvmeio.checkpoint.Checkpointer("run").save_async(2, {})

if __name__ == "__main__":
    worker = multiprocessing.get_context(sys.argv[1]).Process(target=work)
    worker.start()
    worker.join()
""")
        command = [sys.executable, "program.py", method]
        found = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=True
        )
        words = "nvmeio: step 2 was not saved: 'NoneType' object is not callable (no call "
        assert found.stderr.count(words) == 1

    @pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python refuses the thread")
    def test_python_waits_for_a_save_that_begins_at_exit(self, tmp_path):
        program = """
import atexit, nvmeio.checkpoint, threading
saver = nvmeio.checkpoint.Checkpointer("run", drain_to="far")
saver.save(1, 1)
write = nvmeio.checkpoint._saving.Plan.write
def slow(*arguments):
    # Until the main thread is at the end, unless it waits.
    threading.main_thread().join(0.5)
    write(*arguments)
def save():
    nvmeio.checkpoint._saving.Plan.write = slow
    saver.save_async(2, 2)
atexit.register(save)
"""
        subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
        for name in ("run", "far"):
            assert Checkpointer(tmp_path / name).steps() == [1, 2]

    @pytest.mark.parametrize("call", ["save_async", "begin", "drain"])
    def test_python_exits_after_ctrl_c_while_a_thread_is_started(self, tmp_path, call):
        """Python lists for ever a thread that does not begin."""
        program = f"""
import nvmeio.checkpoint, threading
saver = nvmeio.checkpoint.Checkpointer("run", drain_to="far")
saver.save(1, 1)
saver.drained.result()
# From Python 3.13 on it has another name.
names = ("_start_joinable_thread", "_start_new_thread")
name = next(name for name in names if hasattr(threading, name))
start = getattr(threading, name)
def interrupted(*_, **__):
    setattr(threading, name, start)
    raise KeyboardInterrupt
setattr(threading, name, interrupted)
try:
    if {call!r} == "save_async":
        saver.save_async(2, 2)
    elif {call!r} == "begin":
        saver.save(2, 2)
    else:
        nvmeio.checkpoint.drain("run/step-1", "copy")
except KeyboardInterrupt:
    print("interrupted")
saver.close()
"""
        command = [sys.executable, "-c", program]
        out = subprocess.run(
            command, cwd=tmp_path, check=True, timeout=60, stdout=subprocess.PIPE
        )
        assert out.stdout == b"interrupted\n"
        steps = [1, 2] if call == "begin" else [1]
        for name in ("run", "far"):
            assert Checkpointer(tmp_path / name).steps() == steps

    def test_close_that_is_interrupted_releases_nothing(self, root, monkeypatch):
        """The save goes on, and would replace a step of the next writer."""
        gate = gated(monkeypatch, _saving.Plan, "write")
        checkpointer = Checkpointer(root)
        future = checkpointer.save_async(2, "the first")
        assert gate.begun.wait(30)
        with monkeypatch.context() as patch:
            patch.setattr(future._over, "wait", lambda: raised(KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                checkpointer.close()
        with pytest.raises(BlockingIOError), Checkpointer(root) as other:
            other.save(2, "the second")
        gate.set()
        checkpointer.close()
        assert future.result().name == "step-2"
        with Checkpointer(root) as other:
            other.save(2, "the second")
            assert other.restore() == "the second"

    @pytest.mark.parametrize("how", ["result", "exception"])
    def test_an_error_that_was_retrieved_is_not_raised_again(
        self, checkpointer, no_room, monkeypatch, how
    ):
        future = checkpointer.save_async(2, 2, stage=False)
        if how == "result":
            with pytest.raises(OSError, match="broken"):
                future.result()
        assert how == "result" or future.exception() is no_room
        with pytest.raises(OSError, match="broken"):
            future.staged.result()
        monkeypatch.undo()
        checkpointer.save(3, 3)

    def test_a_timeout_does_not_count_as_retrieving_the_error(
        self, root, slow, monkeypatch
    ):
        checkpointer = Checkpointer(root)
        future = checkpointer.save_async(2, 2)
        for ask in (future.result, future.exception):
            with pytest.raises(FutureTimeoutError):
                ask(0)
        monkeypatch.setattr(_saving, "File", lambda *_: 1 / 0)
        slow.set()
        with pytest.raises(ZeroDivisionError):
            checkpointer.close()

    @pytest.mark.parametrize("stage", [True, False])
    def test_a_cancelled_save_leaves_nothing(
        self, checkpointer, root, slow, monkeypatch, stage
    ):
        future = checkpointer.save_async(1, state_of(1), stage=stage)
        assert slow.begun.wait(60)
        assert future.cancel()
        # A cancelled save stops writing.
        written = []
        monkeypatch.setattr(_saving.Plan, "_write_text", lambda *a: written.append(a))
        slow.set()
        with pytest.raises(CancelledError):
            future.result()
        checkpointer._last._over.wait()
        assert (future.staged.exception(60) is None) == stage
        monkeypatch.undo()
        assert written == []
        assert os.listdir(root) == [".nvmeio-lock"]
        future = checkpointer.save_async(2, 2)
        future.result()
        assert not future.cancel()
        assert checkpointer.steps() == [2]

    def test_a_save_in_its_rename_cannot_be_cancelled(self, root, monkeypatch):
        gate = gated(monkeypatch, Unfinished, "commit")
        with Checkpointer(root) as checkpointer:
            future = checkpointer.save_async(1, 1)
            assert gate.begun.wait(60)
            cancelled = future.cancel()
            gate.set()
            assert not cancelled
            assert future.result() == root / "step-1"

    def test_a_lack_of_memory_for_the_copy_is_an_error(self, root, monkeypatch):
        monkeypatch.setattr("nvmeio._memory.available.available_bytes", lambda: 1000)
        with Checkpointer(root) as checkpointer:
            with pytest.raises(
                MemoryError, match=r"a copy of the state needs 1.* and 1000 B"
            ):
                checkpointer.save_async(1, state_of(1))
            checkpointer.save_async(1, state_of(1), stage=False).result()

    def test_a_closed_checkpointer_restores_but_does_not_save(self, root):
        checkpointer = Checkpointer(root)
        checkpointer.save_async(1, state_of(1))
        with Checkpointer(root) as other:
            with pytest.raises(BlockingIOError):
                other.save(2, 2)
            checkpointer.close()
            checkpointer.close()
            for call in (checkpointer.prune, lambda: checkpointer.save(2, 2)):
                with pytest.raises(ValueError, match="is closed"):
                    call()
            assert same(checkpointer.restore(), state_of(1))
            # Nothing of this took the lock again.
            other.save(3, 3)

    @pytest.mark.parametrize("stage", [True, False])
    def test_the_interpreter_waits_for_a_save_at_exit(self, root, stage):
        run_child("save_and_leave", root=str(root), stage=stage)
        assert same(Checkpointer(root).restore(), state_of(1))

    def test_the_gil_is_free_meanwhile(self, checkpointer, tmp_path, slow_default):
        """This thread runs while the saving thread waits for a busy drive."""
        with plugged(slow_default, tmp_path):
            submitted = slow_default.stats()["requests"]
            future = checkpointer.save_async(1, state_of(1), stage=False)
            while slow_default.stats()["requests"] == submitted:
                time.sleep(0.001)
            # A thread that kept the GIL would let this one go on only after its save.
            for _ in range(100):
                time.sleep(0.001)
            assert not future.done()
        future.result()
        assert same(checkpointer.restore(), state_of(1))


class TestSequence:
    """Steps saved out of order, and leftovers of other processes."""

    def test_saving_below_a_later_step_warns(self, root):
        with Checkpointer(root, keep=2) as checkpointer:
            for step in (1, 2, 3):
                checkpointer.save(step, step)
            assert checkpointer.restore(2) == checkpointer.restored == 2
            words = "step 2 is not the newest"
            for save in (checkpointer.save, checkpointer.save_async):
                with pytest.warns(RuntimeWarning, match=words) as told:
                    save(2, 7)
                assert [each.filename for each in told] == [__file__]
            for step in (3, 2):
                checkpointer.remove(step)
            assert checkpointer.steps() == []
            with pytest.raises(FileNotFoundError, match="no such checkpoint"):
                checkpointer.remove(3)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                checkpointer.save(2, 8)
            assert (checkpointer.restore(), checkpointer.restored) == (8, 2)

    def test_remove_deletes_damaged_steps_but_not_those_being_read(
        self, checkpointer, root
    ):
        (checkpointer.save(1, 1) / "tree.json").unlink()
        checkpointer.remove(1)
        path = checkpointer.save(2, 2)
        with open(path / "manifest.json") as held:
            fcntl.flock(held, fcntl.LOCK_SH)
            with pytest.raises(BlockingIOError, match="the step is being read"):
                checkpointer.remove(2)
        assert os.listdir(root) != [".nvmeio-lock"]

    def test_restored_is_the_step_that_was_restored(self, checkpointer, root):
        assert checkpointer.restored is None
        for step in (1, 2):
            checkpointer.save(step, step)
        flip(root / "step-2" / "tree.json", 5)
        for read, found in ((checkpointer.metadata, None), (checkpointer.restore, 1)):
            with pytest.warns(RuntimeWarning, match="step 2 is skipped") as told:
                assert read() == found
            assert [each.filename for each in told] == [__file__]
        assert (checkpointer.restored, checkpointer.latest()) == (1, 1)
        assert Checkpointer(root).latest() == 2

    def test_the_first_save_removes_leftovers_of_any_host(self, root):
        root.mkdir()
        ends = "elsewhere-1-2-01234567.nvmeio-tmp"
        names = [f".step-1.{ends}", f".step-2.{ends}", f".other.{ends}"]
        for name in names:
            (root / name).mkdir()
        # Its writer was killed before it renamed this to .nvmeio-latest.
        (root / f"..nvmeio-latest.{ends}").write_bytes(b"step-7\n")
        held = os.open(root / names[1], os.O_RDONLY)
        fcntl.flock(held, fcntl.LOCK_EX)
        try:
            with Checkpointer(root) as checkpointer:
                assert checkpointer.cleanup() == []
                checkpointer.save(3, 3)
                left = {*names[1:], *OURS, "step-3"}
                assert set(os.listdir(root)) == left
                # Only once: a later leftover belongs to the process that holds the lock.
                (root / names[0]).mkdir()
                checkpointer.save(4, 4)
                assert (root / names[0]).is_dir()
        finally:
            os.close(held)

    def test_the_next_save_removes_what_an_earlier_one_left(self, root):
        """Such as a folder that could not be removed, in a process that goes on."""
        with Checkpointer(root, keep=1) as checkpointer:
            checkpointer.save(2, 2)
            left = os.path.basename(temporary_name(str(root / "step-1")))
            (root / left).mkdir()
            with Unfinished(str(root / "step-5"), replace=True) as used:
                # Another thread has made it, and not locked it yet; or cannot lock it.
                used.close()
                checkpointer.save(3, 3)
                assert os.path.isdir(used.path)
            assert {*os.listdir(root)} == {*OURS, "step-3"}

    def test_no_lock_stays_if_a_with_block_does_not_begin(self, root):
        """Ctrl-C may come between the call and the block."""
        with Checkpointer(root, keep=1) as checkpointer:
            folder = str(checkpointer.save(1, 1))
            for call in (
                lambda: Held(folder, 1),
                lambda: Unfinished(str(root / "step-2"), replace=True),
            ):
                before = len(os.listdir("/proc/self/fd"))
                call()
                assert len(os.listdir("/proc/self/fd")) == before
            checkpointer.save(3, 3)
            assert {*os.listdir(root)} == {*OURS, "step-3"}

    def test_a_reader_finds_the_next_step_if_the_last_one_goes(self, root):
        """With keep=1 a writer removes the last step once the next one is there."""
        with Checkpointer(root, keep=1) as writer:
            writer.save(1, 1)
            for step, look in enumerate(
                ("latest", "steps", "restore", "metadata"), start=2
            ):
                reader = Checkpointer(root)
                listed = reader._steps.root.steps

                def list_late(listed=listed, reader=reader, step=step):
                    found = listed()
                    reader._steps.root.steps = listed
                    writer.save(step, step, {"step": step})
                    return found

                reader._steps.root.steps = list_late
                expected = {"steps": [step], "metadata": {"step": step}}.get(look, step)
                assert getattr(reader, look)() == expected

    def test_a_step_that_cannot_be_opened_does_not_stop_saves(self, root, monkeypatch):
        with Checkpointer(root, keep=1) as checkpointer:
            path = checkpointer.save(1, 1) / "manifest.json"
            path.unlink()
            with socket.socket(socket.AF_UNIX) as server:
                # From inside the folder, because bind() limits the length of a path.
                monkeypatch.chdir(path.parent)
                server.bind(path.name)
                checkpointer.save(2, 2)
                checkpointer.save(3, 3)
                assert checkpointer.steps() == [3]
                assert checkpointer.latest() == 3

    def test_an_error_of_pruning_does_not_fail_the_save(self, root, monkeypatch):
        with Checkpointer(root, keep=1) as checkpointer:
            checkpointer.save(1, 1)
            broken = OSError(errno.EIO, "broken")
            monkeypatch.setattr(
                _roots, "set_aside", lambda *_: (_ for _ in ()).throw(broken)
            )
            words = r"older checkpoints were not removed: \[Errno 5\] broken"
            with pytest.warns(RuntimeWarning, match=words):
                checkpointer.save(2, 2)
            assert checkpointer.restore() == 2
            with pytest.raises(OSError, match="broken"):
                checkpointer.prune()


class TestInBetween:
    """Calls during a save: by signal handlers, callbacks and forked children."""

    @pytest.mark.parametrize("call", ["save", "save_async", "prune", "close"])
    def test_a_call_in_the_middle_of_a_save_is_refused(
        self, checkpointer, monkeypatch, call
    ):
        stage = _saving.Plan.stage
        arguments = (9, state_of(9)) if call.startswith("save") else ()

        def stage_late(plan, *others):
            with pytest.raises(RuntimeError, match="at work"):
                getattr(checkpointer, call)(*arguments)
            stage(plan, *others)

        monkeypatch.setattr(_saving.Plan, "stage", stage_late)
        checkpointer.save_async(1, state_of(1)).result()
        assert checkpointer.steps() == [1]
        assert same(checkpointer.restore(), state_of(1))

    def test_callbacks_may_save_while_others_wait(self, root, slow):
        with Checkpointer(root, keep=1) as checkpointer:
            future = checkpointer.save_async(1, 1)
            called = threading.Event()

            def save_more(future):
                checkpointer.prune()
                checkpointer.save(3, 3)
                called.set()

            future.add_done_callback(save_more)
            with ThreadPoolExecutor(1) as pool:
                second = pool.submit(checkpointer.save, 2, 2)
                slow.set()
                second.result(60)
            assert called.wait(60)
            assert checkpointer.steps() == [3]

    def test_a_save_ends_before_its_callbacks(self, root):
        with Checkpointer(root, busy="raise") as checkpointer:
            gate = threading.Event()
            future = checkpointer.save_async(1, 1)
            future.add_done_callback(lambda _: gate.wait(60))
            future.result()
            checkpointer.save_async(2, 2).result()
            gate.set()
            assert checkpointer.steps() == [1, 2]

    def test_without_threads_only_synchronous_saves_work(self, checkpointer, monkeypatch):

        def refused(thread):
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError, match="new thread"):
            checkpointer.save_async(1, state_of(1))
        checkpointer.save(2, state_of(2))
        monkeypatch.undo()
        checkpointer.save_async(3, state_of(3)).result()
        assert checkpointer.steps() == [2, 3]

    @pytest.mark.parametrize("call", ["save", "close"])
    def test_a_child_forked_while_a_save_goes_on(self, root, call):
        report = run_child("fork_while_saving", root=str(root), call=call).report
        assert (
            report
            == {
                "save": "another writes checkpoints here",
                "close": "closed",
            }[call]
        )
        assert Checkpointer(root).steps() == [1]

    def test_the_last_error_is_logged_and_noted_on_another_error(
        self, root, no_room, caplog, monkeypatch
    ):
        # Told at the exit of Python, which then fails: here of the tests.
        monkeypatch.setattr(_futures, "_untold", {})
        checkpointer = Checkpointer(root)
        future = checkpointer.save_async(5, 5)
        futures.wait([future])
        assert "step 5 was not saved: [Errno 5] broken" in caplog.text
        body = ValueError("body")
        with pytest.raises(ValueError, match="body"), checkpointer:
            raise body
        notes = getattr(body, "__notes__", ["a checkpoint was not saved"])
        assert "a checkpoint was not saved" in notes[0]


def with_versions(value):
    found = collections.OrderedDict({1: value})
    found._metadata = {"v": 1}
    return found


@pytest.mark.parametrize(
    ("nested", "levels"),
    [(lambda value: {"deeper": value}, 90), (with_versions, 70)],
    ids=["dict", "OrderedDict with _metadata"],
)
def test_restoring_near_the_recursion_limit_takes_the_newest_step(
    checkpointer, nested, levels
):
    """A RecursionError must not count as damage of the newest step."""
    state = 0
    for _ in range(levels):
        state = nested(state)
    for step in (1, 2):
        checkpointer.save(step, [step, state])

    def restore(depth):
        return checkpointer.restore() if not depth else restore(depth - 1)

    restored, depths = [], range(sys.getrecursionlimit() - 50, 100, -100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for depth in depths:
            try:
                assert restore(depth)[0] == 2
            except RecursionError:
                assert not restored
            else:
                restored.append(depth)
    assert depths[0] not in restored
    assert depths[-1] in restored


@pytest.mark.parametrize("what", ["link", "other name", "folder"])
def test_a_foreign_file_is_not_used_as_the_lock(root, tmp_path, what):
    root.mkdir()
    lock, victim = root / ".nvmeio-lock", tmp_path / "victim"
    victim.write_text("mine")
    if what == "folder":
        lock.mkdir()
    else:
        lock.symlink_to(victim) if what == "link" else lock.hardlink_to(victim)
    with Checkpointer(root) as checkpointer:
        with pytest.raises(OSError, match=re.escape(str(lock))):
            checkpointer.save(1, 1)
        assert victim.read_text() == "mine"


def test_a_removed_root_is_locked_again(root):
    with Checkpointer(root) as first, Checkpointer(root) as second:
        first.save(1, 1)
        shutil.rmtree(root)
        second.save(2, 2)
        words = "another writes checkpoints here: .*; that is this process: close the other"
        with pytest.raises(BlockingIOError, match=words):
            first.save(3, 3)
        second.close()
        first.save(3, 3)
        assert first.steps() == [2, 3]


def test_missing_checksums_are_an_error(root):
    with pytest.raises(ValueError, match="there are no checksums"):
        Checkpointer(root, checksum=None, verify="checksum")
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, 1)
    with Checkpointer(root, checksum=None) as checkpointer:
        checkpointer.save(2, 2)
        assert checkpointer.restore() == 2
        with pytest.raises(CheckpointError, match="saved without checksums"):
            checkpointer.verify(2)
    # The step may be right, so an older one does not replace it.
    with pytest.raises(CheckpointError, match="step-2 was saved without checksums"):
        Checkpointer(root, verify="checksum").restore()


def test_a_format_of_another_version_is_an_error(root):
    """No older step is restored instead, and the step is neither counted nor pruned."""
    with Checkpointer(root, keep=1) as checkpointer:
        checkpointer.save(1, 1)
        checkpointer.save(2, 2)
        path = root / "step-2" / "manifest.json"
        old = path.read_text()
        path.write_text(old.replace("nvmeio-checkpoint-2", "nvmeio-checkpoint-3"))
        for step in (None, 2):
            with pytest.raises(CheckpointError, match=f"{path} is of the format nvmeio-ch"):
                checkpointer.restore(step)
        for step in (3, 4):
            checkpointer.save(step, step)
        assert checkpointer.steps() == [4]
        path.write_text(old)
        assert checkpointer.restore(2) == 2


class TestLocks:
    """Only one process writes to a root; a step that is being read is kept."""

    def test_a_step_that_is_being_removed_is_not_read(self, root, monkeypatch):
        with Checkpointer(root, keep=1) as checkpointer:
            checkpointer.save(1, 1)
            set_aside, held = _roots.set_aside, []

            def set_aside_late(folder, *how):
                path = os.path.join(folder, "manifest.json")
                with open(path) as manifest, pytest.raises(BlockingIOError):
                    fcntl.flock(manifest, fcntl.LOCK_SH | fcntl.LOCK_NB)
                held.append(folder)
                set_aside(folder, *how)

            monkeypatch.setattr(_roots, "set_aside", set_aside_late)
            checkpointer.save(2, 2)
            assert held == [str(root / "step-1")]

    @pytest.mark.parametrize("other", ["a thread", "a container"])
    def test_nobody_gives_a_step_back_that_is_being_removed(self, root, monkeypatch, other):
        """As a thread that copies steps, which takes the lock of the folder again.

        Or a reader in another container, where this process is unknown.
        """
        rename, taken = os.rename, []
        with Checkpointer(root) as checkpointer:
            checkpointer.save(1, 1)

            def take_after(source, target):
                rename(source, target)
                if str(target).endswith(".nvmeio-old"):
                    taken.append(target)
                    if other == "a thread":
                        checkpointer._steps.root.take()
                        return
                    with monkeypatch.context() as patch:
                        patch.setattr(names, "_start_of", lambda process: -1)
                        Checkpointer(root).steps()

            monkeypatch.setattr(os, "rename", take_after)
            checkpointer.remove(1)
            # That of the step, and of the file that names it.
            assert len(taken) == 2
            assert os.listdir(root) == [".nvmeio-lock"]

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
    @pytest.mark.parametrize("where", ["root", "drain_to"])
    def test_another_users_lock_is_taken_in_a_sticky_folder(self, root, monkeypatch, where):
        """Linux refuses O_CREAT for it, if so set, also to root."""
        opened, far = locks.opened, root if where == "drain_to" else None
        here = root.parent / "here" if far else root

        def refusing(path, flags, *args):
            if flags & os.O_CREAT and os.path.exists(path) and os.stat(path).st_uid:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
            return opened(path, flags, *args)

        with Checkpointer(root) as checkpointer:
            checkpointer.save(1, 1)
        os.chmod(root, 0o1777)
        for path in (root, *root.rglob("*")):
            os.chown(path, 1000, 1000)
        monkeypatch.setattr(locks, "opened", refusing)
        with Checkpointer(here, drain_to=far) as checkpointer:
            checkpointer.save(2, 2)
        assert Checkpointer(root).restore() == 2

    def test_a_forked_child_does_not_keep_a_readers_lock(self, root):
        with Checkpointer(root, keep=1) as checkpointer:
            checkpointer.save(1, state_of(1))
            child = Child("fork_while_verifying", root=str(root))
            child.ready()
            checkpointer.save(2, 2)
            assert checkpointer.steps() == [2]
            child.stop()

    @pytest.mark.parametrize("text", [b"", bytes(40), b"p", b"process 1 o", b"mine", b"q"])
    def test_a_lock_file_is_used_again_if_it_may_be_ours(self, root, text):
        """It has zeros after a power failure, and a part where there was no space."""
        root.mkdir()
        (root / ".nvmeio-lock").write_bytes(text)
        with Checkpointer(root) as checkpointer:
            if text in (b"mine", b"q"):
                with pytest.raises(OSError, match="not a file of a Checkpointer"):
                    checkpointer.save(1, 1)
                assert (root / ".nvmeio-lock").read_bytes() == text
            else:
                checkpointer.save(1, 1)

    def test_the_error_names_another_writing_process(self, root):
        child = Child("hold_lock", root=str(root))
        child.ready()
        with Checkpointer(root) as checkpointer:
            words = "another writes checkpoints here: "
            pattern = rf"{words}process {child.process.pid} on [^;]*$"
            for call in (lambda: checkpointer.save(2, 2), checkpointer.prune):
                with pytest.raises(BlockingIOError, match=pattern):
                    call()
            # Reading takes no lock of the root.
            assert same(checkpointer.restore(), state_of(1))
            checkpointer.verify(1)
            child.stop()
            checkpointer.save(2, 2)
            assert checkpointer.steps() == [1, 2]

    def test_a_forked_child_does_not_keep_the_writers_lock(self, root):
        skip_sanitized("cannot follow forks of a process with threads")
        checkpointer = Checkpointer(root)
        checkpointer.save(1, 1)
        (reader, told), (forked, writer) = os.pipe(), os.pipe()
        child = os.fork()
        if child == 0:
            os.close(told)
            os.write(writer, b"x")
            os.read(reader, 1)
            os._exit(0)
        try:
            os.read(forked, 1)
            checkpointer.close()
            with Checkpointer(root) as other:
                other.save(2, 2)
        finally:
            os.close(told)
            assert os.waitpid(child, 0)[1] == 0
            for descriptor in (reader, forked, writer):
                os.close(descriptor)

    def test_a_step_that_is_being_read_stays(self, root):
        with Checkpointer(root, keep=1) as checkpointer:
            checkpointer.save(1, state_of(1))
            descriptor = os.open(root / "step-1" / "manifest.json", os.O_RDONLY)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            before = os.listdir("/proc/self/fd")
            checkpointer.save(2, 2)
            assert checkpointer.steps() == [1, 2]
            assert os.listdir("/proc/self/fd") == before
            os.close(descriptor)
            assert checkpointer.prune() == [1]

    def test_a_lock_of_whoever_may_read_stops_nobody(self, root):
        """And nobody else may read, and so lock, the file of the writer's lock."""
        with Checkpointer(root, keep=1) as checkpointer:
            checkpointer.save(1, state_of(1))
            with open(root / "step-1" / "manifest.json") as manifest:
                fcntl.flock(manifest, fcntl.LOCK_EX)
                assert checkpointer.latest() == 1
                assert same(checkpointer.restore(), state_of(1))
                checkpointer.verify(1)
                checkpointer.save(2, 2)
                # It counts as being read.
                assert checkpointer.steps() == [1, 2]
            assert checkpointer.prune() == [1]

    def test_the_second_name_of_a_killed_save_s_lock_is_removed(self, root):
        with Checkpointer(root) as checkpointer:
            checkpointer.save(1, 1)
        left = root / f"..nvmeio-lock.{_host()}-1-1-01234567.nvmeio-tmp"
        os.link(root / ".nvmeio-lock", left)
        with Checkpointer(root) as checkpointer:
            checkpointer.save(2, 2)
        assert not left.exists()

    @pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o600), (0o002, 0o660)])
    def test_only_who_may_write_may_ever_read_the_writers_lock(
        self, root, monkeypatch, umask, mode
    ):
        """Who may read a file may also lock it."""
        looked, before, modes = locks.is_of_a_lock, os.umask(umask), []

        def look(number):
            modes.append(os.fstat(number).st_mode & 0o777)
            return looked(number)

        monkeypatch.setattr(locks, "is_of_a_lock", look)
        try:
            with Checkpointer(root) as checkpointer:
                checkpointer.save(1, 1)
        finally:
            os.umask(before)
        assert modes == [mode]

    def test_a_restore_keeps_its_step(self, root, monkeypatch):
        with Checkpointer(root, keep=1) as checkpointer:
            checkpointer.save(1, state_of(1))
            restored = []
            read = _restoring._read

            def read_late(*arguments):
                checkpointer.save(2, 2)
                restored.append(checkpointer.steps())
                return read(*arguments)

            monkeypatch.setattr(_restoring, "_read", read_late)
            assert same(checkpointer.restore(1), state_of(1))
            assert restored == [[1, 2]]
            assert checkpointer.prune() == [1]

    def test_a_step_that_keeps_being_replaced_is_an_error(self, checkpointer, monkeypatch):
        """As on a file system without stable inode numbers."""
        checkpointer.save(1, 1)
        monkeypatch.setattr(_restoring.Held, "is_there", lambda held: False)
        with pytest.raises(CheckpointError, match="was replaced 100 times"):
            checkpointer.restore(1)

    def test_a_step_replaced_while_it_is_opened_is_opened_again(
        self, checkpointer, monkeypatch
    ):
        checkpointer.save(1, state_of(1))
        opened = _restoring.StepFile

        def open_late(path):
            monkeypatch.undo()
            checkpointer.save(1, state_of(2))
            return opened(path)

        monkeypatch.setattr(_restoring, "StepFile", open_late)
        assert same(checkpointer.restore(1), state_of(2))


def test_a_read_only_root_can_be_restored(root):
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, state_of(1))
    call = "import sys; from nvmeio.checkpoint import Checkpointer\n"
    call += "c = Checkpointer(sys.argv[1]); c.verify(1); print(c.restore()['name'])\n"
    call += "try: c.save(2, 2)\nexcept PermissionError as e: print(e)"
    os.chmod(root / ".nvmeio-lock", 0o444)
    command = [*as_nobody(), sys.executable, "-c", call, str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("state 1\n[Errno 13] Permission denied"), done.stderr
    assert done.stdout.endswith(f": '{root}/.nvmeio-lock'\n")


def test_a_full_drive_is_refused_before_writing(checkpointer, root, monkeypatch):
    """The error has the needed and the free bytes, and nothing is left behind."""
    checkpointer.save(1, state_of(1))
    space = os.statvfs(root)
    free = space.f_bfree * space.f_frsize
    # Not one block was written.
    with open(root.parent / "huge", "wb") as file:
        file.truncate(free + (1 << 33))
    huge = np.memmap(root.parent / "huge", np.uint8, "r")
    with pytest.raises(OSError, match=r"are needed, and \d+ are free") as caught:
        checkpointer.save(2, {"x": huge})
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(root / "step-2")
    assert sorted(os.listdir(root)) == [".nvmeio-latest", ".nvmeio-lock", "step-1"]


@pytest.mark.parametrize("nbytes", [0, 1, 4000, 200_000])
def test_the_blocks_of_all_files_are_reserved(checkpointer, root, monkeypatch, nbytes):
    reserve, reserved = _saving.reserve, []

    def noting(file, amount, path):
        reserved.append(amount)
        reserve(file, amount, path)

    monkeypatch.setattr(_saving, "reserve", noting)
    checkpointer.save(1, {"x": np.ones(nbytes, np.uint8)})
    used = sum(512 * path.stat().st_blocks for path in (root / "step-1").iterdir())
    assert reserved[0] >= used


def test_a_step_has_no_open_file_when_its_files_are_removed(root, monkeypatch):
    """NFS and FUSE would leave the file, by another name, and so the folder."""
    remove, seen = folders.discard, []

    def discard(folder):
        links = []
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):
                links.append(os.readlink(f"/proc/self/fd/{number}"))
        seen.append([each for each in links if each.startswith(folder)])
        remove(folder)

    monkeypatch.setattr(folders, "discard", discard)
    with Checkpointer(root, keep=1) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state_of(step))
        checkpointer.remove(2)
    assert seen == [[], []]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_step_is_removed_where_there_is_no_space_for_a_new_name(
    checkpointer, root, monkeypatch, number
):
    """As on a full btrfs."""
    checkpointer.save(1, state_of(1))
    checkpointer.save(2, state_of(2))

    def rename(*paths):
        raise OSError(number, os.strerror(number), *paths)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        checkpointer.remove(1)
    assert sorted(os.listdir(root)) == [".nvmeio-latest", ".nvmeio-lock", "step-2"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_new_process_can_remove_a_step_to_make_room(root, monkeypatch, number):
    """On a full btrfs, the lock's file cannot say who holds it."""
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, state_of(1))

    def pwrite(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwrite", pwrite)
    with Checkpointer(root) as checkpointer:
        checkpointer.remove(1)
        assert checkpointer.steps() == []


def test_a_full_drive_is_named_where_no_folder_can_be_made(checkpointer, monkeypatch):
    """As on xfs and btrfs."""
    checkpointer.save(1, state_of(1))

    def mkdir(path, mode=0o777):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    monkeypatch.setattr(os, "mkdir", mkdir)
    with pytest.raises(OSError, match=r"are needed, and \d+ are free") as caught:
        checkpointer.save(2, state_of(2))
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize("how", ["save", "staged"])
@pytest.mark.parametrize("there", [False, True])
def test_contents_are_synced_before_the_rename_and_the_name_after_it(root, there, how):
    """The order is: the root's name, the files, the folder; the step's name; the root."""
    need_strace()
    if there:
        with Checkpointer(root) as checkpointer:
            checkpointer.save(1, state_of(2))
    child = Child(
        "save_step",
        traced=("fsync", "fdatasync", "sync_file_range", "syncfs", "sync", "renameat2"),
        # Other engines sync by their rings, which strace does not see.
        env={"NVMEIO_ENGINE": "threads"},
        root=str(root),
        step=1,
        how=how,
    )
    child.ready()
    child.go()
    done = child.finish()
    assert done.report == ["ok", ""]
    calls = re.findall(r"(sync|rename)\w*\(", done.log)
    assert calls == ["sync"] * (4 + (not there)) + ["rename", "sync"]


CALLS = (
    *("fsync", "renameat2", "mkdir", "write", "fallocate", "ftruncate", "openat", "flock"),
    *("link", "statfs"),
    "pwrite64",
)


@pytest.mark.parametrize("how", ["save", "staged"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("when", [1, 2, 4])
def test_a_step_is_complete_or_absent_after_any_failed_call(root, call, when, how):
    """The step is complete, or nothing of it is there."""
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, state_of(1))
    fault = f"{call}:error=EIO:when={when}"
    child = Child("save_step", faults=[fault], root=str(root), step=2, how=how, only=None)
    child.ready()
    child.go()
    outcome = child.finish()
    # If the call is made less often, nothing fails.
    assert outcome.injected[call] or outcome.reports[-1][0] == "ok"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = Checkpointer(root).restore()
    assert same(found, state_of(found["seed"]))
    said = outcome.reports[-1] if len(outcome.reports) else ["", outcome.stderr]
    if said[0] == "ok":
        assert found["seed"] == 2
    else:
        assert "Input/output error" in said[1]
    Checkpointer(root).cleanup()
    names = {*os.listdir(root)} - OURS
    assert names == {"step-1"} | ({"step-2"} if found["seed"] == 2 else set())


@pytest.mark.parametrize("delay", [0.0, 0.01, 0.05])
def test_a_killed_process_leaves_only_complete_steps(root, delay):
    child = Child("save_until_killed", root=str(root))
    child.ready()
    child.go()
    told = 0
    while told < 2:
        told = child.next_report()
    threading.Event().wait(delay)
    child.process.kill()
    outcome = child.finish(check=False)
    told = max([told, *outcome.reports])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Checkpointer(root, keep=2) as checkpointer:
            assert checkpointer.latest() >= told
            found = checkpointer.restore()
            assert same(found, state_of(found["seed"]))
            for step in checkpointer.steps():
                checkpointer.verify(step)
            checkpointer.cleanup()
            names = {*os.listdir(root)} - OURS
            assert names <= {f"step-{step}" for step in checkpointer.steps()}


@pytest.mark.parametrize("how", ["save", "staged", "unstaged"])
@pytest.mark.parametrize("kind", ["ext4", "xfs", "ext4, nothing reserved"])
def test_a_drive_may_fill_up_at_any_point(loop_mount, monkeypatch, kind, how):
    if "," in kind:
        # As on file systems without fallocate: the writes themselves find no space.
        monkeypatch.setattr(_saving, "reserve", lambda *_: None)
    kind = kind.partition(",")[0]
    folder = loop_mount(kind, SIZES_MIN[kind])
    root, failed = folder / "root", 0
    with Checkpointer(root, keep=1) as checkpointer:
        checkpointer.save(1, state_of(1, 5000))
        filler, state = Filler(folder), state_of(2, 5000)
        while True:
            try:
                if how == "save":
                    checkpointer.save(2, state)
                else:
                    checkpointer.save_async(2, state, stage=how == "staged").result()
                break
            except OSError as error:
                told = error
            assert told.errno == errno.ENOSPC
            assert re.search(r"are needed, and \d+ are free", str(told))
            assert told.filename == str(root / "step-2")
            failed += 1
            assert sorted(os.listdir(root)) == [".nvmeio-latest", ".nvmeio-lock", "step-1"]
            checkpointer.verify(1)
            filler.shrink()
        # One block for the folder, six for tensors, one for each other file.
        assert failed > 5
        checkpointer.verify(2)
        assert same(checkpointer.restore(), state_of(2, 5000))
        assert checkpointer.steps() == [2]


ENDS = {
    "exit": "with saver:\n    saver.save_async(1, {})\n    sys.exit(0)",
    "caught": (
        "try:\n    with saver:\n        saver.save_async(1, {})\n"
        "        raise LookupError\nexcept LookupError:\n    pass"
    ),
    "generator": (
        "def steps():\n    with saver:\n        saver.save_async(1, {})\n        yield 1\n"
        "for _ in steps():\n    break"
    ),
}


@pytest.mark.parametrize("end", ENDS)
def test_an_error_that_only_a_note_tells_is_told_at_exit(tmp_path, end):
    program = f"""
import nvmeio.checkpoint, sys
nvmeio.checkpoint._saving.reserve = None
saver = nvmeio.checkpoint.Checkpointer("run")
{ENDS[end]}
"""
    command = [sys.executable, "-c", program]
    found = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert found.returncode == 120
    assert "a checkpoint was not saved or copied: 'NoneType' object is not" in found.stderr


@pytest.mark.parametrize("way", ["save_async", "drain"])
def test_the_thread_of_a_save_outlives_a_daemon_that_has_begun_it(tmp_path, way):
    program = f"""
import numpy, nvmeio.checkpoint, threading
drain_to = "far" if {way!r} == "drain" else None
saver = nvmeio.checkpoint.Checkpointer("run", drain_to=drain_to)
state = {{"a": numpy.zeros(32 << 20, numpy.uint8)}}
save = saver.save if drain_to else saver.save_async
thread = threading.Thread(target=save, args=(1, state), daemon=True)
thread.start()
thread.join()
"""
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
    where = tmp_path / ("far" if way == "drain" else "run")
    assert Checkpointer(where).steps() == [1]


@pytest.mark.parametrize(
    "root", ["memory://run", "s3://bucket/run", Path("s3://bucket/run")]
)
def test_a_url_is_no_root(root):
    with pytest.raises(ValueError, match="a URL; it must be a folder"):
        Checkpointer(root)
    with pytest.raises(ValueError, match="drain_to is ''"):
        Checkpointer("run", drain_to="")


def test_a_url_that_pathlib_has_shortened_is_no_target(tmp_path):
    """It would be the path of a local folder, s3:/bucket/run."""
    far = Path("s3://bucket/run")
    for call in (lambda: Checkpointer("run", drain_to=far), lambda: drain(tmp_path, far)):
        with pytest.raises(ValueError, match="a URL; pathlib has shortened it"):
            call()
    # A folder may have a colon.
    Checkpointer("run", drain_to="2026-11-28T22:10/run")
    Checkpointer("run", drain_to="./s3:/bucket")


def test_an_empty_path_is_no_folder():
    """It is not the working directory either."""
    for call in (
        Checkpointer,
        lambda path: drain(path, "far"),
        lambda path: drain(".", path),
    ):
        with pytest.raises(ValueError, match="is ''; it must be the path of a folder"):
            call("")


def test_a_root_that_is_a_dangling_link_is_named(root):
    root.symlink_to("nowhere")
    with Checkpointer(root) as checkpointer:
        words = "it is a symbolic link to 'nowhere', which does not exist"
        with pytest.raises(NotADirectoryError, match=words):
            checkpointer.save(1, 1)


@pytest.mark.parametrize("at", ["the root", "its parent"])
def test_reading_makes_nothing_where_a_folder_is_a_symbolic_link(tmp_path, at):
    """Which the kernel would link, unlike a folder."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "scratch").symlink_to(tmp_path / "disk")
    roots = [tmp_path / "scratch" / name for name in "ab"]
    if at == "the root":
        for root in roots:
            (tmp_path / "disk" / root.name).mkdir()
            (tmp_path / root.name).symlink_to(tmp_path / "disk" / root.name)
        roots = [tmp_path / root.name for root in roots]
    for root in roots:
        for read in (
            Checkpointer(root).restore,
            lambda root=root: Checkpointer(root).restore(7),
        ):
            with pytest.raises(FileNotFoundError):
                read()
        assert at == "its parent" or os.listdir(root) == []
    assert at == "the root" or os.listdir(tmp_path / "disk") == []
    for root in roots:
        Checkpointer(root, keep=1).save(7, root.name)
    assert [Checkpointer(root).restore() for root in roots] == ["a", "b"]


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENOMEM, errno.EIO, errno.EROFS])
def test_a_step_whose_readers_are_unknown_is_not_removed(tmp_path, monkeypatch, code):
    saver = Checkpointer(tmp_path, keep=1)
    saver.save(1, "old")

    def failing(path, flags):
        raise OSError(code, os.strerror(code), path)

    monkeypatch.setattr(_locks, "opened", failing)
    with pytest.warns(RuntimeWarning, match=f"not removed: .*{os.strerror(code)}"):
        saver.save(2, "new")
    with pytest.raises(OSError, match=os.strerror(code)):
        saver.remove(1)
    assert saver.steps() == [1, 2]
    monkeypatch.undo()
    assert saver.prune() == [1]


def test_a_root_that_cannot_be_looked_up_is_named_so(fuse_kinds, tmp_path):
    """Such as one on a drive that has failed; not "Not a directory"."""
    folder = fuse_kinds("uncached")
    fault = {"getattr": {"error": errno.EIO, "under": "/"}}
    os.setxattr(folder, "user.faults", json.dumps(fault).encode())
    with pytest.raises(OSError, match="Input/output error"):
        Checkpointer(folder / "run").save(1, {})
    os.setxattr(folder, "user.faults", b"{}")
    Checkpointer(folder / "run").save(1, {})


@pytest.mark.parametrize("where", ["disk", "inode numbers that change"])
def test_a_damaged_step_is_remembered_after_a_chmod(tmp_path, request, where):
    if where != "disk":
        tmp_path = request.getfixturevalue("fuse_kinds")("inodes") / "run"
    saver = Checkpointer(tmp_path, keep=2, verify="checksum")
    for step in (1, 2):
        saver.save(step, np.full(5000, step))
    path = tmp_path / "step-2" / "tensors.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.warns(RuntimeWarning, match="step 2 is skipped"):
        assert saver.restore()[0] == 1
    if where == "disk":
        (tmp_path / "step-2").chmod(0o750)
    saver.save(3, "new")
    assert 1 in saver.steps()


def test_a_step_that_is_saved_again_is_not_the_damaged_one(tmp_path, monkeypatch):
    """Though its files may have the same numbers, sizes and times."""
    found = os.stat(tmp_path)
    monkeypatch.setattr(Root, "_identities", lambda *_: (found,))
    saver = Checkpointer(tmp_path, verify="checksum")
    saver.save(1, np.arange(5000))
    path = tmp_path / "step-1" / "tensors.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(CheckpointError, match="is damaged"):
        saver.verify(1)
    saver.remove(1)
    saver.save(1, np.arange(5000))
    assert saver.steps() == [1]
    assert np.array_equal(saver.restore(), np.arange(5000))


def test_a_step_that_another_tool_still_copied_is_read_again(tmp_path):
    """As by scp -r, which writes to files under their names."""
    for step in (1, 2):
        Checkpointer(tmp_path).save(step, np.full(5000, step))
    path = tmp_path / "step-2" / "tensors.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:4096])
    reader = Checkpointer(tmp_path)
    with pytest.warns(RuntimeWarning, match="step 2 is skipped"):
        assert reader.restore()[0] == 1
    path.write_bytes(content)
    assert reader.restore()[0] == reader.latest() == 2


def test_a_step_that_goes_while_it_is_looked_at_is_no_strangers(tmp_path, monkeypatch):
    """As a copy that is pruned in the background."""
    saver = Checkpointer(tmp_path)
    saver.save(1, "a")
    look = _roots._is_ours

    def pruned(path):
        shutil.rmtree(tmp_path / "step-1", ignore_errors=True)
        return look(path)

    monkeypatch.setattr(_roots, "_is_ours", pruned)
    with pytest.raises(FileNotFoundError):
        saver.remove(1)


def test_a_name_of_the_newest_step_that_is_zeros_is_renewed(tmp_path):
    """As a power failure leaves it on some file systems."""
    saver = Checkpointer(tmp_path)
    saver.save(1, "a")
    (tmp_path / ".nvmeio-latest").write_bytes(bytes(7))
    saver.save(2, "b")
    assert (tmp_path / ".nvmeio-latest").read_bytes() == b"step-2\n"


def test_the_later_save_of_a_step_has_the_greater_identity():
    """Whatever the time zone of the process was."""
    saved = ["2026-01-01T10:00:00.000000+09:00", "2026-01-01T02:00:00.000000+00:00"]
    found = [_manifest.Manifest(1, when, None, 0, {}).identity for when in saved]
    assert found[0] < found[1]


def test_a_pipe_that_is_open_for_writing_names_no_step(tmp_path):
    saver = Checkpointer(tmp_path)
    saver.save(1, "a")
    (tmp_path / ".nvmeio-latest").unlink()
    os.mkfifo(tmp_path / ".nvmeio-latest")
    descriptor = os.open(tmp_path / ".nvmeio-latest", os.O_RDWR)
    try:
        assert (saver.restore(), saver.latest()) == ("a", 1)
        saver.save(2, "b")
        assert saver.steps() == [1, 2]
    finally:
        os.close(descriptor)


def test_a_pipe_in_place_of_a_manifest_is_not_waited_for(tmp_path, monkeypatch):
    """As another user, who may only read it, would wait for a writer."""
    os.mkfifo(tmp_path / "manifest.json")
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    with _locks.exclusive(str(tmp_path / "manifest.json")) as free:
        assert free


def test_a_step_that_a_lost_host_has_set_aside_is_restored(tmp_path):
    # As on NFS, where folders cannot exchange names.
    with Checkpointer(tmp_path) as checkpointer:
        for step in (4, 5):
            checkpointer.save(step, {"step": step})
        aside = ".step-5.another-host-77-1234-0a0b0c0d.nvmeio-old"
        os.rename(tmp_path / "step-5", tmp_path / aside)
        # A writer may be about to replace it.
        assert Checkpointer(tmp_path).latest() == 4
        assert (tmp_path / aside).exists()
    assert Checkpointer(tmp_path).restore() == {"step": 5}


@pytest.mark.parametrize("copied", [False, True])
def test_a_step_that_a_lost_host_has_set_aside_is_restored_by_the_next_writer(
    tmp_path, copied
):
    """It was stopped there, and died, after its lock was given to another."""
    root, far = tmp_path / "root", tmp_path / "far"
    where = far if copied else root
    with Checkpointer(root, drain_to=far if copied else None) as checkpointer:
        for step in (4, 5):
            checkpointer.save(step, {"step": step})
        if copied:
            checkpointer.drained.result()
            shutil.rmtree(root / "step-5")
        aside = where / ".step-5.another-host-77-1234-0a0b0c0d.nvmeio-old"
        os.rename(where / "step-5", aside)
        # One of another thread, which removes it.
        own = temporary_name(str(where / "step-6"), "old")
        os.mkdir(own)
        assert checkpointer.restore() == {"step": 5}
        assert os.path.exists(own)


@pytest.mark.parametrize("copied", [False, True])
def test_a_named_step_that_was_set_aside_gets_its_name_back(tmp_path, copied):
    root, far = tmp_path / "root", tmp_path / "far"
    with Checkpointer(root, drain_to=far) as checkpointer:
        checkpointer.save(5, {"step": 5})
    if copied:
        shutil.rmtree(root)
    aside = ".step-5.another-host-77-1234-0a0b0c0d.nvmeio-old"
    where = far if copied else root
    os.rename(where / "step-5", where / aside)
    again = Checkpointer(root, drain_to=far)
    if copied:
        assert again.restore(5) == {"step": 5}
    else:
        again.verify(5)


def test_a_step_that_was_set_aside_is_found_by_a_host_with_an_old_list(
    tmp_path, monkeypatch
):
    """As NFS caches it, until the host asks about the folder."""
    root, ask_anew, asked = tmp_path / "root", _roots.ask_anew, []
    with Checkpointer(root) as checkpointer:
        checkpointer.save(4, 4)
        old = os.listdir(root)
        checkpointer.save(5, 5)
    os.rename(root / "step-5", root / ".step-5.another-host-77-1234-0a0b0c0d.nvmeio-old")
    listdir = os.listdir

    def asking(path):
        asked.append(path)
        ask_anew(path)

    monkeypatch.setattr(_roots, "ask_anew", asking)
    monkeypatch.setattr(os, "listdir", lambda path: listdir(path) if asked else old)
    assert Checkpointer(root).restore() == 5


@pytest.mark.parametrize("what", ["root", "root/step-5"])
def test_what_nfs_remembers_as_missing_is_asked_for(tmp_path, monkeypatch, what):
    """NFS forgets that once it has asked about the folder that has the name."""
    there, hidden = tmp_path / what, tmp_path / "hidden"
    with Checkpointer(tmp_path / "root") as checkpointer:
        checkpointer.save(5, 5)
    there.rename(hidden)

    def asking(path):
        if path == str(there.parent) and hidden.exists():
            hidden.rename(there)

    monkeypatch.setattr(paths, "ask_anew", asking)
    assert Checkpointer(tmp_path / "root").restore() == 5


def test_a_name_is_missing_where_the_kernel_makes_no_links(tmp_path, monkeypatch):
    """As on an idmapped mount, if the folder's owner has no number there."""

    def refused(source, target):
        raise OSError(errno.EOVERFLOW, os.strerror(errno.EOVERFLOW), target)

    monkeypatch.setattr(os, "link", refused)
    assert Checkpointer(tmp_path / "root").latest() is None


def test_a_sticky_root_that_gives_all_files_to_one_user(fuse_kinds):
    """As NFS does with what root makes (root_squash)."""
    folder = fuse_kinds("owner=65534")
    with Checkpointer(folder, keep=2) as saver:
        saver.save(1, 1)
    dead = folder / f".step-9.{_host()}-{1 << 30}-1-01234567.nvmeio-tmp"
    dead.mkdir()
    with Checkpointer(folder, keep=2) as saver:
        for step in (2, 3, 3):
            saver.save(step, step)
        saver.remove(2)
        assert saver.steps() == [3]
        assert {*os.listdir(folder)} == {".nvmeio-latest", ".nvmeio-lock", "step-3"}
        (folder / "step-3").rename(folder / "hidden")
        with pytest.raises(CheckpointError, match="step-3 is missing"):
            saver.restore()


def test_an_interrupt_at_any_step_of_waiting_leaves_it_usable(tmp_path, monkeypatch):
    """Python code of threading that an exception ends half-way keeps its locks."""
    write, go_on = _saving.Plan.write, threading.Event()

    def held(*arguments):
        assert go_on.wait(20)
        write(*arguments)

    monkeypatch.setattr(_saving.Plan, "write", held)
    interrupted, at = True, 0
    while interrupted:
        at += 1
        left, interrupted = at, False

        def trace(frame, event, _):
            nonlocal left, interrupted
            if frame.f_code.co_filename in (threading.__file__, _futures.__file__):
                left -= 1
                if left == 0:
                    interrupted = True
                    raise KeyboardInterrupt
            return trace

        go_on.clear()
        checkpointer = Checkpointer(tmp_path)
        checkpointer.save_async(1, {})
        timer = threading.Timer(0.05, go_on.set)
        timer.start()
        with contextlib.suppress(KeyboardInterrupt):
            before = sys.gettrace()
            sys.settrace(trace)
            try:
                checkpointer.prune()
            finally:
                sys.settrace(before)
        timer.join()
        closing = threading.Thread(target=checkpointer.close, daemon=True)
        closing.start()
        closing.join(20)
        assert not closing.is_alive()


def test_a_step_that_another_host_replaces_while_it_is_read_is_read_again(
    tmp_path, monkeypatch
):
    """NFS tells it by ESTALE, and this host still remembers the name."""
    stale = [OSError(errno.ESTALE, os.strerror(errno.ESTALE))]

    def once(function):
        def called(*arguments, **how):
            if stale:
                raise stale.pop()
            return function(*arguments, **how)

        return called

    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(5, {"step": 5})
        for where, name in (
            (_restoring.Held, "restore"),
            (_restoring, "read_manifest"),
            (_roots, "_beginning"),
        ):
            stale[:] = [OSError(errno.ESTALE, os.strerror(errno.ESTALE))]
            with monkeypatch.context() as patch:
                patch.setattr(where, name, once(getattr(where, name)))
                assert checkpointer.restore() == {"step": 5}
            assert not stale


IMPORTS = """
import sys
import numpy as np
from nvmeio.checkpoint import Checkpointer

before = set(sys.modules)
state = {"a": np.ones(3), "b": np.ones((3, 4)).T, "c": np.zeros(2, "i4,f8")}
with Checkpointer("run", verify="checksum", drain_to="far") as checkpointer:
    checkpointer.save_async(1, state).result()
    checkpointer.drained.result()
    checkpointer.restore(into=checkpointer.restore())
print(*sorted(set(sys.modules) - before))
"""


def test_a_save_and_a_restore_import_nothing(tmp_path):
    """A child that is forked meanwhile would wait for ever for the lock of an import."""
    command = [sys.executable, "-c", IMPORTS]
    found = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    assert found.stdout.split() == []


def test_a_file_that_is_missing_elsewhere_is_not_no_checkpoint(tmp_path, monkeypatch):
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"weights": np.arange(5)})
        nvmeio.default_handle().close()
        monkeypatch.setenv("NVMEIO_PROFILE", str(tmp_path / "missing"))
        with pytest.raises(CheckpointError, match="NVMEIO_PROFILE"):
            checkpointer.restore()
        monkeypatch.delenv("NVMEIO_PROFILE")
        assert checkpointer.restore()["weights"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("below", [".", "run", "runs/7"])
@pytest.mark.parametrize("copies", [False, True])
def test_a_root_below_a_dangling_link_is_not_no_checkpoint(tmp_path, below, copies):
    # As ~/scratch -> /scratch/me on a machine where that is not mounted.
    (tmp_path / "scratch").symlink_to("nowhere")
    place = tmp_path / "scratch" / below
    root, far = (tmp_path / "run", place) if copies else (place, None)
    checkpointer = Checkpointer(root, drain_to=far)
    with pytest.raises(OSError, match="symbolic link to 'nowhere'") as caught:
        checkpointer.restore()
    assert caught.value.errno == errno.ESTALE
