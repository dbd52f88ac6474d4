"""Handle: starts, counts, orders and ends requests.

This module checks arguments.  request.pyx has the life of a transfer, buffer.pyx its
memory, open_files.pyx its file, and workers.pyx the workers that execute it.
"""

import atexit
import importlib
import threading
import weakref

cimport cython
from libc.stdint cimport INT64_MAX, int64_t

from nvmeio._libnvmeio.c_base cimport OP_FSYNC, OP_READ, OP_WRITE, nvmeio_op
from nvmeio._native.atomics cimport atomic_flag
from nvmeio._native.arguments cimport deadline_ns, file_position, path_or_descriptor
from nvmeio._native.buffer cimport Buffer, acquire
from nvmeio._native.errors cimport raise_of_item
from nvmeio._native.file cimport File, direct_option
from nvmeio._native.gather cimport GatherRequest, new_gather
from nvmeio._native.many cimport ManyRequest, new_many
from nvmeio._native.open_files cimport new_open_files
from nvmeio._native.request cimport Request, new_request, wait_or_cancel
from nvmeio._native.staged cimport new_staged
from nvmeio._native.workers cimport start_workers

from nvmeio._config.options import handle_options, profile_arguments
from nvmeio._memory.overlap import OVERLAPS
from nvmeio._events.caller import CALLER
from nvmeio._events.latencies import Latencies
from nvmeio._native.info import engines
from nvmeio._arguments.checks import encoded, flag

# Handles to drain before the interpreter exits, by id().  A WeakSet cannot be listed while
# other threads close handles.
_live = weakref.WeakValueDictionary()

# If offset or size is not a multiple of a page, the ends may go through the page cache.
cdef int64_t PAGE_MASK = 4095

# At most what a drive delivers in the time of one more I/O (bench_gather.py).
_MAX_GAP = 4096


