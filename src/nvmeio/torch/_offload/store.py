"""Store an optimizer's states in files, and move them through a ring of buffers."""

import contextlib
import os
import re
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from nvmeio._arguments.types import Path
from nvmeio._files.folders import make_folders
from nvmeio._files.paths import absolute_folder, leads_to
from nvmeio._memory.heap import give_back
from nvmeio._memory.strides import is_dense
from nvmeio._native.file import File, owned
from nvmeio._native.handle import Handle
from nvmeio._native.request import Request
from nvmeio._publish.files import show_use
from nvmeio._publish.locks import FolderLock
from nvmeio._publish.names import OwnerOf, remove_left, temporary_name
from nvmeio._streams.pending import Item, Pending
from nvmeio._streams.writing import reserve
from nvmeio.torch._bits import opaque
from nvmeio.torch._offload.plan import (
    BUFFERS,
    Piece,
    Segment,
    StateLayout,
    Window,
    flat,
    is_ordered_as,
    pages,
)
from nvmeio.torch.memory import empty

__all__ = ["Part", "Store", "View", "parts_of"]

# The limit of writes in flight while states are stored one by one.
IN_FLIGHT_BYTES = 16 << 20

_LOCK, _LOCK_OF = ".nvmeio-offload-lock", ("offload()", "offloads an optimizer")
# The names in the temporary ones, which the files keep.
_STATES = re.compile(r"group-\d+\.states")

# A piece, and its part of each state, by name.
Part = tuple[Piece, Mapping[str, torch.Tensor]]
# Returns the memory of a piece's state in the window that is in memory.
View = Callable[[Piece, str, StateLayout], torch.Tensor]


