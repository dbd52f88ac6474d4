"""Headers of safetensors files: which are refused, and that others are read alike."""

import json
import random
import re
import sys
import tracemalloc

import numpy as np
import pytest

pytest.importorskip("safetensors")

import safetensors

from nvmeio._safetensors import header as _header
from nvmeio._safetensors.header import SafetensorError, build, header_bytes, parse
from nvmeio._tensors.dtypes import (
    BITS,
    FORMAT_NAMES,
    FRAMEWORK_NAMES,
    framework_shape,
    header_dtype,
    header_shape,
    numpy_dtype,
    torch_dtype,
)

PAGE = 4096
DATA = bytes(range(1, 5))
ENTRY = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
EMPTY = '"z":{"dtype":"U8","shape":[0],"data_offsets":[%d,%d]}'
HUGE = "9" * 5000


def file_of(header, data=DATA, *, length=None):
    """Return the bytes of a file, whatever its header says."""
    if isinstance(header, str):
        header = header.encode()
    claimed = len(header) if length is None else length
    return claimed.to_bytes(8, "little") + header + data


def entry_with(**fields):
    """Return a header of one tensor, `a`, with some of its fields replaced."""
    ordinary = {"dtype": '"F32"', "shape": "[1]", "data_offsets": "[0,4]"}
    inside = ",".join(f'"{key}":{value}' for key, value in (ordinary | fields).items())
    return f'{{"a":{{{inside}}}}}'


def empty_with(shape):
    """Return a file of one empty tensor."""
    return file_of(entry_with(shape=shape, data_offsets="[0,0]"), b"")


