"""Copy between arrays and tensors, with the C library's kernels on several threads.

This module has the only prange.  A wheel finds its threads by gomp.h instead.  If either
side is not contiguous, numpy or the tensors' library copies.  The C library chooses the
kernel.
"""

import numpy

from cpython.buffer cimport (
    PyBUF_C_CONTIGUOUS,
    PyBUF_WRITABLE,
    PyBuffer_Release,
    PyObject_CheckBuffer,
    PyObject_GetBuffer,
)
from cpython.type cimport PyType_IsSubtype
from libc.stdint cimport int64_t
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec
from cython.parallel cimport prange

from nvmeio._libnvmeio cimport c_copy, c_pool, c_system
from nvmeio._native cimport dlpack
from nvmeio._native.buffer cimport (
    Buffer,
    borrow_tensor,
    count_bytes,
    has_bytes,
    acquire,
    acquire_in_place,
    library_for,
)
from nvmeio._native.settings cimport apply_settings, threads_max

from nvmeio._memory.strides import check_sizes, may_overlap
from nvmeio._memory.registry import library_of, thread_limit
from nvmeio._arguments.checks import integer

_ndarray = numpy.ndarray
_dtype = numpy.dtype

cdef extern from "<stdatomic.h>" nogil:
    ctypedef struct atomic_size_t:
        pass
    ctypedef struct atomic_llong:
        pass
    long long load_number "atomic_load"(atomic_llong *)
    void store_number "atomic_store"(atomic_llong *, long long)
    void atomic_init(atomic_size_t *, size_t)
    size_t atomic_load(atomic_size_t *)
    size_t atomic_fetch_add(atomic_size_t *, size_t)

cdef extern from "nvmeio/_native/gomp.h" nogil:
    bint gomp_is_found()
    bint gomp_run(void (*work)(void *) noexcept nogil, void *job, int threads)
    int gomp_number()

cdef enum:
    TEAM_MAX = 4096

# What the members of a team share.
cdef struct Job:
    char *target
    const char *source
    size_t size
    size_t chunk
    int team
    # The index of the next chunk of each share.
    atomic_size_t following[TEAM_MAX]
    # When the leader, which is the calling thread, found no more chunks.
    int64_t worked

# Below this size the calling thread copies alone, because it finishes before others wake
# up, unless a copy has just ended: then they are still awake.
cdef Py_ssize_t ASLEEP_BYTES = 1 << 20
cdef int64_t AWAKE_NS = 200_000

# A team is late if its leader waits for the others longer than this, and than half of its
# own work: their processors are busy.  If that happens more often than not, copies of the
# next moment are not shared; the moment doubles up to the longest.
cdef int64_t LATE_NS = 50_000
cdef int64_t ALONE_NS_MIN = 10_000_000
cdef int64_t ALONE_NS_MAX = 1_000_000_000

# Threads take chunks one by one, so that a busy processor delays no more than one chunk.
cdef Py_ssize_t CHUNK_BYTES = 1 << 20
cdef Py_ssize_t CHUNK_BYTES_MIN = 1 << 17

# Waking another thread only pays if each thread gets at least this much.
cdef Py_ssize_t SHARE_BYTES_MIN = 1 << 18

# Below this size a copy takes microseconds.  It keeps the GIL, so that no other thread can
# free the memory, and needs no references of its own.
cdef Py_ssize_t NOGIL_BYTES = 1 << 19


