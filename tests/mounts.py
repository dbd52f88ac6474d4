"""Fixtures that mount file systems on loop devices, or only for one command.

Everything is taken down after the test.  Leftovers of a killed run are found by their names
and taken down first.
"""

import contextlib
import functools
import gc
import json
import os
import re
import tempfile
import time
from pathlib import Path

import pytest

from children import WATCHDOG_S, find_tool, run_tool

MIB = 1 << 20
# As small as mkfs makes them; ext4 could be smaller.
SIZES_MIN = {"ext4": 64 * MIB, "xfs": 320 * MIB, "btrfs": 128 * MIB}

# Names of our backing files of loop devices; the number is the process that made them.
IMAGE_NAME = re.compile(r"nvmeio-loop-(\d+)-\w+\.img")


@contextlib.contextmanager
def overlay(lower, folder):
    """Mount overlayfs over a folder, with its other folders in `folder`; yield the path."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    upper, work, merged = (folder / name for name in ("upper", "work", "merged"))
    for each in (upper, work, merged):
        each.mkdir()
    layers = f"lowerdir={lower},upperdir={upper},workdir={work}"
    try:
        run_tool("mount", "-t", "overlay", "-o", layers, "overlay", merged)
    except AssertionError as error:
        pytest.skip(f"nothing can be mounted here: {error}")
    try:
        yield merged
    finally:
        unmount(merged)


def unmount(folder, patience_s=WATCHDOG_S):
    """Unmount, once the kernel has finished the I/O of processes that have ended."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return run_tool("umount", folder)
        except AssertionError as error:
            if "busy" not in str(error) or time.monotonic() > deadline:
                raise
            # An error that pytest.raises() keeps has frames with files, in a cycle.
            gc.collect()
            time.sleep(0.05)


def backing_file(device):
    """Return the path of a loop device's file, or None if it has none."""
    try:
        return Path("/sys/block", Path(device).name, "loop/backing_file").read_text()
    except FileNotFoundError:
        return None


def take_down(device, patience_s=WATCHDOG_S):
    """Unmount a loop device wherever it is mounted, and detach it.

    A process of another test that has its own mount namespace may have copied the mount.
    Until that process ends, the file system is still mounted there, the device is not free,
    and xfs refuses to mount another image with the same UUID.
    """
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    for source, folder in (line.split()[:2] for line in mounts):
        if source == device:
            unmount(folder, patience_s)
    used = backing_file(device)
    run_tool("losetup", "--detach", device)
    deadline = time.monotonic() + patience_s
    while used is not None and backing_file(device) == used:
        assert time.monotonic() < deadline, f"{device} is still mounted somewhere"
        time.sleep(0.01)


def take_down_leftovers():
    """Take down what test processes that have ended left behind."""
    listed = json.loads(run_tool("losetup", "--list", "--json") or '{"loopdevices": []}')
    for entry in listed["loopdevices"]:
        found = IMAGE_NAME.search(entry["back-file"] or "")
        if found and not os.path.exists(f"/proc/{found[1]}"):
            # A living child may still use it; then a later run takes it down.
            with contextlib.suppress(AssertionError):
                take_down(entry["name"], patience_s=1)


def image_name(number):
    """Return the name of a backing file, by which leftovers can be found."""
    return f"nvmeio-loop-{os.getpid()}-{number}.img"


def make_image(folder, number, size):
    """Make a sparse file for a loop device."""
    image = folder / image_name(number)
    with open(image, "wb") as file:
        file.truncate(size)
    return image


def set_up(image, *options):
    """Make a loop device of a file, and return its path."""
    return run_tool("losetup", "--find", "--show", *options, image).strip()


@functools.cache
def loop_refusal():
    """Return why loop devices cannot be used here, or None; tried once."""
    if os.geteuid() != 0:
        return "loop devices need root"
    if not os.path.exists("/dev/loop-control"):
        return "there are no loop devices here"
    with tempfile.TemporaryDirectory() as folder:
        image = make_image(Path(folder), "tried", MIB)
        try:
            device = set_up(image)
        except AssertionError as error:
            return f"loop devices cannot be made here: {error}"
        take_down(device)
    return None


@pytest.fixture(scope="session")
def loop_devices():
    """Skip if loop devices cannot be used here."""
    if refusal := loop_refusal():
        pytest.skip(refusal)
    take_down_leftovers()


@contextlib.contextmanager
def device_maker(folder):
    """Yield a function (size, sector) that makes a loop device, and returns its path."""
    made = []

    def make(size, sector=512):
        image = make_image(folder, len(made), size)
        made.append(set_up(image, "--direct-io=on", "--sector-size", sector))
        return made[-1]

    try:
        yield make
    finally:
        for device in made:
            take_down(device)


@pytest.fixture
def loop_device(loop_devices, tmp_path):
    """A function (size, sector) that makes a loop device, and returns its path."""
    with device_maker(tmp_path) as make:
        yield make


def make_and_mount(
    kind, device, folder, sector=512, options="defaults", block=None, features=None
):
    """Make a file system on a device, and mount it with these options.

    `block` is the size of a block of xfs; `features` are of ext4.
    """
    made = {"ext4": ["-q", "-m", "0"], "xfs": ["-q"], "btrfs": ["-q"]}[kind]
    made += ["-O", features] if features else []
    if kind == "xfs":
        made += ["-s", f"size={sector}"]
        made += ["-b", f"size={block}"] if block else []
    run_tool(f"mkfs.{kind}", *made, device)
    folder.mkdir()
    run_tool("mount", "-t", kind, "-o", options, device, folder)


