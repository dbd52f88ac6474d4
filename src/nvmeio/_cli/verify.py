"""``nvmeio verify``: read files in two ways, and report where these differ."""

import argparse
import errno
import os
import shlex
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.lib import format as npy

from nvmeio._arguments.units import in_binary
from nvmeio._arrays.npy_header import PickledError, has_magic, read_layout
from nvmeio._cli.arguments import CommandError, Parser, UsageError, sentence
from nvmeio._cli.checksums import Checksum, escaped, listed, named
from nvmeio._cli.folders import step_of
from nvmeio._cli.streams import (
    Piece,
    Stream,
    add_options,
    check_unchanged,
    leave_cache,
)
from nvmeio._cli.terminal import Advance, Terminal, in_speed
from nvmeio._files.paths import naming
from nvmeio._native.file import File
from nvmeio.checkpoint import Checkpointer, CheckpointError
from nvmeio.checkpoint._kinds import METADATA, what_is_in

NOTES = """\
Reads each file twice: with O_DIRECT, and with ordinary reads, as other programs
see it.  Both must return the same bytes; otherwise the first differing offset
is reported.  An fsync writes dirty pages to the device first.

Without O_DIRECT, and with --buffered, the page cache is asked to drop the file
beforehand.  It keeps pages that are locked or mapped, and files in memory
(tmpfs) have no device; the last line says how many files this concerns.

Agreement does not mean that a file is unchanged: only a list of checksums
(--check) shows that.  A .npy file must also hold exactly the array that its
header describes.

For a checkpoint of nvmeio.checkpoint, or a folder of checkpoints, all bytes are
read and compared with the saved checksums.  torch.distributed.checkpoint has
none for this: verify its files, and keep the list that this prints.

Bad files are reported on standard error, and the rest are still read; the exit
status is then 1.  For good files the SHA-256 is printed in the format of
sha256sum; with --check, OK or FAILED for each file.

examples:
  nvmeio verify /mnt/nvme/*.npy
  nvmeio verify /mnt/nvme/*.npy > SHA256SUMS
  nvmeio verify --check SHA256SUMS
  nvmeio verify run/step-100
"""


def configure(parser: Parser) -> None:
    parser.epilog = NOTES
    parser.add_argument(
        "files",
        metavar="FILE",
        nargs="*",
        help="a regular file, a block device, a checkpoint, or a folder of checkpoints",
    )
    parser.add_argument(
        "--check",
        metavar="SUMS",
        help="verify the files of a list written by sha256sum or this command, and "
        "compare their checksums; - is standard input",
    )
    add_options(parser)


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    """Verify files; return 1 if one is bad or cannot be read."""
    wanted = _wanted(options)
    begin = time.monotonic()
    with Stream(options, terminal) as stream, ThreadPoolExecutor(1) as worker:
        verifier = Verifier(stream, worker)
        for number, (name, expected) in enumerate(wanted, 1):
            verifier.take(name, expected, f"file {number} of {len(wanted)}")
    files = len(wanted) - verifier.folders
    words = []
    if files or not verifier.steps:
        words.append(f"{files} file{'s' * (files != 1)}")
    if steps := verifier.steps:
        words.append(f"{steps} checkpoint{'s' * (steps != 1)}")
    words = [f"{' and '.join(words)}, {verifier.bad} bad"]
    if nbytes := verifier.nbytes:
        speed = in_speed(nbytes, time.monotonic() - begin)
        words.append(
            f"{in_binary(nbytes)} read both ways, {speed} by {stream.handle.engine}"
        )
    if verifier.cached:
        words.append(f"{verifier.cached} through the page cache, perhaps from memory")
    terminal.note("; ".join(words))
    return 1 if verifier.bad else 0


