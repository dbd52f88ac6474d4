"""Failing drives under model files: an OSError with the file, and no leftovers."""

import ctypes
import errno
import gc
import os
import re
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("safetensors")

import safetensors.numpy

import nvmeio
import nvmeio.safetensors.numpy
from children import run_with_faults
from helpers import MIB
from model_samples import bits_of_all, in_flight, outcome
from nvmeio._streams import reading, writing
from nvmeio.safetensors import (
    _open,
    load_sharded,
    safe_open,
    save_sharded,
)
from workloads.common import Faults

SIZE = 12 * MIB


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
    """Use small parts for reading and writing, because these files are small."""
    monkeypatch.setattr(reading, "CHUNK_BYTES", 8 * MIB)
    monkeypatch.setattr(_open, "BATCH_BYTES", 8 * MIB)
    monkeypatch.setattr(writing, "STAGES", 4)


@pytest.fixture(scope="module")
def arrays():
    """Arrays of two chunks."""
    numbers = np.random.default_rng(1)
    return {f"{n:02}": numbers.integers(0, 256, SIZE // 12, np.uint8) for n in range(12)}


@pytest.fixture
def path(faulty, arrays):
    """The file of the arrays, for which faults can be set."""
    path = faulty / "model.safetensors"
    nvmeio.safetensors.numpy.save_file(arrays, path, sync=False)
    return path


def memory_bytes():
    """Return the memory of this process, without stacks and idle memory of the pool."""
    gc.collect()
    # Free memory below what is still in use.
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    pool = nvmeio.pool_stats()
    anonymous = int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) * 1024
    return anonymous - pool["bytes_mapped"] + pool["bytes_used"]


def await_memory(limit):
    """Wait until the memory is below a limit: workers keep their bounces for a second."""
    deadline = time.monotonic() + 30
    while memory_bytes() >= limit:
        assert time.monotonic() < deadline, f"{memory_bytes()} bytes; {limit} is the limit"
        time.sleep(0.05)


def read_all(way, path, direct, arrays):
    """Read a whole file in one of several ways."""
    if way == "load_file":
        return nvmeio.safetensors.numpy.load_file(path, direct=direct)
    if way == "out":
        out = {name: np.zeros_like(array) for name, array in arrays.items()}
        return nvmeio.safetensors.numpy.load_file(path, direct=direct, out=out)
    if way == "load_sharded":
        return load_sharded(path.parent, framework="np", direct=direct)
    with safe_open(path, "np", direct=direct) as file:
        if way == "get_many":
            return file.get_many(dict.fromkeys(file.offset_keys()))
        return {name: file.get_tensor(name) for name in file.offset_keys()}


WAYS = ["load_file", "out", "load_sharded", "get_many", "get_tensor"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("at", [MIB, SIZE // 2, SIZE - 1])
def test_bytes_that_cannot_be_read_are_an_error(
    path, arrays, default_engine, way, direct, at
):
    # Make everything that is made once before memory is compared.
    read_all(way, path, direct, arrays)
    before = memory_bytes()
    Faults(path).set(read={"error": errno.EIO, "at": at})
    # The header is cached already.
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with pytest.raises(OSError, match=re.escape(str(path))) as caught:
        read_all(way, path, direct, arrays)
    assert caught.value.errno == errno.EIO
    assert str(caught.value.filename) == str(path)
    assert in_flight() == 0
    del caught
    await_memory(before + SIZE // 2)
    Faults(path).set()
    assert bits_of_all(read_all(way, path, direct, arrays)) == bits_of_all(arrays)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("direct", [True, False])
def test_short_reads_are_continued_or_an_error(path, arrays, default_engine, way, direct):
    Faults(path).set(read={"short": 20_000, "times": 20})
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    found = outcome(read_all, way, path, direct, arrays)
    if isinstance(found, tuple):
        # FUSE treats a short read as the end of the file.
        assert found[0] in ("OSError", "SafetensorError")
        assert str(path) in found[1]
    else:
        assert bits_of_all(found) == bits_of_all(arrays)
    assert in_flight() == 0


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(
    ("fault", "error"),
    [
        *(({"write": {"error": errno.EIO, "at": at}}, "EIO") for at in (0, MIB, SIZE - 1)),
        ({"write": {"full_at": SIZE // 2}}, "ENOSPC"),
        ({"fsync": {"error": errno.EIO}}, "EIO"),
    ],
    ids=str,
)
def test_bytes_that_cannot_be_written_leave_the_old_file(
    path, arrays, default_engine, sharded, fault, error
):
    before, names = path.read_bytes(), os.listdir(path.parent)
    new = {name: array ^ 255 for name, array in arrays.items()}
    Faults(path).set(**fault)

    def save():
        if sharded:
            save_sharded(new, path.parent, metadata={})
        else:
            nvmeio.safetensors.numpy.save_file(new, path)

    with pytest.raises(OSError, match=re.escape(str(path))) as caught:
        save()
    assert errno.errorcode[caught.value.errno] == error
    assert str(caught.value.filename) == str(path)
    assert nvmeio.default_handle().pending == 0
    Faults(path).set()
    assert os.listdir(path.parent) == names
    assert path.read_bytes() == before


def test_short_writes_are_continued(faulty, arrays, default_engine):
    (faulty / "control").touch()
    Faults(faulty / "control").set(write={"short": 5000, "times": 30})
    nvmeio.safetensors.numpy.save_file(arrays, faulty / "model")
    assert Faults(faulty / "control").fired()["write.short"] == 30
    found = safetensors.numpy.load_file(faulty / "model")
    assert bits_of_all(dict(sorted(found.items()))) == bits_of_all(arrays)


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory):
    """A file that children read in two parts."""
    path = tmp_path_factory.mktemp("disk") / "model"
    numbers = np.random.default_rng(1)
    data = {f"{n}": numbers.integers(0, 256, 5 * MIB, np.uint8) for n in range(9)}
    safetensors.numpy.save_file(data, path)
    return path


@pytest.mark.parametrize("engine", ["threads", "sync"])
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(
    ("fault", "ends"),
    [
        ("EIO:when=2", "OSError: [Errno 5] Input/output error"),
        ("EINTR:when=1..4", "ok"),
    ],
)
def test_system_calls_that_fail_on_a_real_disk(on_disk, engine, direct, fault, ends):
    options = {"path": str(on_disk), "direct": direct, "env": {"NVMEIO_ENGINE": engine}}
    fault = f"pread64:error={fault}"
    said, same, pending = run_with_faults(
        "load_with", fault, only=on_disk, **options
    ).report
    assert said.startswith(ends)
    assert said == "ok" or said.endswith(f": '{on_disk}'")
    assert (same, pending) == (True, 0)


@pytest.mark.parametrize(
    ("engine", "fault"),
    [
        ("io_uring", "io_uring_enter:error=EINTR:when=1+2"),
        ("io_uring", "io_uring_enter:error=EIO:when=2"),
        ("libaio", "io_submit:error=EAGAIN:when=1+2"),
    ],
)
def test_passing_faults_are_retried(on_disk, engine, fault):
    options = {"path": str(on_disk), "direct": True, "env": {"NVMEIO_ENGINE": engine}}
    assert run_with_faults("load_with", fault, **options).report == ["ok", True, 0]
