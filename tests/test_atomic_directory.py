"""Folders that appear complete or not at all, and the cleanup of unfinished ones."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from children import run_with_faults, skip_sanitized
from helpers import become_host
from nvmeio._publish import folders
from nvmeio._publish import names as _names
from nvmeio.checkpoint import atomic_directory, cleanup


def fill(folder, content="new"):
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "deep" / "er" / "file").write_text(content)
    (folder / "link").symlink_to("deep")


def content_of(folder):
    return (folder / "deep" / "er" / "file").read_text()


@pytest.mark.parametrize("sync", [True, False])
def test_a_folder_appears_when_it_is_complete(tmp_path, sync):
    with atomic_directory(tmp_path / "a", sync=sync) as folder:
        assert folder.parent == tmp_path
        fill(folder)
        assert not (tmp_path / "a").exists()
    assert content_of(tmp_path / "a") == "new"
    assert os.listdir(tmp_path) == ["a"]


def test_a_slash_at_the_end_makes_no_difference(tmp_path):
    for text in ("one", "two"):
        with atomic_directory(f"{tmp_path}/a//", replace=True) as folder:
            (folder / "file").write_text(text)
        assert (tmp_path / "a" / "file").read_text() == text
    (tmp_path / "link").symlink_to("a")
    with (
        pytest.raises(NotADirectoryError, match="it is a symbolic link"),
        atomic_directory(f"{tmp_path}/link/", replace=True),
    ):
        pass
    with pytest.raises(IsADirectoryError), atomic_directory("/", replace=True):
        pass


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("replace", [True, False])
def test_an_exception_leaves_what_was_there(tmp_path, error, replace):
    before = []
    if replace:
        (tmp_path / "a").mkdir()
        fill(tmp_path / "a", "old")
        before = ["a"]

    def body():
        with atomic_directory(tmp_path / "a", replace=replace) as folder:
            fill(folder)
            raise error

    with pytest.raises(error):
        body()
    assert os.listdir(tmp_path) == before
    assert not replace or content_of(tmp_path / "a") == "old"


def test_an_existing_folder_is_replaced_only_if_asked(tmp_path):
    (tmp_path / "a").mkdir(mode=0o750)
    os.chmod(tmp_path / "a", 0o751)
    fill(tmp_path / "a", "old")
    with (
        pytest.raises(FileExistsError, match=str(tmp_path / "a")),
        atomic_directory(tmp_path / "a"),
    ):
        raise AssertionError
    with atomic_directory(tmp_path / "a", replace=True) as folder:
        fill(folder)
        assert content_of(tmp_path / "a") == "old"
    assert content_of(tmp_path / "a") == "new"
    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o751


@pytest.mark.parametrize("kind", ["file", "link"])
def test_only_a_folder_is_replaced(tmp_path, kind):
    (tmp_path / "other").mkdir()
    if kind == "file":
        (tmp_path / "a").write_text("old")
    else:
        (tmp_path / "a").symlink_to("other")
    with (
        pytest.raises(NotADirectoryError, match="is not replaced"),
        atomic_directory(tmp_path / "a", replace=True),
    ):
        raise AssertionError
    assert sorted(os.listdir(tmp_path)) == ["a", "other"]


@pytest.mark.parametrize("replace", [True, False])
def test_a_folder_that_appears_meanwhile_is_not_lost(tmp_path, replace):
    def body():
        with atomic_directory(tmp_path / "a", replace=replace) as folder:
            fill(folder)
            (tmp_path / "a").write_text("another's")

    with pytest.raises(OSError, match=str(tmp_path / "a")) as caught:
        body()
    assert caught.value.errno == (errno.ENOTDIR if replace else errno.EEXIST)
    assert (tmp_path / "a").read_text() == "another's"
    assert os.listdir(tmp_path) == ["a"]


def test_the_parent_folder_must_exist(tmp_path):
    with pytest.raises(FileNotFoundError), atomic_directory(tmp_path / "no" / "a"):
        raise AssertionError


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"reserve": -1}, ValueError),
        ({"reserve": 1.5}, TypeError),
        ({"replace": "no"}, TypeError),
        ({"sync": None}, TypeError),
    ],
)
def test_bad_arguments(tmp_path, options, error):
    with (
        pytest.raises(error, match=next(iter(options))),
        atomic_directory(tmp_path / "a", **options),
    ):
        raise AssertionError
    assert os.listdir(tmp_path) == []


def test_free_space_is_checked_before_anything_is_written(tmp_path):
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    with (
        pytest.raises(OSError, match=r"are needed, and \d+ are free") as caught,
        atomic_directory(tmp_path / "a", reserve=free + (1 << 40)),
    ):
        raise AssertionError
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(tmp_path / "a")
    assert os.listdir(tmp_path) == []
    with atomic_directory(tmp_path / "a", reserve=1 << 20) as folder:
        assert os.listdir(folder) == []


def test_contents_are_synced_before_the_rename_and_the_name_after_it(tmp_path):
    call = "import sys, nvmeio; from pathlib import Path\n"
    call += "with nvmeio.checkpoint.atomic_directory(sys.argv[1]) as folder:\n"
    call += "    (folder / 'deep').mkdir(); (folder / 'deep' / 'file').write_text('x')\n"
    log = tmp_path / "log"
    command = ["strace", "-f", "-y", "-e", "trace=fsync,renameat2", "-o", str(log)]
    folder = tmp_path / "top"
    folder.mkdir()
    subprocess.run(
        [*command, sys.executable, "-c", call, str(folder / "a")],
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    calls = [line.split(maxsplit=1)[1] for line in log.read_text().splitlines()]
    calls = [line for line in calls if line.startswith(("fsync", "renameat2"))]
    ends = [("/deep/file>", "fsync"), ("/deep>", "fsync"), (".nvmeio-tmp>", "fsync")]
    assert len(calls) == 5
    for line, (end, name) in zip(calls, ends, strict=False):
        assert line.startswith(name)
        assert end in line
    assert calls[3].startswith("renameat2")
    assert f"{folder}>" in calls[4]


def test_write_only_files_are_synced(tmp_path, monkeypatch):
    open_, fsync, synced = os.open, os.fsync, []

    def opened(path, flags, *arguments, **options):
        if str(path).endswith("secret") and flags & os.O_ACCMODE == os.O_RDONLY:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return open_(path, flags, *arguments, **options)

    def record(descriptor):
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    before = os.listdir("/proc/self/fd")
    with atomic_directory(tmp_path / "a") as folder:
        (folder / "secret").write_text("new")
        monkeypatch.setattr(os, "open", opened)
        monkeypatch.setattr(os, "fsync", record)
    assert synced[0] == "secret"
    assert synced[2] == tmp_path.name
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("when", range(1, 6))
@pytest.mark.parametrize("replace", [True, False])
def test_a_failed_sync_is_an_error_and_keeps_the_old_folder(tmp_path, when, replace):
    top = tmp_path / "top"
    top.mkdir()
    if replace:
        (top / "a").mkdir()
        fill(top / "a", "old")
    fault = f"fsync:error=EIO:when={when}"
    said = run_with_faults("fill_folder", fault, path=str(top / "a"), replace=replace)
    kind, words = said.report
    assert kind == "OSError"
    assert "Input/output error" in words
    if when == 5:
        # The new folder has its name, and the message says that durability is unknown.
        assert "it is in its place" in words
        assert content_of(top / "a") == "new"
    else:
        assert not replace or content_of(top / "a") == "old"
    names = [name for name in os.listdir(top) if not name.endswith(".nvmeio-tmp")]
    assert names == (["a"] if replace or when == 5 else [])
    # After a power failure either may be the one in place, so both stay.
    assert len(os.listdir(top)) - len(names) == (replace and when == 5)


@pytest.mark.parametrize("code", ["EINVAL", "ENOSYS"])
def test_without_exchange_of_names_the_old_folder_is_set_aside(tmp_path, code):
    """As on NFS: the old folder is away for a moment."""
    fault = f"renameat2:error={code}"
    (tmp_path / "a").mkdir()
    fill(tmp_path / "a", "old")
    said = run_with_faults("fill_folder", fault, path=str(tmp_path / "a"), replace=True)
    assert said.report[0] == "ok"
    assert content_of(tmp_path / "a") == "new"
    assert os.listdir(tmp_path) == ["a"]


def test_a_forked_child_leaves_the_folder_to_its_parent(tmp_path):
    skip_sanitized("cannot follow forks of a process with threads")
    with folders.Unfinished(str(tmp_path / "a"), replace=False) as unfinished:
        fill(Path(unfinished.path))
        child = os.fork()
        if child == 0:
            os._exit(leave(unfinished))
        assert os.waitpid(child, 0)[1] == 0
        assert content_of(Path(unfinished.path)) == "new"
        unfinished.commit(sync=True)
    assert content_of(tmp_path / "a") == "new"


def leave(unfinished):
    """End the block in a forked child, in both ways; return 0 if nothing happens."""
    try:
        unfinished.commit(sync=True)
    except RuntimeError as error:
        unfinished.__exit__()
        kept = os.path.isdir(unfinished.path)
        return 0 if "forked child" in str(error) and kept else 1
    return 2


class TestCleanup:
    """Only the leftovers of dead processes are removed."""

    def killed(self, path, wait=True):
        """Kill a process in the middle; without `wait` it stays a zombie."""
        call = "import os, sys, nvmeio\n"
        call += "with nvmeio.checkpoint.atomic_directory(sys.argv[1]) as folder:\n"
        call += "    (folder / 'file').write_text('x'); os.kill(os.getpid(), 9)\n"
        process = subprocess.Popen([sys.executable, "-c", call, str(path)])
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not wait or process.wait() == -9
        return process

    @pytest.mark.parametrize("wait", [True, False])
    def test_leftovers_of_a_killed_process_are_removed(self, tmp_path, wait):
        (tmp_path / "other").mkdir()
        (tmp_path / ".nvmeio-tmp").mkdir()
        process = self.killed(tmp_path / "a", wait)
        (name,) = {*os.listdir(tmp_path)} - {"other", ".nvmeio-tmp"}
        assert name.startswith(f".a.{_names._host()}-")
        assert cleanup(tmp_path) == [str(tmp_path / name)]
        assert sorted(os.listdir(tmp_path)) == [".nvmeio-tmp", "other"]
        assert cleanup(tmp_path) == []
        process.wait()

    def test_hosts_may_have_dots_and_a_failed_removal_does_not_stop_others(
        self, tmp_path, monkeypatch
    ):
        become_host(monkeypatch, "node-1.some.where")
        monkeypatch.setattr(_names, "_start_of", lambda process: 1)
        for name in ("a", "b.c", "d"):
            os.mkdir(_names.temporary_name(str(tmp_path / name)))
        monkeypatch.setattr(_names, "_start_of", lambda process: -1)
        remove_tree = _names.remove_tree

        def refused(path):
            if os.path.basename(path).startswith(".b.c."):
                raise PermissionError(errno.EACCES, "no", path)
            remove_tree(path)

        monkeypatch.setattr(_names, "remove_tree", refused)
        with pytest.raises(PermissionError, match=r"\.b\.c\."):
            cleanup(tmp_path)
        assert [name[:5] for name in os.listdir(tmp_path)] == [".b.c."]

    def test_a_folder_that_is_half_removed_has_left_the_name_that_its_maker_knows(
        self, tmp_path, monkeypatch
    ):
        """Its maker may only have been cut off, and would publish that half."""
        self.killed(tmp_path / "a")
        (name,) = os.listdir(tmp_path)

        def killed(path):
            raise KeyboardInterrupt

        monkeypatch.setattr(_names, "remove_tree", killed)
        with pytest.raises(KeyboardInterrupt):
            cleanup(tmp_path)
        (left,) = os.listdir(tmp_path)
        assert left != name

    @pytest.mark.parametrize("seen", [True, False])
    def test_the_folder_of_a_living_process_stays(self, tmp_path, monkeypatch, seen):
        with atomic_directory(tmp_path / "a") as folder:
            if not seen:
                # As from another container, where the process is unknown; the lock still
                # counts.
                monkeypatch.setattr(_names, "_start_of", lambda process: -1)
            assert cleanup(tmp_path) == []
            assert folder.is_dir()

    @pytest.mark.parametrize("change", ["host", "locked", "a link"])
    def test_leftovers_that_may_be_in_use_stay(self, tmp_path, change):
        self.killed(tmp_path / "a")
        (name,) = os.listdir(tmp_path)
        path, held = tmp_path / name, None
        if change == "host":
            # The host's name is between the folder's name and the number.
            words = name.replace(f".a.{_names._host()}-", ".a.elsewhere-")
            assert words != name
            path = path.rename(tmp_path / words)
        elif change == "locked":
            held = os.open(path, os.O_RDONLY)
            fcntl.flock(held, fcntl.LOCK_SH)
        else:
            path.rename(tmp_path / "other")
            path.symlink_to("other")
        assert cleanup(tmp_path) == []
        assert path.exists()
        if held is not None:
            os.close(held)

    def test_files_of_dead_processes_are_removed_too(self, tmp_path):
        call = "import os, sys\nfrom nvmeio._publish.names import replacement\n"
        call += "with replacement(sys.argv[1]) as name:\n"
        call += "    open(name, 'x').close(); os.kill(os.getpid(), 9)\n"
        path = tmp_path / "data"
        subprocess.run([sys.executable, "-c", call, str(path)], check=False)
        # Version 0.2 named files so; this one may still be written.
        for name in (".nvmeio-0123456789abcdef.tmp", ".nvmeio-fedcba9876543210.tmp"):
            (tmp_path / name).touch()
        os.utime(tmp_path / ".nvmeio-0123456789abcdef.tmp", (1, 1))
        assert len(cleanup(tmp_path)) == 2
        assert os.listdir(tmp_path) == [".nvmeio-fedcba9876543210.tmp"]

    def test_a_leftover_whose_process_number_was_reused_is_removed(self, tmp_path):
        """The start time distinguishes the living process from the dead one."""
        self.killed(tmp_path / "a")
        (name,) = os.listdir(tmp_path)
        words = name.rpartition(".")[0].split("-")
        words[-3] = str(os.getpid())
        path = (tmp_path / name).rename(tmp_path / ("-".join(words) + ".nvmeio-tmp"))
        assert cleanup(tmp_path) == [str(path)]

    def test_names_may_have_the_maximal_length(self, tmp_path):
        for name in ("a" * 255, "ä" * 127):
            with atomic_directory(tmp_path / name) as folder:
                (folder / "file").write_text("x")
            assert (tmp_path / name / "file").read_text() == "x"

    def test_cleanup_of_a_missing_folder(self, tmp_path):
        with pytest.raises(FileNotFoundError):
            cleanup(tmp_path / "no")
        assert Path(tmp_path).is_dir()
