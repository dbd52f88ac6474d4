"""Build nvmeio: the C library, shared and as an archive, and the Cython modules around it.

Options come from the environment: NVMEIO_WITH_LIBURING and NVMEIO_WITH_OPENMP (auto, yes
or no; of OpenMP also find: at run time), NVMEIO_LIBURING (a configured source tree of
liburing, which is compiled in), NVMEIO_DEBUG=1, NVMEIO_TEST_BUILD=1 (faults:
docs/reliability.md), and CC, CFLAGS and LDFLAGS as usual.
``python setup.py build_clib --build-clib FOLDER`` makes the archive alone, without Python.
"""

import filecmp
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from Cython import __version__ as cython_version
from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_clib import build_clib
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import OptionError, PlatformError
from setuptools.modified import newer, newer_group

VERSION = re.search('NVMEIO_VERSION "(.+)"', Path("include/nvmeio/base.h").read_text())[1]
SWITCHES = ("NVMEIO_DEBUG", "NVMEIO_TEST_BUILD")
DEBUG, TEST_BUILD = (os.environ.get(name, "0") not in ("", "0") for name in SWITCHES)
# _FORTIFY_SOURCE, which some distributions' Python asks for, warns without optimization.
DEBUG_FLAGS = ["-O0", "-UNDEBUG", "-U_FORTIFY_SOURCE", "-Werror"] if DEBUG else []
RELEASE_FLAGS = []
if os.environ.get("CFLAGS"):  # they replace Python's own flags, which optimize
    os.environ["CFLAGS"] = f"-O2 -DNDEBUG {os.environ['CFLAGS']}"
elif not DEBUG:  # Python's flags ask for -O3 and -g: half of the time and size of a build
    RELEASE_FLAGS = ["-O2", "-g0"]
LIBRARY_FLAGS = ["-std=gnu11", "-D_GNU_SOURCE=", "-pthread", "-fvisibility=hidden"]
LIBRARY_FLAGS += ["-Wall", "-Wextra", *RELEASE_FLAGS, *DEBUG_FLAGS]
if TEST_BUILD:  # these macros make headers bypass the calls that inject faults
    LIBRARY_FLAGS += ["-DNVMEIO_HAVE_FAULTS=1", "-U_FORTIFY_SOURCE", "-U_FILE_OFFSET_BITS"]
# The other formats put the signature into the visible docstring.
DIRECTIVES = {"language_level": 3, "binding": True, "embedsignature": True}
DIRECTIVES |= {"embedsignature.format": "clinic", "auto_pickle": False}
# Otherwise a Python without a GIL switches it on.
DIRECTIVES |= {"freethreading_compatible": True}


class Feature(NamedTuple):
    """A library that the system may lack, and the files of src/libnvmeio that need it."""

    name: str
    flag: str
    sources: str
    header: str
    symbols: str
    packages: str


FEATURES = [
    Feature("liburing", "-luring", "engine_uring.c", "liburing.h",
            "io_uring_submit_and_wait, io_uring_wait_cqes, io_uring_prep_read",
            "liburing-dev (Debian, Ubuntu) or liburing-devel (Fedora)"),
    Feature("openmp", "-fopenmp", "", "omp.h", "omp_get_max_threads",
            "gcc, for clang libomp-dev (Debian, Ubuntu) or libomp-devel (Fedora)"),
]  # fmt: skip
FAULTS = "tests/faults"
LIBURING = os.environ.get("NVMEIO_LIBURING", "")
LIBURING_FILES = ("queue.c", "register.c", "setup.c", "syscall.c")
LIBURING_SOURCES = [f"{LIBURING}/src/{name}" for name in LIBURING_FILES]
LIBURING_FLAGS = ["-DLIBURING_INTERNAL", "-include", f"{LIBURING}/config-host.h"]
LIBURING_WARNINGS = ["-Wno-sign-compare", "-Wno-unused-parameter"]  # as its makefile
# nvmeio.pc, for pkg-config; its paths are relative, so the package can be anywhere.
PKG_CONFIG_FILE = f"""\
prefix=${{pcfiledir}}/..
Name: nvmeio
Description: Arrays and tensors to and from NVMe files
Version: {VERSION}
Cflags: -I@INCLUDE@
Libs: -L${{prefix}} -lnvmeio -Wl,-rpath,${{prefix}}
"""
# Where builds in place keep their objects: for an editable install, pip passes a temporary
# directory.
KEPT = f"build/objects-{sysconfig.get_config_var('SOABI')}"
PROBE = "#include <%s>\nvoid *used[] = {%s};\nint main(void) { return !used[0]; }\n"


