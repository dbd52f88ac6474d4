"""Requests of gathers and scatters: the arrays of records, their checks and their errors.

The library sorts, merges and transfers the records.  Users call the methods in handle.pyx.
"""

import errno
import functools
import math
import os

import numpy

cimport cython
from cpython.buffer cimport (
    PyBUF_SIMPLE,
    PyBuffer_Release,
    PyObject_CheckBuffer,
    PyObject_GetBuffer,
)
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.mem cimport PyMem_Free, PyMem_Malloc, PyMem_RawFree, PyMem_RawMalloc
from libc.stdint cimport SIZE_MAX, int64_t, uintptr_t

from nvmeio._libnvmeio cimport c_file, c_gather, c_pool, c_request
from nvmeio._libnvmeio.c_base cimport OP_READ, OP_WRITE, nvmeio_op
from nvmeio._libnvmeio.c_request cimport (
    nvmeio_after,
    nvmeio_failure,
    nvmeio_handle,
    nvmeio_outcome,
    nvmeio_request,
    nvmeio_transfer,
)
from nvmeio._libnvmeio.c_gather cimport nvmeio_gather
from nvmeio._native.arguments cimport file_position, up_to
from nvmeio._native.buffer cimport Buffer, acquire, library_for, new_buffer
from nvmeio._native.buffer cimport strided_array
from nvmeio._native.file cimport File, identity_of
from nvmeio._native.errors cimport cancelled_error, check, error_in_words, error_of_parts
from nvmeio._native.errors cimport hint_for, raise_refused
from nvmeio._native.request cimport Request, fill_request, fill_transfer

from nvmeio._native.copy import memcpy
from nvmeio._memory.registry import library_of
from nvmeio._memory.strides import parts_of
from nvmeio._arguments.checks import exact_array, has_integers

# How much of a gather the calling thread reads itself, if the page cache has it.
cdef Py_ssize_t AT_ONCE_RECORDS = 64
cdef size_t AT_ONCE_BYTES = 1 << 20

_ndarray = numpy.ndarray
_int64 = numpy.dtype(numpy.int64)


class GatherError(OSError):
    """Some records of a gather or scatter, or some items of ``read_many``, failed.

    The others were transferred, unless the request was refused when it was submitted: then
    nothing was, and ``failures`` has the first record or item at fault.  Also raised by
    ``scatter`` and ``write_many``.

    Parameters
    ----------
    number, strerror, filename
        As for ``OSError``.
    failures : tuple of (int, int), optional
        Index and errno of each failed record or item, in order of index.

    Attributes
    ----------
    index : int
        Index of the first failed record or item, as passed.
    failures : tuple of (int, int)
        Index and errno of each failed record or item, in order of index.

    Notes
    -----
    ``errno`` and ``filename`` are those of the first failure, as for any OSError.  The copy
    that torch's DataLoader raises for a worker has only a message: its ``failures`` is
    empty and its ``index`` -1.

    Examples
    --------
    >>> nvmeio.write_file(bytes(100), "data.bin")
    100
    >>> with nvmeio.Handle() as handle:
    ...     try:
    ...         handle.read_many([(bytearray(60), "data.bin", 60)])
    ...     except nvmeio.GatherError as error:
    ...         print(error.failures)
    ((0, 61),)
    """

    def __init__(self, number, strerror=None, filename=None, failures=()):
        # OSError decides by their number whether the first argument is an errno.
        count = 3 if filename is not None else 1 if strerror is None else 2
        super().__init__(*(number, strerror, filename)[:count])
        self.failures = failures
        self.index = failures[0][0] if failures else -1


class LateResult:
    """A function that makes the result of a gather once all records have landed."""

    __slots__ = ("make",)

    def __init__(self, make):
        self.make = make


# The public name, for tracebacks and pickles.
GatherError.__module__ = "nvmeio"


