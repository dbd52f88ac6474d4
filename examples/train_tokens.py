"""Trains a small model of characters on licences, straight from a file of tokens.

The text is what ships with Python and Debian.  Everything happens in a temporary folder
that is removed in the end.  The exit status is 0 only if the loss has fallen.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import BatchSampler, RandomSampler

import nvmeio
from nvmeio.torch import BatchStream, TokenDataset

BLOCK = 64
BATCH = 32
ROUNDS = 8


def read_text() -> str:
    """Return the licences of Python and, on Debian, of much else."""
    places = [
        Path(sysconfig.get_path("stdlib")) / "LICENSE.txt",
        *sorted(Path("/usr/share/common-licenses").glob("*")),
    ]
    found = [path for path in places if path.is_file() and not path.is_symlink()]
    if not found:
        raise FileNotFoundError(
            "neither Python's LICENSE.txt nor Debian's licences are here"
        )
    return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in found)


def write_tokens(path: Path, text: str) -> list[str]:
    """Write the text as numbers of characters; return the characters."""
    characters = sorted(set(text))
    numbers = {character: number for number, character in enumerate(characters)}
    tokens = np.fromiter((numbers[character] for character in text), np.uint16, len(text))
    nvmeio.save(path, tokens)
    return characters


class Model(torch.nn.Module):
    """Guesses each next character from those before it."""

    def __init__(self, vocabulary: int, width: int = 128) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(vocabulary, width)
        self.mix = torch.nn.GRU(width, width, batch_first=True)
        self.guess = torch.nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the scores of every character at every place."""
        states, _ = self.mix(self.embed(tokens))
        return self.guess(states)


@torch.no_grad()
def write_on(model: Model, start: list[int], count: int) -> list[int]:
    """Let the model continue a text."""
    tokens = list(start)
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        scores = model(torch.tensor([tokens[-BLOCK:]]))[0, -1]
        chances = torch.softmax(scores / 0.7, 0)
        tokens.append(int(torch.multinomial(chances, 1, generator=generator)))
    return tokens


def train(path: Path, characters: list[str], steps: int) -> bool:
    """Train for some steps, tell how it goes, and return whether the loss has fallen."""
    torch.manual_seed(0)
    model = Model(len(characters))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    dataset = TokenDataset(path, BLOCK)
    sampler = RandomSampler(dataset, num_samples=steps * BATCH)
    losses: list[float] = []
    waited, begin = 0.0, time.perf_counter()
    batches = iter(BatchStream(dataset, BatchSampler(sampler, BATCH, drop_last=True)))
    for step in range(1, steps + 1):
        asked = time.perf_counter()
        x, y = next(batches)
        waited += time.perf_counter() - asked
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % max(1, steps // ROUNDS) == 0:
            print(f"   step {step:5d}   loss {np.mean(losses[-10:]):.3f}", flush=True)
    took = time.perf_counter() - begin
    print(
        f"   {steps * BATCH / took:.0f} samples/s, {waited / took:.1%} of the time waiting"
    )
    start = [characters.index(character) for character in "The "]
    text = "".join(characters[token] for token in write_on(model, start, 80))
    print(f"   it writes: {text!r}")
    return float(np.mean(losses[-10:])) < float(np.mean(losses[:10]))


def main(arguments: list[str] | None = None) -> int:
    """Make the file, train, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400, help="how many (400)")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"--steps is {options.steps}; at least one is needed")
    with tempfile.TemporaryDirectory(prefix="nvmeio-tokens-", dir=".") as folder:
        path = Path(folder) / "tokens.npy"
        characters = write_tokens(path, read_text())
        with nvmeio.ArrayFile(path) as tokens:
            print(f"   {len(tokens)} tokens of {len(characters)} characters")
        fallen = train(path, characters, options.steps)
    print("the loss has fallen" if fallen else "THE LOSS HAS NOT FALLEN")
    return 0 if fallen else 1


if __name__ == "__main__":
    sys.exit(main())
