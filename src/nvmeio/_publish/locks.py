"""Locks of folders, whose files have their modes from the moment they have their names."""

import contextlib
import os

from nvmeio._files.descriptors import Descriptor, best_effort, opened
from nvmeio._files.locks import WriterLock, maker_text, mode_for_writers
from nvmeio._native.descriptor import TemporaryName
from nvmeio._publish.files import link
from nvmeio._publish.names import OwnerOf, is_dead, is_left, remove_left, temporary_name

__all__ = ["FolderLock", "SharedLock"]


class FolderLock(WriterLock):
    """A lock that only those can take who may write its new file, and nobody else hold."""

    # Before it is dressed.  Who may not write the file may not read it, and so lock it.
    _mode = 0o622

    def _create(self) -> Descriptor | None:
        if self._make():
            return None
        # Where files have one name only.
        if (made := super()._create()) is not None:
            self._dress(made.number)
        return made

    def _make(self) -> bool:
        """Make the file, which others may lock from its first moment; return whether."""
        folder, name = os.path.split(self.path)

        def is_of_lock(found: OwnerOf) -> bool:
            return found["name"] == name and (is_dead(found) or is_left(found))

        with best_effort():
            remove_left(folder, is_of_lock)
        with best_effort(), TemporaryName(temporary_name(self.path)) as path:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with opened(path, flags, self._mode) as number:
                self._dress(number)
                os.write(number, maker_text())
                with contextlib.suppress(FileExistsError):
                    link(number, self.path)
            return True
        return False

    def _dress(self, number: int) -> None:
        """Give the new file its mode."""
        with best_effort():
            os.fchmod(number, mode_for_writers(os.fstat(number).st_mode))


class SharedLock(FolderLock):
    """A lock that all can take who may write in its folder, also after a killed holder.

    They are members of a group, which a new file need not have, those in an ACL, and whom
    root saves for.
    """

    _mode = 0o600

    def _dress(self, number: int) -> None:
        about = os.stat(os.path.dirname(self.path))
        with best_effort():
            os.fchmod(number, 0o666 if about.st_mode & 0o022 else 0o600)
        if os.geteuid() == 0:
            with best_effort():
                os.fchown(number, about.st_uid, -1)
