"""Rows of model files: nvmeio.safetensors beside plain loops and other loaders.

Every load ends with all bytes in memory; for memory maps, each page is touched.  Memory is
new in every turn, unless a row says otherwise.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from comparisons import Comparison, Goal, Sample, measured
from loop_child import LoopChild
from peers import Peers

import nvmeio
from nvmeio._cli.measuring import forget_cached

__all__ = ["model_comparisons"]

LOOP = "plain loop"
BLOCK, DEPTH = 1 << 20, 128
FEW, MANY = 300, 20_000
PAGE = 4096
# Rows of a tensor. One comparison reads half of them.
ROWS = 64

Load = Callable[[Path], Any]
Turn = Callable[[], Sample]


def touched(tensors: dict[str, Any]) -> dict[str, Any]:
    """Read from every page, so that all of a memory map is in memory."""
    for tensor in tensors.values():
        np.asarray(tensor).reshape(-1).view(np.uint8)[::PAGE].max()
    return tensors


class Models:
    """The model files, and turns that load and save them."""

    def __init__(self, folder: Path, size: int, torch: Any) -> None:
        self.folder, self.torch = folder, torch
        self.tensors = {count: self.made(count, size) for count in (FEW, MANY)}
        self.paths = {}
        for count, tensors in self.tensors.items():
            self.paths[count] = folder / f"{count}.safetensors"
            nvmeio.safetensors.torch.save_file(tensors, self.paths[count])
        # One file of each other format is enough.
        self.pickled = folder / "model.pt"
        torch.save(self.tensors[FEW], self.pickled)

    def made(self, count: int, size: int) -> dict[str, Any]:
        """Make `count` tensors of `size` bytes together, which no drive can compress."""
        columns = max(1, size // count // ROWS // 2)
        noise = np.random.default_rng(count).integers(0, 1 << 15, (count * ROWS, columns))
        whole = self.torch.from_numpy(noise.astype(np.int16))
        return {f"layer.{n:05d}": t.clone() for n, t in enumerate(whole.split(ROWS))}

    def nbytes(self, count: int) -> int:
        """Return the size of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors[count].values())

    def loading(
        self, load: Load, count: int, *, cold: bool = True, path: Path | None = None
    ) -> Turn:
        """Return a turn that loads a file. The tensors are compared once."""
        path = path or self.paths[count]
        expected, nbytes = self.tensors[count], self.nbytes(count)
        compared = False

        def turn() -> Sample:
            nonlocal compared
            if cold:
                forget_cached(path)
            else:
                cache(path)
            found: list[Any] = []

            def work() -> int:
                found.append(load(path))
                return nbytes

            sample = measured(work)
            if not compared:
                for name, tensor in expected.items():
                    if not self.torch.equal(found[0][name], tensor):
                        raise RuntimeError(f"{load} has lost or changed bytes of {name}")
                compared = True
            return sample

        return turn

    def saving(self, save: Callable[[Any, Path], object], sync: bool) -> Turn:
        """Return a turn that writes a new file, and ends when it is on the device."""
        path, tensors = self.folder / "new.safetensors", self.tensors[FEW]

        def work() -> int:
            save(tensors, path)
            if sync:
                descriptor = os.open(path, os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)
            return self.nbytes(FEW)

        def turn() -> Sample:
            path.unlink(missing_ok=True)
            return measured(work)

        return turn


def cache(path: Path) -> None:
    """Read all of a file into the page cache."""
    with open(path, "rb", buffering=0) as file:
        while file.read(16 << 20):
            pass


def others(models: Models, peers: Peers) -> Iterator[tuple[str, Load, Path]]:
    """Yield the other tools that load models: name, function and file."""
    path, torch = models.paths[FEW], models.torch
    theirs = peers.module("safetensors.torch")
    if theirs is not None:
        yield "safetensors, touched", lambda p: touched(theirs.load_file(p)), path
        pread = functools.partial(theirs.load_file, backend="pread")
        yield "safetensors, pread", pread, path
    yield "torch.load", torch.load, models.pickled
    mapped = functools.partial(torch.load, mmap=True)
    yield "torch.load, mmap, touched", lambda p: touched(mapped(p)), models.pickled
    fast = peers.module("fastsafetensors")
    if fast is not None:

        def load_fast(path: Path) -> dict[str, Any]:
            with fast.fastsafe_open([str(path)], device="cpu", nogds=True) as file:
                return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118

        yield "fastsafetensors", load_fast, path
    runai = peers.module("runai_model_streamer")
    if runai is not None:

        def load_runai(path: Path) -> dict[str, Any]:
            with runai.SafetensorsStreamer() as streamer:
                streamer.stream_file(str(path))
                return {name: tensor.clone() for name, tensor in streamer.get_tensors()}

        yield "runai-model-streamer", load_runai, path


