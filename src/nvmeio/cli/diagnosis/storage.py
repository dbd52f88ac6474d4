"""What a path lies on: file system and device, and whether nvmeio works there."""

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from nvmeio._devices import device_of
from nvmeio.file import File
from nvmeio.handle import aio_handle

__all__ = ["IN_MEMORY", "Storage", "storage_of"]

# What is written, read and compared.
TRIAL_BYTES = 1 << 20

# File systems whose files are memory: there is no device to be fast or slow.
IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs")

# What a path may be.
USABLE = (stat.S_ISREG, stat.S_ISDIR, stat.S_ISBLK)

SYS = Path("/sys")


@dataclass(frozen=True)
class Storage:
    """What a file or a folder lies on.

    Attributes
    ----------
    path : str
        As it was named.
    error : str
        Why it cannot be used; "" where it can.  Where it cannot be looked at, nothing else
        is known.
    mount_point, file_system, source : str
        Where it is mounted, of which type, and from what.
    in_memory : bool
        Whether files there are memory, without a device.
    device, model, scheduler : str
        The block device's name, what it calls itself, and the scheduler in use; "" where
        there is none.
    rotational : bool or None
        Whether the device says that it turns; None where there is none.
    logical_block_bytes, physical_block_bytes : int
        Of the device; 0 where there is none.
    numa_node : int or None
        The one that the device is attached to; None where the system does not say.
    direct : bool or None
        Whether files can bypass the page cache; None where there was nothing to try it
        with: a folder that cannot be written to, without a file that can be read.
    alignment_bytes : int or None
        What O_DIRECT wants of addresses, offsets and sizes; 1 without it.
    writable, read_only : bool
        Whether this user can write there, and whether nobody can, for so it is mounted.
    free_bytes, total_bytes : int
        Of the file system, as far as this user may have it.
    """

    path: str
    error: str = ""
    mount_point: str = ""
    file_system: str = ""
    source: str = ""
    in_memory: bool = False
    device: str = ""
    model: str = ""
    scheduler: str = ""
    rotational: bool | None = None
    logical_block_bytes: int = 0
    physical_block_bytes: int = 0
    numa_node: int | None = None
    direct: bool | None = None
    alignment_bytes: int | None = None
    writable: bool = False
    read_only: bool = False
    free_bytes: int = 0
    total_bytes: int = 0


def storage_of(path: str, *, transfer: bool = True, sys: Path = SYS) -> Storage:
    """Look at what a path lies on, and transfer something there.

    Parameters
    ----------
    path : str
        A file, a folder or a block device that exists.
    transfer : bool, default True
        Whether to move a MiB through a handle: in a folder that can be written to, to a
        new file and back, which is compared; else from a file that is there.  The new file
        has no name where the file system can do that, and is gone with its descriptor.
    sys : pathlib.Path, default /sys
        Where sysfs is mounted.

    Returns
    -------
    Storage
        Nothing is raised where the path cannot be used: the result says so.
    """
    try:
        found = os.stat(path)
        storage = _described(path, found, sys)
    except OSError as error:
        return Storage(path, error=error.strerror or str(error))
    if not any(usable(found.st_mode) for usable in USABLE):
        return replace(storage, error="neither a file nor a folder nor a block device")
    try:
        with _sample(path, found, storage.writable) as (name, fresh):
            return _tried(storage, name, fresh, transfer) if name else storage
    except OSError as error:
        return replace(storage, error=error.strerror or str(error))


def _described(path: str, found: os.stat_result, sys: Path) -> Storage:
    """Say what can be known of a path without opening anything."""
    space = os.statvfs(path)
    device = device_of(path, sys=sys)
    block = device.sysfs
    # Of a block device what matters is not the file system in which its node lies.
    raw = stat.S_ISBLK(found.st_mode)
    node = int(_attribute(block, "device/numa_node", "device/device/numa_node") or -1)
    return Storage(
        path=path,
        mount_point="" if raw else device.mount_point,
        file_system="" if raw else device.file_system,
        source="" if raw else device.source,
        in_memory=device.file_system in IN_MEMORY and not raw,
        device=device.block,
        model=_attribute(block, "device/model"),
        scheduler=_chosen(_attribute(block, "queue/scheduler")),
        rotational=_attribute(block, "queue/rotational") == "1" if block else None,
        logical_block_bytes=int(_attribute(block, "queue/logical_block_size") or 0),
        physical_block_bytes=int(_attribute(block, "queue/physical_block_size") or 0),
        # -1 is what the kernel says where it does not know.
        numa_node=node if node >= 0 else None,
        writable=os.access(path, os.W_OK, effective_ids=True),
        read_only=bool(space.f_flag & os.ST_RDONLY) and not raw,
        free_bytes=0 if raw else space.f_bavail * space.f_frsize,
        total_bytes=0 if raw else space.f_blocks * space.f_frsize,
    )


@contextlib.contextmanager
def _sample(path: str, found: os.stat_result, writable: bool) -> Iterator[tuple[str, bool]]:
    """Give the name of a file to try with, or "", and whether it may be written to."""
    if not stat.S_ISDIR(found.st_mode):
        yield path, False
    elif writable:
        with _fresh_file(path) as name:
            yield name, True
    else:
        yield _readable_in(path), False


@contextlib.contextmanager
def _fresh_file(folder: str) -> Iterator[str]:
    """Make a file to write to, without a name where that can be."""
    try:
        descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:
        # A file system such as FUSE, which knows no files without a name.
        with tempfile.NamedTemporaryFile(prefix=".nvmeio-", dir=folder) as file:
            _fill(file.fileno())
            yield file.name
        return
    try:
        _fill(descriptor)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _fill(descriptor: int) -> None:
    """Write a page, for a read of an empty file would work with O_DIRECT everywhere."""
    os.pwrite(descriptor, bytes(4096), 0)


def _readable_in(folder: str) -> str:
    """Return a file of a folder that can be read, or ""."""
    with os.scandir(folder) as entries:
        for entry in entries:
            regular = entry.is_file(follow_symlinks=False)
            if regular and os.access(entry.path, os.R_OK, effective_ids=True):
                return entry.path
    return ""


def _tried(storage: Storage, name: str, fresh: bool, transfer: bool) -> Storage:
    """Say of a path what only an open file tells."""
    with File(name, "r+" if fresh else "r") as file:
        known = replace(storage, direct=file.direct, alignment_bytes=file.alignment)
        if not transfer:
            return known
        content = os.urandom(TRIAL_BYTES) if fresh else bytes(min(TRIAL_BYTES, file.size))
        again = bytearray(len(content))
        with aio_handle() as handle:
            if fresh:
                handle.submit_write(content, file).wait()
            handle.submit_read(again, file).wait()
        if fresh and again != content:
            return replace(known, error="what was read is not what was written")
    return known


def _attribute(block: Path | None, *names: str) -> str:
    """Return the text of the first of a device's files that is there, or ""."""
    for path in (block / name for name in names) if block else ():
        with contextlib.suppress(OSError):
            return path.read_text(encoding="utf-8", errors="replace").strip()
    return ""


def _chosen(line: str) -> str:
    """Return the word in brackets, as the kernel marks what is in use."""
    return line.partition("[")[2].partition("]")[0] or line
