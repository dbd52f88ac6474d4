"""Whole files in one call: read_file, read_into, write_file, and DeepSpeed's functions."""

import array
import errno
import mmap
import os
import resource
import stat

import numpy as np
import pytest

import nvmeio
from helpers import BLOCK, MIB, PAGE, left_open, limit, pattern
from nvmeio._files import paths

SIZES = [0, 1, PAGE - 1, PAGE, PAGE + 1, MIB, MIB + 1, 5 * MIB + 777]

# block_size, queue_depth, single_submit, overlap_events, validate
SETTINGS = [(BLOCK, 4, False, False, False), (PAGE, 32, True, True, True)]


@pytest.fixture(autouse=True)
def moved(engine, monkeypatch):
    """Run with every engine; return the bytes that the default one moved."""
    monkeypatch.setenv("NVMEIO_ENGINE", engine)
    # So that each test has a default handle of its own, set by the environment.
    nvmeio.default_handle().close()

    def moved():
        stats = nvmeio.default_handle().stats()
        return sum(stats[f"bytes_{way}"] for way in ("direct", "buffered", "bounced"))

    with nvmeio.default_handle() as handle:
        yield moved
    assert handle.stats()["engine"] == engine


@pytest.mark.parametrize("size", SIZES)
def test_a_file_is_read_as_a_whole(path, moved, size):
    path.write_bytes(pattern(size))
    found = nvmeio.read_file(path)
    assert (found.dtype, found.shape) == (np.uint8, (size,))
    assert found.flags.writeable
    assert found.tobytes() == pattern(size)
    assert moved() == size
    assert left_open(path.parent) == []


def test_read_memory_lives_as_long_as_any_view_of_it(path):
    path.write_bytes(pattern(8000))
    view = nvmeio.read_file(path).view("<f4")[10:]
    assert view.tobytes() == pattern(8000)[40:]


@pytest.mark.parametrize("name", ["/proc/version", "/proc/self/maps"])
def test_a_file_of_reported_size_0_is_read_to_its_end(name):
    assert os.stat(name).st_size == 0
    found = nvmeio.read_file(name)
    assert found.flags.writeable
    assert found.dtype == np.uint8
    text = found.tobytes()
    assert text.endswith(b"\n")
    with open(name, "rb") as file:
        assert text[:20] == file.read()[:20]


def test_a_file_of_sysfs_is_read_to_its_end():
    """It reports the size of a page."""
    name = "/sys/devices/system/cpu/online"
    with open(name, "rb") as file:
        text = file.read()
    assert len(text) < os.stat(name).st_size
    assert nvmeio.read_file(name).tobytes() == text
    assert nvmeio.read_file(name, 1).tobytes() == text[1:]
    with pytest.raises(OSError, match=f"is beyond the end of the file, {len(text)}"):
        nvmeio.read_file(name, 0, os.stat(name).st_size)


def test_an_error_of_a_file_of_reported_size_0_has_its_path(monkeypatch):
    """/proc/self/mem cannot be read at address 0."""
    with pytest.raises(OSError, match="Input/output error") as caught:
        nvmeio.read_file("/proc/self/mem")
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, "/proc/self/mem")


