"""Arrays on disk refuse what they cannot hold, with nvmeio's messages, not torch's."""

import numpy as np
import pytest

from array_samples import numbers, write_npy
from index_strategies import assert_same
from nvmeio import ArrayFile

torch = pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture
def array(path):
    """A .npy file of 20 rows of 3 numbers."""
    with ArrayFile(write_npy(path, numbers((20, 3))), mode="r+") as array:
        yield array


@pytest.fixture
def tensors(tmp_path):
    """An array whose results are tensors."""
    with ArrayFile.create(tmp_path / "tensors", (20, 3), torch.bfloat16) as array:
        yield array


VALUES = {
    "text": (lambda: "x", ValueError, TypeError, "the values are 'x'; .* to DTYPE$"),
    "object": (object, TypeError, TypeError, "of type object; .* converted to DTYPE$"),
    "ragged": (lambda: [[1, 2], [3]], ValueError, ValueError, "of type list; .* DTYPE$"),
    "list of tensors": (
        lambda: [torch.ones(3, dtype=torch.bfloat16)],
        TypeError,
        ValueError,
        "of type list; .* DTYPE$",
    ),
    "set": (lambda: {1}, TypeError, TypeError, "are of type set; .* to DTYPE$"),
    "shape": (
        lambda: np.zeros(7),
        ValueError,
        ValueError,
        r"of shape \(7,\); they must broadcast to \(3,\)$",
    ),
    "axes": (
        lambda: torch.zeros(2, 1, 3),
        ValueError,
        ValueError,
        r"of shape \(2, 1, 3\); they must broadcast to \(3,\)$",
    ),
    "sparse": (
        lambda: torch.eye(3).to_sparse(),
        TypeError,
        TypeError,
        r"its layout is torch\.sparse_coo; pass its to_dense\(\)",
    ),
    "meta": (
        lambda: torch.empty(3, device="meta"),
        TypeError,
        TypeError,
        "on the meta device and has no data",
    ),
}


class TestValues:
    @pytest.mark.parametrize(
        ("make", "error", "of_tensors", "words"), VALUES.values(), ids=VALUES
    )
    def test_values_that_cannot_be_converted_are_refused(
        self, array, tensors, make, error, of_tensors, words
    ):
        for target, kind in ((array, error), (tensors, of_tensors)):
            before = np.asarray(target[...].tolist())
            expected = words.replace("DTYPE", str(target.dtype))
            for assign in (target.__setitem__, target.scatter, target.submit_setitem):
                with pytest.raises(kind, match=expected):
                    assign(0, make())
            np.testing.assert_array_equal(target[...].tolist(), before)

    def test_a_number_that_is_too_large_is_refused(self, array, tensors, tmp_path):
        with ArrayFile.create(tmp_path / "array", 3, "i4") as integers:
            for target in (integers, tensors):
                with pytest.raises((OverflowError, ValueError), match=r"are 10*; they can"):
                    target[0] = 10**30

    @pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2"])
    def test_elements_that_numpy_lacks_must_be_converted_first(self, array, dtype):
        value = torch.ones(3, dtype=getattr(torch, dtype))
        words = (
            rf"a tensor of torch\.{dtype} cannot be assigned to elements of float32; conv"
        )
        for assign in (array.__setitem__, array.submit_scatter):
            with pytest.raises(TypeError, match=words):
                assign([1, 2], value)

    def test_every_kind_of_tensor_is_assigned(self, array):
        array[0] = torch.ones(3, requires_grad=True)
        array[1] = torch.arange(6.0)[::2]
        array[2] = torch.tensor([1, 2, 3])
        array[3] = torch.tensor([1 + 0j, 2, 3]).conj().imag + 7
        expected = [[1, 1, 1], [0, 2, 4], [1, 2, 3], [7, 7, 7]]
        assert_same(array[:4], np.array(expected, "f4"))

    def test_an_array_on_disk_is_assigned_to_another(self, array, tensors):
        tensors[...] = array
        assert torch.equal(tensors[...], torch.from_numpy(array[...]).bfloat16())
        with pytest.raises(TypeError, match="elements of float32; convert it first"):
            array[...] = tensors


