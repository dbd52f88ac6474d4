"""The index of a Megatron dataset, a .idx file beside the .bin file with the elements."""

import os
import struct

import numpy as np

from nvmeio._files.descriptors import open_regular
from nvmeio._files.kinds import because_of_kind
from nvmeio._files.paths import naming

__all__ = ["MAGIC", "MegatronIndex"]

MAGIC = b"MMIDIDX\x00\x00"
# Magic, version, code of the dtype, number of sequences, length of the document indices.
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {
    1: "uint8",
    2: "int8",
    3: "int16",
    4: "int32",
    5: "int64",
    6: "float64",
    7: "float32",
    8: "uint16",
}
# How many elements are checked at once.
_CHECKED_AT_ONCE = 1 << 20


class MegatronIndex:
    """The contents of a .idx file, mapped and checked; ValueError if they are invalid."""

    def __init__(self, path: str | bytes, *, modes: bool = False) -> None:
        # As str, because numpy does not keep a name that is bytes.
        with naming(path), open_regular(os.fsdecode(path)) as file:
            header = file.read(_HEADER.size)
            # Of the open file, because the path may lead to another one by now.
            mapped = np.memmap(file, np.uint8, "r") if header else np.empty(0, np.uint8)
        if header.startswith(MAGIC) and len(header) < _HEADER.size:
            raise ValueError(f"{path!r} was truncated: it ends within its header")
        if not header.startswith(MAGIC):
            why = "" if header.startswith(MAGIC[:8]) else because_of_kind(path)
            raise ValueError(
                f"{path!r} is not a .idx file of Megatron{why or ': wrong header'}"
            )
        _, version, code, sequences, documents = _HEADER.unpack(header)
        if version != 1:
            raise ValueError(f"{path!r} is of version {version}; it must be 1")
        if code not in _DTYPES:
            raise ValueError(f"{path!r} has dtype code {code}; it must be from 1 to 8")
        self.dtype = np.dtype(_DTYPES[code])
        size = _HEADER.size + 12 * sequences + 8 * documents
        if len(mapped) not in (size, size + sequences):
            words = ": it was truncated" if len(mapped) < size else ""
            raise ValueError(
                f"{path!r} has {len(mapped)} bytes; {sequences} sequences and {documents} "
                f"document indices take {size}, or {size + sequences} with modes{words}"
            )
        if modes and len(mapped) != size + sequences:
            raise ValueError(f"{path!r} has no modes; pass multimodal=False")
        place = _HEADER.size
        self.lengths = np.ndarray(sequences, "<i4", mapped, place)
        self.pointers = np.ndarray(sequences, "<i8", mapped, place := place + 4 * sequences)
        self.documents = np.ndarray(
            documents, "<i8", mapped, place := place + 8 * sequences
        )
        self.modes = np.ndarray(sequences, "i1", mapped, size) if modes else None
        self.end = self._check_pointers(path)
        self._check_documents(path)

    def _check_pointers(self, path: str | bytes) -> int:
        """Return where the last sequence ends; raise ValueError for gaps and overlaps."""
        end = 0
        for start in range(0, len(self.lengths), _CHECKED_AT_ONCE):
            part = slice(start, start + _CHECKED_AT_ONCE)
            ends = self.lengths[part].cumsum(dtype=np.int64) * self.dtype.itemsize + end
            begins = np.concatenate(([end], ends[:-1]))
            wrong = (self.lengths[part] < 0) | (self.pointers[part] != begins)
            if wrong.any():
                place = int(wrong.argmax())
                raise ValueError(
                    f"{path!r} is corrupt: sequence {start + place} of "
                    f"{self.lengths[start + place]} elements begins at byte "
                    f"{self.pointers[start + place]}, and those before it end at "
                    f"{begins[place]}"
                )
            end = int(ends[-1])
        return end

    def _check_documents(self, path: str | bytes) -> None:
        """Raise ValueError for documents that overlap, or do not end with the sequences."""
        last = 0
        for start in range(0, len(self.documents), _CHECKED_AT_ONCE):
            part = self.documents[start : start + _CHECKED_AT_ONCE]
            before = np.concatenate(([last], part[:-1]))
            wrong = (part < before) | (part > len(self.lengths))
            if wrong.any():
                place = int(wrong.argmax())
                raise ValueError(
                    f"{path!r} is corrupt: document index {start + place} is "
                    f"{part[place]}; it must be from {before[place]} to "
                    f"{len(self.lengths)}"
                )
            last = int(part[-1])
        if last != len(self.lengths):
            raise ValueError(
                f"{path!r} is corrupt: its documents end at sequence {last} of "
                f"{len(self.lengths)}"
            )
