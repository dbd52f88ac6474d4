"""DeepSpeed's op exactly by its contract, on top of a Handle; errors are raised.

This module has DeepSpeed's names, arguments and statuses; Handle does the transfers.
op.py has the same names with DeepSpeed's -1 for errors.
"""

import errno

cimport cython
from libc.stdint cimport int64_t

from nvmeio._libnvmeio cimport c_base, c_file
from nvmeio._libnvmeio.c_base cimport DIRECT_NEVER, OP_READ, OP_WRITE, nvmeio_op
from nvmeio._libnvmeio.c_file cimport nvmeio_file
from nvmeio._native.arguments cimport file_position
from nvmeio._native.atomics cimport atomic_unsigned
from nvmeio._native.buffer cimport Buffer, acquire
from nvmeio._native.errors cimport check, error_in_words, verb_of
from nvmeio._native.file cimport File, open_path
from nvmeio._native.handle cimport Handle, new_handle
from nvmeio._native.request cimport Request, wait_or_cancel
from posix.fcntl cimport O_RDONLY

from nvmeio._arguments.checks import flag, integer, word
from nvmeio._config.constants import checked
from nvmeio._config.options import handle_options
from nvmeio._events.log import log
from nvmeio._files.descriptors import cut
from nvmeio._native.copy import memcpy
from nvmeio._native.file import open_for_writing
from nvmeio._native.info import engines
from nvmeio._native.pool import free_locked, is_locked, new_locked


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
    cdef object latest_error
    cdef dict contract      # the options that Handle does not have
    cdef list tracked       # requests of async_* that wait() waits for
    cdef dict validations   # those of them to validate -> a _Validation
    # fork_generation() of the process that `tracked` belongs to.
    cdef atomic_unsigned generation

    def __init__(
        self, block_size=None, queue_depth=None, single_submit=False, overlap_events=False,
        intra_op_parallelism=None, *, engine=None, direct=None, bounce=None, errors="raise"
    ):
        if self.handle is not None:
            raise ValueError("the handle is open already; make another")
        if intra_op_parallelism is not None:
            checked("workers", intra_op_parallelism, "intra_op_parallelism")
        contract = {
            "single_submit": flag("single_submit", single_submit),
            "overlap_events": flag("overlap_events", overlap_events),
            "errors": word("errors", errors, ("raise", "status")),
        }
        options = handle_options(
            {
                "engine": engine,
                "direct": direct,
                "bounce": bounce,
                "block_size": block_size,
                "queue_depth": queue_depth,
                "workers": intra_op_parallelism,
            },
            engines,
        )
        self.open(options, contract)

    cdef int open(self, dict options, dict contract) except -1:
        self.contract = contract
        self.tracked = []
        self.validations = {}
        self.generation = c_base.fork_generation()
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

    def new_cpu_locked_tensor(self, num_elem, example_tensor=None, *, example_tenosr=None):
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

    def read(self, buffer, filename, validate=False, file_offset=0) -> int:
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
        return self.now(OP_READ, buffer, filename, file_offset, validate, 0)

    def write(self, buffer, filename, validate=False, file_offset=0) -> int:
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
        return self.now(OP_WRITE, buffer, filename, file_offset, validate, 0)

    def sync_pread(self, buffer, filename, file_offset=0) -> int:
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
        return self.now(OP_READ, buffer, filename, file_offset, False, 1)

    def sync_pwrite(self, buffer, filename, file_offset=0) -> int:
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
        return self.now(OP_WRITE, buffer, filename, file_offset, False, 1)

    def async_pread(self, buffer, filename, file_offset=0) -> int:
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
        return self.later(OP_READ, buffer, filename, file_offset, False)

    def async_pwrite(self, buffer, filename=None, file_offset=0, *, fd=None) -> int:
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
    def last_error(self):
        with cython.critical_section(self):
            return self.latest_error

    @property
    def closed(self) -> bool:
        """Whether ``close()`` was called."""
        return self.handle is None or self.handle.closed

    def stats(self) -> dict:
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
        cdef unsigned generation = c_base.fork_generation()
        if self.generation != generation:
            with cython.critical_section(self):
                if self.generation != generation:
                    self.tracked = []
                    self.validations = {}
                    # Last, because other threads look at it without the lock.
                    self.generation = generation
        return 0

    cdef object now(
        self, nvmeio_op op, object buffer, object file, object offset, object validate,
        int done
    ):
        cdef _Validation validation = None
        validate = flag("validate", validate)
        offset = file_position("file_offset", offset)
        self.require_started()
        try:
            if validate:
                validation = self.validation_of(op, buffer, file, offset)
                file = validation.file
            wait_or_cancel(self.handle.begin(op, buffer, file, offset, True, None))
            if validation is not None and (error := validation.error()) is not None:
                raise error
        except OSError as error:
            return self.failed(error)
        return done

    cdef object later(
        self, nvmeio_op op, object buffer, object file, object offset, object validate
    ):
        cdef _Validation validation = None
        validate = flag("validate", validate)
        offset = file_position("file_offset", offset)
        self.require_started()
        try:
            if validate:
                validation = self.validation_of(op, buffer, file, offset)
                file = validation.file
            request = self.handle.begin(op, buffer, file, offset, False, None)
        except OSError as error:
            return self.failed(error)
        with cython.critical_section(self):
            self.tracked.append(request)
            if validation is not None:
                self.validations[request] = validation
        return 0

    cdef _Validation validation_of(
        self, nvmeio_op op, object buffer, object file, int64_t offset
    ):
        """Remember what will move; an error must not leave an empty file behind."""
        cdef _Validation validation = _Validation.__new__(_Validation)
        self.handle.require_open()
        acquire(buffer, op == OP_READ)
        validation.op = op
        validation.buffer = buffer
        validation.file = self.handle.files.find(file, op == OP_WRITE, True)
        validation.c = validation.file.retain()
        validation.offset = offset
        return validation

    def _either(self, op, name, args, kwargs):
        buffer, filename, validate, later, offset = bind_arguments(name, args, kwargs)
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
        try:
            errors = [self.error_of(request) for request in requests]
        except BaseException:
            # Interrupted: the next wait() must compare them.
            with cython.critical_section(self):
                self.tracked = requests + self.tracked
            raise
        first = None
        for request, error in zip(requests, errors):
            request.error_seen = True
            self.validations.pop(request, None)
            if error is None:
                continue
            if first is None:
                first = error
            else:
                log.error("another operation failed too: %s", error)
        return len(requests) if first is None else self.failed(first)

    cdef object error_of(self, Request request):
        """Return the exception of a request that is done, or None; validate it."""
        cdef _Validation validation = self.validations.get(request)
        if request.error is not None or validation is None:
            return request.error
        try:
            return validation.error()
        except Exception as error:
            # The memory is gone, for instance.  It must not hide what the others did.
            return error

    cdef object failed(self, object error):
        """Log and keep an error and return -1, or raise it, as ``errors`` says."""
        raises = self.contract["errors"] != "status"
        # A signal handler raised an OSError that has no errno, such as a TimeoutError.
        if raises or not isinstance(error, OSError) or error.errno is None:
            raise error
        with cython.critical_section(self):
            before, self.latest_error = self.latest_error, error
        del before
        log.error("%s", error)
        return -1


