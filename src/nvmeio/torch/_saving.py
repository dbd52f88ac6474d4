"""Help torch.save and torch.load: options that some versions have, and errors of files."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

__all__ = ["errors_of", "saving_with"]


@contextlib.contextmanager
def saving_with(**options: Any) -> Iterator[None]:
    """Set options of torch.save for a while; do nothing if this version lacks one.

    torch's own patch() would leave a context variable for each use, as long as the thread
    lives.
    """
    try:
        from torch.utils.serialization import config

        before = {name: getattr(config.save, name) for name in options}
    except (ImportError, AttributeError):
        yield
        return
    try:
        for name, value in options.items():
            setattr(config.save, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(config.save, name, value)


class _Noting:
    """A file object that remembers the errors of its reads and writes."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.errors: list[BaseException] = []
        # Not of this object, which would then hold itself, and the stream's memory, until
        # the garbage collector runs.
        for name in ("read", "readinto", "write"):
            setattr(self, name, _noted(getattr(stream, name), self.errors))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _noted(call: Callable[..., Any], errors: list[BaseException]) -> Callable[..., Any]:
    @functools.wraps(call)
    def noted(*arguments: Any) -> Any:
        try:
            return call(*arguments)
        # Also Ctrl-C, and what else a signal's handler raises.
        except BaseException as error:
            errors.append(error)
            raise

    return noted


def _is_interrupt(
    error: BaseException | None, before: BaseException | None
) -> TypeGuard[BaseException]:
    return not isinstance(error, Exception | None) and error is not before


@contextlib.contextmanager
def errors_of(stream: Any) -> Iterator[_Noting]:
    """Raise the first error of a file object, which torch replaces by another, or drops.

    After an error of ``readinto``, such as Ctrl-C, torch calls ``read``.
    """
    noting, before = _Noting(stream), sys.exc_info()[1]
    try:
        yield noting
    except Exception as error:
        # A signal's handler may raise beside the calls that are noted, too.
        if not noting.errors and _is_interrupt(error.__context__, before):
            noting.errors.append(error.__context__)
        if not noting.errors:
            raise
    finally:
        # Kept, errors would keep the stream for ever: their frames hold torch's writer,
        # which holds the stream where the garbage collector does not look.
        errors = noting.errors[:1]
        noting.errors.clear()
    if errors:
        raise errors.pop() from None
