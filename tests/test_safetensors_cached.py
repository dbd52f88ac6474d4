"""What the page cache has of a model file is read from there, the rest with O_DIRECT."""

import os

import numpy as np
import pytest

pytest.importorskip("safetensors")

import safetensors.numpy

import nvmeio.safetensors.numpy
from children import as_nobody, run_child
from helpers import MIB, PAGE, cached, drop, need_direct, warm
from model_samples import Moved
from nvmeio._native import system_calls
from nvmeio.safetensors import load_sharded, safe_open

SIZE = 16 * MIB


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A file on a disk with O_DIRECT, alone in its folder; every test reads it only."""
    folder = tmp_path_factory.mktemp("cached")
    need_direct(folder)
    data = np.random.default_rng(1).integers(0, 256, (4, SIZE // 4), np.uint8)
    path = folder / "model.safetensors"
    safetensors.numpy.save_file({f"{n}": row for n, row in enumerate(data)}, path)
    return path


def read(way, path, direct):
    """Read a whole file in one of several ways."""
    if way == "load_file":
        nvmeio.safetensors.numpy.load_file(path, direct=direct)
    elif way == "load_sharded":
        load_sharded(path.parent, framework="np", direct=direct)
    else:
        with safe_open(path, "np", direct=direct) as file:
            for name in file.offset_keys():
                file.get_tensor(name)


@pytest.mark.parametrize("way", ["load_file", "safe_open", "load_sharded"])
@pytest.mark.parametrize("direct", ["auto", True, False])
@pytest.mark.parametrize("state", ["cold", "a third", "warm"])
@pytest.mark.all_combinations
def test_what_is_cached_is_read_from_there(path, state, direct, way):
    warmed = {"cold": 0, "a third": SIZE // 3, "warm": SIZE}[state]
    warm(path, warmed)
    before, moved = cached(path), Moved()
    read(way, path, direct)
    buffered = {"auto": warmed, True: 0, False: SIZE}[direct]
    # A block that is cached in part is read past the page cache, except for its edges.
    slack = 4 * MIB if state == "a third" else 64 * PAGE
    assert abs(moved.buffered - buffered) <= slack
    assert abs(moved.direct - (SIZE - buffered)) <= slack
    if direct is not False:
        # The header, the kernel's read-ahead after it, and the edges of reads.
        assert cached(path) * SIZE <= before * SIZE + MIB


def test_a_file_in_memory_is_cached(tmpfs):
    safetensors.numpy.save_file({"a": np.ones(MIB)}, tmpfs / "m")
    for direct in ("auto", False):
        found = nvmeio.safetensors.numpy.load_file(tmpfs / "m", direct=direct)
        assert np.array_equal(found["a"], np.ones(MIB))


@pytest.mark.parametrize("part", [0, SIZE // 2, SIZE])
def test_a_sample_is_right_and_repeatable(path, part):
    warm(path, part)
    before = cached(path)
    with open(path, "rb") as file:
        for _ in range(4):
            found = system_calls.sampled_fraction(file.fileno(), 0, SIZE)
            assert abs(found - part / SIZE) < 0.15
    # The sample leaves the pages in the cache that it read.
    assert cached(path) * SIZE <= before * SIZE + 4 * 64 * PAGE


@pytest.mark.parametrize("nbytes", [1, PAGE, PAGE + 1, 5 * PAGE])
@pytest.mark.parametrize("offset", [0, 1, PAGE - 1, PAGE])
def test_a_few_pages_are_counted_and_sampled(tmp_path, offset, nbytes):
    need_direct(tmp_path)
    path = tmp_path / "pages"
    path.write_bytes(bytes(8 * PAGE))
    with open(path, "rb") as file:
        part = file.fileno(), offset, nbytes
        # The kernel may drop a page at any moment; a missing page may arrive while the
        # sample is interrupted; a cached one may be locked by another process.
        looks = system_calls.cached_fraction, system_calls.sampled_fraction
        cold, warmed = set(), set()
        for _ in range(5):
            drop(path)
            cold.add(tuple(look(*part) for look in looks))
            warm(path)
            warmed.add(tuple(look(*part) for look in looks))
        assert (0, 0) in cold
        assert (1, 1) in warmed


@pytest.mark.parametrize("function", ["cached_fraction", "sampled_fraction"])
def test_nothing_is_cached_of_an_empty_range_or_a_missing_file(path, function):
    look = getattr(system_calls, function)
    with open(path, "rb") as file:
        assert look(file.fileno(), 0, 0) == 0
    assert look(2**30, 0, PAGE) == 0
    reader, writer = os.pipe()
    try:
        assert look(reader, 0, PAGE) == 0
    finally:
        os.close(reader)
        os.close(writer)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("state", ["cold", "warm"])
def test_a_file_of_another_user_is_sampled(path, state):
    """cachestat(2) fails with EPERM there, and mincore(2) reports everything as cached."""
    path.chmod(0o644)
    drop(path) if state == "cold" else warm(path)
    report = run_child("load_as_other", prefix=as_nobody(), path=str(path)).report
    (fraction,), ways = report
    # A cached page counts as missing if its process was preempted, but not every time.
    assert all(ways) if state == "cold" else not all(ways)
    assert abs(fraction - (state == "warm")) < 0.1
