"""Gathers and scatters: many records of a file in one call.

What records are refused and how they fail is records.pyx's; sorting, merging and I/O are
the library's.
"""

import functools
import os
import threading

import numpy

cimport cython
from cpython.buffer cimport PyBUF_WRITE, PyObject_CheckBuffer
from cpython.memoryview cimport PyMemoryView_FromMemory

from nvmeio._core cimport OP_READ, OP_WRITE, nvmeio_op
from nvmeio.arguments cimport refuse_path
from nvmeio.buffer cimport Buffer, lend, library_for
from nvmeio.file cimport File
from nvmeio.records cimport GatherRequest, new_gather
from nvmeio.request cimport Request, wait_or_cancel
from nvmeio.submitter cimport Submitter

from nvmeio.copy import memcpy

# As much as a device delivers in the time of one more I/O, or less (bench_gather.py).
_MAX_GAP = 4096

# Between looking at memory and bringing records to it no other thread may do so; the
# handler of a signal may.
_bringing = threading.RLock()


def _after_fork():
    """Forget the threads of the parent, one of which may have been at it."""
    global _bringing
    _bringing = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


# A cycle collector would empty the attributes before __dealloc__ drains the workers.
@cython.no_gc_clear
cdef class Gatherer(Submitter):
    """A Submitter that also transfers many records of a file in one request."""

    def gather(
        self, file, offsets, sizes, out, *, out_offsets=None, max_gap=_MAX_GAP
    ) -> int:
        """Read many records of a file into ``out``, and wait.

        Parameters
        ----------
        file : str, bytes, os.PathLike, int or File
            A path, an open descriptor or a File.
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
            and path.
        OSError
            The file cannot be opened.  Raised whatever ``errors`` of the handle says, as
            is GatherError.
        TypeError, ValueError
            An array is not of integers; a record is negative, past the end of the file or
            not within ``out``; two records share a place in ``out``: names the first
            record at fault, before anything is read.  Or the handle or the file is closed.
        KeyboardInterrupt
            Ctrl-C, as for ``read``.

        Notes
        -----
        Neighbours in the file become one I/O, and records that are wanted several times
        are read once.  As many blocks as the queue depth are in flight.  Releases the GIL.

        An ``out`` that is strided or on a device is filled by way of a copy of all of it.
        """
        try:
            return wait_or_cancel(
                self.begin_gather(
                    OP_READ, file, offsets, sizes, out, out_offsets, max_gap, None, None
                )
            )
        finally:
            self.collect()

    def submit_gather(
        self, file, offsets, sizes, out, *, out_offsets=None, max_gap=_MAX_GAP,
        result=None, after=None
    ) -> Request:
        """Start reading many records of a file into ``out``.

        Parameters
        ----------
        file, offsets, sizes, out, out_offsets, max_gap
            As for ``gather``; the arrays are not needed once this returns.
        result : object, optional
            What ``Request.result`` and ``wait`` return in place of the number of bytes.
        after : Request or iterable of Request, optional
            As for ``submit_read``.  What is past the end of the file then is no ValueError
            here, but fails.

        Returns
        -------
        Request
            Holds ``out`` and the file until it is done.

        Raises
        ------
        OSError, TypeError, ValueError
            As ``gather``, before anything is read.  GatherError is raised by
            ``Request.wait``.
        """
        return self.begin_gather(
            OP_READ, file, offsets, sizes, out, out_offsets, max_gap, result, after
        )

    def scatter(self, file, offsets, sizes, buffer, *, buffer_offsets=None) -> int:
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
        GatherError, OSError, TypeError, ValueError, KeyboardInterrupt
            As ``gather``.

        Notes
        -----
        Records that follow each other in the file become one I/O.  Releases the GIL.
        """
        try:
            return wait_or_cancel(
                self.begin_gather(
                    OP_WRITE, file, offsets, sizes, buffer, buffer_offsets, 0, None, None
                )
            )
        finally:
            self.collect()

    def submit_scatter(
        self, file, offsets, sizes, buffer, *, buffer_offsets=None, after=None
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
        OSError, TypeError, ValueError
            As ``scatter``, before anything is written.  GatherError is raised by
            ``Request.wait``.
        """
        return self.begin_gather(
            OP_WRITE, file, offsets, sizes, buffer, buffer_offsets, 0, None, after
        )

    cdef Request begin_gather(
        self, nvmeio_op op, object file, object offsets, object sizes, object memory,
        object places, object max_gap, object result, object after
    ):
        cdef Buffer lent
        cdef GatherRequest request
        self.own()
        self.collect()
        if not self.open:
            raise ValueError("the handle is closed")
        # What is refused must not leave an empty file.
        try:
            lent = lend(memory, op == OP_READ)
        except TypeError:
            refuse_path(memory)
            raise
        host = None
        if lent.stage is not None or (op == OP_READ and not lent.is_in_place()):
            # It begins with what the memory holds: a record may be a part of an element.
            host = host_copy(memory)
            lent.release()
            lent = lend(host, op == OP_READ)
        request = new_gather(op, lent, offsets, sizes, places, max_gap, result)
        if host is not None and op == OP_READ:
            lent.landing = functools.partial(
                _bring_back, memory, host, request.nbytes, request.sizes, request.places
            )
        if op == OP_WRITE and not isinstance(file, (int, File)):
            request.check()
        request.aim(self.files.find(file, op == OP_WRITE, True))
        request._workers = self.workers
        request.is_copied = host is not None or not (
            lent.nbytes == 0 or lent.is_in_place()
        )
        request.come_after(after, self.workers)
        request.start(self.workers.c)
        return request


def _bring_back(memory, host, nbytes, sizes, places, source):
    """Copy the records alone: other requests may have changed the rest meanwhile."""
    with _bringing:
        now = host_copy(memory)
        target, staged = bytes_of(now), bytes_of(host)
        if places is None:
            target[:nbytes] = staged[:nbytes]
        else:
            for place, size in numpy.broadcast(places, sizes):
                target[place : place + size] = staged[place : place + size]
        memcpy(memory, now)


cdef object bytes_of(object host):
    """Return the bytes of memory in C order, which must be held."""
    cdef Buffer buffer = lend(host, True)
    if buffer.nbytes == 0:
        return memoryview(bytearray())
    return PyMemoryView_FromMemory(<char *> buffer.address, buffer.nbytes, PyBUF_WRITE)


cdef object host_copy(object memory):
    """Return the contents of an array or tensor in C order in memory of the host."""
    if PyObject_CheckBuffer(memory):
        return numpy.array(memory, order="C")
    host = library_for(memory).host_like(memory)
    memcpy(host, memory)
    return host
