"""The command ``nvmeio``: one module for each of its subcommands, listed in ``COMMANDS``.

A command's module has ``configure(parser)``, which adds its arguments, and ``run(options,
terminal)``, which returns the exit status: 0, or 1 if the answer is no.  Every command
prints its answer to standard output, and progress, notes and errors to standard error.  An
error is one line, with exit status 1, or 2 if the command line is wrong.
"""

import io
import math
import os
import signal
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Sequence
from importlib import import_module
from types import FrameType
from typing import Any

import nvmeio
from nvmeio._cli.arguments import CommandError, Parser, UsageError, hyphenated, sentence
from nvmeio._cli.terminal import Terminal, harmless

# The text of --help for each command.
COMMANDS = {
    "doctor": "check whether nvmeio works here, and what slows it down",
    "bench": "measure a drive and memory copies, beside fio if it is installed",
    "tune": "find the fastest settings for a drive, and save them as a profile",
    "inspect": "list the tensors or samples of a file or folder, and what it lacks",
    "checkpoints": "list the checkpoints of a training run, and which are complete",
    "verify": "read checkpoints, and compare them with their checksums",
    "completion": "print a completion script for bash or zsh",
}

ABOUT = """\
nvmeio moves numpy arrays and torch tensors to and from files on NVMe drives.
These commands check whether that works here, measure how fast it is, and find
the best settings.
"""

EXAMPLES = """\
examples:
  nvmeio doctor /mnt/nvme
  nvmeio bench /mnt/nvme --size 4G
  nvmeio tune /mnt/nvme
  nvmeio inspect model.safetensors
  nvmeio verify run

nvmeio COMMAND --help explains each command.  The exit status is 0, 1 after an
error or if the answer is no, 2 if the command line is wrong, and 130 after
Ctrl-C.
"""

# Signals that end a program.  They are caught, because temporary files must be removed.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# For so long after one of them, further ones are ignored.
CLEANUP_S = 10.0
_ended_s = -math.inf
# Unset while a signal is sent again, because Python has dropped its exception.
_heeded = threading.Event()
_heeded.set()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``nvmeio``, by default with the arguments of the command line; return the status.

    Raises SystemExit with status 2 if the command line is wrong, 0 if it asks for help, and
    128 plus the signal's number after SIGTERM or SIGHUP.
    """
    words = sys.argv[1:] if arguments is None else arguments
    _open_closed()
    try:
        # Without arguments, show the help.
        options, unknown = _parser().parse_known_args(hyphenated(words or ["--help"]))
    except SystemExit:
        # After --help: the reader of its output may be gone.
        _flush_or_drop()
        raise
    if unknown:
        operands = [word for word in unknown if not word.startswith("-")]
        hint = options.operands if operands else ""
        options.parser.error(f"unknown arguments: {' '.join(unknown)}{hint}")
    if isinstance(sys.stdout, io.TextIOWrapper):
        # File names may have any bytes; print them unchanged.
        sys.stdout.reconfigure(errors="surrogateescape")
    # Do not catch ignored signals: nohup makes a command ignore SIGHUP.
    heeded = [number for number in ENDING if signal.getsignal(number) != signal.SIG_IGN]
    global _ended_s
    _ended_s = -math.inf
    before = {number: signal.signal(number, _end) for number in heeded}
    hook, sys.unraisablehook = sys.unraisablehook, _end_again
    if arguments is None:
        # The program is about to exit; nothing is left that Ctrl-C should interrupt.
        before[signal.SIGINT] = signal.SIG_IGN
    try:
        return _run(options, Terminal())
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        sys.unraisablehook = hook
        _heeded.set()


def _run(options: Namespace, terminal: Terminal) -> int:
    """Run a command; report an error in one line."""
    name = options.command
    try:
        status: int = import_module(f"nvmeio._cli.{name}").run(options, terminal)
        sys.stdout.flush()
        return status
    except UsageError as error:
        options.parser.error(str(error))
    except BrokenPipeError:
        # The reader of the output has closed its pipe.
        status = 1
    except (CommandError, OSError, MemoryError, ValueError) as error:
        terminal.note(f"nvmeio {name}: error: {harmless(sentence(error))}")
        status = 1
    except KeyboardInterrupt:
        terminal.note(f"nvmeio {name}: interrupted")
        status = 128 + signal.SIGINT
    finally:
        terminal.clear()
    _flush_or_drop()
    return status


def _open_closed() -> None:
    """Open /dev/null in place of output that was closed (>&-)."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))


def _flush_or_drop() -> None:
    """Write buffered output, or drop it, so that Python does not try at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _end(number: int, frame: FrameType | None) -> None:
    """End by an exception, so that everything is cleaned up."""
    global _ended_s
    while frame is not None:
        if frame.f_code is _end_again.__code__:
            # An exception would be dropped here too.
            _end_later(number)
            return
        frame = frame.f_back
    # A second signal must not interrupt the cleanup, but may if that takes long.
    now_s = time.monotonic()
    if now_s - _ended_s < CLEANUP_S:
        return
    _ended_s = now_s
    _heeded.set()
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


def _end_again(dropped: "sys.UnraisableHookArgs") -> None:
    """Raise again what Python drops in a destructor or a callback of a weak reference."""
    global _ended_s
    error = dropped.exc_value
    if isinstance(error, KeyboardInterrupt | SystemExit) and _ended_s > -math.inf:
        _ended_s = -math.inf
        _end_later(signal.SIGINT if isinstance(error, KeyboardInterrupt) else error.code)
    else:
        sys.__unraisablehook__(dropped)


def _end_later(number: Any) -> None:
    """Have the signal of a number, or of an exit status, come until it is heeded."""
    global _heeded
    if _heeded.is_set():
        _heeded = threading.Event()
        number = number - 128 if number > 128 else number
        threading.Thread(target=_send, args=(number, _heeded), daemon=True).start()


def _send(number: int, heeded: threading.Event) -> None:
    while not heeded.wait(0.01):
        os.kill(os.getpid(), number)


def _parser() -> Parser:
    parser = Parser(prog="nvmeio", description=ABOUT, epilog=EXAMPLES)
    released = f"nvmeio {nvmeio.__version__}"
    parser.add_argument("--version", action="version", version=released)
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", title="commands"
    )
    for name, about in COMMANDS.items():
        description = f"{about[0].upper()}{about[1:]}."
        command = commands.add_parser(name, help=about, description=description)
        command.set_defaults(whole=parser, parser=command, operands="")
        import_module(f"nvmeio._cli.{name}").configure(command)
    return parser
