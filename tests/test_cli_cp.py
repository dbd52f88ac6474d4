"""``nvmeio cp``: a target has the whole copy, or stays as it was."""

import errno
import hashlib
import os
import re
import resource
import shutil
import signal
import stat
import subprocess
from pathlib import Path

import pytest

from children import run_tool
from commands import command, nvmeio, nvmeio_in_terminal
from copies import HELD, LARGE, SIZE, running, temporary_in
from helpers import ENGINES, MIB, PAGE, pattern
from nvmeio._arguments.units import in_binary
from workloads.common import Faults, make_file


def listing(folder):
    """Return the files of a folder, with contents, modes and times of change."""
    found = {}
    for name in os.listdir(folder):
        status = os.lstat(folder / name)
        link = os.readlink(folder / name) if stat.S_ISLNK(status.st_mode) else None
        data = (folder / name).read_bytes() if stat.S_ISREG(status.st_mode) else None
        found[name] = status.st_mode, status.st_mtime_ns, link, data
    return found


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def error_of(done):
    """Return the only line of a failed command, without output."""
    assert (done.status, done.out) == (1, "")
    assert done.err.startswith("nvmeio cp: error: ")
    assert done.err.count("\n") == 1
    return done.err.removeprefix("nvmeio cp: error: ").strip()


@pytest.mark.parametrize("size", [0, 1, PAGE - 1, PAGE, PAGE + 1, 4 * MIB, LARGE])
def test_a_copy_has_exactly_the_bytes_of_the_source(folder, size):
    data = make_file(folder / "source", size)
    done = nvmeio("cp", folder / "source", folder / "copy", "--verify")
    assert (folder / "copy").read_bytes() == data
    assert (done.status, done.out) == (0, f"{sha256(data)}  {folder}/copy\n")
    assert done.err.startswith(f"{in_binary(size)}, ")
    assert done.err.endswith("read back and compared\n")
    assert sorted(os.listdir(folder)) == ["copy", "source"]


@pytest.mark.parametrize("way", [[], ["--direct"], ["--buffered"]], ids=" ".join)
def test_every_engine_copies(engine, source, tmp_path, way):
    small = ["--block-size", "64K", "--queue_depth=3", "--verify", *way]
    done = nvmeio("cp", source, tmp_path / "copy", "--engine", engine, *small)
    assert (tmp_path / "copy").read_bytes() == source.read_bytes()
    assert done.status == 0
    assert f"B/s by {engine}, " in done.err


def test_blocks_larger_than_the_buffers_are_copied(source, tmp_path):
    done = nvmeio("cp", source, tmp_path / "copy", "--block-size", "33M")
    assert done.status == 0
    assert (tmp_path / "copy").read_bytes() == source.read_bytes()


def test_a_copy_goes_from_the_disk_to_memory_and_back(source, tmp_path, tmpfs):
    assert nvmeio("cp", source, tmpfs / "there").status == 0
    assert nvmeio("cp", tmpfs / "there", tmp_path / "back").status == 0
    assert (tmp_path / "back").read_bytes() == source.read_bytes()


def test_a_block_device_is_copied_as_a_whole(loop_device, tmp_path):
    device = loop_device(5 * MIB)
    with open(device, "wb") as file:
        file.write(pattern(5 * MIB))
    assert nvmeio("cp", device, tmp_path / "copy").status == 0
    assert (tmp_path / "copy").read_bytes() == pattern(5 * MIB)


@pytest.mark.parametrize("name", ["to", "to/"])
def test_copying_to_a_folder_makes_a_file_of_the_same_name(source, tmp_path, name):
    (tmp_path / "to").mkdir()
    done = nvmeio("cp", "--verify", source, name, cwd=tmp_path)
    assert (tmp_path / "to/source").read_bytes() == source.read_bytes()
    assert done.out == f"{sha256(source.read_bytes())}  to/source\n"


@pytest.mark.parametrize("name", ["two words", "a\nb\\c", "-x", b"\xff\xfe", "[red]"])
def test_sha256sum_checks_the_output_for_any_name(source, tmp_path, name):
    name = os.fsdecode(name)
    done = subprocess.run(
        command("cp", "--verify", "--", source, name),
        cwd=tmp_path,
        capture_output=True,
        check=True,
    )
    (tmp_path / "sums").write_bytes(done.stdout)
    check = ["sha256sum", "--strict", "-c", "sums"]
    subprocess.run(check, cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)


