"""Examine what determines nvmeio's speed: machine, installation, and paths' devices."""

import contextlib
import errno
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
from nvmeio._config.build import EngineInfo, Feature, build_record, versions
from nvmeio._config.constants import DEFAULTS
from nvmeio._config.devices import device_of
from nvmeio._config.lookup import environment_file, environment_options
from nvmeio._config.options import environment
from nvmeio._config.profile_files import profiles_folder, saved_profiles
from nvmeio._native.file import File
from nvmeio._native.handle import Handle
from nvmeio._native.info import engines, resources
from nvmeio._native.pool import pool_stats
from nvmeio._native.settings import kernels, selected_kernels

# The engines with which a single thread can keep a device's queue full.
FAST_ENGINES = ("io_uring", "libaio")

# Processor features that copy kernels need, or that make "rep movsb" fast.
FEATURES = {"avx2", "avx512f", "avx512bw", "avx512vl", "erms", "fsrm", "asimd", "sve"}

# Bits of CapEff in /proc/self/status: linux/capability.h.
CAP_IPC_LOCK = 1 << 14
CAP_SYS_ADMIN = 1 << 21

# The package manager of each family of distributions.
MANAGERS = {"debian": "apt-get", "ubuntu": "apt-get", "fedora": "dnf", "rhel": "dnf"}

# How much to write, read and compare.
TRIAL_BYTES = 1 << 20

# File systems in memory, without a device.
IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs")

# How many workers to try io_uring's rings with, as a fast machine may use.
RING_WORKERS = 8

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


def _memory(key: str, path: str | Path = "/proc/meminfo") -> int:
    """Return the size, in bytes, from a line such as ``Hugepagesize: 2048 kB``."""
    return int(_of(path, key, "0 kB").split()[0]) * 1024


def _capable(capability: int) -> bool:
    """Return whether this process has a capability outside of user namespaces."""
    initial = _line("/proc/self/uid_map").split() in ([], ["0", "0", "4294967295"])
    return initial and bool(int(_of("/proc/self/status", "CapEff", "0"), 16) & capability)


def _features() -> list[str]:
    flags = (_of("/proc/cpuinfo", key) for key in ("flags", "Features"))
    return sorted(FEATURES & set(" ".join(flags).split()))


def _nodes() -> list["Node"]:
    """Return the NUMA nodes that the kernel reports, or a single one for the machine."""
    usable = os.sched_getaffinity(0)
    found = []
    for number in sorted(_numbers(_line("/sys/devices/system/node/online"))):
        folder = Path(f"/sys/devices/system/node/node{number}")
        total = _memory(f"Node {number} MemTotal", folder / "meminfo")
        processors = usable & _numbers(_line(folder / "cpulist"))
        found.append(Node(number, total, len(processors)))
    return found or [Node(0, _memory("MemTotal"), resources()["processors"])]


def _integer(path: str) -> int | None:
    text = _line(path)
    return int(text) if text else None


def _chosen(path: str | Path) -> str:
    """Return the word in brackets, which the kernel puts around the current value."""
    text = _line(path)
    found = re.search(r"\[(.+)\]", text)
    return found[1] if found else text


def _limit(kind: int) -> int | None:
    value = resource.getrlimit(kind)[0]
    return None if value == resource.RLIM_INFINITY else value


def _pool_bytes() -> int | None:
    try:
        return pool_stats()["bytes_limit"]
    except ValueError:
        return None


