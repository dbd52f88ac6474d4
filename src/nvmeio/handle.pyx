"""aio_handle: submitter.pyx with the methods, names and statuses of DeepSpeed's op."""

import logging
import operator

cimport cython

from nvmeio._core cimport BLOCK_BYTES_MAX, LANES_MAX, QUEUE_DEPTH_MAX, OP_READ, OP_WRITE
from nvmeio.file cimport direct_option
from nvmeio.request cimport Request
from nvmeio.submitter cimport Submitter

from nvmeio._contract import pread_arguments
from nvmeio._environment import setting
from nvmeio._locked import free_locked, is_locked, new_locked
from nvmeio.lanes import BOUNCES as _BOUNCES
from nvmeio.lanes import ENGINES as _ENGINES

_log = logging.getLogger("nvmeio")


# A cycle collector would empty the attributes before __dealloc__ drains the lanes.
@cython.no_gc_clear
cdef class aio_handle(Submitter):
    """aio_handle(block_size=1048576, queue_depth=128, single_submit=False,
        overlap_events=False, intra_op_parallelism=1, *, engine="auto", direct="auto",
        bounce="auto", errors="raise")
--

    Moves arrays and tensors to and from files, many at once.

    Parameters
    ----------
    block_size : int, default 1048576
        The largest I/O in bytes, 1 to 1 GiB; rounded up to whole pages inside.  Where it
        is not passed, ``NVMEIO_BLOCK_SIZE`` of the environment counts.
    queue_depth : int, default 128
        Blocks in flight in each lane, 1 to 32768; else ``NVMEIO_QUEUE_DEPTH``.
    single_submit : bool, default False
        Hand blocks to the kernel one by one, not in batches.
    overlap_events : bool, default False
        Refill the queue after every completion, not when the batch in flight is done.
    intra_op_parallelism : int, default 1
        Lanes, threads with an engine each, that share every request; 1 to 256.
    engine : {"auto", "io_uring", "libaio", "threads", "sync"}, default "auto"
        How blocks are carried out.  "auto" takes ``NVMEIO_ENGINE`` from the environment,
        or else the first that works here.
    direct : {"auto", True, False}, default "auto"
        Whether files that are opened by path or descriptor bypass the page cache: where
        the file system can, always (else OSError(EINVAL)), or never.
    bounce : {"auto", "always", "never"}, default "auto"
        Whether data passes through the pool's memory: where the device cannot reach the
        caller's, always, or never (then the page cache serves).
    errors : {"raise", "status"}, default "raise"
        Raise OSError, or log it, keep it in ``last_error`` and return -1.

    Attributes
    ----------
    last_error : OSError or None
        With ``errors="status"``, the latest.

    Raises
    ------
    ValueError
        A value is out of its limits or unknown.
    OSError
        The engine that was asked for does not work here; says why.

    Notes
    -----
    Thread-safe; every call that blocks releases the GIL.  A handle can be pickled, which
    carries its configuration, and used in forked children, where it starts lanes of its
    own.  Arguments and methods up to ``is_pinned`` are those of DeepSpeed's op.

    ``file`` and ``filename`` are everywhere a path, an open descriptor or a ``File``.
    Writes create the file where it does not exist and never truncate it.
    """

    def __init__(
        self,
        block_size=None,
        queue_depth=None,
        single_submit=False,
        overlap_events=False,
        intra_op_parallelism=1,
        *,
        engine="auto",
        direct="auto",
        bounce="auto",
        errors="raise",
    ):
        if self.lanes is not None:
            raise ValueError("the handle is open already; make another")
        block_size = setting(block_size, "NVMEIO_BLOCK_SIZE", 1 << 20)
        queue_depth = setting(queue_depth, "NVMEIO_QUEUE_DEPTH", 128)
        self.options = {
            "block_size": limited("block_size", block_size, BLOCK_BYTES_MAX),
            "queue_depth": limited("queue_depth", queue_depth, QUEUE_DEPTH_MAX),
            "single_submit": bool(single_submit),
            "overlap_events": bool(overlap_events),
            "intra_op_parallelism": limited(
                "intra_op_parallelism", intra_op_parallelism, LANES_MAX
            ),
            "engine": one_of("engine", engine, _ENGINES),
            "direct": direct,
            "bounce": one_of("bounce", bounce, _BOUNCES),
            "errors": one_of("errors", errors, ("raise", "status")),
        }
        c_direct = direct_option(direct)
        self.status = errors == "status"
        self.start(self.options, c_direct)

    # The contract's getters.

    def get_block_size(self) -> int:
        """Return the block size in bytes, as it was passed."""
        return self.options["block_size"]

    def get_queue_depth(self) -> int:
        """Return the depth of each lane's queue in blocks."""
        return self.options["queue_depth"]

    def get_single_submit(self) -> bool:
        """Return whether blocks are submitted one by one."""
        return self.options["single_submit"]

    def get_overlap_events(self) -> bool:
        """Return whether the queue is refilled after every completion."""
        return self.options["overlap_events"]

    def get_intra_op_parallelism(self) -> int:
        """Return the number of lanes."""
        return self.options["intra_op_parallelism"]

    def get_alignment(self) -> int:
        """Return 512 times the number of lanes, as DeepSpeed's op does.

        Nothing has to be aligned to it; ``File.alignment`` is the device's true value.
        """
        return 512 * self.options["intra_op_parallelism"]

    # The contract's transfers.

    def read(self, buffer, filename, validate=False, file_offset=0) -> int:
        """Read a file into ``buffer``, and wait.

        Parameters
        ----------
        buffer : array, tensor or object with the buffer protocol
            Is filled.
        filename : str, bytes, os.PathLike, int or File
            The file, which must hold ``file_offset`` plus the buffer's size bytes.
        validate : bool, default False
            Compare with an ordinary read afterwards.
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
            finds a difference, and what the system says.
        """
        return self._now(OP_READ, buffer, filename, file_offset, validate, 0)

    def write(self, buffer, filename, validate=False, file_offset=0) -> int:
        """Write ``buffer`` to a file, and wait.  As ``read``; does not truncate."""
        return self._now(OP_WRITE, buffer, filename, file_offset, validate, 0)

    def sync_pread(self, buffer, filename, file_offset=0) -> int:
        """Read as ``read`` does; returns 1, or -1 with ``errors="status"``."""
        return self._now(OP_READ, buffer, filename, file_offset, False, 1)

    def sync_pwrite(self, buffer, filename, file_offset=0) -> int:
        """Write as ``write`` does; returns 1, or -1 with ``errors="status"``."""
        return self._now(OP_WRITE, buffer, filename, file_offset, False, 1)

    def async_pread(self, buffer, filename, file_offset=0) -> int:
        """Start a read that ``wait()`` waits for.

        Parameters
        ----------
        buffer, filename, file_offset
            As for ``submit_read``.

        Returns
        -------
        int
            0, or -1 with ``errors="status"`` where the file cannot be opened.
        """
        return self._later(OP_READ, buffer, filename, file_offset, False)

    def async_pwrite(self, buffer, filename=None, file_offset=0, *, fd=None) -> int:
        """Start a write that ``wait()`` waits for.

        Parameters
        ----------
        buffer, filename, file_offset
            As for ``submit_write``.
        fd : int, optional
            An open descriptor, in place of ``filename``.

        Returns
        -------
        int
            0, or -1 with ``errors="status"`` where the file cannot be opened.
        """
        if (filename is None) == (fd is None):
            raise TypeError("async_pwrite() takes either filename or fd")
        file = filename if fd is None else operator.index(fd)
        return self._later(OP_WRITE, buffer, file, file_offset, False)

    def pread(self, *args, **kwargs) -> int:
        """Read: ``pread(buffer, filename, validate, async, file_offset=0)``.

        ``async`` is a keyword of Python: pass it by position, or as ``**{"async": True}``.

        Returns
        -------
        int
            0 where it is asynchronous (``wait()`` waits for it), else 1; -1 for an error
            with ``errors="status"``.
        """
        return self._either(OP_READ, "pread", args, kwargs)

    def pwrite(self, *args, **kwargs) -> int:
        """Write: ``pwrite(buffer, filename, validate, async, file_offset=0)``."""
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

        Notes
        -----
        Releases the GIL.  Requests of ``submit_*`` are not waited for.
        """
        self.own()
        with cython.critical_section(self):
            tracked = self.tracked
            self.tracked = []
        try:
            # The last one first: the others are mostly done by then, and wake nobody.
            for request in reversed(tracked):
                (<Request> request).poll_for(None)
        except BaseException:
            # Interrupted: they are still to be waited for.
            with cython.critical_section(self):
                self.tracked = tracked + self.tracked
            raise
        self.collect()
        first = None
        for request in tracked:
            (<Request> request).told = True
            if first is None:
                first = (<Request> request).error
        return len(tracked) if first is None else self._failed(first)

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
        example_tenosr
            DeepSpeed's spelling of it.

        Returns
        -------
        torch.Tensor or numpy.ndarray
            One-dimensional, not initialized; page-aligned, populated, in huge pages where
            the system has them, and locked where RLIMIT_MEMLOCK allows it.

        Raises
        ------
        MemoryError, TypeError, ValueError
            There is not enough; no example of a dtype; a negative number.
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
            True the first time, then False; False for what is not ours.  ``is_pinned`` is
            False from now on; the memory goes back when the last view has died.

        Raises
        ------
        ValueError
            A request in flight uses the memory.
        """
        # Requests that are done, and that nobody has looked at, still hold their memory.
        self.collect()
        return free_locked(tensor)

    def is_pinned(self, buffer) -> bool:
        """Tell whether memory is pinned: by torch, or any part of one of ours."""
        return is_locked(buffer)

    def __reduce__(self):
        return _restore, (self.options,)

    def __repr__(self):
        self.own()
        options = self.options
        return (
            f"<nvmeio.aio_handle engine={self.lanes.engine()} "
            f"block_size={options['block_size']} queue_depth={options['queue_depth']} "
            f"intra_op_parallelism={options['intra_op_parallelism']} "
            + ("closed>" if self.closed else f"pending={self.pending}>")
        )

    def _now(self, op, buffer, filename, file_offset, validate, done):
        """Transfer and wait; returns ``done``, or what an error comes to."""
        cdef Request request
        try:
            request = self.begin(op, buffer, filename, file_offset, validate, True)
            request.wait()
        except OSError as error:
            return self._failed(error)
        finally:
            self.collect()
        return done

    def _later(self, op, buffer, filename, file_offset, validate):
        """Start what wait() waits for; returns 0, or what an error comes to."""
        try:
            request = self.begin(op, buffer, filename, file_offset, validate, False)
        except OSError as error:
            return self._failed(error)
        with cython.critical_section(self):
            self.tracked.append(request)
        return 0

    def _either(self, op, name, args, kwargs):
        """pread and pwrite."""
        buffer, filename, validate, later, file_offset = pread_arguments(name, args, kwargs)
        if later:
            return self._later(op, buffer, filename, file_offset, validate)
        return self._now(op, buffer, filename, file_offset, validate, 1)

    def _failed(self, error):
        """Raise an error, or return the status that stands for it."""
        if not self.status or not isinstance(error, OSError):
            raise error
        self.last_error = error
        _log.error("%s", error)
        return -1


cdef object limited(str name, object value, unsigned long limit):
    """Return an integer from 1 to a limit, or raise."""
    value = operator.index(value)
    if not 1 <= value <= limit:
        raise ValueError(f"{name} is {value}; it must be from 1 to {limit}")
    return value


cdef object one_of(str name, object value, object values):
    """Return a value that is one of several, or raise."""
    if value not in values:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(values)}")
    return value


def _restore(options):
    """Make a handle from what pickling carried."""
    return aio_handle(**options)
