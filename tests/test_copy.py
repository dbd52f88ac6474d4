"""memcpy copies every byte of any array, and no others."""

import mmap
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from children import run_child
from helpers import MIB, PAGE, Guarded, pattern
from nvmeio import deepspeed_memcpy, memcpy
from nvmeio._native import settings

# Sizes from which the GIL is released, threads help, and stores bypass caches.
EDGES = (1 << 19, 1 << 20, 4 << 20)
SIZES = [0, 1, 63, PAGE + 1, *(edge + more for edge in EDGES for more in (-1, 0, 1))]

DTYPES = [
    "?", "i1", "<u2", ">i4", "u8", "f2", "f4", "f8", "g", "F", "D", "S5", "U3", "V7",
    "M8[ns]", "m8[s]", [("a", "f8"), ("b", "i1")],
]  # fmt: skip

LAYOUTS = {
    "contiguous": lambda base: base,
    "rows": lambda base: base[1:3],
    "column": lambda base: base[:, 1],
    "steps": lambda base: base[::2, 1::2],
    "backwards": lambda base: base[::-1],
    "transposed": lambda base: base.T,
    "0-d": lambda base: base[1, 2, ...][0, ...],
    "no element": lambda base: base[:, 2:2],
    "fields apart": lambda base: base[:, :, :2],
}


@pytest.mark.parametrize("threads", [None, 1, 2, 5])
@pytest.mark.parametrize("size", SIZES)
def test_every_byte_is_copied_and_no_other(size, threads):
    source, target = Guarded(size), Guarded(size)
    source.array[:] = np.frombuffer(pattern(size), np.uint8)
    memcpy(target.array, source.array, threads=threads)
    assert target.content() == source.content() == pattern(size)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_copied_bit_by_bit(dtype):
    dtype = np.dtype(dtype)
    source = np.frombuffer(pattern(1000 * dtype.itemsize), dtype)
    target = np.zeros(1000, dtype)
    memcpy(target, source)
    assert target.tobytes() == source.tobytes()


@pytest.mark.parametrize("to", LAYOUTS)
@pytest.mark.parametrize("of", LAYOUTS)
def test_any_strides_on_either_side_are_in_c_order(of, to):
    source = LAYOUTS[of](np.arange(1000).reshape(10, 10, 10))
    base = np.full((10, 10, 10), -1)
    expected = base.copy()
    target, wanted = LAYOUTS[to](base), LAYOUTS[to](expected)
    if target.size != source.size:
        with pytest.raises(ValueError, match="they must be equal"):
            memcpy(target, source)
    else:
        wanted[...] = source.reshape(wanted.shape)
        memcpy(target, source)
    assert (base == expected).all()


def test_shapes_may_differ():
    """All elements are copied; DeepSpeed's op copies only the first axis."""
    source = np.arange(8 * 1024, dtype="f4").reshape(8, 1024)
    target = np.zeros(8 * 1024, "f4")
    memcpy(target, source)
    assert (target == source.ravel()).all()


@pytest.mark.parametrize("size", [100, MIB + 100, 9 * MIB])
@pytest.mark.parametrize("distance", [-PAGE, -65, -1, 0, 1, 64, 4097])
def test_overlapping_ranges_are_copied_as_by_memmove(size, distance):
    base = np.frombuffer(pattern(size + 4 * PAGE), np.uint8).copy()
    start = 2 * PAGE
    expected = base.copy()
    expected[start : start + size] = base[start + distance : start + distance + size].copy()
    memcpy(base[start : start + size], base[start + distance : start + distance + size])
    assert (base == expected).all()


def test_overlapping_strided_ranges_are_read_before_they_are_written():
    base = np.arange(3000)
    expected = base.copy()
    expected[1:2001:2] = base[0:1000].copy()
    memcpy(base[1:2001:2], base[0:1000])
    assert (base == expected).all()


BUFFERS = {
    "bytearray": bytearray,
    "memoryview": lambda data: memoryview(bytearray(data)),
    "array": lambda data: np.array(np.frombuffer(data, np.uint8)),
    "strided array": lambda data: np.repeat(np.frombuffer(data, np.uint8), 2)[::2],
}


@pytest.mark.parametrize("to", BUFFERS)
@pytest.mark.parametrize("of", [*BUFFERS, "bytes"])
def test_plain_memory_is_copied_as_bytes(of, to):
    data = pattern(5000)
    source = BUFFERS.get(of, bytes)(data)
    target = BUFFERS[to](bytes(5000))
    memcpy(target, source)
    assert bytes(target) == data


def test_a_mapping_is_filled(path):
    path.write_bytes(bytes(PAGE))
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), PAGE) as mapping:
        memcpy(mapping, pattern(PAGE))
    assert path.read_bytes() == pattern(PAGE)


def read_only(array):
    array.flags.writeable = False
    return array


