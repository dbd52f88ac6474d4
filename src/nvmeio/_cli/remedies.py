"""Find what slows nvmeio down here, and the exact commands that help."""

import errno
import itertools
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from nvmeio._arguments.units import in_binary
from nvmeio._cli.system import (
    FAST_ENGINES,
    RING_WORKERS,
    Installation,
    Storage,
    System,
)
from nvmeio._cli.terminal import sizes
from nvmeio._config.build import EngineInfo
from nvmeio._config.options import unknown_variables

# In the order of the report.  "broken": nothing is fast; "slow": something is slower than
# it could be; "hint": good to know.
SEVERITIES = ("broken", "slow", "hint")

# In a checkout or an unpacked sdist.  Without --no-cache-dir, pip would reuse an old wheel.
REBUILD = "pip install --force-reinstall --no-deps --no-cache-dir ."

REBUILDING = "rebuild nvmeio in its checkout or unpacked sdist, in about a minute:"

# Each engine's library, and the system calls that a seccomp profile must allow.
LIBRARIES = {"io_uring": "liburing", "libaio": "libaio"}
CALLS = {
    "io_uring": ("io_uring_setup", "io_uring_enter", "io_uring_register"),
    "libaio": ("io_setup", "io_submit", "io_getevents", "io_destroy"),
}

# Docker's default profile.  It refuses io_uring since Docker 25 (moby pull 46762), and so
# do those of containerd and podman.
PROFILE = "https://raw.githubusercontent.com/moby/profiles/main/seccomp/default.json"

# The profile that the advice makes of it.
ALLOWING = "nvmeio-seccomp.json"

# 16 times the kernel's default; nothing is allocated in advance (admin-guide/sysctl/fs of
# Linux).
AIO_EVENTS = 1 << 20

PACKAGES = {
    "apt-get": "gcc pkg-config python3-dev {}-dev",
    "dnf": "gcc pkgconf python3-devel {}-devel",
}

# A lower limit is too small to lock pinned tensors of a useful size.
MEMLOCK_BYTES = 128 << 20

# Enough for the rings of 256 workers with the default queue depth: 28 KiB each, for 256
# entries of 64 bytes and 512 of 16 (io_uring_setup(2)).
RINGS_BYTES = 8 << 20

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
    refused = list(
        itertools.takewhile(lambda name: not installed.engines[name]["works"], FAST_ENGINES)
    )
    best = FAST_ENGINES[len(refused)] if len(refused) < len(FAST_ENGINES) else None
    # What was measured to be the fastest is no fault, even if it is not a fast engine.
    tuned = best is not None and installed.chosen_by == "profile"
    severity = "slow" if installed.engine in FAST_ENGINES or tuned else "broken"
    if installed.error:
        yield _of_handles(installed)
    elif best and installed.engine != best and not tuned:
        yield _of_choice(system, installed, severity, best)
    built = {name: installed.engines[name] for name in refused}
    blocked = [name for name in refused if _seccomp_blocks(system, name, built[name])]
    for name, found in built.items():
        if name in blocked:
            if name != blocked[0]:
                continue  # the first one's steps allow all of them
            key, steps = "seccomp", _seccomp_steps(system, blocked)
            names = " and ".join(blocked)
            problem = f"a seccomp profile blocks the system calls of {names}"
        elif found["built"]:
            key, problem, steps = _of_kernel(system, name, found)
        else:
            key, problem = "not-built", f"this build of nvmeio does not contain {name}"
            steps = _building(system, installed, name)
        yield _remedy(f"{name}-{key}", severity, problem, *steps)


def _of_choice(system: System, installed: Installation, severity: str, best: str) -> Remedy:
    """Return the remedy if a better engine works, but is not used."""
    if installed.chosen_by == "variable":
        problem = (
            f"NVMEIO_ENGINE={installed.engine} is set, so nvmeio does not use {best}, "
            "which works here"
        )
        step = _step("let nvmeio choose, unless you want this:", "unset NVMEIO_ENGINE")
        return _remedy("engine-chosen", severity, problem, step)
    problem = (
        f"with these settings nvmeio uses {installed.engine}, because {best}'s "
        f"{_rings_need(system)}"
    )
    fewer = _step("or use fewer workers:", "export NVMEIO_WORKERS=1")
    return _remedy("rings", severity, problem, *_memlock_steps(system), fewer)


