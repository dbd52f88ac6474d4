"""Train a model in shards on several ranks, and continue where it was killed.

    torchrun --nproc-per-node 2 examples/train_fsdp.py --folder run --steps 40

Every few steps, each rank saves its part of the model and of the optimizer in the
background.  If you start the program again with the same folder, it continues from the
newest checkpoint, even with another number of ranks.  With the same number of ranks, the
parameters end the same to the last bit as without an interruption.  The program prints
their checksum.
"""

from __future__ import annotations

import argparse
import os
import re
import zlib
from concurrent.futures import Future
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from nvmeio.torch.dcp import FileSystemReader, FileSystemWriter, PoolStager

WIDTH, BATCH, EVERY = 256, 32, 5


def new_model() -> torch.nn.Module:
    """Return a model whose parameters are sharded over all ranks."""
    torch.manual_seed(1)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    model = torch.nn.Sequential(
        *(part for each in layers for part in (each, torch.nn.GELU()))
    )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def batch_of(step: int) -> torch.Tensor:
    """Return this rank's data of a step, which only depends on the step's number."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(BATCH, WIDTH, generator=generator)


def newest(folder: Path) -> int:
    """Return the newest step that was saved, or 0."""
    found = [0]
    for path in folder.glob("step-*/.metadata"):
        if name := re.fullmatch(r"step-(\d+)", path.parent.name):
            found.append(int(name[1]))
    return max(found)


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Return the state to save and load."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


def main() -> None:
    """Train, save, and report the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--folder", type=Path, required=True, help="folder for the checkpoints"
    )
    parser.add_argument(
        "--steps", type=int, default=40, help="number of steps (default: 40)"
    )
    options = parser.parse_args()
    dist.init_process_group("gloo")
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    # Rank 0 chooses, because other ranks may see other steps.
    chosen = [newest(options.folder) if dist.get_rank() == 0 else 0]
    dist.broadcast_object_list(chosen, src=0)
    (step,) = chosen
    if step:
        state = state_of(model, optimizer)
        reader = FileSystemReader(options.folder / f"step-{step}")
        dcp.load(state, storage_reader=reader)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    # A separate group keeps the messages of the two threads apart.
    group = dist.new_group()
    stager, saving = PoolStager(), None
    while step < options.steps:
        step += 1
        loss = (model(batch_of(step)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % EVERY == 0:
            if saving is not None:
                saving.result()
            folder = options.folder / f"step-{step}"
            saving = dcp.async_save(
                state_of(model, optimizer),
                storage_writer=FileSystemWriter(folder),
                async_stager=stager,
                process_group=group,
            )
            assert isinstance(saving, Future)
            if dist.get_rank() == 0:
                print(f"step {step}, loss {loss.item():.4f}", flush=True)
    if saving is not None:
        saving.result()

    whole = [parameter.full_tensor() for parameter in model.parameters()]
    if dist.get_rank() == 0:
        checksum = 0
        for tensor in whole:
            checksum = zlib.crc32(tensor.detach().numpy().tobytes(), checksum)
        print(f"parameters {checksum:08x}", flush=True)
    dist.destroy_process_group()
    # A thread of gloo that takes the GIL while Python exits would abort the process.
    os._exit(0)


if __name__ == "__main__":
    main()
