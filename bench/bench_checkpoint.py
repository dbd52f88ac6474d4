"""Compares whole-file saves and loads with what people use for checkpoints.

The tensors of a checkpoint beside torch, safetensors and fastsafetensors; one array beside
numpy; plain bytes beside Python, aiofile and caio.  Loads begin with nothing in the page
cache and end with every byte in memory, saves end with an fsync.  bench/README.md says how
to read the tables and what they showed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from duels import Duel, Goal, Sample, fight, measured
from machine import arguments, machine
from peers import Peers
from report import finish

import nvmeio
from nvmeio.cli.measuring.ground import forget_cached

# As many as a checkpoint has here.  From 128 MiB on the memory of each is new whenever it
# is loaded: glibc maps 32 MiB and more anew (mallopt(3), M_MMAP_THRESHOLD).
TENSORS = 4
# What caio has in flight: the default block and depth of nvmeio's handles.
CHUNK_BYTES, DEPTH = 1 << 20, 128
# Nothing that people use may be faster.
GOALS = (Goal("speed", 1.0),)

# Writes what it is given to a file; returns what a file holds, in whatever form.
Save = Callable[[Any, Path], object]
Load = Callable[[Path], Any]
Turn = Callable[[], Sample]


def bytes_in(found: Any) -> Iterator[np.ndarray]:
    """Give the bytes of a tensor, an array or bytes, or of several of them in a row."""
    if isinstance(found, dict | list):
        for part in found.values() if isinstance(found, dict) else found:
            yield from bytes_in(part)
    elif isinstance(found, bytes):
        yield np.frombuffer(found, np.uint8)
    else:
        yield np.asarray(found).reshape(-1).view(np.uint8)


@dataclasses.dataclass(frozen=True)
class Material:
    """What is saved and loaded.

    Attributes
    ----------
    folder : Path
        For the files.
    content : Any
        A dict of tensors, an array or bytes.
    """

    folder: Path
    content: Any

    @functools.cached_property
    def expected(self) -> np.ndarray:
        """Return all of its bytes."""
        return np.concatenate(list(bytes_in(self.content)))

    def check(self, found: Any, what: str) -> None:
        """Compare bytes, and wipe those that were found, for memory may be lent again."""
        begin = 0
        for part in bytes_in(found):
            end = begin + part.nbytes
            if not np.array_equal(part, self.expected[begin:end]):
                raise RuntimeError(f"{what} has lost or changed bytes")
            if part.flags.writeable:
                part[:] = 0
            begin = end
        if begin != self.expected.nbytes:
            raise RuntimeError(f"{what} has lost the end")

    def saving(self, save: Save, load: Load, name: str) -> Turn:
        """Return a turn that writes a new file; what `load` finds there is checked."""
        path, nbytes = self.folder / name, self.expected.nbytes

        def work() -> int:
            save(self.content, path)
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            return nbytes

        def turn() -> Sample:
            path.unlink(missing_ok=True)
            sample = measured(work)
            self.check(load(path), f"saving {name}")
            path.unlink()
            return sample

        return turn

    def loading(self, load: Load, save: Save, name: str) -> Turn:
        """Return a turn that reads a file, which `save` writes once."""
        path, nbytes = self.folder / name, self.expected.nbytes
        if not path.exists():
            save(self.content, path)

        def turn() -> Sample:
            forget_cached(path)
            found: list[Any] = []

            def work() -> int:
                found.append(load(path))
                return nbytes

            sample = measured(work)
            self.check(found.pop(), f"loading {name}")
            return sample

        return turn


def touched(array: Any) -> Any:
    """Look at every page, so that the bytes of a memory map are in memory."""
    for part in bytes_in(array):
        part[:: mmap.PAGESIZE].max()
    return array


def save_tensors(tensors: dict[str, Any], path: Path) -> None:
    """Write tensors of float32 into a file of safetensors' format by nvmeio."""
    begins = np.cumsum([0, *(tensor.nbytes for tensor in tensors.values())]).tolist()
    entries = {
        name: {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [begin, end]}
        for (name, tensor), begin, end in zip(
            tensors.items(), begins[:-1], begins[1:], strict=True
        )
    }
    text = json.dumps(entries).encode()
    # The format lets blanks follow; with them the tensors begin at a page.
    text = text.ljust(-(-(len(text) + 8) // mmap.PAGESIZE) * mmap.PAGESIZE - 8)
    head = np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8)
    with nvmeio.File(path, "w") as file, nvmeio.aio_handle() as handle:
        requests = [handle.submit_write(head, file)]
        for tensor, begin in zip(tensors.values(), begins[:-1], strict=True):
            requests.append(handle.submit_write(tensor, file, head.nbytes + begin))
        for request in requests:
            request.wait()


def load_tensors(empty: Callable[..., Any], path: Path) -> dict[str, Any]:
    """Read tensors of float32 from such a file into memory that `empty` gives."""
    import torch

    with nvmeio.File(path) as file, nvmeio.aio_handle() as handle:
        size = int.from_bytes(os.pread(file.fileno(), 8, 0), "little")
        entries = json.loads(os.pread(file.fileno(), size, 8))
        entries.pop("__metadata__", None)
        tensors, requests = {}, []
        for name, entry in entries.items():
            tensors[name] = empty(*entry["shape"], dtype=torch.float32)
            begin = 8 + size + entry["data_offsets"][0]
            requests.append(handle.submit_read(tensors[name], file, begin))
        for request in requests:
            request.wait()
    return tensors


def in_pool(*shape: int, dtype: Any) -> Any:
    """Return a tensor in the pool's memory."""
    return nvmeio.torch.empty(shape, dtype=dtype)


def tensor_duels(folder: Path, size: int, peers: Peers) -> Iterator[Duel]:
    """Pair nvmeio with what saves and loads dicts of tensors."""
    torch = peers.module("torch")
    if torch is None:
        return
    safetensors = peers.module("safetensors.torch")
    fast = peers.module("fastsafetensors")
    # The loaders give tensors back in the order of their names.
    tensors = {f"layer {n}": torch.randn(size // TENSORS // 4) for n in range(TENSORS)}
    material = Material(folder, tensors)
    ours, theirs = "tensors.safetensors", "tensors.pt"
    plain, pooled = (functools.partial(load_tensors, e) for e in (torch.empty, in_pool))

    saves: dict[str, tuple[Save, Load, str]] = {
        "torch.save": (torch.save, torch.load, f"peer {theirs}")
    }
    loads: dict[str, tuple[Load, Save, str]] = {
        "torch.load": (torch.load, torch.save, theirs),
        "torch.load(mmap=True), touched": (
            lambda path: touched(torch.load(path, mmap=True)),
            torch.save,
            theirs,
        ),
    }
    # All read the same file, as safetensors itself writes it.
    write: Save = save_tensors
    if safetensors is not None:
        write, read = safetensors.save_file, safetensors.load_file
        saves["safetensors' save_file"] = (write, read, f"peer {ours}")
        loads["safetensors' load_file, touched"] = (
            lambda path: touched(read(path)),
            write,
            ours,
        )
    if fast is not None:
        loads["fastsafetensors"] = (functools.partial(load_fast, fast), write, ours)
    for name, save in saves.items():
        turns = (
            material.saving(save_tensors, plain, ours + ".new"),
            material.saving(*save),
        )
        yield Duel("save tensors", ("nvmeio", name), turns, False, GOALS)
    for name, load in loads.items():
        for memory, way in (("new memory", plain), ("the pool's memory", pooled)):
            turns = (material.loading(way, write, ours), material.loading(*load))
            work = f"load tensors, nvmeio into {memory}"
            yield Duel(work, ("nvmeio", name), turns, True, GOALS)


def load_fast(fastsafetensors: Any, path: Path) -> dict[str, Any]:
    """Load the tensors of a file by fastsafetensors, without GPUDirect."""
    with fastsafetensors.fastsafe_open([str(path)], device="cpu", nogds=True) as file:
        return {name: file.get_tensor(name) for name in sorted(file.keys())}


def array_duels(folder: Path, size: int) -> Iterator[Duel]:
    """Pair nvmeio with numpy at .npy files."""
    material = Material(folder, np.random.default_rng(1).random(size // 4, np.float32))

    def save(array: np.ndarray, path: Path) -> None:
        nvmeio.save(path, array)

    def numpy_save(array: np.ndarray, path: Path) -> None:
        np.save(path, array)

    def mapped(path: Path) -> np.ndarray:
        return touched(np.load(path, mmap_mode="r"))

    turns = (
        material.saving(save, np.load, "new.npy"),
        material.saving(numpy_save, np.load, "peer.npy"),
    )
    yield Duel("save an array", ("nvmeio.save", "numpy.save"), turns, False, GOALS)
    for name, load in {"numpy.load": np.load, "numpy.memmap, touched": mapped}.items():
        turns = tuple(
            material.loading(way, numpy_save, "array.npy") for way in (nvmeio.load, load)
        )
        yield Duel("load an array", ("nvmeio.load", name), turns, True, GOALS)


def by_aiofile(aiofile: Any) -> tuple[Save, Load]:
    """Return how aiofile writes and reads a file."""

    async def write(data: bytes, path: Path) -> None:
        async with aiofile.async_open(path, "wb") as file:
            await file.write(data)

    async def read(path: Path) -> Any:
        async with aiofile.async_open(path, "rb") as file:
            # Pieces, for one read of everything came to 0.03 GB/s (2026-11-21).
            return [piece async for piece in file.iter_chunked(CHUNK_BYTES)]

    return lambda data, path: asyncio.run(write(data, path)), lambda p: asyncio.run(read(p))


def by_caio(caio: Any) -> tuple[Save, Load]:
    """Return how caio writes and reads a file, in pieces side by side."""

    async def write(data: bytes, path: Path) -> None:
        with open(path, "wb") as file:
            async with caio.AsyncioContext(max_requests=DEPTH) as context:
                await asyncio.gather(
                    *(
                        context.write(data[at : at + CHUNK_BYTES], file.fileno(), at)
                        for at in range(0, len(data), CHUNK_BYTES)
                    )
                )

    async def read(path: Path) -> Any:
        with open(path, "rb") as file:
            async with caio.AsyncioContext(max_requests=DEPTH) as context:
                return await asyncio.gather(
                    *(
                        context.read(CHUNK_BYTES, file.fileno(), at)
                        for at in range(0, path.stat().st_size, CHUNK_BYTES)
                    )
                )

    return lambda data, path: asyncio.run(write(data, path)), lambda p: asyncio.run(read(p))


def bytes_duels(folder: Path, size: int, peers: Peers) -> Iterator[Duel]:
    """Pair nvmeio with what writes and reads plain bytes."""
    material = Material(folder, np.random.default_rng(2).bytes(size))

    def write(data: bytes, path: Path) -> None:
        nvmeio.write_file(path, data)

    def python_write(data: bytes, path: Path) -> None:
        path.write_bytes(data)

    ways: dict[str, tuple[Save, Load]] = {"Python": (python_write, Path.read_bytes)}
    for name, by in {"aiofile": by_aiofile, "caio": by_caio}.items():
        if (module := peers.module(name)) is not None:
            ways[name] = by(module)
    for name, (save, _) in ways.items():
        turns = tuple(
            material.saving(way, Path.read_bytes, f"{who}.new")
            for who, way in (("nvmeio", write), (name, save))
        )
        yield Duel("write bytes", ("nvmeio.write_file", name), turns, False, GOALS)
    for name, (_, load) in ways.items():
        turns = tuple(
            material.loading(way, python_write, "bytes") for way in (nvmeio.read_file, load)
        )
        yield Duel("read bytes", ("nvmeio.read_file", name), turns, True, GOALS)


def main() -> None:
    """Measure and report; what was measured never changes the exit status."""
    options = arguments(__doc__, ("512M", "8M"), (8, 2))
    peers = Peers()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="nvmeio-bench-", dir=options.dir)
        )
        about = machine(options.dir) | {"size": options.size, "rounds": options.rounds}
        duels = [
            *tensor_duels(Path(folder), options.size, peers),
            *array_duels(Path(folder), options.size),
            *bytes_duels(Path(folder), options.size, peers),
        ]
        fight(duels, options.rounds)
    finish("checkpoint", about, duels, peers.left_out, options.json)


if __name__ == "__main__":
    main()
