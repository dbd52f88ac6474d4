"""Compare models whose weights are on the drive with the minimum that they can take.

Forward passes that read their weights are compared with computing alone, with a plain loop
that reads as many bytes, and with accelerate's disk_offload; rows of a table on the drive
with a gather.
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

from comparisons import compare
from loop_child import loop_child
from machine import arguments, machine
from peers import Peers
from report import finish
from weights import weight_comparisons


def main() -> None:
    """Measure and report. The results never change the exit status."""
    options = arguments(__doc__, ("1G", "256M"), (7, 2))
    peers = Peers()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="nvmeio-bench-", dir=options.dir)
        )
        child = stack.enter_context(loop_child(peers))
        about = machine(options.dir) | {"size": options.size, "rounds": options.rounds}
        found = list(weight_comparisons(Path(folder), options.size, child, peers, stack))
        compare(found, options.rounds)
    finish("stream", about, found, peers.left_out, options.json)


if __name__ == "__main__":
    main()