def output_of(*command):
    """Return the output of a tool; "" if it fails or does not exist."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""


def look_for(feature, compiler):
    """Look for a feature; return its record: built, version, flags, and why not built."""
    variable = f"NVMEIO_WITH_{feature.name.upper()}"
    wish = os.environ.get(variable, "auto")
    values = ["auto", "yes", "no", *(["find"] if feature.name == "openmp" else [])]
    if wish not in values:
        allowed = f"{', '.join(values[:-1])} or {values[-1]}"
        raise OptionError(f"{variable} is {wish!r}; it must be {allowed}")
    if wish == "find":  # src/nvmeio/_native/gomp.h
        flags = ["-DNVMEIO_FINDS_GOMP=1", "-ldl"]
        return {"built": True, "version": "", "flags": flags, "reason": ""}
    if wish == "no":
        return {"built": False, "version": "", "flags": [], "reason": f"{variable}=no"}
    if feature.name == "liburing" and LIBURING:
        spec = Path(LIBURING, "liburing.spec").read_text(encoding="utf-8")
        version = re.search(r"^Version:\s*(\S+)", spec, re.MULTILINE)[1]
        return {"built": True, "version": version, "flags": [], "reason": ""}
    pkg_config = (os.environ.get("PKG_CONFIG", "pkg-config"), feature.name)
    flags = output_of(*pkg_config, "--cflags", "--libs").split() or [feature.flag]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.c")
        source.write_text(PROBE % (feature.header, feature.symbols), encoding="utf-8")
        command = [*compiler.compiler_so, source, "-o", source.with_suffix("")]
        command += [*shlex.split(os.environ.get("LDFLAGS", "")), *flags]
        if not subprocess.run(command, capture_output=True).returncode:
            version = output_of(*pkg_config, "--modversion").strip()
            return {"built": True, "version": version, "flags": flags, "reason": ""}
    reason = f"{feature.name} was not found: install {feature.packages}"
    if wish == "yes":
        raise PlatformError(f"{variable}=yes, but {reason}")
    print(f"building nvmeio without {feature.name}: {reason}", file=sys.stderr)
    return {"built": False, "version": "", "flags": [], "reason": reason}


def ingredients(target):
    """Return the files that an object depends on, from the compiler's .d file."""
    try:
        rule = Path(f"{target}.d").read_text()
    except FileNotFoundError:
        return []
    words = re.split(r"(?<!\\)\s+", rule.partition(": ")[2].replace("\\\n", " ").strip())
    return [word.replace("\\ ", " ") for word in words]


def compile_changed(compiler, record, force):
    """Make a compiler skip objects that are newer than everything they depend on."""
    compile_all = compiler.compile

    def compile_some(sources, output_dir=None, extra_postargs=(), **options):
        targets = compiler.object_filenames(sources, output_dir=output_dir)
        for source, target in zip(sources, targets, strict=True):
            made_of = ingredients(target)
            decisive = [*made_of, record, "setup.py"]
            if force or not made_of or newer_group(decisive, target, "newer"):
                flags = [*extra_postargs, "-MMD", "-MF", f"{target}.d"]
                compile_all([source], output_dir, extra_postargs=flags, **options)
        return targets

    compiler.compile = compile_some


