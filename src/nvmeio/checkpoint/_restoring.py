"""Lock, check and read the folder of a step."""

import contextlib
import fcntl
import os
import stat
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

import crc32c
import numpy as np

from nvmeio._files.descriptors import FOLDER, Descriptor, closing, opened
from nvmeio._files.kinds import MANIFEST, TENSORS
from nvmeio._files.locks import in_child_close, unlock
from nvmeio._files.paths import exists_now, leads_to
from nvmeio._memory.strides import c_strides
from nvmeio._native.copy import memcpy
from nvmeio._native.file import File
from nvmeio._safetensors.file import ModelFile
from nvmeio._safetensors.header import Tensor
from nvmeio._safetensors.loading import Wanted, load
from nvmeio._streams.progress import Progress
from nvmeio._streams.reading import in_pieces
from nvmeio._tensors.errors import SafetensorError
from nvmeio._tensors.frameworks import Framework, NumPy, Torch
from nvmeio._tensors.memory import pieces_of
from nvmeio._tensors.sharing import is_in_c_order
from nvmeio._tensors.targets import Filled, check_apart, check_target
from nvmeio.checkpoint._errors import CheckpointError, MovedError, NotDamagedError
from nvmeio.checkpoint._manifest import (
    BLOCK_BYTES,
    FORMATS,
    TREE,
    Checksums,
    read_json,
    read_manifest,
    require_readable,
    require_same,
)
from nvmeio.checkpoint._rebuilt import (
    Part,
    flagged,
    in_order,
    is_reordered,
    part_of,
    rebuild,
    same_memory,
)
from nvmeio.checkpoint._tree import decode, path_of, plain

__all__ = ["Held", "MovedError"]


