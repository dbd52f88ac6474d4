"""nvmeio.safetensors.install() under safetensors alone; tests/models has other packages.

Tests of Python's start and of the import of safetensors run in their own processes.
"""

import gc
import importlib
import os
import pickle
import subprocess
import sys
import threading
import types

import numpy as np
import pytest

pytest.importorskip("safetensors")

import safetensors
import safetensors.numpy

import nvmeio
import nvmeio.safetensors
from helpers import PAGE, cool, is_mapped, left_open, need_direct, warm
from nvmeio.safetensors import _install

ON = {"NVMEIO_SAFETENSORS": "1"}
ARRAYS = {"a": np.arange(5000.0).reshape(50, 100), "b": np.ones(3, np.int8)}

# All names that install() replaces, with safetensors' own objects.
THEIRS = {
    (module, name): getattr(importlib.import_module(module), name)
    for module in ("safetensors", "safetensors.numpy")
    for name in _install.MODULES[module][1]
}


@pytest.fixture
def installed():
    """nvmeio installed under safetensors for one test."""
    with nvmeio.safetensors.install():
        yield


@pytest.fixture(autouse=True)
def nothing_stays():
    """Check that safetensors is unchanged after each test."""
    yield
    nvmeio.safetensors.uninstall()
    assert_theirs()


def assert_theirs():
    """Check that every name is safetensors' own."""
    for (module, name), theirs in THEIRS.items():
        assert getattr(sys.modules[module], name) is theirs, f"{module}.{name}"


def load_first(paths):
    """Load a file in a worker, where nvmeio may not be installed."""
    with nvmeio.safetensors.install():
        return safetensors.numpy.load_file(paths[0])


def is_ours(function):
    """Return whether an object is one of nvmeio's replacements."""
    return any(function is mine for _, mine in _install._pairs.values())


def moved():
    """Return how many bytes nvmeio has moved for model files."""
    stats = nvmeio.default_handle().stats()
    return stats["bytes_direct"] + stats["bytes_buffered"]


def same(found, expected=ARRAYS):
    """Compare arrays by name, dtype, shape and contents."""
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()


def module_of(**names):
    """Make a module with these names, as a program that has imported them."""
    module = types.ModuleType("a_program")
    vars(module).update(names)
    return module


@pytest.fixture
def program(monkeypatch):
    """A module of a program that imported names before install()."""
    module = module_of(
        opening=safetensors.safe_open,
        save=safetensors.numpy.save_file,
        load=safetensors.numpy.load_file,
        other=len,
    )
    monkeypatch.setitem(sys.modules, "a_program", module)
    return module


def run(code, env=(), **options):
    """Run code with this Python, in which only the passed variables are set."""
    variables = {key: v for key, v in os.environ.items() if not key.startswith("NVMEIO_")}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**variables, **dict(env)},
        capture_output=True,
        text=True,
        check=False,
        **options,
    )


