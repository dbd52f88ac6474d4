"""Appending rows to an array, under errors, kills and other writers."""

import errno
import fcntl
import itertools
import os
import pickle
import resource
import signal
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.lib import format as npy

import nvmeio
from array_samples import DTYPES, noise, numbers, write_npy
from helpers import MIB, PAGE, fork, left_open, limit
from index_strategies import assert_same
from mounts import Filler
from nvmeio import ArrayFile
from nvmeio._arrays.stored import StoredArray
from nvmeio._files import locks

# A handle with its own write() simulates a drive that fails.
Handle = nvmeio.Handle


@pytest.fixture
def saved(path):
    """An array, and its file."""
    array = numbers((10, 3))
    return array, write_npy(path, array)


class TestRows:
    @pytest.mark.parametrize("make", ["numpy", "create", "save", "raw"])
    @pytest.mark.parametrize("shape", [(0, 3), (10, 3), (7,), (999, 2, 5)], ids=str)
    def test_appended_rows_are_read_after_the_others(self, handle, path, make, shape):
        expected = numbers(shape)
        if make == "numpy":
            write_npy(path, expected)
        elif make == "save":
            nvmeio.save(path, expected)
        else:
            with ArrayFile.create(path, shape, "f4", raw=make == "raw") as array:
                array[...] = expected
        options = {"dtype": "f4", "shape": (-1, *shape[1:])} if make == "raw" else {}
        with ArrayFile(path, mode="r+", handle=handle, **options) as array:
            for count in (1, 0, 90, 1000):
                rows = -1 - numbers((count, *shape[1:]))
                array.append(rows)
                expected = np.concatenate([expected, rows])
                assert array.shape == expected.shape
                assert_same(array[...], expected)
                with ArrayFile(path, **options) as other:
                    assert_same(other[...], expected)
        if make != "raw":
            assert_same(np.load(path), expected)
        assert path.stat().st_size == array.offset + expected.nbytes

    @pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
    def test_rows_of_every_plain_dtype_are_appended(self, path, dtype):
        expected = noise((9, 3), dtype)
        write_npy(path, expected[:4])
        with ArrayFile(path, mode="r+") as array:
            array.append(expected[4:7])
            array.append(expected[7:].tolist() if dtype.names else expected[7:])
        assert_same(np.load(path), expected)

    def test_values_are_converted(self, saved):
        expected, path = saved
        with ArrayFile(path, mode="r+") as array:
            array.append([[1, 2, 3]])
            array.append(np.arange(12).reshape(4, 3)[::2])
        added = [[1, 2, 3], [0, 1, 2], [6, 7, 8]]
        assert_same(np.load(path), np.concatenate([expected, np.array(added, "f4")]))

    def test_tensors_are_appended(self, path):
        torch = pytest.importorskip("torch", reason="torch is not installed")
        with ArrayFile.create(path, (0, 2), torch.bfloat16) as array:
            array.append(torch.tensor([[1.0, 2.0]], requires_grad=True))
            array.append([[3, 4]])
            array.append(torch.ones(2, 2, dtype=torch.bfloat16))
            assert array[...].tolist() == [[1, 2], [3, 4], [1, 1], [1, 1]]
        assert np.load(path).dtype == "V2"

    @pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)], ids=str)
    def test_the_header_keeps_its_version_and_length(self, path, version):
        write_npy(path, numbers((3,)), version=version)
        before = np.load(path, mmap_mode="r").offset
        with ArrayFile(path, mode="r+") as array:
            array.append(numbers((100_000,)))
        with open(path, "rb") as file:
            assert npy.read_magic(file) == version
        assert np.load(path, mmap_mode="r").offset == before
        assert_same(np.load(path), np.concatenate([numbers((3,)), numbers((100_000,))]))

    def test_rows_of_no_bytes_are_counted(self, path):
        with ArrayFile.create(path, (2, 0), "f4") as array:
            array.append(np.empty((5, 0)))
            assert array.shape == (7, 0)
        assert np.load(path).shape == (7, 0)

    def test_other_array_objects_see_appended_rows(self, path):
        for raw in (False, True):
            with ArrayFile.create(path, (2, 3), "i4", raw=raw, overwrite=True) as array:
                array.append(numbers((5, 3)))
                with pickle.loads(pickle.dumps(array)) as copy:
                    assert_same(copy[...], array[...])
                    copy.append([[1, 2, 3]])
                # This array sees the copy's row once it appends, or is opened again.
                assert array.shape == (7, 3)
                array.append([[4, 5, 6]])
                assert array[-3:].tolist() == [[12, 13, 14], [1, 2, 3], [4, 5, 6]]