# A cycle collector would empty the attributes before __dealloc__ drains the workers.
@cython.no_gc_clear
cdef class Handle:
    """Handle(*, engine=None, direct=None, bounce=None, block_size=None, queue_depth=None,
        workers=None, check_overlap=None)
--

    Transfer arrays and tensors to and from files, many at once.

    An argument of None takes its value from the environment variable that is named below;
    else from a profile, if ``NVMEIO_PROFILE`` asks for one; else the default.

    Parameters
    ----------
    engine : {"auto", "io_uring", "libaio", "threads", "sync"}, optional
        How blocks are executed; ``NVMEIO_ENGINE``, else "auto": the first engine that works
        here.
    direct : {"auto", True, False}, optional
        Whether files opened by path or descriptor bypass the page cache with O_DIRECT:
        "auto" where the file system supports it, True always (else OSError(EINVAL)), False
        never; ``NVMEIO_DIRECT`` (auto, 1, 0), else "auto".  With "auto", every read on a
        local file system takes from the page cache what is there.
    bounce : {"auto", "always", "never"}, optional
        When data passes through the workers' bounce buffers: "auto" if the device cannot
        use the caller's memory, or is slow with it because it is in small pages;
        "always"; or "never", which uses the page cache where the device cannot use the
        memory; ``NVMEIO_BOUNCE``, else "auto".
    block_size : int, optional
        The largest I/O in bytes, 1 to 1 GiB; rounded up to whole pages internally;
        ``NVMEIO_BLOCK_SIZE``, else 1048576.  Writes that extend a file use larger blocks,
        one after another.
    queue_depth : int, optional
        Blocks in flight in each worker, 1 to 32768; ``NVMEIO_QUEUE_DEPTH``, else 128.
    workers : int, optional
        Threads, each with an engine of its own, that share every request, 1 to 256;
        ``NVMEIO_WORKERS``, else 1.
    check_overlap : bool, optional
        Raise RuntimeError at submission if a request conflicts with one in flight: both use
        the same bytes of a file and one of them writes, or both use the same memory and one
        of them reads into it.  Requests chained by ``after=`` do not conflict;
        ``NVMEIO_CHECK_OVERLAP`` (0 or 1), else False.  For debugging, because each
        submission is compared with all requests in flight on handles that check.

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
    nvmeio.default_handle : The handle that the whole process shares.

    Notes
    -----
    In all methods, ``file`` is a path, an open descriptor, a ``File`` or another file
    object with a descriptor.  nvmeio calls ``flush()`` of a file object first, and neither
    uses nor moves its position.  Data that the object has read ahead may be stale after a
    write.  Writes create the file if it does not exist, and never truncate it.

    Only ``after=`` orders requests: a read that is submitted after a write to the same
    place may see the old bytes.  ``submit_fsync`` waits for earlier writes to its file on
    this handle.

    Thread-safe; every call that blocks releases the GIL.  Pickling or copying a handle
    copies its options, and a subclass's ``__dict__``; the copy starts workers of its own.
    So does a forked child on first use.

    Leaving a ``with`` block waits for everything in flight, also after an exception or
    Ctrl-C; see ``close``.  ``async with`` does the same without blocking the event loop.

    ``NVMEIO_PROFILE=auto`` takes options from the only profile; if there are several, from
    the profile of the device that holds the current directory.  An absolute path selects
    the profile of the device that holds it.  These options are the ones that ``nvmeio
    tune`` found best for mixed reading and writing.

    When a process closes any descriptor of a file, the kernel drops all POSIX record locks
    (``fcntl.lockf``) that the process holds on that file.  That includes nvmeio's own
    descriptors.  ``fcntl.flock`` and open file description locks are not affected.

    Examples
    --------
    >>> array = np.arange(1000)
    >>> with nvmeio.Handle(queue_depth=32) as handle:
    ...     handle.write(array, "data.bin")
    ...     other = np.empty_like(array)
    ...     request = handle.submit_read(other, "data.bin")
    ...     request.wait()
    8000
    8000
    >>> np.array_equal(array, other)
    True
    """

    def __init__(
        self, *, engine=None, direct=None, bounce=None, block_size=None,
        queue_depth=None, workers=None, check_overlap=None
    ):
        if self.core is not None:
            raise ValueError("the handle is open already; make another")
        self.start(
            handle_options(
                {
                    "engine": engine,
                    "direct": direct,
                    "bounce": bounce,
                    "block_size": block_size,
                    "queue_depth": queue_depth,
                    "workers": workers,
                    "check_overlap": check_overlap,
                },
                engines,
            )
        )

    cdef int start(self, dict options) except -1:
        refuse_at_exit()
        direct = direct_option(options["direct"])
        self.options = options
        self.core = start_workers(options)
        self.files = new_open_files(self.core, direct)
        self.overlaps = OVERLAPS if options["check_overlap"] else None
        self.open = True
        _live[id(self)] = self
        try:
            # Again, because _drain_at_exit() may have listed the handles meanwhile.
            refuse_at_exit()
        except ValueError:
            self.close()
            raise
        return 0

    def __dealloc__(self):
        if self.core is not None:
            self.core.stop()

    @classmethod
    def from_profile(cls, path, *, op="both", **options):
        """Make a handle with the fastest settings for a device, from ``nvmeio tune``.

        Parameters
        ----------
        path : str, bytes or os.PathLike
            A file or directory on the device.  If it does not exist, its nearest existing
            parent is used.
        op : {"both", "read", "write"}, default "both"
            Which settings to use: those for reads, for writes, or for both mixed.
        **options
            Arguments of the constructor.  They take precedence over the profile, and so do
            environment variables.

        Returns
        -------
        Handle
            An instance of the class that this is called on, whose constructor gets all
            options by name.

        Raises
        ------
        FileNotFoundError
            There is no profile of the device, which the message names.
        OSError
            The path or the profile cannot be read.
        TypeError, ValueError
            An argument is wrong, as for the constructor; or the profile is invalid or of
            another version of nvmeio, and the message says which file and why.

        Notes
        -----
        If the profile's engine does not work in this process, "auto" replaces it, which is
        logged.  Each user has their own profiles: see ``nvmeio.profiles``.

        Examples
        --------
        >>> options = {"engine": "threads", "bounce": "auto", "block_size": 1 << 20}
        >>> best = nvmeio.profiles.Choice({**options, "queue_depth": 32, "workers": 2}, {})
        >>> profile = nvmeio.profiles.new_profile(".", both=best, read=best, write=best)
        >>> saved = nvmeio.profiles.save_profile(profile)
        >>> nvmeio.Handle.from_profile(".").queue_depth
        32
        """
        return cls(**profile_arguments(path, op, options, engines))

    # Options.

    @property
    def engine(self) -> str:
        """The engine in use: "io_uring", "libaio", "threads" or "sync"."""
        self.require_started()
        return self.core.engine()

    @property
    def direct(self):
        """Whether files that the handle opens use O_DIRECT: "auto", True or False."""
        return self.option("direct")

    @property
    def bounce(self) -> str:
        """When data passes through bounce buffers: "auto", "always" or "never"."""
        return self.option("bounce")

    @property
    def block_size(self) -> int:
        """The largest I/O, in bytes."""
        return self.option("block_size")

    @property
    def queue_depth(self) -> int:
        """How many blocks each worker keeps in flight."""
        return self.option("queue_depth")

    @property
    def workers(self) -> int:
        """How many threads, each with its own engine, share every request."""
        return self.option("workers")

    @property
    def check_overlap(self) -> bool:
        """Whether requests that conflict with one in flight are refused."""
        return self.option("check_overlap")

    cdef object option(self, str name):
        self.require_started()
        return self.options[name]

    # One transfer.

    def read(self, buffer, file, offset=0) -> int:
        """Read part of a file into ``buffer``, and wait.

        Parameters
        ----------
        buffer : array, tensor or object with the buffer protocol
            The memory to fill; of any dtype, shape and strides.
        file : str, bytes, os.PathLike, int or File
            A path, a descriptor or a file object.  The file must have at least ``offset``
            plus the buffer's size bytes.
        offset : int, default 0
            The position in the file, in bytes.

        Returns
        -------
        int
            The number of bytes read, which is the size of the buffer.

        Raises
        ------
        OSError
            The read failed; has errno and path.  ENODATA: the file ends before the buffer
            is full.
        TypeError, ValueError
            The buffer cannot be read into, an argument is of the wrong type or out of
            range, or the handle or the file is closed.
        RuntimeError
            It conflicts with a request in flight, and the handle has ``check_overlap``.
        KeyboardInterrupt
            Ctrl-C.  The transfer is cancelled, and the exception raised once the device is
            done with the blocks that it has.  A second Ctrl-C is raised within 0.1 s; the
            memory is then still in use, and nvmeio holds it.

        Notes
        -----
        Releases the GIL while it waits.

        Examples
        --------
        >>> nvmeio.write_file(np.arange(1000), "data.bin")
        8000
        >>> array = np.empty(10, np.int64)
        >>> with nvmeio.Handle() as handle:
        ...     handle.read(array, "data.bin", offset=80)
        80
        >>> array
        array([10, 11, 12, 13, 14, 15, 16, 17, 18, 19])
        """
        return self.transfer(OP_READ, buffer, file, offset)

    def write(self, buffer, file, offset=0) -> int:
        """Write ``buffer`` to part of a file, and wait.

        Parameters
        ----------
        buffer : array, tensor or object with the buffer protocol
            The bytes to write, in C order.
        file : str, bytes, os.PathLike, int or File
            As for ``read``; created if it does not exist, never truncated.
        offset : int, default 0
            The position in the file, in bytes.

        Returns
        -------
        int
            The number of bytes written, which is the size of the buffer.

        Raises
        ------
        OSError, TypeError, ValueError, RuntimeError, KeyboardInterrupt
            As ``read``; ENOSPC or EFBIG if the file cannot become that long.

        Notes
        -----
        Releases the GIL while it waits.  The bytes are durable after ``fsync``.

        Examples
        --------
        >>> with nvmeio.Handle() as handle:
        ...     handle.write(np.arange(1000), "data.bin")
        ...     handle.fsync("data.bin")
        8000
        """
        return self.transfer(OP_WRITE, buffer, file, offset)

    def submit_read(self, buffer, file, offset=0, *, after=None) -> Request:
        """Start reading part of a file into ``buffer``.

        Parameters
        ----------
        buffer, file, offset
            As for ``read``.
        after : Request or iterable of Request, optional
            Requests of this handle.  The transfer starts when all of them are done.  If one
            of them fails or is cancelled, this request fails too, with that error as its
            cause, and transfers nothing.  The file is opened at submission, but its size is
            read only when the transfer starts.

        Returns
        -------
        Request
            Holds buffer and file until it is done.

        Raises
        ------
        OSError
            The file cannot be opened.  ``Request.wait`` raises later errors, such as
            OSError(ENODATA) if the file ends before the buffer is full.
        TypeError, ValueError
            As ``read``.  Or ``after`` names a request of another handle, or one whose bytes
            still have to pass through Python (a read into a strided array or a device
            tensor), or this request writes such memory.
        RuntimeError
            As ``read``.

        Notes
        -----
        Until the request is done, do not let torch free or move the memory of a tensor:
        by ``resize_()`` of the tensor or its storage, as ``out=`` of an operation with
        another size, or by ``share_memory_()``, which a multiprocessing queue calls.  torch
        cannot refuse that, as numpy does.  ``Request.wait`` then raises RuntimeError, but
        the transfer may have changed other memory.  If the memory is freed and allocated
        again at the same address, the change is not found.

        Examples
        --------
        >>> array, copy = np.arange(1000), np.empty(1000, np.int64)
        >>> with nvmeio.Handle() as handle:
        ...     written = handle.submit_write(array, "data.bin")
        ...     handle.submit_read(copy, "data.bin", after=written).wait()
        8000
        """
        return self.begin(OP_READ, buffer, file, offset, False, after)

    def submit_write(self, buffer, file, offset=0, *, after=None) -> Request:
        """Start writing ``buffer`` to part of a file.

        Parameters
        ----------
        buffer : array, tensor or object with the buffer protocol
            The bytes to write, in C order.  Do not change them until the request is done.
        file, offset
            As for ``write``.  The file is created at submission.
        after : Request or iterable of Request, optional
            As for ``submit_read``.

        Returns
        -------
        Request
            Holds buffer and file until it is done.

        Raises
        ------
        OSError, TypeError, ValueError, RuntimeError
            As ``submit_read``.

        Examples
        --------
        >>> with nvmeio.Handle() as handle:
        ...     request = handle.submit_write(np.arange(1000), "data.bin")
        ...     request.wait()
        8000
        """
        return self.begin(OP_WRITE, buffer, file, offset, False, after)

    def fsync(self, file, *, data_only=False) -> None:
        """Make a file durable, and wait.

        Parameters
        ----------
        file : str, bytes, os.PathLike, int or File
            As for ``read``.
        data_only : bool, default False
            As for ``submit_fsync``.

        Raises
        ------
        OSError
            The file cannot be opened, or the device failed.
        TypeError, ValueError, RuntimeError
            As ``submit_fsync``.
        KeyboardInterrupt
            Ctrl-C, raised once the device is done; a second Ctrl-C within 0.1 s.

        Notes
        -----
        Releases the GIL while it waits.  The name of a new file is durable only after its
        directory was synced too; ``write_file(..., sync=True)`` does both.

        Examples
        --------
        >>> with nvmeio.Handle() as handle:
        ...     handle.write(np.arange(1000), "data.bin")
        ...     handle.fsync("data.bin")
        8000
        """
        wait_or_cancel(self.submit_fsync(file, data_only=data_only))

    def submit_fsync(self, file, *, data_only=False, after=None) -> Request:
        """Start making a file durable.

        Parameters
        ----------
        file : str, bytes, os.PathLike, int or File
            As for ``read``.
        data_only : bool, default False
            Sync the data and the size, but not the times, mode and owner, as fdatasync(2)
            does.  This can save the device a write.
        after : Request or iterable of Request, optional
            As for ``submit_read``; the requests may be of other files.

        Returns
        -------
        Request
            Done when all earlier writes to the file on this handle, and the file's data in
            the page cache, have reached the device.  A write that failed is reported by its
            own ``wait()`` alone; pass it in ``after`` to make the fsync fail too.

        Raises
        ------
        OSError
            The file cannot be opened.  ``Request.wait`` raises later errors.
        TypeError, ValueError
            ``file`` does not name a file, ``data_only`` is not a boolean, or the file or
            the handle is closed.
        RuntimeError
            A write to the file is in flight on another handle, for which the fsync would
            not wait, and the handle has ``check_overlap``.

        Examples
        --------
        >>> with nvmeio.Handle() as handle:
        ...     write = handle.submit_write(np.arange(1000), "data.bin")
        ...     fsync = handle.submit_fsync("data.bin").wait()
        ...     write.done()
        True
        """
        cdef Request request
        cdef bint data = flag("data_only", data_only)
        self.require_open()
        request = new_request(OP_FSYNC, None, self.files.find(file, False, False), 0)
        request.data_only = data
        return self.launch(request, False, after)

    # Many transfers.

    def read_many(self, items) -> int:
        """Read from one or several files into many buffers, and wait.

        Parameters
        ----------
        items : iterable of (buffer, file, offset)
            The arguments of a ``read`` for each transfer.

        Returns
        -------
        int
            The total number of bytes read.

        Raises
        ------
        GatherError
            Some items failed; ``failures`` has the index and errno of each.  The others
            have landed.
        OSError, TypeError, ValueError, RuntimeError
            As ``submit_read_many``.
        KeyboardInterrupt
            Ctrl-C, as for ``read``.

        Notes
        -----
        Cheaper than many small requests: one call, one submission and one completion.
        Releases the GIL while it waits.

        Examples
        --------
        >>> first, second = np.zeros(500), np.zeros(500)
        >>> nvmeio.write_file(np.ones(1000), "data.bin")
        8000
        >>> with nvmeio.Handle() as handle:
        ...     handle.read_many([(first, "data.bin", 0), (second, "data.bin", 4000)])
        8000
        """
        return wait_or_cancel(self.begin_many(OP_READ, items, None))

    def write_many(self, items) -> int:
        """Write many buffers to one or several files, and wait.

        Parameters
        ----------
        items : iterable of (buffer, file, offset)
            The arguments of a ``write`` for each transfer.

        Returns
        -------
        int
            The total number of bytes written.

        Raises
        ------
        GatherError, OSError, TypeError, ValueError, RuntimeError, KeyboardInterrupt
            As ``read_many``.

        Examples
        --------
        >>> items = [(bytes(1000), "first.bin", 0), (bytes(500), "second.bin", 0)]
        >>> with nvmeio.Handle() as handle:
        ...     handle.write_many(items)
        1500
        """
        return wait_or_cancel(self.begin_many(OP_WRITE, items, None))

    def submit_read_many(self, items, *, after=None) -> Request:
        """Start reading from one or several files into many buffers, as one request.

        Parameters
        ----------
        items : iterable of (buffer, file, offset)
            The arguments of a ``read`` for each transfer.
        after : Request or iterable of Request, optional
            As for ``submit_read``.

        Returns
        -------
        Request
            Its ``wait()`` returns the total number of bytes.  If items fail, it raises
            GatherError, which lists them; the others have landed.

        Raises
        ------
        OSError
            A file cannot be opened.
        TypeError, ValueError, RuntimeError
            As ``submit_read``, before any transfer starts; the message names the item.

        Notes
        -----
        The items are not ordered: if two overlap, either may be the last.

        Examples
        --------
        >>> nvmeio.write_file(np.ones(1000), "data.bin")
        8000
        >>> first, second = np.zeros(500), np.zeros(500)
        >>> with nvmeio.Handle() as handle:
        ...     items = [(first, "data.bin", 0), (second, "data.bin", 4000)]
        ...     handle.submit_read_many(items).wait()
        8000
        """
        return self.begin_many(OP_READ, items, after)

    def submit_write_many(self, items, *, after=None) -> Request:
        """Start writing many buffers to one or several files, as one request.

        Parameters
        ----------
        items : iterable of (buffer, file, offset)
            The arguments of a ``write`` for each transfer.
        after : Request or iterable of Request, optional
            As for ``submit_read``.

        Returns
        -------
        Request
            As ``submit_read_many``.

        Raises
        ------
        OSError, TypeError, ValueError, RuntimeError
            As ``submit_read_many``.

        Examples
        --------
        >>> items = [(bytes(1000), "first.bin", 0), (bytes(500), "second.bin", 0)]
        >>> with nvmeio.Handle() as handle:
        ...     handle.submit_write_many(items).wait()
        1500
        """
        return self.begin_many(OP_WRITE, items, after)

    # Many records of one file.

    def gather(
        self, file, offsets, sizes, out, *, out_offsets=None, max_gap=_MAX_GAP
    ) -> int:
        """Read many records of a file into ``out``, and wait.

        Parameters
        ----------
        file : str, bytes, os.PathLike, int or File
            A path, an open descriptor or a file object.
        offsets : array_like of int, shape (n,)
            Where each record begins in the file, in bytes; in any order, with any
            alignment.
        sizes : int or array_like of int, shape (n,)
            The size of every record, or of each one, in bytes.
        out : array, tensor or object with the buffer protocol
            Receives the records one after another, in C order.  It may be larger; the
            bytes after the last record do not change.
        out_offsets : array_like of int, shape (n,), optional
            Where to put each record instead, in bytes from the beginning of ``out``.  The
            rest of ``out`` does not change.
        max_gap : int, default 4096
            Records at most this many bytes apart are read together, with the unneeded bytes
            between them; 0 to 1 GiB.

        Returns
        -------
        int
            The total size of the records, in bytes.

        Raises
        ------
        GatherError
            Some records failed; ``failures`` has the index and errno of each.  The others
            have landed.  If a record reaches past the end of the file (ENODATA), nothing is
            read.
        OSError
            The file cannot be opened.
        TypeError, ValueError
            An array does not contain integers, a record has a negative offset or size or
            does not fit into ``out``, or two records share bytes of ``out``.  The message
            names the first invalid record, and nothing is read.  Or the handle or the file
            is closed.
        RuntimeError, KeyboardInterrupt
            As ``read``.

        Notes
        -----
        Neighbouring records are read by one I/O, and a record that is requested several
        times is read once.  Up to ``queue_depth`` blocks per worker are in flight.
        Releases the GIL.

        Data in the page cache is copied from there, unless ``direct=True``.  This needs
        Linux 6.5 and a regular file on a local file system that this user owns or may write
        to.  Everything else bypasses the page cache.

        If ``out`` is strided or on a device, a copy of all of it is made and filled first.

        Examples
        --------
        >>> nvmeio.write_file(np.arange(1000), "data.bin")
        8000
        >>> rows = np.empty((2, 5), np.int64)
        >>> with nvmeio.Handle() as handle:
        ...     handle.gather("data.bin", offsets=[800, 0], sizes=40, out=rows)
        80
        >>> rows
        array([[100, 101, 102, 103, 104],
               [  0,   1,   2,   3,   4]])
        """
        return wait_or_cancel(
            self.begin_gather(
                OP_READ, file, offsets, sizes, out, out_offsets, max_gap, None, True, None
            )
        )

    def submit_gather(
        self, file, offsets, sizes, out, *, out_offsets=None, max_gap=_MAX_GAP,
        result=None, after=None
    ) -> Request:
        """Start reading many records of a file into ``out``.

        Parameters
        ----------
        file, offsets, sizes, out, out_offsets, max_gap
            As for ``gather``.  The arrays may change once this returns.
        result : object, optional
            ``Request.wait`` and ``result`` return this object instead of the number of
            bytes.
        after : Request or iterable of Request, optional
            As for ``submit_read``.

        Returns
        -------
        Request
            Holds ``out`` and the file until it is done.

        Raises
        ------
        OSError, TypeError, ValueError, RuntimeError
            As ``gather``, before anything is read.  ``Request.wait`` raises later errors.

        Examples
        --------
        >>> nvmeio.write_file(np.arange(1000), "data.bin")
        8000
        >>> rows = np.empty((2, 3), np.int64)
        >>> with nvmeio.Handle() as handle:
        ...     request = handle.submit_gather("data.bin", [800, 0], 24, rows, result=rows)
        ...     request.wait()
        array([[100, 101, 102],
               [  0,   1,   2]])
        """
        return self.begin_gather(
            OP_READ, file, offsets, sizes, out, out_offsets, max_gap, result, False, after
        )

    def scatter(self, file, offsets, sizes, buffer, *, buffer_offsets=None) -> int:
        """Write many records of ``buffer`` to a file, each at its offset, and wait.

        Parameters
        ----------
        file : str, bytes, os.PathLike, int or File
            As for ``gather``; created if it does not exist, never truncated.
        offsets, sizes
            As for ``gather``.  No two records may share bytes of the file.
        buffer : array, tensor or object with the buffer protocol
            The records, one after another in C order.
        buffer_offsets : array_like of int, shape (n,), optional
            Where each record is instead, in bytes from the beginning of ``buffer``.

        Returns
        -------
        int
            The total size of the records, in bytes.

        Raises
        ------
        GatherError, OSError, TypeError, ValueError, RuntimeError, KeyboardInterrupt
            As ``gather``.

        Notes
        -----
        Adjacent records in the file are written by one I/O.  Releases the GIL.

        Examples
        --------
        >>> with nvmeio.Handle() as handle:
        ...     handle.scatter("data.bin", offsets=[16, 0], sizes=8, buffer=np.arange(2))
        16
        """
        return wait_or_cancel(
            self.begin_gather(
                OP_WRITE, file, offsets, sizes, buffer, buffer_offsets, 0, None, True, None
            )
        )

    def submit_scatter(
        self, file, offsets, sizes, buffer, *, buffer_offsets=None, after=None
    ) -> Request:
        """Start writing many records of ``buffer`` to a file, each at its offset.

        Parameters
        ----------
        file, offsets, sizes, buffer, buffer_offsets
            As for ``scatter``.  Do not change ``buffer`` until the request is done.
        after : Request or iterable of Request, optional
            As for ``submit_read``.

        Returns
        -------
        Request
            Holds ``buffer`` and the file until it is done.

        Raises
        ------
        OSError, TypeError, ValueError, RuntimeError
            As ``scatter``, before anything is written.  ``Request.wait`` raises later
            errors.

        Examples
        --------
        >>> with nvmeio.Handle() as handle:
        ...     request = handle.submit_scatter("data.bin", [16, 0], 8, np.arange(2))
        ...     request.wait()
        16
        """
        return self.begin_gather(
            OP_WRITE, file, offsets, sizes, buffer, buffer_offsets, 0, None, False, after
        )

    # The handle itself.

    @property
    def pending(self) -> int:
        """How many requests are in flight, including each piece of a device tensor."""
        self.require_started()
        # Count first: then a request that is not counted has landed when this returns.
        count = self.core.pending()
        self.core.collect()
        return count + len(self.core.staged)

    @property
    def closed(self) -> bool:
        """Whether ``close()`` was called."""
        return not self.open

    def stats(self) -> dict:
        """Return the handle's counters.

        Returns
        -------
        dict
            ``engine``
                The engine's name.
            ``requests``
                Requests submitted.
            ``blocks``
                Blocks finished.
            ``bytes_direct``
                Bytes transferred between the device and the caller's memory.
            ``bytes_bounced``
                Bytes that passed through bounce buffers.
            ``bytes_buffered``
                Bytes that passed through the page cache.
            ``short_transfers``
                Partial transfers, which were continued.
            ``retries``
                Blocks and calls repeated after EINTR, EAGAIN and the like.

        Raises
        ------
        ValueError
            The handle was never opened.

        Notes
        -----
        Works on a closed handle too.

        Examples
        --------
        >>> with nvmeio.Handle() as handle:
        ...     request = handle.submit_write(bytes(4096), "data.bin")
        >>> handle.stats()["requests"]
        1
        """
        self.require_started()
        return {"engine": self.core.engine(), **self.core.stats()}

    def latencies(self) -> Latencies:
        """Return the latencies of all blocks that the handle has finished.

        Returns
        -------
        Latencies
            Percentiles of reads and writes together, failed ones included.  Fsyncs are not
            counted, because they transfer no data.  For an interval, subtract two
            snapshots.

        Raises
        ------
        ValueError
            The handle was never opened.

        Notes
        -----
        The time of a block starts when its engine receives it, and ends when a worker or a
        waiting thread sees its completion.  Copies to and from bounce buffers are not
        included.  A block that was continued or repeated counts once.  Time in the kernel
        behind other blocks of the queue is included; use ``queue_depth=1`` to measure the
        device alone.

        Works on a closed handle too.  A forked child starts from zero.

        Examples
        --------
        >>> with nvmeio.Handle() as handle:
        ...     handle.write(bytes(1 << 20), "data.bin")
        ...     handle.latencies().percentile_us(99) > 0
        1048576
        True
        """
        self.require_started()
        return Latencies(*self.core.latencies())

    def drain(self, timeout=None) -> None:
        """Wait until nothing is in flight.

        Parameters
        ----------
        timeout : float, optional
            The longest time to wait, in seconds; default: no limit.

        Raises
        ------
        TimeoutError
            The time is over; requests in flight are still running.
        TypeError, ValueError
            ``timeout`` is not a number, or negative; or the handle was never opened.
        KeyboardInterrupt
            Ctrl-C, within 0.1 s; requests in flight are still running.

        Notes
        -----
        Also waits for callbacks, and for requests that they or other threads submit
        meanwhile.  Inside a callback it waits only for requests in flight.  Errors are not
        raised here, but by each request's ``wait``.  Releases the GIL.

        Examples
        --------
        >>> with nvmeio.Handle() as handle:
        ...     request = handle.submit_write(np.arange(1000), "data.bin")
        ...     handle.drain(timeout=60)
        ...     request.done()
        True
        """
        self.require_started()
        cdef int64_t end_ns = deadline_ns(timeout)
        while True:
            if not self.core.drain_until(end_ns):
                break
            self.core.collect()
            if not CALLER.await_calls(self.core, end_ns):
                break
            # A callback may have submitted more.
            if self.core.is_idle():
                return
        raise TimeoutError(f"{self!r} was not done within {timeout} s; it goes on")

    def close(self) -> None:
        """Refuse new requests, wait for those in flight, and stop the workers.

        Raises
        ------
        ValueError
            The handle was never opened.
        KeyboardInterrupt
            Ctrl-C while waiting.  The handle is closed; call again to go on waiting.

        Notes
        -----
        Also waits for callbacks, which can no longer submit requests.  Releases the GIL
        while it waits.  A second call does nothing.

        A ``with`` block closes the handle however the block ends.  After Ctrl-C it still
        waits for requests in flight, and raises then; a second Ctrl-C is raised at once.

        Examples
        --------
        >>> handle = nvmeio.Handle()
        >>> request = handle.submit_write(np.arange(1000), "data.bin")
        >>> handle.close()
        >>> request.done()
        True
        """
        self.require_started()
        self.open = False
        self.core.drain_until(-1)
        self.core.collect()
        CALLER.await_calls(self.core, -1)
        _live.pop(id(self), None)
        self.core.stop()

    def __enter__(self):
        if self.closed:
            raise ValueError("the handle is closed")
        return self

    def __exit__(self, *exc_info):
        try:
            self.close()
        except BaseException:
            # The program cannot close it after the block, so wait for everything in flight
            # before raising Ctrl-C.  A second Ctrl-C is raised at once.
            self.close()
            raise

    async def __aenter__(self):
        # What __aexit__() needs: then there may be no descriptor for the module's file.
        importlib.import_module("nvmeio._events.event_loop")
        return self.__enter__()

    async def __aexit__(self, *exc_info):
        """Close the handle as ``with`` does, without blocking the asyncio event loop.

        Raises
        ------
        asyncio.CancelledError
            The task was cancelled meanwhile, once or more.  Raised once the handle is
            closed.

        Notes
        -----
        Awaits requests in flight without a thread.  Then ``close`` runs in the loop's
        default executor, because it blocks to wait for callbacks and to stop the workers.
        """
        from nvmeio._events.event_loop import close
        self.require_started()
        self.open = False
        await close(self.core, self.close)

    def __reduce__(self):
        self.require_started()
        # Include the attributes of a subclass.
        state = getattr(self, "__dict__", None)
        return _restore, (type(self), self.options, self.closed), state or None

    def __repr__(self):
        self.require_started()
        return (
            f"<nvmeio.Handle engine={self.engine} block_size={self.block_size} "
            f"queue_depth={self.queue_depth} workers={self.workers} "
            + ("closed>" if self.closed else f"pending={self.pending}>")
        )

    # Shared by the methods above.

    def _open(self, file):
        """Open a file as a read that names it does, with both of its descriptors."""
        self.require_open()
        return self.files.find(file, False, True)

    cdef object transfer(self, nvmeio_op op, object buffer, object file, object offset):
        return wait_or_cancel(self.begin(op, buffer, file, offset, True, None))

    cdef Request begin(
        self, nvmeio_op op, object buffer, object file, object offset, bint waited_for,
        object after
    ):
        cdef int64_t position = file_position("offset", offset)
        cdef Buffer held
        cdef Request request
        cdef File opened
        self.require_open()
        # Acquire the memory before opening the file, because an error must not leave an
        # empty file behind.
        held = acquire(buffer, op == OP_READ)
        if position > INT64_MAX - held.nbytes:
            raise ValueError(
                f"offset is {position} for {held.nbytes} bytes; together they must not be "
                "beyond 2**63 - 1"
            )
        ragged = (position | held.nbytes) & PAGE_MASK != 0
        if isinstance(file, File) and not ragged:
            opened = file
        else:
            opened = self.files.find(file, op == OP_WRITE, ragged)
        if held.stage is None:
            request = new_request(op, held, opened, position)
        else:
            request = new_staged(op, held, opened, position)
        return self.launch(request, waited_for, after)

    cdef Request begin_many(self, nvmeio_op op, object items, object after):
        cdef ManyRequest request
        cdef Buffer held
        cdef Py_ssize_t index
        self.require_open()
        # Acquire all memory before opening files, because an error must not leave empty
        # files behind.
        request = new_many(op, items)
        if op == OP_WRITE:
            check_names(request.files)
        # Look up each path once per call: that takes 1.5 us (2026-11-23).
        found = {}
        for index in range(len(request.buffers)):
            held = request.buffers[index]
            ragged = (<int64_t> request.offsets[index] | held.nbytes) & PAGE_MASK != 0
            file = request.files[index]
            if isinstance(file, File) and not ragged:
                continue
            key = file if type(file) in (str, int) else id(file), ragged
            if key in found:
                request.files[index] = found[key]
                continue
            try:
                known = self.files.find(file, op == OP_WRITE, ragged)
            except (OSError, TypeError, ValueError) as error:
                raise_of_item(index, error)
            request.files[index] = found[key] = known
        return self.launch(request, False, after)

    cdef Request begin_gather(
        self, nvmeio_op op, object file, object offsets, object sizes, object memory,
        object places, object max_gap, object result, bint waited_for, object after
    ):
        cdef GatherRequest request
        self.require_open()
        request = new_gather(op, offsets, sizes, memory, places, max_gap, result)
        # An error must not leave an empty file behind.
        if op == OP_WRITE and not isinstance(file, (int, File)):
            request.check_records()
        request.aim(self.files.find(file, op == OP_WRITE, True))
        return self.launch(request, waited_for, after)

    cdef Request launch(self, Request request, bint waited_for, object after):
        """Start a request that is filled in."""
        self.core.use()
        request._workers = self.core
        request.come_after(after, self.core)
        if request.is_blocked_already():
            return request
        try:
            if self.overlaps is not None:
                self.overlaps.admit(request, request._footprint(), request._predecessors())
            if not (waited_for and request.perform(self.core.c)):
                request.start(self.core.c)
        except BaseException:
            # It was not submitted, so the check of overlaps must ignore it.
            if request.c == NULL and request not in self.core.staged:
                request.finished = True
            raise
        return request

    cdef int require_open(self) except -1:
        self.require_started()
        self.core.collect(False)
        if not self.open:
            raise ValueError("the handle is closed")
        return 0

    cdef int require_started(self) except -1:
        if self.core is None:
            raise ValueError("the handle was never opened; call its __init__() first")
        return 0