# Files that safetensors and nvmeio read alike.
TAKEN = {
    "an ordinary one": file_of(entry_with()),
    "spaces behind": file_of(entry_with() + " " * 4000),
    "a newline and a tab behind": file_of(entry_with() + "\r\n\t"),
    "whitespace within": file_of(entry_with().replace(":", " :\n ")),
    "no tensors": file_of("{}", b""),
    "metadata alone": file_of('{"__metadata__":{"a":"b"}}', b""),
    "null for metadata": file_of('{"__metadata__":null}', b""),
    "metadata last": file_of(entry_with()[:-1] + ',"__metadata__":{"a":"b"}}'),
    "metadata by an escape": file_of(r'{"\u005f_metadata__":{"a":"b"}}', b""),
    "an unknown field": file_of(entry_with(x='{"y":[null,true,-1.5e3,""]}')),
    "fields in another order": file_of(
        '{"a":{"data_offsets":[0,4],"shape":[1],"dtype":"F32"}}'
    ),
    "an empty name": file_of(f'{{"":{ENTRY}}}'),
    "a null in a name": file_of(rf'{{"a\u0000":{ENTRY}}}'),
    "a pair of surrogates": file_of(rf'{{"\ud83d\ude00":{ENTRY}}}'),
    "an escaped backslash and a u": file_of(rf'{{"\\ud83d":{ENTRY}}}'),
    "1000 brackets in a name": file_of(f'{{"{"[" * 1000}\\"\\\\":{ENTRY}}}'),
    "2^63 and 0": empty_with(f"[{2**63},0]"),
    "nothing before the rest": file_of(f'{{{EMPTY % (0, 0)},"a":{ENTRY}}}'),
    "nothing behind the rest": file_of(f'{{{EMPTY % (4, 4)},"a":{ENTRY}}}'),
    "whole bytes of F4": file_of(entry_with(dtype='"F4"', shape="[2,4]")),
    "whole bytes of F6": file_of(
        entry_with(dtype='"F6_E2M3"', shape="[4]", data_offsets="[0,3]"), b"123"
    ),
}
# Files that both refuse, and what nvmeio's message has.
REFUSED = {
    "nothing": (b"", "header too small"),
    "7 bytes": (b"1234567", "header too small"),
    "length 0": (file_of(""), "must start with"),
    "length over the limit": (file_of("{}", b"", length=100_000_001), "too large"),
    "the largest length": (file_of("{}", b"", length=2**64 - 1), "too large"),
    "one byte too few": (file_of("{}", b"", length=3), "invalid header length"),
    "no tensors, but data": (file_of("{}"), "not fully covered"),
    "an array": (file_of("[]", b""), "must start with"),
    "a byte order mark": (file_of("\ufeff" + entry_with()), "must start with"),
    "text behind": (file_of(entry_with() + "{}"), "Extra data"),
    "a null behind": (file_of(entry_with() + "\0"), "Extra data"),
    "a trailing comma": (file_of(f'{{"a":{ENTRY},}}'), "invalid JSON"),
    "a number in metadata": (file_of('{"__metadata__":{"a":1}}', b""), "to strings"),
    "an array of metadata": (file_of('{"__metadata__":[]}', b""), "to strings"),
    "a tensor called so": (file_of(f'{{"__metadata__":{ENTRY}}}'), "to strings"),
    "metadata twice": (file_of('{"__metadata__":{},"__metadata__":{}}', b""), "twice"),
    "a field twice": (file_of(entry_with(x='1,"shape":[1]')), "'shape' comes twice"),
    "no entry": (file_of('{"a":1}'), "tensor 'a' must have"),
    "no shape": (file_of('{"a":{"dtype":"F32","data_offsets":[0,4]}}'), "a shape"),
    "an unknown dtype": (file_of(entry_with(dtype='"F128"')), "a known dtype"),
    "a list for a dtype": (file_of(entry_with(dtype='["F32"]')), "a known dtype"),
    "a raw newline in a name": (file_of(f'{{"a\n":{ENTRY}}}'), "invalid JSON"),
    "half a pair of surrogates": (file_of(rf'{{"\ud83d":{ENTRY}}}'), "invalid UTF-8"),
    "half a pair in metadata": (
        file_of(r'{"__metadata__":{"a":"\ude00"}}', b""),
        "invalid UTF-8",
    ),
    "UTF-8 that is none": (file_of(b'{"\xff":1}'), "invalid UTF-8"),
    "a surrogate in UTF-8": (file_of(b'{"a\xed\xa0\x80":1}', b""), "invalid UTF-8"),
    "a float": (file_of(entry_with(shape="[1.0]")), "a shape"),
    "a boolean": (file_of(entry_with(shape="[true]")), "a shape"),
    "a string": (file_of(entry_with(shape='"1"')), "a shape"),
    "an empty string": (empty_with('""'), "a shape"),
    "another script's digit": (file_of(entry_with(shape="[\u0661]")), "invalid JSON"),
    "three offsets": (file_of(entry_with(data_offsets="[0,4,4]")), "two data_offsets"),
    "a negative extent": (file_of(entry_with(shape="[-1]")), "'-1' is not from 0"),
    "minus zero": (file_of(entry_with(data_offsets="[-0,4]")), "'-0' is not from 0"),
    "5000 digits": (file_of(entry_with(shape=f"[{HUGE}]")), "is not from 0"),
    "NaN": (file_of(entry_with(x="NaN")), "NaN"),
    "Infinity": (file_of(entry_with(x="-Infinity")), "Infinity"),
    "an extent of 2^64": (file_of(entry_with(shape=f"[{2**64}]")), "overflow"),
    "0 and 2^64": (empty_with(f"[0,{2**64}]"), "overflow"),
    "too many elements": (empty_with(f"[{2**63},2,0]"), "overflow"),
    "too many bits": (file_of(entry_with(shape=f"[{2**62}]")), "overflow"),
    "too long": (file_of(entry_with(), DATA + b"5"), "not fully covered"),
    "too short": (file_of(entry_with(), DATA[:3]), "not fully covered"),
    "a hole": (file_of(entry_with(data_offsets="[1,5]"), DATA + b"5"), "invalid offset"),
    "an overlap": (file_of(f'{{"a":{ENTRY},"b":{ENTRY}}}'), "invalid offset"),
    "an end before its begin": (file_of(entry_with(data_offsets="[4,0]")), "offset"),
    "nothing amid the rest": (file_of(f'{{{EMPTY % (2, 2)},"a":{ENTRY}}}'), "offset"),
    "another size": (file_of(entry_with(shape="[2]")), "invalid shape"),
    "another size of an earlier shape": (
        file_of(f'{{"a":{ENTRY},"b":{ENTRY.replace("[0,4]", "[4,9]")}}}', DATA + DATA),
        "invalid shape",
    ),
    "half a byte": (
        file_of(entry_with(dtype='"F4"', shape="[7]", data_offsets="[0,3]"), DATA[:3]),
        "byte boundary",
    ),
}
# Files that only safetensors takes.  The format's README forbids the first ones, and does
# not mention the others.
STRICTER = {
    "whitespace before": file_of(" " + entry_with()),
    "a name twice": file_of(f'{{"a":{ENTRY},"a":{ENTRY}}}'),
    "a key of metadata twice": file_of('{"__metadata__":{"a":"b","a":"c"}}', b""),
    "an entry as an array": file_of('{"a":["F32",[1],[0,4]]}'),
    "a dtype as an object": file_of(entry_with(dtype='{"F32":null}')),
}