class TestPartOfAFile:
    """read_file with an offset, a size and a dtype."""

    @pytest.mark.parametrize(
        ("offset", "size"),
        [(0, None), (0, 0), (3, 5), (PAGE, PAGE), (MIB - 1, MIB + 2), (2 * MIB, None)],
    )
    def test_a_part_has_the_files_bytes(self, path, moved, offset, size):
        data = pattern(2 * MIB + 1)
        path.write_bytes(data)
        expected = data[offset:] if size is None else data[offset : offset + size]
        found = nvmeio.read_file(path, offset, size)
        assert found.tobytes() == expected
        assert (found.dtype, found.flags.writeable) == (np.uint8, True)
        assert moved() == len(expected)

    def test_a_part_at_the_end_is_empty(self, path):
        path.write_bytes(b"12345678")
        for options in ({}, {"size": 0}, {"dtype": "f8"}):
            assert nvmeio.read_file(path, 8, **options).shape == (0,)

    @pytest.mark.parametrize(
        "dtype", ["<i2", ">f4", "M8[s]", [("a", "u1"), ("b", "<i4", 2)]], ids=str
    )
    def test_a_part_can_have_numpys_dtypes(self, path, dtype):
        data = pattern(8 + 18 * 40)
        path.write_bytes(data)
        expected = np.frombuffer(data, dtype, 18 * 8 // np.dtype(dtype).itemsize, 8)
        found = nvmeio.read_file(path, 8, 18 * 8, dtype)
        assert found.dtype == expected.dtype
        assert found.tobytes() == expected.tobytes()

    @pytest.mark.parametrize("name", ["float32", "bfloat16", "bool", "float8_e4m3fn"])
    def test_a_part_can_have_torchs_dtypes(self, path, name):
        torch = pytest.importorskip("torch")
        dtype = getattr(torch, name)
        data = bytes([0, 1] * 40)
        path.write_bytes(data)
        found = nvmeio.read_file(path, offset=16, size=32, dtype=dtype)
        assert (found.dtype, found.shape) == (dtype, (32 // dtype.itemsize,))
        assert found.view(torch.uint8).numpy().tobytes() == data[16:48]
        assert nvmeio.read_file(path, 80, dtype=dtype).shape == (0,)

    @pytest.mark.parametrize(("offset", "size"), [(9, None), (9, 0), (5, 4), (0, 1 << 50)])
    def test_a_part_beyond_the_end_is_an_error(self, path, offset, size):
        path.write_bytes(b"12345678")
        wanted = f"offset {offset}" + (f" plus size {size}" if size else "")
        words = f"{wanted} is beyond the end of the file, 8"
        with pytest.raises(OSError, match=words) as caught:
            nvmeio.read_file(path, offset, size)
        assert (caught.value.errno, caught.value.filename) == (errno.ENODATA, str(path))

    def test_a_part_must_have_whole_elements(self, path):
        path.write_bytes(bytes(10))
        with pytest.raises(ValueError, match="size is 6 bytes; it must be a multiple of 4"):
            nvmeio.read_file(path, 0, 6, "f4")
        with pytest.raises(ValueError, match="the rest of the file is 9 bytes"):
            nvmeio.read_file(path, 1, dtype="u2")

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"offset": -1}, "offset is -1"),
            ({"offset": 1.5}, "offset is 1.5"),
            ({"size": -1}, "size is -1"),
            ({"size": True}, "size is True"),
            ({"size": 1 << 70}, "size is"),
            ({"dtype": "O"}, "Python objects"),
            ({"dtype": "V0"}, "have no bytes"),
            ({"length": 8}, "length"),
        ],
        ids=str,
    )
    def test_invalid_parts_are_refused(self, path, options, words):
        path.write_bytes(bytes(10))
        with pytest.raises((TypeError, ValueError), match=words):
            nvmeio.read_file(path, **options)

    def test_a_part_of_a_file_of_reported_size_0_is_read(self):
        whole = nvmeio.read_file("/proc/version")
        assert nvmeio.read_file("/proc/version", 3, 4).tobytes() == whole.tobytes()[3:7]
        with pytest.raises(OSError, match="beyond the end"):
            nvmeio.read_file("/proc/version", 3, 1 << 20)