class Store:
    """States in the files of a folder, which is locked against other users."""

    def __init__(self, folder: Path) -> None:
        self.folder = absolute_folder("folder", folder)
        make_folders(self.folder, sync=False)
        self._lock = FolderLock(self.folder, _LOCK, *_LOCK_OF)
        self._lock.take()
        self.handle = Handle()
        self._files: list[File] = []
        self._ring: list[torch.Tensor] = []
        # How long all steps have waited for the drive, in seconds.
        self.waited = 0.0
        self.close = weakref.finalize(
            self, _close, self.folder, self._files, self.handle, self._lock
        )
        try:
            # States of a process that has ended are useless without its parameters.
            _clear(self.folder)
        except BaseException:
            self.close()
            raise

    @property
    def is_ours(self) -> bool:
        """Whether the files belong to this process; a forked child has no lock."""
        return self._lock.descriptor >= 0

    def require_lock(self) -> None:
        """Raise BlockingIOError if the folder has another user by now."""
        self._lock.take()

    def make_file(self, group: int, segments: Sequence[Segment]) -> None:
        """Create a file for a group's segments, and allocate its space."""
        if not any(segment.states for segment in segments):
            return
        self._lock.take()
        size = segments[-1].offset + segments[-1].nbytes
        path = temporary_name(os.path.join(self.folder, f"group-{group}.states"))
        file = owned(File(path, "x"))
        show_use(file)
        self._files.append(file)
        for segment in segments:
            segment.file = file
        reserve(file, size, path)
        file.truncate(size)

    def keep(self, groups: Iterable[Sequence[Segment]]) -> None:
        """Remove all files except those of these segments."""
        kept = {each.file for segments in groups for each in segments if each.has_file}
        for file in [each for each in self._files if each not in kept]:
            _remove(file)
            self._files.remove(file)

    @property
    def nbytes(self) -> int:
        """The size of all files."""
        return sum(file.size for file in self._files)

    # A step.

    def walk(
        self,
        windows: Sequence[Window],
        is_active: Callable[[Piece], bool],
        update: Callable[[Window, View], object],
    ) -> None:
        """Update each window in memory, while the next is read and the previous written."""
        nbytes = max((window.nbytes for window in windows), default=0)
        memory = self._memory(nbytes, min(BUFFERS, len(windows)))
        buffers = [np.asarray(each.numpy()) for each in memory]
        # For each buffer, the last request that uses it.
        last: list[Request | None] = [None] * BUFFERS
        written = _written_and(is_active)

        with self._stream() as pending:

            def begin_read(number: int) -> None:
                turn = number % BUFFERS
                items = self._items(windows[number], memory[turn], written)
                if items:
                    last[turn] = pending.read_many(items, after=last[turn])

            for number in range(min(BUFFERS - 1, len(windows))):
                begin_read(number)
            for number, window in enumerate(windows):
                if number + BUFFERS - 1 < len(windows):
                    begin_read(number + BUFFERS - 1)
                turn = number % BUFFERS
                if (request := last[turn]) is not None:
                    with self._waiting():
                        pending.wait_for(request)
                self._check(window, buffers[turn], written)
                update(window, _viewer(window, memory[turn]))
                self._stamp(window, buffers[turn], is_active)
                items = self._items(window, memory[turn], is_active)
                last[turn] = pending.write_many(items) if items else None
            with self._waiting():
                pending.finish()

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Add the time that a step waits to ``waited``."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.waited += time.perf_counter() - begin

    @contextlib.contextmanager
    def _stream(self, limit: int | None = None) -> Iterator[Pending]:
        """Wait for all requests at the end; after an error, cancel them first."""
        try:
            with Pending(self.handle, limit) as pending:
                yield pending
        except BaseException:
            # Do not use its memory again, because a second Ctrl-C would end the waiting.
            self._ring = []
            raise

    def _memory(self, nbytes: int, count: int) -> list[torch.Tensor]:
        if len(self._ring) < count or any(len(each) < nbytes for each in self._ring):
            self._ring = []
            pinned = torch.cuda.is_available()
            self._ring = [
                empty(nbytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(count)
            ]
        return self._ring

    def _items(
        self, window: Window, memory: torch.Tensor, wanted: Callable[[Piece], bool]
    ) -> list[Item]:
        """Return the transfers of a window's wanted pieces, with neighbours merged."""
        items: list[Item] = []
        for segment, place in window.segments:
            runs: list[tuple[int, int]] = []
            for piece in segment.pieces:
                if not (piece.slot_bytes and wanted(piece)):
                    continue
                runs = runs or [(0, pages(segment.generations.nbytes))]
                end = piece.slot + piece.slot_bytes
                if runs[-1][1] == piece.slot:
                    runs[-1] = (runs[-1][0], end)
                else:
                    runs.append((piece.slot, end))
            for begin, end in runs:
                part = memory[place + begin : place + end]
                items.append((part, segment.file, segment.offset + begin))
        return items

    def _check(
        self, window: Window, found: npt.NDArray[np.uint8], wanted: Callable[[Piece], bool]
    ) -> None:
        for segment, place in window.segments:
            table = found[place : place + segment.generations.nbytes].view(np.int64)
            self._compare(segment, table, [each for each in segment.pieces if wanted(each)])

    def _compare(
        self, segment: Segment, table: npt.NDArray[np.int64], pieces: Iterable[Piece]
    ) -> None:
        """Raise RuntimeError if states are not those that were written last."""
        for piece in pieces:
            expected, said = segment.generations[piece.row], table[piece.row]
            if piece.slot_bytes and said != expected:
                path = os.fsdecode(segment.file.path)
                raise RuntimeError(
                    f"{path} has generation {said} of the states of parameter "
                    f"{piece.index}, not {expected}: another program has changed the file"
                )

    def _stamp(
        self,
        window: Window,
        content: npt.NDArray[np.uint8],
        is_active: Callable[[Piece], bool],
    ) -> None:
        for segment, place in window.segments:
            for piece in segment.pieces:
                if is_active(piece):
                    segment.generations[piece.row] += 1
            end = place + segment.generations.nbytes
            content[place:end] = segment.generations.view(np.uint8)

    # One state after the other.

    def load(
        self, pieces: Sequence[Piece], names: Sequence[str]
    ) -> dict[str, torch.Tensor]:
        """Return states of a parameter, in new memory."""
        return self.load_all([(pieces, names)])[0]

    def load_all(
        self, wanted: Sequence[tuple[Sequence[Piece], Sequence[str]]]
    ) -> list[dict[str, torch.Tensor]]:
        """Return states of many parameters, read at the same time."""
        all_found = [
            {name: _empty(pieces, name) for name in names} for pieces, names in wanted
        ]
        self._load_into(
            (pieces, {name: flat(tensor) for name, tensor in found.items()}, 0)
            for (pieces, _), found in zip(wanted, all_found, strict=True)
        )
        return [
            {name: tensor.to(pieces[0].param.device) for name, tensor in found.items()}
            for (pieces, _), found in zip(wanted, all_found, strict=True)
        ]

    def _load_into(
        self, wanted: Iterable[tuple[Sequence[Piece], Mapping[str, torch.Tensor], int]]
    ) -> None:
        """Read states of parameters, each from an element on."""
        with self._stream() as pending:
            checks = [self._begin_load(pending, *each) for each in wanted]
        for check in checks:
            check()

    def _begin_load(
        self,
        pending: Pending,
        pieces: Sequence[Piece],
        targets: Mapping[str, torch.Tensor],
        first: int,
    ) -> Callable[[], object]:
        """Start reading states from element `first` on; return a function that checks."""
        items: list[Item] = []
        tables: dict[Segment, npt.NDArray[np.int64]] = {}
        read: list[Piece] = []
        for piece in pieces:
            segment = piece.segment
            for name, target in targets.items():
                begin = max(piece.begin, first)
                end = min(piece.end, first + len(target))
                if begin >= end:
                    continue
                place = segment.offset + piece.place(name)[0]
                place += (begin - piece.begin) * target.itemsize
                items.append((target[begin - first : end - first], segment.file, place))
                read.append(piece)
                if segment not in tables:
                    tables[segment] = np.empty_like(segment.generations)
                    items.append((tables[segment], segment.file, segment.offset))
        if items:
            pending.read_many(items)

        def check() -> None:
            for segment, table in tables.items():
                self._compare(segment, table, [p for p in read if p.segment is segment])

        return check

    def moved(
        self, old: Sequence[Piece], new: Sequence[Piece], names: Sequence[str]
    ) -> Iterator[Part]:
        """Read states from their old slots, as parts for the new ones."""
        alike = old[0].stride == new[0].stride
        if old[0].is_whole or new[0].is_whole or not alike:
            yield from parts_of(new, self.load(old, names))
            return
        dtypes = {name: old[0].layouts[name].dtype for name in names}
        for piece in new:
            count = piece.end - piece.begin
            found = {
                name: torch.empty(count, dtype=dtype, device="cpu")
                for name, dtype in dtypes.items()
            }
            self._load_into([(old, found, piece.begin)])
            yield piece, found

    def put(self, parts: Iterable[Part]) -> None:
        """Write states; each part has all states of its piece."""
        touched: dict[Segment, None] = {}
        freed = 0
        with self._stream(IN_FLIGHT_BYTES) as pending:
            for piece, values in parts:
                segment = piece.segment
                items: list[Item] = []
                for name, part in values.items():
                    piece.layouts[name] = StateLayout(part.dtype, part.shape, part.stride())
                    if piece.state_bytes:
                        place = segment.offset + piece.place(name)[0]
                        items.append((flat(part), segment.file, place))
                if not items:
                    continue
                touched[segment] = None
                segment.generations[piece.row] += 1
                pending.write_many(items)
                if pending.done - freed > IN_FLIGHT_BYTES:
                    freed = pending.done
                    give_back()
            tables = [(each.generations, each.file, each.offset) for each in touched]
            if tables:
                pending.write_many(tables)


def parts_of(pieces: Sequence[Piece], states: Mapping[str, torch.Tensor]) -> Iterator[Part]:
    """Yield the states of a parameter, cut into its pieces."""
    for piece in pieces:
        yield (
            piece,
            {name: _part_of(piece, value.detach()) for name, value in states.items()},
        )


def _written_and(is_active: Callable[[Piece], bool]) -> Callable[[Piece], bool]:
    return lambda piece: bool(piece.layouts) and is_active(piece)


def _viewer(window: Window, memory: torch.Tensor) -> View:
    places = {id(segment): place for segment, place in window.segments}

    def view(piece: Piece, name: str, layout: StateLayout) -> torch.Tensor:
        begin, end = piece.place(name)
        place = places[id(piece.segment)]
        part = memory[place + begin : place + end].view(layout.dtype)
        return part.as_strided(layout.shape, layout.stride)

    return view


def _empty(pieces: Sequence[Piece], name: str) -> torch.Tensor:
    """Allocate a tensor with the dtype, shape and strides of a parameter's state."""
    dtype, shape, stride = pieces[0].layouts[name]
    if not pieces[0].is_whole:
        shape, stride = pieces[0].shape, pieces[0].stride
    return torch.empty_strided(shape, stride, dtype=dtype, device="cpu")


def _part_of(piece: Piece, value: torch.Tensor) -> torch.Tensor:
    """Return a piece's part of a state, in the parameter's order in memory."""
    if piece.is_whole:
        # Fused updates walk through the memory of parameters and states side by side.
        ordered = torch.empty_strided(
            piece.shape, piece.stride, dtype=value.dtype, device="cpu"
        )
        alike = value.shape == piece.shape and not is_ordered_as(value, ordered)
        if alike and is_dense(piece.shape, piece.stride):
            return ordered.copy_(value)
        value = value.cpu()
        return value if is_dense(value.shape, value.stride()) else value.contiguous()
    if value.stride() == piece.stride:
        return flat(value)[piece.begin : piece.end].cpu()
    # numpy's flat iterator copies only the part; as bits, because numpy lacks bfloat16.
    order = sorted(range(value.ndim), key=piece.stride.__getitem__, reverse=True)
    bits = opaque(value.cpu()).permute(order).numpy()
    return torch.from_numpy(bits.flat[piece.begin : piece.end]).view(value.dtype)


def _remove(file: File) -> None:
    """Close a file and remove it."""
    if not file.closed:
        _remove_name(file)
        _drop(file)


def _remove_name(file: File) -> None:
    """Remove a file's name, unless it belongs to another file by now."""
    with contextlib.suppress(FileNotFoundError):
        if leads_to(file.path, file.fileno(), follow=False):
            os.unlink(file.path)


def _drop(file: File) -> None:
    """Close a file that has no name any more, so that nobody misses its bytes."""
    with contextlib.suppress(OSError):
        file.close()


def _clear(folder: str) -> None:
    """Remove the files of states of dead processes in a folder, which is locked."""

    def is_ours(found: OwnerOf) -> bool:
        return found["name"] == _LOCK or _STATES.fullmatch(found["name"]) is not None

    _, failed = remove_left(folder, is_ours)
    if failed is not None:
        raise failed


def _close(folder: str, files: list[File], handle: Handle, lock: FolderLock) -> None:
    """Remove all files and release the lock; in a forked child, do nothing."""
    if lock.descriptor < 0:
        return
    # First, because Ctrl-C may end the rest; then by pattern, because after an earlier
    # Ctrl-C there may be files that are not in the list.
    if lock.has_name:
        for file in files:
            _remove_name(file)
        _clear(folder)
    handle.close()
    while files:
        _drop(files.pop())
    lock.release()
