"""Who may publish a checkpoint in a folder: the latest that has begun; what it removes."""

import contextlib
import errno
import os
import stat
from collections.abc import Iterable

from nvmeio._events.log import log
from nvmeio._files.descriptors import Descriptor, ask_anew, opened
from nvmeio._files.folders import sync_folder
from nvmeio._files.kinds import METADATA, OF_RANK
from nvmeio._files.paths import exists, naming, remove_now
from nvmeio._publish.attributes import become_like
from nvmeio._publish.names import final_name, remove_left, rename, temporary_name

__all__ = ["Claim", "log_left", "remove_unneeded"]

# A claim whose time is this much after a new one is older, by a clock that was set back.
_MEANWHILE_NS = 60 * 10**9


class Claim:
    """The right to publish a checkpoint in a folder, which the latest save has.

    It is a file with a temporary name, which becomes ``.metadata``, or such a file of one
    rank.  A later save removes it, so that the rename fails.  It needs no lock, which a
    machine that has lost its network could hold for ever.
    """

    def __init__(self, target: str, mode: int | None = None) -> None:
        """Take the right; without a mode, the file will become like the old one."""
        self.target, self.path = target, temporary_name(target)
        self.is_published = self._is_filled = False
        folder, name = os.path.split(target)
        # Those of dead processes first, whose times may be in the future.
        remove_left(folder, lambda found: _exclude(found["name"], name))
        if mode is None:
            mode = 0o666
            with contextlib.suppress(FileNotFoundError):
                # Users who may not read the old file must not open the new one.
                if stat.S_ISREG(found := os.lstat(target).st_mode):
                    mode &= found | 0o600
        try:
            with naming(target):
                opened(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode).close()
            self._take(folder, name)
        except BaseException:
            self.remove()
            raise

    def _take(self, folder: str, name: str) -> None:
        """Remove the claims of earlier saves; raise FileExistsError if there is a later."""
        try:
            mine = self._place(self.path)
        except FileNotFoundError:
            raise self._lost() from None
        # NFS remembers for seconds what is in a folder.
        ask_anew(folder)
        for each in os.listdir(folder):
            other = os.path.join(folder, each)
            if other == self.path or not _exclude(final_name(each) or "", name):
                continue
            with contextlib.suppress(FileNotFoundError):
                theirs = self._place(other)
                if mine < theirs and theirs[0] - mine[0] <= _MEANWHILE_NS:
                    # Both have begun now.  One of them must go on.
                    raise self._lost()
                os.unlink(other)

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


def _exclude(one: str, other: str) -> bool:
    """Return whether of two saves that publish files of these names only one may.

    Ranks that save without the others do not exclude each other, but a save of all ranks.
    """
    if METADATA not in (one, other):
        return one == other
    return all(each == METADATA or OF_RANK.fullmatch(each) for each in (one, other))


def remove_unneeded(folder: str, names: Iterable[str]) -> None:
    """Remove files that are not referred to any more; log it if one cannot be removed."""
    for name in names:
        try:
            remove_now(os.path.join(folder, name))
        except OSError as error:
            log_left(error)


def log_left(error: OSError) -> None:
    """Log that a file could not be removed."""
    log.warning("an obsolete file was not removed: %s", error)
