"""Write tensors to a file, which gets its name when it is complete."""

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from nvmeio._arguments.checks import flag, path_of
from nvmeio._arguments.units import needed_and_free
from nvmeio._files.paths import naming, resolved, synced_folder
from nvmeio._native.file import File
from nvmeio._native.handle import Handle
from nvmeio._native.region import Region
from nvmeio._native.request import Request
from nvmeio._publish.files import file_in_place_of
from nvmeio.default import default_handle
from nvmeio.memory import empty
from nvmeio.safetensors._header import build
from nvmeio.safetensors._reading import Progress, check_progress

__all__ = ["Bytes", "Seen", "Source", "Stages", "pack", "parts_of", "reserve", "save"]
__all__ += ["saving", "write"]

Bytes = npt.NDArray[np.uint8]
# Called with the bytes of a file in order, while they are in the CPU's cache.
Seen = Callable[[Bytes], object]

# The stages: buffers that are being filled, or being written.  One is small enough for the
# CPU's cache, so that the drive reads it from there.  With 4 stages of 8 MiB, saving had
# 0.9 times the speed.
STAGE_BYTES = 1 << 20
STAGES = 32


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
    packed[: len(header)] = header
    target = np.frombuffer(packed, np.uint8)
    contents = {source.name: source.contents for source in sources}
    for tensor in layout.tensors:
        low, high = layout.data_start + tensor.begin, layout.data_start + tensor.end
        if high > low:
            target[low:high] = contents[tensor.name]()
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
    parts = parts_of(header, [contents[t.name] for t in layout.tensors if t.end > t.begin])
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
                raise _named(error, file, total, path) from None
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


def reserve(file: File, nbytes: int, path: str) -> None:
    """Allocate the space of a file; raise OSError, with the free space, if it is full."""
    try:
        file.preallocate(nbytes)
    except OSError as error:
        if error.errno is None:
            # A signal handler raised it.
            raise
        # Some file systems cannot preallocate.
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise _named(error, file, nbytes, path) from None


def _named(error: OSError, file: File, nbytes: int, path: str) -> OSError:
    """Return an error with the final path of a file, which has no name yet."""
    words = os.strerror(error.errno or 0)
    if error.errno == errno.ENOSPC:
        space = os.statvfs(os.path.dirname(os.path.realpath(path)))
        # Add the space of the unfinished file, because it will be removed.
        free = space.f_bavail * space.f_frsize + os.fstat(file.fileno()).st_blocks * 512
        words += f": {needed_and_free(nbytes, free)}"
    return OSError(error.errno, words, path)


def parts_of(header: bytes, contents: Sequence[Callable[[], Bytes]]) -> Iterator[Bytes]:
    """Yield the bytes of a file from its beginning: the header, then each tensor."""
    yield np.frombuffer(header, np.uint8)
    for each in contents:
        yield each()


class Stages:
    """Writes a file from its beginning through stages, buffers that are reused.

    ``put`` copies bytes into a stage while other stages are being written.  As a context
    manager it waits at the end, so that no write uses the memory after it is freed.
    """

    def __init__(
        self,
        handle: Handle,
        file: File,
        *,
        seen: Seen | None = None,
        sent: Callable[[int], object] | None = None,
    ) -> None:
        self.written = 0  # bytes passed to put()
        self._handle, self._file, self._seen, self._sent = handle, file, seen, sent
        self._memory = _stages()
        self._requests: list[Request | None] = [None] * STAGES
        self._turn = self._used = 0

    def put(self, part: Bytes) -> None:
        """Copy bytes into stages, and start writing each that is full."""
        place = 0
        while place < len(part):
            count = min(len(part) - place, STAGE_BYTES - self._used)
            piece = self._memory[self._turn][self._used : self._used + count]
            np.copyto(piece, part[place : place + count])
            if self._seen is not None:
                self._seen(piece)
            place, self._used = place + count, self._used + count
            self.written += count
            if self._used == STAGE_BYTES:
                self._send()

    def _send(self) -> None:
        view = self._memory[self._turn][: self._used]
        begin = self.written - self._used
        self._requests[self._turn] = self._handle.submit_write(view, self._file, begin)
        self._used, self._turn = 0, (self._turn + 1) % STAGES
        request, self._requests[self._turn] = self._requests[self._turn], None
        if request is not None:
            request.wait()
        if self._sent is not None:
            self._sent(self.written)

    def finish(self) -> None:
        """Write the last stage, and wait for all writes."""
        if self._used:
            self._send()
        for request in self._requests:
            if request is not None:
                request.wait()

    def __enter__(self) -> "Stages":
        return self

    def __exit__(self, *error: object) -> None:
        for request in self._requests:
            if request is not None:
                request.exception()


def _stages() -> list[Bytes]:
    """Return memory for the stages: from the pool, or new if the pool is exhausted."""
    nbytes = STAGES * STAGE_BYTES
    try:
        return np.split(empty(nbytes, np.uint8), STAGES)
    except MemoryError:
        region: Any = Region(nbytes)
        region.populate(0, nbytes)
        return np.split(np.frombuffer(region, np.uint8), STAGES)


def write(
    handle: Handle,
    file: File,
    parts: Iterable[Bytes],
    total: int,
    progress: Progress | None = None,
    seen: Seen | None = None,
) -> None:
    """Write parts to a file, one after the other."""
    sent = None if progress is None else lambda written: progress(written, total)
    with Stages(handle, file, seen=seen, sent=sent) as stages:
        for part in parts:
            stages.put(part)
            # Free it before the next one is read or copied.
            del part
        stages.finish()
