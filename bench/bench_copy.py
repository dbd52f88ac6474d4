"""Compare nvmeio.memcpy with other ways to copy arrays and tensors.

It takes turns with numpy.copyto and memmove on arrays, with Tensor.copy_ on tensors, and
with DeepSpeed's op if that is installed.  bench/README.md explains the tables and their
results.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from comparisons import Comparison, Goal, Sample, compare, measured, surroundings
from machine import argument_parser, size_of
from peers import Peers, deepspeed_op
from report import finish, size_name

import nvmeio
from nvmeio._native import settings

KIB, MIB = 1 << 10, 1 << 20
SIZES = [4 * KIB << 2 * step for step in range(10)]
QUICK_SIZES = [4 * KIB, MIB, 64 * MIB]
# A turn copies this many bytes, but makes at least one copy.
TURN_BYTES = 32 * MIB

# The goals: FLOOR at any size, and a higher one beside torch on one thread, from this size.
FLOOR = 0.95
LARGE_BYTES = 64 * MIB
LARGE_SPEED = 1.3
# Up to this size, calling takes longer than copying.
SMALL_BYTES = 4 * KIB
SMALL_SPEED = 1.0

Copy = Callable[[Any, Any], object]

LIBC = ctypes.CDLL(None, use_errno=True)
_memmove = LIBC.memmove
_memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def memmove(dest: Any, src: Any) -> None:
    """Copy an array by memmove of the C library."""
    _memmove(dest.ctypes.data, src.ctypes.data, dest.nbytes)


def copy_tensor(dest: torch.Tensor, src: torch.Tensor) -> None:
    """Copy a tensor by torch."""
    dest.copy_(src)


def deepspeed_copy(peers: Peers) -> Copy | None:
    """Return DeepSpeed's op, or None if it is not installed or does not compile."""
    try:
        return deepspeed_op().deepspeed_memcpy
    except (ImportError, RuntimeError, AttributeError) as error:
        peers.leave_out("DeepSpeed", str(error).splitlines()[0])
        return None


