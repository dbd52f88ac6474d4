"""Copies of a Checkpointer's steps on other storage, made in the background."""

import errno
import threading
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any

from nvmeio._arguments.types import Path
from nvmeio._events.log import log
from nvmeio._files.kinds import MANIFEST
from nvmeio._files.paths import exists_now
from nvmeio.checkpoint._draining import Drain
from nvmeio.checkpoint._errors import CheckpointError, MovedError
from nvmeio.checkpoint._futures import DRAINING, Flag, ToldFuture, start_thread
from nvmeio.checkpoint._manifest import Manifest
from nvmeio.checkpoint._places import Place, local_path, place_of
from nvmeio.checkpoint._restoring import Held
from nvmeio.checkpoint._roots import TRIES, Kept, Root, StepPlace, prune
from nvmeio.checkpoint._stores import Store

__all__ = ["Copies"]

RETRIES = 3


class Copies:
    """The queue of the copies of one root's steps; at most one step waits in it."""

    def __init__(self, target: Path, root: Root, kept: Kept) -> None:
        path = local_path(target)
        files: Any = None if path is not None else place_of(target)
        self.place: StepPlace = Root(path) if path is not None else Store(files, root.where)
        self._root = root
        self._kept = kept
        self._mutex = threading.Lock()
        self._waiting: tuple[int, str, ToldFuture[int]] | None = None
        # The thread that copies.  It says so itself, because Ctrl-C may come at any time.
        self._runner: int | None = None
        self._idle = Flag()
        self._idle.set()
        self._failed: ToldFuture[int] | None = None
        # What to warn of: copies that went to another folder than those before.
        self._moved: list[str] = []
        # The step that is being copied, and the drain of its files once it has begun.
        self._current: int | None = None
        self._drain: tuple[int, Future[int]] | None = None
        # The copy that was requested last; its result is its size in bytes.
        self.latest: ToldFuture[int] | None = None

    def begin(self, step: int, folder: str) -> None:
        """Copy a complete step in the background; replace one that has not been started."""
        future: ToldFuture[int] = ToldFuture()
        with self._mutex:
            before, self._waiting = self._waiting, (step, folder, future)
            self.latest = future
            runs = self._runner is not None
        if before is not None and before[2].cancel():
            log.warning(
                "step %d is not copied, because step %d was saved meanwhile",
                before[0],
                step,
            )
        if not runs:
            try:
                start_thread(self._run, DRAINING)
            except RuntimeError:
                # No thread can be started, or Python is shutting down.
                self._run()

    def _run(self) -> None:
        """Copy what waits, unless another thread does."""
        while True:
            with self._mutex:
                if self._runner is not None or self._waiting is None:
                    return
                (step, folder, future), self._waiting = self._waiting, None
                self._runner, self._current = threading.get_ident(), step
                self._idle.clear()
            nbytes, failed = 0, None
            if begun := future.set_running_or_notify_cancel():
                try:
                    nbytes = self._copy(step, folder)
                except BaseException as error:
                    failed = error
                    if not isinstance(error, CancelledError):
                        log.error("step %d was not copied: %s", step, error)
                        self._failed = future
            # The copy has ended before callbacks of the future run: they may call a
            # Checkpointer while another thread waits, in close(), for its copies.
            with self._mutex:
                self._runner = self._current = None
                self._idle.set()
            # Else it was cancelled while it waited.
            if begun:
                self._report(future, step, nbytes, failed)
            # Its traceback has this frame.
            del failed

    @staticmethod
    def _report(
        future: ToldFuture[int], step: int, nbytes: int, failed: BaseException | None
    ) -> None:
        if failed is None:
            future.set_result(nbytes)
        elif isinstance(failed, CancelledError):
            # The step was removed while it was copied, or before that.
            future.set_exception(failed)
        else:
            future.fail(failed, f"step {step} was not copied")

    def _copy(self, step: int, folder: str) -> int:
        def copy(saved: Manifest, place: Place) -> int:
            work = Drain(folder, place, (MANIFEST,), RETRIES, None, saved)
            self._drain = step, work.future
            work.start()
            return work.future.result()

        for _ in range(TRIES):
            try:
                # Held, so that the step is not pruned while it is copied.
                with Held(folder, step) as held:
                    # Not by the save, which would wait for a file system that hangs.
                    if (words := self.place.moved) is not None:
                        with self._mutex:
                            self._moved.append(words)
                    self.place.take(step)
                    nbytes = self.place.copy(step, partial(copy, held.manifest))
                break
            except MovedError:
                if step in self._root.removed:
                    raise CancelledError from None
                if not exists_now(folder):
                    words = "it was removed or renamed before its copy was complete"
                    raise FileNotFoundError(errno.ENOENT, words, folder) from None
                with self._mutex:
                    if self._waiting is not None and self._waiting[0] == step:
                        # It was replaced; the new one is copied next.
                        raise CancelledError from None
        else:
            raise CheckpointError(
                f"{folder} was replaced {TRIES} times while it was copied"
            )
        try:
            prune(self.place, self._kept, step)
        except Exception as error:
            # fsspec may raise any type.
            log.warning("older copies were not removed: %s", error)
        self.place.require_alone()
        return nbytes

    def wait(self) -> None:
        """Wait until all copies have ended."""
        while True:
            with self._mutex:
                if self._runner == threading.get_ident():
                    return
                if self._runner is None:
                    if self._waiting is None:
                        return
                    idle = False
                else:
                    idle = True
            if idle:
                # Not with join(): after Ctrl-C in it, a thread counts as ended.
                self._idle.wait()
            else:
                # Its thread has not begun, or could not be started.
                self._run()

    def failure(self, *, retrieved: bool = True) -> BaseException | None:
        """Return the error of a failed copy, once; None if there is none.

        Without `retrieved`, only one that nobody has retrieved from its Future.
        """
        failed, self._failed = self._failed, None
        if failed is None or (failed.retrieved and not retrieved):
            return None
        return failed.exception()

    def moved(self) -> list[str]:
        """Return what to warn of, once."""
        with self._mutex:
            words, self._moved = self._moved, []
        return words

    def cancel(self, step: int) -> bool:
        """Stop copying a step, and return whether it was waiting or being copied."""
        with self._mutex:
            waiting, drain, current = self._waiting, self._drain, self._current
        stopped = waiting is not None and waiting[0] == step and waiting[2].cancel()
        if current == step:
            if drain is not None and drain[0] == step:
                stopped = drain[1].cancel() or stopped
            # It may have its name in a moment.
            self.wait()
        return stopped
