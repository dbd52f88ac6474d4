"""Saving: the old file or the new one as a whole, its mode, and no leftovers."""

import errno
import os
import re
import signal
import socket
import stat
import weakref
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import safetensors.numpy
import safetensors.torch

import nvmeio
import nvmeio.safetensors.numpy
import nvmeio.safetensors.torch
from children import Child, need_strace, run_with_faults
from helpers import ENGINES, MIB, PAGE
from model_samples import bits_of_all, torch
from nvmeio._safetensors import writing as _writing
from nvmeio._streams import writing
from nvmeio.safetensors import install, save_sharded
from workloads.common import Faults

MODEL = {"a": np.ones(5, np.float32)}
OLD = {"old": np.arange(1000)}
NEW = {f"{n}": np.full(MIB // 8 + n, n, np.uint8) for n in range(30)}


@pytest.fixture(autouse=True)
def _small_stages(monkeypatch):
    """Use small staging memory, so that files of 4 MiB fill it several times."""
    monkeypatch.setattr(writing, "STAGES", 4)


def save(tensors, path, **options):
    """Save arrays."""
    nvmeio.safetensors.numpy.save_file(tensors, path, **options)


def holds(path, tensors):
    """Return whether a file has these arrays."""
    found = safetensors.numpy.load_file(path)
    return bits_of_all(dict(sorted(found.items()))) == bits_of_all(
        dict(sorted(tensors.items()))
    )


@pytest.fixture
def old(tmp_path):
    """A model file, alone in its folder."""
    folder = tmp_path / "folder"
    folder.mkdir()
    save(OLD, folder / "model")
    return folder / "model"


@pytest.mark.parametrize("align", [8, 4096])
@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("nbytes", [0, 1, MIB - 200, MIB, 4 * MIB + 5])
def test_any_size_is_written(folder, default_engine, nbytes, sync, align):
    array = np.random.default_rng(1).integers(0, 256, nbytes, np.uint8)
    for _ in range(2):
        save({"a": array, "b": array[::-1]}, folder / "model", sync=sync, align=align)
        assert holds(folder / "model", {"a": array, "b": array[::-1]})
        assert [entry.name for entry in folder.iterdir()] == ["model"]


def test_staging_memory_is_not_refilled_before_it_is_written(old, monkeypatch):
    """These writes read their memory as late as possible: when they are waited for."""

    class Late:
        def __init__(self, view, file, offset):
            self.arguments, self.nbytes = (view, file, offset), len(view)

        def done(self):
            return False

        def wait(self):
            return nvmeio.default_handle().submit_write(*self.arguments).wait()

        def exception(self):
            return None

    class Handle:
        submit_write = Late
        fsync = staticmethod(nvmeio.default_handle().fsync)

    monkeypatch.setattr(_writing, "default_handle", Handle)
    monkeypatch.setattr(writing, "STAGE_BYTES", PAGE)
    array = np.random.default_rng(2).integers(0, 256, 25 * PAGE + 5, np.uint8)
    save({"a": array}, old)
    assert holds(old, {"a": array})


def test_one_part_at_a_time_is_in_memory(tmp_path):
    """It may be the copy of a tensor on a device, or a state that is on a drive."""

    def parts():
        for _ in range(3):
            part = np.ones(PAGE, np.uint8)
            seen = weakref.ref(part)
            yield part
            del part
            assert seen() is None

    with nvmeio.File(tmp_path / "file", "x") as file:
        writing.write(nvmeio.default_handle(), file, parts(), 3 * PAGE)
        assert file.size == 3 * PAGE


class TestFull:
    """A full disk."""

    WORDS = r"No space left on device: {} \({} bytes\) are needed, and {} are free"

    @pytest.mark.parametrize("sharded", [False, True])
    def test_the_error_has_needed_and_free_space(self, loop_mount, default_engine, sharded):
        folder = loop_mount("ext4", 64 * MIB)
        path = folder / "model.safetensors"
        save(OLD, path)
        names, space = os.listdir(folder), os.statvfs(folder)
        before, frame = space.f_bavail, space.f_frsize
        large = {"a": np.ones(100 * MIB, np.uint8)}
        words = self.WORDS.format(r"[\d.]+ MiB", r"10\d{7}", r"(\d+)")
        with pytest.raises(OSError, match=words) as caught:
            save_sharded(large, folder) if sharded else save(large, path)
        assert caught.value.errno == errno.ENOSPC
        assert str(caught.value.filename) == str(path)
        free = int(re.search(words, str(caught.value))[1])
        assert 0.9 * before * frame <= free <= 1.1 * before * frame
        assert holds(path, OLD)
        assert os.listdir(folder) == names
        assert os.statvfs(folder).f_bavail == before
        assert nvmeio.default_handle().pending == 0
        save({"a": large["a"][: 20 * MIB]}, path)

    def test_without_preallocation_a_full_disk_is_an_error_too(
        self, faulty, default_engine
    ):
        path = faulty / "model"
        save(OLD, path)
        Faults(path).set(write={"full_at": 2 * MIB})
        with pytest.raises(
            OSError, match=self.WORDS.format(r".*", r"3\d+", r"\d+")
        ) as caught:
            save(NEW, path)
        assert caught.value.errno == errno.ENOSPC
        assert str(caught.value.filename) == str(path)
        Faults(path).set()
        assert holds(path, OLD)
        assert os.listdir(faulty) == ["model"]
        assert nvmeio.default_handle().pending == 0


class TestMode:
    """The mode of a saved file."""

    @pytest.mark.parametrize("mode", [0o640, 0o755, 0o400, 0o2664])
    def test_the_mode_of_the_old_file_is_kept(self, old, mode):
        old.chmod(mode)
        save(NEW, old)
        assert old.stat().st_mode & 0o7777 == mode
        assert holds(old, NEW)

    @pytest.mark.parametrize("mask", [0, 0o027, 0o246])
    @pytest.mark.parametrize("sharded", [False, True])
    def test_a_new_file_has_the_mode_of_the_umask(self, tmp_path, mask, sharded):
        path = tmp_path / "model.safetensors"
        before = os.umask(mask)
        try:
            save_sharded(OLD, tmp_path) if sharded else save(OLD, path)
        finally:
            os.umask(before)
        assert path.stat().st_mode & 0o7777 == 0o666 & ~mask

    def test_the_umask_is_never_set(self, old, monkeypatch):
        def refuse(mask):
            raise AssertionError("the umask is of all threads")

        monkeypatch.setattr(os, "umask", refuse)
        save(NEW, old)
        save(NEW, old.with_name("other"))


class TestNames:
    """Targets that already exist."""

    @pytest.mark.parametrize("absolute", [True, False])
    def test_a_link_is_followed(self, old, tmp_path, absolute):
        link = tmp_path / "link"
        link.symlink_to(old if absolute else f"{old.parent.name}/{old.name}")
        save(NEW, link)
        assert link.is_symlink()
        assert holds(old, NEW)
        assert [os.listdir(old.parent), sorted(os.listdir(tmp_path))] == [
            ["model"],
            ["folder", "link"],
        ]

    def test_a_link_to_nothing_is_followed(self, tmp_path):
        link = tmp_path / "link"
        link.symlink_to("target")
        save(NEW, link)
        assert link.is_symlink()
        assert holds(tmp_path / "target", NEW)

    @pytest.mark.parametrize("name", ["save_file", "save_model", "serialize_file"])
    def test_under_install_a_link_is_replaced(self, old, tmp_path, name):
        """Links in the Hub's cache lead to blobs, which must not change."""
        link = tmp_path / "link"
        link.symlink_to(old)
        with install():
            if name == "save_file":
                safetensors.numpy.save_file(NEW, link)
            elif name == "save_model":
                model = torch.nn.Module()
                model.a = torch.nn.Parameter(torch.from_numpy(MODEL["a"]))
                safetensors.torch.save_model(model, link)
            else:
                safetensors.serialize_file({}, link)
        assert not link.is_symlink()
        saved = {"save_file": NEW, "save_model": MODEL, "serialize_file": {}}
        assert holds(link, saved[name])
        assert holds(old, OLD)
        save(NEW, link)
        assert _writing._replaces_links.get() is False

    def test_a_hard_link_keeps_the_old_file(self, old):
        os.link(old, old.with_name("other"))
        save(NEW, old)
        assert holds(old, NEW)
        assert holds(old.with_name("other"), OLD)

    def test_a_folder_is_refused(self, old):
        for path in (old.parent, f"{old.parent}/"):
            with pytest.raises(IsADirectoryError):
                save(NEW, path)
        assert os.listdir(old.parent) == ["model"]
        assert holds(old, OLD)

    @pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
    def test_only_regular_files_can_be_replaced(self, tmp_path, kind):
        path = tmp_path / "there"
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "socket":
            socket.socket(socket.AF_UNIX).bind(str(path))
        elif os.geteuid() == 0:
            # A new device node, because root could replace the machine's own.
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        else:
            path = Path("/dev/null")
        with pytest.raises(OSError, match="not a regular file") as caught:
            save(NEW, path)
        assert (caught.value.errno, str(caught.value.filename)) == (errno.EINVAL, str(path))
        assert not path.is_file()
        assert os.listdir(tmp_path) == ([path.name] if path.parent == tmp_path else [])

    @pytest.mark.parametrize("path", ["missing/model", "", "folder/model/under"])
    def test_a_path_in_a_missing_folder_is_named(self, old, monkeypatch, path):
        monkeypatch.chdir(old.parent.parent)
        with pytest.raises(OSError, match=r"\[Errno (2|20|21)\]") as caught:
            save(NEW, path)
        assert str(caught.value.filename) == path
        assert holds(old, OLD)

    def test_a_relative_path_is_saved(self, old, monkeypatch):
        monkeypatch.chdir(old.parent)
        save(NEW, "model")
        save(OLD, "other")
        assert holds(old, NEW)
        assert holds(old.with_name("other"), OLD)


class TestInterrupted:
    """Saves that do not finish."""

    @pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt, MemoryError])
    @pytest.mark.parametrize("at", [1, 2, 4])
    def test_an_error_of_progress_leaves_the_old_file(self, old, default_engine, error, at):
        told = []

        def progress(*pair):
            told.append(pair)
            if len(told) == at:
                raise error

        with pytest.raises(error):
            save(NEW, old, progress=progress)
        assert holds(old, OLD)
        assert os.listdir(old.parent) == ["model"]
        assert nvmeio.default_handle().pending == 0

    def test_an_error_of_a_tensor_leaves_the_old_file(self, old):
        def fail():
            raise RuntimeError("no bytes")

        sources = [
            _writing.Source("a", "U8", [20 * MIB], lambda: np.ones(20 * MIB, np.uint8)),
            _writing.Source("b", "U8", [5], fail),
        ]
        with pytest.raises(RuntimeError, match="no bytes"):
            _writing.save(sources, old)
        assert holds(old, OLD)
        assert os.listdir(old.parent) == ["model"]
        assert nvmeio.default_handle().pending == 0

    def test_a_tensor_of_another_size_than_it_says_leaves_the_old_file(self, old):
        """Its bytes would shift those of the others."""

        class Half(torch.Tensor):
            dtype = torch.float16

        tensors = {"a": torch.ones(5).as_subclass(Half), "b": torch.ones(5)}
        with pytest.raises(ValueError, match="'a' has 20 bytes, but said to be F16"):
            nvmeio.safetensors.torch.save_file(tensors, old)
        assert holds(old, OLD)
        assert os.listdir(old.parent) == ["model"]
        with pytest.raises(ValueError, match="'a' has 20 bytes, but said to be F16"):
            nvmeio.safetensors.torch.save(tensors)

    @pytest.mark.parametrize("engine", ENGINES)
    def test_a_killed_process_leaves_only_the_old_file(self, old, engine):
        child = Child("save_and_stand_still", path=str(old), env={"NVMEIO_ENGINE": engine})
        child.ready()
        os.kill(child.process.pid, signal.SIGKILL)
        assert child.finish().status == -signal.SIGKILL
        assert holds(old, OLD)
        assert os.listdir(old.parent) == ["model"]


