"""The op of nvmeio.deepspeed: DeepSpeed's statuses; test_contract.py has the rest."""

import errno
import gc
import logging
import os
import pickle
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest

import nvmeio
from helpers import BLOCK, DEPTH, pattern
from nvmeio.deepspeed import (
    aio_handle,
    aio_read,
    aio_write,
    deepspeed_memcpy,
    last_error,
    pin_handle,
)

OPTIONS = (BLOCK, DEPTH, False, True, False)


def failures(caplog):
    """Return the errors that were logged, and clear them."""
    lines = [
        record.getMessage() for record in caplog.records if record.levelno == logging.ERROR
    ]
    caplog.clear()
    return lines


class TestHandle:
    @pytest.fixture
    def handle_class(self):
        return aio_handle

    def test_errors_of_the_system_return_minus_one(self, handle, path, caplog, capfd):
        calls = [
            lambda: handle.read(bytearray(5), path, False),
            lambda: handle.write(b"12345", path / "below", False),
            lambda: handle.pread(bytearray(5), path, False, False),
            lambda: handle.pwrite(b"12345", path / "below", False, True),
            lambda: handle.sync_pread(bytearray(5), path),
            lambda: handle.sync_pwrite(b"12345", path / "below"),
            lambda: handle.async_pread(bytearray(5), path),
            lambda: handle.async_pwrite(b"12345", path / "below"),
            lambda: handle.async_pwrite(b"12345", fd=987_654),
        ]
        for call in calls:
            assert call() == -1
            assert handle.last_error.errno in (errno.ENOENT, errno.EBADF)
            assert failures(caplog) == [str(handle.last_error)]
        assert handle.wait() == 0
        assert capfd.readouterr() == ("", "")

    def test_wait_returns_minus_one_for_a_read_past_the_end(
        self, handle, path, caplog, capfd
    ):
        path.write_bytes(bytes(10))
        good, bad = bytearray(10), bytearray(11)
        assert handle.async_pread(bad, path) == handle.async_pread(good, path) == 0
        assert handle.wait() == -1
        assert handle.last_error.errno == errno.ENODATA
        assert handle.last_error.filename == str(path)
        assert failures(caplog) == [str(handle.last_error)]
        assert handle.wait() == 0
        assert capfd.readouterr() == ("", "")

    def test_success_prints_nothing(self, handle, path, capfd):
        """DeepSpeed's op prints timings."""
        expected, target = pattern(3 * BLOCK + 1), bytearray(3 * BLOCK + 1)
        assert handle.write(expected, path, True) == 0
        assert handle.read(target, path, True) == 0
        assert target == expected
        assert handle.last_error is None
        assert capfd.readouterr() == ("", "")

    def test_mistakes_of_the_program_raise(self, handle, path):
        path.write_bytes(b"12345")
        with pytest.raises(TypeError, match="object"):
            handle.write(object(), path, False)
        with pytest.raises(ValueError, match="read-only"):
            handle.read(b"12345", path, False)
        with pytest.raises(TypeError, match="validate is 'no'"):
            handle.read(bytearray(5), path, "no")
        assert handle.last_error is None

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"queue_depth": 0}, "queue_depth is 0; it must be from 1 to"),
            ({"block_size": 0}, "block_size is 0"),
            ({"intra_op_parallelism": 0}, "intra_op_parallelism is 0"),
            ({"queue_depth": 1_000_000}, "queue_depth is 1000000"),
        ],
    )
    def test_invalid_options_raise(self, open_handle, options, words):
        """DeepSpeed's op aborts, dies of SIGFPE, or accepts these values."""
        with pytest.raises(ValueError, match=words):
            open_handle(**options)

    @pytest.mark.parametrize("name", ["block_size", "queue_depth"])
    def test_none_is_no_number(self, open_handle, name):
        """For ``nvmeio.aio_handle`` None means the value of the environment."""
        with pytest.raises(TypeError, match=f"{name} is None; it must be an integer"):
            open_handle(**{name: None})

    def test_errors_cannot_be_asked_to_raise(self, open_handle):
        """``nvmeio.aio_handle`` is the class that can raise."""
        with pytest.raises(TypeError, match="errors"):
            open_handle(errors="raise")

    def test_defaults_are_the_contracts_in_any_environment(self, open_handle, monkeypatch):
        monkeypatch.setenv("NVMEIO_BLOCK_SIZE", "4096")
        monkeypatch.setenv("NVMEIO_QUEUE_DEPTH", "3")
        handle = open_handle()
        assert (handle.get_block_size(), handle.get_queue_depth()) == (1 << 20, 128)

    def test_a_pickled_handle_returns_statuses_too(self, open_handle, engine, path):
        with pickle.loads(
            pickle.dumps(open_handle(block_size=4096, queue_depth=5))
        ) as handle:
            assert type(handle) is aio_handle
            assert (handle.get_block_size(), handle.get_queue_depth()) == (4096, 5)
            assert handle.stats()["engine"] == engine
            assert handle.read(bytearray(5), path, False) == -1