@cython.no_gc_clear
@cython.final
cdef class GatherRequest(Request):
    """A request of many records of one file."""

    cdef int describe(self, nvmeio_gather *gather) except -1:
        gather.op = self.op
        gather.address = self.buffer.address
        gather.size = SIZE_MAX if self.by_address else self.buffer.nbytes
        gather.count = self.count
        gather.done = self.done_count
        gather.offsets = data_of(self.offsets)
        gather.one_size = isinstance(self.sizes, int)
        if gather.one_size:
            self.one_size = self.sizes
        gather.sizes = &self.one_size if gather.one_size else data_of(self.sizes)
        gather.places = NULL if self.places is None else data_of(self.places)
        gather.gap_max = self.gap_max
        gather.user = <void *> self
        return 0

    cdef object take_memory(self, object memory):
        """Hold the memory, or host memory in its place.

        Return the function that then lands records, given where each begins and ends; None
        if the engine uses the caller's memory.
        """
        cdef Buffer held
        self.by_address = self.op == OP_READ and isinstance(memory, NewBytes)
        if self.by_address:
            # It has no address, and only keeps the objects alive.
            self.buffer = new_buffer(memory, True)
            return None
        self.buffer = held = acquire(memory, self.op == OP_READ)
        self.is_copied = held.nbytes > 0 and not held.is_in_place()
        if held.stage is None and (self.op == OP_WRITE or not self.is_copied):
            return None
        if PyObject_CheckBuffer(memory):
            target = strided_array(&held.view, True)[..., None].view(numpy.uint8)
            staged = held.owner.reshape(-1).view(numpy.uint8)
            return functools.partial(_land_records, memory, target, staged)
        library = library_for(memory)
        host = library.host_like(memory)
        if self.op == OP_WRITE:
            memcpy(host, memory)
        self.buffer = acquire(host, self.op == OP_READ)
        if self.op == OP_WRITE:
            return None
        self.buffer.watch(held.storage)
        target, staged = library.byte_view(memory), library.byte_view(host)
        return functools.partial(_land_records, memory, target, staged)

    cdef int check_records(self) except -1:
        cdef nvmeio_gather gather
        cdef size_t offender
        cdef int result
        self.describe(&gather)
        with nogil:
            result = c_gather.gather_check(&gather, &offender)
        if result < 0 and offender < gather.count:
            raise_offender(self, offender, result)
        check(result)
        return 0

    cdef int aim(self, File file) except -1:
        nbytes = self.nbytes
        fill_request(self, self.op, self.buffer, file, 0)
        self.nbytes = nbytes
        return 0

    cdef int submit(
        self, nvmeio_handle *handle, const nvmeio_after *after, size_t *offender
    ) except? -1:
        cdef nvmeio_gather gather
        cdef int result
        # Before lend(), because it may raise.
        self.describe(&gather)
        gather.file = self.file.lend()
        gather.pass_file = True
        gather.after = after[0]
        with nogil:
            result = c_gather.submit_gather(handle, &gather, &self.c, offender)
        if result < 0:
            self.file.take_back(gather.file)
        else:
            self.offsets = self.sizes = self.places = None
        return result

    cdef bint perform(self, nvmeio_handle *handle) except -1:
        """Read the first of few records that are cached; leave the others to submit()."""
        cdef nvmeio_gather gather
        cdef nvmeio_transfer transfer
        cdef size_t offender, i, total = 0
        cdef int64_t file_size
        cdef int result = 0
        if self.op != OP_READ or not 0 < self.count <= AT_ONCE_RECORDS:
            return False
        self.describe(&gather)
        if c_gather.gather_check(&gather, &offender) < 0:
            return False
        fill_transfer(self, &transfer)
        # This keeps the file, because submit() needs it if the read fails.
        transfer.pass_file = False
        transfer.buffered = True
        with nogil:
            file_size = c_file.file_size(transfer.file)
            for i in range(gather.count):
                transfer.size = gather.sizes[0 if gather.one_size else i]
                total += transfer.size
                # submit() refuses records past the end before any is read.
                if total > AT_ONCE_BYTES or (
                    transfer.size > 0
                    and gather.offsets[i] + <int64_t> transfer.size > file_size
                ):
                    total = SIZE_MAX
                    break
            if total <= AT_ONCE_BYTES:
                total = 0
                for i in range(gather.count):
                    transfer.more = i + 1 < gather.count
                    transfer.size = gather.sizes[0 if gather.one_size else i]
                    transfer.offset = gather.offsets[i]
                    transfer.address = <char *> gather.address + (
                        gather.places[i] if gather.places != NULL else <int64_t> total
                    )
                    result = c_request.perform(handle, &transfer, &self.c_outcome)
                    if result != 1 or self.c_outcome.result < 0:
                        break
                    total += transfer.size
                    self.done_count += 1
                self.performed = self.done_count == gather.count
        self.file.take_back(transfer.file)
        if self.performed:
            self.c_outcome.result = self.c_outcome.got = total
        return self.performed

    cdef int raise_refusal(self, int result, size_t offender) except -1:
        if offender < <size_t> self.count:
            raise_offender(self, offender, result)
        raise_refused(self.op, self.path, result)

    cdef list parts(self):
        addresses, sizes = self.buffer.memory_in_use()
        if isinstance(addresses, int):
            addresses, sizes = addresses, self.nbytes
            if self.places is not None:
                addresses, sizes = addresses + self.places, self.sizes
        place = identity_of(self.file), self.path, self.offsets, self.sizes
        return [(*place, addresses, sizes)]

    cdef object judge(self, const nvmeio_outcome *outcome):
        name = name_of(self.op)
        if outcome.result == -errno.ECANCELED:
            return cancelled_error(
                f"the {name} of {self.count} records of {self.path!r} was cancelled"
            )
        first, found = failures_of(self.c)
        if not found:
            # The request failed as a whole, or has no records.
            words = f"(close after the {name})" if outcome.closing else f"({name})"
            return error_in_words(-outcome.result, words, self.path)
        error = -outcome.result
        return error_of_parts(
            GatherError, error, name, "record", first, found, self.count, self.path
        )

    cdef object settle(self, object error):
        if self.op == OP_READ and isinstance(error, GatherError):
            self.buffer.check_storage(error)
            if isinstance(self.buffer.landing, functools.partial):
                failed = [index for index, _ in error.failures]
                self.buffer.landing = functools.partial(self.buffer.landing, failed=failed)
            self.buffer.land()
            return error
        error = Request.settle(self, error)
        if error is None and self.makes_value and type(self.value) is LateResult:
            self.value = self.value.make()
        return error

    cdef bint lands_by_itself(self) noexcept:
        return not self.makes_value and Request.lands_by_itself(self)

    cdef str doing(self):
        return f"{name_of(self.op)} of {self.count} records"

    cdef str subject(self):
        return self.doing()


