"""What setup.py builds: with and without each library, offline, optimized.

Each test builds a copy of the sources, most of them only the archive, because the archive
needs the libraries.
"""

import errno
import functools
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from pages import ROOT, file_of
from test_packaging import COMPILER, PAGE, run

pytestmark = pytest.mark.packaging

# Each library, its package, its header, and the feature that needs it.
FEATURES = {
    "liburing": ("liburing-dev", "liburing.h", "engine_uring.o"),
    "openmp": ("libomp-dev", "omp.h", None),
}

# A build must need none of these packages, and no network.
OFFLINE = """
    import sys

    NEEDLESS = {"numpy", "torch", "triton"}

    def refuse(event, args):
        if event in ("socket.connect", "socket.getaddrinfo"):
            raise RuntimeError(f"a build went to the network: {args}")
        if event == "import" and args[0].partition(".")[0] in NEEDLESS:
            raise RuntimeError(f"a build imports {args[0]}")

    sys.addaudithook(refuse)
"""

# Uses a package: writes a file, and makes copies large enough for a team of threads, also
# in a child.  Its arguments are modules to import in this order.
USE = """
    import importlib
    import json
    import os
    import re
    import sys

    import numpy as np

    source = np.random.default_rng(1).integers(0, 255, 9 << 20, np.uint8)

    def copy(threads):
        target = np.zeros_like(source)
        nvmeio.memcpy(target, source, threads=threads)
        assert (target == source).all()

    for name in sys.argv[1:]:
        importlib.import_module(name)
        if name == "nvmeio":
            import nvmeio

            copy(1)
            before = len(os.listdir("/proc/self/task"))
            copy(4)
            started = len(os.listdir("/proc/self/task")) - before
    copy(None)
    nvmeio.write_file(b"123", "file")
    if os.fork() == 0:
        copy(4)
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
    if torch := sys.modules.get("torch"):  # its threads work too
        assert float(torch.ones(1 << 20).sum()) == 1 << 20
    with open("/proc/self/maps", encoding="ascii") as maps:
        words = {*maps.read().split()}
    runtimes = [word for word in words if re.search("libgomp|libi?omp", word)]
    openmp = nvmeio.build_info()["features"]["openmp"]
    print(json.dumps([nvmeio.__file__, started, runtimes, openmp]))
"""

# Replaces dlopen(), as if there was no libgomp.
NO_GOMP = r"""
#include <dlfcn.h>
#include <string.h>

void *dlopen(const char *path, int flags)
{
    void *(*real)(const char *, int) = dlsym(RTLD_NEXT, "dlopen");
    return path && strstr(path, "libgomp") ? NULL : real(path, flags);
}
"""


class Built:
    """A built library, and the output of its build."""

    def __init__(self, folder, done):
        self.folder = folder / "built"
        self.status = done.returncode
        self.lines = (done.stdout + done.stderr).splitlines()

    @property
    def record(self):
        assert self.status == 0, self.lines
        return json.loads((self.folder / "build.json").read_text(encoding="utf-8"))

    @property
    def members(self):
        """Return the names of the archive's members."""
        return run("ar", "t", self.folder / "libnvmeio.a").split()

    def engines(self, folder):
        """Return the report on the engines of a C program with this library."""
        program = folder / "list_engines"
        source = folder / "list_engines.c"
        source.write_text(file_of(PAGE, source.name))
        libraries = [self.folder / "libnvmeio.a", *self.record["link_flags"]]
        run(COMPILER, f"-I{folder / 'include'}", source, "-o", program, *libraries)
        return {
            line.split("\t")[0]: line.split("\t")[1:] for line in run(program).split("\n")
        }


def copy_sources(folder):
    """Copy the files that the build reads, without the results of an earlier one."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    made = shutil.ignore_patterns("*.so", "lib", "__pycache__", "*.egg-info")
    for name in ("include", "src"):
        shutil.copytree(ROOT / name, folder / name, ignore=made)
    return folder


def run_setup(folder, *command, **environment):
    """Run a command of setup.py in a copy, with additional environment variables."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("CFLAGS", "LDFLAGS") and not name.startswith("NVMEIO_")
    }
    done = subprocess.run(
        [sys.executable, "setup.py", *command],
        cwd=folder,
        env=kept | environment,
        capture_output=True,
        text=True,
    )
    return Built(folder, done)


