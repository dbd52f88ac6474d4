"""Settings of the process that the environment gives: the copy kernel, threads of a copy.

The C library reads no environment.  They are made when they are first needed, and once.
"""

import errno
import os

from nvmeio cimport _core

cdef bint _applied = False
cdef int _threads_max = 0


cdef int apply_settings() except -1:
    global _applied, _threads_max
    if not _applied:
        select_kernel(os.environ.get("NVMEIO_COPY") or "auto")
        _threads_max = threads_of(os.environ.get("OMP_NUM_THREADS", ""))
        _applied = True
    return 0


cdef int threads_max() noexcept:
    return _threads_max


cdef int threads_of(str text) except -1:
    """Return what OMP_NUM_THREADS says of the outermost level; 0 where it says nothing."""
    first = text.partition(",")[0].strip()
    # OpenMP ignores what it cannot read, and so do we.
    return min(int(first), 4096) if first.isdecimal() else 0


cdef int select_kernel(str name) except -1:
    """Choose the kernel of all copies, or say why it cannot be."""
    cdef bytes encoded = name.encode()
    cdef int error = _core.copy_select(encoded)
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
    """Return the copy kernels by name, and whether this processor can run each."""
    cdef int works = 0
    cdef unsigned index = 0
    cdef const char *name = _core.copy_kernel_at(index, &works)
    found = {}
    while name != NULL:
        found[name.decode()] = works != 0
        index += 1
        name = _core.copy_kernel_at(index, &works)
    return found


cpdef list selected_kernels():
    """Return the names of the kernels in use for small copies and for large ones."""
    cdef const char *small
    cdef const char *large
    _core.copy_selected(&small, &large)
    return [small.decode(), large.decode()]
