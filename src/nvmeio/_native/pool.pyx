"""Memory of the C library's pool as Python objects, and pinned arrays and tensors of it.

numpy.frombuffer() and torch.frombuffer() make arrays and tensors of it, and keep the
PoolMemory alive as long as any view exists.
"""

import sys

import numpy

cimport cython
from cpython.buffer cimport (
    PyBUF_STRIDES,
    PyBuffer_FillInfo,
    PyBuffer_Release,
    PyObject_CheckBuffer,
    PyObject_GetBuffer,
)
from libc.errno cimport EBUSY, EINVAL, ENOMEM
from libc.stdint cimport uint32_t, uint64_t, uintptr_t

from nvmeio._libnvmeio cimport c_base, c_pool
from nvmeio._native.settings cimport apply_settings
from nvmeio._native.errors cimport check
from nvmeio._arguments.checks import flag, integer
from nvmeio._arguments.units import in_binary
from nvmeio._memory import available
from nvmeio._memory.registry import libraries as _libraries
from nvmeio._memory.registry import library_of


# A cycle collector would empty `on_free` before __dealloc__ runs.
@cython.no_gc
@cython.final
cdef class PoolMemory:
    """PoolMemory(nbytes, *, lock=False, numa_node=None)
--

    Page-aligned, populated memory from the pool, in huge pages where the kernel has them.

    Exports the buffer protocol: one dimension of writable unsigned bytes, not initialized.
    With `lock` the memory cannot be swapped out, if RLIMIT_MEMLOCK permits; ``locked``
    says whether it did.  The constructor releases the GIL while the kernel provides the
    memory.  The memory returns to the pool when this object dies.  Every export, and so
    every array or tensor made of it, keeps this object alive.
    """

    cdef void *memory
    cdef readonly Py_ssize_t nbytes
    cdef object on_free      # called with the address before the memory is freed, or None
    cdef bint was_locked      # in the process that allocated it
    cdef uint32_t generation  # fork_generation() of that process; forks inherit no locks

    def __cinit__(self, Py_ssize_t nbytes, *, bint lock=False, numa_node=None):
        cdef void *memory = NULL
        cdef int locked = 0
        cdef int error
        cdef int node = node_of(numa_node)
        self.memory = NULL
        if nbytes < 0:
            raise ValueError(f"nbytes is {nbytes}; it must be 0 or more")
        apply_settings()
        with nogil:
            # The pool cannot allocate 0 bytes.
            error = c_pool.pool_alloc_on(node, nbytes or 1, lock, &memory, &locked)
        if error == -ENOMEM:
            if c_pool.pool_has_room(nbytes or 1):
                raise MemoryError(f"out of memory: the system has no {nbytes} bytes left")
            raise MemoryError(words_of_limit(nbytes))
        if error == -EINVAL:
            raise ValueError(f"numa_node is {node}, which this machine does not have")
        check(error)
        self.memory = memory
        self.nbytes = nbytes
        self.was_locked = locked
        self.generation = c_base.fork_generation()

    def __dealloc__(self):
        cdef void *memory = self.memory
        try:
            # Only the process that allocated the memory has registered it elsewhere.
            if self.on_free is not None and self.generation == c_base.fork_generation():
                self.on_free(<uintptr_t> memory)
        finally:
            if memory != NULL:
                with nogil:
                    c_pool.pool_free(memory)

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.memory, self.nbytes, False, flags)

    def __repr__(self):
        locked = ", locked" if self.locked else ""
        return f"<PoolMemory of {self.nbytes} bytes at {self.address:#x}{locked}>"

    def call_before_free(self, function) -> None:
        """Call a function with the address before the memory is freed.

        For code that registered the memory elsewhere.  Python reports and ignores what the
        function raises.
        """
        self.on_free = function

    @property
    def address(self) -> int:
        """The address of the first byte."""
        return <uintptr_t>self.memory

    @property
    def locked(self) -> bool:
        """Whether the memory is locked; never in a forked child, which inherits no lock."""
        return self.was_locked and self.generation == c_base.fork_generation()


cdef int node_of(object numa_node) except -2:
    """Check ``numa_node``, and return it; -1 for any node."""
    if numa_node is None:
        return -1
    node = integer("numa_node", numa_node)
    if not 0 <= node <= c_pool.POOL_NODE_MAX:
        raise ValueError(f"numa_node is {node}; it must be 0 to {c_pool.POOL_NODE_MAX}")
    return node


cdef str words_of_limit(Py_ssize_t nbytes):
    """Return the message for an allocation beyond the pool's limit."""
    stats = pool_stats()
    return (
        f"{in_binary(nbytes)} do not fit into the pool: its limit is "
        f"{in_binary(stats['bytes_limit'])}, of which {in_binary(stats['bytes_mapped'])} "
        f"are mapped and {in_binary(stats['bytes_used'])} in use; NVMEIO_POOL_BYTES sets "
        "the limit"
    )


cpdef PoolMemory new_pinned(Py_ssize_t nbytes, object numa_node=None):
    """Allocate memory that is marked as pinned, and locked if the system permits it."""
    cdef PoolMemory memory = PoolMemory(nbytes, lock=True, numa_node=numa_node)
    check(c_pool.pool_set_pinned(memory.memory, True))
    return memory