def memcpy(dest, src, *, threads=None) -> None:
    """Copy all bytes of ``src`` into ``dest``.

    Parameters
    ----------
    dest, src : array, tensor or object with the buffer protocol
        Arrays of the same dtype and number of bytes, with any shape and strides.  Elements
        are copied in C order.  Plain memory, such as bytes, counts as uint8.
    threads : int, optional
        The most threads that may copy together, 1 to 4096; default: what affinity, the CPU
        quota of the control group, OMP_NUM_THREADS and ``torch.get_num_threads()`` allow.

    Raises
    ------
    TypeError
        The dtypes differ, or an argument is not an array of plain bytes in this process.
    ValueError
        The numbers of bytes differ, ``dest`` is read-only or its elements overlap, or
        ``threads`` is out of range.  No byte was copied.

    Notes
    -----
    If the two overlap in memory, the result is that of memmove(3).  Below 512 KiB, and in a
    forked child, the calling thread copies alone; so it does for a while after others came
    late, because processors are busy.  Releases the GIL from 512 KiB on.
    The environment variable ``NVMEIO_COPY`` (avx512, avx2, neon, portable or auto)
    selects the kernel; the first copy raises ValueError if this processor lacks it.  The
    padding between fields of a structured dtype is not always copied.

    Autograd sees an in-place change of ``dest``, as by ``copy_``, but without a gradient.
    torch itself copies tensors on devices.

    Examples
    --------
    >>> source, target = np.arange(1000), np.zeros(1000, np.int64)
    >>> nvmeio.memcpy(target, source)
    >>> int(target.sum())
    499500
    """
    cdef Buffer target = None
    cdef Buffer source = None
    cdef int team = 0 if threads is None else team_of(threads)
    apply_settings()
    if copy_arrays(dest, src, team) or copy_tensors(dest, src, team):
        return
    check_dtypes(dest, src)
    target = acquire_in_place(dest, True)
    source = acquire_in_place(src, False)
    if target is None or source is None:
        if copy_strided(dest, src):
            return
        target = acquire(dest, True) if target is None else target
        source = acquire(src, False) if source is None else source
    check_sizes(target.nbytes, source.nbytes)
    if target.stage is not None or source.stage is not None:
        copy_by_host(dest, src, target.stage is not None)
        return
    copy_bytes(target.address, source.address, target.nbytes, team)
    target.land()
    target.release()
    source.release()


cdef bint copy_arrays(object dest, object src, int team) except -1:
    """Copy between two plain arrays of one dtype.

    Return False for anything else, which the general path copies or refuses.
    """
    cdef Py_buffer target, source
    cdef bint copied
    if type(dest) is not _ndarray or type(src) is not _ndarray:
        return False
    if dest.dtype is not src.dtype or dest.dtype.hasobject:
        return False
    try:
        PyObject_GetBuffer(dest, &target, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE)
    except (BufferError, ValueError):
        return False
    try:
        PyObject_GetBuffer(src, &source, PyBUF_C_CONTIGUOUS)
    except (BufferError, ValueError):
        PyBuffer_Release(&target)
        return False
    copied = target.len == source.len
    try:
        if copied:
            copy_bytes(target.buf, source.buf, target.len, team)
    finally:
        PyBuffer_Release(&target)
        PyBuffer_Release(&source)
    return copied


cdef bint copy_tensors(object dest, object src, int team) except -1:
    """Copy between two ordinary tensors of one dtype; return False for anything else."""
    cdef dlpack.Tensor target, source
    cdef char *to
    cdef char *of
    cdef Py_ssize_t nbytes
    # Two tensors are of one library if one's type derives from the other's (Parameter and
    # Tensor).
    if not PyType_IsSubtype(type(src), type(dest)):
        if not PyType_IsSubtype(type(dest), type(src)):
            return False
    if not borrow_tensor(dest, &target):
        return False
    nbytes = count_bytes(&target)
    if not borrow_tensor(src, &source):
        return False
    if count_bytes(&source) != nbytes or target.dtype.code != source.dtype.code:
        return False
    if target.dtype.bits != source.dtype.bits or target.dtype.lanes != source.dtype.lanes:
        return False
    to = <char *> target.data + target.byte_offset
    of = <char *> source.data + source.byte_offset
    if nbytes < NOGIL_BYTES:
        c_copy.copy(to, of, nbytes)
    else:
        # Hold the storages, not the tensors, because set_() replaces a tensor's storage.
        held = (dest.untyped_storage(), src.untyped_storage())
        if not has_bytes(held[0], to, nbytes) or not has_bytes(held[1], of, nbytes):
            return False
        c_pool.pool_use(to, 1)
        c_pool.pool_use(of, 1)
        try:
            copy_bytes(to, of, nbytes, team)
        finally:
            c_pool.pool_use(to, -1)
            c_pool.pool_use(of, -1)
            del held
    library_for(dest).touch(dest)
    return True


