"""Errors that the file system reports only when a file is closed, as NFS and FUSE may."""

import asyncio
import contextlib
import errno
import gc
import io
import itertools
import os
import warnings
from concurrent.futures import CancelledError

import numpy as np
import pytest

import nvmeio
import nvmeio.safetensors.numpy
from helpers import BLOCK, DEPTH, PAGE, left_open, pattern
from nvmeio.checkpoint._places import place_of
from workloads.common import Faults

ARRAY = np.arange(3000)
_numbers = itertools.count()
OPTIONS = 1 << 20, 32, False, False


@pytest.fixture
def faults(faulty):
    """The faults of the folder."""
    (faulty / "control").touch()
    return Faults(faulty / "control")


@pytest.fixture
def path(faulty, faults):
    """The path of a file that cannot be closed without an error."""
    faults.set(flush={"error": errno.ENOSPC})
    # A new name, because the kernel remembers for a second whether NAME.plain exists.
    yield faulty / f"data{next(_numbers)}"
    faults.set()


def write_with_a_file(handle, path):
    with nvmeio.File(path, "w") as file:
        file.write(pattern(100))


def write_large_with_a_file(handle, path):
    with nvmeio.File(path, "w") as file:
        file.write(pattern(2 << 20))


def close_a_file(handle, path):
    file = nvmeio.File(path, "w")
    handle.write(ARRAY, file)
    try:
        file.close()
    finally:
        assert file.closed
        file.close()


def extend(handle, path):
    with nvmeio.File(path, "w") as file:
        file.truncate(10)


def write_by_descriptor(handle, path):
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        handle.write(ARRAY, descriptor)
    finally:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def write_array(handle, path):
    path.with_suffix(".plain").write_bytes(bytes(800))
    with nvmeio.ArrayFile(path, dtype=np.int64, shape=(100,), mode="r+") as array:
        array[3] = 7


def write_tensor(handle, path):
    torch = pytest.importorskip("torch")
    nvmeio.torch.save({"weight": torch.ones(3000)}, path)


def write_strided(handle, path):
    handle.write(ARRAY[::3], path)


def write_many(handle, path):
    items = [(pattern(n * 100), path, n * 1000) for n in range(8)]
    handle.write_many([*items, (b"other", f"{path}.other.plain", 0)])


def await_write(handle, path):
    async def write():
        await handle.submit_write(ARRAY, path)

    asyncio.run(write())


def write_and_validate(handle, path):
    with nvmeio.aio_handle(*OPTIONS[:2], engine=handle.engine) as op:
        op.write(ARRAY, path, True)


def write_and_validate_later(handle, path):
    with nvmeio.aio_handle(*OPTIONS[:2], engine=handle.engine) as op:
        assert op.pwrite(ARRAY, path, True, True) == 0
        op.wait()


def write_later(handle, path):
    with nvmeio.aio_handle(*OPTIONS[:2], engine=handle.engine) as op:
        assert op.async_pwrite(ARRAY, path) == 0
        op.wait()


WRITERS = [
    write_with_a_file,
    write_large_with_a_file,
    close_a_file,
    extend,
    write_by_descriptor,
    write_array,
    write_tensor,
    write_strided,
    write_many,
    await_write,
    write_and_validate,
    write_and_validate_later,
    write_later,
    lambda handle, path: handle.write(ARRAY, path),
    lambda handle, path: handle.write(pattern(BLOCK), path),
    lambda handle, path: handle.submit_write(ARRAY, path).wait(),
    lambda handle, path: handle.scatter(path, [0, 5000], 100, pattern(200)),
    lambda handle, path: nvmeio.write_file(ARRAY, path),
    lambda handle, path: nvmeio.write_file(ARRAY, path, atomic=False),
    lambda handle, path: nvmeio.write_file(ARRAY, path, sync=True),
    lambda handle, path: asyncio.run(nvmeio.aio.write_file(ARRAY, path)),
    lambda handle, path: nvmeio.save(path, ARRAY),
    lambda handle, path: nvmeio.safetensors.numpy.save_file({"a": ARRAY}, path),
    lambda handle, path: nvmeio.aio_write(ARRAY, path, *OPTIONS, False),
    lambda handle, path: nvmeio.aio_write(ARRAY, path, *OPTIONS, True),
]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("write", WRITERS)
def test_every_way_of_writing_raises_it(handle, path, faults, write):
    with pytest.raises(OSError, match=str(path)) as caught:
        write(handle, path)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
    assert faults.fired()["flush.error"] > 0
    assert left_open(path.parent) == []


