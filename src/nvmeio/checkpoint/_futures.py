"""Futures of saves and copies, whose errors are told at exit if nobody has asked."""

import atexit
import contextlib
import itertools
import multiprocessing.util
import pathlib
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from nvmeio._events.forks import call_in_child

__all__ = ["DRAINING", "SAVING", "Flag", "SaveFuture", "ToldFuture", "start_thread"]
__all__ += ["tell_at_exit"]

# The names of the threads that save and copy.
SAVING, DRAINING = "nvmeio-checkpoint", "nvmeio-drain"

# How often to look whether a flag is set.
_LOOK_S = 0.05

_Result = TypeVar("_Result")

# What has failed, in words, and nobody knows yet.
_untold: dict[int, str] = {}
_numbers = itertools.count()
call_in_child(_untold.clear)


class Flag:
    """An event; Ctrl-C may come at any time while it is waited for.

    That of threading may keep its own lock then, for which set() would wait for ever.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._wake = threading.Lock()
        self._wake.acquire()

    def is_set(self) -> bool:
        """Return whether it is set."""
        return self._is_set

    def set(self) -> None:
        """Wake the threads that wait."""
        self._is_set = True
        self._pass_on()

    def clear(self) -> None:
        """Let others wait again."""
        self._is_set = False
        self._wake.acquire(blocking=False)

    def wait(self) -> None:
        """Wait until it is set."""
        while not self._is_set:
            # Looks again, because Ctrl-C may have come to one who was woken.
            self._wake.acquire(timeout=_LOOK_S)
        self._pass_on()

    def _pass_on(self) -> None:
        with contextlib.suppress(RuntimeError):  # nobody has taken it
            self._wake.release()


def start_thread(run: Callable[[], object], name: str) -> None:
    """Start a thread that saves or copies, for whose end Python's exit waits."""
    thread = threading.Thread(target=run, name=name, daemon=False)
    try:
        thread.start()
    except BaseException as error:
        # After Ctrl-C, Python may list for ever a thread that never begins.
        thread.name = f"{name}-interrupted"
        if isinstance(error.__context__, KeyboardInterrupt):
            # It came to a lock within start(), whose RuntimeError does not mean that the
            # thread has not begun.
            raise KeyboardInterrupt from error
        raise


def tell_at_exit(words: str) -> None:
    """Print something when Python exits, which then fails."""
    _untold[next(_numbers)] = words


class ToldFuture(Future[_Result]):
    """A Future whose error is told when Python exits, unless ``retrieved`` is true."""

    def __init__(self) -> None:
        super().__init__()
        self._number = next(_numbers)
        self._failure: BaseException | None = None
        self.retrieved = False

    def fail(self, error: BaseException, what: str) -> None:
        """Set the error of `what`, such as "step 3 was not saved"."""
        self._failure = error
        _untold[self._number] = f"{what}: {error or repr(error)}"
        self.set_exception(error)

    def _retrieve(self) -> None:
        self.retrieved = True
        _untold.pop(self._number, None)

    def result(self, timeout: float | None = None) -> _Result:
        """Return the result, or raise the error."""
        try:
            return super().result(timeout)
        except BaseException as error:
            if error is self._failure:
                self._retrieve()
            raise

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error, or None."""
        found = super().exception(timeout)
        if found is not None:
            self._retrieve()
        return found


class _Unflushed:
    """Standard output at the very end: Python's status is 120 if its flush() fails."""

    # Python flushes no stream that is closed.
    closed = False

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def flush(self) -> None:
        """Flush; then fail, once Python has nothing else to run."""
        # It may be None or closed, or a program's own object.
        with contextlib.suppress(AttributeError, ValueError):
            self._stream.flush()
        if sys.is_finalizing():
            # The error was printed already.
            sys.unraisablehook = lambda _: None
            raise OSError

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _wait_for_all() -> None:
    """Wait for the threads that save and copy, and for those that they start."""
    while late := [each for each in threading.enumerate() if _saves(each)]:
        if late[0].is_alive():
            late[0].join()
        else:
            # Another thread is about to start it, or it has just ended.
            time.sleep(0.001)


