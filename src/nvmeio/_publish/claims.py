"""Who may publish a checkpoint in a folder: the latest that has begun; what it removes."""

import contextlib
import errno
import functools
import hashlib
import os
import stat
from collections.abc import Callable, Iterable

from nvmeio._events.log import log
from nvmeio._files.descriptors import Descriptor, ask_anew, open_regular, opened
from nvmeio._files.folders import sync_folder
from nvmeio._files.kinds import INDEX_NAME, INDEX_OF_RANK, METADATA, OF_RANK
from nvmeio._files.paths import exists, exists_now, naming, remove_now
from nvmeio._native.descriptor import TemporaryName
from nvmeio._publish.attributes import become_like
from nvmeio._publish.names import (
    ASIDE,
    FILE_NAME_MAX,
    KEEPS_NAME,
    OwnerOf,
    final_name,
    give_back,
    is_aside,
    is_dead,
    is_of_living,
    owner_of,
    remove_left,
    rename,
    short_name,
    temporary_name,
)

__all__ = ["Claim", "log_left", "remove_if", "remove_unneeded"]

# A claim whose time is this much after a new one is older, by a clock that was set back.
_MEANWHILE_NS = 60 * 10**9


class Claim:
    """The right to publish a checkpoint in a folder, which the latest save has.

    It is a file with a temporary name, which becomes ``.metadata``, or such a file of one
    rank; or it stands for the index of a model, and becomes nothing.  A later save removes
    it, so that the rename fails.  It needs no lock, which a machine that has lost its
    network could hold for ever.  `displaced` are those whose right it was, of whom one may
    have been stopped before it gives a file its name.
    """

    def __init__(self, target: str, mode: int | None = None) -> None:
        """Take the right; without a mode, the file will become like the old one."""
        folder, name = os.path.split(target)
        self._name = _name_of_claim(name)
        self.target = target
        self.path = temporary_name(os.path.join(folder, self._name))
        self.is_published = self._is_filled = False
        # What this has published, which no other has: it names the files of this save.
        self._text = b""

        def is_claim(found: OwnerOf) -> bool:
            return found["kind"] != ASIDE and _exclude(found["name"], self._name)

        # Those of dead processes first, whose times may be in the future.
        removed, _ = remove_left(folder, is_claim)
        self.displaced = {owner_of(os.path.basename(path)) for path in removed}
        if mode is None:
            mode = 0o666
            with contextlib.suppress(FileNotFoundError):
                # Users who may not read the old file must not open the new one.
                if stat.S_ISREG(found := os.lstat(target).st_mode):
                    mode &= found | 0o600
        try:
            with naming(target):
                opened(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode).close()
            names = self._take(folder)
            if any(map(is_aside, names)):
                remove_left(folder, functools.partial(self._is_file_aside, folder))
        except BaseException:
            self.remove()
            raise

    def _is_file_aside(self, folder: str, found: OwnerOf) -> bool:
        """Return whether what a writer has set aside is to get its name back.

        A killed one would have removed it, or given it back.  What marks others is removed:
        those may have been about to be replaced.
        """
        path = os.path.join(folder, found.string)
        is_lost = owner_of(found.string) in self.displaced
        if found["kind"] != ASIDE or os.path.isdir(path):
            return False
        if is_of_living(found) and not is_lost:
            return False
        if _exclude(found["name"], self._name) and is_dead(found):
            remove_unneeded(folder, [found.string])
            return False
        return is_lost or self._is_about(found["name"])

    def _is_about(self, name: str) -> bool:
        """Return whether only who has the right may write a file.

        Ranks, and drains whose marks differ, write beside each other.
        """
        if OF_RANK.fullmatch(self._name):
            return name.startswith(f"{self._name.removesuffix(METADATA)}_")
        if INDEX_OF_RANK.fullmatch(self._name):
            return name.startswith(self._name.removesuffix(INDEX_NAME))
        return self._name in (METADATA, INDEX_NAME, name)

    def _take(self, folder: str) -> list[str]:
        """Remove the claims of earlier saves, and return the names in the folder.

        Raises FileExistsError if there is a later save.
        """
        try:
            mine = self._place(self.path)
        except FileNotFoundError:
            raise self._lost() from None
        # NFS remembers for seconds what is in a folder.
        ask_anew(folder)
        names = os.listdir(folder)
        for other in self._others(folder, names):
            with contextlib.suppress(FileNotFoundError):
                theirs = self._place(other)
                if mine < theirs and theirs[0] - mine[0] <= _MEANWHILE_NS:
                    # Both have begun now.  One of them must go on.
                    raise self._lost()
                self.displaced.add(owner_of(os.path.basename(other)))
                os.unlink(other)
        return names

    def _others(self, folder: str, names: Iterable[str]) -> list[str]:
        """Return the claims of others that exclude this one."""
        found = [
            os.path.join(folder, each)
            for each in names
            if not is_aside(each) and _exclude(final_name(each) or "", self._name)
        ]
        return [other for other in found if other != self.path]

    @staticmethod
    def _place(path: str) -> tuple[int, str]:
        """Return the place of a claim in the order of all, by the file server's clock."""
        return os.lstat(path).st_mtime_ns, path

    def check(self) -> None:
        """Raise FileExistsError if a later save began before this one has published."""
        if self.is_published:
            return
        # NFS remembers for seconds which names there are, and file systems in user space
        # what a name leads to.
        for each in (os.path.dirname(self.path), self.path):
            ask_anew(each)
        if not exists(self.path):
            raise self._lost()

    def require_last(self) -> None:
        """Raise FileExistsError if a later save has begun, also if this has published."""
        self.check()
        if self.is_published:
            folder = os.path.dirname(self.target)
            for each in (folder, self.target):
                ask_anew(each)
            others = self._others(folder, os.listdir(folder))
            if others or not self._is_there():
                raise self._lost()

    def _is_there(self) -> bool:
        """Return whether what this has published is still there.

        Number and times do not tell: FUSE changes them, and another may have the same.
        """
        with contextlib.suppress(FileNotFoundError), open_regular(self.target) as file:
            found: bytes = file.read(len(self._text) + 1)
            return found == self._text
        return False

    def opened(self) -> Descriptor:
        """Open its file, empty, to be filled."""
        # Not created anew: it may have been removed.  Nor is another file written to, which
        # somebody may have put there.
        made = opened(self.path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            found = os.fstat(made.number)
            # Whose it is says nothing: file servers map users, and root to nobody.
            is_plain = stat.S_ISREG(found.st_mode) and found.st_nlink < 2
            if not is_plain or (found.st_size and not self._is_filled):
                raise self._lost()
            os.ftruncate(made.number, 0)
        except BaseException:
            made.close()
            raise
        self._is_filled = True
        return made

    def commit(self) -> None:
        """Let its file, which the caller has filled, replace the target."""
        try:
            rename(self.path, self.target)
        except FileNotFoundError:
            raise self._lost() from None
        self.is_published = True

    def publish(self, text: bytes, *, sync: bool) -> None:
        """Replace the target, unless a later save has begun."""
        try:
            with naming(self.target):
                made = self.opened()
                with made as number, open(number, "wb", closefd=False) as file:
                    file.write(text)
                    file.flush()
                    become_like(number, self.target)
                    if sync:
                        os.fsync(number)
                    made.check_written()
        except FileNotFoundError:
            raise self._lost() from None
        self._text = text
        self.commit()
        if sync:
            with naming(self.target):
                sync_folder(os.path.dirname(self.target))

    def remove(self) -> None:
        """Give the right up; do nothing if it is lost."""
        folder, name = os.path.split(self.path)
        remove_unneeded(folder, [name])

    def _lost(self) -> OSError:
        words = "another save to this folder has begun meanwhile; make one save at a time"
        return FileExistsError(errno.EEXIST, words, self.target)


def _name_of_claim(name: str) -> str:
    """Return a name for the temporary one of a claim, which would shorten a long name.

    Files of ranks may have names that begin alike.
    """
    if short_name(name) == name:
        return name
    return f"{name[:10]}-{hashlib.sha256(os.fsencode(name)).hexdigest()[:32]}"


def _exclude(one: str, other: str) -> bool:
    """Return whether of two saves that publish files of these names only one may.

    Ranks that save without the others do not exclude each other, but a save of all ranks.
    """
    for of_all, of_rank in ((METADATA, OF_RANK), (INDEX_NAME, INDEX_OF_RANK)):
        if of_all in (one, other):
            return all(each == of_all or of_rank.fullmatch(each) for each in (one, other))
    return one == other


def remove_unneeded(folder: str, names: Iterable[str]) -> None:
    """Remove files that are not referred to any more; log it if one cannot be removed."""
    for name in names:
        try:
            remove_now(os.path.join(folder, name))
        except OSError as error:
            log_left(error)


def remove_if(check: Callable[[], None], paths: Iterable[str]) -> None:
    """Remove those of some files that exist, or raise what `check` raises.

    Each leaves its name before `check` is called, and gets it back if that raises: what
    another has saved meanwhile under that name is not lost, however long this process is
    stopped between two calls.
    """
    check()
    names: list[tuple[str, str, TemporaryName]] = []
    with contextlib.ExitStack() as stack:
        try:
            for path in paths:
                left = TemporaryName(_name_aside(path))
                names.append((path, stack.enter_context(left), left))
            aside = [(path, name) for path, name, _ in names if _set_aside(path, name)]
            check()
        except BaseException:
            # Those that do not get their names back now, get them from the next writer.
            for *_, left in names:
                left.keep()
            for path, temporary, _ in names:
                try:
                    where = _where_aside(path, temporary)
                    give_back(where, path)
                    if where != temporary:
                        with contextlib.suppress(FileNotFoundError):
                            os.rmdir(temporary)
                except OSError as error:
                    if error.errno is None:
                        # A signal handler raised it.
                        raise
                    log_left(error)
            raise
        for path, temporary in aside:
            try:
                os.unlink(_where_aside(path, temporary))
            except OSError as error:
                if error.errno == errno.ENOENT:
                    words = "another process has put it back while it was removed"
                    raise OSError(errno.ESTALE, words, path) from None
                raise OSError(error.errno, error.strerror, path) from error


def _name_aside(path: str) -> str:
    """Return a temporary name for a file, or for its folder, if its own name is long."""
    temporary = temporary_name(path, ASIDE)
    if len(os.fsencode(os.path.basename(temporary))) > FILE_NAME_MAX:
        return temporary_name(path)
    return temporary


def _where_aside(path: str, temporary: str) -> str:
    if is_aside(os.path.basename(temporary)):
        return temporary
    return os.path.join(temporary, os.path.basename(path))


def _set_aside(path: str, temporary: str) -> bool:
    """Let a file leave its name, and return True; remove it if it cannot."""
    # This host may remember that it does not exist.
    if not exists_now(path):
        return False
    with contextlib.suppress(FileNotFoundError), naming(path):
        if stat.S_ISDIR(os.lstat(path).st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        try:
            if (where := _where_aside(path, temporary)) != temporary:
                os.mkdir(temporary)
            os.rename(path, where)
            return True
        except OSError as error:
            if error.errno not in KEEPS_NAME:
                raise
            os.unlink(path)
    return False


def log_left(error: OSError) -> None:
    """Log that a file could not be removed."""
    log.warning("an obsolete file was not removed: %s", error)
