"""The op by the letter of its contract: an OSError is logged, kept, and answered by -1."""

import logging
import threading
from collections.abc import Callable
from typing import Any, Literal

from nvmeio import files, handle
from nvmeio._types import Path
from nvmeio.arguments import integer

__all__ = ["aio_handle", "aio_read", "aio_write", "last_error"]

_log = logging.getLogger("nvmeio")
_thread = threading.local()


class aio_handle(handle.aio_handle):
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
    it is "status" here.  Errors of the program still raise, and so do ``submit_*`` and
    ``fsync``, which are not DeepSpeed's.

    The defaults are DeepSpeed's whatever ``NVMEIO_BLOCK_SIZE``, ``NVMEIO_QUEUE_DEPTH`` and
    ``NVMEIO_PROFILE`` say.  The engine and bounces, of which DeepSpeed knows nothing, come
    from ``NVMEIO_ENGINE`` and the profile where they are not passed.

    References
    ----------
    DeepSpeed, ``csrc/aio/py_lib/py_ds_aio.cpp``: the names, their order and defaults.
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
        direct: bool | Literal["auto"] = "auto",
        bounce: Literal["auto", "always", "never"] | None = None,
    ) -> None:
        _require_numbers(block_size, queue_depth)
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


def aio_read(
    buffer: Any,
    filename: Path,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """Read a whole file into a buffer of exactly its size.

    Parameters
    ----------
    buffer : array, tensor or object with the buffer protocol
        Is filled.
    filename : str, bytes or os.PathLike
        The file.
    block_size, queue_depth, single_submit, overlap_events
        As for ``aio_handle``.
    validate : bool
        Compare with an ordinary read afterwards.

    Returns
    -------
    int
        0, or -1: the error is logged, and ``last_error()`` returns it.

    Raises
    ------
    TypeError, ValueError
        The buffer cannot be read into, or an argument is of the wrong type or out of range.
    KeyboardInterrupt
        Ctrl-C while waiting.

    Notes
    -----
    Releases the GIL while it waits.
    """
    _require_numbers(block_size, queue_depth)
    options = (block_size, queue_depth, single_submit, overlap_events)
    return _status(files.aio_read, buffer, filename, *options, validate)


def aio_write(
    buffer: Any,
    filename: Path,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """Make a file of exactly the bytes of a buffer.

    Parameters
    ----------
    buffer, filename, block_size, queue_depth, single_submit, overlap_events, validate
        As for ``aio_read``.  A longer file is cut after the bytes have landed.

    Returns
    -------
    int
        0, or -1: the error is logged, and ``last_error()`` returns it.

    Raises
    ------
    TypeError, ValueError
        The buffer cannot be written, or an argument is of the wrong type or out of range.
    KeyboardInterrupt
        Ctrl-C while waiting.

    Notes
    -----
    Releases the GIL while it waits.
    """
    _require_numbers(block_size, queue_depth)
    options = (block_size, queue_depth, single_submit, overlap_events)
    return _status(files.aio_write, buffer, filename, *options, validate)


def last_error() -> OSError | None:
    """Return what the latest -1 of ``aio_read`` or ``aio_write`` in this thread stands for.

    Returns
    -------
    OSError or None
        With errno and path; None where there was none.  A handle has a ``last_error`` of
        its own.
    """
    return getattr(_thread, "error", None)


def _require_numbers(block_size: int, queue_depth: int) -> None:
    """Refuse None, which elsewhere stands for what the environment says."""
    integer("block_size", block_size)
    integer("queue_depth", queue_depth)


def _status(transfer: Callable[..., int], *arguments: Any) -> int:
    """Return the status of a transfer."""
    try:
        return transfer(*arguments)
    except OSError as error:
        # The frames of a traceback would keep the buffer alive.
        _thread.error = error.with_traceback(None)
        _log.error("%s", error)
        return -1
