"""Plant the faults of tests/mutants one by one, and check that the tests notice each.

The first line of a patch says what it breaks, and a line "Tests: ..." names the tests that
are most likely to notice.  The script works in a scratch copy of the tracked files.  It is
kept in build/mutants, so that a second run only compiles what has changed.
"""

import argparse
import contextlib
import fnmatch
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PATCHES = ROOT / "tests" / "mutants"
SURVIVORS = PATCHES / "survivors.txt"
WORK = ROOT / "build" / "mutants"
TREE = WORK / "tree"
LOGS = WORK / "logs"

# Without the ceiling, git would apply the patches to the tree around the scratch copy.
# Variables such as MAKEFLAGS would come from the make that called this script.
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("MAKE")},
    "PYTHONPATH": str(TREE / "src"),
    "GIT_CEILING_DIRECTORIES": str(WORK),
}
PYTEST = (sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider")
BUILD_PACKAGE = (sys.executable, "setup.py", "-q", "build_ext", "--inplace")
BUILD_S = 1800
BASELINE_S = 7200
STAGES = ("c", "python", "stress", "all")


@dataclass(frozen=True)
class Mutant:
    """A patch: its name, and the tests that may notice it, the likeliest first."""

    name: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Check:
    """A command that succeeds if the tree is right, and the build that it needs."""

    name: str
    build: tuple[str, ...]
    command: tuple[str, ...]


@dataclass
class Result:
    """The result of a mutant: "killed" by a test, "survived" or "error"."""

    name: str
    status: str = "survived"
    by: str = ""
    stage: str = ""
    seconds: float = 0.0


class BrokenTreeError(Exception):
    """A patch does not apply, or the tree does not build."""


def run(command: Iterable[str], limit_s: float, log: Path) -> int | None:
    """Run a command in the scratch tree; return its exit status, None after the limit."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            list(command),
            cwd=TREE,
            env=ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        # End the processes that a test left behind, also after Ctrl-C.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def require(command: Iterable[str], what: str, log: Path) -> None:
    """Run a command that must succeed, or raise BrokenTreeError."""
    if run(command, BUILD_S, log) != 0:
        raise BrokenTreeError(f"{what}: see {log.relative_to(ROOT)}")


def sync() -> None:
    """Update the scratch tree. Unchanged files keep their times."""
    TREE.mkdir(parents=True, exist_ok=True)
    LOGS.mkdir(exist_ok=True)
    listed = subprocess.run(
        ("git", "ls-files", "-z"), cwd=ROOT, capture_output=True, text=True, check=True
    )
    names = [name for name in listed.stdout.split("\0") if (ROOT / name).is_file()]
    record = WORK / "synced.json"
    before = json.loads(record.read_text()) if record.exists() else []
    for name in set(before) - set(names):
        (TREE / name).unlink(missing_ok=True)
    for name in names:
        source, copy = ROOT / name, TREE / name
        if copy.is_file() and copy.read_bytes() == source.read_bytes():
            continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, copy)
    record.write_text(json.dumps(names))


@contextlib.contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """Apply a mutant's patch, and revert it at the end."""
    patch, log = str(PATCHES / f"{mutant.name}.patch"), LOGS / f"{mutant.name}.apply"
    require(("git", "apply", patch), "the patch does not apply", log)
    try:
        yield
    finally:
        require(("git", "apply", "-R", patch), "the patch cannot be reverted", log)


def c_check(path: str) -> Check:
    """Return the check that runs one C test."""
    words = (sys.executable, "plain", Path(path).stem)
    return Check(path, ("scripts/build-c", *words), ("scripts/test-c", *words))


def checks_of(stage: str, mutant: Mutant) -> list[Check]:
    """Return the checks that a stage runs for a mutant, in order."""
    if stage == "c":
        return [c_check(test) for test in mutant.tests if test.endswith(".c")]
    if stage == "python":
        tests = [test for test in mutant.tests if test.endswith(".py")]
        return [Check(test, BUILD_PACKAGE, (*PYTEST, test)) for test in tests]
    if stage == "stress":
        command = (*PYTEST, "tests/stress", "--length", "short")
        return [Check("tests/stress", BUILD_PACKAGE, command)]
    found = sorted((ROOT / "tests" / "c").glob("test_*.c"))
    tests = [str(path.relative_to(ROOT)) for path in found]
    # This test fails with any mutant, because one of the patches is already applied.
    looking = "tests/test_mutants.py::test_every_fault_can_be_planted_and_names_tests"
    command = (*PYTEST, "--deselect", looking)
    return [*map(c_check, tests), Check("tests", BUILD_PACKAGE, command)]


class Baseline:
    """How long each check takes on the tree without a fault, where it must pass.

    Attributes
    ----------
    seconds : dict
        Seconds by check; None if it fails.
    """

    def __init__(self) -> None:
        self.seconds: dict[Check, float | None] = {}

    def take(self, checks: Iterable[Check]) -> None:
        """Time the checks that were not timed yet, on the tree without a fault."""
        new = [check for check in dict.fromkeys(checks) if check not in self.seconds]
        for build in dict.fromkeys(check.build for check in new):
            require(build, "the tree does not build", LOGS / "baseline.build")
        for check in new:
            begin = time.monotonic()
            status = run(check.command, BASELINE_S, log_of("baseline", check))
            passed = status == 0
            self.seconds[check] = time.monotonic() - begin if passed else None
            if not passed:
                print(f"ERROR   {check.name} fails on the tree without a fault", flush=True)

    def limit_s(self, check: Check) -> float:
        """Return the time after which a check counts as hung, on a busy machine too."""
        return 60 + 10 * (self.seconds[check] or 0)


def log_of(name: str, check: Check) -> Path:
    """Return the path of a check's output."""
    return LOGS / f"{name}.{check.name.replace('/', '-')}.log"


def failed_test(log: Path) -> str:
    """Return the first failed test in the output of pytest; empty if there is none."""
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", log.read_text(errors="replace"), re.M)
    return found[1] if found else ""


def try_mutant(stage: str, mutant: Mutant, baseline: Baseline, result: Result) -> None:
    """Plant the fault, run a stage until a check fails, and record it in the result."""
    checks = checks_of(stage, mutant)
    if broken := [check for check in checks if baseline.seconds[check] is None]:
        raise BrokenTreeError(f"{broken[0].name} fails on the tree without a fault")
    built: set[tuple[str, ...]] = set()
    with planted(mutant):
        for check in checks:
            if check.build not in built:
                log = LOGS / f"{mutant.name}.build"
                require(check.build, "the mutant does not build", log)
                built.add(check.build)
            log = log_of(mutant.name, check)
            status = run(check.command, baseline.limit_s(check), log)
            if status == 0:
                continue
            result.status, result.by = "killed", failed_test(log) or check.name
            if status is None:
                result.by += f", which did not end in {baseline.limit_s(check):.0f} s"
            return


def try_stage(
    stage: str, mutants: list[Mutant], baseline: Baseline, results: dict[str, Result]
) -> None:
    """Run a stage for the mutants that survived so far, and print which are killed."""
    left = [mutant for mutant in mutants if results[mutant.name].status == "survived"]
    baseline.take(check for mutant in left for check in checks_of(stage, mutant))
    for mutant in left:
        result, begin = results[mutant.name], time.monotonic()
        if not checks_of(stage, mutant):
            continue
        result.stage = stage
        try:
            try_mutant(stage, mutant, baseline, result)
        except BrokenTreeError as error:
            result.status, result.by = "error", str(error)
            sync()
        result.seconds = round(result.seconds + time.monotonic() - begin, 1)
        if result.status == "killed":
            print(
                f"killed  {mutant.name}  by {result.by}  {result.seconds:.0f} s", flush=True
            )
        elif result.status == "error":
            print(f"ERROR   {mutant.name}: {result.by}", flush=True)


def read_mutant(patch: Path) -> Mutant:
    """Read a patch, and return it with the tests that it names."""
    text = patch.read_text(encoding="utf-8")
    found = re.search(r"^Tests: (.+)$", text.partition("\ndiff --git ")[0], re.M)
    tests = tuple(found[1].split()) if found else ()
    missing = [test for test in tests if not (ROOT / test).is_file()]
    if missing or not tests:
        sys.exit(f"{patch.name} names no tests, or tests that do not exist: {missing}")
    return Mutant(patch.stem, tests)


def known_survivors() -> dict[str, str]:
    """Return the mutants that no test can notice, and why."""
    found = {}
    for line in SURVIVORS.read_text(encoding="utf-8").splitlines():
        name, _, reason = line.partition("  # ")
        if not line.strip() or line.startswith("#"):
            continue
        if not reason or not (PATCHES / f"{name}.patch").exists():
            sys.exit(f"{SURVIVORS.name}: no reason, or no such mutant: {line}")
        found[name] = reason
    return found


def judge(results: Iterable[Result], survivors: dict[str, str]) -> bool:
    """Print which mutants survived, and return whether only the expected ones did."""
    good = True
    for result in results:
        reason = survivors.get(result.name)
        if result.status == "survived" and reason:
            print(f"survived {result.name}, as listed: {reason}")
        elif result.status == "survived":
            print(f"SURVIVED {result.name}")
            good = False
        elif result.status == "error":
            good = False
        elif reason:
            print(f"ERROR   {result.name} is listed as a survivor, but was killed")
            good = False
    return good


def main() -> int:
    """Run the stages, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=["*"], help="mutants or globs (all)")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--results", type=Path, help="JSON file to write")
    options = parser.parse_args()
    known = {path.stem: path for path in sorted(PATCHES.glob("*.patch"))}
    for wanted in options.names:
        if not fnmatch.filter(known, wanted):
            parser.error(f"no mutant matches {wanted}")
    names = [n for n in known if any(fnmatch.fnmatch(n, w) for w in options.names)]
    mutants = [read_mutant(known[name]) for name in names]
    survivors = known_survivors()
    results = {name: Result(name) for name in names}
    baseline = Baseline()
    sync()
    try:
        for stage in (stage for stage in STAGES if stage in options.stages):
            try_stage(stage, mutants, baseline, results)
    finally:
        if options.results:
            found = [asdict(result) for result in results.values()]
            options.results.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0 if judge(results.values(), survivors) else 1


if __name__ == "__main__":
    sys.exit(main())
