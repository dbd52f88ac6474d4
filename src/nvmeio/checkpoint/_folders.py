"""Folders that appear whole, or not at all, and what is left of those that did not."""

import contextlib
import errno
import fcntl
import logging
import os
import pathlib
import re
import shutil
import socket
import stat
from collections.abc import Callable, Iterator

from nvmeio._arguments.checks import flag, path_of, whole
from nvmeio._arguments.keywords import suggesting
from nvmeio._arguments.types import Path
from nvmeio._files.descriptors import FOLDER, close_quietly, opened
from nvmeio._files.folders import sync_file, sync_folder
from nvmeio._files.locks import in_child_close
from nvmeio._files.paths import naming, resolved
from nvmeio._files.replacing import become_like
from nvmeio._native.file import File
from nvmeio._native.rename import exchange, rename_to_new
from nvmeio.safetensors._writing import reserve as reserve_file

__all__ = [
    "Unfinished",
    "atomic_directory",
    "cleanup",
    "discard",
    "remove_unfinished",
    "set_aside",
]

_log = logging.getLogger("nvmeio")

# What is not complete: whose it is to be, and who is at it.
_LEFTOVER = re.compile(
    r"\.(?P<name>.*)\.(?P<host>[^./]*)-(?P<pid>\d+)-(?P<start>\d+)-[0-9a-f]{8}\.nvmeio-tmp"
)
# A name has 255 bytes at most.
_PART_BYTES_MAX = 80

_SIZE_MAX = (1 << 63) - 1


