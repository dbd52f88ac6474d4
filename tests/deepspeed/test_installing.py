"""install() and uninstall() in the real DeepSpeed, and what its builders load."""

import contextlib
import gc
import importlib.metadata
import logging
import sys
from types import SimpleNamespace

import deepspeed.ops
import pytest
import torch
from deepspeed.io import FastFileWriter, FastFileWriterConfig
from deepspeed.ops import aio, op_builder
from deepspeed.ops.aio import AsyncIOBuilder
from deepspeed.ops.op_builder.all_ops import ALL_OPS
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.ops.op_builder.cpu import NotImplementedBuilder
from deepspeed.ops.op_builder.gds import GDSBuilder
from deepspeed.runtime.swap_tensor.async_swapper import AsyncTensorSwapper
from deepspeed.utils.pin_memory import NativePinnedMemory

import nvmeio.deepspeed
from helpers import pattern
from processes import run_python

NAMES = ("aio_read", "aio_write", "aio_handle", "deepspeed_memcpy")

# Every class whose methods are replaced; DeepSpeed has one builder for its CPU accelerator
# and a general one.
OWNERS = (
    op_builder.AsyncIOBuilder,
    op_builder.async_io.AsyncIOBuilder,
    op_builder.PinMemoryBuilder,
)


def state_of_deepspeed():
    """Return everything that install() may change; methods are compared by identity."""
    owners = {owner: dict(vars(owner)) for owner in OWNERS}
    probed = vars(deepspeed.ops).get("__compatible_ops__")
    handlers = list(logging.getLogger("nvmeio").handlers)
    return owners, dict(vars(aio)), probed and dict(probed), handlers


@pytest.fixture(autouse=True)
def unchanged_in_the_end():
    """Check that nothing that a test installs is left after it."""
    before = state_of_deepspeed()
    yield
    assert state_of_deepspeed() == before


@pytest.fixture
def unprobed(monkeypatch):
    """DeepSpeed as it is before it asks its builders which ops are compatible."""
    monkeypatch.delitem(vars(deepspeed.ops), "__compatible_ops__", raising=False)
    yield
    vars(deepspeed.ops).pop("__compatible_ops__", None)


def test_the_op_that_deepspeed_loads_is_nvmeio():
    assert not issubclass(AsyncIOBuilder, NotImplementedBuilder)
    with nvmeio.deepspeed.install():
        assert AsyncIOBuilder().load() is nvmeio.deepspeed
        assert AsyncIOBuilder().load(verbose=True) is nvmeio.deepspeed
        assert AsyncIOBuilder().is_compatible() is True
        assert AsyncIOBuilder().is_compatible(verbose=True) is True
        from deepspeed.ops.op_builder import AsyncIOBuilder as ImportedLater

        assert ImportedLater().load() is nvmeio.deepspeed
        assert ALL_OPS["async_io"].load() is nvmeio.deepspeed
        assert ALL_OPS["pin_memory"].load() is nvmeio.deepspeed


def test_installed_to_raise_the_op_is_the_module_nvmeio():
    with nvmeio.deepspeed.install(errors="raise"):
        assert AsyncIOBuilder().load() is nvmeio
        assert (
            op_builder.PinMemoryBuilder().load().pin_handle is nvmeio.deepspeed.pin_handle
        )
        assert aio.aio_handle is nvmeio.aio_handle


def test_handles_of_the_op_report_or_raise_as_passed_to_install(tmp_path):
    missing = str(tmp_path / "missing")
    with nvmeio.deepspeed.install():
        assert AsyncIOBuilder().load().aio_handle().sync_pread(bytearray(8), missing) == -1
    with nvmeio.deepspeed.install(errors="raise"), pytest.raises(FileNotFoundError):
        AsyncIOBuilder().load().aio_handle().sync_pread(bytearray(8), missing)


def test_every_accelerator_finds_the_op_compatible(monkeypatch):
    """DeepSpeed's own check compiles a program, which fails here."""
    monkeypatch.setattr(OpBuilder, "has_function", lambda *args, **kwargs: False)
    assert not AsyncIOBuilder().is_compatible()
    with nvmeio.deepspeed.install():
        assert AsyncIOBuilder().is_compatible() is True
        assert op_builder.async_io.AsyncIOBuilder().is_compatible() is True
    assert not AsyncIOBuilder().is_compatible()


def test_install_corrects_what_deepspeed_found_compatible_before(monkeypatch):
    probed = {"async_io": False, "pin_memory": False, "cpu_adam": False}
    monkeypatch.setitem(vars(deepspeed.ops), "__compatible_ops__", probed)
    with nvmeio.deepspeed.install():
        assert deepspeed.ops.__compatible_ops__ is probed
        assert probed == {"async_io": True, "pin_memory": True, "cpu_adam": False}
    assert probed == {"async_io": False, "pin_memory": False, "cpu_adam": False}


