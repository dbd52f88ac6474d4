"""Await requests in asyncio: with an eventfd for each handle and event loop, and no thread.

Imported on first need, because asyncio takes longer to import than nvmeio.
"""

import asyncio
import concurrent.futures
import contextlib
import math
import weakref
from collections.abc import Awaitable, Callable, Collection
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Generic, TypeVar

from nvmeio._events.listener import (
    SLICE_S,
    Listener,
    Pauses,
    Request,
    Workers,
)

__all__ = ["InThread", "TaskListener", "as_coroutine", "close", "in_thread", "submitted"]

R = TypeVar("R")
V = TypeVar("V")


class Watcher:
    """Wakes one event loop when requests of one handle are done.

    Only the loop's registration of the eventfd holds it for long.  It ends with the loop,
    or when the workers are stopped.
    """

    def __init__(self, workers: Workers, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._workers = workers
        self._waiting = 0
        self._armed = False
        self._looks: set[asyncio.Future[None]] = set()
        self._eventfd = workers.new_eventfd()
        loop.add_reader(self._eventfd.number, self._look)

    def begin(self) -> None:
        """Count one more waiting coroutine."""
        self._waiting += 1
        self._arm()

    def end(self) -> None:
        """Count one fewer waiting coroutine; after the last, ask for no more signals."""
        self._waiting -= 1

    async def look(self) -> None:
        """Suspend the coroutine until completions were collected, or for a short time."""
        # Requests that only advance in Python (staged.pyx) are polled between two slices.
        future = self.loop.create_future()
        self._looks.add(future)
        timer = self.loop.call_later(SLICE_S, _wake, future)
        try:
            await future
        finally:
            self._looks.discard(future)
            timer.cancel()

    def close(self) -> None:
        """Close the eventfd: now if this is the loop's thread, else soon in that thread."""
        if asyncio._get_running_loop() is self.loop:
            self._close()
        else:
            _call_soon(self.loop, self._close)

    def _close(self) -> None:
        if self._eventfd.number >= 0:
            self.loop.remove_reader(self._eventfd.number)
            self._eventfd.close()

    def _arm(self) -> None:
        if not self._armed and self._eventfd.number >= 0:
            self._armed = True
            if not self._eventfd.watch(self._workers):
                # Out of memory: look again soon.
                self.loop.call_later(SLICE_S, self._look)

    def _look(self) -> None:
        """Clear the eventfd, ask again, and only then look: so no completion is missed."""
        self._eventfd.clear()
        self._armed = False
        if self._waiting:
            self._arm()
        try:
            self._workers.collect()
        finally:
            for future in self._looks:
                _wake(future)


def _call_soon(loop: asyncio.AbstractEventLoop, function: Any) -> None:
    """Call a function in a loop's thread, unless the loop is closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function)


def _wake(future: asyncio.Future[None] | None) -> None:
    """Resume the coroutine that awaits a future, if there is one."""
    if future is not None and not future.done():
        future.set_result(None)


def watcher_of(workers: Workers, loop: asyncio.AbstractEventLoop) -> Watcher | None:
    """Find or make the watcher for a handle's workers and the running loop.

    None if the workers are stopped, or the system has no eventfd left.
    """
    known = workers.watchers
    if known is None:
        return None
    for reference in list(known):
        found: Watcher | None = reference()
        if found is not None and found.loop is loop:
            return found
    try:
        watcher = Watcher(workers, loop)
    except OSError as error:
        if error.errno is None:
            # A signal handler raised it.
            raise
        return None
    known.add(weakref.ref(watcher, known.discard))
    if workers.watchers is not known:
        # Another thread stopped the workers meanwhile, perhaps without seeing this watcher.
        watcher.close()
        return None
    return watcher


class TaskListener(Listener):
    """Collects completions for one coroutine, which sleeps meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        # First, because close() needs it, also if the rest fails.
        self._watchers: list[Watcher] = []
        self.loop = asyncio.get_running_loop()
        self._future: asyncio.Future[None] | None = None
        # Workers without a watcher, and the pauses between looks at them.
        self._polled: list[Workers] = []
        self._pauses = Pauses()

    def listen(self, requests: Collection[Request]) -> int:
        """Add requests, and count them; see ``Listener.listen``."""
        # The watchers first: _listen() finds requests that are done before.
        for workers in {request._workers for request in requests}:
            watcher = watcher_of(workers, self.loop)
            if watcher is None:
                self._polled.append(workers)
            else:
                watcher.begin()
                self._watchers.append(watcher)
        return super().listen(requests)

    async def sleep(self, timeout: float = math.inf) -> None:
        """Suspend the coroutine until a request is done, or for `timeout` seconds."""
        if self._polled:
            timeout = min(timeout, next(self._pauses))
        self._future = self.loop.create_future()
        timer = None
        if timeout < math.inf:
            timer = self.loop.call_later(timeout, _wake, self._future)
        try:
            await self._future
        finally:
            self._future = None
            if timer is not None:
                timer.cancel()
        for workers in self._polled:
            workers.collect()

    def close(self) -> None:
        """Stop listening."""
        super().close()
        while self._watchers:
            self._watchers.pop().end()

    def __del__(self) -> None:
        self.close()

    def _wake(self) -> None:
        if asyncio._get_running_loop() is self.loop:
            self._resume()
        else:
            _call_soon(self.loop, self._resume)

    def _resume(self) -> None:
        _wake(self._future)


async def _until(
    is_done: Callable[[], bool],
    sleep: Callable[[], Awaitable[Any]],
    cancel: Callable[[], Any] | None = None,
) -> None:
    """Sleep until something is done, even if the task is cancelled meanwhile.

    The cancellation is raised then.
    """
    interruption = None
    try:
        while not is_done():
            try:
                await sleep()
            except asyncio.CancelledError as error:
                interruption = error
                if cancel is not None:
                    cancel()
        if interruption is not None:
            raise interruption
    finally:
        # Break the cycle: its traceback holds this frame.
        del interruption


async def as_coroutine(request: Request) -> Any:
    """Wait for a request as ``await request`` does."""
    if not request.done():
        listener = TaskListener()
        try:
            listener.listen([request])
            await _until(request.done, listener.sleep, request.cancel)
        finally:
            listener.close()
    try:
        return request.wait(0)
    except concurrent.futures.CancelledError as error:
        raise asyncio.CancelledError(*error.args) from error


async def close(workers: Workers, stop: Callable[[], None]) -> None:
    """Wait until workers have nothing in flight, then stop them by a call that may block.

    Submission must be closed already.  A cancelled task keeps waiting, and raises at the
    end.
    """
    try:
        await _drain(workers)
    except asyncio.CancelledError:
        await in_thread(stop)
        raise
    await in_thread(stop)


async def _drain(workers: Workers) -> None:
    """Wait until workers have nothing in flight."""
    if workers.is_idle():
        # Watching would start the workers of a forked child.
        return
    watcher = watcher_of(workers, asyncio.get_running_loop())
    if watcher is None:
        # stop() waits instead.
        return
    watcher.begin()
    try:
        await _until(workers.is_idle, watcher.look)
    finally:
        watcher.end()


async def in_thread(function: Callable[..., R], /, *args: Any) -> R:
    """Call a short function that may block in the running loop's default executor.

    A cancelled task waits for it before it raises.
    """
    future = asyncio.get_running_loop().run_in_executor(None, function, *args)
    try:
        await _until(future.done, lambda: asyncio.wait([future]))
    except asyncio.CancelledError:
        # The cancellation is raised, so nobody can look at the call's own error.
        future.exception()
        raise
    return future.result()


async def submitted(submit: Callable[..., Request], /, *args: Any) -> Any:
    """Submit a request in the default executor, and await it.

    A cancelled task cancels the request, and waits for it before it raises.
    """
    future = asyncio.get_running_loop().run_in_executor(None, submit, *args)
    try:
        await _until(future.done, lambda: asyncio.wait([future]))
    except asyncio.CancelledError:
        if future.exception() is None:
            future.result().cancel()
            # The cancellation is raised, and not what became of the request.
            with contextlib.suppress(Exception, asyncio.CancelledError):
                await as_coroutine(future.result())
        raise
    return await as_coroutine(future.result())


class InThread(Generic[V]):
    """A context entered and left by ``in_thread``, whenever the task is cancelled."""

    def __init__(self, context: AbstractContextManager[V]) -> None:
        self._context = context
        # Knows whether the context was entered, even if the result was lost.
        self._stack = contextlib.ExitStack()

    async def __aenter__(self) -> V:
        try:
            return await in_thread(self._stack.enter_context, self._context)
        except asyncio.CancelledError as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        if kind is GeneratorExit:
            # The loop is gone, so the coroutine cannot await anything any more.
            return self._stack.__exit__(kind, error, traceback)
        return await in_thread(self._stack.__exit__, kind, error, traceback)
