"""Create directories and make names in them durable."""

import contextlib
import errno
import os
import stat

from nvmeio._files.descriptors import FOLDER, opened
from nvmeio._files.paths import dangling, naming

__all__ = ["make_folders", "sync_file", "sync_folder"]


def sync_file(path: str, flags: int) -> None:
    """Open a file or directory, and sync it."""
    with opened(path, flags) as descriptor:
        os.fsync(descriptor)


def sync_folder(folder: str) -> None:
    """Make the names in a directory durable."""
    with naming(folder):
        sync_file(folder, FOLDER)


def make_folders(folder: str, *, mode: int = 0o777, sync: bool = True) -> None:
    """Create a directory and its missing parents; with `sync`, make them durable."""
    missing = []
    while not _is_folder(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    for each in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(each, mode)
        if not _is_folder(each):
            words = dangling(each) or os.strerror(errno.ENOTDIR)
            raise NotADirectoryError(errno.ENOTDIR, words, each)
        if sync:
            sync_folder(os.path.dirname(each))


def _is_folder(path: str) -> bool:
    """Return what os.path.isdir() does, which takes each error, such as EIO, for no."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