def test_a_quiet_copy_prints_only_its_checksum(source, tmp_path):
    done = nvmeio("cp", "-q", source, tmp_path / "copy")
    assert (done.status, done.out, done.err) == (0, "", "")
    done = nvmeio("cp", "-q", "--verify", source, tmp_path / "copy")
    assert (done.status, done.err) == (0, "")
    assert done.out.startswith(sha256(source.read_bytes()))


def test_progress_is_shown_in_a_terminal_and_then_removed(slow_source, tmp_path):
    Faults(slow_source).set(read={"delay_s": 0.02})
    done = nvmeio_in_terminal(
        "cp", slow_source, tmp_path / "copy", until=r"copying.*%", typed=b""
    )
    assert done.status == 0
    assert re.search(r"\r16 MiB, \d+\.\d\d s, [\d.]+ [MG]B/s by \w+\n$", done.out)
    assert (tmp_path / "copy").read_bytes() == pattern(16 * MIB)


def test_a_quiet_copy_prints_nothing_in_a_terminal(source, tmp_path):
    done = nvmeio_in_terminal("cp", "-q", source, tmp_path / "copy")
    assert (done.status, done.out) == (0, "")


def test_the_help_says_how_unfinished_files_are_named_and_has_examples():
    done = nvmeio("cp", "--help")
    assert done.status == 0
    assert ".nvmeio-*.tmp" in done.out
    assert "examples:\n  nvmeio cp " in done.out


class TestHoles:
    def sparse(self, path, size, pieces):
        """Make a file with random bytes at some offsets."""
        with open(path, "wb") as file:
            file.truncate(size)
            for offset, nbytes in pieces:
                file.seek(offset)
                file.write(pattern(nbytes, offset))
            os.fsync(file.fileno())

    def test_holes_stay_holes(self, folder):
        pieces = [(0, 5), (3 * MIB - 1, 4 * MIB), (5 << 30, 3 * PAGE + 1)]
        size = (5 << 30) + 20 * MIB
        self.sparse(folder / "source", size, pieces)
        done = nvmeio("cp", folder / "source", folder / "copy")
        assert done.status == 0
        status = os.stat(folder / "copy")
        assert status.st_size == size
        assert status.st_blocks <= os.stat(folder / "source").st_blocks + 8
        assert " of it in holes, " in done.err
        with open(folder / "copy", "rb") as file:
            for offset, nbytes in pieces:
                file.seek(offset)
                assert file.read(nbytes) == pattern(nbytes, offset)
                assert not any(file.read(MIB))

    @pytest.mark.parametrize("place", [0, 5 * MIB, 11 * MIB - 1])
    def test_holes_count_in_the_checksum(self, folder, place):
        self.sparse(folder / "source", 11 * MIB, [(place, 1)])
        done = nvmeio("cp", "--verify", folder / "source", folder / "copy")
        data = (folder / "source").read_bytes()
        assert done.out.startswith(sha256(data))
        assert (folder / "copy").read_bytes() == data

    def test_a_file_of_only_holes_keeps_its_size(self, folder):
        self.sparse(folder / "source", LARGE, [])
        assert nvmeio("cp", folder / "source", folder / "copy").status == 0
        assert os.stat(folder / "copy").st_size == LARGE

    def test_holes_need_no_space(self, loop_mount, tmp_path):
        folder = loop_mount("ext4", 64 * MIB)
        self.sparse(tmp_path / "source", 1 << 40, [(1 << 39, 10)])
        assert nvmeio("cp", tmp_path / "source", folder).status == 0
        assert os.stat(folder / "source").st_size == 1 << 40