# The names of the arguments of pread and pwrite.  A signature cannot have `async`.
cdef tuple _NAMES = ("buffer", "filename", "validate", "async", "file_offset")


cdef list bind_arguments(str name, tuple args, dict kwargs):
    """Return the values of _NAMES in a call of ``pread`` or ``pwrite``."""
    if len(args) > len(_NAMES):
        raise TypeError(f"{name}() takes at most {len(_NAMES)} arguments, not {len(args)}")
    bound = dict(zip(_NAMES, args))
    for key, value in kwargs.items():
        if key not in _NAMES:
            raise TypeError(f"{name}() got an unexpected keyword argument {key!r}")
        if key in bound:
            raise TypeError(f"{name}() got {key!r} twice")
        bound[key] = value
    bound.setdefault("file_offset", 0)
    for key in _NAMES:
        if key not in bound:
            raise TypeError(f"{name}() lacks the argument {key!r}")
    return [bound[key] for key in _NAMES]


@cython.final
cdef class _Validation:
    """What a validated request moves, to be compared with the file once it is done."""

    cdef nvmeio_op op
    cdef object buffer
    cdef File file
    cdef nvmeio_file *c     # a reference: the caller may close the File meanwhile
    cdef int64_t offset
    cdef object found       # what error() returned first

    def __dealloc__(self):
        # Unless error() did that, the request has failed, or was interrupted.
        with nogil:
            c_file.file_release(self.c)

    cdef object error(self):
        """Compare, and close the file if the handle opened it; return the exception."""
        cdef nvmeio_file *c = self.c
        if c == NULL:
            return self.found
        self.found = self.compare_all()
        self.c = NULL
        try:
            self.file.let_go(c)
        except OSError as error:
            self.found = self.found or error
        return self.found

    cdef object compare_all(self):
        """Return the exception if file and memory differ or cannot be read, or None."""
        cdef Buffer held
        cdef File own = None
        cdef nvmeio_file *c = self.c
        try:
            if self.op == OP_WRITE:
                # The file may be open for writing only, and its path may be gone.
                link = f"/proc/self/fd/{self.descriptor()}"
                own = open_path(link, O_RDONLY, "rb", DIRECT_NEVER)
                c = own.c
        except OSError as error:
            if error.errno is None:
                raise
            words = f"cannot validate: {error.strerror}"
            return OSError(error.errno, words, self.file.path)
        held = acquire(self.buffer, False)
        if held.stage is None:
            return self.compare(c, held, 0)
        for index, (begin, _) in enumerate(held.stage.pieces):
            error = self.compare(c, acquire(held.stage.fetch(index), False), begin)
            if error is not None:
                return error
        return None

    cdef int descriptor(self) except -1:
        """Return the descriptor that goes through the page cache."""
        cdef int result
        with nogil:
            result = c_file.file_fd(self.c)
        return check(result, self.file.path)

    cdef object compare(self, nvmeio_file *c, Buffer held, int64_t begin):
        """Compare the bytes from `begin` on with what an ordinary read returns."""
        cdef int64_t offset = self.offset + begin
        cdef void *address = held.address
        cdef size_t nbytes = held.nbytes, position = 0
        cdef int result
        with nogil:
            result = c_file.file_compare(c, offset, address, nbytes, &position)
        if result < 0:
            words = "(while the file was read to validate it)"
            return error_in_words(-result, words, self.file.path)
        if result == 1:
            return OSError(
                errno.EIO,
                f"validation failed: {verb_of(self.op)} of {nbytes} bytes at offset "
                f"{offset} differs from the file at byte {position}",
                self.file.path,
            )
        return None


