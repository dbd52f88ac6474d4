"""DeepSpeed swaps tensors, parameters and optimizer states through nvmeio.

The tests read the swap files without nvmeio.  The handles of DeepSpeed's own objects count
the bytes that went through nvmeio.
"""

import gc
from errno import ENODATA, ENOENT, ENOSPC
from pathlib import Path

import pytest
import torch
from deepspeed.ops.op_builder import AsyncIOBuilder
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.swap_tensor.aio_config import get_aio_config
from deepspeed.runtime.swap_tensor.async_swapper import AsyncTensorSwapper
from deepspeed.runtime.swap_tensor.partitioned_optimizer_swapper import (
    PartitionedOptimizerSwapper,
)
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import (
    AsyncPartitionedParameterSwapper,
    PartitionedParamStatus,
)
from deepspeed.runtime.swap_tensor.pipelined_optimizer_swapper import (
    PipelinedOptimizerSwapper,
)
from deepspeed.runtime.swap_tensor.utils import SwapBufferManager, SwapBufferPool
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig

import nvmeio
from helpers import MIB, routes

pytestmark = pytest.mark.usefixtures("distributed")

# Small blocks, so that every tensor has many; with two workers DeepSpeed aligns to 2 KiB.
AIO = {"block_size": 64 << 10, "queue_depth": 4, "intra_op_parallelism": 2}
ALIGNED_BYTES = 2 * 1024
ALIGNED_NUMEL = ALIGNED_BYTES // 4

# DeepSpeed swaps only tensors of 1 MiB and more.  This is a little more, and odd.
NUMEL = MIB // 4 + 40_001


def aligned(numel):
    """Return the numel to which DeepSpeed pads one, for elements of four bytes."""
    return -(-numel // ALIGNED_NUMEL) * ALIGNED_NUMEL


def transferred(*handles):
    """Return how many bytes handles have transferred."""
    return sum(routes(handle).total() for handle in handles)


def floats_of(path, numel=-1):
    """Read numbers from the beginning of a file, without nvmeio."""
    return torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.float32)[:numel]


@pytest.fixture
def handle(op):
    """A handle with DeepSpeed's arguments."""
    handle = op.aio_handle(**AIO, single_submit=False, overlap_events=True)
    assert isinstance(handle, nvmeio.deepspeed.aio_handle)
    return handle


def locked(handle, numel, count):
    """Make swap buffers, filled with numbers that no test expects."""
    example = torch.empty(0, dtype=torch.float32)
    return [handle.new_cpu_locked_tensor(numel, example).fill_(-1) for _ in range(count)]


def test_tensors_that_are_swapped_out_asynchronously_are_in_their_files(handle, tmp_path):
    swapper = AsyncTensorSwapper(handle, ALIGNED_NUMEL, timers=None)
    buffers = locked(handle, 8 * ALIGNED_NUMEL, 2)
    swapper.add_buffers(buffers)
    # More than both buffers hold, so that they are flushed in between.
    sizes = (1, 511, 512, 513, 4096, 3000, 2049, 4095, 17, 1024)
    tensors = [torch.randn(size) for size in sizes]
    paths = [tmp_path / f"{size}.swp" for size in sizes]
    swapper.swap_out_tensors(tensors, map(str, paths))
    assert {id(buffer) for buffer in swapper.release_buffers()} == set(map(id, buffers))
    for tensor, path in zip(tensors, paths, strict=True):
        assert path.stat().st_size == 4 * aligned(len(tensor))
        assert torch.equal(floats_of(path, len(tensor)), tensor)
    assert transferred(handle) == sum(4 * aligned(size) for size in sizes)
    assert handle.stats()["requests"] == len(sizes)


