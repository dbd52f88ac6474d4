"""A File opens regular files and block devices, and refuses everything else clearly."""

import asyncio
import codecs
import errno
import fcntl
import gzip
import importlib
import io
import itertools
import os
import socket
import tarfile
import tempfile
from collections import Counter

import numpy as np
import pytest

import nvmeio
import nvmeio.aio
from helpers import (
    BLOCK,
    PAGE,
    SLOW,
    cool,
    descriptors_below,
    left_open,
    pattern,
    plugged,
    routes,
)
from nvmeio.safetensors.numpy import load_file, save_file


def refused(call, *args, **options):
    """Return errno and path of a call's OSError."""
    with pytest.raises(OSError, match=r"^\[Errno") as caught:
        call(*args, **options)
    return caught.value.errno, caught.value.filename


class TestModes:
    def test_r_reads_an_existing_file(self, handle, path):
        path.write_bytes(b"12345678")
        with nvmeio.File(path) as file:
            assert (file.mode, file.size) == ("rb", 8)
            target = bytearray(8)
            handle.read(target, file)
            assert target == b"12345678"
            assert refused(handle.write, b"1", file) == (errno.EBADF, str(path))
        assert routes(handle).total() == 8

    def test_r_plus_writes_without_truncating(self, handle, path):
        path.write_bytes(b"12345678")
        with nvmeio.File(path, "r+") as file:
            handle.write(b"abc", file)
            target = bytearray(8)
            handle.read(target, file)
        assert target == b"abc45678"
        assert routes(handle).total() == 11

    @pytest.mark.parametrize("mode", ["r", "r+"])
    def test_r_makes_no_file(self, path, mode):
        assert refused(nvmeio.File, path, mode) == (errno.ENOENT, str(path))
        assert not path.exists()

    def test_w_truncates_and_can_be_read_too(self, handle, path):
        path.write_bytes(bytes(100))
        with nvmeio.File(path, "w") as file:
            assert file.size == path.stat().st_size == 0
            handle.write(pattern(BLOCK + 1), file)
            target = bytearray(BLOCK + 1)
            handle.read(target, file)
            assert target == pattern(BLOCK + 1)
            assert file.size == BLOCK + 1
        assert routes(handle).total() == 2 * BLOCK + 2

    def test_x_makes_a_file_or_fails(self, handle, path):
        with nvmeio.File(path, "x") as file:
            handle.write(b"1234", file)
        assert refused(nvmeio.File, path, "x") == (errno.EEXIST, str(path))
        assert path.read_bytes() == b"1234"
        assert routes(handle).total() == 4

    def test_another_mode_is_refused(self, path):
        for mode, words in {
            "a": "to append, open it with 'r[+]' and seek to the end",
            "rt": "for text wrap the File in io.TextIOWrapper",
            "rw": "it must be one of r, r[+], w, w[+], x, x[+], each with or without b",
            "rr": "it must be one of",
            "r++": "it must be one of",
            "b": "it must be one of",
            "": "mode is ''",
        }.items():
            with pytest.raises(ValueError, match=words):
                nvmeio.File(path, mode)
        with pytest.raises(ValueError, match="mode is of type list; it must be one of"):
            nvmeio.File(path, ["w"])
        assert not path.exists()

    @pytest.mark.parametrize("plus", ["", "+"])
    @pytest.mark.parametrize("letter", ["r", "w", "x"])
    def test_a_mode_may_have_a_b(self, path, letter, plus):
        for letters in itertools.permutations([letter, "b", *plus]):
            for name in (path, path.with_name("other")):
                name.write_bytes(b"1234") if letter == "r" else name.unlink(missing_ok=True)
            with nvmeio.File(path, "".join(letters)) as file:
                with io.FileIO(path.with_name("other"), letter + plus) as other:
                    assert file.mode == other.mode
                assert (file.readable(), file.seekable()) == (True, True)
                assert file.writable() == (letter != "r" or bool(plus))