class TestRefresh:
    @pytest.mark.parametrize("raw", [False, True])
    def test_the_rows_that_another_has_appended_come_with_a_refresh(self, path, raw):
        options = {"dtype": "i4", "shape": (-1, 3)} if raw else {}
        with (
            ArrayFile.create(path, (2, 3), "i4", raw=raw) as array,
            ArrayFile(path, **options) as other,
        ):
            other.refresh()
            assert other.shape == (2, 3)
            array.append(numbers((5, 3)))
            assert other.shape == (2, 3)
            other.refresh()
            assert_same(other[...], array[...])
            with pickle.loads(pickle.dumps(other)) as copy:
                assert_same(copy[...], array[...])

    def test_refresh_adds_no_bytes_after_the_array(self, path):
        np.arange(12, dtype="i4").tofile(path)
        with ArrayFile(path, dtype="i4", shape=(2, 3)) as array:
            array.refresh()
            assert array.shape == (2, 3)
        with open(path, "wb") as file:
            np.save(file, numbers((4, 3)))
            np.save(file, numbers((9, 3)))
        with ArrayFile(path) as array:
            array.refresh()
            assert_same(array[...], numbers((4, 3)))

    def test_another_array_is_refused(self, saved):
        _, path = saved
        with ArrayFile(path) as array:
            shape = array.shape
            with open(path, "r+b") as file:
                np.save(file, numbers((2, 5)))
            with pytest.raises(ValueError, match=r"now has another array.*; open it again"):
                array.refresh()
            write_npy(path.with_name("new"), numbers((9, 3))).replace(path)
            with pytest.raises(OSError, match="was replaced or removed since") as caught:
                array.refresh()
            assert (caught.value.errno, caught.value.filename) == (errno.ESTALE, str(path))
            assert array.shape == shape
        with pytest.raises(ValueError, match="is closed"):
            array.refresh()


REFUSED = {
    "row": (np.zeros(3), ValueError, r"of shape \(3,\); .* must be of shape \(n, 3\)"),
    "width": (np.zeros((1, 4)), ValueError, r"of shape \(1, 4\); .* of shape \(n, 3\)"),
    "number": (7, ValueError, r"of shape \(\); .* of shape \(n, 3\)"),
    "text": ([["a", "b", "c"]], ValueError, "of type list; they cannot be converted to fl"),
    "object": (object(), TypeError, "of type object; they cannot be converted to float32"),
}


def filled_header(shape):
    """Return a .npy file whose header has no room for another digit."""
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    return npy.magic(1, 0) + len(text).to_bytes(2, "little") + text


