"""Compare training beyond memory with the minimum that it can take.

Steps of optimizers whose states are on the drive, and training steps whose activations are
on the drive, are compared with the same steps in memory and with a plain loop that moves as
many bytes.  The optimizers are also compared with DeepSpeed's ZeRO-3, if that is installed
and trains on this machine.
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

from activations import activation_comparisons
from comparisons import compare
from loop_child import loop_child
from machine import arguments, machine
from optimizers import optimizer_comparisons
from peers import Peers
from report import finish


def main() -> None:
    """Measure and report. The results never change the exit status."""
    options = arguments(__doc__, ("1G", "16M"), (7, 2))
    peers = Peers()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="nvmeio-bench-", dir=options.dir)
        )
        child = stack.enter_context(loop_child(peers))
        about = machine(options.dir) | {"size": options.size, "rounds": options.rounds}
        comparisons = [
            *optimizer_comparisons(Path(folder), options.size, child, peers, stack),
            *activation_comparisons(Path(folder), options.size, child),
        ]
        compare(comparisons, options.rounds)
    finish("offload", about, comparisons, peers.left_out, options.json)


if __name__ == "__main__":
    main()