@pytest.mark.usefixtures("unprobed")
def test_uninstall_forgets_what_deepspeed_found_compatible_since(monkeypatch):
    monkeypatch.setattr(OpBuilder, "has_function", lambda *args, **kwargs: False)
    with nvmeio.deepspeed.install():
        assert deepspeed.ops.__compatible_ops__["async_io"] is True
        assert deepspeed.ops.__compatible_ops__["pin_memory"] is True
    assert deepspeed.ops.__compatible_ops__["async_io"] is False


def test_the_import_line_of_existing_programs_gives_four_names_that_work(tmp_path):
    with nvmeio.deepspeed.install():
        from deepspeed.ops.aio import aio_handle, aio_read, aio_write, deepspeed_memcpy

        path = str(tmp_path / "file")
        source = torch.randn(100_001)
        target, copy = torch.zeros_like(source), torch.zeros_like(source)
        assert aio_write(source, path, 65536, 8, False, True, True) == 0
        assert aio_read(target, path, 65536, 8, False, True, True) == 0
        assert deepspeed_memcpy(copy, target) == 0
        assert torch.equal(copy, source)
        handle = aio_handle(65536, 8, False, True, 2)
        assert handle.sync_pread(target.zero_(), path) == 1
        assert torch.equal(target, source)
        assert handle.stats()["requests"] == 1
    for name in NAMES:
        with pytest.raises(ImportError, match=name):
            exec(f"from deepspeed.ops.aio import {name}", {})


def test_a_second_install_changes_nothing_and_its_block_keeps_the_first():
    with nvmeio.deepspeed.install():
        first = state_of_deepspeed()
        with nvmeio.deepspeed.install():
            assert state_of_deepspeed() == first
        assert state_of_deepspeed() == first
    nvmeio.deepspeed.uninstall()


def test_install_without_a_block_lasts_until_uninstall():
    nvmeio.deepspeed.install()
    assert AsyncIOBuilder().load() is nvmeio.deepspeed
    handle = AsyncIOBuilder().load().aio_handle()
    nvmeio.deepspeed.uninstall()
    assert not hasattr(aio, "aio_handle")
    # A handle made in between goes on working.
    assert handle.wait() == 0


def test_another_value_of_errors_is_refused_until_uninstall():
    with nvmeio.deepspeed.install():
        installed = state_of_deepspeed()
        with pytest.raises(RuntimeError, match=r"errors='status', by .* uninstall\(\)"):
            nvmeio.deepspeed.install(errors="raise")
        assert state_of_deepspeed() == installed
    with pytest.raises(ValueError, match="errors"):
        nvmeio.deepspeed.install(errors="ignore")


def test_the_end_of_an_older_block_keeps_a_newer_installation():
    older = nvmeio.deepspeed.install()
    nvmeio.deepspeed.uninstall()
    with nvmeio.deepspeed.install():
        with older:
            pass
        assert AsyncIOBuilder().load() is nvmeio.deepspeed


def test_a_block_that_fails_uninstalls():
    with pytest.raises(ZeroDivisionError), nvmeio.deepspeed.install():
        raise ZeroDivisionError


@pytest.fixture
def native_loads(monkeypatch):
    """Record the names of native ops that DeepSpeed would build and load, in order."""
    loads = []

    def load(self, verbose=False):
        loads.append(self.NAME)
        return SimpleNamespace(name=self.NAME)

    monkeypatch.setattr(OpBuilder, "load", load)
    monkeypatch.delattr(sys, "_deepspeed_pin_memory_op_module", raising=False)
    yield loads
    with contextlib.suppress(AttributeError):
        del sys._deepspeed_pin_memory_op_module


def test_the_gds_builder_stays_deepspeeds_own(native_loads):
    assert issubclass(GDSBuilder, OWNERS[1])
    with nvmeio.deepspeed.install():
        assert GDSBuilder().load().name == "gds"
        # gds is linked to the native pinned memory.
        assert native_loads == ["pin_memory", "gds"]
        assert op_builder.PinMemoryBuilder().load() is nvmeio.deepspeed
        assert op_builder.async_io.AsyncIOBuilder().load() is nvmeio.deepspeed
    assert native_loads == ["pin_memory", "gds"]


def test_nvmeio_does_not_make_gds_compatible():
    with nvmeio.deepspeed.install():
        assert not GDSBuilder().is_compatible()


def test_a_failed_native_load_does_not_leave_the_builders_native(monkeypatch):
    def load(self, verbose=False):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(OpBuilder, "load", load)
    monkeypatch.delattr(sys, "_deepspeed_pin_memory_op_module", raising=False)
    with nvmeio.deepspeed.install():
        with pytest.raises(RuntimeError, match="no compiler"):
            GDSBuilder().load()
        assert AsyncIOBuilder().load() is nvmeio.deepspeed


