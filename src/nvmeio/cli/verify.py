"""``nvmeio verify``: reads files twice, by different ways, and tells where they differ."""

import argparse
import errno
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.lib import format as npy

from nvmeio._npy import PickledError, has_magic, read_layout
from nvmeio.cli.arguments import CommandError, Parser, UsageError, sentence
from nvmeio.cli.files.checksums import Checksum, escaped, listed, named
from nvmeio.cli.files.streams import (
    Piece,
    Stream,
    add_options,
    extents_of_data,
    has_changed,
    leave_cache,
)
from nvmeio.cli.terminal import Terminal
from nvmeio.cli.units import in_binary, in_speed
from nvmeio.file import File
from nvmeio.files import naming

__all__ = ["configure", "run"]

NOTES = """\
Each file is read twice: by nvmeio with O_DIRECT, and by ordinary reads, as
other programs see it.  Both must give the same bytes; if not, the first offset
where they differ is reported.  Dirty pages are written to the device first, by
an fsync.

Where the file system has no O_DIRECT, and with --buffered, the page cache is
asked to drop the file beforehand.  It keeps pages that are locked or mapped,
and files in memory (tmpfs) have no device; the last line says how many files
that concerns.

That both agree does not mean that a file is what it once was: only a list of
checksums (--check) tells that.  A .npy file must also hold exactly the array
that its header describes.

Bad files are reported on standard error, and the rest are still read; the exit
status is then 1.  For good files the SHA-256 is printed, in the format of
sha256sum; with --check it is OK or FAILED for each file.

examples:
  nvmeio verify /mnt/nvme/*.npy
  nvmeio verify /mnt/nvme/*.npy > SHA256SUMS
  nvmeio verify --check SHA256SUMS
"""


def configure(parser: Parser) -> None:
    """Add the arguments of ``nvmeio verify``.

    Parameters
    ----------
    parser : Parser
        Its own.
    """
    parser.epilog = NOTES
    parser.add_argument(
        "files", metavar="FILE", nargs="*", help="a regular file or a block device"
    )
    parser.add_argument(
        "--check",
        metavar="SUMS",
        help="verify the files of a list that sha256sum or this command has written, and "
        "compare their checksums; - is standard input",
    )
    add_options(parser)


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    """Verify files.

    Parameters
    ----------
    options : argparse.Namespace
        What ``configure`` has added.
    terminal : Terminal
        Is told the checksums.

    Returns
    -------
    int
        1 where a file is bad or cannot be read, else 0.

    Raises
    ------
    CommandError, OSError
        The list of checksums cannot be read, or the engine does not work.
    UsageError
        There are no files, or too many ways to name them.
    """
    terminal.quiet = options.quiet
    wanted = _wanted(options)
    begin = time.monotonic()
    with Stream(options) as stream, ThreadPoolExecutor(1) as worker:
        verifier = Verifier(stream, worker, options, terminal)
        for number, (name, expected) in enumerate(wanted, 1):
            verifier.take(name, expected, f"file {number} of {len(wanted)}")
        terminal.note(verifier.summary(len(wanted), time.monotonic() - begin))
    return 1 if verifier.bad else 0


def _wanted(options: argparse.Namespace) -> list[tuple[str, str | None]]:
    """Return the names of the files, and their checksums where they are known."""
    if options.check is None:
        if not options.files:
            raise UsageError("there is no FILE to verify, and no --check SUMS")
        return [(name, None) for name in options.files]
    if options.files:
        raise UsageError("--check verifies the files of its list; leave out FILE")
    if options.check == "-":
        content = sys.stdin.buffer.read()
    else:
        content = Path(options.check).read_bytes()
    return list(listed(content, options.check))


