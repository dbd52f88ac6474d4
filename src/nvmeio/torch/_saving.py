"""Help torch.save and torch.load: options that some versions have, and errors of files."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, TypeGuard

from nvmeio._native.interrupts import Noted

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
        self.read = Noted(stream.read, self.errors)
        self.readinto = Noted(stream.readinto, self.errors)
        self.write = self._write = Noted(stream.write, self.errors)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


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
        # After Ctrl-C, torch's writer ends the archive when it is deleted, in a destructor
        # where an error, such as of a closed file, would end the process.
        noting._write.end()
    if errors:
        raise errors.pop() from None
