"""The steps of a root and of its copies: which there are, and reading and pruning them."""

import contextlib
import errno
import logging
import os
import pathlib
import warnings
from collections.abc import Callable, Collection, Iterator
from typing import Any

from nvmeio._arguments.checks import integer, whole
from nvmeio._files.kinds import MANIFEST, STEP, what_is_in
from nvmeio._publish.folders import put_back, set_aside
from nvmeio.checkpoint._copies import Copies, NoCopyError
from nvmeio.checkpoint._errors import (
    CheckpointError,
    GoneError,
    MovedError,
    NotDamagedError,
)
from nvmeio.checkpoint._locks import exclusive
from nvmeio.checkpoint._manifest import FILES
from nvmeio.checkpoint._restoring import Held

__all__ = ["STEP_MAX", "Steps", "step_of"]

STEP_MAX = 10**18
# Errors that mean that the data is lost, not that the system is busy or misconfigured.
# ENXIO is what open(2) returns for a socket in the place of a file.
_LOST = (errno.EIO, errno.ENODATA, errno.EUCLEAN, errno.EBADMSG, errno.EILSEQ, errno.ENXIO)

# How often to read a step that is replaced meanwhile.  The limit is for file systems whose
# inode numbers change, where each step always seems to be replaced.
_TRIES = 100

# How many steps an error names.
_STEPS_SHOWN = 10

_log = logging.getLogger("nvmeio")


def step_of(step: Any) -> int:
    """Return the number of a step, checked."""
    return whole("step", integer("step", step), 0, STEP_MAX)


def _is_lost(error: Exception) -> bool:
    """Return whether an error means that a step is damaged or gone."""
    if isinstance(error, OSError):
        return error.errno in _LOST
    return not isinstance(error, NotDamagedError)


def _with(error: Exception, words: str) -> Exception:
    """Return an error of the same type whose message ends in `words`."""
    if isinstance(error, OSError):
        return type(error)(error.errno, f"{error.strerror}; {words}", error.filename)
    return type(error)(f"{error}; {words}")


