"""What a machine and a process have that decides how fast nvmeio can be."""

import os
import platform
import re
import resource
from dataclasses import dataclass
from pathlib import Path

from nvmeio.info import resources
from nvmeio.pool import pool_stats
from nvmeio.settings import kernels, selected_kernels

__all__ = ["Node", "System", "system"]

# Of the features of a processor, those that copy kernels are made of, or that make
# "rep movsb" fast.
FEATURES = {"avx2", "avx512f", "avx512bw", "avx512vl", "erms", "fsrm", "asimd", "sve"}

# Bits of CapEff in /proc/self/status: linux/capability.h.
CAP_IPC_LOCK = 1 << 14
CAP_SYS_ADMIN = 1 << 21


@dataclass(frozen=True)
class Node:
    """A NUMA node.

    Attributes
    ----------
    number : int
        As the system counts them.
    memory_bytes : int
        What it has, 0 where it has processors alone.
    processors : int
        How many of its processors this process may run on.
    """

    number: int
    memory_bytes: int
    processors: int


@dataclass(frozen=True)
class System:
    """The machine, and the limits of this process.

    Attributes
    ----------
    kernel, distribution : str
        Release of the kernel, and the name of the system.
    package_manager : {"apt-get", "dnf", ""}
        What installs packages; "" where that is something else.
    container : {"docker", "podman", "kubernetes", "container", ""}
        What this process is in, as far as it shows.
    seccomp : bool
        Whether a filter of system calls is at work.
    uid : int
        Of the user, as file systems see it.
    groups : list of int
        All that this process is in.
    may_lock, may_administer : bool
        Whether the process has CAP_IPC_LOCK, CAP_SYS_ADMIN, and not for a user namespace
        alone.
    processor : str
        What it calls itself.
    processors, processors_total : int
        How many of them this process may use, its control group counted, and how many
        there are.
    features : list of str
        Those that copy kernels are made of.
    copy_kernels : dict
        For each kernel by name, whether this processor can run it.
    copy_small, copy_large : str
        The kernels in use for small copies and for large ones.
    nodes : list of Node
        The NUMA nodes; one that has everything where the kernel knows none.
    memory_bytes, memory_total_bytes : int
        What this process may have, its control group counted, and what there is.
    pool_bytes : int or None
        What nvmeio's pool may hold; None where the environment makes no sense.
    memlock_bytes : int or None
        What may be locked; None for no limit.
    open_files : int or None
        How many files may be open; None for no limit.
    transparent_huge_pages : str
        "always", "madvise", "never", or "" where the kernel has none.
    huge_page_bytes, huge_pages, huge_pages_free : int
        Of those that are reserved: the size, how many there are and how many are free.
    io_uring_disabled, io_uring_group : int or None
        The sysctls; None where the kernel has none.
    aio_events, aio_events_max : int or None
        Events of libaio in use by all processes, and allowed; None where the kernel has
        none.
    """

    kernel: str
    distribution: str
    package_manager: str
    container: str
    seccomp: bool
    uid: int
    groups: list[int]
    may_lock: bool
    may_administer: bool
    processor: str
    processors: int
    processors_total: int
    features: list[str]
    copy_kernels: dict[str, bool]
    copy_small: str
    copy_large: str
    nodes: list[Node]
    memory_bytes: int
    memory_total_bytes: int
    pool_bytes: int | None
    memlock_bytes: int | None
    open_files: int | None
    transparent_huge_pages: str
    huge_page_bytes: int
    huge_pages: int
    huge_pages_free: int
    io_uring_disabled: int | None
    io_uring_group: int | None
    aio_events: int | None
    aio_events_max: int | None

    @property
    def kernel_version(self) -> tuple[int, int]:
        """The first two numbers of the kernel's release."""
        found = re.match(r"(\d+)\.(\d+)", self.kernel)
        return (int(found[1]), int(found[2])) if found else (0, 0)


