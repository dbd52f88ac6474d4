"""A folder for any files that appears whole, and the removal of unfinished ones."""

import contextlib
import os
import pathlib
from collections.abc import Iterator

from nvmeio._arguments.checks import flag, path_of, whole
from nvmeio._arguments.types import Path
from nvmeio._files.paths import resolved
from nvmeio._native.file import File
from nvmeio._publish.folders import Unfinished, sync_below
from nvmeio._publish.names import is_dead, remove_left
from nvmeio._streams.writing import reserve as reserve_file

__all__ = ["atomic_directory", "cleanup"]

_SIZE_MAX = (1 << 63) - 1


@contextlib.contextmanager
def atomic_directory(
    path: Path, *, replace: bool = False, reserve: int | None = None, sync: bool = True
) -> Iterator[pathlib.Path]:
    """Write a folder that appears under its name whole, or not at all.

    Parameters
    ----------
    path : str, bytes or os.PathLike
        The final name of the folder.  Its parent folder must exist.
    replace : bool, default False
        Replace a folder that has this name.  It stays until the new one is complete; then
        they exchange names atomically, and the old one is removed, but not what is mounted
        inside it.  Where the file system
        cannot do that, as NFS, it is set aside for a moment; if the process is killed then,
        ``cleanup`` gives it its name back.
    reserve : int, optional
        How many bytes will be written.  Whether the file system has room for them is
        checked at the start, by allocating them.
    sync : bool, default True
        Sync all files and the name to the device before the context ends.  With False
        nothing is synced, and a power failure may leave an incomplete folder.

    Yields
    ------
    pathlib.Path
        A temporary folder beside `path`.  Write your files here.

    Raises
    ------
    FileExistsError
        `path` exists, at the start or at the end, and `replace` is False.
    NotADirectoryError
        `path` cannot be replaced, because it is not a folder, or is a symbolic link.
    OSError
        Writing failed; has errno and path.  The message for ENOSPC says how many bytes are
        needed and free.
    RuntimeError
        The body ended in a forked child; only the parent can complete the folder.

    Notes
    -----
    If the body raises, the temporary folder is removed, and `path` stays as it was.  If the
    process is killed, the temporary folder stays; call ``cleanup`` to remove it.  Its name
    begins with a dot, and has the host, the process ID and the process's start time.

    With ``sync=True`` the files are synced first, then the folders; then the folder is
    renamed, and its parent folder is synced.  After a power failure you find the old state
    or all of the new one.  If syncing the parent folder fails, the new folder stays in its
    place, and the message says so.

    Examples
    --------
    >>> with nvmeio.checkpoint.atomic_directory("epoch-3", replace=True) as folder:
    ...     nvmeio.save(folder / "weights.npy", np.arange(10))
    ...     written = (folder / "config.json").write_text("{}")
    >>> int(nvmeio.load("epoch-3/weights.npy").sum())
    45
    """
    replace, sync = flag("replace", replace), flag("sync", sync)
    nbytes = None if reserve is None else whole("reserve", reserve, 0, _SIZE_MAX)
    name = os.fsdecode(path_of(path))
    # "folder/" names the folder too, as for mkdir().
    target = resolved(name.rstrip("/") or name, follow=False)
    with Unfinished(target, replace=replace) as unfinished:
        if nbytes:
            _reserve(unfinished, nbytes)
        yield pathlib.Path(unfinished.path)
        if sync:
            sync_below(unfinished.path)
        unfinished.commit(sync=sync)


def _reserve(folder: Unfinished, nbytes: int) -> None:
    """Raise OSError if the file system has no room for `nbytes` bytes."""
    path = os.path.join(folder.path, "reserved")
    with File(path, "x") as file:
        reserve_file(file, nbytes, folder.target)
    os.unlink(path)


def cleanup(folder: Path) -> list[str]:
    """Remove the unfinished folders and files of processes that died.

    Parameters
    ----------
    folder : str, bytes or os.PathLike
        The folder in which ``atomic_directory`` or a ``Checkpointer`` wrote.

    Returns
    -------
    list of str
        The paths that were removed.

    Raises
    ------
    OSError
        An unfinished folder could not be removed; has errno and path.  The others were
        removed.

    Notes
    -----
    An unfinished folder stays while its process lives or while it is locked.  One of
    another host always stays, because that host's processes cannot be seen here.  So does
    one of another user in a sticky folder such as /tmp.  A folder that was set aside for a
    new one that never came gets its name back.  A file of version 0.2 does not say whose it
    is, and is removed if it is a day old.

    Examples
    --------
    >>> with nvmeio.checkpoint.atomic_directory("epoch-3") as folder:
    ...     nvmeio.save(folder / "weights.npy", np.arange(10))
    >>> nvmeio.checkpoint.cleanup(".")
    []
    """
    removed, failed = remove_left(os.fsdecode(path_of(folder)), is_dead)
    if failed is not None:
        try:
            raise failed
        finally:
            # Its traceback has this frame, and with it what the failed call had open.
            del failed
    return removed
