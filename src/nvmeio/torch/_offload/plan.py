"""Where each state lies in the files, and which of them are in memory together.

A group of parameters has a file of segments.  A segment begins with a table of one
generation for each of its slots, by which an older content is noticed; its slots follow.  A
slot has the states of one piece: a parameter, or a part of one that is large.  A window is
the segments that are in memory at once; it lies in memory as it does in the files.
"""

import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from nvmeio._arguments.units import in_binary
from nvmeio._native.file import File

__all__ = [
    "BUFFERS",
    "Budget",
    "Layout",
    "Piece",
    "Segment",
    "Window",
    "flat",
    "is_dense",
    "is_ordered_as",
    "pages",
    "segments_of",
    "windows_of",
]

# What every O_DIRECT takes; no two slots share a page.
PAGE = 4096
# More than this in a window gains no speed, and the first and the last one overlap with
# nothing.
WINDOW_BYTES = 32 << 20
# Windows that are read, updated and written at the same time.
BUFFERS = 3
# A part of a parameter begins at a multiple of so many elements, where vectors begin too.
PART_ELEMENTS = 1 << 14


def pages(nbytes: int) -> int:
    """Round a size up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def is_dense(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor has each byte between its first and its last once."""
    expected = 1
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent == 1:
            continue
        if stride != expected:
            return False
        expected = stride * extent
    return True


def is_ordered_as(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two tensors of one shape have their elements in the same order."""
    strides = zip(tensor.stride(), other.stride(), tensor.shape, strict=True)
    # autograd keeps any stride of an extent of 1.
    return all(one == two for one, two, extent in strides if extent != 1)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """View a dense tensor as its elements in the order of memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


class Budget(NamedTuple):
    """What an update may have in memory, and what it needs for a parameter of a group."""

    memory: int
    copies: int  # of the parameters, which torch makes meanwhile
    together: bool  # of all of a window's, or of one at a time

    def fits(self, states: int, sizes: Sequence[int]) -> bool:
        """Tell whether states, and parameters of these sizes, can be in memory."""
        temporary = sum(sizes) if self.together else max(sizes, default=0)
        # The first update makes the states in memory of its own.
        return (BUFFERS + 1) * states + self.copies * temporary <= self.memory


class Layout(NamedTuple):
    """The form in memory that a state had when it was written."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]


class Piece:
    """A parameter, or a part of one, and the place of its states."""

    def __init__(
        self, param: torch.Tensor, index: int, begin: int, end: int, names: Sequence[str]
    ) -> None:
        self.param, self.index = param, index
        # param.data may be replaced; the states stay as they were written.
        self.shape, self.stride = param.shape, param.stride()
        self.begin, self.end = begin, end  # in elements
        self.is_whole = end - begin == param.numel()
        self.state_bytes = (end - begin) * param.element_size()
        self.names = names
        self.slot_bytes = len(names) * pages(self.state_bytes)
        # Not a cycle, which would keep parameters until the garbage collector comes.
        self._segment: weakref.ref[Segment]
        self.slot = 0  # where in its segment the slot begins
        self.row = 0  # of the segment's table
        self.layouts: dict[str, Layout] = {}

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
        """Return where in its segment a state begins and ends."""
        begin = self.slot + self.names.index(name) * pages(self.state_bytes)
        return begin, begin + self.state_bytes


class Segment:
    """Pieces whose slots follow each other in the file of their group."""

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
        """The file that it lies in; there is none for pieces that have no states."""
        assert self._file is not None
        return self._file

    @file.setter
    def file(self, file: File) -> None:
        self._file = file

    @property
    def has_file(self) -> bool:
        """Whether there is one."""
        return self._file is not None


class Window(NamedTuple):
    """Segments that are in memory together, and where each begins there."""

    segments: list[tuple[Segment, int]]
    nbytes: int

    def pieces(self) -> Iterator[Piece]:
        """Yield all pieces."""
        for segment, _ in self.segments:
            yield from segment.pieces


def segments_of(
    group: int,
    parts: Sequence[tuple[torch.Tensor, int, bool]],
    names: Sequence[str],
    budget: Budget,
) -> list[Segment]:
    """Lay out the states of parameters: each with its index, and whether it may be split.

    Raises ValueError for a parameter that does not fit, TypeError for one that wraps
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
    """Yield which elements each part of a parameter has; only a large one has several."""
    count, itemsize = param.numel(), param.element_size()

    def fits(elements: int) -> bool:
        states = len(names) * pages(elements * itemsize)
        return budget.fits(states, [elements * itemsize])

    may_split = may_split and is_dense(param)
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
                f"{size} for its update, and memory is {in_binary(budget.memory)}; it "
                "cannot be split, for its elements, or those of its gradient, do not "
                "follow each other alike"
            )
        yield 0, count
        return
    while not fits(most) and most > PART_ELEMENTS:
        most //= 2
    most -= most % PART_ELEMENTS
    for begin in range(0, count, most):
        yield begin, min(begin + most, count)


def windows_of(segments: Sequence[Segment], budgets: Sequence[Budget]) -> list[Window]:
    """Take neighbours into one window while they fit."""
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