class TestTargets:
    def test_a_link_stays_and_its_target_is_replaced(self, source, tmp_path):
        (tmp_path / "to").mkdir()
        (tmp_path / "to/file").write_bytes(b"old")
        (tmp_path / "link").symlink_to("to/file")
        assert nvmeio("cp", source, tmp_path / "link").status == 0
        assert os.readlink(tmp_path / "link") == "to/file"
        assert (tmp_path / "to/file").read_bytes() == source.read_bytes()
        assert os.listdir(tmp_path / "to") == ["file"]

    def test_hard_links_to_a_replaced_file_keep_the_old_file(self, source, tmp_path):
        (tmp_path / "copy").write_bytes(b"old")
        os.link(tmp_path / "copy", tmp_path / "other")
        assert nvmeio("cp", source, tmp_path / "copy").status == 0
        assert (tmp_path / "other").read_bytes() == b"old"
        assert (tmp_path / "copy").read_bytes() == source.read_bytes()

    @pytest.mark.parametrize(
        ("make", "words"),
        [
            (lambda path: os.mkfifo(path / "source"), "is a pipe"),
            (lambda path: os.mkdir(path / "source"), "is a directory"),
            (lambda path: os.symlink("source", path / "source"), "Too many levels"),
        ],
        ids=["fifo", "folder", "loop"],
    )
    def test_only_regular_files_are_replaced(self, source, tmp_path, make, words):
        target = tmp_path / "to"
        target.mkdir()
        make(target)
        before = listing(target)
        message = error_of(nvmeio("cp", source, target))
        assert message.startswith(f"{target}/source")
        assert words in message
        assert listing(target) == before

    def test_a_device_is_not_written_to(self, loop_device, source):
        device = loop_device(40 * MIB)
        assert "is a block device" in error_of(nvmeio("cp", source, device))
        assert "is a character device" in error_of(nvmeio("cp", source, "/dev/null"))
        assert not any(Path(device).read_bytes())

    @pytest.mark.parametrize("how", [os.link, os.symlink])
    def test_a_file_is_not_copied_to_itself(self, source, how):
        how(source, source.with_name("same"))
        before = listing(source.parent)
        for name in ("source", "same", "."):
            message = error_of(nvmeio("cp", source, name, cwd=source.parent))
            assert message.endswith("are the same file")
        assert listing(source.parent) == before

    @pytest.mark.parametrize("place", ["missing/copy", "missing/"])
    def test_a_missing_folder_is_not_created(self, source, tmp_path, place):
        message = error_of(nvmeio("cp", source, f"{tmp_path}/{place}"))
        assert message.startswith(f"{tmp_path}/missing")
        assert not (tmp_path / "missing").exists()

    def test_no_clobber_keeps_an_existing_file(self, source, tmp_path):
        (tmp_path / "copy").write_bytes(b"old")
        (tmp_path / "dangling").symlink_to("nowhere")
        before = listing(tmp_path)
        for name in ("copy", "dangling"):
            message = error_of(nvmeio("cp", "-n", source, tmp_path / name))
            assert message == f"{tmp_path}/{name} exists, and --no-clobber keeps it"
        assert listing(tmp_path) == before
        assert nvmeio("cp", "-n", source, tmp_path / "new").status == 0
        assert (tmp_path / "new").read_bytes() == source.read_bytes()
        assert sorted(os.listdir(tmp_path)) == ["copy", "dangling", "from", "new"]

    @pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
    def test_no_clobber_keeps_a_file_that_appears_meanwhile(
        self, slow_source, tmp_path, links
    ):
        target = tmp_path if links else slow_source.parent
        Faults(slow_source).set(read=HELD)
        with running("--no-clobber", slow_source, target / "copy") as process:
            temporary_in(target)
            (target / "copy").write_bytes(b"newcomer")
            Faults(slow_source).set()
        assert process.returncode == 1
        assert (target / "copy").read_bytes() == b"newcomer"
        assert list(target.glob(".nvmeio-*")) == []

    def test_no_clobber_works_without_hard_links(self, slow_source):
        copy = slow_source.with_name("copy")
        assert nvmeio("cp", "--no-clobber", slow_source, copy).status == 0
        assert copy.read_bytes() == pattern(16 * MIB)

    def test_a_read_only_file_is_not_replaced(self, source, tmp_path):
        target = tmp_path / "copy"
        target.write_bytes(b"old")
        target.chmod(0o444)
        before = listing(tmp_path)
        prefix = []
        if os.geteuid() == 0:
            if shutil.which("setpriv") is None:
                pytest.skip("setpriv is not installed")
            # Without these capabilities root cannot write to a read-only file.
            prefix = ["setpriv", "--bounding-set", "-dac_override"]
        message = error_of(nvmeio("cp", source, target, prefix=prefix))
        assert message == f"{target} is not writable by this user"
        assert listing(tmp_path) == before


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (".", "Is a directory"),
        ("missing", "No such file or directory"),
        ("pipe", "it is a pipe"),
        ("/dev/zero", "it is a character device"),
        ("/proc/version", "reports a size of 0, but is not empty"),
    ],
)
def test_a_source_that_cannot_be_copied_is_an_error(tmp_path, source, words):
    os.mkfifo(tmp_path / "pipe")
    done = nvmeio("cp", source, "copy", cwd=tmp_path)
    message = error_of(done)
    assert message.startswith(source)
    assert words in message
    assert os.listdir(tmp_path) == ["pipe"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["a"],
        ["a", "b", "c"],
        ["a", "b", "--block-size", "0"],
        ["a", "b", "--queue-depth", "1000000"],
        ["a", "b", "--direct", "--buffered"],
        ["a", "b", "--engine", "steam"],
        ["a", "b", "--block-size", "2T"],
    ],
    ids=" ".join,
)
def test_wrong_command_lines_exit_with_status_2(tmp_path, arguments):
    (tmp_path / "a").touch()
    done = nvmeio("cp", *arguments, cwd=tmp_path)
    assert (done.status, done.out) == (2, "")
    assert re.fullmatch(r"(nvmeio|nvmeio cp): error: [^\n]+; see \1 --help\n", done.err)
    assert os.listdir(tmp_path) == ["a"]