cdef tuple failures_of(nvmeio_request *request):
    cdef size_t count = c_request.request_failures(request, NULL, 0), i
    cdef nvmeio_failure *failures
    if count == 0:
        return "", ()
    failures = <nvmeio_failure *> PyMem_Malloc(count * sizeof(nvmeio_failure))
    if failures == NULL:
        raise MemoryError()
    try:
        c_request.request_failures(request, failures, count)
        first = f"{failures[0].size} bytes at offset {failures[0].offset}"
        return first, tuple((failures[i].index, -failures[i].error) for i in range(count))
    finally:
        PyMem_Free(failures)


cdef str name_of(nvmeio_op op):
    return "gather" if op == OP_READ else "scatter"


cdef int64_t *data_of(object array) except NULL:
    """Return the address of a contiguous array, which the caller keeps alive."""
    cdef Py_buffer view
    PyObject_GetBuffer(array, &view, PyBUF_SIMPLE)
    PyBuffer_Release(&view)
    return <int64_t *> view.buf


cdef GatherRequest new_gather(
    nvmeio_op op, object offsets, object sizes, object memory, object places,
    object max_gap, object value
):
    cdef GatherRequest request = GatherRequest.__new__(GatherRequest)
    request.op = op
    land = request.take_memory(memory)
    request.offsets = integers("offsets", offsets)
    request.count = len(request.offsets)
    request.gap_max = up_to(2**30, "max_gap", max_gap)
    if isinstance(sizes, int) or numpy.ndim(sizes) == 0:
        request.sizes = file_position("sizes", sizes)
        total = request.count * request.sizes
    else:
        request.sizes = integers("sizes", sizes)
        check_count("sizes", request.sizes, request.count)
        total = int(request.sizes.sum())
    name = "out_offsets" if op == OP_READ else "buffer_offsets"
    if places is not None:
        request.places = integers(name, places)
    if request.by_address:
        request.places = (<NewBytes> memory).places(request.places, request.sizes)
    if request.places is not None:
        check_count(name, request.places, request.count)
    request.nbytes = min(max(total, 0), 2**63 - 1)
    request.value = value
    request.makes_value = type(value) is LateResult
    if land is not None:
        sizes = numpy.broadcast_to(numpy.int64(request.sizes), request.count)
        # A copy, because the caller may change the array as soon as the request has begun.
        if places is None:
            begins = numpy.cumsum(sizes) - sizes
        else:
            begins = request.places.copy()
        request.buffer.landing = functools.partial(land, begins, begins + sizes)
    return request


cdef object integers(str name, object values):
    """Return a one-dimensional array of int64; raise TypeError or ValueError."""
    # Most often there is nothing to convert or to check.
    if (
        type(values) is _ndarray
        and values.dtype is _int64
        and values.ndim == 1
        and values.flags.carray
    ):
        return values
    # Not all in one tuple: Cython 3.3 does not check there whether isinstance() raises, and
    # that of an abstract class, as Python code, may raise KeyboardInterrupt.
    if isinstance(values, (str, bytes)) or isinstance(values, os.PathLike):
        raise TypeError(
            f"{name} is the path {os.fspath(values)!r}; it must be integers: are the first "
            "two arguments swapped?"
        )
    array = exact_array(values)
    if array.size == 0 and not isinstance(values, numpy.ndarray):
        array = array.astype(numpy.int64)
    if not has_integers(array):
        raise TypeError(
            f"{name} has elements of dtype {array.dtype}; they must be integers"
        )
    if array.ndim != 1:
        raise ValueError(f"{name} is of shape {array.shape}; it must have one dimension")
    if array.dtype.kind == "O" or (array.dtype.kind == "u" and array.dtype.itemsize == 8):
        wrong = (array > numpy.uint64(2**63 - 1)) | (array < 0)
        if wrong.any():
            first = int(wrong.argmax())
            raise ValueError(
                f"{name}[{first}] is {array[first]}; it must be from 0 to 2**63 - 1"
            )
    return numpy.require(array, numpy.int64, ["C", "A"])