cdef int check_names(list files) except -1:
    """Refuse what names no file, before a write creates the files of other items."""
    seen = set()
    for index, file in enumerate(files):
        if isinstance(file, File) or id(file) in seen:
            continue
        seen.add(id(file))
        try:
            path = path_or_descriptor(file)
            if not isinstance(path, int):
                encoded(path)
        except (OSError, TypeError, ValueError) as error:
            raise_of_item(index, error)
    return 0


cdef atomic_flag _ending = False


cdef int refuse_at_exit() except -1:
    """Refuse a handle that _drain_at_exit() would miss: its I/O would outlive Python."""
    if _ending and threading.current_thread() is not threading.main_thread():
        raise ValueError("the interpreter is ending; no handle can be opened any more")
    return 0


cdef Handle new_handle(dict options):
    cdef Handle handle = Handle.__new__(Handle)
    handle.start(options)
    return handle


def _restore(kind, options, closed):
    """Make a handle from its pickled state; a subclass's __init__() is not called."""
    cdef Handle handle = kind.__new__(kind)
    handle.start(options)
    if closed:
        handle.close()
    return handle


def _drain_at_exit():
    """Wait for all I/O before the interpreter exits and frees the memory."""
    global _ending
    _ending = True
    for known in _live.valuerefs():
        handle = known()
        if handle is not None:
            # Refuse new requests: a thread that keeps submitting would delay the exit for
            # ever.
            (<Handle> handle).open = False
            handle.drain()


atexit.register(_drain_at_exit)
