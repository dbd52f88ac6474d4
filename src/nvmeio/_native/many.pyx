"""Requests of many transfers: their items, checks and errors.

Users call the methods in handle.pyx; request.pyx has what all requests share.
"""

import errno
import functools

cimport cython
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.ref cimport Py_INCREF
from libc.stdint cimport INT64_MAX, SIZE_MAX

from nvmeio._libnvmeio cimport c_base, c_request
from nvmeio._libnvmeio.c_base cimport OP_READ, nvmeio_op
from nvmeio._libnvmeio.c_file cimport nvmeio_file
from nvmeio._libnvmeio.c_request cimport (
    nvmeio_after,
    nvmeio_handle,
    nvmeio_many,
    nvmeio_outcome,
    nvmeio_transfer,
)
from nvmeio._native.arguments cimport file_position
from nvmeio._native.buffer cimport Buffer, acquire, library_for
from nvmeio._native.file cimport File, identity_of
from nvmeio._native.errors cimport cancelled_error, error_of_parts, raise_of_item
from nvmeio._native.errors cimport raise_refused, verb_of
from nvmeio._native.gather cimport failures_of
from nvmeio._native.request cimport Request

from nvmeio._native.copy import memcpy
from nvmeio._native.gather import GatherError
from nvmeio._arguments.checks import shown


@cython.no_gc_clear
@cython.final
cdef class ManyRequest(Request):
    """A request of many transfers, of one file or several."""

    cdef object add(self, Py_ssize_t index, object item):
        try:
            buffer, file, offset = item
        except (TypeError, ValueError):
            length = f" and length {len(item)}" if hasattr(item, "__len__") else ""
            raise TypeError(
                f"items[{index}] is of type {type(item).__qualname__}{length}; it must be "
                "(buffer, file, offset)"
            ) from None
        # The fast path: formatting the name for an error would double the time of add().
        if type(offset) is int and 0 <= offset <= INT64_MAX:
            position = offset
        else:
            position = file_position(f"items[{index}], offset", offset)
        held = self.borrow(index, buffer)
        if position > INT64_MAX - held.nbytes:
            raise ValueError(
                f"items[{index}]: the offset is {position} for {held.nbytes} bytes; "
                "together they must not be beyond 2**63 - 1"
            )
        self.buffers.append(held)
        self.files.append(file)
        self.nbytes += held.nbytes
        return position

    cdef Buffer borrow(self, Py_ssize_t index, object memory):
        """Hold an item's memory, or a copy in host memory."""
        cdef Buffer held, own
        try:
            held = acquire(memory, self.op == OP_READ)
        except (TypeError, ValueError) as error:
            raise_of_item(index, error)
        if held.stage is not None:
            host = library_for(memory).host_like(memory)
            if self.op != OP_READ:
                memcpy(host, memory)
            own, held = held, acquire(host, self.op == OP_READ)
            self.is_copied = True
            if self.op == OP_READ:
                held.watch(own.storage)
                held.landing = functools.partial(_bring_back, memory, host)
        elif held.nbytes > 0 and not held.is_in_place():
            self.is_copied = True
        return held

    cdef int submit(
        self, nvmeio_handle *handle, const nvmeio_after *after, size_t *offender
    ) except? -1:
        cdef Py_ssize_t count = len(self.buffers), i
        cdef nvmeio_transfer *transfers
        cdef nvmeio_many many
        cdef nvmeio_file *held = NULL
        cdef Buffer buffer
        cdef File file
        cdef int result
        # One more, because malloc(0) may return NULL.
        transfers = <nvmeio_transfer *> PyMem_Malloc((count + 1) * sizeof(nvmeio_transfer))
        if transfers == NULL:
            raise MemoryError()
        many.transfers = transfers
        many.count = 0
        many.user = <void *> self
        many.after = after[0]
        try:
            for i in range(count):
                buffer = self.buffers[i]
                transfers[i].op = self.op
                transfers[i].address = buffer.address
                transfers[i].size = buffer.nbytes
                transfers[i].offset = self.offsets[i]
                transfers[i].data_only = False
                transfers[i].user = NULL
                transfers[i].after.count = 0
                # Items of one file are mostly adjacent; these share one reference.
                file = self.files[i]
                transfers[i].pass_file = held == NULL or file.c != held
                if transfers[i].pass_file:
                    held = file.retain()
                transfers[i].file = held
                many.count += 1
            # Before the submission, so that the request has the last reference.
            for file in self.files:
                if file.passing:
                    file.close()
            with nogil:
                result = c_request.submit_many(handle, &many, &self.c, offender)
            if result >= 0:
                many.count = 0
        finally:
            # What the request has not taken over.
            for i in range(<Py_ssize_t> many.count):
                if transfers[i].pass_file:
                    (<File> self.files[i]).let_go(transfers[i].file)
            PyMem_Free(transfers)
        self.offsets = None
        return result

    cdef int raise_refusal(self, int result, size_t offender) except -1:
        path = self.path if offender == SIZE_MAX else self.paths[offender]
        raise_refused(self.op, path, result)

    cdef bint perform(self, nvmeio_handle *handle) except -1:
        return False

    cdef list parts(self):
        cdef Buffer buffer
        found = []
        for i, buffer in enumerate(self.buffers):
            place = identity_of(self.files[i]), self.paths[i], self.offsets[i]
            place += (buffer.nbytes,)
            found.append(place + buffer.memory_in_use())
        return found

    cdef int come_after(self, object after, object workers) except -1:
        # The files are open by now.
        self.paths = tuple([(<File> file).path for file in self.files])
        self.path = self.paths[0] if self.paths else None
        Request.come_after(self, after, workers)
        return 0

    cdef object judge(self, const nvmeio_outcome *outcome):
        if outcome.result == -errno.ECANCELED:
            return cancelled_error(f"the {self.doing()} was cancelled")
        first, found = failures_of(self.c)
        name, path = f"{verb_of(self.op)} of many", self.paths[found[0][0]]
        count = len(self.paths)
        return error_of_parts(
            GatherError, -outcome.result, name, "item", first, found, count, path
        )

    cdef object settle(self, object error):
        cdef Buffer buffer
        for index, buffer in enumerate(self.buffers):
            try:
                buffer.check_storage(error)
            except RuntimeError as moved:
                raise RuntimeError(f"items[{index}]: {moved}") from error
        if self.op == OP_READ:
            named = isinstance(error, GatherError)
            failed = {index for index, _ in error.failures} if named else ()
            for index, buffer in enumerate(self.buffers):
                # A failed read may have changed part of the caller's memory.
                whole = error is None or (named and index not in failed)
                if whole or buffer.is_in_place():
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
        count = len(self.paths)
        return f"{verb_of(self.op)} of {count} item{'' if count == 1 else 's'}"

    cdef str subject(self):
        return self.doing()


def _bring_back(memory, host, source):
    """Copy what was read from host memory into the caller's."""
    memcpy(memory, host)


cdef ManyRequest new_many(nvmeio_op op, object items):
    cdef ManyRequest request = ManyRequest.__new__(ManyRequest)
    try:
        items = iter(items)
    except TypeError:
        raise TypeError(
            f"items is {shown(items)}; it must be an iterable of (buffer, file, offset)"
        ) from None
    request.generation = c_base.fork_generation()
    request.op = op
    request.outcome = 0
    request.buffers = []
    request.files = []
    request.offsets = [request.add(index, item) for index, item in enumerate(items)]
    return request
