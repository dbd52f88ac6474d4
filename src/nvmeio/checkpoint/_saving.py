"""Plan, write and sync the files of a checkpoint."""

import functools
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from datetime import datetime
from typing import Any

import numpy as np

from nvmeio._files.descriptors import closing
from nvmeio._files.kinds import MANIFEST, TENSORS
from nvmeio._files.paths import naming
from nvmeio._memory.deferred import Deferred
from nvmeio._memory.strides import copy_to, without_fields
from nvmeio._native.copy import memcpy
from nvmeio._native.file import File
from nvmeio._native.pool import require_available
from nvmeio._native.region import Region
from nvmeio._publish.folders import Unfinished, in_blocks
from nvmeio._safetensors.header import Tensor, build
from nvmeio._safetensors.writing import check_size, parts_of
from nvmeio._streams.memory import Bytes
from nvmeio._streams.writing import STAGE_BYTES, reserve, write, write_image
from nvmeio._tensors.dtypes import torch_module
from nvmeio._tensors.memory import bytes_of, pieces_of
from nvmeio._tensors.sharing import start_of
from nvmeio.checkpoint._manifest import (
    BLOCK_BYTES,
    FORMAT,
    TREE,
    TREE_BYTES_MAX,
    Checksums,
    Manifest,
    Record,
)
from nvmeio.checkpoint._stored import Stored, store
from nvmeio.checkpoint._tree import encode, path_of
from nvmeio.default import default_handle

__all__ = ["Plan", "Staging"]

Check = Callable[[], bool]


class Plan:
    """Everything that a save will write; invalid states are refused here, before that."""

    def __init__(self, step: int, state: Any, metadata: Any, checksum: str | None) -> None:
        self.step, self.checksum = step, checksum
        # Keeps the tensors alive: some memory is known only by its address.
        self.state = state
        tree, leaves, self.deferred = encode(state)
        try:
            said, others, _ = encode(metadata)
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            # The message begins with the path.
            raise kind(str(error).replace("state", "metadata", 1)) from None
        if others:
            where = path_of(others[0].path).replace("state", "metadata", 1)
            raise TypeError(f"{where} is a tensor or an array; metadata cannot have any")
        stored = store(leaves)
        tensors = [(each.name, each.dtype, each.shape) for each in stored]
        # On page boundaries, so that tensors of whole pages need no copies of their ends.
        self.header, self.layout = build(tensors, {"format": "pt"}, align=4096)
        self.stored: dict[str, Stored] = {each.name: each for each in stored}
        self.total = self.layout.data_start + self.layout.data_bytes
        text = {"format": FORMAT, "step": step, "metadata": said, "state": tree}
        self.tree = json.dumps(text, allow_nan=False).encode() + b"\n"
        if len(self.tree) > TREE_BYTES_MAX:
            words = f"{len(self.tree)} bytes; {TREE_BYTES_MAX} is the limit"
            raise ValueError(f"the state and metadata without tensors take {words}")
        # At most, of the manifest.
        manifest = 1024 + 16 * ((self.total + len(self.tree)) // BLOCK_BYTES)
        self.sizes = self.total, len(self.tree), manifest
        self.image: Bytes | None = None

    def stage(self, staging: "Staging") -> None:
        """Copy the state into an image of the file, so that the caller may change it."""
        image = staging.memory(self.total)
        image[: len(self.header)] = np.frombuffer(self.header, np.uint8)
        data = image[self.layout.data_start :]
        for each in self.layout.tensors:
            if each.end > each.begin:
                _copy(self.stored[each.name].value, data[each.begin : each.end], each)
        self._require_same()
        self.image = image
        self.stored, self.state, self.deferred = {}, None, []

    def write(
        self, folder: Unfinished, stopped: Check, copied: Callable[[], object]
    ) -> None:
        """Write and sync the files; call `copied` when the state is no longer needed."""
        files = {TENSORS: self._write_tensors(folder, stopped)}
        self._require_same()
        copied()
        files[TREE] = self._write_text(folder, TREE, self.tree)
        # To the microsecond, by which two saves of a step differ.
        saved = datetime.now().astimezone().isoformat(timespec="microseconds")
        manifest = Manifest(self.step, saved, self.checksum, BLOCK_BYTES, files)
        self._write_text(folder, MANIFEST, manifest.text())

    def _require_same(self) -> None:
        """Raise RuntimeError if a state on a drive has changed.

        The parameters may have changed with it, and be written after it was read.
        """
        for state in self.deferred:
            state._require_same()

    def _write_tensors(self, folder: Unfinished, stopped: Check) -> Record:
        seen = None if self.checksum is None else Checksums()

        def seen_or_stopped(piece: Bytes) -> None:
            if stopped():
                raise CancelledError
            if seen is not None:
                seen(piece)

        handle = default_handle()
        with File(os.path.join(folder.path, TENSORS), "x") as file:
            reserve(file, in_blocks(self.sizes, folder.path), folder.target)
            file.truncate(self.total)
            with naming(folder.target):
                if self.image is None:
                    contents = {
                        name: functools.partial(_checked, each)
                        for name, each in self.stored.items()
                    }
                    parts = parts_of(self.header, self.layout, contents)
                    write(handle, file, parts, self.total, None, seen_or_stopped)
                else:
                    write_image(handle, file, self.image, seen_or_stopped)
                handle.fsync(file)
                # If this fails, bytes may be missing.
                file.close()
        return Record(self.total, None if seen is None else seen.sums())

    def _write_text(self, folder: Unfinished, name: str, text: bytes) -> Record:
        path = os.path.join(folder.path, name)
        with naming(folder.target), closing(open(path, "xb")) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if self.checksum is None:
            return Record(len(text), None)
        seen = Checksums()
        seen(text)
        return Record(len(text), seen.sums())


def _checked(stored: Stored) -> Iterator[Bytes]:
    """Yield the bytes of a value; before each piece, check that they are still there."""
    stored.check_memory()
    for content in pieces_of(stored.value):
        for low in range(0, len(content), STAGE_BYTES):
            stored.check_memory()
            yield content[low : low + STAGE_BYTES]


def _copy(value: Any, target: Bytes, tensor: Tensor) -> None:
    """Copy the bytes of a tensor or an array, in C order."""
    if isinstance(value, Deferred):
        value = value.load()
    check_size(value.nbytes, tensor)
    if not isinstance(value, np.ndarray):
        torch = torch_module()
        value = value.detach()
        if start_of(target) % value.element_size():
            # torch's kernels, such as that of conj(), crash at such an address.
            memcpy(target, bytes_of(value))
            return
        memcpy(torch.from_numpy(target).view(value.dtype).view(value.shape), value)
    elif value.flags.c_contiguous:
        memcpy(target, value.reshape(-1).view(np.uint8))
    else:
        value = without_fields(value)
        copy_to(target.view(value.dtype).reshape(value.shape), value)


class Staging:
    """Memory for a copy of one state, which the next save uses again."""

    def __init__(self) -> None:
        self._region: Region | None = None

    def memory(self, nbytes: int) -> Bytes:
        """Return `nbytes` bytes of memory; raise MemoryError if there is not enough."""
        if self._region is None or self._region.nbytes < nbytes:
            self._region = None
            require_available(nbytes, "a copy of the state")
            region = Region(nbytes)
            region.populate(0, nbytes)
            self._region = region
        whole: Any = self._region
        found: Bytes = np.frombuffer(whole, np.uint8)[:nbytes]
        return found

    def release(self) -> None:
        """Free the memory."""
        self._region = None
