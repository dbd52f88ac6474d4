"""A folder of steps: the root of a Checkpointer, or the folder that it copies steps to."""

import contextlib
import errno
import os
import re
import stat
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple, Protocol

from nvmeio._events.log import log
from nvmeio._files.descriptors import ask_anew, opened
from nvmeio._files.folders import make_folders, sync_folder
from nvmeio._files.kinds import MANIFEST, STEP, what_is_in
from nvmeio._files.paths import (
    dangling,
    exists,
    exists_now,
    is_anothers,
    is_strangers,
    naming,
)
from nvmeio._publish.claims import remove_if
from nvmeio._publish.files import replace_file
from nvmeio._publish.folders import Unfinished, put_back, remove_unfinished, set_aside
from nvmeio._publish.locks import FolderLock
from nvmeio._publish.names import ASIDE, final_name
from nvmeio.checkpoint._errors import (
    CheckpointError,
    GoneError,
    MovedError,
    NotDamagedError,
    is_lost,
)
from nvmeio.checkpoint._locks import exclusive
from nvmeio.checkpoint._manifest import FILES, TREE
from nvmeio.checkpoint._places import Folder, Place
from nvmeio.checkpoint._restoring import Held

__all__ = [
    "ATTEMPT",
    "LATEST",
    "NAMED_BYTES_MAX",
    "OURS",
    "STEP_MAX",
    "TRIES",
    "Copy",
    "Kept",
    "Root",
    "StepFolder",
    "StepPlace",
    "missing",
    "name_another",
    "named_in",
    "prune",
    "require_ours",
]

STEP_MAX = 10**18
# How often to read a step that is replaced meanwhile.  The limit is for file systems whose
# inode numbers change, where each step always seems to be replaced.
TRIES = 100
# Of how many of the newest steps a save sees whether another program has damaged them.
_LOOKED_AT_AGAIN = 10
# The file that names the newest step.
LATEST = ".nvmeio-latest"
_LOCK, _LOCK_OF = ".nvmeio-lock", ("a Checkpointer", "writes checkpoints")
_NAMED = re.compile(rb"step-(0|[1-9]\d{0,18})\n")
NAMED_BYTES_MAX = 100
# How a manifest.json and a tree.json of any version begin.
OURS = re.compile(rb'\s*\{\s*"format":\s*"nvmeio-checkpoint-\d+"')

# The name of the folder of a copy in an object store.
ATTEMPT = re.compile(
    r"(?P<number>[1-9]\d*)\.(?P<host>[^./]*)-(?P<pid>\d+)-(?P<start>\d+)-[0-9a-f]{8}"
)

# Of each, a folder and its files; None for what is missing.
Identities = tuple[os.stat_result | None, ...]
# Copies the files of a step to a place, the manifest last; returns their size in bytes.
Copy = Callable[[Place], int]


class StepPlace(Protocol):
    """What has steps: a folder, or an object store."""

    @property
    def where(self) -> str:
        """The path or URL, for messages."""

    @property
    def moved(self) -> str | None:
        """What to say if this is another folder than at the last save; else None."""

    def steps(self) -> list[int]:
        """Return the steps of which there is anything, or that are named, newest first."""

    def named(self) -> int | None:
        """Return the newest step as its writer has named it, in a file of a fixed name.

        A list of names may be an old one, as NFS caches them; an open file is not.
        """

    def name(self, step: int | None) -> None:
        """Name the newest step, or none, as far as that succeeds."""

    def identity(self, step: int) -> str | None:
        """Return the identity of a save; None unless all files are there, undamaged."""

    def was_complete(self, step: int, *, again: bool) -> bool:
        """Return whether a step was complete, as its only writer remembers.

        With `again`, see whether its files have changed since, where that is cheap.
        """

    def read(self, step: int, read: Any, files: Collection[str]) -> Any:
        """Call `read` with a step, and return its result; it needs the `files`.

        Raises GoneError if there is no such step, CheckpointError if it is damaged.
        """

    def take(self, step: int) -> None:
        """Become the only writer of steps from this one on."""

    def release(self) -> None:
        """Let others write."""

    def copy(self, step: int, copy: Copy) -> int:
        """Add a step, or replace it; other readers see all of its files or none."""

    def require_alone(self) -> None:
        """Raise FileExistsError, once a step, if another writer has added it."""

    def discard_left(self, step: int) -> None:
        """Remove what dead processes of this host have left unfinished of a step."""

    def is_anothers(self, step: int) -> bool:
        """Return whether another user may have planted a step, which does not count."""

    def removing(
        self, step: int
    ) -> "contextlib.AbstractContextManager[Callable[[], None]]":
        """Yield a function that removes a step; raise if it must not be removed.

        Raises GoneError, BlockingIOError if it is being read, and FileExistsError if it is
        not a step of a Checkpointer.
        """

    def settle(self) -> None:
        """Make removals durable."""


