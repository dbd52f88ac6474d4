"""Folders that appear whole or not at all, and the removal of unfinished ones."""

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Collection, Iterator

from nvmeio._arguments.units import needed_and_free
from nvmeio._events.log import log
from nvmeio._files.descriptors import FOLDER, Descriptor, opened
from nvmeio._files.folders import sync_file, sync_folder
from nvmeio._files.locks import in_child_close
from nvmeio._files.paths import exists_now, naming
from nvmeio._native.descriptor import TemporaryName, remove_tree
from nvmeio._native.system_calls import exchange, rename_to_new
from nvmeio._publish.attributes import become_like
from nvmeio._publish.names import (
    ASIDE,
    FILE_NAME_MAX,
    KEEPS_NAME,
    OwnerOf,
    give_back,
    is_dead,
    is_left,
    is_of_living,
    remove_left,
    renaming,
    temporary_name,
)

__all__ = [
    "Unfinished",
    "discard",
    "in_blocks",
    "put_back",
    "remove_unfinished",
    "set_aside",
    "sync_below",
]


def in_blocks(sizes: Collection[int], folder: str) -> int:
    """Return what files of these sizes take of a folder's file system."""
    block = 0
    with contextlib.suppress(OSError):
        block = os.statvfs(folder).f_frsize
    block = max(block, 4096)
    return sum(-(-size // block) * block for size in sizes)


class Unfinished:
    """A temporary folder that is being filled, beside its final name.

    As a context manager it removes the folder, unless ``commit`` has renamed it.
    """

    def __init__(
        self, target: str, *, replace: bool, sizes: Collection[int] | None = None
    ) -> None:
        """Make the folder, for files of these `sizes` if they are known."""
        self.target, self.replace, self._sizes = target, replace, sizes
        _check_target(target, replace)
        self.path = temporary_name(target)
        self.process = os.getpid()
        # Ctrl-C may come at any time: these release the folder with this object.
        self._name, self._lock = TemporaryName(self.path), Descriptor()
        words = f" (its folder {os.path.dirname(target)!r})"
        with self.saying_space(), naming(target, words):
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

    @contextlib.contextmanager
    def saying_space(self) -> Iterator[None]:
        """Say in an error for ENOSPC how many bytes are needed and free."""
        try:
            yield
        except OSError as error:
            # What reserves them has said so.
            said = " are needed" in str(error.strerror)
            if error.errno != errno.ENOSPC or said or self._sizes is None:
                raise
            parent = os.path.dirname(self.target)
            space = os.statvfs(parent)
            free = space.f_bavail * space.f_frsize
            # This folder will be removed.
            with contextlib.suppress(OSError):
                free += sum(512 * each.stat().st_blocks for each in os.scandir(self.path))
            needed = in_blocks(self._sizes, parent)
            words = f"{error.strerror}: {needed_and_free(needed, free)}"
            raise OSError(error.errno, words, self.target) from error

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
        with self.saying_space(), opened(parent, FOLDER) as descriptor:
            # Another host may have made it, which NFS here still remembers as missing.
            old = self.replace and exists_now(self.target)
            if old:
                _check_target(self.target, self.replace)
                become_like(self.descriptor, self.target)
            if sync:
                with naming(self.target):
                    os.fsync(self.descriptor)
            with renaming(self.target):
                (self._replace if old else rename_to_new)(self.path, self.target)
            if sync:
                words = (
                    f" (it is in its place, but its folder {parent!r} is not synced: its "
                    "name may be lost at a power failure)"
                )
                with naming(self.target, words):
                    self._sync_names(descriptor)
        if old:
            discard(self.path)

    def _replace(self, path: str, target: str) -> None:
        """Swap names with the old folder; where that takes two steps, set it aside first.

        If this dies between them, ``remove_left`` gives the old one its name back.
        """
        try:
            exchange(path, target)
            return
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
        aside = temporary_name(target, ASIDE)
        excess = len(os.fsencode(os.path.basename(aside))) - FILE_NAME_MAX
        if excess > 0:
            words = "this file system cannot exchange two folders in one step, and the "
            words += f"name is {excess} bytes too long to set the old one aside"
            raise OSError(errno.ENAMETOOLONG, words, target)
        with opened(target, FOLDER) as descriptor:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                os.rename(target, aside)
                rename_to_new(path, target)
                # From here on it is what was replaced, as after an exchange.
                os.rename(aside, path)
            except BaseException:
                try:
                    rename_to_new(aside, target)
                except FileExistsError:
                    discard(aside)
                except FileNotFoundError:
                    pass
                raise

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


def set_aside(folder: str, first: str, check: Callable[[str], None]) -> None:
    """Remove a folder, whose name disappears in one step.

    It gets its name back if `check` raises an error for the temporary name, or from the
    next writer.

    Where that cannot be (``KEEPS_NAME``), its file `first` goes first.
    """
    with TemporaryName(temporary_name(folder)) as left:
        if _took_name(folder, left, check):
            discard(left)
            return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, first))
        remove_tree(folder)


def _took_name(folder: str, left: str, check: Callable[[str], None]) -> bool:
    """Rename a folder to `left`, unless `check` raises; return whether it could be."""
    name = TemporaryName(temporary_name(folder, ASIDE))
    with opened(folder, FOLDER) as number, name as aside:
        # It shows that this is alive where our process ID means nothing, as in another
        # container.
        with contextlib.suppress(OSError):
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            try:
                os.rename(folder, aside)
            except OSError as error:
                if error.errno not in KEEPS_NAME:
                    raise
                check(folder)
                return False
            check(aside)
            # From here on it is not given back.
            os.rename(aside, left)
        except BaseException:
            name.keep()
            give_back(aside, folder)
            raise
    return True


def discard(folder: str) -> None:
    """Remove a folder with a temporary name; if that fails, ``cleanup`` can do it."""
    try:
        remove_tree(folder)
    except OSError as error:
        log.warning("an obsolete folder was not removed: %s", error)


def put_back(
    folder: str, names: list[str], named: Callable[[str], bool] | None = None
) -> bool:
    """Give folders their names back that dead processes have set aside for new ones.

    `names` are those in the folder; return whether any looked like it.  With `named`, the
    caller holds the lock that lets nobody else write such names: those of any host, and of
    this one if they are dead.
    """

    def chosen(found: OwnerOf) -> bool:
        # A file is not locked while it is set aside, so who has done it may be alive.
        if found["kind"] != ASIDE or not os.path.isdir(os.path.join(folder, found.string)):
            return False
        mine = named is not None and named(found["name"]) and not is_of_living(found)
        return is_dead(found) or mine

    if not any(name.endswith(f".nvmeio-{ASIDE}") for name in names):
        return False
    _, failed = remove_left(folder, chosen)
    if failed is not None:
        log.warning("a folder that was set aside has not got its name: %s", failed)
    return True


def remove_unfinished(folder: str, named: Callable[[str], bool], *, own: bool) -> None:
    """Remove what is unfinished, of any host, whose final names are chosen.

    The caller holds the lock that lets no other process write such names.  With `own`,
    remove only those of this process that it does not use any more.  Of other names, remove
    those of processes of this host that have died, such as of one that fetched a copy.
    """

    def chosen(found: OwnerOf) -> bool:
        if not named(found["name"]):
            return is_dead(found)
        return is_left(found) or not (own or is_of_living(found))

    removed, failed = remove_left(folder, chosen)
    for path in removed:
        log.info("removed what a save that was stopped has left: %s", path)
    if failed is not None:
        log.warning("what a save that was stopped has left stays: %s", failed)
