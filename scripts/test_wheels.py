"""Install the wheels of dist/wheels in clean systems, and use them there: [RELEASE...].

Each system is a folder of build/roots, which debootstrap makes once: a release with its
Python and without a compiler.  Commands run there as an ordinary user and without network.
Their mounts are in a namespace that ends with the command, so none is left even if this
script is killed, and an overlay keeps the system as it was.  qemu runs programs of another
machine; it has neither io_uring nor libaio.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from test_pythons import find_pythons

from pages import ROOT, blocks_of, file_of
from seccomp_profiles import container_report, docker_profile, program_of

ROOTS = ROOT / "build" / "roots"
MACHINE = os.uname().machine
USER = 1000
# Without torch and without a compiler.  Others mount file systems or take minutes.
TESTS = ("callbacks", "copy", "file", "fork", "gather", "handle", "info", "memory", "npy")
# What these tests import.
TEST_PACKAGES = ("pytest>=8,<9.1", "pytest-timeout", "pytest-xdist", "hypothesis")
TEST_PACKAGES += ("ml_dtypes",)
# Under qemu, /proc/cpuinfo describes the host, a process has a thread more, no file system
# has O_DIRECT, there is no NUMA, and a child that one of many threads forks may wait for a
# lock of qemu's own.
NOT_EMULATED = ("its_vectors", "starts_no_worker", "not_merged_across", "max_gap_limits")
NOT_EMULATED += ("numa_node", "while_another_forks")
ENGINES = ("io_uring", "libaio", "threads", "sync")
ENOSYS = 38
# What systemd would tell the kernel about qemu.
EMULATOR = Path("/usr/lib/binfmt.d/qemu-aarch64.conf")
BINFMT = Path("/proc/sys/fs/binfmt_misc")


class Release(NamedTuple):
    """A release of a distribution, and its Python; "" if nvmeio is too new for it."""

    distribution: str
    python: str
    machine: str = MACHINE


RELEASES = {
    "bullseye": Release("Debian", ""),
    "jammy": Release("Ubuntu", "3.10"),
    "bookworm": Release("Debian", "3.11"),
    "noble": Release("Ubuntu", "3.12"),
    "trixie": Release("Debian", "3.13"),
    "forky": Release("Debian", "3.14"),
    "bookworm-arm64": Release("Debian", "3.11", "aarch64"),
    "trixie-arm64": Release("Debian", "3.13", "aarch64"),
}

# Arguments: the system, a work folder, and a command, which runs as a user in its home.
INSIDE = f"""
root=$2/root
# The copies of loop mounts, such as of tests that run meanwhile, would keep these in use.
grep '^/dev/loop' /proc/mounts | while read -r _ place _; do umount -l "$place"; done || :
mount -t overlay overlay -o "lowerdir=$1,upperdir=$2/upper,workdir=$2/work" "$root"
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
mount --bind "$2/home" "$root/home/user"
shift 2
chroot --userspec={USER}:{USER} --groups={USER} "$root" env -i LANG=C.UTF-8 \\
    HOME=/home/user TMPDIR=/home/user PATH=/home/user/my-venv/bin:/usr/bin:/bin \\
    sh -c 'cd && exec "$@"' sh "$@"
exit 0  # not by exec: this shell is process 1, which reaps orphans
"""
# Arguments: a file with the lines of a filter, and the command that runs under it.
FILTERED = """
import json, os, sys
sys.path.insert(0, "tree/tests")
from seccomp_profiles import install_program
install_program(json.load(open(sys.argv[1])))
os.execvp(sys.argv[2], sys.argv[2:])
"""
TRANSFER = """
import json, numpy, nvmeio, sys
array = numpy.arange(1_000_003)
target = numpy.zeros_like(array)
nvmeio.write_file(array, "file")
with nvmeio.Handle(engine=(sys.argv[1:] or ["auto"])[0]) as handle:
    handle.read(target, "file")
    engine = handle.stats()["engine"]
