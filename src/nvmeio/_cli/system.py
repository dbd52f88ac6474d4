"""Examine what determines nvmeio's speed: machine, installation, and paths' devices."""

import contextlib
import os
import platform
import re
import resource
import stat
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nvmeio._cli.arguments import sentence
from nvmeio._config.devices import device_of
from nvmeio._config.lookup import environment_file, environment_options
from nvmeio._config.profile_files import profiles_folder, saved_profiles
from nvmeio._native.file import File
from nvmeio._native.handle import Handle
from nvmeio._native.info import resources
from nvmeio.configuration import Configuration, show_config

# The bit of CapEff in /proc/self/status: linux/capability.h.
CAP_IPC_LOCK = 1 << 14

# How much to write, read and compare.
TRIAL_BYTES = 1 << 20

# File systems in memory, without a device.
IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs")

# Kinds of files that a path may be.
USABLE = (stat.S_ISREG, stat.S_ISDIR, stat.S_ISBLK)


def _line(path: str | Path) -> str:
    """Return the text of a small file; "" if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _of(path: str | Path, key: str, default: str = "") -> str:
    """Return the first value of a key in a file of ``key: value``."""
    found = re.search(rf"^{key}\s*:(.*)$", _line(path), re.MULTILINE)
    return found[1].strip() if found else default


def _memory(key: str) -> int:
    """Return the size, in bytes, from a line such as ``Hugepagesize: 2048 kB``."""
    return int(_of("/proc/meminfo", key, "0 kB").split()[0]) * 1024


def _may_lock() -> bool:
    """Return whether this process has CAP_IPC_LOCK outside of user namespaces."""
    initial = _line("/proc/self/uid_map").split() in ([], ["0", "0", "4294967295"])
    return initial and bool(int(_of("/proc/self/status", "CapEff", "0"), 16) & CAP_IPC_LOCK)


def _chosen(path: str | Path) -> str:
    """Return the word in brackets, which the kernel puts around the current value."""
    text = _line(path)
    found = re.search(r"\[(.+)\]", text)
    return found[1] if found else text


def _memlock() -> int | None:
    value = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if value == resource.RLIM_INFINITY else value


def _by(find: Callable[[], object]) -> Any:
    """Return a dataclass field whose default ``find`` computes."""
    return field(default_factory=find)


@dataclass(frozen=True)
class System:
    """The machine, and the limits of this process; the names are also keys of the JSON."""

    kernel: str = _by(platform.release)
    # Whether system calls are filtered.
    seccomp: bool = _by(lambda: _of("/proc/self/status", "Seccomp", "0") != "0")
    # The model of the processor.
    processor: str = _by(lambda: _of("/proc/cpuinfo", "model name", platform.machine()))
    # The limits for this process, including those of its control group.
    processors: int = _by(lambda: resources()["processors"])
    processors_total: int = _by(lambda: os.cpu_count() or 1)
    memory_bytes: int = _by(lambda: resources()["memory_bytes"])
    memory_total_bytes: int = _by(lambda: _memory("MemTotal"))
    # None for no limit, which does not apply if the process may lock more.
    memlock_bytes: int | None = _by(_memlock)
    may_lock: bool = _by(_may_lock)
    # always, madvise or never; "" if the kernel has none.
    transparent_huge_pages: str = _by(
        lambda: _chosen("/sys/kernel/mm/transparent_hugepage/enabled")
    )
    # Reserved huge pages (hugetlbfs).
    huge_page_bytes: int = _by(lambda: _memory("Hugepagesize"))
    huge_pages: int = _by(lambda: int(_of("/proc/meminfo", "HugePages_Total", "0")))
    huge_pages_free: int = _by(lambda: int(_of("/proc/meminfo", "HugePages_Free", "0")))


@dataclass(frozen=True)
class Installation:
    """The installation of nvmeio, as it works in this process."""

    # The engine that a handle uses; or None, and why no handle can be opened.
    engine: str | None
    error: str
    # As nvmeio.show_config("dicts") returns it.
    configuration: Configuration
    # The file and the options of the profile that NVMEIO_PROFILE selects; None if none.
    profile: dict[str, Any] | None
    # How many profiles this user has, and where; or why they cannot be read.
    profiles: str

    @property
    def chosen_by(self) -> str:
        """What chose the engine: "variable", "profile" or "nvmeio"."""
        if self.configuration["environment"].get("NVMEIO_ENGINE") not in (None, "", "auto"):
            return "variable"
        named = self.profile is not None and self.profile["options"]["engine"]
        return "profile" if named and named == self.engine else "nvmeio"


def installation() -> Installation:
    """Examine the installation; open a handle to find its engine."""
    # First, because the kernel frees the locked memory of a handle's rings later.
    found = show_config("dicts")
    engine, error = None, ""
    try:
        with Handle() as handle:
            engine = handle.engine
    except (OSError, ValueError, MemoryError) as failure:
        error = sentence(failure)
    try:
        profiles = f"{len(saved_profiles())} in {profiles_folder()}"
    except OSError as failure:
        profiles = sentence(failure)
    return Installation(engine, error, found, _profile(), profiles)


def _profile() -> dict[str, Any] | None:
    value = os.environ.get("NVMEIO_PROFILE")
    # A profile that cannot be used is the error of the handle.
    with contextlib.suppress(OSError, ValueError):
        if value and (file := environment_file(value)):
            return {"file": str(file), "options": dict(environment_options(value))}
    return None


@dataclass(frozen=True)
class Storage:
    """The file system and device of a path."""

    path: str
    error: str = ""  # why the path cannot be used; other fields may then be empty
    mount_point: str = ""
    file_system: str = ""
    source: str = ""  # the source of the mount
    in_memory: bool = False  # without a device
    # The block device; "" if there is none.
    device: str = ""
    model: str = ""
    scheduler: str = ""
    # Whether files can bypass the page cache; None if no file could be tried.
    direct: bool | None = None
    alignment_bytes: int | None = None  # for O_DIRECT; 1 without it
    writable: bool = False  # by this user
    read_only: bool = False  # the file system is mounted read-only
    # Space of the file system that this user may use.
    free_bytes: int = 0
    total_bytes: int = 0


def storage_of(path: str, *, transfer: bool = True, sys: Path = Path("/sys")) -> Storage:
    """Examine the device of a path, and transfer 1 MiB there; never raises.

    In a writable directory, a new file is written, read back and compared; otherwise an
    existing file is read.
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
    """Return what can be found out about a path without opening a file."""
    space = os.statvfs(path)
    device = device_of(path, sys=sys)
    block = device.sysfs
    # For a block device, the file system of its device file does not matter.
    raw = stat.S_ISBLK(found.st_mode)
    return Storage(
        path=path,
        mount_point="" if raw else device.mount_point,
        file_system="" if raw else device.file_system,
        source="" if raw else device.source,
        in_memory=device.file_system in IN_MEMORY and not raw,
        device=device.block,
        model=_line(block / "device/model") if block else "",
        scheduler=_chosen(block / "queue/scheduler") if block else "",
        writable=os.access(path, os.W_OK, effective_ids=True),
        read_only=bool(space.f_flag & os.ST_RDONLY) and not raw,
        free_bytes=0 if raw else space.f_bavail * space.f_frsize,
        total_bytes=0 if raw else space.f_blocks * space.f_frsize,
    )


