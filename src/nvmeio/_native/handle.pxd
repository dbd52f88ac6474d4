from nvmeio._libnvmeio.c_base cimport nvmeio_op
from nvmeio._native.atomics cimport atomic_flag
from nvmeio._native.open_files cimport OpenFiles
from nvmeio._native.request cimport Request
from nvmeio._native.workers cimport Workers


cdef class Handle:
    """Starts and ends requests; owns the workers and the files in use."""

    cdef object __weakref__
    cdef dict options        # all options, for pickling and the properties
    cdef Workers core        # None before start()
    cdef OpenFiles files
    cdef object overlaps     # the checker of overlapping requests, or None
    cdef atomic_flag open

    # Start the workers.  Called once, with all options.
    cdef int start(self, dict options) except -1

    # Start a transfer or an fsync.  `waited_for`: the caller waits immediately, so this
    # thread may execute it.
    cdef Request begin(
        self, nvmeio_op op, object buffer, object file, object offset, bint waited_for,
        object after
    )
    # Start many transfers, or the records of a gather or scatter, as one request.
    cdef Request begin_many(self, nvmeio_op op, object items, object after)
    cdef Request begin_gather(
        self, nvmeio_op op, object file, object offsets, object sizes, object memory,
        object places, object max_gap, object result, bint waited_for, object after
    )

    cdef object option(self, str name)
    cdef Request launch(self, Request request, bint waited_for, object after)
    cdef object transfer(self, nvmeio_op op, object buffer, object file, object offset)

    # Raise if it was never opened or is closed; else finish requests that are done.
    cdef int require_open(self) except -1
    cdef int require_started(self) except -1


# Make a handle with exactly these options, of which `single_submit` is optional.
cdef Handle new_handle(dict options)
