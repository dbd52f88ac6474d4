"""What every handle can do: submit requests, count them, drain them, close.

Arguments are checked here; a transfer's own life is request.pyx's, its memory buffer.pyx's,
its file openfiles.pyx's, the workers that carry it out workers.pyx's.
"""

import atexit
import weakref

cimport cython
from libc.stdint cimport INT64_MAX, int64_t

from nvmeio cimport _core
from nvmeio._core cimport OP_FSYNC, OP_READ, OP_WRITE, nvmeio_direct, nvmeio_op
from nvmeio.arguments cimport flag, file_position, refuse_path
from nvmeio.buffer cimport Buffer, lend
from nvmeio.workers cimport start_workers
from nvmeio.openfiles cimport new_open_files
from nvmeio.request cimport Request, new_request, wait_or_cancel
from nvmeio.staged cimport new_staged

from nvmeio.latencies import Latencies

# Handles to be drained before the interpreter goes away.
_live = weakref.WeakSet()

# Of what is not whole pages the ends may go through the page cache.
cdef int64_t PAGE_MASK = 4095


# A cycle collector would empty the attributes before __dealloc__ drains the workers.
@cython.no_gc_clear
cdef class Submitter:
    """Workers, the files and requests that are in flight, and what starts and ends them."""

    cdef int start(self, dict options, nvmeio_direct direct) except -1:
        self.tracked = []
        self.generation = _core.fork_generation()
        self.workers = start_workers(options)
        self.files = new_open_files(self.workers, direct)
        self.open = True
        _live.add(self)
        return 0

    def __dealloc__(self):
        if self.workers is not None:
            self.workers.stop()

    def submit_read(self, buffer, file, file_offset=0) -> Request:
        """Start reading a file into ``buffer``.

        Parameters
        ----------
        buffer : array, tensor or object with the buffer protocol
            Is filled; of any dtype, shape and strides.
        file : str, bytes, os.PathLike, int or File
            A path, an open descriptor or a File.
        file_offset : int, default 0
            Where in the file to begin, in bytes.

        Returns
        -------
        Request
            Holds buffer and file until it is done.

        Raises
        ------
        OSError
            The file cannot be opened, whatever ``errors`` of the handle says.  What fails
            later is raised by ``Request.wait``: OSError(ENODATA) where the file ends
            before the buffer is full.
        TypeError, ValueError
            The buffer cannot be read into, an argument is of the wrong type or out of
            range, or the handle or the file is closed.

        Notes
        -----
        Not ordered after other requests: a read of what a write in flight is about to
        change may see the old bytes.  Wait for the write first.
        """
        return self.begin(OP_READ, buffer, file, file_offset, False, False)

    def submit_write(self, buffer, file, file_offset=0) -> Request:
        """Start writing ``buffer`` to a file.

        Parameters
        ----------
        buffer : array, tensor or object with the buffer protocol
            Written in C order; must not change until the request is done.
        file : str, bytes, os.PathLike, int or File
            As for ``submit_read``; created where it does not exist, never truncated.
        file_offset : int, default 0
            Where in the file to begin, in bytes.

        Returns
        -------
        Request
            Holds buffer and file until it is done.

        Raises
        ------
        OSError, TypeError, ValueError
            As ``submit_read``.

        Notes
        -----
        Not ordered after other requests: of two writes in flight to the same place either
        may be the last, and a read may see the old bytes.  ``submit_fsync`` alone waits
        for the writes before it.
        """
        return self.begin(OP_WRITE, buffer, file, file_offset, False, False)

    def submit_fsync(self, file, *, data_only=False) -> Request:
        """Start making a file durable.

        Parameters
        ----------
        file : str, bytes, os.PathLike, int or File
            As for ``submit_read``.
        data_only : bool, default False
            Sync the data and the size, but not the times, mode and owner of the file, as
            fdatasync(2) does: one write of the device less where nothing else has changed.

        Returns
        -------
        Request
            Done when every write to the file that was submitted to this handle before,
            and everything else that is in the page cache, has reached the device.

        Raises
        ------
        OSError
            The file cannot be opened, whatever ``errors`` of the handle says.  What fails
            later is raised by ``Request.wait``.
        TypeError, ValueError
            ``file`` is nothing that names a file, ``data_only`` is no boolean, or the file
            or the handle is closed.
        """
        cdef bint data = flag("data_only", data_only)
        cdef Request request = self.prepare(OP_FSYNC, None, file, 0, False)
        request.data_only = data
        request.start(self.workers.c)
        return request

    def fsync(self, file, *, data_only=False) -> None:
        """Make a file durable, and wait: ``submit_fsync(file).wait()``.

        Parameters
        ----------
        file : str, bytes, os.PathLike, int or File
            As for ``submit_read``.
        data_only : bool, default False
            As for ``submit_fsync``.

        Raises
        ------
        OSError
            The file cannot be opened, or the device failed; whatever ``errors`` of the
            handle says.
        TypeError, ValueError
            As ``submit_fsync``.
        KeyboardInterrupt
            Ctrl-C, when the device has answered; a second one within 0.1 s.

        Notes
        -----
        Releases the GIL while it waits.  A new file's name is durable only when its folder
        was synced too; ``write_file(..., sync=True)`` does both.
        """
        wait_or_cancel(self.submit_fsync(file, data_only=data_only))

    @property
    def pending(self) -> int:
        """How many requests are in flight, the pieces of device tensors included."""
        self.own()
        # Counted first: what is not in flight any more has landed when this returns.
        count = self.workers.pending()
        self.collect()
        return count + len(self.workers.staged)

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
        self.own()
        return {"engine": self.workers.engine(), **self.workers.stats()}

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
        self.own()
        return Latencies(*self.workers.latencies())

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
        Releases the GIL while it waits.  A second call does nothing.
        """
        self.own()
        self.open = False
        self.drain()
        _live.discard(self)
        self.workers.stop()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()

    cdef Request begin(
        self, nvmeio_op op, object buffer, object file, object file_offset, bint validate,
        bint waited_for
    ):
        cdef Request request = self.prepare(op, buffer, file, file_offset, validate)
        # One of a device tensor has begun already.
        if not request.is_begun() and not (
            waited_for and request.perform(self.workers.c)
        ):
            request.start(self.workers.c)
        return request

    cdef Request prepare(
        self, nvmeio_op op, object buffer, object file, object file_offset, bint validate
    ):
        cdef int64_t offset = file_position("file_offset", file_offset)
        cdef Buffer lent = None
        cdef Request request
        self.own()
        self.collect()
        if not self.open:
            raise ValueError("the handle is closed")
        # The memory first: a buffer that cannot be lent must not leave an empty file.
        if op != OP_FSYNC:
            try:
                lent = lend(buffer, op == OP_READ)
            except TypeError:
                refuse_path(buffer)
                raise
            if offset > INT64_MAX - lent.nbytes:
                raise ValueError(
                    f"file_offset is {offset} for {lent.nbytes} bytes; together they must "
                    "not be beyond 2**63 - 1"
                )
        ragged = lent is not None and (offset | lent.nbytes) & PAGE_MASK != 0
        opened = self.files.find(file, op == OP_WRITE, ragged)
        if lent is not None and lent.stage is not None:
            return new_staged(op, lent, opened, offset, validate, self.workers)
        request = new_request(op, lent, opened, offset, validate)
        request._workers = self.workers
        return request

    cdef int own(self) except -1:
        """In a forked child, forget the requests of the parent."""
        if self.workers is None:
            raise ValueError("the handle was never opened")
        generation = _core.fork_generation()
        if self.generation != generation:
            self.generation = generation
            self.tracked = []
            self.files.shared.clear()
        return 0

    cdef int collect(self) except -1:
        """Let go of the requests that are done, observed or not."""
        if self.workers is not None:
            self.workers.collect()
        return 0

    cdef int drain(self) except -1:
        """Wait until nothing is in flight, looking at signals meanwhile."""
        self.own()
        self.workers.drain()
        self.collect()
        return 0


def _drain_at_exit():
    """Let no I/O outlive the interpreter, which frees the memory it goes to."""
    for handle in list(_live):
        # A thread that goes on submitting would keep it busy for ever.
        (<Submitter> handle).open = False
        (<Submitter> handle).drain()


atexit.register(_drain_at_exit)
