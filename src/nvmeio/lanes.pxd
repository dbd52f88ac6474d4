from nvmeio._core cimport nvmeio_handle


cdef class Lanes:
    """The library's handle: lanes at work, owned by one Python object."""

    cdef nvmeio_handle *c  # never NULL once made

    # Let go of the requests that are done, observed or not, and return them.
    cdef list collect(self)

    # Wait until nothing is in flight, looking at signals.
    cdef int drain(self) except -1

    # Wait a few milliseconds for completions, when something else has run out.
    cdef int breathe(self) except -1

    # Wait for everything, and refuse what comes.  May be called again.
    cdef int stop(self) except -1
    cdef unsigned pending(self) except *
    cdef str engine(self)
    cdef dict stats(self)


# Start lanes as the options of aio_handle say.
cdef Lanes start_lanes(dict options)
