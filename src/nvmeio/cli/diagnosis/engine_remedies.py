"""Why nvmeio's engines do not work here, or are left out, and how to get them."""

import errno
import itertools
import re
from collections.abc import Iterator

from nvmeio._types import EngineInfo
from nvmeio.cli.diagnosis.installation import FAST_ENGINES, Installation
from nvmeio.cli.diagnosis.remedy import REBUILD, Remedy, Step, as_root
from nvmeio.cli.diagnosis.system import System

__all__ = ["engine_remedies", "memlock_steps"]

# For each engine its library, and what a seccomp profile has to allow.
LIBRARIES = {"io_uring": "liburing", "libaio": "libaio"}
CALLS = {
    "io_uring": ("io_uring_setup", "io_uring_enter", "io_uring_register"),
    "libaio": ("io_setup", "io_submit", "io_getevents", "io_destroy"),
}

# Docker's default profile, which refuses io_uring since Docker 25 (moby pull 46762);
# containerd and podman refuse it as well.
PROFILE = "https://raw.githubusercontent.com/moby/profiles/main/seccomp/default.json"

# 16 times what the kernel allows by itself; none of it is allocated before it is used
# (admin-guide/sysctl/fs of Linux).
AIO_EVENTS = 1 << 20

PACKAGES = {
    "apt-get": "gcc pkg-config python3-dev {}-dev",
    "dnf": "gcc pkgconf python3-devel {}-devel",
}


def engine_remedies(system: System, installed: Installation) -> Iterator[Remedy]:
    """Tell what keeps the fastest engine from being used.

    Parameters
    ----------
    system : System
        The machine.
    installed : Installation
        With engines that were tried there.

    Yields
    ------
    Remedy
        At least one that is "broken", where no fast engine is in use.
    """
    severity: str = "slow" if installed.fast else "broken"
    refused = list(
        itertools.takewhile(lambda name: not _works(installed, name), FAST_ENGINES)
    )
    best = FAST_ENGINES[len(refused)] if len(refused) < len(FAST_ENGINES) else None
    if installed.error:
        yield _of_handles(installed)
    elif best and installed.engine != best:
        yield _of_choice(installed, best, severity)
    for name in refused:
        if installed.engines[name]["built"]:
            yield _of_kernel(system, name, installed.engines[name], severity)
        else:
            yield _of_build(system, installed, name, severity)


def _works(installed: Installation, name: str) -> bool:
    return installed.engines[name]["works"]


def _of_handles(installed: Installation) -> Remedy:
    """No handle can be opened: mostly because of a setting that makes no sense."""
    named = re.findall(r"\bNVMEIO_\w+", installed.error)
    if not named:
        # What is wrong with a profile names its file or its folder.
        likely = "PROFILE" if "profile" in installed.error else "ENGINE"
        named = [f"NVMEIO_{likely}"] * bool(installed.environment.get(f"NVMEIO_{likely}"))
    if named:
        steps = [Step("take the setting away, or correct it:", (f"unset {named[0]}",))]
    else:
        limits = ("ulimit -n", "ulimit -u", "ulimit -v")
        steps = [Step("look at the limits of this process:", limits)]
    return Remedy("settings", "broken", installed.error, tuple(steps))


def _of_choice(installed: Installation, best: str, severity: str) -> Remedy:
    """The environment names another engine than the best that works."""
    return Remedy(
        "engine-chosen",
        severity,
        f"NVMEIO_ENGINE={installed.engine} keeps nvmeio from using {best}",
        (Step("leave the choice to nvmeio:", ("unset NVMEIO_ENGINE",)),),
    )


def _of_build(system: System, installed: Installation, name: str, severity: str) -> Remedy:
    """An engine was left out when nvmeio was compiled."""
    library = LIBRARIES[name]
    switch = f"NVMEIO_WITH_{library.upper()}"
    steps = []
    if installed.features[library]["reason"] == f"{switch}=no":
        steps.append(
            Step("build without the switch that leaves it out:", (f"unset {switch}",))
        )
    if system.package_manager:
        packages = PACKAGES[system.package_manager].format(library)
        command = as_root(system.uid, f"{system.package_manager} install {packages}")
        steps.append(Step("install what the build needs:", (command,)))
    else:
        steps.append(Step(f"install a C compiler and {library} with its headers"))
    steps.append(
        Step("build nvmeio anew, in its checkout or its unpacked sdist:", (REBUILD,))
    )
    return Remedy(f"{name}-not-built", severity, f"{name} was not built in", tuple(steps))


