"""Show what nvmeio does: the machine, a round trip of tensors, training off the disk.

All files are in a temporary folder, which is removed at the end, also after Ctrl-C.  The
exit status is 0 only if every byte came back unchanged.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits

import nvmeio

MIB = 1 << 20
ROUNDS = 3
EPOCHS = 4
BATCH = 64

# Dtypes of the tensors, and their shares of the bytes. The last tensor gets the rest.
SHARES = (
    (torch.float32, 0.41),
    (torch.bfloat16, 0.23),
    (torch.float64, 0.17),
    (torch.int64, 0.001),
    (torch.uint8, 0),
)


def line(name: str, words: str) -> None:
    """Print one line of results."""
    print(f"   {name:<20} {words}", flush=True)


def show_machine(folder: Path) -> None:
    """Print what nvmeio can do on this machine and in this folder."""
    print("\n1. What this machine can do")
    models = [
        text.partition(":")[2].strip()
        for text in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if text.startswith("model name")
    ]
    model = models[0] if models else platform.machine()
    line("CPU", f"{len(os.sched_getaffinity(0))} x {model}, Linux {platform.release()}")
    for name, found in nvmeio.engines().items():
        line(f"engine {name}", "works" if found["works"] else f"no: {found['reason']}")
    with nvmeio.Handle() as handle:
        line("chosen", handle.stats()["engine"])
    with nvmeio.File(folder / "probe", "w") as file:
        how = f"O_DIRECT in units of {file.alignment} bytes"
        if not file.direct:
            how = "no O_DIRECT, so through the page cache"
    (folder / "probe").unlink()
    kind = subprocess.run(
        ["df", "--output=fstype", folder], stdout=subprocess.PIPE, text=True, check=True
    )
    line("this folder", f"{kind.stdout.split()[-1]}, {how}")
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = limit == resource.RLIM_INFINITY
    line("locked memory", "unlimited" if unlimited else f"up to {limit // 1024} KiB")


def make_tensors(size: int) -> list[torch.Tensor]:
    """Make ordinary tensors of odd sizes and several dtypes, with `size` bytes in total."""
    generator = torch.Generator().manual_seed(0)
    tensors = []
    left = size
    for dtype, share in SHARES:
        nbytes = int(size * share) // dtype.itemsize * dtype.itemsize or left
        noise = torch.empty(nbytes // dtype.itemsize, dtype=dtype)
        as_bytes(noise).random_(0, 256, generator=generator)
        tensors.append(noise)
        left -= nbytes
    return tensors


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as bytes, so that NaN equals itself."""
    return tensor.view(-1).view(torch.uint8)


def write_with_nvmeio(path: Path, tensors: list[torch.Tensor]) -> None:
    """Write tensors one after the other, and make the file durable."""
    offset = 0
    with (
        nvmeio.Handle() as handle,
        nvmeio.File(path, "w") as file,
    ):
        requests = []
        for tensor in tensors:
            requests.append(handle.submit_write(tensor, file, offset))
            offset += tensor.nbytes
        for request in requests:
            request.wait()
        handle.fsync(file)


def read_with_nvmeio(path: Path, into: list[torch.Tensor]) -> list[torch.Tensor]:
    """Read tensors that are stored one after the other."""
    offset = 0
    with nvmeio.Handle() as handle, nvmeio.File(path) as file:
        requests = []
        for tensor in into:
            requests.append(handle.submit_read(tensor, file, offset))
            offset += tensor.nbytes
        for request in requests:
            request.wait()
    return into


def write_with_numpy(path: Path, tensors: list[torch.Tensor]) -> None:
    """Write tensors one after the other, and make the file durable."""
    with open(path, "wb") as file:
        for tensor in tensors:
            as_bytes(tensor).numpy().tofile(file)
        file.flush()
        os.fsync(file.fileno())


def read_with_numpy(path: Path, like: list[torch.Tensor]) -> list[torch.Tensor]:
    """Read tensors that are stored one after the other, into new memory."""
    with open(path, "rb") as file:
        arrays = [np.fromfile(file, np.uint8, tensor.nbytes) for tensor in like]
    return [
        torch.from_numpy(array).view(tensor.dtype)
        for array, tensor in zip(arrays, like, strict=True)
    ]


def forget(path: Path) -> None:
    """Make a file durable, and drop it from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def delivered_bytes() -> int:
    """Return how many bytes the device has delivered to this process."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return int(dict(text.split(": ") for text in lines)["read_bytes"])


