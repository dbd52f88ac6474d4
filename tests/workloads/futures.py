"""Processes that await requests."""

import asyncio
import contextlib
import importlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import nvmeio
from helpers import SLOW, Guarded, plugged
from nvmeio import aio
from seccomp_profiles import install_program, program_of
from workloads.common import Faults, errors_of, make_file, report
from workloads.forks import fork, join


def cancel_awaits(folder, control, engine, loop):
    """Cancel, twice, a task that awaits a held read."""

    async def read(handle, request):
        await request

    cancel(read, folder, control, engine, loop)


def cancel_leaving(folder, control, engine, loop):
    """Cancel, twice, a task at the end of a handle's block with a held read."""

    async def leave(handle, request):
        async with handle:
            pass

    cancel(leave, folder, control, engine, loop)


def cancel(function, folder, control, engine, loop):
    """Cancel a task twice while a read is held, and report whether it ended early."""
    path = f"{folder}/cancel-{engine}-{loop}"
    faults = Faults(control)
    data = make_file(path, 1 << 16)
    file = nvmeio.File(path)
    handle = nvmeio.Handle(engine=engine)
    guarded = Guarded(len(data))
    faults.set(read={"held": True})
    ended_early = []

    async def main():
        request = handle.submit_read(guarded.array, file)
        task = asyncio.create_task(function(handle, request))
        # It begins now: since Python 3.14, to_thread() may give the loop no turn.
        await asyncio.sleep(0)
        await asyncio.to_thread(faults.await_waiting)
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0.1)
            ended_early.append(task.done())
        await asyncio.to_thread(faults.set)
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert guarded.content() == data
        return task.cancelled()

    loop = importlib.import_module(loop).new_event_loop()
    cancelled = loop.run_until_complete(main())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    handle.close()
    report({"ended_early": ended_early, "cancelled": cancelled})


def fork_awaits(folder, engine):
    """Fork while a task awaits; the child awaits too, with its own loop."""
    path = f"{folder}/awaited-{engine}"
    data = make_file(path, 8 * 4096)
    handle = nvmeio.Handle(engine=engine, **SLOW)
    guarded = Guarded(len(data))

    async def child_main(old):
        for _ in range(3):
            target = Guarded(len(data))
            assert await handle.submit_read(target.array, path) == len(data)
            assert target.content() == data
        refusal = ""
        try:
            await old
        except OSError as error:
            refusal = str(error)
        assert "only the parent has it" in refusal

    def child(old):
        for call in (
            lambda: nvmeio.wait([old]),
            lambda: list(nvmeio.as_completed([old])),
            lambda: old.add_done_callback(report),
        ):
            assert errors_of(call) == "EOWNERDEAD"
        new = handle.submit_read(bytearray(4096), path)
        assert nvmeio.wait([new]).done == {new}
        # The parent's loop seems to be running, because the fork was in a coroutine.
        asyncio._set_running_loop(None)
        asyncio.run(child_main(old))
        handle.close()

    async def main():
        with plugged(handle, Path(folder)):
            request = handle.submit_read(guarded.array, path)
            task = asyncio.ensure_future(request)
            await asyncio.sleep(0)
            children = [fork(child, request) for _ in range(3)]
            for process in children:
                await asyncio.to_thread(join, process)
            assert not task.done()
        return await task

    got = asyncio.run(main())
    assert guarded.content() == data
    handle.close()
    report({"parent": got})


