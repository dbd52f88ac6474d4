"""The check of pickles: hostile ones are refused, whatever opcodes they use."""

import collections
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvmeio._native.pickles import require_linear

KEYS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.floats(),
    lambda keys: st.tuples(keys, keys) | st.frozensets(keys, max_size=3),
    max_leaves=8,
)
VALUES = st.recursive(
    KEYS,
    lambda values: (
        st.lists(values)
        | st.dictionaries(KEYS, values)
        | st.dictionaries(KEYS, values).map(collections.OrderedDict)
        | st.sets(KEYS)
        | st.complex_numbers()
        | st.tuples(values, values, values, values)
    ),
    max_leaves=20,
)


@given(VALUES, st.integers(0, pickle.HIGHEST_PROTOCOL), st.integers(0, 1000))
def test_ordinary_pickles_pass(value, protocol, end):
    text = pickle.dumps([value, value], protocol)
    require_linear(text)
    # What ends too early is for the unpickler to refuse.
    require_linear(text[:end])


# Each leaves a tuple on the stack that has the one before twice.
STEPS = {
    "duplicated": b"2\x86",
    "remembered": b"\x94h\x00h\x00\x86",
    "marked": b"q\x00(h\x00h\x00t",
    "among others": b"q\x00(K\x01h\x00K\x02h\x00K\x03t",
    "by a line": b"p0\n(g0\ng0\nt",
    "by a long index": b"r\x20\x00\x00\x00j\x20\x00\x00\x00\x86",
    "three": b"22\x87",
}
USES = {
    "key": b"q\x05}h\x05K\x01s.",
    "keys": b"q\x05}(h\x05K\x01u.",
    "member": b"q\x05\x8f(h\x05\x90.",
    "dict": b"q\x05(h\x05K\x01d.",
    "argument": b"q\x05cbuiltins\nset\n((h\x05ltR.",
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("use", USES)
def test_keys_that_take_years_to_hash_are_refused(step, use):
    text = STEPS[step]
    body = b"\x80\x04)" + b"".join(text for _ in range(60)) + USES[use]
    if step == "remembered":
        # A new index for each.
        parts = (b"q%ch%ch%c\x86" % (n, n, n) for n in range(6, 66))
        body = b"\x80\x04)" + b"".join(parts) + USES[use]
    with pytest.raises(ValueError, match="nests tuples in tuples"):
        require_linear(body)
    # Ten of them are harmless, and load.
    small = body.replace(text * 50, b"", 1)
    if step != "remembered":
        require_linear(small)
        pickle.loads(small)


def test_remembered_objects_beyond_the_size_are_refused():
    with pytest.raises(ValueError, match="it has 8 bytes, and remembers 9999 objects"):
        require_linear(b"Nr\x0f\x27\x00\x00N.")
    # Behind a gap of indices, the next number is that of the objects before: here 1, not 6.
    body = b"\x80\x04)q\x05\x94" + b"h\x01h\x01\x86q\x01" * 60 + b"}h\x01K\x01s."
    with pytest.raises(ValueError, match="nests tuples in tuples"):
        require_linear(body)
