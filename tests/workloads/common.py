"""Shared by workloads: reports to the parent, files, checked transfers."""

import contextlib
import errno
import json
import logging
import os
import sys
import time
from pathlib import Path

import numpy as np

from helpers import Guarded, cool, pattern

# PF_EXITING, of a thread that is ending (include/linux/sched.h, proc(5)).
PF_EXITING = 0x4


def report(value):
    """Send a report to the parent."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def pause():
    """Wait until the parent says go."""
    report("ready")
    sys.stdin.readline()


def errors_of(function, *args):
    """Call a function; return "ok" or the name of the errno of its OSError."""
    try:
        function(*args)
    except OSError as error:
        return errno.errorcode[error.errno]
    return "ok"


def make_file(path, size, seed=0):
    """Write a file of random bytes without nvmeio, and return its bytes.

    Reads then go to the drive, because the page cache does not have it.
    """
    data = pattern(size, seed)
    with open(path, "wb") as file:
        file.write(data)
    cool(path)
    return data


def thread_count():
    """Return the number of our threads, without the kernel's threads of rings.

    A joined thread may still be listed for a moment, as exiting.
    """
    count = 0
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/stat") as file:
            name, _, rest = file.read().partition("(")[2].rpartition(")")
            flags = int(rest.split()[6])
            count += not (name.startswith("iou-") or flags & PF_EXITING)
    return count


def descriptor_count():
    """Return how many descriptors are open, including that of the listing."""
    return len(os.listdir("/proc/self/fd"))


class Records(logging.Handler):
    """Keeps the messages of nvmeio's logger."""

    def __init__(self):
        super().__init__()
        self.lines = []
        logging.getLogger("nvmeio").addHandler(self)

    def emit(self, record):
        self.lines.append(record.getMessage())


class Faults:
    """The faults of the FUSE file system of a file."""

    def __init__(self, path):
        self.path = path

    def set(self, **faults):
        """Replace the faults of all calls."""
        os.setxattr(self.path, "user.faults", json.dumps(faults).encode())

    def fired(self):
        """Return how often each fault has struck."""
        return json.loads(os.getxattr(self.path, "user.fired"))

    def waiting(self):
        """Return how many calls are held."""
        return int(os.getxattr(self.path, "user.waiting"))

    def await_waiting(self, count=1):
        """Wait until `count` calls are held; fail before the file system releases them."""
        deadline = time.monotonic() + 20
        while self.waiting() < count:
            assert time.monotonic() < deadline, f"{count} calls should be held"
            time.sleep(0.01)


def read_checked(handle, path, data, offset=0, skew=0):
    """Read with submit_read, and assert contents and guards."""
    guarded = Guarded(len(data), skew)
    assert handle.submit_read(guarded.array, path, offset).wait() == len(data)
    assert guarded.content() == data


def gather_checked(handle, path, data, records=64):
    """Gather every other KiB, last first, in the calling thread."""
    offsets = np.arange(records)[::-1].copy() * 2048
    guarded = Guarded(records * 1024, 3)
    assert handle.gather(path, offsets, 1024, guarded.array) == records * 1024
    expected = b"".join(data[offset : offset + 1024] for offset in offsets)
    assert guarded.content() == expected


def write_checked(handle, path, data):
    """Write with submit_write, and assert what an ordinary read finds."""
    assert handle.submit_write(data, path).wait() == len(data)
    assert Path(path).read_bytes() == data


def read_small(handle, path, data):
    """Read synchronously, in the caller's thread."""
    guarded = Guarded(len(data))
    handle.read(guarded.array, path)
    assert guarded.content() == data
