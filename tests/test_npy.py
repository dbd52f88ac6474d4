"""Headers of .npy files are read as numpy reads them, or refused."""

import importlib
import os
import tracemalloc

import numpy as np
import pytest
from numpy.lib import format as npy

import nvmeio
from array_samples import noise, numbers, write_npy
from helpers import MIB, call_in_child, left_open, need_ml_dtypes
from index_strategies import assert_same
from nvmeio import ArrayFile


def header_saying(dtype, shape):
    """Return a header, right or wrong, as bytes."""
    text = f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}}}\n"
    return text.encode()


MALFORMED = {
    "brackets": (b"(" * 5000, ""),
    "no dictionary": (b"[1]\n", "not a dictionary"),
    "a key that is none": (b"{[]: 1}\n", "unhashable"),
    "code": (b"__import__('os')\n", "malformed"),
    "another encoding": (b"\xff\n", "can't decode"),
    "a negative extent": (header_saying("'<f4'", "(-1,)"), "no extent may be negative"),
    "a boolean extent": (header_saying("'<f4'", "(True,)"), "an extent is True"),
    "a subarray": (header_saying("('<f4', (2,))", "(0,)"), "has a shape"),
    "text of no length": (header_saying("'|S0'", "(3,)"), "text of length 0"),
    "a unit of no length": (header_saying("'<M8[0s]'", "(3,)"), "unit of length 0"),
    "one in a field": (
        header_saying("[('a', '<i4'), ('b', [('c', '<m8[0D]', (2,))])]", "(3,)"),
        "unit of length 0",
    ),
    "half a subarray": (header_saying("('<f4',)", "(3,)"), "out of range"),
    "many axes": (header_saying("'<f4'", (1,) * 65), "dimension"),
    "too long beside 0": (header_saying("'<f4'", (1 << 62, 4, 0)), "too large"),
    # numpy would divide by it and crash.
    "a divisor of 0": (header_saying("'<M8[s/0]'", "(3,)"), "divided by 0"),
    "as numpy keeps it": (header_saying("'M8[s/4294967296]'", "()"), "divided by 4294"),
    "below what a long has": (
        header_saying(f"'<M8[s/-{10**20}]'", "(3,)"),
        "divided by -1000",
    ),
    "escaped": (header_saying(r"'<M8[s\x2f' '-0]'", "(3,)"), "divided by -0"),
}


def test_a_header_that_numpy_does_not_read_either_is_named_as_such(tmp_path):
    fields = [(f"field {number:03}", "f4") for number in range(500)]
    np.save(tmp_path / "a.npy", np.zeros(3, fields))
    words = r"has a header of 1\d{4} bytes; the limit is 10000; numpy.load\(max_header"
    with pytest.raises(ValueError, match=words):
        nvmeio.load(tmp_path / "a.npy")
    with pytest.raises(ValueError, match="max_header_size"):
        np.load(tmp_path / "a.npy")


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_every_version_of_the_format_is_read(path, version):
    dtype = [("größe", "f4")] if version != (3, 0) else [("größe\\大", "f4")]
    expected = noise((5,), dtype)
    write_npy(path, expected, version)
    with ArrayFile(path) as array:
        assert_same(array[:], expected)
    assert_same(nvmeio.load(path), expected)


@pytest.mark.parametrize("failures", [1, 99, 100])
def test_a_header_is_parsed_again_when_threads_disturb_the_parser(
    path, monkeypatch, failures
):
    """ast.literal_eval() of CPython 3.11 raises SystemError then; numpy calls it."""
    # A shape of its own, because headers that were parsed are remembered.
    array = np.zeros((failures, 3, 1, 7), np.uint8)
    nvmeio.save(path, array)
    parse, calls = npy.read_array_header_2_0, []

    def fail_first(*args, **options):
        calls.append(1)
        if len(calls) <= failures:
            raise SystemError("AST constructor recursion depth mismatch")
        return parse(*args, **options)

    monkeypatch.setattr(npy, "read_array_header_2_0", fail_first)
    if failures < 100:
        assert_same(nvmeio.load(path), array)
    else:
        with pytest.raises(SystemError, match="AST constructor"):
            nvmeio.load(path)


def test_a_header_of_many_non_ascii_letters_is_read(path):
    """As escapes its characters would be longer than in the file."""
    dtype = [(chr(0x4E00 + number) * 16, "u1") for number in range(100)]
    expected = noise((5,), dtype)
    nvmeio.save(path, expected)
    assert_same(np.load(path), expected)
    assert_same(nvmeio.load(path), expected)


