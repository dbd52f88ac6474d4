"""``nvmeio verify``: finds every difference, of any cause."""

import errno
import hashlib
import os
import re
import subprocess

import numpy as np
import pytest

from children import WATCHDOG_S
from commands import command, nvmeio, nvmeio_in_terminal
from helpers import ENGINES, MIB, PAGE, pattern
from nvmeio._arguments.units import in_binary
from workloads.common import Faults, make_file

# More than all buffers hold, and a multiple of no block or page.
LARGE = 37 * MIB + 777

ODD_NAMES = ["plain", "two words", "a\nb\\c", "c\rd", "-x", b"\xff\xfe"]


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def sha256sum(*arguments, folder):
    """Run sha256sum of coreutils."""
    done = subprocess.run(
        ["sha256sum", *arguments], cwd=folder, capture_output=True, check=False
    )
    return done.returncode, done.stdout


def verify_raw(*arguments, folder):
    """Run ``nvmeio verify`` on names of any bytes."""
    done = subprocess.run(
        command("verify", *arguments),
        cwd=folder,
        capture_output=True,
        check=False,
        timeout=WATCHDOG_S,
    )
    return done.returncode, done.stdout


def bad_of(done):
    """Return the messages about bad files, and the summary."""
    *lines, summary = done.err.splitlines()
    assert done.status == (1 if lines else 0)
    assert all(line.startswith("nvmeio verify: error: ") for line in lines)
    assert re.search(rf" {len(lines)} bad(;|$)", summary)
    return [line.removeprefix("nvmeio verify: error: ") for line in lines], summary


def odd_files(folder):
    """Make files with names that need escaping, and return the names."""
    names = [os.fsdecode(name) for name in ODD_NAMES]
    for number, name in enumerate(names):
        (folder / name).write_bytes(pattern(1000 + number))
    return names


class TestGoodFiles:
    @pytest.mark.parametrize("size", [0, 1, PAGE - 1, PAGE, PAGE + 1, 4 * MIB, LARGE])
    def test_checksums_of_good_files_are_printed(self, folder, size):
        data = make_file(folder / "file", size)
        done = nvmeio("verify", folder / "file")
        assert (done.status, done.out) == (0, f"{sha256(data)}  {folder}/file\n")
        bad, summary = bad_of(done)
        assert bad == []
        read = f"; {in_binary(size)} read both ways, " if size else ""
        assert summary.startswith(f"1 file, 0 bad{read}")
        assert ("B/s by" in summary) == (size > 0)

    @pytest.mark.parametrize("way", [[], ["--direct"], ["--buffered"]], ids=" ".join)
    def test_every_engine_reads_good_files(self, engine, tmp_path, way):
        data = make_file(tmp_path / "file", 9 * MIB + 777)
        small = ["--block-size", "64K", "--queue_depth=3", *way]
        done = nvmeio("verify", tmp_path / "file", "--engine", engine, *small)
        assert (done.status, done.out) == (0, f"{sha256(data)}  {tmp_path}/file\n")
        assert f"B/s by {engine}" in done.err
        assert ("1 through the page cache" in done.err) == (way == ["--buffered"])

    def test_dirty_pages_are_written_first(self, tmp_path):
        (tmp_path / "file").write_bytes(pattern(3 * MIB))
        done = nvmeio("verify", tmp_path / "file")
        assert (done.status, done.out[:64]) == (0, sha256(pattern(3 * MIB)))

    def test_holes_count_as_zeros(self, folder):
        with open(folder / "file", "wb") as file:
            file.truncate(7 * MIB)
            file.seek(3 * MIB)
            file.write(b"middle")
        done = nvmeio("verify", folder / "file")
        assert done.out[:64] == sha256((folder / "file").read_bytes())

    def test_a_block_device_can_be_verified(self, loop_device):
        device = loop_device(5 * MIB)
        done = nvmeio("verify", device)
        assert (done.status, done.out[:64]) == (0, sha256(bytes(5 * MIB)))

    def test_quiet_prints_no_checksums(self, tmp_path):
        (tmp_path / "file").write_bytes(b"text")
        done = nvmeio("verify", "-q", tmp_path / "file")
        assert (done.status, done.err) == (0, "")
        assert done.out == f"{sha256(b'text')}  {tmp_path}/file\n"


