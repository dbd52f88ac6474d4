"""aio_handle: its options, its locked tensors, and how it is copied.

What it does with files is transfers.pyx's and submitter.pyx's.
"""

cimport cython

from nvmeio.file cimport direct_option
from nvmeio.transfers cimport Transfers

from nvmeio._locked import free_locked, is_locked, new_locked
from nvmeio._options import aio_handle as checked_options
from nvmeio._options import profile_arguments


# A cycle collector would empty the attributes before __dealloc__ drains the workers.
@cython.no_gc_clear
cdef class aio_handle(Transfers):
    """aio_handle(block_size=1048576, queue_depth=128, single_submit=False,
        overlap_events=False, intra_op_parallelism=1, *, engine="auto", direct="auto",
        bounce="auto", errors="raise")
--

    Moves arrays and tensors to and from files, many at once.

    Parameters
    ----------
    block_size : int, default 1048576
        The largest I/O in bytes, 1 to 1 GiB; rounded up to whole pages inside.  What makes
        a file longer is written one block after another, and these are larger.  Where it
        is not passed, or None, ``NVMEIO_BLOCK_SIZE`` of the environment counts.
    queue_depth : int, default 128
        Blocks in flight in each worker, 1 to 32768; else ``NVMEIO_QUEUE_DEPTH``.
    single_submit : bool, default False
        Hand blocks to the kernel one by one, not in batches.
    overlap_events : bool, default False
        Accepted and reported, because DeepSpeed has it; it changes nothing.  The queue is
        refilled after every completion.
    intra_op_parallelism : int, default 1
        Workers, threads with an engine each, that share every request; 1 to 256.
    engine : {"auto", "io_uring", "libaio", "threads", "sync"}, default "auto"
        How blocks are carried out.  "auto" takes ``NVMEIO_ENGINE`` from the environment,
        or else the first that works here.
    direct : {"auto", True, False}, default "auto"
        Whether files that are opened by path or descriptor bypass the page cache: where
        the file system can, always (else OSError(EINVAL)), or never.
    bounce : {"auto", "always", "never"}, default "auto"
        Whether data passes through the pool's memory: where the device cannot reach the
        caller's or may be slow to, for it is in small pages; always; or never (then the
        page cache serves where the device cannot).
    errors : {"raise", "status"}, default "raise"
        Raise OSError, or log it, keep it in ``last_error`` and return -1.  ``submit_*``
        and ``fsync`` raise whatever this says.

    Attributes
    ----------
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

    Notes
    -----
    Where ``NVMEIO_PROFILE`` is set, what is neither passed nor set by the environment comes
    from a profile that ``nvmeio tune`` saved, from what was best for reading and writing
    alike: "auto" takes the only profile there is, or of several that of the device on which
    the current folder lies, or the defaults where it has none; an absolute path takes that
    of the device on which it lies.  See ``from_profile`` for one handle alone.

    Thread-safe; every call that blocks releases the GIL.  A handle can be pickled and
    copied, which carries its configuration and what a subclass keeps in ``__dict__``, and
    used in forked children, where it starts workers of its own.  The first five
    arguments of the constructor, the getters, the transfers from ``read`` to ``wait`` and
    the locked tensors are those of DeepSpeed's op.

    ``file`` and ``filename`` are everywhere a path, an open descriptor or a ``File``.
    Writes create the file where it does not exist and never truncate it.

    Requests are not ordered among each other: a read that is submitted after a write to
    the same place may see the old bytes, unless the write was waited for.  ``fsync`` alone
    waits for the writes that were submitted before it.

    Leaving a ``with`` block waits for everything in flight, also after an exception or
    Ctrl-C; see ``close``.

    The kernel drops the POSIX record locks (``fcntl.lockf``) that a process has on a file
    whenever the process closes a descriptor of it, and so when nvmeio closes its own.
    ``fcntl.flock`` and the locks of open file descriptions are not touched.
    """

    def __init__(self, *args, **kwargs):
        if self.workers is not None:
            raise ValueError("the handle is open already; make another")
        options = checked_options(*args, **kwargs)
        direct = direct_option(options["direct"])
        self.options = options
        self.status = options["errors"] == "status"
        self.start(options, direct)

    @classmethod
    def from_profile(cls, path, *, op="both", **options):
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
            do ``NVMEIO_BLOCK_SIZE``, ``NVMEIO_QUEUE_DEPTH`` and ``NVMEIO_ENGINE``.

        Returns
        -------
        aio_handle
            Of the class that this is called on, whose constructor gets all options by name.

        Raises
        ------
        FileNotFoundError
            There is no profile of the device; names it.
        OSError
            The path may not be looked at, or the profile not be read.
        TypeError, ValueError
            An argument is wrong, as for the constructor, or the profile is broken or of a
            newer nvmeio: says which file, and what in it.

        Notes
        -----
        An engine that does not work in this process gives way to "auto", which is logged.
        Profiles are of this user: see ``nvmeio.profiles``.
        """
        return cls(**profile_arguments(path, op, options))

    # The contract's getters.

    def get_block_size(self) -> int:
        """Return the largest size of an I/O.

        Returns
        -------
        int
            In bytes, as it was passed.
        """
        return self.options["block_size"]

    def get_queue_depth(self) -> int:
        """Return how many blocks each worker keeps in flight.

        Returns
        -------
        int
            In blocks, as it was passed.
        """
        return self.options["queue_depth"]

    def get_single_submit(self) -> bool:
        """Return whether blocks are handed to the kernel one by one.

        Returns
        -------
        bool
            As it was passed.
        """
        return self.options["single_submit"]

    def get_overlap_events(self) -> bool:
        """Return whether the queue is refilled after every completion.

        Returns
        -------
        bool
            As it was passed.
        """
        return self.options["overlap_events"]

    def get_intra_op_parallelism(self) -> int:
        """Return how many workers share every request.

        Returns
        -------
        int
            In threads, as it was passed.
        """
        return self.options["intra_op_parallelism"]

    def get_alignment(self) -> int:
        """Return 512 times the number of workers, as DeepSpeed's op does.

        Returns
        -------
        int
            In bytes.  Nothing has to be aligned to it; ``File.alignment`` is the device's
            true value.
        """
        return 512 * self.options["intra_op_parallelism"]

    # Locked tensors.

    def new_cpu_locked_tensor(
        self, num_elem, example_tensor=None, *, example_tenosr=None
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
        # Requests that are done, and that nobody has looked at, still hold their memory.
        self.collect()
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

    def __reduce__(self):
        # What a subclass keeps in its instances goes along.
        state = getattr(self, "__dict__", None)
        return _restore, (type(self), self.options, self.closed), state or None

    def __repr__(self):
        self.own()
        options = self.options
        return (
            f"<nvmeio.aio_handle engine={self.workers.engine()} "
            f"block_size={options['block_size']} queue_depth={options['queue_depth']} "
            f"intra_op_parallelism={options['intra_op_parallelism']} "
            + ("closed>" if self.closed else f"pending={self.pending}>")
        )


def _restore(kind, options, closed):
    """Make a handle from what pickling carried; a subclass's __init__() is not called."""
    handle = kind.__new__(kind)
    aio_handle.__init__(handle, **options)
    if closed:
        handle.close()
    return handle