def test_a_pool_of_buffers_is_swapped_out_and_in(handle, tmp_path):
    pool = SwapBufferPool(locked(handle, 4 * ALIGNED_NUMEL, 2), handle)
    tensors = [torch.randn(size) for size in (700, 1000, 1200)]
    views = []
    for number, tensor in enumerate(tensors):
        path = str(tmp_path / str(number))
        views.append(pool.insert_tensor(tensor, path, aligned(len(tensor)))[1])
    pool.swap_out(handle)
    for view in views:
        view.zero_()
    pool.swap_in(handle)
    for tensor, view in zip(tensors, views, strict=True):
        assert torch.equal(view, tensor)
    assert transferred(handle) == 2 * sum(4 * aligned(len(tensor)) for tensor in tensors)


def test_a_pool_takes_only_pinned_buffers(handle):
    pinned = locked(handle, ALIGNED_NUMEL, 2)
    with pytest.raises(AssertionError):
        SwapBufferPool([*pinned, torch.empty(ALIGNED_NUMEL)], handle)


def test_a_managers_buffers_are_zero_and_are_freed_with_it(handle):
    gc.collect()
    before = nvmeio.pool_stats()["bytes_used"]
    manager = SwapBufferManager(MIB, 3, torch.float32, handle)
    assert nvmeio.pool_stats()["bytes_used"] == before + 3 * 4 * MIB
    buffers = manager.allocate(num_elems=1000, count=2, dtype=torch.float32)
    assert all(handle.is_pinned(buffer) and not buffer.any() for buffer in buffers)
    assert len(manager.allocate_all(num_elems=MIB, dtype=torch.float32)) == 1
    manager.free(buffers)
    del manager, buffers
    gc.collect()
    assert nvmeio.pool_stats()["bytes_used"] == before


@pytest.fixture
def parameter_swapper(installed, tmp_path):
    """The swapper of ZeRO-3's parameters, for a folder."""
    offload = {"device": "nvme", "nvme_path": str(tmp_path), "buffer_count": 3}
    config = {
        "train_batch_size": 1,
        "zero_optimization": {
            "stage": 3,
            "offload_param": {**offload, "buffer_size": 2 * NUMEL},
        },
        "aio": AIO,
    }
    swapper = AsyncPartitionedParameterSwapper(DeepSpeedConfig(config), torch.float32)
    handles = (swapper.aio_read_handle, swapper.aio_write_handle)
    assert all(isinstance(handle, nvmeio.deepspeed.aio_handle) for handle in handles)
    return swapper


def parameter_in(swapper, number, values):
    """Make a parameter whose partition is in a buffer of the swapper, as ZeRO-3 does."""
    parameter = torch.nn.Parameter(torch.empty(0))
    parameter.ds_id = number
    parameter.ds_tensor = swapper.get_buffer(parameter, len(values)).copy_(values)
    parameter.ds_tensor.ds_numel = len(values)
    parameter.ds_tensor.status = PartitionedParamStatus.AVAILABLE
    return parameter


def test_parameters_are_swapped_out_released_and_swapped_in(parameter_swapper):
    swapper = parameter_swapper
    values = [torch.randn(numel) for numel in (NUMEL, NUMEL + 1, 2 * NUMEL)]
    parameters = [parameter_in(swapper, *numbered) for numbered in enumerate(values)]
    assert swapper.available_swap_in_buffers() == 0
    swapper.swap_out_and_release(parameters)
    swapper.synchronize_writes()
    assert swapper.available_swap_in_buffers() == 3
    for parameter, expected in zip(parameters, values, strict=True):
        assert parameter.ds_tensor.status == PartitionedParamStatus.NOT_AVAILABLE
        path = swapper.get_path(parameter, must_exist=True)
        assert torch.equal(floats_of(path, len(expected)), expected)
    swapper.buffers.zero_()

    swapper.swap_in(parameters[::-1], async_op=True)
    swapper.synchronize_reads()
    for parameter, expected in zip(parameters, values, strict=True):
        assert parameter.ds_tensor.status == PartitionedParamStatus.AVAILABLE
        assert torch.equal(parameter.ds_tensor, expected)
    total = sum(4 * aligned(len(expected)) for expected in values)
    assert transferred(swapper.aio_write_handle) == total
    assert transferred(swapper.aio_read_handle) == total


