"""Train a transformer in less memory than it needs, with the rest of it on a drive.

The text is the sources and licences that come with Python and Debian.  The same training
runs twice: as an ordinary loop, and with optimizer states and activations on the drive.
Each run is a separate process in a control group, whose memory limit kills the first one.
Control groups need root.  Without them, both runs go to the end.

All files are in a temporary folder, which is removed at the end, also after Ctrl-C.  The
exit status is 0 only if the limit kills the ordinary loop and not the other one.  Without a
limit, it is 0 only if the losses of both are the same to the last digit.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import resource
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import BatchSampler, RandomSampler

import nvmeio
from nvmeio.torch import BatchStream, TokenDataset

MIB = 1 << 20
# A token is a byte of the text.
VOCABULARY = 256
SAMPLED_EVERY_S = 0.02
# By itself, glibc raises this threshold to 32 MiB, and keeps smaller freed tensors in its
# heap: 180 MiB of them with 4 layers, in either loop (glibc 2.36, 2026-11-25).
# Threads of torch that spin would take CPU time from other processes.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(MIB), "OMP_WAIT_POLICY": "passive"}
SIGNALS = (signal.SIGINT, signal.SIGTERM)
ORDINARY, BEYOND = "ordinary", "beyond memory"


@dataclasses.dataclass
class Preset:
    """A model, its training, and how much memory it may use.

    Attributes
    ----------
    width, layers, heads : int
        The size of the transformer.
    block, batch : int
        Tokens per sample, and samples per batch.
    steps : int
        The default number of steps.
    threads : int
        Threads of torch; 0 for its default.  With one thread, losses are exact.
    states, activations : int
        Memory for each of the two, in MiB.
    room : int
        Memory within the limit for everything but those two, the parameters, the gradients
        and Python, in MiB.
    """

    width: int
    layers: int
    heads: int
    block: int
    batch: int
    steps: int
    threads: int
    states: int
    activations: int
    room: int


PRESETS = {
    "small": Preset(768, 8, 12, 128, 4, 5, 1, 32, 32, 160),
    "large": Preset(2048, 12, 16, 256, 4, 10, 0, 256, 256, 512),
}


def line(name: str, words: str) -> None:
    """Print one line of results."""
    print(f"   {name:<14} {words}", flush=True)


# The training, which runs in a separate process.


def write_text(path: Path) -> int:
    """Write Python's sources and licences as an array, and return its bytes."""
    library = Path(sysconfig.get_path("stdlib"))
    found = sorted(library.glob("*.py"))
    found += [
        path
        for path in [
            library / "LICENSE.txt",
            *sorted(Path("/usr/share/common-licenses").glob("*")),
        ]
        if path.is_file() and not path.is_symlink()
    ]
    if not found:
        raise FileNotFoundError(
            "neither Python's sources nor its LICENSE.txt nor Debian's licences are here"
        )
    text = np.frombuffer(b"\n".join(path.read_bytes() for path in found), np.uint8)
    nvmeio.save(path, text)
    return len(text)


class Model(torch.nn.Module):
    """Predicts each byte from the bytes before it."""

    def __init__(self, preset: Preset) -> None:
        super().__init__()
        width = preset.width
        self.embed = torch.nn.Embedding(VOCABULARY, width)
        self.place = torch.nn.Parameter(torch.zeros(preset.block, width))
        layer = torch.nn.TransformerEncoderLayer(
            width, preset.heads, 4 * width, 0.0, batch_first=True, norm_first=True
        )
        self.mix = torch.nn.TransformerEncoder(
            layer, preset.layers, enable_nested_tensor=False
        )
        self.guess = torch.nn.Linear(width, VOCABULARY)
        mask = torch.nn.Transformer.generate_square_subsequent_mask(preset.block)
        self.register_buffer("mask", mask)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the scores of every byte at every position."""
        states = self.mix(self.embed(tokens) + self.place, mask=self.mask, is_causal=True)
        return self.guess(states)


def moved() -> dict[str, int]:
    """Return how many bytes this process has read from drives and written to them."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    found = dict(text.split(": ") for text in lines)
    return {name: int(found[name]) for name in ("read_bytes", "write_bytes")}


