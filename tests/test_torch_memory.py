"""Tensors in memory of the pool, which is freed with their last view."""

import gc

import numpy as np
import pytest

import nvmeio
from helpers import MIB, PAGE

torch = pytest.importorskip("torch", reason="torch is not installed")

# Imported after the check, because the module needs torch.
import nvmeio.torch  # noqa: E402

pytestmark = pytest.mark.usefixtures("quiet_pool")

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex128]


def used():
    """Return the bytes of the pool in use."""
    gc.collect()
    return nvmeio.pool_stats()["bytes_used"]


@pytest.mark.parametrize("size", [(), (0,), (5,), (3, 4), (2, 0, 3), (3, MIB)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_has_its_size_and_dtype_and_is_aligned(size, dtype):
    for tensor in (
        nvmeio.torch.empty(*size, dtype=dtype),
        nvmeio.torch.empty(size, dtype=dtype),
        nvmeio.torch.empty(torch.Size(size), dtype=dtype),
        nvmeio.torch.empty_like(torch.empty(size, dtype=dtype)),
    ):
        assert (tuple(tensor.shape), tensor.dtype) == (size, dtype)
        assert tensor.is_contiguous()
        assert tensor.device.type == "cpu"
        assert tensor.untyped_storage().data_ptr() % PAGE == 0
        assert not tensor.requires_grad
        tensor.zero_()


def test_the_defaults_equal_torchs():
    assert nvmeio.torch.empty(3).dtype == torch.get_default_dtype()
    like = torch.empty(4, 5, dtype=torch.int16).t()
    tensor = nvmeio.torch.empty_like(like)
    assert (tensor.shape, tensor.dtype) == (like.shape, torch.int16)
    assert nvmeio.torch.empty_like(like, dtype=torch.int8).dtype == torch.int8


@pytest.mark.parametrize("pin_memory", [False, True])
def test_memory_is_freed_with_the_last_view(pin_memory):
    before = used()
    tensor = nvmeio.torch.empty(4, MIB, dtype=torch.uint8, pin_memory=pin_memory)
    assert used() == before + 4 * MIB
    view = tensor[2].view(torch.int32)[5:]
    array = view.numpy()
    del tensor, view
    assert used() == before + 4 * MIB
    del array
    assert used() == before


def test_any_slice_of_a_pinned_tensor_is_pinned_and_no_other():
    pinned = nvmeio.torch.empty(10_000, pin_memory=True)
    plain = nvmeio.torch.empty(10_000)
    with nvmeio.aio_handle() as handle:
        assert handle.is_pinned(pinned)
        assert handle.is_pinned(pinned[5000:5001])
        assert not handle.is_pinned(plain)


def test_tensors_are_written_and_read_without_a_bounce(tmp_path):
    source = nvmeio.torch.empty(MIB).random_(1 << 20)
    target = nvmeio.torch.empty_like(source)
    with nvmeio.Handle() as handle:
        handle.write(source, tmp_path / "file")
        handle.read(target, tmp_path / "file")
        assert handle.stats()["bytes_bounced"] == 0
    assert torch.equal(source, target)


def test_impossible_tensors_are_refused():
    with pytest.raises(ValueError, match="no extent may be negative"):
        nvmeio.torch.empty(3, -1)
    with pytest.raises(TypeError, match=r"an extent is 2\.5; it must be an integer"):
        nvmeio.torch.empty(2.5)
    for dtype in (np.float32, "float32", float):
        with pytest.raises(TypeError, match="it must be a dtype of torch"):
            nvmeio.torch.empty(3, dtype=dtype)
    with pytest.raises(TypeError, match="quantized"):
        nvmeio.torch.empty(3, dtype=torch.quint8)
    with pytest.raises(TypeError, match="tensor is of type ndarray"):
        nvmeio.torch.empty_like(np.ones(3))
    with pytest.raises(ValueError, match="no extent may exceed"):
        nvmeio.torch.empty(10**30, 0)
    with pytest.raises(MemoryError, match="bytes; the limit is"):
        nvmeio.torch.empty(2**62)
    with pytest.raises(ValueError, match="numa_node is 63"):
        nvmeio.torch.empty(5, numa_node=63)


@needs_cuda
def test_pinned_tensors_are_known_to_the_driver():
    tensor = nvmeio.torch.empty(MIB, pin_memory=True)
    assert tensor.is_pinned()
    assert tensor[5:].is_pinned()
    assert not nvmeio.torch.empty(MIB).is_pinned()
    on_device = tensor.fill_(7).to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    assert bool((on_device == 7).all())
    del tensor
    assert not nvmeio.torch.empty(MIB).is_pinned()


@needs_cuda
def test_locked_tensors_of_handles_are_known_to_the_driver():
    with nvmeio.aio_handle() as handle:
        tensor = handle.new_cpu_locked_tensor(MIB, torch.empty(0))
        assert tensor.is_pinned()
        assert handle.free_cpu_locked_tensor(tensor)
