"""The handle that the whole process shares."""

import threading

from nvmeio._events.forks import call_in_child
from nvmeio._native.file import use_handle
from nvmeio._native.handle import Handle

__all__ = ["default_handle"]


class _Shared:
    """The shared handle, made on first use."""

    def __init__(self) -> None:
        self.handle: Handle | None = None
        self.forget_threads()

    def forget_threads(self) -> None:
        """Replace the lock in a forked child: a thread of the parent may have held it."""
        self._lock = threading.RLock()

    def get(self) -> Handle:
        with self._lock:
            if self.handle is not None and not self.handle.closed:
                return self.handle
            made = Handle()
            # A signal handler may have made a handle meanwhile.
            if self.handle is None or self.handle.closed:
                self.handle = made
            return self.handle


_shared = _Shared()
call_in_child(_shared.forget_threads)


def default_handle() -> Handle:
    """Return the handle that the whole process shares.

    Returns
    -------
    Handle
        Made on the first call, with the options of the environment and its profile at that
        time.  Every call returns the same handle until it is closed, then a new one.

    Raises
    ------
    OSError, ValueError
        As for ``Handle()``.

    Notes
    -----
    ``load``, ``save``, ``read_file``, ``read_into``, ``write_file``, every ``ArrayFile``
    without a handle of its own, and the datasets of ``nvmeio.torch`` use it.  It is drained
    at interpreter exit.

    Examples
    --------
    >>> handle = nvmeio.default_handle()
    >>> handle.write(np.arange(1000), "data.bin")
    8000
    >>> nvmeio.default_handle() is handle
    True
    """
    handle = _shared.handle
    return _shared.get() if handle is None or handle.closed else handle


use_handle(default_handle)