def test_more_than_one_target_is_an_error(tmp_path):
    done = nvmeio("cp", "a", "b", "to/", cwd=tmp_path)
    assert done.err == (
        "nvmeio cp: error: unknown arguments: to/; cp copies one SRC to one DST; "
        "see nvmeio cp --help\n"
    )


class TestFailures:
    """After any failure the folder is as it was."""

    @pytest.fixture(params=["new", "old"])
    def target(self, request, tmp_path):
        """The target of a copy, with and without a file that the copy would replace."""
        folder = tmp_path / "to"
        folder.mkdir()
        if request.param == "old":
            (folder / "copy").write_bytes(b"old")
        return folder / "copy"

    def fails(self, *arguments, folder, **options):
        """Run a copy that fails, and return its message."""
        before = listing(folder)
        message = error_of(nvmeio("cp", *arguments, **options))
        assert listing(folder) == before
        assert ".nvmeio-" not in message
        return message

    def test_a_disk_without_enough_space_is_refused_before_writing(
        self, loop_mount, source
    ):
        folder = loop_mount("ext4", 32 * MIB)
        make_file(source, LARGE)
        (folder / "copy").write_bytes(b"old")
        message = self.fails(source, folder / "copy", folder=folder)
        found = re.fullmatch(
            rf"{folder} has [\d.]+ MiB free, and the copy takes (.*)", message
        )
        assert found[1] == in_binary(LARGE)

    @pytest.mark.parametrize("room", [0, 5 * MIB + 100, SIZE - 1])
    def test_a_disk_that_fills_up_is_an_error(self, faulty, source, room):
        """FUSE does not report its free space."""
        (faulty / "copy").write_bytes(b"old")
        Faults(faulty / "copy").set(write={"full_at": room})
        message = self.fails(source, faulty / "copy", folder=faulty)
        assert message.startswith(f"{faulty}/copy: No space left on device")

    def test_a_file_size_limit_is_an_error(self, source, target):
        limits = (MIB, resource.RLIM_INFINITY)
        message = self.fails(
            source,
            target,
            folder=target.parent,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits),
        )
        assert message.startswith(f"{target}: File too large")

    def test_a_read_only_folder_is_an_error(self, loop_mount, source):
        folder = loop_mount("ext4", 64 * MIB)
        (folder / "copy").write_bytes(b"old")
        run_tool("mount", "-o", "remount,ro", folder)
        for name in ("copy", "new"):
            message = self.fails(source, folder / name, folder=folder)
            assert message.startswith(f"{folder}/{name}")
            assert "Read-only file system" in message or "is not writable" in message

    @pytest.mark.parametrize("engine", ENGINES)
    def test_a_read_error_of_the_source_is_an_error(self, slow_source, target, engine):
        Faults(slow_source).set(read={"error": errno.EIO, "at": 9 * MIB + 5})
        message = self.fails(slow_source, target, "--engine", engine, folder=target.parent)
        assert message.startswith(f"{slow_source}: Input/output error")

    def test_a_source_that_ends_early_is_an_error(self, slow_source, target):
        Faults(slow_source).set(read={"short": 0})
        message = self.fails(slow_source, target, folder=target.parent)
        assert message.startswith(f"{slow_source}: read past the end of the file")

    def test_short_reads_and_writes_are_continued(self, slow_source):
        copy = slow_source.with_name("copy")
        Faults(slow_source).set(read={"short": 50_000}, write={"short": 70_000})
        assert nvmeio("cp", "--verify", slow_source, copy).status == 0
        fired = Faults(slow_source).fired()
        assert fired["read.short"] > 0
        assert fired["write.short"] > 0
        Faults(slow_source).set()
        assert copy.read_bytes() == pattern(16 * MIB)

    def test_a_failed_sync_is_an_error(self, faulty, source):
        (faulty / "copy").write_bytes(b"old")
        Faults(faulty / "copy").set(fsync={"error": errno.EIO})
        message = self.fails(source, faulty / "copy", folder=faulty)
        assert message.startswith(f"{faulty}/copy: Input/output error")

    @pytest.mark.parametrize("engine", ENGINES)
    @pytest.mark.parametrize("call", ["write", "read"])
    def test_verification_finds_a_bit_that_flips(self, faulty, source, engine, call):
        """The bit flips when it is written, or when it is read back."""
        (faulty / "copy").write_bytes(b"old")
        Faults(faulty / "copy").set(**{call: {"flip": 5 * MIB + 3}})
        before = {"copy": b"old"}
        done = nvmeio("cp", "--verify", "--engine", engine, source, faulty / "copy")
        message = error_of(done)
        assert f"the copy differs from {source}" in message
        assert f"not {sha256(source.read_bytes())}" in message
        assert Faults(faulty / "copy").fired()[f"{call}.flip"] > 0
        Faults(faulty / "copy").set()
        assert {path.name: path.read_bytes() for path in faulty.iterdir()} == before

    def test_without_verification_the_flip_goes_unnoticed(self, faulty, source):
        """This shows that verification finds the flip."""
        (faulty / "copy").write_bytes(b"old")
        Faults(faulty / "copy").set(write={"flip": 5 * MIB + 3})
        assert nvmeio("cp", source, faulty / "copy").status == 0
        assert (faulty / "copy").read_bytes() != source.read_bytes()

    def test_a_source_that_grows_meanwhile_is_an_error(self, slow_source, target):
        before = listing(target.parent)
        Faults(slow_source).set(read=HELD)
        with running(slow_source, target, stdin=subprocess.DEVNULL) as process:
            temporary_in(target.parent)
            Faults(slow_source).await_waiting()
            with open(slow_source, "ab") as file:
                file.write(b"more")
            Faults(slow_source).set()
        assert process.returncode == 1
        assert listing(target.parent) == before

    @pytest.mark.parametrize("change", ["same size", "shorter"])
    def test_a_source_that_changes_meanwhile_is_an_error(self, faulty, source, change):
        (faulty / "copy").write_bytes(b"old")
        Faults(faulty / "copy").set(write={"held": True})
        with running("--engine", "threads", source, faulty / "copy") as process:
            Faults(faulty / "copy").await_waiting()
            with open(source, "r+b") as file:
                file.write(b"changed")
                file.truncate(SIZE if change == "same size" else SIZE - 1)
            Faults(faulty / "copy").set()
            message = process.stderr.read()
        assert process.returncode == 1
        assert str(source) in message
        assert "has changed while" in message or "past the end" in message
        assert {path.name for path in faulty.iterdir()} == {"copy"}
        assert (faulty / "copy").read_bytes() == b"old"

    def test_ctrl_c_leaves_nothing(self, slow_source, target):
        before = listing(target.parent)
        Faults(slow_source).set(read={"delay_s": 0.05})
        done = nvmeio_in_terminal("cp", slow_source, target, until=r"copying.*%")
        assert done.status == 130
        assert done.out.endswith("nvmeio cp: interrupted\n")
        assert "Traceback" not in done.out
        assert listing(target.parent) == before

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
    def test_a_signal_leaves_nothing(self, slow_source, target, number):
        before = listing(target.parent)
        Faults(slow_source).set(read={"delay_s": 0.05})
        with running(slow_source, target) as process:
            temporary_in(target.parent)
            process.send_signal(number)
        assert process.returncode == 128 + number
        assert listing(target.parent) == before

    def test_a_kill_leaves_a_file_named_as_the_help_says(self, slow_source, target):
        before = listing(target.parent)
        Faults(slow_source).set(read=HELD)
        with running(slow_source, target) as process:
            left = temporary_in(target.parent)
            process.kill()
            Faults(slow_source).set()
        left.unlink()
        assert listing(target.parent) == before