@pytest.mark.usefixtures("installed")
def test_the_pin_handle_has_the_four_methods_of_deepspeeds():
    handle = op_builder.PinMemoryBuilder().load().pin_handle()
    example = torch.empty(0, dtype=torch.bfloat16)
    tensor = handle.new_cpu_locked_tensor(1000, example)
    assert (tensor.dtype, tensor.shape) == (torch.bfloat16, (1000,))
    assert handle.is_pinned(tensor[10:20])
    assert handle.free_cpu_locked_tensor(tensor) is True
    assert handle.free_cpu_locked_tensor(tensor) is False
    assert not handle.is_pinned(tensor)
    other = handle.new_cpu_locked_tensor(1, example)
    assert handle.free_cpu_locked_tensor_by_ptr(other.data_ptr()) is True
    assert handle.free_cpu_locked_tensor_by_ptr(other.data_ptr()) is False


@pytest.fixture
def used():
    """A function that returns how many bytes of the pool are used, more than before."""
    gc.collect()
    before = nvmeio.pool_stats()["bytes_used"]

    def used():
        gc.collect()
        return nvmeio.pool_stats()["bytes_used"] - before

    return used


@pytest.mark.usefixtures("installed")
def test_deepspeeds_own_pinned_memory_is_the_pools(used):
    pins = NativePinnedMemory()
    source = torch.randn(300, 1000)
    pinned = pins.pin(source)
    assert torch.equal(pinned, source)
    assert used() >= source.nbytes
    handle = AsyncIOBuilder().load().aio_handle()
    for view in (pinned, pinned[5:], pinned.view(-1)[17:20], pinned.T):
        assert pins.is_pinned(view)
        assert handle.is_pinned(view)
    assert pins.unpin(pinned) is True
    assert not pins.is_pinned(pinned)
    assert not handle.is_pinned(pinned)
    # DeepSpeed forbids using it now; with nvmeio the memory lives as long as the tensor.
    assert torch.equal(pinned, source)
    del pinned, view
    assert used() == 0


@pytest.mark.usefixtures("installed")
def test_memory_that_deepspeed_pinned_is_freed_with_its_last_view(used):
    pins = NativePinnedMemory()
    pinned = pins.pin_empty(torch.empty(0, dtype=torch.float16), (100, 10_000))
    view = pinned[50:, 3]
    del pinned
    assert used() >= 2_000_000
    assert AsyncIOBuilder().load().aio_handle().is_pinned(view)
    del view
    assert used() == 0
    assert not pins._ranges


@pytest.mark.usefixtures("installed", "distributed")
def test_writers_and_swappers_see_deepspeeds_memory_as_pinned(tmp_path, monkeypatch):
    monkeypatch.setattr(
        deepspeed.io.fast_file_writer, "UtilsBuilder", op_builder.utils.UtilsBuilder
    )
    handle = AsyncIOBuilder().load().aio_handle(65536, 4, False, True, 1)
    pins = NativePinnedMemory()
    pinned = pins.pin_empty(torch.empty(0, dtype=torch.uint8), (64 << 10,))
    writer = FastFileWriter(str(tmp_path / "file"), FastFileWriterConfig(handle, pinned))
    expected = pattern(300_000)
    writer.write(expected)
    writer.close()
    assert (tmp_path / "file").read_bytes() == expected

    swapper = AsyncTensorSwapper(handle, 256, timers=None)
    swapper.add_buffers([pins.pin_empty(torch.empty(0), (4096,)) for _ in range(2)])
    tensor = torch.randn(1024)
    swapper.swap_out_tensors([tensor], [str(tmp_path / "tensor")])
    swapper.release_buffers()
    assert (tmp_path / "tensor").read_bytes() == tensor.numpy().tobytes()


WITHOUT_COMPILER = """
import shutil, torch, nvmeio.deepspeed
assert not any(map(shutil.which, ("cc", "gcc", "c++", "g++", "ninja")))
nvmeio.deepspeed.install()
from deepspeed.ops.op_builder import AsyncIOBuilder, PinMemoryBuilder
assert AsyncIOBuilder().is_compatible() and PinMemoryBuilder().is_compatible()
pinned = PinMemoryBuilder().load().pin_handle().new_cpu_locked_tensor(5000, torch.empty(0))
handle = AsyncIOBuilder().load().aio_handle()
assert handle.is_pinned(pinned)
assert handle.sync_pwrite(pinned.fill_(3), "file") == 1
assert handle.sync_pread(pinned.fill_(4), "file") == 1
assert bool((pinned == 3).all())
"""