class Kept(NamedTuple):
    """Which steps are kept: the newest, and those that are multiples of a number."""

    newest: int | None
    every: int | None


def prune(place: StepPlace, kept: Kept, saved: int | None) -> list[int]:
    """Remove the complete steps that are neither kept nor the one just saved.

    Looks only at the newest ones and at those to remove, however many are kept.
    """
    if kept.newest is None:
        return []
    removed, left, doomed = [], kept.newest, []
    failed: OSError | None = None
    steps = place.steps()
    # Also if there are no more than are kept: a store notes what it has seen of each.
    for index, step in enumerate(steps):
        if left:
            again = index < _LOOKED_AT_AGAIN
            left -= step == saved or (
                place.was_complete(step, again=again) and not place.is_anothers(step)
            )
        elif step != saved and not (kept.every and step % kept.every == 0):
            doomed.append(step)
    for step in reversed(doomed):
        try:
            if place.is_anothers(step):
                continue
            if not place.was_complete(step, again=True):
                place.discard_left(step)
                continue
            with place.removing(step) as remove:
                name_another(place, step)
                remove()
                removed.append(step)
        except FileExistsError as error:
            log.warning("step %d is not pruned: %s", step, error)
        except GoneError:
            # Another process has removed it.
            continue
        except OSError as error:
            is_lost_lock = os.path.basename(error.filename or "") == _LOCK
            if isinstance(error, BlockingIOError) and not is_lost_lock:
                # It is being read.
                continue
            # The others can be removed nevertheless.
            failed = failed or error
    if failed is not None:
        try:
            raise failed
        finally:
            # Its traceback has this frame, and with it what the failed call had open.
            del failed
    return removed


def name_another(place: StepPlace, step: int) -> None:
    """Name the newest other step, if this one is named: it will be removed."""
    if place.named() == step:
        others = (each for each in place.steps() if each != step)
        place.name(next(filter(place.identity, others), None))


def named_in(text: bytes) -> int | None:
    """Return the step in the file that names the newest; None if it is not ours."""
    found = _NAMED.fullmatch(text)
    return None if found is None else int(found[1])


def _is_untouched(before: os.stat_result | None, now: os.stat_result | None) -> bool:
    """Return whether a file is as it was.

    Its number does not say so: some FUSE file systems give it another one each time.
    """
    if before is None or now is None:
        return before is now
    then = before.st_size, before.st_ctime_ns
    return then == (now.st_size, now.st_ctime_ns)


def _is_unmended(before: os.stat_result | None, now: os.stat_result | None) -> bool:
    """Return whether nobody has written to a file, or replaced it.

    A chmod, which changes the ctime too, mends nothing.  What took its place has another
    number and another ctime, if maybe the same mtime.
    """
    if before is None or now is None:
        return before is now
    if (before.st_size, before.st_mtime_ns) != (now.st_size, now.st_mtime_ns):
        return False
    return before.st_ino == now.st_ino or before.st_ctime_ns == now.st_ctime_ns


