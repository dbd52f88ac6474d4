"""Find what slows nvmeio down here, and the exact commands that help."""

import errno
import itertools
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from nvmeio._arguments.units import in_binary
from nvmeio._cli.system import FAST_ENGINES, Installation, Storage, System
from nvmeio._cli.terminal import sizes
from nvmeio._config.build import EngineInfo

# In the order of the report.  "broken": nothing is fast; "slow": something is slower than
# it could be; "hint": good to know.
SEVERITIES = ("broken", "slow", "hint")

# In a checkout or an unpacked sdist.  Without --no-cache-dir, pip would reuse an old wheel.
REBUILD = "pip install --force-reinstall --no-deps --no-cache-dir ."

# Each engine's library, and the system calls that a seccomp profile must allow.
LIBRARIES = {"io_uring": "liburing", "libaio": "libaio"}
CALLS = {
    "io_uring": ("io_uring_setup", "io_uring_enter", "io_uring_register"),
    "libaio": ("io_setup", "io_submit", "io_getevents", "io_destroy"),
}

# Docker's default profile.  It refuses io_uring since Docker 25 (moby pull 46762), and so
# do those of containerd and podman.
PROFILE = "https://raw.githubusercontent.com/moby/profiles/main/seccomp/default.json"

# 16 times the kernel's default; nothing is allocated in advance (admin-guide/sysctl/fs of
# Linux).
AIO_EVENTS = 1 << 20

PACKAGES = {
    "apt-get": "gcc pkg-config python3-dev {}-dev",
    "dnf": "gcc pkgconf python3-devel {}-devel",
}

# A lower limit is too small to lock pinned tensors of a useful size.
MEMLOCK_BYTES = 128 << 20

# The size in the example.
HUGE_PAGES_BYTES = 1 << 30

# With less than either free, a file system is nearly full: new files are fragmented, or do
# not fit.
FREE_BYTES_MIN = 1 << 30
FREE_SHARE_MIN = 0.05


@dataclass(frozen=True)
class Step:
    # What to do, or where; ends with a colon if commands follow.
    text: str
    # Lines for a shell or a file, as the text says.
    commands: tuple[str, ...] = ()


@dataclass(frozen=True)
class Remedy:
    """A problem, and what helps."""

    # Identifies the problem; stable across releases.
    key: str
    # One of SEVERITIES.
    severity: str
    problem: str
    # Alternatives, or steps in sequence, as their texts say.
    steps: tuple[Step, ...]
    # The path concerned; "" for the machine.
    path: str = ""


def remedies(
    system: System, installed: Installation, storages: Sequence[Storage]
) -> list[Remedy]:
    """Return all problems and remedies; if none is "broken", a fast engine works."""
    found = [remedy for check in CHECKS for remedy in check(system, installed)]
    found += [
        replace(remedy, path=storage.path)
        for storage in storages
        for check in PATH_CHECKS
        for remedy in check(system, storage)
    ]
    return sorted(found, key=lambda remedy: SEVERITIES.index(remedy.severity))


def _step(text: str, *commands: str) -> Step:
    return Step(text, commands)


def _remedy(key: str, severity: str, problem: str, *steps: Step) -> Remedy:
    return Remedy(key, severity, problem, steps)


def _as_root(system: System, command: str) -> str:
    return command if system.uid == 0 else f"sudo {command}"


def _kept(system: System, setting: str, file: str) -> tuple[str, str]:
    """Return the commands that set a sysctl now, and after the next boot."""
    keep = _as_root(system, f"tee /etc/sysctl.d/{file}")
    return _as_root(system, f"sysctl -w {setting}"), f"echo {setting} | {keep}"


def _host(system: System) -> str:
    return "on the host of this container, " if system.container else ""


# Engines that do not work, or were not built.