assert (array == target).all()
print(json.dumps({"engine": engine, "engines": nvmeio.engines()}))
"""
OPENMP = "import json, nvmeio; print(json.dumps(nvmeio.build_info()['features']['openmp']))"
LOAD = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
library.nvmeio_version.restype = ctypes.c_char_p
print(library.nvmeio_version().decode())
"""


class System:
    """A clean system with a user's home, both as `folder` keeps them."""

    def __init__(self, name: str, folder: str) -> None:
        self.name = name
        self.folder = Path(folder)
        self.home = self.folder / "home"
        for part in ("upper/home/user", "work", "root", "home"):
            (self.folder / part).mkdir(parents=True)
        os.chown(self.home, USER, USER)

    def run(self, *command: str, status: int = 0) -> str:
        """Run a command as the user; return its output, or exit if its status differs."""
        namespaces = ("unshare", "--mount", "--net", "--pid", "--fork", "--kill-child")
        script = ("sh", "-euc", INSIDE, "sh", ROOTS / self.name, self.folder)
        done = subprocess.run(
            [*namespaces, *script, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode != status:
            words = f"{self.name}: status {done.returncode} instead of {status}"
            sys.exit(f"{done.stdout}\n{words}: {' '.join(command)}")
        return done.stdout

    def say(self, words: str) -> None:
        """Print a line about what was checked here."""
        print(f"{self.name}: {words}", flush=True)

    def give(self, source: Path, name: str) -> None:
        """Copy a file or folder into the home."""
        copy: Callable[..., object] = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, self.home / name)
        subprocess.run(["chown", "-R", f"{USER}:{USER}", self.home / name], check=True)

    def remove(self, pattern: str) -> None:
        """Remove files of the system, as this folder shows it."""
        found = [*(ROOTS / self.name).glob(pattern)]
        for path in found:
            hidden = self.folder / "upper" / path.relative_to(ROOTS / self.name)
            hidden.parent.mkdir(parents=True, exist_ok=True)
            os.mknod(hidden, 0o020000, os.makedev(0, 0))  # overlayfs hides such a name
        if not found:
            sys.exit(f"{self.name} has no {pattern}")


def check(holds: object, words: str, text: str) -> None:
    """Exit with `words` and the text that was looked at unless something holds."""
    if not holds:
        sys.exit(f"{text}\n{words}")


def mirror_of(distribution: str) -> str:
    """Return the address of a mirror: from the environment, or this system's own."""
    variable = f"{distribution.upper()}_MIRROR"
    if variable in os.environ:
        return os.environ[variable]
    command = (
        "apt-get",
        "indextargets",
        "--format",
        "$(REPO_URI)",
        f"Label: {distribution}",
    )
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return found.partition("\n")[0]


def make(name: str) -> str:
    """Make a clean system with debootstrap unless it is there; return why it failed."""
    root, part = ROOTS / name, ROOTS / f"{name}.part"
    if root.exists():
        return ""
    release, suite = RELEASES[name], name.partition("-")[0]
    mirror = mirror_of(release.distribution)
    if not mirror:
        variable = f"{release.distribution.upper()}_MIRROR"
        return f"apt-get has no sources of {release.distribution} here: set {variable}"
    ROOTS.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(part, ignore_errors=True)
    packages = "python3,python3-venv,libgomp1"
    command = ["debootstrap", "--variant=minbase", f"--include={packages}"]
    if release.machine != MACHINE:
        command += [f"--arch={name.partition('-')[2]}"]
    scripts = Path("/usr/share/debootstrap/scripts")
    if release.distribution == "Ubuntu":  # one script for all, also for later releases
        command += ["--components=main,universe", suite, str(part), mirror]
        command += [str(scripts / "gutsy")]
    else:
        command += [suite, str(part), mirror, str(scripts / "sid")]
    with open(ROOTS / f"{name}.log", "w") as log:
        status = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode
    if status:
        return (ROOTS / f"{name}.log").read_text().strip().rpartition("\n")[2]
    part.rename(root)
    return ""


@contextlib.contextmanager
def emulated(release: Release) -> Iterator[None]:
    """Let the kernel run a release's programs by qemu, if they are of another machine."""
    format_of = BINFMT / EMULATOR.stem
    if release.machine == MACHINE or format_of.exists():
        yield
        return
    if not EMULATOR.exists():
        sys.exit(f"there is no {EMULATOR}: install qemu-user-static")
    if not Path(BINFMT, "register").exists():
        subprocess.run(["mount", "-t", "binfmt_misc", "binfmt_misc", BINFMT], check=True)
    Path(BINFMT, "register").write_text(EMULATOR.read_text())
    try:
        yield
    finally:
        format_of.write_text("-1")


def wheels_of(version: str, machine: str = MACHINE) -> list[Path]:
    """Return the wheels for a CPython and a machine."""
    short = version.replace(".", "")
    pattern = f"nvmeio-*-cp{short.rstrip('t')}-cp{short}-*_{machine}.whl"
    return sorted(Path(ROOT, "dist/wheels").glob(pattern))


def download(version: str, machine: str = MACHINE) -> Path:
    """Download what nvmeio and the tests need, for one Python; return the folder."""
    folder = ROOTS / "packages" / f"{version}-{machine}"
    if not folder.exists():
        pythons = find_pythons()
        if version not in pythons:
            sys.exit(f"there is no Python {version}, whose pip would download packages")
        part = ROOTS / "packages" / f"{version}-{machine}.part"
        shutil.rmtree(part, ignore_errors=True)
        pip = [pythons[version], "-m", "pip", "download", "-q", "--only-binary", ":all:"]
        for platform in ("manylinux2014", "manylinux_2_17", "manylinux_2_28"):
            pip += ["--platform", f"{platform}_{machine}"]
        packages = ("numpy>=1.22", "crc32c>=2.7", *TEST_PACKAGES)
        subprocess.run([*pip, "--dest", part, *packages], check=True)
        part.rename(folder)
    return folder


def give_tests(system: System) -> None:
    """Copy the tests into the home, without the sources of the package."""
    command = ("git", "ls-files", "-z", "tests", "docs", "README.md", "pyproject.toml")
    listed = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    with tempfile.TemporaryDirectory() as folder:
        for name in filter(None, listed.stdout.split("\0")):
            target = Path(folder, "tree", name)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target)
        system.give(Path(folder, "tree"), "tree")