class TestFunctions:
    def test_a_file_is_written_and_read(self, path, capfd):
        source = np.arange(100_003, dtype=np.int16)
        target = np.zeros_like(source)
        assert aio_write(source, path, *OPTIONS) == 0
        assert path.read_bytes() == source.tobytes()
        assert aio_read(target, path, *OPTIONS) == 0
        assert (target == source).all()
        assert capfd.readouterr() == ("", "")

    @pytest.mark.parametrize("function", [aio_read, aio_write])
    def test_errors_of_the_system_return_minus_one(self, function, path, caplog, capfd):
        assert function(bytearray(5), path / "below", *OPTIONS) == -1
        assert last_error().errno in (errno.ENOENT, errno.ENOTDIR)
        assert last_error().filename == str(path / "below")
        assert failures(caplog) == [str(last_error())]
        assert capfd.readouterr() == ("", "")

    def test_a_file_of_another_size_is_minus_one(self, path, caplog):
        """A shorter aio_write leaves no tail, so the sizes match."""
        assert aio_write(bytes(1000), path, *OPTIONS) == 0
        target = bytearray(b"x" * 10)
        assert aio_read(target, path, *OPTIONS) == -1
        assert last_error().errno == errno.EINVAL
        assert target == b"x" * 10
        assert aio_write(bytes(10), path, *OPTIONS) == 0
        assert aio_read(target, path, *OPTIONS) == 0

    def test_mistakes_of_the_program_raise(self, path):
        with pytest.raises(TypeError, match="swapped"):
            aio_write(str(path), bytes(10), *OPTIONS)
        with pytest.raises(ValueError, match="queue_depth is 0"):
            aio_write(bytes(10), path, BLOCK, 0, False, True, False)
        assert not path.exists()

    @pytest.mark.parametrize("function", [aio_read, aio_write])
    def test_none_is_no_number(self, function, path):
        with pytest.raises(TypeError, match="queue_depth is None"):
            function(bytearray(5), path, BLOCK, None, False, True, False)

    def test_the_last_error_is_of_this_thread(self, path):
        assert aio_read(bytearray(5), path, *OPTIONS) == -1
        mine, others = last_error(), []
        thread = threading.Thread(target=lambda: others.append(last_error()))
        thread.start()
        thread.join()
        assert others == [None]
        assert last_error() is mine

    def test_the_last_error_keeps_no_buffer(self, path):
        target = np.zeros(1000, np.uint8)
        alive = weakref.ref(target)
        assert aio_read(target, path, *OPTIONS) == -1
        assert last_error() is not None
        del target
        gc.collect()
        assert alive() is None

    def test_the_copy_copies_every_element_and_returns_0(self, capfd):
        """DeepSpeed's op copies only the first axis, whole vectors, and floats."""
        source = np.random.default_rng(0).normal(size=(8, 1024))
        target = np.zeros_like(source)
        assert deepspeed_memcpy(target, source) == 0
        assert (target == source).all()
        assert capfd.readouterr() == ("", "")


