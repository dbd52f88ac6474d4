"""``nvmeio cp``: copies a file; its name stands for the whole of it, or for the old one."""

import argparse
import contextlib
import os
import stat
import time
from collections.abc import Iterator

from nvmeio._replacing import replacement
from nvmeio.cli.arguments import CommandError, Parser
from nvmeio.cli.files.attributes import create_private, give, give_access, preserve
from nvmeio.cli.files.checksums import Checksum, named
from nvmeio.cli.files.streams import (
    Stream,
    add_options,
    extents_of_data,
    has_changed,
    leave_cache,
)
from nvmeio.cli.terminal import Terminal
from nvmeio.cli.units import in_speed
from nvmeio.file import File
from nvmeio.files import naming, synced_folder

__all__ = ["configure", "run"]

NOTES = """\
The copy is made in a file .nvmeio-*.tmp beside DST.  When it is complete and
on the device, it is renamed to DST.  An error, Ctrl-C and SIGTERM remove it
and leave DST as it was; what SIGKILL or a power failure leaves can be deleted.

A DST that exists is replaced by a new file of the same mode, access control
list and, where that is permitted, owner; its other hard links keep the old
content.  Where DST is a symbolic link, the file it leads to is replaced.  A new
DST has the permission bits of SRC, less the umask.  Holes of SRC stay holes.

--verify reads the copy back before it is renamed, past the page cache where
the file system has O_DIRECT, and compares its SHA-256 with that of the bytes
that were read from SRC.  Of files in memory (tmpfs) it compares memory.

examples:
  nvmeio cp model.safetensors /mnt/nvme/
  nvmeio cp --verify checkpoint.bin /mnt/nvme/checkpoint.bin >> SHA256SUMS
  nvmeio cp --preserve --no-clobber /mnt/nvme/data.npy backup.npy
"""

KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISBLK, "a block device"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
)


def configure(parser: Parser) -> None:
    """Add the arguments of ``nvmeio cp``.

    Parameters
    ----------
    parser : Parser
        Its own.
    """
    parser.epilog = NOTES
    parser.add_argument("source", metavar="SRC", help="a regular file or a block device")
    parser.add_argument(
        "target", metavar="DST", help="the new file, or a folder for one of SRC's name"
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="read the copy back and compare; print its SHA-256 as sha256sum does",
    )
    parser.add_argument(
        "-n", "--no-clobber", action="store_true", help="fail where DST exists"
    )
    parser.add_argument(
        "-p",
        "--preserve",
        action="store_true",
        help="keep SRC's mode, times and, where that is permitted, owner, access control "
        "list and user's extended attributes",
    )
    add_options(parser)


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    """Copy a file.

    Parameters
    ----------
    options : argparse.Namespace
        What ``configure`` has added.
    terminal : Terminal
        Hears of it.

    Returns
    -------
    int
        0.

    Raises
    ------
    CommandError, OSError
        There is no copy.  DST is as it was.
    """
    terminal.quiet = options.quiet
    name = options.target
    if os.path.isdir(name):
        name = os.path.join(name, os.path.basename(options.source))
    with File(options.source, direct=options.direct) as source, Stream(options) as stream:
        Copy(source, name, options, terminal).make(stream)
    return 0


