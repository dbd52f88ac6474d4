"""Random sequences of transfers leave the file that a model in memory predicts."""

import contextlib
import errno
import os
from concurrent.futures import CancelledError
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import nvmeio
from helpers import PAGE, Guarded, pattern, routes

BLOCK = 2 * PAGE
SIZE_MAX = 5 * BLOCK

# Positions near boundaries of sectors, pages and blocks find more defects.
SEAMS = st.builds(
    lambda seam, beside: max(0, seam + beside),
    st.sampled_from([0, 512, PAGE, PAGE + 512, BLOCK, 3 * PAGE, 2 * BLOCK, 4 * BLOCK]),
    st.sampled_from([-512, -1, 0, 0, 0, 1, 7, 512]),
)
SIZES = SEAMS | st.integers(0, SIZE_MAX)
TRANSFERS = st.tuples(
    st.sampled_from(["read", "write"]),
    st.sampled_from(["sync", "validate", "async", "request", "cancel"]),
    st.sampled_from(["path", "fd", "File"]),
    SEAMS | st.integers(0, 2 * SIZE_MAX),
    SIZES,
    st.sampled_from([0, 0, 1, 64, 512, 777]),
)
STEPS = TRANSFERS | st.sampled_from(["wait", "fsync", "reopen"])


def assert_mixed(found, old, new):
    """Assert that every byte is the old or the new one."""
    found, old, new = (
        np.frombuffer(part[: len(found)], "u1") for part in (found, old, new)
    )
    assert ((found == old) | (found == new)).all()


@dataclass
class Pending:
    """A transfer in flight: what it touches, and how to check it."""

    op: str
    begin: int
    end: int
    memory: Guarded
    expected: bytes
    before: bytes
    request: nvmeio.Request | None = None
    cancelled: bool = False

    def collides(self, op, begin, end):
        """Return whether the order of this and another transfer matters."""
        return "write" in (op, self.op) and begin < self.end and self.begin < end


