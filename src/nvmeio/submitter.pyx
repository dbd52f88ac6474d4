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
from nvmeio.arguments cimport deadline_ns, flag, file_position, refuse_path
from nvmeio.buffer cimport Buffer, lend
from nvmeio.workers cimport start_workers
from nvmeio.many cimport ManyRequest, new_many
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

    def submit_read(self, buffer, file, file_offset=0, *, after=None) -> Request:
        """Start reading a file into ``buffer``.

        Parameters
        ----------
        buffer : array, tensor or object with the buffer protocol
            Is filled; of any dtype, shape and strides.
        file : str, bytes, os.PathLike, int or File
            A path, an open descriptor or a File.
        file_offset : int, default 0
            Where in the file to begin, in bytes.
        after : Request or iterable of Request, optional
            Of this handle: starts when all of them are done, and looks at the file only
            then, so that a read may follow the write that makes the file.  Where one of
            them has failed or was cancelled, so does this request, with that error as its
            cause, and nothing of it is carried out.

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
            range, the handle or the file is closed, or ``after`` cannot be kept: it is of
            another handle, or bytes pass through Python on the way, as those of strided
            arrays and tensors on devices do.

        Notes
        -----
        Not ordered but by ``after``: a read of what a write in flight is about to change
        may see the old bytes.
        """
        return self.begin(OP_READ, buffer, file, file_offset, False, False, after)

    def submit_write(self, buffer, file, file_offset=0, *, after=None) -> Request:
        """Start writing ``buffer`` to a file.

        Parameters
        ----------
        buffer : array, tensor or object with the buffer protocol
            Written in C order; must not change until the request is done.
        file : str, bytes, os.PathLike, int or File
            As for ``submit_read``; created where it does not exist, never truncated.
        file_offset : int, default 0
            Where in the file to begin, in bytes.
        after : Request or iterable of Request, optional
            As for ``submit_read``.

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
        Not ordered but by ``after``: of two writes in flight to the same place either may
        be the last, and a read may see the old bytes.  ``submit_fsync`` alone waits for
        the writes before it.
        """
        return self.begin(OP_WRITE, buffer, file, file_offset, False, False, after)

    def submit_fsync(self, file, *, data_only=False, after=None) -> Request:
        """Start making a file durable.

        Parameters
        ----------
        file : str, bytes, os.PathLike, int or File
            As for ``submit_read``.
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
            The file cannot be opened, whatever ``errors`` of the handle says.  What fails
            later is raised by ``Request.wait``.
        TypeError, ValueError
            ``file`` is nothing that names a file, ``data_only`` is no boolean, or the file
            or the handle is closed.
        """
        cdef bint data = flag("data_only", data_only)
        cdef Request request = self.prepare(OP_FSYNC, None, file, 0, False, after)
        request.data_only = data
        request.start(self.workers.c)
        return request

    def submit_read_many(self, items, *, after=None) -> Request:
        """Start reading into many buffers, of one file or several, as one request.

        Parameters
        ----------
        items : iterable of (buffer, file, offset)
            Each as the arguments of ``submit_read``.
        after : Request or iterable of Request, optional
            As for ``submit_read``.

        Returns
        -------
        Request
            Whose ``wait()`` returns the bytes of all of them.

        Raises
        ------
        OSError
            A file cannot be opened.  What fails later is raised by ``Request.wait``:
            GatherError, which names the items; the others have landed.
        TypeError, ValueError
            As ``submit_read``, before anything is started; names the item.

        Notes
        -----
        Many small requests cost less so: one call, one hand-over and one completion.  The
        items are not ordered among each other.
        """
        return self.begin_many(OP_READ, items, after)

    def submit_write_many(self, items, *, after=None) -> Request:
        """Start writing many buffers, to one file or several, as one request.

        Parameters
        ----------
        items : iterable of (buffer, file, offset)
            Each as the arguments of ``submit_write``.
        after : Request or iterable of Request, optional
            As for ``submit_read``.

        Returns
        -------
        Request
            As ``submit_read_many``.

        Raises
        ------
        OSError, TypeError, ValueError
            As ``submit_read_many``.
        """
        return self.begin_many(OP_WRITE, items, after)

    def read_many(self, items) -> int:
        """Read into many buffers, and wait: see ``submit_read_many``.

        Parameters
        ----------
        items : iterable of (buffer, file, offset)
            As for ``submit_read_many``.

        Returns
        -------
        int
            The bytes of all of them.

        Raises
        ------
        OSError, TypeError, ValueError
            As ``submit_read_many``, and GatherError, whatever ``errors`` of the handle
            says.
        KeyboardInterrupt
            Ctrl-C, as for ``fsync``.
        """
        return wait_or_cancel(self.begin_many(OP_READ, items, None))

    def write_many(self, items) -> int:
        """Write many buffers, and wait: see ``submit_write_many``.

        Parameters
        ----------
        items : iterable of (buffer, file, offset)
            As for ``submit_write_many``.

        Returns
        -------
        int
            The bytes of all of them.

        Raises
        ------
        OSError, TypeError, ValueError, KeyboardInterrupt
            As ``read_many``.
        """
        return wait_or_cancel(self.begin_many(OP_WRITE, items, None))

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

    def drain(self, timeout_s=None) -> None:
        """Wait until nothing is in flight.

        Parameters
        ----------
        timeout_s : float, optional
            How long, in seconds; None waits as long as it takes.

        Raises
        ------
        TimeoutError
            The time is over; what is in flight goes on.
        TypeError, ValueError
            ``timeout_s`` is no number, or negative; or the handle was never opened.
        KeyboardInterrupt
            Ctrl-C, within 0.1 s; what is in flight goes on.

        Notes
        -----
        Waits also for what other threads submit meanwhile.  What has failed is raised by
        ``Request.wait`` of each.  Releases the GIL.
        """
        self.own()
        if not self.workers.drain_until(deadline_ns(timeout_s)):
            raise TimeoutError(f"{self!r} was not done within {timeout_s} s; it goes on")
        self.collect()

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
        self.workers.drain_until(-1)
        self.collect()
        _live.discard(self)
        self.workers.stop()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()

    cdef Request begin(
        self, nvmeio_op op, object buffer, object file, object file_offset, bint validate,
        bint waited_for, object after
    ):
        cdef Request request
        request = self.prepare(op, buffer, file, file_offset, validate, after)
        # One of a device tensor has begun already.
        if not request.is_begun() and not (
            waited_for and request.perform(self.workers.c)
        ):
            request.start(self.workers.c)
        return request

    cdef Request prepare(
        self, nvmeio_op op, object buffer, object file, object file_offset, bint validate,
        object after
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
            if after is not None:
                raise TypeError(
                    "after= takes no tensor on a device, whose bytes pass through Python; "
                    "wait for what it is to come after"
                )
            return new_staged(op, lent, opened, offset, validate, self.workers)
        request = new_request(op, lent, opened, offset, validate)
        request._workers = self.workers
        request.come_after(after, self.workers)
        return request

    cdef Request begin_many(self, nvmeio_op op, object items, object after):
        cdef ManyRequest request = new_many(op, self.workers)
        cdef Buffer lent
        self.own()
        self.collect()
        if not self.open:
            raise ValueError("the handle is closed")
        # All of the memory first, so that what is refused leaves no empty files.
        offsets = [request.add(index, item) for index, item in enumerate(items)]
        for file, offset, index in zip(request.files, offsets, range(len(offsets))):
            lent = request.buffers[index]
            ragged = (<int64_t> offset | lent.nbytes) & PAGE_MASK != 0
            request.files[index] = self.files.find(file, op == OP_WRITE, ragged)
        request.offsets = offsets
        request.come_after(after, self.workers)
        request.start(self.workers.c)
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


def _drain_at_exit():
    """Let no I/O outlive the interpreter, which frees the memory it goes to."""
    for handle in list(_live):
        # A thread that goes on submitting would keep it busy for ever.
        (<Submitter> handle).open = False
        handle.drain()


atexit.register(_drain_at_exit)
