"""Handles in processes that fork."""

import asyncio
import atexit
import functools
import gc
import multiprocessing
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import nvmeio
from helpers import Guarded, fork, pattern
from workloads.common import (
    Faults,
    errors_of,
    make_file,
    read_checked,
    read_small,
    report,
    thread_count,
    write_checked,
)


def join(child):
    """Assert that a forked child succeeded."""
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def use_handle(handle, folder, name, engine):
    """Use a handle in a child, which has its own workers."""
    path = f"{folder}/{name}"
    data = pattern(300_000, len(name))
    write_checked(handle, path, data)
    read_checked(handle, path, data)
    read_small(handle, path, data[:5000])
    assert handle.pending == 0
    assert handle.stats()["engine"] == engine


def use_op(op, folder, name, engine):
    """Use DeepSpeed's op in a child, and the handle under it."""
    use_handle(op.handle, folder, name, engine)
    op.async_pread(bytearray(100), f"{folder}/{name}")
    assert op.wait() == 1


def fork_idle(folder, engine, count=8):
    """Use the parent's handle in several children at once, and in their children."""
    op = nvmeio.aio_handle(65536, engine=engine, intra_op_parallelism=2)
    handle = op.handle
    path = f"{folder}/parent-{engine}"
    data = make_file(path, 1 << 20)
    read_checked(handle, path, data)
    read_small(handle, path, data[:4096])

    def child(name, depth):
        use_op(op, folder, name, engine)
        if depth:
            join(fork(child, f"{name}-{depth}", depth - 1))
            use_op(op, folder, name, engine)
        op.close()

    children = [fork(child, f"{engine}-{n}", 2 if n == 0 else 0) for n in range(count)]
    for _ in range(20):
        read_checked(handle, path, data)
    for process in children:
        join(process)
    read_checked(handle, path, data)
    handle.close()
    report({"engine": handle.stats()["engine"]})


def fork_unused(folder, engine):
    """End in a child that submits nothing, and check that it starts no worker."""
    handles = [nvmeio.Handle(engine=engine, workers=2) for _ in range(3)]
    read_checked(handles[0], f"{folder}/data", make_file(f"{folder}/data", 4096))

    def child(end):
        end(handles[0])
        atexit._run_exitfuncs()
        # A thread of Python is joined a moment before it ends.
        deadline = time.monotonic() + 10
        while thread_count() > 1 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert thread_count() == 1

    ends = {
        "exit": lambda handle: None,
        "ask": lambda handle: (repr(handle), handle.pending),
        "drain": nvmeio.Handle.drain,
        "close": nvmeio.Handle.close,
        "async with": lambda handle: asyncio.run(handle.__aexit__()),
    }
    for end in ends.values():
        join(fork(child, end))
    report({"ends": [*ends]})


def fork_latencies(folder, engine):
    """Check that latencies count separately in the child and in the parent."""
    path = f"{folder}/data"
    data = make_file(path, 1 << 20)
    said, heard = os.pipe()

    def child(handle):
        assert handle.latencies().count == 0
        read_checked(handle, path, data[:65536])
        read_small(handle, path, data[:4096])
        blocks = handle.latencies().count
        assert blocks == handle.stats()["blocks"]
        os.write(heard, str(blocks).encode())

    with nvmeio.Handle(block_size=65536, engine=engine) as handle:
        read_checked(handle, path, data)
        read_small(handle, path, data[:4096])
        before = handle.latencies().count
        assert before == handle.stats()["blocks"]
        join(fork(child, handle))
        assert handle.latencies().count == before
        report({"parent": before, "child": int(os.read(said, 20))})

    def child_of_closed(closed):
        assert closed.latencies().count == 0
        assert closed.stats()["blocks"] == closed.stats()["requests"] == 0

    join(fork(child_of_closed, handle))
    assert handle.latencies().count == before