def half(path: Path) -> dict[str, Any]:
    """Read the first half of the rows of every tensor."""
    with nvmeio.safetensors.safe_open(path, "pt") as file:
        return file.get_many(dict.fromkeys(file.offset_keys(), slice(0, ROWS // 2)))


def model_comparisons(
    folder: Path, size: int, child: LoopChild | None, peers: Peers
) -> Iterator[Comparison]:
    """Compare nvmeio.safetensors with loops, with others, and with itself."""
    torch = peers.module("torch")
    if torch is None:
        return
    # Imported here because it needs torch.
    import nvmeio.safetensors.torch

    models = Models(folder, size, torch)
    ours = nvmeio.safetensors.torch.load_file
    path = models.paths[FEW]
    # The loop only moves whole blocks.
    span = path.stat().st_size // BLOCK * BLOCK
    cold = models.loading(ours, FEW)
    work = "load a model, cold, new memory"
    if child is not None:
        forgetting = child.turn("model load", path, BLOCK, DEPTH, span)
        yield Comparison(
            work, ("nvmeio", LOOP), (cold, forgetting), True, (Goal("speed", 0.9),)
        )
    for name, load, file in others(models, peers):
        limit = 2.0 if name == "safetensors, touched" else 1.0
        turns = cold, models.loading(load, FEW, path=file)
        yield Comparison(work, ("nvmeio", name), turns, True, (Goal("speed", limit),))
    out = {name: torch.ones_like(tensor) for name, tensor in models.tensors[FEW].items()}
    into = models.loading(lambda p: ours(p, out=out), FEW)
    if child is not None:
        blocks = child.turn("plain blocks", "read", path, BLOCK, DEPTH, span, "small")
        yield Comparison(
            "load a model, cold, memory of torch that was used before (out=)",
            ("nvmeio", LOOP),
            (into, blocks),
            True,
            (Goal("speed", 0.95),),
        )
        cached = child.turn("model cached", path, 2, span)
        yield Comparison(
            "load a model, cached, new memory",
            ("nvmeio", "two threads of pread"),
            (models.loading(ours, FEW, cold=False), cached),
            False,
            (Goal("speed", 0.9),),
        )
    yield Comparison(
        f"load a model of {MANY} tensors, cold, new memory",
        (f"{MANY} tensors", f"{FEW} tensors"),
        (models.loading(ours, MANY), cold),
        True,
        (Goal("time", 1.3),),
    )
    yield Comparison(
        "read half the rows of every tensor, cold",
        ("half", "all"),
        (halved(models), cold),
        True,
        (Goal("speed", 1.8),),
    )
    save = models.saving(nvmeio.safetensors.torch.save_file, sync=False)
    if child is not None:
        turn = child.turn("model save", folder / "loop", BLOCK, DEPTH, span)
        yield Comparison(
            "save a model", ("nvmeio", LOOP), (save, turn), False, (Goal("speed", 0.9),)
        )
    theirs = peers.module("safetensors.torch")
    if theirs is not None:
        turn = models.saving(theirs.save_file, sync=True)
        goals = (Goal("speed", 1.0),)
        yield Comparison(
            "save a model", ("nvmeio", "safetensors, fsync"), (save, turn), False, goals
        )


def halved(models: Models) -> Turn:
    """Return a turn that reads half of every tensor."""
    path, nbytes = models.paths[FEW], models.nbytes(FEW) // 2

    def work() -> int:
        half(path)
        return nbytes

    def turn() -> Sample:
        forget_cached(path)
        return measured(work)

    return turn