# At exit Python ends the executors of concurrent.futures before it waits for threads.  By
# them asyncio looks up the hosts of stores.  What is registered last is called first.
with contextlib.suppress(AttributeError, RuntimeError):  # Python is ending already
    import concurrent.futures.thread  # noqa: F401  # registers the end of its executors

    threading._register_atexit(_wait_for_all)  # type: ignore[attr-defined]


@atexit.register
def _tell_all() -> None:
    """Print the errors that nobody has retrieved, and make Python fail.

    Threads that save have ended by now, except those that another function at exit has
    started.
    """
    _wait_for_all()
    if not _untold:
        return
    lines = [f"nvmeio: {words} (no call has raised this)\n" for words in _untold.values()]
    _untold.clear()
    # It may be None or closed.
    with contextlib.suppress(AttributeError, OSError, ValueError):
        sys.stderr.write("".join(lines))
    sys.stdout = _Unflushed(sys.stdout or sys.__stderr__)


def _saves(thread: threading.Thread) -> bool:
    ours = thread.name in (SAVING, DRAINING)
    return ours and not thread.daemon and thread is not threading.current_thread()


def _tell_in_worker(tell: Callable[[], None]) -> None:
    # After the queues of multiprocessing, which have the priorities -5 and 10.
    multiprocessing.util.Finalize(None, tell, exitpriority=-100)


# Forked workers of multiprocessing end without the functions of atexit.
multiprocessing.util.register_after_fork(_tell_all, _tell_in_worker)


class SaveFuture(ToldFuture[pathlib.Path]):
    """A save in progress, as ``Checkpointer.save_async`` returns it.

    A concurrent.futures.Future.  ``result(timeout=None)`` waits until the checkpoint is on
    the device and returns the step's folder, or raises the save's error.  ``cancel()``
    abandons the save and returns True; it returns False once the folder is being renamed
    to its final name.

    Parameters
    ----------
    step : int
        The number of the step.

    Attributes
    ----------
    step : int
        The number of the step.
    staged : concurrent.futures.Future
        Done when the state may be changed: with ``stage=True`` from the beginning, else
        when its last byte has been written.  The result is None.

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
        # Set when the save has ended, before the callbacks run.
        self._over = Flag()
        self._may_begin: bool | None = None
        # The thread that saves, once it has begun.
        self._thread: int | None = None

    def _refuse_own_thread(self, what: str) -> None:
        """Raise RuntimeError in the thread that saves: it would wait for itself."""
        if self._thread == threading.get_ident() and not self.done():
            raise RuntimeError(
                f"{what} waits for the save of step {self.step}, but was called in the "
                "thread that saves, for example by a callback of staged"
            )

    def _begun(self) -> bool:
        """Return False if the save was cancelled; else rule out cancelling from now on."""
        if self._may_begin is None:
            self._may_begin = self.set_running_or_notify_cancel()
        return self._may_begin

    def result(self, timeout: float | None = None) -> pathlib.Path:
        """Wait for the save, and return the step's folder or raise the save's error.

        Parameters
        ----------
        timeout : float, optional
            How many seconds to wait; by default without limit.

        Returns
        -------
        pathlib.Path
            The step's folder.

        Raises
        ------
        TimeoutError
            The save is still in progress; it goes on.
        concurrent.futures.CancelledError
            The save was cancelled.
        RuntimeError
            A callback of ``staged`` called this without `timeout`: it would wait for
            itself.
        Exception
            What the save raised; see ``Checkpointer.save``.
        """
        if timeout is None:
            self._refuse_own_thread("result()")
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the save, and return its error, or None if it succeeded.

        Parameters
        ----------
        timeout : float, optional
            How many seconds to wait; by default without limit.

        Returns
        -------
        BaseException or None
            What ``result`` would raise.

        Raises
        ------
        TimeoutError
            The save is still in progress; it goes on.
        concurrent.futures.CancelledError
            The save was cancelled.
        RuntimeError
            A callback of ``staged`` called this without `timeout`: it would wait for
            itself.
        """
        if timeout is None:
            self._refuse_own_thread("exception()")
        return super().exception(timeout)

    def __repr__(self) -> str:
        return f"<nvmeio.checkpoint.SaveFuture of step {self.step}{super().__repr__()[11:]}"