SYNCS = ("fsync", "fdatasync", "sync_file_range", "syncfs", "sync")
SYNCED = ["sync", "rename", "sync"]


@pytest.mark.parametrize("engine", ["threads", "sync"])
@pytest.mark.parametrize(
    ("files", "synced"),
    [
        (None, SYNCED),
        (1, SYNCED),
        # All files are synced before the index says that they are replaced; the index comes
        # last, too.
        (2, ["sync", "sync", *SYNCED, *["rename", "sync"] * 2, *SYNCED]),
    ],
)
def test_file_and_folder_are_synced_or_nothing_is(tmp_path, engine, files, synced):
    """The file is synced before it gets its name, the folder afterwards.

    Other engines sync by their rings, which strace does not see.
    """
    need_strace()
    child = Child(
        "save_unsynced_and_synced",
        traced=(*SYNCS, "rename", "renameat", "renameat2"),
        path=str(tmp_path if files else tmp_path / "model.safetensors"),
        files=files,
        env={"NVMEIO_ENGINE": engine},
    )
    child.ready()
    child.go()
    done = child.finish()
    assert done.report == ["ok", "ok"]
    calls = re.findall(r"(sync|rename)\w*\(", done.log)
    # Nothing is replaced by the first save, which does not sync.
    renames = 1 if files is None else files + (files > 1)
    assert calls == ["rename"] * renames + synced


