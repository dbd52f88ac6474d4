"""Run several ranks of torch.distributed, each in its own process.

The ranks are forks of a process that has imported torch and nvmeio, and has used neither,
because importing torch takes most of the time of a rank.
"""

import faulthandler
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from traceback import format_exception

import torch
import torch.distributed as dist

from children import WATCHDOG_S

__all__ = ["together"]

CONTEXT = multiprocessing.get_context("forkserver")
# torch imports the last one for its first distributed tensor.
# Until Python 3.13, the server does not find modules of the tests.
CONTEXT.set_forkserver_preload(
    ["nvmeio.torch.dcp", "torch.distributed.tensor", "torch._dynamo"]
)


def together(tmp_path, function, size, **options):
    """Run a function on several ranks; return the result of each."""
    rendezvous = tmp_path / f"rendezvous-{len(os.listdir(tmp_path))}"
    with ProcessPoolExecutor(size, CONTEXT) as ranks:
        started = [
            ranks.submit(run, function, rendezvous, rank, size, options)
            for rank in range(size)
        ]
        errors = [error for each in started if (error := each.exception())]
        assert not errors, "\n".join("".join(format_exception(each)) for each in errors)
        return [each.result() for each in started]


def run(function, rendezvous, rank, size, options):
    """Join the process group, and call the function."""
    # A rank that hangs prints where, and ends, which is an error for all of them.
    faulthandler.dump_traceback_later(WATCHDOG_S, exit=True)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size
    )
    # A rank that has connected and ends at once would break the connecting of others.
    dist.barrier()
    try:
        return function(**options)
    finally:
        dist.destroy_process_group()