@pytest.mark.parametrize("pinned", [True, False])
def test_a_parameter_is_swapped_into_a_callers_buffer(parameter_swapper, pinned):
    swapper = parameter_swapper
    values = torch.randn(aligned(NUMEL))
    parameter = parameter_in(swapper, 7, values)
    swapper.swap_out_and_release([parameter])
    (target,) = locked(swapper.aio_read_handle, len(values), 1)
    target = target if pinned else torch.empty_like(target)
    swapper.swap_into_buffer(parameter, target)
    assert torch.equal(target, values)
    assert transferred(swapper.aio_read_handle) == 4 * len(values)


def test_parameters_that_were_updated_are_swapped_out(parameter_swapper):
    swapper = parameter_swapper
    parameter = parameter_in(swapper, 0, torch.zeros(NUMEL))
    swapper.swap_out_and_release([parameter])
    swapper.reserve_partitioned_swap_space([NUMEL])
    updated = torch.randn(NUMEL)
    swapper.swap_out_partitioned_params([parameter], [updated])
    swapper.swap_in([parameter], async_op=False)
    assert torch.equal(parameter.ds_tensor, updated)
    assert transferred(swapper.aio_write_handle) == 2 * 4 * aligned(NUMEL)


class SwappedAdam:
    """Adam on one flat parameter whose values and states are swapped, as in ZeRO-3."""

    def __init__(self, kind, folder, values):
        self.parameter = torch.nn.Parameter(torch.empty(0))
        self.parameter.ds_id = "0_0"
        self.optimizer = torch.optim.Adam([self.parameter], lr=0.1)
        pipelined = kind is PipelinedOptimizerSwapper
        config = DeepSpeedZeroOffloadOptimizerConfig(
            device="nvme",
            nvme_path=folder,
            buffer_count=5,
            pipeline_read=pipelined,
            pipeline_write=pipelined,
        )
        self.swapper = kind(
            swap_config=config,
            aio_config=get_aio_config({"aio": AIO}),
            base_folder=str(folder),
            optimizer=self.optimizer,
            largest_numel=len(values),
            device="cpu",
            dtype=torch.float32,
            timers=None,
        )
        self.swapper.initialize_parameters([self.parameter], [values])

    def swap_in(self):
        self.swapper.swap_in_optimizer_state(self.parameter, async_parameter=None)

    def swap_out(self):
        self.swapper.swap_out_optimizer_state(self.parameter, async_swap=False)

    def step(self, gradient):
        """Swap the gradient out, all else in, take a step, and swap out."""
        self.swapper.swap_out_gradients(self.parameter, [0], [gradient])
        self.swap_in()
        self.optimizer.step()
        self.swap_out()

    def handles(self):
        """Return the swapper's handles, each once."""
        found = {id(item): item for item in vars(self.swapper).values()}
        return [item for item in found.values() if isinstance(item, nvmeio.aio_handle)]

    def file(self, name=""):
        """Return the path of a file of states."""
        return Path(self.swapper.swap_folder) / f"{name}0_0.tensor.swp"


