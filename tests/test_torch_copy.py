"""memcpy copies every tensor of torch as copy_ would, and refuses what it cannot."""

import numpy as np
import pytest

from helpers import pattern

torch = pytest.importorskip("torch")

import nvmeio  # noqa: E402 - torch may be missing
from nvmeio._native.copy import memcpy  # noqa: E402

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64,
    torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip

LAYOUTS = {
    "contiguous": lambda base: base,
    "rows": lambda base: base[1:3],
    "column": lambda base: base[:, :, 1],
    "permuted": lambda base: base.permute(2, 0, 1),
    "steps": lambda base: base[::2, 1::2],
    "0-d": lambda base: base[1, 2, 3],
    "no element": lambda base: base[:, 2:2],
}


def tensor_of(dtype, count):
    """Return a tensor of random bits."""
    if count == 0:
        return torch.zeros(0, dtype=dtype)
    size = count * torch.zeros(1, dtype=dtype).element_size()
    bits = torch.frombuffer(bytearray(pattern(size)), dtype=torch.uint8)
    return (bits % 2).to(torch.bool) if dtype is torch.bool else bits.view(dtype)


def bits_of(tensor):
    """Return the bytes of a tensor in C order."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return dense.reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("count", [0, 1, 1000, 1 << 20])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_copied_bit_by_bit(dtype, count):
    """DeepSpeed's op copies only the first axis, and only floats."""
    source = tensor_of(dtype, count)
    target = torch.zeros(count, dtype=dtype)
    memcpy(target, source)
    assert bits_of(target) == bits_of(source)


