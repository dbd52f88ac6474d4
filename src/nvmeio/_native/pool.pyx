"""Memory of the C library's pool as Python objects, and the marks of locked tensors.

What to make of the memory, an array or a tensor, is left to numpy.frombuffer() and
torch.frombuffer(), which keep the PoolMemory alive as long as any view of it.
"""

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

from nvmeio cimport libnvmeio
from nvmeio._native.settings cimport apply_settings
from nvmeio._native.errors cimport check
from nvmeio._arguments.checks import integer
from nvmeio._arguments.units import in_binary


# A cycle collector would empty `on_free` before __dealloc__ runs.
@cython.no_gc
@cython.final
cdef class PoolMemory:
    """PoolMemory(nbytes, *, lock=False, numa_node=None)
--

    Page-aligned, populated memory in huge pages where the kernel has them.

    Exports the buffer protocol: one dimension of writable unsigned bytes, which are not
    initialized.  With `lock` it is kept from being swapped out where RLIMIT_MEMLOCK allows;
    ``locked`` tells.  The constructor releases the GIL while the kernel provides the
    memory.  That goes back to the pool when this object dies; every export of it, and so
    every array or tensor made of it, keeps it alive.
    """

    cdef void *memory
    cdef readonly Py_ssize_t nbytes
    cdef object on_free      # called with the address before it goes back, or None
    cdef bint was_locked      # in the process that allocated it
    cdef uint32_t generation  # of that process; its forks inherit no locks

    def __cinit__(self, Py_ssize_t nbytes, *, bint lock=False, numa_node=None):
        cdef void *memory = NULL
        cdef int locked = 0
        cdef int error
        cdef int node = node_of(numa_node)
        self.memory = NULL
        if nbytes < 0:
            raise ValueError(f"nbytes must be 0 or more, not {nbytes}")
        apply_settings()
        with nogil:
            # The pool has no allocations of no bytes.
            error = libnvmeio.pool_alloc_on(node, nbytes or 1, lock, &memory, &locked)
        if error == -ENOMEM:
            if libnvmeio.pool_has_room(nbytes or 1):
                raise MemoryError(f"the system has not {nbytes} bytes for the pool")
            raise MemoryError(words_of_limit(nbytes))
        if error == -EINVAL:
            raise ValueError(f"numa_node is {node}, which this machine does not have")
        check(error)
        self.memory = memory
        self.nbytes = nbytes
        self.was_locked = locked
        self.generation = libnvmeio.fork_generation()

    def __dealloc__(self):
        cdef void *memory = self.memory
        # Who was told of the memory was told by the process that it is of.
        if self.on_free is not None and self.generation == libnvmeio.fork_generation():
            self.on_free(<uintptr_t> memory)
        if memory != NULL:
            with nogil:
                libnvmeio.pool_free(memory)

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.memory, self.nbytes, False, flags)

    def __repr__(self):
        locked = ", locked" if self.locked else ""
        return f"<PoolMemory of {self.nbytes} bytes at {self.address:#x}{locked}>"

    def call_before_free(self, function) -> None:
        """Have a function called with the address before the memory goes back.

        It is for who has told others of the memory; what it raises is reported and ignored.
        """
        self.on_free = function

    @property
    def address(self) -> int:
        """Where the memory begins."""
        return <uintptr_t>self.memory

    @property
    def locked(self) -> bool:
        """Whether the memory is locked; not in a forked child, which inherits no locks."""
        return self.was_locked and self.generation == libnvmeio.fork_generation()


cdef int node_of(object numa_node) except -2:
    """Return a NUMA node, -1 for any."""
    if numa_node is None:
        return -1
    node = integer("numa_node", numa_node)
    if not 0 <= node <= libnvmeio.POOL_NODE_MAX:
        raise ValueError(f"numa_node is {node}; it must be 0 to {libnvmeio.POOL_NODE_MAX}")
    return node


