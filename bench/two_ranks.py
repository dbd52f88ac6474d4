"""Rows of torch.distributed.checkpoint: two ranks save and load, by nvmeio and by torch.

Run as a program, this is one of the ranks, which carries out commands.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from comparisons import Comparison, Goal, Sample, device_bytes

__all__ = ["rank_comparisons"]

RANKS = 2
# At two ranks, each part of a row is 16 KiB.
COLUMNS = 8192
ROWS = 2048
TENSOR_BYTES = ROWS * COLUMNS * 4
SAVES = (
    ("nvmeio, durable", "torch, sync_files=False", {"sync_files": False}, 1.0),
    ("nvmeio, durable", "torch, sync_files=True", {"sync_files": True}, 1.0),
)


class Ranks:
    """Two processes that form one group."""

    def __init__(self, folder: Path, size: int) -> None:
        count = max(1, size // TENSOR_BYTES)
        self.nbytes = count * TENSOR_BYTES
        words = [sys.executable, __file__, str(folder / "rendezvous"), str(count)]
        self._processes = [
            subprocess.Popen(
                [*words, str(rank)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]

    def run(self, nbytes: int, **job: Any) -> Sample:
        """Run a command in all ranks. Return the slowest time, and sums of the rest."""
        for process in self._processes:
            assert process.stdin is not None
            print(json.dumps(job), file=process.stdin, flush=True)
        answers = []
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"a rank ended during {job}")
            answers.append(json.loads(line))
        seconds = max(answer["seconds"] for answer in answers)
        cpu = sum(answer["cpu"] for answer in answers)
        return Sample(nbytes, seconds, cpu, sum(answer["device"] for answer in answers))

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            process.wait()


def rank_comparisons(
    folder: Path, size: int, stack: contextlib.ExitStack
) -> Iterator[Comparison]:
    """Compare nvmeio's writer and reader with torch's, at two ranks over gloo."""
    ranks = Ranks(folder, size)
    stack.callback(ranks.close)
    whole = ranks.nbytes
    for number, (ours, theirs, options, limit) in enumerate(SAVES):
        turns = tuple(
            lambda by=by, used=used, name=f"{by}-{number}": ranks.run(
                whole, do="save", by=by, folder=str(folder / name), options=used
            )
            for by, used in (("nvmeio", {}), ("torch", options))
        )
        goals = (Goal("speed", limit),)
        yield Comparison("save from 2 ranks", (ours, theirs), turns, False, goals)
    kept = str(folder / "kept")
    ranks.run(whole, do="save", by="torch", folder=kept, options={})
    for work, dim, limit in (
        ("load to 2 ranks", 0, 1.5),
        ("load to 2 ranks, of each tensor the other half", 1, 1.8),
    ):
        turns = tuple(
            lambda by=by, dim=dim: ranks.run(whole, do="load", by=by, folder=kept, dim=dim)
            for by in ("nvmeio", "torch")
        )
        goals = (Goal("speed", limit),)
        yield Comparison(work, ("nvmeio", "torch"), turns, True, goals)


def main() -> None:
    """Run as a rank: carry out the commands of stdin, and report how long they took."""
    import torch
    import torch.distributed as dist
    from torch.distributed import checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from nvmeio._cli.measuring import forget_cached
    from nvmeio.torch import dcp as ours

    warnings.simplefilter("ignore")
    rendezvous, count, rank = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS
    )
    mesh = init_device_mesh("cpu", (RANKS,))
    kinds = {
        "save": {"nvmeio": ours.FileSystemWriter, "torch": dcp.FileSystemWriter},
        "load": {"nvmeio": ours.FileSystemReader, "torch": dcp.FileSystemReader},
    }

    def state_of(dim: int) -> dict[str, DTensor]:
        shape = [ROWS, COLUMNS]
        shape[dim] //= RANKS
        return {
            f"layer {number}": DTensor.from_local(
                torch.full(shape, float(number)), mesh, [Shard(dim)]
            )
            for number in range(count)
        }

    states = {dim: state_of(dim) for dim in (0, 1)}

    def carry_out(job: dict[str, Any]) -> None:
        kind = kinds[job["do"]][job["by"]]
        if job["do"] == "save":
            writer = kind(job["folder"], **job["options"])
            dcp.save(dict(states[0]), storage_writer=writer)
        else:
            dcp.load(dict(states[job["dim"]]), storage_reader=kind(job["folder"]))

    for line in sys.stdin:
        job = json.loads(line)
        folder = Path(job["folder"])
        dist.barrier()
        if job["do"] == "load":
            for tensor in states[job["dim"]].values():
                tensor.to_local().zero_()
            if rank == 0:
                for path in folder.iterdir():
                    forget_cached(path)
        elif rank == 0:
            # Each turn begins without the files.
            shutil.rmtree(folder, ignore_errors=True)
        dist.barrier()
        device, cpu, begin = device_bytes(), time.process_time(), time.perf_counter()
        carry_out(job)
        seconds = time.perf_counter() - begin
        cpu, device = time.process_time() - cpu, device_bytes() - device
        if job["do"] == "load":
            for number, tensor in enumerate(states[job["dim"]].values()):
                if not bool((tensor.to_local() == number).all()):
                    raise RuntimeError(f"{job} returned wrong numbers")
        answer = {"seconds": seconds, "cpu": cpu, "device": device}
        print(json.dumps(answer), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
