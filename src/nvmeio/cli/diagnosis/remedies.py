"""What would make nvmeio faster here, and how to get it, by exact commands."""

import shlex
from collections.abc import Callable, Iterator, Sequence

from nvmeio.cli.diagnosis.engine_remedies import engine_remedies, memlock_steps
from nvmeio.cli.diagnosis.installation import Installation
from nvmeio.cli.diagnosis.remedy import REBUILD, SEVERITIES, Remedy, Step, as_root
from nvmeio.cli.diagnosis.storage import Storage
from nvmeio.cli.diagnosis.system import System

__all__ = ["remedies"]

# Rings register up to 32 MiB of the pool, and a quarter of the limit (docs/design.md).
MEMLOCK_BYTES = 128 << 20

# An example to begin with.
HUGE_PAGES_BYTES = 1 << 30

# Below either a file system is nearly full: new files are in many pieces, or do not fit.
FREE_BYTES_MIN = 1 << 30
FREE_SHARE_MIN = 0.05


def remedies(
    system: System, installed: Installation, storages: Sequence[Storage]
) -> list[Remedy]:
    """Tell what is not as it should be, and what helps.

    Parameters
    ----------
    system : System
        The machine.
    installed : Installation
        What nvmeio is there.
    storages : sequence of Storage
        Of the paths that were asked for.

    Returns
    -------
    list of Remedy
        What costs most comes first.  Something fast works where none is "broken".
    """
    found = [*engine_remedies(system, installed)]
    found += [remedy for check in CHECKS for remedy in check(system, installed)]
    found += [
        remedy
        for storage in storages
        for check in PATH_CHECKS
        for remedy in check(system, storage)
    ]
    return sorted(found, key=lambda remedy: SEVERITIES.index(remedy.severity))


def _rebuilding(name: str, severity: str, problem: str, *commands: str) -> Remedy:
    """Return a remedy of another build."""
    step = Step("build it anew, in its checkout or its unpacked sdist:", commands)
    return Remedy(name, severity, problem, (step,))


def _of_debugging(system: System, installed: Installation) -> Iterator[Remedy]:
    if installed.debug:
        problem = "nvmeio was built with NVMEIO_DEBUG=1: without optimization"
        yield _rebuilding("debug-build", "slow", problem, "unset NVMEIO_DEBUG", REBUILD)


def _of_test_build(system: System, installed: Installation) -> Iterator[Remedy]:
    if installed.test_build:
        problem = "this is the test build, in which NVMEIO_FAULTS makes faults"
        unset = "unset NVMEIO_TEST_BUILD NVMEIO_FAULTS"
        yield _rebuilding("test-build", "slow", problem, unset, REBUILD)
    elif "NVMEIO_FAULTS" in installed.environment:
        problem = "NVMEIO_FAULTS is set, but makes no faults: this is not the test build"
        command = f"NVMEIO_TEST_BUILD=1 {REBUILD}"
        yield _rebuilding("test-build", "hint", problem, command)


def _of_huge_pages(system: System, installed: Installation) -> Iterator[Remedy]:
    reserved = installed.environment.get("NVMEIO_POOL_HUGETLB") == "1"
    if reserved and system.huge_pages_free == 0:
        count = HUGE_PAGES_BYTES // (system.huge_page_bytes or HUGE_PAGES_BYTES)
        command = as_root(system.uid, f"sysctl -w vm.nr_hugepages={count}")
        step = Step("reserve some, 1 GiB for example:", (command,))
        problem = "NVMEIO_POOL_HUGETLB=1, but no huge page of hugetlbfs is free"
        yield Remedy("hugetlb", "hint", problem, (step,))
    if system.transparent_huge_pages in ("never", ""):
        yield from _of_transparent(system, reserved)


def _of_transparent(system: System, reserved: bool) -> Iterator[Remedy]:
    """Memory in small pages makes large transfers slow: docs/design.md."""
    if reserved and system.huge_pages_free:
        return
    where = " on the host of this container" if system.container else ""
    if system.transparent_huge_pages == "":
        steps = [Step("boot a kernel with CONFIG_TRANSPARENT_HUGEPAGE=y")]
        problem = "the kernel has no transparent huge pages: memory comes in small ones"
    else:
        switch = "/sys/kernel/mm/transparent_hugepage/enabled"
        command = f"echo madvise | {as_root(system.uid, f'tee {switch}')}"
        steps = [
            Step(f"let programs ask for them{where}, until the next boot:", (command,)),
            Step(
                f"for good, add to the command line of the kernel{where}:",
                ("transparent_hugepage=madvise",),
            ),
        ]
        problem = "transparent huge pages are switched off: memory comes in small ones"
    yield Remedy("huge-pages", "slow", problem, tuple(steps))


def _of_memlock(system: System, installed: Installation) -> Iterator[Remedy]:
    limit = system.memlock_bytes
    if system.may_lock or limit is None or limit >= MEMLOCK_BYTES:
        return
    problem = (
        f"only {limit >> 10} KiB may be locked (ulimit -l): pinned memory beyond that is "
        "not locked, and rings register less of the pool"
    )
    yield Remedy("memlock", "hint", problem, memlock_steps(system))


