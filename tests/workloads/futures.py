"""Processes that await requests."""

import asyncio
import contextlib
import importlib
from pathlib import Path

import nvmeio
from helpers import SLOW, Guarded, plugged
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
