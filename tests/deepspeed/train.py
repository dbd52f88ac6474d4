"""Train a small model by ZeRO-3 for a test; the last line printed is the report.

Only the report knows of nvmeio; the environment switches nvmeio on.
"""

import hashlib
import json
import os
import sys

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param

WIDTH = 512


def optimizer_of(name, model):
    """Return the arguments of deepspeed.initialize() and the keys of its configuration."""
    if name == "DeepSpeedCPUAdam":
        parameters = {"type": "Adam", "params": {"lr": 0.01}}
        return {"model_parameters": model.parameters()}, {"optimizer": parameters}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return {"optimizer": optimizer}, {"zero_force_ds_cpu_optimizer": False}


def engine_of(offload, dtype, optimizer):
    """Make a model of more than 4 MiB, and the engine that trains it.

    Its parameters form three groups of the optimizer, two of which are swapped.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 2 * WIDTH),
        torch.nn.ReLU(),
        torch.nn.Linear(2 * WIDTH, WIDTH),
    )
    arguments, keys = optimizer_of(optimizer, model)
    config = {
        "train_batch_size": 8,
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 2 * WIDTH * WIDTH,
            # Release parameters right after their use.
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 0,
            **offload,
        },
        "aio": {"block_size": 65536, "queue_depth": 8, "intra_op_parallelism": 2},
        "bf16": {"enabled": dtype == torch.bfloat16},
        **keys,
    }
    return deepspeed.initialize(model=model, config=config, **arguments)[0]


def train(engine, dtype, steps):
    """Take steps on random numbers, and return the losses."""
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        inputs, targets = (torch.randn(8, WIDTH, dtype=dtype) for _ in range(2))
        loss = torch.nn.functional.mse_loss(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def bytes_through(owner, *names):
    """Return how many bytes went through each handle of an object."""
    found = {}
    for name in names:
        if handle := getattr(owner, name, None):
            stats = handle.stats()
            ways = ("direct", "buffered", "bounced")
            found[name] = sum(stats[f"bytes_{way}"] for way in ways)
    return found


def main(offload, dtype, optimizer, steps):
    """Train, and report losses, bytes through each handle, and digests of parameters."""
    # With more threads, torch's first steps sometimes differ in a bit between runs.
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    dtype = getattr(torch, dtype)
    engine = engine_of(offload, dtype, optimizer)
    losses = train(engine, dtype, steps)
    states = getattr(engine.optimizer, "optimizer_swapper", None)
    swapper = getattr(next(engine.parameters()), "nvme_swapper", None)
    report = {
        "losses": losses,
        "states": bytes_through(states, "aio_handle", "read_aio_handle"),
        "parameters": bytes_through(swapper, "aio_read_handle", "aio_write_handle"),
    }
    values = [safe_get_full_fp32_param(parameter) for parameter in engine.parameters()]
    report["digests"] = [hashlib.sha256(v.numpy().tobytes()).hexdigest() for v in values]
    sys.stdout.write("\n" + json.dumps(report) + "\n")
    deepspeed.comm.destroy_process_group()
    # A thread of gloo that takes the GIL while Python exits would abort the process.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
