"""The file systems on which stress tests run, each set up once a session."""

import contextlib
from dataclasses import dataclass
from pathlib import Path

import pytest

from helpers import MIB
from mounts import device_maker, mount_new, tmpfs_folder

# File systems on loop devices, with the size of sectors.
MOUNTED = {
    "ext4": ("ext4", 512),
    "xfs": ("xfs", 512),
    "btrfs": ("btrfs", 512),
    "sectors-of-4096": ("ext4", 4096),
}
PLACES = (*MOUNTED, "tmpfs", "fuse")

# The minimum of mkfs.xfs.
DEVICE_BYTES = 320 * MIB


# First, because tests/conftest.py puts tests that mount into one group.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Run all tests of a place in one process."""
    for item in items:
        name = item.callspec.params.get("place") if hasattr(item, "callspec") else None
        if name in PLACES:
            item.add_marker(pytest.mark.xdist_group(name))


@dataclass(frozen=True)
class Place:
    """A folder; `control` is the file by which the faults of FUSE are set."""

    name: str
    folder: Path
    control: Path | None = None


@pytest.fixture(scope="session", params=PLACES)
def place(request, tmp_path_factory):
    """Each place in turn; the last one is taken down before the next is set up."""
    name = request.param
    if name == "fuse":
        folder = request.getfixturevalue("fuse_folder")
        control = folder / "control"
        control.touch()
        yield Place(name, folder, control)
        control.unlink(missing_ok=True)
        return
    with contextlib.ExitStack() as stack:
        if name == "tmpfs":
            folder = stack.enter_context(tmpfs_folder())
        else:
            request.getfixturevalue("loop_devices")
            parent = tmp_path_factory.mktemp(name)
            kind, sector = MOUNTED[name]
            device = stack.enter_context(device_maker(parent))(DEVICE_BYTES, sector)
            folder = parent / "mount"
            mount_new(kind, device, folder, sector=sector)
        yield Place(name, folder)
