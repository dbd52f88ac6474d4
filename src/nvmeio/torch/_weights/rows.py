"""Rows of a table on a drive, of which those that are used stay in bounded memory."""

import contextlib
import os
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from nvmeio._safetensors.file import ModelFile
from nvmeio._streams.pending import Pending
from nvmeio._tensors.errors import SafetensorError
from nvmeio.default import default_handle
from nvmeio.torch._weights.store import Weight, naming, new_memory, over, refuse_in_child

__all__ = ["Rows"]

Ids = npt.NDArray[np.int64]

# A row may be kept in any of so many places, and replaces the one used longest ago.
WAYS = 4
# One part in so many of the memory is for rows that were prefetched and not used yet.
PREFETCHED = 4
# How many of these may wait.
PREFETCHES = 64


class _Source(NamedTuple):
    """Where rows begin in files, with the number of the first row of each run."""

    firsts: Ids
    offsets: Ids
    files: Sequence[ModelFile]
    row_bytes: int

    @staticmethod
    def of(weight: Weight) -> "_Source":
        row_bytes = weight.shape[1:].numel() * weight.stored.itemsize
        if not row_bytes:
            raise ValueError(
                f"{weight.name} has the shape {tuple(weight.shape)}; its rows are empty"
            )
        if weight.making is not None or any(
            each.place % row_bytes or each.nbytes % row_bytes for each in weight.extents
        ):
            raise ValueError(f"the rows of {weight.name} do not lie in one piece each")
        return _Source(
            np.array([each.place // row_bytes for each in weight.extents], np.int64),
            np.array([each.offset for each in weight.extents], np.int64),
            [each.file for each in weight.extents],
            row_bytes,
        )

    def gather(self, ids: Ids, out: npt.NDArray[np.uint8], pending: Pending) -> None:
        """Start to read the rows of ascending numbers, one after the other."""
        runs = self.firsts.searchsorted(ids, "right") - 1
        offsets = self.offsets[runs] + (ids - self.firsts[runs]) * self.row_bytes
        by_file: dict[ModelFile, list[tuple[int, int]]] = {}
        ends = np.flatnonzero(np.diff(runs)) + 1
        for begin, end in zip((0, *ends.tolist()), (*ends.tolist(), len(ids)), strict=True):
            by_file.setdefault(self.files[runs[begin]], []).append((begin, end))
        for file, parts in by_file.items():
            places = np.concatenate([np.arange(*part) for part in parts])
            pending.gather(
                file.file,
                offsets[places],
                self.row_bytes,
                out.reshape(-1),
                out_offsets=places * self.row_bytes,
            )


def _memory(count: int, row_bytes: int) -> npt.NDArray[np.uint8]:
    """Return memory of the pool, whose pages were touched before."""
    whole = new_memory(count * row_bytes)
    return whole[: count * row_bytes].reshape(count, row_bytes)


class _Reading:
    """Rows that are being read."""

    def __init__(self, sources: Sequence[_Source], ids: Ids) -> None:
        self.ids = ids
        self.parts = [_memory(len(ids), each.row_bytes) for each in sources]
        self.files = {file for each in sources for file in each.files}
        self.pending = Pending(default_handle())
        try:
            for source, part in zip(sources, self.parts, strict=True):
                source.gather(ids, part, self.pending)
        except BaseException:
            self.pending.abandon()
            raise

    def wait(self, weight: Weight) -> npt.NDArray[np.uint8]:
        """Wait for the rows, with their scales beside them; raise what failed."""
        try:
            with self.pending:
                self.pending.finish()
            for file in self.files:
                file.check_unchanged()
        except Exception as error:
            raise naming(weight, error) from error
        return self.parts[0] if len(self.parts) == 1 else np.concatenate(self.parts, axis=1)


class Rows:
    """The rows of a weight; `memory` is for those that stay after they were used.

    With `prefetches`, a part of it is for rows that are read before they are used.
    With `scales`, of which there are one or several for each row, the values of a row are
    multiplied by them: each by its own equal share of the row.
    """

    def __init__(
        self,
        weight: Weight,
        memory: int,
        scales: Weight | None = None,
        *,
        prefetches: bool = False,
    ) -> None:
        self.weight, self.scales = weight, scales
        self._sources = [_Source.of(each) for each in (weight, scales) if each is not None]
        self.row_bytes = sum(each.row_bytes for each in self._sources)
        # A number and a time for each row that is kept.
        self._prefetchable = max(0, memory) // PREFETCHED if prefetches else 0
        sets = (max(0, memory) - self._prefetchable) // (WAYS * (self.row_bytes + 16))
        sets = min(sets, -(-weight.shape[0] // WAYS))
        self._kept = np.empty((sets * WAYS, self.row_bytes), np.uint8)
        self._numbers = np.full((sets, WAYS), -1, np.int64)
        self._used = np.zeros((sets, WAYS), np.int64)
        self._now = 0
        self._readings: list[_Reading] = []
        self._lock, self._process = threading.Lock(), os.getpid()
        self.hits = self.misses = self.bytes_read = 0

    @property
    def nbytes(self) -> int:
        """The memory that this takes."""
        return self._kept.nbytes + self._numbers.nbytes + self._used.nbytes

    def _checked(self, ids: torch.Tensor) -> Ids:
        refuse_in_child(self._process, self.weight)
        kind = ids.dtype if isinstance(ids, torch.Tensor) else f"a {type(ids).__name__}"
        if kind not in (torch.int64, torch.int32):
            raise TypeError(f"rows are {kind}; they must be a tensor of int64 or int32")
        ids = ids.detach().cpu()
        found: Ids = np.sort(ids.numpy().astype(np.int64, copy=False), axis=None)
        # np.unique() takes five times as long for some thousand.
        found = found[np.diff(found, prepend=found[:1] - 1) != 0]
        for number in (found[0], found[-1]) if len(found) else ():
            if not 0 <= number < self.weight.shape[0]:
                raise IndexError(
                    f"row {number} is out of range: {self.weight.name} has "
                    f"{self.weight.shape[0]}"
                )
        return found

    def read(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows by their numbers, which may be in a tensor of any shape."""
        wanted = self._checked(ids)
        device = self.weight.device
        if device.type == "cpu":
            device = ids.device
        ids = ids.detach().cpu()
        if not len(wanted):
            shape = (*ids.shape, *self.weight.shape[1:])
            return torch.empty(shape, dtype=self.weight.dtype, device=device)
        with self._lock:
            rows = self._read(wanted)
        found = self._converted(rows)
        numbers = ids.reshape(-1).long().contiguous()
        known = torch.from_numpy(wanted)
        if not torch.equal(known, numbers):
            if found.dtype.itemsize == 1:
                # Torch 2.9 cannot index float8 on the CPU.
                found = found.view(torch.uint8)
            found = found[torch.searchsorted(known, numbers)].view(self.weight.dtype)
        return found.view(*ids.shape, *self.weight.shape[1:]).to(device)

    def prefetch(self, ids: torch.Tensor) -> None:
        """Start to read rows that are read next, as far as there is memory for them."""
        wanted = self._checked(ids)
        with self._lock:
            missing = wanted[~self._find(wanted)[1]]
            for reading in self._readings:
                missing = missing[~np.isin(missing, reading.ids, assume_unique=True)]
            if not len(missing):
                return
            room = self._prefetchable // max(1, self.row_bytes) - len(missing)
            while self._readings and (
                sum(len(each.ids) for each in self._readings) > room
                or len(self._readings) >= PREFETCHES
            ):
                # Nobody has used it so far; if it has failed, the call reads it again.
                oldest = self._readings.pop(0)
                with contextlib.suppress(OSError, SafetensorError):
                    self._keep(oldest.ids, oldest.wait(self.weight))
            if room >= 0:
                # If this fails, the call fails too, or does not.
                with contextlib.suppress(OSError):
                    self._readings.append(self._start(missing))

    def _start(self, ids: Ids) -> _Reading:
        try:
            found = _Reading(self._sources, ids)
        except OSError as error:
            raise naming(self.weight, error) from error
        self.bytes_read += len(ids) * self.row_bytes
        return found

    def _find(self, ids: Ids) -> tuple[Ids, npt.NDArray[np.bool_]]:
        """Return where rows are kept, and whether they are."""
        if not len(self._numbers):
            return np.zeros(len(ids), np.int64), np.zeros(len(ids), np.bool_)
        sets = ids % len(self._numbers)
        same = self._numbers[sets] == ids[:, None]
        return sets * WAYS + same.argmax(axis=1), same.any(axis=1)

    def _read(self, ids: Ids) -> npt.NDArray[np.uint8]:
        places, kept = self._find(ids)
        self._now += 1
        missing = ~kept
        parts: list[tuple[npt.NDArray[np.bool_], npt.NDArray[np.uint8]]] = []
        done = []
        for reading in self._readings:
            came = np.isin(ids, reading.ids, assume_unique=True) & missing
            if came.any():
                self._readings = [each for each in self._readings if each is not reading]
                try:
                    rows = reading.wait(self.weight)
                except (OSError, SafetensorError):
                    # They are read again, which raises the error if it is still there.
                    continue
                done.append((reading.ids, rows))
                parts.append((came, rows[reading.ids.searchsorted(ids[came])]))
                missing &= ~came
        count = int(missing.sum())
        self.hits += len(ids) - count
        self.misses += count
        if count:
            read = self._start(ids[missing]).wait(self.weight)
            parts.append((missing, read))
        if count == len(ids):
            rows = read
        else:
            rows = _memory(len(ids), self.row_bytes)
            rows[kept] = self._kept[places[kept]]
            self._used.reshape(-1)[places[kept]] = self._now
            for chosen, part in parts:
                rows[chosen] = part
        for each in done:
            self._keep(*each)
        if count:
            self._keep(ids[missing], read)
        return rows

    def _keep(self, ids: Ids, rows: npt.NDArray[np.uint8]) -> None:
        """Keep rows, each in place of the one of its set that was used longest ago."""
        if not len(self._numbers):
            return
        kept = self._find(ids)[1]
        if kept.any():
            ids, rows = ids[~kept], rows[~kept]
        if not len(ids):
            return
        for _ in range(WAYS):
            # One for each set at a time, as if an index came once.
            sets, first = np.unique(ids % len(self._numbers), return_index=True)
            ways = self._used[sets].argmin(axis=1)
            # Ctrl-C may come between: no number may stand for another row.
            self._numbers[sets, ways] = -1
            self._kept[sets * WAYS + ways] = rows[first]
            self._used[sets, ways] = self._now
            self._numbers[sets, ways] = ids[first]
            ids, rows = np.delete(ids, first), np.delete(rows, first, axis=0)
            if not len(ids):
                break

    def _converted(self, rows: npt.NDArray[np.uint8]) -> torch.Tensor:
        count, width = len(rows), self._sources[0].row_bytes
        shape = (count, *self.weight.shape[1:])
        values = over(np.ascontiguousarray(rows[:, :width]), self.weight.stored, shape)
        if self.scales is None:
            return values.to(self.weight.dtype)
        shape = (count, -1) if self.scales.shape[1:] else (count, 1)
        # ascontiguousarray() would leave a single row its stride, which may be an odd one.
        raw = rows[:, width:].copy()
        scales = torch.from_numpy(raw).view(self.scales.stored).view(shape).float()
        scaled = values.float().view(count, scales.shape[1], -1) * scales[:, :, None]
        return scaled.view_as(values).to(self.weight.dtype)

    def stats(self) -> Mapping[str, int]:
        """Return what was read and kept."""
        with self._lock:
            return {
                "hits": self.hits,
                "misses": self.misses,
                "bytes_read": self.bytes_read,
                "bytes_used": self.nbytes,
            }