cdef int team_of(object threads) except -1:
    """Check ``threads``, and return it."""
    count = integer("threads", threads)
    if not 1 <= count <= TEAM_MAX:
        raise ValueError(f"threads is {count}; it must be from 1 to {TEAM_MAX}")
    return count


cdef int check_dtypes(object dest, object src) except -1:
    """Raise TypeError if the two dtypes differ."""
    if type(dest) is type(src):
        ours = getattr(dest, "dtype", None)
        if ours is not None and ours is getattr(src, "dtype", None):
            return 0
    ours, theirs = dtype_of(dest), dtype_of(src)
    if ours is None or theirs is None:
        return 0
    if isinstance(ours, _dtype) and isinstance(theirs, _dtype) and ours == theirs:
        # Their texts may differ: only one need be aligned.
        return 0
    # Equivalent dtypes of numpy and torch have the same name.
    if str(ours).removeprefix("torch.") != str(theirs).removeprefix("torch."):
        raise TypeError(
            f"cannot copy elements of {theirs} into elements of {ours}; pass views of one "
            "dtype, or convert src first"
        )
    return 0


cdef object dtype_of(object source):
    """Return the dtype of an array, a tensor or plain memory; None for anything else."""
    if isinstance(source, _ndarray) or library_of(source) is not None:
        return source.dtype
    if not PyObject_CheckBuffer(source):
        return None
    view = memoryview(source)
    try:
        return numpy.asarray(view).dtype
    except (ValueError, NotImplementedError):
        # numpy has no dtype for these elements.
        return view.format


cdef bint copy_strided(object dest, object src) except -1:
    """Copy with numpy or the tensors' library; return False if they share none."""
    if isinstance(dest, _ndarray) and isinstance(src, _ndarray):
        check_sizes(dest.nbytes, src.nbytes)
        # acquire() raises the right error for masked arrays, arrays of objects, and
        # arrays that overlap themselves.
        if type(dest) is not _ndarray or type(src) is not _ndarray or dest.dtype.hasobject:
            return False
        if dest.size > 0 and may_overlap(dest.shape, dest.strides, dest.itemsize):
            return False
        numpy.copyto(dest, src.reshape(dest.shape))
        return True
    library = library_of(dest)
    if library is None or library is not library_of(src):
        return False
    library.copy(dest, src)
    return True


cdef int copy_by_host(object dest, object src, bint to_device) except -1:
    """Copy between a device tensor and host memory, through a tensor in host memory."""
    tensor = dest if to_device else src
    library = library_of(tensor)
    host = library.host_like(tensor)
    if to_device:
        memcpy(host, src)
        library.copy(tensor, host)
    else:
        library.copy(host, tensor)
        memcpy(dest, host)
    return 0


def has_threads() -> bool:
    """Return whether a copy may use several threads: whether there is OpenMP."""
    return gomp_is_found()


# When the last copy of some size ended, and until when none is shared.
cdef atomic_llong _ended_ns
cdef atomic_llong _alone_until_ns
# How often a team was late, less how often one was not.
cdef atomic_llong _late


cdef int64_t now_ns() noexcept nogil:
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return now.tv_sec * <int64_t> 1_000_000_000 + now.tv_nsec