def install(system: System, wheel: Path) -> None:
    """Install a wheel by README's first command, without network and without a compiler."""
    release = RELEASES[system.name]
    system.give(download(release.python, release.machine), "packages")
    system.give(wheel, wheel.name)
    tools = "for tool in cc gcc clang tcc; do ! command -v $tool; done"
    system.run("sh", "-c", tools)
    command = blocks_of("README.md")[0].text
    readmes = "cp311-cp311-manylinux_2_28_x86_64"
    check(readmes in command, "README does not begin with a wheel", command)
    command = command.replace(readmes, "-".join(wheel.stem.split("-")[2:]))
    offline = ("env", "PIP_NO_INDEX=1", "PIP_FIND_LINKS=packages")
    begin = time.monotonic()
    system.run(*offline, "sh", "-ec", command)
    taken = time.monotonic() - begin
    glibc = system.run("sh", "-c", "getconf GNU_LIBC_VERSION").strip()
    words = f"README's first command installs {wheel.name} in {taken:.1f} s, with numpy"
    system.say(f"{words}, on {glibc}")


def use(system: System) -> None:
    """Run doctor and the first example of README."""
    fast = RELEASES[system.name].machine == MACHINE
    verdict = system.run("nvmeio", "doctor", status=0 if fast else 1).partition("\n")[0]
    wanted = "nvmeio works here" if fast else "nvmeio works slowly here"
    check(verdict.startswith(wanted), "doctor is not content", verdict)
    example = next(block for block in blocks_of("README.md") if block.language == "python")
    printed = system.run("python", "-c", example.text)
    check(printed == "equal: True\n", "README's first example failed", printed)
    system.say(f"doctor: {verdict}; README's first example: {printed.strip()}")


