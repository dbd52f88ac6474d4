from nvmeio.libnvmeio cimport nvmeio_op
from nvmeio._native.open_files cimport OpenFiles
from nvmeio._native.request cimport Request
from nvmeio._native.workers cimport Workers


cdef class Handle:
    """Workers and the files that are in use, and what starts and ends requests."""

    cdef object __weakref__
    cdef dict options        # all of them, for pickling and the properties
    cdef Workers core        # None before start()
    cdef OpenFiles files
    cdef object overlaps     # what looks for overlapping requests, or None
    cdef bint open

    # Called once, with all options.
    cdef int start(self, dict options) except -1

    # Start a transfer or an fsync; `waited_for`: at once, so that it may be done already.
    cdef Request begin(
        self, nvmeio_op op, object buffer, object file, object offset, bint validate,
        bint waited_for, object after
    )
    # Start many transfers, or the records of a gather or scatter, as one request.
    cdef Request begin_many(self, nvmeio_op op, object items, object after)
    cdef Request begin_gather(
        self, nvmeio_op op, object file, object offsets, object sizes, object memory,
        object places, object max_gap, object result, object after
    )

    cdef object option(self, str name)
    cdef Request launch(self, Request request, bint waited_for, object after)
    cdef object transfer(self, nvmeio_op op, object buffer, object file, object offset)

    # Raise where it was never opened or is closed; else let go of what is done.
    cdef int require_open(self) except -1
    cdef int require_started(self) except -1


# A handle with all options as they are, those of DeepSpeed's contract alone included.
cdef Handle new_handle(dict options)