def run_well(code, env=(), **options):
    """Run code, which must succeed, and return its output."""
    done = run(code, env, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


class TestInstalled:
    def test_files_are_equal_and_nvmeio_moves_their_bytes(self, tmp_path):
        safetensors.numpy.save_file(ARRAYS, tmp_path / "theirs", {"format": "np"})
        nbytes = (tmp_path / "theirs").stat().st_size
        with nvmeio.safetensors.install():
            before = moved()
            safetensors.numpy.save_file(ARRAYS, tmp_path / "ours", {"format": "np"})
            assert moved() - before >= nbytes
            before = moved()
            same(safetensors.numpy.load_file(tmp_path / "ours"))
            assert moved() - before >= sum(array.nbytes for array in ARRAYS.values())
        assert (tmp_path / "theirs").read_bytes() == (tmp_path / "ours").read_bytes()
        before = moved()
        same(safetensors.numpy.load_file(tmp_path / "ours"))
        assert moved() == before

    def test_functions_that_stay_safetensors_own_use_nvmeio(self, tmp_path, installed):
        """A bound load_file() that install() cannot find still calls safe_open()."""
        path = tmp_path / "file"
        THEIRS["safetensors.numpy", "save_file"](ARRAYS, path)
        before = moved()
        same(THEIRS["safetensors.numpy", "load_file"](path))
        assert moved() > before

    def test_specs_that_safetensors_made_are_written(self, tmp_path, installed):
        array = ARRAYS["a"]
        spec = safetensors.TensorSpec(
            dtype="float64",
            shape=array.shape,
            data_ptr=array.ctypes.data,
            data_len=array.nbytes,
        )
        empty = safetensors.TensorSpec(dtype="int8", shape=[0], data_ptr=0, data_len=0)
        path = tmp_path / "file"
        safetensors.serialize_file({"a": spec, "e": empty}, path, metadata={"k": "v"})
        expected = safetensors.serialize({"a": spec, "e": empty}, metadata={"k": "v"})
        assert path.read_bytes() == expected

    def test_names_imported_before_are_replaced_and_restored(self, program):
        before = dict(vars(program))
        with nvmeio.safetensors.install():
            assert is_ours(program.opening)
            assert program.opening is safetensors.safe_open
            assert program.save is safetensors.numpy.save_file
            assert program.load is safetensors.numpy.load_file
            assert program.other is len
        assert vars(program) == before

    def test_names_imported_meanwhile_are_restored(self, monkeypatch):
        with nvmeio.safetensors.install():
            late = module_of(opening=safetensors.safe_open)
            monkeypatch.setitem(sys.modules, "late", late)
            own = module_of(opening=nvmeio.safetensors.safe_open)
            monkeypatch.setitem(sys.modules, "own", own)
        assert late.opening is safetensors.safe_open
        assert own.opening is nvmeio.safetensors.safe_open

    def test_names_that_others_replaced_meanwhile_stay(self, monkeypatch):
        def theirs():
            """Only compared, never called."""

        with nvmeio.safetensors.install():
            monkeypatch.setattr(safetensors.numpy, "load_file", theirs)
        assert safetensors.numpy.load_file is theirs
        monkeypatch.setattr(
            safetensors.numpy, "load_file", THEIRS["safetensors.numpy", "load_file"]
        )

    def test_modules_of_nvmeio_keep_their_names(self, installed):
        assert nvmeio.safetensors.safe_open is _install._open.safe_open
        assert not is_ours(nvmeio.safetensors.serialize_file)

    def test_install_can_be_repeated(self, tmp_path):
        for _ in range(3):
            nvmeio.safetensors.install()
            first = safetensors.safe_open
            nvmeio.safetensors.uninstall()
            assert_theirs()
            nvmeio.safetensors.uninstall()
            with nvmeio.safetensors.install():
                assert safetensors.safe_open is first

    def test_a_nested_install_ends_with_the_first(self):
        with nvmeio.safetensors.install():
            with nvmeio.safetensors.install():
                assert is_ours(safetensors.safe_open)
            assert is_ours(safetensors.safe_open)
            nvmeio.safetensors.install()
            assert is_ours(safetensors.safe_open)
        assert_theirs()

    def test_an_exception_ends_the_block_too(self):
        with pytest.raises(ZeroDivisionError), nvmeio.safetensors.install():
            raise ZeroDivisionError
        assert_theirs()

    def test_a_reloaded_module_gets_nvmeio_by_another_install(self):
        with nvmeio.safetensors.install():
            importlib.reload(safetensors.numpy)
            assert not is_ours(safetensors.numpy.load_file)
            assert is_ours(safetensors.numpy.safe_open)
            fresh = safetensors.numpy.load_file
            nvmeio.safetensors.install()
            assert is_ours(safetensors.numpy.load_file)
        assert safetensors.numpy.load_file is fresh
        for (module, name), theirs in THEIRS.items():
            setattr(sys.modules[module], name, theirs)

    def test_threads_may_install_save_and_load_at_once(self, tmp_path, program):
        """Each call is entirely nvmeio's or safetensors' own, and right in both cases."""
        stop, failed = threading.Event(), []

        def save_and_load(number):
            path = tmp_path / str(number)
            try:
                while not stop.is_set():
                    program.save(ARRAYS, path)
                    same(program.load(path))
                    with program.opening(path, "np") as file:
                        assert file.get_slice("a")[3:5].tobytes() == (
                            ARRAYS["a"][3:5].tobytes()
                        )
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=save_and_load, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(40):
            with nvmeio.safetensors.install(), nvmeio.safetensors.install():
                pass
        stop.set()
        for thread in threads:
            thread.join()
        assert not failed


class TestOpened:
    @pytest.fixture
    def path(self, tmp_path):
        safetensors.numpy.save_file(ARRAYS, tmp_path / "file")
        return tmp_path / "file"

    def test_files_of_both_kinds_are_instances_of_safe_open(self, path):
        theirs = safetensors.safe_open(path, "np")
        with nvmeio.safetensors.install():
            ours = safetensors.safe_open(path, framework="np")
            assert isinstance(ours, safetensors.safe_open)
            assert isinstance(ours, nvmeio.safetensors.safe_open)
            assert isinstance(theirs, safetensors.safe_open)
            assert not isinstance("a", safetensors.safe_open)
            assert type(ours).__name__ == "safe_open"

    def test_an_open_file_works_after_uninstall(self, path):
        with nvmeio.safetensors.install():
            opened = safetensors.safe_open(path, "np")
            part = opened.get_slice("a")
        assert part[1].tobytes() == ARRAYS["a"][1].tobytes()
        same({"b": opened.get_tensor("b")}, {"b": ARRAYS["b"]})

    def test_files_may_be_used_without_with(self, path, installed):
        """transformers does so and calls __exit__; others leave that to the collector."""
        opened = safetensors.safe_open(path, "np")
        keys = opened.keys()
        opened.__exit__(None, None, None)
        opened.__exit__(None, None, None)
        with pytest.raises(safetensors.SafetensorError, match="File is closed"):
            opened.get_tensor("a")
        assert safetensors.safe_open(path, "np").keys() == keys
        gc.collect()
        assert left_open(path.parent) == []

    @pytest.mark.parametrize("framework", ["flax", "jax", "tf", "mlx", "paddle"])
    def test_other_frameworks_are_safetensors_own(self, path, framework):
        def opened(*arguments, **options):
            try:
                return safetensors.safe_open(*arguments, **options)
            except ImportError as error:
                return str(error)

        before = opened(path, framework)
        with nvmeio.safetensors.install():
            for arguments, options in [
                ((path, framework), {}),
                ((path,), {"framework": framework, "device": "cpu"}),
                ((), {"filename": path, "framework": framework}),
            ]:
                found = opened(*arguments, **options)
                assert type(found) is type(before)
                if isinstance(before, str):
                    assert found == before
                else:
                    assert isinstance(found, safetensors.safe_open)

    def test_an_open_file_of_python_can_be_passed(self, path, installed):
        with path.open("rb") as file:
            opened = safetensors._safe_open_handle(file, "np")
            assert opened.keys() == ["a", "b"]
            assert isinstance(opened, nvmeio.safetensors.safe_open)

    @pytest.mark.parametrize("framework", ["nonsense", None, 1])
    def test_an_unknown_framework_is_refused_as_before(self, path, framework):
        found = []
        for install in (False, True):
            if install:
                nvmeio.safetensors.install()
            with pytest.raises((TypeError, safetensors.SafetensorError)) as caught:
                safetensors.safe_open(path, framework)
            found.append((isinstance(caught.value, TypeError), str(caught.value)))
        assert found[0] == found[1]


class TestErrors:
    @pytest.fixture
    def bad(self, tmp_path):
        (tmp_path / "bad").write_bytes(bytes(100))
        return tmp_path / "bad"

    def test_either_packages_class_catches_errors(self, bad):
        """Also a class imported before into a tuple, where install() cannot replace it."""
        classes = (KeyError, safetensors.SafetensorError)
        with nvmeio.safetensors.install():
            for caught in (
                classes,
                safetensors.SafetensorError,
                nvmeio.safetensors.SafetensorError,
            ):
                with pytest.raises(caught):
                    safetensors.safe_open(bad, "np")
                with pytest.raises(caught):
                    nvmeio.safetensors.numpy.load_file(bad)

    def test_safetensors_own_errors_are_caught_too(self, installed):
        with pytest.raises(safetensors.SafetensorError):
            safetensors.deserialize(bytes(100))

    def test_without_install_errors_are_only_nvmeios(self, bad):
        with nvmeio.safetensors.install():
            pass
        with pytest.raises(nvmeio.safetensors.SafetensorError) as caught:
            nvmeio.safetensors.safe_open(bad, "np")
        assert not isinstance(caught.value, safetensors.SafetensorError)

    @pytest.mark.parametrize("context", ["fork", "spawn"])
    def test_workers_pass_errors_on(self, bad, installed, context):
        """torch pickles the class of an error, and its text."""
        torch = pytest.importorskip("torch")
        batches = torch.utils.data.DataLoader(
            [bad], 1, num_workers=1, collate_fn=load_first, multiprocessing_context=context
        )
        with pytest.raises(safetensors.SafetensorError, match="deserializing header"):
            next(iter(batches))

    def test_the_class_of_errors_can_be_pickled(self, bad):
        with (
            nvmeio.safetensors.install(),
            pytest.raises(safetensors.SafetensorError) as one,
        ):
            safetensors.numpy.load_file(bad)
        kind = type(one.value)
        pickled = pickle.dumps(kind)
        with nvmeio.safetensors.install():
            assert pickle.loads(pickled) is kind
        command = [sys.executable, "-c", f"import pickle; print(pickle.loads({pickled!r}))"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout == "<class 'nvmeio.safetensors.SafetensorError'>\n"

    def test_errors_can_be_pickled(self, bad):
        with nvmeio.safetensors.install():
            with pytest.raises(safetensors.SafetensorError) as caught:
                safetensors.safe_open(bad, "np")
            packed = pickle.dumps(caught.value)
            again = pickle.loads(packed)
            assert isinstance(again, safetensors.SafetensorError)
        alone = pickle.loads(packed)
        assert type(alone) is nvmeio.safetensors.SafetensorError
        assert alone.args == again.args == caught.value.args


class TestLinks:
    """The targets of links in a Hub's cache must not change."""

    @pytest.fixture
    def blob(self, tmp_path):
        (tmp_path / "blobs").mkdir()
        (tmp_path / "snapshot").mkdir()
        path = tmp_path / "blobs" / "1234"
        path.write_bytes(b"of the Hub")
        path.chmod(0o444)
        (tmp_path / "snapshot" / "model").symlink_to("../blobs/1234")
        return path

    def test_after_install_links_are_replaced(self, tmp_path, blob, installed):
        link = tmp_path / "snapshot" / "model"
        safetensors.numpy.save_file(ARRAYS, link)
        assert not link.is_symlink()
        assert blob.read_bytes() == b"of the Hub"
        same(safetensors.numpy.load_file(link))
        # A separate file, with the mode of any new one.
        (tmp_path / "new").touch()
        assert link.stat().st_mode == (tmp_path / "new").stat().st_mode
        assert os.listdir(link.parent) == ["model"]

    def test_nvmeios_own_functions_follow_links_after_install_too(
        self, tmp_path, blob, installed
    ):
        blob.chmod(0o644)
        link = tmp_path / "snapshot" / "model"
        nvmeio.safetensors.numpy.save_file(ARRAYS, link)
        assert link.is_symlink()
        same(nvmeio.safetensors.numpy.load_file(blob))

    def test_dangling_links_in_linked_folders_are_replaced(self, tmp_path, installed):
        (tmp_path / "folder").mkdir()
        (tmp_path / "way").symlink_to("folder")
        (tmp_path / "folder" / "link").symlink_to("/nowhere/at/all")
        safetensors.numpy.save_file(ARRAYS, tmp_path / "way" / "link")
        same(safetensors.numpy.load_file(tmp_path / "folder" / "link"))
        assert (tmp_path / "way").is_symlink()


class TestTorch:
    @pytest.fixture
    def torch(self):
        return pytest.importorskip("torch")

    @pytest.fixture
    def tensors(self, torch):
        return {"w": torch.arange(3000.0).to(torch.bfloat16), "n": torch.arange(7)}

    def test_models_with_tied_weights(self, torch, tmp_path):
        import safetensors.torch as module

        def make():
            model = torch.nn.Sequential(
                torch.nn.Linear(30, 30, False), torch.nn.Linear(30, 30, False)
            )
            model[1].weight = model[0].weight
            return model

        model, other = make(), make()
        module.save_model(model, tmp_path / "theirs")
        with nvmeio.safetensors.install():
            before = moved()
            module.save_model(model, tmp_path / "ours")
            assert moved() - before > 3600
            assert module.load_model(other, tmp_path / "ours") == (set(), [])
        assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
        assert torch.equal(other[1].weight, model[0].weight)

    @pytest.mark.parametrize("framework", ["pt", "torch", "pytorch"])
    def test_every_name_of_torch_is_nvmeios(self, tensors, framework, tmp_path, installed):
        import safetensors.torch as module

        module.save_file(tensors, tmp_path / "file")
        with safetensors.safe_open(tmp_path / "file", framework, "cpu") as file:
            assert isinstance(file, nvmeio.safetensors.safe_open)
            assert file.get_slice("n")[...].tolist() == [*range(7)]

    @pytest.mark.parametrize("state", ["warm", "all but a page", "cold"])
    @pytest.mark.parametrize("backend", ["mmap", "pread"])
    def test_cached_files_are_mapped_where_safetensors_maps(
        self, tensors, tmp_path, installed, state, backend
    ):
        need_direct(tmp_path)
        path = tmp_path / "file.safetensors"
        safetensors.torch.save_file(tensors, path)
        kept = {"warm": None, "all but a page": path.stat().st_size - PAGE, "cold": 0}[
            state
        ]
        options = {"backend": backend}

        def opened(open_file):
            with open_file as file:
                return {name: file.get_tensor(name) for name in tensors}

        def by_handle():
            with path.open("rb") as file:
                return opened(safetensors._safe_open_handle(file, "pt", **options))

        for read in (
            lambda: safetensors.torch.load_file(path, **options),
            lambda: opened(safetensors.safe_open(path, "pt", **options)),
            lambda: opened(safetensors.safe_open(path, framework="torch", **options)),
            by_handle,
        ):
            warm(path, kept)
            before = moved()
            found = read()
            maps = state == "warm" and backend == "mmap"
            assert (moved() == before) == maps
            for name, tensor in tensors.items():
                assert is_mapped(found[name], path) == maps
                assert found[name].equal(tensor)
            # The kernel drops no mapped pages.
            del found

    def test_a_model_is_loaded_from_a_map_of_a_cached_file(
        self, torch, tmp_path, installed
    ):
        need_direct(tmp_path)
        model, other = torch.nn.Linear(40, 20), torch.nn.Linear(40, 20)
        safetensors.torch.save_model(model, tmp_path / "file")
        for kept in (None, 0):
            warm(tmp_path / "file", kept)
            before = moved()
            safetensors.torch.load_model(other, tmp_path / "file")
            assert (moved() == before) == (kept is None)
            assert torch.equal(model.weight, other.weight)

    def test_arrays_are_copies_of_cached_files_too(self, tmp_path, installed):
        """As safetensors' own: a change of the file does not reach them."""
        path = tmp_path / "file"
        safetensors.numpy.save_file(ARRAYS, path)
        warm(path)
        found = safetensors.numpy.load_file(path)
        with safetensors.safe_open(path, "np") as file:
            others = {name: file.get_tensor(name) for name in ARRAYS}
        path.write_bytes(bytes(path.stat().st_size))
        same(found)
        same(others)

    def test_torch_load_reads_with_nvmeio(self, torch, tensors, tmp_path, installed):
        """torch 2.13 passes model files to safetensors."""
        path = tmp_path / "file.safetensors"
        nvmeio.safetensors.torch.save_file(tensors, path)
        need_direct(tmp_path)
        cool(path)
        before = moved()
        try:
            found = torch.load(path)
        except pickle.UnpicklingError:
            pytest.skip("this torch loads no safetensors")
        assert moved() > before
        assert torch.equal(found["w"], tensors["w"])


# torch takes seconds to import, and most processes do not need it.
NO_TORCH = "import sys; sys.modules['torch'] = None\n"
PROBE = """
import sys
def ours(function):
    from nvmeio.safetensors import _install
    return any(function is mine for _, mine in _install._pairs.values())
"""


class TestRefused:
    """install() replaces all names or none."""

    def test_a_missing_name_is_refused(self, monkeypatch):
        before = dict(vars(safetensors))
        monkeypatch.delattr(safetensors.numpy, "save_file")
        with pytest.raises(RuntimeError, match=r"no safetensors\.numpy\.save_file"):
            nvmeio.safetensors.install()
        assert vars(safetensors) == before

    @pytest.mark.parametrize("version", ["0.9.0rc1", "1.0", "0.7.2", "0.80.1"])
    def test_another_version_is_refused(self, monkeypatch, version):
        monkeypatch.setattr(safetensors, "__version__", version)
        words = f"safetensors {version}: it must be 0.8. Nothing was changed"
        with pytest.raises(RuntimeError, match=words):
            nvmeio.safetensors.install()

    def test_a_missing_safetensors_is_an_error(self):
        code = """
import sys
sys.modules["safetensors"] = None
import nvmeio.safetensors
try:
    nvmeio.safetensors.install()
except ModuleNotFoundError as error:
    print(error.name)
nvmeio.safetensors.uninstall()
"""
        assert run_well(code).strip() == "safetensors"

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("__version__ = '0.9.0'", "safetensors 0.9.0: it must be 0.8"),
            ("", "safetensors of unknown version: it must be 0.8"),
            ("__version__ = '0.8.9'", "no safetensors.safe_open"),
        ],
    )
    def test_another_package_of_that_name_is_refused(self, tmp_path, text, words):
        (tmp_path / "safetensors").mkdir()
        (tmp_path / "safetensors" / "__init__.py").write_text(text)
        (tmp_path / "safetensors" / "numpy.py").write_text("")
        (tmp_path / "safetensors" / "torch.py").write_text("")
        code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
