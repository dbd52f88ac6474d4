"""Every writer on unusual file systems: the old file or the new one, or a refusal."""

import asyncio
import errno
import fcntl
import os
import shutil
import signal
import struct
import subprocess
import sys

import numpy as np
import pytest

import nvmeio
import nvmeio.safetensors.numpy
from children import run_tool
from mounts import unmount
from nvmeio._files import paths
from nvmeio._memory import available
from nvmeio._native.descriptor import remove_tree
from nvmeio._publish import names
from nvmeio.checkpoint import Checkpointer, atomic_directory
from nvmeio.checkpoint import cleanup as clean_up

OLD, NEW = np.arange(1000), np.arange(1000, 3000)


def save_tensor(path, array):
    torch = pytest.importorskip("torch")
    nvmeio.torch.save(torch.from_numpy(array), path)


def load_tensor(path):
    return nvmeio.torch.load(path).numpy()


def save_folder(path, array):
    with atomic_directory(path, replace=True) as folder:
        (folder / "file").write_bytes(array.tobytes())


def load_folder(path):
    return np.frombuffer((path / "file").read_bytes(), np.int64)


def save_step(path, array):
    with Checkpointer(path) as checkpointer:
        checkpointer.save(1, array)


def load_step(path):
    with Checkpointer(path) as checkpointer:
        return checkpointer.restore(1)


REPLACING = {
    "write_file": (
        lambda path, array: nvmeio.write_file(array, path),
        lambda path: nvmeio.read_file(path, dtype=np.int64),
    ),
    "save": (nvmeio.save, nvmeio.load),
    "save_file": (
        lambda path, array: nvmeio.safetensors.numpy.save_file({"a": array}, path),
        lambda path: nvmeio.safetensors.numpy.load_file(path)["a"],
    ),
    "torch.save": (save_tensor, load_tensor),
    "atomic_directory": (save_folder, load_folder),
    "Checkpointer": (save_step, load_step),
}
FILES = ["write_file", "save", "save_file", "torch.save"]


def in_a_loop(function):
    return lambda *arguments, **options: asyncio.run(function(*arguments, **options))


def by_torch(path, array, **options):
    torch = pytest.importorskip("torch")
    nvmeio.torch.save(torch.from_numpy(array), path, **options)


def by_safetensors(path, array, **options):
    nvmeio.safetensors.numpy.save_file({"a": array}, path, **options)


WITH_ATOMIC = {
    "write_file": lambda path, array, **options: nvmeio.write_file(array, path, **options),
    "aio.write_file": in_a_loop(
        lambda path, array, **options: nvmeio.aio.write_file(array, path, **options)
    ),
    "save": nvmeio.save,
    "aio.save": in_a_loop(nvmeio.aio.save),
    "save_file": by_safetensors,
    "torch.save": by_torch,
}


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("writer", WITH_ATOMIC)
@pytest.mark.parametrize("memory", ["enough", "none"])
def test_what_is_mapped_from_the_file_itself_is_copied_first(
    tmp_path, monkeypatch, writer, memory
):
    """In place, a header would be written over what is still to be saved."""
    write, path, array = WITH_ATOMIC[writer], tmp_path / "data", np.arange(3 << 18)
    write(tmp_path / "expected", array)
    array.tofile(path)
    mapped = np.memmap(path, np.int64, "r")
    if memory == "enough":
        write(path, mapped, atomic=False)
        assert path.read_bytes() == (tmp_path / "expected").read_bytes()
        return
    monkeypatch.setattr(available, "available_bytes", lambda: 1000)
    with pytest.raises(MemoryError, match="written in place from memory that is mapped"):
        write(path, mapped, atomic=False)
    assert path.read_bytes() == array.tobytes()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
