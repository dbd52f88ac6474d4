from libc.stdint cimport int64_t

from nvmeio.libnvmeio cimport nvmeio_handle


cdef class Workers:
    """The library's handle: workers at work, owned by one Python object."""

    cdef nvmeio_handle *c     # never NULL once made
    cdef set staged           # requests that Python moves on, piece by piece
    cdef object event_loops   # weak references of their watchers; None once stopped
    cdef unsigned generation  # of the process that both belong to

    # In a forked child, forget what is the parent's.
    cdef int own(self) except -1

    # Move on what Python moves on, and let go of the requests that are done, observed or
    # not.
    cpdef int collect(self) except -1

    # Wait until nothing is in flight, looking at signals; or until a monotonic time (-1:
    # never): then False.
    cdef bint drain_until(self, int64_t end_ns) except -1

    # Wait a few milliseconds for completions, when something else has run out.
    cdef int breathe(self) except -1

    # Wait for everything, and refuse what comes.  May be called again.
    cdef int stop(self) except -1
    cdef unsigned pending(self) except *
    cdef str engine(self)
    cdef dict stats(self)

    # How many blocks are in each bucket of the histogram, and the longest latencies there.
    cdef tuple latencies(self)


# Start workers as all options of a Handle say.
cdef Workers start_workers(dict options)