@pytest.mark.parametrize(
    ("engine", "error"),
    zip(ENGINES, ["ENOSPC", "EDQUOT", "EIO", "ENOSPC"], strict=True),
)
def test_a_failed_preallocation_is_an_error(old, engine, error):
    env = {"NVMEIO_ENGINE": engine}
    fault = f"fallocate:error={error}"
    said, pending = run_with_faults("save_with", fault, path=str(old), env=env).report
    assert said.startswith(f"OSError: [Errno {getattr(errno, error)}]")
    assert said.endswith(f": '{old}'")
    assert pending == 0
    assert holds(old, OLD)
    assert os.listdir(old.parent) == ["model"]


@pytest.mark.parametrize("error", ["EOPNOTSUPP", "ENOSYS", "EINTR:when=1..3"])
def test_a_file_system_without_preallocation_works(old, error):
    fault = f"fallocate:error={error}"
    assert run_with_faults("save_with", fault, path=str(old)).report == ["ok", 0]
    assert holds(old, {"a": np.full(MIB, 7, np.uint8)})


def test_a_masked_array_is_not_saved(tmp_path):
    with pytest.raises(TypeError, match="'a' is masked, and its mask would be lost"):
        nvmeio.safetensors.numpy.save_file({"a": np.ma.ones(3)}, tmp_path / "model")
    assert os.listdir(tmp_path) == []


