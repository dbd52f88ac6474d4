"""Memory that a request borrows from its caller: one Buffer per array or tensor.

This module acquires memory through the buffer protocol and through torch's DLPack exchange
table, without a Python call for ordinary arrays and tensors.  Uncommon tensors are exported
by their library, which registry.py finds; request.pyx does the I/O.
"""

import functools
import os

import numpy

cimport cython
from cpython.buffer cimport (
    PyBUF_FORMAT,
    PyBUF_READ,
    PyBUF_STRIDES,
    PyBUF_WRITABLE,
    PyBUF_WRITE,
    PyBuffer_IsContiguous,
    PyBuffer_Release,
    PyObject_CheckBuffer,
    PyObject_GetBuffer,
)
from cpython.memoryview cimport PyMemoryView_FromMemory
from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stdint cimport int64_t, uintptr_t

from nvmeio._libnvmeio cimport c_pool
from nvmeio._native cimport dlpack

from nvmeio._memory.strides import may_overlap
from nvmeio._memory.overlap import elements_of
from nvmeio._memory.registry import libraries as _libraries
from nvmeio._memory.registry import library_of
from nvmeio._arguments.checks import refuse_masked

_ndarray = numpy.ndarray
_bytes = numpy.dtype(numpy.uint8)


# A Buffer drops its references when its request is done, so no cycle lasts longer; and
# untracked objects save the cycle collector work.
@cython.no_gc
@cython.final
cdef class Buffer:
    """Buffer()
--

    Bytes that the engine borrows: a caller's memory, or a staging copy of it."""

    def __init__(self):
        raise TypeError("a Buffer is made when an array or a tensor is passed to a request")

    def __dealloc__(self):
        self.release()

    @property
    def address(self):
        """Where the bytes are; 0 on a device."""
        return <uintptr_t> self.address

    cdef bint is_in_place(self) noexcept:
        return self.address != NULL and self.address == self.pooled

    cdef tuple memory_in_use(self):
        if self.nbytes == 0 or self.is_in_place():
            return <uintptr_t> self.address, self.nbytes
        if not self.writable:
            return (), ()
        # After a read, the first argument of `landing` is where the staging copy goes.
        bound = isinstance(self.landing, functools.partial)
        return elements_of(self.landing.args[0] if bound else self.source)

    cdef int land(self) except -1:
        """Copy what was read into the caller's memory; a second call does nothing."""
        landing = self.landing
        if landing is not None:
            landing(self.source)
            self.landing = None
        return 0

    cdef int watch(self, object storage) except -1:
        """Note where the storage of a tensor is; None for other memory."""
        self.storage = storage
        self.storage_address = 0 if storage is None else storage.data_ptr()
        return 0

    cdef int check_storage(self, object error) except -1:
        """Raise RuntimeError, from an error, if the tensor's memory is no longer there."""
        if self.storage is None:
            return 0
        if <uintptr_t> self.storage.data_ptr() != self.storage_address:
            raise RuntimeError(
                "the memory of a tensor was freed or moved while a request used it, so its "
                "bytes are wrong, and other memory may have been overwritten: do not "
                "resize the tensor or its storage, pass it as out= for another size, or "
                "share it with processes before the request is done"
            ) from error
        return 0

    cdef int disuse(self) noexcept:
        """Tell the pool that the memory is no longer in use; runs no Python."""
        if self.pooled != NULL:
            c_pool.pool_use(self.pooled, -1)
            self.pooled = NULL
        return 0

    cdef int release(self) except -1:
        """Release the memory; a second call does nothing."""
        self.disuse()
        self.address = NULL
        self.landing = None
        self.stage = None
        self.owner = None
        self.storage = None
        self.source = None
        PyBuffer_Release(&self.view)
        return 0