@contextlib.contextmanager
def _sample(path: str, found: os.stat_result, writable: bool) -> Iterator[tuple[str, bool]]:
    """Yield the name of a file to try, or "", and whether it may be written to."""
    if not stat.S_ISDIR(found.st_mode):
        yield path, False
    elif writable:
        with contextlib.ExitStack() as stack:
            try:
                flags = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC
                descriptor = os.open(path, flags, 0o600)
                stack.callback(os.close, descriptor)
                name = f"/proc/self/fd/{descriptor}"
            except OSError:
                # The file system has no O_TMPFILE, like FUSE.
                named = stack.enter_context(
                    tempfile.NamedTemporaryFile(prefix=".nvmeio-", dir=path)
                )
                descriptor, name = named.fileno(), named.name
            # Write a page, because reading an empty file always works with O_DIRECT.
            os.pwrite(descriptor, bytes(4096), 0)
            yield name, True
    else:
        with os.scandir(path) as entries:
            readable = (
                entry.path
                for entry in entries
                if entry.is_file(follow_symlinks=False)
                and os.access(entry.path, os.R_OK, effective_ids=True)
            )
            yield next(readable, ""), False


def _tried(storage: Storage, name: str, fresh: bool, transfer: bool) -> Storage:
    """Add what only an open file can tell about a path."""
    with File(name, "r+" if fresh else "r") as file:
        known = replace(storage, direct=file.direct, alignment_bytes=file.alignment)
        if not transfer:
            return known
        content = os.urandom(TRIAL_BYTES) if fresh else bytes(min(TRIAL_BYTES, file.size))
        again = bytearray(len(content))
        with Handle() as handle:
            if fresh:
                handle.write(content, file)
            handle.read(again, file)
        if fresh and again != content:
            return replace(known, error="the bytes read differ from those written")
    return known
