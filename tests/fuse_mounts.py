"""Fixtures that mount FUSE file systems, mainly one with faults, and unmount them."""

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
    """Return whether something is mounted there, even if its server is dead or hangs."""
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    return str(folder) in (line.split()[1] for line in mounts)


def await_mount(server, folder, errors):
    """Wait until a FUSE file system is mounted; raise what it wrote if its server ends."""
    deadline = time.monotonic() + WATCHDOG_S
    while not is_mounted(folder):
        if server.poll() is not None:
            errors.seek(0)
            raise RuntimeError(f"FUSE serves nothing: {errors.read()}")
        assert time.monotonic() < deadline, f"FUSE mounts nothing at {folder}"
        time.sleep(0.01)


def end_server(server, folder):
    """Have a FUSE file system unmounted; raise if that takes force."""
    try:
        # At the end of its standard input it releases every call, unmounts and ends.
        server.communicate(timeout=WATCHDOG_S)
    finally:
        server.kill()
        server.wait()
        left = is_mounted(folder)
        if left:
            # It imports fuse, which may not be installed.
            from faultyfs import unmount_lazily

            unmount_lazily(folder)
    assert not left, f"the server of {folder} has not unmounted it"


@contextlib.contextmanager
def served(script, folder, *arguments):
    """Mount the FUSE file system that a script serves, and yield its process."""
    with contextlib.ExitStack() as stack:
        # Not a pipe: it would be full after some hundred errors that the server logs.
        errors = stack.enter_context(tempfile.TemporaryFile("w+"))
        server = subprocess.Popen(
            [sys.executable, script, folder, *map(str, arguments)],
            env=system_environment(),
            stdin=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        stack.callback(end_server, server, folder)
        await_mount(server, folder, errors)
        yield server


FAULTYFS = Path(__file__).with_name("faultyfs.py")


@functools.cache
def fuse_refusal():
    """Return why FUSE does not work here, or None; tried once."""
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
    """Mount the FUSE file system that a script serves; skip if FUSE does not work."""
    if refusal := fuse_refusal():
        pytest.skip(f"there is no FUSE here: {refusal}")
    with served(script, folder, *arguments):
        yield


@pytest.fixture(scope="session")
def fuse_folder(tmp_path_factory):
    """A folder in which tests set the faults of faultyfs.py."""
    folder = tmp_path_factory.mktemp("faulty")
    with fuse_server(FAULTYFS, folder):
        yield folder


@pytest.fixture(scope="session")
def fuse_kinds(tmp_path_factory):
    """Return folders of faultyfs.py by the kind of file system; each is mounted once."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def folder_of(kind):
            folder = tmp_path_factory.mktemp("kind")
            stack.enter_context(fuse_server(FAULTYFS, folder, kind))
            return folder

        yield folder_of


@pytest.fixture
def faulty(fuse_folder):
    """The folder of the FUSE file system, empty and without faults."""
    empty(fuse_folder)
    yield fuse_folder
    if any(fuse_folder.iterdir()):
        os.setxattr(next(fuse_folder.iterdir()), "user.faults", b"{}")


def empty(folder):
    """Remove all that is in a folder; shutil refuses where inode numbers change."""
    for path in folder.iterdir():
        subprocess.run(["rm", "-r", path], check=True)


@pytest.fixture
def faulty_slots(faulty, monkeypatch):
    """A faulty folder for the file of saved tensors, and the control of its faults.

    The engine is `threads`, because submitting to io_uring would block in FUSE.  The file
    system loses files without a name.
    """
    # They import torch, and extensions that may not be built yet.
    from nvmeio import File, default_handle
    from workloads.common import Faults

    monkeypatch.setenv("NVMEIO_ENGINE", "threads")
    default_handle().close()
    monkeypatch.setattr(
        "nvmeio.torch._offload.slots.unnamed_file",
        lambda folder: File(f"{folder}/slots", "w"),
    )
    (faulty / "control").touch()
    faults = Faults(faulty / "control")
    yield str(faulty), faults
    faults.set()
    gc.collect()