def order_held(folder, control, engine):
    """Hold a read, and check that the requests after it have not begun."""
    path, other = f"{folder}/held-{engine}", f"{folder}/other-{engine}"
    faults = Faults(control)
    data = make_file(path, 8192)
    handle = nvmeio.Handle(engine=engine)
    first, target = Guarded(8192), Guarded(8192)
    # Before that, because the file system answers no call while it holds the read.
    with nvmeio.File(path) as file, nvmeio.File(other, "w") as made:
        handle.write(b"old", made)
        faults.set(read={"held": True})
        held = handle.submit_read(first.array, file)
        faults.await_waiting()
        write = handle.submit_write(data[::-1], made, after=held)
        read = handle.submit_read(target.array, made, after=[write, held])
        dropped = handle.submit_read(bytearray(8192), file, after=[read, held])
        cancelled = dropped.cancel()
        done = handle.submit_fsync(made, after=[]).done()
        blocks = handle.stats()["blocks"]
        waiting = [held.done(), write.done(), read.done(), dropped.done(), done]
        faults.set()
        read.wait()
    report(
        {
            "waiting": waiting,
            "cancelled": cancelled,
            "blocks": blocks,
            "right": first.content() == data and target.content() == data[::-1],
        }
    )
    handle.close()


# System calls that open, close or look up a file.
OF_FILES = (
    *("open", "openat", "openat2", "creat", "close", "close_range", "stat", "lstat"),
    *("fstat", "newfstatat", "statx", "access", "faccessat", "faccessat2", "readlink"),
    *("readlinkat", "rename", "renameat", "renameat2", "link", "linkat", "unlink"),
    *("unlinkat", "ftruncate", "fsync", "fdatasync", "getxattr", "fgetxattr", "flock"),
)


def loop_without_files(folder):
    """Call every function of nvmeio.aio in a thread that may open, close and look up none.

    The first round imports what is needed, the second one also makes the default handle.
    """
    memory, odd, path = bytearray(8192), bytearray(5), f"{folder}/new"
    make_file(f"{folder}/data", 10_000)
    np.save(f"{folder}/rows.npy", np.zeros((10, 10)))
    profile = {
        "defaultAction": "SCMP_ACT_ALLOW",
        "defaultErrnoRet": 1,
        "syscalls": [{"names": OF_FILES, "action": "SCMP_ACT_ERRNO", "errnoRet": 35}],
    }
    program = program_of(profile)
    rows = nvmeio.ArrayFile(f"{folder}/rows.npy", mode="r+")
    calls = {
        "read_file": lambda: aio.read_file(f"{folder}/data"),
        "read_file, aligned": lambda: aio.read_file(f"{folder}/data", 4096, 4096),
        "read_into": lambda: aio.read_into(memory, f"{folder}/data"),
        "read_into, odd": lambda: aio.read_into(odd, f"{folder}/data", 3),
        "write_file": lambda: aio.write_file(odd, path),
        "write_file in place": lambda: aio.write_file(odd, path, atomic=False),
        "write_file, synced": lambda: aio.write_file(memory, path, sync=True),
        "write_file, aligned": lambda: aio.write_file(memory, path, atomic=False),
        "save": lambda: aio.save(path, np.zeros(10)),
        "load": lambda: aio.load(f"{folder}/rows.npy"),
        "getitem": lambda: aio.getitem(rows, [3, 1]),
        "setitem": lambda: aio.setitem(rows, slice(0, 2), 1),
        "append": lambda: aio.append(rows, np.zeros((1, 10))),
        "flush": lambda: aio.flush(rows),
    }
    found = {}

    async def main(name):
        loop = asyncio.get_running_loop()
        executor = ThreadPoolExecutor(4)
        # Its threads must not inherit the filter, so all are started before.
        barrier = threading.Barrier(4)
        list(executor.map(lambda _: barrier.wait(), range(4)))
        loop.set_default_executor(executor)
        await calls[name]()
        nvmeio.default_handle().close()
        install_program(program)
        found[name] = "ok"
        try:
            await calls[name]()
        except BaseException as error:
            found[name] = repr(error)

    def run(name):
        loop = asyncio.new_event_loop()
        loop.run_until_complete(main(name))
        # It cannot be closed in this thread.
        loops.append(loop)

    loops = []
    for name in calls:
        thread = threading.Thread(target=run, args=[name])
        thread.start()
        thread.join()
    rows.close()
    report(found)
