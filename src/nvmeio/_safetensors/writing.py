"""Write tensors to a file, which gets its name when it is complete."""

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import NamedTuple, cast

import numpy as np

from nvmeio._arguments.checks import flag, path_of
from nvmeio._files.paths import naming, resolved, synced_folder
from nvmeio._publish.files import file_in_place_of
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
    packed = bytearray(len(header) + layout.data_bytes)
    target, low = np.frombuffer(packed, np.uint8), 0
    contents = {source.name: source.contents for source in sources}
    for part in parts_of(header, layout, contents):
        target[low : low + len(part)] = part
        low += len(part)
    return bytes(packed)


def save(
    sources: Sequence[Source],
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    *,
    align: int = 8,
    sync: bool = True,
    progress: Progress | None = None,
) -> None:
    """Write a file, which replaces an existing one atomically at the end.

    A symbolic link stays; the file that it leads to is replaced.
    """
    check_progress(progress)
    with saving(sources, filename, metadata, align=align, sync=sync) as write_all:
        write_all(progress)


@contextlib.contextmanager
def saving(
    sources: Sequence[Source],
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    *,
    align: int = 8,
    sync: bool = True,
) -> Iterator[Callable[[Progress | None], None]]:
    """Reserve a file, yield a function that writes it, and give it its name at the end."""
    sync = flag("sync", sync)
    header, layout = build(
        ((s.name, s.dtype, s.shape) for s in sources), metadata, align=align
    )
    contents = {source.name: source.contents for source in sources}
    total = layout.data_start + layout.data_bytes
    path = cast("str", path_of(filename))
    parts = parts_of(header, layout, contents)
    follow = not _replaces_links.get()
    with naming(path):
        target = resolved(path, follow=follow)
        refuse_kinds(target)
    handle = default_handle()
    with (
        naming(path),
        synced_folder(target, follow=follow) if sync else contextlib.nullcontext(),
        file_in_place_of(target, read_only=True) as file,
    ):
        reserve(file, total, path)

        def write_all(progress: Progress | None) -> None:
            try:
                write(handle, file, parts, total, progress)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                raise named(error, file, total, path) from None
            if sync:
                handle.fsync(file)

        yield write_all


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
    header: bytes, layout: FileLayout, contents: Mapping[str, Callable[[], Bytes]]
) -> Iterator[Bytes]:
    """Yield the bytes of a file from its beginning: the header, then each tensor.

    Raise ValueError for a tensor with other than the bytes that the header promises, which
    would shift all that follow.
    """
    yield np.frombuffer(header, np.uint8)
    for tensor in layout.tensors:
        if tensor.end > tensor.begin:
            # Without a name, which would keep it in memory while the next one is made.
            yield _checked(contents[tensor.name](), tensor)


def _checked(part: Bytes, tensor: Tensor) -> Bytes:
    check_size(part.nbytes, tensor)
    return part


def check_size(nbytes: int, tensor: Tensor) -> None:
    """Raise ValueError if a tensor has other than the bytes that the header promises."""
    promised = tensor.end - tensor.begin
    if nbytes != promised:
        raise ValueError(
            f"the tensor {tensor.name!r} has {nbytes} bytes, but said to be {tensor.dtype} "
            f"of shape {list(tensor.shape)}, which has {promised}"
        )
