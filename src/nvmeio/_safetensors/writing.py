"""Write tensors to a file, which gets its name when it is complete."""

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, cast

import numpy as np

from nvmeio._arguments.checks import flag, path_of
from nvmeio._files.descriptors import cut
from nvmeio._files.paths import naming, resolved
from nvmeio._publish.files import new_contents
from nvmeio._publish.mapped import is_mapped, require_copy
from nvmeio._safetensors.header import FileLayout, Tensor, build
from nvmeio._streams.memory import Bytes
from nvmeio._streams.progress import Progress, check_progress
from nvmeio._streams.writing import named, reserve, write
from nvmeio.default import default_handle

__all__ = ["Source", "check_size", "pack", "parts_of", "replacing_links", "save", "saving"]


class Source(NamedTuple):
    """A tensor to write."""

    name: str
    dtype: str  # as the header has it
    shape: Sequence[int]
    contents: Callable[[], Bytes]  # returns its bytes; called when its turn comes


def pack(sources: Sequence[Source], metadata: Mapping[str, str] | None) -> bytes:
    """Return the bytes of a file with these tensors."""
    header, layout = build(((s.name, s.dtype, s.shape) for s in sources), metadata)
    contents = {source.name: source.contents for source in sources}
    parts = parts_of(header, layout, contents)
    return _joined(parts, layout.data_start + layout.data_bytes).tobytes()


def _joined(parts: Iterable[Bytes], nbytes: int) -> Bytes:
    target, low = np.empty(nbytes, np.uint8), 0
    for part in parts:
        target[low : low + len(part)] = part
        low += len(part)
    return target


def save(
    sources: Sequence[Source],
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    *,
    align: int = 8,
    sync: bool = True,
    atomic: bool = True,
    progress: Progress | None = None,
) -> None:
    """Write a file, which replaces an existing one atomically at the end.

    A symbolic link stays; the file that it leads to is replaced.
    """
    check_progress(progress)
    options: Any = {"align": align, "sync": sync, "atomic": atomic}
    with saving(sources, filename, metadata, **options) as write_all:
        write_all(progress)


@contextlib.contextmanager
def saving(
    sources: Sequence[Source],
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    *,
    align: int = 8,
    sync: bool = True,
    atomic: bool = True,
    check: Callable[[], None] = lambda: None,
) -> Iterator[Callable[[Progress | None], None]]:
    """Reserve a file, yield a function that writes it, and give it its name at the end.

    `check` is called before it gets its name, unless it is written in place.
    """
    sync, atomic = flag("sync", sync), flag("atomic", atomic)
    header, layout = build(
        ((s.name, s.dtype, s.shape) for s in sources), metadata, align=align
    )
    path, total = cast("str", path_of(filename)), layout.data_start + layout.data_bytes
    parts = parts_of(header, layout, {source.name: source.contents for source in sources})
    follow = not _replaces_links.get()
    with naming(path):
        refuse_kinds(resolved(path, follow=follow))
    handle = default_handle()
    # safetensors replaces a file that is read-only, too.
    options: Any = {"sync": sync, "atomic": atomic, "follow": follow, "read_only": True}
    options["check"] = check
    failed: OSError | None = None
    try:
        with naming(path), new_contents(path, **options) as file:
            if is_mapped(file):
                # It is written in place, perhaps from memory that is mapped from it.
                require_copy(total, file)
                parts = iter([_joined(parts, total)])
            reserve(file, total, path)

            def write_all(progress: Progress | None) -> None:
                with naming(path):
                    try:
                        write(handle, file, parts, total, progress)
                    except OSError as error:
                        if error.errno != errno.ENOSPC:
                            raise
                        raise named(error, file, total, path) from None
                    cut(file, total)
                    if sync:
                        handle.fsync(file)

            try:
                yield write_all
            except OSError as error:
                failed = error
                raise
    except OSError:
        if failed is None:
            raise
    if failed is not None:
        # What the block raises may be of another file, and keeps that name.
        raise failed


_replaces_links: ContextVar[bool] = ContextVar("replaces_links", default=False)


@contextlib.contextmanager
def replacing_links() -> Iterator[None]:
    """Make saving replace symbolic links instead of their targets, as safetensors does."""
    token = _replaces_links.set(True)
    try:
        yield
    finally:
        _replaces_links.reset(token)


def refuse_kinds(target: str) -> None:
    """Raise OSError if `target` exists and is not a regular file, such as a folder."""
    with contextlib.suppress(FileNotFoundError):
        mode = os.lstat(target).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), target)
        if not stat.S_ISREG(mode) and not stat.S_ISLNK(mode):
            raise OSError(errno.EINVAL, "not a regular file, so it is not replaced", target)


def parts_of(
    header: bytes,
    layout: FileLayout,
    contents: Mapping[str, Callable[[], Bytes | Iterator[Bytes]]],
) -> Iterator[Bytes]:
    """Yield the bytes of a file from its beginning: the header, then each tensor.

    Raise ValueError for a tensor with other than the bytes that the header promises, which
    would shift all that follow.
    """
    yield np.frombuffer(header, np.uint8)
    for tensor in layout.tensors:
        if tensor.end > tensor.begin:
            # Without a name, which would keep it in memory while the next one is made.
            yield from _checked(contents[tensor.name](), tensor)


def _checked(content: Bytes | Iterator[Bytes], tensor: Tensor) -> Iterator[Bytes]:
    """Yield the bytes of a tensor, which may come in pieces."""
    if isinstance(content, np.ndarray):
        check_size(content.nbytes, tensor)
        yield content
        return
    nbytes = 0
    for piece in content:
        nbytes += piece.nbytes
        yield piece
        del piece
    check_size(nbytes, tensor)


def check_size(nbytes: int, tensor: Tensor) -> None:
    """Raise ValueError if a tensor has other than the bytes that the header promises."""
    promised = tensor.end - tensor.begin
    if nbytes != promised:
        raise ValueError(
            f"the tensor {tensor.name!r} has {nbytes} bytes, but said to be {tensor.dtype} "
            f"of shape {list(tensor.shape)}, which has {promised}"
        )
