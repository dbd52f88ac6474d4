"""``nvmeio doctor``: check whether nvmeio works here, and what would make it faster."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nvmeio._arguments.units import in_binary
from nvmeio._cli.arguments import Parser, option
from nvmeio._cli.remedies import Remedy, remedies
from nvmeio._cli.system import Installation, Storage, System, installation, storage_of
from nvmeio._cli.terminal import Terminal
from nvmeio._cli.trials import described

# The version of the JSON.  Increase it if a key is removed or changes its meaning.
SCHEMA = 1

DETAILS = """\
Checks the kernel, the engines, memory and processors, and for each PATH the
file system and its device.  Changes no setting.  In a writable folder it
writes 1 MiB to a temporary file, reads it back and compares.

exit status:
  0  nvmeio uses io_uring or libaio, or the engine that a profile chose, and
     every PATH can be used: with O_DIRECT, or because it is in memory
  1  nvmeio uses a slow engine or none, or a PATH cannot be used
  2  the command line is wrong

examples:
  nvmeio doctor                    this machine and the current folder
  nvmeio doctor /mnt/nvme /data    two folders; they may be on the same device
  nvmeio doctor --json | jq .verdict
"""


@dataclass(frozen=True)
class Report:
    system: System
    installed: Installation
    storages: Sequence[Storage]
    remedies: Sequence[Remedy]

    @property
    def verdict(self) -> str:
        """The speed to expect: "full", "slower" or "none"."""
        severities = {remedy.severity for remedy in self.remedies}
        if "broken" in severities:
            return "none"
        return "slower" if "slow" in severities else "full"

    @property
    def summary(self) -> str:
        """The verdict in one line, with the reasons."""
        reasons = [
            remedy
            for remedy in self.remedies
            if remedy.severity == ("broken" if self.verdict == "none" else "slow")
        ]
        said = "; ".join(remedy.problem for remedy in reasons)
        if self.verdict == "full":
            ways = dict.fromkeys(_way(storage) for storage in self.storages)
            ways.pop("", None)
            engine = str(self.installed.engine)
            engine += " (chosen by a profile)" * (self.installed.chosen_by == "profile")
            said = ", ".join([engine, *ways])
            return f"nvmeio works here at full speed: {said}"
        if self.verdict == "slower":
            return f"nvmeio works here, but slower than it could: {said}"
        if all(remedy.path for remedy in reasons):
            return f"{self.installed.engine} works here, but not with every path: {said}"
        if self.installed.error:
            return f"no handle can be opened here: {said}"
        return f"no fast engine is in use here: {said}"

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "summary": self.summary,
            "installation": asdict(self.installed),
            "system": asdict(self.system),
            "paths": [asdict(storage) for storage in self.storages],
            "remedies": [asdict(remedy) for remedy in self.remedies],
        }


def configure(parser: Parser) -> None:
    parser.epilog = DETAILS
    parser.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        default=["."],
        help="a folder, a file or a block device (default: the current folder)",
    )
    about = "write JSON to standard output: all figures, with units in the names of keys"
    option(parser, "--json", about)


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    """Examine all and report; return 1 unless a fast engine works with every path."""
    installed = installation()
    machine = System()
    # If no handle can be opened, the report says why, and nothing is transferred.
    storages = [
        storage_of(path, transfer=installed.engine is not None) for path in options.paths
    ]
    report = Report(machine, installed, storages, remedies(machine, installed, storages))
    if options.json:
        terminal.say(json.dumps(report.as_json(), indent=2))
        # With --json, report errors to people too.
        for storage in storages:
            if storage.error:
                terminal.note(f"nvmeio doctor: error: {storage.path}: {storage.error}")
    else:
        _show(report, terminal)
    return 1 if report.verdict == "none" else 0


def _show(report: Report, terminal: Terminal) -> None:
    terminal.say(f"{report.summary}\n")
    rows: list[Sequence[str]] = []
    for name, found in report.installed.engines.items():
        state = "works" if found["works"] else "refused" if found["built"] else "not built"
        reason = found["reason"]
        if name == report.installed.engine:
            state, reason = "in use", reason or _chosen_by(report.installed)
        rows.append((name, state, reason))
    terminal.table(("engine", "state", "why"), rows)
    rows = [*_installation_rows(report.installed), *_system_rows(report.system)]
    terminal.table(("machine", ""), rows)
    head = ("path", "file system", "device", "O_DIRECT", "scheduler", "free", "remarks")
    terminal.table(head, [_storage_row(storage) for storage in report.storages])
    if report.remedies:
        terminal.say("What would help, most useful first:")
    for number, remedy in enumerate(report.remedies, 1):
        terminal.say(f"\n{number}. {remedy.problem}")
        for step in remedy.steps:
            terminal.say(f"   - {step.text}")
            for command in step.commands:
                terminal.say(f"       {command}".rstrip())


def _installation_rows(installed: Installation) -> list[Sequence[str]]:
    versions = [f"{name} {found}" for name, found in installed.versions.items() if found]
    built = [
        f"{name} {feature['version']}".strip() if feature["built"] else f"no {name}"
        for name, feature in installed.features.items()
    ]
    built += ["without optimization"] * installed.debug
    built += ["with faults on purpose"] * installed.test_build
    rows: list[Sequence[str]] = [
        ("versions", ", ".join(versions)),
        ("built by", f"{installed.compiler}, with {', '.join(built)}"),
    ]
    if settings := [f"{name}={value}" for name, value in installed.environment.items()]:
        rows.append(("environment", " ".join(settings)))
    rows.append(("profile", _profile(installed)))
    return rows


def _chosen_by(installed: Installation) -> str:
    if installed.chosen_by == "profile" and installed.profile is not None:
        return f"chosen by the profile {installed.profile['file']}"
    return "chosen by NVMEIO_ENGINE" if installed.chosen_by == "variable" else ""


def _profile(installed: Installation) -> str:
    """Describe the profile in use, or say why there is none."""
    selected = installed.environment.get("NVMEIO_PROFILE")
    if installed.profile is not None:
        return f"{installed.profile['file']}: {described(installed.profile['options'])}"
    if not selected:
        return "none (NVMEIO_PROFILE is not set)"
    return (
        f"none for NVMEIO_PROFILE={selected} ({installed.profiles}); `nvmeio tune DIR` "
        "makes one"
    )


def _system_rows(system: System) -> list[Sequence[str]]:
    kernel = [f"Linux {system.kernel}", system.distribution]
    if system.container:
        in_one = "in a container" if system.container == "container" else ""
        kernel.append(in_one or f"in {system.container}")
    if system.seccomp:
        kernel.append("system calls are filtered")
    kernels = [name for name, works in system.copy_kernels.items() if works]
    if missing := [name for name in system.copy_kernels if name not in kernels]:
        kernels[-1] += f"; not with this processor: {', '.join(missing)}"
    nodes = [
        f"node {node.number}: {in_binary(node.memory_bytes)}, {node.processors} processors"
        for node in system.nodes
    ]
    memory = f"{in_binary(system.memory_bytes)} of {in_binary(system.memory_total_bytes)}"
    memory += " may be used"
    if system.pool_bytes is not None:
        memory += f"; at most {in_binary(system.pool_bytes)} by nvmeio's pool"
    rows: list[Sequence[str]] = [
        ("kernel", ", ".join(kernel)),
        ("processor", system.processor),
        ("processors", f"{system.processors} of {system.processors_total} may be used"),
        ("features", " ".join(system.features) or "none that copies use"),
        ("small copies", f"by {system.copy_small}"),
        ("large copies", f"by {system.copy_large}"),
        ("copy kernels", ", ".join(kernels)),
        ("NUMA", "; ".join(nodes) if len(nodes) > 1 else "one node"),
        ("memory", memory),
        ("locked memory", _memlock(system)),
        ("huge pages", _huge_pages(system)),
        ("io_uring", _io_uring(system)),
    ]
    if system.aio_events_max is not None:
        events = f"{system.aio_events} of {system.aio_events_max} events are in use"
        rows.append(("libaio", f"{events} (fs.aio-nr, fs.aio-max-nr)"))
    return rows


def _memlock(system: System) -> str:
    if system.memlock_bytes is None:
        return "no limit"
    limit = in_binary(system.memlock_bytes)
    if system.may_lock:
        return f"no limit, by CAP_IPC_LOCK (without it {limit}: ulimit -l)"
    return f"at most {limit} (ulimit -l)"


def _huge_pages(system: System) -> str:
    kind = system.transparent_huge_pages or "not in this kernel"
    reserved = "none"
    if system.huge_pages:
        size = in_binary(system.huge_page_bytes)
        reserved = f"{system.huge_pages} of {size}, {system.huge_pages_free} of them free"
    return f"transparent: {kind}; reserved: {reserved}"


def _io_uring(system: System) -> str:
    if system.io_uring_disabled is None:
        return "the kernel has no sysctl that forbids it"
    text = f"sysctl kernel.io_uring_disabled is {system.io_uring_disabled}"
    if system.io_uring_disabled == 1:
        text += f", kernel.io_uring_group is {system.io_uring_group}"
    return text


def _storage_row(storage: Storage) -> Sequence[str]:
    if not storage.mount_point and not storage.device:
        return (storage.path, "", "", "", "", "", storage.error)
    mounted, direct = storage.mount_point, "not tried"
    if storage.direct is not None:
        direct = in_binary(storage.alignment_bytes or 1) if storage.direct else "no"
    model = f" ({storage.model})" if storage.model else ""
    return (
        storage.path,
        f"{storage.file_system} at {mounted}" if mounted else "",
        f"{storage.device}{model}" or ("memory" if storage.in_memory else storage.source),
        direct,
        storage.scheduler,
        in_binary(storage.free_bytes) if mounted else "",
        ", ".join(_remarks(storage)),
    )


def _remarks(storage: Storage) -> list[str]:
    """Return the properties of a path that have no column of their own."""
    remarks = []
    if storage.error:
        remarks.append(storage.error)
    elif storage.mount_point and not storage.writable:
        remarks.append("read-only" if storage.read_only else "not writable by this user")
    if storage.rotational and storage.model:
        remarks.append("turns")
    if storage.numa_node is not None:
        remarks.append(f"NUMA node {storage.numa_node}")
    if storage.physical_block_bytes:
        sizes = f"{storage.logical_block_bytes}/{storage.physical_block_bytes}"
        remarks.append(f"sectors {sizes}")
    return remarks


def _way(storage: Storage) -> str:
    """Return how a path is accessed, in the words of the summary."""
    return "O_DIRECT" if storage.direct else "in memory" if storage.in_memory else ""
