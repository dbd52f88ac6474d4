"""Copies of steps in an object store, or in anything else that fsspec reaches.

There are no locks and no renames.  So each attempt to copy a step has a folder of its own,
``step-12/1.HOST-PROCESS-START-RANDOM``, which counts once it has a manifest, copied last.
The number is one more than that of the attempt that it replaces: a writer that finds its
number twice, once its own manifest is there, removes its attempt and fails.  This needs
lists that show what has been written, as S3, GCS and Azure have them, but no conditional
writes, which fsspec imitates where a store has none.
"""

import contextlib
import errno
import os
import warnings
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import numpy as np

from nvmeio._events.log import log
from nvmeio._files.folders import make_folders
from nvmeio._files.kinds import MANIFEST, STEP
from nvmeio._files.paths import leads_to
from nvmeio._native.file import File
from nvmeio._publish.folders import Unfinished
from nvmeio._publish.names import is_dead, remove_left, temporary_name
from nvmeio.checkpoint._errors import (
    CheckpointError,
    GoneError,
    MovedError,
    NotDamagedError,
    is_lost,
)
from nvmeio.checkpoint._manifest import (
    FILES,
    TREE,
    Manifest,
    read_manifest,
    require_readable,
)
from nvmeio.checkpoint._places import Remote
from nvmeio.checkpoint._restoring import Held
from nvmeio.checkpoint._roots import (
    ATTEMPT,
    LATEST,
    NAMED_BYTES_MAX,
    OURS,
    STEP_MAX,
    TRIES,
    Copy,
    missing,
    named_in,
)
from nvmeio.default import default_handle

__all__ = ["Store"]


class _Attempt(NamedTuple):
    """One attempt to copy a step: its folder, and the sizes of our files in it."""

    number: int  # 0 of a copy that drain() or an older version has made
    folder: str
    sizes: dict[str, int]

    @property
    def complete(self) -> bool:
        # Some stores show a file at once, empty, and not when all of it is written.
        return bool(self.sizes.get(MANIFEST))

    @property
    def known_by(self) -> tuple[Any, ...]:
        """What tells it from one that is in this folder later, as drain() leaves it."""
        return self.folder, *sorted(self.sizes.items())

    @property
    def is_dead(self) -> bool:
        """Whether its process ran on this host and is dead."""
        found = ATTEMPT.fullmatch(self.folder.rpartition("/")[2])
        return found is not None and is_dead(found)