class TestRefusing:
    @pytest.mark.parametrize(("values", "error", "words"), REFUSED.values(), ids=REFUSED)
    def test_values_that_are_no_rows_change_nothing(self, saved, values, error, words):
        _, path = saved
        before = path.read_bytes()
        with ArrayFile(path, mode="r+") as array:
            with pytest.raises(error, match=words):
                array.append(values)
            assert array.shape == (10, 3)
        assert path.read_bytes() == before

    def test_read_only_closed_and_scalar_arrays_refuse_rows(self, saved, tmp_path):
        expected, path = saved
        with ArrayFile(path) as array, pytest.raises(ValueError, match="open read-only"):
            array.append(expected)
        with pytest.raises(ValueError, match="is closed"):
            array.append(expected)
        with (
            ArrayFile.create(tmp_path / "single", (), "f4") as array,
            pytest.raises(TypeError, match="without axes has no length"),
        ):
            array.append([1])

    def test_a_header_without_room_changes_nothing(self, path):
        path.write_bytes(filled_header((9,)) + bytes(36))
        before = path.read_bytes()
        with ArrayFile(path, mode="r+") as array:
            with pytest.raises(ValueError, match=r"room for 56 bytes, .*save it anew with"):
                array.append([1, 2])
            assert path.read_bytes() == before
            assert array.shape == (9,)
        nvmeio.save(path, np.load(path))
        with ArrayFile(path, mode="r+") as array:
            array.append([1, 2])
        assert_same(np.load(path), np.array([0] * 9 + [1, 2], "f4"))

    def test_another_array_after_this_one_is_not_overwritten(self, saved):
        expected, path = saved
        with open(path, "ab") as file:
            np.save(file, expected)
        before = path.read_bytes()
        words = "another array behind this one"
        with ArrayFile(path, mode="r+") as array, pytest.raises(ValueError, match=words):
            array.append(expected)
        assert path.read_bytes() == before

    def test_bytes_after_a_raw_array_are_not_overwritten(self, path):
        path.write_bytes(bytes(range(24)))
        with (
            ArrayFile(path, dtype="u1", shape=(2, 3), mode="r+") as array,
            pytest.raises(ValueError, match="bytes follow the array"),
        ):
            array.append([[1, 2, 3]])
        with ArrayFile(path, dtype="u1", shape=(-1, 3), offset=3, mode="r+") as array:
            array.append([[1, 2, 3]])
            assert array.shape == (8, 3)
        assert path.read_bytes() == bytes([*range(24), 1, 2, 3])

    def test_a_file_that_was_replaced_is_not_appended_to(self, saved):
        expected, path = saved
        with ArrayFile(path, mode="r+") as array:
            nvmeio.save(path, expected)
            with pytest.raises(OSError, match="replaced or removed") as caught:
                array.append(expected)
            assert (caught.value.errno, caught.value.filename) == (errno.ESTALE, str(path))
        assert_same(np.load(path), expected)

    def test_a_file_that_has_another_array_now_is_not_appended_to(self, saved):
        _, path = saved
        with ArrayFile(path, mode="r+") as array:
            write_npy(path, numbers((5, 4), "i8"))
            before = path.read_bytes()
            with pytest.raises(
                ValueError, match=r"now has another array, .*\(5, 4\).*int64"
            ):
                array.append([[1, 2, 3]])
        assert path.read_bytes() == before