cdef Buffer acquire(object source, bint writable):
    """Hold the memory of ``source`` until Buffer.release().

    torch has no means to keep the memory of a storage from being freed, for example by
    ``resize_()``: Buffer.check_storage() detects it afterwards.  Nothing detects
    ``ndarray.resize(refcheck=False)``.
    """
    cdef Buffer buffer
    if isinstance(source, Buffer):
        return source
    buffer = new_buffer(source, writable)
    if PyObject_CheckBuffer(source):
        if not acquire_view(buffer):
            stage_view(buffer)
    elif not acquire_tensor(buffer, library_for(source)):
        acquire_export(buffer, library_for(source).export(source, writable))
    return buffer


cdef Buffer acquire_in_place(object source, bint writable):
    """As ``acquire``, but return None if that needs a copy or the tensor's library."""
    cdef Buffer buffer = new_buffer(source, writable)
    if PyObject_CheckBuffer(source):
        return buffer if acquire_view(buffer) else None
    return buffer if acquire_tensor(buffer, library_for(source)) else None


cdef Buffer new_buffer(object source, bint writable):
    cdef Buffer buffer = Buffer.__new__(Buffer)
    buffer.writable = writable
    buffer.source = source
    return buffer


def borrow(source, *, writable):
    """Call ``acquire`` for Python code.  The request that gets the Buffer releases it."""
    return acquire(source, writable)


cdef bint acquire_view(Buffer buffer) except -1:
    """Acquire through the buffer protocol; the view is held until release.

    Return False, with the view held, if its bytes are not in C order.
    """
    source = buffer.source
    array = isinstance(source, _ndarray)
    # An array of bytes is the most common case, and has nothing to check.
    if array and not (type(source) is _ndarray and source.dtype is _bytes):
        check_array(source)
    # numpy cannot export the format of datetime64; check_array() looked at the dtype.
    take_view(buffer, PyBUF_STRIDES if array else PyBUF_STRIDES | PyBUF_FORMAT)
    if not array and has_objects(buffer.view.format):
        raise TypeError(
            f"cannot transfer {describe(source)}: its elements are Python objects; "
            "convert them to numbers or bytes first"
        )
    buffer.nbytes = buffer.view.len
    mark_use(buffer, buffer.view.buf)
    if not PyBuffer_IsContiguous(&buffer.view, b"C"):
        return False
    buffer.address = buffer.view.buf
    return True


cdef int check_array(object array) except -1:
    """Refuse numpy arrays whose contents are more than the bytes of their memory."""
    if array.dtype.hasobject:
        raise TypeError(
            f"cannot transfer an array of dtype {array.dtype}: its elements are Python "
            "objects; convert it with astype() first"
        )
    refuse_masked("the array", array)
    return 0


cdef int take_view(Buffer buffer, int flags) except -1:
    """Fill in buffer.view, or raise ValueError with the reason."""
    source = buffer.source
    try:
        PyObject_GetBuffer(
            source, &buffer.view, flags | PyBUF_WRITABLE if buffer.writable else flags
        )
        return 0
    except (BufferError, TypeError, ValueError) as error:
        reason = error
    if buffer.writable:
        try:
            PyObject_GetBuffer(source, &buffer.view, flags)
        except (BufferError, TypeError, ValueError):
            pass
        else:
            PyBuffer_Release(&buffer.view)
            raise ValueError(
                f"cannot write to {describe(source)}: it is read-only; pass writable "
                "memory, such as a bytearray or a copy of the array"
            ) from reason
    raise ValueError(f"{describe(source)} does not export a buffer: {reason}") from reason


cdef bint has_objects(const char *format) except -1:
    """Return whether a struct format has elements that are Python objects."""
    if format == NULL:
        return False
    # Skip the names of fields, which are enclosed in colons.
    return "O" in "".join(format.decode("utf-8", "replace").split(":")[::2])