def _of_kernel(system: System, name: str, found: EngineInfo, severity: str) -> Remedy:
    """An engine was built, and the kernel says no."""
    error = found["errno"]
    if name == "io_uring" and error == errno.EPERM and _sysctl_refuses(system):
        return _of_sysctl(system, severity)
    if error == errno.ENOSYS and _kernel_lacks(system, name):
        return _of_old_kernel(system, name, severity)
    if error in (errno.EPERM, errno.ENOSYS, errno.EACCES):
        return _of_seccomp(system, name, severity)
    if name == "io_uring" and error == errno.ENOMEM:
        problem = "io_uring may not lock enough memory for its rings"
        return Remedy("io_uring-memlock", severity, problem, memlock_steps(system))
    if name == "libaio" and error == errno.EAGAIN:
        return _of_aio_events(system, severity)
    if error == errno.EMFILE:
        steps = (Step("allow more open files:", ("ulimit -n $(ulimit -Hn)",)),)
        problem = f"{name} finds no free file descriptor: {system.open_files} are allowed"
        return Remedy(f"{name}-open-files", severity, problem, steps)
    step = Step("see what the kernel has to say:", (as_root(system.uid, "dmesg | tail"),))
    return Remedy(f"{name}-failed", severity, f"{name} fails: {found['reason']}", (step,))


def _kernel_lacks(system: System, name: str) -> bool:
    """Tell whether ENOSYS is the kernel's word: a filter of system calls says it, too."""
    older = name == "io_uring" and system.kernel_version < (5, 1)
    return older or not (system.seccomp or system.container)


def _of_old_kernel(system: System, name: str, severity: str) -> Remedy:
    step = Step("boot Linux 5.1 or newer, best 6.1 or newer, with CONFIG_IO_URING=y")
    if name == "libaio":
        step = Step("boot a kernel that was built with CONFIG_AIO=y")
    problem = f"Linux {system.kernel} has no {name}"
    return Remedy(f"{name}-kernel", severity, problem, (step,))


def _sysctl_refuses(system: System) -> bool:
    """Tell whether kernel.io_uring_disabled refuses this process: admin-guide/sysctl."""
    if system.io_uring_disabled == 1:
        return not system.may_administer and system.io_uring_group not in system.groups
    return system.io_uring_disabled == 2


def _of_sysctl(system: System, severity: str) -> Remedy:
    value, group = system.io_uring_disabled, system.io_uring_group
    where = "on the host of this container, " if system.container else ""
    set_it = "sysctl -w kernel.io_uring_disabled=0"
    keep_it = (
        "echo kernel.io_uring_disabled=0 | "
        f"{as_root(system.uid, 'tee /etc/sysctl.d/90-nvmeio.conf')}"
    )
    commands = (as_root(system.uid, set_it), keep_it)
    steps = [Step(f"{where}allow io_uring, now and after the next boot:", commands)]
    if value == 1:
        steps.append(_join_group(system, where, group))
    if system.seccomp:
        steps.append(
            Step(
                "then ask again: a filter of system calls is at work as well:",
                ("nvmeio doctor",),
            )
        )
    whom = "everybody" if value == 2 else "all but root and one group"
    problem = (
        f"sysctl kernel.io_uring_disabled is {value}, which refuses io_uring to {whom}"
    )
    return Remedy("io_uring-sysctl", severity, problem, tuple(steps))


def _join_group(system: System, where: str, group: int | None) -> Step:
    """Say how a user gets io_uring where the sysctl leaves it to a group."""
    if group is not None and group >= 0:
        command = f"usermod -aG $(getent group {group} | cut -d: -f1) $USER"
        text = f"or {where}join the group {group}, which may use it, and log in anew:"
        return Step(text, (as_root(system.uid, command),))
    commands = (
        "groupadd --system io_uring",
        "usermod -aG io_uring $USER",
        "sysctl -w kernel.io_uring_group=$(getent group io_uring | cut -d: -f3)",
    )
    text = f"or {where}allow it to a group, join that, and log in anew:"
    return Step(text, tuple(as_root(system.uid, command) for command in commands))


