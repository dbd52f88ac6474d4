"""Handles with check_overlap refuse overlapping requests in flight, and no others."""

import contextlib
import gc
import itertools
import os
import weakref

import numpy as np
import pytest

import nvmeio
from helpers import PAGE, SLOW, pattern, plugged
from nvmeio._memory import overlap as _overlap
from nvmeio._memory.overlap import OVERLAPS
from nvmeio._native import request as _request
from nvmeio._native.gather import NewBytes

SIZE = 4 * PAGE
READS = ("read", "gather", "read_many")
WRITES = ("write", "scatter", "write_many")


@pytest.fixture
def held(open_handle, path, monkeypatch):
    """A handle that checks, and on which submitted requests stay in flight."""
    handle = open_handle(**SLOW, check_overlap=True)
    path.write_bytes(pattern(2 * SIZE))
    path.with_name("other").write_bytes(pattern(2 * SIZE))
    with contextlib.ExitStack() as stack:
        with monkeypatch.context() as patched:
            # The plugs all read into the same memory, and are not compared.
            patched.setattr(type(OVERLAPS), "admit", lambda *arguments: None)
            patched.setattr(_request, "footprint_of", lambda *arguments: None)
            stack.enter_context(plugged(handle, path.parent))
        yield handle


def start(handle, kind, path, buffer, offset=0, after=None):
    """Submit a request of some kind for a whole buffer and one place of a file."""
    half = len(buffer) // 2
    records = [path, [offset + half, offset], half, buffer]
    items = [(buffer, path, offset)]
    submit = getattr(handle, f"submit_{kind}")
    if kind.endswith("many"):
        return submit(items, after=after)
    if kind in ("gather", "scatter"):
        return submit(*records, after=after)
    return submit(buffer, path, offset, after=after)


def new():
    """Return separate memory."""
    return np.zeros(SIZE, np.uint8)


@pytest.mark.parametrize(
    ("first", "second"),
    [*itertools.product(WRITES, READS), *itertools.product(READS, WRITES), WRITES[:2]],
)
def test_overlap_in_the_file_is_refused_if_one_request_writes(held, path, first, second):
    one = start(held, first, path, new())
    with pytest.raises(RuntimeError) as refused:
        start(held, second, path, new(), SIZE - 2)
    assert repr(one) in str(refused.value)
    assert f"byte {SIZE - 2} of {str(path)!r}" in str(refused.value)
    assert second.partition("_")[0] in str(refused.value).partition(" and <")[0]
    # One byte further they only touch.
    start(held, second, path, new(), SIZE)


@pytest.mark.parametrize("first", READS)
@pytest.mark.parametrize("second", [*READS, *WRITES])
def test_overlap_in_memory_is_refused_if_one_request_reads_into_it(
    held, path, first, second
):
    memory = np.zeros(2 * SIZE, np.uint8)
    start(held, first, path, memory[:SIZE])
    with pytest.raises(RuntimeError, match=f"memory at {memory.ctypes.data + SIZE - 2:#x}"):
        start(held, second, path.with_name("other"), memory[SIZE - 2 :][:SIZE])


def test_reads_of_a_file_and_writes_of_memory_may_overlap(held, path):
    memory = new()
    for kind in READS:
        start(held, kind, path, new())
    for index, kind in enumerate(WRITES):
        start(held, kind, path.with_name(f"new{index}"), memory)


def test_a_file_is_known_by_any_name(held, path):
    os.link(path, path.with_name("link"))
    start(held, "write", path, new())
    with nvmeio.File(path.with_name("link")) as file, pytest.raises(RuntimeError):
        held.read(new(), file)


def test_chained_requests_may_overlap(held, path):
    first = start(held, "write", path, new())
    second = start(held, "write", path, new(), after=first)
    third = start(held, "read", path, new(), after=[second])
    with pytest.raises(RuntimeError) as refused:
        start(held, "write", path, new(), after=second)
    assert repr(third) in str(refused.value)


def test_an_fsync_chains_the_writes_before_it(held, path):
    start(held, "write", path, new())
    sync = held.submit_fsync(path)
    start(held, "write", path, new(), after=sync)


def test_an_fsync_is_refused_beside_a_write_of_another_handle(held, path, open_handle):
    start(held, "write", path, new())
    other = open_handle(check_overlap=True)
    with pytest.raises(RuntimeError, match="fsync"):
        other.fsync(path)
    other.fsync(path.with_name("plug"))


