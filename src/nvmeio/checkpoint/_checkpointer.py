"""Checkpoints of a training run: saved for the day it dies."""

import contextlib
import errno
import logging
import os
import pathlib
import threading
import warnings
import weakref
from collections.abc import Collection, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any, Literal

from nvmeio._arguments.checks import flag, integer, path_of, whole
from nvmeio._arguments.keywords import suggesting
from nvmeio._arguments.types import Path
from nvmeio._events.forks import call_in_child
from nvmeio._files.folders import make_folders
from nvmeio._files.locks import WriterLock
from nvmeio._files.paths import absolute
from nvmeio.checkpoint._copies import Copies, NoCopyError
from nvmeio.checkpoint._errors import CheckpointError, MovedError, NoChecksumsError
from nvmeio.checkpoint._folders import (
    Unfinished,
    cleanup,
    remove_unfinished,
    set_aside,
)
from nvmeio.checkpoint._kinds import what_is_in
from nvmeio.checkpoint._locks import exclusive
from nvmeio.checkpoint._manifest import FILES, FOLDER, MANIFEST, TREE
from nvmeio.checkpoint._restoring import Held
from nvmeio.checkpoint._saving import Plan, Staging
from nvmeio.safetensors._reading import Progress

__all__ = ["Checkpointer", "SaveFuture"]

_STEP_MAX = 10**18
# What a drive or a file system says of bytes that are not there any more, or of a socket.
_LOST = (errno.EIO, errno.ENODATA, errno.EUCLEAN, errno.EBADMSG, errno.EILSEQ, errno.ENXIO)

# Of a step that is replaced while it is read; a file system may say so of any.
_TRIES = 100

_log = logging.getLogger("nvmeio")


class _GoneError(FileNotFoundError):
    """There is no such step, or none any more."""


def _with(error: Exception, words: str) -> Exception:
    """Return an error of the same kind that says more."""
    if isinstance(error, OSError):
        return type(error)(error.errno, f"{error.strerror}; {words}", error.filename)
    return type(error)(f"{error}; {words}")


_all: "weakref.WeakSet[Checkpointer]" = weakref.WeakSet()


def _forget_in_child() -> None:
    """What the parent's thread saves is none of a forked child's, nor is its mutex."""
    for checkpointer in list(_all):
        checkpointer._begin_anew()


call_in_child(_forget_in_child)


