"""``nvmeio doctor``: check whether nvmeio works here, and what slows it down."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nvmeio._arguments.units import in_binary
from nvmeio._cli.arguments import Parser, option
from nvmeio._cli.problems import Problem, problems
from nvmeio._cli.system import Installation, Storage, System, installation, storage_of
from nvmeio._cli.terminal import Terminal
from nvmeio._cli.trials import described

# The version of the JSON.  Increase it if a key is removed or changes its meaning.
SCHEMA = 2

DETAILS = """\
Checks the kernel, the engines, memory and processors, and for each PATH the
file system and its device.  Changes no setting.  In a writable folder it
writes 1 MiB to a temporary file, reads it back and compares.  Each problem
ends with the section of nvmeio's documentation that says what to do.

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
    problems: Sequence[Problem]

    @property
    def verdict(self) -> str:
        """The speed to expect: "full", "slower" or "none"."""
        severities = {problem.severity for problem in self.problems}
        if "broken" in severities:
            return "none"
        return "slower" if "slow" in severities else "full"

    @property
    def summary(self) -> str:
        """The verdict in one line, with the reasons."""
        if self.verdict == "full":
            words = [str(self.installed.engine)]
            words[0] += " (chosen by a profile)" * (self.installed.chosen_by == "profile")
            words += ["O_DIRECT"] * any(one.direct for one in self.storages)
            return f"nvmeio works here at full speed: {', '.join(words)}"
        severity = "broken" if self.verdict == "none" else "slow"
        said = "; ".join(one.problem for one in self.problems if one.severity == severity)
        if self.verdict == "slower":
            return f"nvmeio works here, but slower than it could: {said}"
        return f"nvmeio works slowly here, or not at all: {said}"

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "summary": self.summary,
            "installation": asdict(self.installed),
            "system": asdict(self.system),
            "paths": [asdict(storage) for storage in self.storages],
            "problems": [asdict(problem) for problem in self.problems],
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
    report = Report(machine, installed, storages, problems(machine, installed, storages))
    if options.json:
        terminal.say(json.dumps(report.as_json(), indent=2))
    else:
        _show(report, terminal)
    return 1 if report.verdict == "none" else 0


def _show(report: Report, terminal: Terminal) -> None:
    terminal.say(f"{report.summary}\n")
    rows: list[Sequence[str]] = []
    for name, found in report.installed.configuration["engines"].items():
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
    for number, one in enumerate(report.problems, 1):
        terminal.say(f"{number}. {one.problem}\n   see {one.see}")


def _installation_rows(installed: Installation) -> list[Sequence[str]]:
    found, build = installed.configuration, installed.configuration["build"]
    versions = [f"{name} {one}" for name, one in found["versions"].items() if one]
    built = [
        f"{name} {feature['version']}".strip() if feature["built"] else f"no {name}"
        for name, feature in build["features"].items()
    ]
    built += ["without optimization"] * build["debug"]
    built += ["with faults on purpose"] * build["test_build"]
    rows: list[Sequence[str]] = [
        ("versions", ", ".join(versions)),
        ("built by", f"{build['compiler']}, with {', '.join(built)}"),
    ]
    if settings := [f"{name}={value}" for name, value in found["environment"].items()]:
        rows.append(("environment", " ".join(settings)))
    rows.append(("profile", _profile(installed)))
    copies = found["copies"]
    rows.append(("copies", f"small ones by {copies['small']}, large by {copies['large']}"))
    if limit := found["pool"].get("bytes_limit"):
        rows.append(("pool", f"at most {in_binary(limit)}"))
    return rows


def _chosen_by(installed: Installation) -> str:
    if installed.chosen_by == "profile" and installed.profile is not None:
        return f"chosen by the profile {installed.profile['file']}"
    return "chosen by NVMEIO_ENGINE" if installed.chosen_by == "variable" else ""


def _profile(installed: Installation) -> str:
    """Describe the profile in use, or say why there is none."""
    selected = installed.configuration["environment"].get("NVMEIO_PROFILE")
    if installed.profile is not None:
        return f"{installed.profile['file']}: {described(installed.profile['options'])}"
    if not selected:
        return "none (NVMEIO_PROFILE is not set)"
    return (
        f"none for NVMEIO_PROFILE={selected} ({installed.profiles}); `nvmeio tune DIR` "
        "makes one"
    )


def _system_rows(system: System) -> list[Sequence[str]]:
    memory = in_binary(system.memory_bytes), in_binary(system.memory_total_bytes)
    locked = "no limit"
    if system.memlock_bytes is not None:
        locked = f"at most {in_binary(system.memlock_bytes)} (ulimit -l)"
        if system.may_lock:
            locked = "no limit, by CAP_IPC_LOCK"
    reserved = "none"
    if system.huge_pages:
        size = in_binary(system.huge_page_bytes)
        reserved = f"{system.huge_pages} of {size}, {system.huge_pages_free} of them free"
    kind = system.transparent_huge_pages or "not in this kernel"
    filtered = ", system calls are filtered" * system.seccomp
    return [
        ("kernel", f"Linux {system.kernel}{filtered}"),
        ("processor", system.processor),
        ("processors", f"{system.processors} of {system.processors_total} may be used"),
        ("memory", f"{memory[0]} of {memory[1]} may be used"),
        ("locked memory", locked),
        ("huge pages", f"transparent: {kind}; reserved: {reserved}"),
    ]


def _storage_row(storage: Storage) -> Sequence[str]:
    if not storage.mount_point and not storage.device:
        return (storage.path, "", "", "", "", "", storage.error)
    mounted, direct = storage.mount_point, "not tried"
    if storage.direct is not None:
        direct = in_binary(storage.alignment_bytes or 1) if storage.direct else "no"
    model = f" ({storage.model})" if storage.model else ""
    remarks = [storage.error] * bool(storage.error)
    if mounted and not storage.writable and not storage.error:
        remarks.append("read-only" if storage.read_only else "not writable by this user")
    return (
        storage.path,
        f"{storage.file_system} at {mounted}" if mounted else "",
        f"{storage.device}{model}" or ("memory" if storage.in_memory else storage.source),
        direct,
        storage.scheduler,
        in_binary(storage.free_bytes) if mounted else "",
        ", ".join(remarks),
    )
