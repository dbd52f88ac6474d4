"""Create directories and make names in them durable."""

import contextlib
import errno
import os

from nvmeio._files.descriptors import FOLDER, opened
from nvmeio._files.paths import dangling, exists, naming

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
    while not os.path.isdir(folder):
        # An error that keeps this from being known, such as EIO, is raised here.
        exists(folder, follow=True)
        missing.append(folder)
        folder = os.path.dirname(folder)
    for each in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(each, mode)
        if not os.path.isdir(each):
            words = dangling(each) or os.strerror(errno.ENOTDIR)
            raise NotADirectoryError(errno.ENOTDIR, words, each)
        if sync:
            sync_folder(os.path.dirname(each))