cdef int copy_bytes(void *target, void *source, Py_ssize_t size, int team) except -1:
    """Copy with up to `team` threads; 0: as many as this process may use."""
    if size < NOGIL_BYTES:
        c_copy.copy(target, source, size)
        return 0
    if not is_shared(size) or c_copy.copy_overlaps(target, source, size):
        team = 1
    else:
        team = min(team or threads_wanted(), size // SHARE_BYTES_MIN, TEAM_MAX)
        team = c_system.team_size(team)
    with nogil:
        if team == 1:
            c_copy.copy(target, source, size)
        else:
            copy_parallel(<char *> target, <char *> source, size, team)
        store_number(&_ended_ns, now_ns())
    return 0


cdef bint is_shared(Py_ssize_t size) noexcept nogil:
    """Return whether a team would copy this faster than one thread."""
    cdef int64_t now = now_ns()
    if now < load_number(&_alone_until_ns):
        return False
    return size >= ASLEEP_BYTES or now - load_number(&_ended_ns) < AWAKE_NS


cdef void judge(int64_t begun, int64_t worked, int64_t ended) noexcept nogil:
    """Note whether the leader of a team, which had worked until then, waited for it."""
    cdef int64_t late = load_number(&_late)
    cdef int64_t alone = ALONE_NS_MIN
    if ended - worked <= max(LATE_NS, (worked - begun) // 2):
        store_number(&_late, max(0, late - 1))
        return
    store_number(&_late, late + 1)
    if late > 0:
        alone <<= min(late - 1, 10)
        store_number(&_alone_until_ns, ended + min(alone, ALONE_NS_MAX))


cdef int threads_wanted() except -1:
    """Return how many threads this process may use."""
    limit = thread_limit()
    if limit == 1 or threads_max() == 1:
        return 1
    cdef int count = c_system.cpu_count()
    if threads_max() > 0:
        count = min(count, threads_max())
    return count if limit is None else max(1, min(count, limit))


cdef void copy_parallel(
    char *target, const char *source, Py_ssize_t size, int team
) noexcept nogil:
    """Copy chunk by chunk: each thread its own share, then chunks that others have left.

    Fixed shares help a repeated copy: a thread finds its share in its processor's cache.
    """
    cdef Py_ssize_t chunk = min(CHUNK_BYTES, max(CHUNK_BYTES_MIN, size // (8 * team)))
    cdef int64_t begun = now_ns()
    cdef int member
    cdef Job job
    job.target, job.source, job.size, job.team = target, source, size, team
    # In aligned memory, chunks then end at page boundaries, so threads share no cache line.
    job.chunk = chunk - chunk % 4096
    job.worked = begun
    for member in range(team):
        atomic_init(&job.following[member], share_start(&job, member))
    # Only this call: if anything here could raise, each thread would acquire the GIL.
    if not gomp_run(copy_as_member, &job, team):
        for member in prange(team, schedule="static", num_threads=team):
            copy_shares(&job, member)
    judge(begun, job.worked, now_ns())


cdef void copy_as_member(void *job) noexcept nogil:
    copy_shares(<Job *> job, gomp_number())


cdef size_t share_start(Job *job, int share) noexcept nogil:
    """Return the index of a share's first chunk."""
    return (job.size + job.chunk - 1) // job.chunk * share // job.team


cdef void copy_shares(Job *job, int member) noexcept nogil:
    """Copy chunks that no thread has taken, beginning with the member's own share."""
    cdef size_t at, end
    cdef int step, share
    for step in range(job.team):
        share = (member + step) % job.team
        end = share_start(job, share + 1)
        # A plain load first: it leaves the counters of finished shares in all caches.
        while atomic_load(&job.following[share]) < end:
            at = atomic_fetch_add(&job.following[share], 1) * job.chunk
            if at < end * job.chunk:
                c_copy.copy_part(
                    job.target + at, job.source + at,
                    min(job.chunk, job.size - at), job.size,
                )
    if member == 0:
        job.worked = now_ns()