def _of_handles(installed: Installation) -> Remedy:
    """Return the remedy if no handle can be opened, mostly because of a wrong setting."""
    named = re.findall(r"\bNVMEIO_\w+", installed.error)
    if not named:
        # An error of a profile names its file or directory, not the variable.
        likely = "PROFILE" if "profile" in installed.error else "ENGINE"
        named = [f"NVMEIO_{likely}"] * bool(installed.environment.get(f"NVMEIO_{likely}"))
    steps = []
    if "there is no profile of" in installed.error:
        text = "make a profile, or use that of another user:"
        commands = ("nvmeio tune DIR", "export XDG_CONFIG_HOME=/home/USER/.config")
        steps.append(_step(text, *commands))
    if named:
        text = "correct the value, or remove the variable:"
        steps.append(_step(text, f"unset {named[0]}"))
    else:
        text = "raise the limits of this process on files, threads and memory; they are:"
        steps.append(_step(text, "ulimit -n", "ulimit -u", "ulimit -v"))
    return _remedy("settings", "broken", installed.error, *steps)


def _building(system: System, installed: Installation, name: str) -> tuple[Step, ...]:
    """Return the steps to build an engine that was left out."""
    library = LIBRARIES[name]
    switch = f"NVMEIO_WITH_{library.upper()}"
    steps = []
    if installed.features[library]["reason"] == f"{switch}=no":
        text = f"remove the variable that excluded {library} from the build:"
        steps.append(_step(text, f"unset {switch}"))
    if manager := system.package_manager:
        command = f"{manager} install {PACKAGES[manager].format(library)}"
        steps.append(_step("install what the build needs:", _as_root(system, command)))
    else:
        steps.append(Step(f"install a C compiler, and {library} with its headers"))
    return (*steps, _step(REBUILDING, REBUILD))


Refusal = tuple[str, str, tuple[Step, ...]]


def _sysctl_blocks(system: System, name: str, found: EngineInfo) -> bool:
    disabled, group = system.io_uring_disabled, system.io_uring_group
    outside = not system.may_administer and group not in system.groups
    closed = disabled == 2 or (disabled == 1 and outside)
    return name == "io_uring" and found["errno"] == errno.EPERM and closed


def _seccomp_blocks(system: System, name: str, found: EngineInfo) -> bool:
    if not found["built"] or _sysctl_blocks(system, name, found):
        return False
    if found["errno"] == errno.ENOSYS:
        # Old kernels return it, and so do some filters.
        older = name == "io_uring" and system.kernel_version < (5, 1)
        return not older and (system.seccomp or bool(system.container))
    return found["errno"] in (errno.EPERM, errno.EACCES)


def _of_kernel(system: System, name: str, found: EngineInfo) -> Refusal:
    """Return key, problem and steps for an engine that the kernel refuses itself."""
    error = found["errno"]
    if _sysctl_blocks(system, name, found):
        return _of_sysctl(system)
    if error == errno.ENOSYS:
        needed = "Linux 5.1 or newer, built with CONFIG_IO_URING=y; 6.1 or newer is best"
        if name == "libaio":
            needed = "a kernel built with CONFIG_AIO=y"
        return "kernel", f"Linux {system.kernel} has no {name}", (Step(f"boot {needed}"),)
    if name == "io_uring" and error == errno.ENOMEM:
        return "memlock", f"io_uring's {_rings_need(system)}", _memlock_steps(system)
    if name == "libaio" and error == errno.EAGAIN:
        commands = _kept(system, f"fs.aio-max-nr={AIO_EVENTS}", "91-nvmeio.conf")
        text = f"{_host(system)}raise the limit, now and after a reboot; it costs nothing:"
        problem = (
            f"libaio has no free events: all processes together use {system.aio_events} "
            f"of {system.aio_events_max}"
        )
        return "events", problem, (_step(text, *commands),)
    if error == errno.EMFILE:
        text = "allow more open files in this shell, and start the program there:"
        step = _step(text, "ulimit -n $(ulimit -Hn)")
        problem = f"{name} needs a file descriptor, and all {system.open_files} are in use"
        return "open-files", problem, (step,)
    dmesg = _as_root(system, "dmesg | tail")
    step = _step("the kernel's messages may give the cause:", dmesg)
    return "failed", f"{name} fails: {found['reason']}", (step,)


