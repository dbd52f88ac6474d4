"""Copies of a Checkpointer's steps on other storage, made in the background."""

import logging
import os
import threading
from collections.abc import Callable, Collection
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from nvmeio._arguments.types import Path
from nvmeio._files.folders import make_folders
from nvmeio._files.kinds import MANIFEST, STEP
from nvmeio._native.file import File
from nvmeio._publish.folders import Unfinished
from nvmeio.checkpoint._draining import Drain
from nvmeio.checkpoint._errors import MovedError
from nvmeio.checkpoint._locks import exclusive
from nvmeio.checkpoint._manifest import FILES
from nvmeio.checkpoint._places import place_of
from nvmeio.checkpoint._restoring import Held
from nvmeio.default import default_handle

__all__ = ["Copies", "NoCopyError"]

RETRIES = 3

_log = logging.getLogger("nvmeio")


class NoCopyError(Exception):
    """The step has no copy."""


class Copies:
    """The copies of one root's steps, ``target/step-12``.

    A copy is complete when its manifest exists, which is copied last.
    """

    def __init__(
        self, target: Path, root: str, kept: Callable[[list[int]], list[int]]
    ) -> None:
        self.place = place_of(target)
        self._root, self._kept = root, kept
        self._mutex = threading.Lock()
        self._waiting: tuple[int, str, Future[int]] | None = None
        self._thread: threading.Thread | None = None
        self._failed: BaseException | None = None
        self._drain: tuple[int, Future[int]] | None = None
        # The copy that was requested last; its result is its size in bytes.
        self.latest: Future[int] | None = None

    def begin(self, step: int, folder: str) -> None:
        """Copy a complete step in the background; replace one that has not been started."""
        future: Future[int] = Future()
        with self._mutex:
            before, self._waiting = self._waiting, (step, folder, future)
            self.latest = future
            thread = None
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="nvmeio-drain")
                self._thread = thread
        if before is not None and before[2].cancel():
            _log.warning(
                "step %d is not copied, because step %d was saved meanwhile",
                before[0],
                step,
            )
        if thread is None:
            return
        try:
            thread.start()
        except RuntimeError:
            # No thread can be started, or Python is shutting down.
            with self._mutex:
                self._thread = None
            self._run()

    def _run(self) -> None:
        while True:
            with self._mutex:
                work, self._waiting = self._waiting, None
                if work is None:
                    self._thread = None
                    return
            step, folder, future = work
            if not future.set_running_or_notify_cancel():
                continue
            try:
                nbytes = self._copy(step, folder)
            except CancelledError as error:
                # The step was removed while it was copied.
                future.set_exception(error)
            except BaseException as error:
                _log.error("step %d was not copied: %s", step, error)
                self._failed = error
                future.set_exception(error)
            else:
                future.set_result(nbytes)

    def _copy(self, step: int, folder: str) -> int:
        name = f"step-{step}"
        try:
            # Held, so that the step is not pruned while it is copied.
            with Held(folder, step):
                work = Drain(folder, _Below(self.place, name), (MANIFEST,), RETRIES, None)
                self._drain = step, work.future
                work.start()
                nbytes = work.future.result()
        except MovedError:
            # The step was replaced; the new one is copied next.
            self.place.remove(f"{name}/{MANIFEST}")
            return 0
        self.prune(step)
        return nbytes

    def wait(self) -> None:
        """Wait until all copies have ended."""
        with self._mutex:
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def failure(self) -> BaseException | None:
        """Return the error of a failed copy, once; None if there is none."""
        failed, self._failed = self._failed, None
        return failed

    def steps(self) -> list[int]:
        """Return the steps with complete copies, newest first."""
        found = map(STEP.fullmatch, self.place.names(""))
        steps = sorted((int(each[1]) for each in found if each), reverse=True)
        return [step for step in steps if MANIFEST in self.place.names(f"step-{step}")]

    def prune(self, saved: int) -> None:
        """Remove the copies that are not to be kept, and incomplete ones."""
        try:
            steps = sorted(self.steps())
            folders = map(STEP.fullmatch, self.place.names(""))
            there = {int(each[1]) for each in folders if each}
            for step in there - set(self._kept(steps)) - {saved}:
                with self._exclusive(step) as free:
                    if free:
                        self._remove(step)
        except Exception as error:
            # fsspec may raise any type.
            _log.warning("older copies were not removed: %s", error)

    def _exclusive(self, step: int) -> AbstractContextManager[bool]:
        """Yield whether no one reads a copy; True on remote storage, which has no locks."""
        near = self.place.folder(f"step-{step}")
        return (
            nullcontext(True) if near is None else exclusive(os.path.join(near, MANIFEST))
        )

    def _remove(self, step: int) -> None:
        self.place.remove(f"step-{step}/{MANIFEST}")
        self.place.remove(f"step-{step}")

    def remove(self, step: int) -> bool:
        """Remove a copy, also an unfinished one; return whether there was any."""
        with self._mutex:
            waiting, drain = self._waiting, self._drain
        if waiting is not None and waiting[0] == step:
            waiting[2].cancel()
        if drain is not None and drain[0] == step:
            drain[1].cancel()
            self.wait()
        there = bool(self.place.names(f"step-{step}"))
        if there:
            self._remove(step)
        return there

    def read(self, step: int, read: Callable[[Held], Any], files: Collection[str]) -> Any:
        """Read a copy; from remote storage, fetch `files` into a temporary folder first."""
        name = f"step-{step}"
        if MANIFEST not in self.place.names(name):
            raise NoCopyError(name)
        near = self.place.folder(name)
        if near is not None:
            with Held(near, step) as held:
                return read(held)
        make_folders(self._root)
        with Unfinished(os.path.join(self._root, name), replace=True) as folder:
            for each in FILES:
                path = os.path.join(folder.path, each)
                with File(path, "x") as file:
                    if each not in files:
                        # Not read, but its size is checked.
                        os.truncate(path, self.place.size(f"{name}/{each}") or 0)
                        continue
                    at = 0
                    for piece in self.place.read(f"{name}/{each}"):
                        default_handle().write(piece, file, at)
                        at += len(piece)
            with Held(folder.path, step) as held:
                return read(held)


class _Below:
    """A subfolder of a Place, with the interface of a Place."""

    def __init__(self, place: Any, folder: str) -> None:
        self._place, self._folder = place, folder
        self.root = f"{place.root.rstrip('/')}/{folder}"

    def _name(self, name: str) -> str:
        return f"{self._folder}/{name}" if name else self._folder

    def __getattr__(self, called: str) -> Any:
        method = getattr(self._place, called)
        return lambda name: method(self._name(name))