INDICES = {
    "meta": lambda: torch.zeros(2, dtype=torch.int64, device="meta"),
    "sparse": lambda: torch.eye(2).long().to_sparse(),
    "gradients": lambda: torch.ones(2, requires_grad=True),
    "bfloat16": lambda: torch.ones(2, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("kind", INDICES)
def test_a_tensor_that_is_no_index_is_refused(array, kind):
    index = INDICES[kind]()
    words = r"is a tensor of torch\.\w+ on (cpu|meta).*; it must be a dense one"
    for call in (array.__getitem__, array.gather, lambda rows: array.windows(rows, 1)):
        with pytest.raises(TypeError, match=words):
            call(index)


OUTS = {
    "list": (lambda: [0, 0, 0], TypeError, "out is of type list; it must be an array"),
    "dtype": (lambda: np.zeros((1, 3)), TypeError, "out is of dtype float64; .* float32$"),
    "order": (
        lambda: np.zeros((1, 3), ">f4"),
        TypeError,
        "out is of dtype >f4; .*float32$",
    ),
    "tensor": (
        lambda: torch.zeros(1, 3, dtype=torch.bfloat16),
        TypeError,
        r"out is of dtype torch\.bfloat16; it must be of float32$",
    ),
    "size": (lambda: np.zeros(4, "f4"), ValueError, r"has 16 bytes; .* \(1, 3\), has 12$"),
    "masked": (lambda: np.ma.zeros((1, 3), "f4"), TypeError, "its mask would be lost"),
    "read-only": (
        lambda: np.broadcast_to(np.float32(0), (1, 3)),
        ValueError,
        "it is read-only; pass writable memory",
    ),
    "sparse": (lambda: torch.zeros(1, 3).to_sparse(), TypeError, "its layout is torch"),
    "overlap": (lambda: torch.zeros(1).expand(1, 3), ValueError, "its elements overlap"),
}


@pytest.mark.parametrize(("make", "error", "words"), OUTS.values(), ids=OUTS)
def test_memory_that_cannot_be_filled_is_refused(array, make, error, words):
    for read in (array.gather, array.prefetch, lambda rows, out: array.windows(1, 1, out)):
        with pytest.raises(error, match=words):
            read([1], make())


def masked(shape=(1, 3)):
    return np.ma.array(np.ones(shape, "f4"), mask=True)


MASKED = {
    "append": lambda array: array.append(masked()),
    "append rows": lambda array: array.append([masked((3,)), np.zeros(3)]),
    "append nested": lambda array: array.append([(1, 2, np.ma.masked)]),
    "scatter": lambda array: array.scatter([1], masked()),
    "submit_scatter": lambda array: array.submit_scatter([1], masked()),
    "assignment": lambda array: array.__setitem__(0, masked((3,))),
    "one element": lambda array: array.__setitem__((0, 0), np.ma.masked),
    "submit_setitem": lambda array: array.submit_setitem(0, masked((3,))),
    "nothing": lambda array: array.append(masked((0, 3))),
    "out of no bytes": lambda array: array.gather([], masked((0, 3))),
    "rows": lambda array: array.gather(np.ma.array([0, 1], mask=[0, 1])),
    "index": lambda array: array[np.ma.array([0, 1], mask=[0, 1])],
    "mask": lambda array: array[np.ma.array([True, False], mask=[0, 1])],
    "tensor": lambda array: array.append(
        torch.masked.masked_tensor(torch.ones(1, 3), torch.ones(1, 3) > 2)
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
@pytest.mark.parametrize("use", MASKED.values(), ids=MASKED)
def test_masked_arrays_are_refused_before_anything_changes(array, path, use):
    before = path.read_bytes()
    with pytest.raises(TypeError, match="masked, and its mask would be lost"):
        use(array)
    assert path.read_bytes() == before


@pytest.mark.parametrize("dtype", ["foo", 3.5, None, torch.qint8, [("a",)]], ids=str)
def test_an_invalid_dtype_is_refused(path, dtype):
    words = "dtype is .*; it must be a dtype of numpy or torch"
    with pytest.raises(TypeError, match=words):
        ArrayFile.create(path, 3, dtype)
    assert not path.exists()
    path.write_bytes(bytes(8))
    if dtype is not None:
        with pytest.raises(TypeError, match=words):
            ArrayFile(path, dtype=dtype)
