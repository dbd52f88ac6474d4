"""``nvmeio doctor``: whether nvmeio works here, and what would make it faster."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nvmeio.cli.arguments import Parser
from nvmeio.cli.diagnosis.installation import Installation, installation
from nvmeio.cli.diagnosis.remedies import remedies
from nvmeio.cli.diagnosis.remedy import Remedy
from nvmeio.cli.diagnosis.storage import Storage, storage_of
from nvmeio.cli.diagnosis.system import System, system
from nvmeio.cli.terminal import Terminal
from nvmeio.cli.units import in_binary

__all__ = ["Report", "configure", "run"]

# Of the JSON; a new number where a key goes or changes what it means.
SCHEMA = 1

DETAILS = """\
Looks at the kernel, the engines, memory and processors, and for each PATH at
the file system and the device below it.  No setting is changed.  In a folder
that can be written to, 1 MiB goes to a temporary file, is read back and
compared.

exit status:
  0  io_uring or libaio works here, and every PATH can be used, with O_DIRECT
     or because it lies in memory
  1  nothing fast works here, or not with every PATH
  2  the command line is wrong

examples:
  nvmeio doctor                    this machine and the current folder
  nvmeio doctor /mnt/nvme /data    two folders; they may lie on the same device
  nvmeio doctor --json | jq .verdict
