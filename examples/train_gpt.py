"""Train a small GPT on several ranks, kill one of them, and continue where it was.

    python examples/train_gpt.py

The text is the licences that come with Python and Debian, as shards of tokens in the format
of llm.c.  Two ranks train under torchrun: once without an interruption, and once until
SIGKILL ends one of them in the middle of an epoch.  Started again, they continue from the
last checkpoint with the next batch.  Every loss must be the same to the last digit.  All
files are in a temporary folder, which is removed at the end.  The exit status is 0 only if
the losses are the same and have fallen.

To train on your own data, start the program under torchrun, and again after a crash:

    torchrun --nproc-per-node 2 examples/train_gpt.py --folder run --tokens shards
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler
from torch.utils.data.distributed import DistributedSampler

from nvmeio.checkpoint import Checkpointer
from nvmeio.torch import BatchStream, TokenDataset

VOCABULARY, BLOCK, WIDTH, HEADS, LAYERS = 256, 64, 64, 4, 2
BATCH, EVERY, LEAST = 16, 10, 20
SHARD_TOKENS, SHARDS = 16_000, 3


class Layer(torch.nn.Module):
    """Attention to the tokens before each token, then a small network."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(WIDTH) for _ in range(2))
        self.look = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.merge = torch.nn.Linear(WIDTH, WIDTH)
        self.think = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 4 * WIDTH),
            torch.nn.GELU(),
            torch.nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return the states after one layer."""
        batch, length, _ = states.shape
        parts = self.look(self.norms[0](states)).view(batch, length, 3 * HEADS, -1)
        query, key, value = parts.transpose(1, 2).chunk(3, 1)
        seen = scaled_dot_product_attention(query, key, value, is_causal=True)
        states = states + self.merge(seen.transpose(1, 2).flatten(2))
        return states + self.think(self.norms[1](states))


class GPT(torch.nn.Module):
    """Predicts each token from the tokens before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.place = torch.nn.Parameter(torch.zeros(BLOCK, WIDTH))
        self.layers = torch.nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.guess = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the scores of every token at every position."""
        return self.guess(self.norm(self.layers(self.embed(tokens) + self.place)))


def train(shards: Path, folder: Path, steps: int, kill: int) -> None:
    """Train as one rank, starting from the newest checkpoint."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    windows = TokenDataset(sorted(shards.glob("*.bin")), BLOCK)
    sampler = DistributedSampler(windows, ranks, rank, seed=0)
    stream = BatchStream(windows, BatchSampler(sampler, BATCH, drop_last=True))

    # All ranks have the same state, so rank 0 saves it and all of them read it.
    checkpointer = Checkpointer(folder / "checkpoints", keep=2)
    epoch = step = 0
    try:
        state = checkpointer.restore()
    except FileNotFoundError:
        pass  # The first start.  If there are only damaged steps, the error is another one.
    else:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        stream.load_state_dict(state["stream"])
        epoch, step = state["epoch"], state["step"]

    # This waits for the other ranks, so no checkpoint appears before all have looked.
    parallel = DistributedDataParallel(model)
    resumed = step
    while step < steps:
        sampler.set_epoch(epoch)
        for x, y in stream:
            optimizer.zero_grad()
            loss = cross_entropy(parallel(x).flatten(0, 1), y.flatten())
            loss.backward()
            optimizer.step()
            step += 1
            mean = loss.detach() / ranks
            dist.all_reduce(mean)
            if rank == 0:
                line = {"resumed": resumed, "step": step, "loss": mean.item()}
                with open(folder / "losses", "a", encoding="ascii") as log:
                    print(json.dumps(line), file=log)
                if step % EVERY == 0:
                    print(f"step {step}, epoch {epoch}, loss {mean.item():.3f}", flush=True)
                    state = {
                        "model": model.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "stream": stream.state_dict(),
                        "epoch": epoch,
                        "step": step,
                    }
                    checkpointer.save(step, state)
            if step == kill and not resumed and rank == ranks - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if step == steps:
                break
        else:
            epoch += 1
    checkpointer.close()
    dist.destroy_process_group()
    # A thread of gloo that takes the GIL while Python exits would abort the process.
    sys.stdout.flush()
    os._exit(0)


# The rest makes shards of text, starts torchrun, and compares the losses.


@dataclass
class Run:
    """The log of a training: the loss of each step, and where it was resumed."""

    losses: dict[int, float]
    resumed: int
    repeated: bool  # whether steps that were run twice had the same loss


