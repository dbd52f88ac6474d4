"""Wait for any or all of many requests, of one or several handles.

A waiting thread sleeps on one eventfd.  Workers signal it, and so does a thread that
finishes one of the requests.  event_loop.py does the same for event loops.
"""

import math
import select
import threading
import time
from collections import namedtuple
from collections.abc import AsyncIterator, Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from nvmeio._arguments.checks import word
from nvmeio._events.listener import (
    SLICE_S,
    Eventfd,
    Listener,
    Pauses,
    Workers,
    eventfd_of,
)
from nvmeio._events.listener import Request as Awaited
from nvmeio._native.arguments import deadline_ns
from nvmeio._native.interrupts import Finalizer
from nvmeio._native.request import Request, remove_callbacks

__all__ = ["Completions", "Waited", "as_completed", "wait"]

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
        self._asleep = False
        # None: the system has none left, so this looks again and again.
        self._eventfd: Eventfd | None = None
        self._pauses = Pauses()
        self._poll = select.poll()
        self._finalizer = Finalizer(remove_callbacks, self._awaited, self._callbacks)

    def listen(self, requests: Collection[Awaited]) -> int:
        """Add requests, and count them; see ``Listener.listen``."""
        self._workers.update(request._workers for request in requests)
        if self._workers:
            self._eventfd = eventfd_of(next(iter(self._workers)))
        if self._eventfd is not None:
            self._poll.register(self._eventfd.number, select.POLLIN)
        return super().listen(requests)

    def sleep(self, end_ns: int) -> bool:
        """Sleep until a request is done, or a monotonic time; return whether one is."""
        while not self.done:
            left_s = _left_s(end_ns)
            slice_s = SLICE_S if self._look() else next(self._pauses)
            # From here on, workers and _wake() signal the eventfd.
            self._asleep = True
            try:
                if not self.done:
                    if left_s <= 0:
                        return False
                    self._poll.poll(min(left_s, slice_s) * 1000)
            finally:
                self._asleep = False
        return True

    def _look(self) -> bool:
        """Clear the eventfd, ask again, and only then look: so no completion is missed.

        Return whether the eventfd will be signalled.
        """
        signalled = False
        if self._eventfd is not None:
            self._eventfd.clear()
            signalled = all(self._eventfd.watch(workers) for workers in self._workers)
        for workers in self._workers:
            workers.collect()
        return signalled

    def close(self) -> None:
        """Stop listening, and close the eventfd."""
        super().close()
        if self._eventfd is not None:
            self._eventfd.close()

    def _wake(self) -> None:
        if self._asleep and self._eventfd is not None:
            self._eventfd.signal()


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

    _listener: Listener | None = None

    def __init__(self, requests: list[R], timeout: float | None) -> None:
        # Those that were not yielded yet.  Not listened to before the first is asked for.
        self._left = dict.fromkeys(requests)
        # The listener was interrupted: make another.
        self._anew = False
        self._count = len(requests)
        self._timeout = timeout
        self._end_ns = deadline_ns(timeout)
        self._asked = threading.Lock()

    def __iter__(self) -> Iterator[R]:
        return self

    def __next__(self) -> R:
        """Wait for the next request, and return it."""
        found: R | None = None
        try:
            with self._turn():
                if not self._left:
                    raise StopIteration
                listener = self._listening(ThreadListener)
                if not listener.sleep(self._end_ns):
                    raise self._over()
                found = listener.done[0]
                self._take(found)
            return found
        except BaseException:
            # Not in a function, at whose beginning a second Ctrl-C may come.
            if found is not None:
                self._left[found], self._anew = None, True
            raise

    def __aiter__(self) -> AsyncIterator[R]:
        return self

    async def __anext__(self) -> R:
        """Wait for the next request without blocking the event loop, and return it."""
        import asyncio

        from nvmeio._events.event_loop import TaskListener

        found: R | None = None
        try:
            with self._turn():
                if not self._left:
                    raise StopAsyncIteration
                listener = self._listening(TaskListener, asyncio.get_running_loop())
                while not listener.done:
                    left_s = _left_s(self._end_ns)
                    if left_s <= 0:
                        raise self._over()
                    await listener.sleep(left_s)
                found = listener.done[0]
                self._take(found)
            return found
        except BaseException:
            if found is not None:
                self._left[found], self._anew = None, True
            raise

    def _turn(self) -> threading.Lock:
        """Return the lock to hold meanwhile; RuntimeError if a thread or task has it.

        Ctrl-C cannot leave a lock that ``with`` itself takes and releases.
        """
        if self._asked.locked():
            raise RuntimeError(
                "another thread or task is waiting for the next request; only one may"
            )
        return self._asked

    def _listening(self, kind: type[Kind], loop: Any = None) -> Kind:
        """Return the listener for the remaining requests, of a thread or of a loop."""
        old = self._listener
        if isinstance(old, kind) and old.loop is loop and not self._anew:
            return old
        made = kind()
        made.listen(self._left)
        self._listener, self._anew = made, False
        if old is not None:
            old.close()
        return made

    def _take(self, found: R) -> None:
        """Remove the first request that is done."""
        del self._left[found]
        if self._listener is not None:
            self._listener.done.popleft()
        if not self._left:
            self._close()

    def _over(self) -> TimeoutError:
        """End the iteration, and return the TimeoutError to raise."""
        left = len(self._left)
        self._close()
        return TimeoutError(
            f"{left} of {self._count} requests were not done within {self._timeout} s; "
            "they go on"
        )

    def _close(self) -> None:
        """Stop listening, and forget all requests."""
        self._left = {}
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
