"""A File is a file object: io's methods, a position, and use by other libraries."""

import copy
import errno
import gzip
import io
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import nvmeio
from children import WATCHDOG_S
from helpers import MIB, PAGE, left_open, pattern
from mounts import SIZES_MIN, Filler

# Smaller transfers use read(2) and write(2); from 1 MiB on they use the default handle.
SIZES = [0, 1, 5, PAGE, 100_000, MIB - 1, MIB, MIB + 1, 2 * MIB + 777]

sizes = st.sampled_from(SIZES)
positions = st.sampled_from([0, 1, 7, PAGE, PAGE + 1, 100_001, MIB, 2 * MIB + 3])
steps = st.one_of(
    st.tuples(st.just("read"), st.one_of(sizes, st.sampled_from([-1, None]))),
    st.tuples(st.just("readinto"), sizes),
    st.tuples(st.just("write"), sizes, st.integers(0, 9)),
    st.tuples(st.just("seek"), positions, st.just(0)),
    st.tuples(st.just("seek"), st.sampled_from([-PAGE, -1, 0, 3]), st.sampled_from([1, 2])),
    st.tuples(st.just("truncate"), st.one_of(positions, st.none())),
    st.tuples(st.sampled_from(["readall", "tell", "readline"])),
    st.tuples(st.just("readline"), st.sampled_from([-1, 0, 1, 100, 9000])),
    st.tuples(st.just("readlines"), st.sampled_from([0, -1, None, 1, 300])),
)


def result_of(file, step, *arguments):
    """Run a step; return its result or errno, and the position afterwards."""
    try:
        if step == "readinto":
            buffer = bytearray(b"-" * arguments[0])
            found = file.readinto(buffer), bytes(buffer)
        elif step == "write":
            found = file.write(pattern(arguments[0], seed=arguments[1]))
        else:
            found = getattr(file, step)(*arguments)
    except OSError as error:
        found = error.errno
    return found, file.tell()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(st.lists(steps, max_size=12), st.sampled_from([0, 10, 3 * MIB + 5]))
def test_a_file_behaves_like_an_unbuffered_file_of_python(folder, script, size):
    names = folder / "ours", folder / "python's"
    for name in names:
        name.write_bytes(pattern(size, seed=3))
    with nvmeio.File(names[0], "r+") as ours, open(names[1], "r+b", buffering=0) as plain:
        for step in script:
            assert result_of(ours, *step) == result_of(plain, *step), step
    assert names[0].read_bytes() == names[1].read_bytes()


@pytest.fixture
def moved(default_engine):
    """A function that returns how many bytes the default handle has moved."""

    def moved():
        stats = nvmeio.default_handle().stats()
        return sum(stats[f"bytes_{way}"] for way in ("direct", "buffered", "bounced"))

    return moved


@pytest.mark.parametrize("kind", ["bytes", "array", "structured", "memoryview"])
def test_large_transfers_go_through_the_default_handle(path, moved, kind):
    data = pattern(6 * 350_001)
    source = {
        "bytes": data,
        "array": np.frombuffer(data, ">u2"),
        "structured": np.frombuffer(data, [("a", "u1"), ("b", "<u2", 2), ("c", "u1")]),
        "memoryview": memoryview(data).cast("H"),
    }[kind]
    with nvmeio.File(path, "w") as file:
        assert file.write(source) == len(data)
        assert moved() == len(data)
        file.write(b"12345")
        assert moved() == len(data)
        file.seek(0)
        target = bytearray(len(data) + 100)
        assert file.readinto(target) == len(data) + 5
        assert target[: len(data) + 5] == data + b"12345"
        assert file.seek(1) == 1
        assert file.read(2 * MIB) == data[1 : 1 + 2 * MIB]
        assert moved() == 2 * len(data) + 5 + 2 * MIB
    assert path.read_bytes() == data + b"12345"