class Held:
    """The folder of a complete step, locked so that it is not pruned until ``close``."""

    def __init__(self, folder: str, step: int) -> None:
        self.folder, self.step = folder, step
        # Ctrl-C may come at any time: they are closed with this object.
        self._place, self._held = Descriptor(), Descriptor()
        self._process = os.getpid()
        try:
            self._open_folder()
            self._lock()
            self.manifest = read_manifest(folder, step, self._contents_of)
        except BaseException as error:
            try:
                moved = not self.is_there()
            finally:
                self.close()
            if moved and isinstance(error, (CheckpointError, OSError)):
                raise MovedError(
                    f"{folder} was removed or replaced while it was read"
                ) from error
            raise
        in_child_close(self)

    def _open_folder(self) -> None:
        try:
            self._place.open(self.folder, FOLDER | os.O_NOFOLLOW)
        except NotADirectoryError:
            raise CheckpointError(
                f"{self.folder} is not a folder, or is a symbolic link"
            ) from None

    def _lock(self) -> None:
        self._held = self._open_regular(os.path.join(self.folder, MANIFEST))
        # Pruning tests this lock, and leaves the step alone if it is held.  Do not
        # wait for an exclusive lock: whoever may read the step may hold one for ever, and a
        # step that is removed while it is read is noticed.
        with contextlib.suppress(OSError):
            fcntl.flock(self._held.number, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def _open_regular(self, path: str) -> Descriptor:
        """Open a regular file; raise CheckpointError for anything else."""
        try:
            file = opened(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing") from None
        except OSError as error:
            if os.path.islink(path):
                raise CheckpointError(f"{path} is a symbolic link") from None
            raise error from None
        if not stat.S_ISREG(os.fstat(file.number).st_mode):
            raise CheckpointError(f"{path} is not a regular file")
        return file

    def _contents_of(self, path: str) -> bytes:
        with self._open_regular(path) as descriptor:
            size = os.fstat(descriptor).st_size
            require_readable(path, size)
            with open(descriptor, "rb", closefd=False) as file:
                # read() allocates what it is asked for.
                return file.read(size)

    def is_there(self) -> bool:
        """Return whether the folder that was opened still has its name."""
        if self._place.number < 0:
            return exists_now(self.folder)
        return leads_to(self.folder, self._place.number, follow=False)

    def _require_place(self) -> None:
        if not self.is_there():
            raise MovedError(f"{self.folder} was removed or replaced while it was read")

    def close(self) -> None:
        """Release the lock, so that the step may be removed."""
        unlock(self._held, self._process)
        self._held.close()
        self._place.close()

    def __enter__(self) -> "Held":
        return self

    def __exit__(self, kind: object, error: object, where: object) -> None:
        # If the folder was replaced, the error is not about this step: files are opened by
        # path, so they may have been the other folder's.
        try:
            moved = isinstance(error, (CheckpointError, OSError)) and not self.is_there()
        finally:
            self.close()
        if moved:
            raise MovedError(f"{self.folder} was removed or replaced while it was read")

    def tree(self) -> dict[str, Any]:
        """Return the contents of tree.json; its state and metadata are not checked yet."""
        said = read_json(self.folder, TREE, self._contents_of, self.manifest)
        path = os.path.join(self.folder, TREE)
        if (
            not isinstance(said, dict)
            or said.get("format") not in FORMATS
            or said.get("step") != self.step
            or not {"state", "metadata"} <= said.keys()
        ):
            raise CheckpointError(
                f"{path} is damaged: it is not the tree of step {self.step}"
            )
        self._require_place()
        return said

    def metadata(self) -> Any:
        """Return the metadata that was saved with the state."""

        def refused(node: Any, path: Any) -> Any:
            raise CheckpointError(
                f"{os.path.join(self.folder, TREE)} has tensors in metadata"
            )

        return decode(self.tree()["metadata"], refused)

    def plain_metadata(self) -> Any:
        """Return the metadata as plain JSON."""
        try:
            return plain(self.tree()["metadata"])
        except RecursionError:
            path = os.path.join(self.folder, TREE)
            raise CheckpointError(f"{path} has metadata that are nested too deep") from None

    def verify(self, progress: Progress | None = None) -> None:
        """Read all files, and raise CheckpointError if a checksum differs."""
        self._require_checksums()
        total, done = self.manifest.nbytes, 0

        def read(block: Any) -> None:
            nonlocal done
            done += len(block)
            if progress is not None:
                progress(done, total)

        for name in self.manifest.files:
            self._verify_file(name, read)

    def _require_checksums(self) -> None:
        if self.manifest.checksum is None:
            raise NotDamagedError(
                f"{self.folder} was saved without checksums, so it cannot be verified"
            )

    def _verify_file(self, name: str, read: Callable[[Any], object] | None = None) -> None:
        path, record = os.path.join(self.folder, name), self.manifest.files[name]
        seen = Checksums(self.manifest.block_bytes)
        with (
            File(path) as file,
            contextlib.closing(in_pieces(file, record.nbytes, BLOCK_BYTES, 4)) as blocks,
        ):
            for block in blocks:
                seen(block)
                if read is not None:
                    read(block)
        require_same(path, seen, record)

    def _checksums_of(self, file: ModelFile, names: Collection[str]) -> dict[str, int]:
        """Compare all of the file; return the checksums of these tensors' bytes."""
        start = file.layout.data_start
        left = deque(
            (each.name, start + each.begin, start + each.end)
            for each in file.layout.tensors
            if each.name in names and each.begin < each.end
        )
        sums, at = dict.fromkeys(names, 0), 0

        def seen(block: Any) -> None:
            nonlocal at
            while left and (low := max(left[0][1], at)) < at + len(block):
                name, _, high = left[0]
                part = block[low - at : high - at]
                sums[name] = crc32c.crc32c(part.data, sums[name])
                if high > at + len(block):
                    break
                left.popleft()
            at += len(block)

        self._verify_file(TENSORS, seen)
        return sums

    def _verify_parts(
        self, file: ModelFile, tensors: dict[str, Any], sums: dict[str, int]
    ) -> None:
        """Raise NotDamagedError if the bytes of some tensors have other checksums."""
        for name, tensor in tensors.items():
            found = 0
            for piece in pieces_of(tensor):
                found = crc32c.crc32c(piece.data, found)
            if found != sums[name]:
                raise self._misread(file)

    @staticmethod
    def _misread(file: ModelFile) -> NotDamagedError:
        return NotDamagedError(
            f"{file.path} was read wrongly, and rightly when it was read again: the drive "
            "or the memory is unreliable, or the program changes what is being restored; "
            "restore again"
        )

    def _verify_read(self, file: ModelFile, tensors: dict[str, Any]) -> None:
        """Raise CheckpointError if the bytes of the tensors differ from the checksums."""
        record = self.manifest.files[TENSORS]
        seen = Checksums(self.manifest.block_bytes)
        with closing(open(file.path, "rb")) as header:
            seen(header.read(file.layout.data_start))
        for each in file.layout.tensors:
            if each.name not in tensors:
                break
            for piece in pieces_of(tensors[each.name]):
                seen(piece)
        # If they differ, read the file, so that the error names the damaged bytes.
        if seen.sums() != record.checksums:
            self._verify_file(TENSORS)
            raise self._misread(file)

    def restore(
        self,
        into: Any,
        names: Collection[str] | None,
        filled: set[Any],
        *,
        checked: bool = False,
    ) -> Any:
        """Return the state, or the parts in `names`, in new memory or in that of `into`.

        `filled` has the paths of what an attempt with another step or copy may have changed
        in `into`, and gets those of this one, which must fill all of them.

        With `checked`, compare the bytes that were read with the checksums.  With `names`
        too, compare the whole file before reading, because the checksums are of blocks.
        """
        if checked:
            self._require_checksums()
        path = os.path.join(self.folder, TENSORS)
        tree = self.tree()["state"]
        try:
            file = StepFile(path)
        except SafetensorError as error:
            raise CheckpointError(f"{path} is damaged: {error}") from None
        try:
            if file.before.st_size != self.manifest.files[TENSORS].nbytes:
                raise CheckpointError(f"{path} has changed while it was read")
            # The tree and the tensors must come from the same folder.
            self._require_place()
            parts = _Parts(file.layout.by_name)
            try:
                skeleton = decode(tree, parts, names=names)
            except CheckpointError as error:
                raise CheckpointError(
                    f"{os.path.join(self.folder, TREE)} is damaged: {error}"
                ) from None
            sums: dict[str, int] = {}
            if checked and names is not None:
                sums = self._checksums_of(file, {part.stored.name for part in parts.found})
            targets = None
            if into is not None:
                try:
                    targets = _matched(skeleton, into, ())
                    check_apart(
                        (_filled_by(part, targets[part.path]) for part in parts.found),
                        "checkpoint",
                    )
                    if left := sorted(map(path_of, filled - targets.keys())):
                        raise ValueError(f"it has no {left[0]}")
                except (TypeError, ValueError) as error:
                    if not filled:
                        raise
                    words = "is not restored: `into` was filled in part by a newer step or "
                    words += f"another copy, which is damaged, and would stay so: {error}"
                    raise NotDamagedError(f"{self.folder} {words}") from error
                filled.update(targets)
            bases, values = _read(file, parts.found, targets)
            if checked and names is None:
                self._verify_read(file, bases)
            elif checked:
                self._verify_parts(file, bases, sums)
            elif file.touched and self.manifest.checksum is not None:
                self._verify_file(TENSORS)
        except SafetensorError as error:
            raise CheckpointError(f"{path}: {error}") from None
        finally:
            file.close()
        return _filled(skeleton, values)


class StepFile(ModelFile):
    """The tensors of a step, of which the manifest knows what the bytes must be."""

    touched = False
    # As torch allocates them.  At another address, kernels may sum in another order.
    align = 64

    def check_unchanged(self) -> None:
        """Raise SafetensorError if the size was changed; remember a new time alone.

        touch(1), rsync and backups set it, and the bytes are what they were.
        """
        now = os.fstat(self.file.fileno())
        if now.st_size != self.before.st_size:
            raise self.changed()
        self.touched = now.st_mtime_ns != self.before.st_mtime_ns


class _Parts:
    """Replaces each tensor node of a tree by a Part, and collects the parts."""

    def __init__(self, stored: dict[str, Tensor]) -> None:
        self.stored = stored
        self.found: list[Part] = []
        self.first: dict[str, Part] = {}

    def __call__(self, node: dict[str, Any], path: tuple[Any, ...]) -> Part:
        part = part_of(node, path, self.stored)
        first = self.first.setdefault(part.stored.name, part)
        # Each would need a copy of the stored tensor.
        if first is not part and (is_reordered(part) or is_reordered(first)):
            raise CheckpointError(
                f"{path_of(path)} needs the tensor {part.stored.name!r:.100}, as does "
                f"{path_of(first.path):.100}, and one has another order of elements"
            )
        self.found.append(part)
        return part


def _matched(skeleton: Any, into: Any, path: tuple[Any, ...]) -> dict[Any, Any]:
    """Return the tensor or array of `into` for each part, checked, by path."""
    if isinstance(skeleton, Part):
        name, by_torch = f"into: {path_of(skeleton.path)}", skeleton.by_torch
        dtype, shape = skeleton.dtype, skeleton.shape
        check_target(name, into, by_torch, dtype, shape, "checkpoint")
        return {skeleton.path: into}
    found: dict[Any, Any] = {}
    if isinstance(skeleton, dict) and isinstance(into, dict):
        for key, each in skeleton.items():
            if key not in into:
                if _has_parts(each):
                    raise ValueError(f"into lacks {path_of((*path, key))}")
                continue
            found |= _matched(each, into[key], (*path, key))
    elif isinstance(skeleton, (list, tuple)) and isinstance(into, (list, tuple)):
        if len(skeleton) != len(into) and _has_parts(skeleton):
            words = f"has {len(into)} items; the checkpoint has {len(skeleton)}"
            raise ValueError(f"into: {path_of(path)} {words}")
        for index, (each, other) in enumerate(zip(skeleton, into, strict=False)):
            found |= _matched(each, other, (*path, index))
    elif _has_parts(skeleton):
        raise TypeError(
            f"into: {path_of(path)} is of type {type(into).__qualname__}; the checkpoint "
            f"has a {type(skeleton).__qualname__}"
        )
    return found


def _filled_by(part: Part, target: Any) -> Filled:
    """Return where the elements of a target are in the file."""
    view, name = part.view, path_of(part.path)
    if view is None:
        strides = c_strides(part.shape, part.dtype.itemsize)
        return Filled(name, target, (part.stored.name, False, False), 0, strides)
    stored = part.stored.name, view.conj, view.neg
    return Filled(name, target, stored, view.offset, view.strides)


def _has_parts(skeleton: Any) -> bool:
    if isinstance(skeleton, dict):
        return any(map(_has_parts, skeleton.values()))
    if isinstance(skeleton, (list, tuple)) and not isinstance(skeleton, Part):
        return any(map(_has_parts, skeleton))
    return isinstance(skeleton, Part)


def _filled(skeleton: Any, values: dict[Any, Any]) -> Any:
    """Replace the parts in the skeleton by their tensors and arrays."""
    if isinstance(skeleton, Part):
        return values[skeleton.path]
    if isinstance(skeleton, dict):
        for key, each in skeleton.items():
            skeleton[key] = _filled(each, values)
        return skeleton
    if isinstance(skeleton, list):
        return [_filled(each, values) for each in skeleton]
    if type(skeleton) is tuple:
        return tuple(_filled(each, values) for each in skeleton)
    return skeleton


def _read(
    file: ModelFile, parts: list[Part], targets: dict[Any, Any] | None
) -> tuple[dict[str, Any], dict[Any, Any]]:
    """Read parts; return the stored tensors by name, and the values of parts by path."""
    by_stored: dict[str, list[Part]] = {}
    for part in parts:
        by_stored.setdefault(part.stored.name, []).append(part)
    kinds: list[Framework] = [NumPy()]
    if any(part.by_torch for part in parts):
        kinds.append(Torch())
    bases: dict[str, Any] = {}
    out: dict[str, Any] = {}
    own: set[str] = set()
    for kind in kinds:
        chosen = []
        for name, group in by_stored.items():
            by_torch = any(part.by_torch for part in group)
            if by_torch != kind.by_torch:
                continue
            wanted = _wanted(file, group[0].stored, kind)
            part = group[0]
            alone = len(group) == 1 and part.view is None
            if alone and (targets is not None or is_reordered(part)):
                # Read as its own dtype, even if it is stored as another.
                own.add(name)
                wanted = wanted._replace(dtype=part.dtype, shape=part.shape)
                target = in_order(part) if targets is None else targets[part.path]
                out[name] = _plain(target)
            elif targets is not None:
                out[name] = _destination(group, targets, wanted, kind)
            elif strided := [p for p in group if p.strides and p.how == "whole"]:
                out[name] = in_order(strided[0])
            chosen.append(wanted)
        chosen.sort(key=lambda each: each.tensor.begin)
        new = [each for each in chosen if each.key not in out]
        given = [each for each in chosen if each.key in out]
        if new:
            bases |= load(new, kind)
        if given:
            bases |= load(given, kind, out=out)
    made = {}
    for name, group in by_stored.items():
        base = bases[name]
        if name in own:
            part = group[0]
            made[part.path] = flagged(part, base) if targets is None else targets[part.path]
            continue
        made_of_it = any(part.by_torch and part.how != "whole" for part in group)
        if made_of_it and base.data_ptr() % 16:
            # Torch requires addresses that are multiples of the element's size, 16 at most.
            base = base.clone()
        for part in group:
            made[part.path] = rebuild(part, base)
            if targets is not None:
                made[part.path] = _delivered(made[part.path], targets[part.path])
    return bases, made


def _wanted(file: ModelFile, stored: Tensor, framework: Framework) -> Wanted:
    dtype = framework.dtype(stored.dtype)
    shape = framework.shape(stored.dtype, stored.shape)
    nbytes = stored.end - stored.begin
    return Wanted(stored.name, file, stored, dtype, shape, None, nbytes)


def _destination(
    group: list[Part], targets: dict[Any, Any], wanted: Wanted, framework: Framework
) -> Any:
    """Return the memory to read a stored tensor into: a target of its shape, or new."""
    # Others are made of its bytes, in C order.
    in_c_order = any(
        part.how != "whole" or part.by_torch != framework.by_torch for part in group
    )
    for part in group:
        target = targets[part.path]
        if (
            part.how == "whole"
            and part.by_torch == framework.by_torch
            and not (in_c_order and not is_in_c_order(target))
        ):
            return _plain(target)
    return framework.empty(wanted.dtype, wanted.shape)


def _delivered(value: Any, target: Any) -> Any:
    """Copy a value to its target, unless it was read into it directly."""
    source, memory = _plain(value), _plain(target)
    if not same_memory(source, memory):
        memcpy(memory, source)
    return target


def _plain(value: Any) -> Any:
    """Return an array as it is, or a tensor detached from autograd."""
    return value if isinstance(value, np.ndarray) else value.detach()
