"""Streams that end early leave nothing in flight, and their memory is free."""

import errno
import gc
import os
import signal
import threading

import numpy as np
import pytest

import nvmeio
from helpers import MIB
from nvmeio import File
from nvmeio._streams import pending, reading, writing
from workloads.common import Faults

COUNT = 5
THIRD = 2 * MIB + 100


class StopError(Exception):
    """What the caller's function raises."""


def pieces(path, progress):
    with File(path) as file:
        for number, piece in enumerate(reading.in_pieces(file, COUNT * MIB, MIB, COUNT)):
            progress((number + 1) * len(piece), COUNT * MIB)


def region(path, progress):
    nbytes = np.full(COUNT, MIB)
    place = np.arange(COUNT) * MIB
    with File(path) as file:
        records = reading.Records([file], np.zeros(COUNT, int), place, nbytes, place)
        _, start = reading.into_region(records, COUNT * MIB, 0, "a test")
        reading.read(start, COUNT * MIB, progress, lambda: None)


def stages(path, progress):
    parts = np.ones((COUNT, MIB), np.uint8)
    with File(path, "r+") as file:
        handle = nvmeio.default_handle()
        writing.write(handle, file, parts, COUNT * MIB, progress)


def image(path, progress):
    whole = np.ones(COUNT * MIB, np.uint8)
    with File(path, "r+") as file:
        handle = nvmeio.default_handle()
        writing.write_image(handle, file, whole, lambda block: progress(len(block), 0))


READS, WRITES = (pieces, region), (stages, image)


@pytest.fixture
def path(faulty, monkeypatch):
    """A file of five requests on a file system with faults."""
    monkeypatch.setattr(reading, "CHUNK_BYTES", MIB)
    monkeypatch.setattr(writing, "BLOCK_BYTES", MIB)
    # Submitting to io_uring would block in FUSE.
    monkeypatch.setenv("NVMEIO_ENGINE", "threads")
    nvmeio.default_handle().close()
    path = faulty / "file"
    path.write_bytes(bytes(COUNT * MIB))
    return path


def used():
    gc.collect()
    return nvmeio.pool_stats()["bytes_used"]


@pytest.mark.parametrize("stream", [*READS, *WRITES])
@pytest.mark.parametrize("event", ["error", "ctrl_c", "progress"])
def test_a_stream_that_ends_early_leaves_nothing_in_flight(
    path, monkeypatch, stream, event
):
    (path.parent / "control").touch()
    faults = Faults(path.parent / "control")
    call = "read" if stream in READS else "write"
    # The handle keeps memory of the pool for bounces.
    stream(path, lambda *_: None)
    before = used()

    def progress(*_):
        if event == "progress":
            raise stop

    if event == "error":
        faults.set(**{call: {"error": errno.EIO, "at": THIRD}})
        with pytest.raises(OSError, match="Input/output error") as caught:
            stream(path, progress)
        assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(path))
    elif event == "progress":
        stop = StopError()
        with pytest.raises(StopError) as caught:
            stream(path, progress)
        assert caught.value is stop
        # Its traceback refers to the frames of the stream.
        stop.__traceback__ = None
    else:
        faults.set(**{call: {"held": True, "at": THIRD}})
        abandon = pending.Pending.abandon

        def release(self):
            faults.set()
            abandon(self)

        def press():
            faults.await_waiting()
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

        monkeypatch.setattr(pending.Pending, "abandon", release)
        pressing = threading.Thread(target=press)
        pressing.start()
        with pytest.raises(KeyboardInterrupt) as caught:
            stream(path, progress)
        pressing.join()
    assert nvmeio.default_handle().pending == 0
    del caught
    assert used() == before
    faults.set()
    stream(path, lambda *_: None)
    assert os.path.getsize(path) == COUNT * MIB
