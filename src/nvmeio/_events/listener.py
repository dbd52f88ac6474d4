"""What hears of requests that are done: common to threads and event loops that wait.

Lists what it uses of workers and requests, which are Cython's, and stand above.
"""

import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection
from typing import Any, Protocol

__all__ = ["Listener", "Request", "Watcher", "Workers"]


class Watcher(Protocol):
    """What workers know of an event loop that waits for their requests."""

    def close(self) -> None:
        """Hear that the workers are stopped.  Called by any thread."""


class Workers(Protocol):
    """What carries out the requests of one handle."""

    @property
    def watchers(self) -> set[weakref.ref[Any]] | None:
        """Event loops that wait for requests; None once the workers are stopped."""

    def watch(self, fd: int) -> None:
        """Have an eventfd signalled once, when a request is done next."""

    def unwatch(self, fd: int) -> None:
        """Forget the eventfd."""

    def collect(self) -> Any:
        """Finish what is done, in this thread."""

    def is_idle(self) -> bool:
        """Tell whether nothing is in flight."""


class Request(Protocol):
    """A transfer to wait for."""

    @property
    def _workers(self) -> Any: ...

    def done(self) -> bool:
        """Tell whether it is done."""

    def wait(self, timeout: float | None = None) -> Any:
        """Return its outcome, or raise its error."""

    def cancel(self) -> bool:
        """Drop what can be dropped."""

    def _listen(self, fn: Callable[[Any], object], /) -> None:
        """Have a function called when it is done."""

    def _remove_done_callback(self, fn: Callable[[Any], object], /) -> None: ...


class Listener(ABC):
    """Hears of requests that are done, in the order in which they become so.

    A subclass sleeps meanwhile, and is woken by ``_ring``.
    """

    def __init__(self) -> None:
        self.done: deque[Any] = deque()
        # A request leaves when it is done: what it holds is the caller's then.
        self._awaited: set[Request] = set()

    def listen(self, requests: Collection[Request]) -> int:
        """Add requests, and count them."""
        for request in requests:
            self._awaited.add(request)
            request._listen(self)
        return len(requests)

    def __call__(self, request: Request) -> None:
        """Hear of a request that is done, in whichever thread has found it so."""
        self.done.append(request)
        self._awaited.discard(request)
        self._ring()

    def leave(self) -> list[Any]:
        """Hear no more, and return the requests that nobody has taken."""
        awaited = list(self._awaited)
        self.close()
        # One that became done in between is in both.
        return list(dict.fromkeys([*self.done, *awaited]))

    def close(self) -> None:
        """Hear no more."""
        while self._awaited:
            self._awaited.pop()._remove_done_callback(self)

    @abstractmethod
    def _ring(self) -> None:
        """Wake who sleeps.  Called by any thread."""