def test_a_mounted_file_is_not_saved_over_what_is_mapped_from_it(tmp_path):
    path, behind = tmp_path / "data.npy", tmp_path / "behind"
    nvmeio.save(behind, np.arange(1 << 18))
    path.touch()
    run_tool("mount", "--bind", behind, path)
    try:
        nvmeio.save(path, np.load(path, mmap_mode="r")[7:])
        nvmeio.safetensors.numpy.save_file({"a": nvmeio.load(path)}, path)
    finally:
        unmount(path)
    found = nvmeio.safetensors.numpy.load_file(behind)["a"]
    assert np.array_equal(found, np.arange(7, 1 << 18))


# Dies between two renames.
DYING = """
import errno, os, sys, nvmeio
from nvmeio._publish import folders
def exchange(one, other): raise OSError(errno.EOPNOTSUPP, "no", other)
folders.exchange = exchange
folders.rename_to_new = lambda *names: os.kill(os.getpid(), 9)
"""
KILLED = f"""{DYING}
with nvmeio.checkpoint.Checkpointer(sys.argv[1]) as checkpointer:
    checkpointer.save(1, "new")
"""
KILLED_FOLDER = f"""{DYING}
with nvmeio.checkpoint.atomic_directory(sys.argv[1], replace=True): pass
"""


@pytest.mark.parametrize("finder", ["restore", "cleanup", "save"])
def test_killed_between_two_renames_the_old_folder_is_found_again(tmp_path, finder):
    root = tmp_path / "root"
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, "old")
    command = [sys.executable, "-c", KILLED, root]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert "step-1" not in os.listdir(root)
    with Checkpointer(root) as checkpointer:
        if finder == "cleanup":
            assert [name[-11:] for name in clean_up(root)] == [".nvmeio-tmp"]
        elif finder == "save":
            checkpointer.save(2, "newer")
            assert sorted(os.listdir(root)) == [
                ".nvmeio-latest",
                ".nvmeio-lock",
                "step-1",
                "step-2",
            ]
        assert checkpointer.restore(1) == "old"


def test_a_long_name_is_kept_where_folders_cannot_be_exchanged(faulty, tmp_path):
    path = faulty / ("n" * 150)
    for array in (OLD, NEW):
        save_folder(path, array)
        assert np.array_equal(load_folder(path), array)
    assert os.listdir(faulty) == [path.name]
    path = tmp_path / path.name
    save_folder(path, OLD)
    command = [sys.executable, "-c", KILLED_FOLDER, path]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert not path.exists()
    clean_up(tmp_path)
    assert np.array_equal(load_folder(path), OLD)


def test_a_name_that_is_too_long_to_be_set_aside_is_named(faulty):
    path = faulty / ("n" * 240)
    save_folder(path, OLD)
    with pytest.raises(OSError, match="bytes too long to set the old one aside") as caught:
        save_folder(path, NEW)
    assert (caught.value.errno, caught.value.filename) == (errno.ENAMETOOLONG, str(path))
    assert np.array_equal(load_folder(path), OLD)
    assert os.listdir(faulty) == [path.name]


def test_what_gets_its_name_back_replaces_no_other_file(tmp_path, monkeypatch):
    """Also where a file has one name only, and another gets it at the last moment."""
    aside, target = tmp_path / "aside", tmp_path / "target"
    aside.write_text("old")
    written = []

    def refused(*names, **options):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    def late(*names):
        target.write_text("new")
        written.append(names)
        rename(*names)

    rename = os.rename
    monkeypatch.setattr(os, "link", refused)
    monkeypatch.setattr(os, "rename", late)
    names.give_back(str(aside), str(target))
    assert target.read_text() == ("new" if written else "old")
    aside.write_text("older")
    names.give_back(str(aside), str(target))
    assert target.read_text() != "older"


