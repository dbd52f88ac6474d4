"""The thread that calls the callbacks of requests that no other thread observes.

It runs while requests with callbacks are in flight, and a second longer.
"""

import _thread
import logging
import select
import threading
import time
from typing import Any

from nvmeio._events.forks import call_in_child
from nvmeio._events.listener import SLICE_S, Eventfd, Pauses, eventfd_of

__all__ = ["CALLER"]

_log = logging.getLogger("nvmeio")

# How long the thread waits for the next request before it ends.
IDLE_MS = 1000


class Caller:
    """Observes the completion of requests in a thread of its own."""

    def __init__(self) -> None:
        self._eventfd: Eventfd | None = None
        self.forget()

    def forget(self) -> None:
        """Forget all state, as a forked child must: the thread is the parent's."""
        if self._eventfd is not None:
            self._eventfd.close()
        # An RLock, because a signal handler may come back here.
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._starting = False
        self._eventfd = None
        # The requests in flight that have callbacks.
        self._requests: set[Any] = set()

    def call_when_done(self, request: Any) -> None:
        """Make sure that the callbacks of a request are called."""
        with self._lock:
            self._requests.add(request)
            if self._eventfd is not None:
                self._eventfd.signal()
            if self._thread is not None or self._starting:
                return
            self._starting = True
            try:
                # In another thread, because Ctrl-C in Thread.start() may leave a lock held,
                # for which the new thread would wait for ever.
                _thread.start_new_thread(self._start, ())
            except RuntimeError as error:
                self._cannot_start(error)

    def _start(self) -> None:
        """Start the thread, if the system permits."""
        thread = threading.Thread(target=self._run, name="nvmeio-callbacks", daemon=True)
        with self._lock:
            self._thread, self._starting = thread, False
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:
            self._cannot_start(error)

    def _cannot_start(self, error: Exception) -> None:
        with self._lock:
            self._thread, self._starting = None, False
        # A thread that looks at the request calls its callbacks, or the next request with
        # callbacks tries again to start this thread.
        _log.error(
            "the thread for callbacks cannot start (%s); they are called when another "
            "thread looks at the request",
            error,
        )

    def await_calls(self, workers: Any, end_ns: int) -> bool:
        """Wait until the callbacks of a handle's requests have been called."""
        if self._thread is threading.current_thread():
            return True
        # Not a condition variable: Ctrl-C in its wait() may leave its lock released.
        pauses = Pauses()
        while True:
            with self._lock:
                found = [each for each in self._requests if each._workers is workers]
                alone = self._thread is None
            if not found:
                return True
            if alone:
                self._remove([each for each in found if _is_done(each)])
            pause_s = next(pauses)
            if end_ns >= 0:
                pause_s = min(pause_s, (end_ns - time.monotonic_ns()) / 1e9)
            if pause_s <= 0:
                return False
            del found
            time.sleep(pause_s)

    def _remove(self, done: list[Any]) -> None:
        with self._lock:
            self._requests.difference_update(done)

    def _run(self) -> None:
        """Call callbacks until there was nothing to do for a while."""
        eventfd: Eventfd | None = None
        watched: set[Any] = set()
        poll, pauses = select.poll(), Pauses()
        idle = False
        while True:
            requests = list(self._requests)
            if eventfd is None and requests:
                eventfd = eventfd_of(requests[0]._workers)
                if eventfd is not None:
                    poll.register(eventfd.number, select.POLLIN)
                with self._lock:
                    # Who adds a request from now on signals it.
                    self._eventfd, requests = eventfd, list(self._requests)
            busy = {request._workers for request in requests}
            # Ask for the next signal before looking, so that no completion is missed.
            signalled = eventfd is not None and all(eventfd.watch(each) for each in busy)
            for workers in watched - busy:
                if eventfd is not None:
                    eventfd.unwatch(workers)
            watched = busy
            self._remove([each for each in requests if _is_done(each)])
            del requests, busy
            with self._lock:
                # After a round without requests no handle signals the eventfd any more.
                if idle and not self._requests:
                    self._thread = self._eventfd = None
                    return
                waits_ms: float | None = None if self._requests else IDLE_MS
            if not signalled:
                # The system has no eventfd or memory left: look again and again.
                waits_ms = 1000 * next(pauses) if waits_ms is None else 1000 * SLICE_S
            rung = poll.poll(waits_ms)
            if rung and eventfd is not None:
                eventfd.clear()
                pauses = Pauses()
            idle = not rung and not self._requests


def _is_done(request: Any) -> bool:
    """Finish a request that is done, which calls its callbacks."""
    try:
        return bool(request.done())
    except BaseException:
        # A callback raised it, and no caller is there to receive it.
        _log.exception("a callback of %r has failed", request)
    try:
        return bool(request.done())
    except BaseException:
        # This thread must survive, for the sake of all other callbacks.
        _log.exception("the callbacks of %r are called when a thread waits for it", request)
        return True


CALLER = Caller()
call_in_child(CALLER.forget)
