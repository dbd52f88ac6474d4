"""Find what does not work here, or is slower than it could be, and the section that helps.

docs/troubleshooting.md says what to do; this module only names its sections.
"""

import difflib
import errno
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nvmeio._arguments.units import in_binary
from nvmeio._cli.system import Installation, Storage, System
from nvmeio._cli.terminal import sizes
from nvmeio._config.constants import DEFAULTS
from nvmeio._config.options import variable

PAGE = "docs/troubleshooting.md"

# The section for each problem, by its key, which is stable across releases.
SECTIONS = {
    "settings": "a-setting-is-wrong",
    "engine-chosen": "a-setting-is-wrong",
    "unknown-variable": "a-setting-is-wrong",
    "io_uring-refused": "io_uring-is-refused",
    "libaio-refused": "io_uring-is-refused",
    "rings": "locked-memory",
    "memlock": "locked-memory",
    "debug-build": "rebuild-nvmeio",
    "test-build": "rebuild-nvmeio",
    "openmp": "rebuild-nvmeio",
    "huge-pages": "huge-pages",
    "hugetlb": "huge-pages",
    "path": "a-path-cannot-be-used",
    "read-only": "a-path-cannot-be-used",
    "nearly-full": "a-path-cannot-be-used",
    "no-o-direct": "alignment-and-o_direct",
    "scheduler": "it-is-slow",
}

# The engines with which a single thread can keep a device's queue full.
FAST_ENGINES = ("io_uring", "libaio")

# In the order of the report.  "broken": nothing is fast; "slow": something is slower than
# it could be; "hint": good to know.
SEVERITIES = ("broken", "slow", "hint")

# The variables that are not options of a handle; docs/environment.md explains them.
OTHERS = (
    *("COPY", "DEEPSPEED", "FAULTS", "POOL_BYTES", "POOL_HUGETLB", "PROFILE"),
    *("SAFETENSORS", "DEBUG", "TEST_BUILD"),
    *("WITH_LIBURING", "WITH_OPENMP", "LIBURING"),
)

# A lower limit is too small to lock pinned tensors of a useful size.
MEMLOCK_BYTES = 128 << 20

# With less than either free, a file system is nearly full: new files are fragmented, or do
# not fit.
FREE_BYTES_MIN = 1 << 30
FREE_SHARE_MIN = 0.05


@dataclass(frozen=True)
class Problem:
    key: str  # one of SECTIONS
    severity: str  # one of SEVERITIES
    problem: str
    see: str  # the section that says what to do
    path: str = ""  # the path concerned; "" for the machine


def problems(
    system: System, installed: Installation, storages: Sequence[Storage]
) -> list[Problem]:
    """Return all problems; if none is "broken", a fast engine works."""
    found = [*_of_engines(system, installed), *_of_settings(system, installed)]
    found += _of_machine(system, installed)
    for storage in storages:
        found += [replace(one, path=storage.path) for one in _of_path(storage)]
    return sorted(found, key=lambda one: SEVERITIES.index(one.severity))


def _problem(key: str, severity: str, problem: str) -> Problem:
    return Problem(key, severity, problem, f"{PAGE}#{SECTIONS[key]}")


def _of_engines(system: System, installed: Installation) -> Iterator[Problem]:
    """Yield why faster engines are not used; "broken" if no fast one is in use."""
    engines = installed.configuration["engines"]
    refused = list(
        itertools.takewhile(lambda name: not engines[name]["works"], FAST_ENGINES)
    )
    best = FAST_ENGINES[len(refused)] if len(refused) < len(FAST_ENGINES) else None
    # What was measured to be the fastest is no fault, even if it is not a fast engine.
    tuned = best is not None and installed.chosen_by == "profile"
    severity = "slow" if installed.engine in FAST_ENGINES or tuned else "broken"
    if installed.error:
        yield _problem("settings", "broken", installed.error)
    elif best and installed.engine != best and not tuned:
        if installed.chosen_by == "variable":
            words = f"NVMEIO_ENGINE={installed.engine} is set, so nvmeio does not use "
            words += f"{best}, which works here"
            yield _problem("engine-chosen", severity, words)
        else:
            words = f"with these settings nvmeio uses {installed.engine}, because {best}'s "
            words += "rings need more locked memory (ulimit -l)"
            yield _problem("rings", severity, words)
    for name in refused:
        words = f"{name} does not work: {engines[name]['reason']}"
        locked = engines[name]["errno"] == errno.ENOMEM
        yield _problem("rings" if locked else f"{name}-refused", severity, words)


