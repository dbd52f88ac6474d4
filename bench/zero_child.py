"""A child process that trains with DeepSpeed's ZeRO-3, with its optimizer on the drive.

DeepSpeed compiles its op async_io when the child starts.  The child makes a step when
asked, and answers with the time and the bytes that it took.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

from comparisons import Sample, measured
from peers import Peers

__all__ = ["ZeroChild", "zero_child"]

# Marks the child's answers, because DeepSpeed prints other lines too.
MARK = "step took "
COUNT = 32


class ZeroChild:
    """The child process, which makes a step when asked."""

    def __init__(self, folder: Path, size: int) -> None:
        words = [sys.executable, __file__, str(folder), str(size)]
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "DS_ACCELERATOR": "cpu"},
        )
        # Wait until DeepSpeed has compiled its op, and allocated memory in the first step.
        self.step()

    def step(self) -> Sample:
        """Make the child take a step."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            print("step", file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith(MARK):
                return Sample(**json.loads(line.removeprefix(MARK)))
        raise RuntimeError("DeepSpeed's ZeRO-3 cannot train on this machine")

    def close(self) -> None:
        """End the child."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()


def zero_child(
    folder: Path, size: int, peers: Peers, stack: contextlib.ExitStack
) -> ZeroChild | None:
    """Start the child. Yields None if DeepSpeed is missing or cannot train here."""
    if peers.module("deepspeed") is None:
        return None
    try:
        child = ZeroChild(folder, size)
    except RuntimeError as error:
        peers.leave_out("DeepSpeed's ZeRO-3", str(error))
        return None
    stack.callback(child.close)
    return child


def main() -> None:
    """Run as the child, whose AdamW has the given size of states."""
    import deepspeed
    import torch

    folder, size = sys.argv[1], int(sys.argv[2])
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29611"}
    deepspeed.init_distributed("gloo")
    side = int((size / 8 / COUNT) ** 0.5) // 8 * 8
    layers = [torch.nn.Linear(side, side, bias=False) for _ in range(COUNT)]
    model = torch.nn.Sequential(*layers)
    # The fastest of the settings that were tried. With 8 buffers, it ran out of them;
    # without the pipeline, a step took 1.5 times as long.
    offload = {"device": "nvme", "nvme_path": folder, "buffer_count": 16}
    offload |= {"pin_memory": False, "pipeline_read": True, "pipeline_write": True}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        # The scale stays as it is: if numbers overflow, DeepSpeed skips the step.
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-12}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": offload,
            "sub_group_size": 2 * side * side,
        },
        "aio": {
            "block_size": 1 << 20,
            "queue_depth": 32,
            "single_submit": False,
            "overlap_events": True,
        },
    }
    engine, *_ = deepspeed.initialize(
        model=model, config=config, model_parameters=model.parameters()
    )
    for _ in sys.stdin:
        engine.backward(engine(torch.ones(1, side)).sum())
        sample = measured(lambda: (engine.step(), 2 * size)[1])
        print(MARK + json.dumps(vars(sample)), flush=True)


if __name__ == "__main__":
    main()