@pytest.fixture
def sources(tmp_path):
    """A copy of the files that the build reads."""
    return copy_sources(tmp_path)


@pytest.fixture
def build(sources):
    """A function that builds the archive in the copy, with additional variables."""
    return functools.partial(
        run_setup, sources, "-q", "build_clib", "--build-clib", "built"
    )


@pytest.fixture
def hidden(sources):
    """Compiler flags that hide the headers of all libraries."""
    folder = sources / "hidden"
    folder.mkdir()
    for _, header, _ in FEATURES.values():
        (folder / header).write_text('#error "hidden by a test"\n')
    return f"-O0 -I{folder}"


def test_a_library_set_to_no_is_left_out_silently(build, sources):
    built = build(
        CFLAGS="-O0", **{f"NVMEIO_WITH_{name.upper()}": "no" for name in FEATURES}
    )
    for name, found in built.record["features"].items():
        assert found["reason"] == f"NVMEIO_WITH_{name.upper()}=no"
        assert not found["built"]
    assert built.lines == []
    assert built.record["link_flags"] == ["-pthread"]
    assert "engine_uring.o" not in built.members
    engines = built.engines(sources)
    reason = "not built: liburing was missing or left out when nvmeio was compiled"
    assert engines["io_uring"] == ["0", str(errno.ENOSYS), reason]
    assert engines["libaio"][0] == "1"
    assert engines["threads"] == engines["sync"] == ["1", "0", ""]


def test_missing_libraries_are_left_out_and_a_line_each_names_its_package(
    build, sources, hidden
):
    built = build(CFLAGS=hidden)
    assert len(built.lines) == len(FEATURES)
    for feature, (package, _, member) in FEATURES.items():
        found = built.record["features"][feature]
        assert not found["built"]
        (line,) = (line for line in built.lines if found["reason"] in line)
        assert feature in line
        assert package in line
        assert member not in built.members
    engines = built.engines(sources)
    assert engines["io_uring"][0] == "0"


@pytest.mark.parametrize("feature", FEATURES)
def test_a_missing_library_set_to_yes_is_an_error_that_names_its_package(
    build, hidden, feature
):
    wanted = {f"NVMEIO_WITH_{name.upper()}": "no" for name in FEATURES}
    variable = f"NVMEIO_WITH_{feature.upper()}"
    built = build(CFLAGS=hidden, **wanted | {variable: "yes"})
    assert built.status != 0
    assert len(built.lines) == 1
    assert f"{variable}=yes" in built.lines[0]
    assert FEATURES[feature][0] in built.lines[0]
    assert not built.folder.exists()


@pytest.mark.parametrize(
    ("feature", "wish", "allowed"),
    [("LIBURING", "find", "auto, yes or no"), ("OPENMP", "maybe", "auto, yes, no or find")],
)
def test_an_invalid_value_of_a_build_variable_is_an_error(build, feature, wish, allowed):
    built = build(**{"NVMEIO_WITH_LIBURING": "no", f"NVMEIO_WITH_{feature}": wish})
    assert built.status != 0
    assert f"is {wish!r}; it must be {allowed}" in built.lines[-1]


# Without optimization, which is slow.
WHOLE = ("build", "--build-lib", "package")
WHOLE_ENVIRONMENT = {"CFLAGS": "-O0", "NVMEIO_WITH_OPENMP": "find"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A copy in which the whole package was built without a network."""
    folder = copy_sources(tmp_path_factory.mktemp("whole"))
    (folder / "sitecustomize.py").write_text(textwrap.dedent(OFFLINE))
    environment = {**WHOLE_ENVIRONMENT, "PYTHONPATH": str(folder)}
    built = run_setup(folder, "-q", *WHOLE, **environment)
    assert built.status == 0, built.lines
    return folder


def use(whole, *modules, **variables):
    """Use the package, and return what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(whole / "package"), **variables}
    command = (sys.executable, "-c", textwrap.dedent(USE), *modules)
    return json.loads(run(*command, cwd=whole, env=environment))