class Verifier:
    """Goes through files.

    Parameters
    ----------
    stream : Stream
        Reads by nvmeio.
    worker : ThreadPoolExecutor
        Reads as others do.
    options : argparse.Namespace
        What ``configure`` has added.
    terminal : Terminal
        Is told the checksums.

    Attributes
    ----------
    bad : int
        How many files were bad or could not be read.
    """

    def __init__(
        self,
        stream: Stream,
        worker: ThreadPoolExecutor,
        options: argparse.Namespace,
        terminal: Terminal,
    ) -> None:
        self.stream, self.worker = stream, worker
        self.options, self.terminal = options, terminal
        self.bad = self.cached = self.nbytes = 0

    def take(self, name: str, expected: str | None, label: str) -> None:
        """Verify a file, and tell what came out.

        Parameters
        ----------
        name : str
            Of the file.
        expected : str or None
            Its checksum, where that is known.
        label : str
            For whoever waits.
        """
        checksum = ""
        try:
            checksum = self._checksum(name, label)
            if expected not in (None, checksum):
                raise CommandError(f"{name}: its SHA-256 is {checksum}, not {expected}")
        except (CommandError, OSError, MemoryError, ValueError) as error:
            self.stream.drop()
            self.bad += 1
            print(f"nvmeio verify: error: {sentence(error)}", file=sys.stderr)
            if expected is not None:
                self.terminal.say("{}{}: FAILED".format(*escaped(name)))
            return
        if expected is not None:
            self.terminal.say("{}{}: OK".format(*escaped(name)))
        else:
            self.terminal.say(named(checksum, name))

    def summary(self, count: int, seconds: float) -> str:
        """Say what was done.

        Parameters
        ----------
        count : int
            Of files.
        seconds : float
            How long it took.

        Returns
        -------
        str
            One line.
        """
        words = f"{count} file{'s' * (count != 1)}, {self.bad} bad; "
        words += f"{in_binary(self.nbytes)} read both ways, "
        words += f"{in_speed(self.nbytes, seconds)} by {self.stream.engine}"
        if self.cached:
            words += f"; {self.cached} through the page cache, perhaps from memory"
        return words

    def _checksum(self, name: str, label: str) -> str:
        """Read a file both ways and return its SHA-256."""
        with File(name, direct=self.options.direct) as file:
            before, size = os.fstat(file.fileno()), file.size
            with naming(name):
                _check_array(file)
            self.stream.sync(file)
            if not file.direct:
                leave_cache(file)
                self.cached += 1
            with self.terminal.progress(label, size) as advance:
                checksum = Checksum()
                difference = None
                for piece in self.stream.read(file, extents_of_data(file)):
                    compared = self.worker.submit(_first_difference, file, piece)
                    checksum.update(piece.offset, piece.memory)
                    difference = compared.result()
                    if difference is not None:
                        break
                    self.nbytes += len(piece.memory)
                    advance(len(piece.memory))
                    self.stream.release(piece)
            if has_changed(file, before, size):
                raise CommandError(f"{name} has changed while it was read")
            if difference is not None:
                raise CommandError(f"{name}: the two ways differ at offset {difference}")
            return checksum.finish(size)


def _first_difference(file: File, piece: Piece) -> int | None:
    """Compare a piece with ordinary reads; return the offset in the file, or None."""
    done = 0
    while done < len(piece.memory):
        position = piece.offset + done
        with naming(file.path):
            data = os.pread(file.fileno(), len(piece.memory) - done, position)
        if not data:
            words = f"an ordinary read ends at offset {position}"
            raise OSError(errno.ENODATA, words, file.path)
        differs = np.frombuffer(data, np.uint8) != piece.memory[done : done + len(data)]
        if differs.any():
            return position + int(differs.argmax())
        done += len(data)
    return None


def _check_array(file: File) -> None:
    """Compare a .npy file with its header."""
    if not os.fsdecode(file.path).endswith(".npy") and not has_magic(file):
        return
    try:
        layout = read_layout(file)
    except PickledError:
        # Unpickling could run anything; their size stands nowhere else.
        return
    end = layout.offset + layout.nbytes
    behind = os.pread(file.fileno(), len(npy.MAGIC_PREFIX), end)
    # numpy.save() may be called several times for the same file.
    if behind and behind != npy.MAGIC_PREFIX:
        raise CommandError(
            f"{os.fsdecode(file.path)} has {file.size} bytes; its array ends at {end}"
        )