def _of_engines(system: System, installed: Installation) -> Iterator[Remedy]:
    """Yield why faster engines are not used; "broken" if no fast one is in use."""
    severity = "slow" if installed.engine in FAST_ENGINES else "broken"
    refused = list(
        itertools.takewhile(lambda name: not installed.engines[name]["works"], FAST_ENGINES)
    )
    best = FAST_ENGINES[len(refused)] if len(refused) < len(FAST_ENGINES) else None
    if installed.error:
        yield _of_handles(installed)
    elif best and installed.engine != best:
        problem = f"NVMEIO_ENGINE={installed.engine} keeps nvmeio from using {best}"
        step = _step("leave the choice to nvmeio:", "unset NVMEIO_ENGINE")
        yield _remedy("engine-chosen", severity, problem, step)
    for name in refused:
        found = installed.engines[name]
        if found["built"]:
            key, problem, steps = _of_kernel(system, name, found)
        else:
            key, problem = "not-built", f"{name} was not built in"
            steps = _building(system, installed, name)
        yield _remedy(f"{name}-{key}", severity, problem, *steps)


def _of_handles(installed: Installation) -> Remedy:
    """Return the remedy if no handle can be opened, mostly because of a wrong setting."""
    named = re.findall(r"\bNVMEIO_\w+", installed.error)
    if not named:
        # An error of a profile names its file or directory, not the variable.
        likely = "PROFILE" if "profile" in installed.error else "ENGINE"
        named = [f"NVMEIO_{likely}"] * bool(installed.environment.get(f"NVMEIO_{likely}"))
    if named:
        step = _step("take the setting away, or correct it:", f"unset {named[0]}")
    else:
        text = "look at the limits of this process:"
        step = _step(text, "ulimit -n", "ulimit -u", "ulimit -v")
    return _remedy("settings", "broken", installed.error, step)


def _building(system: System, installed: Installation, name: str) -> tuple[Step, ...]:
    """Return the steps to build an engine that was left out."""
    library = LIBRARIES[name]
    switch = f"NVMEIO_WITH_{library.upper()}"
    steps = []
    if installed.features[library]["reason"] == f"{switch}=no":
        text = "build without the switch that leaves it out:"
        steps.append(_step(text, f"unset {switch}"))
    if manager := system.package_manager:
        command = f"{manager} install {PACKAGES[manager].format(library)}"
        steps.append(_step("install what the build needs:", _as_root(system, command)))
    else:
        steps.append(Step(f"install a C compiler and {library} with its headers"))
    text = "build nvmeio anew, in its checkout or its unpacked sdist:"
    return (*steps, _step(text, REBUILD))


Refusal = tuple[str, str, tuple[Step, ...]]


def _of_kernel(system: System, name: str, found: EngineInfo) -> Refusal:
    """Return key, problem and steps for an engine that the kernel refuses."""
    error = found["errno"]
    disabled, group = system.io_uring_disabled, system.io_uring_group
    outside = not system.may_administer and group not in system.groups
    if (
        name == "io_uring"
        and error == errno.EPERM
        and (disabled == 2 or (disabled == 1 and outside))
    ):
        return _of_sysctl(system)
    # A filter of system calls may also return ENOSYS.
    older = name == "io_uring" and system.kernel_version < (5, 1)
    if error == errno.ENOSYS and (older or not (system.seccomp or system.container)):
        step = Step("boot Linux 5.1 or newer, best 6.1 or newer, with CONFIG_IO_URING=y")
        if name == "libaio":
            step = Step("boot a kernel that was built with CONFIG_AIO=y")
        return "kernel", f"Linux {system.kernel} has no {name}", (step,)
    if error in (errno.EPERM, errno.ENOSYS, errno.EACCES):
        problem = f"a filter of system calls (seccomp) refuses {name}"
        return "seccomp", problem, _seccomp_steps(system, name)
    if name == "io_uring" and error == errno.ENOMEM:
        problem = "io_uring may not lock enough memory for its rings"
        return "memlock", problem, _memlock_steps(system)
    if name == "libaio" and error == errno.EAGAIN:
        commands = _kept(system, f"fs.aio-max-nr={AIO_EVENTS}", "91-nvmeio.conf")
        step = _step(f"{_host(system)}allow more, now and after the next boot:", *commands)
        problem = (
            f"libaio has no events left: {system.aio_events} of {system.aio_events_max} "
            "are in use by all processes together"
        )
        return "events", problem, (step,)
    if error == errno.EMFILE:
        step = _step("allow more open files:", "ulimit -n $(ulimit -Hn)")
        problem = f"{name} finds no free file descriptor: {system.open_files} are allowed"
        return "open-files", problem, (step,)
    dmesg = _as_root(system, "dmesg | tail")
    step = _step("look at the kernel's messages:", dmesg)
    return "failed", f"{name} fails: {found['reason']}", (step,)


