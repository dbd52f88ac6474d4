"""Read pieces of files ahead: into one new region of memory, or in order through stages."""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from nvmeio._native.file import File
from nvmeio._native.pool import require_available
from nvmeio._native.region import Region
from nvmeio._native.request import Request
from nvmeio._streams.memory import Bytes, memory
from nvmeio._streams.pending import Pending
from nvmeio._streams.progress import Progress
from nvmeio.default import default_handle

__all__ = ["FILES_MAX", "Records", "Start", "in_pieces", "into_region", "max_gap"]
__all__ += ["place", "read"]

Made = TypeVar("Made")
# Starts reads.
Start = Callable[[Pending], object]
Integers = npt.NDArray[np.int64]

# How many files are open at once for reading.
FILES_MAX = 128
# How much memory is populated at a time, while the chunk before is being read.
CHUNK_BYTES = 32 << 20
PAGE = 4096
# Below this size, checking the available memory would take longer than reading.
CHECKED_BYTES = 16 << 20
# Runs shorter than this are read together with larger gaps between them.
SHORT_BYTES = 2048


class Records(NamedTuple):
    """Ranges of files and their places in memory, which ascend; none is empty."""

    files: Sequence[File]
    file: Integers  # the index in `files`, for each record
    offset: Integers  # in the file
    nbytes: Integers
    place: Integers  # in memory


def place(
    file: Integers, offset: Integers, nbytes: Integers, align: int = 1
) -> tuple[Integers, int, int]:
    """Assign places in memory to ranges of files, congruent with the files.

    Return where each begins, the total size, and the phase: the address of the memory
    modulo a page.  Each address is a multiple of `align`, congruent or not.
    """
    if not offset.size:
        return np.empty(0, np.int64), 0, 0
    phase = int(offset[0] // align * align % PAGE)
    follows = (file[1:] == file[:-1]) & (offset[1:] == offset[:-1] + nbytes[:-1])
    # Neighbours in a file stay neighbours in memory; every other range begins a run.
    first = np.concatenate([[True], ~follows])
    run = np.cumsum(first) - 1
    begins = np.flatnonzero(first)
    taken = (nbytes + align - 1) // align * align
    before = np.cumsum(taken) - taken
    sizes = np.add.reduceat(taken, begins)
    starts = np.empty(len(begins), np.int64)
    end = phase
    runs = zip((offset[begins] // align * align).tolist(), sizes.tolist(), strict=True)
    for index, (start, size) in enumerate(runs):
        end += (start - end) % PAGE
        starts[index] = end - phase
        end += size
    return starts[run] + before - before[begins][run], end - phase, phase


def into_region(
    records: Records, total: int, phase: int, what: str
) -> tuple[Region, Start]:
    """Allocate memory, and return it with a function that starts the reads into it.

    The memory of a chunk is populated while the chunks before it are being read.
    """
    if total >= CHECKED_BYTES:
        require_available(total, what)
    region = Region(total, phase)
    return region, partial(_start, _cut(_joined(records)), region)


def _joined(records: Records) -> Records:
    """Merge records that are neighbours both in a file and in memory."""
    files, file, offset, nbytes, places = records
    follows = file[1:] == file[:-1]
    follows &= offset[1:] == offset[:-1] + nbytes[:-1]
    follows &= places[1:] == places[:-1] + nbytes[:-1]
    begins = np.flatnonzero(np.concatenate([[True], ~follows]))
    sizes = np.add.reduceat(nbytes, begins)
    return Records(files, file[begins], offset[begins], sizes, places[begins])


def _cut(records: Records) -> Records:
    """Cut records longer than a chunk, at page boundaries of their files."""
    files, file, offset, nbytes, places = records
    ragged = offset % PAGE
    counts = (ragged + nbytes + CHUNK_BYTES - 1) // CHUNK_BYTES
    part = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    whole = np.repeat(np.arange(len(counts)), counts)
    low = np.maximum(part * CHUNK_BYTES - ragged[whole], 0)
    high = np.minimum((part + 1) * CHUNK_BYTES - ragged[whole], nbytes[whole])
    return Records(files, file[whole], offset[whole] + low, high - low, places[whole] + low)


def _start(records: Records, region: Region, pending: Pending) -> None:
    """Populate memory and start reads, chunk by chunk."""
    files, file, offset, nbytes, places = records
    whole = memoryview(region)
    # Counted from a page boundary, as in _cut(); else the first two would be one chunk.
    before = np.cumsum(nbytes) - nbytes + offset[0] % PAGE
    # All records that begin in the same CHUNK_BYTES of the total form a chunk.
    edges = np.flatnonzero(np.diff(before // CHUNK_BYTES, prepend=-1, append=-1))
    for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        first, end = int(places[low]), int(places[high - 1] + nbytes[high - 1])
        region.populate(first, end)
        # Not by np.unique(), which imports numpy.ma.
        for index in np.flatnonzero(np.bincount(file[low:high])).tolist():
            mine = low + np.flatnonzero(file[low:high] == index)
            if len(mine) == 1:
                one = int(mine[0])
                at, size = int(places[one]), int(nbytes[one])
                pending.read(whole[at : at + size], files[index], int(offset[one]))
            else:
                pending.gather(
                    files[index],
                    offset[mine],
                    nbytes[mine],
                    whole[first:end],
                    out_offsets=places[mine] - first,
                    max_gap=max_gap(int(nbytes[mine].min())),
                )


def max_gap(run_bytes: int) -> int:
    """Return the largest gap between runs of this length that is read too.

    It is larger for short runs: many small reads take longer than the extra bytes.
    """
    return 4096 if run_bytes < SHORT_BYTES else 512


def read(
    start: Start, total: int, progress: Progress | None, meanwhile: Callable[[], Made]
) -> Made:
    """Start reads, call `meanwhile`, wait for the reads, and return its result.

    After an error none of the reads is in flight.
    """
    landed = None if progress is None else lambda done: progress(done, total)
    with Pending(default_handle(), landed=landed) as pending:
        start(pending)
        return meanwhile()


def in_pieces(
    file: File, nbytes: int, size: int, count: int
) -> Generator[Bytes, None, None]:
    """Yield the bytes of a file in order, while the next pieces are being read.

    Close it if not all are asked for: else the reads stay, and the file is in use.

    `count` pieces of `size` bytes are in memory; each is valid until the next is asked for.
    """
    size = min(size, max(nbytes, 1))
    places = range(0, nbytes, size)
    count = max(1, min(count, len(places)))
    stages = np.split(memory(count * size), count)
    ahead: deque[tuple[Bytes, Request]] = deque()
    with Pending(default_handle()) as pending:
        for index in range(len(places) + count):
            if index >= count:
                view, request = ahead.popleft()
                pending.wait_for(request)
                yield view
            if index < len(places):
                view = stages[index % count][: nbytes - places[index]]
                ahead.append((view, pending.read(view, file, places[index])))