def use_openmp(system: System) -> None:
    """Look for libgomp, then remove it: copies do without, and doctor says so."""
    status = 0 if RELEASES[system.name].machine == MACHINE else 1
    found = json.loads(system.run("python", "-c", OPENMP))
    check(found["built"], "libgomp was not found", str(found))
    system.remove("usr/lib/*/libgomp.so.1*")
    found = json.loads(system.run("python", "-c", OPENMP))
    words = "libgomp.so.1 was not found"
    check(
        not found["built"] and words in found["reason"], "a libgomp was found", str(found)
    )
    copies = "import numpy, nvmeio; a = numpy.arange(9e6); b = a * 0; nvmeio.memcpy(b, a); "
    system.run("python", "-c", f"{copies} assert (a == b).all()")
    if (os.cpu_count() or 1) > 1:
        lines = system.run("nvmeio", "doctor", status=status).splitlines()
        (line,) = [line for line in lines if words in line]
        system.say(f"without libgomp, doctor: {line.strip()}")


def use_engines(system: System) -> None:
    """Transfer by each engine that qemu has, with NEON, and say why others do not work."""
    found = json.loads(system.run("python", "-c", TRANSFER))["engines"]
    for engine in ENGINES[2:]:
        command = ("env", "NVMEIO_COPY=neon", "python", "-c", TRANSFER, engine)
        report = json.loads(system.run(*command))
        check(report["engine"] == engine, "another engine", str(report))
    refused = [f"{name}: {found[name]['reason']}" for name in ENGINES[:2]]
    words = f"transfers by {', '.join(ENGINES[2:])}, with NEON; {'; '.join(refused)}"
    system.say(words)


def use_filters(system: System) -> None:
    """Forbid fast engines as containers do: the next one is used, and the reason said."""
    docker = json.loads(docker_profile())
    podman = {**docker, "defaultErrnoRet": ENOSYS}
    strict = json.loads(docker_profile())
    strict["syscalls"][0]["names"].remove("io_setup")
    described = json.loads(container_report())
    containerd = described["info"]["runtimeSpec"]["linux"]["seccomp"]
    profiles = {"Docker's": docker, "Podman's": podman, "containerd's": containerd}
    profiles["a stricter"] = strict
    for name, profile in profiles.items():
        (system.home / "filter.json").write_text(json.dumps(program_of(profile)))
        prefix = ("python", "-c", FILTERED, "filter.json")
        fast = profile is not strict
        report = json.loads(system.run(*prefix, "python", "-c", TRANSFER).splitlines()[-1])
        refused = ENGINES[: 1 if fast else 2]
        check(report["engine"] == ENGINES[len(refused)], "another engine", str(report))
        for engine in refused:
            found = report["engines"][engine]
            right = found["built"] and not found["works"] and "seccomp" in found["reason"]
            check(right, f"{engine} gives no reason", str(report))
        text = system.run(*prefix, "nvmeio", "doctor", status=0 if fast else 1)
        check("seccomp" in text, "doctor does not name the filter", text)
        system.say(f"{name} profile: {report['engine']}; doctor: {text.splitlines()[0]}")


def run_tests(system: System) -> None:
    """Run the tests that need neither torch nor a compiler."""
    offline = ("--no-index", "--find-links", "packages")
    system.run("pip", "install", "-q", *offline, *TEST_PACKAGES)
    files = " ".join(f"tests/test_{name}.py" for name in TESTS)
    options = "-q -n 2 -m 'not packaging and not slow' -p no:cacheprovider --tb=short"
    if RELEASES[system.name].machine != MACHINE:
        options += f" -k 'not {' and not '.join(NOT_EMULATED)}' --timeout 1000"
        pytest = "NVMEIO_TEST_WATCHDOG_S=900 python -m pytest"
    else:
        pytest = "python -m pytest"
    text = system.run("sh", "-c", f"cd tree && {pytest} {options} {files}")
    system.say(f"tests of {', '.join(TESTS)}: {text.strip().rpartition(chr(10))[2]}")