class Failing(Handle):
    """A handle whose write() writes a part and then fails, or is interrupted."""

    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(self, buffer, file, offset=0):
        super().write(buffer[: len(buffer) // 2], file, offset)
        raise self.error


class TestErrors:
    @pytest.mark.parametrize("raw", [False, True], ids=["npy", "raw"])
    @pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
    def test_an_error_leaves_the_file_as_it_was(self, path, raw, error, monkeypatch):
        monkeypatch.setattr(Failing, "error", error)
        with ArrayFile.create(path, (10, 3), "f4", raw=raw) as array:
            array[...] = numbers((10, 3))
        before = path.read_bytes()
        options = {"dtype": "f4", "shape": (-1, 3)} if raw else {}
        handle = Failing()
        with handle, ArrayFile(path, mode="r+", handle=handle, **options) as array:
            with pytest.raises(type(error)):
                array.append(np.ones((5000, 3)))
            assert path.read_bytes() == before
            assert_same(array[...], numbers((10, 3)))
        assert left_open(path.parent) == []

    def test_a_file_size_limit_leaves_the_file_as_it_was(self, saved):
        expected, path = saved
        before = path.read_bytes()
        with ArrayFile(path, mode="r+") as array:
            with (
                limit(resource.RLIMIT_FSIZE, MIB),
                pytest.raises(OSError, match="large") as no,
            ):
                array.append(np.zeros((MIB, 3)))
            assert (no.value.errno, no.value.filename) == (errno.EFBIG, str(path))
            assert path.read_bytes() == before
            array.append(expected)
        assert_same(np.load(path), np.concatenate([expected, expected]))

    @pytest.mark.parametrize("kind", ["ext4", "xfs"])
    def test_a_full_drive_leaves_the_file_as_it_was(self, loop_mount, kind):
        folder = loop_mount(kind, 400 * MIB)
        path, expected = folder / "array.npy", numbers((1000, 256))
        nvmeio.save(path, expected, sync=True)
        filler = Filler(folder)
        rows = np.ones((100_000, 256), "f4")
        with ArrayFile(path, mode="r+") as array:
            for _ in range(3):
                filler.shrink()
                with pytest.raises(OSError, match="No space left") as full:
                    array.append(rows)
                assert full.value.errno == errno.ENOSPC
                assert_same(array[...], expected)
                assert_same(np.load(path), expected)
            filler.path.unlink()
            array.append(rows)
        assert_same(np.load(path), np.concatenate([expected, rows]))

    def test_a_header_that_fails_half_written_is_undone(self, saved, monkeypatch):
        _, path = saved
        before, write, calls = path.read_bytes(), os.pwrite, itertools.count()

        def failing(descriptor, data, offset):
            number = next(calls)
            if number == 1:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return write(descriptor, data[:1] if number == 0 else data, offset)

        with ArrayFile(path, mode="r+") as array:
            monkeypatch.setattr(os, "pwrite", failing)
            with pytest.raises(OSError, match="Input/output error"):
                array.append(numbers((190, 3)))
            assert path.read_bytes() == before
            assert array.shape == (10, 3)

    def test_an_interruption_after_the_header_keeps_the_rows(self, saved, monkeypatch):
        expected, path = saved
        write = os.pwrite

        def interrupted(*args):
            write(*args)
            raise KeyboardInterrupt

        with ArrayFile(path, mode="r+") as array:
            monkeypatch.setattr(os, "pwrite", interrupted)
            with pytest.raises(KeyboardInterrupt):
                array.append(expected)
            assert array.shape == (20, 3)
        assert_same(np.load(path), np.concatenate([expected, expected]))


class Killing(Handle):
    """A handle that kills the process in the middle of a write, or at a sync."""

    def write(self, buffer, file, offset=0):
        if "half" in self.when:
            super().write(buffer[: len(buffer) // 2], file, offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().write(buffer, file, offset)

    def fsync(self, file, *, data_only=False):
        if "sync" in self.when:
            os.kill(os.getpid(), signal.SIGKILL)
        super().fsync(file, data_only=data_only)


def append_and_die(path, rows, when):
    """Append, and be killed during that."""
    pwrite = os.pwrite

    def killing(*args):
        if "before the header" not in when:
            pwrite(*args)
        os.kill(os.getpid(), signal.SIGKILL)

    if "header" in when:
        os.pwrite = killing
    handle = Killing()
    handle.when = when
    ArrayFile(path, mode="r+", handle=handle).append(rows)


@pytest.mark.parametrize(
    "when", ["half of the rows", "at the sync", "before the header", "behind the header"]
)
def test_a_killed_process_leaves_all_rows_or_none(path, when):
    expected, rows = numbers((10, 3)), -1 - numbers((100_000, 3))
    write_npy(path, expected)
    child = fork(append_and_die, path, rows, when)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    if "behind" in when:
        expected = np.concatenate([expected, rows])
    assert_same(np.load(path), expected)
    assert_same(nvmeio.load(path), expected)
    # The lock ended with the process, and the rows that it left are overwritten.
    with ArrayFile(path, mode="r+") as array:
        assert_same(array[...], expected)
        array.append(expected[:2])
        expected = np.concatenate([expected, expected[:2]])
        assert_same(array[...], expected)
    assert_same(np.load(path), expected)
    assert path.stat().st_size == array.offset + expected.nbytes


def test_the_rows_are_synced_before_the_header_names_them(path, monkeypatch):
    events = []

    class Noting(Handle):
        def write(self, buffer, file, offset=0):
            events.append("rows")
            return super().write(buffer, file, offset)

        def fsync(self, file, *, data_only=False):
            events.append("sync")
            super().fsync(file, data_only=data_only)

    pwrite = os.pwrite
    monkeypatch.setattr(
        os, "pwrite", lambda *args: (events.append("shape"), pwrite(*args))[1]
    )
    write_npy(path, numbers((10, 3)))
    with Noting() as handle, ArrayFile(path, mode="r+", handle=handle) as array:
        array.append(numbers((5, 3)))
    assert events == ["rows", "sync", "shape"]


def refreshed(_, array):
    array.refresh()
    return array.shape


# Ways to learn the shape of an array in a .npy file.
READERS = {
    "open": lambda path, _: ArrayFile(path).shape,
    "with a dtype": lambda path, _: ArrayFile(path, dtype="f4").shape,
    "load": lambda path, _: nvmeio.load(path).shape,
    "refresh": refreshed,
}


class TestOthers:
    @pytest.mark.parametrize("raw", [False, True], ids=["npy", "raw"])
    def test_no_row_of_several_processes_is_lost(self, path, raw):
        counts = {"processes": 3, "appends": 40}
        ArrayFile.create(path, (0, 5), "i4", raw=raw).close()
        options = {"dtype": "i4", "shape": (-1, 5)} if raw else {}

        def append(process):
            with ArrayFile(path, mode="r+", **options) as array:
                for number in range(counts["appends"]):
                    array.append(np.full((1 + number % 7, 5), process * 1000 + number))

        children = [fork(append, process) for process in range(counts["processes"])]
        assert [os.waitpid(child, 0)[1] for child in children] == [0] * len(children)
        with ArrayFile(path, **options) as array:
            found = array[...]
        assert (found == found[:, :1]).all()
        for process in range(counts["processes"]):
            own = found[found[:, 0] // 1000 == process, 0] % 1000
            wanted = np.arange(counts["appends"])
            assert_same(own, np.repeat(wanted, 1 + wanted % 7).astype("i4"))

    def test_readers_see_one_length_or_the_other(self, path):
        """Readers that open the file during an append find only whole rows."""
        with ArrayFile.create(path, (1, 4), "i8") as array:
            lengths = set()
            done = threading.Event()

            def read():
                while not done.is_set():
                    with ArrayFile(path) as other:
                        found = other[...]
                    assert (found == np.arange(len(found))[:, None]).all()
                    lengths.add(len(found))

            with ThreadPoolExecutor(1) as pool:
                reading = pool.submit(read)
                for row in range(1, 200):
                    array.append(np.full((1, 4), row))
                done.set()
                reading.result()
        assert lengths

    def test_a_child_forked_right_after_the_open_does_not_keep_the_lock(
        self, path, monkeypatch
    ):
        """The child lives on, and does not know the descriptor that it has."""
        read_end, write_end = os.pipe()
        children, register = [], locks.in_child_close

        def forking(lock):
            children.append(fork(os.read, read_end, 1))
            register(lock)

        with ArrayFile.create(path, (0, PAGE), "u1") as array:
            monkeypatch.setattr(locks, "in_child_close", forking)
            array.append(np.ones((1, PAGE)))
            monkeypatch.undo()
            try:
                with path.open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            finally:
                os.write(write_end, b"x")
        assert [os.waitpid(child, 0)[1] for child in children] == [0]
        os.close(read_end)
        os.close(write_end)

    @pytest.mark.parametrize("way", READERS)
    @pytest.mark.parametrize("writer", ["append", "create"])
    def test_no_reader_sees_half_of_a_header(self, path, monkeypatch, writer, way):
        """The writer is held still when it has made "(199," of "(999,"."""
        torn, waits = threading.Event(), threading.Event()
        pwrite, fcntl_call = os.pwrite, fcntl.fcntl

        def halfway(descriptor, data, offset):
            half = data.index(b"1009") + 1
            pwrite(descriptor, data[:half], offset)
            torn.set()
            assert waits.wait(30)
            return half + pwrite(descriptor, data[half:], offset + half)

        def noting(descriptor, command, lock):
            if lock.startswith(struct.pack("h", fcntl.F_RDLCK)):
                waits.set()
            return fcntl_call(descriptor, command, lock)

        def write():
            if writer == "append":
                array.append(np.ones((10, 5)))
            else:
                ArrayFile.create(path, (1009, 5), "f4", overwrite=True).close()

        with (
            ThreadPoolExecutor(1) as pool,
            ArrayFile.create(path, (999, 5), "f4") as array,
            ArrayFile(path) as reader,
            monkeypatch.context() as patch,
        ):
            patch.setattr(os, "pwrite", halfway)
            patch.setattr(fcntl, "fcntl", noting)
            writing = pool.submit(write)
            assert torn.wait(30)
            try:
                assert READERS[way](path, reader) == (1009, 5)
            finally:
                waits.set()
                writing.result()

    @pytest.mark.parametrize("raw", [False, True], ids=["npy", "raw"])
    def test_a_refresh_does_not_undo_an_append(self, path, monkeypatch, raw):
        """The refresh is held when it knows the shape, until the append waits or ends."""
        known, waits = threading.Event(), threading.Event()
        take, fcntl_call, flock = StoredArray.take, fcntl.fcntl, fcntl.flock

        def taking(array, layout):
            if threading.current_thread() is threading.main_thread():
                known.set()
                assert waits.wait(30)
            take(array, layout)

        def locking(descriptor, operation):
            if operation == fcntl.LOCK_EX:
                try:
                    return flock(descriptor, operation | fcntl.LOCK_NB)
                except BlockingIOError:
                    waits.set()
            return flock(descriptor, operation)

        def locking_header(descriptor, command, lock):
            try:
                return fcntl_call(descriptor, fcntl.F_OFD_SETLK, lock)
            except BlockingIOError:
                waits.set()
            return fcntl_call(descriptor, command, lock)

        def append():
            assert known.wait(30)
            array.append(np.ones((7, 5)))
            waits.set()

        with (
            ThreadPoolExecutor(1) as pool,
            ArrayFile.create(path, (3, 5), "f4", raw=raw) as array,
        ):
            monkeypatch.setattr(StoredArray, "take", taking)
            monkeypatch.setattr(fcntl, "flock", locking)
            monkeypatch.setattr(fcntl, "fcntl", locking_header)
            appending = pool.submit(append)
            array.refresh()
            appending.result()
            assert array.shape == (10, 5)

    def test_a_reader_of_a_npy_file_does_not_wait_for_rows(self, path):
        """Another program may hold the file's lock for as long as it likes."""
        expected = numbers((4, 3))
        with ArrayFile(write_npy(path, expected)) as reader, path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            for read in READERS.values():
                assert read(path, reader) == (4, 3)

    @pytest.mark.parametrize("kind", ["of the process", "of an open file"])
    def test_nobody_waits_for_ever_for_the_lock_of_a_program(self, path, monkeypatch, kind):
        """It is on all bytes, and its holder may be who opens the array."""
        monkeypatch.setattr(locks, "_PATIENCE_S", 0.05)
        expected = numbers((4, 3))
        with ArrayFile(write_npy(path, expected), mode="r+") as array:
            with path.open("r+b") as file:

                def lock():
                    # Closing any descriptor of the file ends that of the process.
                    if kind == "of the process":
                        fcntl.lockf(file, fcntl.LOCK_EX)
                    else:
                        lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
                        fcntl.fcntl(file, fcntl.F_OFD_SETLK, lock)

                for read in READERS.values():
                    lock()
                    assert read(path, array) == (4, 3)
                lock()
                array.append(expected)
            assert np.array_equal(np.load(path), np.concatenate([expected, expected]))

    @pytest.mark.parametrize("call", ["open", "refresh"])
    def test_a_reader_of_raw_bytes_waits_for_an_append(self, path, monkeypatch, call):
        """The append is held still when the file has a part of its rows."""
        written, waits, flock = threading.Event(), threading.Event(), fcntl.flock

        class Halfway(Handle):
            def write(self, buffer, file, offset=0):
                super().write(buffer[: len(buffer) // 2 + 1], file, offset)
                written.set()
                waits.wait(30)
                return super().write(buffer, file, offset)

        def noting(descriptor, operation):
            if operation == fcntl.LOCK_SH:
                waits.set()
            return flock(descriptor, operation)

        options = {"dtype": "i4", "shape": (-1, 5)}
        np.zeros((3, 5), "i4").tofile(path)
        with (
            ThreadPoolExecutor(1) as pool,
            Halfway() as handle,
            ArrayFile(path, mode="r+", handle=handle, **options) as array,
            ArrayFile(path, **options) as reader,
        ):
            monkeypatch.setattr(fcntl, "flock", noting)
            appending = pool.submit(array.append, np.ones((7, 5)))
            assert written.wait(30)
            try:
                if call == "open":
                    with ArrayFile(path, mode="r+", **options) as other:
                        assert other.shape == (10, 5)
                        other.append(np.ones((1, 5)))
                else:
                    reader.refresh()
                    assert reader.shape == (10, 5)
            finally:
                waits.set()
                appending.result()

    def test_a_forked_child_does_not_keep_the_lock(self, path):
        """The child was forked while the parent appended, and lives on."""
        read_end, write_end = os.pipe()
        children = []

        class Forking(Handle):
            def write(self, buffer, file, offset=0):
                children.append(fork(os.read, read_end, 1))
                return super().write(buffer, file, offset)

        ArrayFile.create(path, (0, PAGE), "u1").close()
        with Forking() as handle, ArrayFile(path, mode="r+", handle=handle) as array:
            array.append(np.ones((1, PAGE)))
            with ArrayFile(path, mode="r+") as other, ThreadPoolExecutor(1) as pool:
                appending = pool.submit(other.append, np.ones((1, PAGE)))
                try:
                    appending.result(timeout=30)
                finally:
                    os.write(write_end, b"x")
                assert other.shape == (2, PAGE)
        assert [os.waitpid(child, 0)[1] for child in children] == [0]
        os.close(read_end)
        os.close(write_end)
