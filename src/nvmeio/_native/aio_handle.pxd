from nvmeio.libnvmeio cimport nvmeio_op
from nvmeio._native.handle cimport Handle


cdef class aio_handle:
    """DeepSpeed's op on top of a Handle."""

    cdef object __weakref__
    cdef readonly Handle handle    # None before __init__()
    cdef readonly object last_error
    cdef dict contract      # the options that a Handle has not
    cdef list tracked       # requests of async_* that wait() waits for
    cdef unsigned generation  # of the process that `tracked` belongs to

    cdef int open(self, dict options, dict contract) except -1
    cdef int require_started(self) except -1
    cdef object now(
        self, nvmeio_op op, object buffer, object file, object offset, object validate,
        int done
    )
    cdef object later(
        self, nvmeio_op op, object buffer, object file, object offset, object validate
    )
    cdef list take_tracked(self)
    # The status of requests that are done, of which the first failure is raised.
    cdef object ended(self, list requests)
    # -1 for an error, which is logged and kept; or raise it.
    cdef object failed(self, object error)
