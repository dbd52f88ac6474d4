"""What a path lies on: its mount, and the block device below, by a name that lasts.

Measures nothing and keeps nothing; what was measured on a device is kept by profiles.py.
"""

import hashlib
import os
import pathlib
import re
import stat
from dataclasses import dataclass
from urllib.parse import quote

from nvmeio._arguments.types import Path

__all__ = ["Device", "device_of"]

_SYS = pathlib.Path("/sys")

# Files in the folder of a device that name it wherever it is plugged in, the surest first.
# Sources: Documentation/ABI of Linux; drivers/nvme/host/sysfs.c, which makes a wwid of the
# model and the serial number where the drive has none.
_MARKS = (
    "wwid",
    "device/wwid",
    "dm/uuid",
    "md/uuid",
    "dm/name",
    "loop/backing_file",
)
# Of one maker they are unique, so the model goes before; of virtio and of old drives.
_SERIALS = ("serial", "device/serial")

# With a suffix a name of a file, which has 255 bytes at most.
_IDENTITY_CHARACTERS_MAX = 200


@dataclass(frozen=True)
class Device:
    """What a path lies on."""

    # Where it is mounted, of which type, and from what; "", "unknown" and "" where the
    # kernel does not say.
    mount_point: str
    file_system: str
    source: str
    # The whole block device, such as nvme0n1; "" where there is none, as for tmpfs or a
    # network.
    block: str
    sysfs: pathlib.Path | None  # that device's folder
    # Names it after a reboot too, and is fit for the name of a file: what the device says
    # of itself, or else its model and size, or else its name; without a block device the
    # type of the file system and its source.
    identity: str

    def __str__(self) -> str:
        mounted = f"{self.file_system} at {self.mount_point}"
        return f"{self.block} ({mounted})" if self.block else mounted


def device_of(path: Path, *, sys: pathlib.Path = _SYS) -> Device:
    """Find what a path lies on, or its nearest folder where it does not exist.

    A block device stands for itself.
    """
    descriptor = _open_nearest(os.fsdecode(path))
    try:
        found = os.fstat(descriptor)
        point, kind, source = _mount_of(descriptor)
    finally:
        os.close(descriptor)
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


def _open_nearest(path: str) -> int:
    """Open a path, or what is nearest above it, neither to read nor to write."""
    while True:
        try:
            return os.open(path, os.O_PATH | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            # A link may lead to what does not exist.
            resolved = os.path.realpath(path)
            path = resolved if path != resolved else os.path.dirname(resolved)


def _mount_of(descriptor: int) -> tuple[str, str, str]:
    """Return where, of which type and from what the mount of an open file is."""
    try:
        # The number of the mount is surer than the path: mounts may hide others.
        about = pathlib.Path(f"/proc/self/fdinfo/{descriptor}").read_bytes()
        mounts = pathlib.Path("/proc/self/mountinfo").read_bytes()
    except FileNotFoundError:
        # In a chroot without /proc.
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
    """Return a field of mountinfo, where spaces and the like are octal: see proc(5)."""
    octal = rb"\\([0-7]{3})"
    return os.fsdecode(re.sub(octal, lambda found: bytes([int(found[1], 8)]), field))


def _block_device(number: int, source: str, sys: pathlib.Path) -> pathlib.Path | None:
    """Return the folder in sysfs of the whole device behind a file system."""
    numbers = [number]
    # btrfs has a number of its own, which belongs to no device.
    if source.startswith("/dev/") and os.path.exists(source):
        found = os.stat(source)
        numbers += [found.st_rdev] if stat.S_ISBLK(found.st_mode) else []
    for candidate in numbers:
        link = sys / "dev" / "block" / f"{os.major(candidate)}:{os.minor(candidate)}"
        if link.exists():
            folder = pathlib.Path(os.path.realpath(link))
            # A partition lies in the folder of its device.
            return folder.parent if (folder / "partition").exists() else folder
    return None


def _identity(block: pathlib.Path) -> str:
    """Return what names a block device after a reboot too, as far as there is anything."""
    for mark in _MARKS:
        if text := _text(block / mark):
            return text
    model = _text(block / "device" / "model")
    for mark in _SERIALS:
        if text := _text(block / mark):
            return f"{model} {text}".strip()
    return f"{model} {_text(block / 'size')}" if model else block.name


def _fit(text: str) -> str:
    """Return a text as the name of a file; what differs in more than spaces stays so."""
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
