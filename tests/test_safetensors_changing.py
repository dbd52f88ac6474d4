"""Model files that change while they are read: an error, or the old bytes."""

import functools
import os
import re

import numpy as np
import pytest

pytest.importorskip("safetensors")

import safetensors.numpy

import nvmeio
import nvmeio.safetensors.numpy
from helpers import MIB, drop, need_direct
from model_samples import bits_of_all, in_flight
from nvmeio._native.region import FileMap
from nvmeio._safetensors import file as _file
from nvmeio._streams import reading
from nvmeio.safetensors import SafetensorError, load_sharded, safe_open

SIZE = 10 * MIB
CHANGED = r"{} has changed while it was read: it had {} bytes"


def overwrite(path):
    """Overwrite the last bytes; the size stays."""
    with open(path, "r+b") as file:
        file.seek(-MIB, os.SEEK_END)
        file.write(bytes(MIB))


def truncate(path):
    """Truncate the file to half its size."""
    os.truncate(path, SIZE // 2)


def empty(path):
    """Truncate the file to 0 bytes."""
    os.truncate(path, 0)


def append(path):
    """Extend the file."""
    with open(path, "ab") as file:
        file.write(b"more")


def append_and_set_back(path):
    """Extend the file, and restore its time of modification."""
    status = path.stat()
    append(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


CHANGES = [overwrite, truncate, empty, append, append_and_set_back]


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
    """Read in small parts, because the file is small."""
    monkeypatch.setattr(reading, "CHUNK_BYTES", 4 * MIB)


@pytest.fixture
def arrays():
    """Arrays of several chunks."""
    numbers = np.random.default_rng(1)
    return {f"{n:02}": numbers.integers(0, 256, SIZE // 20, np.uint8) for n in range(20)}


@pytest.fixture
def path(tmp_path, arrays):
    """The file of the arrays."""
    need_direct(tmp_path)
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(arrays, path)
    drop(path)
    return path


def replace(path, arrays):
    """Replace the file, by a rename, with other bytes of the same shapes."""
    other = {name: array ^ 255 for name, array in arrays.items()}
    safetensors.numpy.save_file(other, path.with_name("other"))
    os.rename(path.with_name("other"), path)


def once(change):
    """Return a progress function that changes the file after the first part."""
    done = []

    def progress(*_):
        if not done:
            done.append(change())

    return progress


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("way", ["load_file", "out", "load_sharded"])
def test_a_change_in_the_middle_is_an_error(
    path, arrays, default_engine, change, direct, way
):
    load, place = nvmeio.safetensors.numpy.load_file, path
    options = {"direct": direct, "progress": once(lambda: change(path))}
    size = path.stat().st_size
    if way == "out":
        options["out"] = {name: np.empty_like(array) for name, array in arrays.items()}
    elif way == "load_sharded":
        load, place = functools.partial(load_sharded, framework="np"), path.parent
    with pytest.raises(SafetensorError, match=CHANGED.format(re.escape(str(path)), size)):
        load(place, **options)
    assert in_flight() == 0


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("read_ahead", [0, 2 * MIB])
@pytest.mark.parametrize(
    ("direct", "mapped"), [(True, False), (False, False), (False, True)]
)
def test_a_change_between_tensors_is_an_error(path, change, read_ahead, direct, mapped):
    options = {"direct": direct, "mapped": mapped, "read_ahead": read_ahead}
    with safe_open(path, "np", **options) as file:
        names = file.offset_keys()
        for name in names[:3]:
            file.get_tensor(name)
        nvmeio.default_handle().drain()
        change(path)
        for read in (
            lambda: file.get_tensor(names[3]),
            lambda: file.get_tensor(names[19]),
            lambda: file.get_slice(names[4])[5:9],
            lambda: file.get_many({names[5]: slice(3, 8)}),
            file.get_tensors,
        ):
            with pytest.raises(SafetensorError, match="has changed"):
                read()
    assert in_flight() == 0


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("way", ["load_file", "load_sharded", "get_tensor"])
def test_a_change_before_the_tensors_are_mapped_is_an_error(
    path, monkeypatch, change, when, way
):
    """Before or after the map is made, and before any of it is touched."""

    def map_file(*arguments):
        if when == "before":
            change(path)
        made = FileMap(*arguments)
        if when == "after":
            change(path)
        return made

    def load():
        if way == "load_file":
            nvmeio.safetensors.numpy.load_file(path, mapped=True)
        elif way == "load_sharded":
            load_sharded(path.parent, framework="np", mapped=True)
        else:
            with safe_open(path, "np", mapped=True) as file:
                file.get_tensor("03")

    monkeypatch.setattr(_file, "FileMap", map_file)
    with pytest.raises(SafetensorError, match=r"has changed|was replaced"):
        load()


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("how", ["renamed over", "removed", "moved"])
def test_a_replaced_file_is_read_to_its_end(path, arrays, direct, how):
    def change():
        if how == "renamed over":
            replace(path, arrays)
        elif how == "removed":
            path.unlink()
        else:
            path.rename(path.with_name("away"))

    found = nvmeio.safetensors.numpy.load_file(path, direct=direct, progress=once(change))
    assert bits_of_all(found) == bits_of_all(arrays)


def test_the_mode_and_links_of_the_file_may_change(path, arrays):
    def change():
        path.chmod(0o600)
        os.link(path, path.with_name("link"))

    found = nvmeio.safetensors.numpy.load_file(path, progress=once(change))
    assert bits_of_all(found) == bits_of_all(arrays)


def test_a_file_may_be_saved_over_itself(path, arrays):
    tensors = nvmeio.safetensors.numpy.load_file(path)
    nvmeio.safetensors.numpy.save_file(tensors, path)
    assert bits_of_all(tensors) == bits_of_all(arrays)
    assert bits_of_all(safetensors.numpy.load_file(path)) == bits_of_all(arrays)