@pytest.mark.all_combinations
@pytest.mark.parametrize("to", LAYOUTS)
@pytest.mark.parametrize("of", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_strides_on_either_side_are_in_c_order(dtype, of, to):
    """Sizes that differ are refused."""
    source = LAYOUTS[of](torch.arange(120).to(dtype).reshape(4, 5, 6))
    base = torch.full((4, 5, 6), -1, dtype=dtype)
    expected = base.clone()
    target = LAYOUTS[to](base)
    if target.numel() != source.numel():
        with pytest.raises(ValueError, match="they must be equal"):
            memcpy(target, source)
    else:
        LAYOUTS[to](expected).copy_(source.reshape(target.shape))
        assert nvmeio.deepspeed_memcpy(target, source) == 0
    assert torch.equal(base, expected)


@pytest.mark.parametrize("count", [10, 100_000])
@pytest.mark.parametrize(
    "lazy",
    [torch.conj, lambda t: t.conj().imag, lambda t: t.conj().real, lambda t: t.mH],
    ids=["conj", "neg", "real", "adjoint"],
)
@pytest.mark.parametrize("side", ["source", "target"])
def test_lazy_views_are_resolved(lazy, side, count):
    base = torch.randn(count, 2, dtype=torch.complex64)
    plain = torch.randn_like(lazy(base).resolve_conj().resolve_neg())
    if side == "source":
        memcpy(plain, lazy(base))
    else:
        memcpy(lazy(base), plain)
    assert torch.equal(lazy(base).resolve_conj().resolve_neg(), plain)


@pytest.mark.parametrize("count", [100, 100_000])
@pytest.mark.parametrize("dtype", ["float32", "int64", "bool", "complex64", "uint8"])
def test_arrays_and_tensors_mix(dtype, count):
    array = np.frombuffer(pattern(count), np.uint8).astype(dtype)
    tensor = torch.zeros(count, dtype=getattr(torch, dtype))
    memcpy(tensor, array)
    back = np.zeros_like(array)
    memcpy(back, tensor)
    assert (back == array).all()
    strided = torch.zeros(count, 2, dtype=tensor.dtype)[:, 1]
    memcpy(strided, array[::-1])
    memcpy(back[::-1], strided)
    assert (back == array).all()


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("count", [10, 100_000])
def test_a_copy_counts_as_one_change_that_has_no_gradient(count, strided):
    target = torch.zeros(count, 2, requires_grad=True)
    target = target[:, 0] if strided else target
    before = target._version
    memcpy(target, torch.ones_like(target))
    assert target._version > before
    assert torch.equal(target, torch.ones_like(target))


@pytest.mark.parametrize("count", [10, 1 << 19])
@pytest.mark.parametrize("kinds", [(0, 1), (1, 0), (1, 1)], ids=str)
def test_parameters_and_tensors_mix(kinds, count):
    """As a model loads its weights."""
    of = (torch.Tensor, lambda tensor: torch.nn.Parameter(tensor, requires_grad=True))
    target, source = of[kinds[0]](torch.zeros(count)), of[kinds[1]](torch.ones(count))
    before = target._version
    memcpy(target, source)
    assert target._version > before
    assert torch.equal(target, torch.ones(count))
    with pytest.raises(TypeError, match=r"float64 into.*float32"):
        memcpy(target, source.double()[: count // 2])
    with pytest.raises(ValueError, match="they must be equal"):
        memcpy(target, source[1:])


@pytest.mark.parametrize("count", [10, 1 << 19])
def test_pool_memory_is_in_use_only_during_the_copy(count):
    with nvmeio.aio_handle() as handle:
        pinned = [handle.new_cpu_locked_tensor(count, torch.zeros(1)) for _ in range(2)]
        memcpy(*pinned)
        assert all(handle.free_cpu_locked_tensor(tensor) for tensor in pinned)


def test_backward_notices_that_a_saved_tensor_was_overwritten():
    saved = torch.ones(10, requires_grad=True)
    result = (saved * saved).sum()
    memcpy(saved, torch.zeros(10))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


def test_inference_tensors_are_copied():
    with torch.inference_mode():
        target, source = torch.zeros(10), torch.ones(10)
    memcpy(target, source)
    assert torch.equal(target, torch.ones(10))
    with torch.inference_mode():
        ordinary = torch.zeros(10)
        memcpy(ordinary, source)
        assert torch.equal(ordinary, source)


@pytest.mark.parametrize("distance", [-5, -1, 1, 5])
@pytest.mark.parametrize("step", [1, 2])
def test_overlapping_tensors_are_copied_as_from_a_clone(step, distance):
    base = torch.arange(200_000)
    source = base[5:190_005:step]
    expected = base.clone()
    expected[5 + distance : 190_005 + distance : step].copy_(source.clone())
    memcpy(base[5 + distance : 190_005 + distance : step], source)
    assert torch.equal(base, expected)


@pytest.mark.parametrize("distance", [-2, 2])
def test_overlapping_storages_are_copied_as_from_a_clone(distance):
    """Two storages over one array; torch does not know that they share memory."""
    array = np.arange(200_000.0)
    expected = array.copy()
    expected[10 + distance : 190_000 + distance : 2] = array[10:190_000:2].copy()
    source = torch.from_numpy(array[10:190_000])
    dest = torch.from_numpy(array[10 + distance : 190_000 + distance])
    memcpy(dest[::2], source[::2])
    assert np.array_equal(array, expected)


class ElsewhereTensor(torch.Tensor):
    """A tensor that reports a device, but has its memory in the host."""

    @property
    def device(self):
        return torch.device("xpu")


def test_arrays_and_device_tensors_are_copied_through_the_host():
    array = np.arange(1000, dtype="f4")
    elsewhere = torch.zeros(1000, 2)[:, 0].as_subclass(ElsewhereTensor)
    memcpy(elsewhere, array[::-1])
    assert elsewhere.as_subclass(torch.Tensor).tolist() == array[::-1].tolist()
    back = np.zeros_like(array)
    memcpy(back, elsewhere)
    assert np.array_equal(back, array[::-1])
    memcpy(memoryview(back), torch.ones(1000).as_subclass(ElsewhereTensor))
    assert (back == 1).all()
    with pytest.raises(ValueError, match="bytes"):
        memcpy(elsewhere, array[1:])


REFUSED = {
    "other dtype": (lambda: torch.zeros(8), lambda: torch.zeros(4).double(), TypeError),
    "half and bfloat": (
        lambda: torch.zeros(4).half(), lambda: torch.zeros(4).bfloat16(), TypeError
    ),
    "sparse": (lambda: torch.zeros(4).to_sparse(), lambda: torch.zeros(4), TypeError),
    "from sparse": (lambda: torch.zeros(4), lambda: torch.zeros(4).to_sparse(), TypeError),
    "meta": (lambda: torch.zeros(4, device="meta"), lambda: torch.zeros(4), TypeError),
    "expanded": (
        lambda: torch.zeros(1).expand(4), lambda: torch.ones(4), ValueError
    ),
    "expanded for an array": (
        lambda: torch.zeros(1).expand(4), lambda: np.ones(4, "f4"), ValueError
    ),
}  # fmt: skip


@pytest.mark.parametrize(("dest", "src", "error"), REFUSED.values(), ids=REFUSED)
def test_tensors_that_do_not_match_are_refused(dest, src, error):
    with pytest.raises(error):
        memcpy(dest(), src())


def test_a_team_is_no_larger_than_torchs():
    """Checks that torch's number of threads is used, because time would not show it."""
    from nvmeio._memory.registry import thread_limit

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert thread_limit() == 1
    finally:
        torch.set_num_threads(before)
    assert thread_limit() == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("pair", [("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda")])
def test_tensors_on_a_device_are_copied_by_torch(pair):
    source = torch.arange(100_000, device=pair[1])
    target = torch.zeros(100_000, dtype=torch.int64, device=pair[0])
    memcpy(target, source)
    assert torch.equal(target.cpu(), source.cpu())