@pytest.mark.parametrize("size", SIZES)
def test_a_file_is_made_of_the_buffer(path, moved, size):
    assert nvmeio.write_file(pattern(size), path) == size
    assert path.read_bytes() == pattern(size)
    assert moved() == size


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("before", [0, 10, MIB, 3 * MIB + 5])
def test_an_existing_file_becomes_exactly_the_buffer(path, before, atomic):
    path.write_bytes(bytes(before))
    path.chmod(0o640)
    with path.open("rb") as old:
        assert nvmeio.write_file(pattern(MIB), path, atomic=atomic) == MIB
        # An open old file keeps its contents if the write replaces it by another one.
        assert old.read() == (bytes(before) if atomic else pattern(MIB))
    assert path.read_bytes() == pattern(MIB)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize(
    ("options", "requests"),
    [
        ({}, 2),
        ({"sync": True}, 2),
        ({"atomic": False}, 1),
        ({"atomic": False, "sync": True}, 2),
    ],
)
def test_the_bytes_of_an_atomic_or_durable_file_are_synced(path, options, requests):
    """The second request is the fsync."""
    assert nvmeio.write_file(pattern(BLOCK), os.fsencode(path), **options) == BLOCK
    assert path.read_bytes() == pattern(BLOCK)
    assert nvmeio.default_handle().stats()["requests"] == requests