def test_warnings_of_headers_name_the_line_of_the_caller(path):
    """Of what Python 2 wrote, as numpy does too, and of what is not saved."""
    header = header_saying("[('5L', '<i4'), (\"it's 6L\", '<i4')]", "(2L, 3L)")
    content = noise((2, 3), [("5L", "<i4"), ("it's 6L", "<i4")])
    head = npy.magic(1, 0) + len(header).to_bytes(2, "little") + header
    path.write_bytes(head + content.tobytes())
    # Each time, although headers that were parsed are remembered.
    for call in (nvmeio.load, ArrayFile, nvmeio.load):
        with pytest.warns(UserWarning, match="data' has a header of Python 2") as warned:
            found = call(path)
        assert [each.filename for each in warned] == [__file__]
        assert_same(found[...], content)
    plain, nested = np.dtype("i4", metadata={"unit": "m"}), np.dtype("i4")
    for dtype in (plain, np.dtype([("a", nested), ("b", [("c", plain, (2,))])])):
        array = noise((3,), dtype)
        with pytest.warns(
            UserWarning, match="metadata of the dtype .* not saved"
        ) as warned:
            nvmeio.save(path, array)
        assert [each.filename for each in warned] == [__file__]
        assert_same(np.load(path), array)


@pytest.mark.parametrize(("header", "words"), MALFORMED.values(), ids=MALFORMED)
def test_an_invalid_header_is_refused(path, header, words):
    path.write_bytes(npy.magic(3, 0) + len(header).to_bytes(4, "little") + header)
    for call in (ArrayFile, nvmeio.load):
        with pytest.raises(ValueError, match=rf"data' is not a \.npy file: .*{words}"):
            call(path)
    assert left_open(path.parent) == []


def test_a_truncated_header_is_refused(path):
    header = header_saying("'<f4'", "()")
    length = len(header) + 1
    path.write_bytes(npy.magic(3, 0) + length.to_bytes(4, "little") + header)
    with pytest.raises(ValueError, match=f"ends within its header, of {length} bytes"):
        ArrayFile(path)


@pytest.mark.parametrize("version", [(2, 0), (3, 0)])
def test_a_small_file_takes_little_memory_whatever_its_header_says(path, version):
    path.write_bytes(npy.magic(*version) + b"\xff\xff\xff\xff{'descr': ")
    tracemalloc.start()
    with pytest.raises(ValueError, match="4294967295 bytes; the limit is"):
        ArrayFile(path)
    taken = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert taken < MIB


def test_units_of_time_may_be_divided(path):
    header = header_saying("'<M8[s/1000]'", "(3,)")
    length = len(header).to_bytes(4, "little")
    path.write_bytes(npy.magic(3, 0) + length + header + bytes(24))
    assert nvmeio.load(path).dtype == "<M8[ms]"


def test_a_file_that_is_shorter_than_its_header_says_is_refused(path):
    write_npy(path, numbers((10, 4)))
    size = path.stat().st_size
    os.truncate(path, size - 1)
    for call in (ArrayFile, nvmeio.load):
        with pytest.raises(ValueError, match=f"has {size - 1} bytes; .* ends at {size}"):
            call(path)


@pytest.mark.parametrize("array", [np.ma.ones(3), [np.ma.ones(3)], np.ma.masked], ids=str)
def test_a_masked_array_is_not_saved(path, array):
    with pytest.raises(TypeError, match="its mask would be lost"):
        nvmeio.save(path, array)
    assert list(path.parent.iterdir()) == []


NOT_RESTORED = ["bfloat16", "float8_e5m2", "float8_e4m3fn", "float8_e8m0fnu", "int4"]


@need_ml_dtypes
@pytest.mark.parametrize("name", NOT_RESTORED)
@pytest.mark.parametrize("is_field", [False, True])
def test_a_dtype_that_numpy_cannot_restore_is_not_saved(path, name, is_field):
    call_in_child(check_not_saved, path, name, is_field)


def check_not_saved(path, name, is_field):
    dtype = np.dtype(getattr(importlib.import_module("ml_dtypes"), name))
    if is_field:
        dtype = np.dtype([("number", "i4"), ("inner", [("part", dtype, (2,))])])
    for save in (
        lambda: nvmeio.save(path, np.zeros(3, dtype)),
        lambda: ArrayFile.create(path, (3,), dtype),
    ):
        with pytest.raises(TypeError, match=rf"a \.npy file cannot name {name}: "):
            save()
        assert list(path.parent.iterdir()) == []
    with ArrayFile.create(path, (3,), dtype, raw=True) as array:
        array[1:] = np.ones(2, dtype)
        assert array[...].dtype == dtype
        assert array[...].tobytes() == bytes(dtype.itemsize) + np.ones(2, dtype).tobytes()
