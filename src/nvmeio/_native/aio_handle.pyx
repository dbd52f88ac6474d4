"""aio_handle: DeepSpeed's op, by the letter of its contract, on top of a Handle.

Names, arguments and statuses are here; what is transferred how is handle.pyx's.
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

_log = logging.getLogger("nvmeio")


cdef class aio_handle:
    """aio_handle(block_size=None, queue_depth=None, single_submit=False,
        overlap_events=False, intra_op_parallelism=None, *, engine=None, direct=None,
        bounce=None, errors="raise")
--

    DeepSpeed's op of the same name: its arguments, its methods and its statuses.

    Parameters
    ----------
    block_size : int, optional
        The largest I/O in bytes; as for ``Handle``, 1048576 by default.
    queue_depth : int, optional
        Blocks in flight in each worker; as for ``Handle``, 128 by default.
    single_submit : bool, default False
        Hand blocks to the kernel one by one, not in batches.
    overlap_events : bool, default False
        Accepted and reported, because DeepSpeed has it; it changes nothing.  The queue is
        refilled after every completion.
    intra_op_parallelism : int, optional
        Threads that share every request; ``workers`` of ``Handle``, 1 by default.
    engine, direct, bounce
        As for ``Handle``.
    errors : {"raise", "status"}, default "raise"
        Raise OSError, or log it, keep it in ``last_error`` and return -1.

    Attributes
    ----------
    handle : Handle
        The handle under it, for all that DeepSpeed's op has not; read-only.
    last_error : OSError or None
        With ``errors="status"``, the latest; read-only.

    Raises
    ------
    TypeError
        An argument is unknown or of the wrong type.
    ValueError
        A value is out of its limits or unknown, the environment's included.
    OSError
        The engine that was asked for does not work here; says why.  Or there is no profile
        where ``NVMEIO_PROFILE`` says.

    See Also
    --------
    nvmeio.Handle : nvmeio's own, for what need not be DeepSpeed's.

    Notes
    -----
    ``check_overlap`` is as ``NVMEIO_CHECK_OVERLAP`` says.

    ``filename`` is a path, a descriptor or a file object with one.  Writes create the file
    where it does not exist and never truncate it.

    Thread-safe, pickled and used after a fork as its ``Handle``; may be subclassed.

    References
    ----------
    DeepSpeed, ``csrc/aio/py_lib/py_ds_aio.cpp``: the names, their order and defaults.

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
    """

    cdef object __weakref__
    cdef readonly Handle handle    # None before __init__()
    cdef readonly object last_error
    cdef dict contract      # the options that a Handle has not
    cdef list tracked       # requests of async_* that wait() waits for
    cdef unsigned generation  # of the process that `tracked` belongs to

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
        """Return the largest size of an I/O.

        Returns
        -------
        int
            In bytes, as it was passed.
        """
        self.require_started()
        return self.handle.block_size

    def get_queue_depth(self) -> int:
        """Return how many blocks each worker keeps in flight.

        Returns
        -------
        int
            In blocks, as it was passed.
        """
        self.require_started()
        return self.handle.queue_depth

    def get_single_submit(self) -> bool:
        """Return whether blocks are handed to the kernel one by one.

        Returns
        -------
        bool
            As it was passed.
        """
        self.require_started()
        return self.contract["single_submit"]

    def get_overlap_events(self) -> bool:
        """Return whether the queue is refilled after every completion.

        Returns
        -------
        bool
            As it was passed.
        """
        self.require_started()
        return self.contract["overlap_events"]

    def get_intra_op_parallelism(self) -> int:
        """Return how many workers share every request.

        Returns
        -------
        int
            In threads, as it was passed.
        """
        self.require_started()
        return self.handle.workers

    def get_alignment(self) -> int:
        """Return 512 times the number of workers, as DeepSpeed's op does.

        Returns
        -------
        int
            In bytes.  Nothing has to be aligned to it; ``File.alignment`` is the device's
            true value.
        """
        self.require_started()
        return 512 * self.handle.workers

    # Locked tensors.

    def new_cpu_locked_tensor(
        self, num_elem=MISSING, example_tensor=None, *, example_tenosr=None, **unknown
    ):
        """Make a tensor in pinned memory of the pool.

        Parameters
        ----------
        num_elem : int
            How many elements, 0 or more.
        example_tensor : torch.Tensor or numpy.ndarray
            Gives the dtype, and whether a tensor or an array is made.
        example_tenosr : torch.Tensor or numpy.ndarray
            DeepSpeed's spelling of it.

        Returns
        -------
        torch.Tensor or numpy.ndarray
            One-dimensional, not initialized; page-aligned, populated, in huge pages where
            the system has them, and locked where RLIMIT_MEMLOCK allows it.

        Raises
        ------
        MemoryError
            The system has not so much.
        TypeError
            There is no example, or ``num_elem`` is not an integer.
        ValueError
            ``num_elem`` is negative.

        Notes
        -----
        Releases the GIL while the kernel provides the memory.  It goes back to the pool
        when the last view of it has died, freed by ``free_cpu_locked_tensor`` or not.
        """
        if unknown:
            refuse_unknown(aio_handle.new_cpu_locked_tensor, unknown)
        refuse_missing(num_elem=num_elem)
        example = example_tenosr if example_tensor is None else example_tensor
        return new_locked(num_elem, example)

    def free_cpu_locked_tensor(self, tensor) -> bool:
        """Free what ``new_cpu_locked_tensor`` made, of any handle.

        Parameters
        ----------
        tensor : torch.Tensor or numpy.ndarray
            The tensor or a view that begins where it begins.

        Returns
        -------
        bool
            True the first time, then False; False for a view that begins elsewhere and
            for whatever is not ours.

        Raises
        ------
        ValueError
            A request in flight uses the memory.

        Notes
        -----
        ``is_pinned`` is False from now on; the memory goes back to the pool when the last
        view has died.
        """
        self.require_started()
        # Requests that are done, and that nobody has looked at, still hold their memory.
        self.handle.core.collect()
        return free_locked(tensor)

    def is_pinned(self, buffer) -> bool:
        """Tell whether memory is pinned.

        Parameters
        ----------
        buffer : array, tensor or object with the buffer protocol
            Memory, or anything else.

        Returns
        -------
        bool
            True for what torch has pinned, and for any part of what
            ``new_cpu_locked_tensor`` of any handle made and nobody freed; else False.
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
            Is filled; of any dtype, shape and strides.
        filename : str, bytes, os.PathLike, int or File
            The file, which must hold ``file_offset`` plus the buffer's size bytes.
        validate : bool, default False
            Compare with an ordinary read of the file afterwards.
        file_offset : int, default 0
            Where in the file to begin, in bytes.

        Returns
        -------
        int
            0, or -1 with ``errors="status"``.

        Raises
        ------
        OSError
            With errno and path: ENODATA past the end of the file, EIO where validation
            finds a difference, and what the system says.  With ``errors="status"`` it is
            logged and kept in ``last_error``.
        TypeError, ValueError
            The buffer cannot be read into, an argument is of the wrong type or out of
            range, or the handle or the file is closed; whatever ``errors`` says.
        KeyboardInterrupt
            Ctrl-C, which cancels the transfer, once the device has answered to what it has
            been given.  A second one within 0.1 s: then the memory is still in use, and
            stays held.

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
            Written in C order.
        filename : str, bytes, os.PathLike, int or File
            The file; created where it does not exist, never truncated.
        validate : bool, default False
            Compare with an ordinary read of the file afterwards.  The file is opened once
            more for that, so it takes the permission to read it.
        file_offset : int, default 0
            Where in the file to begin, in bytes.

        Returns
        -------
        int
            0, or -1 with ``errors="status"``.

        Raises
        ------
        OSError, TypeError, ValueError, KeyboardInterrupt
            As ``read``; ENOSPC or EFBIG where the file cannot become so long.

        Notes
        -----
        Releases the GIL while it waits.  The bytes are durable when ``handle.fsync``
        has returned.
        """
        if unknown:
            refuse_unknown(aio_handle.write, unknown)
        return self.now(OP_WRITE, buffer, filename, file_offset, validate, 0)

    def sync_pread(
        self, buffer=MISSING, filename=MISSING, file_offset=0, **unknown
    ) -> int:
        """Read as ``read`` does, with another status.

        Parameters
        ----------
        buffer, filename, file_offset
            As for ``read``.

        Returns
        -------
        int
            1, or -1 with ``errors="status"``.

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
        """Write as ``write`` does, with another status.

        Parameters
        ----------
        buffer, filename, file_offset
            As for ``write``.

        Returns
        -------
        int
            1, or -1 with ``errors="status"``.

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
            Is filled by the time ``wait()`` returns; held until then.
        filename, file_offset
            As for ``read``.

        Returns
        -------
        int
            0, or -1 with ``errors="status"`` where the file cannot be opened.

        Raises
        ------
        OSError
            The file cannot be opened.  What fails later is raised by ``wait()``, or by
            ``close()``.
        TypeError, ValueError
            As ``read``.

        Notes
        -----
        Not ordered after other requests: a read of what a write in flight is about to
        change may see the old bytes.  ``wait()`` for the write first.
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
            Written in C order; must not change until ``wait()`` has returned.
        filename, file_offset
            As for ``write``.
        fd : int, optional
            An open descriptor, in place of ``filename``.

        Returns
        -------
        int
            0, or -1 with ``errors="status"`` where the file cannot be opened.

        Raises
        ------
        OSError
            The file cannot be opened.  What fails later is raised by ``wait()``, or by
            ``close()``.
        TypeError, ValueError
            As ``write``, and for both or neither of ``filename`` and ``fd``.

        Notes
        -----
        Not ordered after other requests: of two writes in flight to the same place either
        may be the last.  ``handle.fsync`` alone waits for the writes before it.
        """
        if unknown:
            refuse_unknown(aio_handle.async_pwrite, unknown)
        if (filename is None) == (fd is None):
            raise TypeError("async_pwrite() takes either filename or fd")
        file = filename if fd is None else integer("fd", fd)
        return self.later(OP_WRITE, buffer, file, file_offset, False)

    def pread(self, *args, **kwargs) -> int:
        """Read: ``pread(buffer, filename, validate, async, file_offset=0)``.

        Parameters
        ----------
        buffer, filename, validate, file_offset
            As for ``read``.
        async : bool
            Start the read only, as ``async_pread`` does.  The name is a keyword of Python:
            pass it by position, or as ``**{"async": True}``.

        Returns
        -------
        int
            0 where it is asynchronous (``wait()`` waits for it), else 1; -1 for an error
            with ``errors="status"``.

        Raises
        ------
        OSError, TypeError, ValueError, KeyboardInterrupt
            As ``read`` or ``async_pread``.
        """
        return self._either(OP_READ, "pread", args, kwargs)

    def pwrite(self, *args, **kwargs) -> int:
        """Write: ``pwrite(buffer, filename, validate, async, file_offset=0)``.

        Parameters
        ----------
        buffer, filename, validate, file_offset
            As for ``write``.
        async : bool
            Start the write only, as ``async_pwrite`` does; see ``pread``.

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
        """Wait for the operations of ``async_*`` and of ``p*`` with ``async``.

        Returns
        -------
        int
            How many have completed since the last wait; 0 when none was pending; -1 with
            ``errors="status"`` if one failed.

        Raises
        ------
        OSError
            The first failure, in order of submission, after all have been waited for.
        ValueError
            The handle was never opened.
        KeyboardInterrupt
            Ctrl-C, within 0.1 s; the operations are still to be waited for.

        Notes
        -----
        Releases the GIL.  Waits also for what was submitted to ``handle``, which is not
        counted, and whose errors its Requests raise.
        """
        self.require_started()
        tracked = self.take_tracked()
        try:
            # The last one first: the others are mostly done by then, and wake nobody.
            for request in reversed(tracked):
                (<Request> request).poll_for(None)
            self.handle.drain()
        except BaseException:
            # Interrupted: they are still to be waited for.
            with cython.critical_section(self):
                self.tracked = tracked + self.tracked
            raise
        return self.ended(tracked)

    def close(self) -> None:
        """Refuse what comes, wait for everything in flight and stop the workers.

        Raises
        ------
        OSError
            The first failure of an ``async_*`` operation that nobody waited for, once the
            handle is closed.  With ``errors="status"`` it is logged and kept in
            ``last_error``.
        ValueError
            The handle was never opened.
        KeyboardInterrupt
            Ctrl-C while waiting.  The handle is closed, and a second call waits on.

        Notes
        -----
        Releases the GIL while it waits.  A second call does nothing.

        A ``with`` block closes the handle at its end, however it is left, as that of
        ``Handle`` does.  An exception that leaves the block goes on, and of the failures
        there are warnings instead.
        """
        self.require_started()
        self.handle.close()
        self.ended(self.take_tracked())

    @property
    def closed(self) -> bool:
        """Whether ``close()`` was called."""
        return self.handle is None or self.handle.closed

    def stats(self) -> dict:
        """Return what the handle has done so far; see ``Handle.stats``."""
        self.require_started()
        return self.handle.stats()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.require_started()
        self.handle.__exit__(*exc_info)
        # An exception on its way is not to be hidden: failures are warned of instead.
        if exc_info[0] is None:
            self.close()

    def __getattr__(self, name):
        hint = "; its handle has it" if hasattr(Handle, name) else ""
        raise AttributeError(f"an aio_handle has no attribute {name!r}{hint}")

    def __reduce__(self):
        self.require_started()
        # What a subclass keeps in its instances goes along.
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

    # From here on, what the methods above have in common.

    cdef int require_started(self) except -1:
        """Raise where there is no handle; in a fork, forget the parent's requests."""
        if self.handle is None:
            raise ValueError("the handle was never opened")
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
        """Return the status of requests that are done; raise the first failure of them."""
        cdef Request request
        first = None
        for request in requests:
            request.told = True
            if request.error is None:
                continue
            if first is None:
                first = request.error
            else:
                _log.error("another operation has failed as well: %s", request.error)
        return len(requests) if first is None else self.failed(first)

    cdef object failed(self, object error):
        """Return -1 for an error, which is logged and kept; or raise it."""
        if self.contract["errors"] != "status" or not isinstance(error, OSError):
            raise error
        self.last_error = error
        _log.error("%s", error)
        return -1


hide_unknown(aio_handle)


def _restore(kind, options, contract, closed):
    """Make a handle from what pickling carried; a subclass's __init__() is not called."""
    cdef aio_handle handle = kind.__new__(kind)
    handle.open(options, contract)
    if closed:
        handle.close()
    return handle
