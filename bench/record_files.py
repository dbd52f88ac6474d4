"""The files of bench_dataloader.py, and the datasets of each format: ours, the peer's."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import itertools
import mmap
import multiprocessing
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peers import Peers
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import nvmeio

__all__ = ["Format", "formats"]

BLOCK_TOKENS = 1024
HERE = Path(__file__).resolve().parent
# The folder where scripts/test-formats installs packages, and the module that imports one.
INSTALLED = (HERE.parent / "build/formats", HERE.parent / "tests/formats")


@dataclasses.dataclass(frozen=True)
class Format:
    """Files of one format, and the datasets that read samples of them.

    Attributes
    ----------
    samples : str
        What a sample is, for the names of comparisons.
    names : tuple of str
        The names of nvmeio's dataset and of the peer.
    datasets : tuple of callable
        Functions that make both, given how many samples will be read.
    paths : tuple of Path
        The files, which are put into the page cache or dropped from it.
    sample_bytes : int
        The mean size of a sample.
    batch, batches : int
        Samples per batch, and batches per turn.
    collate : callable or None
        Passed to the DataLoader.
    peers : tuple of (str, callable)
        More peers, measured only cold and without workers.
    cold : float
        The goal for cold files.
    """

    samples: str
    names: tuple[str, str]
    datasets: tuple[Callable[[int], Any], Callable[[int], Any]]
    paths: tuple[Path, ...]
    sample_bytes: int
    batch: int
    batches: int
    collate: Callable[[list[Any]], Any] | None = None
    peers: tuple[tuple[str, Callable[[int], Any]], ...] = ()
    cold: float = 3.0

    @property
    def count(self) -> int:
        """The number of samples per turn."""
        return self.batch * self.batches


def chunks(size: int) -> Iterator[bytes]:
    """Yield random bytes, 16 MiB at a time."""
    piece = np.random.default_rng(0).bytes(16 << 20)
    for begin in range(0, size, len(piece)):
        yield piece[: size - begin]


# Rows of an array.

ROW_BYTES = 4096


class MemmapRows(Dataset[torch.Tensor]):
    """The usual dataset: rows of a memory map, copied because it is read-only."""

    def __init__(self, path: Path, _: int, advice: int = mmap.MADV_NORMAL) -> None:
        self.path = path
        self.count = len(np.load(path, mmap_mode="r"))
        self.advice = advice
        self.rows: Any = None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.rows is None:
            self.rows = np.load(self.path, mmap_mode="r")
            self.rows._mmap.madvise(self.advice)
        return torch.from_numpy(self.rows[index].copy())


def array(folder: Path, size: int) -> Format:
    """Write a .npy file."""
    path = folder / "rows.npy"
    with open(path, "wb") as file:
        header = {"descr": "|u1", "fortran_order": False}
        np.lib.format.write_array_header_1_0(
            file, {**header, "shape": (size // ROW_BYTES, ROW_BYTES)}
        )
        file.writelines(chunks(size))
    theirs = functools.partial(MemmapRows, path)
    advised = functools.partial(MemmapRows, path, advice=mmap.MADV_RANDOM)
    return Format(
        "rows of 4 KiB",
        ("ArrayDataset", "numpy.memmap"),
        (lambda _: nvmeio.torch.ArrayDataset(path), theirs),
        (path,),
        ROW_BYTES,
        256,
        12,
        peers=(("numpy.memmap, MADV_RANDOM", advised),),
        cold=5.0,
    )


# Windows of tokens.


class MemmapWindows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of a memory map, as nanoGPT's get_batch cuts them."""

    def __init__(self, path: Path, _: int) -> None:
        self.path = path
        self.count = path.stat().st_size // 2 - BLOCK_TOKENS
        self.tokens: Any = None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.tokens is None:
            self.tokens = np.memmap(self.path, np.uint16, "r")
        data, size = self.tokens, BLOCK_TOKENS
        return (
            torch.from_numpy(data[i : i + size].astype(np.int64)),
            torch.from_numpy(data[i + 1 : i + 1 + size].astype(np.int64)),
        )


def tokens(folder: Path, size: int) -> Format:
    """Write a file of tokens."""
    path = folder / "train.bin"
    with open(path, "wb") as file:
        file.writelines(chunks(size))
    return Format(
        f"windows of {BLOCK_TOKENS} tokens",
        ("TokenDataset", "numpy.memmap"),
        (
            lambda _: nvmeio.torch.TokenDataset(path, BLOCK_TOKENS, np.uint16, stride=1),
            functools.partial(MemmapWindows, path),
        ),
        (path,),
        2 * BLOCK_TOKENS,
        64,
        24,
    )


# Megatron's sequences.


