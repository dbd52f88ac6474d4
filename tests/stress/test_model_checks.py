"""The model's own checks find wrong bytes in memory and files."""

import ctypes
import errno
import gc
import random
import re

import numpy as np
import pytest

from children import Child, can_fork
from filemodel import plans
from filemodel.fences import KINDS, Memory
from filemodel.inflight import InFlight
from filemodel.regimes import Regime
from helpers import ENGINES, PAGE, Guarded
from workloads.common import Faults


def flight_of(kind="floating", op="read", size=1000, **details):
    """Return a transfer of one record with the right bytes in memory."""
    memory = Memory(size, kind, 7)
    memory.fill(np.arange(size, dtype=np.uint8))
    transfer = plans.Transfer(op, ((PAGE, 0, size),), "request", "path", (), race=False)
    return InFlight(transfer, "file", memory, [], **details)


@pytest.mark.parametrize("kind", KINDS)
def test_a_byte_beside_the_memory_is_seen(kind):
    flight = flight_of(kind)
    whole, part = flight.memory.whole, flight.memory.part
    assert flight.look(whole) == ""
    beside = np.setdiff1d(np.arange(len(whole)), np.arange(len(whole))[part])
    for position in (beside[0], beside[-1]):
        whole[position] ^= 1
        assert "1 bytes are wrong" in flight.look(whole)
        whole[position] ^= 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_byte_that_is_neither_old_nor_new_is_seen(kind):
    """Bytes of a failed read may be old; those of a racing one, as in either write."""
    other = (PAGE + 100, np.full(100, 200, np.uint8))
    flight = flight_of(kind, failed=(0,), others=[other])
    flight.memory.buffer[150:160] = Guarded.CANARY
    flight.memory.buffer[160:170] = 200
    assert flight.look(flight.memory.whole) == ""
    flight.memory.buffer[99] = 200
    assert "1 bytes are wrong, " in flight.look(flight.memory.whole)
    flight.failed = ()
    assert "11 bytes are wrong, " in flight.look(flight.memory.whole)


@pytest.mark.parametrize("kind", ["front", "back"])
def test_the_system_cannot_write_past_a_fence(tmp_path, kind):
    memory = Memory(5000, kind, 0)
    begin = memory.buffer.ctypes.data
    address = begin - 1 if kind == "front" else begin + 5000
    (tmp_path / "file").write_bytes(b"x")
    libc = ctypes.CDLL(None, use_errno=True)
    with open(tmp_path / "file", "rb") as file:
        assert libc.pread(file.fileno(), ctypes.c_void_p(address), 1, 0) == -1
        assert ctypes.get_errno() == errno.EFAULT
        inside = address + 1 if kind == "front" else address - 1
        assert libc.pread(file.fileno(), ctypes.c_void_p(inside), 1, 0) == 1


def test_dropped_memory_is_checked_when_its_last_reference_goes():
    flight = flight_of()
    held = flight.memory.buffer
    flight.drop()
    gc.collect()
    assert flight.verdict == "the memory was not released"
    held[3] ^= 1
    del held
    assert "1 bytes are wrong" in flight.verdict


@pytest.mark.parametrize(
    ("faults", "begin", "end", "may", "must"),
    [
        ({"error": errno.EIO}, 5, 6, True, True),
        ({"error": errno.EIO, "times": 1}, 5, 6, True, False),
        ({"error": errno.EIO, "at": 5}, 5, 6, True, True),
        ({"error": errno.EIO, "at": 5}, 6, 9, True, False),
        ({"error": errno.EIO, "at": 5}, PAGE, 2 * PAGE, False, False),
        ({"error": errno.EIO}, 5, 5, False, False),
        ({"error": errno.EINTR, "times": 3}, 5, 6, False, False),
        ({"short": 512}, 0, 3 * PAGE, False, False),
    ],
)
def test_a_read_may_fail_by_a_fault_in_its_pages_and_must_by_one_in_its_bytes(
    faults, begin, end, may, must
):
    regime = Regime({"read": faults})
    assert regime.may_fail("read", begin, end) == may
    assert regime.must_fail("read", begin, end) == must
    assert not regime.may_fail("write", begin, end)


@pytest.mark.parametrize("fuse", [False, True])
def test_a_seed_gives_one_plan_with_all_operations(fuse):
    first, second = (
        plans.draw(random.Random(5), limit=32 * PAGE, direct=True, fuse=fuse)
        for _ in range(2)
    )
    assert first == second
    counted = [step.counted for step in first[1] if step.counted]
    assert {kind: counted.count(kind) for kind in plans.DECK} == plans.DECK


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("call", ["read", "write"])
def test_a_flipped_bit_is_found(faulty, engine, call):
    """Flip a bit that only the library writes, in a case that otherwise passes."""
    (faulty / "control").touch()
    flips = Faults(faulty / "control")
    options = {"folder": str(faulty), "place": "fuse", "engine": engine, "seed": 5}
    options |= {"package": "cases", "forks": can_fork()}
    assert len(Child("random_operations", **options).finish().report) == 2
    flips.set(**{call: {"flip": 10 * PAGE + 5}})
    done = Child("random_operations", **options).finish(check=False)
    assert flips.fired()[f"{call}.flip"] > 0
    assert done.status == 1
    # Found in memory, in the file, after a cancelled write, or by nvmeio's own comparison.
    found = "bytes are wrong|neither old nor new|validation failed"
    assert re.search(found, done.stderr), done.stderr