def read_text() -> bytes:
    """Return the licences of Python and, on Debian, of other packages."""
    places = [
        Path(sysconfig.get_path("stdlib")) / "LICENSE.txt",
        *sorted(Path("/usr/share/common-licenses").glob("*")),
    ]
    found = [path for path in places if path.is_file() and not path.is_symlink()]
    if not found:
        raise FileNotFoundError(
            "neither Python's LICENSE.txt nor Debian's licences are here"
        )
    return b"\n".join(path.read_bytes() for path in found)


def write_shards(folder: Path, text: bytes) -> int:
    """Write shards in the format of llm.c, one token per byte. Return how many tokens."""
    tokens = np.frombuffer(text, np.uint8).astype(np.uint16)[: SHARDS * SHARD_TOKENS]
    folder.mkdir()
    for number, shard in enumerate(np.array_split(tokens, SHARDS)):
        header = np.zeros(256, np.int32)
        header[:3] = 20240520, 1, len(shard)
        (folder / f"shard_{number}.bin").write_bytes(header.tobytes() + shard.tobytes())
    return len(tokens)


def start(shards: Path, folder: Path, steps: int, kill: int) -> Run:
    """Train under torchrun, again if a rank was killed, and return the log."""
    folder.mkdir()
    words = ["--standalone", "--nproc-per-node=2", f"--log-dir={folder}/logs", __file__]
    options = {"tokens": shards, "folder": folder, "steps": steps, "kill": kill}
    words += [f"--{name}={value}" for name, value in options.items()]
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", *words],
            # One thread per rank, because several may add numbers in any order.
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 0:
            return read_log(folder / "losses")
        if not kill or "Signal 9 (SIGKILL)" not in done.stderr:
            break
    raise ChildProcessError(f"torchrun ended with {done.returncode}:\n{done.stderr}")


def read_log(path: Path) -> Run:
    """Read the log of a training."""
    run = Run({}, 0, True)
    for line in path.read_text(encoding="ascii").splitlines():
        found = json.loads(line)
        step, loss = found["step"], found["loss"]
        run.repeated &= run.losses.setdefault(step, loss) == loss
        run.resumed = found["resumed"]
    return run


def judge(whole: Run, killed: Run, steps: int) -> bool:
    """Report the result, and return whether it is right."""
    for name, run in (("without interruption", whole), ("killed and resumed", killed)):
        first, last = run.losses.get(1, 0), run.losses.get(steps, 0)
        print(f"   {name}   {len(run.losses)} steps, loss {first:.3f} to {last:.3f}")
    if not killed.resumed:
        print("IT WAS NOT RESUMED")
        return False
    if whole.losses != killed.losses or not killed.repeated or len(whole.losses) != steps:
        print(f"THE LOSSES ARE DIFFERENT after it was resumed from step {killed.resumed}")
        return False
    if not whole.losses[steps] < whole.losses[1]:
        print("THE LOSS HAS NOT FALLEN")
        return False
    print(f"   resumed from step {killed.resumed}, with the same losses to the last digit")
    return True


def main(arguments: list[str] | None = None) -> int:
    """Train as a rank of torchrun, or start torchrun and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="number of steps (60)")
    parser.add_argument(
        "--folder", type=Path, help="folder of the run; needed under torchrun"
    )
    parser.add_argument(
        "--tokens", type=Path, help="folder of the shards; needed under torchrun"
    )
    parser.add_argument("--kill", type=int, default=0, help="kill a rank after this step")
    options = parser.parse_args(arguments)
    if options.steps < LEAST:
        parser.error(f"--steps is {options.steps}; at least {LEAST} are needed")
    if "RANK" in os.environ:
        if options.folder is None or options.tokens is None:
            parser.error("under torchrun, --folder and --tokens are needed")
        options.folder.mkdir(exist_ok=True)
        train(options.tokens, options.folder, options.steps, options.kill)
        return 0
    with tempfile.TemporaryDirectory(prefix="nvmeio-gpt-", dir=".") as name:
        folder = Path(name).resolve()
        count = write_shards(folder / "shards", read_text())
        print(f"   {count} tokens in {SHARDS} shards, for 2 ranks", flush=True)
        # In the middle of an epoch, and between two checkpoints.
        kill = options.steps // 2 // EVERY * EVERY + EVERY // 3
        runs = [
            start(folder / "shards", folder / name, options.steps, step)
            for name, step in (("whole", 0), ("killed", kill))
        ]
        return 0 if judge(*runs, options.steps) else 1


if __name__ == "__main__":
    sys.exit(main())
