"""Signals lose no operation: many at once, and Ctrl-C while I/O is held."""

import fcntl
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

import nvmeio
from children import WATCHDOG_S, preloaded, run_child
from helpers import ENGINES, MIB
from mounts import SLOW_PLACES
from nvmeio import files
from nvmeio._memory import available


@pytest.mark.parametrize("engine", ENGINES)
def test_a_storm_of_signals_loses_nothing(tmp_path, engine):
    report = run_child("signal_storm", folder=str(tmp_path), engine=engine).report
    assert report["signals"] > 10
    assert report["engine"] == engine


# FUSE makes even submissions to io_uring and libaio block, so they are interrupted too.
PLACES = [*SLOW_PLACES, ("io_uring", "fuse"), ("libaio", "fuse")]


@pytest.mark.parametrize("size", [4096, 1 << 21])
@pytest.mark.parametrize(("engine", "slow"), PLACES, indirect=["slow"])
def test_ctrl_c_ends_a_wait_and_the_transfer_goes_on(slow, engine, size):
    ways = ["request", "drain", "close", "op", "wait", "as_completed"]
    found = run_child("ctrl_c", **slow, engine=engine, ways=ways, size=size).report
    assert [*found] == ways
    for way, report in found.items():
        assert report["interrupted"], way
        assert report["pending"] == 1, way
        assert report["fired"]["read.held"] > 0, way


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python looks for signals elsewhere")
@pytest.mark.skipif(
    sys.version_info[:2] == (3, 14), reason="CPython's issue 148874: a lock may stay"
)
@pytest.mark.parametrize("part", range(4))
def test_ctrl_c_anywhere_leaves_nothing(tmp_path, part):
    """Each call is interrupted at each of its instructions, and twice at every third."""
    options = {"folder": str(tmp_path), "part": part, "parts": 4}
    found = run_child("interrupt_everywhere", **options).report
    assert {name: report["left"] for name, report in found.items() if report["left"]} == {}
    for name, report in found.items():
        assert report["came"] >= report["places"] / 2, name


# Before Linux 6.18, tmpfs gives back what a call has reserved when a signal comes.
INTERRUPTED = """
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>

int fallocate(int fd, int mode, off_t offset, off_t size)
{
    int (*real)(int, int, off_t, off_t) = dlsym(RTLD_NEXT, "fallocate");

    errno = EINTR;
    return size > (2 << 20) ? -1 : real(fd, mode, offset, size);
}

int fallocate64(int fd, int mode, off_t offset, off_t size)
{
    return fallocate(fd, mode, offset, size);
}
"""
RESERVES = """
import os, sys, nvmeio

with nvmeio.File(sys.argv[1], "w") as file:
    file.preallocate(int(sys.argv[2]))
    print(os.fstat(file.fileno()).st_blocks)
"""


@pytest.mark.packaging
def test_signals_that_keep_coming_let_a_reservation_end(tmp_path):
    size, where = 50 * MIB + 4097, tmp_path / "file"
    done = subprocess.run(
        [sys.executable, "-c", RESERVES, where, str(size)],
        env=preloaded(tmp_path, INTERRUPTED),
        timeout=WATCHDOG_S,
        check=True,
        capture_output=True,
        text=True,
    )
    assert size <= int(done.stdout) * 512 < size + MIB
    assert where.stat().st_size == size


class Flushed:
    """A file object that is interrupted while it is flushed, before a transfer."""

    def __init__(self, path):
        self.file = path.open("r+b")

    def fileno(self):
        return self.file.fileno()

    def flush(self):
        signal.raise_signal(signal.SIGALRM)


DEADLINES = {
    "write_file": (
        (files, "cut"),
        lambda path: nvmeio.write_file(bytes(80), path),
    ),
    "write_file in place": (
        (files, "cut"),
        lambda path: nvmeio.write_file(bytes(80), path, atomic=False, sync=True),
    ),
    "save": ((os, "replace"), lambda path: nvmeio.save(path, np.zeros(10))),
    "raw bytes": ((fcntl, "flock"), lambda path: nvmeio.ArrayFile(path, dtype="i8")),
    "attributes": ((os, "listxattr"), lambda path: nvmeio.write_file(bytes(80), path)),
    "replaceable": ((os, "stat"), lambda path: nvmeio.write_file(bytes(80), path)),
    "preallocate": (
        (os, "fstatvfs"),
        lambda path: nvmeio.File(path, "r+").preallocate(8000),
    ),
    "descriptor": (
        (os, "readlink"),
        lambda path: nvmeio.read_into(bytearray(80), 2**31 - 1),
    ),
    "unsuitable": ((os, "stat"), lambda path: nvmeio.File("/dev/null")),
    "memory": ((available, "_text"), lambda path: available.available_bytes()),
    "op": (None, lambda path: nvmeio.aio_handle().read(bytearray(80), Flushed(path))),
    "op with status": (
        None,
        lambda path: nvmeio.aio_handle(errors="status").read(bytearray(80), Flushed(path)),
    ),
    "op later": (
        None,
        lambda path: nvmeio.aio_handle(errors="status").async_pread(
            bytearray(80), Flushed(path)
        ),
    ),
    "many": (
        None,
        lambda path: nvmeio.default_handle().read_many([(bytearray(80), Flushed(path), 0)]),
    ),
}


@pytest.mark.parametrize("name", DEADLINES)
def test_an_error_of_a_signal_handler_is_raised_as_it_is(tmp_path, monkeypatch, name):
    """A TimeoutError is an OSError, but not the system's: it has no errno."""
    error = TimeoutError("the program's own deadline")

    def handler(*_):
        raise error

    def struck(*args, **options):
        monkeypatch.undo()
        signal.raise_signal(signal.SIGALRM)

    patched, call = DEADLINES[name]
    path = tmp_path / "data"
    np.arange(10).tofile(path)
    before = signal.signal(signal.SIGALRM, handler)
    try:
        if patched:
            monkeypatch.setattr(*patched, struck)
        with pytest.raises(TimeoutError) as caught:
            call(path)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert caught.value is error
    assert os.listdir(tmp_path) == ["data"]


# The first Ctrl-C waits for submitted blocks and drops the others; a second one waits for
# nothing.
@pytest.mark.parametrize("presses", [1, 2])
@pytest.mark.parametrize(("engine", "slow"), PLACES, indirect=["slow"])
def test_ctrl_c_in_a_blocking_call_cancels_its_transfer(slow, engine, presses):
    ways = ["read", "gather", "read_many", "with", "read_into"]
    options = {"engine": engine, "ways": ways, "presses": presses}
    found = run_child("ctrl_c_in_calls", **slow, **options).report
    assert [*found] == ways
    for way, report in found.items():
        assert report["interrupted"], way
        assert report["still_inside"] == [True], way
        assert report["pending"] == presses - 1, way
        assert report["still_held"] == (presses == 2), way
        # The end of a `with` block waits for its requests.
        assert report["dropped"] == (way != "with"), way
        assert report["fired"]["read.held"] > 0, way
        # Exceptions have notes since Python 3.11.
        if presses == 2 and way != "with" and sys.version_info >= (3, 11):
            assert "its memory is in use" in report["notes"][0], way