def train(folder: Path, preset: Preset, steps: int, beyond: bool) -> None:
    """Train, and print a line of JSON for each step, and one at the end."""
    torch.manual_seed(0)
    model = Model(preset)
    # A wider layer sums more changes per step, so it needs a lower rate.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.08 / preset.width)
    forward = contextlib.nullcontext
    if beyond:
        optimizer = nvmeio.torch.offload(
            optimizer, folder / "states", memory=preset.states * MIB
        )

        def forward() -> contextlib.AbstractContextManager[None]:
            return nvmeio.torch.save_on_disk(folder, memory=preset.activations * MIB)

    dataset = TokenDataset(folder / "text.npy", preset.block, stride=1)
    sampler = RandomSampler(
        dataset,
        replacement=True,
        num_samples=steps * preset.batch,
        generator=torch.Generator().manual_seed(0),
    )
    batches = iter(BatchStream(dataset, BatchSampler(sampler, preset.batch, True)))
    before, begin, waited = moved(), time.perf_counter(), 0.0
    for step in range(1, steps + 1):
        print(json.dumps({"step": step}), flush=True)
        asked = time.perf_counter()
        x, y = next(batches)
        waited += time.perf_counter() - asked
        optimizer.zero_grad()
        with forward():
            loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        print(json.dumps({"loss": loss.item()}), flush=True)
        optimizer.step()
    end = {
        "seconds": time.perf_counter() - begin,
        "waited for tokens": waited,
        "waited for states": optimizer.waited if beyond else 0.0,
        **{name: count - before[name] for name, count in moved().items()},
    }
    print(json.dumps(end), flush=True)


# The rest starts trainings in control groups, and watches their memory.


class Group:
    """A control group of version 1 or 2, with a memory limit. close() removes it."""

    def __init__(self, name: str, limit: int) -> None:
        top = Path("/sys/fs/cgroup")
        self.version = 1 if (top / "memory").is_dir() else 2
        self.folder = (top / "memory" if self.version == 1 else top) / name
        self.folder.mkdir()
        try:
            # No swap, because the limit would then slow the loop down instead of ending
            # it.
            if self.version == 1:
                self._write("memory.limit_in_bytes", limit)
                with contextlib.suppress(FileNotFoundError):
                    self._write("memory.memsw.limit_in_bytes", limit)
            else:
                self._write("memory.max", limit)
                with contextlib.suppress(FileNotFoundError):
                    self._write("memory.swap.max", 0)
        except BaseException:
            self.close()
            raise

    def _write(self, name: str, value: int) -> None:
        # A missing file must not be created.
        with open(self.folder / name, "r+", encoding="ascii") as file:
            file.write(str(value))

    def enter(self) -> list[str]:
        """Return the words to put before a command, so that it starts in this group."""
        script = 'echo $$ > "$0" && exec "$@"'
        return ["sh", "-c", script, str(self.folder / "cgroup.procs")]

    def memory(self) -> int:
        """Return the group's memory, as the kernel counts it now."""
        name = "memory.usage_in_bytes" if self.version == 1 else "memory.current"
        return int((self.folder / name).read_text(encoding="ascii"))

    def kills(self) -> int:
        """Return how many processes the limit has killed."""
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        lines = (self.folder / name).read_text(encoding="ascii").splitlines()
        return int(dict(text.split() for text in lines).get("oom_kill", 0))

    def close(self) -> None:
        """Remove the group, which must be empty."""
        self.folder.rmdir()


def resident(pid: int) -> int:
    """Return the memory of a process, or 0 if it has ended."""
    with contextlib.suppress(OSError):
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
        return pages * resource.getpagesize()
    return 0


@dataclasses.dataclass
class Run:
    """The results of one training.

    Attributes
    ----------
    name : str
        ORDINARY or BEYOND.
    steps : int
        How many steps were begun.
    losses : list of float
        The loss of each step.
    memory : list of tuple
        Samples of the memory: seconds and bytes.
    end : dict
        The figures that it reported at the end; empty if it was killed.
    killer : str
        Who killed it, or "".
    """

    name: str
    steps: int = 0
    losses: list[float] = dataclasses.field(default_factory=list)
    memory: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    end: dict[str, float] = dataclasses.field(default_factory=dict)
    killer: str = ""

    @property
    def peak(self) -> int:
        """The largest memory, in MiB."""
        return max(count for _, count in self.memory) // MIB

    def show(self, tokens: int) -> None:
        """Print the results, given the tokens per step."""
        if self.killer:
            words = f"killed by {self.killer} at {self.peak} MiB, in step {self.steps}"
            line(self.name, words)
            return
        seconds = self.end["seconds"]
        losses = f"loss {self.losses[0]:.3f} to {self.losses[-1]:.3f}"
        line(self.name, f"{self.steps} steps, {losses}, {self.peak} MiB at most")
        read, written = (self.end[f"{name}_bytes"] / MIB for name in ("read", "write"))
        line("", f"{self.steps * tokens / seconds:.0f} tokens/s")
        line("", f"{read:.0f} MiB read, {written:.0f} MiB written")
        states, tokens = (
            self.end[f"waited for {what}"] / seconds for what in ("states", "tokens")
        )
        line("", f"{states:.1%} of the time waiting for states, {tokens:.1%} for tokens")
        if self.name == BEYOND:
            line("", "waits for activations are not counted")


