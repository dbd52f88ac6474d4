"""Requests in flight, of a bounded number of bytes."""

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import starmap
from typing import TYPE_CHECKING, Any

from nvmeio._native.file import File
from nvmeio._native.handle import Handle
from nvmeio._native.request import Request

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Item", "Pending"]

# Memory, a file, and the offset in it.
Item = tuple[Any, File, int]


class Pending:
    """Requests of one stream, in the order of their submission.

    After each submission, this waits until at most `limit` bytes are in flight.  As a
    context manager, it waits for all at the end, after an error cancelled, so that their
    memory may be freed.  `landed` is called with the bytes that are done, after each
    request.
    """

    def __init__(
        self,
        handle: Handle,
        limit: int | None = None,
        landed: Callable[[int], object] | None = None,
    ) -> None:
        self.done = 0
        self._in_flight = 0
        self.limit, self._handle, self._landed = limit, handle, landed
        self._requests: deque[Request] = deque()

    def read(self, memory: Any, file: File, offset: int) -> Request:
        return self._add(self._handle.submit_read, memory, file, offset)

    def write(self, memory: Any, file: File, offset: int) -> Request:
        return self._add(self._handle.submit_write, memory, file, offset)

    def gather(
        self, file: File, offsets: Any, sizes: Any, memory: Any, **options: Any
    ) -> Request:
        return self._add(
            self._handle.submit_gather, file, offsets, sizes, memory, **options
        )

    def read_many(self, items: Iterable[Item], after: Request | None = None) -> Request:
        return self._add(self._handle.submit_read_many, items, after=after)

    def write_many(self, items: Iterable[Item]) -> Request:
        return self._add(self._handle.submit_write_many, items)

    def _add(self, submit: Callable[..., Request], *args: Any, **options: Any) -> Request:
        # In one call of C: else Ctrl-C could come between the submission and the list.
        self._requests.extend(starmap(partial(submit, *args, **options), [()]))
        request = self._requests[-1]
        self._in_flight += request.nbytes
        while self._requests and (self._is_full() or self._requests[0].done()):
            self._wait()
        return request

    def _is_full(self) -> bool:
        return self.limit is not None and self._in_flight > self.limit

    def _wait(self) -> None:
        """Wait for the oldest request."""
        request = self._requests[0]
        request.wait()
        self._requests.popleft()
        self._in_flight -= request.nbytes
        self.done += request.nbytes
        if self._landed is not None:
            self._landed(self.done)

    def wait_for(self, request: Request) -> None:
        """Wait for a request, and those before it."""
        while request in self._requests:
            self._wait()

    def finish(self) -> None:
        """Wait for all requests."""
        while self._requests:
            self._wait()

    def abandon(self) -> None:
        """Cancel all requests, and wait until none is in flight."""
        for request in self._requests:
            request.cancel()
        for request in self._requests:
            try:
                request.exception()
            except Exception as error:
                # The request keeps it, so it must not keep what goes on here: the error
                # that this abandons for, and with it files and folders to be removed.
                error.with_traceback(None).__context__ = None

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, kind: object, error: object, where: object) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self.abandon()
