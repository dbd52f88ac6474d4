"""Requests in flight, of a bounded number of bytes."""

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from nvmeio._native.request import Request

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Pending", "abandon"]


class Pending:
    """Requests of one stream, in the order of their submission.

    ``add`` waits until at most `limit` bytes are in flight.  As a context manager, this
    waits for all at the end, after an error cancelled, so that their memory may be freed.
    `landed` is called with the bytes that are done, after each request.
    """

    def __init__(
        self, limit: int | None = None, landed: Callable[[int], object] | None = None
    ) -> None:
        self.in_flight = self.done = 0
        self._limit, self._landed = limit, landed
        self._requests: deque[tuple[Request, int]] = deque()

    def add(self, request: Request, nbytes: int) -> None:
        """Count a submitted request, and wait while too many bytes are in flight."""
        self._requests.append((request, nbytes))
        self.in_flight += nbytes
        while self._limit is not None and self.in_flight > self._limit:
            self.wait()

    def wait(self) -> None:
        """Wait for the oldest request."""
        request, nbytes = self._requests[0]
        request.wait()
        self._requests.popleft()
        self.in_flight -= nbytes
        self.done += nbytes
        if self._landed is not None:
            self._landed(self.done)

    def wait_if_done(self) -> None:
        """Take the oldest request if that needs no waiting."""
        if self._requests and self._requests[0][0].done():
            self.wait()

    def finish(self) -> None:
        """Wait for all requests."""
        while self._requests:
            self.wait()

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, kind: object, error: object, where: object) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            abandon([request for request, _ in self._requests])


def abandon(requests: Sequence[Request]) -> None:
    """Cancel requests, and wait until none is in flight."""
    for request in requests:
        request.cancel()
    for request in requests:
        with contextlib.suppress(Exception):
            request.exception()