class TestProperties:
    def test_size_is_current(self, path):
        with nvmeio.File(path, "w") as file:
            for size in (0, 1, 5 * PAGE + 3):
                os.truncate(path, size)
                assert file.size == size

    def test_truncate_changes_the_size(self, path):
        path.write_bytes(b"12345678")
        with nvmeio.File(path, "r+") as file:
            file.truncate(3)
            assert path.read_bytes() == b"123"
            file.truncate(5)
            assert path.read_bytes() == b"123\0\0"
            file.truncate(np.int64(2))
            assert path.read_bytes() == b"12"
        with nvmeio.File(path) as file:
            assert refused(file.truncate, 0) == (errno.EBADF, str(path))
            with pytest.raises(io.UnsupportedOperation, match="not open for writing"):
                file.truncate(0)
        assert path.read_bytes() == b"12"

    def test_preallocate_allocates_and_shortens_nothing(self, path):
        path.write_bytes(b"1234")
        with nvmeio.File(path, "r+") as file:
            file.preallocate(2 * BLOCK)
            assert path.stat().st_blocks * 512 >= 2 * BLOCK
            file.preallocate(3)
            file.preallocate(0)
            assert path.read_bytes() == b"1234" + bytes(2 * BLOCK - 4)
        words = "not open for writing"
        with nvmeio.File(path) as file, pytest.raises(OSError, match=words) as caught:
            file.preallocate(9)
        assert caught.type is io.UnsupportedOperation
        assert path.stat().st_size == 2 * BLOCK

    @pytest.mark.parametrize("size", [-1, 1 << 63, 1 << 70])
    def test_a_size_that_no_file_has_is_refused(self, path, size):
        path.write_bytes(b"12345678")
        words = rf"size is {size}; it must be from 0 to 2\*\*63 - 1"
        with nvmeio.File(path, "r+") as file, pytest.raises(ValueError, match=words):
            file.truncate(size)
        assert path.read_bytes() == b"12345678"

    @pytest.mark.parametrize("size", [5.9, True, "5"])
    def test_a_size_is_an_integer(self, path, size):
        path.write_bytes(b"12345678")
        words = f"size is {size!r}; it must be an integer"
        with nvmeio.File(path, "r+") as file, pytest.raises(TypeError, match=words):
            file.truncate(size)
        assert path.read_bytes() == b"12345678"

    def test_alignment_is_a_power_of_two_and_1_without_o_direct(self, path):
        path.write_bytes(b"")
        with nvmeio.File(path) as file:
            assert file.alignment.bit_count() == 1
            assert (file.alignment > 1) == file.direct
        with nvmeio.File(path, direct=False) as file:
            assert (file.alignment, file.direct) == (1, False)

    def test_direct_decides_the_route(self, handle, path):
        path.write_bytes(bytes(BLOCK))
        cool(path)
        memory = nvmeio.empty(BLOCK, np.uint8)
        with nvmeio.File(path) as file, nvmeio.File(path, direct=False) as buffered:
            handle.submit_read(memory, file).wait()
            handle.submit_read(memory, buffered).wait()
            expected = Counter(buffered=BLOCK)
            expected["direct" if file.direct else "buffered"] += BLOCK
        assert routes(handle) == expected

    def test_demanding_o_direct_without_support_fails_with_the_path(self):
        found = refused(nvmeio.File, "/proc/version", direct=True)
        assert found == (errno.EINVAL, "/proc/version")
        with pytest.raises(OSError, match="direct=True, and the file or its file system"):
            nvmeio.File("/proc/version", direct=True)
        with nvmeio.File("/proc/version") as file:
            assert (file.direct, file.alignment) == (False, 1)

    def test_another_value_of_direct_is_refused(self, path):
        with pytest.raises(ValueError, match="direct is 'no'; it must be 'auto', True or"):
            nvmeio.File(path, "w", direct="no")
        for odd in (None, np.zeros(2), ["auto"]):
            with pytest.raises(
                TypeError, match=r"direct is .*; it must be 'auto', True or"
            ):
                nvmeio.File(path, "w", direct=odd)
        assert not path.exists()

    @pytest.mark.parametrize("no", [False, np.False_, 0], ids=repr)
    def test_direct_is_any_boolean(self, path, no):
        path.write_bytes(b"")
        with nvmeio.File(path, direct=no) as file:
            assert not file.direct

    @pytest.mark.parametrize("name", ["path", "mode", "size"])
    def test_properties_cannot_be_set(self, path, name):
        with nvmeio.File(path, "w") as file, pytest.raises(AttributeError):
            setattr(file, name, getattr(file, name))

    def test_the_descriptor_is_the_buffered_one_and_not_inherited(self, path):
        with nvmeio.File(path, "w") as file:
            flags = fcntl.fcntl(file.fileno(), fcntl.F_GETFL)
            assert flags & (os.O_DIRECT | os.O_NONBLOCK | os.O_APPEND) == 0
            assert not os.get_inheritable(file.fileno())
            assert os.path.sameopenfile(file.fileno(), file.fileno())
            assert os.fstat(file.fileno()).st_ino == path.stat().st_ino

    def test_repr_shows_path_mode_and_whether_it_is_closed(self, path):
        file = nvmeio.File(str(path), "w")
        assert repr(file) == f"<nvmeio.File '{path}' mode='wb'>"
        file.close()
        assert repr(file) == f"<nvmeio.File '{path}' mode='wb' closed>"