"""


@dataclass(frozen=True)
class Report:
    """All that was found out.

    Attributes
    ----------
    system : System
        The machine.
    installed : Installation
        What nvmeio is there.
    storages : sequence of Storage
        For each path what it lies on.
    remedies : sequence of Remedy
        What would help, most useful first.
    """

    system: System
    installed: Installation
    storages: Sequence[Storage]
    remedies: Sequence[Remedy]

    @property
    def verdict(self) -> str:
        """Say "full", "slower" or "none" of the speed that can be expected."""
        severities = {remedy.severity for remedy in self.remedies}
        if "broken" in severities:
            return "none"
        return "slower" if "slow" in severities else "full"

    @property
    def summary(self) -> str:
        """Say it in a line, with the reasons."""
        reasons = [
            remedy
            for remedy in self.remedies
            if remedy.severity == ("broken" if self.verdict == "none" else "slow")
        ]
        said = "; ".join(remedy.problem for remedy in reasons)
        if self.verdict == "full":
            ways = dict.fromkeys(_way(storage) for storage in self.storages)
            ways.pop("", None)
            said = ", ".join([str(self.installed.engine), *ways])
            return f"nvmeio works here at full speed: {said}"
        if self.verdict == "slower":
            return f"nvmeio works here, but slower than it could: {said}"
        if all(remedy.path for remedy in reasons):
            return f"{self.installed.engine} works here, but not with every path: {said}"
        return f"nothing fast works here: {said}"

    def as_json(self) -> dict[str, Any]:
        """Return the report as an object of JSON.

        Returns
        -------
        dict
            Its ``schema`` changes where a key goes or changes what it means.
        """
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
    """Add the arguments of the command.

    Parameters
    ----------
    parser : Parser
        Its own.
    """
    parser.epilog = DETAILS
    parser.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        default=["."],
        help="a folder, a file or a block device (default: the current folder)",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="write one object of JSON to standard output: all figures, with their units "
        "in the names of the keys",
    )


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    """Look at everything, and tell.

    Parameters
    ----------
    options : argparse.Namespace
        As ``configure`` made them.
    terminal : Terminal
        To tell it to.

    Returns
    -------
    int
        0 where something fast works, with every path; else 1.
    """
    installed = installation()
    machine = system()
    # Without a handle there is nothing to transfer with, and the report says why.
    storages = [
        storage_of(path, transfer=installed.engine is not None) for path in options.paths
    ]
    report = Report(machine, installed, storages, remedies(machine, installed, storages))
    if options.json:
        terminal.say(json.dumps(report.as_json(), indent=2))
        # For people, who read the report itself otherwise.
        for storage in storages:
            if storage.error:
                terminal.note(f"nvmeio doctor: error: {storage.path}: {storage.error}")
    else:
        _tell(report, terminal)
    return 1 if report.verdict == "none" else 0


def _tell(report: Report, terminal: Terminal) -> None:
    terminal.say(report.summary)
    terminal.say()
    terminal.table("", ("engine", "state", "why"), _engine_rows(report.installed))
    rows = [*_installation_rows(report.installed), *_system_rows(report.system)]
    terminal.table("", ("machine", ""), rows)
    head = ("path", "file system", "device", "O_DIRECT", "scheduler", "free", "remarks")
    terminal.table("", head, [_storage_row(storage) for storage in report.storages])
    if report.remedies:
        terminal.say("What would help, most useful first:")
    for number, remedy in enumerate(report.remedies, 1):
        terminal.say()
        terminal.say(f"{number}. {remedy.problem}")
        for step in remedy.steps:
            terminal.say(f"   - {step.text}")
            for command in step.commands:
                terminal.say(f"       {command}".rstrip())


def _engine_rows(installed: Installation) -> list[tuple[str, str, str]]:
    rows = []
    for name, found in installed.engines.items():
        state = "works" if found["works"] else "refused" if found["built"] else "not built"
        if name == installed.engine:
            state = "in use"
        rows.append((name, state, found["reason"]))
    return rows


def _installation_rows(installed: Installation) -> list[tuple[str, str]]:
    versions = [
        f"{name} {version}" for name, version in installed.versions.items() if version
    ]
    built = [
        f"{name} {feature['version']}".strip() if feature["built"] else f"no {name}"
        for name, feature in installed.features.items()
    ]
    if installed.debug:
        built.append("without optimization")
    if installed.test_build:
        built.append("with faults on purpose")
    rows = [
        ("versions", ", ".join(versions)),
        ("built by", f"{installed.compiler}, with {', '.join(built)}"),
    ]
    settings = [f"{name}={value}" for name, value in installed.environment.items()]
    return rows + ([("environment", " ".join(settings))] if settings else [])


def _system_rows(system: System) -> list[tuple[str, str]]:
    inside = {"": "", "container": "in a container"}.get(
        system.container, f"in {system.container}"
    )
    kernel = [f"Linux {system.kernel}", system.distribution, inside]
    kernel.append("system calls are filtered" if system.seccomp else "")
    copying = f"{system.copy_small}, large ones {system.copy_large}"
    rows = [
        ("kernel", ", ".join(filter(None, kernel))),
        ("processor", system.processor),
        ("processors", f"{system.processors} of {system.processors_total} may be used"),
        ("features", " ".join(system.features) or "none that copies use"),
        ("copies by", f"{copying}; of {_kernels(system)}"),
        ("NUMA", _numa(system)),
        ("memory", _memory(system)),
        ("locked memory", _memlock(system)),
        ("huge pages", _huge_pages(system)),
        ("io_uring", _io_uring(system)),
    ]
    if system.aio_events_max is not None:
        events = f"{system.aio_events} of {system.aio_events_max} events are in use"
        rows.append(("libaio", f"{events} (fs.aio-nr, fs.aio-max-nr)"))
    return rows


def _kernels(system: System) -> str:
    return ", ".join(
        name if works else f"{name} (not here)"
        for name, works in system.copy_kernels.items()
    )


def _numa(system: System) -> str:
    if len(system.nodes) == 1:
        return "one node"
    return "; ".join(
        f"node {node.number}: {in_binary(node.memory_bytes)}, {node.processors} processors"
        for node in system.nodes
    )


def _memory(system: System) -> str:
    text = f"{in_binary(system.memory_bytes)} of {in_binary(system.memory_total_bytes)}"
    if system.pool_bytes is None:
        return f"{text} may be used"
    return f"{text} may be used; at most {in_binary(system.pool_bytes)} by nvmeio's pool"


def _memlock(system: System) -> str:
    limit = system.memlock_bytes
    bound = "no limit" if limit is None else f"at most {in_binary(limit)} (ulimit -l)"
    return f"{bound}, which does not hold here: CAP_IPC_LOCK" if system.may_lock else bound


def _huge_pages(system: System) -> str:
    text = (
        f"transparent: {system.transparent_huge_pages or 'not in this kernel'}; reserved: "
    )
    if system.huge_pages == 0:
        return f"{text}none"
    size = in_binary(system.huge_page_bytes)
    return f"{text}{system.huge_pages} of {size}, {system.huge_pages_free} of them free"


def _io_uring(system: System) -> str:
    if system.io_uring_disabled is None:
        return "the kernel has no sysctl that forbids it"
    text = f"sysctl kernel.io_uring_disabled is {system.io_uring_disabled}"
    if system.io_uring_disabled != 1:
        return text
    return f"{text}, kernel.io_uring_group is {system.io_uring_group}"


def _storage_row(storage: Storage) -> tuple[str, ...]:
    if not storage.mount_point and not storage.device:
        return (storage.path, "", "", "", "", "", storage.error)
    mounted = (
        f"{storage.file_system} at {storage.mount_point}" if storage.mount_point else ""
    )
    model = f" ({storage.model})" if storage.model else ""
    return (
        storage.path,
        mounted,
        f"{storage.device}{model}" or ("memory" if storage.in_memory else storage.source),
        _direct(storage),
        storage.scheduler,
        in_binary(storage.free_bytes) if storage.mount_point else "",
        ", ".join(_remarks(storage)),
    )


def _direct(storage: Storage) -> str:
    if storage.direct is None:
        return "not tried"
    return f"{storage.alignment_bytes} bytes" if storage.direct else "no"


def _remarks(storage: Storage) -> list[str]:
    """Say what has no column of its own."""
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
    """Return how the bytes get to a path, as the summary says it."""
    return "O_DIRECT" if storage.direct else "in memory" if storage.in_memory else ""
