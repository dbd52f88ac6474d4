"""Collect completions of requests: shared by threads and event loops that wait.

The protocols here list what this folder and _memory/ need of the Cython classes, which
they must not import.
"""

import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Any, Protocol

__all__ = ["SLICE_S", "Eventfd", "Listener", "Pauses", "Request", "Workers", "eventfd_of"]

# The longest sleep: between two of them, signals that another thread received are handled.
SLICE_S = 0.05
_PAUSE_MIN_S = 0.001


class Pauses(Iterator[float]):
    """The pauses, in seconds, between looks at what cannot be waited for."""

    def __init__(self, first_s: float = _PAUSE_MIN_S) -> None:
        self._next_s = first_s

    def __next__(self) -> float:
        found, self._next_s = self._next_s, min(2 * self._next_s, SLICE_S)
        return found


class Eventfd(Protocol):
    """An eventfd(2), which is closed with its object, and no longer signalled then."""

    @property
    def number(self) -> int:
        """The descriptor."""

    def watch(self, workers: Any, /) -> bool:
        """Have it signalled once, when the next request is done; False: out of memory."""

    def unwatch(self, workers: Any, /) -> None:
        """Have it signalled no more."""

    def signal(self) -> None:
        """Wake whoever polls it."""

    def clear(self) -> None:
        """Undo all signals."""

    def close(self) -> None:
        """Close it."""


class Workers(Protocol):
    """The workers that execute the requests of one handle."""

    @property
    def watchers(self) -> set[weakref.ref[Any]] | None:
        """Event loops that wait for requests; None once the workers are stopped."""

    def new_eventfd(self) -> Eventfd:
        """Make an eventfd that may watch workers."""

    def collect(self) -> Any:
        """Finish completed requests in this thread."""

    def is_idle(self) -> bool:
        """Return whether nothing is in flight."""


def eventfd_of(workers: Workers) -> Eventfd | None:
    """Make an eventfd; None if the system has no more, and the caller has to poll."""
    try:
        return workers.new_eventfd()
    except OSError as error:
        if error.errno is None:
            # A signal handler raised it.
            raise
        return None


class Request(Protocol):
    """A transfer to wait for."""

    @property
    def _workers(self) -> Any: ...

    def done(self) -> bool:
        """Return whether it is done."""

    def wait(self, timeout: float | None = None) -> Any:
        """Wait, and return its result or raise its error."""

    def cancel(self) -> bool:
        """Cancel the blocks that the kernel does not have yet."""

    def _listen(self, fn: Callable[[Any], object], /) -> None:
        """Call a function when it is done."""

    def _remove_done_callback(self, fn: Callable[[Any], object], /) -> None: ...

    def _is_over(self) -> bool:
        """Return whether it no longer touches memory or file."""


class Listener(ABC):
    """Collects requests in the order in which they complete.

    A subclass sleeps meanwhile; ``_wake`` wakes it.
    """

    # The event loop in which it sleeps; None if a thread sleeps.
    loop: Any = None

    def __init__(self) -> None:
        self.done: deque[Any] = deque()
        # A request is removed when it is done, so that only the caller keeps it alive.
        self._awaited: set[Request] = set()
        # Two callbacks, because Ctrl-C in a function of Python's could lose a request.  And
        # no request keeps this alive.
        self._callbacks = self.done.append, _Notice(self)

    def listen(self, requests: Collection[Request]) -> int:
        """Add requests, and count them."""
        for request in requests:
            self._awaited.add(request)
            for callback in self._callbacks:
                request._listen(callback)
        return len(requests)

    def note(self, request: Request) -> None:
        """Wake the sleeper, in the thread that observed the completion of a request."""
        self._awaited.discard(request)
        self._wake()

    def close(self) -> None:
        """Stop listening."""
        # A copy, made in one call, because other threads remove what is done meanwhile.
        for request in self._awaited.copy():
            for callback in self._callbacks:
                request._remove_done_callback(callback)
        self._awaited.clear()

    @abstractmethod
    def _wake(self) -> None:
        """Wake the sleeper.  Called by any thread."""


class _Notice:
    """Notifies a listener, unless that has ended."""

    def __init__(self, listener: Listener) -> None:
        self._listener = weakref.ref(listener)

    def __call__(self, request: Request) -> None:
        listener = self._listener()
        if listener is not None:
            listener.note(request)
