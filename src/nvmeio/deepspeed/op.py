"""The op by the letter of its contract: an OSError is logged, kept, and answered by -1."""

import functools
import inspect
import logging
import threading
from collections.abc import Callable
from typing import Literal, ParamSpec

from nvmeio import files
from nvmeio._arguments.checks import integer
from nvmeio._arguments.keywords import suggesting
from nvmeio._native import aio_handle as op

__all__ = ["aio_handle", "aio_read", "aio_write", "last_error"]

_log = logging.getLogger("nvmeio")
_thread = threading.local()

P = ParamSpec("P")


class aio_handle(op.aio_handle):
    """``nvmeio.aio_handle`` that answers errors as DeepSpeed's does.

    Parameters
    ----------
    block_size : int, default 1048576
        The largest I/O in bytes, 1 to 1 GiB.
    queue_depth : int, default 128
        Blocks in flight in each worker, 1 to 32768.
    single_submit : bool, default False
        Hand blocks to the kernel one by one, not in batches.
    overlap_events : bool, default False
        Accepted and reported, because the contract has it; it changes nothing.
    intra_op_parallelism : int, default 1
        Workers, threads with an engine each, that share every request; 1 to 256.
    engine, direct, bounce
        As for ``nvmeio.aio_handle``.

    Attributes
    ----------
    last_error : OSError or None
        What the latest -1 stands for; read-only.

    Raises
    ------
    TypeError
        An argument is unknown or of the wrong type.
    ValueError
        A value is out of its limits or unknown, or ``NVMEIO_PROFILE`` or its profile is.
    OSError
        The engine that was asked for does not work here; says why.  Or there is no profile
        where ``NVMEIO_PROFILE`` says.

    Notes
    -----
    The transfers from ``read`` to ``wait`` return -1 for what the system refuses: they log
    it to ``nvmeio`` and keep it in ``last_error``.  Where the methods speak of ``errors``,
    it is "status" here.  Errors of the program still raise, and so does whatever is done
    by ``handle``, which DeepSpeed's op has not.

    The defaults are DeepSpeed's whatever ``NVMEIO_BLOCK_SIZE``, ``NVMEIO_QUEUE_DEPTH`` and
    ``NVMEIO_PROFILE`` say.  What DeepSpeed knows nothing of, as the engine, comes from the
    environment and the profile where it is not passed.

    References
    ----------
    DeepSpeed, ``csrc/aio/py_lib/py_ds_aio.cpp``: the names, their order and defaults.

    Examples
    --------
    >>> handle = nvmeio.deepspeed.aio_handle()
    >>> handle.sync_pread(np.empty(1000, np.uint8), "missing.bin")
    -1
    >>> handle.last_error.filename
    'missing.bin'
    """

    @suggesting
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
        # None stands elsewhere for what the environment says.
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
    """Return what the latest -1 of ``aio_read`` or ``aio_write`` in this thread stands for.

    Returns
    -------
    OSError or None
        With errno and path; None where there was none.  A handle has a ``last_error`` of
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
    """Have a transfer return -1 for what the system refuses, as DeepSpeed's does."""

    @functools.wraps(transfer)
    def called(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            return transfer(*args, **kwargs)
        except OSError as error:
            # The frames of a traceback would keep the buffer alive.
            _thread.error = error.with_traceback(None)
            _log.error("%s", error)
            return -1

    words, _, _ = inspect.cleandoc(transfer.__doc__ or "").partition("Returns\n")
    called.__doc__ = words + _STATUS
    called.__module__ = __name__
    return called


# What follows the parameters of both.
_STATUS = """\
Returns
-------
int
    0, or -1: the error is logged, and ``last_error()`` returns it.

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

aio_read = _with_status(files.aio_read)
aio_write = _with_status(files.aio_write)