def read_by_safetensors(content):
    """Return the tensors and metadata of a file, or None if the package refuses it."""
    try:
        found = safetensors.deserialize(content)
    except safetensors.SafetensorError:
        return None
    tensors = {
        name: (each["dtype"], tuple(each["shape"]), bytes(each["data"]))
        for name, each in found
    }
    header = content[8 : 8 + int.from_bytes(content[:8], "little")]
    return tensors, json.loads(header).get("__metadata__")


def layout_of(content):
    """Return the layout of a file; raise SafetensorError if it is invalid."""
    length = header_bytes(content[:8], len(content))
    return parse(content[8 : 8 + length], len(content))


def read_by_nvmeio(content):
    """Return the tensors and metadata of a file, or None if nvmeio refuses it."""
    try:
        layout = layout_of(content)
    except SafetensorError:
        return None
    assert [*layout.by_name.values()] == [*layout.tensors]
    data = content[layout.data_start :]
    assert len(data) == layout.data_bytes
    tensors = {t.name: (t.dtype, t.shape, data[t.begin : t.end]) for t in layout.tensors}
    return tensors, layout.metadata


@pytest.mark.parametrize("what", TAKEN)
def test_a_valid_file_is_read_as_by_safetensors(what):
    found = read_by_nvmeio(TAKEN[what])
    assert found is not None
    assert found == read_by_safetensors(TAKEN[what])


@pytest.mark.parametrize("what", REFUSED)
def test_an_invalid_file_is_refused_by_both(what):
    content, words = REFUSED[what]
    assert read_by_safetensors(content) is None
    with pytest.raises(SafetensorError, match=re.escape(words)) as refused:
        layout_of(content)
    assert len(str(refused.value)) < 2000


@pytest.mark.parametrize("what", STRICTER)
def test_odd_forms_are_refused(what):
    assert read_by_safetensors(STRICTER[what]) is not None
    assert read_by_nvmeio(STRICTER[what]) is None


TOKENS = (
    *('{"a":', "}", "[", "]", ",", ":", '"', "\\", '\\"', "\\u0000", "é", " ", "\n", "\0"),
    *("0", "1", "2", "8", "-1", "1.0", "1e0", "01", str(2**63), str(2**64), "9" * 25),
    *("null", "true", '"F32"', '"F4"', '"__metadata__"', '"dtype"', '"shape":[1],', "[0]"),
)


def changed(rng, content):
    """Return a file with a random change."""
    length = 8 + int.from_bytes(content[:8], "little")
    header, data = content[8:length], content[length:]
    spots = [*re.finditer(rb'\d+|"[^"]*"|[][{}:,]', header)]
    spot = rng.choice(spots)
    drawn = rng.randrange(6)
    if drawn == 0:
        at = rng.randrange(len(header))
        header = (
            header[:at] + bytes([header[at] ^ 1 << rng.randrange(8)]) + header[at + 1 :]
        )
    elif drawn == 1:
        header = header[: spot.start()] + header[rng.choice(spots).start() :]
    elif drawn == 2:
        token = rng.choice(TOKENS).encode()
        header = header[: spot.start()] + token + header[spot.start() :]
    elif drawn < 5:
        token = rng.choice([rng.choice(TOKENS).encode(), rng.choice(spots).group()])
        header = header[: spot.start()] + token + header[spot.end() :]
    else:
        data = rng.choice([data + b"x", data[:-1]])
    return file_of(header, data)


def test_a_changed_file_is_refused_or_read_as_by_safetensors():
    rng = random.Random("headers")
    taken = 0
    for _ in range(200):
        tensors, metadata = random_tensors(rng), random_metadata(rng)
        listed = [(name, *each) for name, each in tensors.items()]
        header, layout = build(listed, metadata)
        content = header + rng.randbytes(layout.data_bytes)
        assert read_by_nvmeio(content) == read_by_safetensors(content) != None  # noqa: E711
        for _ in range(20):
            other = changed(rng, content)
            found = read_by_nvmeio(other)
            if found is not None:
                assert found == read_by_safetensors(other), other
                taken += 1
    assert taken > 200


