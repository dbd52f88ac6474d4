"""Requests on asyncio: an eventfd for each handle and event loop, and no thread.

Imported when a request is first awaited, for asyncio takes longer to import than nvmeio.
"""

import asyncio
import contextlib
import math
import os
import weakref
from collections.abc import Collection
from typing import Any

from nvmeio._events.listener import Listener, Request, Workers

__all__ = ["Alarm", "outcome_of"]


class Watcher:
    """Wakes one event loop when requests of one handle are done.

    The loop's registration of the eventfd holds it, and nothing else for long: it goes with
    the loop, or when the workers are stopped.
    """

    def __init__(self, workers: Workers, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._workers = workers
        self._waiting = 0
        self._armed = False
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._release = weakref.finalize(self, _release, workers, self._fd)
        # The end of the process closes it too, when no worker can signal it any more.
        self._release.atexit = False
        loop.add_reader(self._fd, self._look)

    def begin(self) -> None:
        """One more coroutine waits."""
        self._waiting += 1
        self._arm()

    def end(self) -> None:
        """One coroutine less waits.  With the last the workers are asked for no more."""
        self._waiting -= 1

    def close(self) -> None:
        """Let go of the eventfd: at once in the loop's own thread, else there and soon."""
        if asyncio._get_running_loop() is self.loop:
            self._close()
        else:
            _call_soon(self.loop, self._close)

    def _close(self) -> None:
        if self._release.alive:
            self.loop.remove_reader(self._fd)
            self._release()

    def _arm(self) -> None:
        if not self._armed:
            self._armed = True
            self._workers.watch(self._fd)

    def _look(self) -> None:
        """Clear, ask again, and only then look: so no completion is missed."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        self._armed = False
        if self._waiting:
            self._arm()
        self._workers.collect()


def _release(workers: Workers, fd: int) -> None:
    workers.unwatch(fd)
    os.close(fd)


def _call_soon(loop: asyncio.AbstractEventLoop, function: Any) -> None:
    """Have a loop call a function; one that is closed has nothing to wake any more."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function)


def watcher_of(workers: Workers, loop: asyncio.AbstractEventLoop) -> Watcher | None:
    """Find or make the watcher of a handle's workers and the running loop."""
    known = workers.watchers
    if known is None:
        return None
    for reference in list(known):
        found: Watcher | None = reference()
        if found is not None and found.loop is loop:
            return found
    watcher = Watcher(workers, loop)
    known.add(weakref.ref(watcher, known.discard))
    if workers.watchers is not known:
        # They were stopped in between, by a thread that may not have seen this one.
        watcher.close()
        return None
    return watcher


class Alarm(Listener):
    """Hears of requests that are done for one coroutine, which sleeps meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[None] | None = None
        self._watchers: list[Watcher] = []

    def listen(self, requests: Collection[Request]) -> int:
        """Add requests, and count them; see ``Listener.listen``."""
        # The workers first: what is done before is found by add_done_callback().
        for workers in {request._workers for request in requests}:
            watcher = watcher_of(workers, self._loop)
            if watcher is not None:
                watcher.begin()
                self._watchers.append(watcher)
        return super().listen(requests)

    async def sleep(self, timeout: float = math.inf) -> None:
        """Suspend the coroutine until a request is done, or for some time."""
        self._future = self._loop.create_future()
        timer = None
        if timeout < math.inf:
            timer = self._loop.call_later(timeout, self._wake)
        try:
            await self._future
        finally:
            self._future = None
            if timer is not None:
                timer.cancel()

    def close(self) -> None:
        """Hear no more."""
        super().close()
        while self._watchers:
            self._watchers.pop().end()

    def _ring(self) -> None:
        if asyncio._get_running_loop() is self._loop:
            self._wake()
        else:
            _call_soon(self._loop, self._wake)

    def _wake(self) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_result(None)


async def outcome_of(request: Request) -> Any:
    """Wait for a request as ``await request`` does."""
    if not request.done():
        await _drain(request)
    return request.wait(0)


async def _drain(request: Request) -> None:
    interruption = None
    alarm = Alarm()
    try:
        alarm.listen([request])
        while not request.done():
            try:
                await alarm.sleep()
            except asyncio.CancelledError as error:
                interruption = error
                request.cancel()
        if interruption is not None:
            raise interruption
    finally:
        # Its traceback holds this frame.
        del interruption
        alarm.close()
