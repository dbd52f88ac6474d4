"""Write a blocking function once, for threads and for event loops.

Such a function is a coroutine function with a ``Calls`` as argument.  With ``BLOCKING`` its
coroutine never suspends, and ``run`` returns the result.  With event_loop.py's ``Awaiting``
it is awaited.
"""

from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

__all__ = ["BLOCKING", "Calls", "Entered", "run"]

R = TypeVar("R")
V_co = TypeVar("V_co", covariant=True)


class Entered(Protocol[V_co]):
    """A context manager whose entry and exit may block."""

    async def __aenter__(self) -> V_co: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> bool | None: ...


class Calls(Protocol):
    """How a function makes blocking calls."""

    async def call(self, function: Callable[..., R], /, *args: Any) -> R:
        """Call a short function that may block, such as one that opens or renames."""

    async def transfer(
        self, wait: Callable[..., Any], submit: Callable[..., Any], /, *args: Any
    ) -> Any:
        """Transfer with one of two methods: `wait` blocks, `submit` returns a request."""

    def entered(self, context: AbstractContextManager[V_co]) -> Entered[V_co]:
        """Enter and leave a context, both as ``call`` does."""

    async def locked(self, wait: Callable[[], Any], attempt: Callable[[], bool], /) -> None:
        """Do what needs a lock: `wait` waits for it, `attempt` returns whether it got it.

        Either takes and releases the lock itself, because a thread that waits for it may be
        the one in which this coroutine would go on.
        """


class Blocking:
    """Makes blocking calls in the calling thread."""

    async def call(self, function: Callable[..., R], /, *args: Any) -> R:
        return function(*args)

    async def transfer(
        self, wait: Callable[..., Any], submit: Callable[..., Any], /, *args: Any
    ) -> Any:
        return wait(*args)

    def entered(self, context: AbstractContextManager[V_co]) -> Entered[V_co]:
        return _EnteredHere(context)

    async def locked(self, wait: Callable[[], Any], attempt: Callable[[], bool], /) -> None:
        wait()


class _EnteredHere(Generic[V_co]):
    """A context that is entered and left in the calling thread."""

    def __init__(self, context: AbstractContextManager[V_co]) -> None:
        self._context = context

    async def __aenter__(self) -> V_co:
        return self._context.__enter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        return self._context.__exit__(kind, error, traceback)


BLOCKING = Blocking()


def run(coroutine: Coroutine[Any, Any, R]) -> R:
    """Return the result of a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: R = done.value
        return result
    raise RuntimeError(f"run() needs a coroutine that never suspends; {coroutine!r} did")
