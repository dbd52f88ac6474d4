"""What tests of ``nvmeio cp`` share: files to be copied, and copies that are under way."""

import contextlib
import subprocess
import time

import pytest

from children import WATCHDOG_S
from commands import command
from helpers import MIB
from workloads.common import make_file

# Two pieces and a bit; and more than all buffers hold.
SIZE = 9 * MIB + 777
LARGE = 37 * MIB + 777

# A read, but not the one by which O_DIRECT is tried out.
HELD = {"held": True, "at": 9 * MIB}


@contextlib.contextmanager
def running(*arguments, **options):
    """A copy that is under way; at the end it must end by itself."""
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
    """Wait until the file that is to become the copy is there."""
    deadline = time.monotonic() + WATCHDOG_S
    while time.monotonic() < deadline:
        found = list(folder.glob(".nvmeio-*.tmp"))
        if found:
            return found[0]
        time.sleep(0.005)
    raise AssertionError("no copy has begun")


@pytest.fixture
def source(tmp_path):
    """A file to be copied, in a folder of its own."""
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
