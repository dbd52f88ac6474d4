"""The file and the memory that the candidates of bench_transfer.py share."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import mmap
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from comparisons import Sample, measured

import nvmeio

__all__ = ["Move", "Scratch", "make_scratch", "pieces", "scattered", "small_pages", "whole"]

Move = Callable[[], Sample]


@dataclasses.dataclass
class Scratch:
    """The file and the memory that candidates share.

    Attributes
    ----------
    path : Path
        The file, written once and synced.
    file : nvmeio.File
        The same file, open for reading and writing, past the page cache.
    descriptor : int
        The same file, open with O_DIRECT.
    pool, ordinary : torch.Tensor
        As many bytes as the file has, with every page touched: from
        new_cpu_locked_tensor, and allocated by torch, in pages of 4 KiB.
    """

    path: Path
    file: nvmeio.File
    descriptor: int
    pool: torch.Tensor
    ordinary: torch.Tensor


def whole(
    handle: nvmeio.Handle,
    scratch: Scratch,
    op: str,
    buffer: torch.Tensor,
    passes: int = 1,
) -> Move:
    """Return a turn that moves a buffer in one request, several times."""
    submit = handle.submit_read if op == "read" else handle.submit_write
    return lambda: measured(
        lambda: sum(submit(buffer, scratch.file).wait() for _ in range(passes))
    )


def pieces(
    handle: nvmeio.Handle, scratch: Scratch, op: str, buffer: torch.Tensor, size: int
) -> Move:
    """Return a turn that submits a request for each piece of a buffer, then waits."""
    submit = handle.submit_read if op == "read" else handle.submit_write
    views = list(enumerate(buffer.split(size)))

    def work() -> int:
        requests = [submit(view, scratch.file, index * size) for index, view in views]
        return sum(request.wait() for request in requests)

    return lambda: measured(work)


def scattered(read: Callable[[int], Any], scratch: Scratch, count: int, size: int) -> Move:
    """Return a turn of synchronous reads at random offsets, by `read(offset)`."""
    generator = random.Random()
    last = scratch.pool.nbytes // size - 1

    def turn() -> Sample:
        offsets = [size * generator.randint(0, last) for _ in range(count)]

        def work() -> int:
            for offset in offsets:
                read(offset)
            return count * size

        return measured(work)

    return turn


def small_pages(nbytes: int) -> torch.Tensor:
    """Return an ordinary tensor in pages of 4 KiB, all touched."""
    tensor = torch.empty(nbytes, dtype=torch.uint8)
    first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (tensor.data_ptr() + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first:
        # torch does not ask for huge pages, but some systems use them for all memory.
        libc = ctypes.CDLL(None)
        size = ctypes.c_size_t(last - first)
        libc.madvise(ctypes.c_void_p(first), size, mmap.MADV_NOHUGEPAGE)
    return tensor.fill_(1)


@contextlib.contextmanager
def make_scratch(folder: Path, size: int) -> Iterator[Scratch]:
    """Make the file and the memory, and remove the file on exit."""
    with contextlib.ExitStack() as stack:
        inside = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="nvmeio-bench-", dir=folder)
        )
        path = Path(inside, "file")
        pool = nvmeio.torch.empty(size, dtype=torch.uint8, pin_memory=True)
        pool.random_(0, 256)
        nvmeio.write_file(pool, path, sync=True)
        file = stack.enter_context(nvmeio.File(path, "r+", direct=True))
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        stack.callback(os.close, descriptor)
        yield Scratch(path, file, descriptor, pool, small_pages(size).copy_(pool))