class Steps:
    """The steps of a root, of which some may be damaged, and their copies."""

    def __init__(self, root: pathlib.Path, drain_to: str | None) -> None:
        self.root, self.drain_to = root, drain_to
        self.copies: Copies | None = None
        # Those that were found damaged, with the identity of the folder.
        self._damaged: dict[int, tuple[int, int]] = {}

    def folder(self, step: int) -> str:
        """Return the path of a step's folder."""
        return str(self.root / f"step-{step}")

    def read(
        self, step: int | None, read: Any, files: Collection[str] = FILES
    ) -> tuple[int, Any]:
        """Call `read` with a step, by default the newest that it can read.

        Return the step and what `read` returned.  `files` are the files that it needs.
        """
        if step is not None:
            step = step_of(step)
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                put_back(str(self.root))
            try:
                return step, self._here_or_copy(step, read, files)
            except GoneError:
                raise self.missing(step) from None
        # The words of the errors.  An error's traceback would keep all that was read, and
        # `into`, in memory while older steps are read.
        passed_over: dict[int, str] = {}
        for each in self.going_down(self.copied()):
            try:
                return each, self._here_or_copy(each, read, files)
            except GoneError:
                continue
            except (CheckpointError, OSError) as error:
                if not _is_lost(error):
                    raise
                if each not in passed_over:
                    words = f"step {each} is skipped: {error}"
                    warnings.warn(words, RuntimeWarning, stacklevel=3)
                passed_over.setdefault(each, str(error))
        if passed_over:
            # A caller that begins anew on FileNotFoundError must not do so here.
            newest = max(passed_over)
            count = len(passed_over)
            which = f"all {count} checkpoints" if count > 1 else "the only checkpoint"
            where = str(self.root)
            if self.copies is not None:
                where += f" and {self.drain_to}"
            words = f"{which} in {where} cannot be read"
            raise CheckpointError(f"{words}; step {newest}: {passed_over[newest]}")
        words = f"no checkpoint; {what_is_in(str(self.root))}"
        raise FileNotFoundError(errno.ENOENT, words, str(self.root))

    def _here_or_copy(self, step: int, read: Any, files: Collection[str]) -> Any:
        """Read a step, or its copy if the step is missing or damaged."""
        try:
            return self.read_here(step, read)
        except (CheckpointError, GoneError, OSError) as error:
            if self.copies is None or not _is_lost(error):
                raise
            try:
                found = self.copies.read(step, read, files)
            except NoCopyError:
                raise error from None
            except Exception as other:
                if isinstance(error, GoneError):
                    # Only the copy exists, so its error is the one to raise.
                    raise
                raise _with(error, f"its copy in {self.drain_to}: {other}") from other
            if not isinstance(error, GoneError):
                words = f"step {step} is read from its copy in {self.drain_to}: {error}"
                warnings.warn(words, RuntimeWarning, stacklevel=4)
            return found

    def _read(self, step: int, read: Any) -> Any:
        """Read a step; read it again if it was replaced meanwhile."""
        folder = self.folder(step)
        for _ in range(_TRIES):
            if not os.path.lexists(folder):
                raise GoneError
            with contextlib.suppress(MovedError), Held(folder, step) as held:
                return read(held)
        raise CheckpointError(f"{folder} was replaced {_TRIES} times while it was read")

    def read_here(self, step: int, read: Any) -> Any:
        """Read a step; if it is damaged, remember that until its folder is replaced."""
        # Taken before, because another process may replace the folder after the error.
        identity = self._identity(step)
        try:
            return self._read(step, read)
        except (CheckpointError, OSError) as error:
            if _is_lost(error) and identity is not None:
                self._damaged[step] = identity
            raise

    def forget_damage(self, step: int) -> None:
        """Count a step again, because all of it was read."""
        self._damaged.pop(step, None)

    def _identity(self, step: int) -> tuple[int, int] | None:
        """Return inode and ctime of the folder of a step; None if there is none."""
        try:
            found = os.lstat(self.folder(step))
        except OSError:
            return None
        return found.st_ino, found.st_ctime_ns

    def missing(self, step: int) -> FileNotFoundError:
        """Return the error for a step that does not exist, or was removed."""
        newest = self.newest_first()
        there = what_is_in(str(self.root))
        if newest:
            more = len(newest) - _STEPS_SHOWN
            there = f"there are the steps {', '.join(map(str, newest[:_STEPS_SHOWN]))}"
            there += f" and {more} more" if more > 0 else ""
        words = f"no such checkpoint; {there}"
        return FileNotFoundError(errno.ENOENT, words, self.folder(step))

    def going_down(self, copied: Collection[int] = ()) -> Iterator[int]:
        """Yield the steps that have a folder, newest first.

        List the root again at the end, until nothing has changed: with ``keep=1``, another
        process may have removed the listed step after it saved the next one.
        """
        before: list[int] = []
        while True:
            steps = sorted({*self.newest_first(), *copied}, reverse=True)
            if steps == before:
                return
            yield from steps
            before = steps

    def newest_first(self) -> list[int]:
        """Return the steps that have a folder, newest first."""
        with contextlib.suppress(FileNotFoundError):
            put_back(str(self.root))
            names = map(STEP.fullmatch, os.listdir(self.root))
            return sorted((int(found[1]) for found in names if found), reverse=True)
        return []

    def complete(self, copied: Collection[int] = ()) -> Iterator[int]:
        """Yield the complete steps, newest first; `copied` are complete as copies."""
        for step in self.going_down(copied):
            if step in copied or self._is_complete(step):
                yield step

    def copied(self) -> list[int]:
        """Return the steps in `drain_to`; if they cannot be listed, log it, return none."""
        if self.copies is None:
            return []
        try:
            return self.copies.steps()
        except Exception as error:
            # fsspec may raise any type.
            _log.warning("the copies in %s cannot be listed: %s", self.drain_to, error)
            return []

    def _is_complete(self, step: int) -> bool:
        # One look, because verify() in another thread may remove the entry.
        damaged = self._damaged.get(step)
        if damaged is not None and damaged == self._identity(step):
            return False
        try:
            self._read(step, lambda held: None)
        except (CheckpointError, GoneError):
            return False
        except OSError as error:
            if not _is_lost(error):
                raise
            return False
        return True

    def prune(self, kept: Callable[[list[int]], list[int]], saved: int | None) -> list[int]:
        """Remove the complete steps that are neither kept nor the one just saved."""
        removed = []
        steps = sorted({*self.complete()})
        stay = {*kept(steps), saved}
        for step in steps:
            if step in stay:
                continue
            with exclusive(os.path.join(self.folder(step), MANIFEST)) as free:
                if free:
                    set_aside(self.folder(step))
                    removed.append(step)
        return removed