def test_deep_nesting_is_refused_at_any_recursion_limit():
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1 << 30)
    nested = "[" * 300_000
    try:
        for text in (
            entry_with(x=nested + "]" * len(nested)),
            entry_with(x=nested),
            '{"":' * 300_000,
            # The brackets in strings do not close the others.
            '{"[][]}":' * 300_000,
        ):
            with pytest.raises(SafetensorError, match="nested deeper than 32"):
                parse(text.encode(), 0)
    finally:
        sys.setrecursionlimit(limit)
    # Side by side they are not deep.
    many = entry_with(x=f'[{"[{}]," * 20_000}"[[[\\"[[["]')
    assert read_by_nvmeio(file_of(many)) == read_by_safetensors(file_of(many)) is not None


@pytest.mark.parametrize("levels", [40, 1500, 9000])
def test_deep_nesting_is_refused_whatever_python_allows(levels):
    for text in (entry_with(x="[" * levels + "]" * levels), '{"":' * levels):
        with pytest.raises(SafetensorError, match="nested deeper than 32"):
            parse(text.encode(), 0)


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
    """Return tensors in any order, with any dtype and with shapes as in the header."""
    tensors = {}
    for _ in range(rng.randrange(8)):
        dtype = rng.choice([*FRAMEWORK_NAMES])
        shape = tuple(rng.choice((0, 1, 2, 3, 512)) for _ in range(rng.randrange(3)))
        shape = header_shape(dtype, shape if dtype != "F4" else (shape or (2,)))
        name = rng.choice(("", "a", "b", "é", "😀", '"', "\\", "\n\x00\x1f", "\x7f", "/"))
        tensors[name + str(rng.randrange(10))] = (dtype, shape)
    return tensors


def random_metadata(rng):
    """Return metadata of at most one key, because safetensors orders keys randomly."""
    return rng.choice((None, {}, {"format": "pt"}, {'"é\n': "\\\u2028\x01"}))


def serialized(tensors, metadata, memory):
    """Return the file that the package makes of tensors, whose bytes are in `memory`."""
    specs = {
        name: safetensors.TensorSpec(
            dtype=FRAMEWORK_NAMES[dtype],
            shape=framework_shape(dtype, shape),
            data_ptr=memory.ctypes.data,
            data_len=int(np.prod(shape, dtype=object)) * BITS[dtype] // 8,
        )
        for name, (dtype, shape) in tensors.items()
    }
    return safetensors.serialize(specs, metadata)


def test_a_built_header_equals_safetensors_to_the_byte():
    rng = random.Random("builds")
    memory = np.zeros(1 << 22, np.uint8)
    for _ in range(200):
        tensors = random_tensors(rng)
        # Without tensors safetensors 0.8.0 writes {},"__metadata__":{}}, which it refuses
        # to read.
        metadata = random_metadata(rng) if tensors else None
        listed = [(name, *each) for name, each in tensors.items()]
        header, layout = build(listed, metadata)
        expected = serialized(tensors, metadata, memory)
        assert header == expected[: len(header)]
        assert len(header) + layout.data_bytes == len(expected)
        assert layout == parse(header[8:], len(expected))
    several = {f"key {n}": f"value {n}" for n in range(9)}
    header, _ = build([], several)
    assert len(header) == len(safetensors.serialize({}, several))
    assert parse(header[8:], len(header)).metadata == several


def test_pages_come_first_and_begin_at_pages():
    rng = random.Random("pages")
    whole_pages = 0
    for _ in range(100):
        listed = [
            (name, dtype, (*shape, 8))
            for name, (dtype, shape) in random_tensors(rng).items()
        ]
        metadata = random_metadata(rng)
        header, layout = build(listed, metadata, align=PAGE)
        assert len(header) % PAGE == 0
        content = header + bytes(layout.data_bytes)
        assert layout == layout_of(content)
        assert read_by_nvmeio(content) == read_by_safetensors(content)
        paged = [(each.end - each.begin) % PAGE == 0 for each in layout.tensors]
        assert paged == sorted(paged, reverse=True)
        for each, is_paged in zip(layout.tensors, paged, strict=True):
            assert not is_paged or each.begin % PAGE == 0
            whole_pages += is_paged and each.end > each.begin
        assert {each[:3] for each in layout.tensors} == {*listed}
        # Otherwise the order is that of safetensors.
        order = {each.name: place for place, each in enumerate(build(listed)[1].tensors)}
        for kind in (True, False):
            places = [
                order[each.name]
                for each, is_paged in zip(layout.tensors, paged, strict=True)
                if is_paged == kind
            ]
            assert places == sorted(places)
    assert whole_pages > 30