def missing(path: str) -> CheckpointError:
    """Return the error for a step that is named but not there."""
    file = f"{path.rpartition('/')[0]}/{LATEST}"
    return CheckpointError(
        f"{path} is missing, but {file} names it: either this host sees an old list of the "
        "folder, as NFS may for a minute, or another program has removed the step; then "
        "remove the file"
    )


def not_ours(folder: str) -> str | None:
    """Say what has the name of a step but is not one; None if it is one, even damaged.

    An empty folder, and one with only what a stopped copy has left, count as ours.
    """
    try:
        mode = os.lstat(folder).st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISDIR(mode):
        return "it is a symbolic link" if stat.S_ISLNK(mode) else "it is not a folder"
    try:
        with os.scandir(folder) as entries:
            is_file = {e.name: not e.is_dir(follow_symlinks=False) for e in entries}
    except FileNotFoundError:
        return None
    except PermissionError:
        return what_is_in(folder)
    names = is_file.keys()
    if names and is_strangers(folder, os.path.dirname(folder)):
        return "it is another user's"
    others = [
        n for n in names if not (is_file[n] and (n in FILES or final_name(n) in FILES))
    ]
    ours = any(_is_ours(os.path.join(folder, name)) for name in (MANIFEST, TREE))
    if not ours and not exists(folder):
        # It was removed meanwhile, as by a thread that prunes copies.
        return None
    if others and ours:
        shown = ", ".join(sorted(others)[:3])
        return f"besides the files of a step, it has {shown}"
    if others or not (ours or names.isdisjoint(FILES)):
        return what_is_in(folder)
    return None


def _is_ours(path: str) -> bool:
    return OURS.match(_beginning(path, 200)) is not None


def _is_empty(path: str) -> bool:
    """Return whether there is no file, or an empty one, as after a power failure.

    Or one of zeros.
    """
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return True
    if not stat.S_ISREG(found.st_mode) or found.st_size > NAMED_BYTES_MAX:
        return False
    if is_strangers(path, os.path.dirname(path)):
        return False
    return not _beginning(path, NAMED_BYTES_MAX).strip(b"\0")


