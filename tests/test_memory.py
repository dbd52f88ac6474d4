"""Arrays in memory of the pool: aligned, limited, freed with the last reference."""

import gc
import threading

import numpy as np
import pytest

import nvmeio
from children import run_child
from helpers import MIB, PAGE

pytestmark = pytest.mark.usefixtures("quiet_pool")


def used():
    """Return the bytes of the pool in use."""
    gc.collect()
    return nvmeio.pool_stats()["bytes_used"]


@pytest.mark.parametrize("shape", [(), 0, 5, (3, 4), [2, 0, 3], (1 << 20,), (3, 1 << 20)])
@pytest.mark.parametrize("dtype", ["f8", "f4", "?", "c16", "M8[ns]", "S3", ">i2", "V7"])
def test_an_array_has_its_shape_and_dtype_and_is_aligned(shape, dtype):
    array = nvmeio.empty(shape, dtype)
    like = np.empty(shape, dtype)
    assert (array.shape, array.dtype) == (like.shape, like.dtype)
    assert array.flags.writeable
    assert array.flags.c_contiguous
    if array.nbytes:
        assert array.__array_interface__["data"][0] % PAGE == 0
        array.flat[-1] = array.flat[0]


def test_the_default_dtype_is_numpys():
    assert nvmeio.empty(3).dtype == np.empty(3).dtype


@pytest.mark.parametrize("pin_memory", [False, True])
def test_memory_is_freed_with_the_last_reference(pin_memory):
    before = used()
    array = nvmeio.empty((4, MIB), "u1", pin_memory=pin_memory)
    assert used() == before + 4 * MIB
    view = array[2].view("u4")[5:].reshape(-1, 1)
    memory = memoryview(view)
    del array
    assert used() == before + 4 * MIB
    del view
    assert used() == before + 4 * MIB
    memory.release()
    del memory
    assert used() == before


def test_memory_is_reused():
    first = nvmeio.empty(8 * MIB, "u1")
    address = first.__array_interface__["data"][0]
    del first
    mapped = nvmeio.pool_stats()["bytes_mapped"]
    again = nvmeio.empty(8 * MIB, "u1")
    assert again.__array_interface__["data"][0] == address
    assert nvmeio.pool_stats()["bytes_mapped"] == mapped


def test_any_slice_of_a_pinned_array_is_pinned_and_no_other():
    pinned, plain = nvmeio.empty(10_000, pin_memory=True), nvmeio.empty(10_000)
    with nvmeio.aio_handle() as handle:
        assert handle.is_pinned(pinned)
        assert handle.is_pinned(pinned[5000:5001])
        assert handle.is_pinned(memoryview(pinned[1:]))
        assert not handle.is_pinned(plain)
        assert handle.free_cpu_locked_tensor(pinned)
        assert not handle.is_pinned(pinned[5:])


def test_a_numa_node_can_be_chosen():
    array = nvmeio.empty(MIB, "u1", numa_node=0)
    array[:] = 7
    assert (array == 7).all()
    with pytest.raises(ValueError, match="numa_node is 63, which this machine does not"):
        nvmeio.empty(MIB, "u1", numa_node=63)
    for node in (-1, 64):
        with pytest.raises(ValueError, match=f"numa_node is {node}; it must be 0 to 63"):
            nvmeio.empty(MIB, "u1", numa_node=node)


def test_impossible_arrays_are_refused():
    with pytest.raises(ValueError, match="no extent may be negative"):
        nvmeio.empty((3, -1))
    with pytest.raises(TypeError, match="Python objects"):
        nvmeio.empty(3, object)
    with pytest.raises(TypeError, match=r"an extent is 2\.5; it must be an integer"):
        nvmeio.empty(2.5)
    for shape in (True, (3, False), "23", b"23"):
        with pytest.raises(TypeError, match="must be an integer"):
            nvmeio.empty(shape)
    for shape in (2**62, (2**40, 2**40)):
        with pytest.raises(MemoryError, match="bytes; the limit is"):
            nvmeio.empty(shape)
    with pytest.raises(ValueError, match="no extent may exceed"):
        nvmeio.empty((10**30, 0))
    with pytest.raises(TypeError, match="pin_memory is 'no'"):
        nvmeio.empty(5, pin_memory="no")


