"""Wait for any or all of many requests, of one or several handles.

A waiting thread sleeps on one eventfd.  Workers signal it, and so does a thread that
finishes one of the requests.  event_loop.py does the same for event loops.
"""

import contextlib
import math
import os
import select
import threading
import time
from collections import namedtuple
from collections.abc import AsyncIterator, Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from nvmeio._arguments.checks import word
from nvmeio._events.listener import Listener, Workers
from nvmeio._events.listener import Request as Awaited
from nvmeio._native.arguments import deadline_ns
from nvmeio._native.request import Request

__all__ = ["Completions", "Waited", "as_completed", "wait"]

# Between slices of a sleep the main thread handles signals that another thread received.
SLICE_S = 0.05

WAYS = ("ALL_COMPLETED", "FIRST_COMPLETED", "FIRST_EXCEPTION")

Kind = TypeVar("Kind", bound=Listener)

if TYPE_CHECKING:
    import typing_extensions

    R = typing_extensions.TypeVar("R", bound=Request, default=Request)

    class _Waited(typing_extensions.NamedTuple, Generic[R]):
        done: set[R]
        not_done: set[R]
else:
    # Before Python 3.11, a NamedTuple cannot be generic.
    R = TypeVar("R")
    _Waited = namedtuple("_Waited", ["done", "not_done"])


class Waited(_Waited[R]):
    """The result of ``nvmeio.wait``: a named tuple, ``done, not_done``.

    Attributes
    ----------
    done : set of Request
        The requests that are done, including those that failed or were cancelled.
    not_done : set of Request
        The others.

    Examples
    --------
    >>> with nvmeio.Handle() as handle:
    ...     request = handle.submit_write(np.arange(1000), "data.bin")
    ...     waited = nvmeio.wait([request])
    >>> isinstance(waited, nvmeio.futures.Waited)
    True
    >>> waited.done == {request}
    True
    """

    __slots__ = ()


class ThreadListener(Listener):
    """Collects completions for one thread, which sleeps meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self._workers: set[Workers] = set()
        # Guards the fields below, because nobody may signal a closed eventfd.  An RLock,
        # because a signal handler may come back here.
        self._lock = threading.RLock()
        self._asleep = False
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    def listen(self, requests: Collection[Awaited]) -> int:
        """Add requests, and count them; see ``Listener.listen``."""
        self._workers.update(request._workers for request in requests)
        return super().listen(requests)

    def sleep(self, end_ns: int) -> bool:
        """Sleep until a request is done, or a monotonic time; return whether one is."""
        while not self.done:
            left_s = _left_s(end_ns)
            self._look()
            # From here on, workers and _wake() signal the eventfd.
            self._asleep = True
            try:
                if not self.done:
                    if left_s <= 0:
                        return False
                    self._poll.poll(min(left_s, SLICE_S) * 1000)
            finally:
                self._asleep = False
        return True

    def _look(self) -> None:
        """Clear the eventfd, ask again, and only then look: so no completion is missed."""
        if self._poll.poll(0):
            os.eventfd_read(self._fd)
        for workers in self._workers:
            workers.watch(self._fd)
        for workers in self._workers:
            workers.collect()

    def close(self) -> None:
        """Stop listening, and close the eventfd."""
        super().close()
        for workers in self._workers:
            workers.unwatch(self._fd)
        with self._lock:
            os.close(self._fd)

    def _wake(self) -> None:
        with self._lock:
            if self._asleep:
                os.eventfd_write(self._fd, 1)


class Completions(Generic[R]):
    """Iterator over requests in the order in which they complete; also asynchronous.

    ``as_completed`` returns it.  Unlike a generator, it survives exceptions: after an
    interruption or a cancellation, ask again, and no request is missed.

    Parameters
    ----------
    requests, timeout
        As for ``as_completed``.

    Examples
    --------
    >>> with nvmeio.Handle() as handle:
    ...     request = handle.submit_write(np.arange(1000), "data.bin")
    ...     completions = nvmeio.as_completed([request])
    ...     print(next(completions) is request)
    True
    >>> isinstance(completions, nvmeio.futures.Completions)
    True
    """

    def __init__(self, requests: list[R], timeout: float | None) -> None:
        # Not listened to before the first request is asked for.
        self._unheard = requests
        self._listener: Listener | None = None
        self._left = self._count = len(requests)
        self._timeout = timeout
        self._end_ns = deadline_ns(timeout)
        self._asked = threading.Lock()

    def __iter__(self) -> Iterator[R]:
        return self

    def __next__(self) -> R:
        """Wait for the next request, and return it."""
        with self._alone():
            if not self._left:
                raise StopIteration
            listener = self._listening(ThreadListener)
            if not listener.sleep(self._end_ns):
                raise self._over()
            return self._take(listener)

    def __aiter__(self) -> AsyncIterator[R]:
        return self

    async def __anext__(self) -> R:
        """Wait for the next request without blocking the event loop, and return it."""
        import asyncio

        from nvmeio._events.event_loop import TaskListener

        with self._alone():
            if not self._left:
                raise StopAsyncIteration
            listener = self._listening(TaskListener, asyncio.get_running_loop())
            while not listener.done:
                left_s = _left_s(self._end_ns)
                if left_s <= 0:
                    raise self._over()
                await listener.sleep(left_s)
            return self._take(listener)

    def __del__(self) -> None:
        self._close()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Raise RuntimeError for a second thread or task that waits at the same time."""
        if not self._asked.acquire(blocking=False):
            raise RuntimeError(
                "another thread or task is waiting for the next request; only one may"
            )
        try:
            yield
        finally:
            self._asked.release()

    def _listening(self, kind: type[Kind], loop: Any = None) -> Kind:
        """Return the listener for the remaining requests, of a thread or of a loop."""
        if isinstance(self._listener, kind) and self._listener.loop is loop:
            return self._listener
        made = kind()
        unheard = self._unheard if self._listener is None else self._listener.leave()
        self._unheard, self._listener = [], made
        try:
            made.listen(unheard)
        except BaseException:
            self._close()
            raise
        return made

    def _take(self, listener: Listener) -> R:
        """Remove and return the first request that is done."""
        found: R = listener.done.popleft()
        self._left -= 1
        if not self._left:
            self._close()
        return found

    def _over(self) -> TimeoutError:
        """End the iteration, and return the TimeoutError to raise."""
        left = self._left
        self._close()
        return TimeoutError(
            f"{left} of {self._count} requests were not done within {self._timeout} s; "
            "they go on"
        )

    def _close(self) -> None:
        """Stop listening, and forget all requests."""
        self._left, self._unheard = 0, []
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()


