"""Show in one screen what nvmeio does: files at the drive's speed, a model, training.

All files are in a temporary folder, which is removed at the end, also after Ctrl-C.  The
exit status is 0 only if every byte came back, and training on disk gave the same numbers.
"""

import argparse
import functools
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

import nvmeio
import nvmeio.safetensors.torch
import nvmeio.torch
from nvmeio.checkpoint import Checkpointer

# The first warms up, and does not count.
ROUNDS = 4
STEPS = 20


def what_works(folder: Path) -> None:
    """Print what nvmeio can do on this machine and in this folder."""
    print(f"nvmeio {nvmeio.__version__}, numpy {np.__version__}, torch {torch.__version__}")
    print(f"Linux {platform.release()}, {len(os.sched_getaffinity(0))} processors")
    print("\n1. What works here")
    for name, engine in nvmeio.engines().items():
        print(f"   {name:<12}", "works" if engine["works"] else f"no: {engine['reason']}")
    with nvmeio.Handle() as handle:
        print("   in use      ", handle.stats()["engine"])
    with nvmeio.File(folder / "probe", "w") as file:
        how = "past the page cache" if file.direct else "through the page cache"
    df = subprocess.run(
        ["df", "--output=fstype", folder], stdout=subprocess.PIPE, text=True, check=True
    )
    print("   this folder ", f"{df.stdout.split()[-1]}, {how}")


def drive_read() -> int:
    """Return how many bytes the drive has delivered to this process so far."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def to_disk(path: Path) -> None:
    """Make a file durable, and drop it from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


class Timings:
    """Time calls that write or read `nbytes` in files, and print their speeds."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.seconds: dict[str, list[float]] = {}
        self.delivered: dict[str, int] = {}

    def write(self, name: str, path: Path, save: Callable[..., Any], array: Any) -> None:
        """Time a write to a new file, until the drive has it."""
        path.unlink(missing_ok=True)
        begin = time.perf_counter()
        save(path, array)
        to_disk(path)
        self.seconds.setdefault(name, []).append(time.perf_counter() - begin)

    def read(self, name: str, path: Path, load: Callable[[Path], Any]) -> Any:
        """Time a read of a file that is not in the page cache, and return its content."""
        to_disk(path)
        begin, before = time.perf_counter(), drive_read()
        found = load(path)
        self.seconds.setdefault(name, []).append(time.perf_counter() - begin)
        self.delivered[name] = drive_read() - before
        return found

    def show(self) -> None:
        """Print the median speed of each call, with the slowest and the fastest."""
        for name in sorted(self.seconds, key=lambda name: not name.startswith("nvmeio")):
            speeds = [self.nbytes / seconds / 1e9 for seconds in self.seconds[name][1:]]
            spread = f"[{min(speeds):.2f}-{max(speeds):.2f}]"
            line = f"   {name:<34} {statistics.median(speeds):5.2f} GB/s {spread}"
            if name in self.delivered:
                line += f", {self.delivered[name] / self.nbytes:.0%} from the drive"
            print(line)


def same(found: Any, expected: Any) -> bool:
    """Return whether two arrays or tensors have the same bits: NaN equals itself."""
    found, expected = (np.asarray(each).reshape(-1) for each in (found, expected))
    return np.array_equal(found.view(np.uint8), expected.view(np.uint8))


def all_same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    """Return whether two models have the same names and bits."""
    return found.keys() == expected.keys() and all(
        same(found[name], expected[name]) for name in expected
    )


def verdict(good: bool, words: str) -> bool:
    """Print whether a comparison succeeded, and return that."""
    print("   " + (words if good else f"NOT SO: {words}"))
    return good


def round_trip(folder: Path, nbytes: int) -> bool:
    """Write an array to a file and read it back. Each side reads the other's file."""
    print(
        f"\n2. {nbytes / 1e6:.0f} MB to a new, durable file, and back uncached: "
        "median [slowest-fastest]"
    )
    array = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    path = folder / "array.npy"
    timings, good = Timings(nbytes), True
    for _ in range(ROUNDS):
        timings.write("nvmeio.save", path, nvmeio.save, array)
        good &= same(timings.read("numpy.load", path, np.load), array)
        timings.write("numpy.save", path, np.save, array)
        good &= same(timings.read("nvmeio.load", path, nvmeio.load), array)
    timings.show()
    return verdict(good, "every byte came back")