def system() -> System:
    """Look at the machine and at the limits of this process.

    Returns
    -------
    System
        Nothing is changed, and nothing is measured.
    """
    status = _pairs("/proc/self/status")
    memory = _pairs("/proc/meminfo")
    cpu = _pairs("/proc/cpuinfo")
    flags = {*cpu.get("flags", "").split(), *cpu.get("Features", "").split()}
    capabilities = _capabilities(status)
    available = resources()
    # The pool's bound comes first: with it the environment chooses the copy kernels.
    pool_bytes = _pool_bytes()
    copy_small, copy_large = selected_kernels()
    distribution, package_manager = _distribution()
    return System(
        kernel=platform.release(),
        distribution=distribution,
        package_manager=package_manager,
        container=_container(),
        seccomp=status.get("Seccomp", "0") != "0",
        uid=os.geteuid(),
        groups=sorted({os.getegid(), *os.getgroups()}),
        may_lock=bool(capabilities & CAP_IPC_LOCK),
        may_administer=bool(capabilities & CAP_SYS_ADMIN),
        processor=cpu.get("model name", platform.machine()),
        processors=available["processors"],
        processors_total=os.cpu_count() or 1,
        features=sorted(FEATURES & flags),
        copy_kernels=kernels(),
        copy_small=copy_small,
        copy_large=copy_large,
        nodes=_nodes()
        or [Node(0, _bytes(memory.get("MemTotal", "0 kB")), available["processors"])],
        memory_bytes=available["memory_bytes"],
        memory_total_bytes=_bytes(memory.get("MemTotal", "0 kB")),
        pool_bytes=pool_bytes,
        memlock_bytes=_limit(resource.RLIMIT_MEMLOCK),
        open_files=_limit(resource.RLIMIT_NOFILE),
        transparent_huge_pages=_chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
        huge_page_bytes=_bytes(memory.get("Hugepagesize", "0 kB")),
        huge_pages=int(memory.get("HugePages_Total", "0")),
        huge_pages_free=int(memory.get("HugePages_Free", "0")),
        io_uring_disabled=_integer("/proc/sys/kernel/io_uring_disabled"),
        io_uring_group=_integer("/proc/sys/kernel/io_uring_group"),
        aio_events=_integer("/proc/sys/fs/aio-nr"),
        aio_events_max=_integer("/proc/sys/fs/aio-max-nr"),
    )


def _line(path: str | Path) -> str:
    """Return the text of a small file; "" where it is not there."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _integer(path: str) -> int | None:
    text = _line(path)
    return int(text) if text else None


def _chosen(path: str) -> str:
    """Return the word in brackets, as the kernel marks what is in use."""
    found = re.search(r"\[(.+)\]", _line(path))
    return found[1] if found else ""


def _pairs(path: str | Path) -> dict[str, str]:
    """Return the first value of each key of a file of ``key: value``."""
    found: dict[str, str] = {}
    for line in _line(path).splitlines():
        key, _, value = line.partition(":")
        found.setdefault(key.strip(), value.strip())
    return found


def _capabilities(status: dict[str, str]) -> int:
    """Return the capabilities that lift limits: those of a user namespace lift none."""
    initial = _line("/proc/self/uid_map").split() in ([], ["0", "0", "4294967295"])
    return int(status.get("CapEff", "0"), 16) if initial else 0


def _bytes(text: str) -> int:
    """Return the size that a line such as ``2048 kB`` of /proc/meminfo gives."""
    return int(text.split()[0]) * 1024


def _limit(kind: int) -> int | None:
    value = resource.getrlimit(kind)[0]
    return None if value == resource.RLIM_INFINITY else value


def _pool_bytes() -> int | None:
    try:
        return pool_stats()["bytes_limit"]
    except ValueError:
        return None


def _numbers(ranges: str) -> set[int]:
    """Return what a list such as ``0-3,8`` names."""
    found: set[int] = set()
    for part in filter(None, ranges.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def _nodes() -> list[Node]:
    """Return the NUMA nodes that the kernel knows."""
    usable = os.sched_getaffinity(0)
    found = []
    for number in sorted(_numbers(_line("/sys/devices/system/node/online"))):
        folder = Path(f"/sys/devices/system/node/node{number}")
        # Each line begins with "Node 0 ".
        total = _pairs(folder / "meminfo").get(f"Node {number} MemTotal", "0 kB")
        processors = usable & _numbers(_line(folder / "cpulist"))
        found.append(Node(number, _bytes(total), len(processors)))
    return found


def _distribution() -> tuple[str, str]:
    """Return the name of the system, and what installs packages there."""
    managers = {
        "debian": "apt-get",
        "ubuntu": "apt-get",
        "fedora": "dnf",
        "rhel": "dnf",
    }
    try:
        release = platform.freedesktop_os_release()
    except OSError:
        return "Linux", ""
    families = [release.get("ID", ""), *release.get("ID_LIKE", "").split()]
    known = [managers[family] for family in families if family in managers]
    return release.get("PRETTY_NAME", "Linux"), known[0] if known else ""


def _container() -> str:
    """Tell what kind of container this is, by what each kind leaves behind."""
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "kubernetes"
    if os.path.exists("/.dockerenv"):
        return "docker"
    if os.path.exists("/run/.containerenv"):
        return "podman"
    # What systemd and its kind set; its name is in small letters.
    return "container" if os.environ.get("container") else ""  # noqa: SIM112
