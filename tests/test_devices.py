"""The device of a path, on real mounts and with simulated folders of sysfs."""

import contextlib
import os
import subprocess
import sys

import pytest

from children import run_tool
from mounts import unmount
from nvmeio._config.devices import device_of

MODEL, SERIAL, WWID = "Some Drive 9", "S123", "eui.0025385c"


@pytest.fixture
def sysfs(tmp_path):
    """A function (name, files, below) that puts tmp_path on a device; returns sysfs.

    ``below`` names a folder in the device's folder, such as a partition; the file system's
    device number leads there.
    """
    top = tmp_path / "sys"

    def make(name, files, below=""):
        folder = top / "devices" / "block" / name
        for file, text in {"size": "2048\n", **files}.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(text)
        number = tmp_path.stat().st_dev
        link = top / "dev" / "block" / f"{os.major(number)}:{os.minor(number)}"
        link.parent.mkdir(parents=True)
        link.symlink_to(folder / below)
        return top

    return make


@pytest.fixture
def mounted(tmp_path):
    """A function (source, folder) that mounts a tmpfs."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    with contextlib.ExitStack() as undo:

        def mount(source, folder):
            folder.mkdir(exist_ok=True)
            try:
                run_tool("mount", "-t", "tmpfs", source, folder)
            except AssertionError as error:
                pytest.skip(f"nothing can be mounted here: {error}")
            undo.callback(unmount, folder)
            return folder

        yield mount


IDENTITIES = {
    "nvme": ({"wwid": f"{WWID}\n", "serial": SERIAL}, WWID),
    "scsi": (
        {"device/wwid": "t10.ATA     Disk  1\n", "device/model": MODEL},
        "t10.ATA_Disk_1",
    ),
    "device mapper": ({"dm/uuid": "LVM-abc\n", "dm/name": "vg-data"}, "LVM-abc"),
    "device mapper without uuid": ({"dm/uuid": "\n", "dm/name": "vg-data\n"}, "vg-data"),
    "raid": ({"md/uuid": "1f6c:22\n"}, "1f6c%3A22"),
    "virtio": ({"serial": f"{SERIAL}\n"}, SERIAL),
    "serial number": (
        {"device/model": f"{MODEL}   \n", "device/serial": f" {SERIAL}\n"},
        "Some_Drive_9_S123",
    ),
    "model": ({"device/model": MODEL, "serial": ""}, "Some_Drive_9_2048"),
    "loop": ({"loop/backing_file": "/a b/c\n"}, "%2Fa_b%2Fc"),
    "nothing": ({"wwid": "\n"}, "disk0"),
}


@pytest.mark.parametrize(("files", "identity"), IDENTITIES.values(), ids=IDENTITIES)
def test_a_device_is_named_by_its_most_reliable_identity(sysfs, tmp_path, files, identity):
    device = device_of(tmp_path, sys=sysfs("disk0", files))
    assert (device.block, device.identity) == ("disk0", identity)
    assert device.sysfs == tmp_path / "sys" / "devices" / "block" / "disk0"


def test_a_partition_belongs_to_its_device(sysfs, tmp_path):
    files = {"wwid": WWID, "disk0p1/partition": "1\n", "disk0p1/size": "1024\n"}
    device = device_of(tmp_path, sys=sysfs("disk0", files, below="disk0p1"))
    assert (device.block, device.identity) == ("disk0", WWID)
    assert device.sysfs.name == "disk0"


def test_an_identity_is_a_valid_file_name(sysfs, tmp_path):
    top = sysfs("disk0", {"wwid": "../\u00e9%" + "x" * 300})
    first = device_of(tmp_path, sys=top).identity
    (tmp_path / f"{first}.json").touch()
    assert first.startswith("..%2F%C3%A9%25xxx")
    (top / "devices/block/disk0/wwid").write_text("../\u00e9%" + "x" * 301)
    second = device_of(tmp_path, sys=top).identity
    assert len(first) == len(second) == 200
    assert first != second


def test_without_a_block_device_the_source_names_it(tmp_path):
    device = device_of(tmp_path, sys=tmp_path / "nothing")
    assert (device.block, device.sysfs) == ("", None)
    assert device.identity.startswith(f"{device.file_system}-")


def test_tmpfs_has_no_device(tmpfs):
    device = device_of(tmpfs / "file")
    assert (device.mount_point, device.file_system) == ("/dev/shm", "tmpfs")
    assert (device.block, device.sysfs) == ("", None)
    assert device.identity == f"tmpfs-{device.source}"
    assert str(device) == "tmpfs at /dev/shm"


def test_a_missing_path_is_on_the_device_of_its_nearest_folder(tmp_path, tmpfs):
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmpfs / "a" / "b")
    here = device_of(tmp_path)
    for path in ("a", "a/b/c", "file", "file/below"):
        assert device_of(tmp_path / path) == here
        assert device_of(os.fsencode(tmp_path / path)) == here
    assert device_of(tmp_path / "dangling") == device_of(tmp_path / "dangling/c")
    assert device_of(tmp_path / "dangling") == device_of(tmpfs) != here


def test_a_relative_path_starts_at_the_current_folder(tmp_path, tmpfs, monkeypatch):
    monkeypatch.chdir(tmpfs)
    for path in (".", "", "a/b", "../nvmeio-none"):
        assert device_of(path).mount_point == "/dev/shm"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a file system")
def test_without_proc_only_the_mount_is_unknown(tmp_path):
    words = "from nvmeio._config.devices import device_of as d; print(d('.').block, d('.'))"
    hidden = 'mount -t tmpfs none /proc && exec "$@"'
    command = ["unshare", "-m", "sh", "-c", hidden, "sh", sys.executable, "-c", words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"{device_of(tmp_path).block} ")
    assert "unknown at" in done.stdout


def test_a_link_in_a_circle_is_an_error(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(OSError, match="symbolic links") as caught:
        device_of(tmp_path / "loop")
    assert caught.value.filename == str(tmp_path / "loop")


def test_mount_points_may_have_any_characters(mounted, tmp_path):
    folder = mounted("its source", tmp_path / "a b\\c\u00e9")
    device = device_of(folder / "x")
    assert (device.mount_point, device.source) == (str(folder), "its source")
    assert device.identity == "tmpfs-its_source"


def test_of_stacked_mounts_the_topmost_counts(mounted, tmp_path):
    hidden = tmp_path / "folder" / "deep"
    hidden.parent.mkdir()
    mounted("deep", hidden)
    mounted("first", hidden.parent)
    mounted("second", hidden.parent)
    (hidden.parent / "deep").mkdir()
    assert device_of(hidden).source == "second"


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs"])
def test_a_file_system_is_on_its_device(loop_mount, kind):
    folder = loop_mount(kind, 512 << 20)
    device = device_of(folder / "x" / "y")
    assert (device.mount_point, device.file_system) == (str(folder), kind)
    assert device.source == f"/dev/{device.block}"
    backing = (device.sysfs / "loop" / "backing_file").read_text().strip()
    assert device.identity == backing.replace("/", "%2F")
    assert str(device) == f"{device.block} ({kind} at {folder})"
    assert device_of(device.source).identity == device.identity