cdef int check_count(str name, object array, Py_ssize_t count) except -1:
    if len(array) != count:
        raise ValueError(
            f"there are {count} offsets and {len(array)} {name}; the numbers must be equal"
        )
    return 0


cdef int raise_offender(GatherRequest request, size_t index, int result) except -1:
    """Raise the error for the first invalid record."""
    cdef bint reading = request.op == OP_READ
    offset = int(request.offsets[index])
    size = request.sizes if isinstance(request.sizes, int) else int(request.sizes[index])
    memory, places = ("out", "out_offsets") if reading else ("buffer", "buffer_offsets")
    where = f"record {index} of {size} bytes at offset {offset}"
    if result == -errno.EINVAL:
        values = {"offsets": offset, "sizes": size}
        if request.places is not None:
            values[places] = int(request.places[index])
        name, value = next((n, v) for n, v in values.items() if v < 0)
        raise ValueError(f"{name}[{index}] is {value}; it must not be negative")
    if result == -errno.EOVERFLOW:
        raise ValueError(f"{where} is beyond 2**63 - 1")
    if result == -errno.ENODATA:
        words = f"{where} reaches past the end of the file, which has {request.file.size}"
        failures = ((index, errno.ENODATA),)
        words = f"{words} bytes{hint_for(request.path)}"
        raise GatherError(errno.ENODATA, words, request.path, failures)
    if result == -errno.EEXIST:
        what = f"its place in {memory}" if reading else "its bytes of the file"
        raise ValueError(f"{where} shares {what} with another record")
    place = "after the records before it"
    if request.places is not None:
        place = f"at {places}[{index}] = {request.places[index]}"
    raise ValueError(
        f"{where} does not fit into {memory}, which has {request.buffer.nbytes} bytes, "
        f"{place}"
    )


def _land_records(memory, target, staged, begins, ends, source, failed=()):
    """Copy records to the caller's memory, and nothing else: others may use the rest."""
    begins, ends = numpy.delete(begins, failed), numpy.delete(ends, failed)
    filled = numpy.flatnonzero(ends > begins)
    order = filled[numpy.argsort(begins[filled])]
    begins, ends = begins[order], ends[order]
    # Neighbours are copied together.
    apart = begins[1:] != ends[:-1]
    begins = begins[numpy.r_[True, apart][: len(begins)]]
    ends = ends[numpy.r_[apart, True][: len(ends)]]
    for begin, end in zip(begins.tolist(), ends.tolist()):
        for part, at in parts_of(target, begin, end):
            size = math.prod(part.shape)
            part[...] = staged[at : at + size].reshape(part.shape)
    library = library_of(memory)
    if library is not None:
        library.touch(memory)


# Not a buffer, because what is between the objects belongs to others.
@cython.no_gc
@cython.final
cdef class NewBytes:
    """Bytes objects whose contents are still to be read.

    As ``out`` of a gather, ``out_offsets`` are positions in ``values``, and each record
    fills its object.  Nothing else may use ``values`` before that.
    """

    def __init__(self, sizes):
        cdef Py_ssize_t size
        cdef list each = sizes.tolist()
        self.sizes = sizes
        check_memory(len(each), sum(each))
        self.values = [PyBytes_FromStringAndSize(NULL, size) for size in each]
        addresses = [<uintptr_t> PyBytes_AS_STRING(value) for value in self.values]
        self.addresses = numpy.array(addresses, numpy.int64)

    cdef object places(self, object positions, object sizes):
        if positions is None:
            positions = numpy.arange(len(self.sizes))
        if (self.sizes[positions] != sizes).any():
            raise ValueError("records that fill bytes objects must have their sizes")
        return self.addresses[positions]


cdef int check_memory(Py_ssize_t count, object total) except -1:
    """Raise MemoryError for more than the system can give, before anything is filled."""
    cdef void *memory = PyMem_RawMalloc(min(total, SIZE_MAX))
    if memory == NULL and c_pool.pool_trim():
        memory = PyMem_RawMalloc(min(total, SIZE_MAX))
    if memory == NULL:
        raise MemoryError(f"out of memory: {count} records have {total} bytes")
    PyMem_RawFree(memory)
    return 0