def dtensor():
    """Return a DTensor without a process group's communication."""
    from torch.distributed.tensor import DTensor

    class Local(DTensor):
        @staticmethod
        def __new__(cls):
            return torch.Tensor._make_wrapper_subclass(cls, (3,), dtype=torch.float32)

        def __init__(self):
            pass

    Local.__name__ = "DTensor"
    return Local()


def wrapper():
    """Return a tensor that wraps others, as those of torchao do."""

    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls):
            return torch.Tensor._make_wrapper_subclass(cls, (3,), dtype=torch.float32)

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            raise NotImplementedError(function)

    return Wrapper()


def freed():
    found = torch.ones(3)
    found.untyped_storage().resize_(4)
    return found


def nested():
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (dtensor, r"it is a DTensor, .*; pass its full_tensor\(\), or save it by nvmeio"),
        (wrapper, r"it is a test_.*Wrapper, which wraps other tensors; .* dequantize\(\)"),
        (torch.nn.parameter.UninitializedParameter, "it is not initialized yet"),
        (lambda: torch._efficientzerotensor(3), r"a ZeroTensor .*; pass its clone\(\)"),
        (freed, "its storage was freed: it has 4 bytes, too few for its elements"),
        (nested, r"it is nested; pass its values\(\) and offsets\(\)"),
    ],
    ids=["dtensor", "wrapper", "uninitialized", "zero", "freed", "nested"],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_tensor_without_memory_is_refused_by_name(tmp_path, make, words):
    tensors = {"fine": torch.ones(3), "odd": make()}
    with pytest.raises(ValueError, match=rf"Key `odd` is invalid: .*{words}"):
        nvmeio.safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    assert [*tmp_path.iterdir()] == []
