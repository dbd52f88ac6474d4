"""Storage that checkpoints are copied to: a local folder, or a URL of fsspec."""

import contextlib
import errno
import functools
import importlib
import os
import stat
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from nvmeio._arguments.checks import path_of
from nvmeio._arguments.types import Path
from nvmeio._files.folders import make_folders, sync_folder
from nvmeio._files.paths import absolute
from nvmeio._native.descriptor import remove_tree
from nvmeio._native.file import File
from nvmeio._publish.files import new_file
from nvmeio._publish.names import renaming, temporary_name
from nvmeio._streams.memory import Bytes
from nvmeio._streams.reading import in_pieces
from nvmeio.default import default_handle

__all__ = ["Bytes", "Place", "Writer", "pieces_of", "place_of"]


PIECE_BYTES = 4 << 20

# Protocols that can rename a file without a copy, also over an existing one.
_RENAMING = {"memory", "sftp", "ssh"}


class Writer(Protocol):
    """A file that is being written, before it has its name."""

    def write(self, piece: Bytes) -> None:
        """Append bytes."""

    def finish(self) -> None:
        """Make all bytes durable."""

    def read(self) -> Iterator[Bytes]:
        """Yield the bytes that are on the storage."""

    def commit(self) -> None:
        """Give it its name."""


class Place(Protocol):
    """A folder, local or remote; names are relative, with slashes."""

    @property
    def root(self) -> str:
        """The folder's path or URL, for messages."""

    def folder(self, name: str) -> str | None:
        """Return the local path of a folder, or None on remote storage."""

    def writing(self, name: str) -> "contextlib.AbstractContextManager[Writer]":
        """Write a file; it is removed at the end unless it was committed."""

    def read(self, name: str) -> Iterator[Bytes]:
        """Yield the bytes of a file, piece by piece."""

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes, or None if there is no such file."""

    def make(self, folder: str) -> None:
        """Create a folder, and those above it."""

    def settle(self, folder: str) -> None:
        """Make the names in a folder durable."""

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder; an empty list if it does not exist."""

    def remove(self, name: str) -> None:
        """Remove a file or a folder, if it exists."""


def place_of(target: Path) -> Place:
    """Return the Place of a path, or of a URL that fsspec supports."""
    name = os.fsdecode(path_of(target))
    protocol, separator, rest = name.partition("://")
    if not separator:
        return _Folder(os.fsdecode(absolute(name)))
    if protocol in ("file", "local"):
        return _Folder(os.fsdecode(absolute(rest)))
    try:
        fsspec: Any = importlib.import_module("fsspec")
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"{name!r} is a URL, which needs fsspec; run: pip install fsspec",
            name="fsspec",
        ) from None
    # Raises for unknown protocols now, because the first connection may come much later.
    fsspec.get_filesystem_class(protocol)
    return _Remote(functools.partial(fsspec.core.url_to_fs, name), name, protocol)


def pieces_of(file: File, size: int) -> Iterator[Bytes]:
    """Yield a file's bytes in order, while the next piece is being read."""
    return in_pieces(file, size, PIECE_BYTES, 2)


class _Folder:
    """A folder of a mounted file system."""

    def __init__(self, root: str) -> None:
        self.root = root

    def path(self, name: str) -> str:
        return os.path.join(self.root, name) if name else self.root

    folder = path

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator["_FolderWriter"]:
        unnamed = self.path(temporary_name(name))
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(new_file(unnamed))
            writer = _FolderWriter(file, unnamed, self.path(name))
            try:
                yield writer
            finally:
                if not writer.committed:
                    with contextlib.suppress(OSError):
                        os.unlink(unnamed)

    def read(self, name: str) -> Iterator[Bytes]:
        with File(self.path(name)) as file:
            # The process that wrote it may have died before it synced it.
            os.fsync(file.fileno())
            yield from _read_anew(file)

    def size(self, name: str) -> int | None:
        try:
            found = os.lstat(self.path(name))
        except FileNotFoundError:
            return None
        # A symbolic link counts as missing, so that a file replaces it: it may lead to the
        # source itself.
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def make(self, folder: str) -> None:
        make_folders(self.path(folder))

    def settle(self, folder: str) -> None:
        sync_folder(self.path(folder))

    def names(self, folder: str) -> list[str]:
        try:
            return os.listdir(self.path(folder))
        except FileNotFoundError:
            return []

    def remove(self, name: str) -> None:
        path = self.path(name)
        with contextlib.suppress(FileNotFoundError):
            if os.path.isdir(path) and not os.path.islink(path):
                remove_tree(path)
            else:
                os.unlink(path)


