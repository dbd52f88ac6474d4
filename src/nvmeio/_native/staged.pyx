"""Requests for tensors on a device: many small requests, and device copies between them.

The bytes pass through a few pieces of pinned host memory (``buffer.stage``).  The Python
thread that submits a write or waits for a read copies to or from the device, while other
pieces are between host memory and the drive.
"""

import time

cimport cython
from libc.stdint cimport int64_t

from nvmeio._libnvmeio.c_base cimport OP_READ, OP_WRITE, fork_generation, nvmeio_op
from nvmeio._libnvmeio.c_request cimport nvmeio_handle
from nvmeio._native.buffer cimport Buffer, acquire
from nvmeio._native.file cimport File
from nvmeio._native.workers cimport Workers
from nvmeio._native.errors cimport cancelled_error, words_of
from nvmeio._native.request cimport Request, fill_request, finish_interrupted
from nvmeio._native.request cimport new_request, finish_and_release


@cython.no_gc_clear
@cython.final
cdef class StagedRequest(Request):
    """A request that advances piece by piece, in Python, whenever a thread polls it."""

    cdef list begun             # a Request for each piece that was started
    cdef Py_ssize_t count       # of pieces
    cdef Py_ssize_t claimed     # how many pieces cancel() can no longer prevent
    cdef Py_ssize_t done_count  # how many of them are done and delivered
    cdef bint cancelled
    cdef object failure         # the first error, after which no piece is started, or None
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
        cdef Py_ssize_t index, slots = self.buffer.stage.slots
        workers = (<Workers> self._workers).staged
        try:
            for index in range(self.count if self.op == OP_WRITE else slots):
                # Reuse a piece of memory once the transfer that used it is done.
                if index >= slots:
                    earlier = <Request> self.begun[index - slots]
                    earlier.poll_for(None)
                    if earlier.error is not None:
                        break
                if not self.begin_part():
                    break
            workers.add(self)
        except BaseException as error:
            # Nobody gets the request: its pieces must not outlive this call.
            self.fail(error)
            workers.add(self)
            finish_interrupted(self)
            workers.discard(self)
            raise
        return 0

    cdef bint poll(self, int64_t timeout_ns) except -1:
        cdef int64_t left = timeout_ns, end = 0
        cdef Request part
        if timeout_ns > 0:
            end = timeout_ns + <int64_t> time.monotonic_ns()
        while not self.finished:
            self.check_process()
            if self.is_being_finished_here():
                return False
            finish_and_release(self)
            if self.finished:
                break
            if timeout_ns > 0:
                left = max(0, end - <int64_t> time.monotonic_ns())
            if left == 0:
                return False
            # Without the lock, so that other threads can ask and cancel meanwhile.
            with self.lock:
                part = self.next_part()
            if part is not None:
                part.poll(left)
        return True

    cdef Request next_part(self):
        """Return the first piece that is not delivered; None if none is in flight."""
        if self.done_count == len(self.begun):
            return None
        return self.begun[self.done_count]

    cdef object go_on(self):
        try:
            while not self.finished and self.advance():
                pass
            return None
        except Exception as error:
            first = error
        # Try again: an error of the device or of torch repeats itself, one that a signal
        # handler raised does not.
        try:
            self.advance()
            return first
        except Exception as second:
            self.fail(second)
            return None

    cdef bint advance(self) except -1:
        """Start pieces, and deliver the next one; False if it is still in flight."""
        cdef Request part
        if self.op == OP_READ and self.failure is None:
            while len(self.begun) < self.done_count + <Py_ssize_t> self.buffer.stage.slots:
                if not self.begin_part():
                    break
        part = self.next_part()
        if part is None:
            self.end()
            return True
        if not part.poll(0):
            return False
        part.error_seen = True
        if self.failure is None and part.error is not None:
            self.fail(part.error)
        elif self.failure is None:
            if self.op == OP_READ:
                self.buffer.check_storage(None)
                self.buffer.stage.deliver(self.done_count)
            self.outcome += part.nbytes
        self.done_count += 1
        return True

    cdef bint begin_part(self) except -1:
        """Start the next piece; return False if there is none left."""
        cdef Py_ssize_t index = len(self.begun)
        cdef Request part
        with cython.critical_section(self):
            if index == self.count or (self.cancelled and index == self.claimed):
                return False
            self.claimed = index + 1
        stage = self.buffer.stage
        self.buffer.check_storage(None)
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

    cdef int fail(self, object error) except -1:
        """Start no more pieces, and cancel those in flight."""
        cdef Request part
        self.failure = error
        for part in self.begun[self.done_count:]:
            part.cancel()
        return 0

    cdef int end(self) except -1:
        """Finish the request, of which no piece is in flight."""
        error = self.failure
        if self.closes_file:
            try:
                self.file.close()
            except OSError as second:
                error = error or second
        if error is None and self.outcome < self.nbytes:
            error = cancelled_error(f"the transfer of {self.path!r} was cancelled")
        if error is None and self.op == OP_READ:
            self.buffer.check_storage(None)
            self.buffer.land()
        self.error = error
        self.words = words_of(error)
        self.finished = True
        return 0

    def cancel(self) -> bool:
        """Cancel the pieces that were not started yet; see ``Request.cancel``."""
        if self.generation != fork_generation():
            return False
        # Not with the lock, which is held while a piece is copied to the device.
        with cython.critical_section(self):
            if self.finished or self.failure is not None or self.claimed == self.count:
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
    request.count = len(buffer.stage.pieces)
    return request