def as_completed(requests: Iterable[R], timeout: float | None = None) -> Completions[R]:
    """Iterate over requests in the order in which they complete.

    Parameters
    ----------
    requests : iterable of Request
        Requests of any handles.  One that is given twice is yielded once.
    timeout : float, optional
        The time limit for the whole iteration, from now on, in seconds; default: none.

    Returns
    -------
    Completions
        An iterator, for ``for``, ``async for``, ``next`` or ``anext``.  It yields the
        requests themselves, first those that are done already.  Call ``wait()`` of each for
        its result or error.

    Raises
    ------
    TypeError
        An item is not a Request, or ``timeout`` is not a number.
    ValueError
        ``timeout`` is negative.
    TimeoutError
        From the iteration: the time is over.  The requests are still running.
    OSError
        From the iteration: EOWNERDEAD, one was submitted before a fork().
    KeyboardInterrupt
        From ``for``: Ctrl-C, within 0.1 s.  The requests are still running.

    Notes
    -----
    Releases the GIL while it waits.  Leaving the loop early, or cancelling the task of an
    ``async for``, does not cancel requests.  Iterate again, for example by ``anext`` with a
    time limit, to get those that were not yielded.  Only one thread or task may wait at a
    time.  An eventfd is open from the first request until all are yielded or the iterator
    is dropped.

    Examples
    --------
    >>> arrays = [np.full(1000, i) for i in range(3)]
    >>> with nvmeio.Handle() as handle:
    ...     requests = [
    ...         handle.submit_write(array, f"{i}.bin") for i, array in enumerate(arrays)
    ...     ]
    ...     print([request.wait() for request in nvmeio.as_completed(requests)])
    [8000, 8000, 8000]
    """
    return Completions(_checked(requests), timeout)


def wait(
    requests: Iterable[R],
    timeout: float | None = None,
    return_when: str = "ALL_COMPLETED",
) -> Waited[R]:
    """Wait for any or all of several requests.

    Parameters
    ----------
    requests : iterable of Request
        Requests of any handles.
    timeout : float, optional
        The longest time to wait, in seconds; default: no limit.
    return_when : str, default "ALL_COMPLETED"
        ``"FIRST_COMPLETED"`` returns when one is done; ``"FIRST_EXCEPTION"`` when one has
        failed, which does not include cancellation, or all are done.  The values are those
        of ``concurrent.futures``.

    Returns
    -------
    Waited
        The sets ``done`` and ``not_done``.  No error is raised when the time is over: some
        requests are then in ``not_done``.

    Raises
    ------
    TypeError
        An item is not a Request, or ``timeout`` is not a number.
    ValueError
        ``timeout`` is negative, or ``return_when`` is unknown.
    OSError
        EOWNERDEAD: one was submitted before a fork().
    KeyboardInterrupt
        Ctrl-C, within 0.1 s; the requests are still running.

    Notes
    -----
    Releases the GIL while it waits.  Errors of requests are not raised here, but by each
    request's ``wait()``.

    Examples
    --------
    >>> arrays = [np.full(1000, i) for i in range(3)]
    >>> with nvmeio.Handle() as handle:
    ...     requests = [
    ...         handle.submit_write(array, f"{i}.bin") for i, array in enumerate(arrays)
    ...     ]
    ...     done, not_done = nvmeio.wait(requests)
    >>> len(done), len(not_done)
    (3, 0)
    """
    word("return_when", return_when, WAYS)
    awaited = _checked(requests)
    end_ns = deadline_ns(timeout)
    done: set[R] = set()
    listener = ThreadListener()
    try:
        listener.listen(awaited)
        while not _is_enough(return_when, awaited, done, listener):
            if not listener.sleep(end_ns):
                break
    finally:
        listener.close()
    return Waited(done, set(awaited) - done)


def _is_enough(way: str, awaited: list[R], done: set[R], listener: ThreadListener) -> bool:
    """Move completed requests to ``done``; return whether ``way`` is satisfied."""
    failed = False
    while listener.done:
        request = listener.done.popleft()
        done.add(request)
        failed = failed or request._failed
    first = way == "FIRST_COMPLETED" and bool(done)
    return first or len(done) == len(awaited) or (way == "FIRST_EXCEPTION" and failed)


def _checked(requests: Iterable[R]) -> list[R]:
    """Return each request once; raise TypeError for other objects."""
    if isinstance(requests, Request):
        raise TypeError(f"requests is {requests!r}; pass [request], or call its wait()")
    found: dict[R, None] = {}
    for index, request in enumerate(requests):
        if not isinstance(request, Request):
            raise TypeError(f"requests[{index}] is {request!r}; it must be a Request")
        found[request] = None
    return list(found)


def _left_s(end_ns: int) -> float:
    """Return the seconds until a monotonic time in ns; infinity for -1."""
    return (end_ns - time.monotonic_ns()) / 1e9 if end_ns >= 0 else math.inf
