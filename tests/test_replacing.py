"""save() and write_file(): the old file or the new one, and its attributes."""

import errno
import gc
import os
import re
import resource
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

import nvmeio
from children import as_nobody, run_tool
from helpers import MIB, limit, pattern
from mounts import unmount
from nvmeio._publish import files as _files
from nvmeio._publish.names import replacement

OLD = pattern(3 * MIB, 1)
NEW = np.frombuffer(pattern(MIB + 5, 2), np.uint8)

WRITERS = {
    "write_file": lambda path, data, **options: nvmeio.write_file(data, path, **options),
    "save": lambda path, data, **options: nvmeio.save(path, data, **options),
}


@pytest.fixture(params=WRITERS)
def write(request):
    """A function that makes a file of an array."""
    return WRITERS[request.param]


def content(path):
    """Return the array in a file, if it is complete."""
    data = path.read_bytes()
    return np.load(path) if data[:6] == b"\x93NUMPY" else np.frombuffer(data, np.uint8)


@pytest.fixture
def old(path):
    """An existing file."""
    path.write_bytes(OLD)
    return path


def test_ctrl_c_removes_the_unfinished_file(old):
    def interrupted():
        with replacement(str(old)) as temporary:
            Path(temporary).write_bytes(b"unfinished")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert old.read_bytes() == OLD
    assert os.listdir(old.parent) == [old.name]


@pytest.mark.parametrize("sync", [False, True])
def test_a_reader_of_the_old_file_keeps_reading_it(write, old, sync):
    with open(old, "rb") as stream:
        write(old, NEW, sync=sync)
        assert stream.read() == OLD
    assert np.array_equal(content(old), NEW)
    assert os.listdir(old.parent) == [old.name]


@pytest.mark.parametrize("there", [False, True])
def test_a_failure_leaves_what_was_there(write, path, there, recwarn):
    if there:
        path.write_bytes(OLD)
    with (
        limit(resource.RLIMIT_FSIZE, MIB),
        pytest.raises(OSError, match="data") as caught,
    ):
        write(path, np.zeros(2 * MIB, np.uint8))
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(path))
    assert os.listdir(path.parent) == ([path.name] if there else [])
    assert not there or path.read_bytes() == OLD
    # The error has no context of internal attempts either.
    del caught
    gc.collect()
    assert not recwarn.list


def test_a_link_stays_and_its_target_is_replaced(write, folder):
    (folder / "far").mkdir()
    (folder / "link").symlink_to("far/data")
    for data in (NEW[:3], NEW):
        write(folder / "link", data)
        assert (folder / "link").is_symlink()
        assert np.array_equal(content(folder / "far" / "data"), data)
    assert os.listdir(folder / "far") == ["data"]


def test_a_new_file_has_the_usual_permissions(write, path):
    write(path, NEW)
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o755])
def test_mode_and_owner_are_kept(write, old, mode):
    old.chmod(mode)
    if os.geteuid() == 0:
        os.chown(old, 1234, 5678)
    before = old.stat()
    write(old, NEW)
    after = old.stat()
    assert (after.st_uid, after.st_gid, stat.S_IMODE(after.st_mode)) == (
        before.st_uid,
        before.st_gid,
        mode,
    )


def test_a_file_that_is_a_mount_is_written_in_place(write, old):
    """As a single file that is mounted into a container."""
    if os.geteuid() != 0:
        pytest.skip("mounts need root")
    behind = old.with_name("behind")
    behind.write_bytes(old.read_bytes())
    run_tool("mount", "--bind", behind, old)
    try:
        write(old, NEW)
        assert np.array_equal(content(old), NEW)
    finally:
        unmount(old)
    assert np.array_equal(content(behind), NEW)


def test_with_atomic_false_a_file_is_written_in_place(old):
    before = old.stat().st_ino
    assert nvmeio.write_file(NEW, old, atomic=False) == len(NEW)
    assert old.stat().st_ino == before
    assert old.read_bytes() == NEW.tobytes()


def test_aio_write_writes_in_place(old):
    before = old.stat().st_ino
    assert nvmeio.aio_write(NEW, str(old), MIB, 8, False, False, False) == 0
    assert old.stat().st_ino == before
    assert old.read_bytes() == NEW.tobytes()


