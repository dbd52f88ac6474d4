"""Folders that appear whole or not at all, and the removal of unfinished ones."""

import contextlib
import errno
import fcntl
import logging
import os
import pathlib
import re
import socket
import stat
from collections.abc import Callable, Iterator

from nvmeio._arguments.checks import flag, path_of, whole
from nvmeio._arguments.types import Path
from nvmeio._files.descriptors import FOLDER, Descriptor, opened
from nvmeio._files.folders import sync_file, sync_folder
from nvmeio._files.locks import in_child_close
from nvmeio._files.paths import naming, resolved
from nvmeio._files.replacing import become_like
from nvmeio._native.descriptor import TemporaryName, remove_tree
from nvmeio._native.file import File
from nvmeio._native.system_calls import exchange, rename_to_new
from nvmeio._streams.writing import reserve as reserve_file

__all__ = [
    "Unfinished",
    "atomic_directory",
    "cleanup",
    "discard",
    "remove_unfinished",
    "set_aside",
]

_log = logging.getLogger("nvmeio")

# The name of an unfinished folder: its final name, and the process that fills it.
_LEFTOVER = re.compile(
    r"\.(?P<name>.*)\.(?P<host>[^./]*)-(?P<pid>\d+)-(?P<start>\d+)-[0-9a-f]{8}\.nvmeio-tmp"
)
# For the name and the host; the whole name may have at most 255 bytes.
_PART_BYTES_MAX = 80

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
        they exchange names atomically, and the old one is removed.
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
        needed and free.  EOPNOTSUPP: the file system, such as NFS, cannot exchange names.
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
            unfinished.reserve(nbytes)
        yield pathlib.Path(unfinished.path)
        if sync:
            sync_below(unfinished.path)
        unfinished.commit(sync=sync)


class Unfinished:
    """A temporary folder that is being filled, beside its final name.

    As a context manager it removes the folder, unless ``commit`` has renamed it.
    """

    def __init__(self, target: str, *, replace: bool) -> None:
        self.target, self.replace = target, replace
        _check_target(target, replace)
        self.path = leftover_name(target)
        self.process = os.getpid()
        # Ctrl-C may come at any time: these release the folder with this object.
        self._name, self._lock = TemporaryName(self.path), Descriptor()
        with naming(target, f" (its folder {os.path.dirname(target)!r})"):
            os.mkdir(self.path)
        self._lock.open(self.path, FOLDER)
        # The lock shows that the folder is in use where our process ID means nothing, as
        # in another container.
        with contextlib.suppress(OSError):
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        in_child_close(self)

    @property
    def descriptor(self) -> int:
        """The folder's descriptor; -1 in a forked child."""
        return self._lock.number

    def close(self) -> None:
        """Release the lock, which shows that the folder is in use."""
        self._lock.close()

    def __enter__(self) -> "Unfinished":
        return self

    def __exit__(self, *error: object) -> None:
        # Not in a forked child, because the folder belongs to the parent.
        self._name.remove()
        self.close()

    def reserve(self, nbytes: int) -> None:
        """Raise OSError if the file system has no room for `nbytes` bytes."""
        path = os.path.join(self.path, "reserved")
        with File(path, "x") as file:
            reserve_file(file, nbytes, self.target)
        os.unlink(path)

    def commit(self, *, sync: bool) -> None:
        """Give the folder its final name; with `sync`, make folder and name durable.

        The caller has synced the contents.
        """
        if self.descriptor < 0:
            raise RuntimeError(
                f"{self.target} is written by process {self.process}; its forked child "
                f"{os.getpid()} cannot complete it"
            )
        parent = os.path.dirname(self.target)
        with opened(parent, FOLDER) as descriptor:
            old = self.replace and os.path.lexists(self.target)
            if old:
                _check_target(self.target, self.replace)
                become_like(self.descriptor, self.target)
            if sync:
                with naming(self.target):
                    os.fsync(self.descriptor)
            (exchange if old else rename_to_new)(self.path, self.target)
            if sync:
                words = (
                    f" (it is in its place, but its folder {parent!r} is not synced: its "
                    "name may be lost at a power failure)"
                )
                with naming(self.target, words):
                    self._sync_names(descriptor)
        if old:
            discard(self.path)

    def _sync_names(self, parent: int) -> None:
        try:
            os.fsync(parent)
        except OSError:
            # The old folder may still have its name on the device.
            self._name.keep()
            raise


