"""Checkpointer: steps, what restore takes, who may write and who reads."""

import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
import warnings
from concurrent.futures import CancelledError, ThreadPoolExecutor

import numpy as np
import pytest
import safetensors.numpy

import nvmeio
from children import Child, as_nobody, run_child, skip_sanitized
from mounts import SIZES_MIN, Filler
from nvmeio.checkpoint import Checkpointer, CheckpointError, _saving
from workloads.checkpoints import same, state_of


@pytest.fixture
def root(tmp_path):
    return tmp_path / "root"


@pytest.fixture
def slow(monkeypatch):
    """Saves wait, before their first byte is written, until they are let go."""
    gate, waiting = threading.Event(), threading.Event()
    write = _saving.Plan.write

    def write_late(self, *arguments):
        waiting.set()
        assert gate.wait(60)
        return write(self, *arguments)

    monkeypatch.setattr(_saving.Plan, "write", write_late)
    gate.begun = waiting
    yield gate
    gate.set()


class TestSteps:
    """Which steps there are, and which go."""

    def test_nothing_is_there_at_first(self, root):
        with Checkpointer(root) as checkpointer:
            assert (checkpointer.latest(), checkpointer.steps()) == (None, [])
            assert (checkpointer.prune(), checkpointer.cleanup()) == ([], [])
            with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
                checkpointer.restore()
            with pytest.raises(FileNotFoundError, match="no such checkpoint"):
                checkpointer.restore(3)
        assert not root.exists()

    @pytest.mark.parametrize("how", ["save", "staged", "unstaged"])
    def test_what_is_saved_is_restored(self, root, default_engine, how):
        with Checkpointer(root) as checkpointer:
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

    def test_the_newest_are_kept_and_every_so_many(self, root):
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
            # One that is older than those that are kept stays when it was just saved.
            checkpointer.save(3, 3)
            assert checkpointer.steps() == [3, 15]

    def test_a_step_is_replaced(self, root):
        with Checkpointer(root) as checkpointer:
            checkpointer.save(1, state_of(1))
            checkpointer.save(1, state_of(2))
            assert same(checkpointer.restore(), state_of(2))
        assert sorted(os.listdir(root)) == [".nvmeio-lock", "step-1"]

    def test_other_names_are_left_alone(self, root):
        with Checkpointer(root, keep=1) as checkpointer:
            checkpointer.save(1, 1)
            for name in ("step-01", "step-", "step-2x", "step-3.old", "other"):
                (root / name).mkdir()
            (root / "step-7").write_text("no folder")
            assert checkpointer.steps() == [1]
            checkpointer.save(2, 2)
        assert len(os.listdir(root)) == 8

    def test_anything_can_read_the_tensors(self, root):
        with Checkpointer(root) as checkpointer:
            path = checkpointer.save(1, state_of(1))
        found = safetensors.numpy.load_file(path / "tensors.safetensors")
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
def test_bad_steps(root, step):
    with Checkpointer(root) as checkpointer:
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
    """What is wrong is said by its file, and an older step is taken."""

    @pytest.fixture
    def checkpointer(self, root):
        with Checkpointer(root) as checkpointer:
            for step in (1, 2):
                checkpointer.save(step, state_of(step))
            yield checkpointer

    @pytest.mark.parametrize("name", ["tensors.safetensors", "tree.json", "manifest.json"])
    @pytest.mark.parametrize("change", ["gone", "shorter", "longer", "link", "folder"])
    def test_files_that_are_not_what_they_were(self, checkpointer, root, name, change):
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
        with pytest.warns(RuntimeWarning, match=f"step 2 is passed over: .*{path}"):
            assert same(checkpointer.restore(), state_of(1))
        # One that is damaged is saved again.
        if change == "gone":
            checkpointer.save(2, state_of(3))
            assert same(checkpointer.restore(), state_of(3))

    @pytest.mark.parametrize("place", [0, 9, 500_000, -1])
    @pytest.mark.parametrize("name", ["tensors.safetensors", "tree.json"])
    def test_a_bit_is_found_by_checksums(
        self, checkpointer, root, name, place, monkeypatch
    ):
        path = root / "step-2" / name
        flip(path, place % path.stat().st_size)
        with pytest.raises(
            CheckpointError, match=rf"{path} is damaged: bytes 0 to \d+ have"
        ):
            checkpointer.verify(2)
        checkpointer.verify(1)
        with Checkpointer(root, verify="checksum") as careful:
            with pytest.warns(RuntimeWarning, match=str(path)):
                assert same(careful.restore(), state_of(1))
            with pytest.raises(CheckpointError, match=str(path)):
                careful.restore(2)

    def test_blocks_are_told_apart(self, root):
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

    def test_without_checksums_nothing_is_verified(self, root):
        with Checkpointer(root, checksum=None) as checkpointer:
            checkpointer.save(3, state_of(3))
            assert same(checkpointer.restore(), state_of(3))
            with pytest.raises(CheckpointError, match="saved without checksums"):
                checkpointer.verify(3)

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"format": "other"}, "its format is not"),
            ({"step": 3}, "it is of step 3, not 2"),
            ({"step": 2.0}, "it is of step"),
            ({"checksum": "md5"}, "its checksum is 'md5'"),
            ({"block_bytes": 1}, "its block_bytes is 1"),
            ({"files": {}}, "it lacks files"),
            ({"files": []}, "it lacks files"),
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
                (name, {}, "is no name of a file")
                for name in ("/etc/passwd", "../x", "a/b")
            ),
            *(
                (name, {}, "is no name of a file")
                for name in ("", ".", "..", "manifest.json")
            ),
            *(
                ("x", record, "bytes")
                for record in ({}, 3, {"nbytes": -1}, {"nbytes": 2.0})
            ),
            ("x", {"nbytes": 2**63}, "bytes"),
            ("x", {"nbytes": 10}, "no checksums of 1 blocks"),
            ("x", {"nbytes": 10, "checksums": ["xyz"]}, "no checksums of 1 blocks"),
            ("x", {"nbytes": 0, "checksums": []}, "is missing"),
            ("link", {"nbytes": 0, "checksums": []}, "is no regular file"),
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
    def test_no_json(self, checkpointer, root, text):
        (root / "step-2" / "manifest.json").write_bytes(text.encode("latin1"))
        with pytest.raises(CheckpointError, match=r"manifest\.json"):
            checkpointer.restore(2)

    def test_what_is_no_damage_is_not_passed_over(self, checkpointer, monkeypatch):
        def refused(*arguments):
            raise OSError(errno.EMFILE, "too many open files")

        monkeypatch.setattr("nvmeio.checkpoint._restoring.ModelFile", refused)
        with pytest.raises(OSError, match="too many"):
            checkpointer.restore()