class TestPinHandle:
    def test_arguments_of_the_pin_handle_have_the_contracts_names(self):
        handle, example = pin_handle(), np.zeros(1, np.float32)
        tensor = handle.new_cpu_locked_tensor(num_elem=10, example_tensor=example)
        assert (tensor.dtype, tensor.shape) == (np.dtype(np.float32), (10,))
        assert handle.is_pinned(buffer=tensor[3:])
        assert handle.free_cpu_locked_tensor(locked_tensor=tensor) is True
        assert handle.free_cpu_locked_tensor_by_ptr(address=tensor.ctypes.data) is False

    def test_handles_know_the_tensors_of_each_other(self, engine):
        example = np.zeros(1, np.float64)
        tensor = pin_handle().new_cpu_locked_tensor(10, example)
        with aio_handle(engine=engine) as handle:
            assert handle.is_pinned(tensor)
            assert handle.free_cpu_locked_tensor(tensor) is True
            assert not pin_handle().is_pinned(tensor)
            tensor = handle.new_cpu_locked_tensor(10, example)
        assert pin_handle().is_pinned(tensor)
        assert pin_handle().free_cpu_locked_tensor(tensor) is True

    def test_a_tensor_is_freed_by_its_address_once(self):
        handle = pin_handle()
        tensor = handle.new_cpu_locked_tensor(5000, np.zeros(1, np.int8))
        address = tensor.ctypes.data
        assert handle.free_cpu_locked_tensor_by_ptr(address + 1) is False
        assert handle.free_cpu_locked_tensor_by_ptr(address) is True
        assert handle.free_cpu_locked_tensor_by_ptr(address) is False
        assert not handle.is_pinned(tensor)
        tensor[:] = 1  # the memory stays valid until its last view has died

    def test_pinned_memory_is_the_pools(self):
        before = nvmeio.pool_stats()["bytes_used"]
        tensor = pin_handle().new_cpu_locked_tensor(3 << 20, np.zeros(1, np.int8))
        assert nvmeio.pool_stats()["bytes_used"] >= before + (3 << 20)
        del tensor
        gc.collect()
        assert nvmeio.pool_stats()["bytes_used"] == before

    @pytest.mark.parametrize(
        ("address", "error"), [("1", TypeError), (True, TypeError), (-1, ValueError)]
    )
    def test_an_invalid_address_is_refused(self, address, error):
        with pytest.raises(error, match="address is"):
            pin_handle().free_cpu_locked_tensor_by_ptr(address)

    def test_the_pin_handle_makes_tensors_of_torch(self):
        torch = pytest.importorskip("torch")
        handle = pin_handle()
        tensor = handle.new_cpu_locked_tensor(10, torch.zeros(3, dtype=torch.bfloat16))
        assert (tensor.dtype, tensor.numel()) == (torch.bfloat16, 10)
        assert handle.is_pinned(tensor.narrow(0, 3, 4))
        assert not handle.is_pinned(torch.zeros(10))
        assert handle.free_cpu_locked_tensor_by_ptr(tensor.data_ptr()) is True


def test_a_name_that_is_missing_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"'nvmeio\.deepspeed' has no attribute 'x'"):
        nvmeio.deepspeed.x  # noqa: B018


def test_importing_the_op_loads_neither_torch_nor_deepspeed():
    code = (
        "import sys, nvmeio.deepspeed; "
        "print(*{'torch', 'deepspeed', '_nvmeio_follow'} & sys.modules.keys())"
    )
    environment = {
        key: value for key, value in os.environ.items() if key != "NVMEIO_DEEPSPEED"
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert (done.stdout.strip(), done.stderr) == ("", "")


def test_the_op_is_an_attribute_of_the_package():
    code = "import nvmeio; print(nvmeio.deepspeed.aio_handle().write(b'1', '/no/where'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("-1\n", "")


def test_without_deepspeed_installing_says_what_is_missing(monkeypatch):
    class Hiding:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == "deepspeed":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Hiding, *sys.meta_path])
    with pytest.raises(ModuleNotFoundError, match="deepspeed") as caught:
        nvmeio.deepspeed.install()
    assert caught.value.name == "deepspeed"
    nvmeio.deepspeed.uninstall()
