"""Requests for tensors on a device: many small requests, and device copies between them.

The bytes pass through a few pieces of pinned host memory (``buffer.stage``).  The Python
thread that submits a write or waits for a read copies to or from the device, while other
pieces are between host memory and the drive.
"""

from concurrent.futures import CancelledError

cimport cython
from libc.stdint cimport int64_t

from nvmeio._libnvmeio.c_base cimport OP_READ, OP_WRITE, fork_generation, nvmeio_op
from nvmeio._libnvmeio.c_request cimport nvmeio_handle
from nvmeio._native.buffer cimport Buffer, acquire
from nvmeio._native.file cimport File
from nvmeio._native.workers cimport Workers
from nvmeio._native.errors cimport words_of
from nvmeio._native.request cimport Request, fill_request, new_request, wait_and_finish


@cython.no_gc_clear
@cython.final
cdef class StagedRequest(Request):
    """A request that advances piece by piece, in Python, whenever a thread polls it."""

    cdef list begun             # a Request for each piece that was started
    cdef Py_ssize_t done_count  # how many of them are done and delivered
    cdef bint cancelled
    cdef bint closes_file       # the handle opened the file for this request

    cdef int come_after(self, object after, object workers) except -1:
        if after is not None:
            raise TypeError(
                "after= takes no tensor on a device, whose bytes pass through Python; "
                "wait for the requests of after= first"
            )
        return 0

    cdef bint perform(self, nvmeio_handle *handle) except -1:
        return False

    cdef int start(self, nvmeio_handle *handle) except -1:
        cdef Request earlier
        cdef Py_ssize_t index
        count = len(self.buffer.stage.pieces)
        slots = self.buffer.stage.slots
        for index in range(count if self.op == OP_WRITE else min(count, slots)):
            # Reuse a piece of memory once the transfer that used it is done.
            if index >= slots:
                earlier = <Request> self.begun[index - slots]
                earlier.poll_for(None)
                if earlier.error is not None:
                    break
            self.begin_part()
        (<Workers> self._workers).staged.add(self)
        return 0

    cdef bint poll(self, int64_t timeout_ns) except -1:
        if self.finished:
            return True
        self.check_process()
        if self.is_being_finished_here():
            return False
        wait_and_finish(self, timeout_ns)
        return self.finished

    cdef object go_on(self, int64_t timeout_ns):
        try:
            while not self.finished and self.advance(timeout_ns):
                pass
            return None
        except Exception as error:
            first = error
        # Try again: an error of the device or of torch repeats itself, one that a signal
        # handler raised does not.
        try:
            self.advance(timeout_ns)
            return first
        except Exception as second:
            # end() waits for the pieces in flight.
            self.end(second)
            return None

    cdef bint advance(self, int64_t timeout_ns) except -1:
        """Start pieces, wait for the next one and deliver it; False if it is not done."""
        cdef Request part
        if self.op == OP_READ and not self.cancelled:
            while len(self.begun) < self.done_count + <Py_ssize_t> self.buffer.stage.slots:
                if not self.begin_part():
                    break
        if self.done_count == len(self.begun):
            self.end(None)
            return True
        part = self.begun[self.done_count]
        if not part.poll(timeout_ns):
            return False
        part.error_seen = True
        if part.error is not None:
            self.end(part.error)
            return True
        if self.op == OP_READ:
            self.buffer.stage.deliver(self.done_count)
        self.done_count += 1
        self.outcome += part.nbytes
        return True

    cdef bint begin_part(self) except -1:
        """Start the next piece; return False if there is none left."""
        cdef Py_ssize_t index = len(self.begun)
        cdef Request part
        stage = self.buffer.stage
        if index == len(stage.pieces):
            return False
        memory = stage.host(index) if self.op == OP_READ else stage.fetch(index)
        part = new_request(
            self.op,
            acquire(memory, self.op == OP_READ),
            self.file,
            self.offset + <int64_t> stage.pieces[index][0],
        )
        part._workers = self._workers
        part.start((<Workers> self._workers).c)
        self.begun.append(part)
        return True

    cdef int end(self, object error) except -1:
        """Finish the request, after waiting for all pieces that were started."""
        cdef Request part
        for part in self.begun:
            part.poll(-1)
            part.error_seen = True
        if self.closes_file:
            try:
                self.file.close()
            except OSError as second:
                error = error or second
        if error is None and self.outcome < self.nbytes:
            error = CancelledError(f"the transfer of {self.path!r} was cancelled")
        if error is None and self.op == OP_READ:
            self.buffer.land()
        self.error = error
        self.words = words_of(error)
        self.finished = True
        return 0

    def cancel(self) -> bool:
        """Cancel the pieces that were not started yet; see ``Request.cancel``."""
        if self.generation != fork_generation():
            return False
        with self.lock:
            if self.finished or len(self.begun) == len(self.buffer.stage.pieces):
                return False
            self.cancelled = True
            return True


cdef Request new_staged(
    nvmeio_op op, Buffer buffer, File file, int64_t offset
):
    cdef StagedRequest request = StagedRequest.__new__(StagedRequest)
    fill_request(request, op, buffer, file, offset)
    # Not its pieces, because more of them may follow.
    request.closes_file, file.passing = file.passing, False
    request.begun = []
    return request
