"""The memory of a model's tensors: its placement, and the lifetime of its pages."""

import gc
import itertools
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from children import preloaded, run_with_faults
from helpers import MIB, PAGE, fork
from nvmeio._native.region import FileMap, Region

HUGE = 2 << 20


def resident(address, pages):
    """Return which pages are resident, from /proc/self/pagemap."""
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(address // PAGE * 8)
        entries = np.frombuffer(file.read(pages * 8), np.uint64)
    return (entries >> np.uint64(63)).astype(bool)


def over(region, begin, end):
    """Return an array over a part of a region, with the only reference to the part."""
    return np.frombuffer(region.span(begin, end), np.uint8)


def flags_at(address):
    """Return the flags of the memory at an address, from /proc/self/smaps."""
    within = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *words = line.split()
        if "-" in first and not first.endswith(":"):
            low, high = (int(each, 16) for each in first.split("-"))
            within = low <= address < high
        elif within and first == "VmFlags:":
            return words
    return []


def test_released_pages_stay_released():
    """Otherwise the kernel would collapse the rest into huge pages minutes later."""
    region = Region(16 * MIB)
    region.populate(0, 16 * MIB)
    first, rest = over(region, 0, MIB), over(region, MIB, 16 * MIB)
    if "hg" not in flags_at(region.address):
        pytest.skip("the kernel has no huge pages to give")
    del first
    gc.collect()
    assert "nh" in flags_at(region.address + 4 * MIB)
    assert not rest.any()


@pytest.mark.parametrize("nbytes", [1, PAGE - 1, PAGE, PAGE + 1, HUGE, 3 * HUGE + 1])
@pytest.mark.parametrize("phase", [0, 1, 8, PAGE - 1, PAGE, HUGE - 1])
def test_a_region_is_aligned_as_requested_and_writable(nbytes, phase):
    region = Region(nbytes, phase)
    # Regions below a huge page have small pages, with their alignment.
    unit = HUGE if phase + nbytes > HUGE - PAGE else PAGE
    assert region.address % unit == phase % unit
    view = memoryview(region)
    assert (view.nbytes, view.readonly, view.format) == (nbytes, False, "B")
    assert not np.any(np.frombuffer(region, np.uint8))
    view[0] = view[-1] = 7
    assert (view[0], view[-1]) == (7, 7)


@pytest.mark.parametrize(
    ("nbytes", "phase", "error"),
    [
        *((0, 0, ValueError), (-1, 0, ValueError), (1, HUGE, ValueError)),
        *((1, -1, OverflowError), (2**63, 0, OverflowError), (1.5, 0, TypeError)),
        *((2**63 - 1, 0, MemoryError), (2**63 - 1, HUGE - 1, MemoryError)),
        *((2**46, 0, MemoryError), (2**47 - 4 * MIB, 5, MemoryError)),
    ],
)
def test_impossible_regions_are_refused(nbytes, phase, error):
    with pytest.raises(error):
        Region(nbytes, phase)


@pytest.mark.parametrize(
    ("begin", "end"),
    [(0, 0), (5, 5), (6, 5), (-1, 5), (0, 101), (100, 101), (2**62, 2**63)],
)
@pytest.mark.parametrize("method", ["span", "populate"])
def test_parts_outside_of_the_region_are_refused(method, begin, end):
    region = Region(100, 3)
    with pytest.raises((ValueError, OverflowError)):
        getattr(region, method)(begin, end)


def test_only_populated_pages_are_resident():
    region = Region(64 * PAGE, 100)
    first = region.address - 100
    assert not resident(first, 65).any()
    region.populate(PAGE, 2 * PAGE)
    there = resident(first, 65)
    # The part is in two pages; a huge page is resident as a whole.
    assert there[1:3].all()
    assert there.all() or there.sum() == 2
    region.populate(0, 64 * PAGE)
    assert resident(first, 65).all()


def test_populating_keeps_the_contents():
    region = Region(8 * PAGE)
    memoryview(region)[:] = bytes(range(256)) * 128
    region.populate(0, 8 * PAGE)
    assert bytes(region) == bytes(range(256)) * 128


def test_only_pages_of_dead_parts_are_released():
    region = Region(16 * PAGE, 100)
    first = region.address - 100
    region.populate(0, 16 * PAGE)
    np.frombuffer(region, np.uint8)[:] = np.arange(16 * PAGE, dtype=np.uint32) % 251
    expected = bytes(region)
    # Three parts share page 4, and the second is entirely in it.
    cuts = [0, 4 * PAGE, 4 * PAGE + 50, 9 * PAGE - 100, 16 * PAGE]
    parts = {begin: over(region, begin, end) for begin, end in itertools.pairwise(cuts)}
    del region

    def alive():
        for begin, part in parts.items():
            assert part.tobytes() == expected[begin : begin + len(part)]
        return np.flatnonzero(resident(first, 17)).tolist()

    assert alive() == list(range(17))
    del parts[4 * PAGE]
    assert alive() == list(range(17))
    del parts[4 * PAGE + 50]
    # Pages 5 to 8 belonged to it alone; it ended where page 9 begins.
    assert alive() == [0, 1, 2, 3, 4, *range(9, 17)]
    del parts[0]
    assert alive() == list(range(9, 17))
    del parts[9 * PAGE - 100]
    gc.collect()
    assert not resident(first, 17).any()


def test_the_last_part_releases_the_whole_region():
    region = Region(64 * MIB)
    region.populate(0, 64 * MIB)
    address, part = region.address, over(region, 5, 10)
    del region
    assert resident(address, 64 * MIB // PAGE).all()
    del part
    assert f"{address:x}-" not in Path("/proc/self/maps").read_text()
    assert not resident(address, 64 * MIB // PAGE).any()


def test_parts_die_in_several_threads():
    region = Region(1024 * PAGE + 77, 5)
    region.populate(0, region_bytes := 1024 * PAGE + 77)
    first = region.address - 5
    parts = [
        over(region, at, min(at + 777, region_bytes)) for at in range(0, region_bytes, 777)
    ]

    def die(mine):
        while mine:
            mine.pop()

    shares = [parts[number::4] for number in range(4)]
    parts.clear()
    threads = [threading.Thread(target=die, args=(share,)) for share in shares]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not resident(first, 1025).any()


# A kernel with pages of 64 KiB refuses a start within a page, and rounds a length up.
LARGE_PAGES = """
#include <dlfcn.h>
#include <errno.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

long sysconf(int name)
{
    long (*found)(int) = dlsym(RTLD_NEXT, "sysconf");
    return name == _SC_PAGESIZE ? 65536 : found(name);
}

int madvise(void *address, size_t bytes, int advice)
{
    errno = EINVAL;
    if ((uintptr_t)address % 65536)
        return -1;
    return (int)syscall(SYS_madvise, address, (bytes + 65535) & ~65535ul, advice);
}
"""
PARTS = """
import numpy as np
from nvmeio._native.region import Region

size = 100_000
region = Region(60 * size, 5)
parts = [np.frombuffer(region.span(i * size, (i + 1) * size), "u1") for i in range(60)]
for number, part in enumerate(parts):
    part[:] = number
del parts[::2], part
assert all((part == 2 * i + 1).all() for i, part in enumerate(parts))
"""


@pytest.mark.packaging
def test_only_dead_parts_lose_their_bytes_if_pages_are_large(tmp_path):
    environment = preloaded(tmp_path, LARGE_PAGES)
    subprocess.run([sys.executable, "-c", PARTS], env=environment, check=True)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("ENOMEM", "MemoryError: no memory for 1048576 bytes: Cannot allocate memory"),
        ("EFAULT", "MemoryError: no memory for 1048576 bytes: Bad address"),
        ("EAGAIN:when=1..3", "ok"),
        ("EINTR:when=1..3", "ok"),
        # Linux before 5.14 populates pages when they are touched.
        ("EINVAL", "ok"),
    ],
)
def test_a_lack_of_memory_is_an_error(fault, said):
    assert run_with_faults("populate", f"madvise:error={fault}").report == said


def test_a_file_map_is_private_writable_and_inherited(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(250)) * 40)
    with open(path, "rb") as file:
        mapped = FileMap(file.fileno(), 10000, str(path))
    assert mapped.nbytes == 10000
    whole, part = np.frombuffer(mapped, np.uint8), over(mapped, 5000, 10000)
    del mapped
    assert whole.tobytes() == path.read_bytes()
    part[:] = 3
    assert (whole[5000:] == 3).all()
    assert path.read_bytes() == bytes(range(250)) * 40

    def child():
        assert (part == 3).all()
        whole[:] = 9

    assert os.waitpid(fork(child), 0)[1] == 0
    assert (whole[5000:] == 3).all()


def test_a_map_that_cannot_be_made_is_an_error(tmp_path):
    with open(tmp_path / "file", "wb+") as file:
        with pytest.raises(MemoryError, match="the system cannot map"):
            FileMap(file.fileno(), 1 << 60)
        with pytest.raises(ValueError, match="nbytes is 0"):
            FileMap(file.fileno(), 0)
    with pytest.raises(OSError, match="Bad file descriptor") as caught:
        FileMap(1 << 30, PAGE, "a name")
    assert caught.value.filename == "a name"
