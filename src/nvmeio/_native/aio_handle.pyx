"""aio_handle: DeepSpeed's op, exactly by its contract, on top of a Handle.

This module has DeepSpeed's names, arguments and statuses; handle.pyx does the transfers.
"""

import logging

cimport cython

from nvmeio cimport libnvmeio
from nvmeio.libnvmeio cimport OP_READ, OP_WRITE, nvmeio_op
from nvmeio._native.arguments cimport file_position
from nvmeio._native.handle cimport Handle, new_handle
from nvmeio._native.request cimport Request, wait_or_cancel

from nvmeio._arguments.contract import pread_arguments
from nvmeio._native.locked import free_locked, is_locked, new_locked
from nvmeio._config.options import aio_handle as aio_options
from nvmeio._config.options import handle_options
from nvmeio._native.info import engines
from nvmeio._arguments.checks import MISSING, flag, integer, refuse_missing
from nvmeio._arguments.keywords import hide_unknown, refuse_unknown
from nvmeio._events.notebooks import Figures

_log = logging.getLogger("nvmeio")


cdef class aio_handle:
    """aio_handle(block_size=None, queue_depth=None, single_submit=False,
        overlap_events=False, intra_op_parallelism=None, *, engine=None, direct=None,
        bounce=None, errors="raise")
--

    A replacement for DeepSpeed's ``aio_handle``: the same arguments, methods and statuses.

    Parameters
    ----------
    block_size : int, optional
        The largest I/O in bytes; as for ``Handle``, 1048576 by default.
    queue_depth : int, optional
        Blocks in flight in each worker; as for ``Handle``, 128 by default.
    single_submit : bool, default False
        Submit blocks to the kernel one by one, not in batches.
    overlap_events : bool, default False
        Accepted and reported for DeepSpeed, but without effect: the queue is always
        refilled after every completion.
    intra_op_parallelism : int, optional
        Threads that share every request; as ``workers`` of ``Handle``, 1 by default.
    engine, direct, bounce
        As for ``Handle``.
    errors : {"raise", "status"}, default "raise"
        "raise" raises OSError.  "status" logs the error, keeps it in ``last_error`` and
        returns -1.

    Attributes
    ----------
    handle : Handle
        The underlying handle, for everything that DeepSpeed's op lacks; read-only.
    last_error : OSError or None
        The latest error with ``errors="status"``; read-only.

    Raises
    ------
    TypeError
        An argument is unknown or of the wrong type.
    ValueError
        A value, passed or from the environment, is unknown or out of range.
    OSError
        The requested engine does not work here; the message says why.  Or
        ``NVMEIO_PROFILE`` asks for a profile that does not exist.

    See Also
    --------
    nvmeio.Handle : nvmeio's own handle, for code that does not need DeepSpeed's contract.

    Notes
    -----
    The environment variable ``NVMEIO_CHECK_OVERLAP`` sets ``check_overlap`` of the
    underlying handle.

    ``filename`` is a path, a descriptor or a file object with a descriptor.  Writes create
    the file if it does not exist, and never truncate it.

    Thread-safe.  Pickling and forking work as for ``Handle``.  May be subclassed.

    References
    ----------
    DeepSpeed, ``csrc/aio/py_lib/py_ds_aio.cpp``: names, order and defaults of arguments.

    Examples
    --------
    >>> handle = nvmeio.aio_handle(queue_depth=32)
    >>> handle.sync_pwrite(np.arange(1000), "data.bin")
    1
    >>> array = np.empty(1000, np.int64)
    >>> handle.async_pread(array, "data.bin")
    0
    >>> handle.wait()
    1
    >>> int(array[-1])
    999
    >>> handle.write(array, "data.bin"), handle.read(array, "data.bin")
    (0, 0)
    >>> handle.async_pwrite(array, "data.bin"), handle.wait()
    (0, 1)
    >>> handle.sync_pread(array, "data.bin")
    1
    >>> handle.get_block_size(), handle.get_queue_depth(), handle.get_alignment()
    (1048576, 32, 512)
    >>> handle.get_single_submit(), handle.get_overlap_events()
    (False, False)
    >>> handle.get_intra_op_parallelism(), handle.stats()["requests"]
    (1, 6)
    >>> handle.close()
    """

    cdef object __weakref__
    cdef readonly Handle handle    # None before __init__()
    cdef readonly object last_error
    cdef dict contract      # the options that Handle does not have
    cdef list tracked       # requests of async_* that wait() waits for
    cdef unsigned generation  # fork_generation() of the process that `tracked` belongs to

    def __init__(self, *args, **kwargs):
        if self.handle is not None:
            raise ValueError("the handle is open already; make another")
        passed, contract = aio_options(*args, **kwargs)
        self.open(handle_options(passed, engines), contract)

    cdef int open(self, dict options, dict contract) except -1:
        self.contract = contract
        self.tracked = []
        self.generation = libnvmeio.fork_generation()
        self.handle = new_handle({**options, "single_submit": contract["single_submit"]})
        return 0

    # The contract's getters.

    def get_block_size(self) -> int:
        """Return the largest I/O.

        Returns
        -------
        int
            In bytes, as passed to the constructor.
        """
        self.require_started()
        return self.handle.block_size

    def get_queue_depth(self) -> int:
        """Return how many blocks each worker keeps in flight.

        Returns
        -------
        int
            In blocks, as passed to the constructor.
        """
        self.require_started()
        return self.handle.queue_depth

    def get_single_submit(self) -> bool:
        """Return whether blocks are submitted to the kernel one by one.

        Returns
        -------
        bool
            As passed to the constructor.
        """
        self.require_started()
        return self.contract["single_submit"]

    def get_overlap_events(self) -> bool:
        """Return ``overlap_events``, which has no effect.

        Returns
        -------
        bool
            As passed to the constructor.
        """
        self.require_started()
        return self.contract["overlap_events"]

    def get_intra_op_parallelism(self) -> int:
        """Return how many workers share every request.

        Returns
        -------
        int
            In threads, as passed to the constructor.
        """
        self.require_started()
        return self.handle.workers

    def get_alignment(self) -> int:
        """Return 512 times the number of workers, as DeepSpeed's op does.

        Returns
        -------
        int
            In bytes.  Nothing needs to be aligned to it.  ``File.alignment`` is the actual
            alignment of the device.
        """
        self.require_started()
        return 512 * self.handle.workers

    # Locked tensors.

    def new_cpu_locked_tensor(
        self, num_elem=MISSING, example_tensor=None, *, example_tenosr=None, **unknown
    ):
        """Allocate a tensor in pinned memory of the pool.

        Parameters
        ----------
        num_elem : int
            The number of elements, 0 or more.
        example_tensor : torch.Tensor or numpy.ndarray
            Determines the dtype, and whether to make a tensor or an array.
        example_tenosr : torch.Tensor or numpy.ndarray
            The same, in DeepSpeed's spelling.

        Returns
        -------
        torch.Tensor or numpy.ndarray
            One-dimensional and not initialized.  Page-aligned, populated, in huge pages if
            the system has them.  All of it is locked, or nothing if RLIMIT_MEMLOCK is too
            small; ``nvmeio.pool_stats()["bytes_locked"]`` counts what is locked.

        Raises
        ------
        MemoryError
            Not enough memory, or over the limit that ``NVMEIO_POOL_BYTES`` sets.
        TypeError
            There is no example, or ``num_elem`` is not an integer.
        ValueError
            ``num_elem`` is negative.

        Notes
        -----
        Releases the GIL while the kernel provides the memory.  The memory returns to the
        pool when its last view dies, whether or not ``free_cpu_locked_tensor`` was called.

        Examples
        --------
        >>> handle = nvmeio.aio_handle()
        >>> array = handle.new_cpu_locked_tensor(1000, np.empty(0, np.float32))
        >>> array.shape, handle.is_pinned(array)
        ((1000,), True)
        >>> handle.free_cpu_locked_tensor(array), handle.is_pinned(array)
        (True, False)
        """
        if unknown:
            refuse_unknown(aio_handle.new_cpu_locked_tensor, unknown)
        refuse_missing(num_elem=num_elem)
        example = example_tenosr if example_tensor is None else example_tensor
        return new_locked(num_elem, example)

    def free_cpu_locked_tensor(self, tensor) -> bool:
        """Free a tensor that ``new_cpu_locked_tensor`` of any handle made.

        Parameters
        ----------
        tensor : torch.Tensor or numpy.ndarray
            The tensor, or a view that begins at its first byte.

        Returns
        -------
        bool
            True the first time, then False.  False for views that begin elsewhere, and for
            tensors that ``new_cpu_locked_tensor`` did not make.

        Raises
        ------
        ValueError
            A request in flight uses the memory.

        Notes
        -----
        ``is_pinned`` is False from now on.  The memory returns to the pool when its last
        view dies.
        """
        self.require_started()
        # Requests that are done but not observed still hold their memory.
        self.handle.core.collect()
        return free_locked(tensor)

    def is_pinned(self, buffer) -> bool:
        """Return whether memory is pinned.

        Parameters
        ----------
        buffer : array, tensor or object with the buffer protocol
            The memory; any other object is not pinned.

        Returns
        -------
        bool
            True for memory that torch pinned, and for any part of a tensor from
            ``new_cpu_locked_tensor`` of any handle that was not freed, even if the system
            refused to lock it.
        """
        return is_locked(buffer)

    # Transfers.

    def read(
        self, buffer=MISSING, filename=MISSING, validate=False, file_offset=0, **unknown
    ) -> int:
        """Read a file into ``buffer``, and wait.

        Parameters
        ----------
        buffer : array, tensor or object with the buffer protocol
            The memory to fill; of any dtype, shape and strides.
        filename : str, bytes, os.PathLike, int or File
            The file, which must have at least ``file_offset`` plus the buffer's size bytes.
        validate : bool, default False
            Compare the buffer afterwards with an ordinary read of the file.
        file_offset : int, default 0
            The position in the file, in bytes.

        Returns
        -------
        int
            0; after an error with ``errors="status"``, -1.

        Raises
        ------
        OSError
            The read failed; has errno and path.  ENODATA: the file ends before the buffer
            is full.  EIO: the device failed, or validation found a difference.  With
            ``errors="status"`` it is logged and kept in ``last_error`` instead.
        TypeError, ValueError
            The buffer cannot be read into, an argument is of the wrong type or out of
            range, or the handle or the file is closed.  Raised with either ``errors``.
        KeyboardInterrupt
            Ctrl-C.  The transfer is cancelled, and the exception raised once the device is
            done with the blocks that it has.  A second Ctrl-C is raised within 0.1 s; the
            memory is then still in use, and nvmeio holds it.

        Notes
        -----
        Releases the GIL while it waits.
        """
        if unknown:
            refuse_unknown(aio_handle.read, unknown)
        return self.now(OP_READ, buffer, filename, file_offset, validate, 0)

    def write(
        self, buffer=MISSING, filename=MISSING, validate=False, file_offset=0, **unknown
    ) -> int:
        """Write ``buffer`` to a file, and wait.

        Parameters
        ----------
        buffer : array, tensor or object with the buffer protocol
            The bytes to write, in C order.
        filename : str, bytes, os.PathLike, int or File
            The file; created if it does not exist, never truncated.
        validate : bool, default False
            Compare the buffer afterwards with an ordinary read of the file, which needs
            permission to read it.
        file_offset : int, default 0
            The position in the file, in bytes.

        Returns
        -------
        int
            0; after an error with ``errors="status"``, -1.

        Raises
        ------
        OSError, TypeError, ValueError, KeyboardInterrupt
            As ``read``; ENOSPC or EFBIG if the file cannot become that long.

        Notes
        -----
        Releases the GIL while it waits.  The bytes are durable after ``handle.fsync``.
        """
        if unknown:
            refuse_unknown(aio_handle.write, unknown)
        return self.now(OP_WRITE, buffer, filename, file_offset, validate, 0)

    def sync_pread(
        self, buffer=MISSING, filename=MISSING, file_offset=0, **unknown
    ) -> int:
        """Read as ``read`` does, but return 1 for success.

        Parameters
        ----------
        buffer, filename, file_offset
            As for ``read``.

        Returns
        -------
        int
            1; after an error with ``errors="status"``, -1.

        Raises
        ------
        OSError, TypeError, ValueError, KeyboardInterrupt
            As ``read``.
        """
        if unknown:
            refuse_unknown(aio_handle.sync_pread, unknown)
        return self.now(OP_READ, buffer, filename, file_offset, False, 1)

    def sync_pwrite(
        self, buffer=MISSING, filename=MISSING, file_offset=0, **unknown
    ) -> int:
        """Write as ``write`` does, but return 1 for success.

        Parameters
        ----------
        buffer, filename, file_offset
            As for ``write``.

        Returns
        -------
        int
            1; after an error with ``errors="status"``, -1.

        Raises
        ------
        OSError, TypeError, ValueError, KeyboardInterrupt
            As ``write``.
        """
        if unknown:
            refuse_unknown(aio_handle.sync_pwrite, unknown)
        return self.now(OP_WRITE, buffer, filename, file_offset, False, 1)

    def async_pread(
        self, buffer=MISSING, filename=MISSING, file_offset=0, **unknown
    ) -> int:
        """Start a read that ``wait()`` waits for.

        Parameters
        ----------
        buffer : array, tensor or object with the buffer protocol
            The memory to fill.  It is full when ``wait()`` returns, and held until then.
        filename, file_offset
            As for ``read``.

        Returns
        -------
        int
            0; if the file cannot be opened, with ``errors="status"``, -1.

        Raises
        ------
        OSError
            The file cannot be opened.  ``wait()`` or ``close()`` raises later errors.
        TypeError, ValueError
            As ``read``.

        Notes
        -----
        Requests are not ordered: a read may see the bytes from before a write in flight.
        ``wait()`` for the write first.
        """
        if unknown:
            refuse_unknown(aio_handle.async_pread, unknown)
        return self.later(OP_READ, buffer, filename, file_offset, False)

    def async_pwrite(
        self, buffer=MISSING, filename=None, file_offset=0, *, fd=None, **unknown
    ) -> int:
        """Start a write that ``wait()`` waits for.

        Parameters
        ----------
        buffer : array, tensor or object with the buffer protocol
            The bytes to write, in C order.  Do not change them before ``wait()`` returns.
        filename, file_offset
            As for ``write``.
        fd : int, optional
            An open descriptor, in place of ``filename``.

        Returns
        -------
        int
            0; if the file cannot be opened, with ``errors="status"``, -1.

        Raises
        ------
        OSError
            The file cannot be opened.  ``wait()`` or ``close()`` raises later errors.
        TypeError, ValueError
            As ``write``; also for both or neither of ``filename`` and ``fd``.

        Notes
        -----
        Requests are not ordered: of two writes in flight to the same place, either may be
        the last.  Only ``handle.fsync`` waits for the writes before it.
        """
        if unknown:
            refuse_unknown(aio_handle.async_pwrite, unknown)
        if (filename is None) == (fd is None):
            raise TypeError("async_pwrite() takes either filename or fd")
        file = filename if fd is None else integer("fd", fd)
        return self.later(OP_WRITE, buffer, file, file_offset, False)

    def pread(self, *args, **kwargs) -> int:
        """Read now or later: ``pread(buffer, filename, validate, async, file_offset=0)``.

        Parameters
        ----------
        buffer, filename, validate, file_offset
            As for ``read``.
        async : bool
            Only start the read, as ``async_pread`` does.  The name is a Python keyword, so
            pass it by position, or as ``**{"async": True}``.

        Returns
        -------
        int
            1 if the read is done; 0 if it was only started.  After an error with
            ``errors="status"``, -1.

        Raises
        ------
        OSError, TypeError, ValueError, KeyboardInterrupt
            As ``read`` or ``async_pread``.

        Examples
        --------
        >>> array, other = np.arange(1000), np.zeros(1000, np.int64)
        >>> handle = nvmeio.aio_handle()
        >>> handle.pwrite(array, "data.bin", False, False)
        1
        >>> handle.pread(other, "data.bin", False, True), handle.wait()
        (0, 1)
        >>> int(other[-1])
        999
        """
        return self._either(OP_READ, "pread", args, kwargs)

    def pwrite(self, *args, **kwargs) -> int:
        """Write now or later: ``pwrite(buffer, filename, validate, async, file_offset=0)``.

        Parameters
        ----------
        buffer, filename, validate, file_offset
            As for ``write``.
        async : bool
            Only start the write, as ``async_pwrite`` does; see ``pread``.

        Returns
        -------
        int
            As ``pread``.

        Raises
        ------
        OSError, TypeError, ValueError, KeyboardInterrupt
            As ``write`` or ``async_pwrite``.
        """
        return self._either(OP_WRITE, "pwrite", args, kwargs)

    def wait(self) -> int:
        """Wait for all asynchronous operations, of ``async_*``, ``pread`` and ``pwrite``.

        Returns
        -------
        int
            The number of operations that completed since the last ``wait()``; 0 if none was
            pending.  If one failed, with ``errors="status"``, -1.

        Raises
        ------
        OSError
            The first failure, in order of submission; raised once all operations are done.
        ValueError
            The handle was never opened.
        KeyboardInterrupt
            Ctrl-C, within 0.1 s.  The next ``wait()`` waits for the same operations.

        Notes
        -----
        Releases the GIL.  Also waits for requests that were submitted to ``handle``; it
        does not count them, and their errors are raised by each request's ``wait``.
        """
        self.require_started()
        tracked = self.take_tracked()
        try:
            # The last one first: most others are done by then, and need no wake-up.
            for request in reversed(tracked):
                (<Request> request).poll_for(None)
            self.handle.drain()
        except BaseException:
            # Interrupted: the next wait() must wait for them.
            with cython.critical_section(self):
                self.tracked = tracked + self.tracked
            raise
        return self.ended(tracked)

    def close(self) -> None:
        """Refuse new requests, wait for those in flight, and stop the workers.

        Raises
        ------
        OSError
            The first failure of an asynchronous operation that nobody waited for; raised
            once the handle is closed.  With ``errors="status"`` it is logged and kept in
            ``last_error`` instead.
        ValueError
            The handle was never opened.
        KeyboardInterrupt
            Ctrl-C while waiting.  The handle is closed; call again to go on waiting.

        Notes
        -----
        Releases the GIL while it waits.  A second call does nothing.

        A ``with`` block closes the handle however the block ends, as for ``Handle``.  If an
        exception leaves the block, failures of operations become warnings, so that the
        exception is not hidden.
        """
        self.require_started()
        self.handle.close()
        self.ended(self.take_tracked())

    @property
    def closed(self) -> bool:
        """Whether ``close()`` was called."""
        return self.handle is None or self.handle.closed

    def stats(self) -> Figures:
        """Return the handle's counters; see ``Handle.stats``."""
        self.require_started()
        return self.handle.stats()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.require_started()
        self.handle.__exit__(*exc_info)
        # Do not hide the exception that leaves the block: warn of failures instead.
        if exc_info[0] is None:
            self.close()

    def __getattr__(self, name):
        hint = "; its handle has it" if hasattr(Handle, name) else ""
        raise AttributeError(f"an aio_handle has no attribute {name!r}{hint}")

    def __reduce__(self):
        self.require_started()
        # Include the attributes of a subclass.
        state = getattr(self, "__dict__", None)
        arguments = (type(self), self.handle.options, self.contract, self.closed)
        return _restore, arguments, state or None

    def __repr__(self):
        self.require_started()
        return (
            f"<nvmeio.aio_handle engine={self.handle.engine} "
            f"block_size={self.handle.block_size} queue_depth={self.handle.queue_depth} "
            f"intra_op_parallelism={self.handle.workers} "
            + ("closed>" if self.closed else f"pending={self.handle.pending}>")
        )

    # Shared by the methods above.

    cdef int require_started(self) except -1:
        """Raise if there is no handle; in a forked child, forget the parent's requests."""
        if self.handle is None:
            raise ValueError("the handle was never opened; call its __init__() first")
        if self.generation != libnvmeio.fork_generation():
            self.generation = libnvmeio.fork_generation()
            self.tracked = []
        return 0

    cdef object now(
        self, nvmeio_op op, object buffer, object file, object offset, object validate,
        int done
    ):
        cdef bint c_validate = flag("validate", validate)
        if buffer is MISSING or file is MISSING:
            refuse_missing(buffer=buffer, filename=file)
        offset = file_position("file_offset", offset)
        self.require_started()
        try:
            wait_or_cancel(
                self.handle.begin(op, buffer, file, offset, c_validate, True, None)
            )
        except OSError as error:
            return self.failed(error)
        return done

    cdef object later(
        self, nvmeio_op op, object buffer, object file, object offset, object validate
    ):
        cdef bint c_validate = flag("validate", validate)
        if buffer is MISSING or file is MISSING:
            refuse_missing(buffer=buffer, filename=file)
        offset = file_position("file_offset", offset)
        self.require_started()
        try:
            request = self.handle.begin(op, buffer, file, offset, c_validate, False, None)
        except OSError as error:
            return self.failed(error)
        with cython.critical_section(self):
            self.tracked.append(request)
        return 0

    def _either(self, op, name, args, kwargs):
        buffer, filename, validate, later, offset = pread_arguments(name, args, kwargs)
        if flag("async", later):
            return self.later(op, buffer, filename, offset, validate)
        return self.now(op, buffer, filename, offset, validate, 1)

    cdef list take_tracked(self):
        with cython.critical_section(self):
            tracked = self.tracked
            self.tracked = []
        return tracked

    cdef object ended(self, list requests):
        """Return the status of requests that are done; raise the first failure."""
        cdef Request request
        first = None
        for request in requests:
            request.error_seen = True
            if request.error is None:
                continue
            if first is None:
                first = request.error
            else:
                _log.error("another operation failed too: %s", request.error)
        return len(requests) if first is None else self.failed(first)

    cdef object failed(self, object error):
        """Log and keep an error and return -1, or raise it, as ``errors`` says."""
        if self.contract["errors"] != "status" or not isinstance(error, OSError):
            raise error
        self.last_error = error
        _log.error("%s", error)
        return -1


hide_unknown(aio_handle)


def _restore(kind, options, contract, closed):
    """Make a handle from its pickled state; a subclass's __init__() is not called."""
    cdef aio_handle handle = kind.__new__(kind)
    handle.open(options, contract)
    if closed:
        handle.close()
    return handle
