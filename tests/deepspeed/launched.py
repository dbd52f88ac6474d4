"""A rank under DeepSpeed's launcher: reports which op it has, and uses it."""

import json
import os
import sys
from pathlib import Path

import deepspeed
import torch
from deepspeed.ops.aio import AsyncIOBuilder


def main(folder):
    """Write and read one file for this rank, and report it."""
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    rank = os.environ["RANK"]
    op = AsyncIOBuilder().load()
    handle = op.aio_handle()
    source, target = torch.full((100_001,), float(rank)), torch.empty(100_001)
    assert handle.sync_pwrite(source, f"{folder}/{rank}") == 1
    assert handle.sync_pread(target, f"{folder}/{rank}") == 1
    assert torch.equal(source, target)
    report = {
        "op": op.__name__,
        "ranks": deepspeed.comm.get_world_size(),
        "requests": handle.stats()["requests"],
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(report))
    deepspeed.comm.destroy_process_group()
    # A thread of gloo that takes the GIL while Python exits would abort the process.
    os._exit(0)


if __name__ == "__main__":
    # The launcher adds --local_rank.
    main(sys.argv[-1])
