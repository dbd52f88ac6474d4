"""Run ``nvmeio`` and ``python -m nvmeio``, so that Ctrl-C ends them at any moment.

It is outside of the package, whose import takes some tenths of a second for numpy and the
extensions.  Nothing has to be cleaned up by then, so a signal handler ends the process: an
extension that is being loaded would print an exception, or raise another error instead.
"""

import os
import signal
import sys

__all__ = ["main"]


def main() -> int:
    """Run ``nvmeio``; return the exit status."""
    # A shell that runs it in the background may have made it ignore Ctrl-C.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: _interrupted())
    from nvmeio._cli import main as command

    return command()


def _interrupted() -> None:
    if sys.stderr is not None:
        os.write(sys.stderr.fileno(), b"nvmeio: interrupted\n")
    os._exit(128 + signal.SIGINT)
