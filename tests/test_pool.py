"""Pool memory lives as long as any view of it; freeing ends a pin."""

import gc
import resource
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import nvmeio
from nvmeio._native.pool import PoolMemory, free_pinned, is_pinned, new_pinned, pool_stats

MIB = 1 << 20


def bytes_used():
    gc.collect()
    return pool_stats()["bytes_used"]


@pytest.fixture(autouse=True)
def everything_goes_back(quiet_pool):
    """Check that every test leaves the pool as it found it."""
    before = bytes_used()
    yield
    assert bytes_used() == before


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 2 * MIB - 1, 2 * MIB, 5 * MIB])
def test_memory_is_an_aligned_writable_buffer_of_its_size(size):
    memory = PoolMemory(size)
    view = memoryview(memory)
    assert (view.nbytes, view.format, view.ndim, view.readonly) == (size, "B", 1, False)
    assert memory.nbytes == size
    assert memory.address % (4096 if size < 2 * MIB else 2 * MIB) == 0
    content = np.random.default_rng(size).bytes(size)
    view[:] = content
    assert bytes(memory) == content
    if size:
        assert np.frombuffer(memory, np.uint8).ctypes.data == memory.address


def test_a_negative_size_is_refused():
    with pytest.raises(ValueError, match="nbytes is -1; it must be 0 or more"):
        PoolMemory(-1)
    with pytest.raises(ValueError, match="nbytes is -1; it must be 0 or more"):
        new_pinned(-1)


def test_more_than_the_system_has_is_a_memory_error():
    before = pool_stats()
    with pytest.raises(MemoryError, match="1 EiB do not fit into the pool"):
        PoolMemory(1 << 60)
    assert pool_stats() == before


def test_repr_shows_size_and_address():
    memory = PoolMemory(123)
    assert repr(memory) == f"<PoolMemory of 123 bytes at {memory.address:#x}>"


@pytest.mark.parametrize(
    "derive",
    [
        lambda array: array,
        lambda array: array[100:200],
        lambda array: array[::-3],
        lambda array: array.reshape(1024, -1).T,
        lambda array: array.view("f8")[1:],
        lambda array: memoryview(array)[5:6],
    ],
    ids=["whole", "slice", "strided", "transposed", "cast", "memoryview"],
)
def test_memory_is_freed_with_the_last_numpy_view(derive):
    before = bytes_used()
    array = np.frombuffer(new_pinned(4 * MIB), np.uint8)
    view = derive(array)
    del array
    assert bytes_used() == before + 4 * MIB
    del view
    assert bytes_used() == before


def test_memory_is_freed_with_the_last_torch_view():
    torch = pytest.importorskip("torch")
    before = bytes_used()
    view = torch.frombuffer(new_pinned(4 * MIB), dtype=torch.uint8)[100:200]
    assert bytes_used() == before + 4 * MIB
    del view
    assert bytes_used() == before


def test_memory_in_a_cycle_is_freed_when_the_cycle_is_collected():
    before = bytes_used()
    gc.disable()
    try:
        cycle = [np.frombuffer(PoolMemory(4 * MIB), np.uint8)]
        cycle.append(cycle)
        del cycle
        assert pool_stats()["bytes_used"] == before + 4 * MIB
    finally:
        gc.enable()
    assert bytes_used() == before


def resident_bytes():
    """Return the resident memory of this process, from the kernel."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def test_trimming_returns_free_memory_to_the_system():
    kept = nvmeio.empty(5 * MIB, np.uint8)
    kept[...] = 7
    large = nvmeio.empty(256 * MIB, np.uint8)
    nvmeio.pool_trim()
    before, mapped = resident_bytes(), pool_stats()["bytes_mapped"]
    assert nvmeio.pool_trim() == 0
    del large
    assert pool_stats()["bytes_mapped"] == mapped
    assert nvmeio.pool_trim() == 256 * MIB
    assert pool_stats()["bytes_mapped"] == mapped - 256 * MIB
    # Other threads may have allocated some meanwhile.
    assert before - resident_bytes() > 200 * MIB
    assert (kept == 7).all()
    assert nvmeio.empty(256 * MIB, np.uint8).nbytes == 256 * MIB


def test_locked_agrees_with_the_statistics():
    before = pool_stats()["bytes_locked"]
    memory = PoolMemory(2 * MIB, lock=True)
    assert pool_stats()["bytes_locked"] - before == (2 * MIB if memory.locked else 0)
    assert repr(memory).endswith(", locked>") == memory.locked
    assert not PoolMemory(2 * MIB).locked
    del memory
    assert pool_stats()["bytes_locked"] == before


def test_freeing_ends_the_pin_at_once_but_the_memory_only_with_its_views():
    before = bytes_used()
    memory = new_pinned(2 * MIB)
    address = memory.address
    array = np.frombuffer(memory, np.uint8)
    del memory
    assert free_pinned(address) is True
    assert free_pinned(address) is False
    assert is_pinned(address, 1) is False
    assert bytes_used() == before + 2 * MIB
    array[:] = 7
    del array
    assert bytes_used() == before
    assert free_pinned(address) is False


def test_only_one_of_many_threads_frees():
    barrier = threading.Barrier(4)

    def free(address):
        barrier.wait()
        return free_pinned(address)

    with ThreadPoolExecutor(4) as threads:
        for _ in range(100):
            memory = new_pinned(4096)
            assert sum(threads.map(free, [memory.address] * 4)) == 1


FORK = """
import os
from nvmeio._native.pool import PoolMemory, free_pinned, is_pinned, new_pinned, pool_stats

memory = new_pinned(1 << 20)
memoryview(memory)[:3] = b"abc"
child = os.fork()
if child == 0:
    assert not memory.locked and pool_stats()["bytes_locked"] == 0
    assert is_pinned(memory.address, 1) and free_pinned(memory.address)
    assert bytes(memoryview(memory)[:3]) == b"abc"
    del memory
    assert pool_stats()["bytes_used"] == 0
    PoolMemory(1 << 20)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert is_pinned(memory.address, 1)
"""


def test_a_forked_child_uses_its_own_copy():
    done = subprocess.run([sys.executable, "-c", FORK], timeout=60)
    assert done.returncode == 0