cpdef bint free_pinned(size_t address) except -1:
    """Unmark pinned memory, which returns to the pool when its PoolMemory dies.

    Return whether the memory was marked.
    """
    cdef int changed = c_pool.pool_set_pinned(<void *>address, False)
    cdef int uses
    if changed == -EBUSY:
        uses = c_pool.pool_use(<void *>address, 0)
        advice = "1 request; wait for it" if uses < 2 else f"{uses} requests; wait for them"
        raise ValueError(f"the tensor is in use by {advice} first")
    return changed == 1


cpdef bint holds(size_t address) noexcept:
    """Return whether memory belongs to the pool, allocated or free."""
    return c_pool.pool_holds(<void *>address)


cpdef bint is_pinned(size_t address, size_t nbytes) noexcept:
    """Return whether memory is inside a single allocation that is marked as pinned."""
    return c_pool.pool_is_pinned(<void *>address, nbytes)


cpdef object address_of(object source):
    """Return the address of an object's memory; 0 if it exports none."""
    cdef Py_buffer view
    if not PyObject_CheckBuffer(source):
        return 0
    try:
        PyObject_GetBuffer(source, &view, PyBUF_STRIDES)
    except (BufferError, ValueError):
        # The object refuses to export its memory, or has released it.
        return 0
    address = <uintptr_t> view.buf
    PyBuffer_Release(&view)
    return address


def pool_stats() -> dict:
    """Return the memory and the counters of this process's pool.

    Returns
    -------
    dict of str to int
        ``bytes_limit``
            The most that the pool may map.
        ``bytes_mapped``
            Memory mapped now, used and free.
        ``bytes_hugetlb``
            Memory mapped from hugetlbfs so far.
        ``bytes_used``
            The part of ``bytes_mapped`` that is allocated now, bounce buffers included, in
            whole pages or huge pages.
        ``bytes_locked``
            The part of ``bytes_used`` that is locked.
        ``allocations``
            The number of allocations so far.
        ``reuses``
            How many of them used memory that was mapped before.

    Raises
    ------
    ValueError
        ``NVMEIO_POOL_BYTES`` or another environment variable has an invalid value.

    Examples
    --------
    >>> before = nvmeio.pool_stats()["allocations"]
    >>> array = nvmeio.empty(1000)
    >>> nvmeio.pool_stats()["allocations"] - before
    1
    """
    cdef c_pool.nvmeio_pool_stats stats
    apply_settings()
    c_pool.pool_get_stats(&stats)
    return stats


def pool_trim() -> int:
    """Return the pool's free memory to the system.

    Returns
    -------
    int
        The number of bytes returned.

    Notes
    -----
    The pool keeps the memory that arrays, tensors and requests free, because populating new
    memory takes time: about 0.1 to 0.3 s per GiB.  A huge page of 2 MiB stays if any part
    of it is in use.  nvmeio does the same before it raises MemoryError.  Releases the GIL.
    Requests that need memory of the pool wait meanwhile.

    See Also
    --------
    pool_stats : How much memory the pool has mapped, and how much of it is in use.

    Examples
    --------
    >>> array = nvmeio.empty(1 << 22)
    >>> del array
    >>> freed = nvmeio.pool_trim()
    >>> nvmeio.pool_stats()["bytes_mapped"] == nvmeio.pool_stats()["bytes_used"]
    True
    """
    cdef uint64_t nbytes
    with nogil:
        nbytes = c_pool.pool_trim()
    return nbytes


def require_available(nbytes, what):
    """Raise MemoryError if fewer bytes are available, before allocating any.

    The pool's free memory is returned to the system if that is needed.
    """
    free = available.available_bytes()
    if nbytes > free and pool_trim():
        free = available.available_bytes()
    if nbytes > free:
        raise MemoryError(
            f"{what} needs {in_binary(nbytes)} of memory, and {in_binary(free)} are free"
        )


def new_locked(num_elem, example):
    """Allocate a locked array or tensor; see ``aio_handle.new_cpu_locked_tensor``."""
    count = integer("num_elem", num_elem)
    if count < 0:
        raise ValueError(f"num_elem is {count}; it must be 0 or more")
    if not isinstance(example, numpy.ndarray):
        library = library_of(example)
        if library is None:
            raise TypeError(
                "example_tensor must be a tensor or a numpy array, not "
                f"{type(example).__qualname__}"
            )
        return library.locked_tensor(count, example)
    if example.dtype.hasobject:
        raise TypeError(f"an array of dtype {example.dtype} holds Python objects")
    # An empty array gets an allocation too, so that it can be freed once like any other.
    memory = pool_memory(max(count, 1) * example.dtype.itemsize, True, None)
    return numpy.frombuffer(memoryview(memory), dtype=example.dtype)[:count]


def free_locked(tensor):
    """Free a locked array or tensor; see ``aio_handle.free_cpu_locked_tensor``."""
    library = library_of(tensor)
    address = address_of(tensor) if library is None else library.first_address(tensor)
    return free_pinned(address)


def is_locked(buffer):
    """Return whether memory is pinned; see ``aio_handle.is_pinned``."""
    library = library_of(buffer)
    # A view never extends beyond its allocation, so checking its first byte is enough.
    return (
        is_pinned(address_of(buffer), 1)
        if library is None
        else library.is_pinned(buffer)
    )


def pool_memory(nbytes, pin_memory, numa_node):
    """Allocate memory from the """
    if nbytes > sys.maxsize:
        raise MemoryError(f"cannot allocate {nbytes} bytes; the limit is {sys.maxsize}")
    if not flag("pin_memory", pin_memory):
        return PoolMemory(nbytes, numa_node=numa_node)
    memory = new_pinned(nbytes, numa_node=numa_node)
    for _, library in _libraries:
        library.announce(memory)
    return memory
