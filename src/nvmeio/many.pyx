"""Requests of many transfers: their items, what is refused of them, and how they fail.

What users call is submitter.pyx's, the rest of a request's life request.pyx's.
"""

import errno
import functools
import os
from concurrent.futures import CancelledError

cimport cython
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport INT64_MAX, SIZE_MAX

from nvmeio cimport _core
from nvmeio._core cimport OP_READ, nvmeio_handle, nvmeio_many, nvmeio_op
from nvmeio._core cimport nvmeio_outcome, nvmeio_request, nvmeio_transfer
from nvmeio.arguments cimport file_position, refuse_path
from nvmeio.buffer cimport Buffer, lend, library_for
from nvmeio.file cimport File
from nvmeio.outcome cimport raise_refused, verb_of
from nvmeio.records cimport failures_of
from nvmeio.request cimport Request, fill_after

from nvmeio.copy import memcpy
from nvmeio.records import GatherError


@cython.no_gc_clear
@cython.final
cdef class ManyRequest(Request):
    """A request of many transfers, of one file or several."""

    cdef object add(self, Py_ssize_t index, object item):
        try:
            buffer, file, offset = item
        except (TypeError, ValueError):
            raise TypeError(
                f"items[{index}] is {item!r}; it must be (buffer, file, offset)"
            ) from None
        position = file_position(f"items[{index}], offset", offset)
        lent = self.borrow(index, buffer)
        if position > INT64_MAX - lent.nbytes:
            raise ValueError(
                f"items[{index}]: the offset is {position} for {lent.nbytes} bytes; "
                "together they must not be beyond 2**63 - 1"
            )
        self.buffers.append(lent)
        self.files.append(file)
        self.nbytes += lent.nbytes
        return position

    cdef Buffer borrow(self, Py_ssize_t index, object memory):
        """Take hold of an item's memory, or of a copy in memory of the host."""
        cdef Buffer lent
        try:
            lent = lend(memory, self.op == OP_READ)
        except (TypeError, ValueError) as error:
            refuse_path(memory)
            raise type(error)(f"items[{index}]: {error}") from error
        if lent.stage is not None:
            host = library_for(memory).host_like(memory)
            lent.release()
            if self.op != OP_READ:
                memcpy(host, memory)
            lent = lend(host, self.op == OP_READ)
            self.is_copied = True
            if self.op == OP_READ:
                lent.landing = functools.partial(_bring_back, memory, host)
        elif lent.nbytes > 0 and not lent.is_in_place():
            self.is_copied = True
        return lent

    cdef int start(self, nvmeio_handle *handle) except -1:
        cdef Py_ssize_t count = len(self.buffers), i
        cdef nvmeio_transfer *transfers
        cdef nvmeio_many many
        cdef size_t offender = SIZE_MAX
        cdef nvmeio_request **before = NULL
        cdef Buffer buffer
        cdef int result
        self.paths = tuple([(<File> file).path for file in self.files])
        self.path = self.paths[0] if count > 0 else None
        # One more, for none is NULL as well.
        transfers = <nvmeio_transfer *> PyMem_Malloc((count + 1) * sizeof(nvmeio_transfer))
        if transfers == NULL:
            raise MemoryError()
        for i in range(count):
            buffer = self.buffers[i]
            transfers[i].op = self.op
            transfers[i].file = NULL
            transfers[i].address = buffer.address
            transfers[i].size = buffer.nbytes
            transfers[i].offset = self.offsets[i]
            transfers[i].data_only = False
            transfers[i].user = NULL
            transfers[i].after.count = 0
        many.transfers = transfers
        many.count = count
        many.user = <void *> self
        Py_INCREF(self)
        try:
            before = fill_after(self, &many.after)
            for i in range(count):
                transfers[i].file = (<File> self.files[i]).retain()
            with nogil:
                result = _core.submit_many(handle, &many, &self.c, &offender)
        except BaseException:
            self.finished = True
            Py_DECREF(self)
            raise
        finally:
            for i in range(count):
                _core.file_release(transfers[i].file)
            PyMem_Free(transfers)
            PyMem_Free(before)
        self.offsets = None
        if result < 0:
            self.finished = True
            Py_DECREF(self)
            raise_refused(
                self.op, self.path if offender == SIZE_MAX else self.paths[offender], result
            )
        return 0

    cdef object judge(self, const nvmeio_outcome *outcome):
        if outcome.result >= 0:
            return None
        if outcome.result == -errno.ECANCELED:
            return CancelledError(f"the {self.doing()} was cancelled")
        first, found = failures_of(self.c)
        reason = os.strerror(-outcome.result)
        if outcome.result == -errno.ENODATA:
            reason = "past the end of the file"
        words = f"{reason} ({verb_of(self.op)} of many, item {found[0][0]}: {first}"
        if len(found) > 1:
            words += f"; {len(found)} of {len(self.paths)} items failed"
        path = self.paths[found[0][0]]
        return GatherError(-outcome.result, f"{words})", path, found)

    cdef object settle(self, object error):
        cdef Buffer buffer
        if self.op == OP_READ:
            for buffer in self.buffers:
                # Of a read that failed, part may be in the caller's memory.
                if error is None or buffer.is_in_place():
                    buffer.land()
        return error

    cdef bint lies_in_place(self) noexcept:
        return not self.is_copied

    cdef int disuse_memory(self) noexcept:
        cdef Buffer buffer
        for buffer in self.buffers:
            buffer.disuse()
        return 0

    cdef int release_memory(self) except -1:
        cdef Buffer buffer
        buffers, self.buffers, self.files = self.buffers, [], []
        for buffer in buffers:
            buffer.release()
        return 0

    cdef int abandon_memory(self) except -1:
        Py_INCREF(self.buffers)
        self.buffers = []
        return 0

    cdef str doing(self):
        return f"{verb_of(self.op)} of {len(self.paths)} items"

    cdef str subject(self):
        return self.doing()


def _bring_back(memory, host, source):
    """Copy what was read to where it was wanted."""
    memcpy(memory, host)


cdef ManyRequest new_many(nvmeio_op op, object workers):
    cdef ManyRequest request = ManyRequest.__new__(ManyRequest)
    request.generation = _core.fork_generation()
    request.op = op
    request._workers = workers
    request.outcome = 0
    request.buffers = []
    request.files = []
    return request