def load(system: System) -> None:
    """Load the library, and run the C program of docs/embedding.md, with an old glibc."""
    found = [*Path(ROOT, "dist/wheels").glob(f"nvmeio-*_{MACHINE}.whl")]
    check(found, "dist/wheels has no wheels for this machine: run `make wheels`", "")
    compiler = ROOT / "build" / "wheels" / "bin" / f"cc-{MACHINE}"
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(found[0]) as wheel:
            wheel.extractall(folder)
        package = Path(folder, "nvmeio")
        source = Path(folder, "move_file.c")
        source.write_text(file_of("docs/embedding.md", "move_file.c"), encoding="utf-8")
        flags = [f"-I{package}/include", f"-L{package}/lib", "-l:libnvmeio.a", "-pthread"]
        program = package / "move_file"
        zig = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": str(ROOT / "build/wheels/zig")}
        command = [compiler, source, "-o", program, *flags]
        subprocess.run(command, check=True, env=zig)
        system.give(package, "nvmeio")
    version = system.run("python3", "-c", LOAD, "nvmeio/lib/libnvmeio.so").strip()
    moved = [system.run("nvmeio/move_file", "file", name).split() for name in ENGINES]
    check(
        moved == [[version, name] for name in ENGINES], "the C program failed", str(moved)
    )
    glibc = system.run("sh", "-c", "getconf GNU_LIBC_VERSION").strip()
    system.say(f"libnvmeio.so loads on {glibc}; the C program runs by {', '.join(ENGINES)}")


def refuse_musl() -> None:
    """Show that pip does not install a wheel on a system with musl."""
    found = [*Path(ROOT, "dist/wheels").glob(f"nvmeio-*_{MACHINE}.whl")]
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--dry-run"]
    platform = ("--platform", f"musllinux_1_2_{MACHINE}", "--only-binary", ":all:")
    found = [path for path in found if "t-" not in path.name]  # of a Python with a GIL
    abi = found[0].name.split("-")[2]
    with tempfile.TemporaryDirectory() as folder:
        target = ("--target", folder, "--python-version", abi.removeprefix("cp"))
        command = [*pip, *platform, *target, found[0]]
        done = subprocess.run(command, capture_output=True, text=True)
        glibc = [word.replace("musllinux_1_2", "manylinux_2_28") for word in command[:-1]]
        subprocess.run([*glibc, found[0]], check=True, capture_output=True)
    words = "is not a supported wheel on this platform"
    check(done.returncode and words in done.stderr, "pip takes it for musl", done.stderr)
    (line,) = [line for line in done.stderr.splitlines() if words in line]
    print(f"musl: {line}")


def test(name: str) -> str:
    """Test the wheels on one release; return why that cannot be done."""
    if reason := make(name):
        return reason
    _, version, machine = RELEASES[name]
    wheels = wheels_of(version, machine) if version else [None]
    for wheel in wheels:
        with tempfile.TemporaryDirectory(dir=ROOTS, prefix=f"{name}-") as folder:
            system = System(name, folder)
            if wheel is None:
                load(system)
                continue
            install(system, wheel)
            give_tests(system)
            use(system)
            # qemu has no filters.
            (use_filters if machine == MACHINE else use_engines)(system)
            run_tests(system)
            use_openmp(system)
    return "" if wheels else f"dist/wheels has no wheel for Python {version} on {machine}"


def main(names: Sequence[str]) -> None:
    """Test on the named releases, or on all."""
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        sys.exit("test_wheels.py needs root, and the package debootstrap")
    if unknown := sorted({*names} - {*RELEASES}):
        sys.exit(f"{', '.join(unknown)}: no such release; there are {', '.join(RELEASES)}")
    left_out = {}
    for name in names or RELEASES:
        with emulated(RELEASES[name]):
            if reason := test(name):
                left_out[name] = reason
    refuse_musl()
    for name, reason in left_out.items():
        print(f"{name}: NOT TESTED: {reason}")
    sys.exit(1 if left_out else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