def test_part_of_a_file_is_read_into_a_buffer(path, moved):
    path.write_bytes(pattern(3 * BLOCK))
    target = np.zeros((10, 2 * BLOCK // 10 // 4), np.float32)[:, ::2]
    nbytes = nvmeio.read_into(target, path, 77)
    assert nbytes == target.nbytes
    assert target.tobytes() == pattern(3 * BLOCK)[77 : 77 + nbytes]
    whole = bytearray(3 * BLOCK)
    assert nvmeio.read_into(whole, file=path) == len(whole)
    assert whole == pattern(3 * BLOCK)
    assert moved() == nbytes + len(whole)


def test_a_buffer_that_is_larger_than_the_file_is_not_filled(path):
    path.write_bytes(pattern(10))
    with pytest.raises(OSError, match="wanted 11 bytes at offset 0, got 10") as caught:
        nvmeio.read_into(bytearray(11), path)
    assert (caught.value.errno, caught.value.filename) == (errno.ENODATA, str(path))


@pytest.mark.parametrize(
    "call",
    [
        lambda path: nvmeio.read_file(path),
        lambda path: nvmeio.read_into(bytearray(1), path),
        lambda path: nvmeio.write_file(b"1", path / "below"),
        lambda path: nvmeio.aio_read(bytearray(1), path, *SETTINGS[0]),
        lambda path: nvmeio.aio_write(b"1", path / "below", *SETTINGS[0]),
    ],
)
def test_a_missing_file_is_named(path, call):
    with pytest.raises(FileNotFoundError, match=str(path)):
        call(path)


@pytest.mark.all_combinations
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("size", SIZES)
def test_the_functions_of_the_contract_move_whole_files(path, size, settings):
    """Every size is moved completely; DeepSpeed's op drops some bytes silently."""
    source, target = np.frombuffer(pattern(size), np.uint8), np.zeros(size, np.uint8)
    assert nvmeio.aio_write(source, path, *settings) == 0
    assert path.read_bytes() == pattern(size)
    assert nvmeio.aio_read(target, path, *settings) == 0
    assert target.tobytes() == pattern(size)


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_shorter_write_leaves_no_tail(path, settings):
    """So the next aio_read finds exactly the buffer."""
    nvmeio.aio_write(bytes(3 * BLOCK + 5), path, *settings)
    nvmeio.aio_write(pattern(BLOCK + 1), path, *settings)
    assert path.read_bytes() == pattern(BLOCK + 1)
    target = bytearray(BLOCK + 1)
    assert nvmeio.aio_read(target, path, *settings) == 0
    assert target == pattern(BLOCK + 1)


def test_a_device_keeps_its_size(loop_device):
    size = 1 << 20
    device, expected = loop_device(size), pattern(5000)
    assert nvmeio.aio_write(expected, device, BLOCK, 4, False, True, True) == 0
    assert nvmeio.write_file(expected[:4096], device, sync=True) == 4096
    target = bytearray(size)
    assert nvmeio.aio_read(target, device, BLOCK, 4, False, True, True) == 0
    assert target == expected + bytes(size - 5000)


def test_a_file_is_truncated_only_after_the_write(path):
    """A failed write leaves the bytes after it."""
    path.write_bytes(bytes(4 * BLOCK))
    with (
        limit(resource.RLIMIT_FSIZE, BLOCK),
        pytest.raises(OSError, match="data") as caught,
    ):
        nvmeio.aio_write(pattern(2 * BLOCK), path, *SETTINGS[0])
    assert caught.value.errno == errno.EFBIG
    assert path.stat().st_size == 4 * BLOCK
    assert path.read_bytes()[2 * BLOCK :] == bytes(2 * BLOCK)


@pytest.mark.parametrize("size", [BLOCK + 5, 3 * MIB])
def test_a_new_file_is_not_left_longer_than_what_was_written(path, size):
    """A failure is an error, and leaves no file of the full size."""
    with (
        limit(resource.RLIMIT_FSIZE, BLOCK),
        pytest.raises(OSError, match="data") as caught,
    ):
        nvmeio.write_file(pattern(size), path, atomic=False)
    assert caught.value.errno == errno.EFBIG
    left = path.read_bytes()
    assert len(left) <= BLOCK
    assert left == pattern(size)[: len(left)]


@pytest.mark.parametrize("size", [9, 11])
def test_a_read_of_another_size_is_refused(path, size):
    path.write_bytes(bytes(10))
    words = f"the buffer has {size} bytes and the file 10; aio_read.. reads a whole file"
    with pytest.raises(OSError, match=words) as caught:
        nvmeio.aio_read(bytearray(size), path, *SETTINGS[0])
    assert (caught.value.errno, caught.value.filename) == (errno.EINVAL, str(path))


@pytest.mark.parametrize(
    "source",
    [
        array.array("d", [1.5, 2.5]),
        memoryview(pattern(100))[::2],
        np.arange(24.0).reshape(2, 3, 4).T,
        np.float64(0.5),
        np.array(7),
    ],
    ids=["array.array", "memoryview", "transposed", "numpy scalar", "0-d"],
)
def test_any_buffer_has_its_bytes_in_c_order(path, source):
    expected = source.tobytes()
    path.write_bytes(bytes(1000))
    assert nvmeio.write_file(source, path) == len(expected)
    assert path.read_bytes() == expected
    assert nvmeio.aio_write(source, path, *SETTINGS[1]) == 0
    assert path.read_bytes() == expected


def test_a_mapping_is_filled(path):
    path.write_bytes(pattern(PAGE))
    with mmap.mmap(-1, PAGE) as mapping:
        assert nvmeio.aio_read(mapping, path, *SETTINGS[1]) == 0
        assert mapping[:] == pattern(PAGE)


class TestSync:
    """sync=True makes the name durable too, by syncing its folder."""

    @pytest.fixture
    def synced(self, monkeypatch):
        """Record the folders that Python syncs, in order."""
        found = []
        fsync = os.fsync

        def record(descriptor):
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
            fsync(descriptor)

        monkeypatch.setattr(os, "fsync", record)
        return found

    @pytest.mark.parametrize(
        "kind", [str, os.fsencode, lambda path: path], ids=["text", "bytes", "object"]
    )
    def test_the_folder_of_the_file_is_synced(self, path, synced, kind):
        assert nvmeio.write_file(b"1234", kind(path), sync=True) == 4
        assert synced == [os.path.realpath(path.parent)]
        assert nvmeio.write_file(b"1234", path) == 4
        assert len(synced) == 1
        assert left_open(path.parent) == []

    def test_a_bare_name_is_in_the_current_folder(self, path, synced, monkeypatch):
        monkeypatch.chdir(path.parent)
        nvmeio.write_file(b"1234", "data", sync=True)
        assert synced == [os.path.realpath(path.parent)]

    def test_dots_go_up_from_the_target_of_a_link(self, folder, synced):
        (folder / "far" / "below").mkdir(parents=True)
        (folder / "link").symlink_to(folder / "far" / "below")
        nvmeio.write_file(b"1234", f"{folder}/link/../data", sync=True)
        assert (folder / "far" / "data").read_bytes() == b"1234"
        assert synced == [os.path.realpath(folder / "far")]

    def test_for_a_link_the_folder_of_its_target_is_synced(self, folder, synced):
        (folder / "far").mkdir()
        (folder / "link").symlink_to(folder / "far" / "data")
        nvmeio.write_file(b"1234", folder / "link", sync=True)
        assert (folder / "far" / "data").read_bytes() == b"1234"
        assert synced == [os.path.realpath(folder / "far")]

    def test_a_folder_that_cannot_be_read_is_refused_before_the_write(
        self, path, monkeypatch
    ):
        path.write_bytes(b"old")

        def refuse(folder, flags):
            assert folder == os.path.realpath(path.parent)
            raise PermissionError(errno.EACCES, "Permission denied", folder)

        with monkeypatch.context() as patched:
            patched.setattr(paths, "opened", refuse)
            with pytest.raises(PermissionError, match=r"its folder .*, to be") as caught:
                nvmeio.write_file(b"1234", path, sync=True)
        assert caught.value.filename == str(path)
        assert path.read_bytes() == b"old"
        assert nvmeio.write_file(b"1234", path) == 4

    @pytest.mark.parametrize("sync", [False, True])
    def test_a_missing_folder_is_an_error_with_the_path(self, folder, sync):
        with pytest.raises(FileNotFoundError) as caught:
            nvmeio.write_file(b"1234", folder / "missing" / "data", sync=sync)
        assert caught.value.filename == str(folder / "missing" / "data")


@pytest.mark.parametrize("file", [None, 5, 1.5], ids=repr)
def test_an_invalid_path_is_refused(file):
    words = "path is .*; it must be a str, bytes or os.PathLike"
    for call in (
        lambda: nvmeio.read_file(file),
        lambda: nvmeio.write_file(b"1234", file),
        lambda: nvmeio.aio_write(b"1234", file, *SETTINGS[0]),
    ):
        with pytest.raises(TypeError, match=words):
            call()


def test_swapped_buffer_and_path_are_reported(path):
    path.write_bytes(b"1234")
    words = "buffer is the path .*: are the two arguments swapped?"
    for call in (
        lambda: nvmeio.write_file(str(path), bytes(path)),
        lambda: nvmeio.read_into(path, bytearray(4)),
        lambda: nvmeio.aio_write(path, bytes(path), *SETTINGS[0]),
        lambda: nvmeio.aio_read(str(path), path, *SETTINGS[0]),
    ):
        with pytest.raises(TypeError, match=words):
            call()
    assert path.read_bytes() == b"1234"


BAD = {"object": object(), "array of objects": np.array([None]), "text": "text"}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_a_refused_buffer_leaves_the_file_unchanged(path, bad):
    path.write_bytes(b"1234")
    with pytest.raises(TypeError):
        nvmeio.write_file(bad, path)
    with pytest.raises(TypeError):
        nvmeio.aio_write(bad, path, *SETTINGS[0])
    assert path.read_bytes() == b"1234"
    path.unlink()
    with pytest.raises(TypeError):
        nvmeio.write_file(bad, path)
    with pytest.raises(TypeError):
        nvmeio.aio_write(bad, path, *SETTINGS[0])
    assert not path.exists()


@pytest.mark.parametrize(
    "settings", [(0, 4, False, False, False), (PAGE, 0, False, False, False)]
)
def test_settings_out_of_range_change_no_file(path, settings):
    with pytest.raises(ValueError, match="is 0; it must be from 1 to"):
        nvmeio.aio_write(b"1234", path, *settings)
    assert not path.exists()


def test_nothing_is_printed(path, capfd):
    """DeepSpeed's op prints timings on every call."""
    nvmeio.aio_write(b"1234", path, *SETTINGS[0])
    nvmeio.aio_read(bytearray(4), path, *SETTINGS[0])
    nvmeio.write_file(nvmeio.read_file(path), path, sync=True)
    assert capfd.readouterr() == ("", "")