cdef str words_of_limit(Py_ssize_t nbytes):
    """Say why the pool may not have more memory."""
    stats = pool_stats()
    return (
        f"{in_binary(nbytes)} are more than the pool has left: it may hold "
        f"{in_binary(stats['bytes_limit'])} and holds {in_binary(stats['bytes_mapped'])}, "
        f"of which {in_binary(stats['bytes_used'])} are in use; NVMEIO_POOL_BYTES sets the "
        "limit"
    )


cpdef PoolMemory new_pinned(Py_ssize_t nbytes, object numa_node=None):
    """Get memory that is locked, if the system allows it, and marked as pinned."""
    cdef PoolMemory memory = PoolMemory(nbytes, lock=True, numa_node=numa_node)
    check(libnvmeio.pool_set_pinned(memory.memory, True))
    return memory


cpdef bint free_pinned(size_t address) except -1:
    """Take the mark from pinned memory, which goes back when its PoolMemory dies.

    Tells whether this call took it away.
    """
    cdef int changed = libnvmeio.pool_set_pinned(<void *>address, False)
    cdef int uses
    if changed == -EBUSY:
        uses = libnvmeio.pool_use(<void *>address, 0)
        advice = "1 request; wait for it" if uses < 2 else f"{uses} requests; wait for them"
        raise ValueError(f"the tensor is in use by {advice} first")
    return changed == 1


cpdef bint holds(size_t address) noexcept:
    """Tell whether memory is the pool's, handed out or not."""
    return libnvmeio.pool_holds(<void *>address)


cpdef bint is_pinned(size_t address, size_t nbytes) noexcept:
    """Tell whether memory lies in one piece of pinned memory."""
    return libnvmeio.pool_is_pinned(<void *>address, nbytes)


cpdef object address_of(object source):
    """Return where the memory of an object begins."""
    cdef Py_buffer view
    if not PyObject_CheckBuffer(source):
        return 0
    try:
        PyObject_GetBuffer(source, &view, PyBUF_STRIDES)
    except (BufferError, ValueError):
        # It has none to lend, or has given it back.
        return 0
    address = <uintptr_t> view.buf
    PyBuffer_Release(&view)
    return address


def pool_stats() -> dict[str, int]:
    """Count what the pool of this process holds and has done.

    Returns
    -------
    dict of str to int
        ``bytes_limit`` (of what may be mapped), ``bytes_mapped`` (taken from the system),
        ``bytes_hugetlb`` (mapped from hugetlbfs so far), ``bytes_used`` (of what is
        mapped handed out now, bounces included, in whole pages or huge pages),
        ``bytes_locked`` (of those, locked), ``allocations`` (so far), ``reuses`` (of
        them, from memory that was mapped before) and ``pools`` (1, or more where other
        parts of the process were linked with ``libnvmeio.a``: each has a pool of its own,
        with a limit of its own, and what is counted is the package's).

    Raises
    ------
    ValueError
        NVMEIO_POOL_BYTES, or another setting of the environment, makes no sense.

    Examples
    --------
    >>> before = nvmeio.pool_stats()["allocations"]
    >>> array = nvmeio.empty(1000)
    >>> nvmeio.pool_stats()["allocations"] - before
    1
    """
    cdef libnvmeio.nvmeio_pool_stats stats
    apply_settings()
    libnvmeio.pool_get_stats(&stats)
    return stats


def pool_trim() -> int:
    """Give the free memory of the pool back to the system.

    Returns
    -------
    int
        How many bytes that was.

    Notes
    -----
    The pool keeps what arrays, tensors and requests give back, because new memory takes
    time to populate: 1 GiB about 0.1 to 0.3 s.  Memory that is in use stays, with the rest
    of its huge page of 2 MiB.  Releases the GIL.  Requests that need memory of the pool
    wait meanwhile.

    See Also
    --------
    pool_stats : how much the pool has (``bytes_mapped``) and how much of it is in use.

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
        nbytes = libnvmeio.pool_trim()
    return nbytes
