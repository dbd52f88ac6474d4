"""Transfers by workers on every engine: any size, offset, address and queue."""

import errno
import gc
import mmap
import os
import re
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import nvmeio
from helpers import (
    BLOCK,
    DEPTH,
    MIB,
    PAGE,
    Guarded,
    cool,
    edge_sizes,
    expected_routes,
    pattern,
    routes,
)

EDGES = edge_sizes()


# Synchronous calls run small transfers in the caller's thread; requests run in workers.
WAYS = {
    "sync": lambda handle, verb, *args: getattr(handle, verb)(*args),
    "request": lambda handle, verb, *args: getattr(handle, f"submit_{verb}")(*args).wait(),
}


@pytest.mark.all_combinations
@pytest.mark.parametrize("transfer", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("size_of", EDGES.values(), ids=EDGES)
def test_written_bytes_are_read_back(handle, path, alignment, size_of, transfer):
    """DeepSpeed's op reports success but moves nothing, or a part, of some sizes."""
    expected = pattern(size_of(alignment))
    source, target = Guarded(expected, pool=True), Guarded(len(expected), pool=True)
    transfer(handle, "write", source.array, path)
    assert path.read_bytes() == source.content() == expected
    cool(path)
    transfer(handle, "read", target.array, path)
    assert target.content() == expected
    assert routes(handle) == expected_routes(
        "write", len(expected), alignment
    ) + expected_routes("read", len(expected), alignment)


@pytest.mark.all_combinations
@pytest.mark.parametrize("block_size", [1, PAGE + 1, 1 << 30])
@pytest.mark.parametrize("queue_depth", [1, 32768])
def test_blocks_and_queues_work_at_their_limits(
    open_handle, path, alignment, block_size, queue_depth
):
    handle = open_handle(block_size=block_size, queue_depth=queue_depth)
    assert (handle.block_size, handle.queue_depth) == (block_size, queue_depth)
    source, target = Guarded(pattern(3 * MIB), pool=True), Guarded(3 * MIB, pool=True)
    # Extending a file writes other blocks.
    path.write_bytes(bytes(3 * MIB))
    handle.write(source.array, path)
    handle.read(target.array, path)
    assert target.content() == source.content()
    assert routes(handle) == (
        expected_routes("write", 3 * MIB, alignment)
        + expected_routes("read", 3 * MIB, alignment)
    )
    block = -(-block_size // PAGE) * PAGE
    assert handle.stats()["blocks"] == 2 * -(-3 * MIB // block)


def test_the_maximal_number_of_workers_works(open_handle, tmp_path):
    handle = open_handle(block_size=PAGE, queue_depth=1, workers=256)
    expected = pattern(MIB + 1)
    handle.write(expected, tmp_path / "data")
    assert (tmp_path / "data").read_bytes() == expected
    assert routes(handle).total() == MIB + 1


def test_without_o_direct_everything_goes_through_the_page_cache(open_handle, path):
    handle = open_handle(block_size=BLOCK, queue_depth=DEPTH, direct=False)
    source, target = Guarded(pattern(3 * MIB)), Guarded(3 * MIB)
    handle.write(source.array, path)
    handle.read(target.array, path)
    assert target.content() == source.content()
    assert routes(handle) == Counter(buffered=6 * MIB)


def test_demanding_o_direct_without_support_fails_with_the_path(open_handle):
    handle = open_handle(direct=True)
    with pytest.raises(OSError, match="/proc/version") as caught:
        handle.read(bytearray(1), "/proc/version")
    assert (caught.value.errno, caught.value.filename) == (errno.EINVAL, "/proc/version")


# Of the bounces, and of the stack and the buffers of one worker.
BOUNCES_MAX = 16 * MIB
WORKER_MAX = 128 * 1024


def anonymous_bytes():
    """Return how much memory of its own the process has touched."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) * 1024


@pytest.fixture(scope="module")
def more_than_all_bounces():
    """Bytes, and unaligned memory for them; both are slow to make."""
    return Guarded(pattern(96 * MIB)), Guarded(96 * MIB, residue=1)


@pytest.mark.parametrize(
    ("block_size", "depth", "workers"),
    [(1 << 30, 2, 2), (PAGE, 64, 256)],
)
def test_bounces_are_touched_late_and_reused_within_a_limit(
    engine, tmp_path, more_than_all_bounces, block_size, depth, workers
):
    """Bounces take at most 16 MiB a handle, for any workers, queue and callers."""
    path, (content, target) = tmp_path / "data", more_than_all_bounces
    target.array[:] = 0
    options = {"block_size": block_size, "queue_depth": depth, "workers": workers}
    limit = BOUNCES_MAX + workers * WORKER_MAX
    with nvmeio.Handle(engine=engine, **options) as handle, ThreadPoolExecutor(24) as pool:
        handle.write(content.array, path)
        if routes(handle)["direct"] == 0:
            pytest.skip("the file system has no O_DIRECT")
        before = anonymous_bytes()
        handle.submit_read(target.array, path).wait()
        # Immediately, because the kernel gets the memory back after a second.
        assert anonymous_bytes() - before <= limit
        parts = [target.array[at * 3 * MIB :][: 2 * MIB] for at in range(24)]
        list(pool.map(handle.read, parts, [path] * 24))
        assert anonymous_bytes() - before <= limit + 24 * WORKER_MAX
        handle.submit_read(target.array, path).wait()
        assert target.content() == content.content()
        assert routes(handle)["bounced"] == 2 * 96 * MIB + 24 * 2 * MIB
        assert handle.stats()["engine"] == engine


def test_an_idle_worker_gives_the_memory_of_its_bounces_back(
    open_handle, tmp_path, more_than_all_bounces
):
    content, target = more_than_all_bounces
    target.array[:] = 0
    # Not while they are in use: on a busy machine a second passes before that is read.
    before = anonymous_bytes()
    handle = open_handle()
    handle.write(content.array, tmp_path / "data")
    if routes(handle)["direct"] == 0:
        pytest.skip("the file system has no O_DIRECT")
    handle.submit_read(target.array, tmp_path / "data").wait()
    assert routes(handle)["bounced"] >= 96 * MIB
    deadline = time.monotonic() + 60
    while anonymous_bytes() > before + BOUNCES_MAX // 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    handle.submit_read(target.array, tmp_path / "data").wait()
    assert target.content() == content.content()


@pytest.fixture(scope="module")
def three_gib():
    """3 GiB of memory, which is slow to get, so tests share it."""
    memory = mmap.mmap(-1, 3 << 30)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


@pytest.mark.slow
@pytest.mark.xdist_group("three GiB")
def test_three_gib_are_read(open_handle, tmp_path, three_gib):
    """That is more than one I/O of the kernel can move, and more than 32 bits."""
    islands = [0, (1 << 31) - 5, 0x7FFFF000 - 3, (3 << 30) - 11]
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(3 << 30)
        for begin in islands:
            os.pwrite(file.fileno(), b"an island: ", begin)
    three_gib[::PAGE] = 1
    handle = open_handle(block_size=1 << 30, bounce="never")
    assert handle.submit_read(three_gib, tmp_path / "sparse").wait() == 3 << 30
    for begin in islands:
        assert three_gib[begin : begin + 11].tobytes() == b"an island: "
        three_gib[begin : begin + 11] = 0
    assert not three_gib[::PAGE].any()
    assert not three_gib[PAGE - 1 :: PAGE].any()
    assert routes(handle).total() == 3 << 30
    assert handle.stats()["blocks"] == 3


@pytest.mark.slow
@pytest.mark.xdist_group("three GiB")
def test_a_write_larger_than_one_io_is_complete(open_handle, tmp_path, three_gib):
    """Blocks have at most 1 GiB, below the kernel's limit of 0x7ffff000 bytes."""
    size = (1 << 31) + 77
    islands = [0, 0x7FFFF000 - 3, (1 << 31) - 5, size - 11]
    for begin in islands:
        three_gib[begin : begin + 11] = np.frombuffer(b"an island: ", np.uint8)
    handle = open_handle(block_size=1 << 30, bounce="never")
    path = tmp_path / "long"
    try:
        assert handle.submit_write(three_gib[:size], path).wait() == size
        assert path.stat().st_size == size
        with open(path, "rb") as file:
            for begin in islands:
                assert os.pread(file.fileno(), 11, begin) == b"an island: "
    finally:
        path.unlink(missing_ok=True)
    assert routes(handle).total() == size
    assert handle.stats()["blocks"] == 3


@pytest.mark.parametrize("offset", [(1 << 31) - 7, (1 << 32) + 4096, (1 << 40) + 3])
def test_offsets_beyond_32_bits_work(handle, tmp_path, offset):
    expected = pattern(3 * BLOCK)
    target = Guarded(len(expected))
    handle.write(expected, tmp_path / "sparse", offset=offset)
    handle.read(target.array, tmp_path / "sparse", offset=offset)
    assert target.content() == expected
    assert routes(handle).total() == 6 * BLOCK