def _of_sysctl(system: System) -> Refusal:
    """Return the remedy for kernel.io_uring_disabled: admin-guide/sysctl of Linux."""
    value, group, where = system.io_uring_disabled, system.io_uring_group, _host(system)
    commands = _kept(system, "kernel.io_uring_disabled=0", "90-nvmeio.conf")
    steps = [_step(f"{where}allow io_uring, now and after the next boot:", *commands)]
    if value == 1 and group is not None and group >= 0:
        command = f"usermod -aG $(getent group {group} | cut -d: -f1) $USER"
        text = f"or {where}join the group {group}, which may use it, and log in anew:"
        steps.append(_step(text, _as_root(system, command)))
    elif value == 1:
        lines = (
            "groupadd --system io_uring",
            "usermod -aG io_uring $USER",
            "sysctl -w kernel.io_uring_group=$(getent group io_uring | cut -d: -f3)",
        )
        text = f"or {where}allow it to a group, join that, and log in anew:"
        steps.append(_step(text, *(_as_root(system, line) for line in lines)))
    if system.seccomp:
        text = "then check again, because system calls are filtered as well:"
        steps.append(_step(text, "nvmeio doctor"))
    whom = "everybody" if value == 2 else "all but root and one group"
    problem = (
        f"sysctl kernel.io_uring_disabled is {value}, which refuses io_uring to {whom}"
    )
    return "sysctl", problem, tuple(steps)


def _seccomp_steps(system: System, name: str) -> tuple[Step, ...]:
    """Return the steps to allow an engine's system calls in containers and units."""
    listed = ", ".join(f'"{call}"' for call in CALLS[name])
    allowed = f'.syscalls += [{{"names": [{listed}], "action": "SCMP_ACT_ALLOW"}}]'
    fetch = f"curl -fsSLo default.json {PROFILE}"
    # Docker's profile allows some calls only with certain capabilities.  containerd's
    # format (OCI) has no such conditions and would allow them to everybody: remove them.
    without_capabilities = "del(.syscalls[] | select(.includes.caps)) | "
    steps = {
        program: _step(
            f"with {program}, start the container with a profile that allows it:",
            fetch,
            f"jq '{allowed}' default.json > nvmeio.json",
            f"{program} run --security-opt seccomp=nvmeio.json ...",
        )
        for program in ("docker", "podman")
    }
    steps["kubernetes"] = _step(
        "in Kubernetes, put a profile that allows it on each node, and name it in the pod:",
        fetch,
        f"jq '{without_capabilities}{allowed}' default.json > nvmeio.json",
        "sudo install -D -m 644 nvmeio.json /var/lib/kubelet/seccomp/nvmeio.json",
        "",
        "spec:",
        "  securityContext:",
        "    seccompProfile:",
        "      type: Localhost",
        "      localhostProfile: nvmeio.json",
    )
    if system.container in steps:
        return (steps[system.container],)
    text = "in a service of systemd that filters, add to [Service]:"
    unit = _step(text, f"SystemCallFilter={' '.join(CALLS[name])}")
    return (*steps.values(), unit)