def _beginning(path: str, nbytes: int) -> bytes:
    """Return how a file begins; b"" if there is none, or a link, or a folder.

    Or one that this user may not read, and that another may have planted.
    """
    try:
        # What close(2) reports is no matter after reading.
        with (
            naming(path),
            opened(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as descriptor,
        ):
            return os.read(descriptor, nbytes)
    except OSError as error:
        if error.errno in (
            errno.ENOENT,
            errno.ENOTDIR,
            errno.ELOOP,
            errno.EISDIR,
            errno.ENXIO,
            errno.EAGAIN,  # a FIFO that is open for writing
        ):
            return b""
        if error.errno == errno.EACCES and _is_anothers(path):
            return b""
        raise


def _is_anothers(path: str) -> bool:
    """Return whether a file, or the folder that has it, is another user's."""
    folder = os.path.dirname(path)
    try:
        return is_anothers(path, folder) or is_anothers(folder, os.path.dirname(folder))
    except PermissionError:
        return True


def require_ours(folder: str, found: str | None = None, doing: str = "replaced") -> None:
    """Raise FileExistsError if a folder, now at `found`, is not a step of ours.

    PermissionError if its files may not be removed: they would stay, without its name.
    """
    there = found or folder
    if (words := not_ours(there)) is not None:
        words = f"it is not {doing}, because it is no step of a Checkpointer: {words}"
        raise FileExistsError(errno.EEXIST, words, folder)
    if os.path.isdir(there) and not os.access(there, os.W_OK | os.X_OK, effective_ids=True):
        words = f"it is not {doing}, because you have no permission to remove its files"
        raise PermissionError(errno.EACCES, words, folder)


class StepFolder(Unfinished):
    """A temporary folder that gets the name of a step, and replaces only a step."""

    def __init__(
        self, target: str, lock: FolderLock, sizes: Collection[int] | None = None
    ) -> None:
        """Make the folder, for files of these `sizes` if they are known."""
        require_ours(target)
        super().__init__(target, replace=True, sizes=sizes)
        self._writing = lock

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if isinstance(error[1], OSError) and error[1].errno in (errno.ENOENT, errno.ESTALE):
            # Who has got the lock of its root meanwhile has removed it.
            self._writing.require()

    def commit(self, *, sync: bool) -> None:
        """Give the folder its final name, if its root is still locked."""
        require_ours(self.target)
        self._writing.require()
        super().commit(sync=sync)

    def _replace(self, path: str, target: str) -> None:
        super()._replace(path, target)
        try:
            # Another program may have written there before the folders were exchanged.
            require_ours(target, path)
            self._writing.require()
        except BaseException:
            super()._replace(path, target)
            raise


def _is_name_of_ours(name: str) -> bool:
    return name == LATEST or STEP.fullmatch(name) is not None


class Root:
    """A folder of steps, which one process at a time writes."""

    def __init__(self, path: str) -> None:
        self.where = path
        self.lock = FolderLock(path, _LOCK, *_LOCK_OF)
        # Those that were found damaged, with what was there and the error, and those that
        # were complete.
        self._damaged: dict[int, tuple[Identities, str]] = {}
        self._complete: dict[int, Identities] = {}
        # The steps that this has removed, and not written again.
        self.removed: set[int] = set()

    @property
    def moved(self) -> str | None:
        """What to say if the lock is elsewhere; None if it is not."""
        if not self.lock.is_elsewhere:
            return None
        return (
            f"{self.where} is another folder than at the last save: it was moved, or "
            "something was mounted there or unmounted, so the steps before are elsewhere"
        )

    def folder(self, step: int) -> str:
        """Return the path of a step's folder."""
        return os.path.join(self.where, f"step-{step}")

    def _names(self) -> list[str]:
        """List the root; give steps their names back that dead processes have set aside."""
        try:
            if exists_now(self.where):
                ask_anew(self.where)
            names = os.listdir(self.where)
            if put_back(self.where, names):
                names = os.listdir(self.where)
                self._put_back_of_hosts(names)
                names = os.listdir(self.where)
            return names
        except FileNotFoundError:
            if (words := dangling(self.where)) is not None:
                # Such as a place that is not mounted: nobody knows what is there.
                raise OSError(errno.ESTALE, words, self.where) from None
            return []

    def _put_back_of_hosts(self, names: list[str]) -> None:
        """Do as ``put_back`` for hosts that are lost, while nobody writes here."""
        aside = [final_name(each) or "" for each in names if each.endswith(ASIDE)]
        if not any(map(STEP.fullmatch, aside)):
            return
        lock = FolderLock(self.where, _LOCK, *_LOCK_OF)
        # Another process writes, or this user may not.
        with contextlib.suppress(OSError):
            if self.lock.descriptor < 0:
                lock.take()
            else:
                self.lock.require()
            try:
                put_back(self.where, names, _is_name_of_ours)
            finally:
                lock.release()

    def steps(self) -> list[int]:
        """Return the steps that have a folder or are named, newest first."""
        found = {int(each[1]) for each in map(STEP.fullmatch, self._names()) if each}
        if (named := self.named()) is not None:
            found.add(named)
        return sorted(found, reverse=True)

    def named(self) -> int | None:
        """Return the step in the file that names the newest; None if there is none."""
        path = os.path.join(self.where, LATEST)
        try:
            text = _beginning(path, NAMED_BYTES_MAX)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            # Another host has replaced it since it was opened.
            text = b""
        if not text and exists_now(path):
            text = _beginning(path, NAMED_BYTES_MAX)
        found = named_in(text)
        if found is not None and is_strangers(path, self.where):
            return None
        return found

    def name(self, step: int | None) -> None:
        """Name the newest step, or none; not synced, because the steps are what counts."""
        path = os.path.join(self.where, LATEST)
        try:
            if step is None:
                remove_if(self.lock.require, [path])
            elif self.named() is not None or _is_empty(path):
                # Another user's too, who has saved to this folder before.
                text = b"step-%d\n" % step
                replace_file(
                    text, path, sync=False, read_only=True, check=self.lock.require
                )
        except OSError as error:
            # Not by a warning, which may be an error, because the steps are changed.
            log.warning("the newest step was not named in %s: %s", path, error)

    def identity(self, step: int) -> str | None:
        """Return the identity of a save, unless it is incomplete or was found damaged."""
        if self.damage(step) is not None:
            return None
        try:
            found: str = self._read(step, lambda held: held.manifest.identity)
        except (CheckpointError, GoneError):
            return None
        except OSError as error:
            if not is_lost(error):
                raise
            return None
        return found

    def written(self, step: int) -> None:
        """Remember that a step is complete, because this process has just written it."""
        self.removed.discard(step)
        # Of an older step of this number, whose files may have had the same numbers, sizes
        # and times.
        self.forget_damage(step)
        if None not in (identities := self._identities(step)):
            self._complete[step] = identities
        # The step is there, so an error of its name is not one of the save.
        with contextlib.suppress(OSError):
            named = self.named()
            if named is None or step >= named or not exists_now(self.folder(named)):
                self.name(step)

    def was_complete(self, step: int, *, again: bool) -> bool:
        """Return whether a step was complete; with `again`, when its files changed last."""
        if not again and step in self._complete:
            return True
        identities = self._identities(step)
        if None in identities or self.damage(step) is not None:
            return False
        before = self._complete.get(step, ())
        if len(before) < len(identities) or not all(map(_is_untouched, before, identities)):
            if self.identity(step) is None:
                return False
            self._complete[step] = identities
        return True

    def read(self, step: int, read: Any, files: Collection[str] = FILES) -> Any:
        """Read a step; if it is damaged, remember that until it changes."""
        # Taken before, because another process may replace the folder after the error.
        identities = self._identities(step)
        try:
            return self._read(step, read)
        except (CheckpointError, OSError) as error:
            if is_lost(error) and any(identities):
                words = str(error) if isinstance(error, CheckpointError) else ""
                self._damaged[step] = identities, words
            raise

    def _read(self, step: int, read: Any) -> Any:
        """Read a step; read it again if it was replaced meanwhile."""
        folder, stale = self.folder(step), False
        for _ in range(TRIES):
            if not exists_now(folder):
                # Its writer may have been killed after it had set it aside.
                self._names()
                # Looked at first, because a step comes before it is named.
                named = self.named()
                if not exists_now(folder):
                    raise missing(folder) if named == step else GoneError
            try:
                with Held(folder, step) as held:
                    self._refuse_hidden(folder)
                    return read(held)
            except MovedError:
                continue
            except FileNotFoundError as error:
                # It was there when its size was checked.
                name = os.fsdecode(error.filename or "")
                if os.path.dirname(name) != folder:
                    # Such as a profile: a caller that begins anew must not do so here.
                    raise NotDamagedError(f"{folder} cannot be read: {error}") from error
                raise CheckpointError(f"{name} is missing") from None
            except PermissionError as error:
                if not is_anothers(folder, self.where):
                    raise
                words = f"cannot be read, and is another user's: {error.strerror}"
                raise CheckpointError(f"{folder} {words}") from None
            except OSError as error:
                # This host may still remember the name of what another one has replaced.
                stale = error.errno == errno.ESTALE
                if not stale:
                    raise
            except CheckpointError:
                self._refuse_foreign(step)
                raise
        if stale:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), folder)
        raise NotDamagedError(f"{folder} was replaced {TRIES} times while it was read")

    def _refuse_foreign(self, step: int) -> None:
        """Raise GoneError if a step's folder has files, and none with a name of ours.

        If the step is named, or this is a copy of an object store, raise CheckpointError:
        it is no stranger's.
        """
        folder = self.folder(step)
        try:
            names = os.listdir(folder)
        except OSError:
            return
        if not names or any(name in FILES or final_name(name) in FILES for name in names):
            return
        if copies := list(filter(ATTEMPT.fullmatch, names)):
            words = f"has a copy as an object store keeps it, {copies[0]}, which is read "
            words += "by the URL of the store; to read it here, move its files up"
        elif self.named() == step:
            words = f"is named by {LATEST}, but is no step: {what_is_in(folder)}"
        else:
            raise GoneError from None
        raise CheckpointError(f"{folder} {words}") from None

    def _refuse_hidden(self, folder: str) -> None:
        """Raise PermissionError if another user's step has files that cannot be read."""
        if is_anothers(folder, self.where):
            for name in FILES:
                with opened(os.path.join(folder, name), os.O_RDONLY | os.O_NONBLOCK):
                    pass

    def damage(self, step: int) -> str | None:
        """Say what was found damaged; "" if that may pass; None if nothing was."""
        # One look, because verify() in another thread may remove the entry.
        if (found := self._damaged.get(step)) is None:
            return None
        identities, words = found
        same = all(map(_is_unmended, identities, self._identities(step)))
        return words if same else None

    def forget_damage(self, step: int) -> None:
        """Count a step again, because all of it was read."""
        self._damaged.pop(step, None)

    def _identities(self, step: int) -> Identities:
        """Return what a step's folder and its files are now.

        The files too, because another tool may still write to them, or repair them.
        """
        folder = self.folder(step)
        identities: list[os.stat_result | None] = []
        for path in (folder, *(os.path.join(folder, name) for name in FILES)):
            try:
                identities.append(os.lstat(path))
            except OSError:
                identities.append(None)
        return tuple(identities)

    def take(self, step: int = 0) -> None:
        """Create and lock the folder, and remove unfinished steps of dead processes."""
        if (words := self.moved) is not None:
            log.warning("%s", words)
        make_folders(self.where)
        # Of this process only what an interrupted save has left, because none is going on.
        remove_unfinished(self.where, _is_name_of_ours, own=not self.lock.take())

    def release(self) -> None:
        """Release the lock."""
        self.lock.release()

    def copy(self, step: int, copy: Copy) -> int:
        """Copy a step into a temporary folder, which then gets its name."""
        target = self.folder(step)
        with StepFolder(target, self.lock) as folder:
            nbytes = copy(Folder(folder.path, target))
            folder.commit(sync=True)
        self.written(step)
        return nbytes

    def require_alone(self) -> None:
        """Do nothing: the lock has kept others away."""

    def discard_left(self, step: int) -> None:
        """Do nothing: ``take`` has removed it."""

    def settle(self) -> None:
        """Make removals durable, so that no step comes back after a power failure."""
        sync_folder(self.where)

    def is_anothers(self, step: int) -> bool:
        """Return whether another user may have planted a step, which does not count."""
        return is_strangers(self.folder(step), self.where)

    @contextlib.contextmanager
    def removing(self, step: int) -> Iterator[Callable[[], None]]:
        """Yield a function that removes a step, which is locked against readers."""
        folder = self.folder(step)
        if not exists_now(folder):
            raise GoneError
        require_ours(folder, doing="removed")
        with contextlib.ExitStack() as lock:
            if not lock.enter_context(exclusive(os.path.join(folder, MANIFEST))):
                words = "the step is being read; try again later"
                raise BlockingIOError(errno.EAGAIN, words, folder)

            def remove() -> None:
                self.lock.require()
                self.removed.add(step)
                self._complete.pop(step, None)

                def check(left: str) -> None:
                    # Another program may have written there meanwhile.
                    require_ours(folder, left, doing="removed")
                    # Or another host, to which the server of NFS has given the lock.
                    self.lock.require()
                    # NFS and FUSE leave a file that is open in its folder, by another
                    # name.  No reader finds the step any more.
                    lock.close()

                try:
                    set_aside(folder, MANIFEST, check)
                except FileNotFoundError:
                    self.lock.require()
                    if exists_now(folder):
                        raise
                    raise GoneError from None

            yield remove