class BuildLibrary(build_clib):
    """Build libnvmeio.so for the modules, libnvmeio.a for programs, and a build record."""

    def finalize_options(self):
        super().finalize_options()
        self.libraries = [("nvmeio", {})]
        self.archive = f"{self.build_clib}/libnvmeio.a"
        self.shared = f"{self.build_clib}/libnvmeio.so"
        self.record = Path(self.build_clib, "build.json")

    def build_libraries(self, libraries):
        name, *flags = self.compiler.compiler_so
        if not (version := output_of(name, "--version").partition("\n")[0]):
            raise PlatformError(f"the C compiler {name!r} does not run: install gcc")
        self.features = {f.name: look_for(f, self.compiler) for f in FEATURES}
        engines = [f for f in FEATURES if f.sources and self.features[f.name]["built"]]
        flags_of = [self.features[f.name]["flags"] for f in engines]
        self.link_flags = sum(flags_of, ["-pthread"])
        config = {"version": VERSION, "debug": DEBUG, "test_build": TEST_BUILD}
        config |= {"compiler": version, "cython": cython_version, "features": self.features}
        config |= {"flags": [*flags, *LIBRARY_FLAGS], "link_flags": self.link_flags}
        config |= {"ldflags": shlex.split(os.environ.get("LDFLAGS", ""))}
        text = json.dumps(config, indent=4) + "\n"
        # All objects depend on the record, so other flags or features rebuild everything.
        if not self.record.exists() or self.record.read_text() != text:
            self.mkpath(self.build_clib)
            self.record.write_text(text)
        left_out = {n for f in FEATURES if f not in engines for n in f.sources.split()}
        folders = ["src/libnvmeio", FAULTS] if TEST_BUILD else ["src/libnvmeio"]
        files = [path for name in folders for path in sorted(Path(name).glob("*.c"))]
        sources = [str(path) for path in files if path.name not in left_out]
        sources += LIBURING_SOURCES if LIBURING else []
        self.build_archive(sources, [f"NVMEIO_HAVE_{f.name.upper()}" for f in engines])

    def build_archive(self, sources, macros):
        """Compile the changed files of `sources` in parallel, and link both libraries."""
        compile_changed(self.compiler, str(self.record), self.force)
        flags = ["-Iinclude", "-Isrc/libnvmeio", *LIBRARY_FLAGS]
        flags += [f"-D{name}=1" for name in macros]
        flags += [f"-I{LIBURING}/src/include"] if LIBURING else []

        def compiled(path, folder, *more):
            renamed = TEST_BUILD and not path.startswith(FAULTS)
            first = ["-include", f"{FAULTS}/fault_calls.h"] if renamed else []
            first += LIBURING_FLAGS if path in LIBURING_SOURCES else []
            postargs = [*flags, *more]
            postargs += LIBURING_WARNINGS if path in LIBURING_SOURCES else []
            options = {
                "output_dir": f"{self.build_temp}/{folder}",
                "extra_postargs": postargs,
            }
            return self.compiler.compile([path], extra_preargs=first, **options)[0]

        # The archive's objects hide their symbols: what links it must not export them,
        # because the package's modules would find them.
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            hidden = pool.map(lambda p: compiled(p, "archive", "-DNVMEIO_API="), sources)
            objects = list(pool.map(lambda p: compiled(p, "shared"), sources))
            hidden = list(hidden)
        # The record changes with the features, and a directory if a source was added or
        # removed.
        folders = {str(Path(path).parent) for path in sources}
        made_of = [*objects, *hidden, str(self.record), *folders]
        if self.force or newer_group(made_of, self.archive):
            # ar would keep the objects of a feature that is now disabled.
            Path(self.archive).unlink(missing_ok=True)
            self.compiler.create_static_lib(hidden, "nvmeio", output_dir=self.build_clib)
        if self.force or newer_group(made_of, self.shared):
            # -Bsymbolic: the library calls its own functions even if the process has others
            # of the same names.
            flags = ["-Wl,-soname,libnvmeio.so", "-Wl,-Bsymbolic", *self.link_flags]
            self.compiler.link_shared_object(objects, self.shared, extra_postargs=flags)