class TestLists:
    def test_sha256sum_accepts_our_list(self, tmp_path):
        names = odd_files(tmp_path)
        status, sums = verify_raw("--", *names, folder=tmp_path)
        assert status == 0
        assert sums.count(b"\n") == len(names)
        (tmp_path / "sums").write_bytes(sums)
        assert sha256sum("--strict", "-c", "sums", folder=tmp_path)[0] == 0

    @pytest.mark.parametrize("mode", ["--text", "--binary"])
    def test_a_list_of_sha256sum_is_accepted(self, tmp_path, mode):
        names = odd_files(tmp_path)
        _, sums = sha256sum(mode, "--", *names, folder=tmp_path)
        (tmp_path / "sums").write_bytes(sums)
        status, answer = verify_raw("--check", "sums", folder=tmp_path)
        written = [b"plain", b"two words", rb"\a\nb\\c", rb"\c\rd", b"-x", b"\xff\xfe"]
        assert (status, answer) == (0, b"".join(name + b": OK\n" for name in written))
        (tmp_path / names[2]).write_bytes(b"other")
        status, changed = verify_raw("--check", "sums", folder=tmp_path)
        assert status == 1
        assert changed == answer.replace(rb"\\c: OK", rb"\\c: FAILED")

    def test_a_list_may_come_from_standard_input(self, tmp_path):
        (tmp_path / "file").write_bytes(b"text")
        line = f"{sha256(b'text').upper()} *file"
        done = nvmeio("verify", "--check", "-", input=line, cwd=tmp_path)
        assert (done.status, done.out) == (0, "file: OK\n")

    def test_a_list_may_have_the_line_ends_of_windows(self, tmp_path):
        (tmp_path / "file").write_bytes(b"text")
        (tmp_path / "sums").write_bytes(f"{sha256(b'text')}  file\r\n".encode() * 2)
        done = nvmeio("verify", "--check", "sums", cwd=tmp_path)
        assert (done.status, done.out) == (0, "file: OK\n" * 2)

    def test_every_file_of_a_list_is_checked(self, tmp_path):
        (tmp_path / "good").write_bytes(b"good")
        (tmp_path / "changed").write_bytes(b"changed")
        known = sha256(b"good")
        sums = f"{known}  missing\n{known}  changed\n{known}  good\n"
        (tmp_path / "sums").write_text(sums)
        done = nvmeio("verify", "--check", "sums", cwd=tmp_path)
        assert done.out == "missing: FAILED\nchanged: FAILED\ngood: OK\n"
        assert bad_of(done)[0] == [
            "missing: No such file or directory",
            f"changed: its SHA-256 is {sha256(b'changed')}, not {known}",
        ]

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            ("", "there is no checksum in it"),
            ("text\n", "line 1 is not a checksum with a name"),
            (f"{'0' * 64}  a\n{'0' * 63}  b\n", "line 2 is not a checksum with a name"),
            (f"{'0' * 64}  a\n\n", "line 2 is not a checksum with a name"),
        ],
    )
    def test_an_invalid_list_is_refused(self, tmp_path, content, words):
        (tmp_path / "sums").write_text(content)
        done = nvmeio("verify", "--check", "sums", cwd=tmp_path)
        assert (done.status, done.out) == (1, "")
        assert done.err == f"nvmeio verify: error: sums: {words}\n"

    def test_a_missing_list_is_an_error(self, tmp_path):
        done = nvmeio("verify", "--check", tmp_path / "sums")
        assert (done.status, done.out) == (1, "")
        assert done.err == (
            f"nvmeio verify: error: {tmp_path}/sums: No such file or directory\n"
        )