class Copy:
    """A copy that is being made.

    Parameters
    ----------
    source : File
        Open for reading.
    name : str
        What the copy shall be called.
    options : argparse.Namespace
        What ``configure`` has added.
    terminal : Terminal
        Hears of it.

    Raises
    ------
    CommandError, OSError
        It could not be made.
    """

    def __init__(
        self, source: File, name: str, options: argparse.Namespace, terminal: Terminal
    ) -> None:
        self.source, self.name = source, name
        self.options, self.terminal = options, terminal
        self.target = os.path.realpath(name)
        self.before = os.fstat(source.fileno())
        self.replaced = self._look_at_target()
        self.size = source.size
        self.data_bytes = sum(nbytes for _, nbytes in extents_of_data(source))
        self._check_size()
        self._check_room()

    def make(self, stream: Stream) -> None:
        """Make it.

        Parameters
        ----------
        stream : Stream
            Carries the bytes.

        Raises
        ------
        CommandError, OSError
            It is not made.
        """
        begin = time.monotonic()
        with (
            self._named_errors(),
            synced_folder(self.target),
            replacement(self.target, overwrite=not self.options.no_clobber) as temporary,
        ):
            checksum, refused = self._fill(stream, temporary)
        if checksum is not None:
            self.terminal.say(named(checksum, self.name))
        self._report(stream.engine, time.monotonic() - begin, refused)

    def _look_at_target(self) -> os.stat_result | None:
        """Return what is to be replaced, if anything, and refuse what cannot be."""
        if not os.path.basename(self.name):
            raise CommandError(f"{self.name} is no folder")
        if self.options.no_clobber and os.path.lexists(self.name):
            raise CommandError(f"{self.name} exists, and --no-clobber keeps it")
        try:
            status = os.stat(self.name)
        except FileNotFoundError:
            return None
        if os.path.samestat(status, self.before):
            raise CommandError(f"{self.name} and {self.options.source} are the same file")
        for is_kind, kind in KINDS:
            if is_kind(status.st_mode):
                raise CommandError(f"{self.name} is {kind}; only files are replaced")
        # A new file could take its place nevertheless; whoever protects it means this.
        if not os.access(self.name, os.W_OK):
            raise CommandError(f"{self.name} may not be written to")
        return status

    def _check_size(self) -> None:
        """Refuse files that are made while they are read, as those in /proc are."""
        with naming(self.options.source):
            claims_wrongly = self.size == 0 and os.pread(self.source.fileno(), 1, 0)
        if claims_wrongly:
            raise CommandError(
                f"{self.options.source} claims to be empty, but is not; only files that "
                "know their size are copied"
            )

    def _check_room(self) -> None:
        """Say before anything is written that it will not do."""
        folder = os.path.dirname(self.target)
        system = os.statvfs(folder)
        # Some of it is kept for root.
        blocks = system.f_bfree if os.geteuid() == 0 else system.f_bavail
        free = blocks * system.f_frsize
        # Without blocks it is a file system that does not tell.
        if system.f_blocks and free < self.data_bytes:
            raise CommandError(
                f"{folder} has {free} bytes free, and the copy takes {self.data_bytes}"
            )

    def _fill(self, stream: Stream, temporary: str) -> tuple[str | None, list[str]]:
        """Make the file that is to become the copy, and see it safely to the device."""
        checksum = Checksum() if self.options.verify else None
        file, umask = create_private(temporary, self.options.direct)
        with file:
            self._transfer(stream, file, checksum)
            self._check_unchanged()
            expected = checksum.finish(self.size) if checksum is not None else None
            if expected is not None:
                stream.sync(file)
                self._compare(stream, temporary, expected)
            refused = self._dress(file, umask)
            stream.sync(file)
        return expected, refused

    def _transfer(self, stream: Stream, file: File, checksum: Checksum | None) -> None:
        with self.terminal.progress("copying", self.data_bytes) as advance:
            for piece in stream.read(self.source, extents_of_data(self.source)):
                stream.write(piece, file)
                if checksum is not None:
                    # While it is written.
                    checksum.update(piece.offset, piece.memory)
                advance(len(piece.memory))
            stream.flush()
        # A hole at the end; all that was written has made it as long as it is.
        if file.size != self.size:
            file.truncate(self.size)

    def _check_unchanged(self) -> None:
        """Refuse a copy of which some parts may be older than others."""
        if has_changed(self.source, self.before, self.size):
            raise CommandError(f"{self.options.source} has changed while it was copied")

    def _compare(self, stream: Stream, temporary: str, expected: str) -> None:
        """Read back what was written, and compare its checksum."""
        found = Checksum()
        with File(temporary, direct=self.options.direct) as file:
            leave_cache(file)
            with self.terminal.progress("reading back", self.data_bytes) as advance:
                for piece in stream.read(file, extents_of_data(file)):
                    found.update(piece.offset, piece.memory)
                    advance(len(piece.memory))
                    stream.release(piece)
            read_back = found.finish(file.size)
        if read_back != expected:
            raise CommandError(
                f"{self.name} is not written: what was read back is not what "
                f"{self.options.source} has (SHA-256 {read_back}, not {expected})"
            )

    def _dress(self, file: File, umask: int) -> list[str]:
        """Give the copy its mode and so on; return what the system has refused."""
        descriptor = file.fileno()
        if self.options.preserve:
            return preserve(self.source.fileno(), descriptor, self.before)
        if self.replaced is not None:
            return give_access(descriptor, self.target, self.replaced)
        return give(descriptor, self.before.st_mode & 0o777 & ~umask)

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Let errors of the temporary file, which is soon gone, name the copy."""
        try:
            yield
        except OSError as error:
            if error.filename == self.source.path:
                raise
            raise OSError(error.errno, error.strerror, self.name) from error

    def _report(self, engine: str, seconds: float, refused: list[str]) -> None:
        holes = self.size - self.data_bytes
        words = [f"{self.size} bytes"]
        if holes:
            words.append(f"{holes} of them in holes")
        words.append(f"{seconds:.2f} s")
        words.append(f"{in_speed(self.data_bytes, seconds)} by {engine}")
        if self.options.verify:
            words.append("read back and compared")
        self.terminal.note(", ".join(words))
        if refused:
            self.terminal.note(f"not kept, for it is refused here: {', '.join(refused)}")