def load_a_model(folder: Path, nbytes: int) -> bool:
    """Load the weights of a made model from the formats of safetensors and of torch."""
    print(f"\n3. A model of {nbytes / 1e6:.0f} MB in 48 tensors, loaded from its file")
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"layers.{number}.weight": torch.randn(nbytes // 192, generator=generator)
        for number in range(48)
    }
    ours, theirs = folder / "model.safetensors", folder / "model.pt"
    nvmeio.safetensors.torch.save_file(weights, ours)
    torch.save(weights, theirs)
    load_file = nvmeio.safetensors.torch.load_file
    timings, good = Timings(sum(each.nbytes for each in weights.values())), True
    for _ in range(ROUNDS):
        name = "nvmeio.safetensors.torch.load_file"
        good &= all_same(timings.read(name, ours, load_file), weights)
        good &= all_same(timings.read("torch.load", theirs, torch.load), weights)
    timings.show()
    return verdict(good, "every tensor came back")


def new_training() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Make a model and its optimizer, which are the same each time."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024)
    )
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> float:
    """Train on data made from the number of the step, and return the last loss."""
    for step in steps:
        inputs = torch.randn(16, 256, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = (model(inputs) - inputs.repeat(1, 4).sin()).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item()


def training(folder: Path) -> bool:
    """Train in memory; and on disk, stopped half way and continued from a checkpoint."""
    print("\n4. Training with AdamW's states on disk, stopped and continued")
    # With two threads on a busy machine, the first steps of torch in a process sometimes
    # differ in the last bits, also without nvmeio (torch 2.13.0, 2026-11-22).
    torch.set_num_threads(1)
    expected, optimizer = new_training()
    print(f"   in memory     {STEPS} steps, loss", train(expected, optimizer, range(STEPS)))

    half = STEPS // 2
    offload = functools.partial(nvmeio.torch.offload, folder=folder / "states")
    with Checkpointer(folder / "run") as checkpointer:
        model, optimizer = new_training()
        with offload(optimizer) as on_disk:
            loss = train(model, on_disk, range(half))
            state = {"model": model.state_dict(), "optimizer": on_disk.state_items()}
            checkpointer.save(half, state)
            size = f"{on_disk.nbytes / 1e6:.0f} MB of states"
        print(f"   on disk       {half} steps, loss {loss}, {size}")

        model, optimizer = new_training()
        found = checkpointer.restore()
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        with offload(optimizer) as on_disk:
            loss = train(model, on_disk, range(half, STEPS))
        print(f"   continued     {STEPS} steps, loss {loss}")
    return verdict(
        all_same(model.state_dict(), expected.state_dict()),
        "the parameters are the same, to the last bit",
    )


def main(arguments: list[str] | None = None) -> int:
    """Run all parts in a temporary folder, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    words = "folder in which to make the temporary folder (the current one)"
    parser.add_argument("folder", type=Path, nargs="?", default=Path(), help=words)
    words = "megabytes of the array and of the model (128)"
    parser.add_argument("--size", type=int, metavar="MB", default=128, help=words)
    options = parser.parse_args(arguments)
    nbytes = options.size * 1_000_000
    # `kill`, too, removes the folder.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="nvmeio-demo-", dir=options.folder) as made:
        folder = Path(made)
        what_works(folder)
        good = round_trip(folder, nbytes)
        good &= load_a_model(folder, nbytes)
        good &= training(folder)
    print("\nAll is well." if good else "\nSOMETHING IS WRONG; see above.")
    return 0 if good else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
