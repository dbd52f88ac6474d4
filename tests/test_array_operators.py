"""Arrays on disk refuse operators and functions that would read the whole file."""

import pickle
import weakref

import numpy as np
import pytest

from array_samples import numbers, write_npy
from index_strategies import assert_same
from nvmeio import ArrayFile, Handle

torch = pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture
def array(path):
    """A .npy file of 20 rows of 3 numbers."""
    with ArrayFile(write_npy(path, numbers((20, 3))), mode="r+") as array:
        yield array


OPERATORS = {
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    ">=": lambda a, b: a >= b,
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "**": lambda a, b: a**b,
    "@": lambda a, b: a @ b,
    "&": lambda a, b: a & b,
    "|": lambda a, b: a | b,
    "^": lambda a, b: a ^ b,
    "<<": lambda a, b: a << b,
    ">>": lambda a, b: a >> b,
    "divmod": divmod,
}
UNARY = {
    "-": lambda a: -a,
    "+": lambda a: +a,
    "~": lambda a: ~a,
    "abs": abs,
    "in": lambda a: 1 in a,
}
FUNCTIONS = {
    "numpy.sum": np.sum,
    "numpy.mean": np.mean,
    "numpy.where": np.where,
    "numpy.array_equal": lambda a: np.array_equal(a, a),
    "numpy.concatenate": lambda a: np.concatenate([a, a]),
    "numpy.save": lambda a: np.save("never", a),
    "numpy.exp": np.exp,
    "numpy.add": lambda a: np.add(1, a),
    "numpy.equal": lambda a: np.arange(3) == a,
}
TORCHS = {
    "add": lambda a: torch.add(a, 1),
    "stack": lambda a: torch.stack([a, a]),
    "copy_": lambda a: torch.ones(20, 3).copy_(a),
    "embedding": lambda a: torch.nn.functional.embedding(torch.tensor([0]), a),
}


class TestOperators:
    """Operators would read the whole file, or compare something other than elements."""

    @pytest.mark.parametrize("symbol", OPERATORS)
    def test_an_operator_is_refused(self, array, symbol):
        apply = OPERATORS[symbol]
        others = (1, None, np.float32(2), np.ones(3), torch.ones(3), ArrayFile(array.path))
        for other in others:
            with pytest.raises(TypeError, match=r"read it first: array\[\.\.\.\]"):
                apply(array, other)
            with pytest.raises(TypeError, match=r"read it first: array\[\.\.\.\]"):
                apply(other, array)
        with pytest.raises(TypeError, match="an ArrayFile has no operator") as refused:
            apply(array, 1)
        assert f"operator {symbol};" in str(refused.value)

    @pytest.mark.parametrize("symbol", UNARY)
    def test_an_operator_of_one_array_is_refused(self, array, symbol):
        with pytest.raises(TypeError, match="read it first") as refused:
            UNARY[symbol](array)
        assert f"operator {symbol};" in str(refused.value)

    def test_only_an_indexed_part_is_added_to_in_place(self, array):
        with pytest.raises(TypeError, match=r"operator \+; read it first"):
            array += 1
        array[3] += 1
        assert array[3].tolist() == [10, 11, 12]

    def test_an_array_has_no_truth_value(self, array):
        with pytest.raises(TypeError, match=r"use len\(array\)"):
            bool(array)

    @pytest.mark.parametrize("name", FUNCTIONS)
    def test_a_function_of_numpy_is_refused(self, array, name):
        with pytest.raises(TypeError, match="read it first") as refused:
            FUNCTIONS[name](array)
        assert str(refused.value).startswith(f"{name}() takes no ArrayFile; ")

    @pytest.mark.parametrize("name", TORCHS)
    def test_a_function_of_torch_is_refused(self, array, name):
        with pytest.raises(TypeError, match="read it first") as refused:
            TORCHS[name](array)
        assert str(refused.value).startswith(f"torch's {name}() takes no ArrayFile; ")

    @pytest.mark.parametrize("dtype", [np.float32, torch.float32, torch.bfloat16], ids=str)
    def test_torch_gets_all_of_it_at_once_when_it_asks(self, tmp_path, dtype):
        handle = Handle()
        with ArrayFile.create(tmp_path / "a.npy", (4, 3), dtype, handle=handle) as array:
            array[:] = np.arange(12).reshape(4, 3)
            expected = torch.as_tensor(array[...])
            before = handle.stats()["requests"]
            for convert in (
                torch.as_tensor,
                torch.tensor,
                torch.asarray,
                torch.from_dlpack,
            ):
                found = convert(array)
                assert found.dtype == expected.dtype
                assert torch.equal(found, expected)
            assert handle.stats()["requests"] == before + 4
            with pytest.raises(BufferError, match="copy is False, but"):
                torch.from_dlpack(array, copy=False)

    def test_asarray_reads_the_whole_array(self, array):
        assert_same(np.asarray(array), array[...])
        assert_same(np.array(array), array[...])
        assert (np.shape(array), np.ndim(array)) == ((20, 3), 2)

    def test_numpy_gets_no_elements_of_dtypes_that_it_lacks(self, tmp_path):
        with ArrayFile.create(tmp_path / "new.npy", (2,), torch.bfloat16) as array:
            for dtype in (None, "f4"):
                with pytest.raises(TypeError, match=r"no torch\.bfloat16; use arr"):
                    np.asarray(array, dtype)

    def test_an_array_is_hashed_and_compared_by_identity(self, array):
        other = ArrayFile(array.path)
        names = {array: "array", other: "other"}
        assert (names[array], names[other]) == ("array", "other")
        assert {array, array, other} == {other, array}
        assert array in {array}
        assert array in [array]
        assert array == array
        assert weakref.WeakKeyDictionary({array: 1})[array] == 1
        assert hash(array) != hash(pickle.loads(pickle.dumps(array)))