def _of_openmp(system: System, installed: Installation) -> Iterator[Remedy]:
    if installed.features["openmp"]["built"] or system.processors == 1:
        return
    problem = "nvmeio was built without OpenMP: one thread makes large copies"
    commands = ("unset NVMEIO_WITH_OPENMP", REBUILD)
    step = Step("build it anew with gcc, in its checkout or its unpacked sdist:", commands)
    yield Remedy("openmp", "hint", problem, (step,))


def _of_error(system: System, storage: Storage) -> Iterator[Remedy]:
    if not storage.error:
        return
    problem = f"{storage.path} cannot be used: {storage.error}"
    steps = (Step("name a file, a folder or a block device that this user may read"),)
    yield Remedy("path", "broken", problem, steps, storage.path)


def _of_page_cache(system: System, storage: Storage) -> Iterator[Remedy]:
    if storage.error or storage.in_memory or storage.direct is not False:
        return
    steps = [Step("use a folder on a local file system that has it, such as ext4 or xfs")]
    mounts = {
        "docker": ("docker run -v /mnt/nvme:/data ...",),
        "podman": ("podman run -v /mnt/nvme:/data ...",),
    }
    if system.container in mounts:
        text = "such as one of the host, mounted into the container:"
        steps.append(Step(text, mounts[system.container]))
    problem = f"{storage.path}: {storage.file_system} has no O_DIRECT"
    yield Remedy("no-o-direct", "broken", problem, tuple(steps), storage.path)


def _of_writing(system: System, storage: Storage) -> Iterator[Remedy]:
    if storage.error or storage.writable or not storage.mount_point:
        return
    if storage.read_only:
        command = f"mount -o remount,rw {shlex.quote(storage.mount_point)}"
        step = Step("mount it anew:", (as_root(system.uid, command),))
        problem = f"{storage.path} can only be read: {storage.mount_point} is mounted so"
    else:
        command = f"setfacl -m u:{system.uid}:rwX {shlex.quote(storage.path)}"
        text = "use another, or allow this one to this user:"
        step = Step(text, (as_root(system.uid, command),))
        problem = f"{storage.path} can only be read by this user"
    yield Remedy("read-only", "hint", problem, (step,), storage.path)


def _of_space(system: System, storage: Storage) -> Iterator[Remedy]:
    total, free = storage.total_bytes, storage.free_bytes
    if storage.error or not storage.writable or not total or storage.in_memory:
        return
    if free >= max(FREE_BYTES_MIN, FREE_SHARE_MIN * total):
        return
    problem = f"{storage.path}: {free / 1e9:.1f} of {total / 1e9:.1f} GB are free"
    command = f"du -xh {shlex.quote(storage.mount_point)} | sort -h | tail -n 20"
    step = Step("see what takes the most:", (command,))
    yield Remedy("nearly-full", "hint", problem, (step,), storage.path)


def _of_rotation(system: System, storage: Storage) -> Iterator[Remedy]:
    # Virtual disks claim to turn and have no model; what they are nobody knows.
    if storage.rotational and storage.model:
        problem = f"{storage.path} lies on {storage.device} ({storage.model}), which turns"
        step = Step("use an NVMe drive; on this one the seeks set the speed")
        yield Remedy("rotational", "hint", problem, (step,), storage.path)


def _of_scheduler(system: System, storage: Storage) -> Iterator[Remedy]:
    # It spends a processor on every request, and privileges latency over throughput:
    # Documentation/block/bfq-iosched.rst of Linux.  Of the others we know no harm.
    if storage.scheduler != "bfq" or (storage.rotational and storage.model):
        return
    switch = f"/sys/block/{storage.device}/queue/scheduler"
    step = Step(
        "take another, until the next boot:",
        (f"echo none | {as_root(system.uid, f'tee {switch}')}",),
    )
    problem = f"{storage.path}: the scheduler bfq of {storage.device} limits its speed"
    yield Remedy("scheduler", "slow", problem, (step,), storage.path)


def _of_numa(system: System, storage: Storage) -> Iterator[Remedy]:
    near = [node for node in system.nodes if node.number == storage.numa_node]
    if len(system.nodes) < 2 or not near or near[0].processors:
        return
    number = storage.numa_node
    command = f"numactl --cpunodebind={number} --preferred={number} python ..."
    step = Step("run there:", (command,))
    problem = (
        f"{storage.path}: {storage.device} is attached to NUMA node {number}, and this "
        "process may run on none of its processors"
    )
    yield Remedy("numa", "hint", problem, (step,), storage.path)


Check = Callable[[System, Installation], Iterator[Remedy]]
PathCheck = Callable[[System, Storage], Iterator[Remedy]]

CHECKS: tuple[Check, ...] = (
    _of_huge_pages,
    _of_debugging,
    _of_test_build,
    _of_memlock,
    _of_openmp,
)
PATH_CHECKS: tuple[PathCheck, ...] = (
    _of_error,
    _of_page_cache,
    _of_scheduler,
    _of_writing,
    _of_space,
    _of_rotation,
    _of_numa,
)