def _of_seccomp(system: System, name: str, severity: str) -> Remedy:
    """A filter of system calls refuses an engine, as the profiles of containers do."""
    problem = f"a filter of system calls (seccomp) refuses {name}"
    steps = {
        "docker": _run_with_profile("docker", name),
        "podman": _run_with_profile("podman", name),
        "kubernetes": _pod_with_profile(name),
    }
    if system.container in steps:
        return Remedy(f"{name}-seccomp", severity, problem, (steps[system.container],))
    listed = "SystemCallFilter=" + " ".join(CALLS[name])
    unit = Step("in a service of systemd that filters, add to [Service]:", (listed,))
    return Remedy(f"{name}-seccomp", severity, problem, (*steps.values(), unit))


def _profile(name: str, condition: str = "") -> tuple[str, ...]:
    """Return the commands that make a profile which allows an engine."""
    listed = ", ".join(f'"{call}"' for call in CALLS[name])
    allowed = f'.syscalls += [{{"names": [{listed}], "action": "SCMP_ACT_ALLOW"}}]'
    return (
        f"curl -fsSLo default.json {PROFILE}",
        f"jq '{condition}{allowed}' default.json > nvmeio.json",
    )


def _run_with_profile(program: str, name: str) -> Step:
    start = f"{program} run --security-opt seccomp=nvmeio.json ..."
    text = f"with {program}, start the container with a profile that allows it:"
    return Step(text, (*_profile(name), start))


def _pod_with_profile(name: str) -> Step:
    # The profile is Docker's.  What it allows to some capabilities would be everybody's:
    # containerd reads it as the OCI has it, which knows no such conditions.
    without_capabilities = "del(.syscalls[] | select(.includes.caps)) | "
    return Step(
        "in Kubernetes, put a profile that allows it on each node, and name it in the pod:",
        (
            *_profile(name, without_capabilities),
            "sudo install -D -m 644 nvmeio.json /var/lib/kubelet/seccomp/nvmeio.json",
            "",
            "spec:",
            "  securityContext:",
            "    seccompProfile:",
            "      type: Localhost",
            "      localhostProfile: nvmeio.json",
        ),
    )


def _of_aio_events(system: System, severity: str) -> Remedy:
    commands = (
        as_root(system.uid, f"sysctl -w fs.aio-max-nr={AIO_EVENTS}"),
        f"echo fs.aio-max-nr={AIO_EVENTS} | "
        f"{as_root(system.uid, 'tee /etc/sysctl.d/91-nvmeio.conf')}",
    )
    where = "on the host of this container, " if system.container else ""
    step = Step(f"{where}allow more, now and after the next boot:", commands)
    problem = (
        f"libaio has no events left: {system.aio_events} of {system.aio_events_max} are in "
        "use by all processes together"
    )
    return Remedy("libaio-events", severity, problem, (step,))


def memlock_steps(system: System) -> tuple[Step, ...]:
    """Tell how a process may lock more memory.

    Parameters
    ----------
    system : System
        The machine, which may be a container.

    Returns
    -------
    tuple of Step
        One for each way in which a process may have been started.
    """
    unit = Step("in a service of systemd, add to [Service]:", ("LimitMEMLOCK=infinity",))
    by_container = {
        "docker": Step(
            "start the container with:", ("docker run --ulimit memlock=-1:-1 ...",)
        ),
        "podman": Step(
            "start the container with:", ("podman run --ulimit memlock=-1:-1 ...",)
        ),
        "kubernetes": Step(
            "a pod cannot ask for it; raise what its runtime gives, on each node:",
            (
                "sudo systemctl edit containerd   # [Service], LimitMEMLOCK=infinity",
                "sudo systemctl restart containerd",
            ),
        ),
    }
    if system.container in by_container:
        return (by_container[system.container],)
    shell = as_root(system.uid, "prlimit --pid $$ --memlock=unlimited:unlimited")
    lines = "printf '%s\\n' '* - memlock unlimited' 'root - memlock unlimited'"
    file = as_root(system.uid, "tee /etc/security/limits.d/90-nvmeio.conf")
    return (
        Step("in this shell, at once:", (shell,)),
        Step("for all users from their next login on:", (f"{lines} | {file}",)),
        unit,
    )
