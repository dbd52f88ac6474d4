"""DeepSpeed's op exactly by its contract: an OSError is logged, kept, and -1 returned."""

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Literal, ParamSpec

from nvmeio._arguments.checks import integer
from nvmeio._events.log import log
from nvmeio.deepspeed import _op

__all__ = ["aio_handle", "aio_read", "aio_write", "last_error"]

_thread = threading.local()

P = ParamSpec("P")


class aio_handle(_op.aio_handle):
    """``nvmeio.aio_handle``, but with -1 for errors, as in DeepSpeed's op.

    Parameters
    ----------
    block_size : int, default 1048576
        The largest I/O in bytes, 1 to 1 GiB.
    queue_depth : int, default 128
        Blocks in flight in each worker, 1 to 32768.
    single_submit : bool, default False
        Submit blocks to the kernel one by one, not in batches.
    overlap_events : bool, default False
        Accepted and reported for DeepSpeed, but without effect.
    intra_op_parallelism : int, default 1
        Workers, each with an engine of its own, that share every request; 1 to 256.
    engine, direct, bounce
        As for ``nvmeio.aio_handle``.

    Attributes
    ----------
    handle : Handle
        The underlying handle, which raises errors; read-only.
    last_error : OSError or None
        The error of the latest -1; read-only.

    Raises
    ------
    TypeError
        An argument is unknown or of the wrong type.
    ValueError
        A value is unknown or out of range, or ``NVMEIO_PROFILE`` or its profile is invalid.
    OSError
        The requested engine does not work here; the message says why.  Or
        ``NVMEIO_PROFILE`` asks for a profile that does not exist.

    Notes
    -----
    The transfers, from ``read`` to ``wait``, return -1 if the system reports an error.  The
    error is logged to ``nvmeio`` and kept in ``last_error``.  In the documentation of the
    methods, ``errors`` is "status".  Programming errors still raise, and so does everything
    that is done through ``handle``, which DeepSpeed's op does not have.

    The defaults are DeepSpeed's, independently of ``NVMEIO_BLOCK_SIZE``,
    ``NVMEIO_QUEUE_DEPTH`` and ``NVMEIO_PROFILE``.  Options that DeepSpeed does not have,
    such as ``engine``, come from the environment and the profile unless they are passed.

    References
    ----------
    DeepSpeed, ``csrc/aio/py_lib/py_ds_aio.cpp``: names, order and defaults of arguments.

    Examples
    --------
    >>> handle = nvmeio.deepspeed.aio_handle()
    >>> handle.sync_pread(np.empty(1000, np.uint8), "missing.bin")
    -1
    >>> handle.last_error.filename
    'missing.bin'
    """

    def __init__(
        self,
        block_size: int = 1048576,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
        *,
        engine: Literal["auto", "io_uring", "libaio", "threads", "sync"] | None = None,
        direct: bool | Literal["auto"] | None = None,
        bounce: Literal["auto", "always", "never"] | None = None,
    ) -> None:
        # Refuse None, which means the environment's value in other handles.
        integer("block_size", block_size)
        integer("queue_depth", queue_depth)
        super().__init__(
            block_size,
            queue_depth,
            single_submit,
            overlap_events,
            intra_op_parallelism,
            engine=engine,
            direct=direct,
            bounce=bounce,
            errors="status",
        )


def last_error() -> OSError | None:
    """Return the error of the latest -1 from ``aio_read`` or ``aio_write`` in this thread.

    Returns
    -------
    OSError or None
        Has errno and path; None if there was no error.  A handle has a ``last_error`` of
        its own.

    Examples
    --------
    >>> options = 1 << 20, 32, False, False, False
    >>> nvmeio.deepspeed.aio_write(np.arange(1000), "missing/data.bin", *options)
    -1
    >>> nvmeio.deepspeed.last_error().filename
    'missing/data.bin'
    """
    return getattr(_thread, "error", None)


def _with_status(transfer: Callable[P, int]) -> Callable[P, int]:
    """Decorate a transfer to return -1 for an OSError, as DeepSpeed's does."""

    @functools.wraps(transfer)
    def called(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            return transfer(*args, **kwargs)
        except OSError as error:
            if error.errno is None:
                # A signal handler raised it.
                raise
            # The frames of a traceback would keep the buffer alive.
            _thread.error = error.with_traceback(None)
            log.error("%s", error)
            return -1

    words, _, _ = inspect.cleandoc(transfer.__doc__ or "").partition("Returns\n")
    called.__doc__ = words + _STATUS
    called.__module__ = __name__
    return called


# The part of both docstrings after the parameters.
_STATUS = """\
Returns
-------
int
    0; after an error -1, and the error is logged and returned by ``last_error()``.

Raises
------
TypeError, ValueError
    The buffer cannot be transferred, or an argument is of the wrong type or out of
    range.
KeyboardInterrupt
    Ctrl-C while waiting.

Notes
-----
Releases the GIL while it waits.

Examples
--------
>>> options = 1 << 20, 32, False, False, False
>>> nvmeio.deepspeed.aio_write(np.arange(1000), "data.bin", *options)
0
>>> array = np.empty(1000, np.int64)
>>> nvmeio.deepspeed.aio_read(array, "data.bin", *options)
0
>>> nvmeio.deepspeed.aio_read(array, "missing.bin", *options)
-1
"""

aio_read = _with_status(_op.aio_read)
aio_write = _with_status(_op.aio_write)
