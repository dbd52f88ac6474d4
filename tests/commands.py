"""The command ``nvmeio``: called here, as a process with pipes, or in a terminal."""

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import termios
import time
from dataclasses import dataclass

from children import WATCHDOG_S
from nvmeio._cli import main

# Escape sequences of a terminal: colours and movements of the cursor.
CONTROL = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07)")

CTRL_C = b"\x03"


@dataclass
class Done:
    """A command that has ended.

    In a terminal, ``out`` has both stdout and stderr.
    """

    status: int
    out: str
    err: str = ""


def python():
    """Return the command that runs this Python as if it were started from a terminal.

    Tests that run in the background ignore Ctrl-C, and their children would inherit that.
    """
    return [shutil.which("env"), "--default-signal=HUP,INT", sys.executable]


def command(*arguments, without=()):
    """Return the command that runs ``nvmeio`` by this Python; `without` hides packages."""
    words = [str(argument) for argument in arguments]
    if not without:
        return [*python(), "-m", "nvmeio", *words]
    hiding = (
        f"import sys; sys.modules.update(dict.fromkeys({tuple(without)!r})); "
        "from nvmeio._cli import main; sys.exit(main())"
    )
    return [*python(), "-c", hiding, *words]


def nvmeio(*arguments, prefix=(), without=(), **options):
    """Run ``nvmeio`` with pipes; `prefix` comes before the command."""
    options.setdefault("timeout", WATCHDOG_S)
    done = subprocess.run(
        [*prefix, *command(*arguments, without=without)],
        capture_output=True,
        text=True,
        check=False,
        **options,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def call_nvmeio(*arguments):
    """Run ``nvmeio`` in this process, which is ten times as fast as in another."""
    streams = [io.TextIOWrapper(io.BytesIO(), "utf-8") for _ in range(2)]
    with (
        contextlib.redirect_stdout(streams[0]),
        contextlib.redirect_stderr(streams[1]),
    ):
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as ended:
            status = ended.code
    texts = []
    for stream in streams:
        stream.flush()
        texts.append(stream.buffer.getvalue().decode(errors="surrogateescape"))
    return Done(status, *texts)


def listed(path):
    """Return what ``nvmeio inspect`` lists of a file or folder that is complete."""
    found = call_nvmeio("inspect", path, "--json")
    assert found.status == 0, found.err
    assert call_nvmeio("inspect", path).status == 0
    return json.loads(found.out)


def nvmeio_in_terminal(*arguments, until=None, typed=CTRL_C, without=(), **options):
    """Run ``nvmeio`` in a terminal; type `keys` once the pattern `until` has appeared."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 160, 0, 0))
    options["env"] = {**options.get("env", os.environ), "TERM": "xterm-256color"}
    process = subprocess.Popen(
        command(*arguments, without=without),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        # Ctrl-C goes to the processes that the terminal controls.
        preexec_fn=lambda: fcntl.ioctl(theirs, termios.TIOCSCTTY, 0),
        **options,
    )
    os.close(theirs)
    seen = b""
    deadline = time.monotonic() + WATCHDOG_S
    try:
        while time.monotonic() < deadline:
            if not select.select([ours], [], [], 1)[0]:
                continue
            try:
                piece = os.read(ours, 1 << 16)
            except OSError:  # EIO: the last process has closed the terminal
                break
            if not piece:
                break
            seen += piece
            if until is not None and re.search(until, text_of(seen)):
                os.write(ours, typed)
                until = None
        status = process.wait(timeout=max(1, deadline - time.monotonic()))
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()
        os.close(ours)
    assert until is None, f"{until!r} was never seen in: {text_of(seen)}"
    return Done(status, text_of(seen))


def text_of(output):
    """Return the text that a terminal was given, without escape sequences."""
    return CONTROL.sub("", output.decode(errors="replace")).replace("\r\n", "\n")