class TestAsync:
    """save_async: when it returns, what a second one does, and whose error is whose."""

    def test_a_staged_state_may_change_at_once(self, root, slow):
        with Checkpointer(root) as checkpointer:
            state = state_of(1)
            future = checkpointer.save_async(1, state)
            assert future.staged.done()
            for array in state["weights"]:
                array[:] = 0
            assert not future.done()
            slow.set()
            future.result()
            assert same(checkpointer.restore(), state_of(1))

    def test_memory_is_used_again(self, root):
        with Checkpointer(root) as checkpointer:
            addresses = set()
            for step in range(3):
                checkpointer.save_async(step, state_of(step)).result()
                addresses.add(checkpointer._staging._region.address)
            checkpointer.save_async(3, state_of(3, 200)).result()
            addresses.add(checkpointer._staging._region.address)
            assert len(addresses) == 1
        assert checkpointer._staging._region is None

    def test_an_unstaged_one_says_when_it_may(self, root, slow):
        with Checkpointer(root) as checkpointer:
            future = checkpointer.save_async(1, state_of(1), stage=False)
            assert slow.begun.wait(60)
            assert not future.staged.done()
            slow.set()
            assert future.staged.result() is None
            future.result()
            assert checkpointer._staging._region is None

    def test_what_a_second_one_does(self, root, slow):
        checkpointers = {
            busy: Checkpointer(root / busy, busy=busy) for busy in ("wait", "skip", "raise")
        }
        for checkpointer in checkpointers.values():
            checkpointer.save_async(1, 1)
        assert checkpointers["skip"].save_async(2, 2) is None
        with pytest.raises(RuntimeError, match="step 1 is still being saved"):
            checkpointers["raise"].save_async(2, 2)
        with ThreadPoolExecutor(1) as pool:
            second = pool.submit(checkpointers["wait"].save_async, 2, 2)
            assert not second.done()
            slow.set()
            second.result().result()
        for busy, checkpointer in checkpointers.items():
            checkpointer.close()
            assert checkpointer.steps() == ([1, 2] if busy == "wait" else [1])

    @pytest.mark.parametrize("teller", ["save", "save_async", "close", "with"])
    def test_an_error_is_raised_by_the_next_call(self, root, monkeypatch, teller):
        checkpointer = Checkpointer(root)
        checkpointer.save(1, 1)
        broken = OSError(errno.EIO, "broken")
        monkeypatch.setattr(_saving, "reserve", lambda *_: (_ for _ in ()).throw(broken))
        future = checkpointer.save_async(2, 2)
        checkpointer._thread.join()
        monkeypatch.undo()
        arguments = (3, 3) if teller.startswith("save") else ()
        call = checkpointer.__exit__ if teller == "with" else getattr(checkpointer, teller)
        with pytest.raises(OSError, match="broken"):
            call(*(arguments or ((None,) * 3 if teller == "with" else ())))
        assert checkpointer.steps() == [1]
        assert future.exception() is broken
        # It is told once.
        if teller.startswith("save"):
            checkpointer.save(3, 3)
        checkpointer.close()

    def test_who_had_the_error_is_not_told_again(self, root, monkeypatch):
        with Checkpointer(root) as checkpointer:
            broken = OSError(errno.EIO, "broken")
            monkeypatch.setattr(
                _saving, "reserve", lambda *_: (_ for _ in ()).throw(broken)
            )
            future = checkpointer.save_async(2, 2, stage=False)
            with pytest.raises(OSError, match="broken"):
                future.result()
            with pytest.raises(OSError, match="broken"):
                future.staged.result()
            monkeypatch.undo()
            checkpointer.save(3, 3)

    @pytest.mark.parametrize("stage", [True, False])
    def test_cancel(self, root, slow, stage):
        with Checkpointer(root) as checkpointer:
            future = checkpointer.save_async(1, state_of(1), stage=stage)
            assert slow.begun.wait(60)
            assert future.cancel()
            slow.set()
            with pytest.raises(CancelledError):
                future.result()
            checkpointer._thread.join()
            assert future.staged.done()
            assert os.listdir(root) == [".nvmeio-lock"]
            future = checkpointer.save_async(2, 2)
            future.result()
            assert not future.cancel()
            assert checkpointer.steps() == [2]

    def test_there_must_be_memory_for_the_copy(self, root, monkeypatch):
        monkeypatch.setattr("nvmeio._memory.available.available_bytes", lambda: 1000)
        with Checkpointer(root) as checkpointer:
            with pytest.raises(
                MemoryError, match=r"a copy of the state needs 1.* and 1000 B"
            ):
                checkpointer.save_async(1, state_of(1))
            checkpointer.save_async(1, state_of(1), stage=False).result()

    def test_a_closed_one_saves_nothing_and_restores(self, root):
        checkpointer = Checkpointer(root)
        checkpointer.save_async(1, state_of(1))
        checkpointer.close()
        checkpointer.close()
        with pytest.raises(ValueError, match="is closed"):
            checkpointer.save(2, 2)
        assert same(checkpointer.restore(), state_of(1))

    @pytest.mark.parametrize("stage", [True, False])
    def test_leaving_python_waits(self, root, stage):
        run_child("save_and_leave", root=str(root), stage=stage)
        assert same(Checkpointer(root).restore(), state_of(1))

    def test_the_gil_is_free_meanwhile(self, root):
        """Another thread counts while gigabytes are copied, summed and written."""
        state = {"x": np.ones(256 << 20, np.uint8)}
        with Checkpointer(root) as checkpointer:
            future = checkpointer.save_async(1, state, stage=False)
            longest, before = 0.0, nvmeio_clock()
            while not future.done():
                now = nvmeio_clock()
                longest, before = max(longest, now - before), now
            future.result()
        assert longest < 1