class SaveFuture(Future[pathlib.Path]):
    """A save that goes on, made by ``Checkpointer.save_async``.

    A concurrent.futures.Future: ``result(timeout=None)`` returns the step's folder once
    the checkpoint is on the device, and raises what went wrong; ``cancel()`` gives the save
    up and returns True, or returns False where it is being given its name, or has it.

    Attributes
    ----------
    step : int
        The step.
    staged : concurrent.futures.Future
        Done when the state may be changed: with ``stage=True`` from the beginning, else
        when the last byte of it has been written.  Its result is None.

    Examples
    --------
    >>> checkpointer = nvmeio.checkpoint.Checkpointer("run")
    >>> state = {"weights": np.arange(1000)}
    >>> saving = checkpointer.save_async(100, state, stage=True)
    >>> isinstance(saving, nvmeio.checkpoint.SaveFuture)
    True
    >>> saving.staged.result()
    >>> state["weights"] += 1
    >>> saving.result().name
    'step-100'
    >>> checkpointer.close()
    """

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step
        self.staged: Future[None] = Future()
        # Nothing of it goes on any more; its callbacks may.
        self._over = threading.Event()
        self._told = False
        self._failure: BaseException | None = None
        self._may_begin: bool | None = None

    def _begun(self) -> bool:
        """Tell whether it was not cancelled; from here on it cannot be."""
        if self._may_begin is None:
            self._may_begin = self.set_running_or_notify_cancel()
        return self._may_begin

    def result(self, timeout: float | None = None) -> pathlib.Path:
        """Wait, and return the step's folder, or raise what went wrong."""
        try:
            return super().result(timeout)
        except BaseException as error:
            self._told = self._told or error is self._failure
            raise

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait, and return what went wrong, or None."""
        found = super().exception(timeout)
        self._told = self._told or found is not None
        return found

    def set_exception(self, exception: BaseException | None) -> None:
        """Tell all who wait what went wrong."""
        self._failure = exception
        super().set_exception(exception)

    def __repr__(self) -> str:
        return f"<nvmeio.checkpoint.SaveFuture of step {self.step}{super().__repr__()[11:]}"


class Checkpointer:
    """Checkpoints of one training run, each in a folder of its own, ``root/step-12``.

    Parameters
    ----------
    root : str, bytes or os.PathLike
        The folder for them; made by the first save where it does not exist.
    keep : int or None, default 3
        How many of the newest steps stay when a save is complete; None: all of them.
    keep_every : int, optional
        Steps that are multiples of it stay for good, beside the newest.
    checksum : {"crc32c", None}, default "crc32c"
        What is kept of each block of 8 MiB, to tell damage.
    verify : {"size", "checksum", None}, default "size"
        What ``restore`` checks: that all files are there and have their sizes, or besides
        that all bytes are what was saved.  For a part of a state, by `names`, it reads all
        of the files then.  None: as little as it can.
    busy : {"wait", "skip", "raise"}, default "wait"
        What ``save_async`` does while another save goes on: wait for it, return None
        without saving, or raise RuntimeError.
    drain_to : str, bytes or os.PathLike, optional
        A folder on another file system, or a URL for fsspec, to which each step is copied
        in the background once it is saved; `keep` and `keep_every` count there too.  What
        is gone in `root`, or damaged as far as `verify` sees, is read from the copy.

    Raises
    ------
    TypeError, ValueError
        An argument is of the wrong type, or not one of its values.
    ModuleNotFoundError
        `drain_to` is a URL, and fsspec is not installed.

    Attributes
    ----------
    root, keep, keep_every, checksum, verify_by, busy, drain_to
        What it was made with.
    drained : concurrent.futures.Future or None
        Of the copy that was begun last; its result is how many bytes there are.
    restored : int or None
        The step that the last ``restore`` has taken.

    Notes
    -----
    One process writes to a root: the first save takes a lock, which falls with the process,
    or by ``close``; it also removes what processes that died have left.  Reading takes no
    lock of the root; ``restore`` and ``verify`` hold the step that they read, which is not
    pruned meanwhile.  In distributed data parallel
    training all processes have the same state: rank 0 saves and the others stay away; each
    may restore.

    A step's folder has ``tensors.safetensors``, which anything can read, ``tree.json``,
    which says what is nested in what, and ``manifest.json`` with sizes and checksums;
    nothing is pickled.  A folder has its name only once all of that is on the device.

    Thread-safe; a save waits for the one before it.

    Examples
    --------
    >>> checkpointer = nvmeio.checkpoint.Checkpointer("run", keep=2)
    >>> saved = checkpointer.save(100, {"weights": np.arange(4), "epoch": 3})
    >>> checkpointer.latest()
    100
    >>> checkpointer.restore()
    {'weights': array([0, 1, 2, 3]), 'epoch': 3}
    >>> checkpointer.close()
    """

    @suggesting
    def __init__(
        self,
        root: Path,
        *,
        keep: int | None = 3,
        keep_every: int | None = None,
        checksum: Literal["crc32c"] | None = "crc32c",
        verify: Literal["size", "checksum"] | None = "size",
        busy: Literal["wait", "skip", "raise"] = "wait",
        drain_to: Path | None = None,
    ) -> None:
        self.root = pathlib.Path(os.fsdecode(absolute(path_of(root))))
        self.keep = None if keep is None else whole("keep", keep, 1, _STEP_MAX)
        self.keep_every = keep_every
        if keep_every is not None:
            self.keep_every = whole("keep_every", keep_every, 1, _STEP_MAX)
        self.checksum = _one_of("checksum", checksum, ("crc32c", None))
        self.verify_by = _one_of("verify", verify, ("size", "checksum", None))
        self.busy = _one_of("busy", busy, ("wait", "skip", "raise"))
        if self.verify_by == "checksum" and self.checksum is None:
            raise ValueError(
                'verify is "checksum", but checksum is None, so there are no checksums'
            )
        self.drain_to = None if drain_to is None else os.fsdecode(path_of(drain_to))
        if self.drain_to is not None and "://" not in self.drain_to:
            self.drain_to = os.fsdecode(absolute(self.drain_to))
        self.restored: int | None = None
        self._writer = WriterLock(
            str(self.root), ".nvmeio-lock", "a Checkpointer", "writes checkpoints"
        )
        self._closed = False
        self._begin_anew()
        _all.add(self)

    def _begin_anew(self) -> None:
        """Have nothing going on: at the beginning, and in a forked child."""
        self._mutex = threading.RLock()
        self._within = False
        self._staging = Staging()
        self._last: SaveFuture | None = None
        self._begun = False
        self._copies = None
        if self.drain_to is not None:
            self._copies = Copies(self.drain_to, str(self.root), self._kept)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other threads out, and signal handlers that come in between."""
        with self._mutex:
            if self._within:
                raise RuntimeError(
                    "a signal handler, or whatever else came in between, calls a "
                    "Checkpointer that is at work in the same thread"
                )
            if self._closed:
                raise ValueError("the Checkpointer is closed")
            self._within = True
            try:
                yield
            finally:
                self._within = False

    @suggesting
    def save(self, step: int, state: Any, metadata: Any = None) -> pathlib.Path:
        """Save a state; it is on the device when this returns.

        Parameters
        ----------
        step : int
            The checkpoint's number, 0 or more.  One that there is already is replaced: it
            is there until the new one is complete.
        state : dict, OrderedDict, Counter, list, tuple, ...
            Any nesting of these (keys are str or int) and torch.Size, of tensors of torch,
            arrays of numpy, numbers, bool, str, bytes, torch.dtype, torch.device and None.
        metadata : dict, optional
            What is to be known of it: the same without tensors and arrays.

        Returns
        -------
        pathlib.Path
            The step's folder.

        Raises
        ------
        TypeError, ValueError
            Something in the state has no place in a checkpoint; named by its path, before
            anything is written.
        BlockingIOError
            Another process writes to this root; names it.
        OSError
            With errno and path: ENOSPC with what is needed and what is free.
        RuntimeError
            A signal handler calls this amid another call of the same thread.
        Exception
            A save before this one, by ``save_async``, has failed, and nobody was told; this
            call has saved nothing then.

        Warns
        -----
        RuntimeWarning
            There is a newer step, which ``restore`` would take.

        Notes
        -----
        Tensors that share memory in the state share it when they are restored.  A view
        takes only its own bytes along.  Tensors come back contiguous and on the CPU; a
        Parameter and requires_grad come back as such.
        """
        with self._alone():
            plan = self._plan(step, state, metadata)
            self._await_last()
            self._begin(plan.step)
            return self._carry_out(plan, None)

    # Only busy="skip" returns None: Any, as typeshed does it, spares others the question.
    @suggesting
    def save_async(
        self, step: int, state: Any, metadata: Any = None, *, stage: bool = True
    ) -> SaveFuture | Any:
        """Begin to save a state, and return as soon as it may be changed.

        Parameters
        ----------
        step, state, metadata
            As for ``save``.
        stage : bool, default True
            Copy the state into memory that is kept for it, and used again by the next save.
            With False there is no copy and no such memory: whoever says so leaves the
            state's tensors alone until the future's `staged` is done.

        Returns
        -------
        SaveFuture or None
            Its result is the step's folder; None where another save goes on and `busy` is
            "skip".

        Raises
        ------
        MemoryError
            There is no memory for the copy; tells how much is needed and free.
        RuntimeError
            Another save goes on, and `busy` is "raise".
        TypeError, ValueError, OSError, Exception
            As ``save``.

        Notes
        -----
        At most one save goes on.  Its bytes are moved by the engine; its thread sleeps
        or computes checksums, without the GIL.  Python waits for it before it ends.
        """
        stage = flag("stage", stage)
        with self._alone():
            plan = self._plan(step, state, metadata)
            if self._last is not None and not self._last._over.is_set():
                if self.busy == "skip":
                    return None
                if self.busy == "raise":
                    raise RuntimeError(f"step {self._last.step} is still being saved")
            self._await_last()
            self._begin(plan.step)
            if stage:
                plan.stage(self._staging)
            future = SaveFuture(plan.step)
            if stage:
                future.staged.set_result(None)
            thread = threading.Thread(
                target=self._carry_out_for, args=(plan, future), name="nvmeio-checkpoint"
            )
            self._last = future
            try:
                thread.start()
            except RuntimeError:
                # The system has no thread to give.
                self._last = None
                raise
            return future

    def _plan(self, step: int, state: Any, metadata: Any) -> Plan:
        return Plan(_step_of(step), state, metadata, self.checksum)

    def _await_last(self) -> None:
        """Wait for the save before, and raise its error if nobody has had it."""
        last = self._last
        if last is None:
            return
        last._over.wait()
        self._last = None
        if not last._told and not last.cancelled():
            last.result()

    def _begin(self, step: int) -> None:
        """Make the root and take its lock; what others have left there goes."""
        make_folders(str(self.root))
        if self._writer.take():
            remove_unfinished(str(self.root), "step-")
        # Once: it may be far away.
        copied = [] if self._begun else self._copied()
        self._begun = True
        if self._copies is not None and (failed := self._copies.failure()) is not None:
            words = f"a step was saved and not drained to {self.drain_to}: {failed}"
            warnings.warn(words, RuntimeWarning, stacklevel=4)
        newest = next(self._complete(copied), None)
        if newest is not None and newest > step:
            warnings.warn(
                f"step {step} is saved, and step {newest} is there: restore takes that "
                f"one, and {step} is removed first; remove({newest}) forgets it",
                RuntimeWarning,
                stacklevel=4,
            )

    def _carry_out_for(self, plan: Plan, future: SaveFuture) -> None:
        """Save, and tell a future how it ended."""
        path, failed = None, None
        try:
            path = self._carry_out(plan, future)
        except BaseException as error:
            failed = error
        future._over.set()
        if failed is None:
            assert path is not None
            future.set_result(path)
            return
        if not isinstance(failed, CancelledError):
            # Nobody may ever ask.
            _log.error("step %d was not saved: %s", plan.step, failed)
        if not future.staged.done():
            future.staged.set_exception(failed)
        if future._begun():
            future.set_exception(failed)

    def _carry_out(self, plan: Plan, future: SaveFuture | None) -> pathlib.Path:
        target = self._folder(plan.step)

        def copied() -> None:
            if future is not None and not future.staged.done():
                future.staged.set_result(None)

        def stopped() -> bool:
            return future is not None and future.cancelled()

        with Unfinished(target, replace=True) as folder:
            plan.write(folder, stopped, copied)
            # From here on it cannot be cancelled.
            if future is not None and not future._begun():
                raise CancelledError
            folder.commit(sync=True)
        try:
            self._prune(plan.step)
        except OSError as error:
            # The step is there.
            _log.warning("older checkpoints are left: %s", error)
        if self._copies is not None:
            self._copies.begin(plan.step, target)
        return pathlib.Path(target)

    @property
    def drained(self) -> "Future[int] | None":
        """The copy of a step that was begun last."""
        return None if self._copies is None else self._copies.latest

    def _folder(self, step: int) -> str:
        return str(self.root / f"step-{step}")

    @suggesting
    def restore(
        self,
        step: int | None = None,
        *,
        into: Any = None,
        names: Collection[str] | None = None,
    ) -> Any:
        """Read a state.

        Parameters
        ----------
        step : int, optional
            The step; by default the newest that is complete.
        into : dict, list, ..., optional
            A state whose tensors and arrays are filled, each with the one that was saved in
            its place, of the same dtype and shape.  It may have more than the checkpoint.
        names : collection of str, optional
            Parts of the state, such as ``["model", "optimizer/state/0"]``: keys of dicts
            from the top down.  By default all of it.

        Returns
        -------
        dict, list, ...
            The state as it was saved, or those parts of it in their dicts; tensors and
            arrays are those of `into` where that is given, else new ones on the CPU.

        Raises
        ------
        FileNotFoundError
            There is no such step, or no complete one.
        CheckpointError
            The step is damaged; names the file.
        KeyError
            The state has none of a name.
        TypeError, ValueError
            `into` lacks something, or has something of another kind, dtype or shape; named
            by its path, before anything is changed.
        OSError, MemoryError
            The files cannot be read, or there is no memory; tells needed and free.

        Warns
        -----
        RuntimeWarning
            Without `step`: for each newer step that is damaged, with what is wrong with it.
            With `drain_to`: where a step is read from its copy, since it is damaged here.

        Notes
        -----
        All bytes are read by one submission, and only those that are needed.  An error
        while they are read, or checksums that differ, leave some of `into` changed.
        """
        names = _names_of(names)

        def read(held: Held) -> Any:
            return held.restore(into, names, checked=self.verify_by == "checksum")

        self.restored, found = self._of_step(step, read)
        return found

    @suggesting
    def metadata(self, step: int | None = None) -> Any:
        """Return what was saved beside a state; by default beside the newest one.

        Raises
        ------
        FileNotFoundError, CheckpointError, OSError
            As ``restore``.
        """
        return self._of_step(step, Held.metadata, (MANIFEST, TREE))[1]

    def _of_step(
        self, step: int | None, read: Any, files: Collection[str] = FILES
    ) -> tuple[int, Any]:
        """Take something from a step, or from the newest that has it.

        `files` are those that it needs.
        """
        if step is not None:
            step = _step_of(step)
            return step, self._read_or_copy(step, read, files)
        passed_over = set()
        for each in self._going_down(self._copied()):
            try:
                return each, self._read_or_copy(each, read, files)
            except _GoneError:
                continue
            except NoChecksumsError:
                # Nobody can tell.
                raise
            except (CheckpointError, OSError) as error:
                if isinstance(error, OSError) and error.errno not in _LOST:
                    raise
                if each not in passed_over:
                    words = f"step {each} is passed over: {error}"
                    warnings.warn(words, RuntimeWarning, stacklevel=4)
                passed_over.add(each)
        words = f"there is no complete checkpoint; {what_is_in(str(self.root))}"
        raise FileNotFoundError(errno.ENOENT, words, str(self.root))

    def _read_or_copy(self, step: int, read: Any, files: Collection[str]) -> Any:
        """Read a step, or its copy where it is gone or damaged."""
        try:
            return self._read(step, read)
        except NoChecksumsError:
            raise
        except (CheckpointError, OSError) as error:
            lost = isinstance(error, (CheckpointError, _GoneError)) or error.errno in _LOST
            if self._copies is None or not lost:
                raise
            try:
                found = self._copies.read(step, read, files)
            except NoCopyError:
                raise error from None
            except Exception as other:
                if isinstance(error, _GoneError):
                    # It is in the copy alone.
                    raise
                raise _with(error, f"its copy in {self.drain_to}: {other}") from other
            if not isinstance(error, _GoneError):
                words = f"step {step} is read from its copy in {self.drain_to}: {error}"
                warnings.warn(words, RuntimeWarning, stacklevel=5)
            return found

    def _read(self, step: int, read: Any) -> Any:
        """Read a step; once more where another took its place meanwhile."""
        folder = self._folder(step)
        for _ in range(_TRIES):
            if not os.path.lexists(folder):
                raise _GoneError(errno.ENOENT, "there is no such checkpoint", folder)
            with contextlib.suppress(MovedError), Held(folder, step) as held:
                return read(held)
        raise CheckpointError(f"{folder} was replaced {_TRIES} times while it was read")

    def _going_down(self, copied: Collection[int] = ()) -> Iterator[int]:
        """Yield the steps that have a folder, newest first; those that come, too."""
        before: list[int] = []
        while True:
            steps = sorted({*self._newest_first(), *copied}, reverse=True)
            # A writer that keeps one may have removed it when the next was there.
            if steps == before:
                return
            yield from steps
            before = steps

    def _newest_first(self) -> list[int]:
        """Return the steps that have a folder."""
        with contextlib.suppress(FileNotFoundError):
            names = map(FOLDER.fullmatch, os.listdir(self.root))
            return sorted((int(found[1]) for found in names if found), reverse=True)
        return []

    def latest(self) -> int | None:
        """Return the newest step that is complete, or None.

        Raises
        ------
        OSError
            The root cannot be read.
        """
        return next(self._complete(self._copied()), None)

    def _complete(self, copied: Collection[int] = ()) -> Iterator[int]:
        """Yield the steps that are complete, newest first, here or as a copy."""
        for step in self._going_down(copied):
            if step in copied or self._is_complete(step):
                yield step

    def _copied(self) -> list[int]:
        """Return the steps of which there are copies, as far as they can be seen."""
        if self._copies is None:
            return []
        try:
            return self._copies.steps()
        except Exception as error:
            # What fsspec raises may be anything.
            _log.warning("the copies in %s cannot be seen: %s", self.drain_to, error)
            return []

    def steps(self) -> list[int]:
        """Return the steps that are complete, oldest first.

        Raises
        ------
        OSError
            The root cannot be read.
        """
        return sorted({*self._complete(self._copied())})

    def _is_complete(self, step: int) -> bool:
        try:
            self._read(step, lambda held: None)
        except (CheckpointError, _GoneError):
            return False
        except OSError as error:
            if error.errno not in _LOST:
                raise
            return False
        return True

    @suggesting
    def verify(self, step: int, *, progress: Progress | None = None) -> None:
        """Read all of a step, and compare it with its checksums.

        Parameters
        ----------
        step : int
            The step.
        progress : callable, optional
            Is called with the bytes that were read and with all there are.

        Raises
        ------
        FileNotFoundError
            There is no such step.
        CheckpointError
            A file is damaged, named with the bytes that are; or there are no checksums.
        OSError
            A file cannot be read.
        """

        def read(held: Held) -> None:
            held.verify(progress)
            held.metadata()

        self._read(_step_of(step), read)

    @suggesting
    def remove(self, step: int) -> None:
        """Remove a step, complete or not, and its copy.

        Parameters
        ----------
        step : int
            The step.

        Raises
        ------
        FileNotFoundError
            There is no such step.
        BlockingIOError
            Somebody reads it, or another process writes to this root.
        OSError
            With errno and path.
        """
        step = _step_of(step)
        folder = self._folder(step)
        with self._alone():
            self._await_last()
            copied = False
            if self._copies is not None:
                make_folders(str(self.root))
                self._writer.take()
                copied = self._copies.remove(step)
            if not os.path.lexists(folder):
                if copied:
                    return
                raise _GoneError(errno.ENOENT, "there is no such checkpoint", folder)
            self._writer.take()
            with exclusive(os.path.join(folder, MANIFEST)) as free:
                if not free:
                    raise BlockingIOError(
                        errno.EAGAIN, "another process is reading it", folder
                    )
                set_aside(folder)

    def prune(self) -> list[int]:
        """Remove the steps that `keep` and `keep_every` do not keep, as saves do.

        Returns
        -------
        list of int
            The steps that were removed.

        Raises
        ------
        BlockingIOError
            Another process writes to this root.
        OSError
            With errno and path.

        Notes
        -----
        A step that somebody reads stays until the next time, and so does one that is not
        complete: it is not counted either.
        """
        with self._alone():
            if self._last is not None:
                self._last._over.wait()
            if not self.root.is_dir():
                return []
            self._writer.take()
            return self._prune(None)

    def _prune(self, saved: int | None) -> list[int]:
        if self.keep is None:
            return []
        removed = []
        steps = sorted({*self._complete()})
        kept = {*self._kept(steps), saved}
        for step in steps:
            if step in kept:
                continue
            with exclusive(os.path.join(self._folder(step), MANIFEST)) as free:
                if free:
                    set_aside(self._folder(step))
                    removed.append(step)
        return removed

    def _kept(self, steps: list[int]) -> list[int]:
        """Return which of the steps, oldest first, stay."""
        every = self.keep_every
        kept = [step for step in steps if every is not None and step % every == 0]
        return [*kept, *(steps if self.keep is None else steps[-self.keep :])]

    def cleanup(self) -> list[str]:
        """Remove what processes that died while they saved have left in the root.

        Returns
        -------
        list of str
            The paths that were removed; see ``nvmeio.checkpoint.cleanup``.

        Raises
        ------
        OSError
            With errno and path.
        """
        return cleanup(self.root) if self.root.is_dir() else []

    def close(self) -> None:
        """Wait for a save or a drain that goes on, and let others write to the root.

        Raises
        ------
        Exception
            That save or drain, or one before it, has failed, and nobody was told.
        """
        with self._mutex:
            if self._within:
                raise RuntimeError("a Checkpointer is closed while it is at work")
            self._closed = True
            try:
                self._await_last()
            finally:
                if self._copies is not None:
                    self._copies.wait()
                self._staging.release()
                self._writer.release()
            if self._copies is not None and (failed := self._copies.failure()) is not None:
                raise failed

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, kind: object, error: object, where: object) -> None:
        try:
            self.close()
        except Exception as told:
            # What the body raised is what its caller shall see.
            if kind is None:
                raise
            if hasattr(error, "add_note"):
                error.add_note(f"besides, a checkpoint was not saved: {told}")

    def __repr__(self) -> str:
        return f"<nvmeio.checkpoint.Checkpointer {str(self.root)!r}>"


def _one_of(name: str, value: Any, choices: tuple[Any, ...]) -> Any:
    if not any(value is choice or value == choice for choice in choices):
        known = ", ".join(map(repr, choices))
        raise ValueError(f"{name} is {value!r}; it must be one of {known}")
    return value


def _step_of(step: Any) -> int:
    return whole("step", integer("step", step), 0, _STEP_MAX)


def _names_of(names: Any) -> Collection[str] | None:
    if names is None:
        return None
    if isinstance(names, str) or not all(isinstance(each, str) for each in names):
        raise TypeError(
            f"names is {names!r:.100}; it must be an iterable of names, or None"
        )
    return list(names)