def test_the_error_says_if_the_folder_takes_no_file(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(OLD)
    tmp_path.chmod(0o555)
    path.chmod(0o666)
    script = (
        "import sys, nvmeio\n"
        "path = sys.argv[1]\n"
        "try:\n    nvmeio.write_file(b'new', path)\n"
        "except PermissionError as error:\n    print(error)\n"
        "print(nvmeio.write_file(b'newer', path, atomic=False))"
    )
    command = [*as_nobody(), sys.executable, "-c", script, path]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    refused = (
        f"Permission denied (its folder, in which a new file must be created): '{path}'"
    )
    assert said == f"[Errno 13] {refused}\n5\n"
    assert path.read_bytes() == b"newer"


def test_a_killed_process_leaves_nothing_behind(old):
    """The kill comes after the write, before the new file gets its name."""
    script = (
        "import os, sys, nvmeio\n"
        "from nvmeio._publish import files\n"
        "files.link = lambda *arguments: os.kill(os.getpid(), 9)\n"
        "nvmeio.write_file(bytes(1 << 20), sys.argv[1])"
    )
    done = subprocess.run([sys.executable, "-c", script, old], check=False)
    assert done.returncode == -signal.SIGKILL
    assert old.read_bytes() == OLD
    assert os.listdir(old.parent) == [old.name]


def test_without_unnamed_files_a_temporary_name_is_used(write, old, monkeypatch):
    named, seen = _files.open_for_writing, []

    def refuse(folder):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), folder)

    def note(path, **options):
        seen.append(os.path.basename(path))
        return named(path, **options)

    with monkeypatch.context() as patched:
        patched.setattr(_files, "open_unnamed", refuse)
        patched.setattr(_files, "open_for_writing", note)
        write(old, NEW)
    assert np.array_equal(content(old), NEW)
    assert any(re.fullmatch(r"\.data\.[\w-]+\.nvmeio-tmp", name) for name in seen)
    assert os.listdir(old.parent) == [old.name]


@pytest.mark.parametrize("name", ["data/", "data/.", "missing/data", "data/../data", ""])
def test_paths_are_resolved_as_by_the_kernel(write, old, name):
    try:
        with open(f"{old.parent}/{name}" if name else "", "r+b"):
            expected = None
    except OSError as error:
        expected = error.errno
    assert expected is not None
    with pytest.raises(OSError, match=r"\[Errno") as caught:
        write(f"{old.parent}/{name}" if name else "", NEW)
    assert caught.value.errno in (expected, errno.EISDIR)
    assert old.read_bytes() == OLD
    assert os.listdir(old.parent) == [old.name]


def test_an_open_descriptor_keeps_its_file(write, old):
    """A shell's `> file` stays open on the file that /dev/stdout names."""
    with open(old, "r+b") as stream:
        write(f"/proc/self/fd/{stream.fileno()}", NEW)
        assert os.path.samestat(os.fstat(stream.fileno()), os.stat(old))
    assert np.array_equal(content(old), NEW)


def test_extended_attributes_are_kept(write, old):
    try:
        os.setxattr(old, "user.nvmeio", b"kept")
    except OSError as error:
        pytest.skip(f"no extended attributes here: {error}")
    write(old, NEW)
    assert os.getxattr(old, "user.nvmeio") == b"kept"


def test_a_file_system_without_attributes_works(write, old, monkeypatch):
    def refuse(path):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "listxattr", refuse)
        write(old, NEW)
    assert np.array_equal(content(old), NEW)


GROUPS = """
import os, sys, nvmeio
path, user, group = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
os.setgroups([group])
os.setgid(user)
os.setuid(user)
# Python may be where only root can read, so nothing more can be imported.
sys.meta_path.clear()
try:
    print(nvmeio.write_file(b"new", path))
except PermissionError as error:
    print(error.strerror)
found = os.stat(path)
print(found.st_uid, found.st_gid, oct(found.st_mode & 0o777))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize(
    ("mode", "group", "said"),
    [
        (0o660, 2000, "3 1002 2000 0o660"),
        # Everybody may write to it, and the new file has another group.
        (0o666, 3000, "3 1002 1002 0o606"),
        (0o640, 2000, "Permission denied 1001 2000 0o640"),
    ],
)
def test_a_user_keeps_the_owner_and_group_that_permissions_allow(mode, group, said):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o777)
        path = Path(folder, "data")
        path.write_bytes(b"old")
        os.chown(path, 1001, 2000)
        path.chmod(mode)
        command = [sys.executable, "-c", GROUPS, path, "1002", str(group)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"another user cannot import nvmeio here: {done.stderr[-200:]}")
        assert done.stdout.split() == said.split()
