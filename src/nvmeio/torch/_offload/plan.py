"""Decide where each state is in the files, and which are in memory together.

Each group of parameters has a file of segments.  A segment begins with a table that has a
generation number for each of its slots; a number that is too old shows that the slot was
overwritten with old contents.  The slots follow.  A slot has the states of one piece: a
parameter, or part of a large one.  A window is a run of segments that are in memory at the
same time, with the same layout as in the files.
"""

import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from nvmeio._arguments.units import in_binary
from nvmeio._memory.strides import is_dense
from nvmeio._native.file import File

__all__ = [
    "BUFFERS",
    "Budget",
    "Piece",
    "Segment",
    "StateLayout",
    "Window",
    "flat",
    "is_ordered_as",
    "pages",
    "segments_of",
    "windows_of",
]

# An alignment that O_DIRECT accepts on every drive; no two slots share a page.
PAGE = 4096
# Larger windows gain no speed, and the reading of the first and the writing of the last one
# overlap with nothing.
WINDOW_BYTES = 32 << 20
# One window is read, one updated and one written at the same time.
BUFFERS = 3
# Parts of a parameter begin at multiples of this many elements, so that torch's vectorized
# loops divide a part like the whole parameter.
PART_ELEMENTS = 1 << 14


def pages(nbytes: int) -> int:
    """Round a size up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def is_ordered_as(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of the same shape have the same order in memory."""
    strides = zip(tensor.stride(), other.stride(), tensor.shape, strict=True)
    # The stride of a dimension of size 1 has no meaning, and autograd keeps any.
    return all(one == two for one, two, extent in strides if extent != 1)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """View a dense tensor as one dimension, in the order of memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


class Budget(NamedTuple):
    """The memory limit of an update, and what an update needs for a group's parameters."""

    memory: int
    copies: int  # how many temporary copies of a parameter torch makes
    together: bool  # of all parameters of a window at once, or of one at a time

    def fits(self, states: int, sizes: Sequence[int]) -> bool:
        """Return whether these states fit in memory, with parameters of these sizes."""
        temporary = sum(sizes) if self.together else max(sizes, default=0)
        # One more, because the first update creates the states in torch's memory.
        return (BUFFERS + 1) * states + self.copies * temporary <= self.memory