try:
    import safetensors
    import nvmeio.safetensors
    nvmeio.safetensors.install()
except RuntimeError as error:
    print(error)
"""
        assert words in run_well(code, ON)

    def test_a_submodule_without_a_name_undoes_the_whole_install(self, tmp_path):
        """Then no name is replaced, and the import fails."""
        code = (
            PROBE
            + """
import importlib.machinery, safetensors
assert ours(safetensors.safe_open)
real = safetensors.__spec__.loader
class Loader:
    def create_module(self, spec): return None
    def exec_module(self, module): module.load_file = len
class Finder:
    def find_spec(name, path=None, target=None):
        if name == "safetensors.numpy":
            return importlib.machinery.ModuleSpec(name, Loader())
sys.meta_path.insert(1, Finder)
try:
    import safetensors.numpy
except RuntimeError as error:
    assert "there is no safetensors.numpy.save_file" in str(error), error
else:
    raise AssertionError
assert not ours(safetensors.safe_open)
"""
        )
        run_well(code, ON)


class TestEnvironment:
    def test_cached_files_are_mapped(self, tmp_path):
        pytest.importorskip("torch")
        safetensors.numpy.save_file(ARRAYS, tmp_path / "a_model")
        code = """
import safetensors.torch
tensors = safetensors.torch.load_file("a_model")
with open("/proc/self/maps") as file:
    assert "a_model" in file.read()
