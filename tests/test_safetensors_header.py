"""Headers of safetensors files are read and written as by the safetensors package."""

import json
import pickle
import random
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import safetensors

from hostile_headers import (
    HOSTILE,
    difference,
    entry_with,
    file_of,
    keep,
    kind_of,
    mutant,
    nested,
    read_by_nvmeio,
)
from nvmeio.safetensors import _header
from nvmeio.safetensors._dtypes import (
    BITS,
    FORMAT_NAMES,
    FRAMEWORK_NAMES,
    framework_shape,
    header_dtype,
    header_shape,
    numpy_dtype,
    torch_dtype,
)
from nvmeio.safetensors._header import SafetensorError, build, header_bytes, parse

CORPUS = Path(__file__).parent / "fuzz" / "corpus" / "safetensors"
MUTANTS = 10_000
PAGE = 4096


@pytest.mark.parametrize("what", HOSTILE)
def test_headers_are_accepted_or_refused_as_by_safetensors(what):
    content, taken = HOSTILE[what]
    assert difference(content) is None
    assert (read_by_nvmeio(content)[0] is not None) == taken


def test_headers_changed_at_random_are_read_as_safetensors_reads_them():
    rng = random.Random("headers")
    taken = 0
    for _ in range(MUTANTS):
        content = mutant(rng)
        found = difference(content)
        assert found is None, f"{found}; the file is kept: {keep(content)}"
        taken += read_by_nvmeio(content)[0] is not None
    # Otherwise all mutants would be alike.
    assert MUTANTS // 5 < taken < MUTANTS // 2


@pytest.mark.parametrize("path", sorted(CORPUS.iterdir()), ids=lambda path: path.name)
def test_headers_that_once_differed_are_read_alike(path):
    assert difference(path.read_bytes()) is None


@pytest.mark.parametrize(
    "header",
    [
        "[]",
        entry_with(dtype='"f32"'),
        entry_with(shape='"1"'),
        entry_with(data_offsets="[0,4,5]"),
        entry_with(data_offsets="[0,-4]"),
        '{"a":{"dtype":"F32","data_offsets":[0,4]}}\n ',
        '\n{"a":["F32",[1]]}',
        '{"a":',
    ],
)
def test_errors_of_entries_have_safetensors_messages(header):
    content = file_of(header)
    with pytest.raises(safetensors.SafetensorError) as theirs:
        safetensors.deserialize(content)
    wanted = str(theirs.value)
    if "struct HashMetadata" in wanted:
        wanted = wanted.partition(" at line")[0]
    assert read_by_nvmeio(content)[1] == wanted


def test_an_error_names_the_source():
    for what in ("Error while deserializing header", "Error while deserializing"):
        with pytest.raises(SafetensorError, match=f"^{what}: header too small$"):
            header_bytes(b"", 0, context=what)
        with pytest.raises(SafetensorError, match=f"^{what}: incomplete metadata"):
            parse(b"{}", 11, context=what)
    assert kind_of("no more") == "no more"


def test_the_error_can_be_pickled():
    error = pickle.loads(pickle.dumps(SafetensorError("why", 1)))
    assert (type(error), error.args) == (SafetensorError, ("why", 1))


def test_deep_nesting_is_refused_at_any_recursion_limit():
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1 << 30)
    try:
        for text in (nested(3_000_000), "[" * 3_000_000, '{"":' * 1_000_000):
            with pytest.raises(SafetensorError, match="recursion limit exceeded"):
                parse(entry_with(x=text).encode(), 0)
    finally:
        sys.setrecursionlimit(limit)