@pytest.mark.parametrize("last", range(3))
def test_ctrl_c_between_the_renames_leaves_one_folder(tmp_path, monkeypatch, last):
    from nvmeio._publish import folders

    def exchange(one, other):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), other)

    def interrupting(rename):
        def renamed(*names):
            rename(*names)
            done.append(names)
            if len(done) == last + 1:
                raise KeyboardInterrupt

        return renamed

    done = []
    save_folder(tmp_path / "data", OLD)
    monkeypatch.setattr(folders, "exchange", exchange)
    monkeypatch.setattr(folders, "rename_to_new", interrupting(folders.rename_to_new))
    monkeypatch.setattr(folders.os, "rename", interrupting(os.rename))
    with pytest.raises(KeyboardInterrupt):
        save_folder(tmp_path / "data", NEW)
    assert os.listdir(tmp_path) == ["data"]
    assert np.array_equal(load_folder(tmp_path / "data"), OLD if last == 0 else NEW)


def test_a_copy_by_hard_links_is_not_appended_to(tmp_path):
    path, copy = tmp_path / "data.npy", tmp_path / "copy.npy"
    nvmeio.save(path, OLD)
    with nvmeio.ArrayFile(path, mode="r+") as file:
        os.link(path, copy)
        path.unlink()
        nvmeio.save(path, NEW)
        with pytest.raises(OSError, match="replaced or removed") as caught:
            file.append(NEW)
        assert caught.value.errno == errno.ESTALE
        with pytest.raises(OSError, match="replaced or removed"):
            file.refresh()
    assert np.array_equal(nvmeio.load(copy), OLD)


# Of posix_acl_default: the owner, another user (65534) and the group may read and write.
ACL_NAME = "system.posix_acl_default"
ACL = struct.pack(
    "<I" + "HHI" * 5,
    2,
    *(0x01, 7, 0xFFFFFFFF),
    *(0x02, 7, 65534),
    *(0x04, 7, 0xFFFFFFFF),
    *(0x10, 7, 0xFFFFFFFF),
    *(0x20, 0, 0xFFFFFFFF),
)


@pytest.mark.parametrize("writer", REPLACING)
def test_the_default_permissions_of_a_folder_are_given(tmp_path, writer):
    """As a plain open() or mkdir() there gives them."""
    save, _ = REPLACING[writer]
    try:
        os.setxattr(tmp_path, ACL_NAME, ACL)
    except OSError as error:
        pytest.skip(f"the file system has no lists of permissions: {error.strerror}")
    (tmp_path / "plain").touch()
    (tmp_path / "folder").mkdir()
    save(tmp_path / "written", NEW)
    found = [tmp_path / "written", *(tmp_path / "written").rglob("*")]
    for path in found:
        like = tmp_path / ("folder" if path.is_dir() else "plain")
        for name in os.listxattr(like):
            assert os.getxattr(path, name) == os.getxattr(like, name)


