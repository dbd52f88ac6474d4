"""Shared by the tests of ``nvmeio cp``: files to copy, and copies in progress."""

import contextlib
import subprocess
import time

import pytest

from children import WATCHDOG_S
from commands import command
from helpers import MIB
from workloads.common import make_file

# A little more than two pieces; and more than all buffers hold.
SIZE = 9 * MIB + 777
LARGE = 37 * MIB + 777

# A read other than the one that probes O_DIRECT.
HELD = {"held": True, "at": 9 * MIB}


@contextlib.contextmanager
def running(*arguments, **options):
    """Start a copy; after the block it must end by itself."""
    process = subprocess.Popen(
        command("cp", *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )
    try:
        yield process
        process.communicate(timeout=WATCHDOG_S)
    finally:
        process.kill()
        process.wait()


def temporary_in(folder):
    """Wait until the temporary file of the copy exists."""
    deadline = time.monotonic() + WATCHDOG_S
    while time.monotonic() < deadline:
        found = list(folder.glob(".nvmeio-*.tmp"))
        if found:
            return found[0]
        time.sleep(0.005)
    raise AssertionError("no copy has begun")


@pytest.fixture
def source(tmp_path):
    """A file to copy, in a folder of its own."""
    folder = tmp_path / "from"
    folder.mkdir()
    path = folder / "source"
    make_file(path, SIZE)
    return path


@pytest.fixture
def slow_source(faulty):
    """A file in the FUSE file system, whose reads can be held: HELD."""
    make_file(faulty / "source", 16 * MIB)
    return faulty / "source"
