"""Run the tests that need no torch on other Pythons: [PYTHON...] [-- OPTION...].

Each PYTHON is an interpreter; by default these are all of find-pythons that have a GIL,
except the one that runs this script.  Each gets a virtual environment in build/pythons,
where the objects of its modules are kept too.  OPTIONs are options of pytest.  At the end,
this prints what differs between the versions.
"""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "pythons"
JOBS = os.environ.get("JOBS", "2")
# "3.13t" is 3.13 without the GIL.
VERSION = "import sys, sysconfig, ensurepip, venv; print('%d.%d' % sys.version_info[:2] + "
VERSION += "('t' if sysconfig.get_config_var('Py_GIL_DISABLED') else ''))"
# Without constraints.txt, whose versions support only the Python of the other tests.
# A package may have no wheel of its newest version for a Python.
PIP = ("-m", "pip", "--disable-pip-version-check", "install", "-q", "--prefer-binary")


# What the build, and every test, needs of the extras.
NEEDED = r"(Cython|setuptools|hypothesis|pytest)\b"


class Result(NamedTuple):
    """What one Python gave: the packages that it lacks, and the outcome of each test."""

    missing: list[str]
    outcomes: dict[str, str]
    status: int


def version_of(python: str) -> str:
    """Return the version of an interpreter, such as 3.13t; "" if it does not run."""
    done = subprocess.run([python, "-c", VERSION], capture_output=True, text=True)
    return done.stdout.strip()


def find_pythons() -> dict[str, str]:
    """Return the interpreters of this system by version, one of each from 3.10 on."""
    command = (ROOT / "scripts" / "find-pythons",)
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return dict(line.split(maxsplit=1) for line in text.splitlines())


def found() -> dict[str, str]:
    """Return the interpreters that have a GIL, except the one that runs this."""
    own = version_of(sys.executable)
    return {v: path for v, path in find_pythons().items() if v != own and v[-1] != "t"}


def run(command: Collection[Any], log: Path, **options: Any) -> int:
    """Run a command, with its output in a log; return its status."""
    with open(log, "a") as file:
        return subprocess.run(
            command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, **options
        ).returncode


def packages_of(extra: str | None) -> list[str]:
    """Return the packages that nvmeio or one of its extras needs."""
    pairs = [
        each.partition(";")[::2] for each in importlib.metadata.requires("nvmeio") or ()
    ]
    marker = "" if extra is None else f'extra == "{extra}"'
    return [p for p, m in pairs if m.strip() == marker and not p.startswith("nvmeio")]


def prepare(version: str, program: str) -> list[str]:
    """Install nvmeio and what its tests need; return the packages that cannot be installed.

    A package may have no wheel for a new Python, and its tests are skipped then.
    """
    folder, log = FOLDER / version, FOLDER / f"{version}.log"
    log.write_text("")
    python = folder / "bin" / "python"
    if not python.exists() and run([program, "-m", "venv", "--clear", folder], log):
        raise SystemExit(f"{program} makes no environment:\n{log.read_text()}")
    extras = [*packages_of("test"), *packages_of("cli")]
    needed = [*packages_of(None), *(p for p in extras if re.match(NEEDED, p))]
    wanted = [package for package in extras if package not in needed]
    missing = []
    if run([python, *PIP, *needed, *wanted], log):
        if run([python, *PIP, *needed], log):
            raise SystemExit(log.read_text())
        missing = [package for package in wanted if run([python, *PIP, package], log)]
    # The objects and the metadata of each Python are in a folder of their own.  What an
    # older tree had must not get into the wheel.
    shutil.rmtree(folder / "build" / "lib", ignore_errors=True)
    (folder / "build").mkdir(exist_ok=True)
    config = folder / "setup.cfg"
    config.write_text(
        f"[build]\nbuild_base={folder}/build\nbuild_lib={folder}/build/lib\n"
        f"build_temp={folder}/build/objects\n[egg_info]\negg_base={folder}/build\n"
    )
    command = [python, *PIP, "--no-build-isolation", "--no-deps", "--force-reinstall", "."]
    if run(command, log, env={**os.environ, "DIST_EXTRA_CONFIG": str(config)}):
        raise SystemExit(log.read_text())
    return missing


def test(version: str, missing: list[str], options: list[str]) -> Result:
    """Run the tests on one Python, and read their outcomes."""
    folder = FOLDER / version
    report = folder / "tests.xml"
    report.unlink(missing_ok=True)
    print(f"== Python {version}", flush=True)
    command = [folder / "bin" / "python", "-m", "pytest", "-q", "-n", JOBS]
    # Here the installed package is tested, and other Pythons lack other packages.
    command += ["-m", "not slow", f"--junitxml={report}", "-o", "junit_logging=no"]
    command += ["--allow-skip", "is not installed|could not import", *options]
    status = subprocess.run(command, cwd=ROOT).returncode
    outcomes = {}
    for case in ET.parse(report).iter("testcase") if report.exists() else ():
        kinds = {child.tag: child.get("message") for child in case}
        name = f"{case.get('classname')}::{case.get('name')}".removeprefix("tests.")
        outcomes[name] = next(
            (kind for kind in ("failure", "error", "skipped") if kind in kinds), "passed"
        )
    return Result(missing, outcomes, status)


def report(results: dict[str, Result]) -> None:
    """Print what each Python lacks, and the tests whose outcomes differ."""
    for version, result in results.items():
        counts = Counter(result.outcomes.values())
        print(f"Python {version}:", *(f"{counts[kind]} {kind}," for kind in sorted(counts)),
              f"without {', '.join(result.missing) or 'nothing'}")  # fmt: skip
    differing = defaultdict(list)
    for name in sorted({name for result in results.values() for name in result.outcomes}):
        found = {v: r.outcomes.get(name, "not there") for v, r in results.items()}
        bad = {"failure", "error"}.intersection(found.values())
        if bad or len({*found.values()}) > 1:
            words = ", ".join(f"{version} {found[version]}" for version in found)
            # Parameters of one test, and tests of one file, mostly differ for one reason.
            differing[words, name.partition("[")[0] if not bad else name].append(name)
    for (words, name), names in differing.items():
        count = f" ({len(names)} tests)" if len(names) > 1 else ""
        print(f"differs: {name}{count}: {words}")


def main() -> None:
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    programs, options = words[:cut], words[cut + 1 :]
    versions = {version_of(program): program for program in programs} or found()
    if not all(versions):
        raise SystemExit(f"{programs}: at least one is no Python with ensurepip and venv")
    FOLDER.mkdir(parents=True, exist_ok=True)
    # Compilers and downloads overlap.  The tests do not, because some mount file systems or
    # limit what processes may use.
    with ThreadPoolExecutor(int(JOBS)) as pool:
        missing = list(pool.map(prepare, versions, versions.values()))
    results = {v: test(v, m, options) for v, m in zip(versions, missing, strict=True)}
    report(results)
    print(f"Pythons tested: {', '.join(results) or 'none was found'}")
    sys.exit(max((result.status for result in results.values()), default=0))


if __name__ == "__main__":
    main()