@dataclasses.dataclass
class Side:
    """One way to write and read tensors, and its figures.

    Attributes
    ----------
    name : str
        Its name in the output.
    write, read : callable
        Functions of the file and the tensors.  `read` returns the tensors that it filled.
    write_seconds, read_seconds : list of float
        How long each round took.
    delivered : list of int
        How many bytes the device delivered to each read.
    """

    name: str
    write: Callable[[Path, list[torch.Tensor]], None]
    read: Callable[[Path, list[torch.Tensor]], list[torch.Tensor]]
    write_seconds: list[float] = dataclasses.field(default_factory=list)
    read_seconds: list[float] = dataclasses.field(default_factory=list)
    delivered: list[int] = dataclasses.field(default_factory=list)

    def timed_write(self, path: Path, tensors: list[torch.Tensor]) -> None:
        """Write, and record the time."""
        begin = time.perf_counter()
        self.write(path, tensors)
        self.write_seconds.append(time.perf_counter() - begin)

    def timed_read(self, path: Path, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Read, and record the time and the bytes that the device delivered."""
        device = delivered_bytes()
        begin = time.perf_counter()
        found = self.read(path, tensors)
        self.read_seconds.append(time.perf_counter() - begin)
        self.delivered.append(delivered_bytes() - device)
        return found

    def show(self, size: int) -> None:
        """Print the speeds."""
        line(f"{self.name} writes", speeds(size, self.write_seconds))
        device = f"; the device delivered {min(self.delivered)} bytes or more"
        line(f"{self.name} reads", speeds(size, self.read_seconds) + device)


def speeds(size: int, seconds: list[float]) -> str:
    """Format the median, minimum and maximum of the speeds."""
    median, low, high = (
        size / value / 1e9
        for value in (statistics.median(seconds), max(seconds), min(seconds))
    )
    return f"{median:5.2f} GB/s [{low:.2f}-{high:.2f}]"


def equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    """Return whether tensors have the same bits."""
    return len(found) == len(expected) and all(
        torch.equal(as_bytes(one), as_bytes(other))
        for one, other in zip(found, expected, strict=True)
    )


def round_trip(folder: Path, size: int) -> bool:
    """Write tensors to disk and read them back. Each side reads what the other wrote."""
    print(f"\n2. A round trip of {size} bytes in ordinary torch tensors")
    tensors = make_tensors(size)
    for tensor in tensors:
        line(str(tensor.dtype), f"{tensor.numel()} elements")
    into = [torch.zeros_like(tensor) for tensor in tensors]
    ours = Side("nvmeio", write_with_nvmeio, read_with_nvmeio)
    numpys = Side("numpy", write_with_numpy, read_with_numpy)
    path = folder / "tensors"
    verified = True
    for _ in range(ROUNDS):
        for writer, reader in ((numpys, ours), (ours, numpys)):
            path.unlink(missing_ok=True)
            writer.timed_write(path, tensors)
            forget(path)
            for tensor in into:
                as_bytes(tensor).zero_()
            verified &= equal(reader.timed_read(path, into), tensors)
    path.unlink()
    ours.show(size)
    numpys.show(size)
    line("method", f"median [minimum-maximum] of {ROUNDS}; new files, fsync included;")
    line("", "reads with a cold page cache; fromfile makes new arrays, nvmeio fills")
    line("", "tensors whose memory has been used; each side reads what the other wrote")
    line("verified", "every byte came back" if verified else "NO: bytes differ")
    return verified


class SwappedState:
    """The state of an optimizer, on disk between its steps, as in DeepSpeed's swapper.

    Its tensors become views of locked memory.  Before a step, that memory is read from the
    files; after it, it is written to the files and overwritten.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        self.handle = nvmeio.aio_handle()
        self.swapped: list[tuple[torch.Tensor, str]] = []
        self.nbytes = 0
        places = [
            (state, name)
            for state in optimizer.state.values()
            for name, value in state.items()
            if value.ndim > 0
        ]
        example = places[0][0][places[0][1]]
        count = sum(state[name].numel() for state, name in places)
        self.memory = self.handle.new_cpu_locked_tensor(count, example)
        begin = 0
        for number, (state, name) in enumerate(places):
            view = self.memory[begin : begin + state[name].numel()]
            begin += view.numel()
            state[name] = view.view_as(state[name]).copy_(state[name])
            self.swapped.append((view, str(folder / f"state-{number}")))

    def swap_out(self) -> None:
        """Write the state and overwrite its memory, so that only the disk has it."""
        for view, path in self.swapped:
            self.handle.async_pwrite(view, path)
        self.finish()
        self.memory.fill_(torch.nan)

    def swap_in(self) -> None:
        """Read the state back."""
        for view, path in self.swapped:
            self.handle.async_pread(view, path)
        self.finish()

    def finish(self) -> None:
        """Wait for the requests in flight, and count their bytes."""
        if self.handle.wait() != len(self.swapped):
            raise RuntimeError("not every transfer of the state is done")
        self.nbytes += self.memory.nbytes

    def close(self) -> None:
        """Free the memory and end the workers."""
        self.handle.free_cpu_locked_tensor(self.memory)
        self.handle.close()


@dataclasses.dataclass
class Trained:
    """The result of training.

    Attributes
    ----------
    parameters : list of torch.Tensor
        The parameters of the model.
    steps : int
        The number of steps.
    accuracy : float
        The share of right answers for digits that were not trained on, from 0 to 1.
    swapped : int
        The bytes of state that were written and read, together.
    """

    parameters: list[torch.Tensor]
    steps: int
    accuracy: float
    swapped: int


def train(folder: Path | None) -> Trained:
    """Train a classifier of digits. With a folder, Adam's state is there between steps."""
    images, labels = load_digits(return_X_y=True)
    inputs = torch.from_numpy(images / 16).float()
    targets = torch.from_numpy(labels)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(inputs), generator=generator)
    known, held_out = order[:-300], order[-300:]
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 129), torch.nn.ReLU(), torch.nn.Linear(129, 10)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    state: SwappedState | None = None
    steps = 0
    for _ in range(EPOCHS):
        for batch in known[torch.randperm(len(known), generator=generator)].split(BATCH):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(
                model(inputs[batch]), targets[batch]
            ).backward()
            if state is not None:
                state.swap_in()
            optimizer.step()
            steps += 1
            if folder is not None:
                state = state or SwappedState(optimizer, folder)
                state.swap_out()
    right = model(inputs[held_out]).argmax(1) == targets[held_out]
    parameters = [parameter.detach() for parameter in model.parameters()]
    swapped = 0
    if state is not None:
        swapped = state.nbytes
        state.close()
    return Trained(parameters, steps, right.float().mean().item(), swapped)


