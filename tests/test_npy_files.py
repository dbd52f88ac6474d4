"""Whole .npy files: what was saved is loaded, and is what numpy would have written."""

import errno
import gc
import os
import resource
import stat
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import nvmeio
from array_samples import DTYPES, noise, numbers, write_npy
from helpers import MIB, limit
from index_strategies import INVENTED, assert_same, shapes
from nvmeio import ArrayFile


@INVENTED
@given(shapes(), st.sampled_from(sorted(DTYPES)), st.booleans())
def test_what_was_saved_is_loaded(tmp_path, shape, dtype, fortran):
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


def test_a_save_that_fails_leaves_the_old_file(path):
    expected = numbers((1000, 4, 25))
    write_npy(path, expected)
    with (
        limit(resource.RLIMIT_FSIZE, MIB),
        pytest.raises(OSError, match="data") as caught,
    ):
        nvmeio.save(path, np.ones(MIB))
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(path))
    assert_same(np.load(path), expected)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_the_target_of_a_link_is_replaced_not_the_link(folder):
    (folder / "far").mkdir()
    (folder / "link").symlink_to(folder / "far" / "data")
    nvmeio.save(folder / "link", np.arange(3))
    assert (folder / "link").is_symlink()
    assert_same(np.load(folder / "far" / "data"), np.arange(3))


def test_a_new_file_has_the_permissions_of_any(path):
    nvmeio.save(path, np.arange(3))
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask


def test_a_private_file_stays_private(path):
    nvmeio.save(path, np.arange(3))
    path.chmod(0o640)
    nvmeio.save(path, np.arange(9), sync=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert_same(nvmeio.load(path), np.arange(9))


def test_a_failed_save_is_told_once(path):
    """Both of its writes fail, and the second leaves no warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with (
            limit(resource.RLIMIT_FSIZE, 10),
            pytest.raises(OSError, match="data") as raised,
        ):
            nvmeio.save(path, np.zeros(MIB, "u1"))
        gc.collect()
    assert raised.value.errno == errno.EFBIG
    assert caught == []
    assert os.listdir(path.parent) == []


def test_what_is_no_file_is_not_replaced(folder):
    os.mkfifo(folder / "pipe")
    for path in (folder, folder / "pipe"):
        with pytest.raises(OSError, match="no regular file") as caught:
            nvmeio.save(path, np.arange(3))
        assert (caught.value.errno, caught.value.filename) == (errno.EINVAL, str(path))
    assert (folder / "pipe").is_fifo()


def test_objects_are_not_saved(path):
    for array in (np.array([None]), object(), [{}]):
        with pytest.raises(TypeError, match="are Python objects"):
            nvmeio.save(path, array)
    assert not path.exists()
