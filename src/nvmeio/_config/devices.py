"""Find the mount and the block device of a path, and a lasting name for the device.

profile_files.py stores what was measured on a device, by that name.
"""

import hashlib
import os
import pathlib
import re
import stat
from dataclasses import dataclass
from urllib.parse import quote

from nvmeio._arguments.checks import path_of
from nvmeio._arguments.types import Path
from nvmeio._files.descriptors import Descriptor, contents_of, opened

__all__ = ["Device", "device_of"]

_SYS = pathlib.Path("/sys")

# Files in a device's sysfs directory that identify it in any slot, the most reliable first.
# Sources: Documentation/ABI of Linux; drivers/nvme/host/sysfs.c, which makes a wwid from
# model and serial number if the drive has none.
_MARKS = (
    "wwid",
    "device/wwid",
    "dm/uuid",
    "md/uuid",
    "dm/name",
    "loop/backing_file",
)
# Serial numbers, of virtio and old drives, are only unique with the model before them.
_SERIALS = ("serial", "device/serial")

# A file name, including the suffix, has at most 255 bytes.
_IDENTITY_CHARACTERS_MAX = 200


@dataclass(frozen=True)
class Device:
    """The mount and block device of a path."""

    # Mount point, file system type and source; "", "unknown" and "" if the kernel does not
    # report them.
    mount_point: str
    file_system: str
    source: str
    # The whole block device, such as nvme0n1; "" if there is none, as for tmpfs or NFS.
    block: str
    sysfs: pathlib.Path | None  # the directory of that device
    # A name that survives a reboot and is valid as a file name: the device's own
    # identifier, else its model and size, else its kernel name.  Without a block device:
    # type and source of the file system.
    identity: str

    def __str__(self) -> str:
        mounted = f"{self.file_system} at {self.mount_point}"
        return f"{self.block} ({mounted})" if self.block else mounted


def device_of(path: Path, *, sys: pathlib.Path = _SYS) -> Device:
    """Return the device of a path; if it does not exist, that of its nearest parent.

    For the path of a block device, this is that device.
    """
    with _open_nearest(os.fsdecode(path_of(path))) as descriptor:
        found = os.fstat(descriptor)
        point, kind, source = _mount_of(descriptor)
    number = found.st_rdev if stat.S_ISBLK(found.st_mode) else found.st_dev
    block = _block_device(number, source, sys)
    return Device(
        mount_point=point,
        file_system=kind,
        source=source,
        block=block.name if block else "",
        sysfs=block,
        identity=_fit(_identity(block) if block else f"{kind}-{source}"),
    )


def _open_nearest(path: str) -> Descriptor:
    """Open a path, or its nearest existing parent, with O_PATH."""
    while True:
        try:
            return opened(path, os.O_PATH)
        except (FileNotFoundError, NotADirectoryError):
            # The path may be a link to something that does not exist.
            resolved = os.path.realpath(path)
            path = resolved if path != resolved else os.path.dirname(resolved)


def _mount_of(descriptor: int) -> tuple[str, str, str]:
    """Return mount point, type and source of the mount of an open file."""
    try:
        # By the mount's ID, because mount points can be hidden by other mounts.
        about = contents_of(f"/proc/self/fdinfo/{descriptor}")
        mounts = contents_of("/proc/self/mountinfo")
    except FileNotFoundError:
        # For example in a chroot without /proc.
        return "", "unknown", ""
    number = re.search(rb"^mnt_id:\s*(\d+)$", about, re.MULTILINE)
    for line in mounts.splitlines():
        place, _, origin = line.partition(b" - ")
        fields = place.split(b" ")
        if number and fields[0] == number[1]:
            kind, source = origin.split(b" ")[:2]
            return _unescaped(fields[4]), _unescaped(kind), _unescaped(source)
    return "", "unknown", ""


def _unescaped(field: bytes) -> str:
    """Decode a field of mountinfo, where spaces and the like are octal: see proc(5)."""
    octal = rb"\\([0-7]{3})"
    return os.fsdecode(re.sub(octal, lambda found: bytes([int(found[1], 8)]), field))


def _block_device(number: int, source: str, sys: pathlib.Path) -> pathlib.Path | None:
    """Return the sysfs directory of the whole device below a file system."""
    numbers = [number]
    # btrfs files have a device number of their own, which belongs to no block device.
    if source.startswith("/dev/") and os.path.exists(source):
        found = os.stat(source)
        numbers += [found.st_rdev] if stat.S_ISBLK(found.st_mode) else []
    for candidate in numbers:
        link = sys / "dev" / "block" / f"{os.major(candidate)}:{os.minor(candidate)}"
        if link.exists():
            folder = pathlib.Path(os.path.realpath(link))
            # A partition is a subdirectory of its device.
            return folder.parent if (folder / "partition").exists() else folder
    return None


def _identity(block: pathlib.Path) -> str:
    """Return a name for a block device that survives a reboot, if it has any."""
    for mark in _MARKS:
        if text := _text(block / mark):
            return text
    model = _text(block / "device" / "model")
    for mark in _SERIALS:
        if text := _text(block / mark):
            return f"{model} {text}".strip()
    return f"{model} {_text(block / 'size')}" if model else block.name


def _fit(text: str) -> str:
    """Convert text to a file name; texts that differ in more than spaces stay distinct."""
    name = quote("_".join(text.split()), safe="", errors="surrogateescape")
    if len(name) <= _IDENTITY_CHARACTERS_MAX:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()
    return f"{name[: _IDENTITY_CHARACTERS_MAX - len(digest) - 1]}-{digest}"


def _text(path: pathlib.Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
