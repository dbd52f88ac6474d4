"""Reads take from the page cache what it has, by every function that reads."""

import asyncio

import numpy as np
import pytest

import nvmeio
from helpers import MIB, PAGE, need_direct, pattern, routes, warm


@pytest.fixture
def path(tmp_path):
    need_direct(tmp_path)
    return tmp_path / "data"


SIZES = [1, 5000, 64 << 10, MIB, 3 * MIB + 77]


def array_of(size):
    return np.empty(size, np.uint8)


def by_read(handle, path, size):
    target = array_of(size)
    handle.read(target, path)
    return target


def by_file(handle, path, size):
    target = array_of(size)
    with nvmeio.File(path) as file:
        handle.read(target, file)
    return target


def by_submit(handle, path, size):
    target = nvmeio.empty(size, np.uint8)
    handle.submit_read(target, path).wait()
    return target


def by_many(handle, path, size):
    halves = [array_of(size // 2), array_of(size - size // 2)]
    handle.read_many([(halves[0], path, 0), (halves[1], path, size // 2)])
    return np.concatenate(halves)


WAYS = [by_read, by_file, by_submit, by_many]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("read", WAYS)
def test_what_is_cached_is_read_from_there(path, read, size):
    content = pattern(size)
    path.write_bytes(content)
    for warmed in (size, 0):
        warm(path, warmed)
        with nvmeio.Handle() as handle:
            assert bytes(read(handle, path, size)) == content
            buffered = routes(handle)["buffered"]
        # A ragged end goes through the page cache in any case.
        assert buffered == size if warmed else buffered < PAGE


@pytest.mark.parametrize(
    "read",
    [
        lambda path: nvmeio.read_file(path),
        lambda path: asyncio.run(nvmeio.aio.read_file(path)),
        lambda path: nvmeio.File(path).read(),
    ],
)
def test_functions_without_a_handle_do_so_too(path, read):
    content = pattern(2 * MIB)
    path.write_bytes(content)
    handle = nvmeio.default_handle()
    for warmed in (len(content), 0):
        warm(path, warmed)
        before = routes(handle)
        assert bytes(read(path)) == content
        change = routes(handle)
        change.subtract(before)
        assert change["buffered"] == warmed


def test_demanded_direct_reads_go_to_the_device(path):
    path.write_bytes(pattern(MIB))
    with nvmeio.Handle(direct=True) as handle:
        by_read(handle, path, MIB)
        assert routes(handle)["buffered"] == 0
