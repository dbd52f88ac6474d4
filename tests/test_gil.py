"""Blocking calls release the GIL.

The FUSE file system holds a system call of each, for half a minute at most.  If the thread
kept the GIL, the test could not run to see it wait.
"""

import gc
import threading

import pytest

import nvmeio
from helpers import BLOCK, DEPTH, MIB
from workloads.common import Faults, make_file


class Place:
    """A file whose calls can be held, and handles that use it."""

    def __init__(self, path, op):
        self.path = path
        self.op = op
        self.handle = op.handle
        self.data = bytearray(make_file(path, MIB))
        self.file = nvmeio.File(path, "r+")

    def submit(self):
        return self.handle.submit_read(self.data, self.file)

    def array(self):
        return nvmeio.ArrayFile(
            self.path, dtype="u1", shape=MIB, mode="r+", handle=self.handle
        )

    def close(self):
        self.submit()
        self.handle.close()

    def drain(self):
        self.submit()
        self.handle.drain()

    def wait(self):
        self.op.async_pread(self.data, self.file)
        assert self.op.wait() == 1

    def drop(self):
        """Drop a handle with a read in flight."""
        handle = nvmeio.Handle(engine=self.handle.engine)
        handle.submit_read(self.data, self.file)
        del handle
        gc.collect()

    def rewrite(self, **options):
        """Write the file in place, because faults do not apply to a temporary one."""
        nvmeio.write_file(self.data, self.path, atomic=False, **options)


HANDLE = (BLOCK, DEPTH, False, False, False)
READS = {
    "Request.wait": lambda at: at.submit().wait(),
    "Request.wait for a time": lambda at: at.submit().wait(timeout=60),
    "Request.result": lambda at: at.submit().result(),
    "Request.exception": lambda at: at.submit().exception(),
    "drain": Place.drain,
    "aio_handle.wait": Place.wait,
    "close": Place.close,
    "the end of a handle": Place.drop,
    "read": lambda at: at.handle.read(at.data, at.file),
    "read and validate": lambda at: at.op.read(at.data, at.file, True),
    "pread": lambda at: at.op.pread(at.data, at.file, False, False),
    "sync_pread": lambda at: at.op.sync_pread(at.data, at.file),
    "a small read": lambda at: at.handle.read(at.data[:100], at.file),
    "a read by path": lambda at: at.handle.submit_read(at.data, at.path).wait(),
    "gather": lambda at: at.handle.gather(at.file, [0, 9000], 100, bytearray(200)),
    "read_many": lambda at: at.handle.read_many([(at.data, at.file, 0)]),
    "nvmeio.wait": lambda at: nvmeio.wait([at.submit()]),
    "as_completed": lambda at: next(nvmeio.as_completed([at.submit()])).wait(),
    "an index of an array": lambda at: at.array()[[0, 9000]],
    "File": lambda at: nvmeio.File(at.path).close(),
    "read_file": lambda at: nvmeio.read_file(at.path),
    "read_into": lambda at: nvmeio.read_into(at.data, at.path),
    "aio_read": lambda at: nvmeio.aio_read(at.data, str(at.path), *HANDLE),
}
WRITES = {
    "write": lambda at: at.handle.write(at.data, at.file),
    "pwrite": lambda at: at.op.pwrite(at.data, at.file, False, False),
    "sync_pwrite": lambda at: at.op.sync_pwrite(at.data, at.file),
    "a small write": lambda at: at.handle.write(at.data[:100], at.file),
    "scatter": lambda at: at.handle.scatter(at.file, [0, 9000], 100, at.data[:200]),
    "an assignment to an array": lambda at: at.array().__setitem__(slice(0, 99), 1),
    "write_file": Place.rewrite,
    "aio_write": lambda at: nvmeio.aio_write(at.data, str(at.path), *HANDLE),
}
FSYNCS = {
    "fsync": lambda at: at.handle.fsync(at.file),
    "Request.wait for an fsync": lambda at: at.handle.submit_fsync(at.file).wait(),
    "write_file and sync": lambda at: at.rewrite(sync=True),
}
CALLS = [
    pytest.param(held, call, id=name)
    for held, calls in (("read", READS), ("write", WRITES), ("fsync", FSYNCS))
    for name, call in calls.items()
]


@pytest.mark.parametrize(("held", "call"), CALLS)
def test_other_threads_run_during(faulty, engine, held, call):
    place = Place(faulty / "file", nvmeio.aio_handle(BLOCK, DEPTH, engine=engine))
    # Change the faults through another file, because Linux locks one that is written or
    # synced.
    control = faulty / "control"
    control.touch()
    faults = Faults(control)
    faults.set(**{held: {"held": True}})
    blocked = threading.Thread(target=call, args=[place])
    blocked.start()
    try:
        faults.await_waiting()
        assert blocked.is_alive()
    finally:
        faults.set()
        blocked.join()
    assert faults.fired()[f"{held}.held"] > 0