@pytest.mark.slow
@pytest.mark.xdist_group("whole")
def test_the_whole_package_is_built_without_torch_openmp_and_the_network(whole):
    package = whole / "package"
    (whole / "hidden.c").write_text(NO_GOMP)
    hides = whole / "hidden.so"
    run(COMPILER, "-D_GNU_SOURCE", "-shared", "-fPIC", whole / "hidden.c", "-o", hides)
    found, started, runtimes, openmp = use(whole, "nvmeio", LD_PRELOAD=str(hides))
    assert Path(found).parent == package / "nvmeio"
    assert (started, runtimes, openmp["built"]) == (0, [], False)
    assert "libgomp.so.1 was not found: install libgomp1" in openmp["reason"]
    assert (whole / "file").read_bytes() == b"123"
    record = (package / "nvmeio" / "lib" / "build.json").read_text(encoding="utf-8")
    assert "torch" not in record
    assert "cuda" not in record


@pytest.mark.slow
@pytest.mark.xdist_group("whole")
@pytest.mark.parametrize(
    "modules", [("nvmeio",), ("torch", "nvmeio"), ("nvmeio", "torch")], ids=" ".join
)
def test_copies_use_the_only_libgomp_of_the_process(whole, modules):
    if "torch" in modules:
        pytest.importorskip("torch", reason="torch is not installed")
    _, started, runtimes, openmp = use(whole, *modules)
    assert openmp["built"]
    assert len(runtimes) == 1
    assert started == 3


@pytest.mark.slow
@pytest.mark.xdist_group("whole")
@pytest.mark.parametrize(
    ("changed", "compiled", "linked"),
    [
        pytest.param(["src/nvmeio/files.py"], set(), set(), id="Python"),
        pytest.param(
            ["src/nvmeio/_native/errors.pyx"], {"errors"}, {"errors"}, id="Cython"
        ),
        pytest.param(
            ["src/libnvmeio/latency.c", "src/libnvmeio/copy_kernels.h"],
            {"latency", "copy", "copy_neon", "copy_x86"},
            {"libnvmeio"},
            id="C and a header",
        ),
    ],
)
def test_only_changed_files_and_their_dependents_are_compiled(
    whole, changed, compiled, linked
):
    for name in changed:
        (whole / name).touch()
    built = run_setup(whole, *WHOLE, **WHOLE_ENVIRONMENT)
    assert built.status == 0, built.lines
    commands = [line.split() for line in built.lines if " -o " in line]
    places = [words[words.index("-o") + 1] for words in commands]
    # Files of the library are compiled twice.
    outputs = [Path(place).name for place in places if "/archive/" not in place]
    hidden = {Path(place).stem for place in places if "/archive/" in place}
    sources = whole / "src" / "libnvmeio"
    assert hidden == {name for name in compiled if (sources / f"{name}.c").exists()}
    assert {name[:-2] for name in outputs if name.endswith(".o")} == compiled
    assert {name.split(".")[0] for name in outputs if name.endswith(".so")} == linked
    assert len(outputs) == len(compiled) + len(linked)


def test_a_build_is_optimized_until_other_flags_compile_everything_again(build):
    """DeepSpeed's op is built with -O0."""
    first = build(CFLAGS="-g0")
    assert optimization(first.record) in ("-O2", "-O3")
    reasons = [found["reason"] for found in first.record["features"].values()]
    assert len(first.lines) == sum(reason != "" for reason in reasons)
    second = build(CFLAGS="-O0 -g0 -DOTHER=1")
    assert optimization(second.record) == "-O0"
    objects = list(second.folder.parent.rglob("*.o"))
    # Once for the archive, and once for the shared library.
    assert len(objects) == 2 * len(second.members) > 2
    written = (second.folder / "build.json").stat().st_mtime
    assert all(path.stat().st_mtime >= written for path in objects)


def optimization(record):
    """Return the last optimization flag of a compiler's command."""
    return [flag for flag in ("-O0", *record["flags"]) if flag.startswith("-O")][-1]