def _of_sysctl(system: System) -> Refusal:
    """Return the remedy for kernel.io_uring_disabled: admin-guide/sysctl of Linux."""
    value, group, where = system.io_uring_disabled, system.io_uring_group, _host(system)
    commands = _kept(system, "kernel.io_uring_disabled=0", "90-nvmeio.conf")
    text = (
        f"{where}allow io_uring to all processes, now and after a reboot (bugs in it "
        "were used for attacks: do it only if you trust the programs):"
    )
    steps = [_step(text, *commands)]
    if value == 1 and group is not None and group >= 0:
        command = f"usermod -aG $(getent group {group} | cut -d: -f1) $USER"
        text = f"or {where}join group {group}, which may use it, and log in again:"
        steps.append(_step(text, _as_root(system, command)))
    elif value == 1:
        lines = (
            "groupadd --system io_uring",
            "usermod -aG io_uring $USER",
            "sysctl -w kernel.io_uring_group=$(getent group io_uring | cut -d: -f3)",
        )
        text = f"or {where}allow it to a group, join that group, and log in again:"
        steps.append(_step(text, *(_as_root(system, line) for line in lines)))
    if system.seccomp:
        text = "then check again, because a seccomp profile may block it too:"
        steps.append(_step(text, "nvmeio doctor"))
    whom = "all processes" if value == 2 else "all but root and one group"
    problem = (
        f"sysctl kernel.io_uring_disabled is {value}, which blocks io_uring for {whom}"
    )
    return "sysctl", problem, tuple(steps)


def _seccomp_steps(system: System, names: Sequence[str]) -> tuple[Step, ...]:
    """Return the steps to allow the system calls of engines in containers and units.

    docs/troubleshooting.md has the same recipe, which its tests run.
    """
    calls = [call for name in names for call in CALLS[name]]
    listed = ", ".join(f'"{call}"' for call in calls)
    allowed = f'.syscalls += [{{"names": [{listed}], "action": "SCMP_ACT_ALLOW"}}]'
    risk = "; bugs in it were used to break out of containers" * ("io_uring" in names)
    engines = " and ".join(names)
    trust = f"(do it only if you trust what runs there{risk})"
    steps = {
        program: _step(
            f"start the container with a profile that also allows {engines} {trust}:",
            f"curl -fsSL -o default.json {PROFILE}",
            f"jq '{allowed}' default.json > {ALLOWING}",
            f"{program} run --security-opt seccomp={ALLOWING} --ulimit memlock=-1 ...",
        )
        for program in ("docker", "podman")
    }
    steps["kubernetes"] = _step(
        f"on the node of a running container, as root, extend its profile {trust}; copy "
        "the result to all nodes, and name it in the pod:",
        "crictl inspect $(crictl ps --name CONTAINER --quiet) > container.json",
        f"jq '.info.runtimeSpec.linux.seccomp | {allowed}' container.json > {ALLOWING}",
        f"install -D -m 644 {ALLOWING} /var/lib/kubelet/seccomp/{ALLOWING}",
        "",
        "spec:",
        "  securityContext:",
        "    seccompProfile:",
        "      type: Localhost",
        f"      localhostProfile: {ALLOWING}",
    )
    if system.container in steps:
        return (steps[system.container],)
    for program in ("docker", "podman", "kubernetes"):
        step = steps[program]
        steps[program] = replace(step, text=f"{program}: {step.text}")
    text = "a service of systemd with a SystemCallFilter: add these calls to [Service]:"
    unit = _step(text, f"SystemCallFilter={' '.join(calls)}")
    return (*steps.values(), unit)


def _rings_need(system: System) -> str:
    """Return what io_uring's rings need more of, in words."""
    limit = system.memlock_bytes
    if limit is None:
        return "rings need more memory than is free"
    return f"rings need more locked memory than {in_binary(limit)}, the limit (ulimit -l)"


def _memlock_steps(system: System) -> tuple[Step, ...]:
    """Return the steps to lock more memory, for each way to start a process.

    Locked memory cannot be swapped out, which is what the limit protects others from.
    """
    if system.container in ("docker", "podman"):
        command = f"{system.container} run --ulimit memlock=-1 ..."
        text = "start the container without the limit, and check it there by `ulimit -l`:"
        return (_step(text, command),)
    if system.container == "kubernetes":
        commands = (
            "sudo systemctl edit containerd   # [Service], LimitMEMLOCK=infinity",
            "sudo systemctl restart containerd",
        )
        text = "a pod cannot ask for it; raise the limit of the runtime, on each node:"
        return (_step(text, *commands),)
    shell = _as_root(system, "prlimit --pid $$ --memlock=unlimited:unlimited")
    lines = "printf '%s\\n' '* - memlock unlimited' 'root - memlock unlimited'"
    file = _as_root(system, "tee /etc/security/limits.d/90-nvmeio.conf")
    return (
        _step("in this shell only, and at once:", shell),
        _step(
            "or for all users, from their next login; they can then lock all memory:",
            f"{lines} | {file}",
        ),
        _step("or for a service of systemd, in [Service]:", "LimitMEMLOCK=infinity"),
    )


