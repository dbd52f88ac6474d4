"""The check of pickles: hostile ones are refused, whatever opcodes they use."""

import collections
import functools
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import pairs_of_one_hash
from nvmeio._cli.torch_files import ObjectReader
from nvmeio._native.pickles import require_linear
from nvmeio._tensors.torch_files import Reader, tensor_of, unpickled

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
    require_linear(text, by_fields=True)
    # What ends too early is for the unpickler to refuse.
    require_linear(text[:end], by_fields=False)


class Node:
    """An object that knows the one before by two ways."""

    def __init__(self, before):
        self.before, self.others = before, [before, (before,)]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_ordinary_objects_pass(protocol):
    """They are hashed by identity, whatever they contain."""
    node = None
    for _ in range(100):
        node = Node(node)
    nodes = {node: {"a": node, node.before: [node, node]}}
    text = pickle.dumps(nodes, protocol)
    require_linear(text, by_fields=False)


def test_objects_that_are_hashed_by_fields_pass_if_these_are_few():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from torch.distributed.checkpoint.metadata import MetadataIndex

    keys = [MetadataIndex(f"layer {n}", torch.Size([n, n]), n) for n in range(1000)]
    text = pickle.dumps({key: [key, keys[0]] for key in keys})
    require_linear(text, by_fields=True)


# Each leaves a tuple on the stack that has the one before twice.
STEPS = {
    "duplicated": b"2\x86",
    "remembered": b"\x94h\x00h\x00\x86",
    "marked": b"q\x00(h\x00h\x00t",
    "among others": b"q\x00(K\x01h\x00K\x02h\x00K\x03t",
    "by a line": b"p0\n(g0\ng0\nt",
    "by a later line": b"p12\nK\x01p3\n0(g12\ng12\nt",
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
        require_linear(body, by_fields=False)
    # Ten of them are harmless, and load.
    small = body.replace(text * 50, b"", 1)
    if step != "remembered":
        require_linear(small, by_fields=False)
        pickle.loads(small)


def test_remembered_objects_beyond_the_size_are_refused():
    with pytest.raises(ValueError, match="other than a number"):
        require_linear(b"Np-1\n.", by_fields=False)
    with pytest.raises(ValueError, match="it has 8 bytes, and remembers 9999 objects"):
        require_linear(b"Nr\x0f\x27\x00\x00N.", by_fields=False)
    # Behind a gap of indices, the next number is that of the objects before: here 1, not 6.
    body = b"\x80\x04)q\x05\x94" + b"h\x01h\x01\x86q\x01" * 60 + b"}h\x01K\x01s."
    with pytest.raises(ValueError, match="nests tuples in tuples"):
        require_linear(body, by_fields=False)


@pytest.mark.parametrize("text", [False, True])
def test_many_large_ints_are_refused_where_they_are_hashed(text):
    """Each may have the hash of all before it: multiples of 2**61 - 1 have the hash 0."""
    step, numbers = 2**61 - 1, range(2**16, 2**16 + 100_000)
    if text:
        ints = [b"I%d\n" % (step * n * 2**10) for n in numbers]
    else:
        ints = [b"\x8a\x0a" + (step * n).to_bytes(10, "little") for n in numbers]
    body = b"\x80\x04}(" + b"".join(b"%sN" % each for each in ints) + b"u."
    with pytest.raises(ValueError, match="many ints or tuples that may have the same hash"):
        require_linear(body, by_fields=False)
    body = b"\x80\x04](" + b"".join(ints) + b"e."
    require_linear(body, by_fields=False)
    assert len(pickle.loads(body)) == 100_000


def test_many_tuples_are_refused_where_they_are_hashed_by_their_parts():
    pairs = pairs_of_one_hash(30_000)
    body = pickle.dumps(dict.fromkeys(pairs[:1000]))
    require_linear(body, by_fields=True)
    ints = (b"\x8a\x08%b\x8a\x08%b\x86N" % tuple(map(eight, pair)) for pair in pairs)
    body = b"\x80\x04}(" + b"".join(ints) + b"u."
    with pytest.raises(ValueError, match="ints or tuples that may have the same hash"):
        require_linear(body, by_fields=True)
    require_linear(body, by_fields=False)


def eight(value):
    """Return an int as eight bytes of a pickle."""
    return value.to_bytes(8, "little")


NESTED = b")q\x02" + b"h\x02h\x02\x86q\x02" * 60


def test_a_bytearray_that_is_longer_than_its_pickle_is_refused():
    """CPython allocates it before it reads."""
    text = b"\x80\5\x96" + (1 << 40).to_bytes(8, "little") + b"abc."
    with pytest.raises(ValueError, match="a bytearray has 1099511627776 bytes, and 4 are"):
        require_linear(text, by_fields=False)


@pytest.mark.parametrize(
    "add", [b"h\x00h\x02a", b"h\x00(h\x02h\x02e", b"h\x00]h\x02aa", b"h\x05h\x02K\x00s"]
)
def test_what_a_container_gets_later_counts_too(add):
    """Also if it is a part of the arguments already."""
    body = b"\x80\x04}q\x05]q\x00\x86q\x01" + NESTED + add + b"cbuiltins\nset\nh\x01R."
    with pytest.raises(ValueError, match="nests tuples in tuples"):
        require_linear(body, by_fields=False)


def test_a_long_text_counts_each_time():
    """Such as set() of it, or the hash of an object that has it."""
    text = b"\x80\x04X\x40\x42\x0f\x00" + b"x" * 1_000_000 + b"q\x000"
    calls = b"cbuiltins\nset\nq\x010" + b"h\x01h\x00\x85R0" * 1000 + b"N."
    require_linear(text + calls, by_fields=False)
    with pytest.raises(ValueError, match="arguments have more than 1000 parts"):
        require_linear(text + 10 * calls[:-2] + b"N.", by_fields=False)


@pytest.mark.parametrize(
    ("name", "reader"),
    [
        ("_rebuild_tensor_v2", Reader),
        ("_rebuild_tensor_v2", functools.partial(ObjectReader, {})),
        ("_rebuild_tensor", functools.partial(ObjectReader, {})),
    ],
)
def test_a_pickle_changes_no_function(name, reader):
    """A state of two parts sets attributes, such as the defaults of arguments."""
    state = {"__kwdefaults__": {"dtype": "float64"}}
    body = b"ctorch._utils\n%b\n" % name.encode() + pickle.dumps((None, state))[2:-1]
    unpickled(b"\x80\x04" + body + b"b.", reader)
    assert tensor_of.__kwdefaults__ == {"dtype": None}


def test_a_state_counts_where_objects_are_hashed_by_it():
    new, state = b"cm\nA\n)\x81", b"}X\x01\x00\x00\x00ah\x02sb"
    body = b"\x80\x04" + NESTED + b"}" + new + state + b"K\x00s."
    require_linear(body, by_fields=False)
    with pytest.raises(ValueError, match="nests tuples in tuples"):
        require_linear(body, by_fields=True)
    # Each object is in a tuple before it gets its state.
    new, state = b"cm\nA\n)\x81q\x02", b"h\x02}X\x01\x00\x00\x00ah\x01sb0"
    body = b"\x80\x04" + new + b"h\x02\x86q\x01" + new + state + b"."
    require_linear(body, by_fields=True)
    body = b"\x80\x04" + new + b"h\x02\x86q\x01" + state + b"."
    with pytest.raises(ValueError, match="a state after others contain it"):
        require_linear(body, by_fields=True)
