"""Handle: what starts, counts, orders and ends requests.

Arguments are checked here; a transfer's own life is request.pyx's, its memory buffer.pyx's,
its file open_files.pyx's, the workers that carry it out workers.pyx's.
"""

import atexit
import inspect
import threading
import weakref

cimport cython
from libc.stdint cimport INT64_MAX, int64_t

from nvmeio.libnvmeio cimport OP_FSYNC, OP_READ, OP_WRITE, nvmeio_op
from nvmeio._native.arguments cimport deadline_ns, file_position
from nvmeio._native.buffer cimport Buffer, lend
from nvmeio._native.file cimport File, direct_option
from nvmeio._native.gather cimport GatherRequest, new_gather
from nvmeio._native.many cimport ManyRequest, new_many
from nvmeio._native.open_files cimport new_open_files
from nvmeio._native.request cimport Request, new_request, wait_or_cancel
from nvmeio._native.staged cimport new_staged
from nvmeio._native.workers cimport start_workers

from nvmeio._config.constants import DEFAULTS as _DEFAULTS
from nvmeio._config.options import handle_options, profile_arguments
from nvmeio._memory.overlap import OVERLAPS
from nvmeio._events.caller import CALLER
from nvmeio._events.latencies import Latencies
from nvmeio._events.notebooks import html_table
from nvmeio._native.info import engines
from nvmeio._arguments.checks import MISSING, flag, refuse_missing, refuse_path, shown
from nvmeio._arguments.keywords import hide_unknown, refuse_unknown

# Handles to be drained before the interpreter goes away.
_live = weakref.WeakSet()

# Of what is not whole pages the ends may go through the page cache.
cdef int64_t PAGE_MASK = 4095

# What somebody may look for here who knows DeepSpeed's op.
_OF_THE_OP = {
    *("wait", "pread", "pwrite", "sync_pread", "sync_pwrite", "async_pread"),
    *("async_pwrite", "get_alignment", "new_cpu_locked_tensor", "is_pinned"),
}

# As much as a device delivers in the time of one more I/O, or less (bench_gather.py).
_MAX_GAP = 4096