"""
        run_well(code, ON, cwd=tmp_path)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("NVMEIO_SAFETENSORS", ""),
            ("NVMEIO_SAFETENSORS", "0"),
            # Its hook does not affect safetensors.
            ("NVMEIO_DEEPSPEED", "1"),
        ],
    )
    def test_nothing_of_nvmeio_is_imported_if_the_variable_is_off(self, name, value):
        code = """
import sys, safetensors.numpy
print(*sorted(name for name in sys.modules if name.partition(".")[0] == "nvmeio"))
print(*sorted(name for name in sys.modules if name.startswith("_nvmeio")))
"""
        hook = "_nvmeio_follow" if value else ""
        assert run_well(code, {name: value}).split("\n")[:2] == ["", hook]

    def test_only_the_hook_is_imported_when_python_starts(self):
        code = "import sys; print(*(name for name in sys.modules if 'nvmeio' in name))"
        assert run_well(code, ON).strip() == "_nvmeio_follow"

    @pytest.mark.parametrize(
        "first",
        [
            "import safetensors.numpy",
            "from safetensors import safe_open",
            "from safetensors.numpy import load_file",
            "import nvmeio.safetensors",
            "import nvmeio.safetensors; nvmeio.safetensors.install()",
        ],
    )
    def test_nvmeio_is_installed_in_any_order_of_imports(self, first):
        code = (
            NO_TORCH
            + first
            + PROBE
            + """
