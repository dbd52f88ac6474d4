"""Where something is measured: a folder of its own on a disk with room for it."""

import contextlib
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

from nvmeio.cli.arguments import CommandError, Parser, size
from nvmeio.cli.units import in_binary

__all__ = ["add_option", "folder_of_its_own", "forget_cached"]

# What is left free where the user does not say: a tenth of the file system, or this much.
RESERVE_BYTES_MAX = 1 << 30


def add_option(parser: Parser) -> None:
    """Add the option that says what must stay free.

    Parameters
    ----------
    parser : Parser
        Of a command.
    """
    parser.add_argument(
        "--reserve",
        type=size,
        metavar="SIZE",
        help="what must stay free (default: a tenth of the file system, at most 1G)",
    )


@contextlib.contextmanager
def folder_of_its_own(folder: str, needed: int, reserve: int | None) -> Iterator[Path]:
    """Make a folder for files that are only measured with, while inside.

    Parameters
    ----------
    folder : str
        The folder that it is made in, which must exist.
    needed : int
        How many bytes will be written there.
    reserve : int or None
        How many bytes must stay free; None for a tenth of the file system, at most 1 GiB.

    Yields
    ------
    Path
        The new folder; it goes away with all that is in it, also after an error, Ctrl-C or
        SIGTERM, which wait until it is made, and until it is gone.

    Raises
    ------
    CommandError
        There is not enough room, or no folder can be made there.  Nothing was written.
    OSError
        The folder does not exist.
    """
    space = os.statvfs(folder)
    free = space.f_bavail * space.f_frsize
    if reserve is None:
        reserve = min(RESERVE_BYTES_MAX, space.f_blocks * space.f_frsize // 10)
    # FUSE may not know how large it is.
    if space.f_blocks and free - needed < reserve:
        raise CommandError(
            f"{folder}: {in_binary(needed)} are needed and {in_binary(free)} are free, of "
            f"which {in_binary(reserve)} are kept (--reserve); a smaller --size needs less"
        )
    with contextlib.ExitStack() as stack:
        with _undisturbed():
            own = _made_in(folder)
            stack.callback(_remove, own)
        yield Path(own.name)


def _made_in(folder: str) -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="nvmeio-bench-", dir=folder)
    except OSError as error:
        # Its name is one that nobody has typed.
        raise CommandError(
            f"{folder}: cannot create a folder there: {error.strerror}"
        ) from None


def _remove(own: tempfile.TemporaryDirectory[str]) -> None:
    try:
        with _undisturbed():
            own.cleanup()
    except OSError as error:
        # It names what lies inside, and not where that is.
        raise CommandError(f"{own.name} cannot be removed: {error.strerror}") from error


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Have what ends a program wait while inside, so that nothing is left half done."""
    waiting: list[int] = []
    before = {
        number: signal.signal(number, lambda came, _: waiting.append(came))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for came in waiting:
        signal.raise_signal(came)


def forget_cached(path: Path) -> None:
    """Have the next read of a file come from the device.

    Parameters
    ----------
    path : Path
        A file; what is not on the device yet is written first.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