# A cycle collector would empty the attributes before __dealloc__ drains the workers.
@cython.no_gc_clear
cdef class Handle:
    """Handle(*, engine=None, direct=None, bounce=None, block_size=None, queue_depth=None,
        workers=None, check_overlap=None)
--

    Moves arrays and tensors to and from files, many at once.

    What is None is taken from the environment's variable, else from a profile where
    ``NVMEIO_PROFILE`` asks for one, else it is the default.

    Parameters
    ----------
    engine : {"auto", "io_uring", "libaio", "threads", "sync"}, optional
        How blocks are carried out; ``NVMEIO_ENGINE``, else "auto": the first that works
        here.
    direct : {"auto", True, False}, optional
        Whether files that are opened by path or descriptor bypass the page cache: where
        the file system can, always (else OSError(EINVAL)), or never; ``NVMEIO_DIRECT``
        (auto, 1, 0), else "auto".  With "auto" gathers take from it what it has.
    bounce : {"auto", "always", "never"}, optional
        Whether data passes through the pool's memory: where the device cannot reach the
        caller's or may be slow to, for it is in small pages; always; or never (then the
        page cache serves where the device cannot); ``NVMEIO_BOUNCE``, else "auto".
    block_size : int, optional
        The largest I/O in bytes, 1 to 1 GiB; rounded up to whole pages inside;
        ``NVMEIO_BLOCK_SIZE``, else 1048576.  What makes a file longer is written one block
        after another, and these are larger.
    queue_depth : int, optional
        Blocks in flight in each worker, 1 to 32768; ``NVMEIO_QUEUE_DEPTH``, else 128.
    workers : int, optional
        Threads with an engine each, that share every request, 1 to 256;
        ``NVMEIO_WORKERS``, else 1.
    check_overlap : bool, optional
        Raise RuntimeError at submission where two requests in flight, which are not
        chained by ``after=``, touch the same bytes of a file and one of them writes, or
        the same memory and one of them reads into it; ``NVMEIO_CHECK_OVERLAP`` (0 or 1),
        else False.  For debugging: each submission is compared with all that is in flight
        on handles that check.

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
    nvmeio.default_handle : The handle that the whole process shares.
    nvmeio.aio_handle : DeepSpeed's op, with a Handle under it.

    Notes
    -----
    ``file`` is everywhere a path, an open descriptor, a ``File`` or another file object
    with a descriptor: its ``flush()`` is called first, its position is neither used nor
    moved, and what it has read ahead does not show what is written.  Writes create the
    file where it does not exist and never truncate it.

    Requests are not ordered among each other but by ``after=``: a read that is submitted
    after a write to the same place may see the old bytes.  ``submit_fsync`` alone waits
    for the writes to its file that were submitted to this handle before it.

    Thread-safe; every call that blocks releases the GIL.  A handle can be pickled and
    copied, which carries its options, and what a subclass keeps in ``__dict__``, and used
    in forked children, where it starts workers of its own.

    Leaving a ``with`` block waits for everything in flight, also after an exception or
    Ctrl-C; see ``close``.  ``async with`` does the same, while the event loop goes on.

    With ``NVMEIO_PROFILE`` set to "auto", options come from the only profile there is, or
    of several from that of the device on which the current folder lies; set to an absolute
    path, from that of the device on which it lies.  They are what ``nvmeio tune`` found to
    be best for reading and writing alike.

    The kernel drops the POSIX record locks (``fcntl.lockf``) that a process has on a file
    whenever the process closes a descriptor of it, and so when nvmeio closes its own.
    ``fcntl.flock`` and the locks of open file descriptions are not touched.

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
        self, *args, engine=None, direct=None, bounce=None, block_size=None,
        queue_depth=None, workers=None, check_overlap=None, **unknown
    ):
        if args:
            raise TypeError(
                f"Handle() takes keyword arguments alone, not {shown(args[0])}; "
                "block_size= and queue_depth= for instance"
            )
        if unknown:
            refuse_unknown(Handle, unknown)
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
        # Those that are left would outlive the interpreter, unseen by what drains the rest.
        if _ending and threading.current_thread() is not threading.main_thread():
            raise ValueError("the interpreter is ending; no handle can be opened any more")
        direct = direct_option(options["direct"])
        self.options = options
        self.core = start_workers(options)
        self.files = new_open_files(self.core, direct)
        self.overlaps = OVERLAPS if options["check_overlap"] else None
        self.open = True
        _live.add(self)
        return 0

    def __dealloc__(self):
        if self.core is not None:
            self.core.stop()

    @classmethod
    def from_profile(cls, path=MISSING, *, op="both", **options):
        """Make a handle with what ``nvmeio tune`` found to be best on a device.

        Parameters
        ----------
        path : str, bytes or os.PathLike
            A file or a folder on the device; where it does not exist, the nearest folder
            above counts.
        op : {"both", "read", "write"}, default "both"
            What the handle is for.
        **options
            Arguments of the constructor; what is passed counts before the profile, and so
            does what the environment sets.

        Returns
        -------
        Handle
            Of the class that this is called on, whose constructor gets all options by name.

        Raises
        ------
        FileNotFoundError
            There is no profile of the device; names it.
        OSError
            The path may not be looked at, or the profile not be read.
        TypeError, ValueError
            An argument is wrong, as for the constructor, or the profile is broken or of
            another version of nvmeio: says which file, and what in it.

        Notes
        -----
        An engine that does not work in this process gives way to "auto", which is logged.
        Profiles are of this user: see ``nvmeio.profiles``.
        """
        if path is MISSING:
            known = inspect.signature(Handle).parameters
            unknown = {name: None for name in options if name not in known}
            if unknown:
                refuse_unknown(Handle.from_profile, unknown)
            refuse_missing(path=path)
        return cls(**profile_arguments(path, op, options, engines))

    # Options.

    @property
    def engine(self) -> str:
        """What carries blocks out: "io_uring", "libaio", "threads" or "sync"."""
        self.require_started()
        return self.core.engine()

    @property
    def direct(self):
        """Whether files that it opens bypass the page cache: "auto", True or False."""
        return self.option("direct")

    @property
    def bounce(self) -> str:
        """Whether data passes through the pool's memory: "auto", "always" or "never"."""
        return self.option("bounce")

    @property
    def block_size(self) -> int:
        """The largest size of an I/O, in bytes."""
        return self.option("block_size")

    @property
    def queue_depth(self) -> int:
        """How many blocks each worker keeps in flight."""
        return self.option("queue_depth")

    @property
    def workers(self) -> int:
        """How many threads with an engine share every request."""
        return self.option("workers")

    @property
    def check_overlap(self) -> bool:
        """Whether requests in flight that overlap are refused."""
        return self.option("check_overlap")

    cdef object option(self, str name):
        self.require_started()
        return self.options[name]

    # One transfer.

    def read(self, buffer=MISSING, file=MISSING, offset=0, **unknown) -> int:
        """Read a part of a file into ``buffer``, and wait.

        Parameters
        ----------
        buffer : array, tensor or object with the buffer protocol
            Is filled; of any dtype, shape and strides.
        file : str, bytes, os.PathLike, int or File
            A path, a descriptor or a file object; must hold ``offset`` plus the buffer's
            size bytes.
        offset : int, default 0
            Where in the file to begin, in bytes.

        Returns
        -------
        int
            The bytes read: the size of the buffer.

        Raises
        ------
        OSError
            With errno and path: ENODATA past the end of the file, and what the system says.
        TypeError, ValueError
            The buffer cannot be read into, an argument is of the wrong type or out of
            range, or the handle or the file is closed.
        RuntimeError
            It overlaps with a request in flight, and the handle checks that.
        KeyboardInterrupt
            Ctrl-C, which cancels the transfer, once the device has answered to what it has
            been given.  A second one within 0.1 s: then the memory is still in use, and
            stays held.

        Notes
        -----
        Releases the GIL while it waits.
        """
        if unknown:
            refuse_unknown(Handle.read, unknown)
        return self.transfer(OP_READ, buffer, file, offset)

    def write(self, buffer=MISSING, file=MISSING, offset=0, **unknown) -> int:
        """Write ``buffer`` to a part of a file, and wait.

        Parameters
        ----------
        buffer : array, tensor or object with the buffer protocol
            Written in C order.
        file : str, bytes, os.PathLike, int or File
            As for ``read``; created where it does not exist, never truncated.
        offset : int, default 0
            Where in the file to begin, in bytes.

        Returns
        -------
        int
            The bytes written: the size of the buffer.

        Raises
        ------
        OSError, TypeError, ValueError, RuntimeError, KeyboardInterrupt
            As ``read``; ENOSPC or EFBIG where the file cannot become so long.

        Notes
        -----
        Releases the GIL while it waits.  The bytes are durable when ``fsync`` has
        returned.
        """
        if unknown:
            refuse_unknown(Handle.write, unknown)
        return self.transfer(OP_WRITE, buffer, file, offset)

    def submit_read(
        self, buffer=MISSING, file=MISSING, offset=0, *, after=None, **unknown
    ) -> Request:
        """Start reading a part of a file into ``buffer``.

        Parameters
        ----------
        buffer, file, offset
            As for ``read``.
        after : Request or iterable of Request, optional
            Of this handle: starts when all of them are done, and looks at the file only
            then, so that a read may follow the write that makes the file.  Where one of
            them has failed or was cancelled, so does this request, with that error as its
            cause, and no byte is transferred.  The file is opened, and by a write made, at
            submission.

        Returns
        -------
        Request
            Holds buffer and file until it is done.

        Raises
        ------
        OSError
            The file cannot be opened.  What fails later is raised by ``Request.wait``:
            OSError(ENODATA) where the file ends before the buffer is full.
        TypeError, ValueError
            As ``read``; or ``after`` cannot be kept: it names a request of another handle,
            or one in flight whose bytes still have to pass through Python, as those read
            into strided arrays and tensors on devices; or this one writes such memory.
        RuntimeError
            As ``read``.
        """
        if unknown:
            refuse_unknown(Handle.submit_read, unknown)
        return self.begin(OP_READ, buffer, file, offset, False, False, after)

    def submit_write(
        self, buffer=MISSING, file=MISSING, offset=0, *, after=None, **unknown
    ) -> Request:
        """Start writing ``buffer`` to a part of a file.

        Parameters
        ----------
        buffer : array, tensor or object with the buffer protocol
            Written in C order; must not change until the request is done.
        file, offset
            As for ``write``.
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
        """
        if unknown:
            refuse_unknown(Handle.submit_write, unknown)
        return self.begin(OP_WRITE, buffer, file, offset, False, False, after)

    def fsync(self, file=MISSING, *, data_only=False, **unknown) -> None:
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
            Ctrl-C, when the device has answered; a second one within 0.1 s.

        Notes
        -----
        Releases the GIL while it waits.  A new file's name is durable only when its folder
        was synced too; ``write_file(..., sync=True)`` does both.
        """
        if unknown:
            refuse_unknown(Handle.fsync, unknown)
        wait_or_cancel(self.submit_fsync(file, data_only=data_only))

    def submit_fsync(
        self, file=MISSING, *, data_only=False, after=None, **unknown
    ) -> Request:
        """Start making a file durable.

        Parameters
        ----------
        file : str, bytes, os.PathLike, int or File
            As for ``read``.
        data_only : bool, default False
            Sync the data and the size, but not the times, mode and owner of the file, as
            fdatasync(2) does: one write of the device less where nothing else has changed.
        after : Request or iterable of Request, optional
            As for ``submit_read``; what it waits for may be of other files.

        Returns
        -------
        Request
            Done when every write to the file that was submitted to this handle before,
            and everything else that is in the page cache, has reached the device.

        Raises
        ------
        OSError
            The file cannot be opened.  What fails later is raised by ``Request.wait``.
        TypeError, ValueError
            ``file`` is nothing that names a file, ``data_only`` is no boolean, or the file
            or the handle is closed.
        RuntimeError
            A write to the file is in flight on another handle, which this would not wait
            for, and the handle checks that.
        """
        if unknown:
            refuse_unknown(Handle.submit_fsync, unknown)
        cdef Request request
        cdef bint data = flag("data_only", data_only)
        self.require_open()
        request = new_request(OP_FSYNC, None, self.files.find(file, False, False), 0, False)
        request.data_only = data
        return self.launch(request, False, after)

    # Many transfers.

    def read_many(self, items=MISSING, **unknown) -> int:
        """Read into many buffers, of one file or several, and wait.

        Parameters
        ----------
        items : iterable of (buffer, file, offset)
            Each as the arguments of ``read``.

        Returns
        -------
        int
            The bytes of all of them.

        Raises
        ------
        GatherError
            Items have failed, by index; the others have landed.  An OSError with errno and
            path.
        OSError, TypeError, ValueError, RuntimeError
            As ``submit_read_many``.
        KeyboardInterrupt
            Ctrl-C, as for ``read``.

        Notes
        -----
        Many small transfers cost less so: one call, one hand-over and one completion.
        Releases the GIL while it waits.
        """
        if unknown:
            refuse_unknown(Handle.read_many, unknown)
        return wait_or_cancel(self.begin_many(OP_READ, items, None))

    def write_many(self, items=MISSING, **unknown) -> int:
        """Write many buffers, to one file or several, and wait.

        Parameters
        ----------
        items : iterable of (buffer, file, offset)
            Each as the arguments of ``write``.

        Returns
        -------
        int
            The bytes of all of them.

        Raises
        ------
        GatherError, OSError, TypeError, ValueError, RuntimeError, KeyboardInterrupt
            As ``read_many``.
        """
        if unknown:
            refuse_unknown(Handle.write_many, unknown)
        return wait_or_cancel(self.begin_many(OP_WRITE, items, None))

    def submit_read_many(self, items=MISSING, *, after=None, **unknown) -> Request:
        """Start reading into many buffers, of one file or several, as one request.

        Parameters
        ----------
        items : iterable of (buffer, file, offset)
            Each as the arguments of ``read``.
        after : Request or iterable of Request, optional
            As for ``submit_read``.

        Returns
        -------
        Request
            Whose ``wait()`` returns the bytes of all of them, or raises GatherError, which
            names the items that have failed; the others have landed.

        Raises
        ------
        OSError
            A file cannot be opened.
        TypeError, ValueError, RuntimeError
            As ``submit_read``, before anything is started; names the item.

        Notes
        -----
        The items are not ordered among each other: where they overlap, any may be last.
        """
        if unknown:
            refuse_unknown(Handle.submit_read_many, unknown)
        return self.begin_many(OP_READ, items, after)

    def submit_write_many(self, items=MISSING, *, after=None, **unknown) -> Request:
        """Start writing many buffers, to one file or several, as one request.

        Parameters
        ----------
        items : iterable of (buffer, file, offset)
            Each as the arguments of ``write``.
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
        """
        if unknown:
            refuse_unknown(Handle.submit_write_many, unknown)
        return self.begin_many(OP_WRITE, items, after)

    # Many records of one file.

    def gather(
        self, file=MISSING, offsets=MISSING, sizes=MISSING, out=MISSING, *,
        out_offsets=None, max_gap=_MAX_GAP, **unknown
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
            How long all of them are, or each, in bytes.
        out : array, tensor or object with the buffer protocol
            Where the records go, one behind another in C order; it may be larger, and
            what is behind them stays as it is.
        out_offsets : array_like of int, shape (n,), optional
            Where each of them goes instead, in bytes from the beginning of ``out``; the
            rest of ``out`` stays as it is.
        max_gap : int, default 4096
            How many bytes between two records may be read for nothing so that one I/O
            serves both.

        Returns
        -------
        int
            How many bytes the records have together.

        Raises
        ------
        GatherError
            Records have failed, by index; the others have landed.  An OSError with errno
            and path.  Or a record reaches past the end of the file (ENODATA), which is
            found before anything is read.
        OSError
            The file cannot be opened.
        TypeError, ValueError
            An array is not of integers; a record is negative or not within ``out``; two
            records share a place in ``out``: names the first record at fault, before
            anything is read.  Or the handle or the file is closed.
        RuntimeError, KeyboardInterrupt
            As ``read``.

        Notes
        -----
        Neighbours in the file become one I/O, and records that are wanted several times
        are read once.  As many blocks as the queue depth are in flight.  Releases the GIL.

        What the page cache has comes from there, unless ``direct=True``: of regular files
        on local file systems, which this user owns or may write to, from Linux 6.5 on.
        The rest is read past it.

        An ``out`` that is strided or on a device is filled by way of a copy of all of it.
        """
        if unknown:
            refuse_unknown(Handle.gather, unknown)
        return wait_or_cancel(
            self.begin_gather(
                OP_READ, file, offsets, sizes, out, out_offsets, max_gap, None, None
            )
        )

    def submit_gather(
        self, file=MISSING, offsets=MISSING, sizes=MISSING, out=MISSING, *,
        out_offsets=None, max_gap=_MAX_GAP, result=None, after=None, **unknown
    ) -> Request:
        """Start reading many records of a file into ``out``.

        Parameters
        ----------
        file, offsets, sizes, out, out_offsets, max_gap
            As for ``gather``; the arrays are not needed once this returns.
        result : object, optional
            What ``Request.result`` and ``wait`` return in place of the number of bytes.
        after : Request or iterable of Request, optional
            As for ``submit_read``.

        Returns
        -------
        Request
            Holds ``out`` and the file until it is done.

        Raises
        ------
        OSError, TypeError, ValueError, RuntimeError
            As ``gather``, before anything is read.  What fails later is raised by
            ``Request.wait``.
        """
        if unknown:
            refuse_unknown(Handle.submit_gather, unknown)
        return self.begin_gather(
            OP_READ, file, offsets, sizes, out, out_offsets, max_gap, result, after
        )

    def scatter(
        self, file=MISSING, offsets=MISSING, sizes=MISSING, buffer=MISSING, *,
        buffer_offsets=None, **unknown
    ) -> int:
        """Write many records of ``buffer`` to places in a file, and wait.

        Parameters
        ----------
        file : str, bytes, os.PathLike, int or File
            As for ``gather``; created where it does not exist, never truncated.
        offsets, sizes
            As for ``gather``; no two records may share bytes of the file.
        buffer : array, tensor or object with the buffer protocol
            Where the records are, one behind another in C order.
        buffer_offsets : array_like of int, shape (n,), optional
            Where each of them is instead, in bytes from the beginning of ``buffer``.

        Returns
        -------
        int
            How many bytes the records have together.

        Raises
        ------
        GatherError, OSError, TypeError, ValueError, RuntimeError, KeyboardInterrupt
            As ``gather``.

        Notes
        -----
        Records that follow each other in the file become one I/O.  Releases the GIL.
        """
        if unknown:
            refuse_unknown(Handle.scatter, unknown)
        return wait_or_cancel(
            self.begin_gather(
                OP_WRITE, file, offsets, sizes, buffer, buffer_offsets, 0, None, None
            )
        )

    def submit_scatter(
        self, file=MISSING, offsets=MISSING, sizes=MISSING, buffer=MISSING, *,
        buffer_offsets=None, after=None, **unknown
    ) -> Request:
        """Start writing many records of ``buffer`` to places in a file.

        Parameters
        ----------
        file, offsets, sizes, buffer, buffer_offsets
            As for ``scatter``; ``buffer`` must not change until the request is done.
        after : Request or iterable of Request, optional
            As for ``submit_read``.

        Returns
        -------
        Request
            Holds ``buffer`` and the file until it is done.

        Raises
        ------
        OSError, TypeError, ValueError, RuntimeError
            As ``scatter``, before anything is written.  GatherError is raised by
            ``Request.wait``.
        """
        if unknown:
            refuse_unknown(Handle.submit_scatter, unknown)
        return self.begin_gather(
            OP_WRITE, file, offsets, sizes, buffer, buffer_offsets, 0, None, after
        )

    # The handle itself.

    @property
    def pending(self) -> int:
        """How many requests are in flight, the pieces of device tensors included."""
        self.require_started()
        # Counted first: what is not in flight any more has landed when this returns.
        count = self.core.pending()
        self.core.collect()
        return count + len(self.core.staged)

    @property
    def closed(self) -> bool:
        """Whether ``close()`` was called."""
        return not self.open

    def stats(self) -> dict:
        """Return what the handle has done so far.

        Returns
        -------
        dict
            ``engine``; ``requests`` submitted; ``blocks`` finished; ``bytes_direct``
            between device and caller's memory, ``bytes_bounced`` through the pool's, and
            ``bytes_buffered`` through the page cache; ``short_transfers`` that were
            continued; ``retries`` of what the kernel put off.

        Raises
        ------
        ValueError
            The handle was never opened.

        Notes
        -----
        A closed handle still tells.
        """
        self.require_started()
        return {"engine": self.core.engine(), **self.core.stats()}

    def latencies(self) -> Latencies:
        """Return how long the blocks took that the handle has finished so far.

        Returns
        -------
        Latencies
            Percentiles of reads and writes together, failed ones included; fsyncs are
            left out, for they transfer nothing.  Of an interval it is the difference of
            two.

        Raises
        ------
        ValueError
            The handle was never opened.

        Notes
        -----
        A block's time begins when an engine is given it, behind a copy to a bounce, and
        ends when a worker, or the thread that waits, sees it finished, before a copy from
        one; what had to be continued or repeated counts as one block.  It includes what
        the block waits in the kernel behind others of the queue; ``queue_depth=1`` shows
        the device alone.

        A closed handle still tells; a forked child begins anew.
        """
        self.require_started()
        return Latencies(*self.core.latencies())

    def drain(self, timeout=None, **unknown) -> None:
        """Wait until nothing is in flight.

        Parameters
        ----------
        timeout : float, optional
            How long, in seconds; None waits as long as it takes.

        Raises
        ------
        TimeoutError
            The time is over; what is in flight goes on.
        TypeError, ValueError
            ``timeout`` is no number, or negative; or the handle was never opened.
        KeyboardInterrupt
            Ctrl-C, within 0.1 s; what is in flight goes on.

        Notes
        -----
        Waits also for callbacks, and for what they and other threads submit meanwhile; in a
        callback, for what is in flight alone.  What has failed is raised by
        ``Request.wait`` of each.  Releases the GIL.
        """
        if unknown:
            refuse_unknown(Handle.drain, unknown)
        self.require_started()
        cdef int64_t end_ns = deadline_ns(timeout)
        while True:
            if not self.core.drain_until(end_ns):
                break
            self.core.collect()
            if not CALLER.await_calls(self.core, end_ns):
                break
            # A callback may have submitted more.
            if self.core.pending() == 0 and not self.core.staged:
                return
        raise TimeoutError(f"{self!r} was not done within {timeout} s; it goes on")

    def close(self) -> None:
        """Refuse what comes, wait for everything in flight and stop the workers.

        Raises
        ------
        ValueError
            The handle was never opened.
        KeyboardInterrupt
            Ctrl-C while waiting.  The handle is closed, and a second call waits on.

        Notes
        -----
        Releases the GIL while it waits, for callbacks too, which cannot submit any more.  A
        second call does nothing.

        A ``with`` block closes the handle at its end, however it is left.  Where Ctrl-C
        comes while it waits, it waits on for what is in flight; a second Ctrl-C ends that.
        """
        self.require_started()
        self.open = False
        self.core.drain_until(-1)
        self.core.collect()
        CALLER.await_calls(self.core, -1)
        _live.discard(self)
        self.core.stop()

    def __enter__(self):
        if self.closed:
            raise ValueError("the handle is closed")
        return self

    def __exit__(self, *exc_info):
        try:
            self.close()
        except BaseException:
            # Nobody else could close it: Ctrl-C is raised when nothing is in flight any
            # more, and a second one at once.
            self.close()
            raise

    async def __aenter__(self):
        return self.__enter__()

    async def __aexit__(self, *exc_info):
        """Close the handle as ``with`` does, while an asyncio event loop goes on.

        Raises
        ------
        asyncio.CancelledError
            The task was cancelled meanwhile, however often: when the handle is closed.

        Notes
        -----
        Waits for what is in flight without a thread; only then ``close`` runs in the loop's
        default executor, to wait for callbacks and to stop the workers.
        """
        from nvmeio._events.event_loop import close
        self.require_started()
        self.open = False
        await close(self.core, self.close)

    def __getattr__(self, name):
        hint = "; nvmeio.aio_handle has it" if name in _OF_THE_OP else ""
        raise AttributeError(f"a Handle has no attribute {name!r}{hint}")

    def __reduce__(self):
        self.require_started()
        # What a subclass keeps in its instances goes along.
        state = getattr(self, "__dict__", None)
        return _restore, (type(self), self.options, self.closed), state or None

    def __repr__(self):
        self.require_started()
        return (
            f"<nvmeio.Handle engine={self.engine} block_size={self.block_size} "
            f"queue_depth={self.queue_depth} workers={self.workers} "
            + ("closed>" if self.closed else f"pending={self.pending}>")
        )

    def _repr_html_(self):
        """Return a table for a notebook: the options, and what stats() returns."""
        self.require_started()
        options = {name: getattr(self, name) for name in _DEFAULTS}
        rows = {**options, "closed": self.closed, "pending": self.pending, **self.stats()}
        return html_table(f"nvmeio.{type(self).__name__}", rows)

    # From here on, what the methods above have in common.

    cdef object transfer(self, nvmeio_op op, object buffer, object file, object offset):
        return wait_or_cancel(self.begin(op, buffer, file, offset, False, True, None))

    cdef Request begin(
        self, nvmeio_op op, object buffer, object file, object offset, bint validate,
        bint waited_for, object after
    ):
        cdef int64_t position = file_position("offset", offset)
        cdef Buffer lent
        cdef Request request
        cdef File opened
        self.require_open()
        # The memory first: a buffer that cannot be lent must not leave an empty file.
        try:
            lent = lend(buffer, op == OP_READ)
        except TypeError:
            refuse_missing(buffer=buffer)
            refuse_path(buffer)
            raise
        if position > INT64_MAX - lent.nbytes:
            raise ValueError(
                f"offset is {position} for {lent.nbytes} bytes; together they must not be "
                "beyond 2**63 - 1"
            )
        ragged = (position | lent.nbytes) & PAGE_MASK != 0
        if isinstance(file, File) and not ragged:
            opened = file
        else:
            opened = self.files.find(file, op == OP_WRITE, ragged)
        if lent.stage is None:
            request = new_request(op, lent, opened, position, validate)
        else:
            request = new_staged(op, lent, opened, position, validate)
        return self.launch(request, waited_for, after)

    cdef Request begin_many(self, nvmeio_op op, object items, object after):
        cdef ManyRequest request
        cdef Buffer lent
        cdef Py_ssize_t index
        self.require_open()
        # All of the memory first, so that what is refused leaves no empty files.
        request = new_many(op, items)
        # A path is looked at once a call; it takes 1.5 us (2026-11-23).
        found = {}
        for index in range(len(request.buffers)):
            lent = request.buffers[index]
            ragged = (<int64_t> request.offsets[index] | lent.nbytes) & PAGE_MASK != 0
            file = request.files[index]
            if isinstance(file, File) and not ragged:
                continue
            key = file if type(file) in (str, int) else id(file), ragged
            if key in found:
                request.files[index] = found[key]
                continue
            try:
                known = self.files.find(file, op == OP_WRITE, ragged)
            except OSError as error:
                words = f"{error.strerror} (items[{index}])"
                raise OSError(error.errno, words, error.filename) from error
            except (TypeError, ValueError) as error:
                raise type(error)(f"items[{index}]: {error}") from error
            request.files[index] = found[key] = known
        return self.launch(request, False, after)

    cdef Request begin_gather(
        self, nvmeio_op op, object file, object offsets, object sizes, object memory,
        object places, object max_gap, object result, object after
    ):
        cdef GatherRequest request
        if (
            file is MISSING or offsets is MISSING or sizes is MISSING or memory is MISSING
        ):
            last = "out" if op == OP_READ else "buffer"
            refuse_missing(file=file, offsets=offsets, sizes=sizes, **{last: memory})
        self.require_open()
        request = new_gather(op, offsets, sizes, memory, places, max_gap, result)
        # What is refused must not leave an empty file.
        if op == OP_WRITE and not isinstance(file, (int, File)):
            request.check_records()
        request.aim(self.files.find(file, op == OP_WRITE, True))
        return self.launch(request, False, after)

    cdef Request launch(self, Request request, bint waited_for, object after):
        """Start a request that is filled in."""
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
            # It is in nobody's way.
            if request.c == NULL:
                request.finished = True
            raise
        return request

    cdef int require_open(self) except -1:
        self.require_started()
        self.core.collect()
        if not self.open:
            raise ValueError("the handle is closed")
        return 0

    cdef int require_started(self) except -1:
        if self.core is None:
            raise ValueError("the handle was never opened")
        return 0


hide_unknown(Handle)


cdef bint _ending = False


cdef Handle new_handle(dict options):
    cdef Handle handle = Handle.__new__(Handle)
    handle.start(options)
    return handle


def _restore(kind, options, closed):
    """Make a handle from what pickling carried; a subclass's __init__() is not called."""
    cdef Handle handle = kind.__new__(kind)
    handle.start(options)
    if closed:
        handle.close()
    return handle


def _drain_at_exit():
    """Let no I/O outlive the interpreter, which frees the memory it goes to."""
    global _ending
    _ending = True
    for handle in list(_live):
        # A thread that goes on submitting would keep it busy for ever.
        (<Handle> handle).open = False
        handle.drain()


atexit.register(_drain_at_exit)
