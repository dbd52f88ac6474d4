"""Run every benchmark, sized for 2 cores and 10 minutes, and write the results.

One JSON file has all results.  If a script fails, the JSON has its last line of output, the
others still run, and the exit status is 1.  A script whose requirements are missing is left
out and reported.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import machine
from report import SCHEMA, Outcome, padded, summary

__all__ = ["JOBS", "Job", "machine_name", "main", "run"]

HERE = Path(__file__).resolve().parent
# The time limit. No script takes a quarter of it unless something is wrong.
LIMIT_S = 600
# How long a script may take to clean up after that.
GRACE_S = 30


@dataclasses.dataclass(frozen=True)
class Job:
    """How to run a script.

    Attributes
    ----------
    options : str
        Chosen so that all scripts together take less than 10 minutes on 2 cores.
    needs : tuple of str
        Modules without which the script cannot measure anything.
    on_disk : bool
        Whether the script works on files, and so takes ``--dir``.
    """

    options: str
    needs: tuple[str, ...] = ()
    on_disk: bool = True


JOBS = {
    "transfer": Job("--size 256M --rounds 3 --loop-rounds 7", ("torch",)),
    "checkpoint": Job("--size 128M --rounds 4"),
    "offload": Job("--size 256M --rounds 3", ("torch",)),
    "stream": Job("--size 256M --rounds 3", ("torch",)),
    "gather": Job("--size 2G --rounds 3 --loop-rounds 7"),
    "dataloader": Job("--size 512M --rounds 3", ("torch",)),
    # This compiles the op, which the next script uses.
    "deepspeed": Job("--size 256M --rounds 1 --processes 2", ("torch", "deepspeed")),
    "copy": Job("--largest 64M --rounds 4", ("torch",), on_disk=False),
}


def machine_name(folder: Path) -> str:
    """Name a kind of machine by whether it is virtual, its processors and file system."""
    virtual = "hypervisor" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    file_system = str(machine(folder)["file system"]).partition(" ")[0]
    kind = "virtual" if virtual else "physical"
    return f"{kind}-{os.cpu_count()}core-{file_system}"


def say(words: str) -> None:
    """Report progress."""
    print(f"run: {words}", file=sys.stderr, flush=True)


def ended(process: subprocess.Popen[bytes], limit_s: float) -> bool:
    """Wait for a script. If it takes too long, ask it to clean up, then end it."""
    try:
        process.wait(limit_s)
        return True
    except subprocess.TimeoutExpired:
        # End its children too, because it may be waiting for them.
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return False


def last_words(log: Path) -> str:
    """Return the last line of a script's standard error, without the machine's paths."""
    text = log.read_text(encoding="utf-8", errors="replace")
    lines = [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip()]
    if not lines:
        return "it printed nothing"
    return re.sub(r"(?<![\w.])/(?:[^\s'\":/]+/)+", "", lines[-1])


def run(name: str, options: list[str], limit_s: float) -> dict[str, Any]:
    """Run a script."""
    with tempfile.TemporaryDirectory() as inside:
        found, log = Path(inside, "found.json"), Path(inside, "log")
        command = [sys.executable, HERE / f"bench_{name}.py", *options, "--json", found]
        begin = time.monotonic()
        with open(log, "wb") as errors:
            # In its own process group, so that its children can be ended with it.
            process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
            )
            try:
                in_time = ended(process, limit_s)
            except BaseException:
                ended(process, 0)
                raise
        seconds = {"seconds": round(time.monotonic() - begin, 1)}
        if in_time and process.returncode == 0:
            return json.loads(found.read_text(encoding="utf-8")) | seconds
        sys.stderr.write(log.read_text(encoding="utf-8", errors="replace"))
        if not in_time:
            return {"failed": f"it took more than {limit_s:.0f} s", **seconds}
        return {"failed": last_words(log), **seconds}


def outcome_of(name: str, folder: Path, quick: bool) -> dict[str, Any]:
    """Run a script if its requirements are installed."""
    job = JOBS[name]
    missing = [need for need in job.needs if importlib.util.find_spec(need) is None]
    if missing:
        return {"left out": [f"{need} (pip install nvmeio[bench])" for need in missing]}
    options = ["--quick"] if quick else job.options.split()
    return run(name, [*options, *(["--dir", str(folder)] if job.on_disk else [])], LIMIT_S)


def arguments(given: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    words = "folder for the files of the run (.)"
    parser.add_argument("--dir", type=Path, default=Path(), help=words)
    words = "name of the machine in the name of the JSON (made from its hardware)"
    parser.add_argument("--machine", metavar="NAME", help=words)
    folder = HERE / "results"
    parser.add_argument("--results", type=Path, default=folder, help="folder for the JSON")
    words = "run only these scripts"
    parser.add_argument("--only", nargs="+", choices=JOBS, default=list(JOBS), help=words)
    words = "a short run, to see whether everything works"
    parser.add_argument("--quick", action="store_true", help=words)
    options = parser.parse_args(given)
    options.machine = options.machine or machine_name(options.dir)
    if not re.fullmatch(r"[\w.+-]+", options.machine):
        parser.error(f"--machine is {options.machine!r}; use only letters, digits and _.+-")
    return options


def main(given: list[str] | None = None) -> int:
    """Run all scripts, and return the exit status."""
    options = arguments(given)
    about = machine(options.dir)
    scripts: dict[str, Any] = {}
    for number, name in enumerate(options.only, 1):
        say(f"bench_{name}.py, {number} of {len(options.only)}")
        scripts[name] = raw = outcome_of(name, options.dir, options.quick)
        ending = f"has failed: {raw['failed']}" if "failed" in raw else "is done"
        say(f"bench_{name}.py {ending}")
    path = options.results / f"{about['date']}-{options.machine}.json"
    whole = {"schema": SCHEMA, "machine": about, "scripts": scripts}
    path.write_text(json.dumps(whole) + "\n", encoding="utf-8")
    outcomes = {name: Outcome.from_dict(raw) for name, raw in scripts.items()}
    print(padded(summary(outcomes)))
    say(f"written: {path.name}")
    return int(any(outcome.failure for outcome in outcomes.values()))


if __name__ == "__main__":
    # SystemExit makes run() end the script, which then cleans up.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