def test_the_pool_is_bounded_by_the_environment():
    report = run_child("fill_pool", env={"NVMEIO_POOL_BYTES": "64M"}).report
    limit = 64 << 20
    assert report["limit"] == limit
    assert report["mapped"] <= limit
    assert "its limit is 64 MiB, of which" in report["error"]
    assert "NVMEIO_POOL_BYTES" in report["error"]
    # A refused array took no memory, and freed memory can be used again.
    assert report["again"]


def test_the_limit_is_half_of_the_memory_by_default():
    with open("/proc/meminfo") as lines:
        total = int(next(line for line in lines if line.startswith("MemTotal")).split()[1])
    assert nvmeio.pool_stats()["bytes_limit"] <= total * 1024 // 2


@pytest.mark.parametrize("text", ["0", "-1", "1", "many", "2048X", "K"])
def test_an_invalid_limit_is_refused(text):
    report = run_child("fill_pool", env={"NVMEIO_POOL_BYTES": text}).report
    limit = "2097152 bytes (2 MiB) or more" if text in ("0", "1") else "a number of bytes"
    assert f"NVMEIO_POOL_BYTES is {text!r}; it must be {limit}" in report["error"]


@pytest.mark.parametrize("text", ["64M", "64MiB", "0.0625G", "67108864", " 65536 KB "])
def test_a_limit_is_written_as_any_other_size(text):
    found = run_child("report_limit", env={"NVMEIO_POOL_BYTES": text}).report
    assert found == run_child("report_limit", env={"NVMEIO_POOL_BYTES": "64M"}).report


def test_bounces_count_toward_the_limit(tmp_path):
    env = {"NVMEIO_POOL_BYTES": "4M"}
    report = run_child("bounce_in_bounds", env=env, folder=str(tmp_path)).report
    assert report["mapped"] <= 4 << 20
    assert report["right"]


def test_hugetlbfs_is_used_only_if_available(tmp_path):
    report = run_child("fill_pool", env={"NVMEIO_POOL_HUGETLB": "1"}).report
    assert report["again"]
    report = run_child("fill_pool", env={"NVMEIO_POOL_HUGETLB": "yes"}).report
    assert "NVMEIO_POOL_HUGETLB is 'yes'; it must be 0 or 1" in report["error"]


def test_threads_allocate_separate_arrays():
    wrong = []

    def use(number):
        for _ in range(200):
            array = nvmeio.empty(5000, "i8")
            array[:] = number
            if (array != number).any():
                wrong.append(number)

    threads = [threading.Thread(target=use, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_limit_of_a_control_group_bounds_the_pool(control_group):
    limit = 1 << 30
    prefix = control_group(
        "memory", {"memory.limit_in_bytes": limit}, {"memory.max": limit}
    )
    assert run_child("report_limit", prefix=prefix).report["bytes_limit"] == limit // 2


def test_the_environment_is_read_at_the_first_use():
    found = run_child("report_limit", env={"NVMEIO_POOL_BYTES": "64M"}).report
    assert found["bytes_limit"] == 64 << 20


def test_a_shape_may_be_an_array():
    assert nvmeio.empty(np.array([2, 3])).shape == (2, 3)
    assert nvmeio.empty(np.int64(7)).shape == (7,)


def test_the_error_names_the_limit_if_rounding_exceeds_it():
    report = run_child("fill_by_halves", env={"NVMEIO_POOL_BYTES": "4M"}).report
    assert "NVMEIO_POOL_BYTES sets the limit" in report["error"]
