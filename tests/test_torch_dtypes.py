"""numpy arrays carry elements of every dtype of torch, bit by bit."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

# Imported after the check, because the module needs torch.
from nvmeio._memory.registry import library_of_dtype  # noqa: E402
from nvmeio.torch import _tensors as tensors  # noqa: E402
from nvmeio.torch._dtypes import carrier, to_carrier, to_tensor  # noqa: E402

DTYPES = sorted(
    (
        dtype
        for dtype in {value for value in vars(torch).values() if type(value) is torch.dtype}
        if not str(dtype).startswith("torch.q")
    ),
    key=str,
)


def bits(tensor):
    """Return the bytes of a tensor."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_become_arrays_and_tensors_again(dtype):
    raw = torch.arange(24 * dtype.itemsize, dtype=torch.uint8)
    if dtype is torch.bool:
        raw %= 2
    tensor = raw.view(dtype).view(2, 3, 4)
    array = to_carrier(tensor, dtype)
    assert (array.dtype, array.shape) == (carrier(dtype), tensor.shape)
    assert array.dtype.itemsize == dtype.itemsize
    again = to_tensor(array, dtype)
    assert (again.dtype, again.shape) == (dtype, tensor.shape)
    assert torch.equal(bits(again), bits(tensor))
    assert again.data_ptr() == array.ctypes.data


def test_a_dtype_that_numpy_has_is_its_own():
    assert carrier(torch.float16) == np.float16
    assert carrier(torch.uint64) == np.uint64
    assert carrier(torch.bfloat16) == np.dtype("V2")
    np.testing.assert_array_equal(to_carrier(2.5, torch.float32), np.float32(2.5))


def test_lazy_views_are_resolved():
    tensor = torch.tensor([1 + 2j])
    assert to_carrier(tensor.conj(), torch.complex64)[0] == 1 - 2j
    assert to_carrier(tensor.conj().imag, torch.float32)[0] == -2


@pytest.mark.parametrize(
    "other", [np.float32, "f4", None, torch.qint8, torch.Tensor], ids=str
)
def test_only_dtypes_of_torch_have_a_carrier(other):
    assert carrier(other) is None
    assert library_of_dtype(other) is None


def test_a_dtype_leads_to_its_library():
    assert library_of_dtype(torch.bfloat16) is tensors