@pytest.mark.parametrize("writer", [*FILES, "Checkpointer"])
def test_a_copy_by_hard_links_keeps_the_old_contents(tmp_path, writer):
    """As `cp -al` makes it."""
    save, load = REPLACING[writer]
    path, copy = tmp_path / "data", tmp_path / "copy"
    save(path, OLD)
    if path.is_dir():
        shutil.copytree(path, copy, copy_function=os.link)
    else:
        os.link(path, copy)
    save(path, NEW)
    assert np.array_equal(load(path), NEW)
    assert np.array_equal(load(copy), OLD)
    save(copy, NEW)
    assert np.array_equal(load(copy), NEW)
    assert sorted(os.listdir(tmp_path)) == ["copy", "data"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes links of other users")
@pytest.mark.parametrize("writer", FILES)
@pytest.mark.parametrize("owner", ["other", "folder's", "own"])
def test_planted_links_are_refused_as_by_the_kernel(tmp_path, writer, owner):
    save, load = REPLACING[writer]
    shared, victim, link = tmp_path / "tmp", tmp_path / "victim", tmp_path / "tmp/data"
    shared.mkdir()
    shared.chmod(0o1777)
    os.chown(shared, 1002, -1)
    save(victim, OLD)
    link.symlink_to(victim)
    os.chown(
        link, {"other": 1001, "folder's": 1002, "own": 0}[owner], -1, follow_symlinks=False
    )
    if owner == "other":
        with pytest.raises(PermissionError, match="link of another user") as caught:
            save(link, NEW)
        assert (caught.value.errno, caught.value.filename) == (errno.EACCES, str(link))
    else:
        save(link, NEW)
    assert link.is_symlink()
    assert np.array_equal(load(victim), OLD if owner == "other" else NEW)
    assert os.listdir(shared) == ["data"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of other users")
@pytest.mark.parametrize("writer", REPLACING)
@pytest.mark.parametrize("owner", ["other", "folder's"])
def test_new_contents_do_not_go_to_whoever_was_there_first(tmp_path, writer, owner):
    """In a folder such as /tmp, where everybody may make names for others to find."""
    save, load = REPLACING[writer]
    shared, path = tmp_path / "tmp", tmp_path / "tmp/data"
    shared.mkdir()
    shared.chmod(0o1777)
    planted = path
    if writer == "Checkpointer":
        path, planted = shared, shared / "step-1"
    if writer in ("Checkpointer", "atomic_directory"):
        planted.mkdir()
    else:
        save(planted, OLD)
    planted.chmod(0o777)
    os.chown(planted, 1001, -1)
    os.chown(shared, {"other": 0, "folder's": 1001}[owner], -1)
    save(path, NEW)
    found = planted.stat()
    assert (found.st_uid, found.st_mode & 0o777 == 0o777) == (
        (0, False) if owner == "other" else (1001, True)
    )
    assert np.array_equal(load(path), NEW)


def test_files_are_replaced_where_no_mount_is_known(tmp_path, monkeypatch):
    """As in gVisor, whose fdinfo had only flags."""
    whole = paths.contents_of

    def flags_only(path):
        return b"flags:\t0100000\n" if "/fdinfo/" in path else whole(path)

    monkeypatch.setattr(paths, "contents_of", flags_only)
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"a": 1})
        assert checkpointer.steps() == [2]
    assert (tmp_path / ".nvmeio-latest").read_text() == "step-2\n"


def test_the_plug_in_of_lightning_replaces_a_link(tmp_path):
    """It saves last.ckpt, which may be a link to the best checkpoint, in this way."""
    torch = pytest.importorskip("torch")
    from nvmeio.torch.serialization import save_to

    best, last = tmp_path / "best.ckpt", tmp_path / "last.ckpt"
    save_tensor(best, OLD)
    last.symlink_to("best.ckpt")
    save_to(torch.from_numpy(NEW), last, follow=False)
    assert not last.is_symlink()
    assert np.array_equal(load_tensor(best), OLD)
    assert np.array_equal(load_tensor(last), NEW)


@pytest.mark.parametrize("writer", FILES)
def test_an_open_file_in_proc_is_written_in_place(tmp_path, writer):
    """As /dev/stdout and /dev/fd/3 lead to one."""
    save, load = REPLACING[writer]
    with open(tmp_path / "data", "wb") as file:
        before = os.fstat(file.fileno()).st_ino
        save(f"/dev/fd/{file.fileno()}", NEW)
    assert np.array_equal(load(tmp_path / "data"), NEW)
    assert (tmp_path / "data").stat().st_ino == before


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
@pytest.mark.parametrize("writer", FILES)
def test_a_read_only_mount_is_named_as_such(tmp_path, writer):
    save, load = REPLACING[writer]
    save(tmp_path / "data", OLD)
    run_tool("mount", "--bind", tmp_path, tmp_path)
    try:
        run_tool("mount", "-o", "remount,bind,ro", tmp_path)
        with pytest.raises(OSError, match="data") as caught:
            save(tmp_path / "data", NEW)
        assert caught.value.errno == errno.EROFS
        assert np.array_equal(load(tmp_path / "data"), OLD)
    finally:
        unmount(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="chattr needs root")
