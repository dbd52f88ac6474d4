"""Strategies of hypothesis for indices, both valid and invalid ones."""

import warnings

import hypothesis.extra.numpy as hnp
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from array_samples import DTYPES

KINDS = ("integer", "scalar", "slice", "array", "mask", "newaxis", "ellipsis", "boolean")

INVENTED = settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def shapes(min_side=0):
    """Shapes of small arrays, also without axes or elements."""
    return hnp.array_shapes(min_dims=0, max_dims=4, min_side=min_side, max_side=5)


@st.composite
def mixtures(draw, shape):
    """Tuples of every kind of index, sometimes out of bounds or too long."""
    items = []
    axis = 0
    common = draw(hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=3))
    for kind in draw(st.lists(st.sampled_from(KINDS), max_size=6)):
        extent = shape[axis] if axis < len(shape) else 1
        position = st.integers(-extent - draw(st.booleans()), max(extent - 1, 0))
        if kind == "integer":
            items.append(draw(position))
        elif kind == "scalar":
            items.append(np.array(draw(position)))
        elif kind == "slice":
            items.append(draw(st.slices(extent)))
        elif kind == "array":
            dtype = draw(st.sampled_from(("int64", "int8", ">i4", "uint16")))
            least = 0 if dtype == "uint16" else -extent
            elements = st.integers(least, max(extent - 1, 0))
            own = draw(st.sampled_from((common, common, (1,), (2,))))
            items.append(draw(hnp.arrays(dtype, own, elements=elements)))
        elif kind == "mask":
            length = draw(st.integers(1, 2))
            items.append(draw(hnp.arrays(bool, shape[axis : axis + length] or (2,))))
            axis += items[-1].ndim - 1
        elif kind == "newaxis":
            items.append(None)
        elif kind == "ellipsis":
            items.append(Ellipsis)
            axis += draw(st.integers(0, 2))
        else:
            items.append(draw(st.booleans()))
        axis += kind not in ("newaxis", "ellipsis", "boolean")
    return tuple(items)


@st.composite
def cases(draw, min_side=0):
    """A shape and an index for it."""
    shape = draw(shapes(min_side))
    kinds = [mixtures(shape), hnp.basic_indices(shape, allow_newaxis=True)]
    if shape and 0 not in shape:
        kinds.append(hnp.integer_array_indices(shape))
        kinds.append(hnp.arrays(bool, shape))
    return shape, draw(st.one_of(kinds))


@st.composite
def assignments(draw):
    """An array's shape and dtype, an index, and how a value is broadcast to it.

    The last is a function from the selection's shape to the value's.
    """
    shape, index = draw(cases())
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    left_out = draw(st.integers(0, 4))
    single = draw(st.lists(st.booleans(), min_size=8, max_size=8))

    def shape_of_value(taken):
        kept = [1 if one else extent for one, extent in zip(single, taken, strict=False)]
        return tuple(kept[left_out:])

    return shape, DTYPES[dtype], index, shape_of_value


def outcome(function, *args):
    """Return a function's result, or the type of its error.

    numpy before 2.3 warns of indices out of bounds where the result is empty.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Out of bound index", DeprecationWarning)
            return function(*args)
    except DeprecationWarning:
        return IndexError
    except (IndexError, TypeError, ValueError) as error:
        return type(error)


def assert_same(found, expected):
    """Assert equality in type, shape, dtype and values."""
    assert type(found) is type(expected), (found, expected)
    if not isinstance(expected, type):
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert found.tobytes() == expected.tobytes()
