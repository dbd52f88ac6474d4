"""NVMEIO_DEEPSPEED makes DeepSpeed use nvmeio in every process that has the variable.

Each test starts its own processes, because the hook is installed when Python starts.
"""

import json
import sys
import sysconfig
from pathlib import Path

import pytest

from processes import free_port, run, run_python, run_well

ON = {"NVMEIO_DEEPSPEED": "1"}
OFF = {"NVMEIO_DEEPSPEED": "0"}


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    """Remove the variable from the environment."""
    monkeypatch.delenv("NVMEIO_DEEPSPEED", raising=False)


def test_the_pth_file_is_where_this_python_looks_for_it():
    """Every other test here depends on it, because pip has not installed nvmeio."""
    folders = [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")]
    assert any((folder / "nvmeio-follow.pth").is_file() for folder in folders)


NOT_IMPORTED = """
import sys
loaded = [name for name in sys.modules if "nvmeio" in name]
assert loaded == ({expected}), loaded
"""


@pytest.mark.parametrize("env", [{}, OFF], ids=["unset", "0"])
def test_nothing_of_nvmeio_is_imported_if_the_variable_is_off(env):
    """With "0", the hook itself is imported but does nothing."""
    hook = ["_nvmeio_follow"] if env else []
    code = NOT_IMPORTED.format(expected=hook)
    code += "import deepspeed.ops.op_builder" + code
    code += """
from deepspeed.ops.op_builder import AsyncIOBuilder, PinMemoryBuilder
for builder in (AsyncIOBuilder, PinMemoryBuilder):
    for method in (builder.load, builder.is_compatible):
        assert "nvmeio" not in method.__module__ and not hasattr(method, "__wrapped__")
assert all("nvmeio" not in repr(finder) for finder in sys.meta_path)
"""
    run_python("-c", code, env=env)


def test_only_the_hook_is_imported_when_python_starts():
    run_python("-c", NOT_IMPORTED.format(expected=["_nvmeio_follow"]), env=ON)


INSTALLED = """
import nvmeio.deepspeed
from deepspeed.ops.op_builder import AsyncIOBuilder, PinMemoryBuilder
from deepspeed.ops.aio import aio_read, aio_write, deepspeed_memcpy, aio_handle
assert AsyncIOBuilder().load() is nvmeio.deepspeed
assert PinMemoryBuilder().load() is nvmeio.deepspeed
assert AsyncIOBuilder().is_compatible() is True
assert aio_handle is nvmeio.deepspeed.aio_handle
import deepspeed.ops
assert deepspeed.ops.__compatible_ops__["async_io"] is True
"""

ORDERS = [
    "import deepspeed",
    "from deepspeed.ops.op_builder import AsyncIOBuilder",
    "import deepspeed.ops.aio",
    "import nvmeio.deepspeed, deepspeed",
]


@pytest.mark.parametrize("first", ORDERS)
def test_nvmeio_is_installed_in_any_order_of_imports(first):
    run_python("-c", first + INSTALLED, env=ON)


def test_the_variable_may_ask_for_errors_that_raise():
    code = """
import deepspeed, nvmeio
from deepspeed.ops.op_builder import AsyncIOBuilder
assert AsyncIOBuilder().load() is nvmeio
"""
    run_python("-c", code, env={"NVMEIO_DEEPSPEED": "raise"})


def test_an_unknown_value_of_the_variable_is_refused_when_deepspeed_is_imported():
    env = {"NVMEIO_DEEPSPEED": "maybe"}
    run_python("-c", "import torch", env=env)
    done = run(sys.executable, "-c", "import deepspeed", env=env)
    assert done.returncode == 1
    assert "ValueError: NVMEIO_DEEPSPEED is 'maybe'; it must be 1, raise" in done.stderr


def test_an_installation_by_the_environment_can_be_uninstalled():
    code = """
import deepspeed, nvmeio.deepspeed
with nvmeio.deepspeed.install():
    pass
from deepspeed.ops import aio
from deepspeed.ops.op_builder import AsyncIOBuilder
assert AsyncIOBuilder().load() is nvmeio.deepspeed
nvmeio.deepspeed.uninstall()
assert not hasattr(aio, "aio_handle")
assert not hasattr(AsyncIOBuilder.load, "__wrapped__")
with nvmeio.deepspeed.install(errors="raise"):
    assert AsyncIOBuilder().load() is nvmeio
assert not hasattr(aio, "aio_handle")
"""
    run_python("-c", code, env=ON)


IMPORTED_ANEW = """
import sys
for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
    del sys.modules[name]
"""


def test_deepspeed_imported_a_second_time_has_nvmeio_too():
    run_python("-c", INSTALLED + IMPORTED_ANEW + INSTALLED, env=ON)


def test_install_is_repeated_if_deepspeed_is_imported_again():
    code = """
import nvmeio.deepspeed
nvmeio.deepspeed.install(errors="raise")
from deepspeed.ops.op_builder import AsyncIOBuilder as before
from deepspeed.ops import aio
"""
    code += IMPORTED_ANEW
    code += """
with nvmeio.deepspeed.install() as installation:
    from deepspeed.ops.op_builder import AsyncIOBuilder
    assert AsyncIOBuilder is not before
    assert installation.errors == "raise"
    assert AsyncIOBuilder().load() is nvmeio
    assert not hasattr(before.load, "__wrapped__") and not hasattr(aio, "aio_read")
assert not hasattr(AsyncIOBuilder.load, "__wrapped__")
"""
    run_python("-c", code)


@pytest.mark.parametrize(
    "change", ["os.environ['NVMEIO_DEEPSPEED'] = '0'", "del os.environ['NVMEIO_DEEPSPEED']"]
)
def test_a_program_may_clear_the_variable_before_it_imports_deepspeed(change):
    code = f"""
import os
{change}
from deepspeed.ops.op_builder import AsyncIOBuilder
assert not hasattr(AsyncIOBuilder.load, "__wrapped__")
"""
    run_python("-c", code, env=ON)


def test_a_broken_nvmeio_does_not_look_like_a_missing_deepspeed():
    code = """
import sys
sys.modules["nvmeio._native.copy"] = None
try:
    import deepspeed
except RuntimeError as error:
    assert "NVMEIO_DEEPSPEED is set, and nvmeio cannot be imported" in str(error)
    assert "nvmeio._native.copy" in str(error)
else:
    raise AssertionError("DeepSpeed was imported without nvmeio")
"""
    run_python("-c", code, env=ON)


# Versions of DeepSpeed without op_builder: no such module, and no such package.
STRANGE = [
    {"deepspeed/ops/__init__.py": ""},
    {"deepspeed/ops/op_builder/__init__.py": "", "deepspeed/ops/__init__.py": ""},
    {},
]


@pytest.mark.parametrize("files", STRANGE, ids=["no builders", "no op", "no ops"])
@pytest.mark.parametrize("env", [ON, {}], ids=["variable", "install"])
def test_a_deepspeed_without_op_builder_is_refused(tmp_path, files, env):
    for name, text in {"deepspeed/__init__.py": "", **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
try:
    import deepspeed, nvmeio.deepspeed
    nvmeio.deepspeed.install()
except RuntimeError as error:
    assert "nvmeio cannot be installed in DeepSpeed" in str(error), error
    assert "No module named 'deepspeed.ops" in str(error), error
else:
    raise AssertionError("it was taken for a DeepSpeed")
"""
    run_python("-c", code, env=env)


def test_a_loader_of_several_modules_installs_nvmeio_after_two_of_them():
    """A zip file has such a loader.  The two: the builders, and DeepSpeed itself."""
    code = """
import importlib.machinery, sys
class Loader:
    made = {}
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        real = self.made[module.__name__]
        module.__file__, module.__path__ = real.origin, real.submodule_search_locations
        exec(compile(open(real.origin).read(), real.origin, "exec"), vars(module))
class Finder:
    loader = Loader()
    def find_spec(name, path=None, target=None):
        real = importlib.machinery.PathFinder.find_spec(name, path, target)
        if not name.startswith("deepspeed") or not real or not real.origin.endswith(".py"):
            return real
        Loader.made[name] = real
        is_package = real.submodule_search_locations is not None
        return importlib.machinery.ModuleSpec(
            name, Finder.loader, origin=real.origin, is_package=is_package
        )
sys.meta_path.insert(1, Finder)
import nvmeio.deepspeed.builders as builders
installed, real = [], builders.install_for_environment
builders.install_for_environment = lambda: (installed.append(len(Loader.made)), real())
import deepspeed
assert len(installed) == 2, installed
"""
    run_python("-c", code + INSTALLED, env=ON)


def test_a_finder_that_asks_all_other_finders_does_not_recurse():
    code = """
import sys
class Finder:
    def find_spec(name, path=None, target=None):
        if name != "deepspeed.ops.op_builder":
            return None
        for finder in sys.meta_path:
            if finder is not Finder and (spec := finder.find_spec(name, path, target)):
                return spec
sys.meta_path.insert(1, Finder)
import deepspeed
"""
    run_python("-c", code + INSTALLED, env=ON)


def test_the_loader_of_a_foreign_finder_is_followed():
    """An editable install has one, which comes after the hook in sys.meta_path, as here."""
    code = """
import importlib.machinery, sys
class Finder:
    found = []
    def find_spec(name, path=None, target=None):
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        Finder.found.append(name)
        return spec
sys.meta_path.insert(1, Finder)
import deepspeed
assert "deepspeed.ops.op_builder" in Finder.found
"""
    run_python("-c", code + INSTALLED, env=ON)


CHILD = """
import json, multiprocessing, sys

def work(path):
    import torch
    import nvmeio.deepspeed
    from deepspeed.ops.op_builder import AsyncIOBuilder
    handle = AsyncIOBuilder().load().aio_handle()
    assert type(handle) is nvmeio.deepspeed.aio_handle
    source, target = torch.arange(50_001), torch.zeros(50_001, dtype=torch.int64)
    assert handle.sync_pwrite(source, path) == 1
    assert handle.sync_pread(target, path) == 1
    assert torch.equal(source, target)
    return handle.stats()["requests"]

if __name__ == "__main__":
    method, imported, folder = sys.argv[1:]
    if imported == "imported":
        import deepspeed
    context = multiprocessing.get_context(method)
    with context.Pool(2) as pool:
        print(json.dumps(pool.map(work, [f"{folder}/{name}" for name in "abc"])))
"""


@pytest.mark.parametrize(
    ("method", "imported"),
    [
        ("spawn", "imported"),
        ("forkserver", "not imported"),
        ("fork", "imported"),
        ("fork", "not imported"),
    ],
)
def test_children_of_multiprocessing_have_nvmeio(tmp_path, method, imported):
    script = tmp_path / "script.py"
    script.write_text(CHILD)
    printed = run_python(script, method, imported, tmp_path, env=ON)
    assert json.loads(printed.splitlines()[-1]) == [2, 2, 2]
    assert len({(tmp_path / name).read_bytes() for name in "abc"}) == 1


@pytest.fixture
def port():
    """A port for the ranks; DeepSpeed names its leftovers in shared memory after it."""
    number = free_port()
    yield number
    for path in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{number}_*"):
        path.unlink()


def test_both_ranks_under_deepspeeds_launcher_have_nvmeio(tmp_path, port):
    script = Path(__file__).with_name("launched.py")
    launcher = Path(sys.executable).with_name("deepspeed")
    options = ("--num_accelerators=2", f"--master_port={port}")
    run_well(sys.executable, launcher, *options, script, tmp_path, env=ON)
    reports = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert reports == [{"op": "nvmeio.deepspeed", "ranks": 2, "requests": 2}] * 2
