"""Build nvmeio: the C library as a static archive, and the Cython modules around it.

Options come from the environment: NVMEIO_WITH_LIBURING, NVMEIO_WITH_LIBAIO and
NVMEIO_WITH_OPENMP (auto, yes or no), NVMEIO_DEBUG=1, NVMEIO_TEST_BUILD=1 (faults:
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
if os.environ.get("CFLAGS"):  # which take the place of Python's, and these optimize
    os.environ["CFLAGS"] = f"-O2 -DNDEBUG {os.environ['CFLAGS']}"
LIBRARY_FLAGS = ["-std=gnu11", "-D_GNU_SOURCE=", "-pthread", "-fvisibility=hidden"]
LIBRARY_FLAGS += ["-Wall", "-Wextra", *DEBUG_FLAGS]
if TEST_BUILD:  # headers would call the system past the faults
    LIBRARY_FLAGS += ["-DNVMEIO_HAVE_FAULTS=1", "-U_FORTIFY_SOURCE", "-U_FILE_OFFSET_BITS"]
# The other formats put the signature in front of the docstring that a reader sees.
DIRECTIVES = {"language_level": 3, "binding": True, "embedsignature": True}
DIRECTIVES |= {"embedsignature.format": "clinic", "auto_pickle": False}


class Feature(NamedTuple):
    """Something that the system may lack, and the files of src/libnvmeio that need it."""

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
    Feature("libaio", "-laio", "engine_libaio.c", "libaio.h", "io_setup, io_submit",
            "libaio-dev (Debian, Ubuntu) or libaio-devel (Fedora)"),
    Feature("openmp", "-fopenmp", "", "omp.h", "omp_get_max_threads",
            "gcc, for clang libomp-dev (Debian, Ubuntu) or libomp-devel (Fedora)"),
]  # fmt: skip
FAULTS = ("fault.c", "fault_calls.c", "fault_engine.c")
# What builds in place keep: pip names a temporary folder for an editable install.
KEPT = f"build/objects-{sysconfig.get_config_var('SOABI')}"
PROBE = "#include <%s>\nvoid *used[] = {%s};\nint main(void) { return !used[0]; }\n"


def output_of(*command):
    """Return what a tool prints; empty where it fails or does not exist."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""


def look_for(feature, compiler):
    """Return what is recorded of a feature: built, version, flags and the reason if not."""
    variable = f"NVMEIO_WITH_{feature.name.upper()}"
    wish = os.environ.get(variable, "auto")
    if wish not in ("auto", "yes", "no"):
        raise OptionError(f"{variable} must be auto, yes or no, not {wish!r}")
    if wish == "no":
        return {"built": False, "version": "", "flags": [], "reason": f"{variable}=no"}
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
    print(f"nvmeio is built without it: {reason}", file=sys.stderr)
    return {"built": False, "version": "", "flags": [], "reason": reason}


def ingredients(target):
    """Return the files that an object was made of, as its compiler listed them."""
    try:
        rule = Path(f"{target}.d").read_text()
    except FileNotFoundError:
        return []
    words = re.split(r"(?<!\\)\s+", rule.partition(": ")[2].replace("\\\n", " ").strip())
    return [word.replace("\\ ", " ") for word in words]


def compile_changed(compiler, record, force):
    """Make a compiler leave out objects that are newer than all that decides on them."""
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
    """Build libnvmeio.a and its record; setup(libraries=) would link it to every module."""

    def finalize_options(self):
        super().finalize_options()
        self.libraries = [("nvmeio", {})]
        self.archive = f"{self.build_clib}/libnvmeio.a"
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
        # Everything depends on the record: other flags or features, and all is built anew.
        if not self.record.exists() or self.record.read_text() != text:
            self.mkpath(self.build_clib)
            self.record.write_text(text)
        left_out = {n for f in FEATURES if f not in engines for n in f.sources.split()}
        left_out |= set() if TEST_BUILD else set(FAULTS)
        files = sorted(Path("src/libnvmeio").glob("*.c"))
        sources = [str(path) for path in files if path.name not in left_out]
        self.build_archive(sources, [f"NVMEIO_HAVE_{f.name.upper()}" for f in engines])

    def build_archive(self, sources, macros):
        """Compile those of `sources` that have changed side by side, and pack all."""
        compile_changed(self.compiler, str(self.record), self.force)
        flags = ["-Iinclude", *LIBRARY_FLAGS, *(f"-D{name}=1" for name in macros)]
        options = {"output_dir": self.build_temp, "extra_postargs": flags}

        def compiled(path):
            renamed = TEST_BUILD and Path(path).name not in FAULTS
            first = ["-include", "src/libnvmeio/fault_calls.h"] if renamed else []
            return self.compiler.compile([path], extra_preargs=first, **options)[0]

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compiled, sources))
        # The record changes with the features, the folder where a source came or went.
        made_of = [*objects, str(self.record), "src/libnvmeio"]
        if not (self.force or newer_group(made_of, self.archive)):
            return
        # ar would keep the objects of a feature that is gone.
        Path(self.archive).unlink(missing_ok=True)
        self.compiler.create_static_lib(objects, "nvmeio", output_dir=self.build_clib)


class BuildModules(build_ext):
    """Build the extensions; _core alone gets the archive, which is installed as well."""

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
            for path in (library.archive, library.record):
                copy = Path(top, "nvmeio", "lib", Path(path).name)
                # That of another Python may be newer.
                if not copy.exists() or not filecmp.cmp(path, copy, shallow=False):
                    shutil.copy(path, copy)

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
            if extension.name == "nvmeio._core":
                extension.extra_objects.append(library.archive)
                extension.depends.append(library.archive)
                # The symbols stay inside: whoever needs the library cimports _core.
                extension.extra_link_args += [*library.link_flags, "-Wl,--exclude-libs,ALL"]
            elif extension.name == "nvmeio.copy" and openmp_flags:
                extension.extra_compile_args += openmp_flags
                extension.extra_link_args += openmp_flags
        super().build_extensions()


class BuildPython(build_py):
    """Put include/ into a package that is not editable, and the .pth file beside it."""

    def run(self):
        super().run()
        if self.editable_mode:  # then Python looks for .pth files where only the wheel goes
            site_packages = self.get_finalized_command("install").install_lib
        else:
            site_packages = self.build_lib
            self.copy_tree("include", f"{self.build_lib}/nvmeio/include")
        self.copy_file("src/nvmeio-deepspeed.pth", site_packages)


def extension(path):
    """Return the extension of one .pyx file, named by its place under src."""
    name = ".".join(path.relative_to("src").with_suffix("").parts)
    return Extension(name, [str(path)], extra_compile_args=["-Iinclude", *DEBUG_FLAGS])


COMMANDS = {"build_clib": BuildLibrary, "build_ext": BuildModules, "build_py": BuildPython}
setup(
    version=VERSION,
    ext_modules=[extension(path) for path in sorted(Path("src/nvmeio").rglob("*.pyx"))],
    cmdclass=COMMANDS,
)