import safetensors.numpy
for name in ("safe_open", "_safe_open_handle", "serialize_file"):
    assert ours(getattr(safetensors, name)), name
for name in ("load_file", "save_file", "safe_open", "serialize_file"):
    assert ours(getattr(safetensors.numpy, name)), name
import nvmeio.safetensors
with nvmeio.safetensors.install():
    pass
assert ours(safetensors.safe_open)
nvmeio.safetensors.uninstall()
assert not ours(safetensors.numpy.safe_open) and not ours(safetensors.numpy.load_file)
"""
        )
        run_well(code, {"NVMEIO_SAFETENSORS": " TRUE "})

    def test_torchs_names_are_nvmeios_once_they_are_imported(self):
        pytest.importorskip("torch")
        code = (
            PROBE
            + """
import safetensors
assert "torch" not in sys.modules and ours(safetensors.safe_open)
import safetensors.torch
for name in ("load_file", "save_file", "load_model", "save_model", "safe_open"):
    assert ours(getattr(safetensors.torch, name)), name
"""
        )
        run_well(code, ON)

    def test_after_uninstall_later_imports_stay_safetensors_own(self):
        code = (
            NO_TORCH
            + PROBE
            + """
import safetensors, nvmeio.safetensors
nvmeio.safetensors.uninstall()
import safetensors.numpy
assert not ours(safetensors.numpy.load_file) and not ours(safetensors.safe_open)
nvmeio.safetensors.install()
assert ours(safetensors.numpy.load_file) and ours(safetensors.safe_open)
"""
        )
        run_well(code, ON)

    def test_an_unknown_value_is_refused_when_safetensors_is_imported(self):
        env = {"NVMEIO_SAFETENSORS": "maybe"}
        run_well("import json", env)
        done = run("import safetensors", env)
        assert done.returncode == 1
        words = "ValueError: NVMEIO_SAFETENSORS is 'maybe'; it must be 1 or 0"
        assert words in done.stderr

    def test_a_program_may_clear_the_variable_before_it_imports_safetensors(self):
        code = """