def megatron(folder: Path, size: int, indexed: Any) -> Format:
    """Write a .bin and a .idx file by megatron-core."""
    prefix = str(folder / "corpus")
    numbers = np.random.default_rng(0)
    lengths = numbers.integers(512, 1025, size // 1536).tolist()
    piece = torch.from_numpy(numbers.integers(0, 2**15, 1024 + 4096).astype(np.int16))
    builder = indexed.IndexedDatasetBuilder(f"{prefix}.bin", np.uint16)
    for number, length in enumerate(lengths):
        builder.add_item(piece[number % 4096 :][:length])
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return Format(
        "sequences of 1 to 2 KiB",
        ("MegatronDataset", "megatron-core"),
        (
            lambda _: nvmeio.torch.MegatronDataset(prefix),
            lambda _: Sequences(indexed.IndexedDataset(prefix, mmap=True)),
        ),
        (Path(f"{prefix}.bin"),),
        1536,
        128,
        12,
        list,
    )


class Sequences(Dataset[torch.Tensor]):
    """Sequences that megatron-core reads, converted to tensors."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self.dataset[index].copy())


# Images with a label: tar archives and MDS shards.


def images(nbytes: int, size: int) -> Iterator[tuple[bytes, int]]:
    """Yield random bytes, as in a JPEG, of 0.5 to 1.5 times a size, each with a label."""
    numbers = np.random.default_rng(0)
    piece = numbers.bytes(2 * nbytes)
    for number, length in enumerate(
        numbers.integers(nbytes // 2, nbytes * 3 // 2, size // nbytes).tolist()
    ):
        begin = number % (len(piece) - length)
        yield piece[begin : begin + length], number % 1000


class Sequential(IterableDataset[dict[str, Any]]):
    """The first samples of archives, which WebDataset reads from the beginning."""

    def __init__(self, wds: Any, paths: list[str], count: int) -> None:
        self.wds, self.paths, self.count = wds, paths, count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        share = self.count if worker is None else self.count // worker.num_workers
        yield from itertools.islice(
            self.wds.WebDataset(self.paths, shardshuffle=False), share
        )


def tar(folder: Path, size: int, wds: Any, nbytes: int) -> Format:
    """Write four archives of images by webdataset."""
    name = f"{nbytes // 1000}KB"
    most = -(-(size // nbytes) // 4)
    with wds.ShardWriter(f"{folder}/{name}-%06d.tar", maxcount=most, verbose=0) as writer:
        for number, (image, label) in enumerate(images(nbytes, size)):
            writer.write({"__key__": f"{number:08}", "jpg": image, "cls": label})
    paths = sorted(folder.glob(f"{name}-*.tar"))
    # Save the index in another process, because memory is measured in this one.
    context = multiprocessing.get_context("fork")
    process = context.Process(target=nvmeio.torch.TarDataset, args=(paths,))
    process.start()
    process.join()
    return Format(
        f"tar, {nbytes // 1000} KB",
        ("TarDataset", "webdataset"),
        (
            lambda _: nvmeio.torch.TarDataset(paths),
            functools.partial(Sequential, wds, list(map(str, paths))),
        ),
        tuple(paths),
        nbytes,
        64,
        16 if nbytes > 50_000 else 24,
        list,
    )


def mds(folder: Path, size: int, streaming: Any, nbytes: int) -> Format:
    """Write shards of the default size by streaming."""
    out = folder / f"mds-{nbytes}"
    columns = {"image": "bytes", "label": "int"}
    with streaming.MDSWriter(out=str(out), columns=columns) as writer:
        for image, label in images(nbytes, size):
            writer.write({"image": image, "label": label})
    return Format(
        f"MDS, {nbytes // 1000} KB",
        ("MDSDataset", "streaming"),
        (
            lambda _: nvmeio.torch.MDSDataset(out),
            lambda _: streaming.LocalDataset(str(out)),
        ),
        tuple(sorted(out.glob("*.mds"))),
        nbytes,
        64,
        16 if nbytes > 50_000 else 24,
        list,
    )


@contextlib.contextmanager
def formats(folder: Path, size: int, peers: Peers) -> Iterator[list[Format]]:
    """Make all files, and remove them on exit. The array has `size` bytes, others less."""
    sys.path += map(str, INSTALLED)
    with contextlib.ExitStack() as stack:
        inside = Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(prefix="nvmeio-bench-", dir=folder)
            )
        )
        found = [array(inside, size), tokens(inside, size // 2)]
        if indexed := module(peers, "megatron.core.datasets.indexed_dataset"):
            found.append(megatron(inside, size // 4, indexed))
        if wds := module(peers, "webdataset"):
            found += [tar(inside, size // part, wds, n) for part, n in SIZES]
        if peer := module(peers, "streaming_peer"):
            found += [mds(inside, size // part, peer.streaming, n) for part, n in SIZES]
        yield found


# The share of `size` that the files of images have, and the mean size of an image.
SIZES = ((4, 100_000), (8, 5_000))


def module(peers: Peers, name: str) -> Any:
    """Return a peer's module; or return None and report it as missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        who = name.partition(".")[0].partition("_peer")[0]
        peers.leave_out(who, f"scripts/test-formats installs it: {error}")
        return None