def _memlock_steps(system: System) -> tuple[Step, ...]:
    """Return the steps to lock more memory, for each way to start a process."""
    if system.container in ("docker", "podman"):
        command = f"{system.container} run --ulimit memlock=-1:-1 ..."
        return (_step("start the container with:", command),)
    if system.container == "kubernetes":
        commands = (
            "sudo systemctl edit containerd   # [Service], LimitMEMLOCK=infinity",
            "sudo systemctl restart containerd",
        )
        text = "a pod cannot request it; raise the limit of its runtime, on each node:"
        return (_step(text, *commands),)
    shell = _as_root(system, "prlimit --pid $$ --memlock=unlimited:unlimited")
    lines = "printf '%s\\n' '* - memlock unlimited' 'root - memlock unlimited'"
    file = _as_root(system, "tee /etc/security/limits.d/90-nvmeio.conf")
    return (
        _step("in this shell, at once:", shell),
        _step("for all users from their next login on:", f"{lines} | {file}"),
        _step("in a service of systemd, add to [Service]:", "LimitMEMLOCK=infinity"),
    )


# Other problems of the machine and of the build.


def _of_huge_pages(system: System, installed: Installation) -> Iterator[Remedy]:
    """Memory in small pages makes large transfers slow: docs/decisions.md."""
    reserved = installed.environment.get("NVMEIO_POOL_HUGETLB") == "1"
    if reserved and system.huge_pages_free == 0:
        count = HUGE_PAGES_BYTES // (system.huge_page_bytes or HUGE_PAGES_BYTES)
        command = _as_root(system, f"sysctl -w vm.nr_hugepages={count}")
        problem = "NVMEIO_POOL_HUGETLB=1, but no huge page of hugetlbfs is free"
        step = _step("reserve some, 1 GiB for example:", command)
        yield _remedy("hugetlb", "hint", problem, step)
    if reserved and system.huge_pages_free:
        return
    if system.transparent_huge_pages == "":
        problem = "the kernel has no transparent huge pages: memory comes in small ones"
        step = Step("boot a kernel with CONFIG_TRANSPARENT_HUGEPAGE=y")
        yield _remedy("huge-pages", "slow", problem, step)
    elif system.transparent_huge_pages == "never":
        where = " on the host of this container" if system.container else ""
        switch = "tee /sys/kernel/mm/transparent_hugepage/enabled"
        command = f"echo madvise | {_as_root(system, switch)}"
        text = f"for good, add to the command line of the kernel{where}:"
        steps = (
            _step(f"let programs ask for them{where}, until the next boot:", command),
            _step(text, "transparent_hugepage=madvise"),
        )
        problem = "transparent huge pages are switched off: memory comes in small ones"
        yield _remedy("huge-pages", "slow", problem, *steps)


def _of_build(system: System, installed: Installation) -> Iterator[Remedy]:
    def rebuilding(key: str, severity: str, problem: str, *commands: str) -> Remedy:
        text = "build it anew, in its checkout or its unpacked sdist:"
        return _remedy(key, severity, problem, _step(text, *commands))

    if installed.debug:
        problem = "nvmeio was built with NVMEIO_DEBUG=1: without optimization"
        yield rebuilding("debug-build", "slow", problem, "unset NVMEIO_DEBUG", REBUILD)
    if installed.test_build:
        problem = "this is the test build, in which NVMEIO_FAULTS makes faults"
        unset = "unset NVMEIO_TEST_BUILD NVMEIO_FAULTS"
        yield rebuilding("test-build", "slow", problem, unset, REBUILD)
    elif "NVMEIO_FAULTS" in installed.environment:
        problem = "NVMEIO_FAULTS is set, but makes no faults: this is not the test build"
        yield rebuilding("test-build", "hint", problem, f"NVMEIO_TEST_BUILD=1 {REBUILD}")
    if not installed.features["openmp"]["built"] and system.processors > 1:
        problem = "nvmeio was built without OpenMP: one thread makes large copies"
        commands = ("unset NVMEIO_WITH_OPENMP", f"CC=gcc {REBUILD}")
        yield rebuilding("openmp", "hint", problem, *commands)


