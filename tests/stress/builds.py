"""A pytest plugin: the builds of the stress tests, and the log of injected faults.

The test build of nvmeio, which can inject faults, is kept under build/, so that only
changed files are compiled again.
"""

import fcntl
import json
import os
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from children import skip_sanitized, system_environment

ROOT = Path(__file__).resolve().parents[2]
COMPILER = os.environ.get("CC", "cc")
BUILD_S = 900


def build(*command, **environment):
    """Run a build command, one process at a time; raise if it fails."""
    folder = ROOT / "build"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(
            list(map(str, command)),
            cwd=ROOT,
            env=system_environment() | environment,
            capture_output=True,
            text=True,
            timeout=BUILD_S,
            check=False,
        )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def faulty_programs():
    """A function from a sanitizer's name, or "plain", to the folder of the C tests."""
    built = {}

    def programs(name):
        if name not in built:
            folder = f"faults-{name}"
            build("scripts/build-c", sys.executable, folder)
            built[name] = ROOT / "build" / "c" / folder
        return built[name]

    return programs


@pytest.fixture(scope="session")
def faulty_package():
    """The folder for PYTHONPATH that has nvmeio's test build."""
    skip_sanitized("are not compiled into the test build")
    folder = ROOT / "build" / "faults"
    command = ["setup.py", "-q", "build", "--build-base", folder]
    command += ["--build-lib", folder / "lib"]
    build(sys.executable, *command, NVMEIO_TEST_BUILD="1")
    return folder / "lib"


@pytest.fixture(scope="session")
def process_calls(tmp_path_factory):
    """The library to preload that counts the system calls of a process."""
    library = tmp_path_factory.mktemp("process-calls") / "calls.so"
    words = [COMPILER, "-std=gnu11", "-shared", "-fPIC", "-fvisibility=hidden", "-O1"]
    words += ["-Wall", "-Wextra", "-Werror", "tests/stress/process_calls.c"]
    build(*words, "-o", library)
    return library


def link_program(source, folder):
    """Link a C source with the library of `make build`; return the program."""
    library = ROOT / "src" / "nvmeio" / "lib"
    record = json.loads((library / "build.json").read_text())
    words = [COMPILER, "-std=gnu11", "-D_GNU_SOURCE=", "-g", "-Iinclude", "-Isrc/libnvmeio"]
    words += ["-Wall", "-Wextra", "-Werror", source, library / "libnvmeio.a"]
    build(*words, *record["link_flags"], "-o", folder / "program")
    return folder / "program"


@dataclass
class Tally:
    """How often a kind of fault could strike, how often it did, and its rate of 1000."""

    rate: int
    occasions: int
    fired: int


def read_tallies(path):
    """Return a Tally of each kind, from the log of ``NVMEIO_FAULTS=log=PATH``."""
    return {
        name.rstrip(b"\0").decode(): Tally(*counts)
        for name, *counts in struct.iter_unpack("16sQQQ", Path(path).read_bytes())
    }


def faults_in(words, log, seed=0):
    """Return the environment that injects faults at rates such as ``{"all": 50}``."""
    spec = [f"seed={seed}", f"log={log}", *(f"{kind}={n}" for kind, n in words.items())]
    assert os.fspath(log).isprintable()
    assert "," not in os.fspath(log)
    return {"NVMEIO_FAULTS": ",".join(spec)}