class TestClosing:
    def test_a_closed_file_refuses_every_use(self, handle, path):
        with nvmeio.File(path, "w") as file:
            assert not file.closed
        assert file.closed
        assert left_open(path.parent) == []
        file.close()
        for use in (
            *(file.read, file.readall, file.readline, file.readlines, file.tell),
            *(file.flush, file.fsync, file.isatty, file.readable, file.writable),
            *(file.seekable, file.truncate, file.__iter__, file.__next__, file.__enter__),
            file.fileno,
            lambda: file.writelines([]),
            lambda: file.readinto(bytearray(4)),
            lambda: file.write(b""),
            lambda: file.seek(0),
            lambda: file.preallocate(0),
            lambda: file.size,
            lambda: file.alignment,
            lambda: handle.read(bytearray(1), file),
            lambda: handle.fsync(file),
        ):
            with pytest.raises(ValueError, match=f"the file '{path}' is closed"):
                use()
        assert handle.pending == 0

    def test_requests_in_flight_keep_the_file_open(self, open_handle, folder):
        handle = open_handle(**SLOW)
        (folder / "data").write_bytes(b"12345678")
        target = bytearray(8)
        with plugged(handle, folder):
            file = nvmeio.File(folder / "data")
            request = handle.submit_read(target, file)
            file.close()
            assert str(folder / "data") in descriptors_below(folder)
            assert not request.done()
        assert request.wait() == 8
        assert target == b"12345678"
        handle.close()
        assert left_open(folder) == []

    def test_dropping_a_file_closes_it(self, path):
        file = nvmeio.File(path, "w")
        assert descriptors_below(path.parent) == [str(path)]
        file.fileno()
        assert descriptors_below(path.parent) == [str(path)] * (2 if file.direct else 1)
        del file
        assert left_open(path.parent) == []

    def test_a_failure_to_open_leaves_nothing_open(self, folder):
        for target in (folder, folder / "missing"):
            refused(nvmeio.File, target)
        os.mkfifo(folder / "fifo")
        refused(nvmeio.File, folder / "fifo")
        assert left_open(folder) == []