# Other problems of the machine and of the build.


def _of_variables(system: System, installed: Installation) -> Iterator[Remedy]:
    for name, near in unknown_variables(installed.environment).items():
        problem = f"{name} is set, but nvmeio has no such variable, and ignores it"
        step = _step("remove it:", f"unset {name}")
        if near:
            problem += f"; did you mean {near}?"
            value = shlex.quote(installed.environment[name])
            commands = (f"export {near}={value}", f"unset {name}")
            step = _step("set the other one instead:", *commands)
        yield _remedy("unknown-variable", "hint", problem, step)


def _of_huge_pages(system: System, installed: Installation) -> Iterator[Remedy]:
    """Memory in small pages makes large transfers slow: docs/decisions.md."""
    reserved = installed.environment.get("NVMEIO_POOL_HUGETLB") == "1"
    if reserved and system.huge_pages_free == 0:
        count = HUGE_PAGES_BYTES // (system.huge_page_bytes or HUGE_PAGES_BYTES)
        command = _as_root(system, f"sysctl -w vm.nr_hugepages={count}")
        problem = "NVMEIO_POOL_HUGETLB=1 is set, but no reserved huge page is free"
        text = "reserve 1 GiB, for example; other memory then cannot use it:"
        yield _remedy("hugetlb", "hint", problem, _step(text, command))
    if reserved and system.huge_pages_free:
        return
    effect = "so that some drives reach less than half their speed"
    if system.transparent_huge_pages == "":
        problem = f"this kernel has no transparent huge pages, {effect}"
        step = Step("boot a kernel with CONFIG_TRANSPARENT_HUGEPAGE=y")
        yield _remedy("huge-pages", "slow", problem, step)
    elif system.transparent_huge_pages == "never":
        where = _host(system)
        switch = "tee /sys/kernel/mm/transparent_hugepage/enabled"
        command = f"echo madvise | {_as_root(system, switch)}"
        steps = (
            _step(
                f"{where}allow them to programs that ask for them, until the next boot:",
                command,
            ),
            _step(
                f"{where}to keep that, add to the kernel's command line:",
                "transparent_hugepage=madvise",
            ),
        )
        problem = f"transparent huge pages are switched off, {effect}"
        yield _remedy("huge-pages", "slow", problem, *steps)


def _of_build(system: System, installed: Installation) -> Iterator[Remedy]:
    def rebuilding(key: str, severity: str, problem: str, *commands: str) -> Remedy:
        return _remedy(key, severity, problem, _step(REBUILDING, *commands))

    if installed.debug:
        problem = "nvmeio was built with NVMEIO_DEBUG=1, so it is not optimized"
        yield rebuilding("debug-build", "slow", problem, "unset NVMEIO_DEBUG", REBUILD)
    if installed.test_build:
        problem = "this is the test build, which can inject faults and is slower"
        unset = "unset NVMEIO_TEST_BUILD NVMEIO_FAULTS"
        yield rebuilding("test-build", "slow", problem, unset, REBUILD)
    elif "NVMEIO_FAULTS" in installed.environment:
        problem = "NVMEIO_FAULTS is set, but only the test build injects faults"
        yield rebuilding("test-build", "hint", problem, f"NVMEIO_TEST_BUILD=1 {REBUILD}")
    if not installed.features["openmp"]["built"] and system.processors > 1:
        problem = "nvmeio was built without OpenMP, so nvmeio.memcpy uses one thread"
        commands = ("unset NVMEIO_WITH_OPENMP", f"CC=gcc {REBUILD}")
        yield rebuilding("openmp", "hint", problem, *commands)


