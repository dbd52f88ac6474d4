"""Check all that a release needs, and print a line for each thing; this uploads nothing."""

import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from test_pythons import find_pythons
from test_wheels import RELEASES, ROOT, download, wheels_of

MAKE = ("make", "-s", "--no-print-directory")
MACHINES = ("x86_64", "aarch64")
# What a wheel is made of.
SOURCES = ("src", "include", "setup.py", "pyproject.toml", "README.md", "LICENSE")
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14", "3.13t")
# CPU time, because a busy machine changes it less; for imports only that of this thread,
# because threads of numpy's BLAS spin meanwhile.
IMPORT_S_MAX = 0.025
INSTALL_S_MAX = 2.0
IMPORT = """
import numpy, time
begin = time.thread_time()
import nvmeio
print(time.thread_time() - begin)
"""
IMPORTS = 15


class NotReadyError(Exception):
    """A release lacks something; the message says what."""


def run(*command: str | Path) -> str:
    """Return a command's output; a failure shows its last lines."""
    done = subprocess.run(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode:
        lines = done.stdout.strip().splitlines()[-20:]
        raise NotReadyError("\n    ".join([f"status {done.returncode}", *lines]))
    return done.stdout


def version() -> str:
    """Return the version of the headers."""
    text = Path(ROOT, "include/nvmeio/base.h").read_text(encoding="utf-8")
    return re.findall('NVMEIO_VERSION "(.+)"', text)[0]


def check_version() -> Iterator[str]:
    """Compare the versions of the headers, CITATION.cff and CHANGELOG.md."""
    found = {"base.h": version()}
    for name, pattern in (
        ("CITATION.cff", r"^version: (\S+)$"),
        ("CHANGELOG.md", r"^## \[(\S+)\]"),
    ):
        text = Path(ROOT, name).read_text(encoding="utf-8")
        found[name] = re.findall(pattern, text, re.MULTILINE)[0]
    words = ", ".join(f"{name} {number}" for name, number in found.items())
    if len({*found.values()}) > 1:
        raise NotReadyError(words)
    heading = text.partition("## [")[2].partition("\n")[0]
    dated = re.search(r"\d{4}-\d\d-\d\d$", heading)
    yield words if dated else f"{words}; still to do: the day of the release in {name}"


def check_classifiers() -> Iterator[str]:
    """Compare the Pythons of the classifiers with those of the wheels; refuse Alpha."""
    text = Path(ROOT, "pyproject.toml").read_text(encoding="utf-8")
    found = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text)
    without_gil = "Programming Language :: Python :: Free Threading" in text
    found += ["3.13t"] if without_gil else []
    if found != [*PYTHONS]:
        raise NotReadyError(
            f"classifiers: {', '.join(found)}; wheels: {', '.join(PYTHONS)}"
        )
    status = re.findall(r'"Development Status :: (.+)"', text)[0]
    if "Alpha" in status:
        raise NotReadyError(f"the status is {status}")
    yield f"{', '.join(found)}, as the wheels; status {status}"


def check_tree() -> Iterator[str]:
    """Check that all is there and committed, and that nothing names a folder of here."""
    for name in ("LICENSE", "SECURITY.md", "CITATION.cff", "CONTRIBUTING.md"):
        if not Path(ROOT, name).is_file():
            raise NotReadyError(f"there is no {name}")
    changed = run("git", "status", "--porcelain").splitlines()
    if changed:
        raise NotReadyError(f"not committed: {', '.join(line[3:] for line in changed)}")
    for folder in (ROOT, Path.home()):
        command = ("git", "grep", "-lIF", f"{folder}/")
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.stdout:
            raise NotReadyError(f"{folder}/ is in {', '.join(done.stdout.split())}")
    yield "everything is committed, and nothing names a folder of this machine"


def check_sdist() -> Iterator[str]:
    """Make the sdist, look for what it lacks, and use it in a clean environment."""
    yield run(*MAKE, "sdist").strip().rpartition("\n")[2]


def differing(wheel: Path) -> list[str]:
    """Return the names of files of a wheel that are not as those of this tree."""
    names = []
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            inside = name.removeprefix("nvmeio/")
            source = ROOT / (inside if inside.startswith("include/") else f"src/{name}")
            if name.endswith((".py", ".pyi", ".pxd", ".h")) and (
                not source.is_file() or archive.read(name) != source.read_bytes()
            ):
                names.append(name)
    return names


