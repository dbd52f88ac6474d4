"""Whole .npy files: save() writes what numpy would write, and load() reads it."""

import errno
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import nvmeio
from array_samples import DTYPES, noise, numbers
from helpers import MIB
from index_strategies import INVENTED, assert_same, shapes
from nvmeio import ArrayFile


@INVENTED
@given(shapes(), st.sampled_from(sorted(DTYPES)), st.booleans())
def test_a_saved_array_is_loaded(tmp_path, shape, dtype, fortran):
    expected = noise(shape, DTYPES[dtype])
    if fortran:
        expected = np.asfortranarray(expected)
    nvmeio.save(tmp_path / "array", expected)
    assert_same(np.load(tmp_path / "array"), expected)
    assert_same(nvmeio.load(tmp_path / "array"), expected)
    np.save(tmp_path / "other.npy", expected)
    assert_same(nvmeio.load(tmp_path / "other.npy"), np.load(tmp_path / "other.npy"))


@pytest.mark.parametrize(
    "array",
    [
        numbers((7, 6))[::2, ::-1],
        numbers((2, 3, 4)).T,
        noise((9,), "M8[s]")[::2],
        [[1, 2], [3, 4]],
        np.float32(2.5),
        numbers((3 * MIB,), "u1"),
    ],
    ids=["strided", "transposed", "dates", "list", "scalar", "large"],
)
@pytest.mark.parametrize("sync", [False, True])
def test_any_array_is_saved_in_c_order(path, array, sync):
    nvmeio.save(os.fsencode(path), array, sync=sync)
    assert_same(
        nvmeio.load(str(path)), np.ascontiguousarray(array).reshape(np.shape(array))
    )
    with ArrayFile(path) as found:
        assert found.shape == np.shape(array)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_gaps_between_the_fields_of_records_are_kept(path):
    """Or memory of the process would get into the file."""
    record = np.dtype([("flag", "i1"), ("value", "<f8")], align=True)
    raw = noise((30 * 20 * record.itemsize,), "u1").tobytes()
    table = np.ndarray((30, 20), record, raw, order="F")
    expected = table.view("V16").tobytes()
    nvmeio.save(path, table)
    assert nvmeio.load(path).tobytes() == expected
    array = ArrayFile.create(path, (30, 20), record, overwrite=True)
    array[:] = table
    assert nvmeio.load(path).tobytes() == expected


def test_only_regular_files_are_replaced(folder):
    os.mkfifo(folder / "pipe")
    for path, number in ((folder, errno.EISDIR), (folder / "pipe", errno.EINVAL)):
        with pytest.raises(OSError, match=str(folder)) as caught:
            nvmeio.save(path, np.arange(3))
        assert (caught.value.errno, caught.value.filename) == (number, str(path))
    assert (folder / "pipe").is_fifo()


def test_objects_are_not_saved(path):
    for array in (np.array([None]), object(), [{}]):
        with pytest.raises(TypeError, match="are Python objects"):
            nvmeio.save(path, array)
    assert not path.exists()