def turn(
    copy: Copy, dest: Any, src: Any, nbytes: int, threads: int
) -> Callable[[], Sample]:
    """Return a turn of copies into memory that was written before."""
    repeats = max(1, TURN_BYTES // nbytes)

    def work() -> int:
        for _ in range(repeats):
            copy(dest, src)
        return repeats * nbytes

    def take() -> Sample:
        # This limits nvmeio too, because it uses no more threads than torch would.
        torch.set_num_threads(threads)
        # Waking the other thread takes longer than a small copy, and the first
        # candidate would pay for both.
        for _ in range(repeats // 10):
            copy(dest, src)
        return measured(work)

    return take


def forget(memory: Any) -> None:
    """Return the pages of memory to the system, because an allocator may have used them."""
    array = memory.numpy() if isinstance(memory, torch.Tensor) else memory
    first = -(-array.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (array.ctypes.data + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    size = ctypes.c_size_t(end - first)
    if LIBC.madvise(ctypes.c_void_p(first), size, mmap.MADV_DONTNEED):
        raise OSError("madvise() did not return the pages to the system")


def fresh_turn(copy: Copy, src: Any, nbytes: int, threads: int) -> Callable[[], Sample]:
    """Return a turn of one copy into memory that was never touched."""

    def take() -> Sample:
        torch.set_num_threads(threads)
        if isinstance(src, torch.Tensor):
            dest = torch.empty_like(src)
        else:
            dest = np.empty_like(src)
        forget(dest)

        def work() -> int:
            copy(dest, src)
            return nbytes

        return measured(work)

    return take


def comparison(
    nbytes: int, what: str, beside: str, turns: Any, limit: float | None
) -> Comparison:
    """Make a comparison of memcpy with another copy."""
    goals = () if limit is None else (Goal("speed", limit),)
    return Comparison(
        f"{size_name(nbytes)}, {what}", ("memcpy", beside), turns, False, goals
    )


def comparisons_at(
    nbytes: int, arrays: Any, pages: Any, native: Copy | None
) -> Iterator[Comparison]:
    """Yield the comparisons of one size; `pages` begins at a page."""
    tensors = tuple(torch.from_numpy(array).view(torch.float32) for array in arrays)

    def pair(copy: Copy, memory: Any, threads: int) -> Any:
        return tuple(turn(way, *memory, nbytes, threads) for way in (nvmeio.memcpy, copy))

    what = "arrays, 1 thread"
    yield comparison(nbytes, what, "copyto", pair(np.copyto, arrays, 1), FLOOR)
    yield comparison(nbytes, what, "memmove", pair(memmove, arrays, 1), None)
    what = "arrays, from a page to 16 bytes after one, 1 thread"
    apart = arrays[0], pages[:nbytes]
    yield comparison(nbytes, what, "copyto", pair(np.copyto, apart, 1), FLOOR)
    limit = LARGE_SPEED if nbytes >= LARGE_BYTES else FLOOR
    limit = SMALL_SPEED if nbytes <= SMALL_BYTES else limit
    what = "tensors, 1 thread"
    yield comparison(nbytes, what, "copy_", pair(copy_tensor, tensors, 1), limit)
    if nbytes <= SMALL_BYTES:
        what = "a tensor into a Parameter, 1 thread"
        mixed = (torch.nn.Parameter(tensors[0], requires_grad=False), tensors[1])
        yield comparison(nbytes, what, "copy_", pair(copy_tensor, mixed, 1), SMALL_SPEED)
    what = "tensors, 2 threads"
    yield comparison(nbytes, what, "copy_", pair(copy_tensor, tensors, 2), FLOOR)
    if native:
        yield comparison(nbytes, what, "DeepSpeed", pair(native, tensors, 2), None)
    if nbytes >= MIB:
        what = "never-touched destination, 1 thread"
        for beside, copy, src in (
            ("copyto", np.copyto, arrays[1]),
            ("copy_", copy_tensor, tensors[1]),
        ):
            turns = tuple(fresh_turn(w, src, nbytes, 1) for w in (nvmeio.memcpy, copy))
            yield comparison(nbytes, what, beside, turns, FLOOR)


def all_comparisons(sizes: list[int], native: Copy | None) -> list[Comparison]:
    """Make all comparisons, on one pair of arrays."""
    source = np.random.default_rng(1).integers(0, 255, max(sizes), np.uint8)
    # Where numpy allocates large arrays.
    target = shifted(16, len(source))
    pages = shifted(0, len(source))
    return [
        found
        for nbytes in sizes
        for found in comparisons_at(
            nbytes, (target[:nbytes], source[:nbytes]), pages, native
        )
    ]


def shifted(nbytes: int, size: int) -> Any:
    """Return an array that begins this many bytes after a page."""
    memory = np.ones(size + 2 * mmap.PAGESIZE, np.uint8)
    begin = (nbytes - memory.ctypes.data) % mmap.PAGESIZE
    return memory[begin : begin + size]


def main() -> None:
    """Measure and report. The results never change the exit status."""
    parser = argument_parser(__doc__, (9, 3))
    words = "size of the largest copy (1G; with --quick 64M)"
    parser.add_argument("--largest", type=size_of, help=words)
    options = parser.parse_args()
    sizes = QUICK_SIZES if options.quick else SIZES
    sizes = [size for size in sizes if size <= (options.largest or max(sizes))]
    rounds = options.rounds or (3 if options.quick else 9)
    peers = Peers()
    found = all_comparisons(sizes, deepspeed_copy(peers))
    about = {**surroundings(), "rounds": rounds}
    about["kernels, small and large"] = ", ".join(settings.selected_kernels())
    compare(found, rounds)
    finish("copy", about, found, peers.left_out, options.json)


if __name__ == "__main__":
    main()