class Store:
    """The copies of steps at a URL of fsspec.

    A copy is read from a temporary folder beside the steps of a local root.
    """

    def __init__(self, files: Remote, root: str) -> None:
        self._files, self._root = files, root
        self.where = files.root
        # The attempts that were found damaged; and, by step, the folders of those that were
        # complete, as this has seen them first or has written them.
        self._damaged: set[tuple[Any, ...]] = set()
        self._complete: dict[int, str] = {}
        # The folders of attempts that this may replace: those that were there when it first
        # wrote, and its own.
        self._known: set[str] = set()
        self._first = STEP_MAX + 1
        # The steps that were there when it first wrote, that it has written itself, or that
        # drain() has copied.  Any other is of another writer.
        self._expected: set[int] | None = None
        # Those that another writer has added meanwhile.
        self._foreign: set[int] = set()
        # The folders of attempts that this has not removed for an error of the store.
        self._left: set[str] = set()

    moved = None

    def steps(self) -> list[int]:
        """Return the steps that have a folder or are named, newest first."""
        named = self.named()
        found = set() if named is None else {named}
        found |= {int(e[1]) for e in map(STEP.fullmatch, self._files.names("")) if e}
        return sorted(found, reverse=True)

    def named(self) -> int | None:
        """Return the step in the object that names the newest; None if there is none."""
        return named_in(self._latest())

    def _latest(self) -> bytes:
        """Return how the object that names the newest step begins, if there is one."""
        try:
            return self._files.beginning(LATEST, NAMED_BYTES_MAX + 1)
        except FileNotFoundError:
            return b""
        except Exception:  # fsspec may raise any type
            # An empty object has no such range.
            if self._files.size(LATEST) != 0:
                raise
            return b""

    def name(self, step: int | None) -> None:
        """Name the newest step, or none."""
        try:
            if step is None:
                self._files.remove(LATEST)
            elif not (text := self._latest()).strip(b"\0") or named_in(text) is not None:
                with self._files.writing(LATEST, 0o666) as writer:
                    writer.write(np.frombuffer(b"step-%d\n" % step, np.uint8))
                    writer.finish()
                    writer.commit()
        except Exception as error:
            # fsspec may raise any type.
            self._files.abandon(LATEST)
            log.warning("the newest copy was not named: %s", error)

    def _attempts(self, step: int) -> list[_Attempt]:
        """Return the attempts at a step, the one to read first."""
        top = f"step-{step}"
        folders = {top: self._files.sizes(top)}
        numbers = {top: 0}
        for name in folders[top]:
            if (found := ATTEMPT.fullmatch(name)) is not None:
                folders[f"{top}/{name}"] = self._files.sizes(f"{top}/{name}")
                numbers[f"{top}/{name}"] = int(found["number"])
        attempts = [
            _Attempt(numbers[folder], folder, ours)
            for folder, sizes in folders.items()
            if (ours := {n: s for n, s in sizes.items() if n in FILES and s is not None})
            and (numbers[folder] or self._is_ours(folder, sizes))
        ]
        attempts.sort(key=lambda a: (a.complete, a[:2]), reverse=True)
        for zero in [a for a in attempts[1:] if a.complete and not a.number]:
            # Of a later save, which drain() has copied; or copy() was killed before it
            # removed this one.
            with contextlib.suppress(CheckpointError, FileNotFoundError):
                later = self._check(step, zero).identity
                if later > self._check(step, attempts[0]).identity:
                    attempts.remove(zero)
                    attempts.insert(0, zero)
        return attempts

    def _is_ours(self, folder: str, sizes: dict[str, int | None]) -> bool:
        """Return whether a manifest.json or a tree.json is one of ours."""
        if any(sizes.get(name, 0) is None for name in FILES):
            # A folder with the name of a file.
            return False
        for name in {MANIFEST, TREE} & sizes.keys():
            with contextlib.suppress(FileNotFoundError):
                for piece in self._files.read(f"{folder}/{name}"):
                    if OURS.match(piece.data[:200]):
                        return True
                    break
        return False

    def identity(self, step: int) -> str | None:
        """Return the identity of a copy, unless it is incomplete or was found damaged."""
        found = self._found(step)
        return None if found is None else found[1]

    def _found(self, step: int) -> tuple[str, str] | None:
        """Return the folder and the identity of a copy that is complete."""
        for attempt in self._attempts(step)[:1]:
            with contextlib.suppress(CheckpointError, FileNotFoundError):
                identity = self._check(step, attempt).identity
                if attempt.known_by not in self._damaged:
                    return attempt.folder, identity
        return None

    def was_complete(self, step: int, *, again: bool) -> bool:
        """Return whether a step was complete when this looked last, or looks again."""
        if again or step not in self._complete:
            if (found := self._found(step)) is None:
                self._complete.pop(step, None)
            else:
                self._complete.setdefault(step, found[0])
        return step in self._complete

    def _check(self, step: int, attempt: _Attempt) -> Manifest:
        """Return the manifest; raise CheckpointError if it or a size is wrong."""

        def check_size(path: str, nbytes: int) -> None:
            found = attempt.sizes.get(path.rpartition("/")[2])
            if found is None:
                raise CheckpointError(f"{path} is missing")
            if found != nbytes:
                words = f"{path} has {found} bytes, but {nbytes} were saved"
                raise CheckpointError(words)

        def fetched(path: str) -> bytes:
            self._require(attempt, MANIFEST)
            require_readable(path, attempt.sizes[MANIFEST])
            pieces = self._files.read(f"{attempt.folder}/{MANIFEST}")
            return b"".join(piece.data for piece in pieces)

        folder = f"{self.where}/{attempt.folder}"
        return read_manifest(folder, step, fetched, check_size)

    def _never_had(self, attempts: list[_Attempt]) -> bool:
        """Return whether no copy was ever complete here, as far as can be seen.

        The first one that is writes a name, and all have numbers.
        """
        return (
            all(each.number for each in attempts)
            and not self._latest()
            and not any(a.complete for each in self.steps() for a in self._attempts(each))
        )

    def _require(self, attempt: _Attempt, name: str) -> None:
        if name not in attempt.sizes:
            words = "is missing: the copy is unfinished or damaged"
            raise CheckpointError(f"{self.where}/{attempt.folder}/{name} {words}")

    def read(self, step: int, read: Any, files: Collection[str] = FILES) -> Any:
        """Fetch `files` of a step, and read them; again if they were replaced meanwhile."""
        try:
            return self._read(step, read, files)
        except OSError as error:
            if not is_lost(error):
                raise
            # As fsspec calls errors that it does not know, and those that pass: no older
            # step may replace this one.
            words = f"{error}; the copy may be intact, so try again"
            raise OSError(errno.EREMOTEIO, words, f"{self.where}/step-{step}") from error

    def _read(self, step: int, read: Any, files: Collection[str]) -> Any:
        gone: Exception | None = None
        for _ in range(TRIES):
            attempts = self._attempts(step)
            if not attempts:
                if self.named() != step:
                    raise GoneError
                # It may have come before it was named.
                if not self._attempts(step):
                    raise missing(f"{self.where}/step-{step}")
                continue
            if not any(each.complete for each in attempts) and self._never_had(attempts):
                # The first upload of a run, which was killed: nothing was acknowledged.
                words = f"{self.where}/step-{step} is unfinished, as is all that is there"
                warnings.warn(words, RuntimeWarning, stacklevel=5)
                raise GoneError
            attempt = attempts[0]
            try:
                with self._fetched(step, attempt, files) as held:
                    return read(held)
            except MovedError as error:
                # Another program has removed the temporary folder: the copy is as it was.
                gone = error
                continue
            except (CheckpointError, OSError) as error:
                if attempt not in self._attempts(step):
                    continue
                if isinstance(error, FileNotFoundError):
                    # Of this host: a caller that begins anew must not do so here.
                    words = f"{self.where}/{attempt.folder}: {error}"
                    raise NotDamagedError(words) from error
                # One without a manifest is unfinished, and may be complete later.
                damaged = isinstance(error, CheckpointError) and is_lost(error)
                if damaged and attempt.complete:
                    self._damaged.add(attempt.known_by)
                    self._complete.pop(step, None)
                raise error from None
        words = f"or what was fetched of it, was replaced {TRIES} times while it was read"
        raise NotDamagedError(f"{self.where}/step-{step}, {words}") from gone

    @contextlib.contextmanager
    def _fetched(
        self, step: int, attempt: _Attempt, files: Collection[str]
    ) -> Iterator[Held]:
        for name in FILES:
            self._require(attempt, name)
        make_folders(self._root)
        # What a process of this host has left that was killed while it fetched a step.
        remove_left(self._root, is_dead)
        # No name of a step, which the root's writer could take for what it may remove.
        target = os.path.join(self._root, f"fetched-step-{step}")
        sizes = [attempt.sizes[name] for name in files]
        with Unfinished(target, replace=True, sizes=sizes) as folder:
            try:
                with folder.saying_space():
                    for name in FILES:
                        self._fetch(attempt, name, folder.path, files)
            except FileNotFoundError as error:
                if leads_to(folder.path, folder.descriptor):
                    raise
                raise MovedError(f"{folder.path} was removed") from error
            with Held(folder.path, step) as held:
                yield held

    def _fetch(
        self, attempt: _Attempt, name: str, folder: str, files: Collection[str]
    ) -> None:
        path = os.path.join(folder, name)
        with File(path, "x") as file:
            if name not in files:
                # Not read, but its size is checked.
                os.truncate(path, attempt.sizes[name])
                return
            at = 0
            for piece in self._pieces(f"{attempt.folder}/{name}"):
                default_handle().write(piece, file, at)
                at += len(piece)
        if at < attempt.sizes[name]:
            # No damage of the copy: the store has listed more.
            words = f"only {at} of {attempt.sizes[name]} bytes were sent; try again"
            raise OSError(errno.EREMOTEIO, words, f"{self.where}/{attempt.folder}/{name}")

    def _pieces(self, path: str) -> Iterator[Any]:
        """Read a file, which the store has listed; raise CheckpointError if it is gone."""
        try:
            yield from self._files.read(path)
        except FileNotFoundError as error:
            raise CheckpointError(f"{self.where}/{path} is missing: {error}") from error

    def take(self, step: int) -> None:
        """Remember the attempts at steps from `step` on; later ones of others are errors.

        A run that goes back to a step before its first takes what is there for its own.
        """
        if self._expected is None:
            self._expected = {*self.steps()}
        if step < self._first:
            there = [each for each in self.steps() if step <= each < self._first]
            self._known |= {a.folder for each in there for a in self._attempts(each)}
            self._first = step

    def release(self) -> None:
        """Do nothing: there are no locks."""

    def settle(self) -> None:
        """Do nothing: a store makes removals durable itself."""

    def _conflict(self, step: int) -> FileExistsError:
        words = "another writer has copied or removed this step meanwhile"
        return FileExistsError(errno.EEXIST, words, f"{self.where}/step-{step}")

    def require_alone(self) -> None:
        """Raise FileExistsError, once a step, if another writer copies other steps here.

        These are not pruned as if they were old ones of this run.
        """
        expected = set() if self._expected is None else self._expected
        for step in self.steps():
            if step in expected:
                continue
            expected.add(step)
            if any(a.number and a.folder not in self._known for a in self._attempts(step)):
                self._foreign.add(step)
                words = "another run copies here too; this run's copies are there, and the "
                words += "other's are not pruned: give each run a drain_to of its own"
                raise FileExistsError(errno.EEXIST, words, f"{self.where}/step-{step}")

    def copy(self, step: int, copy: Copy) -> int:
        """Copy a step into a folder of its own, then remove those that it replaces.

        Raises FileExistsError if another writer has copied this step meanwhile.
        """
        known = self._known
        before = self._attempts(step)
        if any(each.number and each.folder not in known for each in before):
            raise self._conflict(step)
        number = 1 + max((each.number for each in before if each.complete), default=0)
        unique = temporary_name(str(number))[1:].removesuffix(".nvmeio-tmp")
        folder = f"step-{step}/{unique}"
        known.add(folder)
        try:
            nbytes = copy(self._files.below(folder))
        except BaseException:
            # The error of the copy matters; what cannot be removed now is removed later.
            self._left.add(folder)
            with contextlib.suppress(Exception):
                for each in self._attempts(step):
                    if each.folder == folder:
                        self._remove(each)
            raise
        after = self._attempts(step)
        mine = [each for each in after if each.folder == folder]
        others = [each for each in after if each.complete and each.number >= number]
        if others != mine or not mine or mine[0].sizes.keys() != set(FILES):
            for each in mine:
                self._remove(each)
            raise self._conflict(step)
        self._complete[step] = folder
        self._foreign.discard(step)
        if self._expected is not None:
            self._expected.add(step)
        # The copy is there, so an error of its name is not one of the copy.
        with contextlib.suppress(Exception):
            named = self.named()
            if named is None or step >= named or not self._attempts(named):
                self.name(step)
        for each in after:
            replaced = each.complete or each.is_dead or not each.number
            if each.folder != folder and replaced:
                try:
                    self._remove(each)
                except Exception as error:
                    # fsspec may raise any type.
                    log.warning("a copy that was replaced was not removed: %s", error)
        self._remove_left()
        return nbytes

    def _remove_left(self) -> None:
        """Try again to remove what this could not remove."""
        for folder in list(self._left):
            try:
                sizes = self._files.sizes(folder)
                ours = {n: sizes[n] or 0 for n in FILES if n in sizes}
                self._remove(_Attempt(1, folder, ours))
                self._files.remove_folder(folder.partition("/")[0])
            except Exception as error:
                # fsspec may raise any type.
                log.warning("what a copy has left was not removed: %s", error)

    def is_anothers(self, step: int) -> bool:
        """Return whether another writer has added a step, which does not count.

        Or may have, since this looked for such steps last.
        """
        expected = self._expected
        return step in self._foreign or (expected is not None and step not in expected)

    def discard_left(self, step: int) -> None:
        """Remove the unfinished attempts of processes of this host that have died.

        Whether one of another host goes on cannot be seen from here.
        """
        left = [a for a in self._attempts(step) if a.is_dead and not a.complete]
        for each in left:
            self._remove(each)
        if left:
            self._files.remove_folder(f"step-{step}")

    @contextlib.contextmanager
    def removing(self, step: int) -> Iterator[Callable[[], None]]:
        """Yield a function that removes all attempts at a step."""
        attempts = self._attempts(step)
        if not attempts:
            raise GoneError
        # Another writer may have replaced it since this has seen it, or has written it.
        seen = self._complete.get(step)
        known = {seen, *self._known}
        if (seen is not None or step >= self._first) and any(
            each.complete and each.number and each.folder not in known for each in attempts
        ):
            raise self._conflict(step)

        def remove() -> None:
            self._complete.pop(step, None)
            for each in attempts:
                self._remove(each)
            self._files.remove_folder(f"step-{step}")
            if self._expected is not None:
                self._expected.discard(step)

        yield remove

    def _remove(self, attempt: _Attempt) -> None:
        # The manifest first, so that what is left never counts as complete.
        for name in FILES:
            if name in attempt.sizes:
                self._files.remove(f"{attempt.folder}/{name}")
            if attempt.number:
                # It does not count any more, and nobody else has a folder of its name.
                self._left.add(attempt.folder)
        self._files.remove_folder(attempt.folder)
        self._left.discard(attempt.folder)
        self._known.discard(attempt.folder)
