"""Apply the environment's settings to this process: the copy kernel and the pool's limits.

The C library does not read the environment.  The settings are applied once, on first need.
LIMITS has the limits of a handle's options, which the C library defines.
"""

import errno
import os

from nvmeio._libnvmeio cimport c_base, c_copy, c_pool

from nvmeio._arguments.units import size_of

# The largest value of each number; the smallest is 1.
LIMITS = {
    "block_size": c_base.BLOCK_BYTES_MAX,
    "queue_depth": c_base.QUEUE_DEPTH_MAX,
    "workers": c_base.WORKERS_MAX,
}

# A smaller limit would not hold a single huge page.
cdef object _POOL_BYTES_MIN = 2 << 20

cdef bint _applied = False
cdef int _threads_max = 0


cdef int apply_settings() except -1:
    global _applied, _threads_max
    if not _applied:
        select_kernel(os.environ.get("NVMEIO_COPY") or "auto")
        _threads_max = threads_of(os.environ.get("OMP_NUM_THREADS", ""))
        set_pool(
            os.environ.get("NVMEIO_POOL_BYTES"), os.environ.get("NVMEIO_POOL_HUGETLB")
        )
        _applied = True
    return 0


cdef int threads_max() noexcept:
    return _threads_max


cdef int threads_of(str text) except -1:
    """Return the outermost level's number in OMP_NUM_THREADS; 0 if there is none."""
    first = text.partition(",")[0].strip()
    # OpenMP ignores a value that it cannot parse, and so do we.
    return min(int(first), 4096) if first.isdecimal() else 0


cdef int set_pool(str limit, str hugetlb) except -1:
    """Set the pool's limit, and whether it takes memory from hugetlb pages."""
    if limit:
        c_pool.pool_set_limit(size_of("NVMEIO_POOL_BYTES", limit, _POOL_BYTES_MIN))
    if hugetlb and hugetlb not in ("0", "1"):
        raise ValueError(f"NVMEIO_POOL_HUGETLB is {hugetlb!r}; it must be 0 or 1")
    c_pool.pool_set_hugetlb(hugetlb == "1")
    return 0


cdef int select_kernel(str name) except -1:
    """Select the kernel for all copies; raise ValueError if it is unknown or unusable."""
    cdef bytes encoded = name.encode()
    cdef int error = c_copy.copy_select(encoded)
    if error == 0:
        return 0
    known = {**kernels(), "auto": True}
    if error == -errno.ENOTSUP:
        usable = ", ".join(kernel for kernel, works in known.items() if works)
        raise ValueError(
            f"NVMEIO_COPY is {name!r}, which this processor lacks; it has {usable}"
        )
    raise ValueError(f"NVMEIO_COPY is {name!r}; it must be one of {', '.join(known)}")


cpdef dict kernels():
    """Return the names of the copy kernels, each with whether this processor can run it."""
    cdef int works = 0
    cdef unsigned index = 0
    cdef const char *name = c_copy.copy_kernel_at(index, &works)
    found = {}
    while name != NULL:
        found[name.decode()] = works != 0
        index += 1
        name = c_copy.copy_kernel_at(index, &works)
    return found


cpdef list selected_kernels():
    """Return the names of two kernels: the one for small copies and the one for large."""
    cdef const char *small
    cdef const char *large
    c_copy.copy_selected(&small, &large)
    return [small.decode(), large.decode()]
