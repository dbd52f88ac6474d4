"""The thread that calls the callbacks of requests that no other thread observes.

It runs while requests with callbacks are in flight, and a second longer.
"""

import logging
import os
import select
import threading
import time
from typing import Any

from nvmeio._events.forks import call_in_child

__all__ = ["CALLER"]

_log = logging.getLogger("nvmeio")

# How long the thread waits for the next request before it ends.
IDLE_MS = 1000
# Signals are handled between two slices of a wait.
SLICE_S = 0.05


class Caller:
    """Observes the completion of requests in a thread of its own."""

    def __init__(self) -> None:
        self._fd = -1
        self.forget()

    def forget(self) -> None:
        """Forget all state, as a forked child must: the thread is the parent's."""
        if self._fd >= 0:
            os.close(self._fd)
        self._lock = threading.Condition()
        self._thread: threading.Thread | None = None
        self._fd = -1
        # The requests in flight that have callbacks.
        self._requests: set[Any] = set()

    def call_when_done(self, request: Any) -> None:
        """Make sure that the callbacks of a request are called."""
        with self._lock:
            self._requests.add(request)
            if self._thread is None:
                self._start()
            if self._thread is not None:
                os.eventfd_write(self._fd, 1)

    def _start(self) -> None:
        """Start the thread, if the system permits."""
        fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        thread = threading.Thread(
            target=self._run, args=(fd,), name="nvmeio-callbacks", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:
            os.close(fd)
            # A thread that looks at the request calls its callbacks, or the next request
            # with callbacks tries again to start this thread.
            _log.error(
                "the thread for callbacks cannot start (%s); they are called when another "
                "thread looks at the request",
                error,
            )
            return
        self._fd, self._thread = fd, thread

    def await_calls(self, workers: Any, end_ns: int) -> bool:
        """Wait until the callbacks of a handle's requests have been called."""
        if self._thread is threading.current_thread():
            return True
        while True:
            with self._lock:
                if not any(each._workers is workers for each in self._requests):
                    return True
                left_s = SLICE_S
                if end_ns >= 0:
                    left_s = min(left_s, (end_ns - time.monotonic_ns()) / 1e9)
                if left_s <= 0:
                    return False
                self._lock.wait(left_s)

    def _run(self, fd: int) -> None:
        watched: set[Any] = set()
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        while True:
            rung = poll.poll(None if self._requests else IDLE_MS)
            if rung:
                os.eventfd_read(fd)
            requests = list(self._requests)
            busy = {request._workers for request in requests}
            try:
                # Ask for the next signal before looking, so that no completion is missed.
                for workers in busy:
                    workers.watch(fd)
            except OSError:
                # The next round may succeed.
                _log.exception("an error in the thread for callbacks; they may be late")
                time.sleep(SLICE_S)
                os.eventfd_write(fd, 1)
            for workers in watched - busy:
                workers.unwatch(fd)
            watched = busy
            done = [each for each in requests if _is_done(each)]
            idle = not (rung or requests)
            del requests, busy
            with self._lock:
                self._requests.difference_update(done)
                self._lock.notify_all()
                done.clear()
                # After a round without requests no handle signals the descriptor any more.
                if idle and not self._requests:
                    if self._fd == fd:
                        self._fd, self._thread = -1, None
                    os.close(fd)
                    return


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