cdef int stage_view(Buffer buffer) except -1:
    """Give the engine a C-ordered staging copy of a strided view."""
    target = strided_array(&buffer.view, buffer.writable)
    if not buffer.writable:
        buffer.owner = target.copy(order="C")
    elif may_overlap(target.shape, target.strides, target.itemsize):
        raise ValueError(
            f"cannot write to {describe(buffer.source)} of shape {target.shape} "
            f"and strides {target.strides}: its elements overlap; pass a copy"
        )
    else:
        buffer.owner = numpy.empty(target.shape, target.dtype)
        buffer.landing = functools.partial(_copy_back, target, buffer.owner)
    buffer.address = <void *> <uintptr_t> buffer.owner.__array_interface__["data"][0]
    return 0


def _copy_back(target, staging, source):
    """Copy staged bytes into `target`, which borrows the memory of `source`."""
    target[...] = staging


cdef object strided_array(const Py_buffer *view, bint writable):
    """Return an array of opaque items over a view's memory, without holding the view."""
    cdef Py_ssize_t below = 0, above = view.itemsize, reach
    cdef int axis
    for axis in range(view.ndim):
        reach = view.strides[axis] * (view.shape[axis] - 1)
        if reach < 0:
            below -= reach
        else:
            above += reach
    memory = PyMemoryView_FromMemory(
        <char *> view.buf - below, below + above, PyBUF_WRITE if writable else PyBUF_READ
    )
    return _ndarray(
        [view.shape[axis] for axis in range(view.ndim)],
        # Void items are copied byte for byte, padding and NaN payloads included.
        dtype=f"V{view.itemsize}",
        buffer=memory,
        offset=below,
        strides=[view.strides[axis] for axis in range(view.ndim)],
    )


cdef object library_for(object source):
    """Return the library that a tensor belongs to, or raise TypeError."""
    for kind, library in _libraries:
        if isinstance(source, kind):
            return library
    library = library_of(source)
    if library is None:
        if isinstance(source, (str, os.PathLike)):
            raise TypeError(
                f"buffer is the path {os.fspath(source)!r}; it must be an array, a tensor "
                "or another object with the buffer protocol: are the two arguments swapped?"
            )
        raise TypeError(
            "expected an array, a tensor or another object with the buffer protocol, "
            f"not {describe(source)}{remedy_for(source)}"
        )
    return library


cdef str remedy_for(object source):
    """Return a hint for a message: what to pass instead of an object without a buffer.

    Never suggests a copy, because what is read into a copy is lost.
    """
    if isinstance(source, (list, tuple)):
        return ", which has no memory of its own; use an array in its place"
    if hasattr(source, "getbuffer"):
        return "; pass its getbuffer()"
    if type(source).__name__ == "UntypedStorage":
        return "; pass torch.empty(0, dtype=torch.uint8).set_(storage)"
    return ""


# The tables of plain types, which are few and live as long as the process.
cdef dict _tables = {}


