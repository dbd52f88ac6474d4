"""``Checkpointer``: save and restore the state of a training run."""

import contextlib
import functools
import os
import pathlib
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import CancelledError, Future
from typing import Any, Literal, TypeVar, cast

from nvmeio._arguments.callers import level_outside
from nvmeio._arguments.checks import flag, path_of, whole
from nvmeio._arguments.types import Path
from nvmeio._events.forks import call_in_child
from nvmeio._events.log import log
from nvmeio._files.kinds import MANIFEST, STEP
from nvmeio._files.paths import absolute_folder, exists, refuse_url
from nvmeio._streams.progress import Progress, check_progress
from nvmeio._tensors.errors import note
from nvmeio.checkpoint._copies import Copies
from nvmeio.checkpoint._errors import CallbackError, GoneError
from nvmeio.checkpoint._folders import cleanup
from nvmeio.checkpoint._futures import SAVING, SaveFuture, start_thread, tell_at_exit
from nvmeio.checkpoint._manifest import TREE
from nvmeio.checkpoint._places import local_path
from nvmeio.checkpoint._ranks import agreed_step
from nvmeio.checkpoint._restoring import Held
from nvmeio.checkpoint._roots import (
    STEP_MAX,
    Kept,
    Root,
    StepFolder,
    StepPlace,
    name_another,
    prune,
    require_ours,
)
from nvmeio.checkpoint._saving import Plan, Staging
from nvmeio.checkpoint._steps import Steps, step_of

__all__ = ["Checkpointer"]

_Method = TypeVar("_Method", bound=Callable[..., Any])


_all: "weakref.WeakSet[Checkpointer]" = weakref.WeakSet()


def _forget_in_child() -> None:
    """Reset all Checkpointers: a forked child has no saving thread, and fresh locks."""
    for checkpointer in list(_all):
        checkpointer._begin_anew()


call_in_child(_forget_in_child)


def _alone(method: _Method) -> _Method:
    """Exclude other threads, and refuse calls from signal handlers of this one.

    Not a context manager in Python: Ctrl-C could come before its block is entered, and the
    Checkpointer would be at work as long as somebody keeps the error.
    """

    @functools.wraps(method)
    def call(self: "Checkpointer", *args: Any, **kwargs: Any) -> Any:
        self._refuse_callback()
        with self._mutex:
            if self._within:
                raise RuntimeError(
                    "a Checkpointer was called while it is at work in the same thread, for "
                    "example by a signal handler; call it outside the handler"
                )
            if self._closed:
                raise ValueError("the Checkpointer is closed")
            try:
                self._within = True
                return method(self, *args, **kwargs)
            finally:
                self._within = False

    return cast("_Method", call)