@pytest.mark.parametrize("write", WRITERS)
def test_without_it_they_succeed(handle, path, faults, write):
    faults.set()
    write(handle, path)
    assert path.exists()
    assert left_open(path.parent) == []


def test_an_array_that_is_created_raises_it_and_leaves_no_file(path, faults):
    with pytest.raises(OSError, match=str(path)) as caught:
        nvmeio.ArrayFile.create(path, (3,), np.int64)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
    assert not path.exists()
    assert left_open(path.parent) == []


def test_an_append_raises_it(path, faults):
    faults.set()
    nvmeio.save(path, ARRAY)
    array = nvmeio.ArrayFile(path, mode="r+")
    faults.set(flush={"error": errno.ENOSPC})
    with pytest.raises(OSError, match="No space left on device"):
        array.append(ARRAY)
    assert len(array) == 2 * len(ARRAY)
    with pytest.raises(OSError, match="No space left on device"):
        array.close()


def test_the_status_of_the_op_is_minus_one(path):
    with nvmeio.aio_handle(*OPTIONS[:2], errors="status") as op:
        assert op.sync_pwrite(ARRAY, path) == -1
        assert op.last_error.errno == errno.ENOSPC
        assert op.write(ARRAY, path, True) == -1
        assert op.async_pwrite(ARRAY, path) == 0
        assert op.wait() == -1


@pytest.mark.parametrize(
    "write",
    [
        lambda path: nvmeio.write_file(ARRAY, path),
        lambda path: nvmeio.save(path, ARRAY),
        lambda path: nvmeio.safetensors.numpy.save_file({"a": ARRAY}, path),
    ],
)
def test_what_is_replaced_stays(path, write):
    path.with_suffix(".plain").write_bytes(b"old")
    with pytest.raises(OSError, match="data"):
        write(path)
    assert path.with_suffix(".plain").read_bytes() == b"old"
    assert {each.name for each in path.parent.iterdir()} == {"control", path.name}


def test_a_new_file_is_closed_before_it_gets_its_name(tmp_path, monkeypatch):
    """On local file systems too, where it has no name until then."""
    replace, open_then = os.replace, []

    def replaced(old, new):
        open_then.extend(left_open(tmp_path))
        replace(old, new)

    monkeypatch.setattr(os, "replace", replaced)
    nvmeio.write_file(ARRAY, tmp_path / "data")
    place = place_of(tmp_path)
    with place.writing("copy", 0o644) as writer:
        writer.write(np.zeros(10, np.uint8))
        writer.finish()
        writer.commit()
    assert open_then == []


def test_the_message_says_what_was_written(handle, path):
    with pytest.raises(OSError, match="close after the write of 10 bytes at offset 5"):
        handle.write(bytes(10), path, 5)
    with pytest.raises(OSError, match="close after the scatter"):
        handle.scatter(path, [0], 10, bytes(10))
    file = nvmeio.File(path, "r+")
    with pytest.raises(OSError, match=r"No space left on device \(close\)"):
        file.close()


def test_an_item_of_many_fails_with_its_file(handle, path):
    other = path.with_name(f"{path.name}.other.plain")
    with pytest.raises(nvmeio.GatherError) as caught:
        handle.write_many([(b"1", other, 0), (b"2", path, 0), (b"3", other, 1)])
    assert caught.value.failures == ((1, errno.ENOSPC),)
    assert (caught.value.filename, other.read_bytes()) == (str(path), b"13")


@pytest.mark.filterwarnings("error")
def test_reading_ignores_it(handle, path):
    path.with_suffix(".plain").write_bytes(pattern(BLOCK))
    with nvmeio.File(path) as file:
        assert file.read() == pattern(BLOCK)
    assert handle.read(bytearray(BLOCK), path) == BLOCK
    assert handle.read(bytearray(10), path, 7) == 10
    assert handle.gather(path, [0, 100], 10, bytearray(20)) == 20
    assert len(nvmeio.read_file(path)) == BLOCK
    gc.collect()


def test_only_the_last_request_of_a_file_raises_it(handle, path, faults):
    faults.set(flush={"error": errno.ENOSPC}, write={"held": True})
    file = nvmeio.File(path, "w")
    requests = [handle.submit_write(pattern(PAGE), file, n * PAGE) for n in range(9)]
    file.close()
    faults.set(flush={"error": errno.ENOSPC})
    errors = [request.exception() for request in requests]
    assert sorted(error.errno for error in errors if error) == [errno.ENOSPC]