def _check_target(target: str, replace: bool) -> None:
    """Refuse a name that is taken, unless it is a folder and `replace` is true."""
    try:
        mode = os.lstat(target).st_mode
    except FileNotFoundError:
        return
    if not replace:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
    if not stat.S_ISDIR(mode):
        kind = "a symbolic link" if stat.S_ISLNK(mode) else "not a folder"
        words = f"it is {kind}, so it is not replaced; remove it first"
        raise NotADirectoryError(errno.ENOTDIR, words, target)


def sync_below(folder: str) -> None:
    """Sync all files and folders below a folder, but not the folder itself."""
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            sync_below(entry.path)
            sync_folder(entry.path)
        elif entry.is_file(follow_symlinks=False):
            with naming(entry.path):
                try:
                    sync_file(entry.path, os.O_RDONLY)
                except PermissionError:
                    # A file that this user may write but not read.
                    sync_file(entry.path, os.O_WRONLY)


def leftover_name(target: str) -> str:
    """Return a temporary name for a folder that will be renamed to `target`, or was."""
    folder, name = os.path.split(target)
    short = os.fsdecode(os.fsencode(name)[:_PART_BYTES_MAX])
    process = os.getpid()
    words = f"{_host()}-{process}-{_start_of(process)}-{os.urandom(4).hex()}"
    return os.path.join(folder, f".{short}.{words}.nvmeio-tmp")


def _host() -> str:
    """Return this host's name as it is in temporary names, without dots."""
    return re.sub("[^A-Za-z0-9-]", "_", socket.gethostname())[:_PART_BYTES_MAX]


def _start_of(process: int) -> int:
    """Return a process's start time, in clock ticks since boot; -1 if it is dead."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            # The process's name, in parentheses, may have any characters.
            words = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return -1
    return -1 if words[0] in b"ZX" else int(words[19])


def set_aside(folder: str) -> None:
    """Remove a folder, whose name disappears in one step."""
    with TemporaryName(leftover_name(folder)) as left:
        os.rename(folder, left)
        discard(left)


def discard(folder: str) -> None:
    """Remove a folder with a temporary name; if that fails, ``cleanup`` can do it."""
    try:
        remove_tree(folder)
    except OSError as error:
        _log.warning("an obsolete folder was not removed: %s", error)


def cleanup(folder: Path) -> list[str]:
    """Remove the unfinished folders of processes that died.

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
    another host always stays, because that host's processes cannot be seen here.

    Examples
    --------
    >>> with nvmeio.checkpoint.atomic_directory("epoch-3") as folder:
    ...     nvmeio.save(folder / "weights.npy", np.arange(10))
    >>> nvmeio.checkpoint.cleanup(".")
    []
    """
    removed, failed = _remove(os.fsdecode(path_of(folder)), _is_dead)
    if failed is not None:
        raise failed
    return removed


def remove_unfinished(folder: str, prefix: str, *, own: bool) -> None:
    """Remove the unfinished folders, of any host, whose final names begin with `prefix`.

    The caller holds the lock that lets no other process write such folders.  With `own`,
    remove only those of this process.
    """

    def chosen(found: re.Match[str]) -> bool:
        return found["name"].startswith(prefix) and (not own or _is_own(found))

    # Where folders cannot be locked, another thread may be using one.
    removed, failed = _remove(folder, chosen, unlockable=not own)
    for path in removed:
        _log.info("removed an unfinished folder of a save that was stopped: %s", path)
    if failed is not None:
        _log.warning("an unfinished folder of a save that was stopped stays: %s", failed)


def _remove(
    folder: str, chosen: Callable[[re.Match[str]], bool], *, unlockable: bool = True
) -> tuple[list[str], OSError | None]:
    """Remove unlocked unfinished folders; return their paths, and the first error.

    With `unlockable`, also those that the file system cannot lock.
    """
    removed, failed = [], None
    for entry in os.scandir(folder):
        found = _LEFTOVER.fullmatch(entry.name)
        if found and entry.is_dir(follow_symlinks=False) and chosen(found):
            try:
                with naming(entry.path), opened(entry.path, FOLDER) as descriptor:
                    locked = _locked(descriptor)
                    if not (unlockable if locked is None else locked):
                        continue
                    remove_tree(entry.path)
                removed.append(entry.path)
            except FileNotFoundError:
                continue
            except OSError as error:
                failed = failed or error
    return removed, failed


def _is_dead(found: re.Match[str]) -> bool:
    return _host() == found["host"] and _start_of(int(found["pid"])) != int(found["start"])


def _is_own(found: re.Match[str]) -> bool:
    process = os.getpid()
    wanted = (_host(), process, _start_of(process))
    return (found["host"], int(found["pid"]), int(found["start"])) == wanted


def _locked(descriptor: int) -> bool | None:
    """Lock a folder; return False if it is locked, and None if it cannot be."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # The file system cannot lock folders.
        return None
    return True
