"""Commands on pages that no test can run: the reason, and what is checked instead."""

import functools
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import metadata
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from helpers import kernel_release
from seccomp_profiles import container_report, docker_profile

__all__ = ["DRAWINGS", "UNRUN", "Unrun"]

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Unrun:
    """A command that is not run.

    ``check`` gets the command and the text of its pages, and asserts what can be asserted.
    ``leaves`` returns the files that the command would make and later ones use.
    """

    reason: str
    check: Callable[[str, str], object]
    leaves: Callable[[], dict[str, str]] = dict


def is_make_target(command, shown):
    """Check that the Makefile has the target."""
    (target,) = command.split()[1:]
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def names_known_packages(command, shown):
    """Check that scripts/setup-machine installs these packages."""
    script = (ROOT / "scripts" / "setup-machine").read_text()
    known = set(re.findall(r"^need ([\w.+-]+) ", script, re.MULTILINE))
    wanted = set(command.split()[2:])
    assert wanted
    assert wanted <= known


def names_known_extras(command, shown):
    """Check that the package has these extras."""
    (wanted,) = re.findall(r"\[([\w,]+)\]", command)
    assert set(wanted.split(",")) <= {*metadata("nvmeio").get_all("Provides-Extra")}


def names_a_sysctl(command, shown):
    """Check that the kernel has the sysctl, or is too old for it."""
    name, value = command.split()[2].split("=")
    path = Path("/proc/sys", *name.split("."))
    too_old = name == "kernel.io_uring_disabled" and kernel_release() < (6, 6)
    assert too_old or path.read_text().split()
    assert value.isdecimal()


def has_its_files(command, shown):
    """Check that its files were made before, and that the tool has its options."""
    for name in re.findall(r"seccomp=(\S+)|(?:-f|644) (\S+)", command):
        (name,) = filter(None, name)
        made = re.search(rf"^```\w+ {re.escape(name)}$", shown, re.MULTILINE)
        assert made or f"> {name}\n" in shown, name
    tool = re.match(r"[a-z]+(?: (?:compose|run|apply|logs|inspect))*", command)[0].split()
    if shutil.which(tool[0]):
        told = help_of(*tool)
        for option in re.findall(r"(?<= )--[\w-]+(?=[ =])", command.partition("$(")[0]):
            assert option in told, option