@pytest.mark.parametrize("writer", FILES)
def test_an_immutable_file_is_named_as_such(tmp_path, writer):
    save, load = REPLACING[writer]
    path = tmp_path / "data"
    save(path, OLD)
    if not shutil.which("chattr") or subprocess.run(["chattr", "+i", path]).returncode:
        pytest.skip("there are no immutable files here")
    try:
        with pytest.raises(OSError, match="data") as caught:
            save(path, NEW)
        assert caught.value.errno == errno.EPERM
    finally:
        run_tool("chattr", "-i", path)
    assert np.array_equal(load(path), OLD)
    assert os.listdir(tmp_path) == ["data"]


def test_without_proc_files_are_replaced_by_name(tmp_path, monkeypatch):
    from nvmeio._publish import files

    nvmeio.save(tmp_path / "data.npy", OLD)
    found = os.path.isdir
    monkeypatch.setattr(
        files.os.path, "isdir", lambda path: path != "/proc/self/fd" and found(path)
    )
    monkeypatch.setattr(files, "link", None)
    nvmeio.save(tmp_path / "data.npy", NEW)
    assert np.array_equal(nvmeio.load(tmp_path / "data.npy"), NEW)


@pytest.mark.parametrize("at", ["created", "opened", "locked"])
def test_a_file_that_another_host_takes_for_a_dead_ones_is_made_anew(
    tmp_path, monkeypatch, at
):
    """As on NFS, where files have names from the beginning; and it removes one only."""
    from nvmeio._publish import files

    open_for_writing, lock, paths = files.open_for_writing, fcntl.flock, []

    def opening(path):
        paths.append(path)
        if at == "created" and len(paths) == 1:
            os.unlink(path)
        file = open_for_writing(path)
        if at == "opened" and len(paths) == 1:
            os.unlink(path)
        return file

    def locking(descriptor, kind):
        with open(paths[0] if at == "locked" else os.devnull) as other:
            if len(paths) == 1:
                lock(other, fcntl.LOCK_SH)
            lock(descriptor, kind)

    def no_unnamed(folder):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(files, "open_unnamed", no_unnamed)
    monkeypatch.setattr(files, "open_for_writing", opening)
    monkeypatch.setattr(fcntl, "flock", locking)
    nvmeio.save(tmp_path / "data.npy", NEW)
    assert len(paths) == 2
    assert np.array_equal(nvmeio.load(tmp_path / "data.npy"), NEW)
    assert os.listdir(tmp_path) == ["data.npy"]


def test_a_folder_that_is_too_deep_is_left(tmp_path):
    """Each level takes some of the stack, and its depth may be a stranger's choice."""
    script = "import os\nfor _ in range(600): os.mkdir('x'); os.chdir('x')"
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)
    try:
        with pytest.raises(OSError, match="symbolic links") as caught:
            remove_tree(str(tmp_path / "x"))
        assert caught.value.errno == errno.ELOOP
    finally:
        subprocess.run(["rm", "-r", str(tmp_path / "x")], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
def test_what_is_mounted_in_an_old_folder_keeps_its_contents(tmp_path):
    other, inner = tmp_path / "other", tmp_path / "export" / "data"
    for folder in (other, inner):
        folder.mkdir(parents=True)
    (other / "file").write_text("of somebody else")
    run_tool("mount", "--bind", other, inner)
    try:
        with atomic_directory(tmp_path / "export", replace=True) as folder:
            (folder / "file").write_text("new")
        assert os.listdir(other) == ["file"]
        assert os.listdir(tmp_path / "export") == ["file"]
    finally:
        (left,) = tmp_path.glob(".export.*")
        unmount(left / "data")
    # Its name is that of a process that lives.
    remove_tree(str(left))
    assert sorted(os.listdir(tmp_path)) == ["export", "other"]