def test_the_ops_work_without_a_compiler(tmp_path):
    for name in ("bin", "ops", "work"):
        (tmp_path / name).mkdir()
    env = {"PATH": str(tmp_path / "bin"), "TORCH_EXTENSIONS_DIR": str(tmp_path / "ops")}
    run_python("-c", WITHOUT_COMPILER, env=env, folder=tmp_path / "work")
    assert (tmp_path / "work/file").stat().st_size == 4 * 5000
    assert not any((tmp_path / "ops").iterdir())


def assert_refused(words):
    """Assert that install() names the version and the fault, and changes nothing."""
    before = state_of_deepspeed()
    with pytest.raises(RuntimeError, match=words) as caught:
        nvmeio.deepspeed.install()
    assert importlib.metadata.version("deepspeed") in str(caught.value)
    assert "Nothing was changed" in str(caught.value)
    assert state_of_deepspeed() == before


@pytest.mark.parametrize("method", ["load", "is_compatible"])
@pytest.mark.parametrize("owner", OWNERS, ids=lambda owner: owner.__module__)
def test_a_builder_with_another_signature_is_refused(monkeypatch, owner, method):
    def changed(self, verbose=False, target=None):
        raise AssertionError("called")

    monkeypatch.setattr(owner, method, changed)
    assert_refused(rf"{owner.__module__}\.\w+\.{method} takes \(self, verbose, target\)")


def test_a_deepspeed_without_the_builder_is_refused(monkeypatch):
    monkeypatch.delattr(op_builder, "AsyncIOBuilder")
    assert_refused("this accelerator's AsyncIOBuilder is None")


def test_an_accelerator_without_the_op_is_refused(monkeypatch):
    monkeypatch.setattr(op_builder, "AsyncIOBuilder", NotImplementedBuilder)
    assert_refused("this accelerator's AsyncIOBuilder is .*NotImplementedBuilder")


def test_a_deepspeed_without_the_module_of_the_op_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed.ops.aio", None)
    assert_refused(r"deepspeed\.ops\.aio")


def test_a_deepspeed_without_pinned_memory_is_installed_without_it(monkeypatch):
    monkeypatch.delattr(op_builder, "PinMemoryBuilder")
    before = dict(vars(OWNERS[2]))
    with nvmeio.deepspeed.install():
        assert AsyncIOBuilder().load() is nvmeio.deepspeed
        assert dict(vars(OWNERS[2])) == before


@pytest.mark.usefixtures("unprobed")
def test_a_failed_install_leaves_nothing_behind(monkeypatch):
    """The last step fails, after all the others."""

    def add(handler):
        raise MemoryError

    before = state_of_deepspeed()
    with monkeypatch.context() as patch:
        patch.setattr(logging.getLogger("nvmeio"), "addHandler", add)
        with pytest.raises(MemoryError):
            nvmeio.deepspeed.install()
    assert state_of_deepspeed() == before
    with nvmeio.deepspeed.install():
        assert AsyncIOBuilder().load() is nvmeio.deepspeed


@pytest.fixture
def shown():
    """The messages that DeepSpeed's logger receives."""
    lines = []

    class Keeper(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    keeper = Keeper()
    logging.getLogger("DeepSpeed").addHandler(keeper)
    yield lines
    logging.getLogger("DeepSpeed").removeHandler(keeper)


def test_an_untested_version_is_installed_with_a_warning(monkeypatch, shown):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.23.4")
    with nvmeio.deepspeed.install():
        assert AsyncIOBuilder().load() is nvmeio.deepspeed
    assert shown == ["DeepSpeed 0.23.4 was not tested with nvmeio, 0.19 was"]


def test_the_tested_version_is_installed_without_a_warning(monkeypatch, shown):
    monkeypatch.delattr(sys, "_deepspeed_pin_memory_op_module", raising=False)
    with nvmeio.deepspeed.install():
        assert AsyncIOBuilder().load() is nvmeio.deepspeed
    assert not shown


def test_a_pin_memory_op_that_was_loaded_before_is_reported(monkeypatch, shown):
    monkeypatch.setattr(sys, "_deepspeed_pin_memory_op_module", object(), raising=False)
    with nvmeio.deepspeed.install():
        assert len(shown) == 1
    assert "its own pin_memory op before nvmeio was installed" in shown[0]


def test_errors_reach_deepspeeds_logger_while_nvmeio_is_installed(tmp_path, shown):
    missing = str(tmp_path / "missing")
    with nvmeio.deepspeed.install():
        handle = AsyncIOBuilder().load().aio_handle()
        assert handle.sync_pread(bytearray(8), missing) == -1
        assert len(shown) == 1
        assert missing in shown[0]
    assert handle.sync_pread(bytearray(8), missing) == -1
    assert len(shown) == 1