@functools.cache
def help_of(*tool):
    """Return the help of a tool, for which it needs no server."""
    done = subprocess.run([*tool, "--help"], capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr


def fetches_what_it_names(command, shown):
    """Check that the address is valid, and that the next command reads the file."""
    name, address = command.split()[-2:]
    assert urlsplit(address).scheme == "https"
    assert f" {name} > " in shown


def is_read_by_the_build(command, shown):
    """Check that setup.py reads the variable."""
    name = command.partition("=")[0]
    assert f'"{name}"' in (ROOT / "setup.py").read_text(encoding="utf-8")


def asks_for_known_faults(command, shown):
    """Check that fault.c knows each word."""
    source = (ROOT / "tests" / "faults" / "fault.c").read_text(encoding="utf-8")
    (words,) = re.findall(r"NVMEIO_FAULTS='([^']+)'", command)
    for word in words.split(","):
        name = re.split("[=@]", word)[0]
        assert f'"{name}="' in source or f'.name = "{name}"' in source, name


def is_read_by_fsspec(command, shown):
    """Check that fsspec takes the endpoint from the variable."""
    config = pytest.importorskip("fsspec.config")
    shell = dict(word.split("=", 1) for word in command.split() if word[0].isupper())
    conf = {}
    config.set_conf_env(conf, shell)
    assert conf == {"s3": {"endpoint_url": "https://s3.example.com"}}


JQ = "jq may be missing; test_docs_containers.py runs the command where it is installed"
ADDED = (
    '.syscalls += [{"names": ["io_uring_setup", "io_uring_enter", "io_uring_register"], '
    '"action": "SCMP_ACT_ALLOW"}]'
)
NO_DOCKER = "tests have no docker, which needs a daemon of root"
NO_CLUSTER = "tests have no cluster"
FOR_ALL = "it changes the machine for everybody"

UNRUN = {
    "make demo": Unrun("test_demo.py runs the same program", is_make_target),
    "make test": Unrun("it is the command that runs this test", is_make_target),
    "apt-get install gcc pkg-config python3-dev python3-venv liburing-dev libaio-dev": (
        Unrun("scripts/setup-machine has installed them", names_known_packages)
    ),
    "pip install '.[cli]'": Unrun(
        "it compiles everything again; `make sdist` installs", names_known_extras
    ),
    "NVMEIO_TEST_BUILD=1 pip install .": Unrun(
        "tests/stress builds it without installing it", is_read_by_the_build
    ),
    "NVMEIO_FAULTS='seed=7,short=50,eio@3,log=faults.bin' python train.py": Unrun(
        "the script is the reader's", asks_for_known_faults
    ),
    "FSSPEC_S3_ENDPOINT_URL=https://s3.example.com AWS_ACCESS_KEY_ID=me "
    "AWS_SECRET_ACCESS_KEY=secret python train.py": Unrun(
        "tests have no object store", is_read_by_fsspec
    ),
    "sysctl -w kernel.io_uring_disabled=0": Unrun(FOR_ALL, names_a_sysctl),
    "sysctl -w fs.aio-max-nr=1048576": Unrun(FOR_ALL, names_a_sysctl),
    "sysctl -w vm.nr_hugepages=512": Unrun(FOR_ALL, names_a_sysctl),
    "curl -fsSL -o default.json "
    "https://raw.githubusercontent.com/moby/profiles/main/seccomp/default.json": Unrun(
        "tests use no network; a sample of the same structure replaces it",
        fetches_what_it_names,
        lambda: {"default.json": docker_profile()},
    ),
    f"jq '{ADDED}' default.json > nvmeio-seccomp.json": Unrun(JQ, has_its_files),
    f"jq '.info.runtimeSpec.linux.seccomp | {ADDED}' container.json "
    "> nvmeio-seccomp.json": Unrun(JQ, has_its_files),
    "docker run --rm --security-opt seccomp=nvmeio-seccomp.json --ulimit memlock=-1 "
    "my-image nvmeio doctor": Unrun(NO_DOCKER, has_its_files),
    "docker run --rm -v ~/.config/nvmeio:/config/nvmeio:ro -e XDG_CONFIG_HOME=/config "
    "-e NVMEIO_PROFILE=auto my-image nvmeio doctor": Unrun(NO_DOCKER, has_its_files),
    "docker compose -f compose.yaml up": Unrun(NO_DOCKER, has_its_files),
    "docker run --rm --security-opt seccomp=nvmeio-seccomp.json --cap-add SYS_NICE "
    "my-image nvmeio doctor": Unrun(NO_DOCKER, has_its_files),
    "kubectl apply -f plain.yaml": Unrun(NO_CLUSTER, has_its_files),
    "kubectl apply -f train.yaml": Unrun(NO_CLUSTER, has_its_files),
    "kubectl logs train": Unrun(NO_CLUSTER, has_its_files),
    "crictl inspect $(crictl ps --name plain --quiet) > container.json": Unrun(
        NO_CLUSTER, has_its_files, lambda: {"container.json": container_report()}
    ),
    "install -D -m 644 nvmeio-seccomp.json "
    "/var/lib/kubelet/seccomp/nvmeio-seccomp.json": Unrun(NO_CLUSTER, has_its_files),
}

# Blocks that are neither code nor commands, by their first line.
DRAWINGS = {
    "README.md CONTRIBUTING.md CHANGELOG.md LICENSE (Apache-2.0)  pyproject.toml setup.py "
    "MANIFEST.in Makefile  .ci/run": "the tree of the sources",
    "run/": "the files of a checkpoint",
    " _cli/                                                             the command line": (
        "the arrows that test_source.py enforces"
    ),
    " Python thread                                             worker's thread       "
    "                 kernel": "the path of a read; a test checks the files that it names",
    '>>> nvmeio.engines()["io_uring"]': "test_docs_containers.py checks this output",
}
