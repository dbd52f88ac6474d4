"""How much memory a process may still have."""

import contextlib
import os
import resource

from nvmeio._arguments.units import in_binary

__all__ = ["available_bytes", "require_available"]

# The files with the limit and the use of a group, and what its statistics prefix.
VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
VERSION_2 = ("memory.max", "memory.current", "")


def available_bytes() -> int:
    """Return what the system, a control group or RLIMIT_AS leaves this process.

    What the page cache holds counts as free, as far as the kernel would give it up.
    """
    with open("/proc/meminfo", "rb") as file:
        lines = dict(line.split(b":") for line in file.read().splitlines())
    free = int(lines[b"MemAvailable"].split()[0]) * 1024
    return min([free, *_left_in_groups(), *_left_in_addresses()])


def _left_in_addresses() -> list[int]:
    """Return what ``ulimit -v`` leaves, if there is such a limit."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return []
    pages = int(_text("/proc/self/statm").split()[0])
    return [max(0, limit - pages * resource.getpagesize())]


def _left_in_groups() -> list[int]:
    """Return what each control group leaves, from this process's upward.

    A container's own group is the top of what it sees.
    """
    found: list[int] = []
    with contextlib.suppress(OSError):
        for line in _text("/proc/self/cgroup").split("\n"):
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                top, names = "/sys/fs/cgroup", VERSION_2
            elif "memory" in controllers.split(","):
                top, names = "/sys/fs/cgroup/memory", VERSION_1
            else:
                continue
            folder = os.path.normpath(f"{top}/{path}")
            while folder.startswith(top):
                # A group without a limit says "max"; the system's own has no such file.
                with contextlib.suppress(OSError, ValueError, KeyError):
                    found.append(_left_in_group(folder, names))
                folder = os.path.dirname(folder)
    return found


def _left_in_group(folder: str, names: tuple[str, str, str]) -> int:
    limit, used = (int(_text(f"{folder}/{name}")) for name in names[:2])
    stat = dict(line.split() for line in _text(f"{folder}/memory.stat").split("\n"))
    cache = sum(int(stat[f"{names[2]}{kind}_file"]) for kind in ("active", "inactive"))
    return max(0, limit - used) + cache


def _text(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read().strip()


def require_available(nbytes: int, what: str) -> None:
    """Raise MemoryError for more than there is, before any of it is taken."""
    free = available_bytes()
    if nbytes > free:
        raise MemoryError(
            f"{what} needs {in_binary(nbytes)} of memory, and {in_binary(free)} are free"
        )