class TestPaths:
    @pytest.mark.parametrize(
        "kind", [str, os.fsencode, lambda path: path], ids=["text", "bytes", "object"]
    )
    def test_a_path_is_text_bytes_or_a_path_object(self, handle, path, kind):
        handle.write(b"1234", kind(path))
        target = bytearray(4)
        with nvmeio.File(kind(path)) as file:
            handle.read(target, file)
        assert target == b"1234"
        assert refused(nvmeio.File, kind(path), "x")[1] == os.fspath(kind(path))

    def test_a_name_need_not_be_text(self, handle, folder):
        name = os.fsencode(folder) + b"/\xff\xfe"
        handle.write(b"1234", name)
        handle.write(b"a", os.fsdecode(name))
        with open(name, "rb") as file:
            assert file.read() == b"a234"
        assert routes(handle).total() == 5

    # open(2) would use only the part before a null character.
    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("data\0more", "null"),
            (b"data\0more", "null"),
            ("data\ud800", r"has the character '\\ud800', which the encoding of file"),
        ],
        ids=["null", "null in bytes", "half of a pair of surrogates"],
    )
    def test_a_path_that_the_system_cannot_have_is_refused(
        self, handle, folder, monkeypatch, name, words
    ):
        monkeypatch.chdir(folder)
        array = np.zeros(3)
        for call in (
            lambda: nvmeio.File(name, "w"),
            lambda: handle.write(array, name),
            lambda: handle.submit_write(array, name),
            lambda: handle.write_many([(array, name, 0)]),
            lambda: handle.scatter(name, [0], 8, array),
            lambda: nvmeio.write_file(array, name, atomic=False),
            lambda: nvmeio.write_file(array, name),
            lambda: nvmeio.read_file(name),
            lambda: nvmeio.save(name, array),
            lambda: nvmeio.load(name),
            lambda: nvmeio.ArrayFile(name),
            lambda: nvmeio.ArrayFile.create(name, (3,), float),
            lambda: nvmeio.Handle.from_profile(name),
            lambda: save_file({"a": array}, name),
            lambda: load_file(name),
            lambda: asyncio.run(nvmeio.aio.write_file(array, name)),
        ):
            with pytest.raises(ValueError, match=words):
                call()
        assert os.listdir(folder) == []

    @pytest.mark.parametrize("file", [None, 1.5, ["data"]], ids=repr)
    def test_an_invalid_path_is_refused(self, handle, file):
        with pytest.raises(
            TypeError, match=r"path is .*; it must be a str, bytes or os\.Path"
        ):
            nvmeio.File(file)
        with pytest.raises(
            TypeError, match=r"file is .*; it must be a path, a descriptor, a F"
        ):
            handle.read(bytearray(1), file)

    @pytest.mark.parametrize("kind", [str, lambda path: path], ids=["str", "Path"])
    def test_swapped_buffer_and_path_are_reported(self, handle, path, kind):
        words = "buffer is the path .*: are the two arguments swapped?"
        for call in (handle.write, handle.submit_read):
            with pytest.raises(TypeError, match=words) as caught:
                call(kind(path), bytearray(8))
            assert repr(str(path)) in str(caught.value)
        assert not path.exists()


def test_a_directory_is_refused(handle, folder):
    assert refused(nvmeio.File, folder) == (errno.EISDIR, str(folder))
    assert refused(nvmeio.File, folder, "w") == (errno.EISDIR, str(folder))
    assert refused(handle.read, bytearray(1), folder) == (errno.EISDIR, str(folder))
    assert refused(handle.write, b"1", folder) == (errno.EISDIR, str(folder))
    descriptor = os.open(folder, os.O_RDONLY)
    assert refused(handle.read, bytearray(1), descriptor) == (errno.EISDIR, str(folder))
    os.close(descriptor)


def test_a_fifo_is_refused_and_not_waited_for(handle, path):
    os.mkfifo(path)
    for mode in ("r", "r+", "w"):
        assert refused(nvmeio.File, path, mode) == (errno.EINVAL, str(path))
    assert refused(handle.read, bytearray(1), path) == (errno.EINVAL, str(path))
    assert refused(handle.write, b"1", path) == (errno.EINVAL, str(path))
    with pytest.raises(OSError, match="it is a pipe; only regular files and block devices"):
        handle.write(b"1", path)


@pytest.mark.parametrize("device", ["/dev/null", "/dev/zero"])
def test_a_character_device_is_refused(handle, device):
    assert refused(nvmeio.File, device) == (errno.EINVAL, device)
    assert refused(handle.read, bytearray(1), device) == (errno.EINVAL, device)
    assert refused(handle.write, b"1", device) == (errno.EINVAL, device)
    with pytest.raises(OSError, match="it is a character device, such as a terminal; only"):
        nvmeio.File(device)