def fork_in_flight(folder, control, other, engine):
    """Fork while reads are held; children use or drop the handle; the parent goes on."""
    path = f"{folder}/held-{engine}"
    faults = Faults(control)
    data = make_file(path, 1 << 18)
    file = nvmeio.File(path)
    op = nvmeio.aio_handle(65536, engine=engine)
    handle = op.handle
    done = handle.submit_read(bytearray(3), file)
    done.wait()
    faults.set(read={"held": True})
    tracked, single = Guarded(len(data)), Guarded(len(data))
    op.async_pread(tracked.array, file)
    request = handle.submit_read(single.array, file)
    faults.await_waiting()

    def child():
        assert op.wait() == 0
        assert handle.pending == 0
        assert errors_of(request.wait) == "EOWNERDEAD"
        assert errors_of(request.done) == "EOWNERDEAD"
        for before in (request, [done]):
            later = functools.partial(handle.submit_read, bytearray(3), file, after=before)
            assert errors_of(later) == "EOWNERDEAD"
        use_op(op, other, f"child-{engine}", engine)

    def drop():
        nonlocal op, handle, request, done, tracked, single, file
        op = handle = request = done = tracked = single = file = None
        gc.collect()

    join(fork(child))
    join(fork(drop))
    join(fork(op.close))
    pending = handle.pending
    faults.set()
    assert op.wait() == 1
    assert request.wait() == len(data)
    assert tracked.content() == data
    assert single.content() == data
    handle.close()
    report({"pending": pending, "fired": faults.fired()})


def fork_from_crowd(folder, engine, threads=3, forks=6):
    """Fork while other threads submit and wait."""
    op = nvmeio.aio_handle(16384, engine=engine)
    handle = op.handle
    path = f"{folder}/crowd-{engine}"
    data = make_file(path, 1 << 18)
    over = threading.Event()

    def work():
        rounds = 0
        while not over.is_set():
            read_checked(handle, path, data)
            read_small(handle, path, data[:4096])
            rounds += 1
        return rounds

    with ThreadPoolExecutor(threads) as pool:
        workers = [pool.submit(work) for _ in range(threads)]
        for number in range(forks):
            join(fork(use_op, op, folder, f"{engine}-{number}", engine))
        over.set()
        rounds = [worker.result() for worker in workers]
    handle.close()
    report({"rounds": rounds})


def work_in_process(op, folder, name, engine):
    """Use a handle in a worker of multiprocessing."""
    use_op(op, folder, name, engine)
    return os.getpid()


def processes(folder, engine, method):
    """Pass a handle to the workers of a multiprocessing pool."""
    op = nvmeio.aio_handle(65536, engine=engine)
    use_op(op, folder, "parent", engine)
    context = multiprocessing.get_context(method)
    with context.Pool(2) as pool:
        jobs = [(op, folder, f"{method}-{n}", engine) for n in range(4)]
        workers = pool.starmap(work_in_process, jobs)
        pool.close()
        pool.join()
    assert os.getpid() not in workers
    use_op(op, folder, "parent-again", engine)
    report({"workers": len(set(workers))})


def data_loader(folder, method, count=32, record=5000):
    """Read records in the workers of torch DataLoaders with the parent's handle."""
    import torch
    from torch.utils.data import DataLoader

    path = f"{folder}/records"
    data = make_file(path, count * record)
    dataset = FileRecords(path, count, record)
    expected = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(count, record)
    assert torch.equal(dataset[3], expected[3])
    multiprocessing.set_forkserver_preload(["torch"])
    for persistent in (False, True):
        loader = DataLoader(
            dataset,
            batch_size=4,
            num_workers=2,
            persistent_workers=persistent,
            multiprocessing_context=method,
        )
        for _ in range(2):
            assert torch.equal(torch.cat(list(loader)), expected)
    report({"records": count})


class FileRecords:
    """A map-style dataset of the records of a file."""

    def __init__(self, path, count, record):
        self.handle = nvmeio.Handle()
        self.path = path
        self.count = count
        self.record = record

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        import torch

        tensor = torch.zeros(self.record, dtype=torch.uint8)
        self.handle.read(tensor, self.path, offset=index * self.record)
        return tensor
