"""Descriptors: those of directories, truncation, and errors that do not matter."""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from types import TracebackType
from typing import IO, Any

from nvmeio._native.descriptor import (
    Descriptor,
    ask_anew,
    contents_of,
    open_at_once,
    opened,
)

__all__ = [
    "FOLDER",
    "Descriptor",
    "ask_anew",
    "best_effort",
    "closing",
    "contents_of",
    "cut",
    "open_regular",
    "opened",
]

FOLDER = os.O_RDONLY | os.O_DIRECTORY


class best_effort:  # noqa: N801  # like contextlib.suppress
    """Ignore the system's errors in a ``with`` block: every OSError that has an errno.

    One without, such as a TimeoutError, was raised by a signal handler of the program.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        return isinstance(error, OSError) and error.errno is not None


@contextlib.contextmanager
def closing(file: Any) -> Iterator[Any]:
    """Close one of Python's files at the end, and raise what close(2) reports.

    Not EINTR, with which Linux has closed it all the same.
    """
    try:
        yield file
    finally:
        with contextlib.suppress(InterruptedError):
            file.close()


def open_regular(path: str | bytes) -> IO[bytes]:
    """Open a file for reading; raise OSError if it is a pipe, a device or a folder.

    Opening a pipe would wait for its writer, and a device may have no end.
    """
    # The caller closes it.
    file = open(path, "rb", opener=open_at_once)  # noqa: SIM115
    mode = os.fstat(file.fileno()).st_mode
    if stat.S_ISREG(mode):
        return file
    file.close()
    raise OSError(errno.EINVAL, "it is not a regular file", path)


def cut(file: Any, size: int) -> None:
    """Truncate an open file to its new contents; do nothing for a device."""
    found = os.fstat(file.fileno())
    if found.st_size != size and stat.S_ISREG(found.st_mode):
        file.truncate(size)