@suggesting
@contextlib.contextmanager
def atomic_directory(
    path: Path, *, replace: bool = False, reserve: int | None = None, sync: bool = True
) -> Iterator[pathlib.Path]:
    """Write a folder that appears under its name whole, or not at all.

    Parameters
    ----------
    path : str, bytes or os.PathLike
        The folder's name.  The folder that it is to be in must exist.
    replace : bool, default False
        Take the place of a folder that has the name.  Both are there until the new one is
        complete; then they exchange names in one step, and the old one is removed.
    reserve : int, optional
        How many bytes are going to be written.  There must be room for so many, which is
        tried before anything is written.
    sync : bool, default True
        Have all of it, and its name, on the device before it is said to be there.

    Yields
    ------
    pathlib.Path
        A folder beside `path`, to be filled by whatever writes files.

    Raises
    ------
    FileExistsError
        Something has the name, and `replace` is not said; also where it came meanwhile.
    NotADirectoryError
        What is to be replaced is no folder, or it is a symbolic link.
    OSError
        With errno and path: ENOSPC with what is needed and what is free; EOPNOTSUPP where
        the file system (NFS) cannot exchange two names.
    RuntimeError
        The body ended in a forked child, which leaves the folder to its parent.

    Notes
    -----
    If the body raises, the folder is removed and the name stays what it was.  Of a process
    that is killed a folder stays whose name begins with a dot and has the process's host,
    number and start in it; ``cleanup`` removes it.

    With ``sync=True`` every file and folder below is synced, files first, then the folder
    is renamed, then the folder that has its name is synced.  After a power failure there
    is the old state or all of the new one.  An error while the name is being synced leaves
    the new folder in its place; the message says so.

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
    target = resolved(path_of(path), follow=False)
    with Unfinished(target, replace=replace) as unfinished:
        if nbytes:
            unfinished.reserve(nbytes)
        yield pathlib.Path(unfinished.path)
        if sync:
            sync_below(unfinished.path)
        unfinished.commit(sync=sync)


class Unfinished:
    """A folder that is being filled, beside the name that it is to have.

    As a context manager it removes the folder, unless it has got its name by ``commit``.
    """

    def __init__(self, target: str, *, replace: bool) -> None:
        self.target, self.replace = target, replace
        _check_target(target, replace)
        self.path = leftover_name(target)
        self.process = os.getpid()
        with naming(target, f" (its folder {os.path.dirname(target)!r})"):
            os.mkdir(self.path)
        try:
            self.descriptor = os.open(self.path, FOLDER | os.O_CLOEXEC)
        except BaseException:
            os.rmdir(self.path)
            raise
        # Who is in another container may not see this process.
        with contextlib.suppress(OSError):
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        in_child_close(self)

    def close(self) -> None:
        """Let others see that nobody is at it."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            close_quietly(descriptor)

    def __enter__(self) -> "Unfinished":
        return self

    def __exit__(self, *error: object) -> None:
        try:
            # A forked child has closed it, and leaves the folder to its parent.
            if self.descriptor >= 0 and self.path:
                shutil.rmtree(self.path, ignore_errors=True)
        finally:
            self.close()

    def reserve(self, nbytes: int) -> None:
        """See that there is room for so many bytes."""
        path = os.path.join(self.path, "reserved")
        with File(path, "x") as file:
            reserve_file(file, nbytes, self.target)
        os.unlink(path)

    def commit(self, *, sync: bool) -> None:
        """Give the folder its name; with `sync` both are made durable.

        What is in it has been synced before.
        """
        if self.descriptor < 0:
            raise RuntimeError(
                f"{self.target} is written by process {self.process}; a forked child, "
                f"{os.getpid()}, cannot complete it"
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
            left, self.path = self.path, ""
            if sync:
                words = (
                    f" (it is in its place, but {parent!r}, with its name, is not synced)"
                )
                with naming(self.target, words):
                    os.fsync(descriptor)
        if old:
            discard(left)


def _check_target(target: str, replace: bool) -> None:
    """Refuse a name that something has."""
    try:
        mode = os.lstat(target).st_mode
    except FileNotFoundError:
        return
    if not replace:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
    if not stat.S_ISDIR(mode):
        kind = "a symbolic link" if stat.S_ISLNK(mode) else "no folder"
        words = f"it is {kind}, and is not replaced by one"
        raise NotADirectoryError(errno.ENOTDIR, words, target)


def sync_below(folder: str) -> None:
    """Sync the files in a folder, and the folders, but for the topmost."""
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            sync_below(entry.path)
            sync_folder(entry.path)
        elif entry.is_file(follow_symlinks=False):
            with naming(entry.path):
                try:
                    sync_file(entry.path, os.O_RDONLY)
                except PermissionError:
                    # One that may be written alone.
                    sync_file(entry.path, os.O_WRONLY)


def leftover_name(target: str) -> str:
    """Return the name of a folder that is to become another, or was it."""
    folder, name = os.path.split(target)
    short = os.fsdecode(os.fsencode(name)[:_PART_BYTES_MAX])
    process = os.getpid()
    words = f"{_host()}-{process}-{_start_of(process)}-{os.urandom(4).hex()}"
    return os.path.join(folder, f".{short}.{words}.nvmeio-tmp")


def _host() -> str:
    """Return this host as names of leftovers have it, without a dot."""
    return re.sub("[^A-Za-z0-9-]", "_", socket.gethostname())[:_PART_BYTES_MAX]


def _start_of(process: int) -> int:
    """Return when a process began, in ticks since the system did; -1: it is dead."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            # The name, in brackets, may have anything in it.
            words = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return -1
    return -1 if words[0] in b"ZX" else int(words[19])


def set_aside(folder: str) -> None:
    """Take a folder its name, in one step, and remove it."""
    left = leftover_name(folder)
    os.rename(folder, left)
    discard(left)


def discard(folder: str) -> None:
    """Remove a folder; what cannot be removed is left to ``cleanup``."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        _log.warning("a folder that is not needed any more is left: %s", error)


@suggesting
def cleanup(folder: Path) -> list[str]:
    """Remove what processes that are dead have left of folders that they did not complete.

    Parameters
    ----------
    folder : str, bytes or os.PathLike
        The folder in which ``atomic_directory`` or a ``Checkpointer`` has written.

    Returns
    -------
    list of str
        The paths that were removed.

    Raises
    ------
    OSError
        With errno and path: one of them cannot be removed; the others are gone.

    Notes
    -----
    A leftover stays while its process lives, while anybody has it locked, and where the
    process was on another host, whose processes are not known here.

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


def remove_unfinished(folder: str, prefix: str) -> None:
    """Remove what others, of any host, have left of names that begin so.

    Nobody but this process may be at such names: locks say so.
    """
    removed, failed = _remove(folder, lambda found: found["name"].startswith(prefix))
    for path in removed:
        _log.info("what a process that died has left is removed: %s", path)
    if failed is not None:
        _log.warning("what a process that died has left stays: %s", failed)


def _remove(
    folder: str, chosen: Callable[[re.Match[str]], bool]
) -> tuple[list[str], OSError | None]:
    """Remove leftovers that nobody has locked; return them, and what went wrong first."""
    removed, failed = [], None
    for entry in os.scandir(folder):
        found = _LEFTOVER.fullmatch(entry.name)
        if found and entry.is_dir(follow_symlinks=False) and chosen(found):
            try:
                with naming(entry.path), opened(entry.path, FOLDER) as descriptor:
                    if not _locked(descriptor):
                        continue
                    shutil.rmtree(entry.path)
                removed.append(entry.path)
            except FileNotFoundError:
                continue
            except OSError as error:
                failed = failed or error
    return removed, failed


def _is_dead(found: re.Match[str]) -> bool:
    return _host() == found["host"] and _start_of(int(found["pid"])) != int(found["start"])


def _locked(descriptor: int) -> bool:
    """Lock a folder, or tell that somebody else has."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # The file system locks no folders.
        return True
    return True