class TestBadFiles:
    @pytest.mark.parametrize("engine", ENGINES)
    @pytest.mark.parametrize("position", [MIB, 5 * MIB + 3, 9 * MIB - 1])
    def test_the_first_different_byte_is_reported(self, faulty, engine, position):
        """One of the two reads returns a wrong byte, once."""
        make_file(faulty / "file", 9 * MIB)
        Faults(faulty / "file").set(read={"flip": position, "times": 1})
        done = nvmeio("verify", "--engine", engine, faulty / "file")
        assert done.out == ""
        bad, _ = bad_of(done)
        assert bad == [f"{faulty}/file: the two ways differ at offset {position}"]

    def test_a_page_cache_that_differs_from_the_device_is_found(self, loop_mount, tmp_path):
        folder = loop_mount("ext4", 64 * MIB)
        data = make_file(folder / "file", 3 * MIB + 5)
        (folder / "file").read_bytes()
        image = next(tmp_path.glob("*.img"))
        begin = image.read_bytes().index(data[: 1 * MIB])
        with open(image, "r+b") as device:
            device.seek(begin + 70_001)
            device.write(bytes([data[70_001] ^ 1]))
            os.fsync(device.fileno())
        assert (folder / "file").read_bytes() == data
        done = nvmeio("verify", folder / "file")
        assert done.out == ""
        assert bad_of(done)[0] == [f"{folder}/file: the two ways differ at offset 70001"]

    def test_a_bad_file_does_not_stop_the_others(self, faulty, tmp_path):
        make_file(faulty / "file", 9 * MIB)
        Faults(faulty / "file").set(read={"error": errno.EIO, "at": 5 * MIB})
        (tmp_path / "good").write_bytes(b"good")
        os.mkfifo(tmp_path / "pipe")
        names = ["missing", tmp_path, tmp_path / "pipe", faulty / "file"]
        files = [word for name in names for word in (name, tmp_path / "good")]
        done = nvmeio("verify", *files)
        assert done.out == f"{sha256(b'good')}  {tmp_path}/good\n" * 4
        bad, summary = bad_of(done)
        assert summary.startswith("8 files, 4 bad; ")
        assert [line.split(" ")[0] for line in bad] == [f"{name}:" for name in names]
        for line, words in zip(
            bad,
            ("No such file", "it is a folder", "it is a pipe", "Input/output error"),
            strict=True,
        ):
            assert words in line

    def test_a_file_that_ends_early_is_bad(self, faulty):
        make_file(faulty / "file", MIB)
        Faults(faulty / "file").set(read={"short": 0})
        bad, _ = bad_of(nvmeio("verify", faulty / "file"))
        assert bad[0].startswith(f"{faulty}/file: read past the end of the file")

    def test_a_file_that_cannot_be_synced_is_bad(self, faulty):
        make_file(faulty / "file", MIB)
        Faults(faulty / "file").set(fsync={"error": errno.EIO})
        bad, _ = bad_of(nvmeio("verify", faulty / "file"))
        assert bad[0].startswith(f"{faulty}/file: Input/output error")

    def test_a_file_that_grows_meanwhile_is_an_error(self, faulty):
        make_file(faulty / "file", 16 * MIB)
        faults = Faults(faulty / "file")
        faults.set(read={"held": True, "at": 9 * MIB})
        process = subprocess.Popen(
            command("verify", faulty / "file"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        faults.await_waiting()
        with open(faulty / "file", "ab") as file:
            file.write(b"more")
        faults.set()
        out, err = process.communicate(timeout=WATCHDOG_S)
        assert (process.returncode, out) == (1, "")
        assert f"error: {faulty}/file has changed while it was read\n" in err


class TestArrays:
    def test_files_saved_by_numpy_are_good(self, tmp_path):
        np.save(tmp_path / "array.npy", np.arange(1000.0).reshape(10, 100))
        np.save(tmp_path / "scalar.npy", np.float32(3))
        np.save(tmp_path / "empty.npy", np.zeros((0, 7)))
        np.save(tmp_path / "objects.npy", np.array([{}, None]), allow_pickle=True)
        with open(tmp_path / "several.npy", "wb") as file:
            np.save(file, np.arange(7))
            np.save(file, np.arange(8))
        files = sorted(tmp_path.iterdir())
        done = nvmeio("verify", *files)
        assert bad_of(done)[0] == []
        assert done.out.splitlines() == [
            f"{sha256(path.read_bytes())}  {path}" for path in files
        ]

    @pytest.mark.parametrize("name", ["array.npy", "array"])
    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda data: data[:-1], "has 927 bytes; an array of shape (100,)"),
            (lambda data: data + b"\0", "has 929 bytes; its array ends at 928"),
            (lambda data: data[:40], "is not a .npy file"),
            (lambda data: data.replace(b"<f8", b"<f9"), "is not a .npy file"),
        ],
        ids=["short", "long", "cut", "header"],
    )
    def test_a_file_that_does_not_match_its_header_is_bad(
        self, tmp_path, name, change, words
    ):
        with open(tmp_path / name, "wb") as file:
            np.save(file, np.arange(100.0))
        data = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(change(data))
        done = nvmeio("verify", tmp_path / name)
        assert done.out == ""
        (bad,), _ = bad_of(done)
        assert str(tmp_path / name) in bad
        assert words in bad

    def test_a_file_that_does_not_match_its_suffix_is_bad(self, tmp_path):
        (tmp_path / "text.npy").write_bytes(b"text")
        (bad,), _ = bad_of(nvmeio("verify", tmp_path / "text.npy"))
        assert "is not a .npy file" in bad