class TestMethods:
    def test_a_file_is_an_instance_of_raw_io_base(self, path):
        with nvmeio.File(path, "w") as file:
            assert isinstance(file, io.RawIOBase)
            assert isinstance(file, io.IOBase)
            assert not isinstance(file, io.TextIOBase)
            assert (file.isatty(), file.seekable(), file.flush()) == (False, True, None)
            assert file.name == file.path == str(path)

    def test_lines_are_read(self, path):
        text = b"a\n\nlong " + b"x" * 20_000 + b"\nlast"
        path.write_bytes(text)
        with nvmeio.File(path) as file, open(path, "rb", buffering=0) as plain:
            assert list(file) == list(plain)
            file.seek(0)
            assert next(file) == b"a\n"
            assert file.tell() == 2
            assert (file.readline(), file.readline(3), file.tell()) == (b"\n", b"lon", 6)
        with nvmeio.File(path, "w") as file:
            file.writelines([b"1\n", bytearray(b"2\n"), np.frombuffer(b"3", np.uint8)])
        assert path.read_bytes() == b"1\n2\n3"

    def test_a_file_of_reported_size_0_is_read(self):
        with nvmeio.File("/proc/version") as file, open("/proc/version", "rb") as plain:
            expected = plain.read()
            assert file.read() == expected
            file.seek(0)
            assert file.read(5 * MIB) == expected
            file.seek(0)
            assert file.readline() == expected

    def test_a_file_that_is_read_page_by_page_is_read_to_the_size(self):
        """Each read(2) of such a file of /proc returns at most a page."""
        with nvmeio.File("/proc/self/smaps") as file:
            for size in (1000, 8192, 30_000):
                file.seek(0)
                assert len(file.read(size)) == size
                file.seek(0)
                assert file.readinto(bytearray(size)) == size
            # Also the last bytes, of a read that is larger than the file.
            file.seek(0)
            assert len(file.read(4 << 20)) > 30_000
            assert file.read(1) == b""

    def test_a_huge_read_size_takes_no_memory(self, path):
        path.write_bytes(b"12345")
        with nvmeio.File(path) as file:
            assert file.read(1 << 62) == b"12345"
            assert file.read(1 << 62) == b""

    def test_fsync_covers_what_was_submitted(self, path, default_engine):
        handle = nvmeio.default_handle()
        with nvmeio.File(path, "w") as file:
            request = handle.submit_write(pattern(3 * MIB), file)
            before = handle.stats()["requests"]
            file.fsync()
            file.fsync(data_only=True)
            assert request.done()
            assert handle.stats()["requests"] == before + 2
            with pytest.raises(TypeError, match="data_only is 'no'"):
                file.fsync(data_only="no")

    def test_requests_have_offsets_of_their_own(self, path):
        with nvmeio.File(path, "w") as file:
            file.write(b"0123456789")
            file.seek(4)
            nvmeio.default_handle().write(b"ab", file, 8)
            assert (file.tell(), file.read()) == (4, b"4567ab")

    def test_the_descriptor_has_the_same_position(self, path):
        path.write_bytes(b"0123456789")
        with nvmeio.File(path, "r+") as file:
            file.seek(3)
            assert os.read(file.fileno(), 2) == b"34"
            assert (file.tell(), file.read(1)) == (5, b"5")

    def test_seek_finds_data_and_holes(self, path):
        with nvmeio.File(path, "w") as file:
            file.truncate(MIB)
            file.seek(MIB - PAGE)
            file.write(bytes(PAGE))
            assert file.seek(0, os.SEEK_HOLE) == os.lseek(file.fileno(), 0, os.SEEK_HOLE)
            assert file.seek(0, os.SEEK_DATA) == os.lseek(file.fileno(), 0, os.SEEK_DATA)


class TestRefusals:
    def test_the_mode_is_enforced(self, path):
        path.write_bytes(b"1234")
        with nvmeio.File(path) as file:
            for call in (lambda: file.write(b"x"), lambda: file.truncate(1)):
                with pytest.raises(io.UnsupportedOperation, match="not open for writing"):
                    call()
            assert (file.tell(), file.read()) == (0, b"1234")

    def test_invalid_arguments_are_refused(self, path):
        with nvmeio.File(path, "w") as file:
            file.write(b"1234")
            for call, words in {
                lambda: file.read(1.5): "size is 1.5; it must be an integer",
                lambda: file.readline("1"): "size is '1'; it must be an integer",
                lambda: file.seek(1.5): "offset is 1.5",
                lambda: file.seek(1 << 70): "offset is",
                lambda: file.seek(0, 9): "whence is 9; it must be from 0 to 4",
                lambda: file.write("text"): "bytes-like",
                lambda: file.write(None): "bytes-like",
                lambda: file.write(np.zeros((4, 4))[:, 1]): "not C-contiguous",
                lambda: file.readinto(b"1234"): "not writable",
                lambda: file.readinto(np.zeros((4, 4)).T): "not C-contiguous",
            }.items():
                with pytest.raises((TypeError, ValueError), match=words):
                    call()
            with pytest.raises(OSError, match="Invalid argument") as caught:
                file.seek(-1)
            assert (caught.value.errno, caught.value.filename) == (errno.EINVAL, str(path))
            assert file.tell() == 4