def _of_memlock(system: System, installed: Installation) -> Iterator[Remedy]:
    limit = system.memlock_bytes
    if system.may_lock or limit is None or limit >= MEMLOCK_BYTES:
        return
    problem = f"only {in_binary(limit)} may be locked (ulimit -l)"
    if not installed.rings_fit and installed.engines["io_uring"]["works"]:
        problem += (
            f", too little for {RING_WORKERS} rings of io_uring: handles with that many "
            "workers, or in that many processes, use libaio instead; "
            f"{in_binary(RINGS_BYTES)} is enough"
        )
    else:
        problem += "; pinned memory beyond that works, but is not locked"
    yield _remedy("memlock", "hint", problem, *_memlock_steps(system))


# Problems of a path.


def _of_access(system: System, storage: Storage) -> Iterator[Remedy]:
    if storage.error:
        problem = f"{storage.path} cannot be used: {storage.error}"
        step = Step("name a file, a folder or a block device that you may read")
        yield _remedy("path", "broken", problem, step)
    elif storage.mount_point and not storage.writable:
        command = f"setfacl -m u:{system.uid}:rwX {shlex.quote(storage.path)}"
        problem = f"you may read {storage.path}, but not write there"
        text = "use another folder, or give yourself write permission for this one:"
        if storage.read_only:
            command = f"mount -o remount,rw {shlex.quote(storage.mount_point)}"
            problem = (
                f"{storage.path} can only be read, because {storage.mount_point} is "
                "mounted read-only"
            )
            text = "mount it for writing:"
        step = _step(text, _as_root(system, command))
        yield _remedy("read-only", "hint", problem, step)


def _of_page_cache(system: System, storage: Storage) -> Iterator[Remedy]:
    if storage.error or storage.in_memory or storage.direct is not False:
        return
    steps = [Step("use a folder on a local file system with O_DIRECT, such as ext4 or XFS")]
    if system.container in ("docker", "podman"):
        command = f"{system.container} run -v /mnt/nvme:/data ..."
        steps.append(_step("or mount a folder of the host into the container:", command))
    problem = (
        f"{storage.path}: {storage.file_system} has no O_DIRECT, so all bytes go through "
        "the page cache"
    )
    yield _remedy("no-o-direct", "broken", problem, *steps)


def _of_space(system: System, storage: Storage) -> Iterator[Remedy]:
    total, free = storage.total_bytes, storage.free_bytes
    if storage.error or not storage.writable or not total or storage.in_memory:
        return
    if free < max(FREE_BYTES_MIN, FREE_SHARE_MIN * total):
        has, of = sizes(free, total)
        problem = (
            f"{storage.path}: only {has} of {of} are free; new files may be fragmented, "
            "or not fit"
        )
        command = f"du -xh {shlex.quote(storage.mount_point)} | sort -h | tail -n 20"
        step = _step("find what takes the most space:", command)
        yield _remedy("nearly-full", "hint", problem, step)


def _of_device(system: System, storage: Storage) -> Iterator[Remedy]:
    # Virtual disks claim to be rotational, but have no model: ignore them.
    turns = storage.rotational and storage.model
    if turns:
        problem = (
            f"{storage.path} is on {storage.device} ({storage.model}), a hard disk: its "
            "seeks limit the speed"
        )
        yield _remedy("rotational", "hint", problem, Step("use an NVMe drive"))
    # bfq spends CPU time on every request, and favours latency over throughput:
    # Documentation/block/bfq-iosched.rst of Linux.  No harm is known of the others.
    if storage.scheduler == "bfq" and not turns:
        switch = f"tee /sys/block/{storage.device}/queue/scheduler"
        command = f"echo none | {_as_root(system, switch)}"
        problem = (
            f"{storage.path}: the I/O scheduler bfq of {storage.device} costs CPU time and "
            "throughput"
        )
        text = "use none until the next boot; programs then share the drive less fairly:"
        yield _remedy("scheduler", "slow", problem, _step(text, command))
    number = storage.numa_node
    near = [node for node in system.nodes if node.number == number]
    if len(system.nodes) > 1 and near and not near[0].processors:
        command = f"numactl --cpunodebind={number} --preferred={number} python ..."
        problem = (
            f"{storage.path}: {storage.device} is attached to NUMA node {number}, but "
            "this process may not run on that node's processors"
        )
        step = _step("run the program on that node:", command)
        yield _remedy("numa", "hint", problem, step)


CHECKS: tuple[Callable[[System, Installation], Iterator[Remedy]], ...] = (
    _of_engines,
    _of_variables,
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