def _wanted(options: argparse.Namespace) -> list[tuple[str, str | None]]:
    """Return the names of the files, and their expected checksums or None."""
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
    """Verifies files, with a thread for ordinary reads."""

    def __init__(self, stream: Stream, worker: ThreadPoolExecutor) -> None:
        self.stream, self.worker = stream, worker
        # Files that are bad or cannot be read, and files without O_DIRECT.
        self.bad = self.cached = 0
        # Numbers of folders with checkpoints, and of checkpoints.
        self.folders = self.steps = 0
        # Bytes that were read both ways.
        self.nbytes = 0

    def take(self, name: str, expected: str | None, label: str) -> None:
        """Verify a file, and report the result."""
        if expected is None and os.path.isdir(name):
            self._checkpoints(name)
            return
        answer = ""
        try:
            checksum = self._checksum(name, label)
            if expected not in (None, checksum):
                raise CommandError(f"{name}: its SHA-256 is {checksum}, not {expected}")
            answer = named(checksum, name) if expected is None else "OK"
        except (CommandError, OSError, MemoryError, ValueError) as error:
            self.stream.drop()
            self.bad += 1
            self.stream.terminal.error(f"nvmeio verify: error: {sentence(error)}")
            answer = "" if expected is None else "FAILED"
        if expected is not None:
            answer = "{}{}: {}".format(*escaped(name), answer)
        if answer:
            self.stream.terminal.say(answer)

    def _checkpoints(self, name: str) -> None:
        """Verify all checkpoints of a root, or a single checkpoint."""
        terminal = self.stream.terminal
        one = step_of(name)
        # A checkpoint of torch.distributed.checkpoint may be in a folder with such a name.
        if one is not None and not os.path.exists(os.path.join(name, METADATA)):
            name, steps = one[0], [one[1]]
            checkpointer = Checkpointer(name)
        else:
            checkpointer = Checkpointer(name)
            steps = checkpointer._newest_first()[::-1]
        self.steps += len(steps)
        self.folders += bool(steps)
        if not steps:
            self.bad += 1
            terminal.error(f"nvmeio verify: error: {name}: {_unverifiable(name)}")
        for step in steps:
            folder = os.path.join(name, f"step-{step}")
            advance, before = terminal.progress(folder, 1, speed=False), 0.0

            def progress(done: int, total: int, advance: Advance = advance) -> None:
                nonlocal before
                advance(done / total - before)
                before = done / total

            try:
                checkpointer.verify(step, progress=progress)
            except (CheckpointError, OSError, MemoryError) as error:
                self.bad += 1
                terminal.error(f"nvmeio verify: error: {sentence(error)}")
            else:
                # Not to standard output, which has checksums only.
                terminal.note(f"{folder}: OK")

    def _checksum(self, name: str, label: str) -> str:
        """Read a file both ways and return its SHA-256."""
        with File(name, direct=self.stream.options.direct) as file:
            before, size = os.fstat(file.fileno()), file.size
            with naming(name):
                _check_array(file)
            self.stream.handle.fsync(file)
            if not file.direct:
                leave_cache(file)
                self.cached += 1
            checksum = Checksum()
            difference = None
            for piece in self.stream.read(file, label):
                compared = self.worker.submit(_first_difference, file, piece)
                checksum.update(piece)
                difference = compared.result()
                if difference is not None:
                    break
                self.nbytes += len(piece.memory)
                self.stream.release(piece)
            check_unchanged(file, before, size, "read")
            if difference is not None:
                raise CommandError(f"{name}: the two ways differ at offset {difference}")
            return checksum.finish(size)


def _unverifiable(folder: str) -> str:
    """Say why the folder has no checkpoint to verify, and what can be done instead."""
    if not os.path.exists(os.path.join(folder, METADATA)):
        return f"it is a folder without steps of nvmeio.checkpoint; {what_is_in(folder)}"
    files = f"{shlex.quote(folder.rstrip('/') or '/')}/{{{METADATA},*.distcp}}"
    return (
        "it is a checkpoint of torch.distributed.checkpoint, which has no checksums that "
        f"nvmeio could compare; `nvmeio verify {files} > SHA256SUMS` reads its files and "
        "keeps their checksums, and `nvmeio verify --check SHA256SUMS` finds later changes"
    )


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
        # Only unpickling would tell their size, and that could run any code.
        return
    end = layout.offset + layout.nbytes
    behind = os.pread(file.fileno(), len(npy.MAGIC_PREFIX), end)
    # More arrays may follow: numpy.save() can append to an open file.
    if behind and behind != npy.MAGIC_PREFIX:
        raise CommandError(
            f"{os.fsdecode(file.path)} has {file.size} bytes; its array ends at {end}"
        )
