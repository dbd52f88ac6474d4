"""The handle that the whole process shares."""

import threading

from nvmeio._events.forks import call_in_child
from nvmeio._native.file import use_handle
from nvmeio._native.handle import Handle

__all__ = ["default_handle"]


class _Shared:
    """The handle, once it was asked for."""

    def __init__(self) -> None:
        self.handle: Handle | None = None
        self.forget_threads()

    def forget_threads(self) -> None:
        """In a forked child: a thread of the parent may have held the lock."""
        self._lock = threading.RLock()

    def get(self) -> Handle:
        with self._lock:
            if self.handle is not None and not self.handle.closed:
                return self.handle
            made = Handle()
            # A handler of a signal may have been here meanwhile.
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
        Made when it is first asked for, with what the environment and its profile say at
        that moment; always the same one until somebody closes it, then another.

    Raises
    ------
    OSError, ValueError
        As for ``Handle()``.

    Notes
    -----
    ``load``, ``save``, ``read_file``, ``read_into``, ``write_file``, every ``ArrayFile``
    that is given no handle and the datasets of ``nvmeio.torch`` use it.  It is drained when
    the interpreter ends.

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
