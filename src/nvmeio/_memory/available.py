"""Find out how much more memory this process may use."""

import os
import resource

from nvmeio._native.descriptor import contents_of

__all__ = ["available_bytes"]

# For each version of control groups: the files with a group's limit and its use, and the
# prefix of the names in memory.stat.
VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
VERSION_2 = ("memory.max", "memory.current", "")


def available_bytes() -> int:
    """Return the bytes that the system, control groups and RLIMIT_AS leave this process.

    Page cache that the kernel can reclaim counts as available.
    """
    try:
        lines = dict(line.split(b":") for line in contents_of("/proc/meminfo").splitlines())
        free = int(lines[b"MemAvailable"].split()[0]) * 1024
    except FileNotFoundError:
        # There is no /proc; this leaves out the page cache.
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([free, *_left_in_groups(), *_left_in_addresses()])


def _left_in_addresses() -> list[int]:
    """Return the bytes that ``ulimit -v`` leaves, in a list; empty without such a limit."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return []
    pages = int(_text("/proc/self/statm").split()[0])
    return [max(0, limit - pages * resource.getpagesize())]


def _left_in_groups() -> list[int]:
    """Return the bytes that each control group leaves, from this process's group upward.

    A container sees no groups above its own.
    """
    found: list[int] = []
    try:
        # It is empty where no groups are mounted.
        for line in filter(None, _text("/proc/self/cgroup").split("\n")):
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                top, names = "/sys/fs/cgroup", VERSION_2
            elif "memory" in controllers.split(","):
                top, names = "/sys/fs/cgroup/memory", VERSION_1
            else:
                continue
            folder = os.path.normpath(f"{top}/{path}")
            while folder.startswith(top):
                found += _left_in_group(folder, names)
                folder = os.path.dirname(folder)
    except OSError as error:
        if error.errno is None:
            # A signal handler raised it.
            raise
    return found


def _left_in_group(folder: str, names: tuple[str, str, str]) -> list[int]:
    """Return the bytes that a group leaves, in a list; empty without a limit."""
    try:
        limit, used = (int(_text(f"{folder}/{name}")) for name in names[:2])
        stat = dict(line.split() for line in _text(f"{folder}/memory.stat").split("\n"))
        cache = sum(int(stat[f"{names[2]}{kind}_file"]) for kind in ("active", "inactive"))
    except (ValueError, KeyError):
        # A group without a limit has "max".
        return []
    except OSError as error:
        if error.errno is None:
            raise
        # The root group has no such file.
        return []
    return [max(0, limit - used) + cache]


def _text(path: str) -> str:
    return os.fsdecode(contents_of(path)).strip()