def test_a_socket_is_refused_with_the_reason(handle, path, monkeypatch):
    # The path of a socket has at most 107 bytes.
    monkeypatch.chdir(path.parent)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("data")
        for file in ("data", bound.fileno()):
            assert refused(handle.read, bytearray(1), file) == (errno.EINVAL, file)
            with pytest.raises(OSError, match="it is a socket; only regular files and"):
                handle.read(bytearray(1), file)


class TestDescriptors:
    """A caller's descriptor is duplicated, and its flags are never changed."""

    @pytest.fixture
    def open_fd(self, path):
        """Open a file of 3 blocks with flags; it is closed at the end."""
        path.write_bytes(pattern(3 * BLOCK))
        opened = []

        def open_fd(flags):
            opened.append(os.open(path, flags))
            return opened[-1]

        yield open_fd
        for fd in opened:
            os.close(fd)

    @pytest.mark.parametrize("flags", [0, os.O_DIRECT | os.O_NONBLOCK])
    def test_a_descriptor_with_any_flags_is_read_and_written(
        self, handle, path, open_fd, flags
    ):
        size = BLOCK + 5
        fd = open_fd(os.O_RDWR | flags)
        before = fcntl.fcntl(fd, fcntl.F_GETFL)
        target = bytearray(size)
        assert handle.submit_write(pattern(size, seed=1), fd, 7).wait() == size
        assert handle.read(target, fd, offset=7) == size
        assert target == pattern(size, seed=1)
        assert path.read_bytes()[7 : 7 + size] == target
        assert path.stat().st_size == 3 * BLOCK
        assert fcntl.fcntl(fd, fcntl.F_GETFL) == before
        assert os.lseek(fd, 0, os.SEEK_CUR) == 0
        assert routes(handle).total() == 2 * size

    def test_a_descriptor_may_be_closed_while_its_request_is_in_flight(
        self, open_handle, folder
    ):
        handle = open_handle(**SLOW)
        (folder / "data").write_bytes(b"12345678")
        target = bytearray(8)
        with plugged(handle, folder):
            fd = os.open(folder / "data", os.O_RDONLY)
            request = handle.submit_read(target, fd)
            os.close(fd)
        assert request.wait() == 8
        assert target == b"12345678"
        handle.close()
        assert left_open(folder) == []

    def test_the_file_may_have_no_name(self, handle, engine, path, open_fd):
        fd = open_fd(os.O_RDWR)
        path.unlink()
        target = bytearray(3 * BLOCK)
        handle.write(b"new", fd)
        handle.read(target, fd)
        assert target == b"new" + pattern(3 * BLOCK)[3:]
        with nvmeio.aio_handle(engine=engine) as op:
            # Validation opens the file once more.
            assert op.write(target, fd, True) == 0
        assert not path.exists()
        assert routes(handle).total() == 3 * BLOCK + 3

    def test_a_descriptor_for_appending_is_refused(self, handle, path, open_fd):
        """With O_APPEND every write would go to the end."""
        fd = open_fd(os.O_RDWR | os.O_APPEND)
        for call in (lambda: handle.write(b"1", fd), lambda: handle.read(bytearray(1), fd)):
            assert refused(call) == (errno.EINVAL, str(path))
            with pytest.raises(OSError, match="it was opened for appending, and every"):
                call()
        assert path.read_bytes() == pattern(3 * BLOCK)

    def test_a_closed_descriptor_is_refused(self, handle, path, open_fd):
        fd = os.open(path.parent, os.O_RDONLY)
        os.close(fd)
        for bad in (fd, -1, 1 << 20, 1 << 31, 1 << 70):
            assert refused(handle.read, bytearray(1), bad) == (errno.EBADF, bad)
            assert refused(handle.submit_write, b"1", bad) == (errno.EBADF, bad)

    def test_a_descriptor_with_o_path_is_refused(self, handle, path, open_fd):
        fd = open_fd(os.O_PATH)
        assert refused(handle.read, bytearray(1), fd) == (errno.EBADF, str(path))
        with pytest.raises(OSError, match="it was opened with O_PATH, neither for reading"):
            handle.read(bytearray(1), fd)

    @pytest.mark.parametrize("number", [True, False, np.True_], ids=repr)
    def test_a_boolean_is_no_descriptor(self, handle, number):
        """True would be descriptor 1, the standard output."""
        words = "file is .*; it must be a path, a descriptor, a File or"
        for call in (handle.write, handle.submit_write):
            with pytest.raises(TypeError, match=words):
                call(b"1", number)

    def test_a_descriptor_may_be_a_numpy_integer(self, handle, path, open_fd):
        fd = np.int64(open_fd(os.O_RDWR))
        handle.write(b"a", fd)
        handle.submit_write(b"b", fd, np.int64(1)).wait()
        assert path.read_bytes()[:2] == b"ab"