def test_brackets_are_counted_right_across_pieces_of_a_string(monkeypatch):
    monkeypatch.setattr(_header, "_CHUNK_BYTES", 7)
    text = r"\"\\" + "[" * 200
    for depth, taken in ((125, True), (126, False)):
        content = file_of(entry_with(y=f'"{text}"', x=nested(depth), z=f'"{text}"'))
        assert (read_by_nvmeio(content)[0] is not None) == taken
        assert difference(content) is None


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
@pytest.mark.parametrize("metadata", [{}, {"__metadata__": {"a": '": '}}])
def test_common_headers_are_read_by_one_regular_expression(separators, metadata):
    tensors = {f'"{n}: ' if n else "x": {"dtype": "U8", "shape": [n, 1]} for n in (0, 3)}
    for begin, name in enumerate(tensors):
        tensors[name]["data_offsets"] = [0, begin * 3]
    plain = {name.replace('"', ""): entry for name, entry in tensors.items()}
    text = json.dumps(metadata | plain, separators=separators)
    assert _header._ordinary(text) == _header._unusual(text.encode(), text)
    # A quote in a name needs json.
    escaped = json.dumps(metadata | tensors, separators=separators)
    assert _header._ordinary(escaped) is None
    for each in (text, escaped):
        assert difference(file_of(each, b"123")) is None


def test_an_error_is_short():
    long = '"' + "a" * 10**6 + '"'
    for text in (long, entry_with(dtype=long), entry_with(shape=long)):
        assert len(read_by_nvmeio(file_of(text))[1]) < 2000


def test_a_huge_length_is_refused_before_memory_is_allocated():
    tracemalloc.start()
    try:
        for length in (_header.HEADER_BYTES_MAX + 1, 2**64 - 1):
            with pytest.raises(SafetensorError, match="header too large"):
                header_bytes(length.to_bytes(8, "little"), 2**63)
        assert tracemalloc.get_traced_memory()[1] < 1 << 16
    finally:
        tracemalloc.stop()


def test_any_buffer_is_read():
    header = entry_with().encode()
    size = 8 + len(header) + 4
    layouts = [parse(kind(header), size) for kind in (bytes, bytearray, memoryview)]
    assert layouts[0] == layouts[1] == layouts[2]
    assert layouts[0].by_name["a"] == ("a", "F32", (1,), 0, 4)


def random_tensors(rng):
    """Return tensors of any dtype, in any order."""
    tensors = {}
    for _ in range(rng.randrange(12)):
        shape = tuple(rng.choice((0, 1, 2, 3, 512, 1024)) for _ in range(rng.randrange(3)))
        dtype = rng.choice([*FRAMEWORK_NAMES])
        name = rng.choice(("", "a", "b", "é", "😀", '"', "\\", "\n\x00\x1f", "\x7f", "/"))
        tensors[name + str(rng.randrange(10))] = (dtype, shape)
    return tensors


def random_metadata(rng):
    """Return metadata of at most one key, because safetensors orders keys randomly."""
    return rng.choice((None, {}, {"format": "pt"}, {'"é\n': "\\\u2028\x01"}))


def serialized(tensors, metadata, memory):
    """Return the file that the package makes of tensors, whose bytes are in `memory`."""
    specs = {}
    for name, (dtype, shape) in tensors.items():
        # The package expects torch's shape, which counts pairs of F4.
        size = int(np.prod(shape, dtype=object)) * BITS["U8" if dtype == "F4" else dtype]
        specs[name] = safetensors.TensorSpec(
            dtype=FRAMEWORK_NAMES[dtype],
            shape=shape,
            data_ptr=memory.ctypes.data,
            data_len=size // 8,
        )
    return safetensors.serialize(specs, metadata)


def test_a_built_header_equals_safetensors_to_the_byte():
    rng = random.Random("builds")
    memory = np.zeros(1 << 24, np.uint8)
    written = 0
    for _ in range(200):
        tensors = {
            name: (dtype, shape if dtype != "F4" else (shape or (2,)))
            for name, (dtype, shape) in random_tensors(rng).items()
        }
        # Without tensors safetensors 0.8.0 writes {},"__metadata__":{}}, which it refuses
        # to read.
        metadata = random_metadata(rng) if tensors else None
        listed = [
            (name, dtype, header_shape(dtype, shape))
            for name, (dtype, shape) in tensors.items()
        ]
        header, layout = build(listed, metadata)
        expected = serialized(tensors, metadata, memory)
        assert header == expected[: len(header)]
        assert len(header) + layout.data_bytes == len(expected)
        assert layout == parse(header[8:], len(expected))
        assert layout.data_start == len(header)
        written += len(tensors)
    assert written > 500


