"""Compare saves and loads of whole files with other tools.

Model files are compared with plain loops, safetensors, torch and other loaders; checkpoints
of nested state with plain loops; those of two ranks with torch.distributed's own; an array
with numpy; and plain bytes with Python, aiofile and caio.  A load begins with nothing in
the page cache and ends when every byte is in memory.  A save ends with an fsync.
bench/README.md explains the tables and their results.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import importlib.util
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import checkpoint_comparisons
from comparisons import Comparison, Goal, Sample, compare, measured
from loop_child import loop_child
from machine import arguments, machine
from model_files import model_comparisons
from peers import Peers
from report import finish
from two_ranks import rank_comparisons

import nvmeio
from nvmeio._cli.measuring import forget_cached

# For caio: the default block size and queue depth of nvmeio's handles.
CHUNK_BYTES, DEPTH = 1 << 20, 128
# The goal: no other tool is faster.
GOALS = (Goal("speed", 1.0),)

# A Save writes content to a file. A Load returns the content of a file, in any form.
Save = Callable[[Any, Path], object]
Load = Callable[[Path], Any]
Turn = Callable[[], Sample]


def bytes_in(found: Any) -> Iterator[np.ndarray]:
    """Yield the bytes of a tensor, an array or bytes, or of each of several."""
    if isinstance(found, dict | list):
        for part in found.values() if isinstance(found, dict) else found:
            yield from bytes_in(part)
    elif isinstance(found, bytes):
        yield np.frombuffer(found, np.uint8)
    else:
        yield np.asarray(found).reshape(-1).view(np.uint8)


@dataclasses.dataclass(frozen=True)
class Material:
    """The content to save and load.

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
        """Return all bytes of the content."""
        return np.concatenate(list(bytes_in(self.content)))

    def check(self, found: Any, what: str) -> None:
        """Compare the bytes, then wipe them: the next load may get the same memory."""
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
        """Return a turn that writes a new file, and checks it with `load`."""
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
        """Return a turn that reads a file, which `save` writes beforehand."""
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
    """Read from every page, so that all of a memory map is in memory."""
    for part in bytes_in(array):
        part[:: mmap.PAGESIZE].max()
    return array


def array_comparisons(folder: Path, size: int) -> Iterator[Comparison]:
    """Compare nvmeio with numpy on .npy files."""
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
    yield Comparison("save an array", ("nvmeio.save", "numpy.save"), turns, False, GOALS)
    for name, load in {"numpy.load": np.load, "numpy.memmap, touched": mapped}.items():
        turns = tuple(
            material.loading(way, numpy_save, "array.npy") for way in (nvmeio.load, load)
        )
        yield Comparison("load an array", ("nvmeio.load", name), turns, True, GOALS)


def by_aiofile(aiofile: Any) -> tuple[Save, Load]:
    """Return a Save and a Load by aiofile."""

    async def write(data: bytes, path: Path) -> None:
        async with aiofile.async_open(path, "wb") as file:
            await file.write(data)

    async def read(path: Path) -> Any:
        async with aiofile.async_open(path, "rb") as file:
            # In pieces: one read of everything reached 0.03 GB/s (2026-11-21).
            return [piece async for piece in file.iter_chunked(CHUNK_BYTES)]

    return lambda data, path: asyncio.run(write(data, path)), lambda p: asyncio.run(read(p))


def by_caio(caio: Any) -> tuple[Save, Load]:
    """Return a Save and a Load by caio, with all pieces in flight at once."""

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


def bytes_comparisons(folder: Path, size: int, peers: Peers) -> Iterator[Comparison]:
    """Compare nvmeio with other ways to write and read plain bytes."""
    material = Material(folder, np.random.default_rng(2).bytes(size))

    def write(data: bytes, path: Path) -> None:
        nvmeio.write_file(data, path, atomic=False)

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
        yield Comparison("write bytes", ("nvmeio.write_file", name), turns, False, GOALS)
    for name, (_, load) in ways.items():
        turns = tuple(
            material.loading(way, python_write, "bytes") for way in (nvmeio.read_file, load)
        )
        yield Comparison("read bytes", ("nvmeio.read_file", name), turns, True, GOALS)


def main() -> None:
    """Measure and report. The results never change the exit status."""
    options = arguments(__doc__, ("512M", "8M"), (8, 2))
    peers = Peers()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="nvmeio-bench-", dir=options.dir)
        )
        child = stack.enter_context(loop_child(peers))
        about = machine(options.dir) | {"size": options.size, "rounds": options.rounds}
        comparisons = [
            *model_comparisons(Path(folder), 4 * options.size, child, peers),
            *checkpoint_comparisons(Path(folder), 2 * options.size, child),
            *array_comparisons(Path(folder), options.size),
            *bytes_comparisons(Path(folder), options.size, peers),
        ]
        # If it is missing, that was reported above.
        if importlib.util.find_spec("torch"):
            comparisons += rank_comparisons(Path(folder), 2 * options.size, stack)
        compare(comparisons, options.rounds)
    finish("checkpoint", about, comparisons, peers.left_out, options.json)


if __name__ == "__main__":
    main()