class TestCommandLine:
    def test_at_least_one_file_is_required(self):
        done = nvmeio("verify")
        assert (done.status, done.out) == (2, "")
        assert re.fullmatch(r"nvmeio verify: error: there is no FILE[^\n]*\n", done.err)

    def test_a_list_excludes_other_files(self, tmp_path):
        done = nvmeio("verify", "--check", "sums", "file", cwd=tmp_path)
        assert (done.status, done.out) == (2, "")
        assert "leave out FILE" in done.err

    def test_the_help_has_examples(self):
        done = nvmeio("verify", "--help")
        assert done.status == 0
        assert "examples:\n  nvmeio verify " in done.out

    def test_progress_is_shown_in_a_terminal(self, faulty):
        data = make_file(faulty / "file", 16 * MIB)
        Faults(faulty / "file").set(read={"delay_s": 0.01})
        done = nvmeio_in_terminal(
            "verify", faulty / "file", until="file 1 of 1.*%", typed=b""
        )
        assert done.status == 0
        assert f"{sha256(data)}  {faulty}/file\n1 file, 0 bad; " in done.out

    def test_ctrl_c_ends_the_command(self, faulty):
        make_file(faulty / "file", 16 * MIB)
        Faults(faulty / "file").set(read={"delay_s": 0.05})
        done = nvmeio_in_terminal("verify", faulty / "file", until="file 1 of 1.*%")
        assert done.status == 130
        assert done.out.endswith("nvmeio verify: interrupted\n")
        assert "Traceback" not in done.out

    def test_a_list_that_cannot_be_written_is_an_error(self, tmp_path):
        (tmp_path / "file").write_bytes(b"text")
        with open("/dev/full", "wb") as full:
            done = subprocess.run(
                command("verify", "-q", tmp_path / "file"),
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
        assert done.returncode == 1
        assert re.fullmatch(
            r"nvmeio verify: error: [^\n]*No space left[^\n]*\n", done.stderr
        )