class TestFileObjects:
    """Objects with a descriptor count as files; their buffers are flushed first."""

    @pytest.mark.parametrize("size", [5, PAGE, BLOCK + 5])
    def test_buffered_bytes_of_a_file_object_are_not_lost(self, handle, path, size):
        data = pattern(size)
        with open(path, "w+b") as file:
            file.write(b"12345678")
            assert handle.write(data, file, 8) == size
            assert path.read_bytes() == b"12345678" + data
            assert file.tell() == 8
            file.write(b"abc")
            target = bytearray(8 + size)
            assert handle.submit_read(target, file).wait() == 8 + size
            assert target == (b"12345678abc" + data[3:])[: 8 + size]
            assert file.tell() == 11

    def test_position_and_read_ahead_of_a_file_object_stay(self, handle, path):
        path.write_bytes(pattern(3 * PAGE))
        with open(path, "rb") as file:
            assert file.read(3) == pattern(3 * PAGE)[:3]
            target = bytearray(PAGE)
            assert handle.read(target, file, PAGE) == PAGE
            assert target == pattern(3 * PAGE)[PAGE : 2 * PAGE]
            assert file.tell() == 3
            assert file.read() == pattern(3 * PAGE)[3:]

    @pytest.mark.parametrize(
        "kind",
        [
            (tempfile.TemporaryFile, {}),
            (tempfile.NamedTemporaryFile, {}),
            (tempfile.SpooledTemporaryFile, {"max_size": 1 << 20}),
            (tempfile.TemporaryFile, {"buffering": 0}),
            (tempfile.TemporaryFile, {"mode": "w+", "newline": ""}),
        ],
        ids=["file", "named", "spooled", "raw", "text"],
    )
    def test_file_objects_of_every_kind_are_accepted(self, handle, kind):
        with kind[0](**kind[1]) as file:
            file.write("head" if isinstance(file, io.TextIOBase) else b"head")
            assert handle.write(b"body", file, 4) == 4
            assert nvmeio.read_into(target := bytearray(8), file) == 8
            assert target == b"headbody"

    def test_every_method_takes_a_file_object(self, handle, path):
        record = np.arange(BLOCK, dtype=np.uint8)
        with open(path, "w+b") as file:
            file.write(b"12345678")
            handle.submit_write(record, file, 8).wait()
            handle.fsync(file)
            handle.submit_fsync(file, data_only=True).wait()
            file.write(b"x")
            handle.write_many([(record, file, BLOCK * at) for at in (2, 3)])
            assert path.read_bytes()[:9] == b"12345678x"
            targets = [np.empty_like(record) for _ in range(40)]
            handle.read_many([(each, file, 2 * BLOCK) for each in targets])
            assert all((each == record).all() for each in targets)
            out = np.empty((2, BLOCK), np.uint8)
            handle.gather(file, [3 * BLOCK, 2 * BLOCK], BLOCK, out)
            assert (out == record).all()
            file.write(b"y")
            handle.scatter(file, [20], 4, b"abcd")
            assert path.read_bytes()[:24] == b"12345678xy" + bytes(range(2, 12)) + b"abcd"
        assert left_open(path.parent) == []

    def test_a_call_with_many_items_flushes_a_file_object_once(self, handle, path):
        flushes = []

        class Counted(io.FileIO):
            def flush(self):
                flushes.append(self.tell())

        path.write_bytes(bytes(100))
        with Counted(path) as file:
            handle.read_many([(bytearray(1), file, at) for at in range(100)])
            assert flushes == [0]

    @pytest.mark.parametrize("module", ["gzip", "bz2", "lzma"])
    def test_compressed_files_are_refused(self, handle, path, module):
        """Their descriptors lead to compressed bytes."""
        with importlib.import_module(module).open(path, "wb") as file:
            file.write(b"1234")
            for call in (handle.write, handle.submit_write):
                with pytest.raises(TypeError, match="leads to compressed bytes"):
                    call(b"1", file)
        with importlib.import_module(module).open(path) as file:
            assert file.read() == b"1234"

    def test_wrappers_of_compressed_files_are_refused(self, handle, path):
        with gzip.open(path, "wb") as file:
            file.write(b"1234")
        for wrap in (
            io.BufferedReader,
            io.TextIOWrapper,
            lambda file: io.TextIOWrapper(io.BufferedReader(file)),
            codecs.getreader("utf-8"),
        ):
            with gzip.open(path) as file:
                wrapped = wrap(file)
                with pytest.raises(TypeError, match="leads to compressed bytes"):
                    handle.read(bytearray(4), wrapped)
                assert wrapped.read(4) in ("1234", b"1234")

    def test_objects_without_a_descriptor_are_refused(self, handle):
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            archive.addfile(tarfile.TarInfo("member"))
        packed.seek(0)
        with tarfile.open(fileobj=packed) as archive:
            member = archive.extractfile("member")
        for file in (io.BytesIO(b"1234"), io.StringIO("1234"), member):
            with pytest.raises(TypeError, match="which has no descriptor; it must be a"):
                handle.read(bytearray(1), file)

    def test_file_objects_of_the_wrong_kind_have_the_usual_errors(
        self, handle, path, monkeypatch
    ):
        path.write_bytes(b"1234")
        with open(path, "rb") as file:
            assert refused(handle.write, b"1", file)[0] == errno.EBADF
        with pytest.raises(ValueError, match="closed"):
            handle.read(bytearray(1), file)
        with open(path, "wb") as file:
            assert refused(handle.read, bytearray(1), file)[0] == errno.EBADF
        with open(path, "ab") as file, pytest.raises(OSError, match="for appending"):
            handle.write(b"1", file)
        first, second = socket.socketpair()
        with first, second, pytest.raises(OSError, match="it is a socket"):
            handle.write(b"1", first)

    def test_a_failed_flush_is_an_error_and_nothing_is_written(self, handle, path):
        class Full(io.FileIO):
            def flush(self):
                raise OSError(errno.ENOSPC, "no room")

        file = Full(path, "w+")
        assert refused(handle.write, b"1", file)[0] == errno.ENOSPC
        assert path.read_bytes() == b""
        with pytest.raises(OSError, match="no room"):
            file.close()


def test_a_file_is_opened_once(path):
    file = nvmeio.File(path, "w")
    with pytest.raises(ValueError, match="open already"):
        file.__init__(path)
    assert file.size == 0


def test_a_file_that_was_never_opened_is_closed():
    file = nvmeio.File.__new__(nvmeio.File)
    assert file.closed
    file.close()
    with pytest.raises(ValueError, match="is closed"):
        file.fileno()


def test_a_file_system_that_keeps_o_direct_is_read_through_the_page_cache(fuse_kinds):
    """As unionfs does: its server has opened its own file with that flag."""
    path = fuse_kinds("direct") / "file"
    path.write_bytes(b"contents")
    assert bytes(nvmeio.read_file(path)) == b"contents"
    with nvmeio.File(path) as file:
        assert not file.direct