def training(folder: Path) -> bool:
    """Train in memory and with the state on disk, and compare the parameters."""
    print("\n3. Training on scikit-learn's digits, Adam's state on disk between steps")
    threads = torch.get_num_threads()
    # With two threads on a busy machine, the first steps of torch in a process sometimes
    # differ in the last bits from those in other processes (in 1 of 60 trainings in
    # memory; torch 2.13.0, 2026-11-22).
    torch.set_num_threads(1)
    try:
        expected = train(None)
        found = train(folder)
    finally:
        torch.set_num_threads(threads)
    line("in memory", f"{expected.steps} steps, accuracy {expected.accuracy:.3f}")
    words = f"{found.steps} steps, accuracy {found.accuracy:.3f}"
    line("on disk", f"{words}, {found.swapped / MIB:.1f} MiB swapped")
    same = equal(found.parameters, expected.parameters)
    line("parameters", "bit-identical" if same else "NOT bit-identical")
    return same


def size_of(text: str) -> int:
    """Parse a size such as 64M or 1G."""
    factor = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:].upper(), 1)
    size = int(text if factor == 1 else text[:-1]) * factor
    if size < MIB:
        raise argparse.ArgumentTypeError("must be 1M or more")
    return size


def main(arguments: list[str] | None = None) -> int:
    """Run all parts in a temporary folder, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "folder",
        type=Path,
        nargs="?",
        default=Path(),
        help="folder in which to make the temporary folder (the current one)",
    )
    parser.add_argument(
        "--size", type=size_of, default=1 << 30, help="size of the round trip (1G)"
    )
    options = parser.parse_args(arguments)
    stopped: list[int] = []

    def stop(number: int, _: object) -> None:
        stopped.append(number)
        raise KeyboardInterrupt

    # Handle SIGTERM as well, so that `kill` removes the folder too.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    print(f"nvmeio {nvmeio.__version__}, torch {torch.__version__}, numpy {np.__version__}")
    try:
        with tempfile.TemporaryDirectory(
            prefix="nvmeio-demo-", dir=options.folder
        ) as inside:
            show_machine(Path(inside))
            came_back = round_trip(Path(inside), options.size)
            same = training(Path(inside))
    except (KeyboardInterrupt, Exception) as error:
        # numpy's tofile() turns an interruption into a TypeError.
        if stopped:
            print("\ninterrupted; the files are removed", file=sys.stderr)
            return 128 + stopped[0]
        if not isinstance(error, OSError):
            raise
        print(f"\ndemo: {error}", file=sys.stderr)
        return 1
    print("\nall is well" if came_back and same else "\nSOMETHING IS WRONG; see above")
    return 0 if came_back and same else 1


if __name__ == "__main__":
    sys.exit(main())
