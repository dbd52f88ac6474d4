"""Fixtures that mount by FUSE, above all a file system with faults; none is left behind."""

import contextlib
import ctypes.util
import functools
import gc
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from children import WATCHDOG_S, system_environment


def is_mounted(folder):
    """Whether something is mounted there, also by a server that is dead or hangs."""
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    return str(folder) in (line.split()[1] for line in mounts)


def await_mount(server, folder):
    """Wait until a FUSE file system is mounted; that its server has ended is an error."""
    deadline = time.monotonic() + WATCHDOG_S
    while not is_mounted(folder):
        if server.poll() is not None:
            raise RuntimeError(f"FUSE serves nothing: {server.stderr.read()}")
        assert time.monotonic() < deadline, f"FUSE mounts nothing at {folder}"
        time.sleep(0.01)


def end_server(server, folder):
    """Have a FUSE file system unmounted, by force if need be, which is an error."""
    try:
        # Its standard input ends: it lets every call go, unmounts and ends.
        server.communicate(timeout=WATCHDOG_S)
    finally:
        server.kill()
        server.wait()
        left = is_mounted(folder)
        if left:
            # It imports fuse, which is not everywhere.
            from faultyfs import unmount_lazily

            unmount_lazily(folder)
    assert not left, f"the server of {folder} has not unmounted it"


@contextlib.contextmanager
def served(script, folder, *arguments):
    """Mount the FUSE file system that a script serves, by a process that is yielded."""
    server = subprocess.Popen(
        [sys.executable, script, folder, *map(str, arguments)],
        env=system_environment(),
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with contextlib.ExitStack() as stack:
        stack.callback(end_server, server, folder)
        await_mount(server, folder)
        yield server


FAULTYFS = Path(__file__).with_name("faultyfs.py")


@functools.cache
def fuse_refusal():
    """Return why there is no FUSE here, tried once, or None."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse cannot be opened"
    if importlib.util.find_spec("fuse") is None or not ctypes.util.find_library("fuse"):
        return "fusepy or libfuse2 is not installed"
    with tempfile.TemporaryDirectory() as folder:
        try:
            with served(FAULTYFS, folder):
                return None
        except RuntimeError as error:
            return str(error).strip().splitlines()[-1]


@contextlib.contextmanager
def fuse_server(script, folder, *arguments):
    """Mount the FUSE file system that a script serves; a skip where FUSE is refused."""
    if refusal := fuse_refusal():
        pytest.skip(f"there is no FUSE here: {refusal}")
    with served(script, folder, *arguments):
        yield


@pytest.fixture(scope="session")
def fuse_folder(tmp_path_factory):
    """A folder in which tests set faults, as faultyfs.py says."""
    folder = tmp_path_factory.mktemp("faulty")
    with fuse_server(FAULTYFS, folder):
        yield folder


@pytest.fixture
def faulty(fuse_folder):
    """The folder of the FUSE file system, empty and without faults."""
    for path in fuse_folder.iterdir():
        path.unlink()
    yield fuse_folder
    if any(fuse_folder.iterdir()):
        os.setxattr(next(fuse_folder.iterdir()), "user.faults", b"{}")


@pytest.fixture
def faulty_slots(faulty, monkeypatch):
    """A folder with faults, and their control, for the file of saved tensors.

    Only threads may wait in FUSE: what submits to io_uring would.  It forgets files without
    a name.
    """
    # They import torch, and what has not been built.
    from nvmeio import File
    from workloads.common import Faults

    monkeypatch.setenv("NVMEIO_ENGINE", "threads")
    monkeypatch.setattr(
        "nvmeio.torch._offload.slots._unnamed", lambda folder: File(f"{folder}/slots", "w")
    )
    (faulty / "control").touch()
    faults = Faults(faulty / "control")
    yield str(faulty), faults
    faults.set()
    gc.collect()