class BuildModules(build_ext):
    """Build the extensions, and put libnvmeio.so where their run path finds it."""

    def finalize_options(self):
        if self.inplace or self.editable_mode:
            self.build_lib = self.get_finalized_command("build").build_temp = KEPT
        super().finalize_options()

    def run(self):
        self.parallel = self.parallel or os.cpu_count()
        self.run_command("build_clib")
        super().run()
        library = self.get_finalized_command("build_clib")
        for top in [self.build_lib, "src"] if self.inplace else [self.build_lib]:
            self.mkpath(f"{top}/nvmeio/lib")
            for path in (library.archive, library.shared, library.record):
                copy = Path(top, "nvmeio", "lib", Path(path).name)
                # Compare contents: the file may be newer because another Python built it.
                if not copy.exists() or not filecmp.cmp(path, copy, shallow=False):
                    shutil.copy(path, copy)
            up = "../../.." if top == "src" else ".."
            headers = f"${{prefix}}/{up}/include"
            self.mkpath(f"{top}/nvmeio/lib/pkgconfig")
            file = Path(top, "nvmeio", "lib", "pkgconfig", "nvmeio.pc")
            file.write_text(PKG_CONFIG_FILE.replace("@INCLUDE@", headers))

    def build_extensions(self):
        library = self.get_finalized_command("build_clib")
        openmp_flags = library.features["openmp"]["flags"]
        options = {"build_dir": "build/cython", "include_path": ["src"], "quiet": True}
        written = [
            Path("build/cython", *e.sources).with_suffix(".c") for e in self.extensions
        ]
        outdated = any(newer("setup.py", path) for path in written if path.exists())
        options |= {"compiler_directives": DIRECTIVES, "force": self.force or outdated}
        generated = {e.name: e.sources for e in cythonize(self.extensions, **options)}
        compile_changed(self.compiler, str(library.record), self.force)
        for extension in self.extensions:
            extension.sources = generated[extension.name]
            objects = self.compiler.object_filenames(
                extension.sources, False, self.build_temp
            )
            extension.depends = [f"{objects[0]}.d", *ingredients(*objects)]
            extension.depends += [str(library.record), "setup.py"]
            extension.extra_link_args += [f"-L{library.build_clib}", "-lnvmeio"]
            extension.extra_link_args += ["-Wl,--as-needed", "-Wl,-rpath,$ORIGIN/../lib"]
            if extension.name == "nvmeio._native.copy" and openmp_flags:
                extension.extra_compile_args += openmp_flags
                extension.extra_link_args += openmp_flags
        super().build_extensions()


class BuildPython(build_py):
    """Add include/ to the package unless it is editable, and the .pth file beside it."""

    def run(self):
        super().run()
        if self.editable_mode:  # .pth files must be in site-packages, where the wheel goes
            site_packages = self.get_finalized_command("install").install_lib
        else:
            site_packages = self.build_lib
            self.copy_tree("include", f"{self.build_lib}/nvmeio/include")
        self.copy_file("src/nvmeio-follow.pth", site_packages)


def extension(path):
    """Return the extension for one .pyx file, named by its path below src."""
    name = ".".join(path.relative_to("src").with_suffix("").parts)
    flags = ["-Iinclude", "-Isrc", *RELEASE_FLAGS, *DEBUG_FLAGS]
    return Extension(name, [str(path)], extra_compile_args=flags)


COMMANDS = {"build_clib": BuildLibrary, "build_ext": BuildModules, "build_py": BuildPython}
setup(
    version=VERSION,
    ext_modules=[extension(path) for path in sorted(Path("src/nvmeio").rglob("*.pyx"))],
    cmdclass=COMMANDS,
)