def test_empty_metadata_of_no_tensors_can_be_read():
    header, layout = build([], {})
    assert parse(header[8:], len(header)) == layout
    assert difference(header) is None


def test_several_keys_of_metadata_equal_safetensors():
    metadata = {f"key {n}": f"value {n}" for n in range(9)}
    header, layout = build([], metadata)
    theirs = safetensors.serialize({}, metadata)
    assert len(header) == len(theirs)
    assert json.loads(header[8:]) == json.loads(theirs[8:])
    assert parse(header[8:], len(header)).metadata == layout.metadata == metadata


def test_pages_come_first_and_begin_at_pages():
    rng = random.Random("pages")
    whole_pages = 0
    for _ in range(100):
        listed = [
            (name, dtype, header_shape(dtype, (*shape, 2)))
            for name, (dtype, shape) in random_tensors(rng).items()
        ]
        metadata = random_metadata(rng)
        header, layout = build(listed, metadata, align=PAGE)
        assert len(header) % PAGE == 0
        content = header + bytes(layout.data_bytes)
        assert layout == parse(header[8:], len(content))
        if len(content) < 1 << 22:
            assert difference(content) is None
        sizes = [each.end - each.begin for each in layout.tensors]
        paged = [size % PAGE == 0 for size in sizes]
        assert paged == sorted(paged, reverse=True)
        for each, is_paged in zip(layout.tensors, paged, strict=True):
            assert not is_paged or each.begin % PAGE == 0
            whole_pages += is_paged and each.end > each.begin
        assert {each[:3] for each in layout.tensors} == {*listed}
        order = {each.name: place for place, each in enumerate(build(listed)[1].tensors)}
        for kind in (True, False):
            places = [
                order[each.name]
                for each, is_paged in zip(layout.tensors, paged, strict=True)
                if is_paged == kind
            ]
            assert places == sorted(places)
    assert whole_pages > 50


@pytest.mark.parametrize("align", [0, 1, 16, 512, 8192, None])
def test_another_alignment_is_refused(align):
    with pytest.raises(ValueError, match=f"^align is {align}; it must be 8 or 4096$"):
        build([], align=align)


# Arguments of build(), and of the package for the same tensors: dtype, shape and metadata,
# or None if the package writes a file that cannot be read.
REFUSED = {
    "a name that is no string": ((1, "U8", (1,)), None),
    "bytes for a name": ((b"a", "U8", (1,)), None),
    "a surrogate in a name": (("\ud800", "U8", (1,)), None),
    "a negative extent": (("a", "U8", (-1,)), None),
    "a float": (("a", "U8", (1.0,)), None),
    "too large an extent": (("a", "U8", (2**64,)), None),
    "too many elements": (("a", "U8", (2**63, 2, 0)), None),
    "too many bits": (("a", "F64", (2**60,)), None),
    "half a byte": (("a", "F4", ()), None),
    "a number in metadata": (("a", "U8", (1,)), {"a": 1}),
    "a number for a key": (("a", "U8", (1,)), {1: "a"}),
    "a surrogate in metadata": (("a", "U8", (1,)), {"a": "\ud800"}),
    "pairs for metadata": (("a", "U8", (1,)), [("a", "b")]),
}


def serialized_as(name, dtype, shape, metadata, size):
    """Return the file that the package makes of one tensor."""
    memory = np.zeros(8, np.uint8)
    spec = safetensors.TensorSpec(
        dtype=FRAMEWORK_NAMES[dtype],
        shape=shape,
        data_ptr=memory.ctypes.data,
        data_len=size,
    )
    return safetensors.serialize({name: spec}, metadata)