import os, sys
del os.environ["NVMEIO_SAFETENSORS"]
import safetensors.numpy
assert "nvmeio" not in sys.modules
"""
        run_well(code, ON)

    def test_a_broken_nvmeio_is_reported(self):
        code = """
import sys
sys.modules["nvmeio._native.copy"] = None
import safetensors
"""
        done = run(code, ON)
        words = "RuntimeError: NVMEIO_SAFETENSORS is set, and nvmeio cannot be imported"
        assert words in done.stderr

    def test_with_the_variable_nvmeio_moves_the_bytes(self, tmp_path):
        """Only the variable is set."""
        code = """
import numpy, safetensors.numpy, sys
safetensors.numpy.save_file({"a": numpy.arange(9000)}, "file")
assert safetensors.numpy.load_file("file")["a"][-1] == 8999
import nvmeio
print(sum(v for k, v in nvmeio.default_handle().stats().items() if k.startswith("bytes_d")))
"""
        assert int(run_well(code, ON, cwd=tmp_path)) >= 65536

    def test_the_hook_waits_for_a_thread_that_imports_nvmeio(self):
        """That thread holds the package's import lock; the hook must not deadlock."""
        code = (
            NO_TORCH
            + PROBE
            + """
import importlib.machinery, threading, time
inside = threading.Event()
class Slow:
    def find_spec(name, path=None, target=None):
        if name != "nvmeio._tensors.errors":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module
        def exec_module(module):
            inside.set()
            time.sleep(1)
            execute(module)
        spec.loader.exec_module = exec_module
        return spec
sys.meta_path.insert(0, Slow)
def load():
    import nvmeio.safetensors
thread = threading.Thread(target=load)
thread.start()
inside.wait()
import safetensors
assert ours(safetensors.safe_open)
thread.join()
"""
        )
        assert run(code, ON).stderr == ""

    def test_threads_may_import_at_once(self):
        pytest.importorskip("torch")
        code = (
            PROBE
            + """
import importlib, threading
names = ["safetensors.torch", "nvmeio.safetensors", "safetensors", "safetensors.numpy"]
names += ["nvmeio.safetensors.torch", "nvmeio"]
failed, barrier = [], threading.Barrier(len(names) + 1)
def load(name):
    barrier.wait()
    try:
        importlib.import_module(name)
    except BaseException as error:
        failed.append((name, error))
def install():
    barrier.wait()
    try:
        import nvmeio.safetensors
        nvmeio.safetensors.install()
    except BaseException as error:
        failed.append(("install", error))
threads = [threading.Thread(target=load, args=(name,)) for name in names]
threads.append(threading.Thread(target=install))
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not failed, failed
import safetensors.numpy, safetensors.torch
for module in (safetensors.numpy, safetensors.torch):
    assert ours(module.load_file) and ours(module.save_file) and ours(module.safe_open)
"""
        )
        run_well(code, ON, timeout=60)
