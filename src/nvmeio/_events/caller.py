"""The thread that calls the callbacks of requests that no other thread observes.

It runs while requests with callbacks are in flight, and a second longer.
"""

import _thread
import select
import threading
import time
from typing import Any

from nvmeio._events.forks import call_in_child
from nvmeio._events.listener import SLICE_S, Eventfd, Pauses, eventfd_of
from nvmeio._events.log import log

__all__ = ["CALLER"]

# How long the thread waits for the next request before it ends.
IDLE_MS = 1000


class Caller:
    """Observes the completion of requests in a thread of its own."""

    def __init__(self) -> None:
        self.eventfd: Eventfd | None = None
        self.forget()

    def forget(self) -> None:
        """Forget all state, as a forked child must: the thread is the parent's."""
        if self.eventfd is not None:
            self.eventfd.close()
        # An RLock, because a signal handler may come back here.
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._starting = False
        self.eventfd = None
        # The requests whose callbacks are not called yet, by the workers that signal them.
        # Who has called them discards a request without the lock, and in C, so that no
        # Ctrl-C comes between, and signals the thread if it was the last; the thread
        # removes the empty sets.
        self.requests: dict[Any, set[Any]] = {}
        # The threads that are calling callbacks.
        self.calling: set[int] = set()
        self.ident = 0  # of the thread

    def call_when_done(self, request: Any) -> None:
        """Make sure that the callbacks of a request are called."""
        with self._lock:
            known = self.requests.setdefault(request._workers, set())
            if not known and self.eventfd is not None:
                # Otherwise the thread watches these workers already.
                self.eventfd.signal()
            known.add(request)
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
        log.error(
            "the thread for callbacks cannot start (%s); they are called when another "
            "thread looks at the request",
            error,
        )

    def await_calls(self, workers: Any, end_ns: int) -> bool:
        """Wait until the callbacks of a handle's requests have been called."""
        if threading.get_ident() in self.calling:
            # A callback waits for no other, which may be waiting for it.
            return True
        # Not a condition variable: Ctrl-C in its wait() may leave its lock released.
        pauses = Pauses()
        while True:
            with self._lock:
                waited_for = bool(self.requests.get(workers))
                alone = self._thread is None
            if not waited_for:
                return True
            if alone:
                _collect(workers)
            pause_s = next(pauses)
            if end_ns >= 0:
                pause_s = min(pause_s, (end_ns - time.monotonic_ns()) / 1e9)
            if pause_s <= 0:
                return False
            time.sleep(pause_s)

    def _busy(self) -> set[Any]:
        """Return the workers that have requests with callbacks.  Needs the lock."""
        for workers in [each for each, found in self.requests.items() if not found]:
            del self.requests[workers]
        return set(self.requests)

    def _run(self) -> None:
        """Call callbacks until there was nothing to do for a while."""
        self.ident = threading.get_ident()
        eventfd: Eventfd | None = None
        watched: set[Any] = set()
        poll, pauses = select.poll(), Pauses()
        idle = False
        while True:
            with self._lock:
                busy = self._busy()
            if eventfd is None and busy:
                eventfd = eventfd_of(next(iter(busy)))
                if eventfd is not None:
                    poll.register(eventfd.number, select.POLLIN)
                with self._lock:
                    # Who adds workers from now on signals it.
                    self.eventfd, busy = eventfd, self._busy()
            # Ask for the next signal before looking, so that no completion is missed.
            signalled = eventfd is not None and all(eventfd.watch(each) for each in busy)
            for workers in watched - busy:
                if eventfd is not None:
                    eventfd.unwatch(workers)
            watched = busy
            # Not a look at each request, of which there may be thousands.
            for workers in busy:
                signalled &= _collect(workers)
            with self._lock:
                busy = self._busy()
                # After a round without requests no handle signals the eventfd any more.
                if idle and not busy:
                    self._thread = self.eventfd = None
                    return
            waits_ms: float | None = None if busy else IDLE_MS
            if not signalled:
                # The system has no eventfd or memory left, or a request could not be
                # finished: look again and again.
                waits_ms = 1000 * next(pauses) if waits_ms is None else 1000 * SLICE_S
            rung = poll.poll(waits_ms)
            if rung and eventfd is not None:
                eventfd.clear()
                pauses = Pauses()
            idle = not rung and not busy


def _collect(workers: Any) -> bool:
    """Finish the requests that are done, which calls their callbacks.

    Return whether none raised anything: this thread must survive, for the sake of all
    other callbacks.
    """
    try:
        workers.collect()
    except BaseException:
        # A callback raised it, and no caller is there to receive it.
        log.exception("a callback has failed")
        return False
    return True


CALLER = Caller()
call_in_child(CALLER.forget)