def nvmeio_clock():
    import time

    return time.monotonic()


class TestLocks:
    """One writes to a root; who reads a step keeps it."""

    def test_another_process_that_writes_is_named(self, root):
        child = Child("hold_lock", root=str(root))
        child.ready()
        with Checkpointer(root) as checkpointer:
            pattern = f"another writes checkpoints here: process {child.process.pid} on"
            for call in (lambda: checkpointer.save(2, 2), checkpointer.prune):
                with pytest.raises(BlockingIOError, match=pattern):
                    call()
            # Reading takes none.
            assert same(checkpointer.restore(), state_of(1))
            checkpointer.verify(1)
            child.stop()
            checkpointer.save(2, 2)
            assert checkpointer.steps() == [1, 2]

    def test_another_one_in_this_process(self, root):
        first, second = Checkpointer(root), Checkpointer(root)
        first.save(1, 1)
        with pytest.raises(BlockingIOError):
            second.save(2, 2)
        first.close()
        second.save(2, 2)
        second.close()

    def test_a_child_keeps_no_lock(self, root):
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

    def test_a_step_that_is_read_stays(self, root):
        with Checkpointer(root, keep=1) as checkpointer:
            checkpointer.save(1, state_of(1))
            descriptor = os.open(root / "step-1" / "manifest.json", os.O_RDONLY)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            checkpointer.save(2, 2)
            assert checkpointer.steps() == [1, 2]
            os.close(descriptor)
            assert checkpointer.prune() == [1]

    def test_who_restores_holds_the_step(self, root, monkeypatch):
        with Checkpointer(root, keep=1) as checkpointer:
            checkpointer.save(1, state_of(1))
            restored = []
            from nvmeio.checkpoint import _restoring

            read = _restoring._read

            def read_late(*arguments):
                checkpointer.save(2, 2)
                restored.append(checkpointer.steps())
                return read(*arguments)

            monkeypatch.setattr(_restoring, "_read", read_late)
            assert same(checkpointer.restore(1), state_of(1))
            assert restored == [[1, 2]]
            assert checkpointer.prune() == [1]

    def test_a_step_that_is_replaced_while_it_is_opened(self, root, monkeypatch):
        with Checkpointer(root) as checkpointer:
            checkpointer.save(1, state_of(1))
            from nvmeio.checkpoint import _restoring

            opened = _restoring.ModelFile

            def open_late(path):
                monkeypatch.undo()
                checkpointer.save(1, state_of(2))
                return opened(path)

            monkeypatch.setattr(_restoring, "ModelFile", open_late)
            with pytest.raises(CheckpointError, match="replaced meanwhile"):
                checkpointer.restore(1)
            assert same(checkpointer.restore(1), state_of(2))