def _of_memlock(system: System, installed: Installation) -> Iterator[Remedy]:
    limit = system.memlock_bytes
    if system.may_lock or limit is None or limit >= MEMLOCK_BYTES:
        return
    problem = (
        f"only {in_binary(limit)} may be locked (ulimit -l): pinned memory beyond that is "
        "not locked"
    )
    yield _remedy("memlock", "hint", problem, *_memlock_steps(system))


# Problems of a path.


def _of_access(system: System, storage: Storage) -> Iterator[Remedy]:
    if storage.error:
        problem = f"{storage.path} cannot be used: {storage.error}"
        step = Step("name a file, a folder or a block device that this user may read")
        yield _remedy("path", "broken", problem, step)
    elif storage.mount_point and not storage.writable:
        command = f"setfacl -m u:{system.uid}:rwX {shlex.quote(storage.path)}"
        problem = f"{storage.path} can only be read by this user"
        text = "use another, or allow this one to this user:"
        if storage.read_only:
            command = f"mount -o remount,rw {shlex.quote(storage.mount_point)}"
            problem = (
                f"{storage.path} can only be read: {storage.mount_point} is mounted so"
            )
            text = "mount it anew:"
        step = _step(text, _as_root(system, command))
        yield _remedy("read-only", "hint", problem, step)


def _of_page_cache(system: System, storage: Storage) -> Iterator[Remedy]:
    if storage.error or storage.in_memory or storage.direct is not False:
        return
    steps = [Step("use a folder on a local file system that has it, such as ext4 or xfs")]
    if system.container in ("docker", "podman"):
        command = f"{system.container} run -v /mnt/nvme:/data ..."
        steps.append(_step("such as one of the host, mounted into the container:", command))
    problem = f"{storage.path}: {storage.file_system} has no O_DIRECT"
    yield _remedy("no-o-direct", "broken", problem, *steps)


def _of_space(system: System, storage: Storage) -> Iterator[Remedy]:
    total, free = storage.total_bytes, storage.free_bytes
    if storage.error or not storage.writable or not total or storage.in_memory:
        return
    if free < max(FREE_BYTES_MIN, FREE_SHARE_MIN * total):
        has, of = sizes(free, total)
        problem = f"{storage.path}: {has} of {of} are free"
        command = f"du -xh {shlex.quote(storage.mount_point)} | sort -h | tail -n 20"
        step = _step("see what takes the most:", command)
        yield _remedy("nearly-full", "hint", problem, step)


def _of_device(system: System, storage: Storage) -> Iterator[Remedy]:
    # Virtual disks claim to be rotational, but have no model: ignore them.
    turns = storage.rotational and storage.model
    if turns:
        problem = f"{storage.path} is on {storage.device} ({storage.model}), which turns"
        step = Step("use an NVMe drive; on this one the seeks set the speed")
        yield _remedy("rotational", "hint", problem, step)
    # bfq spends CPU time on every request, and favours latency over throughput:
    # Documentation/block/bfq-iosched.rst of Linux.  No harm is known of the others.
    if storage.scheduler == "bfq" and not turns:
        switch = f"tee /sys/block/{storage.device}/queue/scheduler"
        command = f"echo none | {_as_root(system, switch)}"
        problem = f"{storage.path}: the scheduler bfq of {storage.device} limits its speed"
        step = _step("take another, until the next boot:", command)
        yield _remedy("scheduler", "slow", problem, step)
    number = storage.numa_node
    near = [node for node in system.nodes if node.number == number]
    if len(system.nodes) > 1 and near and not near[0].processors:
        command = f"numactl --cpunodebind={number} --preferred={number} python ..."
        problem = (
            f"{storage.path}: {storage.device} is attached to NUMA node {number}, and this "
            "process may run on none of its processors"
        )
        yield _remedy("numa", "hint", problem, _step("run there:", command))


CHECKS: tuple[Callable[[System, Installation], Iterator[Remedy]], ...] = (
    _of_engines,
    _of_huge_pages,
    _of_build,
    _of_memlock,
)
PATH_CHECKS: tuple[Callable[[System, Storage], Iterator[Remedy]], ...] = (
    _of_access,
    _of_page_cache,
    _of_device,
    _of_space,
)