def check_wheels() -> Iterator[str]:
    """Check size, platform, run paths and licences of each wheel, and use it."""
    folder = ROOT / "dist" / "wheels"
    wanted = {
        f"nvmeio-{version()}-cp{abi.rstrip('t')}-cp{abi}-manylinux_2_28_{machine}.whl"
        for abi in (python.replace(".", "") for python in PYTHONS)
        for machine in MACHINES
    }
    built = {path.name: path.stat().st_mtime for path in folder.glob("*.whl")}
    found = {*built}
    changed = float(run("git", "log", "-1", "--format=%ct", "--", *SOURCES))
    for name in sorted(found & wanted):
        abi = name.split("-")[3].removeprefix("cp")
        python = ROOT / f"build/wheels/python{abi[0]}.{abi[1:]}/bin/python"
        text = run(python, "scripts/check_wheel.py", f"dist/wheels/{name}")
        yield next(line for line in text.splitlines() if line.startswith("dist/"))
    words = [f"there is no {name}" for name in sorted(wanted - found)]
    words += [f"{name} is of another version" for name in sorted(found - wanted)]
    old = sorted(name for name in found & wanted if built[name] < changed)
    words += [f"{name} is older than the sources" for name in old]
    for name in sorted(found & wanted):
        if names := differing(folder / name):
            words.append(f"{name} has another {names[0]} than this tree")
    if words:
        raise NotReadyError("; ".join(words))


def check_times() -> Iterator[str]:
    """Measure how long pip installs each wheel, and Python imports it after numpy."""
    slow, programs = [], find_pythons()
    for python in PYTHONS:
        wheels = wheels_of(python)
        if not wheels or python not in programs:
            raise NotReadyError(f"there is no wheel for Python {python}, or no such Python")
        installed, imported = times_of(wheels[0], programs[python], download(python))
        words = f"Python {python}: pip installs in {installed:.2f} s of CPU time"
        words += f" (at most {INSTALL_S_MAX})"
        words += f"; import after numpy: {imported * 1e3:.1f} ms, median of {IMPORTS}"
        yield f"{words} (at most {IMPORT_S_MAX * 1e3:.0f})"
        if installed > INSTALL_S_MAX or imported > IMPORT_S_MAX:
            slow.append(python)
    if slow:
        raise NotReadyError(f"too slow for Python {', '.join(slow)}")


def times_of(wheel: Path, program: str, packages: Path) -> tuple[float, float]:
    """Return the CPU time of installing a wheel, and of importing it, in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        run(program, "-m", "venv", folder)
        inside = Path(folder, "bin", "python")
        pip = (inside, "-m", "pip", "install", "-q", "--no-index")
        run(*pip, "--find-links", packages, "numpy", "crc32c")
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run(*pip, wheel)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        installed = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        run(inside, "-c", IMPORT)  # which compiles the modules
        times = [float(run(inside, "-c", IMPORT)) for _ in range(IMPORTS)]
    return installed, statistics.median(times)


def check_pythons() -> Iterator[str]:
    """Run the tests that need no torch on the other Pythons, and without the GIL."""
    for target in ("test-pythons", "test-free-threaded"):
        for line in run(*MAKE, target).splitlines():
            if re.match(r"Python 3\.\d+t?: ", line):
                yield line


def check_systems() -> Iterator[str]:
    """Use the wheels in clean systems."""
    for line in run(*MAKE, "test-wheels").splitlines():
        if line.partition(":")[0] in (*RELEASES, "musl"):  # not what pip prints
            yield line


CHECKS: dict[str, Callable[[], Iterator[str]]] = {
    "version": check_version,
    "classifiers": check_classifiers,
    "tree": check_tree,
    "sdist": check_sdist,
    "wheels": check_wheels,
    "times": check_times,
    "pythons": check_pythons,
    "systems": check_systems,
}


def main(names: Sequence[str]) -> None:
    """Run the named checks, or all."""
    if unknown := sorted({*names} - {*CHECKS}):
        sys.exit(f"{', '.join(unknown)}: no such check; there are {', '.join(CHECKS)}")
    failed = []
    for name in names or CHECKS:
        try:
            for words in CHECKS[name]():
                print(f"ok      {name}: {words}", flush=True)
        except NotReadyError as error:
            failed.append(name)
            print(f"FAILED  {name}: {error}", flush=True)
    if failed:
        sys.exit(f"not ready: {', '.join(failed)}")
    print(f"version {version()} is ready; nothing was uploaded")


if __name__ == "__main__":
    os.environ.pop("MAKEFLAGS", None)
    main(sys.argv[1:])
