"""``nvmeio checkpoints``: list the steps of a root, and which of them are complete."""

import argparse
import datetime as dt
import json
import os
import shlex
from typing import Any

from nvmeio._arguments.units import in_binary
from nvmeio._cli.arguments import CommandError, Parser, option
from nvmeio._cli.folders import step_of
from nvmeio._cli.terminal import Terminal
from nvmeio._files.kinds import what_is_in
from nvmeio._files.paths import exists
from nvmeio.checkpoint import Checkpointer, CheckpointError
from nvmeio.checkpoint._restoring import Held, MovedError

# How often to list the steps, while a run that goes on removes and replaces them.
LISTS_MAX = 10

NOTES = """\
A step is complete if all of its files are there and have the right size; nvmeio
verify also checks their bytes.  The exit status is 1 if a step is damaged, or
if there is none.  --json also has each step's metadata: as plain JSON, apart
from values that JSON lacks, such as {"float": "nan"} or {"bytes": "eA=="}.

examples:
  nvmeio checkpoints run
  nvmeio checkpoints run --json | jq '.steps[-1].step'
"""


def configure(parser: Parser) -> None:
    parser.epilog = NOTES
    parser.add_argument("root", metavar="ROOT", help="the folder of a Checkpointer")
    option(parser, "--json", "write one object of JSON to standard output")


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    """List the steps; return 1 if one is damaged or there is none."""
    if not os.path.isdir(options.root):
        raise CommandError(f"{options.root}: {what_is_in(options.root)}")
    checkpointer = Checkpointer(options.root)
    place = checkpointer._steps.root
    steps = place.steps()
    if not steps and (one := step_of(options.root)):
        parent = shlex.quote(os.path.relpath(one[0]))
        raise CommandError(
            f"{options.root}: it is the folder of step {one[1]}; its ROOT is the folder "
            f"above: nvmeio checkpoints {parent}"
        )
    before = None
    for _ in range(LISTS_MAX):
        found = []
        for step in reversed(steps):
            said = _described(options.root, step, metadata=options.json)
            # A run that goes on may have removed it since the steps were listed.
            if said["complete"] or exists(place.folder(step)) or place.named() == step:
                found.append(said)
        seen, steps = steps, place.steps()
        complete = sum(each["complete"] for each in found)
        if steps == seen and (complete == len(found) or found == before):
            break
        before = found
    left = [name for name in os.listdir(options.root) if name.endswith(".nvmeio-tmp")]
    if options.json:
        terminal.say(json.dumps({"steps": found, "unfinished": sorted(left)}, indent=2))
    else:
        _show(found, terminal)
        words = f"{len(found)} step{'s' * (len(found) != 1)}, {complete} complete"
        if left:
            words += f"; {len(left)} unfinished, or left by a process that died, which the "
            words += "next run that saves here removes"
        elif not found:
            words += f"; {what_is_in(options.root)}"
        terminal.say(words)
    return 0 if found and complete == len(found) else 1


def _described(root: str, step: int, *, metadata: bool) -> dict[str, Any]:
    """Return what is known about a step."""
    said: dict[str, Any] = {"step": step, "complete": False}
    said |= {"bytes": None, "saved": None, "checksum": None, "problem": None}
    try:
        with Held(os.path.join(root, f"step-{step}"), step) as held:
            manifest = held.manifest
            said |= {"complete": True, "bytes": manifest.nbytes, "saved": manifest.saved}
            said["checksum"] = manifest.checksum
            if metadata:
                said["metadata"] = held.plain_metadata()
    except (CheckpointError, MovedError, OSError) as error:
        said["problem"] = str(error)
    return said


def _show(found: list[dict[str, Any]], terminal: Terminal) -> None:
    rows = [
        (
            str(each["step"]),
            "-" if each["bytes"] is None else in_binary(each["bytes"]),
            _age(each["saved"]),
            each["checksum"] or "-",
            "complete" if each["complete"] else each["problem"],
        )
        for each in found
    ]
    if rows:
        terminal.table(("step", "size", "age", "checksums", ""), rows)


def _age(saved: str | None) -> str:
    """Format how long ago a time was, such as 3.5 h."""
    # Without microseconds in checkpoints of version 0.2.
    form = "%Y-%m-%dT%H:%M:%S.%f%z" if "." in (saved or "") else "%Y-%m-%dT%H:%M:%S%z"
    try:
        then = dt.datetime.strptime(saved or "", form)
    except ValueError:
        return "-"
    seconds = (dt.datetime.now(dt.timezone.utc) - then).total_seconds()
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"