@pytest.mark.parametrize("what", REFUSED)
def test_unwritable_tensors_are_refused_with_safetensors_messages(what):
    (name, dtype, shape), metadata = REFUSED[what]
    with pytest.raises(Exception) as theirs:  # noqa: PT011, by its words below
        serialized_as(name, dtype, shape, metadata, 0 if "too many" in what else 1)
    with pytest.raises(Exception) as ours:  # noqa: PT011
        build([(name, dtype, shape)], metadata)
    assert type(ours.value).__name__ == type(theirs.value).__name__
    wanted = str(theirs.value).removeprefix("argument 'shape': ")
    assert str(ours.value) == wanted


def test_a_header_that_could_not_be_read_is_not_written():
    with pytest.raises(SafetensorError, match="is named __metadata__"):
        build([("__metadata__", "U8", (1,))])
    with pytest.raises(ValueError, match="two tensors have the name 'a'"):
        build([("a", "U8", (1,)), ("a", "U8", (1,))])
    with pytest.raises(SafetensorError, match='Unknown dtype "F128" of tensor `a`'):
        build([("a", "F128", (1,))])
    with pytest.raises(SafetensorError, match="overflow computing buffer size"):
        build([(str(n), "U8", (2**61 - 1,)) for n in range(9)])


@pytest.mark.parametrize("align", [8, PAGE])
def test_the_same_limit_applies_to_written_and_read_headers(align):
    room = _header.HEADER_BYTES_MAX - len('{"__metadata__":{"":""}}')
    room -= (_header.HEADER_BYTES_MAX + 8) % align
    header, _ = build([], {"": "x" * room}, align=align)
    assert header_bytes(header[:8], len(header)) == len(header) - 8
    with pytest.raises(SafetensorError, match="Error while serializing: header too large"):
        build([], {"": "x" * (room + 1)}, align=align)


def test_the_dtypes_are_those_of_safetensors():
    with pytest.raises(safetensors.SafetensorError) as unknown:
        safetensors.TensorSpec(dtype="float128", shape=(), data_ptr=0, data_len=0)
    assert str(unknown.value).endswith(", ".join(FORMAT_NAMES))
    with pytest.raises(SafetensorError) as ours:
        header_dtype("float128")
    assert str(ours.value) == str(unknown.value)
    for name, dtype in FORMAT_NAMES.items():
        spec = safetensors.TensorSpec(dtype=name, shape=(3,), data_ptr=0, data_len=0)
        assert (spec.dtype, tuple(spec.shape)) == (dtype, header_shape(dtype, (3,)))
        assert header_dtype(name) == dtype
        assert framework_shape(dtype, spec.shape) == (3,)
    known = read_by_nvmeio(file_of(entry_with(dtype='"x"')))[1]
    with pytest.raises(safetensors.SafetensorError) as theirs:
        safetensors.deserialize(file_of(entry_with(dtype='"x"')))
    # This error lists all dtypes, in the order by which tensors are sorted.
    assert known == str(theirs.value)


def sample_of(dtype):
    """Return a file with a tensor of 24 bytes, and the shape in its header."""
    shape = (24 * 8 // BITS[dtype],)
    header, layout = build([("a", dtype, shape)])
    return header + bytes(layout.data_bytes), shape


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("framework", ["np", "pt"])
def test_a_dtype_is_handled_as_by_safetensors(dtype, framework, tmp_path):
    if framework == "pt":
        pytest.importorskip("torch")
    content, shape = sample_of(dtype)
    (tmp_path / "file").write_bytes(content)
    ours = theirs = None
    with safetensors.safe_open(tmp_path / "file", framework) as file:
        try:
            tensor = file.get_tensor("a")
        except Exception as error:  # any error: ours must be the same
            theirs = (type(error).__name__, str(error))
        else:
            theirs = (tensor.dtype, tuple(tensor.shape))
    try:
        known = (numpy_dtype if framework == "np" else torch_dtype)(dtype)
        ours = (known, framework_shape(dtype, shape))
    except Exception as error:
        ours = (type(error).__name__, str(error))
    assert ours == theirs


def test_an_odd_number_of_f4_has_no_shape_in_torch():
    message = r"divisible by 2 in torch: got \[4, 3\]$"
    with pytest.raises(SafetensorError, match=message):
        framework_shape("F4", (4, 3))
