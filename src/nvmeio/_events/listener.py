"""Collect completions of requests: shared by threads and event loops that wait.

The protocols here list what this folder needs of the Cython classes, which it must not
import.
"""

import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection
from typing import Any, Protocol

__all__ = ["Listener", "Request", "Workers"]


class Workers(Protocol):
    """The workers that execute the requests of one handle."""

    @property
    def watchers(self) -> set[weakref.ref[Any]] | None:
        """Event loops that wait for requests; None once the workers are stopped."""

    def watch(self, fd: int) -> None:
        """Signal an eventfd once, when the next request is done."""

    def unwatch(self, fd: int) -> None:
        """Forget the eventfd."""

    def collect(self) -> Any:
        """Finish completed requests in this thread."""

    def is_idle(self) -> bool:
        """Return whether nothing is in flight."""


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

    def listen(self, requests: Collection[Request]) -> int:
        """Add requests, and count them."""
        for request in requests:
            self._awaited.add(request)
            request._listen(self)
        return len(requests)

    def __call__(self, request: Request) -> None:
        """Add a completed request, in the thread that observed its completion."""
        self.done.append(request)
        self._awaited.discard(request)
        self._wake()

    def leave(self) -> list[Any]:
        """Stop listening, and return the requests that were not yielded yet."""
        awaited = list(self._awaited)
        self.close()
        # A request that completed meanwhile is in both.
        return list(dict.fromkeys([*self.done, *awaited]))

    def close(self) -> None:
        """Stop listening."""
        while self._awaited:
            self._awaited.pop()._remove_done_callback(self)

    @abstractmethod
    def _wake(self) -> None:
        """Wake the sleeper.  Called by any thread."""