def test_a_reservation_beyond_the_free_space_takes_none_of_it(loop_mount):
    folder = loop_mount("ext4", 64 * MIB)
    with nvmeio.File(folder / "data", "w") as file:
        file.write(bytes(MIB))
        file.fsync()
        before = os.fstat(file.fileno()).st_blocks
        with pytest.raises(OSError, match="No space") as caught:
            file.preallocate(65 * MIB)
        assert (caught.value.errno, caught.value.filename) == (
            errno.ENOSPC,
            str(folder / "data"),
        )
        assert os.fstat(file.fileno()).st_blocks == before
        # What it has already counts.
        free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
        file.preallocate(MIB + free - MIB // 2)
        assert os.fstat(file.fileno()).st_blocks > before


@pytest.mark.parametrize("size", [100_000, 3 * MIB], ids=["small", "large"])
def test_a_full_disk_leaves_the_position_for_another_try(loop_mount, size):
    folder = loop_mount("ext4", SIZES_MIN["ext4"])
    with nvmeio.File(folder / "data", "w") as file:
        file.write(b"0123456789")
        file.fsync()
        filler = Filler(folder)
        # There is room for the first bytes.
        filler.shrink()
        with pytest.raises(OSError, match="No space") as caught:
            file.write(pattern(size))
        assert (caught.value.errno, caught.value.filename) == (
            errno.ENOSPC,
            str(folder / "data"),
        )
        assert file.tell() == 10
        filler.path.unlink()
        assert file.write(pattern(size)) == size
        assert file.tell() == 10 + size
    assert (folder / "data").read_bytes() == b"0123456789" + pattern(size)


class TestThreads:
    @pytest.mark.parametrize("size", [PAGE, MIB], ids=["small", "large"])
    def test_threads_share_the_position(self, path, size):
        data = np.arange(24, dtype=np.uint8).repeat(size)
        path.write_bytes(data)
        with nvmeio.File(path) as file, ThreadPoolExecutor(4) as pool:
            parts = list(pool.map(lambda _: file.read(size), range(24)))
        assert sorted(parts) == [bytes([number]) * size for number in range(24)]
        with nvmeio.File(path, "w") as file, ThreadPoolExecutor(4) as pool:
            assert list(pool.map(file.write, parts)) == [size] * 24
        found = path.read_bytes()
        assert sorted(found[at : at + size] for at in range(0, len(found), size)) == sorted(
            parts
        )

    def test_a_forked_child_does_not_wait_for_the_threads_of_its_parent(self, path):
        """A thread of the parent may hold the file's lock in a read."""
        path.write_bytes(pattern(64 * MIB))
        stop = threading.Event()
        with nvmeio.File(path) as file:
            # fork() copies descriptors first, so open everything before.
            file.tell()

            def read_on():
                while not stop.is_set():
                    file.seek(0)
                    file.read(16 * MIB)

            thread = threading.Thread(target=read_on)
            thread.start()
            context = multiprocessing.get_context("fork")
            try:
                for _ in range(5):
                    child = context.Process(target=file.tell)
                    child.start()
                    child.join(WATCHDOG_S)
                    child.kill()
                    child.join()
                    assert child.exitcode == 0
            finally:
                stop.set()
                thread.join()

    def test_a_signal_handler_in_a_read_raises_instead_of_hanging(self, path):
        path.write_bytes(pattern(MIB))
        told, reads = [], 0

        def handler(number, frame):
            try:
                file.read(1)
            except RuntimeError as error:
                told.append(str(error))

        old = signal.signal(signal.SIGALRM, handler)
        try:
            with nvmeio.File(path) as file:
                signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
                while not told and reads < 100_000:
                    file.seek(0)
                    file.read(MIB)
                    reads += 1
                signal.setitimer(signal.ITIMER_REAL, 0)
        finally:
            signal.signal(signal.SIGALRM, old)
        assert told[0].startswith("reentrant call inside <nvmeio.File")


@pytest.mark.parametrize("size", [5, 3 * MIB])
def test_a_buffer_dropped_at_exit_is_flushed(path, size):
    """As with io.FileIO, even when modules are gone and no handle can be opened."""
    script = f"""
import io, sys, nvmeio
sys.kept = io.BufferedWriter(nvmeio.File({str(path)!r}, "w"), {4 * MIB})
sys.kept.write(b"x" * {size})
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=WATCHDOG_S)
    assert path.read_bytes() == b"x" * size


def test_a_file_that_outlives_the_modules_is_closed_quietly(path):
    path.write_bytes(b"x")
    script = f"import sys, nvmeio; sys.kept = nvmeio.File({str(path)!r})"
    command = [sys.executable, "-c", script]
    run = subprocess.run(command, capture_output=True, text=True, timeout=WATCHDOG_S)
    assert (run.returncode, run.stderr) == (0, "")


def found_elsewhere(file):
    """Report a File's state in another process."""
    return file.path, file.mode, file.closed, None if file.closed else file.read()


class TestPickling:
    @pytest.mark.parametrize(
        ("mode", "again"),
        [("r", "rb"), ("r+", "rb+"), ("w", "rb+"), ("w+b", "rb+"), ("x", "rb+")],
    )
    def test_an_unpickled_file_is_opened_again_and_not_truncated(
        self, path, monkeypatch, mode, again
    ):
        monkeypatch.chdir(path.parent)
        if mode != "x":
            path.write_bytes(b"1234")
        with nvmeio.File("data", mode, direct=False) as file:
            if mode[0] in "wx":
                file.write(b"1234")
            file.seek(2)
            monkeypatch.chdir("/")
            for other in (pickle.loads(pickle.dumps(file)), copy.copy(file)):
                with other:
                    assert (other.path, other.mode) == (str(path), again)
                    assert (other.tell(), other.read(), other.direct) == (0, b"1234", False)
            assert file.tell() == 2
        assert left_open(path.parent) == []

    def test_a_closed_file_is_unpickled_closed(self, path):
        file = nvmeio.File(path, "w")
        file.close()
        path.unlink()
        for other in (pickle.loads(pickle.dumps(file)), copy.deepcopy(file)):
            assert other.closed
            assert repr(other) == f"<nvmeio.File '{path}' mode='rb+' closed>"
            with pytest.raises(ValueError, match="is closed"):
                other.read()

    @pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
    def test_a_file_is_pickled_to_another_process(self, path, method):
        path.write_bytes(b"1234")
        file, closed = nvmeio.File(path), nvmeio.File(path)
        closed.close()
        with file, multiprocessing.get_context(method).Pool(1) as pool:
            found = pool.map(found_elsewhere, [file, closed])
        assert found == [
            (str(path), "rb", False, b"1234"),
            (str(path), "rb", True, None),
        ]

    def test_unpickling_a_missing_file_is_an_error(self, path):
        with nvmeio.File(path, "w") as file:
            stored = pickle.dumps(file)
        path.unlink()
        with pytest.raises(FileNotFoundError):
            pickle.loads(stored)

    def test_a_file_without_a_path_cannot_be_pickled(self, tmp_path):
        from nvmeio._native.file import open_unnamed

        with (
            open_unnamed(str(tmp_path)) as file,
            pytest.raises(TypeError, match="cannot be pickled: it was opened without a"),
        ):
            pickle.dumps(file)


class TestOthers:
    """Libraries that take file objects take a File."""

    def test_json_and_text_use_a_file(self, path):
        value = {"text": "ä\n" * 5000, "numbers": list(range(1000))}
        with nvmeio.File(path, "w") as file:
            text = io.TextIOWrapper(file, encoding="utf-8")
            json.dump(value, text)
            assert text.detach() is file
            file.seek(0)
            assert json.load(file) == value
            file.seek(0)
            with io.TextIOWrapper(file, encoding="utf-8") as text:
                assert json.load(text) == value
                assert text.seek(5) == 5
            assert file.closed
        assert json.loads(path.read_text("utf-8")) == value

    def test_buffered_readers_and_writers_use_a_file(self, path):
        data = pattern(3 * MIB + 5)
        with io.BufferedWriter(nvmeio.File(path, "w"), 2 * MIB) as stream:
            for at in range(0, len(data), 70_001):
                stream.write(data[at : at + 70_001])
        with io.BufferedReader(nvmeio.File(path)) as stream:
            assert stream.peek(1)[:1] == data[:1]
            assert stream.read(10) + stream.read(2 * MIB) + stream.read() == data
        with io.BufferedRandom(nvmeio.File(path, "r+")) as stream:
            assert stream.read(3) == data[:3]
            stream.write(b"abc")
            assert stream.read(2) == data[6:8]
        assert path.read_bytes() == data[:3] + b"abc" + data[6:]

    @pytest.mark.parametrize("count", [10, 500_000])
    def test_numpy_uses_a_file(self, path, count):
        array, values = np.arange(count), {"a": np.arange(count), "b": np.ones(3)}
        with nvmeio.File(path, "w+") as file:
            np.save(file, array)
            np.save(file, array[::-1])
            file.seek(0)
            assert np.array_equal(np.load(file), array)
            assert np.array_equal(np.load(file), array[::-1])
        assert np.array_equal(np.load(path), array)
        with nvmeio.File(path, "w") as file:
            np.savez(file, **values)
        with nvmeio.File(path) as file, np.load(file) as found:
            assert all(np.array_equal(found[name], values[name]) for name in values)

    @pytest.mark.parametrize("count", [10, 500_000])
    @pytest.mark.parametrize("layout", ["zip", "legacy"])
    def test_torch_uses_a_file(self, path, count, layout):
        torch = pytest.importorskip("torch")
        options = {"_use_new_zipfile_serialization": layout == "zip"}
        state = {"x": torch.arange(count), "y": torch.ones(7), "epoch": 3}
        with nvmeio.File(path, "w") as file:
            torch.save(state, file, **options)
            file.seek(0)
            for weights_only in (True, False):
                file.seek(0)
                found = torch.load(file, weights_only=weights_only)
                assert torch.equal(found["x"], state["x"])
                assert torch.equal(found["y"], state["y"])
                assert found["epoch"] == 3
        assert torch.equal(torch.load(path)["x"], state["x"])

    def test_archives_use_a_file(self, path):
        data = pattern(2 * MIB)
        with nvmeio.File(path, "w") as file, zipfile.ZipFile(file, "w") as archive:
            archive.writestr("large", data)
            archive.writestr("small", b"1234", zipfile.ZIP_DEFLATED)
        with nvmeio.File(path, "r+") as file, zipfile.ZipFile(file, "a") as archive:
            archive.writestr("later", b"5678")
        with nvmeio.File(path) as file, zipfile.ZipFile(file) as archive:
            assert archive.testzip() is None
            assert archive.read("large") == data
            assert archive.read("small") + archive.read("later") == b"12345678"
        with (
            nvmeio.File(path, "w") as file,
            tarfile.open(fileobj=file, mode="w:gz") as archive,
        ):
            entry = tarfile.TarInfo("large")
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
        with nvmeio.File(path) as file, tarfile.open(fileobj=file) as archive:
            assert archive.extractfile("large").read() == data
        with nvmeio.File(path, "w") as file, gzip.GzipFile("", "wb", 1, file) as packed:
            packed.write(data)
        with nvmeio.File(path) as file, gzip.GzipFile(fileobj=file) as packed:
            assert packed.read() == data

    def test_shutil_copies_a_file(self, path):
        data, copied = pattern(3 * MIB + 1), path.with_name("copy")
        path.write_bytes(data)
        with nvmeio.File(path) as source, nvmeio.File(copied, "w") as target:
            shutil.copyfileobj(source, target)
        assert copied.read_bytes() == data
        with nvmeio.File(path) as source, open(copied, "wb") as target:
            shutil.copyfileobj(source, target, 2 * MIB)
        assert copied.read_bytes() == data
        with nvmeio.File(path) as source, open(copied, "wb") as target:
            source.seek(5)
            assert os.sendfile(target.fileno(), source.fileno(), None, 7) == 7
            assert source.tell() == 12
        assert copied.read_bytes() == data[5:12]
