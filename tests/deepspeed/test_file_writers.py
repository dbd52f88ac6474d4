"""DeepSpeed's file writers write checkpoints through nvmeio."""

from errno import EFBIG
from resource import RLIMIT_FSIZE
from types import SimpleNamespace

import deepspeed.io.fast_file_writer
import pytest
import torch
from deepspeed.io import FastFileWriter, FastFileWriterConfig
from deepspeed.ops.op_builder.utils import UtilsBuilder
from deepspeed.runtime.checkpoint_engine.fast_checkpoint_engine import FastCheckpointEngine
from deepspeed.runtime.model_checkpointing.config import get_checkpoint_config
from deepspeed.runtime.model_checkpointing.data_parallel_writer_factory import (
    DataParallelWriterConfig,
)
from deepspeed.runtime.swap_tensor.aio_config import get_aio_config
from deepspeed.utils import pin_memory

import nvmeio
from helpers import MIB, limit, pattern, routes

AIO = {"block_size": 64 << 10, "queue_depth": 4, "intra_op_parallelism": 2}
ALIGNMENT = 2 * 512

# Sizes of the writer's pinned buffer: the smallest allowed, some in between, and more than
# is written.
BUFFER_SIZES = (2 * ALIGNMENT, 64 << 10, 6 * ALIGNMENT, 4 * MIB)


@pytest.fixture(autouse=True)
def utils_op(monkeypatch):
    """DeepSpeed's op that casts to bytes, which its CPU accelerator lacks."""
    monkeypatch.setattr(deepspeed.io.fast_file_writer, "UtilsBuilder", UtilsBuilder)


def contents():
    """Return a state such as a checkpoint may hold."""
    return {
        "weight": torch.randn(301, 1001),
        "half": torch.randn(777).bfloat16(),
        "view": torch.arange(1000)[::3],
        "empty": torch.empty(0),
        "step": 17,
        "names": ["a", "b"],
    }


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if torch.is_tensor(value):
            assert found[name].dtype == value.dtype
            assert torch.equal(found[name], value)
        else:
            assert found[name] == value


def writer_of(handle, path, size, double):
    """Make a writer with a pinned buffer of `size` bytes."""
    pinned = handle.new_cpu_locked_tensor(size, torch.empty(0, dtype=torch.uint8))
    return FastFileWriter(str(path), FastFileWriterConfig(handle, pinned, double))


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("size", BUFFER_SIZES)
def test_torch_loads_what_torch_saved_into_a_writer(op, tmp_path, size, double, zipped):
    handle = op.aio_handle(**AIO)
    expected = contents()
    path = tmp_path / "checkpoint.pt"
    writer = writer_of(handle, path, size, double)
    torch.save(expected, writer, _use_new_zipfile_serialization=zipped)
    writer.close()
    assert_same(torch.load(path), expected)
    # DeepSpeed itself appends the bytes after the last full alignment.
    written = path.stat().st_size
    assert routes(handle).total() == written - written % ALIGNMENT


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 1025, 4095, 4096, 8193, 3 * MIB + 7])
def test_a_writer_writes_bytes_of_any_size(op, tmp_path, size, double):
    handle = op.aio_handle(**AIO)
    path = tmp_path / "bytes"
    expected = pattern(size)
    writer = writer_of(handle, path, 4096, double)
    for begin in range(0, size, 1000):
        writer.write(expected[begin : begin + 1000])
    writer.close()
    assert path.read_bytes() == expected
    assert routes(handle).total() == size - size % ALIGNMENT


def test_a_file_that_cannot_grow_fails_an_assertion_of_the_writer(op, tmp_path):
    handle = op.aio_handle(**AIO)
    writer = writer_of(handle, tmp_path / "limited", 64 << 10, double=False)
    with limit(RLIMIT_FSIZE, 128 << 10), pytest.raises(AssertionError):
        writer.write(pattern(256 << 10))
    assert handle.last_error.errno == EFBIG
    discard(writer)


@pytest.mark.usefixtures("raising")
def test_a_file_that_cannot_grow_raises_if_installed_to_raise(tmp_path):
    handle = deepspeed.ops.op_builder.AsyncIOBuilder().load().aio_handle(**AIO)
    writer = writer_of(handle, tmp_path / "limited", 64 << 10, double=False)
    with (
        limit(RLIMIT_FSIZE, 128 << 10),
        pytest.raises(OSError, match="too large") as caught,
    ):
        writer.write(pattern(256 << 10))
    assert caught.value.errno == EFBIG
    discard(writer)


def discard(writer):
    """Close a failed writer; otherwise its finalizer asserts that it has not failed."""
    writer._io_buffer.reset()
    writer.close()
    writer._file_offset = writer._stats["bytes"]


@pytest.fixture
def natively_pinned(installed, monkeypatch):
    """A new manager of pinned memory, DeepSpeed's own, on nvmeio's pool."""
    monkeypatch.setenv("DS_PIN_MEMORY_BACKEND", "native")
    monkeypatch.setattr(pin_memory, "_shared_native_pins", None)


@pytest.mark.usefixtures("natively_pinned")
@pytest.mark.parametrize("double", [True, False])
def test_the_fast_checkpoint_engine_saves_and_loads(tmp_path, double):
    writer = {"type": "fast", "io_buffer_size": MIB, "io_buffer_double": double}
    config = SimpleNamespace(
        checkpoint_config=get_checkpoint_config({"checkpoint": {"writer": writer}}),
        aio_config=get_aio_config({"aio": AIO}),
    )
    alone = DataParallelWriterConfig(1, 0, 0, 0, pure_dp=True)
    engine = FastCheckpointEngine(config, alone, optimize_dp_state=False)
    handle = engine._writer._dnvme_handle
    assert isinstance(handle, nvmeio.deepspeed.aio_handle)
    assert handle.is_pinned(engine._writer._io_buffer)
    written = 0
    for number in range(3):
        expected = contents()
        path = tmp_path / f"{number}.pt"
        engine.save(expected, str(path))
        assert_same(engine.load(str(path)), expected)
        written += path.stat().st_size // ALIGNMENT * ALIGNMENT
    assert routes(handle).total() == written