def _numbers(ranges: str) -> set[int]:
    """Parse a list of numbers such as ``0-3,8``."""
    found: set[int] = set()
    for part in filter(None, ranges.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def _release() -> dict[str, str]:
    try:
        return platform.freedesktop_os_release()
    except OSError:
        return {}


def _package_manager() -> str:
    release = _release()
    families = [release.get("ID", ""), *release.get("ID_LIKE", "").split()]
    return next((MANAGERS[family] for family in families if family in MANAGERS), "")


def _container() -> str:
    """Return the kind of container, by the traces that each kind leaves; "" for none."""
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "kubernetes"
    if os.path.exists("/.dockerenv"):
        return "docker"
    if os.path.exists("/run/.containerenv"):
        return "podman"
    # systemd-nspawn, LXC and the like set it, in lower case.
    return "container" if os.environ.get("container") else ""  # noqa: SIM112


def _by(find: Callable[[], object]) -> Any:
    """Return a dataclass field whose default ``find`` computes."""
    return field(default_factory=find)


@dataclass(frozen=True)
class Node:
    number: int
    memory_bytes: int  # 0 if the node has only processors
    processors: int  # that this process may run on


@dataclass(frozen=True)
class System:
    """The machine, and the limits of this process; the names are also keys of the JSON."""

    kernel: str = _by(platform.release)
    distribution: str = _by(lambda: _release().get("PRETTY_NAME", "Linux"))
    package_manager: str = _by(_package_manager)  # "" if it is another one
    container: str = _by(_container)
    # Whether system calls are filtered.
    seccomp: bool = _by(lambda: _of("/proc/self/status", "Seccomp", "0") != "0")
    uid: int = _by(os.geteuid)
    groups: list[int] = _by(lambda: sorted({os.getegid(), *os.getgroups()}))
    may_lock: bool = _by(lambda: _capable(CAP_IPC_LOCK))
    may_administer: bool = _by(lambda: _capable(CAP_SYS_ADMIN))
    # The model of the processor.
    processor: str = _by(lambda: _of("/proc/cpuinfo", "model name", platform.machine()))
    # The limit for this process, including that of its control group.
    processors: int = _by(lambda: resources()["processors"])
    processors_total: int = _by(lambda: os.cpu_count() or 1)
    features: list[str] = _by(_features)
    # None if the environment has an invalid value.  Must precede the kernels, because it
    # applies the environment's settings.
    pool_bytes: int | None = _by(_pool_bytes)
    # Whether this processor can run them.
    copy_kernels: dict[str, bool] = _by(kernels)
    copy_small: str = _by(lambda: selected_kernels()[0])
    copy_large: str = _by(lambda: selected_kernels()[1])
    nodes: list[Node] = _by(_nodes)
    # The limit for this process, including that of its control group.
    memory_bytes: int = _by(lambda: resources()["memory_bytes"])
    memory_total_bytes: int = _by(lambda: _memory("MemTotal"))
    # None for no limit.
    memlock_bytes: int | None = _by(lambda: _limit(resource.RLIMIT_MEMLOCK))
    open_files: int | None = _by(lambda: _limit(resource.RLIMIT_NOFILE))
    # always, madvise or never; "" if the kernel has none.
    transparent_huge_pages: str = _by(
        lambda: _chosen("/sys/kernel/mm/transparent_hugepage/enabled")
    )
    # Reserved huge pages (hugetlbfs).
    huge_page_bytes: int = _by(lambda: _memory("Hugepagesize"))
    huge_pages: int = _by(lambda: int(_of("/proc/meminfo", "HugePages_Total", "0")))
    huge_pages_free: int = _by(lambda: int(_of("/proc/meminfo", "HugePages_Free", "0")))
    # None if the kernel has no such sysctl.
    io_uring_disabled: int | None = _by(
        lambda: _integer("/proc/sys/kernel/io_uring_disabled")
    )
    io_uring_group: int | None = _by(lambda: _integer("/proc/sys/kernel/io_uring_group"))
    aio_events: int | None = _by(lambda: _integer("/proc/sys/fs/aio-nr"))
    aio_events_max: int | None = _by(lambda: _integer("/proc/sys/fs/aio-max-nr"))

    @property
    def kernel_version(self) -> tuple[int, int]:
        found = re.match(r"(\d+)\.(\d+)", self.kernel)
        return (int(found[1]), int(found[2])) if found else (0, 0)


def _rings_fit() -> bool:
    # Pass every option, because the environment must not count here.
    options: Any = {**DEFAULTS, "engine": "io_uring", "workers": RING_WORKERS}
    try:
        Handle(**options).close()
    except (OSError, ValueError, MemoryError) as error:
        return getattr(error, "errno", None) != errno.ENOMEM
    return True


def _profile() -> dict[str, Any] | None:
    value = os.environ.get("NVMEIO_PROFILE")
    if not value:
        return None
    # A profile that cannot be used is the error of the handle.
    with contextlib.suppress(OSError, ValueError):
        options = environment_options(value)
        file = environment_file(value)
        return {"file": str(file), "options": dict(options)} if file else None
    return None


def _profiles() -> str:
    try:
        return f"{len(saved_profiles())} in {profiles_folder()}"
    except OSError as error:
        return sentence(error)


@dataclass(frozen=True)
class Installation:
    """The installation of nvmeio, as it works in this process."""

    # The engine that a handle uses; or None, and why no handle can be opened.
    engine: str | None
    error: str
    # None for packages that are not installed.
    versions: dict[str, str | None] = _by(versions)
    compiler: str = _by(lambda: build_record()["compiler"])
    debug: bool = _by(lambda: build_record()["debug"])  # without optimization
    test_build: bool = _by(lambda: build_record()["test_build"])  # can inject faults
    features: dict[str, Feature] = _by(lambda: build_record()["features"])
    # In order of preference.
    engines: dict[str, EngineInfo] = _by(engines)
    # Whether the rings of RING_WORKERS workers fit into the memory that may be locked.
    rings_fit: bool = _by(_rings_fit)
    # The variables that begin with NVMEIO_.
    environment: dict[str, str] = _by(environment)
    # The file and the options of the profile that NVMEIO_PROFILE selects; None if none.
    profile: dict[str, Any] | None = _by(_profile)
    # How many profiles this user has, and where; or why they cannot be read.
    profiles: str = _by(_profiles)

    @property
    def chosen_by(self) -> str:
        """What chose the engine: "variable", "profile" or "nvmeio"."""
        if self.environment.get("NVMEIO_ENGINE", "auto") not in ("", "auto"):
            return "variable"
        named = self.profile is not None and self.profile["options"]["engine"]
        return "profile" if named and named == self.engine else "nvmeio"


def installation() -> Installation:
    """Examine the installation; open a handle to find its engine."""
    # First, because the kernel frees the locked memory of a handle's rings later.
    found = engines()
    try:
        with Handle() as handle:
            return Installation(handle.engine, "", engines=found)
    except (OSError, ValueError, MemoryError) as error:
        return Installation(None, sentence(error), engines=found)


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
    rotational: bool | None = None
    logical_block_bytes: int = 0
    physical_block_bytes: int = 0
    numa_node: int | None = None  # None if unknown
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
    node = int(_attribute(block, "device/numa_node", "device/device/numa_node") or -1)
    return Storage(
        path=path,
        mount_point="" if raw else device.mount_point,
        file_system="" if raw else device.file_system,
        source="" if raw else device.source,
        in_memory=device.file_system in IN_MEMORY and not raw,
        device=device.block,
        model=_attribute(block, "device/model"),
        scheduler=_chosen(block / "queue/scheduler") if block else "",
        rotational=_attribute(block, "queue/rotational") == "1" if block else None,
        logical_block_bytes=int(_attribute(block, "queue/logical_block_size") or 0),
        physical_block_bytes=int(_attribute(block, "queue/physical_block_size") or 0),
        # -1 means that the kernel does not know.
        numa_node=node if node >= 0 else None,
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


def _attribute(block: Path | None, *names: str) -> str:
    """Return the text of the first of a device's files that is not empty, or ""."""
    texts = (_line(block / name) for name in names) if block else ()
    return next(filter(None, texts), "")
