"""A pytest plugin: what the stress tests compile, and the log of the faults in it.

The test build of nvmeio, in which faults can be made, lies under build/ and is kept: what
has not changed is not compiled again.
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
    """Run a command that builds, one process at a time; its failure is an error."""
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
    """A function from the name of a sanitizer, or "plain", to the folder of C tests."""
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
    """The folder for PYTHONPATH from which nvmeio is imported with faults."""
    skip_sanitized("are not compiled into the test build")
    folder = ROOT / "build" / "faults"
    command = ["setup.py", "-q", "build", "--build-base", folder]
    command += ["--build-lib", folder / "lib"]
    build(sys.executable, *command, NVMEIO_TEST_BUILD="1")
    return folder / "lib"


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
    """How often faults of a kind could strike, and did; at so many of 1000 at random."""

    rate: int
    occasions: int
    fired: int


def read_tallies(path):
    """Return the log that ``NVMEIO_FAULTS=log=PATH`` asks for: a Tally of each kind."""
    return {
        name.rstrip(b"\0").decode(): Tally(*counts)
        for name, *counts in struct.iter_unpack("16sQQQ", Path(path).read_bytes())
    }


def faults_in(words, log, seed=0):
    """Return the environment that has the library make faults: ``{"all": 50, ...}``."""
    spec = [f"seed={seed}", f"log={log}", *(f"{kind}={n}" for kind, n in words.items())]
    assert os.fspath(log).isprintable()
    assert "," not in os.fspath(log)
    return {"NVMEIO_FAULTS": ",".join(spec)}