def unknown_variables(names: Iterable[str]) -> dict[str, str]:
    """Return the names that are no variable of nvmeio, each with a similar one or ""."""
    known = {"NVMEIO_" + name for name in OTHERS} | set(map(variable, DEFAULTS))
    found = {}
    for name in set(names) - known:
        # Without the common beginning, which would make all names similar.
        words = [one.removeprefix("NVMEIO_") for one in sorted(known)]
        near = difflib.get_close_matches(name.removeprefix("NVMEIO_"), words, 1, 0.7)
        found[name] = f"NVMEIO_{near[0]}" if near else ""
    return dict(sorted(found.items()))


def _of_settings(system: System, installed: Installation) -> Iterator[Problem]:
    for name, near in unknown_variables(installed.configuration["environment"]).items():
        words = f"{name} is set, but nvmeio has no such variable, and ignores it"
        words += f"; did you mean {near}?" * bool(near)
        yield _problem("unknown-variable", "hint", words)
    build: Any = installed.configuration["build"]
    if build["debug"]:
        words = "nvmeio was built with NVMEIO_DEBUG=1, so it is not optimized"
        yield _problem("debug-build", "slow", words)
    if build["test_build"]:
        words = "this is the test build, which can inject faults and is slower"
        yield _problem("test-build", "slow", words)
    openmp = build["features"]["openmp"]
    if not openmp["built"] and system.processors > 1:
        words = f"nvmeio.memcpy uses one thread without OpenMP: {openmp['reason']}"
        yield _problem("openmp", "hint", words)


def _of_machine(system: System, installed: Installation) -> Iterator[Problem]:
    environment = installed.configuration["environment"]
    reserved = environment.get("NVMEIO_POOL_HUGETLB") == "1"
    if reserved and not system.huge_pages_free:
        words = "NVMEIO_POOL_HUGETLB=1 is set, but no reserved huge page is free"
        yield _problem("hugetlb", "hint", words)
    # Memory in small pages makes large transfers slow: docs/decisions.md.
    huge = system.transparent_huge_pages not in ("", "never")
    if not huge and not (reserved and system.huge_pages_free):
        words = "this kernel has no transparent huge pages"
        if system.transparent_huge_pages:
            words = "transparent huge pages are switched off"
        words += ", so that some drives reach less than half their speed"
        yield _problem("huge-pages", "slow", words)
    limit = system.memlock_bytes
    if not system.may_lock and limit is not None and limit < MEMLOCK_BYTES:
        words = f"only {in_binary(limit)} may be locked (ulimit -l): pinned memory beyond "
        words += "that is not locked, and handles with many workers may use libaio instead"
        yield _problem("memlock", "hint", words)


def _of_path(storage: Storage) -> Iterator[Problem]:
    path = storage.path
    if storage.error:
        words = f"{path} cannot be used: {storage.error}"
        yield _problem("path", "broken", words)
        return
    if storage.mount_point and not storage.writable:
        words = f"you may read {path}, but not write there"
        if storage.read_only:
            words = f"{path} can only be read, because {storage.mount_point} is mounted "
            words += "read-only"
        yield _problem("read-only", "hint", words)
    if storage.direct is False and not storage.in_memory:
        words = f"{path}: {storage.file_system} has no O_DIRECT, so all bytes go through "
        words += "the page cache"
        yield _problem("no-o-direct", "broken", words)
    # bfq spends CPU time on every request, and favours latency over throughput:
    # Documentation/block/bfq-iosched.rst of Linux.  No harm is known of the others.
    if storage.scheduler == "bfq":
        words = f"{path}: the I/O scheduler bfq of {storage.device} costs CPU time and "
        words += "throughput"
        yield _problem("scheduler", "slow", words)
    total, free = storage.total_bytes, storage.free_bytes
    nearly_full = free < max(FREE_BYTES_MIN, FREE_SHARE_MIN * total)
    if storage.writable and total and nearly_full and not storage.in_memory:
        has, of = sizes(free, total)
        words = f"{path}: only {has} of {of} are free; new files may be fragmented, or "
        words += "not fit"
        yield _problem("nearly-full", "hint", words)
