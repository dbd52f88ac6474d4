"""``SaveFuture``: a save in progress."""

import pathlib
import threading
from concurrent.futures import Future

__all__ = ["SaveFuture"]


class SaveFuture(Future[pathlib.Path]):
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
        self._over = threading.Event()
        self._retrieved = False
        self._failure: BaseException | None = None
        self._may_begin: bool | None = None

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
        Exception
            What the save raised; see ``Checkpointer.save``.
        """
        try:
            return super().result(timeout)
        except BaseException as error:
            self._retrieved = self._retrieved or error is self._failure
            raise

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
        """
        found = super().exception(timeout)
        self._retrieved = self._retrieved or found is not None
        return found

    def set_exception(self, exception: BaseException | None) -> None:
        """Fail the save; only the Checkpointer calls this."""
        self._failure = exception
        super().set_exception(exception)

    def __repr__(self) -> str:
        return f"<nvmeio.checkpoint.SaveFuture of step {self.step}{super().__repr__()[11:]}"
