"""A storage for torch_checkpointing: ``Config(storage_config=StorageConfig())``."""

import errno
import io
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_checkpointing.storage import base_storage

from nvmeio._files.folders import make_folders, sync_folder
from nvmeio._native.file import File
from nvmeio.files import read_file, write_file

__all__ = ["Storage", "StorageConfig"]


_OCCUPIED = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR)


@dataclass
class StorageConfig(base_storage.StorageConfig):  # type: ignore[misc]
    """The configuration that makes torch_checkpointing use a ``Storage``.

    Examples
    --------
    >>> import torch_checkpointing
    >>> import nvmeio.torch.torch_checkpointing
    >>> config = nvmeio.torch.torch_checkpointing.StorageConfig()
    >>> type(config.create_storage()).__name__
    'Storage'
    """

    def create_storage(self) -> "Storage":
        """Return a new ``Storage``."""
        return Storage()


class _Durable(io.BufferedWriter):
    """A stream whose ``close`` returns when its bytes are on the device."""

    def __init__(self, file: File) -> None:
        super().__init__(file, 1 << 20)
        self._file = file

    def close(self) -> None:
        try:
            if not self.closed:
                self.flush()
                self._file.fsync()
        finally:
            super().close()


class Storage(base_storage.Storage):  # type: ignore[misc]
    """Read and write local files for torch_checkpointing, durably and with O_DIRECT.

    Notes
    -----
    A file is durable when its stream is closed, and its name when ``rename`` returns, which
    torch_checkpointing calls to commit a checkpoint.

    Examples
    --------
    >>> from pathlib import Path
    >>> import torch_checkpointing
    >>> import nvmeio.torch.torch_checkpointing
    >>> storage = nvmeio.torch.torch_checkpointing.Storage()
    >>> storage.exists(Path("run"))
    False
    """

    def stream_read(self, path: Path, read_args: Any = None) -> io.RawIOBase:
        """Open a file for reading."""
        return File(path)

    def stream_write(self, path: Path) -> io.IOBase:
        """Open a file for writing from its beginning; closing it makes it durable."""
        return _Durable(File(path, "w"))

    def read(self, path: Path, read_args: Any = None) -> bytes:
        """Return the contents of a file."""
        return read_file(path).tobytes()

    def write(self, path: Path, data: Any) -> None:
        """Write a file durably, or replace an existing one."""
        write_file(data, path, sync=True)

    def delete(self, path: Path) -> None:
        """Remove a file."""
        os.unlink(path)

    def mkdir(self, path: Path, recursive: bool = True) -> None:
        """Create a folder; with `recursive`, also those above it, and it may exist."""
        if recursive:
            make_folders(os.path.abspath(path))
        else:
            os.mkdir(path)
            sync_folder(os.path.dirname(os.path.abspath(path)))

    def rmdir(self, path: Path) -> None:
        """Remove a folder with everything in it."""
        shutil.rmtree(path)

    def rename(
        self,
        src_path: Path,
        dst_path: Path,
        is_directory: bool = False,
        background_cleanup: bool = False,
    ) -> None:
        """Rename a file or a folder, durably.

        Raise FileExistsError if a file or a non-empty folder is in the way of a folder, or
        a folder in the way of a file.
        """
        if os.path.isdir(src_path):
            for top, _, _ in os.walk(src_path):
                sync_folder(top)
        try:
            # rename(2) itself refuses to replace a file or a non-empty folder by a folder.
            os.rename(src_path, dst_path)
        except OSError as error:
            if error.errno not in _OCCUPIED:
                raise
            raise FileExistsError(error.errno, error.strerror, dst_path) from error
        for folder in {os.path.dirname(os.path.abspath(p)) for p in (src_path, dst_path)}:
            sync_folder(folder)

    def ls(self, path: Path) -> list[str]:
        """Return the names in a folder."""
        return os.listdir(path)

    def exists(self, path: Path) -> bool:
        """Return whether a path exists."""
        return os.path.exists(path)

    def getsize(self, path: Path) -> int:
        """Return the size of a file in bytes."""
        return os.path.getsize(path)

    def isdir(self, path: Path) -> bool:
        """Return whether a path is a folder."""
        return os.path.isdir(path)

    def remap_path(self, path: Path) -> str:
        """Return the path as a str."""
        return str(path)
