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
        SIGTERM, which are ignored meanwhile.

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
    try:
        own = tempfile.TemporaryDirectory(prefix="nvmeio-bench-", dir=folder)
    except OSError as error:
        # Its name is one that nobody has typed.
        raise CommandError(
            f"{folder}: cannot create a folder there: {error.strerror}"
        ) from None
    try:
        yield Path(own.name)
    finally:
        with _undisturbed():
            own.cleanup()


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Ignore what ends a program while inside: whoever is impatient sends it twice."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