@contextlib.contextmanager
def sampled(run: Run, group: Group | None, pid: int) -> Iterator[None]:
    """Sample the memory of a process, or of its group, during the block."""
    ended = threading.Event()
    begin = time.perf_counter()

    def sample() -> None:
        while True:
            count = resident(pid) if group is None else group.memory()
            run.memory.append((time.perf_counter() - begin, count))
            if ended.wait(SAMPLED_EVERY_S):
                return

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextlib.contextmanager
def signals_later() -> Iterator[None]:
    """Delay Ctrl-C and `kill` until the end of the block."""
    # A signal mask would only affect this thread, and torch has others.
    came: list[int] = []
    handlers = [
        signal.signal(each, lambda number, _: came.append(number)) for each in SIGNALS
    ]
    try:
        yield
    finally:
        for number, handler in zip(SIGNALS, handlers, strict=True):
            signal.signal(number, handler)
    for number in came:
        signal.raise_signal(number)


def start(name: str, arguments: list[str], limit: int) -> Run:
    """Run a training in a separate process, in a control group if there is a limit."""
    run = Run(name)
    with contextlib.ExitStack() as stack:
        group = None
        # An interruption here would leave behind whatever is not on the stack yet.
        with signals_later():
            if limit:
                group = Group(f"nvmeio-beyond-{os.getpid()}", limit)
                stack.callback(group.close)
            words = [sys.executable, __file__, *arguments, "--run", name]
            # It has its own session, which Ctrl-C does not reach, so the stack kills it.
            process = subprocess.Popen(
                [*(group.enter() if group else ()), *words],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **ENVIRONMENT},
                start_new_session=True,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            assert process.stdout is not None
            stack.enter_context(process.stdout)
            stack.enter_context(sampled(run, group, process.pid))
        for text in process.stdout:
            said = json.loads(text)
            if "step" in said:
                run.steps = said["step"]
            elif "loss" in said:
                run.losses.append(said["loss"])
            else:
                run.end = said
        status = process.wait()
        if group and group.kills():
            run.killer = "the kernel"
        elif status == -signal.SIGKILL:
            run.killer = "SIGKILL"
        elif status:
            raise ChildProcessError(f"the {name} loop has ended with status {status}")
    return run


def usual_limit(preset: Preset) -> int:
    """Return a limit in bytes that the ordinary loop exceeds, and the other does not."""
    with torch.device("meta"):
        model = Model(preset)
    nbytes = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    line("parameters", f"{nbytes // MIB} MiB, as much for gradients, twice for AdamW")
    # torch imports modules for its first optimizer. They belong to Python's share.
    torch.optim.AdamW([torch.zeros(1)])
    text = Path("/proc/self/status").read_text(encoding="ascii")
    (python,) = (
        int(each.split()[1]) << 10
        for each in text.splitlines()
        if each.startswith("RssAnon:")
    )
    return python + 2 * nbytes + (preset.states + preset.activations + preset.room) * MIB


def can_limit(limit: int) -> bool:
    """Return whether control groups can be made here, and print their version."""
    try:
        group = Group(f"nvmeio-beyond-{os.getpid()}", limit)
    except OSError as error:
        line("limit", f"none: control groups cannot be made here: {error.strerror}")
        return False
    group.close()
    line("limit", f"{limit // MIB} MiB by a control group, version {group.version}")
    return True