REFUSED = {
    "shorter source": (np.zeros(10), np.zeros(9), ValueError, "80 bytes and src 72"),
    "longer source": (np.zeros(9), np.zeros(10), ValueError, "72 bytes and src 80"),
    "other dtype": (np.zeros(8, "f4"), np.zeros(4, "f8"), TypeError, "float64 .*float32"),
    "other sign": (np.zeros(8, "i4"), np.zeros(8, "u4"), TypeError, "uint32 into.*int32"),
    "other order": (np.zeros(8, "<f4"), np.zeros(8, ">f4"), TypeError, ">f4 into.*float32"),
    "bytes for floats": (np.zeros(1, "f4"), b"1234", TypeError, "uint8 into.*float32"),
    "read-only": (read_only(np.zeros(4)), np.ones(4), ValueError, "read-only"),
    "read-only strided": (
        read_only(np.zeros(8))[::2], np.ones(4), ValueError, "read-only"
    ),
    "bytes": (b"1234", b"5678", ValueError, "read-only"),
    "objects": (np.zeros(1, object), np.ones(1, object), TypeError, "Python objects"),
    "strided objects": (
        np.zeros(4, object)[::2], np.ones(2, object), TypeError, "Python objects"
    ),
    "masked": (np.ma.zeros(4), np.ones(4), TypeError, "masked"),
    "list": ([0, 0], np.ones(2), TypeError, "not list"),
    "number": (np.zeros(1), 1.0, TypeError, "not float"),
    "overlapping elements": (
        np.lib.stride_tricks.as_strided(np.zeros(4), (4,), (0,)), np.ones(4),
        ValueError, "elements overlap",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("dest", "src", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_arrays_that_do_not_match_are_refused_before_a_byte_moves(dest, src, error, words):
    before = bytes(dest) if isinstance(dest, bytes) else np.array(dest, copy=True)
    for copy in (memcpy, deepspeed_memcpy):
        with pytest.raises(error, match=words):
            copy(dest, src)
    assert np.array_equal(np.array(dest), np.array(before))


@pytest.mark.parametrize("threads", [0, -1, 4097])
def test_a_number_of_threads_out_of_range_is_refused(threads):
    target = np.zeros(4)
    with pytest.raises(
        ValueError, match=f"threads is {threads}; it must be from 1 to 4096"
    ):
        memcpy(target, np.ones(4), threads=threads)
    with pytest.raises(TypeError, match=r"threads is 1\.5; it must be an integer"):
        memcpy(target, np.ones(4), threads=1.5)
    assert (target == 0).all()


@pytest.mark.parametrize(
    ("method", "threads"),
    [("fork", None), ("fork", 2), ("forkserver", None), ("spawn", None)],
)
def test_children_copy_after_their_parent(method, threads):
    report = run_child("copy_in_children", method=method, threads=threads).report
    assert report == {"children": 3, "right": True}


def test_a_forked_child_that_imports_nvmeio_itself_copies_alone(tmp_path):
    """The parent has run an OpenMP team of another library."""
    pytest.importorskip("torch")
    script = """
        import os, sys, torch
        torch.set_num_threads(2)
        torch.ones(1 << 22).add_(1).sum()
        child = os.fork()
        if child:
            sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        import signal
        signal.alarm(20)
        import numpy as np, nvmeio
        target = np.zeros(8 << 20, np.uint8)
        nvmeio.memcpy(target, np.ones_like(target), threads=2)
        os._exit(not target.all())
    """
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(script))
    assert subprocess.run([sys.executable, path], check=False).returncode == 0


def test_the_caller_copies_alone_if_no_thread_can_start():
    """GNU OpenMP would end the process if a thread could not start."""
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody without threads")
    assert run_child("copy_without_threads").report == {"right": True}


@pytest.mark.slow
def test_workers_of_a_data_loader_copy_after_their_parent():
    pytest.importorskip("torch")
    report = run_child("copy_in_data_loader", method="fork").report
    assert report == {"batches": 32, "right": True}


KERNELS = [*settings.kernels(), "auto"]


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_can_be_forced(kernel, monkeypatch):
    monkeypatch.setenv("NVMEIO_COPY", kernel)
    works = settings.kernels().get(kernel, True)
    report = run_child("copy_all_sizes").report
    if works:
        assert report["error"] is None
        assert kernel == "auto" or report["kernels"] == [kernel, kernel]
    else:
        assert f"NVMEIO_COPY is '{kernel}', which this processor lacks" in report["error"]


def test_a_kernel_works_if_the_processor_has_its_vectors():
    with open("/proc/cpuinfo", encoding="ascii") as file:
        words = {*file.read().split()}
    flags = {"avx512": "avx512f", "avx2": "avx2", "neon": "asimd"}
    found = settings.kernels()
    assert {n: found[n] for n in flags} == {n: flag in words for n, flag in flags.items()}


def test_an_unknown_kernel_is_refused_by_copies_and_handles(monkeypatch):
    monkeypatch.setenv("NVMEIO_COPY", "avx9")
    report = run_child("copy_all_sizes").report
    words = "NVMEIO_COPY is 'avx9'; it must be one of avx512, avx2, neon, portable"
    assert report["error"].startswith(words)
    assert report["handle_error"].startswith(words)


def test_a_team_is_no_larger_than_the_usable_processors(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert run_child("count_copy_threads", threads=None).report["threads"] == 0
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert run_child("count_copy_threads", threads=3).report["threads"] == 2
    one = run_child("count_copy_threads", threads=None, prefix=["taskset", "-c", "0"])
    assert one.report["threads"] == 0
    # At most one thread for each chunk.
    assert run_child("count_copy_threads", threads=64, size=MIB).report["threads"] == 3


@pytest.mark.parametrize(("quota_us", "threads"), [(100_000, 0), (150_000, 1)])
def test_the_quota_of_a_control_group_bounds_a_team(control_group, quota_us, threads):
    prefix = control_group(
        "cpu",
        {"cpu.cfs_period_us": 100_000, "cpu.cfs_quota_us": quota_us},
        {"cpu.max": f"{quota_us} 100000"},
    )
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("there is one processor")
    found = run_child("count_copy_threads", threads=None, size=8 * MIB, prefix=prefix)
    assert found.report["threads"] == threads


def test_a_team_uses_all_usable_processors():
    count = len(os.sched_getaffinity(0))
    if count < 2:
        pytest.skip("there is one processor")
    pytest.importorskip("torch")
    assert run_child("count_copy_threads", threads=None).report["threads"] == count - 1
    for limit in (1, 2):
        found = run_child("count_copy_threads", threads=None, torch_threads=limit)
        assert found.report["threads"] == limit - 1