@pytest.mark.parametrize(
    ("tensor", "metadata", "error", "words"),
    [
        ((1, "U8", (1,)), None, TypeError, "1 is the name"),
        (("\ud800", "U8", (1,)), None, UnicodeEncodeError, "surrogates"),
        (("__metadata__", "U8", (1,)), None, SafetensorError, "reserves"),
        (("a", "F128", (1,)), None, SafetensorError, "F128"),
        (("a", "U8", (-1,)), None, SafetensorError, "-1"),
        (("a", "U8", (1.0,)), None, TypeError, "float"),
        (("a", "U8", (2**64,)), None, SafetensorError, "overflow"),
        (("a", "F64", (2**60,)), None, SafetensorError, "overflow"),
        (("a", "F4", ()), None, SafetensorError, "byte boundary"),
        (("a", "U8", (1,)), {"a": 1}, TypeError, "metadata has 1"),
        (("a", "U8", (1,)), {1: "a"}, TypeError, "metadata has 1"),
        (("a", "U8", (1,)), {"a": "\ud800"}, UnicodeEncodeError, "surrogates"),
        (("a", "U8", (1,)), [("a", "b")], TypeError, "list"),
    ],
)
def test_what_cannot_be_read_is_not_written(tensor, metadata, error, words):
    with pytest.raises(error, match=words):
        build([tensor], metadata)


@pytest.mark.parametrize("count", [1, 0])
def test_two_tensors_of_one_name_are_not_written(count):
    with pytest.raises(ValueError, match="two tensors have the name 'a'"):
        build([("a", "U8", (count,)), ("a", "U8", (count,))])


@pytest.mark.parametrize("align", [0, 16, 8192, None, 8.0])
def test_another_alignment_is_refused(align):
    with pytest.raises(ValueError, match=f"^align is {align}; it must be 8 or 4096$"):
        build([], align=align)


@pytest.mark.parametrize("align", [8, PAGE])
def test_the_same_limit_applies_to_written_and_read_headers(align):
    room = _header.HEADER_BYTES_MAX - len('{"__metadata__":{"":""}}')
    room -= (_header.HEADER_BYTES_MAX + 8) % align
    header, _ = build([], {"": "x" * room}, align=align)
    assert header_bytes(header[:8], len(header)) == len(header) - 8
    with pytest.raises(SafetensorError, match="header too large"):
        build([], {"": "x" * (room + 1)}, align=align)


def test_the_dtypes_are_those_of_safetensors():
    with pytest.raises(safetensors.SafetensorError) as unknown:
        safetensors.TensorSpec(dtype="float128", shape=(), data_ptr=0, data_len=0)
    assert str(unknown.value).endswith(", ".join(FORMAT_NAMES))
    with pytest.raises(SafetensorError, match="float128"):
        header_dtype("float128")
    for name, dtype in FORMAT_NAMES.items():
        spec = safetensors.TensorSpec(dtype=name, shape=(3,), data_ptr=0, data_len=0)
        assert (spec.dtype, tuple(spec.shape)) == (dtype, header_shape(dtype, (3,)))
        assert header_dtype(name) == dtype
        assert framework_shape(dtype, spec.shape) == (3,)
    with pytest.raises(safetensors.SafetensorError) as theirs:
        safetensors.deserialize(file_of(entry_with(dtype='"x"')))
    # This error lists all dtypes, in the order by which tensors are sorted.
    assert ", ".join(f"`{dtype}`" for dtype in BITS) in str(theirs.value)


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("framework", ["np", "pt"])
def test_a_dtype_is_handled_as_by_safetensors(dtype, framework, tmp_path):
    if framework == "pt":
        pytest.importorskip("torch")
    shape = (24 * 8 // BITS[dtype],)
    header, layout = build([("a", dtype, shape)])
    (tmp_path / "file").write_bytes(header + bytes(layout.data_bytes))
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