cdef const dlpack.ExchangeTable *exchange_table(object kind) except? NULL:
    """Return the DLPack exchange table of a type; NULL if there is none of our version."""
    cdef dlpack.ExchangeHeader *header
    capsule = getattr(kind, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return NULL
    header = <dlpack.ExchangeHeader *> PyCapsule_GetPointer(
        capsule, "dlpack_exchange_api"
    )
    while header != NULL and header.version.major != dlpack.MAJOR_VERSION:
        header = header.older
    return <const dlpack.ExchangeTable *> header


cdef const dlpack.ExchangeTable *table_of(object source) except? NULL:
    """Return the exchange table of a tensor of a plain type; NULL for anything else.

    Other types are left to their library, because torch would ask __torch_function__().
    """
    cdef const dlpack.ExchangeTable *table
    found = _tables.get(type(source))
    if found is not None:
        return <const dlpack.ExchangeTable *> <uintptr_t> found
    table = exchange_table(type(source))
    if table == NULL or table.borrow == NULL:
        return NULL
    if type(source) not in library_for(source).PLAIN_TYPES:
        return NULL
    _tables[type(source)] = <uintptr_t> table
    return table


cdef bint borrow_tensor(object source, dlpack.Tensor *tensor) except -1:
    """Describe an ordinary tensor: dense, contiguous, in host memory; False for others."""
    cdef const dlpack.ExchangeTable *table = table_of(source)
    if table == NULL:
        return False
    try:
        table.borrow(<void *> source, tensor)
    except (BufferError, RuntimeError, TypeError, ValueError):
        # Sparse, quantized, meta and so on: the tensor's library raises a precise error.
        return False
    if tensor.device.device_type not in (
        dlpack.DEVICE_CPU, dlpack.DEVICE_CUDA_HOST, dlpack.DEVICE_ROCM_HOST
    ):
        return False
    if not is_contiguous(tensor):
        return False
    # Wrapper subclasses have elements, but no memory of their own.
    if tensor.data == NULL and count_bytes(tensor) > 0:
        return False
    # DLPack cannot express lazy negation and conjugation.
    if source.is_neg():
        return False
    return not (tensor.dtype.code == dlpack.CODE_COMPLEX and source.is_conj())


cdef bint has_bytes(object storage, const char *address, Py_ssize_t nbytes) except -1:
    """Return whether the storage of a tensor has its bytes; not if it was resized."""
    cdef uintptr_t begin
    if nbytes == 0:
        return True
    begin = storage.data_ptr()
    return (<uintptr_t> address >= begin
            and <uintptr_t> address + nbytes <= begin + <size_t> storage.nbytes())


cdef bint acquire_tensor(Buffer buffer, object library) except -1:
    """Acquire an ordinary tensor; return False, and change nothing, for any other."""
    cdef dlpack.Tensor tensor
    cdef char *address
    source = buffer.source
    if not borrow_tensor(source, &tensor):
        return False
    address = <char *> tensor.data + tensor.byte_offset
    # Hold the storage, not the tensor, because set_() and `.data =` replace its storage.
    storage = source.untyped_storage()
    if not has_bytes(storage, address, count_bytes(&tensor)):
        return False
    buffer.watch(storage)
    buffer.address = address
    buffer.nbytes = count_bytes(&tensor)
    if buffer.writable:
        buffer.landing = library.touch
    mark_use(buffer, buffer.address)
    return True


cdef bint is_contiguous(const dlpack.Tensor *tensor) noexcept:
    """Return whether the elements of a tensor are in C order without gaps."""
    cdef int64_t expected = 1
    cdef int axis
    if tensor.strides == NULL:
        return True
    for axis in range(tensor.ndim):
        if tensor.shape[axis] == 0:
            return True
    for axis in range(tensor.ndim - 1, -1, -1):
        if tensor.shape[axis] != 1:
            if tensor.strides[axis] != expected:
                return False
            expected *= tensor.shape[axis]
    return True


cdef Py_ssize_t count_bytes(const dlpack.Tensor *tensor) noexcept:
    """Return the size of a contiguous tensor in bytes."""
    cdef Py_ssize_t count = (tensor.dtype.bits * tensor.dtype.lanes + 7) // 8
    cdef int axis
    for axis in range(tensor.ndim):
        count *= tensor.shape[axis]
    return count


cdef int acquire_export(Buffer buffer, object export) except -1:
    """Acquire the memory that the tensor's library exported."""
    buffer.address = <void *> <uintptr_t> export.address
    buffer.nbytes = export.nbytes
    buffer.owner = export.owner
    buffer.stage = export.stage
    buffer.watch(export.storage)
    if buffer.writable:
        buffer.landing = export.landing
    mark_use(buffer, <void *> <uintptr_t> export.origin)
    return 0


cdef void mark_use(Buffer buffer, void *origin) noexcept:
    """Count a use of the caller's memory, in case it belongs to the pool."""
    buffer.pooled = origin
    if origin != NULL:
        c_pool.pool_use(origin, 1)


cdef str describe(object source):
    """Return the name of an object's type, for a message."""
    kind = type(source)
    if kind.__module__ == "builtins":
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"
