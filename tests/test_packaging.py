"""The installed package, and other projects that build on it."""

import errno
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import nvmeio
from helpers import pattern
from pages import file_of

COMPILER = shutil.which(os.environ.get("CC", "cc"))
# Its programs show what other projects do.
PAGE = "docs/embedding.md"


def run(*command, **options):
    """Return a command's output; a failure shows all of it."""
    result = subprocess.run(command, capture_output=True, text=True, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def downstream(tmp_path_factory):
    """A Cython module of another project, built against this nvmeio."""
    pytest.importorskip("Cython")
    folder = tmp_path_factory.mktemp("downstream")
    for name in ("reader.pyx", "setup.py"):
        (folder / name).write_text(file_of(PAGE, name))
    run(sys.executable, "setup.py", "-q", "build_ext", "--inplace", cwd=folder)
    path = folder / f"reader{sysconfig.get_config_var('EXT_SUFFIX')}"
    spec = importlib.util.spec_from_file_location("reader", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.packaging
def test_a_downstream_module_shares_the_pool(downstream):
    size = 3 << 20
    before = nvmeio.pool_stats()
    block = downstream.Block(size)
    assert np.frombuffer(block, np.uint8).ctypes.data % 4096 == 0
    assert nvmeio.pool_stats()["bytes_used"] - before["bytes_used"] >= size
    del block
    assert nvmeio.pool_stats()["bytes_used"] == before["bytes_used"]


@pytest.mark.packaging
def test_a_downstream_module_reads_with_several_threads(downstream, tmp_path):
    content = pattern(5 * 100_003)
    nvmeio.write_file(content, tmp_path / "file")
    reader = downstream.Reader(str(tmp_path / "file"))
    with ThreadPoolExecutor(4) as threads:
        blocks = threads.map(lambda i: reader.read(100_003, 100_003 * i), range(5))
        assert b"".join(map(bytes, blocks)) == content


@pytest.mark.packaging
def test_a_downstream_module_gets_our_errors(downstream):
    with pytest.raises(OSError, match="memory") as caught:
        downstream.Block(1 << 62)
    assert caught.value.errno == errno.ENOMEM
    with pytest.raises(FileNotFoundError) as caught:
        downstream.Reader("missing")
    assert caught.value.filename == "missing"


@pytest.mark.packaging
def test_a_c_program_without_python_moves_a_file(tmp_path, engine):
    program = tmp_path / "move_file"
    flags = ["-Wall", "-Wextra", "-Werror", f"-I{nvmeio.get_include()}"]
    libraries = [f"-L{nvmeio.get_library_dir()}", "-l:libnvmeio.a"]
    libraries += nvmeio.build_info()["link_flags"]
    source = tmp_path / "move_file.c"
    source.write_text(file_of(PAGE, "move_file.c"))
    run(COMPILER, *flags, source, "-o", program, *libraries)
    assert "libpython" not in run("ldd", program)
    moved = run(program, tmp_path / "file", engine)
    assert moved.split() == [nvmeio.__version__, engine]
    assert (tmp_path / "file").stat().st_size == 5 * 1024 * 1024 + 777


TRANSFER = """
import sys, numpy, nvmeio
numpy.arange(9000, dtype="u2").tofile(sys.argv[1])
found = numpy.zeros(9000, "u2")
print(nvmeio.Handle().submit_read(found, sys.argv[1]).wait(), found[-1])
"""


def test_the_library_calls_its_own_functions_despite_equal_names(tmp_path):
    source, preloaded = tmp_path / "other.c", tmp_path / "other.so"
    names = ("nvmeio_file_size", "nvmeio_request_done", "nvmeio_pool_holds")
    bodies = (f"void {name}(void) {{ abort(); }}\n" for name in names)
    source.write_text("#include <stdlib.h>\n" + "".join(bodies))
    run(COMPILER, "-shared", "-fPIC", source, "-o", preloaded)
    command = (sys.executable, "-c", TRANSFER, tmp_path / "file")
    assert run("env", f"LD_PRELOAD={preloaded}", *command) == "18000 8999\n"


def test_every_public_header_compiles_by_itself(tmp_path):
    include = Path(nvmeio.get_include())
    headers = sorted(path.relative_to(include) for path in include.rglob("*.h"))
    assert Path("nvmeio/nvmeio.h") in headers
    for header in headers:
        source = tmp_path / "header.c"
        source.write_text(f"#include <{header}>\n#include <{header}>\n")
        run(COMPILER, "-Wall", "-Werror", "-fsyntax-only", f"-I{include}", source)


def test_the_library_is_where_get_library_dir_says():
    archive = Path(nvmeio.get_library_dir(), "libnvmeio.a")
    assert archive.read_bytes().startswith(b"!<arch>\n")


def test_only_the_test_build_has_faults():
    archive = Path(nvmeio.get_library_dir(), "libnvmeio.a").read_bytes()
    assert (b"nvmeio_fault_strikes" in archive) == nvmeio.build_info()["test_build"]


def test_the_package_is_typed_and_cimportable():
    package = Path(nvmeio.__file__).parent
    assert (package / "py.typed").is_file()
    assert (package / "libnvmeio.pxd").is_file()
    assert (package / "_native" / "handle.pyi").is_file()


def test_the_version_is_that_of_the_headers():
    text = Path(nvmeio.get_include(), "nvmeio", "base.h").read_text()
    assert f'NVMEIO_VERSION "{nvmeio.__version__}"' in text
    assert nvmeio.build_info()["version"] == nvmeio.__version__


def test_the_library_is_loaded_once():
    """Another copy would have its own pool and fork handler."""
    with open("/proc/self/maps") as lines:
        mapped = {line.split()[-1] for line in lines if "nvmeio" in line}
    libraries = {path for path in mapped if "libnvmeio" in path}
    assert libraries == {str(Path(nvmeio.get_library_dir(), "libnvmeio.so"))}
    for path in Path(nvmeio.__file__).parent.rglob("_native/*.so"):
        assert b"nvmeio_pool_alloc: " not in path.read_bytes()
        symbols = run("nm", "--dynamic", "--defined-only", path)
        assert "nvmeio_pool_alloc" not in symbols, path.name
        # Wherever the package is installed.
        dynamic = run("readelf", "--dynamic", path)
        assert re.search(r"\(RUNPATH\).*[\[:]\$ORIGIN/\.\./lib\]", dynamic), path.name


# Audit events that start a program or fork.
STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork")
USE = """
    import sys

    import torch as library

    def refuse(event, args):
        if event in {starts}:
            raise RuntimeError(f"{{event}}: {{args}}")

    sys.addaudithook(refuse)
    import nvmeio

    source, target = library.arange(100_000), library.zeros(100_000, dtype=library.int64)
    with nvmeio.aio_handle() as handle:
        handle.write(source, "file")
        handle.read(target, "file")
        handle.free_cpu_locked_tensor(handle.new_cpu_locked_tensor(10, source))
    assert (source == target).all()
    print(nvmeio.engines()["sync"]["works"])
"""


def test_no_compiler_and_no_other_program_is_run(tmp_path):
    """DeepSpeed's op is compiled at its first use."""
    pytest.importorskip("torch", reason="torch is not installed")
    code = textwrap.dedent(USE).format(starts=STARTS)
    environment = {**os.environ, "PATH": "", "CC": "no-compiler"}
    printed = run(sys.executable, "-c", code, cwd=tmp_path, env=environment)
    assert printed == "True\n"


def test_importing_loads_neither_torch_nor_slow_modules():
    code = (
        "import sys, numpy; b = {*sys.modules}; import nvmeio; print(*{*sys.modules} - b)"
    )
    loaded = {*run(sys.executable, "-c", code).split()}
    assert {"nvmeio", "nvmeio._native.handle"} <= loaded
    # Import times measured after numpy: 30 ms, 10 ms, and 1 to 5 ms each.
    slow = {"importlib.metadata", "numpy.ma", "asyncio", "hashlib", "json", "pathlib"}
    slow |= {"difflib", "secrets", "socket", "fractions"}
    assert not loaded & {"torch", "Cython", "setuptools", *slow}


@pytest.mark.skipif(
    not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="this Python has a GIL"
)
def test_no_module_switches_the_gil_on():
    package = Path(nvmeio.__file__).parent
    found = [path.relative_to(package.parent) for path in package.rglob("*.cpython-*.so")]
    names = [".".join([*path.parts[:-1], path.name.partition(".")[0]]) for path in found]
    assert len(names) > 15
    code = f"import sys, {', '.join(names)}; print(sys._is_gil_enabled())"
    assert run(sys.executable, "-W", "error", "-c", code) == "False\n"


@pytest.mark.parametrize("missing", [["torch"], ["torch", "safetensors"]])
def test_the_modules_of_the_tests_can_be_imported_without(missing):
    """`make test-pythons` has no torch, and modules that need it skip themselves."""
    tests = Path(__file__).parent
    code = f"""
import sys, pathlib, pytest

sys.path += ["{tests.parent / "docs/_ext"}"]
sys.modules.update(dict.fromkeys({missing}))  # importing them raises ModuleNotFoundError
for path in sorted(pathlib.Path().glob("test_*.py")):
    try:
        __import__(path.stem)
    except pytest.skip.Exception:
        pass
    else:
        print(path.stem)
"""
    imported = {*run(sys.executable, "-c", code, cwd=tests).split()}
    assert {"test_handle", "test_default_handle", "test_order", "test_pickles"} <= imported


def test_nvmeio_torch_needs_no_separate_import():
    pytest.importorskip("torch")
    code = "import sys, nvmeio; assert 'torch' not in sys.modules; nvmeio.torch.empty(3)"
    run(sys.executable, "-c", code)
    with pytest.raises(AttributeError, match="no attribute 'jax'"):
        _ = nvmeio.jax