def test_handles_that_do_not_check_are_not_compared(held, path, open_handle):
    start(held, "write", path, new())
    other = open_handle()
    assert other.check_overlap is False
    other.read(new(), path)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_columns_are_compared_byte_by_byte(held, path, library):
    matrix = pytest.importorskip(library, reason=f"{library} is not installed").zeros(
        (64, 8)
    )
    held.submit_read(matrix[:, 0], path)
    held.submit_read(matrix[:, 1], path)
    held.submit_read(matrix[:, 4:6], path)
    with pytest.raises(RuntimeError, match="memory"):
        held.submit_read(matrix[10:11, 5:7], path)
    # The bytes to write were copied at submission.
    held.submit_write(matrix[:, 2], path.with_name("other"))
    held.submit_read(matrix[:, 2], path)


def test_bytes_objects_are_compared_one_by_one(held, path):
    half = SIZE // 2
    objects = NewBytes(np.full(4, half))
    held.submit_gather(path, [0, 0], half, objects, out_offsets=[0, 2])
    held.submit_gather(path, [0], half, objects, out_offsets=[1])
    with pytest.raises(RuntimeError, match="both touch the memory"):
        held.submit_gather(path, [0], half, objects, out_offsets=[2])


def test_items_of_one_request_are_compared(held, path):
    memory = np.zeros(2 * SIZE, np.uint8)
    with pytest.raises(RuntimeError, match=r"items\[1\] and items\[2\]"):
        held.submit_write_many(
            [(memory[:10], path, 0), (memory[:10], path, 20), (memory[:10], path, 29)]
        )
    with pytest.raises(RuntimeError, match=r"items\[0\] and items\[1\]"):
        held.submit_read_many([(memory[:10], path, 0), (memory[9:20], path, 10)])
    held.submit_read_many([(memory[:10], path, 0), (memory[10:20], path, 5)])


def test_finished_requests_overlap_with_nothing(open_handle, path):
    handle = open_handle(check_overlap=True)
    memory = new()
    for _ in range(3):
        handle.write(memory, path)
        handle.submit_read(memory, path).wait()
        handle.gather(path, [0, 0], 100, memory)
    with pytest.raises(OSError, match="past the end"):
        handle.submit_read(memory, path, 1 << 40).wait()
    handle.write(memory, path)


def test_a_refused_request_is_forgotten(held, path):
    memory = new()
    start(held, "write", path, new())
    with pytest.raises(RuntimeError):
        start(held, "read", path, memory)
    start(held, "read", path.with_name("plug"), memory)


def test_the_environment_switches_it_on(monkeypatch):
    monkeypatch.setenv("NVMEIO_CHECK_OVERLAP", "1")
    with nvmeio.Handle() as handle, nvmeio.Handle(check_overlap=False) as other:
        assert (handle.check_overlap, other.check_overlap) == (True, False)
    monkeypatch.setenv("NVMEIO_CHECK_OVERLAP", "yes")
    with pytest.raises(
        ValueError, match="NVMEIO_CHECK_OVERLAP is 'yes'; it must be 0 or 1"
    ):
        nvmeio.Handle()


def test_an_interrupted_request_overlaps_with_nothing(open_handle, path, monkeypatch):
    handle, memory = open_handle(check_overlap=True), new()
    handle.write(memory, path)
    admit = type(OVERLAPS).admit

    def interrupted(self, *arguments):
        admit(self, *arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(type(OVERLAPS), "admit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            handle.write(memory, path)
    handle.write(memory, path)


def test_a_signal_handler_may_use_a_handle_meanwhile(held, path, monkeypatch):
    """The signal arrives during the check of another request."""
    compare, seen = _overlap._compare, []

    def interrupted(*arguments):
        if not seen:
            seen.append(None)
            seen[0] = start(held, "read", path, new())
        compare(*arguments)

    start(held, "read", path, new())
    monkeypatch.setattr(_overlap, "_compare", interrupted)
    start(held, "read", path, new())
    assert isinstance(seen[0], nvmeio.Request)


def test_the_check_keeps_no_results_alive(open_handle, path):
    handle = open_handle(check_overlap=True)
    path.write_bytes(pattern(SIZE))

    class Result:
        pass

    result = Result()
    known = weakref.ref(result)
    request = handle.submit_gather(path, [0], 10, new(), result=result)
    del result
    request.wait()
    del request
    gc.collect()
    assert known() is None
