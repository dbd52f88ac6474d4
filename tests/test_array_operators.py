"""Arrays on disk are no operands: what would read all of one, unasked, is refused."""

import pickle
import weakref

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


class TestOperators:
    """They would read the whole file, or compare something else than elements."""

    @pytest.mark.parametrize("symbol", OPERATORS)
    def test_an_operator_is_refused(self, array, symbol):
        apply = OPERATORS[symbol]
        others = (1, None, np.float32(2), np.ones(3), torch.ones(3), ArrayFile(array.path))
        for other in others:
            with pytest.raises(TypeError, match=r"read it first: array\[\.\.\.\]"):
                apply(array, other)
            # Of torch's own comparisons some have words of their own.
            with pytest.raises(TypeError):
                apply(other, array)
        with pytest.raises(TypeError, match="an ArrayFile has no operator") as refused:
            apply(array, 1)
        assert f"operator {symbol};" in str(refused.value)

    @pytest.mark.parametrize("symbol", UNARY)
    def test_an_operator_of_one_array_is_refused(self, array, symbol):
        with pytest.raises(TypeError, match="read it first") as refused:
            UNARY[symbol](array)
        assert f"operator {symbol};" in str(refused.value)

    def test_nothing_is_added_in_place_but_to_what_an_index_names(self, array):
        with pytest.raises(TypeError, match=r"operator \+; read it first"):
            array += 1
        array[3] += 1
        assert array[3].tolist() == [10, 11, 12]

    def test_it_is_neither_true_nor_false(self, array):
        with pytest.raises(TypeError, match=r"use len\(array\)"):
            bool(array)

    @pytest.mark.parametrize("name", FUNCTIONS)
    def test_a_function_of_numpy_is_refused(self, array, name):
        with pytest.raises(TypeError, match="read it first") as refused:
            FUNCTIONS[name](array)
        assert str(refused.value).startswith(f"{name}() takes no ArrayFile; ")

    def test_what_asks_for_all_of_it_gets_that(self, array):
        assert_same(np.asarray(array), array[...])
        assert_same(np.array(array), array[...])
        assert (np.shape(array), np.ndim(array)) == ((20, 3), 2)

    def test_numpy_gets_no_elements_that_it_lacks(self, tmp_path):
        with ArrayFile.create(tmp_path / "new.npy", (2,), torch.bfloat16) as array:
            for dtype in (None, "f4"):
                with pytest.raises(TypeError, match=r"no torch\.bfloat16; use arr"):
                    np.asarray(array, dtype)

    def test_it_is_the_key_that_it_was(self, array):
        other = ArrayFile(array.path)
        names = {array: "array", other: "other"}
        assert (names[array], names[other]) == ("array", "other")
        assert {array, array, other} == {other, array}
        assert array in {array}
        assert array in [array]
        assert array == array
        assert weakref.WeakKeyDictionary({array: 1})[array] == 1
        assert hash(array) != hash(pickle.loads(pickle.dumps(array)))