class _FolderWriter:
    def __init__(self, file: File, unnamed: str, target: str) -> None:
        self.file, self.unnamed, self.target = file, unnamed, target
        self.written, self.committed = 0, False

    def write(self, piece: Bytes) -> None:
        default_handle().write(piece, self.file, self.written)
        self.written += len(piece)

    def finish(self) -> None:
        default_handle().fsync(self.file)
        # If this fails, bytes may be missing.
        self.file.close()

    def read(self) -> Iterator[Bytes]:
        with File(self.unnamed) as file:
            yield from _read_anew(file)

    def commit(self) -> None:
        with renaming(self.target):
            os.replace(self.unnamed, self.target)
        self.committed = True


def _read_anew(file: File) -> Iterator[Bytes]:
    """Yield the bytes on the device, not those in the page cache."""
    with contextlib.suppress(OSError):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return pieces_of(file, file.size)


class _Remote:
    """A folder of a file system of fsspec."""

    def __init__(
        self, connect: Callable[[], tuple[Any, str]], root: str, protocol: str
    ) -> None:
        self.root = root
        self.renames = protocol in _RENAMING
        self._connect = connect

    @functools.cached_property
    def _connected(self) -> tuple[Any, str]:
        system, base = self._connect()
        return system, base.rstrip("/")

    @property
    def system(self) -> Any:
        return self._connected[0]

    @property
    def base(self) -> str:
        return self._connected[1]

    def path(self, name: str) -> str:
        return f"{self.base}/{name}" if name else self.base

    def folder(self, name: str) -> None:
        return None

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator["_RemoteWriter"]:
        # An object gets its name when its upload is complete; renaming would copy it.
        unnamed = self.path(temporary_name(name) if self.renames else name)
        writer = _RemoteWriter(self, unnamed, self.path(name))
        try:
            yield writer
        finally:
            writer.close()
            # A finished object has its name even if the bytes read back are wrong.
            if not writer.committed and (self.renames or writer.finished):
                with contextlib.suppress(Exception):
                    self.system.rm_file(unnamed)

    def read(self, name: str) -> Iterator[Bytes]:
        return self.read_path(self.path(name))

    def read_path(self, path: str) -> Iterator[Bytes]:
        with self.system.open(path, "rb") as stream:
            while piece := stream.read(PIECE_BYTES):
                yield np.frombuffer(piece, np.uint8)

    def size(self, name: str) -> int | None:
        self.system.invalidate_cache()
        try:
            found = self.system.info(self.path(name)).get("size")
        except FileNotFoundError:
            return None
        return None if found is None else int(found)

    def make(self, folder: str) -> None:
        self.system.makedirs(self.path(folder), exist_ok=True)

    def settle(self, folder: str) -> None:
        """Do nothing: remote storage makes names durable itself."""

    def names(self, folder: str) -> list[str]:
        self.system.invalidate_cache()
        try:
            found = self.system.ls(self.path(folder), detail=False)
        except FileNotFoundError:
            return []
        return [each.rstrip("/").rpartition("/")[2] for each in found]

    def remove(self, name: str) -> None:
        # One by one, because rm() would treat brackets in a name as a pattern.
        path = self.path(name)
        self.system.invalidate_cache()
        for each in self.system.find(path) or [path]:
            with contextlib.suppress(FileNotFoundError):
                self.system.rm_file(each)
        # Object stores have no folders, and other systems may have removed the empty ones.
        with contextlib.suppress(Exception):
            self.system.rmdir(path)


def _renames_by_itself(system: Any) -> bool:
    """Return whether the system has its own mv(); fsspec's treats brackets as a pattern."""
    general = importlib.import_module("fsspec").AbstractFileSystem
    return type(system).mv is not general.mv


class _RemoteWriter:
    def __init__(self, place: _Remote, unnamed: str, target: str) -> None:
        self.place, self.unnamed, self.target = place, unnamed, target
        self.stream = place.system.open(unnamed, "wb")
        self.committed = self.finished = False

    def write(self, piece: Bytes) -> None:
        view = piece.data
        while len(view):
            # A raw stream may write fewer bytes than it was given.
            taken = self.stream.write(view)
            if taken is not None and not 0 < taken <= len(view):
                raise OSError(
                    errno.EIO,
                    f"write() of {len(view)} bytes returned {taken}",
                    self.unnamed,
                )
            view = view[len(view) if taken is None else taken :]

    def finish(self) -> None:
        self.finished = True
        self.stream.close()

    def read(self) -> Iterator[Bytes]:
        return self.place.read_path(self.unnamed)

    def commit(self) -> None:
        system = self.place.system
        if self.unnamed != self.target and _renames_by_itself(system):
            system.mv(self.unnamed, self.target)
        elif self.unnamed != self.target:
            system.cp_file(self.unnamed, self.target)
            system.rm_file(self.unnamed)
        self.committed = True

    def close(self) -> None:
        """Abandon an unfinished upload; ignore errors, since one was raised already."""
        if self.stream.closed:
            return
        with contextlib.suppress(Exception):
            self.stream.discard()
        try:
            # Marked as closed, because close() would complete the upload.
            self.stream.closed = True
        except AttributeError:
            with contextlib.suppress(Exception):
                self.stream.close()