def show_memory(runs: list[Run], limit: int, chart: Path | None) -> None:
    """Draw memory over time, or print some of the figures."""
    if chart is not None:
        try:
            from matplotlib.figure import Figure
        except ImportError:
            line("chart", "none: matplotlib is not installed; the figures are:")
        else:
            figure = Figure(figsize=(9, 4), layout="constrained")
            axes = figure.add_subplot(xlabel="seconds", ylabel="memory in MiB")
            for run in runs:
                seconds, counts = zip(*run.memory, strict=True)
                label = f"{run.name}, killed" if run.killer else run.name
                axes.plot(seconds, [count / MIB for count in counts], label=label)
            if limit:
                axes.axhline(limit / MIB, color="black", linestyle="--", label="limit")
            axes.set_ylim(0)
            axes.legend()
            figure.savefig(chart)
            line("chart", str(chart))
            return
    for run in runs:
        places = np.linspace(0, len(run.memory) - 1, 12).astype(int)
        counts = " ".join(f"{run.memory[place][1] // MIB:5d}" for place in places)
        line(run.name, f"{counts} MiB in {run.memory[-1][0]:.1f} s")


def judge(ordinary: Run, beyond: Run, limited: bool, exact: bool) -> bool:
    """Report the result, and return whether it is the expected one."""
    both = list(zip(ordinary.losses, beyond.losses, strict=False))
    same = all(one == other for one, other in both)
    words = "the same to the last digit" if same else "DIFFERENT"
    if not same and not exact:
        words = "different, as several threads of torch may make them"
    line("losses", f"{words} ({len(both)} steps of both)")
    if beyond.killer:
        print("THE DRIVE WAS OF NO USE")
    elif limited and not ordinary.killer:
        print("THE ORDINARY LOOP FITS TOO")
    elif not limited and ordinary.killer:
        print("THE ORDINARY LOOP WAS KILLED WITHOUT A LIMIT")
    elif same or not exact:
        print("trained beyond memory" if limited else "trained with memory to spare")
        return True
    return False


def compare(options: argparse.Namespace, folder: Path) -> bool:
    """Train twice, and return whether the result is the expected one."""
    preset = PRESETS[options.preset]
    kind = subprocess.run(
        ["df", "--output=fstype", folder], stdout=subprocess.PIPE, text=True, check=True
    ).stdout.split()[-1]
    if kind in ("tmpfs", "ramfs"):
        raise OSError(f"{folder} is in memory ({kind}); name a folder on a drive")
    size = write_text(folder / "text.npy")
    line("text", f"{size} bytes of Python's sources and licences")
    limit = usual_limit(preset)
    if options.limit is not None:
        limit = options.limit * MIB
    if limit and not can_limit(limit):
        limit = 0
    arguments = [str(folder)]
    for name in ("preset", "steps", "threads"):
        arguments += [f"--{name}", str(getattr(options, name))]
    runs = []
    for name in (ORDINARY, BEYOND):
        runs.append(start(name, arguments, limit))
        runs[-1].show(preset.batch * preset.block)
    show_memory(runs, limit, options.chart)
    return judge(*runs, limit > 0, options.threads == 1)


def main(arguments: list[str] | None = None) -> int:
    """Run both trainings in a temporary folder, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "folder",
        type=Path,
        nargs="?",
        default=Path(),
        help="folder on the drive, in which to make the temporary folder (the current one)",
    )
    parser.add_argument(
        "--preset", choices=PRESETS, default="small", help="of the model (small)"
    )
    parser.add_argument("--steps", type=int, help="number of steps (small: 5, large: 10)")
    parser.add_argument(
        "--limit", type=int, help="MiB for each run; 0: none (enough with a drive)"
    )
    parser.add_argument(
        "--threads", type=int, help="threads of torch (small: 1, large: torch's default)"
    )
    parser.add_argument("--chart", type=Path, help="file for a chart of memory over time")
    parser.add_argument("--run", choices=(ORDINARY, BEYOND), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    preset = PRESETS[options.preset]
    if options.steps is None:
        options.steps = preset.steps
    if options.threads is None:
        options.threads = preset.threads or torch.get_num_threads()
    for name in ("steps", "threads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}; at least one is needed")
    if options.run:
        torch.set_num_threads(options.threads)
        train(options.folder, preset, options.steps, options.run == BEYOND)
        return 0

    stopped: list[int] = []

    def stop(number: int, _: object) -> None:
        stopped.append(number)
        raise KeyboardInterrupt

    # Handle SIGTERM as well, so that `kill` removes the folder too.
    for number in SIGNALS:
        signal.signal(number, stop)
    try:
        with tempfile.TemporaryDirectory(
            prefix="nvmeio-beyond-", dir=options.folder
        ) as folder:
            return 0 if compare(options, Path(folder)) else 1
    except KeyboardInterrupt:
        print("\ninterrupted; the files are removed", file=sys.stderr)
        return 128 + stopped[0]
    except OSError as error:
        print(f"train_beyond_memory: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
