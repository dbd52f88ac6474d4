"""``nvmeio cp``: copy a file; its name appears only when the copy is complete."""

import argparse
import contextlib
import os
import stat
import time
from collections.abc import Iterator

from nvmeio._arguments.units import in_binary
from nvmeio._cli.arguments import CommandError, Parser, option
from nvmeio._cli.attributes import create_private, give, give_access, preserve
from nvmeio._cli.checksums import Checksum, named
from nvmeio._cli.streams import (
    Stream,
    add_options,
    check_unchanged,
    data_bytes,
    leave_cache,
)
from nvmeio._cli.terminal import Terminal, in_speed, sizes
from nvmeio._files.paths import naming, synced_folder
from nvmeio._files.replacing import replacement
from nvmeio._native.file import File

NOTES = """\
The copy is first a file .nvmeio-*.tmp beside DST.  When it is complete and on
the device, it is renamed to DST.  After an error, Ctrl-C or SIGTERM it is
removed and DST is unchanged; after SIGKILL or a power failure you can delete
it.

An existing DST is replaced by a new file with the same mode, access control
list and, if permitted, owner; its other hard links keep the old content.  If
DST is a symbolic link, its target is replaced.  A new DST has the permission
bits of SRC, minus the umask.  Holes of SRC stay holes.

--verify reads the copy back before it is renamed, past the page cache if the
file system has O_DIRECT, and compares its SHA-256 with that of the bytes read
from SRC.  For files in memory (tmpfs) it compares memory.

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
    parser.epilog = NOTES
    parser.set_defaults(operands="; cp copies one SRC to one DST")
    parser.add_argument("source", metavar="SRC", help="a regular file or a block device")
    parser.add_argument(
        "target", metavar="DST", help="the new file, or a folder for a file with SRC's name"
    )
    about = "read the copy back and compare; print its SHA-256 as sha256sum does"
    option(parser, "--verify", about)
    about = "fail if DST exists"
    parser.add_argument("-n", "--no-clobber", action="store_true", help=about)
    parser.add_argument(
        "-p",
        "--preserve",
        action="store_true",
        help="keep SRC's mode, times and, if permitted, owner, access control "
        "list and user's extended attributes",
    )
    add_options(parser)


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    """Copy a file; after an error, DST is unchanged."""
    name = options.target
    if os.path.isdir(name):
        name = os.path.join(name, os.path.basename(options.source))
    with (
        File(options.source, direct=options.direct) as source,
        Stream(options, terminal) as stream,
    ):
        copy = Copy(source, name, stream)
        begin = time.monotonic()
        checksum, refused = copy.make()
        seconds = time.monotonic() - begin
    if checksum is not None:
        terminal.say(named(checksum, name))
    words = [in_binary(copy.size)]
    if copy.size > copy.data_bytes:
        words.append(f"{in_binary(copy.size - copy.data_bytes)} of it in holes")
    words.append(f"{seconds:.2f} s")
    speed = f"{in_speed(copy.data_bytes, copy.seconds)} " if copy.data_bytes else ""
    words.append(f"{speed}by {stream.handle.engine}")
    if checksum is not None:
        words.append("read back and compared")
    terminal.note(", ".join(words))
    if refused:
        terminal.note(f"not kept, because the system refuses it: {', '.join(refused)}")
    return 0


class Copy:
    """A copy in progress.  The constructor checks that it is possible."""

    def __init__(self, source: File, name: str, stream: Stream) -> None:
        self.source, self.name = source, name
        self.stream, self.options = stream, stream.options
        self.target = os.path.realpath(name)
        self.before = os.fstat(source.fileno())
        self.replaced = self._look_at_target()
        self.size = source.size
        self.data_bytes = data_bytes(source)
        # Without the verification: progress has shown the speed of copying.
        self.seconds = 0.0
        self._check_source()

    def make(self) -> tuple[str | None, list[str]]:
        """Copy; return the checksum, if requested, and the attributes that were refused."""
        with (
            self._named_errors(),
            synced_folder(self.target),
            replacement(self.target, overwrite=not self.options.no_clobber) as temporary,
        ):
            return self._fill(temporary)

    def _look_at_target(self) -> os.stat_result | None:
        """Return the status of the file to replace, if any; refuse anything but a file."""
        if not os.path.basename(self.name):
            raise CommandError(f"{self.name} is not a folder")
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
        # It could be replaced nevertheless, but it was write-protected for a reason.
        if not os.access(self.name, os.W_OK):
            raise CommandError(f"{self.name} is not writable by this user")
        return status

    def _check_source(self) -> None:
        """Refuse files of unknown size, as in /proc, and files that do not fit."""
        with naming(self.options.source):
            claims_wrongly = self.size == 0 and os.pread(self.source.fileno(), 1, 0)
        if claims_wrongly:
            raise CommandError(
                f"{self.options.source} reports a size of 0, but is not empty; only files "
                "of known size are copied"
            )
        folder = os.path.dirname(self.target)
        system = os.statvfs(folder)
        # Some blocks are reserved for root.
        blocks = system.f_bfree if os.geteuid() == 0 else system.f_bavail
        free = blocks * system.f_frsize
        # A file system that reports no blocks has no known size.
        if system.f_blocks and free < self.data_bytes:
            has, takes = sizes(free, self.data_bytes)
            raise CommandError(f"{folder} has {has} free, and the copy takes {takes}")

    def _fill(self, temporary: str) -> tuple[str | None, list[str]]:
        """Write and sync the temporary file that becomes the copy."""
        stream, checksum = self.stream, Checksum()
        file, umask = create_private(temporary, self.options.direct)
        begin = time.monotonic()
        with file:
            for piece in stream.read(self.source, "copying"):
                stream.write(piece, file)
                if self.options.verify:
                    # Compute the checksum while the piece is written.
                    checksum.update(piece)
            stream.flush()
            self.seconds = time.monotonic() - begin
            # Extend the file if it ends with a hole.
            if file.size != self.size:
                file.truncate(self.size)
            check_unchanged(self.source, self.before, self.size, "copied")
            expected = checksum.finish(self.size) if self.options.verify else None
            if expected is not None:
                stream.handle.fsync(file)
                self._compare(temporary, expected)
            refused = self._give_attributes(file, umask)
            stream.handle.fsync(file)
        return expected, refused

    def _compare(self, temporary: str, expected: str) -> None:
        """Read the copy back, and compare its checksum."""
        found = Checksum()
        with File(temporary, direct=self.options.direct) as file:
            leave_cache(file)
            for piece in self.stream.read(file, "reading back"):
                found.update(piece)
                self.stream.release(piece)
            read_back = found.finish(file.size)
        if read_back != expected:
            raise CommandError(
                f"{self.name} was not replaced: the copy differs from "
                f"{self.options.source} (SHA-256 {read_back}, not {expected})"
            )

    def _give_attributes(self, file: File, umask: int) -> list[str]:
        """Set the copy's attributes; return those that the system refused."""
        descriptor = file.fileno()
        if self.options.preserve:
            return preserve(self.source.fileno(), descriptor, self.before)
        if self.replaced is not None:
            return give_access(descriptor, self.target, self.replaced)
        return give(descriptor, self.before.st_mode & 0o777 & ~umask)

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Make errors name the copy instead of the temporary file."""
        try:
            yield
        except OSError as error:
            if error.filename == self.source.path:
                raise
            raise OSError(error.errno, error.strerror, self.name) from error
