"""The steps of a root and of its copies: which there are, and reading them."""

import errno
import warnings
from collections.abc import Collection, Iterator
from typing import Any

from nvmeio._arguments.checks import integer, whole
from nvmeio._files.kinds import what_is_in
from nvmeio._files.paths import exists
from nvmeio.checkpoint._errors import CheckpointError, GoneError, OtherError, is_lost
from nvmeio.checkpoint._manifest import FILES
from nvmeio.checkpoint._roots import STEP_MAX, Root, StepPlace

__all__ = ["Steps", "step_of"]

# How many steps an error names.
_STEPS_SHOWN = 10


def step_of(step: Any) -> int:
    """Return the number of a step, checked."""
    return whole("step", integer("step", step), 0, STEP_MAX)


def _with(error: Exception, words: str) -> Exception:
    """Return an error of a root whose message ends in `words`."""
    if isinstance(error, OSError):
        return OSError(error.errno, f"{error.strerror}; {words}", error.filename)
    return type(error)(f"{error}; {words}")


def _shown(steps: list[int]) -> str:
    more = len(steps) - _STEPS_SHOWN
    words = ", ".join(map(str, steps[:_STEPS_SHOWN]))
    return words + (f" and {more} more" if more > 0 else "")


class Steps:
    """The steps of a root, of which some may be damaged, and their copies."""

    def __init__(self, root: Root) -> None:
        self.root = root
        self.copies: StepPlace | None = None
        # The identity of the save that all ranks have agreed on, by step.
        self.agreed: dict[int, str] = {}
        # Whether the copies could be listed when ``names`` was called last.
        self._listed = True

    def read(
        self, step: int | None, read: Any, files: Collection[str] = FILES
    ) -> tuple[int, Any]:
        """Call `read` with a step, by default the newest that it can read.

        Return the step and what `read` returned.  `files` are the files that it needs.
        """
        if step is not None:
            step = step_of(step)
            try:
                return step, self.here_or_copy(step, read, files, self.agreed.get(step))
            except GoneError:
                raise self.missing(step) from None
        # The words of the errors.  An error's traceback would keep all that was read, and
        # `into`, in memory while older steps are read.
        passed_over: dict[int, str] = {}
        copied, unlisted = self.copied()
        seen: Collection[int] | None = None
        gone: set[int] = set()
        # Another process removes copies of a list after it has added newer ones.
        while copied != seen:
            seen = copied
            for each in self.going_down(copied):
                try:
                    return each, self.here_or_copy(each, read, files, known=True)
                except GoneError:
                    if each in copied and each not in gone:
                        gone.add(each)
                        copied, unlisted = self.copied()
                        if copied != seen:
                            break
                except (CheckpointError, OSError) as error:
                    if not is_lost(error):
                        raise
                    if each not in passed_over:
                        words = f"step {each} is skipped: {error}"
                        warnings.warn(words, RuntimeWarning, stacklevel=3)
                    passed_over.setdefault(each, str(error))
            else:
                if copied:
                    copied, unlisted = self.copied()
        where = self.root.where
        if passed_over:
            # A caller that begins anew on FileNotFoundError must not do so here.
            newest = max(passed_over)
            count = len(passed_over)
            which = f"all {count} checkpoints" if count > 1 else "the only checkpoint"
            if self.copies is not None:
                where += f" and {self.copies.where}"
            words = f"{which} in {where} cannot be read"
            raise CheckpointError(f"{words}; step {newest}: {passed_over[newest]}")
        if unlisted is not None:
            raise unlisted
        words = what_is_in(where)
        if others := self.root.steps():
            other = self.root.folder(others[0])
            words = f"step-{others[0]} is no step of a Checkpointer: {what_is_in(other)}"
        raise FileNotFoundError(errno.ENOENT, f"no checkpoint; {words}", where)

    def here_or_copy(
        self,
        step: int,
        read: Any,
        files: Collection[str],
        agreed: str | None = None,
        *,
        known: bool = False,
    ) -> Any:
        """Read a step, or its copy if the step is missing or damaged.

        If an identity is given, another save of the step counts as a missing one.  With
        `known`, a step that was found damaged before is not read again.
        """

        def read_agreed(held: Any) -> Any:
            if agreed not in (None, held.manifest.identity):
                raise OtherError(f"{held.folder} is another save than the agreed one")
            return read(held)

        try:
            if known and (words := self.root.damage(step)):
                raise CheckpointError(words)
            return self.root.read(step, read_agreed)
        except (CheckpointError, GoneError, OSError) as error:
            if self.copies is None or not (is_lost(error) or isinstance(error, OtherError)):
                raise
            try:
                found = self.copies.read(step, read_agreed, files)
            except GoneError:
                raise error from None
            except Exception as other:
                damaged = isinstance(other, (CheckpointError, OSError)) and is_lost(other)
                if isinstance(error, GoneError) or not damaged:
                    # Only the copy exists, or it may be intact: no older step replaces it.
                    raise
                raise _with(error, f"its copy in {self.copies.where}: {other}") from other
            if not isinstance(error, (GoneError, OtherError)):
                where = self.copies.where
                words = f"step {step} is read from its copy in {where}: {error}"
                warnings.warn(words, RuntimeWarning, stacklevel=4)
            return found

    def missing(self, step: int) -> FileNotFoundError:
        """Return the error for a step that does not exist, or was removed."""
        newest, folder = self.root.steps(), self.root.folder(step)
        there = what_is_in(self.root.where)
        if step in newest:
            there = what_is_in(folder)
        elif newest:
            there = f"there are the steps {_shown(newest)}"
        listed, *_ = self.list_copies()
        copied = [each for each in listed if each != step]
        if self.copies is not None and copied:
            there += f"; in {self.copies.where} there are the steps {_shown(copied)}"
        words = f"no such checkpoint; {there}"
        return FileNotFoundError(errno.ENOENT, words, folder)

    def going_down(self, copied: Collection[int] = ()) -> Iterator[int]:
        """Yield the steps that have a folder, newest first.

        List the root again, until nothing has changed, where a step has gone meanwhile and
        at the end: another process removes a step after it has saved a newer one, which
        comes before what else is in the list.
        """
        before: list[int] | None = None
        gone: set[int] = set()
        while True:
            here = {*self.root.steps()}
            steps = sorted(here.union(copied), reverse=True)
            if steps == before:
                return
            before = steps
            for step in steps:
                yield step
                # Once: a host of NFS may go on to list it.
                if step in gone or step not in here:
                    continue
                if not exists(self.root.folder(step)):
                    gone.add(step)
                    before = None
                    break

    def identities(self, step: int) -> list[str]:
        """Return the identities of what has a step, root and copy, whatever lists say."""
        places: list[StepPlace] = [self.root]
        # As restore() does, which reads what is here if the copies cannot be listed.
        if self.copies is not None and self._listed:
            places.append(self.copies)
        return [found for place in places if (found := place.identity(step)) is not None]

    def names(self, *, level: int) -> list[int]:
        """Return the steps that have a folder, root and copy, complete or not.

        Raises and warns as ``listed``.
        """
        copied, unlisted = self.copied(level=level)
        self._listed = unlisted is None
        steps = self.going_down(copied)
        if unlisted is not None and not any(self._is_complete(n, copied) for n in steps):
            raise unlisted
        return list({*self.going_down(copied)})

    def _is_complete(self, step: int, copied: Collection[int]) -> bool:
        """Return whether a step, or its copy if that is in `copied`, is complete."""
        return (self.root.identity(step) is not None) or (
            step in copied
            and self.copies is not None
            and self.copies.identity(step) is not None
        )

    def listed(self, *, level: int = 4) -> Iterator[int]:
        """Yield the steps that ``read`` would find, newest first.

        Raises the error of the copies if they cannot be listed and there is no step here.
        The warning about that is of the call `level` - 1 frames above.
        """
        copied, unlisted = self.copied(level=level)
        found, seen = False, None
        gone: set[int] = set()
        # As read() does.
        while copied != seen:
            seen = copied
            for step in self.going_down(copied):
                if self._is_complete(step, copied):
                    found = True
                    yield step
                elif step in copied and step not in gone:
                    gone.add(step)
                    copied, unlisted = self.copied(level=level)
                    if copied != seen:
                        break
            else:
                if copied and not found:
                    copied, unlisted = self.copied(level=level)
        if unlisted is not None and not found:
            raise unlisted

    def copied(self, *, level: int = 4) -> tuple[list[int], Exception | None]:
        """Return the steps in `drain_to`; warn of an error of listing, and return it.

        The warning is about the call `level` - 1 frames above.
        """
        copied, unlisted, words = self.list_copies()
        if words:
            warnings.warn(words, RuntimeWarning, stacklevel=level)
        return copied, unlisted

    def list_copies(self) -> tuple[list[int], Exception | None, str]:
        """Return the steps in `drain_to`, an error of listing, and what to warn of."""
        if self.copies is None:
            return [], None, ""
        try:
            return self.copies.steps(), None, ""
        except Exception as error:
            # fsspec may raise any type.
            where = self.copies.where
            words = f"the copies in {where} cannot be listed: {error or repr(error)}"
            number = error.errno if isinstance(error, OSError) else None
            if number is None or isinstance(error, FileNotFoundError):
                # Not of its own type, whose arguments are unknown.
                kind = f"{words} ({type(error).__name__})"
                return [], OSError(errno.EIO, kind, where), words
            return [], error, words