def _restore(kind, options, contract, closed):
    """Make a handle from its pickled state; a subclass's __init__() is not called."""
    cdef aio_handle handle = kind.__new__(kind)
    handle.open(options, contract)
    if closed:
        handle.close()
    return handle


def deepspeed_memcpy(dest, src) -> int:
    """Copy all bytes of ``src`` into ``dest``: ``memcpy`` by DeepSpeed's name.

    Parameters
    ----------
    dest, src : array, tensor or object with the buffer protocol
        As for ``memcpy``.

    Returns
    -------
    int
        0, as DeepSpeed's op does.

    Raises
    ------
    TypeError, ValueError
        As ``memcpy``.

    Examples
    --------
    >>> source, target = np.arange(1000), np.zeros(1000, np.int64)
    >>> nvmeio.deepspeed_memcpy(target, source)
    0
    >>> int(target.sum())
    499500
    """
    memcpy(dest, src)
    return 0


def aio_read(
    buffer, filename, block_size, queue_depth, single_submit, overlap_events, validate
) -> int:
    """Read a whole file into a buffer of its size, like DeepSpeed's function.

    Parameters
    ----------
    buffer : array, tensor or object with the buffer protocol
        The memory to fill.
    filename : str, bytes or os.PathLike
        The file.
    block_size, queue_depth, single_submit, overlap_events
        As for ``aio_handle``.
    validate : bool
        Compare the buffer afterwards with an ordinary read of the file.

    Returns
    -------
    int
        Always 0.

    Raises
    ------
    OSError
        The file cannot be read; has errno and path.  EINVAL: the file and the buffer differ
        in size.
    TypeError, ValueError
        The buffer cannot be read into, or an argument is of the wrong type or out of range.

    Examples
    --------
    >>> options = 1 << 20, 32, False, False, False
    >>> nvmeio.aio_write(np.arange(1000), "data.bin", *options)
    0
    >>> array = np.empty(1000, np.int64)
    >>> nvmeio.aio_read(array, "data.bin", *options)
    0
    """
    with new_op(block_size, queue_depth, single_submit, overlap_events) as handle, \
            File(filename) as file:
        held, size = acquire(buffer, True), file.size
        if held.nbytes != size:
            raise OSError(
                errno.EINVAL,
                f"the buffer has {held.nbytes} bytes and the file {size}; aio_read() reads "
                "a whole file, aio_handle reads parts",
                file.path,
            )
        return handle.read(buffer if validate else held, file, validate)


def aio_write(
    buffer, filename, block_size, queue_depth, single_submit, overlap_events, validate
) -> int:
    """Write exactly the bytes of a buffer to a file, like DeepSpeed's function.

    Parameters
    ----------
    buffer, filename, block_size, queue_depth, single_submit, overlap_events, validate
        As for ``aio_read``.  A longer file is truncated after the bytes were written.

    Returns
    -------
    int
        Always 0.

    Raises
    ------
    OSError
        The file cannot be written; has errno and path.
    TypeError, ValueError
        The buffer cannot be written, or an argument is of the wrong type or out of range.

    Examples
    --------
    >>> options = 1 << 20, 32, False, False, False
    >>> nvmeio.aio_write(np.arange(1000), "data.bin", *options)
    0
    """
    held = acquire(buffer, False)
    size = held.nbytes
    with new_op(block_size, queue_depth, single_submit, overlap_events) as handle, \
            open_for_writing(filename) as file:
        status = handle.write(buffer if validate else held, file, validate)
        cut(file, size)
    return status


cdef aio_handle new_op(block_size, queue_depth, single_submit, overlap_events):
    """Open a handle; refuse None, which means the environment's value elsewhere."""
    sizes = integer("block_size", block_size), integer("queue_depth", queue_depth)
    return aio_handle(*sizes, single_submit, overlap_events)