def test_a_root_that_may_only_be_read(root):
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, state_of(1))
    call = "import sys; from nvmeio.checkpoint import Checkpointer\n"
    call += "c = Checkpointer(sys.argv[1]); c.verify(1); print(c.restore()['name'])\n"
    call += "try: c.save(2, 2)\nexcept PermissionError as e: print(e)"
    os.chmod(root / ".nvmeio-lock", 0o444)
    command = [*as_nobody(), sys.executable, "-c", call, str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        "state 1",
        f"[Errno 13] Permission denied: '{root}/.nvmeio-lock'",
    ], done.stderr


def test_full_drives(root, monkeypatch):
    """There is no room: what is needed and free is told, and nothing is left."""
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, state_of(1))
        space = os.statvfs(root)
        free = space.f_bavail * space.f_frsize
        huge = np.lib.stride_tricks.as_strided(
            np.zeros(1, np.uint8), (free + (1 << 33),), (0,)
        )
        with pytest.raises(OSError, match=r"are needed, and \d+ are free") as caught:
            checkpointer.save(2, {"x": huge})
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.filename == str(root / "step-2")
        assert sorted(os.listdir(root)) == [".nvmeio-lock", "step-1"]


CALLS = (
    *("fsync", "renameat2", "mkdir", "write", "fallocate", "ftruncate", "openat", "flock"),
    "pwrite64",
)


@pytest.mark.parametrize("how", ["save", "staged"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("when", [1, 2, 3, 5])
def test_any_call_may_fail(root, call, when, how):
    """The step is there and whole, or it is not there and nothing of it is."""
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, state_of(1))
    fault = f"{call}:error=EIO:when={when}"
    child = Child("save_step", faults=[fault], root=str(root), step=2, how=how, only=None)
    child.ready()
    child.go()
    outcome = child.finish()
    # Where the call is not made so often nothing fails.
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
    names = {*os.listdir(root)} - {".nvmeio-lock"}
    assert names == {"step-1"} | ({"step-2"} if found["seed"] == 2 else set())


@pytest.mark.parametrize("delay", [0.0, 0.003, 0.01, 0.03, 0.1])
def test_whoever_is_killed_leaves_complete_steps(root, delay):
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
            names = {*os.listdir(root)} - {".nvmeio-lock"}
            assert names <= {f"step-{step}" for step in checkpointer.steps()}


def test_it_is_found_by_name():
    assert nvmeio.checkpoint.Checkpointer is Checkpointer


@pytest.mark.parametrize("how", ["save", "staged", "unstaged"])
@pytest.mark.parametrize("kind", ["ext4", "xfs", "ext4, nothing reserved"])
def test_a_drive_may_be_full_at_any_point(loop_mount, monkeypatch, kind, how):
    if "," in kind:
        # As on file systems that know no fallocate: the bytes themselves find no room.
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
            assert str(root) in str(told)
            failed += 1
            assert sorted(os.listdir(root)) == [".nvmeio-lock", "step-1"]
            checkpointer.verify(1)
            filler.shrink()
        # A block for the folder, six for tensors, one for each other file.
        assert failed > 5
        checkpointer.verify(2)
        assert same(checkpointer.restore(), state_of(2, 5000))
        assert checkpointer.steps() == [2]
