"""Train a model with accelerate, with checkpoints that appear whole or not at all.

    python examples/train_accelerate.py --folder run --steps 20
    torchrun --nproc-per-node 2 examples/train_accelerate.py --folder run --steps 20

After ``nvmeio.safetensors.install()``, accelerate writes and reads its model files through
nvmeio.  ``atomic_directory`` gives the folder of a checkpoint its name only when all of it
is on the device.  If you start the program again with the same folder, it continues from
the newest checkpoint, and the parameters end the same to the last bit.  It prints their
checksum.
"""

from __future__ import annotations

import argparse
import os
import re
import zlib
from contextlib import ExitStack
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

import nvmeio.safetensors
from nvmeio.checkpoint import atomic_directory

WIDTH, BATCH, EVERY = 128, 32, 5


def batch_of(step: int) -> torch.Tensor:
    """Return the data of a step, which only depends on its number."""
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))


def newest(folder: Path) -> int:
    """Return the newest step that was saved, or 0."""
    names = [path.name for path in folder.glob("step-*")]
    return max([0, *(int(name[5:]) for name in names if re.fullmatch(r"step-\d+", name))])


def save(accelerator: Accelerator, path: Path) -> None:
    """Save the state of all processes in one folder, which one of them makes."""
    with ExitStack() as stack:
        made = None
        if accelerator.is_main_process:
            made = stack.enter_context(atomic_directory(path))
        (folder,) = broadcast_object_list([made])
        accelerator.save_state(str(folder))
        # All have saved before the folder gets its name.
        accelerator.wait_for_everyone()


def main() -> None:
    """Train, save, and report the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--folder", type=Path, required=True, help="folder for the checkpoints"
    )
    parser.add_argument(
        "--steps", type=int, default=20, help="number of steps (default: 20)"
    )
    options = parser.parse_args()
    nvmeio.safetensors.install()
    torch.manual_seed(1)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, WIDTH)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)

    options.folder.mkdir(exist_ok=True)
    # One process chooses, because others may see other steps.
    (step,) = broadcast_object_list([newest(options.folder)])
    if step:
        accelerator.load_state(str(options.folder / f"step-{step}"))
    while step < options.steps:
        step += 1
        loss = (model(batch_of(step)) - 1).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step % EVERY == 0:
            save(accelerator, options.folder / f"step-{step}")
            accelerator.print(f"step {step}, loss {loss.item():.4f}", flush=True)

    checksum = 0
    for parameter in model.parameters():
        checksum = zlib.crc32(parameter.detach().numpy().tobytes(), checksum)
    accelerator.print(f"parameters {checksum:08x}", flush=True)
    accelerator.end_training()
    # A thread of gloo that takes the GIL while Python exits would abort the process.
    os._exit(0)


if __name__ == "__main__":
    main()