@functools.cache
def mount_refusal(kind):
    """Return why such a file system cannot be mounted here, or None; tried once."""
    if find_tool(f"mkfs.{kind}") is None:
        return f"mkfs.{kind} is not installed"
    with tempfile.TemporaryDirectory() as name, device_maker(Path(name)) as make:
        try:
            make_and_mount(kind, make(SIZES_MIN[kind]), Path(name) / "mount")
        except AssertionError as error:
            return f"the kernel does not mount {kind}: {error}"
    return None


def need_mount(kind):
    """Skip if such a file system cannot be mounted."""
    if refusal := mount_refusal(kind):
        pytest.skip(refusal)


def mount_new(kind, device, folder, **options):
    """Make a file system on a device, and mount it; skip if that does not work here."""
    need_mount(kind)
    make_and_mount(kind, device, folder, **options)


@pytest.fixture
def loop_mount(loop_device, tmp_path):
    """A function (kind, size, sector) that mounts a new file system; returns its folder."""

    def mount(kind, size, sector=512):
        folder = tmp_path / f"mount-{kind}"
        mount_new(kind, loop_device(size, sector), folder, sector=sector)
        return folder

    return mount


class Filler:
    """Files that fill a file system, and free it block by block.

    Parameters
    ----------
    folder : pathlib.Path
        Where they are.
    """

    def __init__(self, folder):
        self.path, block = folder / "filler", 4096
        for size in (MIB, 64 * 1024, block):
            with open(self.path, "ab") as file, contextlib.suppress(OSError):
                while True:
                    os.posix_fallocate(file.fileno(), file.tell(), size)
                    file.seek(0, os.SEEK_END)
                    os.fsync(file.fileno())
        self.block = block

    def shrink(self):
        """Free one more block."""
        os.truncate(self.path, self.path.stat().st_size - self.block)
        run_tool("sync", "--file-system", self.path)


def bind_prefix(script, path):
    """Return a command prefix that runs a script in its own mount namespace first."""
    return ["unshare", "--mount", "sh", "-c", f'{script} && exec "$@"', path]


@functools.cache
def bind_refusal():
    """Return why no command can have its own mounts here, or None; tried once."""
    if os.geteuid() != 0:
        return "only root can mount a file system"
    with tempfile.TemporaryDirectory() as folder:
        try:
            run_tool(*bind_prefix('mount --bind "$0" "$0"', folder), "true")
        except AssertionError as error:
            return f"nothing can be mounted here: {error}"
    return None


def with_mounts(script, path):
    """Return a prefix for a command with mounts that only this command sees.

    The script, with `path` as $0, makes the mounts.
    """
    if refusal := bind_refusal():
        pytest.skip(refusal)
    return bind_prefix(script, path)


def with_file(folder, path, text):
    """Return a prefix for a command that finds another text in a file.

    A sysctl is global, so a file in `folder` is mounted over it.
    """
    replacement = folder / os.path.basename(path)
    replacement.write_text(text)
    return with_mounts(f'mount --bind "$0" {path}', replacement)


def with_read_only(folder):
    """Return a prefix for a command that may only read below a folder."""
    return with_mounts('mount --bind "$0" "$0" && mount -o remount,bind,ro "$0"', folder)


@pytest.fixture
def slow_disk(loop_devices, faulty, tmp_path):
    """A file system on a loop device whose backing file is in the FUSE file system.

    I/O that FUSE holds or delays is then in flight in the block layer, after io_uring and
    libaio have submitted it.  On FUSE itself their submissions would block.
    """
    need_mount("ext4")
    image = make_image(faulty, "slow", 32 * MIB)
    device = set_up(image)
    folder = tmp_path / "slow"
    folder.mkdir()
    try:
        # No journal and no access times, which would be written while faults are set.
        run_tool("mkfs.ext4", "-q", "-O", "^has_journal", device)
        run_tool("mount", "-o", "noatime", device, folder)
        yield folder, image
    finally:
        os.setxattr(image, "user.faults", b"{}")
        take_down(device)


# File systems on which blocks stay in flight for as long as a test wants.
SLOW_PLACES = (
    ("io_uring", "disk"),
    ("libaio", "disk"),
    ("threads", "fuse"),
    ("sync", "fuse"),
)


@pytest.fixture
def slow(request):
    """A folder and the file whose attribute makes it slow, as arguments of workloads."""
    if request.param == "disk":
        folder, control = request.getfixturevalue("slow_disk")
    else:
        folder = request.getfixturevalue("faulty")
        control = folder / "control"
        control.touch()
    return {"folder": str(folder), "control": str(control)}


@contextlib.contextmanager
def tmpfs_folder():
    """Make a folder on tmpfs, and remove it with its files at the end."""
    folder = Path("/dev/shm")
    kinds = [
        line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()
    ]
    if [str(folder), "tmpfs"] not in kinds:
        pytest.skip("/dev/shm is no tmpfs")
    path = folder / f"nvmeio-{os.getpid()}"
    path.mkdir()
    try:
        yield path
    finally:
        with contextlib.suppress(FileNotFoundError):
            for file in path.iterdir():
                file.unlink()
            path.rmdir()


@pytest.fixture
def tmpfs():
    """A folder on tmpfs."""
    with tmpfs_folder() as folder:
        yield folder