KINDS = [PartitionedOptimizerSwapper, PipelinedOptimizerSwapper]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("kind", KINDS)
def test_optimizer_states_that_are_swapped_are_those_of_adam_in_memory(kind, tmp_path):
    values = torch.randn(NUMEL)
    twin = torch.nn.Parameter(values.clone())
    adam = torch.optim.Adam([twin], lr=0.1)
    swapped = SwappedAdam(kind, tmp_path, values)
    for _ in range(3):
        twin.grad = torch.randn(NUMEL)
        swapped.step(twin.grad.clone())
        adam.step()
    assert torch.equal(floats_of(swapped.file(), NUMEL), twin.data)
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(
            floats_of(swapped.file(f"{name}-"), NUMEL), adam.state[twin][name]
        )

    swapped.swap_in()
    assert torch.equal(swapped.parameter.data, twin.data)
    swapped.swapper.release_swap_buffers(swapped.parameter)
    # One tensor at first, three from the first step on.  DeepSpeed swaps the part of a
    # gradient that fills whole alignments, and swaps it in with the states.
    tensors = 1 + (1 + 3) + 2 * (3 + 3) + 3
    gradients = (3 * 2 + 1) * (NUMEL // ALIGNED_NUMEL)
    expected = 4 * (tensors * aligned(NUMEL) + gradients * ALIGNED_NUMEL)
    assert transferred(*swapped.handles()) == expected
    assert len(swapped.handles()) == 1 + (kind is PipelinedOptimizerSwapper)


def damage(path, how):
    """Remove a file, or truncate it."""
    if how == "missing":
        path.unlink()
    else:
        with open(path, "r+b") as file:
            file.truncate(path.stat().st_size - 4096)


DAMAGES = {"missing": ENOENT, "shortened": ENODATA}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_parameter_that_cannot_be_read_fails_an_assertion(parameter_swapper, how):
    swapper = parameter_swapper
    parameter = parameter_in(swapper, 0, torch.ones(NUMEL))
    swapper.swap_out_and_release([parameter])
    damage(Path(swapper.get_path(parameter)), how)
    with pytest.raises(AssertionError):
        swapper.swap_in([parameter], async_op=False)
    assert swapper.aio_read_handle.last_error.errno == DAMAGES[how]


@pytest.mark.usefixtures("installed")
def test_deepspeed_ignores_unreadable_optimizer_states(tmp_path):
    swapped = SwappedAdam(PartitionedOptimizerSwapper, tmp_path, torch.ones(NUMEL))
    damage(swapped.file(), "shortened")
    for buffer in swapped.swapper.swap_buffer_manager.all_buffers:
        buffer.fill_(-7)
    (handle,) = swapped.handles()
    swapped.swap_in()
    assert handle.last_error.errno == ENODATA
    assert handle.last_error.filename == str(swapped.file())
    # Training would go on with these values.
    assert swapped.parameter[-1] == -7


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("how", DAMAGES)
def test_unreadable_pipelined_optimizer_states_fail_an_assertion(how, tmp_path):
    swapped = SwappedAdam(PipelinedOptimizerSwapper, tmp_path, torch.ones(NUMEL))
    damage(swapped.file(), how)
    with pytest.raises(AssertionError):
        swapped.swap_in()


@pytest.mark.usefixtures("raising")
@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_unreadable_states_raise_if_installed_to_raise(kind, how, tmp_path):
    swapped = SwappedAdam(kind, tmp_path, torch.ones(NUMEL))
    damage(swapped.file(), how)
    with pytest.raises(OSError, match=r"0_0\.tensor\.swp") as caught:
        swapped.swap_in()
    assert caught.value.errno == DAMAGES[how]
    assert caught.value.filename == str(swapped.file())


def swap_out_much(handle, folder):
    """Swap out 16 MiB."""
    swapper = AsyncTensorSwapper(handle, ALIGNED_NUMEL, timers=None)
    swapper.add_buffers(locked(handle, 2 * MIB, 2))
    tensors = [torch.randn(2 * MIB) for _ in range(2)]
    swapper.swap_out_tensors(tensors, [str(folder / name) for name in ("a", "b")])
    swapper.release_buffers()


def test_a_full_file_system_fails_an_assertion_by_default(loop_mount, handle):
    with pytest.raises(AssertionError):
        swap_out_much(handle, loop_mount("ext4", 8 * MIB))
    assert handle.last_error.errno == ENOSPC


@pytest.mark.usefixtures("raising")
def test_a_full_file_system_raises_if_installed_to_raise(loop_mount):
    handle = AsyncIOBuilder().load().aio_handle(**AIO)
    folder = loop_mount("ext4", 8 * MIB)
    with pytest.raises(OSError, match="No space left") as caught:
        swap_out_much(handle, folder)
    assert caught.value.errno == ENOSPC
    assert Path(caught.value.filename).parent == folder
