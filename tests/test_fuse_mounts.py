"""The FUSE fixtures leave nothing mounted, even if the server dies or hangs."""

import contextlib
import signal
import subprocess

import pytest

import fuse_mounts
from fuse_mounts import FAULTYFS, is_mounted, served


@pytest.fixture
def mountpoint(fuse_folder, tmp_path):
    """A folder where nothing is mounted; skip without FUSE."""
    assert is_mounted(fuse_folder)
    folder = tmp_path / "mounted"
    folder.mkdir()
    yield folder
    assert not is_mounted(folder)


def test_a_server_that_dies_is_an_error(mountpoint):
    with (
        pytest.raises(AssertionError, match="has not unmounted it"),
        served(FAULTYFS, mountpoint) as server,
    ):
        server.kill()


def test_a_server_that_hangs_is_an_error(mountpoint, monkeypatch):
    mounted = contextlib.ExitStack()
    server = mounted.enter_context(served(FAULTYFS, mountpoint))
    server.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(fuse_mounts, "WATCHDOG_S", 1)
    with pytest.raises(subprocess.TimeoutExpired):
        mounted.close()


def test_a_server_that_ends_is_an_error(mountpoint, tmp_path):
    with (
        pytest.raises(RuntimeError, match=r"FUSE serves nothing: .*missing\.py"),
        served(tmp_path / "missing.py", mountpoint),
    ):
        pytest.fail("nothing is served")


def test_a_server_that_mounts_nothing_is_an_error(mountpoint, tmp_path, monkeypatch):
    (tmp_path / "idle.py").write_text("input()")
    monkeypatch.setattr(fuse_mounts, "WATCHDOG_S", 1)
    with (
        pytest.raises(AssertionError, match="FUSE mounts nothing"),
        served(tmp_path / "idle.py", mountpoint),
    ):
        pytest.fail("nothing is served")