class StateLayout(NamedTuple):
    """The dtype, shape and strides that a state had when it was written."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]


class Piece:
    """A parameter, or a part of one, and its slot."""

    def __init__(
        self, param: torch.Tensor, index: int, begin: int, end: int, names: Sequence[str]
    ) -> None:
        self.param, self.index = param, index
        # Copied, because param.data may be replaced, but the states stay as written.
        self.shape, self.stride = param.shape, param.stride()
        self.begin, self.end = begin, end  # in elements
        self.is_whole = end - begin == param.numel()
        self.state_bytes = (end - begin) * param.element_size()
        self.names = names
        self.slot_bytes = len(names) * pages(self.state_bytes)
        # Weak, because a cycle would keep parameters alive until the next garbage
        # collection.
        self._segment: weakref.ref[Segment]
        self.slot = 0  # the offset of the slot in its segment
        self.row = 0  # the index in the segment's table
        self.layouts: dict[str, StateLayout] = {}

    @property
    def segment(self) -> "Segment":
        """The segment that has its slot."""
        segment = self._segment()
        assert segment is not None
        return segment

    @segment.setter
    def segment(self, segment: "Segment") -> None:
        self._segment = weakref.ref(segment)

    def place(self, name: str) -> tuple[int, int]:
        """Return where a state begins and ends in its segment."""
        begin = self.slot + self.names.index(name) * pages(self.state_bytes)
        return begin, begin + self.state_bytes


class Segment:
    """Pieces with contiguous slots in the file of their group."""

    def __init__(self, group: int, offset: int, pieces: Sequence[Piece]) -> None:
        self.group, self.offset, self.pieces = group, offset, pieces
        self._file: File | None = None
        self.generations: npt.NDArray[np.int64] = np.zeros(len(pieces), np.int64)
        end = pages(self.generations.nbytes)
        for row, piece in enumerate(pieces):
            piece.segment, piece.slot, piece.row = self, end, row
            end += piece.slot_bytes
        self.nbytes = end
        self.states = sum(piece.slot_bytes for piece in pieces)
        self.sizes = [piece.state_bytes for piece in pieces]

    @property
    def file(self) -> File:
        """The file of the segment; segments without states have none."""
        assert self._file is not None
        return self._file

    @file.setter
    def file(self, file: File) -> None:
        self._file = file

    @property
    def has_file(self) -> bool:
        """Whether the segment has a file."""
        return self._file is not None


class Window(NamedTuple):
    """Segments that are in memory together, and the offset of each there."""

    segments: list[tuple[Segment, int]]
    nbytes: int

    def pieces(self) -> Iterator[Piece]:
        """Yield the pieces of all segments."""
        for segment, _ in self.segments:
            yield from segment.pieces


def segments_of(
    group: int,
    parts: Sequence[tuple[torch.Tensor, int, bool]],
    names: Sequence[str],
    budget: Budget,
) -> list[Segment]:
    """Lay out the states of a group's parameters in segments.

    `parts` are tuples of a parameter, its index, and whether it may be split.  Raise
    ValueError for a parameter that does not fit in memory, and TypeError for one that wraps
    other tensors.
    """
    segments: list[Segment] = []
    waiting: list[Piece] = []
    offset = 0

    def close() -> None:
        nonlocal offset
        if waiting:
            segments.append(Segment(group, offset, list(waiting)))
            offset += segments[-1].nbytes
            waiting.clear()

    for param, index, may_split in parts:
        if is_traceable_wrapper_subclass(param):
            raise TypeError(
                f"parameter {index} (group {group}) is a {type(param).__name__}; "
                "offload() takes parameters that are plain tensors"
            )
        for begin, end in _parts_of(param, index, group, may_split, names, budget):
            piece = Piece(param, index, begin, end, names)
            states = piece.slot_bytes + sum(each.slot_bytes for each in waiting)
            sizes = [piece.state_bytes, *(each.state_bytes for each in waiting)]
            if states > WINDOW_BYTES or not budget.fits(states, sizes):
                close()
            waiting.append(piece)
    close()
    return segments


def _parts_of(
    param: torch.Tensor,
    index: int,
    group: int,
    may_split: bool,
    names: Sequence[str],
    budget: Budget,
) -> Iterator[tuple[int, int]]:
    """Yield the first and last element of each part of a parameter; most have one part."""
    count, itemsize = param.numel(), param.element_size()

    def fits(elements: int) -> bool:
        states = len(names) * pages(elements * itemsize)
        return budget.fits(states, [elements * itemsize])

    may_split = may_split and is_dense(param.shape, param.stride())
    most = max(WINDOW_BYTES // max(len(names), 1) // itemsize, PART_ELEMENTS)
    if count <= most and fits(count):
        yield 0, count
        return
    if not may_split:
        if not fits(count):
            needed = (BUFFERS + 1) * len(names) + budget.copies
            size = in_binary(needed * count * itemsize)
            raise ValueError(
                f"parameter {index} (group {group}, shape {tuple(param.shape)}) needs "
                f"{size} for its update, but memory is {in_binary(budget.memory)}, and it "
                "cannot be split; raise memory, or make the parameter and its gradient "
                "contiguous"
            )
        yield 0, count
        return
    while not fits(most) and most > PART_ELEMENTS:
        most //= 2
    most -= most % PART_ELEMENTS
    for begin in range(0, count, most):
        yield begin, min(begin + most, count)


def windows_of(segments: Sequence[Segment], budgets: Sequence[Budget]) -> list[Window]:
    """Combine neighbouring segments into windows, as many as fit."""
    windows: list[Window] = []
    chosen: list[tuple[Segment, int]] = []
    end = states = 0
    sizes: list[int] = []
    for segment in segments:
        budget = budgets[segment.group]
        if chosen and (
            states + segment.states > WINDOW_BYTES
            or not all(
                each.fits(states + segment.states, [*sizes, *segment.sizes])
                for each in (budget, *(budgets[other.group] for other, _ in chosen))
            )
        ):
            windows.append(Window(chosen, end))
            chosen, end, states, sizes = [], 0, 0, []
        chosen.append((segment, end))
        end += segment.nbytes
        states += segment.states
        sizes += segment.sizes
    if chosen:
        windows.append(Window(chosen, end))
    return windows