class Checkpointer:
    """Save and restore the checkpoints of one training run, in folders ``root/step-12``.

    Parameters
    ----------
    root : str, bytes or os.PathLike
        The folder of the checkpoints.  The first save creates it if it does not exist.
    keep : int or None, default 3
        How many of the newest steps to keep; each completed save removes older ones, apart
        from one that is being copied to `drain_to` or read.  With None all steps stay.
    keep_every : int, optional
        Also keep all steps that are multiples of this number.
    checksum : {"crc32c", None}, default "crc32c"
        The checksum of each block of 8 MiB, which detects damage.  With None, none is
        computed.
    verify : {"size", "checksum", None}, default "size"
        What ``restore`` checks.  "size": all files exist and have the sizes that were
        saved.  "checksum": besides, all bytes are those that were saved; with `names`,
        this reads the whole checkpoint instead of a part.  None: the same as "size".
    busy : {"wait", "skip", "raise"}, default "wait"
        What ``save_async`` does while an earlier ``save_async`` is in progress: wait for
        it, return None without saving, or raise RuntimeError.
    drain_to : str, bytes or os.PathLike, optional
        A folder on another file system, or a URL for fsspec.  Each saved step is copied
        there in the background; `keep` and `keep_every` apply there too, and only one
        Checkpointer may copy to it.  Steps that are
        missing in `root`, or damaged as far as `verify` checks, are read from the copy.

    Raises
    ------
    TypeError, ValueError
        An argument is of the wrong type, or not one of the allowed values.
    ImportError
        `drain_to` is a URL, and fsspec, or the package that it needs for this URL, is not
        installed.

    Attributes
    ----------
    root, keep, keep_every, checksum, verify_by, busy, drain_to
        The arguments; `verify_by` is the argument `verify`.
    drained : concurrent.futures.Future or None
        The copy to `drain_to` that was started last.  Its result is its size in bytes.
    restored : int or None
        The step that the last ``restore`` has read.

    Notes
    -----
    Only one process writes to a root.  Its first save takes a lock, which ends with
    ``close`` or with the process, and removes unfinished folders of processes that died.
    Reading needs no lock of the root.  ``restore`` and ``verify`` lock the step that they
    read, so that it is not pruned meanwhile.  In distributed data parallel training all
    processes have the same state: let rank 0 save, and all restore ``agreed_step()``.

    The folder of a step has three files: ``tensors.safetensors``, which any reader of
    safetensors opens; ``tree.json``, the nesting of the state; and ``manifest.json``, with
    sizes and checksums.  Nothing is pickled.  A folder gets its name only once all of it is
    on the device.

    Thread-safe; a save waits for the previous one.

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
        refuse_url("root", root, "it must be a folder: pass the URL as drain_to")
        self.root = pathlib.Path(absolute_folder("root", root))
        self.keep = None if keep is None else whole("keep", keep, 1, STEP_MAX)
        self.keep_every = keep_every
        if keep_every is not None:
            self.keep_every = whole("keep_every", keep_every, 1, STEP_MAX)
        self.checksum = _one_of("checksum", checksum, ("crc32c", None))
        self.verify_by = _one_of("verify", verify, ("size", "checksum", None))
        self.busy = _one_of("busy", busy, ("wait", "skip", "raise"))
        if self.verify_by == "checksum" and self.checksum is None:
            raise ValueError(
                'verify is "checksum", but checksum is None, so there are no checksums'
            )
        self.drain_to = None if drain_to is None else os.fsdecode(path_of(drain_to))
        if self.drain_to == "":
            raise ValueError("drain_to is ''; it must be a folder or a URL, or None")
        if self.drain_to is not None and (path := local_path(self.drain_to)) is not None:
            self.drain_to = path
            root = os.path.realpath(self.root)
            within = os.path.relpath(os.path.realpath(self.drain_to), root)
            if within == "." or STEP.fullmatch(within.partition("/")[0]):
                what = "the root itself" if within == "." else "in a step of the root"
                raise ValueError(
                    f"drain_to is {self.drain_to!r}, {what}; choose another folder"
                )
        self.restored: int | None = None
        self._closed = False
        self._steps = Steps(Root(str(self.root)))
        self._begin_anew()
        _all.add(self)

    def _begin_anew(self) -> None:
        """Set the state of a new Checkpointer; also called in a forked child."""
        self._mutex = threading.RLock()
        self._within = False
        self._staging = Staging()
        self._last: SaveFuture | None = None
        # The save that a thread carries out.
        self._saving: SaveFuture | None = None
        # Earlier saves, of which some may have failed without a word.
        self._ended: list[SaveFuture] = []
        self._begun = False
        self._copies: Copies | None = None
        if self.drain_to is not None:
            self._copies = Copies(self.drain_to, self._steps.root, self._kept)
            self._steps.copies = self._copies.place

    def _refuse_callback(self) -> None:
        """Raise RuntimeError in the thread of a save that has not ended."""
        if (saving := self._saving) is not None:
            saving._refuse_own_thread("this call of the Checkpointer")

    @_alone
    def save(self, step: int, state: Any, metadata: Any = None) -> pathlib.Path:
        """Save a state, and return when it is on the device.

        Parameters
        ----------
        step : int
            The number of the step, from 0 to 10**18.  A step that exists is replaced; the
            old one stays until the new one is complete.
        state : dict, OrderedDict, Counter, list, tuple, ...
            Any nesting of these (keys are str or int) and torch.Size.  The values are
            torch tensors, numpy arrays, numbers, bool, str, bytes, torch.dtype,
            torch.device and None.
        metadata : dict, optional
            A description of the checkpoint: values as in `state`, but no tensors or arrays.

        Returns
        -------
        pathlib.Path
            The step's folder.

        Raises
        ------
        TypeError, ValueError
            The state has a value that cannot be saved.  The message has its path; nothing
            was written.
        BlockingIOError
            Another process writes to this root; the message names it.
        FileExistsError
            Something else has the name of the step; the message says what.  It stays.
        OSError
            Writing failed; has errno and path.  The message for ENOSPC says how many bytes
            are needed and free.
        RuntimeError
            A signal handler called this during another call of the same thread, or a
            callback of ``SaveFuture.staged`` did.
        Exception
            An earlier ``save_async`` failed, and its error has not been retrieved.  It is
            raised here once the state of this call is saved; its note says so.

        Warns
        -----
        RuntimeWarning
            A newer step exists, which ``restore`` would read.  Or a step could not be
            copied to `drain_to`, or older ones not be removed.  Or `root` or `drain_to` was
            moved, or mounted or unmounted, since the last save.  If warnings are errors,
            they are raised once the step is saved.

        Notes
        -----
        Tensors that share memory in the state share memory when they are restored.  Of a
        view, only its own bytes are saved.  Tensors are restored on the CPU, without gaps,
        with their elements in the same order in memory, at multiples of 64 bytes.
        Parameters stay Parameters, Buffers stay Buffers, and requires_grad is kept.  torch
        cannot resize the storage of most restored tensors, but that of their clone().
        """
        plan = self._plan(step, state, metadata)
        self._await_last()
        words: list[str] = []
        try:
            self._begin(plan.step, words)
            path = self._carry_out(plan, None, words)
            self._tell(f"{path} was saved nevertheless")
        except BaseException as error:
            _warn(words, error)
            raise
        _warn(words)
        return path

    # Only busy="skip" returns None.  With "| Any", as in typeshed, other callers need no
    # check for None.
    @_alone
    def save_async(
        self, step: int, state: Any, metadata: Any = None, *, stage: bool = True
    ) -> SaveFuture | Any:
        """Start saving a state, and return as soon as the state may be changed.

        Parameters
        ----------
        step, state, metadata
            As for ``save``.
        stage : bool, default True
            Copy the state first, into memory that the next save uses again.  With False
            there is no such copy, only buffers of 32 MiB, and of 8 MiB for a tensor that is
            not in C order; but you must not change the tensors of the state, nor resize
            their storages, until the future's `staged` is done.

        Returns
        -------
        SaveFuture or None
            A future whose result is the step's folder.  None if an earlier ``save_async``
            is in progress and `busy` is "skip".

        Raises
        ------
        MemoryError
            Not enough memory for the copy; the message says how much is needed and free.
        RuntimeError
            An earlier ``save_async`` is in progress, and `busy` is "raise".
        TypeError, ValueError, OSError
            As ``save``.
        Exception
            As ``save``, once the save of this call has begun, which goes on.

        Notes
        -----
        At most one save is in progress.  The engine moves its bytes, while its Python
        thread sleeps or computes checksums, without the GIL.  Python's exit waits for it.

        The copy has everything, also the states in ``state_items()`` of an offloaded
        optimizer.  With ``stage=False`` they are read from the drive one by one; a step
        before `staged` is done makes the save fail.

        Examples
        --------
        >>> state = {"weights": np.arange(4)}
        >>> with nvmeio.checkpoint.Checkpointer("run") as checkpointer:
        ...     future = checkpointer.save_async(1, state)
        ...     state["weights"] += 1
        ...     future.result().name
        ...     checkpointer.restore()
        'step-1'
        {'weights': array([0, 1, 2, 3])}
        """
        stage = flag("stage", stage)
        step = step_of(step)
        # Before the state is looked at, which takes some 50 us a tensor.
        if self._last is not None and not self._last._over.is_set():
            if self.busy == "skip":
                return None
            if self.busy == "raise":
                raise RuntimeError(
                    f"step {self._last.step} is still being saved, and busy is "
                    '"raise"; wait for its future first'
                )
        plan = self._plan(step, state, metadata)
        self._await_last()
        words: list[str] = []
        try:
            self._begin(plan.step, words)
            future = self._start(plan, stage)
            self._tell(f"the save of step {plan.step} goes on nevertheless")
        except BaseException as error:
            _warn(words, error)
            raise
        _warn(words)
        return future

    def _start(self, plan: Plan, stage: bool) -> SaveFuture:
        """Carry out a plan in a new thread."""
        if stage:
            plan.stage(self._staging)
        future = SaveFuture(plan.step)
        if stage:
            future.staged.set_result(None)
        # Who takes it first decides whether the save goes on.
        begun = threading.Lock()

        def carry_out() -> None:
            if begun.acquire(blocking=False):
                self._carry_out_for(plan, future)

        try:
            self._last = future
            start_thread(carry_out, SAVING)
        except BaseException:
            # No thread can be started, or Ctrl-C came, and it may have been.
            if begun.acquire(blocking=False):
                self._last = None
            raise
        return future

    def _plan(self, step: int, state: Any, metadata: Any) -> Plan:
        return Plan(step_of(step), state, metadata, self.checksum)

    def _await_last(self) -> None:
        """Wait for the previous save; ``_tell`` raises its error."""
        last, self._last = self._last, None
        if last is None:
            return
        try:
            last._over.wait()
        except BaseException:
            # Ctrl-C.
            self._last = last
            raise
        self._ended.append(last)

    def _tell(self, words: str | None = None) -> None:
        """Raise the error of an earlier save that nobody has retrieved, with a note."""
        ended, self._ended = self._ended, []
        for number, each in enumerate(ended):
            # The callbacks of the future run after it is over.
            if not each.cancelled() and not each.retrieved and each.exception() is not None:
                self._ended = ended[number + 1 :]
                failed = each.exception()
                assert failed is not None
                if words is not None:
                    note(failed, f"this is the error of step {each.step}; {words}")
                raise failed

    def _begin(self, step: int, words: list[str]) -> None:
        """Create and lock the root, and remove unfinished folders of dead processes.

        Append to `words` what to warn of.
        """
        root = self._steps.root
        if (moved := root.moved) is not None:
            words.append(moved)
        root.take()
        require_ours(root.folder(step))
        complete = (s for s in root.steps() if root.was_complete(s, again=True))
        newest = max(next(complete, -1), self._newest_copy(words))
        if self._copies is not None:
            words += self._copies.moved()
            if (failed := self._copies.failure()) is not None:
                where = self._copies.place.where
                words.append(f"a step was saved but not copied to {where}: {failed}")
        if newest > step:
            words.append(
                f"step {step} is not the newest: restore() reads step {newest}, and "
                f"{step} is pruned first; call remove({newest}) if that is obsolete"
            )

    def _newest_copy(self, words: list[str]) -> int:
        """Return the newest complete copy at the first call, -1 if that is unknown.

        Later it is not asked for again, because remote storage may be slow.
        """
        begun, self._begun = self._begun, True
        if self._copies is None or begun:
            return -1
        copied, _, unlisted = self._steps.list_copies()
        if unlisted:
            words.append(unlisted)
        # A store that fails now does not keep the step from being saved.
        with contextlib.suppress(Exception):
            return next(filter(self._copies.place.identity, copied), -1)
        return -1

    def _places(self) -> list[StepPlace]:
        """Return what has steps: the root first."""
        copies = [] if self._copies is None else [self._copies.place]
        return [self._steps.root, *copies]

    def _carry_out_for(self, plan: Plan, future: SaveFuture) -> None:
        """Save, and set the result or error of the future."""
        path, failed, warned = None, None, None
        words: list[str] = []
        future._thread, self._saving = threading.get_ident(), future
        try:
            path = self._carry_out(plan, future, words)
        except BaseException as error:
            failed = error
        try:
            _warn(words)
        except Exception as error:
            # Warnings are errors.  It is no error of the save, so the thread raises it.
            warned = error
        # Before others may save, and because the error's traceback has the state.
        self._saving = None
        try:
            self._end(future, plan, path, failed)
        finally:
            if warned is not None:
                raise warned

    @staticmethod
    def _end(
        future: SaveFuture,
        plan: Plan,
        path: pathlib.Path | None,
        failed: BaseException | None,
    ) -> None:
        """Set the result or error of a future."""
        future._over.set()
        if failed is None:
            assert path is not None
            future.set_result(path)
            return
        if not isinstance(failed, CancelledError):
            # Logged too, because the program may never ask the future.
            log.error("step %d was not saved: %s", plan.step, failed)
        if not future.staged.done():
            future.staged.set_exception(failed)
        if future._begun():
            future.fail(failed, f"step {plan.step} was not saved")

    def _carry_out(
        self, plan: Plan, future: SaveFuture | None, words: list[str]
    ) -> pathlib.Path:
        """Save, and return the step's folder; append to `words` what to warn of."""
        target = self._steps.root.folder(plan.step)

        def copied() -> None:
            if future is not None and not future.staged.done():
                future.staged.set_result(None)

        def stopped() -> bool:
            return future is not None and future.cancelled()

        with (folder := StepFolder(target, self._steps.root.lock, plan.sizes)):
            with folder.saying_space():
                plan.write(folder, stopped, copied)
            # From here on, cancel() returns False.
            if future is not None and not future._begun():
                raise CancelledError
            folder.commit(sync=True)
        self._steps.root.written(plan.step)
        self._steps.agreed.pop(plan.step, None)
        try:
            self._prune(plan.step)
        except OSError as error:
            # The save itself succeeded.
            words.append(f"older checkpoints were not removed: {error}")
        if self._copies is not None:
            self._copies.begin(plan.step, target)
        return pathlib.Path(target)

    @property
    def drained(self) -> "Future[int] | None":
        """The future of the copy to `drain_to` that was started last, or None.

        Its result is the size of the copy in bytes.
        """
        return None if self._copies is None else self._copies.latest

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
            The step to read; by default the newest complete one.
        into : dict, list, ..., optional
            A state with tensors and arrays to fill.  Each must have the path, dtype and
            shape of the saved one.  Entries that the checkpoint lacks stay as they are.
        names : collection of str, optional
            The parts of the state to read, such as ``["model", "optimizer/state/0"]``: the
            keys of nested dicts, joined by slashes.  By default everything is read.  Each
            call reads the names of all tensors, so ask for many parts at once.

        Returns
        -------
        dict, list, ...
            The state as it was saved, or the parts in `names`, nested in the same dicts.
            Its tensors and arrays are those of `into`; without `into` they are new, on the
            CPU.

        Raises
        ------
        FileNotFoundError
            The step does not exist, or there is no step.  Without `step`, this means that
            `root` and `drain_to` were listed.
        CheckpointError
            The step is damaged, or every step is; the message names the file.  Or the
            newest step is of a format of another version of nvmeio, or has no checksums for
            ``verify="checksum"``: no older step is restored in its place.
        KeyError
            The checkpoint has nothing under one of the `names`.
        TypeError, ValueError
            `into` lacks an entry, or has one of another type, dtype or shape, or two that
            share memory otherwise than in the checkpoint.  The message has the path;
            nothing was changed.
        OSError
            The files cannot be read.
        MemoryError
            Not enough memory; the message says how much is needed and free.

        Warns
        -----
        RuntimeWarning
            Without `step`: for each newer step that is damaged, with the damage.
            With `drain_to`: if a step is damaged in `root` and read from its copy, or if
            the copies cannot be listed.

        Notes
        -----
        One submission reads all bytes, and only those that are needed.  If reading fails,
        or checksums differ, part of `into` may have been changed.

        Examples
        --------
        >>> checkpointer = nvmeio.checkpoint.Checkpointer("run")
        >>> saved = checkpointer.save(7, {"model": {"w": np.arange(3)}, "epoch": 2})
        >>> checkpointer.restore(names=["model"])
        {'model': {'w': array([0, 1, 2])}}
        >>> state = {"model": {"w": np.zeros(3, np.int64)}, "epoch": 0}
        >>> checkpointer.restore(7, into=state)["epoch"]
        2
        >>> state["model"]["w"].tolist()
        [0, 1, 2]
        >>> checkpointer.close()
        """
        names = _names_of(names)

        filled: set[Any] = set()

        def read(held: Held) -> Any:
            checked = self.verify_by == "checksum"
            return held.restore(into, names, filled, checked=checked)

        self.restored, found = self._steps.read(step, read)
        return found

    def metadata(self, step: int | None = None) -> Any:
        """Return the metadata that was saved with a state.

        Parameters
        ----------
        step : int, optional
            The step; by default the newest complete one.

        Returns
        -------
        object
            The `metadata` that was passed to ``save``; None if there was none.

        Raises
        ------
        FileNotFoundError, CheckpointError, OSError
            As ``restore``.

        Examples
        --------
        >>> with nvmeio.checkpoint.Checkpointer("run") as checkpointer:
        ...     folder = checkpointer.save(1, {"epoch": 3}, {"loss": 0.25})
        ...     checkpointer.metadata()
        {'loss': 0.25}
        """
        return self._steps.read(step, Held.metadata, (MANIFEST, TREE))[1]

    def latest(self) -> int | None:
        """Return the newest complete step, or None if there is none.

        Returns
        -------
        int or None
            The step, in `root` or in `drain_to`.

        Raises
        ------
        OSError
            The root cannot be read; or there is no step in it, and `drain_to` cannot be
            listed.
        """
        return next(self._steps.listed(), None)

    def agreed_step(self, group: Any = None) -> int | None:
        """Return the newest step that all ranks have, the same on each of them.

        Parameters
        ----------
        group : torch.distributed.ProcessGroup, optional
            The processes that call this together; by default all.

        Returns
        -------
        int or None
            The step for ``restore(step)``.  None if no rank has any, even a damaged one.
            If torch.distributed is not initialized, this process is the only rank.

        Raises
        ------
        CheckpointError
            On all ranks: there are steps, but none that is complete on each; or one could
            not read its steps, and the message has its rank and error.
        ValueError
            This process is not in `group`.

        Warns
        -----
        RuntimeWarning
            On all ranks: a newer step is passed over, because a rank lacks it.

        Notes
        -----
        A rank that chooses alone may choose another step than the others: its list of a
        shared folder may be an old one, or the copy of the newest step was not finished
        when its machine was lost.  The roots of the ranks may be one folder, or one on the
        drive of each machine.  A step counts if its files have the sizes that were saved,
        and if it is of the same save everywhere: after a job that went on elsewhere, two
        machines may have different ones of one number.  ``restore`` then reads the agreed
        one, in `root` or in `drain_to`.

        Examples
        --------
        >>> with nvmeio.checkpoint.Checkpointer("run") as checkpointer:
        ...     folder = checkpointer.save(40, {"epoch": 4})
        ...     step = checkpointer.agreed_step()
        ...     checkpointer.restore(step)
        {'epoch': 4}
        """
        return agreed_step(self._steps, group)

    def steps(self) -> list[int]:
        """Return the complete steps, oldest first.

        Returns
        -------
        list of int
            The steps, in `root` or in `drain_to`.

        Raises
        ------
        OSError
            The root cannot be read; or there is no step in it, and `drain_to` cannot be
            listed.

        Examples
        --------
        >>> with nvmeio.checkpoint.Checkpointer("run", keep=2) as checkpointer:
        ...     folders = [checkpointer.save(step, {"epoch": step}) for step in (1, 2, 3)]
        ...     checkpointer.steps()
        [2, 3]
        """
        return sorted({*self._steps.listed()})

    def verify(self, step: int, *, progress: Progress | None = None) -> None:
        """Read all bytes of a step, and compare them with their checksums.

        Parameters
        ----------
        step : int
            The step to verify, in `root`; copies in `drain_to` are not read.
        progress : callable, optional
            Called after each block with two ints: bytes read so far, and bytes in total.

        Raises
        ------
        FileNotFoundError
            The step does not exist.
        CheckpointError
            A file is damaged: the message names it and the range of damaged bytes.  Or the
            step was saved without checksums.
        OSError
            A file cannot be read.

        Examples
        --------
        >>> checkpointer = nvmeio.checkpoint.Checkpointer("run")
        >>> folder = checkpointer.save(1, {"weights": np.arange(4)})
        >>> checkpointer.verify(1)
        >>> nvmeio.write_file(b"damage", folder / "tree.json")
        6
        >>> checkpointer.verify(1)
        Traceback (most recent call last):
            ...
        nvmeio.checkpoint.CheckpointError: ...
        >>> checkpointer.close()
        """

        def told(done: int, total: int) -> None:
            try:
                if progress is not None:
                    progress(done, total)
            except Exception as error:
                raise CallbackError(error) from None

        def read(held: Held) -> None:
            held.verify(told)
            with contextlib.suppress(ModuleNotFoundError):
                # Without torch, its dtypes and sizes cannot be made, but all is there.
                held.metadata()

        check_progress(progress)
        step = step_of(step)
        try:
            self._steps.root.read(step, read)
        except CallbackError as error:
            # Not the file's, even if it is the EIO of a terminal that is gone.
            raise error.of_callback from None
        except GoneError:
            raise self._steps.missing(step) from None
        self._steps.root.forget_damage(step)

    @_alone
    def remove(self, step: int) -> None:
        """Remove a step, complete or not, and its copy in `drain_to`, durably.

        Parameters
        ----------
        step : int
            The step to remove.

        Raises
        ------
        FileNotFoundError
            The step does not exist.
        BlockingIOError
            The step or its copy is being read, or another process writes there.  Nothing
            was removed.
        FileExistsError
            What has the name of the step is not a step of a Checkpointer.
        OSError
            Removing failed; has errno and path.

        Examples
        --------
        >>> with nvmeio.checkpoint.Checkpointer("run") as checkpointer:
        ...     folders = [checkpointer.save(step, {"epoch": step}) for step in (1, 2)]
        ...     checkpointer.remove(2)
        ...     checkpointer.steps()
        [1]
        """
        step = step_of(step)
        folder = self._steps.root.folder(step)
        self._await_last()
        if self.root.is_dir():
            self._steps.root.take()
        stopped = self._copies is not None and self._copies.cancel(step)
        try:
            self._remove(step)
        except Exception:  # fsspec may raise any type
            if stopped and self._copies is not None and exists(folder):
                self._copies.begin(step, folder)
            raise
        self._tell(f"step {step} was removed nevertheless")

    def _remove(self, step: int) -> None:
        """Remove a step and its copy, or raise before either is changed."""
        with contextlib.ExitStack() as stack:
            found = []
            for place in self._places():
                if step in place.steps():
                    place.take(step)
                    with contextlib.suppress(GoneError):
                        remove = stack.enter_context(place.removing(step))
                        found.append((place, remove))
            if not found:
                raise self._steps.missing(step)
            removed = False
            # The local step first: it goes by one rename, and if that fails, as on a drive
            # that is broken or read-only, the copy is still there.
            for place, remove in found:
                name_another(place, step)
                # A copy may have been pruned meanwhile.
                with contextlib.suppress(GoneError):
                    remove()
                    removed = True
            if not removed:
                raise self._steps.missing(step)
            for place, _ in found:
                place.settle()

    @_alone
    def prune(self) -> list[int]:
        """Remove the steps that `keep` and `keep_every` do not keep, as each save does.

        Returns
        -------
        list of int
            The steps that were removed.

        Raises
        ------
        BlockingIOError
            Another process writes to this root.
        OSError
            Removing failed; has errno and path.

        Notes
        -----
        A step that is being read stays until the next call.  A step that is not complete,
        or that ``restore`` or ``verify`` found to be damaged, is not counted and stays;
        ``remove`` removes it.

        Examples
        --------
        >>> with nvmeio.checkpoint.Checkpointer("run") as checkpointer:
        ...     folders = [checkpointer.save(step, {"epoch": step}) for step in (1, 2, 3)]
        >>> with nvmeio.checkpoint.Checkpointer("run", keep=1) as checkpointer:
        ...     checkpointer.prune()
        [1, 2]
        """
        if self._last is not None:
            self._last._over.wait()
        if not self.root.is_dir():
            return []
        self._steps.root.take()
        return self._prune(None)

    def _prune(self, saved: int | None) -> list[int]:
        return prune(self._steps.root, self._kept, saved)

    @property
    def _kept(self) -> Kept:
        return Kept(self.keep, self.keep_every)

    def cleanup(self) -> list[str]:
        """Remove unfinished folders in the root whose process died while it saved.

        Returns
        -------
        list of str
            The paths that were removed; see ``nvmeio.checkpoint.cleanup``.

        Raises
        ------
        OSError
            Removing failed; has errno and path.

        Examples
        --------
        >>> with nvmeio.checkpoint.Checkpointer("run") as checkpointer:
        ...     folder = checkpointer.save(1, {"epoch": 1})
        ...     checkpointer.cleanup()
        []
        """
        return cleanup(self.root) if self.root.is_dir() else []

    def close(self) -> None:
        """Wait for a save or copy in progress, and release the root for other writers.

        Raises
        ------
        RuntimeError
            A signal handler called this during another call of the same thread, or a
            callback of ``SaveFuture.staged`` did.
        Exception
            A save or a copy to `drain_to` failed, and its error has not been retrieved.
        """
        self._refuse_callback()
        with self._mutex:
            if self._within:
                raise RuntimeError(
                    "close() was called while the Checkpointer is at work in the same "
                    "thread, for example by a signal handler"
                )
            self._closed = True
            # Interrupted by Ctrl-C, this releases nothing, because the save goes on.
            self._await_last()
            try:
                self._tell()
            finally:
                if self._copies is not None:
                    self._copies.wait()
                self._staging.release()
                for place in self._places():
                    place.release()
            if self._copies is not None:
                failed = self._copies.failure(retrieved=False)
                _warn(self._copies.moved(), failed)
                if failed is not None:
                    raise failed

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, kind: object, error: object, where: object) -> None:
        try:
            self.close()
        except Exception as failure:
            # An exception of the body takes precedence.
            if kind is None:
                raise
            words = f"a checkpoint was not saved or copied: {failure or repr(failure)}"
            if isinstance(error, BaseException):
                note(error, f"also, {words}")
            # That exception may be caught, or one that Python prints nothing of.  Not if
            # close() was only refused.
            if not self._within:
                tell_at_exit(words)

    def __repr__(self) -> str:
        return f"<nvmeio.checkpoint.Checkpointer {str(self.root)!r}>"


def _one_of(name: str, value: Any, choices: tuple[Any, ...]) -> Any:
    if not any(value is choice or value == choice for choice in choices):
        known = ", ".join(map(repr, choices))
        raise ValueError(f"{name} is {value!r}; it must be one of {known}")
    return value


def _warn(words: Iterable[str], other: BaseException | None = None) -> None:
    """Warn the code that called nvmeio of each; if warnings are errors, raise the first.

    Not in place of another error, whose notes say it then.
    """
    failed: Warning | None = None
    for each in words:
        try:
            warnings.warn(each, RuntimeWarning, stacklevel=level_outside())
        except Warning as error:
            if failed is not None:
                note(failed, f"also: {error}")
            failed = failed or error
            if other is not None:
                note(other, each)
    if failed is not None and other is None:
        raise failed


def _names_of(names: Any) -> Collection[str] | None:
    if names is None:
        return None
    chosen: list[Any] = list(names) if isinstance(names, Iterable) else [None]
    if isinstance(names, str) or not all(isinstance(each, str) for each in chosen):
        raise TypeError(
            f"names is {names!r:.100}; it must be an iterable of names, or None"
        )
    return chosen