def test_only_the_last_request_of_a_path_raises_it(handle, path, faults):
    faults.set(flush={"error": errno.ENOSPC}, write={"held": True})
    requests = [handle.submit_write(pattern(PAGE), path, n * PAGE) for n in range(9)]
    faults.set(flush={"error": errno.ENOSPC})
    errors = [request.exception() for request in requests]
    assert sorted(error.errno for error in errors if error) == [errno.ENOSPC]


@pytest.mark.parametrize("waited_for", [True, False])
def test_a_cancelled_request_tells_of_it(handle, path, faults, waited_for):
    faults.set(flush={"error": errno.ENOSPC}, write={"held": True})
    first = handle.submit_write(pattern(PAGE), f"{path}.other")
    request = handle.submit_write(pattern(PAGE), path, after=first)
    assert request.cancel()
    faults.set(flush={"error": errno.ENOSPC})
    assert first.exception().errno == errno.ENOSPC
    if waited_for:
        with pytest.raises(CancelledError) as caught:
            request.wait()
        cause = caught.value.__cause__
        assert (cause.errno, cause.filename) == (errno.ENOSPC, str(path))
    else:
        handle.drain()
        with pytest.warns(RuntimeWarning, match="close after the write"):
            del request


def test_an_interrupted_flush_is_no_error(handle, path, faults):
    faults.set(flush={"error": errno.EINTR})
    assert handle.write(ARRAY, path) == ARRAY.nbytes
    nvmeio.File(path, "w").close()


def test_a_failed_release_is_no_error(handle, path, faults):
    """The kernel does not wait for it, so close(2) cannot report it."""
    faults.set(release={"error": errno.ENOSPC})
    assert handle.write(ARRAY, path) == ARRAY.nbytes
    nvmeio.File(path, "w").close()


def test_a_file_that_nobody_closes_warns(path):
    file = nvmeio.File(path, "w")
    with pytest.warns(RuntimeWarning, match=f"No space left on device: '{path}'"):
        del file


def test_an_open_file_that_is_freed_warns_as_by_io(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(b"abc")
    file = nvmeio.File(path)
    with pytest.warns(
        ResourceWarning, match=f"unclosed file <nvmeio.File '{path}', mode 'rb'"
    ) as warned:
        del file
    assert warned[0].filename == __file__
    nvmeio.save(tmp_path / "array.npy", ARRAY)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nvmeio.File(path).close()
        # These close their files themselves.
        array = nvmeio.ArrayFile(tmp_path / "array.npy")
        del array
        with pytest.raises(FileNotFoundError):
            nvmeio.File(tmp_path / "none")


@pytest.mark.parametrize("over", [io.BufferedReader, io.BufferedRandom, io.TextIOWrapper])
def test_an_open_file_under_a_buffer_warns_as_by_io(tmp_path, over):
    path = tmp_path / "data"
    path.write_bytes(b"abc")
    found = []
    for raw in (io.FileIO(path, "r+"), nvmeio.File(path, "r+")):
        stream = over(io.BufferedRandom(raw) if over is io.TextIOWrapper else raw)
        expected = repr(stream)
        del raw
        with pytest.warns(ResourceWarning) as warned:
            del stream
        found.append([str(each.message) for each in warned])
        assert found[-1] == [f"unclosed file {expected}"]
        assert warned[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with over(io.BufferedRandom(nvmeio.File(path, "r+"))):
            pass


def test_a_request_that_nobody_waits_for_warns(handle, path):
    request = handle.submit_write(ARRAY, path)
    handle.drain()
    with pytest.warns(RuntimeWarning, match="close after the write"):
        del request


def test_a_slow_close_holds_up_no_other_file(open_handle, path, faults):
    handle = open_handle(block_size=BLOCK, queue_depth=DEPTH, workers=1)
    other = path.with_name(f"{path.name}.other.plain")
    other.write_bytes(pattern(PAGE))
    faults.set(flush={"held": True, "error": errno.ENOSPC})
    with nvmeio.File(other) as file:
        request = handle.submit_write(ARRAY, path)
        faults.await_waiting()
        assert not request.done()
        for _ in range(3):
            assert handle.submit_read(bytearray(PAGE), file).wait(timeout=20) == PAGE
        assert not request.done()
        assert handle.pending == 1
        faults.set(flush={"error": errno.ENOSPC})
        assert request.exception().errno == errno.ENOSPC


def test_the_end_of_a_handle_waits_for_closes(open_handle, path, faults):
    handle = open_handle(block_size=BLOCK, queue_depth=DEPTH)
    faults.set(flush={"delay_s": 0.2})
    request = handle.submit_write(ARRAY, path)
    handle.close()
    assert request.done()
    assert left_open(path.parent) == []