@dataclass
class Model:
    """A file, its expected contents, and the op and handle under test."""

    op: nvmeio.aio_handle
    path: str
    stack: contextlib.ExitStack
    content: bytearray = field(default_factory=bytearray)
    pending: list[Pending] = field(default_factory=list)
    settled: int = 0  # the size of the file without the writes in flight
    moved: int = 0
    moved_perhaps: int = 0  # by cancelled writes
    count: int = 0

    def __post_init__(self):
        self.handle = self.op.handle
        self.settled = len(self.content)
        self.reopen()

    def reopen(self):
        """Open the file again for later steps; transfers in flight go on."""
        self.stack.close()
        fd = os.open(self.path, os.O_RDWR)
        self.stack.callback(os.close, fd)
        file = self.stack.enter_context(nvmeio.File(self.path, "r+"))
        self.files = {"path": self.path, "fd": fd, "File": file}

    def wait(self):
        """Wait for everything, and check the bytes of reads."""
        asynchronous = [each for each in self.pending if each.request is None]
        assert self.op.wait() == len(asynchronous)
        assert self.handle.pending == 0
        for each in self.pending:
            if each.cancelled:
                self.give_up(each)
                continue
            if each.request is not None:
                assert each.request.wait() == each.end - each.begin
            assert each.memory.content() == each.expected
        if any(each.cancelled and each.op == "write" for each in self.pending):
            self.adopt()
        self.pending.clear()
        self.settled = len(self.content)

    def give_up(self, each):
        """Wait for a cancelled transfer; bytes that it did not move must be as before."""
        with pytest.raises(CancelledError):
            each.request.wait()
        if each.op == "write":
            assert each.memory.content() == each.expected
        else:
            untouched = bytes([Guarded.CANARY]) * len(each.expected)
            assert_mixed(each.memory.content(), untouched, each.expected)

    def adopt(self):
        """Adopt the bytes that cancelled writes left; each must be old or new."""
        with open(self.path, "rb") as file:
            found = file.read()
        dropped = [each for each in self.pending if each.cancelled and each.op == "write"]
        kept = [each for each in self.pending if each.op == "write" and not each.cancelled]
        at_least = max(
            [self.settled, *(each.end for each in kept if each.end > each.begin)]
        )
        assert at_least <= len(found) <= len(self.content)
        expected = self.content[: len(found)]
        for each in dropped:
            piece = found[each.begin : each.end]
            assert_mixed(piece, each.before, each.expected)
            expected[each.begin : each.begin + len(piece)] = piece
        assert found == expected
        self.content = expected

    def fsync(self):
        self.handle.fsync(self.path)

    def transfer(self, op, way, kind, begin, size, residue):
        """Run a transfer, and record its effect on the file."""
        end = begin + size
        beyond = op == "read" and size > 0 and end > self.settled
        if beyond or any(each.collides(op, begin, end) for each in self.pending):
            self.wait()
        if beyond and end > len(self.content):
            self.fail(kind, begin, size)
            return
        self.count += 1
        before = bytes(self.content[begin:end]).ljust(size, b"\0")
        if op == "write":
            expected = pattern(size, seed=self.count)
            memory = Guarded(expected, residue)
            if size > 0:
                self.content.extend(bytes(max(0, begin - len(self.content))))
                self.content[begin:end] = expected
        else:
            expected = bytes(self.content[begin:end])
            memory = Guarded(size, residue)
        pending = Pending(op, begin, end, memory, expected, before)
        self.start(pending, way, self.files[kind])
        if pending.cancelled:
            self.moved_perhaps += size
        else:
            self.moved += size

    def start(self, pending, way, file):
        arguments = (pending.memory.array, file)
        if way in ("sync", "validate"):
            call = getattr(self.op, f"p{pending.op}")
            assert call(*arguments, way == "validate", False, pending.begin) == 1
            assert pending.memory.content() == pending.expected
            return
        if way == "async":
            name = f"async_p{pending.op}"
            assert getattr(self.op, name)(*arguments, pending.begin) == 0
        else:
            submit = getattr(self.handle, f"submit_{pending.op}")
            pending.request = submit(*arguments, pending.begin)
            pending.cancelled = way == "cancel" and pending.request.cancel()
        self.pending.append(pending)

    def fail(self, kind, begin, size):
        """Read past the end, which must fail."""
        got = max(0, len(self.content) - begin)
        with pytest.raises(
            OSError, match=f"wanted {size} bytes at offset {begin}, got {got}"
        ) as caught:
            self.handle.read(bytearray(size), self.files[kind], offset=begin)
        assert caught.value.errno == errno.ENODATA

    def check(self):
        """Check the contents of the file by an ordinary read."""
        self.wait()
        with open(self.path, "rb") as file:
            assert file.read() == self.content
        assert self.moved <= routes(self.handle).total() <= self.moved + self.moved_perhaps
        assert self.handle.pending == 0


CONFIGURATIONS = st.fixed_dictionaries(
    {
        "block_size": st.just(BLOCK),
        "queue_depth": st.sampled_from([1, 3]),
        "single_submit": st.booleans(),
        "overlap_events": st.booleans(),
        "intra_op_parallelism": st.sampled_from([1, 2]),
        "bounce": st.sampled_from(["auto", "always", "never"]),
        "direct": st.sampled_from(["auto", True, False]),
    }
)


@settings(
    max_examples=60,
    # Examples share the folder, but not the file.
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    options=CONFIGURATIONS,
    content=st.integers(0, SIZE_MAX),
    steps=st.lists(STEPS, min_size=3, max_size=25),
)
def test_the_file_matches_the_model(engine, folder, alignment, options, content, steps):
    path = folder / "data"
    path.write_bytes(pattern(content))
    if alignment == 1:
        # This file system has no O_DIRECT to demand.
        options = {**options, "direct": False}
    with (
        nvmeio.aio_handle(engine=engine, **options) as op,
        contextlib.ExitStack() as stack,
    ):
        model = Model(op, str(path), stack, bytearray(pattern(content)))
        for step in steps:
            if isinstance(step, str):
                getattr(model, step)()
            else:
                model.transfer(*step)
        model.check()
        assert op.stats()["engine"] == engine
